"""Weights in float8 with a scale for each 128 x 128 of them, activations with one for each 128 of a token: the format
of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 3.3.2), which other checkpoints have as well.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from conftest import Models, trace_graph
from torch import Tensor

from tracediff.diagnose.solve.loops import bound
from tracediff.model import weights as of_weights
from tracediff.model.graph import Weight
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.names import Capture
from tracediff.numerics.kinds.matmul import rounding_of
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import Effort, check_trace

# K and V have 64 rows: less than a block is high.
SHAPE = Shape("qwen2", n_layer=3, n_embd=256, n_head=4, n_head_kv=1, n_ff=640, n_vocab=320)
PROMPT = tuple((37 * i + 11) % 250 for i in range(29))
SAID = (
    "activations in fp8 groups of 128 with float32 scales, weights in fp8 blocks of 128 x 128 with float32 scales, "
    "sums on fp8 tensor cores"
)


def in_float8(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Values of `rows` x 128 blocks in float8, and the scale of each, for every row."""
    kept, scales = torch.zeros(x.shape), torch.zeros(len(x), x.shape[1] // 128)
    for row in range(0, len(x), rows):
        for column in range(0, x.shape[1], 128):
            block = x[row : row + rows, column : column + 128].float()
            scale = block.abs().max() / 448
            kept[row : row + rows, column : column + 128] = (block / scale).to(torch.float8_e4m3fn).float()
            scales[row : row + rows, column // 128] = scale
    return kept, scales


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Block by block of the columns, as their kernel adds the products up."""
    (a, of_tokens), (b, of_rows) = in_float8(x, 1), in_float8(weight, 128)
    y = torch.zeros(len(x), len(weight))
    for i in range(of_tokens.shape[1]):
        at = slice(128 * i, 128 * i + 128)
        y += (a[:, at] @ b[:, at].T) * of_tokens[:, i, None] * of_rows[:, i]
    return y if bias is None else y + bias


def traced(
    model: Model, out: Path, capture: Capture = "all", factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> Path:
    """What an engine recorded that leaves the embedding and the head as they are, and what is no matmul in `dtype`."""
    graph = model.graph
    for op in graph:
        if op.kind == "linear" and op.name != "output":
            graph = graph.changed(replace(op, function=lambda *given: linear(*given).to(dtype)))
    wrong = graph["blk.1.ffn_up"]
    graph = graph.changed(replace(wrong, function=lambda *given: (factor * linear(*given)).to(dtype)))
    return trace_graph(graph, model.file, out, PROMPT, PROMPT[:1], capture=capture, dtype=dtype)


@pytest.mark.parametrize("shape", [(384, 256), (320, 128), (64, 384)])
def test_a_block_shares_one_scale(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, shape[0])[:, None]
    kept, scales = in_float8(x, 128)
    expected = kept * scales.repeat_interleave(128, 1)
    hold = rounding_named("fp8/128x128")
    assert torch.equal(hold(x), expected)
    assert torch.equal(torch.cat([hold(part) for part in x.split(hold.n_rows)]), expected)
    assert not torch.equal(rounding_named("fp8/128")(x), expected)


def test_a_vector_is_one_row() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(2))
    assert torch.equal(rounding_named("fp8/128x128")(x), rounding_named("fp8/128")(x))


@pytest.mark.parametrize("rounding", ["int8/64x32", "uint4/2x64", "full int4/16x32", "nf4/3x64"])
def test_other_blocks_are_as_high_as_they_say(rounding: str) -> None:
    """What rows of the same values make by themselves."""
    of, size = rounding.split("/")
    high, wide = map(int, size.split("x"))
    x = torch.randn(5, 2 * wide, generator=torch.Generator().manual_seed(1)).repeat_interleave(high, 0)
    assert torch.equal(rounding_named(rounding)(x), rounding_named(f"{of}/{wide}")(x))


@pytest.mark.slow
@pytest.mark.parametrize(("capture", "factor"), [("all", 1.04), ("layers", 2.0)])
def test_an_engine_in_float8_blocks_is_right(capture: Capture, factor: float, models: Models, tmp_path: Path) -> None:
    model = Model(models(SHAPE, "F16"))
    right = check_trace(traced(model, tmp_path / "right.trace", capture), model)
    assert right.verdict == "match"
    said = {op.arithmetic for op in right.ops}
    assert SAID in said
    wrong = check_trace(traced(model, tmp_path / "wrong.trace", capture, factor), model)
    assert {op.op for op in wrong.faulty} == {"blk.1.ffn_up" if capture == "all" else "blk.1.ffn_residual"}
    assert capture == "layers" or "1.04" in wrong.findings[0].text


@pytest.mark.slow
def test_replay_goes_a_part_of_the_way_with_an_engine_in_half_precision(models: Models, tmp_path: Path) -> None:
    """What bfloat16 rounds between turns the largest of a row's values, so the row's scale and all of the row: from
    hidden states alone the right arithmetic leaves as much of a layer as a wrong one, and every layer diverged.
    """
    model = Model(models(SHAPE, "F16"))
    trace = traced(model, tmp_path / "t.trace", "layers", 1.5, torch.bfloat16)
    result = check_trace(trace, model, effort=Effort(seconds=0))
    assert {op.op for op in result.faulty} == {"blk.1.ffn_residual"}
    layers = [op.local.arithmetic for op in result.ops if op.local and op.op.endswith("ffn_residual")]
    assert len(layers) == 6
    assert all("weights in fp8 blocks of 128 x 128" in said for said in layers)


def test_it_can_be_asked_for_and_leaves_the_embedding(models: Models, tmp_path: Path) -> None:
    model, asked = Model(models(SHAPE, "F16")), "activations in fp8/128 and matrices in fp8/128x128"
    scheme = scheme_named(asked)
    assert (scheme.of("linear").stored, scheme.of("embedding").stored) == ("fp8/128x128", "f64")
    assert scheme_named("activations in fp8/128 and matrices in bf16 fp8/128x128").of("embedding").stored == "bf16"
    result = check_trace(traced(model, tmp_path / "t.trace"), model, arithmetic=asked, effort=Effort(seconds=0))
    assert {op.op for op in result.faulty} == {"output"}  # which the engine leaves as it is
    assert rounding_named("fp8/128x128").words == "fp8 blocks of 128 x 128 with float32 scales"


def test_what_has_no_such_blocks_is_left_as_it_is(models: Models) -> None:
    """A mistaken op may read a bias in a matrix' place: it ended the search for causes."""
    model = Model(models(SHAPE, "F16"))
    weights = model.weights(torch.float32)
    matrix, bias = model.graph["blk.0.attn_k"].weights
    assert rounding_of("fp8/128x128", matrix, weights).name == "fp8/128x128"
    assert rounding_of("fp8/128x128", bias, weights).name == "f64"
    assert rounding_of("int8/32", bias, weights).name == "f64"
    assert rounding_of("int8/96", matrix, weights).name == "f64"
    assert rounding_of("bf16", bias, weights).name == "bf16"


def test_matrices_are_cut_between_blocks(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(models(SHAPE, "F16"))
    monkeypatch.setattr(of_weights, "_SLICE", 200 * 256)  # rows of 256
    weight, weights = model.graph["blk.0.ffn_gate"].weights[0], model.weights(torch.float32)
    assert [len(rows) for rows in weights.slices(weight)] == [200, 200, 200, 40]
    assert [len(rows) for rows in weights.slices(weight, 128)] == [128] * 5
    monkeypatch.setattr(of_weights, "_SLICE", 100 * 256)
    assert [len(rows) for rows in weights.slices(weight, 256)] == [256, 256, 128]


def test_loops_read_rows_as_their_block_holds_them(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, hold = Model(models(SHAPE, "F16")), rounding_named("fp8/128x128")
    weight, weights = model.graph["blk.0.ffn_gate"].weights[0], model.weights(torch.float32)
    assert isinstance(weight, Weight)
    monkeypatch.setattr(bound, "_ROWS", 0)
    at = np.array([3 * 256 + 7, 131 * 256, 600 * 256 + 255])
    taken = bound.FlatWeight(weight, weights, hold).take(at)
    assert np.array_equal(taken, hold(weights.load(weight)).numpy().ravel()[at])


def test_loops_read_rows_of_experts_below_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large ones: their ids were held to be those of experts, which ended the check."""
    model, hold = Model(tiny_models.write("qwen3moe", tmp_path / "a.gguf")), rounding_named("f64")
    weight, weights = model.graph["blk.1.ffn_up_exps"].weights[0], model.weights(torch.float32)
    n_experts, n_rows, width = weight.shape
    whole = weights.load(weight).numpy().ravel()
    monkeypatch.setattr(bound, "_ROWS", 0)
    last = (n_experts - 1) * n_rows * width
    for at in (np.array([7, last + 3 * width + 1, last - width]), np.arange(last + 5, last + 2 * width)):
        assert np.array_equal(bound.FlatWeight(weight, weights, hold).take(at), whole[at])
