"""The command line: the only place that prints and the only place that catches."""

import io
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from tracediff import __version__, cli_interchange
from tracediff.errors import EngineError, TracediffError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tracediff.engine.llama_cpp import Prompt
    from tracediff.judge import Policy
    from tracediff.model.graph import Graph
    from tracediff.result import Listing, Result, Verdict

MATCH, DIVERGED, UNDECIDED, INTERRUPTED = 0, 1, 2, 130


class _Commands(TyperGroup):
    """Runs a command and turns every expected failure into one message and an exit code.

    Within typer, for what typer catches itself changes: Ctrl-C was Abort, then Exit(130); a closed pipe is
    exit code 1, which here says that something diverges.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            _complain("interrupted. What was traced so far is readable where it was saved (-o, --save).")
            code = INTERRUPTED
        except TracediffError as error:
            code = _complain(str(error))
        except UnicodeError as error:
            code = _complain(f"{error}. Paths and prompts must be UTF-8.")
        except BrokenPipeError:  # the reader of our output went away: `tracediff ... | head`
            code = UNDECIDED
            _drop_output()
        except (OSError, MemoryError) as error:
            code = _complain(f"{type(error).__name__}: {error}. Check the path, the permissions and the space left.")
            _drop_output()
        raise typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Find the first op at which an LLM engine goes wrong, and what the mistake is. llama.cpp is the reference.",
    epilog="Exit code 0: nothing diverges. 1: something does. 2: it could not be decided.",
)

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file.", show_default=False)]
PromptText = Annotated[str | None, typer.Option("-p", "--prompt", help="Text, tokenised by llama.cpp.")]
Tokens = Annotated[str | None, typer.Option(help="Token ids instead of text: 1,2,3.")]
Decode = Annotated[int, typer.Option(min=0, help="Greedy decode steps after the prompt.")]
DType = Annotated[Literal["f64", "f32", "bf16", "f16"], typer.Option(help="What torch or transformers computes in.")]
Device = Annotated[str, typer.Option(help="cpu or cuda, for torch and transformers.")]
CaptureOption = Annotated[
    Literal["all", "layers", "stats"],
    typer.Option(help="Every op, the hidden states only, or statistics of every op."),
]
Fault = Annotated[
    list[str] | None,
    typer.Option(help="Plant a mistake in the torch engine: NAME or NAME@LAYER. `tracediff faults` lists them."),
]
ArithmeticOption = Annotated[
    str | None, typer.Option(help="Pin the arithmetic of the candidate, such as 'llama.cpp' or 'exact'.")
]
Tolerance = Annotated[
    list[str] | None,
    typer.Option(help="NMSE that may drift: 1e-6, or PATTERN=1e-6 for some ops; repeatable."),
]
Allow = Annotated[list[str] | None, typer.Option(help="Pattern of ops that one side may lack; repeatable.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON; - for standard output.")]
Threads = Annotated[int, typer.Option(min=1, help="llama.cpp: threads.")]
Ctx = Annotated[int, typer.Option(min=0, help="llama.cpp: context size; 0 for what is needed.")]
Batch = Annotated[int, typer.Option(min=0, help="llama.cpp: batch size; 0 for the whole prompt.")]
UBatch = Annotated[int, typer.Option(min=1, help="llama.cpp: micro-batch size.")]
GpuLayers = Annotated[int, typer.Option(help="llama.cpp: layers on the GPU.")]
FlashAttn = Annotated[bool, typer.Option(help="llama.cpp: flash attention, one op instead of three.")]
KvType = Annotated[Literal["f32", "f16", "q8_0"], typer.Option(help="llama.cpp: type of the KV cache.")]
ExtraBufts = Annotated[bool, typer.Option(help="llama.cpp: extra buffer types (repacked weights).")]


def main() -> None:
    """The entry point."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters shows ? for them
    app()


def _complain(message: str) -> int:
    print(f"tracediff: {message}", file=sys.stderr)  # noqa: T201
    return UNDECIDED


def _drop_output() -> None:
    """Drop what standard output does not take any more: Python would try again at exit, and complain again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Hold the options that belong to no command."""
    if version:
        print(__version__)  # noqa: T201
        raise typer.Exit


@app.command()
def demo(
    fault: Fault = None,
    save: Annotated[Path | None, typer.Option(help="Keep the model and the traces in this folder.")] = None,
    json: Json = None,
) -> int:
    """Make a small model as loud as a real one, plant a fault in the torch engine, trace both, and report."""
    from tracediff.demo import FAULT, PROMPT, make_model

    with _folder(save) as folder:
        return run(make_model(folder), prompt=PROMPT, decode=1, fault=fault or [FAULT], save=folder, json=json)


@app.command()
def run(
    model: Model,
    prompt: PromptText = None,
    tokens: Tokens = None,
    decode: Decode = 0,
    dtype: DType = "f32",
    device: Device = "cpu",
    capture: CaptureOption = "all",
    fault: Fault = None,
    arithmetic: ArithmeticOption = None,
    tolerance: Tolerance = None,
    allow: Allow = None,
    save: Annotated[Path | None, typer.Option(help="Keep the traces in this folder.")] = None,
    json: Json = None,
    threads: Threads = 2,
    ctx: Ctx = 0,
    batch: Batch = 0,
    ubatch: UBatch = 512,
    gpu_layers: GpuLayers = 0,
    flash_attn: FlashAttn = False,
    kv_type: KvType = "f32",
    extra_bufts: ExtraBufts = False,
) -> int:
    """Trace a model in llama.cpp and in torch, compare the two, and report."""
    from tracediff.engine.llama_cpp import LlamaCpp
    from tracediff.model.families import load_graph
    from tracediff_reference.protocol import Options

    options = Options(
        threads=threads, n_ctx=ctx, n_batch=batch, n_ubatch=ubatch, gpu_layers=gpu_layers,
        flash_attn=flash_attn, kv_type=kv_type, extra_bufts=extra_bufts,
    )  # fmt: skip
    graph = load_graph(model)
    given = _prompt(prompt, tokens, graph)
    fused = ("attn_scores", "attn_probs") if flash_attn and capture != "layers" else ()
    policy = _policy(tolerance, [*(allow or []), *fused])
    with _folder(save) as folder, _progress() as progress:
        reference, candidate = folder / "reference.trace", folder / "candidate.trace"
        child = LlamaCpp(model, graph, given, reference, capture=capture, n_decode=decode, options=options)
        try:  # while llama.cpp works: 2 s of imports, and what is wrong with the options of torch
            from tracediff.engine.torch_run import TorchOptions, check_options, trace_torch
            from tracediff.pipeline import compare_traces
            from tracediff.trace.reader import Trace

            torch_options = TorchOptions(
                dtype=dtype, device=device, capture=capture, arithmetic=arithmetic, faults=tuple(fault or ())
            )
            check_options(model, torch_options)
            child.wait(lambda fraction: progress("llama.cpp", fraction))
        except BaseException:
            child.stop()
            raise
        _show_tokens(given, child.tokens)
        steps = [*Trace(reference).steps.values()]
        trace_torch(model, candidate, torch_options, steps=steps, progress=lambda f: progress("torch", f))
        result = compare_traces(
            reference,
            candidate,
            model=None if capture == "stats" else model,
            policy=policy,
            progress=progress,
        )
    return _report(result, json)


# Of which engines `trace` takes an option; what is in none of these is for all.
_OPTIONS = {
    "torch": {"dtype", "device", "fault", "arithmetic"},
    "transformers": {"dtype", "device", "hf"},
    "llama.cpp": {"threads", "ctx", "batch", "ubatch", "gpu_layers", "flash_attn", "kv_type", "extra_bufts"},
}


def _refuse_options_of_others(context: typer.Context, engine: str) -> None:
    for name in context.params:
        takers = [taker for taker, names in _OPTIONS.items() if name in names]
        source = context.get_parameter_source(name)
        if takers and engine not in takers and source is not None and source.name == "COMMANDLINE":
            raise EngineError(
                f"--{name.replace('_', '-')} is for --engine {' or '.join(takers)}; this is {engine}, which would not "
                "heed it. Leave it out."
            )


@app.command()
def trace(
    context: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option("-o", "--out", help="The trace to write: OUT.trace, and OUT.bin beside it.")],
    engine: Annotated[
        Literal["torch", "llama.cpp", "transformers"], typer.Option(help="Which engine to trace.")
    ] = "torch",
    hf: Annotated[
        Path | None, typer.Option(help="transformers: load this model folder, not the weights of MODEL.")
    ] = None,
    prompt: PromptText = None,
    tokens: Tokens = None,
    decode: Decode = 0,
    dtype: DType = "f32",
    device: Device = "cpu",
    capture: CaptureOption = "all",
    fault: Fault = None,
    arithmetic: ArithmeticOption = None,
    threads: Threads = 2,
    ctx: Ctx = 0,
    batch: Batch = 0,
    ubatch: UBatch = 512,
    gpu_layers: GpuLayers = 0,
    flash_attn: FlashAttn = False,
    kv_type: KvType = "f32",
    extra_bufts: ExtraBufts = False,
) -> int:
    """Trace one engine."""
    from tracediff.engine.llama_cpp import LlamaCpp, tokenize
    from tracediff.model.families import load_graph
    from tracediff_reference.protocol import Options

    _refuse_options_of_others(context, engine)
    graph = load_graph(model)
    given = _prompt(prompt, tokens, graph)
    notes: list[str] = []
    with _progress() as progress:
        if engine == "llama.cpp":
            options = Options(
                threads=threads, n_ctx=ctx, n_batch=batch, n_ubatch=ubatch, gpu_layers=gpu_layers,
                flash_attn=flash_attn, kv_type=kv_type, extra_bufts=extra_bufts,
            )  # fmt: skip
            child = LlamaCpp(model, graph, given, out, capture=capture, n_decode=decode, options=options)
            ids = child.wait(lambda fraction: progress("llama.cpp", fraction))
        else:
            from tracediff.engine.torch_run import TorchOptions, trace_torch

            ids = given.tokens or tokenize(model, graph, given.text or "")
            torch_options = TorchOptions(
                dtype=dtype, device=device, capture=capture, arithmetic=arithmetic, faults=tuple(fault or ())
            )
            if engine == "torch":
                trace_torch(model, out, torch_options, ids, decode, progress=lambda f: progress("torch", f))
            else:
                from tracediff.engine.transformers_run import trace_transformers

                show = lambda f: progress("transformers", f)  # noqa: E731
                notes = trace_transformers(model, out, torch_options, ids, decode, hf, show)
    for note in notes:
        _say(note)
    _show_tokens(given, ids)
    _say(f"wrote {out}")
    return MATCH


@app.command()
def compare(
    reference: Annotated[Path, typer.Argument(help="The trace that is right.")],
    candidate: Annotated[Path, typer.Argument(help="The trace to judge.")],
    third: Annotated[Path | None, typer.Argument(help="A third engine's: which of the three is the outlier?")] = None,
    model: Annotated[Path | None, typer.Option(help="The GGUF file: replay, floors and causes.")] = None,
    arithmetic: ArithmeticOption = None,
    tolerance: Tolerance = None,
    allow: Allow = None,
    json: Json = None,
) -> int:
    """Compare two traces, or three: op by op with the model, by drift alone without."""
    from tracediff.pipeline import compare_traces

    policy = _policy(tolerance, allow)
    if third:
        return _compare_three((reference, candidate, third), model, policy, arithmetic, json)
    if arithmetic and not model:
        raise TracediffError("--arithmetic is that of the replay, which needs the GGUF file: give --model as well.")
    with _progress() as progress:
        result = compare_traces(
            reference, candidate, model=model, policy=policy, arithmetic=arithmetic, progress=progress
        )
    if model:
        _check_replayed(result)
    return _report(result, json)


def _compare_three(
    traces: tuple[Path, Path, Path], model: Path | None, policy: "Policy", arithmetic: str | None, json: Path | None
) -> int:
    from tracediff.report.threeway import render, render_json
    from tracediff.threeway import compare_three

    if arithmetic:
        raise TracediffError("--arithmetic pins that of one candidate: compare two traces, or let it be fitted.")
    with _progress() as progress:
        result = compare_three(traces, model=model, policy=policy, progress=progress)
    if model and not any(any(op.local) for op in result.ops):
        raise TracediffError("nothing in the three traces can be replayed. Record data, or compare without --model.")
    return _show(lambda width: render(result, width), lambda: render_json(result), result.verdict, json)


@app.command()
def check(
    trace: Annotated[Path, typer.Argument(help="The trace to judge.")],
    model: Annotated[Path, typer.Option(help="The GGUF file that it was made with.")],
    arithmetic: ArithmeticOption = None,
    json: Json = None,
) -> int:
    """Judge one trace by replay alone: no reference needed."""
    from tracediff.pipeline import check_trace

    with _progress() as progress:
        result = check_trace(trace, model, arithmetic=arithmetic, progress=progress)
    _check_replayed(result)
    return _report(result, json)


@app.command()
def validate(
    trace: Annotated[Path, typer.Argument(help="The trace to look through.")],
    model: Annotated[Path | None, typer.Option(help="The GGUF file: names, shapes and what is missing.")] = None,
    json: Json = None,
) -> int:
    """List everything that is wrong or suspicious in how a trace is written. 0: valid, 1: it is not."""
    from tracediff.report.validation import render, render_json
    from tracediff.validate import validate as find

    found = find(trace, model)
    if str(json) != "-":
        sys.stdout.write(render(found))
    if json:
        _write(json, render_json(found))
    return DIVERGED if found.violations else MATCH


@app.command()
def weights(
    model: Model,
    trace: Annotated[Path | None, typer.Option(help="What an engine holds: the weight records of its trace.")] = None,
    hf: Annotated[Path | None, typer.Option(help="What the file was made from: a folder of safetensors.")] = None,
    json: Json = None,
) -> int:
    """Audit every tensor of a GGUF file, against a trace or against the checkpoint that it was made from."""
    from tracediff.audit import audit_checkpoint, audit_trace
    from tracediff.report.audit import render, render_json

    with _progress() as progress:
        if trace and not hf:
            result = audit_trace(model, trace, lambda f: progress("weights", f))
        elif hf and not trace:
            result = audit_checkpoint(model, hf, lambda f: progress("weights", f))
        else:
            raise TracediffError("give either --trace TRACE or --hf FOLDER to audit the weights against.")
    return _show(lambda width: render(result, width), lambda: render_json(result), result.verdict, json)


@app.command()
def inspect(
    what: Annotated[Path, typer.Argument(metavar="MODEL_OR_TRACE")],
    skeleton: Annotated[bool, typer.Option("--skeleton", help="A model: as comments to paste into an engine.")] = False,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="With --skeleton: as a trace of so many tokens that lacks only values.")
    ] = None,
) -> int:
    """List the ops that an engine should write for a model, or the records of a trace."""
    from tracediff.listings import of_model, of_trace

    is_model = _is_gguf(what)
    if (tokens and not skeleton) or (skeleton and not is_model):
        raise TracediffError(
            f"{'--tokens N belongs to --skeleton: give that as well' if is_model else '--skeleton is of a model'}. "
            "tracediff inspect MODEL --skeleton --tokens N"
        )
    if is_model:
        from tracediff.model.families import load_graph

        graph = load_graph(what)
        if skeleton:
            from tracediff.skeleton import comments, trace

            sys.stdout.writelines(
                f"{line}\n" for line in (trace(graph, what.name, tokens) if tokens else comments(graph))
            )
        else:
            _list(of_model(graph))
    else:
        from tracediff.trace.reader import Trace

        _list(of_trace(Trace(what)))
    return MATCH


@app.command()
def faults() -> int:
    """List the mistakes that can be planted and recognised."""
    from tracediff.listings import of_faults

    _list(of_faults())
    return MATCH


app.command("import")(cli_interchange.import_)
app.command()(cli_interchange.export)


# --- what the commands share ---------------------------------------------------------------------------------------


def _prompt(text: str | None, tokens: str | None, graph: "Graph") -> "Prompt":
    from tracediff.engine.llama_cpp import Prompt
    from tracediff.model.hparams import check_tokens, parse_tokens

    if (text is None) == (tokens is None):
        raise EngineError("give the prompt either as text with -p or as ids with --tokens 1,2,3.")
    if tokens is None:
        if not text:
            raise EngineError("the prompt is empty. Give some text with -p, or ids with --tokens 1,2,3.")
        return Prompt(text=text)
    ids = parse_tokens(tokens)
    check_tokens(ids, graph.hparams.n_vocab)  # before anything is loaded
    return Prompt(tokens=ids)


def _policy(tolerance: list[str] | None, allow: list[str] | None) -> "Policy":
    from tracediff.judge import Policy

    tolerances: dict[str, float] = {}
    for item in tolerance or ():
        pattern, _, number = item.rpartition("=")
        try:
            nmse = float(number)
        except ValueError:
            nmse = math.nan
        if not nmse >= 0:
            raise TracediffError(f"--tolerance {item!r}: give an NMSE such as 1e-6, or PATTERN=1e-6.")
        tolerances.pop(pattern or "*", None)  # the last one of a pattern stands last: that is the one that counts
        tolerances[pattern or "*"] = nmse
    return Policy(tolerances, tuple(allow or ()))


def _check_replayed(result: "Result") -> None:
    if not any(op.local for op in result.ops):
        raise TracediffError(
            f"{result.candidate.path}: nothing in it can be replayed: it holds statistics only, or no op of this "
            "model. Record data, under the names that `tracediff inspect MODEL` lists; "
            "`tracediff compare` without --model compares statistics by tolerance."
        )
    unknown = result.coverage.unknown if result.coverage else ()
    if 2 * len(unknown) > len({op.op for op in result.ops}):
        raise TracediffError(
            f"{result.candidate.path}: most of its ops ({len(unknown)}) have names that this model has not: "
            f"{', '.join(unknown[:3])}, ... `tracediff validate TRACE --model MODEL` lists them, `tracediff import` "
            "knows those of others."
        )


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise TracediffError(f"{path}: cannot open it: {error.strerror}. Check the path.") from None


@contextmanager
def _folder(save: Path | None) -> Iterator[Path]:
    if save:
        if save.is_file():
            raise TracediffError(f"--save {save} is a file. Give a folder, which is made where it is not there.")
        save.mkdir(parents=True, exist_ok=True)
        yield save
        return
    with tempfile.TemporaryDirectory(prefix="tracediff-") as name:
        yield Path(name)
    _say("The traces are deleted now: --save FOLDER keeps them.")


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar per stage on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, fraction: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=fraction)

        yield show


def _list(listing: "Listing") -> None:
    """A table as wide as the terminal; in a pipe as wide as it needs."""
    from tracediff.console import has_width, standard_output
    from tracediff.report.listing import narrowest, render

    console = standard_output()
    limit = console.width if has_width() else None
    console.print(render(listing, limit), width=max(console.width, 0 if limit else narrowest(listing)))


def _report(result: "Result", json: Path | None) -> int:
    from tracediff.report.json_report import render as render_json
    from tracediff.report.terminal import render

    return _show(lambda width: render(result, width), lambda: render_json(result), result.verdict, json)


def _show(
    render: Callable[[int], "RenderableType"], render_json: Callable[[], str], verdict: "Verdict", json: Path | None
) -> int:
    """Print the report, write the JSON where it is asked for, and say how it ended."""
    if str(json) != "-":
        from tracediff.console import standard_output

        console = standard_output()
        console.print(render(console.width))
    if json:
        _write(json, render_json())
    return DIVERGED if verdict == "diverged" else MATCH


def _write(path: Path, text: str) -> None:
    """JSON is UTF-8, whatever the locale says."""
    if str(path) != "-":
        path.write_text(text, encoding="utf-8")
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(text)


def _show_tokens(given: "Prompt", tokens: tuple[int, ...]) -> None:
    if given.text is not None:
        _say(f"{len(tokens)} tokens: {','.join(map(str, tokens))}")


def _say(message: str) -> None:
    print(message, file=sys.stderr)  # noqa: T201
