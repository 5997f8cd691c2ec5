"""The lock file: TOML for review, sorted, a few lines for each sort of op, so that branches merge."""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from tracediff.errors import TracediffError
from tracediff.files import write_text

HEAD = """\
# tracediff.lock, version 1: what may not get worse.
# `tracediff ci --update` tightens it, `--accept REASON` loosens it.
"""


@dataclass(frozen=True, slots=True)
class Sort:
    """Of ops of one name in all layers: which were judged and sound, how they compute, and what would have been seen.

    `resolving` is an NMSE, a power of ten: a larger mistake shows in each of them.
    """

    ops: int
    arithmetic: tuple[str, ...]
    resolving: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """A known cause that is let pass in these ops or weights, why, and until when."""

    places: tuple[str, ...]
    reason: str
    until: date


@dataclass(frozen=True, slots=True)
class Locked:
    """What one case is held to: sorts of ops by local name, accepted causes by the name of the mistake."""

    sorts: Mapping[str, Sort] = field(default_factory=dict)
    accepted: Mapping[str, Accepted] = field(default_factory=dict)


def read(path: Path) -> dict[str, Locked]:
    """The cases of a lock file; raises TracediffError where it is none."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        return {name: _case(case) for name, case in document.items()}
    except OSError as error:
        raise TracediffError(f"{path}: cannot read it: {error.strerror}. `tracediff ci --update` writes it.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TracediffError(
            f"{path}: this is no lock file of tracediff ({type(error).__name__}: {error}). Take the version before, or "
            "delete it and write it anew with --update."
        ) from None


def _case(case: dict[str, Any]) -> Locked:
    sorts = {
        name: Sort(int(one["ops"]), tuple(one["arithmetic"]), float(one["resolving"]))
        for name, one in case.get("op", {}).items()
    }
    accepted = {
        name: Accepted(tuple(one["places"]), one["reason"], one["until"])
        for name, one in case.get("accepted", {}).items()
    }
    if any(type(one.until) is not date for one in accepted.values()):
        raise ValueError("'until' must be a date such as 2030-12-31")
    return Locked(sorts, accepted)


def write(path: Path, cases: Mapping[str, Locked]) -> None:
    """The whole file anew; the same cases make the same bytes."""
    write_text(path, HEAD + "".join(f"{line}\n" for line in _lines(cases)), is_lock)


def is_lock(head: bytes) -> bool:
    """Whether a file that begins so is one."""
    return head.startswith(b"# tracediff.lock")


def _lines(cases: Mapping[str, Locked]) -> Iterator[str]:
    for case, locked in sorted(cases.items()):
        for name, sort in sorted(locked.sorts.items()):
            yield f"\n[{_key(case)}.op.{_key(name)}]"
            yield f"ops = {sort.ops}"
            yield f"arithmetic = {_list(sort.arithmetic)}"
            yield f"resolving = {sort.resolving:.0e}"
        for name, cause in sorted(locked.accepted.items()):
            yield f"\n[{_key(case)}.accepted.{_key(name)}]"
            yield f"places = {_list(cause.places)}"
            yield f"reason = {_text(cause.reason)}"
            yield f"until = {cause.until.isoformat()}"


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("_", "").replace("-", "").isalnum() else _text(name)


def _list(texts: Iterable[str]) -> str:
    return f"[{', '.join(map(_text, texts))}]"


def _text(text: str) -> str:
    return json.dumps(text).replace("\x7f", "\\u007f")  # a JSON string is one of TOML
