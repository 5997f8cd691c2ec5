"""A summary in Markdown for a pull request or a job's page, and the annotations of GitHub's workflow commands."""

import re
from collections.abc import Iterator, Mapping

from tracediff.findings.words import number
from tracediff.report.sarif import line_of, source_of
from tracediff.result import Finding, Result

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&])")
_LISTED = 50


def render(cases: Mapping[str, Result]) -> str:
    """A heading for each case; what is wrong as a list, with where to look."""
    return "\n".join(line for name, result in cases.items() for line in _case(name, result)) + "\n"


def _case(name: str, result: Result) -> Iterator[str]:
    yield f"### tracediff {_plain(name)}: {result.verdict}"
    yield f"\n{_plain(result.summary)}\n"
    yield from (f"- {_plain(detail)}" for detail in result.details)
    if result.findings:
        yield "\n| what is wrong | NMSE | look at |\n|---|---|---|"
        for one in result.findings[:_LISTED]:
            yield f"| {_plain(one.text)} | {number(one.nmse)} | {_plain(one.look or '')} |"
        if len(result.findings) > _LISTED:
            yield f"\n... and {len(result.findings) - _LISTED} more"
    alarms = [said for said in result.said if said.level == "alarm" or said.about == "accepted"]
    yield from (f"\n**{said.about}**: {_plain(said.text)}" for said in alarms)
    yield ""


def _plain(text: str) -> str:
    """What a trace holds is no markup, and no line of its own."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def annotations(cases: Mapping[str, Result], sources: Mapping[str, str]) -> Iterator[str]:
    """A workflow command for each finding, at its source file where one is known."""
    for name, result in cases.items():
        for one in result.findings:
            yield f"::error {_where(one, name, sources)}::{_data(one.text)}"
        if not result.findings and result.verdict != "match":
            level = "error" if result.verdict == "diverged" else "warning"
            yield f"::{level} title={_property(f'tracediff {name}')}::{_data(result.summary)}"


def _where(one: Finding, name: str, sources: Mapping[str, str]) -> str:
    title = f"title={_property(f'tracediff {name}: {one.mistake}' if one.mistake else f'tracediff {name}')}"
    place = next((place for op in one.ops or one.weights if (place := source_of(op, sources))), None)
    if place is None:
        return title
    path, line = line_of(place)
    return f"file={_property(path)},{f'line={line},' if line else ''}{title}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
