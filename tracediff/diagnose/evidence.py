"""Three places of an explained record, so that a reader can do the sum by hand: what goes in, what should come out,
what the mistake makes of it, and what was recorded.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tracediff.diagnose.solve.edit import Read
from tracediff.model.graph import Op
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.activation import ACTIVATIONS
from tracediff.numerics.kinds.elementwise import ELEMENTWISE
from tracediff.replay.look import Known
from tracediff.replay.replay import Replay
from tracediff.result import Local, Place
from tracediff.trace.format import OpRecord

_SHOWN = 2  # values of a row that a sum runs over


def shown(replay: Replay, record: OpRecord, error: Local, ops: Sequence[Op]) -> tuple[Place, ...]:
    """Three places of a record, if the engine computed these ops as given; none where it ends a segment."""
    if len(error.segment) > 1:
        return ()
    return _places(replay.graph[record.op], replay.known(record), replay.made(record, ops))


def _places(op: Op, known: Known, mistaken: Tensor) -> tuple[Place, ...]:
    """Where the op is off most, where by a middling amount, and where it is right, if anywhere."""
    off = (known.recorded - known.exact).abs().nan_to_num(torch.inf, torch.inf).flatten()
    wrong = int((off > known.bound.expand(known.exact.shape).flatten()).sum())
    ranks = (0, wrong // 2, len(off) - 1 if wrong < len(off) else (3 * wrong) // 4)
    axes = KINDS[op.kind].axis_names(op, known.exact.ndim)
    found = []
    for flat in dict.fromkeys(_of_rank(off, rank) for rank in ranks):
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), known.exact.shape))
        said = ", ".join(f"{name} {i}" for name, i in zip(axes, at, strict=True))
        values = (float(x.flatten()[flat]) for x in (known.exact, mistaken, known.recorded))
        found.append(Place(said, "; ".join(_inputs(op, known, at)), *values))
    return tuple(found)


def _of_rank(x: Tensor, rank: int) -> int:
    """The place of the value before which `rank` larger ones come, or equal ones that lie before it: a head's millions
    take seconds to sort.
    """
    ends = {0: x.amax, len(x) - 1: x.amin}
    value = ends[rank]() if rank in ends else x.kthvalue(len(x) - rank).values
    return int((x == value).nonzero()[rank - int((x > value).sum()), 0])


def _inputs(op: Op, known: Known, at: tuple[int, ...]) -> Iterator[str]:
    """Of each input the value there, or the row that the sum runs over."""
    for i, (name, x) in enumerate(zip(op.inputs, known.inputs, strict=False)):
        if name == "positions" and op.kind == "softmax":
            continue
        row = _row(op, i, x, at)
        said = ", ".join(f"{v:.5g}" for v in row[:_SHOWN].tolist())
        more = f", ... ({len(row)} values)" if len(row) > _SHOWN else ""
        yield f"{Read(name).words(op)} {said}{more}"


def _row(op: Op, i: int, x: Tensor, at: tuple[int, ...]) -> Tensor:
    match op.kind, i:
        case "scores", 0:
            return x[at[1], at[0]]
        case "scores", 1:
            return x[at[2], at[0] * x.shape[1] // _size(op, 0)]
        case "weighted_values", 0:
            return x[at[-1] // (_size(op, -1) // x.shape[0]), at[0]]
        case "weighted_values", 1:
            d = x.shape[2]
            return x[:, at[-1] // d * x.shape[1] * d // _size(op, -1), at[-1] % d]
    if x.shape == op.shape(len(x)) and op.kind in ELEMENTWISE | ACTIVATIONS:
        return x[at].reshape(1)
    leading = at[: max(1, min(x.ndim - 1, len(at) - 1))]
    return x[leading].flatten() if all(j < n for j, n in zip(leading, x.shape, strict=False)) else x.flatten()


def _size(op: Op, axis: int) -> int:
    """Of an axis that is as long in every step: heads, or channels."""
    size = op.axes[axis]
    assert isinstance(size, int)
    return size
