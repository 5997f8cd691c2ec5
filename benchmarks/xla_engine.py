"""A llama engine in JAX, on whatever device it finds: each layer in one `jax.jit`, attention as everybody writes it.

For gpu.py, and by itself: `python benchmarks/xla_engine.py MODEL OUT f32|bf16|f16 all|layers`. Reads GGUF files of
llama with weights in F16. Needs `pip install jax`.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from tracediff.trace.writer import TraceWriter

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
PROMPT = [256, *((37 * i + 11) % 250 for i in range(63))]


def trace(model: Path, out: Path, dtype: str, capture: str, tokens: list[int], n_decode: int) -> None:
    """A prompt and greedy tokens; with `layers` nothing but hidden states leaves what is compiled."""
    import jax
    import jax.numpy as jnp

    reader, kind = GGUFReader(model), {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}[dtype]
    names = ("block_count", "attention.head_count", "attention.head_count_kv", "rope.freq_base")
    n_layer, n_head, n_head_kv, theta = (reader.fields[f"llama.{name}"].contents() for name in names)
    eps = reader.fields["llama.attention.layer_norm_rms_epsilon"].contents()
    weights = {
        tensor.name.removesuffix(".weight"): jnp.asarray(
            np.asarray(tensor.data, np.float32).reshape([int(n) for n in tensor.shape[::-1]]), kind
        )
        for tensor in reader.tensors
    }
    width = len(weights["blk.0.attn_q"]) // n_head

    def norm(x: Any, weight: Any) -> Any:
        wide = x.astype(jnp.float32)
        scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
        return (scaled * weight.astype(jnp.float32)).astype(kind)

    def rope(x: Any, positions: Any) -> Any:
        rates = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
        angles = positions[:, None].astype(jnp.float32) * rates
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        one, other = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
        return jnp.stack([one * cos - other * sin, one * sin + other * cos], -1).reshape(x.shape).astype(kind)

    def layer(x: Any, own: Any, k_before: Any, v_before: Any, positions: Any) -> Any:
        made, n = {}, len(x)
        h = made["attn_norm"] = norm(x, own["attn_norm"])
        q, k, v = ((h @ own[f"attn_{name}"].T).reshape(n, -1, width) for name in "qkv")
        made |= {"attn_q": q, "attn_k": k, "attn_v": v}
        q, k = made["attn_q_rope"], made["attn_k_rope"] = rope(q, positions), rope(k, positions)
        keys, values = jnp.concatenate([k_before, k]), jnp.concatenate([v_before, v])
        of_heads = partial(jnp.repeat, repeats=n_head // n_head_kv, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, of_heads(keys), preferred_element_type=jnp.float32) * width**-0.5
        scores = jnp.where(jnp.arange(len(keys))[None] <= positions[:, None], scores, -jnp.inf)
        shares = jax.nn.softmax(scores, -1).astype(kind)
        h = made["attn_kqv"] = jnp.einsum("hqk,khd->qhd", shares, of_heads(values)).reshape(n, -1)
        h = made["attn_output"] = h @ own["attn_output"].T
        x = made["attn_residual"] = x + h
        h = made["ffn_norm"] = norm(x, own["ffn_norm"])
        gate, up = made["ffn_gate"], made["ffn_up"] = h @ own["ffn_gate"].T, h @ own["ffn_up"].T
        h = made["ffn_act"] = jax.nn.silu(gate) * up
        h = made["ffn_down"] = h @ own["ffn_down"].T
        x = made["ffn_residual"] = x + h
        return x, keys, values, made if capture == "all" else {"ffn_residual": x}

    def head(x: Any) -> Any:
        normed = norm(x, weights["output_norm"])
        return normed, normed @ weights.get("output", weights["token_embd"]).T

    in_layer, in_head = jax.jit(layer), jax.jit(head)
    caches = [(jnp.zeros((0, n_head_kv, width), kind),) * 2] * n_layer
    at = 0
    with TraceWriter(out, f"jax {jax.__version__}", "llama", model.name) as writer:
        for step in range(1 + n_decode):
            positions = jnp.arange(at, at + len(tokens))
            writer.step(step, tokens, range(at, at + len(tokens)))
            x = weights["token_embd"][jnp.array(tokens)]
            values = {"token_embd": x}
            for i in range(n_layer):
                own = {name: weights[f"blk.{i}.{name}"] for name in (*MATRICES, "attn_norm", "ffn_norm")}
                x, *cache, made = in_layer(x, own, *caches[i], positions)
                caches[i] = (cache[0], cache[1])
                values |= {f"blk.{i}.{name}": value for name, value in made.items()}
            normed, logits = in_head(x)
            values |= {"output_norm": normed, "output": logits} if capture == "all" else {"output": logits}
            for name, value in values.items():
                bits = np.asarray(value)
                writer.op(step, name, bits.view(np.uint16) if dtype == "bf16" else bits, dtype)  # type: ignore[arg-type]
            at, tokens = at + len(tokens), [int(jnp.argmax(logits[-1]))]


if __name__ == "__main__":
    path, to, dtype, capture = sys.argv[1:]
    trace(Path(path), Path(to), dtype, capture, PROMPT, 2)
