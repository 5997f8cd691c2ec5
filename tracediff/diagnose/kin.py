"""Faulty records of one kind, which are explained together, and the search for what explains one of them.

A mistake is looked for in one record, carried over to the others, and looked for again in what that leaves. So it has
the same numbers wherever it is.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from tracediff.diagnose.budget import Budget, Progress, within
from tracediff.diagnose.hypothesis import PART, SOLVED, Assumed, Hypothesis, Least, Way, to_beat
from tracediff.diagnose.solve import pairs, segments, solver
from tracediff.diagnose.solve.edit import Solved
from tracediff.diagnose.trials import Trials
from tracediff.model.graph import Graph
from tracediff.names import layer_of, split
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.kinds import KINDS
from tracediff.replay.recompute import CircularError
from tracediff.replay.replay import Replay
from tracediff.replay.score import judge, score
from tracediff.result import Local
from tracediff.trace.format import OpRecord

# A hypothesis that leaves so little of the error needs no rival. (Two kinds of GELU leave 1e-5 of each other.)
_BEYOND_DOUBT = 1e-8
_A_LAYER = 24  # ops: in longer segments of several layers the pairs are too many
# Where one mistake does not suffice, every other is tried on top of so many that leave least: of one, of two.
_BEAM = (6, 3)
# Of the squared error in other rows what is wrong leaves no more, where one row is soon suited: by a number, which it
# tells to a few digits, or in a choice of a few.
_TOLD = 1e-3
_ADDED = 0.1  # of what the others leave: more, and nothing speaks for one more
_SEARCHES = 2  # of ops of one name in which sets of mistakes are searched for in vain
How = Callable[[segments.SegmentSearch], Iterator[Solved]]
# Seconds that a search of a segment must have, for each value of its weights, or it is not begun: a quarter of what
# all of it takes. On one core, a layer of 15 million took 10 seconds and four minutes.
_SECONDS: Mapping[How, float] = {segments.SegmentSearch.called: 2e-7, segments.SegmentSearch.computed: 4e-6}
_A_SHARE = 4  # of the time that is left a search of pairs of edits takes no more than one of so many
_ALIKE = 4  # edits of an op that come to the same in a record, and not in others as a rule
# Values of weights times passes, one for each layer and arithmetic: every mistake takes half a forward pass in each.
# With 4e7 on two cores it took a minute.
_ONE_BY_ONE = 2e8


@dataclass(frozen=True, slots=True)
class Faulty:
    """A record to be explained: its place among all results, and its error."""

    at: int
    record: OpRecord
    error: Local


@dataclass(slots=True)
class Kin:
    """Faulty records of one kind, and what was found in them so far."""

    pending: list[Faulty]
    found: list[Hypothesis] = field(default_factory=list)
    in_vain: list[Faulty] = field(default_factory=list)
    unsought: dict[int, Faulty] = field(default_factory=dict)  # by their places, for which there was too little time
    alike: dict[tuple[str, str, str], str] = field(default_factory=dict)  # what else a mistake of an op comes to

    @property
    def some(self) -> list[Faulty]:
        """A few that choose between what explains the first of them: the next, a middle one and the last."""
        n = len(self.pending)
        return [self.pending[i] for i in dict.fromkeys((0, n // 2, n - 1)) if 0 <= i < n]


class Search:
    """Looks for mistakes in the records of one kin."""

    def __init__(self, replay: Replay, budget: Budget, errors: Mapping[tuple[int, str], Local], kin: Kin) -> None:
        self._replay = replay
        self._budget = budget
        self._trials = Trials(replay, budget)
        self._errors = errors  # of all records that were judged
        self._kin = kin

    def knowing(self, one: Faulty, best: Hypothesis) -> "Search":
        """The search with the arithmetic that shows where this is explained."""
        return Search(self._replay.knowing(one.record, best.ops), self._budget, self._errors, self._kin)

    def of(self, one: Faulty, progress: Progress) -> Hypothesis | None:
        """What explains the record best, its kin asked where several do.

        One mistake in all layers of the segment alike; then in one of several layers; then several mistakes.
        """
        plain = self._replay.plain_ones(one.record)
        vain = self._in_vain(one)
        layers = several_layers(one.error.segment) if ends_soon(self._replay, one) and not vain else []
        ways = [Way(scheme) for scheme in plain] + [Way(scheme, layer) for scheme in plain for layer in layers]
        tried = Least()
        for done, way in enumerate(ways):
            if found := self._single(one, way, tried, within(progress, done, len(ways))):
                return self._unrivalled(self._chosen(found), one)
        if len(vain) >= _SEARCHES:
            return self._fewest(self.one_more(one), one)
        here = [h for h in tried.first(_ALIKE) if h.pays(one.error) and not self._is_soon_suited(h, one.record)]
        began = time.monotonic()
        if found_one := self._solved(one, [h.but_in_some_steps() for h in here]):
            return found_one
        if len(one.error.segment) == 1:
            seconds = time.monotonic() - began
            return self._fewest(self.one_more(one) or self._several(one, tried), one) or self._in_pairs(one, seconds)
        return (
            self._solved(one, how=segments.SegmentSearch.called)
            or self._fewest(self.one_more(one) or self._several(one, tried), one)
            or self._solved(one, how=segments.SegmentSearch.computed)
        )

    def _unrivalled(self, best: Hypothesis, one: Faulty) -> Hypothesis:
        """Or an edit of the op that explains more of its kin than a number that was fitted to one row: to that the mean
        over n - 1 looks like a factor, and any factor like a wrong eps.
        """
        fitted = len(one.error.segment) == 1 and one.error.one_token and best.parts[-1].fitted
        if not fitted or all(self._carried(best, other) for other in self._kin.pending):
            return best
        solved = self._solved(one)
        carried = [sum(self._carried(h, other) is not None for other in self._kin.pending) for h in (best, solved) if h]
        return solved if solved and carried[1] > carried[0] else best

    def _solutions(self, one: Faulty, how: How | None) -> Iterable[tuple[Solved, Scheme | None]]:
        """Edits of an op by itself, or of one in a segment: of what its end tells, or, `how` it is searched, of all."""
        record, names, check = one.record, one.error.segment, self._budget.check
        if len(names) == 1:
            return solver.explanations(self._replay, record, check)
        if _is_long(names):
            return ()
        if how and not self._budget.has(_SECONDS[how] * weight_values(names, self._replay.graph)):
            self._kin.unsought[one.at] = one
            return ()
        if self._in_vain(one):
            return ()
        if how:
            return segments.searched(self._replay, record, names, one.error.nmse, check, how)
        return segments.told(self._replay, record, names, check)

    def _in_vain(self, one: Faulty) -> list[Faulty]:
        """Records of the same op, in whichever layer, that nothing was found for."""
        return [other for other in self._kin.in_vain if split(other.record.op)[1] == split(one.record.op)[1]]

    def _solved(self, one: Faulty, in_some: Iterable[Hypothesis] = (), how: How | None = None) -> Hypothesis | None:
        """What the solver makes of it; `in_some` steps alone were found before."""
        return self._explaining(self._solutions(one, how), one, in_some, at_once=how is not None)

    def _in_pairs(self, one: Faulty, seconds: float) -> Hypothesis | None:
        """Two edits of an op by itself, where one took so many `seconds` to be sought in vain."""
        if not self._budget.has(_A_SHARE * pairs.BEAM * seconds):
            self._kin.unsought[one.at] = one
            return None
        check = self._budget.check
        return self._explaining(solver.explanations(self._replay, one.record, check, pairs.pairs), one)

    def _explaining(
        self,
        solutions: Iterable[tuple[Solved, Scheme | None]],
        one: Faulty,
        in_some: Iterable[Hypothesis] = (),
        at_once: bool = False,
    ) -> Hypothesis | None:
        """The first that explains the record and all that is asked of its kin, or the best of a few. What other steps
        contradict is taken last, and where no number was fitted: it is made in some steps alone.
        """
        found, in_some = list[Hypothesis](), [*in_some]
        for solved, scheme in solutions:
            self._budget.check()  # of a state of NaN thousands are found at once
            try:
                local = self._replay.under(one.record, solved.ops, to_beat(one.error), scheme)
            except CircularError:
                continue
            part = Assumed(SOLVED, solved.words, solved.words, solved.fitted, solved.look, n_edits=solved.n_edits)
            hypothesis = Hypothesis((part,), solved.ops, local)
            if self._explains(hypothesis, one):
                found.append(hypothesis)
                if all(self._carried(hypothesis, other) for other in self._kin.some):
                    return hypothesis  # none of the others could explain more
            elif not solved.fitted and hypothesis.pays(one.error):
                in_some.append(hypothesis.but_in_some_steps())
                if at_once and self._kin.some and all(self._carried(in_some[-1], other) for other in self._kin.some):
                    return in_some[-1]  # of thousands of edits few are tried in vain for one that all steps have
            if len(found) == _ALIKE:
                break
        return self._chosen([*found, *in_some]) if found or in_some else None

    def carry(self, found: Hypothesis, members: list[Faulty]) -> list[tuple[Faulty, Hypothesis]]:
        """The members that what was found in one record explains too: they are taken from the list."""
        carried = [(one, same) for one in members if (same := self._carried(found, one))]
        for one, _ in carried:
            members.remove(one)
        return carried

    def _carried(self, found: Hypothesis, one: Faulty) -> Hypothesis | None:
        tried = self._trials.carried(found, one.record, one.error)
        return self._fewest(next((same for same in tried if self._explains(same, one, same.may_turn)), None), one)

    def unrounded(self, found: Hypothesis, one: Faulty) -> Hypothesis | None:
        """What explained others, where in the arithmetic of most engines it leaves far less of a record than roundings
        do that explain it by themselves.
        """
        tried = self._trials.carried(found, one.record, one.error)
        under = ((h, local) for h in tried for local in self._replay.plainly(one.record, h.ops, one.error.nmse))
        sound = (replace(h, local=local) for h, local in under if not local.faulty)
        best = max(sound, key=lambda h: h.score, default=None)
        wins = best and judge(best.score - score(one.error.nmse)) == "faulty"
        return best if best and wins and not self._contradicted(best, one.record) else None

    def _fewest(self, found: Hypothesis | None, one: Faulty) -> Hypothesis | None:
        """Without the mistakes that this record does not need: two that cancel, or one that shows nothing beside
        another, as a mask where all values are zero.
        """
        if found is None or SOLVED in found.mistakes:
            return found
        for n in range(1, len(found.parts)):
            for parts in combinations(found.parts, n):
                for fewer in self._trials.together(parts, one.record, one.error):
                    if self._explains(fewer, one) and fewer.score >= found.score:
                        return fewer
        return found

    def _single(self, one: Faulty, way: Way, tried: Least, progress: Progress) -> list[Hypothesis]:
        """Mistakes that explain the record, best first; those that do not are added to `tried`."""
        found: list[Hypothesis] = []
        mistakes = self._trials.applicable(one.error.segment)
        for done, mistake in enumerate(mistakes):
            progress(done / len(mistakes))
            tries = list(self._trials.of(mistake, one.record, one.error, way=way))
            if fitted := self._trials.fitted(tries, one.record, one.error, way):
                tries.append(fitted)
            explain = [hypothesis for hypothesis in tries if self._explains(hypothesis, one)]
            tried.update(hypothesis for hypothesis in tries if hypothesis not in explain)
            found += explain
            sure = [h for h in explain if h.left <= _BEYOND_DOUBT * one.error.nmse and not h.parts[-1].fitted]
            if sure:
                return sorted(sure, key=lambda h: len(h.ops))
        return sorted(found, key=lambda h: (-h.score, len(h.ops)))

    def _chosen(self, found: list[Hypothesis]) -> Hypothesis:
        """Of what explains a record the one that explains most of its kin, then the best."""
        others = self._kin.some
        if len(found) == 1 or not others:
            return found[0]
        return max(found, key=lambda h: sum(self._carried(h, other) is not None for other in others))

    def one_more(self, one: Faulty) -> Hypothesis | None:
        """What explained others of the kin, and one more mistake."""
        if _is_long(one.error.segment):
            return None
        for known in (found for found in self._kin.found if SOLVED not in found.mistakes):
            together = self._trials.together(known.parts, one.record, one.error)
            given = min(together, key=lambda h: h.left, default=None)
            if given and (found := self._on_top(given, one, Least())):
                return found
        return None

    def _several(self, one: Faulty, tried: Least) -> Hypothesis | None:
        """Two mistakes that together explain what one of them does not; then three."""
        if _is_long(one.error.segment):
            return None
        for width in _BEAM:
            more = Least()
            for given in tried.first(width):
                if given.left <= PART * one.error.nmse and (found := self._on_top(given, one, more)):
                    return found
            tried = more
        return None

    def _on_top(self, given: Hypothesis, one: Faulty, tried: Least) -> Hypothesis | None:
        """One more mistake, that explains the record on top of what is given; all are added to `tried`."""
        others = (m for m in self._trials.applicable(one.error.segment) if m.name not in given.mistakes)
        both = [h for mistake in others for h in self._trials.of(mistake, one.record, one.error, given)]
        tried.update(both)
        little = _ADDED * given.left
        return max((h for h in both if h.left < little and self._explains(h, one)), key=lambda h: h.score, default=None)

    def _explains(self, tried: Hypothesis, one: Faulty, is_paid: bool = False) -> bool:
        pays = is_paid or tried.pays(one.error)
        in_some = tried.in_some_steps and not self._is_choice(one.record)
        return pays and (in_some or not self._contradicted(tried, one.record))

    def _is_choice(self, record: OpRecord) -> bool:
        return KINDS[self._replay.graph[record.op].kind].picks is not None

    def _is_soon_suited(self, tried: Hypothesis, record: OpRecord) -> bool:
        """Whether one row of the record tells little of what is tried: it has a number, or the row is a choice."""
        return tried.parts[-1].fitted or self._is_choice(record)

    def _contradicted(self, tried: Hypothesis, record: OpRecord) -> bool:
        """Whether the mistake would show in another step of the op, which is as it should be, or takes that of most
        tokens further from what was recorded.

        To one row any factor looks like a wrong eps; in the prompt's rows that eps would show as well.
        """
        steps = self._replay.trace.steps
        errors = {step: error for step in steps if (error := self._errors.get((step, record.op)))}
        largest = max(errors, key=lambda step: len(steps[step].tokens))
        for step, error in errors.items():
            other = self._replay.trace.ops[step, record.op]
            if not error.faulty and self._replay.under(other, tried.ops).faulty:
                return True
            if error.faulty and step == largest != record.step:
                allowed = _TOLD if self._is_soon_suited(tried, record) else 1.0
                left = self._replay.under(other, tried.ops).nmse
                most = math.inf if math.isnan(error.nmse) else allowed * error.nmse
                return math.isinf(left) or not left <= most  # infinite: what is hidden is chosen, say
        return False


def ends_soon(replay: Replay, one: Faulty) -> bool:
    """Whether mistakes in one layer of the segment after the other can be tried within minutes."""
    passes = len(several_layers(one.error.segment)) * len(replay.plain_ones(one.record))
    return weight_values(one.error.segment, replay.graph) * passes <= _ONE_BY_ONE


def _is_long(segment: Sequence[str]) -> bool:
    return len(segment) > _A_LAYER and bool(several_layers(segment))


def several_layers(segment: Sequence[str]) -> list[int]:
    """The layers of a segment of several; none of one."""
    layers = sorted({layer for layer in map(layer_of, segment) if layer is not None})
    return layers if len(layers) > 1 else []


def weight_values(segment: Sequence[str], graph: Graph) -> int:
    """How many values of weights a forward pass of the segment reads."""
    return sum(math.prod(weight.shape) for name in segment for weight in graph[name].weights)
