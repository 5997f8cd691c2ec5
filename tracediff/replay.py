"""Local error: every op of a trace recomputed in float64 from that trace's own recorded inputs.

Where an input was not recorded it is recomputed too, from the nearest recorded ancestors; the noise that honest
arithmetic makes on the way is carried along by recomputing the segment a second time with that noise added.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracediff.errors import TraceError
from tracediff.floors import Noise, noise
from tracediff.model.arithmetic import BLOCK, EXACT, ROUNDINGS, SCHEMES, Arithmetic, Scheme, flips
from tracediff.model.evaluate import Energy, columns, evaluate
from tracediff.model.graph import SOURCES, Graph, Op
from tracediff.model.ops import causal
from tracediff.model.weights import Weights
from tracediff.names import layer_of
from tracediff.result import Local, Worst
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

# The whole op's NMSE may exceed its expectation by chance and by what the model of the noise neglects.
_MARGIN = 4.0
# Noise through a segment is known from samples of it, not from a formula: its spread is that uncertain.
_SAMPLES, _SEGMENT_MARGIN = 2, 16.0
# A floor beyond this hides everything: no verdict is better than a blind one.
_BLIND = 0.05
# A value within 2^-15 of a boundary is one in 16,000; more rows than this with such an event are no accident.
_MOST_TURNED = 0.5
_MANY = 256  # values that all fit float16 by chance: 2^-13 to the power of it
_RECENT = 24  # values kept from one layer to the next: more than a layer has


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the trace in float64. Recomputed ones carry samples of what noise would have made of them."""

    exact: Tensor
    samples: tuple[Tensor, ...] = ()
    segment: tuple[str, ...] = ()

    def sample(self, i: int) -> Tensor:
        """Sample `i`; a recorded value has no noise of ours."""
        return self.samples[i] if self.samples else self.exact


@dataclass(frozen=True, slots=True)
class Recomputed:
    """An op's output as it should be: exact, the noise of an honest engine, and the ops recomputed for it."""

    exact: Tensor
    own: Noise  # of the op itself
    noise: Noise  # with that of the segment before it
    segment: tuple[str, ...]
    samples: tuple[Tensor, ...] = ()

    @property
    def floor(self) -> float:
        """The NMSE that honest arithmetic can make."""
        margin = _SEGMENT_MARGIN if self.samples else _MARGIN
        return margin * _ratio(self.noise.variance().sum(), self.exact.square().sum())

    def bound(self) -> Tensor:
        """Of each element. A sampled spread is that of its row: two samples say little of one element."""
        return self.noise.bound() * (math.sqrt(_SEGMENT_MARGIN) if self.samples else 1.0)


class Replay:
    """Judges the records of one trace. `graph` is the model as it should be."""

    def __init__(self, trace: Trace, graph: Graph, weights: Weights, pinned: Scheme | None = None) -> None:
        self.trace = trace
        self.graph = graph
        self.weights = weights
        self._schemes = (pinned,) if pinned else SCHEMES
        self._fits: dict[tuple[str, ...], Scheme] = {}
        self._best: dict[tuple[int, str], Scheme] = {}
        self._earned: set[Scheme] = set()
        self._samples = _SAMPLES
        self._values: dict[tuple[int, str, str], Value] = {}
        self._random = torch.Generator().manual_seed(0)
        self._positions = _positions(trace)
        self._cached = graph.cached()
        self._check_shapes()

    @torch.inference_mode()
    def run(self, progress: Callable[[float], None] = lambda fraction: None) -> Iterator[tuple[OpRecord, Local]]:
        """The local error of each record with data, in the trace's order of steps and the graph's of ops."""
        done = 0
        for step in self.trace.steps:
            layer: int | None = None
            for op in self.graph:
                if layer_of(op.name) != layer:
                    layer = layer_of(op.name)
                    self._forget(step)
                record = self.trace.ops.get((step, op.name))
                if record is not None and record.has_data:
                    yield record, self._judge(record, op)
                done += 1
                progress(done / (len(self.graph.ops) * len(self.trace.steps)))
            self._forget(step, all_of_it=True)

    @torch.inference_mode()
    def under(self, record: OpRecord, ops: Sequence[Op], before: Local) -> Local:
        """The record's local error if the engine computed these ops as given: a hypothesis tried.

        `before` is the error without it. What does not take nine tenths of that away is not looked at closely.
        """
        other = copy(self)
        other.graph = self.graph.changed(*ops)
        other._values = {key: value for key, value in self._values.items() if not key[2]}
        other._fits, other._earned = dict(self._fits), set(self._earned)
        other._random = torch.Generator().manual_seed(0)
        op = other.graph[record.op]
        best = self._likeliest(record)
        other._samples = 0  # a first look needs no noise
        first_look = other._local(
            record, op, self._recorded(record), other._recompute(record.step, op, best, "f32"), best
        )
        if not first_look.nmse <= 0.1 * before.nmse:
            return first_look
        other._samples = self._samples
        other._values = {key: value for key, value in other._values.items() if not key[2]}
        return other._judge(record, op)

    def made(self, record: OpRecord) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """What was recorded, what it should be, and the op's inputs: all float64, under the scheme that fits best."""
        op = self.graph[record.op]
        scheme = self._likeliest(record)
        inputs = self._inputs(record.step, op, scheme)
        exact = self._recompute(record.step, op, scheme, record.dtype or "f32").exact
        return self._recorded(record), exact, tuple(value.exact for value in inputs)

    def _likeliest(self, record: OpRecord) -> Scheme:
        """The scheme of other ops of the record's sort, else of most other ops, else the one that leaves least."""
        fit = self._fits.get(self._sort_of(self.graph[record.op], record))
        if fit or not self._fits:
            return fit or self._best[record.step, record.op]
        return Counter(self._fits.values()).most_common(1)[0][0]

    def _judge(self, record: OpRecord, op: Op) -> Local:
        """The record's local error under the arithmetic that fits it."""
        recorded = self._recorded(record)
        storage = _stored_as(recorded, record.dtype or "f32")
        sort = self._sort_of(op, record)
        tried: list[tuple[Local, Scheme]] = []
        for scheme in self._candidates(op, record.step, sort):
            made = self._recompute(record.step, op, scheme, storage)
            tried.append((self._local(record, op, recorded, made, scheme), scheme))
            fit = self._fit(tried)
            if fit:
                self._fits[sort] = self._best[record.step, record.op] = fit[1]
                return fit[0]
        # Nothing fits: the error is what the least of the schemes that can see leaves.
        local, scheme = min(tried, key=lambda pair: (pair[0].floor > _BLIND, math.isnan(pair[0].nmse), pair[0].nmse))
        self._best[record.step, record.op] = scheme
        return local

    def _fit(self, tried: list[tuple[Local, Scheme]]) -> tuple[Local, Scheme] | None:
        """The first scheme that passes and may: a wide floor could excuse a mistake.

        The floors of single ops with float32 sums are narrow, and so are those of the plain schemes. Any other
        must leave less than each that has a narrower floor, once in the trace: then it is this engine's.
        """
        for local, scheme in tried:
            if local.faulty or local.floor > _BLIND:
                continue
            if scheme in self._schemes[:2] or (len(local.segment) == 1 and not scheme.loose):
                return local, scheme
            narrower = [other for other, _ in tried if other.floor < local.floor]
            if scheme in self._earned or (len(tried) > 2 and all(local.nmse < other.nmse for other in narrower)):
                self._earned.add(scheme)
                return local, scheme
        return None

    def _local(self, record: OpRecord, op: Op, recorded: Tensor, made: Recomputed, scheme: Scheme) -> Local:
        local = self._measure(record, op, recorded, made, scheme)
        if local.faulty and op.kind == "linear" and len(made.segment) == 1:
            turned = self._turned(op, recorded, made, scheme, record.step)
            if turned is not None:
                flipped = self._measure(record, op, recorded, replace(made, exact=turned[0]), scheme)
                return replace(flipped, flips=turned[1])
        return local

    def _turned(
        self, op: Op, recorded: Tensor, made: Recomputed, scheme: Scheme, step: int
    ) -> tuple[Tensor, int] | None:
        """The op's output with activations that lie on a rounding boundary turned where that explains the error,
        and how many were turned. None where too many rows err for such an event, or none does.
        """
        x = self._inputs(step, op, scheme)[0].exact.flatten(1)
        exact, error = made.exact.flatten(1).clone(), (recorded - made.exact).flatten(1)
        rows = torch.nonzero((error.abs() > made.bound().flatten(1)).any(1)).flatten()
        turns = flips(x, self._arithmetic(op, scheme).operands)
        if not 0 < len(rows) <= _MOST_TURNED * len(x) + 1 or not bool(turns[rows].any()):
            return None
        near = torch.nonzero(turns[rows].any(0)).flatten()
        matrix = columns(op, near, self.weights)
        count = 0
        for row in rows:
            for i, column in enumerate(near):
                change = float(turns[row, column]) * matrix[:, i]
                # How much of the change is in the error: 1 if this value went the other way, 0 if it did not.
                share = float(error[row] @ change / change.square().sum().clamp(min=1e-300))
                if round(share) == 1:
                    exact[row] += change
                    error[row] -= change
                    count += 1
        return exact.reshape(made.exact.shape), count

    def _measure(self, record: OpRecord, op: Op, recorded: Tensor, made: Recomputed, scheme: Scheme) -> Local:
        exact, bound = made.exact, made.bound()
        same = (recorded == exact) | (recorded.isnan() & exact.isnan())  # Inf - Inf is NaN
        error = (recorded - exact).abs().masked_fill(same, 0.0)
        exact = exact.masked_fill(~exact.isfinite(), 0.0)
        if op.kind == "scores":
            hidden = self._hidden(record.step)
            error = error.masked_fill(hidden, 0.0)
            exact = exact.masked_fill(hidden, 0.0)
        excess = (error / bound).nan_to_num(nan=math.inf)
        at = int(excess.argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), excess.shape))
        floor = made.floor
        relative = torch.where(exact != 0, bound / exact.abs(), math.inf).min()
        return Local(
            nmse=_ratio(error.square().sum(), exact.square().sum()),
            floor=floor,
            excess=float(excess.flatten()[at]),
            worst=Worst(index, float(exact.flatten()[at]), float(recorded.flatten()[at])),
            arithmetic=str(self._arithmetic(op, scheme)) if len(made.segment) == 1 else scheme.name,
            segment=made.segment,
            sharpness=min(math.sqrt(floor), float(relative)),
        )

    def _recompute(self, step: int, op: Op, scheme: Scheme, storage: str) -> Recomputed:
        inputs, arithmetic = self._inputs(step, op, scheme), self._arithmetic(op, scheme)
        exact_inputs = [value.exact for value in inputs]
        energy = Energy()
        y = evaluate(op, exact_inputs, self.weights, arithmetic, energy)
        weight_inputs = [self.weights.load(w) for w in op.weights] if op.kind == "rope" else []
        own = noise(op, [*exact_inputs, *weight_inputs], y, energy, arithmetic, storage)
        segment = (*dict.fromkeys(name for value in inputs for name in value.segment), op.name)
        if not any(value.samples for value in inputs):
            return Recomputed(y, own, own, segment)
        samples = []
        for i in range(self._samples):
            samples.append(evaluate(op, [value.sample(i) for value in inputs], self.weights, arithmetic))
        # The spread of each row, for two samples say little of one element.
        spread = torch.stack([(sample - y).square() for sample in samples]).mean(0)
        rows = spread.mean(-1, keepdim=True).expand_as(spread)
        sigma = torch.sqrt(own.sigma.square() + torch.maximum(rows, spread))
        return Recomputed(y, own, Noise(sigma, own.hard), segment, tuple(samples))

    def _arithmetic(self, op: Op, scheme: Scheme) -> Arithmetic:
        return scheme.of(op.kind, self.weights.type_of(op.weights[0]) if op.weights else "F32")

    def _inputs(self, step: int, op: Op, scheme: Scheme) -> list[Value]:
        past = op.past or (False,) * len(op.inputs)
        return [
            self._past(step, name, scheme) if reads_past else self._value(step, name, scheme)
            for name, reads_past in zip(op.inputs, past, strict=True)
        ]

    def _past(self, step: int, name: str, scheme: Scheme) -> Value:
        values = [self._value(number, name, scheme) for number in self.trace.steps if number <= step]
        samples: tuple[Tensor, ...] = ()
        if any(value.samples for value in values):
            samples = tuple(torch.cat([value.sample(i) for value in values]) for i in range(self._samples))
        segment = tuple(dict.fromkeys(n for value in values for n in value.segment))
        return Value(torch.cat([value.exact for value in values]), samples, segment)

    def _value(self, step: int, name: str, scheme: Scheme) -> Value:
        """A value as the trace recorded it, or recomputed under the scheme from what it recorded."""
        under = "" if name in SOURCES or self._is_recorded(step, name) else scheme.name
        key = (step, name, under)
        if key not in self._values:
            self._values[key] = self._recompute_value(step, name, scheme) if under else self._given(step, name)
        return self._values[key]

    def _is_recorded(self, step: int, name: str) -> bool:
        record = self.trace.ops.get((step, name))
        return record is not None and record.has_data

    def _given(self, step: int, name: str) -> Value:
        if name in SOURCES:
            ids = self.trace.steps[step].tokens if name == "tokens" else self._positions[step]
            return Value(torch.tensor(ids, device=self.weights.device))
        return Value(self._recorded(self.trace.ops[step, name]))

    def _recompute_value(self, step: int, name: str, scheme: Scheme) -> Value:
        made = self._recompute(step, self.graph[name], scheme, self._storage(step))
        before = made.samples or (made.exact,) * self._samples
        return Value(made.exact, tuple(self._perturbed(x, made.own) for x in before), made.segment)

    def _perturbed(self, x: Tensor, noise: Noise) -> Tensor:
        gauss = torch.randn(x.shape, generator=self._random, dtype=x.dtype).to(x.device)
        flat = 2 * torch.rand(x.shape, generator=self._random, dtype=x.dtype).to(x.device) - 1
        return x + gauss * noise.sigma + flat * noise.hard

    def _recorded(self, record: OpRecord) -> Tensor:
        values = torch.from_numpy(self.trace.values(record).astype("float64"))
        op = self.graph[record.op]
        positions = self._positions[record.step]
        return values.reshape(op.shape(len(positions), self._n_past(record.step))).to(self.weights.device)

    def _hidden(self, step: int) -> Tensor:
        scheme = self._schemes[0]  # positions have no arithmetic
        return causal(self._value(step, "positions", scheme).exact, self._past(step, "positions", scheme).exact)

    def _n_past(self, step: int) -> int:
        return sum(len(p) for number, p in self._positions.items() if number < step)

    def _storage(self, step: int) -> str:
        """What the engine stores values in, by what it recorded in this step."""
        return next((r.dtype for r in self.trace.step_ops(step) if r.dtype), "f32")

    def _forget(self, step: int, all_of_it: bool = False) -> None:
        """Drop values of layers that are done. The trace has what was recorded; recomputed K and V must stay."""
        recent = () if all_of_it else list(self._values)[-_RECENT:]
        self._values = {
            key: value
            for key, value in self._values.items()
            if key in recent or key[1] in SOURCES or (key[1] in self._cached and value.samples)
        }

    def _sort_of(self, op: Op, record: OpRecord) -> tuple[str, ...]:
        """Ops of one sort are computed alike: kind, storage, weight type, and whether it spans unrecorded ops."""
        whole = [str(not self._is_recorded(record.step, name)) for name in op.inputs if name not in SOURCES]
        types = [self.weights.type_of(w) for w in op.weights[:1]] if op.kind == "linear" else []
        return (
            op.kind,
            record.dtype or "",
            str(len(self.trace.steps[record.step].tokens) > 1),
            *whole,
            *types,
        )

    def _candidates(self, op: Op, step: int, sort: tuple[str, ...]) -> Iterator[Scheme]:
        """Schemes to try: the one that fitted the last op of this sort, then all that differ for this op."""
        first = [self._fits[sort]] if sort in self._fits else []
        segment = any(name not in SOURCES and not self._is_recorded(step, name) for name in op.inputs)
        tried: set[str] = set()
        for scheme in (*first, *self._schemes):
            arithmetic = self._arithmetic(op, scheme)
            name = scheme.name if segment else str(arithmetic)
            covered = self.graph if segment else (op,)
            if name not in tried and all(self._possible(o, self._arithmetic(o, scheme)) for o in covered):
                tried.add(name)
                yield scheme

    def _possible(self, op: Op, arithmetic: Arithmetic) -> bool:
        """Whether rows are multiples of the blocks."""
        if arithmetic == EXACT:
            return True
        columns = op.weights[0].shape[-1] if op.kind == "linear" else self.graph.hparams.head_dim
        return not any(columns % BLOCK.get(name, 1) for name in (arithmetic.operands, arithmetic.stored))

    def _check_shapes(self) -> None:
        for record in self.trace.ops.values():
            if record.op not in self.graph:
                continue
            positions = self._positions[record.step]
            shape = self.graph[record.op].shape(len(positions), self._n_past(record.step))
            if record.size != math.prod(shape) or record.shape[0] != shape[0]:
                raise TraceError(
                    f"{self.trace.path}: {record.op!r} in step {record.step} has shape {list(record.shape)}; this "
                    f"model's is {list(shape)}. Is it a trace of another model? See `tracediff inspect MODEL`."
                )


def _stored_as(values: Tensor, dtype: str) -> str:
    """What an engine stored values in before it wrote them as float32: all of many fit a shorter type."""
    if dtype == "f32" and int((values != 0).sum()) >= _MANY:
        for name, rounding in (("bf16", ROUNDINGS["bf16"]), ("f16", ROUNDINGS["f16"])):
            if torch.equal(rounding(values), values):
                return name
    return dtype


def _positions(trace: Trace) -> dict[int, tuple[int, ...]]:
    """The positions that each step should have: they go on where the last ended. Raises TraceError for a gap."""
    positions: dict[int, tuple[int, ...]] = {}
    following: int | None = None
    for number, step in trace.steps.items():
        first = step.positions[0] if following is None else following
        if step.positions[0] > first and following is not None:
            raise TraceError(
                f"{trace.path}: step {number} begins at position {step.positions[0]}, but the steps before end at "
                f"{first - 1}: the keys and values between are missing. Record every step from the first."
            )
        positions[number] = tuple(range(first, first + len(step.positions)))
        following = first + len(step.positions)
    return positions


def _ratio(error: Tensor, signal: Tensor) -> float:
    if not float(signal):
        return 0.0 if not float(error) else math.inf
    return float(error / signal)
