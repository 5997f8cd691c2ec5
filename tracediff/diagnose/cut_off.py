"""Values that are cut off to half precision when they are stored, where they should be rounded.

Floors have room for that: half a unit more. That all errors lie on one side tells it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tracediff.diagnose.evidence import shown
from tracediff.diagnose.mistakes.weights import LOOK_AT_ROUNDING
from tracediff.diagnose.rearranged import Rearranged
from tracediff.numerics.floats import Rounding
from tracediff.numerics.roundings import rounding_named
from tracediff.replay.replay import Replay
from tracediff.result import Cause, Local, OpResult

_NAME = "stored_cut"
# In bounds, which have room for one unit: an engine that cuts everything off does so between the parts of an op too
# (llama-nuts-and-bolts: 1.0 to 1.1 of norms, ropes and gates).
_PARTS = 2.0


def named(replay: Replay, ops: Sequence[OpResult]) -> list[OpResult]:
    """The ops, with their cause those in which nothing else is wrong."""
    stored = [op.local for op in ops if op.local and op.local.stored]
    most = _PARTS if 2 * sum(local.cut_off for local in stored) > len(stored) else 1.0

    def is_all(op: OpResult, local: Local) -> bool:
        within = local.excess <= most and local.nmse <= local.floor
        return op.status == "faulty" and local.stored is not None and within and (local.cut_off or most > 1)

    return [_named(replay, op, op.local) if op.local and is_all(op, op.local) else op for op in ops]


def _named(replay: Replay, op: OpResult, local: Local) -> OpResult:
    assert local.stored
    record, right = replay.trace.ops[op.step, op.op], replay.graph[op.op]
    changed = replace(right, rework=CutOff(rounding_named(f"cut {local.stored}")))
    under = replay.under(record, [changed], math.inf)
    text = f"each value is cut off to {rounding_named(local.stored).words}, towards 0, where rounding belongs"
    each, look, places = {_NAME: text}, {_NAME: LOOK_AT_ROUNDING}, shown(replay, record, local, (changed,))
    return replace(op, cause=Cause(_NAME, under.nmse, text, under.floor, under.arithmetic, each, look, places))


@dataclass(frozen=True, slots=True)
class CutOff(Rearranged):
    """An op whose values are cut off to a shorter type when they are stored: `Op.rework`."""

    to: Rounding

    def moved(self, x: Tensor) -> Tensor:
        """The first bits of each."""
        return self.to(x)
