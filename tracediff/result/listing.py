"""Tables of words, and what is wrong with how a trace is written."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

_OF_ONE = re.compile(r"[\d'._]")  # in names, numbers and quotes


@dataclass(frozen=True, slots=True)
class Listing:
    """A titled table of words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Remark:
    """What is wrong with a line of a trace, or suspicious, and what to do."""

    line: int
    level: Literal["violation", "warning"]
    what: str
    then: str

    @property
    def sort(self) -> tuple[str, str]:
        """What it has in common with findings that differ from it in names and numbers alone."""
        return self.level, _in_common(self.what)


@lru_cache(1024)
def _in_common(what: str) -> str:
    return " ".join(word for word in what.split() if not _OF_ONE.search(word))


@dataclass(frozen=True, slots=True)
class Validation:
    """All that was found in one trace, by line."""

    path: str
    n_steps: int
    n_ops: int
    n_violations: int  # what makes the trace unfit to be judged
    n_warnings: int
    findings: tuple[Remark, ...]  # of each sort the first, where there are very many
