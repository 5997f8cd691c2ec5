"""Model families: the forward pass, to be read beside the papers. Each call appends an op to the graph."""

from collections.abc import Callable
from pathlib import Path

from tracediff.errors import ModelError
from tracediff.model.builder import Builder
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph
from tracediff.model.hparams import Pairing, read_hparams
from tracediff.model.lift.described import describe
from tracediff.model.lift.lift import lift

Position = Callable[[Builder, str, str, str], tuple[str, str]]  # (graph, q, k, block) -> q, k ready for attention


def decoder(g: Builder, position: Position) -> None:
    """A pre-norm decoder with grouped-query attention and a gated MLP; `position` is what families differ in."""
    x = g.embedding("token_embd")
    for blk in g.blocks():
        q, k, v = qkv(g, g.rms_norm(x, f"{blk}.attn_norm"), blk)
        q, k = position(g, q, k, blk)
        kqv = g.attention(q, k, v, blk)
        x = g.add(g.linear(kqv, f"{blk}.attn_output", g.hparams.n_embd), x, f"{blk}.attn_residual")
        x = g.add(swiglu_mlp(g, g.rms_norm(x, f"{blk}.ffn_norm"), blk), x, f"{blk}.ffn_residual")
    # A model without an output matrix shares the embedding's.
    tensor = "output" if g.has("output.weight") else "token_embd"
    g.linear(g.rms_norm(x, "output_norm"), "output", g.hparams.n_vocab, tensor=tensor)


def llama(g: Builder, q: str, k: str, blk: str) -> tuple[str, str]:
    """Llama 1/2/3, TinyLlama, Mistral (https://arxiv.org/abs/2302.13971); factors stretch Llama 3.1's rope."""
    factors = "rope_freqs.weight"
    return g.rope(q, f"{blk}.attn_q_rope", factors), g.rope(k, f"{blk}.attn_k_rope", factors)


def qwen2(g: Builder, q: str, k: str, blk: str) -> tuple[str, str]:
    """Qwen2, Qwen2.5 (https://arxiv.org/abs/2407.10671): biases on Q, K and V, which `linear` finds itself."""
    return g.rope(q, f"{blk}.attn_q_rope"), g.rope(k, f"{blk}.attn_k_rope")


def qwen3(g: Builder, q: str, k: str, blk: str) -> tuple[str, str]:
    """Qwen3 dense (https://arxiv.org/abs/2505.09388): each head of Q and K is normed before rope."""
    q, k = g.rms_norm(q, f"{blk}.attn_q_norm"), g.rms_norm(k, f"{blk}.attn_k_norm")
    return g.rope(q, f"{blk}.attn_q_rope"), g.rope(k, f"{blk}.attn_k_rope")


def qkv(g: Builder, x: str, blk: str) -> tuple[str, str, str]:
    """The three projections of attention, split into heads."""
    h = g.hparams
    return (
        g.linear(x, f"{blk}.attn_q", h.n_head, h.head_dim),
        g.linear(x, f"{blk}.attn_k", h.n_head_kv, h.head_dim),
        g.linear(x, f"{blk}.attn_v", h.n_head_kv, h.head_dim),
    )


def swiglu_mlp(g: Builder, x: str, blk: str) -> str:
    """The gated feed-forward network."""
    h = g.hparams
    gate, up = g.linear(x, f"{blk}.ffn_gate", h.n_ff), g.linear(x, f"{blk}.ffn_up", h.n_ff)
    return g.linear(g.swiglu(gate, up, f"{blk}.ffn_act"), f"{blk}.ffn_down", h.n_embd)


# Which channels rope pairs is a fact of the architecture (llama_model_rope_type, src/llama-model.cpp).
FAMILIES: dict[str, tuple[Position, Pairing]] = {
    "llama": (llama, "neighbours"),
    "qwen2": (qwen2, "halves"),
    "qwen3": (qwen3, "halves"),
}


def has_family(file: GGUFFile) -> bool:
    """Whether a hand-written family describes the model; none describes a mixture of experts."""
    arch = file.metadata.get("general.architecture")
    return arch in FAMILIES and not file.metadata.get(f"{arch}.expert_count")


def build_graph(file: GGUFFile) -> Graph:
    """The op graph of a GGUF file: its family's, or lifted from llama.cpp's own where there is none.

    Raises ModelError for a file that does not fit its family, EngineError for one that llama.cpp does not take.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{file.path}: 'general.architecture' is {arch!r}, not a name. Convert the model again.")
    if not has_family(file):
        return lift(describe(file), file).graph
    position, pairing = FAMILIES[arch]
    builder = Builder(read_hparams(file, pairing), file)
    decoder(builder, position)
    return builder.build()


def load_graph(path: Path) -> Graph:
    """The op graph of the GGUF file at `path`."""
    return build_graph(GGUFFile(path))
