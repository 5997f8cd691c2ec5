"""Rows of a table."""

import torch
from torch import Tensor

from tracediff.numerics.floors import UNIT, Noise
from tracediff.numerics.kinds.kind import Call, Kind, Made
from tracediff.numerics.kinds.matmul import rounding_of

# What is added to the largest value of a row before it is divided by, lest that be 0: a unit of float32, or Keras' 1e-7
# (keras/src/quantizers/quantizers.py, abs_max_quantize).
_ADDED = 2.0**-23


def embedding(rows: Tensor) -> Tensor:
    """The table's rows of the step's tokens, [T, n_embd]: picking them is reading the weight."""
    return rows


def _gathered(call: Call) -> Tensor:
    rows = call.weights.gather(call.op.weights[0], call.inputs[0].flatten().long())
    hold = rounding_of(call.arithmetic.stored, call.op.weights[0], call.weights)
    return call.function(hold(rows), **call.op.attrs)


def _noise(made: Made) -> Noise:
    """A dequantised value is a scale times an integer, less a minimum, in float32. One that an engine quantises by
    itself may lie on a boundary.
    """
    hard = made.stored + 2 * UNIT["f32"] * made.size.amax(-1, keepdim=True)
    hold = rounding_of(made.arithmetic.stored, made.op.weights[0], made.weights)
    if not hold.in_blocks:
        return Noise(torch.zeros_like(made.y), hard)
    rows = made.weights.gather(made.op.weights[0], made.inputs[0].flatten().long())
    size = rows.abs()
    scaled = _ADDED * size / size.amax(-1, keepdim=True).clamp(min=_ADDED)
    may_be = made.function(hold.flips(rows).abs() + scaled, **made.op.attrs)
    return Noise(torch.zeros_like(made.y), hard + may_be.reshape(made.y.shape).to(made.y.dtype))


KINDS = (Kind("embedding", embedding, ("tokens",), compute=_gathered, noise=_noise, scheme="embedding"),)
