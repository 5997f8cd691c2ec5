"""Attention among llama.cpp's nodes: what is kept of keys and values, and the ops that scores and values make."""

from tracediff.model.graph import View
from tracediff.model.lift import layout, naming, patterns
from tracediff.model.lift.lifter import Input, Lifter, Shown
from tracediff.model.lift.nodes import KEYS, VALUES, operands
from tracediff.names import layer_of
from tracediff_reference.description import POSITIONS, Node, Read

_SOFTMAX = ("softmax", "soft_max")  # of a mask that follows from positions, or of any


def keep(lifter: Lifter, i: int, node: Node) -> None:
    """SET_ROWS into a cache: its rows are kept for later steps."""
    read, into = operands(node)[0], node.into
    if into is None or not lifter.nodes.is_cache(into):
        lifter.plain(i, node)
        return
    name = lifter.value[read.of]
    if not layout.is_whole(read, lifter.nodes[read.of]):  # a part of a fused projection: an op of its own
        name = _part(lifter, read, into.of)
    lifter.cached[into.of] = name


def _part(lifter: Lifter, read: Read, cache: int) -> str:
    """Some channels of a value, as an op: what a cache keeps of a fused projection."""
    whole = lifter.value[read.of]
    letter, number = naming.cache(lifter.nodes[cache].name)
    part, shape = layout.view(read), lifter.nodes.row_of_cache(cache)
    if shape and len(part.shape) == 2:
        part = layout.split(part, shape[1:])
    name = lifter.add(read.of, f"blk.{number}.attn_{letter}", "copy", [Input(whole, view=part)], (), part.shape)
    lifter.value[read.of] = whole
    lifter.shown[name] = Shown(read.of, part)
    return name


def scores(lifter: Lifter, i: int, node: Node, keys: Input, queries: Read) -> None:
    """Of each head queries against keys that are cached or masked; or any product."""
    q, user = _heads_of_step(lifter, queries, KEYS), lifter.nodes.only_user(i)
    masked = user is not None and user[1].op == "SOFT_MAX" and len(operands(user[1])) > 1
    if q is None or not (keys.past or masked):
        lifter.plain(i, node)
        return
    name = lifter.name(node, "scores", [q, keys])
    lifter.add(i, _of_scaled(lifter, q, name), "scores", [q, keys])


def _of_scaled(lifter: Lifter, queries: Input, name: str) -> str:
    """The name of scores, which have the attention scale in them where the queries have."""
    scaled = name.endswith("attn_scores") and lifter.ops[queries.name].kind == "scale"
    return f"{name}_scaled" if scaled else name


def weighted_values(lifter: Lifter, i: int, node: Node, values: Input, probs: Read) -> None:
    """Of each head its tokens; as a rule turned into tokens with all heads side by side."""
    reads = [read for _, read in lifter.nodes.users(i)]
    user = lifter.nodes.only_user(i)
    merged = user is not None and user[1].op == "CONT" and layout.is_permuted(reads[0], node, (1, 0, 2))
    as_it_is = all(read.shape == node.shape and layout.is_whole(read, node) for read in reads)
    is_softmax = lifter.nodes[probs.of].op == "SOFT_MAX" and lifter.ops[lifter.value[probs.of]].kind in _SOFTMAX
    if not (merged or as_it_is) or not (values.past or is_softmax):
        lifter.plain(i, node)
        return
    end = lifter.absorb(user[0]) if user and merged else i
    inputs = [lifter.input(probs), values]
    heads, tokens, width = layout.axes(node.shape)
    name = naming.in_layer(layer_of(inputs[0].name), "attn_kqv")  # layers may share their values
    side_by_side = layout.row((tokens, heads, width))
    name = lifter.add(end, name, "weighted_values", inputs, (), ("T", side_by_side))
    if as_it_is:
        lifter.seen[i] = View((heads, tokens, width), (layout.row((heads, width)), side_by_side, 1))
        lifter.shown[name] = Shown(i, layout.view(layout.permuted(i, node, (1, 0, 2))))


def kept(lifter: Lifter, read: Read, order: tuple[int, int, int]) -> Input | None:
    """Keys or values as [S, heads, head_dim], from the cache, or where there is none as [T, heads, head_dim].

    They are read with their axes in this order. None for anything else.
    """
    read = lifter.casts.get(read.of, read)
    if read.of not in lifter.cached:
        return _heads_of_step(lifter, read, order)
    tokens, channels = order.index(0) - 3, order.index(2) - 3
    if read.shape[tokens] != POSITIONS:
        return None
    name = lifter.cached[read.of]
    shape = (*(1,) * (3 - len(read.shape)), *read.shape)
    seen = ("S", *layout.axes((shape[-3], shape[channels])))
    own = ("S", *lifter.ops[name].axes[1:])
    return Input(name, True, None if seen == own else View(seen, (layout.row(own), layout.row(seen[1:]), 1), 0))


def _heads_of_step(lifter: Lifter, read: Read, order: tuple[int, int, int]) -> Input | None:
    """[T, heads, head_dim] of this step alone."""
    rows = layout.rows(read, order)
    return lifter.input(rows) if rows and read.of in lifter.value else None


def softmax(lifter: Lifter, i: int, node: Node) -> None:
    """Of attention's scores, which a mask comes with; or of anything."""
    scores, *more = operands(node)
    if not more or not lifter.nodes.is_input(more[0]):
        lifter.plain(i, node)
        return
    mask, *sinks = more
    attrs = {"scale": patterns.number(node, 0), **lifter.visible(lifter.nodes[mask.of])}
    if patterns.number(node, 1):
        attrs["max_bias"] = patterns.number(node, 1)
    cached = mask.shape[-1] == POSITIONS
    inputs = [lifter.input(scores), Input("positions"), Input("positions", cached)]
    name = lifter.name(node, "softmax", inputs)
    lifter.add(i, name, "softmax", inputs, sinks, attrs=attrs)


def flash(lifter: Lifter, i: int, node: Node) -> None:
    """Scores, probabilities and values in one node, which shows the last alone."""
    queries, keys, values, mask, *sinks = operands(node)
    k, v = kept(lifter, keys, KEYS), kept(lifter, values, KEYS)
    q = _heads_of_step(lifter, queries, KEYS)
    if q is None or k is None or v is None:
        lifter.plain(i, node)
        return
    shape = (layout.axes(queries.shape)[0], "T", "S" if k.past else "T")
    names = [naming.in_layer(layer_of(q.name), f"attn_{part}") for part in ("scores", "probs", "kqv")]
    scores = lifter.add(i, _of_scaled(lifter, q, names[0]), "scores", [q, k], (), shape)
    attrs = {"scale": patterns.number(node, 0), **lifter.visible(lifter.nodes[mask.of])}
    positions = [Input("positions"), Input("positions", k.past)]
    probs = lifter.add(i, names[1], "softmax", [Input(scores), *positions], sinks, shape, attrs)
    del lifter.shown[scores], lifter.shown[probs]
    rows = ("T", layout.row(("T", *layout.axes(node.shape[1:]))))
    lifter.add(i, names[2], "weighted_values", [Input(probs), v], (), rows)


def is_copied_for(lifter: Lifter, i: int, read: Read) -> bool:
    """Whether keys or values are copied for attention alone: to another type, or transposed."""
    if all(lifter.nodes[user].op == "FLASH_ATTN_EXT" for user, _ in lifter.nodes.users(i)):
        return True
    user = lifter.nodes.only_user(i)
    if user is None or user[1].op != "MUL_MAT" or kept(lifter, read, VALUES) is None:
        return False
    return lifter.nodes[operands(user[1])[1].of].op == "SOFT_MAX"
