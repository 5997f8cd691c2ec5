"""Mistakes in soft caps, cap * tanh(x / cap): of scores within a softmax, of scores and logits by ops of their own."""

import math
from functools import partial

import torch

from tracediff.diagnose.mistakes.fit import fitted
from tracediff.diagnose.mistakes.masks import SOFTMAX, filled
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
from tracediff.english import told_apart
from tracediff.model.graph import Graph, Op

AREA = Area()
_TANH = Where(("tanh",))
_USUAL_CAPS = (50.0, 30.0)  # of Gemma 2, of Grok (llama.cpp, src/models/gemma2.cpp and grok.cpp)


@AREA.mistake("softcap_missing", "large scores are not bent by the soft cap", "the soft cap of the scores", SOFTMAX)
def _no_softcap(op: Op, _: Context) -> Variants:
    if op.attrs.get("softcap"):
        yield op.with_attrs(softcap=0.0), f"scores are not capped at {op.attrs['softcap']:g}"


def _capped(op: Op, cap: float) -> Variant:
    right = op.attrs.get("softcap")
    cap_words, right_words = told_apart(cap, right) if right else (f"{cap:.6g}", "")
    belongs = f"instead of {right_words}" if right else "where no cap belongs"
    words = f"scaled scores are bent by a soft cap, {cap_words} * tanh(score / {cap_words}), {belongs}"
    return Variant(op.with_attrs(softcap=cap), words, fitted=True)


@AREA.mistake(
    "softcap", "scores are bent by another soft cap, or by one where none belongs",
    "whether this model caps its attention scores, and at what", SOFTMAX,
    number=Number(lambda op: float(op.attrs.get("softcap") or _USUAL_CAPS[0]), _capped),
)  # fmt: skip
def _other_softcap(op: Op, context: Context) -> Variants:
    if _cap_before(op, context):
        return  # it is the tanh before it that has another cap
    right = op.attrs.get("softcap") or 0.0
    yield from (_capped(op, cap)._replace(fitted=False) for cap in _USUAL_CAPS if cap != right)
    if context.seen and (number := fitted_attr(op, context, "softcap", (2.0**i for i in range(-2, 12)))):
        yield _capped(op, number)


@AREA.mistake(
    "cap_after_mask", "scores are masked before the soft cap bends them",
    "the order of the soft cap and the mask: infinity is bent to the cap", SOFTMAX,
)  # fmt: skip
def _cap_after_mask(op: Op, context: Context) -> Variants:
    if cap := float(op.attrs.get("softcap") or _cap_before(op, context)):
        words = f"the soft cap is applied after the mask: masked scores are {-cap:g}, where minus infinity belongs"
        value = math.inf if op.attrs.get("softcap") else cap  # a softmax that bends scores bends that too
        yield computing(op, partial(filled, op, value=value, added=False)), words


def _cap_before(op: Op, context: Context) -> float:
    """The cap of the scores that a softmax reads, where ops of their own bend them; 0.0 where they do not."""
    times, *_ = (context.graph.ops.get(name) for name in op.inputs)
    bent = context.graph.ops.get(times.inputs[0]) if times and times.kind == "scale" else None
    return _cap(bent, context.graph) * float(op.attrs["scale"]) if bent else 0.0


def _cap(op: Op, graph: Graph) -> float:
    """What values end at that this op bends and the next multiplies, s * tanh(x / s); 0.0 of an op that is no such."""
    times = next((reader for reader, _ in graph.readers(op.name) if reader.kind == "scale"), None)
    return float(times.attrs["scale"]) if times and op.kind == "tanh" else 0.0


def _bent_by(op: Op, times: float, words: str = "") -> Variant:
    """The tanh in a soft cap of so many times the right one."""
    changed = computing(op, lambda x: times * torch.tanh(x / times))
    return Variant(changed, words or f"the soft cap is {times:.6g} times what belongs", fitted=True)


@AREA.mistake(
    "cap", "values are bent by another soft cap", "the numbers that scores and logits are capped at",
    _TANH, number=Number(lambda _: 1.0, _bent_by, (2.0, 0.5)),
)  # fmt: skip
def _other_cap(op: Op, context: Context) -> Variants:
    if not (right := _cap(op, context.graph)):
        return
    words = "the soft cap is {} instead of {}".format
    for cap in _USUAL_CAPS:
        if cap != right:
            yield _bent_by(op, cap / right, words(*told_apart(cap, right)))._replace(fitted=False)
    if seen := context.seen:
        starts = (2.0**i for i in range(-6, 7))
        if times := fitted(lambda times: times * torch.tanh(seen.inputs[0] / times), seen.output, starts):
            yield _bent_by(op, times, words(*told_apart(times * right, right)))


@AREA.mistake(
    "cap_clamped",
    "what a soft cap should bend is cut off at it",
    "the soft cap: cap * tanh(x / cap), no clamp",
    _TANH,
)
def _clamped(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x: x.clamp(-1.0, 1.0)), "values are clamped to -1 and 1, where tanh bends them"
