"""Running error analysis: a function of tensors is evaluated once, and with each value the error is carried along that
an engine would have made on the way to it (Wilkinson; Higham, Accuracy and Stability of Numerical Algorithms, 3.3).

So the floor of an op follows from its mathematics, and that of a mistake from the expression that the mistake is. Each
operation knows two things: how errors of its operands pass through it, and what it adds. Roundings are independent of
one another: variances add up. What is not random (the approximation of an exponential, a number too small for the
type) is a bound, and bounds add up in the worst way.

    y, noise = running(function, inputs, each=2.0**-24, sums=2.0**-24)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tracediff.numerics.floors import TINY, Noise

_Errors = tuple[Tensor, Tensor]  # variance and bound
_Units = tuple[float, float]
_NONE = torch.zeros((), dtype=torch.float64)


class Running(Tensor):
    """A float64 value with the `variance` of its error and a bound, `hard`, on what is not random.

    `each` is the unit of a value between two operations, `sums` that of a running sum.
    """

    variance: Tensor
    hard: Tensor
    each: float
    sums: float

    @classmethod
    def of(cls, value: Tensor, errors: _Errors, units: _Units) -> "Running":
        """A value with its errors; these are broadcast to its shape where they are needed."""
        made = value.as_subclass(cls)
        made.variance, made.hard = errors
        made.each, made.sums = units
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Evaluates an operation, and the rule of its errors; raises NotImplementedError where there is none."""
        kwargs = kwargs or {}
        units = next((x.each, x.sums) for x in _flat((*args, *kwargs.values())) if isinstance(x, Running))
        name = func.__name__
        if name in _COMPOSED:
            return _COMPOSED[name](*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            value = func(*_plain(args), **_plain(kwargs))
            if name in _STRUCTURAL and _is_float(value):
                variance = func(*_part(args, "variance"), **kwargs)
                hard = func(*_part(args, "hard"), **kwargs)
                if isinstance(value, Tensor):
                    return cls.of(value, (variance, hard), units)
                return type(value)(
                    cls.of(*each, units) for each in zip(value, zip(variance, hard, strict=True), strict=True)
                )
            if not _is_float(value) or name in _CONSTANT:
                return value
            if name not in _RULES:
                raise NotImplementedError(f"no rule for the errors of {name}: add one to running.py")
            errors = _RULES[name](value, units, *map(_Operand, args), **kwargs)
            return cls.of(value, _known(errors), units)


class _Operand:
    """One argument: its value, and its errors."""

    def __init__(self, x: Any) -> None:
        self.exact = not isinstance(x, Running)
        self.x = x if self.exact else x.as_subclass(Tensor)
        self.variance: Tensor = _NONE if self.exact else x.variance
        self.hard: Tensor = _NONE if self.exact else x.hard

    @property
    def size(self) -> Any:
        """The absolute value."""
        return abs(self.x)


def running(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], each: float, sums: float
) -> tuple[Tensor, Noise]:
    """The value of a function of exact inputs, and the noise of computing it with these units of rounding.

    Floating point inputs and what is made of them carry errors; integer ones are exact.
    """
    exact = (Running.of(x, (torch.zeros_like(x),) * 2, (each, sums)) if x.is_floating_point() else x for x in inputs)
    made = function(*exact)
    y = made.as_subclass(Tensor)
    if not isinstance(made, Running):
        return y, Noise(torch.zeros_like(y), torch.zeros_like(y))
    none = torch.zeros_like(y)
    return y, Noise((made.variance + none).sqrt(), made.hard + none)


def _flat(args: Any) -> Any:
    for x in args:
        if isinstance(x, tuple | list):
            yield from _flat(x)
        else:
            yield x


def _plain(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return type(x)(map(_plain, x))
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    return x.as_subclass(Tensor) if isinstance(x, Running) else x


def _part(x: Any, which: str) -> Any:
    """The arguments with the errors of all values in the place of these."""
    if isinstance(x, tuple | list):
        return type(x)(_part(one, which) for one in x)
    if isinstance(x, Running):
        value = x.as_subclass(Tensor)
        return getattr(x, which) + torch.zeros_like(value)
    return torch.zeros_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x


def _is_float(value: Any) -> bool:
    first = value[0] if isinstance(value, tuple | list) and value else value
    return isinstance(first, Tensor) and first.is_floating_point()


def _known(errors: _Errors) -> _Errors:
    """Without what no number is: of a value that is infinite, or of 0 times infinity, there is no error to speak of."""
    variance, hard = (torch.nan_to_num(e, 0.0, 0.0, 0.0) for e in errors)
    return variance, hard


# --- rules: (value, units, operands) -> variance and bound -------------------------------------------------------


def _rounding(y: Tensor, unit: float) -> Tensor:
    """Of one rounding of y: uniform to a unit on both sides."""
    return unit * unit / 3 * y * y


def _add(y: Tensor, units: _Units, a: _Operand, b: _Operand) -> _Errors:
    return a.variance + b.variance + _rounding(y, units[0]), a.hard + b.hard


def _mul(y: Tensor, units: _Units, a: _Operand, b: _Operand) -> _Errors:
    variance = a.variance * b.x * b.x + b.variance * a.x * a.x + _rounding(y, units[0])
    return variance, a.hard * b.size + b.hard * (a.size + a.hard) + TINY["f32"]


def _div(y: Tensor, units: _Units, a: _Operand, b: _Operand) -> _Errors:
    variance = (a.variance + b.variance * y * y) / (b.x * b.x) + _rounding(y, units[0])
    return variance, (a.hard + b.hard * y.abs()) / b.size + TINY["f32"]


def _pow(y: Tensor, units: _Units, a: _Operand, n: _Operand) -> _Errors:
    slope = n.x * a.x ** (n.x - 1)
    return slope * slope * a.variance + _rounding(2 * y, units[0]), abs(slope) * a.hard + TINY["f32"]


def _matmul(y: Tensor, units: _Units, a: _Operand, b: _Operand) -> _Errors:
    n, a2, b2 = a.x.shape[-1], a.x.square(), b.x.square()
    variance = units[1] ** 2 * (n / 6 * (a2 @ b2) + n / 9 * y.square()) + _rounding(y, units[0])
    hard = torch.zeros_like(y)
    if not a.exact:
        variance, hard = variance + a.variance.expand_as(a.x) @ b2, hard + _full(a) @ b.size
    if not b.exact:
        variance, hard = variance + a2 @ b.variance.expand_as(b.x), hard + (a.size + a.hard) @ _full(b)
    return variance, hard


def _full(operand: _Operand) -> Tensor:
    return operand.hard + torch.zeros_like(operand.x)


def _sum(y: Tensor, units: _Units, a: _Operand, *where: _Operand, **kwargs: Any) -> _Errors:
    axes = [one.x for one in where]
    n = a.x.numel() / max(y.numel(), 1)
    squares = a.x.square().sum(*axes, **kwargs)
    variance = units[1] ** 2 * (n / 6 * squares + n / 9 * y.square()) + _rounding(y, units[0])
    passed = [(e + torch.zeros_like(a.x)).sum(*axes, **kwargs) for e in (a.variance, a.hard)]
    return variance + passed[0], passed[1]


def _mean(y: Tensor, units: _Units, a: _Operand, *where: _Operand, **kwargs: Any) -> _Errors:
    n = a.x.numel() / max(y.numel(), 1)
    variance, hard = _sum(y * n, units, a, *where, **kwargs)
    return variance / n**2, hard / n


def _cumsum(y: Tensor, units: _Units, a: _Operand, *where: _Operand, **kwargs: Any) -> _Errors:
    (axis,) = [one.x for one in where] or kwargs.values()
    n = torch.ones_like(a.x).cumsum(axis)
    variance = units[1] ** 2 * (n / 6 * a.x.square().cumsum(axis) + n / 9 * y.square())
    passed = [(e + torch.zeros_like(a.x)).cumsum(axis) for e in (a.variance, a.hard)]
    return variance + passed[0], passed[1]


def _where(y: Tensor, units: _Units, condition: _Operand, a: _Operand, b: _Operand) -> _Errors:
    return tuple(  # type: ignore[return-value]
        torch.where(condition.x, p + torch.zeros_like(y), q + torch.zeros_like(y))
        for p, q in ((a.variance, b.variance), (a.hard, b.hard))
    )


def _masked_fill(y: Tensor, units: _Units, a: _Operand, mask: _Operand, value: _Operand) -> _Errors:
    return tuple((e + torch.zeros_like(y)).masked_fill(mask.x, 0.0) for e in (a.variance, a.hard))  # type: ignore[return-value]


def _extreme(y: Tensor, units: _Units, a: _Operand, b: _Operand) -> _Errors:
    return _where(y, units, _Operand(y == a.x), a, b)


def _clamp(y: Tensor, units: _Units, a: _Operand, *limits: _Operand, **kwargs: Any) -> _Errors:
    return _where(y, units, _Operand(y == a.x), a, _Operand(0.0))


def _amax(y: Tensor, units: _Units, a: _Operand, *where: _Operand, **kwargs: Any) -> _Errors:
    axis = where[0].x if where else kwargs["dim"]
    at = a.x.argmax(axis, keepdim=True)
    errors = [(e + torch.zeros_like(a.x)).gather(axis, at).reshape(y.shape) for e in (a.variance, a.hard)]
    return errors[0], errors[1]


def _cast(y: Tensor, units: _Units, a: _Operand, *args: _Operand, **kwargs: Any) -> _Errors:
    return a.variance, a.hard


def _exactly(y: Tensor, units: _Units, a: _Operand) -> _Errors:
    return _NONE, _NONE


_Of = Callable[[Tensor, Tensor], Tensor]


def _through(slope: _Of, own: _Of) -> Callable[..., _Errors]:
    """The rule of a function of one variable x with value y: its slope, and what it adds, in units."""

    def rule(y: Tensor, units: _Units, a: _Operand, **kwargs: Any) -> _Errors:
        by = slope(a.x, y)
        return by * by * a.variance + _rounding(own(a.x, y), units[0]), abs(by) * a.hard + TINY["f32"]

    return rule


# exp is good to two units, and to |x| more where its argument is scaled first, as for ex2 on GPUs.
def _of_exp(x: Tensor) -> Tensor:
    return torch.sqrt(4 + x.square())


def _of_sigmoid(x: Tensor) -> Tensor:
    """In units of 1 / (1 + exp(-x)): of exp(-x) its share of the divisor."""
    return torch.sqrt(2 + (4 + x.square()) * torch.sigmoid(-x).square())


def _silu(y: Tensor, units: _Units, a: _Operand, **kwargs: Any) -> _Errors:
    s = torch.sigmoid(a.x)
    slope = s * (1 + a.x * (1 - s))
    own = y * torch.sqrt(3 + (4 + a.x.square()) * (1 - s).square())
    # 1 / (1 + exp(88.8)) is 0 where exp overflows, though it should be a denormal.
    hard = slope.abs() * a.hard + TINY["f32"] * (1 + a.x.abs())
    return slope.square() * a.variance + _rounding(own, units[0]), hard


_RULES: Mapping[str, Callable[..., _Errors]] = MappingProxyType({
    "add": _add, "sub": _add, "__rsub__": _add, "mul": _mul, "div": _div, "matmul": _matmul, "pow": _pow,
    "__rdiv__": lambda y, units, a, b: _div(y, units, b, a),
    "sum": _sum, "mean": _mean, "cumsum": _cumsum, "where": _where, "masked_fill": _masked_fill,
    "maximum": _extreme, "minimum": _extreme, "clamp": _clamp, "amax": _amax, "silu": _silu,
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
    "sigmoid": _through(lambda x, y: y * (1 - y), lambda x, y: y * _of_sigmoid(x)),
    "tanh": _through(lambda x, y: 1 - y * y, lambda x, y: 3 * y),
    "erf": _through(lambda x, y: 2 / math.sqrt(math.pi) * torch.exp(-x * x), lambda x, y: 8 * y),
    "sin": _through(lambda x, y: torch.cos(x), lambda x, y: torch.full_like(y, 2.0)),
    "cos": _through(lambda x, y: torch.sin(x), lambda x, y: torch.full_like(y, 2.0)),
})  # fmt: skip
# Of these the errors lie where the values do.
_STRUCTURAL = frozenset({
    "__get__", "__getitem__", "reshape", "view", "flatten", "unflatten", "permute", "transpose", "swapaxes", "movedim",
    "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "cat", "stack",
    "unbind", "split", "chunk", "narrow", "gather", "clone", "contiguous", "tril", "triu", "roll", "diag_embed", "flip",
    "unfold", "pad",
})  # fmt: skip
_CONSTANT = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})


def _softmax(x: Tensor, dim: int) -> Tensor:
    weights = torch.exp(x - x.amax(dim, keepdim=True))
    return weights / weights.sum(dim, keepdim=True)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


_COMPOSED: Mapping[str, Callable[..., Tensor]] = MappingProxyType({"softmax": _softmax, "gelu": _gelu})
