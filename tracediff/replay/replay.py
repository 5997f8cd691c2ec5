"""Judges the records of a trace one by one: recomputed from the trace's own inputs, in the arithmetic of the plan.

Judging is a pure function of the plan, the trace and the weights: what was judged before makes no difference. So it is
under a hypothesis, where some ops are others.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from tracediff.model.graph import Graph, Op, Span
from tracediff.model.weights import Weights
from tracediff.names import layer_of
from tracediff.numerics.arithmetic import Scheme, phrase
from tracediff.numerics.buffers import in_buffer
from tracediff.numerics.evaluate import arithmetic_of, in_words_of
from tracediff.numerics.floats import HALVES
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.schemes import EXACTLY, PLAIN, SCHEMES, in_ties
from tracediff.replay.fitting import Fitting, Supposed
from tracediff.replay.look import Asked, Known, Look, known
from tracediff.replay.plan import Choice, Plan, Planner, Sort
from tracediff.replay.planning import Planning
from tracediff.replay.recompute import Recomputation
from tracediff.replay.recorded import Recorded
from tracediff.replay.score import NOTHING
from tracediff.result import Local
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

IsMistaken = Callable[["Replay", OpRecord], bool]  # whether a mistake explains a record, in a usual arithmetic
_FEW = 4  # arithmetics, that are all looked at
_IDLE = 2.0  # times what a hypothesis leaves: with no more without it, it does nothing
_LITTLE, _HALF = 0.1, 0.5  # of the NMSE before: what leaves more is not looked at closely


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
        is_mistaken: IsMistaken | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        """`pinned` is the only arithmetic that is considered; a `planned` one is not sought again. Of a record that
        `is_mistaken`, whatever its arithmetic, none that is not listed is sought. Records of some ops `only` may be
        judged.
        """
        self.trace = trace
        self.graph = graph
        self.weights = weights
        self._recorded = Recorded(trace, graph, weights.device)
        self._recomputation = Recomputation(self._recorded, graph, weights)
        self._planner = Planner(self._recorded, graph, weights, (pinned,) if pinned else SCHEMES, self.segment)
        self._fitting = Fitting(self._recomputation, self._planner)
        self._planning = Planning(self._recomputation, self._planner, self._fitting)
        self._is_mistaken, self._only = is_mistaken, only
        self._known: tuple[tuple[OpRecord, Scheme], Known] | None = None  # of the last record that was asked of
        if planned:
            self.plan, self._recorded.on_the_way = planned, planned.on_the_way

    def of(self, trace: Trace) -> "Replay":
        """Of another trace, what some ranks have of this one, by the plan of this."""
        return self if trace is self.trace else Replay(trace, self.graph, self.weights, planned=self.plan)

    @cached_property
    def plan(self) -> Plan:
        """The arithmetic of each sort of record: made once, from a few records of each."""
        with torch.inference_mode():
            return self._planning.plan(self._judged_records(), self._is_known_to_be_mistaken)

    def _is_known_to_be_mistaken(self, choices: Mapping[Sort, Choice], record: OpRecord) -> bool:
        """Whether it is told, by what is planned so far."""
        if not self._is_mistaken:
            return False
        begun = copy(self)
        begun.plan = Plan(choices, self.weights.device, self._recorded.on_the_way)
        return self._is_mistaken(begun, record)

    def _judged_records(self) -> Iterator[OpRecord]:
        """Records with data, in the trace's order of steps and the graph's of ops."""
        for step in self.trace.steps:
            for op in self.graph:
                if self._only is not None and op.name not in self._only:
                    continue
                record = self.trace.ops.get((step, op.name))
                if record is None or not record.has_data or self.trace.own(record) == []:
                    continue
                if record.rows is not None and "T" not in op.axes:  # of what has no tokens none can be picked
                    continue
                if self._recorded.can_be_made(record.step, record.op):
                    yield record

    @cached_property
    def records(self) -> Mapping[str, Sequence[OpRecord]]:
        """What is judged of each op, in the order of steps; ops in the graph's."""
        found: dict[str, list[OpRecord]] = {op.name: [] for op in self.graph}
        for record in self._judged_records():
            found[record.op].append(record)
        return {name: records for name, records in found.items() if records}

    def judge(self, record: OpRecord, looked: Mapping[Scheme, Look] = {}) -> Local:
        """The record's local error under the arithmetic of its sort; of several in contention the best. Values that are
        cut off to half precision are mistaken, though floors have room for another rounding.
        """
        local = self._judged(record, looked)
        return replace(local, judgement="faulty") if local.cut_off else local

    def _judged(self, record: OpRecord, looked: Mapping[Scheme, Look]) -> Local:
        """The same by what floors say.

        Where every record that was asked is mistaken, a sound one among the others is asked by itself. The end of a
        segment is undecided where something else that fits the sample explains it. `looked` is what was seen already
        under these schemes.
        """
        choice = self.choice(record)
        if self._planner.is_segment(record):
            schemes = choice.schemes if choice.settled else self._at_hand(record)
            local = self._fitting.best_of(record, schemes)
            if local.faulty and (right := self._in_ties(record, schemes)):
                return right
            if local.nmse <= NOTHING and not local.faulty:
                return local
            if local.faulty and (other := self._in_another(record, choice)):
                return other
            if right := self._fitting.by_ties(record, schemes, local.judgement == "sound"):
                return right
            if local.faulty and choice.alike:  # the sample does not tell which of them is the engine's
                other = self._fitting.best_of(record, [*schemes, *choice.alike])
                return local if other.faulty else replace(other, judgement="undecided")
            return local
        if not choice.settled:
            return self._fitting.best_of(record, self._fitting.in_question(record, self._planner.candidates(record)))
        local = self._fitting.best_of(record, choice.schemes, looked)
        if not local.faulty:
            return local
        if right := self._in_ties(record, choice.schemes):
            return right
        if right := self._in_another(record, choice):
            return right
        return self._of_inputs_anew(record, choice, local) or self._of_rounded_inputs(record, choice, local) or local

    def plain_looks(self, record: OpRecord) -> Iterator[tuple[Scheme, Local]]:
        """The record's local error in each arithmetic of most engines."""
        return ((scheme, self._fitting.closely(record, scheme).local) for scheme in PLAIN)

    def is_excused(self, local: Local) -> bool:
        """Whether roundings that few engines have explain what ends a segment, which are not known bit by bit there."""
        if local.faulty or local.nmse <= NOTHING or len(local.segment) == 1:
            return False
        ops = [self.graph[name] for name in local.segment]
        return local.arithmetic not in {in_words_of(ops, scheme, self.weights) for scheme in PLAIN}

    def in_arithmetic(self, record: OpRecord, arithmetic: str) -> Local | None:
        """The record's local error in the arithmetic of these words, where most engines may have that."""
        return next((local for _, local in self.plain_looks(record) if local.arithmetic == arithmetic), None)

    def asks(self, record: OpRecord) -> Sequence[Asked]:
        """Under which schemes the record is looked at first, whatever is seen then: together with those of other
        traces.
        """
        choice = self.choice(record)
        if not choice.settled or self._planner.is_segment(record):
            return ()
        return [Asked(self._recomputation, record, scheme) for scheme in choice.schemes]

    def segment(self, record: OpRecord) -> tuple[str, ...]:
        """The ops that are recomputed for the record; its own is the last."""
        return self._recomputation.segment(record)

    def n_before(self, record: OpRecord) -> int:
        """How many values are there at once of what is recomputed for the record, in what most engines do."""
        return self._recomputation.n_before(record, EXACTLY)

    def forget(self, all_of_it: bool = False) -> None:
        """Drop values of ops that are done."""
        self._recomputation.forget(all_of_it)
        self._known = None

    def forget_until(self, name: str) -> None:
        """Drop what no op after this one reads, when all its records are judged."""
        self._recomputation.forget_until(name)
        self._recomputation.forget()

    def _at_hand(self, record: OpRecord) -> Sequence[Scheme]:
        """Under what a segment is judged whose sort is mistaken as far as was asked. A first position attends to itself
        alone: there most mistakes of attention do not show, and what its value is held in does.
        """
        if self._recorded.n_tokens(record.step) > 1:
            return [scheme for scheme in self.plain_ones(record) if scheme]
        matmuls = {scheme.linear for scheme in PLAIN}
        held = {(s.linear, s.values): s for s in reversed(self._planner.candidates(record)) if s.linear in matmuls}
        return self._fitting.settle([*reversed(held.values())], [record]).schemes

    def _in_another(self, record: OpRecord, choice: Choice) -> Local | None:
        """The record in another arithmetic: in one that the records which chose its sort's do not tell from that, or in
        another kernel's, which leaves next to nothing.

        Biases in bfloat16 or as in the file: of a sort the one fitted what was asked, of others the other alone. Of a
        segment, where each takes a forward pass, those that the trace has elsewhere: a cache that is float16 in prompts
        left 7e-10 of the token that was asked, without being so, and of others 2e-4.
        """
        if self._planner.is_segment(record):
            elsewhere = (scheme for one in self.plan.choices.values() if one.settled for scheme in one.schemes)
            candidates = [*self._planner.suiting([*dict.fromkeys(elsewhere)], record)]
        else:
            candidates = [*dict.fromkeys((*self._planner.candidates(record), *choice.alike))]
            if choice.schemes[0] not in candidates:  # but one that was composed
                candidates += self._planner.changes(choice.schemes[:1], record)
        others = [scheme for scheme in candidates if scheme not in choice.schemes]
        near = [s for s in others if s in choice.alike or self._fitting.left(record, s) <= NOTHING]
        for scheme in near:
            local = self._fitting.closely(record, scheme).local
            if local.judgement == "sound" and (scheme in choice.alike or local.nmse <= NOTHING):
                return local
        return None

    def _in_ties(self, record: OpRecord, schemes: Sequence[Scheme]) -> Local | None:
        """The record where what lies halfway between two numbers is rounded to the other one: few records of a sort
        have any such value, and these alone are off, by it.
        """
        tied = [other for scheme in schemes for other in in_ties(scheme)]
        found = (self._fitting.closely(record, scheme).local for scheme in tied)
        return next((local for local in found if local.judgement == "sound"), None)

    def _of_inputs_anew(self, record: OpRecord, choice: Choice, local: Local) -> Local | None:
        """A record in float32 that is off in single values alone, if it is right where the product that it passes on
        was made once more for it: compilers fuse a matmul with its rotation, and others read it from memory. (JAX on an
        H200: rotated keys at position 0 were other float32 numbers than those that were recorded.)
        """
        op = self._recomputation.op_of(record)
        if record.dtype != "f32" or local.nmse > local.floor or not KINDS[op.kind].keeps_part:
            return None
        products = (name for name in op.inputs if name in self.graph and self.graph[name].kind == "linear")
        read = (self.trace.ops.get((record.step, name)) for name in products)
        judged = (one for one in read if one and one.rows == record.rows and one in self.records.get(one.op, ()))
        inputs = {one: self.choice(one) for one in judged}
        if not inputs or not all(of.settled for of in inputs.values()):
            return None
        found = self._fitting.of_inputs_anew(record, choice.schemes, {one: of.schemes[0] for one, of in inputs.items()})
        return replace(found, made_anew=True) if found.judgement == "sound" else None

    def _of_rounded_inputs(self, record: OpRecord, choice: Choice, local: Local) -> Local | None:
        """A record in half precision that is off in single values alone, if it is right where what was recorded in a
        longer type is cast to that of its own before it is read: as behind a scan in float32, whose result the norm
        of a model in float16 is given so (transformers' Qwen3-Next).
        """
        held = self._recorded.stored(record, self._recorded.values(record))
        if held not in HALVES or local.nmse > local.floor:
            return None
        read = (self.trace.ops.get((record.step, name)) for name, past in self.graph[record.op].reads if not past)
        known = [one for one in read if one and one.has_data and one.rows == record.rows]
        longer = [one for one in known if self._recorded.stored(one, self._recorded.values(one)) not in HALVES]
        if not longer:
            return None
        found = self._fitting.of_rounded_inputs(record, choice.schemes, longer, held)
        cast = phrase("inputs", held)
        words = cast if found.arithmetic == "exact" else f"{found.arithmetic}, {cast}"
        return replace(found, arithmetic=words) if found.judgement == "sound" else None

    def choice(self, record: OpRecord) -> Choice:
        """What the plan says of the record's sort."""
        return self.plan.choices[self._planner.sort(record)].of(record.op)

    def scheme(self, record: OpRecord, given: Scheme | None = None) -> Scheme:
        """The one that is given, one of `plain_ones`, or the best of the record's sort."""
        return given or self.choice(record).schemes[0]

    def under(
        self, record: OpRecord, ops: Sequence[Op], before: float = math.inf, plain: Scheme | None = None
    ) -> Local:
        """The record's local error if the engine computed these ops so: one of `under_each`."""
        return next(self.under_each(record, [ops], before, plain))

    @torch.inference_mode()
    def under_each(
        self,
        record: OpRecord,
        hypotheses: Iterable[Sequence[Op]],
        before: float = math.inf,
        plain: Scheme | None = None,
        given: Sequence[Op] = (),
    ) -> Iterator[Local]:
        """The record's local error if the engine computed the ops of each hypothesis so. Many have the same ops `given`
        among theirs, and some are looked at before the first is yielded.

        `before` is the NMSE without it. What does not take nine tenths of that away is not looked at closely. Of a
        record whose arithmetic is not settled it is sought under the hypothesis, where that takes half away in the
        `plain` one: one of `plain_ones`. What fits without the hypothesis as well explains the record by itself.
        """
        before = math.inf if math.isnan(before) else before
        plain = plain or self.plain_ones(record)[0]
        scheme = self.scheme(record, plain)
        promising = (_HALF if plain else _LITTLE) * before
        for ops, look in self._fitting.first_looks(record, hypotheses, scheme, before, promising, given):
            yield self._closely(record, ops, look, before, plain) if look.nmse <= promising else look

    def _closely(self, record: OpRecord, ops: Sequence[Op], look: Local, before: float, plain: Scheme | None) -> Local:
        """What seems to take most of the error away."""
        if not plain:
            return Supposed(self._fitting, ops).best_of(record, self.choice(record).schemes)
        if look.nmse <= NOTHING and (fit := self._plainly_sound(record, ops, look, before, plain)):
            return fit
        enough = _LITTLE * before
        schemes = self._as_elsewhere(look.segment, self._fitting.in_reach(record, plain, look.nmse, enough))
        if not schemes:
            return look
        other = Supposed(self._fitting, ops)
        found = other.settle(schemes, [record], enough)
        near = [scheme for scheme in found.schemes if other.near(record, scheme, found.nmse)]
        if math.isfinite(before):  # of a record that is wrong as it is
            near = [scheme for scheme in near if not self._fitting.left(record, scheme) <= _IDLE * found.nmse]
        return look if found.nmse > enough or not near else other.best_of(record, near)

    def _plainly_sound(
        self, record: OpRecord, ops: Sequence[Op], look: Local, before: float, plain: Scheme
    ) -> Local | None:
        """The record in an arithmetic of most engines, of which the look left next to nothing: that needs no rival, and
        how far each of the others takes it is not asked, a pass for each.
        """
        is_usual = plain in PLAIN and self._as_elsewhere(look.segment, [plain])
        if not is_usual or (math.isfinite(before) and self._fitting.left(record, plain) <= _IDLE * look.nmse):
            return None
        local = Supposed(self._fitting, ops).best_of(record, [plain])
        return None if local.faulty else local

    @torch.inference_mode()
    def plainly(self, record: OpRecord, ops: Sequence[Op], before: float) -> Iterator[Local]:
        """The record's local error if the engine computed these ops so, in each arithmetic of most engines that leaves
        little of what was there `before`.
        """
        for scheme in PLAIN:
            enough = _LITTLE * before
            ((_, look),) = self._fitting.first_looks(record, [ops], scheme, before, enough)
            if look.nmse <= enough:
                yield Supposed(self._fitting, ops).best_of(record, [scheme])

    def _as_elsewhere(self, segment: Sequence[str], schemes: Sequence[Scheme]) -> Sequence[Scheme]:
        """Those of the schemes that round what weights of each type are multiplied with as the trace was seen to.

        Without that, a wrong mistake was believed of experts in float32: blocks of 8 bits, which no other matmul had,
        hid what it left.
        """
        ops = (self.graph[name] for name in segment if name in self.graph)  # a mistaken engine may have more
        types = {self.weights.type_of(op.weights[0]) for op in ops if op.weights and KINDS[op.kind].scheme == "linear"}
        seen = {(t, s.of("linear", t).operands) for sort, s in self._seen() if (t := sort.types[0]) in types}
        known = {t for t, _ in seen}
        return [s for s in schemes if all((t, s.of("linear", t).operands) in seen for t in known)]

    def _seen(self) -> list[tuple[Sort, Scheme]]:
        """The sorts of matmuls whose arithmetic is settled, by records of their own, and what it is."""
        settled = ((sort, one) for sort, one in self.plan.choices.items() if one.settled and sort.types)
        return [(sort, scheme) for sort, one in settled if all(sort.held) for scheme in one.schemes]

    def knowing(self, record: OpRecord, ops: Sequence[Op]) -> "Replay":
        """With the arithmetic of the record's sort as it shows under what explains the record, where none was settled.

        A mistake in every record of a sort hides in which arithmetic they were computed, until it is undone. A record
        that tells none leaves that open.
        """
        choice = self.choice(record)
        if choice.settled or not self._planning.tells(record):
            return self
        found = Supposed(self._fitting, ops).settle(self._planner.candidates(record), [record])
        if not found.settled:
            return self
        said = self._planning.said(found.schemes, [record])
        sort = self._planner.sort(record)
        choices = dict(self.plan.choices)
        for other in filter(sort.is_but_for_tokens, self.plan.choices):
            theirs = choices[other]
            if theirs.settled and found.nmse <= NOTHING < theirs.nmse and not all(other.held):
                # There what few engines have explains a record as mistaken as the others: of one token it soon does.
                both = dict(zip((*found.schemes, *theirs.schemes), (*said, *theirs.said), strict=True))
                choices[other] = replace(theirs, schemes=(*both,), said=(*both.values(),), settled=False)
        choices[sort] = replace(found, said=said, n_records=choice.n_records)
        known = copy(self)
        known.plan = replace(self.plan, choices=choices)
        return known

    def plain_ones(self, record: OpRecord) -> Sequence[Scheme | None]:
        """What to look under first, one after the other; None where the arithmetic is settled.

        Else the one that leaves least, those that most engines have, and what this one was seen to have elsewhere: who
        holds the embedding in int8 holds other weights so. First what its other matmuls have, where this is one.
        """
        choice = self.choice(record)
        if choice.settled:
            return (None,)
        elsewhere = {other.schemes[0] for other in self.plan.choices.values() if other.settled}
        usual = self._planner.as_in(record, {*PLAIN, *elsewhere})
        matmuls = [scheme for _, scheme in self._seen()] if self._planner.sort(record).types else []
        return sorted(dict.fromkeys((choice.schemes[0], *usual)), key=lambda scheme: scheme not in matmuls)

    def tried_under(self, record: OpRecord, before: float) -> Sequence[Scheme | None]:
        """Those of `plain_ones` under which mistakes are tried that leave `before`. What fits under one that is near
        the first takes half of that away in the first as well, and then `under` asks for the others by itself.
        """
        first, *others = self.plain_ones(record)
        if first is None or self._planner.is_segment(record):  # through other ops roundings may count far more
            return [first, *others]
        return [first, *(s for s in others if s and not self._fitting.is_near(record, first, s, _HALF * before))]

    def arithmetics(self, record: OpRecord) -> Sequence[Scheme | None]:
        """Those under which what is wrong is looked at: all that there are, where few are and none is settled."""
        candidates = self._planner.candidates(record)
        few = len(candidates) <= _FEW and not self.choice(record).settled
        return candidates if few else self.plain_ones(record)

    def notes(self) -> Iterator[str]:
        """What a reader must know of how the trace was written."""
        for name, on_the_way in self._recorded.on_the_way.items():
            if on_the_way:
                of, wider = rounding_named(name).words, "float64" if name == "f32" else "float32"
                told = f"values were rounded to {of} on the way to the file, for the engine computed with others"
                if name == "f32":  # which compilers do to what most engines compute in
                    told = f"sums are not those of their terms: the engine has more than {of}, or fuses operations"
                allowed = f"The floors of what reads them allow for it: write {wider}, and smaller mistakes show."
                yield f"{self.trace.path}: {told}. {allowed}"

    def known(self, record: OpRecord, scheme: Scheme | None = None, given: Sequence[Op] = ()) -> Known:
        """All that is known of a record's op by itself, under this arithmetic or the one that fits best, if the engine
        computed the ops that are `given` so.
        """
        key = record, self.scheme(record, scheme)
        if given:
            return known(self._recomputation.changed(given), *key)
        if self._known is None or self._known[0] != key:
            self._known = None  # never two at once: of 151,936 logits of 128 tokens one takes half a gigabyte
            self._known = key, known(self._recomputation, *key)
        return self._known[1]

    def supposed(self, record: OpRecord, name: str, scheme: Scheme) -> Known:
        """All that is known of an op of the record's segment, as it should be: `recorded` is that too."""
        op, of = self.graph[name], self._fitting.without_noise(record)
        inputs = tuple(value.exact for value in of.inputs(record.step, op, scheme, record.rows))
        y = of.op(record, op, scheme, "f64").exact
        return Known(y, y, torch.zeros_like(y), inputs, arithmetic_of(op, scheme, self.weights))

    def read(self, record: OpRecord, name: str, past: Span, scheme: Scheme) -> Tensor:
        """A value as the record's step has it, or all steps so far, or a buffer: recorded, or as it should be."""
        return self._fitting.without_noise(record).read(record.step, name, past, scheme).exact

    def makeable(self, record: OpRecord) -> set[str]:
        """Ops of a record's layer that were not recorded and can be made of what was: values that the engine had, too.
        No op where the record is a segment, whose own ops are no more than supposed.
        """
        layer = layer_of(record.op)
        if layer is None or len(self.segment(record)) > 1:
            return set()
        missing = (op.name for op in self.graph.layer(layer) if not self._recorded.holds((record.step, op.name, None)))
        return {name for name in missing if self._recorded.can_be_made(record.step, name)}

    @torch.inference_mode()
    def made(self, record: OpRecord, ops: Sequence[Op]) -> Tensor:
        """What a record would hold if the engine computed these ops as given, float64."""
        scheme = self.scheme(record)
        other = self._recomputation.changed(ops, n_samples=0)
        op = self.graph.changed(*ops)[record.op]
        return other.op(record, op, scheme, record.dtype or "f32").exact

    def held(self, step: int, name: str, past: Span) -> Tensor | None:
        """A value that the trace has of a step or of all so far, flat, or what a buffer would hold of it from earlier
        steps; None where it was not recorded.
        """
        until = self._recorded.until(step)
        steps = {False: [step], True: until, "earlier": until[:-1], "before": until[:-1]}[past]
        if not all(self._recorded.holds((number, name, None)) for number in steps):
            return None
        values = [self._recorded.value((number, name, None)).flatten() for number in steps]
        return in_buffer(values) if past == "before" or not values else torch.cat(values)
