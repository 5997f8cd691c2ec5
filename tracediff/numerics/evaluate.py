"""One op of a graph, computed, and how far an honest engine may be off: look-ups in the table of kinds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.names import local_name
from tracediff.numerics.arithmetic import EXACT, Arithmetic, Scheme, in_words
from tracediff.numerics.floors import UNIT, Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.kind import Call, Energy, Made, Rounded
from tracediff.numerics.kinds.matmul import sums_in
from tracediff.numerics.roundings import rounding_named


def rounding(x: Tensor, name: str) -> Tensor:
    """X as `name` keeps it."""
    return rounding_named(name)(x)


def is_covered(op: Op) -> bool:
    """Whether there is a kind that says what the op computes: of a lifted graph some may have none."""
    return op.kind in KINDS


def arithmetic_of(op: Op, scheme: Scheme, weights: Weights) -> Arithmetic:
    """What the scheme rounds in this op, which depends on the type of its weight."""
    entry = KINDS[op.kind].scheme if is_covered(op) else None
    if entry == "state":
        entry = treated_as(op)
    if not op.weights and entry in ("rms_norm", "norm", "vectors"):
        added = scheme.of("residual") if op.kind == "add" and not any(op.views) else EXACT
        return added if added == EXACT or rows_fit(op, added, 0) else EXACT  # a hypothesis may add other rows
    if not op.weights and entry == "linear":  # of two values: as in attention, where one comes from a cache
        if not any(op.past):
            return scheme.of_values()
        entry = "scores"
    found = scheme.of(entry, weights.type_of(op.weights[0]) if op.weights else "F32") if entry else EXACT
    if entry == "softmax" and not op.weights:  # no sinks
        found = replace(found, stored=EXACT.stored)
    if len(op.weights) > 1 or (found.biases, found.before_bias) == (EXACT.biases, EXACT.before_bias):
        return found
    return replace(found, biases=EXACT.biases, before_bias=EXACT.before_bias)


def in_words_of(ops: Iterable[Op], scheme: Scheme, weights: Weights) -> str:
    """What the scheme rounds in these ops."""
    return in_words((treated_as(op), arithmetic_of(op, scheme, weights)) for op in ops)


def treated_as(op: Op) -> str:
    """The kind that a scheme takes the op for. Of states the columns that a convolution reads of the steps before are
    one of their own: ggml's graphs call them conv.
    """
    return "columns" if op.kind == "state" and local_name(op.name).startswith("conv") else op.kind


def rows_fit(op: Op, arithmetic: Arithmetic, head_dim: int) -> bool:
    """Whether the rows that the arithmetic rounds in blocks are multiples of them."""
    columns = op.weights[0].shape[-1] if op.weights else op.axes[-1] if op.kind == "add" else head_dim
    roundings = [rounding_named(name) for name in (arithmetic.operands, arithmetic.stored)]
    if not isinstance(columns, int):  # keys, which are some more in each step
        return all(rounding.block in (0, 1) for rounding in roundings)
    return all(rounding.divides(columns) for rounding in roundings)


def evaluate(
    op: Op,
    inputs: Sequence[Tensor],
    weights: Weights,
    arithmetic: Arithmetic = EXACT,
    energy: Energy | None = None,
    rounded: Rounded = rounding,
) -> Tensor:
    """The op's output, in the dtype and on the device of `weights`; the shape is `op.shape(...)`.

    `inputs` are shaped as the graph says (an input that the op reads over all steps has S rows); integer
    inputs (tokens, positions) stay integers. `rounded` rounds activations.
    """
    return evaluated(call_of(op, inputs, weights, arithmetic, energy, rounded))


def call_of(
    op: Op,
    inputs: Sequence[Tensor],
    weights: Weights,
    arithmetic: Arithmetic = EXACT,
    energy: Energy | None = None,
    rounded: Rounded = rounding,
) -> Call:
    """The op about to be computed, for `evaluated`; the arguments are those of `evaluate`."""
    return Call(op, op.function or KINDS[op.kind].function, inputs, weights, arithmetic, energy, rounded)


def evaluated(call: Call) -> Tensor:
    """The output of one call."""
    return _stored(call, (call.op.rework or KINDS[call.op.kind]).compute(call))


def computed(op: Op, call: Call, inputs: Sequence[Tensor] | None = None) -> Tensor:
    """What another op comes to in the place of the one that is called, of its inputs or of these."""
    inputs = call.inputs if inputs is None else inputs
    return evaluate(op, inputs, call.weights, call.arithmetic, call.energy, call.rounded)


def evaluate_together(calls: Sequence[Call]) -> list[Tensor]:
    """The outputs of several calls of one op; what holds the weight alike reads it once, where the kind knows how."""
    op = calls[0].op
    together = KINDS[op.kind].together
    if together is None or op.function or op.rework or len(calls) == 1:
        return [evaluated(call) for call in calls]
    alike: dict[object, list[int]] = {}
    for i, call in enumerate(calls):
        held = call.arithmetic.stored, call.arithmetic.biases, call.arithmetic.before_bias, call.arithmetic.products
        of = sums_in(call.arithmetic, call.weights.dtype), *held, call.weights.source(op.weights)
        alike.setdefault(of, []).append(i)
    made: dict[int, Tensor] = {}
    for places in alike.values():
        places.sort(key=lambda i: calls[i].energy is None)
        made |= zip(places, together([calls[i] for i in places]), strict=True)
    return [_stored(call, made[i]) for i, call in enumerate(calls)]


def _stored(call: Call, y: Tensor) -> Tensor:
    return call.rounded(_shaped(y, call.op), call.op.stored)


def _shaped(y: Tensor, op: Op) -> Tensor:
    """As the graph says, where its elements are the same in another shape. One axis may follow the step."""
    fixed = [axis if isinstance(axis, int) else -1 for axis in op.axes]
    fits = y.ndim == len(fixed) and all(axis in (-1, size) for axis, size in zip(fixed, y.shape, strict=True))
    return y if fits or fixed.count(-1) > 1 else y.reshape(fixed)


def noise(
    op: Op, inputs: Sequence[Tensor], y: Tensor, weights: Weights, energy: Energy, arithmetic: Arithmetic, storage: str
) -> Noise:
    """The noise of computing `op` once in float32 (float64 where `storage` is) and storing it as `storage`.

    `inputs` and `y` are float64; `energy` is what `evaluate` told of a matmul, and is used up.
    """
    if op.rework:
        return op.rework.noise(Made(op, KINDS[op.kind].function, inputs, y, weights, energy, arithmetic, storage))
    kind, of = KINDS[op.kind], y
    like = energy.value if energy.value is not None else next((x for x in inputs if x.numel() == y.numel()), y)
    if y.shape != like.shape:  # the shape in which the kind computes, not the graph's
        of = y.reshape(like.shape)
    found = kind.noise_of(Made(op, op.function or kind.function, inputs, of, weights, energy, arithmetic, storage))
    found = found if y.shape == like.shape else found.reshaped(y.shape)
    if storage == "f64" and (others := _as_written(op.attrs)):
        apart = evaluate(op.with_attrs(**others), inputs, weights, arithmetic).sub_(y).abs_()
        found = replace(found, hard=found.hard + apart.nan_to_num_(0.0))
    return found


def _as_written(attrs: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that a file holds in float32 where they lie half a unit of it further on: an engine in float64 may have
    the one that was written there, 1e-5 or 0.7. None of those that float32 holds, as 0.125.
    """
    numbers = ((name, value) for name, value in attrs.items() if isinstance(value, float) and math.isfinite(value))
    return {name: value * (1 + UNIT["f32"]) for name, value in numbers if float(str(np.float32(value))) != value}


def noise_of(op: Op, made: Made, inputs: Sequence[Tensor] | None = None, y: Tensor | None = None) -> Noise:
    """The noise of another op in the place of the one that was made, of its inputs and output or of these."""
    inputs, y = made.inputs if inputs is None else inputs, made.y if y is None else y
    return noise(op, inputs, y, made.weights, made.energy, made.arithmetic, made.storage)
