"""The one table of op names: what each holds, its kind, and what others call it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Name:
    """A canonical op. `local` is the name without `blk.N.`; foreign names are those of one layer."""

    local: str
    kind: str
    value: str
    llama_cpp: str | None = None  # as llm_graph_context::cb() names it (src/models/*.cpp)


NAMES = {
    name.local: name
    for name in (
        Name("token_embd", "embedding", "embedding rows", "inp_embd"),
        Name("attn_norm", "rms_norm", "RMS norm, times weight", "attn_norm"),
        Name("attn_q", "linear", "Q projection, with its bias"),
        Name("attn_k", "linear", "K projection, with its bias"),
        Name("attn_v", "linear", "V projection, with its bias"),
        Name("attn_q_norm", "rms_norm", "per-head RMS norm of Q", "Qcur_normed"),
        Name("attn_k_norm", "rms_norm", "per-head RMS norm of K", "Kcur_normed"),
        Name("attn_q_rope", "rope", "Q after rotary embedding", "Qcur"),
        Name("attn_k_rope", "rope", "K after rotary embedding", "Kcur"),
        Name("attn_scores", "scores", "q.k, before scale and mask", "kq"),
        Name("attn_scores_scaled", "scores", "q.k times scale, before the mask"),
        Name("attn_probs", "softmax", "softmax of scaled, masked scores", "kq_soft_max"),
        Name("attn_kqv", "weighted_values", "probs times V, heads side by side", "kqv_out"),
        Name("attn_output", "linear", "attention's output projection", "attn_out"),
        Name("attn_residual", "add", "attn_output + the layer's input", "ffn_inp"),
        Name("ffn_norm", "rms_norm", "RMS norm, times weight", "ffn_norm"),
        Name("ffn_gate", "linear", "gate projection", "ffn_gate"),
        Name("ffn_up", "linear", "up projection", "ffn_up"),
        Name("ffn_act", "swiglu", "silu(gate) * up", "ffn_swiglu"),
        Name("ffn_down", "linear", "down projection", "ffn_out"),
        Name("ffn_residual", "add", "ffn_down + attn_residual: the layer's output", "l_out"),
        Name("output_norm", "rms_norm", "final RMS norm, times weight", "result_norm"),
        Name("output", "linear", "logits", "result_output"),
    )
}

Capture = Literal["all", "layers", "stats"]
_HIDDEN_STATES = ("token_embd", "ffn_residual", "output_norm", "output")


def wanted(op: str, capture: Capture) -> bool:
    """Whether a capture records the op at all: `layers` keeps the hidden state after each layer, and the logits."""
    return capture != "layers" or split(op)[1] in _HIDDEN_STATES


def split(op: str) -> tuple[int | None, str]:
    """The layer and local name of an op: ("blk.3.attn_q") -> (3, "attn_q"); ("output") -> (None, "output")."""
    head, _, rest = op.partition(".")
    number, _, local = rest.partition(".")
    if head == "blk" and number.isascii() and number.isdigit() and local:
        return int(number), local
    return None, op


def layer_of(op: str) -> int | None:
    """The layer of an op, None for those outside the blocks."""
    return split(op)[0]


def kind_of(op: str) -> str:
    """The kind of an op by its name: "unknown" for names that are not in the table."""
    name = NAMES.get(split(op)[1])
    return name.kind if name else "unknown"
