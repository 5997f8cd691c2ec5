"""Foreign entries written to a trace, one array in memory at a time."""

import hashlib
from typing import TYPE_CHECKING, cast

import numpy as np

from tracediff.english import few
from tracediff.errors import InterchangeError
from tracediff.interchange.border import checked, is_rotated_by, pair_neighbours, rows, shape_of
from tracediff.interchange.entry import Array, Entry, Say, Summary, some
from tracediff.interchange.steps import Fed, Named, by_step, integers
from tracediff.names import sequence_of
from tracediff.trace.format import DType
from tracediff.trace.writer import TraceWriter

if TYPE_CHECKING:
    from tracediff.model.graph import Graph


def write(
    writer: TraceWriter, weights: list[Entry], ops: list[Named], steps: dict[int, Fed], graph: "Graph | None", say: Say
) -> int:
    """Write weights, then the ops of each step, which come sorted; how many records. Raises InterchangeError."""
    n_weights = 0
    for entry in weights:
        loaded = entry.load()
        if isinstance(loaded, Array):
            writer.weight(entry.name.partition("/")[2], checked(entry.name, loaded), cast(DType, loaded.dtype))
            n_weights += 1
        else:
            say(f"left out {entry.name}: of weights the values are needed, not statistics")
    step, of_step = _Step(writer, graph, say), by_step(ops)
    for number, (tokens, positions) in steps.items():
        writer.step(number, tokens, positions, (sequence_of(number),) * len(tokens))
        step.begin(number, len(tokens), positions[0])
        for named in of_step[number]:
            step.add(named)
        step.end()
    if step.again:
        say(f"written once, {len(step.again)} with equal bits under two names: {some(step.again)}")
    return n_weights + step.n_ops


class _Step:
    """Writes one step's ops."""

    def __init__(self, writer: TraceWriter, graph: "Graph | None", say: Say) -> None:
        self._writer, self._graph, self._say = writer, graph, say
        self.n_ops = 0
        self.again: list[str] = []  # names of values that were written under another
        self._told = False

    def begin(self, step: int, n_tokens: int, n_past: int) -> None:
        """A step of `n_tokens` after `n_past` positions."""
        self._step, self._n_tokens, self._n_past = step, n_tokens, n_past
        self._last: tuple[str, str, object] | None = None
        self._uneven: list[str] = []
        self._written = 0

    def add(self, named: Named) -> None:
        """Write one op; the same values under a second name are said, other values are an error."""
        loaded = named.entry.load()
        mark = _mark(loaded)
        if self._last and self._last[0] == named.op:
            if self._last[2] != mark:
                raise InterchangeError(
                    f"{self._last[1]} and {named.entry.name} are both {named.op} in step {self._step}, and differ. "
                    "Leave one out, or name it with --map FILE."
                )
            self.again.append(f"{named.entry.name} is {self._last[1]}")
            return
        self._last = named.op, named.entry.name, mark
        held = self._held(named)
        n_rows = self._n_tokens if held is None else len(held)
        if isinstance(loaded, Summary):
            shape = self._summary(named, loaded)
        else:
            shape = self._array(named, loaded, n_rows, held)
        self._written += 1
        if rows(named.op, shape) != n_rows:
            self._uneven.append(f"{named.op} {list(shape)}")

    def end(self) -> None:
        """Check that the step's tokens are the values' tokens."""
        self.n_ops += self._written
        if self._uneven and len(self._uneven) == self._written:
            raise InterchangeError(
                f"step {self._step} has {self._n_tokens} tokens, and nothing in it has so many rows: "
                f"{self._uneven[0]}, ... Give the tokens that were fed."
            )
        if self._uneven:
            self._say(
                f"step {self._step} has {self._n_tokens} tokens, but not so many rows in {len(self._uneven)} records: "
                f"{few(self._uneven, 8)}"
            )

    def _held(self, named: Named) -> tuple[int, ...] | None:
        """Which of the step's tokens the value is of; None for all of them."""
        if named.rows is None:
            return None
        held = integers(named.rows)
        if held != sorted({*held}) or held[-1] >= self._n_tokens:
            raise InterchangeError(
                f"{named.rows.name}: {held[:8]} are not indices of tokens of a step of {self._n_tokens}, each larger "
                "than the one before. Correct them."
            )
        return tuple(held)

    def _array(self, named: Named, loaded: Array, n_rows: int, held: tuple[int, ...] | None) -> tuple[int, ...]:
        values = checked(named.entry.name, loaded)
        values = values.reshape(shape_of(named.op, values.shape, n_rows))
        if is_rotated_by(named.op, named.whose):
            values = self._as_in_the_file(named.op, values)
        self._writer.op(self._step, named.op, values, cast(DType, loaded.dtype), held)
        return values.shape

    def _as_in_the_file(self, op: str, values: np.ndarray) -> np.ndarray:
        if self._graph is None and not self._told:
            self._say(
                "Q and K stand in Hugging Face's channel order. GGUF files of the architecture llama have another: "
                "give --model FILE.gguf, and they are put in it"
            )
        if self._graph is not None and self._graph.hparams.rope.pairing == "neighbours":
            if not self._told:
                self._say("Q and K were put in the channel order of the GGUF file, which pairs neighbours in rope")
            values = pair_neighbours(op, values, self._graph.hparams.head_dim)
        self._told = True
        return values

    def _summary(self, named: Named, loaded: Summary) -> tuple[int, ...]:
        shape = loaded.shape
        if shape is None and self._graph and named.op in self._graph:
            shape = self._graph[named.op].shape(self._n_tokens, self._n_past)
        if shape is None:
            raise InterchangeError(
                f"{named.entry.name} ({named.op}): its shape is not known. Add a column `shape`, such as 3x896, or "
                "give --model FILE.gguf."
            )
        shape = shape_of(named.op, shape, self._n_tokens)
        if 0 in shape:
            raise InterchangeError(
                f"{named.entry.name}: a tensor of shape {list(shape)} has no statistics. Correct it."
            )
        self._writer.op_statistics(self._step, named.op, shape, loaded.statistics)
        return shape


def _mark(loaded: Array | Summary) -> object:
    """Equal for equal contents."""
    if isinstance(loaded, Summary):
        return loaded
    return loaded.dtype, hashlib.blake2b(np.ascontiguousarray(loaded.values).reshape(-1).view(np.uint8).data).digest()
