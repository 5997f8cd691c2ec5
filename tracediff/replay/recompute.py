"""Ops recomputed from what a trace holds.

Where an input was not recorded it is recomputed too, from the nearest recorded ancestors: a segment of the graph.
The noise that honest arithmetic makes on the way is carried along in samples, values with that noise added.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tracediff.model.graph import SOURCES, Graph, Op
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.evaluate import arithmetic_of, evaluate, noise, rounding
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Energy, Rounded
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.views import seen, state
from tracediff.replay.recorded import Place, Recorded
from tracediff.trace.format import OpRecord, Rows

# The whole op's NMSE may exceed its expectation by chance and by what the model of the noise neglects.
_MARGIN = 4.0
# Noise through a segment is known from samples of it, not from a formula: its spread is that uncertain.
_SAMPLES, _SEGMENT_MARGIN = 2, 16.0
_TURNED = 0.5  # values of a row that are rounded the other way; the margin of a segment allows 8
_RECENT = 48  # values kept from one layer to the next: more than a layer has, of some tokens and of all


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the trace in float64. Recomputed ones carry samples of what noise would have made of them."""

    exact: Tensor
    samples: tuple[Tensor, ...] = ()
    segment: tuple[str, ...] = ()

    def sample(self, i: int) -> Tensor:
        """Sample `i`; a recorded value has no noise of ours, but what it lost on the way to the file."""
        return self.samples[i % len(self.samples)] if self.samples else self.exact


@dataclass(frozen=True, slots=True)
class Recomputed:
    """An op's output as it should be: exact, the noise of an honest engine, and the ops recomputed for it."""

    exact: Tensor
    own: Noise  # of the op itself
    noise: Noise  # with that of the segment before it
    segment: tuple[str, ...]
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
        return _SEGMENT_MARGIN if self.samples else _MARGIN

    def bound(self) -> Tensor:
        """Of each element. A sampled spread is that of its row: two samples say little of one element."""
        return self.noise.bound() * math.sqrt(_SEGMENT_MARGIN) if self.samples else self.noise.bound()


class Recomputation:
    """Recomputes the ops of `graph`. What was recomputed is kept for the ops after it, until `forget`."""

    def __init__(self, recorded: Recorded, graph: Graph, weights: Weights, n_samples: int = _SAMPLES) -> None:
        self._recorded = recorded
        self._graph = graph
        self._weights = weights
        self._n_samples = n_samples
        self.has_noise = n_samples > 0
        self._values: dict[tuple[Place, str], Value] = {}
        self._random = torch.Generator()

    def changed(self, ops: Sequence[Op], n_samples: int = _SAMPLES) -> "Recomputation":
        """The same trace with these ops in place of those of the same names. Without samples no noise is computed.

        What was recorded is kept, and what was recomputed without noise of ops before these.
        """
        other = Recomputation(self._recorded, self._graph.changed(*ops), self._weights, n_samples)
        after = self._graph.after(op.name for op in ops) if not n_samples and not self.has_noise else None
        other._values = {
            key: value
            for key, value in self._values.items()
            if not key[1] or (after is not None and key[0][1] not in after)
        }
        return other

    def op(self, step: int, op: Op, scheme: Scheme, storage: str, rows: Rows) -> Recomputed:
        """The op's output for these tokens of the step, were it computed under `scheme` and stored as `storage`."""
        inputs, arithmetic = self.inputs(step, op, scheme, rows), arithmetic_of(op, scheme, self._weights)
        exact_inputs = [value.exact for value in inputs]
        if not self.has_noise:
            y = evaluate(op, exact_inputs, self._weights, arithmetic)
            return self._without_noise(y, inputs, op)
        self._draw_for(step, op.name)
        energy = Energy()
        y = evaluate(op, exact_inputs, self._weights, arithmetic, energy)
        own = noise(op, exact_inputs, y, self._weights, energy, arithmetic, storage)
        segment = _segment(inputs, op)
        error, signal = energy.requantised
        requantised = error / signal if signal else None
        if not any(value.samples for value in inputs):
            return Recomputed(y, own, own, segment, (), tuple(exact_inputs), requantised)
        samples = []
        for i in range(self._n_samples):
            sampled = [value.sample(i) for value in inputs]
            samples.append(evaluate(op, sampled, self._weights, arithmetic, rounded=self._rounded(inputs)))
        # The spread of each row, for two samples say little of one element.
        spread = torch.stack([(sample - y).square() for sample in samples]).mean(0)
        sigma = torch.sqrt(own.sigma.square() + torch.maximum(spread.mean(-1, keepdim=True), spread))
        held = () if any(value.segment for value in inputs) else tuple(exact_inputs)
        return Recomputed(y, own, replace(own, sigma=sigma), segment, tuple(samples), held, requantised)

    def _rounded(self, inputs: list[Value]) -> Rounded:
        """Rounds samples of the inputs, with the noise of some values of each row that are rounded the other way.

        Of 10,000 to 100,000 values that were recomputed one lies so near a boundary. If it turns, that is worth more
        than all other noise: a few samples would have it for some ops and not for others. So each row has its share.
        """
        recorded = [id(value.exact) for value in inputs if not value.samples]

        def rounded(x: Tensor, name: str) -> Tensor:
            if id(x) in recorded or name == "f64":
                return rounding(x, name)
            return rounding(x, name) + rounding_named(name).step(x) * math.sqrt(_TURNED / x[0].numel()) * self._gauss(x)

        return rounded

    def _without_noise(self, y: Tensor, inputs: list[Value], op: Op) -> Recomputed:
        none = torch.zeros((), dtype=y.dtype, device=y.device).expand_as(y)
        held = () if any(value.segment for value in inputs) else tuple(value.exact for value in inputs)
        return Recomputed(y, Noise(none, none), Noise(none, none), _segment(inputs, op), inputs=held)

    def inputs(self, step: int, op: Op, scheme: Scheme, rows: Rows) -> list[Value]:
        """What the op reads, in its order."""
        values = [self._joined(places, scheme) for places in self._recorded.reads(step, op, rows) if places]
        if op.kind == "state":
            return [_applied(lambda *parts: state(op, parts, self._weights.device), values)]
        sizes = self._recorded.sizes(step, rows)
        pairs = zip(values, op.seen, strict=True)
        return [_applied(partial(seen, view, *sizes), [value]) if view else value for value, view in pairs]

    def recorded(self, record: OpRecord, channels: slice | None = None) -> Tensor:
        """The record's own values. All of them are kept, for the next op reads them; some `channels` are not."""
        if channels is not None:
            return self._recorded.values(record, channels=channels)
        place = record.step, record.op, record.rows
        if (place, "") not in self._values:
            self._values[place, ""] = self._held(place)
        return self._values[place, ""].exact

    def forget(self, all_of_it: bool = False) -> None:
        """Drop values of layers that are done. The trace has what was recorded; recomputed K and V must stay."""
        cached = self._graph.cached()
        recent = () if all_of_it else list(self._values)[-_RECENT:]
        self._values = {
            key: value
            for key, value in self._values.items()
            if key in recent or key[0][1] in SOURCES or (key[0][1] in cached and value.samples)
        }

    def keep_waists(self) -> None:
        """Where values of more than a layer were recomputed, keep those that the layers after it begin with."""
        if len(self._values) > _RECENT:
            cached = self._graph.cached()
            self._values = {
                key: value
                for key, value in self._values.items()
                if not key[1] or key[0][1] in cached or self._graph[key[0][1]].kind == "add"
            }

    def _joined(self, places: list[Place], scheme: Scheme) -> Value:
        values = [self._value(place, scheme) for place in places]
        if len(values) == 1:
            return values[0]
        samples: tuple[Tensor, ...] = ()
        if any(value.samples for value in values):
            samples = tuple(torch.cat([value.sample(i) for value in values]) for i in range(self._n_samples))
        segment = tuple(dict.fromkeys(n for value in values for n in value.segment))
        return Value(torch.cat([value.exact for value in values]), samples, segment)

    def _value(self, place: Place, scheme: Scheme) -> Value:
        """A value as the trace recorded it, or recomputed under the scheme from what it recorded."""
        key = self._key(place, scheme)
        if key not in self._values and self._recorded.holds(place):
            self._values[key] = self._held(place)
        for missing in self._unrecorded(place, scheme):
            self._values[self._key(missing, scheme)] = self._recompute(missing, scheme)
        return self._values[key]

    def _held(self, place: Place) -> Value:
        """A recorded value. One that was rounded on the way to the file has samples of what the engine had instead."""
        value = self._recorded.value(place)
        lost = self._recorded.lost(place, value) if self.has_noise else None
        if lost is None:
            return Value(value)
        self._draw_for(*place[:2])
        half = rounding_named(lost).step(value) / 2
        return Value(value, tuple(value + half * self._flat(value) for _ in range(self._n_samples)))

    def _unrecorded(self, place: Place, scheme: Scheme) -> Iterator[Place]:
        """What must be recomputed for a value, each after its inputs: deep models outgrow Python's recursion."""
        stack = [(place, False)]
        while stack:
            place, inputs_are_there = stack.pop()
            if self._recorded.holds(place) or self._key(place, scheme) in self._values:
                continue
            if inputs_are_there:
                yield place
                continue
            step, name, rows = place
            inputs = [at for places in self._recorded.reads(step, self._graph[name], rows) for at in places]
            stack += [(place, True), *((at, False) for at in reversed(inputs))]

    def _key(self, place: Place, scheme: Scheme) -> tuple[Place, str]:
        return place, "" if self._recorded.holds(place) else scheme.name

    def _recompute(self, place: Place, scheme: Scheme) -> Value:
        step, name, rows = place
        made = self.op(step, self._graph[name], scheme, self._recorded.storage(step), rows)
        before = made.samples or (made.exact,) * self._n_samples
        return Value(made.exact, tuple(self._perturbed(x, made.own) for x in before), made.segment)

    def _perturbed(self, x: Tensor, noise: Noise) -> Tensor:
        return x + self._gauss(x) * noise.sigma + self._flat(x) * noise.hard

    def _draw_for(self, step: int, name: str) -> None:
        """The noise of a value is the same, whatever was computed before it."""
        self._random.manual_seed(zlib.crc32(f"{step} {name}".encode()))

    def _flat(self, like: Tensor) -> Tensor:
        """From -1 to 1."""
        return 2 * torch.rand(like.shape, generator=self._random, dtype=like.dtype).to(like.device) - 1

    def _gauss(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._random, dtype=like.dtype).to(like.device)


def _applied(function: Callable[..., Tensor], values: Sequence[Value]) -> Value:
    """A function of values, exact and of each sample."""
    n_samples = max((len(value.samples) for value in values), default=0)
    samples = tuple(function(*(value.sample(i) for value in values)) for i in range(n_samples))
    segment = tuple(dict.fromkeys(name for value in values for name in value.segment))
    return Value(function(*(value.exact for value in values)), samples, segment)


def _segment(inputs: list[Value], op: Op) -> tuple[str, ...]:
    """The ops that were recomputed for the inputs, and the op itself."""
    return (*dict.fromkeys(name for value in inputs for name in value.segment), op.name)
