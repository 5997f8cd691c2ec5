"""Time for the search of causes: where faults are is known before it begins."""

import math
import time


class OutOfTime(Exception):  # noqa: N818 - no error: what is found until then is said
    """The time is over."""


class Budget:
    """So many seconds, from now on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def has(self, seconds: float) -> bool:
        """Whether so many are left."""
        return time.monotonic() + seconds <= self._end

    def check(self) -> None:
        """Raises OutOfTime where they are over."""
        if time.monotonic() > self._end:
            raise OutOfTime


ENDLESS = Budget(math.inf)
