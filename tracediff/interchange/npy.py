"""A folder of .npy files named by op; subfolders `stepN`, or `stepN` in front of a name, are steps."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from numpy.lib.format import read_array

from tracediff.interchange.entry import Array, Entry, Say, array, files, reading
from tracediff.interchange.naming import split_step


def entries(folder: Path, say: Say) -> Iterator[Entry]:
    """One entry per file, read when it is loaded; pickles are never read. Not mapped: it may change meanwhile."""
    for path in files(folder, "*.npy", "the .npy files"):
        step, name = split_step(path.relative_to(folder).with_suffix("").as_posix())
        yield Entry(step, name, partial(_load, path))


def _load(path: Path) -> Array:
    with reading(path, "a .npy file"), path.open("rb") as file:
        return array(read_array(file, allow_pickle=False))
