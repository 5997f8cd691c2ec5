"""An engine held against itself in each way that must make no difference: the traces are made and compared here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracediff.engine.torch_run import TorchOptions, passes, trace_torch
from tracediff.errors import EngineError
from tracediff.itself.two_ways import compare_with_itself
from tracediff.judge import USUAL, Policy
from tracediff.model.model import Model
from tracediff.pipeline import NO_LIMIT, Effort, Progress
from tracediff.result import Listing, Result
from tracediff.trace.format import Step

Engine = Callable[[Sequence[Step], Path], None]  # writes a trace of these steps
_FEWEST = 4  # tokens: of fewer there are no chunks and nothing to change


@dataclass(frozen=True, slots=True)
class Way:
    """How the tokens are fed, and what that is held against the prompt in one pass for."""

    name: str
    steps: tuple[Step, ...]
    several: bool = False  # sequences at once


def ways(tokens: Sequence[int]) -> list[Way]:
    """Ways to feed a prompt that must come to the same as one pass. Raises EngineError for one that is too short."""
    if len(tokens) < _FEWEST:
        raise EngineError(f"a prompt of {len(tokens)} tokens: give {_FEWEST} or more, to be cut and changed.")
    n = len(tokens)
    half, third = n // 2, max(1, n // 3)
    other = tokens[::-1][: n - 1]  # another prompt, and a shorter one: in a batch of it something is padded
    ends = [[(token,) for token in tokens[half:]], [(token,) for token in other[half:]]]
    starts = [tokens[:half], other[:half]]
    changed = (*tokens[:-1], next(token for token in (tokens[0], 0, 1) if token != tokens[-1]))
    chunks = [tokens[at : at + third] for at in range(0, n, third)]
    return [
        Way("run twice", (*passes([tokens]),)),
        Way("prefill against decode", (*passes([tokens[:1]], [[(token,) for token in tokens[1:]]]),)),
        Way("whole against chunks", (*passes([chunks[0]], [chunks[1:]]),)),
        Way("causality", (*passes([changed]),)),
        Way("alone against row 0 of a batch", (*passes(starts, ends),), True),
        Way("alone against row 1 of a batch", (*passes(starts[::-1], ends[::-1]),), True),
    ]


def hold(
    engine: Engine,
    given: Sequence[Way],
    tokens: Sequence[int],
    folder: Path,
    *,
    model: Model | None,
    policy: Policy = USUAL,
    effort: Effort = NO_LIMIT,
    progress: Progress = lambda stage, fraction: None,
) -> Iterator[tuple[str, Result]]:
    """The verdict of each way."""
    whole = folder / "whole.trace"
    engine(passes([tokens]), whole)
    for done, way in enumerate(given):
        progress(way.name, done / len(given))
        other = folder / f"{way.name.replace(' ', '-')}.trace"
        engine(way.steps, other)
        yield way.name, compare_with_itself(whole, other, model=model, policy=policy, effort=effort)


def table(results: dict[str, Result]) -> Listing:
    """A line of each way."""
    rows = tuple(
        (name, result.verdict, result.first_divergence.op if result.first_divergence else "-", _largest(result))
        for name, result in results.items()
    )
    return Listing("The engine against itself", ("way", "verdict", "first op", "largest NMSE"), rows)


def _largest(result: Result) -> str:
    drifts = [op.drift.nmse for op in result.ops if op.drift]
    return f"{max(drifts):.2e}" if drifts else "-"


def engine_of(name: str, model: Model, options: TorchOptions) -> tuple[Engine, bool]:
    """One of the engines, and whether it runs several sequences at once."""
    if name == "llama.cpp":
        from tracediff.engine.llama_cpp import LlamaCpp
        from tracediff.model.families import has_family

        def llama_cpp(steps: Sequence[Step], out: Path) -> None:
            LlamaCpp.fed(model, steps, out, capture=options.capture).wait()

        return llama_cpp, has_family(model.file)
    if name == "transformers":
        from tracediff.engine.recorder import DTYPES
        from tracediff.engine.transformers_run import load, trace_model

        loaded, _ = load(model.path, None, DTYPES[options.dtype], options.device)

        def transformers(steps: Sequence[Step], out: Path) -> None:
            trace_model(loaded, model, out, options, (), steps=steps)

        return transformers, True

    def torch(steps: Sequence[Step], out: Path) -> None:
        trace_torch(model, out, options, steps=steps)

    return torch, True
