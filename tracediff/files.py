"""What every file that tracediff writes goes through: nothing that was there is harmed, nothing is left half written.

A file is written under another name in the same folder, synced, and renamed at the end. A file that this run reads,
or that tracediff has not written, is never replaced.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tracediff.errors import OutputError

Ours = Callable[[bytes], bool]  # whether tracediff wrote a file that begins so: its first 4 KiB
_HEAD = 4096
_ELSEWHERE = "Give another name, or move it away."


def check(out: Path, inputs: Iterable[Path], ours: Ours) -> None:
    """Whether `out` may be written, before any work is done for it; raises OutputError and says why not."""
    refuse_inputs(out, inputs)
    refuse_foreign(out, ours)
    require_folder(out)


def require_folder(out: Path) -> None:
    """Raises OutputError where the folder of `out` is not there, or cannot be written to."""
    folder = Path(os.path.realpath(out)).parent
    if not folder.is_dir():
        raise OutputError(f"{out}: there is no folder {folder}. Make it, or give another place.")
    if not _is_stream(out) and not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{out}: the folder {folder} cannot be written to. Give another place.")


def refuse_inputs(out: Path, inputs: Iterable[Path]) -> None:
    """Raises OutputError where `out` is a file that this run reads, or where it prints, by whatever name or link."""
    try:
        found = out.stat()
    except OSError:
        return
    for path in inputs:
        with suppress(OSError):
            if os.path.samestat(found, path.stat()):
                raise OutputError(f"{out} is read by this run, and would be replaced. Give another name.")
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(descriptor)):
                raise OutputError(f"{out} is where this run prints to, and would be replaced. Give another name.")


def refuse_foreign(out: Path, ours: Ours) -> None:
    """Raises OutputError where `out` is a folder, or a file that tracediff has not written or may not write."""
    if out.is_dir():
        raise OutputError(f"{out} is a folder. Name a file in it.")
    if not out.is_file():
        return
    if not os.access(out, os.W_OK):
        raise OutputError(f"{out} is write-protected. {_ELSEWHERE}")
    try:
        with out.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise OutputError(f"{out} exists and cannot be read: {error.strerror}. {_ELSEWHERE}") from None
    if head and not ours(head):
        raise OutputError(f"{out} exists, and is not what tracediff writes there. {_ELSEWHERE}")


@contextmanager
def replacing(out: Path, ours: Ours) -> Iterator[Path]:
    """A path to write to, synced and renamed to `out` when the block ends; when it fails, what was there stays.

    Of two writers both write the whole, and the later one's stays. A link goes on pointing to where it did. A pipe or
    a device is written as it is. Raises OutputError, an OSError of the block included.
    """
    refuse_foreign(out, ours)
    try:
        if _is_stream(out):
            yield out
            return
        place = Path(os.path.realpath(out))
        part = place.with_name(f".tracediff-{os.urandom(8).hex()}")  # of no length that the name's could exceed
        try:
            yield part
            with suppress(FileNotFoundError):
                part.chmod(stat.S_IMODE(place.stat().st_mode))
            sync(part)
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)
        sync(place.parent)
    except OSError as error:
        raise OutputError(
            f"{out}: cannot write it: {error.strerror or error}. Choose another place, or free some space."
        ) from None


def write_text(out: Path, text: str, ours: Ours) -> None:
    """A whole text file in UTF-8, whatever the locale says; raises OutputError, and then nothing has changed."""
    with replacing(out, ours) as path:
        path.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Onto the disk with a file's contents, or with a folder's names where the file system can do that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed when the block ends, also where Ctrl-C comes while it is being removed."""
    folder = tempfile.TemporaryDirectory(prefix="tracediff-")
    try:
        yield Path(folder.name)
    finally:
        try:
            folder.cleanup()
        except KeyboardInterrupt:
            folder.cleanup()
            raise


def _is_stream(path: Path) -> bool:
    """Whether it takes what is written and keeps nothing: a pipe, a device, /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()
