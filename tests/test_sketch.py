"""Sketches: at most 2 KB of an op, from which it is estimated how far two values are apart."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import TOKENS, Models

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.itself.two_ways import compare_with_itself
from tracediff.pipeline import compare_traces
from tracediff.trace.reader import Trace
from tracediff.trace.sketch import LEAST, apart, sketch


def estimated(x: np.ndarray, y: np.ndarray, axis: int = 0) -> float:
    found = apart(sketch(x, axis), sketch(y, axis), x.shape[axis])
    assert found
    return found[0]


MOVED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a swapped head": lambda x: x[:, [1, 0, *range(2, x.shape[1])]],
    "channels permuted": lambda x: x[..., ::-1],
    "a shift by one token": lambda x: np.roll(x, 1, 0),
    "a wrong row": lambda x: np.concatenate([x[:5], x[4:5], x[6:]]),
}


@pytest.mark.parametrize("what", MOVED)
def test_the_estimate_is_near_the_truth(what: str) -> None:
    x = np.random.default_rng(1).standard_normal((17, 8, 32))
    y = np.ascontiguousarray(MOVED[what](x))
    truth = float(np.square(y - x).sum() / np.square(x).sum())
    assert estimated(x, y) == pytest.approx(truth, rel=6 * (2 / LEAST) ** 0.5)
    assert estimated(x, x) == 0


def test_the_spread_is_that_of_theory() -> None:
    rng = np.random.default_rng(2)
    ratios = []
    for _ in range(200):
        x, error = rng.standard_normal((2, 12, 6, 16))
        ratios.append(estimated(x, x + error) / float(np.square(error).sum() / np.square(x).sum()))
    assert np.mean(ratios) == pytest.approx(1, abs=0.05)
    assert np.std(ratios) < 1.5 * (2 / 252) ** 0.5 * 2**0.5  # of error and signal, 252 numbers each


def test_rows_and_heads_are_on_any_axis_and_short_values_are_sketched() -> None:
    x = np.random.default_rng(3).standard_normal((4, 9, 9))
    assert estimated(x, x[::-1], 1) > 0.5
    for shape in ((1, 3), (2, 1), (1, 1), (7,), (1, 2, 2)):
        one = np.ones(shape)
        assert estimated(one, 2 * one) == pytest.approx(1)


def test_a_sketch_is_of_finite_values_alone() -> None:
    x = np.ones((4, 8))
    x[1, 1] = np.nan
    assert np.isfinite(np.frombuffer(sketch(x), "<f4")).all()


@pytest.fixture
def of(models: Models, tmp_path: Path) -> Callable[..., Path]:
    model = models("tiny")

    def trace(capture: str, *faults: str, like: Path | None = None) -> Path:
        options = TorchOptions(capture=capture, faults=faults)  # type: ignore[arg-type]
        out = tmp_path / f"{capture}{len(faults)}.trace"
        steps = [*Trace(like).steps.values()] if like else ()
        return trace_torch(model, out, options, () if like else TOKENS, 0 if like else 1, steps)

    return trace


def test_sketches_are_compared_with_sketches_and_with_values(of: Callable[..., Path]) -> None:
    clean, whole = of("sketch"), of("all")
    lines = [line for line in clean.read_text().splitlines() if '"op"' in line]
    assert max(map(len, lines)) < 2048
    assert all("sketch" in json.loads(line) for line in lines)
    assert compare_traces(clean, clean).verdict == "match"
    assert compare_traces(whole, clean).verdict == "match"
    swapped = of("sketch", "gqa_heads@1", like=clean)
    for reference in (clean, whole):
        result = compare_traces(reference, swapped)
        assert result.first_divergence
        assert result.first_divergence.op == "blk.1.attn_scores"
    assert compare_with_itself(clean, clean).verdict == "match"
    assert compare_with_itself(clean, swapped).verdict == "diverged"


def test_what_a_match_of_sketches_says_is_wider(of: Callable[..., Path]) -> None:
    clean, whole = of("sketch"), of("all")
    by_sketch, by_value = compare_traces(clean, clean).weakest, compare_traces(whole, whole).weakest
    assert by_sketch
    assert by_value
    assert by_sketch.resolving == 100 * by_value.resolving
