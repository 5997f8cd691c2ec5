"""The commands that look at models, traces and weights: `inspect`, `validate`, `weights`, `faults`."""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from tracediff.cli.options import Json, ModelPath
from tracediff.cli.output import DIVERGED, MATCH, check_json, print_listing, progress_bars, show, write_json
from tracediff.errors import TracediffError
from tracediff.inputs import open_file, require_file
from tracediff.printable import escape_json, printable


def validate(
    trace: Annotated[list[Path], typer.Argument(help="The trace to look through; of several ranks those of all.")],
    model: Annotated[Path | None, typer.Option(help="The GGUF file: names, shapes and what is missing.")] = None,
    json: Json = None,
) -> int:
    """List everything that is wrong or suspicious in how a trace is written. 0: valid, 1: it is not."""
    from tracediff.inspect.validate import validate as find
    from tracediff.report.validation import render, render_json

    check_json(json, *trace, model)
    found = find(trace, model)
    if str(json) != "-":
        sys.stdout.write(render(printable(found)))
    if json:
        write_json(json, render_json(found))
    return DIVERGED if found.n_violations else MATCH


def weights(
    model: ModelPath,
    trace: Annotated[Path | None, typer.Option(help="What an engine holds: the weight records of its trace.")] = None,
    hf: Annotated[Path | None, typer.Option(help="What the file was made from: a folder of safetensors.")] = None,
    json: Json = None,
) -> int:
    """Audit every tensor of a GGUF file, against a trace or against the checkpoint that it was made from."""
    from tracediff.audit.whole_file import audit_checkpoint, audit_trace
    from tracediff.report.audit import render, render_json

    check_json(json, model, trace)
    with progress_bars() as progress:
        if trace and not hf:
            result = audit_trace(model, trace, lambda f: progress("weights", f))
        elif hf and not trace:
            result = audit_checkpoint(model, hf, lambda f: progress("weights", f))
        else:
            raise TracediffError("give either --trace TRACE or --hf FOLDER to audit the weights against.")
    return show(result, render, render_json, json)


def imatrix(
    a: Annotated[Path, typer.Argument(help="An importance matrix by llama-imatrix, as GGUF, or a trace.")],
    b: Annotated[Path, typer.Argument(help="Another, or a trace, of the same tokens.")],
    model: Annotated[Path | None, typer.Option(help="The GGUF file: which op reads what of a trace.")] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="NMSE of the channels' RMS that is no difference.")] = 1e-3,
) -> int:
    """Compare what each matmul reads by sums of squares of its channels, which see a permutation. 1: some differ."""
    from tracediff.audit.imatrix import compare, profiles
    from tracediff.model.model import Model

    opened = Model(model) if model else None
    sides = [profiles(require_file(path), opened) for path in (a, b)]
    found = compare(sides[0], sides[1], tolerance)
    wrong = [one for one in found if one.status not in ("ok", "unmatched")]
    lacking = sum(one.status == "unmatched" for one in found)
    title = f"{len(found) - lacking} inputs compared, {len(wrong)} differ; {lacking} on one side alone"
    lines = [f"  {one.weight}: {one.status}, NMSE {one.nmse or 0:.2g}: {one.why}" for one in wrong]
    sys.stdout.writelines(f"{printable(line)}\n" for line in [title, *lines])
    return DIVERGED if wrong else MATCH


def inspect(
    paths: Annotated[
        list[Path], typer.Argument(metavar="MODEL_OR_TRACE", help="A trace may be those of all ranks of a run.")
    ],
    skeleton: Annotated[bool, typer.Option("--skeleton", help="A model: as comments to paste into an engine.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="A model: as JSON for Google's Model Explorer.")] = False,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="With --skeleton: as a trace of so many tokens that lacks only values.")
    ] = None,
) -> int:
    """List the ops that an engine should write for a model, or the records of a trace."""
    from tracediff.inspect.listings import of_model, of_trace

    what = paths[0]
    is_model = _is_gguf(what)
    if (tokens and not skeleton) or (skeleton and not is_model):
        raise TracediffError(
            f"{'--tokens N belongs to --skeleton: give that as well' if is_model else '--skeleton is of a model'}. "
            "tracediff inspect MODEL --skeleton --tokens N"
        )
    if graph and not is_model:
        raise TracediffError("--graph is of a model. tracediff inspect MODEL --graph")
    if graph and skeleton:
        raise TracediffError("--graph and --skeleton are two listings of a model. Give one of them.")
    if is_model and paths[1:]:
        raise TracediffError(f"{paths[1]}: besides a model nothing is listed. Inspect one at a time.")
    if is_model:
        from tracediff.model.families import load_graph

        ops = load_graph(what)
        if graph:
            from tracediff.inspect.explorer import collection

            sys.stdout.write(escape_json(dumps(collection(ops, what.stem), indent=1)) + "\n")
        elif skeleton:
            from tracediff.inspect.skeleton import comments, trace

            lines = map(escape_json, trace(ops, what.name, tokens)) if tokens else map(printable, comments(ops))
            sys.stdout.writelines(f"{line}\n" for line in lines)
        else:
            print_listing(of_model(ops))
    else:
        from tracediff.trace.reader import Trace
        from tracediff.trace.runs import files_of_run, open_trace

        files = files_of_run(paths)
        print_listing(of_trace(open_trace(files) if files[1:] else Trace(files[0])))
    return MATCH


def faults() -> int:
    """List the mistakes that can be planted and recognised."""
    from tracediff.inspect.listings import of_faults

    for listing in of_faults():
        print_listing(listing)
    return MATCH


def _is_gguf(path: Path) -> bool:
    try:
        with open_file(path) as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise TracediffError(f"{path}: cannot open it: {error.strerror}. Check the path.") from None
