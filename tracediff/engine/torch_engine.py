"""The torch engine: runs a graph op by op, one slice of weights in memory at a time, and records each output."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tracediff.engine.recorder import TensorWriter
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
    sequences: tuple[int, ...] | None = None  # of each token, those of one side by side; None where there is one

    def parts(self) -> dict[int, slice]:
        """Where the tokens of each sequence are."""
        found: dict[int, slice] = {}
        for at, sequence in enumerate(self.sequences or (0,) * len(self.tokens)):
            found[sequence] = slice(found[sequence].start if sequence in found else at, at + 1)
        return found


class Cache:
    """What is kept of one sequence from step to step."""

    def __init__(self, graph: Graph, cached: Iterable[str], dtype: torch.dtype) -> None:
        self.past = {name: Growing() for name in cached}
        self.handed: dict[str, Tensor] = {}  # by the step before
        # What a mistaken op reads of earlier steps, as it lies in a buffer.
        self.buffers = {name: in_buffer(()).to(dtype) for op in graph for name, past in op.reads if past == "before"}
        self.n_positions = 0  # so far


class TorchEngine:
    """A graph with its weights and a KV cache for each sequence.

    Of a step of several sequences each op is computed at once for the rows of all, but those that look at other tokens
    or at the cache: these are computed for one sequence after the other, as serving engines batch.
    """

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
        self.caches: dict[int, Cache] = {}
        self._scheme = scheme
        self._progress = progress
        self._states = graph.states()
        self._cached = graph.cached() - self._states
        self._done_after = graph.done_after()

    @torch.inference_mode()
    def run(self, step: int, given: StepInput, recorder: TensorWriter | None = None) -> Tensor:
        """One forward pass: records every op of the step and returns the logits, [T, n_vocab]."""
        if recorder:
            recorder.step(step, given.tokens, given.positions, given.sequences)
        parts = given.parts()
        values = {name: dict[int, Tensor]() for name in SOURCES}
        for sequence, at in parts.items():
            self._begin(sequence, given.tokens[at], given.positions[at], values)
        hidden = {sequence: self._hidden(sequence, values) for sequence in parts}
        handed: dict[int, dict[str, Tensor]] = {sequence: {} for sequence in parts}
        buffers = {sequence: dict(self.caches[sequence].buffers) for sequence in parts}
        for done, op in enumerate(self.graph, start=1):
            result = self._evaluated(op, values, parts)
            if recorder and op.kind != "state":  # the step before recorded it
                recorder.parts(step, op.name, result, hidden if op.kind == "scores" else dict.fromkeys(parts))
            values[op.name] = result
            for sequence, part in result.items():
                if op.name in self._cached:
                    self.caches[sequence].past[op.name].append(part)
                if op.name in buffers[sequence]:
                    buffers[sequence][op.name] = in_buffer((buffers[sequence][op.name], part))
                if op.name in self._states:
                    handed[sequence][op.name] = part
            for name in self._done_after.get(op.name, ()):
                values.pop(name, None)
            self._progress(done / len(self.graph.ops))
        for sequence in parts:
            self.caches[sequence].handed, self.caches[sequence].buffers = handed[sequence], buffers[sequence]
        self.logits = torch.cat([*result.values()])
        return self.logits

    def record_weights(self, recorder: TensorWriter) -> None:
        """The norm weights as this engine holds them."""
        by_name = {weight.name: weight for weight in self.graph.norm_weights()}  # a fault may read one twice
        for weight in by_name.values():
            recorder.weight(weight.name, self.weights.load(weight))

    def _begin(
        self, sequence: int, tokens: tuple[int, ...], positions: tuple[int, ...], values: dict[str, dict[int, Tensor]]
    ) -> None:
        """A sequence's tokens of this step, and room for what is kept of it."""
        if sequence not in self.caches:
            self.caches[sequence] = Cache(self.graph, self._cached, self.weights.dtype)
        cache = self.caches[sequence]
        given = tokens, positions, (cache.n_positions,) * len(tokens)
        for name, ids in zip(SOURCES, given, strict=True):
            values[name][sequence] = torch.tensor(ids, device=self.weights.device)
            if name in self._cached:
                cache.past[name].append(values[name][sequence])
        cache.n_positions += len(tokens)

    def _hidden(self, sequence: int, values: dict[str, dict[int, Tensor]]) -> Tensor | None:
        past = self.caches[sequence].past
        return causal(values["positions"][sequence], past["positions"].rows) if "positions" in past else None

    def _evaluated(self, op: Op, values: dict[str, dict[int, Tensor]], parts: Mapping[int, slice]) -> dict[int, Tensor]:
        """The op's output for the tokens of each sequence."""
        arithmetic = arithmetic_of(op, self._scheme, self.weights) if self._scheme else EXACT
        if len(parts) > 1 and self._by_rows(op):
            inputs = [torch.cat([*values[name].values()]) for name in op.inputs]
            whole = evaluate(op, inputs, self.weights, arithmetic)
            return {sequence: whole[at] for sequence, at in parts.items()}
        return {
            sequence: evaluate(op, [*self._inputs(op, values, sequence, at.stop - at.start)], self.weights, arithmetic)
            for sequence, at in parts.items()
        }

    def _by_rows(self, op: Op) -> bool:
        """Whether each token's row of it is made of that token's rows alone."""
        changed = op.function or op.rework  # by a mistake, which may look anywhere
        return self.graph.is_by_rows(op) and not any(op.views) and not changed

    def _inputs(self, op: Op, values: dict[str, dict[int, Tensor]], sequence: int, n_tokens: int) -> Iterator[Tensor]:
        cache = self.caches[sequence]
        if op.kind == "state":
            parts = [cache.handed[name] for name in op.inputs if name in cache.handed]
            yield state(op, parts, self.weights.device, self.weights.dtype)
            return
        for (name, past), view in zip(op.reads, op.seen, strict=True):
            if past == "before":
                yield cache.buffers[name]
                continue
            if past == "earlier":
                whole = cache.past[name].first(cache.n_positions - n_tokens)
            else:
                whole = cache.past[name].rows if past else values[name][sequence]
            yield seen(view, n_tokens, cache.n_positions, whole) if view else whole
