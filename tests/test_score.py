"""Explanations compete: no larger error passes where a smaller one does not, and one mistake has one set of numbers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TOKENS, some_of, trace_graph

from tracediff.diagnose.mistakes.fit import fitted
from tracediff.diagnose.mistakes.mistake import computing
from tracediff.diagnose.planting import plant
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.model.weights import Weights
from tracediff.numerics.kinds.norm import rms_norm
from tracediff.pipeline import check_trace
from tracediff.replay.judging import judge_all
from tracediff.replay.replay import Replay
from tracediff.replay.score import Explanation, judge, lead
from tracediff.trace.reader import Trace


@pytest.mark.parametrize(
    ("explanations", "judgement"),
    [
        ([Explanation(1e-14, True)], "sound"),
        ([Explanation(0.5, False)], "faulty"),  # nothing speaks for the engine
        ([Explanation(1e-3, True), Explanation(1e-14, False)], "faulty"),  # a wide floor buys nothing
        ([Explanation(1e-3, True), Explanation(6e-4, False)], "undecided"),
        ([Explanation(1e-3, True), Explanation(1e-3, False, math.log(2))], "sound"),
        # As the last, but that the arithmetic explains so much only by luck.
        ([Explanation(1e-3, True, noise=1e-4), Explanation(1e-3, False, math.log(2))], "faulty"),
        ([Explanation(math.nan, True), Explanation(1e-3, False)], "faulty"),
    ],
)
def test_sound_and_faulty_each_win_by_a_margin(explanations: list[Explanation], judgement: str) -> None:
    assert judge(lead(explanations)) == judgement


SMALL = Shape("qwen2", n_layer=3, n_embd=128, n_head=4, n_head_kv=2, n_ff=256)
FACTORS = [1 + 10.0**e for e in (-6, -4, -2)] + [1.04, 1.05, 1.3, 30.0]


@pytest.mark.parametrize(
    ("shape", "weights", "capture"),
    [
        pytest.param(SMALL, "Q8_0", "logits", marks=pytest.mark.slow),
        pytest.param(SMALL, "Q8_0", "layers", marks=pytest.mark.slow),
        (SMALL, "F16", "all"),
    ],
)
def test_no_larger_error_passes_where_a_smaller_one_does_not(
    shape: Shape, weights: str, capture: str, models: Any, torch_trace: Any
) -> None:
    """A float32 engine whose last record is off by a factor, or by noise: at 4% the logits alone of a Q8_0 model
    passed for those of an engine that rounds its cache to 8 bits.
    """
    model = models(shape, weights)
    path = torch_trace(model, capture="layers" if capture == "layers" else "all", n_decode=0)
    read = {"all": ("blk.1.attn_residual", "blk.1.ffn_down"), "layers": ("blk.0.ffn_residual",), "logits": ()}[capture]
    name = "output" if capture == "logits" else "blk.1.ffn_residual"
    path = some_of(path, path.with_name("some.trace"), {*read, name}.__contains__)
    trace = Trace(path)
    record = trace.ops[0, name]
    right = trace.values(record).copy()
    noise = np.random.default_rng(0).normal(0, right.std(), right.shape)
    gguf = GGUFFile(model)
    against = build_graph(gguf), Weights(gguf, keep_bytes=1 << 26)
    for spoiled in (lambda f: right * f, lambda f: right + (f - 1) * noise):
        judged = [_judgement(path, record.op, spoiled(factor), *against) for factor in (1.0, *FACTORS)]
        assert judged[0] == "sound"
        first = next(at for at, how in enumerate(judged) if how != "sound")
        assert "sound" not in judged[first:]
        assert set(judged[-2:]) == {"faulty"}


def _judgement(path: Path, op: str, values: np.ndarray, graph: Graph, weights: Weights) -> str:
    trace = Trace(path)
    record = trace.ops[0, op]
    data = path.with_name(trace.header.data)
    with data.open("r+b") as file:
        file.seek(record.offset)
        file.write(values.astype(np.float32).tobytes())
    return Replay(Trace(path), graph, weights).judge(record).judgement


def test_the_plan_is_printed_and_judging_needs_no_order(models: Any, torch_trace: Any) -> None:
    model = models("k-quants", "Q4_K_M")
    path = torch_trace(model, faults=("attention_scale@1",), dtype="bf16")
    file = GGUFFile(model)
    replays = [Replay(Trace(path), build_graph(file), Weights(file)) for _ in range(2)]
    forwards = {(r.step, r.op): local for _, r, local in judge_all(replays[:1])}
    backwards = {key: replays[1].judge(record) for key, record in reversed(replays[1].trace.ops.items())}
    assert {key: local.judgement for key, local in forwards.items()} == {
        key: local.judgement for key, local in backwards.items()
    }
    assert {key: local.arithmetic for key, local in forwards.items()} == {
        key: local.arithmetic for key, local in backwards.items()
    }
    assert [line.partition(" (")[0] for line in replays[0].plan.lines()][:4] == [
        "in float64 on cpu",
        "embedding",
        "rms_norm",
        "linear with Q4_K weights and biases",
    ]


def test_an_arithmetic_that_shows_under_an_explanation_is_known_elsewhere(models: Any, torch_trace: Any) -> None:
    """Though which ones were seen was asked before: it decides what is believed of segments."""
    model = Model(models("tiny", "Q8_0"))
    path = torch_trace(model.path, faults=("weight_transposed",), arithmetic="llama.cpp", n_decode=0)
    replay = Replay(Trace(path), model.graph, model.weights())
    record = replay.trace.ops[0, "blk.0.ffn_down"]
    wrong = {op.name: op for op in plant(model.graph, model.file, "weight_transposed")}
    before = replay._seen()
    after = replay.knowing(record, [wrong[record.op]])._seen()
    new = {(sort.types, scheme.of("linear", "Q8_0").operands) for sort, scheme in {*after} - {*before}}
    assert new == {(("Q8_0",), "q8_0")}


def test_an_epsilon_outside_the_root_is_one_mistake_of_all_norms(models: Any, tmp_path: Path) -> None:
    """It was ten epsilons: one of each norm and step."""

    def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * w

    model = models("k-quants")
    file = GGUFFile(model)
    graph = build_graph(file)
    wrong = graph.changed(*(computing(op, norm) for op in graph if op.kind == "rms_norm"))
    result = check_trace(trace_graph(wrong, file, tmp_path / "outside.trace", TOKENS, (65,)), model)
    assert {op.cause and (op.cause.name, op.cause.text) for op in result.faulty} == {
        ("eps_outside_root", "eps is added outside the root")
    }


@pytest.mark.parametrize("theta", [12_345.0, 150_000.0])
def test_a_base_that_is_on_no_list_is_named(theta: float, models: Any, tmp_path: Path) -> None:
    model = models("k-quants")
    file = GGUFFile(model)
    graph = build_graph(file)
    wrong = [op.with_attrs(rope=replace(op.attrs["rope"], theta=theta)) for op in graph if op.kind == "rope"]
    result = check_trace(trace_graph(graph.changed(*wrong), file, tmp_path / "theta.trace", TOKENS, (65,)), model)
    assert {op.cause and op.cause.text for op in result.faulty} == {f"rope's base is {theta:.6g} instead of 1e+06"}


def test_layer_0_in_every_layer_is_not_the_layer_before(models: Any, tmp_path: Path) -> None:
    model = models("k-quants")
    file = GGUFFile(model)
    graph = build_graph(file)

    def of_layer_0(op: Op) -> Op:
        name = "blk.0." + op.weights[0].name.split(".", 2)[2]
        return replace(op, weights=(replace(op.weights[0], name=name), *op.weights[1:]))

    wrong = [of_layer_0(op) for op in graph if op.name.endswith("ffn_up")]
    result = check_trace(trace_graph(graph.changed(*wrong), file, tmp_path / "layer0.trace", TOKENS, (65,)), model)
    assert {op.op for op in result.faulty} == {"blk.1.ffn_up", "blk.2.ffn_up"}
    assert {op.cause and op.cause.text for op in result.faulty} == {"the weights of layer 0 are used"}


def test_a_mistaken_sum_may_round_twice(models: Any, tmp_path: Path) -> None:
    """(x + y) + x of float32 errs by more than one rounding."""
    model = models("k-quants")
    file = GGUFFile(model)
    graph = build_graph(file)
    wrong = computing(graph["blk.1.attn_residual"], lambda a, b: (b + a) + b)
    result = check_trace(trace_graph(graph.changed(wrong), file, tmp_path / "twice.trace", TOKENS, (65,)), model)
    assert {(op.op, op.cause and op.cause.name) for op in result.faulty} == {("blk.1.attn_residual", "residual_twice")}


@pytest.mark.parametrize("eps", [3e-6, 1.2345e-4, 1e-12])
def test_numbers_are_fitted_to_what_shows_of_them_and_rounded_as_people_do(eps: float) -> None:
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-4
    weight = torch.ones(40, dtype=torch.float64)
    target = rms_norm(x, weight, eps=eps).float().double()
    found = fitted(lambda number: rms_norm(x, weight, eps=number), target, (1e-5 * 10.0**i for i in range(-6, 7)))
    assert found == pytest.approx(eps, rel=1e-4 if eps > 1e-10 else 10)
