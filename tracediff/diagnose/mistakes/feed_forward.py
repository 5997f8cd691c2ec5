"""Mistakes in the activation of the feed-forward."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Change, Context, Variants, Where, computing
from tracediff.model.graph import Op

AREA = Area()
GATED = Where(("swiglu",))

_ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "act_gelu": ("GELU is used for SiLU", lambda g, u: torch.nn.functional.gelu(g) * u),
    "act_gelu_tanh": ("GELU (tanh) is used for SiLU", lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u),
    "act_relu": ("ReLU is used for SiLU", lambda g, u: torch.relu(g) * u),
    "act_swapped": ("SiLU is applied to up instead of gate", lambda g, u: torch.nn.functional.silu(u) * g),
    "act_no_silu": ("SiLU is not applied", lambda g, u: g * u),
    "act_sigmoid": ("the sigmoid is not multiplied by its argument", lambda g, u: torch.sigmoid(g) * u),
    "act_no_gate": ("up is not multiplied in", lambda g, u: torch.nn.functional.silu(g)),
}  # fmt: skip


def _activation(text: str, function: Callable[[Tensor, Tensor], Tensor]) -> Change:
    def change(op: Op, _: Context) -> Variants:
        yield computing(op, function), text

    return change


for _name, (_text, _function) in _ACTIVATIONS.items():
    AREA.mistake(_name, _text, "the activation of the gated feed-forward", GATED, "candle#3745")(
        _activation(_text, _function)
    )


@AREA.mistake(
    "ffn_act_f16", "the activations of the down projection are kept in float16, which overflows at 65,504",
    "the type of the feed-forward's buffer", GATED, "llama.cpp#27016",
)  # fmt: skip
def _act_f16(op: Op, _: Context) -> Variants:
    yield replace(op, stored="f16"), "activations are float16: coarse, and infinite beyond 65,504"
