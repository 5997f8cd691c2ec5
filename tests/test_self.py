"""One engine against itself: the same tokens in other passes are compared position by position."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Models

from tracediff.compare.measure import record_statistics
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import MismatchError
from tracediff.itself.two_ways import compare_with_itself
from tracediff.trace.format import Step
from tracediff.trace.reader import Trace
from tracediff.trace.reduce import reduce
from tracediff.trace.restep import restep
from tracediff.trace.ways import passes

TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 107, 260)
WAYS = {"prefill": (11,), "decode": (1,) * 11, "chunks": (4, 4, 3), "both": (5, *(1,) * 6)}
Cli = Callable[..., tuple[int, str, str]]


def fed(model: Path, out: Path, way: str, **options: object) -> Path:
    """A trace by the torch engine, in passes of those sizes."""
    steps, at = [], 0
    for number, n in enumerate(WAYS[way]):
        steps.append(Step(number, TOKENS[at : at + n], tuple(range(at, at + n))))
        at += n
    return trace_torch(model, out, TorchOptions(**options), steps=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("a", "b"), [("prefill", "decode"), ("decode", "chunks"), ("chunks", "prefill")])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_honest_ways_agree(a: str, b: str, dtype: str, models: Models, tmp_path: Path) -> None:
    """Sums in another order are no divergence: which op is wrong, replay of both sides says."""
    model = models("qwen3", "F16")
    first, second = (fed(model, tmp_path / f"{way}.trace", way, dtype=dtype) for way in (a, b))
    result = compare_with_itself(first, second, model=model)
    assert (result.verdict, result.faulty) == ("match", [])
    assert [op.op for op in result.ops if op.drift is None] == []


def test_rows_are_those_of_the_other_steps(models: Models, tmp_path: Path) -> None:
    """In float64 nothing but the passes differs, so each value must come out where its position is."""
    model = models("llama", "F32")
    whole, parts = (fed(model, tmp_path / f"{way}.trace", way, dtype="f64") for way in ("prefill", "both"))
    assert restep(Trace(parts), Trace(whole), tmp_path / "again.trace") == []
    again, right = Trace(tmp_path / "again.trace"), Trace(whole)
    assert again.steps == right.steps
    assert [record.op for record in again.step_ops(0)] == [record.op for record in right.step_ops(0)]
    for key, record in right.ops.items():
        expected, got = right.values(record), again.values(again.ops[key])
        if key[1].endswith("attn_scores"):  # what the mask hides a pass of one token has no room for
            expected, got = np.tril(expected), np.tril(got)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert restep(right, Trace(parts), tmp_path / "back.trace") == []
    assert Trace(tmp_path / "back.trace").ops[3, "blk.1.attn_probs"].shape == (6, 1, 8)


def test_how_the_engine_was_set_up_is_kept(models: Models, tmp_path: Path) -> None:
    """Beyond the length of the training rope may have other factors: of a context of 131,072 they are those."""
    path = fed(models("llama", "F32"), tmp_path / "whole.trace", "prefill")
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(first.replace(b'"engine"', b'"context":131072,"engine"') + b"\n" + rest)
    trace = Trace(path)
    restep(trace, trace, tmp_path / "again.trace")
    reduce(trace, tmp_path / "few.trace", {(0, "output")}, record_statistics)
    for name in ("again", "few"):
        assert Trace(tmp_path / f"{name}.trace").header.context == trace.header.context == 131_072


CACHE_MISTAKES = {
    "rope_decode_at_zero@1": ("both", "blk.1.attn_q_rope"),
    "rope_chunk_restarts@0": ("chunks", "blk.0.attn_q_rope"),
    "mask_without_offset@2": ("chunks", "blk.2.attn_probs"),
    "cache_ignored@1": ("both", "blk.1.attn_probs"),
    "cached_k_rotated_again@0": ("both", "blk.0.attn_scores"),
    "cache_zeros@2": ("both", "blk.2.attn_scores"),
}


@pytest.mark.parametrize("fault", CACHE_MISTAKES)
def test_a_mistake_of_the_cache_is_named_and_so_is_the_way_that_has_it(
    fault: str, models: Models, tmp_path: Path
) -> None:  # fmt: skip
    """Whichever of the two is given first; and without the model too, it is the first op that differs."""
    model, (way, op) = models("qwen2", "F32"), CACHE_MISTAKES[fault]
    good, bad = fed(model, tmp_path / "a.trace", "prefill"), fed(model, tmp_path / "b.trace", way, faults=(fault,))
    for pair in ((good, bad), (bad, good)):
        result = compare_with_itself(*pair, model=model)
        assert (result.verdict, result.candidate.path) == ("diverged", str(bad))
        assert {op.op: op.cause and op.cause.name for op in result.faulty} == {op: fault.partition("@")[0]} | (
            {op.replace("_q_", "_k_"): fault.partition("@")[0]} if "rope" in op else {}
        )
        first = compare_with_itself(*pair).first_divergence
        assert first
        assert first.op == op


def test_in_words(models: Models, tmp_path: Path, cli: Cli) -> None:
    model = models("qwen2", "F32")
    a, b = (fed(model, tmp_path / f"{way}.trace", way) for way in ("prefill", "both"))
    code, report, _ = cli("self", a, b, "--model", model)
    assert code == 0
    assert f"{a}: one pass of 11 tokens; {b}: one pass of 5 tokens and 6 of 1, compared" in " ".join(report.split())
    assert [passes(Trace(fed(model, tmp_path / "x.trace", way))) for way in ("decode", "chunks")] == [
        "11 passes of 1 token each", "passes of 4, 4, 3 tokens",
    ]  # fmt: skip


def test_other_tokens_and_statistics_are_refused(models: Models, tmp_path: Path) -> None:
    model = models("qwen2", "F32")
    a = fed(model, tmp_path / "a.trace", "prefill")
    shifted = trace_torch(model, tmp_path / "b.trace", TorchOptions(), TOKENS[1:])
    with pytest.raises(MismatchError, match=r"b\.trace was fed 10 tokens and .*a\.trace 11; at position 0 they differ"):
        compare_with_itself(a, shifted)
    statistics = fed(model, tmp_path / "c.trace", "both", capture="stats")
    with pytest.raises(MismatchError, match="no op of it has data by rows of tokens"):
        compare_with_itself(statistics, a)
