"""Mistakes in rotary embedding."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Context, Seen, Variants, Where, computing
from tracediff.model.graph import Op
from tracediff.numerics.kinds.rope import pairs_of, rope

AREA = Area()
ROPE = Where(("rope",))


@AREA.mistake(
    "rope_pairing", "rope pairs the wrong channels", "the rope kernel's pairing, and the family's rope type",
    ROPE, "ik_llama.cpp#2290",
)  # fmt: skip
def _pairing(op: Op, _: Context) -> Variants:
    rope = op.attrs["rope"]
    words = {"halves": "halves (i, i + n/2)", "neighbours": "neighbouring channels (2i, 2i + 1)"}
    wrong = "halves" if rope.pairing == "neighbours" else "neighbours"
    yield (
        op.with_attrs(rope=replace(rope, pairing=wrong)),
        f"rope pairs {words[wrong]}; this model pairs {words[rope.pairing]}",
    )


@AREA.mistake(
    "rope_theta", "another base frequency", "rope.freq_base of the file, not a default", ROPE, "candle#3746",
)  # fmt: skip
def _theta(op: Op, context: Context) -> Variants:
    rope = op.attrs["rope"]
    tried = [t for t in (1e4, 1e6, 5e5, 1e5) if t != rope.theta]
    if context.seen is None:
        tried = tried[:1]
    elif (fitted := _fitted_theta(op, context.seen)) is not None:
        tried.append(fitted)
    for theta in tried:
        yield (
            op.with_attrs(rope=replace(rope, theta=theta)),
            f"rope's base is {theta:.6g} instead of {rope.theta:.6g}",
        )


def _angles_of(op: Op, seen: Seen) -> tuple[Tensor, Tensor] | None:
    """Angle by which each pair turned at the first position that turns at all, and that position."""
    rope, x, y = op.attrs["rope"], seen.inputs[0], seen.output
    positions = seen.inputs[1]
    rows = torch.nonzero(positions > 0).flatten()
    if not len(rows):
        return None
    row = rows[0]
    (a, b), (c, d) = (pairs_of(v[row, ..., : rope.n_rot], rope) for v in (x, y))
    turned = torch.atan2((a * d - b * c).sum(0), (a * c + b * d).sum(0))
    return turned, positions[row]


def _fitted_theta(op: Op, seen: Seen) -> float | None:
    """From the slope of log(angle) over the pairs: angle_i = p theta^(-2i/n)."""
    found = _angles_of(op, seen)
    if found is None:
        return None
    angles, position = found
    n = op.attrs["rope"].n_rot
    usable = [i for i in range(1, n // 2) if angles[i] > 1e-9 and float(position) < math.pi]
    if not usable:
        return None
    i = usable[-1]
    return float((float(angles[i]) / float(position)) ** (-n / (2 * i)))


@AREA.mistake(
    "rope_factors_ignored", "the frequency factors of rope_freqs.weight are ignored",
    "whether rope_freqs.weight divides the frequencies (Llama 3.1 and later)", ROPE, "llama.cpp#8676",
)  # fmt: skip
def _no_factors(op: Op, _: Context) -> Variants:
    if op.weights:
        yield replace(op, weights=()), "rope_freqs.weight is ignored"


@AREA.mistake(
    "rope_scaling_ignored", "rope scaling is ignored", "rope.scaling.* of the file", ROPE,
)  # fmt: skip
def _no_scaling(op: Op, _: Context) -> Variants:
    rope = op.attrs["rope"]
    plain = replace(rope, freq_scale=1.0, ext_factor=0.0, magnitude=1.0)
    if plain != rope:
        yield op.with_attrs(rope=plain), "rope scaling is ignored: plain frequencies are used"


@AREA.mistake(
    "rope_magnitude", "YaRN's attention factor is dropped or applied twice", "mscale in the rope kernel",
    ROPE, "llama.cpp#17945",
)  # fmt: skip
def _magnitude(op: Op, _: Context) -> Variants:
    rope = op.attrs["rope"]
    if rope.magnitude != 1.0:
        yield op.with_attrs(rope=replace(rope, magnitude=1.0)), "YaRN's attention factor is dropped"
        yield (
            op.with_attrs(rope=replace(rope, magnitude=rope.magnitude**2)),
            "YaRN's attention factor is applied twice",
        )


@AREA.mistake(
    "rope_dim", "frequencies are spread over the whole head, not over the rotary dimension",
    "the denominator of the frequency exponent", ROPE, "pie#602",
)  # fmt: skip
def _rope_dim(op: Op, context: Context) -> Variants:
    rope, head_dim = op.attrs["rope"], op.axes[-1]
    if rope.n_rot != head_dim:
        theta = rope.theta ** (rope.n_rot / head_dim)
        yield (
            op.with_attrs(rope=replace(rope, theta=theta)),
            "frequencies use head_dim where the rotary dimension belongs",
        )
        yield (
            op.with_attrs(rope=replace(rope, n_rot=head_dim)),
            "all channels are rotated, not only the rotary dimension",
        )


@AREA.mistake("rope_reversed", "rope turns the wrong way", "the sign of the sine", ROPE)
def _reversed(op: Op, _: Context) -> Variants:
    def function(x: Tensor, positions: Tensor, factors: Tensor | None = None, **attrs: Any) -> Tensor:
        return rope(x, -positions, factors, **attrs)

    yield computing(op, function), "rope turns the wrong way: the sine's sign is flipped"


def _repositioned(op: Op, move: Callable[[Tensor], Tensor]) -> Op:
    def function(x: Tensor, positions: Tensor, factors: Tensor | None = None, **attrs: Any) -> Tensor:
        return rope(x, move(positions), factors, **attrs)

    return replace(op, function=function)


@AREA.mistake(
    "rope_decode_at_zero", "decode steps are rotated as if at position 0", "the cache offset of the position ids",
    ROPE, "mlx-vlm#1983",
)  # fmt: skip
def _at_zero(op: Op, _: Context) -> Variants:
    def move(positions: Tensor) -> Tensor:
        return positions * 0 if len(positions) == 1 else positions

    yield _repositioned(op, move), "the decode step is rotated as if at position 0"


@AREA.mistake(
    "rope_chunk_restarts", "a later chunk of tokens restarts its positions at 0", "the position ids of later chunks",
    ROPE, "transformers#43082",
)  # fmt: skip
def _chunk(op: Op, _: Context) -> Variants:
    yield _repositioned(op, lambda p: p - p[0]), "positions of this step restart at 0"


@AREA.mistake(
    "rope_decode_shifted", "decode positions are off by one", "the position of the first decoded token", ROPE,
    "openpi#705",
)  # fmt: skip
def _decode_shifted(op: Op, _: Context) -> Variants:
    for by in (1, -1):
        yield (
            _repositioned(op, lambda p, by=by: p + by if len(p) == 1 else p),  # type: ignore[misc]
            f"decode positions are shifted by {by:+d}",
        )


@AREA.mistake("rope_shifted", "positions are shifted", "the first position of the sequence", ROPE)
def _shifted(op: Op, context: Context) -> Variants:
    for by in (1,) if context.seen is None else (1, -1, 2, -2, 3, -3):
        yield _repositioned(op, lambda p, by=by: p + by), f"positions are shifted by {by:+d}"  # type: ignore[misc]


@AREA.mistake("rope_skipped", "rope is not applied", "whether rope is applied at all", ROPE)
def _no_rope(op: Op, _: Context) -> Variants:
    yield (
        computing(op, lambda x, positions, factors=None, rope=None: x),
        "the input passes through unrotated",
    )
