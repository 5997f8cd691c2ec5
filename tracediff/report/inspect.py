"""Tables of what a model asks for and of what a trace holds."""

from typing import Any

from rich.table import Table

from tracediff.trace.reader import Trace


def model_table(graph: Any) -> Table:
    """The ops an engine should write, in execution order, with shapes and the weights they multiply with."""
    h = graph.hparams
    table = Table(
        "op", "shape", "kind", "weights", box=None, padding=(0, 2, 0, 0),
        title=f"{h.arch}: {h.n_layer} layers, {h.n_head}/{h.n_head_kv} heads of {h.head_dim}. "
        "T: tokens, S: positions visible.",
        title_justify="left",
    )  # fmt: skip
    for op in graph:
        table.add_row(op.name, ", ".join(map(str, op.axes)), op.kind, ", ".join(w.name for w in op.weights))
    return table


def trace_table(trace: Trace) -> Table:
    """The records of a trace with their statistics."""
    state = f"cut off: {trace.cut}" if trace.cut else "whole"
    table = Table(
        "step", "op", "dtype", "shape", "min", "max", "mean", "rms", "nan", "inf", box=None, padding=(0, 2, 0, 0),
        title=f"{trace.header.engine}, {trace.header.model or 'model not named'}, {len(trace.tokens)} tokens, {state}",
        title_justify="left",
    )  # fmt: skip
    from tracediff.pipeline import record_statistics

    for (step, name), record in trace.ops.items():
        s = record_statistics(record, trace)
        numbers = ["-" if value is None else f"{value:.4g}" for value in (s.min, s.max, s.mean, s.rms)]
        shape = ", ".join(map(str, record.shape))
        table.add_row(str(step), name, record.dtype or "-", shape, *numbers, str(s.nan), str(s.inf))
    return table
