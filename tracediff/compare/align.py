"""Two traces to pairs: planned on names and shapes alone, executed on tensors by `compare`."""

from collections.abc import Callable
from dataclasses import dataclass

from tracediff.compare.tokens import describe_difference
from tracediff.errors import MismatchError
from tracediff.model.vocabulary import Vocabulary
from tracediff.trace.format import OpRecord, Rows
from tracediff.trace.reader import Trace
from tracediff.trace.shapes import misfit


@dataclass(frozen=True, slots=True)
class Pair:
    """The records of one op on both sides; None on the side that lacks it. `problem` says why it cannot pair: with
    `misshapen` because one has another shape than the other, which one of the two must answer for.

    `rows` are the tokens that both sides hold; None where both hold all.
    """

    step: int
    op: str
    reference: OpRecord | None
    candidate: OpRecord | None
    problem: str | None = None
    misshapen: bool = False
    rows: Rows = None


def same_input(reference: Trace, candidate: Trace, vocabulary: Callable[[], Vocabulary]) -> None:
    """Raises MismatchError when the two sides were not fed the same tokens at the same steps, or differ in model.

    `vocabulary` is asked for where tokens differ, for their texts.
    """
    if not reference.ops or not candidate.ops:
        empty = reference if not reference.ops else candidate
        raise MismatchError(
            f"{empty.path}: the trace holds no op records: there is nothing to compare. Trace again, to the end."
        )
    sides = [(trace.header.arch, _file_name(trace.header.model)) for trace in (reference, candidate)]
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
            names = (str(reference.path), str(candidate.path))
            raise MismatchError(*describe_difference(number, a_step.tokens, b_step.tokens, names, vocabulary()))


def _file_name(model: str | None) -> str | None:
    """Some engines write the path, of either kind."""
    return model and model.replace("\\", "/").rpartition("/")[2]


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
    if a is None or b is None:
        missing = reference if a is None else candidate
        what = "record" if step in missing.steps else "step"
        return Pair(step, op, a, b, f"{missing.path.name} has no such {what}")
    rows = _common_rows(a, b)
    n = len(reference.steps[step].tokens)
    wrong = misfit(op, b.whole_shape(n), a.whole_shape(n), may_be_flat=a.token_axis == 0)
    if wrong:
        some_tokens = wrong.axes == ("token",) and max(x.whole_shape(n)[x.token_axis] for x in (a, b)) <= n
        by = f" ({wrong.text})" if wrong.axes else ""
        problem = f"shapes differ: {list(a.shape)} and {list(b.shape)}{by}"
        return Pair(step, op, a, b, problem, misshapen=not some_tokens)
    if rows == ():
        return Pair(step, op, a, b, f"no row in common: one side has tokens {_few(a)}, the other {_few(b)}")
    for trace, record in ((reference, a), (candidate, b)):
        if not record.has_data and record.rows != rows:
            of = f"{trace.path.name} has statistics of tokens {_few(record)}"
            return Pair(step, op, a, b, f"{of}, which do not tell those of tokens {_few(b if record is a else a)}")
    return Pair(step, op, a, b, rows=rows)


def _common_rows(a: OpRecord, b: OpRecord) -> Rows:
    if a.rows is None or b.rows is None:
        return a.rows or b.rows
    return tuple(sorted({*a.rows} & {*b.rows}))


def _few(record: OpRecord) -> str:
    rows = [*map(str, record.rows or ())]
    return ", ".join(rows if len(rows) < 6 else [*rows[:4], "...", rows[-1]]) or "all"
