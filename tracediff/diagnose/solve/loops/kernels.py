"""The mathematics of each kind of op as the loops that an engine writes, over flat arrays.

They are Python that runs as it stands; `interpret.py` runs them all at once. Every single edit of them is a hypothesis
(`edits/formulas.py`), so they are written as engines write them: with strides.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from tracediff.diagnose.solve.loops.loops import Loops
from tracediff.diagnose.solve.loops.recurrences import recurrence_of
from tracediff.model.graph import Op
from tracediff.numerics.kinds.rope import yarn_correction_range

_BLOCK = 1 << 23  # numbers of a weight that are multiplied at a time: 64 MB in float64

_EMBEDDING = """
for t in range(T):
    for i in range(n):
        y[t * n + i] = table[tokens[t] * n + i]
"""
_NORM = """
for t in range(T):
    squares = sum(x[t * n + i] * x[t * n + i] for i in range(n))
    scale = 1 / sqrt(squares / n + eps)
    for i in range(n):
        y[t * n + i] = x[t * n + i] * scale * w[i]
"""
_LAYER_NORM = """
for t in range(T):
    mean = sum(x[t * n + i] for i in range(n)) / n
    squares = sum((x[t * n + i] - mean) * (x[t * n + i] - mean) for i in range(n))
    scale = 1 / sqrt(squares / n + eps)
    for i in range(n):
        y[t * n + i] = (x[t * n + i] - mean) * scale * w[i] + b[i]
"""
_L2_NORM = """
for t in range(T):
    squares = sum(x[t * n + i] * x[t * n + i] for i in range(n))
    scale = 1 / (sqrt(squares) if squares > eps * eps else eps)
    for i in range(n):
        y[t * n + i] = x[t * n + i] * scale
"""
_LINEAR = """
for t in range(T):
    for o in range(n_out):
        y[t * n_out + o] = sum(x[t * n_in + i] * w[o * n_in + i] for i in range(n_in)) + b[o]
"""
_HEADS = """
for h in range(H):
    for t in range(T):
        for o in range(n_out):
            y[(h * T + t) * n_out + o] = sum(
                x[(h * T + t) * n_in + i] * w[(h * n_out + o) * n_in + i] for i in range(n_in)
            )
"""
_OF_LATENT = """
for t in range(T):
    for h in range(H):
        for o in range(n_out):
            y[(t * H + h) * n_out + o] = sum(x[t * n_in + i] * w[(h * n_out + o) * n_in + i] for i in range(n_in))
"""
_LINEAR_ID = """
for t in range(T):
    for s in range(slots):
        expert = ids[t * slots + s]
        for o in range(n_out):
            y[(t * slots + s) * n_out + o] = sum(
                x[t * n_in + i] * w[(expert * n_out + o) * n_in + i] for i in range(n_in)
            )
"""
_ROPE = """
heads = H
for t in range(T):
    for h in range(heads):
        here = (t * heads + h) * D
        there = (t * heads + h) * D
        for i in range(n_rot // 2):
            first = 2 * i
            second = 2 * i + 1
            angle = positions[t] * theta ** (-2 * i / n_rot) / factors[i] * freq_scale
            y[there + first] = x[here + first] * cos(angle) - x[here + second] * sin(angle)
            y[there + second] = x[here + first] * sin(angle) + x[here + second] * cos(angle)
        for j in range(n_rot, D):
            y[there + j] = x[here + j]
"""
# YaRN (https://arxiv.org/abs/2309.00071): from pair to pair less is extrapolated.
_RAMP = (
    "            angle",
    "            part = 0 if i < low else 1 if i > high else (i - low) / (high - low)\n            angle",
)
_LEAST_RAMP = 0.001  # ggml-cpu/ops.cpp, rope_yarn_ramp
_CACHE = """
width = G * D
for c in range(P):
    for i in range(width):
        cache[starts[c] * width + (c - starts[c]) * width + i] = k[c * width + i]
"""
_SCORES = f"""{_CACHE}
queries = T
keys = S
for h in range(H):
    for t in range(queries):
        for s in range(keys):
            y[(h * queries + t) * keys + s] = sum(
                q[(t * H + h) * D + d] * cache[(s * G + h // (H // G)) * D + d] for d in range(D)
            )
"""
_SOFTMAX = """
queries = T
for h in range(H):
    for t in range(queries):
        here = (h * queries + t) * S
        there = (h * queries + t) * S
        visible = S - T + t + 1
        for s in range(S):
            y[there + s] = x[here + s] * scale if s < visible else -inf
        n = S
        largest = max(y[there + s] for s in range(n))
        for s in range(n):
            y[there + s] = exp(y[there + s] - largest)
        total = sum(y[there + s] for s in range(n))
        for s in range(n):
            y[there + s] = y[there + s] / total
"""
_VALUES = f"""{_CACHE.replace("k[", "v[")}
heads = H
channels = D
for t in range(T):
    for h in range(heads):
        for d in range(channels):
            y[(t * heads + h) * channels + d] = sum(
                p[(h * T + t) * S + s] * cache[(s * G + h // (H // G)) * D + d] for s in range(S)
            )
"""
_SOFT_MAX = """
for h in range(H):
    for t in range(T):
        here = (h * T + t) * S
        for s in range(S):
            y[here + s] = x[here + s] * scale + mask[t * S + s]
        largest = max(y[here + s] for s in range(S))
        largest = sinks[h] if sinks[h] > largest else largest
        for s in range(S):
            y[here + s] = exp(y[here + s] - largest)
        total = sum(y[here + s] for s in range(S)) + exp(sinks[h] - largest)
        for s in range(S):
            y[here + s] = y[here + s] / total
"""
_SINKS = ("        largest = sinks[h] if sinks[h] > largest else largest\n", " + exp(sinks[h] - largest)")
_INDEXER = """
for t in range(T):
    for h in range(H):
        for s in range(S):
            products[(t * H + h) * S + s] = sum(q[(t * H + h) * D + d] * k[s * D + d] for d in range(D))
    for s in range(S):
        y[t * S + s] = sum(
            (products[(t * H + h) * S + s] if products[(t * H + h) * S + s] > 0 else 0) * weights[t * H + h]
            for h in range(H)
        ) + mask[t * S + s]
"""
# A part of a row's channels is read of the block before, where blocks overlap.
_COMPRESS = """
for t in range(T):
    oldest = positions[t] + 1 - parts * block
    for d in range(D):
        largest = max(
            scores[(oldest + j) * width + j // block * D + d] if oldest + j >= 0 else -inf for j in range(parts * block)
        )
        total = sum(
            exp(scores[(oldest + j) * width + j // block * D + d] - largest) if oldest + j >= 0 else 0
            for j in range(parts * block)
        )
        weighted = sum(
            exp(scores[(oldest + j) * width + j // block * D + d] - largest)
            * values[(oldest + j) * width + j // block * D + d]
            if oldest + j >= 0 else 0
            for j in range(parts * block)
        )
        y[t * D + d] = weighted / total if (positions[t] + 1) % block == 0 else 0
"""
_GATED = """
for i in range(T * n):
    NAME = ACT
    y[i] = NAME * up[i]
"""
_EACH = """
for i in range(T * n):
    y[i] = ACT
"""
_TANH = "0.5 * {0} * (1 + tanh(0.7978845608 * {0} * (1 + 0.044715 * {0} * {0})))"
_ACTIVATIONS = {
    "silu": "{0} / (1 + exp(-{0}))",
    "gelu": _TANH,
    "gelu_quick": "{0} / (1 + exp(-1.702 * {0}))",
    "relu": "{0} if {0} > 0 else 0",
    "sigmoid": "1 / (1 + exp(-{0}))",
    "tanh": "tanh({0})",
    "exp": "exp({0})",
    "sqr": "{0} * {0}",
    "scale": "{0} * scale",
}
_NORMS = {"rms_norm": _NORM, "layer_norm": _LAYER_NORM, "l2_norm": _L2_NORM}
_OF_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_quick": "gelu_quick", "reglu": "relu"}
_BINARY = {"add": "a[i] + {0}", "sub": "a[i] - {0}", "mul": "a[i] * {0}", "div": "a[i] / {0}"}


def loops_of(op: Op, shapes: Sequence[tuple[int, ...]]) -> Loops | None:
    """The loops of an op whose inputs have these shapes; None where no loops are written for it, or it has a function
    of its own. What it reads through a view has the view's shape.
    """
    if op.function:
        return None
    first = shapes[0]
    match op.kind:
        case "embedding":
            n = op.weights[0].shape[1]
            return Loops(_EMBEDDING, ("tokens",), ("table",), {"T": first[0], "n": n}, (first[0], n))
        case "rms_norm" | "layer_norm" | "l2_norm":
            *rows, n = first
            numbers = {"T": math.prod(rows), "n": n, "eps": float(op.attrs["eps"])}
            source = _NORMS[op.kind]
            for term in (" * w[i]", " + b[i]")[len(op.weights) :]:
                source = source.replace(term, "")
            if op.weights and len(op.weights[0].shape) > 1:  # each head has its own
                numbers["H"] = op.weights[0].shape[0]
                source = source.replace("w[i]", "w[t % H * n + i]").replace("b[i]", "b[t % H * n + i]")
            return Loops(source, ("x",), ("w", "b"), numbers, first)
        case "linear":
            n_out, n_in = op.weights[0].shape
            source = _LINEAR if len(op.weights) > 1 else _LINEAR.replace(" + b[o]", "")
            numbers = {"T": first[0], "n_in": n_in, "n_out": n_out}
            shape = op.shape(first[0])
            return Loops(source, ("x",), ("w", "b"), numbers, shape, ("o", max(1, _BLOCK // n_in)))
        case "linear_id":
            return _linear_id(op, *shapes)
        case "mul_mat" if op.weights and len(first) == 3 and op.weights[0].shape[:-2] == first[:1]:
            h, n_out, n_in = op.weights[0].shape
            return Loops(
                _HEADS, ("x",), ("w",), {"H": h, "T": first[1], "n_in": n_in, "n_out": n_out}, (h, first[1], n_out)
            )
        case "of_latent":
            t, h, n_out = op.shape(first[0])
            source = (
                _OF_LATENT.replace("(h * n_out + o) * n_in + i", "(h * n_in + i) * n_out + o")
                if op.attrs
                else _OF_LATENT
            )
            return Loops(source, ("x",), ("w",), {"H": h, "T": t, "n_in": first[1], "n_out": n_out}, (t, h, n_out))
        case "rope":
            return _rope(op, first)
        case "compress":
            (t,), parts = shapes[2], 2 if op.attrs["overlap"] else 1
            d = first[1] // parts
            numbers = {"T": t, "D": d, "block": op.attrs["n"], "parts": parts, "width": first[1]}
            return Loops(_COMPRESS, ("values", "scores", "positions", "keys"), (), numbers, (t, d))
        case "scores":
            (t, h, d), (s, g, _) = shapes
            return Loops(_SCORES, ("q", "k"), (), {"H": h, "T": t, "S": s, "P": s, "G": g, "D": d}, (h, t, s))
        case "softmax" if set(op.attrs) == {"scale"}:
            h, t, s = first
            numbers = {"H": h, "T": t, "S": s, "scale": float(op.attrs["scale"])}
            return Loops(_SOFTMAX, ("x",), (), numbers, first)
        case "soft_max" if len(shapes) > 1 and len(first) == 3 and shapes[1] == first[1:]:
            h, t, s = first
            source = _SOFT_MAX if op.weights else reduce(lambda text, line: text.replace(line, ""), _SINKS, _SOFT_MAX)
            numbers = {"H": h, "T": t, "S": s, "scale": float(op.attrs["scale"])}
            return Loops(source, ("x", "mask"), ("sinks",)[: len(op.weights)], numbers, first)
        case "lightning_indexer":
            t, h, d = first
            s = shapes[1][0]
            numbers = {"H": h, "T": t, "S": s, "D": d}
            return Loops(_INDEXER, ("q", "k", "weights", "mask"), (), numbers, (t, s))
        case "weighted_values":
            (h, t, s), (_, g, d) = shapes
            return Loops(_VALUES, ("p", "v"), (), {"H": h, "T": t, "S": s, "P": s, "G": g, "D": d}, (t, h * d))
    return recurrence_of(op, shapes) or _of_each(op, shapes)


def _of_each(op: Op, shapes: Sequence[tuple[int, ...]]) -> Loops | None:
    """Of an op that makes each value of the values at its place."""
    loops = _by_tokens(op, shapes)
    if loops is None or op.axes[1:] != ("T", "S"):
        return loops
    h, t, s = loops.shape  # of scores the heads come first
    others = {name: number for name, number in loops.numbers.items() if name not in ("T", "n")}
    return replace(loops, source=loops.source.replace("T * n", "H * T * S"), numbers={"H": h, "T": t, "S": s} | others)


def _by_tokens(op: Op, shapes: Sequence[tuple[int, ...]]) -> Loops | None:
    first = shapes[0]
    numbers = {"T": first[0], "n": math.prod(first[1:])}
    if op.kind in _BINARY and (second := _second(op, shapes)):
        if "row" in second:
            numbers["row"] = first[-1]
        source = _EACH.replace("ACT", _BINARY[op.kind].format(second))
        return Loops(source, ("a", "b")[: len(shapes)], ("w",)[: len(op.weights)], numbers, first)
    if op.weights or any(shape != first for shape in shapes):
        return None
    if op.kind in _OF_GATED:
        name = _OF_GATED[op.kind]
        source = _GATED.replace("ACT", _ACTIVATIONS[name].format("gate[i]")).replace("NAME", name)
        return Loops(source, ("gate", "up"), (), numbers, first)
    if op.kind in _ACTIVATIONS and not op.attrs.get("bias"):
        scale = {"scale": float(op.attrs["scale"])} if op.kind == "scale" else {}
        return Loops(_EACH.replace("ACT", _ACTIVATIONS[op.kind].format("x[i]")), ("x",), (), numbers | scale, first)
    return None


def _second(op: Op, shapes: Sequence[tuple[int, ...]]) -> str:
    """What the second operand has for a value of the first: one of its own, its row's or its channel's. Empty where it
    has another shape.
    """
    first, *others = shapes
    match others if len(first) > 1 else [()]:
        case [] if len(op.weights) == 1 and op.weights[0].shape == first[-1:]:
            return "w[i % row]" if len(first) > 2 else "w[i % n]"
        case [second] if second == first:
            return "b[i]"
        case [second] if not op.weights and second == (*first[:-1], 1):
            return "b[i // row]" if len(first) > 2 else "b[i // n]"
    return ""


def _linear_id(op: Op, x: tuple[int, ...], ids: tuple[int, ...]) -> Loops | None:
    _, n_out, n_in = op.weights[0].shape
    if math.prod(x[1:]) not in (n_in, ids[1] * n_in):
        return None
    by_slot = math.prod(x[1:]) > n_in
    source = _LINEAR_ID.replace("x[t * n_in + i]", "x[(t * slots + s) * n_in + i]") if by_slot else _LINEAR_ID
    if len(op.weights) > 1:
        source = f"{source.rstrip()} + b[expert * n_out + o]\n"
    numbers = {"T": x[0], "slots": ids[1], "n_in": n_in, "n_out": n_out}
    block = "o", max(1, _BLOCK // (n_in * x[0] * ids[1]))
    return Loops(source, ("x", "ids"), ("w", "b")[: len(op.weights)], numbers, (*ids, n_out), block)


def _rope(op: Op, shape: tuple[int, ...]) -> Loops | None:
    rope = op.attrs["rope"]
    if rope.ext_factor not in (0.0, 1.0):
        return None
    source, numbers = _ROPE, {"theta": float(rope.theta), "freq_scale": rope.freq_scale}
    if rope.ext_factor:
        source = source.replace(*_RAMP).replace("* freq_scale", "* (part * freq_scale + 1 - part)")
        low, high = yarn_correction_range(rope)
        numbers |= {"low": low, "high": max(high, low + _LEAST_RAMP)}
    elif rope.freq_scale == 1:
        source = source.replace(" * freq_scale", "")
    if rope.magnitude != 1.0:
        source = source.replace("(angle)", "(angle) * magnitude")
        numbers["magnitude"] = rope.magnitude
    if rope.pairing == "halves":
        source = source.replace("2 * i + 1", "i + n_rot // 2").replace("first = 2 * i\n", "first = i\n")
    if not op.weights:
        source = source.replace(" / factors[i]", "")
    t, h, d = shape
    numbers |= {"T": t, "H": h, "D": d, "n_rot": rope.n_rot}
    return Loops(source, ("x", "positions"), ("factors",), numbers, shape)
