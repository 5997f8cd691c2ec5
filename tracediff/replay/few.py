"""A few tokens of a record, those that are off most: what leaves these as they are is not computed for the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from tracediff.model.graph import SOURCES, Op
from tracediff.names import token_axis
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.nmse import nmse
from tracediff.replay.look import Asked, look, look_together
from tracediff.replay.recompute import Recomputation, recompute_together
from tracediff.result import Local
from tracediff.trace.format import OpRecord

_N = 4
_SAME = 1e-9  # NMSE: what float32 makes of fewer rows of a product


@dataclass(frozen=True, slots=True)
class Few:
    """The record of a few tokens under a scheme, and the NMSE that the ops of `by` leave of it."""

    by: Recomputation
    record: OpRecord
    scheme: Scheme
    left: float

    @classmethod
    def of(cls, by: Recomputation, record: OpRecord, scheme: Scheme) -> "Few | None":
        """None where these are all, or where nothing is off."""
        op = by.op_of(record)
        if record.rows is not None or op.axes[0] != "T" or record.shape[0] <= _N or scheme.mixes_tokens:
            return None
        off = (by.op(record, op, scheme, "f64").exact - by.values(record)).flatten(1).square().sum(1)
        few = structs.replace(record, rows=tuple(sorted(off.topk(_N).indices.tolist())))
        left = look(by, few, scheme).local.nmse
        return cls(by, few, scheme, left) if 0 < left < math.inf else None

    def under_each(self, hypotheses: Sequence[Sequence[Op]]) -> list[Local]:
        """What the ops of each hypothesis leave of them. What follows is computed for all together."""
        told = (map(self._told, ops) for ops in hypotheses)
        asked = [Asked(self.by.changed([*ops], n_samples=0), self.record, self.scheme) for ops in told]
        recompute_together([one.by for one in asked], self.record, self.scheme)
        alike: dict[int, list[int]] = {}
        for i, one in enumerate(asked):
            alike.setdefault(id(one.by.op_of(self.record)), []).append(i)
        found: dict[int, Local] = {}
        for these in alike.values():
            looks = look_together([asked[i] for i in these])
            found.update((i, seen.local) for i, seen in zip(these, looks, strict=True))
        return [found[i] for i in range(len(asked))]

    def _told(self, op: Op) -> Op:
        """The op that says whether it mixes tokens."""
        return op if self._is_by_token(op) else replace(op, mixes_tokens=True)

    def _is_by_token(self, op: Op) -> bool:
        """Whether it makes of these tokens what it makes of all: as every kind does by itself, others by trial."""
        own = self.by.graph.ops.get(op.name)
        if (op.function, op.rework) == ((own.function, own.rework) if own else (None, None)):
            return True
        if not {op.name, *op.inputs} <= {*self.by.graph.ops, *SOURCES}:
            return False
        if self.by.graph.tokens_read(op, self.record.rows) is None:
            return True
        records = (structs.replace(self.record, op=op.name, rows=rows) for rows in (self.record.rows, None))
        few, whole = (self.by.op(record, op, self.scheme, "f64") for record in records)
        a, b = few.exact, whole.at(token_axis(op.name), self.record.rows or ()).exact
        differs = a != b  # not where a mask makes both infinite
        return nmse(a[differs], b[differs]) <= _SAME or not differs.any()
