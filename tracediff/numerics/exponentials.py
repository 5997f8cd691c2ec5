"""Exponentials as engines approximate them for speed: followed, so that as little is left as of any other op."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tracediff.errors import EngineError

_NEAR = 2.0**-15  # of a half: as near may an argument of up to 128, in float32 and scaled, lie to one
_NEXT = 2.0**-22  # of an argument: as near may it lie to a boundary of float16's, in float32 and scaled


@dataclass(frozen=True, slots=True)
class Polynomial:
    """e^x = 2^n p(f), n being x / ln 2 to the nearest whole number, f what is over, and p the Taylor polynomial of 2^f.

    A vector unit takes `lanes` values of a row at a time so; those that fill no vector are exact, as expf is.
    (distributed-llama, nn-cpu-ops.cpp, expf_avx2: degree 4, 8 lanes, up to 4.2e-5 off.)
    """

    degree: int
    lanes: int

    @property
    def words(self) -> str:
        """As in a sentence."""
        return f"exponentials by polynomials of degree {self.degree}, {self.lanes} at a time"

    def over_exact(self, x: Tensor, other_side: bool) -> Tensor:
        """What e^x comes to, over what it should be: 2^-f p(f). On the `other_side` of a half where x lies on one."""
        whole = torch.round(x / math.log(2))
        over = x - whole * math.log(2)
        if other_side:
            halfway = math.log(2) / 2
            over = torch.where(over.abs() > halfway - _NEAR, over - over.sign() * math.log(2), over)
        return sum(over**k / math.factorial(k) for k in range(self.degree + 1)) * torch.exp(-over)

    def in_vectors(self, counted: Tensor) -> Tensor:
        """Which of the values that count in their rows fill vectors, bool."""
        place, n = counted.cumsum(-1) - 1, counted.sum(-1, keepdim=True)
        return counted & (place < n // self.lanes * self.lanes)


@dataclass(frozen=True, slots=True)
class Table:
    """e^x from a table of every float16: of the nearest one to x, rounded to float16 itself.

    (ggml until 2024, ggml_table_exp_f16, and those who took it over: crabml, cpu/primitives/softmax.rs and silu.rs.)
    """

    @property
    def words(self) -> str:
        """As in a sentence."""
        return "exponentials looked up in float16"

    def over_exact(self, x: Tensor, other_side: bool) -> Tensor:
        """What e^x comes to, over what it should be. On the `other_side` of a boundary where x lies next to one."""
        nearest = x.half()
        if other_side:
            above, below = ((x * (1 + by)).half() for by in (_NEXT, -_NEXT))
            nearest = torch.where(above != nearest, above, below)
        looked_up = nearest.to(x).exp().half().to(x)
        return torch.where(looked_up == 0, 0.0, looked_up * torch.exp(-x))

    def in_vectors(self, counted: Tensor) -> Tensor:
        """All that count."""
        return counted


Exponential = Polynomial | Table


def exponential_of(by: Exponential, x: np.ndarray) -> np.ndarray:
    """e^x of numbers that all fill vectors, as rows do whose sizes are multiples of these."""
    return np.exp(x) * by.over_exact(torch.tensor(x), False).numpy()


class Approximated(TorchFunctionMode):
    """Within it functions of torch have these exponentials, be it in a mistaken engine's formula or in the right one.

    Of an argument that lies on a half, those of the `other_side`.
    """

    def __init__(self, exponential: Exponential, other_side: bool = False) -> None:
        super().__init__()
        self._by, self._other_side = exponential, other_side

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        match func.__name__:
            case "softmax":
                return self._softmax(*args)
            case "sigmoid":
                return self._sigmoid(*args)
            case "silu":
                return args[0] * self._sigmoid(args[0])
        return func(*args, **(kwargs or {}))

    def _over(self, x: Tensor, counted: Tensor) -> Tensor:
        over = self._by.over_exact(x.masked_fill(~counted, 0.0), self._other_side)
        return torch.where(self._by.in_vectors(counted), over, 1.0)

    def _softmax(self, x: Tensor, dim: int) -> Tensor:
        weights = torch.softmax(x, dim) * self._over(x - x.amax(dim, keepdim=True), x.isfinite())
        return weights / weights.sum(dim, keepdim=True)

    def _sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + r exp(-x)), s being the right one: s / (s + r (1 - s))."""
        right, over = torch.sigmoid(x), self._over(-x, x.isfinite())
        return right / (right + over * torch.sigmoid(-x))


def approximated(name: str, other_side: bool = False) -> AbstractContextManager[object]:
    """Within it functions of torch have exponentials of this name; those of torch where it is empty."""
    return Approximated(exponential_named(name), other_side) if name else nullcontext()


@cache
def exponential_named(name: str) -> Exponential:
    """By its name: `f16` a table's, taylorD/N a polynomial of degree D, N at a time.

    Raises EngineError for any other.
    """
    if name == "f16":
        return Table()
    if found := re.fullmatch(r"taylor([1-9])/([1-9]\d?)", name):
        return Polynomial(int(found[1]), int(found[2]))
    raise EngineError(f"unknown exponential {name!r}: f16 is known, and taylorD/N of degree D, N at a time.")
