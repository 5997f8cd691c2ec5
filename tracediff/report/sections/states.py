"""The hidden state from layer to layer: what people look at first."""

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from tracediff.findings.words import number
from tracediff.names import HIDDEN_STATES, local_name
from tracediff.report.parts import STYLES, fitting, heading
from tracediff.result import OpResult, Result, Statistics, Status

_STATISTICS = ("min", "max", "mean", "rms")
# What goes where the terminal is narrow.
_SPARE = [
    ("ref min", "ref max", "min", "max"),
    (":bar",),
    ("ref mean", "mean"),
    ("growth",),
    ("ref rms",),
    ("local",),
]
_WRONG = ("faulty", "drift")
_LAYERS = 4  # shown where nothing is wrong


def states(result: Result, width: int) -> Iterator[RenderableType]:
    """A row per layer of the first step; a few of them where nothing diverges."""
    step = result.steps[0] if result.steps else 0
    every = [op for op in result.ops if op.step == step and local_name(op.op) in HIDDEN_STATES]
    if not every:
        return
    shown = every if result.verdict == "diverged" else _some(every)
    said = [f"step {step}"] * (len(result.steps) > 1)
    said += [f"{len(every) - len(shown)} more layers are ok"] * (len(shown) < len(every))
    yield heading("Hidden states" + (f" ({'; '.join(said)})" if said else ""))
    columns = [f"ref {name}" for name in _STATISTICS] if result.reference else []
    columns = ["after", *columns, *_STATISTICS, "growth"]
    columns += ["NMSE", ":bar"] if result.reference else []
    columns += ["local"] if any(op.local for op in shown) else []
    wrong = _wrong_layers(result, step)
    rows = [_row(op, every[0], op.status if op.status in _WRONG else wrong.get(op.layer, op.status)) for op in shown]
    yield fitting([*columns, ":status"], rows, width, _SPARE)


def _wrong_layers(result: Result, step: int) -> dict[int | None, Status]:
    """Of each layer in which an op is wrong by itself that, of others in which one drifts that."""
    wrong: dict[int | None, Status] = {}
    for op in result.ops:
        if op.step == step and op.layer is not None and op.status in _WRONG and wrong.get(op.layer) != "faulty":
            wrong[op.layer] = op.status
    return wrong


def _some(every: list[OpResult]) -> list[OpResult]:
    """All that are not ok, what lies outside the layers, and some layers at equal distances, the last among them."""
    layers = [op for op in every if op.layer is not None]
    if len(layers) <= _LAYERS + 1:
        return every
    kept = {round(i * (len(layers) - 1) / (_LAYERS - 1)) for i in range(_LAYERS)}
    return [op for op in every if op.status != "ok" or op.layer is None or layers.index(op) in kept]


def _row(op: OpResult, base: OpResult, status: Status) -> dict[str, str | Text]:
    row: dict[str, str | Text] = {
        "after": f"layer {op.layer}" if op.layer is not None else op.op,
        "growth": _times(op.candidate, base.candidate),
        "NMSE": number(op.drift.nmse) if op.drift else "-",
        ":bar": Text(_bar(op.drift.nmse), style=STYLES[op.status]) if op.drift else "",
        "local": number(op.local.nmse) if op.local else "-",
        ":status": Text(status, style=STYLES[status]),
    }
    for prefix, side in (("ref ", op.reference), ("", op.candidate)):
        for statistic in _STATISTICS:
            row[prefix + statistic] = number(getattr(side, statistic)) if side else "-"
    return row


def _times(side: Statistics | None, base: Statistics | None) -> str:
    if not side or not base or not side.rms or not base.rms:
        return "-"
    return f"x{side.rms / base.rms:.3g}"


def _bar(nmse: float) -> str:
    """One block per two decades, from 1e-16 (empty) to 1 (eight)."""
    if math.isnan(nmse) or nmse >= 1:
        return "█" * 8
    return "█" * max(0, round((math.log10(nmse) + 16) / 2)) if nmse > 0 else ""
