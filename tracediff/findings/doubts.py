"""Why a run in which nothing diverges is no match: each reason, with what to record or do so that it is decided."""

import math
from collections.abc import Iterable, Iterator, Sequence

from tracediff.english import few, listed
from tracediff.findings.words import by_name
from tracediff.judge import UNRESOLVED
from tracediff.result import Coverage, OpResult, WeightResult
from tracediff.trace.reader import Trace

_LISTED = 4


def doubts(
    reference: Trace | None, candidate: Trace, ops: Sequence[OpResult], coverage: Coverage | None
) -> Iterator[str]:
    """Sentences; none where a match is a match. `coverage` is there where the candidate was replayed."""
    if not any(op.local or op.drift or op.status in ("faulty", "drift") for op in ops):
        yield _nothing(reference, candidate, ops)
    elif coverage:
        yield from _unknown(candidate, coverage)
    yield from _cut(reference, candidate, ops, coverage)
    yield from _positions(reference, candidate)
    undecided = [op for op in ops if op.status == "undecided"]
    by_note: dict[str, list[OpResult]] = {}
    for op in undecided:
        by_note.setdefault(op.note or "", []).append(op)
    for note, alike in by_note.items():
        wide = [op.resolving for op in alike if math.isfinite(op.resolving)]
        most = f" (only one above NMSE {max(wide):.2g} is sure to)" if wide and note == UNRESOLVED else ""
        where = f"{listed(by_name(op.op for op in alike), _LISTED)}{_in_some(alike, ops)}"
        yield f"{where}: {note}{most}{_record(alike, coverage)}"


def _in_some(alike: Sequence[OpResult], ops: Iterable[OpResult]) -> str:
    """In which steps, where the same ops are not so in others."""
    names, steps = {op.op for op in alike}, sorted({op.step for op in alike})
    if not any(op.op in names and op.local and op.status != "undecided" for op in ops):
        return ""
    return f", in {'step' if len(steps) == 1 else 'steps'} {listed([*map(str, steps)], _LISTED)}"


def unresolved(weights: Iterable[WeightResult], resolve: float | None) -> Iterator[str]:
    """That ops were judged with recorded weights that are further off from the file's than what must show."""
    off = [w for w in weights if w.status == "rounded" and resolve is not None and (w.nmse or 0.0) > resolve]
    if off:
        most = max(off, key=lambda w: w.nmse or 0.0)
        yield (
            f"{listed([w.weight for w in off], _LISTED)}: recorded as other values than the file's (up to NMSE "
            f"{most.nmse:.2g}), with which ops were judged: {UNRESOLVED}"
        )


def _nothing(reference: Trace | None, candidate: Trace, ops: Sequence[OpResult]) -> str:
    if reference:
        first = next((op for op in ops if op.reference and op.candidate), ops[0])
        return f"nothing that both traces hold can be compared: {first.op} in step {first.step}: {first.note}"
    return (
        f"{candidate.path}: nothing in it can be replayed: it holds statistics only, or no op of this model. Record "
        "data, under the names that `tracediff inspect MODEL` lists; `tracediff compare` without --model compares "
        "statistics by tolerance"
    )


def _unknown(trace: Trace, coverage: Coverage) -> Iterator[str]:
    """A verdict on the few names that are known would be a green light for all."""
    if 2 * len(coverage.unknown) > len({op for _, op in trace.ops}):
        yield (
            f"{trace.path}: most of its ops ({len(coverage.unknown)}) have names that this model has not: "
            f"{', '.join(coverage.unknown[:3])}, ... `tracediff validate TRACE --model MODEL` lists them, "
            "`tracediff import` knows those of others"
        )


def _cut(
    reference: Trace | None, candidate: Trace, ops: Sequence[OpResult], coverage: Coverage | None
) -> Iterator[str]:
    """A trace that breaks off in its first step, before the last of what the model or the other side has there."""
    for trace in (candidate,) if coverage else (candidate, reference):
        if trace is None or not trace.cut or len(trace.steps) > 1:
            continue
        sides = ((op.candidate if trace is candidate else op.reference) for op in ops if op.step in trace.steps)
        if "output" in coverage.unjudged if coverage else None in sides:
            yield f"{trace.path} breaks off in its first step: {trace.cut}. Trace again, to the end"


def _positions(reference: Trace | None, candidate: Trace) -> Iterator[str]:
    """Positions that are not one after the other, or not the reference's: which ones hold, the values do not tell."""
    following: dict[int, int] = {}  # of each sequence
    for number, step in candidate.steps.items():
        first = following.get(step.sequence, step.positions[0])
        expected = tuple(range(first, first + len(step.positions)))
        if step.positions != expected:
            yield (
                f"{candidate.path}: step {number} says that it has the positions [{few(step.positions)}], where "
                f"[{few(expected)}] follow. Record those that the engine computes with"
            )
            return
        following[step.sequence] = first + len(step.positions)
    for number in candidate.steps if reference else ():
        assert reference
        if number not in reference.steps:
            continue
        theirs, ours = reference.steps[number].positions, candidate.steps[number].positions
        if theirs != ours:
            yield (
                f"step {number} has the positions [{few(ours)}] in {candidate.path}, [{few(theirs)}] in "
                f"{reference.path}. Run both at the same positions"
            )
            return


def _record(undecided: Sequence[OpResult], coverage: Coverage | None) -> str:
    """What to record so that the longest of these segments is split."""
    keys = {(op.step, op.op) for op in undecided}
    segments = [s for s in coverage.segments if (s.step, s.op) in keys and s.record] if coverage else []
    longest = max(segments, key=lambda segment: len(segment.ops), default=None)
    if longest is None:
        return ""
    return (
        f". Record {' and '.join(longest.record)} as well: of {len(longest.ops)} ops that are judged as one "
        f"{longest.largest} at most are left"
    )
