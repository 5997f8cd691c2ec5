"""An .npz archive of arrays named by op, `stepN/` in front where there are several steps."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import Array, Entry, Say, array, check_unpacked, reading
from tracediff.interchange.naming import split_step


def entries(path: Path, say: Say) -> Iterator[Entry]:
    """One entry per array, read one at a time; pickles are never read. Not by numpy.load, which would inflate what it
    is given, and takes any file that is no archive for a pickle.
    """
    with reading(path, "an .npz archive"):
        with path.open("rb") as file:
            single = file.read(6) == np.lib.format.MAGIC_PREFIX
        archive = None if single else ZipFile(path)
    if archive is None:
        raise InterchangeError(f"{path}: it is a single array, not an .npz archive. Give its folder to `import npy`.")
    members = archive.infolist()
    check_unpacked(path, sum(member.file_size for member in members))
    for member in members:
        step, name = split_step(member.filename.removesuffix(".npy"))
        no_op = None if member.filename.endswith(".npy") else "no .npy array"
        yield Entry(step, name, partial(_load, path, archive, member), None, no_op)


def _load(path: Path, archive: ZipFile, member: ZipInfo) -> Array:
    with reading(path, f"an .npz archive (array {member.filename!r})"), archive.open(member) as file:
        return array(np.lib.format.read_array(file, allow_pickle=False))
