"""A second opinion: random tiny models in Hugging Face transformers against the torch engine, both in float64.

transformers computes rope's angles and its norms in float32, whatever the model's dtype: as it is, it agrees to
1.4e-6 of an op's RMS in every value (`test_agrees_as_it_is`). With those two modules in float64, to 8e-15
(`test_agrees_to_float64`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

from tracediff.trace.reader import Trace

transformers = pytest.importorskip("transformers")

TOKENS = (3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88, 41, 97, 16, 93, 99, 37, 51, 5, 82, 9)
N_VOCAB, N_EMBD, N_LAYER, N_HEAD, N_HEAD_KV, N_FF, HEAD_DIM = 150, 96, 3, 6, 2, 136, 16
EPS = 2.0**-17  # GGUF keeps it in float32, which holds no 1e-5
N_CTX_ORIG = 64  # so short that factors and corrections touch some pairs fully, some in part and some not at all
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Family:
    """A transformers class, the GGUF architecture, and what sets them apart."""

    name: str
    arch: str
    rope: dict[str, Any]
    config: dict[str, Any]
    metadata: dict[str, Any]


def _family(
    name: str, arch: str, rope: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None, **config: Any
) -> Family:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **(rope or {})}
    return Family(name, arch, rope, config, metadata or {})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": N_CTX_ORIG}
GGUF_YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": N_CTX_ORIG}
LINEAR = {"rope_type": "linear", "factor": 4.0}
GGUF_LINEAR = {"scaling.type": "linear", "scaling.factor": 4.0}
FAMILIES = {
    family.name: family
    for family in (
        _family("llama", "llama"),
        _family("llama, biases", "llama", attention_bias=True),
        _family("llama, linear rope", "llama", LINEAR, GGUF_LINEAR),
        _family("llama3", "llama", {**LLAMA3, "rope_type": "llama3", "original_max_position_embeddings": N_CTX_ORIG}),
        _family("qwen2", "qwen2"),
        _family("qwen2, tied", "qwen2", tie_word_embeddings=True),
        _family("qwen2, yarn", "qwen2", YARN, GGUF_YARN),
        _family("qwen3", "qwen3", head_dim=24),
        _family("qwen3, yarn", "qwen3", YARN, GGUF_YARN, head_dim=24),
    )
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


class Rotary64(torch.nn.Module):
    """cos and sin of transformers' frequencies, in float64 from first to last."""

    def __init__(self, family: Family, head_dim: int, scale: float) -> None:
        super().__init__()
        self.frequencies = _frequencies(family, head_dim)
        self.scale = scale

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * self.scale, angles.sin() * self.scale


def _frequencies(family: Family, head_dim: int) -> torch.Tensor:
    """As the papers have them, [head_dim / 2] (https://arxiv.org/abs/2309.00071 for YaRN)."""
    theta, factor = family.rope["rope_theta"], family.rope.get("factor", 1.0)
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    match family.rope["rope_type"]:
        case "linear":
            return frequencies / factor
        case "llama3":
            return frequencies / _llama3_factors(head_dim, theta).double()
        case "yarn":
            first = max(math.floor(_pair_that_turns(32.0, theta, head_dim)), 0)
            last = math.ceil(_pair_that_turns(1.0, theta, head_dim))
            ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
            return frequencies * (1 - ramp) + frequencies / factor * ramp
    return frequencies


def _pair_that_turns(times: float, theta: float, head_dim: int) -> float:
    """The pair, as a fraction, that turns so often within the original context."""
    return head_dim * math.log(N_CTX_ORIG / (times * 2 * math.pi)) / (2 * math.log(theta))


def _llama3_factors(head_dim: int, theta: float) -> torch.Tensor:
    """rope_freqs.weight as convert_hf_to_gguf.py makes it, float32."""
    factors = []
    for i in range(head_dim // 2):
        turns = N_CTX_ORIG * theta ** (-2 * i / head_dim) / (2 * math.pi)
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    assert 1.0 in factors
    assert LLAMA3["factor"] in factors
    return torch.tensor(factors, dtype=torch.float32)


def build(family: Family) -> Any:
    """A transformers model in float64 whose random weights are float32 numbers."""
    torch.manual_seed(0)
    name = CLASSES[family.arch]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=N_VOCAB, hidden_size=N_EMBD, num_hidden_layers=N_LAYER, num_attention_heads=N_HEAD,
        num_key_value_heads=N_HEAD_KV, intermediate_size=N_FF, rms_norm_eps=EPS, max_position_embeddings=256,
        attn_implementation="sdpa", rope_parameters=family.rope, **family.config,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, parameter in model.named_parameters():
        spread = 1.0 if parameter.dim() == 1 or "embed" in key else parameter.shape[1] ** -0.5
        mean = 1.0 if "norm" in key else 0.0
        parameter.data = (mean + 0.4 * torch.randn(parameter.shape)) if mean else spread * torch.randn(parameter.shape)
    return model.double()


def widen(model: Any, family: Family) -> Any:
    """Put float64 modules where transformers computes in float32."""
    model.model.rotary_emb = Rotary64(family, _head_dim(family), model.model.rotary_emb.attention_scaling)
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape[0], EPS, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model


def export(model: Any, family: Family, path: Path) -> Path:
    """The model as GGUF, its tensors named by gguf-py's own table and permuted as convert_hf_to_gguf.py does."""
    out = GGUFWriter(path, family.arch)
    out.add_block_count(N_LAYER)
    out.add_context_length(256)
    out.add_embedding_length(N_EMBD)
    out.add_feed_forward_length(N_FF)
    out.add_head_count(N_HEAD)
    out.add_head_count_kv(N_HEAD_KV)
    out.add_key_length(_head_dim(family))
    out.add_value_length(_head_dim(family))
    out.add_layer_norm_rms_eps(EPS)
    out.add_rope_freq_base(family.rope["rope_theta"])
    for key, value in family.metadata.items():
        add = {str: out.add_string, int: out.add_uint32, float: out.add_float32}[type(value)]
        add(f"{family.arch}.rope.{key}", value)
    names = get_tensor_name_map(getattr(MODEL_ARCH, family.arch.upper()), N_LAYER)
    for key, parameter in model.named_parameters():
        tensor = parameter.detach().numpy().astype(np.float32)
        if family.arch == "llama" and ".q_proj." in key:
            tensor = _permuted(tensor, N_HEAD)
        if family.arch == "llama" and ".k_proj." in key:
            tensor = _permuted(tensor, N_HEAD_KV)
        out.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), tensor)
    if family.rope["rope_type"] == "llama3":
        out.add_tensor("rope_freqs.weight", _llama3_factors(_head_dim(family), family.rope["rope_theta"]).numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def _permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _head_dim(family: Family) -> int:
    return family.config.get("head_dim", HEAD_DIM)


def run(model: Any, steps: list[tuple[int, ...]]) -> Iterator[dict[str, torch.Tensor]]:
    """What transformers computes in each step, its own cache between them, under our names."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
            seen[name] = output[0]

        return hook

    model.model.embed_tokens.register_forward_hook(keep("token_embd"))
    model.model.norm.register_forward_hook(keep("output_norm"))
    for n, layer in enumerate(model.model.layers):
        for name, module in (
            ("attn_norm", layer.input_layernorm), ("attn_v", layer.self_attn.v_proj),
            ("attn_output", layer.self_attn.o_proj), ("ffn_norm", layer.post_attention_layernorm),
            ("ffn_gate", layer.mlp.gate_proj), ("ffn_up", layer.mlp.up_proj), ("ffn_down", layer.mlp.down_proj),
            ("ffn_residual", layer),
        ):  # fmt: skip
            module.register_forward_hook(keep(f"blk.{n}.{name}"))
    cache = None
    for tokens in steps:
        with torch.inference_mode():
            result = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        yield {**seen, "output": result.logits[0]}


def worst_difference(model: Any, ours: Trace) -> tuple[float, str]:
    """The largest difference of any value, relative to the RMS of its op, and where it is."""
    steps = [step.tokens for step in ours.steps.values()]
    found = []
    for step, values in enumerate(run(model, steps)):
        assert len(values) == 3 + 8 * N_LAYER
        for name, theirs in values.items():
            mine = torch.from_numpy(ours.values(ours.ops[step, name]).copy()).reshape(theirs.shape)
            assert mine.dtype == theirs.dtype == torch.float64
            found.append((float((mine - theirs).abs().max() / theirs.square().mean().sqrt()), f"{name} in step {step}"))
    return max(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_agrees_to_float64(name: str, tmp_path: Path, torch_trace: Callable[..., Path]) -> None:
    model = build(FAMILIES[name])
    path = export(model, FAMILIES[name], tmp_path / "hf.gguf")
    ours = Trace(torch_trace(path, tokens=TOKENS, n_decode=3, dtype="f64"))
    worst, where = worst_difference(widen(model, FAMILIES[name]), ours)
    assert worst < 1e-13, where


@pytest.mark.parametrize("name", FAMILIES)
def test_agrees_as_it_is(name: str, tmp_path: Path, torch_trace: Callable[..., Path]) -> None:
    model = build(FAMILIES[name])
    path = export(model, FAMILIES[name], tmp_path / "hf.gguf")
    ours = Trace(torch_trace(path, tokens=TOKENS, n_decode=3, dtype="f64"))
    worst, where = worst_difference(model, ours)
    assert worst < 5e-6, where


@pytest.mark.parametrize(
    ("name", "fault"),
    [("llama", "rope_pairing@2"), ("llama3", "rope_factors_ignored@0"), ("qwen2", "gqa_heads@1"), ("qwen3", "eps@1")],
)
def test_a_fault_is_no_agreement(name: str, fault: str, tmp_path: Path, torch_trace: Callable[..., Path]) -> None:
    model = build(FAMILIES[name])
    path = export(model, FAMILIES[name], tmp_path / "hf.gguf")
    ours = Trace(torch_trace(path, tokens=TOKENS, dtype="f64", faults=(fault,)))
    assert worst_difference(widen(model, FAMILIES[name]), ours)[0] > 5e-6
