"""Sums over arrays too long for float32, and statistics of a value that is seen in pieces."""

import math
from dataclasses import dataclass

import numpy as np

from tracediff.trace.format import Statistics

# A float32 sum of this many products errs by about 1e-7 of the size of its terms; blocks are added in float64.
_BLOCK = 4096
_ONES = {dtype: np.ones(_BLOCK, dtype) for dtype in (np.dtype("f4"), np.dtype("f8"))}
_CHUNK = 1 << 17  # 512 kB: four passes find it in the second-level cache
# Extremes between which float32 holds the squares of all values that matter.
_SQUARES_FIT = (1e-15, 1e18)


@dataclass(slots=True)
class Moments:
    """Sums over the finite values seen so far, and counts of the others."""

    count: int = 0
    min: float = float("inf")
    max: float = float("-inf")
    sum: float = 0.0
    squares: float = 0.0
    nan: int = 0
    inf: int = 0

    def add(self, x: np.ndarray) -> None:
        """Add the values of a float32 or float64 array."""
        x = np.ascontiguousarray(x).reshape(-1)
        for at in range(0, x.size, _CHUNK):
            self.merge(moments(x[at : at + _CHUNK]))

    def merge(self, other: "Moments") -> None:
        """Add what another has seen."""
        self.count += other.count
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)
        self.sum += other.sum
        self.squares += other.squares
        self.nan += other.nan
        self.inf += other.inf

    def statistics(self) -> Statistics:
        """Min, max, mean and RMS of what was seen."""
        if not self.count:
            return Statistics(None, None, None, None, self.nan, self.inf)
        n = self.count
        return Statistics(self.min, self.max, self.sum / n, math.sqrt(self.squares / n), self.nan, self.inf)


def ratio(error: float, signal: float) -> float:
    """NMSE of a squared error and signal: infinite where there is an error and no signal, 0 where there is neither."""
    if not signal:
        return 0.0 if not error else math.inf
    return error / signal


def moments(x: np.ndarray) -> Moments:
    """Those of a flat float32 or float64 array."""
    if not x.size:
        return Moments()
    low, high = float(x.min()), float(x.max())
    largest = max(-low, high)
    if largest == 0 or _SQUARES_FIT[0] < largest < _SQUARES_FIT[1]:  # not so where there is a NaN
        return Moments(x.size, low, high, _dot(x), _dot(x, x))
    x = x.astype(np.float64)
    finite = x[np.isfinite(x)]
    nan = int(np.isnan(x).sum())
    n_inf = x.size - finite.size - nan
    if not finite.size:
        return Moments(nan=nan, inf=n_inf)
    return Moments(
        finite.size, float(finite.min()), float(finite.max()), _dot(finite), _dot(finite, finite), nan, n_inf
    )


def _dot(x: np.ndarray, y: np.ndarray | None = None) -> float:
    """sum(x * y), or sum(x): blocks in their own precision, added in float64.

    One BLAS call a block: four times as fast as casting to float64, and too short for BLAS to start threads.
    """
    whole = x.size - x.size % _BLOCK
    total = 0.0
    if whole:
        blocks = x[:whole].reshape(-1, _BLOCK)
        others = _ONES[x.dtype] if y is None else y[:whole].reshape(-1, _BLOCK)
        total = float(np.vecdot(blocks, others).sum(dtype=np.float64))
    if whole < x.size:
        rest = x[whole:].astype(np.float64)
        total += float(rest.sum() if y is None else rest @ y[whole:])
    return total
