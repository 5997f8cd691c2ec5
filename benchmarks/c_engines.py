"""C engines that others wrote, from a folder with their source: compiled with taps, run, and traced.

    git clone https://github.com/karpathy/llama2.c && git clone https://github.com/adriancable/qwen3.c
    python benchmarks/real_engines.py --only .c \\
        --engine "llama2.c=python benchmarks/c_engines.py llama2.c/run.c {model} {tokens} {out}" \\
        --engine "llama2.c int8=python benchmarks/c_engines.py llama2.c/runq.c {model} {tokens} {out}" \\
        --engine "qwen3.c int8=python benchmarks/c_engines.py qwen3.c/runq.c {model} {tokens} {out}"

Their arithmetic is untouched: behind the lines of `forward` that make a value a call is put that writes it, and their
`main` is exchanged for one that feeds the tokens one by one. Each reads a format of its own, which is made of the GGUF
file's values as its own export script would: float32, or 8-bit groups. A source in which a line is not found where it
should be is another version, and is refused. Exit code 77: the engine cannot run this model.
"""

import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tracediff.model.model import Model

NOT_FOR_THIS_MODEL = 77
EMITTER = Path(__file__).parents[1] / "emitters" / "c"
GROUP = 64  # values that share a scale
LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down", "ffn_up")  # in the order of the files

PRELUDE = """
#define TRACEDIFF_IMPLEMENTATION
#include "tracediff.h"
static tracediff tapped;
static int tapped_step;
static float gathered[2][1 << 20];
static void tap(int layer, const char *op, const float *x, int64_t n)
{
    char name[64];
    int64_t shape[] = {1, n};
    if (layer < 0) snprintf(name, sizeof name, "%s", op);
    else snprintf(name, sizeof name, "blk.%d.%s", layer, op);
    tracediff_op(&tapped, tapped_step, name, TRACEDIFF_F32, shape, 2, x);
}
static void tap_head(int layer, const char *op, int head, int n_heads, const float *x, int64_t n, int keys)
{
    char name[64];
    int64_t heads[] = {1, n_heads, n}, of_keys[] = {n_heads, 1, n};
    float *into = gathered[!strcmp(op, "attn_probs")]; /* scores and probabilities of a head follow one another */
    memcpy(into + head * n, x, n * sizeof *x);
    if (head + 1 < n_heads) return;
    snprintf(name, sizeof name, "blk.%d.%s", layer, op);
    tracediff_op(&tapped, tapped_step, name, TRACEDIFF_F32, keys ? of_keys : heads, 3, into);
}
"""
MAIN = """
int main(int argc, char **argv)
{
    Transformer transformer;
    (void)argc;
    build_transformer(&transformer, argv[1]%s);
    tracediff_open(&tapped, argv[2], argv[3], argv[4], argv[5]);
    for (int32_t i = 0; i < argc - 6; i++) {
        int32_t token = atoi(argv[i + 6]);
        tapped_step = i;
        tracediff_step(&tapped, i, &token, &i, 1);
        forward(&transformer, token, i);
    }
    if (tracediff_close(&tapped) == 0) return 0;
    fprintf(stderr, "%%s\\n", tracediff_error(&tapped));
    return 1;
}
"""


@dataclass(frozen=True, slots=True)
class Tap:
    """A call put behind what matches `line`."""

    line: str
    call: str


def whole(op: str, line: str, pointer: str, size: str, layer: str = "l") -> Tap:
    """A value that lies at a pointer as one row."""
    return Tap(line, f'tap({layer}, "{op}", {pointer}, {size});')


def head(op: str, line: str, pointer: str, size: str, heads: str = "p->n_heads", keys: int = 0) -> Tap:
    """A value that is made head by head."""
    return Tap(line, f'tap_head(l, "{op}", h, {heads}, {pointer}, {size}, {keys});')


RESIDUAL = r"// residual connection\n[^\n{]*(\{)?\n\s*(?:s->)?x\[i\] \+= s->xb\[i\];(?(1)\s*\})"
SCALED = r"(?=// softmax the scores)"
TAPS = (
    whole("attn_norm", r"rmsnorm\(s->xb, (s->)?x, w->rms_att_weight[^;]*;", "s->xb", "p->dim"),
    whole("attn_q", r"matmul\(s->q, [^;]*;", "s->q", "p->n_heads * HEAD"),
    whole("attn_k", r"matmul\(s->k, [^;]*;", "s->k", "p->n_kv_heads * HEAD"),
    whole("attn_v", r"matmul\(s->v, [^;]*;", "s->v", "p->n_kv_heads * HEAD"),
    whole("attn_q_rope", r"(?=// multihead attention)", "s->q", "p->n_heads * HEAD"),
    whole("attn_k_rope", r"(?=// multihead attention)", "s->k", "p->n_kv_heads * HEAD"),
    head("attn_scores_scaled", SCALED, "att", "pos + 1", keys=1),
    head("attn_probs", r"softmax\(att, pos \+ 1\);", "att", "pos + 1", keys=1),
    whole("attn_kqv", r"(?=// final matmul to get the output of the attention)", "s->xb", "p->n_heads * HEAD"),
    whole("attn_residual", r"(?=// ffn rmsnorm)", "s->x", "p->dim"),
    whole("ffn_norm", r"rmsnorm\(s->xb, (s->)?x, w->rms_ffn_weight[^;]*;", "s->xb", "p->dim"),
    whole("ffn_gate", r"matmul\(s->hb, [^;]*;", "s->hb", "p->hidden_dim"),
    whole("ffn_up", r"matmul\(s->hb2, [^;]*;", "s->hb2", "p->hidden_dim"),
    whole("ffn_act", r"(?=// final matmul to get the output of the ffn)", "s->hb", "p->hidden_dim"),
    whole("ffn_down", r"matmul\(s->xb, (&s->hq|s->hb), [^;]*;", "s->xb", "p->dim"),
    whole("ffn_residual", RESIDUAL, "s->x", "p->dim"),
    whole("output_norm", r"rmsnorm\((s->)?x, (s->)?x, w->rms_final_weight[^;]*;", "s->x", "p->dim", "-1"),
    whole("output", r"matmul\(s->logits, [^;]*;", "s->logits", "p->vocab_size", "-1"),
    whole("token_embd", r"memcpy\((s->)?x, (content_row|w->token_embedding_table)[^;]*;", "s->x", "p->dim", "-1"),
)
LLAMA = (*TAPS, whole("attn_output", r"matmul\(s->xb2, [^;]*;", "s->xb2", "p->dim"))
QWEN3 = (
    *TAPS,
    whole("attn_output", r"matmul\(s->xb, &s->xq, w->wo[^;]*;", "s->xb", "p->dim"),
    head("attn_q_norm", r"rmsnorm\(q, q, [^;]*;", "q", "HEAD"),
    head("attn_k_norm", r"rmsnorm\(k, k, [^;]*;", "k", "HEAD", "p->n_kv_heads"),
)


def floats(model: Model, names: list[str]) -> Iterator[bytes]:
    """The values of some tensors as float32, one after the other."""
    for name in names:
        yield model.tensors.get(f"{name}.weight").astype(np.float32).tobytes()


def groups(model: Model, names: list[str]) -> Iterator[bytes]:
    """The same as int8 and a float32 scale for each group, as the export scripts of both engines round."""
    for name in names:
        values = model.tensors.get(f"{name}.weight").astype(np.float32).reshape(-1, GROUP)
        scales = (np.abs(values).max(1) / np.float32(127.0)).astype(np.float32)
        yield np.round(values / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8).tobytes() + scales.tobytes()


def of_layers(model: Model, *ops: str) -> list[str]:
    """One op of all layers, then the next."""
    return [f"blk.{layer}.{op}" for op in ops for layer in range(model.graph.hparams.n_layer)]


def sizes(model: Model) -> tuple[int, ...]:
    """What every header begins with."""
    h = model.graph.hparams
    return h.n_embd, h.n_ff, h.n_layer, h.n_head, h.n_head_kv, h.n_vocab, 64


def head_of(model: Model) -> list[str]:
    """The head, where it is not the embedding."""
    return ["output"] if "output.weight" in model.tensors else []


def llama_floats(model: Model) -> Iterator[bytes]:
    """llama2.c's first format: the sign of the vocabulary says whether the head is the embedding."""
    *most, n_vocab, n_ctx = sizes(model)
    yield struct.pack("7i", *most, -n_vocab if head_of(model) else n_vocab, n_ctx)
    layers = of_layers(model, "attn_norm", *LAYER[:4], "ffn_norm", *LAYER[4:])
    yield from floats(model, ["token_embd", *layers, "output_norm"])
    yield bytes(4 * n_ctx * model.graph.hparams.head_dim)  # a table of rope that is read no more
    yield from floats(model, head_of(model))


def llama_groups(model: Model) -> Iterator[bytes]:
    """llama2.c's version 2."""
    header = struct.pack("<Ii7iBi", 0x616B3432, 2, *sizes(model), not head_of(model), GROUP)
    yield header.ljust(256, b"\0")
    yield from floats(model, [*of_layers(model, "attn_norm", "ffn_norm"), "output_norm"])
    yield from groups(model, ["token_embd", *of_layers(model, *LAYER), *head_of(model)])


def qwen3_groups(model: Model) -> Iterator[bytes]:
    """qwen3.c's only one."""
    last = model.graph.hparams.head_dim, int(not head_of(model)), GROUP
    yield struct.pack("<Ii10i", 0x616A6331, 1, *sizes(model), *last).ljust(256, b"\0")
    of_heads = of_layers(model, "attn_q_norm", "attn_k_norm")
    yield from floats(model, [*of_layers(model, "attn_norm", "ffn_norm"), "output_norm", *of_heads])
    yield from groups(model, ["token_embd", *of_layers(model, *LAYER), *head_of(model)])


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its architecture, the constants in its source, its format and its lines."""

    arch: str
    eps: float
    theta: float
    taps: tuple[Tap, ...]
    checkpoint: Callable[[Model], Iterator[bytes]]
    head_dim: str = "(p->dim / p->n_heads)"
    more: str = ""  # arguments of build_transformer


ENGINES = {
    "llama2.c/run.c": Engine("llama", 1e-5, 1e4, LLAMA, llama_floats),
    "llama2.c/runq.c": Engine("llama", 1e-5, 1e4, LLAMA, llama_groups),
    "qwen3.c/runq.c": Engine("qwen3", 1e-6, 1e6, QWEN3, qwen3_groups, "p->head_dim", ", 0"),
}


def tapped(source: str, engine: Engine) -> str:
    """The source with its taps. Raises SystemExit where a line is not there once."""
    before, forward = re.split(r"(?=float\s*\*\s*forward\(Transformer)", source)
    for tap in engine.taps:
        forward, times = re.subn(tap.line, lambda found, tap=tap: f"{found[0]} {tap.call}", forward)
        if times != 1:
            raise SystemExit(f"{tap.line!r} is {times} times in the source, not once: it is another version")
    forward, behind, _ = forward.partition("// The Byte Pair Encoding")
    if not behind:
        raise SystemExit("what follows the forward pass begins otherwise: it is another version")
    return f"{before}\n#define HEAD {engine.head_dim}\n{PRELUDE}\n{forward}\n{MAIN % engine.more}"


def main() -> int:
    """Trace one engine on one model."""
    source, model_path, tokens, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    name = f"{source.parent.name.rpartition('+')[2]}/{source.name}"
    if name not in ENGINES:
        raise SystemExit(f"{name} is none of {', '.join(ENGINES)}")
    engine, model = ENGINES[name], Model.opened(model_path)
    h = model.graph.hparams
    if h.arch != engine.arch or not np.isclose(h.eps, engine.eps) or not np.isclose(h.rope.theta, engine.theta):
        return NOT_FOR_THIS_MODEL
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "engine.c").write_text(tapped(source.read_text(), engine))
        compiler = ["gcc", "-O3", "-w", f"-I{EMITTER}", "engine.c", "-o", "engine", "-lm"]
        subprocess.run(compiler, cwd=folder, check=True)
        (folder / "model.bin").write_bytes(b"".join(engine.checkpoint(model)))
        given = [str(out.resolve()), name, engine.arch, model_path.name, *tokens.split(",")]
        subprocess.run([folder / "engine", folder / "model.bin", *given], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
