"""Records judged and explained in several processes, here or on a cluster, by the plan that was made in the first.

What a process is given is small: the paths of the files, the plan, and a layer's ops. It opens the files itself, once,
and reads the records and the weights of its layers. What takes longest is begun first, so that none waits for it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import torch

from tracediff.errors import EngineError
from tracediff.model.model import Model
from tracediff.replay.cluster import Cluster
from tracediff.replay.judging import JudgedRecord, Subject, judge_all, judge_ops, n_records, replays_of
from tracediff.replay.memory import needed
from tracediff.replay.plan import Plan
from tracediff.replay.replay import Replay
from tracediff.replay.starting import not_interrupted, processes
from tracediff.replay.tasks import tasks

_replays: dict[str, list[Replay]] = {}  # of a process: opened once for all that it does
Given = TypeVar("Given")
Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class Workers:
    """What judges and explains: so many processes of this machine, or those of a Ray cluster."""

    n: int = 1
    cluster: Cluster | None = None


ALONE = Workers()


@dataclass(frozen=True, slots=True)
class _Job:
    """What every process needs to do any task; `key` tells one job from another."""

    key: str
    do: Callable[[Sequence[Replay], Any], Any]
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
    outside.
    """
    if workers == ALONE:
        yield from judge_all(replays, progress)
        return
    done = spread(workers, _judged, model, subjects, replays, partial(tasks, replays))
    yield from _in_order(done, replays, progress)


def _judged(replays: Sequence[Replay], ops: tuple[str, ...]) -> list[JudgedRecord]:
    return [*judge_ops(replays, ops)]


def spread(
    workers: Workers,
    do: Callable[[Sequence[Replay], Given], Done],
    model: Model,
    subjects: Sequence[Subject],
    replays: Sequence[Replay],
    given: Callable[[int], Sequence[Given]],
) -> Iterator[Done]:
    """What is done with these `replays` of the subjects and each of what is `given` to so many workers, in its order.

    Each opens the files itself, and takes the plans that were made. `do` is a module's function.
    """
    plans = [replay.plan for replay in replays]
    if workers.cluster:
        job = _Job(os.urandom(8).hex(), do, model, subjects, plans, 1)  # to Ray a task is a core
        yield from workers.cluster.done(_do_job, job, given(workers.cluster.n_cores))
        return
    shares = given(workers.n)
    n = min(workers.n, len(shares))
    if n <= 1:
        yield from (do(replays, one) for one in shares)
        return
    job = _Job(os.urandom(8).hex(), do, model, subjects, plans, max(1, torch.get_num_threads() // n))
    try:
        yield from _in_processes(job, shares, n)
    except BrokenProcessPool:
        raise EngineError(
            f"one of {n} workers was ended, for want of memory as a rule. Give fewer --workers: to judge this, each "
            f"takes {needed(replays)}."
        ) from None


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


def _in_processes(job: _Job, given: Sequence[Any], n: int) -> Iterator[Any]:
    pool = processes(n, _open, job)
    try:
        with not_interrupted():
            done = pool.map(_do, repeat(job.key), repeat(job.do), given)
        yield from done
    finally:
        pool.shutdown(cancel_futures=True)


def _open(job: _Job) -> None:
    torch.set_num_threads(job.n_threads)
    _replays.clear()
    _replays[job.key] = replays_of(job.model, job.subjects, job.plans, job.plans[0].device)


def _do(key: str, do: Callable[[Sequence[Replay], Any], Any], one: object) -> Any:
    return do(_replays[key], one)


def _do_job(job: _Job, one: object) -> Any:
    if job.key not in _replays:
        _open(job)
    return _do(job.key, job.do, one)
