"""The right values of an input in other places: slices of it along an axis are other slices of it.

Heads of K and V paired otherwise, a cache of which a slot is stale or was never written, a projection that reads heads
and channels transposed, a sum that takes the first token's term for all. Maps that engines come to are tried; any is
found where the input follows from the output: a norm or a matmul is undone, and what a weighted sum had of each
position is solved for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.low_rank import terms
from tracediff.diagnose.rearranged import Reread
from tracediff.diagnose.solve.by_value import channels
from tracediff.diagnose.solve.by_value.maps import (
    LOOK_AT_CACHE,
    ZERO,
    Map,
    by_any_number,
    matched,
    named,
    of_slots,
    slices,
    usual_of,
)
from tracediff.diagnose.solve.by_value.parts import in_region
from tracediff.diagnose.solve.by_value.regions import Along, Region
from tracediff.diagnose.solve.edit import Read, Solved, input_words
from tracediff.diagnose.solve.look import Look
from tracediff.diagnose.solve.loops.arrays import Flat
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.words.nouns import AXES
from tracediff.numerics.kinds import KINDS

# The axes of each kind's inputs along which nothing moves in the output alike: what does is found there.
_AXES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "linear": {"x": ("channel",)},
    "rms_norm": {"x": ("channel",)},
    "rope": {"x": ("channel",)},
    "scores": {"q": ("query head",), "k": ("key head", "channel")},
    "weighted_values": {"p": ("head",), "v": ("position", "value head")},
}
_OF_TWO = (("token", "T"), ("channel", "n"))  # of an op that makes each value of two at its place
_LOOK = "how this input is laid out, and the strides it is read with"
_OF_INPUT = 2.0  # bits more than of the output
_SLOTS = 64  # positions of a cache that are tried one by one
_TOKENS = 8  # whose inputs are solved for
_UNDONE = 1e10  # products, a second: matmuls that take more are not undone
_PAIRED = 8  # channels of which any two may be exchanged
_SAME = 1e-3  # of the root mean square, to which a value that was solved for is another: a look, no verdict


@dataclass(frozen=True, slots=True)
class MovedInput(Reread):
    """Computes an op of which an input has its slices along an axis elsewhere: `Op.rework`. The input is seen in
    `shape`, where -1 is the axis that follows the step or the positions; without, as it is.
    """

    position: int
    map: Map
    axis: int
    shape: tuple[int, ...]

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs, one with its slices where they are read."""
        read = list(inputs)
        read[self.position] = slices(read[self.position], self.map, self.axis, self.shape)
        return read


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of a problem's op: its name in the loops, its axes with their sizes, and along which of these what
    moves is not found in the output.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    along: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As the op reads it."""
        return tuple(n for _, n in self.axes)

    def solved(self, problem: Problem, how: Map, axis: int) -> Solved:
        """The op that reads it so."""
        op, position = problem.op, problem.loops.own.inputs.index(self.name)
        seen = () if self.name == "p" else (-1, *self.shape[1:])  # of [H, T, S] two axes follow the step
        changed = replace(op, rework=MovedInput(position, how, axis, seen))
        noun, n = self.axes[axis]
        words = f"as it reads {input_words(op, position)}, {how.words(noun, n)}"
        look = LOOK_AT_CACHE if noun in ("key", "position") else _LOOK
        return Solved((changed,), words, how.bits + _OF_INPUT, look)


def operands(problem: Problem) -> Iterator[Operand]:
    """The inputs of which slices may be read elsewhere."""
    kind, loops = problem.op.kind, problem.loops
    if kind not in AXES and len(loops.own.inputs) == 2 and all(size in loops.numbers for _, size in _OF_TWO):
        axes = tuple((noun, int(loops.numbers[size])) for noun, size in _OF_TWO)
        whole = (name for name in loops.own.inputs if loops.arrays[name].size == problem.exact.size)
        yield from (Operand(name, axes, (0, 1)) for name in whole)
    for name, nouns in _AXES.get(kind, {}).items():
        axes = tuple((noun, int(problem.loops.numbers[size])) for noun, size in AXES[kind][name])
        yield Operand(name, axes, tuple(i for i, (noun, _) in enumerate(axes) if noun in nouns))


def usual(problem: Problem) -> Iterator[Solved]:
    """Maps of each input that engines come to."""
    for operand in operands(problem):
        for axis in operand.along:
            yield from (operand.solved(problem, how, axis) for how in usual_of(operand.shape[axis]))


def cached(problem: Problem) -> Iterator[Solved]:
    """What is read of a cache: positions or heads elsewhere, or one position that is empty or has what belongs to the
    one before.
    """
    for operand in operands(problem):
        if operand.name in ("k", "v"):
            n, n_heads, _ = operand.shape
            one = (Map("listed", (at, of)) for at in range(min(n, _SLOTS)) for of in (ZERO, at - 1) if at or of == ZERO)
            yield from (operand.solved(problem, how, 0) for how in (*usual_of(n), *of_slots(n), *one))
            yield from (operand.solved(problem, how, 1) for how in usual_of(n_heads))


def variants(problem: Problem, look: Look) -> Iterator[Solved]:
    """Maps of an input that give the output, as far as a look tells."""
    loops = problem.loops
    for operand in operands(problem):
        values = torch.from_numpy(problem.array(operand.name).reshape(operand.shape))
        for axis in operand.along:
            for how in _tried(problem, operand, axis):
                elsewhere = Flat(slices(values, how, axis, ()).numpy().ravel())
                seen = look.at(loops.with_(loops.source, {operand.name: elsewhere}, {}), "values")
                if seen and seen.passes:
                    yield operand.solved(problem, how, axis)
        if operand.name == "v":
            yield from _cached(problem, operand)
        elif operand.name == "x":
            yield from _of_channels(problem, operand, values.numpy())
        elif operand.name == "k":
            yield from (operand.solved(problem, how, 2) for how in channels.maps_of(problem, values.numpy()))


def _tried(problem: Problem, operand: Operand, axis: int) -> Sequence[Map]:
    """Maps that engines come to; of channels that are rotated, a head's, those by any number too, and of any two that
    are wrong.
    """
    n, tried = operand.shape[axis], [*usual_of(operand.shape[axis])]
    if operand.axes[axis][0] == "position":
        tried += of_slots(n)
    if problem.op.kind == "rope":
        wrong = np.flatnonzero(problem.wrong.reshape(-1, n).any(0)).tolist()
        pairs = combinations(wrong if len(wrong) <= _PAIRED else (), 2)
        tried += [*by_any_number(n), *(Map("listed", (a, b, b, a)) for a, b in pairs)]
    return [*dict.fromkeys(tried)]


# --- what the output tells of an input --------------------------------------------------------------------------------


def _of_channels(problem: Problem, operand: Operand, values: np.ndarray) -> Iterator[Solved]:
    """Any map of channels where the output has enough to tell each of them, for then the op is undone; else those that
    a few values tell.
    """
    right, there = values[:_TOKENS], _before(problem, values)
    found = _named(there, right, 1, of_keys=False) if there is not None and np.isfinite(there).all() else ()
    for how in found or channels.maps_of(problem, values):
        yield operand.solved(problem, how, 1)
    if there is None and problem.op.kind == "linear" and (lost := _lost(problem, len(values))):
        yield operand.solved(problem, Map("listed", tuple(n for at in lost for n in (at, ZERO))), 1)


def _lost(problem: Problem, n_tokens: int) -> list[int]:
    """The few channels whose columns of the matrix all that is wrong follows, be they more than the output has."""
    recorded, exact, near = (x.reshape(n_tokens, -1) for x in (problem.recorded, problem.exact, problem.near))
    error = recorded - exact
    if not np.isfinite(error).all():
        return []
    return terms(*(torch.from_numpy(x)[None] for x in (problem.array("w"), error.T, near.T)))


def _before(problem: Problem, values: np.ndarray) -> np.ndarray | None:
    """The input [T, n] of some tokens of which the op makes what was recorded; None where that does not follow."""
    recorded, exact = (x.reshape(len(values), -1)[:_TOKENS] for x in (problem.recorded, problem.exact))
    values, n, n_out = values[:_TOKENS], values.shape[1], recorded.shape[1]
    if problem.op.kind == "rms_norm":  # of the same values in another order the sum of squares is the same
        with np.errstate(all="ignore"):
            return recorded.reshape(values.shape) * values / exact.reshape(values.shape)
    if problem.op.kind != "linear" or n_out < n or n_out * n * n > _UNDONE:
        return None
    w = problem.array("w")
    try:
        return values + np.linalg.solve(w.T @ w, w.T @ (recorded - exact).T).T
    except np.linalg.LinAlgError:
        return None


def _named(there: np.ndarray, right: np.ndarray, axis: int, *, of_keys: bool) -> Sequence[Map]:
    """The map along an axis by which one is the other, nearly."""
    near = np.full(right.shape, _SAME * np.sqrt(np.square(right).mean()))
    zero = (np.abs(there) <= near).all(tuple(a for a in range(there.ndim) if a != axis), keepdims=True)
    source = matched(np.where(zero, 0.0, there), right, near, axis)
    return named(source, of_keys=of_keys) if source is not None else []


# --- what was added up ------------------------------------------------------------------------------------------------


def _cached(problem: Problem, operand: Operand) -> Iterator[Solved]:
    """Positions of which the sum has what belongs to others, or nothing, in all value heads or in some; or those of
    which the scores have it: keys and values are written to the same slots.
    """
    sums = _Sums.of(problem)
    if not len(sums.heads):
        return
    yield from (operand.solved(problem, how, 0) for how in _of_keys(problem))
    for there in sums.told():
        for how in _named(there, sums.values[:, sums.heads], 0, of_keys=True):
            yield from _in_heads(problem, operand.solved(problem, how, 0), sums.heads)


def _of_keys(problem: Problem) -> Sequence[Map]:
    """Which keys the recorded scores were made of, where these are not those of their places."""
    graph, op = problem.graph, problem.op
    while op.kind != "scores":
        if op.inputs[0] not in graph:
            return []
        op = graph[op.inputs[0]]
    scores, *operands_ = (problem.held(read) for read in (Read(op.name), *(Read.of(*one) for one in op.reads)))
    if scores is None or any(x is None for x in operands_) or any(op.seen):
        return []
    h, t, s, g = (int(problem.loops.numbers[name]) for name in "HTSG")
    q, k = (x.reshape(n, heads, -1) for x, n, heads in zip(operands_, (t, s), (h, g), strict=True) if x is not None)
    right = np.einsum("thd,shd->hts", q, k.repeat(h // g, 1))
    return _named(scores.reshape(h, t, s), right, 2, of_keys=True)


def _in_heads(problem: Problem, solved: Solved, heads: np.ndarray) -> Iterator[Solved]:
    n_heads, (_, width) = int(problem.loops.numbers["G"]), problem.loops.own.shape
    if len(heads) == n_heads:
        yield solved
    elif len(heads) == heads[-1] - heads[0] + 1:
        each = width // n_heads
        region = Region((Along(1, int(heads[0]) * each, (int(heads[-1]) + 1) * each),))
        op = in_region(problem.op, solved.ops[0], region)
        words = f"{region.words(KINDS[problem.op.kind].axis_names(op, 2))}: {solved.words}"
        yield replace(solved, ops=(op,), words=words, bits=solved.bits + region.bits)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Values [S, G, D] and how they are added up, [G, sums, S], for each value head; what is left of the sums, and how
    near that must come to 0, [G, sums, D]; and the value heads of which some are wrong.
    """

    values: np.ndarray
    shares: np.ndarray
    left: np.ndarray
    near: np.ndarray
    heads: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """Those of a problem; no heads where something is not finite."""
        shares, values = problem.array("p"), problem.array("v")
        (h, t, s), (_, g, d) = shares.shape, values.shape
        left, near, wrong = (
            x.reshape(t, g, h // g, d).transpose(1, 2, 0, 3).reshape(g, -1, d)
            for x in (problem.recorded - problem.exact, problem.near, problem.wrong)
        )
        heads = np.flatnonzero(wrong.any((1, 2)) & np.isfinite(left).all())
        return cls(values, shares.reshape(g, -1, s), left, near, heads)

    def told(self) -> Iterator[np.ndarray]:
        """What the sums had of the wrong heads' values, [S, heads, D]. From as many sums as positions all of them
        follow; from fewer, as in steps of one token, each is tried as the only one that is another.
        """
        right = self.values[:, self.heads]
        if self.shares.shape[1] >= len(right):
            found = right.copy()
            for i, head in enumerate(self.heads):
                found[:, i] += np.linalg.lstsq(self.shares[head], self.left[head], rcond=None)[0]
            yield found
            return
        left, near = self.left[self.heads], self.near[self.heads]
        for position in range(len(right)):
            shares = self.shares[self.heads, :, position]  # heads, sums
            sizes = np.square(shares).sum(1)
            if not sizes.all():
                continue
            by = np.einsum("gn,gnd->gd", shares, left) / sizes[:, None]
            if (np.abs(left - shares[:, :, None] * by[:, None]) <= near).all():
                found = right.copy()
                found[position] += by
                yield found
