"""The one table of op names: what each holds, its kind, and what others call it."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Self


@dataclass(frozen=True, slots=True)
class Name:
    """A canonical op. `local` is the name without `blk.N.`; in foreign names N stands for the layer's number."""

    local: str
    kind: str
    value: str
    llama_cpp: str | None = None  # as llm_graph_context::cb() names it (src/models/*.cpp), of one layer
    transformers: str | None = None  # the module whose output it is (models/llama/modeling_llama.py), without `model.`
    transformer_lens: str | None = None  # the hook point (transformer_lens/components/)
    sglang: str | None = None  # what its dumper calls the output (srt/models/llama.py), without `model.`


# fmt: off
NAMES = {
    name.local: name
    for name in (
        Name("token_embd", "embedding", "embedding rows", "inp_embd",
             "embed_tokens", "hook_embed", "embed_tokens"),
        Name("attn_norm", "rms_norm", "RMS norm, times weight", "attn_norm",
             "layers.N.input_layernorm", None, "layers.N.input_layernorm"),
        Name("attn_q", "linear", "Q projection, with its bias", None,
             "layers.N.self_attn.q_proj", "blocks.N.attn.hook_q", "layers.N.self_attn.q_proj"),
        Name("attn_k", "linear", "K projection, with its bias", None,
             "layers.N.self_attn.k_proj", "blocks.N.attn.hook_k", "layers.N.self_attn.k_proj"),
        Name("attn_v", "linear", "V projection, with its bias", "Vcur",
             "layers.N.self_attn.v_proj", "blocks.N.attn.hook_v", "layers.N.self_attn.v_proj"),
        Name("attn_q_norm", "rms_norm", "per-head RMS norm of Q", "Qcur_normed",
             "layers.N.self_attn.q_norm", None, "layers.N.self_attn.q_norm"),
        Name("attn_k_norm", "rms_norm", "per-head RMS norm of K", "Kcur_normed",
             "layers.N.self_attn.k_norm", None, "layers.N.self_attn.k_norm"),
        Name("attn_q_rope", "rope", "Q after rotary embedding", "Qcur",
             None, "blocks.N.attn.hook_rot_q", "layers.N.self_attn.rotary_emb.output.0"),
        Name("attn_k_rope", "rope", "K after rotary embedding", "Kcur",
             None, "blocks.N.attn.hook_rot_k", "layers.N.self_attn.rotary_emb.output.1"),
        Name("attn_scores", "scores", "q.k, before scale and mask", "kq"),
        Name("attn_scores_scaled", "scores", "q.k times scale, before the mask", None,
             None, "blocks.N.attn.hook_attn_scores"),
        Name("attn_probs", "softmax", "softmax of scaled, masked scores", "kq_soft_max",
             None, "blocks.N.attn.hook_pattern"),
        Name("attn_kqv", "weighted_values", "probs times V, heads side by side", "kqv_out",
             None, "blocks.N.attn.hook_z", "layers.N.self_attn.attn"),
        Name("attn_output", "linear", "attention's output projection", "attn_out",
             "layers.N.self_attn.o_proj", "blocks.N.hook_attn_out", "layers.N.self_attn.o_proj"),
        Name("attn_residual", "add", "attn_output + the layer's input", "ffn_inp",
             None, "blocks.N.hook_resid_mid", "layers.N.post_attention_layernorm.output.1"),
        Name("ffn_norm", "rms_norm", "RMS norm, times weight", "ffn_norm",
             "layers.N.post_attention_layernorm", None, "layers.N.post_attention_layernorm"),
        Name("ffn_gate", "linear", "gate projection", "ffn_gate",
             "layers.N.mlp.gate_proj", "blocks.N.mlp.hook_pre"),
        Name("ffn_up", "linear", "up projection", "ffn_up",
             "layers.N.mlp.up_proj", "blocks.N.mlp.hook_pre_linear"),
        Name("ffn_act", "swiglu", "silu(gate) * up", "ffn_swiglu",
             None, "blocks.N.mlp.hook_post", "layers.N.mlp.act_fn"),
        Name("ffn_down", "linear", "down projection", "ffn_out",
             "layers.N.mlp.down_proj", "blocks.N.hook_mlp_out", "layers.N.mlp.down_proj"),
        Name("ffn_residual", "add", "ffn_down + attn_residual: the layer's output", "l_out",
             "layers.N", "blocks.N.hook_resid_post"),
        Name("output_norm", "rms_norm", "final RMS norm, times weight", "result_norm",
             "norm", None, "norm"),
        Name("output", "linear", "logits", "result_output",
             "lm_head"),
        Name("token_logprobs", "logprobs", "log-probability of each token given those before it"),
    )
}
# fmt: on

# Other names of the same values; N+1 reads the number of the layer after.
ALIASES = {
    "llama_cpp": {
        "embd": "token_embd",  # before llama.cpp called it inp_embd, and again since
        "inp_scaled": "token_embd_scaled",
        "inp_embd_scaled": "token_embd_scaled",
        "sa_out": "attn_residual",
        "ffn_geglu": "ffn_act",
        "ffn_reglu": "ffn_act",
        "ffn_gelu": "ffn_act",
        "ffn_relu": "ffn_act",
        "Qcur_rope": "attn_q_rope",
        "Kcur_rope": "attn_k_rope",
        "Qcur_pos": "attn_q_rope",
        "Kcur_pos": "attn_k_rope",
        "Qcur-post-rope": "attn_q_rope",
        "Kcur-post-rope": "attn_k_rope",
        "Qcur_norm": "attn_q_norm",
        "Kcur_norm": "attn_k_norm",
        "layer_out": "ffn_residual",
        "l_last": "ffn_residual",
        "nemotron_h_block_out": "ffn_residual",
    },
    "transformers": {"layers.N.self_attn": "attn_output", "layers.N.mlp": "ffn_down"},
    "transformer_lens": {"blocks.0.hook_resid_pre": "token_embd", "blocks.N+1.hook_resid_pre": "ffn_residual"},
    # A norm that is given a residual adds it first and returns the sum as its second output.
    "sglang": {
        "layers.N.self_attn": "attn_output",
        "layers.N.mlp": "ffn_down",
        "layers.N+1.input_layernorm.output.1": "ffn_residual",
    },
}
# Foreign values that are known and are no op's output: regular expressions, and what they are.
NOT_OPS = {
    "llama_cpp": {
        r"[QK]cur-N": "one name for several tensors (before and after bias and rope): say which with --map",
    },
    "transformers": {
        r"layers\.N\.mlp\.act_fn": "silu(gate), not yet multiplied with up",
        r"(layers\.N\.self_attn\.)?rotary_emb(\.output\.1)?": "cosines and sines",
    },
    "transformer_lens": {
        r"(blocks\.N\.ln[12]|ln_final)\.hook_normalized": "an RMS norm before its weight",
        r".*\.hook_scale": "the divisor of an RMS norm",
    },
    "sglang": {
        r"(.*\.)?inputs\..*": "an input, which is some other module's output",
        r"layers\.N\.self_attn\.qkv_proj|layers\.N\.mlp\.gate_up_proj": "several ops' outputs side by side",
        r"layers\.N(\.output\.1)?": "one of the two terms that the next norm adds",
        r"norm\.output\.1": "the last layer's output, whose number it does not say: map it with --map",
    },
}

TOKEN_LOGPROBS = "token_logprobs"  # [T], in nats, of each token of the step; no op, but all that some engines tell
Capture = Literal["all", "layers", "stats", "sketch"]
_DIGITS = 10  # of a layer's number, below it
# Layers end in a sum, or in the norm of it (BERT and its heirs); and the logits, which they end in.
HIDDEN_STATES = ("token_embd", "ffn_residual", "layer_output_norm", "output_norm", "output")


def wanted(op: str, capture: Capture) -> bool:
    """Whether a capture records the op at all: `layers` keeps the hidden state after each layer, and the logits."""
    return capture != "layers" or split(op)[1] in HIDDEN_STATES


@lru_cache(1 << 14)  # every record of every step is asked, and models have some thousand names
def split(op: str) -> tuple[int | None, str]:
    """The layer and local name of an op: ("blk.3.attn_q") -> (3, "attn_q"); ("output") -> (None, "output")."""
    head, _, rest = op.partition(".")
    number, _, local = rest.partition(".")
    if head == "blk" and number.isascii() and number.isdigit() and len(number) < _DIGITS and local:
        return int(number), local
    return None, op


def layer_of(op: str) -> int | None:
    """The layer of an op, None for those outside the blocks."""
    return split(op)[0]


def local_name(op: str) -> str:
    """The op's name without its layer."""
    return split(op)[1]


def in_layer_of(op: str, name: str) -> str:
    """What an op reads, by its own name in the op's layer; of another layer it is the stream."""
    layer, local = split(name)
    return local if layer == layer_of(op) else "the layer's input"


def is_choice(op: str) -> bool:
    """Whether it chooses keys (ggml_top_k, as a lifted graph calls it): in any order, and hidden ones as it happens."""
    return op.endswith(".top_k")


def is_mask(op: str) -> bool:
    """Whether it hides keys, by -inf."""
    return "mask" in local_name(op)


def layers_of(ops: Iterable[str]) -> list[int]:
    """The layers that these ops are in, in order."""
    return sorted({layer for layer in map(layer_of, ops) if layer is not None})


def matches(op: str, pattern: str) -> bool:
    """Whether the op's name, or its local name, is one of the pattern: * and ? stand for any characters."""
    return fnmatch.fnmatchcase(op, pattern) or fnmatch.fnmatchcase(local_name(op), pattern)


NORMS = ("rms_norm", "layer_norm")  # kinds of norms over channels, which have weights
TABLED = ("gelu", "geglu", "gelu_quick", "geglu_quick")  # which ggml looks up in tables of float16
# Kinds whose value is one row, of all tokens and of the states that they leave, or of a state.
_IN_ONE_ROW = ("ssm_scan", "gated_delta_net", "gated_linear_attn", "rwkv_wkv6", "rwkv_wkv7", "state")
_OF_KEYS = ("scores", "softmax")  # kinds; llama.cpp's names of what is made of scores before that begin with kq_
_BY_HEAD = ("attn_k_b", "attn_v_b")
# Parts of the names of what a mixture has of each chosen expert; of two axes what the last two name.
_OF_SLOTS = ("_exps", "ffn_moe_", "ffn_moe_topk", "ffn_moe_weights")


def axes_of(op: str, n: int, kind: str = "unknown") -> tuple[str, ...]:
    """What the indices of an op's `n` axes count; none for a shape that no op has. A name may not say the kind."""
    if n == 3 and (kind in _OF_KEYS or kind_of(op) in _OF_KEYS or local_name(op).startswith("kq_")):
        return "head", "token", "key"
    if n == 3 and token_axis(op) == 1:
        return "head", "token", "channel"
    if n > 1 and any(part in op for part in _OF_SLOTS[0 if n == 3 else 2 :]):
        return ("token", "slot", "channel")[:n]
    if n == 1 and kind in _IN_ONE_ROW:
        return ("value",)
    return {1: ("token",), 2: ("token", "channel"), 3: ("token", "head", "channel")}.get(n, ())


def kind_of(op: str) -> str:
    """The kind of an op by its name: "unknown" for names that are not in the table."""
    name = NAMES.get(local_name(op))
    return name.kind if name else "unknown"


@lru_cache(1 << 14)
def token_axis(op: str) -> int:
    """The axis of an op's output that counts tokens, by its name: heads come before it in scores and probabilities, and
    in what latent attention multiplies head by head.
    """
    name = local_name(op)
    return 1 if kind_of(op) in _OF_KEYS or name.startswith("kq_") or name in _BY_HEAD else 0


class StepOf(int):
    """A step of one of several sequences: a number unlike those of other sequences, in whose order it comes.

    It reads as "3 of sequence 1", behind the word step. Of sequence 0 it equals the plain number, so that such a trace
    goes together with one of that sequence alone.
    """

    _SHIFT = 32  # sequences are below 2^20, and a double, which JSON has in browsers, holds 53 bits

    def __new__(cls, step: int, sequence: int) -> Self:
        """Of a step's number in the file and its sequence's."""
        return super().__new__(cls, sequence << cls._SHIFT | step)

    def __reduce__(self) -> tuple[type[Self], tuple[int, int]]:
        """In another process it is made again."""
        return type(self), (self.step, self.sequence)

    @property
    def step(self) -> int:
        """The number in the file."""
        return self & ((1 << self._SHIFT) - 1)

    @property
    def sequence(self) -> int:
        """Whose step it is."""
        return self >> self._SHIFT

    def __str__(self) -> str:
        return f"{self.step} of sequence {self.sequence}"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def sequence_of(step: int) -> int:
    """Whose step it is; of one sequence 0."""
    return step.sequence if isinstance(step, StepOf) else 0


def plain_step(step: int) -> int:
    """A step's number in the file."""
    return step.step if isinstance(step, StepOf) else step
