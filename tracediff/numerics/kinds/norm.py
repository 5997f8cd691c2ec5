"""Norms over the channels."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Kind, Made, analysed, applied, held, kept, rounded_between, wide
from tracediff.numerics.roundings import rounding_named

_ROWS = 8  # that are looked at for equal values


def rms_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """[..., n] -> [..., n]: x / sqrt(mean(x^2) + eps) * weight + bias (https://arxiv.org/abs/1910.07467)."""
    return scaled(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), weight, bias)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """[..., n] -> [..., n]: the same of x less its mean (https://arxiv.org/abs/1607.06450)."""
    return rms_norm(x - x.mean(-1, keepdim=True), weight, bias, eps=eps)


def l2_norm(x: Tensor, *, eps: float) -> Tensor:
    """[..., n] -> [..., n]: x / max(|x|, eps)."""
    return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=eps)


def group_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, groups: int, eps: float
) -> Tensor:
    """[channels, m, n] -> the same: a layer norm over each group of channels as a whole; the last may be short."""
    x = x.reshape((1,) * (3 - x.ndim) + tuple(x.shape))
    parts = x.split(-(-len(x) // groups))
    normed = [layer_norm(part.flatten(), eps=eps).reshape(part.shape) for part in parts]
    return scaled(torch.cat(normed), weight, bias)


def scaled(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """[..., n] -> [..., n]: x * weight + bias, with those that there are."""
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@dataclass(frozen=True, slots=True)
class RoundedBetween:
    """A norm whose value is rounded before its weight multiplies it, be it by an engine's arithmetic or by mistake."""

    dtype: str

    def compute(self, call: Call) -> Tensor:
        """The output."""
        normed = call.function(*map(wide, call.inputs), **call.op.attrs)
        return kept(scaled(rounding_named(self.dtype)(normed), *map(wide, held(call))), call.weights)

    def noise(self, made: Made) -> Noise:
        """That of the norm, whose value may be rounded to either of two numbers before its weight multiplies it."""
        normed = made.function(*made.inputs, **made.op.attrs)
        return rounded_between(_of_norm(made), normed, rounding_named(self.dtype), held(made)[0])


def _computed(call: Call) -> Tensor:
    between = call.arithmetic.operands  # a mistaken function may want the weight itself
    return applied(call) if between == "f64" or call.op.function else RoundedBetween(between).compute(call)


def _noise(made: Made) -> Noise:
    between = made.arithmetic.operands
    return _of_norm(made) if between == "f64" else RoundedBetween(between).noise(made)


def _of_norm(made: Made) -> Noise:
    if len(made.op.weights) > 1:
        return _of_rows(made)
    unit, size = made.unit, made.size
    # In half precision a third rounding, of the weight: transformers holds it in half precision as well.
    stored = made.stored + made.between * size
    return Noise(unit * size * _mean_square(made.inputs[0]), stored + 2 * unit * size, alike=size.shape[-1])


def _mean_square(x: Tensor) -> Tensor:
    """Relative error of 1 / sqrt(mean(x^2)) in units: half that of a sum of n positive terms."""
    x2 = x.square()
    n, total = x.shape[-1], x2.sum(-1, keepdim=True)
    spread = x2.square().sum(-1, keepdim=True) / total.square().clamp(min=1e-300)
    return torch.sqrt((n * spread / 2 + n * _equal(x2) / 3) / 3) / 2 + 1


def _equal(x: Tensor) -> float:
    """How many values of a row are equal to a value of it on average; the most of a few rows.

    Equal terms err alike when a sum of one size adds them up, so they do not cancel: rows of a 4-bit embedding have
    100 values in 256 channels, and twice the error of others.
    """
    rows = x.flatten(0, -2)
    counts = (torch.unique(row[row > 0], return_counts=True)[1] for row in rows[:: -(-len(rows) // _ROWS)])
    return max((float(n.double().square().sum() / n.sum()) for n in counts if len(n)), default=1.0)


def _of_rows(made: Made) -> Noise:
    return replace(analysed(made), alike=made.y.shape[-1])


_norm = partial(Kind, inputs=("x",), keeps_part=True, noise_of_any=_of_rows)

KINDS = (
    _norm("rms_norm", rms_norm, compute=_computed, noise=_noise, scheme="rms_norm"),
    _norm("layer_norm", layer_norm, noise=_of_rows, scheme="norm"),
    _norm("l2_norm", l2_norm, noise=_of_rows),
    _norm("group_norm", group_norm, noise=_of_rows, scheme="norm"),
)
