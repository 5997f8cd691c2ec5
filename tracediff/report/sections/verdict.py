"""The verdict: what is wrong first, which engines were compared, and every mistake once."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from tracediff.english import count, few
from tracediff.findings.words import number
from tracediff.report.parts import hanging, heading, headline, line
from tracediff.result import Finding, Result, Side


def verdict(result: Result) -> Iterator[RenderableType]:
    """One sentence, and the figures behind it."""
    yield headline(result.verdict, result.summary)
    yield from map(line, result.details)


def sides(result: Result) -> Iterator[RenderableType]:
    """Which engines, which traces, which tokens."""
    for name, side in (("reference", result.reference), ("candidate", result.candidate)):
        if side:
            yield one_side(name, side)
    sizes = f"{count(len(result.tokens), 'token')} in {count(len(result.steps), 'step')}"
    yield line(f"{sizes}: {few(result.tokens, 16)}", style="dim")


def one_side(name: str, side: Side) -> RenderableType:
    """Its engine, and its trace."""
    cut = f", cut off: {side.cut}" if side.cut else ""
    return line(f"{name}: {side.engine}, {count(side.n_ops, 'op')} ({side.path}){cut}", style="dim")


def findings(found: tuple[Finding, ...]) -> Iterator[RenderableType]:
    """Each cause once, with all that it is in."""
    if not found:
        return
    yield heading("What is wrong by itself, whatever came before")
    for one in found:
        whose = f"{one.side}: " if one.side != "candidate" else ""
        figure = f" (NMSE up to {number(one.nmse)})" if one.nmse is not None else ""
        yield hanging("  -", Text.assemble(whose, one.text, (figure, "dim")))
        if one.segment:
            ops = f"{len(one.segment)} ops, {one.segment[0]} to {one.segment[-1]}"
            yield line(f"covers {ops}: the trace holds no values between", style="dim", by=4)
        if one.look:
            yield line(f"look at {one.look}", style="dim", by=4)
