"""The process around the command line, whose exit code is a verdict: nothing else may end it with 0 or 1.

Loads nothing else of tracediff: it stands before the libraries that end a process by themselves.
"""

import atexit
import ctypes
import errno
import gc
import io
import os
import signal
import sys
from types import FrameType
from typing import TextIO

UNDECIDED = 2
_GLIBC = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ())
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Turns that a thread of libgomp, which torch computes with, waits for the others before it sleeps. By default they are
# 300,000: on two cores that other processes keep busy a check of 12 s took 86 (140 s of the processor), with these 15;
# on idle ones both take 8.5.
_SPINS = "2000"
# glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX (malloc.h), and what they are set to: by default arrays of
# some MB are given back to the system and fetched again, page by page. Of a check of 1.5 GB, judged by two processes,
# that took 9.3 of 30 s of the processor; so it takes 2.8, and no more memory at its peak.
_KEPT = ((-1, 1 << 30), (-3, 1 << 30), (-8, 1))
# Objects more than there were before cycles are looked for; Python's own are 700. Imports and results are many objects
# without cycles: of a check of 500 steps that search took a tenth of the time.
_SELDOM = 100_000
_AGAIN = 0.05  # seconds until a signal that came while torch was imported is looked at once more


class Interrupted(KeyboardInterrupt):
    """A signal that asks the process to end. `code` is the shell's exit code for it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


def prepare() -> None:
    """Make signals exceptions, give closed standard streams a place, notice libraries that call exit(), let threads
    that wait for one another sleep, and keep memory that was freed.
    """
    _open_streams()
    tune()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _interrupt)
    _notice_exit()


def tune() -> None:
    """Use memory that was freed again, instead of giving it back to the system, and look for cycles seldom."""
    gc.set_threshold(_SELDOM)
    if _GLIBC:
        libc = ctypes.CDLL(None)
        for parameter, value in _KEPT:
            libc.mallopt(parameter, value)


def wind_up() -> None:
    """What is left to do takes no time, and what there is to say is said: signals change nothing any more."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # or Python looks for cycles among all that torch has, once more: 0.09 s instead of 0.3


def complain(message: str) -> None:
    """One message on standard error; where that is closed or full, the exit code has to do."""
    try:
        sys.stderr.write(f"tracediff: {message}\n")
        sys.stderr.flush()
    except OSError:
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Drop what a stream does not take any more: Python would try again at exit, and end with a code of its own."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def interruption(error: BaseException | None) -> Interrupted | None:
    """The signal that is behind an exception, where one is."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error


def _interrupt(number: int, frame: FrameType | None = None) -> None:
    """The first signal ends the command; those that come while it is tidying up find that under way.

    While torch is imported it waits: an exception that reaches pybind11 in there ends the process by std::terminate.
    """
    if interruption(sys.exception()) is not None:
        return
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        signal.signal(signal.SIGALRM, lambda *_: _interrupt(number))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        return
    raise Interrupted(number)


class _Closed(io.TextIOBase):
    """Standard output where there is none: the report would be lost without a word."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "standard output is closed")


def _open_streams() -> None:
    """Else the next file opened is standard output or error, and what a library prints goes into it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _notice_exit() -> None:
    """libgomp without a thread and OpenBLAS without memory call exit(1), which would say that something diverges."""
    if not _GLIBC:  # elsewhere the handler could outlive Python
        return
    libc = ctypes.CDLL(None)
    name = ctypes.c_char()  # its address names the handler, so that no other is removed with it
    python_ends = False

    def at_exit(_: object) -> None:
        if python_ends:
            return
        complain(
            "a library ended the process, for want of memory or threads as a rule: it may have said why above. "
            "Nothing was decided. Give it more, or fewer threads (OMP_NUM_THREADS=1)."
        )
        atexit._run_exitfuncs()  # which remove temporary folders
        os._exit(UNDECIDED)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(at_exit)

    def before_python_is_gone(kept: object = handler) -> None:  # C does not keep it
        nonlocal python_ends
        python_ends = True
        libc.__cxa_finalize(ctypes.byref(name))

    libc.__cxa_atexit(handler, None, ctypes.byref(name))
    atexit.register(before_python_is_gone)
