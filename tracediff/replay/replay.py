"""Judges the ops of a trace one by one: recomputed from the trace's own inputs, under the arithmetic that fits."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from tracediff.model.graph import Graph, Op
from tracediff.model.weights import Weights
from tracediff.names import layer_of
from tracediff.numerics.arithmetic import SCHEMES, Scheme
from tracediff.numerics.evaluate import arithmetic_of, in_words_of
from tracediff.replay.fits import BLIND, NARROW, Fits, stored_as
from tracediff.replay.recompute import Recomputation, Recomputed
from tracediff.replay.recorded import Recorded
from tracediff.replay.residual import Residual, measure, turned
from tracediff.result import Local, Worst
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

_LITTLE, _HALF = 0.1, 0.5  # of the NMSE before
# Where one large value makes most of the noise, two samples show less than a hundredth of it in one record of a
# hundred; sixteen never do. What exceeds its bound that far is beyond such accidents.
_MORE_SAMPLES, _FAR = 16, 100.0
_PART = 1 << 21  # values of an op that are judged at a time: 16 MB in float64, which the allocator reuses


class Replay:
    """Judges the records of one trace. `graph` is the model as it should be.

    Raises TraceError for a trace of another model, or one whose positions leave a gap.
    """

    def __init__(self, trace: Trace, graph: Graph, weights: Weights, pinned: Scheme | None = None) -> None:
        self.trace = trace
        self.graph = graph
        self.weights = weights
        self._recorded = Recorded(trace, graph, weights.device)
        self._recomputation = Recomputation(self._recorded, graph, weights)
        self._common: tuple[OpRecord, Recomputation] | None = None
        self._fits = Fits(self._recorded, graph, weights, (pinned,) if pinned else SCHEMES)

    @torch.inference_mode()
    def run(self, progress: Callable[[float], None] = lambda fraction: None) -> Iterator[tuple[OpRecord, Local]]:
        """The local error of each record with data, in the trace's order of steps and the graph's of ops."""
        done = 0
        for step in self.trace.steps:
            layer: int | None = None
            for op in self.graph:
                if layer_of(op.name) != layer:
                    layer = layer_of(op.name)
                    self._recomputation.forget()
                record = self.trace.ops.get((step, op.name))
                if record is not None and record.has_data:
                    yield record, self.judge(record)
                done += 1
                progress(done / (len(self.graph.ops) * len(self.trace.steps)))
            self._recomputation.forget(all_of_it=True)

    @torch.inference_mode()
    def under(
        self, record: OpRecord, ops: Sequence[Op], before: float = math.inf, plain: Scheme | None = None
    ) -> Local:
        """The record's local error if the engine computed these ops as given: a hypothesis tried.

        `before` is the NMSE without it. What does not take nine tenths of that away is not looked at closely. Of a
        segment that no arithmetic fits, the arithmetic is sought under the hypothesis, where that takes half away in
        the `plain` one: one of `plain_ones`.
        """
        plain = plain or self.plain_ones(record)[0]
        if plain is None:
            return min(self._looks(record, ops, self._fits.likely(record), before), key=_what_is_left)
        look = self._first_look(record, ops, plain)
        if not look.nmse <= _HALF * before:
            return look
        other = self._with(ops, self._recomputation.changed(ops))
        found = other._fits.of_one_segment(record, other._look, other._apart)
        local = other._closely(record, found.scheme)
        return replace(local, blind=local.blind or found.drowned)

    def plain_ones(self, record: OpRecord) -> Sequence[Scheme | None]:
        """What to look under first, one after the other; None where that is known."""
        return self._fits.plain_ones(record) or (None,)

    def _looks(self, record: OpRecord, ops: Sequence[Op], schemes: Sequence[Scheme], before: float) -> Iterator[Local]:
        """What each scheme leaves under the hypothesis, until one fits."""
        for scheme in schemes:
            look = self._first_look(record, ops, scheme)
            if look.nmse <= _LITTLE * before:
                look = self._with(ops, self._recomputation.changed(ops))._closely(record, scheme)
            yield look
            if not look.faulty and not look.blind:
                return

    def _first_look(self, record: OpRecord, ops: Sequence[Op], scheme: Scheme) -> Local:
        """Without noise, and with what is computed before these ops taken from other hypotheses."""
        unchanged = self._without_noise(record)
        unchanged.inputs(record.step, self.graph[record.op], scheme, record.rows)
        unchanged.keep_waists()
        return self._with(ops, unchanged.changed(ops, n_samples=0))._look(record, scheme)

    def _with(self, ops: Sequence[Op], recomputation: Recomputation) -> "Replay":
        other = copy(self)
        other.graph = self.graph.changed(*ops)
        other._recomputation = recomputation
        other._common = None
        return other

    def _without_noise(self, record: OpRecord) -> Recomputation:
        """What hypotheses of a record have in common: they differ from it in some ops and all after these."""
        if self._common is None or self._common[0] is not record:
            self._common = record, self._recomputation.changed((), n_samples=0)
        return self._common[1]

    def made(self, record: OpRecord) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """What was recorded, what it should be, and the op's inputs: all float64, under the scheme that fits best."""
        op, scheme = self.graph[record.op], self._fits.likely(record)[0]
        inputs = self._recomputation.inputs(record.step, op, scheme, record.rows)
        exact = self._recomputation.op(record.step, op, scheme, record.dtype or "f32", record.rows).exact
        return self._recorded.values(record), exact, tuple(value.exact for value in inputs)

    def judge(self, record: OpRecord) -> Local:
        """The record's local error under the arithmetic that fits it."""
        if self._fits.is_segment(record):
            local = self._closely(record, self._fits.of_segment(record, self._look, self._apart))
            if local.faulty and self._fits.plain_ones(record) and layer_of(record.op) is not None:
                # The mistake may be in the layers that were asked for their arithmetic, and not in this one.
                found = self._fits.of_one_segment(record, self._look, self._apart, hypothesis=False)
                local = self._closely(record, found.scheme) if found.fits and not found.drowned else local
            return replace(local, blind=local.blind or self._fits.is_drowned(record))
        tried: list[Local] = []
        for scheme in self._fits.candidates(record):
            local = self._look(record, scheme)
            tried.append(local)
            if not local.faulty and not local.blind:
                self._fits.remember(record, scheme)
                return local
        # Nothing fits: the error is what the least of the schemes that can see leaves.
        return min(tried, key=_what_is_left)

    def _closely(self, record: OpRecord, scheme: Scheme) -> Local:
        """The record's local error under a scheme, with noise from more samples where a few do not cover it."""
        local = self._look(record, scheme)
        if len(local.segment) == 1 or not local.faulty or local.excess > _FAR:
            return local
        return self._with((), self._recomputation.changed((), _MORE_SAMPLES))._look(record, scheme)

    def _look(self, record: OpRecord, scheme: Scheme) -> Local:
        """The record's local error under a scheme."""
        op = self.graph[record.op]
        storage, residuals = None, []
        for channels in _parts(op, self._recorded.shape(record, record.rows)):
            part = op.channels(channels) if channels else op
            values = self._recomputation.recorded(record, channels)
            storage = storage or stored_as(values, record.dtype or "f32")
            made = self._recomputation.op(record.step, part, scheme, storage, record.rows)
            residuals.append(self._residual(record, part, values, made, scheme))
        whole = reduce(operator.add, residuals)
        nmse, floor = _ratio(whole.error, whole.signal), made.margin * _ratio(whole.noise, whole.signal)
        return Local(
            nmse=nmse,
            floor=floor,
            excess=whole.excess,
            worst=whole.worst,
            arithmetic=in_words_of((self.graph[name] for name in made.segment), scheme, self.weights),
            segment=made.segment,
            flips=whole.flips,
            sharpness=min(math.sqrt(floor), whole.sharpness),
            blind=floor > BLIND and nmse > NARROW,
            weight_type=self.weights.type_of(op.weights[0]) if op.kind == "linear" else None,
            one_token=len(self.trace.steps[record.step].tokens) == 1,
        )

    def _apart(self, record: OpRecord, a: Scheme, b: Scheme) -> float:
        """NMSE of the op under scheme `b` against the op under `a`."""
        op, unchanged = self.graph[record.op], self._without_noise(record)
        x = unchanged.op(record.step, op, a, "f64", record.rows).exact
        unchanged.keep_waists()
        y = self._recomputation.changed((), n_samples=0).op(record.step, op, b, "f64", record.rows).exact
        finite = x.isfinite() & y.isfinite()
        x, y = x[finite], y[finite]
        return _ratio(float((y - x).square().sum()), float(x.square().sum()))

    def _residual(self, record: OpRecord, op: Op, recorded: Tensor, made: Recomputed, scheme: Scheme) -> Residual:
        hidden = self._recorded.hidden(record.step, record.rows) if op.kind == "scores" else None
        residual = measure(recorded, made, hidden)
        passes = residual.excess <= 1 and residual.error <= made.margin * residual.noise
        if self._recomputation.has_noise and not passes and op.kind == "linear" and len(made.segment) == 1:
            x = self._recomputation.inputs(record.step, op, scheme, record.rows)[0].exact
            other_way = turned(op, x, recorded, made, arithmetic_of(op, scheme, self.weights).operands, self.weights)
            if other_way is not None:
                residual = replace(measure(recorded, replace(made, exact=other_way[0])), flips=other_way[1])
        return replace(residual, worst=_placed(residual.worst, record, op))


def _placed(worst: Worst, record: OpRecord, op: Op) -> Worst:
    """The coordinate in the whole output: of all its channels and of the step's tokens."""
    first = op.weights[0].first if op.kind == "linear" else 0
    return replace(worst, at=record.place((*worst.at[:-1], worst.at[-1] + first), record.rows))


def _parts(op: Op, shape: tuple[int, ...]) -> Iterator[slice | None]:
    """The channels of an op's output in parts, where it is large and made channel by channel; None for all of it."""
    whole = op.kind != "linear" or op.function or any(w.read for w in op.weights)
    if whole or len(shape) != 2 or math.prod(shape) <= _PART:
        yield None
        return
    n_tokens, n = shape
    step = max(1, _PART // n_tokens)
    yield from (slice(at, min(at + step, n)) for at in range(0, n, step))


def _what_is_left(local: Local) -> tuple[bool, bool, bool, int]:
    """Least first; in the schemes' order where two leave about as much."""
    lost = not math.isfinite(local.nmse)
    return local.blind, lost, local.faulty, 0 if lost else round(2 * math.log10(max(local.nmse, 1e-300)))


def _ratio(error: float, signal: float) -> float:
    if not signal:
        return 0.0 if not error else math.inf
    return error / signal
