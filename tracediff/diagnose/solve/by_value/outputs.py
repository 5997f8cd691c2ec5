"""The right values in other places, found by value: a slice of the output along an axis is another slice of it.

Heads reversed, rows repeated or exchanged, a query that has the next one's result: whatever loop made them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from tracediff.diagnose.rearranged import Rearranged
from tracediff.diagnose.solve.by_value.maps import LOOK_AT_CACHE, ZERO, Map, matched, named, slices, usual_of
from tracediff.diagnose.solve.edit import Solved
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.model.graph import Op
from tracediff.names import axes_of

OutputView = tuple[tuple[int, ...], tuple[str, ...], int]  # a shape, its axes, and which of these follows the step
_APART = 16.0  # bits that a stride takes
_LOOK = "the strides of its output and of the rows that it is made of"
_LOOK_AT_TURNS = "whether all of it is computed, and waited for before it is read"
_LOOK_AT_HEADS = "the strides of its output and of the rows that it is made of, and what its threads share"


@dataclass(frozen=True, slots=True)
class MovedOutput(Rearranged):
    """An op whose output has its slices along an axis elsewhere. The output is seen in `shape`, where -1 is the axis
    that follows the step; without, as it is.
    """

    map: Map
    axis: int
    shape: tuple[int, ...]

    def moved(self, x: Tensor) -> Tensor:
        """With its slices elsewhere."""
        return slices(x, self.map, self.axis, self.shape)


@dataclass(frozen=True, slots=True)
class RowsApart(Rearranged):
    """An op whose rows are stored so many values apart, and read as if one came right after the other."""

    apart: int

    def moved(self, x: Tensor) -> Tensor:
        """With 0 in between."""
        rows = x.flatten(1)
        wide = rows.new_zeros((len(rows), self.apart))
        wide[:, : rows.shape[1]] = rows
        return wide.flatten()[: rows.numel()].reshape(x.shape)


def apart(problem: Problem) -> Iterator[Solved]:
    """Rows of logits that are stored further apart than they are long, as where a vocabulary is padded."""
    shape = problem.loops.own.shape
    n, width = shape[0], math.prod(shape[1:])
    if problem.op.axes[:1] != ("T",) or n < 2:
        return
    there, right, near = problem.recorded, problem.exact[width:], problem.near
    beginnings = agree(there[width + 1 : 2 * width], right[:1], near[width + 1 : 2 * width])
    for by in map(int, np.flatnonzero(beginnings)):
        first = width + 1 + by
        row = slice(first, first + min(width, len(there) - first))
        if agree(there[row], right[: len(there[row])], near[row]).all():
            words = f"each row is stored {first} values after the one before, where {width} belong"
            yield Solved((replace(problem.op, rework=RowsApart(first)),), words, _APART, _LOOK)


def variants(problem: Problem) -> Iterator[Solved]:
    """Maps along each axis of the output that give all of it, and rows that lie apart."""
    yield from apart(problem)
    for shape, axes, follows in views(problem):
        right, there = problem.exact.reshape(shape), problem.recorded.reshape(shape)
        near = problem.near.reshape(shape)
        for axis in range(len(axes)):
            if shape[axis] > 1:
                source = matched(there, right, near, axis)
                for how in named(source, of_keys=axes[axis] == "key") if source is not None else ():
                    yield _solved(problem, how, axis, (shape, axes, follows))


def usual(problem: Problem) -> Iterator[Solved]:
    """Maps along each axis that engines come to: by sizes that divide it, by few places; heads exchanged."""
    for shape, axes, follows in views(problem):
        for axis in range(len(axes)):
            for how in usual_of(shape[axis]):
                yield _solved(problem, how, axis, (shape, axes, follows))


def _solved(problem: Problem, how: Map, axis: int, view: OutputView) -> Solved:
    shape, axes, follows = view
    op, source = moved_output(problem.op, how, axis, shape, follows), how.of(shape[axis])
    elsewhere = source[source != np.arange(len(source))]
    look = LOOK_AT_CACHE if axes[axis] == "key" else _LOOK_AT_HEADS if axes[axis] == "head" else _LOOK
    if axes[axis] != "key" and len(elsewhere) and (elsewhere == ZERO).all():
        look = _LOOK_AT_TURNS
    return Solved((op,), how.words(axes[axis], shape[axis]), how.bits + math.log2(len(axes)), look)


def moved_output(op: Op, how: Map, axis: int, shape: tuple[int, ...], follows: int) -> Op:
    """The op with slices of its output elsewhere, seen in a shape of which one axis may follow the step."""
    seen = tuple(-1 if i == follows else n for i, n in enumerate(shape)) if follows >= 0 else ()
    return replace(op, rework=MovedOutput(how, axis, seen))


def views(problem: Problem) -> Iterator[OutputView]:
    """Shapes that the output can be seen in, with nouns for their axes, and which of these follows the step (-1: it is
    seen as it is).
    """
    shape = problem.loops.own.shape
    h, kind = problem.graph.hparams, problem.op.kind
    if problem.op.axes[1:] == ("T", "S"):
        yield shape, ("head", "query", "key"), -1
        return
    if problem.op.axes[0] != "T":
        return
    if len(shape) == 3:
        part = axes_of(problem.op.name, 3)[1]
        yield shape, ("token", part, f"{part} channel"), 0
    width = math.prod(shape[1:])
    yield (shape[0], width), ("token", "channel"), 0
    if len(shape) == 2 and kind == "weighted_values":
        yield (shape[0], h.n_head, width // h.n_head), ("token", "head", "head channel"), 0
