"""The torch engine against llama.cpp: the same ops, of the same shapes, with the same values.

Measured, float32 weights, 3 layers, 17 tokens and 2 decode steps: the worst NMSE of any op is 6e-12.
"""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import TOKENS, Models

from tracediff.model.families import load_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Op
from tracediff.model.synthetic import Shape
from tracediff.model.weights import Weights
from tracediff.numerics.evaluate import evaluate
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import compare_traces
from tracediff.result import OpResult
from tracediff.trace.reader import Trace

AGREE = 1e-10
Tracer = Callable[..., Path]

_YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}


def _scaling(**values: object) -> dict[str, object]:
    return {f"rope.scaling.{key}": value for key, value in values.items()}


SHAPES = {
    "llama": Shape("llama", theta=10_000.0, eps=1e-5),
    "llama, tied": Shape("llama", tied=True, eps=1e-5),
    "llama, a K and V per head": Shape("llama", n_head=3, n_head_kv=3),
    "llama, odd head counts": Shape("llama", n_embd=120, n_head=15, n_head_kv=5, n_ff=88),
    "llama, attention biases": Shape("llama", bias=True),
    "llama, attention.scale": Shape("llama", extra={"attention.scale": 0.1}),  # a key that llama.cpp reads for others
    "llama3": Shape("llama", rope_factors=True, theta=500_000.0),
    "qwen2": Shape("qwen2"),
    "qwen2, tied": Shape("qwen2", tied=True),
    "qwen2, odd head counts": Shape("qwen2", n_embd=72, n_head=9, n_head_kv=3, n_ff=104),
    "qwen3": Shape("qwen3", n_embd=80, n_head=5, n_head_kv=1, head_dim=24),
    "qwen3, tied": Shape("qwen3", tied=True, head_dim=32),
    "rope none": Shape("llama", extra=_scaling(type="none", factor=4.0)),
    "rope linear": Shape("llama", extra=_scaling(type="linear", factor=4.0)),
    "rope linear, attn_factor": Shape("qwen2", extra=_scaling(type="linear", factor=4.0, attn_factor=1.3)),
    "rope yarn": Shape("llama", head_dim=32, n_head=3, n_head_kv=1, extra=_scaling(**_YARN)),
    "rope yarn, attn_factor": Shape("qwen2", theta=10_000.0, extra=_scaling(**_YARN, attn_factor=1.3)),
    "rope yarn, qwen3": Shape("qwen3", head_dim=64, theta=10_000.0, extra=_scaling(**_YARN)),
}

LAYER = """
token_embd           T 96
blk.0.attn_norm      T 96
blk.0.attn_q         T 6 16
blk.0.attn_k         T 2 16
blk.0.attn_v         T 2 16
blk.0.attn_q_rope    T 6 16
blk.0.attn_k_rope    T 2 16
blk.0.attn_scores    6 T S
blk.0.attn_probs     6 T S
blk.0.attn_kqv       T 96
blk.0.attn_output    T 96
blk.0.attn_residual  T 96
blk.0.ffn_norm       T 96
blk.0.ffn_gate       T 160
blk.0.ffn_up         T 160
blk.0.ffn_act        T 160
blk.0.ffn_down       T 96
blk.0.ffn_residual   T 96
output_norm          T 96
output               T 320
"""
QWEN3_LAYER = """
token_embd           T 80
blk.0.attn_norm      T 80
blk.0.attn_q         T 5 24
blk.0.attn_k         T 1 24
blk.0.attn_v         T 1 24
blk.0.attn_q_norm    T 5 24
blk.0.attn_k_norm    T 1 24
blk.0.attn_q_rope    T 5 24
blk.0.attn_k_rope    T 1 24
blk.0.attn_scores    5 T S
blk.0.attn_probs     5 T S
blk.0.attn_kqv       T 120
blk.0.attn_output    T 80
blk.0.attn_residual  T 80
blk.0.ffn_norm       T 80
blk.0.ffn_gate       T 160
blk.0.ffn_up         T 160
blk.0.ffn_act        T 160
blk.0.ffn_down       T 80
blk.0.ffn_residual   T 80
output_norm          T 80
output               T 320
"""
ONE_LAYER = {
    "llama": (Shape("llama", n_layer=1), LAYER),
    "llama3": (Shape("llama", n_layer=1, rope_factors=True), LAYER),
    "qwen2": (Shape("qwen2", n_layer=1, tied=True), LAYER),
    "qwen3": (Shape("qwen3", n_layer=1, n_embd=80, n_head=5, n_head_kv=1, head_dim=24), QWEN3_LAYER),
}


@pytest.mark.parametrize("family", ONE_LAYER)
def test_ops_of_one_layer(family: str, models: Models, llama_cpp_trace: Tracer, torch_trace: Tracer) -> None:
    shape, expected = ONE_LAYER[family]
    model = models(shape)
    reference = Trace(llama_cpp_trace(model, TOKENS[:3], n_decode=1, threads=1))
    ours = Trace(torch_trace(model, reference.path))
    for step, (t, s) in enumerate(((3, 3), (1, 4))):
        sizes = {"T": t, "S": s}
        table = [line.split() for line in expected.split("\n") if line]
        listed = [(name, tuple(sizes.get(axis) or int(axis) for axis in axes)) for name, *axes in table]
        assert [(record.op, record.shape) for record in ours.step_ops(step)] == listed
        # llama.cpp's order is its own: a rope follows its projection at once.
        assert sorted((record.op, record.shape) for record in reference.step_ops(step)) == sorted(listed)


@pytest.mark.parametrize("name", SHAPES)
def test_every_op_agrees(name: str, models: Models, llama_cpp_trace: Tracer, torch_trace: Tracer) -> None:
    model = models(SHAPES[name])
    reference = llama_cpp_trace(model, threads=1)
    _assert_agree(reference, torch_trace(model, reference))


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(0, 5), (0, 1), (7, 3), (16, 16), (1, 1)])
def test_batches_do_not_matter(
    n_batch: int, n_ubatch: int, models: Models, llama_cpp_trace: Tracer, torch_trace: Tracer
) -> None:
    model = models(SHAPES["qwen3"])
    reference = llama_cpp_trace(model, n_batch=n_batch, n_ubatch=n_ubatch, threads=1)
    assert list(Trace(reference).steps) == [0, 1, 2]
    _assert_agree(reference, torch_trace(model, reference))


@pytest.mark.parametrize(
    "fault",
    [
        "rope_pairing@2",
        "gqa_heads@0",
        "attention_scale@1",
        "wrong_layer@blk.1.attn_v",
        "mask_shifted@0",
        "rope_decode_shifted@0",
    ],
)
def test_a_fault_is_no_agreement(fault: str, models: Models, llama_cpp_trace: Tracer, torch_trace: Tracer) -> None:
    model = models(SHAPES["qwen2"])
    reference = llama_cpp_trace(model, threads=1)
    with pytest.raises(AssertionError, match="drifts"):
        _assert_agree(reference, torch_trace(model, reference, faults=(fault,)))


# K-quants need rows of a multiple of 256.
LLAMA_256 = Shape("llama", n_embd=256, n_head=8, n_head_kv=2, n_ff=512, n_layer=2, theta=10_000.0)
QWEN3_256 = Shape("qwen3", n_embd=256, n_head=5, n_head_kv=1, n_ff=512, n_layer=2, head_dim=64)


@pytest.mark.parametrize(
    ("shape", "weights"),
    [
        *((SHAPES["qwen2"], weights) for weights in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")),
        (SHAPES["qwen2"], "Q4_K_M"),  # rows of 96: Q5_0 and Q8_0 stand in for K-quants
        *((LLAMA_256, weights) for weights in ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS")),
        (QWEN3_256, "Q4_K_M"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.arch,
)
def test_rounded_weights_agree_until_a_value_flips(
    shape: Shape, weights: str, models: Models, llama_cpp_trace: Tracer, torch_trace: Tracer
) -> None:
    """Torch that rounds as llama.cpp does agrees as in float32, until a value at a rounding boundary flips.

    Inputs of a matmul differ by 1e-7 of their size between the engines, so that of 100,000 values that are rounded
    to 8 bits a few come out one unit apart: 1e-8 of NMSE there, and by the last layer up to 1e-3. So: the first op
    that drifts is a matmul, and it drifts by what those values make of it, no more. Of 64 models of 3 to 8 layers
    23 had no flip at all; their worst NMSE was 3e-12.
    """
    model = models(shape, weights)
    reference = llama_cpp_trace(model, threads=1)
    candidate = torch_trace(model, reference, arithmetic="llama.cpp")
    graph = load_graph(model)
    order = list(graph.ops)
    drifting = [op for op in _drifts(reference, candidate) if op.drift.nmse > AGREE]
    if not drifting:
        return
    first = min(drifting, key=lambda op: (op.step, order.index(op.op)))
    assert first.kind == "linear", f"{first.op} drifts first, by {first.drift.nmse:.1e}, and rounds nothing"
    weights_ = Weights(GGUFFile(model))
    left = _unexplained(graph[first.op], first.step, Trace(reference), Trace(candidate), weights_)
    assert left < 1e-3 * first.drift.nmse, f"{first.op} drifts by {first.drift.nmse:.1e}, {left:.1e} of it unexplained"


def _unexplained(op: Op, step: int, reference: Trace, candidate: Trace, weights: Weights) -> float:
    """NMSE of the candidate, less what the inputs of the two engines, rounded apart, explain."""
    arithmetic = scheme_named("llama.cpp").of(op.kind, weights.type_of(op.weights[0]))
    error: torch.Tensor | float = 0.0
    signal: torch.Tensor | float = 0.0
    for sign, trace in ((1.0, candidate), (-1.0, reference)):
        x, y = (torch.from_numpy(trace.values(trace.ops[step, name]).astype(float)) for name in (op.inputs[0], op.name))
        error = error + sign * (y - evaluate(op, [x], weights, arithmetic))
        signal = y
    return float(torch.square(error).sum() / torch.square(signal).sum())


def _assert_agree(reference: Path, candidate: Path) -> None:
    drifts = _drifts(reference, candidate)
    worst = max(drifts, key=lambda op: op.drift.nmse)
    assert worst.drift.nmse < AGREE, f"{worst.op} drifts by {worst.drift.nmse:.1e} in step {worst.step}"
    r, c = Trace(reference), Trace(candidate)
    assert {key: record.shape for key, record in r.ops.items()} == {key: record.shape for key, record in c.ops.items()}


def _drifts(reference: Path, candidate: Path) -> list[OpResult]:
    """Every op with its drift: none may be unmatched."""
    ops = compare_traces(reference, candidate).ops
    assert ops
    assert [op.op for op in ops if op.drift is None] == []
    return list(ops)


def test_another_build_of_llama_cpp(models: Models, cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """Here a copy of the installed one; the folder stands in the trace, for its figures are that build's."""
    package = find_spec("llama_cpp")
    assert package
    assert package.origin
    other = shutil.copytree(Path(package.origin).parent / "lib", tmp_path / "other")
    arguments = ("trace", models("tiny"), "--engine", "llama.cpp", "--tokens", "1,2,3", "-o", tmp_path / "a.trace")
    assert cli(*arguments, "--llama-lib", other)[0] == 0
    assert Trace(tmp_path / "a.trace").header.engine.endswith(f"with the libraries in {other})")
    for library in other.glob("libllama.*"):
        library.write_bytes(b"none")
    code, _, error = cli(*arguments, "--llama-lib", other)
    assert (code, error.startswith("tracediff: llama.cpp cannot be loaded: ")) == (2, True), error
    code, _, error = cli(*arguments, "--llama-lib", tmp_path)
    assert (code, error.partition(": no libllama")[0]) == (2, f"tracediff: --llama-lib {tmp_path}")
    code, _, error = cli("trace", models("tiny"), "--tokens", "1", "--llama-lib", other, "-o", tmp_path / "b.trace")
    assert (code, "--llama-lib is for --engine llama.cpp" in error) == (2, True)


def test_layers_on_a_gpu_that_is_none(models: Models, cli: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """A build for the CPU alone would run on it and say nothing: figures would be taken for the GPU's."""
    import llama_cpp

    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this build of llama.cpp has a GPU back end")
    out, tokens = tmp_path / "a.trace", ("--tokens", "1,2,3")
    arguments = ("trace", models("tiny"), "--engine", "llama.cpp", *tokens, "-o", out)
    assert cli(*arguments, "--gpu-layers", 0)[0] == 0
    for command in (arguments, ("run", models("tiny"), *tokens)):
        code, _, error = cli(*command, "--gpu-layers", 3)
        assert code == 2
        assert "--gpu-layers 3: this build of llama.cpp has no GPU back end. Leave the option out" in error
    code, _, error = cli("trace", models("tiny"), *tokens, "-o", out, "--gpu-layers", 3)
    assert (code, "--gpu-layers is for --engine llama.cpp" in error) == (2, True)
