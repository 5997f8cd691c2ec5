"""Mistakes in the type that sums are kept in while they are added up."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.masks import is_bent, masked
from tracediff.diagnose.mistakes.mistake import Area, Context, Variant, Variants, Where, computing
from tracediff.diagnose.mistakes.near import is_near
from tracediff.model.graph import Op
from tracediff.numerics.evaluate import computed, noise_of
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Made
from tracediff.numerics.kinds.norm import scaled
from tracediff.numerics.roundings import rounding_named

AREA = Area()
_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums that are rounded to a type after each term, and the terms as well where `terms` says so."""

    dtype: torch.dtype
    terms: bool

    def on_the_way(self, terms: Iterable[Tensor]) -> Iterator[Tensor]:
        """What the sum is after each term, in its type."""
        total: Tensor | float = 0.0
        for term in terms:
            each = term.float()
            # PyTorch adds two halves in float32, and rounds once.
            total = (total + (each.to(self.dtype) if self.terms else each)).to(self.dtype)
            yield total

    def followed(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[T, n_in] x [n_out, n_in] -> [T, n_out], and the largest sums on the way."""
        total = largest = torch.zeros(len(x), len(rows), dtype=self.dtype, device=x.device)
        for total in self.on_the_way(x[:, i : i + 1] * rows[:, i] for i in range(x.shape[-1])):
            largest = torch.maximum(largest, total.abs())
        return total.to(x.dtype), largest.to(x.dtype)

    def product(self, x: Tensor, rows: Tensor) -> Tensor:
        """[T, n_in] x [n_out, n_in] -> [T, n_out]."""
        return self.followed(x, rows)[0]

    def along(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., 1]."""
        plain = x.as_subclass(Tensor)  # what the terms are off by is far less than the roundings
        *_, total = self.on_the_way(plain.unbind(-1))
        return total.to(plain.dtype).unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class _HalfMatmul:
    """A matmul of such sums: `Op.rework`. The bias is added to them."""

    sums: _Sums

    def compute(self, call: Call) -> Tensor:
        """The output."""
        y = computed(replace(call.op, rework=None), call)
        hold = rounding_named(call.arithmetic.stored)
        matrix, *bias = (hold(call.weights.load(weight)) for weight in call.op.weights)
        x = call.rounded(call.inputs[0].flatten(1), call.arithmetic.operands)
        total, largest = self.sums.followed(x, matrix)
        if call.energy:
            call.energy.last_place = (torch.finfo(self.sums.dtype).eps * largest).reshape(y.shape)
        return (total + bias[0] if bias else total).reshape(y.shape)

    def noise(self, made: Made) -> Noise:
        """That of sums that are followed through their roundings."""
        return noise_of(replace(made.op, rework=None), made)


def _norm(x: Tensor, *weights: Tensor, eps: float, sums: _Sums) -> Tensor:
    mean = sums.along(x.square()) / x.shape[-1]
    return scaled(x * torch.rsqrt(mean + eps), *weights)


def _softmax(op: Op, scores: Tensor, queries: Tensor, keys: Tensor, *, sums: _Sums, **_: Any) -> Tensor:
    logits = masked(op, scores, queries, keys)
    each = torch.exp(logits - logits.amax(-1, keepdim=True))
    return each / sums.along(each)


@AREA.mistake(
    "sums_in_half", "sums are kept in half precision while terms are added one after the other",
    "the type of the accumulator in the kernel: float32", Where(("linear", "rms_norm", "softmax")),
)  # fmt: skip
def _in_half(op: Op, context: Context) -> Variants:
    if op.kind == "softmax" and (is_bent(op) or op.weights):
        return
    for dtype in _TYPES:
        for terms, also in ((False, ""), (True, ", rounded to it too,")):
            sums = _Sums(dtype, terms)
            name = str(dtype).removeprefix("torch.")
            words = f"its sum is kept in {name} while terms{also} are added one after the other"
            match op.kind:
                case "rms_norm":
                    yield Variant(computing(op, partial(_norm, sums=sums)), words)
                case "softmax":
                    yield Variant(computing(op, partial(_softmax, op, sums=sums)), words)
                # Through a segment it would take minutes.
                case "linear" if not context.wrong_from and is_near(op, context, product=sums.product):
                    yield Variant(replace(op, rework=_HalfMatmul(sums)), words)
