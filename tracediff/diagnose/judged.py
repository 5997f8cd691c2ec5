"""What replay says of traces, and how to explain what it found: by this process, or by workers a kind of op each."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from tracediff.diagnose.beforehand import is_mistaken
from tracediff.diagnose.budget import Budget, Progress, within
from tracediff.english import count
from tracediff.model.graph import Graph
from tracediff.model.model import Model
from tracediff.model.weights import check_device
from tracediff.numerics.evaluate import is_covered
from tracediff.replay.choices import refuse_no_choice, ties
from tracediff.replay.judging import Subject, replays_of
from tracediff.replay.late import begun_late, reads_cache
from tracediff.replay.misshapen import Misshapen, misshapen, suits_a_step
from tracediff.replay.replay import Replay
from tracediff.replay.workers import ALONE, Workers, judged_by, spread
from tracediff.result import Local, OpResult
from tracediff.trace.reader import Trace

Key = tuple[int, str]  # the step and the op of a record
V = TypeVar("V")

_EXPANDED = (
    "{}: {}judged with keys and values of each head, which the engine makes of the latent before it caches them. In "
    "llama.cpp the latent is every head's key and value: so more would diverge, or be of another shape."
)


@dataclass(frozen=True, slots=True)
class Judged:
    """What replay says of one trace, and how to explain what it found; and records that have no op's shape.

    `uncovered` are the model's ops that nothing here computes, and those made of them; `begun_late` the sequences, and
    their first positions, of which it lacks what was cached before.
    """

    locals: dict[tuple[int, str], Local]
    uncovered: set[str]
    misshapen: dict[tuple[int, str], Misshapen]
    begun_late: dict[int, int]
    explain_as: Callable[[Trace, list[OpResult], Progress, float], list[OpResult]]  # be it of some ranks alone
    notes: tuple[str, ...]  # what replay found out about the trace itself
    ties: Callable[[Trace | None], Iterable[str]]  # what is to be said of choices other than a reference's
    replay: Replay
    forms: Mapping[int, Graph] = field(default_factory=dict)  # of steps that were judged in another

    def graph(self, step: int) -> Graph:
        """The model in the form in which the step was judged."""
        return self.forms.get(step, self.replay.graph)

    def explain(self, ops: list[OpResult], progress: Progress, seconds: float) -> list[OpResult]:
        """The results of all ops of the trace, those that are faulty with their causes."""
        return self.explain_as(self.replay.trace, ops, progress, seconds)

    def begins_late(self, step: int, names: Iterable[str]) -> int | None:
        """Where the step's sequence begins, if the trace lacks what was cached before and one of these ops reads it."""
        here = self.replay.trace.steps.get(step)
        first = self.begun_late.get(here.sequence) if here else None
        return first if first and reads_cache(names, self.replay.graph) else None

    def wrong(self) -> set[str]:
        """The ops that have another shape in some step, or in whose records something is faulty."""
        faulty = {op for local in self.locals.values() if local.faulty for op in local.segment}
        return faulty | {op for _, op in self.misshapen}

    def n_wrong(self) -> Counter[int]:
        """How many records of each step are faulty, or of another shape."""
        faulty = {key for key, local in self.locals.items() if local.faulty}
        return Counter(step for step, _ in faulty | {*self.misshapen})

    def noting(self, note: str) -> "Judged":
        """The same with a note before its own."""
        return replace(self, notes=(note, *self.notes))

    def with_steps_of(self, other: "Judged", steps: Set[int]) -> "Judged":
        """The same trace, of which these steps were judged otherwise: each is explained as it was judged."""

        def joined(mine: Mapping[Key, V], others: Mapping[Key, V]) -> dict[Key, V]:
            return {key: of for key, of in mine.items() if key[0] not in steps} | {
                key: of for key, of in others.items() if key[0] in steps
            }

        def explain(trace: Trace, ops: list[OpResult], progress: Progress, seconds: float) -> list[OpResult]:
            budget, found = Budget(seconds), [*ops]
            for done, (one, is_other) in enumerate(((self, False), (other, True))):
                places = [at for at, op in enumerate(ops) if (op.step in steps) == is_other]
                own = one.replay.trace if trace is other.replay.trace else trace  # of each those of its shapes
                explained = one.explain_as(own, [ops[at] for at in places], within(progress, done, 2), budget.left)
                for at, op in zip(places, explained, strict=True):
                    found[at] = op
            return found

        return replace(
            other,
            locals=joined(self.locals, other.locals),
            misshapen=joined(self.misshapen, other.misshapen),
            explain_as=explain,
            forms=dict.fromkeys(self.replay.trace.steps.keys() - steps, self.replay.graph),
            ties=lambda reference: dict.fromkeys((*self.ties(reference), *other.ties(reference))),
        )


def replay_and_explain(
    model: Model,
    subjects: Sequence[Subject],
    workers: Workers = ALONE,
    progress: Progress = lambda fraction: None,
    device: str = "cpu",
) -> list[Judged]:
    """Judge every record of these traces by replay against the model, by these workers, on this device.

    Raises TraceError for a trace of another model, one whose positions leave a gap, or whose choices are none, and
    EngineError for a device that is not there.
    """
    check_device(device)
    own = [at for at, subject in enumerate(subjects) if suits_a_step(model, subject.trace)]
    each = _judged(model, [subjects[at] for at in own], workers, progress, device) if own else []
    judged = dict(zip(own, each, strict=True))
    if other := model.expanded():
        ops = {op.name for op in model.graph if op != other.graph[op.name]}
        for at, subject in enumerate(subjects):
            one = judged.get(at)
            if one is None or ops & one.wrong():
                (again,) = _judged(other, [subject], workers, progress, device)
                judged[at] = _in_either_form(one, again)
    return [judged[at] for at in range(len(subjects))]


def _in_either_form(own: Judged | None, other: Judged) -> Judged:
    """A trace that was judged in the model's own form of attention, and in the other: each step in that of which less
    is wrong. Servers make keys and values of each head for prompts, and multiply with the latent in decode steps.
    """
    path, steps = other.replay.trace.path, [*other.replay.trace.steps]
    if own is None:
        return other.noting(_EXPANDED.format(path, ""))
    wrong, of_heads = own.n_wrong(), other.n_wrong()
    better = {step for step in steps if of_heads[step] < wrong[step]}
    if not better:
        return own
    if not any(wrong[step] < of_heads[step] for step in steps):
        return other.noting(_EXPANDED.format(path, ""))
    said = _EXPANDED.format(path, f"{count(len(better), 'step')} (first {min(better)}) of {len(steps)} ")
    return own.with_steps_of(other, better).noting(said)


def _judged(
    model: Model, subjects: Sequence[Subject], workers: Workers, progress: Progress, device: str
) -> list[Judged]:
    graph = model.graph
    for subject in subjects:
        refuse_no_choice(subject.trace, graph)
    replays = replays_of(model, subjects, device=device, is_mistaken=is_mistaken)
    locals_: list[dict[tuple[int, str], Local]] = [{} for _ in replays]
    for side, record, local in judged_by(workers, model, subjects, replays, progress):
        locals_[side][record.step, record.op] = local
    uncovered = graph.after(op.name for op in graph if not is_covered(op))
    return [
        Judged(
            locals=found,
            uncovered=uncovered,
            misshapen=misshapen(subject.trace, graph),
            begun_late=begun_late(subject.trace, graph, found),
            explain_as=partial(_explained, workers, model, subject, replay),
            notes=tuple(replay.notes()),
            ties=partial(ties, replay, found),
            replay=replay,
        )
        for subject, replay, found in zip(subjects, replays, locals_, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Task:
    """A task of a worker: the results of a trace, of which those at some places are to be explained within a time."""

    ops: list[OpResult]
    places: list[int]
    seconds: float


def _explained(
    workers: Workers,
    model: Model,
    subject: Subject,
    replay: Replay,
    trace: Trace,
    ops: list[OpResult],
    progress: Progress,
    seconds: float,
) -> list[OpResult]:
    """As `Explainer.explain`, by the workers: one kin each, for which each takes its share of the seconds. The trace is
    the one that was judged, or what some ranks have of it.

    What explains is imported where there is anything to explain: a tenth of a second.
    """
    replay, subject = replay.of(trace), replace(subject, trace=trace)
    if not any(op.status == "faulty" or (op.local and replay.is_excused(op.local)) for op in ops):
        return ops
    from tracediff.diagnose import cut_off
    from tracediff.diagnose.explain import Explainer
    from tracediff.diagnose.held import by_what_was_held
    from tracediff.diagnose.misnamed import exchanged
    from tracediff.diagnose.overwritten import overwritten
    from tracediff.diagnose.undone import undone

    explainer, budget = Explainer(replay), Budget(seconds)
    ops = undone(model, subject, replay, cut_off.named(replay, ops), Budget(seconds / 8))
    ops = exchanged(replay, by_what_was_held(model, subject, replay, ops, budget), budget)
    kins = explainer.kins(ops)
    if workers == ALONE or len(kins) < 2:
        return overwritten(replay.graph, explainer.explain(ops, progress, budget))

    def given(n: int) -> list[_Task]:
        return [_Task(ops, places, budget.left * min(1.0, n / len(kins))) for places in kins]

    explained = list(ops)
    for done, found in enumerate(spread(workers, _of_kin, model, [subject], [replay], given), 1):
        for at, op in found.items():
            explained[at] = op
        progress(done / len(kins))
    return overwritten(replay.graph, explained)


def _of_kin(replays: Sequence[Replay], task: _Task) -> dict[int, OpResult]:
    from tracediff.diagnose.explain import Explainer

    return Explainer(replays[0]).of(task.ops, task.places, Budget(task.seconds), lambda fraction: None)
