"""Planted mistakes are found by the candidate's trace alone, at every layer, and called by their names."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Models, logits_of, some_of, trace_graph

from tracediff.diagnose.budget import Budget, OutOfTime
from tracediff.diagnose.error_shape import describe
from tracediff.diagnose.explain import Explainer
from tracediff.diagnose.judged import replay_and_explain
from tracediff.diagnose.mistakes import BANK
from tracediff.diagnose.mistakes.mistake import Context
from tracediff.diagnose.planting import plant
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import TracediffError
from tracediff.model.families import build_graph, load_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape, write_model
from tracediff.names import layer_of
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.attention import weighted_values
from tracediff.numerics.kinds.linear import linear
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import Effort, check_trace, compare_traces
from tracediff.replay import planning
from tracediff.replay.composing import Composing
from tracediff.replay.judging import Subject
from tracediff.replay.plan import Choice
from tracediff.replay.replay import Replay
from tracediff.result import OpResult
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12)
# fault, and the ops (without their layer) that must be faulty: exactly these
FAULTS = {
    "weight_transposed@ffn_down": {"ffn_down"},
    "weight_zero@attn_output": {"attn_output"},
    "bias_missing": {"attn_q", "attn_k", "attn_v"},
    "rope_permuted": {"attn_q", "attn_k"},
    "gate_up_swapped": {"ffn_gate", "ffn_up"},
    "qkv_order": {"attn_k", "attn_v"},
    "slot_off_by_one": {"attn_scores", "attn_kqv"},
    "eps": {"attn_norm", "ffn_norm", "output_norm"},
    "norm_weight_plus_one@attn_norm": {"attn_norm"},
    "norm_scaled@output_norm": {"output_norm"},
    "rope_pairing": {"attn_q_rope", "attn_k_rope"},
    "rope_theta": {"attn_q_rope", "attn_k_rope"},
    "rope_tables_repeated": {"attn_q_rope", "attn_k_rope"},
    "rope_not_crossed": {"attn_q_rope", "attn_k_rope"},
    "norm_by_deviation@attn_norm": {"attn_norm"},
    "norm_divisor@ffn_norm": {"ffn_norm"},
    "weight_cut@ffn_down": {"ffn_down"},
    "cache_cut": {"attn_scores", "attn_kqv"},
    "rope_decode_shifted": {"attn_q_rope", "attn_k_rope"},
    "rope_scaled": {"attn_q_rope", "attn_k_rope"},
    "rope_angles_coarse": {"attn_q_rope", "attn_k_rope"},
    "heads_first@attn_kqv": {"attn_kqv"},
    "window": {"attn_probs"},
    "mask_finite": {"attn_probs"},
    "mask_after_softmax": {"attn_probs"},
    "flash_not_rescaled": {"attn_probs"},
    "softmax_padded": {"attn_probs"},
    "softmax_sum_begins": {"attn_probs"},
    "norm_rounded_before_weight@attn_norm": {"attn_norm"},
    "sums_in_half@attn_v": {"attn_v"},
    "token_ids_cut": {"token_embd"},
    "no_mask": {"attn_probs"},
    "last_keys_dropped": {"attn_probs"},
    "mask_shifted": {"attn_probs"},
    "attention_scale": {"attn_probs"},
    "gqa_heads": {"attn_scores", "attn_kqv"},
    "cached_k_rotated_again": {"attn_scores"},
    "act_gelu": {"ffn_act"},
    "act_swapped": {"ffn_act"},
    "residual_dropped@ffn_residual": {"ffn_residual"},
    "row_before@output": {"output"},
    "activations_truncated@ffn_gate": {"ffn_gate"},
    "activations_miscounted@ffn_gate": {"ffn_gate"},
    "norm_weight_twice@ffn_norm": {"ffn_norm"},
    "scales_of_first_row@attn_v": {"attn_v"},
}


@pytest.mark.parametrize("weights", ["F32", "Q4_K_M"])
@pytest.mark.parametrize("fault", FAULTS)
def test_check_locates_and_names(fault: str, weights: str, models, torch_trace) -> None:
    model = models("k-quants", weights)
    result = check_trace(torch_trace(model, faults=(fault,)), model)
    name = fault.partition("@")[0]
    clean = build_graph(GGUFFile(model))
    planted = plant(clean, GGUFFile(model), fault)
    expected = {op.name for op in planted if op is not clean[op.name]}
    assert result.verdict == "diverged"
    assert {op.op for op in result.faulty} == expected
    assert {op.op.rpartition(".")[2] for op in result.faulty} == FAULTS[fault]
    assert {op.cause.name if op.cause else op.shape for op in result.faulty} == {name}
    assert all(op.cause.nmse < 0.1 * op.local.nmse for op in result.faulty)


@pytest.mark.parametrize("weights", ["F32", "Q4_K_M"])
def test_hidden_states_alone_name_a_missing_bias(weights: str, models, torch_trace) -> None:
    model = models("k-quants", weights)
    result = check_trace(torch_trace(model, capture="layers", faults=("bias_missing@1",)), model)
    assert {op.op for op in result.faulty} == {"blk.1.ffn_residual"}
    assert {op.cause.name if op.cause else op.shape for op in result.faulty} == {"bias_missing"}


@pytest.mark.slow
@pytest.mark.parametrize("weights", [pytest.param("F16", marks=pytest.mark.slow), "Q8_0"])
@pytest.mark.parametrize(
    ("layers", "n_decode"),
    [((0,), 30), *(pytest.param(layers, n, marks=pytest.mark.slow) for layers, n in (((0, 1), 0), ((1, 2), 1)))],
)
def test_layers_beside_mistaken_ones_pass_in_the_engines_arithmetic(
    layers: tuple[int, ...], n_decode: int, weights: str, models, torch_trace
) -> None:
    """It must be found though a mistake may be in all records, or in most, that it is looked for in."""
    model = models("loud", weights)
    faults = tuple(f"rope_theta@{layer}" for layer in layers)
    path = torch_trace(model, capture="layers", faults=faults, arithmetic="llama.cpp", n_decode=n_decode)
    result = check_trace(path, model)
    assert {op.op for op in result.faulty} == {f"blk.{layer}.ffn_residual" for layer in layers}
    assert {op.cause and op.cause.name for op in result.faulty} == {"rope_theta"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "n_faulty"),
    [("residual_normed@0", 1), pytest.param("attention_scale", 3, marks=pytest.mark.slow)],
)
def test_an_unusual_arithmetic_is_known_beside_a_mistake_and_under_it(
    fault: str, n_faulty: int, models, torch_trace
) -> None:
    """Neither most arithmetics' being out of reach of a mistaken record nor the first guess may rule it out."""
    model = models("k-quants")
    path = torch_trace(model, capture="layers", faults=(fault,), arithmetic="activations in bfloat16", n_decode=0)
    result = check_trace(path, model)
    assert [op.op for op in result.faulty] == [f"blk.{layer}.ffn_residual" for layer in range(n_faulty)]
    assert {op.cause and op.cause.name for op in result.faulty} == {fault.partition("@")[0]}
    layers = [op for op in result.ops if op.op.endswith("ffn_residual")]
    assert {(op.cause or op.local).arithmetic for op in layers} == {"activations in bfloat16"}


def test_norms_that_were_never_loaded_are_no_other_model(models, torch_trace) -> None:
    model = models("k-quants", "F16")
    result = check_trace(torch_trace(model, faults=("norm_without_weight",)), model)
    assert {op.cause and op.cause.name for op in result.faulty} == {"norm_without_weight"}
    assert {weight.cause for weight in result.weights if weight.status == "wrong"} == {"norm_without_weight"}


@pytest.mark.parametrize(
    ("fault", "ops", "weights", "arithmetic", "n_decode"),
    [
        ("bias_missing", "attn_q, attn_k, attn_v: ", "F32", "exact", 1),
        pytest.param("bias_missing", "attn_q, attn_k, attn_v: ", "Q4_K_M", "exact", 1, marks=pytest.mark.slow),
        pytest.param("bias_missing", "attn_q, attn_k, attn_v: ", "Q4_K_M", "llama.cpp", 1, marks=pytest.mark.slow),
        pytest.param(
            "rope_pairing@1", "blk.1.attn_q_rope, blk.1.attn_k_rope: ", "Q4_K_M", "llama.cpp", 0, marks=pytest.mark.slow
        ),
        # Whatever it is called in each.
        pytest.param(
            "residual_twice",
            "attn_residual, ffn_residual: the residual stream is added twice",
            "Q4_K_M",
            "llama.cpp",
            0,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_logits_alone_name_a_mistake_in_all_layers_or_one(
    fault: str, ops: str, weights: str, arithmetic: str, n_decode: int, models, torch_trace
) -> None:
    """Under the engine's own roundings too, which nothing but the right hypothesis shows."""
    model = models("k-quants", weights)
    path = logits_of(torch_trace(model, faults=(fault,), arithmetic=arithmetic, n_decode=n_decode))
    result = check_trace(path, model)
    assert [(op.step, op.cause and op.cause.name) for op in result.faulty] == [
        (step, fault.partition("@")[0]) for step in range(n_decode + 1)
    ]
    assert {op.cause.text.startswith(ops) for op in result.faulty} == {True}
    rounded = arithmetic == "llama.cpp"
    assert {"activations in q8_K blocks" in op.cause.arithmetic for op in result.faulty} == {rounded}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("input_normed@1", "what it reads is normed first, with ffn_norm.weight"),
        ("norm_of_another_part@1", "what it reads is normed with ffn_norm.weight where attn_norm.weight belongs"),
    ],
)
def test_what_projections_of_one_input_have_in_common_is_named_behind_hidden_states(
    fault: str, words: str, models, torch_trace
) -> None:
    """Q, K and V, which are one matmul in many engines: each by itself was tried, Q and K, and all that could be so."""
    model = models("llama")
    result = check_trace(torch_trace(model, capture="layers", faults=(fault,), n_decode=1), model)
    assert {op.op for op in result.faulty} == {"blk.1.ffn_residual"}
    said = {op.cause.text if op.cause else op.shape for op in result.faulty}
    assert all(f"attn_q, attn_k, attn_v: {words}" in text for text in said), said


@pytest.mark.slow
def test_where_layers_are_too_many_to_be_tried_one_by_one_the_report_says_so(models, torch_trace, monkeypatch) -> None:
    monkeypatch.setattr("tracediff.diagnose.search._ONE_BY_ONE", 1.0)
    model = models("llama")
    result = check_trace(logits_of(torch_trace(model, faults=("rope_pairing@1",), n_decode=0)), model)
    assert {(op.cause, op.shape.rpartition("; ")[2]) for op in result.faulty} == {
        (None, "mistakes were tried in all layers alike, not in one alone: record hidden states to find the layer")
    }


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("q4_k_scales", marks=pytest.mark.slow),
        pytest.param("q4_k_min_added", marks=pytest.mark.slow),
        "q4_k_nibbles",
        "q6_k_order",
    ],
)
def test_mistaken_dequantisation_is_named(fault: str, models, torch_trace) -> None:
    model = models("k-quants", "Q4_K_M")
    result = check_trace(torch_trace(model, faults=(fault,)), model)
    assert {op.cause.name if op.cause else op.shape for op in result.faulty} == {fault}


@pytest.mark.slow
def test_a_misread_type_in_a_file_that_mixes_types(models, torch_trace) -> None:
    """Tried on top of it: the weight of another layer, which is of another type there."""
    model, where = models("k-quants", "Q4_K_M"), "blk.2.attn_v"
    faults = ("q6_k_order", "bias_missing")
    result = check_trace(torch_trace(model, faults=[f"{fault}@{where}" for fault in faults]), model)
    assert {op.op: op.cause and {*op.cause.each} for op in result.faulty} == {where: {*faults}}
    swapped = torch_trace(model, faults=(f"q6_k_order@{where}", f"wrong_layer@{where}"))
    assert {op.op: op.cause and op.cause.name for op in check_trace(swapped, model).faulty} == {where: "wrong_layer"}


def test_several_mistakes_are_all_found_and_nothing_else(models, torch_trace, llama_cpp_trace) -> None:
    model = models("k-quants", "F16")
    reference = llama_cpp_trace(model)
    faults = ("weight_transposed@blk.0.attn_q", "rope_pairing@2", "attention_scale@1", "act_gelu@blk.1.ffn_act")
    result = compare_traces(reference, torch_trace(model, like=reference, faults=faults), model=model)
    assert {op.op: op.cause and op.cause.name for op in result.faulty} == {
        "blk.0.attn_q": "weight_transposed",
        "blk.1.attn_probs": "attention_scale",
        "blk.1.ffn_act": "act_gelu",
        "blk.2.attn_q_rope": "rope_pairing",
        "blk.2.attn_k_rope": "rope_pairing",
    }


@pytest.mark.parametrize(
    ("faults", "capture", "where"),
    [
        (("weight_transposed@blk.1.attn_q", "bias_missing@blk.1.attn_q"), "all", "blk.1.attn_q"),
        pytest.param(("rope_pairing@1", "act_gelu@1"), "layers", "blk.1.ffn_residual", marks=pytest.mark.slow),
    ],
)
def test_two_mistakes_behind_one_record_are_both_named(faults, capture, where, models, torch_trace) -> None:
    model = models("k-quants", "F32")
    result = check_trace(torch_trace(model, faults=faults, capture=capture), model)
    named = {op.op: set(op.cause.name.split(" + ")) if op.cause else op.shape for op in result.faulty}
    assert named == {where: {fault.partition("@")[0] for fault in faults}}


@pytest.mark.parametrize(
    ("faults", "capture"),
    [
        pytest.param(("cache_wraps",), "layers", marks=pytest.mark.slow),  # of a prompt written whole before it is read
        pytest.param(
            ("values_normed", "values_rotated"), "layers", marks=pytest.mark.slow
        ),  # two ops more in the place of one
        (("embedding_scaled",), "all"),  # of blocks a rule as well
        (("scales_of_first_row@1",), "all"),
    ],
)
def test_mistakes_of_quantised_models_have_their_names(faults, capture, models, torch_trace) -> None:
    model = models("qwen3", "Q8_0")
    result = check_trace(torch_trace(model, faults=faults, capture=capture), model)
    named = {frozenset(op.cause.name.split(" + ")) if op.cause else op.shape for op in result.faulty}
    assert named == {frozenset(fault.partition("@")[0] for fault in faults)}


@pytest.mark.slow
def test_what_leaves_nothing_wins_where_another_mistake_leaves_what_a_floor_hides(models, torch_trace) -> None:
    """An epsilon of 3 was believed of most layers, which left 3e-4, though two mistakes left 1e-13 of the others. The
    head is mistaken too, so that no record tells the arithmetic.
    """
    model = models(Shape("llama", 3, 96, 6, 2, 160, 320, theta=500_000.0, eps=1e-5, rope_factors=True))
    faults = ("head_is_embedding", "norm_bypassed", "softmax_sum_begins")
    result = check_trace(torch_trace(model, faults=faults, capture="layers", n_decode=0), model)
    named = {(op.layer is None, op.cause.name if op.cause else op.shape) for op in result.faulty}
    same = {(head, name.replace("norm_bypassed", "norm_skipped")) for head, name in named}  # from there
    assert same == {(True, "head_is_embedding"), (False, "norm_skipped + softmax_sum_begins")}


@pytest.mark.slow
def test_one_row_is_not_explained_by_what_other_rows_contradict(models, torch_trace) -> None:
    """Of a decoded token's row any factor looks like a wrong eps; but that eps would show in the prompt's rows."""
    model = models("k-quants", "F32")
    path = torch_trace(model, n_decode=1)
    record = Trace(path).ops[1, "blk.1.ffn_norm"]
    data = np.memmap(path.with_suffix(".bin"), np.float32, "r+", record.offset, record.size)
    data *= np.float32(0.999)
    data.flush()
    found, *_ = check_trace(path, model).faulty  # then those that were computed from the right values
    assert (found.op, found.step, found.cause) == ("blk.1.ffn_norm", 1, None)
    assert found.shape == "every value is 0.999 times what it should be"


@pytest.mark.slow
def test_several_mistakes_of_one_row_are_contradicted_by_the_prompts_rows(tiny, tmp_path: Path) -> None:
    """A norm of another power than the second was "multiplied by 1.27, and eps is added outside the root, and eps is
    1e-07" in each decoded row: of the three the last has no number of its own.
    """
    model = Model(tiny("qwen3"))

    def of_powers(x, weight, *, eps: float):
        return x / (x.abs().pow(1.5).mean(-1, keepdim=True).pow(1 / 1.5) + eps) * weight

    graph = model.graph.changed(replace(model.graph["output_norm"], function=of_powers))
    path = trace_graph(graph, model.file, tmp_path / "norm.trace", TOKENS, (200,), (53,))
    faulty = check_trace(path, model.path).faulty
    assert [(op.op, op.step, op.cause) for op in faulty] == [("output_norm", step, None) for step in range(3)]


@pytest.mark.slow
def test_a_window_is_told_where_no_layer_tells_the_arithmetic(models, tmp_path: Path) -> None:
    """All layers are mistaken: in 8-bit blocks, which are nearest, the first token is wrong already, and no window. In
    the last one every token is, by a mistake of its own; how long the window is the others tell.
    """
    file = GGUFFile(models("k-quants", "Q8_0"))
    graph = plant(plant(build_graph(file), file, "window"), file, "gate_up_swapped@2")
    path = trace_graph(graph, file, tmp_path / "window.trace", TOKENS, (97, 110, 32), (53,), capture="layers")
    assert [finding.text for finding in check_trace(path, file.path).findings] == [
        "all 3 layers (seen in ffn_residual): attn_probs: a window of 4 instead of none.",
        "layer 2 (seen in ffn_residual): ffn_gate, ffn_up: each multiplies with the other's weight.",
    ]


def variant(model: Model, name: str, words: str) -> list[Op]:
    """The ops of the model that a mistake changes, in the variant that is said so."""
    mistake, context = BANK[name], Context(model.graph, model.file)
    ops = [op for op in model.graph if mistake.where.holds(op, model.graph)]
    changed = (variant for op in ops for variant in mistake.variants(op, context))
    return [one.op for one in changed if one.text == words]


def test_known_mistakes_are_tried_everywhere_before_any_other_is_sought(
    models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody knows took all of the time: what was soon found in other matmuls had no name."""
    model = Model(models("k-quants", "F32"))
    noise = torch.randn(512, generator=torch.Generator().manual_seed(0))

    def unknown(x: torch.Tensor, w: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return linear(x, w, *bias) * noise[: len(w)].to(x)

    wrong = replace(model.graph["blk.0.attn_q"], function=unknown)
    graph = plant(model.graph.changed(wrong), model.file, "row_before@ffn_down")
    path = trace_graph(graph, model.file, tmp_path / "a.trace", TOKENS)

    def solved(*_: object, **__: object) -> None:
        raise OutOfTime

    monkeypatch.setattr("tracediff.diagnose.search.Search._solved", solved)
    faulty = check_trace(path, model.path, effort=Effort(seconds=600)).faulty
    assert {op.op: op.cause and op.cause.name for op in faulty} == {
        "blk.0.attn_q": None,
        **{f"blk.{n}.ffn_down": "row_before" for n in range(3)},
    }
    assert {op.op for op in faulty if not op.sought} == {"blk.0.attn_q"}


def test_a_norm_of_what_overflows_float32_is_no_kernel_that_did_not_run(models, tmp_path: Path) -> None:
    """Values of 1e20 have no sum of squares in float32, so its norm is 0: "as if nothing was stored"."""
    model = Model(models("k-quants", "F32"))
    op = model.graph["blk.1.ffn_residual"]
    loud = replace(op, function=lambda a, b: (a + b) * 1e20)
    path = trace_graph(model.graph.changed(loud), model.file, tmp_path / "loud.trace", TOKENS)
    causes = {op.op: op.cause.name if op.cause else op.shape for op in check_trace(path, model.path).faulty}
    assert causes.keys() == {"blk.1.ffn_residual", "blk.2.attn_norm", "blk.2.ffn_norm", "output_norm"}
    norms = {name: cause for name, cause in causes.items() if "norm" in name}
    assert set(norms.values()) == {"norm_f32_overflow"}


def test_a_soft_cap_after_the_mask_leaves_no_probability_zero(tiny, tmp_path: Path) -> None:
    """exp(-20) is less than the others' roundings: that it is not 0 alone tells. Where the mistake undone left hardly
    more of all values than before, no known one explained it.
    """
    model = Model(tiny("gemma2"))
    words = "the soft cap is applied after the mask: masked scores are -20, where minus infinity belongs"
    graph = model.graph.changed(*variant(model, "cap_after_mask", words))
    path = trace_graph(graph, model.file, tmp_path / "cap.trace", TOKENS, (97, 110, 32), (53,))
    faulty = check_trace(path, model.path).faulty
    windows = [op.name for op in model.graph if op.kind == "softmax" and "window" in op.attrs]
    assert {(op.op, op.step) for op in faulty} >= {(name, step) for name in windows for step in range(3)}
    assert {op.cause.text if op.cause else op.shape for op in faulty} == {words}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", " (divided by their scales)"])
def test_activations_that_are_cast_to_blocks_are_named_though_no_matmul_tells_the_arithmetic(
    how: str, models, tmp_path: Path
) -> None:
    """All matmuls have it, so none is settled: as ggml's reference has blocks, or crabml, but for a cast to int8."""
    model = Model(models("k-quants", "Q8_0"))
    words = f"activations in q8_0 blocks{how} are truncated towards 0, where rounding belongs"
    wrong = variant(model, "activations_truncated", words)
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "cast.trace", TOKENS)
    faulty = check_trace(path, model.path).faulty
    assert {op.op for op in faulty} == {op.name for op in wrong}
    assert {op.cause.text if op.cause else op.shape for op in faulty} == {words}


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_keys_of_a_last_block_that_is_not_full_are_told_in_decode_alone(size: int, models, tmp_path: Path) -> None:
    model = Model(models("k-quants", "F16"))
    words = f"keys are read in blocks of {size}, and those of a last block that is not full are left out"
    wrong, path, at = variant(model, "last_keys_dropped", words), tmp_path / "blocks.trace", 0
    engine = TorchEngine(model.graph, model.weights(torch.float32))
    with TraceWriter(path, "torch", model.graph.hparams.arch) as writer:
        for step, tokens in enumerate((TOKENS, (53,), (97,), (110,))):  # 11 keys, 12, 13, 14
            engine.graph = model.graph.changed(*wrong) if len(tokens) == 1 else model.graph
            engine.run(step, StepInput(tokens, tuple(range(at, at + len(tokens)))), TensorWriter(writer, "layers"))
            at += len(tokens)
    faulty = check_trace(path, model.path).faulty
    assert {op.step for op in faulty} == {n for n in (1, 2, 3) if (11 + n) % size}
    texts = {op.cause.text if op.cause else op.shape for op in faulty}
    assert texts == {f"attn_probs: {words}, in steps of one token alone"}


@pytest.mark.parametrize("weights", [pytest.param("F16", marks=pytest.mark.slow), "Q4_K_M"])
@pytest.mark.parametrize(
    "words",
    [
        "query head h reads key/value head h % 2; it is h // 4",
        pytest.param("query head h reads key/value head h // 2, at most 1; it is h // 4", marks=pytest.mark.slow),
    ],
)
def test_which_key_head_a_query_head_reads(words: str, weights: str, models, tmp_path: Path) -> None:
    model = Model(models("k-quants", weights))
    graph = model.graph.changed(*variant(model, "gqa_heads", words))
    path = trace_graph(graph, model.file, tmp_path / "heads.trace", TOKENS, capture="layers")
    faulty = check_trace(path, model.path).faulty
    assert {op.op for op in faulty} == {f"blk.{n}.ffn_residual" for n in range(3)}
    assert {op.cause.text if op.cause else op.shape for op in faulty} == {f"attn_scores, attn_kqv: {words}"}


@pytest.mark.parametrize("capture", ["all", "layers"])
@pytest.mark.parametrize("weights", ["F32", "Q8_0"])
@pytest.mark.parametrize(
    ("words", "steps", "first"),
    [
        ("the cache of the layer before is read", {0, 1, 2}, 1),
        ("the cache of layer 0 is read", {0, 1, 2}, 2),
        ("it has one cache with layer 2: of earlier steps that holds what layer 2 wrote", {1, 2}, 0),
    ],
)
def test_whose_layers_cache_is_read(words, steps, first, weights, capture, models, tmp_path: Path) -> None:
    """The index of the layer is wrong, or forgotten, in the address of the cache."""
    model = Model(models("k-quants", weights))
    wrong = variant(model, "cache_of_another_layer", words)
    steps_fed = TOKENS, (97, 110, 32), (53,)
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", *steps_fed, capture=capture)
    faulty = check_trace(path, model.path).faulty
    assert {op.cause.name if op.cause else op.shape for op in faulty} == {"cache_of_another_layer"}
    assert all(op.cause.text.endswith(words) for op in faulty)
    assert {op.step for op in faulty} == steps
    assert {op.layer for op in faulty} == {layer_of(op.name) for op in wrong}
    assert min(op.layer for op in faulty) == first


@pytest.mark.slow
def test_what_the_head_tells_is_held_against_roundings_of_few_engines(tiny, tmp_path: Path) -> None:
    """Of single layers and steps 8-bit roundings left less than what is right, though the head was seen to be exact."""
    model = Model(tiny("llama"))
    graph = plant(model.graph, model.file, "norm_rounded_before_weight")
    path = trace_graph(graph, model.file, tmp_path / "a.trace", range(5, 22), (9,), (11,), capture="layers")
    faulty = check_trace(path, model.path, effort=Effort(seconds=0.01)).faulty
    layers = range(model.graph.hparams.n_layer)
    assert {(op.step, op.op) for op in faulty} >= {(step, f"blk.{n}.ffn_residual") for step in range(3) for n in layers}


@pytest.mark.slow
def test_roundings_of_few_engines_do_not_excuse_a_known_mistake(tiny, tmp_path: Path) -> None:
    """Quick GELU in all layers of gemma3, hidden states alone, leaves as much as bfloat16 does: it was undecided."""
    model = Model(tiny("gemma3"))
    graph = plant(model.graph, model.file, "act_gelu_quick")
    path = trace_graph(graph, model.file, tmp_path / "gelu.trace", TOKENS, capture="layers")
    faulty = check_trace(path, model.path).faulty
    assert [op.op for op in faulty] == [f"blk.{n}.ffn_residual" for n in range(7)]
    assert {op.cause and op.cause.name for op in faulty} == {"act_gelu_quick"}
    # The head and its norm tell what the engine rounds, and that excuses nothing; without them something may.
    assert check_trace(path, model.path, effort=Effort(seconds=0)).verdict == "diverged"
    alone = some_of(path, tmp_path / "alone.trace", lambda op: op.endswith("ffn_residual") or op == "token_embd")
    at_once = check_trace(alone, model.path, effort=Effort(seconds=0))
    assert (at_once.verdict, at_once.faulty) == ("undecided", [])
    assert at_once.notes[-1] == (
        "Whether 7 records that roundings of few engines explain may have a known mistake was not sought to the end: "
        "--time 0 is too short for what is left to try. Give it more seconds."
    )


def test_another_cache_is_tried_where_sums_in_float16_are_followed_key_by_key(models, tmp_path: Path) -> None:
    """Of what it reads besides no key can be taken by itself: that ended the search."""
    model = Model(models("qwen3"))
    wrong = replace(model.graph["blk.1.attn_kqv"], function=lambda probs, v: weighted_values(probs, v + v.abs().sqrt()))
    path = trace_graph(
        model.graph.changed(wrong), model.file, tmp_path / "t.trace", (256,), (84,), (104,),
        scheme=scheme_named("exact, flash attention"),
    )  # fmt: skip
    faulty = check_trace(path, model.path, effort=Effort(seconds=5)).faulty
    assert {(op.op, op.bug) for op in faulty} == {("blk.1.attn_kqv", "")}


def test_positions_shifted_alike_are_no_mistake(models, torch_trace, tmp_path: Path) -> None:
    """Logits do not change when every position moves by the same amount."""
    from dataclasses import replace as changed

    from tracediff.engine.torch_run import TorchOptions, trace_torch
    from tracediff.trace.format import Step

    model = models("k-quants", "F32")
    tokens = (256, 72, 101, 108, 108)
    steps = [Step(0, tokens, tuple(range(7, 12))), Step(1, (111,), (12,))]
    trace = trace_torch(model, tmp_path / "shifted.trace", changed(TorchOptions()), steps=steps)
    assert check_trace(trace, model).verdict == "match"


@pytest.mark.parametrize(
    ("family", "fault", "either", "other"),
    [
        ("llama", "rope_pairing", "rope pairs halves", "Q/K rows are permuted from halves to neighbours"),
        ("qwen2", "act_swapped", "SiLU is applied to up", "each multiplies with the other's weight"),
    ],
)
def test_what_is_alike_from_outside_is_said_to_be(
    family: str, fault: str, either: str, other: str, models, torch_trace
) -> None:
    model = models(family, "F32")
    (cause,) = {
        op.cause.text for op in check_trace(torch_trace(model, capture="layers", faults=(fault,)), model).faulty
    }
    assert "the same from here; record " in cause
    assert either in cause
    assert other in cause


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param("rope_pairing", marks=pytest.mark.slow), "attention_scale"])
def test_what_is_alike_elsewhere_is_not_said_where_it_is_not(fault: str, models, torch_trace) -> None:
    """Permuted rows of Q and K come to the other pairing where they have no bias; one scale for another is no scale
    that is applied twice.
    """
    model = models("qwen2", "F32")
    faulty = check_trace(torch_trace(model, capture="layers", faults=(fault,)), model).faulty
    assert faulty
    assert not [op.cause.text for op in faulty if op.cause and "the same from here" in op.cause.text]


def test_scores_that_are_scaled_are_told_how_to_be_called(models, torch_trace) -> None:
    model = models("k-quants", "F32")
    faulty = check_trace(torch_trace(model, faults=("scores_scaled@1",)), model).faulty
    assert {(op.op, op.cause.name) for op in faulty} == {("blk.1.attn_scores", "scores_scaled")}
    assert "if they are only recorded so, call them blk.1.attn_scores_scaled" in faulty[0].cause.text


def scaled_in(path: Path, model: Path, scale: float, out: Path, mask: float = 0.0) -> Path:
    """A trace of an engine that shows its scores when they are scaled, and perhaps wrongly, or masked."""
    trace = Trace(path)
    with TraceWriter(out, "mine", trace.header.arch, model.name, trace.header.weights) as writer:
        for step, given in trace.steps.items():
            writer.step(step, given.tokens, given.positions)
            for record in (record for (of, _), record in trace.ops.items() if of == step):
                values, name = trace.values(record).astype(np.float32), record.op
                if name.endswith("attn_scores"):
                    values, name = values * np.float32(scale), f"{name}_scaled"
                    if mask:
                        after = np.arange(values.shape[2]) > np.array(given.positions)[:, None]
                        values = np.where(after, np.float32(mask), values)
                writer.op(step, name, values, "f32")
    return out


@pytest.mark.slow
def test_an_engine_may_show_its_scores_when_they_are_scaled(models, torch_trace, tmp_path) -> None:
    """Of such a trace every op is judged, against a reference that has them unscaled too."""
    model = models("k-quants", "F32")
    path, right = torch_trace(model), load_graph(model)["blk.0.attn_probs"].attrs["scale"]
    mine = scaled_in(path, model, right, tmp_path / "mine.trace")
    for result in (check_trace(mine, model), compare_traces(path, mine, model=model)):
        assert result.verdict == "match"
        assert [op.op for op in result.ops if not op.local and op.candidate] == []
    assert "attn_scores_scaled" not in load_graph(model).ops
    masked = check_trace(scaled_in(path, model, right, tmp_path / "masked.trace", mask=-np.inf), model)
    assert masked.verdict == "match"  # as of scores: what the mask hides does not count
    twice = scaled_in(path, model, right * 1.01, tmp_path / "twice.trace")
    faulty = check_trace(twice, model).faulty
    assert {op.op for op in faulty} == {
        f"blk.{n}.{op}" for n in (0, 1, 2) for op in ("attn_scores_scaled", "attn_probs")
    }


def test_what_no_mistake_explains_is_described(models, torch_trace) -> None:
    model = models("k-quants", "F32")
    path = torch_trace(model)
    data = bytearray(path.with_suffix(".bin").read_bytes())
    record = Trace(path).ops[0, "blk.1.ffn_up"]
    values = np.frombuffer(data, np.float32, record.size, record.offset)
    values[:] = values * np.float32(1.25)
    path.with_suffix(".bin").write_bytes(data)
    result = check_trace(path, model)
    faulty = {op.op: op.shape for op in result.faulty}
    assert faulty["blk.1.ffn_up"] == "every value is 1.25 times what it should be"


def test_values_that_were_quantised_in_a_way_of_the_engines_own_are_said_to_be() -> None:
    axes = ("token", "channel")
    rows = torch.randn(5, 192, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    groups = rows.unflatten(1, (-1, 64))
    steps = groups.abs().amax(-1, keepdim=True) * 0.83 / 7  # largest values are cut, as no listed way does
    quantised = ((groups / steps).round().clamp(-8, 7) * steps).flatten(1)
    said = "each group of 64 values has 16 evenly spaced levels at most, as if it was quantised"
    for held in (torch.float32, torch.bfloat16):
        assert said in describe(quantised.to(held).double(), rows, axes)
    assert "levels" not in describe(1.1 * quantised + 0.01, quantised, axes)  # as the right ones have
    assert "levels" not in describe(rows + 0.1 * rows.flip(0), rows, axes)
    for integers in (63, 127):
        step = rows.abs().amax(1, keepdim=True) / integers
        assert "each row of 192 values has " in describe((rows / step).round() * step, rows, axes)


def test_what_is_said_of_an_error_is_of_the_error_and_not_of_what_is_right() -> None:
    """Beside an error of 1e-9 all tokens are multiples of themselves, in their own order."""
    random = torch.Generator().manual_seed(0)
    x, noise = torch.randn((2, 9, 13), generator=random, dtype=torch.float64)
    axes = ("token", "channel")
    wrong = x.clone()
    wrong[4:] += 3e-5 * noise[4:]
    wrong[7, 3] += 1e-2
    said = describe(wrong, x, axes)
    assert "wrong in 1 of 9 tokens: 7" in said
    assert "multiple" not in said
    assert "order" not in said
    scaled = x * torch.linspace(0.5, 1.5, 9, dtype=torch.float64)[:, None]
    assert "each token is a multiple of what it should be, 0.5 to 1.5 times" in describe(scaled, x, axes)
    scaled = x * torch.linspace(1 - 1e-5, 1 + 1e-5, 9, dtype=torch.float64)[:, None]
    assert "each token is a multiple of what it should be, 0.99999 to 1.00001 times" in describe(scaled, x, axes)
    scaled = x * (torch.arange(9) % 4 != 1)[:, None]
    assert "each token that is wrong is 0; wrong in 2 of 9 tokens: 1, 5" in describe(scaled, x, axes)
    assert "the right values with tokens reversed" in describe(x.flip(0), x, axes)
    # Values that are off by little where they are: sorted, they are off by far less.
    many = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).double()
    assert "in another order" not in describe(many + 3e-3 * many.flip(0) * (many > 0), many, axes)


def test_an_activation_that_is_approximated_is_said_to_follow_from_its_input() -> None:
    """As where tanh is a polynomial: in a gate, too, whose second value scales what it is off by."""
    x, up = (torch.randn(17, 64, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in (0, 1))
    exact, by = torch.nn.functional.silu(x), 1e-3 * torch.sin(3 * x)
    said = "it is off by what follows from its input alone, as another function is, at most "
    assert said in describe(exact + by, exact, ("token", "channel"), inputs=[x])
    assert said in describe((exact + by) * up, exact * up, ("token", "channel"), inputs=[x, up])
    assert said not in describe(exact + by.flip(0), exact, ("token", "channel"), inputs=[x])
    # A cutoff of each token's own, most of what is off by it lying below all of them.
    x = 2 * torch.randn(17, 256, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    of_all, of_each = torch.full((17, 1), 4.0, dtype=torch.float64), torch.linspace(3.4, 4.6, 17, dtype=torch.float64)
    assert said in describe(torch.relu(x - of_all), x, ("token", "channel"), inputs=[x])
    assert said not in describe(torch.relu(x - of_each[:, None]), x, ("token", "channel"), inputs=[x])


def test_exponentials_that_are_approximated_are_said_to_follow_from_their_scores() -> None:
    """By their bits (Schraudolph, A Fast, Compact Approximation of the Exponential Function, 1999)."""
    scores = torch.randn(8, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    below = scores - scores.amax(-1, keepdim=True)
    bits = (12102203 * below.clamp(min=-80) + 127 * 2**23 - 298765).int()
    each = bits.view(torch.float32).double().masked_fill(below == -torch.inf, 0.0)
    right, axes = scores.softmax(-1), ("head", "token", "key")
    approximated = each / each.sum(-1, keepdim=True)
    said = "beside the largest of its query each is off by what follows from its score alone, "
    assert said in describe(approximated, right, axes)
    assert said not in describe((scores * 1.01 + scores.flip(-1).nan_to_num(neginf=0) * 0.01).softmax(-1), right, axes)


def test_what_leaks_where_0_belongs_is_not_called_rounding() -> None:
    right = torch.linspace(1.0, 2.0, 12, dtype=torch.float64).reshape(3, 4).tril()
    leaked = right.where(right != 0, 1e-31)
    leaks = "6 of the 6 values that should be 0 are not: up to 1e-31; "
    axes = ("query", "key")
    assert describe(leaked, right, axes) == f"{leaks}each of the others is right"
    assert describe(3 * right + 1e-31 * (right == 0), right, axes) == (
        f"{leaks}every other value is 3 times what it should be"
    )
    few = torch.linspace(1.0, 2.0, 40, dtype=torch.float64)
    few[3] = 0.0  # by chance, as weights of few bits make it
    assert "should be 0" not in describe(few.flip(0), few, ("channel",))


@pytest.mark.slow
def test_a_number_that_no_list_holds_is_told_from_hidden_states(models, tmp_path: Path) -> None:
    """In all layers alike: fitted to one of them, it holds in the others."""
    model = models("qwen2")
    file = GGUFFile(model)
    graph = build_graph(file)
    ropes = [op for op in graph if op.kind == "rope"]
    changed = graph.changed(*(op.with_attrs(rope=replace(op.attrs["rope"], theta=12_345.0)) for op in ropes))
    trace = trace_graph(changed, file, tmp_path / "base.trace", range(1, 41), capture="layers")
    faulty = check_trace(trace, model).faulty
    assert {op.op for op in faulty} == {f"blk.{layer}.ffn_residual" for layer in range(graph.hparams.n_layer)}
    assert {op.cause and op.cause.name for op in faulty} == {"rope_theta"}
    assert all("rope's base is 12345 instead of" in op.cause.text for op in faulty)


@pytest.mark.slow
def test_a_known_mistake_in_all_layers_is_asked_before_an_arithmetic_is_composed(
    models: Models, torch_trace: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compose one takes as many passes as there are ways to do its parts."""

    def never(*_: object) -> Choice:
        raise AssertionError("an arithmetic is composed")

    monkeypatch.setattr(Composing, "composed", never)
    monkeypatch.setattr(planning, "_DEAR", 0)  # as if it were a large model's layer
    model = models("qwen2")
    trace = torch_trace(model, capture="layers", faults=("rope_theta",))
    (finding,) = check_trace(trace, model).findings
    assert "rope's base is" in finding.text
    assert finding.text.startswith("all ")


@pytest.mark.slow
def test_what_was_found_is_said_where_the_time_is_over_before_all_were_asked(
    models: Models, torch_trace: Callable[..., Path]
) -> None:
    """Of a mistake in all layers behind hidden states: nothing was, and each layer was "wrong"."""

    class Asked(Budget):
        """Over when it was asked so often."""

        def __init__(self, most: float) -> None:
            super().__init__(math.inf)
            self.n, self.most = 0, most

        def check(self) -> None:
            self.n += 1
            if self.n > self.most:
                raise OutOfTime

    model = Model(models("qwen2"))
    path = torch_trace(model.path, capture="layers", faults=("rope_theta",))
    (judged,) = replay_and_explain(model, [Subject(Trace(path), {})])
    ops = [
        OpResult(op, step, layer_of(op), "", "faulty" if local.faulty else "ok", local=local)
        for (step, op), local in judged.locals.items()
    ]
    members = [at for at, op in enumerate(ops) if op.status == "faulty"]

    def named(budget: Asked) -> set[int]:
        found = Explainer(judged.replay).of(ops, members, budget, lambda fraction: None)
        assert all(found[at].sought is bool(found[at].cause) for at in members)
        return {at for at in members if found[at].cause}

    endless = Asked(math.inf)
    assert named(endless) == {*members}
    assert 0 < len(named(Asked(endless.n - 1))) < len(members)


def test_an_epsilon_that_the_file_has_under_another_key_is_called_by_both(models: Models, tmp_path: Path) -> None:
    """Not "as the file says", as if llama.cpp did otherwise."""
    model = Model(models("qwen2"))
    norm = model.graph["blk.0.attn_norm"]
    model.file.metadata["qwen2.attention.layer_norm_epsilon"] = 1e-5
    trace = trace_graph(model.graph.changed(norm.with_attrs(eps=1e-5)), model.file, tmp_path / "t.trace", range(1, 7))
    (finding,) = check_trace(trace, model).findings
    said = "eps is 1e-05, which the file has as attention.layer_norm_epsilon; its attention.layer_norm_rms_epsilon"
    assert finding.text == f"attn_norm in layer 0: {said} belongs, 1e-06."


def test_an_epsilon_that_the_file_has_is_said_to_be_the_files(tiny, tmp_path: Path) -> None:
    """llama.cpp's builder of qwen2vl does not read it."""
    model = Model(tiny("qwen2vl"))
    norm = model.graph["blk.0.attn_norm"]
    assert norm.attrs["eps"] == 0.0
    wrong = model.graph.changed(norm.with_attrs(eps=1e-6))
    trace = trace_graph(wrong, model.file, tmp_path / "t.trace", range(1, 7))
    (finding,) = check_trace(trace, model).findings
    said = (
        "eps is 1e-06, which the file has as attention.layer_norm_rms_epsilon; llama.cpp's graph of this model has 0."
    )
    assert finding.text.endswith(said)


def test_a_factor_in_the_sigmoid_is_told_from_hidden_states(models, tmp_path: Path) -> None:
    model = Model(models("qwen2"))
    act = model.graph["blk.1.ffn_act"]
    wrong = replace(act, function=lambda gate, up: gate * torch.sigmoid(1.43 * gate) * up)
    trace = trace_graph(
        model.graph.changed(wrong), model.file, tmp_path / "t.trace", range(1, 7), [8], capture="layers"
    )
    (finding,) = check_trace(trace, model).findings
    assert finding.text == "layer 1 (seen in ffn_residual): ffn_act: the factor in the sigmoid is 1.43 instead of 1."


@pytest.mark.parametrize("eps", [0.00373, 0.0001])  # and one that is a usual number times the right one
def test_an_epsilon_far_too_large_is_told_from_hidden_states(eps: float, models, tmp_path: Path) -> None:
    """Ten times the right one takes nothing away: what is not looked for far off is not found."""
    model = models("qwen2")
    file = GGUFFile(model)
    graph = build_graph(file)
    norms = [op for op in graph if op.name in ("blk.1.attn_norm", "blk.1.ffn_norm")]
    changed = graph.changed(*(op.with_attrs(eps=eps) for op in norms))
    trace = trace_graph(changed, file, tmp_path / "eps.trace", (1, 2, 3), capture="layers")
    (faulty,) = check_trace(trace, model).faulty
    assert faulty.cause
    assert f"eps is {eps:g} instead of 1e-06" in faulty.cause.text


@pytest.mark.slow
def test_a_rounding_that_turned_is_explained_by_what_explains_its_kin(models, torch_trace) -> None:
    """Of a decoded token's few scores one rounded the other way leaves as much as all of them: it was two mistakes."""
    model = models("k-quants", "F32")
    result = check_trace(torch_trace(model, capture="layers", faults=("scores_f16",), n_decode=4), model)
    assert {op.cause and op.cause.name for op in result.faulty} == {"scores_f16"}


def test_what_makes_a_nan_of_a_number_explains_nothing(models, tmp_path: Path) -> None:
    """A token that is NaN says nothing of the others: what computes all rows from that one would be NaN in all."""
    model = models("qwen2")
    file = GGUFFile(model)
    graph = build_graph(file)

    def spoiled(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.silu(gate) * up
        y[0] = torch.nan
        return y

    def unlike(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        apart = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0))
        return linear(x, weight * apart.to(weight), bias)

    changed = graph.changed(
        replace(graph["blk.1.ffn_act"], function=spoiled), replace(graph["blk.1.ffn_down"], function=unlike)
    )
    trace = trace_graph(changed, file, tmp_path / "nan.trace", range(1, 6))
    down = next(op for op in check_trace(trace, model).faulty if op.op == "blk.1.ffn_down")
    assert not down.cause
    assert down.shape
    assert "NaN" not in down.shape
    assert "wrong in 4 of 5 tokens: 1-4" in down.shape


def test_where_values_become_nan_and_not_what_they_make_of_others(models, tmp_path: Path) -> None:
    """One token's NaN spread over all later ops, and over the tokens that see it: one op made them."""
    model = models("qwen2")
    file = GGUFFile(model)
    graph = build_graph(file)
    down = graph["blk.0.ffn_down"]

    def spoiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = linear(x, weight, bias)
        y[3] = torch.nan
        return y

    right = trace_graph(graph, file, tmp_path / "right.trace", range(1, 6))
    nan = trace_graph(graph.changed(replace(down, function=spoiled)), file, tmp_path / "nan.trace", range(1, 6))
    result = check_trace(nan, model)
    assert [op.op for op in result.faulty] == ["blk.0.ffn_down"]
    said = "96 of 480 values are NaN or Inf, all in token 3; the others are right; all that it reads is finite"
    assert result.faulty[0].shape == said
    statuses = [op.status for op in result.ops]
    assert set(statuses[statuses.index("faulty") + 1 :]) == {"inherited"}
    through = some_of(nan, tmp_path / "through.trace", lambda op: op != "blk.1.attn_q_rope")
    assert [op.op for op in check_trace(through, model).faulty] == ["blk.0.ffn_down"]  # scores of one key are NaN
    compared = compare_traces(right, nan, model=model)
    assert [op.op for op in compared.faulty] == ["blk.0.ffn_down"]
    alone = check_trace(right, model)
    assert [op.reference.rms for op in compared.ops] == pytest.approx([op.candidate.rms for op in alone.ops], rel=1e-6)


def test_float32_values_in_a_file_of_float64_are_judged_as_float32(models, torch_trace) -> None:
    """numpy makes float64 of whatever meets a float64."""
    model = models("qwen2")
    path = torch_trace(model)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    trace, data, offset = Trace(path), [], 0
    for line in lines:
        if line["type"] == "op":
            values = trace.values(trace.ops[line["step"], line["op"]]).astype(np.float64)
            line |= {"dtype": "f64", "offset": offset}
            offset += values.nbytes
            data.append(values.tobytes())
    weights = [line for line in lines if line["type"] == "weight"]
    lines = [line for line in lines if line not in weights]
    lines[-1]["records"] = len(lines) - 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path.with_suffix(".bin").write_bytes(b"".join(data))
    assert check_trace(path, model).verdict == "match"


def test_one_wrong_value_of_many_is_caught(models, torch_trace) -> None:
    model = models("k-quants", "Q4_K_M")
    path = torch_trace(model)
    record = Trace(path).ops[0, "output"]
    data = bytearray(path.with_suffix(".bin").read_bytes())
    import numpy as np

    np.frombuffer(data, np.float32, record.size, record.offset)[1234] *= np.float32(1.001)
    path.with_suffix(".bin").write_bytes(data)
    faulty = check_trace(path, model).faulty
    assert [op.op for op in faulty] == ["output"]
    assert faulty[0].local.worst.at == (1234 // 320, 1234 % 320)


def test_an_unknown_fault_and_one_that_applies_to_nothing_are_refused(models) -> None:
    model = GGUFFile(models("llama"))
    graph = build_graph(model)
    with pytest.raises(TracediffError, match="unknown fault 'nonsense'"):
        plant(graph, model, "nonsense")
    with pytest.raises(TracediffError, match="applies to nothing in this llama model of 3 layers"):
        plant(graph, model, "bias_missing")


def test_a_fault_that_would_undo_another_is_refused(models, torch_trace) -> None:
    model = models("k-quants")
    faults = ("cached_k_rotated_again@1", "scores_scaled")
    with pytest.raises(TracediffError, match="would undo the one that is in"):
        torch_trace(model, faults=faults)


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_keys_that_every_step_rotates_where_they_lie_are_one_mistake(capture: str, models, tmp_path: Path) -> None:
    """In the first decode step they are as those of which a rotated copy is read: later ones tell."""
    model = Model(models("k-quants"))
    words = "cached keys are rotated once more by each step, those of before too"
    graph = model.graph.changed(*variant(model, "cached_k_rotated_again", words))
    path = trace_graph(graph, model.file, tmp_path / "rotated.trace", TOKENS, (97,), (110,), (32,), capture=capture)
    places = {"all": "attn_scores in all 3 layers", "layers": "all 3 layers (seen in ffn_residual)"}
    of = "attn_scores: " * (capture == "layers")
    assert [finding.text for finding in check_trace(path, model.path).findings] == [
        f"{places[capture]}, in steps 1 to 3: {of}{words}."
    ]


def test_what_hypotheses_read_of_all_steps_may_be_forgotten_with_the_rest(models, tmp_path: Path) -> None:
    """The model reads no step's beginning: asked when the last op reads it, the search ended in KeyError."""
    model = Model(models("k-quants"))
    trace = Trace(trace_graph(model.graph, model.file, tmp_path / "right.trace", TOKENS, (97,)))
    replay = Replay(trace, model.graph, model.weights())
    wrong, *_ = variant(model, "cached_k_rotated_again", "cached keys are rotated once more by this step")
    replay.known(trace.ops[1, wrong.name], given=[wrong])
    replay.forget_until(wrong.name)


def test_a_norm_by_the_mean_of_magnitudes_is_one_mistake_in_all_steps(models, tmp_path: Path) -> None:
    """Of one token each is right but for a factor: with the epsilon elsewhere another one was fitted to these."""
    model = Model(models("k-quants"))
    words = "values are divided by sqrt(mean(|x|)^2 + eps), where sqrt(mean(x^2) + eps) belongs"

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.abs().mean(-1, keepdim=True).square() + eps).sqrt() * weight

    graph = model.graph.changed(*(replace(op, function=norm) for op in model.graph if op.kind == "rms_norm"))
    path = trace_graph(graph, model.file, tmp_path / "norm.trace", TOKENS, (97,), (110,))
    assert [finding.text for finding in check_trace(path, model.path).findings] == [f"all 7 norms: {words}."]


def test_every_mistake_says_what_and_where_to_look() -> None:
    for name, mistake in BANK.items():
        assert mistake.text, name
        assert mistake.look, name
        assert set(mistake.where.kinds) <= set(KINDS), name


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("rope_over_heads@1", "the frequency's exponent counts the channels of all 8 heads, to 256, not those of each"),
        ("cache_wraps@blk.1.attn_kqv", "position p is cached in slot p % 4, where slots beyond are read too: zeros"),
        ("values_window@1", "of the cached values only the last 4 are added up"),
    ],
)
def test_mistakes_in_what_is_cached_and_how_it_turns(fault: str, words: str, models, torch_trace) -> None:
    """In a prompt and two decode steps each is one finding, in its own numbers."""
    model = models("k-quants", "Q4_K_M")
    faulty = check_trace(torch_trace(model, faults=(fault,)), model).faulty
    assert faulty
    for op in faulty:
        assert op.cause.name == fault.partition("@")[0]
        assert op.cause.text.startswith(words)


@pytest.mark.slow
def test_what_looks_rounded_behind_hidden_states_is_the_mistake_of_the_other_layers(tmp_path: Path) -> None:
    """Through a layer another eps leaves as much of a decoded token as a float16 cache, which was said of it."""
    shape = Shape("qwen3", n_layer=3, n_embd=96, n_head=6, n_head_kv=2, head_dim=20, n_ff=160, n_vocab=330)
    model = write_model(tmp_path / "m.gguf", shape, "F32")
    trace = trace_torch(
        model, tmp_path / "t.trace", TorchOptions(capture="layers", faults=("eps",)), (256, 17, 203, 5, 91, 33, 310), 2
    )
    result = check_trace(trace, model=model)
    ends = [op for op in result.ops if op.op.endswith("ffn_residual")]
    assert [op.cause and op.cause.name for op in ends] == ["eps"] * 9
    assert not any("float16" in one.text for one in result.said if one.about == "arithmetic")


@pytest.mark.slow
def test_what_to_record_to_tell_is_of_that_mistake_alone(tmp_path: Path) -> None:
    """Rope, which is wrong too, tells nothing of a gate that may be exchanged with up."""
    model = write_model(tmp_path / "m.gguf", Shape("llama", n_layer=1, theta=1e6), "F32")
    faults = ("rope_theta", "gate_up_swapped")
    trace = trace_torch(model, tmp_path / "t.trace", TorchOptions(capture="layers", faults=faults), (5, 17, 3, 91, 33))
    texts = [finding.text for finding in check_trace(trace, model=model).findings]
    assert len(texts) == 2
    assert "the same from here; record ffn_gate, ffn_up and ffn_act to tell" in texts[0]
    assert "rope's base" in texts[1]


def test_blocks_that_are_misread_are_said_of_all_weights_of_a_segment(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", Shape("llama", n_layer=1), "Q8_0")
    trace = trace_torch(
        model, tmp_path / "t.trace", TorchOptions(capture="layers", faults=("block_scale",)), (5, 17, 3, 91, 33)
    )
    (finding,) = check_trace(trace, model=model).findings
    said = "ffn_residual in layer 0, and token_embd and output: a block of Q8_0 has the scale of the next one."
    assert finding.text == said


def test_the_frequencies_of_another_head_size_are_no_other_base(tmp_path: Path) -> None:
    """A head of 20 channels where 96 channels and 6 heads make 16: the base of 3.16e+07 that fits is nobody's."""
    model = write_model(tmp_path / "m.gguf", Shape("qwen3", n_layer=1, head_dim=20, theta=1e6), "F32")
    trace = trace_torch(model, tmp_path / "t.trace", TorchOptions(faults=("rope_dim",)), (5, 17, 3, 91, 33))
    (finding,) = check_trace(trace, model=model).findings
    assert "the frequency's exponent is divided by 16 (n_embd / n_head) where 20 belongs" in finding.text
    assert finding.look == "the denominator of the frequency exponent"


def test_dropout_is_told_by_its_zeros_and_its_factor() -> None:
    """Of values that a mask makes 0 nothing is said; zeros alone, or a factor alone, are no dropout."""
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(3, 40, 40, generator=generator, dtype=torch.float64).tril()
    axes = ("head", "token", "key")
    dropped = torch.nn.functional.dropout(x, 0.2, training=True)
    share = 1 - int((dropped != 0).sum()) / int((x != 0).sum())
    assert describe(dropped, x, axes) == (
        f"{share:.3g} of the values are 0 and all others 1.25 times what they should be, as dropout of 0.2 leaves them "
        "(a torch model that is not in its eval mode has that)"
    )
    renormed = torch.softmax(torch.arange(20.0).cos().double(), 0).expand(1, 1, 20)
    hidden = renormed.masked_fill(torch.arange(20) < 4, 0.0)  # keys that a mask hides
    cases = [
        (dropped / 1.25, x),
        (1.25 * x, x),
        (dropped + 0.01 * (dropped != 0), x),
        (hidden / hidden.sum(), renormed),
    ]
    for other, right in cases:
        assert "dropout" not in describe(other, right, axes)


def test_a_vector_that_is_added_for_every_token_has_its_name() -> None:
    generator = torch.Generator().manual_seed(5)
    x, noise = (torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    bias, axes = 0.3 * noise[0], ("token", "channel")
    vectors = {9: [("ffn_norm.weight", noise[1].float()), ("attn_output.bias", bias.float())]}.get
    said = "the same vector is added for every token, as a bias would be"
    assert describe(x + bias, x, axes, vectors).startswith(f"{said}: attn_output.bias besides; ")
    assert describe(x - bias, x, axes, vectors).startswith(f"{said}: attn_output.bias is taken away; ")
    assert describe(x + 2 * bias, x, axes, vectors).startswith(f"{said}: 2 times attn_output.bias; ")
    about_1 = {9: [("attn_norm.weight", 1 + 0.01 * noise[2].float())]}.get
    assert describe(x + 1, x, axes, about_1).startswith(f"{said}; ")


def test_a_factor_near_1_is_not_named_by_the_size_of_a_single_value() -> None:
    """ "1.00022 times (sqrt(n) of its 1 channels)": of scores over one key."""
    x = torch.linspace(1.0, 2.0, 12, dtype=torch.float64).reshape(4, 3, 1)
    assert "channels)" not in describe(1.0005 * x, x, ("head", "token", "key"))
    assert "(sqrt(n) of its 4 channels)" in describe(2 * x.reshape(3, 4), x.reshape(3, 4), ("token", "channel"))


def test_a_factor_that_explains_half_of_an_error_is_not_said_of_every_value() -> None:
    """Of tanh by a quotient of polynomials, which is 1 to 1.004 times it, "every value is 1.00085 times" was said."""
    x = 0.1 * torch.randn(9, 48, generator=torch.Generator().manual_seed(1)).double()
    by_quotient = x * (27 + x.square()) / (27 + 9 * x.square())
    assert "every value is" not in describe(by_quotient, x.tanh(), ("token", "channel"))
    assert describe(1.04 * x, x, ("token", "channel")) == "every value is 1.04 times what it should be"
    # Nor where most of it is explained: weights of experts over a sum that 0.01 is added to.
    total = 10 + 0.5 * torch.arange(9)[:, None]
    assert describe(x / (total + 0.01), x / total, ("token", "expert")) == (
        "each token is a multiple of what it should be, 0.999 to 0.9993 times"
    )
    uneven = 1.004 * (1 + 0.002 * torch.rand(9, 48, generator=torch.Generator().manual_seed(2)).double())
    assert describe(uneven * x, x, ("token", "channel")) == "most values are 1.004 to 1.006 times what they should be"
