"""A weights audit for a terminal and as JSON: one sentence, then what is not as it should be, then counts."""

from collections import Counter
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from tracediff.english import count
from tracediff.findings.words import number
from tracediff.report.json_report import fields_of, written
from tracediff.report.parts import Rows, Trimmed, fitting, hanging, heading, headline, line
from tracediff.result import AuditResult, TensorResult

SCHEMA = "tracediff/weights/1"
_LISTED = 40


def render(result: AuditResult, width: int = 100) -> RenderableType:
    """The whole report for a terminal `width` columns wide."""
    against = "what the engine holds by" if result.against == "trace" else "the checkpoint"
    sides = line(f"{result.model} against {against} {result.path}", style="dim")
    return Trimmed(
        Group(
            headline(result.verdict, result.summary),
            sides,
            *_failing(result),
            *_rounded(result),
            *_counts(result, width),
        )
    )


def render_json(result: AuditResult) -> str:
    """One JSON object."""
    return written(fields_of(SCHEMA, result))


def _of(result: AuditResult, *statuses: str) -> list[TensorResult]:
    return [tensor for tensor in result.tensors if tensor.status in statuses]


def _failing(result: AuditResult) -> Iterator[RenderableType]:
    if result.findings:
        yield heading("Not right")
    for one in result.findings[:_LISTED]:
        yield hanging("  -", Text(one.text))
        if one.look:
            yield line(f"look at {one.look}", style="dim", by=4)
    if len(result.findings) > _LISTED:
        yield line(f"... and {len(result.findings) - _LISTED} more")


def _rounded(result: AuditResult) -> Iterator[RenderableType]:
    """What an engine made of the right values by itself."""
    notes = Counter((tensor.note or "").partition(" (")[0] for tensor in _of(result, "rounded"))
    if notes:
        yield heading("Rounded")
        yield from (line(f"- {count(n, 'tensor')}: {note}") for note, n in notes.items())


def _counts(result: AuditResult, width: int) -> Iterator[RenderableType]:
    """Each status, and of the quantised tensors each type with the largest error, and the least that was allowed."""
    yield heading("Counts")
    groups: dict[tuple[str, str | None, str | None], list[TensorResult]] = {}
    for tensor in result.tensors:
        groups.setdefault((tensor.status, tensor.type, tensor.other), []).append(tensor)
    held = "held" if result.against == "trace" else "checkpoint"
    columns = ["status", "file", held, "tensors", "error up to", "allowed from"]
    rows: Rows = []
    for (status, kind, other), tensors in groups.items():
        errors = [tensor.error for tensor in tensors if tensor.error is not None]
        bounds = [tensor.bound for tensor in tensors if tensor.bound is not None]
        figures = (number(max(errors, default=None)), number(min(bounds, default=None)))
        cells = (status, kind or "-", other or "-", str(len(tensors)), *figures)
        rows.append(dict(zip(columns, cells, strict=True)))
    yield fitting(columns, rows, width, [("allowed from",), ("error up to",)], left=3)
    if _of(result, "quantised"):
        yield line(
            "Errors are relative, RMS over RMS; allowed is 1.5 times what llama.cpp's quantiser makes of rows of "
            "the checkpoint's tensor."
        )
