"""Sums as tensor cores make them, simulated: products exact, a few at a time aligned, cut off and added."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TOKENS, Models
from torch import Tensor

from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import check_trace
from tracediff.trace.writer import TraceWriter

WIDE = Shape("llama", n_layer=1, n_embd=512, n_head=8, n_head_kv=4, n_ff=256, n_vocab=320, eps=1e-5)


def cut_off(x: Tensor, quantum: Tensor) -> Tensor:
    return torch.where(quantum > 0, torch.trunc(x / quantum) * quantum, 0.0)


def unit(x: Tensor, bits: int) -> Tensor:
    """What the last of so many bits of the fraction is worth in the exponent of x."""
    return torch.where(x != 0, torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - bits), 0.0)


def tensor_core(x: Tensor, w: Tensor, together: int, guard: int) -> Tensor:
    """x [T, n] times w [m, n] transposed, both of few bits, in float64 that holds every product."""
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for at in range(0, x.shape[1], together):
        terms = torch.cat([x[:, None, at : at + together] * w[None, :, at : at + together], total[..., None]], -1)
        quantum = unit(terms.abs().amax(-1), 23 + guard)
        total = cut_off(terms, quantum[..., None]).sum(-1)
        total = cut_off(total, unit(total, 23))
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


def test_sums_of_one_sign_are_sound_where_tensor_cores_are_asked_for(models: Models, tmp_path: Path) -> None:
    """What is cut off adds up where all terms have one sign: rounding to nearest never loses that much."""
    path = Path(shutil.copy(models(WIDE), tmp_path / "positive.gguf"))
    tensors = Model(path).file.tensors
    for name in ("token_embd.weight", *(f"blk.0.attn_{one}.weight" for one in "qkv")):
        held = np.memmap(path, "f4", "r+", tensors[name].offset, tensors[name].shape)
        held[:] = np.abs(held)
        held.flush()
    model = Model(path)
    out = trace(model, tmp_path / "right.trace", linear_on(4, 0, "f16"))
    unasked = check_trace(out, model)
    assert {op.op for op in unasked.faulty} == {f"blk.0.attn_{one}" for one in "qkv"}
    assert "0.99999 times" in unasked.findings[0].text
    asked = check_trace(out, model, arithmetic="activations and weights in float16 on tensor cores")
    assert asked.verdict == "match"
    assert "sums on tensor cores" in str(next(op for op in asked.ops if op.op == "blk.0.attn_q").arithmetic)


def test_fp8_keeps_three_bits_of_a_scaled_block() -> None:
    torch.manual_seed(0)
    x, fp8 = torch.randn(4, 256) * torch.tensor([[1e-4], [1.0], [30.0], [0.0]]), rounding_named("fp8/128")
    kept = fp8(x)
    torch.testing.assert_close(kept[:3], x[:3], rtol=2**-4, atol=float(x[2].abs().max()) * 2**-16)
    assert not bool(kept[3].any())
    assert torch.equal(fp8(kept), kept)
    assert bool(((kept - x).abs() <= fp8.step(x) / 2 * (1 + 1e-6)).all())
    assert scheme_named("activations and weights in fp8/128").of("linear").truncates
