"""Mistakes in rotary embedding."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.fit import fitted
from tracediff.diagnose.mistakes.mistake import (
    Area,
    Context,
    Number,
    Seen,
    Variant,
    Variants,
    Where,
    computing,
    weights_of,
)
from tracediff.english import told_apart
from tracediff.model.graph import Op
from tracediff.model.hparams import Pairing, Rope
from tracediff.model.weights import reading, values_of
from tracediff.numerics.kinds.rope import Angles, pairs_of, rope_angles, together, yarn_range
from tracediff.numerics.kinds.rope import rope as turned

AREA = Area()
_OTHER: dict[Pairing, Pairing] = {"neighbours": "halves", "halves": "neighbours"}
_Way = Callable[[Tensor, Tensor], Tensor]  # of angles of pairs, and those of position 1, others
_WHOLE = 1e-4  # to which a number of pairs is whole
_ROWS = 64  # tokens that a base is fitted to
_OCTAVES = range(-12, 13)  # about the right base, or scale
_FACTORS = (0.5, 2.0, 0.25, 4.0, 0.125, 8.0)  # of linear rope scaling
_MORE = (2, 4, 8, 16, 32, _ROWS)  # tokens that a scale is fitted to, one after the other
_COARSE = {
    ("frequencies",): "inverse frequencies are",
    ("products",): "angles, position times frequency, are",
    ("frequencies", "products"): "inverse frequencies and angles are",
    ("positions",): "positions are",
    ("positions", "frequencies", "products"): "positions, inverse frequencies and angles are",
}
ROPE = Where(("rope",))


def _with(op: Op, **numbers: Any) -> Op:
    """The op with other numbers of its rotation."""
    return op.with_attrs(rope=replace(op.attrs["rope"], **numbers))


@AREA.mistake(
    "rope_pairing", "rope pairs the wrong channels", "the rope kernel's pairing, and the family's rope type",
    ROPE, "ik_llama.cpp#2290",
)  # fmt: skip
def _pairing(op: Op, _: Context) -> Variants:
    rope = op.attrs["rope"]
    words = {"halves": "halves (i, i + n/2)", "neighbours": "neighbouring channels (2i, 2i + 1)"}
    wrong = _OTHER[rope.pairing]
    yield _with(op, pairing=wrong), f"rope pairs {words[wrong]}; this model pairs {words[rope.pairing]}"


def _turning(op: Op, theta: float) -> Variant:
    right = op.attrs["rope"]
    words = "rope's base is {} instead of {}".format(*told_apart(theta, right.theta))
    return Variant(_with(op, theta=theta), words, fitted=True)


@AREA.mistake(
    "rope_theta", "another base frequency", "rope.freq_base of the file, not a default", ROPE, "candle#3746",
    Number(lambda op: float(op.attrs["rope"].theta), _turning),
)  # fmt: skip
def _theta(op: Op, context: Context) -> Variants:
    rope = op.attrs["rope"]
    for theta in (1e4, 1e6, 5e5, 1e5):
        if theta != rope.theta:
            yield _turning(op, theta)._replace(fitted=False)
    if (pairs := rope.n_rot // 2) > 1:
        words = f"frequencies end at 1/base, as of linspace with its end: i / {pairs - 1} where i / {pairs} belongs"
        yield _with(op, theta=rope.theta ** (pairs / (pairs - 1))), words
    starts = [rope.theta * 2.0**i for i in _OCTAVES]
    # Of the tokens that turn least, few angles go round.
    if context.seen and (number := _fitted(op, context, context.seen, lambda theta: {"theta": theta}, starts)):
        yield _turning(op, number)


def _fitted(
    op: Op, context: Context, seen: Seen, numbers: Callable[[float], dict[str, float]], starts: Sequence[float],
    rows: int = _ROWS,
) -> float | None:  # fmt: skip
    """The number of rope's that is nearest to what was seen of its first `rows` tokens."""
    x, positions = seen.inputs
    factors = weights_of(op, context)
    first = positions.argsort()[:rows]
    right = op.attrs["rope"]

    def made(number: float) -> Tensor:
        return turned(x[first], positions[first], *factors, rope=replace(right, **numbers(number)))

    return fitted(made, seen.output[first], starts)


@AREA.mistake(
    "rope_factors_ignored", "the frequency factors of a file are ignored",
    "whether rope_freqs.weight (Llama 3.1 and later), or rope_factors_*.weight (phi3), divides the frequencies", ROPE,
    "llama.cpp#8676",
)  # fmt: skip
def _no_factors(op: Op, _: Context) -> Variants:
    if op.weights:
        yield replace(op, weights=()), f"{op.weights[0].name} is ignored"


@AREA.mistake(
    "rope_factors_multiplied", "frequencies are multiplied by a file's factors",
    "whether the file's factors divide the frequencies: they are those of wavelengths", ROPE,
)  # fmt: skip
def _multiplied(op: Op, _: Context) -> Variants:
    if op.weights:
        words = f"frequencies are multiplied by {op.weights[0].name}, which they are divided by"
        yield reading(op, lambda file, info: 1 / values_of(file, info)), words


@AREA.mistake(
    "rope_factors_of_another_length", "rope has the factors of another length of context",
    "from which length on rope_factors_long.weight is taken (llama.cpp: of the context, others: of the prompt)", ROPE,
)  # fmt: skip
def _other_factors(op: Op, context: Context) -> Variants:
    kinds = ("rope_factors_short", "rope_factors_long")
    for right, wrong in (kinds, kinds[::-1]):
        name = op.weights[0].name.replace(right, wrong) if op.weights else ""
        if name in context.file.tensors and name != op.weights[0].name:
            n = op.attrs["rope"].n_ctx_orig
            words = f"rope takes {name}; a context of {'at most' if wrong == kinds[1] else 'more than'} {n:,} positions"
            yield replace(op, weights=(replace(op.weights[0], name=name),)), f"{words} has {op.weights[0].name}"


@AREA.mistake("rope_scaling_ignored", "rope scaling is ignored", "rope.scaling.* of the file", ROPE)
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
    mscale = 0.1 * math.log(1 / rope.freq_scale) + 1 if rope.freq_scale < 1 else 1.0
    for by, words in ((mscale, "multiplied"), (1 / mscale, "divided")):
        if mscale != 1.0 and not math.isclose(by * rope.magnitude, 1.0):
            said = f"cos and sin are {words} by YaRN's 0.1 ln({1 / rope.freq_scale:.4g}) + 1 = {mscale:.4g}"
            yield _with(op, magnitude=by * rope.magnitude), f"{said} once more"
    if rope.magnitude != 1.0:
        yield _with(op, magnitude=1.0), "YaRN's attention factor is dropped"
        yield _with(op, magnitude=rope.magnitude**2), "YaRN's attention factor is applied twice"


@AREA.mistake(
    "rope_yarn", "YaRN mixes scaled and unscaled frequencies otherwise",
    "the ramp of YaRN: from the pairs that beta_fast tells to those of beta_slow, both rounded outwards", ROPE,
)  # fmt: skip
def _yarn(op: Op, _: Context) -> Variants:
    rope = op.attrs["rope"]
    if not rope.ext_factor:
        return
    yield (
        _with(op, ext_factor=0.0),
        f"all frequencies are divided by {1 / rope.freq_scale:.4g} (linear scaling); YaRN divides the slow ones alone",
    )
    betas = replace(rope, beta_fast=rope.beta_slow, beta_slow=rope.beta_fast)
    yield op.with_attrs(rope=betas), "beta_fast and beta_slow are exchanged"
    words = "YaRN's ramp runs the other way: the fast frequencies are divided, the slow ones kept"
    yield computing(op, partial(turned, angles=_reversed_ramp)), words
    words = "the pairs between which YaRN's ramp runs are not rounded outwards to whole ones"
    yield computing(op, partial(turned, angles=_ramp_as_it_is)), words


def _unscaled_angles(positions: Tensor, factors: Tensor | None, rope: Rope) -> Tensor:
    return rope_angles(positions, factors, replace(rope, ext_factor=0.0, freq_scale=1.0))


def _reversed_ramp(positions: Tensor, factors: Tensor | None, rope: Rope) -> Tensor:
    plain = _unscaled_angles(positions, factors, rope)
    return plain * (1 + rope.freq_scale) - rope_angles(positions, factors, rope)


def _ramp_as_it_is(positions: Tensor, factors: Tensor | None, rope: Rope) -> Tensor:
    plain = _unscaled_angles(positions, factors, rope)
    low, high = yarn_range(rope)
    pair = torch.arange(plain.shape[-1], device=plain.device, dtype=plain.dtype)
    scaled = ((pair - max(0, low)) / max(0.001, min(rope.n_rot - 1, high) - max(0, low))).clamp(0, 1)
    return plain * (1 + (rope.freq_scale - 1) * (1 - rope.ext_factor * (1 - scaled)))


@AREA.mistake(
    "rope_dim", "frequencies are spread over another number of channels than the rotary dimension",
    "the denominator of the frequency exponent", ROPE, "pie#602",
)  # fmt: skip
def _rope_dim(op: Op, context: Context) -> Variants:
    rope, head_dim = op.attrs["rope"], op.axes[-1]
    if rope.n_rot != head_dim:
        theta = rope.theta ** (rope.n_rot / head_dim)
        yield _with(op, theta=theta), "frequencies use head_dim where the rotary dimension belongs"
        if not op.weights:  # of as many factors as pairs
            yield _with(op, n_rot=head_dim, first=0), "all channels are rotated, not only the rotary dimension"
    h = context.graph.hparams
    others = {h.n_embd / h.n_head: "n_embd / n_head", rope.n_rot / 2: "half of it", rope.n_rot * 2: "twice that"}
    if len(op.axes) == 3 and isinstance(op.axes[1], int) and isinstance(head_dim, int):
        others.setdefault(op.axes[1] * head_dim, "the channels of all heads")
    for dim, words in others.items():
        if dim not in (rope.n_rot, head_dim):
            words = f"the frequency's exponent is divided by {dim:g} ({words}) where {rope.n_rot} belongs"
            yield _with(op, theta=rope.theta ** (rope.n_rot / dim)), words


@AREA.mistake(
    "rope_other_channels",
    "other channels of a head are rotated",
    "where the rotary dimension begins in a head",
    ROPE,
)
def _other_channels(op: Op, _: Context) -> Variants:
    rope, head_dim = op.attrs["rope"], op.axes[-1]
    if not isinstance(head_dim, int):
        return
    for first in dict.fromkeys((head_dim - rope.n_rot, 0)):
        if first != rope.first:
            rotated, belong = (f"{of} to {of + rope.n_rot - 1}" for of in (first, rope.first))
            words = f"channels {rotated} of each head are rotated, where {belong} are to be"
            yield _with(op, first=first), words


@AREA.mistake(
    "rope_angles_coarse", "rope's angles are made in half precision",
    "the type of inv_freq and of position ids: a model cast to half precision casts its buffers too", ROPE,
)  # fmt: skip
def _coarse(op: Op, _: Context) -> Variants:
    for dtype, name in (("bf16", "bfloat16"), ("f16", "float16")):
        for parts, words in _COARSE.items():
            rounded = Angles(**dict.fromkeys(parts, dtype))
            yield op.with_attrs(angles=rounded), f"rope's {words} {name}: only the tables of cos and sin may be"


@AREA.mistake(
    "rope_tables_repeated", "cos and sin lie as the other pairing has them",
    "how a pair's angle becomes its channels': one after the other where neighbours turn, n / 2 apart where halves do",
    ROPE,
)  # fmt: skip
def _other_tables(op: Op, _: Context) -> Variants:
    for lies, where in _lying(op):
        own, other = ("i // 2", "i % (n / 2)")[:: 1 if lies == "neighbours" else -1]
        words = f"channel i turns by the angle of pair {other}, where that of pair {own} belongs{where}"
        yield computing(op, partial(_turned_where_it_lies, lies=lies, tables=_OTHER[lies])), words


def _lying(op: Op) -> Iterator[tuple[Pairing, str]]:
    """How pairs may lie in an engine, and in words where it is not as in the file: whose rows of Q and K were put in
    another order for neighbours to be pairs, of a model whose halves are.
    """
    own: Pairing = op.attrs["rope"].pairing
    yield own, ""
    if own == "neighbours":
        yield "halves", ", in heads whose halves are pairs"


def _as_it_is(by: Tensor, _: Tensor) -> Tensor:
    return by


def _turned(
    x: Tensor, positions: Tensor, factors: Tensor | None = None, *, rope: Rope,
    tables: Pairing | None = None, crossed: tuple[Pairing, Pairing] | bool = True,
    ways: tuple[_Way, _Way] = (_as_it_is, _as_it_is), **_: Any,
) -> Tensor:  # fmt: skip
    """Channels times cosines, and those `crossed`, of each pair less the second, then the first, times sines; be they
    taken apart and put together in these pairings. The `tables` of both lie as another pairing has them, and are read
    by other angles in these `ways`.
    """
    before, rotated, rest = x.tensor_split((rope.first, rope.first + rope.n_rot), -1)
    by = rope_angles(positions, factors, rope)[:, None]
    one = rope_angles(torch.ones_like(positions[:1]), factors, rope)[:, None]
    each, lies = (way(by, one) for way in ways), replace(rope, pairing=tables or rope.pairing)
    of_cos, of_sin = (together(angles, angles, lies) for angles in each)
    cos, sin = of_cos.cos() * rope.magnitude, of_sin.sin() * rope.magnitude
    apart, put = (replace(rope, pairing=of) for of in (crossed if isinstance(crossed, tuple) else (rope.pairing,) * 2))
    a, b = pairs_of(rotated, apart)
    other = together(-b, a, put) if crossed else together(-a, b, put)
    return torch.cat((before, rotated * cos + other * sin, rest), -1).to(x.dtype)


# What one of two tables is read by, of a pair's own angles [T, pairs] and those of position 1, the likeliest first.
_ELSEWHERE: dict[str, _Way] = {
    "twice the position": lambda by, _: 2 * by,
    "positions that begin at 0 in each step": lambda by, _: by - by[:1],
    "half the position": lambda by, _: by / 2,
    "the next position": lambda by, one: by + one,
    "the position before": lambda by, one: by - one,
    "the next pair": lambda by, _: by.roll(-1, -1),
    "the pair before": lambda by, _: by.roll(1, -1),
}


@AREA.mistake(
    "rope_tables_apart", "sines are those of another angle than cosines are",
    "how rows of the tables of cos and of sin are found: both have as many values", ROPE,
)  # fmt: skip
def _apart(op: Op, context: Context) -> Variants:
    for words, move in islice(_ELSEWHERE.items(), None if context.seen else 2):
        for which, ways in {"cos": (move, _as_it_is), "sin": (_as_it_is, move)}.items():
            yield computing(op, partial(_turned, ways=ways)), f"{which} is that of {words}"


@AREA.mistake(
    "rope_not_crossed", "sin multiplies a channel itself, not the other of its pair",
    "rotate_half, or what stands for it: of each pair less the second, then the first", ROPE,
)  # fmt: skip
def _not_crossed(op: Op, _: Context) -> Variants:
    words = "sin multiplies each channel itself, the first of a pair with a minus, where the other of the pair belongs"
    yield computing(op, partial(_turned, crossed=False)), words
    for lies, where in _lying(op):
        for apart, put in ((_OTHER[lies], lies), (lies, _OTHER[lies])):
            words = f"sin multiplies channels that are taken apart as {apart} and put together as {put}{where}"
            yield computing(op, partial(_turned_where_it_lies, lies=lies, crossed=(apart, put))), words


def _turned_where_it_lies(
    x: Tensor, positions: Tensor, factors: Tensor | None = None, *, rope: Rope, lies: Pairing, **ways: Any
) -> Tensor:
    """The same of heads whose pairs lie in another way in the engine."""
    if lies == rope.pairing:
        return _turned(x, positions, factors, rope=rope, **ways)
    there = replace(rope, pairing=lies)

    def moved(x: Tensor, here: Rope, there: Rope) -> Tensor:
        before, rotated, rest = x.tensor_split((rope.first, rope.first + rope.n_rot), -1)
        a, b = pairs_of(rotated, here)
        return torch.cat((before, together(a, b, there), rest), -1)

    return moved(_turned(moved(x, rope, there), positions, factors, rope=there, **ways), there, rope)


@AREA.mistake(
    "rope_over_heads", "frequencies go on from head to head instead of anew in each",
    "the channel in the frequency's exponent, which is one of a head", ROPE,
)  # fmt: skip
def _over_heads(op: Op, context: Context) -> Variants:
    h = context.graph.hparams
    for n in {h.n_head: None, h.n_head_kv: None}:
        all_heads = n * h.head_dim
        words = f"the frequency's exponent counts the channels of all {n} heads, to {all_heads}, not those of each"
        yield computing(op, partial(_on_and_on, all_heads=all_heads)), words


def _on_and_on(
    x: Tensor, positions: Tensor, factors: Tensor | None = None, *, rope: Rope, all_heads: int, **attrs: Any
) -> Tensor:
    """Channel i of head h turns as i + h * head_dim of `all_heads` would."""
    of_all = replace(rope, theta=rope.theta ** (rope.n_rot / all_heads))
    slower = (rope.theta ** (-head * x.shape[-1] / all_heads) for head in range(x.shape[1]))
    heads = [
        turned(x[:, head : head + 1], positions.double() * slow, factors, rope=of_all, **attrs)
        for head, slow in enumerate(slower)
    ]
    return torch.cat(heads, 1)


def _repositioned(op: Op, move: Callable[[Tensor], Tensor]) -> Op:
    def function(x: Tensor, positions: Tensor, factors: Tensor | None = None, **attrs: Any) -> Tensor:
        return turned(x, move(positions), factors, **attrs)

    return computing(op, function)


@AREA.mistake("rope_reversed", "rope turns the wrong way", "the sign of the sine", ROPE)
def _reversed(op: Op, _: Context) -> Variants:
    yield _repositioned(op, lambda p: -p), "rope turns the wrong way: the sine's sign is flipped"


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


@AREA.mistake("rope_shifted", "positions are shifted", "the first position of the sequence", ROPE)
def _shifted(op: Op, context: Context) -> Variants:
    for by in (1,) if context.seen is None else (1, -1, 2, -2, 3, -3):
        yield _repositioned(op, lambda p, by=by: p + by), f"positions are shifted by {by:+d}"  # type: ignore[misc]


@AREA.mistake(
    "rope_decode_shifted", "decode positions are off by one", "the position of the first decoded token", ROPE,
    "openpi#705",
)  # fmt: skip
def _decode_shifted(op: Op, _: Context) -> Variants:
    for by in (1, -1):
        yield (
            _repositioned(op, lambda p, by=by: p + by if len(p) == 1 and p[0] else p),  # type: ignore[misc]
            f"decode positions are shifted by {by:+d}",
        )


def _scaling(op: Op, scale: float) -> Variant:
    right = op.attrs["rope"]
    words = "rope's positions are multiplied by {} instead of {}".format(*told_apart(scale, right.freq_scale))
    return Variant(_with(op, freq_scale=scale), words, fitted=True)


@AREA.mistake(
    "rope_scaled", "another scale of positions", "rope.scaling.* of the file: a linear factor divides positions, once",
    ROPE, number=Number(lambda op: float(op.attrs["rope"].freq_scale), _scaling),
)  # fmt: skip
def _scale(op: Op, context: Context) -> Variants:
    right = op.attrs["rope"].freq_scale
    for factor in _FACTORS:
        yield _scaling(op, right * factor)._replace(fitted=False)
    if context.seen is None:
        return
    number: float | None = None
    for rows in _MORE:  # the more positions the faster what is not quite right goes round
        starts = [right * 2.0**i for i in _OCTAVES] if number is None else [number]
        number = _fitted(op, context, context.seen, lambda scale: {"freq_scale": scale}, starts, rows) or number
    if number is not None and not _is_of_exponent(number / right, op.attrs["rope"]):
        yield _scaling(op, number)


def _is_of_exponent(factor: float, rope: Rope) -> bool:
    """Whether an exponent of the frequencies that is off by a whole number comes to this factor: that is said then."""
    pairs = rope.n_rot / 2 * math.log(factor) / math.log(rope.theta)
    return abs(pairs) > _WHOLE and abs(pairs - round(pairs)) < _WHOLE


@AREA.mistake("rope_skipped", "rope is not applied", "whether rope is applied at all", ROPE)
def _no_rope(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x, positions, *factors, **attrs: x), "the input passes through unrotated"


@AREA.mistake(
    "rope_before_norm", "rope comes before the norm of the heads", "the order of rope and the norm of Q and K", ROPE,
)  # fmt: skip
def _before_norm(op: Op, context: Context) -> Variants:
    norm = context.graph.ops.get(op.inputs[0])
    if norm is None or norm.kind != "rms_norm" or len(norm.weights) != 1 or any(op.seen):
        return
    (weight,) = weights_of(norm, context)

    def function(x: Tensor, positions: Tensor, *factors: Tensor, **attrs: Any) -> Tensor:
        # What is rotated is as long as before, in each head and in all of them: both are normed somewhere.
        w = weight.to(x) if weight.numel() == x.shape[-1] else weight.to(x).reshape(x.shape[1:])
        return turned(x / w, positions, *factors, **attrs) * w

    yield computing(op, function), "the norm's weight is applied after rope, not before"
