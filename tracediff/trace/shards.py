"""What ranks hold of one value, and what that makes together: a part along an axis each, a term of a sum, or a copy."""

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tracediff.trace.format import STATISTICS, DType, Shard, Values
from tracediff.trace.reader import Trace


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a value, from index `start` on along the shard's axis."""

    rank: int
    trace: Trace
    record: Values
    start: int = 0

    @property
    def shard(self) -> Shard | None:
        """Which part it is; None for a copy of the whole."""
        return self.record.shard

    @property
    def at(self) -> tuple[slice, ...]:
        """The index of a part along an axis."""
        axis = self.shard.axis or 0 if self.shard else 0
        return (*(slice(None),) * axis, slice(self.start, self.start + self.record.shape[axis]))

    def cut(self, of_whole: slice) -> slice | None:
        """What a slice of the whole's axis is of this part's; None where it has nothing of that."""
        size = self.record.shape[self.shard.axis or 0] if self.shard else 0
        first, last = max(of_whole.start - self.start, 0), min(of_whole.stop - self.start, size)
        return slice(first, last) if first < last else None


def wrong(parts: Sequence[Part]) -> str | None:
    """Why these parts make no whole."""
    shards = [part.shard for part in parts]
    known = [shard for shard in shards if shard]
    if not known:
        return None if len({part.record.shape for part in parts}) == 1 else _shapes("copies", parts)
    if len(known) < len(shards) or len({(shard.of, shard.axis) for shard in known}) > 1:
        return f"ranks disagree in how it is sharded ({', '.join(f'rank {p.rank}: {_words(p.shard)}' for p in parts)})"
    lacking = {*range(known[0].of)} - {shard.rank for shard in known}
    if lacking:
        return f"no rank holds part {min(lacking)} of {known[0].of}"
    axis = known[0].axis
    rest = {tuple(n for i, n in enumerate(part.record.shape) if i != axis) for part in parts}
    copies = {(shard.rank, part.record.shape) for shard, part in zip(known, parts, strict=True)}
    return _shapes("parts", parts) if len(rest) > 1 or len(copies) > known[0].of else None


def _shapes(what: str, parts: Iterable[Part]) -> str:
    return f"{what} of shapes that do not go together: {', '.join(str(list(part.record.shape)) for part in parts)}"


def _words(shard: Shard | None) -> str:
    return "a copy" if shard is None else f"{'a sum' if shard.sum else f'axis {shard.axis}'} of {shard.of}"


def chosen(parts: Sequence[Part], members: Container[int]) -> Iterator[Part]:
    """Of copies one, of parts each once and in order: of members where they hold it."""
    first = sorted(parts, key=lambda part: part.rank not in members)
    by_place = {part.shard.rank if part.shard else 0: part for part in reversed(first)}
    yield from (by_place[place] for place in sorted(by_place))


def merged(parts: Sequence[Part]) -> Values | None:
    """The record of what parts make together; None where their statistics do not tell."""
    first, shard = parts[0].record, parts[0].shard
    if shard is None:
        return first
    shape = list(first.shape)
    if shard.axis is not None:
        shape[shard.axis] = sum(part.record.shape[shard.axis] for part in parts)
    blank = msgspec.structs.replace(
        first, shape=tuple(shape), shard=None, strides=None, dtype=None, offset=None, **dict.fromkeys(STATISTICS)
    )
    if all(part.record.has_data for part in parts):
        return msgspec.structs.replace(blank, dtype=_dtype(parts), offset=0, nan=0, inf=0)
    return None if shard.sum else msgspec.structs.replace(blank, **_statistics([part.record for part in parts]))


def _dtype(parts: Sequence[Part]) -> DType:
    """What holds the values of all parts: that of terms which were rounded is not that of their sum."""
    held = {part.record.dtype for part in parts}
    if "f64" in held:
        return "f64"
    (one, *others) = held
    return "f32" if others or one is None or (parts[0].shard and parts[0].shard.sum) else one


def _statistics(records: Sequence[Values]) -> dict[str, Any]:
    sizes = [record.size - record.nan - record.inf for record in records]
    n = max(sum(sizes), 1)

    def over(name: str, of: Any) -> float | None:
        each = [getattr(record, name) for record in records]
        return None if any(x is None for x in each) else of(each)

    return {
        "min": over("min", min),
        "max": over("max", max),
        "mean": over("mean", lambda each: sum(x * m for x, m in zip(each, sizes, strict=True)) / n),
        "rms": over("rms", lambda each: math.sqrt(sum(x * x * m for x, m in zip(each, sizes, strict=True)) / n)),
        "nan": sum(record.nan for record in records),
        "inf": sum(record.inf for record in records),
    }


def digest(part: Part) -> bytes:
    """What tells a copy from others."""
    record = part.record
    if not record.has_data:
        return repr([getattr(record, name) for name in (*STATISTICS, "nan", "inf")]).encode()
    return hashlib.blake2b(np.ascontiguousarray(part.trace.stored(record)).data, digest_size=16).digest()
