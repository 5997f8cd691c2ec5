"""A part only: the right op but in a region, where it is another."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.by_value.regions import Region
from tracediff.diagnose.solve.edit import relayered
from tracediff.model.graph import Op
from tracediff.numerics.evaluate import computed, noise_of
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Energy, Made


def in_region(op: Op, inside: Op, region: Region) -> Op:
    """`op`, but in the region what `inside` makes. `inside` reads what the op does, and may read more."""
    return replace(op, inputs=inside.inputs, past=inside.past, views=inside.views, rework=InRegion(region, op, inside))


@dataclass(frozen=True, slots=True)
class InRegion:
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
        y = computed(self.outside, call, call.inputs[: len(self.outside.inputs)])
        other = computed(self.inside, replace(call, energy=energy))
        if call.energy:
            call.energy.inside, call.energy.each = energy, (y, other)
        return torch.where(self._mask(y), other, y)

    def noise(self, made: Made) -> Noise:
        """That of either op, each where it was computed, and of all that it made: the other half of a rotated pair may
        lie in the region.
        """
        assert made.energy.inside
        y, other = made.energy.each
        outside = noise_of(self.outside, made, made.inputs[: len(self.outside.inputs)], y)
        inside = noise_of(self.inside, replace(made, energy=made.energy.inside), y=other)
        mask = self._mask(made.y)
        sigma, hard = torch.where(mask, inside.sigma, outside.sigma), torch.where(mask, inside.hard, outside.hard)
        return Noise(sigma, hard, alike=max(inside.alike, outside.alike))

    def _mask(self, y: Tensor) -> Tensor:
        return torch.from_numpy(self.region.mask(y.shape)).to(y.device)


def excepting(op: Op, channels: np.ndarray) -> Op:
    """`op`, but in these channels, of which nothing known makes what was recorded: they are as they were."""
    return replace(op.also_reading((op.name, False)), rework=Excepting(tuple(map(int, channels))))


@dataclass(frozen=True, slots=True)
class Excepting:
    """Computes an op of whose channels some are as recorded: `Op.rework`. Its last input is its own record."""

    channels: tuple[int, ...]

    def compute(self, call: Call) -> Tensor:
        """The output."""
        *inputs, recorded = call.inputs
        y = computed(self._right(call.op), call, inputs).clone()
        told = list(self.channels)
        y.view(len(y), -1)[:, told] = recorded.to(y.dtype).reshape(len(y), -1)[:, told]
        return y

    def noise(self, made: Made) -> Noise:
        """That of the op."""
        return noise_of(self._right(made.op), made, made.inputs[:-1])

    def _right(self, op: Op) -> Op:
        return replace(op.reading_only(len(op.inputs) - 1), rework=None)
