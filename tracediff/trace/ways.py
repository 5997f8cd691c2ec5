"""Two ways of one engine over the same tokens: which sequences go together, at which positions, and what differs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tracediff.english import count, few
from tracediff.errors import MismatchError
from tracediff.trace.reader import Trace

RUN_TWICE = "the same way, run twice"


@dataclass(slots=True)
class Fed:
    """What a sequence was fed. Positions count from its first step's, whatever the engine said of the others: that it
    may have wrong.
    """

    first: int
    tokens: list[int] = field(default_factory=list)
    begins: dict[int, int] = field(default_factory=dict)  # of each step, its first position
    _places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def positions(self) -> range:
        """From the first to the last."""
        return range(self.first, self.first + len(self.tokens))

    @property
    def sizes(self) -> list[int]:
        """Tokens of each pass."""
        return [b - a for a, b in pairwise([*self.begins.values(), self.positions.stop])]

    def token(self, position: int) -> int:
        """The one at a position."""
        return self.tokens[position - self.first]

    def at(self, position: int) -> tuple[int, int]:
        """The step that fed it, and its index in that."""
        return self._places[position - self.first]

    def add(self, step: int, tokens: Sequence[int]) -> None:
        """The next pass."""
        self.begins[step] = self.positions.stop
        self._places += [(step, row) for row in range(len(tokens))]
        self.tokens += tokens


@dataclass(frozen=True, slots=True)
class Match:
    """A sequence of one trace and the one of the other that was fed the same: `ours` and `theirs`.

    `alike` are the positions that both were fed, with the same tokens before any other. `cached` are those that ours
    lacks before its first, and theirs has.
    """

    ours: int
    theirs: int
    alike: range
    cached: range
    whole: bool  # no token of those that both have differs


def fed_to(trace: Trace) -> dict[int, Fed]:
    """What each sequence was fed."""
    found: dict[int, Fed] = {}
    for number, step in trace.steps.items():
        found.setdefault(step.sequence, Fed(step.positions[0])).add(number, step.tokens)
    return found


def match(ours: Trace, theirs: Trace) -> list[Match]:
    """For each sequence of ours that of theirs with the same tokens; where none has all, with the same first ones.

    Raises MismatchError where nothing goes together, or embeddings differ where the tokens do not.
    """
    sides = fed_to(ours), fed_to(theirs)
    every = [[m for b in sides[1] if (m := _match(a, b, *sides))] for a in sides[0]]
    best = [max(found, key=lambda m: (m.whole, len(m.alike), m.ours == m.theirs)) for found in every if found]
    chosen = [m for m in best if m.whole] or best
    if not chosen:
        a, b = (next(iter(side.values())) for side in sides)
        both = _both(a, b)
        at = next((p for p in both if a.token(p) != b.token(p)), None)
        where = "no position is in both" if at is None else f"at position {at} they differ"
        raise MismatchError(
            f"{ours.path} was fed {len(a.tokens)} tokens and {theirs.path} {len(b.tokens)}; {where}. One engine can be "
            "held against itself on the same tokens alone: feed both runs the ids of one."
        )
    for one in chosen:
        _same_embeddings(ours, theirs, one, *sides)
    return chosen


def _both(a: Fed, b: Fed) -> range:
    return range(max(a.first, b.first), min(a.positions.stop, b.positions.stop))


def _match(a: int, b: int, ours: dict[int, Fed], theirs: dict[int, Fed]) -> Match | None:
    mine, other = ours[a], theirs[b]
    both = _both(mine, other)
    stop = next((p for p in both if mine.token(p) != other.token(p)), both.stop)
    alike = range(both.start, stop)
    cached = range(min(mine.first, other.first), mine.first)
    return Match(a, b, alike, cached, stop == both.stop) if alike else None


def _same_embeddings(ours: Trace, theirs: Trace, one: Match, a: dict[int, Fed], b: dict[int, Fed]) -> None:
    """Raises MismatchError where the same token has another embedding: the rows are shifted, or of another model."""
    for position in one.alike:
        rows = _embedding(ours, *a[one.ours].at(position)), _embedding(theirs, *b[one.theirs].at(position))
        x, y = rows
        if x is not None and y is not None and x.dtype == y.dtype and not np.array_equal(x, y):
            raise MismatchError(
                f"at position {position} {ours.path} and {theirs.path} were fed the same token, and their token_embd "
                "differs: the rows of one are shifted, or it is another model. Check which rows were recorded."
            )


def _embedding(trace: Trace, step: int, row: int) -> np.ndarray | None:
    """The bits of a token's row; None where it was not recorded."""
    record = trace.ops.get((step, "token_embd"))
    if record is None or not record.has_data or not record.holds((row,)) or len(record.shape) < 2:
        return None
    values = trace.values(record, (row,))
    return values.view(f"u{values.itemsize}")


# --- in words --------------------------------------------------------------------------------------------------------


def mode(ours: Trace, theirs: Trace) -> str:
    """What differs between the two ways, as people call it. Raises MismatchError as `match` does."""
    a, b = fed_to(ours), fed_to(theirs)
    found = dict.fromkeys(said for one in match(ours, theirs) for said in _differences(one, ours, theirs, a, b))
    return ", ".join(found) or RUN_TWICE


def _differences(one: Match, ours: Trace, theirs: Trace, a: dict[int, Fed], b: dict[int, Fed]) -> Iterator[str]:
    mine, other = a[one.ours], b[one.theirs]
    if not one.whole:
        yield f"causality: other tokens from position {one.alike.stop} on, which change nothing before it"
    if mine.first != other.first:
        yield f"prefix cache: positions below {max(mine.first, other.first)} from a cache against computed"
    batched = _is_batched(ours, mine), _is_batched(theirs, other)
    if any(batched):
        of = one.ours if batched[0] else one.theirs
        yield "two batches" if all(batched) else f"alone against sequence {of} of a batch"
    if [*_begins(mine, one)] != [*_begins(other, one)]:
        sizes = sorted((mine.sizes, other.sizes), key=len)
        if len(sizes[0]) > 1:
            yield "other passes"
        else:
            yield "prefill against decode" if {*sizes[1][1:]} == {1} else "whole against chunks"


def _begins(fed: Fed, one: Match) -> Iterator[int]:
    return (begin for begin in fed.begins.values() if begin in one.alike and begin > one.alike.start)


def _is_batched(trace: Trace, fed: Fed) -> bool:
    """Whether any of its steps had tokens of other sequences: then these have its line of the file."""
    lines = {trace.lines[step] for step in fed.begins}
    return any(trace.lines[step] in lines for step in trace.steps.keys() - fed.begins.keys())


def passes(trace: Trace) -> str:
    """How each sequence was fed, in words."""
    said = {sequence: _passes(fed.sizes) for sequence, fed in fed_to(trace).items()}
    if len(said) == 1:
        return next(iter(said.values()))
    return few([f"sequence {sequence} in {words}" for sequence, words in said.items()], 4)


def _passes(sizes: list[int]) -> str:
    if len(sizes) == 1:
        return f"one pass of {sizes[0]} tokens"
    if len(set(sizes)) == 1:
        return f"{len(sizes)} passes of {count(sizes[0], 'token')} each"
    if len(set(sizes[1:])) == 1 and len(sizes) > 2:
        return f"one pass of {sizes[0]} tokens and {len(sizes) - 1} of {sizes[1]}"
    return f"passes of {few(sizes, 5 if len(sizes) < 6 else 4)} tokens"
