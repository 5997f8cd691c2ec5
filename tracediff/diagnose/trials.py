"""Tries known mistakes on a record: one by one, together, and with the number that leaves least."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import tee

import torch

from tracediff.diagnose.budget import Budget
from tracediff.diagnose.hypothesis import IN_ALL_LAYERS, PART, Assumed, Hypothesis, Way, to_beat
from tracediff.diagnose.mistakes import BANK
from tracediff.diagnose.mistakes.fit import searched
from tracediff.diagnose.mistakes.mistake import Context, Mistake, Seen, Variant
from tracediff.diagnose.planting import undoes
from tracediff.model.graph import Graph, Op
from tracediff.names import layer_of, layers_of, local_name
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.exponentials import approximated
from tracediff.numerics.kinds import KINDS
from tracediff.replay.replay import Replay
from tracediff.replay.score import NOTHING
from tracediff.result import Local
from tracediff.trace.format import OpRecord


class Trials:
    """Tries mistakes on the records of one trace, until the time is over: then OutOfTime is raised."""

    def __init__(self, replay: Replay, budget: Budget) -> None:
        self._replay = replay
        self.budget = budget
        # Of records, the ops that were given last, and the first position that is wrong beside them.
        self._firsts: dict[tuple[int, str], tuple[Sequence[Op], int]] = {}

    def applicable(self, segment: Sequence[str]) -> list[Mistake]:
        """Mistakes that can be made in some op of the segment."""
        graph, is_short = self._replay.graph, len(layers_of(segment)) <= 1
        fitting = (m for m in BANK.values() if any(m.where.holds(graph[name], graph) for name in segment))
        return [m for m in fitting if is_short or not m.in_short]

    def of(
        self,
        mistakes: Iterable[Mistake],
        record: OpRecord,
        error: Local,
        given: Hypothesis | None = None,
        way: Way = IN_ALL_LAYERS,
        only: Assumed | None = None,
    ) -> Iterator[Hypothesis]:
        """Each mistake in all its variants or `only` that of a part, on top of what is `given`; in a segment, alike in
        every layer of it or in the one of `way`.
        """
        before = given.ops if given else ()
        left = min(to_beat(error), given.left) if given else to_beat(error)
        proposed, again = tee(p for one in mistakes for p in self._proposed(one, record, error, before, way, only))
        locals_ = self._replay.under_each(record, (ops for _, ops in proposed), left, way.plain, before)
        for (part, ops), local in zip(again, locals_, strict=True):
            yield Hypothesis((*(given.parts if given else ()), part), ops, local)

    def _proposed(
        self, mistake: Mistake, record: OpRecord, error: Local, before: Sequence[Op], way: Way, only: Assumed | None
    ) -> Iterator[tuple[Assumed, tuple[Op, ...]]]:
        """What is to be tried: the part of a hypothesis, and the ops as they would be, those `before` it among them."""
        graph, way = self._replay.graph.changed(*before), replace(way, tokens=only.tokens) if only else way
        targets = [
            graph[name]
            for name in error.segment
            if mistake.where.holds(graph[name], graph) and way.layer in (None, layer_of(name))
        ]
        seen = self._seen(record, error)
        wrong_from = None if seen else partial(self._wrong_from, record, before)
        positions = self._replay.trace.steps[record.step].positions
        first = None if record.rows is None else positions[0]
        context = Context(graph, self._replay.weights.file, seen, wrong_from, max(positions) + 1, first)
        names = list(dict.fromkeys(local_name(op.name) for op in targets))
        # A mistake in a kernel shows wherever the kernel is used; one in a call, at that call alone, or at its twin's.
        alone = [] if mistake.everywhere or len(names) == 1 else [[name] for name in names] + _siblings(targets)
        done = set[tuple[str, ...]]()
        right = self._replay.graph.ops
        rebuilt = {op.name: op for op in before if _computed(op) != _computed(right.get(op.name))}
        for chosen in (names, *alone):
            alike = [op for op in targets if local_name(op.name) in chosen]
            for variant, changed in _by_variant(mistake, alike, context, only).items():
                made = [replace(op, tokens=way.tokens) for one in changed for op in one.ops]
                if any(_is_rebuilt_again(op, rebuilt, graph) for op in made):
                    continue
                what = variant, *(op.name for op in made)  # which all of the ops may have, or one of them alone
                if what not in done and (only is None or only.variant == variant):
                    done.add(what)
                    self.budget.check()
                    part = _said(mistake, variant, changed, way, len(error.segment) > 1)
                    part = replace(part, in_some_steps=only.in_some_steps, number=only.number) if only else part
                    yield part, (*{op.name: op for op in (*before, *made)}.values(),)

    def together(self, parts: Sequence[Assumed], record: OpRecord, error: Local) -> Iterator[Hypothesis]:
        """These mistakes in these variants, each on top of the others."""
        *before, last = parts
        for given in self.together(before, record, error) if before else (None,):
            yield from self.of([BANK[last.mistake]], record, error, given, only=last)

    def proposed(
        self, parts: Sequence[Assumed], record: OpRecord, error: Local, before: Sequence[Op] = ()
    ) -> Iterator[tuple[tuple[Assumed, ...], tuple[Op, ...]]]:
        """The same, not looked at: the parts as they are in this record, and the ops as they would be."""
        first, *rest = parts
        for part, ops in self._proposed(BANK[first.mistake], record, error, before, IN_ALL_LAYERS, first):
            for more, all_ops in self.proposed(rest, record, error, ops) if rest else [((), ops)]:
                yield (part, *more), all_ops

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
            changed = [number.replaced(op, value) for op in right]
            return [one._replace(op=replace(one.op, tokens=way.tokens)) for one in changed]

        def left(value: float) -> float:
            self.budget.check()
            return self._replay.under(record, [one.op for one in variants(value)], 0.0, way.plain).left

        values = [number.of(right[0]) * times for times in number.starts]
        each = ([one.op for one in variants(value)] for value in values)
        looks = self._replay.under_each(record, each, error.nmse, way.plain)  # most take nothing away, at a glance
        starts = {value: one.left for value, one in zip(values, looks, strict=True)}
        starts[number.of(first.ops[0])] = first.left
        start = min(starts, key=lambda value: starts[value])
        if first.left <= NOTHING or not starts[start] <= PART * error.nmse:
            return None
        value = searched(left, start)
        changed = variants(value)
        said = _said(mistake, changed[0].same_as(right[0]), changed, way, True)
        ops = tuple(one.op for one in changed)
        local = self._replay.under(record, ops, error.nmse, way.plain)
        return Hypothesis((replace(said, number=value),), ops, local)

    def _seen(self, record: OpRecord, error: Local) -> Seen | None:
        if len(error.segment) > 1:
            return None
        known = self._replay.known(record)
        return Seen(known.inputs, known.recorded, known.arithmetic.exponential)

    def _wrong_from(self, record: OpRecord, given: Sequence[Op]) -> int:
        """The position of the first token whose values are wrong beside what is given, or, where none is beyond its
        bound, of the one that is nearest to it; 0 where that cannot be told. Where the arithmetic is not settled the
        latest: in one that the engine has not the first token is wrong already.
        """
        key = record.step, record.op
        of, first = self._firsts.get(key, (None, 0))
        if of is not given:
            first = max(self._first(record, scheme, given) for scheme in self._replay.plain_ones(record))
            self._firsts[key] = given, first
        return first

    def _first(self, record: OpRecord, scheme: Scheme | None, given: Sequence[Op]) -> int:
        op, positions = self._replay.graph[record.op], self._replay.trace.steps[record.step].positions
        if "T" not in op.axes and not KINDS[op.kind].shaped_as:
            return 0
        known = self._replay.known(record, scheme, given)
        excess = (known.recorded - known.exact).abs() / known.bound
        if shape := known.of_tokens(op):
            excess = excess[: math.prod(shape)].reshape(shape)
        elif "T" not in op.axes or known.exact.ndim != len(op.axes):
            return 0
        else:
            excess = excess.movedim(op.axes.index("T"), 0)
        most = excess.flatten(1).nan_to_num(math.inf).amax(1).cpu()
        rows = torch.tensor([positions[row] for row in record.rows or range(len(positions))])
        return int(rows[most >= min(1.0, float(most.max()))].min())


def _computed(op: Op | None) -> tuple[object, object]:
    """How an op is computed, if not as its kind is."""
    return (op.function, op.rework) if op else (None, None)


def _is_rebuilt_again(op: Op, rebuilt: Mapping[str, Op], graph: Graph) -> bool:
    """Whether another mistake says how the op is computed, or one that it is a copy of, and this what it reads or how.
    Of a norm that reads what was not gated yet, by another function, a second one knows neither shape nor operands.
    """
    if before := rebuilt.get(op.name):
        return (op.inputs, op.views, *_computed(op)) != (before.inputs, before.views, *_computed(before))
    own = graph.ops.get(op.name)
    is_copy = op.function is not None and (own is None or own.kind != op.kind)
    return is_copy and any(op.function is other.function for other in rebuilt.values())


def _by_variant(
    mistake: Mistake, ops: Sequence[Op], context: Context, only: Assumed | None
) -> dict[str, list[Variant]]:
    """The variants of a mistake in these ops, by what they have in common, or that of a part which was fitted."""
    if only and only.number is not None and mistake.number:
        return {only.variant: [mistake.number.replaced(op, only.number) for op in ops]}
    found: dict[str, list[Variant]] = {}
    with approximated(context.seen.exponential if context.seen else ""):  # numbers are fitted to what has these
        for op in ops:
            for variant in mistake.variants(op, context):
                if undoes(variant.op, op):
                    continue
                key = variant.same_as(op)
                if any(one.op.name == op.name for one in found.get(key, ())):  # whose words differ by layers alone
                    key = variant.text
                found.setdefault(key, []).append(variant)
    return found


def _siblings(ops: Sequence[Op]) -> list[list[str]]:
    """Names of ops that are written side by side, of some of these: those of queries and keys, of gate and up, and
    those that read the same value, as Q, K and V do, which are one matmul in many engines.
    """
    names, readers = list(dict.fromkeys(local_name(op.name) for op in ops)), dict[str, dict[str, None]]()
    for op in ops:
        for read in op.inputs[:1]:
            readers.setdefault(local_name(read), {})[local_name(op.name)] = None
    twins = (
        [name, name.replace(a, b)] for a, b in (("attn_q", "attn_k"), ("_gate", "_up")) for name in names if a in name
    )
    some = (*(pair for pair in twins if pair[1] in names), *map(list, readers.values()))
    return [list(group) for group in dict.fromkeys(map(tuple, some)) if 1 < len(group) < len(names)]


def _said(mistake: Mistake, variant: str, changed: Sequence[Variant], way: Way, in_segment: bool) -> Assumed:
    ops = [one.op for one in changed]
    where = ", ".join(dict.fromkeys(local_name(op.name) if way.layer is None else op.name for op in ops))
    first = changed[0]
    said = (first.name or first.text.replace(f"{first.op.name}.", "their ")) if len(ops) > 1 else first.text
    text = (f"{where}: " if in_segment else "") + said
    return Assumed(mistake.name, variant, text, first.fitted, common=first.name, tokens=way.tokens)
