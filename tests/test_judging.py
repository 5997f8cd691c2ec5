"""Both sides of a comparison are judged together, by any number of processes, in any order, with the same result."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Models

from tracediff.diagnose.budget import ENDLESS
from tracediff.diagnose.mistakes.masks import _masking
from tracediff.diagnose.trials import Trials
from tracediff.model import weights as of_weights
from tracediff.model.gguf_file import TensorInfo
from tracediff.model.graph import Op, Weight
from tracediff.model.model import Model
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import EXACT, Arithmetic, Scheme
from tracediff.numerics.evaluate import evaluate, noise
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Energy
from tracediff.numerics.schemes import PLAIN
from tracediff.pipeline import Effort, compare_traces
from tracediff.replay import fitting, look, residual
from tracediff.replay.judging import Subject, judge_all, replays_of
from tracediff.replay.making import Recomputed
from tracediff.replay.recompute import Recomputation
from tracediff.replay.replay import Replay
from tracediff.replay.residual import Residual, measure
from tracediff.report.json_report import render
from tracediff.result import Local
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

Tracer = Callable[..., Path]


@pytest.fixture(scope="module")
def sides(models: Models, llama_cpp_trace: Tracer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, llama.cpp's trace of it, and torch's with a mistake."""
    from tracediff.engine.torch_run import TorchOptions, trace_torch

    model = models("k-quants", "Q4_K_M")
    reference = llama_cpp_trace(model, n_decode=3)
    steps, out = [*Trace(reference).steps.values()], tmp_path_factory.mktemp("sides") / "torch.trace"
    return model, reference, trace_torch(model, out, TorchOptions(faults=("attention_scale@1",)), steps=steps)


def test_any_number_of_processes_gives_the_same_result(sides: tuple[Path, Path, Path]) -> None:
    model, reference, candidate = sides
    one, *several = (render(compare_traces(reference, candidate, model=model, effort=Effort(n))) for n in (1, 2, 3))
    assert several == [one, one]
    assert '"attention_scale"' in one


def test_the_order_makes_no_difference(sides: tuple[Path, Path, Path]) -> None:
    model, *traces = sides
    replays = replays_of(Model(model), [Subject(Trace(trace), {}) for trace in traces])
    plans = [replay.plan for replay in replays]
    in_order = {(side, r.step, r.op): local for side, r, local in judge_all(replays)}
    shuffled = replays_of(Model(model), [Subject(Trace(trace), {}) for trace in traces], plans)
    keys = random.Random(0).sample([*in_order], len(in_order))
    for side, step, op in keys:
        local, other = in_order[side, step, op], shuffled[side].judge(shuffled[side].trace.ops[step, op])
        assert (local.judgement, local.arithmetic, local.segment) == (other.judgement, other.arithmetic, other.segment)
        # What a matmul leaves to 1e-16 of a value depends on how many rows are multiplied at once.
        assert local.nmse == pytest.approx(other.nmse, rel=1e-2, abs=1e-20)
        assert local.floor == pytest.approx(other.floor, rel=1e-2)


def test_a_part_of_a_wide_op_tells_its_arithmetic(
    sides: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference, _ = sides
    opened, read = Model(model), Counter[str]()
    dequantise = of_weights.dequantize

    def counted(info: TensorInfo, raw: np.ndarray, into: np.ndarray | None = None) -> object:
        read[info.name] += len(raw)
        return dequantise(info, raw, into)

    def planned() -> list[tuple[Scheme, ...]]:
        replay = Replay(Trace(reference), opened.graph, opened.weights())
        return [choice.schemes for choice in replay.plan.choices.values()]

    monkeypatch.setattr(of_weights, "dequantize", counted)
    whole, n_whole = planned(), read["blk.2.ffn_down.weight"]
    monkeypatch.setattr(look, "_GLANCE", 1 << 6)
    assert planned() == whole
    assert 0 < read["blk.2.ffn_down.weight"] - n_whole < n_whole / 4


@pytest.mark.slow
def test_what_is_mistaken_at_a_glance_is_computed_once(
    sides: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every matmul mistaken no arithmetic is settled: of a model of half a billion weights each was computed whole
    in 25, and it took 33 times as long until the report as where nothing is wrong.
    """
    from tracediff.engine.torch_run import TorchOptions, trace_torch

    model, wrong = Model(sides[0]), tmp_path / "wrong.trace"
    trace_torch(model.path, wrong, TorchOptions(faults=("row_before",)), range(64))
    monkeypatch.setattr(look, "_GLANCE", 1 << 8)
    computed, looked_at = Counter[str](), fitting.look

    def counted(by: Recomputation, record: OpRecord, scheme: Scheme, glance: bool = False) -> look.Look:
        computed[record.op] += not glance
        return looked_at(by, record, scheme, glance)

    monkeypatch.setattr(fitting, "look", counted)

    def judged() -> dict[str, Local]:
        computed.clear()
        return {one.record.op: one.local for one in judge_all([Replay(Trace(wrong), model.graph, model.weights())])}

    once = judged()
    assert once["blk.1.ffn_up"].faulty
    assert computed["blk.1.ffn_up"] == 1
    monkeypatch.setattr(fitting.Fitting, "in_question", lambda self, record, schemes: schemes)
    assert judged() == once
    assert computed["blk.1.ffn_up"] > 10


def test_each_weight_is_dequantised_once(sides: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """For both sides and all steps, though nothing is kept from one op to the next."""
    read: Counter[str] = Counter()
    dequantise = of_weights.dequantize

    def counted(info: TensorInfo, raw: np.ndarray, into: np.ndarray | None = None) -> object:
        read[info.name] += len(raw)
        return dequantise(info, raw, into)

    model, *traces = sides
    opened = Model(model)
    nothing_kept = opened.weights()
    replays = [Replay(Trace(trace), opened.graph, nothing_kept) for trace in traces]
    assert all([*replay.plan.lines()] for replay in replays)
    monkeypatch.setattr(of_weights, "dequantize", counted)
    list(judge_all(replays))
    matrices = [info for info in opened.file.tensors.values() if len(info.shape) == 2 and "embd" not in info.name]
    assert {info.name: read[info.name] for info in matrices} == {info.name: info.shape[0] for info in matrices}


def test_what_no_time_was_left_for_is_said(sides: tuple[Path, Path, Path]) -> None:
    model, reference, candidate = sides
    result = compare_traces(reference, candidate, model=model, effort=Effort(seconds=0))
    found = {op.op for op in result.faulty}
    assert found == {"blk.1.attn_probs"}
    assert not any(op.cause or op.sought for op in result.faulty)
    n = len(result.faulty)
    too_short = "--time 0 is too short for what is left to try. Give it more seconds."
    assert result.notes[-1] == f"{n} causes were not sought to the end: {too_short}"
    assert "not all was tried that may explain it" in result.findings[0].text
    assert '"sought": false' in render(result)


def test_what_a_table_does_not_hold_leaves_a_floor() -> None:
    """GELU of -1e6, looked up: float16 has infinity for it, times 0. The floor of all values was NaN."""
    x = torch.tensor([[-1e6, -1.0, 0.5, 1e8]], dtype=torch.float64)
    op, weights = Op("act", "gelu_quick", ("x",), ("T", 4)), Weights.__new__(Weights)
    weights.dtype = torch.float64
    energy, table = Energy(), Arithmetic("f16")
    y = evaluate(op, [x], weights, table, energy)
    own = noise(op, [x], y, weights, energy, table, "f32")
    right = evaluate(op, [x], weights)
    left = measure(right, Recomputed(y, own, own, inputs=(x,)))
    assert math.isinf(left.excess)
    assert math.isfinite(left.noise)
    assert 0 < left.noise < 1e-6


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_of_another_norm_too_a_row_errs_by_one_factor(kind: str) -> None:
    """A wrong norm that was right for most tokens was none for a row whose sum erred by more than most."""
    x = torch.randn(1, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    op, weights = Op("norm", kind, ("x",), ("T", 96), attrs={"eps": 1e-5}), Weights.__new__(Weights)
    weights.dtype = torch.float64
    skipped = replace(op, function=lambda x, *weight, eps: x / x.square().sum(-1, keepdim=True).sqrt())
    own, other = (
        noise(one, [x], evaluate(one, [x], weights), weights, Energy(), Arithmetic(), "f32") for one in (op, skipped)
    )
    assert own.alike == other.alike == 96


def test_where_one_value_makes_most_of_the_energy_it_may_err_as_one() -> None:
    """Of 224 values of a right SwiGLU one was ten times as large as the others, and off by twice what is usual."""
    sigma = torch.full((1, 224), 0.01, dtype=torch.float64)
    even = Noise(sigma, torch.zeros_like(sigma))
    sigma = sigma.clone()
    sigma[0, 7] = 1.0
    massive = Noise(sigma, torch.zeros_like(sigma))
    assert even.margin == 4.0
    assert 30 < massive.margin < 40
    rng = torch.Generator().manual_seed(0)
    squared = (torch.randn(100_000, 224, dtype=torch.float64, generator=rng) * sigma).square().sum(1)
    assert (squared > 4 * massive.energy()).double().mean() > 0.04
    assert not (squared > massive.margin * massive.energy()).any()


@pytest.mark.parametrize("odd", [0.0, 1e-3, math.inf, math.nan])
def test_figures_are_the_same_in_pieces(odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores some of which are hidden, one of which is off, or no number, or is in the input as well."""
    exact = torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = Noise(1e-9 * exact.abs(), torch.full_like(exact, 1e-8), 1e-9 * exact.square(), alike=7)
    recorded, hidden = exact + 1e-9, torch.arange(7) > torch.arange(5)[:, None] + 2
    recorded[0, 0, 1] += 1e-6
    recorded[1, 2, 3] += odd
    recorded[2, 0, 6] = math.inf  # hidden
    made = Recomputed(exact, own, own, inputs=(recorded,) if math.isnan(odd) else (exact,))

    def measured(piece: int) -> Residual:
        monkeypatch.setattr(residual, "_PIECE", piece)
        return measure(recorded, made, hidden)

    whole, pieces = measured(1 << 15), measured(4)
    for name in ("error", "signal", "noise", "excess", "sharpness", "shaped"):
        assert getattr(pieces, name) == pytest.approx(getattr(whole, name), rel=1e-12, nan_ok=True), name
    assert pieces.worst.at == whole.worst.at == ((1, 2, 3) if odd else (0, 0, 1))
    torch.testing.assert_close(pieces.along, whole.along, equal_nan=True)


@pytest.mark.slow
def test_hypotheses_that_are_looked_at_together_leave_what_each_does(
    models: Models, torch_trace: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of hidden states; what follows the ops that differ is computed once for all."""
    model = models("k-quants", "Q4_K_M")
    path = torch_trace(model, tokens=tuple(range(3, 15)), capture="layers", faults=("act_gelu@1",))
    (replay,) = replays_of(Model(model), [Subject(Trace(path), {})])
    trials, read = Trials(replay, ENDLESS), Counter[str]()
    slices = Weights.slices

    def counted(weights: Weights, weight: Weight, multiple: int = 1) -> Iterator[torch.Tensor]:
        read[weight.name] += 1
        return slices(weights, weight, multiple)

    monkeypatch.setattr(Weights, "slices", counted)
    record = replay.trace.ops[0, "blk.1.ffn_residual"]
    error = replay.judge(record)
    assert error.faulty
    read.clear()
    tried = [*trials.of(trials.applicable(error.segment), record, error)]
    together = read["blk.1.ffn_down.weight"]
    read.clear()
    alone = [replay.under(record, one.ops, error.nmse) for one in tried]
    assert len(tried) > 200
    assert [local.nmse for local in alone] == pytest.approx(
        [one.local.nmse for one in tried], rel=1e-3, abs=1e-9, nan_ok=True
    )
    assert [local.judgement for local in alone] == [one.local.judgement for one in tried]
    assert any(local.judgement == "sound" for local in alone)
    assert 3 * together < read["blk.1.ffn_down.weight"]


@pytest.mark.parametrize("layer", range(3))
def test_no_arithmetic_is_sought_for_a_mistaken_layer_where_another_tells(
    layer: int, models: Models, torch_trace: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the layers is looked at first: each of the others is a forward pass."""
    model = models("k-quants", "Q4_K_M")
    path = torch_trace(model, capture="layers", faults=(f"act_gelu@{layer}",))
    (replay,) = replays_of(Model(model), [Subject(Trace(path), {})])
    asked = set[Scheme]()
    left = fitting.Fitting.left

    def noted(self: fitting.Fitting, record: OpRecord, scheme: Scheme) -> float:
        asked.add(scheme)
        return left(self, record, scheme)

    monkeypatch.setattr(fitting.Fitting, "left", noted)
    assert replay.choice(replay.trace.ops[0, f"blk.{layer}.ffn_residual"]).settled
    assert asked == {*PLAIN}


def test_a_softmax_that_hides_too_little_errs_as_far_as_it_may(models: Models) -> None:
    """What is next to nothing beside large scores has their rounding, magnified: no less where it should be hidden."""
    model = Model(models("tiny"))
    op = _masking(model.graph["blk.0.attn_probs"], 0.0, added=False).op
    scores = 80 + 20 * torch.randn(op.axes[0], 9, 9, generator=torch.Generator().manual_seed(3))
    at = torch.arange(9)
    of = {
        dtype: evaluate(op, [scores.to(dtype), at, at], model.weights(dtype))
        for dtype in (torch.float32, torch.float64)
    }
    exact = of[torch.float64]
    found = noise(op, [scores.double(), at, at], exact, model.weights(), Energy(), EXACT, "f32")
    off = (of[torch.float32] - exact).abs()
    assert bool((off > 1e-7 * exact.abs()).any())
    assert bool((off <= found.bound(exact.numel())).all())
