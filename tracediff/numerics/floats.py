"""Rounding: what a number loses when it is stored, or made an operand of a matmul; to shorter floats."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HALVES = ("f16", "bf16")  # types in which engines keep all of their values


@dataclass(frozen=True, slots=True)
class Rounding:
    """Keeps every value as it is; others say what they keep. `words` is its name in a sentence.

    Rows must be a multiple of `block` values, which share what they are rounded by.
    """

    name: str
    words: str
    block: int = 1

    @property
    def in_blocks(self) -> bool:
        """Whether it keeps integers and a scale: engines add up their products without rounding them."""
        return self.block != 1

    def width(self, n: int) -> int:
        """How many values of a row of n share what they are rounded by."""
        return self.block

    def divides(self, n: int) -> bool:
        """Whether rows of n are multiples of its blocks."""
        return n % self.width(n) == 0

    @property
    def is_whole(self) -> bool:
        """Whether all of a tensor shares one scale."""
        return False

    @property
    def n_rows(self) -> int:
        """How many rows share what they are rounded by, from the first on: of a matrix such parts can be rounded."""
        return 1

    def within(self, least: float, most: float) -> "Rounding":
        """That of a part of a tensor, whose least and largest values these are."""
        return self

    @property
    def has_offset(self) -> bool:
        """Whether the integers are unsigned: engines add up what the offset makes by itself."""
        return False

    @property
    def is_coarse(self) -> bool:
        """Whether four bits at most are kept of a value: of weights so rounded a layer is off by a tenth."""
        return False

    def __call__(self, x: Tensor) -> Tensor:
        """The values that it keeps of x."""
        return x

    def step(self, x: Tensor) -> Tensor:
        """How far apart the values that it keeps lie, at each value of x; 0 at 0 and where it rounds nothing."""
        return torch.zeros_like(x)

    def flips(self, x: Tensor) -> Tensor:
        """What each value would change by if it were rounded to the other side of a boundary that it lies on.

        Zero for values that lie on none.
        """
        return torch.zeros_like(x)


@dataclass(frozen=True, slots=True)
class Float(Rounding):
    """A shorter float: to it and back. `mantissa` in bits."""

    dtype: torch.dtype = torch.float32
    mantissa: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """To it and back."""
        return x.to(self.dtype).to(x.dtype)

    def step(self, x: Tensor) -> Tensor:
        """A unit in the last place."""
        if not self.mantissa:
            return torch.zeros_like(x)
        return torch.where(x != 0, last_place(x, self.mantissa, torch.finfo(self.dtype).tiny), 0.0)


def last_place(x: Tensor, mantissa: int, least: float) -> Tensor:
    """A unit in the last place of floats with so many bits of mantissa; below the least normal number as there."""
    place = torch.frexp(x.abs().clamp(min=least)).exponent - 1 - mantissa
    return torch.ldexp(torch.ones_like(x), place)


@dataclass(frozen=True, slots=True)
class Normal(Float):
    """A shorter float of which subnormal numbers are read as 0, as vector code does that shifts exponents
    (llama3.java's F16FloatTensor): of weights in float16 one in a hundred is one.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """To it and back."""
        kept = super(Normal, self).__call__(x)
        return torch.where(kept.abs() < torch.finfo(self.dtype).tiny, 0.0, kept)


@dataclass(frozen=True, slots=True)
class TF32(Float):
    """The 10-bit mantissa of NVIDIA's TF32, to nearest, of two the even one: so cuBLAS rounds on Hopper (H200)."""

    def __call__(self, x: Tensor) -> Tensor:
        """By its bits: torch has no such dtype."""
        bits = x.float().view(torch.int32)
        return ((bits + self._half(bits)) & ~0x1FFF).view(torch.float32).to(x.dtype)

    def _half(self, bits: Tensor) -> Tensor:
        """What carries into the last bit that is kept."""
        return 0xFFF + ((bits >> 13) & 1)


@dataclass(frozen=True, slots=True)
class TF32Away(TF32):
    """Of two the one farther from zero, the only way before Hopper (cvt.rna.tf32.f32): of float32 that was multiplied
    one value in 10,000 lies halfway.
    """

    def _half(self, bits: Tensor) -> Tensor:
        return torch.full_like(bits, 0x1000)


@dataclass(frozen=True, slots=True)
class Cut(Float):
    """The first bits of a float32, the others cut off: towards 0, as by `bits >> 16`. Numbers too small for the shorter
    type stay as they are.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """To it and back."""
        bits = x.float().view(torch.int32) & -(1 << (23 - self.mantissa))
        return bits.view(torch.float32).to(x.dtype)


@dataclass(frozen=True, slots=True)
class HalfAway(Float):
    """float16 by bits, half a unit added and the rest cut off, as engines in C write it that have no instruction for
    it (picolm): of float32 halfway between two the one farther from zero.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """To it and back."""
        single = x.float()
        halfway = single.view(torch.int32) & 0x1FFF == 0x1000
        farther = torch.where(halfway, (single.view(torch.int32) | 0x1FFF).view(torch.float32), single)
        return farther.to(self.dtype).to(x.dtype)


@dataclass(frozen=True, slots=True)
class OfScaled(Rounding):
    """Another rounding, of queries or keys [..., D] that are multiplied by D^`power` before they are by one another.
    What is left is of x itself.
    """

    of: Rounding = Rounding("f64", "float64")
    power: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """To it and back."""
        return self.of(x.double() * self._share(x)).div_(self._share(x)).to(x.dtype)

    def step(self, x: Tensor) -> Tensor:
        """A unit in the last place."""
        return self.of.step(x * self._share(x)) / self._share(x)

    def _share(self, x: Tensor) -> float:
        """What each is multiplied by, as a float32."""
        return float(torch.tensor(x.shape[-1] ** self.power, dtype=torch.float32))


@dataclass(frozen=True, slots=True)
class Whole(Rounding):
    """Whole numbers: of two that are as near the even one."""

    def __call__(self, x: Tensor) -> Tensor:
        """To them."""
        return x.round()

    def step(self, x: Tensor) -> Tensor:
        """Between two of them."""
        return torch.ones_like(x)


@dataclass(frozen=True, slots=True)
class Calibrated(Rounding):
    """Quotients by one `scale`, a float32, in another rounding whose values are from `least` to `most`, beyond which
    they are these: what a scale was measured for beforehand (vLLM's k_scale and v_scale).
    """

    of: Rounding = Rounding("f64", "float64")
    scale: float = 1.0
    least: float = -math.inf
    most: float = math.inf

    def __call__(self, x: Tensor) -> Tensor:
        """To it and back."""
        quotients = (x.float() / self.scale).clamp(self.least, self.most)
        return (self.of(quotients) * self.scale).to(x.dtype)

    def step(self, x: Tensor) -> Tensor:
        """That of the quotients."""
        return self.of.step(x / self.scale) * self.scale

    def flips(self, x: Tensor) -> Tensor:
        """Where a quotient that is off by its rounding, or is a product with the inverse, lies beyond a boundary."""
        here, *beside = self(x), self(x * (1 - _QUOTIENT)), self(x * (1 + _QUOTIENT))
        return sum((other - here for other in beside), torch.zeros_like(x))


_QUOTIENT = 2.0**-22  # relative: two roundings of float32
