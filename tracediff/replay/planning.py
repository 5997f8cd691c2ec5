"""How the plan is made: the arithmetic of each sort of record, settled by a few records of it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tracediff.names import layer_of, split
from tracediff.numerics.arithmetic import EXPONENTIAL, Scheme
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.schemes import SCHEMES
from tracediff.replay.fitting import Fitting
from tracediff.replay.plan import Choice, Plan, Planner, Sort
from tracediff.replay.recompute import Recomputation
from tracediff.replay.score import COMPOSED, NOTHING, score
from tracediff.trace.format import OpRecord

# Of fewer values one of some fifty arithmetics leaves next to nothing by chance: of one value in bfloat16, which is a
# step of 4e-3 wide, 3e-5 of it every other time; of four one time in ten million.
_VALUES = 4
_SHARED = 2  # times that what was composed for one sort is tried for others, and where it leads for the first


class Planning:
    """Makes the plan of one trace."""

    def __init__(self, recomputation: Recomputation, planner: Planner, fitting: Fitting) -> None:
        self._recomputation, self._planner, self._fitting = recomputation, planner, fitting

    def plan(self, records: Iterable[OpRecord]) -> Plan:
        """The arithmetic of each sort of these records."""
        by_sort: defaultdict[Sort, list[OpRecord]] = defaultdict(list)
        for record in records:
            by_sort[self._planner.sort(record)].append(record)
        choices = {sort: self._settled(alike) for sort, alike in by_sort.items()}
        settled = {sort.name: choice.schemes[0] for sort, choice in choices.items() if choice.settled}
        for sort, choice in choices.items():
            usual = () if choice.settled else self._as_others(by_sort[sort][0], settled)
            if usual and choice.schemes[0] not in usual:
                choices[sort] = self._settled(by_sort[sort], usual)
        for _ in range(_SHARED):
            firsts = (choice.schemes[0] for choice in choices.values() if choice.settled)
            composed = [scheme for scheme in dict.fromkeys(firsts) if scheme not in SCHEMES]
            choices = {sort: self._as_composed(choice, by_sort[sort], composed) for sort, choice in choices.items()}
        return Plan(choices, self._recomputation.weights.device, self._recomputation.recorded.on_the_way)

    def _settled(self, records: list[OpRecord], usual: Sequence[Scheme] = ()) -> Choice:
        candidates = self._planner.candidates(*records)
        samples = self._samples(records) if len(candidates) > 1 else records
        choice = self._fitting.settle(candidates, samples, usual=usual)
        asked = choice.unfit or (samples if len(choice.schemes) > 1 else ())
        if asked and self._planner.is_segment(asked[0]):
            asked = samples  # of which one that nothing fits may be the mistaken one
        if asked and self._is_short(asked[0]):
            choice = self._composed(choice, asked, records)
        self._recomputation.forget()
        return self._told(choice, records)

    def _as_composed(self, choice: Choice, records: list[OpRecord], composed: Sequence[Scheme]) -> Choice:
        """In an arithmetic that was composed for another sort, where that leaves far less: what is listed may
        hide the rest in its floor, in a few tokens.
        """
        schemes = self._planner.suiting((*choice.schemes, *composed), *records)
        others = [scheme for scheme in schemes if scheme not in choice.schemes]
        if not others or choice.nmse <= NOTHING:
            return choice
        samples = self._samples(records)
        found = self._fitting.settle(schemes, samples)
        if not found.settled or found.schemes[0] not in others or score(found.nmse, COMPOSED) <= score(choice.nmse):
            return choice
        further = self._fitting.composed(found.schemes[0], samples)
        return self._told(further if further.settled else found, records)

    def _told(self, choice: Choice, records: Sequence[OpRecord]) -> Choice:
        return replace(choice, said=self.said(choice.schemes, records), n_records=len(records), unfit=())

    def said(self, schemes: Sequence[Scheme], records: Iterable[OpRecord]) -> tuple[str, ...]:
        """What each scheme rounds in the records, or in what they are recomputed through."""
        through = (name for record in records for name in self._recomputation.segment(record))
        return self._planner.said(schemes, through)

    def _composed(self, choice: Choice, asked: Sequence[OpRecord], records: Sequence[OpRecord]) -> Choice:
        """With what fits those that nothing usual does, or not one thing: parts that are done in ways of other engines,
        or weights that the engine quantised by itself, be it but for the head.
        """
        found = self._fitting.composed(choice.schemes[0], asked)
        if not found.settled:
            return choice
        if not (choice.settled and choice.unfit):
            return found
        both = tuple(dict.fromkeys((*found.schemes, *choice.schemes)))
        by_op = dict.fromkeys(_names(records), choice.schemes)
        by_op |= dict.fromkeys(_names(choice.unfit), found.schemes)
        by_op |= dict.fromkeys(_names(found.unfit), both)
        return replace(found, schemes=both, by_op=by_op)

    def _is_short(self, record: OpRecord) -> bool:
        """Whether it is recomputed through one layer at most. Through several each scheme is a forward pass: logits
        alone took half as long again.
        """
        layers = {layer_of(name) for name in self._recomputation.segment(record)} - {None}
        return len(layers) <= 1

    def _as_others(self, record: OpRecord, settled: Mapping[str, Scheme]) -> Sequence[Scheme]:
        """What ops of other kinds, which schemes treat alike, were seen to have."""
        entry = KINDS[self._recomputation.graph[record.op].kind].scheme
        alike = EXPONENTIAL if entry in EXPONENTIAL else (entry,)
        others = {scheme for name, scheme in settled.items() if name in KINDS and KINDS[name].scheme in alike}
        return self._planner.as_in(record, others)

    def _samples(self, records: list[OpRecord]) -> list[OpRecord]:
        """Records of a sort that choose its arithmetic: those that tell it, where there are any."""
        samples = self._planner.samples(records)
        if all(map(self.tells, samples)):
            return samples
        return self._planner.samples([record for record in records if self.tells(record)]) or samples

    def tells(self, record: OpRecord) -> bool:
        """Whether a record can tell arithmetics apart: of NaN, zeros or very few values any leaves nothing, and of a
        first position that attends to itself alone a cache may be held in anything.
        """
        recorded = self._recomputation.recorded
        if recorded.n_tokens(record.step) == 1 or record.size < _VALUES:
            return False
        seen = [(np.isfinite(piece).all(), piece.any()) for piece in recorded.trace.pieces(record)]
        return all(finite for finite, _ in seen) and any(not_zero for _, not_zero in seen)


def _names(records: Sequence[OpRecord]) -> list[str]:
    return [split(record.op)[1] for record in records]
