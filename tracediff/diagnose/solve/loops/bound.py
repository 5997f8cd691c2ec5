"""An op's loops with what the names in them stand for: run in part, in whole, and with what lies beyond arrays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.loops.arrays import Array, Flat, Prepared, Stored, is_dense
from tracediff.diagnose.solve.loops.interpret import Run
from tracediff.diagnose.solve.loops.kernels import loops_of
from tracediff.diagnose.solve.loops.loops import Loops
from tracediff.diagnose.solve.loops.program import parse
from tracediff.model.graph import Op, Weight
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.exponentials import exponential_named, exponential_of
from tracediff.numerics.floats import Rounding
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.matmul import rounding_of
from tracediff.numerics.roundings import rounding_named

SOMETHING = 0.731  # beyond arrays, where 0 was assumed
_MOST = 0.5  # of the values that are stored: where more cannot be told, nothing is explained
_CACHED = ("scores", "weighted_values")  # kinds whose second input is what a cache holds
_ROWS = 1 << 19  # numbers of a weight from which only the rows that are needed are read


@dataclass(frozen=True, slots=True)
class Bound:
    """Loops with what their names stand for. What stands for an input is rounded as the op rounds that."""

    source: str
    own: Loops  # the op's, unedited
    numbers: Mapping[str, float]
    arrays: Mapping[str, Array]
    beyond: float = 0.0  # what lies beyond the arrays
    prepared: dict[object, Prepared] = field(default_factory=dict)
    roundings: Mapping[str, Rounding] = field(default_factory=dict)  # of inputs
    exponential: str = ""

    def with_(self, source: str, arrays: Mapping[str, Array], numbers: Mapping[str, float]) -> "Bound":
        """Edited loops with some names standing for something else."""
        rounded = {name: self.rounded(name, array) for name, array in arrays.items()}
        return replace(self, source=source, numbers={**self.numbers, **numbers}, arrays={**self.arrays, **rounded})

    def rounded(self, name: str, array: Array) -> Array:
        """Another value as the op would round it in the place of this input."""
        rounding = self.roundings.get(name)
        if rounding is None or not isinstance(array, Flat) or array.values.dtype.kind != "f":
            return array
        if array.size % rounding.block:
            return array
        rows = torch.from_numpy(array.values).reshape(-1, rounding.block)
        return Flat(flat(rounding(rows)).reshape(array.values.shape))

    def stored(self, only: Mapping[str, np.ndarray], dtype: type = np.float64) -> tuple[list[Stored], bool]:
        """What is stored to the output in a part of the loops, and whether something was read where an array does not
        reach; raises CannotRunError.
        """
        run = self._run(only, dtype)
        return run.stores(), run.went_beyond

    def statements(self, only: Mapping[str, np.ndarray]) -> list[Stored]:
        """What each statement stores to the output in a part of the loops; raises CannotRunError."""
        return self._run(only, np.float64).statements()

    def _run(self, only: Mapping[str, np.ndarray], dtype: type) -> Run:
        program = parse(self.source)
        in_place = program.reads_output and "before" in self.arrays
        in_blocks = [self.own.block[0]] if self.own.block and len(self._blocks()) > 1 else []
        only = {name: turns for name, turns in only.items() if name in in_blocks or name not in program.carrying}
        before = self.untouched(np.arange(self._n)) if in_place else None
        return Run(
            program,
            self.numbers,
            self.arrays,
            self._n,
            dtype,
            only,
            before=before,
            beyond=self.beyond,
            prepared=self.prepared,
            exp=partial(exponential_of, exponential_named(self.exponential)) if self.exponential else np.exp,
        )

    def places(self, only: Mapping[str, np.ndarray] = MappingProxyType({})) -> list[Stored]:
        """Where something is stored to, and at which values of the loop variables."""
        return Run(parse(self.source), self.numbers, self.arrays, self._n, only=only, places_only=True).stores()

    @property
    def _n(self) -> int:
        """Values of the output."""
        return math.prod(self.own.shape)

    def untouched(self, at: np.ndarray, dtype: type = np.float64) -> np.ndarray:
        """What the output's buffer held at these places: `before`, or 0."""
        y: np.ndarray = np.zeros(len(at), dtype)
        if (before := self.arrays.get("before")) is not None:
            inside = at < before.size
            y[inside] = before.take(at[inside])
        return y

    def output(self, dtype: type = np.float64) -> np.ndarray:
        """The whole output. What nothing is stored to keeps what the buffer held."""
        return self.computed(dtype)[0]

    def computed(self, dtype: type = np.float64) -> tuple[np.ndarray, bool]:
        """The whole output, and whether something was read where an array does not reach."""
        y, beyond = self.untouched(np.arange(self._n), dtype), False
        for only in self._blocks():
            stores, went = self.stored(only, dtype)
            for stored in stores:
                inside = (stored.at >= 0) & (stored.at < y.size)
                y[stored.at[inside]] = stored.values[inside]
            beyond |= went
        return y.reshape(self.own.shape), beyond

    def stored_places(self) -> np.ndarray:
        """Places of the output that something is stored to, each once."""
        at = np.concatenate([np.zeros(0, int), *(stored.at for stored in self.places())])
        return np.unique(at[(at >= 0) & (at < self._n)])

    def unknown(self, y: np.ndarray) -> np.ndarray:
        """Places of values in the output `y` that follow from what lies beyond the arrays; none if these are many of
        those that are stored: what was there before tells nothing of the loops.
        """
        there = self.from_beyond(y)
        return there if len(there) <= _MOST * len(self.stored_places()) else there[:0]

    def from_beyond(self, y: np.ndarray) -> np.ndarray:
        """Places of values in the output `y` that are others where something else lies beyond the arrays."""
        other = replace(self, beyond=SOMETHING).output()
        with np.errstate(invalid="ignore"):
            return np.flatnonzero((y != other) & ~(np.isnan(y) & np.isnan(other)))

    def measured(self) -> tuple[np.ndarray, np.ndarray]:
        """The output in float64, and how far float32 is from it. What overflows float32 does so here too."""
        y, single = (self.output(dtype) for dtype in (np.float64, np.float32))
        with np.errstate(invalid="ignore"):
            error = np.nan_to_num(np.abs(y - single), copy=False, nan=0.0, posinf=0.0)
        finite = np.isfinite(single)
        return y if finite.all() else np.where(finite, y, single), error

    def _blocks(self) -> list[dict[str, np.ndarray]]:
        if self.own.block is None:
            return [{}]
        name, step = self.own.block
        n = math.prod(self.own.shape[1:])
        return [{name: np.arange(at, at + step)} for at in range(0, n + 1, step)] if n > step else [{}]


def bind(
    op: Op,
    inputs: Sequence[Tensor],
    weights: Weights,
    arithmetic: Arithmetic,
    brought: Mapping[str, Array] = MappingProxyType({}),
) -> Bound | None:
    """The op's loops on these inputs, rounded as the arithmetic says, and on what else they read; None where no loops
    are written for it.
    """
    loops = loops_of(op, [tuple(x.shape) for x in inputs])
    if loops is None:
        return None
    operands, hold = rounding_named(arithmetic.operands), rounding_named(arithmetic.stored)
    is_rounded = op.kind == "add" or KINDS[op.kind].scheme == "linear"
    roundings = (operands, hold) if op.kind in _CACHED else (operands,) * is_rounded
    of_inputs = dict(zip(loops.inputs, roundings, strict=False))
    # A row that shares a scale is as long as the input's, which another value's is not; nor is all of a tensor.
    again = {name: rounding for name, rounding in of_inputs.items() if rounding.name != "f64" and rounding.block > 0}
    arrays: dict[str, Array] = dict(brought)
    for i, (name, x) in enumerate(zip(loops.inputs, inputs, strict=False)):
        if name == "ids":  # recorded as numbers like any others
            x = x.double().nan_to_num(-1).long()
        arrays[name] = Flat(flat(roundings[i](x.flatten(1) if op.kind == "linear" else x) if i < len(roundings) else x))
    for name, weight in zip(loops.weights, op.weights, strict=False):
        arrays[name] = FlatWeight(weight, weights, held_as(op, name, arithmetic, weight, weights))
    return Bound(loops.source, loops, loops.numbers, arrays, roundings=again, exponential=arithmetic.exponential)


def without_loops(shape: tuple[int, ...]) -> Bound:
    """Of an op for which none are written: of its values alone something can be said."""
    none = Loops("pass", (), (), {}, shape)
    return Bound(none.source, none, {}, {})


def held_as(op: Op, name: str, arithmetic: Arithmetic, weight: Weight, weights: Weights) -> Rounding:
    """How an engine holds the op's weight of this name, were it that one."""
    if op.kind in ("linear", "linear_id") and name == "b":
        return rounding_named(arithmetic.biases)
    return rounding_of(arithmetic.stored, weight, weights)


def flat(x: Tensor) -> np.ndarray:
    """A tensor as flat numbers, float64 or integers."""
    return (x.double() if x.is_floating_point() else x).cpu().numpy().ravel()


@dataclass(slots=True)
class FlatWeight:
    """A weight as flat numbers, in the dtype of `weights`. Of a large matrix only the rows that are needed are read."""

    weight: Weight
    weights: Weights
    hold: Rounding
    _whole: np.ndarray | None = None
    _rows: np.ndarray = field(default_factory=lambda: np.zeros(0, int))  # that were read last
    _table: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def size(self) -> int:
        """How many numbers."""
        return int(np.prod(self.weight.shape))

    def take(self, at: np.ndarray) -> np.ndarray:
        """Those at these places."""
        if self._is_read_whole:
            return self._all[at]
        low, high = int(at.min()), int(at.max()) + 1
        if is_dense(low, high, at.size):
            return self.between(low, high)[at - low]
        width = self.weight.shape[-1]
        rows = at // width
        needed, place = np.unique(rows, return_inverse=True)
        return self._of(needed)[place.reshape(rows.shape), at % width]

    def between(self, low: int, high: int) -> np.ndarray:
        """Those from one place to before another."""
        if self._is_read_whole:
            return self._all[low:high]
        width = self.weight.shape[-1]
        first = low // width
        rows = self._of(np.arange(first, (high - 1) // width + 1))
        return rows.ravel()[low - first * width : high - first * width]

    @property
    def _is_read_whole(self) -> bool:
        together = self.hold.n_rows > 1  # rows are rounded
        return self.size <= _ROWS or together or self.weight.read is not None or len(self.weight.shape) < 2

    @property
    def _all(self) -> np.ndarray:
        if self._whole is None:
            self._whole = self.hold(self.weights.load(self.weight)).cpu().numpy().ravel()
        return self._whole

    @property
    def _matrix(self) -> Weight:
        """The weight; the matrices of several experts as one, below each other."""
        *stacked, n_rows, width = self.weight.shape
        n = math.prod(stacked) * n_rows
        return replace(self.weight, shape=(n, width), first=self.weight.first * n // self.weight.shape[0])

    def _of(self, rows: np.ndarray) -> np.ndarray:
        if not np.array_equal(rows, self._rows):  # one hypothesis after the other asks for the same
            first, end = int(rows[0]), int(rows[-1]) + 1
            if end - first == len(rows):
                table = self.weights.rows(self._matrix, first, end)
            else:
                table = self.weights.gather(self._matrix, torch.from_numpy(rows))
            self._table = self.hold(table.to(self.weights.dtype)).cpu().numpy()
            self._rows = rows
        return self._table
