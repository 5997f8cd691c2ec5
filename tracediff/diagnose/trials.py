"""Tries hypotheses: known mistakes on a record, and what explained one record on its kin."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from tracediff.diagnose.budget import Budget
from tracediff.diagnose.hypothesis import IN_ALL_LAYERS, PART, SOLVED, Assumed, Hypothesis, Way, to_beat
from tracediff.diagnose.mistakes import BANK
from tracediff.diagnose.mistakes.fit import searched
from tracediff.diagnose.mistakes.mistake import Context, Mistake, Seen, Variant
from tracediff.diagnose.planting import undoes
from tracediff.diagnose.solve.by_value.readings import Reading
from tracediff.diagnose.solve.edit import Read, Reworked, relayered
from tracediff.model.graph import Op, Weight
from tracediff.names import layer_of, split
from tracediff.replay.replay import Replay
from tracediff.replay.score import NOTHING
from tracediff.result import Local
from tracediff.trace.format import OpRecord


class Trials:
    """Tries mistakes on the records of one trace, until the time is over: then OutOfTime is raised."""

    def __init__(self, replay: Replay, budget: Budget) -> None:
        self._replay = replay
        self.budget = budget
        self._firsts: dict[tuple[int, str], int] = {}  # of records, the first position that is wrong

    def applicable(self, segment: Sequence[str]) -> list[Mistake]:
        """Mistakes that can be made in some op of the segment."""
        graph = self._replay.graph
        return [m for m in BANK.values() if any(m.where.holds(graph[name], graph) for name in segment)]

    def of(
        self,
        mistake: Mistake,
        record: OpRecord,
        error: Local,
        given: Hypothesis | None = None,
        way: Way = IN_ALL_LAYERS,
        only: Assumed | None = None,
    ) -> Iterator[Hypothesis]:
        """The mistake in all its variants or `only` that of a part, on top of what is `given`; in a segment, alike in
        every layer of it or in the one of `way`.
        """
        before = given.ops if given else ()
        left = min(to_beat(error), given.left) if given else to_beat(error)
        graph = self._replay.graph.changed(*before)
        targets = [
            graph[name]
            for name in error.segment
            if mistake.where.holds(graph[name], graph) and way.layer in (None, layer_of(name))
        ]
        seen = self._seen(record, error)
        context = Context(graph, self._replay.weights.file, seen, None if seen else partial(self._wrong_from, record))
        names = list(dict.fromkeys(split(op.name)[1] for op in targets))
        # A mistake in a kernel shows wherever the kernel is used; one in a call, at that call alone, or at its twin's.
        alone = [] if mistake.everywhere or len(names) == 1 else [[name] for name in names] + _twins(names)
        for chosen in (names, *alone):
            alike = [op for op in targets if split(op.name)[1] in chosen]
            for variant, changed in _by_variant(mistake, alike, context, only).items():
                if only is None or only.variant == variant:
                    self.budget.check()
                    part = _said(mistake, variant, changed, way, len(error.segment) > 1)
                    part = replace(part, in_some_steps=only.in_some_steps) if only else part
                    ops = tuple({op.name: op for op in (*before, *(op for one in changed for op in one.ops))}.values())
                    local = self._replay.under(record, ops, left, way.plain, before)
                    yield Hypothesis((*(given.parts if given else ()), part), ops, local)

    def together(self, parts: Sequence[Assumed], record: OpRecord, error: Local) -> Iterator[Hypothesis]:
        """These mistakes in these variants, each on top of the others."""
        *before, last = parts
        for given in self.together(before, record, error) if before else (None,):
            yield from self.of(BANK[last.mistake], record, error, given, only=last)

    def fitted(self, tried: Sequence[Hypothesis], record: OpRecord, error: Local, way: Way) -> Hypothesis | None:
        """The mistake that was tried on a segment, in the op or ops where it leaves least, with the number that does.

        None where it is about no number, or where other numbers take no part of the error away.
        """
        first = min(tried, key=lambda h: h.left, default=None)
        number = BANK[first.parts[-1].mistake].number if first else None
        if first is None or number is None or len(error.segment) == 1:
            return None
        mistake = BANK[first.parts[-1].mistake]
        graph = self._replay.graph
        right = [graph[op.name] for op in first.ops]

        def variants(value: float) -> list[Variant]:
            return [number.replaced(op, value) for op in right]

        def left(value: float) -> float:
            self.budget.check()
            under = self._replay.under(record, [one.op for one in variants(value)], 0.0, way.plain)
            return math.inf if math.isnan(under.nmse) else under.nmse

        own = number.of(right[0])
        starts = {own * times: left(own * times) for times in number.starts} | {number.of(first.ops[0]): first.left}
        start = min(starts, key=lambda value: starts[value])
        if first.left <= NOTHING or not starts[start] <= PART * error.nmse:
            return None
        value = searched(left, start)
        changed = variants(value)
        said = _said(mistake, changed[0].same_as(right[0]), changed, way, True)
        ops = tuple(one.op for one in changed)
        local = self._replay.under(record, ops, error.nmse, way.plain)
        return Hypothesis((replace(said, number=value),), ops, local)

    def carried(self, found: Hypothesis, record: OpRecord, error: Local) -> Iterator[Hypothesis]:
        """What explained one record tried on another, with the same numbers: they are an engine's, not an op's."""
        if any(op.name in error.segment for op in found.ops):
            ops = found.ops
        elif SOLVED in found.mistakes or found.may_turn:
            ops = tuple(self._relayered(found.ops, error.segment))
            ops = ops or (tuple(self._transferred(found.ops, error.segment)) if len(error.segment) == 1 else ())
        elif len(found.parts) == 1 and found.parts[-1].fitted and found.parts[-1].number is None:
            ops = tuple(self._transferred(found.ops, error.segment))
        else:
            yield from self.together(found.parts, record, error)
            return
        if ops:
            before = math.inf if found.may_turn else to_beat(error)
            parts = self._renamed(found, ops)
            yield replace(found, parts=parts, ops=ops, local=self._replay.under(record, ops, before))

    def _renamed(self, found: Hypothesis, ops: Sequence[Op]) -> tuple[Assumed, ...]:
        """The words of a solved edit as they are true of the same op in another layer: what it reads may have another
        name, as the first residual adds to the embedding, and the buffer of all layers holds the last one's value.
        """
        if SOLVED not in found.mistakes:
            return found.parts
        graph, text = self._replay.graph, found.parts[-1].text
        for a, b in zip(found.ops, ops, strict=False):
            here, there = graph[a.name], graph[b.name]
            pairs = zip((*here.reads, *a.reads), (*there.reads, *b.reads), strict=False)
            names = {Read.of(*ours).words(here): Read.of(*theirs).words(there) for ours, theirs in pairs}
            text = _with_names(text, names)
        return (*found.parts[:-1], replace(found.parts[-1], text=text))

    def _relayered(self, ops: Sequence[Op], segment: Sequence[str]) -> Iterator[Op]:
        """The changed ops in the segment's layer, where it has them all."""
        graph = self._replay.graph
        there = {split(name)[1]: graph[name] for name in segment}
        if all(split(op.name)[1] in there for op in ops):
            alike = (relayered(op, graph[op.name], there[split(op.name)[1]]) for op in ops)
            yield from filter(None, alike)

    def _transferred(self, ops: Sequence[Op], segment: Sequence[str]) -> Iterator[Op]:
        """The same changes in another op of the kind, or in the ops of those names in another layer's segment."""
        graph = self._replay.graph
        there = {split(name)[1]: graph[name] for name in segment}
        alike = [graph[segment[0]]] if len(segment) == len(ops) == 1 else [there.get(split(op.name)[1]) for op in ops]
        changes = zip(ops, alike, strict=True)
        made = [transferred(op, graph[op.name], other) if other else None for op, other in changes]
        if all(made):
            yield from filter(None, made)

    def _seen(self, record: OpRecord, error: Local) -> Seen | None:
        if len(error.segment) > 1:
            return None
        known = self._replay.known(record)
        return Seen(known.inputs, known.recorded)

    def _wrong_from(self, record: OpRecord) -> int:
        """The position of the first token whose values are wrong; 0 where that cannot be told."""
        key, axes = (record.step, record.op), self._replay.graph[record.op].axes
        if key not in self._firsts:
            known, positions = self._replay.known(record), self._replay.trace.steps[record.step].positions
            if "T" in axes and known.exact.ndim == len(axes):
                wrong = ((known.recorded - known.exact).abs() > known.bound).movedim(axes.index("T"), 0)
                rows = torch.tensor([positions[row] for row in record.rows or range(len(positions))])
                self._firsts[key] = min(rows[wrong.flatten(1).any(1).cpu()].tolist(), default=0)
            else:
                self._firsts[key] = 0
        return self._firsts[key]


def transferred(changed: Op, right: Op, other: Op) -> Op | None:
    """The change from `right` to `changed` made in another op of the kind; None where it is about its own weights, or
    about what it reads.
    """
    if not isinstance(changed.rework, Reworked | None):  # what is done to values of this op
        return None
    if right.kind != other.kind or [w.name for w in changed.weights] != [w.name for w in right.weights]:
        return None
    if changed.inputs != right.inputs or len(right.weights) != len(other.weights):
        return None
    attrs = {key: value for key, value in changed.attrs.items() if right.attrs.get(key) != value}
    weights = [_read_alike(w, own) for w, own in zip(changed.weights, other.weights, strict=True)]
    if None in weights:
        return None
    read = tuple(filter(None, weights))
    edited = other.with_attrs(**attrs)
    return replace(edited, weights=read, function=changed.function, rework=changed.rework, stored=changed.stored)


def _read_alike(changed: Weight, other: Weight) -> Weight | None:
    """The other weight read as the changed one is; None where that means its own rows."""
    if not isinstance(changed.read, Reading):
        return replace(other, read=changed.read)
    read = changed.read.of_shape(changed.shape, other.shape)
    return replace(other, read=read) if read else None


def _with_names(text: str, names: Mapping[str, str]) -> str:
    """The text with other names of values."""
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({known})(?![\w.])(?! of the)", lambda m: names[m[0]], text)


def _by_variant(
    mistake: Mistake, ops: Sequence[Op], context: Context, only: Assumed | None
) -> dict[str, list[Variant]]:
    """The variants of a mistake in these ops, by what they have in common, or that of a part which was fitted."""
    if only and only.number is not None and mistake.number:
        return {only.variant: [mistake.number.replaced(op, only.number) for op in ops]}
    found: dict[str, list[Variant]] = {}
    for op in ops:
        for one in mistake.change(op, context):
            variant = Variant(*one)
            if not undoes(variant.op, op):
                found.setdefault(variant.same_as(op), []).append(variant)
    return found


def _twins(names: Sequence[str]) -> list[list[str]]:
    """Pairs of ops that are written side by side: of queries and keys, of gate and up."""
    pairs = (
        [name, name.replace(a, b)] for a, b in (("attn_q", "attn_k"), ("_gate", "_up")) for name in names if a in name
    )
    return [pair for pair in pairs if len(names) > 2 and pair[1] in names]


def _said(mistake: Mistake, variant: str, changed: Sequence[Variant], way: Way, in_segment: bool) -> Assumed:
    ops = [one.op for one in changed]
    where = ", ".join(dict.fromkeys(split(op.name)[1] if way.layer is None else op.name for op in ops))
    first = changed[0]
    said = (first.name or first.text.replace(f"{first.op.name}.", "their ")) if len(ops) > 1 else first.text
    return Assumed(mistake.name, variant, (f"{where}: " if in_segment else "") + said, first.fitted, common=first.name)
