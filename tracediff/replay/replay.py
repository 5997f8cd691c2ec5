"""Judges the records of a trace one by one: recomputed from the trace's own inputs, in the arithmetic of the plan.

Judging is a pure function of the plan, the trace and the weights: what was judged before makes no difference.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from tracediff.model.graph import Graph, Op, Past
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import PLAIN, SCHEMES, Arithmetic, Scheme
from tracediff.numerics.buffers import in_buffer
from tracediff.numerics.evaluate import arithmetic_of, in_words_of
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.roundings import rounding_named
from tracediff.replay.plan import Choice, Plan, Planner, Sort, plain_first, settle
from tracediff.replay.recompute import Recomputation, Recomputed, made_together, picked
from tracediff.replay.recorded import Recorded
from tracediff.replay.residual import Residual, measure, turned
from tracediff.replay.score import BLIND, NOTHING, SHAPE, UNKNOWN, Explanation, judge, lead
from tracediff.replay.storage import stored_as
from tracediff.replay.strips import strips
from tracediff.result import Judgement, Local, Strip, Worst
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

_LITTLE, _HALF = 0.1, 0.5  # of the NMSE before: what leaves more is not looked at closely
# Where one large value makes most of the noise, two samples show less than a hundredth of it in one record of a
# hundred; sixteen never do. What exceeds its bound that far is beyond such accidents.
_MORE_SAMPLES, _FAR = 16, 100.0
# What an engine rounds takes it as far from the plain values as the same rounding takes replay: the squared distance
# was 0.55 to 2.8 times that in llama.cpp's records.
_AS_FAR = 5.0
_TYPED = ("linear", "linear_id", "embedding")  # kinds whose first weight has a type worth telling
_PART = 1 << 21  # values of an op that are judged at a time: 16 MB in float64, which the allocator reuses


@dataclass(frozen=True, slots=True)
class _Look:
    """A record under one scheme: what is left, what is expected to be, and what a factor or an offset would leave."""

    local: Local
    noise: float  # NMSE, as is the other
    shaped: float

    def explanations(self) -> Iterator[Explanation]:
        sound = self.local.judgement != "faulty"
        yield (
            Explanation(self.local.nmse, True, noise=self.noise)
            if sound
            else Explanation(self.local.nmse, False, UNKNOWN)
        )
        # Of next to nothing, the error of one row's sum of squares is a factor as well.
        if not (sound and self.local.nmse <= NOTHING):
            yield Explanation(self.shaped, False, SHAPE)


Looked = dict[Scheme, _Look]  # a record as it was seen


@dataclass(frozen=True, slots=True)
class Known:
    """What was recorded of an op, what it should be and how far an honest engine may be off, the op's inputs, and the
    arithmetic. All float64.
    """

    recorded: Tensor
    exact: Tensor
    bound: Tensor
    inputs: tuple[Tensor, ...]
    arithmetic: Arithmetic


class Replay:
    """Judges the records of one trace. `graph` is the model as it should be.

    Raises TraceError for positions that leave a gap.
    """

    def __init__(
        self,
        trace: Trace,
        graph: Graph,
        weights: Weights,
        pinned: Scheme | None = None,
        planned: Plan | None = None,
    ) -> None:
        """`pinned` is the only arithmetic that is considered; a `planned` one is not sought again."""
        self.trace = trace
        self.graph = graph
        self.weights = weights
        self._recorded = Recorded(trace, graph, weights.device)
        self._recomputation = Recomputation(self._recorded, graph, weights)
        self._common: tuple[OpRecord, Recomputation] | None = None
        self._planner = Planner(self._recorded, graph, weights, (pinned,) if pinned else SCHEMES)
        self._planned = planned
        if planned:
            self._recorded.on_the_way = planned.on_the_way
        self._right: Replay | None = None  # of a hypothesis: the same without it
        self._distances: dict[tuple[OpRecord, Scheme, Scheme], float] = {}
        self._amplifications: dict[tuple[OpRecord, Scheme], float] = {}
        self._looks: dict[tuple[OpRecord, Scheme], _Look] = {}

    @cached_property
    def plan(self) -> Plan:
        """The arithmetic of each sort of record: made once, from a few records of each."""
        if self._planned:
            return self._planned
        with torch.inference_mode():
            by_sort: defaultdict[Sort, list[OpRecord]] = defaultdict(list)
            for record in self._judged_records():
                by_sort[self._planner.sort(record)].append(record)
            choices = {sort: self._settled(records) for sort, records in by_sort.items()}
            return Plan(choices, self.weights.device, self._recorded.on_the_way)

    def _settled(self, records: list[OpRecord]) -> Choice:
        candidates, samples = self._planner.candidates(*records), self._planner.samples(records)
        if not all(map(self._tells, samples)):
            samples = self._planner.samples([record for record in records if self._tells(record)]) or samples
        choice = settle(candidates, samples, self)
        self._recomputation.forget()
        return replace(choice, said=self._planner.said(choice.schemes, records), n_records=len(records))

    def _tells(self, record: OpRecord) -> bool:
        """Whether a record can tell arithmetics apart: of NaN or zeros any leaves nothing, and of a first position that
        attends to itself alone a cache may be held in anything.
        """
        values = self.trace.values(record)
        return bool(self._recorded.n_tokens(record.step) > 1 and np.isfinite(values).all() and values.any())

    def _judged_records(self) -> Iterator[OpRecord]:
        """Records with data, in the trace's order of steps and the graph's of ops."""
        for step in self.trace.steps:
            for op in self.graph:
                record = self.trace.ops.get((step, op.name))
                if record is None or not record.has_data or self.trace.own(record) == []:
                    continue
                if self._recorded.can_be_made(record):
                    yield record

    @cached_property
    def records(self) -> Mapping[str, Sequence[OpRecord]]:
        """What is judged of each op, in the order of steps; ops in the graph's."""
        found: dict[str, list[OpRecord]] = {op.name: [] for op in self.graph}
        for record in self._judged_records():
            found[record.op].append(record)
        return {name: records for name, records in found.items() if records}

    def judge(self, record: OpRecord, looked: "Looked | None" = None) -> Local:
        """The record's local error under the arithmetic of its sort; of several in contention the best.

        Where every record that was asked is mistaken, a sound one among the others is asked by itself. `looked` is what
        was seen already under these schemes.
        """
        choice = self.choice(record)
        if self._planner.is_segment(record):
            return self._best_of(record, choice.schemes)
        if not choice.settled:
            return self._best_of(record, self._planner.candidates(record))
        local = self._best_of(record, choice.schemes, looked)
        return self._in_another(record, choice) or local if local.faulty else local

    def asks(self, record: OpRecord) -> Sequence[Scheme]:
        """The schemes that the record is looked at under first, whatever is seen then: with those of other traces."""
        choice = self.choice(record)
        return choice.schemes if choice.settled and not self._planner.is_segment(record) else ()

    def forget(self, all_of_it: bool = False) -> None:
        """Drop values of ops that are done."""
        self._recomputation.forget(all_of_it)

    def _in_another(self, record: OpRecord, choice: Choice) -> Local | None:
        """The record in an arithmetic that its kin have not: in another kernel's, which leaves next to nothing."""
        others = (scheme for scheme in self._planner.candidates(record) if scheme not in choice.schemes)
        locals_ = (self._closely(record, scheme).local for scheme in others)
        return next((local for local in locals_ if local.nmse <= NOTHING and local.judgement == "sound"), None)

    def choice(self, record: OpRecord) -> Choice:
        """What the plan says of the record's sort."""
        return self.plan.choices[self._planner.sort(record)]

    def _best_of(self, record: OpRecord, schemes: Sequence[Scheme], looked: "Looked | None" = None) -> Local:
        looks = [(looked or {}).get(scheme) or self._closely(record, scheme) for scheme in schemes]
        leads = lead(one for look in looks for one in look.explanations())
        judgement = judge(leads)
        blind = judgement == "sound" and all(look.local.judgement != "sound" for look in looks)
        alike = [look.local for look in looks if look.local.faulty == (judgement == "faulty")]
        return replace((alike or [looks[0].local])[0], judgement="undecided" if blind else judgement, lead=leads)

    @torch.inference_mode()
    def under(
        self, record: OpRecord, ops: Sequence[Op], before: float = math.inf, plain: Scheme | None = None
    ) -> Local:
        """The record's local error if the engine computed these ops as given: a hypothesis tried.

        `before` is the NMSE without it. What does not take nine tenths of that away is not looked at closely. Of a
        record whose arithmetic is not settled it is sought under the hypothesis, where that takes half away in the
        `plain` one: one of `plain_ones`.
        """
        before = math.inf if math.isnan(before) else before
        plain = plain or self.plain_ones(record)[0]
        scheme = plain or self.choice(record).schemes[0]
        look = self._first_look(record, ops, scheme)
        if not look.nmse <= (_HALF if plain else _LITTLE) * before:
            return look
        if plain:
            schemes = self._as_elsewhere(look.segment, self._in_reach(record, plain, look.nmse, before))
        else:
            schemes = self.choice(record).schemes
        if not schemes:
            return look
        other = self._with(ops, self._recomputation.changed(ops))
        if plain:
            found = settle(schemes, [record], other, _LITTLE * before)
            schemes = [scheme for scheme in found.schemes if other._near(record, scheme, found.nmse)]
            if found.nmse > _LITTLE * before or not schemes:
                return look
        return other._best_of(record, schemes)

    def _in_reach(self, record: OpRecord, plain: Scheme, left: float, before: float) -> Sequence[Scheme]:
        """The schemes that may leave a tenth of what was left `before`, where the `plain` one leaves so much.

        What a scheme rounds takes it only so far from the plain values (triangle inequality of the RMS).
        """
        short = math.sqrt(left) - math.sqrt(_LITTLE * before)
        candidates = self._planner.candidates(record)
        if short <= 0:
            return candidates
        return [s for s in candidates if short <= math.sqrt(_AS_FAR * self._apart(record, plain, s))]

    def _as_elsewhere(self, segment: Sequence[str], schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        """Those of the schemes that round what weights of each type are multiplied with as the trace was seen to.

        Without that, a wrong mistake was believed of experts in float32: blocks of 8 bits, which no other matmul had,
        hid what it left.
        """
        ops = (self.graph[name] for name in segment)
        types = {self.weights.type_of(op.weights[0]) for op in ops if op.weights and KINDS[op.kind].scheme == "linear"}
        seen = {(t, s.of("linear", t).operands) for sort, s in self._seen if (t := sort.types[0]) in types}
        known = {t for t, _ in seen}
        return [s for s in schemes if all((t, s.of("linear", t).operands) in seen for t in known)]

    @cached_property
    def _seen(self) -> list[tuple[Sort, Scheme]]:
        """The sorts of matmuls whose arithmetic is settled, by records of their own, and what it is."""
        settled = ((sort, one) for sort, one in self.plan.choices.items() if one.settled and sort.types)
        return [(sort, scheme) for sort, one in settled if all(sort.held) for scheme in one.schemes]

    def knowing(self, record: OpRecord, ops: Sequence[Op]) -> "Replay":
        """With the arithmetic of the record's sort as it shows under what explains the record, where none was settled.

        A mistake in every record of a sort hides in which arithmetic they were computed, until it is undone.
        """
        choice = self.choice(record)
        if choice.settled:
            return self
        found = settle(self._planner.candidates(record), [record], self._with(ops, self._recomputation.changed(ops)))
        if not found.settled:
            return self
        said = self._planner.said(found.schemes, [record])
        known = copy(self)
        sort = self._planner.sort(record)
        known.plan = Plan({**self.plan.choices, sort: replace(found, said=said, n_records=choice.n_records)})
        return known

    def plain_ones(self, record: OpRecord) -> Sequence[Scheme | None]:
        """What to look under first, one after the other; None where the arithmetic is settled."""
        choice = self.choice(record)
        if choice.settled:
            return (None,)
        elsewhere = {other.schemes[0] for other in self.plan.choices.values() if other.settled}
        return plain_first(self._planner.candidates(record), choice.schemes[0], elsewhere)

    def notes(self) -> Iterator[str]:
        """What a reader must know of how the trace was written."""
        for name, on_the_way in self._recorded.on_the_way.items():
            if on_the_way:
                yield (
                    f"{self.trace.path}: values were rounded to {rounding_named(name).words} on the way to the file, "
                    "for the engine computed with others. The floors of what reads them allow for it: write float32, "
                    "and smaller mistakes show."
                )

    def _first_look(self, record: OpRecord, ops: Sequence[Op], scheme: Scheme) -> Local:
        """Without noise, and with what is computed before these ops taken from other hypotheses."""
        unchanged = self._without_noise(record)
        unchanged.inputs(record.step, self.graph[record.op], scheme, record.rows)
        unchanged.keep_waists()
        return self._with(ops, unchanged.changed(ops, n_samples=0))._look(record, scheme).local

    def left(self, record: OpRecord, scheme: Scheme) -> float:
        """NMSE that the scheme leaves of the record, or of a part of a large one; without its noise."""
        unchanged = self._without_noise(record)
        asked = Asked(self._with((), unchanged), record, scheme)
        left = look_together([asked], self._glances_at(record))[0].local.nmse
        unchanged.keep_waists()
        return left

    def judged(self, record: OpRecord, scheme: Scheme) -> Local:
        """The record under a scheme, beside its floor; or a part of a large one."""
        if self._glances_at(record):
            return look_together([Asked(self, record, scheme)], glance=True)[0].local
        return self._closely(record, scheme).local

    def _glances_at(self, record: OpRecord) -> bool:
        """Whether a part of the record tells its arithmetic, for it is large; no hypothesis and no rank hides in it."""
        op, shape = self.graph[record.op], self._recorded.shape(record, record.rows)
        alone = self._right is None and not self._planner.is_segment(record) and self.trace.own(record) is None
        return alone and next(_parts(op, [shape])) is not None

    def reaches(self, record: OpRecord, scheme: Scheme, first: Scheme, left: float) -> bool:
        """Whether the record may be sound under the scheme, where `left` is left under the first.

        What fits leaves at most `_AS_FAR` times the distance between the two, so the first leaves no more than both
        together (triangle inequality of the RMS).
        """
        if not self._planner.is_segment(record):
            return True
        return math.sqrt(left) <= (1 + math.sqrt(_AS_FAR)) * math.sqrt(self._apart(record, first, scheme))

    def fits(self, record: OpRecord, scheme: Scheme, left: float) -> bool:
        """Whether the record is sound under the scheme.

        The noise of a segment is of what the scheme rounds: where that takes replay far less from the plain values than
        the engine is off, there is no need to look.
        """
        if self._planner.is_segment(record) and scheme not in PLAIN:
            plain = next(s for s in self._planner.candidates(record) if s not in (scheme,))
            if left > _AS_FAR * self._apart(record, plain, scheme):
                return False
        return self._near(record, scheme, left) and self.judged(record, scheme).judgement == "sound"

    def _near(self, record: OpRecord, scheme: Scheme, left: float) -> bool:
        """Whether what is left under a hypothesis may be within its floor, by that of the record without it.

        What is next to nothing may: beside values that a mistake makes far larger all roundings look less.
        """
        if self._right is None or left <= NOTHING or not self._planner.is_segment(record):
            return True
        floor = self._right.judged(record, scheme).floor
        amplified = self._amplified(record, self._planner.candidates(record)[0])
        return not amplified or left <= _AS_FAR * floor * amplified

    def _apart(self, record: OpRecord, a: Scheme, b: Scheme) -> float:
        """NMSE of the op under scheme `b` against the op under `a`.

        Under a hypothesis it is estimated: a mistake makes all roundings before it count more, or less.
        """
        key = record, a, b
        if key not in self._distances:
            right = self._right
            self._distances[key] = right._apart(*key) * self._amplified(record, a) if right else self._distance(*key)
        return self._distances[key]

    def _amplified(self, record: OpRecord, a: Scheme) -> float:
        """How many times further than without the hypothesis the coarsest scheme takes the op from scheme `a`; 0 where
        all leave it where it is.
        """
        right = self._right
        assert right is not None
        if (record, a) not in self._amplifications:
            apart = {b: right._apart(record, a, b) for b in self._planner.candidates(record)}
            coarsest = max(apart, key=lambda b: apart[b])
            measured = self._distance(record, a, coarsest) if apart[coarsest] else 0.0
            self._amplifications[record, a] = _ratio(measured, apart[coarsest])
        return self._amplifications[record, a]

    def _distance(self, record: OpRecord, a: Scheme, b: Scheme) -> float:
        op, unchanged = self.graph[record.op], self._without_noise(record)
        x, y = (unchanged.op(record.step, op, scheme, "f64", record.rows).exact for scheme in (a, b))
        unchanged.keep_waists()
        finite = x.isfinite() & y.isfinite()
        x, y = x[finite], y[finite]
        return _ratio(float((y - x).square().sum()), float(x.square().sum()))

    def _with(self, ops: Sequence[Op], recomputation: Recomputation) -> "Replay":
        other = copy(self)
        other.graph = self.graph.changed(*ops)
        other._recomputation = recomputation
        other._common, other._looks = None, {}
        if ops:
            other._right, other._distances, other._amplifications = self, {}, {}
        return other

    def _without_noise(self, record: OpRecord) -> Recomputation:
        """What hypotheses of a record have in common: they differ from it in some ops and all after these."""
        if self._common is None or self._common[0] is not record:
            self._common = record, self._recomputation.changed((), n_samples=0)
        return self._common[1]

    def known(self, record: OpRecord, scheme: Scheme | None = None) -> Known:
        """All that is known of a record's op by itself, under this arithmetic or the one that fits best."""
        op, scheme = self.graph[record.op], scheme or self.choice(record).schemes[0]
        inputs = self._recomputation.inputs(record.step, op, scheme, record.rows)
        made = self._recomputation.op(record.step, op, scheme, record.dtype or "f32", record.rows)
        read, arithmetic = tuple(value.exact for value in inputs), arithmetic_of(op, scheme, self.weights)
        recorded, bound = self._recorded.values(record).reshape(made.exact.shape), made.bound()
        hidden = self._hidden(record, op)
        if hidden is not None:
            bound = bound.masked_fill(hidden, math.inf)
        if (others := self._others(record, recorded)) is not None:
            recorded = torch.where(others, made.exact, recorded)
        return Known(recorded, made.exact, bound, read, arithmetic)

    def supposed(self, record: OpRecord, name: str, scheme: Scheme) -> Known:
        """All that is known of an op of the record's segment, as it should be: `recorded` is that too."""
        op, of = self.graph[name], self._without_noise(record)
        inputs = tuple(value.exact for value in of.inputs(record.step, op, scheme, record.rows))
        y = of.op(record.step, op, scheme, "f64", record.rows).exact
        return Known(y, y, torch.zeros_like(y), inputs, arithmetic_of(op, scheme, self.weights))

    @torch.inference_mode()
    def made(self, record: OpRecord, ops: Sequence[Op]) -> Tensor:
        """What a record would hold if the engine computed these ops as given, float64."""
        scheme = self.choice(record).schemes[0]
        other = self._recomputation.changed(ops, n_samples=0)
        op = self.graph.changed(*ops)[record.op]
        return other.op(record.step, op, scheme, record.dtype or "f32", record.rows).exact

    def held(self, step: int, name: str, past: Past) -> Tensor | None:
        """A value that the trace has of a step or of all so far, flat, or what a buffer would hold of it from earlier
        steps; None where it was not recorded.
        """
        until = self._recorded.until(step)
        steps = {False: [step], True: until, "before": until[:-1]}[past]
        if not all(self._recorded.holds((number, name, None)) for number in steps):
            return None
        values = [self._recorded.value((number, name, None)).flatten() for number in steps]
        return torch.cat(values) if past is True else in_buffer(values)

    def _closely(self, record: OpRecord, scheme: Scheme) -> _Look:
        """The record under a scheme, with noise from more samples where a few do not cover it."""
        if (record, scheme) not in self._looks:
            self._looks[record, scheme] = self._with_noise(record, scheme)
        return self._looks[record, scheme]

    def _with_noise(self, record: OpRecord, scheme: Scheme) -> _Look:
        look = self._look(record, scheme)
        if len(look.local.segment) == 1 or not look.local.faulty or look.local.excess > _FAR:
            return look
        return self._with((), self._recomputation.changed((), _MORE_SAMPLES))._look(record, scheme)

    def _look(self, record: OpRecord, scheme: Scheme) -> _Look:
        """The record under a scheme."""
        return look_together([Asked(self, record, scheme)])[0]

    def _looked(self, record: OpRecord, scheme: Scheme, storage: str, made: Recomputed, whole: Residual) -> _Look:
        """What was seen of the record; `made` is the last part of its op."""
        op = self.graph[record.op]
        nmse, noise = _ratio(whole.error, whole.signal), _ratio(whole.noise, whole.signal)
        floor = made.margin * noise
        local = Local(
            nmse=nmse,
            floor=floor,
            excess=whole.excess,
            worst=whole.worst,
            arithmetic=in_words_of(self._rounding(made.segment, storage), scheme, self.weights),
            segment=made.segment,
            judgement=_covered(nmse, floor, whole.excess),
            flips=whole.flips,
            sharpness=min(math.sqrt(floor), whole.sharpness),
            limit=NOTHING if floor > BLIND else None,
            weight_type=self.weights.type_of(op.weights[0]) if op.kind in _TYPED else None,
            stored=self._stored(storage, made.exact),
            told=self._recorded.on_the_way.get(storage) is False,
            weights_nmse=made.weights_nmse,
            one_token=len(self.trace.steps[record.step].tokens) == 1,
            strips=self._strips(op, whole),
        )
        # What tensor cores cut off of sums of one sign is a factor as well.
        shaped = whole.error if arithmetic_of(op, scheme, self.weights).truncates else whole.shaped
        return _Look(local, noise, _ratio(shaped, whole.signal))

    def _strips(self, op: Op, whole: Residual) -> tuple[Strip, ...]:
        """Where it is off; of values that attention weighted, whose heads lie side by side, by head as well."""
        if whole.excess <= 1 or self._recomputation.is_supposed:
            return ()
        names = KINDS[op.kind].axis_names(op, len(whole.along))
        heads = self.graph[op.inputs[0]].axes[0] if op.kind == "weighted_values" else None
        return strips(whole.along, names, heads if isinstance(heads, int) else None)

    def _rounding(self, segment: Sequence[str], storage: str) -> list[Op]:
        """The ops of a segment that may have rounded what they read.

        A table's rows that were rounded on the way to the file look as if the table were.
        """
        on_the_way = self._recorded.on_the_way.get(storage)
        ops = (self.graph[name] for name in segment)
        return [op for op in ops if not (on_the_way and op.kind == "embedding")]

    def _stored(self, storage: str, exact: Tensor) -> str | None:
        """The type that these values were rounded to, where that is shorter than float32 and changes them."""
        if storage not in ("f16", "bf16") or self._recorded.on_the_way[storage]:
            return None
        return None if torch.equal(rounding_named(storage)(exact), exact) else storage

    def _hidden(self, record: OpRecord, op: Op) -> Tensor | None:
        """What the causal mask hides does not count: scores, bool [T, S]. None of other ops, and without a cache."""
        masked = op.kind == "scores" and any(op.past)
        return self._recorded.hidden(record.step, record.rows) if masked else None

    def _others(self, record: OpRecord, values: Tensor, first: int = 0) -> Tensor | None:
        """Which of a record's values, or of its channels from `first` on, other ranks answer for; None for none."""
        own = self.trace.own(record)
        if own is None:
            return None
        others = torch.ones(record.shape, dtype=torch.bool, device=values.device)
        for at in own:
            others[at] = False
        if others.numel() != values.numel():
            others = others.flatten(1)[:, first : first + values.shape[-1]]
        return others.reshape(values.shape)

    def _residual(self, record: OpRecord, op: Op, recorded: Tensor, made: Recomputed, scheme: Scheme) -> Residual:
        hidden = self._hidden(record, op)
        if pick := KINDS[op.kind].picks:
            scores = self._recomputation.inputs(record.step, op, scheme, record.rows)[0]
            recorded, made = pick(scores.exact, recorded), picked(made, scores, pick)
        first = op.weights[0].first - self.graph[op.name].weights[0].first if op.kind == "linear" else 0
        others = self._others(record, recorded, first)
        residual = measure(recorded, made, hidden, self._recomputation.is_supposed, others)
        passes = residual.excess <= 1 and residual.error <= made.margin * residual.noise
        if self._recomputation.has_noise and not passes and op.kind == "linear" and len(made.segment) == 1:
            x = self._recomputation.inputs(record.step, op, scheme, record.rows)[0].exact
            other_way = turned(op, x, recorded, made, arithmetic_of(op, scheme, self.weights).operands, self.weights)
            if other_way is not None:
                residual = replace(measure(recorded, replace(made, exact=other_way[0])), flips=other_way[1])
        return replace(residual, worst=_placed(residual.worst, record, op))


@dataclass(frozen=True, slots=True)
class Asked:
    """A record to be looked at under a scheme, in the replay of its own trace."""

    replay: Replay
    record: OpRecord
    scheme: Scheme


def look_together(asked: Sequence[Asked], glance: bool = False) -> list[_Look]:
    """Records of one op, be they of several steps and traces, each under a scheme: its weight is read once for all.

    At a `glance` it is the first part of a large one.
    """
    op = asked[0].replay.graph[asked[0].record.op]
    storages: list[str] = []
    residuals: list[list[Residual]] = [[] for _ in asked]
    made: list[Recomputed] = []
    parts = _parts(op, [one.replay._recorded.shape(one.record, one.record.rows) for one in asked])
    for channels in islice(parts, 1) if glance else parts:
        part = op.channels(channels) if channels else op
        values = [one.replay._recomputation.recorded(one.record, channels) for one in asked]
        storages = storages or [stored_as(x, a.record.dtype or "f32") for x, a in zip(values, asked, strict=True)]
        made = made_together(
            part,
            [
                (one.replay._recomputation, one.record.step, one.scheme, storage, one.record.rows)
                for one, storage in zip(asked, storages, strict=True)
            ],
        )
        for one, x, y, of in zip(asked, values, made, residuals, strict=True):
            of.append(one.replay._residual(one.record, part, x, y, one.scheme))
    return [
        one.replay._looked(one.record, one.scheme, storage, last, reduce(operator.add, of))
        for one, storage, last, of in zip(asked, storages, made, residuals, strict=True)
    ]


def _covered(nmse: float, floor: float, excess: float) -> Judgement:
    """What a floor alone says."""
    if not (excess <= 1.0 and nmse <= floor):
        return "faulty"
    return "undecided" if floor > BLIND and nmse > NOTHING else "sound"


def _placed(worst: Worst, record: OpRecord, op: Op) -> Worst:
    """The coordinate in the whole output: of all its channels and of the step's tokens."""
    first = op.weights[0].first if op.kind == "linear" else 0
    return replace(worst, at=record.place((*worst.at[:-1], worst.at[-1] + first), record.rows))


def _parts(op: Op, shapes: Sequence[tuple[int, ...]]) -> Iterator[slice | None]:
    """The channels of an op's outputs in parts, where they are large and made channel by channel; None for all."""
    whole = op.kind != "linear" or op.function or op.rework or any(w.read for w in op.weights)
    n_tokens, n = sum(shape[0] for shape in shapes), shapes[0][-1]
    if whole or len(shapes[0]) != 2 or n_tokens * n <= _PART:
        yield None
        return
    step = max(1, _PART // n_tokens)
    yield from (slice(at, min(at + step, n)) for at in range(0, n, step))


def _ratio(error: float, signal: float) -> float:
    if not signal:
        return 0.0 if not error else math.inf
    return error / signal
