"""The mathematics of each kind of op: pure functions of tensors, to be read beside the papers.

They compute in the dtype of their inputs; where that is half precision, reductions run in float32 and the
result is rounded once, as engines do (a mean of squares overflows float16 beyond |x| = 256).
Shapes: T tokens of the step, S positions visible, H query heads, G key/value heads, D head_dim.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tracediff.model.hparams import Rope


def wide(x: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def embedding(rows: Tensor) -> Tensor:
    """The table's rows of the step's tokens, [T, n_embd]: picking them is reading the weight."""
    return rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., n] -> [..., n]: x / sqrt(mean(x^2) + eps) * weight."""
    x_ = wide(x)
    normed = x_ * torch.rsqrt(x_.square().mean(-1, keepdim=True) + eps)
    return (normed * wide(weight)).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, n_in] x [n_out, n_in] -> [T, n_out]."""
    y = x @ weight.T
    return y if bias is None else y + bias


def rope_angles(positions: Tensor, factors: Tensor | None, rope: Rope) -> Tensor:
    """Angle of each pair at each position in float64, [T, n_rot / 2] (ggml-cpu/ops.cpp, ggml_rope_cache_init)."""
    pair = torch.arange(rope.n_rot // 2, device=positions.device, dtype=torch.float64)
    extrapolated = positions.double()[:, None] * rope.theta ** (-2.0 * pair / rope.n_rot)
    if factors is not None:
        extrapolated = extrapolated / factors.double()
    if not rope.ext_factor:
        return extrapolated * rope.freq_scale
    low, high = yarn_correction_range(rope)
    ramp = 1 - ((pair - low) / max(0.001, high - low)).clamp(0, 1)
    mix = ramp * rope.ext_factor
    return extrapolated * rope.freq_scale * (1 - mix) + extrapolated * mix


def yarn_correction_range(rope: Rope) -> tuple[float, float]:
    """The pairs between which YaRN goes from extrapolation to interpolation (ggml.c, ggml_rope_yarn_corr_dims)."""

    def pair_with(rotations: float) -> float:
        turns = math.log(rope.n_ctx_orig / (rotations * 2 * math.pi))
        return rope.n_rot * turns / (2 * math.log(rope.theta))

    return max(0, math.floor(pair_with(rope.beta_fast))), min(rope.n_rot - 1, math.ceil(pair_with(rope.beta_slow)))


def rope(x: Tensor, positions: Tensor, factors: Tensor | None = None, *, rope: Rope) -> Tensor:
    """Rotate pairs of channels of [T, heads, D] by their angles; channels from n_rot on pass through."""
    angles = rope_angles(positions, factors, rope)[:, None, :]
    cos, sin = (f(angles).mul(rope.magnitude).to(wide(x).dtype) for f in (torch.cos, torch.sin))
    x_ = wide(x)
    rotated, rest = x_[..., : rope.n_rot], x_[..., rope.n_rot :]
    pairs = rotated.unflatten(-1, (-1, 2) if rope.pairing == "neighbours" else (2, -1))
    axis = -1 if rope.pairing == "neighbours" else -2
    a, b = pairs.unbind(axis)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), axis).flatten(-2)
    return torch.cat((turned, rest), -1).to(x.dtype)


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


def add(a: Tensor, b: Tensor) -> Tensor:
    """A + b."""
    return a + b


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (torch.nn.functional.silu(wide(gate)) * wide(up)).to(gate.dtype)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "embedding": embedding, "rms_norm": rms_norm, "linear": linear, "rope": rope, "scores": scores,
    "softmax": softmax, "weighted_values": weighted_values, "add": add, "swiglu": swiglu,
}  # fmt: skip
