"""Foreign values of unknown names, found by what they are: no name that is not proved.

A value that equals one record of the reference, and no other, is that record. What differs from the reference, and
all that is computed from it, is found with the model (`following.py`). The rest stays unnamed, between its neighbours.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from tracediff.interchange.entry import Array, Entry
from tracediff.interchange.layouts import Layout, distance, floats, layouts
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

# NMSE up to which two values are the same one, by what they are stored in: bfloat16 rounds each op by 1e-6 and more.
EQUAL, EQUAL_BF16 = 1e-6, 1e-4
APART = 100.0  # the next record that a value might be is so many times further away, and not equal by itself
FEWEST = 16  # values: of fewer two may be equal by chance
_NEAR = 0.1  # the relative difference of their RMS up to which two values are looked at

How = Literal["named", "equal", "follows", "continues"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A foreign value of the step that names are found in."""

    name: str
    values: np.ndarray  # float64, as it comes
    equal: float
    rms: float


@dataclass(frozen=True, slots=True)
class Match:
    """What a foreign value is, and how it is known.

    It is `equal` to the reference's; or it `follows`: equals what the model makes of the values named before it; or
    what is computed from it `continues` only with it; or it was `named` by whoever made the file. `error` is the NMSE
    of what was found equal, `next` that of the nearest record besides; None where none is near.
    """

    name: str
    op: str
    how: How
    error: float
    layout: Layout
    next: float | None = None


@dataclass(slots=True)
class Found:
    """What is known so far of the values of one step, which stand in the order of the file."""

    candidates: Mapping[str, Candidate]
    taken: set[str]  # ops that other values of the file have by their names
    matches: dict[str, Match] = field(default_factory=dict)  # by op
    again: dict[str, str] = field(default_factory=dict)  # of values found a second time: the op
    _by_size: dict[int, list[Candidate]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for candidate in self.candidates.values():
            self._by_size.setdefault(candidate.values.size, []).append(candidate)

    def unnamed(self, size: int | None = None) -> list[Candidate]:
        """The values that have no name yet, in the order of the file; of one size where it is given."""
        named = {match.name for match in self.matches.values()} | {*self.again}
        of = self.candidates.values() if size is None else self._by_size.get(size, ())
        return [candidate for candidate in of if candidate.name not in named]

    def near(self, y: np.ndarray) -> Iterator[tuple[Candidate, float, Layout]]:
        """The unnamed values that may be Y: how far each is, in its best layout."""
        finite = y[np.isfinite(y)]
        if finite.size < FEWEST or finite.min() == finite.max():
            return
        size, masked = rms(y), finite.size < y.size
        for candidate in self.unnamed(y.size):
            if masked or abs(candidate.rms - size) <= _NEAR * size:
                yield candidate, *nearest(candidate, y)

    def add(self, match: Match) -> None:
        """Name a value; what has no name and the very same values is that value again."""
        self.matches[match.op] = match
        found = self.candidates[match.name]
        for other in self.unnamed(found.values.size):
            if math.isclose(other.rms, found.rms) and nearest(other, found.values)[0] == 0:
                self.again[other.name] = match.op

    def is_free(self, op: str) -> bool:
        """Whether no value has this op's name."""
        return op not in self.matches and op not in self.taken

    def ours(self, match: Match, shape: tuple[int, ...]) -> np.ndarray:
        """A named value as we have it."""
        return match.layout.ours(self.candidates[match.name].values, shape)


def rms(x: np.ndarray) -> float:
    """Over finite values."""
    finite = x[np.isfinite(x)]
    return float(np.sqrt(np.square(finite).mean())) if finite.size else 0.0


def nearest(candidate: Candidate, y: np.ndarray) -> tuple[float, Layout]:
    """How far a foreign value is from Y, in the layout in which it is nearest; the plainest of several."""
    found = [
        (distance(layout.ours(candidate.values, y.shape), y), layout)
        for layout in layouts(candidate.values.shape, y.shape)
    ]
    return min(found, key=lambda each: each[0])


def candidates(entries: Iterable[Entry]) -> dict[str, Candidate]:
    """The entries that hold floating point values, in their order."""
    found = {}
    for entry in entries:
        loaded = entry.load()
        if isinstance(loaded, Array) and (values := floats(loaded)) is not None:
            equal = EQUAL_BF16 if loaded.dtype == "bf16" else EQUAL
            found[entry.name] = Candidate(entry.name, values, equal, rms(values))
    return found


def by_reference(found: Found, reference: Trace, step: int) -> None:
    """Name what equals one record of the reference's step, and none else."""
    seen: dict[str, list[tuple[float, str, Layout]]] = {}
    for record in reference.step_ops(step):
        if record.has_data and record.rows is None:
            y = reference.values(record).astype(np.float64)
            for candidate, error, layout in found.near(y):
                seen.setdefault(candidate.name, []).append((error, record.op, layout))
    for name, near in seen.items():
        (error, op, layout), *others = sorted(near, key=lambda each: each[0])
        equal, further = found.candidates[name].equal, others[0][0] if others else None
        if error > equal or name in found.again or not found.is_free(op):
            continue
        if further is None or further > max(equal, APART * error):
            found.add(Match(name, op, "equal", error, layout, further))


def in_order(found: Found, order: Mapping[str, int]) -> bool:
    """Whether the file has its values as they were computed: of those named, hardly any comes before one of another
    layer that it should come after. Engines compute Q, K and V, gate and up in any order.
    """
    places = [order[match.op] for match in _as_in_the_file(found) if match.op in order]
    wrong = sum(b < a - _SWAPPED for a, b in pairwise(places))
    return bool(places) and not wrong


_SWAPPED = 8  # ops of a layer: how far two that do not depend on one another may stand apart


def _as_in_the_file(found: Found) -> list[Match]:
    by_name = {match.name: match for match in found.matches.values()}
    return [by_name[name] for name in found.candidates if name in by_name]


def neighbours_of(found: Found, name: str) -> tuple[str | None, str | None]:
    """The named values before and after an unnamed one in the file."""
    names = [*found.candidates]
    by_name = {match.name: match.op for match in found.matches.values()} | found.again
    at = names.index(name)
    before = next((by_name[n] for n in reversed(names[:at]) if n in by_name), None)
    after = next((by_name[n] for n in names[at + 1 :] if n in by_name), None)
    return before, after


def between(found: Found, name: str, records: Iterable[OpRecord]) -> list[str]:
    """The ops of the reference that an unnamed value may be by its place and size, as the reference ran them."""
    before, after = neighbours_of(found, name)
    ops = [record.op for record in records]
    low = ops.index(before) + 1 if before in ops else 0
    high = ops.index(after) if after in ops else len(ops)
    size = found.candidates[name].values.size
    return [r.op for r in [*records][low:high] if r.size == size and found.is_free(r.op)]
