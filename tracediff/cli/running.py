"""The commands that trace llama.cpp and torch and compare the two: `demo`, `run`."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracediff.cli.formats import Formats, report
from tracediff.cli.options import (
    Allow,
    ArithmeticOption,
    CaptureOption,
    Decode,
    DType,
    EffortOptions,
    Fault,
    LlamaCppOptions,
    ModelPath,
    PromptText,
    Require,
    Resolve,
    Tokens,
    Tolerance,
    grouped,
    policy_of,
)
from tracediff.cli.output import DIVERGED, MATCH, progress_bars, say
from tracediff.cli.prompts import prompt_of, show_tokens
from tracediff.errors import TracediffError
from tracediff.files import temporary_folder

if TYPE_CHECKING:
    from tracediff.engine.llama_cpp import Prompt
    from tracediff.judge import Policy
    from tracediff.model.model import Model
    from tracediff.pipeline import Effort
    from tracediff.result import Result
    from tracediff_reference.protocol import Options

_TRACES = Path("traces")  # where they are said to be kept


@grouped
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


@grouped
def run(
    model: ModelPath,
    prompt: PromptText = None,
    tokens: Tokens = None,
    decode: Decode = 0,
    dtype: DType = "f32",
    capture: CaptureOption = "all",
    fault: Fault = None,
    arithmetic: ArithmeticOption = None,
    tolerance: Tolerance = None,
    require: Require = None,
    allow: Allow = None,
    resolve: Resolve = None,
    save: Annotated[Path | None, typer.Option(help="Keep the traces in this folder.")] = None,
    spent: EffortOptions = EffortOptions(),
    llama_cpp: LlamaCppOptions = LlamaCppOptions(),
    formats: Formats = Formats(),
) -> int:
    """Trace a model in llama.cpp and in torch, compare the two, and report."""
    from tracediff.model.model import Model

    formats.check(model)
    opened = Model(model)
    given = prompt_of(prompt, tokens, opened.graph)
    policy, effort = policy_of(tolerance, allow, require, resolve), spent.effort()
    torch: dict[str, Any] = {"dtype": dtype, "device": spent.device, "capture": capture, "arithmetic": arithmetic}
    torch["faults"], options = tuple(fault or ()), llama_cpp.options()
    with _folder(save) as folder:
        result = _trace_both(opened, given, folder, _written(save), decode, options, policy, effort, **torch)
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
    from tracediff.trace.staging import check

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
        show_tokens(given, child.tokens)
        steps = [*Trace(reference).steps.values()]
        with written(candidate) as path:
            trace_torch(model, path, torch_options, steps=steps, progress=lambda f: progress("torch", f))
        replayed = None if capture in ("stats", "sketch") else model
        return compare_traces(reference, candidate, model=replayed, policy=policy, effort=effort, progress=progress)


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
    from tracediff.trace.staging import staged

    return staged if save else nullcontext
