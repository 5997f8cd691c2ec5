"""One op of a graph, computed: the only place where mathematics, weights and arithmetic meet."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import EXACT, Arithmetic, Scheme, in_words, split_keys
from tracediff.numerics.ops import FUNCTIONS
from tracediff.numerics.roundings import half, q8_0, rounding_named, single

_OFFSET_BLOCK = {"TQ1_0": 256, "TQ2_0": 256}  # weights that share a scale; 16 is the least of all others
_SIGNED = ("F64", "F32", "F16", "BF16", "Q8_0")


@dataclass(slots=True)
class Energy:
    """Asked for beside a matmul: `value` becomes sum((x * w)^2) of each output, to about 1%.

    A quantised weight is a scale times an unsigned integer, less an offset or minimum. Engines add up the two
    parts apart, so both count (ggml-cpu/arch/x86/quants.c: the block sums of q8_K are there for it).
    """

    value: Tensor | None = None
    product: Tensor | None = None  # of a linear op with a bias: before the bias
    turned: Tensor | None = None  # of the second operand: the change if values on a boundary went the other way
    last_place: Tensor | None = None  # of sums in half precision, followed: the largest unit of a running sum


Rounded = Callable[[Tensor, str], Tensor]


def rounding(x: Tensor, name: str) -> Tensor:
    """X as `name` keeps it."""
    return rounding_named(name)(x)


def arithmetic_of(op: Op, scheme: Scheme, weights: Weights) -> Arithmetic:
    """What the scheme rounds in this op, which depends on the type of its weight."""
    return scheme.of(op.kind, weights.type_of(op.weights[0]) if op.weights else "F32")


def in_words_of(ops: Iterable[Op], scheme: Scheme, weights: Weights) -> str:
    """What the scheme rounds in these ops."""
    return in_words((op.kind, arithmetic_of(op, scheme, weights)) for op in ops)


def rows_fit(op: Op, arithmetic: Arithmetic, head_dim: int) -> bool:
    """Whether the rows that the arithmetic rounds in blocks are multiples of them."""
    columns = op.weights[0].shape[-1] if op.weights else head_dim
    roundings = (rounding_named(name) for name in (arithmetic.operands, arithmetic.stored))
    return not any(columns % (rounding.block or columns) for rounding in roundings)


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
    return rounded(_computed(op, inputs, weights, arithmetic, energy, rounded), op.stored)


def _computed(
    op: Op,
    inputs: Sequence[Tensor],
    weights: Weights,
    arithmetic: Arithmetic,
    energy: Energy | None,
    rounded: Rounded,
) -> Tensor:
    function, hold = op.function or FUNCTIONS[op.kind], rounding_named(arithmetic.stored)
    match op.kind:
        case "embedding":
            return function(hold(weights.gather(op.weights[0], inputs[0])), **op.attrs)
        case "linear":
            return _linear(op, inputs[0].flatten(1), weights, arithmetic, energy, rounded)
        case "scores" | "weighted_values":
            return _attention(op, inputs, arithmetic, energy, rounded)
        case "rope":  # a position times a frequency does not survive half precision: no engine stores factors in it
            return function(*inputs, *(weights.load(w, torch.float64) for w in op.weights), **op.attrs)
    return function(*inputs, *(hold(weights.load(w)) for w in op.weights), **op.attrs)


def _attention(
    op: Op, inputs: Sequence[Tensor], arithmetic: Arithmetic, energy: Energy | None, rounded: Rounded
) -> Tensor:
    """A matmul of activations, queries or probabilities, with keys or values from the cache."""
    function, of_sizes = op.function or FUNCTIONS[op.kind], FUNCTIONS[op.kind]
    x, cached = rounded(inputs[0], arithmetic.operands), rounded(inputs[1], arithmetic.stored)
    axis = 1 if op.kind == "weighted_values" else 0  # of the tokens
    if whole := arithmetic.whole_ubatches(x.shape[axis]):
        x = torch.cat((inputs[0].narrow(axis, 0, whole), x.narrow(axis, whole, x.shape[axis] - whole)), axis)
    if energy:
        energy.value = of_sizes(x.square(), cached.square())
        turned = _turns(inputs[0], arithmetic.operands), _turns(inputs[1], arithmetic.stored)
        if any(bool(t.any()) for t in turned):
            energy.turned = of_sizes(turned[0], cached.abs()) + of_sizes(x.abs(), turned[1])

    dtype = _sums_in(arithmetic, x.dtype)

    def product(x: Tensor, cached: Tensor) -> Tensor:
        return function(x.to(dtype), cached.to(dtype), *inputs[2:], **op.attrs).to(inputs[0].dtype)

    if arithmetic.accumulate != "f16" or not arithmetic.parts:
        return product(x, cached)
    cuts = split_keys(x.shape[1] - whole, x.shape[2], arithmetic.parts)
    sums = [_half_sums(product, x[:, whole:, keys], cached[keys]) for keys in cuts]
    y, last_place = reduce(torch.add, (y for y, _ in sums)), reduce(torch.maximum, (place for _, place in sums))
    if whole:
        y = torch.cat((product(x[:, :whole], cached), y))
        last_place = torch.cat((last_place.new_zeros(whole, *last_place.shape[1:]), last_place))
    if energy:
        energy.last_place = last_place
    return y


def _turns(x: Tensor, name: str) -> Tensor:
    """The sizes of what values on a boundary of the rounding change by if they go the other way."""
    return rounding_named(name).flips(x).abs()


def _half_sums(weigh: Callable[[Tensor, Tensor], Tensor], probs: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`weigh` of probs [H, T, S] and v [S, G, D] as flash attention sums it, in float16 key by key; [T, H * D].

    The running sum has the weights exp(score - largest score so far): it is rescaled when that grows, and rounded
    each time (ggml-cpu/ops.cpp, ggml_compute_forward_flash_attn_ext_f16_one_chunk). A product and its addition are
    one operation in float32. Also gives 2^-10 of the largest running sum: no rounding is by more.
    """
    largest = probs.cummax(-1).values
    weights = torch.where(largest == 0, 0.0, probs / largest).to(torch.float32).to(probs.dtype)
    before = torch.cat((largest[..., :1], largest[..., :-1]), -1)
    scales = torch.where(largest == 0, 1.0, before / largest).to(torch.float32).to(probs.dtype)
    total = size = weigh(torch.zeros_like(probs[..., :1]), v[:1])
    width = total.shape[-1] // len(probs)

    def per_channel(of_heads: Tensor) -> Tensor:  # [H, T] -> [T, H * D]
        return of_heads.T.repeat_interleave(width, -1)

    for key in range(probs.shape[-1]):
        scale = per_channel(scales[..., key])
        total = half(single(total * scale))
        total = half(single(total + weigh(weights[..., key : key + 1], v[key : key + 1])))
        size = torch.maximum(size * scale, total.abs())
    least = per_channel(largest[..., -1])
    return total * least, 2.0**-10 * size * least


def _linear(
    op: Op, x: Tensor, weights: Weights, arithmetic: Arithmetic, energy: Energy | None, rounded: Rounded
) -> Tensor:
    """A matmul block of rows by block of rows, so that a matrix is never whole in memory."""
    function = op.function or FUNCTIONS[op.kind]
    hold = rounding_named(arithmetic.stored)
    dtype = _sums_in(arithmetic, weights.dtype)
    bias = weights.load(op.weights[1], dtype) if len(op.weights) > 1 else None
    if bias is not None and not hold.in_blocks:  # nobody quantises these few
        bias = hold(bias)
    raw, x = x, rounded(x, arithmetic.operands).to(dtype)
    # Sums of squares have no cancellation: bfloat16 gives them to 1%, many times faster than float64.
    squares = x.square().bfloat16() if energy else None
    parts, energies, turned, at = [], [], [], 0
    for rows in weights.slices(op.weights[0]):
        cut = slice(at, at + len(rows))
        turns = _turns(rows, arithmetic.stored) if energy and hold.in_blocks else None
        rows = hold(rows)
        part = function(x, rows.to(dtype), None if bias is None else bias[cut], **op.attrs)
        parts.append(part.to(weights.dtype))
        if squares is not None:
            energies.append(_energy(x, squares, rows, "F32" if hold.in_blocks else weights.type_of(op.weights[0])))
        if turns is not None:
            turned.append(x.abs() @ turns.to(dtype).T)
        at = cut.stop
    y = torch.cat(parts, 1)
    if arithmetic.operands == "q8_1":
        y += _q8_1_sums(raw) @ weights.minima(op.weights[0]).T
    if energy:
        energy.value = torch.cat(energies, 1).unflatten(1, op.axes[1:])
        energy.turned = torch.cat(turned, 1).unflatten(1, op.axes[1:]) if turned else None
        energy.product = None if bias is None else (y - bias).unflatten(1, op.axes[1:])
    return y.unflatten(1, op.axes[1:])


def _sums_in(arithmetic: Arithmetic, dtype: torch.dtype) -> torch.dtype:
    """ggml adds the products of a block as integers: of 32 or 256 none is rounded, as they would be in float32."""
    return torch.float64 if rounding_named(arithmetic.operands).in_blocks else dtype


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
