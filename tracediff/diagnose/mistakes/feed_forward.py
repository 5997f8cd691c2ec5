"""Mistakes in activations."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.fit import fitted
from tracediff.diagnose.mistakes.mistake import (
    Area,
    Change,
    Context,
    Number,
    Variant,
    Variants,
    Where,
    computing,
    fitted_attr,
)
from tracediff.english import told_apart
from tracediff.model.graph import Op
from tracediff.numerics.floats import HALVES
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.roundings import rounding_named

AREA = Area()
Activation = Callable[[Tensor], Tensor]
Held = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # gate and up
_LOOK, _LINK = "which activation the model has there", "candle#3745"
# What kinds of ops activate with, and the same with a gate.
_ALONE = MappingProxyType({"silu": "SiLU", "gelu": "GELU (tanh)", "gelu_erf": "GELU (erf)",
                           "gelu_quick": "quick GELU", "relu": "ReLU", "sigmoid": "sigmoid",
                           "softplus": "softplus"})  # fmt: skip
_GATED = MappingProxyType({"swiglu": "SiLU", "geglu": "GELU (tanh)", "geglu_erf": "GELU (erf)",
                           "geglu_quick": "quick GELU", "reglu": "ReLU", "swiglu_oai": "quick GELU",
                           "swiglu_clamp": "SiLU"})  # fmt: skip
GATED = Where(tuple(_GATED))
_HELD = ("swiglu_oai", "swiglu_clamp")  # within limits, which are not alike for gate and up
# ggml_gelu is the form with tanh; Hugging Face's "gelu" (falcon, gptneox, mpt) is that with erf.
_FORMS = ("GELU (erf)", "GELU (tanh)")
_SAID_OF_ERF = ", which llama.cpp has for checkpoints that say GELU (erf), too"
_FUNCTIONS: dict[str, Activation] = {words: KINDS[kind].function for kind, words in {**_ALONE, "tanh": "tanh"}.items()}
_FUNCTIONS["squared ReLU"] = lambda x: x.clamp(min=0).square()
_OF_GATES = {*_GATED.values(), "squared ReLU"}


def _gated(op: Op, function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """What the op makes of gate and up, held within its limit and up raised as it raises it, by `function`."""
    limit, raised = op.attrs.get("limit", math.inf), float(op.kind == "swiglu_oai")
    return lambda gate, up, **_: function(gate.clamp(max=limit), up.clamp(-limit, limit) + raised)


def _activating(op: Op, function: Activation) -> Callable[..., Tensor]:
    """What the op makes with that activation, of its gate where it has one."""
    return _gated(op, lambda gate, up: function(gate) * up) if op.kind in _GATED else function


def _instead(words: str, function: Activation) -> Change:
    """That activation in the place of an op's own."""

    def change(op: Op, _: Context) -> Variants:
        own = _ALONE.get(op.kind) or _GATED.get(op.kind)
        if own not in (None, words):
            said = f"{words} is used for {own}{_SAID_OF_ERF * ((words, own) == _FORMS)}"
            yield computing(op, _activating(op, function)), said

    return change


for _name, _words in {
    "act_gelu": "GELU (erf)", "act_gelu_tanh": "GELU (tanh)", "act_relu": "ReLU", "act_silu": "SiLU",
    "act_gelu_quick": "quick GELU", "act_tanh": "tanh", "act_softplus": "softplus",
    "act_relu_squared": "squared ReLU",
}.items():  # fmt: skip
    _where = Where((*_ALONE, *_GATED) if _words in _OF_GATES else (*_ALONE,))
    AREA.mistake(_name, f"{_words} is used for another activation", _LOOK, _where, _LINK)(
        _instead(_words, _FUNCTIONS[_words])
    )

_OF_BOTH: dict[str, tuple[str, Callable[[Tensor, Tensor, Activation], Tensor]]] = {
    "act_swapped": ("{} is applied to up instead of gate", lambda g, u, f: f(u) * g),
    "act_no_silu": ("{} is not applied", lambda g, u, f: g * u),
    "act_no_gate": ("up is not multiplied in", lambda g, u, f: f(g)),
    "act_squared": ("what {} makes of gate is multiplied by itself, not by up", lambda g, u, f: f(g) * f(g)),
    "act_ungated": ("the gate is left out", lambda g, u, f: u),
    "act_of_product": ("{} is applied to gate times up instead of gate", lambda g, u, f: f(g * u)),
    "act_of_both": ("{} is applied to up as well", lambda g, u, f: f(g) * f(u)),
}


def _of_both(text: str, function: Callable[[Tensor, Tensor, Activation], Tensor]) -> Change:
    def change(op: Op, _: Context) -> Variants:
        words = _GATED[op.kind]
        yield computing(op, _gated(op, lambda g, u: function(g, u, _FUNCTIONS[words]))), text.format(words)

    return change


for _name, (_text, _function) in _OF_BOTH.items():
    AREA.mistake(_name, _text.format("the activation"), _LOOK, GATED, _LINK)(_of_both(_text, _function))


def _halves(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    first, second = torch.stack((gate, up), -1).flatten(-2).chunk(2, -1)
    return first, second


def _by_turns(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat((gate, up), -1)
    return both[..., ::2], both[..., 1::2]


@AREA.mistake(
    "gate_up_split", "gate and up are taken from what holds both in another way", "how gate and up are split", GATED
)
def _split_otherwise(op: Op, context: Context) -> Variants:
    if context.seen is None:
        return  # through a layer it is said of the rows of their weights
    ways: dict[str, Held] = {
        "gate and up lie by turns in one row, whose halves are taken for them": _halves,
        "gate and up are halves of one row, whose values are taken for theirs by turns": _by_turns,
    }
    if op.kind in _HELD:  # of others it is the activation that is applied to up
        ways["gate and up are exchanged"] = lambda gate, up: (up, gate)
    for words, way in ways.items():
        yield computing(op, partial(_made_of, KINDS[op.kind].function, way)), words


def _made_of(right: Callable[..., Tensor], way: Held, gate: Tensor, up: Tensor, **attrs: float) -> Tensor:
    return right(*way(gate, up), **attrs)


@AREA.mistake(
    "act_sigmoid", "the sigmoid is not multiplied by its argument, or used for another activation", _LOOK,
    Where(("swiglu", *_ALONE)), _LINK,
)  # fmt: skip
def _sigmoid(op: Op, _: Context) -> Variants:
    if op.kind == "swiglu":
        yield computing(op, lambda g, u: torch.sigmoid(g) * u), "the sigmoid is not multiplied by its argument"
    elif op.kind == "silu":
        yield computing(op, torch.sigmoid), "the sigmoid is not multiplied by its argument"
    elif op.kind != "sigmoid":
        yield computing(op, torch.sigmoid), f"sigmoid is used for {_ALONE[op.kind]}"


@AREA.mistake(
    "act_skipped", "an activation is left out", "whether it is applied at all",
    Where((*_ALONE, "tanh", "sqr", "exp")),
)  # fmt: skip
def _skipped(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x: x), f"{op.kind} is not applied"


_NEAR = (-1, -0.2, 0.2, 1)  # powers of two that a limit may be off by


def _held(right: Callable[..., Tensor], way: Held, gate: Tensor, up: Tensor, **attrs: float) -> Tensor:
    """What is made of gate and up that are held so, whatever the limit."""
    return _made_of(right, way, gate, up, **{**attrs, "limit": math.inf})


def _held_within(
    right: Callable[..., Tensor],
    way: Callable[[float, Tensor, Tensor], tuple[Tensor, Tensor]],
    number: float,
    **of: Any,
) -> Tensor:
    return _held(right, partial(way, number), **of)


@AREA.mistake(
    "act_limits", "gate and up are not held within their limits", "the clamp before the activation",
    Where(_HELD),
)  # fmt: skip
def _no_limits(op: Op, context: Context) -> Variants:
    limit, right = op.attrs["limit"], KINDS[op.kind].function
    yield op.with_attrs(limit=math.inf), f"values beyond {limit:g} are not cut off"
    ways: dict[str, Held] = {
        f"up is not held within {limit:g}, gate is": lambda gate, up: (gate.clamp(max=limit), up),
        f"gate is not held below {limit:g}, up is": lambda gate, up: (gate, up.clamp(-limit, limit)),
        f"gate is held within -{limit:g} too": lambda gate, up: (gate.clamp(-limit, limit), up.clamp(-limit, limit)),
        f"up is held below {limit:g} alone": lambda gate, up: (gate.clamp(max=limit), up.clamp(max=limit)),
    }
    if op.kind == "swiglu_oai":
        ways[f"up is held within {limit:g} after 1 was added to it"] = lambda gate, up: (
            gate.clamp(max=limit), (up + 1).clamp(-limit, limit) - 1
        )  # fmt: skip
    for words, way in ways.items():
        yield computing(op, partial(_held, right, way)), words
    if context.seen is None:
        return
    others: dict[str, Callable[[float, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        "gate": lambda other, gate, up: (gate.clamp(max=other), up.clamp(-limit, limit)),
        "up": lambda other, gate, up: (gate.clamp(max=limit), up.clamp(-other, other)),
    }
    for what, held in others.items():
        gate, up = context.seen.inputs[:2]
        made = partial(_held_within, right, held, gate=gate, up=up, **op.attrs)
        if number := fitted(made, context.seen.output, (limit * 2.0**i for i in _NEAR)):
            words = f"{what} is held within {number:.6g} instead of {limit:g}"
            yield Variant(computing(op, partial(_held, right, partial(held, number))), words, fitted=True)
    if number := fitted_attr(op, context, "limit", (limit * 2.0**i for i in _NEAR)):
        yield Variant(op.with_attrs(limit=number), f"values are held within {number:.6g} instead of {limit:g}", True)


@AREA.mistake(
    "clamp_ignored", "a value is not held within its bounds, or on one side alone", "the clamp of Q, K and V",
    Where(("clamp",)),
)  # fmt: skip
def _no_clamp(op: Op, _: Context) -> Variants:
    low, high = op.attrs["low"], op.attrs["high"]
    if math.isfinite(low) and math.isfinite(high):
        yield op.with_attrs(low=-math.inf, high=math.inf), f"values are not held within {low:g} and {high:g}"
    if math.isfinite(low):
        yield op.with_attrs(low=-math.inf), f"values below {low:g} are not cut off"
    if math.isfinite(high):
        yield op.with_attrs(high=math.inf), f"values above {high:g} are not cut off"


@AREA.mistake("up_plus_one", "1 is not added to up", "gpt-oss gates up + 1", Where(("swiglu_oai",)))
def _no_plus_one(op: Op, _: Context) -> Variants:
    def function(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * up

    yield computing(op, function), "up is not raised by 1"


@AREA.mistake(
    "alpha_outside", "the factor in the sigmoid multiplies the gate outside of it, too", "x sigmoid(alpha x)",
    Where(("swiglu_oai",)),
)  # fmt: skip
def _alpha_outside(op: Op, _: Context) -> Variants:
    alpha = op.attrs["alpha"]
    words = f"the gate is multiplied by {alpha:.6g} outside of the sigmoid, too"
    yield computing(op, lambda gate, up, **attrs: alpha * KINDS[op.kind].function(gate, up, **attrs)), words


# What the gate is multiplied by in the sigmoid of x sigmoid(beta x); of gpt-oss's, `alpha`, the op says it.
_BETA = MappingProxyType({"silu": 1.0, "swiglu": 1.0, "swiglu_clamp": 1.0, "sigmoid": 1.0,
                          "gelu_quick": 1.702, "geglu_quick": 1.702, "swiglu_oai": 1.702})  # fmt: skip


def _beta(op: Op) -> float:
    return float(op.attrs.get("alpha", _BETA[op.kind]))


def _with_beta(op: Op, beta: float) -> Callable[..., Tensor]:
    return _activating(op, lambda x: torch.sigmoid(beta * x) * (1 if op.kind == "sigmoid" else x))


def _by_another(op: Op, beta: float) -> Variant:
    words = "the factor in the sigmoid is {} instead of {}".format(*told_apart(beta, _beta(op)))
    return Variant(computing(op, _with_beta(op, beta)), words, fitted=True)


@AREA.mistake(
    "sigmoid_factor", "the factor in the sigmoid of an activation is another", "the constant in x sigmoid(beta x)",
    Where((*_BETA,)), number=Number(_beta, _by_another),
)  # fmt: skip
def _factor(op: Op, context: Context) -> Variants:
    right, seen = _beta(op), context.seen
    if seen is None:
        yield _by_another(op, 1.1 * right)._replace(fitted=False)
        return
    starts = (right * 2.0**i for i in (0, -1, 1))
    number = fitted(lambda beta: _with_beta(op, beta)(*seen.inputs), seen.output, starts)
    if number is not None and number != right:
        yield _by_another(op, number)


@AREA.mistake(
    "ffn_act_f16", "the activations of the down projection are kept in float16, which overflows at 65,504",
    "the type of the feed-forward's buffer", GATED, "llama.cpp#27016",
)  # fmt: skip
def _act_f16(op: Op, _: Context) -> Variants:
    yield replace(op, stored="f16"), "activations are float16: coarse, and infinite beyond 65,504"


@AREA.mistake(
    "scale_dropped", "a factor is left out, or applied twice", "the family's scales", Where(("scale",)),
    "sglang-jax#1282",
)  # fmt: skip
def _no_scale(op: Op, _: Context) -> Variants:
    scale = op.attrs["scale"]
    if scale != 1.0:
        yield op.with_attrs(scale=1.0), f"the factor {scale:.6g} is left out"
        yield op.with_attrs(scale=scale * scale), f"the factor {scale:.6g} is applied twice"


@AREA.mistake(
    "scale_rounded", "a factor is rounded to half precision",
    "the type of the constant: transformers makes Gemma's sqrt(n_embd) in the type of the model", Where(("scale",)),
)  # fmt: skip
def _rounded_scale(op: Op, _: Context) -> Variants:
    scale = op.attrs["scale"]
    for rounding in map(rounding_named, HALVES):
        rounded = float(rounding(torch.tensor(scale)))
        if not math.isclose(rounded, scale, rel_tol=1e-6):  # float32 holds it no better
            words = f"the factor {scale:.6g} is rounded to {rounded:.6g}, as {rounding.words} has it"
            yield op.with_attrs(scale=rounded), words
