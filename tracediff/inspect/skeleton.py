"""What an engine is to write for a model: comments for its source, or a whole trace that lacks only the values."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec

from tracediff.inspect.formulas import formula
from tracediff.model.graph import Graph, Op
from tracediff.names import layer_of, local_name
from tracediff.trace.format import VERSION, End, Header, OpRecord, Step, Values, Weight, encode


def comments(graph: Graph) -> Iterator[str]:
    """One line of source per op, in execution order; layers that are alike once, as blk.N."""
    yield f"// {graph.hparams.arch}: once, each norm weight as held in memory; then of each forward pass, in this order"
    yield "// (T: its tokens, S: positions visible so far):"
    for layers, ops in _alike(graph):
        if layers and len(layers) > 1:
            yield f"// for N from {layers[0]} to {layers[-1]}:"
        for op in ops:
            name, weights = op.name, [weight.name for weight in op.weights]
            if layers and len(layers) > 1:
                name, *weights = (text.replace(f"blk.{layers[0]}.", "blk.N.", 1) for text in (name, *weights))
            shape = f"[{', '.join(map(str, op.axes))}]"
            yield f"// {name:<24} {shape:<16} {formula(op, graph)}{'; ' if weights else ''}{', '.join(weights)}"


def trace(graph: Graph, model: str, n_tokens: int) -> Iterator[str]:
    """The lines of a trace of one step of `n_tokens`, all in float32: write the values to NAME.bin in this order.

    Token ids are zeros, to be filled in. The keys `value` and `weights` of an op are for people.
    """
    yield _line(Header(VERSION, "NAME OF YOUR ENGINE", graph.hparams.arch, model, "NAME.bin"))
    offset, count = 0, 1
    for weight in {weight.name: weight for weight in graph.norm_weights()}.values():
        record = Weight(weight=weight.name, shape=weight.shape, dtype="f32", offset=offset)
        yield _line(record)
        offset, count = offset + record.nbytes, count + 1
    yield _line(Step(0, (0,) * n_tokens, tuple(range(n_tokens))))
    for op in graph.written():
        placed = OpRecord(step=0, op=op.name, shape=op.shape(n_tokens), dtype="f32", offset=offset)
        yield _line(placed, value=formula(op, graph), weights=[weight.name for weight in op.weights])
        offset, count = offset + placed.nbytes, count + 1
    yield _line(End(count + 1))


def _alike(graph: Graph) -> Iterator[tuple[list[int], list[Op]]]:
    """Runs of layers that differ by their number alone, and the ops of the first; no layers for what is outside."""
    run: list[int] = []
    first: list[Op] = []
    for layer, ops in ((layer, [*ops]) for layer, ops in groupby(graph.written(), lambda op: layer_of(op.name))):
        if layer is not None and run and _form(ops) == _form(first):
            run.append(layer)
            continue
        if first:
            yield run, first
        run, first = ([] if layer is None else [layer]), ops
    yield run, first


def _form(ops: Iterable[Op]) -> list[tuple[object, ...]]:
    return [(local_name(op.name), op.axes, [local_name(weight.name) for weight in op.weights]) for op in ops]


def _line(record: Header | Step | Values | End, **more: Any) -> str:
    return encode(msgspec.to_builtins(record) | more).decode()
