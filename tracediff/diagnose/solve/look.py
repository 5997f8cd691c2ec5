"""A look at a hypothesis: computed for a few values of each loop variable, or, where only the places of the stores are
others, from the right values. What does not pass the look is not computed in whole.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tracediff.diagnose.solve.edit import Touches
from tracediff.diagnose.solve.loops.arrays import CannotRunError, Stored
from tracediff.diagnose.solve.loops.bound import SOMETHING, Bound
from tracediff.diagnose.solve.loops.program import parse
from tracediff.diagnose.solve.problem import Problem, agree

NEARLY_ALL = 0.98  # of some values: so many must a hypothesis give
_NEARLY = 0.5  # of the wrong values: what gives fewer is not looked at again
_EACH = 4, 2  # values of each loop variable at which the output is wrong, and right
_GLANCE = 2  # the same of wrong ones, for a first look that most do not pass
_SAMPLE = 10, 5  # places, wrong and right, that are looked at where stores are elsewhere
_POINTS = 1 << 22  # of the loops that are looked at as a whole to find those


@dataclass(frozen=True, slots=True)
class Shares:
    """What of a part of the output a hypothesis gives: shares of the wrong and of the right values there."""

    wrong: float
    right: float

    @property
    def passes(self) -> bool:
        """Whether nothing there speaks against it."""
        return min(self.wrong, self.right) > NEARLY_ALL


@dataclass(frozen=True)
class Look:
    """Looks at hypotheses of one problem."""

    problem: Problem

    @cached_property
    def _dtype(self) -> type:
        """Of the arithmetic: what overflowed in an engine does so in its float32."""
        return np.float64 if np.isfinite(self.problem.recorded).all() else np.float32

    @cached_property
    def only(self) -> dict[str, np.ndarray]:
        """The values of each loop variable that are looked at."""
        return {
            name: np.union1d(spread(bad, _EACH[0]), spread(good, _EACH[1])) for name, (bad, good) in self._turns.items()
        }

    @cached_property
    def few(self) -> dict[str, np.ndarray]:
        """Those of wrong ones that are looked at first: the first ones, which smaller arrays reach as well."""
        return {name: bad[:_GLANCE] for name, (bad, _) in self._turns.items()}

    @cached_property
    def _turns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The values of each loop variable at which something is wrong, and those at which nothing is."""
        points, found = self._points, {}
        wrong = self.problem.wrong[points["at"]]
        for name in points.keys() - {"at"}:
            bad = np.flatnonzero(np.bincount(points[name][wrong]))
            found[name] = bad, np.setdiff1d(points[name], bad)
        return found

    @cached_property
    def _sample(self) -> np.ndarray:
        """Some places of the output, wrong ones and right ones."""
        wrong = self.problem.wrong
        some = [spread(np.flatnonzero(x), n) for x, n in zip((wrong, ~wrong), _SAMPLE, strict=True)]
        return np.sort(np.concatenate(some))

    @cached_property
    def _points(self) -> dict[str, np.ndarray]:
        """Of each store: its place, "at", and the loop variables that may be restricted."""
        right = self.problem.loops
        program = parse(right.source)
        n = self.problem.exact.size
        only = {}
        if n > _POINTS and right.own.block:
            name, _ = right.own.block
            wrong = np.flatnonzero(self.problem.wrong.reshape(int(right.numbers["T"]), -1).any(0))
            only = {name: np.union1d(spread(wrong, 64), np.arange(8))}
        stores = right.places(only)
        names = set.intersection(*(set(stored.variables) for stored in stores)) & program.restrictable
        loops = [stored.loops() for stored in stores]
        found = {name: np.concatenate([one[name] for one in loops]) for name in names}
        found["at"] = np.concatenate([stored.at for stored in stores])
        kept = found["at"] < n  # of states only the last may be
        return {name: values[kept] for name, values in found.items()}

    def at(self, hypothesis: Bound, touches: Touches) -> Shares | None:
        """What a hypothesis gives that touches values or places; None where its loops cannot run."""
        try:
            if not self._may_be(hypothesis, touches):
                return Shares(0.0, 0.0)
            seen = self._at(hypothesis, touches)
            # What lies beyond an array is not in the trace: what follows from it cannot be held against a hypothesis.
            if seen.wrong > _NEARLY and not seen.passes and touches != "places":
                return self._at(hypothesis, touches, replace(hypothesis, beyond=SOMETHING))
            return seen
        except CannotRunError:
            return None

    def _may_be(self, hypothesis: Bound, touches: Touches) -> bool:
        """Whether it gives any of the few wrong values that are looked at first, or what it gives is not known."""
        unstored = 0
        if touches == "values":
            stores, beyond = hypothesis.stored(self.few, self._dtype)
            if beyond or not stores:
                return beyond
            at, values = _joined(stores, self.problem.exact.size)
        elif touches == "places" and "before" not in hypothesis.arrays:
            at, values = self._sent(hypothesis)
            unstored = self._zeros
        else:
            return True
        some = self.problem.wrong[at]
        at, values = at[some], values[some]
        return len(at) <= unstored or bool(agree(self.problem.recorded[at], values, self.problem.near[at]).any())

    @cached_property
    def _zeros(self) -> int:
        """To how many wrong places nothing may have been stored. As many stores may not be the last to theirs: two
        turns that store to one place leave another without.
        """
        return int((self.problem.recorded[self.problem.wrong] == 0).sum())

    def _sent(self, hypothesis: Bound) -> tuple[np.ndarray, np.ndarray]:
        """Of a few turns places that are not theirs and the right values that they store there."""
        places, values = [], []
        for stored, source in self._paired(hypothesis.places(self.few)):
            own, known = self._own(stored.loops(), *source)
            sent = known & (stored.at != own) & (stored.at >= 0) & (stored.at < self.problem.exact.size)
            places.append(stored.at[sent])
            values.append(self.problem.exact[own[sent]])
        return np.concatenate(places or [np.zeros(0, int)]), np.concatenate(values or [np.zeros(0)])

    def _at(self, hypothesis: Bound, touches: Touches, other: Bound | None = None) -> Shares:
        """By its own values, or by those only that are the same under another."""
        at, made = self._made(hypothesis, touches)
        if other:
            also = self._made(other, touches)[1]
            same = agree(made, also, np.zeros(1))
            at, made = at[same], made[same]
        return self._seen(at, made)

    def _made(self, hypothesis: Bound, touches: Touches) -> tuple[np.ndarray, np.ndarray]:
        """Places that are looked at, and the values there."""
        if touches == "places":
            return self._moved(hypothesis)
        return (self._part if touches == "values" else self._sampled)(hypothesis)

    def _sampled(self, hypothesis: Bound) -> tuple[np.ndarray, np.ndarray]:
        """The values at some places, by the turns of the loops that store to them last."""
        program = parse(hypothesis.source)
        only: dict[str, np.ndarray] = {}
        for stored in hypothesis.places():
            last = self._last(stored)
            for name, values in stored.loops(last[last >= 0]).items():
                if name in program.restrictable:
                    only[name] = np.union1d(only.get(name, values[:0]), values)
        made = hypothesis.untouched(self._sample)
        for stored in hypothesis.stored(only, self._dtype)[0]:
            there, places = self._in_sample(stored.at)
            made[places] = stored.values[there]
        return self._sample, made

    def _last(self, stored: Stored) -> np.ndarray:
        """Of each place of the sample the last store to it; -1 where there is none."""
        last = np.full(len(self._sample), -1)
        there, places = self._in_sample(stored.at)
        last[places] = there
        return last

    def _in_sample(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these places are of the sample, and where it has them."""
        there = np.flatnonzero(self._is_in_sample.take(at, mode="clip"))
        there = there[at[there] >= 0]
        return there, np.searchsorted(self._sample, at[there])

    @cached_property
    def _is_in_sample(self) -> np.ndarray:
        """Of each place of the output, and of one for all beyond it, whether the sample has it."""
        found = np.zeros(self.problem.exact.size + 1, bool)
        found[self._sample] = True
        return found

    def _part(self, hypothesis: Bound) -> tuple[np.ndarray, np.ndarray]:
        stores, _ = hypothesis.stored(self.only, self._dtype)
        if not stores:
            raise CannotRunError("nothing is stored")
        return _joined(stores, self.problem.exact.size)

    def share(self, hypothesis: Bound, touches: Touches) -> float:
        """Of the squared error what a hypothesis leaves, by what is looked at, each up to a factor: numbers are fitted
        afterwards. Infinite where its loops cannot run.
        """
        problem = self.problem
        try:
            at, made = self._made(hypothesis, touches)
        except CannotRunError:
            return math.inf
        with np.errstate(all="ignore"):
            left, before = (_unlike(x, problem.recorded[at]) for x in (made, problem.exact[at]))
            return float(np.nan_to_num(left / before, nan=math.inf, posinf=math.inf))

    def left(self, hypothesis: Bound) -> np.ndarray:
        """Of the part that is looked at what is left of the recorded values, relative to how near it must come."""
        at, values = self._part(hypothesis)
        with np.errstate(all="ignore"):
            return np.nan_to_num((self.problem.recorded[at] - values) / self.problem.near[at])

    def _seen(self, at: np.ndarray, made: np.ndarray) -> Shares:
        problem = self.problem
        matched, wrong = agree(problem.recorded[at], made, problem.near[at]), problem.wrong[at]
        shares = (float(matched[some].mean()) if some.any() else 1.0 for some in (wrong, ~wrong))
        return Shares(*shares)

    def _moved(self, hypothesis: Bound) -> tuple[np.ndarray, np.ndarray]:
        """Places of the sample and the right values that the edited stores put there, where these are known: turns
        beyond those of the right loops make others.
        """
        edited = hypothesis.places()
        n = sum(len(stored.at) for stored in edited)
        if "before" not in hypothesis.arrays and n + self._zeros < self.problem.exact.size:
            raise CannotRunError("too few stores")
        made, known = hypothesis.untouched(self._sample), np.ones(len(self._sample), bool)
        in_turn = len({len(stored.at) for stored in edited}) == 1  # statements of one loop
        before = np.full(len(self._sample), -1)
        for stored, source in self._paired(edited):
            last = self._last(stored)
            later = (last >= before if in_turn else True) & (last >= 0)
            own, known[later] = self._own(stored.loops(last[later]), *source)
            made[later] = self.problem.exact[own]
            before = np.maximum(before, last)
        return self._sample[known], made[known]

    def _paired(self, edited: list[Stored]) -> Iterator[tuple[Stored, tuple[list[str], np.ndarray]]]:
        """Edited stores and where the right ones store to; raises CannotRunError where there is another number."""
        if edited and len(edited) != len(self._sources):
            raise CannotRunError("another number of stores")
        return zip(edited, self._sources, strict=False)

    def _own(self, loops: dict[str, np.ndarray], names: list[str], source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The right place of each turn, and whether there is one."""
        at = [loops[name] for name in names]
        known = np.ones(len(at[0]), bool)
        for values, size in zip(at, source.shape, strict=True):
            known &= (values >= 0) & (values < size)
        own = np.zeros(len(known), int)
        own[known] = source[tuple(values[known] for values in at)]
        known &= own >= 0
        return own, known

    @cached_property
    def _sources(self) -> list[tuple[list[str], np.ndarray]]:
        """Of each store statement the places that the right loops store to, by loop variables."""
        found = []
        for stored in self.problem.loops.places():
            loops = stored.loops()
            names = list(loops)
            source = np.zeros([int(values.max()) + 1 for values in loops.values()], int)
            source[tuple(loops.values())] = np.where(stored.at < self.problem.exact.size, stored.at, -1)
            found.append((names, source))
        return found


def _joined(stores: list[Stored], size: int) -> tuple[np.ndarray, np.ndarray]:
    """What is stored to an output of this size."""
    at, values = (np.concatenate([getattr(stored, x) for stored in stores]) for x in ("at", "values"))
    return (at, values) if at.max(initial=0) < size else (at[at < size], values[at < size])


def _unlike(x: np.ndarray, y: np.ndarray) -> np.float64:
    """Of the squares of y what no multiple of x gives."""
    return np.float64(1 - (x @ y) ** 2 / ((x @ x) * (y @ y)))


def spread(values: np.ndarray, n: int) -> np.ndarray:
    """At most `n` of them, the first and the last among them."""
    if len(values) <= n:
        return values
    return values[np.linspace(0, len(values) - 1, n).astype(int)]
