"""Where a trace is written until it is whole: nothing that was there before is harmed or left half replaced.

    NAME.partial/NAME.trace and NAME.bin, while they are written  ->  NAME.trace and NAME.bin

In that folder both files bear their own names, so what a killed run had written can be read there. Two files cannot be
renamed at once, and one trace's text with another's data would be read without a word. Therefore the old data goes
first: of whatever a crash leaves in between, the reader says that the data is missing.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tracediff.errors import TraceError
from tracediff.files import refuse_inputs, require_folder, sync
from tracediff.trace.format import Header
from tracediff.trace.reader import Trace
from tracediff.trace.reading import header_of

_ELSEWHERE = "Move it away, or name the trace otherwise."


@contextmanager
def staged(out: Path, inputs: Iterable[Path] = (), *, keep_cut: bool = True) -> Iterator[Path]:
    """A path to write a trace to, which becomes `out`, and NAME.bin beside it, when the block ends.

    When the block fails, what was there before stays. With `keep_cut`, the ops that were written so far are kept as
    well: as `out` where nothing was there, else in NAME.partial; a note of the exception says which. Raises what
    `check` does, and TraceError where another run is writing `out` or the files cannot be written.
    """
    inputs = [*inputs]
    check(out, inputs)
    folder = out.with_suffix(".partial")
    part = folder / out.name
    try:
        lock = _claim(part)
    except OSError as error:
        raise cannot_write(out, error) from None
    try:
        yield part
        _publish(part, out, inputs)
    except BaseException as error:
        if keep_cut and (note := _keep(part, out)):
            error.add_note(note)
        elif not keep_cut:
            _clear(part)
        raise
    finally:
        with suppress(OSError):  # not empty: it keeps what was written
            folder.rmdir()
        os.close(lock)


def check(out: Path, inputs: Iterable[Path] = ()) -> None:
    """Whether a trace may be written there, before any work is done for it.

    Raises TraceError where one of its two files exists and is no trace's, OutputError where this run reads one, and
    where there is no folder or none that can be written to.
    """
    if out.suffix != ".trace":
        raise TraceError(f"{out}: a trace is two files, NAME.trace and NAME.bin. Name it {out.name}.trace.")
    require_folder(out)
    inputs = [*inputs]
    for path in _both(out):
        refuse_inputs(path, inputs)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise TraceError(f"{path} exists and is a link or no file. {_ELSEWHERE}")
        if path.exists() and not os.access(path, os.W_OK):
            raise TraceError(f"{path} is write-protected. {_ELSEWHERE}")
    text, data = _both(out)
    header = _header(text)
    if _size(text) and header is None:
        raise TraceError(f"{text} exists and is no trace. {_ELSEWHERE}")
    if _size(data) and not (header and header.data == data.name and _holds(text, data)):
        raise TraceError(f"{data} exists and is no trace's. {_ELSEWHERE}")


def files_of(path: Path) -> list[Path]:
    """A trace and the data file that it names; any other file alone."""
    header = _header(path)
    return [path, path.with_name(header.data)] if header and header.data else [path]


def cannot_write(out: Path, error: OSError) -> TraceError:
    """What is said of a trace whose files cannot be written."""
    return TraceError(
        f"{out}: cannot write the trace: {error.strerror or error}. Free some space or choose another place with "
        "-o or --save; --capture layers or --capture stats write far less."
    )


def _both(out: Path) -> tuple[Path, Path]:
    return out, out.with_suffix(".bin")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _header(path: Path) -> Header | None:
    """The first line of a trace; None where there is none, or one whose data lies elsewhere."""
    header = header_of(path)
    return header if header and Path(header.data or "").name == (header.data or "") else None


def _holds(text: Path, data: Path) -> bool:
    """Whether a data file is as long as its trace says; of a trace that was cut off it may be longer."""
    trace, problems = Trace.lenient(text)
    cut = bool([problem for problem in problems if problem.cut])  # of all lines: then the records are there
    records = [record for record in [*trace.weights.values(), *trace.ops.values()] if record.offset is not None]
    held = max(((record.offset or 0) + record.nbytes for record in records), default=0)
    return _size(data) == held or (_size(data) > held and cut)


def _claim(part: Path) -> int:
    """Make the folder, empty it of what a killed run left, and lock it; raises TraceError while another run has it."""
    while True:
        with suppress(FileExistsError):
            part.parent.mkdir()
        try:
            if part.parent.is_symlink() or {*os.listdir(part.parent)} - {path.name for path in _both(part)}:
                raise TraceError(
                    f"{part.parent}, where the trace is written first, is a link or holds other files. {_ELSEWHERE}"
                )
            lock = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # its owner has just removed the folder
            continue
        if not _locked(lock):
            os.close(lock)
            raise TraceError(
                f"{part.parent}: another run is writing this trace. Wait until it ends, or name yours otherwise."
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), part.stat()):
                os.truncate(lock, 0)
                part.with_suffix(".bin").unlink(missing_ok=True)
                return lock
        os.close(lock)  # its owner has just moved it to its place


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _publish(part: Path, out: Path, inputs: list[Path]) -> None:
    try:
        for path in _both(part):
            sync(path)
        check(out, inputs)  # hours may have passed
        try:
            _move(part, out)
        except KeyboardInterrupt:
            _move(part, out)  # half a trace is none
            raise
    except OSError as error:
        raise cannot_write(out, error) from None


def _move(part: Path, out: Path) -> None:
    """Both files from the folder to their place, or what is left of that to be done."""
    (text, data), (text_out, data_out) = _both(part), _both(out)
    if data.exists() and data_out.exists():
        data_out.unlink()
        sync(data_out.parent)
    for path, place in ((text, text_out), (data, data_out)):
        with suppress(FileNotFoundError):
            path.replace(place)
    sync(out.parent)


def _keep(part: Path, out: Path) -> str | None:
    """Keep what was written of a trace, if that is one op or more; says where, or None where nothing is kept."""
    with suppress(OSError):
        if b'\n{"type":"op"' not in part.read_bytes():
            _clear(part)
            return None
        if any(map(os.path.lexists, _both(out))):
            return f"What was traced so far can be read: {part}. {out} is as it was."
        _move(part, out)
        return f"What was traced so far can be read: {out}."
    return None


def _clear(part: Path) -> None:
    for path in _both(part):
        with suppress(OSError):
            path.unlink(missing_ok=True)
