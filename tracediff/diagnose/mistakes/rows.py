"""Mistakes in which rows of a batch a matmul computes."""

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import LINEAR, Area, Context, Variants, computing
from tracediff.model.graph import Op
from tracediff.numerics.kinds.linear import linear

AREA = Area()


@AREA.mistake(
    "row_before", "each row is the result of the row before it", "the row offset into the batch",
    LINEAR, "llama-cpp-python#1179",
)  # fmt: skip
def _row_before(op: Op, _: Context) -> Variants:
    def function(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return linear(torch.cat((x[:1], x[:-1])), w, b)

    yield computing(op, function), "row t is computed from the input of row t - 1"


@AREA.mistake(
    "first_row_only", "every row of the batch is computed from row 0", "the stride of the batch in the kernel",
    LINEAR, "llama.cpp#7903",
)  # fmt: skip
def _first_row(op: Op, _: Context) -> Variants:
    def function(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return linear(x[:1].expand_as(x), w, b)

    yield computing(op, function), "every row is computed from the input of row 0"
