"""Matmuls with a weight."""

import torch
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Kind, Made
from tracediff.numerics.kinds.matmul import noise_of_sums, sums_in, turns
from tracediff.numerics.roundings import q8_0, rounding_named

_OFFSET_BLOCK = {"TQ1_0": 256, "TQ2_0": 256}  # weights that share a scale; 16 is the least of all others
_SIGNED = ("F64", "F32", "F16", "BF16", "Q8_0")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, n_in] x [n_out, n_in] -> [T, n_out]."""
    y = x @ weight.T
    return y if bias is None else y + bias


def _by_rows(call: Call) -> Tensor:
    """A matmul block of rows by block of rows, so that a matrix is never whole in memory."""
    op, weights, arithmetic, energy = call.op, call.weights, call.arithmetic, call.energy
    hold = rounding_named(arithmetic.stored)
    dtype = sums_in(arithmetic, weights.dtype)
    bias = weights.load(op.weights[1], dtype) if len(op.weights) > 1 else None
    if bias is not None and not hold.in_blocks:  # nobody quantises these few
        bias = hold(bias)
    raw = call.inputs[0].flatten(1)
    x = call.rounded(raw, arithmetic.operands).to(dtype)
    # Sums of squares have no cancellation: bfloat16 gives them to 1%, many times faster than float64.
    squares = x.square().bfloat16() if energy else None
    parts, energies, turned, at = [], [], [], 0
    for rows in weights.slices(op.weights[0]):
        cut = slice(at, at + len(rows))
        turning = turns(rows, arithmetic.stored) if energy and hold.in_blocks else None
        file, rows = rows, hold(rows)
        if energy and hold.in_blocks:
            error, signal = energy.requantised
            energy.requantised = error + float((rows - file).square().sum()), signal + float(file.square().sum())
        part = call.function(x, rows.to(dtype), None if bias is None else bias[cut], **op.attrs)
        parts.append(part.to(weights.dtype))
        if squares is not None:
            energies.append(_energy(x, squares, rows, "F32" if hold.in_blocks else weights.type_of(op.weights[0])))
        if turning is not None:
            turned.append(x.abs() @ turning.to(dtype).T)
        at = cut.stop
    y = torch.cat(parts, 1)
    if arithmetic.operands == "q8_1":
        y += _q8_1_sums(raw) @ weights.minima(op.weights[0]).T
    if energy:
        energy.value = torch.cat(energies, 1).unflatten(1, op.axes[1:])
        energy.turned = torch.cat(turned, 1).unflatten(1, op.axes[1:]) if turned else None
        energy.product = None if bias is None else (y - bias).unflatten(1, op.axes[1:])
    return y.unflatten(1, op.axes[1:])


def _energy(x: Tensor, squares: Tensor, rows: Tensor, weight_type: str) -> Tensor:
    """`Energy.value` for these rows, [T, n_rows]; squares is x^2 in bfloat16."""
    if weight_type in _SIGNED:
        return (squares @ rows.bfloat16().square().T).to(x.dtype)
    block = _OFFSET_BLOCK.get(weight_type, 16)
    blocks = rows.float().unflatten(-1, (-1, block))  # to 1%: float32 halves the memory traffic
    offset = blocks.abs().amax(-1, keepdim=True)
    parts = blocks.add(offset).square_().add_(offset.square()).flatten(-2)
    # The offset's share is a sum of its own, as large as the other part's: 2/3 y^2 in the variance of floors.py.
    share = x.unflatten(-1, (-1, block)).sum(-1).float() @ offset.squeeze(-1).T
    return (squares @ parts.bfloat16().T).to(x.dtype) + 2 / 3 * share.square().to(x.dtype)


def _q8_1_sums(x: Tensor) -> Tensor:
    """What q8_1 adds per block: it multiplies a weight block's minimum by a sum that it keeps in float16.

    [T, n_in] -> [T, n_in / 32], the stored sum less the sum of the values (quantize_row_q8_1_ref).
    """
    quotients, d, _ = q8_0.grid(x)
    total = torch.round(quotients).sum(-1)
    return (total * d.squeeze(-1)).half().to(x.dtype) - total.to(x.dtype) * d.squeeze(-1).half().to(x.dtype)


def columns(op: Op, at: Tensor, weights: Weights) -> Tensor:
    """Columns `at` [n] of a linear op's matrix, [n_out, n]."""
    return torch.cat([rows[:, at] for rows in weights.slices(op.weights[0])])


def _noise(made: Made) -> Noise:
    return noise_of_sums(made, made.inputs[0][0].numel())


KINDS = (Kind("linear", linear, ("x",), compute=_by_rows, noise=_noise, scheme="linear"),)
