"""What is opened for reading: files. A pipe has its bytes once, or never comes; a device may never end."""

import errno
import stat
from pathlib import Path

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
