"""Trace format, version 1: the records of the text file, checked field by field as they are decoded.

`NAME.trace` holds one JSON object per line; the first names the data file beside it. Unknown keys and unknown
record types are ignored, so that writers may add their own.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

VERSION = 1
DType = Literal["f64", "f32", "f16", "bf16"]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
# What holds a value's bits in numpy, which has no bfloat16.
STORAGE: dict[str, np.dtype[Any]] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}


class Header(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="trace"):
    """The first line. `data` is a bare file name in the same folder; without it no record has data."""

    version: int
    engine: str
    arch: str | None = None
    model: str | None = None
    data: str | None = None
    weights: str | None = None  # the matmul weights' ggml type, the coarsest where they are mixed


class Values(Struct, frozen=True, omit_defaults=True):
    """Data (`dtype`, and `offset` in bytes into the data file), statistics, or both.

    Little-endian, C order, no padding. Statistics are over finite values; `nan` and `inf` count the others.
    """

    shape: tuple[Size, ...]
    dtype: DType | None = None
    offset: Size | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    rms: Annotated[float, Meta(ge=0)] | None = None
    nan: Size = 0
    inf: Size = 0

    @property
    def has_data(self) -> bool:
        """Whether the data file holds the values."""
        return self.offset is not None

    @property
    def has_statistics(self) -> bool:
        """Whether the line itself says min, max, mean and rms."""
        return None not in (self.min, self.max, self.mean, self.rms)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data, 0 where there is none."""
        return self.size * STORAGE[self.dtype].itemsize if self.dtype else 0


class Weight(Values, frozen=True, omit_defaults=True, kw_only=True, tag_field="type", tag="weight"):
    """What the engine holds in memory for a GGUF tensor after loading it."""

    weight: str


class Step(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="step"):
    """Tokens fed in one forward pass and their positions: 0 is the prefill, then one per decode step."""

    step: Size
    tokens: tuple[Size, ...]
    positions: tuple[Size, ...]
    sequence: int = 0


class OpRecord(Values, frozen=True, omit_defaults=True, kw_only=True, tag_field="type", tag="op"):
    """The output of one op in one step."""

    step: Size
    op: str


class End(Struct, frozen=True, tag_field="type", tag="end"):
    """The last line: how many lines came before it. A trace without it was cut off."""

    records: int


class Statistics(Struct, frozen=True):
    """What a record says of values that it does not hold: over the finite ones, and counts of the others."""

    min: float | None
    max: float | None
    mean: float | None
    rms: float | None
    nan: int = 0
    inf: int = 0


def to_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """Stored values as floats of their own precision; bfloat16 becomes float32, exactly."""
    if dtype == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def from_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """The stored bits of an array: bfloat16 from float32 that already holds bfloat16 values."""
    if dtype == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(STORAGE[dtype], copy=False)


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Header | Weight | Step | OpRecord | End).decode
