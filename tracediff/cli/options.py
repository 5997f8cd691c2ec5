"""The options that commands share, and what they mean."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tracediff.errors import TracediffError
from tracediff.names import Capture

if TYPE_CHECKING:
    from tracediff.judge import Policy
    from tracediff.pipeline import Effort
    from tracediff_reference.protocol import Options

MadeWith = Annotated[Path, typer.Option("--model", help="The GGUF file that it was made with.")]
TraceOut = Annotated[Path, typer.Option("-o", "--out", help="The trace to write: OUT.trace, and OUT.bin beside it.")]
ToJudge = Annotated[list[Path], typer.Argument(help="The trace to judge; of an engine of several ranks those of all.")]
ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file.", show_default=False)]
PromptText = Annotated[str | None, typer.Option("-p", "--prompt", help="Text, tokenised by llama.cpp.")]
Tokens = Annotated[str | None, typer.Option(help="Token ids instead of text: 1,2,3.")]
Decode = Annotated[int, typer.Option(min=0, help="Greedy decode steps after the prompt.")]
DecodeTokens = Annotated[
    list[str] | None,
    typer.Option(
        "--decode-tokens",
        help="Tokens to feed after the prompt, one a step: 5,6,7, or a trace that has them; repeat for each prompt.",
    ),
]
Prompts = Annotated[
    list[str] | None, typer.Option("--tokens", help="Token ids instead of text: 1,2,3; repeat for a batch of prompts.")
]
DType = Annotated[Literal["f64", "f32", "bf16", "f16"], typer.Option(help="What torch or transformers computes in.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N: where torch computes, replay too.")]
CaptureOption = Annotated[
    Capture,
    typer.Option(help="Every op, the hidden states only, or statistics of every op, or sketches, of 2 KB."),
]
Fault = Annotated[
    list[str] | None,
    typer.Option(
        help="Plant a mistake in the torch engine: NAME, NAME@LAYER or 'OP: WORDS'. `tracediff faults` lists them."
    ),
]
ArithmeticOption = Annotated[
    str | None, typer.Option(help="Pin the arithmetic of the candidate, such as 'llama.cpp' or 'exact'.")
]
Tolerance = Annotated[
    list[str] | None,
    typer.Option(help="NMSE that may drift: 1e-6, or PATTERN=1e-6 for some ops; repeatable."),
]
Require = Annotated[
    list[str] | None, typer.Option(help="Pattern of ops that must be recorded: one that is not fails; repeatable.")
]
Allow = Annotated[
    list[str] | None, typer.Option(help="Pattern of ops that need not be, or may have another shape; repeatable.")
]
Resolve = Annotated[
    float | None, typer.Option(help="NMSE of a mistake that must show in every op: where it would not, undecided.")
]
Explain = Annotated[
    str | None, typer.Option(help="Show the numbers of a faulty op's explanation, as blk.0.attn_q, at three places.")
]
ShowPlan = Annotated[
    bool, typer.Option("--plan", help="Say how each sort of record would be recomputed, and judge nothing.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result as JSON; - for standard output.")]


@dataclass(frozen=True, slots=True)
class EffortOptions:
    """What may be spent on judging; each field is an option of a command."""

    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Processes that judge and explain, each with the memory of one; the result is the same."
        ),
    ] = 1
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Judge on a Ray cluster: auto, ray://HOST:PORT, or local to start one."),
    ] = None
    time: Annotated[float, typer.Option(min=0, help="Seconds in which causes are sought, once it is known where.")] = (
        60.0
    )
    device: Device = "cpu"

    def effort(self) -> "Effort":
        """As the pipeline takes them."""
        from tracediff.pipeline import Effort

        return Effort(self.workers, self.time, self.device, self.ray)


@dataclass(frozen=True, slots=True)
class LlamaCppOptions:
    """How llama.cpp runs; each field is an option of a command."""

    threads: Annotated[int, typer.Option(min=1, help="llama.cpp: threads.")] = 2
    ctx: Annotated[int, typer.Option(min=0, help="llama.cpp: context size; 0 for what is needed.")] = 0
    batch: Annotated[int, typer.Option(min=0, help="llama.cpp: batch size; 0 for the whole prompt.")] = 0
    ubatch: Annotated[int, typer.Option(min=1, help="llama.cpp: micro-batch size.")] = 512
    gpu_layers: Annotated[int, typer.Option(help="llama.cpp: layers on the GPU, -1 for all.")] = 0
    flash_attn: Annotated[bool, typer.Option(help="llama.cpp: flash attention, one op instead of three.")] = False
    kv_type: Annotated[Literal["f32", "f16", "q8_0"], typer.Option(help="llama.cpp: type of the KV cache.")] = "f32"
    extra_bufts: Annotated[bool, typer.Option(help="llama.cpp: extra buffer types (repacked weights).")] = False
    llama_lib: Annotated[
        Path | None, typer.Option(help="llama.cpp: the folder of another build's libllama (CUDA, Vulkan, Metal).")
    ] = None

    def options(self) -> "Options":
        """As the reference takes them."""
        from tracediff_reference.protocol import Options

        library = str(self.llama_lib.absolute()) if self.llama_lib else None
        return Options(
            threads=self.threads, n_ctx=self.ctx, n_batch=self.batch, n_ubatch=self.ubatch, gpu_layers=self.gpu_layers,
            flash_attn=self.flash_attn, kv_type=self.kv_type, extra_bufts=self.extra_bufts, library=library,
        )  # fmt: skip


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose last parameters are dataclasses as one that has an option for each of their fields."""
    parameters = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {one.name: one.annotation for one in parameters if is_dataclass(one.annotation)}
    options = [one for one in parameters if one.name not in groups] + [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for group in groups.values()
        for field in fields(group)
    ]

    @functools.wraps(command)
    def with_options(**arguments: Any) -> int:
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        return command(**arguments)

    with_options.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in options}
    return with_options


def refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raises TracediffError for the first of these options that was given: nothing would come of it, `why` says."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise TracediffError(f"--{name.replace('_', '-')} {why}")


def policy_of(
    tolerance: list[str] | None = None,
    allow: list[str] | None = None,
    require: list[str] | None = None,
    resolve: float | None = None,
) -> "Policy":
    """What these options ask for; raises TracediffError for what is no NMSE."""
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
    if resolve is not None and not resolve > 0:
        raise TracediffError(f"--resolve {resolve:g}: give an NMSE above 0, such as 1e-6.")
    return Policy(tolerances, tuple(allow or ()), tuple(require or ()), resolve)
