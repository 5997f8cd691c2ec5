"""Matmuls with a weight, and of values with one another."""

from dataclasses import replace

import torch
from torch import Tensor

from tracediff.model.graph import Op, Weight
from tracediff.model.weights import Weights
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Energy, Kind, Made
from tracediff.numerics.kinds.matmul import noise_of_sums, sums_in, turns
from tracediff.numerics.roundings import q8_0, rounding_named

_OFFSET_BLOCK = {"TQ1_0": 256, "TQ2_0": 256}  # weights that share a scale; 16 is the least of all others
_SIGNED = ("F64", "F32", "F16", "BF16", "Q8_0")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, n_in] x [n_out, n_in] -> [T, n_out]."""
    y = x @ weight.T
    return y if bias is None else y + bias


def mul_mat(a: Tensor, b: Tensor) -> Tensor:
    """[..., n, k] x [..., r, k] -> [..., r, n]: rows of b times rows of a, which repeats for groups of b's batches."""
    a = a.reshape((1,) * (b.ndim - a.ndim) + tuple(a.shape))
    for axis in range(b.ndim - 2):
        a = a.repeat_interleave(b.shape[axis] // a.shape[axis], axis)
    return b @ a.mT


def product(call: Call, x: Tensor, weight: Weight, bias: Tensor | None) -> tuple[Tensor, Energy]:
    """[n, n_in] times a matrix, and bias, [n, n_out]: by blocks of rows, so that it is never whole in memory.

    The energy is empty where the call does not ask for one.
    """
    weights, arithmetic = call.weights, call.arithmetic
    hold = rounding_named(arithmetic.stored)
    dtype = sums_in(arithmetic, weights.dtype)
    if bias is not None and not hold.in_blocks:  # nobody quantises these few
        bias = hold(bias)
    raw, x = x, call.rounded(x, arithmetic.operands).to(dtype)
    # Sums of squares have no cancellation: bfloat16 gives them to 1%, many times faster than float64.
    squares = x.square().bfloat16() if call.energy else None
    parts, energies, turned, at = [], [], [], 0
    for rows in weights.slices(weight):
        cut = slice(at, at + len(rows))
        turning = turns(rows, arithmetic.stored) if call.energy and hold.in_blocks else None
        file, rows = rows, hold(rows)
        if call.energy and hold.in_blocks:
            error, signal = call.energy.requantised
            more = float((rows - file).square().sum()), float(file.square().sum())
            call.energy.requantised = error + more[0], signal + more[1]
        part = call.function(x, rows.to(dtype), None if bias is None else bias[cut], **call.op.attrs)
        parts.append(part.to(weights.dtype))
        if squares is not None:
            energies.append(_energy(x, squares, rows, "F32" if hold.in_blocks else weights.type_of(weight)))
        if turning is not None:
            turned.append(x.abs() @ turning.to(dtype).T)
        at = cut.stop
    y = torch.cat(parts, 1)
    if arithmetic.operands == "q8_1":
        y += _q8_1_sums(raw) @ weights.minima(weight).T
    if not call.energy:
        return y, Energy()
    energy = Energy(torch.cat(energies, 1), turned=torch.cat(turned, 1) if turned else None)
    energy.product = None if bias is None else y - bias
    return y, energy


def _linear(call: Call) -> Tensor:
    op = call.op
    dtype = sums_in(call.arithmetic, call.weights.dtype)
    bias = call.weights.load(op.weights[1], dtype) if len(op.weights) > 1 else None
    y, energy = product(call, call.inputs[0].flatten(1), op.weights[0], bias)
    if call.energy:
        call.energy.take(energy, lambda x: x.unflatten(1, op.axes[1:]))
    return y.unflatten(1, op.axes[1:])


def _mul_mat(call: Call) -> Tensor:
    return _by_matrices(call) if call.op.weights else _of_values(call)


def _by_matrices(call: Call) -> Tensor:
    """Of a weight of several matrices, one for each batch of x or for a group of these."""
    x, whole = call.inputs[0], call.op.weights[0]
    batches = x.flatten(0, -3) if x.ndim > 2 else x[None]
    matrices = [whole] if len(whole.shape) == 2 else [matrix(whole, i) for i in range(whole.shape[0])]
    one = replace(call, function=linear) if call.op.function is None else call
    made = [product(one, x, matrices[i * len(matrices) // len(batches)], None) for i, x in enumerate(batches)]
    shape = (*x.shape[:-1], made[0][0].shape[-1])
    if call.energy:
        call.energy.take(Energy.joined([energy for _, energy in made]), lambda x: x.reshape(shape))
    return torch.stack([y for y, _ in made]).reshape(shape)


def _of_values(call: Call) -> Tensor:
    """The first operand as the cache holds it, the second rounded as its type wants."""
    a, b = call.inputs
    x, stored = call.rounded(b, call.arithmetic.operands), call.rounded(a, call.arithmetic.stored)
    if call.energy:
        call.energy.value = mul_mat(stored.square(), x.square())
        turned = turns(b, call.arithmetic.operands), turns(a, call.arithmetic.stored)
        if any(bool(t.any()) for t in turned):
            call.energy.turned = mul_mat(stored.abs(), turned[0]) + mul_mat(turned[1], x.abs())
    dtype = sums_in(call.arithmetic, x.dtype)
    return call.function(stored.to(dtype), x.to(dtype)).to(b.dtype)


def matrix(weight: Weight, i: int) -> Weight:
    """One matrix of a weight of several, [n, n_out, n_in]."""
    return replace(weight, shape=weight.shape[1:], first=(weight.first + i) * weight.shape[1])


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


def _noise_of_rows(made: Made) -> Noise:
    return noise_of_sums(made, made.inputs[-1].shape[-1])


KINDS = (
    Kind("linear", linear, ("x",), compute=_linear, noise=_noise, scheme="linear"),
    Kind("mul_mat", mul_mat, ("a", "b"), compute=_mul_mat, noise=_noise_of_rows, scheme="linear"),
)
