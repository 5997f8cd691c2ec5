"""One engine's two ways over the same tokens: each row of one put where the other's passes want it, then compared."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tracediff.files import temporary_folder
from tracediff.findings.next import next_step
from tracediff.judge import USUAL, Policy
from tracediff.pipeline import NO_LIMIT, Effort, Progress, compare_traces
from tracediff.result import Next, Result
from tracediff.trace.reader import Trace
from tracediff.trace.restep import matched, restep
from tracediff.trace.runs import Paths, open_trace
from tracediff.trace.ways import RUN_TWICE, match, mode, passes

if TYPE_CHECKING:
    from tracediff.model.model import Model

_HONEST = "By the model both ways are right, within what honest arithmetic makes of it, and differ in their bits."
_ENGINES = "They name two engines, {} and {}: `tracediff compare` holds one against another, within its tolerance."
_CACHED = (
    "Judged by how far the two drift apart, not by replay: that would need what the cache held, and no trace has it."
)


def compare_with_itself(
    a: Paths,
    b: Paths,
    *,
    model: "Path | Model | None" = None,
    policy: Policy = USUAL,
    effort: Effort = NO_LIMIT,
    progress: Progress = lambda stage, fraction: None,
) -> Result:
    """One engine's two ways over the same tokens, position by position.

    The candidate is `b`, in its own steps; with the model it is `a`, where replay finds that one wrong and `b` right.
    The same way run twice must give the same bits, unless the policy has tolerances. Raises MismatchError where tokens
    or embeddings do not line up.
    """
    alike = not policy.tolerances and mode(open_trace(b), open_trace(a)) == RUN_TWICE  # to the bit
    strict = replace(policy, tolerances={"*": 0.0})
    result = _in_steps_of(b, a, model, strict if alike and not model else policy, effort, progress)
    if model and result.verdict == "diverged" and not result.faulty:
        other = _in_steps_of(a, b, model, policy, effort, progress)
        return other if other.faulty else result
    if model and result.verdict == "match" and alike:
        apart = _in_steps_of(b, a, None, strict, effort, progress)
        return replace(apart, notes=(*apart.notes, _HONEST)) if apart.verdict == "diverged" else result
    return result


def _in_steps_of(
    candidate: Paths,
    reference: Paths,
    model: "Path | Model | None",
    policy: Policy,
    effort: Effort,
    progress: Progress,
) -> Result:
    """The candidate against a reference that was fed the same tokens in other passes."""
    c, r = open_trace(candidate), open_trace(reference)
    if [*c.steps.values()] == [*r.steps.values()] and any(record.sketch for t in (c, r) for record in t.ops.values()):
        return compare_traces(reference, candidate, policy=policy, effort=effort, progress=progress)
    cached = any(one.cached for one in match(c, r))
    with temporary_folder() as folder:
        theirs = folder / "reference.trace"
        dropped = restep(r, c, theirs)
        whole = matched(c, r, folder) or candidate
        steps = Trace(theirs).steps
        model = None if cached else model
        result = compare_traces(theirs, whole, model=model, policy=policy, effort=effort, progress=progress)
    assert result.reference
    names = (result.reference.engine, result.candidate.engine)
    engines = [_ENGINES.format(*names)] * (names[0] != names[1])
    said = f"{mode(c, r)}. {r.path}: {passes(r)}; {c.path}: {passes(c)}, compared position by position."
    result = replace(
        result,
        reference=replace(result.reference, path=str(r.path)),
        candidate=replace(result.candidate, path=str(c.path)),
        # What the other way was not fed at all is no gap.
        ops=tuple(op for op in result.ops if op.status != "unmatched" or op.step in steps),
        notes=(said, *engines, *dropped, *[_CACHED] * cached, *result.notes),
    )
    return replace(result, next=_next(result, cached, r, c))


def _next(result: Result, cached: bool, *runs: Trace) -> Next:
    """What is wrong by itself needs no other side; the rest is to be had of the two by this command alone."""
    if result.findings:
        return next_step(replace(result, reference=None))
    with_model = ("--model", result.model) if result.model else ()
    traces = (str(trace.path) for run in runs for trace in run.written)
    again = shlex.join(("tracediff", "self", *traces, *with_model))
    if cached and result.first_divergence:
        first = result.first_divergence.op
        why = f"after {first} is mended, which is the first to differ: no replay tells which of the two is wrong"
        return Next(again, why)
    return next_step(result, again)
