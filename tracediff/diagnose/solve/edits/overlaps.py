"""An input that holds another value in part: buffers overlap, and what was written last is read."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tracediff.diagnose.solve.edit import Edit, Priced, Read
from tracediff.diagnose.solve.problem import Problem

_LOOK = "the sizes of its buffers: where each begins and ends in memory"
_ALIGNED = 4  # values: allocators begin at multiples of 16 bytes
_MOST = 4096  # places that are tried
# For each input of a kind the axis of the output along which its rows lie; -1: value by value, None: neither.
_ROWS: Mapping[str, Sequence[int | None]] = {
    "rope": (0,), "rms_norm": (0,), "linear": (0,), "add": (-1, -1), "swiglu": (-1, -1), "scores": (1, 2),
    "softmax": (None,), "weighted_values": (None, None),
}  # fmt: skip


def variants(problem: Problem) -> Iterator[Priced]:
    """From some value on, an input is a value that was computed after it: the op's own output among them."""
    op, loops = problem.op, problem.loops
    for name, belongs, axis in zip(loops.own.inputs, op.inputs, _ROWS.get(op.kind, ()), strict=False):
        if belongs not in problem.names:
            continue
        later = problem.earlier[problem.earlier.index(belongs) + 1 :] if belongs in problem.earlier else []
        size = loops.arrays[name].size
        for other in (*map(Read, later), Read(op.name)):
            held = problem.held(other)
            for at in _places(problem, axis, size, 0 if held is None else held.size):
                assert held is not None
                yield _overlaid(problem, name, belongs, other, at, size, held.size)
                if other == Read(op.name) and op.kind == "linear":
                    yield _stored_over(problem, name, belongs, at, size)


def _places(problem: Problem, axis: int | None, size: int, length: int) -> Sequence[int]:
    """Where in the input so many other values may begin: they lie in all rows that are wrong, and in no other."""
    wrong, width = problem.wrong.reshape(problem.loops.own.shape), 1
    if axis is None:
        low, high = 1 - length, size
    else:
        if axis >= 0:
            width = size // wrong.shape[axis]
            wrong = np.moveaxis(wrong, axis, 0).reshape(wrong.shape[axis], -1)
        rows = np.flatnonzero(wrong.reshape(len(wrong), -1).any(1) if axis >= 0 else wrong)
        if not len(rows):
            return ()
        first, last = int(rows[0]) * width, (int(rows[-1]) + 1) * width
        begins = (first, first + width) if first else (1 - length, width)
        ends = (last - width + 1 - length, last + 1 - length) if last < size else (size - length, size)
        low, high = max(begins[0], ends[0]), min(begins[1], ends[1])
    places = range(-(-low // _ALIGNED) * _ALIGNED, high, _ALIGNED)
    return places if length and len(places) <= _MOST else ()


def _stored_over(problem: Problem, name: str, belongs: str, at: int, size: int) -> Priced:
    """A matmul that stores its output over its input while it reads that: each row finds there what those before it
    stored.
    """
    right, place = f"{name}[t * n_in + i]", f"t * n_in + i - {at}"
    found = f"({right} if {place} < 0 else {right} if {place} >= t * n_out + o else over[{place}])"
    own = Read(belongs).words(problem.op)
    words = f"its output is stored over {own}, from value {at} on, while that is read: their buffers overlap"
    if at < 0:
        words = f"its output, from value {-at} on, is stored over {own}, while that is read: their buffers overlap"
    edit = Edit(words, problem.loops.source.replace(right, found), arrays=(("over", Read(problem.op.name)),))
    return Priced(edit, 12.0 + math.log2(size), _LOOK)


def _overlaid(problem: Problem, name: str, belongs: str, other: Read, at: int, size: int, length: int) -> Priced:
    first, last = max(0, at), min(size, at + length)
    copied = f"for a in range({size}):\n    held[a] = {name}[a]\n"
    copied += f"for c in range({first}, {last}):\n    held[c] = over[c - {at}]\n"
    source = copied + re.sub(rf"\b{name}\[", "held[", problem.loops.source)
    own, over = (read.words(problem.op) for read in (Read(belongs), other))
    words = f"values {first} to {last - 1} of {own} are those of {over} from {first - at} on: their buffers overlap"
    return Priced(Edit(words, source, arrays=(("over", other),)), 12.0 + math.log2(size), _LOOK)
