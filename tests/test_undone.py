"""Mistaken ops whose mistakes undo one another: what follows is right without their records."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import TOKENS, Models, some_of, trace_graph
from torch import Tensor

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.model.pairing import neighbours
from tracediff.names import layer_of, local_name
from tracediff.numerics.kinds import KINDS
from tracediff.pipeline import check_trace
from tracediff.result import Finding, Result
from tracediff.trace.reader import Trace

MODEL = "llama"  # whose heads conversion puts in another order


def planted(models: Models, out: Path, *faults: str) -> Result:
    model = models(MODEL)
    return check_trace(trace_torch(model, out, TorchOptions(faults=faults), TOKENS, 1), model)


def yet(finding: Finding) -> str:
    return finding.text.partition(" Yet ")[2]


def in_halves(op: Op) -> Op:
    """Heads as checkpoints have them, which rope turns by halves."""
    if op.kind == "rope":
        return op.with_attrs(rope=replace(op.attrs["rope"], pairing="halves"))
    if op.name.endswith(("attn_q", "attn_k")):
        width = op.axes[-1]
        return replace(op, function=lambda x, w, bias=None: x @ neighbours(w, width, 0, inverse=True).T)
    return op


def test_heads_in_the_order_of_checkpoints_are_said_to_be_undone(models: Models, tmp_path: Path) -> None:
    """By whoever loads a checkpoint: Q, K and their rope are wrong by the file, and nothing else is."""
    model = Model(models(MODEL))
    graph = model.graph.changed(*map(in_halves, model.graph))
    result = check_trace(trace_graph(graph, model.file, tmp_path / "t.trace", TOKENS), model)
    assert {finding.mistake for finding in result.findings} == {"rope_permuted", "rope_pairing"}
    names = "attn_q, attn_k, attn_q_rope and attn_k_rope"
    said = (
        f"attn_scores is right if {names} are computed as should be, and not read from the records: undone there, or "
        "wrong in the records alone."
    )
    assert {yet(finding) for finding in result.findings} == {said}


@pytest.mark.parametrize(
    "faults",
    [
        ("rope_pairing",),
        ("rope_permuted@attn_q", "rope_permuted@attn_k"),
        ("act_no_gate",),
        ("rope_pairing", "norm_weight_plus_one@attn_norm"),
    ],
)
def test_nothing_undoes_other_mistakes(faults: tuple[str, ...], models: Models, tmp_path: Path) -> None:
    result = planted(models, tmp_path / "t.trace", *faults)
    assert result.findings
    assert {yet(finding) for finding in result.findings} == {""}


def scaled(by: dict[str, float]) -> Callable[[Op], Op]:
    def change(op: Op) -> Op:
        factor = by.get(op.name)
        if factor is None:
            return op
        return replace(op, function=lambda x, weight, bias=None, **attrs: factor * right(op)(x, weight))

    def right(op: Op):  # type: ignore[no-untyped-def]
        if op.kind == "linear":
            return lambda x, weight: x @ weight.T
        return lambda x, weight: x * (x.square().mean(-1, keepdim=True) + op.attrs["eps"]).rsqrt() * weight

    return change


@pytest.mark.parametrize(("factor", "is_undone"), [(4.0, True), (1.0, False)])
def test_a_scale_that_is_folded_into_a_norm(factor: float, is_undone: bool, models: Models, tmp_path: Path) -> None:
    """As calm folds Gemma's: the norm's result is a quarter, and the head's input is taken for four times that."""
    model = Model(models(MODEL))
    change = scaled({"output_norm": 0.25, "output": factor})
    graph = model.graph.changed(*map(change, model.graph))
    result = check_trace(trace_graph(graph, model.file, tmp_path / "t.trace", TOKENS), model)
    said = (
        "output is right if output_norm is computed as should be, and not read from the record: undone there, or wrong "
        "in the record alone."
    )
    assert [yet(finding) for finding in result.findings] == ([said, said] if is_undone else [""])


@pytest.mark.slow
def test_a_record_that_holds_something_else_is_said_to_be_wrong_alone(models: Models, tmp_path: Path) -> None:
    """A buffer that was used again before it was written: the engine is right, its record is not."""
    model, out = models(MODEL), tmp_path / "t.trace"
    trace_torch(model, out, TorchOptions(), TOKENS, 1)
    trace, data = Trace(out), bytearray(out.with_suffix(".bin").read_bytes())
    scores, probs = (trace.ops[0, f"blk.1.{name}"] for name in ("attn_scores", "attn_probs"))
    values = np.frombuffer(data, np.float32, scores.size, scores.offset)
    values[:] = np.frombuffer(data, np.float32, probs.size, probs.offset)
    out.with_suffix(".bin").write_bytes(data)
    result = check_trace(out, model)
    assert {op for finding in result.findings for op in finding.ops} == {"blk.1.attn_scores", "blk.1.attn_probs"}
    said = (
        "attn_kqv is right if attn_scores and attn_probs are computed as should be, and not read from the records: "
        "undone there, or wrong in the records alone."
    )
    assert {yet(finding) for finding in result.findings} == {said}


@pytest.mark.slow
def test_a_state_is_not_undone_where_later_steps_read_it(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """What is handed on is wrong, and shows in no output of its own step."""
    model = Model(tiny("rwkv6"))

    def decayed(op: Op) -> Op:
        def function(*inputs: Tensor) -> Tensor:
            y = KINDS[op.kind].function(*inputs).flatten().clone()
            y[-inputs[4].numel() :] *= 0.9
            return y

        return replace(op, function=function) if op.kind == "rwkv_wkv6" else op

    graph = model.graph.changed(*map(decayed, model.graph))
    path = trace_graph(graph, model.file, tmp_path / "t.trace", (58,), (114,), (133,))
    result = check_trace(some_of(path, path, lambda op: "ssm_state" not in op), model)
    assert [yet(finding) for finding in result.findings] == [""]


def test_columns_that_the_next_step_reads_are_not_undone_in_their_own(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """A convolution's first columns were kept, not its last: what reads the step's own columns was "yet right"."""
    model = Model(tiny("mamba2"))
    kept = model.graph["blk.1.conv_state_next"]
    view = kept.views[0]
    assert view is not None
    graph = model.graph.changed(replace(kept, views=(replace(view, offset=1),)))
    path = trace_graph(graph, model.file, tmp_path / "t.trace", TOKENS, (133,))
    (finding,) = check_trace(path, model).findings
    assert finding.ops == ("blk.1.conv_state_next",)
    assert yet(finding) == ""


def test_weights_of_experts_may_multiply_what_is_projected(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """The projection between is right by what was recorded, and the mistakes on both sides of it were two."""
    model = Model(tiny("qwen3moe"))
    graph, changed = model.graph, list[Op]()
    for op in graph:
        if op.name.endswith("ffn_moe_weighted"):
            (swiglu,) = (one for one in graph.layer(layer_of(op.name) or 0) if one.name.endswith("ffn_moe_swiglu"))
            of = KINDS[swiglu.kind].function
            weighting = swiglu.also_reading((op.inputs[1], False))
            changed += [
                replace(
                    weighting,
                    function=lambda gate, up, weights, of=of: of(gate, up) * weights.reshape(*gate.shape[:2], 1),
                ),
                replace(op, function=lambda x, weights: x),
            ]
    path = trace_graph(graph.changed(*changed), model.file, tmp_path / "t.trace", TOKENS)
    result = check_trace(path, model)
    assert {local_name(op.op) for op in result.faulty} == {"ffn_moe_swiglu", "ffn_moe_weighted"}
    expected = (
        "ffn_moe_weighted.add and ffn_moe_out are right if ffn_moe_swiglu, ffn_down_exps and ffn_moe_weighted are "
        "computed as should be"
    )
    assert all(yet(finding).startswith(expected) for finding in result.findings)
