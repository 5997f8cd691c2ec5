"""What commands print: reports, tables, progress, and the JSON beside them."""

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tracediff.files import check, write_text
from tracediff.printable import escape_json, printable
from tracediff.process import UNDECIDED, drop

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tracediff.result import AuditResult, Gate, Listing, Mismatch, Result, ThreeWay

R = TypeVar("R", "Result", "ThreeWay", "AuditResult", "Gate", "Mismatch")
MATCH, DIVERGED, INTERRUPTED = 0, 1, 130


@contextmanager
def progress_bars() -> Iterator[Callable[[str, float], None]]:
    """A bar per stage on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, fraction: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=fraction)

        yield show


def print_listing(listing: "Listing") -> None:
    """A table as wide as the terminal; in a pipe as wide as it needs."""
    from tracediff.cli.console import has_width, standard_output
    from tracediff.report.listing import narrowest, render

    console, listing = standard_output(), printable(listing)
    limit = console.width if has_width() else None
    console.print(render(listing, limit), width=max(console.width, 0 if limit else narrowest(listing)))


def show(
    result: R,
    render: "Callable[[R, int], RenderableType]",
    render_json: Callable[[R], str],
    json: Path | None,
) -> int:
    """Print the report, write the JSON where it is asked for, and say how it ended."""
    if str(json) != "-":
        print_report(result, render)
    if json:
        write_json(json, render_json(result))
    return ended(result)


def print_report(result: R, render: "Callable[[R, int], RenderableType]") -> None:
    """As wide as the terminal."""
    from tracediff.cli.console import standard_output

    console = standard_output()
    console.print(render(printable(result), console.width))


def ended(result: R) -> int:
    """The exit code; why it is undecided is said on standard error as well, for whoever reads neither."""
    if result.verdict == "undecided":
        say(f"tracediff: {result.summary}")
    return {"match": MATCH, "diverged": DIVERGED, "undecided": UNDECIDED}[result.verdict]


def check_json(json: Path | None, *inputs: Path | None) -> None:
    """Whether --json may be written, before the work of which it is the result; raises OutputError."""
    if json and str(json) != "-":
        check(json, read_of(inputs), is_json)


def read_of(inputs: Iterable[Path | None]) -> list[Path]:
    """The files that a command reads: of a trace its data too."""
    from tracediff.trace.staging import files_of

    return [file for path in inputs if path for file in files_of(path)]


def write_json(path: Path, text: str) -> None:
    """JSON is UTF-8, whatever the locale says."""
    text = escape_json(text)
    if str(path) != "-":
        write_text(path, text, is_json)
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(text)


def is_json(head: bytes) -> bool:
    """Whether a file that begins so is a result of tracediff's."""
    return b'"schema": "tracediff/' in head


def say(message: str) -> None:
    """A line beside the output proper; the verdict stands where nobody can read it."""
    try:
        print(printable(message), file=sys.stderr)  # noqa: T201
    except OSError:
        drop(sys.stderr)
