"""Three engines' report: who agrees with whom, for a terminal and as JSON. Pure functions of the result."""

import itertools
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from tracediff.findings.words import number
from tracediff.names import HIDDEN_STATES, local_name
from tracediff.report.json_report import fields_of, written
from tracediff.report.parts import ALARM, STYLES, Rows, Trimmed, fitting, heading, headline, line
from tracediff.report.sections.said import notes
from tracediff.report.sections.verdict import findings, one_side
from tracediff.result import ThreeOp, ThreeWay

SCHEMA = "tracediff/three/1"
_STYLES = {**STYLES, "outlier": ALARM, "scattered": ALARM}
_AROUND = 6  # ops shown on either side of the first outlier
_LISTED = 8


def render(result: ThreeWay, width: int = 100) -> RenderableType:
    """The whole report for a terminal `width` columns wide."""
    sections = (
        _verdict(result), findings(result.findings), _layers(result, width), _around(result, width),
        _unmatched(result), notes(result.notes),
    )  # fmt: skip
    return Trimmed(Group(*(part for section in sections for part in section)))


def render_json(result: ThreeWay) -> str:
    """One JSON object."""
    return written(fields_of(SCHEMA, result))


def _verdict(result: ThreeWay) -> Iterator[RenderableType]:
    yield headline(result.verdict, result.summary)
    yield from (line(f"{doubt}.") for doubt in result.undecided[1:])
    yield from map(one_side, result.names, result.sides)


# --- tables ------------------------------------------------------------------------------------------------------


def _table(result: ThreeWay, ops: list[ThreeOp], width: int) -> RenderableType:
    """The three pairs by number, and the local errors where they fit."""
    pairs = [f"{a + 1} - {b + 1}" for a, b in itertools.combinations(range(3), 2)]
    local = [f"local {n + 1}" for n in range(3)]
    replayed = any(x for op in result.ops for x in op.local)
    rows: Rows = [
        {
            "op": op.op,
            "outlier": Text(_who(op, result), style=_STYLES[op.status]),
            **dict(zip(pairs, map(number, op.nmse), strict=True)),
            **dict(zip(local, (number(x.nmse if x else None) for x in op.local), strict=True)),
        }
        for op in ops
    ]
    return fitting(
        ["op", "outlier", *pairs, *(local if replayed else [])], rows, width, [tuple(local), (pairs[2],)], left=2
    )


def _who(op: ThreeOp, result: ThreeWay) -> str:
    return ", ".join(result.names[n] for n in op.outliers) or op.status


def _layers(result: ThreeWay, width: int) -> Iterator[RenderableType]:
    step = result.steps[0] if result.steps else 0
    shown = [op for op in result.ops if op.step == step and local_name(op.op) in HIDDEN_STATES]
    if shown:
        numbered = ", ".join(f"{n} {name}" for n, name in enumerate(result.names, start=1))
        yield heading(f"Hidden states, NMSE of each pair ({numbered})")
        yield _table(result, shown, width)


def _around(result: ThreeWay, width: int) -> Iterator[RenderableType]:
    first = next((op for op in result.ops if op.status in ("outlier", "scattered")), None)
    if first:
        ops = [op for op in result.ops if op.step == first.step]
        at = ops.index(first)
        yield heading("Around the first outlier" + (f" (step {first.step})" if len(result.steps) > 1 else ""))
        yield _table(result, ops[max(0, at - _AROUND) : at + _AROUND + 1], width)


def _unmatched(result: ThreeWay) -> Iterator[RenderableType]:
    unmatched = [op for op in result.ops if op.status == "unmatched"]
    if unmatched:
        yield heading(
            f"Not on all sides: {len(unmatched)} of {len(result.ops)} (--require PATTERN makes that a failure)"
        )
    yield from (line(f"{op.op} in step {op.step}: {op.note}") for op in unmatched[:_LISTED])
    if len(unmatched) > _LISTED:
        yield line(f"... and {len(unmatched) - _LISTED} more")
