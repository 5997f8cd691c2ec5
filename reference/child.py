"""The parent's side: start the child with a request, hear what it says, tell how it died.

A child, because ggml aborts the whole process on a failed assertion and brings its own OpenMP. Whatever it
recorded before it died stays readable.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from tracediff.errors import EngineError
from tracediff_reference.protocol import DescribeRequest, Message, Request

_LAST_LINES = 8
# llama.cpp's threads meet after each node, thousands of times a second, and spin until all are there (libgomp: 300,000
# turns). Where another process has the core that is a time slice each: 200 steps of a tiny model took 13 s, so they
# take 2.
WAITING = {"GOMP_SPINCOUNT": "1000"}
_DYING = {"GGML_NO_BACKTRACE": "1"}  # it would fill the last lines, and takes seconds


def _library(folder: str | None) -> dict[str, str]:
    """Where llama-cpp-python is to find llama.cpp, and that what it is linked with; raises EngineError if it is not."""
    if folder is None:
        return {}
    if not any((Path(folder) / name).exists() for name in ("libllama.so", "libllama.dylib")):
        raise EngineError(f"--llama-lib {folder}: no libllama in it. Name the folder that a build of it is in.")
    before = os.environ.get("LD_LIBRARY_PATH")
    return {"LLAMA_CPP_LIB_PATH": folder, "LD_LIBRARY_PATH": f"{folder}{os.pathsep}{before}" if before else folder}


class Child:
    """A running child. `wait` until it is done before reading what it wrote."""

    def __init__(self, request: Request | DescribeRequest) -> None:
        self.tokens: tuple[int, ...] = ()
        message = msgspec.json.encode(request)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tracediff_reference"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**WAITING, **os.environ, **_DYING, **_library(request.options.library)},
        )
        assert self._child.stdin
        try:
            with suppress(BrokenPipeError), self._child.stdin as stdin:  # broken: it died already, `wait` says how
                stdin.write(message)
        except BaseException:  # Ctrl-C
            self.stop()
            raise

    def wait(self, progress: Callable[[float], None] = lambda fraction: None) -> tuple[int, ...]:
        """The prompt's tokens when the child is done; raises EngineError with its last lines if it died."""
        error = None
        try:
            assert self._child.stdout
            for line in self._child.stdout:
                message = msgspec.json.decode(line, type=Message)
                error = message.error or error
                self.tokens = message.tokens or self.tokens
                if message.progress is not None:
                    progress(message.progress)
            code = self._child.wait()
        except BaseException:  # Ctrl-C as well: never leave a child behind
            self.stop()
            raise
        if code:
            raise EngineError(*self._how_it_died(code, error))
        return self.tokens

    def stop(self) -> None:
        """End the child, whatever it does."""
        self._child.kill()
        self._child.wait()

    def _how_it_died(self, code: int, error: str | None) -> list[str]:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        said = [f"  | {line}" for line in lines[-_LAST_LINES:]]
        if error:
            return [*error.splitlines(), *(["Its last lines:", *said] if "llama.cpp" in error and said else [])]
        how = f"with exit code {code}"
        if code < 0:
            how = f"by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (out of memory?)"
        return [f"llama.cpp's process ended {how}. Its last lines:", *said]
