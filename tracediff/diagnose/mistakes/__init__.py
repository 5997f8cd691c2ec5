"""The bank of known mistakes, by area: planted one makes a fault, tried on a faulty op it is a hypothesis.

A mistake yields variants of the op. Given what the engine made of the op (`Seen`), parameters are fitted to it;
without, the usual wrong value is planted.
"""

from tracediff.diagnose.mistakes import (
    attention,
    blocks,
    caches,
    chunks,
    embedding,
    experts,
    feed_forward,
    heads,
    integers,
    masks,
    norms,
    order,
    parts,
    recorded,
    residual,
    rope,
    rows,
    soft_caps,
    states,
    sums,
    weights,
)

_AREAS = (
    weights, blocks, rows, integers, embedding, norms, order, rope, heads, masks, soft_caps, attention, caches,
    feed_forward, residual, experts, states, chunks, parts, sums, recorded,
)  # fmt: skip
BANK = {mistake.name: mistake for area in _AREAS for mistake in area.AREA}
# What was never added to a sum leaves what a weight of zeros does, and is said first: an engine has many weights.
BANK["weight_zero"] = BANK.pop("weight_zero")
# After that what makes next to nothing of weights, as bfloat16 does of float16's bits: beside a bias it is the same.
BANK["block_scale_bits"] = BANK.pop("block_scale_bits")
# What may come to the same, seen from the end of a segment: silu(up) * gate is what comes of swapped weights too, rope
# in the other pairing is the right rope of rows permuted (q and k alike, so that q.k is the same), and so on.
ALIKE = {
    "act_swapped": ("gate_up_swapped",), "gate_up_swapped": ("act_swapped",),
    "rope_pairing": ("rope_permuted",), "rope_permuted": ("rope_pairing",),
    "attention_scale": ("scores_scaled",), "scores_scaled": ("attention_scale",),
    "weight_zero": ("residual_dropped", "term_dropped"),
    "residual_dropped": ("weight_zero",), "term_dropped": ("weight_zero",),
    "block_scale_bits": ("weight_zero", "residual_dropped", "term_dropped"),
    "norm_skipped": ("norm_bypassed",), "norm_bypassed": ("norm_skipped",),
    "heads_first": ("heads_viewed",), "heads_viewed": ("heads_first",),
    "wrong_layer": ("recorded_late",), "recorded_late": ("wrong_layer",),
    "norm_weights_exchanged": ("norm_of_another_part",), "norm_of_another_part": ("norm_weights_exchanged",),
}  # fmt: skip
