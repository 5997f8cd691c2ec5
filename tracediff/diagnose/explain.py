"""Explains the faulty ops of a trace that was replayed, those of one kind together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice, product

import numpy as np
from torch import Tensor

from tracediff.diagnose import rows
from tracediff.diagnose.budget import ENDLESS, Budget, OutOfTime, Progress, within
from tracediff.diagnose.error_shape import describe, describe_choice, describe_scan
from tracediff.diagnose.evidence import shown
from tracediff.diagnose.hypothesis import SOLVED, Assumed, Hypothesis, Way
from tracediff.diagnose.kin import Faulty, Kin, told_by
from tracediff.diagnose.low_rank import followed
from tracediff.diagnose.mistakes import ALIKE, BANK
from tracediff.diagnose.rows.told import Told
from tracediff.diagnose.search import Search, ends_soon, several_layers
from tracediff.diagnose.solve.by_value.blocks import is_of_blocks
from tracediff.diagnose.solve.edit import Read
from tracediff.diagnose.trials import Trials
from tracediff.english import listed
from tracediff.errors import in_one_line, is_bug
from tracediff.model.block_fields import FIELDS
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import SOURCES, Op
from tracediff.model.weights import values_of
from tracediff.names import layer_of, local_name
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.evaluate import in_words_of
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.activation import ACTIVATIONS
from tracediff.replay.look import Known
from tracediff.replay.replay import Replay
from tracediff.replay.score import NOTHING, judge
from tracediff.result import Cause, OpResult
from tracediff.trace.format import OpRecord

_ALSO = 3  # other mistakes that come to the same are said
_OTHER_STEPS = 3  # that are asked what they read
_UNTRIED = "mistakes were tried in all layers alike, not in one alone: record hidden states to find the layer"


_Group = tuple[Hypothesis, list[tuple[Faulty, Hypothesis]]]  # what was found, and the records that it explains


class Explainer:
    """Explains the faulty records of one trace by the known mistakes, one or several at once."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._told: dict[tuple[int, str], Told | None] = {}  # of records what they read

    def explain(
        self, ops: list[OpResult], progress: Progress = lambda fraction: None, budget: Budget = ENDLESS
    ) -> list[OpResult]:
        """The ops, those that are faulty with their cause or the shape of their error.

        Where the time is over no further cause is sought. A kin has half of its share of it; those for which that was
        too short have what is left of it then: what nobody knows does not take the time of what is soon found.
        """
        explained, kins = list(ops), self.kins(ops)
        rounds = (2, 1) if len(kins) > 1 else (1,)
        for n_rounds in rounds:
            for done, kin in enumerate(kins):
                own = Budget(budget.left / (n_rounds * len(kins) - done))
                told = within(within(progress, len(rounds) - n_rounds, len(rounds)), done, len(kins))
                for at, op in self.of(ops, kin, own, told).items():
                    explained[at] = op
            kins = [kin for kin in kins if not all(explained[at].sought for at in kin)]
        progress(1.0)
        return explained

    def kins(self, ops: list[OpResult]) -> list[list[int]]:
        """Places of records that may have one mistake: single ops of a sort, segments that end in the same op of a
        layer, and with these the single ops that they run through. What one lot has wrong does not depend on another's;
        segments, which may take all the time, come last. With them segments that are excused by roundings of few
        engines, where none of their name is faulty.
        """
        by_kin: dict[tuple[bool, str], list[int]] = {}
        for at, op in enumerate(ops):
            if op.status == "faulty" and op.local and not op.cause and not op.held:
                several = len(op.local.segment) > 1
                name = local_name(op.op) if several else self._sort(self._replay.graph[op.op])
                by_kin.setdefault((several, name), []).append(at)
        faulty = {*by_kin}
        through = [(local_name(op.op), op.local) for op in ops if op.local and len(op.local.segment) > 1]
        # An arithmetic that leaves next to nothing of some, where that of most engines left more, is the engine's.
        known = {(name, local.arithmetic) for name, local in through if local.nmse <= NOTHING}
        for at, op in enumerate(ops):
            kin = True, local_name(op.op)
            if not op.local or op.status == "faulty" or kin in faulty or (kin[1], op.local.arithmetic) in known:
                continue
            if self._replay.is_excused(op.local):
                by_kin.setdefault(kin, []).append(at)
        return _joined([by_kin[key] for key in sorted(by_kin, key=lambda key: key[0])], ops, self._types)

    def _types(self, names: Iterable[str]) -> set[str]:
        """The types of the quantised blocks that these ops read: one function reads all of a type."""
        of_blocks = (op for op in map(self._replay.graph.__getitem__, names) if is_of_blocks(op, self._replay.weights))
        return {self._replay.weights.type_of(op.weights[0]) for op in of_blocks}

    def _sort(self, op: Op) -> str:
        """The kind of op, or one for all that read quantised blocks, be they rows of a table: one function does."""
        type_ = self._replay.weights.type_of(op.weights[0]) if op.kind in ("embedding", "linear_id") else ""
        return "linear" if type_ in FIELDS else op.kind

    @np.errstate(all="ignore")  # what is tried in vain may come to any number, and would warn of it
    def of(self, ops: list[OpResult], members: list[int], budget: Budget, progress: Progress) -> dict[int, OpResult]:
        """Those at the places of one kin's `members`, explained. A bug ends the search for these alone."""
        try:
            return self._of(ops, members, budget, progress)
        except Exception as error:
            if not is_bug(error):
                raise
            return {at: replace(ops[at], sought=False, bug=in_one_line(error)) for at in members}

    def _of(self, ops: list[OpResult], members: list[int], budget: Budget, progress: Progress) -> dict[int, OpResult]:
        errors = {(op.step, op.op): op.local for op in ops if op.local}
        records, explained = self._replay.trace.ops, dict[int, OpResult]()
        pending = [Faulty(at, records[ops[at].step, ops[at].op], error) for at in members if (error := ops[at].local)]
        kin = Kin(self._replay, budget, errors, sorted(pending, key=partial(told_by, self._replay), reverse=True))
        if not any(ops[at].status == "faulty" for at in members):
            return self._not_excused(ops, members, kin, progress)
        left = {one.at: one for one in kin.pending}
        with suppress(OutOfTime):
            for knowing, one, best in self._explained(kin, progress):
                left.pop(one.at, None)
                result = ops[one.at]
                explained[one.at] = self._named(result, one, best, knowing) if best else self._described(result, one)
        explained |= self._hidden(ops, members, kin)
        unsought = [one for one in kin.unsought.values() if one.at not in left and not explained[one.at].cause]
        for one in (*left.values(), *unsought):
            described = self._described(ops[one.at], one)
            explained[one.at] = described if described.cause else replace(described, sought=False)
        return explained

    def _not_excused(
        self, ops: list[OpResult], members: list[int], kin: Kin, progress: Progress
    ) -> dict[int, OpResult]:
        """Of a kin that roundings of few engines explain the records in which a known mistake leaves next to nothing,
        in the arithmetic of most. Of some forty roundings one is as large as many a mistake. That values are rounded is
        no mistake where honest roundings explain as much.
        """
        try:
            if found := Search(kin).known_beyond_doubt(kin.pending[0], progress):
                kin.found.append(found)
                return self._hidden(ops, members, kin)
        except OutOfTime:
            return {at: replace(ops[at], sought=False) for at in members}
        return {}

    def _hidden(self, ops: list[OpResult], members: list[int], kin: Kin) -> dict[int, OpResult]:
        """The kin's records that roundings explain, where a mistake that was found leaves far less: they have it too.
        Behind hidden states a mistake that an engine makes in all layers looks like float16 in some of them.
        """
        found, names = dict[int, OpResult](), {local_name(ops[at].op) for at in members}
        sound = [
            (at, x) for at, op in enumerate(ops) if (x := op.local) and not x.faulty and local_name(op.op) in names
        ]
        rounded = [(at, error) for at, error in sound if len(error.segment) > 1 and error.nmse > NOTHING]
        with suppress(OutOfTime):
            for at, error in rounded:
                one = Faulty(at, self._replay.trace.ops[ops[at].step, ops[at].op], error)
                same = next(filter(None, (kin.unrounded(best, one) for best in kin.found)), None)
                plain = self._replay.in_arithmetic(one.record, same.local.arithmetic) if same else None
                if same and not (plain and plain.nmse <= NOTHING):  # else it has no mistake
                    local = plain or error
                    result = replace(ops[at], status="faulty", note=None, local=replace(local, judgement="faulty"))
                    found[at] = self._named(result, one, same, kin)
        return found

    def _explained(self, kin: Kin, progress: Progress) -> Iterable[tuple[Kin, Faulty, Hypothesis | None]]:
        """Single ops first, then the segments that run through them, with the kin as it is known by then."""
        alone = [one for one in kin.pending if len(one.error.segment) == 1]
        for lot in (alone, [one for one in kin.pending if len(one.error.segment) > 1]):
            kin.pending[:], kin.in_vain[:] = lot, []
            yield from self._lot_explained(kin, progress)

    def _lot_explained(self, kin: Kin, progress: Progress) -> Iterable[tuple[Kin, Faulty, Hypothesis | None]]:
        n, groups = len(kin.pending), list[_Group]()
        # What no known mistake explains waits until these are found in ops of other names; and the names of such ops.
        later, unknown = list[Faulty](), set[str]()
        known_first = len({local_name(one.record.op) for one in kin.pending}) > 1
        while kin.pending or later:
            if not kin.pending:
                kin.pending[:], later, unknown = later, [], set()
                known_first = False
            first = kin.pending.pop(0)
            done = n - len(kin.pending) - len(later) - 1
            if given := kin.given(first) or kin.read_alike(first):
                yield kin, first, given
                continue
            if (told := self._told_of(first, kin.budget)) and told.is_same:
                yield kin, first, None
                continue
            is_told, name = self._is_told(first, kin.budget), local_name(first.record.op)
            best = None
            if not (known_first and name in unknown):
                best = Search(kin).of(first, within(progress, done, n), only_known=is_told or known_first)
            # A number that was fitted suits what tells less: a factor a norm over n + 1, where eps is next to nothing.
            is_weak = best is None or any(part.fitted for part in best.parts)
            if is_weak and known_first and not is_told:
                later.append(first)
                unknown.add(name)
                continue
            if best is None or kin.is_by_chance(best, first, kin.in_vain):
                kin.in_vain.append(first)
                continue
            # In an arithmetic that needs no rival the others are not asked in each that there is.
            knowing = kin.knowing(first, best) if best.left <= NOTHING else kin
            carried, over = _carried(knowing, first, best, (kin.pending, later))
            carried = _of_prompts_alone(carried)
            best = carried[0][1]
            if len(carried) == 1 and first.error.one_token and kin.only_chooses(best, first.record):
                kin.in_vain.append(first)  # of a few choices one: so many a mistake has the same effect in one token
                continue
            if is_told and self._suits_one_step(carried, kin):
                kin.in_vain.extend(one for one, _ in carried)
                continue
            kin = knowing
            kin.found.append(best)
            kin.alone.update((one.record.op, same) for one, same in carried if len(one.error.segment) == 1)
            yield from ((kin, *each) for each in carried)
            if over:  # what was found is said, though some were not asked
                raise over
            groups.append((best, carried))
            for one, same in carried if kin.pending or kin.in_vain else ():
                kin = kin.knowing(one, same)
        # What was found in later layers may be one of several in an earlier one, or be made there in some steps.
        for best in [*kin.found, *(best.but_in_some_steps() for best in kin.found)]:
            yield from ((kin, *each) for each in kin.carry(best, kin.in_vain))
        in_vain = [*kin.in_vain]
        while kin.in_vain:
            one = kin.in_vain.pop(0)
            best = Search(kin).one_more(one)
            best = None if best and kin.is_by_chance(best, one, in_vain) else best
            yield kin, one, best
            if best:
                kin.found.append(best)
                yield from ((kin, *each) for each in kin.carry(best, kin.in_vain))
        yield from ((kin, *each) for each in self._fewer(kin, groups))

    def _is_told(self, one: Faulty, budget: Budget) -> bool:
        """Whether rows that are all known tell what is wrong."""
        told = self._told_of(one, budget)
        return told is not None and told.is_sure and told.explains(one.error)

    def _told_of(self, one: Faulty, budget: Budget) -> Told | None:
        """What rows that were read tell of the record: asked once."""
        key = one.record.step, one.record.op
        if key not in self._told:
            budget.check()
            self._told[key] = rows.told(self._replay, one.record, self._least_wrong(one.record))
        return self._told[key]

    def _suits_one_step(self, carried: Sequence[tuple[Faulty, Hypothesis]], kin: Kin) -> bool:
        """Whether what explains these is of one step, and rows that were read tell what is wrong in another."""
        steps, names = {one.record.step for one, _ in carried}, {one.record.op for one, _ in carried}
        others = (o for o in kin.pending if o.record.op in names and o.record.step not in steps)
        return len(steps) == 1 and any(self._is_told(other, kin.budget) for other in islice(others, _OTHER_STEPS))

    def _fewer(self, kin: Kin, groups: list[_Group]) -> Iterable[tuple[Faulty, Hypothesis]]:
        """Records that another explanation suits as well, which more of them have, or, whatever has it, that suits
        them beyond doubt: what was found in the first step may be a part of what shows in later ones, or a mistake
        that chooses the same few experts there.
        """
        left = sorted(groups, key=lambda group: len(group[1]))
        for group in [*left]:
            members, at = group[1], next(i for i, other in enumerate(left) if other is group)
            larger = [(_suits, *other) for other in reversed(left[at + 1 :])]
            smaller = [(_suits_better, *other) for other in left[:at]]
            for suits, best, theirs in (*larger, *smaller):
                pending = [one for one, _ in members]
                same = dict(kin.carry(best, pending))
                if not pending and all(suits(same[one], before) for one, before in members):
                    yield from same.items()
                    theirs += same.items()
                    del left[at]
                    break

    def _named(self, result: OpResult, one: Faulty, best: Hypothesis, kin: Kin) -> OpResult:
        """The op with what explains it."""
        segment, graph = one.error.segment, self._replay.graph
        each: dict[str, str] = {}
        for part in best.parts:  # two may be of one name, or of none
            each[part.mistake] = "; ".join(filter(None, (each.get(part.mistake), part.words)))
        for part in best.parts if len(segment) > 1 and not best.parts[-1].is_said else ():
            key = one.record.op, part.mistake, part.variant  # the first of an op's records tells most
            kin.alike[key] = kin.alike[key] if key in kin.alike else self._alike(one, best, part, kin)
            each[part.mistake] += kin.alike[key]
        name, text, under = " + ".join(each), ", and ".join(each.values()), best.local
        look = {part.mistake: BANK[part.mistake].look if part.mistake in BANK else part.look for part in best.parts}
        places = shown(self._replay, one.record, one.error, best.ops)
        own = {part.mistake: each[part.mistake] for part in best.parts if not part.is_said}
        cause = Cause(name, under.nmse, text, under.floor, under.arithmetic, own, look, places)
        in_some = any(part.in_some_steps or part.tokens for part in best.parts)
        reads = _one_input(graph[one.record.op]) if len(segment) == 1 else None
        common = {part.mistake: part.common for part in best.parts if len(segment) == 1 or _is_everywhere(part)}
        return replace(result, cause=cause, shape=None, in_some_steps=in_some, reads=reads, common=common)

    def _alike(self, one: Faulty, best: Hypothesis, part: Assumed, kin: Kin) -> str:
        """What else comes to the same from the end of a segment, in words: the mistake in another op, or one that is
        known to. Empty where nothing does. Asked when the time is over, too: without it what is said would be false.
        """
        if part.mistake == SOLVED:
            return ""
        texts, ops = list[str](), set[str]()
        for text, of in self._comes_to_the_same(one, best, part, kin):
            texts = [*dict.fromkeys((*texts, text))]
            ops |= of
            if len(texts) == _ALSO:
                break
        if not texts:
            return ""
        between = [*dict.fromkeys(local_name(name) for name in one.error.segment[:-1] if name in ops)]
        to_tell = f"; record {listed(between, len(between))} to tell" if between else ""
        return f" (or {', or '.join(texts)}: the same from here{to_tell})"

    def _comes_to_the_same(
        self, one: Faulty, best: Hypothesis, part: Assumed, kin: Kin
    ) -> Iterable[tuple[str, set[str]]]:
        """Other mistakes that explain the record in the place of a part, in words, and all ops in which they differ."""
        trials, way = Trials(kin.replay, ENDLESS), Way(tokens=part.tokens)
        rest = [other for other in best.parts if other is not part]
        given = [*trials.together(rest, one.record, one.error)] if rest else [None]
        said = part.text.partition(":")[0].split(", ")  # of these ops it is said already
        for name, before in product((part.mistake, *ALIKE.get(part.mistake, ())), given):
            others = {op.name for op in (before.ops if before else ())}
            ours = {op.name for op in best.ops} - others
            for tried in trials.of([BANK[name]], one.record, one.error, before, way):
                if tried.pays(one.error) and ours.isdisjoint(op.name for op in tried.ops):
                    there = local_name(tried.ops[-1].name)
                    if name == part.mistake and there in said:  # another part of it is in that op as well
                        continue
                    text = f"in {there} instead" if name == part.mistake else tried.parts[-1].text
                    yield text, ours | ({op.name for op in tried.ops} - others)

    def _described(self, result: OpResult, one: Faulty) -> OpResult:
        scheme = self._least_wrong(one.record)
        known = self._replay.known(one.record, scheme)
        op = self._replay.graph[one.record.op]
        axes = KINDS[op.kind].axis_names(op, known.exact.ndim)
        is_choice = KINDS[op.kind].picks is not None and bool(known.recorded.isfinite().all())
        of_places = describe_choice(known.recorded, known.exact) if is_choice else ""
        vectors = partial(_vectors, self._replay.weights.file, op)
        inputs = known.inputs if op.kind in ACTIVATIONS and len(one.error.segment) == 1 else ()
        shape = of_places or _of_scan(op, known) or describe(known.recorded, known.exact, axes, vectors, inputs)
        finite_before = len(one.error.segment) == 1 and all(bool(x.isfinite().all()) for x in known.inputs)
        if finite_before and not bool(known.recorded.isfinite().all() or known.exact.isinf().any()):
            shape = f"{shape}; all that it reads is finite"
        if len(one.error.segment) == 1 and (of := followed(op, known, self._replay.weights)):
            shape = f"{of}; {shape}"
        told = self._told.get((one.record.step, one.record.op))
        if told and told.explains(one.error):
            ops, each = [self._replay.graph[name] for name in one.error.segment], {SOLVED: told.text}
            under = in_words_of(ops, scheme, self._replay.weights)
            cause = Cause(SOLVED, told.nmse, told.text, one.error.floor, under, each, {SOLVED: told.look})
            return replace(result, cause=cause, in_some_steps=True, common={SOLVED: told.common})
        if told:
            shape = f"{told.text}; {shape}"
        untried = several_layers(one.error.segment) and not ends_soon(self._replay, one)
        return replace(result, shape=f"{shape}; {_UNTRIED}" if untried else shape)

    def _least_wrong(self, record: OpRecord) -> Scheme:
        """The arithmetic in which the fewest values are wrong, where none is settled. The one that leaves least is
        chosen by those: beside 64 that lack terms activations in float16 left less, and thousands wrong.
        """

        def n_wrong(scheme: Scheme) -> int:
            return int(self._replay.known(record, scheme).wrong.sum())

        schemes = [self._replay.scheme(record, scheme) for scheme in self._replay.plain_ones(record)]
        return schemes[0] if len(schemes) == 1 else min(schemes, key=n_wrong)


def _carried(
    kin: Kin, first: Faulty, best: Hypothesis, others: Iterable[list[Faulty]]
) -> tuple[list[tuple[Faulty, Hypothesis]], OutOfTime | None]:
    """The first record and those of the others that have the same mistake, which are taken from these; and whether the
    time was over before all were asked.
    """
    carried = [(first, best)]
    try:
        for members in others:
            for one in kin.carry(best, members):
                carried.append(one)
    except OutOfTime as over:
        return carried, over
    return carried, None


def _of_prompts_alone(carried: list[tuple[Faulty, Hypothesis]]) -> list[tuple[Faulty, Hypothesis]]:
    """The same, said of steps of several tokens alone where those of one show that it is not made in them."""
    alone = any(same.parts[-1].tokens == "several" for _, same in carried)
    return [(one, same.of_tokens("several") if alone else same) for one, same in carried]


def _vectors(file: GGUFFile, op: Op, n: int) -> Iterator[tuple[str, Tensor]]:
    """The file's vectors of so many numbers as they are called beside an op, those of its layer first."""
    infos = [info for info in file.tensors.values() if tuple(info.shape) == (n,)]
    for info in sorted(infos, key=lambda info: layer_of(info.name) != layer_of(op.name)):
        yield Read(info.name).words(op), values_of(file, info)


def _suits(same: Hypothesis, before: Hypothesis) -> bool:
    """Whether what other records have anyway explains one as well as what it was explained by before."""
    return same.left <= NOTHING or judge(before.score - same.score) != "faulty"


def _suits_better(same: Hypothesis, before: Hypothesis) -> bool:
    """Whether it leaves next to nothing, and the other does not, though it assumes less, or assumes no less."""
    is_as_simple = before.left <= NOTHING and same.assumes <= before.assumes
    return same.left <= NOTHING and (is_as_simple or judge(same.score - before.score) == "faulty")


def _joined(
    kins: Sequence[list[int]], ops: Sequence[OpResult], types: Callable[[Iterable[str]], set[str]]
) -> list[list[int]]:
    """Places of single ops, and those of segments that run through them or read blocks of a type that they read, as one
    lot, in the order of its last.
    """
    joined: list[list[int]] = []
    for kin in kins:
        faulty = (local for at in kin if ops[at].status == "faulty" and (local := ops[at].local))
        segments = {local.segment for local in faulty if len(local.segment) > 1}
        through = {name for segment in segments for name in segment[:-1]}
        read = types(name for segment in segments for name in segment)
        parts = [
            other
            for other in joined
            if any(_is_alone(ops[at]) and (ops[at].op in through or types([ops[at].op]) & read) for at in other)
        ]
        joined = [other for other in joined if other not in parts] + [[*chain.from_iterable(parts), *kin]]
    return joined


def _is_alone(op: OpResult) -> bool:
    return op.local is not None and len(op.local.segment) == 1


def _of_scan(op: Op, known: Known) -> str:
    """The error's shape where the op makes values token after token, and hands on a state."""
    shape = known.of_tokens(op)
    return describe_scan(known.recorded, known.exact, shape, op.attrs.get("snapshots", 1)) if shape else ""


def _is_everywhere(part: Assumed) -> bool:
    """Whether it is tried in all ops of a segment that it could be in, or in none."""
    return part.mistake in BANK and BANK[part.mistake].everywhere


def _one_input(op: Op) -> str | None:
    """What words call the one value that the op reads; None where it reads several."""
    names = [name for name in op.inputs if name not in SOURCES]
    return Read(names[0]).words(op) if len(names) == 1 else None
