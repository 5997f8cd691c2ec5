"""What loops read and store: flat numbers, stores in their order, and sums along an axis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Value = Any  # a number, or an array with an axis for each loop variable, of size 1 where it does not depend on it

_LARGE = 1 << 26  # values of an intermediate result: half a gigabyte
_PERIODS = (*range(2, 17), 32, 64, 128, 256)  # of unrolled loops, of vectors, of blocks of quantised types
_SPARSE = 4  # times what is read: so long may be what it lies in


class CannotRunError(Exception):
    """These loops cannot run: they divide integers by zero, never end, or hold too much at once."""


class Array(Protocol):
    """Flat numbers."""

    @property
    def size(self) -> int:
        """How many."""

    def take(self, at: np.ndarray) -> np.ndarray:
        """Those at these places, which are all inside."""

    def between(self, low: int, high: int) -> np.ndarray:
        """Those from one place to before another, both inside; not to be written to."""


@dataclass(frozen=True, slots=True)
class Flat:
    """An array in memory."""

    values: np.ndarray

    @property
    def size(self) -> int:
        """How many."""
        return self.values.size

    def take(self, at: np.ndarray) -> np.ndarray:
        """Those at these places."""
        return self.values[at]

    def between(self, low: int, high: int) -> np.ndarray:
        """Those from one place to before another."""
        return self.values[low:high]


@dataclass(frozen=True, slots=True)
class Stored:
    """What one statement stored to the output: places and values, in the order of the stores. Later ones stay.

    `turns` are the turns of the loops in which it did: None where in all of `shape`, in which each of the loop
    `variables` has an axis.
    """

    at: np.ndarray
    values: np.ndarray
    variables: Mapping[str, np.ndarray] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    turns: np.ndarray | None = None

    def loops(self, which: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """The loop variables at these stores, or at all."""
        if which is None and self.turns is None:
            return {name: np.broadcast_to(values, self.shape).ravel() for name, values in self.variables.items()}
        which = np.arange(self.at.size) if which is None else which
        turns = which if self.turns is None else self.turns[which]
        along = np.unravel_index(turns, self.shape)
        found = {}
        for name, values in self.variables.items():
            axis = int(np.argmax(values.shape))
            found[name] = values.ravel()[along[axis] if values.size > 1 else np.zeros(len(turns), int)]
        return found


def interleaved(stored: list[Stored]) -> list[Stored]:
    """Statements that store as often, which are in one loop, in the order in which they take turns."""
    if len({one.at.size for one in stored}) > 1 or len(stored) < 2:
        return stored
    at, values = (np.stack([getattr(one, name) for one in stored], -1).ravel() for name in ("at", "values"))
    return [Stored(at, values)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What loops stored to arrays of their own, whether they read beyond an array, and the arrays that they read."""

    local: Mapping[str, np.ndarray]
    beyond: bool
    read: Sequence[Array | None]


def is_dense(low: int, high: int, n: int) -> bool:
    """Whether to read all from one place to before another, of which `n` are wanted, is less work than to pick them."""
    return high - low <= _SPARSE * n


def check_size(*shapes: tuple[int, ...]) -> None:
    """Raises CannotRunError if what is made of arrays of these shapes is too large to be held."""
    if math.prod(map(math.prod, shapes)) > _LARGE and math.prod(np.broadcast_shapes(*shapes)) > _LARGE:
        raise CannotRunError("too large")


def over(how: str, terms: np.ndarray, axis: int, inside: Value) -> np.ndarray:
    """The sum, the largest, ... of terms along an axis, of those that are `inside`; raises CannotRunError."""
    check_size(terms.shape)
    if inside is not None:
        terms = np.where(inside, terms, {"max": -np.inf, "min": np.inf}.get(how, 0))
    match how:
        case "sum":
            return terms.sum(axis, keepdims=True)
        case "max":  # as fmaxf: a NaN is not the larger
            return np.fmax.reduce(terms, axis, keepdims=True)
        case "min":
            return np.fmin.reduce(terms, axis, keepdims=True)
        case "upto" | "onwards":  # all parts of the sum: of the terms before each, and from it on
            whole, parts = terms.sum(axis, keepdims=True), np.cumsum(terms, axis) - terms
            return parts if how == "upto" else whole - parts
        case "without" | "alone":
            parts = _of_strides(np.moveaxis(terms, axis, -1))
            parts = np.moveaxis(parts, -1, axis)
            return parts if how == "alone" else terms.sum(axis, keepdims=True) - parts
        case "first" | "last":
            return np.take(terms, [0 if how == "first" else -1], axis)
    raise CannotRunError(how)


@dataclass(frozen=True, slots=True)
class Stride:
    """Of every `period` terms those from `first` to before `stop`."""

    period: int
    first: int
    stop: int


def strides(n: int) -> list[Stride]:
    """Of `n` terms one of every so many, or the last of them."""
    periods = [period for period in _PERIODS if 2 * period <= n]
    return [
        Stride(period, first, stop)
        for period in periods
        for stops in ([first + 1 for first in range(period)], [period] * period)
        for first, stop in enumerate(stops)
    ]


def _of_strides(terms: np.ndarray) -> np.ndarray:
    """Sums of the terms [..., n] of each of the `strides`."""
    *around, n = terms.shape
    found = [np.zeros((*around, 0))]
    for period in dict.fromkeys(stride.period for stride in strides(n)):
        padded = np.concatenate([terms, np.zeros((*around, -n % period))], -1)
        each = padded.reshape(*around, -1, period).sum(-2)
        found += each, np.cumsum(each[..., ::-1], -1)[..., ::-1]
    return np.concatenate(found, -1)


def contracted(a: np.ndarray, b: np.ndarray, axis: int, length: int) -> np.ndarray:
    """The sum of a * b along the axis, both with an axis for each loop variable."""
    rank = max(a.ndim, b.ndim)
    a, b = (x.reshape(x.shape or (1,) * rank) for x in (a, b))
    shape = np.broadcast_shapes(a.shape, b.shape)
    if a.shape[axis] == 1 and b.shape[axis] == 1:
        return a * b * length
    if math.prod(shape) > 2 * max(a.size, b.size):
        # Axes that only one of the two has are matrix axes, those of both go along.
        letters = "abcdefgh"[:rank]
        of_a, of_b = ("".join(c for c, n in zip(letters, x.shape, strict=True) if n > 1) for x in (a, b))
        kept = "".join(c for c in letters if c in of_a + of_b and c != letters[axis])
        y = np.einsum(f"{of_a},{of_b}->{kept}", a.squeeze(), b.squeeze(), optimize=True)
        if np.isfinite(y).all():  # with NaN or infinite values BLAS need not make what the sums are
            return y.reshape([n if c in kept else 1 for c, n in zip(letters, shape, strict=True)])
    check_size(shape)
    return (a * b).sum(axis, keepdims=True)
