"""The transformers engine: it agrees with torch op by op, and mistakes planted in transformers are found and named.

Measured, 3 layers, 28 tokens and 3 decode steps: the worst NMSE of any op is 2e-29 in float64 and 4e-12 in float32.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from conftest import Models
from tiny_metadata import TRANSFORMERS

from tracediff.engine.torch_run import TorchOptions
from tracediff.engine.transformers_run import load, trace_model, trace_transformers
from tracediff.errors import EngineError
from tracediff.model.families import load_graph
from tracediff.model.synthetic import Shape, write_model
from tracediff.pipeline import check_trace, compare_traces
from tracediff.trace.reader import Trace

test_transformers = pytest.importorskip("test_transformers", reason="transformers is not installed")
FAMILIES, TOKENS = test_transformers.FAMILIES, test_transformers.TOKENS
AGREE = {"f64": 1e-26, "f32": 1e-10}
Cli = Callable[..., tuple[int, str, str]]


def saved(name: str, folder: Path) -> tuple[Path, Path]:
    """A random model as a GGUF file and as a folder of transformers' own."""
    built = test_transformers.build(FAMILIES[name])
    built.float().save_pretrained(folder / "hf")
    return test_transformers.export(built, FAMILIES[name], folder / "model.gguf"), folder / "hf"


def assert_agrees(model: Path, trace: Path, torch_trace: Callable[..., Path], dtype: str) -> None:
    ours = torch_trace(model, trace, dtype=dtype)
    ops = compare_traces(ours, trace).ops
    assert [op.op for op in ops if op.drift is None] == []
    worst = max(ops, key=lambda op: op.drift.nmse if op.drift else 0)
    assert worst.drift
    assert worst.drift.nmse < AGREE[dtype], worst.op
    assert {record.op for record in Trace(trace).step_ops(0)} == set(load_graph(model).ops)
    result = check_trace(trace, model)
    assert (result.verdict, result.faulty) == ("match", [])
    assert {weight.status for weight in result.weights} == {"identical"}
    assert [weight.weight for weight in result.weights] == [w.name for w in load_graph(model).norm_weights()]


# GGUF's factors of llama3 and its YaRN settings are float32 numbers: beyond that, nothing can agree.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "f64") for name in ("llama", "llama, biases", "qwen2", "qwen2, tied", "qwen3")),
        *((name, "f32") for name in FAMILIES),
    ],
)
def test_every_op_agrees(name: str, dtype: str, tmp_path: Path, torch_trace: Callable[..., Path]) -> None:
    model, hf = saved(name, tmp_path)
    out = tmp_path / "hf.trace"
    assert trace_transformers(model, out, TorchOptions(dtype=dtype), TOKENS, 3, hf) == []
    assert list(Trace(out).steps) == [0, 1, 2, 3]
    assert_agrees(model, out, torch_trace, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision_is_no_fault(dtype: str, tmp_path: Path) -> None:
    model, hf = saved("qwen3", tmp_path)
    trace_transformers(model, tmp_path / "hf.trace", TorchOptions(dtype=dtype), TOKENS, 2, hf)
    result = check_trace(tmp_path / "hf.trace", model)
    assert (result.verdict, result.faulty) == ("match", [])
    assert {weight.status for weight in result.weights} == {"rounded"}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_another_attention_of_transformers_is_no_fault(dtype: str, tmp_path: Path) -> None:
    """Fused, it shows no scores and no probabilities: these are left out, and what comes of them is judged."""
    model, hf = saved("qwen3", tmp_path)
    loaded, _ = load(model, hf, getattr(torch, {"f32": "float32", "bf16": "bfloat16"}[dtype]), "cpu")
    out = tmp_path / "sdpa.trace"
    notes = trace_model(loaded, model, out, TorchOptions(dtype=dtype), TOKENS, 2, attention="sdpa")
    assert notes == ["left out, for the model shows it nowhere: attn_scores, attn_probs"]
    result = check_trace(out, model)
    assert (result.verdict, result.faulty) == ("match", [])
    assert {op.op for op in result.ops if op.local and len(op.local.segment) > 1} == {
        op.name for op in load_graph(model) if op.kind == "weighted_values"
    }


# transformers' GGUF loader knows no other head_dim of qwen3 than 128.
@pytest.mark.parametrize("weights", ["F32", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_gguf_file_itself(arch: str, weights: str, models: Models, tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("accelerate", reason="transformers loads no GGUF file without accelerate")
    shape = Shape("qwen3", n_embd=96, n_head=3, n_head_kv=1, head_dim=128, n_layer=2) if arch == "qwen3" else arch
    model, out = models(shape, weights), tmp_path / "hf.trace"
    options = ("--engine", "transformers", "--tokens", "256,84,104,101,32", "--decode", 2, "-o", out)
    assert cli("trace", model, *options) == (0, "", f"wrote {out}\n")
    assert Trace(out).header.engine.startswith("transformers ")
    code, report, _ = cli("check", out, "--model", model)
    assert (code, report.split("\n")[0]) == (
        0,
        f"MATCH: nothing diverges in {len(Trace(out).ops)} ops, replayed.",
    )


def test_another_file_of_the_same_name_is_not_read(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers looks for a name in the working directory first."""
    pytest.importorskip("accelerate", reason="transformers loads no GGUF file without accelerate")
    model, other = (tmp_path / folder / "model.gguf" for folder in ("this", "other"))
    for at, shape in ((model, "llama"), (other, "qwen2")):
        at.parent.mkdir()
        shutil.copy(models(shape, "F32"), at)
    monkeypatch.chdir(other.parent)
    trace_transformers(model, tmp_path / "x.trace", TorchOptions(), TOKENS)
    assert check_trace(tmp_path / "x.trace", model).verdict == "match"


# Without rope there are no frequencies to compute again in float64.
@pytest.mark.parametrize(
    ("arch", "dtype"), [("gpt2", "f32"), ("gpt2", "f64"), ("mamba", "f32"), ("mamba", "f64"), ("qwen3moe", "f32")]
)
def test_other_architectures(arch: str, dtype: str, tmp_path: Path, cli: Cli) -> None:
    """Of a fused projection, of states, and of experts it shows the ends alone: what lies between is recomputed."""
    pytest.importorskip("accelerate", reason="transformers loads no GGUF file without accelerate")
    others, without = TRANSFORMERS[arch]
    model, out = tiny_models.write(arch, tmp_path / "model.gguf", others=others, without=without), tmp_path / "a.trace"
    options = ("--engine", "transformers", "--tokens", "256,84,104,101,32", "--decode", 2, "--dtype", dtype, "-o", out)
    code, _, error = cli("trace", model, *options)
    assert code == 0, error
    hidden = {"gpt2": "attn_scores", "mamba": "ssm_scan", "qwen3moe": "ffn_moe_topk"}[arch]
    assert hidden in error
    code, report, _ = cli("check", out, "--model", model)
    assert (code, report[:5]) == (0, "MATCH"), report


# --- mistakes ----------------------------------------------------------------------------------------------------


def neighbours_rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """apply_rotary_pos_emb of an engine that pairs (2i, 2i + 1)."""
    half = cos.shape[-1] // 2
    c, s = cos[:, None, :, :half], sin[:, None, :, :half]
    pairs = [(x[..., 0::2], x[..., 1::2]) for x in (q, k)]
    return [torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2) for a, b in pairs]


def rope_pairing(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", neighbours_rotated)


def bias_missing(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


def eps(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[2].post_attention_layernorm.variance_epsilon *= 10


def act_swapped(model: Any, patch: pytest.MonkeyPatch) -> None:
    mlp = model.model.layers[0].mlp
    patch.setattr(mlp, "forward", lambda x: mlp.down_proj(mlp.gate_proj(x) * mlp.act_fn(mlp.up_proj(x))))


def attention_scale(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].self_attn.scaling = 1.0


MISTAKES = [
    (rope_pairing, "qwen2", [f"blk.{n}.attn_{x}_rope" for n in range(3) for x in "qk"]),
    (rope_pairing, "qwen3", [f"blk.{n}.attn_{x}_rope" for n in range(3) for x in "qk"]),
    (bias_missing, "qwen2", ["blk.1.attn_k"]),
    (bias_missing, "llama, biases", ["blk.1.attn_k"]),
    (eps, "llama", ["blk.2.ffn_norm"]),
    (act_swapped, "qwen3", ["blk.0.ffn_act"]),
    (attention_scale, "llama", ["blk.1.attn_probs"]),
]


@pytest.mark.parametrize(
    ("mistake", "name", "faulty"), MISTAKES, ids=[f"{m.__name__}, {name}" for m, name, _ in MISTAKES]
)
def test_a_mistake_in_transformers_is_found(
    mistake: Callable[[Any, pytest.MonkeyPatch], None], name: str, faulty: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, hf = saved(name, tmp_path)
    loaded, ignored = load(model, hf, torch.float32, "cpu")
    assert ignored == []
    mistake(loaded, monkeypatch)
    out = tmp_path / "hf.trace"
    trace_model(loaded, model, out, TorchOptions(), TOKENS, 1)
    result = check_trace(out, model)
    assert result.first_divergence
    assert result.first_divergence.op == faulty[0]
    assert [(op.op, op.cause and op.cause.name) for op in result.faulty] == [
        (op, mistake.__name__) for _ in range(2) for op in faulty
    ]


def test_scores_that_are_never_shown_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that scales Q first multiplies neither rope's output nor what would be the scores."""
    model, hf = saved("qwen2", tmp_path)
    loaded, _ = load(model, hf, torch.float32, "cpu")
    module = sys.modules[type(loaded).__module__]
    eager = module.eager_attention_forward
    monkeypatch.setattr(
        module, "eager_attention_forward", lambda m, q, *rest, scaling, **kw: eager(m, q * scaling, *rest, 1.0, **kw)
    )
    notes = trace_model(loaded, model, tmp_path / "hf.trace", TorchOptions(), TOKENS)
    assert notes == ["left out, for the model shows it nowhere: attn_q_rope, attn_scores"]
    assert {op.rpartition(".")[2] for _, op in Trace(tmp_path / "hf.trace").ops} >= {"attn_k_rope", "attn_probs"}
    assert check_trace(tmp_path / "hf.trace", model).verdict == "match"


# --- the rest of the command line --------------------------------------------------------------------------------


def test_captures(tmp_path: Path, cli: Cli) -> None:
    model, hf = saved("llama", tmp_path)
    ops = {}
    for capture in ("all", "layers", "stats"):
        out = tmp_path / f"{capture}.trace"
        options = ("--engine", "transformers", "--hf", hf, "--tokens", "3,1,4,1,5", "--capture", capture, "-o", out)
        assert cli("trace", model, *options) == (0, "", f"wrote {out}\n")
        ops[capture] = [record.op for record in Trace(out).step_ops(0)]
    assert ops["layers"] == ["token_embd", *(f"blk.{n}.ffn_residual" for n in range(3)), "output_norm", "output"]
    assert ops["stats"] == ops["all"]
    assert cli("compare", tmp_path / "all.trace", tmp_path / "stats.trace")[0] == 0


def test_refusals(tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, hf = saved("llama", tmp_path)
    base = ("trace", model, "--tokens", "1,2", "-o", tmp_path / "x.trace")
    ours = (*base, "--engine", "transformers")
    with pytest.raises(EngineError, match="--fault and --arithmetic are for the torch engine"):
        trace_transformers(model, tmp_path / "x.trace", TorchOptions(faults=("eps",)), TOKENS)
    assert refused(*ours, "--hf", tmp_path / "none") == (
        f"--hf {tmp_path / 'none'}: not a folder. Give the folder that holds config.json and the safetensors files."
    )
    (tmp_path / "empty").mkdir()
    assert refused(*ours, "--hf", tmp_path / "empty").startswith(f"transformers cannot load {tmp_path / 'empty'}: ")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused(*ours, "--hf", hf) == (
        "the transformers engine needs transformers, which is not installed. "
        'Install it with: pip install "tracediff[transformers]".'
    )


def test_another_model_in_the_folder(tmp_path: Path) -> None:
    model, _ = saved("llama", tmp_path)
    (tmp_path / "other").mkdir()
    _, other = saved("qwen3", tmp_path / "other")
    with pytest.raises(EngineError, match=r"o_proj is \[96, 144\] in this model, \[96, 96\] in the GGUF"):
        trace_transformers(model, tmp_path / "x.trace", TorchOptions(), TOKENS, hf=other)


def test_a_tensor_that_no_file_holds(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, hf = saved("llama", tmp_path)
    tensors = load_file(hf / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineError, match=r"finds no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        trace_transformers(model, tmp_path / "x.trace", TorchOptions(), TOKENS, hf=hf)


def test_a_size_that_transformers_does_not_read_from_the_file(tmp_path: Path) -> None:
    """transformers 5.23 takes no head size from a qwen3 file: its weights would be random numbers."""
    model = write_model(tmp_path / "m.gguf", Shape("qwen3", n_layer=1, head_dim=20, n_vocab=300), "F32")
    with pytest.raises(EngineError, match=r"layers\.0\.self_attn\.k_norm\.weight is 128, in the file 20: .*--hf"):
        trace_transformers(model, tmp_path / "x.trace", TorchOptions(), TOKENS)
