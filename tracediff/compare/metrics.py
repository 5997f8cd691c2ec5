"""A pair of arrays to metrics, streamed in chunks that stay in the cache; no thresholds.

Differences of float32 values are taken in float32: correctly rounded, they are right to 6e-8 of themselves.
Sums are added up in float64 (`trace.statistics`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import local

import numpy as np

from tracediff.result import Drift, Statistics, Worst
from tracediff.trace.data import Stored
from tracediff.trace.statistics import Moments, moments, ratio

# 128k pairs are 1.5 MB in float32 (difference and both sides): within a second-level cache, and so long that the
# interpreter's share is small.
_CHUNK = 1 << 17


class _Scratch(local):
    """Where chunks of both sides are read to, again and again; of each thread its own."""

    def __init__(self) -> None:
        self.reference, self.candidate = np.empty((2, _CHUNK * 8), np.uint8)


_scratch = _Scratch()


@dataclass(slots=True)
class _Sums:
    """Sums over pairs of finite values, and where they differ most."""

    difference: Moments = field(default_factory=Moments)
    reference: Moments = field(default_factory=Moments)
    candidate: Moments = field(default_factory=Moments)
    max_abs: float = -1.0
    at: int = 0
    apart: int = 0  # pairs whose difference is not finite and that are not the same

    def add(self, reference: np.ndarray, candidate: np.ndarray, places: range | np.ndarray) -> None:
        """Add a chunk of pairs, both float32 or both float64, that are at these places of the flat values."""
        rows, index = [candidate - reference, reference, candidate], None
        parts = [moments(row) for row in rows]
        if any(part.nan or part.inf for part in parts):
            wide = rows[2].astype(np.float64) - rows[1]
            finite = np.isfinite(wide)  # not so if either side is not
            same = (reference == candidate) | (np.isnan(reference) & np.isnan(candidate))
            apart = np.flatnonzero(~finite & ~same)
            if apart.size and not self.apart:
                self.max_abs, self.at = math.inf, int(places[apart[0]])
            self.apart += int(apart.size)
            index = np.flatnonzero(finite)
            rows[0] = wide[index]
            parts[0] = moments(rows[0])
        for mine, part in zip((self.difference, self.reference, self.candidate), parts, strict=True):
            mine.merge(part)
        largest = max(-parts[0].min, parts[0].max)
        if parts[0].count and largest > self.max_abs:
            self.max_abs = largest
            at = rows[0].argmax() if largest == parts[0].max else rows[0].argmin()
            self.at = int(places[at if index is None else index[at]])

    def merge(self, other: "_Sums") -> None:
        """Add what another has summed."""
        self.apart += other.apart
        self.difference.merge(other.difference)
        self.reference.merge(other.reference)
        self.candidate.merge(other.candidate)
        if other.max_abs > self.max_abs:
            self.max_abs, self.at = other.max_abs, other.at

    @property
    def nmse(self) -> float:
        """sum((c - r)^2) / sum(r^2); inf where the reference is all zero and the candidate is not, or NaN is apart."""
        return math.inf if self.apart else ratio(self.difference.squares, self.reference.squares)

    @property
    def cosine(self) -> float:
        """Of the angle between the two, by the law of cosines; 1 where both are zero, NaN where NaN is apart."""
        if self.apart:
            return math.nan
        d, r, c = self.difference.squares, self.reference.squares, self.candidate.squares
        norms = math.sqrt(r * c)
        if norms == 0:
            return 1.0 if d == 0 else 0.0
        return min(1.0, max(-1.0, (r + c - d) / 2 / norms))


# Inf on both sides, 3e38 less -3e38, a signalling NaN that is cast, squares of 1e200: what comes of them is counted
# or Inf.
@np.errstate(over="ignore", invalid="ignore")
def compare_values(
    reference: np.ndarray | Stored,
    candidate: np.ndarray | Stored,
    hidden: np.ndarray | None = None,
    first_token: bool = True,
) -> tuple[Statistics, Statistics, Drift]:
    """Statistics of both sides and their drift. Shapes are equal, or one is the other with heads flattened.

    `hidden` [T, S] marks pairs that do not count (scores that the causal mask hides). Where the first axis is
    the token's, the first token is measured apart: its massive activations hide the rest. `first_token` says
    whether it is there at all.
    """
    shape = max(reference.shape, candidate.shape, key=len)
    by_token = first_token and hidden is None and len(shape) >= 2 and shape[0] > 1
    if hidden is not None:
        hidden = np.broadcast_to(hidden, shape).reshape(-1)
    a, b = _flat(reference, _scratch.reference), _flat(candidate, _scratch.candidate)
    size = math.prod(shape)
    wide = np.float64 if np.float64 in (reference.dtype, candidate.dtype) else np.float32
    first = size // shape[0] if by_token else 0
    whole, parts = _Sums(), (_Sums(), _Sums())
    for cut in _chunks(first, size):
        x = a(cut).astype(wide, copy=False)
        y = x if candidate is reference else b(cut).astype(wide, copy=False)
        places: range | np.ndarray = range(cut.start, cut.stop)
        if hidden is not None:
            seen = np.flatnonzero(~hidden[cut])
            x, y, places = x[seen], y[seen], cut.start + seen
        parts[cut.start >= first].add(x, y, places)
    for part in parts:
        whole.merge(part)
    worst = Worst((), 0.0, 0.0)
    if size:
        there = slice(whole.at, whole.at + 1)
        worst = Worst(tuple(map(int, np.unravel_index(whole.at, shape))), float(a(there)[0]), float(b(there)[0]))
    first_nmse, other_nmse = (part.nmse if by_token else None for part in parts)
    return (
        whole.reference.statistics(),
        whole.candidate.statistics(),
        Drift(whole.nmse, whole.cosine, max(0.0, whole.max_abs), worst, first_nmse, other_nmse, whole.apart),
    )


@np.errstate(over="ignore", invalid="ignore")
def statistics_of(values: np.ndarray | Stored, hidden: np.ndarray | None = None) -> Statistics:
    """Those of one side, of values that are not `hidden` [T, S]."""
    hidden = None if hidden is None else np.broadcast_to(hidden, values.shape).reshape(-1)
    read, seen = _flat(values, _scratch.reference), Moments()
    for cut in _chunks(0, math.prod(values.shape)):
        x = read(cut)
        x = x.astype(np.promote_types(x.dtype, np.float32), copy=False)
        seen.merge(moments(x if hidden is None else x[~hidden[cut]]))
    return seen.statistics()


def _flat(values: np.ndarray | Stored, scratch: np.ndarray) -> Callable[[slice], np.ndarray]:
    """A function that gives slices of the flat values, from a file by way of `scratch`."""
    if isinstance(values, Stored):
        return lambda at: values.read(at, scratch)
    return values.reshape(-1).__getitem__


def _chunks(first: int, size: int) -> Iterator[slice]:
    for start, stop in ((0, first), (first, size)):
        for at in range(start, stop, _CHUNK):
            yield slice(at, min(at + _CHUNK, stop))


def drift_of_statistics(reference: Statistics, candidate: Statistics, size: int) -> Drift | None:
    """The least drift that two sets of statistics prove: sqrt(NMSE) is at least the difference of RMS or mean
    over the RMS (triangle inequality), and of an extreme over the RMS times sqrt(size).

    Of statistics that one side lacks nothing is said; None where no statistic is on both.
    """
    gaps = {
        name: abs(c - r)
        for name in ("min", "max", "mean", "rms")
        for r, c in [(getattr(reference, name), getattr(candidate, name))]
        if r is not None and c is not None
    }
    if not gaps:
        return None
    root, scale = math.sqrt(size), _scale(reference, candidate)
    proved = max(gap / root if name in ("min", "max") else gap for name, gap in gaps.items())
    root_nmse = ratio(proved, scale)
    nmse = root_nmse * root_nmse  # ** raises OverflowError where * gives Inf
    # Elements differ at least by as much as their mean does.
    largest = max((gaps[name] for name in ("min", "max") if name in gaps), default=gaps.get("mean", math.nan))
    worst = Worst((), _or_nan(reference.max), _or_nan(candidate.max))
    return Drift(nmse, math.nan, largest, worst, of_statistics=True)


def _scale(reference: Statistics, candidate: Statistics) -> float:
    """The RMS that differences are measured by; with none on either side what comes next in reliability.

    The larger extreme is at least the RMS. Of a mean alone (the sums that llama.cpp's debug tools print) only the
    relative difference can be told, which says much less: it may be large where the mean happens to be near zero.
    """
    sides = (reference, candidate)
    known = [side.rms for side in sides if side.rms is not None]
    known += [max(-s.min, s.max) for s in sides if s.min is not None and s.max is not None]
    known += [abs(x) for x in (reference.mean, reference.max, reference.min) if x is not None]
    return known[0] if known else 0.0


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
