"""Mistakes in which part of a fused value an op reads: a half, a head, one of several vectors that lie in one row."""

import math
from collections.abc import Iterator
from dataclasses import replace

from tracediff.diagnose.mistakes.mistake import Area, Context, Variant, Variants, Where
from tracediff.diagnose.rearranged import SomeHeads
from tracediff.english import nth
from tracediff.model.graph import Graph, Op, View
from tracediff.names import axes_of, local_name

AREA = Area()


@AREA.mistake(
    "parts_exchanged", "a part of a fused value is read where another part belongs",
    "the order in which a fused projection is split", Where(),
)  # fmt: skip
def _exchanged(op: Op, context: Context) -> Variants:
    for position, name, own in _parts(op):
        for offset in _others(name, own, context.graph):
            other = replace(own, offset=offset)
            swapped = [n for n, view in enumerate(op.seen) if op.inputs[n] == name and view and view.offset == offset]
            if all(n > position for n in swapped):  # a pair once
                parts, what = sorted((own, other), key=_first), local_name(name)
                both = f"channels {_run(parts[0])} and {_run(parts[1])} of {what} are exchanged"
                words = f"channels {_run(other)} of {what} are read where {_run(own)} belong"
                exchanged = op.seeing({position: other} | dict.fromkeys(swapped, own))
                yield Variant(exchanged, both if swapped else words, name=both)


@AREA.mistake(
    "parts_off_by_one", "a part of a fused value begins a channel, or a head, early or late",
    "the sizes of the parts into which a fused projection is split", Where(),
)  # fmt: skip
def _off_by_one(op: Op, context: Context) -> Variants:
    graph = context.graph
    heads = {own.strides[1] for _, _, own in _parts(op) if len(own.shape) == 3 and own.shape[0] == "T"}
    for by in (*(-1, 1), *(sign * width for width in heads if isinstance(width, int) for sign in (-1, 1))):
        shifted: dict[str, list[tuple[int, View, View]]] = {}  # an op may read several, of one value
        for position, name, own in _parts(op):
            row = math.prod(n for n in graph[name].axes if isinstance(n, int)) if name in graph else 0
            assert isinstance(own.offset, int)
            if own.offset and _size(own) and own.offset + by >= 0 and own.offset + by + _reach(own) < row:
                shifted.setdefault(name, []).append((position, own, replace(own, offset=own.offset + by)))
        for name, parts in shifted.items():
            for some in ([parts] if len(parts) > 1 else []) + [[part] for part in parts]:
                read, belong = (
                    " and ".join(map(_run, views)) for views in ([x[2] for x in some], [x[1] for x in some])
                )
                words = f"channels {read} of {local_name(name)} are read where {belong} belong"
                yield op.seeing({position: other for position, _, other in some}), words


@AREA.mistake(
    "parts_in_another_order", "a value is split into its parts in another order",
    "the order in which a fused projection, or each of its heads, is split", Where(),
)  # fmt: skip
def _other_order(op: Op, context: Context) -> Variants:
    orders: dict[str, list[tuple[int, View, str]]] = {}  # an op that reads several parts reads all of them so
    for position, name, own in _parts(op):
        for view, order, words in _elsewhere(own, name, context.graph) if name in context.graph else ():
            both = f"{local_name(name)} is split in another order, {order}"
            orders.setdefault(both, []).append((position, view, words))
    told: dict[tuple[tuple[int, View, str], ...], list[str]] = {}  # one part may be there in several orders
    for both, parts in orders.items():
        told.setdefault(tuple(parts), []).append(both)
    for read, ways in told.items():
        both = ways[0] if len(ways) == 1 else ways[0][: ways[0].rindex(",")]
        seen = op.seeing({position: view for position, view, _ in read})
        yield Variant(seen, f"{both}: {'; '.join(words for _, _, words in read)}", name=both)
    for position, name, own in _parts(op):
        if blocks := _by_heads(own, context.graph[name]) if name in context.graph else None:
            whole, places = blocks
            both = f"{local_name(name)} is split in another order, as if each part had its heads side by side"
            words = f"{both}: in it the parts of each head lie side by side"
            yield Variant(replace(op.seeing({position: whole}), rework=SomeHeads({position: places})), words, name=both)


def _by_heads(own: View, of: Op) -> tuple[View, tuple[int, ...]] | None:
    """Of a part that has its heads side by side the view of all heads of all parts, and which of them it would be if
    they lay in the weight head by head, as checkpoints have them; None of another part.
    """
    row, offset = math.prod(axis for axis in of.axes[1:] if isinstance(axis, int)), own.offset
    if len(own.shape) != 3 or own.shape[0] != "T" or not isinstance(offset, int):
        return None
    n, width = own.shape[1:]
    if not (isinstance(n, int) and isinstance(width, int)) or own.strides != (row, width, 1) or offset % (n * width):
        return None
    parts, rest = divmod(row, n * width)
    if rest or parts < 2 or n < 2:
        return None
    first = offset // width
    places = tuple((first + h) % parts * n + (first + h) // parts for h in range(n))
    return View(("T", parts * n, width), own.strides, 0), places


def _parts(op: Op) -> Iterator[tuple[int, str, View]]:
    """The inputs that are read through a view that begins at a fixed place: which, of what value, how."""
    for position, (name, own) in enumerate(zip(op.inputs, op.seen, strict=True)):
        if own is not None and isinstance(own.offset, int):
            yield position, name, own


def _elsewhere(own: View, name: str, graph: Graph) -> Iterator[tuple[View, str, str]]:
    """A part of each row, or of each head of it, at the other end, or where it is if the first or the last is moved to
    the other end; and a part of each head where all heads' parts lie side by side.
    """
    of = graph[name]
    row, offset = math.prod(axis for axis in of.axes[1:] if isinstance(axis, int)), own.offset
    if of.axes[0] != "T" or own.strides[own.shape.index("T") if "T" in own.shape else 0] != row or not _size(own):
        return
    fixed = [(size, stride) for size, stride in zip(own.shape, own.strides, strict=True) if isinstance(size, int)]
    *heads, (width, along) = [one for one in fixed if one[0] != 1] or [(1, 1)]
    if along != 1 or len(heads) > 1 or not isinstance(offset, int):
        return
    n, each = heads[0] if heads else (1, row)
    if heads and each == width and row % (n * width) == 0 and offset % (n * width) == 0 and row > n * width:
        parts, first = row // (n * width), offset // n
        strides = tuple(
            parts * width if one == (n, each) else one[1] for one in zip(own.shape, own.strides, strict=True)
        )
        run = f"the part of each head is read from channel {first} on, where those of all heads lie side by side"
        yield replace(own, offset=first, strides=strides), "the parts of each head side by side", run
        return
    if not isinstance(each, int) or n * each != row or offset + width > each:
        return  # no part of each
    of_each = f" of each {axes_of(of.name, 3)[1]}" if heads else ""
    belong = f"where {offset} to {offset + width - 1} belong"
    starts = sorted({view.offset for view in _views_of(name, graph) if isinstance(view.offset, int)} & {*range(each)})
    mirrored = "the last part first" if len(starts) <= 2 else "the parts in the reverse order"
    orders = {mirrored: each - width - offset}
    if len(starts) > 2:
        orders |= {
            "the first part last": (offset - starts[1]) % each,
            "the last part first": (offset - starts[-1]) % each,
        }
    for order, other in orders.items():
        if other != offset and other + width <= each:
            read = f"channels {other} to {other + width - 1}{of_each} are read {belong}"
            yield replace(own, offset=other), order, read
    parts, first = each // width, offset // width
    if parts > 1 and each == parts * width and offset == first * width:
        strides = tuple(parts if one == (width, 1) else one[1] for one in zip(own.shape, own.strides, strict=True))
        turns = f"every {nth(parts)} channel{of_each} is read, from {first} on, {belong}"
        yield replace(own, offset=first, strides=strides), "the parts' channels by turns", turns
    if heads and width < each:
        strides = tuple(width if one == (n, each) else one[1] for one in zip(own.shape, own.strides, strict=True))
        run = f"the parts of all heads are read from channel {n * offset} on, where each head has its own"
        yield replace(own, offset=n * offset, strides=strides), "all heads' parts side by side", run


def _views_of(name: str, graph: Graph) -> Iterator[View]:
    """How the value is read."""
    yield from (view for reader, position in graph.readers(name) if (view := reader.seen[position]) is not None)


def _others(name: str, own: View, graph: Graph) -> Iterator[int]:
    """Where the parts of the value begin that are as large as this one."""
    if not _size(own):
        return
    seen, row = {own.offset}, math.prod(n for n in graph[name].axes if isinstance(n, int)) if name in graph else 0
    for view in _views_of(name, graph):
        if not isinstance(view.offset, int) or (row and view.offset + _reach(own) >= row):
            continue
        if _size(view) == _size(own) and view.offset not in seen:
            seen.add(view.offset)
            yield view.offset


def _reach(view: View) -> int:
    """How far behind its first channel a view's last one is."""
    sizes = ((n, by) for n, by in zip(view.shape, view.strides, strict=True) if isinstance(n, int))
    return sum((n - 1) * by for n, by in sizes if isinstance(by, int))


def _size(view: View) -> int:
    """Values of each token; 0 where its axes follow the step in other ways."""
    fixed = [axis for axis in view.shape if isinstance(axis, int)]
    return math.prod(fixed) if "T" in view.shape and len(fixed) == len(view.shape) - 1 else 0


def _first(view: View) -> int:
    assert isinstance(view.offset, int)
    return view.offset


def _run(view: View) -> str:
    """Its channels, in one run, or as many of each head's."""
    run = view.run()
    assert run
    first, n, is_of_each = run
    return f"{first} to {first + n - 1}{' of each head' * is_of_each}"
