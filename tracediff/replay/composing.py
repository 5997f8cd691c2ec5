"""Arithmetic that is not listed: from what comes nearest part after part is done in the way that leaves least."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median_low

from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.schemes import EXACTLY, WAYS
from tracediff.replay.fitting import Fitting
from tracediff.replay.plan import Choice, Planner
from tracediff.replay.score import (
    ALIKE,
    BLIND,
    COARSE,
    COMPOSED,
    FINE,
    KNOWN,
    LESS,
    LESS_UNEXPLAINED,
    LUCKY,
    NOTHING,
    STORED_TO,
    UNEXPLAINED,
    score,
)
from tracediff.trace.format import OpRecord

_ABREAST = 2  # schemes that are changed further, part by part
# Schemes that are looked at before it is asked whether a known mistake explains a record, which takes as long: by then
# two of an engine's parts are found, as a rule.
_MANY = 500
_FEW = 3  # records that tell the parts of an arithmetic
_PLAINLY = [way for way in WAYS if way.is_of(EXACTLY)]


class Composing:
    """Composes the arithmetic of records that share it, of schemes that it `may_be`, unless one of them `is_mistaken`:
    that is asked where no few steps lead to it.
    """

    def __init__(
        self,
        fitting: Fitting,
        planner: Planner,
        records: Sequence[OpRecord],
        is_mistaken: Callable[[], bool],
        may_be: Callable[[Scheme], bool] = lambda scheme: True,
    ) -> None:
        self._fitting, self._planner, self._records = fitting, planner, records
        self._is_mistaken, self._may_be = is_mistaken, may_be

    def composed(self, starts: Sequence[Scheme], in_others: Sequence[Scheme], in_longer: Sequence[Choice]) -> Choice:
        """The arithmetic of these records where none that is listed fits: from each of `starts`, of which the first is
        the nearest that is known, as long as a step takes something away. Before that what the same op does `in_longer`
        steps, which tell more, where it leaves as little of these as there; after it what it does `in_others`, where
        that fits them all.

        Behind integers nothing falls by much until all is right, for any difference turns some of their roundings: so
        little counts.
        """
        if there := next(filter(None, (self._as_there(one, starts[0]) for one in in_longer)), None):
            return there
        few = sorted(self._records[:_FEW], key=lambda record: self._fitting.left(record, starts[0]))
        few.insert(0, few.pop((len(few) - 1) // 2))  # not the one that is mistaken
        is_led = self._fitting.goes_part_of_the_way(few[0])
        before = missed = self._left_of(starts[0], few)
        start, best, rivals = starts[0], starts[0], starts
        for begun in starts:
            if missed > FINE and not self._is_where(starts[0], begun, few):
                end, near, less = self._nearer(begun, few, is_led)
                if less < missed:
                    start, best, rivals, missed = begun, end, near, less
        best = self._simplest(best, few)
        left = self._left_of(best, few)
        stored = median_low(map(self._fitting.rounded_when_stored, few))
        is_less = score(_beyond(stored, left), COMPOSED) > score(_beyond(stored, before))
        if not is_less and not (is_led and self._leads(best, start, starts, few)):
            told = self._that_fits(in_others)
            if told is None and self._planner.is_segment(few[0]) and _beyond(stored, before) <= stored:
                told = self._a_step_that_fits(starts[0], few)
            return told or Choice((starts[0],), False, before)
        # Of one alone it would not be asked whether it fits.
        candidates = tuple(dict.fromkeys((best, *rivals, *starts)))
        choice = self._fitting.settle(candidates, self._records, usual=(best,))
        if choice.settled:
            return choice
        if left > NOTHING:  # as where weights lie halfway between two others: what rounds them otherwise leaves less
            return self._that_fits(starts[1:]) or choice
        # What rounds the same may add up otherwise: ggml's blocks as integers, where others multiply floats.
        changes = self._planner.changes((best,), *self._records)
        same = [s for s in changes if self._may_be(s) and self._left_of(s, few) <= NOTHING]
        return self._fitting.settle((best, *same), self._records) if same else choice

    def _is_where(self, first: Scheme, begun: Scheme, few: Sequence[OpRecord]) -> bool:
        """Whether from there steps lead where they do from the first start: nearer to it than what that leaves, which
        this does not lessen. (In bfloat16, behind which nothing can be followed, half of the time went into steps from
        such.)
        """
        left = [self._fitting.left(record, first) for record in few]
        return begun != first and all(
            self._fitting.left(record, begun) >= most and self._fitting.is_near(record, first, begun, most)
            for record, most in zip(few, left, strict=True)
        )

    def _simplest(self, scheme: Scheme, few: Sequence[OpRecord]) -> Scheme:
        """The same without what takes nothing away: operands in float16 where all values are held in bfloat16."""
        for way in _PLAINLY:
            without = way.of(scheme)
            if (
                not way.is_of(scheme)
                and self._may_be(without)
                and self._left_of(without, few) <= self._left_of(scheme, few)
            ):
                scheme = without
        return scheme

    def _leads(self, scheme: Scheme, start: Scheme, starts: Sequence[Scheme], few: Sequence[OpRecord]) -> bool:
        """Whether the way from a start to the scheme explains a part of what any of the starts leaves of most of the
        records: of one, an expert that another rounding chose explains as much.
        """
        least = {record: min(self._fitting.left(record, one) for one in starts) for record in few}
        told = [r for r in few if self._fitting.unexplained(r, scheme, start) <= UNEXPLAINED * least[r]]
        return 2 * len(told) > len(few)

    def _as_there(self, there: Choice, nearest: Scheme) -> Choice | None:
        """What was chosen for longer steps, if it leaves as little of these records as of those, no more than what is
        nearest to them, and half of them at least are not faulty by it: a layer may be mistaken. Or if it leaves half
        of what the nearest does: behind integers one rounding that turned turns others in all that follows of a token,
        and single ones do not tell what is right.
        """
        left = min(self._left_of(scheme, self._records) for scheme in there.schemes)
        otherwise = self._left_of(nearest, self._records)
        is_as_little = left <= min(ALIKE * max(NOTHING, there.nmse), otherwise)
        if not (is_as_little or score(left, KNOWN) > score(otherwise)) or not all(map(self._may_be, there.schemes)):
            return None
        unfit = tuple(r for r in self._records if all(self._fitting.is_faulty(r, s) for s in there.schemes))
        alike = tuple(filter(self._may_be, there.alike))
        return Choice(there.schemes, True, left, unfit, alike) if 2 * len(unfit) <= len(self._records) else None

    def _that_fits(self, schemes: Sequence[Scheme]) -> Choice | None:
        """Of those that fit all the records the one that leaves least."""
        fit = [scheme for scheme in schemes if all(self._fitting.fits(record, scheme) for record in self._records)]
        told = min(fit, key=lambda scheme: self._left_of(scheme, self._records), default=None)
        return Choice((told,), True, self._left_of(told, self._records)) if told else None

    def _a_step_that_fits(self, start: Scheme, few: Sequence[OpRecord]) -> Choice | None:
        """Where most of what a segment leaves was rounded when it was stored, no step takes much away: single values
        tell then, which exceed their bounds in all arithmetics but the right one; where they do not exceed them at the
        start, nothing does. (Single ops are asked one by one.)
        """
        if all(self._fitting.fits(record, start) for record in self._records):
            return None
        likely = self._likely(self._planner.changes((start,), *self._records), few[0], start)
        most = self._fitting.left(few[0], start)
        return self._that_fits([scheme for scheme in likely if self._fitting.left(few[0], scheme) <= most])

    def _nearer(self, start: Scheme, few: Sequence[OpRecord], is_led: bool) -> tuple[Scheme, Sequence[Scheme], float]:
        """Where steps from a scheme end, by a few of the records, the rivals of that, and by how much it misses. The
        best go on together, for two ways of a part may be alike while another part is done wrongly. Where replay goes
        only a part of the way with the engine, it `is_led` by where a step leads.
        """
        n_values = min(record.size for record in few)
        alike, enough = (1.0, LESS_UNEXPLAINED) if is_led else (ALIKE, 1 - max(LESS, LUCKY / n_values))

        def miss(record: OpRecord, scheme: Scheme) -> float:
            if is_led:
                return self._fitting.unexplained(record, scheme, start)
            return self._fitting.left(record, scheme)

        found, near = {start: self._left_of(start, few)}, [start]
        best = start
        while FINE < found[best] <= COARSE:  # states in float16 made 5e-11 of a layer whose floor was 1e-11
            if len(found) > _MANY and self._is_mistaken():
                return start, [start], found[start]
            ahead = near[:_ABREAST]
            changes = self._planner.changes(ahead, *self._records)
            if found[best] > BLIND:
                changes = [s for s in changes if rounding_named(s.linear.stored).is_coarse]
            others = (s for s in changes if s not in found)
            first = {s: miss(few[0], s) for s in self._likely(others, few[0], ahead[0])}
            before = miss(few[0], ahead[0])
            if min(first.values(), default=math.inf) >= enough * before:
                break
            for other, left in first.items():  # one mistake among three is outvoted
                found[other] = median_low(miss(record, other) for record in few) if left <= alike * before else left
            near = sorted(found, key=lambda scheme: found[scheme])
            if found[near[0]] >= enough * found[best]:
                break
            best = near[0]
        rivals = [scheme for scheme in near if found[scheme] <= alike * found[best]]
        return best, rivals, found[best]

    def _likely(self, schemes: Iterable[Scheme], record: OpRecord, start: Scheme) -> Iterator[Scheme]:
        """Those that it may be, and that no part of the record refutes, of schemes that differ from the start."""
        return (s for s in schemes if self._may_be(s) and not self._fitting.refutes(record, start, s))

    def _left_of(self, scheme: Scheme, records: Sequence[OpRecord]) -> float:
        return median_low(self._fitting.left(record, scheme) for record in records)


def _beyond(stored: float, left: float) -> float:
    """What is left besides what was rounded when it was `stored`, in any arithmetic, as far as that is known."""
    return max(left - stored, STORED_TO * stored)
