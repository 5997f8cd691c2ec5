"""The search for what explains one record of a kin: known mistakes, edits of its ops, and several at once."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, islice

from tracediff.diagnose.budget import Progress, within
from tracediff.diagnose.hypothesis import PART, SOLVED, Assumed, Hypothesis, Least, Way, to_beat
from tracediff.diagnose.kin import Faulty, Kin
from tracediff.diagnose.mistakes import blocks, embedding, integers, weights
from tracediff.diagnose.mistakes.mistake import Mistake
from tracediff.diagnose.solve import pairs, segments, solver
from tracediff.diagnose.solve.segments import Explanations, How
from tracediff.model.graph import Tokens
from tracediff.names import layers_of, local_name
from tracediff.numerics.arithmetic import Scheme
from tracediff.replay.recompute import CircularError
from tracediff.replay.replay import Replay
from tracediff.replay.score import NOTHING
from tracediff.trace.format import OpRecord

# A hypothesis that leaves so little of the error needs no rival. (Two kinds of GELU leave 1e-5 of each other.)
_BEYOND_DOUBT = 1e-8
_A_LAYER = 24  # ops: in longer segments of several layers the pairs are too many
# Where one mistake does not suffice, every other is tried on top of so many that leave least: of one, of two.
_BEAM = (6, 3)
_ADDED = 0.1  # of what the others leave: more, and nothing speaks for one more
_SEARCHES = 2  # of ops of one name in which sets of mistakes are searched for in vain
# Seconds that a search of a segment must have, for each value of its weights, or it is not begun: a quarter of what
# all of it takes. On one core, a layer of 15 million took 10 seconds and four minutes.
_SECONDS: Mapping[How, float] = {segments.SegmentSearch.called: 2e-7, segments.SegmentSearch.computed: 4e-6}
# Of the time that is left a search of pairs of edits takes no more than one of so many, where other ops wait for it.
_A_SHARE = 4
_ALIKE = 4  # edits of an op that come to the same in a record, and not in others as a rule
_OF_WEIGHTS = (blocks.AREA, integers.AREA, weights.AREA, embedding.AREA)  # what a rule of blocks may come to
_ASKED = 2  # other records of one token, which must have what is said of all of them
# Values of weights times passes, one for each layer and arithmetic: every mistake takes half a forward pass in each.
# With 4e7 on two cores it took a minute.
_ONE_BY_ONE = 2e8


class Search:
    """Looks for mistakes in the records of one kin."""

    def __init__(self, kin: Kin) -> None:
        self._kin = kin
        self._replay, self._budget, self._trials = kin.replay, kin.budget, kin.trials

    def of(self, one: Faulty, progress: Progress, only_known: bool = False) -> Hypothesis | None:
        """What explains the record best, its kin asked where several do.

        One mistake in all layers of the segment alike; then in one of several layers; then several mistakes. Where
        something else tells what is wrong, `only_known` ones, which have a name.
        """
        plain = self._replay.tried_under(one.record, one.error.nmse)
        vain = self._kin.in_vain_of(one)
        if only_known and len(vain) >= _SEARCHES:
            return None
        if self._is_decode_alone(one.record):  # others may have it in all steps
            in_some = (self._kin.carried(found.but_in_some_steps(), one) for found in self._kin.found)
            if same := next(filter(None, in_some), None):
                return same
        if not vain and (found_one := self._misread(one, plain, progress)):
            return found_one
        layers = several_layers(one.error.segment) if ends_soon(self._replay, one) and not vain else []
        ways = [Way(scheme) for scheme in plain] + [Way(scheme, layer) for scheme in plain for layer in layers]
        if self._is_decode_alone(one.record):
            ways += [Way(scheme, tokens="one") for scheme in plain]
        tried = Least()
        for done, way in enumerate(ways):
            found = self._single(one, way, tried, within(progress, done, len(ways)))
            if way.tokens:
                found = [h for h in found if self._is_sure(h, one) and not self._makes_cached_anew(h)]
            if found:
                return self._unrivalled(self._kin.chosen(found), one)
        if only_known:
            return None
        if len(vain) >= _SEARCHES:
            return self._kin.fewest(self.one_more(one), one)
        some = (h.but_in_some_steps() for h in tried.first(_ALIKE) if not self._kin.is_soon_suited(h, one.record))
        here = [h for h in some if self._kin.pays(h, one) and self._may_be_here_alone(h, one)]
        began = time.monotonic()
        if found_one := self._solved(one, here):
            return found_one
        if len(one.error.segment) == 1:
            seconds = time.monotonic() - began
            return self._together(one, tried) or self._in_pairs(one, seconds)
        return (
            self._solved(one, how=segments.SegmentSearch.called)
            or self._together(one, tried)
            or self._solved(one, how=segments.SegmentSearch.computed)
        )

    def _is_decode_alone(self, record: OpRecord) -> bool:
        """Whether it may be made where one token is computed alone."""
        return self._kin.is_of_one_token(record) and self._kin.is_sound_in_prompts(record)

    def known_beyond_doubt(self, one: Faulty, progress: Progress) -> Hypothesis | None:
        """The known mistake, made in all layers of the segment alike, that leaves next to nothing of the record in an
        arithmetic of most engines, by which it is mistaken.
        """
        for scheme, error in self._replay.plain_looks(one.record):
            if error.faulty:
                found = next(iter(self._single(replace(one, error=error), Way(scheme), Least(), progress)), None)
                if found and not found.may_turn and found.left <= NOTHING:
                    return found
        return None

    def _misread(self, one: Faulty, plain: Sequence[Scheme | None], progress: Progress) -> Hypothesis | None:
        """The rule by which an op's quantised weight is read in all its blocks; a known one, where it is that.

        It is asked first, for a few rows tell it: where every matmul is mistaken all else takes passes of all weights.
        """
        if len(one.error.segment) > 1:
            return None
        others = (other.record for other in self._kin.pending if other.record.op == one.record.op)
        solutions = solver.block_rules(self._replay, [one.record, *others], self._budget.check)
        found = self._explaining(solutions, one)
        of_weights = [m for m in self._trials.applicable(one.error.segment) if any(m in area for area in _OF_WEIGHTS)]
        for scheme in plain if found else ():
            if known := self._single(one, Way(scheme), Least(), progress, of_weights):
                return self._kin.chosen(known)
        return found

    def _single(
        self,
        one: Faulty,
        way: Way,
        tried: Least,
        progress: Progress,
        among: Sequence[Mistake] | None = None,
    ) -> list[Hypothesis]:
        """Mistakes that explain the record, best first; those that do not are added to `tried`."""
        found: list[Hypothesis] = []
        mistakes = self._trials.applicable(one.error.segment) if among is None else among
        places = {mistake.name: place for place, mistake in enumerate(mistakes)}
        hypotheses = self._trials.of(mistakes, one.record, one.error, way=way)
        for mistake, of_it in groupby(hypotheses, key=lambda h: h.parts[-1].mistake):
            progress(places[mistake] / len(mistakes))
            tries = list(of_it)
            if fitted := self._trials.fitted(tries, one.record, one.error, way):
                tries.append(fitted)
            explain = [hypothesis for hypothesis in tries if self._kin.explains(hypothesis, one)]
            tried.update(hypothesis for hypothesis in tries if hypothesis not in explain)
            found += explain
            sure = [h for h in explain if h.left <= _BEYOND_DOUBT * one.error.nmse and not h.parts[-1].fitted]
            if sure:
                return sorted(sure, key=lambda h: len(h.ops))
        return sorted(found, key=lambda h: (-h.score, len(h.ops)))

    def _together(self, one: Faulty, tried: Least) -> Hypothesis | None:
        """Several known mistakes."""
        return self._kin.fewest(self.one_more(one) or self._several(one, tried), one)

    def one_more(self, one: Faulty) -> Hypothesis | None:
        """What explained others of the kin, and one more mistake."""
        if _is_long(one.error.segment):
            return None
        for known in (found for found in self._kin.found if SOLVED not in found.mistakes):
            for given in self._kin.tried(known, one):
                if found := self._on_top(given, one, Least()):
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
        both = list(self._trials.of(others, one.record, one.error, given))
        tried.update(both)
        little = _ADDED * given.left
        explain = (h for h in both if h.left < little and self._kin.explains(h, one))
        return max(explain, key=lambda h: h.score, default=None)

    def _unrivalled(self, best: Hypothesis, one: Faulty) -> Hypothesis:
        """Or an edit of the op that explains more of its kin than a number that was fitted to one row: to that the mean
        over n - 1 looks like a factor, and any factor like a wrong eps.
        """
        fitted = len(one.error.segment) == 1 and one.error.one_token and best.parts[-1].fitted
        others = self._kin.pending
        if not fitted or self._kin.explains_all(best, others):
            return best
        solved = self._solved(one)
        n_explained = self._kin.n_explained
        return solved if solved and n_explained(solved, others) > n_explained(best, others) else best

    def _solved(self, one: Faulty, in_some: Iterable[Hypothesis] = (), how: How | None = None) -> Hypothesis | None:
        """What the solver makes of it; `in_some` steps alone were found before."""
        return self._explaining(self._solutions(one, how), one, in_some, at_once=how is not None)

    def _solutions(self, one: Faulty, how: How | None) -> Explanations:
        """Edits of an op by itself, or of one in a segment: of what its end tells, or, `how` it is searched, of all."""
        record, names, check = one.record, one.error.segment, self._budget.check
        if len(names) == 1:
            yield from solver.explanations(self._replay, record, check)
        elif _is_long(names):
            return
        elif how and not self._budget.has(_SECONDS[how] * self._replay.graph.weight_values(names)):
            self._kin.unsought[one.at] = one
        elif self._kin.in_vain_of(one):
            return
        elif how:
            yield from segments.searched(self._replay, record, names, one.error.nmse, check, how)
        else:
            yield from segments.told(self._replay, record, names, check)

    def _in_pairs(self, one: Faulty, seconds: float) -> Hypothesis | None:
        """Two edits of an op by itself, where one took so many `seconds` to be sought in vain."""
        name = local_name(one.record.op)
        others = any(local_name(other.record.op) != name for other in self._kin.pending)
        if not self._budget.has((_A_SHARE if others else 1) * pairs.BEAM * seconds):
            self._kin.unsought[one.at] = one
            return None
        check = self._budget.check
        return self._explaining(solver.explanations(self._replay, one.record, check, pairs.pairs), one)

    def _explaining(
        self,
        solutions: Explanations,
        one: Faulty,
        in_some: Iterable[Hypothesis] = (),
        at_once: bool = False,
    ) -> Hypothesis | None:
        """The first that explains the record and all that is asked of its kin, or the best of a few. What other steps
        contradict is taken last, and where no number was fitted, nor one factor suited: it is made in some steps
        alone.
        """
        found, in_some = list[Hypothesis](), [*in_some]
        for hypothesis in self._hypotheses(solutions, one):
            if hypothesis.parts[-1].tokens and not self._is_in_another_step(hypothesis, one):
                continue
            if self._kin.explains(hypothesis, one):
                found.append(hypothesis)
                if self._kin.explains_all(hypothesis, self._kin.some):
                    return hypothesis  # none of the others could explain more
            elif self._may_be_in_some(hypothesis, one):
                in_some.append(hypothesis.but_in_some_steps())
                if at_once and self._kin.some and self._kin.explains_all(in_some[-1], self._kin.some):
                    return in_some[-1]  # of thousands of edits few are tried in vain for one that all steps have
            if len(found) == _ALIKE:
                break
        return self._kin.chosen([*found, *in_some]) if found or in_some else None

    def _is_in_another_step(self, solved: Hypothesis, one: Faulty) -> bool:
        """Whether it explains another step too: of one token alone thousands of edits give what some other did."""
        others = (other for other in self._kin.pending if other.record.step != one.record.step)
        return self._kin.pays(solved, one) and any(self._kin.carried(solved, other) for other in islice(others, _ASKED))

    def _is_sure(self, known: Hypothesis, one: Faulty) -> bool:
        """Whether it may be said of all steps of one token: of what one row tells little another step must have it."""
        return not self._kin.is_soon_suited(known, one.record) or self._is_in_another_step(known, one)

    def _makes_cached_anew(self, known: Hypothesis) -> bool:
        """Whether an op that the model has not stands between a cache and what reads it: prompts would have it, too."""
        new = {op.name for op in known.ops} - self._replay.graph.ops.keys()
        return any(past and name in new for op in known.ops for name, past in op.reads)

    def _hypotheses(self, solutions: Explanations, one: Faulty) -> Iterator[Hypothesis]:
        """What they leave of the record: made in all steps, or, where that may be, in those of one token."""
        each: tuple[Tokens | None, ...] = (None, "one") if self._is_decode_alone(one.record) else (None,)
        for solved, scheme in solutions:
            words, common = solved.words, solved.common
            part = Assumed(SOLVED, words, words, solved.fitted, solved.look, n_edits=solved.n_edits, common=common)
            for tokens in each:
                tried = Hypothesis((part,), solved.ops, one.error).of_tokens(tokens)
                self._budget.check()  # of a state of NaN thousands are found at once
                with suppress(CircularError):
                    yield replace(tried, local=self._replay.under(one.record, tried.ops, to_beat(one.error), scheme))

    def _may_be_in_some(self, solved: Hypothesis, one: Faulty) -> bool:
        """Whether it may be made in some steps alone, where others contradict it: not where those of as many tokens are
        mistaken and none of them has it. (Of three decoded tokens each had the row of the one before; in the first, by
        what ids they were, that was "the number of channels is taken for 768".)
        """
        suited = solved.parts[-1].fitted or self._kin.is_one_factor(one.record, solved.ops)
        return not suited and self._kin.pays(solved, one) and self._may_be_here_alone(solved, one)

    def _may_be_here_alone(self, tried: Hypothesis, one: Faulty) -> bool:
        """Whether no later step must have it, and of those of as many tokens that are mistaken some do. (A convolution
        whose taps were rotated had them "in the reverse order" in its first steps, of next to no state.)
        """
        if self._kin.is_handed_on(tried, one.record):
            return False
        alike = [other for other in (*self._kin.pending, *self._kin.in_vain) if self._is_alike(other, one)][:_ASKED]
        in_some = tried.but_in_some_steps()
        return not alike or any(self._kin.carried(in_some, other) for other in alike)

    @staticmethod
    def _is_alike(other: Faulty, one: Faulty) -> bool:
        """Whether it is the same op in another step, of one token if the record's is."""
        return other.record.op == one.record.op and other.error.one_token == one.error.one_token


def ends_soon(replay: Replay, one: Faulty) -> bool:
    """Whether mistakes in one layer of the segment after the other can be tried within minutes."""
    passes = len(several_layers(one.error.segment)) * len(replay.plain_ones(one.record))
    return replay.graph.weight_values(one.error.segment) * passes <= _ONE_BY_ONE


def _is_long(segment: Sequence[str]) -> bool:
    return len(segment) > _A_LAYER and bool(several_layers(segment))


def several_layers(segment: Sequence[str]) -> list[int]:
    """The layers of a segment of several; none of one."""
    layers = layers_of(segment)
    return layers if len(layers) > 1 else []
