"""Loops of what is computed token after token, with a state that one turn leaves to the next: as `kernels` has others.

The state is an array of the loops' own, which begins as the op's input; the output ends with those after the last
tokens, the latest first (ggml-cpu/ops.cpp).
"""

import math
from collections.abc import Mapping, Sequence

from tracediff.diagnose.solve.loops.loops import Loops
from tracediff.model.graph import Op

_CONV = """
for t in range(T):
    for c in range(n):
        y[t * n + c] = sum(x[c * columns + t + i] * w[c * taps + i] for i in range(taps))
"""
_SCAN = """
for t in range(T):
    for h in range(H):
        rate = log(1 + exp(dt[t * H + h]))
        for d in range(D):
            for n in range(N):
                state[(h * D + d) * N + n] = (
                    state[(h * D + d) * N + n] * exp(rate * a[h * N + n])
                    + x[(t * H + h) * D + d] * rate * B[(t * groups + h // (H // groups)) * N + n]
                )
            y[(t * H + h) * D + d] = sum(
                state[(h * D + d) * N + n] * C[(t * groups + h // (H // groups)) * N + n] for n in range(N)
            )
"""
_DELTA = """
for t in range(T):
    for h in range(H):
        for d in range(D):
            for e in range(D):
                state[(h * D + d) * D + e] = state[(h * D + d) * D + e] * exp(gate[t * H + h])
            found = sum(state[(h * D + d) * D + e] * k[(t * groups + h % groups) * D + e] for e in range(D))
            change = (v[(t * H + h) * D + d] - found) * beta[t * H + h]
            for e in range(D):
                state[(h * D + d) * D + e] = state[(h * D + d) * D + e] + change * k[(t * groups + h % groups) * D + e]
            y[(t * H + h) * D + d] = sum(
                state[(h * D + d) * D + e] * q[(t * groups + h % groups) * D + e] for e in range(D)
            ) / sqrt(D)
"""
_LINEAR_ATTENTION = """
for t in range(T):
    for h in range(H):
        for e in range(D):
            for d in range(D):
                state[(h * D + e) * D + d] = (
                    state[(h * D + e) * D + d] * gate[(t * H + h) * D + e]
                    + k[(t * H + h) * D + e] * v[(t * H + h) * D + d]
                )
        for d in range(D):
            y[(t * H + h) * D + d] = (
                sum(state[(h * D + e) * D + d] * q[(t * H + h) * D + e] for e in range(D)) * scale
            )
"""
_WKV6 = """
for t in range(T):
    for h in range(H):
        for d in range(D):
            y[(t * H + h) * D + d] = sum(
                (state[(h * D + e) * D + d] + first[h * D + e] * k[(t * H + h) * D + e] * v[(t * H + h) * D + d])
                * r[(t * H + h) * D + e]
                for e in range(D)
            )
        for e in range(D):
            for d in range(D):
                state[(h * D + e) * D + d] = (
                    state[(h * D + e) * D + d] * decay[(t * H + h) * D + e]
                    + k[(t * H + h) * D + e] * v[(t * H + h) * D + d]
                )
"""
_WKV7 = """
for t in range(T):
    for h in range(H):
        for d in range(D):
            found = sum(state[(h * D + d) * D + e] * a[(t * H + h) * D + e] for e in range(D))
            for e in range(D):
                state[(h * D + d) * D + e] = (
                    state[(h * D + d) * D + e] * decay[(t * H + h) * D + e]
                    + v[(t * H + h) * D + d] * k[(t * H + h) * D + e]
                    + found * b[(t * H + h) * D + e]
                )
            y[(t * H + h) * D + d] = sum(state[(h * D + d) * D + e] * r[(t * H + h) * D + e] for e in range(D))
"""
_HANDED_ON = """
    for i in range(held):
        y[T * H * D + (T - 1 - t) * held + i] = state[i]
"""


def recurrence_of(op: Op, shapes: Sequence[tuple[int, ...]]) -> Loops | None:
    """The loops of an op with a state, whose inputs have these shapes; None where it has another sort."""
    first, *others = shapes
    numbers: dict[str, float]
    match op.kind:
        case "ssm_conv":
            n, taps = op.weights[0].shape
            t = first[1] - taps + 1
            numbers = {"T": t, "n": n, "columns": first[1], "taps": taps}
            return Loops(_CONV, ("x",), ("w",), numbers, (t, n))
        case "ssm_scan":
            (t, h, d), *_, (_, groups, n) = others
            by_channel = math.prod(op.weights[0].shape) > h
            source = _SCAN if by_channel else _SCAN.replace("a[h * N + n]", "a[h]")
            numbers = {"T": t, "H": h, "D": d, "N": n, "groups": groups}
            return _with_state(op, source, ("state", "x", "dt", "B", "C"), ("a",), numbers, h * d * n)
        case "gated_delta_net":
            _, (t, h, d), gate, *_ = others
            source = _DELTA if gate[-1] == 1 else _DELTA.replace("gate[t * H + h]", "gate[(t * H + h) * D + e]")
            numbers = {"T": t, "H": h, "D": d, "groups": first[1]}
            return _with_state(op, source, ("q", "k", "v", "gate", "beta", "state"), (), numbers, h * d * d)
        case "gated_linear_attn":
            t, h, d = others[0]
            numbers = {"T": t, "H": h, "D": d, "scale": float(op.attrs["scale"])}
            return _with_state(op, _LINEAR_ATTENTION, ("k", "v", "q", "gate", "state"), (), numbers, h * d * d)
        case "rwkv_wkv6":
            t, h, d = others[0]
            numbers = {"T": t, "H": h, "D": d}
            return _with_state(op, _WKV6, ("k", "v", "r", "decay", "state"), ("first",), numbers, h * d * d)
        case "rwkv_wkv7":
            t, h, d = others[2]
            numbers = {"T": t, "H": h, "D": d}
            return _with_state(op, _WKV7, ("r", "decay", "k", "v", "a", "b", "state"), (), numbers, h * d * d)
    return None


def _with_state(
    op: Op, source: str, inputs: tuple[str, ...], weights: tuple[str, ...], numbers: Mapping[str, float], held: int
) -> Loops:
    """Loops whose output is the values of all tokens, and after them states, each of as many values as are `held`."""
    values = int(numbers["T"] * numbers["H"] * numbers["D"])
    shape = (values + op.attrs.get("snapshots", 1) * held,)
    return Loops(source.rstrip() + _HANDED_ON, inputs, weights, {**numbers, "held": held}, shape)
