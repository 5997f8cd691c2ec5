"""The commands `import` and `export`."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from tracediff.cli.options import TraceOut
from tracediff.cli.output import MATCH, say
from tracediff.interchange import Format


def import_(
    form: Annotated[Format, typer.Argument(metavar="FORMAT", help=f"One of {', '.join(get_args(Format))}.")],
    path: Annotated[Path, typer.Argument(help="The file, or the folder of npy and sglang.")],
    out: TraceOut,
    name_map: Annotated[
        Path | None, typer.Option("--map", help="What foreign names stand for: lines of FOREIGN=CANONICAL, or JSON.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="The token ids that were fed, of all steps in order: 1,2,3.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The GGUF file: for shapes, the weights' type, and the order of Q and K.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Name of what made the values.")] = None,
    match: Annotated[
        Path | None,
        typer.Option(
            help="A trace of another engine on the same tokens: unknown names are found by their values, and what is "
            "not proved stays unnamed. With --model also behind a mistake."
        ),
    ] = None,
    skip_unknown: Annotated[bool, typer.Option(help="Leave out names that nobody knows, and say which.")] = False,
) -> int:
    """Make a trace of what another tool dumped or printed."""
    from tracediff.interchange.importer import Options, import_trace
    from tracediff.model.families import load_graph
    from tracediff.model.hparams import parse_tokens

    ids = parse_tokens(tokens) if tokens is not None else ()
    graph = load_graph(model) if model else None
    options = Options(name_map, ids, engine, skip_unknown, match)
    said: list[str] = []  # shown where it went well: else there is one message, the error's
    import_trace(form, path, out, options, graph=graph, model=model, say=said.append)
    said.append(f"wrote {out}")
    return _show(said)


def export(
    trace: Annotated[Path, typer.Argument(help="The trace.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="OUT.safetensors or OUT.npz.")],
) -> int:
    """Write the arrays of a trace to one file that other tools read."""
    from tracediff.interchange.export import export_trace

    said: list[str] = []
    export_trace(trace, out, said.append)
    said.append(f"wrote {out}")
    return _show(said)


def _show(lines: list[str]) -> int:
    for line in lines:
        say(line)
    return MATCH
