"""The commands that trace: `demo`, `run`, `trace`."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tracediff.cli.formats import Formats, report, writing
from tracediff.cli.options import (
    Allow,
    ArithmeticOption,
    Batch,
    CaptureOption,
    Ctx,
    Decode,
    DecodeTokens,
    Device,
    DType,
    ExtraBufts,
    Fault,
    FlashAttn,
    GpuLayers,
    KvType,
    LlamaLib,
    ModelPath,
    Prompts,
    PromptText,
    Require,
    Resolve,
    Threads,
    Time,
    Tokens,
    Tolerance,
    UBatch,
    Workers,
    policy_of,
)
from tracediff.cli.output import DIVERGED, MATCH, progress_bars, say
from tracediff.errors import EngineError, TracediffError
from tracediff.files import temporary_folder
from tracediff.trace.staging import check, staged

if TYPE_CHECKING:
    from tracediff.engine.llama_cpp import Prompt
    from tracediff.judge import Policy
    from tracediff.model.graph import Graph
    from tracediff.model.model import Model
    from tracediff.pipeline import Effort
    from tracediff.result import Result
    from tracediff_reference.protocol import Options

_TRACES = Path("traces")  # where they are said to be kept


@writing
def demo(
    fault: Fault = None,
    save: Annotated[Path | None, typer.Option(help="Keep the model and the traces in this folder.")] = None,
    formats: Formats = Formats(),
) -> int:
    """Make a small model as loud as a real one, plant a fault in the torch engine, trace both, and report.

    Exit code 0: what was planted was found and named.
    """
    from tracediff.demo import FAULT, PROMPT, make_model, not_found
    from tracediff.engine.llama_cpp import Prompt
    from tracediff.judge import Policy
    from tracediff.model.model import Model
    from tracediff.pipeline import Effort
    from tracediff_reference.protocol import Options

    formats.check()
    planted = fault or [FAULT]
    with _folder(save) as folder:
        model = Model(make_model(folder))
        given = Prompt(text=PROMPT)
        result = _trace_both(
            model, given, folder, _written(save), 1, Options(), Policy(), Effort(), faults=tuple(planted)
        )
        wrong = not_found(result, model, planted)
    report(_kept_next(result, save, _TRACES / model.path.name), formats)
    for sentence in wrong:
        say(f"The demo did not find what it planted: {sentence}.")
    return DIVERGED if wrong else MATCH


@writing
def run(
    model: ModelPath,
    prompt: PromptText = None,
    tokens: Tokens = None,
    decode: Decode = 0,
    dtype: DType = "f32",
    device: Device = "cpu",
    capture: CaptureOption = "all",
    fault: Fault = None,
    arithmetic: ArithmeticOption = None,
    tolerance: Tolerance = None,
    require: Require = None,
    allow: Allow = None,
    resolve: Resolve = None,
    workers: Workers = 1,
    time: Time = 60.0,
    save: Annotated[Path | None, typer.Option(help="Keep the traces in this folder.")] = None,
    formats: Formats = Formats(),
    threads: Threads = 2,
    ctx: Ctx = 0,
    batch: Batch = 0,
    ubatch: UBatch = 512,
    gpu_layers: GpuLayers = 0,
    flash_attn: FlashAttn = False,
    kv_type: KvType = "f32",
    extra_bufts: ExtraBufts = False,
    llama_lib: LlamaLib = None,
) -> int:
    """Trace a model in llama.cpp and in torch, compare the two, and report."""
    from tracediff.model.model import Model
    from tracediff.pipeline import Effort

    options = _llama_cpp(
        ctx, batch, ubatch, llama_lib, threads=threads, gpu_layers=gpu_layers, flash_attn=flash_attn, kv_type=kv_type,
        extra_bufts=extra_bufts,
    )  # fmt: skip
    formats.check(model)
    opened = Model(model)
    given = _prompt(prompt, tokens, opened.graph)
    policy = policy_of(tolerance, allow, require, resolve)
    with _folder(save) as folder:
        torch: dict[str, Any] = {"dtype": dtype, "device": device, "capture": capture, "arithmetic": arithmetic}
        torch["faults"] = tuple(fault or ())
        result = _trace_both(
            opened, given, folder, _written(save), decode, options, policy, Effort(workers, time, device), **torch
        )
    return report(_kept_next(result, save, model), formats)


def _kept_next(result: "Result", save: Path | None, model: Path) -> "Result":
    """What to run next cannot be with traces that are deleted: then it is the same command that keeps them.

    `model` is where the GGUF file lies then.
    """
    if save or not result.next:
        return result
    command = shlex.join(("tracediff", *sys.argv[1:], "--save", str(_TRACES)))
    name = next((op for op in (result.findings[0].ops if result.findings else ()) if result.explained(op)), None)
    if name is None:
        return replace(result, next=replace(result.next, command=command, why=f"to keep the traces; {result.next.why}"))
    traces = (str(_TRACES / f"{side}.trace") for side in ("reference", "candidate"))
    explain = shlex.join(("tracediff", "compare", *traces, "--model", str(model), "--explain", name))
    why = f"then `{explain}`: {result.next.why}"
    return replace(result, next=replace(result.next, command=command, why=why))


def _trace_both(
    model: "Model",
    given: "Prompt",
    folder: Path,
    written: Callable[[Path], AbstractContextManager[Path]],
    n_decode: int,
    options: "Options",
    policy: "Policy",
    effort: "Effort",
    **torch: Any,
) -> "Result":
    """Trace llama.cpp with `options`, then torch with the options `torch` on the same tokens, and compare."""
    from tracediff.engine.llama_cpp import LlamaCpp

    reference, candidate, capture = folder / "reference.trace", folder / "candidate.trace", torch.get("capture", "all")
    for out in (reference, candidate):
        check(out, [model.path])
    with progress_bars() as progress:
        with written(reference) as path:
            child = LlamaCpp(model, given, path, capture=capture, n_decode=n_decode, options=options)
            try:  # while llama.cpp works: 2 s of imports, and what is wrong with the options of torch
                from tracediff.engine.torch_run import TorchOptions, check_options, trace_torch
                from tracediff.pipeline import compare_traces
                from tracediff.trace.reader import Trace

                torch_options = TorchOptions(**torch)
                check_options(model, torch_options)
                child.wait(lambda fraction: progress("llama.cpp", fraction))
            except BaseException:
                child.stop()
                raise
        _show_tokens(given, child.tokens)
        steps = [*Trace(reference).steps.values()]
        with written(candidate) as path:
            trace_torch(model, path, torch_options, steps=steps, progress=lambda f: progress("torch", f))
        replayed = None if capture in ("stats", "sketch") else model
        return compare_traces(reference, candidate, model=replayed, policy=policy, effort=effort, progress=progress)


# Of which engines `trace` takes an option; what is in none of these is for all.
_OPTIONS = {
    "torch": {"dtype", "device", "fault", "arithmetic"},
    "transformers": {"dtype", "device", "hf"},
    "llama.cpp": {
        "threads",
        "ctx",
        "batch",
        "ubatch",
        "gpu_layers",
        "flash_attn",
        "kv_type",
        "extra_bufts",
        "llama_lib",
    },
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


def trace(
    context: typer.Context,
    model: ModelPath,
    out: Annotated[Path, typer.Option("-o", "--out", help="The trace to write: OUT.trace, and OUT.bin beside it.")],
    engine: Annotated[
        Literal["torch", "llama.cpp", "transformers"], typer.Option(help="Which engine to trace.")
    ] = "torch",
    hf: Annotated[
        Path | None, typer.Option(help="transformers: load this model folder, not the weights of MODEL.")
    ] = None,
    prompt: PromptText = None,
    tokens: Prompts = None,
    decode: Decode = 0,
    decode_tokens: DecodeTokens = None,
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
    llama_lib: LlamaLib = None,
) -> int:
    """Trace one engine."""
    from tracediff.engine.llama_cpp import LlamaCpp, tokenize
    from tracediff.model.model import Model

    _refuse_options_of_others(context, engine)
    opened = Model(model)
    given = _prompt(prompt, tokens[0] if tokens else None, opened.graph)
    others = [_ids(text, opened.graph) for text in (tokens or [])[1:]]
    after = _after(decode_tokens or [], 1 + len(others), opened.graph)
    notes: list[str] = []
    with progress_bars() as progress, staged(out, [model]) as path:
        if engine == "llama.cpp":
            options = _llama_cpp(
                ctx, batch, ubatch, llama_lib, threads=threads, gpu_layers=gpu_layers, flash_attn=flash_attn,
                kv_type=kv_type, extra_bufts=extra_bufts,
            )  # fmt: skip
            if others:
                from tracediff.engine.torch_run import passes

                steps = passes([given.tokens or (), *others], after)
                child = LlamaCpp.fed(opened, steps, path, capture=capture, n_decode=decode, options=options)
            else:
                forced = after[0] if after else ()
                child = LlamaCpp(opened, given, path, capture=capture, passes=forced, n_decode=decode, options=options)
            ids = child.wait(lambda fraction: progress("llama.cpp", fraction))
        else:
            from tracediff.engine.torch_run import TorchOptions, passes, trace_torch

            ids = given.tokens or tokenize(opened, given.text or "")
            torch_options = TorchOptions(
                dtype=dtype, device=device, capture=capture, arithmetic=arithmetic, faults=tuple(fault or ())
            )
            steps = passes([ids, *others], after)
            if engine == "torch":
                trace_torch(opened, path, torch_options, ids, decode, steps, lambda f: progress("torch", f))
            else:
                from tracediff.engine.transformers_run import trace_transformers

                show = lambda f: progress("transformers", f)  # noqa: E731
                notes = trace_transformers(opened, path, torch_options, ids, decode, hf, steps, show)
    for note in notes:
        say(note)
    _show_tokens(given, ids)
    say(f"wrote {out}")
    return MATCH


def _llama_cpp(ctx: int, batch: int, ubatch: int, llama_lib: Path | None, **same: Any) -> "Options":
    """The reference's options from the command line's; those of `same` bear one name in both."""
    from tracediff_reference.protocol import Options

    library = str(llama_lib.absolute()) if llama_lib else None
    return Options(n_ctx=ctx, n_batch=batch, n_ubatch=ubatch, library=library, **same)


def _prompt(text: str | None, tokens: str | None, graph: "Graph") -> "Prompt":
    from tracediff.engine.llama_cpp import Prompt

    if (text is None) == (tokens is None):
        raise EngineError("give the prompt either as text with -p or as ids with --tokens 1,2,3.")
    if tokens is None:
        if not text:
            raise EngineError("the prompt is empty. Give some text with -p, or ids with --tokens 1,2,3.")
        return Prompt(text=text)
    return Prompt(tokens=_ids(tokens, graph))


def _ids(text: str, graph: "Graph") -> tuple[int, ...]:
    """Token ids, checked before anything is loaded."""
    from tracediff.model.hparams import check_tokens, parse_tokens

    ids = parse_tokens(text)
    check_tokens(ids, graph.hparams.n_vocab)
    return ids


def _after(given: list[str], n_prompts: int, graph: "Graph") -> list[list[tuple[int, ...]]]:
    """For each prompt the passes after it, of a token each: those given, or those of a trace after its first step."""
    from tracediff.trace.runs import open_trace
    from tracediff.trace.ways import fed_to

    each: list[list[int]] = []
    for text in given:
        if text.endswith(".trace"):
            each += [fed.tokens[fed.sizes[0] :] for fed in fed_to(open_trace(Path(text))).values()]
        else:
            each.append([*_ids(text, graph)])
    if each and len(each) != n_prompts:
        raise EngineError(f"--decode-tokens for {len(each)} prompts, where there are {n_prompts}. Give as many.")
    return [[(token,) for token in tokens] for tokens in each]


@contextmanager
def _folder(save: Path | None) -> Iterator[Path]:
    if save:
        if save.is_file():
            raise TracediffError(f"--save {save} is a file. Give a folder, which is made where it is not there.")
        save.mkdir(parents=True, exist_ok=True)
        yield save
        return
    with temporary_folder() as folder:
        yield folder
    say("The traces are deleted now: --save FOLDER keeps them.")


def _written(save: Path | None) -> Callable[[Path], AbstractContextManager[Path]]:
    """How traces are written: what nobody keeps needs no care."""
    return staged if save else nullcontext


def _show_tokens(given: "Prompt", tokens: tuple[int, ...]) -> None:
    if given.text is not None:
        say(f"{len(tokens)} tokens: {','.join(map(str, tokens))}")
