"""Mistakes in the cache of keys and values: which slots are written, and which are read."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.attention import SCORES, WITH_CACHE
from tracediff.diagnose.mistakes.mistake import (
    Area,
    Context,
    Seen,
    Variant,
    Variants,
    Where,
    computing,
    first_wrong,
    weights_of,
)
from tracediff.diagnose.mistakes.weights import LOOK_AT_ROUNDING, cut_off
from tracediff.english import ranges
from tracediff.model.graph import Graph, Op, View
from tracediff.names import layer_of, local_name, split
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.attention import scores, weighted_values
from tracediff.numerics.kinds.rope import rope
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.views import seen

AREA = Area()
_INTEGERS = ("int8/row", "q8_0")  # a cache's, each with a scale of its own
_BETWEEN = 3  # ops from scores to their softmax: a scale, a cap's tanh


@AREA.mistake(
    "cached_k_rotated_again", "cached keys are rotated again at every step", "rope applied to the whole cache",
    SCORES, "shainet#110",
)  # fmt: skip
def _rotated_again(op: Op, context: Context) -> Variants:
    turn = context.graph.ops.get(op.inputs[1])
    if turn is None or turn.kind != "rope" or not any(op.past):
        return
    factors = weights_of(turn, context)

    def function(in_place: bool, q: Tensor, k: Tensor, positions: Tensor, past: Tensor) -> Tensor:
        starts, step = past.unique(return_inverse=True)  # past: how many tokens were before the step of each
        times = len(starts) - 1 - step
        for turned in range(len(starts) - 1 if in_place else 1):
            again = times > turned
            k = k.index_put((again,), rope(k[again], positions[again], *factors, **turn.attrs))
        return scores(q, k)

    op = op.also_reading(("positions", True), ("past", True))
    yield computing(op, partial(function, False)), "cached keys are rotated once more by this step"
    yield computing(op, partial(function, True)), "cached keys are rotated once more by each step, those of before too"


@AREA.mistake(
    "cache_zeros", "some cached positions are zero", "which slots of the cache are written",
    SCORES, "tt-metal#54413",
)  # fmt: skip
def _cache_zeros(op: Op, context: Context) -> Variants:
    zero, to_the_end = torch.arange(1, 2), False
    if context.seen:
        of_keys = (context.seen.output == 0).all(0).all(0)
        zero = torch.nonzero(of_keys).flatten()
        if not len(zero):
            return
        to_the_end = bool(of_keys[zero[0] :].all())

    def zeroed(chosen: Callable[[int, Tensor], Tensor]) -> Op:
        def function(q: Tensor, k: Tensor) -> Tensor:
            places = chosen(len(q), torch.arange(len(k), device=k.device))
            return scores(q, k.masked_fill(places[:, None, None], 0.0))

        return computing(op, function)

    which = f"keys at positions {ranges(zero.tolist())} are" if len(zero) > 1 else f"key at position {zero[0]} is"
    which = f"keys from position {zero[0]} on are" if to_the_end else which
    found = (
        zeroed(lambda _, at: at >= zero[0] if to_the_end else torch.isin(at, zero.to(at.device))),
        f"the {which} zero",
    )
    early = "is zero, as if it was read before it is cached"
    own = [
        (zeroed(lambda _, at: at == len(at) - 1), f"the last key {early}"),
        (zeroed(lambda n, at: (at == len(at) - 1) & (n == 1)), f"in steps of one token its own key {early}"),
    ]
    if context.seen is None:
        yield from (found, *own)
    else:
        yield from (*own, found) if to_the_end and zero[0] == len(context.seen.inputs[1]) - 1 else (found,)


@AREA.mistake(
    "cache_wraps", "the cache is a ring that is shorter than what is read of it",
    "the slot that a position is written to, and its size", WITH_CACHE,
)  # fmt: skip
def _ring(op: Op, context: Context) -> Variants:
    if context.seen and not context.seen.output.any():  # whatever its size
        return
    n = len(context.seen.inputs[1]) if context.seen else context.n_positions
    usual = [1 << i for i in range(n.bit_length()) if 1 << i < n]
    if context.seen:
        sizes = [_first_wrong(op, context.seen), *usual]
    elif context.wrong_from:  # of a prompt that was all written before it was read the first token is wrong
        sizes = [first] if (first := context.wrong_from()) else usual
    else:
        sizes = [4]
    for size in filter(None, dict.fromkeys(sizes)):
        words = f"position p is cached in slot p % {size}, where"
        for read, then in ((False, "slots beyond are read too: zeros"), (True, "it is read: what was there is gone")):
            ring = computing(op, partial(_wrapped, KINDS[op.kind].function, size, read))
            yield Variant(ring, f"{words} {then}", fitted=context.seen is not None)
    if window := _window(op, context.graph):
        for size, end in ((window - 1, ", and the last holds zeros"), (window + 1, "")):
            ring = computing(op, partial(_in_window, op.kind, window, size))
            yield ring, f"position p is cached in slot p % {size}, where slots 0 to {window - 1} are read{end}"


def _window(op: Op, graph: Graph) -> int:
    """Of the softmax between the scores and the values, one of which the op makes; 0 where there is none."""
    around, steps = op, 0
    while around.kind != "softmax":
        of_scores = [reader for reader, _ in graph.readers(around.name)]
        following = of_scores[:1] if op.kind == "scores" else [graph[x] for x in around.inputs[:1] if x in graph]
        if not following or steps == _BETWEEN:
            return 0
        (around,), steps = following, steps + 1
    return int(around.attrs.get("window", 0))


def _in_window(kind: str, window: int, size: int, left: Tensor, cached: Tensor) -> Tensor:
    """With a ring of `size` slots, of which each token reads as many as it sees positions, after it wrote its own."""
    n, tokens = len(cached), 0 if kind == "scores" else 1
    now = torch.arange(n - left.shape[tokens], n, device=cached.device)[:, None]
    slot = torch.arange(n, device=cached.device) % window  # of each position in a ring of the right size
    held = now - (now - slot) % size
    is_held = (slot < size) & (held >= 0)
    if kind == "scores":
        right = scores(left, cached)
        return right.gather(2, held.clamp(min=0).expand_as(right)) * is_held
    read = torch.zeros_like(left).scatter_add(2, held.clamp(min=0).expand_as(left), left * is_held)
    return weighted_values(read, cached)


def _wrapped(function: Callable[..., Tensor], size: int, read: bool, left: Tensor, cached: Tensor) -> Tensor:
    """With what a ring of `size` slots holds after all positions were written; without `read` its end is zeros."""
    slots = torch.arange(len(cached), device=cached.device)
    latest = slots % size + (len(cached) - 1 - slots % size) // size * size
    held = cached[latest]
    if not read:
        held = torch.where((slots < size).reshape(-1, *[1] * (cached.ndim - 1)), held, torch.zeros_like(held))
    return function(left, held)


def _first_wrong(op: Op, seen: Seen) -> int:
    """The position of the first token whose output is wrong: so many before it were cached, or added up, rightly."""
    tokens = 1 if op.kind == "scores" else 0
    apart, y = KINDS[op.kind].function(*seen.inputs) - seen.output, seen.output
    first = first_wrong(*(whole.transpose(0, tokens).flatten(1) for whole in (apart, y)))
    return len(seen.inputs[1]) - y.shape[tokens] + (first or 0)


@AREA.mistake(
    "cache_cut", "what is cached is cut off to half precision or integers, where rounding belongs", LOOK_AT_ROUNDING,
    WITH_CACHE,
)  # fmt: skip
def _cut(op: Op, context: Context) -> Variants:
    for cut, words in cut_off("what is cached"):
        yield computing(op, partial(_of_cached, KINDS[op.kind].function, cut)), words
    width = context.graph.axes_read(op, 1)[-1]
    for integers in map(rounding_named, _INTEGERS):
        if isinstance(width, int) and integers.divides(width):
            words = f"what is cached, in {integers.words}, is truncated towards 0, where rounding belongs"
            truncated = rounding_named(f"truncated {integers.name}")
            yield computing(op, partial(_of_cached, KINDS[op.kind].function, truncated)), words


def _of_cached(function: Callable[..., Tensor], made: Callable[[Tensor], Tensor], left: Tensor, held: Tensor) -> Tensor:
    """With what is `made` of what is cached."""
    return function(left, made(held))


@AREA.mistake(
    "slot_off_by_one", "a position is cached in the slot beside its own",
    "the slots that a step writes: where it begins, whether before it reads them, and a paged cache's block size",
    WITH_CACHE,
)  # fmt: skip
def _slot_beside(op: Op, context: Context) -> Variants:
    for by, slot, empty in ((1, "p + 1", "slot 0"), (-1, "p - 1", "the last slot that is read")):
        words = f"position p is cached in slot {slot}, and {empty} holds zeros"
        if by == 1 and not context.seen:  # a sum over all slots does not tell which of them holds what
            words += "; or only after it is read: then a token's own slot holds zeros"
        yield computing(op, partial(_shifted, KINDS[op.kind].function, by)), words


def _shifted(function: Callable[..., Tensor], by: int, left: Tensor, cached: Tensor) -> Tensor:
    """With what the slots hold where each position is written `by` slots further, and the others were never."""
    held, n = torch.zeros_like(cached), len(cached)
    held[max(by, 0) : n + min(by, 0)] = cached[max(-by, 0) : n - max(by, 0)]
    return function(left, held)


@AREA.mistake(
    "cache_of_another_layer", "keys and values are read from the cache of another layer",
    "the layer's index in the address of the cache, where it is written and where it is read",
    WITH_CACHE,
)  # fmt: skip
def _another_layers(op: Op, context: Context) -> Variants:
    own, axes = op.inputs[1], context.graph[op.inputs[1]].axes
    alike = [other.name for other in context.graph if local_name(other.name) == local_name(own) and other.axes == axes]
    if not any(op.past) or len(alike) == 1:
        return
    at, last = alike.index(own), alike[-1]
    # Of a layer after this one the cache lacks the step's own tokens; some layers read that of an earlier one.
    filled = [name for name in alike if _layer(name) <= _layer(op.name) and name != own]
    near = [name for name in (*alike[max(0, at - 1) : at], alike[0], *alike[at + 1 : at + 2]) if name in filled]
    for other in dict.fromkeys((*near, *(filled if context.seen else ()))):
        whose = f"layer {_layer(other)}"
        if other == alike[at - 1] and _layer(own) == _layer(op.name):
            whose = "the layer before" + " that has one" * (_layer(other) < _layer(own) - 1)
        words = f"the cache of {whose} is read"
        yield replace(op, inputs=(op.inputs[0], other, *op.inputs[2:])), words
    if own != last:
        view, width = op.seen[1], math.prod(axis for axis in axes if isinstance(axis, int))
        function = partial(_shared, KINDS[op.kind].function, view, width)
        for other in dict.fromkeys((last, alike[alike.index(own) + 1])):
            shared = computing(op.also_reading((other, "earlier")), function)
            where = f"layer {split(other)[0]}"
            yield shared, f"it has one cache with {where}: of earlier steps that holds what {where} wrote"


def _layer(name: str) -> int:
    layer = layer_of(name)
    return -1 if layer is None else layer


def _shared(
    function: Callable[..., Tensor], view: View | None, width: int, left: Tensor, cached: Tensor, others: Tensor
) -> Tensor:
    """With what other layers cached in earlier steps, rows of `width` values, of which this op may see a part."""
    earlier = seen(view, 0, others.numel() // width, others) if view else others.reshape(-1, *cached.shape[1:])
    return function(left, torch.cat((earlier.to(cached), cached[len(earlier) :])))


@AREA.mistake(
    "values_window", "the sum of values leaves out the oldest", "the bounds of the sum over positions",
    Where(("weighted_values",)),
)  # fmt: skip
def _recent(op: Op, context: Context) -> Variants:
    if size := _first_wrong(op, context.seen) if context.seen else 4:
        words = f"of the cached values only the last {size} are added up, whatever the probabilities of those before"
        yield Variant(computing(op, partial(_of_the_last, size)), words, fitted=context.seen is not None)


def _of_the_last(size: int, probs: Tensor, v: Tensor) -> Tensor:
    n_tokens, n = probs.shape[1:]
    at, key = torch.arange(n - n_tokens, n)[:, None], torch.arange(n)[None, :]
    return weighted_values(torch.where((key > at - size).to(probs.device), probs, 0.0), v)
