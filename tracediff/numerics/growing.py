"""Rows that come step by step and are read as one tensor: a KV cache."""

import torch
from torch import Tensor


class Growing:
    """Rows appended in place: the room for them doubles when it is full, and what is read is a view."""

    def __init__(self) -> None:
        self._room: Tensor | None = None
        self._n_rows = 0

    def __len__(self) -> int:
        """Rows appended."""
        return self._n_rows

    @property
    def rows(self) -> Tensor:
        """All so far."""
        return self.first(self._n_rows)

    @property
    def nbytes(self) -> int:
        """Memory of the rows and of the room for more."""
        return 0 if self._room is None else self._room.numel() * self._room.element_size()

    @torch.inference_mode()
    def append(self, rows: Tensor) -> None:
        """Add rows, [n, ...]."""
        end = self._n_rows + len(rows)
        if self._room is None or end > len(self._room):
            room = rows.new_empty((max(end, 2 * self._n_rows), *rows.shape[1:]))
            if self._room is not None:
                room[: self._n_rows] = self.rows
            self._room = room
        self._room[self._n_rows : end] = rows
        self._n_rows = end

    def first(self, n: int) -> Tensor:
        """The first `n` rows; before any was appended their shape is not known, and it is `[0]`."""
        assert n <= self._n_rows
        return torch.empty(0) if self._room is None else self._room[:n]
