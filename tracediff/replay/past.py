"""Values as replay holds them: of one step, and of all steps of a sequence so far, as a KV cache does."""

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from tracediff.model.graph import Op
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.growing import Growing

_ROOM, _CHANGES = 1 << 28, 256  # bytes of pasts, and changes of the graph, that are kept
_LOOK_EVERY = 16


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the trace in float64. Recomputed ones carry samples of what noise would have made of them."""

    exact: Tensor
    samples: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory of it and of its samples."""
        return self.exact.nbytes * (1 + len(self.samples))

    def sample(self, i: int) -> Tensor:
        """Sample `i`; a recorded value has no noise of ours, but what it lost on the way to the file."""
        return self.samples[i % len(self.samples)] if self.samples else self.exact


class Past:
    """A value of all steps so far: the rows of each step are appended once, and what a later step reads is a view.

    The `exact` rows may be shared with others, who append the same.
    """

    def __init__(self, exact: Growing | None = None) -> None:
        self._exact = Growing() if exact is None else exact
        self._samples: list[Growing] = []
        self._ends = [0]  # rows after each step
        self._first_sampled = 0  # steps before the first that has samples

    def __len__(self) -> int:
        """Steps appended."""
        return len(self._ends) - 1

    @property
    def nbytes(self) -> int:
        """Memory of what was appended."""
        return self._exact.nbytes * (1 + len(self._samples))

    def append(self, value: Value) -> None:
        """The next step's rows."""
        if value.samples and not self._samples:
            self._first_sampled = len(self)
            self._samples = [Growing() for _ in value.samples]
            for sample in self._samples if len(self) else ():
                sample.append(self._exact.first(self._ends[-1]))
        if len(self._exact) == self._ends[-1]:
            self._exact.append(value.exact)
        for i, sample in enumerate(self._samples):
            sample.append(value.sample(i))
        self._ends.append(self._ends[-1] + len(value.exact))

    def until(self, n_steps: int) -> Value:
        """The rows of the first `n_steps`, which have been appended."""
        n_rows = self._ends[n_steps]
        samples = self._samples if n_steps > self._first_sampled else []
        return Value(self._exact.first(n_rows), tuple(sample.first(n_rows) for sample in samples))


Pasts = dict[tuple[str, int, Scheme], Past]  # by name of the value, sequence, and arithmetic


class Kept:
    """Pasts by what was changed in the graph: a mistake that explained one step is asked of the next. Of changes that
    were not asked for long they are dropped, when there are too many or they take too much memory.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], tuple[tuple[Op, ...], Pasts]] = {}  # the ops keep their ids from others
        self._asked = 0  # for new ones since they were measured

    def of(self, changes: tuple[Op, ...], n_samples: int) -> Pasts:
        """Those made with so many samples and these very ops in the graph: by name and arithmetic."""
        key = n_samples, *map(id, changes)
        self._asked += key not in self._of
        self._of[key] = self._of.pop(key, (changes, {}))
        if self._asked >= _LOOK_EVERY:  # the pasts grow: to measure all for each of a thousand changes takes longer
            self._asked = 0
            sizes = (sum(past.nbytes for past in pasts.values()) for _, pasts in reversed(self._of.values()))
            fitting = sum(total <= _ROOM for total in accumulate(sizes))
            for old in [*self._of][: -max(1, min(fitting, _CHANGES))]:
                del self._of[old]
        return self._of[key][1]
