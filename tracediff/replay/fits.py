"""Which of the roundings that engines really use fits the ops of a trace."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from tracediff.errors import EngineError
from tracediff.model.graph import Graph
from tracediff.model.weights import Weights
from tracediff.names import layer_of, split
from tracediff.numerics.arithmetic import (
    PLAIN,
    SHARED_BEYOND,
    TILED_FROM,
    UBATCH,
    Arithmetic,
    Scheme,
    split_keys,
)
from tracediff.numerics.evaluate import arithmetic_of, rows_fit
from tracediff.numerics.roundings import rounding_named
from tracediff.replay.recorded import Recorded
from tracediff.result import Local
from tracediff.trace.format import OpRecord

# A floor beyond this hides everything, but that next to nothing is left: no verdict is better than a blind one.
BLIND, NARROW = 0.05, 1e-9
_TOGETHER = 3  # records of a sort that choose its scheme: one mistake is outvoted
# A scheme that fits needs no rival where its floor is narrow, as float32's, or where it leaves so little of its floor.
_SURE = 0.01
# Of the squared error: the right rounding may leave half, where the few values that turn have turned many after them.
# It leaves far less as a rule, and must in one record where no rounding fits the same op in another step: there is a
# mistake about.
_CLEARLY_LESS, _FAR_LESS = 0.7, 0.1
# What an engine rounds takes it as far from the plain values as the same rounding takes replay, d. Through 32 layers of
# llama.cpp's the squared distance was 0.55 to 2.8 times d in one record, in the mean of three 0.7 to 1.7 times. By then
# most roundings have turned some other way: the right one left up to 1.6 times what the plain arithmetic leaves.
_AS_FAR, _AS_FAR_ALONE, _AS_FAR_TOGETHER, _DROWNED = 5.0, 3.0, 2.0, 1.6
_LOOK = 1 << 14  # values looked at before the others: most that are longer than float16 show at once
# So many values that all fit a shorter type do not by chance: 2^-13 to the power of it for float16; 2^-29 for float32.
_MANY, _MANY_LONG = 64, 8
Sort = tuple[str, ...]
Look = Callable[[OpRecord, Scheme], Local]  # what a scheme leaves of a record
Apart = Callable[[OpRecord, Scheme, Scheme], float]  # NMSE of the record's op under one scheme against another


class Fits:
    """What fitted so far. Ops of one sort are computed alike: the fit of one is tried first on the next.

    The floors of single ops are narrow: what passes fits. Those of segments may be wide enough for a mistake, so the
    scheme of a sort of segments is chosen from several of its records together, before any of them is judged.
    """

    def __init__(self, recorded: Recorded, graph: Graph, weights: Weights, schemes: Sequence[Scheme]) -> None:
        self._recorded = recorded
        self._graph = graph
        self._weights = weights
        self._schemes = schemes
        self._of_sort: dict[Sort, Scheme] = {}
        self._doubtful: dict[Sort, list[Scheme]] = {}  # segments that no scheme fits: what to try on them
        self._drowned: set[Sort] = set()

    def is_segment(self, record: OpRecord) -> bool:
        """Whether inputs of the record must be recomputed."""
        return not all(self._recorded.holds_inputs(self._graph[record.op], record))

    def candidates(self, record: OpRecord) -> Iterator[Scheme]:
        """Schemes to try: the one that fitted the last op of this sort, then all that differ for this op.

        Raises EngineError where the op's rows cannot be rounded as the only scheme says.
        """
        op, sort = self._graph[record.op], self._sort(record)
        first = [self._of_sort[sort]] if sort in self._of_sort else []
        covered = tuple(self._graph) if self.is_segment(record) else (op,)
        tried: set[tuple[Arithmetic, ...]] = set()
        for scheme in (*first, *self._schemes):
            if len(self._schemes) > 1 and not self._sums_so(record, scheme.values):
                continue
            arithmetics = tuple(arithmetic_of(o, scheme, self._weights) for o in covered)
            fit = (rows_fit(o, a, self._graph.hparams.head_dim) for o, a in zip(covered, arithmetics, strict=True))
            if arithmetics not in tried and all(fit):
                tried.add(arithmetics)
                yield scheme
        if not tried:
            raise EngineError(
                f"{op.name} cannot be recomputed in the arithmetic {self._schemes[0].name!r}: this model has rows that "
                "are no multiples of its blocks. Leave --arithmetic out, or name another."
            )

    def likely(self, record: OpRecord) -> list[Scheme]:
        """Schemes to try a hypothesis under: the one that fits other ops of the record's sort; else the one that
        fits most of its kind, then all others.
        """
        op, sort = self._graph[record.op], self._sort(record)
        if sort in self._of_sort:
            return [self._of_sort[sort]]
        kin = Counter(fit for other, fit in self._of_sort.items() if other[0] in (op.kind, split(op.name)[1]))
        return [*(scheme for scheme, _ in kin.most_common(1)), *self.candidates(record)]

    def plain_ones(self, record: OpRecord) -> list[Scheme]:
        """Of a segment that no scheme fits the one that leaves least, and those that most engines have; else none."""
        return self._doubtful.get(self._sort(record), [])

    def is_drowned(self, record: OpRecord) -> bool:
        """Whether the record is a segment whose roundings cannot be told from a mistake of their size."""
        return self._sort(record) in self._drowned

    def of_segment(self, record: OpRecord, look: Look, apart: Apart) -> Scheme:
        """The scheme of all segments of the record's sort."""
        sort = self._sort(record)
        if sort not in self._of_sort:
            mistaken = any(split(record.op)[1] == other[0] for other in self._doubtful)
            found = self._best(self._alike(sort), look, apart, mistaken)
            self._of_sort[sort] = found.scheme
            if found.drowned:
                self._drowned.add(sort)
            elif not found.fits:
                self._doubtful[sort] = [s for s in self.candidates(record) if s == found.scheme or s in PLAIN]
        return self._of_sort[sort]

    def of_one_segment(self, record: OpRecord, look: Look, apart: Apart, hypothesis: bool = True) -> "Found":
        """The scheme of a segment by itself, of one under a hypothesis for example: nothing is remembered."""
        return self._best([record], look, apart, mistaken=not hypothesis, hypothesis=hypothesis)

    def _best(
        self, records: list[OpRecord], look: Look, apart: Apart, mistaken: bool = False, hypothesis: bool = False
    ) -> "Found":
        """The scheme that leaves least of these records, and whether it fits most of them.

        One with a wider floor must leave clearly less: what an engine does not do adds an error, which the other
        errors have no part in, so it leaves more. Where a mistake is about it must leave far less of one record.
        Where nothing fits so, the roundings of a deep segment may have drowned: one of llama.cpp's fits that is as
        far from the plain values as the engine is.
        """

        def tried_on(scheme: Scheme) -> _Tried:
            return _Tried(scheme, [look(record, scheme) for record in records])

        def best_of(tried: list[_Tried]) -> _Tried:
            tried.sort(key=lambda one: one.decade)  # in the schemes' order where they are alike
            return reduce(partial(_better, mistaken=mistaken), tried)

        @cache  # a forward pass of the segment, and asked twice where nothing fits
        def far(at: int, scheme: Scheme) -> float:
            return apart(records[at], narrowest.scheme, scheme)

        candidates = [*self.candidates(records[0])]
        plain = [scheme for scheme in candidates if scheme in PLAIN] or candidates[:1]
        tried = [*map(tried_on, plain)]
        best = best_of(tried)
        narrowest = tried[0]
        for scheme in candidates:
            if best.sure or scheme in plain:
                continue
            distances = ((far(at, scheme), local.nmse) for at, local in enumerate(narrowest.locals))
            if any(d / _AS_FAR <= nmse <= d * _AS_FAR for d, nmse in distances):
                tried.append(tried_on(scheme))
                best = best_of(tried)
        if best.passes > len(records) / 2:
            return Found(best.scheme, fits=True)
        layers = {layer_of(name) for name in narrowest.locals[0].segment} - {None}
        if len(layers) < 2 and not hypothesis:  # in one layer the roundings of few records drown
            return Found(best.scheme, fits=best.covers)
        as_far = _AS_FAR_TOGETHER if len(records) > 1 else _AS_FAR_ALONE
        drowned = [
            one
            for one in tried
            if one.scheme.linear is None and one.covers and one.nmse <= _DROWNED * narrowest.nmse
            if narrowest.nmse <= as_far * _mean(far(at, one.scheme) for at in range(len(records)))
        ]
        if drowned:
            return Found(min(drowned, key=lambda one: one.nmse).scheme, fits=True, drowned=True)
        return Found(best.scheme, fits=best.covers)

    def _alike(self, sort: Sort) -> list[OpRecord]:
        """A few records of the sort, of early, middle and late layers: a mistake is in one, as a rule."""
        alike = [
            other
            for other in self._recorded.trace.ops.values()
            if other.op in self._graph and split(other.op)[1] == sort[0]
            if other.has_data and self._sort(other) == sort
        ]
        alike.sort(key=lambda other: (layer_of(other.op) or 0, other.step))
        return [
            alike[at] for at in dict.fromkeys(len(alike) * (2 * i + 1) // (2 * _TOGETHER) for i in range(_TOGETHER))
        ]

    def remember(self, record: OpRecord, scheme: Scheme) -> None:
        """The scheme that fits the record."""
        self._of_sort[self._sort(record)] = scheme

    def _sort(self, record: OpRecord) -> Sort:
        """Kind (of a segment its name), storage, tokens of the step, inputs that were recomputed, the weight's type."""
        op = self._graph[record.op]
        held = self._recorded.holds_inputs(op, record)
        types = [self._weights.type_of(w) for w in op.weights[:1]] if op.kind == "linear" else []
        n_tokens, n_keys = self._lengths(record)
        kind = op.kind if all(held) else split(op.name)[1]
        return (kind, record.dtype or "", str(n_tokens), str(n_keys > SHARED_BEYOND), *map(str, held), *types)

    def _lengths(self, record: OpRecord) -> tuple[int, int]:
        """Tokens of the record's step, and all so far."""
        steps = self._recorded.trace.steps
        so_far = sum(len(step.tokens) for number, step in steps.items() if number <= record.step)
        return len(steps[record.step].tokens), so_far

    def _sums_so(self, record: OpRecord, values: Arithmetic) -> bool:
        """Whether llama.cpp would sum attention's values so in this step, and no other scheme is the same in it."""
        if values.accumulate != "f16":
            return True
        n_tokens, n_keys = self._lengths(record)
        whole = values.whole_ubatches(n_tokens)
        if values.parts > 1:
            return len(split_keys(n_tokens - whole, n_keys, values.parts)) > 1
        return 0 < whole < n_tokens < whole + TILED_FROM if values.ubatch else n_tokens <= UBATCH


class Found(NamedTuple):
    """The scheme of some segments; `drowned` where it only may be, for nothing tells it from a mistake."""

    scheme: Scheme
    fits: bool
    drowned: bool = False


class _Tried:
    """A scheme tried on some records, with what it leaves of each."""

    def __init__(self, scheme: Scheme, locals_: list[Local]) -> None:
        self.scheme = scheme
        self.locals = locals_
        self.passes = sum(not local.faulty and not local.blind for local in locals_)
        self.covers = not any(local.faulty for local in locals_)
        self.sure = self.covers and all(x.floor < NARROW or x.nmse < _SURE * x.floor for x in locals_)
        self.floor = _mean(x.floor for x in locals_)
        self.nmse = _mean(x.nmse for x in locals_)

    @property
    def decade(self) -> int:
        """Of the floor."""
        return round(math.log10(min(self.floor, 1e300)))


def _better(best: _Tried, wider: _Tried, mistaken: bool) -> _Tried:
    ratios = [w.nmse / b.nmse if b.nmse else 1.0 for w, b in zip(wider.locals, best.locals, strict=True)]
    if wider.floor > BLIND:
        return wider if wider.nmse < _FAR_LESS * best.nmse else best
    # No accident makes two errors cancel to a tenth, were it in one record only: the others may be mistaken.
    enough = min(ratios) < _FAR_LESS if mistaken else True
    return wider if wider.nmse < _CLEARLY_LESS * best.nmse and enough else best


def _mean(figures: Iterable[float]) -> float:
    """The geometric mean; infinite where one is NaN or infinite."""
    logs = [math.inf if math.isnan(x) else math.log(max(x, 1e-300)) for x in figures]
    return math.exp(sum(logs) / len(logs)) if math.isfinite(sum(logs)) else math.inf


def stored_as(values: Tensor, dtype: str) -> str:
    """What an engine stored values in before it wrote them as a longer type: all of many fit a shorter one."""
    values = values.flatten()
    shorter = {"f64": ("bf16", "f16", "f32"), "f32": ("bf16", "f16")}.get(dtype, ())
    if shorter and int((values != 0).sum()) >= (_MANY_LONG if dtype == "f64" else _MANY):
        for name in shorter:
            if all(torch.equal(rounding_named(name)(part), part) for part in values.split(_LOOK)):
                return name
    return dtype
