"""Mistakes in norms."""

import math

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.fit import fitted
from tracediff.diagnose.mistakes.mistake import NORM, Area, Context, Variant, Variants, computing, reading, values_of
from tracediff.model.graph import Op
from tracediff.numerics.kinds.norm import layer_norm, rms_norm

AREA = Area()
_DECADES = range(-6, 7)  # about the right epsilon


@AREA.mistake(
    "eps", "another epsilon in the norm", "the epsilon: it is read from the file, 1e-5 and 1e-6 are both common",
    NORM, "llama.cpp#2373",
)  # fmt: skip
def _eps(op: Op, context: Context) -> Variants:
    right = op.attrs["eps"]
    if context.seen is None:
        yield op.with_attrs(eps=right * 10), f"eps is {right * 10:g} instead of {right:g}"
        return
    for eps in (1e-5, 1e-6, 1e-12, 1e-8, 0.0, 1e-4, 1e-3, 1e-7):
        if not math.isclose(eps, right):
            yield op.with_attrs(eps=eps), f"eps is {eps:g} instead of {right:g}"
    seen, weight = context.seen, _weight_of(op, context)
    number = fitted(
        lambda eps: rms_norm(seen.inputs[0], weight, eps=eps), seen.output, (right * 10.0**i for i in _DECADES)
    )
    if number is not None:
        yield Variant(op.with_attrs(eps=number), f"eps is {number:.6g} instead of {right:g}", fitted=True)


@AREA.mistake(
    "eps_outside_root", "the epsilon is added to the root, not under it", "x / (sqrt(mean(x^2)) + eps) in the norm",
    NORM,
)  # fmt: skip
def _eps_outside(op: Op, _: Context) -> Variants:
    def function(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * w

    yield computing(op, function), "eps is added outside the root"


@AREA.mistake(
    "norm_weight_minus_one", "1 is taken from the norm weight", "a 1 + w convention: GGUF weights have their 1 already",
    NORM, "Liger-Kernel#74",
)  # fmt: skip
def _minus_one(op: Op, _: Context) -> Variants:
    yield reading(op, lambda file, info: values_of(file, info) - 1), f"{op.weights[0].name} is used as w - 1"


@AREA.mistake(
    "norm_weight_plus_one", "1 is added to the norm weight", "a 1 + w convention of another family (Gemma)",
    NORM, "mold#1078",
)  # fmt: skip
def _plus_one(op: Op, _: Context) -> Variants:
    yield reading(op, lambda file, info: values_of(file, info) + 1), f"{op.weights[0].name} is used as 1 + w"


@AREA.mistake(
    "norm_scaled", "the norm's result is multiplied by a factor",
    "a 'repaired' norm weight: weights far from 1 are normal", NORM, "llama-orch",
)  # fmt: skip
def _norm_scaled(op: Op, context: Context) -> Variants:
    factor = 0.1401
    if context.seen:
        right = rms_norm(context.seen.inputs[0], _weight_of(op, context), eps=op.attrs["eps"])
        factor = float((right * context.seen.output).sum() / right.square().sum())
    if factor != 1.0:
        yield Variant(
            reading(op, lambda file, info: values_of(file, info) * factor),
            f"{op.weights[0].name} or the result is multiplied by {factor:.4g}",
            fitted=True,
        )


def _weight_of(op: Op, context: Context) -> Tensor:
    return values_of(context.file, context.file.tensors[op.weights[0].name]).double()


@AREA.mistake(
    "norm_skipped", "the norm is skipped", "whether the norm is applied at all", NORM, "aprender#2085",
)  # fmt: skip
def _skipped(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x, w, eps: x), "the input passes through unchanged"


@AREA.mistake("norm_without_weight", "the norm's weight is not applied", "whether the weight is loaded", NORM)
def _no_weight(op: Op, _: Context) -> Variants:
    yield reading(op, lambda file, info: torch.ones(info.shape)), f"{op.weights[0].name} is not applied"


@AREA.mistake(
    "layer_norm", "the mean is subtracted: LayerNorm instead of RMS norm", "which norm the family uses", NORM,
)  # fmt: skip
def _layer_norm(op: Op, _: Context) -> Variants:
    def function(x: Tensor, w: Tensor, eps: float) -> Tensor:
        return layer_norm(x, w, eps=eps)

    yield computing(op, function), "the mean is subtracted before norming"


@AREA.mistake(
    "norm_f16_overflow", "the mean of squares is taken in float16, which overflows beyond |x| = 256",
    "the accumulator's type in the norm", NORM, "llama#1048",
)  # fmt: skip
def _norm_f16(op: Op, _: Context) -> Variants:
    def function(x: Tensor, w: Tensor, eps: float) -> Tensor:
        squares = x.half().square()
        mean = squares.double().mean(-1, keepdim=True).to(x.dtype)
        return x * torch.rsqrt(mean + eps) * w

    yield computing(op, function), "squares are float16: infinite where |x| > 256"
