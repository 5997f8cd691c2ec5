"""Matmuls with a weight, and of values with one another."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from tracediff.model.graph import Op, Weight
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.floats import Rounding
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Energy, Kind, Made
from tracediff.numerics.kinds.matmul import noise_of_sums, rounding_of, sums_in, turns
from tracediff.numerics.roundings import q8_0, rounding_named

_OFFSET_BLOCK = {"TQ1_0": 256, "TQ2_0": 256}  # weights that share a scale; 16 is the least of all others
_TINY = 1e-15  # products whose squares may be no number of float32
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


def of_latent(x: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
    """[T, k] x [H, n, k], or of transposed matrices [H, k, n], -> [T, H, n]: what each head makes of one latent."""
    return torch.einsum("tk,hkn->thn" if transposed else "tk,hnk->thn", x.to(weight.dtype), weight)


def product(call: Call, x: Tensor, weight: Weight, bias: Tensor | None) -> tuple[Tensor, Energy]:
    """[n, n_in] times a matrix, and bias, [n, n_out]; the energy is empty where the call does not ask for one."""
    return products([call], [x], weight, bias)[0]


def products(
    calls: Sequence[Call], xs: Sequence[Tensor], weight: Weight, bias: Tensor | None
) -> list[tuple[Tensor, Energy]]:
    """Of several calls that hold the matrix alike: by blocks of its rows, so that it is never whole in memory, and
    each block is read once for all. Those that ask for their energy come first.
    """
    first, lengths = calls[0], [len(x) for x in xs]
    asking_lengths = [n for call, n in zip(calls, lengths, strict=True) if call.energy]
    weights, arithmetic = first.weights, first.arithmetic
    hold = rounding_of(arithmetic.stored, weight, weights)
    dtype = sums_in(arithmetic, weights.dtype)
    if bias is not None:
        bias = rounding_named(arithmetic.biases)(bias)
    within, after = (bias, None) if arithmetic.before_bias == "f64" else (None, bias)
    rounded = [call.rounded(x, call.arithmetic.operands).to(dtype) for call, x in zip(calls, xs, strict=True)]
    x = torch.cat(rounded) if len(rounded) > 1 else rounded[0]
    asking = x[: sum(asking_lengths)]
    # Sums of squares have no cancellation: float32 is more than enough, and twice as fast as float64.
    squares, sums = asking.square().float(), _sums(asking, _offset_block(hold, weights.type_of(weight), x.shape[-1]))
    energies = torch.empty(len(asking), weight.shape[0], dtype=dtype, device=x.device)
    parts, turned, added, at = [], [], [], 0
    error = signal = 0.0  # of a matrix that the engine requantised
    for file, rows in _blocks_of_rows(weights, weight, hold, once=bool(len(asking))):
        cut = slice(at, at + len(rows))
        part = first.function(x, rows.to(dtype), None if within is None else within[cut], **first.op.attrs)
        if after is not None:  # as a mistaken engine adds it, too: what is made of nothing
            added.append(first.function(torch.zeros_like(x[:1]), rows.to(dtype), after[cut], **first.op.attrs))
        if arithmetic.products != "f64":
            part = part + _lost_of_products(x, rows.to(dtype), rounding_named(arithmetic.products))
        parts.append(part.to(weights.dtype))
        if len(asking):
            tiny = float(part.abs().amax()) < _TINY
            energies[:, cut] = _energy(squares.double() if tiny else squares, sums, rows)
        if len(asking) and hold.in_blocks:
            turned.append(asking.square() @ hold.flips(file).square_().to(dtype).T)
            error, signal = error + float((rows - file).square().sum()), signal + float(file.square().sum())
        at = cut.stop
    values = [*energies.split(asking_lengths)] if asking_lengths else []
    turning = [*torch.cat(turned, 1).split(asking_lengths)] if turned else []
    made = []
    for call, raw, y in zip(calls, xs, torch.cat(parts, 1).split(lengths), strict=True):
        if call.arithmetic.operands == "q8_1":
            y = y + (_q8_1_sums(raw).to(weights.dtype) @ weights.minima(weight).T).to(y.dtype)
        product = None if bias is None else y
        if within is not None and call.energy:
            product = y - within
        elif added:
            y = call.rounded(y, arithmetic.before_bias) + torch.cat(added, 1).to(y.dtype)
        energy = Energy()
        if call.energy:
            energy = Energy(values.pop(0), product, turning.pop(0) if turning else None)
            before = call.energy.requantised
            call.energy.requantised = before[0] + error, before[1] + signal
        made.append((y, energy))
    return made


def _lost_of_products(x: Tensor, rows: Tensor, rounding: Rounding) -> Tensor:
    """By how much sums of rounded products are off, [T, n_rows]: of x [T, n_in], a token at a time."""
    return torch.stack([(rounding(each) - each).sum(-1) for each in (rows * one for one in x)])


def _blocks_of_rows(weights: Weights, weight: Weight, hold: Rounding, once: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive rows of a matrix, as the file has them and as they are held. What schemes and hypotheses look at is
    rounded once for many of them: of float8 that was a fifth of the time in which an arithmetic is composed.
    """
    if hold.name != "f64" and not once and (whole := weights.rounded(weight, hold, hold.n_rows)) is not None:
        yield whole, whole
        return
    for narrow in weights.slices(weight, hold.n_rows):
        file = narrow.to(weights.dtype) if hold.in_blocks else narrow
        yield file, hold(file)


def _linear(call: Call) -> Tensor:
    return _together([call])[0]


def _together(calls: Sequence[Call]) -> list[Tensor]:
    op, first = calls[0].op, calls[0]
    dtype = sums_in(first.arithmetic, first.weights.dtype)
    bias = first.weights.load(op.weights[1], dtype) if len(op.weights) > 1 else None
    made = products(calls, [call.inputs[0].flatten(1) for call in calls], op.weights[0], bias)
    for call, (_, energy) in zip(calls, made, strict=True):
        if call.energy:
            call.energy.take(energy, lambda x: x.unflatten(1, op.axes[1:]))
    return [y.unflatten(1, op.axes[1:]) for y, _ in made]


def _mul_mat(call: Call) -> Tensor:
    return _by_matrices(call) if call.op.weights else _of_values(call)


def _by_matrices(call: Call) -> Tensor:
    """Of a weight of several matrices, one for each batch of x or for a group of these."""
    x, whole = call.inputs[0], call.op.weights[0]
    call, x = rounded_whole(call, x)
    batches = x.flatten(0, -3) if x.ndim > 2 else x[None]
    n = math.prod(whole.shape[:-2])
    stacked = replace(whole, shape=(n, *whole.shape[-2:]))
    matrices = [whole] if len(whole.shape) == 2 else [matrix(stacked, i) for i in range(n)]
    one = replace(call, function=linear) if call.op.function is None else call
    made = [product(one, x, matrices[i * len(matrices) // len(batches)], None) for i, x in enumerate(batches)]
    shape = (*x.shape[:-1], made[0][0].shape[-1])
    if call.energy:
        call.energy.take(Energy.joined([energy for _, energy in made]), lambda x: x.reshape(shape))
    return torch.stack([y for y, _ in made]).reshape(shape)


def _of_values(call: Call) -> Tensor:
    """The first operand as the cache holds it, or as the second is where it was not cached, which is rounded as its
    type wants.
    """
    a, b = call.inputs
    operands = call.arithmetic.operands
    held = call.arithmetic.stored if any(call.op.past) else operands
    x, stored = call.rounded(b, operands), call.rounded(a, held)
    if call.energy:
        call.energy.value = mul_mat(stored.square(), x.square())
        turned = turns(b, operands), turns(a, held)
        if any(bool(t.any()) for t in turned):
            call.energy.turned = mul_mat(stored.square(), turned[0].square()) + mul_mat(turned[1].square(), x.square())
    dtype = sums_in(call.arithmetic, x.dtype)
    return call.function(stored.to(dtype), x.to(dtype)).to(b.dtype)


def _of_latent(call: Call) -> Tensor:
    (weight,) = call.op.weights
    x = call.rounded(call.inputs[0], call.arithmetic.operands)
    held = rounding_of(call.arithmetic.stored, weight, call.weights)(call.weights.load(weight))
    if call.energy:
        call.energy.value = of_latent(x.square(), held.square(), **call.op.attrs)
    dtype = sums_in(call.arithmetic, call.weights.dtype)
    return call.function(x.to(dtype), held.to(dtype), **call.op.attrs).to(call.weights.dtype)


def rounded_whole(call: Call, x: Tensor) -> tuple[Call, Tensor]:
    """Activations of several matrices, where all of them share a scale: rounded before each reads its own."""
    if not rounding_named(call.arithmetic.operands).is_whole:
        return call, x
    return replace(call, rounded=lambda part, name: part), call.rounded(x, call.arithmetic.operands)


def matrix(weight: Weight, i: int) -> Weight:
    """One matrix of a weight of several, [n, n_out, n_in]."""
    return replace(weight, shape=weight.shape[1:], first=(weight.first + i) * weight.shape[1])


def _offset_block(hold: Rounding, weight_type: str, n_in: int) -> int | None:
    """How many weights of a row share an offset; None where they have none."""
    if hold.in_blocks:
        return hold.width(n_in) if hold.has_offset else None
    return None if weight_type in _SIGNED else _OFFSET_BLOCK.get(weight_type, 16)


def _sums(x: Tensor, block: int | None) -> Tensor | None:
    """Of x over each block of weights that share an offset, float32 [T, n_in / block]."""
    return None if block is None else x.unflatten(-1, (-1, block)).sum(-1).float()


def _energy(squares: Tensor, sums: Tensor | None, rows: Tensor) -> Tensor:
    """`Energy.value` for these rows, [T, n_rows], in the type of the squares of x."""
    rows = rows.to(squares.dtype)
    if sums is None:
        return squares @ rows.square().T
    sums, block = sums.to(squares.dtype), rows.shape[-1] // sums.shape[-1]
    offset = max_pool1d(rows.abs(), block)  # amax over so few takes three times as long
    each = offset.unsqueeze(-1)
    parts = rows.unflatten(-1, (-1, block)).add(each).square_().add_(each.square()).flatten(-2)
    # The offset's share is a sum of its own, as large as the other part's: 2/3 y^2 in the variance of floors.py.
    return (squares @ parts.T).add_((sums @ offset.T).square_(), alpha=2 / 3)


def _q8_1_sums(x: Tensor) -> Tensor:
    """What q8_1 adds per block: it multiplies a weight block's minimum by a sum that it keeps in float16.

    [T, n_in] -> [T, n_in / 32], the stored sum less the sum of the values (quantize_row_q8_1_ref).
    """
    quotients, d, _ = q8_0.grid(x)
    total = torch.round(quotients).sum(-1)
    return (total * d.squeeze(-1)).half().to(x.dtype) - total.to(x.dtype) * d.squeeze(-1).half().to(x.dtype)


def columns(op: Op, at: Tensor, weights: Weights, arithmetic: Arithmetic) -> Tensor:
    """Columns `at` [n] of a linear op's matrix as the engine holds it, [n_out, n]."""
    hold = rounding_of(arithmetic.stored, op.weights[0], weights)
    slices = weights.slices(op.weights[0], hold.n_rows)
    return torch.cat([hold(rows)[:, at] for rows in slices]).to(weights.dtype)


def _noise(made: Made) -> Noise:
    return noise_of_sums(made, made.inputs[0][0].numel())


def _noise_of_rows(made: Made) -> Noise:
    return noise_of_sums(made, made.inputs[-1].shape[-1])


KINDS = (
    Kind("linear", linear, ("x",), compute=_linear, noise=_noise, scheme="linear", together=_together),
    Kind("mul_mat", mul_mat, ("a", "b"), compute=_mul_mat, noise=_noise_of_rows, scheme="linear"),
    Kind("of_latent", of_latent, ("x",), compute=_of_latent, noise=_noise_of_rows, scheme="linear"),
)
