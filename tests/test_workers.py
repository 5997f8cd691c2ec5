"""One job judged by several processes, and by a Ray cluster: the same result, whoever dies on the way."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from threading import Thread

import pytest
import torch
from conftest import TOKENS, Models

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import EngineError
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.names import layer_of
from tracediff.pipeline import Effort, check_trace
from tracediff.process import Interrupted
from tracediff.replay import cluster, workers
from tracediff.replay.cluster import Cluster
from tracediff.replay.judging import Subject, judge_all, layers, replays_of
from tracediff.replay.memory import needed
from tracediff.replay.tasks import tasks
from tracediff.report.json_report import render
from tracediff.trace.reader import Trace

FAULTS = ("rope_pairing@1", "act_gelu@0")


@pytest.fixture
def trace(models: Models, tmp_path: Path) -> Path:
    return trace_torch(models("tiny"), tmp_path / "out.trace", TorchOptions(faults=FAULTS), TOKENS, 1)


def judged(trace: Path, model: Path, **effort: object) -> str:
    return render(check_trace(trace, model, effort=Effort(**effort)))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.get_num_threads() > 1, reason="with one thread each the last digits are the same as well")
def test_a_cluster_gives_the_same_bytes_though_a_worker_dies(
    trace: Path, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    starts, start = [], ray.init
    monkeypatch.setattr(ray, "init", lambda **how: starts.append(how) or start(**how))
    died, do = tmp_path / "died", workers._do_job

    def dies_once(job: workers._Job, one: object) -> object:
        mark = died / ("judging" if isinstance(one, tuple) else "explaining")
        if not mark.exists():
            mark.touch()
            os._exit(1)
        return do(job, one)

    monkeypatch.setattr(workers, "_do_job", dies_once)
    died.mkdir()
    alone, there = judged(trace, models("tiny")), judged(trace, models("tiny"), workers=2, ray="local")
    assert {mark.name for mark in died.iterdir()} == {"judging", "explaining"}
    assert len(starts) == 1, "to start takes seconds: once for judging and explaining"
    assert alone == there
    assert {one["cause"]["name"] for one in json.loads(alone)["faulty"]} == {"rope_pairing", "act_gelu"}


def test_sigterm_ends_the_run_while_ray_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has a handler of its own there, which calls exit()."""
    node = pytest.importorskip("ray._private.node", reason="Ray is not installed")

    def asked_to_end(number: int, frame: object) -> None:
        raise Interrupted(number)

    monkeypatch.setattr(node.Node, "__init__", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, asked_to_end)
    try:
        with pytest.raises(Interrupted) as ended:
            Cluster("local", 1)
        assert (ended.value.code, signal.getsignal(signal.SIGTERM)) == (143, asked_to_end)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.mark.usefixtures("one_thread")
def test_processes_give_the_same_bytes(trace: Path, models: Models) -> None:
    alone, there = judged(trace, models("tiny")), judged(trace, models("tiny"), workers=2)
    assert alone == there
    assert {one["cause"]["name"] for one in json.loads(alone)["faulty"]} == {"rope_pairing", "act_gelu"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each worker imports torch by itself")
def test_what_judges_is_imported_once_and_no_worker_is_left() -> None:
    code = """
import sys, time
from tracediff.replay.starting import processes
pool = processes(2, id, None)
print(*pool.map(eval, ["'torch' in __import__('sys').modules"] * 2), "torch" in sys.modules, flush=True)
pool.submit(time.sleep, 60)
time.sleep(60)
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert first.stdout
    assert first.stdout.readline() == "True True False\n"
    first.kill()
    with first:  # its output ends when the last process that has it does
        assert first.stdout.read() == ""


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


@pytest.mark.parametrize("capture", ["all", "layers"])
def test_what_costs_most_is_begun_first(capture: str, models: Models, tmp_path: Path) -> None:
    """A head of many tokens takes as long as layers: begun last, all others would wait for it."""
    model = Model(models(Shape("llama", n_layer=6, n_embd=64, n_head=4, n_head_kv=2, n_ff=128, n_vocab=8192)))
    trace = Trace(trace_torch(model, tmp_path / "out.trace", TorchOptions(capture=capture), TOKENS))
    replays = replays_of(model, [Subject(trace, {})])
    two, many = tasks(replays, 2), tasks(replays, 100)
    assert two[0][-1] == "output"
    assert sorted(chain(*two)) == sorted(chain(*many)) == sorted(chain(*layers(replays)))
    assert {*layers(replays)[1:-1]} <= {*two}, "a layer is one task"
    assert (len(many) > 2 * len(two)) == (capture == "all"), "for many workers it is cut, as far as there are records"


def test_the_memory_of_a_worker_is_said_beforehand(models: Models, tmp_path: Path) -> None:
    """It follows the largest record; where that is recomputed, all that is made for it. Nothing read before is kept."""
    path = models(Shape("llama", n_layer=3, n_embd=64, n_head=4, n_head_kv=2, n_ff=96, n_vocab=320, n_ctx=1024))
    tokens = [7 * i % 300 for i in range(400)]
    scores, layer = 4 * 400 * 400, 400 * (5 * 64 + 2 * 64 + 4 * 64 + 3 * 96)
    said = {}
    for capture in ("all", "layers"):
        trace = trace_torch(path, tmp_path / f"{capture}.trace", TorchOptions(capture=capture), tokens)
        (replay,) = replays_of(Model(path), [Subject(Trace(trace), {})])
        said[capture] = needed([replay])
        for _, record, _ in judge_all([replay]):
            kept = {layer_of(name) for (_, name, _), _ in replay._recomputation._values} - {None}
            assert kept <= {*range((layer_of(record.op) or 0) - 1, 3)}
    assert str(said["all"]).endswith("GB of memory, most of it for blk.2.attn_scores")
    bytes_each = 8 * 16
    assert said["all"].n_bytes == 450e6 + bytes_each * scores
    assert said["layers"].n_bytes == pytest.approx(450e6 + bytes_each * (2 * scores + layer), rel=0.1)


@pytest.mark.parametrize("answers", [None, b"", b"HTTP/1.1 400 Bad Request\r\n", "not at all"])
def test_an_address_without_a_cluster_is_refused_at_once(
    answers: bytes | str | None, trace: Path, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would wait for minutes."""
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setattr(cluster, "_PATIENCE", 0.5)

    def answer() -> None:
        with server.accept()[0] as asked:
            asked.sendall(answers)

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if answers is None:
            server.close()
        elif isinstance(answers, bytes):
            Thread(target=answer).start()
        with pytest.raises(EngineError, match=rf"--ray {address}: no cluster: .*`local` starts one"):
            judged(trace, models("tiny"), ray=address)
