"""What metadata a tiny model of each architecture has.

Sizes all differ from one another, so that no axis passes for another. There is every key that the architecture's loader
asks for (src/models/*.cpp; tests/test-llama-archs.cpp lists them).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Of every architecture: keys without the architecture's name before them. None leaves a key out.
N_VOCAB, N_EMBD, N_HEAD, N_HEAD_KV, D, N_FF, N_EXPERT = 320, 96, 6, 2, 16, 160, 7
Metadata = Mapping[str, Any]
BASE: Metadata = {
    "vocab_size": N_VOCAB,
    "context_length": 2048,
    "embedding_length": N_EMBD,
    "block_count": 2,
    "feed_forward_length": N_FF,
    "attention.head_count": N_HEAD,
    "attention.head_count_kv": N_HEAD_KV,
    "attention.key_length": D,
    "attention.value_length": D,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.group_norm_epsilon": 1e-5,
    "attention.group_norm_groups": 8,
    "attention.clamp_kqv": 1.0,
    "attention.max_alibi_bias": 8.0,
    "attention.sliding_window": 5,
    "attention.sliding_window_pattern": 2,
    "attention.relative_buckets_count": 8,
    "attention.q_lora_rank": 48,
    "attention.kv_lora_rank": 64,
    "rope.dimension_count": D,
    "rope.dimension_sections": [3, 3, 2, 0],
    "rope.freq_base": 10000.0,
    "use_parallel_residual": False,
    "logit_scale": 0.7,
    "residual_scale": 1.4,
    "embedding_scale": 3.0,
    "full_attention_interval": 2,
    "leading_dense_block_count": 1,
    "time_mix_extra_dim": 20,
    "time_decay_extra_dim": 28,
    "wkv.head_size": D,
    "token_shift_count": 2,
    "rescale_every_n_layers": 6,
    "attention.decay_lora_rank": 20,
    "attention.iclr_lora_rank": 24,
    "attention.value_residual_mix_lora_rank": 28,
    "attention.gate_lora_rank": 40,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * N_EMBD,
    "ssm.state_size": 40,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
    "shortconv.l_cache": 3,
    "kda.head_dim": 32,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
    "interleave_moe_layer_step": 2,
    "features_length": N_EMBD,
    "posnet.embedding_length": N_EMBD, "posnet.block_count": 2,
    "convnext.embedding_length": N_EMBD, "convnext.block_count": 2,
}  # fmt: skip
EXPERTS: Metadata = {
    "expert_count": N_EXPERT,
    "expert_used_count": 3,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 32,
    "expert_latent_length": 72,
    "expert_gating_func": 2,  # sigmoid
    "expert_weights_scale": 1.7,
    "expert_group_scale": 0.6,
    "experts_per_group": 1,
}
MLA: Metadata = {
    "attention.head_count_kv": 1,
    "attention.key_length": 80,
    "attention.value_length": 64,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 24,
    "rope.dimension_count": 16,
}
INDEXER: Metadata = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,  # a Hadamard matrix is no smaller (llama-kv-cache.cpp)
    "attention.indexer.top_k": 8,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
}
# K-quants have blocks of 256 in a row (ggml-common.h, QK_K).
WIDE_ROWS: Metadata = {
    "embedding_length": 256, "feed_forward_length": 512, "expert_feed_forward_length": 256, "ssm.inner_size": 768,
    "features_length": 256, "posnet.embedding_length": 256, "convnext.embedding_length": 256,
}  # fmt: skip
WIDE_OF = {  # twice as wide as an embedding
    "granitehybrid": {"ssm.inner_size": 512, "ssm.time_step_rank": 16},
    "mamba": {"ssm.inner_size": 512},
    "jamba": {"ssm.inner_size": 512},
}
EVERY_OTHER_LAYER: Metadata = {"attention.head_count_kv": [N_HEAD_KV, 0], "attention.head_count": [N_HEAD, 0]}
ONE_OF_THREE: Metadata = {  # a layer each of attention, of states and of experts
    "block_count": 3, "attention.head_count": [N_HEAD, 0, 0], "attention.head_count_kv": [N_HEAD_KV, 0, 0],
    "feed_forward_length": [0, 0, N_FF],
}  # fmt: skip
DELTA_NET: Metadata = {
    "ssm.inner_size": 128, "ssm.state_size": 32, "ssm.time_step_rank": 4, "ssm.group_count": 2,
}  # fmt: skip
HYPER: Metadata = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
}

PATTERN: Metadata = {"attention.sliding_window_pattern": [1, 0]}  # of each layer, where one number is not enough
# The kernels of WKV work on 64 channels at a time, and on no fewer (ggml-cpu/ops.cpp).
RWKV: Metadata = {"embedding_length": 128, "wkv.head_size": 64, "attention.head_count": 2, "attention.head_count_kv": 2}
ALL_HEADS: Metadata = {"attention.head_count_kv": N_HEAD}
BERT: Metadata = {**ALL_HEADS, "tokenizer.ggml.token_type_count": 2}
KDA: Metadata = {**MLA, "attention.head_count_kv": [1, 0]}  # delta nets in layers without keys
NOT_ABSORBED: Metadata = {  # latent attention whose heads are made before they are cached
    **ALL_HEADS, "attention.key_length": 40, "attention.value_length": 24, "rope.dimension_count": 16,
}  # fmt: skip
# What an architecture wants beside BASE.
OF: dict[str, Metadata] = {
    "phi3": {"rope.scaling.original_context_length": 1024},  # beyond, rope has other factors
    "apertus": {"xielu.alpha_n": 0.8, "xielu.alpha_p": 0.7, "xielu.beta": 0.5, "xielu.eps": 1e-7},
    "arwkv7": {**RWKV, "token_shift_count": 1},
    "bailingmoe3": {
        **KDA,
        "kda.safe_gate": None,
        "rope.dimension_sections": [2, 3, 3, 0],
        "swiglu_clamp_exp": [0.0, 4.0],
        "swiglu_clamp_shexp": [0.0, 5.0],
    },
    "bert": BERT,
    "chameleon": {"vocab_size": 8320},  # tokens 4 to 8,196 are those of images, whose logits are masked
    "cohere2moe": {"attention.sliding_window_pattern": [0, 1]},
    "deepseek2": {**MLA},
    "deepseek2-ocr": {**ALL_HEADS, "block_count": 3},
    "deepseek32": {**MLA, **INDEXER},
    "deepseek4": {
        **HYPER,
        **INDEXER,
        "block_count": 5,
        "attention.head_count_kv": 1,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": [0, 4, 128, 4, 0],
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 1,
        "swiglu_clamp_exp": 10.0,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "rope.dimension_count": 8,
    },
    "dots1": ALL_HEADS,
    "dots3note": {
        **MLA,
        **PATTERN,
        **INDEXER,
        "attention.kv_lora_rank_swa": 64,
        "attention.key_length_swa": 80,
        "attention.value_length_swa": 64,
        "attention.key_length_mla_swa": 40,
        "attention.value_length_mla_swa": 24,
        "rope.freq_base_swa": 20000.0,
        "attention.indexer.types": [0, 1],
    },
    "exaone4": {"block_count": 4},
    "falcon-h1": {"ssm.time_step_rank": 12},
    "gemma2": {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0},
    "gemma3": {"block_count": 7, "attention.sliding_window_pattern": None},
    "gemma3n": {"block_count": 22, "embedding_length_per_layer_input": 24},
    "gemma4": {
        **PATTERN,
        "embedding_length_per_layer_input": 24,
        "attention.shared_kv_layers": 0,
        "attention.key_length_swa": D,
        "attention.value_length_swa": D,
        "rope.freq_base_swa": 20000.0,
    },
    "glm-dsa": {**MLA, **INDEXER},
    "glm5-next": {
        **MLA,
        **HYPER,
        **INDEXER,
        "attention.head_count_kv": [1, 0],
        "rope.dimension_count": 0,
        "attention.key_length": 64,
        "hyper_connection.low_rank": 8,
        "attention.compress_ratios": [4, 4],
    },
    "granite_swa": PATTERN,
    "granitehybrid": {**EVERY_OTHER_LAYER, "ssm.time_step_rank": 12},
    "grok": {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0},
    "hrm_text": {"block_count": 6, "hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
    "hy_v4": {
        **MLA,
        **HYPER,
        **INDEXER,
        "hyper_connection.magnitude": 2.0,
        "swiglu_clamp_exp": 10.0,
        "expert_weights_norm": True,
        "attention.indexer.types": [1, 0],
    },
    "jamba": EVERY_OTHER_LAYER,
    "jina-bert-v2": BERT,
    "jina-bert-v3": BERT,
    "kimi-k3": {
        **KDA,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    },
    "kimi-linear": KDA,
    "lfm2": EVERY_OTHER_LAYER,
    "lfm2moe": EVERY_OTHER_LAYER,
    "llama4": {"block_count": 4},
    "mamba": {"ssm.group_count": 0},
    "mamba2": {"ssm.time_step_rank": 12},
    "maple": {**PATTERN, "swiglu_clamp_exp": 7.0},
    "mimo2": PATTERN,
    "minicpm3": NOT_ABSORBED,
    "minimax-m3": {**INDEXER, "attention.indexer.head_count": N_HEAD_KV},
    "mistral3": {"attention.temperature_scale": 0.1, "rope.scaling.original_context_length": 4},
    "mistral4": {**MLA, "attention.temperature_scale": 0.1, "attention.temperature_length": 4},
    "muse-glimmer": PATTERN,
    "nemotron_h": {**ONE_OF_THREE, "ssm.time_step_rank": 12},
    "nemotron_h_moe": {**ONE_OF_THREE, "ssm.time_step_rank": 12},
    "nomic-bert": BERT,
    "nomic-bert-moe": {**BERT, "moe_every_n_layers": 2},
    "olmoe": ALL_HEADS,
    "plamo2": {**EVERY_OTHER_LAYER, "ssm.group_count": 0},
    "plm": NOT_ABSORBED,
    "qwen3next": DELTA_NET,
    "qwen35": DELTA_NET,
    "qwen35moe": DELTA_NET,
    "qwen3tts": {"vocab_size": 3200},  # 3,072 codes are a constant
    "qwen4exp": {
        **DELTA_NET,
        **HYPER,
        **INDEXER,
        "hyper_connection.low_rank": 8,
        "attention.compress_ratios": [4, 4],
        "attention.indexer.key_length": D,
        "ple.layers": [0],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 0,
        "embedding_length_per_layer_input": 24,
        "ple.layer_multipliers": [1, 3, 5],
        "ple.head_offsets": [0, N_VOCAB, 2 * N_VOCAB, 3 * N_VOCAB],
        "ple.head_vocab_sizes": [N_VOCAB] * 4,
    },
    "rwkv6": RWKV,
    "rwkv6qwen2": {**RWKV, "token_shift_count": 1},
    "rwkv7": RWKV,
    "spark2_5": PATTERN,
    "step35": PATTERN,
    "t5": {**ALL_HEADS, "decoder_start_token_id": 0},
    "t5encoder": ALL_HEADS,
}
WITH_EXPERTS = """
llama4 cohere2moe grok qwen2moe qwen3moe qwen3next qwen3vlmoe qwen35moe qwen4exp phimoe dbrx olmoe arctic
deepseek deepseek2 deepseek32 dots3note deepseek4 glm4moe glm-dsa exaone-moe bailingmoe bailingmoe2 bailingmoe3
dots1 afmoe ernie4_5-moe hunyuan-moe hy_v3 hy_v4 gpt-oss lfm2moe smallthinker llada-moe grovemoe minimax-01
minimax-m2 minimax-m3 rnd1 paddleocr mimo2 kimi-linear kimi-k3 glm5-next step35 mistral4 mellum laguna maple
granitemoe deepseek2-ocr nemotron_h_moe nomic-bert-moe
""".split()  # noqa: SIM905 - to be read
# All that llama.cpp knows by name (src/llama-arch.cpp), but for what only its quantiser reads.
ARCHITECTURES = """
llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bert modern-bert nomic-bert
nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert bloom stablelm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe
qwen3next qwen3vl qwen3vlmoe qwen35 qwen35moe qwen4exp phi2 phi3 phimoe plamo plamo2 plamo3 codeshell orion internlm2
minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma4 gemma4-assistant gemma-embedding starcoder2 mamba mamba2 maple
jamba falcon-h1 xverse command-r cohere2 cohere2moe dbrx olmo olmo2 olmoe muse-glimmer openelm arctic deepseek
deepseek2 deepseek2-ocr deepseek32 deepseek4 chatglm glm4 glm4moe glm-dsa bitnet t5 t5encoder jais jais2 nemotron
nemotron_h nemotron_h_moe exaone exaone4 exaone-moe rwkv6 rwkv6qwen2 rwkv7 arwkv7 granite granitemoe granitehybrid
graniteswitch granite_swa chameleon wavtokenizer-dec plm bailingmoe bailingmoe2 bailingmoe3 dots1 dots3note arcee
afmoe laguna ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3 gpt-oss lfm2 lfm2moe dream
smallthinker llada llada-moe seed_oss grovemoe apertus minimax-01 hrm_text minimax-m2 minimax-m3 cogvlm rnd1
pangu-embedded mistral3 eagle3 dflash mistral4 paddleocr mimo2 step35 spark2_5 llama-embed maincoder kimi-linear
kimi-k3 glm5-next talkie mellum nanbeige qwen3tts pockettts
""".split()  # noqa: SIM905 - to be read


def _heads_of(size: int) -> Metadata:
    return {"attention.key_length": size, "attention.value_length": size, "rope.dimension_count": size}


# What transformers takes for granted of an architecture, for its GGUF loader reads no key for it: other metadata, and
# the tensors (a regular expression) that llama.cpp reads where they are there and its class has no place for.
_FFN_BIAS = r"ffn_(gate|up|down)(_exps|_inp|_shexp)?\.bias$"
_BIASES = rf"(attn_(q|k|v|qkv|output)|output)\.bias$|{_FFN_BIAS}"
_BUT_QKV_BIASES = rf"(attn_output|output)\.bias$|{_FFN_BIAS}"
_SPLIT = r"attn_(q|k|v)\.weight"  # its class has them in one
TRANSFORMERS: Mapping[str, tuple[Metadata, str]] = {
    "llama": ({}, rf"rope_freqs|{_BIASES}"),
    "qwen2": ({}, _BUT_QKV_BIASES),
    "qwen2moe": ({"expert_feed_forward_length": 1408, "expert_shared_feed_forward_length": 5632}, _BUT_QKV_BIASES),
    "qwen3": (_heads_of(128), _BIASES),
    "qwen3moe": ({**_heads_of(128), "expert_feed_forward_length": 768}, _BIASES),
    "gemma2": (
        {
            **_heads_of(256),
            "attention.sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _BIASES,
    ),
    "gemma3": (_heads_of(256), _BIASES),
    "stablelm": ({"rope.dimension_count": 4}, rf"attn_._norm|{_BUT_QKV_BIASES}"),
    "starcoder2": ({}, "$^"),
    "nemotron": ({"rope.dimension_count": 8, "attention.layer_norm_rms_epsilon": None}, _BIASES),
    "gpt2": ({**ALL_HEADS, "feed_forward_length": 384, "context_length": 1024}, _SPLIT),
    "bloom": ({**ALL_HEADS, "feed_forward_length": 384}, _SPLIT),
    "falcon": ({"attention.head_count_kv": 1, "feed_forward_length": 384}, rf"attn_norm_2|{_SPLIT}|{_BIASES}"),
    "mamba": ({}, "$^"),
    "lfm2": ({"attention.head_count": N_HEAD, "attention.sliding_window": None}, rf"dense_2|{_BIASES}"),
    "minimax-m2": ({**_heads_of(128), "rope.dimension_count": 64}, _BIASES),
    "phi3": ({"tokenizer.ggml.padding_token_id": 0}, _BIASES),
    "gpt-oss": (_heads_of(64), "$^"),
    "gemma4": ({}, "$^"),
}
# Of 64 bits, where whole numbers of 32 are usual.
WIDE = ("ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes")


def metadata(arch: str, wide: bool = False, others: Metadata = MappingProxyType({})) -> dict[str, Any]:
    """All keys of a tiny model of the architecture, with its name before those that are its own.

    The rows of a `wide` one are those of K-quants. `others` are in the place of the usual ones.
    """
    experts = EXPERTS if arch in WITH_EXPERTS else {}
    merged = {**BASE, **experts, **(WIDE_ROWS if wide else {}), **OF.get(arch, {})}
    merged |= {**(WIDE_OF.get(arch, {}) if wide else {}), **others}
    for key in ("attention.head_count", "attention.head_count_kv") if wide else ():  # some want heads as wide as rows
        merged[key] = _more_heads(merged[key])
    general = ("xielu", "tokenizer")
    named = {key if key.startswith(general) else f"{arch}.{key}": value for key, value in merged.items()}
    return {key: value for key, value in named.items() if value is not None}


def _more_heads(count: Any) -> Any:
    if isinstance(count, list):
        return [_more_heads(one) for one in count]
    return WIDE_ROWS["embedding_length"] // D if count == N_HEAD else count
