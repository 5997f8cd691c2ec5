"""Trace format, version 1: the records of the text file, checked field by field as they are decoded.

`NAME.trace` holds one JSON object per line; the first names the data file beside it. Unknown keys and unknown
record types are ignored, so that writers may add their own.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from tracediff.names import token_axis

VERSION = 1
DType = Literal["f64", "f32", "f16", "bf16"]
STATISTICS = ("min", "max", "mean", "rms")
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sequence = Annotated[int, Meta(ge=0, lt=1 << 20)]
Rows = tuple[int, ...] | None  # indices of tokens of a step, ascending; None for all of them
# What holds a value's bits in numpy, which has no bfloat16.
STORAGE: dict[str, np.dtype[Any]] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}

_MAX_DIMS, _MAX_SIZE = 8, 1 << 48  # of a shape: beyond any engine's, within numpy's
_CERTAIN = 1e-3  # a log-probability above 0 by no more is one of 0 that was rounded


def possible(shape: tuple[int, ...]) -> bool:
    """Whether a tensor may have this shape. Zeros do not count: numpy refuses [0, 2**62, 2**62] too."""
    return len(shape) <= _MAX_DIMS and math.prod(n for n in shape if n) <= _MAX_SIZE


def same_shape(a: tuple[int, ...], b: tuple[int, ...], may_be_flat: bool) -> bool:
    """Equal, or flat on one side where the other lists heads: [T, heads * head_dim] and [T, heads, head_dim]."""
    if a == b:
        return True
    return may_be_flat and {len(a), len(b)} == {2, 3} and a[:1] == b[:1] and math.prod(a) == math.prod(b)


def are_logprobs(values: np.ndarray) -> bool:
    """Whether these can be log-probabilities in nats: not all 0 or infinite, NaN apart, and none above 0."""
    return bool(values[np.isfinite(values)].any() and not (values > _CERTAIN).any())


class Header(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="trace"):
    """The first line. `data` is a bare file name in the same folder; without it no record has data."""

    version: int
    engine: str
    arch: str | None = None
    model: str | None = None
    data: str | None = None
    weights: str | None = None  # the matmul weights' ggml type, the coarsest where they are mixed
    context: Size | None = None  # for how many positions the engine was set up, where that is more than it was fed
    rank: Size | None = None  # of an engine that runs as several processes, each of which writes a trace: which one,
    ranks: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None  # and of how many; alone: one trace of all of them
    rounding: str | None = None  # what values are rounded to inside ops, the coarsest: a cache's type, a table's
    # Whether a step that begins at an earlier position than its sequence had reached drops what was fed from there on,
    # as drafts of speculative decoding that were rejected.
    rollback: bool = False

    @property
    def place(self) -> tuple[int, int] | None:
        """The rank, and of how many it is."""
        return None if self.rank is None or self.ranks is None else (self.rank, self.ranks)


class Shard(Struct, frozen=True, omit_defaults=True):
    """The part of an output that one rank holds: the `rank`-th `of` so many along `axis`, or a term of their `sum`."""

    rank: Size
    of: Annotated[int, Meta(ge=1, le=1 << 20)]
    axis: Annotated[int, Meta(ge=0, lt=8)] | None = None
    sum: bool = False


class Values(Struct, frozen=True, omit_defaults=True):
    """Data (`dtype`, and `offset` in bytes into the data file), statistics, or both.

    Little-endian, C order, no padding: else `strides`, in elements, say how far the next of each axis is.
    Statistics are over finite values; `nan` and `inf` count the others. Some of the four may
    be absent: a log that prints sums alone yields means and nothing else.
    """

    shape: tuple[Size, ...]
    dtype: DType | None = None
    offset: Size | None = None
    strides: tuple[Size, ...] | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    rms: Annotated[float, Meta(ge=0)] | None = None
    nan: Size = 0
    inf: Size = 0
    shard: Shard | None = None  # without it all of the output, of which every rank may hold a copy

    @property
    def has_data(self) -> bool:
        """Whether the data file holds the values."""
        return self.offset is not None

    @property
    def has_statistics(self) -> bool:
        """Whether the line itself says any of min, max, mean and rms."""
        return len(self.lacking) < len(STATISTICS)

    @property
    def lacking(self) -> tuple[str, ...]:
        """The statistics that the line does not say."""
        return tuple(name for name in STATISTICS if getattr(self, name) is None)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements of the data file from the first value to the last, both included."""
        if self.strides is None or not self.size:
            return self.size
        return sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + 1

    @property
    def nbytes(self) -> int:
        """Bytes that the data takes up, gaps included; 0 where there is none."""
        return self.extent * STORAGE[self.dtype].itemsize if self.dtype else 0


class Weight(Values, frozen=True, omit_defaults=True, kw_only=True, tag_field="type", tag="weight"):
    """What the engine holds in memory for a GGUF tensor after loading it."""

    weight: str


class Step(Struct, frozen=True, omit_defaults=True, tag_field="type", tag="step"):
    """Tokens fed in one forward pass and their positions: 0 is the prefill, then one per decode step.

    All are of one `sequence`, or each of its own of `sequences`.
    """

    step: Size
    tokens: tuple[Size, ...]
    positions: tuple[Size, ...]
    sequence: Sequence = 0
    sequences: tuple[Sequence, ...] | None = None


class OpRecord(Values, frozen=True, omit_defaults=True, kw_only=True, tag_field="type", tag="op"):
    """The output of one op in one step: for all of its tokens, or for those that `rows` lists.

    With `sequence` it is as if the step had the tokens of that sequence alone.
    """

    step: Size
    op: str
    rows: tuple[Size, ...] | None = None
    sequence: Sequence | None = None
    sketch: bytes | None = None  # as trace/sketch.py has it, in base64

    @property
    def token_axis(self) -> int:
        """The axis of `shape` that counts tokens."""
        return token_axis(self.op)

    def holds(self, rows: Rows) -> bool:
        """Whether these tokens of the step are among the record's."""
        return self.rows is None or (rows is not None and set(rows) <= set(self.rows))

    def whole_shape(self, n_tokens: int) -> tuple[int, ...]:
        """The shape of the output for all tokens of a step of `n_tokens`."""
        axis = self.token_axis
        return self.shape if self.rows is None else (*self.shape[:axis], n_tokens, *self.shape[axis + 1 :])

    def place(self, index: tuple[int, ...], rows: Rows) -> tuple[int, ...]:
        """Where in the output for all tokens a value stands that is at `index` of its `rows`."""
        axis = self.token_axis
        return index if rows is None or not index else (*index[:axis], rows[index[axis]], *index[axis + 1 :])


class End(Struct, frozen=True, tag_field="type", tag="end"):
    """The last line: how many lines came before it. A trace without it was cut off."""

    records: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is said of values in a few numbers: over the finite ones, and counts of the others."""

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


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Header | Weight | Step | OpRecord | End).decode
