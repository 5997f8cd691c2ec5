"""What a gate found: each case in a line, and what got worse in it; for a terminal and as JSON."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from tracediff.report.json_report import document, written
from tracediff.report.parts import LEVELS, Trimmed, hanging, headline, line
from tracediff.report.sections.said import next_step
from tracediff.report.sections.verdict import findings
from tracediff.result import Gate, worst_case

SCHEMA = "tracediff/ci/1"


def render(gate: Gate, width: int = 100) -> RenderableType:
    """The whole report for a terminal `width` columns wide."""
    return Trimmed(Group(headline(gate.verdict, gate.summary), *_cases(gate)))


def _cases(gate: Gate) -> Iterator[RenderableType]:
    for name, result in gate.cases.items():
        if len(gate.cases) > 1:
            yield line(f"{name}: {result.verdict}: {result.summary}")
        else:
            yield from (line(detail) for detail in result.details)
        yield from findings(result.findings)
        accepted = [one for one in result.said if one.about == "accepted"]
        yield from (hanging("  accepted", Text(one.text, LEVELS[one.level]), "dim") for one in accepted)
    yield from next_step(worst_case(gate.cases)[1])


def render_json(gate: Gate) -> str:
    """One JSON object, with the whole result of each case."""
    cases = {name: document(result) for name, result in gate.cases.items()}
    whole = {"schema": SCHEMA, "verdict": gate.verdict, "summary": gate.summary, "cases": cases}
    return written(whole)
