"""One trace by the torch engine: from a GGUF file and tokens to a trace file."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tracediff import __version__
from tracediff.engine.recorder import DTYPES, Recorder
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.errors import EngineError
from tracediff.model.graph import Graph
from tracediff.model.model import Model
from tracediff.model.weights import Weights
from tracediff.names import Capture, plain_step
from tracediff.numerics.arithmetic import Scheme, scheme_named
from tracediff.numerics.evaluate import arithmetic_of, is_covered, rows_fit
from tracediff.trace.format import Step
from tracediff.trace.writer import TraceWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """How the torch engine is to run. `arithmetic` names one of SCHEMES; `faults` are planted in the graph."""

    dtype: str = "f32"
    device: str = "cpu"
    capture: Capture = "all"
    arithmetic: str | None = None
    faults: tuple[str, ...] = ()


def trace_torch(
    model: Path | Model,
    out: Path,
    options: TorchOptions,
    tokens: Sequence[int] = (),
    n_decode: int = 0,
    steps: Sequence[Step] = (),
    progress: Callable[[float], None] = lambda fraction: None,
) -> Path:
    """Write a trace of the prompt `tokens` and `n_decode` greedy steps, or of exactly the given `steps`.

    Raises EngineError for a device that is absent or tokens that do not fit, ModelError for the file.
    """
    model = Model.opened(model)
    graph, scheme = _prepare(model, options)
    check_length(len(tokens), n_decode, graph.hparams.n_ctx)
    weights = model.weights(DTYPES[options.dtype], options.device)
    engine = TorchEngine(graph, weights, scheme, progress)
    name = f"tracediff torch {__version__} ({options.dtype}, {options.device})"
    name += f", with {', '.join(options.faults)} planted" if options.faults else ""
    with TraceWriter(out, name, graph.hparams.arch, model.path.name, graph.matmul_type) as writer:
        recorder = Recorder(writer, options.capture)
        engine.record_weights(recorder)
        for step, given in _given(steps) if steps else greedy(engine, tokens, n_decode):
            try:
                engine.run(step, given, recorder)
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"--device {options.device}: out of memory in step {step}: {str(error).partition('.')[0]}. "
                    "Shorten the prompt, or use --device cpu."
                ) from None
    return out


def check_options(model: Model, options: TorchOptions) -> None:
    """Raises what `trace_torch` would raise for these options, without running the model."""
    _prepare(model, options)


def _prepare(model: Model, options: TorchOptions) -> tuple[Graph, Scheme | None]:
    """The graph with the faults planted, and the arithmetic to run it in."""
    check_device(options.device)
    graph = model.graph
    _check_kinds(graph)
    for fault in options.faults:
        from tracediff.diagnose.planting import plant

        graph = plant(graph, model.file, fault)
    scheme = scheme_named(options.arithmetic) if options.arithmetic else None
    if scheme:
        _check_blocks(graph, scheme, model.weights())
    return graph, scheme


def _check_kinds(graph: Graph) -> None:
    kinds = sorted({op.kind for op in graph if not is_covered(op)})
    if kinds:
        raise EngineError(
            f"torch cannot run this {graph.hparams.arch} model: it has ops of a kind that has no definition here "
            f"({', '.join(kinds)}). Trace it with --engine llama.cpp; `check` judges what does not depend on them."
        )


def _check_blocks(graph: Graph, scheme: Scheme, weights: Weights) -> None:
    for op in graph:
        if not rows_fit(op, arithmetic_of(op, scheme, weights), graph.hparams.head_dim):
            raise EngineError(
                f"--arithmetic {scheme.name!r}: the rows that {op.name} multiplies are no multiples of its blocks in "
                "this model. Name another."
            )


def check_device(device: str) -> None:
    """Raises EngineError for a device that torch cannot use here."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise EngineError(f"--device {device}: not a device of this engine. Use cpu, cuda or cuda:N.")
    if device != "cpu" and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"--device {device}: CUDA devices that this torch sees: {torch.cuda.device_count()}. Use "
            f"--device cpu, or check nvidia-smi and that torch is a CUDA build (this one is {torch.__version__})."
        )


def _given(steps: Sequence[Step]) -> Iterator[tuple[int, StepInput]]:
    """These steps, or those of a trace in which each sequence has its own, as they were fed: together."""
    together: dict[int, list[Step]] = {}
    for step in steps:
        together.setdefault(plain_step(step.step), []).append(step)
    for number, alike in sorted(together.items()):
        tokens, positions = ([x for step in alike for x in getattr(step, what)] for what in ("tokens", "positions"))
        of = [sequence for step in alike for sequence in step.sequences or (step.sequence,) * len(step.tokens)]
        yield number, StepInput(tuple(tokens), tuple(positions), tuple(of) if any(of) else None)


class HasLogits(Protocol):
    """An engine that keeps the logits of its last step, [T, n_vocab]."""

    logits: torch.Tensor


def greedy(engine: HasLogits, tokens: Sequence[int], n_decode: int) -> Iterator[tuple[int, StepInput]]:
    """The prompt, then one step for each token that the engine itself likes best; raises EngineError without tokens."""
    if not tokens:
        raise EngineError("the prompt is empty: no tokens. Give some text with -p or ids with --tokens 1,2,3.")
    yield 0, StepInput(tuple(tokens), tuple(range(len(tokens))))
    for step in range(1, n_decode + 1):
        yield step, StepInput((int(engine.logits[-1].argmax()),), (len(tokens) + step - 1,))


def check_length(n_prompt: int, n_decode: int, n_ctx: int) -> None:
    """Raises EngineError for what the model's context does not hold."""
    if n_prompt + n_decode > n_ctx:
        raise EngineError(
            f"the prompt of {n_prompt} tokens and {n_decode} decode steps do not fit the context of {n_ctx}. "
            "Shorten the prompt."
        )
