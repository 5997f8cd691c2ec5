"""The verdict: what is wrong first, which engines were compared, and every mistake once."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import RenderableType
from rich.text import Text

from tracediff.report.parts import count, hanging, heading, headline, line, listed, local_name, number
from tracediff.result import OpResult, Result


def verdict(result: Result) -> Iterator[RenderableType]:
    """One sentence, and the figures behind it."""
    if result.verdict == "match":
        yield headline("match", _match(result))
        yield from _resolving(result)
        return
    if result.verdict == "undecided":
        yield headline("undecided", f"{result.undecided[0]}.")
        yield from (line(f"{doubt}.") for doubt in result.undecided[1:])
        if any(op.told for op in result.ops):
            yield line(f"Otherwise {_match(result)}")
        yield from _resolving(result)
        return
    yield headline("diverged", _why(result))
    first = result.first_divergence
    if first and first.reason == "local":
        op = next(op for op in result.ops if (op.op, op.step) == (first.op, first.step))
        if op.local:
            yield line(
                f"first at {first.op}{_in_step(first.step, result)}: local error (NMSE) {number(op.local.nmse)}, "
                f"floor {number(op.floor)}" + (f", with the cause undone {number(op.cause.nmse)}" if op.cause else "")
            )
        elif op.note:
            yield line(f"first at {first.op}{_in_step(first.step, result)}: {op.note}")


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
    names = [*dict.fromkeys(local_name(op) for op in coverage.unjudged)]
    reach = f"they cover {covered} of the model's {coverage.n_ops} ops" + (f", not {listed(names)}" if names else "")
    return f"nothing diverges in {count(judged, 'record')}, {how}: {reach}.{lacking}"


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
            yield f" {count(alone, 'other')} {'is' if alone == 1 else 'are'} in {side.path} alone."
    apart = sum(op.reference is not None and op.candidate is not None for op in unmatched)
    if apart:
        yield f" {count(apart, 'other')} cannot be compared: see below."


def _resolving(result: Result) -> Iterator[RenderableType]:
    """How large a mistake must be to show: of ops by themselves, at the end of segments, and by drift alone."""
    worst: dict[str, OpResult] = {}
    for op in result.ops:
        if op.told:
            kind = _told_by(op)
            worst[kind] = max(worst.get(kind, op), op, key=lambda op: op.resolving)
    seen = {kind: op for kind, op in worst.items() if math.isfinite(op.resolving)}
    if seen:
        parts = [f"above {number(op.resolving)} {kind}" for kind, op in seen.items()]
        parts[0] = parts[0].removesuffix(" by itself") if len(worst) == 1 else parts[0]
        widest = max(seen.values(), key=lambda op: op.resolving)
        yield line(f"A mistake of NMSE {', or '.join(parts)} would have been seen (widest: {widest.op}).")
    if len(seen) < len(worst):
        yield line("Of some only statistics were compared: a permutation changes none of them.")


def _told_by(op: OpResult) -> str:
    if not op.local or op.local.blind:
        return "in any op by drift alone"
    return "at the end of any segment" if len(op.local.segment) > 1 else "in any op by itself"


def _why(result: Result) -> str:
    first = result.first_divergence
    wrong = [weight.weight for weight in result.weights if weight.status == "wrong"]
    loaded = f"{_are(len(wrong), 'weight')} wrong in memory: {', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''}"
    if first is None:
        return f"{loaded}."
    if first.reason == "local":
        groups = _groups(result)
        others = len(groups) - 1
        more = f" {_are(others, 'other mistake')} listed below." if others > 0 else ""
        return _sentence(groups[0], result) + more
    op = next(op for op in result.ops if (op.op, op.step) == (first.op, first.step))
    before = f"{loaded}; and " if wrong else ""
    if op.note:
        return f"{before}{first.op}{_in_step(first.step, result)}: {op.note}."
    drift = f"NMSE {number(op.drift.nmse)}, tolerance {number(op.tolerance)}" if op.drift else ""
    return f"{before}{first.op} is the first op over its tolerance{_in_step(first.step, result)} ({drift})."


def _are(n: int, noun: str) -> str:
    return f"{count(n, noun)} {'is' if n == 1 else 'are'}"


def _in_step(step: int, result: Result) -> str:
    return f" in step {step}" if len(result.steps) > 1 else ""


class _Group(NamedTuple):
    """One mistake, as it is said of the first of the ops that it is in; None where none explains them."""

    text: str | None
    ops: list[OpResult]


def _groups(result: Result) -> list[_Group]:
    """What is wrong: the same mistake in other ops, layers and steps is one. Of the first op, the widest first."""
    groups: dict[tuple[str, str], _Group] = {}
    for op in result.faulty:
        name = local_name(op.op)
        if not op.cause:
            groups.setdefault((name, ""), _Group(None, [])).ops.append(op)
            continue
        for mistake, text in op.cause.each.items():
            alike = _unnamed(text, op)
            key = (name, mistake) if "blk." in alike else ("", alike)
            groups.setdefault(key, _Group(text, [])).ops.append(op)
    order = {(op.step, op.op): at for at, op in enumerate(result.faulty)}
    return sorted(groups.values(), key=lambda group: (order[group.ops[0].step, group.ops[0].op], -len(group.ops)))


def _unnamed(text: str, op: OpResult) -> str:
    """A cause in words that suit the same mistake elsewhere."""
    text = text.replace(f" ({op.op}.weight)", "")
    return text.replace(f"{op.op}.weight", "the weight").replace(f"{op.op}.bias", "the bias")


def _sentence(group: _Group, result: Result) -> str:
    text, ops = group
    first = ops[0]
    where = _where(ops, result)
    if first.local and len(first.local.segment) > 1:
        where = f"{_seen(ops, result)} (seen in {first.op if len(ops) == 1 else local_name(first.op)})"
    if text is None:
        return f"{where}: wrong, and no known mistake explains it ({first.shape})."
    several = len({op.op for op in ops}) > 1
    return f"{where}: {_unnamed(text, first) if several else text}."


def _seen(group: list[OpResult], result: Result) -> str:
    """Where a mistake is that shows in what a segment ends in: in these layers, or before these ops."""
    if all(op.layer is not None for op in group):
        return _layers(group, list({local_name(op.op) for op in group}), result)
    return f"before {listed(list(dict.fromkeys(op.op for op in group)))}"


def _where(group: list[OpResult], result: Result) -> str:
    inside = list(dict.fromkeys(local_name(op.op) for op in group if op.layer is not None))
    outside = list(dict.fromkeys(op.op for op in group if op.layer is None))
    places = [listed(outside, len(outside))] if outside else []
    if inside:
        places.insert(0, f"{listed(inside, len(inside))} in {_layers(group, inside, result)}")
    return ", and ".join(places)


def _layers(group: list[OpResult], names: list[str], result: Result) -> str:
    layers = sorted({op.layer for op in group if op.layer is not None})
    known = {op.layer for op in result.ops if local_name(op.op) in names}
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) == len(known):
        return "both layers" if len(layers) == 2 else f"all {len(layers)} layers"
    some = ", ".join(map(str, layers[:6])) + (", ..." if len(layers) > 6 else "")
    return f"{len(layers)} of {len(known)} layers ({some})"


def sides(result: Result) -> Iterator[RenderableType]:
    """Which engines, which traces, which tokens."""
    for name, side in (("reference", result.reference), ("candidate", result.candidate)):
        if side:
            cut = f", cut off: {side.cut}" if side.cut else ""
            said = f"{side.engine}, {side.n_ops} ops ({side.path}){cut}"
            yield line(f"{name}: {said}", style="dim")
    ids = ", ".join(map(str, result.tokens[:16])) + (", ..." if len(result.tokens) > 16 else "")
    yield line(f"{count(len(result.tokens), 'token')} in {count(len(result.steps), 'step')}: {ids}", style="dim")


def wrong_weights(result: Result) -> Iterator[RenderableType]:
    """Weights that are not what the file says."""
    wrong = [weight for weight in result.weights if weight.status == "wrong"]
    if wrong:
        yield heading("Weights that are wrong in memory")
        yield from (line(f"{weight.weight}: {weight.note}") for weight in wrong)


def faulty(result: Result) -> Iterator[RenderableType]:
    """Each mistake once, with all the ops that it is in."""
    groups = _groups(result)
    if not groups:
        return
    yield heading("Faulty ops (wrong by themselves, whatever came before)")
    for group in groups:
        worst = max((op.local.nmse for op in group.ops if op.local), default=math.nan)
        figure = "" if math.isnan(worst) else f" (NMSE up to {number(worst)})"
        said = Text.assemble(_sentence(group, result), (figure, "dim"))
        yield hanging("  -", said)
        local = group.ops[0].local
        if local and len(local.segment) > 1:
            yield line(f"covers {_segment(local.segment)}", style="dim", by=4)


def _segment(segment: tuple[str, ...]) -> str:
    return f"{len(segment)} ops, {segment[0]} to {segment[-1]}: the trace holds no values between"
