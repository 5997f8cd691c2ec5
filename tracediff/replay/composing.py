"""Arithmetic that is not listed: from what comes nearest part after part is done in the way that leaves least."""

from collections.abc import Callable, Sequence
from statistics import median

from tracediff.numerics.arithmetic import Scheme
from tracediff.replay.fitting import Fitting
from tracediff.replay.plan import Choice, Planner
from tracediff.replay.score import ALIKE, BLIND, COMPOSED, EXPLAINED, LESS, LESS_EXPLAINED, NOTHING, score
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

    def composed(
        self, starts: Sequence[Scheme], in_others: Sequence[Scheme] = (), in_longer: Sequence[Choice] = ()
    ) -> Choice:
        """The arithmetic of these records where none that is listed fits: from each of `starts`, of which the first is
        the nearest that is known, as long as a step takes something away. Before that what the same op does `in_longer`
        steps, which tell more, where it leaves as little of these as there; after it what it does `in_others`, where
        that fits them all.

        Behind integers nothing falls by much until all is right, for any difference turns some of their roundings: so
        little counts.
        """
        for there in in_longer:
            if found := self._as_there(there):
                return found
        few = sorted(self._records[:_FEW], key=lambda record: self._fitting.left(record, starts[0]))
        few.insert(0, few.pop((len(few) - 1) // 2))  # not the one that is mistaken
        best, rivals = starts[0], starts
        before = missed = self._left_of(best, few)
        for start in starts:
            if missed > NOTHING:
                end, near, less = self._nearer(start, few)
                if less < missed:
                    best, rivals, missed = end, near, less
        left = self._left_of(best, few)
        is_led = self._fitting.goes_part_of_the_way(few[0]) and missed <= EXPLAINED * before
        if score(left, COMPOSED) <= score(before) and not is_led:
            return self._that_fits(in_others) or Choice((starts[0],), False, before)
        # Of one alone it would not be asked whether it fits.
        choice = self._fitting.settle(tuple(dict.fromkeys((best, *rivals, *starts))), self._records)
        if choice.settled:
            return choice
        if left > NOTHING:  # as where weights lie halfway between two others: what rounds them otherwise leaves less
            return self._that_fits(starts[1:]) or choice
        # What rounds the same may add up otherwise: ggml's blocks as integers, where others multiply floats.
        changes = self._planner.changes((best,), *self._records)
        same = [s for s in changes if self._may_be(s) and self._left_of(s, few) <= NOTHING]
        return self._fitting.settle((best, *same), self._records) if same else choice

    def _as_there(self, there: Choice) -> Choice | None:
        """What was chosen for other records, if it leaves as little of these and most are not faulty by it."""
        scheme, left = there.schemes[0], self._left_of(there.schemes[0], self._records)
        unfit = tuple(record for record in self._records if self._fitting.is_faulty(record, scheme))
        if left > ALIKE * there.nmse or 2 * len(unfit) > len(self._records):
            return None
        return Choice((scheme,), True, left, () if self._planner.is_segment(self._records[0]) else unfit)

    def _that_fits(self, schemes: Sequence[Scheme]) -> Choice | None:
        """Of those that fit all the records the one that leaves least."""
        fit = [scheme for scheme in schemes if all(self._fitting.fits(record, scheme) for record in self._records)]
        told = min(fit, key=lambda scheme: self._left_of(scheme, self._records), default=None)
        return Choice((told,), True, self._left_of(told, self._records)) if told else None

    def _nearer(self, start: Scheme, few: Sequence[OpRecord]) -> tuple[Scheme, Sequence[Scheme], float]:
        """Where steps from a scheme end, by a few of the records, the rivals of that, and by how much it misses. The
        best go on together, for two ways of a part may be alike while another part is done wrongly.
        """
        alike, enough = (1.0, LESS_EXPLAINED) if self._fitting.goes_part_of_the_way(few[0]) else (ALIKE, LESS)
        found, near = {start: self._left_of(start, few)}, [start]
        best = start
        while NOTHING < found[best] <= BLIND:  # no roundings make more that a floor does not hide
            ahead = near[:_ABREAST]
            for other in self._planner.changes(ahead, *self._records):
                if other not in found and self._may_be(other):
                    first = self._fitting.missed(few[0], other, start)
                    far = first > alike * found[ahead[0]]
                    found[other] = first if far else self._missed_by(other, few, start)
            near = sorted(found, key=lambda scheme: found[scheme])
            if found[near[0]] >= enough * found[best]:
                break
            best = near[0]
        rivals = [scheme for scheme in near if found[scheme] <= alike * found[best]]
        return best, rivals, found[best]

    def _missed_by(self, scheme: Scheme, records: Sequence[OpRecord], start: Scheme) -> float:
        """By how much it misses the records: one mistake among three is outvoted."""
        return median(self._fitting.missed(record, scheme, start) for record in records)

    def _left_of(self, scheme: Scheme, records: Sequence[OpRecord]) -> float:
        return median(self._fitting.left(record, scheme) for record in records)
