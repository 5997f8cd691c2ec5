"""Metrics against a second computation in plain numpy, and what must hold of them whatever the data."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracediff.compare.metrics import compare_values, drift_of_statistics, statistics_of
from tracediff.engine.llama_cpp import LlamaCpp, Prompt
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.judge import Policy, judge, verdict
from tracediff.names import StepOf
from tracediff.pipeline import compare_traces
from tracediff.result import Drift, Local, OpResult, Statistics, Worst
from tracediff.trace.reader import Trace

RNG = np.random.default_rng(1)


@pytest.mark.parametrize("shape", [(1, 7), (5, 3), (3, 4, 50), (40, 1000)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_metrics_are_those_of_numpy(shape: tuple[int, ...], dtype: type) -> None:
    r = RNG.standard_normal(shape).astype(dtype)
    c = (r + 0.01 * RNG.standard_normal(shape)).astype(dtype)
    reference, candidate, drift = compare_values(r, c)
    r64, c64 = r.astype(np.float64), c.astype(np.float64)
    d = c64 - r64
    near = 1e-12 if dtype is np.float64 else 1e-6  # blocks of 4096 are summed in float32
    assert drift.nmse == pytest.approx((d**2).sum() / (r64**2).sum(), rel=near)
    assert drift.cosine == pytest.approx((r64 * c64).sum() / np.sqrt((r64**2).sum() * (c64**2).sum()), rel=near)
    assert drift.max_abs == np.abs(d).max()
    assert drift.worst.at == np.unravel_index(np.abs(d).argmax(), shape)
    assert (drift.worst.reference, drift.worst.candidate) == (r64[drift.worst.at], c64[drift.worst.at])
    for side, x in ((reference, r64), (candidate, c64)):
        assert (side.min, side.max) == (x.min(), x.max())
        assert side.mean == pytest.approx(x.mean(), abs=near * np.sqrt((x**2).mean()))
        assert side.rms == pytest.approx(np.sqrt((x**2).mean()), rel=near)
    if shape[0] > 1:
        assert drift.first_token_nmse == pytest.approx((d[0] ** 2).sum() / (r64[0] ** 2).sum(), rel=near)
        assert drift.other_tokens_nmse == pytest.approx((d[1:] ** 2).sum() / (r64[1:] ** 2).sum(), rel=near)


def test_the_same_is_exactly_the_same() -> None:
    x = RNG.standard_normal((9, 5000)).astype(np.float32)
    _, _, drift = compare_values(x, x.copy())
    assert (drift.nmse, drift.max_abs) == (0.0, 0.0)
    assert drift.cosine == pytest.approx(1.0, abs=1e-15)


def test_flat_and_per_head_shapes_compare_alike() -> None:
    r, c = RNG.standard_normal((2, 4, 6, 8))
    assert compare_values(r, c.reshape(4, 48))[2] == compare_values(r, c)[2]


def test_hidden_scores_do_not_count() -> None:
    r, c = RNG.standard_normal((2, 3, 5, 5))
    hidden = np.triu(np.ones((5, 5), bool), 1)
    c = np.where(hidden, 1e9, r)
    reference, candidate, drift = compare_values(r, c, hidden)
    assert drift.nmse == 0
    assert reference.rms == candidate.rms == pytest.approx(np.sqrt((r[:, ~hidden] ** 2).mean()))


@pytest.mark.parametrize("sign", [1, -1])
def test_hidden_scores_are_no_extreme(sign: int) -> None:
    """They were zeros: the least of scores that are all positive. The place of the worst is that in all of them."""
    r = sign * RNG.uniform(3, 9, (3, 5, 7)).astype(np.float32)
    hidden = np.triu(np.ones((5, 7), bool), 3)
    c = np.where(hidden, np.nan, r).astype(np.float32)
    c[2, 4, 5] += 1
    reference, candidate, drift = compare_values(r, c, hidden)
    visible, theirs = r[:, ~hidden], c[:, ~hidden]
    assert (reference.min, reference.max) == (visible.min(), visible.max())
    assert (candidate.min, candidate.max, candidate.nan) == (theirs.min(), theirs.max(), 0)
    assert (drift.worst.at, drift.max_abs) == ((2, 4, 5), 1)
    assert statistics_of(c, hidden) == candidate
    assert candidate.mean == pytest.approx(theirs.mean())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_on_one_side_never_passes(bad: float) -> None:
    r = RNG.standard_normal((4, 100)).astype(np.float32)
    c = r.copy()
    c[2, 3] = bad
    reference, candidate, drift = compare_values(r, c)
    assert (candidate.nan, candidate.inf) == ((1, 0) if np.isnan(bad) else (0, 1))
    assert (reference.nan, reference.inf) == (0, 0)
    op = OpResult("output", 0, None, "linear", "ok", reference, candidate, drift, tolerance=1e9)
    assert [judged.status for judged in judge([op], Policy())] == ["drift"]
    other_way = OpResult("output", 0, None, "linear", "ok", candidate, reference, drift, tolerance=1e9)
    assert [judged.status for judged in judge([other_way], Policy())] == ["drift"]


@pytest.mark.parametrize(
    ("r", "c"),
    [([np.nan, 1, 2], [0, 1, np.nan]), ([np.inf, 1, 2], [-np.inf, 1, 2]), ([1.7e308, 1, 2], [-1.7e308, 1, 2])],
)
def test_what_is_not_finite_is_compared_place_by_place(r: list[float], c: list[float]) -> None:
    reference, candidate, drift = compare_values(np.array([[0, 0, 0], r]), np.array([[0, 0, 0], c]))
    assert (drift.nmse, drift.worst.at) == (np.inf, (1, 0))
    op = OpResult("output", 0, None, "linear", "ok", reference, candidate, drift, tolerance=1e9)
    assert [judged.status for judged in judge([op], Policy())] == ["drift"]


def test_what_is_not_finite_on_both_sides_is_the_same() -> None:
    x = np.array([[np.nan, np.inf, -np.inf, 3.0]])
    reference, candidate, drift = compare_values(x, x.copy())
    assert (drift.nmse, drift.apart) == (0.0, 0)
    op = OpResult("output", 0, None, "linear", "ok", reference, candidate, drift, tolerance=0.0)
    (judged,) = judge([op], Policy())
    assert (judged.status, judged.note) == ("undecided", "NaN on both sides")  # the same, and no reference to go by
    assert verdict([judged], [], Policy()) == ("undecided", None)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_looser_tolerance_never_fails_more(nmse: float, a: float, b: float) -> None:
    def passes(tolerance: float) -> bool:
        op = OpResult(
            "output", 0, None, "linear", "ok", drift=Drift(nmse, 1.0, 0.0, Worst((), 0, 0)), tolerance=tolerance
        )
        return verdict(judge([op], Policy()), [], Policy())[0] == "match"

    assert passes(max(a, b)) or not passes(min(a, b))


@given(st.integers(2, 50), st.integers(0, 2**32 - 1))
def test_statistics_never_claim_more_drift_than_there_is(n: int, seed: int) -> None:
    r, c = np.random.default_rng(seed).standard_normal((2, n))
    reference, candidate, drift = compare_values(r, c)
    proved = drift_of_statistics(reference, candidate, n)
    assert proved is not None
    assert proved.nmse <= drift.nmse * (1 + 1e-9)


def test_what_follows_a_fault_in_another_sequence_does_not_follow_from_it() -> None:
    """One of replay, in sequence 0, comes first in the list; the drift in sequence 1 is its own."""
    worst, seen = Worst((), 0, 0), Statistics(0, 1, 0, 1)
    local = Local(1.0, 1e-9, 9.0, worst, "exact", ("output",), "faulty")
    wrong = OpResult("output", 0, None, "linear", "ok", seen, seen, local=local)
    sound = replace(local, nmse=0.0, excess=0.0, judgement="sound")
    drift = Drift(0.5, 1.0, 0.0, worst)
    same, other = (
        OpResult("output", StepOf(1, n), None, "linear", "ok", seen, seen, drift, 1e-9, sound) for n in (0, 1)
    )
    assert [op.status for op in judge([wrong, same], Policy())] == ["faulty", "inherited"]
    assert [op.status for op in judge([wrong, other], Policy())] == ["faulty", judge([other], Policy())[0].status]
    assert judge([other], Policy())[0].status != "inherited"


def test_the_first_in_execution_order_is_named_and_counts_add_up() -> None:
    drift = Drift(0.5, 1.0, 0.0, Worst((), 0, 0))
    ops = [
        OpResult(name, 0, None, "linear", "ok", Statistics(0, 1, 0, 1), Statistics(0, 1, 0, 1), drift, tolerance)
        for name, tolerance in (("a", 1.0), ("b", 0.1), ("c", 0.1))
    ]
    ops.append(replace(ops[0], op="d", status="unmatched"))
    judged = judge(ops, Policy())
    assert [op.status for op in judged] == ["ok", "drift", "drift", "unmatched"]
    outcome, first = verdict(judged, [], Policy())
    assert (outcome, first.op, first.reason) == ("diverged", "b", "drift")
    missing = [replace(judged[3], candidate=None)]
    assert verdict(missing, [], Policy())[0] == "match"
    assert verdict(missing, [], Policy(required=("d",)))[0] == "diverged"
    assert verdict(missing, [], Policy(required=("d",), allowed=("d",)))[0] == "match"
    assert verdict(judged[3:], [], Policy(required=("d",)))[0] == "match"  # it is there
    assert Policy({"*": 1e-3, "attn_probs": 1e-2}).tolerance("blk.3.attn_probs", "f32") == 1e-2


@pytest.mark.parametrize(("blind", "status"), [(True, "drift"), (False, "ok")])
def test_where_replay_is_blind_the_drift_is_judged(blind: bool, status: str) -> None:
    """A record that passes replay may drift because of what came before, but not where replay could tell nothing."""
    nowhere = Worst((), 0, 0)
    local = Local(0.2, 0.4, 0.5, nowhere, "llama.cpp", ("blk.0.attn_q", "output"), "undecided" if blind else "sound")
    op = OpResult("output", 0, None, "linear", "ok", drift=Drift(0.5, 1.0, 0.0, nowhere), tolerance=0.1, local=local)
    (judged,) = judge([op], Policy())
    assert judged.status == status
    assert judged.note == ("replay is blind here: judged by its drift alone" if blind else None)
    assert verdict([judged], [], Policy())[0] == ("diverged" if blind else "match")


def test_gelu_that_ggml_looks_up_is_no_drift(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """In a table of float16, be the weights in float32: llama.cpp's trace says so."""
    model, tokens = tiny("gemma2"), (256, 11, 48, 85, 122)
    LlamaCpp(model, Prompt(tokens=tokens), theirs := tmp_path / "l.trace").wait()
    ours = trace_torch(model, tmp_path / "t.trace", TorchOptions(), tokens)
    assert Trace(theirs).header.rounding == "f16"
    assert compare_traces(theirs, ours).verdict == "match"
