"""The verdict in a sentence or two, and the figures behind it."""

import math
from collections.abc import Iterator

from tracediff.english import count, listed
from tracediff.findings.words import are, number
from tracediff.names import local_name
from tracediff.result import OpResult, Result


def summary(result: Result) -> str:
    """What is most telling, and how much else there is."""
    if result.verdict == "match":
        return _match(result)
    if result.verdict == "undecided":
        return f"{result.undecided[0]}."
    first, found = result.first_divergence, result.findings
    others = f" {are(len(found) - 1, 'other mistake')} listed below." if len(found) > 1 else ""
    if first is None or first.reason == "local":
        return f"{found[0].text}{others}"
    before = f"{found[0].text}{others} And " if found else ""
    op = _first(result)
    if op.note:
        return f"{before}{first.op}{in_step(first.step, result)}: {op.note}."
    drift = f"NMSE {number(op.drift.nmse)}, tolerance {number(op.tolerance)}" if op.drift else ""
    return f"{before}{first.op} is the first op over its tolerance{in_step(first.step, result)} ({drift})."


def details(result: Result) -> Iterator[str]:
    """Where it begins and by how much; of what does not diverge how far that reaches."""
    if result.verdict == "match":
        yield from _resolving(result)
    elif result.verdict == "undecided":
        yield from (f"{doubt}." for doubt in result.undecided[1:])
        if any(op.told for op in result.ops):
            yield f"Otherwise {_match(result)}"
        yield from _resolving(result)
    elif result.first_divergence and result.first_divergence.reason == "local":
        op = _first(result)
        # Whether it is of another mistake is open: what nothing explains may come of the same one.
        below = "" if op.op in result.findings[0].ops else ", listed below"
        at = f"first at {op.op}{in_step(op.step, result)}{below}"
        if op.local:
            left = op.cause.nmse if op.cause else math.nan
            undone = f", with the cause undone {number(left)}" if math.isfinite(left) else ""
            is_single = op.local.nmse <= op.local.floor and op.local.excess > 1  # and not all of them together
            beyond = (
                f"; single values are off by up to {number(op.local.excess)} times their bounds" if is_single else ""
            )
            yield f"{at}: local error (NMSE) {number(op.local.nmse)}, floor {number(op.floor)}{undone}{beyond}"
        elif op.note:
            yield f"{at}: {op.note}"


def _first(result: Result) -> OpResult:
    first = result.first_divergence
    assert first
    return next(op for op in result.ops if (op.op, op.step) == (first.op, first.step))


def in_step(step: int, result: Result) -> str:
    """Which one, where there are several."""
    return f" in step {step}" if len(result.steps) > 1 else ""


def _match(result: Result) -> str:
    """What was judged, and how far that reaches."""
    if not result.coverage or not any(op.local for op in result.ops):
        return _by_drift(result)
    how = "replayed and compared" if result.reference else "replayed"
    judged = sum(op.local is not None for op in result.ops)
    coverage = result.coverage
    covered = coverage.alone + coverage.together
    steps = sorted({op.step for op in result.ops} - {*result.steps})
    lacking = f" It has no step {listed([*map(str, steps)])}, which the reference has." if steps else ""
    if judged == covered == coverage.n_ops:
        return f"nothing diverges in {judged} ops, {how}.{lacking}"
    of_steps = [*dict.fromkeys(map(local_name, coverage.some_steps))]
    names = [name for name in dict.fromkeys(map(local_name, coverage.unjudged)) if name not in of_steps]
    reach = f"they cover {covered} of the model's {coverage.n_ops} ops" + (f", not {listed(names)}" if names else "")
    in_some = f", {listed(of_steps)} in some steps alone" if of_steps else ""
    return f"nothing diverges in {count(judged, 'record')}, {how}: {reach}{in_some}.{lacking}"


def _by_drift(result: Result) -> str:
    drifts = [op for op in result.ops if op.drift and op.tolerance is not None]
    rest = [*_not_compared(result)]
    said = f"nothing diverges in {'the ' * bool(rest)}{count(len(drifts), 'op')}{' that both hold' * bool(rest)}"
    largest = max(drifts, key=lambda op: op.drift.nmse if op.drift else 0.0, default=None)
    most = ""
    if largest and largest.drift and largest.drift.nmse:
        most = f" (at most NMSE {number(largest.drift.nmse)} at {largest.op}, where {number(largest.tolerance)} may be)"
    smaller = " A mistake may be smaller: --model judges each op by itself." if most and not result.coverage else ""
    return f"{said}, compared by drift{most}.{smaller}{''.join(rest)}"


def _not_compared(result: Result) -> Iterator[str]:
    """How many ops each side has alone, and how many cannot be compared though both have them."""
    unmatched = [op for op in result.ops if op.status == "unmatched"]
    for side, other in ((result.reference, "candidate"), (result.candidate, "reference")):
        alone = sum(getattr(op, other) is None for op in unmatched)
        if side and alone:
            yield f" {are(alone, 'other')} in {side.path} alone."
    apart = sum(op.reference is not None and op.candidate is not None for op in unmatched)
    if apart:
        yield f" {count(apart, 'other')} cannot be compared: see below."


def _resolving(result: Result) -> Iterator[str]:
    """How large a mistake must be to show: of ops by themselves, at the end of segments, and by drift alone."""
    worst: dict[str, OpResult] = {}
    for op in result.ops:
        if op.told:
            kind = _told_by(op)
            worst[kind] = max(worst.get(kind, op), op, key=lambda op: op.resolving)
    seen = {kind: op for kind, op in worst.items() if math.isfinite(op.resolving)}
    if seen:
        blind = {_sort(op) for op in result.ops if op.status == "undecided"}
        others = {kind: kind.replace("any", "any other") if kind in blind else kind for kind in seen}
        parts = [f"above {number(op.resolving)} {others[kind]}" for kind, op in seen.items()]
        parts[0] = parts[0].removesuffix(" by itself") if len(worst) == 1 else parts[0]
        widest = max(seen.values(), key=lambda op: op.resolving)
        yield f"A mistake of NMSE {', or '.join(parts)} would have been seen (widest: {widest.op})."
        near = [w for w in result.weights if w.status == "rounded" and (w.nmse or 0.0) > widest.resolving]
        if near:
            most = max(near, key=lambda w: w.nmse or 0.0)
            of = "1 of them is" if len(near) == 1 else f"{len(near)} of them are"
            yield (
                f"It was judged with the weights that it recorded: {of} not as in the file, but rounded "
                f"(up to NMSE {number(most.nmse)}: {most.weight})."
            )
    if len(seen) < len(worst):
        of = "Of some ops" if seen else "Of the ops"
        yield f"{of} only statistics were compared: a permutation changes none of them."


def _told_by(op: OpResult) -> str:
    return "in any op by drift alone" if not op.local or op.local.blind else _sort(op)


def _sort(op: OpResult) -> str:
    return "at the end of any segment" if op.local and len(op.local.segment) > 1 else "in any op by itself"
