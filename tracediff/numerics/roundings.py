"""Rounding as engines do it: what a number loses when it is stored, or made an operand of a matmul.

A rounding is one instance of a small class; a new one is one entry of `_KNOWN`, or one more class of blocks. Block
roundings work on the last axis. They return the values that the integers stand for, in the dtype of the input.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tracediff.errors import EngineError

# A quotient is a float32 product of at most 255, good to a few times 2^-17; implementations multiply in another order,
# so within that of a boundary it may go either way.
_NEAR = 2.0**-15


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

    @property
    def has_offset(self) -> bool:
        """Whether the integers are unsigned: engines add up what the offset makes by itself."""
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
    """A shorter float: to it and back. `mantissa` in bits; float32 is short of nothing that engines compute with."""

    dtype: torch.dtype = torch.float32
    mantissa: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """To it and back."""
        return x.to(self.dtype).to(x.dtype)

    def step(self, x: Tensor) -> Tensor:
        """A unit in the last place."""
        if not self.mantissa:
            return torch.zeros_like(x)
        least = torch.finfo(self.dtype).tiny  # below it numbers lie as far apart as there
        place = torch.frexp(x.abs().clamp(min=least)).exponent - 1 - self.mantissa
        return torch.where(x != 0, torch.ldexp(torch.ones_like(x), place), 0.0)


@dataclass(frozen=True, slots=True)
class TF32(Float):
    """The 10-bit mantissa of NVIDIA's TF32, to nearest, ties away from zero (cvt.rna.tf32.f32)."""

    def __call__(self, x: Tensor) -> Tensor:
        """By its bits: torch has no such dtype."""
        bits = x.float().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Blocks(Rounding):
    """Blocks of integers that share a scale; `block` 0 is a whole row. Subclasses say where the grid lies.

    The values were held in the type `before`, and the scales are kept in that of `scales`.
    """

    scales: torch.dtype = torch.float32
    before: torch.dtype = torch.float32
    bits: int = 8

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

    def step(self, x: Tensor) -> Tensor:
        """The scale of its block."""
        quotients, scale, _ = self.grid(x)
        return scale.abs().to(x.dtype).expand(quotients.shape).flatten(-2)

    def flips(self, x: Tensor) -> Tensor:
        """A scale up or down where the quotient is all but halfway between two integers."""
        quotients, scale, _ = self.grid(x)
        past = quotients - torch.round(quotients)  # from -0.5 to 0.5
        other = torch.where(past >= 0, 1.0, -1.0).to(x.dtype) * scale.to(self.scales).to(x.dtype)
        return torch.where(past.abs() > 0.5 - _NEAR, other, 0.0).flatten(-2)

    def of(self, x: Tensor) -> Tensor:
        """X in blocks, float32 [..., blocks, n]."""
        return x.to(self.before).float().unflatten(-1, (-1, self.block or x.shape[-1]))


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
        return blocks * _over(127.0, largest), largest / 127.0, torch.zeros_like(largest)


@dataclass(frozen=True, slots=True)
class Q8K(Blocks):
    """ggml's q8_K: scale -max / 127 for the element of largest magnitude (quantize_row_q8_K_ref, bit for bit)."""

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest at -127."""
        blocks = self.of(x)
        inverse = _over(-127.0, blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)))
        return (blocks * inverse).clamp_(max=127.0), _over(1.0, inverse), torch.zeros_like(inverse)


@dataclass(frozen=True, slots=True)
class Signed(Blocks):
    """Symmetric: scale amax / 127, of 8 bits, quotient x / scale (llama2.c's runq.c, `quantize`; vLLM's per-token int8;
    of 4 bits amax / 7).
    """

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of as many on both sides of 0."""
        blocks = self.of(x)
        scale = blocks.abs().amax(-1, keepdim=True) / (2.0 ** (self.bits - 1) - 1)
        return _quotients(blocks, scale), scale, torch.zeros_like(scale)


@dataclass(frozen=True, slots=True)
class Wide(Signed):
    """Symmetric: scale amax / 127.5, of 8 bits, halfway between what the two ends need (torchao's MappingType)."""

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One less above 0 than below."""
        blocks, half = self.of(x), (2.0**self.bits - 1) / 2
        scale = (blocks.abs().amax(-1, keepdim=True) / half).to(self.before).float()
        # By the inverse, as there: in every row the largest lies on the boundary between two integers.
        return (blocks * _over(1.0, scale)).clamp_(-half - 0.5, half - 0.5), scale, torch.zeros_like(scale)

    def flips(self, x: Tensor) -> Tensor:
        """None: it is followed bit for bit, and weights in half precision lie on very many boundaries."""
        return torch.zeros_like(x)


@dataclass(frozen=True, slots=True)
class Truncated(Signed):
    """The same by a cast, as C has it: towards 0. Nobody means it: it makes every sum smaller."""

    def __call__(self, x: Tensor) -> Tensor:
        """What the integers stand for."""
        quotients, scale, _ = self.grid(x)
        return (torch.trunc(quotients).to(x.dtype) * scale.to(x.dtype)).flatten(-2)

    def flips(self, x: Tensor) -> Tensor:
        """A scale towards 0 or away from it where the quotient is all but an integer."""
        quotients, scale, _ = self.grid(x)
        whole = torch.round(quotients)
        other = torch.where(torch.trunc(quotients) == whole, -1.0, 1.0) * torch.sign(whole) * scale
        return torch.where((quotients - whole).abs() < _NEAR, other, 0.0).to(x.dtype).flatten(-2)


@dataclass(frozen=True, slots=True)
class Full(Signed):
    """Symmetric, and all integers are used: the value of largest magnitude is the least of them, of 4 bits -8; of two
    with both signs the one below 0 (ONNX Runtime's MatMulNBits, mlas/lib/q4_dq.cpp).
    """

    @property
    def has_offset(self) -> bool:
        """They are kept as unsigned ones, the least of them as 0."""
        return True

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One less above 0 than below."""
        blocks, last = self.of(x), -(2.0 ** (self.bits - 1))
        least, most = (f(-1, keepdim=True).values for f in (blocks.min, blocks.max))
        scale = torch.where(most > -least, most, least) / last
        return (blocks * _over(1.0, scale)).clamp_(last, -last - 1), scale, torch.zeros_like(scale)

    def whole(self, quotients: Tensor) -> Tensor:
        """Of two as near the larger one, in unsigned integers: weights in half precision lie on many boundaries."""
        offset = 2.0 ** (self.bits - 1)
        return torch.floor(quotients + (offset + 0.5)) - offset

    def flips(self, x: Tensor) -> Tensor:
        """None: it is followed bit for bit, and weights in half precision lie on very many boundaries."""
        return torch.zeros_like(x)


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
        least, most = (f(-1, keepdim=True).values for f in (blocks.min, blocks.max))
        least, most = least.clamp(max=0.0), most.clamp(min=0.0)
        scale = (most - least) / last
        zero = self.whole(_quotients(-least, scale))
        return (blocks * _over(1.0, scale) + zero).clamp_(0.0, last), scale, zero

    def whole(self, quotients: Tensor) -> Tensor:
        """Of two as near the larger one."""
        return torch.floor(quotients + 0.5)

    def flips(self, x: Tensor) -> Tensor:
        """Of 8 bits alone; fewer are those of weights."""
        return Blocks.flips(self, x) if self.bits == 8 else torch.zeros_like(x)


@dataclass(frozen=True, slots=True)
class NF4(Blocks):
    """Four bits that stand for quantiles of a normal distribution, times the block's largest magnitude
    (https://arxiv.org/abs/2305.14314, appendix E; bitsandbytes).
    """

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From -1 to 1: not evenly spaced."""
        blocks = self.of(x)
        scale = blocks.abs().amax(-1, keepdim=True)
        return _quotients(blocks, scale), scale, torch.zeros_like(scale)

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
            other = torch.where((quotients - between).abs() < _NEAR, turned, other)
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
        least, most = (f(-1, keepdim=True).values for f in (blocks.min, blocks.max))
        is_least = least.abs() > most.abs()
        edge = torch.where(is_least, least, most)
        scale = ((most - least) / (2.0**self.bits - 1)).clamp(min=1e-7) * torch.where(is_least, 1.0, -1.0)
        of_edge = torch.round(edge / scale)
        scale, offset = torch.where(of_edge != 0, edge / of_edge, scale), torch.where(of_edge != 0, edge, 0.0)
        return ((blocks - offset) / scale).clamp_(0.0, 2.0**self.bits - 1), scale, offset

    def __call__(self, x: Tensor) -> Tensor:
        """What the integers stand for, in the type of the scales."""
        quotients, scale, offset = self.grid(x)
        product = torch.round(quotients).to(self.before) * scale.to(self.before)
        return (product + offset.to(self.before)).to(x.dtype).flatten(-2)


@dataclass(frozen=True, slots=True)
class GF4(Blocks):
    """calm's four bits a value: three of an integer from -4 to 3, and one of the e5m2 that eight values share, which is
    the one of largest magnitude; that is stored as -4 (tools/convert.py, `gf4`, bit for bit).
    """

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 0 to 7; 4 stands for 0. The quotient passes through float16."""
        blocks = self.of(x)
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).to(torch.float8_e5m2).float()
        quotients = (_quotients(blocks, largest).half() * -4 + 4).float()
        return quotients.clamp_(0.0, 7.0), largest / -4.0, torch.full_like(largest, 4.0)

    def flips(self, x: Tensor) -> Tensor:
        """None: where one division is exact to the bit, as in IEEE 754, so is all that follows it."""
        return torch.zeros_like(x)


@dataclass(frozen=True, slots=True)
class FP8(Blocks):
    """Scaled E4M3 (https://arxiv.org/abs/2209.05433): scale amax / 448, the quotient to nearest, ties to even."""

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Up to 448 on both sides of 0, three bits of mantissa: not evenly spaced."""
        blocks = self.of(x)
        scale = blocks.abs().amax(-1, keepdim=True) / 448.0
        return _quotients(blocks, scale), scale, torch.zeros_like(scale)

    def __call__(self, x: Tensor) -> Tensor:
        """What the eight bits stand for."""
        quotients, scale, _ = self.grid(x)
        return (quotients.to(torch.float8_e4m3fn).to(x.dtype) * scale.to(x.dtype)).flatten(-2)

    def step(self, x: Tensor) -> Tensor:
        """A unit in the last place, times the scale."""
        quotients, scale, _ = self.grid(x)
        return (_e4m3_unit(quotients) * scale).to(x.dtype).flatten(-2)

    def flips(self, x: Tensor) -> Tensor:
        """A unit up or down where the quotient is all but halfway between two values."""
        quotients, scale, _ = self.grid(x)
        unit, past = _e4m3_unit(quotients), quotients - quotients.to(torch.float8_e4m3fn).to(quotients.dtype)
        other = (torch.sign(past) * unit * scale).to(x.dtype)
        return torch.where(past.abs() > (0.5 - _NEAR) * unit, other, 0.0).flatten(-2)


def _e4m3_unit(x: Tensor) -> Tensor:
    """How far apart E4M3's values lie at x; below 2^-6 as there."""
    place = torch.frexp(x.abs().clamp(min=2.0**-6)).exponent - 4
    return torch.ldexp(torch.ones_like(x), place)


def _over(number: float, x: Tensor) -> Tensor:
    """The quotient number / x, 0 where x is: torch takes number / x as number * (1 / x), one unit off in 25%.

    The largest number where it overflows: blocks below 1e-36 round to 0, and not to NaN.
    """
    largest = torch.finfo(x.dtype).max
    return torch.where(x != 0, torch.full_like(x, number) / x, 0.0).clamp(-largest, largest)


def _quotients(x: Tensor, scale: Tensor) -> Tensor:
    """X / scale, 0 where the scale is."""
    return torch.where(scale != 0, x / scale, 0.0)


_NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
half = Float("f16", "float16", dtype=torch.float16, mantissa=10)
bfloat = Float("bf16", "bfloat16", dtype=torch.bfloat16, mantissa=7)
single = Float("f32", "float32", dtype=torch.float32)
q8_0 = Q80("q8_0", "q8_0 blocks", 32, torch.float16)
_KNOWN = {
    rounding.name: rounding
    for rounding in (
        Rounding("f64", "float64"),
        single,
        TF32("tf32", "TF32", dtype=torch.float32, mantissa=10),
        half,
        bfloat,
        Float("e5m2", "float8 (e5m2)", dtype=torch.float8_e5m2, mantissa=2),
        Float("e4m3", "float8 (e4m3)", dtype=torch.float8_e4m3fn, mantissa=3),
        q8_0,
        Q80("q8_1", "q8_1 blocks", 32, torch.float16),
        Q8K("q8_K", "q8_K blocks", 256),
        GF4("gf4", "gf4", 8),
    )
}
_BITS, _SCALES = range(2, 9), "{groups} with float32 scales"
_GROUPS: dict[str, tuple[type[Blocks], Sequence[int], str]] = {
    "int": (Signed, _BITS, f"int{{bits}} {_SCALES}"),
    "truncated int": (Truncated, _BITS, f"truncated int{{bits}} {_SCALES}"),
    "full int": (Full, _BITS, f"full int{{bits}} {_SCALES}"),
    "wide int": (Wide, _BITS, f"wide int{{bits}} {_SCALES}"),
    "uint": (Unsigned, _BITS, f"uint{{bits}} {_SCALES} and zeros"),
    "fp": (FP8, [8], f"fp8 {_SCALES}"),
    "nf": (NF4, [4], "NF4 {groups} with {held} values"),
    "affine": (Affine, _BITS, "{bits}-bit {groups} with {held} scales and offsets"),
}


@cache
def rounding_named(name: str) -> Rounding:
    """A rounding by its name: one of `_KNOWN`, or in groups of N values, or rows, intB/N or uintB/N of B bits, fp8/N,
    nf4/N, affineB/N with offsets. intB may be truncated, full or wide.

    With `f16 ` or `bf16 ` before it values were held in that before; scales of nf4 and affineB are then kept in it too,
    others in float32. Raises EngineError for any other name.
    """
    if name in _KNOWN:
        return _KNOWN[name]
    found = re.fullmatch(r"(?:(f16|bf16) )?([a-z ]+)(\d)/(row|[1-9]\d{0,5})", name)
    of, bits, words = _GROUPS.get(found[2], (Blocks, (), "")) if found else (Blocks, (), "")
    if not found or int(found[3]) not in bits:
        raise EngineError(
            f"unknown rounding {name!r}. Known: {', '.join(_KNOWN)}, intB/N and uintB/N (B bits, N values or row; "
            "`truncated `, `full ` or `wide ` before intB), fp8/N, affineB/N, nf4/N (`f16 ` or `bf16 ` before it: of "
            "values that were held in these)."
        )
    held, size = _KNOWN[found[1] or "f32"], 0 if found[4] == "row" else int(found[4])
    assert isinstance(held, Float)
    said = words.format(bits=found[3], groups=f"groups of {size}" if size else "rows", held=held.words)
    return of(name, said, size, before=held.dtype, bits=int(found[3]))
