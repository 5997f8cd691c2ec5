"""Sums as tensor cores make them, simulated: products exact, a few at a time aligned, cut off and added."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TOKENS, Models, trace_graph
from torch import Tensor

from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.numerics.floors import TOGETHER, UNIT, variance_of_truncated_sums
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import Effort, check_trace
from tracediff.trace.writer import TraceWriter

WIDE = Shape("llama", n_layer=1, n_embd=512, n_head=8, n_head_kv=4, n_ff=256, n_vocab=320, eps=1e-5)


def cut_off(x: Tensor, quantum: Tensor) -> Tensor:
    return torch.where(quantum > 0, torch.trunc(x / quantum) * quantum, 0.0)


def unit(x: Tensor, bits: int) -> Tensor:
    """What the last of so many bits of the fraction is worth in the exponent of x."""
    return torch.where(x != 0, torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - bits), 0.0)


def tensor_core(x: Tensor, w: Tensor, together: int, guard: int, bits: int = 23) -> Tensor:
    """x [T, n] times w [m, n] transposed, both of few bits, in float64 that holds every product; sums in so many."""
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for at in range(0, x.shape[1], together):
        terms = torch.cat([x[:, None, at : at + together] * w[None, :, at : at + together], total[..., None]], -1)
        quantum = unit(terms.abs().amax(-1), bits + guard)
        total = cut_off(terms, quantum[..., None]).sum(-1)
        total = cut_off(total, unit(total, bits))
    return total


def linear_on(together: int, guard: int, rounding: str) -> Callable[..., Tensor]:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        short = rounding_named(rounding)
        y = tensor_core(short(x).double(), short(weight).double(), together, guard).to(x.dtype)
        return y if bias is None else y + bias

    return linear


def trace(model: Model, out: Path, function: Callable[..., Tensor], mistake: float = 1.0) -> Path:
    graph = model.graph
    changes = [op for op in graph if op.kind == "linear"]
    for op in changes:
        scale = mistake if op.name == "blk.0.ffn_up" else 1.0
        graph = graph.changed(replace(op, function=scaled(function, scale)))
    engine = TorchEngine(graph, model.weights(torch.float32))
    with TraceWriter(out, "tensor cores", "llama", model.path.name) as writer:
        engine.run(0, StepInput(TOKENS[:5], tuple(range(5))), TensorWriter(writer))
    return out


def scaled(function: Callable[..., Tensor], scale: float) -> Callable[..., Tensor]:
    return lambda *given, **attrs: function(*given, **attrs) * scale


@pytest.mark.parametrize(("together", "guard", "rounding"), [(4, 0, "f16"), (8, 2, "tf32"), (16, 2, "bf16")])
def test_truncated_sums_are_sound_and_a_percent_is_seen(
    together: int, guard: int, rounding: str, models: Models, tmp_path: Path
) -> None:
    model, function = Model(models(WIDE)), linear_on(together, guard, rounding)
    right = check_trace(trace(model, tmp_path / "right.trace", function), model)
    assert right.verdict == "match"
    assert rounding_named(rounding).words in str(right.ops[2].arithmetic)
    wrong = check_trace(trace(model, tmp_path / "wrong.trace", function, 1.01), model)
    assert [op.op for op in wrong.faulty] == ["blk.0.ffn_up"]
    assert "1.01" in wrong.findings[0].text


def positive(model: Path, out: Path, chosen: Callable[[str], bool]) -> Model:
    """The model, in float32, with the chosen tensors' signs taken away."""
    path = Path(shutil.copy(model, out))
    for name, tensor in Model(path).file.tensors.items():
        if chosen(name):
            held = np.memmap(path, "f4", "r+", tensor.offset, tensor.shape)
            held[:] = np.abs(held)
            held.flush()
    return Model(path)


def test_sums_of_one_sign_are_sound(models: Models, tmp_path: Path) -> None:
    """What is cut off adds up where all terms have one sign: rounding to nearest never loses that much."""
    names = "token_embd.weight", *(f"blk.0.attn_{one}.weight" for one in "qkv")
    model = positive(models(WIDE), tmp_path / "positive.gguf", names.__contains__)
    out = trace(model, tmp_path / "right.trace", linear_on(4, 0, "f16"))
    for asked in (None, "activations and weights in float16 on tensor cores"):
        result = check_trace(out, model, arithmetic=asked)
        assert result.verdict == "match"
        assert "sums on tensor cores" in str(next(op for op in result.ops if op.op == "blk.0.attn_q").arithmetic)
    wrong = check_trace(trace(model, tmp_path / "wrong.trace", linear_on(4, 0, "f16"), 1.001), model)
    assert [op.op for op in wrong.faulty] == ["blk.0.ffn_up"]


@pytest.mark.parametrize(("factor", "said"), [(1 + 3e-6, "1.000003"), (1 - 3e-6, "0.999997")])
def test_a_small_mistake_of_a_layer_is_not_excused_by_tensor_cores(
    factor: float, said: str, models: Models, tmp_path: Path
) -> None:
    """What is cut off makes sums smaller, and those of an op in all layers."""
    model = Model(models(replace(WIDE, n_layer=3), "F16"))
    graph = model.graph.changed(
        replace(model.graph["blk.1.ffn_up"], function=scaled(KINDS["linear"].function, factor)),
    )
    out = trace_graph(
        graph, model.file, tmp_path / "t.trace", TOKENS[:9], TOKENS[9:10], scheme=scheme_named("llama.cpp")
    )
    result = check_trace(out, model)
    assert sorted({op.op for op in result.faulty}) == ["blk.1.ffn_up"]
    assert said in result.findings[0].text


@pytest.mark.parametrize(("words", "n_tokens"), [("TF32", 1), ("float16", 3)])
def test_tf32_is_told_from_float16_by_what_single_tokens_do(
    words: str, n_tokens: int, models: Models, tmp_path: Path
) -> None:
    """cuBLAS multiplies these in float32; nothing else tells, where weights are in float16."""
    model, graph = Model(models(WIDE, "F16")), Model(models(WIDE, "F16")).graph

    def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return (rounding_named("tf32")(x) if len(x) > 1 else x) @ w.T

    graph = graph.changed(*(replace(op, function=matmul) for op in graph if op.kind == "linear"))
    out = trace_graph(graph, model.file, tmp_path / "t.trace", TOKENS[:9], TOKENS[9 : 9 + n_tokens])
    result = check_trace(out, model)
    assert result.verdict == "match"
    assert f"activations in {words}" in {op.arithmetic for op in result.ops if op.kind == "linear"}


def test_fp8_keeps_three_bits_of_a_scaled_block() -> None:
    torch.manual_seed(0)
    x, fp8 = torch.randn(4, 256) * torch.tensor([[1e-4], [1.0], [30.0], [0.0]]), rounding_named("fp8/128")
    kept = fp8(x)
    torch.testing.assert_close(kept[:3], x[:3], rtol=2**-4, atol=float(x[2].abs().max()) * 2**-16)
    assert not bool(kept[3].any())
    assert torch.equal(fp8(kept), kept)
    assert bool(((kept - x).abs() <= fp8.step(x) / 2 * (1 + 1e-6)).all())
    assert scheme_named("activations and weights in fp8/128").of("linear").truncates


@pytest.mark.parametrize("n", [512, 2048])
@pytest.mark.parametrize("signs", ["both", "one"])
def test_sums_of_float8_are_cut_off_within_their_noise(n: int, signs: str) -> None:
    """Without float32 between, as PyTorch's use_fast_accum leaves it to Hopper: an H200 was off by as much."""
    torch.manual_seed(n)
    x, w = (rounding_named("fp8/row")(torch.randn(rows, n)).double() for rows in (16, 64))
    x, w = (x.abs(), w.abs()) if signs == "one" else (x, w)
    exact, terms = x @ w.T, n // TOGETHER["fp8 tensor cores"]
    noise = variance_of_truncated_sums(terms, x.square() @ w.square().T, exact).sqrt() * UNIT["fp8 tensor cores"]
    worst = float(((tensor_core(x, w, together=32, guard=0, bits=13) - exact).abs() / noise).max())
    assert 1 < worst < 4


@pytest.fixture(scope="module")
def measured() -> dict[str, np.ndarray]:
    """What an H200 made of rows of activations and a matrix in torch 2.11: `torch.matmul` in TF32, `_scaled_mm` of
    float8 and `_int_mm` of int8, both with a scale for each row, of weights that were held in bfloat16. On a GPU torch
    takes `amax / 448` as `amax * (1 / 448)`: in one of the rows 15 values that lie halfway turned for
    that.
    """
    with np.load(Path(__file__).with_name("h200.npz")) as file:
        return dict(file)


@pytest.mark.parametrize(
    ("products", "dtype", "arithmetic"),
    [
        pytest.param("tf32", "f32", "activations in TF32, sums on tensor cores", marks=pytest.mark.slow),
        ("fp8", "bf16", "activations and weights in fp8 rows with float32 scales, sums on fp8 tensor cores"),
        pytest.param(
            "int8", "bf16", "activations and weights in int8 rows with float32 scales", marks=pytest.mark.slow
        ),
    ],
)
def test_what_an_h200_multiplied_is_sound_and_told(
    products: str, dtype: str, arithmetic: str, measured: dict[str, np.ndarray], models: Models, tmp_path: Path
) -> None:
    x, y = (measured[f"{products}_{name}"] for name in "xy")
    weight = measured["fp8_weight" if products == "fp8" else "tf32_weight"]
    shape = Shape("qwen2", n_layer=1, n_embd=x.shape[1], n_head=8, n_head_kv=2, n_ff=y.shape[1], n_vocab=320)
    path = Path(shutil.copy(models(shape, "F16"), tmp_path / "model.gguf"))
    at = Model(path).file.tensors["blk.0.ffn_gate.weight"]
    np.memmap(path, "f2", "r+", at.offset, at.shape)[:] = weight
    for factor, faulty in ((1.0, []), (1.04, ["blk.0.ffn_gate"])):
        out = tmp_path / f"{factor}.trace"
        with TraceWriter(out, "torch", "qwen2", path.name) as writer:
            writer.step(0, TOKENS[: len(x)], range(len(x)))
            writer.op(0, "blk.0.ffn_norm", x, dtype)
            writer.op(0, "blk.0.ffn_gate", scaled_bits(y, factor, dtype), dtype)
        result = check_trace(out, path, effort=Effort(seconds=1))  # nobody asks why the norm is none of this model
        gate = next(op for op in result.ops if op.op == "blk.0.ffn_gate")
        assert [op.op for op in result.faulty if op.op == gate.op] == faulty
        if not faulty:
            assert gate.arithmetic == arithmetic


def scaled_bits(y: np.ndarray, factor: float, dtype: str) -> np.ndarray:
    if dtype == "f32" or factor == 1:
        return (y * factor).astype(y.dtype)
    held = torch.from_numpy(y.view(np.int16)).view(torch.bfloat16)
    return (held.float() * factor).bfloat16().view(torch.int16).numpy().view(np.uint16)


def test_an_h200_cuts_sums_in_tf32_off(measured: dict[str, np.ndarray]) -> None:
    x, y, weight = (torch.from_numpy(measured[f"tf32_{name}"]).double() for name in ("x", "y", "weight"))
    exact = rounding_named("tf32")(x) @ weight.T
    assert float((y * exact).sum() / exact.square().sum()) - 1 == pytest.approx(-3.1e-6, rel=0.02)


def test_tf32_is_rounded_as_an_h200_rounds_it() -> None:
    """What its matmul with 1 made of 1 + k 2^-13, in units of that: of those halfway (k = 4, 12) the even one."""
    x = 1 + torch.arange(16) * 2.0**-13
    lost = [0, -1, -2, -3, -4, 3, 2, 1, 0, -1, -2, -3, 4, 3, 2, 1]
    assert ((rounding_named("tf32")(x) - x) * 2**13).tolist() == lost
    assert ((rounding_named("tf32 away")(x) - x) * 2**13).tolist() == [4 if n == -4 else n for n in lost]


def test_a_mistaken_op_beside_others_on_tensor_cores_is_found(models: Models, tmp_path: Path) -> None:
    """Where all terms have one sign no matmul fits without them, be it right."""
    model = positive(models(replace(WIDE, n_layer=2)), tmp_path / "positive.gguf", lambda name: "norm" not in name)
    result = check_trace(trace(model, tmp_path / "t.trace", linear_on(4, 0, "f16"), 1.01), model)
    assert [op.op for op in result.faulty] == ["blk.0.ffn_up"]
