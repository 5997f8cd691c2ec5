"""A trace held to the names, shapes and weights of a model; without one to the names that tracediff knows."""

import math
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from tracediff.english import few
from tracediff.findings.words import by_name
from tracediff.names import NAMES, layer_of, local_name
from tracediff.result import Remark
from tracediff.trace.format import OpRecord, same_shape
from tracediff.trace.reader import Trace

if TYPE_CHECKING:
    from tracediff.model.graph import Graph

_INSPECT = "`tracediff inspect MODEL --skeleton` lists names, shapes and order."


def names(trace: Trace) -> Iterator[Remark]:
    """Without a model only the local part of a name is known."""
    for step, op in trace.ops:
        local = local_name(op)
        if local not in NAMES:
            close = get_close_matches(local, NAMES, 1)
            then = f"Did you mean {op.removesuffix(local) + close[0]}?" if close else _INSPECT
            yield Remark(trace.lines[step, op], "warning", f"{op}: no name that tracediff knows", then)


def against_model(trace: Trace, graphs: "Sequence[Graph]") -> Iterator[Remark]:
    """What is no trace of this model, and what of it was never written. Of several forms of the model each step is held
    to the one that it fits.
    """
    h = graphs[0].hparams
    if trace.header.arch and trace.header.arch != h.arch:
        what = f"the trace is of architecture {trace.header.arch!r}, the model of {h.arch!r}"
        yield Remark(1, "violation", what, "Give the GGUF file that the engine ran.")
    for number, fed in trace.steps.items():
        outside = [token for token in fed.tokens if token >= h.n_vocab]
        if outside:
            what = f"token id {outside[0]} is outside the vocabulary of {h.n_vocab}"
            yield Remark(trace.lines[number], "violation", what, "Were the ids made by another tokeniser?")
    wrong = [_of_steps(trace, graph) for graph in graphs]
    for step in trace.steps:
        yield from min((of_steps[step] for of_steps in wrong), key=len)
    graph, _ = min(zip(graphs, wrong, strict=True), key=lambda pair: sum(map(len, pair[1].values())))
    yield from _weights_against_graph(trace, graph)
    yield from _never_written(trace, graph)


def _of_steps(trace: Trace, graph: "Graph") -> dict[int, list[Remark]]:
    """What is wrong with the names and shapes of each step's records."""
    found: dict[int, list[Remark]] = {step: [] for step in trace.steps}
    for (step, op), record in trace.ops.items():
        found[step] += _against_graph(trace, step, op, record, graph)
    return found


def _weights_against_graph(trace: Trace, graph: "Graph") -> Iterator[Remark]:
    shapes = {weight.name: weight.shape for op in graph for weight in op.weights}
    for name, weight in trace.weights.items():
        if name not in shapes:
            close = get_close_matches(name, shapes, 1)
            then = f"Did you mean {close[0]}?" if close else "Name the tensors as the GGUF file does."
            yield Remark(trace.lines[name], "warning", f"{name}: no weight that this model reads", then)
        elif weight.size != math.prod(shapes[name]):
            what = f"{name}: shape {list(weight.shape)}; the file's is {list(shapes[name])}"
            yield Remark(trace.lines[name], "violation", what, "Record the tensor of that name.")


def _against_graph(trace: Trace, step: int, op: str, record: OpRecord, graph: "Graph") -> Iterator[Remark]:
    line = trace.lines[step, op]
    if op not in graph:
        close = get_close_matches(op, graph.ops, 1)
        then = f"Did you mean {close[0]}?" if close else _INSPECT
        yield Remark(line, "violation", f"{op}: no op of this model", then)
        return
    n = len(trace.steps[step].tokens)
    past = trace.n_before(step)
    expected, found = graph[op].shape(n, past), record.whole_shape(n)
    if not same_shape(found, expected, may_be_flat=record.token_axis == 0):
        what = f"{op}: shape {list(record.shape)}; this model's is {list(expected)} for {n} tokens"
        yield Remark(line, "violation", what, _reshaped(record, expected, graph, n, past))


def _reshaped(record: OpRecord, expected: tuple[int, ...], graph: "Graph", n: int, past: int) -> str:
    """What the shape may mean instead."""
    axis = record.token_axis
    held = record.shape[axis] if len(record.shape) > axis else 0
    if record.rows is None and 0 < held < n and (*expected[:axis], held, *expected[axis + 1 :]) == record.shape:
        return f'If it holds {held} of the {n} tokens, say which: "rows":[{n - 1}] is the last.'
    if sorted(record.shape) == sorted(expected):
        return 'Write this shape; for data in another order add "strides" in elements.'
    alike = [op.name for op in graph if layer_of(op.name) == layer_of(record.op) and op.shape(n, past) == record.shape]
    return f"That is the shape of {', '.join(alike[:4])}. {_INSPECT}" if alike else _INSPECT


def _never_written(trace: Trace, graph: "Graph") -> Iterator[Remark]:
    """Warnings: any subset of the ops will do, and the location is as close as they are."""
    written = {op for _, op in trace.ops}
    scores = {op.removesuffix("_scaled") for op in written if op.endswith(("attn_scores", "attn_scores_scaled"))}
    written |= scores | {f"{op}_scaled" for op in scores}  # one of the two will do
    missing = [op.name for op in graph.written() if op.name not in written]
    last = max(trace.lines.values())
    if missing:
        n_ops = len(graph.written())
        what = f"{len(missing)} of the model's {n_ops} ops were never written: {few(by_name(missing))}"
        yield Remark(last, "warning", what, "None is required; each that is there makes the location closer.")
    norms = dict.fromkeys(weight.name for weight in graph.norm_weights())
    absent = [name for name in norms if name not in trace.weights]
    if absent:
        what = f"{len(absent)} of {len(norms)} norm weights were never written: {few(absent)}"
        yield Remark(last, "warning", what, "Write them as the engine holds them, once: a wrong one explains much.")
