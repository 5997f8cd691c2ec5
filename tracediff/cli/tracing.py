"""The command that traces one engine: `trace`."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from tracediff.cli.options import (
    ArithmeticOption,
    CaptureOption,
    Decode,
    DecodeTokens,
    Device,
    DType,
    Fault,
    LlamaCppOptions,
    ModelPath,
    Prompts,
    PromptText,
    TraceOut,
    grouped,
    refuse,
)
from tracediff.cli.output import MATCH, progress_bars, say
from tracediff.cli.prompts import ids_of, passes_after, prompt_of, show_tokens

# Of which engines `trace` takes an option; what is in none of these is for all.
_OPTIONS = {
    "torch": {"dtype", "device", "fault", "arithmetic"},
    "transformers": {"dtype", "device", "hf"},
    "llama.cpp": {field.name for field in fields(LlamaCppOptions)},
}


def _refuse_options_of_others(context: typer.Context, engine: str) -> None:
    for name in context.params:
        takers = [taker for taker, names in _OPTIONS.items() if name in names]
        if takers and engine not in takers:
            why = f"is for --engine {' or '.join(takers)}; this is {engine}, which would not heed it. Leave it out."
            refuse(context, [name], why)


@grouped
def trace(
    context: typer.Context,
    model: ModelPath,
    out: TraceOut,
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
    llama_cpp: LlamaCppOptions = LlamaCppOptions(),
) -> int:
    """Trace one engine."""
    from tracediff.engine.llama_cpp import LlamaCpp, tokenize
    from tracediff.model.model import Model
    from tracediff.trace.staging import staged

    _refuse_options_of_others(context, engine)
    opened = Model(model)
    given = prompt_of(prompt, tokens[0] if tokens else None, opened.graph)
    others = [ids_of(text, opened.graph) for text in (tokens or [])[1:]]
    after = passes_after(decode_tokens or [], 1 + len(others), opened.graph)
    notes: list[str] = []
    with progress_bars() as progress, staged(out, [model]) as path:
        if engine == "llama.cpp":
            options = llama_cpp.options()
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
    show_tokens(given, ids)
    say(f"wrote {out}")
    return MATCH
