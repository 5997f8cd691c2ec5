"""A look at a hypothesis: computed for a few values of each loop variable, or, where only the places of the stores are
others, from the right values. What does not pass the look is not computed in whole.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracediff.diagnose.solve.interpret import CannotRunError
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.diagnose.solve.variant import Bound, Touches, parsed

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
            if touches == "values":
                return self._of_part(hypothesis)
            made = self._moved(hypothesis) if touches == "places" else hypothesis.output().ravel()
            return self._seen(np.arange(made.size), made)
        except CannotRunError:
            return None

    def _of_part(self, hypothesis: Bound) -> Seen:
        return self._seen(*self._part(hypothesis))

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

    def _moved(self, hypothesis: Bound) -> np.ndarray:
        """The right values where the edited stores put them."""
        made = hypothesis.untouched().ravel()
        edited = hypothesis.places()
        if not edited:
            return made
        if len(edited) != len(self._sources):
            raise CannotRunError("another number of stores")
        for stored, (names, source) in zip(edited, self._sources, strict=True):
            loops = [stored.loops[name] for name in names]
            known = (stored.at >= 0) & (stored.at < made.size)
            for values, size in zip(loops, source.shape, strict=True):
                known &= (values >= 0) & (values < size)
            made[stored.at[known]] = self.problem.exact[source[tuple(values[known] for values in loops)]]
        return made

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
