"""The figures of all records as columns for the page's script, packed: those of many decode steps stay small."""

import base64
import json
import math
import zlib
from collections.abc import Callable

from tracediff.names import StepOf
from tracediff.result import Finding, OpResult, Result, Statistics

_SIDES = ("reference", "candidate")
_OFF = "0123456789abcdefghijklmnopqrstuvwxyz"  # decades by which a value is beyond its bound
_WITHIN = "-"


def packed(result: Result) -> str:
    """Base64 of deflated JSON: nothing in it can end the element that it stands in."""
    text = json.dumps(_data(result), separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def steps(result: Result) -> list[int]:
    """Those that have records."""
    return sorted({op.step for op in result.ops})


def _named(step: int) -> int | str:
    return str(step) if isinstance(step, StepOf) else step


def _data(result: Result) -> dict[str, object]:
    of: dict[str, list[int]] = {}
    for n, one in enumerate(result.findings):
        for op in one.ops:
            of.setdefault(op, []).append(n)
    columns = {name: [figure(op) for op in result.ops] for name, figure in _COLUMNS.items()}
    columns["findings"] = [of.get(op.op, []) if op.status == "faulty" else None for op in result.ops]
    return {
        "steps": [_named(step) for step in steps(result)],
        "findings": [_finding(one) for one in result.findings],
        "explained": {name: told for name in of if (told := _explained(result.explained(name)))},
        "ops": {name: column for name, column in columns.items() if any(x not in (None, []) for x in column)},
    }


def _finding(one: Finding) -> str:
    return f"{one.text} Look at {one.look}." if one.look else one.text


def _explained(op: OpResult | None) -> dict[str, object] | None:
    """What `--explain` shows."""
    if op is None or op.cause is None:
        return None
    return {"step": _named(op.step), "text": op.cause.text, "places": [place.row for place in op.cause.places]}


def _short(value: float | None, digits: int = 4) -> float | str | None:
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.{digits}g}")
    return str(value)


def _worst(op: OpResult) -> tuple[tuple[int, ...], float, float] | None:
    worst = op.local.worst if op.local else op.drift.worst if op.drift else None
    return (worst.at, worst.candidate, worst.reference) if worst and worst.at else None


def _strips(op: OpResult) -> list[list[object]] | None:
    """Of each axis its name, how many places a character stands for, and a character for each."""
    strips = op.local.strips if op.local and op.status == "faulty" else ()
    return [[strip.axis, strip.width, "".join(map(_decade, strip.excess))] for strip in strips] or None


def _decade(excess: float) -> str:
    if excess <= 1:
        return _WITHIN
    return _OFF[min(int(math.log10(excess)), len(_OFF) - 1)] if math.isfinite(excess) else _OFF[-1]


def _statistic(side: str, name: str) -> Callable[[OpResult], object]:
    def figure(op: OpResult) -> object:
        of: Statistics | None = getattr(op, side)
        value = getattr(of, name) if of else None
        return value or None if name in ("nan", "inf") else _short(value)

    return figure


_COLUMNS: dict[str, Callable[[OpResult], object]] = {
    "op": lambda op: op.op,
    "step": lambda op: _named(op.step),
    "status": lambda op: op.status,
    "excess": lambda op: _short(op.local.excess if op.local else None),
    "nmse": lambda op: _short(op.drift.nmse if op.drift else None),
    "tolerance": lambda op: _short(op.tolerance),
    "cosine": lambda op: _short(op.drift.cosine if op.drift else None, 7),
    "max_abs": lambda op: _short(op.drift.max_abs if op.drift else None),
    "local_nmse": lambda op: _short(op.local.nmse if op.local else None),
    "floor": lambda op: _short(op.floor),
    "undone": lambda op: _short(op.cause.nmse if op.cause else None),
    "arithmetic": lambda op: op.arithmetic,
    **{
        f"{side}.{name}": _statistic(side, name)
        for side in _SIDES
        for name in ("min", "max", "mean", "rms", "nan", "inf")
    },
    "at": lambda op: worst[0] if (worst := _worst(op)) else None,
    "found": lambda op: _short(worst[1], 7) if (worst := _worst(op)) else None,
    "belongs": lambda op: _short(worst[2], 7) if (worst := _worst(op)) else None,
    "segment": lambda op: len(op.local.segment) if op.local and len(op.local.segment) > 1 else None,
    "strips": _strips,
    "shape": lambda op: op.shape if op.status == "faulty" else None,
    "note": lambda op: op.note,
}
