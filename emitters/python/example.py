"""Every kind of record that tracediff_emitter.py writes, once.

python example.py out.trace && tracediff inspect out.trace
"""

import sys
from typing import Any

import numpy as np
from tracediff_emitter import Trace

VOCAB, EMBD = 5, 4
EMBEDDING = ((np.arange(VOCAB)[:, None] * 7 + np.arange(EMBD) * 3) % 11 - 5).astype(np.float32) / 8
NORM_WEIGHT = (1 + np.arange(EMBD) / 4).astype(np.float32)


def bf16(x: np.ndarray) -> np.ndarray:
    """The upper half of float32: its bfloat16, where the lower half is zero."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def rms_norm(x: np.ndarray) -> np.ndarray:
    """x / rms(x) * weight."""
    rms = np.sqrt(np.square(x.astype(np.float64)).mean(-1, keepdims=True) + 1e-6)
    return (x / rms * NORM_WEIGHT).astype(np.float32)


def forward(trace: Trace, step: int, tokens: list[int], positions: list[int]) -> None:
    """Embedding, norm, logits; each in another dtype."""
    x = EMBEDDING[tokens]
    normed = rms_norm(x)
    trace.step(step, tokens, positions)
    trace.op(step, "token_embd", bf16(x), "bf16")
    trace.op(step, "output_norm", normed)
    trace.op(step, "output", normed.astype(np.float64) @ EMBEDDING.T)


def extremes(trace: Trace, step: int) -> None:
    """What statistics must leave out or survive: NaN, infinities, squares that overflow, none at all."""
    nan, inf = np.nan, np.inf
    trace.record = "both"
    f16 = np.array([[0x3C00, 0xC100, 0x7C00], [0x7E00, 0x0001, 0x7BFF]], np.uint16).view(np.float16)
    trace.op(step, "extremes.f16", f16)
    bits = np.array([[0x3F80, 0xC020, 0x7F80], [0x7FC0, 0x0001, 0x7F7F]], np.uint16)
    trace.op(step, "extremes.bf16", bits, "bf16")
    trace.op(step, "extremes.f32", np.array([[1, -2.5, nan], [inf, -inf, 0.1]], np.float32))
    trace.op(step, "extremes.f64", np.array([[1e300, -1e300, nan], [inf, 0.1, 1.7e308]]))
    trace.record = "statistics"
    trace.op(step, "extremes.nan", np.full(2, nan, np.float32))
    trace.op(step, "extremes.empty", np.empty((0, 3), np.float32))


def layouts(trace: Trace, step: int) -> None:
    """Of three tokens the first and the last; and values that lie in columns, two apart."""
    x = np.array([1, -2, 3, np.nan, np.nan, 0.5, 0.25, -0.125], np.float32)
    trace.record = "both"
    trace.op(step, "layouts.rows", x[:6].reshape(2, 3), rows=[0, 2])
    trace.op(step, "layouts.strides", np.stack((x[:3], x[5:]), 1))


def batch(trace: Trace, step: int) -> None:
    """A token of each of two sequences, one value of both and one of the second alone."""
    trace.record = "data"
    trace.step(step, [3, 1], [4, 0], sequences=[0, 1])
    trace.op(step, "batch.rows", np.array([[1], [-2]], np.float32))
    trace.op(step, "batch.scores", np.ones((1, 1, 1), np.float32), sequence=1)


def main() -> None:
    """Write the trace that the first argument names; the second names the engine."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} OUT.trace [ENGINE]")
    try:
        engine = sys.argv[2] if len(sys.argv) > 2 else "example"
        more: dict[str, Any] = {
            "weights": "F32",
            "context": 64,
            "rounding": "bf16",
            "rollback": True,
        }  # no step goes back
        with Trace(sys.argv[1], engine, "llama", **more) as trace:
            trace.weight("output_norm.weight", NORM_WEIGHT)
            forward(trace, 0, [3, 1, 4], [0, 1, 2])
            layouts(trace, 0)
            trace.record = "statistics"
            forward(trace, 1, [1], [3])
            extremes(trace, 1)
            batch(trace, 2)
    except (OSError, ValueError) as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
