"""The report as people read it: the verdict first, then what supports it. A pure function of the result."""

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracediff.result import Logits, OpResult, Result, Statistics

_STYLES = {"ok": "green", "faulty": "bold red", "inherited": "yellow", "drift": "red", "unmatched": "magenta"}
_AROUND = 6  # ops shown on either side of the first divergence


def render(result: Result, width: int = 100) -> RenderableType:
    """The whole report for a terminal `width` columns wide."""
    sections = (
        _verdict(result),
        _sides(result),
        _wrong_weights(result),
        _faulty(result),
        _layers(result, width),
        _around(result, width),
        _norm_weights(result, width),
        _logits(result),
        _arithmetic(result),
        _unmatched(result),
        _notes(result),
    )
    return Group(*(part for section in sections for part in section))


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or 0.01 <= abs(value) < 100_000:
        return f"{value:.4g}"
    return f"{value:.2e}"


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    return table


# --- the verdict -------------------------------------------------------------------------------------------------


def _verdict(result: Result) -> Iterator[RenderableType]:
    n = len(result.ops)
    first = result.first_divergence
    if result.verdict == "match":
        how = "replayed and compared" if any(op.local for op in result.ops) else "compared by drift"
        yield Text.assemble(("MATCH", "bold green"), f": nothing diverges in {n} ops, {how}.")
        return
    yield Text.assemble(("DIVERGED", "bold red"), ": ", _why(result))
    if first and first.reason == "local":
        op = next(op for op in result.ops if (op.op, op.step) == (first.op, first.step))
        if op.local:
            yield Text(
                f"  first at {first.op}{_in_step(first.step, result)}: local error (NMSE) {_number(op.local.nmse)}, "
                f"floor {_number(op.local.floor)}"
                + (f", with the cause undone {_number(op.cause.nmse)}" if op.cause else "")
            )


def _why(result: Result) -> str:
    first = result.first_divergence
    if first is None:
        wrong = [weight.weight for weight in result.weights if weight.status == "wrong"]
        return f"{_count(len(wrong), 'weight')} wrong in memory: {', '.join(wrong[:3])}."
    if first.reason == "local":
        groups = _groups(result)
        others = len(groups) - 1
        more = f" {_count(others, 'other mistake')} listed below." if others > 0 else ""
        return _sentence(groups[0], result) + more
    if first.reason == "drift":
        op = next(op for op in result.ops if (op.op, op.step) == (first.op, first.step))
        drift = f"NMSE {_number(op.drift.nmse)}, tolerance {_number(op.tolerance)}" if op.drift else (op.note or "")
        return f"{first.op} is the first op over its tolerance{_in_step(first.step, result)} ({drift})."
    return f"{first.op} is not on both sides{_in_step(first.step, result)}."


def _count(n: int, noun: str) -> str:
    return f"{n} {noun} is" if n == 1 else f"{n} {noun}s are"


def _in_step(step: int, result: Result) -> str:
    return f" in step {step}" if len(result.steps) > 1 else ""


def _local(op: str) -> str:
    return op.split(".", 2)[-1] if op.startswith("blk.") else op


def _groups(result: Result) -> list[list[OpResult]]:
    """Faulty ops by what is wrong: the same mistake in other ops, layers and steps is one mistake."""
    groups: dict[tuple[str, str], list[OpResult]] = {}
    for op in result.faulty:
        key = (
            ("", op.cause.text)
            if op.cause and op.op not in op.cause.text
            else (_local(op.op), op.cause.name if op.cause else "")
        )
        groups.setdefault(key, []).append(op)
    return list(groups.values())


def _sentence(group: list[OpResult], result: Result) -> str:
    first = group[0]
    what = first.cause.text if first.cause else f"wrong, and no known mistake explains it ({first.shape})"
    return f"{_where(group, result)}: {what}."


def _where(group: list[OpResult], result: Result) -> str:
    names = list(dict.fromkeys(_local(op.op) for op in group))
    name = " and ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)
    layers = sorted({op.layer for op in group if op.layer is not None})
    if not layers:
        return name
    known = {op.layer for op in result.ops if _local(op.op) in names}
    if len(layers) == 1:
        return f"{name} in layer {layers[0]}"
    if len(layers) == len(known):
        return f"{name} in all {len(layers)} layers"
    some = ", ".join(map(str, layers[:6])) + (", ..." if len(layers) > 6 else "")
    return f"{name} in {len(layers)} of {len(known)} layers ({some})"


def _sides(result: Result) -> Iterator[RenderableType]:
    for name, side in (("reference", result.reference), ("candidate", result.candidate)):
        if side:
            cut = f", cut off: {side.cut}" if side.cut else ""
            yield Text(f"  {name}: {side.engine}, {side.n_ops} ops ({side.path}){cut}", style="dim")
    ids = ", ".join(map(str, result.tokens[:16])) + (", ..." if len(result.tokens) > 16 else "")
    yield Text(
        f"  {len(result.tokens)} tokens in {len(result.steps)} step{'s' * (len(result.steps) > 1)}: {ids}",
        style="dim",
    )


def _wrong_weights(result: Result) -> Iterator[RenderableType]:
    wrong = [weight for weight in result.weights if weight.status == "wrong"]
    if wrong:
        yield _heading("Weights that are wrong in memory")
        for weight in wrong:
            yield Text(f"  {weight.weight}: {weight.note}")


def _faulty(result: Result) -> Iterator[RenderableType]:
    groups = _groups(result)
    if not groups:
        return
    yield _heading("Faulty ops (wrong by themselves, whatever came before)")
    for group in groups:
        worst = max((op.local.nmse for op in group if op.local), default=math.nan)
        yield Padding(
            Text.assemble("- ", _sentence(group, result), (f"  (NMSE up to {_number(worst)})", "dim")),
            (0, 0, 0, 2),
        )
        local = group[0].local
        if local and len(local.segment) > 1:
            yield Padding(Text(f"covers {_segment(local.segment)}", style="dim"), (0, 0, 0, 4))


def _segment(segment: tuple[str, ...]) -> str:
    return f"{len(segment)} ops, {segment[0]} to {segment[-1]}: the trace holds no values between"


# --- layers ------------------------------------------------------------------------------------------------------

_STATES = ("token_embd", "ffn_residual", "output_norm", "output")


def _layers(result: Result, width: int) -> Iterator[RenderableType]:
    step = result.steps[0] if result.steps else 0
    states = [op for op in result.ops if op.step == step and _local(op.op) in _STATES]
    if not states:
        return
    yield _heading("Hidden states" + (f" (step {step})" if len(result.steps) > 1 else ""))
    full = width >= 118 and result.reference is not None
    both = result.reference is not None and width >= 72
    columns = ["after"]
    if both:
        columns += ["ref min", "ref max", "ref mean", "ref rms"] if full else ["ref mean", "ref rms"]
    columns += ["min", "max", "mean", "rms"] if full or (not both and width >= 72) else ["mean", "rms"]
    columns += ["growth"]
    columns += ["NMSE", ""] if result.reference else []
    columns += ["local"] if any(op.local for op in states) and width >= 60 else []
    table = _table(*columns, "")
    base = states[0]
    for op in states:
        table.add_row(*_layer_row(op, base, columns), Text(op.status, style=_STYLES[op.status]))
    yield Padding(table, (0, 0, 0, 2))
    yield from _growth(states)


def _layer_row(op: OpResult, base: OpResult, columns: list[str]) -> list[RenderableType]:
    cells: list[RenderableType] = []
    for column in columns:
        side = op.reference if column.startswith("ref ") else op.candidate
        match column.removeprefix("ref "):
            case "after":
                cells.append(f"layer {op.layer}" if op.layer is not None else op.op)
            case "growth":
                cells.append(_times(op.candidate, base.candidate))
            case "NMSE":
                cells.append(_number(op.drift.nmse) if op.drift else "-")
            case "":
                cells.append(Text(_bar(op.drift.nmse), style=_STYLES[op.status]) if op.drift else "")
            case "local":
                cells.append(_number(op.local.nmse) if op.local else "-")
            case statistic:
                cells.append(_number(getattr(side, statistic)) if side else "-")
    return cells


def _times(side: Statistics | None, base: Statistics | None) -> str:
    if not side or not base or not side.rms or not base.rms:
        return "-"
    return f"x{side.rms / base.rms:.3g}"


def _bar(nmse: float) -> str:
    """One block per two decades, from 1e-16 (empty) to 1 (eight)."""
    if math.isnan(nmse) or nmse >= 1:
        return "█" * 8
    return "█" * max(0, round((math.log10(nmse) + 16) / 2)) if nmse > 0 else ""


def _growth(states: list[OpResult]) -> Iterator[RenderableType]:
    """In words whether the growth of the hidden state is the model's own."""
    hidden = [op for op in states if _local(op.op) in ("token_embd", "ffn_residual")]
    first, last = hidden[0] if hidden else None, hidden[-1] if hidden else None
    if not first or not last or first is last:
        return
    ours, theirs = (_ratio(getattr(last, side), getattr(first, side)) for side in ("candidate", "reference"))
    if ours is None:
        return
    said = f"The hidden state grows {ours:.3g} times from the embedding to the last layer"
    if theirs is None:
        yield Text(f"  {said}.")
    elif abs(ours / theirs - 1) < 0.02:
        yield Text(f"  {said}; the reference grows the same ({theirs:.3g} times): that is this model, not a fault.")
    else:
        yield Text(f"  {said}; the reference grows {theirs:.3g} times.")


def _ratio(a: Statistics | None, b: Statistics | None) -> float | None:
    return a.rms / b.rms if a and b and a.rms and b.rms else None


# --- around the first divergence ---------------------------------------------------------------------------------


def _around(result: Result, width: int) -> Iterator[RenderableType]:
    first = result.first_divergence
    if first is None:
        return
    ops = [op for op in result.ops if op.step == first.step]
    at = next(i for i, op in enumerate(ops) if op.op == first.op)
    shown = ops[max(0, at - _AROUND) : at + _AROUND + 1]
    yield _heading("Around the first divergence")
    columns = ["op", "status"]
    columns += ["NMSE"] if result.reference else []
    columns += ["cosine", "max |diff|"] if result.reference and width >= 90 else []
    replayed = any(op.local for op in shown)
    columns += ["local", "floor"] if replayed else ["tolerance"]
    columns += ["ref. local"] if replayed and result.reference and width >= 104 else []
    table = _table(*columns, left=2)
    for op in shown:
        table.add_row(*(_around_cell(op, column) for column in columns), style="reverse" if op is ops[at] else "")
    yield Padding(table, (0, 0, 0, 2))
    yield from _worst(ops[at])


def _worst(op: OpResult) -> Iterator[RenderableType]:
    """The element that is furthest off, with both values."""
    if op.local:
        worst, right, ours = op.local.worst, "replayed", "recorded"
    elif op.drift and op.drift.worst.at:
        worst, right, ours = op.drift.worst, "reference", "candidate"
    else:
        return
    yield Text(f"  at {list(worst.at)} of {op.op}: {ours} {worst.candidate:.9g}, {right} {worst.reference:.9g}")


def _around_cell(op: OpResult, column: str) -> RenderableType:
    drift, local = op.drift, op.local
    match column:
        case "op":
            return op.op
        case "status":
            return Text(op.status, style=_STYLES[op.status])
        case "NMSE":
            return _number(drift.nmse) if drift else "-"
        case "cosine":
            return f"{drift.cosine:.6f}" if drift and not math.isnan(drift.cosine) else "-"
        case "max |diff|":
            return _number(drift.max_abs) if drift else "-"
        case "local":
            return _number(local.nmse) if local else "-"
        case "floor":
            return _number(local.floor) if local else "-"
        case "ref. local":
            return _number(op.reference_local.nmse) if op.reference_local else "-"
    return _number(op.tolerance)


# --- weights, logits, arithmetic ---------------------------------------------------------------------------------


def _norm_weights(result: Result, width: int) -> Iterator[RenderableType]:
    if not result.weights:
        yield _heading("Norm weights")
        yield Text("  The candidate recorded none: record them to rule out a loader's mistake.")
        return
    counts: dict[str, int] = {}
    for weight in result.weights:
        counts[weight.status] = counts.get(weight.status, 0) + 1
    yield _heading("Norm weights, as the candidate holds them")
    yield Text("  " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    loud = max(
        (w for w in result.weights if w.candidate and w.candidate.max is not None),
        key=lambda w: abs(w.candidate.max or 0) if w.candidate else 0,
        default=None,
    )
    if loud and loud.candidate and loud.status in ("identical", "rounded"):
        c = loud.candidate
        yield Text(
            f"  The loudest, {loud.weight}, runs from {_number(c.min)} to {_number(c.max)} with mean "
            f"{_number(c.mean)}: so it is in the file; weights far from 1 are normal."
        )


def _logits(result: Result) -> Iterator[RenderableType]:
    for logits in result.logits[:1] if len(result.logits) < 2 else (result.logits[0], result.logits[-1]):
        yield _heading("Next token" + (f" after step {logits.step}" if len(result.logits) > 1 else ""))
        table = _table("rank", "reference", "logit", "p", "candidate", "logit", "p", "rank in ref.", left=2)
        for rank, (r, c) in enumerate(zip(logits.reference, logits.candidate, strict=True), start=1):
            table.add_row(
                str(rank), f"{r.id} {r.text or ''}".strip(), _number(r.logit), f"{r.probability:.3f}",
                f"{c.id} {c.text or ''}".strip(), _number(c.logit), f"{c.probability:.3f}", str(c.other_rank),
            )  # fmt: skip
        yield Padding(table, (0, 0, 0, 2))
        yield Text("  " + _flip(logits))


def _flip(logits: Logits) -> str:
    kl = f"KL divergence {_number(logits.kl)} nats. "
    if logits.same_argmax:
        return kl + "Both choose the same token."
    apart, differ = _number(logits.margin), _number(logits.max_diff)
    gap = f"the reference's best two are {apart} apart, logits differ by up to {differ}"
    if logits.explained:
        return kl + f"Another token is chosen, but it is a near tie ({gap}): that alone is no fault."
    return kl + f"Another token is chosen, and it is no near tie: {gap}."


def _arithmetic(result: Result) -> Iterator[RenderableType]:
    """How each side computes, as far as replay could tell, and how near the reference came to its floors."""
    sides = {
        "candidate": [(op, op.local) for op in result.ops],
        "reference": [(op, op.reference_local) for op in result.ops],
    }
    said = [line for name, pairs in sides.items() for line in _fitted(name, [(o, x) for o, x in pairs if x])]
    if said:
        yield _heading("Arithmetic that fits")
        yield from (Text(f"  {line}") for line in said)


def _fitted(name: str, pairs: list) -> Iterator[str]:  # type: ignore[type-arg]
    by_kind: dict[str, dict[str, int]] = {}
    for op, local in pairs:
        if not local.faulty and (op.kind in ("linear", "scores", "weighted_values") or len(local.segment) > 1):
            found = by_kind.setdefault(op.kind, {})
            found[local.arithmetic] = found.get(local.arithmetic, 0) + 1
    if by_kind:
        parts = [f"{kind} {' / '.join(f'{a} ({n})' for a, n in found.items())}" for kind, found in by_kind.items()]
        yield f"{name}: " + "; ".join(parts)
    passing = [local for _, local in pairs if not local.faulty]
    if passing:
        linear = [local.sharpness for op, local in pairs if op.kind == "linear" and not local.faulty]
        seen = f"; a scale error of {_number(max(linear))} in any matmul would have been seen" if linear else ""
        nearest = max(x.excess for x in passing)
        yield f"{name}: the nearest that an honest op came to its bound is {nearest:.2f} of it{seen}"


def _unmatched(result: Result) -> Iterator[RenderableType]:
    unmatched = [op for op in result.ops if op.status == "unmatched"]
    if not unmatched:
        return
    yield _heading(f"Not on both sides: {len(unmatched)} of {len(result.ops)} (allow with --allow PATTERN)")
    for op in unmatched[:8]:
        yield Text(f"  {op.op} in step {op.step}: {op.note}")
    if len(unmatched) > 8:
        yield Text(f"  ... and {len(unmatched) - 8} more")


def _notes(result: Result) -> Iterator[RenderableType]:
    if result.notes:
        yield _heading("Notes")
        yield from (Text(f"  {note}") for note in result.notes)
