"""Reads a trace: every line and every byte range is checked before anything is believed or allocated."""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from tracediff.errors import TraceError
from tracediff.trace.format import (
    STORAGE,
    VERSION,
    End,
    Header,
    OpRecord,
    Step,
    Values,
    Weight,
    decode,
    to_float,
)

_MAX_DIMS, _MAX_SIZE = 8, 1 << 48  # of a shape: beyond any engine's, within numpy's
_FORMAT = "The format is described in docs/trace-format.md."
_COPY = "It must lie beside the trace: copy it there too."


class Trace:
    """A trace file, its records read and its data memory-mapped.

    `cut` says where and how a trace without its `end` record breaks off; None for a whole one.
    Raises TraceError, naming file and line, for anything that breaks the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut: str | None = None
        self.weights: dict[str, Weight] = {}
        self.steps: dict[int, Step] = {}
        self.ops: dict[tuple[int, str], OpRecord] = {}
        try:
            self._read(path.read_bytes())
        except OSError as error:
            raise TraceError(f"{path}: cannot open the trace: {error.strerror}. Check the path.") from None

    @property
    def tokens(self) -> list[int]:
        """All tokens fed, in order."""
        return [token for step in self.steps.values() for token in step.tokens]

    def step_ops(self, step: int) -> Iterator[OpRecord]:
        """The op records of one step, in execution order."""
        return (record for (number, _), record in self.ops.items() if number == step)

    def values(self, record: Values) -> np.ndarray:
        """The record's values, shaped; mapped, not read (bfloat16 excepted, which becomes float32)."""
        if record.dtype is None:
            raise TraceError(f"{self.path}: a record has statistics only; its values were not recorded.")
        stored = STORAGE[record.dtype]
        data = self._data[record.offset : (record.offset or 0) + record.nbytes]
        return to_float(data.view(stored).reshape(record.shape), record.dtype)

    def _mapped(self, name: str | None) -> np.ndarray:
        """The data file's bytes."""
        if name is None:
            return np.empty(0, np.uint8)
        if not name or Path(name).name != name or name == ".." or "\0" in name:
            raise self._error(1, f"the data file {name!r} is not a bare file name", _COPY)
        path = self.path.parent / name
        try:
            return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        except OSError as error:
            raise self._error(1, f"cannot open the data file {name!r}: {error.strerror}", _COPY) from None

    def _error(self, line: int, what: str, then: str = _FORMAT) -> TraceError:
        return TraceError(f"{self.path}:{line}: {what}. {then}")

    def _read(self, content: bytes) -> None:
        *lines, rest = content.split(b"\n")
        self.header = self._header(lines[0] if lines else rest)
        self._data = self._mapped(self.header.data)
        ended = False
        for number, line in enumerate(lines[1:], start=2):
            if ended:
                raise self._error(number, "a record after the 'end' record")
            record = self._decode(number, line)
            if isinstance(record, Values):
                self._check_values(number, record)
            if isinstance(record, End):
                ended = True
                if record.records != number - 1:
                    raise self._error(number, f"'end' counts {record.records} lines, but {number - 1} precede it")
            elif isinstance(record, Values) and not self._fits(record):
                if not rest and isinstance(self._decode(len(lines), lines[-1]), End):
                    raise self._error(number, self._short(record), "Copy the whole of it, or trace again.")
                self.cut = f"line {number}: {self._short(record)}"
                return
            else:
                self._add(number, record)
        if not ended:
            where = f"in the middle of line {len(lines) + 1}" if rest else f"after line {len(lines)}"
            self.cut = f"it ends {where} without an 'end' record"
        elif rest:
            raise self._error(len(lines) + 1, "a record after the 'end' record")

    def _header(self, line: bytes) -> Header:
        header = self._decode(1, line) if line.lstrip().startswith(b"{") else None
        if not isinstance(header, Header):
            raise self._error(
                1, f'not a trace: it begins with {line[:8]!r}, not with {{"type":"trace","version":{VERSION},...}}'
            )
        if header.version != VERSION:
            raise self._error(1, f"trace version {header.version} is not supported; this is version {VERSION}")
        return header

    def _decode(self, number: int, line: bytes) -> Header | Weight | Step | OpRecord | End | None:
        """The record of a line; None for a type that is not known, which the format says to ignore."""
        try:
            return decode(line)
        except msgspec.ValidationError as error:
            if "Invalid value" in str(error) and str(error).endswith("`$.type`"):
                return None
            raise self._error(number, f"{error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._error(number, f"not a JSON object on one line: {error}") from None

    def _add(self, number: int, record: Header | Weight | Step | OpRecord | End | None) -> None:
        match record:
            case Header():
                raise self._error(number, "a second 'trace' record")
            case Weight():
                if record.weight in self.weights:
                    raise self._error(number, f"weight {record.weight!r} is recorded twice")
                self.weights[record.weight] = record
            case Step():
                self._add_step(number, record)
            case OpRecord():
                self._add_op(number, record)

    def _add_step(self, number: int, record: Step) -> None:
        if record.sequence:
            raise self._error(number, "several sequences in one trace are not supported; trace them one by one")
        if len(record.tokens) != len(record.positions) or not record.tokens:
            raise self._error(
                number,
                f"step {record.step} has {len(record.tokens)} tokens and {len(record.positions)} positions",
            )
        if self.steps and record.step <= max(self.steps):
            raise self._error(number, f"step {record.step} after step {max(self.steps)}: steps must ascend")
        self.steps[record.step] = record

    def _add_op(self, number: int, record: OpRecord) -> None:
        if record.step not in self.steps:
            raise self._error(number, f"op {record.op!r} of step {record.step}, which no 'step' record began")
        if record.step != max(self.steps):
            raise self._error(
                number,
                f"op {record.op!r} of step {record.step} after step {max(self.steps)} began: out of order",
            )
        if (record.step, record.op) in self.ops:
            raise self._error(number, f"op {record.op!r} is recorded twice in step {record.step}")
        self.ops[record.step, record.op] = record

    def _check_values(self, number: int, record: Values) -> None:
        # Zeros do not count: numpy refuses [0, 2**62, 2**62] too.
        if len(record.shape) > _MAX_DIMS or math.prod(n for n in record.shape if n) > _MAX_SIZE:
            raise self._error(number, f"no tensor has the shape {list(record.shape)}")
        if (record.dtype is None) != (record.offset is None):
            raise self._error(number, "'dtype' and 'offset' come together or not at all")
        if not record.has_data and not record.has_statistics and not (record.nan or record.inf):
            raise self._error(number, "neither data (dtype, offset) nor statistics (min, max, mean, rms)")
        if record.has_statistics and not record.size:
            raise self._error(number, f"statistics of the shape {list(record.shape)}, which holds no values")
        if record.has_data and self.header.data is None:
            raise self._error(number, "data is announced, but the first line names no data file")

    def _fits(self, record: Values) -> bool:
        return record.offset is None or record.offset + record.nbytes <= self._data.size

    def _short(self, record: Values) -> str:
        return (
            f"the data file {self.header.data!r} is too short: the record needs {record.nbytes:,} bytes "
            f"at {record.offset:,}, the file has {self._data.size:,}"
        )
