"""One op of one step, which llama.cpp computes in as many pieces as there are micro-batches."""

import math
from collections.abc import Sequence

import numpy as np

from tracediff.errors import EngineError
from tracediff.trace.format import DType
from tracediff.trace.statistics import Moments
from tracediff.trace.writer import TraceWriter
from tracediff_reference.description import POSITIONS, TOKENS, Read, Size

_OF_SCORES = ("attn_scores", "attn_scores_scaled")


def at(size: Size, n_tokens: int, n_positions: int) -> int:
    """A size of a described graph; raises EngineError for one that follows no rule."""
    if isinstance(size, int):
        return size
    if size is None:
        raise EngineError("a size of llama.cpp's graph follows neither the tokens nor the positions.")
    a, b, c, d, e = size
    return a + n_tokens * (b + d * n_positions + e * n_tokens) + c * n_positions


class Pieces:
    """Writes an op's value, piece by piece, or its statistics when all pieces are there."""

    def __init__(
        self,
        op: str,
        axes: tuple[int | str, ...],
        step: int,
        positions: range,
        statistics: bool,
        sequences: Sequence[int],
    ) -> None:
        """Of several `sequences` these are whose each cell of the cache is so far; `positions` are then cells."""
        sizes = {"T": len(positions), "S": positions.stop}
        self._sequences = np.array(sequences)
        self._op, self._step = op, step
        self._shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in axes)
        self._by_keys = axes[-1] == "S"  # [heads, T, S]
        self._positions = positions
        self._rows = 0  # of T, written so far
        self._moments = Moments() if statistics else None
        self._offset: int | None = None

    def add(self, x: np.ndarray, writer: TraceWriter) -> bool:
        """Write the piece `x`, in ggml's shape (outermost first); true when the op is complete."""
        n_tokens, n_keys = len(self._positions), self._positions.stop
        if self._by_keys:
            # Heads that share keys may come folded into rows; the cache is padded.
            x = x.reshape(self._shape[0], -1, x.shape[-1])[:, :, :n_keys]
            rows = x.shape[1]
        else:
            width = math.prod(self._shape[1:])
            rows = x.size // width
            x = x.reshape(rows, *self._shape[1:])
        first, self._rows = self._rows, self._rows + rows
        if self._rows > n_tokens:
            raise EngineError(f"{self._op} came with {self._rows} rows for {n_tokens} tokens.")
        dtype: DType = "f16" if x.dtype == np.float16 else "f32"
        if self._by_keys and self._sequences.size:
            return self._write_apart(x, dtype, writer)
        if self._moments:
            self._moments.add(self._visible(x, first) if self._op.endswith(_OF_SCORES) else x)
        elif rows == n_tokens:
            writer.op(self._step, self._op, x.reshape(self._shape), dtype)
            return True
        else:
            self._write_piece(x, first, writer)
        if self._rows < n_tokens:
            return False
        if self._moments:
            writer.op_statistics(self._step, self._op, self._shape, self._moments.statistics())
        else:
            writer.op_at(self._step, self._op, self._shape, dtype, self._offset or 0)
        return True

    def _write_apart(self, x: np.ndarray, dtype: DType, writer: TraceWriter) -> bool:
        """The queries of each sequence with the keys of its own cells, which lie among others'."""
        if x.shape[1] < len(self._positions):
            raise EngineError(f"{self._op}: several sequences are told apart in one micro-batch alone: raise --ubatch.")
        queries = self._sequences[self._positions.start : self._positions.stop]
        for sequence in dict.fromkeys(queries.tolist()):
            own = np.ascontiguousarray(x[:, queries == sequence][:, :, self._sequences == sequence])
            writer.op(self._step, self._op, own, dtype, sequence=sequence)
        return True

    def _visible(self, x: np.ndarray, first: int) -> np.ndarray:
        """The scores that the causal mask leaves: of the others a late micro-batch's are never computed."""
        queries = np.arange(first, first + x.shape[1]) + self._positions.start
        return x[:, np.arange(x.shape[2])[None, :] <= queries[:, None]]

    def _write_piece(self, x: np.ndarray, first: int, writer: TraceWriter) -> None:
        row = x.dtype.itemsize * (self._shape[-1] if self._by_keys else math.prod(self._shape[1:]))
        if self._offset is None:
            self._offset = writer.reserve(math.prod(self._shape) * x.dtype.itemsize)
        if not self._by_keys:
            writer.write_at(self._offset + first * row, x)
            return
        n_tokens, n_keys = self._shape[1:]
        padded = np.zeros((x.shape[1], n_keys), x.dtype)
        for head, values in enumerate(x):
            padded[:, : values.shape[1]] = values
            writer.write_at(self._offset + (head * n_tokens + first) * row, padded)


class WholePieces:
    """Of an op whose tokens lie in another way: its pieces are put together in memory.

    Pieces of an axis that is of tokens and more, or of a value that holds several, do not go together: then nothing is
    written, and the op is missing from the trace.
    """

    def __init__(self, op: str, axes: tuple[Size, ...], step: int, positions: range, statistics: bool) -> None:
        self._op, self._axes = op, axes
        self._step, self._positions, self._statistics = step, positions, statistics
        self._pieces: list[np.ndarray] = []
        self._rows = 0

    def add(self, x: np.ndarray, n_tokens: int, writer: TraceWriter) -> bool:
        """Take the piece `x` of so many tokens, in ggml's shape; true when the op is complete."""
        shape = tuple(at(size, n_tokens, self._positions.stop) for size in self._axes)
        self._pieces.append(self._narrowed(x, shape).copy())
        self._rows += n_tokens
        if self._rows < len(self._positions):
            return False
        whole = self._together()
        if whole is not None and self._statistics:
            moments = Moments()
            moments.add(whole)
            writer.op_statistics(self._step, self._op, whole.shape, moments.statistics())
        elif whole is not None:
            writer.op(self._step, self._op, whole, "f16" if whole.dtype == np.float16 else "f32")
        return True

    def _narrowed(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Without the cells of the cache that are not in use, in the op's shape."""
        if x.size == math.prod(shape):
            return x.reshape(shape)
        x = x.reshape(x.shape[-len(shape) :])
        given = list(map(int, x.shape))
        fixed = [i for i, axis in enumerate(self._axes) if axis != POSITIONS]
        if [given[i] for i in fixed] != [shape[i] for i in fixed]:
            raise EngineError(f"{self._op} has the shape {given} in llama.cpp, not the expected {list(shape)}.")
        return x[tuple(slice(size) for size in shape)]

    def _together(self) -> np.ndarray | None:
        follow = [i for i, size in enumerate(self._axes) if not isinstance(size, int) and size != POSITIONS]
        if len(self._pieces) == 1 or not follow:  # a state, a whole cache: the last is what the step leaves
            return self._pieces[-1]
        return np.concatenate(self._pieces, follow[0]) if [self._axes[i] for i in follow] == [TOKENS] else None


def part_of(x: np.ndarray, part: Read, n_tokens: int) -> np.ndarray:
    """Some elements of a value that lies in C order."""
    flat = np.ascontiguousarray(x).reshape(-1)[at(part.offset, n_tokens, 0) :]
    shape = tuple(at(size, n_tokens, 0) for size in part.shape)
    strides = tuple(at(stride, n_tokens, 0) * flat.itemsize for stride in part.strides)
    return np.lib.stride_tricks.as_strided(flat, shape, strides)
