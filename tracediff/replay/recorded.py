"""A trace seen through the graph of its model: what it holds, and where the inputs of an op are. All in float64."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from tracediff.errors import TraceError
from tracediff.model.graph import SOURCES, Graph, Op, Tokens, sizes
from tracediff.names import local_name
from tracediff.numerics.evaluate import is_covered
from tracediff.numerics.floats import HALVES
from tracediff.numerics.floors import UNIT
from tracediff.numerics.kinds.attention import causal
from tracediff.numerics.roundings import rounding_named
from tracediff.replay.storage import rounded_on_the_way, stored_as, stored_in_all
from tracediff.trace.data import Stored
from tracediff.trace.format import OpRecord, Rows
from tracediff.trace.ranks import Ranks
from tracediff.trace.reader import Trace
from tracediff.trace.shards import Part

Place = tuple[int, str, Rows]  # step, name and tokens of a value
_FEW = 64  # values, which may not tell by themselves what they were stored in
_KIN = 8  # records, the largest, that tell it together
_AGAIN = 3  # different tokens: so many at the positions that they had are no mistake in positions


class Recorded:
    """Every record of an op has its shape: `misshapen` ones are taken out before. Raises TraceError for positions that
    leave a gap.
    """

    def __init__(self, trace: Trace, graph: Graph, device: str) -> None:
        self.trace = trace
        self._graph = graph
        self._device = device
        self._positions = _positions(trace, graph)
        # Of each sequence: a step reads what went before in its own.
        self._steps: dict[int, list[int]] = {}
        self._n_until: dict[int, int] = {}
        for number, step in trace.steps.items():
            self._steps.setdefault(step.sequence, []).append(number)
            self._n_until[number] = len(self._steps[step.sequence])
        self._all_positions = {
            sequence: torch.tensor([p for number in steps for p in self._positions[number]], device=device)
            for sequence, steps in self._steps.items()
        }
        self._first_lacking: dict[tuple[str, int], float] = {}
        self._of_kin: dict[str, str | None] = {}
        self._storages: dict[int, tuple[str, str]] = {}  # of steps: of the residual stream, and of all else
        self._uncovered = {op.name for op in graph if not is_covered(op)}

    def holds(self, place: Place) -> bool:
        """Whether the trace has the value of an op of the model, for all these tokens."""
        step, name, rows = place
        record = self.trace.ops.get((step, name)) if name in self._graph else None
        return name in SOURCES or (record is not None and record.has_data and record.holds(rows))

    def always_holds(self, name: str) -> bool:
        """Whether every step has the value, of all its tokens: of what is read over all steps so far."""
        return all(self.first_lacking(name, sequence) == math.inf for sequence in self._steps)

    def first_lacking(self, name: str, sequence: int) -> float:
        """The sequence's first step that does not hold the value of all its tokens; infinite where every step does."""
        key = name, sequence
        if key not in self._first_lacking:
            lacking = (step for step in self._steps[sequence] if not self.holds((step, name, None)))
            self._first_lacking[key] = next(lacking, math.inf)
        return self._first_lacking[key]

    def sequence(self, step: int) -> int:
        """Whose step it is."""
        return self.trace.steps[step].sequence

    def value(self, place: Place) -> Tensor:
        """The value that is held there: float64 of the op's shape, or int64 [T] of a source."""
        step, name, rows = place
        if name in SOURCES:
            tokens = self.trace.steps[step].tokens
            past = [self.trace.n_before(step)] * len(tokens)
            ids: Sequence[int] = {"tokens": tokens, "positions": self._positions[step], "past": past}[name]
            return torch.tensor(ids if rows is None else [ids[row] for row in rows], device=self._device)
        return self.values(self.trace.ops[step, name], rows)

    def known_rows(self, step: int, name: str) -> dict[int, Tensor]:
        """Of a value that is not held for all tokens of the step the rows that the engine is known to have had: those
        that were recorded, and those of tokens that it kept when what followed them was rejected.
        """
        of: int | None = self.sequence(step)
        is_kept = of in self._kept_of or (step, name) in self.trace.ops
        if not is_kept or self._graph[name].axes[:1] != ("T",):
            return {}
        tokens = self.trace.steps[step].tokens
        places = {p: row for row, p in enumerate(self._positions[step])}
        found: dict[int, Tensor] = {}
        while of is not None and len(found) < len(tokens):
            for number in self._steps[of] if of != self.sequence(step) else (step,):
                record, positions = self.trace.ops.get((number, name)), self._positions[number]
                if record is None or not record.has_data:
                    continue
                rows, fed = record.rows or range(len(positions)), self.trace.steps[number].tokens
                kept = {places[positions[row]]: row for row in rows if positions[row] in places}
                kept = {own: row for own, row in kept.items() if own not in found and fed[row] == tokens[own]}
                if kept:
                    found |= zip(kept, self.values(record, tuple(kept.values())), strict=True)
            of = self._kept_of.get(of)
        return found

    @cached_property
    def _kept_of(self) -> Mapping[int, int]:
        """Of each sequence that begins where another's tokens were rejected, whose tokens it keeps: of those that the
        trace has under one number the one before.
        """
        kept_of, latest = dict[int, int](), dict[int, int]()
        for called, _, new in self.trace.rolled_back:
            kept_of[new] = latest.get(called, called)
            latest[called] = new
        return kept_of

    def dtype(self, place: Place) -> str:
        """The type that the value stands in the trace as."""
        step, name, _ = place
        return self.trace.ops[step, name].dtype or "f32"

    @cached_property
    def on_the_way(self) -> Mapping[str, bool | None]:
        """Which types values were rounded to by who wrote the trace; None where nothing tells."""
        return rounded_on_the_way(self, self._graph)

    def stored(self, record: OpRecord, values: Tensor) -> str:
        """What the engine stored a record's values in, or those of a part of it: of few, what the same op of other
        layers and steps tells; of what ends in a state, what is before that.
        """
        dtype = record.dtype or "f32"
        found = stored_as(values, dtype)
        if found == dtype and (n := self._before_state(record)) is not None and values.numel() > n:
            return stored_as(values.flatten()[:n], dtype)
        kin = self._stored_kin(local_name(record.op)) if found == dtype and values.numel() <= _FEW else None
        if kin is None or not torch.equal(rounding_named(kin)(values), values):
            return found
        return kin

    def state(self, step: int, op: Op) -> tuple[int, str] | None:
        """Of values that end in a state, which is recorded as it is handed on, in half precision: how many are before
        it, and its type. None where it has none of its own.
        """
        record = self.trace.ops.get((step, op.name))
        n = self._before_state(record) if record and record.has_data else None
        if n is None or record is None:
            return None
        values = self.values(record).flatten()
        held = stored_as(values[n:], record.dtype or "f32")
        return (n, held) if held in HALVES and self.stored(record, values) != held else None

    def _before_state(self, record: OpRecord) -> int | None:
        """How many values a record has before the state that is handed on with them, which engines in half precision
        keep in float32; None where it has none.
        """
        for reader, at in self._graph.readers(record.op):
            view = reader.seen[at]
            if view and any(of.kind == "state" for of, _ in self._graph.readers(reader.name)):
                return sizes((view.offset,), *self.sizes(record.step, record.rows))[0]
        return None

    def _stored_kin(self, name: str) -> str | None:
        if name not in self._of_kin:
            records = (r for r in self.trace.ops.values() if local_name(r.op) == name and r.op in self._graph)
            largest = sorted((r for r in records if r.has_data), key=lambda r: -math.prod(r.shape))[:_KIN]
            self._of_kin[name] = stored_in_all((self.values(r), r.dtype or "f32") for r in largest)
        return self._of_kin[name]

    def lost(self, place: Place, value: Tensor) -> str | None:
        """The type that the value may have been rounded to on the way to the file: the engine had more digits. Not of
        rows of a table, where what was computed has more: they fit what the table is held in. And not of whole numbers,
        as ids of experts are.
        """
        if place[1] in SOURCES or torch.equal(value, value.round()):
            return None
        storage = self.stored(self.trace.ops[place[:2]], value)
        if self._graph[place[1]].kind == "embedding" and self.storage(*place[:2]) != storage:
            return None
        return storage if storage in self.on_the_way and self.on_the_way[storage] is not False else None

    def values(self, record: OpRecord, rows: Rows = None, channels: slice | None = None) -> Tensor:
        """The record's values, or those of the tokens `rows` or `channels` of it. It may be of some of the tokens that
        were recorded.
        """
        recorded = self.trace.ops[record.step, record.op]
        if record.rows != recorded.rows:
            record, rows = recorded, rows or record.rows
        if channels is None:
            held = self.trace.by_slice(record, rows)
            values = held.wide() if isinstance(held, Stored) else held
            values = values.reshape(self.shape(record, rows or record.rows))
        else:
            values = self.trace.values(record, rows, channels)
        stored = torch.from_numpy(values).to(self._device)
        return stored.to(torch.float64, memory_format=torch.contiguous_format).contiguous()

    def summed(self, step: int, op: Op) -> tuple[int, str]:
        """Of how many ranks' terms an op's output is the sum, be it that each rank makes its own, and what these are
        stored as, which is what they are added up in at the shortest; 0 where it is none. In one trace of what all
        ranks hold together any matmul may be one, and what is added up before the residual.
        """
        if n := self.trace.header.ranks:
            kept = self.trace.ops.get((step, op.name))
            dtype = (kept.dtype if kept else self.storage(step, op.name)) or "f32"
            may_be = op.kind in ("linear", "linear_id") or (op.kind == "add" and op.name not in self._stream)
            return (n, dtype) if n > 1 and may_be else (0, "")
        parts = self._parts(step, op.name)
        if not parts or (parts[0].shard and parts[0].shard.axis is not None):
            return 0, ""
        read = [part for name in op.inputs for part in self._parts(step, name)[:1] if part.shard]
        terms = [part for part in read if part.shard and part.shard.sum]
        if op.kind == "linear":
            summed = any(part.shard.axis for part in read if part.shard)
        else:
            summed = parts[0].shard is not None or (op.kind == "add" and bool(terms))
        dtypes = [part.record.dtype or "f32" for part in (parts[0], *(terms if op.kind == "add" else ()))]
        return (len(parts), max(dtypes, key=UNIT.__getitem__)) if summed else (0, "")

    def terms(self, step: int, name: str, rows: Rows) -> Tensor | None:
        """What ranks hold of a value as terms of a sum, [rank, ...]; None of what is no sum."""
        parts = self._parts(step, name)
        if not parts or not parts[0].shard or not parts[0].shard.sum or not self.holds((step, name, rows)):
            return None
        shape = self.shape(self.trace.ops[step, name], rows)
        each = [torch.from_numpy(part.trace.values(part.record, rows)).reshape(shape) for part in parts]
        return torch.stack(each).to(self._device, torch.float64)

    def _parts(self, step: int, name: str) -> Sequence[Part]:
        record = self.trace.ops.get((step, name))
        return self.trace.parts(record) if record and isinstance(self.trace, Ranks) else ()

    def until(self, step: int, first: int = 0) -> list[int]:
        """The steps of its sequence until this one, itself included, without the `first` of them."""
        return self._steps[self.sequence(step)][first : self._n_until[step]]

    def before(self, step: int) -> int | None:
        """The step of its sequence before this one; None of the first."""
        return self._steps[self.sequence(step)][self._n_until[step] - 2] if self._n_until[step] > 1 else None

    def n_until(self, step: int) -> int:
        """How many steps of its sequence there are until this one, itself included."""
        return self._n_until[step]

    def tokens(self, step: int) -> Tokens:
        """Whether the step has one token or several."""
        return "one" if len(self._positions[step]) == 1 else "several"

    def n_tokens(self, step: int) -> int:
        """How many tokens of its sequence were fed until the end of this step."""
        return self.trace.n_before(step) + len(self._positions[step])

    def holds_inputs(self, op: Op, record: OpRecord) -> list[bool]:
        """Of each input whether it is held, for all the tokens that the op reads it of."""
        rows = self._graph.tokens_read(op, record.rows)
        if op.kind == "state":
            before = self.before(record.step)
            return [before is None or self.holds((before, name, None)) for name in op.inputs]
        return [
            record.step < self.first_lacking(name, self.sequence(record.step))
            if past is True
            else self.holds((record.step, name, rows))
            for name, past in op.reads
        ]

    def can_be_made(self, step: int, of: str) -> bool:
        """Whether what an op is made of was recorded, or is of kinds that can be computed."""
        if not self._uncovered:
            return True
        stack, seen = [of], {of}
        while stack:
            name = stack.pop()
            if name in self._uncovered:
                return False
            missing = [i for i in self._graph[name].inputs if i not in seen and not self.holds((step, i, None))]
            seen.update(missing)
            stack += missing
        return True

    def hidden(self, step: int, rows: Rows) -> Tensor:
        """Which scores the causal mask hides, bool [T, S]."""
        return causal(
            self.value((step, "positions", rows)), self._all_positions[self.sequence(step)][: self.n_tokens(step)]
        )

    def storage(self, step: int, op: str | None = None) -> str:
        """What the engine stores values in, by the first that it computed of what it recorded in this step: what it
        looked up in a table fits what the table is held in. Of an `op` of the residual stream what that is held in: it
        may be float32 where all between two sums is in half precision (vLLM's and SGLang's fused norms with one).
        """
        if step not in self._storages:
            self._storages[step] = self._storages_of(step)
        stream, others = self._storages[step]
        return stream if op in self._stream else others

    def _storages_of(self, step: int) -> tuple[str, str]:
        """Of the residual stream, and of all else."""
        records = [r for r in self.trace.step_ops(step) if r.dtype and r.has_data and r.op in self._graph]
        computed = [r for r in records if self._graph[r.op].kind != "embedding"]

        def held(some: Iterable[OpRecord]) -> str:
            return next((self.stored(record, self.values(record)) for record in some), "f32")

        stream, others = (held(r for r in computed if (r.op in self._stream) is is_so) for is_so in (True, False))
        return (stream, others) if others in HALVES and stream not in HALVES else (held(computed),) * 2

    @cached_property
    def _stream(self) -> set[str]:
        """The residual stream: what the embedding looked up, and sums that begin with it."""
        stream = {op.name for op in self._graph if op.kind == "embedding"}
        for op in self._graph:
            if op.kind in ("add", "scale") and not stream.isdisjoint(op.inputs):
                stream.add(op.name)
        return stream

    def shape(self, record: OpRecord, rows: Rows) -> tuple[int, ...]:
        """The shape that the graph gives the record's op, for these tokens of the step."""
        n_rows, n_positions = self.sizes(record.step, rows)
        return self._graph[record.op].shape(n_rows, n_positions - n_rows)

    def sizes(self, step: int, rows: Rows) -> tuple[int, int]:
        """How many tokens these are, and how many positions are visible in the step."""
        return len(self._positions[step] if rows is None else rows), self.n_tokens(step)


def _positions(trace: Trace, graph: Graph) -> dict[int, tuple[int, ...]]:
    """The positions that each step should have: they go on where its sequence ended. Raises TraceError for a gap, but
    where a record of the step has as many keys as there are: then it says other positions than it has. And for tokens
    that are fed again, as to a sequence that was preempted: the cache then holds what no step of it says.
    """
    positions: dict[int, tuple[int, ...]] = {}
    following: dict[int, int] = {}  # of each sequence
    fed: dict[int, dict[int, int]] = {}  # its tokens by position
    for number, step in trace.steps.items():
        first = following.get(step.sequence, step.positions[0])
        before = fed.setdefault(step.sequence, {})
        again = {p: token for p, token in zip(step.positions, step.tokens, strict=True) if p in before}
        if len({*again.values()}) >= _AGAIN and all(before[p] == token for p, token in again.items()):
            raise TraceError(
                f"{trace.path}: step {number} feeds the tokens of positions {min(again)} to {max(again)} once more, as "
                "after a preemption. Give what is fed again a sequence number of its own, with all of its tokens from "
                "the first on, and `rows` where some come out of a prefix cache."
            )
        before.update(zip(step.positions, step.tokens, strict=True))
        known = (graph[record.op].axes for record in trace.step_ops(number) if record.op in graph)
        if step.positions[0] > first and not any("S" in axes for axes in known):
            raise TraceError(
                f"{trace.path}: step {number} begins at position {step.positions[0]}, but the steps before end at "
                f"{first - 1}: the keys and values between are missing, or the engine's positions are wrong. Record "
                "every step from the first; if each is there, give them the positions that they should have."
            )
        positions[number] = tuple(range(first, first + len(step.positions)))
        following[step.sequence] = first + len(step.positions)
    return positions
