"""Hyper-connections: several residual streams, mixed anew in each layer (https://arxiv.org/abs/2409.19606).

Shapes: T tokens, S streams, n channels. What ggml computes for DeepSeek-V4: ggml-cpu/ops.cpp, dsv4_hc_*.
"""

import torch
from torch import Tensor

from tracediff.numerics.kinds.kind import Kind


def mixing(mixes: Tensor, scale: Tensor, base: Tensor, *, eps: float, iterations: int) -> Tensor:
    """Mixes [T, (2 + S) S], scale [3], base [(2 + S) S] -> [T, S from, S to], whose columns add up to 1.

    So nearly do rows, by Sinkhorn's iterations: columns and rows are divided by their sums in turn.
    """
    streams = _streams(base.numel())
    own = mixes[..., 2 * streams :] * scale[2] + base[2 * streams :]
    mixed = torch.softmax(own.unflatten(-1, (streams, streams)), -1) + eps
    mixed = mixed / (mixed.sum(-2, keepdim=True) + eps)
    for _ in range(1, iterations):
        mixed = mixed / (mixed.sum(-1, keepdim=True) + eps)
        mixed = mixed / (mixed.sum(-2, keepdim=True) + eps)
    return mixed


def _streams(length: int) -> int:
    """S of (2 + S) S."""
    return round((1 + length) ** 0.5) - 1


def into_layer(streams: Tensor, weights: Tensor, *, scale: float, sigmoid: int = 0) -> Tensor:
    """[T, S, n], weights [T, S], or [T, S, n] that a sigmoid is taken of -> [T, n]."""
    weights = torch.sigmoid(weights) if sigmoid else weights[..., None]
    return (streams * weights).sum(-2) * scale


def out_of_layer(x: Tensor, streams: Tensor, post: Tensor, mixed: Tensor | None = None) -> Tensor:
    """X [T, n], streams [T, S, n], post [T, S], mixed [T, S from, S to] -> [T, S, n]: x to each, and what stays."""
    kept = streams if mixed is None else mixed.mT @ streams
    return x[..., None, :] * post[..., None] + kept


_STREAMS = ("token", "stream", "channel")
KINDS = (
    Kind("dsv4_hc_comb", mixing, ("mixes",), ("token", "from", "to"), scheme="vectors"),
    Kind("dsv4_hc_pre", into_layer, ("streams", "weights")),
    Kind("dsv4_hc_post", out_of_layer, ("x", "streams", "post", "mixed"), _STREAMS),
)
