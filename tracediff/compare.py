"""A pair of arrays to metrics: float64, streamed in chunks that stay in the cache; no thresholds."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tracediff.result import Drift, Statistics, Worst

# 16k pairs are 512 kB in float64 (difference, both sides and ones): within a second-level cache.
_CHUNK = 1 << 14
_D, _R, _C = range(3)  # difference, reference, candidate


@dataclass(slots=True)
class _Sums:
    """Sums over pairs of finite values, and where they differ most."""

    n: int = 0
    squares: np.ndarray = field(default_factory=lambda: np.zeros(3))
    totals: np.ndarray = field(default_factory=lambda: np.zeros(3))
    product: float = 0.0
    low: np.ndarray = field(default_factory=lambda: np.full(3, np.inf))
    high: np.ndarray = field(default_factory=lambda: np.full(3, -np.inf))
    nan: np.ndarray = field(default_factory=lambda: np.zeros(3, int))
    inf: np.ndarray = field(default_factory=lambda: np.zeros(3, int))
    max_abs: float = -1.0
    at: int = 0

    def add(self, reference: np.ndarray, candidate: np.ndarray, offset: int, scratch: np.ndarray) -> None:
        """Add a chunk of pairs that begins at flat index `offset`."""
        rows, ones = scratch[:3, : reference.size], scratch[3, : reference.size]
        rows[_R], rows[_C] = reference, candidate
        with np.errstate(invalid="ignore"):  # Inf on both sides
            np.subtract(rows[_C], rows[_R], out=rows[_D])
        squares = [row @ row for row in rows]  # one BLAS dot each: rows @ rows.T takes six times as long
        if not np.isfinite(sum(squares)):
            rows = self._finite(rows)
            ones = ones[: rows.shape[1]]
            squares = [row @ row for row in rows]
        if not rows.shape[1]:
            return
        self.n += rows.shape[1]
        self.squares += squares
        self.totals += [row @ ones for row in rows]
        self.product += float(rows[_R] @ rows[_C])
        low, high = rows.min(axis=1), rows.max(axis=1)
        np.minimum(self.low, low, out=self.low)
        np.maximum(self.high, high, out=self.high)
        largest = max(-low[_D], high[_D])
        if largest > self.max_abs:
            self.max_abs = float(largest)
            difference = np.abs(candidate.astype(np.float64) - reference)
            self.at = offset + int(np.where(np.isfinite(difference), difference, -1).argmax())

    def _finite(self, rows: np.ndarray) -> np.ndarray:
        self.nan += np.isnan(rows).sum(axis=1)
        self.inf += np.isinf(rows).sum(axis=1)
        return rows[:, np.isfinite(rows).all(axis=0)]

    def merge(self, other: "_Sums") -> None:
        """Add what another has summed."""
        self.n += other.n
        self.squares += other.squares
        self.totals += other.totals
        self.product += other.product
        self.nan += other.nan
        self.inf += other.inf
        np.minimum(self.low, other.low, out=self.low)
        np.maximum(self.high, other.high, out=self.high)
        if other.max_abs > self.max_abs:
            self.max_abs, self.at = other.max_abs, other.at

    def side(self, row: int) -> Statistics:
        """Statistics of the reference or the candidate."""
        nan, inf = int(self.nan[row]), int(self.inf[row])
        if not self.n:
            return Statistics(None, None, None, None, nan, inf)
        mean, rms = self.totals[row] / self.n, np.sqrt(self.squares[row] / self.n)
        return Statistics(float(self.low[row]), float(self.high[row]), float(mean), float(rms), nan, inf)

    @property
    def nmse(self) -> float:
        """sum((c - r)^2) / sum(r^2); inf where the reference is all zero and the candidate is not."""
        return _ratio(self.squares[_D], self.squares[_R])

    @property
    def cosine(self) -> float:
        """Of the angle between the two; 1 where both are zero."""
        norms = float(np.sqrt(self.squares[_R] * self.squares[_C]))
        if norms == 0:
            return 1.0 if self.squares[_D] == 0 else 0.0
        return self.product / norms


def _ratio(error: float, signal: float) -> float:
    if signal == 0:
        return 0.0 if error == 0 else float("inf")
    return float(error / signal)


def compare_values(
    reference: np.ndarray, candidate: np.ndarray, hidden: np.ndarray | None = None
) -> tuple[Statistics, Statistics, Drift]:
    """Statistics of both sides and their drift. Shapes are equal, or one is the other with heads flattened.

    `hidden` [T, S] marks pairs that do not count (scores that the causal mask hides). Where the first axis is
    the token's, the first token is measured apart: its massive activations hide the rest.
    """
    shape = reference.shape if reference.ndim >= candidate.ndim else candidate.shape
    by_token = hidden is None and len(shape) >= 2 and shape[0] > 1
    if hidden is not None:
        hidden = np.broadcast_to(hidden, shape).reshape(-1)
    a, b = reference.reshape(-1), candidate.reshape(-1)
    first = a.size // shape[0] if by_token else 0
    whole, parts = _Sums(), (_Sums(), _Sums())
    scratch = np.ones((4, _CHUNK))
    for cut in _chunks(first, a.size):
        x, y = a[cut], b[cut]
        if hidden is not None:
            keep = ~hidden[cut]
            x, y = np.where(keep, x, 0), np.where(keep, y, 0)
        parts[cut.start >= first].add(x, y, cut.start, scratch)
    for part in parts:
        whole.merge(part)
    if hidden is not None:
        whole.n -= int(hidden.sum())
    at = tuple(int(i) for i in np.unravel_index(whole.at, shape)) if a.size else ()
    worst = Worst(at, *(float(x[whole.at]) for x in (a, b))) if a.size else Worst((), 0.0, 0.0)
    apart = (parts[0].nmse, parts[1].nmse) if by_token else (None, None)
    return (
        whole.side(_R),
        whole.side(_C),
        Drift(whole.nmse, whole.cosine, max(0.0, whole.max_abs), worst, *apart),
    )


def _chunks(first: int, size: int) -> Iterator[slice]:
    for start, stop in ((0, first), (first, size)):
        for at in range(start, stop, _CHUNK):
            yield slice(at, min(at + _CHUNK, stop))
