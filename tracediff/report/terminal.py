"""The report as people read it: the verdict first, then what supports it. A pure function of the result."""

from rich.console import Group, RenderableType

from tracediff.report.parts import Trimmed
from tracediff.report.sections.around import around
from tracediff.report.sections.next_token import next_token
from tracediff.report.sections.said import arithmetic, gaps, next_step, normal, notes, unmatched
from tracediff.report.sections.states import states
from tracediff.report.sections.verdict import findings, sides, verdict
from tracediff.result import Result


def render(result: Result, width: int = 100) -> RenderableType:
    """The whole report for a terminal `width` columns wide; of a match, what fits a screen."""
    sections = (
        verdict(result),
        sides(result),
        findings(result.findings),
        states(result, width),
        around(result, width),
        normal(result),
        next_token(result, width),
        arithmetic(result),
        gaps(result),
        unmatched(result),
        notes(result.notes),
        next_step(result),
    )
    return Trimmed(Group(*(part for section in sections for part in section)))
