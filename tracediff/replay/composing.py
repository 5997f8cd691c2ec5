"""Arithmetic that is not listed: from what comes nearest part after part is done in the way that leaves least."""

from collections.abc import Callable, Sequence
from statistics import median

from tracediff.numerics.arithmetic import Scheme
from tracediff.replay.fitting import Fitting
from tracediff.replay.plan import Choice, Planner
from tracediff.replay.score import ALIKE, BLIND, COMPOSED, LESS, NOTHING, score
from tracediff.trace.format import OpRecord

_ABREAST = 2  # schemes that are changed further, part by part
_FEW = 3  # records that tell the parts of an arithmetic


class Composing:
    """Composes the arithmetic of records that share it, of schemes that it `may_be`."""

    def __init__(
        self,
        fitting: Fitting,
        planner: Planner,
        records: Sequence[OpRecord],
        may_be: Callable[[Scheme], bool] = lambda scheme: True,
    ) -> None:
        self._fitting, self._planner, self._records, self._may_be = fitting, planner, records, may_be

    def composed(self, starts: Sequence[Scheme], in_others: Sequence[Scheme] = ()) -> Choice:
        """The arithmetic of these records where none that is listed fits: from each of `starts`, of which the first is
        the nearest that is known, as long as a step takes something away. Else what the same op does `in_others`,
        where that fits them all.

        Behind integers nothing falls by much until all is right, for any difference turns some of their roundings: so
        little counts.
        """
        few = sorted(self._records[:_FEW], key=lambda record: self._fitting.left(record, starts[0]))
        few.insert(0, few.pop((len(few) - 1) // 2))  # not the one that is mistaken
        best, rivals = starts[0], starts
        before = left = self._left_of(best, few)
        for start in starts:
            if left > NOTHING:
                end, near = self._nearer(start, few)
                if (less := self._left_of(end, few)) < left:
                    best, rivals, left = end, near, less
        if score(left, COMPOSED) <= score(before):
            return self._that_fits(in_others) or Choice((starts[0],), False, before)
        # Of one alone it would not be asked whether it fits.
        choice = self._fitting.settle(tuple(dict.fromkeys((best, *rivals, *starts))), self._records)
        if choice.settled:
            return choice
        if left > NOTHING:  # as where weights lie halfway between two others: what rounds them otherwise leaves less
            return self._that_fits(starts[1:]) or choice
        # What rounds the same may add up otherwise: ggml's blocks as integers, where others multiply floats.
        changes = self._planner.changes((best,), *self._records)
        alike = [s for s in changes if self._may_be(s) and self._left_of(s, few) <= NOTHING]
        return self._fitting.settle((best, *alike), self._records) if alike else choice

    def _that_fits(self, schemes: Sequence[Scheme]) -> Choice | None:
        """Of those that fit all the records the one that leaves least."""
        fit = [scheme for scheme in schemes if all(self._fitting.fits(record, scheme) for record in self._records)]
        told = min(fit, key=lambda scheme: self._left_of(scheme, self._records), default=None)
        return Choice((told,), True, self._left_of(told, self._records)) if told else None

    def _nearer(self, start: Scheme, few: Sequence[OpRecord]) -> tuple[Scheme, Sequence[Scheme]]:
        """Where steps from a scheme end, by a few of the records, and the rivals of that. The best go on together, for
        two ways of a part may be alike while another part is done wrongly.
        """
        found, near = {start: self._left_of(start, few)}, [start]
        left = found[start]
        while NOTHING < left <= BLIND:  # no roundings make more that a floor does not hide
            ahead = near[:_ABREAST]
            for other in self._planner.changes(ahead, *self._records):
                if other not in found and self._may_be(other):
                    found[other] = self._left_by_change(other, few, found[ahead[0]])
            near = sorted(found, key=lambda scheme: found[scheme])
            if found[near[0]] >= LESS * left:
                break
            left = found[near[0]]
        return near[0], [scheme for scheme in near if found[scheme] <= ALIKE * left]

    def _left_by_change(self, scheme: Scheme, records: Sequence[OpRecord], before: float) -> float:
        """What it leaves of the records; of the first alone where that is far more than `before`."""
        first = self._fitting.left(records[0], scheme)
        return first if first > ALIKE * before else self._left_of(scheme, records)

    def _left_of(self, scheme: Scheme, records: Sequence[OpRecord]) -> float:
        """What it leaves of the records: one mistake among three is outvoted."""
        return median(self._fitting.left(record, scheme) for record in records)
