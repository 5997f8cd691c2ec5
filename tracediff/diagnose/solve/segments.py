"""A mistake in an op of a segment: what lies between two recorded values was not recorded, so what follows the op is
recomputed with it.

An edit of a kernel shows wherever the kernel runs: of several ops of a kind it is tried in all, then in each alone.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.shapes import nmse
from tracediff.diagnose.solve import copies, formulas, inputs, numbers, tensors
from tracediff.diagnose.solve.arrays import CannotRunError, Flat
from tracediff.diagnose.solve.bound import bind, flat
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.search import Solved, words_of
from tracediff.diagnose.solve.variant import SOURCES, Priced, Read, Variant
from tracediff.model.graph import Op, Past
from tracediff.names import split
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.evaluate import arithmetic_of, evaluate
from tracediff.replay.look import Known
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_LEFT = 1e-4  # of the error: what leaves more is not looked at closely
_SAME = 1e-12  # NMSE: an edit that moves less changes nothing
_FIRST, _SHOWS = 4, 0.01  # tokens that are looked at first, where they are off by that share
_OF_TOKENS = re.compile(r"\b(?:T|S|P|queries|keys)\b")  # numbers that are others for fewer tokens
_WORK = 1 << 25  # values of weights times tokens: in larger segments a thousand passes take minutes


class Segment:
    """The ops that are recomputed for a record, with the values that they should have under an arithmetic."""

    def __init__(self, replay: Replay, record: OpRecord, names: Sequence[str], scheme: Scheme) -> None:
        self.ops = [replay.graph[name] for name in names]
        self._replay, self._step, self._scheme = replay, record.step, scheme
        self._known = {name: replay.supposed(record, name, scheme) for name in names}
        self._end, self._n_tokens = record.op, len(replay.trace.steps[record.step].tokens)
        self._recorded = replay.known(record, scheme).recorded

    def beginning(self, n: int, off: float) -> "Segment":
        """The same of the first tokens alone, which see no others, where these are off as well: most mistakes show."""
        graph = self._replay.graph
        names = {name for op in self.ops for name in (op.name, *op.inputs)}
        of_heads = any(graph[name].axes[0] != "T" for name in names if name in graph)  # tokens are the second axis
        longer = any(len(x) > self._n_tokens for known in self._known.values() for x in known.inputs)
        if self._n_tokens <= n or of_heads or longer:
            return self
        short = copy(self)
        short._n_tokens, short._recorded, short._known = n, self._recorded[:n], {}
        for op in self.ops:
            known, weights = self._known[op.name], self._replay.weights
            pairs = zip(op.inputs, known.inputs, strict=False)
            given = tuple(short._known[name].exact if name in short._known else x[:n] for name, x in pairs)
            y = evaluate(op, given, weights, known.arithmetic)
            short._known[op.name] = Known(y, y, torch.zeros_like(y), given, known.arithmetic)
        return short if nmse(short._known[self._end].exact, short._recorded) > _SHOWS * off else self

    def left(self, changed: Mapping[str, Op], made: Mapping[str, Tensor] = MappingProxyType({})) -> float:
        """NMSE of what is made at the end with these ops; of some of them it is known what they make."""
        values = dict(made)
        for right in self.ops:
            if right.name not in made and (right.name in changed or any(name in values for name in right.inputs)):
                values[right.name] = self.made(changed.get(right.name, right), values)
        return nmse(values[self._end], self._recorded) if self._end in values else math.inf

    def moved(self, op: Op, y: Tensor) -> float:
        """NMSE of what is made of an op against what it should be."""
        return nmse(y, self._known[op.name].exact)

    def made(self, op: Op, values: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
        """What an op makes, of these values and of the right ones."""
        known, given = self._known[op.name], list[Tensor]()
        for i, (name, past) in enumerate(op.reads):
            if i >= len(known.inputs):
                given.append(values[name] if name in values and not past else self._held(name, past))
            elif name in values and past:
                given.append(torch.cat((known.inputs[i][: -len(values[name])], values[name])))
            else:
                given.append(values.get(name, known.inputs[i]))
        weights = self._replay.weights
        right = self._replay.graph[op.name]
        return evaluate(op, given, weights, arithmetic_of(right, self._scheme, weights))

    def _held(self, name: str, past: Past) -> Tensor:
        if past is False and name in self._known:
            return self._known[name].exact
        values = self._replay.held(self._step, name, past)
        if values is None:
            raise CannotRunError(name)
        n_tokens = len(self._replay.trace.steps[self._step].tokens)
        return values if self._n_tokens == n_tokens else values[: len(values) // n_tokens * self._n_tokens]

    def problem(self, op: Op) -> Problem | None:
        """The op as it should be, to be edited; None where it has no loops."""
        replay, known = self._replay, self._known[op.name]

        def held(read: Read) -> np.ndarray | None:
            try:
                return flat(self._held(read.name, read.past))
            except CannotRunError:
                return None

        brought = {name: Flat(values) for name, read in SOURCES.items() if (values := held(read)) is not None}
        loops = bind(op, known.inputs, replay.weights, known.arithmetic, brought)
        if loops is None:
            return None
        at_hand = {name for step, name in replay.trace.ops if step == self._step} | self._known.keys()
        names = [other.name for other in replay.graph if other.name in at_hand]
        y = flat(known.exact)
        return Problem(
            op, replay.graph, replay.weights, known.arithmetic, loops, y, y, 0 * y, held,
            names, names[: names.index(op.name)],
        )  # fmt: skip


def explanations(
    replay: Replay, record: OpRecord, names: Sequence[str], off: float, check: Callable[[], None]
) -> Iterator[tuple[Solved, Scheme | None]]:
    """What in one op of the segment, or in all of one kind, gives the record; nothing was verified to the floor.

    `off` is the record's NMSE under the right ops; `check` raises where the time is over.
    """
    if not _can_be_tried(replay, record, names) or not math.isfinite(off):
        return
    for scheme in replay.plain_ones(record):
        segment = Segment(replay, record, names, scheme or replay.choice(record).schemes[0])
        short = segment.beginning(_FIRST, off)
        problems = [problem for op in segment.ops if (problem := segment.problem(op))]
        kinds: set[str] = set()
        for problem in problems:
            kin = [p for p in problems if p.op.kind == problem.op.kind]
            groups = [kin, [problem]] if len(kin) > 1 and problem.op.kind not in kinds else [[problem]]
            kinds.add(problem.op.kind)
            for group in groups:
                yield from ((one, scheme) for one in _found(segment, short, group, off, check))


def _can_be_tried(replay: Replay, record: OpRecord, names: Sequence[str]) -> bool:
    ops = [replay.graph[name] for name in names]
    weights = sum(math.prod(weight.shape) for op in ops for weight in op.weights)
    in_time = weights * len(replay.trace.steps[record.step].tokens) <= _WORK
    return record.rows is None and in_time and not any(any(op.views) or op.kind == "state" for op in ops)


def _found(
    whole: Segment, short: Segment, group: Sequence[Problem], off: float, check: Callable[[], None]
) -> list[Solved]:
    """The edits of one op, or those of the first of several made in all of them, that give what was recorded.

    What does not count tokens is tried on the first of them.
    """
    first, found, seen = group[0], list[Solved](), set[float]()
    counted = _OF_TOKENS.findall(ast.unparse(ast.parse(first.loops.source)))
    for priced in _alike(first) if len(group) > 1 else _alone(first, whole):
        check()
        segment = short if _OF_TOKENS.findall(priced.variant.source) == counted else whole
        ops = tuple(op for problem in group if (op := _edited(problem, priced.variant)))
        made = {}
        try:
            if len(group) == 1:
                made = {first.op.name: segment.made(ops[0])}
                moved = segment.moved(first.op, made[first.op.name])
                if moved <= _SAME or moved in seen:
                    continue
                seen.add(moved)
            if segment.left({op.name: op for op in ops}, made) <= _LEFT * off:
                places = ", ".join(dict.fromkeys(split(op.name)[1] for op in ops))
                words = f"{places}: {words_of(first, priced.variant)}"
                found.append(Solved(ops, words, priced.bits, priced.look, priced.fitted))
        except CannotRunError:
            continue
    return sorted(found, key=lambda one: one.bits)


def _alike(problem: Problem) -> Iterator[Priced]:
    """Edits of a kernel, and positions, which several ops are told alike."""
    yield from numbers.positions(problem)
    yield from formulas.variants(problem)


def _alone(problem: Problem, segment: Segment) -> Iterator[Priced]:
    """Edits of one op. Where there are others of its kind, what is wrong in it alone is what it is called with."""
    yield from copies.variants(problem)
    yield from inputs.variants(problem)
    yield from inputs.cached(problem)
    yield from tensors.variants(problem)
    yield from numbers.positions(problem)
    several = sum(op.kind == problem.op.kind for op in segment.ops) > 1
    yield from (one for one in formulas.variants(problem) if one.variant.renamed or not several)


def _edited(problem: Problem, variant: Variant) -> Op | None:
    """The op with an edit of its kind; None where it has no bias and the edit is of that."""
    source = variant.source
    if "b[" in source and "b" not in problem.loops.arrays:
        source = source.replace(" + b[o]", "")
        if "b[" in source:
            return None
    return replace(variant, source=source).op(problem.op, problem.loops.loops)
