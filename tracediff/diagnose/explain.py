"""Replay a trace, then explain its faulty ops.

Records of one kind are explained together: a mistake is looked for in one of them, carried over to the others, and
looked for again in what that leaves. So a mistake has the same numbers wherever it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from tracediff.diagnose.budget import ENDLESS, Budget, OutOfTime
from tracediff.diagnose.evidence import places
from tracediff.diagnose.hypothesis import (
    PART,
    SOLVED,
    Hypothesis,
    Least,
    Part,
    Progress,
    Trials,
    Way,
    several_layers,
    weight_values,
    within,
)
from tracediff.diagnose.mistakes import ALIKE, BANK
from tracediff.diagnose.shapes import describe
from tracediff.diagnose.solve import segments, solver
from tracediff.diagnose.solve.search import Solved
from tracediff.names import split
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.kinds import KINDS
from tracediff.replay.recompute import CircularError
from tracediff.replay.replay import Replay
from tracediff.result import Cause, Local, OpResult, Place
from tracediff.trace.format import OpRecord

# A hypothesis that leaves so little of the error needs no rival. (Two kinds of GELU leave 1e-5 of each other.)
_BEYOND_DOUBT = 1e-8
_A_LAYER = 24  # ops: in longer segments of several layers the pairs are too many
# Where one mistake does not suffice, every other is tried on top of so many that leave least: of one, of two.
_BEAM = (6, 3)
_ADDED = 0.1  # of what the others leave: more, and nothing speaks for one more
_SEARCHES = 2  # of ops of one name in which sets of mistakes are searched for in vain
# Seconds that the search of a segment must have, for each value of its weights, or it is not begun: a quarter of what
# all of it takes. On one core, a layer of 15 million took five minutes and a half.
_SEARCH = 5.5e-6
_ALIKE = 4  # edits of an op that come to the same in a record, and not in others as a rule
_ALSO = 3  # other mistakes that come to the same are said
_ENOUGH = 8  # tokens, and positions: with more a record tells no mistake from another that fewer do not
# Values of weights times passes, one for each layer and arithmetic: every mistake takes half a forward pass in each.
# With 4e7 on two cores it took a minute.
_ONE_BY_ONE = 2e8
_UNTRIED = "mistakes were tried in all layers alike, not in one alone: record hidden states to find the layer"


@dataclass(frozen=True, slots=True)
class _Faulty:
    """A record to be explained: its place among all results, and its error."""

    at: int
    record: OpRecord
    error: Local


@dataclass(slots=True)
class _Kin:
    """Faulty records of one kind, and what was found in them so far."""

    pending: list[_Faulty]
    found: list[Hypothesis] = field(default_factory=list)
    in_vain: list[_Faulty] = field(default_factory=list)
    unsought: list[_Faulty] = field(default_factory=list)  # for which there was too little time
    alike: dict[tuple[str, str, str], str] = field(default_factory=dict)  # what else a mistake of an op comes to

    @property
    def some(self) -> list[_Faulty]:
        """A few that choose between what explains the first of them: the next, a middle one and the last."""
        n = len(self.pending)
        return [self.pending[i] for i in dict.fromkeys((0, n // 2, n - 1)) if 0 <= i < n]


class Explainer:
    """Explains the faulty records of one trace by the known mistakes, one or several at once."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def explain(
        self, ops: list[OpResult], progress: Progress = lambda fraction: None, budget: Budget = ENDLESS
    ) -> list[OpResult]:
        """The ops, those that are faulty with their cause or the shape of their error.

        Where the time is over no further cause is sought.
        """
        explained, kins = list(ops), self.kins(ops)
        for done, kin in enumerate(kins):
            for at, op in self.of(ops, kin, budget, within(progress, done, len(kins))).items():
                explained[at] = op
        return explained

    def kins(self, ops: list[OpResult]) -> list[list[int]]:
        """Places of records that may have one mistake: single ops of a kind, segments that end in the same op of a
        layer. What one lot has wrong does not depend on another's.
        """
        by_kin: dict[str, list[int]] = {}
        for at, op in enumerate(ops):
            if op.status == "faulty" and op.local:
                alone = len(op.local.segment) == 1
                by_kin.setdefault(self._replay.graph[op.op].kind if alone else f"... {split(op.op)[1]}", []).append(at)
        return [*by_kin.values()]

    def of(self, ops: list[OpResult], members: list[int], budget: Budget, progress: Progress) -> dict[int, OpResult]:
        """Those at the places of one kin's `members`, explained."""
        errors = {(op.step, op.op): op.local for op in ops if op.local}
        records, explained = self._replay.trace.ops, dict[int, OpResult]()
        pending = [_Faulty(at, records[ops[at].step, ops[at].op], error) for at in members if (error := ops[at].local)]
        kin = _Kin(sorted(pending, key=self._tells_little))
        left = {one.at: one for one in kin.pending}
        search = _Search(self._replay, budget, errors, kin)
        with suppress(OutOfTime):
            for one, best in self._explained(search, kin, progress):
                del left[one.at]
                explained[one.at] = (
                    self._named(ops[one.at], one, best, kin) if best else self._described(ops[one.at], one)
                )
        unsought = [one for one in kin.unsought if one.at not in left and not explained[one.at].cause]
        for one in (*left.values(), *unsought):
            explained[one.at] = replace(self._described(ops[one.at], one), sought=False)
        return explained

    def _tells_little(self, one: _Faulty) -> tuple[int, int]:
        """Which records to look at last: of an engine that is fed token by token the first steps, of few keys, are
        explained by many edits that no later step has.
        """
        step = self._replay.trace.steps[one.record.step]
        return -min(len(step.tokens), _ENOUGH), -min(max(step.positions) + 1, _ENOUGH)

    def _explained(
        self, search: "_Search", kin: _Kin, progress: Progress
    ) -> Iterable[tuple[_Faulty, Hypothesis | None]]:
        n = len(kin.pending)
        while kin.pending:
            first = kin.pending.pop(0)
            done = n - len(kin.pending) - 1
            best = search.of(first, within(progress, done, n))
            if best is None:
                kin.in_vain.append(first)
                continue
            kin.found.append(best)
            carried = [(first, best), *search.carry(best, kin.pending)]
            yield from carried
            for one, same in carried:
                search = search.knowing(one, same)
        for best in kin.found:  # what was found in later layers may be one of several mistakes in an earlier one
            yield from search.carry(best, kin.in_vain)
        for one in kin.in_vain:
            yield one, search.one_more(one)

    def _named(self, result: OpResult, one: _Faulty, best: Hypothesis, kin: _Kin) -> OpResult:
        """The op with what explains it."""
        segment, graph = one.error.segment, self._replay.graph
        each = {part.mistake: part.text for part in best.parts}
        for part in best.parts if len(segment) > 1 else ():
            key = one.record.op, part.mistake, part.variant  # the first of an op's records tells most
            kin.alike[key] = kin.alike[key] if key in kin.alike else self._alike(one, best, part)
            each[part.mistake] += kin.alike[key]
        name, text, under = " + ".join(each), ", and ".join(each.values()), best.local
        look = {part.mistake: BANK[part.mistake].look if part.mistake in BANK else part.look for part in best.parts}
        shown: tuple[Place, ...] = ()
        if len(segment) == 1:
            shown = places(
                graph[one.record.op], self._replay.known(one.record), self._replay.made(one.record, best.ops)
            )
        cause = Cause(name, under.nmse, text, under.floor, under.arithmetic, each, look, shown)
        return replace(result, cause=cause, shape=None)

    def _alike(self, one: _Faulty, best: Hypothesis, part: Part) -> str:
        """What else comes to the same from the end of a segment, in words: the mistake in another op, or one that is
        known to. Empty where nothing does.
        """
        if part.mistake == SOLVED:
            return ""
        trials, rest = Trials(self._replay, ENDLESS), [other for other in best.parts if other is not part]
        given = [*trials.together(rest, one.record, one.error)] if rest else [None]
        names, texts, ops = (part.mistake, *ALIKE.get(part.mistake, ())), list[str](), {op.name for op in best.ops}
        for name, before in product(names, given):
            ours = {op.name for op in best.ops} - {op.name for op in (before.ops if before else ())}
            for tried in trials.of(BANK[name], one.record, one.error, before):
                elsewhere = ours.isdisjoint(op.name for op in tried.ops)
                if elsewhere and tried.pays(one.error.nmse) and len(texts) < _ALSO:
                    there = split(tried.ops[-1].name)[1]
                    texts.append(f"in {there} instead" if name == part.mistake else tried.parts[-1].text)
                    ops |= {op.name for op in tried.ops}
        if not texts:
            return ""
        *first, last = dict.fromkeys(split(name)[1] for name in one.error.segment[:-1] if name in ops)
        record = f"{', '.join(first)} and {last}" if first else last
        return f" (or {', or '.join(texts)}: the same from here; record {record} to tell)"

    def _described(self, result: OpResult, one: _Faulty) -> OpResult:
        known = self._replay.known(one.record)
        op = self._replay.graph[one.record.op]
        axes = KINDS[op.kind].axis_names(op, known.exact.ndim)
        shape = describe(known.recorded, known.exact, axes)
        untried = several_layers(one.error.segment) and not _ends_soon(self._replay, one)
        return replace(result, shape=f"{shape}; {_UNTRIED}" if untried else shape)


def _ends_soon(replay: Replay, one: _Faulty) -> bool:
    """Whether mistakes in one layer of the segment after the other can be tried within minutes."""
    passes = len(several_layers(one.error.segment)) * len(replay.plain_ones(one.record))
    return weight_values(one.error.segment, replay.graph) * passes <= _ONE_BY_ONE


def _is_long(segment: Sequence[str]) -> bool:
    return len(segment) > _A_LAYER and bool(several_layers(segment))


class _Search:
    """Looks for mistakes in the records of one kin."""

    def __init__(self, replay: Replay, budget: Budget, errors: Mapping[tuple[int, str], Local], kin: _Kin) -> None:
        self._replay = replay
        self._budget = budget
        self._trials = Trials(replay, budget)
        self._errors = errors  # of all records that were judged
        self._kin = kin

    def knowing(self, one: _Faulty, best: Hypothesis) -> "_Search":
        """The search with the arithmetic that shows where this is explained."""
        return _Search(self._replay.knowing(one.record, best.ops), self._budget, self._errors, self._kin)

    def of(self, one: _Faulty, progress: Progress) -> Hypothesis | None:
        """What explains the record best, its kin asked where several do.

        One mistake in all layers of the segment alike; then in one of several layers; then several mistakes.
        """
        plain = self._replay.plain_ones(one.record)
        vain = [other for other in self._kin.in_vain if split(other.record.op)[1] == split(one.record.op)[1]]
        layers = several_layers(one.error.segment) if _ends_soon(self._replay, one) and not vain else []
        ways = [Way(scheme) for scheme in plain] + [Way(scheme, layer) for scheme in plain for layer in layers]
        tried = Least()
        for done, way in enumerate(ways):
            if found := self._single(one, way, tried, within(progress, done, len(ways))):
                return self._unrivalled(self._chosen(found), one)
        if len(vain) >= _SEARCHES:
            return self._fewest(self.one_more(one), one)
        here = [h for h in tried.first(_ALIKE) if h.pays(one.error.nmse) and not h.parts[-1].fitted]
        if found_one := self._solved(one, [h.but_in_some_steps() for h in here]):
            return found_one
        several = self._fewest(self.one_more(one) or self._several(one, tried), one)
        return several or (self._solved(one, in_whole=True) if len(one.error.segment) > 1 else None)

    def _unrivalled(self, best: Hypothesis, one: _Faulty) -> Hypothesis:
        """Or an edit of the op that explains more of its kin than a number that was fitted to one row: to that the mean
        over n - 1 looks like a factor, and any factor like a wrong eps.
        """
        fitted = len(one.error.segment) == 1 and one.error.one_token and best.parts[-1].fitted
        if not fitted or all(self._carried(best, other) for other in self._kin.pending):
            return best
        solved = self._solved(one)
        carried = [sum(self._carried(h, other) is not None for other in self._kin.pending) for h in (best, solved) if h]
        return solved if solved and carried[1] > carried[0] else best

    def _solutions(self, one: _Faulty, in_whole: bool) -> Iterable[tuple[Solved, Scheme | None]]:
        """Edits of an op by itself, or of one in a segment: of what its end tells, or, which takes longest, of all."""
        record, names, check = one.record, one.error.segment, self._budget.check
        vain = any(split(other.record.op)[1] == split(record.op)[1] for other in self._kin.in_vain)
        if len(names) == 1:
            return solver.explanations(self._replay, record, check)
        if _is_long(names):
            return ()
        if in_whole and not self._budget.has(_SEARCH * weight_values(names, self._replay.graph)):
            self._kin.unsought.append(one)
            return ()
        if vain:
            return ()
        if in_whole:
            return segments.searched(self._replay, record, names, one.error.nmse, check)
        return segments.told(self._replay, record, names, check)

    def _solved(self, one: _Faulty, in_some: Iterable[Hypothesis] = (), in_whole: bool = False) -> Hypothesis | None:
        """What the solver makes of it. What other steps contradict is taken last, and where no number was fitted: it is
        made in some steps alone. So are those `in_some` that were found before.
        """
        found, in_some = list[Hypothesis](), [*in_some]
        for solved, scheme in self._solutions(one, in_whole):
            self._budget.check()  # of a state of NaN thousands are found at once
            try:
                local = self._replay.under(one.record, solved.ops, one.error.nmse, scheme)
            except CircularError:
                continue
            part = Part(SOLVED, solved.words, solved.words, solved.fitted, solved.look)
            hypothesis = Hypothesis((part,), solved.ops, local)
            if self._explains(hypothesis, one):
                found.append(hypothesis)
                if all(self._carried(hypothesis, other) for other in self._kin.some):
                    return hypothesis  # none of the others could explain more
            elif not solved.fitted and hypothesis.pays(one.error.nmse):
                in_some.append(hypothesis.but_in_some_steps())
            if len(found) == _ALIKE:
                break
        return self._chosen(found or in_some) if found or in_some else None

    def carry(self, found: Hypothesis, members: list[_Faulty]) -> list[tuple[_Faulty, Hypothesis]]:
        """The members that what was found in one record explains too: they are taken from the list."""
        carried = [(one, same) for one in members if (same := self._carried(found, one))]
        for one, _ in carried:
            members.remove(one)
        return carried

    def _carried(self, found: Hypothesis, one: _Faulty) -> Hypothesis | None:
        tried = self._trials.carried(found, one.record, one.error)
        return self._fewest(next((same for same in tried if self._explains(same, one, same.may_turn)), None), one)

    def _fewest(self, found: Hypothesis | None, one: _Faulty) -> Hypothesis | None:
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

    def _single(self, one: _Faulty, way: Way, tried: Least, progress: Progress) -> list[Hypothesis]:
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

    def one_more(self, one: _Faulty) -> Hypothesis | None:
        """What explained others of the kin, and one more mistake."""
        if _is_long(one.error.segment):
            return None
        for known in (found for found in self._kin.found if SOLVED not in found.mistakes):
            together = self._trials.together(known.parts, one.record, one.error)
            given = min(together, key=lambda h: h.left, default=None)
            if given and (found := self._on_top(given, one, Least())):
                return found
        return None

    def _several(self, one: _Faulty, tried: Least) -> Hypothesis | None:
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

    def _on_top(self, given: Hypothesis, one: _Faulty, tried: Least) -> Hypothesis | None:
        """One more mistake, that explains the record on top of what is given; all are added to `tried`."""
        others = (m for m in self._trials.applicable(one.error.segment) if m.name not in given.mistakes)
        both = [h for mistake in others for h in self._trials.of(mistake, one.record, one.error, given)]
        tried.update(both)
        little = _ADDED * given.left
        return max((h for h in both if h.left < little and self._explains(h, one)), key=lambda h: h.score, default=None)

    def _explains(self, tried: Hypothesis, one: _Faulty, is_paid: bool = False) -> bool:
        pays = is_paid or tried.pays(one.error.nmse)
        return pays and (tried.in_some_steps or not self._contradicted(tried, one.record))

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
                return not self._replay.under(other, tried.ops).nmse <= error.nmse
        return False
