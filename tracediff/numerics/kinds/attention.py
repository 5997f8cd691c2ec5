"""Attention in its three parts. Shapes: T tokens of the step, S positions visible, H query heads, G key/value heads,
D head_dim.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tracediff.model.graph import SOURCES
from tracediff.numerics.arithmetic import split_keys
from tracediff.numerics.floors import TINY, UNIT, Noise
from tracediff.numerics.kinds.kind import Call, Kind, Made, analysed, applied, exponential, none
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


def hidden(
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    window: int = 0,
    chunk: int = 0,
    block: int = 0,
    causal: bool = True,
) -> Tensor:
    """[T], [S] -> bool [T, S]: which keys a query may not see (llama-hparams.h, is_masked_swa).

    Those after it, where attention is causal; those `window` positions before it or more (half of it on each side where
    it is not); those before the chunk that it is in; and those that end no block, where keys are of such.
    """
    q, k = query_positions[:, None], key_positions[None, :]
    away = q - k
    unseen = away < 0 if causal else torch.zeros_like(away, dtype=torch.bool)
    if window:
        unseen = unseen | (away >= window if causal else away.abs() > window // 2)
    if block:
        unseen = unseen | ((k + 1) % block != 0)
    return unseen | (k < q // chunk * chunk) if chunk else unseen


def unseen(query_positions: Tensor, key_positions: Tensor, *, mask: Mask | None = None, **visible: Any) -> Tensor:
    """[T], [S] -> bool [T, S]: what is `hidden(**visible)`; for a mistaken engine what `mask` hides in the place of
    later keys, and of those before what a window or a chunk hides.
    """
    right = hidden(query_positions, key_positions, **visible)
    if mask is None:
        return right
    return mask(query_positions, key_positions) | (right & ~causal(query_positions, key_positions))


VISIBLE = ("mask", "window", "chunk", "causal")  # attributes of a softmax that say what a query sees


def unseen_in(attrs: Mapping[str, Any], query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """[T], [S] -> bool [T, S]: what is `unseen` in a softmax with these attributes."""
    return unseen(query_positions, key_positions, **{name: attrs[name] for name in VISIBLE if name in attrs})


def mask(query_positions: Tensor, key_positions: Tensor, **visible: Any) -> Tensor:
    """[T], [S] -> [T, S]: what is added to scores, 0 or minus infinity."""
    hides = hidden(query_positions, key_positions, **visible)
    return torch.zeros(hides.shape, dtype=torch.float32, device=hides.device).masked_fill(hides, -math.inf)


def temperature(positions: Tensor, *, scale: float, every: int, offset: float) -> Tensor:
    """[T] -> [T, 1, 1]: what queries are multiplied by, which grows with each `every` positions.

    (https://ai.meta.com/blog/llama-4-multimodal-intelligence; llama-graph.cpp, llm_graph_input_attn_temp)
    """
    whole = torch.floor((positions.double() + offset) / every)
    return (torch.log(whole + 1) * scale + 1)[:, None, None]


def alibi(n_head: int, max_bias: float) -> Tensor:
    """[H]: what each head multiplies a key's distance with (https://arxiv.org/abs/2108.12409).

    Powers of one base up to the largest power of two of heads, odd ones of its root beyond (ggml-cpu/ops.cpp,
    ggml_compute_forward_soft_max_f32).
    """
    n = 1 << int(math.log2(n_head))
    return torch.tensor(
        [2.0 ** (-max_bias / n * (h + 1) if h < n else -max_bias / 2 / n * (2 * (h - n) + 1)) for h in range(n_head)],
        dtype=torch.float64,
    )


def softmax(
    scores: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    mask: Mask | None = None,
    softcap: float = 0.0,
    max_bias: float = 0.0,
    **visible: Any,
) -> Tensor:
    """Softmax over the visible keys of scores * scale: [H, T, S] -> [H, T, S].

    `softcap` bends large scores, `max_bias` is that of ALiBi. A head's sink is one more score, of no key. What a query
    sees is not `unseen`.
    """
    scaled = scores * scale
    if softcap:
        scaled = softcap * torch.tanh(scaled / softcap)
    if max_bias:
        distance = (query_positions[:, None] - key_positions[None, :]).abs()
        scaled = scaled - alibi(len(scores), max_bias).to(scores)[:, None, None] * distance
    scaled = scaled.masked_fill(unseen(query_positions, key_positions, mask=mask, **visible), -math.inf)
    return softmax_beside(scaled, sinks)


def softmax_beside(scaled: Tensor, sinks: Tensor | None) -> Tensor:
    """Of scores [H, T, n], beside one more of each head [H] that is left out of the result."""
    if sinks is None:
        return torch.softmax(scaled, -1)
    sink = sinks[:, None, None].expand(*scaled.shape[:-1], 1)
    return torch.softmax(torch.cat((scaled, sink), -1), -1)[..., :-1]


def _softmax(call: Call) -> Tensor:
    """Of scores that may be rounded when they are scaled, as PyTorch's autocast keeps them. One that lies next to a
    boundary may go either way.
    """
    rounded_to, scores = call.arithmetic.operands, call.inputs[0]
    if rounded_to == "f64":
        return applied(call)

    def of(scaled: Tensor) -> Tensor:
        op = call.op.with_attrs(scale=1.0)
        return applied(replace(call, op=op, inputs=(call.rounded(scaled, rounded_to), *call.inputs[1:])))

    scaled = scores * call.op.attrs["scale"]
    y = of(scaled)
    if call.energy:
        others = [(of(scaled * (1 + near)) - y).abs() for near in (-_NEAR, _NEAR)]
        call.energy.turned = torch.maximum(*others)
    return y


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
    operands = "f64" if arithmetic.undivided else arithmetic.operands
    x, cached = call.rounded(inputs[0], operands), call.rounded(inputs[1], arithmetic.stored)
    if arithmetic.undivided:
        x = _undivided(call, x, arithmetic.operands)
    n_cached = len(cached) - x.shape[token_axis] * arithmetic.fresh
    if arithmetic.fresh:
        cached = torch.cat((cached[:n_cached], inputs[1][n_cached:]))
    if whole := arithmetic.whole_ubatches(x.shape[token_axis]):
        rest = x.narrow(token_axis, whole, x.shape[token_axis] - whole)
        x = torch.cat((inputs[0].narrow(token_axis, 0, whole), rest), token_axis)
    if energy:
        energy.value = of_sizes(x.square(), cached.square())
        turned = turns(inputs[0], operands), turns(inputs[1], arithmetic.stored)
        turned[1][n_cached:] = 0.0
        if any(bool(t.any()) for t in turned):
            energy.turned = of_sizes(turned[0].square(), cached.square()) + of_sizes(x.square(), turned[1].square())

    dtype = sums_in(arithmetic, x.dtype)
    # What a hypothesis reads of other layers' caches is held as this one is.
    others = [name not in SOURCES and past in (True, "earlier") for name, past in call.op.reads[2:]]
    more = [call.rounded(y, arithmetic.stored) if of else y for y, of in zip(inputs[2:], others, strict=True)]

    def product(x: Tensor, cached: Tensor) -> Tensor:
        return call.function(x.to(dtype), cached.to(dtype), *more, **call.op.attrs).to(inputs[0].dtype)

    # Key by key, unless a hypothesis reads another cache besides, of as many keys.
    if arithmetic.accumulate != "f16" or not arithmetic.parts or len(inputs) > 2:
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


def _undivided(call: Call, probs: Tensor, operands: str) -> Tensor:
    """Exponentials of what scores are below the largest of all keys, rounded, and divided by the sum of the unrounded:
    so FlashAttention multiplies them where all keys are one tile (PyTorch's on the CPU: 512). Of more tiles nobody
    knows at which scale, and `_noise_of_values` allows for all.
    """
    largest = probs.amax(-1, keepdim=True)
    return call.rounded(torch.where(largest > 0, probs / largest, 0.0), operands) * largest


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


def _noise_of_values(made: Made) -> Noise:
    """Values of one token over and over are equal, and adding what is equal errs to the same side each time: of such a
    run the errors add up, not their squares. (In the first layer of a torch engine that decoded one token 3,214 times
    a value was 6.2 sigma off.)
    """
    rounded: Tensor | float = 0.0
    if made.arithmetic.undivided:
        assert made.energy.value is not None
        rounded = UNIT[made.arithmetic.operands] ** 2 / 3 * made.energy.value
    own, v = _noise_of_keys(made), made.inputs[1].flatten(1)
    own = replace(own, sigma=torch.sqrt(own.sigma.square() + rounded))
    n_runs = 1 + int((v[1:] != v[:-1]).any(1).sum())
    return own if n_runs >= len(v) else replace(own, sigma=own.sigma * math.sqrt(len(v) / n_runs))


# Units that two engines' scales are apart, each a constant that roundings made: YaRN's mscale^2 / sqrt(d) in float64,
# and as llama.cpp has it in float32 (src/models/deepseek2.cpp), 2.5 of them for a factor of 40 and d of 40.
_SCALE_UNITS = 4
# What engines may have for exp of what is far below the maximum, or hidden: MNN takes -87 for all that is less, which
# makes 1.65e-38.
_LEAST = 2 * TINY["f32"]
_NEAR = 2.0**-22  # of a score that float32 scaled: as near to a boundary of half precision it may go either way


def _softmax_noise(made: Made) -> Noise:
    """Exp magnifies the rounding of its argument: scaled score, maximum and their difference, a unit of each, and of
    that difference what the scale is off by.
    """
    op = made.op
    if op.weights or not op.attrs.keys() <= {"scale", *VISIBLE}:
        return _softmax_noise_of_any(made)
    scores, queries, keys = made.inputs
    y, unit = made.y, made.unit
    hides = unseen_in(op.attrs, queries, keys) | (scores == -math.inf)  # as an engine records what it did not visit
    scaled = (scores * op.attrs["scale"]).masked_fill(hides, -math.inf)
    largest = scaled.amax(-1, keepdim=True)
    sizes = (scaled.abs() + largest.abs() + (1 + _SCALE_UNITS) * (largest - scaled)).masked_fill(hides, 0.0)
    magnified = y * ((unit + made.between) * sizes + 4 * unit)
    sigma = unit * made.size * math.sqrt(y.shape[-1]) / 3
    return Noise(sigma, made.stored + magnified + _LEAST, alike=y.shape[-1])


def _softmax_noise_of_any(made: Made) -> Noise:
    """Of a softmax with more to it, or a mistaken one: what the scale is off by, which exp magnifies."""
    scores = made.inputs[0].masked_fill(made.inputs[0] == -math.inf, 0.0)  # what was not visited has no part in it
    own, scaled = analysed(made), (scores * made.op.attrs["scale"]).abs()
    magnified = made.size * _SCALE_UNITS * made.unit * (scaled + scaled.amax(-1, keepdim=True))
    return replace(own, hard=own.hard + magnified + _LEAST)


def lightning_indexer(q: Tensor, k: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """[T, H, D] x [S, D], [T, H], [T, S] -> [T, S]: sums over heads of weights * relu(q.k), and mask.

    (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp)
    """
    k = k.reshape(k.shape[0], -1)
    products = (q @ k.T).clamp(min=0.0)
    return (products * weights.reshape(q.shape[0], q.shape[1], 1)).sum(-2) + mask.reshape(q.shape[0], -1)


_OF_KEYS = ("head", "token", "key")
KINDS = (
    Kind("scores", scores, ("q", "k"), _OF_KEYS, _scores, _noise_of_keys, scheme="scores"),
    replace(
        exponential(Kind("softmax", softmax, ("scores", "queries", "keys"), _OF_KEYS, _softmax, _softmax_noise,
                         _softmax_noise_of_any)),
        scheme="softmax"),
    Kind("mask", mask, ("queries", "keys"), ("token", "key"), noise=none),
    Kind("temperature", temperature, ("positions",), ("token",)),
    Kind("lightning_indexer", lightning_indexer, ("q", "k", "weights", "mask"), ("token", "key")),
    Kind("weighted_values", weighted_values, ("probs", "v"), compute=_weighted_values, noise=_noise_of_values,
         scheme="weighted_values"),
)  # fmt: skip
