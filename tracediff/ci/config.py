"""The cases of a project: a table in tracediff.toml, or [tool.tracediff] in pyproject.toml."""

import shlex
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracediff.errors import TracediffError
from tracediff.inputs import require_file
from tracediff.judge import Policy

FILES = ("tracediff.toml", "pyproject.toml")
_TABLES = {"case", "lock", "sources"}
_KEYS = {"name", "trace", "model", "command", "reference", "tolerance", "require", "allow", "arithmetic", "resolve"}


@dataclass(frozen=True, slots=True)
class Case:
    """One trace to judge, or those of all ranks, and how it is made: `command` is run first where there is one."""

    name: str
    trace: tuple[Path, ...]
    model: Path | None = None
    reference: Path | None = None
    command: tuple[str, ...] = ()
    folder: Path = Path()
    policy: Policy = field(default_factory=Policy)
    arithmetic: str | None = None

    def under(self, policy: Policy) -> "Case":
        """The case with what the command line asks for as well."""
        mine = self.policy
        both = replace(
            mine,
            tolerances={**mine.tolerances, **policy.tolerances},
            required=(*mine.required, *policy.required),
            resolve=policy.resolve or mine.resolve,
        )
        return replace(self, policy=both)

    def make(self) -> None:
        """Run the command in the folder of the configuration; raises TracediffError where it fails."""
        if not self.command:
            return
        try:
            subprocess.run(self.command, cwd=self.folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        except OSError as error:
            raise TracediffError(f"case {self.name}: cannot run {self.command[0]!r}: {error.strerror}.") from None
        except subprocess.CalledProcessError as error:
            last = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise TracediffError(
                f"case {self.name}: its command ended with {error.returncode}: {last[0]}. Run it by hand: "
                f"{shlex.join(self.command)}"
            ) from None


@dataclass(frozen=True, slots=True)
class Project:
    """All cases, the lock file, and which source file an op is computed in, by pattern."""

    cases: tuple[Case, ...] = ()
    lock: Path = Path("tracediff.lock")
    sources: Mapping[str, str] = field(default_factory=dict)


def project(path: Path | None = None) -> Project:
    """The configuration at `path`, else the first of FILES in this folder that has one; an empty one where none has."""
    for file in [path] if path else [Path(name) for name in FILES if Path(name).is_file()]:
        table = _table(file)
        if table is not None:
            return _project(table, file)
    if path:
        raise TracediffError(f"{path}: it has no table [tool.tracediff]. Write one: docs/ci.md shows how.")
    return Project()


def _table(path: Path) -> dict[str, Any] | None:
    try:
        document = tomllib.loads(require_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TracediffError(f"{path}: cannot read it: {error.strerror}. Check the path.") from None
    except ValueError as error:
        raise TracediffError(f"{path}: this is no TOML: {error}.") from None
    return document.get("tool", {}).get("tracediff") if path.name == "pyproject.toml" else document


def _project(table: dict[str, Any], path: Path) -> Project:
    folder = path.parent
    if unknown := {*table} - _TABLES:
        raise TracediffError(f"{path}: {min(unknown)!r} is unknown; known are {', '.join(sorted(_TABLES))}.")
    try:
        lock = folder / table.get("lock", "tracediff.lock")
        cases = tuple(_case(case, folder) for case in table.get("case", []))
        sources = {str(pattern): str(place) for pattern, place in table.get("sources", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TracediffError(
            f"{path}: {error}. A case has a name, a trace and a model or reference: docs/ci.md shows them."
        ) from None
    twice = {case.name for case in cases if sum(other.name == case.name for other in cases) > 1}
    if twice:
        raise TracediffError(f"{path}: two cases have the name {min(twice)!r}. The lock needs one for each.")
    return Project(cases, lock, sources)


def _case(case: dict[str, Any], folder: Path) -> Case:
    unknown = {*case} - _KEYS
    if unknown:
        raise ValueError(f"a case has the unknown key {min(unknown)!r}; known are {', '.join(sorted(_KEYS))}")
    if "model" not in case and "reference" not in case:
        raise ValueError(f"case {case.get('name')!r} has neither model nor reference")
    command = case.get("command", ())
    return Case(
        name=str(case["name"]),
        trace=(folder / case["trace"],),
        model=folder / case["model"] if "model" in case else None,
        reference=folder / case["reference"] if "reference" in case else None,
        command=tuple(shlex.split(command) if isinstance(command, str) else command),
        folder=folder,
        policy=Policy(
            tolerances={pattern: float(nmse) for pattern, nmse in case.get("tolerance", {}).items()},
            allowed=tuple(case.get("allow", ())),
            required=tuple(case.get("require", ())),
            resolve=float(case["resolve"]) if "resolve" in case else None,
        ),
        arithmetic=case.get("arithmetic"),
    )
