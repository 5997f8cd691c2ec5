"""Query heads that read other key/value heads than their own, each found by its values: whatever the mapping is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.rearranged import SomeHeads
from tracediff.diagnose.solve.edit import Solved
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.english import few
from tracediff.model.graph import Op
from tracediff.numerics.kinds.attention import scores, weighted_values

_LOOK = "the mapping from query heads to key/value heads: on a rank that of its own heads"
_MOST = 1 << 28  # products
_LITTLE = 1e-6  # of what a head leaves: so little says that it reads another
_EACH = 6.0  # bits of a head that is told
_FUNCTIONS = {"scores": scores, "weighted_values": weighted_values}


def variants(problem: Problem) -> Iterator[Solved]:
    """The key/value head that each query head reads, where some read another and each is told."""
    function = _FUNCTIONS.get(problem.op.kind)
    numbers = problem.loops.numbers
    if function is None or not np.isfinite(problem.recorded).all():
        return
    h, t, s, g, d = (int(numbers[name]) for name in "HTSGD")
    right = _right(h, g)
    if not right or h * t * s * g * d > _MOST:
        return
    x, kv = (torch.from_numpy(problem.array(name)) for name in problem.loops.own.inputs)
    there, near, wrong = (_by_head(problem, y) for y in (problem.recorded, problem.near, problem.wrong))
    found, heads = list(right), np.flatnonzero(wrong.any(1)).tolist()
    fits: dict[int, list[int]] = {head: [] for head in heads}
    for other in range(g):
        made = function(x, kv[:, [other] * h])
        for head in heads:
            if _gives(problem, made, there, near, head):
                fits[head].append(other)
    for head, others in fits.items():
        if len(others) != 1:
            return
        found[head] = others[0]
    if found != right:
        yield _solved(problem, right, found)


def behind(problem: Problem, left: Callable[[Op], np.ndarray]) -> Iterator[Solved]:
    """The same of scores that were not recorded, by what the op leaves of a token's weighted values, [T, H * D]: what a
    head comes to follows from its own scores.
    """
    if problem.op.kind != "scores":
        return
    h, g = (int(problem.loops.numbers[name]) for name in "HG")
    right = _right(h, g)
    if not right:
        return

    def of_heads(other: int) -> np.ndarray:
        op = replace(problem.op, rework=SomeHeads({1: (other,) * h}))
        y = left(op)
        return np.square(y).reshape(len(y), h, -1).sum((0, 2))

    each = [of_heads(other) for other in range(g)]
    least = np.argmin(each, 0).tolist()
    found = [
        other if each[other][head] <= _LITTLE * each[own][head] else own
        for head, (own, other) in enumerate(zip(right, least, strict=True))
    ]
    if found != right:
        yield _solved(problem, right, found)


def _right(h: int, g: int) -> list[int]:
    """The key/value head that each query head should read; empty where none is shared, or there is one."""
    return [] if h == g or g == 1 else [head // (h // g) for head in range(h)]


def _by_head(problem: Problem, y: np.ndarray) -> np.ndarray:
    """[H, ...] of an output, flat in each head."""
    h, t = (int(problem.loops.numbers[name]) for name in "HT")
    return (y if problem.op.kind == "scores" else y.reshape(t, h, -1).swapaxes(0, 1)).reshape(h, -1)


def _gives(problem: Problem, made: Tensor, there: np.ndarray, near: np.ndarray, head: int) -> bool:
    return bool(agree(there[head], _by_head(problem, made.numpy())[head], near[head]).all())


def _solved(problem: Problem, right: Sequence[int], found: Sequence[int]) -> Solved:
    others = [head for head, other in enumerate(found) if other != right[head]]
    s = "s" * (len(others) > 1)
    read, belong = (few([of[head] for head in others]) for of in (found, right))
    words = f"query head{s} {few(others)} read{'' if s else 's'} key/value head{s} {read} where {belong} belong"
    op = replace(problem.op, rework=SomeHeads({1: tuple(found)}))
    return Solved((op,), words + ("" if s else "s"), _EACH * len(others), _LOOK)
