"""The error tree. Every message says what is wrong, where, and what to do next; only the CLI catches."""

import os
import traceback

from tracediff.printable import printable


def wants_memory(error: BaseException) -> bool:
    """Whether it is for want of memory, as the system, numpy and torch say so; a library that cannot be mapped too."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in said for words in ("allocate memory", "bad_alloc", "failed to map segment", "can't start new thread")
    )


def is_bug(error: Exception) -> bool:
    """Whether it is tracediff's own: neither what it says by itself, nor a want of memory."""
    return not (isinstance(error, TracediffError) or wants_memory(error))


def in_one_line(error: BaseException) -> str:
    """What it says, and where in the code it was raised."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{said} (in {frame.name}, line {frame.lineno} of {os.path.basename(frame.filename)})"


class TracediffError(Exception):
    """Something could not be decided: exit code 2.

    The message is made printable, for names and paths are others'; one of several lines is given line by line.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(printable, lines))

    def __str__(self) -> str:
        return "\n".join(self.args)


class ModelError(TracediffError):
    """A GGUF file that cannot be read, or a model that is not supported."""


class TraceError(TracediffError):
    """A trace that breaks the format or cannot be written."""


class EngineError(TracediffError):
    """An engine that could not run: bad tokens, missing device, a dead child process."""


class InterchangeError(TracediffError):
    """A foreign file that cannot be imported, or a trace that cannot be exported."""


class MismatchError(TracediffError):
    """Two sides that cannot be compared: other tokens, another model."""


class OutputError(TracediffError):
    """A file that cannot be written, or must not be: it is read by the same run, or somebody else's."""
