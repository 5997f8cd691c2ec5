"""Whose rows of its table an embedding looked up: the trace says which ids were fed, and they tell which were."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tracediff.diagnose.rows.told import FEW, OF_ERROR, Told
from tracediff.english import few
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.nmse import nmse
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_COMMON = "rows are those of other ids than the trace says were fed"
_LOOK = (
    "which ids the engine feeds, and which it gives to the trace: those before they are shifted, padded or replaced?"
)


def told(replay: Replay, record: OpRecord, scheme: Scheme) -> Told | None:
    """The ids whose rows a record of an embedding holds; None where some are no rows of its table."""
    op = replay.graph[record.op]
    if op.kind != "embedding" or len(replay.segment(record)) > 1 or record.shape[-1] < FEW:
        return None
    known = replay.known(record, scheme)
    y, right = known.recorded.flatten(1), known.exact.flatten(1)
    if not bool(y.isfinite().all()):
        return None
    table = op.weights[0]
    ids = _nearest(y, replay.weights.slices(table))
    made = replay.weights.gather(table, ids).to(y.dtype)
    if made.shape != y.shape or nmse(made, y) > OF_ERROR * nmse(right, y):
        return None
    tokens = replay.trace.steps[record.step].tokens
    fed = [tokens[row] for row in record.rows or range(len(tokens))]
    if ids.tolist() == fed:  # as they are in the file, where an arithmetic was asked for that rounds them
        return None
    text = f"its rows are those of the ids {few(ids.tolist(), 16)}, where the trace says {few(fed, 16)} were fed"
    return Told(text, nmse(made, y), _COMMON, _LOOK)


def _nearest(y: Tensor, slices: Iterable[Tensor]) -> Tensor:
    """Of each row the place of the one that is nearest to it, int64 [T]."""
    best, at, begun = y.new_full((len(y),), torch.inf), y.new_zeros(len(y), dtype=torch.int64), 0
    for rows in slices:
        rows = rows.to(y)
        left = rows.square().sum(1) - 2 * (y @ rows.T)
        least, places = left.min(1)
        nearer = least < best
        best, at, begun = torch.where(nearer, least, best), torch.where(nearer, begun + places, at), begun + len(rows)
    return at
