"""Hyper-parameters of a model, from its GGUF metadata. Defaults are llama.cpp's (src/llama-model.cpp)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tracediff.errors import EngineError, ModelError
from tracediff.model.gguf_file import GGUFFile

Pairing = Literal["neighbours", "halves"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: which channels pair, and the angle of pair i at position p.

    angle = p * theta**(-2i/n_rot) / factor_i, then scaled by `freq_scale`, or mixed with it as YaRN does
    where `ext_factor` is not 0 (https://arxiv.org/abs/2309.00071; ggml-cpu/ops.cpp, `rope_yarn`).
    cos and sin are multiplied by `magnitude`. The channels that turn begin with channel `first`.
    Where it turns `back`, by the angle's negative.
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
    first: int = 0
    back: bool = False


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


def parse_tokens(text: str) -> tuple[int, ...]:
    """The ids of a list such as 1,2,3; raises EngineError for anything else."""
    try:
        ids = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise EngineError(f"--tokens {text!r}: ids are whole numbers with commas between, as in 1,2,3.") from None
    if not ids:
        raise EngineError("the prompt is empty: --tokens names no ids. Give some, as in 1,2,3.")
    return ids


def check_tokens(tokens: Iterable[int], n_vocab: int) -> None:
    """Raises EngineError for a token id that the embedding has no row for."""
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise EngineError(
                f"token id {token} is outside the vocabulary of {n_vocab:,} (0 to {n_vocab - 1}). "
                "Were the ids made by another model's tokenizer?"
            )


@dataclass(frozen=True, slots=True)
class _Keys:
    """The metadata of one architecture, of the type asked for. Without a default a key is required."""

    file: GGUFFile
    arch: str

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._value(key, default)
        if not isinstance(value, int):
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def _value(self, key: str, default: float | None) -> Any:
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise ModelError(
                f"{self.file.path}: the required metadata key '{self.arch}.{key}' is missing. "
                "Convert the model again with a current convert_hf_to_gguf.py."
            )
        if isinstance(value, list) and value:  # one value per layer
            if len(set(value)) != 1:
                raise ModelError(
                    f"{self.file.path}: '{self.arch}.{key}' differs between layers, which is not supported yet."
                )
            return value[0]
        return value

    def _wrong(self, key: str, value: object, expected: str) -> ModelError:
        return ModelError(
            f"{self.file.path}: '{self.arch}.{key}' is {value!r}, not {expected}. Convert the model again."
        )


def read_hparams(file: GGUFFile, pairing: Pairing) -> HParams:
    """The hyper-parameters of `file`; raises ModelError when a required key is missing or unsupported."""
    keys = _Keys(file, file.metadata["general.architecture"])
    n_embd, n_head = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", n_embd // max(n_head, 1))
    hparams = HParams(
        arch=keys.arch,
        n_layer=keys.integer("block_count"),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=keys.integer("attention.head_count_kv", n_head),
        head_dim=head_dim,
        n_ff=keys.integer("feed_forward_length"),
        n_vocab=_n_vocab(file),
        n_ctx=keys.integer("context_length"),
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        # llama.cpp reads attention.scale for other families (Granite), not for these: src/models/llama.cpp.
        attention_scale=1.0 / math.sqrt(max(head_dim, 1)),
        rope=_rope(keys, pairing, head_dim),
    )
    _check(file, hparams, keys.integer("attention.value_length", head_dim))
    return hparams


def guess_hparams(file: GGUFFile) -> HParams:
    """What the metadata of any architecture says: of what differs between layers the largest, of what it lacks 0."""
    arch = str(file.metadata.get("general.architecture"))

    def number(key: str, default: float = 0) -> Any:
        value = file.metadata.get(f"{arch}.{key}", default)
        found = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int | float)]
        return max(found, default=default)

    n_embd, n_head = int(number("embedding_length")), int(number("attention.head_count"))
    head_dim = int(number("attention.key_length", n_embd // max(n_head, 1)))
    return HParams(
        arch=arch,
        n_layer=int(number("block_count")),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=int(number("attention.head_count_kv", n_head)),
        head_dim=head_dim,
        n_ff=int(number("feed_forward_length")),
        n_vocab=_n_vocab(file),
        n_ctx=int(number("context_length")),
        eps=float(number("attention.layer_norm_rms_epsilon", number("attention.layer_norm_epsilon"))),
        attention_scale=1.0 / math.sqrt(max(head_dim, 1)),
        rope=Rope("halves", int(number("rope.dimension_count", head_dim)), float(number("rope.freq_base", 10000.0))),
    )


def _n_vocab(file: GGUFFile) -> int:
    """Rows of the embedding, the only vocabulary size that cannot lie (padding is real: 151,643 or 151,936)."""
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: the required tensor 'token_embd.weight' is missing. Convert it again.")
    return file.tensors["token_embd.weight"].shape[0]


def _check(file: GGUFFile, h: HParams, value_length: int) -> None:
    counts = (h.n_layer, h.n_embd, h.n_head, h.n_head_kv, h.head_dim, h.n_ff, h.n_ctx)
    if min(counts) < 1 or h.n_head % h.n_head_kv or value_length != h.head_dim or h.eps < 0:
        raise ModelError(
            f"{file.path}: impossible hyper-parameters: {h.n_layer} layers, width {h.n_embd}, "
            f"{h.n_head}/{h.n_head_kv} heads of {h.head_dim} (V {value_length}), feed-forward {h.n_ff}, "
            f"context {h.n_ctx}, epsilon {h.eps:g}. Convert the model again."
        )
    r = h.rope
    if r.n_rot % 2 or not 0 <= r.n_rot <= h.head_dim or r.theta <= 1 or r.freq_scale <= 0 or r.n_ctx_orig < 1:
        raise ModelError(
            f"{file.path}: impossible rotary embedding: dimension {r.n_rot} of heads of {h.head_dim} channels, base "
            f"{r.theta:g}, scale {r.freq_scale:g}, original context {r.n_ctx_orig}. Convert the model again."
        )


def yarn_magnitude(factor: float) -> float:
    """What YaRN multiplies cos and sin by, of a context stretched by `factor` (ggml-cpu/ops.cpp, `rope_yarn`)."""
    return 1.0 + 0.1 * math.log(factor)


def _rope(keys: _Keys, pairing: Pairing, head_dim: int) -> Rope:
    """Scaling as llama.cpp computes it (src/llama-context.cpp, constructor; ggml-cpu/ops.cpp, `rope_yarn`)."""
    scaling = keys.file.metadata.get(f"{keys.arch}.rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{keys.file.path}: rope scaling {scaling!r} is not supported (none, linear, yarn, and the llama3 "
            "factors of 'rope_freqs.weight' are)."
        )
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    if scaling == "none":
        factor = 1.0
    yarn = scaling == "yarn"
    # llama.cpp multiplies get_mscale(factor), divides by 1 + 0.1 ln(factor), and ggml multiplies by it again.
    magnitude = yarn_magnitude(factor) if yarn and factor > 1.0 else 1.0
    return Rope(
        pairing=pairing,
        n_rot=keys.integer("rope.dimension_count", head_dim),
        theta=keys.number("rope.freq_base", 10000.0),
        freq_scale=1.0 / factor,
        ext_factor=1.0 if yarn else 0.0,
        magnitude=magnitude * keys.number("rope.scaling.attn_factor", 1.0),
        n_ctx_orig=keys.integer("rope.scaling.original_context_length", keys.integer("context_length", 0)),
    )
