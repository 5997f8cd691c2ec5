"""Replay a trace, then explain its faulty ops by trying the bank on them."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from tracediff.diagnose.mistakes import ALIKE, BANK
from tracediff.diagnose.mistakes.mistake import Context, Mistake, Seen
from tracediff.diagnose.planting import undoes
from tracediff.diagnose.shapes import describe
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.names import layer_of, split
from tracediff.numerics.arithmetic import Scheme, scheme_named
from tracediff.numerics.kinds import KINDS
from tracediff.replay.replay import Replay
from tracediff.result import Cause, Local, OpResult
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

# A hypothesis that leaves so little of the error needs no rival. (Two kinds of GELU leave 1e-5 of each other.)
_BEYOND_DOUBT = 1e-8
# Floors of segments are wide: one must also leave little of the error, for wrong ones leave half of it by chance, and
# less where the floor hides everything.
_LITTLE, _BLINDLY = 0.1, 0.05
_HARDLY_MORE = 4.0  # what two fits to within the noise differ by
_A_LAYER = 24  # ops: in longer segments the pairs are too many
# Where one mistake does not suffice, every other is tried on top of so many that leave least: of one, of two.
_BEAM = (6, 3)
_ADDED = 0.1  # of what the others leave: more, and nothing speaks for one more
_SEARCHES = 2  # of ops of one name in which sets of mistakes are searched for in vain
# Values of weights times passes, one for each layer and arithmetic: every mistake takes half a forward pass in each.
# With 4e7 on two cores it took a minute.
_ONE_BY_ONE = 2e8
_UNTRIED = "mistakes were tried in all layers alike, not in one alone: record hidden states to find the layer"
_KEEP = 128 << 20  # bytes of weights that stay dequantised: all of a small model, some layers of a real one


Progress = Callable[[float], None]  # told the share that is done


@dataclass(frozen=True, slots=True)
class Judged:
    """What replay says of one trace, and how to explain what it found."""

    locals: dict[tuple[int, str], Local]
    explain: Callable[[list[OpResult], Progress], list[OpResult]]
    notes: tuple[str, ...]  # what replay found out about the trace itself


def replay_and_explain(
    trace: Trace, model: Path, held: Mapping[str, np.ndarray], arithmetic: str | None, progress: Progress
) -> Judged:
    """Judge every record of the trace by replay against the GGUF file `model`, and weights that are `held` instead."""
    file = GGUFFile(model)
    weights = Weights(file, keep_bytes=_KEEP).holding(held)
    replay = Replay(trace, build_graph(file), weights, scheme_named(arithmetic) if arithmetic else None)
    locals_ = {(record.step, record.op): local for record, local in replay.run(progress)}
    return Judged(locals_, Explainer(replay).explain, tuple(replay.notes()))


def _part_of(progress: Progress, done: int, of: int, fraction: float) -> None:
    progress((done + fraction) / of)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Mistakes tried on a record: the ops as they would be, and what replay leaves under them."""

    each: dict[str, str]  # what is wrong, by mistake
    ops: tuple[Op, ...]
    local: Local

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Their names, in the order in which they were tried."""
        return tuple(self.each)


def _several_layers(segment: tuple[str, ...]) -> list[int]:
    """The layers of a segment of several; none of one."""
    layers = sorted({layer for layer in map(layer_of, segment) if layer is not None})
    return layers if len(layers) > 1 else []


def _left(hypothesis: Hypothesis) -> float:
    return math.inf if math.isnan(hypothesis.local.nmse) else hypothesis.local.nmse


class Least:
    """Of each set of mistakes the variant that leaves least."""

    def __init__(self) -> None:
        self._of: dict[frozenset[str], Hypothesis] = {}

    def update(self, tried: Iterable[Hypothesis]) -> None:
        """Keep these where they leave less."""
        for one in tried:
            key = frozenset(one.mistakes)
            self._of[key] = min(self._of.get(key, one), one, key=_left)

    def first(self, n: int) -> list[Hypothesis]:
        """The best `n`."""
        return sorted(self._of.values(), key=_left)[:n]


def _usual(found: list[Hypothesis]) -> Hypothesis | None:
    """The one that leaves least. Of its variants the usual come before the fitted: 1e-5 where 1.01e-5 leaves hardly
    less.
    """
    best = min(found, key=_left, default=None)
    alike = (
        one for one in found if best and one.mistakes == best.mistakes and _left(one) <= _HARDLY_MORE * _left(best)
    )
    return next(alike, None)


@dataclass(frozen=True, slots=True)
class Way:
    """How mistakes are tried on a segment: the arithmetic to look under first, and in which layer; None: in all."""

    plain: Scheme | None = None
    layer: int | None = None


class Explainer:
    """Tries mistakes on faulty ops, one by one, then several at once; what explained one op is tried first on the
    same op in other steps, then on its kin in other layers.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._worked: dict[str, Hypothesis] = {}  # by name of the op
        self._known: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)  # mistakes by its name in the layer
        self._sound: set[tuple[int, str]] = set()  # records that are as they should be
        self._given: set[tuple[str, tuple[str, ...]]] = set()  # ops, and what others were tried on top of
        self._searched: Counter[str] = Counter()  # by local name: in vain, for several mistakes at once
        self._each_layer: set[str] = set()  # local names of ops on which mistakes in one layer were tried, in vain

    def explain(self, ops: list[OpResult], progress: Progress = lambda fraction: None) -> list[OpResult]:
        """The ops, those that are faulty with their cause or the shape of their error."""
        self._sound = {(op.step, op.op) for op in ops if op.local and op.status != "faulty"}
        faulty = [(i, op, op.local) for i, op in enumerate(ops) if op.status == "faulty" and op.local]
        explained = list(ops)
        for done, (i, op, error) in enumerate(faulty):
            explained[i] = self._explain(op, error, partial(_part_of, progress, done, len(faulty)))
            progress((done + 1) / len(faulty))
        for i, op, error in faulty:  # what was found in later layers may be one of several mistakes in an earlier one
            record = self._record(op)
            if not explained[i].cause and (found := self._again(record, error) or self._one_more(record, error)):
                explained[i] = self._named(op, error, found)
        return explained

    def _explain(self, result: OpResult, error: Local, progress: Progress) -> OpResult:
        record = self._record(result)
        best = self._again(record, error) or self._anew(record, error, progress)
        if best:
            return self._named(result, error, best)
        recorded, exact, _ = self._replay.made(record)
        axes = KINDS[self._replay.graph[record.op].kind].axis_names(exact.ndim)
        shape = describe(recorded, exact, axes)
        untried = _several_layers(error.segment) and not self._ends_soon(record, error.segment)
        return replace(result, shape=f"{shape}; {_UNTRIED}" if untried else shape)

    def _record(self, result: OpResult) -> OpRecord:
        return self._replay.trace.ops[result.step, result.op]

    def _named(self, result: OpResult, error: Local, best: Hypothesis) -> OpResult:
        """The op with what explains it, which is remembered."""
        self._worked[result.op] = best
        known = self._known[split(result.op)[1]]
        if best.mistakes not in known:
            known.insert(0, best.mistakes)
        each = dict(best.each)
        for name in each.keys() & ALIKE.keys() if len(error.segment) > 1 else ():
            other, graph = BANK[ALIKE[name]], self._replay.graph
            ops = dict.fromkeys(split(n)[1] for n in error.segment if other.where.holds(graph[n], graph))
            each[name] += f" (or {other.text}: the same from here; record {' and '.join(ops)} to tell)"
        name, text, under = " + ".join(each), ", and ".join(each.values()), best.local
        cause = Cause(name, under.nmse, text, under.floor, under.arithmetic, each)
        return replace(result, cause=cause, shape=None)

    def _again(self, record: OpRecord, error: Local) -> Hypothesis | None:
        """What explained the same op in another step, or several mistakes its kin, where it explains this one too."""
        if same := self._worked.get(record.op):
            again = replace(same, local=self._replay.under(record, same.ops, error.nmse))
            if self._explains(again, record, error):
                return again
        several = (known for known in self._known[split(record.op)[1]] if len(known) > 1)
        tried = (together for known in several for together in self._together(known, record, error))
        return next((together for together in tried if self._explains(together, record, error)), None)

    def _anew(self, record: OpRecord, error: Local, progress: Progress) -> Hypothesis | None:
        """One mistake in all layers of the segment alike; then in one of several layers; then several mistakes."""
        local_name, plain = split(record.op)[1], self._replay.plain_ones(record)
        skipped = local_name in self._each_layer or not self._ends_soon(record, error.segment)
        layers = [] if skipped else _several_layers(error.segment)
        ways = [Way(scheme) for scheme in plain] + [Way(scheme, layer) for scheme in plain for layer in layers]
        tried = Least()
        for done, way in enumerate(ways):
            found = self._single(record, error, way, tried, partial(_part_of, progress, done, len(ways)))
            if found:
                return found
        if layers:
            self._each_layer.add(local_name)
        return self._one_more(record, error) or self._several(record, error, tried)

    def _ends_soon(self, record: OpRecord, segment: tuple[str, ...]) -> bool:
        """Whether mistakes in one layer of the segment after the other can be tried within minutes."""
        size = sum(math.prod(weight.shape) for name in segment for weight in self._replay.graph[name].weights)
        return size * len(_several_layers(segment)) * len(self._replay.plain_ones(record)) <= _ONE_BY_ONE

    def _single(self, record: OpRecord, error: Local, way: Way, tried: Least, progress: Progress) -> Hypothesis | None:
        """The mistake that leaves least; those that do not explain the error are added to `tried`."""
        found: list[Hypothesis] = []
        known = [one for one, *more in self._known[split(record.op)[1]] if not more]
        mistakes = self._ordered(known, error.segment)
        for done, mistake in enumerate(mistakes):
            progress(done / len(mistakes))
            for one in self._tried(mistake, record, error, way=way):
                if self._explains(one, record, error):
                    found.append(one)
                    if one.local.nmse <= _BEYOND_DOUBT * error.nmse:
                        break
                else:
                    tried.update([one])
            # What explained its kin and explains it too needs no rival: one row may suit several.
            if found and (mistake.name in known or found[-1].local.nmse <= _BEYOND_DOUBT * error.nmse):
                break
        return _usual(found)

    def _one_more(self, record: OpRecord, error: Local) -> Hypothesis | None:
        """What explained other ops of the name, and one more mistake."""
        if len(error.segment) > _A_LAYER:
            return None
        for known in self._known[split(record.op)[1]]:
            if (record.op, known) in self._given:  # in another step, in vain
                continue
            self._given.add((record.op, known))
            given = min(self._together(known, record, error), key=_left, default=None)
            if given and (found := self._on_top(given, record, error, Least())):
                return found
        return None

    def _several(self, record: OpRecord, error: Local, tried: Least) -> Hypothesis | None:
        """Two mistakes that together explain what one of them does not; then three."""
        local_name = split(record.op)[1]
        if self._searched[local_name] >= _SEARCHES or len(error.segment) > _A_LAYER:
            return None
        for width in _BEAM:
            more = Least()
            for given in tried.first(width):
                if found := self._on_top(given, record, error, more):
                    return found
            tried = more
        self._searched[local_name] += 1
        return None

    def _together(self, mistakes: Sequence[str], record: OpRecord, error: Local) -> Iterator[Hypothesis]:
        """These mistakes in all their variants, each on top of the others."""
        *before, last = mistakes
        for given in self._together(before, record, error) if before else (None,):
            yield from self._tried(BANK[last], record, error, given)

    def _on_top(self, given: Hypothesis, record: OpRecord, error: Local, tried: Least) -> Hypothesis | None:
        """One more mistake, that explains the record on top of what is given; all are added to `tried`."""
        others = (mistake for mistake in self._ordered((), error.segment) if mistake.name not in given.mistakes)
        both = [one for mistake in others for one in self._tried(mistake, record, error, given)]
        tried.update(both)
        little = _ADDED * given.local.nmse
        return _usual([one for one in both if one.local.nmse < little and self._explains(one, record, error)])

    def _explains(self, tried: Hypothesis, record: OpRecord, error: Local) -> bool:
        told = len(error.segment) == 1 or tried.local.nmse <= (_BLINDLY if tried.local.blind else _LITTLE) * error.nmse
        return not tried.local.faulty and told and not self._contradicted(record, tried.ops)

    def _contradicted(self, record: OpRecord, ops: tuple[Op, ...]) -> bool:
        """Whether the mistake would show in another step of the op, which is as it should be.

        To one row any factor looks like a wrong eps; in the prompt's rows that eps would show as well.
        """
        others = [step for step in self._replay.trace.steps if (step, record.op) in self._sound]
        records = (self._replay.trace.ops[step, record.op] for step in others)
        return any(self._replay.under(other, ops).faulty for other in records)

    def _ordered(self, known: Sequence[str], segment: tuple[str, ...]) -> list[Mistake]:
        """Mistakes that apply to some op of the segment, those that worked before first."""
        graph = self._replay.graph
        applicable = [m for m in BANK.values() if any(m.where.holds(graph[name], graph) for name in segment)]
        return sorted(applicable, key=lambda m: known.index(m.name) if m.name in known else len(known))

    def _tried(
        self,
        mistake: Mistake,
        record: OpRecord,
        error: Local,
        given: Hypothesis | None = None,
        way: Way = Way(),
    ) -> Iterator[Hypothesis]:
        """The mistake in all its variants, on top of what is `given`; in a segment, alike in every layer of it or in
        the one of `way`.
        """
        before, left = (given.ops, min(error.nmse, _left(given))) if given else ((), error.nmse)
        graph, file = self._replay.graph.changed(*before), self._replay.weights.file
        targets = [
            graph[name]
            for name in error.segment
            if mistake.where.holds(graph[name], graph) and way.layer in (None, layer_of(name))
        ]
        seen = None
        if len(error.segment) == 1:
            recorded, _, inputs = self._replay.made(record)
            seen = Seen(inputs, recorded)
        names = list(dict.fromkeys(split(op.name)[1] for op in targets))
        # A mistake in a kernel shows wherever the kernel is used; one in a call, at that call alone.
        for chosen in [names, *([name] for name in names if len(names) > 1)]:
            alike = [op for op in targets if split(op.name)[1] in chosen]
            variants = [
                [one for one in mistake.change(op, Context(graph, file, seen)) if not undoes(one[0], op)]
                for op in alike
            ]
            for changed in zip(*filter(None, variants), strict=False):
                ops = [op for op, _ in changed]
                where = ", ".join(dict.fromkeys(split(op.name)[1] if way.layer is None else op.name for op in ops))
                said = changed[0][1].replace(f"{ops[0].name}.", "their ") if len(ops) > 1 else changed[0][1]
                text = (f"{where}: " if len(error.segment) > 1 else "") + said
                both = tuple({op.name: op for op in (*before, *ops)}.values())
                yield Hypothesis(
                    {**(given.each if given else {}), mistake.name: text},
                    both,
                    self._replay.under(record, both, left, way.plain),
                )
