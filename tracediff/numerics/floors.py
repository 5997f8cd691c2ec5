"""How far honest arithmetic can be from exact: a floor per element, from the numbers that an op adds up.

A rounding errs by at most half a unit, u = 2^-24 of the value in float32, uniformly: variance u^2 / 3 of the
value's square. Summing n terms in sequence rounds n partial sums. With Q the sum of squares of the terms and y
their sum, the j-th partial sum has a mean square of j Q / n + (j / n)^2 y^2, so

    variance of the error = u^2 / 3 * (n Q / 2 + n y^2 / 3).

Sequential order is the worst that engines use; vector units keep 8 to 64 partial sums, and err less by the root
of that. What follows the storage of the result, or is not random (an angle that a float32 cannot hold), is a
hard bound instead. No formula here knows of an engine.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.evaluate import Energy
from tracediff.numerics.ops import causal, rope_angles, wide
from tracediff.numerics.roundings import rounding_named

# Half a unit in the last place of 1.0, and the smallest positive number (IEEE 754; bfloat16 as float32).
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
TINY = {"f64": 2.0**-1022, "f32": 2.0**-126, "f16": 2.0**-24, "bf16": 2.0**-126}
# The chance that the largest of all elements of an op passes its bound by luck: one false alarm in a million ops.
_LUCK = 1e-6


@dataclass(frozen=True, slots=True)
class Noise:
    """Of each element of an output: the standard deviation of its error, and a bound on what is not random.

    `turned` is what an element may err by besides because a rounding went the other way: that is rare, so `sigma`
    tells how often, and the whole is not allowed it.
    """

    sigma: Tensor
    hard: Tensor
    turned: Tensor | None = None

    def bound(self) -> Tensor:
        """What no element's error exceeds, but for one op in a million (Gaussian tail over all elements)."""
        tail = math.sqrt(2 * math.log(max(self.sigma.numel(), 2) / _LUCK))
        bound = torch.add(self.hard, self.sigma, alpha=tail)
        return bound if self.turned is None else bound.add_(self.turned)

    def without(self, lost: Tensor) -> "Noise":
        """None at the elements that are `lost`, bool of the same shape."""
        return replace(self, sigma=self.sigma.masked_fill(lost, 0.0), hard=self.hard.masked_fill(lost, 0.0))

    def energy(self) -> float:
        """The sum over all elements of the mean square of their errors."""
        sigma, hard = self.sigma.flatten(), self.hard.flatten()
        return float(sigma @ sigma + hard @ hard / 3)


def noise(op: Op, inputs: list[Tensor], y: Tensor, energy: Energy, arithmetic: Arithmetic, storage: str) -> Noise:
    """The noise of computing `op` once in float32 (float64 where `storage` is) and storing it as `storage`.

    `inputs` and `y` are float64; `energy` is what `evaluate` told of a matmul.
    """
    accumulate = arithmetic.accumulate if energy.last_place is None else "f32"
    unit = UNIT["f64" if storage == "f64" else accumulate]
    kept = UNIT[storage]
    size = y.abs()
    half = storage in ("f16", "bf16")
    # Engines in half precision round between the parts of an op too: the product before the bias, silu before
    # the gate, the normed value before its weight. Two roundings of the result's size allow for that.
    stored = (size * (kept * (2 + kept if half else 1))).add_(TINY[storage])
    match op.kind:
        case "linear" | "scores" | "weighted_values":
            assert energy.value is not None
            terms = _terms(op, inputs, arithmetic)
            # terms * (energy / 2 + y^2 / 3) / 3, in place: of logits each copy is as large as the model's layers.
            variance = energy.value.mul_(terms / 6).addcmul_(y, y, value=terms / 9)
            sigma = variance.sqrt_().mul_(unit)
            if energy.product is not None and half:
                stored = stored + kept * energy.product.abs()
            if energy.turned is not None:
                stored = stored + energy.turned
            if energy.last_place is not None:
                return _followed(Noise(sigma, stored), energy.last_place)
            return Noise(sigma, stored)
        case "rms_norm":
            # A replaced norm may subtract a mean, which has the error of the largest value.
            cancelled = 4 * unit * size.amax(-1, keepdim=True) if op.function else 0.0
            if half:  # a third rounding, of the weight: transformers holds it in half precision as well
                stored = stored + kept * size
            return Noise(unit * size * _mean_square(inputs[0]), stored + 2 * unit * size + cancelled)
        case "rope":
            return Noise(unit * size, stored + _rope(op, inputs, y, unit, kept if half else 0.0))
        case "softmax":
            return Noise(
                unit * size * math.sqrt(y.shape[-1]) / 3,
                stored + _softmax(op, inputs, y, unit, kept if half else 0.0),
            )
        case "swiglu":  # of exp(-gate) the share sigmoid(-gate) reaches gate / (1 + exp(-gate)) * up
            gate, up = (wide(x) for x in inputs)
            share = torch.sigmoid(-gate)
            # Three operations; exp is good to 2 units, and to |gate| more where its argument is scaled first (ex2).
            sigma = unit * size * torch.sqrt((3 + (4 + gate.square()) * share.square()) / 3)
            # Another activation may subtract: 1 + erf(x) has the error of 1 (of a few units) where it is all but 0.
            cancelled = 8 * unit if op.function else 0.0
            # 1 / (1 + exp(88.8)) is 0 where exp overflows, though it should be a denormal.
            lost = gate.abs() * up.abs() * (cancelled + TINY["f64" if storage == "f64" else "f32"])
            return Noise(sigma, stored + lost)
        case "embedding":  # a dequantised value is a scale times an integer, less a minimum, in float32
            return Noise(torch.zeros_like(y), stored + 2 * UNIT["f32"] * size.amax(-1, keepdim=True))
    return Noise(torch.zeros_like(y), stored + unit * size)


def _followed(noise: Noise, last_place: Tensor) -> Noise:
    """The noise of sums that were followed through their roundings to half precision.

    A rounding goes the other way where a boundary lies within the error of the term added, u |t|. Of a sum that is
    the chance u sum(|t|) / last_place, where u sum(|t|) <= u sqrt(n sum(t^2)) <= sqrt(6) sigma; last_place is the
    largest, and half of it usual. At least a quarter of a turn is expected in the whole output: with the margin of a
    segment, four are allowed.
    """
    least = last_place.square() / (4 * last_place.numel())
    turns = torch.maximum(math.sqrt(6) * noise.sigma * last_place, least) / 4
    return Noise(torch.sqrt(noise.sigma.square() + turns), noise.hard, 2 * last_place)


def _terms(op: Op, inputs: list[Tensor], arithmetic: Arithmetic) -> int:
    """Length of the sum in floating point: block types add the products of a block as integers.

    Eight more for adding up the lanes of a vector and multiplying by scales.
    """
    n = {
        "linear": inputs[0][0].numel(),
        "scores": inputs[0].shape[-1],
        "weighted_values": inputs[0].shape[-1],
    }[op.kind]
    return n // (rounding_named(arithmetic.operands).block or n) + 8


def _mean_square(x: Tensor) -> Tensor:
    """Relative error of 1 / sqrt(mean(x^2)) in units: half that of a sum of n positive terms."""
    x2 = x.square()
    n, total = x.shape[-1], x2.sum(-1, keepdim=True)
    spread = x2.square().sum(-1, keepdim=True) / total.square().clamp(min=1e-300)
    return torch.sqrt((n * spread / 2 + n / 3) / 3) / 2 + 1


def _rope(op: Op, inputs: list[Tensor], y: Tensor, unit: float, half: float) -> Tensor:
    """An angle is a float32 product: pair i's is off by i + 3 roundings, where powers are taken by multiplying."""
    rope = op.attrs["rope"]
    factors = inputs[2] if len(inputs) > 2 else None
    angles = rope_angles(inputs[1], factors, rope).abs()
    steps = torch.arange(rope.n_rot // 2, device=y.device) + 3.0
    slip = unit * (angles * steps + 2)[:, None, :]
    rotated = y[..., : rope.n_rot].abs()
    a, b = rotated.unflatten(-1, (-1, 2) if rope.pairing == "neighbours" else (2, -1)).unbind(
        -1 if rope.pairing == "neighbours" else -2
    )
    radius = torch.hypot(a, b)
    error = radius * (slip + 2 * unit + 3 * half)
    pair = torch.stack((error, error), -1 if rope.pairing == "neighbours" else -2).flatten(-2)
    return torch.cat((pair, torch.zeros_like(y[..., rope.n_rot :])), -1)


def _softmax(op: Op, inputs: list[Tensor], y: Tensor, unit: float, half: float) -> Tensor:
    """exp magnifies the rounding of its argument: scaled score, maximum and their difference, a unit of each."""
    scores, queries, keys = inputs
    hidden = op.attrs.get("mask", causal)(queries, keys)
    scaled = (scores * op.attrs["scale"]).masked_fill(hidden, -math.inf)
    largest = scaled.amax(-1, keepdim=True)
    sizes = (scaled.abs() + largest.abs() + (largest - scaled)).masked_fill(hidden, 0.0)
    return y * ((unit + half) * sizes + 4 * unit)
