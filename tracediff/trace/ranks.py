"""The traces of an engine's ranks opened as one: parts put together when their values are asked for.

A record of a rank is a part along an axis, a term of a sum, or, without a shard, a copy of the whole. What ranks hold
copies of may differ, by a mistake or by roundings. So there may be several sides to one run: each has the copies of
ranks that agree, and answers for the parts that these hold. Where all agree there is one side, and nothing but this
module knows of ranks.
"""

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from tracediff.errors import TraceError
from tracediff.inputs import open_file
from tracediff.names import kind_of
from tracediff.trace.data import Stored
from tracediff.trace.format import (
    STATISTICS,
    STORAGE,
    DType,
    Header,
    OpRecord,
    Rows,
    Shard,
    Step,
    Values,
    Weight,
    decode,
    to_float,
)
from tracediff.trace.reader import Index, Trace

Key = tuple[int, str] | str  # of an op (step, name), or of a weight


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


def open_trace(paths: Path | Sequence[Path]) -> Trace:
    """One trace, or those of all ranks of a run as one. Raises TraceError where ranks lack, or do not fit together."""
    several = files_of_run(paths)
    if len(several) == 1 and not (trace := Trace(several[0])).is_one_of_several:
        return trace
    return Ranks.opened([Trace(path) for path in several])


def files_of_run(paths: Path | Sequence[Path]) -> list[Path]:
    """One path or several as several."""
    return [paths] if isinstance(paths, Path) else [*paths]


class Ranks(Trace):
    """Several ranks' traces as one. `members` are those whose copies it has, and whose parts it answers for."""

    members: tuple[int, ...]

    def __init__(self, traces: dict[int, Trace], members: Sequence[int]) -> None:
        self._traces = traces
        first = next(iter(traces.values()))
        others = f" and {len(traces) - 1} other{'s' * (len(traces) > 2)}" if len(traces) > 1 else ""
        self.path = first.path.with_name(f"{first.path.name}{others}")
        self.header = msgspec.structs.replace(first.header, rank=None, ranks=None)
        self.cut = next((f"rank {rank}: {trace.cut}" for rank, trace in traces.items() if trace.cut), None)
        fewest = min(traces.values(), key=lambda trace: len(trace.steps))
        self.steps, self._n_before = fewest.steps, fewest._n_before
        self.lines = {key: line for trace in reversed(traces.values()) for key, line in trace.lines.items()}
        self._positions = {}
        self._parted: int | None = None  # where in the order of `_all` copies begin to differ
        self._all: dict[Key, list[Part]] = {}
        for rank, trace in traces.items():
            held: dict[Any, Values] = {**trace.weights, **{k: r for k, r in trace.ops.items() if k[0] in self.steps}}
            for key, record in held.items():
                self._all.setdefault(key, []).append(Part(rank, trace, record))
        self._placed()
        self._join(members)

    @classmethod
    def opened(cls, traces: Sequence[Trace]) -> Self:
        """Raises TraceError, in words, for what is not one run's."""
        by_rank = _by_rank(traces)
        _same_tokens(by_rank)
        return cls(by_rank, [*by_rank])

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process the files are opened again."""
        paths = [trace.path for trace in self._traces.values()]
        return _reopened, (type(self), paths, self.members, self._parted)

    @property
    def sides(self) -> list[Trace]:
        """One for each set of ranks that hold the same copies; the set of the first rank first."""
        digests = self._digests()
        signs: list[tuple[list[int], dict[tuple[Key, Shard | None], bytes]]] = []
        for rank, held in digests.items():
            for ranks, seen in signs:
                if all(seen.get(key, sign) == sign for key, sign in held.items()):
                    ranks.append(rank)
                    seen.update(held)
                    break
            else:
                signs.append(([rank], {**held}))
        if len(signs) == 1:
            return [self]
        self._parted = next((i for i, key in enumerate(self._all) if self._differs(key, digests)), None)
        return [self.of(ranks) for ranks, _ in signs]

    def _differs(self, key: Key, digests: "dict[int, dict[tuple[Key, Shard | None], bytes]]") -> bool:
        of = {(part.shard, digests[part.rank].get((key, part.shard))) for part in self._all[key]}
        return len(of) > len({shard for shard, _ in of})

    @property
    def everyone(self) -> Sequence[int]:
        """All ranks of the run."""
        return [*self._traces]

    def of(self, members: Sequence[int]) -> "Ranks":
        """The side of these ranks."""
        other = copy(self)
        other._join(members)
        return other

    def parts(self, record: Values) -> Sequence[Part]:
        """What each rank holds of a value, by rank."""
        return self._all[_key(record)]

    def own(self, record: Values) -> Sequence[Index] | None:
        """As of a trace."""
        parts = self.parts(record)
        mine = [part for part in parts if part.rank in self.members]
        shard = parts[0].shard
        if shard is None:
            return None if mine else []
        if shard.sum:  # where ranks' copies differ, their terms are of different sums
            of_tokens = isinstance(record, OpRecord) and kind_of(record.op) == "embedding"
            differ = self._parted is not None and not of_tokens and [*self._all].index(_key(record)) > self._parted
            return [] if differ or mine[:1] != parts[:1] else None
        if {part.start for part in mine} == {part.start for part in parts}:
            return None
        return [part.at for part in mine]

    def values(self, record: Values, rows: Rows = None, channels: slice | None = None) -> np.ndarray:
        """As of a trace."""
        parts = self._chosen[_key(record)]
        if parts[0].shard is None:
            return parts[0].trace.values(parts[0].record, rows, channels)
        values = to_float(self.stored(record), record.dtype or "f32")
        if rows is not None and isinstance(record, OpRecord):
            held = record.rows or range(record.shape[record.token_axis])
            values = values.take([held.index(row) for row in rows], axis=record.token_axis)
        return values if channels is None else values.reshape(len(values), -1)[:, channels]

    def by_slice(self, record: Values, rows: Rows = None) -> np.ndarray | Stored:
        """As of a trace."""
        part = self._chosen[_key(record)][0]
        return part.trace.by_slice(part.record, rows) if part.shard is None else self.values(record, rows)

    def stored(self, record: Values) -> np.ndarray:
        """As of a trace."""
        parts = self._chosen[_key(record)]
        if parts[0].shard is None:
            return parts[0].trace.stored(parts[0].record)
        storage = STORAGE[record.dtype or "f32"]
        if parts[0].shard.sum:
            total = np.zeros(record.shape)
            for part in parts:
                total += part.trace.values(part.record).reshape(record.shape)
            return total.astype(storage)
        alike = all(part.record.dtype == record.dtype for part in parts)
        read = [part.trace.stored(part.record) if alike else part.trace.values(part.record) for part in parts]
        return np.concatenate(read, parts[0].shard.axis).astype(storage, copy=False)

    def _placed(self) -> None:
        """Where each part along an axis lies; raises TraceError where parts do not make a whole."""
        for key, parts in [*self._all.items()]:
            lacking = _wrong(parts)
            if lacking and self.cut is not None:
                del self._all[key]
            elif lacking:
                name = key if isinstance(key, str) else f"{key[1]} in step {key[0]}"
                raise TraceError(f"{self.path}: {name}: {lacking}. docs/trace-format.md has what a shard says.")
            elif (shard := parts[0].shard) and shard.axis is not None:
                sizes = {part.shard.rank: part.record.shape[shard.axis] for part in parts if part.shard}
                starts = {rank: sum(sizes[before] for before in range(rank)) for rank in sizes}
                self._all[key] = [replace(part, start=starts[part.shard.rank]) for part in parts if part.shard]

    def _join(self, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self._chosen = {key: [*_chosen(parts, self.members)] for key, parts in self._all.items()}
        self.weights, self.ops = {}, {}
        self._of_step: dict[int, list[OpRecord]] = {step: [] for step in self.steps}
        for key, parts in self._chosen.items():
            match _merged(parts):
                case Weight() as weight:
                    self.weights[weight.weight] = weight
                case OpRecord() as record if not isinstance(key, str):
                    self.ops[key] = record
                    self._of_step[key[0]].append(record)

    def _digests(self) -> dict[int, dict[tuple[Key, Shard | None], bytes]]:
        """Of each rank what tells its copies from others', of all that several ranks hold."""
        found: dict[int, dict[tuple[Key, Shard | None], bytes]] = {rank: {} for rank in self._traces}
        for key, parts in self._all.items():
            for part in parts:
                if sum(part.shard == other.shard for other in parts) > 1:
                    found[part.rank][key, part.shard] = _digest(part)
        return found


def _reopened(of: type[Ranks], paths: list[Path], members: tuple[int, ...], parted: int | None) -> Ranks:
    again = of(_by_rank([Trace(path) for path in paths]), members)
    again._parted = parted
    return again


def _key(record: Values) -> Key:
    return record.weight if isinstance(record, Weight) else (record.step, record.op)  # type: ignore[attr-defined]


def _by_rank(traces: Sequence[Trace]) -> dict[int, Trace]:
    """The traces in the order of their ranks. Raises TraceError where one lacks, or is there twice."""
    found: dict[int, Trace] = {}
    n = traces[0].header.ranks
    for trace in traces:
        rank, ranks = trace.header.rank, trace.header.ranks
        if rank is None or ranks is None:
            raise TraceError(
                f'{trace.path}: its first line has no "rank" and "ranks", so it is no part of a run. Add both, or give '
                "one trace alone."
            )
        if ranks != n or rank >= ranks:
            raise TraceError(
                f"{trace.path} is of rank {rank} of {ranks}, {traces[0].path} of {n} ranks: give the traces of one run."
            )
        if rank in found:
            raise TraceError(f"{found[rank].path} and {trace.path} are both of rank {rank}: give each rank once.")
        found[rank] = trace
    lacking = [str(rank) for rank in range(n or 0) if rank not in found]
    if lacking:
        raise TraceError(
            f"{traces[0].path}: of {n} ranks {', '.join(lacking[:8])}{', ...' if lacking[8:] else ''} "
            f"{'is' if len(lacking) == 1 else 'are'} missing: give the traces of all, as in rank*.trace."
        )
    return dict(sorted(found.items()))


def _same_tokens(traces: dict[int, Trace]) -> None:
    (_, first), *others = traces.items()
    for rank, trace in others:
        for a, b in zip_longest(first.steps.values(), trace.steps.values()):
            if a is None or b is None:
                if first.cut or trace.cut:
                    break
                what = f"{len(first.steps)} and {len(trace.steps)} steps"
            elif (a.step, a.tokens, a.positions) == (b.step, b.tokens, b.positions):
                continue
            else:
                what = f"step {a.step} differs: {_fed(a)} and {_fed(b)}"
            raise TraceError(
                f"{first.path} and {trace.path}, rank {rank}, were not fed the same: {what}. Every rank writes all "
                "tokens of a step, with their positions."
            )


def _fed(step: Step) -> str:
    return f"tokens {list(step.tokens[:6])} at position {step.positions[0]}"


def _wrong(parts: Sequence[Part]) -> str | None:
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


def _chosen(parts: Sequence[Part], members: Container[int]) -> Iterator[Part]:
    """Of copies one, of parts each once and in order: of members where they hold it."""
    first = sorted(parts, key=lambda part: part.rank not in members)
    by_place = {part.shard.rank if part.shard else 0: part for part in reversed(first)}
    yield from (by_place[place] for place in sorted(by_place))


def _merged(parts: Sequence[Part]) -> Values | None:
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


def _digest(part: Part) -> bytes:
    record = part.record
    if not record.has_data:
        return repr([getattr(record, name) for name in (*STATISTICS, "nan", "inf")]).encode()
    return hashlib.blake2b(np.ascontiguousarray(part.trace.stored(record)).data, digest_size=16).digest()


def on_ranks(ranks: Sequence[int]) -> str:
    """These ranks in words."""
    few = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"on rank{'s' * (len(ranks) != 1)} {few}"


def runs_of(paths: Sequence[Path]) -> list[list[Path]]:
    """The traces run by run: those of ranks that follow one another, until a rank comes again, are one run's."""
    runs: list[list[Path]] = []
    seen: set[int] = set()
    for path in paths:
        rank = _rank_of(path)
        if rank is None or rank in seen or not seen:
            runs.append([])
            seen = set()
        runs[-1].append(path)
        seen |= set() if rank is None else {rank}
    return runs


def _rank_of(path: Path) -> int | None:
    """What the first line says; what is wrong with it is said when the trace is opened."""
    with suppress(OSError, ValueError, msgspec.MsgspecError):
        with open_file(path) as file:
            header = decode(file.read(1 << 16).partition(b"\n")[0])
        return header.rank if isinstance(header, Header) else None
    return None
