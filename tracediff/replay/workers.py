"""Records judged in several processes, here or on a cluster: a layer at a time, by the plan that was made in the first.

What a process is given is small: the paths of the files, the plan, and a layer's ops. It opens the files itself, once,
and reads the records and the weights of its layers.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from tracediff.errors import EngineError
from tracediff.model.model import Model
from tracediff.replay.judging import JudgedRecord, Subject, judge_all, judge_ops, layers, n_records, replays_of
from tracediff.replay.plan import Plan
from tracediff.replay.replay import Replay

_RAY = 'Install it with: pip install "tracediff[ray]".'
_RETRIES = 3  # of a task whose process or machine was lost
_replays: dict[str, list[Replay]] = {}  # of a process: opened once for all that it judges


@dataclass(frozen=True, slots=True)
class Workers:
    """What judges: so many processes of this machine, or those of the Ray cluster at this address, as many at once.

    "local" starts a cluster of this machine alone.
    """

    n: int = 1
    ray: str | None = None


ALONE = Workers()


@dataclass(frozen=True, slots=True)
class _Job:
    """What every process needs to judge any layer; `key` tells one job from another."""

    key: str
    model: Model
    subjects: Sequence[Subject]
    plans: Sequence[Plan]
    n_threads: int


def judged_by(
    workers: Workers,
    model: Model,
    subjects: Sequence[Subject],
    replays: Sequence[Replay],
    progress: Callable[[float], None],
) -> Iterator[JudgedRecord]:
    """What `judge_all` yields for these `replays` of the subjects, by workers, each of which opens the files.

    They share this process's threads, so figures may differ in the last of 16 digits from those of another number of
    them; with as many threads each the result is the same to the bit. Raises EngineError where a process is ended from
    outside, or without Ray.
    """
    tasks = layers(replays)
    n = min(workers.n, len(tasks))
    if n <= 1 and not workers.ray:
        yield from judge_all(replays, progress)
        return
    threads = 1 if workers.ray else max(1, torch.get_num_threads() // n)  # to Ray a task is a core
    job = _Job(os.urandom(8).hex(), model, subjects, [replay.plan for replay in replays], threads)
    of, done = n_records(replays), 0
    for judged in _on_ray(job, tasks, workers.ray, n) if workers.ray else _in_processes(job, tasks, n):
        yield from judged
        done += len(judged)
        progress(done / of)


def _in_processes(job: _Job, tasks: Sequence[tuple[str, ...]], n: int) -> Iterator[list[JudgedRecord]]:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of the workers, which share the cores: to spin takes them
    # Not forked: torch's threads would be missing in the copy.
    pool = ProcessPoolExecutor(n, get_context("spawn"), _open, (job,))
    try:
        with _not_interrupted():
            all_judged = pool.map(_judge, [job.key] * len(tasks), tasks)
        yield from all_judged
    except BrokenProcessPool:
        raise EngineError(
            f"one of {n} workers was ended, for want of memory as a rule. Give fewer --workers, each of which takes as "
            "much as one process."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _on_ray(job: _Job, tasks: Sequence[tuple[str, ...]], address: str, n: int) -> Iterator[list[JudgedRecord]]:
    """A task of a process or a machine that is lost is done again by another, as Ray does it."""
    ray = _started(address, n)
    try:
        given, judge = ray.put(job), ray.remote(max_retries=_RETRIES, num_cpus=1)(_judge_job)
        for asked in [judge.remote(given, ops) for ops in tasks]:
            yield ray.get(asked)
    except ray.exceptions.WorkerCrashedError:
        raise EngineError(
            f"a Ray worker was lost {_RETRIES + 1} times in the same task, for want of memory as a rule. `ray logs` of "
            "that machine says why."
        ) from None
    finally:
        if address == "local":
            ray.shutdown()


def _started(address: str, n: int) -> Any:
    try:
        import ray
    except ImportError:
        raise EngineError(f"--ray needs Ray, which is not installed. {_RAY}") from None
    ended_by = signal.getsignal(signal.SIGTERM)
    try:
        local = {"num_cpus": n, "include_dashboard": False} if address == "local" else {"address": address}
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="error", **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise EngineError(f"--ray {address}: no cluster: {said}. `ray status` shows one; `local` starts one.") from None
    finally:  # Ray puts its own there
        signal.signal(signal.SIGTERM, ended_by)
    return ray


@contextmanager
def _not_interrupted() -> Iterator[None]:
    """Processes that are started here do not hear of Ctrl-C, which the terminal sends to all: the first one ends them.

    It hears of it a moment later.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _open(job: _Job) -> None:
    torch.set_num_threads(job.n_threads)
    _replays.clear()
    _replays[job.key] = replays_of(job.model, job.subjects, job.plans, job.plans[0].device)


def _judge(key: str, ops: tuple[str, ...]) -> list[JudgedRecord]:
    return [*judge_ops(_replays[key], ops)]


def _judge_job(job: _Job, ops: tuple[str, ...]) -> list[JudgedRecord]:
    if job.key not in _replays:
        _open(job)
    return _judge(job.key, ops)
