"""A validation as lines that editors and terminals can jump to: FILE:LINE: what it is: what. What to do."""

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from tracediff.report.json_report import written
from tracediff.result import Validation

_ALIKE = 4  # findings in a row that differ in names and numbers alone; the rest is counted


def render(validation: Validation) -> str:
    """Each finding on a line of its own, and a line that counts them."""
    return "".join(f"{line}\n" for line in _lines(validation))


def render_json(validation: Validation) -> str:
    """One JSON object: every finding that is listed, none left out."""
    document = {"schema": "tracediff/validation/1", "valid": not validation.n_violations, "trace": validation}
    return written(document)


def _lines(validation: Validation) -> Iterator[str]:
    n_bad, n_warnings = validation.n_violations, validation.n_warnings
    left = n_bad + n_warnings - len(validation.findings)
    for _, group in groupby(validation.findings, attrgetter("sort")):
        alike = [*group]
        for finding in alike[:_ALIKE]:
            yield f"{validation.path}:{finding.line}: {finding.level}: {finding.what}. {finding.then}"
        if len(alike) > _ALIKE:
            more = f"{len(alike) - _ALIKE} more like it, up to line {alike[-1].line}"
            yield f"  ... and {more} (--json lists {'more' if left else 'all'})"
    counts = f"{_count(n_bad, 'violation')}, {_count(n_warnings, 'warning')}"
    unlisted = f"; {left:,} of them, like some above, are not listed" if left else ""
    ops = f"{_count(validation.n_ops, 'op')} in {_count(validation.n_steps, 'step')}"
    yield f"{validation.path}: {ops}: {counts}{unlisted}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' if n != 1 else ''}"
