"""The fields of quantised blocks, in numpy. Layouts: ggml/src/ggml-common.h; what they mean: ggml-quants.c."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.weights import raw_rows, values_of

Blocks = np.ndarray  # uint8 [blocks, bytes per block]


class Valued(Protocol):
    """What blocks are read as."""

    def values(self) -> np.ndarray:
        """Float32 [n, values of a block]."""


@dataclass(frozen=True, slots=True)
class Fields:
    """What blocks of a type hold. A value is d * scale * (integer - offset) + m * minimum; where there is a `table`,
    the integer is what that has at the place that the bits give.

    Of `n` blocks, each of g parts of l values: `d` and `m` are the bits of float16 [n], whose sign in the value is
    `sign`; `scales` and `minima` [n, g]; `low` and `high` the bits of integers [n, g, l], of which `high` begin with
    bit `shift`; `planes` is how the high bits lie, outermost first. So many `bytes` have low nibbles that are followed
    by their high ones. There are `row` blocks in a row; `raw` is what they were read from.
    """

    d: np.ndarray
    low: np.ndarray
    m: np.ndarray | None = None
    scales: np.ndarray | None = None
    minima: np.ndarray | None = None
    high: np.ndarray | None = None
    shift: int = 4
    planes: tuple[int, ...] = ()
    offset: int = 0
    sign: float = 1.0
    read: Callable[[np.ndarray], np.ndarray] = lambda bits: bits.view(np.float16)  # of d and m
    row: int = 1
    table: tuple[int, ...] = ()
    bytes: int = 16
    raw: Blocks = field(default_factory=partial(np.zeros, (0, 0), np.uint8))

    @classmethod
    def of_rows(cls, type_: str, rows: np.ndarray) -> "Fields":
        """Those of rows of a tensor, uint8 [rows, bytes per row]."""
        blocks = rows.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[type_]][1])
        return replace(FIELDS[type_](blocks), row=len(blocks) // len(rows), raw=blocks)

    def of(self, blocks: np.ndarray) -> "Fields":
        """With the scale and minimum of these blocks, one for each."""
        return replace(self, d=self.d[blocks], m=None if self.m is None else self.m[blocks])

    @property
    def bits(self) -> np.ndarray:
        """Those of the blocks, each byte's lowest first, uint8 [n, bits of one]."""
        return np.unpackbits(self.raw, axis=1, bitorder="little")

    @property
    def codes(self) -> np.ndarray:
        """What the low bits stand for, float32 [n, g, l]."""
        return np.array(self.table, np.float32)[self.low] if self.table else self.low.astype(np.float32)

    @property
    def integers(self) -> np.ndarray:
        """What scales are multiplied with, float32 [n, g, l]."""
        integers = self.codes
        if self.offset:
            integers -= self.offset
        if self.high is not None:
            integers += np.multiply(self.high.reshape(self.low.shape), 1 << self.shift, dtype=np.float32)
        return integers

    def values(self) -> np.ndarray:
        """Float32 [n, g * l]."""
        made = self.integers
        made *= self.steps
        if self.m is not None:
            made += self.added[:, :, None]
        return made.reshape(len(made), -1)

    @property
    def added(self) -> np.ndarray:
        """What each part has besides, float32 [n, g or 1]: 0 in types without minima."""
        if self.m is None:
            return np.zeros((len(self.d), 1), np.float32)
        return self.sign * self._times(self.m, self.minima)[..., 0]

    @property
    def steps(self) -> np.ndarray:
        """What an integer of one is worth, float32 [n, g or 1, 1]."""
        return self._times(self.d, self.scales)

    def _times(self, bits: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        each = self.read(bits).astype(np.float32)[:, None, None]
        return each if scales is None else each * scales.astype(np.float32)[:, :, None]


def _bits16(blocks: Blocks, at: int) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view(np.uint16)[:, 0]


def _nibbles(packed: np.ndarray, parts: int) -> np.ndarray:
    """Of each part's bytes the low nibbles, then the high ones: [n, 2 * parts, bytes]."""
    each = packed.reshape(len(packed), parts, 1, -1) >> np.array([0, 4], np.uint8).reshape(2, 1) & 15
    return each.reshape(len(packed), 2 * parts, -1)


def _mask(blocks: Blocks, at: int) -> np.ndarray:
    """Bits of four bytes, the lowest first: [n, 4, 8]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little").reshape(-1, 4, 8)


def _of_32(with_minimum: bool, with_high: bool) -> Callable[[Blocks], Fields]:
    """Q4_0, Q4_1, Q5_0 and Q5_1."""
    at = 4 if with_minimum else 2

    def fields(blocks: Blocks) -> Fields:
        low = _nibbles(blocks[:, -16:], 1).reshape(-1, 1, 32)
        m = _bits16(blocks, 2) if with_minimum else None
        high = _mask(blocks, at) if with_high else None
        offset = 0 if with_minimum else 16 if with_high else 8
        return Fields(_bits16(blocks, 0), low, m, high=high, planes=(4, 8), offset=offset)

    return fields


def _q8_0(blocks: Blocks) -> Fields:
    return Fields(_bits16(blocks, 0), blocks[:, None, 2:].view(np.int8).astype(np.int16))


def _pairs_of_bits(packed: np.ndarray) -> np.ndarray:
    """Of each 32 bytes the lowest two bits, then the next, of 16 values a part: [n, 16, 16]."""
    each = packed.reshape(len(packed), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    return each.reshape(len(packed), 16, 16)


def _q2_k(blocks: Blocks) -> Fields:
    scales, low = blocks[:, :16], _pairs_of_bits(blocks[:, 16:80])
    return Fields(_bits16(blocks, 80), low, _bits16(blocks, 82), scales & 15, scales >> 4, sign=-1.0)


def _q3_k(blocks: Blocks) -> Fields:
    high = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low_bits = (blocks[:, None, 96:104] >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(-1, 16).astype(np.int16)
    high_bits = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scales, low = low_bits + 16 * high_bits.astype(np.int16) - 32, _pairs_of_bits(blocks[:, 32:96])
    return Fields(_bits16(blocks, 108), low, scales=scales, high=high, shift=2, planes=(8, 32), offset=4)


def _q4_k(blocks: Blocks) -> Fields:
    scales, minima = quants.Q4_K.get_scale_min(blocks[:, 4:16])
    low = _nibbles(blocks[:, -128:], 4)
    return Fields(_bits16(blocks, 0), low, _bits16(blocks, 2), scales, minima, sign=-1.0, bytes=32)


def _q5_k(blocks: Blocks) -> Fields:
    scales, minima = quants.Q4_K.get_scale_min(blocks[:, 4:16])
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = _nibbles(blocks[:, -128:], 4)
    return Fields(
        _bits16(blocks, 0), low, _bits16(blocks, 2), scales, minima, high, planes=(8, 32), sign=-1.0, bytes=32
    )


def _q6_k(blocks: Blocks) -> Fields:
    packed = blocks[:, :128].reshape(-1, 2, 2, 32)
    low = np.concatenate((packed & 15, packed >> 4), 2).reshape(-1, 16, 16)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    scales = blocks[:, 192:208].view(np.int8).astype(np.int16)
    return Fields(_bits16(blocks, 208), low, scales=scales, high=high, planes=(2, 4, 32), offset=32)


def _mxfp4(blocks: Blocks) -> Fields:
    """Whose scale is a power of two, and whose values are E2M1 times two."""
    low = _nibbles(blocks[:, 1:], 1).reshape(-1, 1, 32)
    return Fields(blocks[:, 0], low, read=quants.MXFP4.e8m0_to_fp32_half, table=quants.MXFP4.kvalues)


def _iq4_nl(blocks: Blocks) -> Fields:
    return replace(_of_32(False, False)(blocks), offset=0, table=quants.IQ4_NL.kvalues)


def _iq4_xs(blocks: Blocks) -> Fields:
    at = np.arange(8)
    low_bits = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8).astype(np.int16)
    high_bits = (_bits16(blocks, 2)[:, None] >> (2 * at) & 3).astype(np.int16)
    low = _nibbles(blocks[:, -128:], 8).reshape(-1, 8, 32)
    return Fields(_bits16(blocks, 0), low, scales=low_bits + 16 * high_bits - 32, table=quants.IQ4_NL.kvalues)


FIELDS: Mapping[str, Callable[[Blocks], Fields]] = MappingProxyType({
    "Q4_0": _of_32(False, False), "Q4_1": _of_32(True, False), "Q5_0": _of_32(False, True), "Q5_1": _of_32(True, True),
    "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "MXFP4": _mxfp4, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class EditedBlocks:
    """Reads blocks of some types by an edit of their fields, others as they are: `Weight.read`. A file mixes types
    (Q4_K_M has Q6_K in some layers).
    """

    types: tuple[str, ...]
    edit: Callable[[Fields], Valued]

    def __call__(self, file: GGUFFile, info: TensorInfo) -> Tensor:
        """The weight as it is held."""
        if info.type.name not in self.types:
            return values_of(file, info)
        return self.of_rows(info, raw_rows(file, info)).reshape(info.shape)

    def of_rows(self, info: TensorInfo, rows: np.ndarray) -> Tensor:
        """Rows of bytes, uint8 [rows, bytes per row], as float32 [rows, columns]."""
        with np.errstate(all="ignore"):  # misread bits may be no number
            values = self.edit(Fields.of_rows(info.type.name, rows)).values()
        return torch.from_numpy(values.reshape(len(rows), -1))
