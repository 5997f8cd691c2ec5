"""A weights audit for a terminal and as JSON: one sentence, then what is not as it should be, then counts."""

from collections import Counter
from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from tracediff.report.parts import Rows, Trimmed, count, fitting, hanging, heading, headline, line, number
from tracediff.result import AuditResult, TensorResult

SCHEMA = "tracediff/weights/1"
_FAILING = ("wrong", "missing", "extra")
_STYLES = {"wrong": "bold red", "missing": "bold red", "extra": "magenta"}
_LISTED = 40


def render(result: AuditResult, width: int = 100) -> RenderableType:
    """The whole report for a terminal `width` columns wide."""
    against = "what the engine holds by" if result.against == "trace" else "the checkpoint"
    sides = line(f"{result.model} against {against} {result.path}", style="dim")
    return Trimmed(
        Group(
            headline(result.verdict, summary(result)),
            sides,
            *_failing(result),
            *_rounded(result),
            *_counts(result, width),
        )
    )


def render_json(result: AuditResult) -> str:
    """One JSON object; what is not finite becomes null."""
    document = {"schema": SCHEMA, "summary": summary(result), **msgspec.to_builtins(result)}
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def summary(result: AuditResult) -> str:
    """The one sentence."""
    failing = _of(result, *_FAILING)
    silent = len(_of(result, "not recorded"))
    checked = len(result.tensors) - silent
    if not checked:
        return f"{result.path} holds no weights. Record them, as the engine holds them after loading."
    rest = f" {silent} more were not recorded." if silent else ""
    if not failing:
        where = "as in the file" if result.against == "trace" else "what the checkpoint's become"
        return f"all {checked} tensors {'recorded ' * (result.against == 'trace')}are {where}.{rest}"
    first = failing[0]
    what = f"{first.tensor} is {first.status}" + (f": {first.note}" if first.note else "")
    return f"{len(failing)} of {checked} tensors {'is' if len(failing) == 1 else 'are'} not right; {what}.{rest}"


def _of(result: AuditResult, *statuses: str) -> list[TensorResult]:
    return [tensor for tensor in result.tensors if tensor.status in statuses]


def _failing(result: AuditResult) -> Iterator[RenderableType]:
    failing = _of(result, *_FAILING)
    if not failing:
        return
    yield heading("Not right")
    for tensor in failing[:_LISTED]:
        status = Text(tensor.status, style=_STYLES[tensor.status])
        note = f": {tensor.note}" if tensor.note else ""
        yield hanging("  -", Text.assemble(f"{tensor.tensor}: ", status, note, (_figures(tensor, result), "dim")))
    if len(failing) > _LISTED:
        yield line(f"... and {len(failing) - _LISTED} more")


def _rounded(result: AuditResult) -> Iterator[RenderableType]:
    """What an engine made of the right values by itself."""
    notes = Counter((tensor.note or "").partition(" (")[0] for tensor in _of(result, "rounded"))
    if notes:
        yield heading("Rounded")
        yield from (line(f"- {count(n, 'tensor')}: {note}") for note, n in notes.items())


def _figures(tensor: TensorResult, result: AuditResult) -> str:
    """Types and error, in parentheses."""
    figures = [f"{tensor.type} in the file"] if tensor.type else []
    figures += (
        [f"{tensor.other} {'held' if result.against == 'trace' else 'in the checkpoint'}"] if tensor.other else []
    )
    figures += [f"error {number(tensor.error)}"] if tensor.error is not None else []
    figures += [f"{number(tensor.bound)} allowed"] if tensor.bound is not None else []
    return f" ({', '.join(figures)})" if figures else ""


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
