"""Several sequences in one trace: a step of several is split into one of each, so that all else sees one at a time.

No value is moved: the rows of a sequence, which lie side by side or evenly spaced, are a record of their own with
another offset and other strides.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul

import msgspec

from tracediff.names import StepOf, plain_step
from tracediff.trace.format import STORAGE, OpRecord, Step

_SEQUENCES, _STEPS = 1 << 20, 1 << 32  # which StepOf tells apart
SequencePart = tuple[Step, tuple[int, ...]]  # a step of one sequence, and its tokens' indices in the step of the file


def parts_of(step: Step) -> list[SequencePart]:
    """The step of each sequence that it has tokens of, in the order of their numbers."""
    if step.sequences is None:
        number = StepOf(step.step, step.sequence) if step.sequence else step.step
        return [(msgspec.structs.replace(step, step=number), tuple(range(len(step.tokens))))]
    return [(_step_of(step, sequence), _rows_of(step, sequence)) for sequence in sorted({*step.sequences})]


def _rows_of(step: Step, sequence: int) -> tuple[int, ...]:
    return tuple(row for row, of in enumerate(step.sequences or ()) if of == sequence)


def _step_of(step: Step, sequence: int) -> Step:
    rows = _rows_of(step, sequence)
    tokens, positions = (tuple(x[row] for row in rows if row < len(x)) for x in (step.tokens, step.positions))
    return Step(StepOf(step.step, sequence), tokens, positions, sequence)


def begun_again(steps: Mapping[int, Step]) -> Iterator[tuple[int, int, int]]:
    """Steps in which a sequence is fed anew from its first token on, as after a preemption, or by an engine without a
    cache: the sequence, the step's key, and a number that no other has. Tokens that are all one tell nothing: they may
    as well go on, at wrong positions.
    """
    free = max((step.sequence for step in steps.values()), default=0) + 1
    fed: dict[int, list[int]] = {}
    for at, step in steps.items():
        before, tokens = fed.setdefault(step.sequence, []), [*step.tokens]
        n = min(len(tokens), len(before))
        is_anew = n > 0 and tokens[:n] == before[:n] and step.positions == (*range(len(tokens)),)
        if is_anew and len({*tokens}) > 1 and free < _SEQUENCES and plain_step(at) < _STEPS:
            yield step.sequence, at, free
            free, before[:] = free + 1, []
        before += tokens


def rolled_back(steps: Mapping[int, Step]) -> Iterator[tuple[int, int, Step]]:
    """Steps that begin at an earlier position than their sequence had reached: the step's key, how many tokens are kept
    before it, and the step as the first of a sequence of its own, which has these too.
    """
    free = max((step.sequence for step in steps.values()), default=0) + 1
    fed: dict[int, list[int]] = {}
    called: dict[int, int] = {}
    for at, step in steps.items():
        before, n = fed.setdefault(step.sequence, []), step.positions[0]
        if 0 < n < len(before) and free < _SEQUENCES and plain_step(at) < _STEPS:
            del before[n:]
            called[step.sequence], free = free, free + 1
            whole = (*before, *step.tokens), (*range(n), *step.positions)
            yield at, n, Step(step.step, *whole, called[step.sequence])
        elif step.sequence in called:
            yield at, 0, msgspec.structs.replace(step, sequence=called[step.sequence])
        before += step.tokens


def split(record: OpRecord, parts: Sequence[SequencePart]) -> Iterator[OpRecord]:
    """The record of each sequence; raises ValueError, which says why, for one that cannot be split."""
    if record.sequence is not None:
        mine = [step for step, _ in parts if step.sequence == record.sequence]
        if not mine:
            raise ValueError(f"op {record.op!r} is of sequence {record.sequence}, of which the step has no token")
        yield msgspec.structs.replace(record, step=mine[0].step)
        return
    if len(parts) == 1:
        yield msgspec.structs.replace(record, step=parts[0][0].step)
        return
    n_tokens = sum(len(rows) for _, rows in parts)
    held = record.rows or range(n_tokens)
    if record.token_axis or record.shape[:1] != (len(held),):
        raise ValueError(
            f"op {record.op!r} has no row for each of the {len(held)} tokens of several sequences. {_APART}"
        )
    if not record.has_data:
        raise ValueError(f"op {record.op!r} has statistics over the tokens of several sequences. {_APART}")
    for step, rows in parts:
        places = [place for place, row in enumerate(held) if row in {*rows}]
        if places:
            among = tuple(rows.index(held[place]) for place in places)
            yield _cut(record, step, places, None if len(among) == len(rows) else among)


_APART = 'Write one record of each: "sequence":K'


def _cut(record: OpRecord, step: Step, places: Sequence[int], rows: tuple[int, ...] | None) -> OpRecord:
    """The rows at these places of a record as one of a step, of which they are the tokens `rows`."""
    gap = places[1] - places[0] if len(places) > 1 else 1
    if [*places] != [*range(places[0], places[-1] + 1, gap)]:
        raise ValueError(
            f"op {record.op!r}: the tokens of sequence {step.sequence} lie neither side by side nor evenly spaced. "
            f"{_APART}"
        )
    assert record.dtype
    assert record.offset is not None
    inner = _c_order(record.shape)
    first, *others = record.strides or inner
    shape = (len(places), *record.shape[1:])
    return OpRecord(
        step=step.step,
        op=record.op,
        rows=rows,
        shape=shape,
        shard=record.shard,
        dtype=record.dtype,
        offset=record.offset + places[0] * first * STORAGE[record.dtype].itemsize,
        strides=None if record.strides is None and gap == 1 else (first * gap, *others),
    )


def _c_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*accumulate(shape[:0:-1], mul, initial=1),)[::-1] if math.prod(shape) else (1,) * len(shape)
