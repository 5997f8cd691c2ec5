"""Rounding as engines do it: what a number loses when it is stored, or made an operand of a matmul.

A rounding is one instance of a small class; a new one is one entry of `_KNOWN`, or one more class of blocks. Block
roundings work on the last axis. They return the values that the integers stand for, in the dtype of the input.
"""

import re
from collections.abc import Callable
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
    """Blocks of integers that share a scale; `block` 0 is a whole row. Subclasses say where the grid lies."""

    scales: torch.dtype = torch.float32

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quotients before rounding [..., blocks, n]; scales and what stands for 0 [..., blocks, 1]; all float32."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        """What the integers stand for."""
        quotients, scale, zero = self.grid(x)
        integers = torch.round(quotients).sub_(zero)
        return (integers.to(x.dtype) * scale.to(self.scales).to(x.dtype)).flatten(-2)

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
        return x.float().unflatten(-1, (-1, self.block or x.shape[-1]))


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
class Int8(Blocks):
    """Symmetric: scale amax / 127, quotient x / scale (llama2.c's runq.c, `quantize`; vLLM's per-token int8)."""

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of 127 on both sides of 0."""
        blocks = self.of(x)
        scale = blocks.abs().amax(-1, keepdim=True) / 127.0
        return _quotients(blocks, scale), scale, torch.zeros_like(scale)


@dataclass(frozen=True, slots=True)
class Truncated(Int8):
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
class UInt8(Blocks):
    """Asymmetric: scale (max - min) / 255 of a range that holds 0, which an integer of its own stands for.

    ONNX's DynamicQuantizeLinear, and torchao's per-token int8 less 128.
    """

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 0 to 255; `zero` is where 0 is."""
        blocks = self.of(x)
        least, most = (f(-1, keepdim=True).values for f in (blocks.min, blocks.max))
        least, most = least.clamp(max=0.0), most.clamp(min=0.0)
        scale = (most - least) / 255.0
        zero = torch.round(_quotients(-least, scale))
        return (_quotients(blocks, scale) + zero).clamp_(0.0, 255.0), scale, zero


@dataclass(frozen=True, slots=True)
class Affine(Blocks):
    """Levels from one edge of the group to the other, each a scale and an offset: that edge is the offset which is
    farther from 0, and the scale is such that it is a multiple of it (MLX, `affine_quantize` in
    mlx/backend/cpu/quantized.cpp, bit for bit).
    """

    bits: int = 4

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From 0 up to the last level; the third is the offset. Scales have the type that the values had."""
        blocks = self.of(x.to(self.scales))
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
        product = torch.round(quotients).to(self.scales) * scale.to(self.scales)
        return (product + offset.to(self.scales)).to(x.dtype).flatten(-2)


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
_GROUPS: dict[str, Callable[[str, str, int], Blocks]] = {
    "int8": Int8, "truncated int8": Truncated, "uint8": UInt8, "fp8": FP8,
}  # fmt: skip


@cache
def rounding_named(name: str) -> Rounding:
    """A rounding by its name: one of `_KNOWN`, or int8/N, uint8/N and fp8/N in groups of N values, truncated int8/N,
    or affineB/N of B bits, and f16 or bf16 affineB/N with scales and offsets in that.

    N may be `row`: one scale for each row. Scales are float32 otherwise. Raises EngineError for any other name.
    """
    if name in _KNOWN:
        return _KNOWN[name]
    if found := re.fullmatch(r"((?:truncated )?int8|uint8|fp8)/(row|[1-9]\d{0,5})", name):
        kind, size = found[1], 0 if found[2] == "row" else int(found[2])
        of = f"{kind} groups of {size}" if size else f"{kind} rows"
        return _GROUPS[kind](name, of + " with float32 scales" + (" and zeros" if kind == "uint8" else ""), size)
    if found := re.fullmatch(r"(|f16 |bf16 )affine([2-8])/([1-9]\d{0,5})", name):
        scales, bits, size = _KNOWN[found[1].strip() or "f32"], int(found[2]), int(found[3])
        assert isinstance(scales, Float)
        return Affine(
            name, f"{bits}-bit groups of {size} with {scales.words} scales and offsets", size, scales.dtype, bits
        )
    raise EngineError(
        f"unknown rounding {name!r}. Known: {', '.join(_KNOWN)}, int8/N, uint8/N and fp8/N (N values or row), "
        "affineB/N (B bits; `f16 ` or `bf16 ` before it for scales in these)."
    )
