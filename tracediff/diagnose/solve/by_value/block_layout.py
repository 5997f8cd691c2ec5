"""Where in a block of a type its numbers lie: of which bits scales, minima and integers are made, found by reading
blocks of which one bit is set.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tracediff.model.block_fields import FIELDS

# The bits of a block that are added up, and times what; bits are numbered from the lowest of the first byte, -1 is 1.
Part = tuple[tuple[int, int], ...]
Sums = tuple[Part, ...]  # of each part of a block
# ggml's names of the bytes that hold scales, and the first of them (ggml-common.h).
_NAMES = {
    "Q2_K": ("scales", 0),
    "Q3_K": ("scales", 96),
    "Q4_K": ("scales", 4),
    "Q5_K": ("scales", 4),
    "Q6_K": ("scales", 192),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a `type`: `scales` and `minima`, empty where it has none for parts; the lowest bits `low` and `high` of the
    integers, value by value, and how many bits there are from each on; and the bits that are in scales and minima, the
    `header`, of which ggml calls the bytes `name`, from byte `first` on. What a scale is multiplied with is an
    `integer`, made of the bits q. `d` and `m` are the bytes of the block's own scale and minimum.
    """

    type: str
    scales: Sums
    minima: Sums
    low: tuple[int, ...]
    low_bits: int
    high: tuple[int, ...]
    high_bits: int
    integer: str
    d: slice
    m: slice
    name: str
    first: int

    @property
    def header(self) -> list[int]:
        """Bits that scales and minima are made of."""
        return sorted({bit for part in (*self.scales, *self.minima) for bit, _ in part if bit >= 0})


@lru_cache(maxsize=32)
def layout_of(type_: str) -> Layout:
    """The layout of a type of `FIELDS`."""
    n = 8 * GGML_QUANT_SIZES[GGMLQuantizationType[type_]][1]
    single = np.concatenate((np.eye(n, dtype=np.uint8), np.zeros((1, n), np.uint8)))
    fields = FIELDS[type_](np.packbits(single, axis=1, bitorder="little"))
    low, low_bits = _lowest(fields.low)
    high, high_bits = ((), 0) if fields.high is None else _lowest(fields.high)
    d, m = _bytes(fields.d), _bytes(fields.m)
    integer = "kvalues[q]" if fields.table else f"q - {fields.offset}" if fields.offset else "q"
    name, first = _NAMES.get(type_, ("block", 0))
    return Layout(
        type_, _sums(fields.scales), _sums(fields.minima), low, low_bits, high, high_bits, integer, d, m, name, first
    )


def _bytes(values: np.ndarray | None) -> slice:
    """The bytes on which these depend."""
    bits = np.flatnonzero(values[:-1] != values[-1]) if values is not None else np.zeros(0, int)
    return slice(int(bits[0]) // 8, int(bits[-1]) // 8 + 1) if len(bits) else slice(0, 0)


def _by_bit(values: np.ndarray) -> np.ndarray:
    """What each bit adds to each number, [bits, numbers], and in a last row what they are without any."""
    flat = values.reshape(len(values), -1).astype(np.int64)
    return np.concatenate((flat[:-1] - flat[-1], flat[-1:]))


def _sums(values: np.ndarray | None) -> Sums:
    if values is None:
        return ()
    by_bit = _by_bit(values)
    n = len(by_bit) - 1
    return tuple(
        tuple(sorted((int(bit) if bit < n else -1, int(part[bit])) for bit in np.flatnonzero(part)))
        for part in by_bit.T
    )


def _lowest(values: np.ndarray) -> tuple[tuple[int, ...], int]:
    by_bit = _by_bit(values)[:-1]
    return tuple(map(int, (by_bit == 1).argmax(0))), int(np.count_nonzero(by_bit[:, 0]))
