"""The transformers class of an architecture that its GGUF loader does not read, with the tensors of a tiny file.

    tiny_checkpoints.load("olmo2", Path("olmo2.gguf"))

What a converter to GGUF does (convert_hf_to_gguf.py) is done the other way round: names by gguf-py's table, fused
projections put together, rows of Q and K back into halves. What the classes want beside the sizes is here, by hand.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_models
import torch
from gguf import GGUFReader
from tiny_metadata import ALL_HEADS, BASE, DELTA_NET, EXPERTS, Metadata
from torch import Tensor

from tracediff.model.conversion import tensor_names

File = Mapping[str, Tensor]
Made = Callable[[File, str], Tensor]  # a tensor of a class, of those of a file and the name of its layer in it

ROPE = {"rope_type": "default", "rope_theta": BASE["rope.freq_base"]}
USUAL: Mapping[str, Any] = {
    "vocab_size": BASE["vocab_size"],
    "hidden_size": BASE["embedding_length"],
    "num_hidden_layers": BASE["block_count"],
    "num_attention_heads": BASE["attention.head_count"],
    "num_key_value_heads": BASE["attention.head_count_kv"],
    "head_dim": BASE["attention.key_length"],
    "intermediate_size": BASE["feed_forward_length"],
    "rms_norm_eps": BASE["attention.layer_norm_rms_epsilon"],
    "layer_norm_eps": BASE["attention.layer_norm_epsilon"],
    "max_position_embeddings": BASE["context_length"],
    "rope_parameters": ROPE,
    "num_local_experts": EXPERTS["expert_count"],
    "num_experts_per_tok": EXPERTS["expert_used_count"],
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def rows(*names: str) -> Made:
    """Tensors of the file, one below the other: fused projections, and experts' gate and up."""
    return lambda file, layer: torch.cat([file[f"{layer}.{name}"] for name in names], -2 if "exps" in names[0] else 0)


def _latent(file: File, layer: str) -> Tensor:
    """Of each head the channels of K, then those of V: in the file K is absorbed, so it lies the other way round."""
    k, v = file[f"{layer}.attn_k_b.weight"].transpose(1, 2), file[f"{layer}.attn_v_b.weight"]
    return torch.cat((k, v), 1).flatten(0, 1)


def _alternating(suffix: str) -> Made:
    """Gate and up of each channel side by side; weights with the input first."""

    def made(file: File, layer: str) -> Tensor:
        pair = torch.stack([file[f"{layer}.ffn_{x}_exps.{suffix}"] for x in ("gate", "up")], 2).flatten(1, 2)
        return pair.transpose(1, 2) if suffix == "weight" else pair

    return made


def _neighbours(name: str) -> Made:
    """Rows of the rotated channels of each head as pairs of neighbours, where the file has them in halves (GLM)."""

    def made(file: File, layer: str) -> Tensor:
        heads = file[f"{layer}.{name}"].unflatten(0, (-1, 16))
        turned = heads[:, :8].unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)
        return torch.cat((turned, heads[:, 8:]), 1).flatten(0, 1)

    return made


def _turned(name: str) -> Made:
    return lambda file, layer: file[f"{layer}.{name}"].transpose(-1, -2)


def _of_heads(file: File, layer: str, kind: str) -> Tensor:
    """Q, K and V of each head, where the file has all of Q first."""
    qkv = file[f"{layer}.attn_qkv.{kind}"]
    return qkv.reshape(3, 6, 16, *qkv.shape[1:]).transpose(0, 1).flatten(0, 2)


def _qkvz(file: File, layer: str) -> Tensor:
    """Of each key head its Q, K, V and Z (Qwen3-Next)."""
    n, d = DELTA_NET["ssm.group_count"], DELTA_NET["ssm.state_size"]
    q, k, v = file[f"{layer}.attn_qkv.weight"].split((n * d, n * d, DELTA_NET["ssm.inner_size"]))
    parts = [x.reshape(n, -1, x.shape[1]) for x in (q, k, v, file[f"{layer}.attn_gate.weight"])]
    return torch.cat(parts, 1).flatten(0, 1)


def _grouped(name: str, each: int, before: int = 0, axis: int = 0) -> Made:
    """The value heads of each key head side by side, where the file has the first of all key heads first (Qwen3.5);
    `before` are Q and K.
    """

    def made(file: File, layer: str) -> Tensor:
        whole = file[f"{layer}.{name}"].movedim(axis, 0)
        heads = whole[before:].unflatten(0, (-1, DELTA_NET["ssm.group_count"], each))
        return torch.cat((whole[:before], heads.transpose(0, 1).flatten(0, 2))).movedim(0, axis)

    return made


def _decay(of: Made) -> Made:
    return lambda file, layer: of(file, layer).neg().log()


def _flat(name: str) -> Made:
    return lambda file, layer: file[f"{layer}.{name}"].flatten()


@dataclass(frozen=True, slots=True)
class Class:
    """A class of transformers, its `config` beside USUAL, and tensors that are several of the file's, by pattern.

    `less_one` are the weights that it adds 1 to, and a converter before it. `others` and `without` are of the file
    (tiny_models.write).
    """

    name: str
    module: str
    config: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, Made] = field(default_factory=dict)
    less_one: str = "$^"
    others: Metadata = field(default_factory=dict)
    without: str = "$^"
    arch: str = ""  # where it is not called as the class is here

    def write(self, arch: str, out: Path) -> Path:
        """A tiny file of what the class knows."""
        return tiny_models.write(self.arch or arch, out, others=self.others, without=self.without)


_BIAS = r"(attn_(q|k|v|qkv|output)|ffn_(gate|up|down)(_shexp)?|output)\.bias$|rope_freqs"
_EXPERTS = {
    r"experts\.gate_up_proj$": rows("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    r"experts\.down_proj$": rows("ffn_down_exps.weight"),
}  # fmt: skip
_GATE_UP = {r"gate_up_proj\.weight$": rows("ffn_up.weight")}
_QKV = {r"qkv_proj\.weight$": rows("attn_q.weight", "attn_k.weight", "attn_v.weight")}
PERMUTED = ("llama", "granitemoe", "smollm3", "olmo")  # convert_hf_to_gguf.py: LlamaModel and its heirs

CLASSES: Mapping[str, Class] = {
    "command-r": Class(
        "Cohere", "cohere", {"logit_scale": BASE["logit_scale"], "tie_word_embeddings": True}, without=_BIAS
    ),
    "cohere2": Class(
        "Cohere2", "cohere2",
        {"logit_scale": BASE["logit_scale"], "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
        without=_BIAS,
    ),
    "olmo2": Class("Olmo2", "olmo2", others={"attention.sliding_window": None}, without=_BIAS),
    "exaone4": Class(
        "Exaone4", "exaone4",
        {"layer_types": ["sliding_attention"] * 2}, others={"block_count": 2}, without=_BIAS,
    ),
    "granitemoe": Class(
        "GraniteMoeShared", "granitemoeshared",
        {"embedding_multiplier": 3.0, "residual_multiplier": 1.4, "logits_scaling": 0.7, "attention_multiplier": 0.21,
         "shared_intermediate_size": 32},
        {**_EXPERTS, r"router\.weight$": rows("ffn_gate_inp.weight"),
         r"shared_mlp\.input_linear\.weight$": rows("ffn_gate_shexp.weight", "ffn_up_shexp.weight")},
        others={"attention.scale": 0.21}, without=_BIAS,
    ),
    "mixtral": Class("Mixtral", "mixtral", {}, _EXPERTS, others=EXPERTS, without=_BIAS, arch="llama"),
    "glm4": Class(
        "Glm4", "glm4", {"attention_bias": True, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        _GATE_UP | {rf"{x}_proj\.{y}$": _neighbours(f"attn_{x}.{y}") for x in "qk" for y in ("weight", "bias")},
        others={"rope.dimension_count": 8}, without=r"(attn_output|output|ffn_.*)\.bias$",
    ),
    "gpt-oss": Class(
        "GptOss", "gpt_oss",
        {"intermediate_size": 64, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
        {r"sinks$": rows("attn_sinks.weight"),
         r"gate_up_proj$": _alternating("weight"), r"gate_up_proj_bias$": _alternating("bias"),
         r"down_proj$": _turned("ffn_down_exps.weight"), r"down_proj_bias$": rows("ffn_down_exps.bias")},
    ),
    "deepseek2": Class(
        "DeepseekV3", "deepseek_v3",
        {"n_routed_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 64,
         "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7, "q_lora_rank": 48,
         "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 24, "head_dim": 16,
         "num_key_value_heads": 6, "first_k_dense_replace": 1},
        {**_EXPERTS, r"experts\.gate_up_proj$": rows("ffn_gate_up_exps.weight"), r"kv_b_proj\.weight$": _latent,
         r"correction_bias$": rows("exp_probs_b.bias")},
        others={"expert_count": 8, "expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_norm": True},
        without=_BIAS,
    ),
    "mamba2": Class(
        "Mamba2", "mamba2",
        {"num_heads": 12, "head_dim": 16, "state_size": 40, "n_groups": 1, "layer_norm_epsilon": 1e-6,
         "chunk_size": 4},
        {r"dt_bias$": rows("ssm_dt.bias"), r"A_log$": _decay(_flat("ssm_a")), r"\.D$": _flat("ssm_d")},
        others={"ssm.group_count": 1},
    ),
    "qwen3next": Class(
        "Qwen3Next", "qwen3_next",
        {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
         "linear_conv_kernel_dim": 4, "num_experts": 7, "moe_intermediate_size": 64,
         "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "full_attention_interval": 2,
         "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
         "layer_types": ["linear_attention", "full_attention"]},
        {**_EXPERTS, r"experts\.gate_up_proj$": rows("ffn_gate_up_exps.weight"), r"in_proj_qkvz\.weight$": _qkvz,
         r"A_log$": _decay(rows("ssm_a")), r"dt_bias$": rows("ssm_dt.bias")},
        others={"rope.dimension_count": 8}, less_one=r"(layernorm|[qk]_norm|model\.norm)\.weight$",
        without=_BIAS,
    ),
    "qwen35": Class(
        "Qwen3_5", "qwen3_5",
        {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
         "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
         "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
                             "mrope_interleaved": True}},
        {r"in_proj_qkv\.weight$": _grouped("attn_qkv.weight", 32, 128),
         r"in_proj_z\.weight$": _grouped("attn_gate.weight", 32),
         r"in_proj_b\.weight$": _grouped("ssm_beta.weight", 1), r"in_proj_a\.weight$": _grouped("ssm_alpha.weight", 1),
         r"A_log$": _decay(_grouped("ssm_a", 1)), r"dt_bias$": _grouped("ssm_dt.bias", 1),
         r"conv1d\.weight$": _grouped("ssm_conv1d.weight", 32, 128),
         r"linear_attn\.out_proj\.weight$": _grouped("ssm_out.weight", 32, axis=1),
         r"linear_attn\.norm\.weight$": rows("ssm_norm.weight")},
        others={"rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0]},
        less_one=r"(layernorm|[qk]_norm|model\.norm)\.weight$", without=_BIAS,
    ),
    "kimi-linear": Class(
        "KimiLinear", "kimi_linear",
        {"n_routed_experts": 7, "num_experts": 7, "moe_intermediate_size": 64, "num_shared_experts": 1,
         "routed_scaling_factor": 1.7, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
         "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 24, "head_dim": 16,
         "num_key_value_heads": 6, "linear_num_heads": 6, "linear_head_dim": 32, "linear_conv_kernel_dim": 4,
         "layer_types": ["full_attention", "linear_attention"]},
        {**_EXPERTS, r"correction_bias$": rows("exp_probs_b.bias"), r"kv_b_proj\.weight$": _latent,
         r"conv1d\.weight$": rows("ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight"),
         r"dt_bias$": rows("ssm_dt.bias"), r"A_log$": _decay(rows("ssm_a")),
         r"\.b_proj\.weight$": rows("ssm_beta.weight"),
         **{rf"{x}_{y}_proj\.weight$": rows(f"ssm_{x}_{y}.weight") for x in "fg" for y in "ab"}},
        others={"expert_shared_feed_forward_length": 64}, without=_BIAS,
    ),
    "minicpm3": Class(
        "MiniCPM3", "minicpm3",
        {"q_lora_rank": 48, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 24,
         "head_dim": None, "num_key_value_heads": 6},
        without=_BIAS + "|rope_factors",
    ),
    "olmo": Class("Olmo", "olmo", {"clip_qkv": BASE["attention.clamp_kqv"]}, without=_BIAS),
    "falcon-h1": Class(
        "FalconH1", "falcon_h1",
        {"mamba_d_ssm": 192, "mamba_n_heads": 12, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 40,
         "mamba_chunk_size": 4, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_conv": 4},
        {r"dt_bias$": rows("ssm_dt.bias"), r"A_log$": _decay(_flat("ssm_a")), r"\.D$": _flat("ssm_d"),
         r"mamba\.norm\.weight$": _flat("ssm_norm.weight")},
        without=_BIAS,
    ),
    "smollm3": Class(
        "SmolLM3", "smollm3", {"num_hidden_layers": 4}, others={"block_count": 4}, without=_BIAS
    ),
    "gptneox": Class(
        "GPTNeoX", "gpt_neox",
        {"use_parallel_residual": True, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
         "hidden_act": "gelu_pytorch_tanh"},
        {r"query_key_value\.weight$": lambda f, x: _of_heads(f, x, "weight"),
         r"query_key_value\.bias$": lambda f, x: _of_heads(f, x, "bias")},
        others={**ALL_HEADS, "use_parallel_residual": True, "rope.dimension_count": 8},
    ),
    "phi3": Class("Phi3", "phi3", {}, {**_GATE_UP, **_QKV},
                  others={"attention.sliding_window": None, "rope.scaling.original_context_length": None},
                  without=_BIAS + "|rope_factors"),
    "mpt": Class(
        "Mpt", "mpt",
        {"d_model": 96, "n_heads": 6, "n_layers": 2, "expansion_ratio": 4, "max_seq_len": 2048,
         "attn_config": {"clip_qkv": 1.0, "alibi": True, "alibi_bias_max": 8}},
        others={**ALL_HEADS, "feed_forward_length": 384},
        without=r"bias$|attn_[qk]_norm|position_embd|ffn.act|attn_[qkv]\.weight",
    ),
    "falcon": Class(
        "Falcon", "falcon",
        {"head_dim": None, "num_key_value_heads": None, "multi_query": True, "parallel_attn": True, "bias": False,
         "alibi": False, "new_decoder_architecture": False,
         "ffn_hidden_size": 384, "activation": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5},
        others={"attention.head_count_kv": 1, "feed_forward_length": 384},
        without=rf"attn_norm_2|attn_(q|k|v)\.weight|{_BIAS}",
    ),
    "llama4": Class(
        "Llama4", "llama4",
        {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 160,
         "intermediate_size": 64, "num_hidden_layers": 4, "num_local_experts": 7, "num_experts_per_tok": 1},
        {r"experts\.gate_up_proj$": lambda f, x: _EXPERTS[r"experts\.gate_up_proj$"](f, x).transpose(1, 2),
         r"experts\.down_proj$": _turned("ffn_down_exps.weight")},
        others={"block_count": 4, "expert_used_count": 1, "expert_shared_feed_forward_length": 64}, without=_BIAS,
    ),
    "hunyuan-dense": Class("HunYuanDenseV1", "hunyuan_v1_dense", without=_BIAS),
    "ernie4_5-moe": Class(
        "Ernie4_5_Moe", "ernie4_5_moe",
        {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 64, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1},
        {**_EXPERTS, r"correction_bias$": lambda file, layer: file[f"{layer}.exp_probs_b.bias"][None]},
        others={"expert_shared_feed_forward_length": 64}, without=_BIAS,
    ),
}  # fmt: skip


def load(arch: str, path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The class with the tensors of the file, as its own checkpoints have them, in this dtype. No buffer is: tables of
    rope are computed in float32.
    """
    import transformers

    known = CLASSES[arch]
    arch = known.arch or arch
    class_ = getattr(transformers, f"{known.name}ForCausalLM")
    config = class_.config_class(
        **{key: value for key, value in {**USUAL, **known.config}.items() if value is not None}
    )
    config._attn_implementation = "eager"
    model = class_(config).eval()
    file = {t.name: torch.from_numpy(t.data.copy()) for t in GGUFReader(path).tensors}
    names = tensor_names(arch, config.num_hidden_layers)
    state = {key: _tensor(key, held, known, arch, file, names) for key, held in model.state_dict().items()}
    model.load_state_dict(state)
    for module in model.modules():
        if isinstance(module, torch.nn.GELU):  # as llama.cpp computes it for all
            module.approximate = "tanh"
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _tensor(key: str, held: Tensor, known: Class, arch: str, file: File, names: Any) -> Tensor:
    layer = f"blk.{found[1]}" if (found := re.search(r"\.(\d+)\.", key)) else ""
    for pattern, made in reversed([*known.made.items()]):
        if re.search(pattern, key):
            return made(file, layer).reshape(held.shape)
    name = names.get_name(key, try_suffixes=(".weight", ".bias"))
    if name not in file and key == "lm_head.weight":
        name = "token_embd.weight"
    values = file[name]
    if arch in PERMUTED and re.search(r"attn_[qk]\.", name):
        values = values.reshape(-1, BASE["attention.key_length"] // 2, 2, *values.shape[1:]).transpose(1, 2)
    return values.reshape(held.shape) - float(bool(re.search(known.less_one, key)))
