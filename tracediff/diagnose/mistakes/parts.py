"""Mistakes in which part of a fused value an op reads: a half, a head, one of several vectors that lie in one row."""

import math
from collections.abc import Iterator
from dataclasses import replace

from tracediff.diagnose.mistakes.mistake import Area, Context, Variant, Variants, Where
from tracediff.model.graph import Graph, Op, View
from tracediff.names import split

AREA = Area()


@AREA.mistake(
    "parts_exchanged", "a part of a fused value is read where another part belongs",
    "the order in which a fused projection is split", Where(),
)  # fmt: skip
def _exchanged(op: Op, context: Context) -> Variants:
    for position, (name, own) in enumerate(zip(op.inputs, op.seen, strict=True)):
        if own is None or not isinstance(own.offset, int):
            continue
        for offset in _others(name, own, context.graph):
            other = replace(own, offset=offset)
            views = [*op.seen]
            views[position] = other
            swapped = [n for n, view in enumerate(op.seen) if op.inputs[n] == name and view and view.offset == offset]
            for n in swapped:
                views[n] = own
            if all(n > position for n in swapped):  # a pair once
                parts, what = sorted((own, other), key=_first), split(name)[1]
                both = f"channels {_run(parts[0])} and {_run(parts[1])} of {what} are exchanged"
                words = f"channels {_run(other)} of {what} are read where {_run(own)} belong"
                yield Variant(replace(op, views=tuple(views)), both if swapped else words, name=both)


def _others(name: str, own: View, graph: Graph) -> Iterator[int]:
    """Where the parts of the value begin that are as large as this one."""
    if not _size(own):
        return
    seen = {own.offset}
    for reader, position in graph.readers(name):
        view = reader.seen[position]
        if view and isinstance(view.offset, int) and _size(view) == _size(own) and view.offset not in seen:
            seen.add(view.offset)
            yield view.offset


def _size(view: View) -> int:
    """Values of each token; 0 where its axes follow the step in other ways."""
    fixed = [axis for axis in view.shape if isinstance(axis, int)]
    return math.prod(fixed) if "T" in view.shape and len(fixed) == len(view.shape) - 1 else 0


def _first(view: View) -> int:
    assert isinstance(view.offset, int)
    return view.offset


def _run(view: View) -> str:
    """Its channels in a row."""
    return f"{_first(view)} to {_first(view) + _size(view) - 1}"
