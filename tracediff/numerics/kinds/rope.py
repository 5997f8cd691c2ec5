"""Rotary embedding (https://arxiv.org/abs/2104.09864)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tracediff.model.hparams import Rope
from tracediff.numerics.floats import Rounding
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Kind, Made, wide
from tracediff.numerics.roundings import rounding_named

_AS_IT_IS = rounding_named("f64")
# By as much an inverse frequency in float32 may be off, where powers are taken by multiplying, of up to 64 pairs.
_NEAR = 2.0**-18


def rope_angles(positions: Tensor, factors: Tensor | None, rope: Rope) -> Tensor:
    """Angle of each pair at each position in float64, [T, n_rot / 2] (ggml-cpu/ops.cpp, ggml_rope_cache_init)."""
    pair = torch.arange(rope.n_rot // 2, device=positions.device, dtype=torch.float64)
    turned = -positions.double() if rope.back else positions.double()
    extrapolated = turned[:, None] * rope.theta ** (-2.0 * pair / rope.n_rot)
    if factors is not None:
        extrapolated = extrapolated / factors.double()
    if not rope.ext_factor:
        return extrapolated * rope.freq_scale
    low, high = yarn_correction_range(rope)
    ramp = 1 - ((pair - low) / max(0.001, high - low)).clamp(0, 1)
    mix = ramp * rope.ext_factor
    return extrapolated * rope.freq_scale * (1 - mix) + extrapolated * mix


@dataclass(frozen=True, slots=True)
class Angles:
    """Angles that are made of rounded numbers: what positions, inverse frequencies and their products are kept in."""

    positions: str = "f64"
    frequencies: str = "f64"
    products: str = "f64"

    def __call__(self, positions: Tensor, factors: Tensor | None, rope: Rope, off: float = 0.0) -> Tensor:
        """In the place of `rope_angles`; `off` is the share that the inverse frequencies are off by."""
        position, frequency, product = map(rounding_named, (self.positions, self.frequencies, self.products))
        inverse = frequency(rope_angles(torch.ones_like(positions[:1]), factors, rope) * (1 + off))
        return product(position(positions.double())[:, None] * inverse)

    def turns(self, positions: Tensor, factors: Tensor | None, rope: Rope) -> Tensor:
        """By how much angles change where a rounding goes the other way; about nothing where none may."""
        below, above = (self(positions, factors, rope, off) for off in (-_NEAR, _NEAR))
        return (above - below).abs()


def yarn_range(rope: Rope) -> tuple[float, float]:
    """Between which pairs YaRN goes from extrapolation to interpolation: those of so many turns in the training's
    context.
    """

    def pair_with(rotations: float) -> float:
        turns = math.log(rope.n_ctx_orig / (rotations * 2 * math.pi))
        return rope.n_rot * turns / (2 * math.log(rope.theta))

    return pair_with(rope.beta_fast), pair_with(rope.beta_slow)


def yarn_correction_range(rope: Rope) -> tuple[float, float]:
    """The same, rounded outwards to pairs that there are (ggml.c, ggml_rope_yarn_corr_dims)."""
    low, high = yarn_range(rope)
    return max(0, math.floor(low)), min(rope.n_rot - 1, math.ceil(high))


def rope(
    x: Tensor,
    positions: Tensor,
    factors: Tensor | None = None,
    *,
    rope: Rope,
    tables: Rounding = _AS_IT_IS,
    angles: Callable[[Tensor, Tensor | None, Rope], Tensor] = rope_angles,
) -> Tensor:
    """Rotate pairs of channels of [T, heads, D] by their angles; those before and behind n_rot of them pass through.

    `tables` is what an engine holds cosines and sines in, `angles` how a mistaken one makes them.
    """
    by = angles(positions, factors, rope)[:, None, :]
    cos, sin = (tables(f(by).mul(rope.magnitude).to(wide(x).dtype)) for f in (torch.cos, torch.sin))
    before, rotated, rest = wide(x).tensor_split((rope.first, rope.first + rope.n_rot), -1)
    a, b = pairs_of(rotated, rope)
    return torch.cat((before, together(a * cos - b * sin, a * sin + b * cos, rope), rest), -1).to(x.dtype)


def pairs_of(rotated: Tensor, rope: Rope) -> tuple[Tensor, ...]:
    """The two channels of each pair, [..., n_rot] -> twice [..., n_rot / 2]."""
    neighbours = rope.pairing == "neighbours"
    return rotated.unflatten(-1, (-1, 2) if neighbours else (2, -1)).unbind(-1 if neighbours else -2)


def together(a: Tensor, b: Tensor, rope: Rope) -> Tensor:
    """The two channels of each pair in their places, twice [..., n_rot / 2] -> [..., n_rot]."""
    return torch.stack((a, b), -1 if rope.pairing == "neighbours" else -2).flatten(-2)


def _computed(call: Call) -> Tensor:
    """A position times a frequency does not survive half precision: no engine stores factors in it."""
    factors = (call.weights.load(weight, torch.float64) for weight in call.op.weights)
    tables = rounding_named(call.arithmetic.stored)
    held = {"tables": tables} if call.function is rope else {}  # a mistaken one has tables of its own
    return call.function(*call.inputs, *factors, **call.op.attrs, **held)


def _noise(made: Made) -> Noise:
    """An angle is a float32 product: pair i's is off by i + 3 roundings, where powers are taken by multiplying."""
    rope, y, unit = made.op.attrs["rope"], made.y, made.unit
    factors = made.weights.load(made.op.weights[0]) if made.op.weights else None
    angles = rope_angles(made.inputs[1], factors, rope).abs()
    if made.op.function and not _is_right(made, factors):  # a mistaken one may turn any pair as the first at 2 p
        angles = torch.maximum(angles, 2 * made.inputs[1].abs().to(angles)[:, None])
    steps = torch.arange(rope.n_rot // 2, device=y.device) + 3.0
    slip = unit * (angles * steps + 2)
    if coarse := made.op.attrs.get("angles"):
        slip = slip + coarse.turns(made.inputs[1], factors, rope)
    size, held_in = made.size, made.arithmetic.stored
    before, rotated, rest = size.tensor_split((rope.first, rope.first + rope.n_rot), -1)
    pairs = torch.hypot(*pairs_of(rotated, rope))

    def of_all(each: Tensor) -> Tensor:
        """What both channels of a pair have, beside those that pass through."""
        return torch.cat((torch.zeros_like(before), together(each, each, rope), torch.zeros_like(rest)), -1)

    hard = made.stored + of_all(pairs * (slip[:, None] + 2 * unit + 3 * made.between))
    sigma = unit * size
    if held_in != "f64" and not made.op.function:
        turns = _turns(rounding_named(held_in), angles, slip, rope.magnitude)
        sigma = torch.hypot(sigma, of_all(pairs * turns[:, None]) * math.sqrt(1 / 2))
    return Noise(sigma, hard)


def _is_right(made: Made, factors: Tensor | None) -> bool:
    """Whether a function in its place does nothing else here, as a mistake of decode steps does in prompts."""
    x, positions, *others = made.inputs
    return not others and torch.equal(made.y, rope(x, positions, factors, rope=made.op.attrs["rope"]))


def _turns(tables: Rounding, angles: Tensor, slip: Tensor, magnitude: float) -> Tensor:
    """By how much a pair is off, as a share of it, where an angle's own error takes its cosine or sine across a
    boundary of the tables, [T, pairs]: in float16 one in fifty may at position 90, and of those every other one does.
    """
    sides = [[tables(f(at) * magnitude) for f in (torch.cos, torch.sin)] for at in (angles - slip, angles + slip)]
    return torch.hypot(*(above - below for below, above in zip(*sides, strict=True)))


KINDS = (Kind("rope", rope, ("x", "positions"), compute=_computed, noise=_noise, scheme="rope", keeps_part=True),)
