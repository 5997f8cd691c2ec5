"""Which of the roundings that engines really use fits the ops of a trace."""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy

import torch
from torch import Tensor

from tracediff.model.arithmetic import BLOCK, EXACT, ROUNDINGS, Arithmetic, Scheme, split_keys
from tracediff.model.evaluate import arithmetic_of
from tracediff.model.graph import Graph, Op
from tracediff.model.weights import Weights
from tracediff.replay.recorded import Recorded
from tracediff.result import Local
from tracediff.trace.format import OpRecord

# A floor beyond this hides everything: no verdict is better than a blind one.
BLIND = 0.05
_LOOK = 1 << 14  # values looked at before the others: most that are longer than float16 show at once
_MANY = 64  # values that all fit float16 by chance: 2^-13 to the power of it
Sort = tuple[str, ...]


class Fits:
    """What fitted so far. Ops of one sort are computed alike: the fit of one is tried first on the next."""

    def __init__(self, recorded: Recorded, graph: Graph, weights: Weights, schemes: Sequence[Scheme]) -> None:
        self._recorded = recorded
        self._graph = graph
        self._weights = weights
        self._schemes = schemes
        self._of_sort: dict[Sort, Scheme] = {}
        self._of_record: dict[tuple[int, str], Scheme] = {}
        self._earned: set[Scheme] = set()

    def changed(self, graph: Graph) -> "Fits":
        """For a hypothesis: what it fits is not remembered here."""
        other = copy(self)
        other._graph = graph
        other._of_sort, other._earned = dict(self._of_sort), set(self._earned)
        return other

    def candidates(self, record: OpRecord) -> Iterator[Scheme]:
        """Schemes to try: the one that fitted the last op of this sort, then all that differ for this op."""
        op, sort = self._graph[record.op], self._sort(record)
        first = [self._of_sort[sort]] if sort in self._of_sort else []
        segment = not all(self._recorded.holds_inputs(op, record))
        tried: set[str] = set()
        for scheme in (*first, *self._schemes):
            name = scheme.name if segment else str(arithmetic_of(op, scheme, self._weights))
            covered = self._graph if segment else (op,)
            if scheme.values.parts > 1 and not self._splits(record, scheme):
                continue  # as with one thread
            if name not in tried and all(self._possible(o, arithmetic_of(o, scheme, self._weights)) for o in covered):
                tried.add(name)
                yield scheme

    def likely(self, record: OpRecord) -> list[Scheme]:
        """Schemes to try a hypothesis under: the one that fits other ops of the record's sort; else the one that
        fits most of its kind, then all others of a single op; where there is none, the plain ones of a segment.
        """
        op, sort = self._graph[record.op], self._sort(record)
        if sort in self._of_sort:
            return [self._of_sort[sort]]
        kin = Counter(fit for other, fit in self._of_sort.items() if other[0] == op.kind)
        likely = [scheme for scheme, _ in (kin or Counter(self._of_sort.values())).most_common(1)]
        if all(self._recorded.holds_inputs(op, record)):
            return [*likely, *self.candidates(record)]
        if kin:
            return likely
        return [*dict.fromkeys((self._of_record[record.step, record.op], *self._schemes[:2]))]

    def accept(self, tried: Sequence[tuple[Local, Scheme]]) -> tuple[Local, Scheme] | None:
        """The first scheme that passes and may: a wide floor could excuse a mistake.

        The floors of single ops are narrow, and so are those of the plain schemes. Any other must leave less than
        each that has a narrower floor, once in the trace: then it is this engine's.
        """
        for local, scheme in tried:
            if local.faulty or local.floor > BLIND:
                continue
            if scheme in self._schemes[:2] or len(local.segment) == 1:
                return local, scheme
            narrower = [other for other, _ in tried if other.floor < local.floor]
            if scheme in self._earned or (len(tried) > 2 and all(local.nmse < other.nmse for other in narrower)):
                self._earned.add(scheme)
                return local, scheme
        return None

    def remember(self, record: OpRecord, scheme: Scheme, fits: bool) -> None:
        """The scheme that fits the record, or that leaves least where none does."""
        self._of_record[record.step, record.op] = scheme
        if fits:
            self._of_sort[self._sort(record)] = scheme

    def _sort(self, record: OpRecord) -> Sort:
        """Kind, storage, prompt or decoding, which inputs were recomputed, and the weight's type."""
        op = self._graph[record.op]
        whole = [str(not held) for held in self._recorded.holds_inputs(op, record)]
        types = [self._weights.type_of(w) for w in op.weights[:1]] if op.kind == "linear" else []
        several = len(self._recorded.trace.steps[record.step].tokens) > 1
        return (op.kind, record.dtype or "", str(several), *whole, *types)

    def _splits(self, record: OpRecord, scheme: Scheme) -> bool:
        """Whether threads share the keys of this step."""
        steps = self._recorded.trace.steps
        n_keys = sum(len(step.tokens) for number, step in steps.items() if number <= record.step)
        return len(split_keys(len(steps[record.step].tokens), n_keys, scheme.values.parts)) > 1

    def _possible(self, op: Op, arithmetic: Arithmetic) -> bool:
        """Whether rows are multiples of the blocks."""
        if arithmetic == EXACT:
            return True
        columns = op.weights[0].shape[-1] if op.kind == "linear" else self._graph.hparams.head_dim
        return not any(columns % BLOCK.get(name, 1) for name in (arithmetic.operands, arithmetic.stored))


def stored_as(values: Tensor, dtype: str) -> str:
    """What an engine stored values in before it wrote them as float32: all of many fit a shorter type."""
    values = values.flatten()
    if dtype == "f32" and int((values != 0).sum()) >= _MANY:
        for name in ("bf16", "f16"):
            if all(torch.equal(ROUNDINGS[name](part), part) for part in values.split(_LOOK)):
                return name
    return dtype
