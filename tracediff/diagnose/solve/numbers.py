"""Another number: eps, theta, a scale, fitted to what was recorded."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracediff.diagnose.solve import formulas
from tracediff.diagnose.solve.bound import Bound
from tracediff.diagnose.solve.look import Look
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.variant import Priced, Variant

_DECADES = 8  # on either side of the right number in which the fit may begin
_LOOK = "the positions of each step: how many are cached before it"
_POSITIONS = 64  # by which they may be off
_ROUNDS = 40
_SHORT = 1e-5  # to which a fit is one of few digits: float32's noise takes it so far
_SAME = 1e-6  # to which a fitted number is the right one
_BITS = 24  # of a fitted number; a usual one takes few
_USUAL = (0.0, 1.0, *(m * 10.0**e for e in range(-12, 8) for m in (1, 2, 5)), 2.0, 0.5, 0.25, 0.125)


def variants(problem: Problem, look: Look) -> Iterator[Priced]:
    """Each real number of the loops, as it fits best."""
    for name, right in problem.loops.numbers.items():
        if isinstance(right, float) and name in problem.loops.source:
            fitted = _Fit(problem.loops, name, look).best(right)
            if fitted is None or not np.isfinite(fitted):
                continue
            called = {"theta": "rope's base", "scale": "the scale", "freq_scale": "the frequency scale"}.get(name, name)
            for value, bits in (*((u, 6.0) for u in _near(fitted)), (fitted, _BITS)):
                words = f"{called} is {value:.6g}; it should be {right:.6g}"
                yield Priced(
                    Variant(words, problem.loops.source, numbers=((name, value),)),
                    bits,
                    f"where {called} is read from the file",
                    fitted=True,
                )


def constants(problem: Problem, look: Look) -> Iterator[Priced]:
    """Each number in a formula, as it fits best."""
    for right, source in formulas.constants(problem.loops.source):
        fitted = _Fit(problem.loops.with_(source, {}, {}), formulas.CONSTANT, look).best(right)
        if fitted is not None and np.isfinite(fitted) and abs(fitted / right - 1) > _SAME:
            for value, bits in (*((u, 8.0) for u in _near(fitted)), (fitted, _BITS)):
                edited = source.replace(formulas.CONSTANT, f"{value:.6g}")
                yield Priced(Variant("", edited), bits, fitted=True)


def positions(problem: Problem) -> Iterator[Priced]:
    """Of what is rotated, positions that are too high or too low by one number, or one position for all."""
    source = problem.loops.source
    if "positions[t]" not in source:
        return
    for by in (k for k in range(-_POSITIONS, _POSITIONS + 1) if k):
        words = f"positions are {abs(by)} too {'high' if by > 0 else 'low'}"
        yield Priced(Variant(words, source.replace("positions[t]", f"(positions[t] + {by})")), 8.0, _LOOK)
    for one in range(_POSITIONS):
        words = f"every token is rotated as position {one}"
        yield Priced(Variant(words, source.replace("positions[t]", str(one))), 8.0, _LOOK)


def _near(fitted: float) -> list[float]:
    """Usual numbers that the fit may mean, and such of few digits."""
    usual = [one for one in _USUAL if abs(one - fitted) <= 1e-3 * abs(fitted) or (not one and abs(fitted) < 1e-9)]
    short = (float(f"{fitted:.{digits}g}") for digits in (2, 3, 4, 5))
    return [*usual, *(one for one in short if abs(one - fitted) <= _SHORT * abs(fitted))]


@dataclass(frozen=True)
class _Fit:
    loops: Bound
    name: str
    look: Look

    def left(self, value: float) -> np.ndarray:
        """What is left of the recorded values that are looked at."""
        other = self.loops.with_(self.loops.source, {}, {self.name: value})
        if not np.isfinite(value):
            return np.array([np.inf])
        return self.look.left(other)

    @np.errstate(over="ignore", invalid="ignore")  # of values that are Inf, or all but
    def best(self, right: float) -> float | None:
        """By Gauss-Newton in the logarithm, from the decade that leaves least."""
        decades = [right * 10.0**e for e in range(-_DECADES, _DECADES + 1)]
        sizes = [float(np.square(self.left(value)).sum()) for value in decades]
        value = decades[int(np.argmin(sizes))]
        least = min(sizes)
        for _ in range(_ROUNDS):
            now = self.left(value)
            slope = (self.left(value * 1.0001) - now) / 1e-4
            if not np.square(slope).sum():
                return None
            step = -float(slope @ now / (slope @ slope))
            step = max(-1.0, min(1.0, step))
            other = value * np.exp(step)
            size = float(np.square(self.left(other)).sum())
            if not size < least:
                break
            value, least = other, size
        return value
