"""Which rounding took values to what was seen of them: by what is named, or by the lattice that they lie on."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from tracediff.numerics.roundings import by_rule, calibrated, is_calibrated, read_as, rounding_named
from tracediff.numerics.sizes import group_sizes

_LISTED = ("q8_0", "stored q8_0", "q8_K", "older q8_K")
# What integers of groups are called, more usual ones first; truncated ones are a mistake.
_KINDS = (
    "int8", "away int8", "uint8", "even uint8", "wide int8", "divided int8", "full int8", "fp8", "mxfp8", "int4",
    "uint4", "even uint4", "wide int4", "full int4", "mxfp4", "int6", "int16",
)  # fmt: skip
_ENDS = ("", "narrow ", "flipped ")  # -128 to 127, -127 to 127, -127 to 128
_SPREAD = 6.0  # standard deviations that a value may be seen from where it is
_NEAR = 0.01  # of a step: as near to where it is, for scales differ by their last digits
_SEEN = 0.995  # of the values that must lie where a rounding takes them: single ones turn
_DIGITS = 3  # of that share: of what differs by less the more usual comes first
_COARSE = 0.1  # of a step: what is seen less well than that tells no integers
_LARGEST = 260.0  # integers up to the largest value: finer lattices, of 16 bits, are asked for by their names alone
_DENSITY = 6  # of the lattices that are tried from one to that
_ON_IT = 0.95  # mean of cos(2 pi x / scale) of values on the lattice; of others it is about 0
_DIFFERENT = 12  # values beside 0 that tell a lattice
_GROUPS, _VALUES = 24, 48  # that are looked at
_CONSTANT = 2e-5  # relative: a quotient that all groups have
# Beyond that what is cut off is no choice: activations are clipped at 0.85 of the largest and more.
_CLIPPED = 0.85


class _Lattice(NamedTuple):
    """Groups of values that are multiples of a scale each: the `largest` of each, the `scales`, and how many of these
    the farthest is.
    """

    largest: Tensor
    scales: Tensor
    farthest: int


def recognised(x: Tensor, seen: Tensor, spread: Tensor, half: str = "") -> list[str]:
    """The names of roundings that take x [T, n] to what was seen of it, which has a standard deviation [n], the nearest
    first; none where x is as it was. What was read in a `half` precision shows no lattice: rules are tried by name.
    """
    if _share("f64", x, seen, spread) >= _SEEN:
        return []
    names = _names_in(half, x.shape[-1]) if half else _names(x, seen, spread)
    shares = {name: _share(read_as(name, half or "f64"), x, seen, spread) for name in dict.fromkeys(names)}
    near = {name: round(share, _DIGITS) for name, share in shares.items() if share >= _SEEN}
    return sorted(near, key=lambda name: -near[name])


def _share(name: str, x: Tensor, seen: Tensor, spread: Tensor) -> float:
    """Of the values as many as lie where the rounding takes them: those that turned are a step away."""
    rounding = rounding_named(name)
    return float(((rounding(x) - seen).abs() <= _SPREAD * spread + _NEAR * rounding.step(x)).double().mean())


def _names(x: Tensor, seen: Tensor, spread: Tensor) -> Iterator[str]:
    """What it may be."""
    sizes = group_sizes(x.shape[-1])
    yield from (name for name in _LISTED if rounding_named(name).divides(x.shape[-1]))
    for size in ("row", "tensor", *sizes[1:]):
        yield from (f"{kind}/{size}" for kind in _KINDS)
    for size in sizes:
        lattice = _lattice(x, seen, spread, size)
        if lattice is not None:
            for name in _by_lattice(x, lattice, "row" if size == sizes[0] else str(size)):
                yield from (name, f"narrow {name}") if is_calibrated(name) else (f"{at}{name}" for at in _ENDS)


def _names_in(half: str, n: int) -> Iterator[str]:
    """What matrices of n columns may be held in that are read in half precision: with scales in that, too."""
    sizes = group_sizes(n)
    for size in ("row", "tensor", *sizes[1:]):
        yield from (f"{kind}/{size}" for kind in _KINDS)
        for bits, by_kept in product((8, 4), (True, False)):
            ends = (2.0 ** (bits - 1) - less for less in (1.0, 0.5, 0.0))
            rules = (by_rule(f"int{bits}/{size}", end, half, by_kept) for end in ends)
            yield from (f"{at}{rule}" for rule in rules for at in _ENDS)


def _lattice(x: Tensor, seen: Tensor, spread: Tensor, size: int) -> _Lattice | None:
    """Groups of so many as multiples of a scale each, where most are; of a few that are looked at."""
    largest, values, spreads = (of.unflatten(-1, (-1, size)).flatten(0, -2) for of in (x, seen, spread.expand_as(x)))
    largest = largest.abs().amax(-1)
    order = torch.arange(len(values))[:: max(1, len(values) // _GROUPS)]
    found = [(i, of) for i in order.tolist() if (of := _scale(values[i], largest[i], spreads[i])) is not None]
    if 2 * len(found) <= len(order) or len(found) < 2:
        return None
    at, scales = torch.tensor([i for i, _ in found]), torch.stack([scale for _, scale in found])
    farthest = int((values[at].abs().amax(-1) / scales).round().amax())
    return _Lattice(largest[at], scales, farthest)


def _scale(values: Tensor, largest: Tensor, spread: Tensor) -> Tensor | None:
    """The scale of which these are multiples, the largest that there is."""
    told = values.abs() > 20 * spread  # the others are 0, or are seen too little
    if int(told.sum()) < _DIFFERENT or not largest > 0:
        return None
    some = values[told][:: max(1, int(told.sum()) // _VALUES)]
    lasts = torch.arange(1.0, _LARGEST, 1 / _DENSITY, dtype=values.dtype)
    phases = (2 * math.pi / largest) * lasts[:, None] * some
    on_it = torch.hypot(phases.cos().mean(-1), phases.sin().mean(-1))
    near = (on_it > 0.5).nonzero().flatten()
    for place in near.tolist():  # the coarsest first; each is refined before it is believed
        scale = largest / lasts[place]
        for _ in range(4):
            whole = (some / scale).round()
            scale = (some * whole).sum() / whole.square().sum().clamp(min=1.0)
        phases = 2 * math.pi * (values[told] / scale)
        is_whole = bool(whole.all()) and float(phases.cos().mean()) > _ON_IT
        if is_whole and float(spread[told].max()) < _COARSE * float(scale):
            return scale
    return None


def is_of_one_token(largest: Tensor, scale: float) -> bool:
    """Whether a scale of tokens whose `largest` magnitudes [T] are these is that of one of them, which has not the
    largest of all: no calibration's, then.
    """
    return bool((((largest / (127 * scale) - 1).abs() < _CONSTANT) & (largest < largest.amax())).any())


def _by_lattice(x: Tensor, lattice: _Lattice, size: str) -> Iterator[str]:
    """The rules that give these scales."""
    largest, scales, farthest = lattice
    bits = 2 + math.floor(math.log2(max(1, farthest - 1)))  # the farthest may be one more below 0
    name, lasts = f"int{bits}/{size}", largest / scales
    several = len(x) > 1  # of one token its own scale is a constant, too
    if several and _is_constant(scales) and bits == 8 and not is_of_one_token(x.abs().amax(-1), float(scales.mean())):
        yield calibrated("int8", float(scales.mean()))
    last, end = float(lasts.median()), 2.0 ** (bits - 1)
    usual = [of for of in (end - 1, end - 0.5, end) if abs(of / last - 1) < 0.01]
    if _is_constant(lasts):
        last = next((of for of in usual if abs(of / last - 1) < _CONSTANT), last)
        if last <= end / _CLIPPED:
            yield by_rule(name, last)
        return
    if float((scales.log2() - scales.log2().round()).abs().median()) < _CONSTANT:
        yield from (by_rule(f"int8/{size}", of, "2^n", by_kept=True) for of in (127.0, 128.0))
        yield from (by_rule(name, of, "2^n", by_kept=True) for of in (end - 1, end))
        return
    for kept in ("f16", "bf16"):
        yield from (by_rule(name, of, kept, by_kept) for by_kept in (False, True) for of in usual)


def _is_constant(quotients: Tensor) -> bool:
    """Whether all are the same, but for single ones."""
    middle = quotients.median()
    return float(((quotients - middle).abs() / middle).median()) < _CONSTANT
