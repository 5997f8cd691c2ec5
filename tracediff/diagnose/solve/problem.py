"""One faulty op with all that is known of it."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tracediff.diagnose.solve.edit import BROUGHT, Edit, Read
from tracediff.diagnose.solve.loops.arrays import Flat
from tracediff.diagnose.solve.loops.bound import Bound, bind, flat, without_loops
from tracediff.diagnose.solve.words.nouns import AXES
from tracediff.model.graph import Graph, Op
from tracediff.model.weights import Weights
from tracediff.names import split
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.replay.look import Known


@dataclass(frozen=True)
class Problem:
    """What an engine made of an op in one step, and what it should have made. All arrays are flat float64.

    `bound` is how far an honest engine may be off in each value. `held(read)` is another value of the trace, None
    where it was not recorded; of earlier steps what a buffer would hold of them, empty in the first.
    """

    op: Op
    graph: Graph
    weights: Weights
    arithmetic: Arithmetic
    loops: Bound
    recorded: np.ndarray
    exact: np.ndarray
    bound: np.ndarray
    held: Callable[[Read], np.ndarray | None]
    names: Sequence[str]  # of all values recorded in this step
    earlier: Sequence[str]  # those computed before: what does not follow from the op, and what was written before
    is_told: bool = False  # what was made of it follows from another record: nobody can look up a value of it

    @property
    def has_loops(self) -> bool:
        """Whether there are any to be edited."""
        return bool(self.loops.own.inputs)

    @cached_property
    def wrong(self) -> np.ndarray:
        """Which values arithmetic does not explain, bool."""
        return ~agree(self.recorded, self.exact, self.bound)

    @cached_property
    def is_lost(self) -> bool:
        """Whether all that is wrong is NaN or Inf: any value that is would explain it, and explain nothing."""
        return not np.isfinite(self.recorded[self.wrong]).any()

    @cached_property
    def near(self) -> np.ndarray:
        """How near a look at a hypothesis must come: its own noise is not yet known. Nearer than the right values are
        where these are wrong, or what changes nothing would pass.
        """
        sizes = np.abs(np.nan_to_num(self.recorded, nan=0.0, posinf=0.0, neginf=0.0))
        width = self.loops.own.shape[-1]
        rows = np.sqrt(np.square(sizes).reshape(-1, width).mean(1)).repeat(width)
        off = np.where(self.wrong, np.abs(self.recorded - self.exact) / 2, np.inf)
        return np.fmin(10 * self.bound + 1e-5 * sizes + 1e-6 * rows, off)

    @cached_property
    def others(self) -> list[Read]:
        """What lies about when the op is computed: the values of this step so far, and what is left of earlier ones."""
        return [*(Read(name) for name in self.earlier), *self._held(Read(name, "before") for name in self.names)]

    @cached_property
    def buffers(self) -> list[Read]:
        """What the output's buffer may have held: the same op's value in earlier steps, or that of the layer before,
        where layers share it.
        """
        layer, local = split(self.op.name)
        found = [Read(self.op.name, "before")]
        if layer is not None:
            last = self.graph.hparams.n_layer - 1
            found.append(Read(f"blk.{layer - 1}.{local}") if layer else Read(f"blk.{last}.{local}", "before"))
        return self._held(dict.fromkeys(found))

    def _held(self, reads: Iterable[Read]) -> list[Read]:
        """Those of which there is something: in the first step no buffer holds any."""
        return [read for read in reads if (held := self.held(read)) is not None and held.size]

    def array(self, name: str) -> np.ndarray:
        """What the loops call so, as the op reads it: in its own axes, flat where these are not known."""
        array = self.loops.arrays[name]
        axes = AXES.get(self.op.kind, {}).get(name, (("value", ""),))
        sizes = [int(self.loops.numbers.get(size, -1)) for _, size in axes]
        n = math.prod(sizes)
        return array.take(np.arange(n if n >= 0 else array.size)).reshape(sizes)

    def operand(self, position: int) -> np.ndarray:
        """An input by its position, flat."""
        return self.array(self.loops.own.inputs[position]).ravel()

    def given(self, edited: Bound) -> "Problem":
        """The same op with edited loops for right ones: what these leave is to be explained."""
        return replace(self, loops=edited, exact=edited.output().ravel())

    def edited(self, edit: Edit, beyond: bool = False) -> Op:
        """The op with an edit of its loops. `beyond`: some values follow from what lies beyond an array."""
        return edit.op(self.op, self.loops.own, beyond)


def posed(
    op: Op,
    graph: Graph,
    weights: Weights,
    known: Known,
    held: Callable[[Read], np.ndarray | None],
    names: Sequence[str],
    before: Collection[str] = (),
) -> Problem:
    """The problem of an op of which so much is known, with `names` of values at hand, those `before` written before."""
    brought = {name: Flat(values) for name, read in BROUGHT.items() if (values := held(read)) is not None}
    loops = bind(op, known.inputs, weights, known.arithmetic, brought)
    loops = loops or without_loops(tuple(known.exact.shape))
    later = graph.after([op.name]) - {*before}
    return Problem(
        op, graph, weights, known.arithmetic, loops, flat(known.recorded), flat(known.exact), flat(known.bound),
        held, names, [name for name in names if name not in later],
    )  # fmt: skip


def agree(a: np.ndarray, b: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Where two arrays are the same to within so much, or NaN or infinite alike."""
    with np.errstate(invalid="ignore"):
        return (np.abs(a - b) <= within) | (a == b) | (np.isnan(a) & np.isnan(b))
