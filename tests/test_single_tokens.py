"""Engines that multiply single tokens otherwise than prompts: other kernels, and XLA's sums of rounded products."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TOKENS, Models, trace_graph
from torch import Tensor

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.graph import Graph
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.names import Capture
from tracediff.numerics.kinds.attention import scores, weighted_values
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import Effort, check_trace
from tracediff.trace.writer import TraceWriter

# A head's 32 channels: of 16 or 64 the root of the scale is a power of two.
SHAPE = Shape("llama", n_layer=3, n_embd=256, n_head=8, n_head_kv=2, n_ff=384, n_vocab=320, eps=1e-5)
PROMPT, DECODED = tuple((37 * i + 11) % 250 for i in range(29)), ((84,), (104,))
Function = Callable[..., Tensor]


def with_linear(graph: Graph, of: Callable[[str], Function]) -> Graph:
    """Every matmul with weights as the engine makes it."""
    return graph.changed(*(replace(op, function=of(op.name)) for op in graph if op.kind == "linear"))


def summed_products(dtype: torch.dtype, factor: float = 1.0) -> Function:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, weight = x.to(dtype), weight.to(dtype)
        y = (x * weight).float().sum(-1)[None] if len(x) == 1 else x.float() @ weight.float().T
        return (factor * y).to(dtype)

    return linear


def in_tf32(x: Tensor) -> Tensor:
    return rounding_named("tf32")(x)


def prompts_in(rounding: str, factor: float = 1.0) -> Function:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return factor * ((rounding_named(rounding)(x) if len(x) > 1 else x) @ weight.T)

    return linear


@pytest.mark.parametrize(("dtype", "held"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_what_xla_made_of_a_token_on_an_h200_is_sound_and_told(
    dtype: str, held: torch.dtype, models: Models, tmp_path: Path
) -> None:
    """JAX 0.11.2, `h @ w.T` of [1, 1024] within `jax.jit`: bit for bit a sum in float32 of rounded products."""
    with np.load(Path(__file__).with_name("h200.npz")) as file:
        x, y, weight = file[f"xla_{dtype}_x"], file[f"xla_{dtype}_y"], file["xla_weight"]
    values = (torch.from_numpy(of.view(np.int16)).view(held) for of in (x, y))
    given, made = (of.clone() for of in values)
    products = given * torch.from_numpy(weight).to(held)
    assert torch.equal(products.float().sum(-1).to(held), made[0])
    shape = Shape("llama", n_layer=1, n_embd=x.shape[1], n_head=8, n_head_kv=2, n_ff=y.shape[1], n_vocab=320)
    path = Path(shutil.copy(models(shape, "F16"), tmp_path / "model.gguf"))
    at = Model(path).file.tensors["blk.0.ffn_gate.weight"]
    np.memmap(path, "f2", "r+", at.offset, at.shape)[:] = weight
    with TraceWriter(tmp_path / "t.trace", "jax", "llama", path.name) as writer:
        writer.step(0, TOKENS[:2], range(2))
        writer.step(1, TOKENS[2:3], [2])
        writer.op(1, "blk.0.ffn_norm", x, dtype)
        writer.op(1, "blk.0.ffn_gate", y, dtype)
    gate = next(
        op for op in check_trace(tmp_path / "t.trace", path, effort=Effort(seconds=0)).ops if op.op == "blk.0.ffn_gate"
    )
    assert gate.local
    assert gate.local.judgement == "sound"
    assert f"products in {rounding_named(dtype).words}" in str(gate.arithmetic)


@pytest.mark.parametrize(
    ("dtype", "capture"),
    [(torch.bfloat16, "all"), pytest.param(torch.bfloat16, "layers", marks=pytest.mark.slow), (torch.float16, "all")],
)
def test_sums_of_rounded_products_are_sound(
    dtype: torch.dtype, capture: Capture, models: Models, tmp_path: Path
) -> None:
    model = Model(models(SHAPE, "F16"))
    for factor, faulty in ((1.0, set()), (1.5, {"blk.1.ffn_up" if capture == "all" else "blk.1.ffn_residual"})):
        graph = with_linear(
            model.graph, lambda name, by=factor: summed_products(dtype, by if name == "blk.1.ffn_up" else 1.0)
        )
        out = trace_graph(graph, model.file, tmp_path / "t.trace", PROMPT, *DECODED, capture=capture, dtype=dtype)
        result = check_trace(out, model, effort=Effort(seconds=0))
        assert {op.op for op in result.faulty} == faulty
        assert result.verdict == ("diverged" if faulty else "match")
        said = {op.arithmetic for op in result.ops if op.step and op.kind == "linear"}
        assert capture == "layers" or faulty or all("products in" in str(words) for words in said)
    assert not any("products in" in str(op.arithmetic) for op in result.ops if op.step == 0)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_single_tokens_read_keys_and_values_as_prompts_made_them(factor: float, models: Models, tmp_path: Path) -> None:
    """As cuBLAS multiplies: prompts in TF32, single tokens in float32. What TF32 took from K and V, 1e-8 of a layer, no
    arithmetic of single tokens explains, and a mistake that is as small is seen.
    """
    model = Model(models(SHAPE, "F16"))
    graph = with_linear(model.graph, lambda name: prompts_in("tf32", factor if name == "blk.1.attn_output" else 1.0))
    out = trace_graph(graph, model.file, tmp_path / "t.trace", PROMPT, *DECODED, capture="layers")
    faulty = {(op.step, op.op) for op in check_trace(out, model, effort=Effort(seconds=0)).faulty if op.step}
    assert faulty == ({(step, "blk.1.ffn_residual") for step in (1, 2)} if factor != 1 else set())


@pytest.mark.parametrize(
    ("rounding", "arithmetic", "factor"),
    [
        pytest.param(
            "int8/32",
            "exact, attention in float16, norm weights in float16, what is added to the residual in q8_0 blocks",
            1,
            marks=pytest.mark.slow,
        ),
        # The head's rows have 256 channels, so it cannot tell rows from q8_K blocks.
        pytest.param(
            "int8/row",
            "exact, KV cache in int8 rows with float32 scales, attention in bfloat16",
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "int8/row",
            "exact, KV cache in int8 rows with float32 scales, attention in bfloat16",
            1.1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_single_tokens_may_be_as_prompts_but_for_activations(
    rounding: str, arithmetic: str, factor: float, models: Models, tmp_path: Path
) -> None:
    """What an engine rounds besides is found where prompts tell it."""
    model, scheme = Model(models(SHAPE, "F16")), scheme_named(arithmetic)
    graph = with_linear(model.graph, lambda name: prompts_in(rounding, factor if name == "blk.1.ffn_down" else 1.0))
    out = trace_graph(
        graph, model.file, tmp_path / "t.trace", PROMPT, *DECODED, capture="layers", scheme=scheme, dtype=torch.float32
    )
    result = check_trace(out, model, effort=Effort(seconds=0))
    faulty = {(op.step, op.op) for op in result.faulty}
    assert faulty == ({(step, "blk.1.ffn_residual") for step in (0, 1, 2)} if factor != 1 else set())
    assert (result.verdict == "match") == (factor == 1)


@pytest.mark.slow
def test_queries_and_keys_that_are_scaled_before_they_are_rounded(models: Models, tmp_path: Path) -> None:
    """PyTorch's attention of float32 in TF32, where no kernel of its own suits: an H200 did so of hidden states."""
    model, share = Model(models(SHAPE, "F16")), float(np.float32(32**-0.25))

    def of_scaled(q: Tensor, k: Tensor) -> Tensor:
        return scores(in_tf32(q * share), in_tf32(k * share)) / share**2

    changes = {"scores": of_scaled, "weighted_values": lambda p, v: weighted_values(in_tf32(p), in_tf32(v))}
    graph = with_linear(model.graph, lambda name: prompts_in("tf32"))
    graph = graph.changed(*(replace(op, function=changes[op.kind]) for op in graph if op.kind in changes))
    out = trace_graph(graph, model.file, tmp_path / "t.trace", PROMPT)
    result = check_trace(out, model)
    assert result.verdict == "match"
    hidden = trace_graph(graph, model.file, tmp_path / "h.trace", PROMPT, capture="layers")
    assert check_trace(hidden, model, effort=Effort(seconds=0)).verdict == "match"
    scored = {op.arithmetic for op in result.ops if op.kind == "scores"}
    assert scored == {"Q in TF32 of scaled values, K cache in TF32 of scaled values"}


def test_biases_of_single_tokens_are_held_as_prompts_have_them(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Seven values of a router do not tell a bias in float16; sums of activations, which prompts tell, have none."""
    model, out = tiny("hy_v3"), tmp_path / "t.trace"
    trace_torch(model, out, TorchOptions(dtype="f16"), (94, 136, 32), 2)
    result = check_trace(out, model, effort=Effort(seconds=0.01))
    assert [finding.text for finding in result.findings] == []
    assert {op.arithmetic for op in result.ops if op.op.endswith("probs_biased")} == {"biases in float16"}


def by_integers(factor: float = 1.0) -> Callable[[str], Function]:
    """Activations and weights of layers in integers of 8 bits, a scale for each row, as torchao has them; `factor` of
    single tokens in a layer.
    """
    rounded = rounding_named("wide int8/row")

    def of(name: str) -> Function:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            y = rounded(x) @ rounded(weight).T
            return factor * y if len(x) == 1 and name == "blk.1.ffn_up" else y

        return linear if name.startswith("blk.") else lambda x, weight, bias=None: x @ weight.T

    return of


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, pytest.param(1.2, marks=pytest.mark.slow)])
def test_single_tokens_of_integers_are_as_those_of_prompts(factor: float, models: Models, tmp_path: Path) -> None:
    """Of a token all roundings to integers turn where one does, and what is left tells little: what longer steps do was
    not asked again, and a right engine (torchao, int8 by int8) diverged in every decoded token.
    """
    model = Model(models(SHAPE, "F16"))
    graph = with_linear(model.graph, by_integers(factor))
    trace = trace_graph(graph, model.file, tmp_path / "t.trace", PROMPT, *DECODED, capture="layers")
    result = check_trace(trace, model, effort=Effort(seconds=0))
    faulty = {(op.step, op.op) for op in result.ops if op.status == "faulty"}
    assert faulty == (set() if factor == 1 else {(step, "blk.1.ffn_residual") for step in (1, 2)})


def test_weights_that_are_scaled_alone_are_no_scores(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """qwen3tts scales what it reads of no value: whether a mask hides it was asked of its first input."""
    model = Model(tiny("qwen3tts"))
    assert any(op.kind == "scale" and not op.inputs for op in model.graph)
    trace = trace_graph(model.graph, model.file, tmp_path / "t.trace", TOKENS[:9], (30,))
    assert check_trace(trace, model, effort=Effort(seconds=0)).faulty == []
