"""Mistakes in the residual stream."""

from dataclasses import replace

from tracediff.diagnose.mistakes.mistake import NORM, Area, Context, Variants, Where, computing
from tracediff.model.graph import Op

AREA = Area()
RESIDUAL = Where(("add",))


@AREA.mistake(
    "residual_dropped", "the residual is not added", "the residual connection",
    RESIDUAL,
)  # fmt: skip
def _no_residual(op: Op, _: Context) -> Variants:
    yield computing(op, lambda a, b: a), f"{op.inputs[1]} is not added"
    yield computing(op, lambda a, b: b), f"{op.inputs[0]} is not added"


@AREA.mistake(
    "residual_twice", "the residual is added twice", "a residual both fused and added after",
    RESIDUAL,
)  # fmt: skip
def _twice(op: Op, _: Context) -> Variants:
    yield computing(op, lambda a, b: a + 2 * b), f"{op.inputs[1]} is added twice"
    yield computing(op, lambda a, b: 2 * a + b), f"{op.inputs[0]} is added twice"


@AREA.mistake(
    "residual_normed", "the residual takes the normed value", "which buffer the residual reads",
    RESIDUAL,
)  # fmt: skip
def _normed(op: Op, context: Context) -> Variants:
    stream = op.inputs[1]
    norm = next((reader for reader, _ in context.graph.readers(stream) if reader.kind in NORM.kinds), None)
    if norm:
        yield replace(op, inputs=(op.inputs[0], norm.name)), f"{norm.name} is added where {stream} belongs"
