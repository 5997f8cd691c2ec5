"""What a trace says of each token given those before it: from its logits, or from log-probabilities alone."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from tracediff.compare.logits import log_softmax
from tracediff.errors import MismatchError
from tracediff.names import TOKEN_LOGPROBS
from tracediff.trace.format import OpRecord, Step, are_logprobs
from tracediff.trace.reader import Trace


@dataclass(frozen=True)
class Told:
    """The log-probabilities that one side gives its tokens. Indices count all tokens from 0: those of a sequence in its
    order, and one sequence after another.

    Raises MismatchError for a trace that holds neither logits nor log-probabilities.
    """

    trace: Trace

    @cached_property
    def tokens(self) -> list[int]:
        """All tokens fed, in order."""
        return [token for step in self._in_order for token in step.tokens]

    @cached_property
    def positions(self) -> list[int]:
        """Those of all tokens."""
        return [position for step in self._in_order for position in step.positions]

    @cached_property
    def places(self) -> np.ndarray:
        """[T]: the index of each token in its own sequence."""
        counts = Counter(step.sequence for step in self._in_order for _ in step.tokens)
        return np.concatenate([np.arange(n) for n in counts.values()])

    @cached_property
    def logprobs(self) -> np.ndarray:
        """[T], float64: NaN where the trace says nothing of a token, as of the first of a sequence.

        Raises MismatchError where the trace tells nothing, or what no log-probabilities are.
        """
        said = np.full(len(self.tokens), np.nan)
        for index in self._rows:
            if index + 1 < len(said) and self.places[index + 1]:
                said[index + 1] = log_softmax(self._finite(index))[self.tokens[index + 1]]
        for step, at in self._begins.items():
            record = self.trace.ops.get((step, TOKEN_LOGPROBS))
            if record is None or not record.has_data:
                continue
            rows = range(record.shape[0]) if record.rows is None else record.rows
            values = self.trace.values(record).reshape(-1).astype(np.float64)
            for row, value in zip(rows, values, strict=True):
                said[at + row] = value
        said[self.places == 0] = np.nan
        if np.isnan(said).all():
            raise MismatchError(
                f"{self.trace.path}: it holds no logits of all tokens (op `output`, with data) and no "
                f"log-probabilities (op `{TOKEN_LOGPROBS}`), or they are NaN. Record the logits of every position, or "
                "import what the engine returned: `tracediff import logprobs`."
            )
        if not are_logprobs(said):
            raise MismatchError(
                f"{self.trace.path}: these are no log-probabilities: they are all 0 or infinite, or above 0 (natural "
                f"logarithms are expected, one a token). Record them again."
            )
        return said

    def has_logits(self, index: int) -> bool:
        """Whether there are logits after the token at this index."""
        return index in self._rows

    def logits(self, index: int) -> np.ndarray:
        """Those after the token at this index, [n_vocab]."""
        record, row = self._rows[index]
        return self.trace.values(record, (row,))[0]

    @cached_property
    def storage(self) -> str:
        """The type of the logits; float32 where there are none."""
        return next((record.dtype or "f32" for record, _ in self._rows.values()), "f32")

    def _finite(self, index: int) -> np.ndarray:
        row = self.logits(index)
        if np.isnan(row).any() or not np.isfinite(row).any():
            raise MismatchError(
                f"{self.trace.path}: the logits after token {index} hold NaN, or nothing finite. `tracediff check` "
                "says which op makes them."
            )
        return row

    @cached_property
    def _in_order(self) -> list[Step]:
        return sorted(self.trace.steps.values(), key=lambda step: step.sequence)  # which keeps the order of steps

    @cached_property
    def _begins(self) -> dict[int, int]:
        ends = accumulate(len(step.tokens) for step in self._in_order)
        return {step.step: end - len(step.tokens) for step, end in zip(self._in_order, ends, strict=True)}

    @cached_property
    def _rows(self) -> dict[int, tuple[OpRecord, int]]:
        """Of each index the record of the logits after it, and the token's row in the step."""
        found = {}
        for step, at in self._begins.items():
            record = self.trace.ops.get((step, "output"))
            if record is None or not record.has_data or len(record.shape) != 2:
                continue
            if record.whole_shape(n := len(self.trace.steps[step].tokens))[0] == n:
                found.update({at + row: (record, row) for row in record.rows or range(n)})
        return found
