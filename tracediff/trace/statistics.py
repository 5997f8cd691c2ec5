"""Statistics of a value that is seen in pieces, for engines that write from numpy."""

from dataclasses import dataclass

import numpy as np

from tracediff.trace.format import Statistics

# Float32 sums over this many elements (numpy adds pairwise) err by about 1e-7 of the RMS; blocks add in float64.
_BLOCK = 4096


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
        """Add the values of a float32 array."""
        x = np.ascontiguousarray(x).reshape(-1)
        total, squares = _sums(x)
        if not np.isfinite(squares):
            nan, inf = int(np.isnan(x).sum()), int(np.isinf(x).sum())
            self.nan += nan
            self.inf += inf
            x = x[np.isfinite(x)].astype(np.float64)  # in float64 no square of a float32 overflows
            total, squares = _sums(x)
        if x.size:
            self.count += x.size
            self.min = min(self.min, float(x.min()))
            self.max = max(self.max, float(x.max()))
            self.sum += total
            self.squares += squares

    def statistics(self) -> Statistics:
        """Min, max, mean and RMS of what was seen."""
        if not self.count:
            return Statistics(None, None, None, None, self.nan, self.inf)
        n = self.count
        return Statistics(self.min, self.max, self.sum / n, float(np.sqrt(self.squares / n)), self.nan, self.inf)


def _sums(x: np.ndarray) -> tuple[float, float]:
    whole = x.size - x.size % _BLOCK
    blocks, rest = x[:whole].reshape(-1, _BLOCK), x[whole:].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        total = blocks.sum(axis=1).sum(dtype=np.float64) + rest.sum()
        squares = np.einsum("ij,ij->i", blocks, blocks).sum(dtype=np.float64) + rest @ rest
    return float(total), float(squares)
