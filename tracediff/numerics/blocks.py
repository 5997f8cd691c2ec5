"""Blocks of numbers that share a scale: those of ggml, and of shorter floats.

Roundings to them work on the last axis, and return the values that they stand for in the dtype of the input.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tracediff.numerics.floats import Rounding, last_place

# A quotient is a float32 product of at most 255, good to a few times 2^-17; implementations multiply in another order,
# so within that of a boundary it may go either way.
NEAR = 2.0**-15
WHOLE = -1  # the size of a block that is all of a tensor


@dataclass(frozen=True, slots=True)
class Blocks(Rounding):
    """Blocks of integers that share a scale; `block` 0 is a whole row. Subclasses say where the grid lies.

    Blocks are `n_rows` high, those at the end of a matrix as many as there are. The values were held in the type
    `before`, and the scales are kept in that of `scales`. `limits` are the least and the largest value of a whole
    tensor; None: what is rounded is all of it. `turns`: whether implementations may take the other of two values that
    are all but as near; not where they are followed bit for bit, and weights in half precision lie on very many
    boundaries.
    """

    turns: ClassVar[bool] = True

    scales: torch.dtype = torch.float32
    before: torch.dtype = torch.float32
    bits: int = 8
    limits: tuple[float, float] | None = None
    n_rows: int = 1

    def width(self, n: int) -> int:
        """As many as a block is wide."""
        return max(self.block, 0) or n

    @property
    def is_whole(self) -> bool:
        """Whether all of a tensor shares one scale."""
        return self.block == WHOLE

    @property
    def is_coarse(self) -> bool:
        """Of integers of four bits."""
        return self.bits <= 4

    def within(self, least: float, most: float) -> "Blocks":
        """That of a part of a tensor, whose least and largest values these are."""
        return replace(self, limits=(least, most))

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quotients before rounding [..., blocks, n]; scales and what stands for 0 [..., blocks, 1]; all float32."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        """What the integers stand for."""
        quotients, scale, zero = self.grid(x)
        integers = self.whole(quotients).sub_(zero)
        return (integers.to(x.dtype) * scale.to(self.scales).to(x.dtype)).flatten(-2)

    def whole(self, quotients: Tensor) -> Tensor:
        """The nearest integers; of two the even one."""
        return torch.round(quotients)

    def unit(self, quotients: Tensor) -> Tensor:
        """How far apart what is kept of quotients lies there."""
        return quotients.new_ones(1)

    def step(self, x: Tensor) -> Tensor:
        """A unit, times the scale of its block."""
        quotients, scale, _ = self.grid(x)
        return (self.unit(quotients) * scale.abs()).to(x.dtype).expand(quotients.shape).flatten(-2)

    def flips(self, x: Tensor) -> Tensor:
        """A unit up or down where the quotient is all but halfway between two that are kept."""
        if not self.turns:
            return torch.zeros_like(x)
        quotients, scale, _ = self.grid(x)
        past, unit = quotients - self.whole(quotients), self.unit(quotients)  # from -0.5 to 0.5 units
        other = torch.where(past >= 0, unit, -unit).to(x.dtype) * scale.to(self.scales).to(x.dtype)
        near = NEAR * 2.0 ** max(0, self.bits - 8)
        return torch.where(past.abs() > (0.5 - near) * unit, other, 0.0).flatten(-2)

    def of(self, x: Tensor) -> Tensor:
        """X in blocks, float32 [..., blocks, n]."""
        n = max(1, self.width(x.shape[-1]))  # a whole row may be empty: what was cached before the first step
        return x.to(self.before).float().unflatten(-1, (-1, n))

    def edges(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the largest value of each block [..., blocks, n] -> [..., blocks, 1]."""
        if not self.is_whole or not blocks.numel():
            return -self._over_rows(-blocks.amin(-1, keepdim=True)), self._over_rows(blocks.amax(-1, keepdim=True))
        limits = self.limits or (float(blocks.min()), float(blocks.max()))
        least, most = (blocks.new_full((*blocks.shape[:-1], 1), limit).to(self.before).float() for limit in limits)
        return least, most

    def largest(self, blocks: Tensor) -> Tensor:
        """The largest magnitude of each."""
        if not self.is_whole:
            return self._over_rows(blocks.abs().amax(-1, keepdim=True))
        least, most = self.edges(blocks)
        return torch.maximum(-least, most)

    def _over_rows(self, largest: Tensor) -> Tensor:
        """The largest of the rows that share a scale, each row's being given, [..., rows, blocks, 1]."""
        if self.n_rows == 1 or largest.ndim < 3:  # a vector is one row
            return largest
        parts = largest.split(self.n_rows, -3)
        return torch.cat([part.amax(-3, keepdim=True).expand_as(part) for part in parts], -3)


@dataclass(frozen=True, slots=True)
class Q80(Blocks):
    """ggml's q8_0 and q8_1: scale amax / 127, kept in float16; quotient x * (127 / amax), ties to even.

    ggml-cpu/arch/x86/quants.c, bit for bit. (The reference in ggml-quants.c multiplies by 1 / scale and uses roundf.)
    q8_1 has the same values, and their sum besides.
    """

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of 127 on both sides of 0."""
        blocks = self.of(x)
        largest = blocks.abs().amax(-1, keepdim=True)
        return blocks * over(127.0, largest), divided(largest, 127.0), torch.zeros_like(largest)


@dataclass(frozen=True, slots=True)
class StoredQ80(Q80):
    """The same of whoever divides by the scale that is kept: one in float16."""

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of 127 on both sides of 0, or a little more or less."""
        blocks = self.of(x)
        scale = divided(blocks.abs().amax(-1, keepdim=True), 127.0).to(self.scales).float()
        return quotients_of(blocks, scale).clamp_(-128.0, 127.0), scale, torch.zeros_like(scale)


@dataclass(frozen=True, slots=True)
class AcrossHeads(Rounding):
    """Blocks of all of a token's values in a cache [..., heads, D], where a head is no multiple of one: the last may be
    shorter. (llama.cpp refuses such a cache; an engine of one's own cuts the row as it lies.)
    """

    of: Blocks = Q80("q8_0", "q8_0 blocks", 32, torch.float16)

    def divides(self, n: int) -> bool:
        """Heads that are multiples are rounded by themselves."""
        return not self.of.divides(n)

    def __call__(self, x: Tensor) -> Tensor:
        """What the integers stand for."""
        return self._across(self.of, x)

    def step(self, x: Tensor) -> Tensor:
        """A unit, times the scale of its block."""
        return self._across(self.of.step, x)

    def flips(self, x: Tensor) -> Tensor:
        """A unit up or down."""
        return self._across(self.of.flips, x)

    def _across(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        rows = x.flatten(-2)
        n = rows.shape[-1]
        return function(pad(rows, (0, -n % self.of.block)))[..., :n].unflatten(-1, x.shape[-2:])


@dataclass(frozen=True, slots=True)
class Q8K(Blocks):
    """ggml's q8_K: scale -max / 127 for the element of largest magnitude (quantize_row_q8_K_ref, bit for bit). Until
    2024 it was -max / 128, as it is in engines that took it over before (crabml, buf_q8_k.rs).
    """

    least: float = -127.0

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest at the least integer."""
        blocks = self.of(x)
        inverse = over(self.least, blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)))
        return (blocks * inverse).clamp_(max=127.0), over(1.0, inverse), torch.zeros_like(inverse)


@dataclass(frozen=True, slots=True)
class GF4(Blocks):
    """calm's four bits a value: three of an integer from -4 to 3, and one of the e5m2 that eight values share, which is
    the one of largest magnitude; that is stored as -4 (tools/convert.py, `gf4`, bit for bit).
    """

    turns: ClassVar[bool] = False  # where one division is exact to the bit, as in IEEE 754, so is all that follows it

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 0 to 7; 4 stands for 0. The quotient passes through float16."""
        blocks = self.of(x)
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).to(torch.float8_e5m2).float()
        quotients = (quotients_of(blocks, largest).half() * -4 + 4).float()
        return quotients.clamp_(0.0, 7.0), divided(largest, -4.0), torch.full_like(largest, 4.0)


@dataclass(frozen=True, slots=True)
class FP8(Blocks):
    """Scaled E4M3 (https://arxiv.org/abs/2209.05433): scale amax / 448, the quotient to nearest, ties to even."""

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Up to 448 on both sides of 0, three bits of mantissa: not evenly spaced."""
        blocks = self.of(x)
        scale = divided(self.largest(blocks), 448.0)
        return quotients_of(blocks, scale), scale, torch.zeros_like(scale)

    def whole(self, quotients: Tensor) -> Tensor:
        """The nearest of E4M3."""
        return quotients.to(torch.float8_e4m3fn).to(quotients.dtype)

    def unit(self, quotients: Tensor) -> Tensor:
        """A unit in the last place."""
        return last_place(quotients, 3, 2.0**-6)


def over(number: float, x: Tensor) -> Tensor:
    """The quotient number / x, 0 where x is: torch takes number / x as number * (1 / x), one unit off in 25%.

    The largest number where it overflows: blocks below 1e-36 round to 0, and not to NaN.
    """
    largest = torch.finfo(x.dtype).max
    return torch.where(x != 0, torch.full_like(x, number) / x, 0.0).clamp(-largest, largest)


def divided(x: Tensor, number: float) -> Tensor:
    """The quotient x / number: on a GPU torch takes x / number as x * (1 / number), one unit off in 5% (by 127) and
    more.
    """
    return x / torch.full_like(x, number)


def quotients_of(x: Tensor, scale: Tensor) -> Tensor:
    """X / scale, 0 where the scale is."""
    return torch.where(scale != 0, x / scale, 0.0)
