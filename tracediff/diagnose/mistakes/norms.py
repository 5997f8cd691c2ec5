"""Mistakes in norms."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import (
    NORM,
    Area,
    Context,
    Number,
    Variant,
    Variants,
    Where,
    computing,
    fitted_attr,
    weights_of,
)
from tracediff.diagnose.mistakes.weights import without_bias
from tracediff.english import told_apart
from tracediff.model.graph import Op
from tracediff.model.weights import reading, values_of
from tracediff.names import layer_of, local_name
from tracediff.numerics.evaluate import noise_of
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.kind import Call, Made, held
from tracediff.numerics.kinds.norm import RoundedBetween, layer_norm, rms_norm, scaled
from tracediff.numerics.roundings import rounding_named

AREA = Area()
ANY_NORM, RMS_NORM, LAYER_NORM = Where((*NORM.kinds, "l2_norm")), Where(("rms_norm",)), Where(("layer_norm",))
OF_CHANNELS = Where((*RMS_NORM.kinds, *LAYER_NORM.kinds))
_LARGEST, _HALF = (torch.finfo(of).max for of in (torch.float32, torch.float16))
_LONGEST = 1 << 20  # channels that a mean may be taken over
_DECADES = range(-6, 7)  # about the right epsilon


def _adding(op: Op, eps: float) -> Variant:
    words = "eps is {} instead of {}".format(*told_apart(eps, op.attrs["eps"]))
    return Variant(op.with_attrs(eps=eps), words, fitted=True)


@AREA.mistake(
    "eps", "another epsilon in the norm", "the epsilon: it is read from the file, 1e-5 and 1e-6 are both common",
    NORM, "llama.cpp#2373", Number(lambda op: float(op.attrs["eps"]), _adding, (1.1, 1 / 1.1, 1e2, 1e3, 1e4)),
)  # fmt: skip
def _eps(op: Op, context: Context) -> Variants:
    right = op.attrs["eps"]
    if context.seen is None:
        yield op.with_attrs(eps=right * 10), f"eps is {right * 10:g} instead of {right:g}"
        return
    n = context.seen.inputs[0].shape[-1]
    of_sum = right * n  # of an L2 norm; as root mean square it is right with a share of that
    yield op.with_attrs(eps=of_sum), f"eps {of_sum:g} is added to the mean of squares, where it belongs to their sum"
    for eps in (1e-5, 1e-6, 1e-12, 1e-8, 0.0, 1e-4, 1e-3, 1e-7):
        if not (math.isclose(eps, right) or math.isclose(eps, of_sum, rel_tol=1e-6)):
            said = "1e-12 or 0" if eps == 1e-12 else f"{eps:g}"  # float32 cannot tell these
            if theirs := _key_of(eps, context):
                ours = _key_of(right, context)  # some builders of llama.cpp's read none
                belongs = f"its {ours} belongs," if ours else "llama.cpp's graph of this model has"
                words = f"eps is {said}, which the file has as {theirs}; {belongs} {right:g}"
            else:
                words = f"eps is {said} instead of {right:g}"
            yield op.with_attrs(eps=eps), words
    divided = right / n  # where it is added to the sum
    words = f"eps is divided by the number of channels: {divided:.3g} instead of {right:g}"
    yield op.with_attrs(eps=divided), words
    number = fitted_attr(op, context, "eps", (right * 10.0**i for i in _DECADES))
    if number is not None:
        yield _adding(op, number)


def _key_of(eps: float, context: Context) -> str:
    """Under which key the file has this epsilon, without the architecture's name; empty for none."""
    said = context.file.metadata.items()
    own = {key: value for key, value in said if key.endswith((".layer_norm_rms_epsilon", ".layer_norm_epsilon"))}
    alike = (k for k, v in own.items() if isinstance(v, float) and math.isclose(v, eps, rel_tol=1e-5))
    return next(alike, "").partition(".")[2]


def _centred(op: Op, x: Tensor) -> Tensor:
    """What the norm takes the squares of."""
    return x - x.mean(-1, keepdim=True) if op.kind == "layer_norm" else x


def _by_mean(op: Op, mean: Callable[[Tensor], Tensor]) -> Op:
    """The norm by what takes the place of its mean of squares."""

    def function(x: Tensor, *weight: Tensor, eps: float) -> Tensor:
        x = _centred(op, x)
        return scaled(x * torch.rsqrt(mean(x) + eps), *weight)

    return computing(op, function)


def _factor(op: Op, context: Context) -> float:
    """By which what was seen is a multiple of what should be."""
    assert context.seen
    right = KINDS[op.kind].function(context.seen.inputs[0], *weights_of(op, context), **op.attrs)
    return float((right * context.seen.output).sum() / right.square().sum())


@AREA.mistake(
    "eps_outside_root", "the epsilon is added to the root, not under it", "x / (sqrt(mean(x^2)) + eps) in the norm",
    NORM,
)  # fmt: skip
def _eps_outside(op: Op, context: Context) -> Variants:
    def function(x: Tensor, *weight: Tensor, eps: float) -> Tensor:
        x = _centred(op, x)
        return scaled(x / (x.square().mean(-1, keepdim=True).sqrt() + eps), *weight)

    outside, right = computing(op, function), op.attrs["eps"]
    yield outside, "eps is added outside the root"
    others = (right * 10.0**i for i in _DECADES)
    if context.seen and (number := fitted_attr(outside, context, "eps", others)) is not None:
        words = "eps is added outside the root, and is {} instead of {}".format(*told_apart(number, right))
        yield Variant(outside.with_attrs(eps=number), words, fitted=True)


@AREA.mistake(
    "variance_unbiased", "the mean of squares is their sum over n - 1", "torch.var in the norm, whose default is that",
    NORM,
)  # fmt: skip
def _unbiased(op: Op, _: Context) -> Variants:
    unbiased = _by_mean(op, lambda x: x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1))
    yield unbiased, "squares are divided by n - 1 instead of n"


@AREA.mistake(
    "norm_divisor", "the sum of squares is divided by another number than that of channels",
    "the number that the mean in the norm is taken over: that of its row's channels", NORM,
)  # fmt: skip
def _divisor(op: Op, context: Context) -> Variants:
    factor, n = _factor(op, context) if context.seen else 2.0, op.axes[-1]
    if not isinstance(n, int):
        return
    other = round(n * factor**2) if math.isfinite(factor) else 0
    if not 0 < other < _LONGEST or abs(other - n) < 2:  # n - 1 is a mistake of its own
        return

    divided = _by_mean(op, lambda x: x.square().sum(-1, keepdim=True) / other)
    yield divided, f"the sum of squares is divided by {other} where {n} belongs"


@AREA.mistake(
    "norm_of_whole_rows", "the mean of squares in a norm is that of a whole row, of which a part is normed",
    "how many channels the norm is called with: of a product in parts each is normed by itself", RMS_NORM,
)  # fmt: skip
def _of_whole_rows(op: Op, context: Context) -> Variants:
    source, view = context.graph.ops.get(op.inputs[0]), op.seen[0]
    n, whole = op.axes[-1], source.axes[-1] if source else 0
    if view is None or not isinstance(n, int) or not isinstance(whole, int) or not n < whole:
        return

    def function(x: Tensor, rows: Tensor, *weight: Tensor, eps: float) -> Tensor:
        mean = rows.flatten(1).square().mean(-1).reshape(-1, *(1,) * (x.ndim - 1))
        return scaled(x * torch.rsqrt(mean + eps), *weight)

    of = local_name(op.inputs[0])
    words = f"the mean of squares is that of all {whole} channels of {of}, not of the {n} that are normed"
    yield computing(op.also_reading((op.inputs[0], False)), function), words


@AREA.mistake(
    "norm_of_magnitudes", "the norm divides by the mean of magnitudes, or by their sum",
    "what is summed up in the norm, and its root: sqrt(mean(x^2) + eps)", NORM,
)  # fmt: skip
def _of_magnitudes(op: Op, _: Context) -> Variants:
    belongs = "of magnitudes, where the root of the mean of squares belongs"
    divisors: dict[str, Callable[[Tensor, float], Tensor]] = {
        f"the mean {belongs}": lambda sizes, eps: sizes.mean(-1, keepdim=True) + eps,
        f"the sum {belongs}": lambda sizes, eps: sizes.sum(-1, keepdim=True) + eps,
        "sqrt(mean(|x|)^2 + eps), where sqrt(mean(x^2) + eps) belongs":
            lambda sizes, eps: (sizes.mean(-1, keepdim=True).square() + eps).sqrt(),
    }  # fmt: skip
    for words, divisor in divisors.items():
        yield computing(op, partial(_by_magnitudes, op, divisor)), f"values are divided by {words}"


def _by_magnitudes(
    op: Op, divisor: Callable[[Tensor, float], Tensor], x: Tensor, *weight: Tensor, eps: float
) -> Tensor:
    x = _centred(op, x)
    return scaled(x / divisor(x.abs(), eps), *weight)


@AREA.mistake(
    "norm_weight_minus_one", "1 is taken from the norm weight", "a 1 + w convention: GGUF weights have their 1 already",
    NORM, "Liger-Kernel#74",
)  # fmt: skip
def _minus_one(op: Op, _: Context) -> Variants:
    if op.weights:
        yield reading(op, lambda file, info: values_of(file, info) - 1), f"{op.weights[0].name} is used as w - 1"


@AREA.mistake(
    "norm_weight_plus_one", "1 is added to the norm weight", "a 1 + w convention of another family (Gemma)",
    NORM, "mold#1078",
)  # fmt: skip
def _plus_one(op: Op, _: Context) -> Variants:
    if op.weights:
        yield reading(op, lambda file, info: values_of(file, info) + 1), f"{op.weights[0].name} is used as 1 + w"


@AREA.mistake(
    "norm_scaled", "the norm's result is multiplied by a factor",
    "a 'repaired' norm weight: weights far from 1 are normal", NORM, "llama-orch",
)  # fmt: skip
def _norm_scaled(op: Op, context: Context) -> Variants:
    if not op.weights:
        return
    factor = _factor(op, context) if context.seen else 0.1401
    if math.isfinite(factor) and factor not in (0.0, 1.0):
        yield Variant(
            reading(op, lambda file, info: values_of(file, info) * factor),
            f"{op.weights[0].name} or the result is multiplied by {told_apart(factor, 1.0)[0]}",
            fitted=True,
        )


@AREA.mistake(
    "norm_rounded_before_weight", "the normed value is rounded to half precision before the weight multiplies it",
    "the cast back to the input's type: transformers' LlamaRMSNorm has it before the weight, llama.cpp has none",
    RMS_NORM,
)  # fmt: skip
def _rounded(op: Op, _: Context) -> Variants:
    for dtype in ("bf16", "f16") if op.weights else ():
        words = f"the normed value is rounded to {rounding_named(dtype).words} before its weight multiplies it"
        yield replace(op, rework=RoundedBetween(dtype)), words


@AREA.mistake("norm_twice", "the norm is applied twice", "how often it is called", ANY_NORM)
def _twice(op: Op, _: Context) -> Variants:
    right = KINDS[op.kind].function
    yield (
        computing(op, lambda x, *weights, eps: right(right(x, *weights, eps=eps), *weights, eps=eps)),
        ("the result is normed once more, by the same weight"),
    )


@AREA.mistake(
    "norm_axis", "the mean of squares is taken over tokens, over heads, or over all there is",
    "the axis of the mean: channels, the last one", RMS_NORM,
)  # fmt: skip
def _other_axis(op: Op, _: Context) -> Variants:
    for axis, what in enumerate(("tokens", "heads")[: len(op.axes) - 1]):
        averaged = _by_mean(op, partial(_mean_over, axes=(axis,)))
        yield averaged, f"squares are averaged over {what} instead of channels"
    everything = _by_mean(op, partial(_mean_over, axes=tuple(range(len(op.axes)))))
    yield everything, "squares are averaged over all tokens of a step, not of each by itself"


def _mean_over(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.square().mean(axes, keepdim=True)


@AREA.mistake("norm_skipped", "the norm is skipped", "whether the norm is applied at all", ANY_NORM, "aprender#2085")
def _skipped(op: Op, _: Context) -> Variants:
    yield computing(op, lambda x, *weights, eps: x), "the input passes through unchanged"


@AREA.mistake("norm_without_weight", "the norm's weight is not applied", "whether the weight is loaded", NORM)
def _no_weight(op: Op, _: Context) -> Variants:
    if op.weights:
        yield reading(op, lambda file, info: torch.ones(info.shape)), f"{op.weights[0].name} is not applied"


@AREA.mistake(
    "norm_weights_exchanged", "two norms of a layer have each other's weights",
    "the names under which the loader finds the weights of norms", Where(NORM.kinds, in_layer=True),
)  # fmt: skip
def _exchanged(op: Op, context: Context) -> Variants:
    norms = [one for one in context.graph.layer(layer_of(op.name) or 0) if one.kind == op.kind and one.weights]
    for other in norms if op.weights else ():
        if other.name != op.name and [w.shape for w in other.weights] == [w.shape for w in op.weights]:
            pair = " and ".join(local_name(one.name) for one in norms if one.name in (op.name, other.name))
            words = f"uses {other.weights[0].name} in place of its own"
            yield Variant(replace(op, weights=other.weights), words, name=f"{pair} have each other's weights")


@AREA.mistake(
    "norm_weight_twice", "the norm's weight is applied twice",
    "whether the weight is in what is normed, or in what follows, already", NORM,
)  # fmt: skip
def _weight_twice(op: Op, _: Context) -> Variants:
    def function(x: Tensor, *weights: Tensor, eps: float) -> Tensor:
        squares = (weights[0].square(), *weights[1:]) if weights else ()
        return KINDS[op.kind].function(x, *squares, eps=eps)

    if op.weights:
        yield computing(op, function), f"{op.weights[0].name} is applied twice"


@AREA.mistake(
    "layer_norm", "the mean is subtracted: LayerNorm instead of RMS norm", "which norm the family uses", RMS_NORM,
)  # fmt: skip
def _layer_norm(op: Op, _: Context) -> Variants:
    yield computing(op, layer_norm), "the mean is subtracted before norming"


@AREA.mistake(
    "norm_by_deviation", "values are divided by their standard deviation",
    "what a norm divides by: the root of the mean square, no np.std or torch.std", RMS_NORM,
)  # fmt: skip
def _by_deviation(op: Op, _: Context) -> Variants:
    deviating = _by_mean(op, lambda x: (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True))
    yield deviating, "values are divided by their standard deviation, not by their root mean square"


@AREA.mistake(
    "norm_of_all_heads", "Q and K are normed over all heads at once where each has its own norm, or the reverse",
    "the shape in which Q and K are normed: Qwen3 norms each head, OLMo2 all at once",
    Where(NORM.kinds, ("q", "k")),
)  # fmt: skip
def _of_all_heads(op: Op, context: Context) -> Variants:
    norm, head_dim = KINDS[op.kind].function, context.graph.hparams.head_dim
    own = op.axes[-1]
    if len(op.axes) == 3 and op.axes[1] != 1:

        def function(x: Tensor, *weights: Tensor, eps: float) -> Tensor:
            return scaled(norm(x.flatten(1), eps=eps).unflatten(1, x.shape[1:]), *weights)

        yield computing(op, function), "all heads are normed at once, not each by itself"
    elif len(op.axes) == 2 and isinstance(own, int) and own % head_dim == 0 and own > head_dim:

        def each(x: Tensor, *weights: Tensor, eps: float) -> Tensor:
            return scaled(norm(x.unflatten(1, (-1, head_dim)), eps=eps).flatten(1), *weights)

        yield computing(op, each), "each head is normed by itself, not all at once"

        def alike(x: Tensor, *weights: Tensor, eps: float) -> Tensor:
            first = tuple(weight[:head_dim] for weight in weights)
            return scaled(norm(x.unflatten(1, (-1, head_dim)), eps=eps), *first).flatten(1)

        words = "each head is normed by itself, with the weights of the first, not all at once"
        yield computing(op, alike), words


@AREA.mistake(
    "norm_f32_overflow", "the sum of squares overflows float32, so what is normed becomes 0",
    "what made values of 1e18 and more: the norm is as right as float32 lets it be", OF_CHANNELS,
)  # fmt: skip
def _overflows(op: Op, context: Context) -> Variants:
    if _is_beyond(op, context, _LARGEST):
        yield _overflowing(op, _LARGEST), "sums of squares overflow float32, and what is normed becomes 0"


def _is_beyond(op: Op, context: Context, largest: float) -> bool:
    """Whether some sum of squares is larger; of what was not seen that is not known."""
    seen = context.seen
    return seen is None or bool((_centred(op, seen.inputs[0]).square().sum(-1) > largest).any())


def _overflowing(op: Op, largest: float) -> Op:
    """The norm where a larger sum of squares is infinite."""

    def function(x: Tensor, *weight: Tensor, eps: float) -> Tensor:
        x = _centred(op, x)
        total = x.square().sum(-1, keepdim=True)
        inverse = torch.rsqrt(total / x.shape[-1] + eps)
        return scaled(x * torch.where(total > largest, torch.zeros_like(inverse), inverse), *weight)

    return computing(op, function)


@AREA.mistake(
    "norm_f16_overflow", "squares are float16, which overflows beyond |x| = 256, or their sum is, beyond 65,504",
    "the accumulator's type in the norm", OF_CHANNELS, "llama#1048",
)  # fmt: skip
def _norm_f16(op: Op, context: Context) -> Variants:
    def function(x: Tensor, *weight: Tensor, eps: float) -> Tensor:
        squares = x.half().square()
        mean = squares.double().mean(-1, keepdim=True).to(x.dtype)
        return scaled(x * torch.rsqrt(mean + eps), *weight)

    if op.kind == "rms_norm":
        yield computing(op, function), "squares are float16: infinite where |x| > 256"
    words, largest = "the sum of squares is float16: infinite beyond 65,504, and what is normed becomes 0", _HALF
    if _is_beyond(op, context, largest):
        yield _overflowing(op, largest), words


@dataclass(frozen=True, slots=True)
class _InHalf:
    """An RMS norm of values and a weight in half precision, of which each step is rounded, the weight's product apart,
    which is stored: `Op.rework`. The root is rounded before its inverse is, or with it (PyTorch's rsqrt on GPUs): of
    each row, or of all.
    """

    dtype: str
    of_root: tuple[bool, ...]

    def compute(self, call: Call) -> Tensor:
        """The output."""
        return self.made(call.inputs[0], call.op.attrs["eps"], *held(call))

    def noise(self, made: Made) -> Noise:
        """That of the norm; where the mean lies between two numbers so closely that float32 may round it to either,
        what the row is apart then.
        """
        x, eps, weights = made.inputs[0], made.op.attrs["eps"], held(made)
        below, above = (self.made(x, eps, *weights, by=by) for by in (1 - _FLOAT32_SUMS, 1 + _FLOAT32_SUMS))
        own = noise_of(replace(made.op, rework=None), made)
        return replace(own, hard=own.hard + (above - below).abs())

    def made(self, x: Tensor, eps: float, *weights: Tensor, by: float = 1.0) -> Tensor:
        """[..., n] -> [..., n], of means that are a little others."""
        rounded = rounding_named(self.dtype)
        x = rounded(x)
        mean = rounded(rounded(x.square()).mean(-1, keepdim=True) * by)
        root = rounded(mean + eps).sqrt()
        of_root = self.of_root if len(self.of_root) == root.numel() else self.of_root[:1] * root.numel()
        root = torch.where(torch.tensor(of_root, device=x.device).reshape(root.shape), rounded(root), root)
        return scaled(rounded(x * rounded(1 / root)), *map(rounded, weights))


_FLOAT32_SUMS = 1e-6  # of the mean: what sums in float32 are off by


@AREA.mistake(
    "norm_in_half", "all of the norm is computed in half precision",
    "the cast to float32 before the squares: transformers' norms and llama.cpp's have it", RMS_NORM,
)  # fmt: skip
def _in_half(op: Op, context: Context) -> Variants:
    for dtype, of_root in product(("bf16", "f16"), (True, False)):
        steps = f"squares, their mean{', its root' * of_root} and the normed value"
        overflow = ": squares of values beyond 255 overflow" * (dtype == "f16")
        words = f"{steps} are rounded to {rounding_named(dtype).words}, one by one{overflow}"
        rows = _of_roots(op, context, dtype) if of_root and context.seen else (of_root,)
        yield replace(op, rework=_InHalf(dtype, rows)), words


def _of_roots(op: Op, context: Context, dtype: str) -> tuple[bool, ...]:
    """Of which rows the root was rounded before its inverse: PyTorch has 32 on a CPU at once, whose are not, and one by
    one those that are left. All where the other way comes as near to none.
    """
    assert context.seen
    x, eps, weights = context.seen.inputs[0], op.attrs["eps"], weights_of(op, context)
    made = (_InHalf(dtype, (way,)).made(x, eps, *weights) for way in (True, False))
    before, after = ((y - context.seen.output).square().sum(-1).flatten() for y in made)
    return tuple((before <= after).tolist())


@AREA.mistake(
    "rms_norm", "the mean is not subtracted: RMS norm instead of LayerNorm", "which norm the family uses",
    LAYER_NORM,
)  # fmt: skip
def _rms_norm(op: Op, _: Context) -> Variants:
    yield computing(op, rms_norm), "the mean is not subtracted before norming"


@AREA.mistake(
    "variance_uncentred", "the variance is the mean of squares: the mean is subtracted from the values alone",
    "what is squared in the norm: what is left when the mean is subtracted", LAYER_NORM,
)  # fmt: skip
def _uncentred(op: Op, _: Context) -> Variants:
    def function(x: Tensor, *weights: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return scaled(_centred(op, x) * inverse, *weights)

    yield computing(op, function), "the mean is not subtracted from what is squared, only from what is divided"


AREA.mistake("norm_bias_missing", "the norm's bias is not added", "whether the loader reads the norm's .bias", NORM)(
    without_bias
)
