"""What a result is written as beside the report: JSON and the formats of CI systems."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracediff import __version__
from tracediff.cli.options import Json
from tracediff.cli.output import ended, is_json, print_listing, print_report, read_of, write_json
from tracediff.errors import OutputError
from tracediff.files import check, write_text
from tracediff.printable import printable

if TYPE_CHECKING:
    from tracediff.result import Listing, Result

_MARKS = {
    "junit": b'<testsuites name="tracediff"',
    "sarif": b"sarif-schema-2.1.0.json",
    "markdown": b"### tracediff ",
    "html": b"<title>tracediff: ",
    "node_data": b'"name": "tracediff: ',
}


@dataclass(frozen=True, slots=True)
class Formats:
    """The files that a command writes, where they are asked for; each field is an option of it."""

    json: Json = None
    html: Annotated[Path | None, typer.Option("--html", help="Write one page to look at in a browser.")] = None
    node_data: Annotated[Path | None, typer.Option("--node-data", help="Write node data for Model Explorer.")] = None
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML: a test case for each layer.")] = None
    sarif: Annotated[Path | None, typer.Option("--sarif", help="Write SARIF 2.1.0, for code scanning.")] = None
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write a summary, for a pull request.")] = None
    annotations: Annotated[bool, typer.Option("--annotations", help="Print GitHub's workflow commands.")] = False

    def check(self, *inputs: Path | None, explain: str | None = None) -> None:
        """Whether they may be written, before the work of which they are the result; raises OutputError."""
        if str(self.json) == "-" and (self.annotations or explain):
            other = "--explain" if explain else "--annotations"
            raise OutputError(f"--json - and {other} both print to standard output. Write the JSON to a file.")
        files = list(self._files())
        places = [os.path.realpath(path) for _, path in files]
        if twice := [path for (_, path), place in zip(files, places, strict=True) if places.count(place) > 1]:
            raise OutputError(f"{twice[0]} is named for two outputs. Give each a file of its own.")
        read = read_of(inputs) if files else []
        for name, path in files:
            check(path, read, _ours(name))

    def _files(self) -> Iterator[tuple[str, Path]]:
        for name in ("json", *_MARKS):
            path = getattr(self, name)
            if path and (name, str(path)) != ("json", "-"):
                yield name, path

    def write(self, cases: "Mapping[str, Result]", render_json: Callable[[], str]) -> None:
        """All of them; what others wrote in a trace is made printable first, but in JSON, which escapes it."""
        if self.json:
            write_json(self.json, render_json())
        shown = {printable(name): printable(result) for name, result in cases.items()}
        if self.html:
            from tracediff.report import html

            write_text(self.html, html.render(shown), _ours("html"))
        if self.node_data:
            from tracediff.report import node_data

            write_text(self.node_data, node_data.render(shown), _ours("node_data"))
        if self.junit:
            from tracediff.report.junit import render

            write_text(self.junit, render(shown), _ours("junit"))
        if self.sarif:
            from tracediff.report import sarif

            write_text(self.sarif, sarif.render(cases, _sources(), __version__), _ours("sarif"))
        if self.markdown:
            from tracediff.report import markdown

            write_text(self.markdown, markdown.render(shown), _ours("markdown"))
        if self.annotations:
            from tracediff.report.markdown import annotations

            sys.stdout.writelines(f"{line}\n" for line in annotations(shown, _sources()))


def _sources() -> Mapping[str, str]:
    from tracediff.ci.config import project

    return project().sources


def _ours(name: str) -> Callable[[bytes], bool]:
    return is_json if name == "json" else lambda head: _MARKS[name] in head


def report(result: "Result", formats: Formats) -> int:
    """A comparison or a check, in all formats: the exit code that its verdict asks for."""
    from tracediff.report.json_report import render as render_json
    from tracediff.report.terminal import render

    if str(formats.json) != "-":
        print_report(result, render)
    formats.write({Path(result.candidate.path).stem: result}, lambda: render_json(result))
    return ended(result)


def report_all(results: "Mapping[str, Result]", listing: "Listing", formats: Formats) -> int:
    """Several results with a table of them, and the report of the worst: the exit code that its verdict asks for."""
    from tracediff.report.json_report import render_all
    from tracediff.report.terminal import render
    from tracediff.result import worst_case

    _, worst = worst_case(results)
    if str(formats.json) != "-":
        print_listing(listing)
        if worst.verdict != "match":
            print_report(worst, render)
    formats.write(results, lambda: render_all(results))
    return ended(worst)
