"""Mistakes in the embedding."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Context, Seen, Variant, Variants, Where, computing
from tracediff.diagnose.rearranged import Reread
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op
from tracediff.model.weights import reading, values_of

AREA = Area()
_CLOSE = 1e-3  # of a row's length: by so much a recorded row may be off the table's
_NEAR = (1, -1, 2, -2)  # rows off that are tried where none can be seen: of one id, or behind other ops
_LISTED = 4  # ids of which each is told what it was taken for


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
    yield computing(op, lambda rows: rows * scale), f"embedding rows are multiplied by sqrt(n_embd) = {scale:.4g}"


@AREA.mistake(
    "embedding_row_off", "each row of the table is that of a neighbour",
    "the offset of token ids, or of positions (OPT's begin at 2)", Where(("embedding",)),
)  # fmt: skip
def _embedding_row_off(op: Op, context: Context) -> Variants:
    what = "position" if op.inputs[0] == "positions" else "token"
    taken = _taken(op, context, context.seen) if context.seen else {}
    n_rows = op.weights[0].shape[0]
    offsets = {(row - token) % n_rows for token, row in taken.items()}
    seen = {by if by <= n_rows // 2 else by - n_rows for by in offsets if len(offsets) == 1 < len(taken)}
    for by in dict.fromkeys((*_NEAR, *seen)):

        def rows(ids: Tensor, by: int = by) -> Tensor:
            return (ids + by) % len(ids)

        words = f"{what} t has row t {'+' if by > 0 else '-'} {abs(by)} of {op.weights[0].name}"
        yield Variant(_other_rows(op, rows), words, fitted=by not in _NEAR)


@dataclass(frozen=True, slots=True)
class _Restarting(Reread):
    """Positions are counted from the step's first token on: `Op.rework`."""

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of the step, the first at 0."""
        (positions,) = inputs
        return [positions - positions.flatten()[0]]


@AREA.mistake(
    "positions_restart", "each step looks its positions up from the table's first row on",
    "the position ids of later chunks and of decode steps", Where(("embedding",)),
)  # fmt: skip
def _restarting(op: Op, _: Context) -> Variants:
    if op.inputs[0] == "positions":
        yield replace(op, rework=_Restarting()), f"positions of each step begin at row 0 of {op.weights[0].name}"


@AREA.mistake(
    "token_ids_cut", "token ids are clipped, taken modulo a number, or cut to fewer bits",
    "the type of token ids, and a clamp of them to a vocabulary of another size", Where(("embedding",)),
)  # fmt: skip
def _cut(op: Op, context: Context) -> Variants:
    what = "positions" if op.inputs[0] == "positions" else "token ids"
    taken = _taken(op, context, context.seen) if context.seen else {}
    for bits in (8, 16):
        if op.weights[0].shape[0] > 1 << bits:
            yield _other_rows(op, lambda t, bits=bits: t % (1 << bits)), f"{what} are cut to {bits} bits"  # type: ignore[misc]
    for words, rows in _told(taken, _right(context.seen, taken)) if context.seen and taken else ():
        yield Variant(_other_rows(op, rows), f"{what} {words}", fitted=True)


def _other_rows(op: Op, rows: Callable[[Tensor], Tensor]) -> Op:
    """The op with the rows of other ids, each in the place of an id's own."""

    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        values = values_of(file, info)
        return values[rows(torch.arange(len(values)))]

    return reading(op, read)


def _taken(op: Op, context: Context, seen: Seen) -> dict[int, int]:
    """Of ids whose rows are wrong the ids that have those rows; none where some have no such row."""
    table = values_of(context.file, context.file.tensors[op.weights[0].name]).to(seen.output)
    ids = seen.inputs[0].flatten().long()
    y, near = seen.output.flatten(1), _CLOSE * table.norm(dim=1)
    found: dict[int, int] = {}
    for at, token in enumerate(ids.tolist()):
        if token not in found and (y[at] - table[token]).norm() > near[token]:
            apart = (table - y[at]).norm(dim=1)
            row = int(apart.argmin())
            if apart[row] > near[row]:
                return {}
            found[token] = row
    return found


def _right(seen: Seen, taken: dict[int, int]) -> list[int]:
    """The ids that have their own rows."""
    return [token for token in seen.inputs[0].flatten().tolist() if token not in taken]


def _told(taken: dict[int, int], right: list[int]) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """What makes these of those: a modulus, a clip, or a list. A single id tells no rule."""
    if len(taken) + len(right) > 1:
        yield from _rules(taken, right)
    if len(taken) <= _LISTED:
        listed = ", ".join(f"{token} for {row}" for token, row in sorted(taken.items()))
        yield f"are taken for others: {listed}", lambda ids: _listed(ids, taken)


def _rules(taken: dict[int, int], right: list[int]) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    n, others = math.gcd(*(token - row for token, row in taken.items())), {*taken.values()}
    if n > max((*others, *right)):
        yield f"are taken modulo {n}", lambda ids: ids % n
    (last, *more) = others
    if not more and last >= max(right, default=0):
        yield f"are clipped to {last}", lambda ids: ids.clamp(max=last)
    if not more and min(taken) > max(right, default=-1):
        first = min(taken)
        yield f"from {first} on are taken for {last}", lambda ids: torch.where(ids < first, ids, last)


def _listed(ids: Tensor, taken: dict[int, int]) -> Tensor:
    other = ids.clone()
    for token, row in taken.items():
        other[token] = row
    return other
