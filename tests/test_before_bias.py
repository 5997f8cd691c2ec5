"""PyTorch with a GGUF's float32 biases: a matmul of bfloat16 gives bfloat16, and with the bias it is float32."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Models, trace_graph
from torch import Tensor

from tracediff.errors import EngineError
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.names import Capture
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import Effort, check_trace

SHAPE = Shape("qwen2", n_layer=3, n_embd=128, n_head=4, n_head_kv=2, n_ff=320, n_vocab=320)
PROMPT = tuple((37 * i + 11) % 250 for i in range(29))


def traced(model: Model, out: Path, short: torch.dtype, capture: Capture = "all", factor: float = 1.0) -> Path:
    """With `factor` times the bias of one layer's K."""

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, times: float = 1.0) -> Tensor:
        y = (x.to(short).float() @ weight.to(short).float().T).to(short)
        return y if bias is None else y + times * bias

    graph = model.graph
    for op in graph:
        if op.kind == "linear":
            graph = graph.changed(replace(op, function=matmul))
    graph = graph.changed(graph["blk.1.attn_k"].with_attrs(times=factor))
    return trace_graph(graph, model.file, out, PROMPT, PROMPT[:2], capture=capture)


@pytest.mark.parametrize("weights", [pytest.param("F16", marks=pytest.mark.slow), "Q8_0"])
@pytest.mark.parametrize(
    ("short", "words"),
    [(torch.bfloat16, "bfloat16"), pytest.param(torch.float16, "float16", marks=pytest.mark.slow)],
)
def test_a_product_is_rounded_before_its_bias(
    short: torch.dtype, words: str, weights: str, models: Models, tmp_path: Path
) -> None:
    """Q, K and V were mistaken: float32 values that no rounding of operands or biases explains."""
    model = Model(models(SHAPE, weights))
    right = check_trace(traced(model, tmp_path / "right.trace", short), model)
    assert right.verdict == "match"
    said = {op.op: op.local.arithmetic or "" for op in right.ops if op.local}
    rounded = {op for op, of in said.items() if of.endswith(f"sums before biases in {words}")}
    assert rounded == {f"blk.{layer}.attn_{name}" for layer in range(3) for name in "qkv"}
    wrong = check_trace(traced(model, tmp_path / "wrong.trace", short, factor=2.0), model)
    assert {op.op for op in wrong.faulty} == {"blk.1.attn_k"}
    assert [finding.text for finding in wrong.findings] == ["attn_k in layer 1: blk.1.attn_k.bias is added twice."]


@pytest.mark.slow
@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16], ids=str)
def test_hidden_states_alone_match_as_well(short: torch.dtype, models: Models, tmp_path: Path) -> None:
    model = Model(models(SHAPE, "Q8_0"))
    result = check_trace(traced(model, tmp_path / "t.trace", short, "layers"), model, effort=Effort(seconds=0))
    assert result.verdict == "match"


def test_it_can_be_asked_for() -> None:
    asked = scheme_named("activations and matrices in bfloat16, sums before biases in bfloat16")
    assert asked.of("linear").before_bias == "bf16"
    with pytest.raises(EngineError, match="sums before biases in bfloat16"):
        scheme_named("sums before bias in bfloat16")


def test_a_cache_may_be_in_any_rounding() -> None:
    """As activations and matrices may; what no list has was refused."""
    both, keys = scheme_named("exact, KV cache in int8/row"), scheme_named("exact, K cache in int8/48")
    assert (both.scores.stored, both.values.stored) == ("int8/row", "int8/row")
    assert (keys.scores.stored, keys.values.stored) == ("int8/48", "f64")
    assert scheme_named("exact, V cache in int8 rows with float32 scales").values.stored == "int8/row"
