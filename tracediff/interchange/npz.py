"""An .npz archive of arrays named by op, `stepN/` in front where there are several steps."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import Array, Entry, Say, array, reading
from tracediff.interchange.naming import split_step


def entries(path: Path, say: Say) -> Iterator[Entry]:
    """One entry per array, read one at a time; pickles are never read."""
    with reading(path, "an .npz archive"):
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InterchangeError(
                f"{path}: it is a single array, not an .npz archive. Give its folder to `import npy`."
            )
        with archive:
            keys = archive.files
    for key in keys:
        step, name = split_step(key)
        yield Entry(step, name, partial(_load, path, key))


def _load(path: Path, key: str) -> Array:
    with reading(path, f"an .npz archive (array {key!r})"), np.load(path, allow_pickle=False) as archive:
        return array(archive[key])
