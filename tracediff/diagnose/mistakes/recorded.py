"""What is recorded as a layer's output is another value of the residual stream, in every layer: the engine is right."""

from collections.abc import Mapping
from dataclasses import replace

from tracediff.diagnose.mistakes.mistake import Area, Context, Variant, Variants, Where
from tracediff.model.graph import SOURCES, Graph, Op
from tracediff.names import layer_of

AREA = Area()
_AGAIN = ".again"  # ends the name of an op that is made once more, of another value
_WHERE = Where(("add",), in_layer=True)


@AREA.mistake(
    "recorded_late", "a layer's record holds what the layer before makes",
    "which of the hidden states is whose: transformers' `hidden_states` begin with the embedding", _WHERE,
)  # fmt: skip
def _late(op: Op, context: Context) -> Variants:
    graph, before = context.graph, _before(op, context.graph)
    if before is None:
        return
    stream = _stream(graph, before)
    if stream and (made := _again(graph, before, {stream: before.name})):
        *others, last = made
        words = f"it holds what the layer before makes of {before.name}: each layer's output is recorded one layer late"
        name = "it holds what the layer before makes: each layer's output is recorded one layer late"
        yield Variant(replace(last, name=op.name), words, name=name, before=(*others,))


@AREA.mistake(
    "recorded_early", "a layer's record holds the stream before its feed-forward is added",
    "where a layer's output is recorded: after the second sum, not after attention's", _WHERE,
)  # fmt: skip
def _early(op: Op, context: Context) -> Variants:
    graph, before = context.graph, _before(op, context.graph)
    if before is None:
        return
    there, own = (_sum_before(graph, of) for of in (before, op))
    if there is None or own is None:
        return
    fed = _again(graph, before, {there.name: before.name})
    made = _again(graph, own, {before.name: before.name + _AGAIN})
    if fed and made:
        *others, last = made
        words = "it holds the stream before the feed-forward is added: each layer's output is recorded too early"
        yield Variant(replace(last, name=op.name), words, before=(*fed, *others))


def _before(op: Op, graph: Graph) -> Op | None:
    """The output of the layer before, of the output of a layer; None of any other op."""
    layer = layer_of(op.name)
    return _output(graph, layer - 1) if layer and op == _output(graph, layer) else None


def _output(graph: Graph, layer: int) -> Op | None:
    """The sum that is all that later layers, or what is after them, read of a layer."""
    own = graph.layer(layer)
    read = [op for op in own if any(layer_of(reader.name) != layer for reader, _ in graph.readers(op.name))]
    return read[0] if len(read) == 1 and read[0].kind == "add" and len(read[0].inputs) == 2 else None


def _stream(graph: Graph, output: Op) -> str | None:
    """What a layer reads of what is before it."""
    names = {name for op in graph.layer(layer_of(output.name) or 0) for name in op.inputs}
    outside = {
        name for name in names - {*SOURCES} if layer_of(name) != layer_of(output.name) and "T" in graph[name].axes
    }
    return next(iter(outside)) if len(outside) == 1 else None


def _sum_before(graph: Graph, output: Op) -> Op | None:
    """The sum that the feed-forward of this layer reads, and is added to."""
    read = (graph[name] for name in output.inputs if name in graph)
    own = (op for op in read if op.kind == "add" and layer_of(op.name) == layer_of(output.name))
    return next((op for op in own if len(graph.readers(op.name)) > 1), None)


def _again(graph: Graph, end: Op, others: Mapping[str, str]) -> list[Op]:
    """The ops of a layer that make `end`, made once more where these values are others, `end` the last; none where one
    of them hands a state on, which goes by its name.
    """
    needed, stack, places = {end.name}, [end], graph.places()
    while stack:
        for name in stack.pop().inputs:
            if name not in others and name not in needed and name in graph and layer_of(name) == layer_of(end.name):
                needed.add(name)
                stack.append(graph[name])
    ops = sorted((graph[name] for name in needed), key=lambda op: places[op.name])
    if any(op.kind == "state" for op in ops):
        return []
    named = {name: name + _AGAIN for name in needed} | dict(others)
    return [replace(op, name=op.name + _AGAIN, inputs=tuple(named.get(name, name) for name in op.inputs)) for op in ops]
