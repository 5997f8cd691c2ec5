"""Another reading of a weight: some of its numbers are others of the file, or of nobody's."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from tracediff.diagnose.solve.by_value.maps import Map, slices
from tracediff.diagnose.solve.edit import Read
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op
from tracediff.model.weights import values_of


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows `first` to `last` of a weight are read in `tensor` from number `start` on, `step` further on each; without a
    tensor they are 0.
    """

    first: int
    last: int
    tensor: str
    start: int
    step: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads a weight with some rows from elsewhere, or some elements that are others: `Weight.read`. Rows of a
    vector are single numbers.
    """

    rows: tuple[RowRun, ...] = ()
    elements: tuple[tuple[int, int, float], ...] = ()  # row, column, value

    def renamed(self, name: Callable[[str], str]) -> Self:
        """The same of tensors of other names."""
        return replace(self, rows=tuple(replace(run, tensor=name(run.tensor)) for run in self.rows))

    def of_shape(self, own: Sequence[int], other: Sequence[int]) -> Self | None:
        """The same of a weight of another shape: rows that are 0 up to the last are so there. None of others."""
        if tuple(own) == tuple(other):
            return self
        if self.elements or any(run.tensor or run.last != own[0] - 1 or run.first >= other[0] for run in self.rows):
            return None
        return replace(self, rows=tuple(replace(run, last=other[0] - 1) for run in self.rows))

    def __call__(self, file: GGUFFile, info: TensorInfo) -> Tensor:
        """The weight as it is held."""
        n = info.shape[-1] if len(info.shape) > 1 else 1
        values = values_of(file, info).reshape(-1, n).clone()
        for run in self.rows:
            if not run.tensor:
                values[run.first : run.last + 1] = 0
                continue
            other = file.tensors[run.tensor]
            numbers = values_of(file, other).flatten()
            starts = run.start + run.step * torch.arange(run.last - run.first + 1)
            at = starts[:, None] + torch.arange(n)
            inside = (at >= 0) & (at < len(numbers))
            values[run.first : run.last + 1] = torch.where(inside, numbers[at.clamp(0, len(numbers) - 1)], 0.0)
        for row, column, value in self.elements:
            values[row, column] = value
        return values.reshape(info.shape)


@dataclass(frozen=True, slots=True)
class Moved:
    """Reads a vector with its numbers in other places: `Weight.read`."""

    where: Map

    def __call__(self, file: GGUFFile, info: TensorInfo) -> Tensor:
        """The weight as it is held."""
        return slices(values_of(file, info), self.where, 0, ())


def words_of_rows(runs: Iterable[RowRun], op: Op, weight: int = 0) -> str:
    """What rows of a weight are read instead of its own."""
    of = _of_number if len(op.weights[weight].shape) == 1 else _of_run
    return "; ".join(of(run, op, weight) for run in runs)


def _of_number(run: RowRun, op: Op, weight: int) -> str:
    """As in "channels 32 to 63 use elements 0 to 31 of ffn_norm.weight where those of attn_v.bias belong"."""
    one, own = run.first == run.last, op.weights[weight].name
    channels = f"channel {run.first} uses" if one else f"channels {run.first} to {run.last} use"
    belongs = f"that of {Read(own).words(op)} belongs" if one else f"those of {Read(own).words(op)} belong"
    if not run.tensor:
        return f"{channels} 0 where {belongs}"
    last = run.start + run.last - run.first
    elements = f"element {run.start}" if one else f"elements {run.start} to {last}"
    if run.tensor == own:
        belongs = f"{run.first} belongs" if one else f"{run.first} to {run.last} belong"
    return f"{channels} {elements} of {Read(run.tensor).words(op)} where {belongs}"


def _of_run(run: RowRun, op: Op, weight: int) -> str:
    """As in "channels 256 to 767 are computed with rows 0 to 511 of ffn_gate.weight"."""
    if not run.tensor:
        one, channels = run.first == run.last, f"channels {run.first} to {run.last}"
        channels = f"channels from {run.first} on" if run.last == op.weights[weight].shape[0] - 1 else channels
        return f"channel {run.first} has its weights at 0" if one else f"{channels} have their weights at 0"
    n, count = op.weights[weight].shape[-1], run.last - run.first + 1
    tensor = Read(run.tensor).words(op)
    channels = f"channel {run.first} is" if count == 1 else f"channels {run.first} to {run.last} are"
    if run.step == n and run.start % n == 0:
        first = run.start // n
        rows = f"row {first}" if count == 1 else f"rows {first} to {first + count - 1}"
        return f"{channels} computed with {rows} of {tensor}"
    if run.step == n and run.tensor == op.weights[weight].name:
        by = run.start - run.first * n
        return f"{channels} computed with rows that start {abs(by)} values {'late' if by > 0 else 'early'} in {tensor}"
    then = "" if count == 1 else f", each further row {run.step} values on"
    before = f"{-run.start} values before" if run.start < 0 else f"value {run.start} of"
    return f"{channels} computed with weights from {before} {tensor} on{then}"
