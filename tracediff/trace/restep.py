"""A trace cut into other steps: what an engine computed token by token, as one that took them at once would record it.

A value belongs to a position of a sequence, not to the pass that computed it. So a prefill and a decode, chunks, or a
sequence alone and in a batch become comparable op by op: the rows of each op are put together, or apart, as the steps
of another trace want them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from tracediff.errors import MismatchError
from tracediff.names import axes_of
from tracediff.trace.format import OpRecord, Step
from tracediff.trace.reader import Trace
from tracediff.trace.ways import Fed, Match, fed_to, match
from tracediff.trace.writer import TraceWriter

_Place = tuple[int, int]  # a token: its step, and index in that
# A step to be written, where the values of its tokens are, and how many positions are visible in it.
_Planned = tuple[Step, list[_Place | None], int]


def restep(trace: Trace, like: Trace, out: Path) -> list[str]:
    """Write to `out` what `trace` holds, in the steps of `like`; returns what could not be taken along, in words.

    Positions are those of `like`. Keys that a pass did not see are zeros in its scores and probabilities: the mask
    hides them. Raises MismatchError where nothing of it can be cut so, and as `ways.match` does.
    """
    theirs, ours = fed_to(trace), fed_to(like)
    return _write(out, trace, [*_plan(like, [(ours[m.ours], theirs[m.theirs], m) for m in match(like, trace)])])


def matched(trace: Trace, other: Trace, folder: Path) -> list[Path]:
    """Write to `folder` the sequences of `trace` that the other has too, without the steps after the last of both: of
    several ranks a trace of each.

    Nothing is written where that is all of it.
    """
    own, matches = fed_to(trace), match(trace, other)
    ends = {one.ours: trace.steps[own[one.ours].at(one.alike[-1])[0]] for one in matches}
    if all(step.sequence in ends and at <= ends[step.sequence].step for at, step in trace.steps.items()):
        return []
    stops = {sequence: own[sequence].begins[step.step] + len(step.tokens) for sequence, step in ends.items()}
    kept = [(own[m.ours], own[m.ours], replace(m, alike=range(own[m.ours].first, stops[m.ours]))) for m in matches]
    planned, outs = [*_plan(trace, kept)], []
    for number, one in enumerate(trace.written):
        outs.append(folder / f"candidate{number}.trace")
        _write(outs[-1], one, planned)
    return outs


def _plan(like: Trace, pairs: Iterable[tuple[Fed, Fed, Match]]) -> Iterator[_Planned]:
    """The steps of `like`, and the places in the other of what it was fed too."""
    for mine, other, one in pairs:
        for number, begin in mine.begins.items():
            step = like.steps[number]
            positions = range(begin, begin + len(step.tokens))
            places = [other.at(position) if position in one.alike else None for position in positions]
            if any(places):
                yield step, places, positions.stop - min(mine.first, other.first)


def _write(out: Path, trace: Trace, planned: Sequence[_Planned]) -> list[str]:
    first = next(iter(trace.steps))
    names = dict.fromkeys(chain((r.op for r in trace.step_ops(first)), (op for _, op in trace.ops)))
    dropped = set[str]()
    with TraceWriter.like(out, trace.header) as writer:
        for weight in trace.weights.values():
            if weight.dtype:
                writer.weight(weight.weight, trace.stored(weight), weight.dtype, weight.shard)
        for step, places, n_keys in planned:
            writer.step(step.step, step.tokens, step.positions, (step.sequence,) * len(step.tokens))
            dropped |= {name for name in names if not _gather(trace, name, step, places, n_keys, writer)}
    if dropped.issuperset(names):
        raise MismatchError(
            f"{trace.path}: no op of it has data by rows of tokens: statistics cannot be cut into other steps. Record "
            "data."
        )
    return [f"{len(dropped)} ops have other rows than tokens, or no data: {', '.join(sorted(dropped)[:3])}"] * any(
        dropped
    )


def _gather(
    trace: Trace, name: str, step: Step, places: Sequence[_Place | None], n_keys: int, writer: TraceWriter
) -> bool:
    """Write the op's rows at these places; False where they cannot be told apart."""
    records = {at: trace.ops.get((at, name)) for at, _ in filter(None, places)}
    pieces = list(_pieces(trace, records, places, n_keys))
    if not pieces:
        return all(record is None for record in records.values())  # of this step nothing was recorded
    rows = [row for row, _ in pieces]
    record = next(record for record in records.values() if record)
    values = np.stack([values for _, values in pieces], record.token_axis)
    assert record.dtype
    held = None if len(rows) == len(places) else tuple(rows)
    writer.op(step.step, name, values, record.dtype, held, shard=record.shard)
    return True


def _pieces(
    trace: Trace, records: dict[int, OpRecord | None], places: Sequence[_Place | None], n_keys: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Each row that was recorded: its index among the places, and its values without the token's axis."""
    stored: dict[int, np.ndarray] = {}
    for index, place in enumerate(places):
        if place is None:
            continue
        number, row = place
        record = records[number]
        if record is None or not record.has_data or not record.holds((row,)):
            continue
        n_tokens = len(trace.steps[number].tokens)
        if record.whole_shape(n_tokens)[record.token_axis] != n_tokens:
            continue
        if number not in stored:
            stored = {number: trace.stored(record)}  # one step at a time
        at = row if record.rows is None else record.rows.index(row)
        values = stored[number].take(at, record.token_axis)
        yield index, _keys(values, n_keys) if "key" in axes_of(record.op, len(record.shape)) else values


def _keys(values: np.ndarray, n: int) -> np.ndarray:
    """Scores of one query, [heads, keys], for `n` keys."""
    lacking = n - values.shape[1]
    return values[:, :n] if lacking <= 0 else np.pad(values, ((0, 0), (0, lacking)))
