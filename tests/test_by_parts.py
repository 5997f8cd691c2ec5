"""Scores of a long prompt are made a part of its tokens at a time: what is judged by them is as if they were whole."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import some_of

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.model import Model
from tracediff.pipeline import Effort, check_trace
from tracediff.replay import by_parts
from tracediff.replay.judging import Subject, replays_of
from tracediff.result import Local, Result
from tracediff.trace.reader import Trace

PROMPT = tuple((37 * i + 11) % 250 for i in range(61))
TINY = 300  # values: those of a few tokens


def judged(result: Result) -> dict[tuple[int, str], Local]:
    return {(op.step, op.op): op.local for op in result.ops if op.local}


@pytest.mark.parametrize(
    ("arch", "capture", "faults"),
    [
        ("llama", "layers", ()),
        ("llama", "layers", ("mask_shifted@1",)),
        ("gemma2", "layers", ()),  # a window, capped scores
        ("deepseek2", "layers", ()),
        ("qwen3", "all", ("attention_scale@1",)),  # without scores and probabilities, as flash attention is recorded
    ],
)
def test_parts_are_judged_as_the_whole(
    arch: str,
    capture: str,
    faults: tuple[str, ...],
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, options = tiny(arch), TorchOptions(capture=capture, faults=faults)  # type: ignore[arg-type]
    whole = trace_torch(model, tmp_path / "whole.trace", options, PROMPT, 2)
    trace = some_of(whole, tmp_path / "t.trace", lambda op: not op.endswith(("_scores", "_probs")))
    expected = check_trace(trace, model, effort=Effort(seconds=0))
    seen: list[int] = []

    def watched(*of: Any) -> Iterator[tuple[int, ...]]:
        for part in by_parts.parts(*of):
            seen.append(part[0])
            yield part

    monkeypatch.setattr(by_parts, "_AT_ONCE", TINY)
    monkeypatch.setattr("tracediff.replay.recompute.parts", watched)
    found = check_trace(trace, model, effort=Effort(seconds=0))
    assert len({*seen}) > 4
    assert (found.verdict, [f.text for f in found.findings]) == (expected.verdict, [f.text for f in expected.findings])
    ours, theirs = judged(found), judged(expected)
    assert ours.keys() == theirs.keys()
    for at, local in ours.items():
        assert (local.judgement, local.arithmetic) == (theirs[at].judgement, theirs[at].arithmetic), at
        assert local.nmse == pytest.approx(theirs[at].nmse, rel=1e-6, abs=1e-28), at
        assert local.floor == pytest.approx(theirs[at].floor, rel=0.5), at


def test_the_memory_that_is_said_is_of_parts(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    trace = trace_torch(model, tmp_path / "t.trace", TorchOptions(capture="layers"), PROMPT)
    (replay,) = replays_of(Model(model), [Subject(Trace(trace), {})])
    (record,) = replay.records["blk.1.ffn_residual"]
    whole = replay.n_before(record)
    monkeypatch.setattr(by_parts, "_AT_ONCE", TINY)
    n_scores = replay.graph.hparams.n_head * len(PROMPT) ** 2
    assert replay.n_before(record) == whole - 2 * (n_scores - TINY)  # scores and probabilities
