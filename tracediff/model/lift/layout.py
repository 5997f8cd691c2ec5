"""Sizes that follow the step, and how one tensor lies in another's memory."""

import math
from collections.abc import Iterator
from dataclasses import replace

from tracediff.errors import ModelError
from tracediff.model.graph import Axis, Extent, View, sizes
from tracediff_reference.description import POSITIONS, TOKENS, Node, Read, Size

BOTH: Size = (0, 0, 2, 0, 0)  # keys of all tokens, and behind them those of the blocks that they end
_STEPS = ((5, 256), (7, 512), (13, 768))  # tokens and positions that layouts are compared at


def axis(size: Size) -> Axis:
    """The size as an axis of the graph; raises ModelError for one that follows no rule."""
    if size is None:
        raise ModelError("a size of llama.cpp's graph follows neither the tokens nor the positions.")
    if isinstance(size, int):
        return size
    return {TOKENS: "T", POSITIONS: "S"}.get(size) or Extent(*size)


def size(axis: Axis) -> Size:
    """An axis of the graph as a described size."""
    if isinstance(axis, Extent):
        return (axis.constant, axis.t, axis.s, axis.ts, axis.tt)
    return {"T": TOKENS, "S": POSITIONS}[axis] if isinstance(axis, str) else axis


def read(of: int, view: View) -> Read:
    """A view as a described reading of node `of`."""
    return Read(of, tuple(map(size, view.shape)), tuple(map(size, view.strides)), size(view.offset))


def axes(shape: tuple[Size, ...]) -> tuple[Axis, ...]:
    """All axes of a shape."""
    return tuple(axis(size) for size in shape)


def view(read: Read) -> View:
    """A reading as the graph describes it."""
    return View(axes(read.shape), axes(read.strides), axis(read.offset))


def is_whole(read: Read, node: Node) -> bool:
    """Whether it reads all of the node, in the order in which it lies."""
    return all(
        offset == 0 and _in_order(shape, strides) and math.prod(shape) == math.prod(of)
        for (shape, strides, offset), of in zip(_concrete(read), _shapes(node), strict=True)
    )


def is_permuted(read: Read, node: Node, order: tuple[int, ...]) -> bool:
    """Whether it reads all of the node with its axes in this order."""
    if len(read.shape) != len(order) or len(node.shape) != len(order):
        return False
    for (shape, strides, offset), of in zip(_concrete(read), _shapes(node), strict=True):
        own = _strides(of)
        if offset or shape != tuple(of[i] for i in order):
            return False
        if any(stride != own[i] for stride, i, size in zip(strides, order, shape, strict=True) if size != 1):
            return False
    return True


def rows(read: Read, order: tuple[int, int, int]) -> Read | None:
    """[T, heads, head_dim] as it is, of what is read with those axes in this order; None where it has no such axes.

    Keys may be of tokens and of the blocks that these end, and then of one head.
    """
    if BOTH in read.shape:
        one = (1,) * (len(order) - len(read.shape))
        read = Read(read.of, (*one, *read.shape), (*one, *read.strides), read.offset)
    if len(read.shape) != len(order):
        return None
    back = [order.index(i) for i in range(len(order))]
    turned = Read(read.of, tuple(read.shape[i] for i in back), tuple(read.strides[i] for i in back), read.offset)
    return turned if turned.shape[0] in (TOKENS, BOTH) else None


def permuted(of: int, node: Node, order: tuple[int, ...]) -> Read:
    """All of node `of` with its axes in this order; one of them at most follows the step."""
    strides: list[Size] = [1]
    for size in node.shape[:0:-1]:
        strides.insert(0, times(strides[0], size))
    return Read(of, tuple(node.shape[i] for i in order), tuple(strides[i] for i in order))


def times(a: Size, b: Size) -> Size:
    """The product of two sizes, of which one is fixed."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    by, of = (a, b) if isinstance(a, int) else (b, a)
    return None if of is None or not isinstance(by, int) else tuple(by * n for n in of)  # type: ignore[return-value, union-attr]


def covers(read: Read, node: Node) -> bool:
    """Whether it has as many elements as the node."""
    return all(
        math.prod(shape) == math.prod(of) for (shape, _, _), of in zip(_concrete(read), _shapes(node), strict=True)
    )


def row(shape: tuple[Axis, ...]) -> int:
    """Elements of one row of a value, all of whose axes but the first are fixed."""
    return math.prod(size for size in shape[1:] if isinstance(size, int))


def stretched(read: Read, node: Node) -> View:
    """A reading repeated to the node's shape along axes of size 1, where how often follows the step."""
    more = len(node.shape) - len(read.shape)
    shape, strides = (*(1,) * more, *read.shape), (*(0,) * more, *read.strides)
    steps = (stride if a == b else 0 for a, b, stride in zip(shape, node.shape, strides, strict=True))
    return View(axes(node.shape), axes(tuple(steps)), axis(read.offset))


def total(shape: tuple[Size, ...]) -> Axis:
    """Elements of a tensor of which one axis at most follows the step."""
    fixed = math.prod(size for size in shape if isinstance(size, int))
    following = [size for size in shape if not isinstance(size, int)]
    if not following:
        return fixed
    terms = following[0] if len(following) == 1 else None
    return axis(None if terms is None else tuple(fixed * n for n in terms))  # type: ignore[arg-type]


def split(part: View, heads: tuple[Axis, ...]) -> View:
    """Rows of channels as rows of heads."""
    stride, size = part.strides[-1], heads[-1]
    assert isinstance(stride, int)
    assert isinstance(size, int)
    return View((part.shape[0], *heads), (part.strides[0], size * stride, stride), part.offset)


def plus(offset: Axis, more: int) -> Axis:
    """An offset, so many elements on."""
    if isinstance(offset, int):
        return offset + more
    of = {"T": Extent(t=1), "S": Extent(s=1)}[offset] if isinstance(offset, str) else offset
    return replace(of, constant=of.constant + more) if more else offset


def _concrete(read: Read) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    seen = view(read)
    for step in _STEPS:
        yield sizes(seen.shape, *step), sizes(seen.strides, *step), sizes((seen.offset,), *step)[0]


def _shapes(node: Node) -> Iterator[tuple[int, ...]]:
    of = axes(node.shape)
    return (sizes(of, *step) for step in _STEPS)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor of this shape in C order."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _in_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return all(size == 1 or own == stride for size, own, stride in zip(shape, _strides(shape), strides, strict=True))
