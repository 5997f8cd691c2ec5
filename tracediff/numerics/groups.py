"""Groups of integers that share a scale, as engines and libraries quantise activations and the file's weights."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tracediff.numerics.blocks import FP8, NEAR, Blocks, divided, over, quotients_of
from tracediff.numerics.floats import last_place

_NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signed(Blocks):
    """Symmetric: scale amax / 127, of 8 bits, quotient x / scale (llama2.c's runq.c, `quantize`; vLLM's per-token int8;
    of 4 bits amax / 7).
    """

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of as many on both sides of 0."""
        blocks = self.of(x)
        scale = divided(self.largest(blocks), 2.0 ** (self.bits - 1) - 1)
        return quotients_of(blocks, scale), scale, torch.zeros_like(scale)


@dataclass(frozen=True, slots=True)
class Away(Signed):
    """The same with ties away from 0, as C's round has it: weights in half precision lie on many boundaries (MNN)."""

    turns: ClassVar[bool] = False

    def whole(self, quotients: Tensor) -> Tensor:
        """The nearest integers; of two the one farther from 0."""
        towards = torch.trunc(quotients)
        return torch.where((quotients - towards).abs() >= 0.5, towards + torch.sign(quotients), towards)


@dataclass(frozen=True, slots=True)
class Scaled(Signed):
    """Symmetric, by a scale of another rule: the largest value becomes `last`, which may be beyond the integers and is
    cut then (127 / 0.9 where a tenth is clipped, as in https://arxiv.org/abs/2310.19102). The scale is `kept` in a
    shorter float, or as the next power of two; quotients are `by_kept` or by what it was before.
    """

    below: ClassVar[int] = 1  # integers beyond the 127 of 8 bits
    above: ClassVar[int] = 0

    last: float = 127.0
    kept: str = "f32"
    by_kept: bool = False

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of 127 on both sides of 0, and one more."""
        blocks, end = self.of(x), 2.0 ** (self.bits - 1) - 1
        scale = divided(self.largest(blocks), self.last)
        kept = _kept_as(self.kept, scale)
        quotients = quotients_of(blocks, kept if self.by_kept else scale)
        return quotients.clamp_(-end - self.below, end + self.above), kept, torch.zeros_like(scale)


@dataclass(frozen=True, slots=True)
class Narrow(Scaled):
    """The same of as many integers on both sides of 0, -127 to 127 of 8 bits."""

    below: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class Flipped(Narrow):
    """The same of integers whose scale is negative, so that there is one more above 0 (lm.rs, `quantize_q4`)."""

    above: ClassVar[int] = 1


def _kept_as(kept: str, scale: Tensor) -> Tensor:
    """Scales in a type that is shorter, or as powers of two, none less than it was."""
    if kept == "2^n":
        parts = torch.frexp(scale)
        return torch.ldexp(torch.where(scale > 0, 1.0, 0.0), parts.exponent - (parts.mantissa == 0.5).int())
    return scale.to({"f16": torch.float16, "bf16": torch.bfloat16}.get(kept, torch.float32)).float()


@dataclass(frozen=True, slots=True)
class Wide(Signed):
    """Symmetric: scale amax / 127.5, of 8 bits, halfway between what the two ends need (torchao's MappingType).

    Scales have the type that the values had. Quotients are products with the inverse, or divided: in every row the
    largest lies on the boundary between two integers. Where all is `typed`, they and the inverse have that type too.
    """

    turns: ClassVar[bool] = False
    by_division: ClassVar[bool] = False
    typed: ClassVar[bool] = False

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One less above 0 than below."""
        blocks, half = self.of(x), (2.0**self.bits - 1) / 2
        blocks = blocks.to(self.before) if self.typed else blocks
        scale = divided(self.largest(blocks), half).to(self.before).to(blocks.dtype)
        quotients = quotients_of(blocks, scale) if self.by_division else blocks * over(1.0, scale)
        quotients = quotients.float().clamp_(-half - 0.5, half - 0.5)
        return quotients, scale.float(), torch.zeros_like(scale).float()


@dataclass(frozen=True, slots=True)
class Divided(Wide):
    """The same by a division (gpt-fast; compressed-tensors)."""

    by_division: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class HeldWide(Wide):
    """Wide ones computed in the type that the values have (torchao's IntxWeightOnlyConfig)."""

    typed: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class HeldDivided(Divided):
    """The same by a division (compressed-tensors)."""

    typed: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Held(Signed):
    """Symmetric, and computed in the type that the values have, as PyTorch does unless it is told otherwise: scales and
    quotients are rounded to it (optimum-quanto's AbsmaxOptimizer and quantize_symmetric).
    """

    turns: ClassVar[bool] = False
    below: ClassVar[int] = 1  # integers beyond -127 of 8 bits

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of 127 on both sides of 0, and one more below."""
        last = 2.0 ** (self.bits - 1) - 1
        return _grid_in_type(self, x, last, -last - self.below)


@dataclass(frozen=True, slots=True)
class HeldNarrow(Held):
    """The same of as many integers on both sides of 0, as clamp(-127, 127) leaves them."""

    below: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class KeptInverse(Signed):
    """Symmetric, by the inverse of the scale, 127 / (amax + 1e-7), which is kept in the type that the values had
    (keras/src/quantizers/quantizers.py, `abs_max_quantize`). Where all is `typed`, products with it have that type.
    """

    turns: ClassVar[bool] = False
    typed: ClassVar[bool] = False

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of as many on both sides of 0."""
        blocks, last = self.of(x), 2.0 ** (self.bits - 1) - 1
        blocks = blocks.to(self.before) if self.typed else blocks
        inverse = over(last, self.largest(blocks) + 1e-7)
        quotients, kept = (blocks * inverse).float().clamp_(-last, last), inverse.to(self.before).float()
        return quotients, over(1.0, kept), torch.zeros_like(kept)


@dataclass(frozen=True, slots=True)
class HeldInverse(KeptInverse):
    """The same of what is computed in that type."""

    typed: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class HeldFP8(FP8):
    """The same of scaled E4M3."""

    turns: ClassVar[bool] = False

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Up to 448 on both sides of 0."""
        return _grid_in_type(self, x, 448.0, -448.0)


@dataclass(frozen=True, slots=True)
class TypedFP8(FP8):
    """Scaled E4M3 of which the scale alone has the type of the values (torchao's Float8WeightOnlyConfig)."""

    turns: ClassVar[bool] = False

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Up to 448 on both sides of 0."""
        blocks = self.of(x)
        scale = divided(self.largest(blocks), 448.0).to(self.before).float()
        return quotients_of(blocks, scale).clamp_(-448.0, 448.0), scale, torch.zeros_like(scale)


def _grid_in_type(of: Blocks, x: Tensor, last: float, least: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quotients of which the largest is `last`, scales and zeros, each rounded to the type that the values had.

    Of a scale that was rounded down a quotient is larger, which is cut.
    """
    blocks = of.of(x).to(of.before)
    scale = divided(of.largest(blocks), last)
    quotients = quotients_of(blocks, scale).float().clamp_(least, last)
    return quotients, scale.float(), torch.zeros_like(scale).float()


@dataclass(frozen=True, slots=True)
class Truncated(Signed):
    """The same by a cast, as C has it: towards 0. Nobody means it: it makes every sum smaller."""

    def whole(self, quotients: Tensor) -> Tensor:
        """The next integers towards 0."""
        return torch.trunc(quotients)

    def flips(self, x: Tensor) -> Tensor:
        """A scale towards 0 or away from it where the quotient is all but an integer."""
        quotients, scale, _ = self.grid(x)
        whole = torch.round(quotients)
        other = torch.where(torch.trunc(quotients) == whole, -1.0, 1.0) * torch.sign(whole) * scale.to(self.scales)
        return torch.where((quotients - whole).abs() < NEAR, other, 0.0).to(x.dtype).flatten(-2)


@dataclass(frozen=True, slots=True)
class TruncatedQ80(Truncated):
    """The same of q8_0 as engines copy it from ggml-quants.c (quantize_row_q8_0_ref): by the inverse of the scale, so
    the largest of a block may come out one less.
    """

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of 127 on both sides of 0."""
        blocks = self.of(x)
        scale = divided(blocks.abs().amax(-1, keepdim=True), 127.0)
        return blocks * over(1.0, scale), scale, torch.zeros_like(scale)


@dataclass(frozen=True, slots=True)
class Full(Signed):
    """Symmetric, and all integers are used: the value of largest magnitude is the least of them, of 4 bits -8; of two
    with both signs the one below 0 (ONNX Runtime's MatMulNBits, mlas/lib/q4_dq.cpp).
    """

    turns: ClassVar[bool] = False

    @property
    def has_offset(self) -> bool:
        """They are kept as unsigned ones, the least of them as 0."""
        return True

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One less above 0 than below."""
        blocks, last = self.of(x), -(2.0 ** (self.bits - 1))
        least, most = self.edges(blocks)
        scale = divided(torch.where(most > -least, most, least), last)
        return (blocks * over(1.0, scale)).clamp_(last, -last - 1), scale, torch.zeros_like(scale)

    def whole(self, quotients: Tensor) -> Tensor:
        """Of two as near the larger one, in unsigned integers: weights in half precision lie on many boundaries."""
        offset = 2.0 ** (self.bits - 1)
        return torch.floor(quotients + (offset + 0.5)) - offset


@dataclass(frozen=True, slots=True)
class Unsigned(Blocks):
    """Asymmetric: scale (max - min) / 255, of 8 bits, of a range that holds 0, which an integer of its own stands for.

    ONNX's DynamicQuantizeLinear and, of fewer bits, MatMulNBits; torchao's per-token int8 less 128.
    """

    @property
    def has_offset(self) -> bool:
        """They are unsigned."""
        return True

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 0 to 255; `zero` is where 0 is."""
        blocks, last = self.of(x), 2.0**self.bits - 1
        least, most = self.edges(blocks)
        least, most = least.clamp(max=0.0), most.clamp(min=0.0)
        scale = divided(most - least, last)
        zero = self.whole(quotients_of(-least, scale))
        return (blocks * over(1.0, scale) + zero).clamp_(0.0, last), scale, zero

    def whole(self, quotients: Tensor) -> Tensor:
        """Of two as near the larger one."""
        return torch.floor(quotients + 0.5)

    def flips(self, x: Tensor) -> Tensor:
        """Of 7 bits and more; fewer are those of weights."""
        return Blocks.flips(self, x) if self.bits >= 7 else torch.zeros_like(x)


@dataclass(frozen=True, slots=True)
class EvenUnsigned(Unsigned):
    """The same, of two as near the even one, before 0's integer is added (torchao's MappingType.ASYMMETRIC)."""

    turns: ClassVar[bool] = False

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 0 to 255, whole already."""
        blocks, last = self.of(x), 2.0**self.bits - 1
        least, most = self.edges(blocks)
        least, most = least.clamp(max=0.0), most.clamp(min=0.0)
        scale = divided(most - least, last)
        zero = -torch.round(quotients_of(least, scale))
        return (torch.round(blocks * over(1.0, scale)) + zero).clamp_(0.0, last), scale, zero


@dataclass(frozen=True, slots=True)
class MX(Blocks):
    """Microscaling: short floats that share a power of two, of four bits E2M1, of eight E4M3
    (https://arxiv.org/abs/2310.10537). Where the largest is 1.75 times a power of two or more it is the next one
    (compressed-tensors).
    """

    turns: ClassVar[bool] = False

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Up to 6 or 448 on both sides of 0: not evenly spaced."""
        blocks, (_, exponent, last) = self.of(x), self._element
        largest = torch.frexp(self.largest(blocks))
        place = largest.exponent - 1 + (largest.mantissa >= 0.875).int() - exponent
        scale = torch.where(largest.mantissa > 0, torch.ldexp(torch.ones_like(largest.mantissa), place), 0.0)
        return quotients_of(blocks, scale).clamp_(-last, last), scale, torch.zeros_like(scale)

    def whole(self, quotients: Tensor) -> Tensor:
        """The nearest of them."""
        unit = self.unit(quotients)
        return torch.round(quotients / unit) * unit

    def unit(self, quotients: Tensor) -> Tensor:
        """A unit in the last place; below the least normal number, 1 or 2^-6, as there."""
        return last_place(quotients, self._element[0], 1.0 if self.bits == 4 else 2.0**-6)

    @property
    def _element(self) -> tuple[int, int, float]:
        """Bits of mantissa, the largest exponent and the largest value."""
        return (1, 2, 6.0) if self.bits == 4 else (3, 8, 448.0)


@dataclass(frozen=True, slots=True)
class NF4(Blocks):
    """Four bits that stand for quantiles of a normal distribution, times the block's largest magnitude
    (https://arxiv.org/abs/2305.14314, appendix E; bitsandbytes).
    """

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From -1 to 1: not evenly spaced."""
        blocks = self.of(x)
        scale = self.largest(blocks)
        return quotients_of(blocks, scale), scale, torch.zeros_like(scale)

    def __call__(self, x: Tensor) -> Tensor:
        """What the four bits stand for, in the type of the scales."""
        quotients, scale, _ = self.grid(x)
        kept = self._codes(x)[self._places(quotients)] * scale
        return kept.to(self.before).to(x.dtype).flatten(-2)

    def step(self, x: Tensor) -> Tensor:
        """From each to the next quantile, times the scale."""
        (quotients, scale, _), codes = self.grid(x), self._codes(x)
        gaps = torch.diff(codes, append=codes[-1:] + 1)
        return (gaps[self._places(quotients)] * scale).to(x.dtype).flatten(-2)

    def flips(self, x: Tensor) -> Tensor:
        """To the next quantile where the quotient is all but halfway."""
        (quotients, scale, _), codes = self.grid(x), self._codes(x)
        places, halfway = self._places(quotients), (codes[1:] + codes[:-1]) / 2
        other = torch.zeros_like(quotients)
        for way in (-1, 1):
            between = halfway[(places + min(way, 0)).clamp(0, len(halfway) - 1)]
            there = (places + way).clamp(0, len(codes) - 1)
            turned = (codes[there] - codes[places]) * scale
            other = torch.where((quotients - between).abs() < NEAR, turned, other)
        return other.to(x.dtype).flatten(-2)

    def _places(self, quotients: Tensor) -> Tensor:
        codes = self._codes(quotients)
        return torch.bucketize(quotients, (codes[1:] + codes[:-1]) / 2)

    def _codes(self, like: Tensor) -> Tensor:
        return _NF4.to(like.device)


@dataclass(frozen=True, slots=True)
class Affine(Blocks):
    """Levels from one edge of the group to the other, each a scale and an offset: that edge is the offset which is
    farther from 0, and the scale is such that it is a multiple of it (MLX, `affine_quantize` in
    mlx/backend/cpu/quantized.cpp, bit for bit).
    """

    @property
    def has_offset(self) -> bool:
        """They are unsigned."""
        return True

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 0 up to the last level; the third is the offset. Scales have the type that the values had."""
        blocks = self.of(x).to(self.before)
        least, most = (edge.to(self.before) for edge in self.edges(blocks))
        is_least = least.abs() > most.abs()
        edge = torch.where(is_least, least, most)
        scale = divided(most - least, 2.0**self.bits - 1).clamp(min=1e-7) * torch.where(is_least, 1.0, -1.0)
        of_edge = torch.round(edge / scale)
        scale, offset = torch.where(of_edge != 0, edge / of_edge, scale), torch.where(of_edge != 0, edge, 0.0)
        return ((blocks - offset) / scale).clamp_(0.0, 2.0**self.bits - 1), scale, offset

    def __call__(self, x: Tensor) -> Tensor:
        """What the integers stand for, in the type of the scales."""
        quotients, scale, offset = self.grid(x)
        product = torch.round(quotients).to(self.before) * scale.to(self.before)
        return (product + offset.to(self.before)).to(x.dtype).flatten(-2)


@dataclass(frozen=True, slots=True)
class Shifted(Affine):
    """Levels from the least value of the group to the largest, computed in the type that the values have
    (optimum-quanto's MaxOptimizer and quantize_affine).
    """

    turns: ClassVar[bool] = False

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 0 up to the last level; the third is the least value."""
        blocks, last = self.of(x).to(self.before), 2.0**self.bits - 1
        least, most = (edge.to(self.before) for edge in self.edges(blocks))
        scale = divided(most - least, last)
        quotients = quotients_of(blocks - least, scale).float().clamp_(0.0, last)
        return quotients, scale.float(), least.float()


@dataclass(frozen=True, slots=True)
class Centred(Shifted):
    """The same, of which the level in the middle is kept in the place of the least: what is multiplied is a float32
    (PyTorch's _weight_int4pack_mm).
    """

    def __call__(self, x: Tensor) -> Tensor:
        """From the middle as many scales as there are levels between."""
        (quotients, scale, least), middle = self.grid(x), 2.0 ** (self.bits - 1)
        kept = (least.to(self.before) + middle * scale.to(self.before)).to(x.dtype)
        return ((torch.round(quotients) - middle).to(x.dtype) * scale.to(x.dtype) + kept).flatten(-2)
