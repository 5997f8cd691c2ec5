"""What is opened for reading: files, of this machine or by URL of some storage.

A pipe has its bytes once, or never comes; a device may never end.
"""

import errno
import io
import os
import re
import stat
from glob import glob
from pathlib import Path

from tracediff.errors import TracediffError

_OTHERS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def require_file(path: Path) -> Path:
    """The path itself, if a file is there, links followed.

    Raises OSError, whose `strerror` says what else it is, also for what a library would wait for or read for ever.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if kind in _OTHERS:
        raise OSError(errno.EINVAL, f"it is {_OTHERS[kind]}, not a file", str(path))
    return path


class Ranges(io.RawIOBase):
    """A file of some storage, read by ranges: each read is one request for those bytes and no others."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise OSError(errno.EINVAL, 'a URL needs fsspec: pip install "tracediff[remote]"', url) from None
        try:
            self._storage, self._path = url_to_fs(url)
            self.size = int(self._storage.info(self._path)["size"])
        except FileNotFoundError as error:
            why = f" ({error.__cause__})" if error.__cause__ else ""
            raise OSError(errno.ENOENT, f"there is no such file in that storage{why}", url) from None
        except Exception as error:  # each storage has its own
            raise OSError(errno.EINVAL, str(error) or type(error).__name__, url) from None
        self._at, self._url = 0, url

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def readinto(self, into: memoryview | bytearray) -> int:  # type: ignore[override]
        """As of any file; raises TracediffError where the storage does not give it."""
        n = max(0, min(len(into), self.size - self._at))
        try:
            data = self._storage.cat_file(self._path, start=self._at, end=self._at + n) if n else b""
        except Exception as error:  # each storage has its own
            raise TracediffError(
                f"{self._url}: cannot read on: {str(error) or type(error).__name__}. Try again."
            ) from None
        if len(data) != n:
            raise TracediffError(
                f"{self._url}: asked for {n:,} bytes of it the storage gave {len(data):,}: it has no ranges, or the "
                "file has changed. Copy it to this machine."
            )
        into[:n] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        """From here to the end, in one request."""
        into = bytearray(self.size - self._at)
        return bytes(into[: self.readinto(into)])


def url_of(path: Path) -> str | None:
    """The URL that a path was, as `s3://bucket/name`: as a path it has one slash. None of a path of this machine."""
    found = re.fullmatch(r"([a-z][a-z0-9+.-]+):/+(.+)", str(path))
    if not found or path.exists():
        return None
    return f"{found[1]}://{'/' * (found[1] == 'file')}{found[2]}"  # of this machine, it has no host


def fitting(path: Path) -> list[Path]:
    """The file of this name, or else those of this machine that it fits as a pattern, in the order of their names."""
    return [path] if os.path.exists(path) else [Path(name) for name in sorted(glob(str(path)))]


def open_file(path: Path) -> io.FileIO | Ranges:
    """A file of this machine, or by its URL of some storage, for reading. Raises OSError as `require_file` does."""
    url = url_of(path)
    return Ranges(url) if url else require_file(path).open("rb", buffering=0)


def stamp(file: io.FileIO | Ranges) -> tuple[int, int]:
    """Size, and when it was written: what tells that another has changed it. Of storage it is asked once."""
    if isinstance(file, Ranges):
        return file.size, 0
    now = os.fstat(file.fileno())
    return now.st_size, now.st_mtime_ns
