"""How the processes start that judge beside this one: forked from one that has imported what judges.

To import torch and the rest takes 1.9 s of the processor. So it is done once for all of them, in a process that does
nothing else, while this one opens files and plans.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import TypeVar

from tracediff.process import tune

Job = TypeVar("Job")
_NEEDED = ["tracediff.diagnose.judged", "tracediff.diagnose.explain"]


def begin() -> BaseContext:
    """What starts processes. From the first call on what they need is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of the workers, which share the cores: to spin takes them
    # Each worker has fresh memory, which torch asks for in pages of 2 MB then (PyTorch's tuning guide): by 4 KB it was
    # 1.3 s of the system's in each of two, of 15.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Never forked from this process: torch's threads would be missing in the copy. Elsewhere libraries start some when
    # they are imported (Accelerate), or nothing forks.
    if sys.platform != "linux":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(_NEEDED)
    with not_interrupted():
        forkserver.ensure_running()
    return context


def processes(n: int, prepare: Callable[[Job], object], job: Job) -> ProcessPoolExecutor:
    """So many, each of which prepares for the job before it does anything, and lives no longer than this one."""
    return ProcessPoolExecutor(n, begin(), _prepared, (prepare, job))


def _prepared(prepare: Callable[[Job], object], job: Job) -> None:
    tune()
    Thread(target=_end_with, args=[parent_process()], daemon=True).start()
    prepare(job)


def _end_with(first: BaseProcess) -> None:
    """One that is killed ends nobody: its processes would wait for ever for something to do."""
    first.join()
    os._exit(1)


@contextmanager
def not_interrupted() -> Iterator[None]:
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
