"""A number of an op fitted to what an engine made of it: an epsilon, a base frequency, a scale."""

import math
from collections.abc import Callable, Iterable

from torch import Tensor

_ROUNDS = 25
_STEP = 1e-6  # of the logarithm, by which the derivative is taken
_FIRST_STEP, _LAST_STEP, _NARROWER = 0.3, 1e-6, 0.25  # of the logarithm, where there is none
_HARDLY_MORE = 4.0  # what two fits to within the noise differ by, in squared error
_DIGITS = 6

Make = Callable[[float], Tensor]


def fitted(make: Make, target: Tensor, starts: Iterable[float]) -> float | None:
    """The positive number whose `make(number)` is nearest to `target`; None where none is near at all.

    From the best of `starts` by Gauss-Newton in the logarithm; then the roundest number that leaves hardly more, for
    people choose round ones.
    """

    def error(number: float) -> float:
        off = float((make(number) - target).square().sum())
        return off if math.isfinite(off) else math.inf

    best = min(starts, key=error)
    for _ in range(_ROUNDS):
        here = make(best)
        slope = (make(best * math.exp(_STEP)) - here) / _STEP
        size = float(slope.square().sum())
        step = float((slope * (target - here)).sum()) / size if size else 0.0
        other = best * math.exp(max(-1.0, min(1.0, step))) if math.isfinite(step) else best
        if not error(other) < error(best):
            break
        best = other
    if not error(best) < float(target.square().sum()):
        return None
    return _round(best, error(best), error)


def searched(left: Callable[[float], float], start: float) -> float:
    """The positive number near `start` that leaves least, found by looking alone: where arithmetic rounds there are no
    derivatives. Rounded as that of `fitted`.
    """
    best, least, step = start, left(start), _FIRST_STEP
    while step > _LAST_STEP:
        nearby = {other: left(other) for other in (best * math.exp(step), best * math.exp(-step))}
        other = min(nearby, key=lambda number: nearby[number])
        if nearby[other] < least:
            best, least = other, nearby[other]
        else:
            step *= _NARROWER
    return _round(best, least, left)


def _round(number: float, least: float, error: Callable[[float], float]) -> float:
    """The number to the fewest digits that leave hardly more."""
    rounded = (float(f"{number:.{digits}e}") for digits in range(_DIGITS))
    return next((other for other in rounded if error(other) <= _HARDLY_MORE * least), number)
