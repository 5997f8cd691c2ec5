"""How the plan is made: the arithmetic of each sort of record, settled by a few records of it."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec import structs

from tracediff.names import layer_of, layers_of, local_name
from tracediff.numerics.arithmetic import EXPONENTIAL, Scheme
from tracediff.numerics.floats import HALVES
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.roundings import is_calibrated, rounding_named
from tracediff.numerics.schemes import (
    EXACTLY,
    FINE_WAYS,
    IN_HALF,
    PLAIN,
    Way,
    beside,
    in_tf32,
    unlisted,
    unrounded,
)
from tracediff.replay.calibrating import Calibrating
from tracediff.replay.composing import Composing
from tracediff.replay.fitting import Fitting
from tracediff.replay.operands import tells_rounding, ways_told
from tracediff.replay.plan import Choice, Plan, Planner, Sort
from tracediff.replay.recompute import Recomputation
from tracediff.replay.score import COMPOSED, FINE, IN_ROWS, NOTHING, UNLIKE, score
from tracediff.trace.format import OpRecord

# Of fewer values one of some fifty arithmetics leaves next to nothing by chance: of one value in bfloat16, which is a
# step of 4e-3 wide, 3e-5 of it every other time; of four one time in ten million.
_VALUES = 4
# Values, and tokens at least, of a segment that tell its arithmetic. A step to it takes little away, as much as chance
# does of few: of 4,096 values a right engine in q8_0 blocks with a cache in float8 was not followed, of 8,192 it was.
_PART, _PART_TOKENS = 1 << 15, 32
# Values of weights that a layer reads: of 15 million to try mistakes took 12 s and to compose 100, of 0.1 million 10
# and 5.
_DEAR = 1 << 21
_TOLD = 4  # matmuls that are asked what they multiplied, where none tells: all of an engine's round alike
_ROUNDS = 2  # times that arithmetic is composed with what other sorts told, be it by what was composed for them


IsMistaken = Callable[[Mapping[Sort, Choice], OpRecord], bool]  # by what is chosen so far


class Known(NamedTuple):
    """What some sort of record tells: that a part is done in one of these ways."""

    part: str
    ways: Sequence[Way]
    surely: bool  # by records of their own, of which it leaves next to nothing
    usual: bool
    nmse: float
    half_table: bool  # by a table in half precision, which who multiply in eight bits leave as it is


class Elsewhere(NamedTuple):
    """What ops of some name and types do in steps of other sizes, where that is settled."""

    sole: Sequence[Scheme]  # of those that have one arithmetic, which fits all
    longer: Sequence[Choice]  # of segments: in longer steps, the longest first, which tell most
    by_op: Mapping[str, Sequence[Scheme]]  # of ops that have a scale each, in the longest steps


class Planning:
    """Makes the plan of one trace."""

    def __init__(self, recomputation: Recomputation, planner: Planner, fitting: Fitting) -> None:
        self._recomputation, self._planner, self._fitting = recomputation, planner, fitting
        self._calibrating = Calibrating(recomputation, fitting)

    def plan(self, records: Iterable[OpRecord], is_mistaken: IsMistaken) -> Plan:
        """The arithmetic of each sort of these records. None is composed of those of which one that nothing fits
        `is_mistaken`.
        """
        by_sort: defaultdict[Sort, list[OpRecord]] = defaultdict(list)
        for record in records:
            by_sort[self._planner.sort(record)].append(record)
        choices = {sort: self._settled(alike) for sort, alike in by_sort.items()}
        self._settle_as_others(choices, by_sort)
        choices = {
            sort: self._as_on_gpus(choice, by_sort[sort], _elsewhere(sort, choices).sole)
            for sort, choice in choices.items()
        }
        self._compose(choices, by_sort, is_mistaken)
        self._solve_alike(choices, by_sort)
        self._calibrate(choices, by_sort)
        choices = {sort: self._of_fine_ways(choice, by_sort[sort]) for sort, choice in choices.items()}
        choices = {
            sort: self._as_in_prompts(choice, by_sort[sort], _elsewhere(sort, choices))
            for sort, choice in choices.items()
        }
        choices = {sort: self._without_tables(choice, by_sort[sort]) for sort, choice in choices.items()}
        choices = {sort: self._finished(choice, by_sort[sort]) for sort, choice in choices.items()}
        return Plan(choices, self._recomputation.weights.device, self._recomputation.recorded.on_the_way)

    def _settle_as_others(self, choices: dict[Sort, Choice], by_sort: Mapping[Sort, list[OpRecord]]) -> None:
        """Once more with what other sorts tell, where it is otherwise."""
        settled = [(sort.name, choice.schemes[0]) for sort, choice in choices.items() if choice.settled]
        known = self._known(choices, by_sort)
        for sort, choice in choices.items():
            usual = () if choice.settled else self._as_others(by_sort[sort][0], settled)
            unlike = self._unlike(self._planner.candidates(*by_sort[sort]), by_sort[sort], known)
            if (usual and choice.schemes[0] not in usual) or any(scheme in unlike for scheme in choice.schemes):
                choices[sort] = self._settled(by_sort[sort], usual, unlike)

    def _compose(
        self, choices: dict[Sort, Choice], by_sort: Mapping[Sort, list[OpRecord]], is_mistaken: IsMistaken
    ) -> None:
        """What is not listed, of each sort; again where other sorts, composed meanwhile, tell what it does not do.

        Not of segments that one known mistake explains: to compose takes many passes (of a model of half a billion
        weights whose rope had another base in all layers two minutes, where the mistake was found in a quarter of one).
        Of small layers that is asked where composing takes long, or steps of another size are mistaken.
        """
        mistaken: dict[Sort, bool] = {}

        def is_known(sort: Sort) -> bool:
            if sort not in mistaken:
                mistaken[sort] = self._is_mistaken(choices[sort], by_sort[sort], choices, is_mistaken)
            return mistaken[sort]

        heard: dict[Sort, set[tuple[Way | Scheme, bool]]] = {}
        by_themselves = {sort for sort in choices if all(sort.held)}  # which tell segments, where a step is a pass
        for sorts in (by_themselves, choices.keys() - by_themselves) * _ROUNDS:
            known = self._known(choices, by_sort)
            told: set[tuple[Way | Scheme, bool]] = {(one.ways[0], one.surely) for one in _best(known).values()}
            for sort in sorted(filter(sorts.__contains__, choices), key=lambda sort: -sort.n_tokens):  # these tell most
                choice, elsewhere = choices[sort], _elsewhere(sort, choices)
                in_longer = (scheme for other in elsewhere.longer for scheme in other.schemes)
                hears = told | {(scheme, False) for scheme in (*elsewhere.sole, *in_longer)}
                if sort not in heard or not all(_does(choice, one) for one, _ in hears - heard[sort]):
                    likely = any(mistaken.get(other) for other in filter(sort.is_but_for_tokens, mistaken))
                    if (likely or self._is_dear(by_sort[sort])) and is_known(sort):
                        continue
                    if elsewhere.longer:
                        choice = self._behind_prompts(choice, by_sort[sort], _in_prompts(choices))
                    choices[sort] = self._composed(choice, by_sort[sort], known, elsewhere, partial(is_known, sort))
                heard[sort] = hears

    def _is_dear(self, records: list[OpRecord]) -> bool:
        """Whether to try all mistakes, many together and by a few tokens, takes less than to compose an arithmetic."""
        return self._recomputation.graph.weight_values(self._recomputation.segment(records[0])) >= _DEAR

    def _is_mistaken(
        self, choice: Choice, records: list[OpRecord], choices: Mapping[Sort, Choice], is_mistaken: IsMistaken
    ) -> bool:
        """Whether of layers that nothing fits the one that is off by about as much as most is mistaken."""
        is_layer = len(layers_of(self._recomputation.segment(records[0]))) <= 1
        if choice.settled or not self._planner.is_segment(records[0]) or not is_layer:
            return False
        samples = sorted(self._samples(records), key=lambda record: self._fitting.left(record, choice.schemes[0]))
        found = is_mistaken(choices, samples[(len(samples) - 1) // 2])
        self._recomputation.forget()
        return found

    def _calibrate(self, choices: dict[Sort, Choice], by_sort: Mapping[Sort, list[OpRecord]]) -> None:
        """Caches and activations by scales of their own, where nothing else fits."""
        for sort in sorted(choices, key=lambda sort: -sort.n_tokens):  # the longest steps tell most
            if not choices[sort].settled:
                in_longer = _elsewhere(sort, choices).by_op
                choices[sort] = self._calibrating.calibrated(choices[sort], by_sort[sort], in_longer)
                self._recomputation.forget()

    def _settled(self, records: list[OpRecord], usual: Sequence[Scheme] = (), unlike: Sequence[Scheme] = ()) -> Choice:
        """By what is listed."""
        candidates = self._planner.candidates(*records)
        samples = self._samples(records) if len(candidates) > 1 else records
        choice = self._as_rows_say(self._fitting.settle(candidates, samples, usual=usual, unlike=unlike), samples)
        self._recomputation.forget()
        return choice

    def _as_rows_say(self, choice: Choice, samples: Sequence[OpRecord]) -> Choice:
        """Of a table that is recorded in half precision what its rows are to the bit: its bounds have room for others,
        as for scales in float32 where they are in half precision.
        """
        scheme, record = choice.schemes[0], samples[0]
        is_table = self._recomputation.op_of(record).kind == "embedding" and record.dtype in HALVES
        if not is_table or not rounding_named(scheme.held).in_blocks:
            return choice
        told = [way.of(scheme) for way in ways_told(self._recomputation, record, scheme)[:1]]
        found = self._fitting.settle(told, samples) if told and told[0] != scheme else choice
        return found if found.settled else choice

    def _known(self, choices: Mapping[Sort, Choice], by_sort: Mapping[Sort, Sequence[OpRecord]]) -> Sequence[Known]:
        """How the engine does parts, as far as sorts tell. First what leaves next to nothing, of such what does other
        than most engines do: who quantise all else may leave a head or a table as it is.
        """
        known = []
        for sort, choice in choices.items():
            if choice.settled and len(choice.schemes) == 1:
                own = self._planner.arithmetic(by_sort[sort][0], choice.schemes[0])
                half_table = sort.name == "embedding" and own.stored in HALVES
                surely = choice.nmse <= (NOTHING if all(sort.held) else FINE)
                for part, ways in self._planner.told(choice.schemes[0], *by_sort[sort]).items():
                    usual = any(way.is_of(scheme) for way in ways for scheme in PLAIN)
                    known.append(Known(part, ways, surely, usual, choice.nmse, half_table))
        return sorted(known, key=lambda one: (not one.surely, one.usual, one.nmse))

    def _unlike(
        self, schemes: Iterable[Scheme], records: Sequence[OpRecord], known: Sequence[Known]
    ) -> Sequence[Scheme]:
        """Of segments the schemes that do a part of them in none of the ways that are surely known of it. Vectors are
        cast one by one: RWKV's own has those of decays in float32 among others in bfloat16.
        """
        if not self._planner.is_segment(records[0]):
            return ()
        ways: defaultdict[str, set[Way]] = defaultdict(set)
        for one in known:
            ways[one.part] |= set(one.ways if one.surely and one.part != "vectors" else ())
        sure = [of_part for of_part in ways.values() if of_part]

        def is_done_so(scheme: Scheme, ways: Iterable[Way]) -> bool:
            return any(way.is_of(scheme) or self._planner.is_alike(way.of(scheme), scheme, *records) for way in ways)

        return [scheme for scheme in schemes if not all(is_done_so(scheme, of_part) for of_part in sure)]

    def _composed(
        self,
        choice: Choice,
        records: list[OpRecord],
        known: Sequence[Known],
        elsewhere: Elsewhere,
        is_mistaken: Callable[[], bool],
    ) -> Choice:
        """Where nothing usual fits, or not one thing, or leaves more than next to nothing: parts that are done in ways
        of other engines, or weights that the engine quantised by itself, be it but for the head; from the nearest, and
        from that with what other sorts told; or what the same ops do in steps of other sizes.
        """
        samples, nearest = self._samples(records), choice.schemes[0]
        starts, as_told = [nearest], EXACTLY
        if choice.nmse > NOTHING:
            best = _best(known)
            as_told = reduce(lambda scheme, one: one.ways[0].of(scheme), best.values(), EXACTLY)
            told = [as_told]
            if (half := records[0].dtype) in HALVES:  # then what is held in integers is read in it, as activations are
                others = (one for part, one in best.items() if part != "activations")
                told.append(reduce(lambda scheme, one: one.ways[0].of(scheme), others, IN_HALF[half]))
            starts = [*self._planner.suiting((nearest, *told), *records)]
        doubtful = (len(choice.schemes) > 1 or len(starts) > 1) and not choice.by_op
        asked = choice.unfit or (samples if doubtful else ())
        through_segments = self._planner.is_segment(records[0])
        if asked and through_segments:
            asked = samples  # of which one that nothing fits may be the mistaken one
        if not asked or not self._is_short(asked[0]):
            return choice
        of_others = [one for one in known if not one.half_table]

        def is_like(scheme: Scheme) -> bool:
            return not self._unlike([scheme], records, of_others)

        in_longer = {scheme for one in elsewhere.longer for scheme in one.schemes}  # of which it was asked there

        def is_refused(found: Choice) -> bool:
            if found.schemes[0] in in_longer or is_like(found.schemes[0]):
                return False
            return score(found.nmse, UNLIKE) <= score(choice.nmse) and not self._is_told_by_rows(found, nearest, asked)

        found = self._solved(asked, starts, as_told, records, elsewhere)
        if not found.settled:
            found = Composing(self._fitting, self._planner, asked, is_mistaken).composed(
                starts, elsewhere.sole, elsewhere.longer
            )
        if is_refused(found):
            likely = Composing(self._fitting, self._planner, asked, is_mistaken, is_like)
            begun = [*filter(is_like, starts)] or starts
            found = likely.composed(begun, elsewhere.sole, elsewhere.longer)
        self._recomputation.forget()
        if not found.settled or is_refused(found):
            return choice
        whole = self._beside(choice, found, samples, records) if choice.settled and choice.unfit else found
        again = 0 < len(found.unfit) < len(asked) and not through_segments
        return self._composed(whole, records, known, elsewhere, is_mistaken) if again else whole

    def _solved(
        self,
        asked: Sequence[OpRecord],
        starts: Sequence[Scheme],
        as_told: Scheme,
        records: list[OpRecord],
        elsewhere: Elsewhere,
    ) -> Choice:
        """Activations rounded as what came out of the first matmul that tells it says, where no start fits, and a table
        as its rows say; other ops and segments `as_told` so by those, and as such engines do.
        """
        nothing = Choice((starts[0],), False, math.nan)
        if elsewhere.by_op:
            return self._calibrating.calibrated(nothing, records, elsewhere.by_op)
        if not tells_rounding(self._recomputation, asked[0]):
            told = self._planner.suiting((as_told, *beside(as_told)), *asked) if unlisted(as_told) else ()
            return self._fitting.settle((*told, starts[0]), asked) if told else nothing
        unfit = (one for one in asked if not any(self._fitting.fits(one, start) for start in starts))
        for record in islice(unfit, _TOLD):
            # One for each way in which matrices are held.
            by_matrices = {self._planner.arithmetic(record, start).stored: start for start in reversed(starts)}
            for start in reversed(by_matrices.values()):
                ways = ways_told(self._recomputation, record, start)
                likely = self._planner.suiting([way.of(start) for way in ways], *asked)
                if likely:  # one record may not tell two of them apart
                    best = max(likely, key=lambda scheme: sum(self._fitting.fits(one, scheme) for one in asked))
                    has_its_own = any(is_calibrated(scheme.linear.operands) for scheme in likely)
                    if has_its_own and not all(self._fitting.fits(one, best) for one in asked):
                        return self._calibrating.calibrated(replace(nothing, schemes=(start,)), records, {})
                    return self._fitting.settle((best, *starts), asked, usual=(best,))
        return nothing

    def _solve_alike(self, choices: dict[Sort, Choice], by_sort: Mapping[Sort, list[OpRecord]]) -> None:
        """What was solved for some sort holds for others where it is as good: whether -128 is among the integers is
        told by few.
        """
        sole = {sort: choice.schemes[0] for sort, choice in choices.items() if len(choice.schemes) == 1}
        solved = {sort: unlisted(scheme) for sort, scheme in sole.items() if choices[sort].settled}
        ways = [*dict.fromkeys(way for of in solved.values() for way in of)]
        for sort, own in solved.items():
            scheme, parts = sole[sort], {way.part for way in own}
            others = [way.of(scheme) for way in ways if way.part in parts and way not in own]
            samples = self._samples(by_sort[sort]) if others else []
            alike = (one for one in others if all(self._fitting.is_as_good(one, scheme, of) for of in samples))
            choices[sort] = replace(choices[sort], schemes=(next(alike, scheme),))

    def _of_fine_ways(self, choice: Choice, records: list[OpRecord]) -> Choice:
        """In one of the ways that make so little of a difference, if it leaves far less: without it no rival is asked
        for, and of few keys what is left is within the floor.
        """
        if len(choice.schemes) > 1 or choice.by_op or not FINE < choice.nmse <= NOTHING:
            return choice
        (scheme,), samples = choice.schemes, self._samples(records)
        fine = {way.of(scheme) for way in FINE_WAYS if not way.is_of(scheme)}
        others = (one for one in self._planner.changes((scheme,), *records) if one in fine)
        found = next((one for one in others if all(self._is_far_nearer(one, scheme, of) for of in samples)), None)
        self._recomputation.forget()
        if found is None:
            return choice
        left = min(self._fitting.left(one, found) for one in samples)
        return replace(choice, schemes=(found,), settled=True, nmse=left, unfit=())

    def _without_tables(self, choice: Choice, records: list[OpRecord]) -> Choice:
        """Looking nothing up, where that is as good: of GELU that is recorded in bfloat16 a table of float16 shows in
        few values, and ggml alone has one.
        """
        others = {scheme: self._planner.without_tables(scheme, *records) for scheme in choice.schemes}
        if choice.by_op or not any(others.values()):
            return choice
        samples = self._samples(records)

        def is_as_good(other: Scheme, scheme: Scheme) -> bool:
            good = all(self._fitting.is_as_good(other, scheme, record) for record in samples)
            return good and not any(self._is_far_nearer(scheme, other, record) for record in samples)

        plainest = (next((o for o in of if is_as_good(o, scheme)), scheme) for scheme, of in others.items())
        schemes = tuple(dict.fromkeys(plainest))
        self._recomputation.forget()
        return replace(choice, schemes=schemes)

    def _is_far_nearer(self, scheme: Scheme, other: Scheme, record: OpRecord) -> bool:
        """Whether the record is sound under the scheme, which leaves far less of it than the other."""
        left, before = (self._fitting.left(record, one) for one in (scheme, other))
        return score(left, COMPOSED) > score(before) and self._fitting.fits(record, scheme)

    def _is_told_by_rows(self, found: Choice, nearest: Scheme, records: Sequence[OpRecord]) -> bool:
        """Whether next to nothing is left of some rows, whatever turned in others."""
        shares = [x for of in records for x in self._fitting.shares_of_rows(of, found.schemes[0], nearest)]
        few = sorted(shares)[: 1 + len(shares) // IN_ROWS]
        return score(few[-1]) >= UNLIKE

    def _behind_prompts(self, choice: Choice, records: list[OpRecord], in_prompts: Sequence[Scheme]) -> Choice:
        """Single tokens that are not multiplied as prompts are, but read K and V of these, in one of the arithmetics
        that sorts of prompts told: where that leaves less. What an engine does there alone is to round activations, as
        a rule.
        """
        if not self._is_of_single_tokens(records) or (choice.settled and not choice.nmse > NOTHING):
            return choice
        prompts = self._planner.suiting(in_prompts, *records)
        own = dict.fromkeys((choice.schemes[0], EXACTLY))
        schemes = [replace(scheme, prompts=other) for scheme in own for other in prompts if other != scheme]
        schemes += [replace(unrounded(other), prompts=other) for other in prompts]
        found = self._fitting.settle([*schemes, choice.schemes[0]], self._samples(records))
        self._recomputation.forget()
        return found if score(found.nmse, COMPOSED) > score(choice.nmse) else choice

    def _as_on_gpus(self, choice: Choice, records: list[OpRecord], in_other_steps: Sequence[Scheme]) -> Choice:
        """Matmuls of float32 in shorter operands as GPUs make them: of some ops, by their shapes, with sums on tensor
        cores; and in TF32 where float16 is as good, if there are any or steps of other sizes are in neither, for cuBLAS
        multiplies single tokens in float32.
        """
        record, scheme = records[0], choice.schemes[0]
        own = self._planner.arithmetic(record, scheme)
        if record.dtype != "f32" or choice.by_op or not own.suits_tensor_cores:
            return choice
        if self._planner.is_segment(record):
            return self._in_what_fits_all(choice, records)
        by_name: dict[str, list[OpRecord]] = {}
        for sample in self._samples(records):
            by_name.setdefault(local_name(sample.op), []).append(sample)
        alike = in_tf32(scheme) if own.operands == "f16" else []
        cut_off = {name: [one for one in of if self._is_cut_off(one, scheme)] for name, of in by_name.items()}
        whole = {name for name, of in by_name.items() if len(cut_off[name]) == len(of)}
        there = {name: self._on_tensor_cores(of, (*alike, scheme)) for name, of in cut_off.items() if name in whole}
        if any(there.values()):  # then a mistake may be in one of an op's records
            some = {name: of for name, of in cut_off.items() if of and name not in whole}
            there |= {name: self._on_tensor_cores(of, (*alike, scheme)) for name, of in some.items()}
        others = [one for name, of in by_name.items() if not there.get(name) for one in of]
        fits = [one for one in others if alike and self._fitting.fits(one, scheme)]
        elsewhere = {self._planner.arithmetic(record, other).operands for other in in_other_steps}
        if fits and (any(there.values()) or "f64" in elsewhere):
            as_good = (one for one in alike if all(self._fitting.is_as_good(one, scheme, of) for of in fits))
            scheme = next(as_good, scheme)
        left = (scheme, *choice.schemes[1:])
        found = {name: (one,) if (one := there.get(name)) else left for name in by_name}
        if not any(there.values()):
            return replace(choice, schemes=left)
        schemes = dict.fromkeys(one for of in found.values() for one in of)
        unfit = tuple(one for one in choice.unfit if not there.get(local_name(one.op)))
        return replace(choice, schemes=(*schemes,), settled=True, unfit=unfit, by_op=found if others else {})

    def _in_what_fits_all(self, choice: Choice, records: list[OpRecord]) -> Choice:
        """Of attention that was taken for float16, or for TF32 in one of its ways, by the record that was looked at
        first: they differ in few values.
        """
        samples, scheme = self._samples(records), choice.schemes[0]
        if all(self._fitting.fits(sample, scheme) for sample in samples):
            return choice
        others = [one for other in in_tf32(scheme) for one in (other, other.on_tensor_cores()) if one != scheme]
        alike = (one for one in others if all(self._fitting.fits(sample, one) for sample in samples))
        found = next(alike, None)
        if not found:
            return choice
        left = min(self._fitting.left(sample, found) for sample in samples)
        return replace(choice, schemes=(found,), settled=True, nmse=left, unfit=())

    def _on_tensor_cores(self, records: Sequence[OpRecord], schemes: Sequence[Scheme]) -> Scheme | None:
        """The first of the schemes that fits all these records of an op with sums on tensor cores."""
        candidates = (scheme.on_tensor_cores() for scheme in schemes)
        return next((one for one in candidates if all(self._fitting.fits(of, one) for of in records)), None)

    def _is_cut_off(self, record: OpRecord, scheme: Scheme) -> bool:
        """Whether values are smaller than the scheme allows, all together: what is cut off makes no sum larger."""
        if self._fitting.fits(record, scheme):
            return False
        exact = self._recomputation.op(record, self._recomputation.op_of(record), scheme, "f64").exact
        return float(((self._recomputation.values(record).reshape(exact.shape) - exact) * exact).sum()) < 0

    def _as_in_prompts(self, choice: Choice, records: list[OpRecord], elsewhere: Elsewhere) -> Choice:
        """Of single tokens what steps of several tell, where it is as good: a token's row is all of its tensor, and few
        values tell TF32 from float16. Segments do not tell either what is in contention there.
        """
        is_sole = choice.settled and len(choice.schemes) == 1 and not choice.by_op
        if not is_sole or not self._is_of_single_tokens(records):
            return choice
        each = self._samples(records)
        if self._planner.is_segment(records[0]):
            others = [s for longer in elsewhere.longer if len(longer.schemes) > 1 for s in longer.schemes]
            others = [s for s in self._planner.suiting((*choice.schemes, *others), *records) if s not in choice.schemes]
            fit = (scheme for scheme in others if all(self._fitting.fits(record, scheme) for record in each))
            return replace(choice, alike=(*choice.alike, *fit)) if others else choice
        for other in elsewhere.sole:
            if all(self._fitting.is_as_good(other, choice.schemes[0], record) for record in each):
                return replace(choice, schemes=(other,), alike=(*choice.schemes, *choice.alike))
        return choice

    def _is_of_single_tokens(self, records: Sequence[OpRecord]) -> bool:
        return self._recomputation.recorded.tokens(records[0].step) == "one"

    def _finished(self, choice: Choice, records: Sequence[OpRecord]) -> Choice:
        return replace(choice, said=self.said(choice.schemes, records), n_records=len(records), unfit=())

    def said(self, schemes: Sequence[Scheme], records: Iterable[OpRecord]) -> tuple[str, ...]:
        """What each scheme rounds in the records, or in what they are recomputed through."""
        through = (name for record in records for name in self._recomputation.segment(record))
        return self._planner.said(schemes, through)

    def _beside(
        self, choice: Choice, found: Choice, samples: Sequence[OpRecord], records: Sequence[OpRecord]
    ) -> Choice:
        """A choice, and what was found for the ops of those records that it does not fit; that alone, where it does as
        well in the others: rows of 256 are one group of 256, and all rows have one scale each.
        """
        one, before = found.schemes[0], choice.schemes[0]
        if not found.unfit and all(self._may_be(one, r) and self._fitting.is_as_good(one, before, r) for r in samples):
            return replace(found, schemes=(one,))
        both = tuple(dict.fromkeys((*found.schemes, *choice.schemes)))
        by_op = {name: choice.of(name).schemes for name in _names(records)}
        by_op |= dict.fromkeys(_names(choice.unfit), found.schemes)
        by_op |= dict.fromkeys(_names(found.unfit), both)
        return replace(found, schemes=both, by_op=by_op)

    def _may_be(self, scheme: Scheme, record: OpRecord) -> bool:
        """Whether the record can be computed so: groups of 256 divide no row of 128."""
        return any(self._planner.suiting((scheme,), record))

    def _is_short(self, record: OpRecord) -> bool:
        """Whether it is recomputed through one layer at most, and a little of others, as the values of the first that
        RWKV-7 mixes with a layer's own. Through several each scheme is a forward pass: logits alone took half as long
        again.
        """
        of_layers = Counter(map(layer_of, self._recomputation.segment(record)))
        return of_layers.total() < 2 * max(of_layers.values())

    def _as_others(self, record: OpRecord, settled: Iterable[tuple[str, Scheme]]) -> Sequence[Scheme]:
        """What ops of other kinds, which schemes treat alike, were seen to have."""
        entry = KINDS[self._recomputation.graph[record.op].kind].scheme
        alike = EXPONENTIAL if entry in EXPONENTIAL else (entry,)
        others = {scheme for name, scheme in settled if name in KINDS and KINDS[name].scheme in alike}
        return self._planner.as_in(record, others)

    def _samples(self, records: list[OpRecord]) -> list[OpRecord]:
        """Records of a sort that choose its arithmetic, those that tell it, where there are any: of segments a part."""
        samples = self._planner.samples(records)
        if not all(map(self.tells, samples)):
            samples = self._planner.samples([record for record in records if self.tells(record)]) or samples
        return [self._part(record) for record in samples]

    def _part(self, record: OpRecord) -> OpRecord:
        """Of a segment of many tokens some from all over it, the last among them: they tell its arithmetic as well, and
        there are hundreds, a pass of each token each. All where a scheme depends on how many there are, or where replay
        goes only a part of the way with the engine: what chance explains is the less the more values there are.
        """
        n_tokens, *axes = record.shape
        n = max(_PART_TOKENS, math.ceil(_PART / math.prod(axes)))
        by_token = record.rows is None and record.token_axis == 0 and self._planner.is_segment(record)
        if not by_token or n_tokens < 2 * n or self._fitting.goes_part_of_the_way(record):
            return record
        if any(scheme.values.ubatch for scheme in self._planner.candidates(record)):
            return record
        return structs.replace(record, rows=tuple((i + 1) * n_tokens // n - 1 for i in range(n)))

    def tells(self, record: OpRecord) -> bool:
        """Whether a record can tell arithmetics apart: of NaN, zeros or very few values any leaves nothing, and of a
        first position that attends to itself alone a cache may be held in anything.
        """
        recorded = self._recomputation.recorded
        if recorded.n_tokens(record.step) == 1 or record.size < _VALUES:
            return False
        not_zero = False
        for piece in recorded.trace.pieces(record):
            if not np.isfinite(piece).all():
                return False
            not_zero = not_zero or bool(piece.any())
        return not_zero


def _best(known: Sequence[Known]) -> Mapping[str, Known]:
    """What tells each part best."""
    return {one.part: one for one in reversed(known)}


def _does(choice: Choice, one: Way | Scheme) -> bool:
    """Whether what was chosen first is that, or does that."""
    return one.is_of(choice.schemes[0]) if isinstance(one, Way) else one == choice.schemes[0]


def _in_prompts(choices: Mapping[Sort, Choice]) -> Sequence[Scheme]:
    """What steps of several tokens are done in, as far as sorts of them tell."""
    of_several = (choice for sort, choice in choices.items() if sort.n_tokens > 1 and choice.settled)
    return [*dict.fromkeys(scheme for choice in of_several for scheme in choice.schemes)]


def _elsewhere(sort: Sort, choices: Mapping[Sort, Choice]) -> Elsewhere:
    others = {
        other: choice
        for other, choice in choices.items()
        if (other.name, other.types, other.of_product, other.through, len(other.held))  # a bias is no input
        == (sort.name, sort.types, sort.of_product, sort.through, len(sort.held))
        and other.n_tokens != sort.n_tokens
        and choice.settled
    }
    longer = sorted((other for other in others if other.n_tokens > sort.n_tokens), key=lambda other: -other.n_tokens)
    sole = [choice.schemes[0] for choice in others.values() if len(choice.schemes) == 1 and not choice.unfit]
    return Elsewhere(
        [scheme.in_steps_of(sort.tokens) for scheme in sole],
        [] if all(sort.held) else [others[other] for other in longer],
        next((others[other].by_op for other in longer if _are_calibrated(others[other])), {}),
    )


def _are_calibrated(choice: Choice) -> bool:
    """Whether its ops have scales that were measured beforehand."""
    return any(
        is_calibrated(name)
        for schemes in choice.by_op.values()
        for scheme in schemes
        for name in (scheme.linear.operands, scheme.scores.stored, scheme.values.stored)
    )


def _names(records: Sequence[OpRecord]) -> list[str]:
    return [local_name(record.op) for record in records]
