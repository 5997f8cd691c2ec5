"""A few tokens of a record, those that are off most: what leaves these as they are is not computed for the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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

    def under_each(self, hypotheses: Sequence[Sequence[Op]]) -> list[Local | None]:
        """What the ops of each hypothesis leave of them; None where one mixes tokens, as one that reads the next one's
        values does, or is not the model's. What follows is computed for all together.
        """
        found: list[Local | None] = [None] * len(hypotheses)
        by_token = [i for i, ops in enumerate(hypotheses) if all(map(self._is_by_token, ops))]
        asked = {i: Asked(self.by.changed(hypotheses[i], n_samples=0), self.record, self.scheme) for i in by_token}
        recompute_together([one.by for one in asked.values()], self.record, self.scheme)
        alike: dict[int, list[int]] = {}
        for i, one in asked.items():
            alike.setdefault(id(one.by.op_of(self.record)), []).append(i)
        for these in alike.values():
            for i, seen in zip(these, look_together([asked[i] for i in these]), strict=True):
                found[i] = seen.local
        return found

    def _is_by_token(self, op: Op) -> bool:
        """Whether it makes of these tokens what it makes of all, as every kind does by itself."""
        own = self.by.graph.ops.get(op.name)
        if own and own.inputs == op.inputs and op.function is own.function and op.rework is own.rework:
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
