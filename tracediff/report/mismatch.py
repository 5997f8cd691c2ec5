"""Trainer against rollout, for a terminal and as JSON. Pure functions of the result."""

from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from tracediff.findings.words import number
from tracediff.report.json_report import fields_of, written
from tracediff.report.parts import Rows, Trimmed, fitting, hanging, heading, headline, line
from tracediff.report.sections.said import notes
from tracediff.result import Mismatch

SCHEMA = "tracediff/mismatch/1"


def render(result: Mismatch, width: int = 100) -> RenderableType:
    """The whole report for a terminal `width` columns wide."""
    sections = (
        _verdict(result),
        _causes(result),
        _figures(result),
        _shares(result, width),
        _worst(result, width),
    )
    return Trimmed(Group(*(part for section in (*sections, notes(result.notes)) for part in section)))


def render_json(result: Mismatch) -> str:
    """One JSON object; what is not finite becomes null."""
    document = fields_of(SCHEMA, result)
    document["gap"] = {**msgspec.to_builtins(result.gap), "unexplained": document.pop("rest")}
    document["floor"] = {key: document.pop(key) for key in ("floor", "beyond", "noise")}
    return written(document)


def _verdict(result: Mismatch) -> Iterator[RenderableType]:
    yield headline(result.verdict, result.summary)
    for name, side in (("A", result.a), ("B", result.b)):
        yield line(f"{name}: {side.engine} ({side.path})", style="dim")


def _causes(result: Mismatch) -> Iterator[RenderableType]:
    if result.findings:
        yield heading("What makes it")
        yield from (hanging("  -", Text(finding.text)) for finding in result.findings)


def _figures(result: Mismatch) -> Iterator[RenderableType]:
    gap = result.gap
    yield heading("Log-probabilities, A less B, in nats")
    yield line(f"mean {number(gap.mean)}, mean |gap| {number(gap.mean_abs)}, largest {number(gap.largest)}")
    exact = f", KL(B, A) itself {number(gap.kl)}" if gap.kl is not None else ""
    yield line(f"k3 {number(gap.k3)} (of tokens that B sampled it estimates KL(B, A)){exact}")
    yield line(f"explained by roundings: {number(result.floor)} mean |gap| ({result.noise})")


def _shares(result: Mismatch, width: int) -> Iterator[RenderableType]:
    if not result.shares:
        return
    yield heading("Shares of the gap: B's ops put into A one kind at a time")
    rows: Rows = [
        {
            "op": share.what,
            "alone": f"{share.alone:.1%}",
            "last": f"{share.last:.1%}",
            "added": f"{share.added:.1%}",
            "in A": share.a,
            "in B": share.b,
        }
        for share in result.shares
    ]
    yield fitting(["op", "in A", "in B", "alone", "last", "added"], rows, width, [("last",), ("added",)], left=3)
    if result.rest is not None:
        yield line(f"not explained by these: {result.rest:.1%}", style="dim")


def _worst(result: Mismatch, width: int) -> Iterator[RenderableType]:
    if not result.worst:
        return
    yield heading("Tokens with the largest gap")
    rows: Rows = [
        {
            "index": str(token.index),
            "token": str(token.token) if token.text is None else f"{token.token} {token.text}",
            "A": number(token.a),
            "B": number(token.b),
            "gap": number(token.a - token.b),
        }
        for token in result.worst
    ]
    yield fitting(["index", "token", "A", "B", "gap"], rows, width, [], left=2)
