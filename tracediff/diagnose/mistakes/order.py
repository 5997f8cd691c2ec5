"""Mistakes in where a norm, a rotation or a residual stands: what an op reads has been through one more."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from torch import Tensor

from tracediff.diagnose.mistakes.mistake import (
    MATMUL,
    NORM,
    Area,
    Context,
    Variant,
    Variants,
    Where,
    is_gated,
    parts_of,
)
from tracediff.english import told_apart
from tracediff.model.graph import Axis, Graph, Op, View
from tracediff.names import in_layer_of, layer_of, local_name
from tracediff.numerics.kinds import KINDS

AREA = Area()
_PROJECTION = Where(MATMUL.kinds, in_layer=True)


def _reading(op: Op, name: str) -> Op:
    """The op with another value in the place of its first input."""
    return replace(op, inputs=(name, *op.inputs[1:]))


def _norms(op: Op, graph: Graph) -> Iterator[Op]:
    """The norms of the op's layer over as many channels as its input has, each but for the one that it reads."""
    layer, axes = layer_of(op.name), graph[op.inputs[0]].axes
    for norm in graph.layer(layer) if layer is not None else ():
        if norm.kind in NORM.kinds and norm.axes == axes and norm.weights and norm.name != op.inputs[0]:
            yield norm


@AREA.mistake(
    "input_normed", "a projection reads a value normed that it should read as it is",
    "which norms the family has, before or after each part of a layer", _PROJECTION, in_short=True,
)  # fmt: skip
def _input_normed(op: Op, context: Context) -> Variants:
    source = op.inputs[0]
    if op.seen[0] is not None or source not in context.graph:
        return
    for norm in _norms(op, context.graph):
        before = replace(norm, name=f"{op.name}.read", inputs=(source,), views=())  # which may be its .normed
        words = f"what it reads is normed first, with {local_name(norm.name)}.weight"
        yield Variant(_reading(op, before.name), words, before=(before,))


@AREA.mistake(
    "norm_of_another_part", "a projection reads what another norm of its layer makes of the same values",
    "which norm is called before attention and which before the feed-forward", _PROJECTION, in_short=True,
)  # fmt: skip
def _another_norm(op: Op, context: Context) -> Variants:
    own = context.graph.ops.get(op.inputs[0])
    if op.seen[0] is not None or own is None or own.kind not in NORM.kinds or not own.weights:
        return
    for norm in _norms(op, context.graph):
        if len(norm.weights) == len(own.weights):
            before = replace(own, name=f"{op.name}.read", weights=norm.weights)
            read, right = local_name(norm.name), local_name(own.name)
            words = f"what it reads is normed with {read}.weight where {right}.weight belongs"
            yield Variant(_reading(op, before.name), words, before=(before,))


@AREA.mistake(
    "norm_after_rope", "a norm of heads reads them when they are rotated", "the order of rope and the norm of Q and K",
    NORM,
)  # fmt: skip
def _after_rope(op: Op, context: Context) -> Variants:
    for turn in (reader for reader, _ in context.graph.readers(op.name) if reader.kind == "rope"):
        if not any(turn.seen):
            views = (op.views[0], *turn.seen[1:]) if op.views else ()
            before = replace(turn, name=f"{op.name}.read", inputs=(op.inputs[0], *turn.inputs[1:]), views=views)
            changed = replace(_reading(op, before.name), views=())
        elif not any(op.seen) and turn.seen[0] == _dense(turn.axes):  # of all heads as one row
            before = replace(turn, name=f"{op.name}.read", inputs=(op.inputs[0], *turn.inputs[1:]))
            changed = replace(_reading(op, before.name), views=(_dense(op.axes),))
        else:
            continue
        yield Variant(changed, "what it reads is rotated first: the norm comes after rope", before=(before,))


def _dense(axes: Sequence[Axis]) -> View | None:
    """Rows of a step's tokens side by side in such a shape; None where it follows the step in another way."""
    sizes = [axis for axis in axes[1:] if isinstance(axis, int)]
    if axes[0] != "T" or len(sizes) < len(axes) - 1:
        return None
    return View(tuple(axes), tuple(math.prod(sizes[i:]) for i in range(len(axes))), 0)


@AREA.mistake(
    "norm_before_rope", "heads are normed before they are rotated", "the order of rope and the norm of Q and K", NORM,
)  # fmt: skip
def _before_rope(op: Op, context: Context) -> Variants:
    turn = context.graph.ops.get(op.inputs[0])
    if turn and turn.kind == "rope" and not any(op.seen) and turn.axes == op.axes:
        normed = replace(op, name=f"{op.name}.read", inputs=turn.inputs[:1], views=turn.views[:1])
        rotated = replace(turn, name=op.name, inputs=(normed.name, *turn.inputs[1:]), views=())
        yield Variant(rotated, "the norm comes before rope", before=(normed,))


@AREA.mistake(
    "gate_after_norm", "what should be normed is gated behind the norm", "the order of norm and gate", NORM,
)  # fmt: skip
def _gated_after(op: Op, context: Context) -> Variants:
    gated = context.graph.ops.get(op.inputs[0])
    if gated is None or not is_gated(gated):
        return

    def function(gate: Tensor, up: Tensor, *weights: Tensor, **attrs: float) -> Tensor:
        normed = norm(up.reshape(op.shape(len(up))), *weights, **attrs)
        return act(gate.reshape(normed.shape), normed, **gated.attrs)

    norm, act = KINDS[op.kind].function, KINDS[gated.kind].function
    changed = replace(op, inputs=gated.inputs, views=gated.views, function=function)
    yield changed, "the gate multiplies what is normed, not what is to be normed"


@AREA.mistake(
    "gate_before_norm", "what is normed is gated before, not behind, the norm", "the order of norm and gate",
    Where(("mul",)),
)  # fmt: skip
def _gated_before(op: Op, context: Context) -> Variants:
    graph = context.graph
    for i, name in enumerate(op.inputs[:2]):
        norm = graph.ops.get(name)
        if norm is None or norm.kind not in NORM.kinds or len(op.inputs) < 2 or op.seen[i] is not None:
            continue
        inputs, views = [*op.inputs], [*op.seen]
        inputs[i], views[i] = norm.inputs[0], norm.seen[0]
        gated = replace(op, name=f"{op.name}.gated", inputs=(*inputs,), views=(*views,), axes=norm.axes)
        changed = replace(norm, name=op.name, inputs=(gated.name,), views=(), axes=op.axes)
        words = f"{local_name(norm.inputs[0])} is gated before {local_name(name)}, which belongs before the gate"
        yield Variant(changed, words, before=(gated,))


@AREA.mistake(
    "norm_bypassed", "a projection reads as it is what should be normed first", "which buffer is passed to it",
    _PROJECTION,
)  # fmt: skip
def _bypassed(op: Op, context: Context) -> Variants:
    norm = context.graph.ops.get(op.inputs[0])
    if norm and norm.kind in NORM.kinds and not op.seen[0] and not norm.seen[0] and norm.inputs[0] in context.graph:
        stream, what = in_layer_of(op.name, norm.inputs[0]), local_name(norm.name)
        yield _reading(op, norm.inputs[0]), f"reads {stream} where {what} belongs: the norm is bypassed"


@AREA.mistake(
    "sum_normed", "a sum is normed of which one term should be", "whether the norm comes before or after the residual",
    Where(("add",), in_layer=True),
)  # fmt: skip
def _sum_normed(op: Op, context: Context) -> Variants:
    graph = context.graph
    for position, name in enumerate(op.inputs):
        norm = graph.ops.get(name)
        if norm and norm.kind in NORM.kinds and len(op.inputs) == 2 and not any((*op.seen, *norm.seen)):
            terms = (norm.inputs[0], op.inputs[1 - position])
            if any(term not in graph or graph[term].axes != op.axes for term in terms):
                continue  # one of them is added to all rows of the other
            total = replace(op, name=f"{op.name}.sum", inputs=terms)
            words = f"the sum is normed, where {local_name(terms[0])} alone is, before it is added"
            yield Variant(replace(norm, name=op.name, inputs=(total.name,)), words, before=(total,))


@AREA.mistake(
    "in_sequence", "a projection reads a sum to which a part of the layer was added that should run beside it",
    "whether attention and feed-forward read the same value, or one after the other", _PROJECTION,
)  # fmt: skip
def _in_sequence(op: Op, context: Context) -> Variants:
    graph = context.graph
    norm = graph.ops.get(op.inputs[0])
    if norm is None or norm.kind not in NORM.kinds or op.seen[0] or norm.seen[0]:
        return
    stream, later = norm.inputs[0], graph.after([op.name])
    for other in graph.layer(layer_of(op.name) or 0):
        if other.kind != "linear" or other.axes != norm.axes or other.name in later:
            continue
        total = Op(f"{op.name}.sum", "add", (stream, other.name), norm.axes)
        normed = replace(norm, name=f"{op.name}.normed", inputs=(total.name,))
        beside, what = local_name(norm.name), local_name(other.name)
        for name, before in ((normed.name, (total, normed)), (total.name, (total,))):
            value = f"{'the norm of ' if name == normed.name else ''}{in_layer_of(op.name, stream)} + {what}"
            words = f"reads {value}, where {beside} belongs: {what} runs beside it"
            yield Variant(_reading(op, name), words, before=before)


@AREA.mistake(
    "rope_in_all_layers", "queries and keys are rotated in a layer that has no rotary embedding",
    "which layers have rope: some families have it in layers with a window alone", Where(("scores",)),
)  # fmt: skip
def _rotated(op: Op, context: Context) -> Variants:
    graph = context.graph
    if any(op.seen) or any(name not in graph or graph[name].kind in ("rope", "concat") for name in op.inputs):
        return
    before_norm = any(graph[one].kind == "rope" for name in op.inputs for one in graph[name].inputs if one in graph)
    words = " behind their norm" if before_norm else "; this layer has no rotary embedding"
    ropes = {other.attrs["rope"]: other for other in graph if other.kind == "rope"}
    for turn in ropes.values():
        if any(graph[name].axes[-1] != turn.axes[-1] for name in op.inputs):
            continue
        before = tuple(
            replace(turn, name=f"{op.name}.{i}", inputs=(name, *turn.inputs[1:]), axes=graph[name].axes, views=())
            for i, name in enumerate(op.inputs)
        )
        changed = replace(op, inputs=tuple(one.name for one in before))
        yield Variant(changed, f"queries and keys are rotated{words}", before=before)


@AREA.mistake(
    "values_normed", "values are normed as keys are", "which of Q, K and V have a norm", Where(("weighted_values",)),
)  # fmt: skip
def _values_normed(op: Op, context: Context) -> Variants:
    for norm in _of_keys(op, context, NORM.kinds):
        yield _reading_through(op, norm, f"values are normed, as keys are, with {local_name(norm.name)}.weight")


@AREA.mistake(
    "values_rotated", "values are rotated as keys are", "which of Q, K and V have rope", Where(("weighted_values",)),
)  # fmt: skip
def _values_rotated(op: Op, context: Context) -> Variants:
    for rope in _of_keys(op, context, ("rope",)):
        yield _reading_through(op, rope, "values are rotated by their positions, as keys are")


def _of_keys(op: Op, context: Context, kinds: Sequence[str]) -> Iterator[Op]:
    """What is done to the keys of the layer in an op of these kinds, and may be to the values that this one adds up."""
    values, layer = op.inputs[1], layer_of(op.name)
    if any(op.seen) or layer is None or values not in context.graph:
        return
    for one in context.graph.layer(layer):
        if one.kind in kinds and one.axes == context.graph[values].axes and "k" in parts_of(one, context.graph):
            yield one


def _reading_through(op: Op, one: Op, words: str) -> Variant:
    """The op that reads its values as another op makes them."""
    before = replace(one, name=f"{op.name}.read", inputs=(op.inputs[1], *one.inputs[1:]), views=())
    return Variant(replace(op, inputs=(op.inputs[0], before.name, *op.inputs[2:])), words, before=(before,))


# What is done to a projection, in words, until attention reads it.
_DONE = {"rope": "rotated", "mul": "multiplied", "scale": "scaled"} | dict.fromkeys((*NORM.kinds, "l2_norm"), "normed")
_ROPE = {"theta": "base", "freq_scale": "scale of positions", "n_rot": "number of channels"}
_Made = tuple[str, list[Op]]  # a projection's name, and the ops between it and what attention reads


@AREA.mistake(
    "layer_of_another_sort", "queries and keys are made as in layers of another sort",
    "which layers have rope, norms of Q and K or a factor: some families have them in every other one",
    Where(("scores",)),
)  # fmt: skip
def _of_another_sort(op: Op, context: Context) -> Variants:
    own, name = _made_of(op, context.graph), local_name(op.name)
    known = {_sort(own)} if own else set()
    for other in context.graph if own else ():
        theirs = _made_of(other, context.graph) if local_name(other.name) == name else None
        if not theirs or _sort(theirs) in known:
            continue
        known.add(_sort(theirs))
        there = f", as in layer {layer_of(other.name)}"
        made = [(root, ops) for (root, _), (_, ops) in zip(own, theirs, strict=True)]
        words = f"{_words(theirs)}{there}, where here {_words(own)}"
        if _words(theirs) == _words(own):  # by other numbers
            words = f"{_numbers(theirs, own)}{there}"
        yield from _reading_these(op, made, words, context)
        if "normed" not in _words(own):
            norms = [[one for one in ops if _DONE[one.kind] == "normed"] for _, ops in theirs]
            on_top = [*zip(op.inputs, norms, strict=True)]
            yield from _reading_these(op, on_top, f"queries and keys are normed{there}", context)


def _made_of(op: Op, graph: Graph) -> list[_Made]:
    """What attention's queries and keys are made of; nothing where that is not in so many words."""
    found: list[_Made] = []
    for name in () if any(op.seen) or len(op.inputs) > 2 else op.inputs:  # another mistake may read more
        ops: list[Op] = []
        while name in graph and graph[name].kind in _DONE:
            ops.insert(0, graph[name])
            name = graph[name].inputs[0]
        found += [(name, ops)] if name in graph and graph[name].kind in MATMUL.kinds else []
    return found if len(found) == len(op.inputs) else []


def _sort(made: Sequence[_Made]) -> tuple[object, ...]:
    return tuple((one.kind, one.attrs.get("rope")) for _, ops in made for one in ops)


def _words(made: Sequence[_Made]) -> str:
    each = [" and ".join(_DONE[one.kind] for one in ops) or "as projected" for _, ops in made]
    return f"queries and keys are {each[0]}" if len({*each}) == 1 else f"queries are {each[0]} and keys {each[1]}"


def _numbers(theirs: Sequence[_Made], own: Sequence[_Made]) -> str:
    """By which numbers queries are rotated there, and not here."""
    there, here = (next(one.attrs["rope"] for one in made[0][1] if one.kind == "rope") for made in (theirs, own))
    apart = {name: (of, right) for name, of in asdict(there).items() if of != (right := getattr(here, name))}
    said = {name: map(str, pair) if name == "pairing" else told_apart(*pair) for name, pair in apart.items()}
    return ", ".join(
        "rope's {} is {} instead of {}".format(_ROPE.get(name, name), *pair) for name, pair in said.items()
    )


def _reading_these(op: Op, made: Sequence[_Made], words: str, context: Context) -> Iterator[Variant]:
    """The op reading values to which those ops are done, of other layers, with the weights of its own; not where that
    has none.
    """
    before, inputs = list[Op](), list[str]()
    for i, (name, ops) in enumerate(made):
        for j, one in enumerate(ops):
            weights = tuple(replace(w, name=f"blk.{layer_of(op.name)}.{local_name(w.name)}") for w in one.weights)
            if any(weight.name not in context.file.tensors for weight in weights):
                return
            new = replace(one, name=f"{op.name}.{i}.{j}", inputs=(name, *one.inputs[1:]), weights=weights)
            before.append(new)
            name = new.name
        inputs.append(name)
    if tuple(inputs) != op.inputs:
        yield Variant(replace(op, inputs=tuple(inputs)), words, before=tuple(before))
