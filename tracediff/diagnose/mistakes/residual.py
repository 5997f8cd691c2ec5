"""Mistakes in sums of values: of the residual stream, and of what is added to a layer's output."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from tracediff.diagnose.mistakes.mistake import (
    NORM,
    Area,
    Context,
    Variant,
    Variants,
    Where,
    computing,
    first_alone,
    second_alone,
)
from tracediff.model.graph import Graph, Op
from tracediff.names import local_name

AREA = Area()
OVERWRITTEN = "residual_overwritten"
SUM = Where(("add",))


def _is_residual(op: Op, graph: Graph) -> bool:
    """Whether one of two terms is the stream: others read it as well."""
    return len(op.inputs) == 2 and not op.views and any(len(graph.readers(name)) > 1 for name in op.inputs)


def _terms(op: Op, graph: Graph) -> tuple[str, str]:
    """What the two terms are in every layer: the stream is what others read as well."""
    first, second = (len(graph.readers(name)) > 1 for name in op.inputs)
    if first == second:
        return "the first term", "the second term"
    return ("the residual stream", "the new term") if first else ("the new term", "the residual stream")


@AREA.mistake("residual_dropped", "the residual is not added", "the residual connection", SUM)
def _no_residual(op: Op, context: Context) -> Variants:
    if _is_residual(op, context.graph):
        first, second = (f"{term} is not added" for term in _terms(op, context.graph))
        yield Variant(computing(op, first_alone), f"{op.inputs[1]} is not added", name=second)
        yield Variant(computing(op, second_alone), f"{op.inputs[0]} is not added", name=first)


@AREA.mistake(
    "term_dropped", "a term of a sum is left out: a bias, a shared expert",
    "what is added here, and whether it is loaded", SUM,
)  # fmt: skip
def _no_term(op: Op, context: Context) -> Variants:
    if _is_residual(op, context.graph):
        return
    terms = [op.part_read(i) + name for i, name in enumerate(op.inputs)] + [weight.name for weight in op.weights]
    yield computing(op, first_alone), f"{terms[-1]} is not added"
    if len(op.inputs) == 2:
        yield computing(op, second_alone), f"{terms[0]} is not added"


@AREA.mistake("residual_twice", "the residual is added twice", "a residual both fused and added after", SUM)
def _twice(op: Op, context: Context) -> Variants:
    if len(op.inputs) == 2:
        first, second = (f"{term} is added twice" for term in _terms(op, context.graph))
        yield Variant(computing(op, lambda a, b: a + 2 * b), f"{op.inputs[1]} is added twice", name=second)
        yield Variant(computing(op, lambda a, b: 2 * a + b), f"{op.inputs[0]} is added twice", name=first)


@AREA.mistake("residual_normed", "the residual takes the normed value", "which buffer the residual reads", SUM)
def _normed(op: Op, context: Context) -> Variants:
    if len(op.inputs) < 2 or op.views:
        return
    stream = op.inputs[1]
    norm = next((reader for reader, _ in context.graph.readers(stream) if reader.kind in NORM.kinds), None)
    if norm:
        words = f"{norm.name} is added where {stream} belongs"
        name = "the normed value is added where the residual stream belongs"
        yield Variant(replace(op, inputs=(op.inputs[0], norm.name)), words, name=name)


@AREA.mistake(
    OVERWRITTEN, "the norm that reads the residual stream writes over it",
    "whether the norm works in place, as on a cast that makes no copy, and when the sum is recorded", SUM,
)  # fmt: skip
def _overwritten(op: Op, context: Context) -> Variants:
    for norm, at in context.graph.readers(op.name):
        if norm.kind in NORM.kinds and norm.seen[at] is None:
            total = replace(op, name=f"{op.name}.sum")
            words = f"{local_name(norm.name)} has written over it: it holds what the norm made"
            name = "the norm that reads it has written over it"
            yield Variant(replace(norm, name=op.name, inputs=(total.name,)), words, name=name, before=(total,))


@AREA.mistake(
    "factor_of_another_term", "a factor multiplies another term of a sum, or all of it",
    "what the residual multiplier multiplies", SUM,
)  # fmt: skip
def _other_scaled(op: Op, context: Context) -> Variants:
    if len(op.inputs) != 2 or op.views:
        return
    for position, name in enumerate(op.inputs):
        scaled = context.graph.ops.get(name)
        if scaled is None or scaled.kind != "scale" or scaled.views:
            continue
        inputs = tuple(scaled.inputs[0] if i == position else other for i, other in enumerate(op.inputs))
        factor, read = scaled.attrs["scale"], replace(op, inputs=inputs)
        factors = (1.0, factor) if position == 0 else (factor, 1.0)
        own, other = _terms(op, context.graph)[:: 1 if position == 0 else -1]
        for by, how in ((factors, "instead"), ((factor, factor), "as well")):
            words = f"the factor {factor:g} of {inputs[position]} multiplies {inputs[1 - position]} {how}"
            name = f"the factor {factor:g} of {own} multiplies {other} {how}"
            yield Variant(computing(read, partial(_weighted, by=by)), words, name=name)


def _weighted(a: Tensor, b: Tensor, *, by: tuple[float, float]) -> Tensor:
    return by[0] * a + by[1] * b
