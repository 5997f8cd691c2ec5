"""A tiny model of any architecture that llama.cpp knows, from its metadata alone.

    python benchmarks/tiny_models.py gemma3 OUT.gguf

llama.cpp builds the model from the metadata (`llama_model_init_from_user`) and asks for each tensor by name and shape;
the values are random and as loud as real ones. Sizes all differ from one another, or an axis would pass for another.
What metadata an architecture wants is what its loader reads (src/models/*.cpp; tests/test-llama-archs.cpp lists it).
"""

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tracediff.model.synthetic import add_tokenizer

# Of every architecture: keys without the architecture's name before them. None leaves a key out.
N_VOCAB, N_EMBD, N_HEAD, N_HEAD_KV, D, N_FF = 320, 96, 6, 2, 16, 160
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
    "expert_count": 7,
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
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 6,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
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
# What an architecture wants beside BASE.
OF: dict[str, Metadata] = {
    "apertus": {"xielu.alpha_n": 0.8, "xielu.alpha_p": 0.7, "xielu.beta": 0.5, "xielu.eps": 1e-7},
    "bailingmoe3": {
        **MLA,
        **EVERY_OTHER_LAYER,
        "kda.safe_gate": None,
        "rope.dimension_sections": [2, 3, 3, 0],
        "swiglu_clamp_exp": [0.0, 4.0],
        "swiglu_clamp_shexp": [0.0, 5.0],
    },
    "cohere2moe": {"attention.sliding_window_pattern": [0, 1]},
    "deepseek2": {**MLA},
    "deepseek2-ocr": {"block_count": 3},
    "deepseek32": {**MLA, **INDEXER},
    "deepseek4": {
        **HYPER,
        **INDEXER,
        "block_count": 4,
        "attention.head_count_kv": 1,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": [0, 0, 4, 128],
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": 10.0,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "rope.dimension_count": 8,
    },
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
        "attention.head_count_kv": [N_HEAD_KV, 0],
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
    "kimi-k3": {
        **MLA,
        **EVERY_OTHER_LAYER,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    },
    "kimi-linear": {**MLA, **EVERY_OTHER_LAYER},
    "lfm2": EVERY_OTHER_LAYER,
    "lfm2moe": EVERY_OTHER_LAYER,
    "llama4": {"block_count": 4},
    "mamba": {"ssm.group_count": 0},
    "mamba2": {"ssm.time_step_rank": 12},
    "maple": {**PATTERN, "swiglu_clamp_exp": 7.0},
    "mimo2": PATTERN,
    "minimax-m3": {**INDEXER, "attention.indexer.head_count": N_HEAD_KV},
    "mistral4": {**MLA},
    "muse-glimmer": PATTERN,
    "nemotron_h": {**ONE_OF_THREE, "ssm.time_step_rank": 12},
    "nemotron_h_moe": {**ONE_OF_THREE, "ssm.time_step_rank": 12},
    "plamo2": {**EVERY_OTHER_LAYER, "ssm.group_count": 0},
    "qwen3next": DELTA_NET,
    "qwen35": DELTA_NET,
    "qwen35moe": DELTA_NET,
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
    "spark2_5": PATTERN,
    "step35": PATTERN,
}
WITH_EXPERTS = """
llama4 cohere2moe grok qwen2moe qwen3moe qwen3next qwen3vlmoe qwen35moe qwen4exp phimoe dbrx olmoe arctic
deepseek deepseek2 deepseek32 dots3note deepseek4 glm4moe glm-dsa exaone-moe bailingmoe bailingmoe2 bailingmoe3
dots1 afmoe ernie4_5-moe hunyuan-moe hy_v3 hy_v4 gpt-oss lfm2moe smallthinker llada-moe grovemoe minimax-01
minimax-m2 minimax-m3 rnd1 paddleocr mimo2 kimi-linear kimi-k3 glm5-next step35 mistral4 mellum laguna maple
granitemoe deepseek2-ocr nemotron_h_moe
""".split()  # noqa: SIM905 - to be read
# Tensors that llama.cpp would read if a file had them, and none has: the scales of NVFP4, what older files had.
_NEVER = {"": r"\.(scale|input_scale)$", "qwen3next": r"ssm_in\.weight$"}


def metadata(arch: str) -> dict[str, Any]:
    """All keys of a tiny model of the architecture, with its name before those that are its own."""
    merged = {**BASE, **(EXPERTS if arch in WITH_EXPERTS else {}), **OF.get(arch, {})}
    return {
        key if key.startswith("xielu") else f"{arch}.{key}": value for key, value in merged.items() if value is not None
    }


def write(arch: str, out: Path, seed: int = 0) -> Path:
    """Write a model of the architecture in float32; raises RuntimeError with what llama.cpp says where it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "header.gguf"
        _finish(_begin(arch, header))
        shapes = tensors(header)
    unwanted = re.compile("|".join(_NEVER[key] for key in ("", arch) if key in _NEVER))
    writer = _begin(arch, out)
    for name, shape in shapes.items():
        if not unwanted.search(name):
            writer.add_tensor(name, values(name, shape, seed))
    _finish(writer)
    return out


def tensors(header: Path) -> dict[str, tuple[int, ...]]:
    """The tensors that llama.cpp would read for this metadata, outermost axis first. In a child: it may abort."""
    child = subprocess.run(
        [sys.executable, __file__, "--tensors", header], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )  # fmt: skip
    if child.returncode:
        raise RuntimeError(child.stderr.strip()[-2000:] or f"exit code {child.returncode}")
    found = (line.split() for line in child.stdout.splitlines())
    return {name: tuple(map(int, shape)) for name, *shape in found}


def values(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random values for a tensor, by what its name says that it is."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    normal = rng.standard_normal(shape, np.float32)
    spread = rng.uniform(0.4, 1.6, shape).astype(np.float32)
    layer = int(found[1]) if (found := re.match(r"blk\.(\d+)\.", name)) else 0
    if re.search(r"rope_freqs|rope_factors", name):
        return np.geomspace(1.0, 8.0, shape[-1]).astype(np.float32)
    if re.search(r"ssm_a(\.|$)", name):  # the decay of a state is negative
        return -spread
    if name.endswith(".bias") and "norm" not in name:
        return normal * np.float32(0.3)
    if "norm" in name and len(shape) == 1:
        return (
            normal * np.float32(0.1)
            if name.endswith(".bias")
            else spread * np.float32(3.0 if "output" in name else 1.0)
        )
    if len(shape) == 1:
        return normal * np.float32(0.5)
    rows = rng.uniform(0.6, 1.5, (*shape[:-1], 1)).astype(np.float32)
    columns = rng.uniform(0.6, 1.5, shape[-1]).astype(np.float32)
    gain = 0.2 * 1.3**layer * shape[-1] ** 0.5 if "embd" in name else 1.3**layer
    matrix = normal * rows * columns * np.float32(gain / np.sqrt(shape[-1]))
    if name == "token_embd.weight":
        matrix[:, 1] *= 0.01
        matrix[256, 1] = 25.0  # a massive activation of the first token, in a channel that is quiet otherwise
    return matrix


def _begin(arch: str, path: Path) -> GGUFWriter:
    writer = GGUFWriter(path, arch)
    add_tokenizer(writer, N_VOCAB)
    for key, value in metadata(arch).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    return writer


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _list_tensors(header: Path) -> None:
    """In the child: each tensor's name and shape on a line."""
    import llama_cpp.llama_cpp as llama

    from tracediff_reference import ggml

    class Init(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    lib = ggml.library()
    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, Init]
    context = lib.gguf_init_from_file(str(header).encode(), Init(True, None))

    @llama.llama_model_set_tensor_data_t
    def show(address: int, _: Any) -> None:
        tensor = ggml.at(address)
        shape = [*tensor.ne][::-1]
        while len(shape) > 1 and shape[0] == 1:
            shape.pop(0)
        print(tensor.name.decode(), *shape)

    params = llama.llama_model_default_params()
    params.use_extra_bufts = False
    params.n_gpu_layers = 0
    if not llama.llama_model_init_from_user(context, show, None, params):
        sys.exit(1)


def main() -> None:
    """Write one model, or list the tensors of a header."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", action="store_true", help="list the tensors of the header ARCH")
    parser.add_argument("arch")
    parser.add_argument("out", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.tensors:
        _list_tensors(Path(arguments.arch))
    else:
        write(arguments.arch, arguments.out)


if __name__ == "__main__":
    main()
