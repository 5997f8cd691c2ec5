"""What sketches see: known mistakes, and how near the estimate comes to what theory says of it.

    python benchmarks/sketches.py --out docs/sketches.md

A clean trace and one with a mistake in layer 1, both `--capture sketch`, of a model as the demo's, compared without
the model.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pages import write_page

from tracediff.diagnose.mistakes import BANK
from tracediff.diagnose.planting import plant
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import TracediffError
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape, write_model
from tracediff.pipeline import compare_traces
from tracediff.trace.reader import Trace
from tracediff.trace.sketch import LEAST, apart, sketch

TOKENS = [256, *((37 * i + 11) % 250 for i in range(31))]
SHAPE = Shape("qwen2", n_layer=3, n_embd=96, n_head=6, n_head_kv=2, n_ff=256)


def mistakes(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Each mistake that can be planted: its words, the first op that differs by values, by sketches, by statistics."""
    model = Model(write_model(folder / "model.gguf", SHAPE, "Q8_0"))
    clean = {
        capture: trace_torch(model, folder / f"{capture}.trace", TorchOptions(capture=capture), TOKENS, 1)
        for capture in ("all", "sketch", "stats")
    }
    steps = [*Trace(clean["all"]).steps.values()]
    for name, mistake in BANK.items():
        try:
            plant(model.graph, model.file, f"{name}@1")
        except TracediffError:
            continue  # of another architecture, or another type of weights
        first = []
        for capture, reference in clean.items():
            options = TorchOptions(capture=capture, faults=(f"{name}@1",))  # type: ignore[arg-type]
            out = trace_torch(model, folder / "fault.trace", options, steps=steps)
            found = compare_traces(reference, out).first_divergence
            first.append(found.op if found else "not seen")
        yield mistake.text.replace("|", "/"), *first


def estimates() -> Iterator[tuple[str, str, str, str]]:
    """Of errors of several shapes: the estimate over the truth, its spread, and the largest that theory allows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8, 64))
    for what, place in {"everywhere": np.s_[:], "in one row": np.s_[20], "in one head": np.s_[:, 3],
                        "in one row of one head": np.s_[20, 3]}.items():  # fmt: skip
        ratios = []
        for _ in range(400):
            error = np.zeros_like(x)
            error[place] = rng.standard_normal(x[place].shape) * 1e-3  # type: ignore[call-overload]
            y = rng.standard_normal(x.shape)
            found = apart(sketch(y), sketch(y + error), len(y))
            assert found
            ratios.append(found[0] / (np.square(error).sum() / np.square(y).sum()))
        # Of equal ones: the first token's are of one row, those of the others of a dozen.
        whole = 40
        blocks = {"everywhere": whole, "in one row": 8, "in one head": 5, "in one row of one head": 1}[what]
        bound = (2 / (LEAST * blocks) + 2 / (LEAST * whole)) ** 0.5
        yield what, f"{np.mean(ratios):.2f}", f"{np.std(ratios):.2f}", f"{bound:.2f}"


def page(folder: Path) -> str:
    """The page."""
    found = [*mistakes(folder)]
    by = [sum(row[i] != "not seen" for row in found) for i in (1, 2, 3)]
    first = [sum(row[i] == row[1] != "not seen" for row in found) for i in (2, 3)]
    rows = "\n".join(f"| {' | '.join(row)} |" for row in found)
    spread = "\n".join(f"| {' | '.join(row)} |" for row in estimates())
    return f"""# Sketches

Made by `python benchmarks/sketches.py --out docs/sketches.md`. `trace --capture sketch` writes statistics and at most
336 numbers of each op, 1.8 KB in base64, in place of its values: signed sums of its elements, by groups of tokens (the
first by itself) and of heads ([how](../tracediff/trace/sketch.py)). `compare` and `self` estimate from two of them how
far the values are apart; a trace with values is sketched as it is read. For baselines in CI, and runs of thousands of
steps.

## How near the estimate comes

The squared distance is estimated without bias, with a relative variance of at most 2 / m for the m numbers of the
blocks that an error is in, and the signal likewise. 400 random errors each, of [64, 8, 64] values:

| the error is | mean of estimate / truth | its standard deviation | by theory |
|---|---|---|---|
{spread}

An error in one block alone, of {LEAST} numbers, is estimated at a hundredth of its size or less with a probability
of 7e-7 (chi squared of {LEAST} degrees below {LEAST / 100:.2f}): so a match says that none is larger than a hundred
times the tolerance.

## {len(found)} mistakes

In layer 1 of a model of three with Q8_0 weights, by drift alone within the default tolerance of such (NMSE 0.1). Values
show {by[0]}; sketches {by[1]}, of which {first[0]} at the same first op; statistics {by[2]}, of which {first[1]}.

| mistake | values | sketches | statistics |
|---|---|---|---|
{rows}
"""


if __name__ == "__main__":
    sys.exit(write_page(__doc__, page))
