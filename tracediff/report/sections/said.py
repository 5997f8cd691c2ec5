"""What is said of a result beside its findings, under headings."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from tracediff.report.parts import LEVELS, Command, hanging, heading, line
from tracediff.result import Result, Said

_QUESTIONS = ("growth", "means", "norm weights", "logits", "decode steps", "decode depth")
_WIDE = 14  # of the questions


def _about(result: Result, *topics: str) -> list[Said]:
    return [said for topic in topics for said in result.said if said.about == topic]


def normal(result: Result) -> Iterator[RenderableType]:
    """The questions that engine writers ask first."""
    answers = _about(result, *_QUESTIONS)
    if answers:
        yield heading("What is normal")
        for answer in answers:
            yield hanging(f"  {answer.about}", Text(answer.text, LEVELS[answer.level]), "dim", _WIDE)


def arithmetic(result: Result) -> Iterator[RenderableType]:
    """How each side computes, as far as replay could tell, and how near it came to its floors."""
    said = _about(result, "arithmetic")
    if said:
        yield heading("Arithmetic that fits")
        yield from (hanging(f"  {one.of}:", Text(one.text, LEVELS[one.level])) for one in said)


def gaps(result: Result) -> Iterator[RenderableType]:
    """What a trace leaves open, and what to record next."""
    said = _about(result, "gaps")
    if said:
        yield heading("Not judged, or not by itself, and what to record next")
        yield from (hanging("  -", Text(one.text, LEVELS[one.level])) for one in said)


def unmatched(result: Result) -> Iterator[RenderableType]:
    """Ops that are not on both sides."""
    said = _about(result, "unmatched")
    if said:
        sides = "Not on both sides" if result.reference else "Not judged"
        n = sum(op.status == "unmatched" for op in result.ops)
        yield heading(f"{sides}: {n} of {len(result.ops)} (--require PATTERN makes that a failure)")
        yield from (line(one.text) for one in said)


def next_step(result: Result) -> Iterator[RenderableType]:
    """One command, and why."""
    if result.next and result.verdict != "match":
        yield heading("Next")
        yield Command(result.next.command)
        yield line(f"{result.next.why}.")


def notes(told: Sequence[str]) -> Iterator[RenderableType]:
    """What a reader must know of the traces."""
    if told:
        yield heading("Notes")
        yield from (line(note) for note in told)
