"""Places that are linear in the loop variables, as indices mostly are: what lies there is a view, nothing is copied."""

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tracediff.diagnose.solve.loops.arrays import Array, Value, is_dense


@dataclass(frozen=True, slots=True)
class Line:
    """A first place, and for each loop variable how far apart its turns are and how many it takes."""

    first: int
    steps: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()

    def plus(self, other: "Line", sign: int = 1) -> "Line":
        """The sum of both, or the difference."""
        steps = zip_longest(self.steps, other.steps, fillvalue=0)
        turns = zip_longest(self.turns, other.turns, fillvalue=1)
        return Line(self.first + sign * other.first, tuple(a + sign * b for a, b in steps), tuple(map(max, turns)))

    def times(self, factor: int) -> "Line":
        """Each place so many times as far."""
        return Line(self.first * factor, tuple(step * factor for step in self.steps), self.turns)

    def of(self, array: Array) -> np.ndarray | None:
        """What lies there, with an axis for each loop variable; None where some of it would lie beyond the array, or
        far apart in it.
        """
        ways = [step * (n - 1) for step, n in zip(self.steps, self.turns, strict=True)]
        low = self.first + sum(min(way, 0) for way in ways)
        high = self.first + sum(max(way, 0) for way in ways) + 1
        if low < 0 or high > array.size or 0 in self.turns or not is_dense(low, high, math.prod(self.turns)):
            return None
        values = array.between(low, high)
        apart = values.strides[0]
        return as_strided(
            values[self.first - low :], self.turns, [apart * step for step in self.steps], writeable=False
        )


def line_of(node: ast.expr, known: Callable[[str], Line | None]) -> Line | None:
    """The places of an index; None where they are not linear in what is known of the names in it."""
    match node:
        case ast.Constant(value=int(number)):
            return Line(number)
        case ast.Name(id=name):
            return known(name)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            a, b = line_of(left, known), line_of(right, known)
            if a is None or b is None:
                return None
            if not isinstance(op, ast.Mult):
                return a.plus(b, 1 if isinstance(op, ast.Add) else -1)
            return a.times(b.first) if not b.turns else b.times(a.first) if not a.turns else None
    return None


def line_through(value: Value) -> Line | None:
    """A number, or the values of one loop variable, if these are evenly apart."""
    if isinstance(value, int | np.integer):
        return Line(int(value))
    if not isinstance(value, np.ndarray) or value.dtype.kind != "i" or value.size != max(value.shape, default=0):
        return None
    values, apart = value.ravel(), int(value.flat[1] - value.flat[0]) if value.size > 1 else 0
    if not value.size or (np.diff(values) != apart).any():
        return None
    return Line(int(values[0]), tuple(apart if n > 1 else 0 for n in value.shape), value.shape)
