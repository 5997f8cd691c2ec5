"""The commands `reproduce` and `bundle`: what to attach to a report of a bug."""

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli.options import ArithmeticOption, EffortOptions, MadeWith, ToJudge, grouped
from tracediff.cli.output import MATCH, progress_bars, read_of, say
from tracediff.files import check


def reproduce(
    trace: Annotated[
        list[Path],
        typer.Argument(help="The trace in which the op is faulty; of an engine of several ranks those of all."),
    ],
    model: MadeWith,
    op: Annotated[str, typer.Option(help="The op, as blk.2.attn_q.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    step: Annotated[int, typer.Option(help="The step in which it is faulty.")] = 0,
    sequence: Annotated[int, typer.Option(help="Of several sequences the one whose step it is.")] = 0,
    arithmetic: ArithmeticOption = None,
) -> int:
    """Write one faulty op as a script of numpy alone, with its inputs: it exits 1 until the op is right."""
    from tracediff.model.model import Model
    from tracediff.names import StepOf
    from tracediff.reproduce import reproduce as write

    at = StepOf(step, sequence) if sequence else step
    say(f"wrote {write(trace, Model(model), op, at, out, arithmetic)}")
    return MATCH


@grouped
def bundle(
    trace: ToJudge,
    model: MadeWith,
    out: Annotated[Path, typer.Option("-o", "--out", help="The archive to write: OUT.zip.")],
    reference: Annotated[Path | None, typer.Option(help="A trace that is right, to compare with.")] = None,
    arithmetic: ArithmeticOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would contain, and write nothing.")] = False,
    spent: EffortOptions = EffortOptions(),
) -> int:
    """Pack page, JSON, a reduced trace and versions for an issue tracker, and say first what can be read from them."""
    from tracediff.bundle import bundle as packed
    from tracediff.bundle import is_bundle
    from tracediff.model.model import Model
    from tracediff.pipeline import check_trace, compare_traces

    check(out, read_of((*trace, reference, model)), is_bundle)
    opened, effort = Model(model), spent.effort()
    with progress_bars() as progress:
        if reference:
            result = compare_traces(
                reference, trace, model=opened, arithmetic=arithmetic, effort=effort, progress=progress
            )
        else:
            result = check_trace(trace, opened, arithmetic=arithmetic, effort=effort, progress=progress)
    made = packed(result, trace, opened)
    say(f"{out}: {len(made.archive):,} bytes. Whoever opens it can read")
    for line in made.contents:
        say(f"  {line}")
    if not dry_run:
        made.write(out)
        say(f"wrote {out}")
    return MATCH
