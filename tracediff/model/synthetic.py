"""Models made of random numbers with the shapes and the loud statistics of real ones, for demo, tests, benchmarks.

Heads, channels, tokens and layers all differ from one another, or a permutation of them would not show.
"""

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

from tracediff.errors import ModelError
from tracediff.model.vocabulary import BYTES

_WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # by gguf-py
_BOS = 256  # the first id after the 256 bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model to make; the metadata of `extra` is written as it is (rope scaling, for instance)."""

    arch: str = "qwen2"
    n_layer: int = 3
    n_embd: int = 96
    n_head: int = 6
    n_head_kv: int = 2
    n_ff: int = 160
    n_vocab: int = 320
    head_dim: int | None = None
    n_ctx: int = 2048
    theta: float = 1_000_000.0
    eps: float = 1e-6
    tied: bool = False
    bias: bool | None = None  # None: as the family has it
    loud: bool = False
    rope_factors: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def d(self) -> int:
        """Channels per head."""
        return self.head_dim or self.n_embd // self.n_head


QWEN25_05B = Shape(
    n_layer=24,
    n_embd=896,
    n_head=14,
    n_head_kv=2,
    n_ff=4864,
    n_vocab=151_936,
    n_ctx=32_768,
    tied=True,
    loud=True,
)
DEMO = Shape(n_layer=8, n_embd=256, n_head=8, n_head_kv=2, n_ff=512, n_vocab=2048, tied=True, loud=True, n_ctx=4096)


def write_model(path: Path, shape: Shape, weights: str = "F16", seed: int = 0) -> Path:
    """Write a GGUF file of random weights; norms and biases are float32, as converters write them. Of other types than
    gguf-py writes, and of mixes such as Q4_K_M, llama.cpp makes it.
    """
    if weights not in _WRITTEN:
        source = write_model(path.with_suffix(".f32"), shape, "F32", seed)
        quantize(source, path, weights)
        source.unlink()
        return path
    rng = np.random.default_rng(seed)
    out = GGUFWriter(path, shape.arch)
    add_metadata(out, shape)
    add_tokenizer(out, shape.n_vocab)
    kind = GGMLQuantizationType[weights]
    for name, tensor in _tensors(shape, rng):
        # Rows that a block type cannot hold stay float16, as llama.cpp's quantiser falls back too.
        if tensor.ndim == 1 or weights == "F32":
            out.add_tensor(name, tensor)
        elif weights == "F16" or (tensor.shape[-1] % 32 and weights != "BF16"):
            out.add_tensor(name, tensor.astype(np.float16))
        else:
            out.add_tensor(name, quants.quantize(tensor, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def quantize(source: Path, out: Path, file_type: str) -> Path:
    """`source` as llama.cpp quantises it to a file type such as Q4_K_M, in a mix of tensor types of its own."""
    import llama_cpp.llama_cpp as llama

    _silence(llama)
    params = llama.llama_model_quantize_default_params()
    params.ftype = LlamaFileType[f"MOSTLY_{file_type}"]
    params.nthread = 2
    if llama.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise ModelError(f"llama.cpp cannot quantise {source} to {file_type}.")
    return out


_silent: Any = None


def _silence(llama: Any) -> None:
    """llama.cpp calls its log callback for ever: the reference to it must stay."""
    global _silent
    if _silent is None:
        _silent = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(_silent, ctypes.c_void_p())


def add_metadata(out: GGUFWriter, s: Shape) -> None:
    """The keys that the architectures of hand-written families need."""
    out.add_name(f"random {s.arch}")
    out.add_context_length(s.n_ctx)
    out.add_embedding_length(s.n_embd)
    out.add_block_count(s.n_layer)
    out.add_feed_forward_length(s.n_ff)
    out.add_head_count(s.n_head)
    out.add_head_count_kv(s.n_head_kv)
    if s.head_dim:
        out.add_key_length(s.head_dim)
        out.add_value_length(s.head_dim)
    out.add_rope_dimension_count(s.d)
    out.add_rope_freq_base(s.theta)
    out.add_layer_norm_rms_eps(s.eps)
    for key, value in s.extra.items():
        (out.add_string if isinstance(value, str) else out.add_uint32 if isinstance(value, int) else out.add_float32)(
            f"{s.arch}.{key}", value
        )


def add_tokenizer(out: GGUFWriter, n_vocab: int) -> None:
    """A byte-level BPE vocabulary: 256 bytes as GPT-2 spells them, a BOS, some merges, and padding."""
    if n_vocab < _BOS + 1:
        raise ModelError(f"a byte-level vocabulary needs at least {_BOS + 1} tokens, not {n_vocab}.")
    tokens = [*sorted(BYTES, key=BYTES.__getitem__), "<|bos|>"]
    pairs = ["Ġ t", "h e", "i n", "Ġ a", "e r", "o n", "Ġt he", "l l", "r e", "a n", "Ġ s", "o u", "e n"]
    merges = pairs[: max(0, n_vocab - len(tokens))]
    tokens += [merge.replace(" ", "") for merge in merges]
    padding = n_vocab - len(tokens)
    tokens += [f"<|pad{i}|>" for i in range(padding)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types([1] * 256 + [3] + [1] * len(merges) + [5] * padding)
    out.add_token_merges(merges)
    out.add_bos_token_id(_BOS)
    out.add_add_bos_token(True)


def _tensors(s: Shape, rng: np.random.Generator):  # type: ignore[no-untyped-def]
    """Name and float32 values of each tensor, one at a time."""

    def matrix(n_out: int, n_in: int, gain: float = 1.0) -> np.ndarray:
        # Rows and columns of different size, so that no two heads or channels look alike.
        rows = rng.uniform(0.6, 1.5, (n_out, 1)).astype(np.float32)
        columns = rng.uniform(0.6, 1.5, n_in).astype(np.float32)
        return rng.standard_normal((n_out, n_in), np.float32) * rows * columns * np.float32(gain / np.sqrt(n_in))

    def norm(n: int, mean: float = 1.0) -> np.ndarray:
        return (mean * rng.uniform(0.4, 1.6, n)).astype(np.float32)

    embedding = matrix(s.n_vocab, s.n_embd, gain=0.05 * np.sqrt(s.n_embd))
    if s.loud:
        embedding[:, 1] *= 0.01
        embedding[_BOS, 1] = 1.5  # what the feed-forward of layer 1 recognises
    yield "token_embd.weight", embedding
    qkv_bias = s.arch == "qwen2" if s.bias is None else s.bias
    growth = 400.0 ** (1 / s.n_layer) if s.loud else 1.3
    for n in range(s.n_layer):
        blk, gain = f"blk.{n}", 0.05 * growth**n
        yield f"{blk}.attn_norm.weight", norm(s.n_embd)
        for name, heads in (("q", s.n_head), ("k", s.n_head_kv), ("v", s.n_head_kv)):
            yield f"{blk}.attn_{name}.weight", matrix(heads * s.d, s.n_embd, gain=1.0 + 0.02 * (n % 5))
            if qkv_bias:
                bias = rng.standard_normal(heads * s.d, np.float32)
                if s.loud and name == "k":  # Qwen2.5-7B has K biases of 605, in channels that turn slowly
                    bias.reshape(heads, s.d)[:, s.d // 2 - 1] = rng.uniform(-60, 60, heads)
                yield f"{blk}.attn_{name}.bias", bias
        if s.arch == "qwen3":
            yield f"{blk}.attn_q_norm.weight", norm(s.d)
            yield f"{blk}.attn_k_norm.weight", norm(s.d)
        yield f"{blk}.attn_output.weight", matrix(s.n_embd, s.n_head * s.d, gain)
        yield f"{blk}.ffn_norm.weight", norm(s.n_embd)
        gate, up = matrix(s.n_ff, s.n_embd), matrix(s.n_ff, s.n_embd)
        down = matrix(s.n_embd, s.n_ff, 2 * gain)
        if s.loud and n == min(1, s.n_layer - 1):  # a massive activation (https://arxiv.org/abs/2402.17762)
            gate[5, 1] = up[5, 1] = 6.0
            down[3, 5] = 1.5
        yield f"{blk}.ffn_gate.weight", gate
        yield f"{blk}.ffn_up.weight", up
        yield f"{blk}.ffn_down.weight", down
    if s.rope_factors:
        yield "rope_freqs.weight", np.geomspace(1.0, 8.0, s.d // 2).astype(np.float32)
    final = norm(s.n_embd, mean=7.14 if s.loud else 1.0)
    if s.loud:  # Qwen2.5-0.5B: from -0.0114 to 16.75 with mean 7.14
        final[2], final[7] = -0.0114, 16.75
    yield "output_norm.weight", final
    if not s.tied:
        yield "output.weight", matrix(s.n_vocab, s.n_embd)
