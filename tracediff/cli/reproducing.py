"""The command `reproduce`: one op to attach to a report of a bug."""

from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli.output import MATCH, say


def reproduce(
    trace: Annotated[Path, typer.Argument(help="The trace in which the op is faulty.")],
    model: Annotated[Path, typer.Option(help="The GGUF file that it was made with.")],
    op: Annotated[str, typer.Option(help="The op, as blk.2.attn_q.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write.")],
    step: Annotated[int, typer.Option(help="The step in which it is faulty.")] = 0,
) -> int:
    """Write one faulty op as a script of numpy alone, with its inputs: it exits 1 until the op is right."""
    from tracediff.model.model import Model
    from tracediff.reproduce import reproduce as write

    say(f"wrote {write(trace, Model(model), op, step, out)}")
    return MATCH
