"""The traces of an engine's ranks opened as one: parts put together when their values are asked for.

A record of a rank is a part along an axis, a term of a sum, or, without a shard, a copy of the whole. What ranks hold
copies of may differ, by a mistake or by roundings. So there may be several sides to one run: each has the copies of
ranks that agree, and answers for the parts that these hold. Where all agree there is one side, and nothing that
reads it knows of ranks.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tracediff.english import few
from tracediff.errors import TraceError
from tracediff.inputs import fitting
from tracediff.names import kind_of
from tracediff.trace.data import Stored
from tracediff.trace.format import STORAGE, OpRecord, Rows, Shard, Values, Weight, to_float
from tracediff.trace.reader import Index, Trace
from tracediff.trace.shards import Part, chosen, digest, merged, wrong

Key = tuple[int, str] | str  # of an op (step, name), or of a weight


class Ranks(Trace):
    """Several ranks' `traces` as one. `members` are those whose copies it has, and whose parts it answers for."""

    members: tuple[int, ...]

    def __init__(self, traces: dict[int, Trace], members: Sequence[int]) -> None:
        self.traces = traces
        first = next(iter(traces.values()))
        self.path = _path_of([trace.path for trace in traces.values()])
        self.header = msgspec.structs.replace(first.header, rank=None, ranks=None)
        self.cut = next((f"rank {rank}: {trace.cut}" for rank, trace in traces.items() if trace.cut), None)
        self.begun_again, self.rolled_back = first.begun_again, first.rolled_back
        self.steps = min((trace.steps for trace in traces.values()), key=len)
        self.lines = {key: line for trace in reversed(traces.values()) for key, line in trace.lines.items()}
        self._parted: int | None = None  # where in the order of all keys copies begin to differ
        self._all: dict[Key, list[Part]] = {}
        for rank, trace in traces.items():
            held: dict[Any, Values] = {**trace.weights, **{k: r for k, r in trace.ops.items() if k[0] in self.steps}}
            for key, record in held.items():
                self._all.setdefault(key, []).append(Part(rank, trace, record))
        self._placed()
        self._order = {key: place for place, key in enumerate(self._all)}
        self._join(members)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process the files are opened again."""
        return _reopened, ({rank: trace.path for rank, trace in self.traces.items()}, self.members, self._parted)

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
        self._parted = next((i for key, i in self._order.items() if self._differs(key, digests)), None)
        return [self.of(ranks) for ranks, _ in signs]

    def _differs(self, key: Key, digests: dict[int, dict[tuple[Key, Shard | None], bytes]]) -> bool:
        of = {(part.shard, digests[part.rank].get((key, part.shard))) for part in self._all[key]}
        return len(of) > len({shard for shard, _ in of})

    @property
    def written(self) -> list[Trace]:
        """As of a trace."""
        return [*self.traces.values()]

    @property
    def everyone(self) -> Sequence[int]:
        """All ranks of the run."""
        return [*self.traces]

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
            differ = self._parted is not None and not of_tokens and self._order[_key(record)] > self._parted
            return [] if differ or mine[:1] != parts[:1] else None
        if {part.start for part in mine} == {part.start for part in parts}:
            return None
        return [part.at for part in mine]

    def values(self, record: Values, rows: Rows = None, channels: slice | None = None) -> np.ndarray:
        """As of a trace."""
        parts = self._chosen[_key(record)]
        if parts[0].shard is None:
            return parts[0].trace.values(parts[0].record, rows, channels)
        if channels is not None and len(record.shape) == 2 and parts[0].shard.axis == 1:  # logits, a few columns
            cuts = ((part, part.cut(channels)) for part in parts)
            return np.concatenate([p.trace.values(p.record, rows, cut) for p, cut in cuts if cut], 1)
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
            lacking = wrong(parts)
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
        self._chosen = {key: [*chosen(parts, self.members)] for key, parts in self._all.items()}
        self.weights, self.ops = {}, {}
        for key, parts in self._chosen.items():
            match merged(parts):
                case Weight() as weight:
                    self.weights[weight.weight] = weight
                case OpRecord() as record if not isinstance(key, str):
                    self.ops[key] = record
        self._index()

    def _digests(self) -> dict[int, dict[tuple[Key, Shard | None], bytes]]:
        """Of each rank what tells its copies from others', of all that several ranks hold."""
        found: dict[int, dict[tuple[Key, Shard | None], bytes]] = {rank: {} for rank in self.traces}
        for key, parts in self._all.items():
            for part in parts:
                if sum(part.shard == other.shard for other in parts) > 1:
                    found[part.rank][key, part.shard] = digest(part)
        return found


def _path_of(paths: Sequence[Path]) -> Path:
    """What opens all of these: a pattern, as rank*.trace, where one fits them alone."""
    first = paths[0]
    names = [path.name for path in paths]
    begin, end = (_common([name[::way] for name in names])[::way] for way in (1, -1))
    pattern = first.with_name(f"{begin}*{end}")
    others = f" and {len(paths) - 1} other{'s' * (len(paths) > 2)}" if paths[1:] else ""
    return pattern if {*fitting(pattern)} == {*paths} else first.with_name(f"{first.name}{others}")


def _common(names: Sequence[str]) -> str:
    """What all begin with."""
    alike = takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike)


def _reopened(paths: dict[int, Path], members: tuple[int, ...], parted: int | None) -> Ranks:
    again = Ranks({rank: Trace(path) for rank, path in paths.items()}, members)
    again._parted = parted
    return again


def _key(record: Values) -> Key:
    return record.weight if isinstance(record, Weight) else (record.step, record.op)  # type: ignore[attr-defined]


def on_ranks(ranks: Sequence[int]) -> str:
    """These ranks in words."""
    return f"on rank{'s' * (len(ranks) != 1)} {few(ranks, 8)}"
