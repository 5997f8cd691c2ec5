"""The plan: which arithmetic each sort of record was computed in. Made from metadata and a few records, then frozen.

Ops of one sort are computed alike, by one kernel. So the arithmetic is chosen from several records of a sort together,
by what it leaves of them (`replay.fitting`): one mistake is outvoted. What the plan says of a sort does not depend on
the order in which records are judged.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, zip_longest
from operator import not_
from typing import NamedTuple

from tracediff.errors import EngineError
from tracediff.model.graph import Axis, Graph, Op, Tokens
from tracediff.model.weights import Weights
from tracediff.names import layer_of, local_name
from tracediff.numerics.arithmetic import EXACT, SHARED_BEYOND, TILED_FROM, UBATCH, Arithmetic, Scheme, split_keys
from tracediff.numerics.evaluate import arithmetic_of, in_words_of, rows_fit, treated_as
from tracediff.numerics.floats import HALVES
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.roundings import in_rows_of, rounding_named
from tracediff.numerics.schemes import IN_SINGLE, TF32S, WAYS, Way, unlisted
from tracediff.replay.recorded import Recorded
from tracediff.trace.format import OpRecord

_SAMPLES = 3  # records of a sort that choose its arithmetic
_MIXERS = ("softmax", "state")  # what kinds that mix tokens are to schemes


class Sort(NamedTuple):
    """What records have in common that are computed alike: the kind of op, or the name of one whose inputs lack."""

    name: str
    storage: str
    n_tokens: int  # of the step
    shares_keys: bool  # so many positions are visible that threads may share them
    held: tuple[bool, ...]  # of each input whether it was recorded
    types: tuple[str, ...]  # of the weights
    of_product: bool = False  # of norms whether they read what a matmul makes, which may be held in half precision
    through: frozenset[str] = frozenset()  # kinds of what is recomputed: layers of a hybrid model have others

    @property
    def tokens(self) -> Tokens:
        """Whether the step has one token or several."""
        return "one" if self.n_tokens == 1 else "several"

    def is_but_for_tokens(self, other: "Sort") -> bool:
        """Whether the other is the same in steps of another size."""
        return other != self and other._replace(n_tokens=self.n_tokens, shares_keys=self.shares_keys) == self

    def __str__(self) -> str:
        weights = f" with {self.types[0]} weights{' and biases' if len(self.types) > 1 else ''}" if self.types else ""
        through = "" if all(self.held) else " through what was not recorded before it"
        mixers = sorted(kind for kind in self.through if KINDS[kind].scheme in _MIXERS)
        through += f", {', '.join(mixers)} in it" if mixers else ""
        tokens = "1 token" if self.n_tokens == 1 else f"{self.n_tokens} tokens"
        product = " of a product" if self.of_product else ""
        return f"{self.name}{product}{weights}{through} ({self.storage}, {tokens} a step)"


@dataclass(frozen=True, slots=True)
class Choice:
    """The arithmetic of a sort of records. `schemes` are in contention, best first: one, as a rule.

    `settled`: one of them fits a record of the sort. Where none does, every record is mistaken, or computed in some way
    that nobody knows of: the arithmetic is then sought under each hypothesis.
    """

    schemes: tuple[Scheme, ...]
    settled: bool
    nmse: float  # the least that is left of a sample; NaN where there was no choice
    unfit: tuple[OpRecord, ...] = ()  # those of the sample that none of them fits
    alike: tuple[Scheme, ...] = ()  # others that fit the sample, which does not tell them from these
    said: tuple[str, ...] = ()  # what each of the schemes rounds in these records
    n_records: int = 0
    # If they differ: by the op's name, or by its name in any layer.
    by_op: Mapping[str, tuple[Scheme, ...]] = field(default_factory=dict)

    def of(self, name: str) -> "Choice":
        """That of records of an op."""
        schemes = self.by_op.get(name) or self.by_op.get(local_name(name))
        return self if schemes is None else replace(self, schemes=schemes)


@dataclass(frozen=True, slots=True)
class Plan:
    """The arithmetic of every sort of record, and the `device` that they are recomputed on.

    `on_the_way` are types that values were rounded to by who wrote the trace: the sums of all layers tell.
    """

    choices: Mapping[Sort, Choice] = field(default_factory=dict)
    device: str = "cpu"
    on_the_way: Mapping[str, bool | None] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """For a reader: the device, and a line a sort."""
        yield f"in float64 on {self.device}"
        for sort, choice in self.choices.items():
            how = " or ".join(dict.fromkeys(choice.said))
            left = "" if math.isnan(choice.nmse) else f"; leaves {choice.nmse:.1e}"
            doubt = "" if choice.settled else ", nearest of all, but it fits none: each record is asked by itself"
            records = "1 record" if choice.n_records == 1 else f"{choice.n_records} records"
            yield f"{sort}, {records}: {how}{doubt}{left}"


class Planner:
    """Sorts the records of a trace, and knows which schemes could be that of a sort. Looks at metadata, and at
    what the values of a step are stored in."""

    def __init__(
        self,
        recorded: Recorded,
        graph: Graph,
        weights: Weights,
        schemes: Sequence[Scheme],
        segment: Callable[[OpRecord], Sequence[str]],
    ) -> None:
        self._recorded = recorded
        self._segment = segment
        self._graph = graph
        self._weights = weights
        self._schemes = schemes
        self._found: dict[tuple[object, ...], tuple[Scheme, ...]] = {}  # of schemes those that differ
        self._read: dict[OpRecord, str] = {}  # what first inputs, of norms and gated ones, are stored in
        self._through: dict[frozenset[str], tuple[Op, ...]] = {}  # by the kinds of a segment what tells schemes apart
        self._told: dict[tuple[Scheme, tuple[str, ...]], Mapping[str, Sequence[Way]]] = {}

    def sort(self, record: OpRecord) -> Sort:
        """The record's sort, by names and types alone."""
        op = self._graph[record.op]
        held = self._recorded.holds_inputs(op, record)
        types = [self._weights.type_of(w) for w in op.weights] if KINDS[op.kind].scheme == "linear" else []
        n_tokens, n_keys = self._lengths(record)
        kind = op.kind if all(held) else local_name(op.name)
        shares = n_keys > SHARED_BEYOND
        through = frozenset() if all(held) else self._kinds(record)
        product = self._norms_product(op)
        return Sort(kind, record.dtype or "", n_tokens, shares, tuple(held), tuple(types), product, through)

    def treated_otherwise(self, record: OpRecord, others: Iterable[OpRecord]) -> list[OpRecord]:
        """Of other records of a sort one of each op that a scheme may treat otherwise than its op: by its rows."""
        found: dict[object, OpRecord] = {}
        for other in others:
            found.setdefault(self._treated(self._graph[other.op]), other)
        found.pop(self._treated(self._graph[record.op]), None)
        return [*found.values()]

    def said(self, schemes: Iterable[Scheme], names: Iterable[str]) -> tuple[str, ...]:
        """What each scheme rounds in these ops: those of a sort, and what they are recomputed through."""
        ops = self._unlike(self._graph[name] for name in dict.fromkeys(names))
        return tuple(in_words_of(ops, scheme, self._weights) for scheme in schemes)

    def arithmetic(self, record: OpRecord, scheme: Scheme) -> Arithmetic:
        """What the scheme does in the record's own op."""
        return arithmetic_of(self._graph[record.op], scheme, self._weights)

    def is_segment(self, record: OpRecord) -> bool:
        """Whether inputs of the record must be recomputed."""
        return not all(self._recorded.holds_inputs(self._graph[record.op], record))

    def samples(self, records: Sequence[OpRecord]) -> list[OpRecord]:
        """A few of each op of a sort, of early, middle and late layers: a mistake is in one layer or one op, as a rule.

        Each op once, before any a second time; what is in no layer, as the head, last: engines that quantise weights
        by themselves leave it out.
        """
        by_name: dict[str, list[OpRecord]] = {}
        for record in sorted(records, key=lambda record: (_place(record.op), record.step)):
            by_name.setdefault(local_name(record.op), []).append(record)
        rounds = zip_longest(*map(_spread, by_name.values()))
        return [record for each in rounds for record in each if record is not None]

    def candidates(self, *records: OpRecord) -> Sequence[Scheme]:
        """The schemes that differ for these records of a sort, and that suit the rows of all of them.

        Raises EngineError where the op's rows cannot be rounded as the only scheme says.
        """
        record = records[0]
        alike = self._kinds(record) if self.is_segment(record) else tuple(dict.fromkeys(one.op for one in records))
        key = alike, self._lengths(record), self._recorded.storage(record.step), record.dtype
        if key not in self._found:
            several, held = len(self._schemes) > 1, self._recorded.storage(record.step)
            schemes = [scheme for scheme in self._schemes if not several or _caches_so(held, scheme)]
            schemes += [IN_SINGLE] if several and record.dtype == "f64" else []
            self._found[key] = tuple(self.suiting(schemes, *records))
        if not self._found[key]:
            raise EngineError(
                f"{records[0].op} cannot be recomputed in the arithmetic {self._schemes[0].name!r}: this model has "
                "rows that are no multiples of its blocks. Leave --arithmetic out, or name another."
            )
        return self._found[key]

    def changes(self, schemes: Sequence[Scheme], *records: OpRecord) -> Sequence[Scheme]:
        """Each scheme with any one part done in another way: those that differ from these and one another in the
        records.
        """
        if len(self._schemes) == 1:
            return ()
        changed = (way.of(scheme) for scheme in schemes for way in WAYS)
        return [scheme for scheme in self.suiting((*schemes, *changed), *records) if scheme not in schemes]

    def without_tables(self, scheme: Scheme, *records: OpRecord) -> Sequence[Scheme]:
        """The candidates that look nothing up where this one does, and round all else as it does."""
        covered = self._covered(*records)
        is_table = [KINDS[op.kind].scheme == "table" for op in covered]

        def both(of: Scheme) -> tuple[list[Arithmetic], list[Arithmetic]]:
            rounds = self._rounds(of, covered)
            return [*compress(rounds, is_table)], [*compress(rounds, map(not_, is_table))]

        tables, others = both(scheme)
        if all(of == EXACT for of in tables):
            return ()
        exact = [EXACT] * len(tables)
        return [one for one in self.candidates(*records) if both(one) == (exact, others)]

    def told(self, scheme: Scheme, *records: OpRecord) -> Mapping[str, Sequence[Way]]:
        """The ways of each part that make these records of a sort what the scheme does: its own first, unless it has
        none of them. Parts that make no difference in them are left out.
        """
        covered = self._covered(*records)
        key = scheme, tuple(op.name for op in covered)
        if key not in self._told:
            self._told[key] = self._ways_told(scheme, covered)
        return self._told[key]

    def _ways_told(self, scheme: Scheme, covered: Sequence[Op]) -> Mapping[str, Sequence[Way]]:
        of, found = self._rounds_rows(scheme, covered), defaultdict[str, list[Way]](list)
        for way in sorted((*WAYS, *unlisted(scheme)), key=lambda way: not way.is_of(scheme)):
            if self._rounds_rows(way.of(scheme), covered) == of:
                found[way.part].append(way)
        n_ways = Counter(way.part for way in WAYS)
        return {part: ways for part, ways in found.items() if len(ways) < n_ways[part]}

    def is_alike(self, one: Scheme, other: Scheme, *records: OpRecord) -> bool:
        """Whether they round the same in these records of a sort."""
        covered = self._covered(*records)
        return self._rounds_rows(one, covered) == self._rounds_rows(other, covered)

    def suiting(self, schemes: Sequence[Scheme], *records: OpRecord) -> Sequence[Scheme]:
        """Those of the schemes that differ for these records of a sort by what they round, or for a segment in any op,
        and suit their rows.
        """
        record, covered = records[0], self._covered(*records)
        found: dict[object, Scheme] = {}
        tokens = self._recorded.tokens(record.step)
        for scheme in (one.in_steps_of(tokens) for one in schemes):
            is_possible = self._sums_so(record, scheme.values) and self._casts_so(record, scheme)
            if len(schemes) > 1 and not (is_possible and _in_half_so(record.dtype, scheme)):
                continue
            if self._rows_fit(covered, of := self._rounds(scheme, covered)):
                found.setdefault((of, scheme.prompts), scheme)
        return [*found.values()]

    def as_in(self, record: OpRecord, schemes: Iterable[Scheme]) -> Sequence[Scheme]:
        """The candidates that round in the record what one of these does: other sorts may know it by another scheme."""
        covered = self._covered(record)
        wanted = {self._rounds(scheme, covered) for scheme in schemes}
        return [scheme for scheme in self.candidates(record) if self._rounds(scheme, covered) in wanted]

    def _rounds(self, scheme: Scheme, covered: Sequence[Op]) -> tuple[Arithmetic, ...]:
        """What the scheme rounds in these ops. Through those of several kinds what sums run in makes no difference."""
        found = (arithmetic_of(op, scheme, self._weights) for op in covered)
        return tuple(map(_in_float32, found)) if len({op.kind for op in covered}) > 1 else tuple(found)

    def _rounds_rows(self, scheme: Scheme, covered: Sequence[Op]) -> tuple[Arithmetic, ...]:
        """The same, where what is rounded in groups that are as wide as a row is rounded in rows."""
        found = zip(covered, self._rounds(scheme, covered), strict=True)
        return tuple(
            replace(of, operands=in_rows_of(op.weights[0].shape[-1], of.operands)) if op.weights else of
            for op, of in found
        )

    def _covered(self, *records: OpRecord) -> Sequence[Op]:
        """The ops that tell schemes apart: the records' own, and of segments all of their kinds."""
        if not self.is_segment(records[0]):
            return self._unlike(self._graph[name] for name in dict.fromkeys(record.op for record in records))
        kinds = self._kinds(records[0])
        if kinds not in self._through:
            self._through[kinds] = self._unlike(op for op in self._graph if op.kind in kinds)
        return self._through[kinds]

    def _kinds(self, record: OpRecord) -> frozenset[str]:
        """Of the ops that are recomputed for the record."""
        return frozenset(self._graph[name].kind for name in self._segment(record))

    def _unlike(self, ops: Iterable[Op]) -> tuple[Op, ...]:
        """One of each sort that a scheme may treat otherwise: a model has hundreds of ops, of a dozen sorts."""
        sorts: dict[tuple[str, bool, bool, str, Axis, int], Op] = {}
        for op in ops:
            sorts.setdefault(self._treated(op), op)
        return tuple(sorts.values())

    def _treated(self, op: Op) -> tuple[str, bool, bool, str, Axis, int]:
        """What of the op makes a difference to a scheme, or to kernels that engines have for heads."""
        first = op.weights[0] if op.weights else None
        row = op.axes[-1] if op.kind == "add" else 0  # what is added may be rounded in blocks
        of = (self._weights.type_of(first), first.shape[-1], len(op.weights)) if first else ("", row, 0)
        return treated_as(op), any(op.past), layer_of(op.name) is None, *of

    def _rows_fit(self, ops: Sequence[Op], arithmetics: Sequence[Arithmetic]) -> bool:
        width = self._graph.hparams.head_dim
        return all(rows_fit(op, arithmetic, width) for op, arithmetic in zip(ops, arithmetics, strict=True))

    def _lengths(self, record: OpRecord) -> tuple[int, int]:
        """Tokens of the record's step, and all so far."""
        return len(self._recorded.trace.steps[record.step].tokens), self._recorded.n_tokens(record.step)

    def _sums_so(self, record: OpRecord, values: Arithmetic) -> bool:
        """Whether llama.cpp would sum attention's values so in this step, and no other scheme is the same in it."""
        if values.accumulate != "f16":
            return True
        n_tokens, n_keys = self._lengths(record)
        whole = values.whole_ubatches(n_tokens)
        if values.parts > 1:
            return len(split_keys(n_tokens - whole, n_keys, values.parts)) > 1
        return 0 < whole < n_tokens < whole + TILED_FROM if values.ubatch else n_tokens <= UBATCH

    def _casts_so(self, record: OpRecord, scheme: Scheme) -> bool:
        """Whether what is normed, a product, or the gate was recorded in the type which normed or activated values are
        rounded to: transformers casts the first back to their input's type, and PyTorch's silu gives it, which under
        autocast a matmul's output has. Else that is a mistake.
        """
        op = self._graph[record.op]
        asked = (scheme.normed, self._norms_product(op)), (scheme.activated, op.kind == "swiglu")
        return all(cast == "f64" or (is_so and self._reads(record) == cast) for cast, is_so in asked)

    def _reads(self, record: OpRecord) -> str:
        """What the first input, or what that is a copy of, is stored in; empty where it was not recorded."""
        if record not in self._read:
            op, ops = self._graph[record.op], self._recorded.trace.ops
            while (read := ops.get((record.step, op.inputs[0]))) is None:
                if op.inputs[0] not in self._graph or (op := self._graph[op.inputs[0]]).kind != "copy":
                    break
            held = read is not None and read.has_data
            self._read[record] = self._recorded.stored(read, self._recorded.values(read)) if read and held else ""
        return self._read[record]

    def _norms_product(self, op: Op) -> bool:
        """Whether it is a norm of what a matmul makes, as those of queries and keys are."""
        return op.kind == "rms_norm" and op.inputs[0] in self._graph and self._graph[op.inputs[0]].kind == "linear"


def _in_half_so(dtype: str | None, scheme: Scheme) -> bool:
    """Whether an engine that writes values of this type, if it is a half precision, would do so: TF32 is for operands
    in float32, and no step between is rounded to the other half.
    """
    if dtype not in HALVES:
        return True
    of = scheme.linear, scheme.scores, scheme.values
    between = scheme.added, scheme.scaled, *(x for one in of for x in (one.products, one.before_bias, one.biases))
    multiplied = (x for one in of for x in (one.operands, one.stored))
    return not ({*between} & {*HALVES} - {dtype} or any(x in TF32S for x in multiplied))


def _caches_so(held: str, scheme: Scheme) -> bool:
    """Whether there is anything to a cache in half precision: not where all values are, which a cache would be too."""
    in_integers = not scheme.is_ggml and rounding_named(scheme.linear.operands).in_blocks
    return not (in_integers and held in HALVES and scheme.values.stored in HALVES)


def _in_float32(arithmetic: Arithmetic) -> Arithmetic:
    return replace(arithmetic, accumulate="f32") if arithmetic.accumulate == "i32" else arithmetic


def _spread(records: Sequence[OpRecord]) -> list[OpRecord]:
    """A few of these, the middle one first."""
    n = len(records)
    return [records[i] for i in dict.fromkeys(n * (2 * i + 1) // (2 * _SAMPLES) for i in (1, 0, 2))]


def _place(name: str) -> float:
    layer = layer_of(name)
    return math.inf if layer is None else layer
