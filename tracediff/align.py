"""Two traces to pairs: planned on names and shapes alone, executed on tensors by `compare`."""

import math
from dataclasses import dataclass

from tracediff.errors import MismatchError
from tracediff.trace.format import OpRecord, Values
from tracediff.trace.reader import Trace


@dataclass(frozen=True, slots=True)
class Pair:
    """The records of one op on both sides; None on the side that lacks it. `problem` says why it cannot pair."""

    step: int
    op: str
    reference: OpRecord | None
    candidate: OpRecord | None
    problem: str | None = None


def same_input(reference: Trace, candidate: Trace) -> None:
    """Raises MismatchError when the two sides were not fed the same tokens at the same steps, or differ in model."""
    if not reference.ops or not candidate.ops:
        empty = reference if not reference.ops else candidate
        raise MismatchError(
            f"{empty.path}: the trace holds no op records: there is nothing to compare. Trace again, to the end."
        )
    sides = [(trace.header.arch, trace.header.model) for trace in (reference, candidate)]
    for what, a, b in zip(("architecture", "model"), *sides, strict=True):
        if a and b and a != b:
            raise MismatchError(
                f"the traces are of different models: {what} {a!r} in {reference.path}, {b!r} in {candidate.path}. "
                "Trace both engines on the same GGUF file."
            )
    common = reference.steps.keys() & candidate.steps.keys()
    if not common:
        raise MismatchError(
            f"no step is in both traces: {sorted(reference.steps)} in {reference.path}, "
            f"{sorted(candidate.steps)} in {candidate.path}. The prefill is step 0, each decode step one more."
        )
    for number in sorted(common):
        a_step, b_step = reference.steps[number], candidate.steps[number]
        if a_step.tokens != b_step.tokens:
            raise MismatchError(_tokens_differ(number, a_step.tokens, b_step.tokens, reference, candidate))


def _tokens_differ(step: int, a: tuple[int, ...], b: tuple[int, ...], reference: Trace, candidate: Trace) -> str:
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    message = (
        f"the token ids differ in step {step}, first at index {at}: all later values differ for that reason.\n"
        f"  {reference.path}: {len(a)} tokens, {_excerpt(a, at)}\n"
        f"  {candidate.path}: {len(b)} tokens, {_excerpt(b, at)}\n"
    )
    return (
        message
        + (_explain_tokens(a, b) + " " if _explain_tokens(a, b) else "")
        + ("Feed the candidate the reference's ids.")
    )


def _explain_tokens(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    if a[1:] == b:
        return f"The candidate lacks the reference's first token {a[0]}: a BOS that was not added?"
    if b[1:] == a:
        return f"The candidate has one more token in front, {b[0]}: a BOS added where none belongs, or doubled?"
    return ""


def _excerpt(tokens: tuple[int, ...], at: int) -> str:
    part = tokens[max(0, at - 2) : at + 4]
    return f"...{', '.join(map(str, part))}..."


def plan(reference: Trace, candidate: Trace) -> list[Pair]:
    """Every (step, op) of either side, in execution order: the reference's, then what only the candidate has."""
    pairs = []
    for step in sorted(reference.steps.keys() | candidate.steps.keys()):
        names = [record.op for record in reference.step_ops(step)]
        known = set(names)
        names += [record.op for record in candidate.step_ops(step) if record.op not in known]
        pairs += [_pair(step, op, reference, candidate) for op in names]
    if not any(pair.reference and pair.candidate for pair in pairs):
        raise MismatchError(
            f"no op is in both traces: {reference.path} has {next(iter(reference.ops))[1]!r}, ..., "
            f"{candidate.path} has {next(iter(candidate.ops))[1]!r}, ... "
            "`tracediff inspect MODEL` lists the names that an engine should write."
        )
    return pairs


def _pair(step: int, op: str, reference: Trace, candidate: Trace) -> Pair:
    a, b = reference.ops.get((step, op)), candidate.ops.get((step, op))
    problem = None
    if a is None or b is None:
        missing = reference if a is None else candidate
        problem = f"{missing.path.name} has no such record"
    elif not same_shape(a, b):
        problem = f"shapes differ: {list(a.shape)} and {list(b.shape)}"
    return Pair(step, op, a, b, problem)


def same_shape(a: Values, b: Values) -> bool:
    """Equal, or flat on one side where the other lists heads: [T, heads * head_dim] and [T, heads, head_dim]."""
    if a.shape == b.shape:
        return True
    ranks = {len(a.shape), len(b.shape)}
    return ranks == {2, 3} and a.shape[:1] == b.shape[:1] and math.prod(a.shape) == math.prod(b.shape)
