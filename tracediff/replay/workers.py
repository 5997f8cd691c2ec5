"""Records judged in several processes: a layer at a time, by the plan that was made in the first."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

import torch

from tracediff.errors import EngineError
from tracediff.model.model import Model
from tracediff.replay.judging import JudgedRecord, Subject, judge_ops, layers, n_records, replays_of
from tracediff.replay.plan import Plan
from tracediff.replay.replay import Replay

_replays: list[Replay] = []  # of a worker: opened once for all that it judges


def judge_in_processes(
    model: Model, subjects: Sequence[Subject], replays: Sequence[Replay], n: int, progress: Callable[[float], None]
) -> Iterator[JudgedRecord]:
    """What `judge_all` yields for these `replays` of the subjects, by `n` processes, each of which opens the files.

    Raises EngineError where one of them is ended from outside.
    """
    plans = [replay.plan for replay in replays]
    of, done = n_records(replays), 0
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of the workers, which share the cores: to spin takes them
    # Not forked: torch's threads would be missing in the copy.
    pool = ProcessPoolExecutor(n, get_context("spawn"), _open, (model, subjects, plans, torch.get_num_threads()))
    try:
        with _not_interrupted():
            all_judged = pool.map(_judge, layers(replays))
        for judged in all_judged:
            yield from judged
            done += len(judged)
            progress(done / of)
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


def _open(model: Model, subjects: Sequence[Subject], plans: Sequence[Plan], n_threads: int) -> None:
    torch.set_num_threads(n_threads)  # as many as in the first process: sums in parts differ in their last digits
    _replays.extend(replays_of(model, subjects, plans, plans[0].device))


def _judge(ops: tuple[str, ...]) -> list[JudgedRecord]:
    return [*judge_ops(_replays, ops)]
