"""A norm that divides by another root mean square, or deviation, than its row's own: of another row, or value.

Kernels that compute it apart hand it on in a buffer, which is indexed by token and head, and which the norm before has
used. What each row is off by tells the mean of squares that was taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.by_value.maps import Map, matched, named
from tracediff.diagnose.solve.edit import Read, Solved
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.model.graph import Op
from tracediff.numerics.evaluate import computed, evaluate, noise_of
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Made

_LOOK = "where the root mean square, or the deviation, is computed, kept and indexed: by token, and by head"
_SAME = 1e-5  # of a mean of squares: a look, no verdict
_BITS = 14.0
_MEANS = {"rms_norm": ("mean of squares", "means of squares"), "layer_norm": ("variance", "variances")}


@dataclass(frozen=True, slots=True)
class OtherSquares:
    """Computes a norm whose rows have other means of squares, those of its last input: `Op.rework`. Of a token it has
    `parts`, of which each row takes its own, or as the map along an axis (0: tokens, 1: rows of one) says.
    """

    parts: int
    map: Map | None = None
    axis: int = 1

    def compute(self, call: Call) -> Tensor:
        """The output."""
        right = self._right(call.op)
        y = computed(right, call, call.inputs[:1]) * self._factors(right, call.inputs)
        return y + call.weights.load(call.op.weights[1]) if len(call.op.weights) > 1 else y

    def noise(self, made: Made) -> Noise:
        """That of the right op times as much; of another sum of squares as much again."""
        right, factors = self._right(made.op), self._factors(made.op, made.inputs)
        y = evaluate(right, made.inputs[:1], made.weights, made.arithmetic)
        own = noise_of(right, made, made.inputs[:1], y)
        return replace(own, sigma=2 * own.sigma * factors, hard=2 * own.hard * factors + made.stored)

    def _right(self, op: Op) -> Op:
        """The right op, before a bias is added."""
        return replace(op.reading_only(1), weights=op.weights[:1], rework=None)

    def _factors(self, op: Op, inputs: Sequence[Tensor]) -> Tensor:
        x, other = inputs[0], inputs[1]
        eps = op.attrs["eps"]
        own = means(op, x, len(x), x[0].numel() // x.shape[-1]).reshape(*x.shape[:-1], 1) + eps
        taken = means(op, other, len(x), self.parts) + eps
        if self.map is not None:
            source = torch.from_numpy(self.map.of(taken.shape[self.axis])).clamp(min=0)
            taken = taken.index_select(self.axis, source.to(x.device))
        rows = own.numel() // len(x)
        return torch.sqrt(own / taken[:, :rows].reshape(own.shape))


def means(norm: Op, x: Tensor, n_tokens: int, parts: int) -> Tensor:
    """The means of squares, or variances, of so many parts of each token, [T, parts], as the norm has them."""
    x = x.reshape(n_tokens, parts, -1)
    return (x - x.mean(-1, keepdim=True) if norm.kind == "layer_norm" else x).square().mean(-1)


def variants(problem: Problem) -> Iterator[Solved]:
    """Whose mean of squares each row has, where that is found."""
    op = problem.op
    if op.kind not in _MEANS or len(op.inputs) != 1:
        return
    *rows, n = problem.loops.own.shape
    n_tokens, n_rows = rows[0], rows[1] if len(rows) > 1 else 1
    x = torch.from_numpy(problem.array("x"))
    own, eps = means(op, x, n_tokens, n_rows).numpy(), op.attrs["eps"]
    taken = _taken(problem, own + eps, n)
    if taken is None:
        return
    for axis, noun in ((1, "head"), (0, "token")):
        source = matched(taken, own + eps, _SAME * taken, axis) if own.shape[axis] > 1 else None
        for how in named(source, of_keys=False) if source is not None else ():
            said = how.words(noun, own.shape[axis]).replace("the values of", "that of")
            yield _solved(
                problem, op.inputs[0], OtherSquares(n_rows, how, axis), f"of the {_MEANS[op.kind][1]}, {said}"
            )
    for name in problem.earlier:
        yield from _of_another(problem, name, taken - eps, n)


def _taken(problem: Problem, right: np.ndarray, n: int) -> np.ndarray | None:
    """The mean of squares, eps included, that each row was divided by, [T, rows]; None where rows are no multiples."""
    recorded, exact = problem.recorded.reshape(-1, n), problem.exact.reshape(-1, n)
    if len(problem.op.weights) > 1:
        recorded, exact = (values - problem.array("b") for values in (recorded, exact))
    sizes = np.square(exact).sum(1)
    if not np.isfinite(recorded).all() or not sizes.all():
        return None
    factors = (recorded * exact).sum(1) / sizes
    fits = agree(recorded, factors[:, None] * exact, problem.near.reshape(-1, n))
    return right / np.square(factors).reshape(right.shape) if fits.all() and (factors > 0).all() else None


def _of_another(problem: Problem, name: str, taken: np.ndarray, n: int) -> Iterator[Solved]:
    """Another value of the step whose parts have these means of squares: as many as rows, or as wide."""
    values, (n_tokens, n_rows) = problem.held(Read(name)), taken.shape
    if name == problem.op.inputs[0] or values is None or values.size % n_tokens or values.dtype.kind != "f":
        return
    width = values.size // n_tokens
    for parts in dict.fromkeys((width // n, n_rows)):
        if parts < n_rows or width % parts:
            continue
        found = means(problem.op, torch.from_numpy(values), n_tokens, parts).numpy()[:, :n_rows]
        if (np.abs(found - taken) <= _SAME * taken).all():
            other, own = (Read(value).words(problem.op) for value in (name, problem.op.inputs[0]))
            cut = f", in {parts} parts," if parts > 1 and width // parts != n else ""
            words = f"the {_MEANS[problem.op.kind][0]} is that of {other}{cut} where that of {own} belongs"
            yield _solved(problem, name, OtherSquares(parts), words)


def _solved(problem: Problem, name: str, rework: OtherSquares, words: str) -> Solved:
    op = replace(problem.op.also_reading((name, False)), rework=rework)
    return Solved((op,), words, _BITS, _LOOK)
