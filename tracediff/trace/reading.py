"""The lines of a trace: each is checked against those before it, before anything is believed or allocated."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from tracediff.english import few
from tracediff.errors import TraceError
from tracediff.inputs import open_file
from tracediff.names import StepOf, plain_step
from tracediff.trace.data import DataFile
from tracediff.trace.format import (
    VERSION,
    End,
    Header,
    OpRecord,
    Shard,
    Step,
    Values,
    Weight,
    decode,
    possible,
)
from tracediff.trace.sequences import SequencePart, begun_again, parts_of, rolled_back, split

Record = Header | Weight | Step | OpRecord | End
_FIRST_LINE, _PIECE = 1 << 20, 1 << 14  # bytes of a first line at most, and that are read at once
_FORMAT = "The format is described in docs/trace-format.md."
_COPY = "It must lie beside the trace: copy it there too."
_NO_END = "Close the trace after the last step: a trace without 'end' was cut off."


@dataclass(frozen=True, slots=True)
class Problem:
    """What breaks the format in a line, and what to do. `cut`: before it the trace is whole, and says this of it."""

    line: int
    what: str
    then: str = _FORMAT
    cut: str | None = None


class Reading:
    """The records of a trace, as far as its lines were read. Raises TraceError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as file:
                *self._lines, self._rest = file.readall().split(b"\n")
        except OSError as error:
            raise TraceError(f"{path}: cannot open the trace: {error.strerror}. Check the path.") from None
        first = _header(self._lines[0] if self._lines else self._rest)
        self._no_trace = first if isinstance(first, str) else None
        self.header = Header(VERSION, "") if isinstance(first, str) else first
        self.data = DataFile(path)
        self.weights: dict[str, Weight] = {}
        self.steps: dict[int, Step] = {}
        self.ops: dict[tuple[int, str], OpRecord] = {}
        self.lines: dict[tuple[int, str] | str | int, int] = {}  # of each op, weight and step
        self._last: dict[int, int] = {}  # of each sequence so far the last step's number
        self._parts: list[SequencePart] = []  # of the step begun last
        self._begun: dict[int, None] = {}  # numbers of the steps, as the file has them
        self.begun_again: list[tuple[int, int, int]] = []  # a sequence, the step's key, and what it is from there on

    def problems(self) -> Iterator[Problem]:
        """Add every record that is right; yield what is wrong with the others."""
        if self._no_trace:
            yield Problem(1, self._no_trace)
            return
        missing = self._open_data()
        if missing:
            yield Problem(1, missing, _COPY)
        whole = not self._rest and isinstance(_decoded(self._lines[-1]), End)
        ended = False
        for number, line in enumerate(self._lines[1:], start=2):
            record = _decoded(line)
            if ended:
                yield Problem(number, "a record after the 'end' record")
            elif isinstance(record, End):
                ended = True
                if record.records != number - 1:
                    yield Problem(number, f"'end' counts {record.records} lines, but {number - 1} precede it")
            else:
                yield from self._take(number, record, whole, missing is not None)
        if not ended:
            where = f"in the middle of line {len(self._lines) + 1}" if self._rest else f"after line {len(self._lines)}"
            what = f"it ends {where} without an 'end' record"
            yield Problem(len(self._lines) + bool(self._rest), what, _NO_END, what)
        elif self._rest:
            yield Problem(len(self._lines) + 1, "a record after the 'end' record")

    def _open_data(self) -> str | None:
        """Open the data file. Returns what is wrong with it."""
        name = self.header.data
        if name is not None and (not name or Path(name).name != name or name == ".." or "\0" in name):
            return f"the data file {name!r} is not a bare file name"
        try:
            self.data = DataFile(self.path, name)
        except OSError as error:
            return f"cannot open the data file {name!r}: {error.strerror}"
        return None

    def _take(self, number: int, record: Record | str | None, whole: bool, missing: bool) -> Iterator[Problem]:
        """Add the record of a line if nothing is wrong with it; yield what is."""
        wrong = [record] if isinstance(record, str) else [*self._wrong(record)]
        yield from (Problem(number, what) for what in wrong)
        begins = isinstance(record, Step) and not any(step.step in self.steps for step, _ in parts_of(record))
        if isinstance(record, str) or (wrong and not begins):  # without a step that is wrong all its ops would be too
            return
        if isinstance(record, Values) and (short := self._lacking(record)):
            if not missing:
                then = "Copy the whole of it, or trace again."
                yield Problem(number, short, then, None if whole else f"line {number}: {short}")
            return
        try:
            self._add(number, record)
        except ValueError as error:
            yield Problem(number, str(error))

    def _add(self, number: int, record: Record | None) -> None:
        """Raises ValueError for a record that cannot be split into those of its sequences."""
        match record:
            case Weight():
                self.weights[record.weight] = record
                self.lines[record.weight] = number
            case Step():
                self._parts = parts_of(record)
                self._begun.pop(record.step, None)
                self._begun[record.step] = None
                for step, _ in self._parts:
                    self.steps[step.step] = step
                    self.lines[step.step] = number
                    self._last[step.sequence] = record.step
            case OpRecord():
                for part in split(record, self._parts):
                    if part.rows is not None and len(part.rows) == len(self.steps[part.step].tokens):
                        part = msgspec.structs.replace(part, rows=None)  # all of them
                    self.ops[part.step, part.op] = part
                    self.lines[part.step, part.op] = number

    def settle(self) -> None:
        """Where there are several sequences each step's number says whose it is; of one it is the number alone. One
        that begins again is another from there on.
        """
        self.rolled_back: list[tuple[int, int, int]] = []
        if self.header.rollback:
            self._roll_back()
        self.begun_again = [*begun_again(self.steps)]
        anew, called = {first: again for _, first, again in self.begun_again}, dict[int, int]()
        for at, step in self.steps.items() if anew else ():
            called[step.sequence] = anew.get(at, called.get(step.sequence, step.sequence))
            self.steps[at] = msgspec.structs.replace(step, sequence=called[step.sequence])
        of = {step.sequence for step in self.steps.values()}
        if not any(of):
            return
        named = {
            at: StepOf(plain_step(at), step.sequence) if len(of) > 1 else plain_step(at)
            for at, step in self.steps.items()
        }
        self.steps = {named[at]: msgspec.structs.replace(self.steps[at], step=named[at]) for at in sorted(named)}
        self.ops = {
            (named[step], op): msgspec.structs.replace(record, step=named[step])
            for (step, op), record in self.ops.items()
        }
        self.lines = {
            (named[key[0]], key[1])
            if isinstance(key, tuple)
            else named.get(key, key)
            if isinstance(key, int)
            else key: n
            for key, n in self.lines.items()
        }

    def _roll_back(self) -> None:
        """What follows rejected drafts is another sequence, which names what is kept, and has rows of its own alone."""
        n_kept = dict[int, int]()
        for at, n, step in [*rolled_back(self.steps)]:
            if n:
                self.rolled_back.append((self.steps[at].sequence, at, step.sequence))
            self.steps[at], n_kept[at] = step, n
        for (at, op), record in [*self.ops.items()] if n_kept else ():
            if n := n_kept.get(at, 0):
                own = record.rows or range(len(self.steps[at].tokens) - n)
                self.ops[at, op] = msgspec.structs.replace(record, rows=tuple(n + row for row in own))

    def _wrong(self, record: Record | None) -> Iterator[str]:
        if isinstance(record, Values):
            yield from self._wrong_values(record)
        match record:
            case Header():
                yield "a second 'trace' record"
            case Weight() if record.weight in self.weights:
                yield f"weight {record.weight!r} is recorded twice"
            case Step():
                yield from self._wrong_step(record)
            case OpRecord():
                yield from self._wrong_op(record)

    def _wrong_step(self, record: Step) -> Iterator[str]:
        if len(record.tokens) != len(record.positions) or not record.tokens:
            yield f"step {record.step} has {len(record.tokens)} tokens and {len(record.positions)} positions"
        if record.sequences is not None and len(record.sequences) != len(record.tokens):
            n = len(record.sequences)
            yield f"step {record.step} has {len(record.tokens)} tokens and says the sequences of {n}"
        if (record.sequence or record.sequences) and record.step >= 1 << 32:
            yield f"step {record.step}: of several sequences steps are numbered below 2^32"
        last = max((self._last.get(step.sequence, -1) for step, _ in parts_of(record)), default=-1)
        if record.step <= last:
            yield f"step {record.step} after step {last}: steps must ascend"

    def _wrong_op(self, record: OpRecord) -> Iterator[str]:
        mine = [step for step, _ in self._parts if record.sequence is None or step.sequence == record.sequence]
        if record.step not in self._begun:
            yield f"op {record.op!r} of step {record.step}, which no 'step' record began"
        elif record.step != (last := next(reversed(self._begun))):
            yield f"op {record.op!r} of step {record.step} after step {last} began: out of order"
        elif record.rows is not None:
            yield from _wrong_rows(record, record.rows, sum(len(step.tokens) for step in mine))
        if record.sketch is not None and (len(record.sketch) % 4 or not record.sketch):
            yield f"a sketch of {len(record.sketch)} bytes: it is float32 numbers in base64"
        if any((step.step, record.op) in self.ops for step in mine):
            yield f"op {record.op!r} is recorded twice in step {record.step}"

    def _wrong_values(self, record: Values) -> Iterator[str]:
        if not possible(record.shape):
            yield f"no tensor has the shape {list(record.shape)}"
        if (record.dtype is None) != (record.offset is None):
            yield "'dtype' and 'offset' come together or not at all"
        if not record.has_data and not record.has_statistics and not (record.nan or record.inf):
            yield "neither data (dtype, offset) nor statistics (min, max, mean, rms)"
        if record.has_statistics and not record.size:
            yield f"statistics of the shape {list(record.shape)}, which holds no values"
        if record.has_data and self.header.data is None:
            yield "data is announced, but the first line names no data file"
        if record.strides is not None:
            yield from _wrong_strides(record, record.strides)
        if record.shard is not None:
            yield from _wrong_shard(record, record.shard)
            if self.header.rank is None:
                yield "a shard, but the first line does not say of which of how many ranks the trace is (rank, ranks)"

    def _lacking(self, record: Values) -> str | None:
        """What the data file lacks of the record."""
        if record.offset is None or record.offset + record.nbytes <= self.data.size:
            return None
        return (
            f"the data file {self.header.data!r} is too short: the record needs {record.nbytes:,} bytes "
            f"at {record.offset:,}, the file has {self.data.size:,}"
        )


def header_of(path: Path) -> Header | None:
    """What a file's first line says; None where it is no trace's: what is wrong is said when the trace is opened."""
    try:
        with open_file(path) as file:
            line = file.read(_PIECE)
            while b"\n" not in line and len(line) < _FIRST_LINE and (more := file.read(_PIECE)):
                line += more
            record = decode(line.partition(b"\n")[0])
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return record if isinstance(record, Header) else None


_NO_TRACES = {
    b"GGUF": "it is a GGUF model",
    b"\x1f\x8b": "it is compressed by gzip. Unpack it, and its .bin",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd. Unpack it, and its .bin",
    b"PK\x03\x04": "it is a zip file. Unpack it",
    b"\xef\xbb\xbf": "it begins with a byte order mark. Write UTF-8 without one",
    b"\xff\xfe": "it is UTF-16. Write UTF-8",
    b"\xfe\xff": "it is UTF-16. Write UTF-8",
}
_EXPECTED = {"`$.dtype`": ", which is f64, f32, f16 or bf16", "`$.tokens": ", which are token ids, whole numbers"}


def _header(line: bytes) -> Header | str:
    """The first record, or what is wrong with it."""
    header = _decoded(line) if line.lstrip().startswith(b"{") else None
    if isinstance(header, str):
        return header
    if not isinstance(header, Header):
        for begin, what in _NO_TRACES.items():
            if line.startswith(begin):
                return f"not a trace: {what}"
        found = f"it begins with {line[:8]!r}" if line else "its first line is empty"
        return f'not a trace: {found}, where a trace begins with {{"type":"trace","version":{VERSION},...}}'
    if header.version != VERSION:
        return f"trace version {header.version} is not supported; this is version {VERSION}"
    if header.rank is not None and header.rank >= (header.ranks or 0):
        return f"rank {header.rank} of {header.ranks} ranks: a rank says of how many it is one, and they count from 0"
    return header


def _decoded(line: bytes) -> Record | str | None:
    """The record of a line, or what is wrong with it; None for an unknown type, which the format says to ignore."""
    try:
        return decode(line)
    except msgspec.ValidationError as error:
        if "Invalid value" in str(error) and str(error).endswith("`$.type`"):
            return None
        return str(error) + next((said for place, said in _EXPECTED.items() if place in str(error)), "")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = f"{error}" if line.strip() else "the line is empty"
        is_nan = re.search(rb":\s*-?(nan|inf)", line, re.IGNORECASE)
        return f"not a JSON object on one line: {why}{'; JSON has no NaN or Inf: count them' if is_nan else ''}"


def _wrong_rows(record: OpRecord, rows: tuple[int, ...], n_tokens: int) -> Iterator[str]:
    if not rows or any(b <= a for a, b in pairwise(rows)) or rows[-1] >= n_tokens:
        yield f"'rows' [{few(rows, 8)}]: indices of tokens of the step ascend, below {n_tokens}"
    axis = record.token_axis
    if len(record.shape) <= axis or record.shape[axis] != len(rows):
        yield f"{len(rows)} rows, but axis {axis} of the shape {list(record.shape)} counts the tokens held"


def _wrong_strides(record: Values, strides: tuple[int, ...]) -> Iterator[str]:
    if not record.has_data:
        yield "'strides' place data, but the record has none (dtype, offset)"
    elif len(strides) != len(record.shape):
        yield f"{len(strides)} strides for the shape {list(record.shape)}: one for each axis, in elements"
    elif record.size > record.extent:  # nobody may claim more values than the file can hold
        yield f"strides {list(strides)} place {record.size:,} values in {record.extent:,}: they overlap"


def _wrong_shard(record: Values, shard: Shard) -> Iterator[str]:
    if (shard.axis is None) != shard.sum:
        yield "a 'shard' is along an 'axis', or the term of a 'sum'"
    elif shard.rank >= shard.of:
        yield f"shard {shard.rank} of {shard.of}: they count from 0"
    elif shard.axis is not None and shard.axis >= len(record.shape):
        yield f"a shard along axis {shard.axis} of the shape {list(record.shape)}"
