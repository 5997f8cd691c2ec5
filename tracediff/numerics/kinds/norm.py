"""Norms over the channels."""

import torch
from torch import Tensor

from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Kind, Made, wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., n] -> [..., n]: x / sqrt(mean(x^2) + eps) * weight (https://arxiv.org/abs/1910.07467)."""
    x_ = wide(x)
    normed = x_ * torch.rsqrt(x_.square().mean(-1, keepdim=True) + eps)
    return (normed * wide(weight)).to(x.dtype)


def _noise(made: Made) -> Noise:
    unit, size = made.unit, made.size
    # A replaced norm may subtract a mean, which has the error of the largest value.
    cancelled = 4 * unit * size.amax(-1, keepdim=True) if made.op.function else 0.0
    # In half precision a third rounding, of the weight: transformers holds it in half precision as well.
    stored = made.stored + made.between * size
    return Noise(unit * size * _mean_square(made.inputs[0]), stored + 2 * unit * size + cancelled)


def _mean_square(x: Tensor) -> Tensor:
    """Relative error of 1 / sqrt(mean(x^2)) in units: half that of a sum of n positive terms."""
    x2 = x.square()
    n, total = x.shape[-1], x2.sum(-1, keepdim=True)
    spread = x2.square().sum(-1, keepdim=True) / total.square().clamp(min=1e-300)
    return torch.sqrt((n * spread / 2 + n / 3) / 3) / 2 + 1


KINDS = (Kind("rms_norm", rms_norm, ("x",), noise=_noise, scheme="rms_norm", keeps_part=True),)
