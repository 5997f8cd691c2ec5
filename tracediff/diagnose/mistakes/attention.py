"""Mistakes in attention."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.masks import SOFTMAX, is_bent, masked
from tracediff.diagnose.mistakes.mistake import (
    Area,
    Context,
    Number,
    Variant,
    Variants,
    Where,
    computing,
    fitted_attr,
)
from tracediff.diagnose.rearranged import SomeHeads
from tracediff.english import count, told_apart
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op
from tracediff.numerics.kinds.attention import alibi, scores, softmax, unseen_in

AREA = Area()
SCORES = Where(("scores",))
WITH_CACHE = Where(("scores", "weighted_values"))  # what multiplies with cached keys or values


def _caps(op: Op, graph: Graph) -> bool:
    """Whether it is one of the two factors that scores are capped with, before and after a tanh."""
    around = [reader.kind for reader, _ in graph.readers(op.name)]
    return "tanh" in (*around, *(graph[name].kind for name in op.inputs if name in graph))


def _scaled(op: Op, scale: float) -> Variant:
    words = "the attention scale is {} instead of {}".format(*told_apart(scale, op.attrs["scale"]))
    return Variant(op.with_attrs(scale=scale), words, fitted=True)


@AREA.mistake(
    "attention_scale", "another attention scale",
    "the scale, applied once: attention.scale of the file, as a rule 1/sqrt(channels of a query head)",
    Where(("softmax", "scale"), ("probs", "scores", "q")), "llama.cpp#8444",
    Number(lambda op: float(op.attrs["scale"]), _scaled),
)  # fmt: skip
def _scale(op: Op, context: Context) -> Variants:
    h, right = context.graph.hparams, op.attrs["scale"]
    if _caps(op, context.graph):
        return
    # Of latent attention it is the width of what is cached, not of a head.
    width = "attention.key_length" if _width_of_latents(context.file) else "head_dim"
    formulas = {
        "missing": 1.0, "applied twice": right**2, f"1/sqrt({width})": h.head_dim**-0.5,
        "1/sqrt(n_embd/n_head)": (h.n_embd / h.n_head) ** -0.5, "1/sqrt(n_embd)": h.n_embd**-0.5,
        f"1/{width}": 1 / h.head_dim, f"1/sqrt(n_head_kv * {width})": (h.n_head_kv * h.head_dim) ** -0.5,
        "ln 2 times what belongs, as of 2^x in the place of e^x": right * math.log(2),
        "1/ln 2 times what belongs, as of e^x in the place of 2^x": right / math.log(2),
        **_without_mscale(right, context.file),
    }  # fmt: skip
    named = {scale: word for word, scale in reversed(formulas.items())}  # of the same number the first
    for scale, word in reversed(named.items()):
        if not math.isclose(scale, right):
            yield op.with_attrs(scale=scale), f"the attention scale is {word} ({scale:.4g} instead of {right:.4g})"
    if context.seen and (number := fitted_attr(op, context, "scale", (right * 2.0**i for i in range(-8, 9)))):
        yield _scaled(op, number)


def _width_of_latents(file: GGUFFile) -> int | None:
    """The channels of a head where keys are made of latents; None of other attention."""
    width = file.metadata.get(f"{file.metadata.get('general.architecture')}.attention.key_length_mla")
    return width if isinstance(width, int) else None


def _without_mscale(right: float, file: GGUFFile) -> dict[str, float]:
    """Of latent attention with YaRN, whose scale is mscale^2 / sqrt(channels of a head): with other powers of it."""
    width = _width_of_latents(file)
    if width is None or math.isclose(square := right * math.sqrt(width), 1):
        return {}
    words = {
        0: "without YaRN's mscale^2",
        1: "times YaRN's mscale, which belongs squared",
        4: "times mscale^4",
    }
    return {f"1/sqrt({width}) {of}": width**-0.5 * square ** (power / 2) for power, of in words.items()}


@AREA.mistake(
    "scores_scaled", "scores are multiplied by the attention scale", "where the scale is applied, or what is recorded",
    SCORES,
)  # fmt: skip
def _scaled_scores(op: Op, context: Context) -> Variants:
    scale = context.graph.hparams.attention_scale
    if op.name.endswith("_scaled"):
        return  # they have it in them
    words = f"the scores have the scale ({scale:.4g}) in them; if they are only recorded so, call them {op.name}_scaled"
    yield computing(op, lambda q, k: scores(q, k) * scale), words


@AREA.mistake(
    "softmax_half", "the softmax's sum runs over half of the row", "the reduction across the thread block",
    SOFTMAX, "llama-orch bf9f4fba",
)  # fmt: skip
def _half_row(op: Op, _: Context) -> Variants:
    def function(*operands: Tensor, **attrs: Any) -> Tensor:
        right = softmax(*operands, **attrs)
        return right / right[..., : max(1, right.shape[-1] // 2)].sum(-1, keepdim=True)

    yield computing(op, function), "probabilities are divided by the sum of half the row"


@AREA.mistake(
    "softmax_without_maximum", "the softmax does not subtract the largest score: exp overflows float32 beyond 88",
    "the maximum that exp's argument is taken from", SOFTMAX, "llama-orch bf9f4fba",
)  # fmt: skip
def _no_maximum(op: Op, _: Context) -> Variants:
    if is_bent(op) or op.weights:
        return

    def function(scores: Tensor, queries: Tensor, keys: Tensor, **_: Any) -> Tensor:
        each = torch.exp(scores * op.attrs["scale"]).float().masked_fill(unseen_in(op.attrs, queries, keys), 0.0)
        return (each / each.sum(-1, keepdim=True)).to(scores.dtype)

    yield computing(op, function), "the largest score is not subtracted: exp overflows beyond 88"


@AREA.mistake(
    "softmax_axis", "the softmax, or its sum, runs along another axis", "the axis of the softmax: keys, the last one",
    SOFTMAX,
)  # fmt: skip
def _other_axis(op: Op, _: Context) -> Variants:
    if is_bent(op) or op.weights:
        return
    for axis, words in ((1, "queries"), (0, "heads")):
        for hides in (True, False):
            without = ", with no mask" if not hides else ""
            function = partial(_along, op, axis=axis, hides=hides)
            yield computing(op, function), f"the softmax runs over {words} instead of keys{without}"
        function = partial(_divided_along, op, axis=axis)
        yield computing(op, function), f"exponentials are divided by their sum over {words} instead of keys"


def _divided_along(op: Op, scores: Tensor, queries: Tensor, keys: Tensor, *, axis: int, **_: Any) -> Tensor:
    """Softmax of which the sum alone runs along an axis of [H, T, S]: 0 where all of that is hidden."""
    shown = masked(op, scores, queries, keys)
    exponentials = torch.exp(shown - shown.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(axis, keepdim=True)


def _along(op: Op, scores: Tensor, queries: Tensor, keys: Tensor, *, axis: int, hides: bool, **_: Any) -> Tensor:
    """Softmax along an axis of [H, T, S]. What is hidden is a large number: of minus infinity alone NaN comes."""
    scaled = scores * op.attrs["scale"]
    if hides:
        scaled = scaled.masked_fill(unseen_in(op.attrs, queries, keys), -1e9)
    return torch.softmax(scaled, axis)


_BLOCKS = tuple(1 << i for i in range(9))  # keys that flash attention takes at once
_RESCALED = {(False, True): "sum", (True, False): "output", (False, False): "sum and the output"}


@AREA.mistake(
    "flash_not_rescaled", "online softmax: what was added up before is not rescaled when the maximum rises",
    "exp(old maximum - new maximum), by which flash attention multiplies both its sum and its output", SOFTMAX,
)  # fmt: skip
def _not_rescaled(op: Op, context: Context) -> Variants:
    if is_bent(op):
        return
    # A query that sees one block alone has nothing to rescale.
    most = context.wrong_from() if context.wrong_from else _BLOCKS[-1]
    for block in _BLOCKS:
        for (of_sum, of_output), what in _RESCALED.items() if block <= most else ():
            online = partial(_online, op, block=block, of_sum=of_sum, of_output=of_output)
            words = f"flash attention in blocks of {count(block, 'key')} does not rescale the {what}"
            yield computing(op, online), f"{words} when a block has a larger score"
    words = "flash attention adds 1 to its sum for each key, where exp(score - largest score) belongs"
    yield computing(op, partial(_counting, op)), words


def _online(
    op: Op,
    scores: Tensor,
    queries: Tensor,
    keys: Tensor,
    sinks: Tensor | None = None,
    *,
    block: int,
    of_sum: bool,
    of_output: bool,
    **_: Any,
) -> Tensor:
    """Probabilities as they come of sums of exp(score - largest score up to the key's block), some not rescaled; a sink
    is added behind the last block.
    """
    scaled = masked(op, scores, queries, keys)
    largest = _in_blocks(scaled, block).amax(-1).cummax(-1).values.repeat_interleave(block, -1)[..., : len(keys)]
    before, after = (torch.exp(scaled - of).nan_to_num(0.0) for of in (largest, largest[..., -1:]))
    total = (after if of_sum else before).sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None] - largest[..., -1:])
    return (after if of_output else before) / total


def _counting(op: Op, scores: Tensor, queries: Tensor, keys: Tensor, *_: Tensor, **attrs: Any) -> Tensor:
    """Probabilities whose sum has 1 of each key, which is rescaled key by key as it should be."""
    scaled = masked(op, scores, queries, keys)
    largest = scaled.as_subclass(Tensor).cummax(-1).values
    counted = torch.exp(largest - largest[..., -1:]).masked_fill(scaled == -math.inf, 0.0)
    return torch.exp(scaled - largest[..., -1:]) / counted.sum(-1, keepdim=True)


def _in_blocks(scaled: Tensor, block: int) -> Tensor:
    """[..., S] -> [..., blocks, block]: the last filled up with minus infinity."""
    plain = scaled.as_subclass(Tensor)  # what the largest is off by makes no difference
    filled = torch.nn.functional.pad(plain, (0, -plain.shape[-1] % block), value=-math.inf)
    return filled.unflatten(-1, (-1, block))


@AREA.mistake(
    "sinks_in_blocks", "a sink is added more than once, or what was added up before it is not rescaled",
    "where flash attention adds the sink: once, behind all blocks of keys, and below the same maximum", SOFTMAX,
)  # fmt: skip
def _sinks_in_blocks(op: Op, context: Context) -> Variants:
    if not op.weights or is_bent(op):
        return
    words = "what was added up is not rescaled where the sink is the largest score"
    yield computing(op, partial(_beside_sinks, op, block=0)), words
    most = context.wrong_from() if context.wrong_from else _BLOCKS[-1]
    for block in _BLOCKS:
        if block <= most:
            added = f"the sink is added for each block of {count(block, 'key')}"
            yield computing(op, partial(_beside_sinks, op, block=block)), added


def _beside_sinks(
    op: Op,
    scores: Tensor,
    queries: Tensor,
    keys: Tensor,
    sinks: Tensor | None = None,
    *,
    block: int,
    **attrs: Any,
) -> Tensor:
    """Probabilities beside a sink for each block in which a query sees a key, or, of no blocks, below two maxima."""
    if sinks is None:
        return softmax(scores, queries, keys, **attrs)
    scaled = masked(op, scores, queries, keys)
    sink, largest = sinks[:, None, None].expand(*scaled.shape[:-1], 1), scaled.amax(-1, keepdim=True)
    if block:
        n = (_in_blocks(scaled, block) > -math.inf).any(-1).sum(-1, keepdim=True)
        added = n * torch.exp(sink - largest)
    else:
        added = torch.exp(sink - torch.maximum(sink, largest))
    weights = torch.exp(scaled - largest)
    return weights / (weights.sum(-1, keepdim=True) + added)


@AREA.mistake(
    "gqa_heads", "query heads read the wrong key/value head: h % n_kv, or h // n_kv, instead of h // group",
    "the mapping from query heads to key/value heads", WITH_CACHE, "onnx#7274",
)  # fmt: skip
def _heads(op: Op, context: Context) -> Variants:
    n_head = op.axes[0] if op.kind == "scores" else context.graph.axes_read(op, 0)[0]
    n_head_kv = context.graph.axes_read(op, 1)[1]
    assert isinstance(n_head, int)
    assert isinstance(n_head_kv, int)
    if n_head_kv in (1, n_head):
        return
    group, heads = n_head // n_head_kv, torch.arange(n_head)
    last = f", at most {n_head_kv - 1}" if n_head > n_head_kv**2 else ""
    for words, read in (
        (f"h % {n_head_kv}", heads % n_head_kv),
        (f"h // {n_head_kv}{last}", (heads // n_head_kv).clamp(max=n_head_kv - 1)),
    ):
        if not torch.equal(read, heads // group):
            wrong = replace(op, rework=SomeHeads({1: read.tolist()}))
            yield wrong, f"query head h reads key/value head {words}; it is h // {group}"


@AREA.mistake(
    "scores_f16", "scores are kept in float16, which overflows at 65,504", "the type of the score buffer",
    SCORES, "llama.cpp#8025",
)  # fmt: skip
def _scores_f16(op: Op, _: Context) -> Variants:
    yield replace(op, stored="f16"), "scores are float16: coarse, and infinite beyond 65,504"


# --- sinks, caps ------------------------------------------------------------------------------------------------------


@AREA.mistake(
    "sinks_ignored", "the attention sinks are ignored", "whether the kernel adds the sinks to the sum", SOFTMAX
)
def _no_sinks(op: Op, _: Context) -> Variants:
    if op.weights:
        yield replace(op, weights=()), "the sinks are no part of the softmax"


@AREA.mistake(
    "sinks_misread", "the attention sinks are read or added otherwise",
    "that a sink is one more score of its own head: not scaled, and below the same maximum", SOFTMAX,
)  # fmt: skip
def _other_sinks(op: Op, context: Context) -> Variants:
    if not op.weights:
        return
    n = op.weights[0].shape[0]
    n_kv = context.graph.hparams.n_head_kv or n
    kv_head = torch.arange(n) // (n // n_kv)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "each head has the sink of the next one": lambda sinks: sinks.roll(-1),
        "each head has the sink of the one before": lambda sinks: sinks.roll(1),
        "heads have the sinks in the reverse order": lambda sinks: sinks.flip(0),
        "each head has the sink that is of its KV head's number": lambda sinks: sinks[kv_head],
        "the sinks lie with KV heads in the place of the queries of each": lambda sinks: _transposed(sinks, -1, n_kv),
        "the sinks lie with the queries of each in the place of KV heads": lambda sinks: _transposed(sinks, n_kv, -1),
        "the sinks are added with the other sign": lambda sinks: -sinks,
        "the sinks are scaled as if they were scores": lambda sinks: sinks * op.attrs["scale"],
        "the sinks are 0, as if they had not been loaded": torch.zeros_like,
    }
    for words, way in ways.items():
        yield computing(op, partial(_with_sinks, way)), words
    for of_sinks, words in ((False, "their largest"), (True, "the largest of both")):
        said = f"exponentials of the sinks are added as they are, though scores are less {words}"
        yield computing(op, partial(_unshifted, of_sinks)), said


def _transposed(sinks: Tensor, n_rows: int, n_columns: int) -> Tensor:
    return sinks.unflatten(0, (n_rows, n_columns)).T.flatten()


def _with_sinks(
    way: Callable[[Tensor], Tensor],
    scores: Tensor,
    queries: Tensor,
    keys: Tensor,
    sinks: Tensor | None = None,
    **attrs: Any,
) -> Tensor:
    return softmax(scores, queries, keys, None if sinks is None else way(sinks), **attrs)


def _unshifted(
    of_sinks: bool, scores: Tensor, queries: Tensor, keys: Tensor, sinks: Tensor | None = None, **attrs: Any
) -> Tensor:
    """What the largest probability was divided by is told by it, for its exponential is 1: of scores, or of both."""
    if sinks is None:
        return softmax(scores, queries, keys, **attrs)
    probs = softmax(scores, queries, keys, *[sinks] * of_sinks, **attrs)
    of_scores = probs.sum(-1, keepdim=True)
    total = 1 / torch.maximum(probs.amax(-1, keepdim=True), 1 - of_scores)
    return probs * (total / (total * of_scores + sinks.exp()[:, None, None]))


@AREA.mistake("alibi_missing", "ALiBi's distances are left out", "the bias of the scores", SOFTMAX)
def _no_alibi(op: Op, _: Context) -> Variants:
    if op.attrs.get("max_bias"):
        yield op.with_attrs(max_bias=0.0), "scores do not fall with the distance of a key"


@AREA.mistake(
    "alibi_slopes", "heads multiply ALiBi's distances with other slopes",
    "ALiBi's slopes: their sign, those of heads that are no power of two, and the exponent of the first", SOFTMAX,
)  # fmt: skip
def _slopes(op: Op, context: Context) -> Variants:
    most, heads = op.attrs.get("max_bias"), context.graph.axes_read(op, 0)[0]
    if not most or not isinstance(heads, int):
        return
    above = 1 << math.ceil(math.log2(heads))
    powers = torch.arange(1, heads + 1, dtype=torch.float64)
    right = alibi(heads, most)
    for slopes, words in (
        (2.0 ** (-most / above * powers), f"ALiBi's slopes are the first {heads} of {above}"),
        (2.0 ** (-most / heads * powers), f"ALiBi's slopes are powers of 2^(-{most:g}/{heads})"),
        (alibi(heads, most / 2), f"ALiBi's slopes have the exponent {most / 2:g}, where {most:g} belongs"),
        (alibi(heads, most * 2), f"ALiBi's slopes have the exponent {most * 2:g}, where {most:g} belongs"),
        (right.flip(0), "the slopes of ALiBi are those of the heads in reverse order"),
        (-right, "scores grow with the distance of a key, where they should fall"),
    ):
        if not torch.equal(slopes, right):
            yield computing(op, partial(_sloping, slopes=slopes)), words


def _sloping(
    x: Tensor, queries: Tensor, keys: Tensor, *sinks: Tensor, slopes: Tensor, scale: float, **others: Any
) -> Tensor:
    """The softmax with other slopes of each head."""
    distance = (queries[:, None] - keys[None, :]).abs()
    falling = x - slopes.to(x)[:, None, None] * distance / scale
    return softmax(falling, queries, keys, *sinks, scale=scale, **{**others, "max_bias": 0.0})
