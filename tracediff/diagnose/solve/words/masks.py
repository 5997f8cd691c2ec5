"""Which keys a softmax's queries see, found by running its loops."""

import ast
from dataclasses import dataclass

import numpy as np

from tracediff.diagnose.solve.loops.arrays import CannotRunError, Value
from tracediff.diagnose.solve.loops.bound import Bound
from tracediff.diagnose.solve.loops.interpret import Run
from tracediff.diagnose.solve.loops.program import parse

LESS = ast.parse("s < visible", mode="eval").body  # of the right loops


def seen_keys(test: ast.expr, bound: Bound) -> np.ndarray | None:
    """Which keys each query of the softmax sees, bool [H, T, S]."""
    try:
        return _Seen(parse(bound.source), bound.numbers, bound.arrays, 0, test=test).of()
    except CannotRunError:
        return None


@dataclass
class _Seen(Run):
    """Finds out what a comparison comes to where something is first stored."""

    test: ast.expr = LESS
    found: np.ndarray | None = None

    def of(self) -> np.ndarray | None:
        self.stores()
        return self.found

    def _store(self, name: str, at: Value, value: Value) -> None:
        if self.found is None:
            if not {"h", "t", "s"} <= self._names.keys():  # edited before
                raise CannotRunError("no heads, queries or keys")
            shape = [self._names[v].size for v in ("h", "t", "s")]
            seen = np.broadcast_to(self.value(self.test), [*shape, *[1] * (self._rank - 3)])
            self.found = seen.reshape(shape)
