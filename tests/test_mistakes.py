"""Mistakes of lifted graphs: planted in one layer of the torch engine, located by its trace alone, and named."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from chunked import ssd
from conftest import Models, some_of, trace_graph
from test_solve import judged
from torch import Tensor

from tracediff.diagnose.explain import Explainer
from tracediff.diagnose.mistakes import BANK, experts, order, parts, states
from tracediff.diagnose.mistakes.mistake import Context, Variant
from tracediff.diagnose.planting import plant, undoes
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.errors import TraceError
from tracediff.model.families import build_graph, load_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op
from tracediff.model.model import Model
from tracediff.model.weights import Weights
from tracediff.names import Capture, layer_of, split
from tracediff.numerics.arithmetic import EXACT, Scheme
from tracediff.numerics.evaluate import evaluate, noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.attention import softmax
from tracediff.numerics.kinds.kind import Energy
from tracediff.numerics.kinds.recurrent import ssm_scan
from tracediff.numerics.kinds.rope import Rope, rope_angles
from tracediff.numerics.views import seen
from tracediff.pipeline import check_trace, compare_traces
from tracediff.replay.replay import Replay
from tracediff.trace.reader import Trace
from tracediff.trace.shapes import Misfit, misfit
from tracediff.trace.writer import TraceWriter

Tiny = Callable[[str], Path]
TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12, 13)
# Of each architecture the mistakes that are planted in layer 1, but for one whose state shows in what reads it.
PLANTED = {
    "qwen3moe": ("router_sigmoid", "weights_not_normalised", "expert_order", "expert_off_by_one", "top_k_off_by_one",
                 "top_k_smallest", "expert_not_looked_up", "experts_left_out", "too_few_experts", "experts_sorted",
                 "rope_before_norm", "wrong_layer", "expert_weights", "weight_transposed@blk.1.ffn_gate_exps",
                 "heads_viewed@blk.1.attn_q_norm",
                 "heads_viewed@blk.1.attn_q_rope", "heads_viewed@blk.1.attn_kqv", "heads_viewed@blk.1.attn_scores",
                 "values_rotated", "softmax_axis", "norm_twice@blk.1.attn_q_norm", "norm_axis@blk.1.ffn_norm",
                 "norm_in_half@blk.1.ffn_norm", "norm_of_magnitudes@blk.1.ffn_norm", "keys_skipped",
                 "softmax_rounded_up", "last_keys_dropped",
                 "experts_not_cleared", "weights_by_all", "weights_sorted@blk.1.ffn_moe_weights",
                 "weights_sorted@blk.1.ffn_moe_weights_norm", "router_softmax_axis"),
    "deepseek2": ("router_softmax", "selection_bias_in_weights", "selection_bias_on_logits", "weights_normalised",
                  "scale_dropped", "term_dropped",
                  "gate_up_swapped", "weight_transposed@blk.1.attn_k_b", "expert_off_by_one@blk.1.attn_v_b",
                  "parts_in_another_order@blk.1.q_pe", "parts_in_another_order@blk.1.attn_kv_a_norm"),
    "cohere2": ("in_sequence@blk.1.ffn_gate", "rope_in_all_layers", "norm_bypassed@blk.1.ffn_up"),
    "olmo2": ("variance_unbiased@blk.1.attn_q_norm", "norm_after_rope@blk.1.attn_k_norm",
              "heads_viewed@blk.1.attn_q_rope",
              "input_normed@blk.1.ffn_gate", "sum_normed", "norm_of_all_heads@blk.1.attn_q_norm"),
    "gpt-oss": ("bias_not_weighted", "alpha_outside", "sinks_misread", "wrong_layer@blk.1.attn_probs",
                "expert_off_by_one@blk.1.ffn_up_exps",
                "sinks_in_blocks", "window_by_pages@0", "flash_not_rescaled", "chosen_weighted_otherwise",
                "sinks_ignored", "window@0", "act_limits", "up_plus_one", "softmax_before_choice",
                "bias_missing@blk.1.ffn_down_exps"),
    "gemma3": ("window@blk.5.attn_probs", "norm_of_another_part@blk.1.attn_v", "norm_of_another_part@blk.1.ffn_up",
               "values_normed", "no_mask", "mask_shifted", "cache_ignored", "act_silu",
               "norm_after_rope@blk.1.attn_q_norm", "scale_dropped@token_embd_scaled"),
    "qwen3next": ("delta_rule@0", "gate_ignored", "act_skipped@0", "state_not_carried@blk.0.ssm_state",
                  "gate_before_norm@0", "act_silu@blk.1.gate_sigmoid", "act_sigmoid@blk.0.a_softplus",
                  "act_tanh@blk.1.gate_sigmoid", "act_softplus@blk.0.attn_gate.silu",
                  "state_transposed@blk.0.ssm_state_next"),
    "llama4": ("layer_of_another_sort@blk.3.attn_scores", "layer_of_another_sort@blk.1.attn_scores"),
    "mamba2": ("conv_reversed", "rate_without_softplus", "decay_as_logarithm", "state_not_carried@blk.1.conv_state",
               "gate_after_norm", "act_ungated", "written_once@blk.1.conv_state_next",
               "conv_window_misplaced", "state_of_another_layer@blk.0.conv_state", "scan_groups",
               "state_space", "bias_twice@blk.1.ssm_dt", "parts_off_by_one@blk.1.ssm_scan"),
    "gemma2": ("cap_clamped@output_unscaled.scale.tanh", "cap@output_unscaled.scale.tanh"),
    "granitemoe": ("rope_factors_multiplied", "factor_of_another_term"),
    "hunyuan-dense": ("norm_before_rope@blk.1.attn_q_norm",),
    "lfm2": ("parts_exchanged@blk.1.shortconv.in_proj.mul#2", "conv_acausal"),
    "rwkv7": ("state_read_transposed",),
    "gpt2": ("embedding_row_off@position_embd", "positions_restart@position_embd", "act_relu_squared"),
    "gptneox": ("heads_viewed@blk.1.attn_q_rope",),  # of one product for Q, K and V
    "bloom": ("alibi_missing", "rms_norm", "norm_bias_missing"),
}  # fmt: skip


def traced(
    graph: Graph,
    file: GGUFFile,
    out: Path,
    tokens: tuple[int, ...] = TOKENS,
    n_decode: int = 2,
    scheme: Scheme | None = None,
) -> Path:
    """A trace of the torch engine in float32, which may round as a scheme says."""
    with TraceWriter(out, "torch", graph.hparams.arch) as writer:
        engine, recorder = TorchEngine(graph, Weights(file, torch.float32), scheme), TensorWriter(writer)
        engine.run(0, StepInput(tokens, tuple(range(len(tokens)))), recorder)
        for step in range(1, n_decode + 1):
            last = int(engine.logits[-1].argmax())
            engine.run(step, StepInput((last,), (len(tokens) + step - 1,)), recorder)
    return out


@pytest.mark.parametrize(("arch", "fault"), [(arch, fault) for arch, faults in PLANTED.items() for fault in faults])
def test_a_planted_mistake_is_located_and_named(arch: str, fault: str, tiny: Tiny, tmp_path: Path) -> None:
    file = GGUFFile(tiny(arch))
    clean = build_graph(file)
    planted = plant(clean, file, fault if "@" in fault else f"{fault}@1")
    changed = {op.name for op in planted if op.name in clean and op is not clean[op.name]}
    are_states = all(clean[name].kind == "state" for name in changed)
    shows = {reader.name for name in changed for reader, _ in clean.readers(name)} if are_states else changed
    path = without(traced(planted, file, tmp_path / "a.trace"), planted.ops.keys() - clean.ops.keys())
    result = check_trace(path, tiny(arch))
    assert {op.op for op in result.faulty} == shows
    assert {op.cause.name if op.cause else op.shape for op in result.faulty} == {fault.partition("@")[0]}


def softmax_of(sees: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A softmax over the keys that a query sees, of their distances q - k, and of whether a key is the first."""

    def function(scores: Tensor, queries: Tensor, keys: Tensor, *, scale: float, **_: Any) -> Tensor:
        away = queries[:, None] - keys[None, :]
        return torch.softmax((scores * scale).masked_fill(~sees(away, keys == 0), -math.inf), -1)

    return function


@pytest.mark.parametrize(
    ("sees", "text"),
    [
        (
            lambda away, first: (away >= 0) & ((away < 4) | first),
            "a query sees the last 4 tokens, its own among them, and the first",
        ),
        (
            lambda away, first: away.abs() < 4,
            "no causal mask: the window of 4 hides keys that are as far after a query as before it",
        ),
    ],
)
@pytest.mark.parametrize("capture", ["all", "layers"])
def test_a_window_hides_less_than_it_should(
    sees: Callable[[Tensor, Tensor], Tensor], text: str, capture: Capture, tmp_path: Path
) -> None:
    """An author of Gemma's kept the first token, as StreamingLLM does, and took |q - k| for the distance."""
    model = Model(tiny_models.write("gemma3", tmp_path / "gemma3.gguf", others={"attention.sliding_window": 4}))
    windowed = [op for op in model.graph if op.kind == "softmax" and op.attrs.get("window") == 4]
    wrong = replace(windowed[1], function=softmax_of(sees))
    path = trace_graph(model.graph.changed(wrong), model.file, tmp_path / "a.trace", TOKENS, (7,), capture=capture)
    (finding,) = check_trace(path, model).findings
    assert finding.text.endswith(f"{text}.")


def oai(gate: torch.Tensor, up: torch.Tensor, *, alpha: float, limit: float) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def rows_of_both(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack([gate, up], -1).reshape(*gate.shape[:-1], -1)


def summed_over_queries(
    scores: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, *, scale: float
) -> torch.Tensor:
    shown = (scores * scale).masked_fill(keys[None, :] > queries[:, None], -math.inf)
    exponentials = (shown - shown.max(-1, keepdim=True).values).exp()
    return exponentials / exponentials.sum(1, keepdim=True)


def sinks_by_kv_heads(
    scores: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, sinks: torch.Tensor, **attrs: Any
) -> torch.Tensor:
    n_kv = 2  # of 6 heads
    return softmax(scores, queries, keys, torch.cat([sinks[head::n_kv] for head in range(n_kv)]), **attrs)


def sines_of_rows_twice_as_long(x: torch.Tensor, positions: torch.Tensor, *, rope: Rope) -> torch.Tensor:
    """Halves turn."""
    at = positions.double()[:, None] * rope.theta ** (-torch.arange(0, rope.n_rot, 2).double() / rope.n_rot)
    cos, sin = at[:, None].cos(), (2 * at)[:, None].sin()
    first, second = x[..., : rope.n_rot // 2], x[..., rope.n_rot // 2 :]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def sines_from_0(x: torch.Tensor, positions: torch.Tensor, *, rope: Rope) -> torch.Tensor:
    """As OLMo cuts its tables for queries behind a cache, were one of them cut at its beginning. Halves turn."""
    rates = rope.theta ** (-torch.arange(0, rope.n_rot, 2).double() / rope.n_rot)
    cos = (positions.double()[:, None] * rates)[:, None].cos()
    sin = (torch.arange(len(x)).double()[:, None] * rates)[:, None].sin()
    first, second = x[..., : rope.n_rot // 2], x[..., rope.n_rot // 2 :]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def rotate_half_of_neighbours(x: torch.Tensor, positions: torch.Tensor, *, rope: Rope) -> torch.Tensor:
    """View(n / 2, 2) for view(2, n / 2), in rotate_half alone."""
    at = positions.double()[:, None] * rope.theta ** (-torch.arange(0, rope.n_rot, 2).double() / rope.n_rot)
    at = torch.cat((at, at), -1)[:, None]
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * at.cos() + torch.cat((-second, first), -1) * at.sin()


def by_halves(x: Tensor) -> Tensor:
    """Heads whose pairs are neighbours with their first channels before the second, as the model had them."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def in_halves(turned: Callable[[Tensor, Tensor], Tensor], lying: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Rope by an engine whose heads lie so, as Keras' `RotaryEmbedding` does it: of heads and angles [T, 1, pairs]."""

    def function(x: Tensor, positions: Tensor, *factors: Tensor, rope: Rope, **_: Any) -> Tensor:
        angles = rope_angles(positions, *(factors or (None,)), rope)[:, None]
        places = lying(torch.arange(x.shape[-1])).argsort()
        return turned(lying(x), angles)[..., places]

    return function


def rot_of_halves_stacked(x: Tensor, angles: Tensor) -> Tensor:
    at, (first, second) = torch.cat((angles, angles), -1), x.chunk(2, -1)
    return x * at.cos() + torch.stack((-second, first), -1).flatten(-2) * at.sin()


def angles_one_after_the_other(x: Tensor, angles: Tensor) -> Tensor:
    at, (first, second) = torch.stack((angles, angles), -1).flatten(-2), x.chunk(2, -1)
    return x * at.cos() + torch.cat((-second, first), -1) * at.sin()


@pytest.mark.parametrize(
    ("arch", "ops", "function", "text"),
    [
        ("qwen3moe", "attn_k_rope", sines_of_rows_twice_as_long,
         "attn_k_rope in both layers: sin is that of twice the position."),
        ("qwen3moe", "attn_q_rope", sines_from_0,
         "attn_q_rope in both layers, in step 1: sin is that of positions that begin at 0 in each step."),
        ("qwen3moe", "attn_q_rope", rotate_half_of_neighbours,
         "attn_q_rope in both layers: sin multiplies channels that are taken apart as neighbours and put together as "
         "halves."),
        ("qwen3moe", "attn_q_rope", in_halves(rot_of_halves_stacked, lambda x: x),
         "attn_q_rope in both layers: sin multiplies channels that are taken apart as halves and put together as "
         "neighbours."),
        ("llama", "attn_q_rope", in_halves(rot_of_halves_stacked, by_halves),
         "attn_q_rope in both layers: sin multiplies channels that are taken apart as halves and put together as "
         "neighbours, in heads whose halves are pairs."),
        ("llama", "attn_k_rope", in_halves(angles_one_after_the_other, by_halves),
         "attn_k_rope in both layers: channel i turns by the angle of pair i // 2, where that of pair i % (n / 2) "
         "belongs, in heads whose halves are pairs."),
        ("gpt-oss", "ffn_moe_swiglu_oai", lambda gate, up, **attrs: oai(up, gate, **attrs),
         "ffn_moe_swiglu_oai in both layers: gate and up are exchanged."),
        ("gpt-oss", "ffn_moe_swiglu_oai",
         lambda gate, up, **attrs: oai(*rows_of_both(gate, up).tensor_split(2, -1), **attrs),
         "ffn_moe_swiglu_oai in both layers: gate and up lie by turns in one row, whose halves are taken for them."),
        ("gpt-oss", "attn_probs", sinks_by_kv_heads,
         "attn_probs in both layers: the sinks lie with KV heads in the place of the queries of each."),
        ("qwen3moe", "attn_probs", summed_over_queries,
         "attn_probs in both layers: exponentials are divided by their sum over queries instead of keys."),
        ("qwen3moe", "ffn_norm", lambda x, weight, *, eps: x / (x.square().mean() + eps).sqrt() * weight,
         "ffn_norm in both layers, in step 0: squares are averaged over all tokens of a step, not of each by itself."),
    ],
)  # fmt: skip
def test_an_axis_or_a_split_is_another(
    arch: str, ops: str, function: Callable[..., torch.Tensor], text: str, tiny: Tiny, tmp_path: Path
) -> None:
    """What the authors of picolm, gpt_oss and llama3.np could have written."""
    model = Model(tiny(arch))
    wrong = [replace(op, function=function) for op in model.graph if op.name.endswith(f".{ops}")]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS, (7,))
    (finding,) = check_trace(path, model).findings
    assert finding.text == text


def test_a_part_that_begins_a_head_early_is_named(tiny: Tiny, tmp_path: Path) -> None:
    """K in one product for Q, K and V, as a size of another number of heads has it."""
    model = Model(tiny("gptneox"))
    op = model.graph["blk.1.attn_k_rope"]
    (at,) = (i for i, view in enumerate(op.seen) if view)
    view = op.seen[at]
    assert view is not None
    heads, width = view.shape[1:]
    assert isinstance(view.offset, int)
    assert isinstance(width, int)
    assert isinstance(heads, int)
    first, n = view.offset, heads * width
    wrong = op.seeing({at: replace(view, offset=first - width)})
    trace = trace_graph(model.graph.changed(wrong), model.file, tmp_path / "t.trace", TOKENS, [7])
    (finding,) = check_trace(trace, model).findings
    assert finding.text == (
        f"attn_k_rope in layer 1: channels {first - width} to {first - width + n - 1} of {split(op.inputs[at])[1]} are "
        f"read where {first} to {first + n - 1} belong."
    )


@pytest.mark.slow
def test_a_mistake_of_prompts_alone_is_named_where_they_hand_on_a_state(tiny: Tiny, tmp_path: Path) -> None:
    """Of mamba2-minimal, whose chunks are computed otherwise than its steps: what steps read was recorded."""
    model = Model(tiny("mamba2"))

    def without_rate(
        state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, *others: Any, **attrs: Any
    ) -> torch.Tensor:
        rate = torch.nn.functional.softplus(dt)[..., None] if len(x) > 1 else 1
        return ssm_scan(state, x / rate, dt, *others, **attrs)

    wrong = [replace(op, function=without_rate) for op in model.graph if op.kind == "ssm_scan"]
    whole = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS, (7,), (9,), (4,))
    path = some_of(whole, tmp_path / "b.trace", lambda op: "state" not in op)
    (finding,) = check_trace(path, model).findings
    assert finding.text.endswith("in step 0: ssm_scan: what flows in is B x, where dt B x belongs.")


@pytest.mark.parametrize(
    ("capture", "window"),
    [("all", 0), *(pytest.param("layers", window, marks=pytest.mark.slow) for window in (4, 0))],
)
def test_scores_are_capped_by_a_number_on_no_list(capture: Capture, window: int, tmp_path: Path) -> None:
    """Of Gemma 2's scores, whose cap is ops of their own, by itself and beside a window that is ignored (lm.rs)."""
    path = tmp_path / "gemma2.gguf"
    caps = {"attn_logit_softcapping": 5.0, "attention.sliding_window": 4}
    model = Model(tiny_models.write("gemma2", path, others=caps))
    bent = [op for op in model.graph if op.kind == "tanh" and "output" not in op.name]
    windowed = [op for op in model.graph if op.kind == "softmax" and op.attrs.get("window")]
    wrong = [replace(op, function=lambda x: 1.46 * torch.tanh(x / 1.46)) for op in bent]
    wrong += [op.with_attrs(window=window) for op in windowed]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS, (7,), capture=capture)
    capped, *others = (finding.text for finding in check_trace(path, model).findings)
    assert capped.endswith("the soft cap is 7.3 instead of 5." if capture == "all" else "1.46 times what belongs.")
    assert [text.rpartition(": ")[2] for text in others] == ([] if window else ["no window instead of one of 4."])


@pytest.mark.parametrize(
    ("source", "whose"), [(lambda layer: 0, "layer 0"), (lambda layer: layer - 1, "the layer before")]
)
@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_a_bias_is_of_one_layer_or_of_the_one_before(
    source: Callable[[int], int], whose: str, capture: Capture, tmp_path: Path
) -> None:
    """`k_bias[0]` in every layer was said to be of the layer before, for of layer 1 that is true."""
    model = Model(tiny_models.write("qwen2", tmp_path / "qwen2.gguf", others={"block_count": 4}))
    wrong = []
    for layer in range(1, 4):
        op = model.graph[f"blk.{layer}.attn_k"]
        matrix, bias = op.weights
        wrong.append(replace(op, weights=(matrix, replace(bias, name=f"blk.{source(layer)}.attn_k.bias"))))
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS, (7,), capture=capture)
    (finding,) = check_trace(path, model).findings
    where = "attn_k in 3 of 4 layers (1 to 3)" if capture == "all" else "3 of 4 layers (1 to 3) (seen in ffn_residual)"
    own = "attn_k: " if capture == "layers" else ""
    assert finding.text == f"{where}: {own}uses attn_k.bias of {whose} where attn_k.bias belongs."


@pytest.mark.parametrize("eps", [1e-2, 3e-4])
def test_an_epsilon_outside_the_root_may_be_another(eps: float, tiny: Tiny, tmp_path: Path) -> None:
    model = Model(tiny("olmo2"))

    def norm(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight

    norms = [replace(op, function=norm) for op in model.graph if op.kind == "rms_norm"]
    path = trace_graph(model.graph.changed(*norms), model.file, tmp_path / "a.trace", TOKENS, (7,))
    (finding,) = check_trace(path, model).findings
    right = model.graph["output_norm"].attrs["eps"]
    assert finding.text.endswith(f"norms: eps is added outside the root, and is {eps:g} instead of {right:g}.")


def test_a_norm_that_pytorch_computes_in_bfloat16(tiny: Tiny, tmp_path: Path) -> None:
    """Of 32 rows at once the root is rounded with its inverse, of those that are left before. Values were off by 1.3
    times their bounds, and five mistakes were named that took nothing of it away.
    """
    model = Model(tiny("olmo2"))

    def norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        x = x.bfloat16()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.bfloat16()).to(weight)

    norms = [replace(op, function=norm) for op in model.graph if op.kind == "rms_norm"]
    tokens = tuple((37 * i + 11) % 250 for i in range(50))
    path = trace_graph(model.graph.changed(*norms), model.file, tmp_path / "a.trace", tokens, (7,))
    faulty = check_trace(path, model).faulty
    assert {op.op for op in faulty} == {"output_norm"}  # of the others few values are off, and within their bounds
    assert [op.cause.name if op.cause else op.shape for op in faulty] == ["norm_in_half"] * len(faulty)


def test_two_layers_may_share_a_state(tmp_path: Path) -> None:
    """Each begins with what the other left, of this step or of the one before: both were said to be layer 0's,
    for words of several layers are taken for one mistake.
    """
    few = {"block_count": 4, "attention.head_count": 6, "attention.head_count_kv": [0, 2, 0, 0]}
    model = Model(tiny_models.write("lfm2", tmp_path / "lfm2.gguf", others=few, without="bias|cls|dense_2"))
    second, third = (model.graph[f"blk.{layer}.conv_state"] for layer in (2, 3))
    shared = (
        replace(second, inputs=third.inputs),
        replace(third, inputs=second.inputs, kind="copy", function=lambda x: x),
    )
    path = trace_graph(model.graph.changed(*shared), model.file, tmp_path / "a.trace", TOKENS, (7,), (9,))
    words = "blk.{}.conv_state is what blk.{}.conv_state_next left, where blk.{}.conv_state_next belongs."
    findings = [finding.text for finding in check_trace(path, model).findings]
    assert findings == [
        f"conv_state in layer 3: {words.format(3, 2, 3)}",
        f"layer 2 (seen in conv_input), in steps 1, 2: conv_state: {words.format(2, 3, 2)}",
    ]


@pytest.mark.parametrize("capture", ["all", "layers"])
def test_two_norms_may_have_each_others_weights(capture: Capture, tiny: Tiny, tmp_path: Path) -> None:
    """Behind hidden states one was skipped, and what reads it normed with the weight of the other."""
    model = Model(tiny("llama"))
    norms = [model.graph[f"blk.1.{name}"] for name in ("attn_norm", "ffn_norm")]
    wrong = [replace(op, weights=other.weights) for op, other in zip(norms, norms[::-1], strict=True)]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS, (7,), capture=capture)
    (finding,) = check_trace(path, model).findings
    assert finding.text.endswith("attn_norm and ffn_norm have each other's weights.")


CHUNKS = {
    "not decayed": "the state is not decayed from a chunk of 5 tokens to the next",
    "forgotten": "each chunk of 5 tokens begins with what the one before it added to the state, without what was there",
    "read early": "what came before a chunk of 5 tokens is decayed by one token too few in each token's value",
    "added late": "what a token adds to the state that its chunk of 5 leaves is decayed by that token, too",
}


@pytest.mark.parametrize(
    ("mistake", "capture"),
    [
        pytest.param(mistake, capture, marks=[pytest.mark.slow] * (capture == "layers"))
        for mistake in CHUNKS
        for capture in ("all", "layers")
    ],
)
def test_what_chunks_of_a_scan_leave_for_one_another(
    mistake: str, capture: Capture, tiny: Tiny, tmp_path: Path
) -> None:
    """A kernel for prompts computes many tokens at once, one for decoded tokens none but its own: the prompt is wrong,
    from the second chunk on or from the third.
    """
    model = Model(tiny("mamba2"))
    scans = [op for op in model.graph if op.kind == "ssm_scan"]

    def kernel(state: Tensor, x: Tensor, *others: Tensor, **attrs: Any) -> Tensor:
        scan = partial(ssd, chunk=5, mistake=mistake) if len(x) > 1 else ssm_scan
        return scan(state, x, *others, **attrs)

    wrong = [replace(op, function=kernel) for op in scans]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS * 2, (7,), capture=capture)
    faulty = check_trace(path, model.path).faulty
    assert {op.step for op in faulty} >= {0}  # and what reads the state, where that was not recorded
    assert {op.layer for op in faulty} == {layer_of(op.name) for op in scans}
    assert {op.cause.text if op.cause else op.shape for op in faulty} == {f"ssm_scan: {CHUNKS[mistake]}"}


def scanned(after: Callable[..., Tensor], *, reads: Callable[..., Tensor] = lambda c, b: c, early: bool = False) -> Any:
    """A state space in which a state is what `after` makes of it, its decay, dt, B x and -a, head by head."""

    def function(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, **_: Any) -> Tensor:
        dt, (n_head, size), s, values = torch.log1p(torch.exp(dt)), x.shape[1:], state.reshape(*x.shape[1:], -1), []
        for t in range(len(x)):
            made, before = torch.zeros_like(s), s
            for h in range(n_head):
                group = h // (n_head // b.shape[1])
                for i in range(size):
                    made[h, i] = after(s[h, i], a[h], dt[t, h], b[t, group] * x[t, h, i], c[t, group] * x[t, h, i])
            s = made
            each = reads(c[t], b[t]).repeat_interleave(n_head // b.shape[1], 0)[:, None] * (before if early else s)
            values.append(each.sum(-1).flatten())
        return torch.cat((*values, s.flatten()))

    return function


def right_state(s: Tensor, a: Tensor, dt: Tensor, bx: Tensor, _: Tensor) -> Tensor:
    return torch.exp(dt * a) * s + dt * bx


SCANS = {
    "the state decays by 1 + dt a, where by exp(dt a)": scanned(lambda s, a, dt, bx, cx: (1 + dt * a) * s + dt * bx),
    "the state does not decay": scanned(lambda s, a, dt, bx, cx: s + dt * bx),
    "what flows in decays at once": scanned(lambda s, a, dt, bx, cx: (s + dt * bx) * torch.exp(dt * a)),
    "what flows in is (exp(dt a) - 1) / a B x, where dt B x belongs": scanned(
        lambda s, a, dt, bx, cx: torch.exp(dt * a) * s + (torch.exp(dt * a) - 1) / a * bx
    ),
    "what flows in is B x, where dt B x belongs": scanned(lambda s, a, dt, bx, cx: torch.exp(dt * a) * s + bx),
    "C stands for B too": scanned(lambda s, a, dt, bx, cx: torch.exp(dt * a) * s + dt * cx),
    "B stands for C too": scanned(right_state, reads=lambda c, b: b),
    "C reads the state before the token has changed it": scanned(right_state, early=True),
}


@pytest.mark.parametrize("words", SCANS)
def test_another_recurrence_of_a_state_space_is_named(words: str, tiny: Tiny, tmp_path: Path) -> None:
    model = Model(tiny("mamba2"))
    wrong = [replace(op, function=SCANS[words]) for op in model.graph if op.kind == "ssm_scan"]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS, (7,), (9,))
    faulty = check_trace(path, model.path).faulty
    assert {op.op for op in faulty} == {op.name for op in wrong}
    assert {op.cause.text if op.cause else op.shape for op in faulty} == {f"ssm_scan: {words}"}


def said_of(model: Model, wrong: list[Op], out: Path) -> set[str | None]:
    """What is said of an engine with these ops, which alone are faulty."""
    faulty = check_trace(traced(model.graph.changed(*wrong), model.file, out / "a.trace"), model.path).faulty
    assert {op.op for op in faulty} == {op.name for op in wrong}
    return {op.cause.text if op.cause else op.shape for op in faulty}


def test_an_epsilon_of_the_sum_that_is_added_to_the_mean_is_named(tiny: Tiny, tmp_path: Path) -> None:
    """Of queries and keys that are divided by their length: llama.cpp has a norm by the mean with a share of it."""
    model = Model(tiny("qwen3next"))
    norms = [op for op in model.graph if op.kind == "rms_norm" and not op.weights]
    n = norms[0].axes[-1]
    wrong = [op.with_attrs(eps=op.attrs["eps"] * n) for op in norms]
    eps = f"eps {wrong[0].attrs['eps']:g} is added to the mean of squares, where it belongs to their sum"
    assert said_of(model, wrong, tmp_path) == {eps}


def test_a_sum_of_squares_beyond_float16_is_named_in_any_norm(tiny: Tiny, tmp_path: Path) -> None:
    """numpy's `x.var()` in float16 (rwkv_v7_numpy.py): the row is divided by infinity."""

    def normed(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().sum(-1, keepdim=True).half().float() / x.shape[-1]
        y = centred / torch.sqrt(variance + eps) * (1 if weight is None else weight)
        return y if bias is None else y + bias

    model = Model(tiny("gpt2"))
    loud = model.graph["blk.0.attn_residual"]
    norm = model.graph["blk.0.ffn_norm"]
    assert norm.kind == "layer_norm"
    wrong = replace(norm, function=normed), replace(loud, function=lambda a, b: 300 * (a + b))
    path = traced(model.graph.changed(*wrong), model.file, tmp_path / "a.trace")
    found = {op.op: op.cause.text if op.cause else op.shape for op in check_trace(path, model.path).faulty}
    words = "the sum of squares is float16: infinite beyond 65,504, and what is normed becomes 0"
    assert found[norm.name] == words


@pytest.mark.parametrize(
    ("arch", "kind", "beta", "right"), [("gpt-oss", "swiglu_oai", 1.7, 1.702), ("llama", "swiglu", 1.25, 1)]
)
def test_the_factor_in_a_sigmoid_is_fitted(
    arch: str, kind: str, beta: float, right: float, tiny: Tiny, tmp_path: Path
) -> None:
    def function(gate: Tensor, up: Tensor, *, limit: float = math.inf, **_: float) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate / (1 + torch.exp(-beta * gate)) * (up + 1 if arch == "gpt-oss" else up)

    model = Model(tiny(arch))
    wrong = [replace(op, function=function) for op in model.graph if op.kind == kind]
    words = f"the factor in the sigmoid is {beta:g} instead of {right:g}"
    assert said_of(model, wrong, tmp_path) == {words}


@pytest.mark.slow
def test_what_shows_in_values_and_in_the_state_is_one_finding(tiny: Tiny, tmp_path: Path) -> None:
    """The scan's output, which holds both, was not recorded. Its words do not depend on the order of hashes."""
    model, words = Model(tiny("mamba2")), "C stands for B too"
    wrong = [replace(op, function=SCANS[words]) for op in model.graph if op.kind == "ssm_scan"]
    whole = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS, (7,))
    path = some_of(whole, tmp_path / "some.trace", lambda op: "ssm_scan" not in op)
    said = set()
    for seed in "12":
        run = [sys.executable, "-m", "tracediff", "check", path, "--model", model.path, "--json", "-"]
        done = subprocess.run(
            run, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False
        )
        said.add(tuple(one["text"] for one in json.loads(done.stdout)["findings"]))
    assert said == {(f"both layers (seen in ssm_state_next and mamba2_y_add_d): ssm_scan: {words}.",)}


def test_a_window_that_is_left_out_in_decode_is_no_missing_mask(tiny: Tiny, tmp_path: Path) -> None:
    """To the one query of a step both are the same, but the model has a window there."""
    file = GGUFFile(tiny("gemma3"))
    graph = load_graph(tiny("gemma3"))

    def in_prompts(scores: Tensor, *of: Tensor, window: int = 0, **attrs: Any) -> Tensor:
        return softmax(scores, *of, window=window if scores.shape[1] > 1 else 0, **attrs)

    wrong = [replace(op, function=in_prompts) for op in graph if op.attrs.get("window")]
    result = check_trace(traced(graph.changed(*wrong), file, tmp_path / "a.trace"), tiny("gemma3"))
    assert {op.step for op in result.faulty} == {1, 2}
    assert {op.cause.text if op.cause else op.shape for op in result.faulty} == {
        "no window instead of one of 5, in steps of one token alone"
    }


def test_another_scale_is_fitted_beside_a_window(tiny: Tiny, tmp_path: Path) -> None:
    file = GGUFFile(tiny("gemma3"))
    graph = build_graph(file)
    wrong = graph["blk.1.attn_probs"].with_attrs(scale=0.41)
    assert wrong.attrs["window"]
    path = traced(graph.changed(wrong), file, tmp_path / "a.trace")
    assert {op.op: op.cause and op.cause.text for op in check_trace(path, tiny("gemma3")).faulty} == {
        "blk.1.attn_probs": "the attention scale is 0.41 instead of 1"
    }


def test_a_record_that_is_called_as_a_mistake_calls_its_own_is_not_taken_for_it(tiny: Tiny, tmp_path: Path) -> None:
    """As the trace of a planted mistake has it."""
    file = GGUFFile(tiny("olmo2"))
    graph = build_graph(file)
    path = traced(plant(graph, file, "input_normed@blk.1.ffn_gate"), file, tmp_path / "a.trace")
    assert {name for _, name in Trace(path).ops} - graph.ops.keys()
    assert {finding.mistake for finding in check_trace(path, tiny("olmo2")).findings} == {"input_normed"}


# Mistakes of ops that were not recorded: made in which ops, in the variant that is said so; what is recorded.
UNSEEN = {
    "the same experts, another weight each": (
        "qwen3moe", "weights_not_normalised", "ffn_norm ffn_gate_inp ffn_residual", "ffn_moe_weights_norm",
        "a softmax is taken of the weights, where they are divided by their sum",
    ),
    "weights that no sum divides": (
        "qwen3moe", "weights_not_normalised", "ffn_norm ffn_gate_inp ffn_residual", "ffn_moe_weights_norm",
        "the weights are exp(x - the largest x), which no sum divides",
    ),
    "weights by another norm": (
        "qwen3moe", "weights_not_normalised", "ffn_norm ffn_gate_inp ffn_residual", "ffn_moe_weights_norm",
        "the weights are divided by the root of the sum of their squares, where by their sum",
    ),
    "slots in the place of experts": (
        "qwen3moe", "expert_not_looked_up", "ffn_norm ffn_gate_inp ffn_moe_topk ffn_gate_exps ffn_residual",
        "ffn_up_exps", "the first slot is of expert 0, the second of expert 1, whichever were chosen",
    ),
    "a state of earlier steps is mistaken too": (
        "mamba", "parts_exchanged", "ssm_in ssm_x ssm_out", "ssm_scan",
        "channels 8 to 47 and 48 to 87 of ssm_x are exchanged",
    ),
    "two ops that read what the other should": (
        "lfm2", "parts_exchanged", "shortconv.in_proj shortconv.out_proj",
        "shortconv.in_proj.mul, shortconv.in_proj.mul#2",
        "channels 0 to 95 and 96 to 191 of shortconv.in_proj are exchanged",
    ),
    "an activation with a formula of its own": (
        "gpt-oss", "up_plus_one", "attn_output", "ffn_moe_swiglu_oai", "up is not raised by 1",
    ),
    "another activation in that formula": (
        "gpt-oss", "act_silu", "attn_output", "ffn_moe_swiglu_oai", "SiLU is used for quick GELU",
    ),
    "a router's softmax before its choice": (
        "gpt-oss", "softmax_before_choice", "attn_output", "ffn_moe_weights.soft_max",
        "the softmax is over all experts, before the choice, not over the chosen ones",
    ),
    "weights and biases that are split otherwise": (
        "gpt-oss", "gate_up_by_turns", "attn_output", "ffn_gate_exps, ffn_up_exps",
        "rows of gate and up lie by turns in one matrix, whose halves are taken for them",
    ),
    "slopes of ALiBi": ("mpt", "alibi_slopes", "attn_output", "attn_probs", "ALiBi's slopes are the first 6 of 8"),
    "a clamp of one side": (
        "mpt", "clamp_ignored", "attn_output", "wqkv_clamped", "values below -1 are not cut off",
    ),
    "a cap is no attention scale": (
        "gemma2", "scale_dropped", "attn_q_rope attn_k_rope attn_probs", "kq_scaled_1", "the factor 0.05 is left out",
    ),
}  # fmt: skip


LONG = (
    "a router's softmax before its choice", "another activation in that formula", "weights that no sum divides",
    "the same experts, another weight each", "weights and biases that are split otherwise",
    "an activation with a formula of its own", "weights by another norm",
)  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in UNSEEN])
def test_a_mistake_between_two_records_is_named_in_prompt_and_decode(case: str, tiny: Tiny, tmp_path: Path) -> None:
    arch, name, recorded, where, words = UNSEEN[case]
    file = GGUFFile(tiny(arch))
    graph = build_graph(file)
    mistake, context = BANK[name], Context(graph, file)
    ops = [op for op in graph if mistake.where.holds(op, graph) and split(op.name)[1] in where.split(", ")]
    variants = [Variant(*one) for op in ops for one in mistake.change(op, context)]
    wrong = [variant.op for variant in variants if words in (variant.text, variant.name)]
    path = traced(graph.changed(*wrong), file, tmp_path / "whole.trace")
    keep = {*recorded.split(), "attn_norm", "attn_residual"}
    subset = some_of(path, tmp_path / "some.trace", lambda op: split(op)[1] in keep or not op.startswith("blk."))
    result = check_trace(subset, tiny(arch))
    assert {op.cause.text if op.cause else op.shape for op in result.faulty} == {f"{where}: {words}"}
    assert {op.step for op in result.faulty} == {0, 1, 2}


T, S = 11, 13  # tokens of a step, and of all so far
INTEGERS = {"tokens": torch.arange(T), "positions": torch.arange(S - T, S), "past": torch.tensor([S - T] * T)}


def computes(graph: Graph, wrong: Op, weights: Weights) -> None:
    """The op makes a value of its shape, and is known how far it may be off."""
    given: list[torch.Tensor] = []
    for (name, past), view in zip(wrong.reads, wrong.seen, strict=True):
        shape = graph[name].shape(T, S - T) if name in graph else ()
        whole = ({True: S, "earlier": S - T}[past], *shape[1:]) if past in (True, "earlier") else shape
        x = INTEGERS[name] if name in INTEGERS else torch.rand(whole, dtype=torch.float64)
        x = torch.arange(S) if name == "positions" and past else x
        x = torch.tensor([0] * (S - T) + [S - T] * T) if name == "past" and past is True else x
        given.append(seen(view, T, S, x) if view else x)
    energy = Energy()
    made = evaluate(wrong, given, weights, EXACT, energy)
    assert made.shape == graph[wrong.name].shape(T, S - T)
    noise(wrong, given, made, weights, energy, EXACT, "f32")


def mistaken(op: Op, graph: Graph, file: GGUFFile) -> Iterator[tuple[str, Variant]]:
    """All known mistakes that can be made in the op."""
    for mistake in BANK.values():
        for one in mistake.change(op, Context(graph, file)) if mistake.where.holds(op, graph) else ():
            yield mistake.name, Variant(*one)


@pytest.mark.parametrize(
    "arch",
    [
        "modern-bert",
        "minimax-01",
        "minimax-m2",
        "rwkv7",
        "arwkv7",
        "plm",
        "qwen3next",
        "gpt-oss",
        "deepseek2",
        "llama4",
    ],
)
def test_whatever_mistake_is_tried_the_op_makes_values_of_its_shape(arch: str, tiny: Tiny) -> None:
    """In graphs of every make: sums that repeat an operand, norms over all heads, views that follow the step."""
    file = GGUFFile(tiny(arch))
    graph, weights = build_graph(file), Weights(file)
    sorts = {(op.kind, split(op.name)[1]): op for op in graph if op.kind != "state"}
    for op in sorts.values():
        for _, variant in mistaken(op, graph, file):
            for wrong in variant.ops:
                computes(graph.changed(*variant.ops), wrong, weights)


@pytest.mark.parametrize("arch", ["qwen3", "gpt-oss"])
def test_whatever_two_mistakes_are_tried_in_an_op_it_makes_values_of_its_shape(arch: str, tiny: Tiny) -> None:
    """One on top of the other, as where both are in one op: what the first left of it the second must cope with."""
    file = GGUFFile(tiny(arch))
    graph, weights = build_graph(file), Weights(file)
    sorts = {(op.kind, op.axes, len(op.weights)): op for op in graph if op.kind != "state"}
    for op in sorts.values():
        for first in dict(mistaken(op, graph, file)).values():  # the last variant of each
            there = graph.changed(*first.ops)
            for second in dict(mistaken(there[op.name], there, file)).values():
                for wrong in () if undoes(second.op, there[op.name]) else second.ops:
                    computes(there.changed(*second.ops), wrong, weights)


def test_every_mistake_of_experts_and_states_is_planted_here() -> None:
    planted = {fault.partition("@")[0] for faults in PLANTED.values() for fault in faults} | {"groups_ignored"}
    assert {mistake.name for mistake in (*experts.AREA, *order.AREA, *states.AREA, *parts.AREA)} <= planted <= set(BANK)


def other_of_equals(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest, of equal ones those at the end."""
    n = scores.shape[-1]
    return n - 1 - torch.argsort(scores.flip(-1), stable=True, dim=-1, descending=True)[..., :k]


def test_ties_are_no_faults_whichever_expert_is_taken(tiny: Tiny, tmp_path: Path) -> None:
    file = GGUFFile(tiny("qwen3moe"))
    graph = build_graph(file)
    tied = []
    for op in graph:  # routers to which all experts are equal
        if op.name.endswith("ffn_gate_inp"):
            shape = op.weights[0].shape
            tied.append(replace(op, weights=(replace(op.weights[0], read=lambda *_, s=shape: torch.zeros(s)),)))
    graph = graph.changed(*tied)
    choices = [replace(op, function=other_of_equals) for op in graph if op.kind == "top_k"]
    path = traced(graph.changed(*choices), file, tmp_path / "a.trace", TOKENS * 9)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    picked = [record for record in records if record.get("op", "").endswith("ffn_moe_topk")]
    data = path.with_suffix(".bin").read_bytes()
    taken = [np.frombuffer(data, np.float32, int(np.prod(r["shape"])), r["offset"]) for r in picked]
    assert sum(len(ids) for ids in taken) > 600
    assert {*np.concatenate(taken)} == {4.0, 5.0, 6.0}  # of seven; ours would be 0, 1 and 2
    result = check_trace(path, tiny("qwen3moe"))
    assert {op.op for op in result.faulty} == {op.name for op in tied}
    n = 2 * (len(TOKENS * 9) + 2)
    assert f"ffn_moe_topk is another choice than its scores say in {n} of {n} tokens" in "".join(result.notes)
    assert f"{n} of these are ties" in "".join(result.notes)


YARN = {
    "linear": (
        {"ext_factor": 0.0},
        "all frequencies are divided by 40 (linear scaling); YaRN divides the slow ones alone",
    ),
    "betas": ({"beta_fast": 1.0, "beta_slow": 32.0}, "beta_fast and beta_slow are exchanged"),
    "no scaling": ({"freq_scale": 1.0, "ext_factor": 0.0}, "rope scaling is ignored: plain frequencies are used"),
    "mscale": (
        {"magnitude": 0.1 * math.log(40) + 1},
        "cos and sin are multiplied by YaRN's 0.1 ln(40) + 1 = 1.369 once more",
    ),
}


@pytest.mark.parametrize("wrong", YARN)
def test_yarn_is_mistaken_in_ways_of_its_own(wrong: str, yarn: Path, tmp_path: Path) -> None:
    """Of latent attention mscale is in the attention scale, and not in cos and sin."""
    numbers, said = YARN[wrong]
    file = GGUFFile(yarn)
    graph = build_graph(file)
    turned = [op.with_attrs(rope=replace(op.attrs["rope"], **numbers)) for op in graph if op.kind == "rope"]
    (finding,) = check_trace(traced(graph.changed(*turned), file, tmp_path / "a.trace"), yarn).findings
    assert finding.text == f"q_pe and k_pe in both layers: {said}."


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        (lambda pair: 1 - (pair / 3).clamp(0, 1), "runs the other way: the fast frequencies are divided"),
        (lambda pair: (pair / 2.0160002).clamp(0, 1), "are not rounded outwards to whole ones"),
    ],
)  # fmt: skip
def test_the_ramp_of_yarn(ramp: Callable[..., torch.Tensor], said: str, yarn: Path, tmp_path: Path) -> None:
    file = GGUFFile(yarn)
    graph = build_graph(file)

    def turned(x: torch.Tensor, positions: torch.Tensor, *, rope: Any) -> torch.Tensor:
        pair = torch.arange(8).double()
        plain, scaled = 1e4 ** (-pair / 8), ramp(pair)
        by = (positions.double()[:, None] * plain * (scaled / 40 + 1 - scaled))[:, None]
        a, b = x.double().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * by.cos() - b * by.sin(), a * by.sin() + b * by.cos()), -1).flatten(-2).to(x.dtype)

    ropes = [replace(op, function=turned) for op in graph if op.kind == "rope"]
    (finding,) = check_trace(traced(graph.changed(*ropes), file, tmp_path / "a.trace"), yarn).findings
    assert said in finding.text


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent attention for forty times the context that it was trained with."""
    scaling = {"type": "yarn", "factor": 40.0, "original_context_length": 64, "yarn_log_multiplier": 0.1}
    others = {f"rope.scaling.{key}": value for key, value in scaling.items()}
    return tiny_models.write("deepseek2", tmp_path_factory.mktemp("yarn") / "yarn.gguf", others=others)


@pytest.fixture(scope="module")
def with_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of four groups of two experts are chosen first."""
    groups = {"expert_count": 8, "expert_group_count": 4, "expert_group_used_count": 2}
    return tiny_models.write("deepseek2", tmp_path_factory.mktemp("groups") / "groups.gguf", others=groups)


def test_a_choice_that_does_not_mind_groups_is_named(with_groups: Path, tmp_path: Path) -> None:
    """What is tried on it has other shapes than experts have."""
    model, file = with_groups, GGUFFile(with_groups)
    graph = build_graph(file)
    choice = graph["blk.1.ffn_moe_topk"]
    biased = replace(choice, inputs=("blk.1.ffn_moe_probs_biased",), views=())
    left_out = [op for op in graph if "get_rows" in op.name or (op.kind in ("top_k", "fill") and op is not choice)]
    path = without(traced(graph.changed(biased), file, tmp_path / "a.trace"), {op.name for op in left_out})
    result = check_trace(path, model)
    assert {op.op for op in result.faulty} == {choice.name}
    assert [finding.mistake for finding in result.findings] == ["groups_ignored"]
    weights = replace(graph["blk.1.ffn_moe_weights"], inputs=("blk.1.ffn_moe_probs_biased", choice.name))
    path = traced(graph.changed(weights), file, tmp_path / "b.trace")
    assert {finding.mistake for finding in check_trace(path, model).findings} == {"selection_bias_in_weights"}


@pytest.mark.parametrize("arch", ["gemma3", "gemma2"])
def test_scores_may_be_scaled_where_llama_cpp_scales_queries(arch: str, tiny: Tiny, tmp_path: Path) -> None:
    """q.k is `attn_scores` in every engine, and the sound ones match, alone and against one another."""
    model = tiny(arch)
    file = GGUFFile(model)
    graph = build_graph(file)
    shown = [f"blk.{n}.attn_scores" for n in range(graph.hparams.n_layer)]
    assert not {*shown} & {*graph.ops}
    reference = traced(graph, file, tmp_path / "a.trace")
    scaled = [f"blk.{n}.attn_q_rope.scale" for n in range(graph.hparams.n_layer)]
    named = traced(graph.with_scores(shown + scaled), file, tmp_path / "d.trace")
    assert {*shown, *scaled} < {op for _, op in Trace(named).ops}
    assert check_trace(named, model).verdict == "match"  # q.k of the scaled queries, under the shorter name
    late = graph.with_scores(shown)
    assert not [name for name in late.ops if name.endswith("attn_q_rope.scale")]
    engine = without(traced(late, file, tmp_path / "b.trace"), {f"{name}_scaled" for name in shown})
    for result in (check_trace(engine, model), compare_traces(reference, engine, model=Model(model))):
        assert (result.verdict, result.findings) == ("match", ())
    wrong = [late[f"{name}_scaled"].with_attrs(scale=0.3) for name in shown]
    result = check_trace(traced(late.changed(*wrong), file, tmp_path / "c.trace"), model)
    assert [op.cause.name for op in result.faulty if op.cause] == ["attention_scale"] * len(result.faulty)
    assert {op.op for op in result.faulty} == {op.name for op in wrong}


def without(path: Path, ops: set[str]) -> Path:
    """The trace as an engine writes it that does not show these."""
    return some_of(path, path, lambda op: op not in ops)


def test_an_expert_that_is_not_added_is_said_by_its_slot(tiny: Tiny, tmp_path: Path) -> None:
    file = GGUFFile(tiny("qwen3moe"))
    graph = build_graph(file)
    two = replace(graph["blk.1.ffn_moe_out"], function=lambda a, b: a)
    (finding,) = check_trace(traced(graph.changed(two), file, tmp_path / "a.trace"), tiny("qwen3moe")).findings
    assert finding.text == "ffn_moe_out in layer 1: slot 2 of blk.1.ffn_moe_weighted is not added."


@pytest.mark.slow
def test_a_number_that_suits_one_row_suits_the_others_too(models: Models, tmp_path: Path) -> None:
    """A norm by the mean cube makes each row a multiple of the right one: of a single row, as another eps does."""
    file = GGUFFile(model := models("k-quants", "F32"))
    graph = build_graph(file)
    norms = [op for op in graph if op.name.endswith("ffn_norm")]
    cubes = [
        replace(op, function=lambda x, w, eps: x / (x.abs() ** 3).mean(-1, keepdim=True).pow(1 / 3) * w) for op in norms
    ]
    path = traced(graph.changed(*cubes), file, tmp_path / "a.trace", n_decode=3)
    faulty = check_trace(path, model).faulty
    assert {op.op for op in faulty} == {op.name for op in norms}
    assert [op.cause.text for op in faulty if op.cause] == []


@pytest.mark.parametrize(
    ("op", "found", "expected"),
    [
        ("ffn_moe_topk", (4, 2), (4, 3)),
        ("ffn_moe_weights", (4, 2, 1), (4, 3, 1)),
        ("ffn_moe_weights_norm", (4, 2), (4, 3)),
        ("ffn_down_exps", (4, 2, 96), (4, 3, 96)),
    ],
)
def test_what_a_mixture_has_of_each_chosen_expert(op: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert misfit(f"blk.0.{op}", found, expected, may_be_flat=True) == Misfit("1 slot fewer", ("slot",))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of seven experts, of which six are pairs that the router all but cannot tell apart."""
    original = tiny_models.values

    def values(name: str, *rest: Any) -> np.ndarray:
        made = original(name, *rest)
        if name.endswith("ffn_gate_inp.weight"):
            noise = np.random.default_rng(0).choice([-4e-7, 4e-7], made[1:6:2].shape)
            made[1:6:2] = made[0:6:2] * (1 + noise)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "values", values)
        return tiny_models.write("qwen3moe", tmp_path_factory.mktemp("twins") / "twins.gguf")


def test_ties_of_two_engines_are_said_and_are_no_faults(
    twins: Path, llama_cpp_trace: Callable[..., Path], torch_trace: Callable[..., Path]
) -> None:
    reference = llama_cpp_trace(twins, tokens=TOKENS * 4)
    candidate = torch_trace(twins, like=reference)
    result = compare_traces(reference, candidate, model=twins)
    assert result.verdict == "match"
    (note,) = [note for note in result.notes if "another choice" in note]
    found = re.search(r"than in .*/\d+.trace in (\d+) of 100 tokens of all layers; (\d+) of these are ties", note)
    assert found
    assert int(found[1]) >= int(found[2]) > 10


@pytest.mark.parametrize("lacking", ["ffn_moe_probs", "ffn_gate_inp ffn_moe_probs"])
def test_a_tie_whose_scores_were_not_recorded_is_none_either(
    lacking: str, twins: Path, llama_cpp_trace: Callable[..., Path]
) -> None:
    """They are computed again, and nearly equal ones come out in another order."""
    whole = llama_cpp_trace(twins, tokens=TOKENS * 4)
    out = whole.with_name("without-scores.trace")
    trace = some_of(whole, out, lambda op: op.rpartition(".")[2] not in lacking.split())
    result = check_trace(trace, twins)
    assert result.verdict == "match"
    assert "of these are ties" in "".join(result.notes)
    floors = [op.local.floor for op in result.ops if op.local and op.op.endswith("topk")]
    assert 0 < max(floors) < 1e-8  # of scores, not of the numbers of experts


def with_choices(wrong: np.ndarray, tiny: Tiny, tmp_path: Path) -> Path:
    """A trace whose choices of layer 1 are these, over and over, and no more of them."""
    file = GGUFFile(tiny("qwen3moe"))
    path = traced(build_graph(file), file, tmp_path / "a.trace", n_decode=0)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    choice = next(record for record in records if record.get("op") == "blk.1.ffn_moe_topk")
    data = bytearray(path.with_suffix(".bin").read_bytes())
    ids = np.frombuffer(data, np.float32, int(np.prod(choice["shape"])), choice["offset"])
    ids[:] = np.resize(wrong, ids.shape)
    path.with_suffix(".bin").write_bytes(data)
    return path


def test_a_part_of_each_head_is_said_to_be_one(tiny: Tiny, tmp_path: Path) -> None:
    """Channels "0 to 95 of attn_q" were read where "16 to 111" belong: as if they lay in one run."""
    model = Model(tiny("qwen3next"))
    name = next(op.name for op in model.graph if op.name.startswith("blk.1.gate") and "attn_q" in op.inputs[0])
    path = traced(plant(model.graph, model.file, f"parts_exchanged@{name}"), model.file, tmp_path / "a.trace")
    width = model.graph[name].seen[0].shape[-1]
    assert isinstance(width, int)
    words = f"channels 0 to {width - 1} of each head of attn_q are read where {width} to {2 * width - 1} of each head"
    assert {op.cause.text if op.cause else op.shape for op in check_trace(path, model.path).faulty} == {
        f"{words} belong"
    }


def test_an_expert_that_is_never_chosen_is_told(tiny: Tiny, tmp_path: Path) -> None:
    """The loop over experts ends one too early."""
    model = Model(tiny("qwen3moe"))
    op = model.graph["blk.1.ffn_moe_topk"]
    n = model.graph[op.inputs[0]].axes[-1]
    assert isinstance(n, int)

    def but_the_last(scores: Tensor, k: int) -> Tensor:
        return torch.argsort(scores[..., :-1], descending=True, stable=True)[..., :k]

    wrong = replace(op, function=but_the_last)
    path = traced(model.graph.changed(wrong), model.file, tmp_path / "last.trace", TOKENS * 3)
    shapes = [op.shape for op in check_trace(path, model.path).faulty if op.op == wrong.name]
    assert shapes[0]
    assert shapes[0].startswith(f"{n - 1} is never chosen; another choice in ")


def test_a_choice_is_told_in_places_and_not_in_scores(tiny: Tiny, tmp_path: Path) -> None:
    """A mask of what was taken already that does not work: the score of the place was called what was recorded."""
    model = tiny("qwen3moe")
    n = build_graph(GGUFFile(model))["blk.1.ffn_moe_topk"].axes[-1]
    assert isinstance(n, int)
    path = with_choices(np.array([1] * n), tiny, tmp_path)
    result = check_trace(path, model)
    (choice,) = [op for op in result.faulty if op.op == "blk.1.ffn_moe_topk"]
    n_tokens = Trace(path).ops[0, choice.op].shape[0]
    assert choice.shape
    assert f"another choice in {n_tokens} of {n_tokens} tokens: token 0 takes 1 and 1" in choice.shape
    assert choice.shape.endswith(f"; {n_tokens} tokens took one twice")
    assert choice.local
    assert (choice.local.worst.candidate, choice.local.worst.reference % 1) == (1.0, 0.0)
    assert choice.local.worst.reference != 1.0


def test_a_buffer_that_was_not_recorded_may_be_what_an_op_reads(tiny: Tiny, tmp_path: Path) -> None:
    """It is made of what was: here what the routed experts put out, which the shared one reads."""
    file = GGUFFile(tiny("deepseek2"))
    graph = build_graph(file)
    wrong = [replace(graph[f"blk.1.ffn_{x}_shexp"], inputs=("blk.1.ffn_moe_out",)) for x in ("gate", "up")]
    path = traced(graph.changed(*wrong), file, tmp_path / "a.trace", n_decode=0)
    path = some_of(path, tmp_path / "b.trace", lambda op: "_moe_" not in op and "exps" not in op)
    (finding,) = check_trace(path, tiny("deepseek2")).findings
    assert finding.text == "ffn_gate_shexp and ffn_up_shexp in layer 1: reads ffn_moe_out where ffn_norm belongs."


def test_what_runs_beside_an_op_may_have_run_before_it(tiny: Tiny, tmp_path: Path) -> None:
    """The graph has attention's output behind the norm of the feed-forward; an engine may add it first."""
    path = tiny_models.write("gptneox", tmp_path / "beside.gguf", others={"use_parallel_residual": True})
    file = GGUFFile(path)
    graph = build_graph(file)
    norm, beside = graph["blk.1.ffn_norm"], graph["blk.1.attn_output"]
    total = replace(graph["blk.1.ffn_residual"], name="blk.1.sum", inputs=(norm.inputs[0], beside.name))
    wrong = graph.changed(total, replace(norm, inputs=(total.name,)))
    trace = without(traced(wrong, file, tmp_path / "a.trace", n_decode=0), {total.name})
    (finding,) = check_trace(trace, path).findings
    assert "ffn_residual of the layer before + attn_output where" in finding.text


@pytest.mark.slow
def test_another_value_may_be_read_over_all_steps(tiny: Tiny, tmp_path: Path) -> None:
    file = GGUFFile(tiny("phi3"))
    graph = build_graph(file)
    wrong = [replace(graph[f"blk.{n}.attn_kqv"], inputs=(f"blk.{n}.attn_probs", f"blk.{n}.attn_k")) for n in (0, 1)]
    path = traced(graph.changed(*wrong), file, tmp_path / "a.trace")
    (finding,) = check_trace(path, tiny("phi3")).findings
    assert finding.text == "attn_kqv in both layers: reads attn_k where attn_v belongs."


def test_an_edit_of_one_op_is_tried_in_all_of_its_kind(tiny: Tiny, tmp_path: Path) -> None:
    """The mean over n + 1 is a factor to the last norm, which reads large values, and to no other."""

    def one_more(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        away = x - x.mean(-1, keepdim=True)
        return away / torch.sqrt(away.square().sum(-1, keepdim=True) / (x.shape[-1] + 1) + eps) * weight

    file = GGUFFile(tiny("cohere2"))
    graph = build_graph(file)
    wrong = [replace(op, function=one_more) for op in graph if op.kind == "layer_norm"]
    path = traced(graph.changed(*wrong), file, tmp_path / "a.trace")
    (finding,) = check_trace(path, tiny("cohere2")).findings
    assert finding.text == "all 3 norms: the scale is computed with squares / 97, where squares / 96 belongs."


def test_parts_that_are_read_otherwise_stay_in_their_row(tmp_path: Path) -> None:
    """One mistake on top of another: a part of each head, begun where a part of all heads is."""
    file = GGUFFile(tiny_models.write("gptneox", tmp_path / "thirds.gguf", others={"attention.head_count_kv": 6}))
    graph, row, tried = build_graph(file), 288, 0
    for first in parts._other_order(graph["blk.0.attn_q_rope"], Context(graph, file)):
        op = Variant(*first).op
        for second in (*parts._exchanged(op, Context(graph, file)), first):
            view = Variant(*second).op.seen[0]
            assert view
            reach = sum((n - 1) * by for n, by in zip(view.shape[1:], view.strides[1:], strict=True))
            assert view.offset + reach < row
            tried += 1
    assert tried


def test_a_layer_that_rotates_before_its_norms_is_not_said_to_have_no_rope(tiny: Tiny) -> None:
    for arch, words in {
        "hunyuan-dense": " behind their norm",
        "cohere2": "; this layer has no rotary embedding",
    }.items():
        file = GGUFFile(tiny(arch))
        graph = build_graph(file)
        found = [*BANK["rope_in_all_layers"].change(graph["blk.1.attn_scores"], Context(graph, file))]
        assert [Variant(*one).text for one in found] == [f"queries and keys are rotated{words}"]


def test_what_stands_for_scores_of_other_groups_is_named(with_groups: Path, tmp_path: Path) -> None:
    """Biases below 0 show it: an expert that is out of the question has then the larger score."""
    file = GGUFFile(with_groups)
    graph = build_graph(file)
    (fill,) = (op for op in graph.layer(1) if op.kind == "fill")
    lower = replace(graph["blk.1.ffn_moe_probs_biased"], function=lambda x, bias: x + bias - 3.0)
    path = traced(graph.changed(lower, replace(fill, attrs={**fill.attrs, "value": 0.0})), file, tmp_path / "a.trace")
    of_fill = [op for op in check_trace(path, with_groups).faulty if op.op == fill.name]
    assert {op.cause and op.cause.name for op in of_fill} == {"groups_ignored"}


def test_norms_that_write_over_what_they_read_are_named(models: Models, tmp_path: Path) -> None:
    """As nano-vllm's in float32, where `x.float()` is x itself: "the input passes through unchanged" was said."""
    model = Model(models("qwen3"))
    graph = model.graph
    norms = {norm.inputs[0]: norm for norm in graph if norm.name.endswith(("attn_norm", "ffn_norm", "output_norm"))}
    del norms["token_embd"]

    def in_place(op: Op) -> Op:
        norm = norms[op.name]
        function = KINDS[norm.kind].function
        return replace(
            op, weights=norm.weights, function=lambda a, b, weight: function(a + b, weight, eps=norm.attrs["eps"])
        )

    wrong = [in_place(op) for op in graph if op.name in norms]
    wrong += [replace(norm, function=lambda x, weight, **_: x) for norm in norms.values()]
    path = trace_graph(graph.changed(*wrong), model.file, tmp_path / "a.trace", TOKENS, (7,))
    result = check_trace(path, model.path)
    assert [finding.text for finding in result.findings] == [
        "attn_residual and ffn_residual in all 3 layers: the norm that reads it has written over it."
    ]
    assert {op.op for op in result.ops if op.status == "inherited"} == {norm.name for norm in norms.values()}


@pytest.mark.parametrize(
    ("words", "way"),
    {
        "the largest logit of each token is taken from all of its logits": lambda y: y - y.amax(-1, keepdim=True),
        "logarithms of probabilities stand for logits": lambda y: y - y.logsumexp(-1, keepdim=True),
        "probabilities stand for logits": lambda y: y.softmax(-1),
    }.items(),
)
def test_logits_that_were_changed_before_they_were_recorded_are_named(
    words: str, way: Callable[[Tensor], Tensor], models: Models, tmp_path: Path
) -> None:
    """An error of rank one, "as an adapter (LoRA) would leave"."""
    model = Model(models("llama", "F16"))
    head = replace(model.graph["output"], function=lambda x, weight, bias: way(x @ weight.to(x).T))
    path = trace_graph(model.graph.changed(head), model.file, tmp_path / "a.trace", TOKENS)
    assert [finding.text for finding in check_trace(path, model.path).findings] == [f"output: {words}."]


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_sinks_that_were_not_loaded_are_named(capture: Capture, tiny: Tiny, tmp_path: Path) -> None:
    """They were said to be scaled, in the one layer where that left hardly more."""
    file = GGUFFile(tiny("gpt-oss"))
    graph = build_graph(file)

    def unloaded(scores: Tensor, queries: Tensor, keys: Tensor, sinks: Tensor, **attrs: Any) -> Tensor:
        return softmax(scores, queries, keys, torch.zeros_like(sinks), **attrs)

    wrong = [replace(op, function=unloaded) for op in graph if op.kind == "softmax"]
    path = trace_graph(graph.changed(*wrong), file, tmp_path / "a.trace", TOKENS, capture=capture)
    (finding,) = check_trace(path, tiny("gpt-oss")).findings
    assert finding.text.endswith(": the sinks are 0, as if they had not been loaded.")
    assert "attn_probs" in finding.text


def test_one_mistake_of_the_router_is_one_where_another_suits_a_layer(tmp_path: Path) -> None:
    """With these tokens groups that are scored by their best expert choose in layer 1 what scores alone do, in more
    steps than they choose wrongly in layer 2.
    """
    others = {"expert_count": 8, "expert_group_count": 4, "expert_group_used_count": 2, "block_count": 3}
    model = tiny_models.write("deepseek2", tmp_path / "groups.gguf", others=others)
    file = GGUFFile(model)
    graph = build_graph(file)
    scored = [op for op in graph if any(by.kind == "sum_rows" for by, _ in graph.readers(op.name))]
    changes = [[*BANK["too_few_experts"].change(op, Context(graph, file))] for op in scored if op.kind == "get_rows"]
    wrong = graph.changed(*(Variant(*change[0]).op for change in changes if change))
    path = trace_graph(wrong, file, tmp_path / "a.trace", (126, 61, 30, 128), (67,), (70,))
    kept = [op.name for op in graph if op.kind not in ("fill", "top_k") and "ffn_moe_probs_biased." not in op.name]
    choices = ["blk.1.ffn_moe_topk", "blk.2.ffn_moe_topk"]
    result = check_trace(some_of(path, path, {*kept, *choices}.__contains__), model)
    assert [finding.text for finding in result.findings] == [
        "layers 1, 2 (seen in ffn_moe_topk): ffn_moe_probs_biased.get_rows: the score of a group is that of its best "
        "expert, where its best 2 belong."
    ]


def test_what_counts_too_few_is_said_of_groups(with_groups: Path) -> None:
    file = GGUFFile(with_groups)
    graph = build_graph(file)
    words = []
    for op in graph:
        if op.kind == "get_rows" and op.name.startswith("blk.1."):
            words += [Variant(*one).text for one in BANK["too_few_experts"].change(op, Context(graph, file))][-1:]
    assert words == [
        "the score of a group is that of its best expert, where its best 2 belong",
        "only 1 of the 2 chosen groups count",
        "only 1 of the 3 chosen experts count",
    ]


@pytest.mark.parametrize("wrong", [7.0, 0.5, np.nan, 1.0])
def test_a_choice_that_is_none_is_a_fault(wrong: float, tiny: Tiny, tmp_path: Path) -> None:
    """Beyond the experts, between two, no number; or one of the best twice."""
    path = with_choices(np.array([wrong]), tiny, tmp_path)
    faulty = {op.op for op in check_trace(path, tiny("qwen3moe")).faulty}
    assert "blk.1.ffn_moe_topk" in faulty


def test_choices_that_were_not_recorded_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = with_choices(np.zeros(1), tiny, tmp_path)
    with pytest.raises(TraceError, match=r"blk.1.ffn_moe_topk in step 0 holds zeros alone: nobody takes one expert"):
        check_trace(path, tiny("qwen3moe"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for record in lines:
        if record.get("op") == "blk.0.ffn_moe_topk":
            record["shape"][0] -= 2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TraceError, match=r"blk.0.ffn_moe_topk in step 0 has choices for 10 of 12 tokens"):
        check_trace(path, tiny("qwen3moe"))


def test_a_token_that_takes_the_first_expert_twice_is_a_fault(tiny: Tiny, tmp_path: Path) -> None:
    """The prompt's choices were recorded, so zeros in a decode step are the engine's."""
    model = Model(tiny("qwen3moe"))
    top_k = model.graph["blk.1.ffn_moe_topk"]

    def choice(x: torch.Tensor, k: int) -> torch.Tensor:
        right = KINDS["top_k"].function(x, k=k)
        return torch.zeros_like(right) if len(x) == 1 else right

    graph = model.graph.changed(replace(top_k, function=choice))
    path = trace_graph(graph, model.file, tmp_path / "mine.trace", TOKENS, (97,))
    assert [(op.op, op.step) for op in check_trace(path, model.path).faulty] == [("blk.1.ffn_moe_topk", 1)]


def test_a_norm_of_a_norm_that_another_mistake_inserted_is_no_circle(models: Models) -> None:
    """Two mistakes insert a norm before one projection: each has a name of its own, or the second reads itself."""
    file = GGUFFile(models("tiny"))
    graph = build_graph(file)
    for first in order._in_sequence(graph["blk.0.ffn_gate"], Context(graph, file)):
        assert isinstance(first, Variant)
        given = graph.changed(*first.ops)
        for second in order._input_normed(given["blk.0.ffn_gate"], Context(given, file)):
            assert isinstance(second, Variant)
            assert all(op.name not in op.inputs for op in second.ops)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda gate, up, limit: (gate.clamp(max=limit), (up + 1).clamp(-limit, limit) - 1),
            "up is held within 3 after 1 was added to it",
        ),
        (lambda gate, up, limit: (gate.clamp(max=2.0), up.clamp(-limit, limit)), "gate is held within 2 instead of 3"),
        (lambda gate, up, limit: (gate.clamp(max=limit), up.clamp(-2.5, 2.5)), "up is held within 2.5 instead of 3"),
    ],
    ids=["up + 1", "gate", "up"],
)
def test_a_limit_of_gate_or_of_up_is_told(
    made: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]], said: str, tiny: Tiny, tmp_path: Path
) -> None:
    model = Model(tiny("gpt-oss"))
    op = model.graph["blk.1.ffn_moe_swiglu_oai"].with_attrs(limit=3.0)  # which some values exceed here
    right = model.graph.changed(op)

    def wrong(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
        gate, up = made(gate, up, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    path = traced(right.changed(replace(op, function=wrong)), model.file, tmp_path / "t.trace")
    replay = Replay(Trace(path), right, Weights(model.file, torch.float64))
    faulty = [one for one in Explainer(replay).explain(judged(replay)) if one.status == "faulty"]
    assert {one.op for one in faulty} == {op.name}
    assert {one.cause.text for one in faulty if one.cause} == {said}
