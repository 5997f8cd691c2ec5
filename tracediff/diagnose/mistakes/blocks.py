"""Mistaken dequantisations, block by block: each an edit of what the fields of a type hold or mean."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from gguf import quants
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import MATMUL, Area, Change, Context, Variant, Variants, Where
from tracediff.diagnose.mistakes.near import is_near
from tracediff.model.block_fields import FIELDS, EditedBlocks, Fields
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op
from tracediff.model.weights import raw_rows, reading, values_of
from tracediff.trace.format import to_float

_OF_32, _OF_256 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1"), ("Q4_K", "Q5_K")
_WITH_MINIMA, _IN_PARTS = ("Q2_K", *_OF_256), ("Q2_K", "Q3_K", *_OF_256, "Q6_K", "IQ4_XS")
_WITH_MINIMUM, _WITH_HIGH = ("Q4_1", "Q5_1", *_WITH_MINIMA), ("Q5_0", "Q5_1", "Q3_K", "Q5_K", "Q6_K")
_OFFSET, _ALL = ("Q4_0", "Q5_0", "Q3_K", "Q6_K"), tuple(FIELDS)
_BY_FLOAT16 = tuple(type_ for type_ in _ALL if type_ != "MXFP4")
_IN_TABLE = ("MXFP4", "IQ4_NL", "IQ4_XS")


@dataclass(frozen=True, slots=True)
class BlockMistake:
    """A wrong way to read blocks of some types: what it makes of their fields. `text` has the type in its braces."""

    name: str
    text: str
    types: tuple[str, ...]
    edit: Callable[[Fields], Fields]
    link: str = ""


_TABLES = (quants.MXFP4.kvalues, quants.IQ4_NL.kvalues)


# --- scales -----------------------------------------------------------------------------------------------------------


def _at(f: Fields) -> np.ndarray:
    return np.arange(len(f.d))


def _scales(f: Fields, make: Callable[[np.ndarray], np.ndarray]) -> Fields:
    """With other scales and minima of the parts of blocks."""
    assert f.scales is not None
    return replace(f, scales=make(f.scales), minima=None if f.minima is None else make(f.minima))


def _naive(scales: np.ndarray) -> np.ndarray:
    """Parts 4 to 7 from four bits of their bytes, without the two that lie elsewhere."""
    return np.concatenate((scales[:, :4], scales[:, 4:] & 15), 1)


def subnormals(right: np.ndarray, times: float, more: float) -> np.ndarray:
    """Float16 as float32, where subnormal numbers, below 2^-14, are so many times what they are, and so much larger."""
    right = right.astype(np.float32)
    other = times * right + np.copysign(np.float32(more), right)
    return np.where(np.abs(right) < 2.0**-14, other, right)


def _subnormals(bits: np.ndarray, times: float, more: float) -> np.ndarray:
    """The same of their bits."""
    return subnormals(bits.view(np.float16), times, more)


_SCALES = (
    BlockMistake("block_scale", "a block of {} has the scale of the next one", _ALL,
                 lambda f: f.of(np.roll(_at(f), -1))),
    BlockMistake("block_scale", "a block of {} has the scale of the next one in its row, the last that of the first",
                 _ALL, lambda f: f.of(_at(f) // f.row * f.row + (_at(f) + 1) % f.row)),
    BlockMistake("block_scale", "a block of {} has the scale of the one before", _ALL,
                 lambda f: f.of(np.roll(_at(f), 1))),
    BlockMistake("block_scale", "all blocks of a row in {} have the scale of its first", _ALL,
                 lambda f: f.of(_at(f) // f.row * f.row)),
    BlockMistake("block_scale", "all blocks of {} have the scale of the tensor's first", _ALL,
                 lambda f: f.of(0 * _at(f))),
    BlockMistake("block_scale_bits", "{}'s scales, which are float16, are read as bfloat16",
                 _BY_FLOAT16,
                 lambda f: replace(f, read=lambda bits: to_float(bits, "bf16"))),
    BlockMistake("block_scale_subnormal", "{}'s float16 scales are 0 where they are subnormal, below 6.1e-5",
                 _BY_FLOAT16,
                 lambda f: replace(f, read=lambda bits: _subnormals(bits, 0.0, 0.0))),
    BlockMistake("block_scale_subnormal",
                 "{}'s float16 scales are read as if none was subnormal: those below 6.1e-5 as 2^-15 (1 + m)",
                 _BY_FLOAT16,
                 lambda f: replace(f, read=lambda bits: _subnormals(bits, 0.5, 2.0**-15))),
    BlockMistake("block_scale_subnormal", "{}'s float16 scales are half of what they are where they are subnormal",
                 _BY_FLOAT16,
                 lambda f: replace(f, read=lambda bits: _subnormals(bits, 0.5, 0.0))),
    BlockMistake("q4_k_scales", "{}'s 6-bit scales of sub-blocks 4 to 7 are unpacked like those of the first four",
                 _OF_256, lambda f: _scales(f, _naive), "aprender#2141"),
    BlockMistake("q4_k_scales_dropped", "{}'s sub-block scales are dropped", _IN_PARTS[:-1],
                 lambda f: _scales(f, np.ones_like), "defenseclaw#679"),
    BlockMistake("block_subscales", "a sub-block of {} has the scale of the next one", _IN_PARTS,
                 lambda f: _scales(f, lambda s: np.roll(s, -1, 1))),
    BlockMistake("block_subscales", "two sub-blocks of {} share a scale, as if they were twice as long",
                 _IN_PARTS, lambda f: _scales(f, lambda s: s.repeat(2, 1)[:, : s.shape[1]])),
)  # fmt: skip


# --- offsets, signs, minima -------------------------------------------------------------------------------------------


def _signed(f: Fields) -> Fields:
    """Integers as two's complement: those from the offset on are negative."""
    top = f.offset if f.high is None else f.offset >> f.shift
    return replace(f, low=f.low ^ top) if f.high is None else replace(f, high=f.high ^ top)


def _minima_by_d(f: Fields, which: slice) -> Fields:
    """With some sub-blocks' minima such that dmin times them is d times what they were."""
    assert f.minima is not None
    assert f.m is not None
    d, m = (of.view(np.float16).astype(np.float64).reshape(-1, 1) for of in (f.d, f.m))
    minima = f.minima.astype(np.float64)
    minima[:, which] *= np.divide(d, m, out=np.zeros_like(d), where=m != 0)
    return replace(f, minima=minima)


def _shifted_signed(pairs: np.ndarray) -> np.ndarray:
    """High nibbles as `>> 4` makes them of an int8."""
    low, high = pairs[:, :, :1], pairs[:, :, 1:]
    return np.concatenate((low, np.where(high >= 8, high.astype(int) - 16, high)), 2)


_OFFSETS = (
    BlockMistake("block_offset", "the offset of {}'s integers is not subtracted", _OFFSET,
                 lambda f: replace(f, offset=0)),
    BlockMistake("block_offset", "the offset of {}'s integers is one too small", _OFFSET,
                 lambda f: replace(f, offset=f.offset - 1)),
    BlockMistake("block_offset", "{}'s integers are taken for signed ones: they have an offset", _OFFSET, _signed),
    BlockMistake("block_signs", "{}'s signed integers are read as unsigned", ("Q8_0",),
                 lambda f: replace(f, low=f.low & 255)),
    BlockMistake("block_signs", "{}'s signed integers are read as unsigned with an offset of 128", ("Q8_0",),
                 lambda f: replace(f, low=f.low & 255, offset=128)),
    BlockMistake("block_signs", "{}'s high nibbles are shifted as signed bytes: those of 8 and more are 16 less",
                 ("Q4_0", "Q4_1", *_OF_256[:1]), lambda f: _low(f, _shifted_signed(_pairs(f)))),
    BlockMistake("block_signs", "{}'s signed scales are read as unsigned", ("Q6_K",),
                 lambda f: _scales(f, lambda s: s & 255)),
    BlockMistake("q4_k_min_added", "{}'s minimum is added where it must be subtracted", _WITH_MINIMA,
                 lambda f: replace(f, sign=-f.sign), "llama-orch fba3827f"),
    BlockMistake("q4_k_min_added", "{}'s minimum is subtracted where it must be added", ("Q4_1", "Q5_1"),
                 lambda f: replace(f, sign=-f.sign)),
    BlockMistake("block_minimum", "{}'s minimum is left out", _WITH_MINIMUM, lambda f: replace(f, m=None)),
    BlockMistake("block_minimum", "{}'s scale and minimum are exchanged", _WITH_MINIMUM,
                 lambda f: replace(f, d=f.d if f.m is None else f.m, m=f.d)),
    BlockMistake("block_minimum", "the minima of every second sub-block of {} are multiplied by d, not by dmin",
                 _OF_256, lambda f: _minima_by_d(f, slice(1, None, 2))),
    BlockMistake("block_minimum", "the minima of {}'s sub-blocks are multiplied by d, not by dmin", _WITH_MINIMA,
                 lambda f: _minima_by_d(f, slice(None))),
    BlockMistake("block_minimum", "the scales and minima of {}'s sub-blocks are exchanged", _WITH_MINIMA,
                 lambda f: replace(f, scales=f.minima, minima=f.scales)),
)  # fmt: skip


# --- the order of integers --------------------------------------------------------------------------------------------


def _pairs(f: Fields) -> np.ndarray:
    """Low bits [n, parts, 2, bytes]: those of the low nibbles of a part's bytes, and of the high ones."""
    return f.low.reshape(len(f.low), -1, 2, f.bytes)


def _low(f: Fields, low: np.ndarray) -> Fields:
    return replace(f, low=low.reshape(f.low.shape))


def _sequential(f: Fields) -> Fields:
    return _low(f, _pairs(f).swapaxes(2, 3))


def _in_order(f: Fields) -> Fields:
    """Q6_K in the order of its bytes; ggml interleaves l, l+32, l+64 and l+96 of each half."""
    made = _low(f, f.low.reshape(-1, 2, 2, 64).swapaxes(2, 3))
    return _high(made, lambda high: high.swapaxes(2, 3))


def _high(f: Fields, make: Callable[[np.ndarray], np.ndarray]) -> Fields:
    """With other high bits, made of [n, *planes]."""
    assert f.high is not None
    return replace(f, high=make(f.high.reshape(len(f.high), *f.planes)))


def _twice_as_far(high: np.ndarray) -> np.ndarray:
    """Of 32 bits the one at 2i for that at i; beyond the mask there are none."""
    flat = high.reshape(len(high), -1)
    return np.concatenate((flat[:, ::2], 0 * flat[:, ::2]), 1)


_ORDERS = (
    BlockMistake("q4_k_nibbles", "{}'s nibbles are taken in sequence; low and high ones belong 32 values apart",
                 _OF_256, _sequential, "imp#567"),
    BlockMistake("q4_0_nibbles", "{}'s nibbles are taken in sequence; low and high ones belong 16 values apart",
                 (*_OF_32, *_IN_TABLE), _sequential, "imp#567"),
    BlockMistake("block_nibbles", "{}'s high nibbles are taken before the low ones", (*_OF_32, *_OF_256, *_IN_TABLE),
                 lambda f: _low(f, _pairs(f)[:, :, ::-1])),
    BlockMistake("block_table", "{}'s nibbles are taken for integers with an offset of 8; they are places in a table",
                 _IN_TABLE, lambda f: replace(f, table=(), offset=8)),
    BlockMistake("block_table", "{}'s nibbles are taken for places in the table of another type", _IN_TABLE,
                 lambda f: replace(f, table=next(t for t in _TABLES if t != f.table))),
    BlockMistake("q6_k_order", "{}'s values are taken in the order of their bytes; they interleave l, l+32, l+64, l+96",
                 ("Q6_K",), _in_order, "rustorch 5b0d5bb8"),
    BlockMistake("q5_0_high_bit", "{}'s fifth bit is taken from bit 2i of the mask; it is bit i", ("Q5_0", "Q5_1"),
                 lambda f: _high(f, _twice_as_far), "aprender#1621"),
    BlockMistake("block_high_bits", "{}'s high bits are left out", _WITH_HIGH, lambda f: _high(f, np.zeros_like)),
    BlockMistake("block_high_bits", "the bytes of {}'s high bits are read in the reverse order", ("Q5_0", "Q5_1"),
                 lambda f: _high(f, lambda high: high[:, ::-1])),
    BlockMistake("block_high_bits", "the halves of {}'s high bits are exchanged", ("Q5_0", "Q5_1"),
                 lambda f: _high(f, lambda high: np.roll(high, 2, 1))),
    BlockMistake("block_high_bits", "{}'s high bits are taken from the other end of their bytes", _WITH_HIGH,
                 lambda f: _high(f, lambda high: high[:, ::-1] if f.planes[0] == 8 else high[:, :, ::-1])),
    BlockMistake("block_high_bits", "of {}'s high bits those of the first values are taken for all", ("Q5_K", "Q6_K"),
                 lambda f: _high(f, lambda high: high[:, np.arange(f.planes[0]) % (f.planes[0] // 4 or 1)])),
    BlockMistake("block_high_bits", "{}'s high bits of values l+32 and l+64 are exchanged", ("Q6_K",),
                 lambda f: _high(f, lambda high: high[:, :, [0, 2, 1, 3]])),
)  # fmt: skip
BLOCK_MISTAKES = (*_SCALES, *_OFFSETS, *_ORDERS)
_TEXTS = {
    "block_scale": "blocks have the scale of another block",
    "block_scale_bits": "the float16 scale of a block is read as bfloat16",
    "block_scale_subnormal": "the float16 scale of a block is converted without a care for subnormal numbers",
    "q4_k_scales": "K-quants' 6-bit scales of sub-blocks 4 to 7 are unpacked like those of the first four",
    "q4_k_scales_dropped": "K-quants' sub-block scales are dropped",
    "block_subscales": "sub-blocks have the scales of others",
    "block_offset": "the offset of a block's integers is left out, or another",
    "block_signs": "signed integers of a block are read as unsigned",
    "q4_k_min_added": "a block's minimum has the wrong sign",
    "block_minimum": "a block's minimum is left out, or another",
    "q4_k_nibbles": "K-quants' nibbles are taken in sequence; low and high ones belong 32 values apart",
    "q4_0_nibbles": "nibbles are taken in sequence; low and high ones belong 16 values apart",
    "block_nibbles": "the high nibbles of a block are taken before the low ones",
    "block_table": "nibbles that are places in a table are taken for others",
    "q6_k_order": "Q6_K's values are taken in the order of their bytes; they interleave l, l+32, l+64, l+96",
    "q5_0_high_bit": "the fifth bit is taken from bit 2i of the mask; it is bit i",
    "block_high_bits": "the high bits of a block's integers are left out, or taken from elsewhere",
}


def misread(type_: str) -> Iterator[BlockMistake]:
    """The wrong ways to read blocks of this type."""
    yield from (mistake for mistake in BLOCK_MISTAKES if type_ in mistake.types)


def _changing(name: str) -> Change:
    def change(op: Op, context: Context) -> Variants:
        weight = op.weights[0].name
        info = context.file.tensors[weight]
        for mistake in misread(info.type.name):
            read = EditedBlocks(mistake.types, mistake.edit)  # of all: another mistake may have chosen the tensor
            if mistake.name == name and is_near(op, context, read=read.of_rows):
                words = mistake.text.format(info.type.name)
                yield Variant(reading(op, read), f"{words} ({weight})", name=words)

    return change


AREA = Area()
_WHERE = Where((*MATMUL.kinds, "embedding"))
for _name, _text in _TEXTS.items():
    _link = next(mistake.link for mistake in BLOCK_MISTAKES if mistake.name == _name)
    AREA.mistake(_name, _text, "the dequantisation of blocks of this type", _WHERE, _link, everywhere=True)(
        _changing(_name)
    )


@AREA.mistake(
    "bf16_as_f16", "the BF16 weights are decoded as F16", "the dequantisation of BF16 blocks", _WHERE, "aprender#1601",
)  # fmt: skip
def _bf16_as_f16(op: Op, context: Context) -> Variants:
    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        if info.type.name != "BF16":
            return values_of(file, info)
        return raw_as_f16(raw_rows(file, info)).reshape(info.shape)

    if context.file.tensors[op.weights[0].name].type.name == "BF16":
        words = "the BF16 weights are decoded as F16"
        yield Variant(reading(op, read), f"{words} ({op.weights[0].name})", name=words)


def raw_as_f16(raw: np.ndarray) -> Tensor:
    """Bytes as float16; what is none of its numbers as its largest."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(
            np.nan_to_num(raw.copy().view(np.float16).astype(np.float32), posinf=65504, neginf=-65504)
        )
