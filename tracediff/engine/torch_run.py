"""One trace by the torch engine: from a GGUF file and tokens to a trace file."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import torch

from tracediff import __version__
from tracediff.engine.recorder import DTYPES, TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.errors import EngineError
from tracediff.model.graph import Graph
from tracediff.model.model import Model
from tracediff.model.weights import Weights, check_device
from tracediff.names import Capture, plain_step
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.evaluate import arithmetic_of, is_covered, rows_fit
from tracediff.numerics.schemes import scheme_named
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
    """Write a trace of the prompt `tokens`, or of the given `steps`, and of `n_decode` greedy steps after it.

    Raises EngineError for a device that is absent or tokens that do not fit, ModelError for the file.
    """
    model = Model.opened(model)
    length = length_of([*steps] or passes([tokens]), n_decode)
    model.show((), length)
    graph, scheme = _prepare(model, options)
    check_length(length, n_decode, graph.hparams.n_ctx)
    weights = model.weights(DTYPES[options.dtype], options.device)
    engine = TorchEngine(graph, weights, scheme, progress)
    name = f"tracediff torch {__version__} ({options.dtype}, {options.device})"
    name += f", with {', '.join(options.faults)} planted" if options.faults else ""
    with _sums_in_float32(), TraceWriter(out, name, graph.hparams.arch, model.path.name, graph.matmul_type) as writer:
        recorder = TensorWriter(writer, options.capture)
        engine.record_weights(recorder)
        for step, given in greedy(engine, tokens, n_decode, steps):
            try:
                engine.run(step, given, recorder)
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"--device {options.device}: out of memory in step {step}: {str(error).partition('.')[0]}. "
                    "Shorten the prompt, or use --device cpu."
                ) from None
    return out


@contextmanager
def _sums_in_float32() -> Iterator[None]:
    """Products in half precision are added up in float32, all of a sum: cuBLAS may cut long ones into parts and add
    these up in half precision, as PyTorch lets it unless told otherwise.
    """
    matmul, before = torch.backends.cuda.matmul, dict[str, Any]()
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        now, cut = getattr(matmul, name), getattr(matmul, f"{name}_split_k", None)
        before[name] = now if cut is None else (now, cut)  # a pair in newer versions
        setattr(matmul, name, False if cut is None else (False, cut))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


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


def passes(prompts: Sequence[Sequence[int]], after: Sequence[Sequence[Sequence[int]]] = ()) -> list[Step]:
    """Steps that feed these prompts side by side, one sequence each; then, of each, the passes `after` it."""
    fed = [[prompt, *(after[i] if after else ())] for i, prompt in enumerate(prompts)]
    at, steps = [0] * len(fed), list[Step]()
    for number, each in enumerate(zip_longest(*fed, fillvalue=())):
        tokens = [token for part in each for token in part]
        positions = [at[i] + p for i, part in enumerate(each) for p in range(len(part))]
        of = [i for i, part in enumerate(each) for _ in part]
        at = [n + len(part) for n, part in zip(at, each, strict=True)]
        several = tuple(of) if len(fed) > 1 else None
        steps.append(Step(number, tuple(tokens), tuple(positions), sequences=several))
    return steps


def inputs(steps: Sequence[Step]) -> Iterator[tuple[int, StepInput]]:
    """These steps, or those of a trace in which each sequence has its own, as they were fed: together."""
    together: dict[int, list[Step]] = {}
    for step in steps:
        together.setdefault(plain_step(step.step), []).append(step)
    batched = any(step.sequence or step.sequences for step in steps)
    for number, alike in sorted(together.items()):
        tokens, positions = ([x for step in alike for x in getattr(step, what)] for what in ("tokens", "positions"))
        of = [sequence for step in alike for sequence in step.sequences or (step.sequence,) * len(step.tokens)]
        yield number, StepInput(tuple(tokens), tuple(positions), tuple(of) if batched else None)


class HasLogits(Protocol):
    """An engine that keeps the logits of its last step, [T, n_vocab]."""

    logits: torch.Tensor


def greedy(
    engine: HasLogits, tokens: Sequence[int], n_decode: int, steps: Sequence[Step] = ()
) -> Iterator[tuple[int, StepInput]]:
    """The prompt, or these steps, then as many of the tokens that the engine itself likes best, one of each sequence.

    Raises EngineError without tokens.
    """
    steps = steps or passes([tokens])
    if not steps[0].tokens:
        raise EngineError("the prompt is empty: no tokens. Give some text with -p or ids with --tokens 1,2,3.")
    number, last = 0, dict[int, tuple[int, int]]()  # of each sequence: the token after its last, and where that will be
    for number, given in inputs(steps):
        yield number, given
        last |= _next(engine, given)
    for step in range(number + 1, number + 1 + n_decode):
        ids, positions = zip(*last.values(), strict=True)
        given = StepInput(ids, positions, tuple(last) if len(last) > 1 else None)
        yield step, given
        last |= _next(engine, given)


def _next(engine: HasLogits, given: StepInput) -> dict[int, tuple[int, int]]:
    ends = {sequence: at.stop - 1 for sequence, at in given.parts().items()}
    return {sequence: (int(engine.logits[end].argmax()), given.positions[end] + 1) for sequence, end in ends.items()}


def length_of(steps: Sequence[Step], n_decode: int) -> int:
    """How many positions of a sequence are fed, at most."""
    return max((position + 1 for step in steps for position in step.positions), default=0) + n_decode


def check_length(length: int, n_decode: int, n_ctx: int) -> None:
    """Raises EngineError for what the model's context does not hold."""
    if length > n_ctx:
        raise EngineError(
            f"the prompt of {length - n_decode} tokens and {n_decode} decode steps do not fit the context of {n_ctx}. "
            "Shorten the prompt."
        )
