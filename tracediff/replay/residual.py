"""What replay leaves of an op: the error in figures, and roundings that went the other way."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from tracediff.model.graph import Op, Weight
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.floors import LUCK, Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.layout import as_places
from tracediff.numerics.kinds.linear import columns, matrix
from tracediff.numerics.kinds.matmul import rounding_of
from tracediff.numerics.roundings import rounding_named
from tracediff.replay.making import Recomputed
from tracediff.replay.strips import Along, along, joined, nothing
from tracediff.result import Worst

# A value within 2^-15 of a boundary is one in 16,000; more rows than this with such an event are no accident.
_MOST_TURNED = 0.5
# Values whose figures are taken at a time: in float64 256 kB, so that what is made of them stays in the second-level
# cache.
_PIECE = 1 << 15
# Of values between two numbers the lower ones are -0.5 units off, with a deviation of 0.29; the nearest 0 on average,
# 7 deviations of the mean of so many away from this bound. Operands that tensor cores cut off to TF32 leave 0.25 of
# bfloat16's unit at most. (A factor in common that takes off as much does so by what the mantissa is: of 6% of the
# values that are rounded beside it, and more, less than nothing is lacking, or more than a unit.)
_CUT_SAMPLE, _CUT_LEAST, _CUT_BY, _CUT_NEAR, _CUT_ALL = 1 << 12, 32, -0.35, 0.02, 0.98
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Own:
    """Sums of values in units of their own bounds: so every value counts, and not the few massive ones alone.

    Of the errors' squares, and how much of that a multiple of the right values takes, or of a constant.
    """

    squares: float
    along: float
    signal: float
    total: float
    ones: float
    n: int

    def __add__(self, other: "Own") -> "Own":
        return Own(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def left(self) -> float:
        """The share of the squared error that a factor leaves, or an offset, whichever leaves less; all of it where it
        may be chance: of n values that err as they like one number leaves less than a share s of the squares with
        probability s^((n - 1) / 2), and nothing of a single one.
        """
        if not 0 < self.squares < math.inf:
            return 1.0
        factor = self.along**2 / self.signal if self.signal else 0.0
        left = max(1 - max(factor, self.total**2 / self.ones) / self.squares, 0.0)
        return left if left ** ((self.n - 1) / 2) < LUCK else 1.0


@dataclass(frozen=True, slots=True)
class Residual:
    """What replay left of a part of an op's output: sums over it, and where the error is largest for its bound."""

    error: float
    signal: float
    noise: float
    own: Own
    excess: float
    worst: Worst
    sharpness: float
    along: Along  # zeros where nothing exceeds its bound
    cross: float  # the sum of errors times right values
    drift: float  # that of errors
    flips: int = 0
    cut_off: bool = False  # whether values in half precision err towards 0 alone
    as_stored: bool = False  # whether values are to the last bit what storing them makes of the right ones

    def __add__(self, other: "Residual") -> "Residual":
        larger = max(self, other, key=lambda one: (math.isnan(one.excess), one.excess))
        return Residual(
            self.error + other.error,
            self.signal + other.signal,
            self.noise + other.noise,
            self.own + other.own,
            larger.excess,
            larger.worst,
            min(self.sharpness, other.sharpness),
            joined(self.along, other.along),
            self.cross + other.cross,
            self.drift + other.drift,
            max(self.flips, other.flips),  # the same activations turn in every part
            self.cut_off and other.cut_off,
            self.as_stored and other.as_stored,
        )

    @property
    def shaped(self) -> float:
        """The squared error that a factor leaves, or an offset, whichever leaves less: of all values, as that number is
        which takes most of those in units of their bounds, and no less than its share of these.

        One value of 12 that was 128 bounds off left 8e-11 in such units behind an offset, of which it was 2e-6. And
        roundings of what has few bits may be alike: in bfloat16 what was normed before is 1.0003 times too small.
        """
        own = self.own
        if own.left == 1.0 or self.as_stored:
            return self.error
        factor, offset = own.along / own.signal if own.signal else 0.0, own.total / own.ones
        by_factor = self.error - 2 * factor * self.cross + factor**2 * self.signal
        by_offset = self.error - 2 * offset * self.drift + offset**2 * own.n
        return max(self.error * own.left, min(by_factor, by_offset))


def is_cut_off(recorded: Tensor, exact: Tensor, storage: str) -> bool:
    """Whether values in half precision are what the first bits leave, as `bits >> 16` does: they lack up to a unit,
    half of one on average. What is rounded to nearest errs to either side of the right value, or, beside a factor that
    a row has in common, as where 1 / rms is rounded too, of some other one.
    """
    x, y = (of.flatten()[:: max(1, exact.numel() // _CUT_SAMPLE)] for of in (recorded, exact))
    short = (x - y) * y.sign() / rounding_named(storage).step(y)
    short = short[short.isfinite() & (y != 0)]
    within = (short > -1 - _CUT_NEAR) & (short < _CUT_NEAR)
    return len(short) >= _CUT_LEAST and float(short.mean()) < _CUT_BY and float(within.double().mean()) >= _CUT_ALL


def measure(
    recorded: Tensor,
    made: Recomputed,
    hidden: Tensor | None = None,
    supposed: bool = False,
    others: Tensor | None = None,
) -> Residual:
    """`recorded` against what was made; `hidden` [T, S] marks scores that do not count, `others` what is not this
    side's to answer for, of the shape of the values.

    What was made may be `supposed`, by a hypothesis: then it is contradicted where it makes a NaN of a number, and
    nothing speaks for it where there are no numbers, which any NaN in what it reads makes.
    """
    shape = made.exact.shape
    if others is not None:
        hidden = others if hidden is None else hidden | others
    if hidden is not None:
        hidden = hidden.expand(shape).flatten()
    # Once: to flatten what does not lie in one piece copies all of it, and pieces are many.
    made = replace(made, exact=made.exact.flatten(), noise=made.noise.mapped(torch.flatten))
    recorded, exact = recorded.flatten(), made.exact
    noise = made.noise if others is None else made.noise.without(others.flatten())
    pairs = Pairs(recorded, exact, made.bound, noise, hidden)
    residual = pairs.residual()
    if not math.isfinite(residual.error if hidden is None else _energy(recorded - exact)):
        # NaN and Inf that the inputs' own make are no mistake of this op. Of a masked key's NaN an engine need make
        # none; a number where an infinite one is passed on, as of groups that are not chosen, is one.
        # What a mask is filled with, float32's largest number, is infinite in half precision.
        filled = recorded.isinf() & (exact.abs() >= _LARGEST) & (recorded.sign() == exact.sign())
        exact = torch.where(filled, recorded, exact)
        forgiven = made.not_finite and not supposed
        neither = ~(recorded.isfinite() | exact.isfinite())
        lost = exact.isnan() | (neither & (recorded != -exact)) if forgiven else neither
        noise = noise.without(lost | ~exact.isfinite())  # of what is no number there is none
        pairs = replace(pairs, exact=exact, noise=noise, lost=lost)
        residual = pairs.residual()
        if supposed and bool(lost.all()):
            residual = replace(residual, error=math.nan)
    place = tuple(int(i) for i in np.unravel_index(residual.worst.at[0], shape))  # torch's own takes a second
    is_off = not supposed and not residual.excess <= 1
    return replace(
        residual,
        excess=math.inf if math.isnan(residual.excess) else residual.excess,
        worst=replace(residual.worst, at=place),
        along=along(pairs.excess().view(shape)) if is_off else nothing(shape),
    )


@dataclass(frozen=True, slots=True)
class Pairs:
    """Recorded values and what they should be; which do not count, for they are `hidden` or `lost`, be it by their
    noise as well. What is asked of them is asked piece by piece.
    """

    recorded: Tensor
    exact: Tensor
    bound: Callable[[slice], Tensor]
    noise: Noise
    hidden: Tensor | None = None
    lost: Tensor | None = None

    def residual(self) -> Residual:
        """What is left of all of them; `worst` is at a flat place, and nothing is said of where `along` axes."""
        n = self.exact.numel()
        step = n if self.exact.is_cuda else _PIECE
        return reduce(operator.add, (self._piece(slice(at, min(at + step, n))) for at in range(0, n, step)))

    def excess(self) -> Tensor:
        """The errors in units of their bounds, flat."""
        error, _, bound = self._at(slice(0, self.exact.numel()))
        return error.div_(bound).abs_()

    def _at(self, cut: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Errors, exact values and bounds."""
        exact, bound = self.exact[cut], self.bound(cut)
        error = self.recorded[cut] - exact
        for mask in (self.lost, self.hidden):
            if mask is not None:
                error, exact = error.masked_fill_(mask[cut], 0.0), exact.masked_fill(mask[cut], 0.0)
        if self.lost is not None:
            bound = bound.masked_fill_(self.lost[cut], 1.0)
        return error, exact, bound

    def _piece(self, cut: slice) -> Residual:
        error, exact, bound = self._at(cut)
        squares, one = _energy(error), bound.reciprocal_()
        cross, drift = float(error @ exact), float(error.sum())
        excess, right = error.mul_(one), exact * one
        own = Own(_energy(excess), float(excess @ right), _energy(right), float(excess @ one), _energy(one), len(one))
        excess, bounds_in_largest = excess.abs_(), max(map(abs, map(float, right.aminmax())))
        at = int(excess.argmax() if excess.is_cuda else excess.numpy().argmax())  # a NaN before all numbers
        return Residual(
            error=squares,
            signal=_energy(exact),
            noise=self.noise.part(cut).energy(),
            own=own,
            excess=float(excess[at]),
            worst=Worst((cut.start + at,), float(exact[at]), float(self.recorded[cut.start + at])),
            sharpness=1 / bounds_in_largest if bounds_in_largest else math.inf,
            along=(),
            cross=cross,
            drift=drift,
        )


def _energy(x: Tensor) -> float:
    x = x.flatten()
    return float(x @ x)


def turned(
    op: Op,
    inputs: Sequence[Tensor],
    recorded: Tensor,
    made: Recomputed,
    arithmetic: Arithmetic,
    weights: Weights,
    own: Tensor,
) -> tuple[Tensor, int] | None:
    """The output of a linear op, be it of chosen experts, with activations that lie on a boundary of their rounding
    turned where that explains the error, and how many were turned. None where too many rows err for such an event, or
    none does.
    """
    x, matrices, alike = _rows(op, inputs)

    def by_row(of: Tensor) -> Tensor:
        return of.reshape(len(x), -1)

    own, exact = by_row(own).to(made.exact), by_row(made.exact).clone()
    error = by_row(recorded - made.exact) * own
    rows = torch.nonzero((error.abs() > by_row(made.bound())).any(1)).flatten().tolist()
    turns = rounding_named(arithmetic.operands).flips(x)
    n_wrong = len({row // alike for row in rows})
    if not 0 < n_wrong <= _MOST_TURNED * (len(x) // alike) + 1 or not bool(turns[rows].any()):
        return None
    near, held = torch.nonzero(turns[rows].any(0)).flatten(), dict[Weight, Tensor]()
    count = 0
    for row in rows:
        of = matrices[row % len(matrices)]
        if of not in held:
            held[of] = columns(replace(op, weights=(of,)), near, weights, arithmetic)
        mine = turns[row, near].to(exact)
        changes = mine[mine != 0, None] * held[of].T[mine != 0].to(exact)
        went = torch.zeros(len(changes), dtype=torch.bool)
        sizes, again = (changes.square() @ own[row]).clamp(min=1e-300), True
        while again:  # each takes something away, and what is small is seen once those beside it have turned
            again = False
            for i, change in enumerate(changes):
                # How much of the change is in the error: 1 if this value went the other way, 0 if it did not.
                share = float(error[row] @ change / sizes[i])
                if 0.5 < (-share if went[i] else share) < 1.5:  # not of NaN
                    change = -change if went[i] else change
                    exact[row] += change
                    error[row] -= change * own[row]
                    went[i], again = ~went[i], True
        count += int(went.sum())
    return exact.reshape(made.exact.shape), count


def turned_in_table(
    op: Op, inputs: Sequence[Tensor], recorded: Tensor, made: Recomputed, arithmetic: Arithmetic, weights: Weights
) -> tuple[Tensor, int] | None:
    """The rows of a table that the engine quantised by itself, with values that lie on a boundary turned where they are
    what was recorded, and how many were turned. None where none is.
    """
    hold = rounding_of(arithmetic.stored, op.weights[0], weights)
    if not hold.in_blocks:
        return None
    flips = hold.flips(weights.gather(op.weights[0], inputs[0].flatten().long()))
    turns = KINDS[op.kind].function(flips, **op.attrs).reshape(made.exact.shape).to(made.exact)
    others = (recorded - made.exact - turns).abs() < turns.abs() / 2
    return (made.exact + turns * others, int(others.sum())) if bool(others.any()) else None


def _rows(op: Op, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Weight], int]:
    """The rows that a linear op multiplies, [n, n_in], with which matrix each: one for all, or its expert's; and how
    many after one another are the same, a token's for all of its experts.
    """
    x = inputs[0]
    if op.kind == "linear":  # which, mistaken, may read more
        return x.flatten(1), [op.weights[0]], 1
    at, _ = as_places(inputs[1], op.weights[0].shape[0])
    x = x.reshape(len(at), -1, op.weights[0].shape[-1])
    matrices = [matrix(op.weights[0], expert) for expert in at.flatten().tolist()]
    return x.expand(-1, at.shape[1], -1).flatten(0, 1), matrices, at.shape[1] // x.shape[1]
