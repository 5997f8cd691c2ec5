"""The arrow diagram as code: traces -> align -> compare -> replay -> judge -> diagnose -> result."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tracediff.align import Pair, plan, same_input
from tracediff.compare import compare_values
from tracediff.coverage import measure_coverage
from tracediff.judge import Policy, coarsest, drift_of_statistics, judge, verdict
from tracediff.logits import compare_logits
from tracediff.names import kind_of, layer_of
from tracediff.normal import measure_normal
from tracediff.result import Drift, OpResult, Result, Side, Statistics
from tracediff.trace.format import OpRecord, Rows
from tracediff.trace.reader import Trace
from tracediff.vocabulary import Vocabulary
from tracediff.weights import compare_weights, refuse_another_model

if TYPE_CHECKING:
    from tracediff.diagnose.explain import Judged

Progress = Callable[[str, float], None]
Explain = Callable[[list[OpResult]], list[OpResult]]


def compare_traces(
    reference: Path,
    candidate: Path,
    *,
    model: Path | None = None,
    policy: Policy | None = None,
    arithmetic: str | None = None,
    progress: Progress = lambda stage, fraction: None,
) -> Result:
    """The candidate's trace against the reference's; with the model, every op of both is replayed too."""
    policy = policy or Policy()
    r, c = Trace(reference), Trace(candidate)
    same_input(r, c, lambda: Vocabulary(model))
    pairs = plan(r, c)
    policy.check(pair.op for pair in pairs)
    measured = _measure(pairs, r, c, policy, progress)
    notes = [*_notes(r), *_notes(c)]
    explain: Explain = list
    if model:
        refuse_another_model(c, model)
        refuse_another_model(r, model)
        ours = _replayed(c, model, arithmetic, lambda f: progress("replay the candidate", f))
        theirs = _replayed(r, model, None, lambda f: progress("replay the reference", f))
        measured = [
            replace(op, local=ours.locals.get(key), reference_local=theirs.locals.get(key))
            for op in measured
            for key in [(op.step, op.op)]
        ]
        explain = _explain(ours, progress)
    return _result(measured, r, c, model, policy, explain, notes)


def check_trace(
    trace: Path,
    model: Path,
    *,
    policy: Policy | None = None,
    arithmetic: str | None = None,
    progress: Progress = lambda stage, fraction: None,
) -> Result:
    """One trace judged by replay alone."""
    c = Trace(trace)
    refuse_another_model(c, model)
    judged = _replayed(c, model, arithmetic, lambda f: progress("replay", f))
    ops = []
    for (step, name), record in c.ops.items():
        statistics = record_statistics(record, c)
        ops.append(
            OpResult(
                name,
                step,
                layer_of(name),
                kind_of(name),
                "ok",
                None,
                statistics,
                local=judged.locals.get((step, name)),
            )
        )
    return _result(ops, None, c, model, policy or Policy(), _explain(judged, progress), _notes(c))


def _result(
    measured: list[OpResult],
    reference: Trace | None,
    candidate: Trace,
    model: Path | None,
    policy: Policy,
    explain: Explain,
    notes: Iterable[str],
) -> Result:
    ops = explain(judge(measured, policy))
    weights = list(compare_weights(reference, candidate, model))
    outcome, first = verdict(ops, weights, policy)
    return Result(
        verdict=outcome,
        first_divergence=first,
        ops=tuple(ops),
        weights=tuple(weights),
        logits=tuple(compare_logits(reference, candidate, model)) if reference else (),
        reference=_side(reference) if reference else None,
        candidate=_side(candidate),
        tokens=tuple(candidate.tokens),
        steps=tuple(candidate.steps),
        normal=measure_normal(reference, candidate),
        coverage=measure_coverage(candidate, model, ops) if model else None,
        notes=tuple(notes),
    )


def _notes(trace: Trace) -> list[str]:
    """What a reader must know of the trace itself."""
    notes = [f"{trace.path}: cut off: {trace.cut}."] if trace.cut else []
    if not any(record.has_data for record in trace.ops.values()):
        notes.append(
            f"{trace.path} holds statistics only: a permutation, a swapped head or a wrong rope pairing changes none "
            "of them. Record data to see those, and to judge each op by replay."
        )
    partial = [record for record in trace.ops.values() if record.has_statistics and record.lacking]
    if partial and not all(record.has_data for record in partial):
        lacking = sorted({name for record in partial for name in record.lacking})
        notes.append(
            f"{trace.path}: {len(partial)} records lack statistics ({', '.join(lacking)}): only those that both sides "
            "hold are compared. Where neither has the RMS, NMSE is relative to the mean or the extremes, and says less."
        )
    return notes


def _side(trace: Trace) -> Side:
    return Side(str(trace.path), trace.header.engine, trace.header.model, len(trace.ops), trace.cut)


def _replayed(trace: Trace, model: Path, arithmetic: str | None, progress: Callable[[float], None]) -> "Judged":
    """Replay needs torch, which `compare` without a model does without."""
    from tracediff.diagnose.explain import replay_and_explain

    return replay_and_explain(trace, model, arithmetic, progress)


def _explain(judged: "Judged", progress: Progress) -> Explain:
    return lambda ops: judged.explain(ops, lambda fraction: progress("name the mistakes", fraction))


def _measure(pairs: list[Pair], r: Trace, c: Trace, policy: Policy, progress: Progress) -> list[OpResult]:
    """Drift of every pair. One at a time: threads would fight over the interpreter more than they compute."""
    storages = [record.dtype for pair in pairs for record in (pair.reference, pair.candidate) if record]
    # The two ran the same model: a side that does not say the type of its weights has the other's.
    known = [kind for kind in (r.header.weights, c.header.weights) if kind]
    coarse = coarsest(storages, known or [None])
    done = []
    for pair in pairs:
        done.append(_measure_pair(pair, r, c, policy.tolerance(pair.op, coarse)))
        progress("compare", len(done) / len(pairs))
    return done


def _measure_pair(pair: Pair, r: Trace, c: Trace, tolerance: float) -> OpResult:
    where = (pair.op, pair.step, layer_of(pair.op), kind_of(pair.op))
    if pair.problem or not pair.reference or not pair.candidate:
        reference = record_statistics(pair.reference, r) if pair.reference else None
        candidate = record_statistics(pair.candidate, c) if pair.candidate else None
        return OpResult(*where, "unmatched", reference, candidate, note=pair.problem)
    reference, candidate, drift = _drift(pair.reference, pair.candidate, r, c, pair.rows)
    if drift is None and pair.reference.has_statistics and pair.candidate.has_statistics:
        return OpResult(*where, "unmatched", reference, candidate, note="no statistic is on both sides")
    return OpResult(*where, "ok", reference, candidate, drift, tolerance)


def _drift(a: OpRecord, b: OpRecord, r: Trace, c: Trace, rows: Rows) -> tuple[Statistics, Statistics, Drift | None]:
    if a.has_data and b.has_data:
        has_first = a.token_axis == 0 and (rows is None or rows[0] == 0)
        x, y = r.values(a, rows), c.values(b, rows)
        reference, candidate, drift = compare_values(x, y, _hidden(a, r, rows), has_first)
        worst = replace(drift.worst, at=a.place(drift.worst.at, rows))
        return reference, candidate, replace(drift, worst=worst)
    reference, candidate = record_statistics(a, r, rows), record_statistics(b, c, rows)
    size = (a if a.rows == rows else b).size
    return reference, candidate, drift_of_statistics(reference, candidate, size)


def record_statistics(record: OpRecord, trace: Trace, rows: Rows = None) -> Statistics:
    """As recorded, or computed from the data: of all that the record holds, or of these tokens alone."""
    rows = rows or record.rows
    if not record.has_data or (not record.lacking and rows == record.rows):
        return Statistics(record.min, record.max, record.mean, record.rms, record.nan, record.inf)
    values = trace.values(record, rows)
    return compare_values(values, values, _hidden(record, trace, rows))[0]


def _hidden(record: OpRecord, trace: Trace, rows: Rows) -> np.ndarray | None:
    """Which scores the causal mask will hide, [T, S]; None for other ops."""
    if kind_of(record.op) != "scores" or len(record.shape) != 3:
        return None
    queries = np.array(trace.steps[record.step].positions)
    keys = np.concatenate([step.positions for number, step in trace.steps.items() if number <= record.step])
    if record.whole_shape(len(queries))[1:] != (len(queries), len(keys)):
        return None
    return keys[None, :] > queries[slice(None) if rows is None else [*rows], None]
