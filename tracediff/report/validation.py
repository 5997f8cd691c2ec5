"""A validation as lines that editors and terminals can jump to: FILE:LINE: what it is: what. What to do."""

import re
from collections.abc import Iterator
from itertools import groupby

import msgspec

from tracediff.result import Finding, Validation

_ALIKE = 4  # findings in a row that differ in names and numbers alone; the rest is counted


def render(validation: Validation) -> str:
    """Each finding on a line of its own, and a line that counts them."""
    return "".join(f"{line}\n" for line in _lines(validation))


def render_json(validation: Validation) -> str:
    """One JSON object: every finding, none left out."""
    document = {"schema": "tracediff/validation/1", "valid": not validation.violations, "trace": validation}
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def _lines(validation: Validation) -> Iterator[str]:
    for _, group in groupby(validation.findings, _kind):
        alike = [*group]
        for finding in alike[:_ALIKE]:
            yield f"{validation.path}:{finding.line}: {finding.level}: {finding.what}. {finding.then}"
        if len(alike) > _ALIKE:
            yield f"  ... and {len(alike) - _ALIKE} more like it, up to line {alike[-1].line} (--json lists all)"
    n_bad = len(validation.violations)
    n_warnings = len(validation.findings) - n_bad
    counts = f"{_count(n_bad, 'violation')}, {_count(n_warnings, 'warning')}"
    yield f"{validation.path}: {_count(validation.n_ops, 'op')} in {_count(validation.n_steps, 'step')}: {counts}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' if n != 1 else ''}"


def _kind(finding: Finding) -> tuple[str, str]:
    return finding.level, re.sub(r"\S*[\d'._]\S*", "", finding.what)
