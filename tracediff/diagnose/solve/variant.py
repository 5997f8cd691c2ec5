"""A changed op as the solver tries it: its loops, edited, and what the names in them stand for."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.interpret import Array, CannotRunError, Flat, Prepared, Run, Stored, parse
from tracediff.diagnose.solve.loops import Loops, loops_of
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op, Past, Weight
from tracediff.model.weights import Weights, dequantize, raw_rows
from tracediff.names import layer_of, split
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.evaluate import noise
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.kind import Call, Made, one_rounding
from tracediff.numerics.roundings import Rounding, rounding_named

Touches = Literal["values", "places", "both"]  # what is stored, or where and in which order
When = Literal["now", "all", "before"]  # in this step, in all so far, or what a buffer holds from earlier ones
# The op's own record among the arrays: of values that follow from what lies beyond an array nothing else is known.
RECORDED = "recorded"
SOMETHING = 0.731  # beyond arrays, where 0 was assumed
_MOST = 0.5  # of all values: where more cannot be told, nothing is explained
_ROWS = 1 << 19  # numbers of a weight from which only the rows that are needed are read

# numpy and BLAS add up in blocks; engines that add in sequence err more, by the root of the terms in a block.
_IN_SEQUENCE = 8.0

parsed = lru_cache(4096)(parse)


@dataclass(frozen=True, slots=True)
class Read:
    """A value of the trace."""

    name: str
    when: When = "now"

    @property
    def past(self) -> Past:
        """As an op reads it."""
        past: dict[When, Past] = {"now": False, "all": True, "before": "before"}
        return past[self.when]

    def words(self, op: Op) -> str:
        """As an op of some layer says it."""
        here, (layer, local) = layer_of(op.name), split(self.name)
        near = ""
        if here is not None and layer is not None:
            near = {0: "", 1: " of the layer before", -1: " of the layer after"}.get(here - layer, "?")
        name = self.name if layer is None or here is None or near == "?" else f"{local}{near}"
        return f"{name} of the step before" if self.when == "before" else name


SOURCES = {"past": Read("past"), "starts": Read("past", "all")}


@dataclass(frozen=True, slots=True)
class Variant:
    """An op by edited loops; without `words` the loops themselves are put into words.

    `arrays` are names in them that stand for another value of the trace ("before" is what the output's buffer held),
    `weights` those of another tensor, `numbers` are others than the op's; `renamed` are names that stand for others
    throughout.
    """

    words: str
    source: str
    touches: Touches = "values"
    arrays: tuple[tuple[str, Read], ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    weights: tuple[tuple[str, Weight], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def op(self, op: Op, loops: Loops, beyond: bool = False) -> Op:
        """The op so changed; `loops` are its own. `beyond`: some values follow from what lies beyond an array."""
        past = op.past or (False,) * len(op.inputs)
        own = ((RECORDED, Read(op.name)),) if beyond else ()
        other, arrays = dict(self.weights), (*self.arrays, *sources(self.source), *own)
        return replace(
            op,
            inputs=(*op.inputs, *(read.name for _, read in arrays)),
            past=(*past, *(read.past for _, read in arrays)),
            views=(*op.views, *(None for _ in arrays)) if op.views else (),
            weights=tuple(
                _instead(weight, other[name]) if name in other else weight
                for name, weight in zip(loops.weights, op.weights, strict=False)
            ),
            rework=None
            if self.source == loops.source and not self.arrays and not self.numbers
            else Reworked(self.source, len(op.inputs), tuple(name for name, _ in arrays), self.numbers),
        )


def relayered(changed: Op, right: Op, other: Op) -> Op | None:
    """The change from `right` to `changed` made in the same op of another layer; None in ops of another name."""
    (here, name), (there, same) = split(right.name), split(other.name)
    if name != same or here is None or len(right.weights) != len(other.weights):
        return None

    def moved(text: str) -> str:
        return text.replace(f"blk.{here}.", f"blk.{there}.")

    weights = (
        own if weight == before else replace(weight, name=moved(weight.name))
        for weight, before, own in zip(changed.weights, right.weights, other.weights, strict=True)
    )
    carried = getattr(changed.rework, "carried", None)  # of what is done to an op's own value
    return replace(
        changed,
        name=other.name,
        inputs=tuple(map(moved, changed.inputs)),
        weights=tuple(weights),
        attrs=other.attrs,
        rework=carried(right, other) if carried else changed.rework,
    )


def _instead(weight: Weight, other: Weight) -> Weight:
    """`other` in the place of `weight`: with its shape, its numbers one after the other."""
    if other.shape == weight.shape:
        return other
    return replace(weight, read=OtherTensor(other.name))


@dataclass(frozen=True, slots=True)
class OtherTensor:
    """Reads another tensor's numbers, one after the other, as a weight of another shape: `Weight.read`. What it lacks
    is 0.
    """

    name: str

    def __call__(self, file: GGUFFile, info: TensorInfo) -> Tensor:
        """The other tensor's numbers in the shape of `info`."""
        other = file.tensors[self.name]
        values = dequantize(other, raw_rows(file, other)).flatten()
        n = math.prod(info.shape)
        return torch.nn.functional.pad(values[:n], (0, max(0, n - len(values)))).reshape(info.shape)


def sources(source: str) -> list[tuple[str, Read]]:
    """What loops read besides an op's inputs and weights: how many positions were cached before the step."""
    return [(name, read) for name, read in SOURCES.items() if f"{name}[" in source]


@dataclass(frozen=True, slots=True)
class Priced:
    """A hypothesis and what it takes to say it, in bits."""

    variant: Variant
    bits: float
    look: str = "the loops, indices and arithmetic of its kernel"
    fitted: bool = False  # a number in it was


@dataclass(frozen=True, slots=True)
class Reworked:
    """Computes an op by edited loops: `Op.rework`. Inputs from `n_inputs` on stand for the arrays `extra`."""

    source: str
    n_inputs: int
    extra: tuple[str, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()

    def compute(self, call: Call) -> Tensor:
        """The output. What overflows float32 on the way does so here as well."""
        op, inputs = call.op, call.inputs
        bound = bind(self._plain(op), inputs[: self.n_inputs], call.weights, call.arithmetic)
        assert bound
        extra = {name: Flat(flat(x)) for name, x in zip(self.extra, inputs[self.n_inputs :], strict=True)}
        try:
            edited = bound.with_(self.source, extra, dict(self.numbers))
            y, error = edited.measured() if call.energy else (edited.output(), np.zeros(0))
            if RECORDED in extra:
                unknown = edited.unknown(y)
                y.flat[unknown] = extra[RECORDED].values[unknown]
        except CannotRunError:  # in this step: then it explains nothing here
            y = np.full(bound.loops.shape, math.nan)
            error = np.zeros_like(y)
        if call.energy:
            call.energy.measured = torch.from_numpy(error).to(inputs[0].device)
        return torch.from_numpy(y).to(call.weights.dtype).to(inputs[0].device)

    def _plain(self, op: Op) -> Op:
        return replace(
            op,
            inputs=op.inputs[: self.n_inputs],
            past=op.past[: self.n_inputs],
            views=op.views[: self.n_inputs],
            rework=None,
        )

    def noise(self, made: Made) -> Noise:
        """That of the kind where it sums up no products, and what float32 was seen to make."""
        measured = made.energy.measured
        assert measured is not None
        if KINDS[made.op.kind].scheme:
            own = one_rounding(made)
        else:
            known = made.y, made.weights, made.energy, made.arithmetic, made.storage
            own = noise(self._plain(made.op), made.inputs[: self.n_inputs], *known)
        rows = measured.square().mean(-1, keepdim=True).sqrt()
        sigma = _IN_SEQUENCE * (measured + rows)
        return replace(own, sigma=torch.hypot(own.sigma, sigma), hard=own.hard + 4 * made.unit * made.size)


@dataclass(frozen=True, slots=True)
class Bound:
    """Loops with what their names stand for."""

    source: str
    loops: Loops
    numbers: Mapping[str, float]
    arrays: Mapping[str, Array]
    beyond: float = 0.0  # what lies beyond the arrays
    prepared: dict[object, Prepared] = field(default_factory=dict)

    def with_(self, source: str, arrays: Mapping[str, Array], numbers: Mapping[str, float]) -> "Bound":
        """Edited loops with some names standing for something else."""
        return replace(self, source=source, numbers={**self.numbers, **numbers}, arrays={**self.arrays, **arrays})

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
        n = int(np.prod(self.loops.shape))
        before = self.untouched() if "before" in self.arrays else None
        known = parsed(self.source), self.numbers, self.arrays, n
        return Run(*known, dtype, only, before=before, beyond=self.beyond, prepared=self.prepared)

    def places(self, only: Mapping[str, np.ndarray] = MappingProxyType({})) -> list[Stored]:
        """Where something is stored to, and at which values of the loop variables."""
        n = int(np.prod(self.loops.shape))
        return Run(parsed(self.source), self.numbers, self.arrays, n, only=only, places_only=True).stores()

    def untouched(self, dtype: type = np.float64) -> np.ndarray:
        """What the output's buffer held: `before`, or 0."""
        y: np.ndarray = np.zeros(int(np.prod(self.loops.shape)), dtype)
        if (before := self.arrays.get("before")) is not None:
            kept = np.arange(min(y.size, before.size))
            y[kept] = before.take(kept)
        return y

    def output(self, dtype: type = np.float64) -> np.ndarray:
        """The whole output. What nothing is stored to keeps what the buffer held."""
        return self.computed(dtype)[0]

    def computed(self, dtype: type = np.float64) -> tuple[np.ndarray, bool]:
        """The whole output, and whether something was read where an array does not reach."""
        y, beyond = self.untouched(dtype), False
        for only in self._blocks():
            stores, went = self.stored(only, dtype)
            for stored in stores:
                inside = (stored.at >= 0) & (stored.at < y.size)
                y[stored.at[inside]] = stored.values[inside]
            beyond |= went
        return y.reshape(self.loops.shape), beyond

    def unknown(self, y: np.ndarray) -> np.ndarray:
        """Places of values in the output `y` that follow from what lies beyond the arrays; none if these are many."""
        other = replace(self, beyond=SOMETHING).output()
        with np.errstate(invalid="ignore"):
            there = np.flatnonzero((y != other) & ~(np.isnan(y) & np.isnan(other)))
        return there if len(there) <= _MOST * y.size else there[:0]

    def measured(self) -> tuple[np.ndarray, np.ndarray]:
        """The output in float64, and how far float32 is from it. What overflows float32 does so here too."""
        y, single = (self.output(dtype) for dtype in (np.float64, np.float32))
        finite = np.isfinite(single)
        error = np.zeros_like(y)
        error[finite] = np.abs(y[finite] - single[finite])
        return np.where(finite, y, single), np.nan_to_num(error, nan=0.0, posinf=0.0)

    def _blocks(self) -> list[dict[str, np.ndarray]]:
        if self.loops.block is None:
            return [{}]
        name, step = self.loops.block
        n = int(self.loops.shape[-1]) if len(self.loops.shape) == 2 else int(np.prod(self.loops.shape[1:]))
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
    hold = rounding_named(arithmetic.stored)  # caches
    roundings = {
        "linear": (rounding_named(arithmetic.operands),),
        "scores": (rounding_named(arithmetic.operands), hold),
        "weighted_values": (rounding_named(arithmetic.operands), hold),
    }.get(op.kind, ())
    arrays: dict[str, Array] = dict(brought)
    for i, (name, x) in enumerate(zip(loops.inputs, inputs, strict=False)):
        arrays[name] = Flat(flat(roundings[i](x.flatten(1) if op.kind == "linear" else x) if i < len(roundings) else x))
    for name, weight in zip(loops.weights, op.weights, strict=False):
        arrays[name] = Rows(weight, weights, held_as(op, name, arithmetic))
    return Bound(loops.source, loops, loops.numbers, arrays)


def held_as(op: Op, name: str, arithmetic: Arithmetic) -> Rounding:
    """How an engine holds the op's weight of this name: nobody quantises a bias."""
    hold = rounding_named(arithmetic.stored)
    return rounding_named("f64") if op.kind == "linear" and name == "b" and hold.in_blocks else hold


def flat(x: Tensor) -> np.ndarray:
    """A tensor as flat numbers, float64 or integers."""
    return (x.double() if x.is_floating_point() else x).cpu().numpy().ravel()


@dataclass(slots=True)
class Rows:
    """A weight as flat numbers. Of a large matrix only the rows that are needed are read."""

    weight: Weight
    weights: Weights
    hold: Callable[[Tensor], Tensor]
    _whole: np.ndarray | None = None
    _rows: np.ndarray = field(default_factory=lambda: np.zeros(0, int))  # that were read last
    _table: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def size(self) -> int:
        """How many numbers."""
        return int(np.prod(self.weight.shape))

    def take(self, at: np.ndarray) -> np.ndarray:
        """Those at these places."""
        if self.size <= _ROWS or self.weight.read or len(self.weight.shape) < 2:
            if self._whole is None:
                self._whole = flat(self.hold(self.weights.load(self.weight)))
            return self._whole[at]
        width = self.weight.shape[-1]
        rows = at // width
        needed, place = np.unique(rows, return_inverse=True)
        if not np.array_equal(needed, self._rows):  # one hypothesis after the other asks for the same
            ids = torch.from_numpy(needed + self.weight.first)
            self._table = self.hold(self.weights.gather(self.weight, ids)).double().cpu().numpy()
            self._rows = needed
        return self._table[place.reshape(rows.shape), at % width]
