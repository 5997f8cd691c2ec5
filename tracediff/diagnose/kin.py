"""Faulty records of one kind, which are explained together: what one is explained by, all are asked of.

A mistake is looked for in one record, carried over to the others, and looked for again in what that leaves. So it has
the same numbers wherever it is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import torch

from tracediff.diagnose.budget import Budget
from tracediff.diagnose.carrying import carried, is_rule
from tracediff.diagnose.hypothesis import PART, SOLVED, Assumed, Hypothesis, is_of_single_values, to_beat
from tracediff.diagnose.trials import Trials
from tracediff.model.graph import Op
from tracediff.names import local_name
from tracediff.numerics.kinds import KINDS
from tracediff.replay.making import SEGMENT_MARGIN
from tracediff.replay.replay import Replay
from tracediff.replay.score import NOTHING, judge, score
from tracediff.result import Local
from tracediff.trace.format import OpRecord

# Of the squared error in other rows what is wrong leaves no more, where one row is soon suited: by a number, which it
# tells to a few digits, or in a choice of a few.
_TOLD = 1e-3
_AS_NOISE, _SPREAD = 0.5, 1 / 3  # of the squared bound: what is spread evenly up to it has a third
# Nats of what single values are off by, that an explanation must take away: there are some hundred known mistakes, and
# some thousand edits. (One value of a matmul in bfloat16 was off by 1.005 times its bound, and right if "the sum leaves
# out every 15th input channel, from 5 on".)
_BY_KNOWN, _BY_EDIT = math.log(100.0), math.log(3000.0)
_NORMS = ("rms_norm", "layer_norm", "l2_norm", "group_norm")
_OTHERS = 2  # steps besides that are mistaken: so many are asked of what one row tells little of
_ENOUGH = 8  # tokens, and positions: with more a record tells no mistake from another that fewer do not
_ALL_BUT = 1e-5  # of the squared error: in a segment roundings that turn leave no more
# Ways to choose the records in which roundings turned of all that there are, be they as likely in one as in another:
# that it is these very ones is a chance of one in so many.
_RARELY = 20


@dataclass(frozen=True, slots=True)
class Faulty:
    """A record to be explained: its place among all results, and its error."""

    at: int
    record: OpRecord
    error: Local


def told_by(replay: Replay, one: Faulty) -> tuple[int, int]:
    """How much a record tells, in tokens and in keys: of an engine that is fed token by token the first steps, of few
    keys, are explained by many edits that no later step has.
    """
    step = replay.trace.steps[one.record.step]
    return min(len(step.tokens), _ENOUGH), min(max(step.positions) + 1, _ENOUGH)


@dataclass(frozen=True)
class Kin:
    """Faulty records of one kind, and what was found in them so far. `errors` are those of all records judged."""

    replay: Replay
    budget: Budget
    errors: Mapping[tuple[int, str], Local]
    pending: list[Faulty]
    found: list[Hypothesis] = field(default_factory=list)
    in_vain: list[Faulty] = field(default_factory=list)
    unsought: dict[int, Faulty] = field(default_factory=dict)  # by their places, for which there was too little time
    alone: dict[str, Hypothesis] = field(default_factory=dict)  # what is wrong in an op by itself
    alike: dict[tuple[str, str, str], str] = field(default_factory=dict)  # what else a mistake of an op comes to

    @cached_property
    def trials(self) -> Trials:
        """Of known mistakes, on these records."""
        return Trials(self.replay, self.budget)

    def knowing(self, one: Faulty, best: Hypothesis) -> "Kin":
        """The same with the arithmetic that shows where this is explained."""
        return replace(self, replay=self.replay.knowing(one.record, best.ops))

    @property
    def some(self) -> list[Faulty]:
        """A few that choose between what explains the first of them: the next, a middle one and the last."""
        n = len(self.pending)
        return [self.pending[i] for i in dict.fromkeys((0, n // 2, n - 1)) if 0 <= i < n]

    def in_vain_of(self, one: Faulty) -> list[Faulty]:
        """Records of the same op, in whichever layer, that nothing was found for."""
        return [other for other in self.in_vain if local_name(other.record.op) == local_name(one.record.op)]

    def is_by_chance(self, found: Hypothesis, one: Faulty, in_vain: Sequence[Faulty]) -> bool:
        """Whether it explains a step that tells little, of few tokens and keys, and takes nothing away of others of the
        op, which were sought in vain. (A convolution whose taps were rotated had them "in the reverse order" in its
        first steps, of next to no state.)
        """
        told = told_by(self.replay, one)
        if max(told) == _ENOUGH:
            return False
        others = [other for other in in_vain if other.record.op == one.record.op]
        others = [other for other in others if told_by(self.replay, other) > told][:_OTHERS]
        lefts = ((min(h.left for h in self.tried(found, other)), other.error) for other in others)
        return len(others) == _OTHERS and all(left > PART * error.nmse for left, error in lefts)

    def given(self, one: Faulty) -> Hypothesis | None:
        """What is wrong by itself, in other records, in ops that a segment runs through, where that explains it."""
        inside = [h for name, h in self.alone.items() if name in one.error.segment[:-1]]
        if not inside:
            return None
        names: dict[Assumed, list[str]] = {}
        for h in inside:
            for part in h.parts:
                names.setdefault(part, []).extend(op.name for op in h.ops)
        parts = tuple(
            replace(part, text=f"{', '.join(dict.fromkeys(of))}: {part.text}", is_said=True)
            for part, of in names.items()
        )
        ops = {op.name: op for h in inside for op in h.ops}
        tried = Hypothesis(parts, (*ops.values(),), one.error)
        tried = replace(tried, local=self.replay.under(one.record, tried.ops, to_beat(one.error)))
        return tried if self.explains(tried, one) else None

    def read_alike(self, one: Faulty) -> Hypothesis | None:
        """A rule by which another op reads quantised blocks, where it explains a segment: one function reads all."""
        if len(one.error.segment) == 1:
            return None
        rules = (found for found in self.found if is_rule(found.ops) and found.ops[0].name not in one.error.segment)
        return next(filter(None, (self.carried(found, one) for found in rules)), None)

    def carry(self, found: Hypothesis, members: list[Faulty]) -> Iterator[tuple[Faulty, Hypothesis]]:
        """The members that what was found in one record explains too: they are taken from the list, one by one."""
        for one in [*members]:
            if same := self.carried(found, one):
                members.remove(one)
                yield one, same

    def carried(self, found: Hypothesis, one: Faulty) -> Hypothesis | None:
        """What was found in another record, where it explains this one too."""
        is_same_segment = len(one.error.segment) > 1 and any(op.name in one.error.segment for op in found.ops)
        same = (
            same
            for same in self.tried(found, one)
            if self.explains(same, one, same.may_turn)
            or (is_same_segment and self._explains_all_but_roundings(same, one))
            or (not math.isfinite(one.error.nmse) and self._makes_no_number_alike(same.ops, one.record))
        )
        return self.fewest(next(same, None), one)

    def _makes_no_number_alike(self, ops: Sequence[Op], record: OpRecord) -> bool:
        """Whether NaN and Inf are where a record has them, and its numbers as well: that speaks for nothing by itself,
        and is no contradiction to what others say.
        """
        known = self.replay.known(record, given=ops)
        return not bool(known.wrong.any() or known.recorded.isfinite().all())

    def _explains_all_but_roundings(self, tried: Hypothesis, one: Faulty) -> bool:
        """Whether what explains another step of the segment leaves next to nothing of the error, though more than
        its floor: of roundings more may turn than the samples of a floor show, and a second mistake that is in this
        step alone is larger. (K rows in another order left 3e-6 of 2.3 in a decoded token, of a floor of 8e-7; with it
        a mask of -10, which the prompt has not, was believed.)
        """
        return tried.left <= _ALL_BUT * one.error.nmse and not self._contradicted(tried, one.record)

    def tried(self, found: Hypothesis, one: Faulty) -> Iterator[Hypothesis]:
        """What explained one record tried on another, with the same numbers: they are an engine's, not an op's."""
        for way in self._ways(found, one.record):
            yield from self._tried(way, one)

    def _ways(self, found: Hypothesis, record: OpRecord) -> Iterator[Hypothesis]:
        """What it may be of a record in another step: the same, and where that has one token and reads what earlier
        steps left in a cache or a state, also made in those of several alone.
        """
        yield found
        if not found.parts[-1].tokens and self.is_of_one_token(record) and self.hands_on(record):
            yield found.of_tokens("several")

    def _tried(self, found: Hypothesis, one: Faulty) -> Iterator[Hypothesis]:
        if not self._is_carried(found, one):
            alike = [*self.trials.together(found.parts, one.record, one.error)]
            yield from alike
            if alike or len(one.error.segment) == 1:
                return
            # Its number follows from the record: of a ring, the position from which that is wrong.
        if there := carried(found, self.replay.graph, one.error.segment):
            before = math.inf if found.may_turn else to_beat(one.error)
            yield replace(there, local=self.replay.under(one.record, there.ops, before))

    def _proposed(self, found: Hypothesis, one: Faulty) -> list[Hypothesis]:
        """The same, not looked at: each has the record's error."""
        proposed = [] if self._is_carried(found, one) else self.trials.proposed(found.parts, one.record, one.error)
        alike = [Hypothesis(parts, ops, one.error) for parts, ops in proposed]
        return alike or [*filter(None, (carried(found, self.replay.graph, one.error.segment),))]

    def _is_carried(self, found: Hypothesis, one: Faulty) -> bool:
        """Whether its ops are changed in the other record as in its own, where they are not made anew."""
        fitted = any(part.fitted and part.number is None for part in found.parts)
        here = any(op.name in one.error.segment for op in found.ops)
        return here or fitted or SOLVED in found.mistakes or found.may_turn

    def unrounded(self, found: Hypothesis, one: Faulty) -> Hypothesis | None:
        """What explained others, where in the arithmetic of most engines it leaves far less of a record than roundings
        do that explain it by themselves.
        """
        under = (
            replace(h, local=local)
            for h in self._proposed(found, one)
            for local in self.replay.plainly(one.record, h.ops, one.error.nmse)
        )
        best = max((h for h in under if not h.local.faulty), key=lambda h: h.score, default=None)
        wins = best and judge(best.score - score(one.error.nmse)) == "faulty"
        return best if best and wins and (best.left <= NOTHING or not self._contradicted(best, one.record)) else None

    def chosen(self, found: list[Hypothesis]) -> Hypothesis:
        """Of what explains a record the one that explains most of its kin, then the best."""
        others = self.some
        if len(found) == 1 or not others:
            return found[0]
        return max(found, key=lambda h: self.n_explained(h, others))

    def n_explained(self, found: Hypothesis, others: Sequence[Faulty]) -> int:
        """How many other records it explains too."""
        return sum(self.carried(found, other) is not None for other in others)

    def explains_all(self, found: Hypothesis, others: Sequence[Faulty]) -> bool:
        """Whether it explains all of them; asked until one is not."""
        return all(self.carried(found, other) for other in others)

    def fewest(self, found: Hypothesis | None, one: Faulty) -> Hypothesis | None:
        """Without the mistakes that this record does not need: two that cancel, or one that shows nothing beside
        another, as a mask where all values are zero.
        """
        if found is None or SOLVED in found.mistakes:
            return found
        for n in range(1, len(found.parts)):
            for parts in combinations(found.parts, n):
                for fewer in self.trials.together(parts, one.record, one.error):
                    if (fewer.left <= NOTHING or fewer.score >= found.score) and self.explains(fewer, one):
                        return fewer
        return found

    def explains(self, tried: Hypothesis, one: Faulty, is_paid: bool = False) -> bool:
        """Whether it explains the record, and no other step contradicts it."""
        if not (self._is_nearer(tried, one) if is_paid else self.pays(tried, one)):
            return False
        in_some = tried.in_some_steps and not self._is_choice(one.record) and not self.is_handed_on(tried, one.record)
        if not in_some and self._contradicted(tried, one.record):
            return False
        return not (self._is_unlikely(tried, one) or self._is_without_table(tried, one))

    def pays(self, tried: Hypothesis, one: Faulty) -> bool:
        """Whether it is the better explanation of the record, whatever other steps say of it."""
        return tried.pays(one.error) and self._is_nearer(tried, one)

    def _is_nearer(self, tried: Hypothesis, one: Faulty) -> bool:
        """Whether it brings single values that are wrong to where the right op's noise has them, or leaves little of
        how far they were off, and does not make their bounds wider alone: sums of a few parts in bfloat16, as ranks
        have them, were taken for one in float16, which is followed less closely. (Of a norm all of whose steps are in
        bfloat16 values are off by up to 1.3 times their bounds: what left them at 0.9 was any of five other mistakes.)
        """
        if not is_of_single_values(one.error):
            return True
        right, under = (self.replay.known(one.record, given=ops) for ops in ((), tried.ops))
        before, after = ((known.recorded - known.exact)[right.wrong].square() for known in (right, under))
        bounds = right.bound[right.wrong].square()
        if after.sum() > torch.maximum(_AS_NOISE * bounds, _TOLD * before).sum():
            return False
        told = (before / torch.maximum(after, _SPREAD * bounds)).log().nan_to_num_(math.inf)
        # Of a row whose inverse root is rounded all values are off by as much: it counts as one.
        off = ((one.recorded - one.exact).square().reshape(len(one.exact), -1).sum(1) for one in (right, under))
        of_rows = torch.sub(*(squares.log() for squares in off)).nan_to_num_(0.0)
        nats = max(float(told.sum()), float(of_rows.sum())) / 2
        return nats >= (_BY_EDIT if SOLVED in tried.mistakes else _BY_KNOWN)

    def _is_without_table(self, tried: Hypothesis, one: Faulty) -> bool:
        """Whether the record is as well explained where nothing is changed but that an activation is computed, not
        looked up as ggml does, in the arithmetic that is left to it: what a mistaken op is, too.
        """
        kinds = [KINDS[op.kind] for op in tried.ops]
        if len(one.error.segment) == 1 or any(kind.scheme != "table" for kind in kinds):
            return False
        right = (self.replay.graph[op.name] for op in tried.ops)
        computed = [replace(op, function=kind.function) for op, kind in zip(right, kinds, strict=True)]
        return not self.replay.under(one.record, computed, to_beat(one.error)).faulty

    def _is_unlikely(self, tried: Hypothesis, one: Faulty) -> bool:
        """Whether roundings that turned would have to make up for what it leaves in every record with the mistake, and
        turned in none without it.

        The floor of a segment allows for a few that turn. Where it hid what a cache that wraps at 40 slots has besides
        a window of 40, that window was believed: it left 1e-4, and sound steps and layers 5e-15.
        """
        if len(one.error.segment) == 1 or tried.left <= NOTHING or tried.may_turn:
            return False
        name = local_name(one.record.op)
        alike = (x for (_, op), x in self.errors.items() if local_name(op) == name and len(x.segment) > 1)
        n_quiet = sum(x.judgement == "sound" and x.nmse <= NOTHING < x.floor for x in alike)
        if n_quiet == 0:
            return False
        others = [other for other in self.some if other != one]
        n_loud = 1 + len(others)
        is_loud = (min((same.left for same in self.tried(tried, other)), default=0.0) > NOTHING for other in others)
        return math.comb(n_quiet + n_loud, n_loud) >= _RARELY and all(is_loud)

    def hands_on(self, record: OpRecord) -> bool:
        """Whether what earlier steps made of some op is recomputed for the record, as what is in a cache."""
        return self._is_read_later({*self.replay.segment(record)}, record)

    def is_of_one_token(self, record: OpRecord) -> bool:
        """Whether its step has one."""
        return len(self.replay.trace.steps[record.step].tokens) == 1

    def is_sound_in_prompts(self, record: OpRecord) -> bool:
        """Whether the op is in steps of several tokens, of which there are some."""
        steps = self.replay.trace.steps
        several = [x for step in steps if len(steps[step].tokens) > 1 and (x := self.errors.get((step, record.op)))]
        return bool(several) and not any(x.faulty for x in several)

    def is_handed_on(self, tried: Hypothesis, record: OpRecord) -> bool:
        """Whether what it changes is read in later steps, as from a cache, within what is recomputed: then it was tried
        in the steps before as well, and cannot be said of some steps alone.
        """
        whole = record.rows is None  # then later steps read what was recorded of it
        return self._is_read_later(self._after(tried.ops, record, through_record=not whole), record)

    def _is_read_later(self, names: set[str], record: OpRecord) -> bool:
        """Whether what is recomputed for the record reads any of these of earlier steps."""
        ops = (self.replay.graph[name] for name in self.replay.segment(record))
        return any(name in names and (past or op.kind == "state") for op in ops for name, past in op.reads)

    def only_chooses(self, tried: Hypothesis, record: OpRecord) -> bool:
        """Whether it changes nothing but which experts, or groups, are chosen: of few, so many a mistake has the same
        effect.
        """
        return record.op not in self._after(tried.ops, record, through_choices=False)

    def _after(
        self, ops: Sequence[Op], record: OpRecord, through_choices: bool = True, through_record: bool = True
    ) -> set[str]:
        """These ops, and what is made of them in the same step that was not recorded, or is the record."""

        def is_recorded(name: str) -> bool:
            return (record.step, name) in self.replay.trace.ops and not (through_record and name == record.op)

        made = {op.name for op in ops if not is_recorded(op.name)}
        for op in self.replay.graph:
            if is_recorded(op.name):
                continue
            reads = any(name in made and past not in ("earlier", "before") for name, past in op.reads)
            if reads and op.kind != "state" and (through_choices or KINDS[op.kind].picks is None):
                made.add(op.name)
        return made

    def _is_choice(self, record: OpRecord) -> bool:
        return KINDS[self.replay.graph[record.op].kind].picks is not None

    def is_one_factor(self, record: OpRecord, ops: Sequence[Op] = ()) -> bool:
        """Whether it is one row of a norm, or follows from one, where these ops are changed: of most that may be wrong
        in one it has a factor, which some of thousands of edits have by chance.
        """
        graph = self.replay.graph
        kinds = {graph[op.name].kind for op in ops if op.name in graph} | {graph[record.op].kind}
        return self.is_of_one_token(record) and not kinds.isdisjoint(_NORMS)

    def is_soon_suited(self, tried: Hypothesis, record: OpRecord) -> bool:
        """Whether the record tells little of what is tried: it is one row, and that has a number; or it is a choice or
        one factor, or follows from a choice.
        """
        fitted = self.is_of_one_token(record) and any(part.fitted for part in tried.parts)
        one_factor = SOLVED in tried.mistakes and self.is_one_factor(record, tried.ops)
        return fitted or self._is_choice(record) or one_factor or self.only_chooses(tried, record)

    def _contradicted(self, tried: Hypothesis, record: OpRecord) -> bool:
        """Whether the mistake would show in another step of the op, which is as it should be, or takes that of most
        tokens further from what was recorded; what one row tells little of, whether it leaves another that is mistaken.

        To one row any factor looks like a wrong eps; in the prompt's rows that eps would show as well. An eps of 1e-3
        beside the root was "eps is 0" and "the weight is multiplied by 0.9998" in single rows.
        """
        steps = self.replay.trace.steps
        errors = {step: error for step in steps if (error := self.errors.get((step, record.op)))}
        largest = max(errors, key=lambda step: (len(steps[step].tokens), max(steps[step].positions)))
        soon_suited = self.is_soon_suited(tried, record)
        mistaken = [step for step, error in errors.items() if error.faulty and step != record.step]
        asked = {largest, *mistaken[: _OTHERS if soon_suited else 0]} & {*mistaken}
        for step, error in errors.items():
            other = self.replay.trace.ops[step, record.op]
            if not error.faulty and self.replay.under(other, tried.ops).faulty:
                return True
            if step in asked:
                under = [(self.replay.under(other, way.ops), way) for way in self._ways(tried, other)]
                local, way = min(under, key=lambda one: one[0].left)
                allowed = _TOLD if soon_suited else 1.0
                most = max(allowed * error.left, local.floor / SEGMENT_MARGIN)  # of less than noise nothing tells
                is_small = step != largest and not local.faulty  # an error, of which roundings are more than that
                # What is hidden may be chosen: then the error is infinite.
                is_further = math.isinf(local.nmse) or not local.nmse <= most
                if not is_small and is_further and not self._makes_no_number_alike(way.ops, other):
                    return True
        return False
