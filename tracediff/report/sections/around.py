"""The ops on either side of the first divergence, and the element that is furthest off."""

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from tracediff.findings.words import number
from tracediff.names import axes_of
from tracediff.report.parts import STYLES, fitting, heading, line
from tracediff.result import OpResult, Result

_AROUND = 6  # ops shown on either side
_SPARE = [
    ("ref. local",),
    ("cosine",),
    ("max |diff|",),
    ("NMSE",),
    ("floor",),
]  # what goes where the terminal is narrow


def around(result: Result, width: int) -> Iterator[RenderableType]:
    """A table of these ops; nothing where nothing diverges."""
    first = result.first_divergence
    if first is None:
        return
    ops = [op for op in result.ops if op.step == first.step]
    at = next(i for i, op in enumerate(ops) if op.op == first.op)
    shown = ops[max(0, at - _AROUND) : at + _AROUND + 1]
    yield heading("Around the first divergence")
    replayed = any(op.local for op in shown)
    columns = ["op", "status"]
    columns += ["NMSE", "cosine", "max |diff|"] if result.reference else []
    columns += ["local", "floor"] if replayed else ["tolerance"]
    columns += ["ref. local"] if replayed and result.reference else []
    rows = [_row(op) | {"style": "reverse" if op is ops[at] else ""} for op in shown]
    yield fitting(columns, rows, width, _SPARE, left=2)
    yield from _worst(ops[at])


def _worst(op: OpResult) -> Iterator[RenderableType]:
    if op.local:
        worst, named, right, ours = op.local.worst, op.local.axes, "replayed", "recorded"
    elif op.drift and op.drift.worst.at:
        worst, named, right, ours = op.drift.worst, (), "reference", "candidate"
    else:
        return
    n = len(worst.at)
    axes = named or axes_of(op.op, n, op.kind) or tuple(f"axis {i} place" for i in range(n))
    where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, worst.at, strict=True))
    yield line(f"at {where} of {op.op}: {ours} {worst.candidate:.9g}, {right} {worst.reference:.9g}")


def _row(op: OpResult) -> dict[str, str | Text]:
    drift, local = op.drift, op.local
    return {
        "op": op.op,
        "status": Text(op.status, style=STYLES[op.status]),
        "NMSE": number(drift.nmse) if drift else "-",
        "cosine": f"{drift.cosine:.6f}" if drift and not math.isnan(drift.cosine) else "-",
        "max |diff|": number(drift.max_abs) if drift else "-",
        "local": number(local.nmse) if local else "-",
        "floor": number(op.floor),
        "ref. local": number(op.reference_local.nmse) if op.reference_local else "-",
        "tolerance": number(op.tolerance),
    }
