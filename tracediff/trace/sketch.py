"""A value in a few hundred numbers, whose differences tell how far apart two values are.

Rows of tokens and slices of the next axis (heads, else channels) are put in groups; of each block every element is
added, with a sign, to one of some numbers: which, and the sign, is a fixed hash of its place. For blocks x and y
|s(x) - s(y)|^2 estimates |x - y|^2 without bias, with a variance of at most 2 |x - y|^4 / m for m numbers (Charikar,
Chen, Farach-Colton 2002, "Finding frequent items in data streams"; Weinberger et al. 2009, https://arxiv.org/abs/0902.2206:
a random projection as that of Johnson and Lindenstrauss, at one addition an element). A permutation, a swapped head
and rows shifted by a token move elements to other numbers, so they show as any other difference of that size does.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from tracediff.trace.statistics import ratio

_NUMBERS = 336  # float32: 1,792 characters in base64
_GROUPS = 6  # of tokens: the first by itself, which massive activations are in, and others
_SLICES = 8
_CACHED = 1 << 20  # elements: the same shapes come in every step
LEAST = _NUMBERS // (_GROUPS * _SLICES)  # numbers of a block


def sketch(values: np.ndarray, token_axis: int = 0, hidden: np.ndarray | None = None) -> bytes:
    """Of a value's finite elements, but those that `hidden` [T, S] marks: float32 [groups, slices, m], as bytes."""
    x = np.where(np.isfinite(values), values, 0.0).astype(np.float64, copy=False)
    if hidden is not None:
        x = np.where(hidden, 0.0, x)
    if x.ndim == 0:
        x = x.reshape(1)
    first = np.moveaxis(x, token_axis, 0)
    rows = first.reshape(len(first), -1)
    blocks = _blocks(rows.shape, *first.shape[1:2])
    m = _NUMBERS // (len(blocks) * len(blocks[0]))
    at, signs = _hashed(rows.size, m) if rows.size <= _CACHED else _hash(rows.size, m)
    at, signed = at.reshape(rows.shape), rows * signs.reshape(rows.shape)
    found = [np.bincount(at[place].ravel(), signed[place].ravel(), m) for row in blocks for place in row]
    return np.array(found, "<f4").tobytes()


def apart(reference: bytes, candidate: bytes, n_rows: int) -> tuple[float, float, float, float] | None:
    """NMSE and cosine of two sketches of so many rows, and the NMSE of the first row and of the others; None of other
    shapes.
    """
    x, y = (np.frombuffer(one, "<f4").astype(np.float64) for one in (reference, candidate))
    if x.shape != y.shape or not x.size:
        return None
    norm = math.sqrt(float(x @ x) * float(y @ y))
    cosine = float(x @ y) / norm if norm else math.nan
    head = x.size // min(n_rows, _GROUPS)
    return _nmse(x, y), cosine, _nmse(x[:head], y[:head]), _nmse(x[head:], y[head:])


def _nmse(x: np.ndarray, y: np.ndarray) -> float:
    return ratio(float(np.square(y - x).sum()), float(np.square(x).sum()))


def _blocks(shape: tuple[int, ...], n_slices: int = 1) -> list[list[tuple[slice, slice]]]:
    """Of rows [T, n] made of so many heads or channels: where each block lies."""
    width = shape[1] // max(n_slices, 1) or 1
    columns = [slice(a * width, b * width) for a, b in _even(n_slices, _SLICES)]
    rows = [slice(0, 1), *(slice(1 + a, 1 + b) for a, b in _even(shape[0] - 1, _GROUPS - 1))]
    return [[(row, column) for column in columns] for row in rows]


def _even(n: int, most: int) -> Iterator[tuple[int, int]]:
    parts = min(n, most)
    yield from ((n * i // parts, n * (i + 1) // parts) for i in range(parts))


def _hash(size: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each place which number it is added to, and its sign: SplitMix64 (Steele, Lea, Flood 2014) of its index."""
    z = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(1)) % np.uint64(m)).astype(np.intp), np.where(z & np.uint64(1), 1.0, -1.0)


_hashed = lru_cache(32)(_hash)
