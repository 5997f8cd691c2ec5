"""Ops recomputed from what a trace holds.

Where an input was not recorded it is recomputed too, from the nearest recorded ancestors: a segment of the graph.
The noise that honest arithmetic makes on the way is carried along in samples, values with that noise added.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice

import torch
from torch import Tensor

from tracediff.model.graph import Graph, Op
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.buffers import in_buffer
from tracediff.numerics.evaluate import arithmetic_of, call_of, evaluate_together, noise, rounding
from tracediff.numerics.floors import UNIT, Noise
from tracediff.numerics.growing import Growing
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.kind import Call, Energy, Rounded
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.views import seen, state
from tracediff.replay.past import Kept, Past, Value
from tracediff.replay.recorded import Place, Recorded
from tracediff.replay.segments import Patterns, Segments
from tracediff.trace.format import OpRecord, Rows

# Noise through a segment is known from samples of it, not from a formula: its spread is that uncertain.
_SAMPLES, _SEGMENT_MARGIN = 2, 16.0
_TURNED = 0.5  # values of a row that are rounded the other way; the margin of a segment allows 8
_RECENT = 48  # values kept from one layer to the next: more than a layer has, of some tokens and of all
_SMALL = 1 << 26  # bytes of values of many steps


@dataclass(frozen=True, slots=True)
class Recomputed:
    """An op's output as it should be: exact, the noise of an honest engine, and the ops recomputed for it."""

    exact: Tensor
    own: Noise  # of the op itself
    noise: Noise  # with that of the segment before it
    segment: tuple[str, ...] = ()
    samples: tuple[Tensor, ...] = ()
    inputs: tuple[Tensor, ...] = ()  # of the op where they are recorded
    weights_nmse: float | None = None  # of weights that the engine requantised, against the file's

    @property
    def not_finite(self) -> bool:
        """Whether NaN or Inf was recorded of an input."""
        return any(not bool(x.isfinite().all()) for x in self.inputs)

    @property
    def margin(self) -> float:
        """How many times its expectation the squared error may be."""
        return max(_SEGMENT_MARGIN, self.noise.margin) if self.samples else self.noise.margin

    def bound(self) -> Tensor:
        """Of each element. A sampled spread is that of its row: two samples say little of one element."""
        return self.noise.bound() * math.sqrt(_SEGMENT_MARGIN) if self.samples else self.noise.bound()


def picked(made: Recomputed, of: Value, pick: Callable[[Tensor, Tensor], Tensor]) -> Recomputed:
    """What is found at the places that were made, with the noise of what they are in."""
    exact = pick(of.exact, made.exact)
    if not of.samples:
        return replace(made, exact=exact)
    return replace(made, exact=exact, noise=_sampled(made.own, exact, [pick(x, made.exact) for x in of.samples]))


def _sampled(own: Noise, y: Tensor, samples: Sequence[Tensor]) -> Noise:
    """The noise of an op and of what is before it: the spread of a row, for two samples say little of one element."""
    spread = torch.stack([_apart(sample, y).square_() for sample in samples]).mean(0)
    return replace(own, sigma=torch.sqrt(own.sigma.square() + torch.maximum(spread.mean(-1, keepdim=True), spread)))


def _apart(sample: Tensor, y: Tensor) -> Tensor:
    """How far a sample is off. Where a mask makes both infinite it is not."""
    apart = sample - y
    return apart if _is_finite(apart) else torch.where(sample == y, 0.0, apart)


def _is_finite(x: Tensor) -> bool:
    """Whether all values are, in a tenth of the time that asking each of them takes."""
    return math.isfinite(float(x.sum()))


class Recomputation:
    """Recomputes the ops of `graph`. What was recomputed is kept for the ops after it, until `forget`; what later steps
    read, for all of them.
    """

    def __init__(self, recorded: Recorded, graph: Graph, weights: Weights, n_samples: int = _SAMPLES) -> None:
        self.recorded = recorded
        self.graph = graph
        self.weights = weights
        self._n_samples = n_samples
        self.has_noise = n_samples > 0
        self._segments = Segments(Patterns(recorded.trace), graph)
        self._states = graph.states()
        self._cached = graph.cached() - self._states
        self._values: dict[tuple[Place, str], Value] = {}
        self._exact: dict[tuple[str, int], Growing] = {}  # of what every step recorded, of each sequence
        self._held: dict[tuple[str, int, int], Past] = {}  # the same by number of samples
        self._kept = Kept()
        self._n_kept = 0  # values that were kept when it was last looked what can go
        self._changes: tuple[Op, ...] = ()
        self._pasts = self._kept.of(self._changes, n_samples)  # of what was recomputed
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
        other._cached = self._cached | {name for op in ops for name, past in op.reads if past}
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

    def op(self, step: int, op: Op, scheme: Scheme, storage: str, rows: Rows) -> Recomputed:
        """The op's output for these tokens of the step, were it computed under `scheme` and stored as `storage`."""
        return made_together(op, [(self, step, scheme, storage, rows)])[0]

    def _made(self, making: "_Making", ys: Sequence[Tensor]) -> Recomputed:
        """What was made of an op: exact, and of each sample."""
        op, exact = making.op, making.calls[0]
        y, *samples = ys
        if exact.energy is None:
            none = torch.zeros((), dtype=y.dtype, device=y.device).expand_as(y)
            return Recomputed(y, Noise(none, none), Noise(none, none), inputs=tuple(exact.inputs))
        terms = self._terms_of_ranks(making, exact.energy.value)  # before it is used up
        own = noise(op, exact.inputs, y, self.weights, exact.energy, exact.arithmetic, making.storage)
        if terms is not None:
            own = replace(own, sigma=torch.sqrt(own.sigma.square() + terms.reshape(own.sigma.shape)))
        error, signal = exact.energy.requantised
        requantised = error / signal if signal else None
        if not samples:
            return Recomputed(y, own, own, (), (), tuple(exact.inputs), requantised)
        sampled = _sampled(own, y, samples)
        return Recomputed(y, own, sampled, (), tuple(samples), tuple(exact.inputs), requantised)

    def _terms_of_ranks(self, making: "_Making", energy: Tensor | None) -> Tensor | None:
        """The variance of what ranks round besides where they add up: each its term, and every sum on the way.

        With Q the sum of squares of all terms, u^2 / 3 n Q for n ranks, as of any sum (`numerics.floors`). Terms of a
        matmul are not recorded; their squares add up to its energy, but for chance.
        """
        op, step = making.op, making.step
        n, dtype = self.recorded.summed(step, op)
        if not n:
            return None
        if op.kind == "linear":
            return energy * (UNIT[dtype] ** 2 * n / 3) if dtype in ("f16", "bf16") and energy is not None else None
        sizes, unit = self.recorded.sizes(step, making.rows), UNIT[dtype]
        each = [self.recorded.squares(step, name, making.rows) for name in op.inputs]
        squares = [seen(v, *sizes, x) if v else x for v, x in zip(op.seen, each, strict=True) if x is not None]
        return torch.stack(squares).sum(0) * (unit**2 * n / 3) if squares else None

    def _making(self, step: int, op: Op, scheme: Scheme, storage: str, rows: Rows) -> "_Making":
        """The calls that make an op's output for these tokens: of the inputs as they are, and of their samples."""
        inputs, arithmetic = self.inputs(step, op, scheme, rows), arithmetic_of(op, scheme, self.weights)
        exact = [value.exact for value in inputs]
        random = torch.Generator()
        if not self.has_noise:
            return _Making(step, rows, op, storage, random, [call_of(op, exact, self.weights, arithmetic)])
        random.manual_seed(_seed(step, op.name))
        calls = [call_of(op, exact, self.weights, arithmetic, Energy())]
        for i in range(self._n_samples if any(value.samples for value in inputs) else 0):
            sampled, rounded = [value.sample(i) for value in inputs], self._rounded(inputs, random)
            calls.append(call_of(op, sampled, self.weights, arithmetic, rounded=rounded))
        return _Making(step, rows, op, storage, random, calls)

    def _rounded(self, inputs: list[Value], random: torch.Generator) -> Rounded:
        """Rounds samples of the inputs, with the noise of some values of each row that are rounded the other way.

        Of 10,000 to 100,000 values that were recomputed one lies so near a boundary. If it turns, that is worth more
        than all other noise: a few samples would have it for some ops and not for others. So each row has its share.
        """
        recorded = [id(value.exact) for value in inputs if not value.samples]

        def rounded(x: Tensor, name: str) -> Tensor:
            if id(x) in recorded or name == "f64":
                return rounding(x, name)
            turned = rounding_named(name).step(x) * math.sqrt(_TURNED / x[0].numel())
            return rounding(x, name) + turned * _gauss(x, random)

        return rounded

    def inputs(self, step: int, op: Op, scheme: Scheme, rows: Rows) -> list[Value]:
        """What the op reads, in its order: of these tokens of the step, or of all tokens so far."""
        if op.kind == "state":
            before = self.recorded.before(step)
            parts = [self._value((before, name, None), scheme) for name in op.inputs] if before is not None else []
            return [_applied(lambda *parts: state(op, parts, self.weights.device), parts)]
        values = [
            self._left_of(step, name)
            if past == "before"
            else self._so_far(step, name, scheme)
            if past
            else self._value((step, name, rows), scheme)
            for name, past in op.reads
        ]
        sizes = self.recorded.sizes(step, rows)
        pairs = zip(values, op.seen, strict=True)
        return [_applied(partial(seen, view, *sizes), [value]) if view else value for value, view in pairs]

    def values(self, record: OpRecord, channels: slice | None = None) -> Tensor:
        """The record's own values. All of them are kept, for the next op reads them; some `channels` are not."""
        if channels is not None:
            return self.recorded.values(record, channels=channels)
        place = record.step, record.op, record.rows
        if (place, "") not in self._values:
            self._values[place, ""] = self._recorded_value(place)
        return self._values[place, ""].exact

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
        return self._pasts.setdefault((name, sequence, scheme.name), Past())

    def _so_far(self, step: int, name: str, scheme: Scheme) -> Value:
        """The value of all tokens so far."""
        past = self._past(step, name, scheme)
        for number in self.recorded.until(step, len(past)):
            past.append(self._value((number, name, None), scheme))
        return past.until(self.recorded.n_until(step))

    def _left_of(self, step: int, name: str) -> Value:
        """What is left in a buffer of the value in earlier steps, as far as these were recorded."""
        places = [(number, name, None) for number in self.recorded.until(step)[:-1]]
        return Value(in_buffer([self.recorded.value(place) for place in places if self.recorded.holds(place)]))

    def _value(self, place: Place, scheme: Scheme) -> Value:
        """A value as the trace recorded it, or recomputed under the scheme from what it recorded."""
        if not self.recorded.holds(place) and self._key(place, scheme) not in self._values:
            self._catch_up(place, scheme)
        return self._in_step(place, scheme)

    def _catch_up(self, place: Place, scheme: Scheme) -> None:
        """Recompute what the value reads of the steps before it: one by one, as the engine ran them."""
        step, name, rows = place
        segment = self._segments.of(step, self.graph[name], rows)
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
        steps = (at for (at, held, _), of in self._values if held == name and of == scheme.name and at < step)
        return max((self.recorded.n_until(at) for at in steps if self.recorded.sequence(at) == sequence), default=0)

    def _in_step(self, place: Place, scheme: Scheme) -> Value:
        """The value, when all that it reads of the steps before is there."""
        key = self._key(place, scheme)
        if key not in self._values and self.recorded.holds(place):
            self._values[key] = self._recorded_value(place)
        for missing in self._unrecorded(place, scheme):
            self._values[self._key(missing, scheme)] = self._recompute(missing, scheme)
        return self._values[key]

    def _recorded_value(self, place: Place) -> Value:
        """A recorded value. One that was rounded on the way to the file has samples of what the engine had instead."""
        value = self.recorded.value(place)
        lost = self.recorded.lost(place, value) if self.has_noise else None
        if lost is None:
            return Value(value)
        random, half = torch.Generator().manual_seed(_seed(*place[:2])), rounding_named(lost).step(value) / 2
        return Value(value, tuple(value + half * _flat(value, random) for _ in range(self._n_samples)))

    def _unrecorded(self, place: Place, scheme: Scheme) -> Iterator[Place]:
        """What must be recomputed for a value, each after its inputs: deep models outgrow Python's recursion."""
        stack = [(place, False)]
        while stack:
            place, inputs_are_there = stack.pop()
            if self.recorded.holds(place) or self._key(place, scheme) in self._values:
                continue
            if inputs_are_there:
                yield place
                continue
            stack += [(place, True), *((at, False) for at in self._reads(place, scheme))]

    def _reads(self, place: Place, scheme: Scheme) -> Iterator[Place]:
        """What is read for a value, the last first; of all steps so far those that are not there."""
        step, name, rows = place
        op, before = self.graph[name], self.recorded.before(step)
        for read, past in reversed(op.reads):
            if op.kind == "state":
                yield from () if before is None else ((before, read, None),)
            elif past == "before":
                continue
            elif past:
                missing = self.recorded.until(step, len(self._past(step, read, scheme)))
                yield from ((number, read, None) for number in missing)
            else:
                yield step, read, rows

    def _key(self, place: Place, scheme: Scheme) -> tuple[Place, str]:
        return place, "" if self.recorded.holds(place) else scheme.name

    def _recompute(self, place: Place, scheme: Scheme) -> Value:
        step, name, rows = place
        making = self._making(step, self.graph[name], scheme, self.recorded.storage(step), rows)
        made = self._made(making, evaluate_together(making.calls))
        before = made.samples or (made.exact,) * self._n_samples
        if KINDS[making.op.kind].picks:  # what is chosen has no noise: its scores have it
            return Value(made.exact, before)
        return Value(made.exact, tuple(_perturbed(x, made.own, making.random) for x in before))


@dataclass(frozen=True, slots=True)
class _Making:
    """What makes an op's output, and the numbers drawn for its noise: these are the same, whatever is made beside it.

    The first call is of the inputs as they are, the others of samples.
    """

    step: int
    rows: Rows
    op: Op
    storage: str
    random: torch.Generator
    calls: list[Call]


def made_together(op: Op, asked: Sequence[tuple[Recomputation, int, Scheme, str, Rows]]) -> list[Recomputed]:
    """The op's output in several steps and traces, as `Recomputation.op` makes it of each: its weight is read once."""
    makings = [of._making(step, op, scheme, storage, rows) for of, step, scheme, storage, rows in asked]
    ys = iter(evaluate_together([call for making in makings for call in making.calls]))
    made = []
    for (of, step, _, _, rows), making in zip(asked, makings, strict=True):
        one, segment = of._made(making, [*islice(ys, len(making.calls))]), of._segments.of(step, op, rows)
        made.append(replace(one, segment=segment, inputs=one.inputs if len(segment) == 1 else ()))
    return made


def _perturbed(x: Tensor, noise: Noise, random: torch.Generator) -> Tensor:
    moved = torch.addcmul(x, _gauss(x, random), noise.sigma).addcmul_(_flat(x, random), noise.hard)
    return moved if _is_finite(moved) else torch.where(x.isinf(), x, moved)  # what a mask hides stays hidden


def _seed(step: int, name: str) -> int:
    return zlib.crc32(f"{step} {name}".encode())


# Drawn in float32, which takes a sixth of the time: noise needs no more digits.
def _flat(like: Tensor, random: torch.Generator) -> Tensor:
    """From -1 to 1."""
    return torch.rand(like.shape, generator=random).to(like).mul_(2).sub_(1)


def _gauss(like: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=random).to(like)


def _applied(function: Callable[..., Tensor], values: Sequence[Value]) -> Value:
    """A function of values, exact and of each sample."""
    n_samples = max((len(value.samples) for value in values), default=0)
    samples = tuple(function(*(value.sample(i) for value in values)) for i in range(n_samples))
    return Value(function(*(value.exact for value in values)), samples)
