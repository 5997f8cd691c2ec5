"""What replay leaves of an op: the error in figures, and roundings that went the other way."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.numerics.kinds.linear import columns
from tracediff.numerics.roundings import rounding_named
from tracediff.replay.recompute import Recomputed
from tracediff.result import Worst

# A value within 2^-15 of a boundary is one in 16,000; more rows than this with such an event are no accident.
_MOST_TURNED = 0.5


@dataclass(frozen=True, slots=True)
class Residual:
    """What replay left of a part of an op's output: sums over it, and where the error is largest for its bound."""

    error: float
    signal: float
    noise: float
    excess: float
    worst: Worst
    sharpness: float
    flips: int = 0

    def __add__(self, other: "Residual") -> "Residual":
        larger = other if other.excess > self.excess else self
        return Residual(
            self.error + other.error,
            self.signal + other.signal,
            self.noise + other.noise,
            larger.excess,
            larger.worst,
            min(self.sharpness, other.sharpness),
            max(self.flips, other.flips),  # the same activations turn in every part
        )


def measure(recorded: Tensor, made: Recomputed, hidden: Tensor | None = None) -> Residual:
    """`recorded` against what was made; `hidden` [T, S] marks scores that do not count."""
    exact, bound, noise = made.exact, made.bound(), made.noise
    error = (recorded - exact).abs_()
    squares = _energy(error)
    altered = hidden is not None or not math.isfinite(squares)
    if not math.isfinite(squares):
        # NaN and Inf that the inputs' own make are no mistake of this op. Of a masked key's an engine need make none.
        lost = ~exact.isfinite() if made.not_finite else ~(recorded.isfinite() | exact.isfinite())
        error, exact, bound = error.masked_fill(lost, 0.0), exact.masked_fill(lost, 0.0), bound.masked_fill(lost, 1.0)
        noise = noise.without(lost)
    if hidden is not None:
        error, exact = error.masked_fill(hidden, 0.0), exact.masked_fill(hidden, 0.0)
    bounds_in_largest = float(torch.stack(torch.aminmax(exact / bound)).abs().max())
    excess = torch.div(error, bound, out=bound).flatten()
    at = int(excess.argmax())  # a NaN before all numbers
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), error.shape))
    return Residual(
        error=_energy(error) if altered else squares,
        signal=_energy(exact),
        noise=noise.energy(),
        excess=math.inf if bool(excess[at].isnan()) else float(excess[at]),
        worst=Worst(place, float(exact.flatten()[at]), float(recorded.flatten()[at])),
        sharpness=1 / bounds_in_largest if bounds_in_largest else math.inf,
    )


def _energy(x: Tensor) -> float:
    x = x.flatten()
    return float(x @ x)


def turned(
    op: Op, x: Tensor, recorded: Tensor, made: Recomputed, operands: str, weights: Weights
) -> tuple[Tensor, int] | None:
    """The output of a linear op with activations `x` that lie on a boundary of the rounding `operands` turned where
    that explains the error, and how many were turned. None where too many rows err for such an event, or none does.
    """
    x = x.flatten(1)
    exact, error = made.exact.flatten(1).clone(), (recorded - made.exact).flatten(1)
    rows = torch.nonzero((error.abs() > made.bound().flatten(1)).any(1)).flatten()
    turns = rounding_named(operands).flips(x)
    if not 0 < len(rows) <= _MOST_TURNED * len(x) + 1 or not bool(turns[rows].any()):
        return None
    near = torch.nonzero(turns[rows].any(0)).flatten()
    matrix = columns(op, near, weights)
    count = 0
    for row in rows:
        for i, column in enumerate(near):
            change = float(turns[row, column]) * matrix[:, i]
            # How much of the change is in the error: 1 if this value went the other way, 0 if it did not.
            share = float(error[row] @ change / change.square().sum().clamp(min=1e-300))
            if round(share) == 1:
                exact[row] += change
                error[row] -= change
                count += 1
    return exact.reshape(made.exact.shape), count
