"""What to do next: one command, and why it is the one."""

import shlex

from tracediff.english import listed
from tracediff.findings.gaps import to_record, to_split
from tracediff.names import sequence_of
from tracediff.result import Coverage, Finding, Next, OpResult, Result

_LONGER = "600"  # seconds in which causes are sought, where those that were given were too few


def next_step(result: Result, again: str | None = None) -> Next:
    """Of what is open the largest: whether it can be judged, then what is known to be wrong, then what hides.

    `again` is the command that made the result, where it is not one of the traces that the result names.
    """
    if not any(op.local or op.drift for op in result.ops):
        why = "nothing could be judged: this says what is wrong with how the trace is written, and what is missing"
        return Next(_command(result, "validate"), why)
    judged, first = result.coverage is not None, next(iter(result.findings), None)
    if first and first.mistake:
        return _of_known(first, result, again)
    made = again or _again(result)
    unseen = _unseen(first, result) if judged and first and not again else ""
    split = _split(result, result.coverage) if result.coverage else None
    if split and (not unseen or (first and first.segment)):
        return Next(made, split)
    if unseen:
        how = " (by weights=True of tracediff.record)" * result.candidate.engine.startswith("torch ")
        why = f"after the engine has recorded {unseen} as it holds them{how}: whether the loader or the op is wrong"
        return Next(shlex.join(("tracediff", "weights", _model(result), "--trace", result.candidate.path)), why)
    if not judged:
        hidden = "drift hides what is smaller than its tolerance: with the model each op is judged by itself"
        named = "with the model each op is judged by itself, and known mistakes are named"
        return Next(f"{made} {shlex.join(('--model', _model(result)))}", hidden if result.verdict == "match" else named)
    if first and not again and any(not op.sought and not op.bug for op in result.faulty):
        return Next(_again(result, "--time", _LONGER), "there was no time for all that may explain it")
    if first:
        return _of_unknown(first, result, again)
    if result.verdict == "undecided":
        blind = [op.op for op in result.ops if op.status == "undecided" and op.local and op.local.blind]
        coarse = (
            f"after the engine has computed {listed(list(dict.fromkeys(blind)), 3)} in float32, if it can: as it is"
        )
        hides = f"{coarse} its roundings hide any mistake there"
        return Next(made, hides if blind else f"after this is settled: {result.undecided[0]}")
    if result.verdict == "diverged":
        return Next(made, f"after this is mended: {result.summary.rstrip('.')}")
    return Next(_command(result, "ci", "--update"), "nothing diverges: lock that in, so that it stays so")


def _split(result: Result, coverage: Coverage) -> str | None:
    """What to record, where ops are judged as one and more can be told of each alone."""
    one = to_split(result, coverage)
    if one is None:
        return None
    return (
        f"record {to_record(one, coverage)} as well, or every op: {len(one.ops)} ops up to {one.op} are judged as one, "
        f"and {one.largest} at most are left then"
    )


def _of_known(one: Finding, result: Result, again: str | None) -> Next:
    look = f"mend it (look at {one.look})" if one.look else "mend it"
    if one.ops and not one.segment and not again:
        shown = "it shows what is computed there and what should be"
        return Next(_again(result, "--explain", one.ops[0]), f"{shown}; then {look}, and run this again")
    return Next(again or _again(result), f"{look}, and run this again")


def _of_unknown(one: Finding, result: Result, again: str | None) -> Next:
    """Of what is left its code, for which there is a case."""
    if one.weights and not again:
        why = (
            f"look at how the loader reads {listed(one.weights, 3)}: the ops are right for what it holds; then run this"
        )
        return Next(shlex.join(("tracediff", "weights", _model(result), "--trace", result.candidate.path)), why)
    code = f"look at the code of {listed(one.ops or one.weights, 3)} with the error's shape in mind"
    alone = next((op for op in result.faulty if op.op in one.ops[:1]), None)
    if alone is None or one.segment or again or sequence_of(alone.step):
        return Next(again or _again(result), f"{code}, then run this again")
    options = ("--op", alone.op, *(("--step", str(alone.step)) if alone.step else ()), "--out", f"{alone.op}.case")
    why = f"{code}: this writes what it read and should make, and a script that exits 1 until it does"
    return Next(_command(result, "reproduce", *options), why)


def _unseen(one: Finding, result: Result) -> str:
    """Weights of mistaken ops that were not recorded: an op is right if its weight was loaded wrong, or is held in a
    type that nobody knows.
    """
    recorded = {weight.weight for weight in result.weights}
    weights = (_weight(op) for op in result.faulty if op.op in one.ops)
    return listed([name for name in dict.fromkeys(weights) if name and name not in recorded], 3)


def _weight(op: OpResult) -> str | None:
    """Of a norm or a matmul, or of the rows that are looked up."""
    return op.local.weight if op.local and ("norm" in op.kind or op.local.weight_type) else None


def _again(result: Result, *options: str) -> str:
    if result.reference:
        with_model = ("--model", _model(result)) if result.coverage else ()
        traces = (result.reference.path, result.candidate.path)
        return shlex.join(("tracediff", "compare", *traces, *with_model, *options))
    return _command(result, "check", *options)


def _command(result: Result, name: str, *options: str) -> str:
    return shlex.join(("tracediff", name, result.candidate.path, "--model", _model(result), *options))


def _model(result: Result) -> str:
    """As it was given; else as the trace names it, which does not know where it lies."""
    return result.model or result.candidate.model or "MODEL"
