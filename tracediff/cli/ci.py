"""The command `ci`: a gate that knows what got worse."""

import shlex
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracediff.cli.formats import Formats
from tracediff.cli.options import EffortOptions, Require, Resolve, Tolerance, grouped, policy_of, refuse
from tracediff.cli.output import ended, print_report, progress_bars, say
from tracediff.errors import TracediffError

if TYPE_CHECKING:
    from tracediff.ci.config import Case, Project
    from tracediff.pipeline import Effort
    from tracediff.result import Result

_DAYS = 90  # that a known cause is accepted for


@grouped
def ci(
    context: typer.Context,
    trace: Annotated[
        list[Path] | None,
        typer.Argument(
            help="One trace, of an engine of several ranks those of all; without it all cases of the configuration."
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The GGUF file that it was made with.")] = None,
    reference: Annotated[Path | None, typer.Option(help="A trace that is right: drift from it is held too.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Cases: tracediff.toml, or pyproject.toml with [tool.tracediff].")
    ] = None,
    lock: Annotated[Path | None, typer.Option(help="The lock file; tracediff.lock where nothing else is said.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Write a tighter lock; also the first one.")] = False,
    accept: Annotated[
        str | None, typer.Option(metavar="REASON", help="Write a lock that lets pass what is found, and say why.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="DATE", help="With --accept: until when, as 2030-12-31. [default: 90 days]")
    ] = None,
    tolerance: Tolerance = None,
    require: Require = None,
    resolve: Resolve = None,
    spent: EffortOptions = EffortOptions(),
    formats: Formats = Formats(),
) -> int:
    """Fail where anything got worse than its lock: an op, its arithmetic, what would be seen, what is recorded."""
    from tracediff.ci.config import Case, project
    from tracediff.ci.gate import joined
    from tracediff.ci.lock import read, write
    from tracediff.report.ci import render, render_json

    if accept is None:
        refuse(context, ["until"], "is until when --accept lets pass what is found. Give that as well.")
    elif update:
        raise TracediffError("--update tightens the lock and --accept loosens it. Give one of them.")
    if not trace:
        refuse(context, ["model", "reference"], "is that of a trace. Give TRACE, or leave it to the configuration.")
    found = project(config)
    if trace:
        found = replace(found, cases=(Case(trace[0].stem, tuple(trace), model, reference),))
    elif not found.cases:
        raise TracediffError("there is nothing to judge: give TRACE and --model, or write cases: docs/ci.md shows how.")
    policy = policy_of(tolerance, None, require, resolve)
    found = replace(found, lock=lock or found.lock, cases=tuple(case.under(policy) for case in found.cases))
    formats.check(*(path for case in found.cases for path in (*case.trace, case.model, case.reference)))
    locked = read(found.lock) if found.lock.exists() else {}
    if not locked and not update and accept is None:
        raise TracediffError(f"{found.lock}: there is no lock yet. --update writes one, from traces that are right.")
    if accept is not None and not accept.strip():
        raise TracediffError("--accept needs a reason: who reads the lock later must know why.")
    accepted_until = _date(until)
    results = {case.name: _judged(case, spent.effort()) for case in found.cases}
    if update or accept is not None:
        write(found.lock, {**locked, **_changed(results, locked, accept, accepted_until)})
        say(f"wrote {found.lock}")
        locked = read(found.lock)
    gate = joined(_held(results, locked, found))
    if str(formats.json) != "-":
        print_report(gate, render)
    formats.write(gate.cases, lambda: render_json(gate))
    return ended(gate)


def _judged(case: "Case", effort: "Effort") -> "Result":
    from tracediff.pipeline import check_trace, compare_traces

    case.make()
    policy = case.policy
    with progress_bars() as progress:
        if case.reference:
            return compare_traces(
                case.reference, case.trace,
                model=case.model, policy=policy, arithmetic=case.arithmetic, effort=effort, progress=progress,
            )  # fmt: skip
        if case.model is None:
            raise TracediffError(f"{case.trace[0]}: give --model, or --reference and --tolerance, to judge it by.")
        return check_trace(
            case.trace, case.model, policy=policy, arithmetic=case.arithmetic, effort=effort, progress=progress
        )


def _changed(results: dict[str, "Result"], locked: dict, accept: str | None, until: date) -> dict:  # type: ignore[type-arg]
    from tracediff.ci.gate import loosened, measured, tightened
    from tracediff.ci.lock import Locked

    if accept is not None:
        return {name: loosened(locked.get(name, Locked()), one, accept, until) for name, one in results.items()}
    return {name: tightened(locked[name], one) if name in locked else measured(one) for name, one in results.items()}


def _held(results: dict[str, "Result"], locked: dict, found: "Project") -> dict[str, "Result"]:  # type: ignore[type-arg]
    from tracediff.ci.gate import held

    unlocked = [name for name in results if name not in locked]
    if unlocked:
        raise TracediffError(
            f"{found.lock}: it has no case {unlocked[0]!r}. --update adds it, from a trace that is right."
        )
    return {
        name: held(one, locked[name], date.today(), shlex.join(("tracediff", *sys.argv[1:])))
        for name, one in results.items()
    }


def _date(until: str | None) -> date:
    try:
        return date.fromisoformat(until) if until else date.today() + timedelta(days=_DAYS)
    except ValueError:
        raise TracediffError(f"--until {until!r}: give a date such as 2030-12-31.") from None
