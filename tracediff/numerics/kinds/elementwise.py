"""Arithmetic element by element. The second operand repeats where it is smaller, as ggml has it (ggml_can_repeat)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Kind, Made, analysed, applied, expressed_as, one_rounding
from tracediff.numerics.kinds.matmul import turns


def repeated(x: Tensor, like: Tensor) -> Tensor:
    """X over and over along each axis until it has the shape of `like`, of which it divides every axis."""
    if x.shape == like.shape:
        return x
    x = x.reshape((1,) * (like.ndim - x.ndim) + tuple(x.shape))
    return x.repeat([n // m for n, m in zip(like.shape, x.shape, strict=True)])


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def of_repeated(a: Tensor, b: Tensor) -> Tensor:
        return function(a, repeated(b, a)) if a.numel() >= b.numel() else function(repeated(a, b), b)

    return of_repeated


add = _binary(lambda a, b: a + b)
sub = _binary(lambda a, b: a - b)
mul = _binary(lambda a, b: a * b)
div = _binary(lambda a, b: a / b)


def scale(x: Tensor, *, scale: float, bias: float = 0.0) -> Tensor:
    """X * scale + bias."""
    return x * scale + bias if bias else x * scale


def clamp(x: Tensor, *, low: float, high: float) -> Tensor:
    """X within bounds."""
    return x.clamp(low, high)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x itself beyond 20 (ggml_compute_softplus_f32)."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def softplus_as_computed(x: Tensor) -> Tensor:
    """The same less exactly, as engines have it: of a number far below 0 little is left beside 1."""
    return torch.where(x > 20, x, torch.log(1 + torch.exp(x.clamp(max=20.0))))


def rounded(x: Tensor) -> Tensor:
    """To the nearest whole number, halves away from 0 as C does."""
    return torch.sign(x) * torch.floor(x.abs() + 0.5)


def _sum(call: Call) -> Tensor:
    """Of a residual and what is added to it, which an engine may round, be it in several terms [n, ..., channel]."""
    if call.arithmetic.operands == "f64":
        return applied(call)
    terms, stream = call.inputs
    several = terms.ndim > len(call.op.axes)
    if call.energy:
        turned = turns(terms, call.arithmetic.operands).abs()
        call.energy.turned = turned.sum(0) if several else turned
    added = call.rounded(terms, call.arithmetic.operands)
    return applied(replace(call, inputs=(added.sum(0) if several else added, stream)))


def _sum_noise(made: Made) -> Noise:
    several = made.inputs[0].ndim > len(made.op.axes)
    added = replace(made, inputs=(made.inputs[0].sum(0), *made.inputs[1:])) if several else made
    noise, turned = analysed(added) if made.op.function else one_rounding(made), made.energy.turned
    return noise if turned is None else replace(noise, hard=noise.hard + turned)


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sqr": torch.square, "sqrt": torch.sqrt, "exp": torch.exp, "log": torch.log, "sin": torch.sin, "cos": torch.cos,
    "neg": torch.neg, "abs": torch.abs, "sgn": torch.sign, "floor": torch.floor, "ceil": torch.ceil,
    "round": rounded, "trunc": torch.trunc, "step": lambda x: (x > 0).to(x.dtype),
}  # fmt: skip
KINDS = (
    Kind("add", add, ("a", "b"), compute=_sum, noise=_sum_noise, scheme="vectors"),
    *(Kind(name, f, ("a", "b"), scheme="vectors") for name, f in {"sub": sub, "mul": mul, "div": div}.items()),
    Kind("scale", scale, ("x",), keeps_part=True),
    Kind("clamp", clamp, ("x",), keeps_part=True),
    Kind("softplus", softplus, ("x",), noise=expressed_as(softplus_as_computed)),
    Kind("expm1", torch.expm1, ("x",), noise=expressed_as(lambda x: torch.exp(x) - 1)),
    *(Kind(name, f, ("x",)) for name, f in _UNARY.items()),
)
ELEMENTWISE = frozenset(kind.name for kind in KINDS)
