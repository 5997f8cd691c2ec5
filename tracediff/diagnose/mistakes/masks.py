"""Mistakes in which keys a query sees."""

import math
from collections.abc import Callable, Sequence
from functools import partial
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
from tracediff.english import count, ranges
from tracediff.model.graph import Op
from tracediff.numerics.kinds.attention import VISIBLE, causal, hidden, softmax, unseen_in

AREA = Area()
SOFTMAX = Where(("softmax",))
_NEAR = frozenset(("window", "chunk"))  # of what says what a query sees, what hides far keys
_PLANTED = 4  # tokens of a window
_CACHES = (512.0, 64.0, 4096.0)  # lengths
_SLOTS = 2.0**31  # of no cache are there more: engines count them in 32 bits
_BLOCKS = (4, 8, 16, 32, 64, 128, 256)  # keys that attention reads at once
_PADS = (2, 4, 8, 16, 32)  # multiples that kernels round a number of keys up to
_USUAL = (1e4, 1e3, 1e2, 1e1, 1.0)  # in the place of infinity


def _nothing_hidden(queries: Tensor, keys: Tensor) -> Tensor:
    return causal(queries, keys) & False


@AREA.mistake("mask_shifted", "the causal mask is off by one", "the diagonal of the mask", SOFTMAX, "tt-metal#48899")
def _mask_shifted(op: Op, _: Context) -> Variants:
    words = "the mask is off by one: each query sees the next token"
    yield op.with_attrs(mask=lambda q, k: k[None, :] > q[:, None] + 1), words
    words = "the mask is off by one: a query does not see its own token"
    yield op.with_attrs(mask=lambda q, k: (k[None, :] >= q[:, None]) & (k[None, :] != k[0])), words
    blind = op.with_attrs(mask=lambda q, k: k[None, :] >= q[:, None])
    yield blind, f"{words}; the first sees none, and has NaN"
    yield computing(blind, _of_none_zeros), f"{words}; the first sees none, and has zeros"


def _of_none_zeros(*operands: Tensor, **attrs: Any) -> Tensor:
    """The softmax of an engine whose loops run over what is seen."""
    return softmax(*operands, **attrs).nan_to_num(0.0)


@AREA.mistake(
    "mask_without_offset", "the causal mask does not count the cache", "the cache length in the mask",
    SOFTMAX, "hyprstream#1521",
)  # fmt: skip
def _mask_offset(op: Op, context: Context) -> Variants:
    words = "the mask begins at 0: it does not count the cached positions"
    yield op.with_attrs(mask=lambda q, k: k[None, :] - k[0] > (q - _first(q, context))[:, None]), words


def _first(queries: Tensor, context: Context) -> Tensor | int:
    """The position at which the step begins."""
    return queries[0] if context.first is None else context.first


@AREA.mistake(
    "cache_ignored", "a step sees only its own tokens, not the cache", "the cache length: stuck at 0?",
    SOFTMAX, "rustorch 213b9180",
)  # fmt: skip
def _cache_ignored(op: Op, context: Context) -> Variants:
    words = "the step sees only its own tokens: cached positions are not attended to"
    yield op.with_attrs(mask=lambda q, k: (k[None, :] > q[:, None]) | (k[None, :] < _first(q, context))), words


@AREA.mistake(
    "last_keys_dropped", "the keys of a last block that is not full are left out",
    "the number of blocks of keys: it rounds up, and the last block is masked", SOFTMAX,
)  # fmt: skip
def _whole_blocks(op: Op, _: Context) -> Variants:
    for size in _BLOCKS:
        words = f"keys are read in blocks of {size}, and those of a last block that is not full are left out"
        yield op.with_attrs(mask=partial(_of_whole_blocks, size=size)), words
        words = f"keys are read in blocks of {size}, and those of each query's last block that is not full are left out"
        yield op.with_attrs(mask=partial(_of_own_blocks, size=size)), words


def _of_whole_blocks(queries: Tensor, keys: Tensor, size: int) -> Tensor:
    n = len(keys) // size * size or len(keys)  # a block by itself is read as it is
    return causal(queries, keys) | (torch.arange(len(keys), device=keys.device) >= n)


def _of_own_blocks(queries: Tensor, keys: Tensor, size: int) -> Tensor:
    seen = queries[:, None] + 1
    whole = torch.where(seen >= size, seen // size * size, seen)
    return keys[None, :] >= whole


@AREA.mistake(
    "keys_skipped", "some keys are left out by every query that sees others",
    "the first key of the loop over the cache, and what hides some positions of it", SOFTMAX,
)  # fmt: skip
def _skipped(op: Op, context: Context) -> Variants:
    for skipped in ([0],) if context.seen is None else _never_read(op, context.seen):
        keys = f"key {skipped[0]}" if len(skipped) == 1 else f"keys {ranges(skipped)}"
        words = f"{keys} {'is' if len(skipped) == 1 else 'are'} left out by every query that sees others"
        yield op.with_attrs(mask=partial(_but_these, hides=partial(unseen_in, op.attrs), skipped=tuple(skipped))), words


def _never_read(op: Op, seen: Seen) -> list[list[int]]:
    """Keys that have no weight with any query that should see them and sees another; what underflows may have none."""
    _, queries, keys = seen.inputs[:3]
    visible = ~unseen_in(op.attrs, queries, keys)
    read = (seen.output != 0).any(0) & visible
    others = read.sum(1, keepdim=True) > read.long()
    never = (visible & others).any(0) & ~(read & others).any(0)
    return [keys[never].tolist()] if bool(never.any()) and not bool(never.all()) else []


def _but_these(
    queries: Tensor, keys: Tensor, hides: Callable[[Tensor, Tensor], Tensor], skipped: Sequence[int]
) -> Tensor:
    hidden_ = hides(queries, keys)
    those = torch.isin(keys, torch.tensor(skipped, device=keys.device))[None, :]
    sees_others = (~hidden_ & ~those).any(1, keepdim=True)
    return hidden_ | (those & sees_others)


# --- windows ----------------------------------------------------------------------------------------------------------

_PAGES = (2, 4, 8, 16, 32, 64)  # keys of the cache that lie together


@AREA.mistake(
    "window", "another sliding window, or one where there is none",
    "the window: n tokens with the token itself, in the layers that have it", SOFTMAX, "mlx-lm#390",
)  # fmt: skip
def _window(op: Op, context: Context) -> Variants:
    kept, shown = _shown(context)
    for name, size in shown.items():
        right = op.attrs.get(name, 0)
        others = {o.attrs.get(name, 0) for o in context.graph if o.kind in SOFTMAX.kinds} - {right}
        usual = (right - 1, right + 1, 0) if right else sorted(others)
        for wrong in dict.fromkeys((*usual, size)):
            if wrong != right and not (wrong == size and kept):
                # A chunk in the place of a window, or a window in that of a chunk.
                other = next((o for o in shown if o != name and wrong and not right and op.attrs.get(o)), None)
                belongs = f"a {other} of {op.attrs[other]}" if other else f"one of {right}" if right else "none"
                said = f"{f'a {name} of {wrong}' if wrong else f'no {name}'} instead of {belongs}"
                attrs = {name: wrong} | ({other: 0} if other else {})
                yield Variant(op.with_attrs(**attrs), said, fitted=bool(wrong))  # of one token many numbers suit
    if kept and not op.attrs.get("chunk"):
        yield _but_for_first(op, shown["window"], kept)
    elif context.seen is None and (window := op.attrs.get("window")):
        yield _but_for_first(op, window, 1)._replace(fitted=False)


@AREA.mistake(
    "window_by_pages", "a window begins with a whole page of the cache",
    "which pages of the cache are skipped or freed before a window, and what is hidden in the first that is read",
    SOFTMAX,
)  # fmt: skip
def _by_pages(op: Op, _: Context) -> Variants:
    if not (window := op.attrs.get("window")):
        return
    for page in _PAGES:
        for up in (False, True)[: 1 + (page <= window)]:
            mask = partial(_from_a_page, window=window, page=page, up=up)
            end = "the first page that lies in it" if up else "the page that it begins in"
            words = f"the window of {window} begins at a multiple of {page}, where {end} does"
            yield op.with_attrs(window=0, mask=mask), words


def _from_a_page(queries: Tensor, keys: Tensor, window: int, page: int, up: bool) -> Tensor:
    first = (queries - window + 1).clamp(min=0)
    first = (first + (page - 1) * up) // page * page
    return causal(queries, keys) | (keys[None, :] < first[:, None])


def _shown(context: Context) -> tuple[int, dict[str, int]]:
    """What the zeros among probabilities show, or where tokens begin to be wrong: how many of the first keys every
    query sees, and of how many keys a window or a chunk would be; 0 where nothing shows.
    """
    if context.seen is None:
        size = context.wrong_from() if context.wrong_from else _PLANTED
        return 0, {"window": size, "chunk": size}
    _, queries, keys = context.seen.inputs[:3]
    empty = (context.seen.output == 0).all(0) & ~causal(queries, keys)
    some_are = empty.any(1)
    if not bool(some_are.any()):
        return 0, {"window": 0, "chunk": 0}
    at = keys.expand(empty.shape)[some_are]
    shut = empty[some_are]
    first = at.masked_fill(~shut, torch.iinfo(at.dtype).max).amin(1)
    last = at.masked_fill(~shut, -1).amax(1)
    # What underflowed is 0 as well: it makes windows look smaller, never larger.
    return int(first.max()), {"window": int((queries[some_are] - last).max()), "chunk": int(last.min()) + 1}


def _but_for_first(op: Op, size: int, kept: int) -> Variant:
    first = f"first {kept}" if kept > 1 else "first"
    words = f"a query sees the last {count(size, 'token')}, its own among them, and the {first}"
    return Variant(op.with_attrs(mask=partial(_but_the_first, size=size, kept=kept), window=0), words, fitted=True)


def _but_the_first(queries: Tensor, keys: Tensor, size: int, kept: int) -> Tensor:
    return hidden(queries, keys, window=size) & ((keys >= kept)[None, :] | causal(queries, keys))


# --- what is added to masked scores -----------------------------------------------------------------------------------


def masked(op: Op, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Scores as the softmax is taken of them: scaled, and minus infinity where nothing is seen."""
    return (scores * op.attrs["scale"]).masked_fill(unseen_in(op.attrs, queries, keys), -math.inf)


def is_bent(op: Op) -> bool:
    """Whether a softmax does more to scores than to scale and mask them: a soft cap, ALiBi's distances."""
    return bool(op.attrs.get("softcap") or op.attrs.get("max_bias"))


def _masking(op: Op, value: float, added: bool) -> Variant:
    """The op with `-value` added to the scores that it should hide, or in the place of these."""
    words = f"{-value:g} is added to masked scores" if added else f"masked scores are {-value + 0.0:g}"
    changed = computing(op, partial(filled, op, value=value, added=added))
    return Variant(changed, f"{words}, where minus infinity belongs", fitted=True)


def filled(
    op: Op, scores: Tensor, queries: Tensor, keys: Tensor, *sinks: Tensor, value: float, added: bool, **_: Any
) -> Tensor:
    """The softmax with `-value` added to the scores that it should hide, or in the place of these."""
    plain = {name: attr for name, attr in op.attrs.items() if name not in VISIBLE}
    hides, bias = unseen_in(op.attrs, queries, keys), -value / op.attrs["scale"]
    masked = scores + bias if added else torch.full_like(scores, bias)
    return softmax(torch.where(hides, masked, scores), queries, keys, *sinks, mask=_nothing_hidden, **plain)


def _given(name: str, op: Op) -> float:
    """The number that the mistaken op was made with: infinite in the right one."""
    return float(op.function.keywords[name]) if isinstance(op.function, partial) else math.inf


@AREA.mistake("no_mask", "there is no causal mask", "the mask of the prefill", SOFTMAX, "TinyLLM#17")
def _no_mask(op: Op, _: Context) -> Variants:  # after the window: to a query of the last key both are the same
    everything = op.with_attrs(mask=_nothing_hidden, **dict.fromkeys(_NEAR & op.attrs.keys(), 0))
    yield everything, "no causal mask: every query sees every key"
    if _NEAR & op.attrs.keys():
        yield op.with_attrs(mask=_nothing_hidden), "no causal mask: every query sees all later keys"
    if window := op.attrs.get("window"):
        words = f"no causal mask: the window of {window} hides keys that are as far after a query as before it"
        yield op.with_attrs(mask=lambda q, k: k[None, :] - q[:, None] >= window), words


@AREA.mistake(
    "mask_finite", "what hides a key is a finite number, which large scores outweigh",
    "the value that the mask is filled with: minus infinity, or the least of its type", SOFTMAX,
    number=Number(partial(_given, "value"), lambda op, number: _masking(op, number, True), ()),
)  # fmt: skip
def _finite(op: Op, context: Context) -> Variants:
    if is_bent(op):
        return
    yield _masking(op, 0.0, False)._replace(fitted=False)
    for added in (True, False):
        if context.seen is None:
            yield from (_masking(op, value, added)._replace(fitted=False) for value in _USUAL)
        elif number := _fitted(op, context.seen, added):
            yield _masking(op, number, added)


def _fitted(op: Op, seen: Seen, added: bool) -> float | None:
    """From the largest of the probabilities that should be 0, against the largest of its query's others; fitted to
    those that should be 0 alone, for beside the others they may be next to nothing.
    """
    scores, queries, keys = seen.inputs[:3]
    hides = unseen_in(op.attrs, queries, keys).expand(scores.shape)
    shown, right = seen.output.masked_fill(~hides, 0.0), seen.output.masked_fill(hides, 0.0)
    head, token, key = (int(i) for i in torch.unravel_index(shown.argmax(), shown.shape))
    other = int(right[head, token].argmax())
    if not bool(shown.any()) or not bool(right[head, token].any()):
        return None
    ratio = shown[head, token, key] / right[head, token, other]
    scaled = scores[head, token] * op.attrs["scale"]
    value = float(ratio.log() + scaled[other] - (scaled[key] if added else 0.0))
    if not value < 0:
        return None
    return fitted(lambda x: filled(op, *seen.inputs, value=x, added=added)[hides], shown[hides], [-value])


@AREA.mistake(
    "mask_after_softmax", "masked keys have a part in the softmax's sum",
    "the order of the mask and the softmax", SOFTMAX,
)  # fmt: skip
def _after(op: Op, _: Context) -> Variants:
    plain = {name: attr for name, attr in op.attrs.items() if name not in VISIBLE}

    def function(scores: Tensor, queries: Tensor, keys: Tensor, *sinks: Tensor, **_: Any) -> Tensor:
        probs = softmax(scores, queries, keys, *sinks, mask=_nothing_hidden, **plain)
        return probs.masked_fill(unseen_in(op.attrs, queries, keys), 0.0)

    yield computing(op, function), "the mask comes after the softmax: probabilities of hidden keys are lost"


def _in_padded(op: Op, length: float) -> Variant:
    """The op over so many keys, of which those beyond the cached ones have the score 0."""
    words = f"the softmax runs over {length:g} slots of a padded cache: those without a key are not hidden, and score 0"
    return Variant(computing(op, partial(_with_padding, length=length)), words, fitted=True)


def _with_padding(
    scores: Tensor, queries: Tensor, keys: Tensor, sinks: Tensor | None = None, *, length: float, **attrs: Any
) -> Tensor:
    """So many keys with the score 0 are one sink: the logarithm of their number."""
    padding = scores.new_full((len(scores),), max(0.0, length - len(keys))).log()
    sinks = padding if sinks is None else torch.logaddexp(sinks.to(padding), padding)
    return softmax(scores, queries, keys, sinks, **attrs)


@AREA.mistake(
    "softmax_padded", "the softmax's sum has keys in it that are not there: the padding of the cache",
    "how many keys the softmax runs over: those cached so far, or all slots of which the others are hidden", SOFTMAX,
    number=Number(partial(_given, "length"), _in_padded, ()),
)  # fmt: skip
def _padded(op: Op, context: Context) -> Variants:
    if is_bent(op):
        return
    if context.seen is None:
        yield from (_in_padded(op, length)._replace(fitted=False) for length in _CACHES)
    elif (length := _missing(op, context.seen, weights_of(op, context)) or 0) > len(context.seen.inputs[2]) + 1:
        yield _in_padded(op, length)


@AREA.mistake(
    "softmax_rounded_up", "the softmax's sum runs over whole blocks of keys, be they there or not",
    "how many keys each query's sum runs over: a number that is rounded up, for vectors, needs what hides the rest",
    SOFTMAX,
)  # fmt: skip
def _in_whole_blocks(op: Op, _: Context) -> Variants:
    for size in () if is_bent(op) else _PADS:
        words = (
            f"the softmax's sum runs over keys up to a multiple of {size} for each query: those beyond its own score 0"
        )
        yield computing(op, partial(_rounded_up, size=size)), words


def _rounded_up(scores: Tensor, queries: Tensor, keys: Tensor, *sinks: Tensor, size: int, **attrs: Any) -> Tensor:
    """With n more keys of score 0 a sum Z is Z + n; the largest probability is exp(the largest score) / Z."""
    right = softmax(scores, queries, keys, *sinks, **attrs)
    scaled = (scores * attrs["scale"]).masked_fill(unseen_in(attrs, queries, keys), -math.inf)
    more = (-(queries + 1) % size)[:, None].to(scores.dtype)
    return right / (1 + more * right.amax(-1, keepdim=True) * torch.exp(-scaled.amax(-1, keepdim=True)))


def _missing(op: Op, seen: Seen, sinks: Sequence[Tensor]) -> int | None:
    """Of what the probabilities of a query lack to 1, so many scores of 0 have: told by the one that lacks most."""
    scores, _, keys = seen.inputs
    right = softmax(*seen.inputs, *sinks, **op.attrs)
    share = seen.output.sum(-1) / right.sum(-1)
    head, query = (int(i) for i in torch.unravel_index(share.argmin(), share.shape))
    key = int(right[head, query].argmax())
    total = (scores[head, query, key] * op.attrs["scale"]).exp() / right[head, query, key]
    n = float(total * (1 / share[head, query] - 1))
    return len(keys) + round(n) if 0.5 < n < _SLOTS else None


@AREA.mistake(
    "softmax_sum_begins", "the softmax's sum does not begin with 0, or has an eps added to it",
    "what the softmax's sum begins with, and what it is divided by", SOFTMAX,
)  # fmt: skip
def _begins(op: Op, context: Context) -> Variants:
    if op.weights:
        return
    yield computing(op, _with_one_more), "the sum of exponentials has one more, exp(0), as if one more key scored 0"
    first = 1.0 if context.seen is None else _more(op, context.seen)
    if first:
        words = f"the sum of exponentials is more by {first:.6g}: it does not begin with 0, or an eps is added"
        yield Variant(computing(op, partial(_begun_with, first=first)), words, fitted=context.seen is not None)


def _with_one_more(scores: Tensor, queries: Tensor, keys: Tensor, **attrs: Any) -> Tensor:
    return _with_padding(scores, queries, keys, length=len(keys) + 1, **attrs)


def _begun_with(*operands: Tensor, first: float, **attrs: Any) -> Tensor:
    """The sum is 1 over the largest probability, for exp(0) is the largest of its terms."""
    right = softmax(*operands, **attrs)
    return right / (1 + first * right.amax(-1, keepdim=True))


def _more(op: Op, seen: Seen) -> float | None:
    """By how much the sum is more, where the probabilities of a query do not add up to 1."""
    lacking = float((1 / seen.output.sum(-1) - 1).abs().max())
    if not 0 < lacking < math.inf:
        return None
    return fitted(lambda x: _begun_with(*seen.inputs, first=x, **op.attrs), seen.output, [lacking, 1.0])
