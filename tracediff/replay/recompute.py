"""The values that ops are recomputed from: what a trace holds, and what has to be recomputed before, in which order.

Where an input was not recorded it is recomputed too, from the nearest recorded ancestors: a segment of the graph.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from tracediff.model.graph import SOURCES, Graph, Op, Span
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.buffers import in_buffer
from tracediff.numerics.evaluate import arithmetic_of, evaluate_together, is_covered
from tracediff.numerics.floats import HALVES
from tracediff.numerics.growing import Growing
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.views import seen, state
from tracediff.replay.by_parts import inside, parts, there_at_once
from tracediff.replay.making import Making, Recomputed, anew, applied, calls_of, numbers_of, unrounded
from tracediff.replay.past import Kept, Past, Value
from tracediff.replay.recorded import Place, Recorded
from tracediff.replay.segments import Patterns, Segments
from tracediff.trace.format import OpRecord, Rows

_SAMPLES = 2  # of the noise through a segment
_RECENT = 48  # values kept from one layer to the next: more than a layer has, of some tokens and of all
_SMALL = 1 << 26  # bytes of values of many steps

_Key = tuple[Place, Scheme | None]  # of a value: the scheme that it is recomputed under; None: what was recorded


class CircularError(Exception):
    """A changed op reads what follows from it."""


class Recomputation:
    """Recomputes the ops of `graph`. What was recomputed is kept for the ops after it, until `forget`; what later steps
    read, for all of them.
    """

    def __init__(self, recorded: Recorded, graph: Graph, weights: Weights) -> None:
        self.recorded = recorded
        self.graph = self._model = graph
        self.weights = weights
        self._n_samples = _SAMPLES
        self.has_noise = True
        self._segments = Segments(Patterns(recorded.trace), graph)
        self._states = graph.states()
        self._cached = graph.cached() - self._states
        self._places, self._last_read = graph.places(), graph.last_read()
        self._values: dict[_Key, Value] = {}
        self._told: Mapping[Place, Value] = {}  # what the engine had, in the place of what was recorded or was not
        self._exact: dict[tuple[str, int], Growing] = {}  # of what every step recorded, of each sequence
        self._held: dict[tuple[str, int, int], Past] = {}  # the same by number of samples
        self._kept = Kept()
        self._n_kept = 0  # values that were kept when it was last looked what can go
        self._changes: tuple[Op, ...] = ()
        self._pasts = self._kept.of(self._changes, _SAMPLES)  # of what was recomputed
        self._unchanged: tuple[Recomputation, set[str]] | None = None  # whose pasts hold, but of these ops

    @property
    def is_supposed(self) -> bool:
        """Whether some ops are not those of the model: a hypothesis."""
        return bool(self._changes)

    def changed(self, ops: Sequence[Op], n_samples: int = _SAMPLES) -> "Recomputation":
        """The same trace with these ops in place of those of the same names. Without samples no noise is computed.

        What was recorded is kept, and of ops before these what was recomputed with as many samples.
        """
        other = copy(self)
        other.graph = self.graph.changed(*ops)
        other._segments = self._segments.changed(other.graph)
        other._cached = self._cached | {name for op in ops for name, past in op.reads if past in (True, "earlier")}
        other._n_samples, other.has_noise = n_samples, n_samples > 0
        other._changes = (*self._changes, *ops)
        other._pasts = self._kept.of(other._changes, n_samples)
        after = self.graph.after(op.name for op in ops) if n_samples == self._n_samples else None
        other._unchanged = None if after is None else (self, after)
        other._values = {
            key: value
            for key, value in self._values.items()
            if (not key[1] and n_samples <= self._n_samples) or (after is not None and key[0][1] not in after)
        }
        return other

    def holding(self, told: Mapping[Place, Value]) -> "Recomputation":
        """The same where the engine had these values, be they choices that it did not record."""
        other = copy(self)
        other._told = told
        after = self.graph.after(name for _, name, _ in told)
        kept = (key for key in self._values if key[0] not in told and not (key[1] and key[0][1] in after))
        other._values = {key: self._values[key] for key in kept}
        return other

    def holds(self, place: Place) -> bool:
        """Whether the value was recorded, or is known otherwise."""
        return self.recorded.holds(place) or place in self._told

    def roughly(self, has_noise: bool = False) -> "Recomputation":
        """The same multiplied in float32, without noise or with it: what many hypotheses leave is seen so."""
        other = self.changed((), _SAMPLES if has_noise else 0)
        other.weights, other._kept = self.weights.in_float32(), Kept()
        other._pasts, other._unchanged = other._kept.of(other._changes, other._n_samples), None
        other._values = {key: value for key, value in other._values.items() if not key[1]}
        return other

    def segment(self, record: OpRecord) -> tuple[str, ...]:
        """The ops that are recomputed for the record, in execution order; its own is the last."""
        return self._segments.of(record.step, self.op_of(record), record.rows)

    def n_before(self, record: OpRecord, scheme: Scheme) -> int:
        """How many values are there at once of what is recomputed for the record: of what is made by parts one."""
        *before, own = self.segment(record)
        n_tokens, n_keys = self.recorded.sizes(record.step, None)
        asked = [(own, record.rows), *((name, None) for name in before)]
        ops = ((self._op(record.step, name), rows) for name, rows in asked)
        parted = {*chain.from_iterable(self.inside(record.step, op, scheme, rows) for op, rows in ops)}
        sizes = {name: prod(self.graph[name].shape(n_tokens, n_keys - n_tokens)) for name in before}
        return sum(there_at_once(n) if name in parted else n for name, n in sizes.items())

    def op_of(self, record: OpRecord) -> Op:
        """The record's op as it is computed in its step."""
        return self._op(record.step, record.op)

    def op(self, record: OpRecord, op: Op, scheme: Scheme, storage: str) -> Recomputed:
        """The op's output for the record's tokens, were it computed under `scheme` and stored as `storage`."""
        return made_together(op, [(self, record, scheme, storage)])[0]

    def anew(self, record: OpRecord, scheme: Scheme) -> Value:
        """A recorded value as it may be where the engine computes it once more."""
        noise = self.op(record, self.op_of(record), scheme, record.dtype or "f32").own
        return anew(self.values(record), noise, numbers_of(record.step, record.op), self._n_samples)

    def _making(self, step: int, op: Op, scheme: Scheme, storage: str, rows: Rows) -> Making:
        arithmetic = arithmetic_of(op, self._in_step_of(step, scheme), self.weights)
        inputs = self.inputs(step, op, scheme, rows)
        if op.kind == "add" and arithmetic.operands != "f64":  # each rank's term by itself
            terms = self.recorded.terms(step, op.inputs[0], rows)
            inputs = inputs if terms is None else [Value(terms), *inputs[1:]]
        calls = calls_of(op, inputs, self.weights, arithmetic, self._n_samples)
        read = self._tokens_read(step, op, scheme, rows)
        return Making(self.recorded, step, read, storage, calls, None if read == rows else rows)

    def _makings(self, step: int, op: Op, scheme: Scheme, storage: str, rows: Rows) -> Iterator[Making]:
        """What makes these tokens of the op's output: of some of them after the others where it is made by parts, whose
        values are dropped after each.
        """
        within = self.inside(step, op, scheme, rows)
        if not within:
            yield self._making(step, op, scheme, storage, rows)
            return
        for place in self._read_by(step, op, scheme, rows, within):
            self._value(place, scheme)
        there = self._values
        for part in parts(rows, self.recorded.sizes(step, None)[0], max(within.values())):
            self._values = {**there}
            yield self._making(step, op, scheme, storage, part)
        self._values = there

    def inside(self, step: int, op: Op, scheme: Scheme, rows: Rows) -> Mapping[str, int]:
        """What is made by parts for the op, and how many values each has."""

        def made(name: str) -> Op | None:
            return None if name in SOURCES or self.holds((step, name, rows)) else self._op(step, name)

        within = inside(op, *self.recorded.sizes(step, rows), made)
        ops = (op, *(self._op(step, name) for name in within)) if within else ()
        return within if all(self._is_by_token(step, op, scheme) for op in ops) else {}

    def _is_by_token(self, step: int, op: Op, scheme: Scheme) -> bool:
        """Whether what it makes of some tokens is what it makes of all, as a mistaken engine's may not be."""
        own = op.function is None and op.rework is None and op.kind != "state" and is_covered(op)
        if not own or self._tokens_read(step, op, scheme, (0,)) is None:
            return False
        return not arithmetic_of(op, self._in_step_of(step, scheme), self.weights).counts_tokens

    def inputs(self, step: int, op: Op, scheme: Scheme, rows: Rows) -> list[Value]:
        """What the op reads to make these tokens of the step, in its order."""
        rows = self._tokens_read(step, op, scheme, rows)
        if op.kind == "state":
            before = self.recorded.before(step)
            parts = [self._value((before, name, None), scheme) for name in op.inputs] if before is not None else []
            return [applied(lambda *parts: state(op, parts, self.weights.device), parts)]
        values = [self.read(step, name, past, scheme, rows) for name, past in op.reads]
        sizes = self.recorded.sizes(step, rows)
        pairs = zip(values, op.seen, strict=True)
        return [applied(partial(seen, view, *sizes), [value]) if view else value for value, view in pairs]

    def _in_step_of(self, step: int, scheme: Scheme) -> Scheme:
        """What the scheme does there."""
        return scheme.in_steps_of(self.recorded.tokens(step))

    def _tokens_read(self, step: int, op: Op, scheme: Scheme, rows: Rows) -> Rows:
        """Of which tokens an op reads its inputs to make these: of all where these share what they are rounded by."""
        mixes = self._in_step_of(step, scheme).mixes_tokens and is_covered(op) and KINDS[op.kind].scheme == "linear"
        return None if mixes else self.graph.tokens_read(op, rows)

    def read(self, step: int, name: str, past: Span, scheme: Scheme, rows: Rows = None) -> Value:
        """A value as a step has it: of these tokens, of all tokens so far, or what a buffer holds of earlier steps."""
        if past == "before":
            return self._left_of(step, name, scheme)
        if past == "earlier":
            before = self.recorded.before(step)
            return Value(torch.empty(0)) if before is None else self._so_far(before, name, scheme)
        return self._so_far(step, name, scheme) if past else self._value((step, name, rows), scheme)

    def values(self, record: OpRecord, channels: slice | None = None) -> Tensor:
        """The record's own values. All of them are kept, for the next op reads them; some `channels` are not."""
        if channels is not None:
            return self.recorded.values(record, channels=channels)
        place = record.step, record.op, record.rows
        if (place, None) not in self._values:
            self._values[place, None] = self._recorded_value(place)
        return self._values[place, None].exact

    def forget(self, all_of_it: bool = False) -> None:
        """Drop values of ops that are done. The trace has what was recorded, and pasts what later steps read; what
        a state hands on stays for the next step.
        """
        if not all_of_it and len(self._values) < self._n_kept + self._n_kept // 4:
            return  # of many small values each would be looked at for each record
        recent = () if all_of_it else [*self._values][-self._n_recent() :]
        handed = [key for key in self._values if key[1] and key[0][1] in self._states]
        last: dict[int, int] = {}  # of each sequence
        for (step, _, _), _ in handed:
            of = self.recorded.sequence(step)
            last[of] = max(last.get(of, 0), self.recorded.n_until(step))
        handed = [key for key in handed if self.recorded.n_until(s := key[0][0]) >= last[self.recorded.sequence(s)] - 1]
        self._values = {key: self._values[key] for key in (*handed, *recent)}
        self._n_kept = len(self._values)

    def forget_until(self, name: str) -> None:
        """Drop what is last read by this op of the model or by one before it, of all steps."""
        last, until = self._last_read, self._places[name]
        self._values = {key: value for key, value in self._values.items() if last[key[0][1]] > until}
        kept: tuple[dict[Any, Any], ...] = self._exact, self._held, self._pasts  # by name first
        for pasts in kept:
            for key in [key for key in pasts if last[key[0]] <= until]:
                del pasts[key]

    def _n_recent(self) -> int:
        """How many values stay: those of a layer in one step, and as many more as are small."""
        sizes = accumulate(value.nbytes for value in reversed(self._values.values()))
        return max(_RECENT, sum(size <= _SMALL for size in sizes))

    def keep_waists(self) -> None:
        """Where values of more than a layer were recomputed, keep those that the layers after it begin with."""
        if len(self._values) > _RECENT:
            self._values = {
                key: value
                for key, value in self._values.items()
                if not key[1] or key[0][1] in self._states or self.graph[key[0][1]].kind == "add"
            }

    def _past(self, step: int, name: str, scheme: Scheme) -> Past:
        """Where the value of all steps of the step's sequence is kept: where nothing lacks the same under every scheme
        and change.
        """
        sequence = self.recorded.sequence(step)
        if self.recorded.always_holds(name):
            exact = self._exact.setdefault((name, sequence), Growing())
            return self._held.setdefault((name, sequence, self._n_samples), Past(exact))
        if self._unchanged and name not in self._unchanged[1]:
            return self._unchanged[0]._past(step, name, scheme)
        return self._pasts.setdefault((name, sequence, scheme), Past())

    def _so_far(self, step: int, name: str, scheme: Scheme) -> Value:
        """The value of all tokens so far."""
        past = self._past(step, name, scheme)
        for number in self.recorded.until(step, len(past)):
            past.append(self._value((number, name, None), scheme))
        return past.until(self.recorded.n_until(step))

    def _left_of(self, step: int, name: str, scheme: Scheme) -> Value:
        """What is left in a buffer of the value in earlier steps."""
        earlier = self.recorded.until(step)[:-1]
        return Value(in_buffer([self._value((number, name, None), scheme).exact for number in earlier]))

    def _value(self, place: Place, scheme: Scheme) -> Value:
        """A value as the trace recorded it, or recomputed under the scheme from what it recorded."""
        there = self._at_hand(place, scheme)
        if there is not None:
            return there
        self._catch_up(place, scheme)
        return self._in_step(place, scheme)

    def _at_hand(self, place: Place, scheme: Scheme) -> Value | None:
        """A value that was read or recomputed before, be it of more tokens."""
        _, name, rows = place
        key = self._held_under(place, scheme)
        if key is None or key[0] == place:
            return None if key is None else self._values[key]
        axes, at = ("T",) if name in SOURCES else self.graph[name].axes, torch.tensor(rows, device=self.weights.device)
        return applied(lambda x: x.index_select(axes.index("T"), at), [self._values[key]])

    def _held_under(self, place: Place, scheme: Scheme) -> _Key | None:
        """The key of the value among those at hand, or of the same of all tokens; None where neither is."""
        (step, name, rows), key = place, self._key(place, scheme)
        if key in self._values or rows is None:
            return key if key in self._values else None
        whole = self._key((step, name, None), scheme)
        return whole if whole[1] == key[1] and whole in self._values else None

    def _catch_up(self, place: Place, scheme: Scheme) -> None:
        """Recompute what the value, where it is not there, reads of the steps before it: one by one, as the engine ran
        them.
        """
        if self._is_there(place, scheme):
            return
        step, name, rows = place
        segment = self._segments.of(step, self._op(step, name), rows)
        pasts = {name: self._past(step, name, scheme) for name in segment if name in self._cached}
        states = [name for name in segment if name in self._states]
        n_before = self.recorded.n_until(step) - 1
        done = min([n_before, *map(len, pasts.values()), *(self._handed(name, scheme, step) for name in states)])
        for number in self.recorded.until(step, done)[:-1]:
            for name, past in pasts.items():
                if len(past) < self.recorded.n_until(number):
                    past.append(self._in_step((number, name, None), scheme))
            for name in states:
                self._in_step((number, name, None), scheme)
            self.forget()

    def _handed(self, name: str, scheme: Scheme, step: int) -> int:
        """Until which step before this one what a state hands on is at hand: how many steps."""
        before = self.recorded.before(step)
        if before is not None and self.recorded.holds((before, name, None)):
            return self.recorded.n_until(before)
        sequence = self.recorded.sequence(step)
        steps = (at for (at, held, _), of in self._values if held == name and of == scheme and at < step)
        return max((self.recorded.n_until(at) for at in steps if self.recorded.sequence(at) == sequence), default=0)

    def _in_step(self, place: Place, scheme: Scheme) -> Value:
        """The value, when all that it reads of the steps before is there."""
        key = self._key(place, scheme)
        if key[1] is None and key not in self._values:
            self._values[key] = self._recorded_value(place)
        for missing in self._unrecorded(place, scheme):
            self._values[self._key(missing, scheme)] = self._recompute(missing, scheme)
        there = self._at_hand(place, scheme)
        assert there is not None
        return there

    def _recorded_value(self, place: Place) -> Value:
        """A recorded value. One that was rounded on the way to the file has samples of what the engine had instead."""
        if place in self._told:
            return self._told[place]
        value = self.recorded.value(place)
        lost = self.recorded.lost(place, value) if self.has_noise else None
        return unrounded(value, lost, numbers_of(*place[:2]), self._n_samples) if lost else Value(value)

    def _unrecorded(self, place: Place, scheme: Scheme) -> Iterator[Place]:
        """What must be recomputed for a value, each after its inputs: deep models outgrow Python's recursion. Raises
        CircularError where a changed op reads what follows from it.
        """
        stack, begun = [(place, False)], set[Place]()
        while stack:
            place, inputs_are_there = stack.pop()
            if self._is_there(place, scheme):
                continue
            if inputs_are_there:
                begun.remove(place)
                yield place
                continue
            if place in begun:
                raise CircularError(f"{place[1]} of step {place[0]} follows from itself")
            begun.add(place)
            stack += [(place, True), *((at, False) for at in self._reads(place, scheme))]

    def _reads(self, place: Place, scheme: Scheme) -> Iterator[Place]:
        """What is read for a value, the last first; of all steps so far those that are not there."""
        step, name, rows = place
        op = self._op(step, name)
        yield from self._read_by(step, op, scheme, rows, self.inside(step, op, scheme, rows))

    def _read_by(self, step: int, op: Op, scheme: Scheme, rows: Rows, within: Container[str]) -> Iterator[Place]:
        """The same of an op, and of what is made by parts `within`."""
        before, rows = self.recorded.before(step), self._tokens_read(step, op, scheme, rows)
        for read, past in reversed(op.reads):
            if read in within:
                yield from self._read_by(step, self._op(step, read), scheme, rows, within)
            elif op.kind == "state":
                yield from () if before is None else ((before, read, None),)
            elif past == "before":
                yield from ((number, read, None) for number in self.recorded.until(step)[:-1])
            elif past:
                missing = self.recorded.until(step, len(self._past(step, read, scheme)))
                missing = missing[:-1] if past == "earlier" else missing
                yield from ((number, read, None) for number in missing)
            else:
                yield step, read, rows

    def _order(self, place: Place) -> tuple[int, int]:
        """Execution order; what is no op of the model comes first."""
        return place[0], self._places.get(place[1], -1)

    def _key(self, place: Place, scheme: Scheme) -> _Key:
        return place, None if self.holds(place) else scheme

    def _is_there(self, place: Place, scheme: Scheme) -> bool:
        """Whether the value was recorded, or recomputed already."""
        return self.holds(place) or self._held_under(place, scheme) is not None

    def _recompute(self, place: Place, scheme: Scheme) -> Value:
        makings, axes = self._making_again(place, scheme), self.graph[place[1]].axes
        made = [making.value(evaluate_together(making.calls), self._n_samples) for making in makings]
        whole = applied(lambda *each: torch.cat(each, axes.index("T")), made) if len(made) > 1 else made[0]
        return self._as_known(place, whole)

    def _as_known(self, place: Place, made: Value) -> Value:
        """A value of all tokens with those rows as they were recorded that were."""
        step, name, rows = place
        known = self.recorded.known_rows(step, name) if rows is None and name in self._model else {}
        if not known:
            return made
        at, had = torch.tensor([*known], device=self.weights.device), torch.stack([*known.values()])
        return applied(lambda x: x.index_copy(0, at, had.to(x).reshape(len(at), *x.shape[1:])), [made])

    def _making_again(self, place: Place, scheme: Scheme) -> Iterator[Making]:
        step, name, rows = place
        op = self._op(step, name)
        return self._makings(step, op, scheme, self._held_in(step, op, scheme), rows)

    def _op(self, step: int, name: str) -> Op:
        """The op as it is computed in the step."""
        op = self.graph[name]
        is_so = op.tokens in (None, self.recorded.tokens(step)) or name not in self._model
        return op if is_so else self._model[name]

    def _missing(self, record: OpRecord, scheme: Scheme) -> Iterator[Place]:
        """What must be recomputed for what the record's op reads, each after its inputs."""
        for place in [*self._reads((record.step, record.op, record.rows), scheme)][::-1]:
            self._catch_up(place, scheme)
            yield from self._unrecorded(place, scheme)

    def _held_in(self, step: int, op: Op, scheme: Scheme) -> str:
        """What the engine keeps an op's value in that it did not record: what it recorded, but where activations and
        weights are multiplied in half precision their product is, as under PyTorch's autocast. Not float64: numpy makes
        that of what a table of angles is multiplied with, and of all that follows, where projections are in float32.
        """
        arithmetic = arithmetic_of(op, self._in_step_of(step, scheme), self.weights)
        halves = KINDS[op.kind].scheme == "linear" and arithmetic.operands == arithmetic.stored in HALVES
        held = self.recorded.storage(step, op.name)
        return arithmetic.operands if halves else "f32" if held == "f64" else held


def recompute_together(asked: Sequence[Recomputation], record: OpRecord, scheme: Scheme) -> None:
    """What the record's op reads, by each of several that differ in some ops: op after op, in the model's order. Where
    they have an op in common its weight is read once for all.
    """
    missing = [by._missing(record, scheme) for by in asked]
    waiting = {i: place for i, places in enumerate(missing) if (place := next(places, None))}
    while waiting:
        at = min(waiting.values(), key=asked[0]._order)
        alike: dict[int, list[int]] = {}
        for i, place in waiting.items():
            if place == at:
                alike.setdefault(id(asked[i]._op(*at[:2])), []).append(i)
        for these in alike.values():
            for i, value in zip(these, _recomputed([asked[i] for i in these], at, scheme), strict=True):
                asked[i]._values[asked[i]._key(at, scheme)] = value
                if place := next(missing[i], None):
                    waiting[i] = place
                else:
                    del waiting[i]


def _recomputed(by: Sequence[Recomputation], place: Place, scheme: Scheme) -> list[Value]:
    """One value by each, whose op is one: its weight is read once."""
    if not by[0]._op(*place[:2]).weights:
        return [one._recompute(place, scheme) for one in by]
    makings = [making for one in by for making in one._making_again(place, scheme)]
    made = zip(by, makings, _evaluated(makings), strict=True)
    return [one._as_known(place, making.value(ys, one._n_samples)) for one, making, ys in made]


def _evaluated(makings: Sequence[Making]) -> Iterator[list[Tensor]]:
    """What the calls of each come to, all of one op."""
    ys = iter(evaluate_together([call for making in makings for call in making.calls]))
    return ([*islice(ys, len(making.calls))] for making in makings)


def made_together(op: Op, asked: Sequence[tuple[Recomputation, OpRecord, Scheme, str]]) -> list[Recomputed]:
    """The op's output for several records, as `Recomputation.op` makes it of each: its weight is read once."""
    makings = (of._makings(r.step, op, scheme, storage, r.rows) for of, r, scheme, storage in asked)
    if op.weights:
        whole = [making for each in makings for making in each]
        made = [making.made(ys) for making, ys in zip(whole, _evaluated(whole), strict=True)]
    else:
        made = [Recomputed.joined([m.made(evaluate_together(m.calls)) for m in each], op.axes) for each in makings]
    segments = (of._segments.of(record.step, op, record.rows) for of, record, _, _ in asked)
    return [
        replace(one, segment=segment, inputs=one.inputs if len(segment) == 1 else ())
        for one, segment in zip(made, segments, strict=True)
    ]
