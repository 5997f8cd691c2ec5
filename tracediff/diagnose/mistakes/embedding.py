"""Mistakes in the embedding."""

import math

from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Context, Variants, Where, computing
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op
from tracediff.model.weights import reading, values_of

AREA = Area()


@AREA.mistake(
    "embedding_transposed", "the embedding table is read column by column",
    "the stride of the embedding lookup", Where(("embedding",)), "rustorch 22a94650",
)  # fmt: skip
def _embedding_transposed(op: Op, _: Context) -> Variants:
    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        n_vocab, n_embd = info.shape
        return values_of(file, info).reshape(n_embd, n_vocab).T

    yield reading(op, read), "the embedding table is read column by column: row t is the column t"


@AREA.mistake(
    "embedding_scaled", "the embedding is multiplied by sqrt(n_embd), which is Gemma's alone",
    "the embedding scale of another family", Where(("embedding",)), "vllm#48010",
)  # fmt: skip
def _embedding_scaled(op: Op, _: Context) -> Variants:
    scale = math.sqrt(op.weights[0].shape[-1])
    yield (
        computing(op, lambda rows: rows * scale),
        f"embedding rows are multiplied by sqrt(n_embd) = {scale:.4g}",
    )


@AREA.mistake(
    "embedding_row_off", "each row of the table is that of a neighbour",
    "the offset of token ids, or of positions (OPT's begin at 2)", Where(("embedding",)),
)  # fmt: skip
def _embedding_row_off(op: Op, _: Context) -> Variants:
    what = "position" if op.inputs[0] == "positions" else "token"
    for by in (1, -1, 2, -2):

        def read(file: GGUFFile, info: TensorInfo, by: int = by) -> Tensor:
            return values_of(file, info).roll(-by, 0)

        yield reading(op, read), f"{what} t has row t {'+' if by > 0 else '-'} {abs(by)} of {op.weights[0].name}"
