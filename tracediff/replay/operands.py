"""What a matmul multiplied in the place of its activations: solved from what came out, where its matrix is known. What
a table holds is seen in its rows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.evaluate import arithmetic_of
from tracediff.numerics.floats import HALVES
from tracediff.numerics.kinds.matmul import rounding_of
from tracediff.numerics.recognise import recognised
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.schemes import EXACTLY, Way, way_in
from tracediff.replay.recompute import Recomputation
from tracediff.trace.format import OpRecord

_WIDEST = 4096  # channels: to solve for 2,048 took 1.3 s on one core, and for twice as many it is eight times that
_ROWS, _MORE = 1.25, 64  # of the matrices, over the channels that are solved for: what is beyond shows whether it is so
_TOKENS = 48  # that are solved for
_FEW_ROWS, _FEW_TOKENS = 512, 8  # that tell a scale, where its type is known
# RMS of what no activations explain, over that of the output: float32 leaves 1e-7, and another matrix 1e-3 and more.
_LEFT = 1e-5
_UNIT = 2.0**-24


@dataclass(frozen=True, slots=True)
class Matmul:
    """Activations x [T, n], some rows [m, n] of the matrices that they were multiplied with, what came out, y [T, m],
    and by how much that is `off`; all float64. The `largest` magnitudes are those of all tokens, these or more.
    """

    x: Tensor
    largest: Tensor
    rows: Tensor
    y: Tensor
    off: Tensor

    def left(self, names: Sequence[str]) -> list[float]:
        """NMSE that is left with activations in each of these roundings."""
        changes = torch.cat([rounding_named(name)(self.x) - self.x for name in names])
        left = (changes @ self.rows.T).unflatten(0, (len(names), -1)).sub_(self.off)
        return (left.square().sum((1, 2)) / self.y.square().sum()).tolist()

    def solved(self) -> tuple[Tensor, Tensor] | None:
        """The activations that were multiplied, [T, n], and the standard deviation of that; None where there are too
        few rows to tell them, or where no activations explain what came out.
        """
        if len(self.rows) < self.x.shape[-1]:
            return None
        q, r = torch.linalg.qr(self.rows)
        if not bool((r.diagonal() != 0).all()):
            return None
        inverse = torch.linalg.solve_triangular(r, torch.eye(len(r), dtype=r.dtype, device=r.device), upper=True)
        along, spare = self.off @ q, len(self.rows) - len(r)
        size = self.y.square().mean(-1, keepdim=True).sqrt()
        left = (self.off - along @ q.T).square().sum(-1, keepdim=True).div(max(1, spare)).sqrt()
        if bool((left > _LEFT * size).any()):
            return None
        spread = torch.maximum(left, _UNIT * size) * inverse.square().sum(-1).sqrt()
        return self.x + along @ inverse.T, spread


def tells_rounding(by: Recomputation, record: OpRecord) -> bool:
    """Whether the record is of a matmul that reads what was recorded, or of a table's rows."""
    return by.op_of(record).kind in ("linear", "embedding") and len(by.segment(record)) == 1


def ways_told(by: Recomputation, record: OpRecord, scheme: Scheme) -> list[Way]:
    """The ways in which activations of a matmul or the rows of a table are rounded, the nearest first; none where they
    are not told.
    """
    op = by.op_of(record)
    part, names = ("matrices", _of_table) if op.kind == "embedding" else ("activations", _of_activations)
    return [way_in(part, name) for name in names(by, record, op, scheme)]


def _of_table(by: Recomputation, record: OpRecord, op: Op, _: Scheme) -> list[str]:
    rows, seen = by.op(record, op, EXACTLY, "f64").exact.flatten(1).cpu(), by.values(record).flatten(1).double().cpu()
    if not bool(seen.isfinite().all()):
        return []
    if record.dtype in HALVES:
        return recognised(rows, seen, rounding_named(record.dtype).step(seen) / 8, record.dtype)
    return recognised(rows, seen, _UNIT * seen.abs().amax(-1, keepdim=True))


def _of_activations(by: Recomputation, record: OpRecord, op: Op, scheme: Scheme) -> list[str]:
    """None by matrices of fewer rows than columns together, or where these are others than the scheme has them."""
    n = op.weights[0].shape[-1]
    matmul = _of(by, record, scheme, math.ceil(n * _ROWS) + _MORE, _TOKENS) if n <= _WIDEST else None
    solved = matmul.solved() if matmul else None
    return recognised(matmul.x.cpu(), solved[0].cpu(), solved[1].cpu()) if matmul and solved else []


def matmul_of(by: Recomputation, record: OpRecord, scheme: Scheme) -> Matmul | None:
    """A small part of the matmul; None where the record is of another op, or not all of it is finite."""
    return _of(by, record, scheme, _FEW_ROWS, _FEW_TOKENS)


def _of(by: Recomputation, record: OpRecord, scheme: Scheme, n_rows: int, n_tokens: int) -> Matmul | None:
    op = by.op_of(record)
    if not _is_plain(op):
        return None
    x = by.inputs(record.step, op, scheme, record.rows)[0].exact.flatten(1)
    tokens = slice(None, None, max(1, len(x) // n_tokens))
    largest, x, rows, y, biases = x.abs().amax(-1), x[tokens], [], [], []
    for one in _products(by, record, op):
        if n_rows <= 0:
            break
        own = by.op_of(one)
        arithmetic, (weight, *bias) = arithmetic_of(own, scheme, by.weights), own.weights
        hold = rounding_of(arithmetic.stored, weight, by.weights)
        n = min(-(-n_rows // hold.n_rows) * hold.n_rows, weight.shape[0])  # rows that share a scale
        rows.append(hold(by.weights.rows(weight, 0, n).to(x.dtype)))
        y.append(by.values(one).flatten(1)[tokens, :n].to(x.dtype))
        added = by.weights.load(bias[0], x.dtype)[:n] if bias else x.new_zeros(n)
        biases.append(rounding_named(arithmetic.biases)(added))
        n_rows -= n
    matrix, out = torch.cat(rows), torch.cat(y, 1)
    off = out - torch.cat(biases) - x @ matrix.T
    return Matmul(x, largest, matrix, out, off) if bool(off.isfinite().all()) else None


def _is_plain(op: Op) -> bool:
    return op.kind == "linear" and op.function is None and op.rework is None


def _products(by: Recomputation, record: OpRecord, op: Op) -> Iterator[OpRecord]:
    """What the engine made of the same activations, the record's own first."""
    yield record
    for other in by.recorded.trace.ops.values():
        if other.step == record.step and other.op != record.op and other.op in by.graph and other.has_data:
            own = by.graph[other.op]
            if _is_plain(own) and (own.reads, own.seen, other.rows) == (op.reads, op.seen, record.rows):
                yield other
