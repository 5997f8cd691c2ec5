"""Hyper-parameters of a model, from its GGUF metadata. Defaults are llama.cpp's (src/llama-model.cpp)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from tracediff.errors import ModelError
from tracediff.model.gguf_file import GGUFFile

Pairing = Literal["neighbours", "halves"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: which channels pair, and the angle of pair i at position p.

    angle = p * theta**(-2i/n_rot) / factor_i, then scaled by `freq_scale`, or mixed with it as YaRN does
    where `ext_factor` is not 0 (https://arxiv.org/abs/2309.00071; ggml-cpu/ops.cpp, `rope_yarn`).
    cos and sin are multiplied by `magnitude`.
    """

    pairing: Pairing
    n_rot: int
    theta: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    magnitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0


@dataclass(frozen=True, slots=True)
class HParams:
    """What a family needs to know to build its graph."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    eps: float
    attention_scale: float
    rope: Rope


def read_hparams(file: GGUFFile, pairing: Pairing) -> HParams:
    """The hyper-parameters of `file`; raises ModelError when a required key is missing or unsupported."""
    arch = str(file.metadata["general.architecture"])

    def required(key: str) -> Any:
        if f"{arch}.{key}" not in file.metadata:
            raise ModelError(
                f"{file.path}: the required metadata key '{arch}.{key}' is missing. "
                "Convert the model again with a current convert_hf_to_gguf.py."
            )
        return optional(key, None)

    def optional(key: str, default: Any) -> Any:
        value = file.metadata.get(f"{arch}.{key}", default)
        if isinstance(value, list):  # one value per layer
            if len(set(value)) != 1:
                raise ModelError(f"{file.path}: '{arch}.{key}' differs between layers, which is not supported yet.")
            return value[0]
        return value

    if optional("expert_count", 0):
        raise ModelError(f"{file.path}: mixture-of-experts models ('{arch}.expert_count') are not supported yet.")
    n_embd, n_head = int(required("embedding_length")), int(required("attention.head_count"))
    head_dim = int(optional("attention.key_length", n_embd // max(n_head, 1)))
    hparams = HParams(
        arch=arch,
        n_layer=int(required("block_count")),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=int(optional("attention.head_count_kv", n_head)),
        head_dim=head_dim,
        n_ff=int(required("feed_forward_length")),
        n_vocab=_n_vocab(file),
        n_ctx=int(required("context_length")),
        eps=float(required("attention.layer_norm_rms_epsilon")),
        attention_scale=float(optional("attention.scale", 0.0)) or 1.0 / math.sqrt(max(head_dim, 1)),
        rope=_rope(file, optional, pairing, head_dim),
    )
    _check(file, hparams, int(optional("attention.value_length", head_dim)))
    return hparams


def _n_vocab(file: GGUFFile) -> int:
    """Rows of the embedding, the only vocabulary size that cannot lie (padding is real: 151,643 or 151,936)."""
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: the required tensor 'token_embd.weight' is missing. Convert it again.")
    return file.tensors["token_embd.weight"].shape[0]


def _check(file: GGUFFile, h: HParams, value_length: int) -> None:
    counts = (h.n_layer, h.n_embd, h.n_head, h.n_head_kv, h.head_dim, h.n_ff, h.n_ctx)
    if min(counts) < 1 or h.n_head % h.n_head_kv or value_length != h.head_dim:
        raise ModelError(
            f"{file.path}: impossible hyper-parameters: {h.n_layer} layers, width {h.n_embd}, "
            f"{h.n_head}/{h.n_head_kv} heads of {h.head_dim} (V {value_length}), feed-forward {h.n_ff}."
        )
    if h.rope.n_rot % 2 or h.rope.n_rot > h.head_dim:
        raise ModelError(f"{file.path}: rotary dimension {h.rope.n_rot} does not fit heads of {h.head_dim} channels.")


def _rope(file: GGUFFile, optional: Any, pairing: Pairing, head_dim: int) -> Rope:
    """Scaling as llama.cpp computes it (src/llama-context.cpp, constructor; ggml-cpu/ops.cpp, `rope_yarn`)."""
    scaling = str(optional("rope.scaling.type", "linear"))
    if scaling not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{file.path}: rope scaling {scaling!r} is not supported (none, linear, yarn, and the llama3 "
            "factors of 'rope_freqs.weight' are)."
        )
    factor = float(optional("rope.scaling.factor", optional("rope.scale_linear", 0.0)) or 1.0)
    if scaling == "none":
        factor = 1.0
    yarn = scaling == "yarn"
    # llama.cpp multiplies get_mscale(factor), divides by 1 + 0.1 ln(factor), and ggml multiplies by it again.
    magnitude = 1.0 + 0.1 * math.log(factor) if yarn and factor > 1.0 else 1.0
    return Rope(
        pairing=pairing,
        n_rot=int(optional("rope.dimension_count", head_dim)),
        theta=float(optional("rope.freq_base", 10000.0)),
        freq_scale=1.0 / factor,
        ext_factor=1.0 if yarn else 0.0,
        magnitude=magnitude * float(optional("rope.scaling.attn_factor", 1.0)),
        n_ctx_orig=int(optional("rope.scaling.original_context_length", optional("context_length", 0))),
    )
