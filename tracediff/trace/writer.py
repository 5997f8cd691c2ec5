"""Writes a trace: append-only and streaming, so that whatever was written before a crash can be read."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from tracediff.names import plain_step
from tracediff.trace.format import (
    STORAGE,
    VERSION,
    DType,
    End,
    Header,
    OpRecord,
    Rows,
    Shard,
    Statistics,
    Step,
    Weight,
    encode,
)
from tracediff.trace.staging import cannot_write, check


class TraceWriter:
    """A context manager; leaving it without an exception writes the `end` record.

    It writes where it is told to, and replaces a trace there at once: write to a `staging.staged` path to keep that
    until the new one is whole. Raises TraceError where something other than a trace is there, and when the files cannot
    be written, a full disk included.
    """

    def __init__(
        self,
        path: Path,
        engine: str,
        arch: str | None = None,
        model: str | None = None,
        weights: str | None = None,
        context: int | None = None,
        rank: tuple[int, int] | None = None,
        rounding: str | None = None,
        ranks: int | None = None,
        rollback: bool = False,
    ) -> None:
        """`rank` is that of the process and how many there are, where several ranks write a trace each; `ranks` how
        many there are where this is one trace of what all of them hold together; `rounding` the coarsest type that
        values are rounded to inside ops; with `rollback` a step at an earlier position drops what was fed from there
        on, as drafts that were rejected.
        """
        self.path = path
        check(path)
        data_path = path.with_suffix(".bin")
        self._lines = 0
        self._offset = 0
        try:
            with ExitStack() as files:
                self._text: BinaryIO = files.enter_context(path.open("wb"))
                self._data: BinaryIO = files.enter_context(data_path.open("wb"))
                which, of = rank or (None, ranks)
                told = (engine, arch, model, data_path.name, weights, context, which, of, rounding, rollback)
                self._line(Header(VERSION, *told))
                self._files = files.pop_all()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    @classmethod
    def like(cls, path: Path, header: Header) -> Self:
        """A trace of the same engine, as it was set up for another."""
        h = header
        return cls(path, h.engine, h.arch, h.model, h.weights, h.context, h.place, h.rounding, h.ranks, h.rollback)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._files:
                if kind is None:
                    self._line(End(self._lines))
        except OSError as failure:
            if kind is None:
                raise cannot_write(self.path, failure) from None

    def weight(self, name: str, values: np.ndarray, dtype: DType = "f32", shard: Shard | None = None) -> None:
        """A weight as the engine holds it; `values` are bits as `trace.format.STORAGE` says."""
        offset = self._append(values, dtype)
        self._line(Weight(weight=name, shape=values.shape, dtype=dtype, offset=offset, shard=shard))

    def step(
        self, step: int, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int] | None = None
    ) -> None:
        """Begin a step, of sequence 0 or of these `sequences`, one for each token."""
        of = {*sequences} if sequences is not None else {0}
        several = tuple(sequences) if sequences is not None and len(of) > 1 else None
        self._line(Step(plain_step(step), tuple(tokens), tuple(positions), 0 if several else of.pop(), several))

    def op(
        self,
        step: int,
        op: str,
        values: np.ndarray,
        dtype: DType,
        rows: Rows = None,
        sequence: int | None = None,
        shard: Shard | None = None,
    ) -> None:
        """An op's output with its data, for all tokens of the step or for those at the indices `rows`.

        With `sequence` all of this is as if the step had the tokens of that sequence alone. A `shard` says which part
        of it a rank holds.
        """
        offset = self._append(values, dtype)
        self._op(step, op, values.shape, rows, sequence, dtype=dtype, offset=offset, shard=shard)

    def op_statistics(
        self,
        step: int,
        op: str,
        shape: tuple[int, ...],
        statistics: Statistics,
        rows: Rows = None,
        sequence: int | None = None,
        sketch: bytes | None = None,
        shard: Shard | None = None,
    ) -> None:
        """An op's output as statistics, and a sketch of it where there is one."""
        self._op(step, op, shape, rows, sequence, sketch=sketch, shard=shard, **asdict(statistics))

    def reserve(self, size: int) -> int:
        """Room for `size` bytes in the data file that come in pieces: the offset where they begin."""
        offset, self._offset = self._offset, self._offset + size
        return offset

    def write_at(self, offset: int, values: np.ndarray) -> None:
        """A piece of reserved data."""
        try:
            self._data.seek(offset)
            self._data.write(np.ascontiguousarray(values).data.cast("B"))
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def op_at(
        self,
        step: int,
        op: str,
        shape: tuple[int, ...],
        dtype: DType,
        offset: int,
        rows: Rows = None,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        """An op whose data was written in pieces; `strides`, in elements, where it is not in C order."""
        self._op(step, op, shape, rows, None, dtype=dtype, offset=offset, strides=strides)

    def _op(self, step: int, op: str, shape: tuple[int, ...], rows: Rows, sequence: int | None, **values: Any) -> None:
        self._line(OpRecord(step=plain_step(step), op=op, shape=shape, rows=rows, sequence=sequence, **values))

    def _append(self, values: np.ndarray, dtype: DType) -> int:
        if values.dtype != STORAGE[dtype]:
            raise ValueError(f"{values.dtype} values given as {dtype}")
        offset = self.reserve(values.nbytes)
        if values.nbytes:
            self.write_at(offset, values)
        return offset

    def _line(self, record: Any) -> None:
        try:
            # Data before the line that announces it: a cut leaves no promise without its bytes.
            self._data.flush()
            self._text.write(encode(record) + b"\n")
            self._text.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None
        self._lines += 1
