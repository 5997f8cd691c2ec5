"""Running error analysis: a function of tensors is evaluated once, and with each value the error is carried along that
an engine would have made on the way to it (Wilkinson; Higham, Accuracy and Stability of Numerical Algorithms, 3.3).

So the floor of an op follows from its mathematics, and that of a mistake from the expression that the mistake is. Each
operation knows two things: how errors of its operands pass through it, and what it adds. Roundings are independent of
one another: variances add up. What is not random (the approximation of an exponential, a number too small for the
type) is a bound, and bounds add up in the worst way.

    y, noise = running(function, inputs, each=2.0**-24, sums=2.0**-24)
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tracediff.numerics.error_rules import RULES, Errors, Operand, Units
from tracediff.numerics.floors import Noise


class Running(Tensor):
    """A float64 value with the `variance` of its error and a bound, `hard`, on what is not random.

    `each` is the unit of a value between two operations, `sums` that of a running sum.
    """

    variance: Tensor
    hard: Tensor
    each: float
    sums: float

    @classmethod
    def of(cls, value: Tensor, errors: Errors, units: Units) -> "Running":
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
            if name not in RULES:
                raise NotImplementedError(f"no rule for the errors of {name}: add one to error_rules.py")
            errors = RULES[name](value, units, *map(_operand, args), **kwargs)
            return cls.of(value, _known(errors), units)


def _operand(x: Any) -> Operand:
    return Operand(x.as_subclass(Tensor), x.variance, x.hard, exact=False) if isinstance(x, Running) else Operand(x)


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


def _known(errors: Errors) -> Errors:
    """Without what no number is: of a value that is infinite, or of 0 times infinity, there is no error to speak of."""
    variance, hard = (torch.nan_to_num(e, 0.0, 0.0, 0.0) for e in errors)
    return variance, hard


# Of these the errors lie where the values do.
_STRUCTURAL = frozenset({
    "__get__", "__getitem__", "reshape", "view", "flatten", "unflatten", "permute", "transpose", "swapaxes", "movedim",
    "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "cat", "stack",
    "unbind", "split", "chunk", "narrow", "gather", "clone", "contiguous", "tril", "triu", "roll", "diag_embed", "flip",
    "unfold", "pad",
})  # fmt: skip
# A number of its own; or, detached, the value as if it had no error.
_CONSTANT = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "detach"})


def _softmax(x: Tensor, dim: int) -> Tensor:
    weights = torch.exp(x - x.amax(dim, keepdim=True))
    return weights / weights.sum(dim, keepdim=True)


_COMPOSED: Mapping[str, Callable[..., Tensor]] = MappingProxyType({"softmax": _softmax})
