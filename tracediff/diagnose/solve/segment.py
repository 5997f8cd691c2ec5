"""What lies between two recorded values, as it should be, recomputed with other ops: where does the record come to?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.edit import Read
from tracediff.diagnose.solve.loops.arrays import CannotRunError
from tracediff.diagnose.solve.loops.bound import flat
from tracediff.diagnose.solve.problem import Problem, posed
from tracediff.model.graph import SOURCES, Axis, Op, Span
from tracediff.names import layer_of
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.evaluate import evaluate
from tracediff.numerics.nmse import nmse
from tracediff.numerics.views import seen
from tracediff.replay.look import Known
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_SHOWS = 0.01  # of the error of all tokens: where the first are off by less, they do not show the mistake
_SAME = 1e-20  # NMSE: what float64 makes of the same ops on fewer tokens


@dataclass(frozen=True, slots=True)
class Begun:
    """What is made of a segment's ops with others among them, before the op at a place."""

    at: int
    values: Mapping[str, Tensor]


class Segment:
    """The ops that are recomputed for a record, with the values that they should have under an arithmetic."""

    def __init__(self, replay: Replay, record: OpRecord, names: Sequence[str], scheme: Scheme) -> None:
        self.ops = [replay.graph[name] for name in names]
        self._replay, self._record, self._scheme = replay, record, scheme
        self._weights = replay.weights
        self._known = {name: replay.supposed(record, name, scheme) for name in names}
        self._end, self._left_out = record.op, 0
        self._judged: slice | Tensor = slice(None)  # tokens
        known = replay.known(record, scheme)
        self._recorded, self._bound = known.recorded, known.bound
        self.n_tokens = len(replay.trace.steps[record.step].tokens)
        self._n_before = replay.trace.n_before(record.step)

    @property
    def n_judged(self) -> int:
        """Tokens of which it is seen what they come to at the end."""
        return len(self._recorded)

    def at_a_glance(self, n: int) -> "Segment":
        """The same, of which no more than `n` tokens are judged, those that are off most."""
        if self.n_judged <= n or self._axes(self._end)[0] != "T":
            return self
        off = (self._known[self._end].exact - self._recorded).square().reshape(self.n_judged, -1).sum(1)
        part = copy(self)
        part._judged = off.topk(n).indices
        part._recorded = self._recorded[part._judged]
        return part

    def roughly(self) -> "Segment":
        """The same, multiplied in float32: half as much is read of a weight, and nothing is converted before."""
        rough = copy(self)
        rough._weights = self._weights.in_float32()
        return rough

    def beginning(self, n: int, off: float) -> "Segment":
        """The same of the first `n` tokens alone, where these see no others and are off as well: most mistakes show.

        Half of them are judged: what is read by mistake beyond a token lies in the next ones.
        """
        if self.n_tokens <= n or self._axes(self._end)[0] != "T":
            return self
        short = copy(self)
        short.n_tokens, short._left_out, short._known = n, self.n_tokens - n, {}
        short._judged = slice(n // 2)
        short._recorded = self._recorded[short._judged]
        for op in self.ops:
            known = self._known[op.name]
            if op.kind == "state":
                short._known[op.name] = known
                continue
            given = tuple(short._first(x, self._replay.graph.axes_read(op, i)) for i, x in enumerate(known.inputs))
            y, right = self._evaluated(op, given), short._first(known.exact, op.axes)
            if y.shape != right.shape or nmse(y, right) > _SAME:
                return self
            short._known[op.name] = Known(y, y, torch.zeros_like(y), given, known.arithmetic)
        return short if nmse(short._known[self._end].exact[short._judged], short._recorded) > _SHOWS * off else self

    def _first(self, x: Tensor, axes: Sequence[Axis]) -> Tensor:
        """A value without the tokens that are left out, the last ones: as queries and as keys."""
        for i, axis in enumerate(axes):
            if axis in ("T", "S"):
                x = x.narrow(i, 0, x.shape[i] - self._left_out)
        return x

    def told(self) -> Iterator[Problem]:
        """Ops whose values the record tells, for all that follows adds to or scales them: as if these had been
        recorded.
        """
        error = np.nan_to_num(flat(self._recorded - self._known[self._end].exact), nan=0.0)  # of infinite values alike
        for op in reversed(self.ops):
            if share := self._share(op):
                problem = self.problem(op)
                recorded, bound = problem.exact + error / share, flat(self._bound) / abs(share)
                yield replace(problem, recorded=recorded, bound=bound, is_told=True)

    def tells(self, op: Op) -> bool:
        """Whether the end tells what the op made: it is the op's, or the op's output is added or scaled once to make
        it.
        """
        return self._share(op) != 0

    def _share(self, op: Op) -> float:
        """What the end errs by where the op's output errs by 1; 0 where the end does not tell."""
        if op.name == self._end:
            return 1.0
        readers = [other for other in self.ops if op.name in other.inputs]
        if len(readers) != 1 or readers[0].inputs.count(op.name) != 1 or readers[0].axes != op.axes or readers[0].views:
            return 0.0
        factors = {"add": 1.0, "scale": readers[0].attrs.get("scale", 0.0)}
        return factors.get(readers[0].kind, 0.0) * self._share(readers[0])

    def _axes(self, name: str) -> Sequence[Axis]:
        graph = self._replay.graph
        return graph[name].axes if name in graph else ("T",) if name in SOURCES else ()

    def _seen(self, op: Op, i: int, value: Tensor, n_tokens: int) -> Tensor:
        """The value of an input, of so many tokens, as the op sees it."""
        view = op.seen[i]
        return seen(view, n_tokens, self._n_before + n_tokens, value) if view else value

    def left(self, changed: Mapping[str, Op]) -> float:
        """NMSE of what is made at the end with these ops."""
        return self.lefts([self.begun(changed)])[0]

    def lefts(self, begun: Sequence[Begun]) -> list[float]:
        """NMSE of what each comes to at the end; they begin the end at one place."""
        return [nmse(y, self._recorded) for y in self._ended(begun).split(self.n_judged)]

    def residual(self, changed: Mapping[str, Op], made: Mapping[str, Tensor] = MappingProxyType({})) -> np.ndarray:
        """What is left of each recorded value then, as a share of their RMS; of some ops it is known what they make."""
        left = flat(self._recorded - self._ended([self.begun(changed, made)]).reshape(self._recorded.shape))
        return np.nan_to_num(left / float(self._recorded.square().mean().sqrt()), nan=math.inf)

    def begun(self, changed: Mapping[str, Op], made: Mapping[str, Tensor] = MappingProxyType({})) -> Begun:
        """What these ops make, and what follows up to where a token's values follow from its own alone."""
        last = max((i for i, op in enumerate(self.ops) if op.name in changed or op.name in made), default=-1)
        at, values = max(last + 1, self._apart), dict(made)
        for right in self.ops[:at]:
            is_after = right.kind != "state" and any(name in values for name in right.inputs)  # it is of earlier steps
            if right.name not in made and (right.name in changed or is_after):
                values[right.name] = self.made(changed.get(right.name, right), values)
        return Begun(at, values)

    def _ended(self, begun: Sequence[Begun]) -> Tensor:
        """What each comes to at the end, one after the other along the tokens: each weight is read once for all."""
        rest, n = self.ops[begun[0].at :], self.n_judged * len(begun)
        passed = {name for one in begun for name in one.values} & {self._end, *(x for op in rest for x in op.inputs)}
        values = {
            name: torch.cat([one.values.get(name, self._known[name].exact)[self._judged] for one in begun])
            for name in passed
        }
        for op in rest:
            if any(name in values for name in op.inputs):
                right = enumerate(zip(op.inputs, self._known[op.name].inputs, strict=True))
                given = [
                    self._seen(op, i, values[name], n) if name in values else torch.cat([x[self._judged]] * len(begun))
                    for i, (name, x) in right
                ]
                values[op.name] = self._evaluated(op, given)
        if self._end not in values:  # what is left for the next step makes nothing of this one
            return torch.cat([self._known[self._end].exact[self._judged]] * len(begun))
        return values[self._end]

    @cached_property
    def _apart(self) -> int:
        """The op from which on a token's values follow from its own alone."""
        mixed = (i for i, op in enumerate(self.ops) if not self._replay.graph.is_by_rows(op))
        return max(mixed, default=-1) + 1

    def moved(self, op: Op, y: Tensor) -> float:
        """NMSE of what is made of an op against what it should be."""
        return nmse(y, self._known[op.name].exact)

    def made(self, op: Op, values: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        """What an op makes, of these values and of the right ones."""
        known, given = self._known[op.name], list[Tensor]()
        for i, (name, past) in enumerate(op.reads):
            if i >= len(known.inputs):
                given.append(values[name] if name in values and not past else self._held(name, past))
            elif name not in values or past == "before":
                given.append(known.inputs[i])
            else:
                value = values[name]
                if past:
                    so_far = self._value(name, past) if op.seen[i] else known.inputs[i]
                    value = torch.cat((so_far[: -len(value)], value))
                given.append(self._seen(op, i, value, self.n_tokens))
        return self._evaluated(op, given)

    def _evaluated(self, op: Op, given: Sequence[Tensor]) -> Tensor:
        """What it makes under the arithmetic of the right op."""
        return evaluate(op, given, self._weights, self._known[op.name].arithmetic).double()

    def _held(self, name: str, past: Span) -> Tensor:
        if past is False and name in self._known:
            return self._known[name].exact.flatten()
        return self._value(name, past).flatten()

    def _value(self, name: str, past: Span) -> Tensor:
        if name not in self._replay.graph and name not in SOURCES:
            raise CannotRunError(name)
        values = self._replay.read(self._record, name, past, self._scheme)
        return values if past == "before" else self._first(values, self._axes(name))

    def problem(self, op: Op) -> Problem:
        """The op as it should be, to be edited."""
        replay = self._replay

        def held(read: Read) -> np.ndarray | None:
            try:
                return flat(self._held(read.name, read.past))
            except CannotRunError:
                return None

        at_hand = {name for step, name in replay.trace.ops if step == self._record.step} | self._known.keys()
        before = (layer_of(op.name) or 0) - 1  # whose buffers this layer may use
        names = [other.name for other in replay.graph if other.name in at_hand or layer_of(other.name) == before]
        return posed(op, replay.graph, replay.weights, self._known[op.name], held, names)
