"""The torch engine: runs a graph op by op, one slice of weights in memory at a time, and records each output."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tracediff.engine.recorder import Recorder
from tracediff.model.graph import SOURCES, Graph, Op
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import EXACT, Scheme
from tracediff.numerics.buffers import in_buffer
from tracediff.numerics.evaluate import arithmetic_of, evaluate
from tracediff.numerics.growing import Growing
from tracediff.numerics.kinds.attention import causal
from tracediff.numerics.views import seen, state


@dataclass(frozen=True, slots=True)
class StepInput:
    """Tokens of one forward pass and their positions in the sequence."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]


class TorchEngine:
    """A graph with its weights and a KV cache. One object runs one sequence."""

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        scheme: Scheme | None = None,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        self.graph = graph
        self.weights = weights
        self.logits = torch.empty(0)
        self._scheme = scheme
        self._progress = progress
        self._states = graph.states()
        self._cached = graph.cached() - self._states
        self._past = {name: Growing() for name in self._cached}
        self._handed: dict[str, Tensor] = {}  # by the step before
        # What a mistaken op reads of earlier steps, as it lies in a buffer.
        self._buffers = {
            name: in_buffer(()).to(weights.dtype) for op in graph for name, past in op.reads if past == "before"
        }
        self._n_positions = 0  # so far
        last_use = {name: op.name for op in graph for name in op.inputs}
        self._dead_after: dict[str, list[str]] = {}
        for name, op in last_use.items():
            self._dead_after.setdefault(op, []).append(name)

    @torch.inference_mode()
    def run(self, step: int, given: StepInput, recorder: Recorder) -> Tensor:
        """One forward pass: records every op of the step and returns the logits, [T, n_vocab]."""
        recorder.step(step, given.tokens, given.positions)
        past = (self._n_positions,) * len(given.tokens)
        values = {
            name: torch.tensor(ids, device=self.weights.device)
            for name, ids in zip(SOURCES, (given.tokens, given.positions, past), strict=True)
        }
        for name in self._cached & set(SOURCES):
            self._past[name].append(values[name])
        hidden = causal(values["positions"], self._past["positions"].rows) if "positions" in self._past else None
        self._n_positions += len(given.tokens)
        handed: dict[str, Tensor] = {}
        result, buffers = torch.empty(0), dict(self._buffers)
        for done, op in enumerate(self.graph, start=1):
            arithmetic = arithmetic_of(op, self._scheme, self.weights) if self._scheme else EXACT
            inputs = self._inputs(op, values, len(given.tokens))
            result = evaluate(op, [*inputs], self.weights, arithmetic)
            if op.kind != "state":  # the step before recorded it
                recorder.op(step, op.name, result, hidden if op.kind == "scores" else None)
            values[op.name] = result
            if op.name in self._cached:
                self._past[op.name].append(result)
            if op.name in buffers:
                buffers[op.name] = in_buffer((buffers[op.name], result))
            if op.name in self._states:
                handed[op.name] = result
            for name in self._dead_after.get(op.name, ()):
                values.pop(name, None)
            self._progress(done / len(self.graph.ops))
        self._handed, self._buffers = handed, buffers
        self.logits = result
        return result

    def record_weights(self, recorder: Recorder) -> None:
        """The norm weights as this engine holds them."""
        by_name = {weight.name: weight for weight in self.graph.norm_weights()}  # a fault may read one twice
        for weight in by_name.values():
            recorder.weight(weight.name, self.weights.load(weight))

    def _inputs(self, op: Op, values: dict[str, Tensor], n_tokens: int) -> Iterator[Tensor]:
        if op.kind == "state":
            parts = [self._handed[name] for name in op.inputs if name in self._handed]
            yield state(op, parts, self.weights.device, self.weights.dtype)
            return
        for (name, past), view in zip(op.reads, op.seen, strict=True):
            if past == "before":
                yield self._buffers[name]
                continue
            whole = self._past[name].rows if past else values[name]
            yield seen(view, n_tokens, self._n_positions, whole) if view else whole
