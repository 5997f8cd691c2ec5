"""Time for the search of causes: where faults are is known before it begins; and how much of the search is done."""

import math
import time
from collections.abc import Callable

Progress = Callable[[float], None]  # told the share that is done


class OutOfTime(Exception):  # noqa: N818 - no error: what is found until then is said
    """The time is over."""


class Budget:
    """So many seconds, from now on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def has(self, seconds: float) -> bool:
        """Whether so many are left."""
        return time.monotonic() + seconds <= self._end

    @property
    def left(self) -> float:
        """How many are left."""
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        """Raises OutOfTime where they are over."""
        if time.monotonic() > self._end:
            raise OutOfTime


ENDLESS = Budget(math.inf)


def within(progress: Progress, done: int, of: int) -> Progress:
    """The progress of one part of several."""
    return lambda fraction: progress((done + fraction) / of)
