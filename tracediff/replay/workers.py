"""Records judged in several processes, here or on a cluster: a layer at a time, by the plan that was made in the first.

What a process is given is small: the paths of the files, the plan, and a layer's ops. It opens the files itself, once,
and reads the records and the weights of its layers. What takes longest is begun first, so that none waits for it.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from tracediff.errors import EngineError
from tracediff.model.model import Model
from tracediff.replay.cluster import Cluster
from tracediff.replay.judging import JudgedRecord, Subject, judge_all, judge_ops, n_records, replays_of
from tracediff.replay.plan import Plan
from tracediff.replay.replay import Replay
from tracediff.replay.tasks import tasks

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
    if workers.ray:
        with Cluster(workers.ray, workers.n) as cluster:
            given, job = tasks(replays, cluster.n_cores), _job(model, subjects, replays, 1)  # to Ray a task is a core
            yield from _in_order(cluster.done(_judge_job, job, given), replays, progress)
        return
    given = tasks(replays, workers.n)
    n = min(workers.n, len(given))
    if n <= 1:
        yield from judge_all(replays, progress)
        return
    job = _job(model, subjects, replays, max(1, torch.get_num_threads() // n))
    yield from _in_order(_in_processes(job, given, n), replays, progress)


def _job(model: Model, subjects: Sequence[Subject], replays: Sequence[Replay], n_threads: int) -> _Job:
    return _Job(os.urandom(8).hex(), model, subjects, [replay.plan for replay in replays], n_threads)


def _in_order(
    done: Iterable[list[JudgedRecord]], replays: Sequence[Replay], progress: Callable[[float], None]
) -> Iterator[JudgedRecord]:
    """What tasks come to, in the graph's order."""
    by_op: dict[str, list[JudgedRecord]] = {}
    of, n = n_records(replays), 0
    for judged in done:
        for one in judged:
            by_op.setdefault(one.record.op, []).append(one)
        n += len(judged)
        progress(n / of)
    for op in replays[0].graph:
        yield from by_op.get(op.name, ())


def _in_processes(job: _Job, given: Sequence[tuple[str, ...]], n: int) -> Iterator[list[JudgedRecord]]:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of the workers, which share the cores: to spin takes them
    # Not forked: torch's threads would be missing in the copy.
    pool = ProcessPoolExecutor(n, get_context("spawn"), _open, (job,))
    try:
        with _not_interrupted():
            all_judged = pool.map(_judge, [job.key] * len(given), given)
        yield from all_judged
    except BrokenProcessPool:
        raise EngineError(
            f"one of {n} workers was ended, for want of memory as a rule. Give fewer --workers, each of which takes as "
            "much as one process."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


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
