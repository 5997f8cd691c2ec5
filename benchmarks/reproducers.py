"""Mistakes of different kinds, each made a reproducer, which must fail, and pass once its function is right.

    python benchmarks/reproducers.py [--only NAME] [--folder KEEP]

Each is planted by `--fault` in the torch engine, in hand-written graphs and in those that are lifted from llama.cpp's.
What stands in the place of the mistake is numpy, from the formula that the script itself states.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tiny_models

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape, write_model
from tracediff.replay.judging import Subject, judge_all, replays_of
from tracediff.reproduce import reproduce
from tracediff.trace.reader import Trace

TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 107)
MOST = 1_000_000
SMALL = Shape("qwen2", n_layer=2, n_embd=48, n_ff=64, n_ctx=64)
WIDE = Shape("qwen2", n_embd=256, n_head=8, n_head_kv=2, n_ff=512, n_layer=1)

# What numpy makes of each kind of op, in double precision. `x` and `w` are the inputs and the weights.
LINEAR = "y = np.moveaxis(np.tensordot(x[0], w[0], (-1, -1)), -1, -1); return y + w[1] if len(w) > 1 else y"
NORM = "return x[0] / np.sqrt((x[0] ** 2).mean(-1, keepdims=True) + EPS) * w[0]"
SCORES = "q, k = x; k = np.repeat(k, q.shape[1] // k.shape[1], 1); return np.einsum('thd,shd->hts', q, k)"
SOFTMAX = """s, queries, keys = x; s = s * SCALE
    s = np.where(keys[None, :] > queries[:, None], -np.inf, s); e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)"""
VALUES = "p, v = x; v = np.repeat(v, len(p) // v.shape[1], 1); return np.einsum('hts,shd->thd', p, v)"
ROPE = """y, positions = x; n = N_ROT; angle = positions[:, None] * THETA ** (-2.0 * np.arange(n // 2) / n)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = (y[..., 0::2], y[..., 1::2]) if NEIGHBOURS else (y[..., : n // 2], y[..., n // 2 :])
    both = (a * c - b * s, a * s + b * c)
    return np.stack(both, -1) if NEIGHBOURS else np.concatenate(both, -1)"""
SWIGLU = "return x[0] / (1 + np.exp(-x[0])) * x[1]"
ADD = "return x[0] + x[1]"
EMBEDDING = "return w[0][x[0].astype(int)]"
EXPERTS = """x, ids = x; x = x.reshape(len(ids), -1, w[0].shape[-1])
    return np.array([[w[0][int(e)] @ x[t, s % x.shape[1]] for s, e in enumerate(row)] for t, row in enumerate(ids)])"""
MIX = "e = np.exp(x[0] - x[0].max(-1, keepdims=True)); return e / e.sum(-1, keepdims=True)"
CONV = "y, k = x[0], w[0]; return sum(y[:, n : y.shape[1] - k.shape[1] + 1 + n].T * k[:, n] for n in range(k.shape[1]))"
SCAN = """state, x, dt, b, c = x; heads, n_state = x.shape[1], b.shape[-1]
    rate = np.log1p(np.exp(dt)).reshape(len(x), heads)
    state, made = state.reshape(heads, -1, n_state), []
    b, c = (np.repeat(z, heads // z.shape[1], 1) for z in (b, c))
    for t in range(len(x)):
        state = state * np.exp(rate[t][:, None] * w[0].reshape(heads, -1))[:, None]
        state = state + (x[t] * rate[t][:, None])[..., None] * b[t][:, None]
        made.append((state * c[t][:, None]).sum(-1).ravel())
    return np.concatenate([*made, state.ravel()])"""


@dataclass(frozen=True, slots=True)
class Case:
    """A mistake planted in one op of a model: a shape with the type of its weights, or an architecture."""

    model: Shape | str
    fault: str
    op: str
    right: str
    weights: str = "F32"
    decode: int = 0


CASES = {
    "norm, another epsilon": Case(SMALL, "eps@0", "blk.0.attn_norm", NORM),
    "norm, weight plus one": Case(SMALL, "norm_weight_plus_one@1", "blk.1.ffn_norm", NORM),
    "norm of a layer's mean": Case(SMALL, "layer_norm@blk.0.ffn_norm", "blk.0.ffn_norm", NORM),
    "rope, pairing": Case(SMALL, "rope_pairing@0", "blk.0.attn_q_rope", ROPE),
    "rope of a decode step": Case(SMALL, "rope_decode_at_zero@0", "blk.0.attn_k_rope", ROPE, decode=1),
    "matmul, transposed": Case(SMALL, "weight_transposed@blk.0.attn_output", "blk.0.attn_output", LINEAR),
    "matmul, no bias": Case(SMALL, "bias_missing@blk.1.attn_k", "blk.1.attn_k", LINEAR),
    "matmul, Q4_K scales": Case(WIDE, "q4_k_scales@blk.0.ffn_up", "blk.0.ffn_up", LINEAR, "Q4_K_M"),
    "matmul, Q6_K order": Case(WIDE, "q6_k_order@blk.0.ffn_down", "blk.0.ffn_down", LINEAR, "Q4_K_M"),
    "matmul, gate for up": Case(SMALL, "gate_up_swapped@0", "blk.0.ffn_gate", LINEAR),
    "scores, groups of heads": Case(SMALL, "gqa_heads@0", "blk.0.attn_scores", SCORES),
    "softmax, no mask": Case(SMALL, "no_mask@1", "blk.1.attn_probs", SOFTMAX),
    "softmax, no scale": Case(SMALL, "attention_scale@0", "blk.0.attn_probs", SOFTMAX),
    "scores of cached keys": Case(SMALL, "cached_k_rotated_again@1", "blk.1.attn_scores", SCORES, decode=1),
    "values, groups of heads": Case(SMALL, "gqa_heads@blk.0.attn_kqv", "blk.0.attn_kqv", VALUES),
    "activation": Case(SMALL, "act_gelu@1", "blk.1.ffn_act", SWIGLU),
    "sum, a term dropped": Case(SMALL, "residual_dropped@0", "blk.0.attn_residual", ADD),
    "embedding, scaled": Case(SMALL, "embedding_scaled", "token_embd", EMBEDDING),
    "experts, transposed": Case("qwen3moe", "weight_transposed@blk.0.ffn_gate_exps", "blk.0.ffn_gate_exps", EXPERTS),
    "router": Case("qwen3moe", "router_sigmoid@0", "blk.0.ffn_moe_probs", MIX),
    "convolution": Case("mamba2", "conv_reversed@0", "blk.0.ssm_conv1d", CONV),
    "state space": Case("mamba2", "decay_as_logarithm@1", "blk.1.ssm_scan", SCAN),
    "an edit in words": Case(SMALL, "blk.1.ffn_act: every value above 0.5 is 0.5", "blk.1.ffn_act", SWIGLU),
}


def model_of(case: Case, folder: Path) -> Path:
    """Made once in the folder."""
    if isinstance(case.model, str):
        out = folder / f"{case.model}.gguf"
        return out if out.exists() else tiny_models.write(case.model, out)
    out = folder / f"{case.model.n_embd}-{case.weights}.gguf"
    return out if out.exists() else write_model(out, case.model, case.weights)


def reproduced(case: Case, folder: Path, models: Path, tokens: tuple[int, ...] = TOKENS) -> tuple[int, int, int, str]:
    """The size of what was made, the exit codes before and after the repair, and what it said before."""
    model = Model(model_of(case, models))
    trace = trace_torch(model, folder / "a.trace", TorchOptions(faults=(case.fault,)), tokens, case.decode)
    out = folder / "reproducer"
    step = min(step for step, op in faulty_in(trace, model) if op == case.op)
    reproduce(trace, model, case.op, step, out)
    before, said = run(out)
    script = out / "reproduce.py"
    script.write_text(repaired(script.read_text(), case.right))
    after, left = run(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    return size, before, after, said if not after else left


def faulty_in(trace: Path, model: Model) -> list[tuple[int, str]]:
    """The records that are wrong by themselves."""
    replays = replays_of(model, [Subject(Trace(trace), {})])
    return [(record.step, record.op) for _, record, local in judge_all(replays) if local.faulty]


def repaired(script: str, right: str) -> str:
    """With the right function in the marked place, of the constants that the script states."""
    stated = dict(re.findall(r"^# (\w+) = (.+)$", script, flags=re.M))
    for name, value in stated.items():
        right = re.sub(rf"\b{name.upper()}\b", value, right)
    right = right.replace("NEIGHBOURS", str(stated.get("pairing") == "'neighbours'"))
    signature = re.search(r"def yours\((.*)\)", script)
    assert signature
    arguments = signature[1].split(", ")
    x, w = (
        f"[{', '.join(f'{a}.astype(float)' for a in arguments if a.startswith(what))}]" for what in ("input", "weight")
    )
    return script.replace('return data["recorded"]', f"x, w = {x}, {w}\n    {right}")


def run(folder: Path) -> tuple[int, str]:
    """Without anything of tracediff: -I leaves out this folder, and the script imports numpy alone."""
    done = subprocess.run([sys.executable, "-I", folder / "reproduce.py"], capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


def main() -> None:
    """Make them all; the exit code says whether each did what it must."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--folder", type=Path, help="keep what is made there")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        models = args.folder or Path(name)
        for case in [args.only] if args.only else CASES:
            folder = models / case.replace(" ", "-").replace(",", "")
            folder.mkdir(parents=True, exist_ok=True)
            size, before, after, said = reproduced(CASES[case], folder, models)
            met = size <= MOST and (before, after) == (1, 0)
            wrong += not met
            print(
                f"{'ok ' if met else 'BAD'} {case}: {size:,} bytes, {before} then {after}: {said.splitlines()[0]}",
                flush=True,
            )
            if not met:
                print(said)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
