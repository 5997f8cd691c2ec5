"""Ops whose values, or those that they read, lie in other places than they should."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tracediff.model.graph import Op
from tracediff.numerics.evaluate import computed, evaluate, noise_of
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Made


class Rearranged:
    """Computes an op rightly, then puts its values elsewhere: `Op.rework`. Subclasses say where."""

    __slots__ = ()

    def compute(self, call: Call) -> Tensor:
        """The output."""
        return self.moved(computed(replace(call.op, rework=None), call))

    def noise(self, made: Made) -> Noise:
        """That of the right op, moved alike."""
        right = replace(made.op, rework=None)
        y = evaluate(right, made.inputs, made.weights, made.arithmetic)
        own = noise_of(right, made, y=y)
        sigma, hard = (self.moved(part.expand(y.shape)) for part in (own.sigma, own.hard))
        return Noise(sigma, hard + made.stored, alike=own.alike)

    def moved(self, x: Tensor) -> Tensor:
        """An output of the right op, its values where they come to lie."""
        raise NotImplementedError


class Reread:
    """Computes an op rightly of other inputs than its own: `Op.rework`. Subclasses say of which."""

    __slots__ = ()

    def compute(self, call: Call) -> Tensor:
        """The output."""
        return computed(self.right(call.op), call, self.read(call.inputs))

    def noise(self, made: Made) -> Noise:
        """That of the right op."""
        return noise_of(self.right(made.op), made, self.read(made.inputs))

    def right(self, op: Op) -> Op:
        """The op as it should be."""
        return replace(op, rework=None)

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What it reads in the place of these."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SomeHeads(Reread):
    """Of inputs, [tokens, heads, channels], by their positions these heads are read."""

    heads: Mapping[int, Sequence[int]]

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs, those with these heads alone."""
        return [x[:, list(self.heads[i])] if i in self.heads else x for i, x in enumerate(inputs)]
