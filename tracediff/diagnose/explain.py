"""Replay a trace, then explain its faulty ops by trying the bank on them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tracediff.diagnose.bank import ALIKE, BANK, Context, Mistake, Seen
from tracediff.diagnose.shapes import describe
from tracediff.model.arithmetic import Scheme, scheme_named
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.names import layer_of, split
from tracediff.replay import Replay
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
# One that leaves less than this share may be one of two; with the best so many of those every other is tried.
_PARTLY, _FIRST_OF_PAIR = 1.0, 6
_SECOND = 0.5  # of what the first of a pair leaves: more, and nothing speaks for the second
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


def replay_and_explain(trace: Trace, model: Path, arithmetic: str | None, progress: Progress) -> Judged:
    """Judge every record of the trace by replay against the GGUF file `model`."""
    file = GGUFFile(model)
    replay = Replay(
        trace, build_graph(file), Weights(file, keep_bytes=_KEEP), scheme_named(arithmetic) if arithmetic else None
    )
    locals_ = {(record.step, record.op): local for record, local in replay.run(progress)}
    return Judged(locals_, Explainer(replay).explain)


def _part_of(progress: Progress, done: int, of: int, fraction: float) -> None:
    progress((done + fraction) / of)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Mistakes tried on a record: the ops as they would be, and what replay leaves under them."""

    mistakes: tuple[str, ...]
    ops: tuple[Op, ...]
    text: str
    local: Local


def _several_layers(segment: tuple[str, ...]) -> list[int]:
    """The layers of a segment of several; none of one."""
    layers = sorted({layer for layer in map(layer_of, segment) if layer is not None})
    return layers if len(layers) > 1 else []


def _left(hypothesis: Hypothesis) -> float:
    return hypothesis.local.nmse


@dataclass(frozen=True, slots=True)
class Way:
    """How mistakes are tried on a segment: the arithmetic to look under first, and in which layer; None: in all."""

    plain: Scheme | None = None
    layer: int | None = None


class Explainer:
    """Tries mistakes on faulty ops, then pairs of them; what explained one op is tried first on the same op in other
    steps, then on its kin in other layers.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._worked: dict[str, Hypothesis] = {}  # by name of the op and by its name in the layer
        self._sound: set[tuple[int, str]] = set()  # records that are as they should be
        self._paired: set[str] = set()  # local names of ops on which pairs were tried
        self._each_layer: set[str] = set()  # and on which mistakes in one layer were, in vain

    def explain(self, ops: list[OpResult], progress: Progress = lambda fraction: None) -> list[OpResult]:
        """The ops, those that are faulty with their cause or the shape of their error."""
        self._sound = {(op.step, op.op) for op in ops if op.local and op.status != "faulty"}
        faulty = [(i, op, op.local) for i, op in enumerate(ops) if op.status == "faulty" and op.local]
        explained = list(ops)
        for done, (i, op, error) in enumerate(faulty):
            explained[i] = self._explain(op, error, partial(_part_of, progress, done, len(faulty)))
            progress((done + 1) / len(faulty))
        return explained

    def _explain(self, result: OpResult, error: Local, progress: Progress) -> OpResult:
        record = self._replay.trace.ops[result.step, result.op]
        local_name = split(result.op)[1]
        best = self._again(record, error) or self._anew(record, error, progress)
        if best is None:
            recorded, exact, _ = self._replay.made(record)
            shape = describe(recorded, exact)
            untried = _several_layers(error.segment) and not self._ends_soon(record, error.segment)
            return replace(result, shape=f"{shape}; {_UNTRIED}" if untried else shape)
        self._worked[result.op] = self._worked[local_name] = best
        under = best.local
        others = [BANK[ALIKE[name]] for name in best.mistakes if len(error.segment) > 1 and name in ALIKE]
        text = best.text + "".join(
            f" (or {other.text}: the same from here; record {' and '.join(other.ops)} to tell)" for other in others
        )
        return replace(result, cause=Cause(" + ".join(best.mistakes), under.nmse, text, under.floor, under.arithmetic))

    def _again(self, record: OpRecord, error: Local) -> Hypothesis | None:
        """What explained the same op in another step, or two mistakes its kin, where it explains this one too."""
        if same := self._worked.get(record.op):
            again = replace(same, local=self._replay.under(record, same.ops, error.nmse))
            if self._explains(again, record, error):
                return again
        kin = self._worked.get(split(record.op)[1])
        if kin and len(kin.mistakes) == 2:
            first, second = kin.mistakes
            for given in self._tried(BANK[first], record, error):
                for both in self._tried(BANK[second], record, error, given):
                    if self._explains(both, record, error):
                        return both
        return None

    def _anew(self, record: OpRecord, error: Local, progress: Progress) -> Hypothesis | None:
        """One mistake in all layers of the segment alike; then in one of several layers; then two."""
        local_name, plain = split(record.op)[1], self._replay.plain_ones(record)
        skipped = local_name in self._each_layer or not self._ends_soon(record, error.segment)
        layers = [] if skipped else _several_layers(error.segment)
        ways = [Way(scheme) for scheme in plain] + [Way(scheme, layer) for scheme in plain for layer in layers]
        partly: dict[str, Hypothesis] = {}
        for done, way in enumerate(ways):
            found = self._single(record, error, way, partly, partial(_part_of, progress, done, len(ways)))
            if found:
                return found
        if layers:
            self._each_layer.add(local_name)
        return self._pair(record, error, sorted(partly.values(), key=_left))

    def _ends_soon(self, record: OpRecord, segment: tuple[str, ...]) -> bool:
        """Whether mistakes in one layer of the segment after the other can be tried within minutes."""
        size = sum(math.prod(weight.shape) for name in segment for weight in self._replay.graph[name].weights)
        return size * len(_several_layers(segment)) * len(self._replay.plain_ones(record)) <= _ONE_BY_ONE

    def _single(
        self, record: OpRecord, error: Local, way: Way, partly: dict[str, Hypothesis], progress: Progress
    ) -> Hypothesis | None:
        """The mistake that leaves least; those that explain something of the error are added to `partly`."""
        found: list[Hypothesis] = []
        kin = self._worked.get(split(record.op)[1])
        known = kin.mistakes if kin and len(kin.mistakes) == 1 else ()
        mistakes = self._ordered(known, error.segment)
        for done, mistake in enumerate(mistakes):
            progress(done / len(mistakes))
            for tried in self._tried(mistake, record, error, way=way):
                if self._explains(tried, record, error):
                    found.append(tried)
                    if tried.local.nmse <= _BEYOND_DOUBT * error.nmse:
                        break
                elif tried.local.nmse < _PARTLY * error.nmse:
                    partly[tried.text] = min(partly.get(tried.text, tried), tried, key=_left)
            # What explained its kin and explains it too needs no rival: one row may suit several.
            if found and (mistake.name in known or found[-1].local.nmse <= _BEYOND_DOUBT * error.nmse):
                break
        if not found:
            return None
        best = min(found, key=_left)
        # Of its variants the usual come before the fitted: 1e-5 where 1.01e-5 leaves hardly less.
        alike = (one for one in found if one.mistakes == best.mistakes)
        return next(one for one in alike if _left(one) <= _HARDLY_MORE * _left(best))

    def _pair(self, record: OpRecord, error: Local, partly: list[Hypothesis]) -> Hypothesis | None:
        """Two mistakes that together explain what one of them explains in part. Once for all ops of a name."""
        local_name = split(record.op)[1]
        if local_name in self._paired or len(error.segment) > _A_LAYER:
            return None
        self._paired.add(local_name)
        for given in partly[:_FIRST_OF_PAIR]:
            for mistake in self._ordered((), error.segment):
                if mistake.name in given.mistakes:
                    continue
                for both in self._tried(mistake, record, error, given):
                    if self._explains(both, record, error) and both.local.nmse < _SECOND * given.local.nmse:
                        return both
        return None

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

    def _ordered(self, known: tuple[str, ...], segment: tuple[str, ...]) -> list[Mistake]:
        """Mistakes that apply to some op of the segment, those that worked before first."""
        names = {split(name)[1] for name in segment}
        applicable = [m for m in BANK.values() if names & set(m.ops)]
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
        before = given.ops if given else ()
        graph, file = self._replay.graph.changed(*before), self._replay.weights.file
        targets = [
            graph[name]
            for name in error.segment
            if split(name)[1] in mistake.ops and way.layer in (None, layer_of(name))
        ]
        seen = None
        if len(error.segment) == 1:
            recorded, _, inputs = self._replay.made(record)
            seen = Seen(inputs, recorded)
        names = list(dict.fromkeys(split(op.name)[1] for op in targets))
        # A mistake in a kernel shows wherever the kernel is used; one in a call, at that call alone.
        for chosen in [names, *([name] for name in names if len(names) > 1)]:
            alike = [op for op in targets if split(op.name)[1] in chosen]
            variants = [list(mistake.change(op, Context(graph, file, seen))) for op in alike]
            for changed in zip(*filter(None, variants), strict=False):
                ops = [op for op, _ in changed]
                where = ", ".join(dict.fromkeys(split(op.name)[1] if way.layer is None else op.name for op in ops))
                said = changed[0][1].replace(f"{ops[0].name}.", "their ") if len(ops) > 1 else changed[0][1]
                text = (f"{where}: " if len(error.segment) > 1 else "") + said
                both = tuple({op.name: op for op in (*before, *ops)}.values())
                yield Hypothesis(
                    (*given.mistakes, mistake.name) if given else (mistake.name,),
                    both,
                    f"{given.text}, and {text}" if given else text,
                    self._replay.under(record, both, error.nmse, way.plain),
                )
