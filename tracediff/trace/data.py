"""The data file of a trace: the values of records, read when they are asked for.

Never mapped: a process is killed by SIGBUS where another cuts a file that it has mapped, and what another writes
into it changes under its hands. A read is a copy more, which replay does not feel and comparing does: a fifth.
"""

import errno
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from tracediff.errors import TraceError
from tracediff.inputs import open_file, stamp, url_of
from tracediff.trace.format import STORAGE, OpRecord, Rows, Values, to_float

_PIECE = 1 << 16  # values that are read at a time, which stay in the second-level cache


class DataFile:
    """The file with the bare name `name` beside a trace, or nothing. Raises OSError where there is none to be read.

    Every read raises TraceError where the file is not what it was when it was opened: no verdict on a mixture.
    """

    def __init__(self, trace: Path, name: str | None = None) -> None:
        self._trace = trace
        self.size = 0
        if name is None:
            return
        path = trace.parent / name
        # Opened with `trace` copied from elsewhere, a link would have values of any file judged, shown and exported.
        if not url_of(path) and path.resolve().parent not in (trace.parent.resolve(), trace.resolve().parent):
            raise OSError(errno.EINVAL, "it is a link out of the trace's folder", name)
        self._path = path
        self._file = open_file(path)
        finalize(self, self._file.close)
        self._stamp = stamp(self._file)
        self.size = self._stamp[0]

    def values(self, record: Values, rows: Rows = None, channels: slice | None = None) -> np.ndarray:
        """As `Trace.values`."""
        axis, held = (record.token_axis, record.rows) if isinstance(record, OpRecord) else (0, None)
        at = rows if rows is None or held is None else [held.index(row) for row in rows]
        if axis or record.strides is not None or (at is None and channels is None):
            shaped = self.stored(record)
            shaped = shaped if at is None else shaped.take(at, axis=axis)
            return to_float(shaped if channels is None else shaped.reshape(len(shaped), -1)[:, channels], _type(record))
        shaped = self._rows(record, range(record.shape[0]) if at is None else at, channels or slice(None))
        return to_float(shaped if channels else shaped.reshape(len(shaped), *record.shape[1:]), _type(record))

    def by_slice(self, record: Values, rows: Rows = None) -> "np.ndarray | Stored":
        """As `Trace.by_slice`."""
        whole = rows is None and record.strides is None
        return Stored(self, record.offset or 0, record.shape, _type(record)) if whole else self.values(record, rows)

    def stored(self, record: Values) -> np.ndarray:
        """As `Trace.stored`."""
        data = np.empty(record.extent, STORAGE[_type(record)])
        self.read_into(data, record.offset or 0)
        if record.strides is None or not record.size:
            return data.reshape(record.shape)
        # Along an axis of one value nobody moves, and its stride may be anything.
        strides = [s * data.itemsize * (n > 1) for n, s in zip(record.shape, record.strides, strict=True)]
        return np.lib.stride_tricks.as_strided(data, record.shape, strides)

    def read_into(self, values: np.ndarray, offset: int) -> None:
        """Fill a flat array with what begins at byte `offset`."""
        if values.size:
            self._fill(values, offset)
            self._check()

    def _rows(self, record: Values, rows: Sequence[int], channels: slice) -> np.ndarray:
        """The `channels` of these rows of a record in C order, [rows, channels]."""
        width = math.prod(record.shape[1:])
        start, stop, _ = channels.indices(width)
        values = np.empty((len(rows), stop - start), STORAGE[_type(record)])
        for row, into in zip(rows, values, strict=True):
            self._fill(into, (record.offset or 0) + (row * width + start) * values.itemsize)
        self._check()
        return values

    def _fill(self, values: np.ndarray, offset: int) -> None:
        left = values.view(np.uint8).data
        self._file.seek(offset)
        while left:
            n = self._file.readinto(left)  # 2 GB at most
            if not n:
                raise self._changed()
            left = left[n:]

    def _check(self) -> None:
        if stamp(self._file) != self._stamp:
            raise self._changed()

    def _changed(self) -> TraceError:
        return TraceError(
            f"{self._path}: the data file changed while it was read. Wait until the engine that writes it has ended, "
            "and run again."
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """Values in C order in a file, read by the slice, so that they need not all be in memory at once."""

    file: DataFile
    offset: int
    shape: tuple[int, ...]
    stored_as: str

    def read(self, at: slice, scratch: np.ndarray) -> np.ndarray:
        """A slice of the flat values. It lies in `scratch`, uint8 with room for it: fresh memory takes longer to
        provide than to fill. bfloat16 becomes float32, as `to_float` does it, elsewhere.
        """
        storage = STORAGE[self.stored_as]
        values = scratch[: (at.stop - at.start) * storage.itemsize].view(storage)
        self.file.read_into(values, self.offset + at.start * storage.itemsize)
        return to_float(values, self.stored_as)

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """All of it piece by piece, each with where it lies. It is there until the next is asked for."""
        scratch = np.empty(min(self.size, _PIECE) * 8, np.uint8)
        for at in range(0, self.size, _PIECE):
            cut = slice(at, min(at + _PIECE, self.size))
            yield cut, self.read(cut, scratch)

    def wide(self) -> np.ndarray:
        """The values as float64, shaped."""
        values = np.empty(self.size)
        with np.errstate(invalid="ignore"):  # NaN of bytes that are no floats may be signalling
            for cut, piece in self.pieces():
                values[cut] = piece
        return values.reshape(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what is read."""
        return np.dtype(np.float32) if self.stored_as == "bf16" else STORAGE[self.stored_as]


def _type(record: Values) -> str:
    if record.dtype is None:
        raise TraceError("a record has statistics only; its values were not recorded.")
    return record.dtype
