"""Which arithmetic fits: what each scheme leaves of records, and how far schemes take them from one another.

By the model's ops, or were some of them others: the same for a hypothesis.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median

from torch import Tensor

from tracediff.model.graph import Op
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.floats import HALVES
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.schemes import PLAIN
from tracediff.replay.few import Few
from tracediff.replay.look import Look, can_glance, glanced, look
from tracediff.replay.past import Value
from tracediff.replay.plan import Choice, Planner
from tracediff.replay.recompute import Recomputation
from tracediff.replay.score import (
    ALIKE,
    COMPOSED,
    FINE,
    MARGIN,
    NOTHING,
    RARER,
    UNKNOWN,
    UNLIKE,
    Explanation,
    judge,
    lead,
    score,
)
from tracediff.replay.terms import Terms
from tracediff.replay.ties import told as choices_told
from tracediff.result import Local
from tracediff.trace.format import OpRecord
from tracediff.trace.statistics import ratio

_PROMISING = math.log(100.0)  # of squared error: what leaves so much more of one record is not tried on the next
# Where one large value makes most of the noise, two samples show less than a hundredth of it in one record of a
# hundred; sixteen never do. What exceeds its bound that far is beyond such accidents.
_MORE_SAMPLES, _FAR = 16, 100.0
# NMSE. Through a layer float32 leaves 1e-13 and less, so a share of this is seen to its first digits.
ROUGH = 1e-8
_BEGUN = 6  # values of records that are kept: of three that choose an arithmetic, in float32 and in float64
_TOGETHER = 4096  # tokens of hypotheses that are looked at together: in attention each has all of a step
# What an engine rounds takes it as far from the plain values as the same rounding takes replay: the squared distance
# was 0.55 to 2.8 times that in llama.cpp's records.
_AS_FAR = 5.0


class Fitting:
    """The records of one trace under schemes. What was seen of a record is kept."""

    def __init__(self, recomputation: Recomputation, planner: Planner) -> None:
        self._recomputation = recomputation
        self._planner = planner
        self._common: dict[tuple[bool, bool], tuple[tuple[OpRecord, tuple[int, ...]], Recomputation]] = {}
        self._distances: dict[tuple[OpRecord, Scheme, Scheme, bool], float] = {}
        self._unexplained: dict[tuple[OpRecord, Scheme, Scheme], float] = {}
        self._begun: dict[tuple[OpRecord, Scheme, bool], Tensor] = {}
        self._lefts: dict[tuple[OpRecord, Scheme], float] = {}
        self._looks: dict[tuple[OpRecord, Scheme, bool, bool], Look] = {}
        self._in_float32: tuple[OpRecord, Recomputation] | None = None
        self._terms: dict[tuple[OpRecord, Scheme], Terms] = {}
        self._fews: tuple[tuple[Recomputation, OpRecord, Scheme], Few | None] | None = None

    def settle(
        self,
        schemes: Sequence[Scheme],
        records: Sequence[OpRecord],
        enough: float = math.inf,
        usual: Sequence[Scheme] = (),
        unlike: Sequence[Scheme] = (),
    ) -> Choice:
        """The arithmetic of these records, which share it. Where none leaves little `enough`, it is not asked what
        fits. Where none fits, one that is `usual` in the trace comes before what leaves hardly less. Those that are
        `unlike` what other records tell must leave far less than the others.

        What leaves next to nothing of one of them needs no rival. Else those that leave least of all of them are in
        contention: what an engine does not do adds an error, which the others have no part in, so it leaves more.
        """
        if len(schemes) == 1:
            return Choice(tuple(schemes), True, math.nan)
        table: dict[Scheme, list[float]] = {scheme: [] for scheme in schemes}
        seen: dict[tuple[OpRecord, Scheme], float] = {}
        for record, scheme in self._plainly(schemes, records):
            seen[record, scheme] = left = self.left(record, scheme)
            if self._needs_no_rival(record, scheme, left):
                scheme = self._finest(record, scheme, left, schemes, usual)
                return Choice((scheme,), True, self.left(record, scheme), self._unfit(records, record, scheme))
        for record in records:
            first, *others = _promising(table)
            for scheme in (first, *others):
                within = scheme is first or scheme in PLAIN or self._reaches(record, scheme, first, table[first][-1])
                known = seen.get((record, scheme)) if within else table[first][-1]  # about as much
                table[scheme].append(self.left(record, scheme) if known is None else known)
                if self._needs_no_rival(record, scheme, table[scheme][-1]):
                    scheme = self._finest(record, scheme, table[scheme][-1], schemes, usual)
                    unfit = self._unfit(records, record, scheme)
                    return Choice((scheme,), True, self.left(record, scheme), unfit)
        undivided = any(s.values.undivided and len(figures) == len(records) for s, figures in table.items())
        when_stored = median(map(self.rounded_when_stored, records)) if undivided else 0.0
        close = _close(table, len(records), unlike, when_stored)
        least = min(min(figures) for figures in table.values())
        nearest = Choice((next((s for s in close if s in usual), close[0]),), False, least, tuple(records))
        if least > enough:
            return nearest
        sound = {s: {r.op for r, left in zip(records, table[s], strict=True) if self._fits(r, s, left)} for s in close}
        if not any(sound.values()):
            return nearest
        kept = self._in_contention(sound, records, usual)
        kept += [s for s in self._likely(sound, records) if s not in kept]
        fit = {op for scheme in kept for op in sound[scheme]}
        unfit = tuple(record for record in records if record.op not in fit)
        n_ops = 2 if self._planner.is_segment(records[0]) else 1  # one segment alone may be mistaken
        alike = tuple(s for s in close if len(sound[s]) >= n_ops and s not in kept)
        return Choice(tuple(kept), True, least, unfit, alike)

    def rounded_when_stored(self, record: OpRecord) -> float:
        """The NMSE that roundings to the half precision in which a record is held make, whatever else does; 0 of one
        that is held in more.
        """
        recorded = self._recomputation.recorded
        values = recorded.values(record)
        storage = recorded.stored(record, values)
        if storage not in HALVES:
            return 0.0
        return ratio(float(rounding_named(storage).step(values).square().sum()) / 12, float(values.square().sum()))

    def _plainly(self, schemes: Sequence[Scheme], records: Sequence[OpRecord]) -> list[tuple[OpRecord, Scheme]]:
        """Segments under what most engines do, which is asked first. If the first is a mistaken layer, all that may fit
        it is sought in vain, a forward pass each: that took 6 s, where to judge all 24 layers took 5.
        """
        if not self._planner.is_segment(records[0]):
            return []
        return [(record, scheme) for record in records for scheme in schemes if scheme in PLAIN]

    def _needs_no_rival(self, record: OpRecord, scheme: Scheme, left: float) -> bool:
        return left <= NOTHING and self.fits(record, scheme)

    def _finest(
        self, record: OpRecord, scheme: Scheme, left: float, schemes: Sequence[Scheme], usual: Sequence[Scheme]
    ) -> Scheme:
        """The scheme, or what most engines do or this one elsewhere, if that leaves what float32 does: of a product
        that is next to nothing beside its bias little is left however its input is rounded.
        """
        others = (one for one in schemes if (one in PLAIN or one in usual) and left > FINE)
        return next((one for one in others if self.left(record, one) <= FINE and self.fits(record, one)), scheme)

    def _unfit(self, records: Sequence[OpRecord], fit: OpRecord, scheme: Scheme) -> tuple[OpRecord, ...]:
        """Which of these the scheme does not fit, that was found to fit one of them: asked are those before it, and one
        of each op that it may treat otherwise. Of segments, where to ask one is a pass, all where it leaves more than
        float32 does: a state in float16 did so within the floor of one step.
        """
        if self._planner.is_segment(fit):
            asked = [*records] if self.left(fit, scheme) > FINE else []
        else:
            at = records.index(fit)
            asked = [*records[:at], *self._planner.treated_otherwise(fit, records[at + 1 :])]
        return tuple(record for record in asked if self._judged(record, scheme).judgement != "sound")

    def _likely(self, sound: Mapping[Scheme, set[str]], records: Sequence[OpRecord]) -> list[Scheme]:
        """Of schemes that explain the ends of several segments, first those of most, the one that does best, for it
        expects as much as it leaves. Of one alone a mistake may be as large.

        One rounding that turns takes others with it: then an engine that rounds a lot is off as much in any arithmetic
        of as many digits, and by those that round less it is mistaken.
        """
        if not self._planner.is_segment(records[0]):
            return []

        def explained(scheme: Scheme) -> tuple[int, float]:
            ops = sound[scheme]
            looks = (self._seen(one, scheme) for one in records if one.op in ops)
            return len(ops), median(Explanation(seen.local.nmse, True, noise=seen.noise).score for seen in looks)

        return sorted((scheme for scheme, ops in sound.items() if len(ops) > 1), key=explained)[-1:]

    def _in_contention(
        self, sound: Mapping[Scheme, set[str]], records: Sequence[OpRecord], usual: Sequence[Scheme]
    ) -> list[Scheme]:
        """Of schemes that are close, best first, with the ops of which records are `sound` under each: what fits, be it
        in other records than what leaves less; and what leaves less still, though it does not fit: between these a
        record may be undecided. Of such, which a mistake makes all alike, the best and what is usual.
        """
        kept: list[Scheme] = []
        for scheme, ops in sound.items():
            covered = {op for other in kept for op in sound[other]}
            # And what most engines do, where its floor hides what it leaves: a clean run of llama.cpp through 16 layers
            # was faulty, for bfloat16 left as much, and less than that explains.
            hidden = scheme in PLAIN and not any(self._judged(record, scheme).faulty for record in records)
            is_usual = not covered and (scheme in PLAIN or scheme in usual)
            if not kept or ops - covered or hidden or is_usual:
                kept.append(scheme)
        return kept

    def best_of(self, record: OpRecord, schemes: Sequence[Scheme], looked: Mapping[Scheme, Look] = {}) -> Local:
        """The record judged under several schemes together; `looked` is what was seen already under some."""
        looks = [looked.get(scheme) or self.closely(record, scheme) for scheme in schemes]
        leads = lead(one for seen in looks for one in seen.explanations())
        judgement = judge(leads)
        blind = judgement == "sound" and all(seen.local.judgement != "sound" for seen in looks)
        alike = [seen.local for seen in looks if seen.local.faulty == (judgement == "faulty")]
        best, *others = alike or [looks[0].local]
        for other in others:  # the first is the most usual
            if judge(score(other.nmse) - score(best.nmse)) == "faulty":
                best = other
        return replace(best, judgement="undecided" if blind else judgement, lead=leads)

    def by_ties(self, record: OpRecord, schemes: Sequence[Scheme], is_sound: bool) -> Local | None:
        """The record judged so under the choices that it tells, where it lacks some; None where these do not make it
        right. One that `is_sound` already is asked where the noise makes other choices, which hide much.
        """
        told = choices_told(self._recomputation, record, schemes[0], asked=not is_sound)
        if told is None:
            return None
        local = Fitting(self._recomputation.holding(told.choices), self._planner).best_of(record, schemes)
        return replace(local, ties=told.n_tokens) if local.judgement == "sound" else None

    def of_inputs_anew(self, record: OpRecord, schemes: Sequence[Scheme], inputs: Mapping[OpRecord, Scheme]) -> Local:
        """The record judged so if the engine computed these inputs of it once more for it, each in its scheme."""
        by = self._recomputation
        anew = {(one.step, one.op, record.rows): by.anew(one, scheme) for one, scheme in inputs.items()}
        return Fitting(by.holding(anew), self._planner).best_of(record, schemes)

    def of_rounded_inputs(
        self, record: OpRecord, schemes: Sequence[Scheme], inputs: Iterable[OpRecord], to: str
    ) -> Local:
        """The record judged so if these inputs of it were rounded before it read them."""
        by, rounding = self._recomputation, rounding_named(to)
        told = {(one.step, one.op, one.rows): Value(rounding(by.values(one))) for one in inputs}
        return Fitting(by.holding(told), self._planner).best_of(record, schemes)

    def in_question(self, record: OpRecord, schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        """Under which schemes a record is judged whose arithmetic is not settled: all, or the first alone where it is
        mistaken beyond doubt under each, at a glance.
        """
        seen = (self._judged(record, scheme) for scheme in schemes)
        return schemes[:1] if all(local.faulty and local.excess > _FAR for local in seen) else schemes

    def closely(self, record: OpRecord, scheme: Scheme, glance: bool = False, rough: bool = False) -> Look:
        """The record under a scheme, with noise from more samples where a few do not cover it; at a `glance` a part; at
        a `rough` look multiplied in float32.
        """
        key = record, scheme, glance, rough
        if key not in self._looks:
            by = self._roughly(record) if rough else self._recomputation
            seen = look(by, record, scheme, glance)
            if len(seen.local.segment) > 1 and seen.local.faulty and seen.local.excess <= _FAR:
                seen = look(by.changed((), _MORE_SAMPLES), record, scheme)
            if rough:
                by.keep_waists()
            self._looks[key] = seen
        return self._looks[key]

    def _roughly(self, record: OpRecord) -> Recomputation:
        """What schemes have in common of a record, with its noise, multiplied in float32."""
        if self._in_float32 is None or self._in_float32[0] != record:
            self._in_float32 = record, self._recomputation.roughly(has_noise=True)
        return self._in_float32[1]

    def first_looks(
        self,
        record: OpRecord,
        hypotheses: Iterable[Sequence[Op]],
        scheme: Scheme,
        before: float,
        enough: float,
        given: Sequence[Op] = (),
    ) -> Iterator[tuple[Sequence[Op], Local]]:
        """The record if these ops were as each hypothesis has them, without noise; what is before them is taken from
        other hypotheses, those with the same ops `given`. Where `before` is so much that float32 can tell what is
        left of it, it is computed in that. Where a few tokens tell that more than `enough` is left, by them alone, and
        by those of many together.
        """
        common = self.without_noise(record, ROUGH < before < math.inf, given)
        common.inputs(record.step, common.op_of(record), scheme, record.rows)
        common.keep_waists()
        few = self._few(common, record, scheme) if 0 < enough < math.inf else None
        n_tokens = self._recomputation.recorded.n_tokens(record.step)
        waiting = iter(hypotheses)
        while lot := [*islice(waiting, max(1, _TOGETHER // n_tokens) if few else 1)]:
            more = [[op for op in ops if common.graph.ops.get(op.name) is not op] for ops in lot]
            looks = few.under_each(more) if few else [None] * len(lot)
            for ops, changed, seen in zip(lot, more, looks, strict=True):
                if seen and few and not (left := seen.nmse * before / few.left) <= enough:
                    yield ops, replace(seen, nmse=left)
                else:
                    yield ops, look(common.changed(changed, n_samples=0), record, scheme).local

    def _few(self, common: Recomputation, record: OpRecord, scheme: Scheme) -> Few | None:
        """The tokens of the record that hypotheses are looked at by first: found once for many."""
        of = common, record, scheme
        if self._fews is None or self._fews[0] != of:
            self._fews = of, Few.of(common, record, scheme) if self._planner.is_segment(record) else None
        return self._fews[1]

    def goes_part_of_the_way(self, record: OpRecord) -> bool:
        """Whether replay may go with the engine a part of the way only: of one token too few values would tell where.

        What half precision rounds between two hidden states turns what is rounded to eight bits after it, a row's scale
        and all. So the right scheme may leave as much as a wrong one does.
        """
        recorded = self._recomputation.recorded
        tokens = recorded.trace.steps[record.step].tokens if record.rows is None else record.rows
        if len(tokens) == 1 or not self._planner.is_segment(record):
            return False
        return recorded.stored(record, recorded.values(record)) in HALVES

    def unexplained(self, record: OpRecord, scheme: Scheme, start: Scheme) -> float:
        """What is left of the error of the `start`, as NMSE, by as much of the way from there to another scheme as
        explains most of it.

        The right scheme takes replay where the engine went by a share of the way; a wrong one's way leads nowhere. In
        float8 beside bfloat16, of a layer of 512 channels, a part done rightly had a correlation of 0.26 to 0.72 with
        the error, and of 50 others none more than 0.05.
        """
        if scheme == start:
            return self.left(record, scheme)
        key = record, scheme, start
        if key not in self._unexplained:
            self._unexplained[key] = self._rough_or_not(
                lambda rough: self._unexplained_by(self.without_noise(record, rough), *key)
            )
        return self._unexplained[key]

    def _unexplained_by(self, unchanged: Recomputation, record: OpRecord, scheme: Scheme, start: Scheme) -> float:
        x, y = self._begun_with(unchanged, record, start), self._exact(unchanged, record, scheme)
        error = (unchanged.values(record).reshape(x.shape) - x).nan_to_num(0.0, 0.0, 0.0)
        way = (y - x).nan_to_num(0.0, 0.0, 0.0)
        share = min(max(ratio(float((error * way).sum()), float(way.square().sum())), 0.0), 1.0)
        return ratio(float((error - share * way).square().sum()), float(x.nan_to_num(0.0, 0.0, 0.0).square().sum()))

    def shares_of_rows(self, record: OpRecord, scheme: Scheme, start: Scheme) -> list[float]:
        """How much of the squared error of the start another scheme leaves, of each token: multiplied in float32 as
        engines do, where that is nearer.
        """

        def of(unchanged: Recomputation) -> list[float]:
            recorded = unchanged.values(record)
            begun, made = self._begun_with(unchanged, record, start), self._exact(unchanged, record, scheme)
            before, after = ((recorded.reshape(x.shape) - x).square().flatten(1).sum(1) for x in (begun, made))
            return list(map(ratio, after.tolist(), before.tolist()))

        rough, fine = (of(self.without_noise(record, rough)) for rough in (True, False))
        return [min(pair) for pair in zip(rough, fine, strict=True)]

    def _begun_with(self, unchanged: Recomputation, record: OpRecord, start: Scheme) -> Tensor:
        """What the start makes of the record: the last few are kept, for many schemes are held against each."""
        key = record, start, unchanged.weights is not self._recomputation.weights  # in float32, or in float64
        if key not in self._begun:
            if len(self._begun) == _BEGUN:
                del self._begun[next(iter(self._begun))]
            self._begun[key] = self._exact(unchanged, record, start)
        return self._begun[key]

    def _exact(self, unchanged: Recomputation, record: OpRecord, scheme: Scheme) -> Tensor:
        op = glanced(unchanged, record) if self._glances_at(record) else unchanged.graph[record.op]
        exact = unchanged.op(record, op, scheme, "f64").exact
        unchanged.keep_waists()
        return exact

    def without_noise(self, record: OpRecord, rough: bool = False, given: Sequence[Op] = ()) -> Recomputation:
        """What hypotheses of a record have in common, ops that are `given` among it: they differ from it in some ops
        and all after these. At a `rough` look it is multiplied in float32.
        """
        key, of = (rough, bool(given)), (record, tuple(map(id, given)))
        if key not in self._common or self._common[key][0] != of:
            if given:
                common = self.without_noise(record, rough).changed(given, n_samples=0)
            else:
                common = self._recomputation.roughly() if rough else self._recomputation.changed((), n_samples=0)
            self._common[key] = of, common
        return self._common[key][1]

    def in_reach(self, record: OpRecord, plain: Scheme, left: float, enough: float) -> Sequence[Scheme]:
        """The schemes that may leave no more than `enough`, where the `plain` one leaves so much.

        What a scheme rounds takes it only so far from the plain values (triangle inequality of the RMS).
        """
        short, candidates = math.sqrt(left) - math.sqrt(enough), self._planner.candidates(record)
        if short <= 0:
            return candidates
        least = short**2 / _AS_FAR
        return [s for s in candidates if self._apart(record, plain, s, least) >= least]

    def refutes(self, record: OpRecord, start: Scheme, scheme: Scheme) -> bool:
        """Whether a part of what is added up to the end of a segment tells that the scheme, which differs from the
        start, leaves no less than that does.
        """
        if not self._planner.is_segment(record):
            return False
        if (record, start) not in self._terms:
            unchanged = self.without_noise(record, rough=True)
            self._terms[record, start] = Terms(unchanged, record, start)
            unchanged.keep_waists()
        return self._terms[record, start].refute(scheme)

    def is_near(self, record: OpRecord, a: Scheme, b: Scheme, within: float) -> bool:
        """Whether what fits under scheme `b` leaves no more than so much under scheme `a`."""
        return self._apart(record, a, b, within / _AS_FAR) <= within / _AS_FAR

    def fits(self, record: OpRecord, scheme: Scheme) -> bool:
        """Whether the record is sound under the scheme."""
        return self._judged(record, scheme).judgement == "sound"

    def is_faulty(self, record: OpRecord, scheme: Scheme) -> bool:
        """Whether the record is mistaken under the scheme."""
        return self._judged(record, scheme).faulty

    def is_as_good(self, scheme: Scheme, other: Scheme, record: OpRecord) -> bool:
        """Whether the record is sound under the scheme, which leaves about as little of it as the other, or next to
        nothing.
        """
        if self.left(record, scheme) > max(NOTHING, ALIKE * self.left(record, other)):
            return False
        return self.fits(record, scheme)

    def left(self, record: OpRecord, scheme: Scheme) -> float:
        """NMSE that the scheme leaves of the record, or of a part of a large one; without its noise, but for what most
        engines do: there it is asked next whether that is within the floor.
        """
        if (record, scheme) not in self._lefts:
            self._lefts[record, scheme] = self._left(record, scheme)
        return self._lefts[record, scheme]

    def _left(self, record: OpRecord, scheme: Scheme) -> float:
        if self._planner.is_segment(record):
            return self._rough_or_not(lambda rough: self._left_by(self.without_noise(record, rough), record, scheme))
        if scheme in PLAIN:
            return self._judged(record, scheme).nmse
        return self._left_by(self.without_noise(record), record, scheme)

    def _left_by(self, unchanged: Recomputation, record: OpRecord, scheme: Scheme) -> float:
        left = look(unchanged, record, scheme, self._glances_at(record)).local.nmse
        unchanged.keep_waists()
        return left

    def _rough_or_not(self, nmse: Callable[[bool], float], least: float = 0.0) -> float:
        """What float32 can tell, a `rough` look, and else what float64 does; of what is less than the `least` that is
        asked for it is not told how much less.
        """
        rough = nmse(True)
        return rough if rough > ROUGH or least > ROUGH else nmse(False)

    def _judged(self, record: OpRecord, scheme: Scheme) -> Local:
        """The record under a scheme, beside its floor; or a part of a large one."""
        return self._seen(record, scheme).local

    def _seen(self, record: OpRecord, scheme: Scheme) -> Look:
        """The same with its noise: of a segment, whose every look is a pass, as float32 tells it where that can."""
        rough = self._planner.is_segment(record) and self.left(record, scheme) > ROUGH
        return self.closely(record, scheme, self._glances_at(record), rough)

    def _glances_at(self, record: OpRecord) -> bool:
        """Whether a part of the record tells its arithmetic; no rank hides in it."""
        alone = not self._planner.is_segment(record) and self._recomputation.recorded.trace.own(record) is None
        return alone and can_glance(self._recomputation, record)

    def _reaches(self, record: OpRecord, scheme: Scheme, first: Scheme, left: float) -> bool:
        """Whether the record may be sound under the scheme, where `left` is left under the first.

        What fits leaves at most `_AS_FAR` times the distance between the two, so the first leaves no more than both
        together (triangle inequality of the RMS).
        """
        if not self._planner.is_segment(record):
            return True
        least = left / (1 + math.sqrt(_AS_FAR)) ** 2
        return self._apart(record, first, scheme, least) >= least

    def _fits(self, record: OpRecord, scheme: Scheme, left: float) -> bool:
        """Whether the record is sound under the scheme.

        The noise of a segment is of what the scheme rounds: where that takes replay far less from the plain values than
        the engine is off, but for what was rounded when it was stored, there is no need to look.
        """
        if self._planner.is_segment(record) and scheme not in PLAIN:
            plain = next(other for other in self._planner.candidates(record) if other != scheme)
            off = max(0.0, left - self.rounded_when_stored(record))
            if self._apart(record, plain, scheme, off / _AS_FAR) < off / _AS_FAR:
                return False
        return self.near(record, scheme, left) and self.fits(record, scheme)

    def near(self, record: OpRecord, scheme: Scheme, left: float) -> bool:
        """Whether what is left may be within the floor, as far as may be told without a look: of a hypothesis."""
        return True

    def _apart(self, record: OpRecord, a: Scheme, b: Scheme, least: float = 0.0) -> float:
        """NMSE of the op under scheme `b` against the op under `a`, so far as the `least` that is asked for wants it:
        float64 took half the time in which an arithmetic was sought.
        """
        return self._rough_or_not(lambda rough: self._distance(record, a, b, rough), least)

    def _distance(self, record: OpRecord, a: Scheme, b: Scheme, rough: bool) -> float:
        """The same as float32 tells it, or as float64 does."""
        key = record, a, b, rough
        if key not in self._distances:
            unchanged = self.without_noise(record, rough)
            x, y = self._begun_with(unchanged, record, a), self._exact(unchanged, record, b)
            finite = x.isfinite() & y.isfinite()
            x, y = x[finite], y[finite]
            self._distances[key] = ratio(float((y - x).square().sum()), float(x.square().sum()))
        return self._distances[key]


class Supposed(Fitting):
    """The same, if the engine computed some ops as given: a hypothesis, beside what is `right`.

    A mistake makes all roundings before it count more, or less: how far schemes are apart is estimated.
    """

    def __init__(self, right: Fitting, ops: Sequence[Op]) -> None:
        super().__init__(right._recomputation.changed(ops), right._planner)
        self._right = right
        self._amplifications: dict[tuple[OpRecord, Scheme], float] = {}

    def near(self, record: OpRecord, scheme: Scheme, left: float) -> bool:
        """By the floor of the record without the hypothesis.

        What is next to nothing may: beside values that a mistake makes far larger all roundings look less.
        """
        if left <= NOTHING or not self._planner.is_segment(record):
            return True
        floor = self._right._judged(record, scheme).floor
        amplified = self._amplified(record, self._planner.candidates(record)[0])
        return not amplified or left <= _AS_FAR * floor * amplified

    def _glances_at(self, record: OpRecord) -> bool:
        return False

    def _apart(self, record: OpRecord, a: Scheme, b: Scheme, least: float = 0.0) -> float:
        amplified = self._amplified(record, a)
        return self._right._apart(record, a, b, ratio(least, amplified)) * amplified

    def _amplified(self, record: OpRecord, a: Scheme) -> float:
        """How many times further than without the hypothesis the coarsest scheme takes the op from scheme `a`; 0 where
        all leave it where it is.
        """
        if (record, a) not in self._amplifications:
            apart = {b: self._right._apart(record, a, b) for b in self._planner.candidates(record)}
            coarsest = max(apart, key=lambda b: apart[b])
            measured = super()._apart(record, a, coarsest) if apart[coarsest] else 0.0
            self._amplifications[record, a] = ratio(measured, apart[coarsest])
        return self._amplifications[record, a]


def _promising(table: Mapping[Scheme, list[float]]) -> list[Scheme]:
    """All schemes for the first record; for the next those that left about as little of it as the best did."""
    scores = {scheme: median(map(score, figures)) for scheme, figures in table.items() if figures}
    if not scores:
        return [*table]
    return [scheme for scheme in scores if scheme in PLAIN or scores[scheme] >= max(scores.values()) - _PROMISING]


def _close(
    table: Mapping[Scheme, list[float]],
    n_records: int,
    unlike: Sequence[Scheme],
    when_stored: float,
) -> list[Scheme]:
    """Those that were asked of all records and leave about as little as the best does, which comes first; of what they
    leave so much was rounded `when_stored`.
    """
    left = {scheme: median(figures) for scheme, figures in table.items() if len(figures) == n_records}
    places = {scheme: place for place, scheme in enumerate(table)}
    scores = {s: score(of) - RARER * places[s] - UNLIKE * (s in unlike) for s, of in left.items()}
    plain = max((score(max(0.0, left[s] - when_stored)) for s in left if s in PLAIN), default=-math.inf)
    scores = {
        s: own
        for s, own in scores.items()
        if not s.values.undivided or score(max(0.0, left[s] - when_stored)) >= plain + COMPOSED
    }
    best = max(scores.values())
    return sorted((s for s in scores if scores[s] >= best - UNKNOWN - MARGIN), key=lambda s: -scores[s])
