"""Roundings that may go the other way in an engine: those of values that its noise can take across a boundary.

One that does is worth more than all other noise, and what follows rounds differently. A few samples of the noise would
have it for some values and not for others: so in each sample all that may turn have turned. Where none may, as in most
rows of a small model, the floor is that of noise alone.
"""

import math
from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor

from tracediff.numerics.floats import Rounding
from tracediff.numerics.floors import LUCK
from tracediff.numerics.roundings import rounding_named

# Of more than so many of a row that may turn some do, as often as not: then each turns by a part, all by so many.
_AT_MOST = 8
# Of a turn: few of those that may turn do, so an eighth of their energy is expected; with the margin of a segment, 16,
# that is twice what all make together.
_PART = math.sqrt(1 / 8)
# A quotient in float32 is a product of a quotient: good to two units each. Engines multiply in either order.
_QUOTIENT = 2.0**-22
_HALFWAY = 0.49  # of a step: no value is further from a boundary than half of one
_DRIFT = 2.01  # times the reach of a block's largest value, from one side to the other: its scale follows


class Turning:
    """Rounds what an op reads: its inputs as they are, then samples of them, each in the order of the first."""

    def __init__(self) -> None:
        self._exact: list[Tensor] = []  # in the order of the first
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}  # by place in the order

    def exact(self, x: Tensor, name: str) -> Tensor:
        """The inputs as they are."""
        if name != "f64":
            self._exact.append(x)
        return rounding_named(name)(x)

    def sample(self) -> Callable[[Tensor, str], Tensor]:
        """What rounds the next sample."""
        order = count()

        def rounded(x: Tensor, name: str) -> Tensor:
            return x if name == "f64" else self._rounded(next(order), x, name)

        return rounded

    def _rounded(self, at: int, x: Tensor, name: str) -> Tensor:
        if at >= len(self._exact) or self._exact[at].shape != x.shape:  # other experts were chosen
            return rounding_named(name)(x)
        if at not in self._turns:
            self._turns[at] = turns(self._exact[at], x, name)
        here, change = self._turns[at]
        y = rounding_named(name)(x)
        return torch.where((y - here).abs() < change.abs(), here + change, y)


def turns(x: Tensor, sample: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """X rounded, and by which part of a turn a sample changes where noise as large as this one's may turn it; float32.
    `x[0]` is a row.

    A value turns where its rounding differs once all are larger and once all are smaller, by what noise is at most but
    in one op of a million: across a boundary of its own, or of the scale that its block shares.
    """
    rounding, exact = rounding_named(name), x.float()
    here, step = rounding(exact), rounding.step(exact)
    error = (sample - x).nan_to_num_(0.0, 0.0, 0.0).abs_().float()
    by_row = (len(x), x.numel() // max(len(x), 1))
    rows = torch.linalg.vector_norm(error.reshape(by_row), dim=1) / math.sqrt(max(by_row[1], 1))
    tail = math.sqrt(2 * math.log(max(x.numel(), 2) / LUCK))
    reach = torch.maximum(error, beside(rows, x)).mul_(tail)
    if rounding.in_blocks:
        reach.addcmul_(exact.abs(), (beside(rows, x) > 0).float(), value=_QUOTIENT)
    reach = torch.minimum(reach, step * _HALFWAY)
    outwards, drift = torch.copysign(reach, exact), torch.zeros_like(reach)
    if rounding.in_blocks:
        largest, drift = _of_blocks(exact, here, reach, rounding)
        outwards = torch.where(largest, -outwards, outwards)  # what others are divided by
    larger, smaller = rounding(exact + outwards), rounding(exact - outwards)
    turned = (larger - smaller).abs() > drift
    larger, smaller = larger.sub_(here), smaller.sub_(here)
    change = torch.where(turned, torch.where(larger.abs() > smaller.abs(), larger, smaller), 0.0)
    n = (change / step).nan_to_num_(0.0).square_().reshape(by_row).sum(1)
    return here, change.mul_(beside(_PART * torch.sqrt(_AT_MOST / n.clamp(min=_AT_MOST)), x))


def _of_blocks(x: Tensor, here: Tensor, reach: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Which values are the largest of their blocks, and what a scale that follows them moves each by where none turns.

    What has an offset may move by as much as any value of its block does.
    """
    size = x.numel() if rounding.is_whole else rounding.width(x.shape[-1])
    blocks, kept, reaches = (of.reshape(-1, size) for of in (x.abs(), here.abs(), reach))
    most = blocks.amax(-1, keepdim=True)
    largest = blocks == most
    if rounding.has_offset:
        drift = reaches.amax(-1, keepdim=True).expand(blocks.shape)
    else:
        drift = torch.where(largest, reaches, 0.0).amax(-1, keepdim=True) * kept / most.clamp(min=1e-30)
    return largest.reshape(x.shape), drift.reshape(x.shape).mul(_DRIFT)


def beside(rows: Tensor, x: Tensor) -> Tensor:
    """A number for each row, to go with x."""
    return rows.view(-1, *(1,) * (x.ndim - 1))
