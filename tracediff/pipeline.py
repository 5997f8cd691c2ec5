"""The arrow diagram as code: traces -> align -> compare -> replay -> judge -> diagnose -> result."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tracediff.audit.held import compare_weights, refuse_another_model, rounded_weights, wrong_weights
from tracediff.compare.align import Pair, plan, same_input
from tracediff.compare.logits import compare_logits
from tracediff.compare.measure import measure_pairs, record_statistics
from tracediff.compare.sides import gathered, side_of, weights_of
from tracediff.compare.storage import measure_storage
from tracediff.compare.vital_signs import measure_normal
from tracediff.errors import in_one_line, is_bug
from tracediff.findings.doubts import doubts, unresolved
from tracediff.findings.notes import as_of_ranks, of_another_file, trace_notes, unsought
from tracediff.findings.tell import told
from tracediff.judge import UNCOVERED, USUAL, Policy, coarsest, judge, verdict
from tracediff.model.vocabulary import Vocabulary
from tracediff.names import kind_of, layer_of
from tracediff.replay.cluster import Cluster, connected
from tracediff.replay.coverage import measure_coverage
from tracediff.replay.starting import begin
from tracediff.result import Cause, Divergence, OpResult, Result, WeightResult
from tracediff.trace.misread import misread
from tracediff.trace.ranks import Ranks
from tracediff.trace.reader import Trace
from tracediff.trace.runs import Paths, open_trace

if TYPE_CHECKING:
    from tracediff.diagnose.judged import Judged
    from tracediff.model.model import Model

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """What may be spent: processes that judge, and then seconds in which the causes of what is faulty are sought; and
    the device on which all that is recomputed.
    """

    workers: int = 1
    seconds: float = math.inf
    device: str = "cpu"
    ray: str | None = None  # the address of a Ray cluster that judges, so many tasks at once


NO_LIMIT = Effort()
_LATE = (
    "its sequence begins at position {}: what is cached of those before is not in the trace. Name their tokens in the "
    "step as well, and give its ops the rows that were computed"
)
_TERMS = "a sum over ranks whose copies of what it is made of differ: terms of different sums, which are not judged"
_ANOTHER_WAY = "the reference computes it in another way: each is judged by itself, and they are not compared"


def compare_traces(
    reference: Paths,
    candidate: Paths,
    *,
    model: "Path | Model | None" = None,
    policy: Policy = USUAL,
    arithmetic: str | None = None,
    effort: Effort = NO_LIMIT,
    progress: Progress = lambda stage, fraction: None,
) -> Result:
    """The candidate's trace against the reference's; with the model, every op of both is replayed too."""
    r, sides = open_trace(reference).sides[0], open_trace(candidate).sides
    c = sides[0]
    model = opened(model, r, c) if model else None
    same_input(r, c, lambda: model.vocabulary if model else Vocabulary())
    pairs = plan(r, c)
    policy.check([*(pair.op for pair in pairs), *_required_of(model, policy)])
    tolerance = partial(policy.tolerance, coarsest=_coarsest(pairs, r, c))
    measured: list[list[OpResult]] = [[] for _ in sides]
    for done, (ops, side) in enumerate(zip(measured, sides, strict=True)):
        for op in measure_pairs(plan(r, side), r, side, tolerance):
            ops.append(op)
            progress("compare", (done + len(ops) / len(pairs)) / len(sides))
    notes = [*trace_notes(r), *trace_notes(c)]
    weights = [list(compare_weights(r, side, model)) for side in sides]
    judged: list[Judged] = []
    if model:
        held = list(compare_weights(None, r, model))
        refuse_another_model(weights[0], c, model)
        refuse_another_model(held, r, model)
    with connected(effort.ray if model else None, effort.workers) as cluster:
        if model:
            given = [*((*one, arithmetic) for one in zip(sides, weights, strict=True)), (r, held, None)]
            *judged, theirs = _replayed(model, given, effort, cluster, progress)
            measured = [
                [_with_replay(op, one, theirs) for op in ops] for ops, one in zip(measured, judged, strict=True)
            ]
            notes += [*theirs.notes, *judged[0].notes, *judged[0].ties(r)]
        return _result(measured, weights_of(sides, weights), notes, r, sides, judged, model, policy, effort, progress)


def check_trace(
    trace: Paths,
    model: "Path | Model",
    *,
    policy: Policy = USUAL,
    arithmetic: str | None = None,
    effort: Effort = NO_LIMIT,
    progress: Progress = lambda stage, fraction: None,
) -> Result:
    """One trace, or those of all ranks of a run, judged by replay alone."""
    sides = open_trace(trace).sides
    c = sides[0]
    model = opened(model, c)
    policy.check([*(op for _, op in c.ops), *_required_of(model, policy)])
    weights = [list(compare_weights(None, side, model)) for side in sides]
    refuse_another_model(weights[0], c, model)
    with connected(effort.ray, effort.workers) as cluster:
        given = [(*one, arithmetic) for one in zip(sides, weights, strict=True)]
        judged = _replayed(model, given, effort, cluster, progress)
        checked = [_checked(side, one) for side, one in zip(sides, judged, strict=True)]
        notes = [*trace_notes(c), *judged[0].notes, *judged[0].ties(None)]
        return _result(checked, weights_of(sides, weights), notes, None, sides, judged, model, policy, effort, progress)


def _checked(trace: Trace, judged: "Judged") -> list[OpResult]:
    """What replay says of each op of a trace."""
    ops = []
    for (step, name), record in trace.ops.items():
        statistics = record_statistics(record, trace)
        op = OpResult(name, step, layer_of(name), kind_of(name), "ok", None, statistics)
        op = _with_replay(op, judged)
        if not op.local and op.status == "ok":
            why = "no op of this model" if record.has_data else "statistics only: there is nothing to replay"
            why = _TERMS if name in judged.replay.graph and trace.own(record) == [] else why
            op = replace(op, status="unmatched", note=UNCOVERED if name in judged.uncovered else why)
        ops.append(op)
    return ops


def plan_traces(
    traces: Sequence[tuple[Paths, str | None]],
    model: "Path | Model",
    device: str,
    progress: Callable[[float], None],
) -> Iterator[str]:
    """How the records of each trace would be recomputed, given its arithmetic or None, in lines for a reader.

    Raises EngineError for a device that torch cannot use here.
    """
    from tracediff.diagnose.beforehand import is_mistaken
    from tracediff.model.weights import check_device
    from tracediff.replay.judging import Subject, replays_of
    from tracediff.replay.memory import needed
    from tracediff.replay.misshapen import suited

    check_device(device)
    for done, (path, arithmetic) in enumerate(traces):
        trace = open_trace(path).sides[0]
        model = opened(model, trace)
        weights = list(compare_weights(None, trace, model))
        refuse_another_model(weights, trace, model)
        subject = Subject(trace, rounded_weights(weights, trace, model), arithmetic)
        (replay,) = replays_of(suited(model, trace), [subject], device=device, is_mistaken=is_mistaken)
        yield f"{trace.path}: how each sort of record is recomputed from what was recorded of its inputs"
        yield from (f"  {line}" for line in replay.plan.lines())
        yield f"  a process that judges it takes {needed([replay])}"
        progress((done + 1) / len(traces))


def _with_replay(op: OpResult, ours: "Judged", theirs: "Judged | None" = None) -> OpResult:
    """What replay of either side says of the op; one of another shape than the model's is faulty by that."""
    key = op.step, op.op
    own = ours.graph(op.step).ops.get(op.op)
    if own:  # a name does not tell the kind: of a feed-forward's activation there are several
        op = replace(op, kind=own.kind)
    wrong, other = ours.misshapen.get(key), theirs.misshapen.get(key) if theirs else None
    local, reference_local = ours.locals.get(key), theirs.locals.get(key) if theirs else None
    if wrong and wrong.some_tokens:
        note = f"{wrong.shapes}: if it holds some tokens, say which in its rows"
        return replace(op, status="unmatched", note=note, for_some_tokens=True)
    segment = local.segment if local and local.faulty else (op.op,) if wrong else ()
    if begins := ours.begins_late(op.step, segment):
        return replace(op, status="undecided", note=_LATE.format(begins))
    if wrong:
        cause = Cause("shape", math.nan, wrong.text, math.nan, "", {"shape": wrong.text})
        return replace(op, status="faulty", note=wrong.shapes, cause=cause, in_some_steps=True)
    if other:
        op = replace(op, status="unmatched", note=f"the reference's has {other.shapes}")
    if theirs and theirs.graph(op.step).ops.get(op.op) != own:
        op = replace(op, status="unmatched", drift=None, tolerance=None, note=_ANOTHER_WAY)
    if local and local.faulty and (of := _misshapen_in(local.segment, op.step, ours)):
        note = f"made of {of}, which has another shape: there is nothing to replay"
        return replace(op, status="unmatched", note=note)
    return replace(op, local=local, reference_local=reference_local)


def _misshapen_in(segment: tuple[str, ...], step: int, judged: "Judged") -> str | None:
    """The last op of a segment whose record has another shape. What is made of it cannot be right; where it is, only
    the record is wrong.
    """
    wrong = (name for name in reversed(segment[:-1]) if (step, name) in judged.misshapen)
    return next((name for name in wrong if not judged.misshapen[step, name].some_tokens), None)


def opened(model: "Path | Model", *traces: Trace) -> "Model":
    """The model, with what these traces show of it. Opening one needs gguf, which `compare` does without."""
    from tracediff.model.model import Model

    model = Model.opened(model)
    model.show((name for trace in traces for _, name in trace.ops), max((trace.length for trace in traces), default=0))
    return model


def _required_of(model: "Model | None", policy: Policy) -> list[str]:
    """The ops of the model, where some are required: neither trace may have them."""
    return [*model.graph.ops] if model and policy.required else []


def _required(ops: Iterable[OpResult], trace: Trace, model: "Model | None", policy: Policy) -> list[OpResult]:
    """Those that are required and that no side has, in any step of the trace."""
    there = {(op.step, op.op) for op in ops}
    names = [name for name in _required_of(model, policy) if policy.requires(name)]
    absent = ((step, name) for step in trace.steps for name in names if (step, name) not in there)
    return [
        OpResult(name, step, layer_of(name), kind_of(name), "unmatched", note="not recorded, and required")
        for step, name in absent
    ]


def _result(
    measured: Sequence[list[OpResult]],
    weights: list[WeightResult],
    notes: Iterable[str],
    reference: Trace | None,
    sides: Sequence[Trace],
    judged: "Sequence[Judged]",
    model: "Model | None",
    policy: Policy,
    effort: Effort,
    progress: Progress,
) -> Result:
    candidate = sides[0]
    measured = [judge([*ops, *_required(ops, candidate, model, policy)], policy) for ops in measured]
    if judged:
        try:
            ops = _explained(judged, measured, effort.seconds, progress)
        except Exception as error:  # where it diverges is known, whatever becomes of why
            if not is_bug(error):
                raise
            bug, found = in_one_line(error), (op for _, op in gathered(sides, measured))
            ops = [replace(op, sought=False, bug=bug) if op.status == "faulty" else op for op in found]
    else:
        ops = [op for _, op in gathered(sides, measured)]
    coverage = measure_coverage(candidate, judged[0].replay.graph, ops) if judged else None
    undecided = (*doubts(reference, candidate, ops, coverage), *unresolved(weights, policy.resolve))
    outcome, first = verdict(ops, weights, policy, undecided)
    of = (model.path.name, model.graph.hparams.arch, model.graph.matmul_type) if model else None
    other_file = of_another_file(candidate, *of, ops) if of else []
    notes = [*(as_of_ranks(candidate, ops) if of else ()), *notes]
    result = Result(
        verdict=outcome,
        first_divergence=first,
        ops=tuple(ops),
        weights=tuple(weights),
        logits=tuple(compare_logits(reference, candidate, model)) if reference else (),
        reference=side_of(reference) if reference else None,
        candidate=side_of(candidate),
        tokens=tuple(candidate.tokens),
        steps=tuple(candidate.steps),
        normal=measure_normal(reference, candidate),
        storage=measure_storage(ops),
        coverage=coverage,
        notes=(*notes, *unsought(ops, effort.seconds)),
        undecided=undecided,
        model=str(model.path) if model else None,
    )
    result = told(result)
    if outcome == "diverged":  # before all that follows from it
        return replace(result, details=(*result.details, *other_file, *_of_another_type(first, candidate)))
    return replace(result, notes=(*other_file, *result.notes))


def _of_another_type(first: Divergence | None, trace: Trace) -> Iterator[str]:
    """That the first record that diverges looks as if it was written as another type than the trace says."""
    record = trace.ops.get((first.step, first.op)) if first else None
    if record and record.dtype == "f32" and (looks := misread(trace.values(record))):
        yield f"{record.op} holds what is no float32: {looks[0]}. {looks[1]}"


def _replayed(
    model: "Model",
    sides: Iterable[tuple[Trace, Iterable[WeightResult], str | None]],
    effort: Effort,
    cluster: Cluster | None,
    progress: Progress,
) -> "list[Judged]":
    """Each trace, with what was found of its weights, in its arithmetic if given. Replay needs torch, which `compare`
    without a model does without.
    """
    if effort.workers > 1 and not cluster:
        begin()
    from tracediff.diagnose.judged import replay_and_explain
    from tracediff.replay.judging import Subject
    from tracediff.replay.workers import Workers

    subjects = []
    for side, weights, arithmetic in sides:
        found = list(weights)
        mistakes = {weight.weight: weight.cause for weight in found if weight.cause}
        held, wrong = rounded_weights(found, side, model), wrong_weights(found, side, model)
        subjects.append(Subject(side, held, arithmetic, wrong, mistakes))
    workers = Workers(effort.workers, cluster)
    return replay_and_explain(model, subjects, workers, lambda f: progress("replay", f), effort.device)


def _explained(
    judged: "Sequence[Judged]", measured: list[list[OpResult]], seconds: float, progress: Progress
) -> list[OpResult]:
    """Where it diverges is known when causes are sought, which may take longer: so the stage says it."""
    found = gathered([one.replay.trace for one in judged], measured)
    first = next((op for _, op in found if op.status == "faulty"), None)
    stage = f"DIVERGED at {first.op} in step {first.step}: why" if first else "known mistakes"
    if isinstance(judged[0].replay.trace, Ranks):
        from tracediff.diagnose.ranks import explain_ranks

        return explain_ranks(judged, measured, found, lambda fraction: progress(stage, fraction), seconds)
    return judged[0].explain(measured[0], lambda fraction: progress(stage, fraction), seconds)


def _coarsest(pairs: list[Pair], r: Trace, c: Trace) -> str:
    """The coarsest rounding that the two sides went through."""
    storages = [record.dtype for pair in pairs for record in (pair.reference, pair.candidate) if record]
    # The two ran the same model: a side that does not say the type of its weights has the other's.
    known = [kind for kind in (r.header.weights, c.header.weights) if kind]
    return coarsest(storages, known or [None], [of for of in (r.header.rounding, c.header.rounding) if of])
