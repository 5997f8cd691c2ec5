"""Mistakes in what one step hands on to the next, and in what is computed with it."""

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Context, Variants, Where, computing
from tracediff.model.graph import Op
from tracediff.model.weights import reading, values_of
from tracediff.numerics.kinds.recurrent import ssm_conv, ssm_scan

AREA = Area()


@AREA.mistake(
    "state_not_carried", "a step begins with an empty state",
    "where the state is kept between steps, and when it is reset", Where(("state",)),
)  # fmt: skip
def _not_carried(op: Op, _: Context) -> Variants:
    yield computing(op, torch.zeros_like), f"{op.name} is zeros: the step before left another"


@AREA.mistake(
    "conv_reversed", "the convolution runs the other way", "the order of the kernel's taps", Where(("ssm_conv",)),
)  # fmt: skip
def _reversed(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x, w: ssm_conv(x, w.flip(-1))), "the taps of the kernel are in the reverse order"


@AREA.mistake(
    "rate_without_softplus", "the rate of the state is taken as it is, without its softplus", "the softplus of dt",
    Where(("ssm_scan",)),
)  # fmt: skip
def _rate(op: Op, _: Context) -> Variants:
    def function(*operands: Tensor, snapshots: int = 1) -> Tensor:
        return ssm_scan(*operands, snapshots=snapshots, softplus=lambda x: x)

    yield computing(op, function), "dt is used without its softplus"


@AREA.mistake(
    "decay_as_logarithm", "the decay of the state is taken for its logarithm", "A_log: GGUF files hold -exp(A_log)",
    Where(("ssm_scan",)),
)  # fmt: skip
def _logarithm(op: Op, _: Context) -> Variants:
    words = f"{op.weights[0].name} is used as -exp(a): a file holds that already"
    yield reading(op, lambda file, info: -torch.exp(values_of(file, info))), words
