"""At which places loops read an array, or store to the output: no values are computed."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tracediff.diagnose.solve.loops.arrays import Value
from tracediff.diagnose.solve.loops.bound import Bound
from tracediff.diagnose.solve.loops.interpret import Run
from tracediff.diagnose.solve.loops.nodes import INTEGER_ARRAYS
from tracediff.diagnose.solve.loops.program import parse

_EACH = 24  # values of a loop variable that are looked at: its first and its last ones


@dataclass(frozen=True, slots=True)
class Access:
    """One array element of the source: its index, the places that it comes to, and the loop variables there."""

    node: ast.expr
    at: np.ndarray
    loops: Mapping[str, np.ndarray]

    def same(self, other: "Access") -> bool:
        """Whether both come to the same places."""
        return self.at.shape == other.at.shape and bool((self.at == other.at).all())


def accesses(bound: Bound, array: str, stores: bool) -> list[Access]:
    """Where these loops read the array, or store to it, in the order of the source; raises CannotRunError."""
    run = _Places(parse(bound.source), bound.numbers, bound.arrays, 0, wanted=array, of_stores=stores)
    run.stores()
    return run.found


@dataclass
class _Places(Run):
    wanted: str = ""
    of_stores: bool = False
    found: list[Access] = field(default_factory=list)

    def _is_in_turns(self, name: str, node: ast.For) -> bool:
        return False

    def _range(self, name: str, counted: ast.expr, whole: bool) -> tuple[np.ndarray, Value]:
        values, inside = super()._range(name, counted, whole)
        n = values.size
        if n <= _EACH:
            return values, inside
        axis = self.program.axes[name]
        some = np.unique(np.concatenate((np.arange(2 * _EACH // 3), np.arange(n - _EACH // 3, n))))
        return values.take(some, axis), inside if inside is True else inside.take(some, axis)

    def _store(self, name: str, at: Value, value: Value) -> None:
        pass

    def _read(self, name: str, at: Value) -> Value:
        if name in INTEGER_ARRAYS:
            return super()._read(name, at)
        return np.zeros((1,) * self._rank)

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=index) if name == self.wanted and not self.of_stores:
                self._note(index)
        return super().value(node)

    def _block(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=index)]):
                    if name == self.wanted and self.of_stores:
                        self._note(index)
        super()._block(body)

    def _note(self, index: ast.expr) -> None:
        at = np.asarray(super().value(index))
        loops = {v: self._names[v] for v in self.program.axes if isinstance(self._names.get(v), np.ndarray)}
        shape = np.broadcast_shapes(at.shape, *(np.shape(x) for x in loops.values()))
        spread = {v: np.broadcast_to(x, shape).ravel() for v, x in loops.items()}
        self.found.append(Access(index, np.broadcast_to(at, shape).ravel(), spread))
