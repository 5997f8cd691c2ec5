"""One job judged by several processes, and by a Ray cluster: the same result, whoever dies on the way."""

import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import TOKENS, Models

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import EngineError
from tracediff.pipeline import Effort, check_trace
from tracediff.replay import workers
from tracediff.report.json_report import render

FAULT = "rope_pairing@1"


@pytest.fixture
def trace(models: Models, tmp_path: Path) -> Path:
    return trace_torch(models("tiny"), tmp_path / "out.trace", TorchOptions(faults=(FAULT,)), TOKENS, 1)


def judged(trace: Path, model: Path, **effort: object) -> str:
    return render(check_trace(trace, model, effort=Effort(**effort)))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.get_num_threads() > 1, reason="with one thread each the last digits are the same as well")
def test_a_cluster_gives_the_same_bytes_though_a_worker_dies(
    trace: Path, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    died, judge = tmp_path / "died", workers._judge_job

    def dies_once(job: workers._Job, ops: tuple[str, ...]) -> list[workers.JudgedRecord]:
        if "blk.1.attn_q" in ops and not died.exists():
            died.touch()
            os._exit(1)
        return judge(job, ops)

    monkeypatch.setattr(workers, "_judge_job", dies_once)
    alone, there = judged(trace, models("tiny")), judged(trace, models("tiny"), workers=2, ray="local")
    assert died.exists()
    assert alone == there


def test_without_ray_it_is_said_how_to_get_it(trace: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"tracediff\[ray\]"):
        judged(trace, models("tiny"), ray="auto")


def test_workers_share_the_threads(trace: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[workers._Job] = []

    def seen(job: workers._Job, tasks: object, n: int) -> object:
        jobs.append(job)
        raise EngineError("enough")

    monkeypatch.setattr(workers, "_in_processes", seen)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    with pytest.raises(EngineError, match="enough"):
        judged(trace, models("tiny"), workers=3)
    assert [job.n_threads for job in jobs] == [4]
