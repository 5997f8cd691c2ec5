"""A trace: what it holds, by step and op, and values when they are asked for."""

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np

from tracediff.errors import TraceError
from tracediff.trace.data import Stored
from tracediff.trace.format import OpRecord, Rows, Values
from tracediff.trace.reading import Problem, Reading

Index = tuple[slice, ...]


class Trace:
    """A trace file, its records read, their data to be read when it is asked for.

    Each of several sequences has steps and records of its own: a step's number, of type StepOf, says whose it is.
    One that begins again is another from there on: `begun_again` has its number, the step's key and the new number. So
    is one behind tokens that were rejected, where the trace says that they are dropped: `rolled_back` has the same.
    `cut` says where and how a trace without its `end` record breaks off; None for a whole one.
    Raises TraceError, naming file and line, for anything that breaks the format.
    """

    cut: str | None
    begun_again: Sequence[tuple[int, int, int]]
    rolled_back: Sequence[tuple[int, int, int]]

    def __init__(self, path: Path) -> None:
        reading, self.cut = Reading(path), None
        for problem in reading.problems():
            if problem.cut is None:
                raise TraceError(f"{path}:{problem.line}: {problem.what}. {problem.then}")
            self.cut = problem.cut
            break
        self._take(reading)

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        """In another process it is opened again, whole."""
        return type(self), (self.path,)

    @classmethod
    def lenient(cls, path: Path) -> tuple[Self, Iterator[Problem]]:
        """What can be read of a trace, and all that breaks the format: there may be one in each of a million lines.

        The records are there when the problems have been gone through. Raises TraceError if it cannot be opened.
        """
        trace, reading = cls.__new__(cls), Reading(path)
        trace.cut, trace.header = None, reading.header
        return trace, trace._read_all(reading)

    @property
    def is_one_of_several(self) -> bool:
        """Whether it holds what one of several ranks computed."""
        return self.header.place is not None and self.header.place[1] > 1

    @property
    def sides(self) -> "list[Trace]":
        """Traces to be judged by themselves: of several ranks those that hold other copies (`trace.ranks`)."""
        return [self]

    @property
    def written(self) -> "list[Trace]":
        """The traces as processes wrote them: of several ranks that of each."""
        return [self]

    def own(self, record: Values) -> Sequence[Index] | None:
        """Which of a record's values this trace answers for: indices that hold them, none or several; None for all."""
        return None

    @property
    def tokens(self) -> list[int]:
        """All tokens fed, in order; of several sequences one after the other."""
        return [token for step in self.steps.values() for token in step.tokens]

    @property
    def sequences(self) -> list[int]:
        """The numbers of the sequences, ascending."""
        return self._sequences

    @property
    def length(self) -> int:
        """For how many positions the engine was set up: what it was fed, or what it says."""
        last = max((position for step in self.steps.values() for position in step.positions), default=-1)
        return max(last + 1, self.header.context or 0)

    def without(self, keys: Container[tuple[int, str]]) -> Self:
        """The trace as if these ops (step, name) had not been recorded."""
        other = copy(self)
        other.ops = {key: record for key, record in self.ops.items() if key not in keys}
        other._index()
        return other

    def step_ops(self, step: int) -> Sequence[OpRecord]:
        """The op records of one step, in execution order; none of a step that the trace lacks."""
        return self._of_step.get(step, ())

    def n_before(self, step: int) -> int:
        """How many tokens of its sequence were fed before the step."""
        return self._n_before[step]

    def positions_until(self, step: int) -> np.ndarray:
        """The positions of all tokens of its sequence fed until the end of the step, int64."""
        of = self.steps[step].sequence
        if of not in self._positions:
            fed = (other.positions for other in self.steps.values() if other.sequence == of)
            self._positions[of] = np.array([*chain.from_iterable(fed)], np.int64)
        return self._positions[of][: self._n_before[step] + len(self.steps[step].tokens)]

    def values(self, record: Values, rows: Rows = None, channels: slice | None = None) -> np.ndarray:
        """The record's values, shaped, in memory of their own; bfloat16 becomes float32.

        With `rows` those of these tokens only, which the record must hold. With `channels`, which go with ops whose
        first axis is the token's, these of each token's values: [T, channels]. Raises TraceError where the data file
        has changed since the trace was opened.
        """
        return self._data.values(record, rows, channels)

    def by_slice(self, record: Values, rows: Rows = None) -> np.ndarray | Stored:
        """What `values` gives; where it lies in C order it is read by the slice."""
        return self._data.by_slice(record, rows)

    def pieces(self, record: Values) -> Iterator[np.ndarray]:
        """All that `values` gives, in pieces that stay in the cache where it can be read so: each until the next."""
        held = self.by_slice(record)
        return (piece for _, piece in held.pieces()) if isinstance(held, Stored) else iter((held,))

    def stored(self, record: Values) -> np.ndarray:
        """The record's values as `format.STORAGE` holds them, shaped."""
        return self._data.stored(record)

    def last_row(self, step: int, op: str) -> np.ndarray | None:
        """The values of the step's last token, of an op whose first axis is the token's; None where not recorded."""
        record = self.ops.get((step, op))
        if record is None:
            return None
        last = (len(self.steps[step].tokens) - 1,)
        if not record.has_data or not record.holds(last) or not record.shape or not record.size:
            return None
        return self.values(record, record.rows[-1:] if record.rows else (record.shape[0] - 1,))[0]

    def _read_all(self, reading: Reading) -> Iterator[Problem]:
        yield from reading.problems()
        self._take(reading)

    def _take(self, reading: Reading) -> None:
        """What was read; `lines` are those of each op (step, name), weight (name) and step in the text file."""
        reading.settle()
        self.path, self.header, self._data = reading.path, reading.header, reading.data
        self.weights, self.steps, self.ops, self.lines = reading.weights, reading.steps, reading.ops, reading.lines
        self.begun_again, self.rolled_back = reading.begun_again, reading.rolled_back
        self._index()

    def _index(self) -> None:
        """By steps and ops, what is asked of each step."""
        self._positions: dict[int, np.ndarray] = {}  # of each sequence
        self._n_before: dict[int, int] = {}
        self._of_step: dict[int, list[OpRecord]] = {number: [] for number in self.steps}
        fed: Counter[int] = Counter()
        for number, step in self.steps.items():
            self._n_before[number] = fed[step.sequence]
            fed[step.sequence] += len(step.tokens)
        self._sequences = sorted(fed)
        for record in self.ops.values():
            self._of_step[record.step].append(record)
