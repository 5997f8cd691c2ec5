"""A mistake in an op of a segment: what lies between two recorded values was not recorded, so what follows the op is
recomputed with it.

An edit of a kernel shows wherever the kernel runs: of several ops of a kind it is tried in all, then in each alone. The
numbers of an edit are fitted to what comes out at the end.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import TypeVar

import numpy as np
import torch

from tracediff.diagnose.solve.by_value import functions, groups, operands, outputs
from tracediff.diagnose.solve.edit import Edit, Priced, Solved
from tracediff.diagnose.solve.edits import copies, formulas, inputs, numbers, tensors, terms
from tracediff.diagnose.solve.loops.arrays import CannotRunError
from tracediff.diagnose.solve.loops.bound import Bound
from tracediff.diagnose.solve.loops.program import parse
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.search import solve, words_of
from tracediff.diagnose.solve.segment import Begun, Segment
from tracediff.diagnose.solve.words.nouns import COUNTS_TOKENS
from tracediff.model.graph import Op
from tracediff.names import local_name
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.kinds import KINDS
from tracediff.replay.fitting import ROUGH
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_LEFT = 1e-4  # of the error: what leaves more is not looked at closely
_SAME = 1e-12  # NMSE: an edit that moves less changes nothing
_FIRST = 4  # tokens that are looked at first
_TOGETHER = 128  # tokens of several edits that go through what follows at a time
_OF_TOKENS = re.compile(rf"\b(?:{'|'.join(COUNTS_TOKENS)})\b")


Named = TypeVar("Named")
Explanations = Iterator[tuple[Solved, Scheme | None]]  # nothing was verified to the floor


def told(replay: Replay, record: OpRecord, names: Sequence[str], check: Callable[[], None]) -> Explanations:
    """What in an op of the segment to which the rest only adds gives the record: it is solved for, which takes
    seconds. `check` raises where the time is over.
    """
    for segment, scheme in _segments(replay, record, names):
        for problem in segment.told():
            yield from _placed(solve(problem, check), scheme)


def searched(
    replay: Replay,
    record: OpRecord,
    names: Sequence[str],
    off: float,
    check: Callable[[], None],
    how: "How",
) -> Explanations:
    """What in any op of the segment gives the record: what it is called with (`SegmentSearch.called`), some hundred
    edits, or how it is computed, thousands, which of a large layer takes minutes. `off` is the record's NMSE under the
    right ops.
    """
    for segment, scheme in _segments(replay, record, names) if math.isfinite(off) else ():
        yield from _placed(how(SegmentSearch(segment, off, check)), scheme)


def _segments(replay: Replay, record: OpRecord, names: Sequence[str]) -> Iterator[tuple[Segment, Scheme | None]]:
    """The segment under each arithmetic; none where some tokens were not recorded."""
    for scheme in replay.plain_ones(record) if record.rows is None else ():
        yield Segment(replay, record, names, replay.scheme(record, scheme)), scheme


def _placed(found: Iterator[Solved], scheme: Scheme | None) -> Explanations:
    for one in found:
        places = ", ".join(dict.fromkeys(local_name(op.name) for op in one.ops))
        yield replace(one, words=f"{places}: {one.words}"), scheme


@dataclass(frozen=True, slots=True)
class _Tried:
    """An edit of some ops."""

    ops: tuple[Op, ...]
    priced: Priced
    same: list[tuple[tuple[Op, ...], Priced]] = field(default_factory=list)  # others that come to what it does here

    def solved(self, problem: Problem) -> Iterator[Solved]:
        """The edit, and those that come to the same."""
        for ops, priced in ((self.ops, self.priced), *self.same):
            if (words := words_of(problem, priced.edit)) is not None:
                yield Solved(ops, words, priced.bits, priced.look, priced.fitted)


class SegmentSearch:
    """Looks for an edit of a segment's ops that gives what was recorded; ops that its end tells were solved for."""

    def __init__(self, segment: Segment, off: float, check: Callable[[], None]) -> None:
        whole, short = segment.at_a_glance(_FIRST), segment.beginning(_FIRST, off)
        self._whole, self._short = (one.roughly() if off > ROUGH else one for one in (whole, short))
        self._off, self._check = off, check
        problems = [self._whole.problem(op) for op in segment.ops if op.kind != "state" and not KINDS[op.kind].picks]
        self._problems = [problem for problem in problems if problem.has_loops]
        hidden = [problem for problem in reversed(problems) if not segment.tells(problem.op)]
        self._hidden = {problem.op.name: problem for problem in hidden if problem.has_loops}
        self._all_hidden = hidden
        self._waiting: list[tuple[list[Problem], list[Priced]]] = []

    def called(self) -> Iterator[Solved]:
        """What an op is called with, and what is done to its values, of each lot the cheapest first. The later an op,
        the less follows it, the sooner it is tried.
        """
        for problem in self._hidden.values():
            yield from self._near(operands.cached(problem), self._whole)
            if self._whole.ops[-1].kind == "weighted_values":
                end = _End(self._whole, problem, self._check)
                yield from self._near(groups.behind(problem, end.of_tokens), self._whole)
        for problem in self._hidden.values():
            yield from self._tried([problem], _passed(problem))
        for group in self._reading_alike():
            yield from self._tried(group, inputs.variants(group[-1]))
        for problem in self._all_hidden:
            yield from self._near(functions.usual(problem), self._short)

    def _reading_alike(self) -> Iterator[list[Problem]]:
        """Ops of one kind that read the same values, which are passed the same buffer: all of them, and any two."""
        groups: dict[tuple[str, tuple[str, ...]], list[Problem]] = {}
        for problem in reversed(self._hidden.values()):
            groups.setdefault((problem.op.kind, problem.op.inputs), []).append(problem)
        for group in groups.values():
            yield from ([*pair] for pair in combinations(group, 2))
            if len(group) > 2:
                yield group

    def computed(self) -> Iterator[Solved]:
        """How ops are computed: edits of a kernel without numbers, then those whose numbers are fitted, and one
        call of a kernel that computes otherwise than its others; then weights that nobody would pass, and loops whose
        turns have to be run one after the other.
        """
        yield from self._of_kernels()
        for problem in self._hidden.values():
            yield from self.of_numbers(problem)
            yield from self._of_call(problem, renamed=False)
        for problem in self._hidden.values():
            yield from self._tried([problem], tensors.unrelated(problem))
        for group, variants in self._waiting:
            yield from self._tried(group, iter(variants))

    def _of_kernels(self) -> Iterator[Solved]:
        """Edits of a kernel, made wherever it runs, and of one op where others' names stand in it."""
        for kind in dict.fromkeys(problem.op.kind for problem in reversed(self._problems)):
            kin = self._of_kind(kind)
            hidden = [problem for problem in reversed(kin) if problem.op.name in self._hidden]
            if hidden:
                yield from self._tried(kin, self._at_once(kin, _alike(hidden[0])))
            for problem in hidden:
                yield from self._of_call(problem, renamed=True)

    def _of_call(self, problem: Problem, renamed: bool) -> Iterator[Solved]:
        """Edits of one call of a kernel that several ops have: where others' names stand in it, or the rest."""
        if len(self._of_kind(problem.op.kind)) > 1:
            edits = (one for one in formulas.variants(problem) if bool(one.edit.renamed) == renamed)
            yield from self._tried([problem], self._at_once([problem], edits))

    def _of_kind(self, kind: str) -> list[Problem]:
        return [problem for problem in self._problems if problem.op.kind == kind]

    def _at_once(self, group: list[Problem], variants: Iterator[Priced]) -> Iterator[Priced]:
        """Those whose loops run at once. Where turns read what others stored they are interpreted one by one, which
        takes ten times as long: these wait.
        """
        waiting = list[Priced]()
        self._waiting.append((group, waiting))
        for one in variants:
            if parse(one.edit.source).in_sequence:
                waiting.append(one)
            else:
                yield one

    def _tried(self, group: Sequence[Problem], variants: Iterator[Priced]) -> list[Solved]:
        """The edits of one op, or those of the first of several made in all of them, that give what was recorded.

        What does not count tokens is tried on the first of them.
        """
        found = [*self._fitting(self._begun(group, variants))]  # all, for of each others come to the same
        return sorted(chain.from_iterable(one.solved(group[0]) for one in found), key=lambda one: one.bits)

    def _begun(self, group: Sequence[Problem], variants: Iterator[Priced]) -> Iterator[tuple[Segment, Begun, _Tried]]:
        """The edits that move something and come to the same as none before, each as far as it must be computed alone.

        Of several ops the one of which most numbers differ, and the smallest of such, tells which edits do.
        """
        seen, counted = dict[float, _Tried](), _counting(group[0].loops.source)
        telling = max(group, key=lambda problem: (len({*problem.loops.numbers.values()}), -problem.exact.size))
        for priced in variants:
            self._check()
            moved = math.nan
            segment = self._short if _counting(priced.edit.source) == counted else self._whole
            ops = {problem.op.name: op for problem in group if (op := _edited(problem, priced.edit))}
            made = {}
            try:
                if op := ops.get(telling.op.name):
                    made = {op.name: segment.made(op)}
                    moved = segment.moved(telling.op, made[op.name])
                    if moved <= _SAME:
                        continue
                    if moved in seen:
                        seen[moved].same.append((tuple(ops.values()), priced))
                        continue
                begun = segment.begun(ops, made if len(group) == 1 else {})
            except CannotRunError:
                continue
            seen[moved] = _Tried(tuple(ops.values()), priced)
            yield segment, begun, seen[moved]

    def _fitting(self, begun: Iterable[tuple[Segment, Begun, Named]]) -> Iterator[Named]:
        """Those that leave next to nothing, in the end of the segment that each is computed in; what follows them is
        computed for many together.
        """
        waiting: dict[tuple[Segment, int], list[tuple[Begun, Named]]] = {}
        for segment, one, name in begun:
            lot = waiting.setdefault((segment, one.at), [])
            lot.append((one, name))
            if len(lot) * segment.n_judged >= _TOGETHER:
                yield from self._of_lot(segment, waiting.pop((segment, one.at)))
        for (segment, _), lot in waiting.items():
            yield from self._of_lot(segment, lot)

    def _of_lot(self, segment: Segment, lot: Sequence[tuple[Begun, Named]]) -> Iterator[Named]:
        lefts = segment.lefts([one for one, _ in lot])
        return (name for (_, name), left in zip(lot, lefts, strict=True) if left <= _LEFT * self._off)

    def of_numbers(self, problem: Problem) -> list[Solved]:
        """Edits of an op whose numbers are fitted to what comes out at the end, and maps of its values."""
        short = self._short.problem(problem.op)
        end = _End(self._short, short, self._check)
        found = self._tried(
            [problem],
            chain(
                numbers.variants(short, end.of_loops),
                numbers.constants(short, end.of_loops),
                terms.counted(short, end.left),
            ),
        )
        others = chain(outputs.usual(problem), operands.usual(problem), functions.fitted(short, end.of))
        return sorted([*found, *self._near(others, self._short)], key=lambda one: one.bits)

    def _near(self, found: Iterator[Solved], segment: Segment) -> list[Solved]:
        """Those that leave next to nothing of a segment, the cheapest first."""

        def begun() -> Iterator[tuple[Segment, Begun, Solved]]:
            for one in found:
                self._check()
                yield segment, segment.begun({op.name: op for op in one.ops}), one

        return sorted(self._fitting(begun()), key=lambda one: one.bits)


How = Callable[[SegmentSearch], Iterator[Solved]]


@dataclass(frozen=True)
class _End:
    """What comes out at the end of a segment where an op is another."""

    segment: Segment
    problem: Problem
    check: Callable[[], None]

    def of(self, op: Op) -> np.ndarray:
        """What the op leaves of the recorded values, as a share of their size."""
        self.check()
        return self.segment.residual({op.name: op})

    def of_tokens(self, op: Op) -> np.ndarray:
        """The same by token, [T, n]."""
        return self.of(op).reshape(self.segment.n_judged, -1)

    def of_loops(self, loops: Bound) -> np.ndarray:
        """The same of loops."""
        self.check()
        made = torch.from_numpy(loops.output()).to(self.problem.weights.device)
        return self.segment.residual({}, {self.problem.op.name: made})

    def left(self, edit: Edit) -> float:
        """NMSE."""
        op = self.problem.edited(edit)
        return self.segment.left({op.name: op})


def _counting(source: str) -> list[str]:
    """The numbers in loops, in their order, that are others for fewer tokens."""
    return _OF_TOKENS.findall(source)


def _alike(problem: Problem) -> Iterator[Priced]:
    """Edits of a kernel, and positions, which several ops are told alike."""
    yield from numbers.positions(problem)
    yield from formulas.variants(problem)


def _passed(problem: Problem) -> Iterator[Priced]:
    """Edits of what an op is called with: buffers, weights, positions."""
    yield from copies.variants(problem)
    yield from inputs.variants(problem)
    yield from inputs.cached(problem)
    yield from tensors.related(problem)
    yield from numbers.positions(problem)


def _edited(problem: Problem, edit: Edit) -> Op | None:
    """The op with an edit of its kind; None where it has no bias and the edit is of that, or where it would read what
    is computed after it.
    """
    source = edit.source
    if any(read.when == "now" and read.name not in problem.earlier for _, read in edit.arrays):
        return None
    if "b[" in source and "b" not in problem.loops.arrays:
        source = source.replace(" + b[o]", "")
        if "b[" in source:
            return None
    return problem.edited(replace(edit, source=source))
