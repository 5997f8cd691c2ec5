"""Attention in its three parts. Shapes: T tokens of the step, S positions visible, H query heads, G key/value heads,
D head_dim.
"""

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from tracediff.numerics.arithmetic import split_keys
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Kind, Made, wide
from tracediff.numerics.kinds.matmul import noise_of_sums, sums_in, turns
from tracediff.numerics.roundings import half, single

Mask = Callable[[Tensor, Tensor], Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    """[T, H, D] x [S, G, D] -> [H, T, S]; query head h reads key head h // (H / G)."""
    groups = k.shape[1]
    q_ = q.permute(1, 0, 2).unflatten(0, (groups, -1))  # G, H/G, T, D
    return (q_ @ k.permute(1, 2, 0)[:, None]).flatten(0, 1)


def causal(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """[T], [S] -> bool [T, S]: which keys a query may not see."""
    return key_positions[None, :] > query_positions[:, None]


def softmax(
    scores: Tensor, query_positions: Tensor, key_positions: Tensor, *, scale: float, mask: Mask = causal
) -> Tensor:
    """Softmax over the visible keys of scores * scale: [H, T, S] -> [H, T, S]."""
    hidden = mask(query_positions, key_positions)
    return torch.softmax((wide(scores) * scale).masked_fill(hidden, -math.inf), -1).to(scores.dtype)


def weighted_values(probs: Tensor, v: Tensor) -> Tensor:
    """[H, T, S] x [S, G, D] -> [T, H * D]."""
    groups = v.shape[1]
    p = probs.unflatten(0, (groups, -1))  # G, H/G, T, S
    return (p @ v.permute(1, 0, 2)[:, None]).flatten(0, 1).permute(1, 0, 2).flatten(1)


def _scores(call: Call) -> Tensor:
    return _with_cache(call, scores, token_axis=0)


def _weighted_values(call: Call) -> Tensor:
    return _with_cache(call, weighted_values, token_axis=1)


def _with_cache(call: Call, of_sizes: Callable[..., Tensor], token_axis: int) -> Tensor:
    """A matmul of activations, queries or probabilities, with keys or values from the cache."""
    inputs, arithmetic, energy = call.inputs, call.arithmetic, call.energy
    x, cached = call.rounded(inputs[0], arithmetic.operands), call.rounded(inputs[1], arithmetic.stored)
    if whole := arithmetic.whole_ubatches(x.shape[token_axis]):
        rest = x.narrow(token_axis, whole, x.shape[token_axis] - whole)
        x = torch.cat((inputs[0].narrow(token_axis, 0, whole), rest), token_axis)
    if energy:
        energy.value = of_sizes(x.square(), cached.square())
        turned = turns(inputs[0], arithmetic.operands), turns(inputs[1], arithmetic.stored)
        if any(bool(t.any()) for t in turned):
            energy.turned = of_sizes(turned[0], cached.abs()) + of_sizes(x.abs(), turned[1])

    dtype = sums_in(arithmetic, x.dtype)

    def product(x: Tensor, cached: Tensor) -> Tensor:
        return call.function(x.to(dtype), cached.to(dtype), *inputs[2:], **call.op.attrs).to(inputs[0].dtype)

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


def _noise_of_keys(made: Made) -> Noise:
    return noise_of_sums(made, made.inputs[0].shape[-1])


def _softmax_noise(made: Made) -> Noise:
    """Exp magnifies the rounding of its argument: scaled score, maximum and their difference, a unit of each."""
    scores, queries, keys = made.inputs
    y, unit = made.y, made.unit
    hidden = made.op.attrs.get("mask", causal)(queries, keys)
    scaled = (scores * made.op.attrs["scale"]).masked_fill(hidden, -math.inf)
    largest = scaled.amax(-1, keepdim=True)
    sizes = (scaled.abs() + largest.abs() + (largest - scaled)).masked_fill(hidden, 0.0)
    magnified = y * ((unit + made.between) * sizes + 4 * unit)
    return Noise(unit * made.size * math.sqrt(y.shape[-1]) / 3, made.stored + magnified)


_OF_KEYS = ("head", "token", "key")
KINDS = (
    Kind("scores", scores, ("q", "k"), _OF_KEYS, _scores, _noise_of_keys, scheme="scores"),
    Kind("softmax", softmax, ("scores", "queries", "keys"), _OF_KEYS, noise=_softmax_noise),
    Kind("weighted_values", weighted_values, ("probs", "v"), compute=_weighted_values, noise=_noise_of_keys,
         scheme="weighted_values"),
)  # fmt: skip
