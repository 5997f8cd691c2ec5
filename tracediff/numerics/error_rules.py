"""How errors pass through each operation on tensors, and what it adds: what running error analysis rests on.

A rule takes the operation's value, the units of rounding and its operands, and gives the variance and the bound of the
value's error.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tracediff.numerics.floors import TINY, UNIT, variance_of_sums

Errors = tuple[Tensor, Tensor]  # variance and bound
Units = tuple[float, float]  # of a value between two operations, and of a running sum
NONE = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument: its value, and its errors."""

    x: Any
    variance: Tensor = NONE
    hard: Tensor = NONE
    exact: bool = True

    @property
    def size(self) -> Any:
        """The absolute value."""
        return abs(self.x)


def _rounding(y: Tensor, unit: float) -> Tensor:
    """Of one rounding of y: uniform to a unit on both sides."""
    return unit * unit / 3 * y * y


def _add(y: Tensor, units: Units, a: Operand, b: Operand) -> Errors:
    return a.variance + b.variance + _rounding(y, units[0]), a.hard + b.hard


def _mul(y: Tensor, units: Units, a: Operand, b: Operand) -> Errors:
    variance = a.variance * b.x * b.x + b.variance * a.x * a.x + _rounding(y, units[0])
    return variance, a.hard * b.size + b.hard * (a.size + a.hard) + TINY["f32"]


def _div(y: Tensor, units: Units, a: Operand, b: Operand) -> Errors:
    variance = (a.variance + b.variance * y * y) / (b.x * b.x) + _rounding(y, units[0])
    return variance, (a.hard + b.hard * y.abs()) / b.size + TINY["f32"]


def _pow(y: Tensor, units: Units, a: Operand, n: Operand) -> Errors:
    slope = n.x * a.x ** (n.x - 1)
    return slope * slope * a.variance + _rounding(2 * y, units[0]), abs(slope) * a.hard + TINY["f32"]


def _matmul(y: Tensor, units: Units, a: Operand, b: Operand) -> Errors:
    n, a2, b2 = a.x.shape[-1], a.x.square(), b.x.square()
    variance = units[1] ** 2 * variance_of_sums(n, a2 @ b2, y) + _rounding(y, units[0])
    hard = torch.zeros_like(y)
    if not a.exact:
        variance, hard = variance + a.variance.expand_as(a.x) @ b2, hard + _full(a) @ b.size
    if not b.exact:
        variance, hard = variance + a2 @ b.variance.expand_as(b.x), hard + (a.size + a.hard) @ _full(b)
    return variance, hard


def _full(operand: Operand) -> Tensor:
    return operand.hard + torch.zeros_like(operand.x)


def _sum(y: Tensor, units: Units, a: Operand, *where: Operand, **kwargs: Any) -> Errors:
    axes = [one.x for one in where]
    n = a.x.numel() / max(y.numel(), 1)
    squares = a.x.square().sum(*axes, **kwargs)
    variance = units[1] ** 2 * variance_of_sums(n, squares, y) + _rounding(y, units[0])
    passed = [(e + torch.zeros_like(a.x)).sum(*axes, **kwargs) for e in (a.variance, a.hard)]
    return variance + passed[0], passed[1]


def _mean(y: Tensor, units: Units, a: Operand, *where: Operand, **kwargs: Any) -> Errors:
    n = a.x.numel() / max(y.numel(), 1)
    variance, hard = _sum(y * n, units, a, *where, **kwargs)
    return variance / n**2, hard / n


def _cumsum(y: Tensor, units: Units, a: Operand, *where: Operand, **kwargs: Any) -> Errors:
    (axis,) = [one.x for one in where] or kwargs.values()
    n = torch.ones_like(a.x).cumsum(axis)
    variance = units[1] ** 2 * (n / 3 * a.x.square().cumsum(axis) + n / 9 * y.square())  # as variance_of_sums
    passed = [(e + torch.zeros_like(a.x)).cumsum(axis) for e in (a.variance, a.hard)]
    return variance + passed[0], passed[1]


def _where(y: Tensor, units: Units, condition: Operand, a: Operand, b: Operand) -> Errors:
    return tuple(  # type: ignore[return-value]
        torch.where(condition.x, p + torch.zeros_like(y), q + torch.zeros_like(y))
        for p, q in ((a.variance, b.variance), (a.hard, b.hard))
    )


def _masked_fill(y: Tensor, units: Units, a: Operand, mask: Operand, value: Operand) -> Errors:
    return tuple((e + torch.zeros_like(y)).masked_fill(mask.x, 0.0) for e in (a.variance, a.hard))  # type: ignore[return-value]


def _extreme(y: Tensor, units: Units, a: Operand, b: Operand) -> Errors:
    return _where(y, units, Operand(y == a.x), a, b)


def _clamp(y: Tensor, units: Units, a: Operand, *limits: Operand, **kwargs: Any) -> Errors:
    return _where(y, units, Operand(y == a.x), a, Operand(0.0))


def _along(place: Callable[..., Tensor], y: Tensor, units: Units, a: Operand, *where: Operand, **kwargs: Any) -> Errors:
    axis = where[0].x if where else kwargs["dim"]
    at = place(a.x, axis, keepdim=True)
    errors = [(e + torch.zeros_like(a.x)).gather(axis, at).reshape(y.shape) for e in (a.variance, a.hard)]
    return errors[0], errors[1]


def _logaddexp(y: Tensor, units: Units, a: Operand, b: Operand) -> Errors:
    shares = [torch.exp(one.x - y).nan_to_num(0.0) for one in (a, b)]
    variance = sum(share.square() * one.variance for share, one in zip(shares, (a, b), strict=True))
    return variance + _rounding(y.abs() + 3, units[0]), shares[0] * a.hard + shares[1] * b.hard


def _cast(y: Tensor, units: Units, a: Operand, *args: Operand, **kwargs: Any) -> Errors:
    return a.variance, a.hard


def _exactly(y: Tensor, units: Units, a: Operand) -> Errors:
    return NONE, NONE


_Of = Callable[[Tensor, Tensor], Tensor]


def _through(slope: _Of, own: _Of) -> Callable[..., Errors]:
    """The rule of a function of one variable x with value y: its slope, and what it adds, in units."""

    def rule(y: Tensor, units: Units, a: Operand, **kwargs: Any) -> Errors:
        by = slope(a.x, y)
        return by * by * a.variance + _rounding(own(a.x, y), units[0]), abs(by) * a.hard + TINY["f32"]

    return rule


# exp is good to two units, and to |x| more where its argument is scaled first, as for ex2 on GPUs.
def _of_exp(x: Tensor) -> Tensor:
    return torch.sqrt(4 + x.square())


def of_sigmoid(x: Tensor, unit: float = UNIT["f32"]) -> Tensor:
    """What 1 / (1 + exp(-x)) errs by, in units of 1: of exp(-x) its share of the divisor.

    Some have it as 1/2 and an odd function of x, which is tanh(x / 2) / 2: ONNX Runtime (mlas/lib/logistic.cpp) and
    Eigen a quotient of polynomials, whose three roundings are as large as that part, be the sum next to nothing. Nobody
    has that in half precision.
    """
    s, share = torch.sigmoid(x), torch.sigmoid(-x)
    squares = (x.square() + 4).mul_(share.square()).add_(2).mul_(s.square())
    return squares.add_((s - 0.5).square_(), alpha=3 * min(1.0, UNIT["f32"] / unit) ** 2).sqrt_()


def _sigmoid(y: Tensor, units: Units, a: Operand, **kwargs: Any) -> Errors:
    slope = y * (1 - y)
    own = of_sigmoid(a.x, units[0])
    return slope.square() * a.variance + _rounding(own, units[0]), slope.abs() * a.hard + TINY["f32"]


def _silu(y: Tensor, units: Units, a: Operand, **kwargs: Any) -> Errors:
    s = torch.sigmoid(a.x)
    slope = s * (1 + a.x * (1 - s))
    own = torch.hypot(y, a.x * of_sigmoid(a.x, units[0]))
    # 1 / (1 + exp(88.8)) is 0 where exp overflows, though it should be a denormal.
    hard = slope.abs() * a.hard + TINY["f32"] * (1 + a.x.abs())
    return slope.square() * a.variance + _rounding(own, units[0]), hard


RULES: Mapping[str, Callable[..., Errors]] = MappingProxyType({
    "add": _add, "sub": _add, "__rsub__": _add, "mul": _mul, "div": _div, "matmul": _matmul, "pow": _pow,
    "__rdiv__": lambda y, units, a, b: _div(y, units, b, a),
    "sum": _sum, "mean": _mean, "cumsum": _cumsum, "where": _where, "masked_fill": _masked_fill,
    "maximum": _extreme, "minimum": _extreme, "clamp": _clamp, "amax": partial(_along, torch.argmax),
    "amin": partial(_along, torch.argmin),
    "sigmoid": _sigmoid, "silu": _silu, "logaddexp": _logaddexp,
    **dict.fromkeys(("to", "float", "half", "double", "bfloat16", "nan_to_num"), _cast),
    "neg": _cast, "sign": _exactly, "trunc": _exactly, "floor": _exactly, "ceil": _exactly, "round": _exactly,
    "abs": _cast,
    "relu": _through(lambda x, y: (x > 0).to(y.dtype), lambda x, y: 0.0 * y),
    "square": _through(lambda x, y: 2 * x, lambda x, y: y),
    "sqrt": _through(lambda x, y: 0.5 / y, lambda x, y: y),
    "rsqrt": _through(lambda x, y: 0.5 * y / x, lambda x, y: 2 * y),
    "exp": _through(lambda x, y: y, lambda x, y: y * _of_exp(x)),
    "expm1": _through(lambda x, y: y + 1, lambda x, y: 3 * y),
    "log": _through(lambda x, y: 1 / x, lambda x, y: 2 * y),
    "log1p": _through(lambda x, y: 1 / (1 + x), lambda x, y: 2 * y),
    "tanh": _through(lambda x, y: 1 - y * y, lambda x, y: 3 * y),
    "erf": _through(lambda x, y: 2 / math.sqrt(math.pi) * torch.exp(-x * x), lambda x, y: 8 * y),
    "sin": _through(lambda x, y: torch.cos(x), lambda x, y: torch.full_like(y, 2.0)),
    "cos": _through(lambda x, y: torch.sin(x), lambda x, y: torch.full_like(y, 2.0)),
})  # fmt: skip
