"""A Ray cluster on which tasks are done: one that is there, or one of this machine alone that is started for it."""

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar

from tracediff.errors import EngineError

_INSTALL = 'Install it with: pip install "tracediff[ray]".'
_RETRIES = 3  # of a task whose process or machine was lost
_PATIENCE = 5.0  # seconds in which an address answers; Ray waits for minutes
# HTTP/2, which all of Ray speaks: a client's first bytes with empty settings, and how a server's begin to answer.
_HELLO, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), 4
_Done = TypeVar("_Done")


def connected(address: str | None, n: int) -> "AbstractContextManager[Cluster | None]":
    """The cluster at an address; "local" starts one of `n` cores of this machine, and ends it. None of no address."""
    return nullcontext() if address is None else Cluster(address, n)


class Cluster:
    """A connection to the cluster at an address; "local" starts one of `n` cores of this machine, until it is closed.

    Raises EngineError without Ray, or where no cluster answers.
    """

    def __init__(self, address: str, n: int) -> None:
        try:
            import ray
        except ImportError:
            raise EngineError(f"--ray needs Ray, which is not installed. {_INSTALL}") from None
        self._ray: Any = ray
        self._own = address == "local"
        if not self._own:
            _require_answer(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        where = {"num_cpus": n, "include_dashboard": False} if self._own else {"address": address}
        ended_by = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="error", **where)
        except (ConnectionError, RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0].rstrip(".")
            raise _no_cluster(address, said) from None
        except SystemExit:  # Ray's answer to SIGTERM: the one that was there before is asked instead
            signal.signal(signal.SIGTERM, ended_by)
            signal.raise_signal(signal.SIGTERM)
            raise
        finally:  # Ray puts its own there
            signal.signal(signal.SIGTERM, ended_by)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._own:
            self._ray.shutdown()

    @property
    def n_cores(self) -> int:
        """How many tasks it does at once."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def done(self, do: Callable[[Any, Any], _Done], job: object, given: Sequence[object]) -> Iterator[_Done]:
        """What each task comes to, in their order. One whose process or machine is lost is done again by another."""
        ray = self._ray
        shared, remote = ray.put(job), ray.remote(max_retries=_RETRIES, num_cpus=1)(do)
        asked = [remote.remote(shared, one) for one in given]
        try:
            for one in asked:
                yield ray.get(one)
        except ray.exceptions.WorkerCrashedError:
            raise EngineError(
                f"a Ray worker was lost {_RETRIES + 1} times in the same task, for want of memory as a rule. "
                "`ray logs` of that machine says why."
            ) from None


def _no_cluster(address: str, why: str) -> EngineError:
    return EngineError(f"--ray {address}: no cluster: {why}. `ray status` shows one; `local` starts one.")


def _require_answer(address: str) -> None:
    """Raises EngineError for an address where nothing answers, or something else than Ray; what is none Ray refuses."""
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not port.isdigit() or os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):  # it knows with what to ask
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PATIENCE) as asked:
            asked.sendall(_HELLO)
            said = asked.recv(9)
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, f"{getattr(error, 'strerror', None) or error}") from None
    if said[3:4] != bytes([_SETTINGS]):
        raise _no_cluster(address, "what answers there is not Ray")
