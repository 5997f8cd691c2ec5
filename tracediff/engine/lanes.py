"""Where the tokens of each sequence are in what a torch model computes: of a batch, padded or packed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tracediff.errors import EngineError
from tracediff.numerics.growing import Growing
from tracediff.numerics.kinds.attention import causal


@dataclass(frozen=True)
class Lane:
    """One sequence of a pass: its row and columns in tensors of [rows, columns, ...], the columns of its keys, and the
    positions of both.
    """

    row: int
    columns: Tensor
    keys: Tensor
    positions: Tensor
    key_positions: Tensor

    @cached_property
    def hidden(self) -> Tensor:
        """Which of its scores the mask hides, [T, S]."""
        return causal(self.positions, self.key_positions)


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over `n_rows` rows of `n_columns` tokens, some of them padding, with `n_keys` columns of keys."""

    n_rows: int
    n_columns: int
    n_keys: int
    lanes: Mapping[int, Lane]

    @property
    def n_values(self) -> int:
        """Rows of values, padding included."""
        return self.n_rows * self.n_columns

    def parts(self, values: Tensor) -> dict[int, Tensor]:
        """Of values [n_values, ...] those of each sequence's tokens."""
        if len(self.lanes) == 1 and len(values) == len(next(iter(self.lanes.values())).columns):
            return dict.fromkeys(self.lanes, values)
        by_row = values.reshape(self.n_rows, self.n_columns, *values.shape[1:])
        return {sequence: by_row[lane.row, lane.columns.to(values.device)] for sequence, lane in self.lanes.items()}

    def blocks(self, values: Tensor) -> dict[int, Tensor]:
        """Of scores [n_rows, heads, n_columns, n_keys] those of each sequence's tokens and keys."""
        found = {}
        for sequence, lane in self.lanes.items():
            block, columns, keys = values[lane.row], lane.columns.to(values.device), lane.keys.to(values.device)
            if len(columns) < self.n_columns or len(keys) < self.n_keys:
                block = block[:, columns][..., keys]
            found[sequence] = block
        return found


class Passes:
    """The passes of a model so far: what of each row lies in its cache."""

    def __init__(self) -> None:
        self.n_keys = 0
        self._kept = torch.empty(0, 0, dtype=torch.bool)  # which keys of each row are no padding
        self._positions: dict[int, Growing] = {}

    def next(self, n_columns: int, kept: Tensor, positions: Tensor | None) -> Pass:
        """A pass over tokens of which those `kept` [rows, columns] are no padding; without positions, in the columns'
        order. A row whose positions begin again at 0 is several sequences, packed.
        """
        if not self.n_keys:
            self._kept = kept[:, :0]
        if len(kept) != len(self._kept):
            raise EngineError(
                f"a batch of {len(kept)} sequences after one of {len(self._kept)}. Record each by itself."
            )
        if positions is None:
            positions = torch.arange(self.n_keys, self.n_keys + n_columns)
        positions = positions.expand(len(kept), n_columns)
        before, self.n_keys = self.n_keys, self.n_keys + n_columns
        self._kept = torch.cat((self._kept, kept), 1)
        packed = _packed(positions[0]) if len(kept) == 1 and bool(kept.all()) else []
        if len(packed) > 1 and before:
            raise EngineError("sequences packed in one row, after a pass before. Record the packed pass by itself.")
        lanes = {}
        for sequence, columns in enumerate(packed) if len(packed) > 1 else self._rows(kept):
            row = 0 if len(packed) > 1 else sequence
            at = positions[row, columns]
            _refuse_several(at, before)
            self._positions.setdefault(sequence, Growing()).append(at)
            keys = columns if len(packed) > 1 else self._kept[row].nonzero()[:, 0]
            lanes[sequence] = Lane(row, columns, keys, at, self._positions[sequence].rows)
        return Pass(len(kept), n_columns, self.n_keys, lanes)

    def _rows(self, kept: Tensor) -> Sequence[tuple[int, Tensor]]:
        return [(row, of.nonzero()[:, 0]) for row, of in enumerate(kept) if bool(of.any())]


def _refuse_several(positions: Tensor, before: int) -> None:
    """Raises EngineError for positions of a row that are not those of one sequence, which has `before` so many columns
    already. (Of a single token any may be a mistake.)
    """
    if len(positions) == 1:
        return
    if before and not positions[0]:
        raise EngineError(
            "positions begin at 0 again after a pass before. Another sequence: record each by itself, or all with "
            "tracediff.Recorder, which is told of which a token is. The same one: its positions are wrong."
        )
    jumps = (positions.diff() != 1).nonzero()[:, 0].tolist()
    if jumps:
        a, b = positions[jumps[0]], positions[jumps[0] + 1]
        raise EngineError(
            f"position {b} after {a} in one row. Tokens of several sequences: record each by itself, or all with "
            "tracediff.Recorder, which is told of which a token is. Of one: its positions are wrong."
        )


def _packed(positions: Tensor) -> list[Tensor]:
    """The columns of each sequence in a row, which begin where positions do."""
    starts = [column for column, position in enumerate(positions.tolist()) if position == 0]
    if starts[:1] != [0]:
        return []
    return [torch.arange(a, b) for a, b in zip(starts, [*starts[1:], len(positions)], strict=True)]
