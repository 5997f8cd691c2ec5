"""Two engines replayed side by side from the embedding on, each op as one of them computes it, or the other.

What a side recorded of an op less what replay makes of the inputs that it had is that op's own error. Put back where it
was made, every record comes out again to the last digit, whether or not anybody knows where the error is from. So one
side's ops can be put into the other one kind at a time, and what the logits become of it is what that kind makes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tracediff.errors import MismatchError
from tracediff.model.graph import SOURCES, Graph, Op
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.buffers import in_buffer
from tracediff.numerics.evaluate import call_of, evaluate_together, noise, rounding
from tracediff.numerics.floats import HALVES
from tracediff.numerics.floors import UNIT, Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.attention import causal
from tracediff.numerics.kinds.kind import Call, Energy
from tracediff.numerics.views import seen, state
from tracediff.trace.format import Step
from tracediff.trace.reader import Trace

STORAGE = "storage"  # the group of what values are kept in, which is no op's
_ROUNDINGS = 2  # of a result in half precision, on the way to it and to the trace


class Way(NamedTuple):
    """How a side computes an op, and in which type it keeps the result."""

    op: Op
    arithmetic: Arithmetic
    storage: str


@dataclass(frozen=True, slots=True)
class Side:
    """One engine: its trace, each sequence in one pass, the weights that it holds, and its way of each op."""

    trace: Trace
    weights: Weights
    ways: Mapping[str, Way]

    def error(self, step: int, op: str, y: Tensor, kept: Tensor, hidden: Tensor | None) -> Tensor | None:
        """What it recorded less `y`, what replay makes; 0 where `y` as it is `kept` is what was recorded."""
        recorded = self.recorded(step, op, y)
        if recorded is None:
            return None
        error = torch.where(kept == recorded, 0.0, recorded - y)
        if hidden is not None:
            error = error.masked_fill(hidden, 0.0)
        if not bool(error.isfinite().all()):
            raise MismatchError(
                f"{self.trace.path}: {op} holds NaN or Inf, so no share of the gap can be told. `tracediff check` says "
                "which op makes them; without --model the gap alone is told."
            )
        return error

    def recorded(self, step: int, op: str, like: Tensor) -> Tensor | None:
        """Its values of the op, shaped as replay's; those of tokens that were not recorded are replay's."""
        record = self.trace.ops.get((step, op))
        if record is None or not record.has_data:
            return None
        values = torch.from_numpy(self.trace.values(record)).to(like.dtype)
        if record.rows is None:
            return values.reshape(like.shape)
        rows, shape = torch.tensor(record.rows), list(like.shape)
        shape[record.token_axis] = len(rows)
        return like.clone().index_copy_(record.token_axis, rows, values.reshape(shape))


@dataclass(slots=True)
class Lane:
    """A pass in which the ops of some groups are B's, and A's else; a `noisy` one errs as honest arithmetic may."""

    of_b: frozenset[str]
    noisy: bool = False
    values: dict[str, Tensor] = field(default_factory=dict)
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))


class Lanes:
    """The model's graph with two sides of it; `group` tells the kind of each op."""

    def __init__(self, graph: Graph, sides: tuple[Side, Side], group: Callable[[str], str]) -> None:
        self._graph = graph
        self._sides = sides
        self.group = group
        # Of each pass the steps of A and of B.
        self._passes = [*zip(*(side.trace.steps.values() for side in sides), strict=True)]
        # By side and op: `_excess` of the last run with noise, in the pass that shows least.
        self.erring: dict[tuple[int, str], float] = {}
        self._done_after = graph.done_after()

    def groups(self) -> list[str]:
        """All, in the order of the graph; that of what values are kept in last, where the sides differ in it."""
        found = list(dict.fromkeys(self.group(op.name) for op in self._graph))
        a, b = (side.ways for side in self._sides)
        return [*found, STORAGE] if any(a[name].storage != b[name].storage for name in a) else found

    @torch.inference_mode()
    def run(
        self, of_b: Sequence[Iterable[str]], noisy: bool = False, progress: Callable[[float], None] = lambda f: None
    ) -> list[Tensor]:
        """Logits [T, n_vocab] of A, of B, and of each mixture; with noise besides those of A and of B with noise."""
        everything = frozenset(self.groups())
        lanes = [Lane(frozenset()), Lane(everything), *(Lane(frozenset(names)) for names in of_b)]
        lanes += [Lane(lane.of_b, True) for lane in lanes[:2]] * noisy
        self.erring = {} if noisy else self.erring
        parts = []
        for done, steps in enumerate(self._passes):
            show = lambda fraction, done=done: progress((done + fraction) / len(self._passes))  # noqa: E731
            parts.append(self._pass(lanes, steps, show))
        return [torch.cat(of_lane) for of_lane in zip(*parts, strict=True)]

    def _pass(self, lanes: Sequence[Lane], steps: tuple[Step, Step], progress: Callable[[float], None]) -> list[Tensor]:
        given = steps[0].tokens, steps[0].positions, (0,) * len(steps[0].tokens)
        for lane in lanes:
            lane.values = {name: torch.tensor(ids) for name, ids in zip(SOURCES, given, strict=True)}
        results: list[Tensor] = []
        for done, op in enumerate(self._graph, start=1):
            results = self._op(op, lanes, (steps[0].step, steps[1].step))
            for lane, result in zip(lanes, results, strict=True):
                lane.values[op.name] = result
                for name in {*self._done_after.get(op.name, ())}.difference(SOURCES):
                    lane.values.pop(name, None)
            progress(done / len(self._graph.ops))
        return results

    def _op(self, op: Op, lanes: Sequence[Lane], steps: tuple[int, int]) -> list[Tensor]:
        """The op's value in each lane; that of what was chosen is the choice of the lane's side."""
        if op.kind == "state":  # before the first step
            return [state(op, [], "cpu") for _ in lanes]
        of_b = [self.group(op.name) in lane.of_b for lane in lanes]
        calls = [self._call(op, lane, side) for lane, side in zip(lanes, of_b, strict=True)]
        ys: dict[int, Tensor] = {}
        for alike in {id(call.op): call.op for call in calls}.values():
            places = [i for i, call in enumerate(calls) if call.op is alike]
            ys |= zip(places, evaluate_together([calls[i] for i in places]), strict=True)
        if KINDS[op.kind].picks:
            chosen = [side.recorded(steps[i], op.name, ys[i]) for i, side in enumerate(self._sides)]
            return [ys[i] if (c := chosen[side]) is None else c for i, side in enumerate(of_b)]
        storages = [self._sides[STORAGE in lane.of_b].ways[op.name].storage for lane in lanes]
        positions = lanes[0].values["positions"]
        hidden = causal(positions, positions) if op.kind == "scores" else None
        errors = [
            side.error(steps[i], op.name, ys[i], rounding(ys[i], storages[i]), hidden)
            for i, side in enumerate(self._sides)
        ]
        made = []
        for i, (lane, side, storage) in enumerate(zip(lanes, of_b, storages, strict=True)):
            error = errors[side]
            y = ys[i] if error is None else ys[i] + error
            made.append(rounding(y + self._noise(op, lane, calls[i], ys[i], error, storage), storage))
        return made

    def _call(self, op: Op, lane: Lane, side: bool) -> Call:
        way = self._sides[side].ways[op.name]
        energy = Energy() if lane.noisy else None
        return call_of(way.op, [*_inputs(op, lane)], self._sides[side].weights, way.arithmetic, energy)

    def _noise(self, op: Op, lane: Lane, call: Call, y: Tensor, error: Tensor | None, storage: str) -> Tensor | float:
        """What honest arithmetic adds in a noisy lane."""
        if call.energy is None:
            return 0.0
        wide = "f64" if storage == "f64" else "f32"
        honest = noise(op, call.inputs, y, call.weights, call.energy, call.arithmetic, wide)
        key = int(bool(lane.of_b)), op.name
        self.erring[key] = min(self.erring.get(key, math.inf), _excess(error, honest, y, storage))
        spread = torch.sqrt(honest.sigma**2 + honest.hard**2 / 3)
        return spread * torch.randn(y.shape, generator=lane.random, dtype=y.dtype)


def _inputs(op: Op, lane: Lane) -> Iterator[Tensor]:
    n = len(lane.values["tokens"])
    for (name, past), view in zip(op.reads, op.seen, strict=True):
        if past in ("earlier", "before"):  # there is one step
            yield in_buffer(()).to(torch.float64)
        else:
            yield seen(view, n, n, lane.values[name]) if view else lane.values[name]


def _excess(error: Tensor | None, honest: Noise, y: Tensor, storage: str) -> float:
    """The squared error of a side's op in units of the noise of honest arithmetic, in the median row: a rounding that
    went the other way is in a few rows, another weight in all.
    """
    if error is None:
        return 0.0
    kept = UNIT[storage] * _ROUNDINGS if storage in HALVES else 0.0
    noise = honest.sigma**2 + honest.hard**2 / 3 + (kept * y) ** 2
    rows = (x.reshape(len(y), -1).sum(1) for x in (error.square(), noise + torch.zeros_like(y)))
    return float(torch.div(*rows).nan_to_num(0.0).median())
