"""A part only: the right op but in a region, where it is another."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.regions import Region
from tracediff.diagnose.solve.variant import relayered
from tracediff.model.graph import Op
from tracediff.numerics.evaluate import evaluate, noise
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Energy, Made


def in_region(op: Op, inside: Op, region: Region) -> Op:
    """`op`, but in the region what `inside` makes. `inside` reads what the op does, and may read more."""
    return replace(op, inputs=inside.inputs, past=inside.past, rework=Part(region, op, inside))


@dataclass(frozen=True, slots=True)
class Part:
    """Computes an op that is another in a region: `Op.rework`."""

    region: Region
    outside: Op
    inside: Op

    def carried(self, right: Op, other: Op) -> Self:
        """The same in another layer's op."""
        inside = relayered(self.inside, right, other)
        return replace(self, outside=other, inside=inside or self.inside)

    def compute(self, call: Call) -> Tensor:
        """The output."""
        energy = Energy() if call.energy else None
        n = len(self.outside.inputs)
        y = evaluate(self.outside, call.inputs[:n], call.weights, call.arithmetic, call.energy, call.rounded)
        other = evaluate(self.inside, call.inputs, call.weights, call.arithmetic, energy, call.rounded)
        if call.energy:
            call.energy.inside = energy
        return torch.where(self._mask(y), other, y)

    def noise(self, made: Made) -> Noise:
        """That of either op, each where it was computed."""
        assert made.energy.inside
        n = len(self.outside.inputs)
        rest = made.weights, made.energy, made.arithmetic, made.storage
        outside = noise(self.outside, made.inputs[:n], made.y, *rest)
        inside = noise(self.inside, made.inputs, made.y, made.weights, made.energy.inside, *rest[2:])
        mask = self._mask(made.y)
        sigma, hard = torch.where(mask, inside.sigma, outside.sigma), torch.where(mask, inside.hard, outside.hard)
        return Noise(sigma, hard, alike=max(inside.alike, outside.alike))

    def _mask(self, y: Tensor) -> Tensor:
        return torch.from_numpy(self.region.mask(y.shape)).to(y.device)


def excepting(op: Op, channels: np.ndarray) -> Op:
    """`op`, but in these channels, of which nothing known makes what was recorded: they are as they were."""
    right = replace(op, rework=None)
    past = (*(op.past or (False,) * len(op.inputs)), False)
    views = (*op.views, None) if op.views else ()
    rework = Excepting(right, tuple(map(int, channels)))
    return replace(op, inputs=(*op.inputs, op.name), past=past, views=views, rework=rework)


@dataclass(frozen=True, slots=True)
class Excepting:
    """Computes an op of whose channels some are as recorded: `Op.rework`. Its last input is its own record."""

    right: Op
    channels: tuple[int, ...]

    def carried(self, right: Op, other: Op) -> Self:
        """The same in another layer's op."""
        return replace(self, right=relayered(self.right, right, other) or self.right)

    def compute(self, call: Call) -> Tensor:
        """The output."""
        *inputs, recorded = call.inputs
        y = evaluate(self.right, inputs, call.weights, call.arithmetic, call.energy, call.rounded).clone()
        told = list(self.channels)
        y.view(len(y), -1)[:, told] = recorded.to(y.dtype).reshape(len(y), -1)[:, told]
        return y

    def noise(self, made: Made) -> Noise:
        """That of the op."""
        return noise(self.right, made.inputs[:-1], made.y, made.weights, made.energy, made.arithmetic, made.storage)
