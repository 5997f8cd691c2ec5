"""What all matmuls share: the type of their sums, and their noise."""

import math

import torch
from torch import Tensor

from tracediff.model.graph import Weight
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.floats import Rounding
from tracediff.numerics.floors import LUCK, TOGETHER, Noise, variance_of_sums, variance_of_truncated_sums
from tracediff.numerics.kinds.kind import Made
from tracediff.numerics.roundings import rounding_named


def sums_in(arithmetic: Arithmetic, dtype: torch.dtype) -> torch.dtype:
    """ggml adds the products of a block as integers: of 32 or 256 none is rounded, as they would be in float32."""
    return torch.float64 if rounding_named(arithmetic.operands).in_blocks else dtype


def turns(x: Tensor, name: str) -> Tensor:
    """The sizes of what values on a boundary of the rounding change by if they go the other way."""
    return rounding_named(name).flips(x).abs()


def rounding_of(name: str, weight: Weight, weights: Weights) -> Rounding:
    """How a matrix is held: with one scale by its largest value, also where only a part of it is rounded. What is none,
    or has rows that are no multiples of its blocks, is left as it is: a mistaken op may read that in its place.
    """
    rounding = rounding_named(name)
    if rounding.in_blocks and (len(weight.shape) < 2 or not rounding.divides(weight.shape[-1])):
        return rounding_named("f64")
    return rounding.within(*weights.span(weight)) if rounding.is_whole else rounding


def noise_of_sums(made: Made, length: int) -> Noise:
    """Of a matmul over `length` channels or keys. Uses up `made.energy`: of logits each copy is as large as a model's
    layers.
    """
    energy, stored = made.energy, made.stored
    assert energy.value is not None
    if made.arithmetic.truncates:
        n_sums = math.ceil(length / TOGETHER[made.arithmetic.accumulate])
        variance = variance_of_truncated_sums(n_sums, energy.value, made.y)
    else:
        variance = variance_of_sums(_terms(length, made.arithmetic), energy.value, made.y)
    variance = variance.mul_(made.unit**2)
    if energy.turned is not None:  # what is stored is rounded with it
        variance = variance.add_(energy.turned, alpha=(1 + made.kept) ** 2)
    sigma = variance.sqrt_()
    # What a bias is added to is rounded before, and of integers once more, when it is scaled (torchao); the product of
    # two scales as well (Keras).
    if made.half:
        product = made.y if energy.product is None else energy.product
        scaled = [rounding_named(of).in_blocks for of in (made.arithmetic.stored, made.arithmetic.operands)]
        n_roundings = (energy.product is not None) + (sum(scaled) if scaled[0] else 0)
        stored = stored + n_roundings * made.kept * product.abs() if n_roundings else stored
    noise = Noise(sigma, stored)
    if made.arithmetic.before_bias != "f64" and energy.product is not None:
        noise = _turned_before_bias(noise, energy.product, rounding_named(made.arithmetic.before_bias))
    return noise if energy.last_place is None else _followed(noise, energy.last_place)


def _turned_before_bias(noise: Noise, product: Tensor, rounding: Rounding) -> Noise:
    """The noise of sums that were rounded before a bias was added: one that lies so near to a boundary that its error
    may take it across is off by a step, with the chance that it does.
    """
    step = rounding.step(product)
    to_boundary = step / 2 - (rounding(product) - product).abs()
    chance = torch.erfc(to_boundary / (math.sqrt(2) * noise.sigma).clamp(min=1e-300)) / 2
    turned = torch.where(chance > LUCK / product.numel(), step, 0.0)
    return Noise((noise.sigma.square() + chance * turned.square()).sqrt(), noise.hard, turned)


def _terms(length: int, arithmetic: Arithmetic) -> int:
    """Length of the sum in floating point: of integers a block is one term.

    Eight more for adding up the lanes of a vector and multiplying by scales.
    """
    block = rounding_named(arithmetic.operands).width(length) if arithmetic.accumulate == "i32" else 1
    return length // block + 8


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
