"""Whether foreign values are ours in another layout: batch axes, axes in another order, heads flat, rope's pairs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

import numpy as np

from tracediff.interchange.entry import Array, Entry, Summary
from tracediff.model.pairing import neighbours
from tracediff.trace.format import STORAGE, to_float

_MOST_AXES = 4  # longer than 1: the orders of five are 120, and no engine has so many


@dataclass(frozen=True, slots=True)
class Layout:
    """How foreign values become ours: their axes in this order, then heads of `head_dim` from halves to neighbours."""

    axes: tuple[int, ...]
    head_dim: int | None = None

    def ours(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The values in C order of our shape, which has as many."""
        x = values.transpose(self.axes).reshape(shape)
        return x if self.head_dim is None else neighbours(x, self.head_dim)

    @property
    def words(self) -> str:
        """What was changed; empty where nothing was but batch axes and flat heads."""
        order = "" if self.axes == tuple(sorted(self.axes)) else f"axes in the order {list(self.axes)}"
        return ", ".join(filter(None, (order, "pairs of halves" if self.head_dim else "")))


def layouts(foreign: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Layout]:
    """In which ways values of one shape can be those of another, the plainest first. Axes of 1 stay where they are."""
    if math.prod(foreign) != math.prod(shape):
        return
    long = [axis for axis, size in enumerate(foreign) if size != 1]
    ones = [axis for axis, size in enumerate(foreign) if size == 1]
    paired = len(shape) == 3 and shape[-1] % 2 == 0
    for order in permutations(long) if len(long) <= _MOST_AXES else [tuple(long)]:
        axes = (*ones, *order) if order != tuple(long) else tuple(range(len(foreign)))
        yield Layout(axes)
        if paired:
            yield Layout(axes, shape[-1])


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """How far X is from Y, of one shape, float64: NMSE, or what it is in the middle value where that is worse.

    One massive activation has nearly all of a layer's signal, and would make any two layers equal by NMSE. So each
    squared error is also measured by the lesser of what its row and its column hold. Where Y is not finite nothing is
    compared.
    """
    known = np.isfinite(y)
    if not known.all():
        x, y = np.where(known, x, 0.0), np.where(known, y, 0.0)
    if not np.isfinite(x).all():
        return math.inf
    rows = np.square(y.reshape(-1, y.shape[-1]))
    if not rows.any():
        return math.inf
    error = np.square(x - y).reshape(rows.shape)
    scale = np.minimum(rows.mean(1, keepdims=True), rows.mean(0))
    middle = np.median(error[scale > 0] / scale[scale > 0])
    return float(max(error.sum() / rows.sum(), middle))


def floats(array: Array) -> np.ndarray | None:
    """The values as float64; None where they are none, or no floating point values."""
    if not array.values.size or array.dtype not in STORAGE:
        return None
    return to_float(array.values, array.dtype).astype(np.float64)


def arranged(entry: Entry, layout: Layout, shape: tuple[int, ...] | None) -> Entry:
    """The entry in our layout; without a shape as it comes, its axes in our order."""
    return replace(entry, load=partial(_arranged, entry, layout, shape))


def _arranged(entry: Entry, layout: Layout, shape: tuple[int, ...] | None) -> Array | Summary:
    loaded = entry.load()
    if isinstance(loaded, Summary) or loaded.values.ndim != len(layout.axes):
        return loaded
    x = loaded.values.transpose(layout.axes)
    if shape is None or math.prod(shape) != x.size:
        return replace(loaded, values=np.ascontiguousarray(x))
    return replace(loaded, values=np.ascontiguousarray(layout.ours(loaded.values, shape)))
