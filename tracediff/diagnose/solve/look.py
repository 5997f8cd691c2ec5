"""A look at a hypothesis: computed for a few values of each loop variable, or, where only the places of the stores are
others, from the right values. What does not pass the look is not computed in whole.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tracediff.diagnose.solve.interpret import CannotRunError, Stored
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.diagnose.solve.variant import SOMETHING, Bound, Touches, parsed

_NEARLY = 0.5  # of the wrong values: what gives fewer is not looked at again
_EACH = 4, 2  # values of each loop variable at which the output is wrong, and right
_POINTS = 1 << 22  # of the loops that are looked at as a whole to find those


@dataclass(frozen=True, slots=True)
class Seen:
    """What of a part of the output a hypothesis gives: shares of the wrong and of the right values there."""

    wrong: float
    right: float

    @property
    def passes(self) -> bool:
        """Whether nothing there speaks against it."""
        return self.wrong > 0.98 and self.right > 0.98


@dataclass(frozen=True)
class Look:
    """Looks at hypotheses of one problem."""

    problem: Problem

    @cached_property
    def only(self) -> dict[str, np.ndarray]:
        """The values of each loop variable that are looked at."""
        points = self._points
        wrong = self.problem.wrong[points["at"]]
        found = {}
        for name in points.keys() - {"at"}:
            values = points[name]
            bad = np.unique(values[wrong])
            good = np.setdiff1d(values, bad)
            found[name] = np.union1d(_spread(bad, _EACH[0]), _spread(good, _EACH[1]))
        return found

    @cached_property
    def _points(self) -> dict[str, np.ndarray]:
        """Of each store: its place, "at", and the loop variables that may be restricted."""
        loops = self.problem.loops
        program = parsed(loops.source)
        n = self.problem.exact.size
        only = {}
        if n > _POINTS and loops.loops.block:
            name, _ = loops.loops.block
            wrong = np.flatnonzero(self.problem.wrong) % (n // int(loops.numbers["T"]))
            only = {name: np.union1d(_spread(np.unique(wrong), 64), np.arange(8))}
        stores = loops.places(only)
        names = set.intersection(*(set(stored.loops) for stored in stores)) & program.restrictable
        found = {name: np.concatenate([stored.loops[name] for stored in stores]) for name in names}
        return {**found, "at": np.concatenate([stored.at for stored in stores])}

    def at(self, hypothesis: Bound, touches: Touches) -> Seen | None:
        """What a hypothesis gives that touches values or places; None where its loops cannot run."""
        try:
            seen = self._at(hypothesis, touches)
            # What lies beyond an array is not in the trace: what follows from it cannot be held against a hypothesis.
            if seen.wrong > _NEARLY and not seen.passes and touches != "places":
                return self._at(hypothesis, touches, self._at_random(hypothesis))
            return seen
        except CannotRunError:
            return None

    def _at_random(self, hypothesis: Bound) -> Bound:
        return replace(hypothesis, beyond=SOMETHING)

    def _at(self, hypothesis: Bound, touches: Touches, other: Bound | None = None) -> Seen:
        """By its own values, or by those only that are the same under another."""
        if touches == "places":
            made, known = self._moved(hypothesis)
            return self._seen(np.flatnonzero(known), made[known])
        at, made = self._part(hypothesis) if touches == "values" else self._whole(hypothesis)
        if other:
            also = (self._part(other) if touches == "values" else self._whole(other))[1]
            same = agree(made, also, np.zeros(1))
            at, made = at[same], made[same]
        return self._seen(at, made)

    def _whole(self, hypothesis: Bound) -> tuple[np.ndarray, np.ndarray]:
        made = hypothesis.output().ravel()
        return np.arange(made.size), made

    def _part(self, hypothesis: Bound) -> tuple[np.ndarray, np.ndarray]:
        stores = hypothesis.stores(self.only)
        if not stores:
            raise CannotRunError("nothing is stored")
        at, values = (np.concatenate([getattr(stored, x) for stored in stores]) for x in ("at", "values"))
        return at, values

    def left(self, hypothesis: Bound) -> np.ndarray:
        """Of the part that is looked at what is left of the recorded values, relative to how near it must come."""
        at, values = self._part(hypothesis)
        with np.errstate(all="ignore"):
            return np.nan_to_num((self.problem.recorded[at] - values) / self.problem.near[at])

    def _seen(self, at: np.ndarray, made: np.ndarray) -> Seen:
        problem = self.problem
        matched, wrong = agree(problem.recorded[at], made, problem.near[at]), problem.wrong[at]
        shares = (float(matched[some].mean()) if some.any() else 1.0 for some in (wrong, ~wrong))
        return Seen(*shares)

    def _moved(self, hypothesis: Bound) -> tuple[np.ndarray, np.ndarray]:
        """The right values where the edited stores put them, and where these are known: turns beyond those of the right
        loops make others.
        """
        made = hypothesis.untouched().ravel()
        known = np.ones(made.size, bool)
        edited = hypothesis.places()
        if not edited:
            return made, known
        if len(edited) != len(self._sources):
            raise CannotRunError("another number of stores")
        moved = [self._right(stored, *source) for stored, source in zip(edited, self._sources, strict=True)]
        if len({len(at) for at, _, _ in moved}) == 1:  # statements of one loop take turns
            moved = [tuple(np.stack(parts, -1).ravel() for parts in zip(*moved, strict=True))]
        for at, values, right in moved:
            inside = (at >= 0) & (at < made.size)
            made[at[inside]] = values[inside]
            known[at[inside]] = right[inside]
        return made, known
        if len(edited) != len(self._sources):
            raise CannotRunError("another number of stores")
        for stored, (names, source) in zip(edited, self._sources, strict=True):
            loops = [stored.loops[name] for name in names]
            inside = (stored.at >= 0) & (stored.at < made.size)
            right = np.ones(stored.at.size, bool)
            for values, size in zip(loops, source.shape, strict=True):
                right &= (values >= 0) & (values < size)
            values = np.zeros(stored.at.size)
            values[right] = self.problem.exact[source[tuple(values[right] for values in loops)]]
            made[stored.at[inside]] = values[inside]
            known[stored.at[inside]] = right[inside]
        return made, known

    def _right(self, stored: Stored, names: list[str], source: np.ndarray) -> tuple[np.ndarray, ...]:
        """Where it is stored, the right value of each turn, and whether there is one."""
        loops = [stored.loops[name] for name in names]
        right = np.ones(stored.at.size, bool)
        for values, size in zip(loops, source.shape, strict=True):
            right &= (values >= 0) & (values < size)
        made = np.zeros(stored.at.size)
        made[right] = self.problem.exact[source[tuple(values[right] for values in loops)]]
        return stored.at, made, right

    @cached_property
    def _sources(self) -> list[tuple[list[str], np.ndarray]]:
        """Of each store statement the places that the right loops store to, by loop variables."""
        found = []
        for stored in self.problem.loops.places():
            names = list(stored.loops)
            source = np.zeros([int(stored.loops[name].max()) + 1 for name in names], int)
            source[tuple(stored.loops[name] for name in names)] = stored.at
            found.append((names, source))
        return found


def _spread(values: np.ndarray, n: int) -> np.ndarray:
    """At most `n` of them, the first and the last among them."""
    if len(values) <= n:
        return values
    return values[np.linspace(0, len(values) - 1, n).astype(int)]
