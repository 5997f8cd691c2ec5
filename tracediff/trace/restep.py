"""A trace cut into other steps: what an engine computed token by token, as one that took them at once would record it.

A value belongs to a position of the sequence, not to the pass that computed it. So a prefill and a decode, or two ways
to cut a prompt into chunks, become comparable op by op: the rows of each op are put together, or apart, as the steps of
another trace want them.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from tracediff.errors import MismatchError
from tracediff.trace.format import OpRecord, Step
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

_Places = list[tuple[int, int]]  # of each position: the step, and the token's index in it


def passes(trace: Trace) -> str:
    """How the sequence was fed, in words."""
    sizes = [len(step.tokens) for step in trace.steps.values()]
    if len(sizes) == 1:
        return f"one pass of {sizes[0]} tokens"
    if len(set(sizes)) == 1:
        return f"{len(sizes)} passes of {sizes[0]} token{'s' * (sizes[0] > 1)} each"
    if len(set(sizes[1:])) == 1 and len(sizes) > 2:
        return f"one pass of {sizes[0]} tokens and {len(sizes) - 1} of {sizes[1]}"
    few = [*map(str, sizes)] if len(sizes) < 6 else [*map(str, sizes[:4]), "..."]
    return f"passes of {', '.join(few)} tokens"


def restep(trace: Trace, like: Trace, out: Path) -> list[str]:
    """Write to `out` what `trace` holds, in the steps of `like`; returns what could not be taken along, in words.

    Positions are those of `like`. Keys that a pass did not see are zeros in its scores and probabilities: the mask
    hides them. Raises MismatchError where the two were not fed the same tokens.
    """
    _same_tokens(like, trace)
    places = [(step.step, row) for step in trace.steps.values() for row in range(len(step.tokens))]
    first = next(iter(trace.steps))
    names = dict.fromkeys(chain((r.op for r in trace.step_ops(first)), (op for _, op in trace.ops)))
    header, dropped, at = trace.header, set(), 0
    with TraceWriter(out, header.engine, header.arch, header.model, header.weights) as writer:
        for weight in trace.weights.values():
            if weight.dtype:
                writer.weight(weight.weight, trace.stored(weight), weight.dtype)
        for step in like.steps.values():
            writer.step(step.step, step.tokens, step.positions)
            here, at = places[at : at + len(step.tokens)], at + len(step.tokens)
            for name in names:
                if not _gather(trace, name, step, here, at, writer):
                    dropped.add(name)
    if dropped.issuperset(names):
        raise MismatchError(
            f"{trace.path}: no op of it has data by rows of tokens: statistics cannot be cut into other steps. Record "
            "data."
        )
    return [f"{len(dropped)} ops have other rows than tokens, or no data: {', '.join(sorted(dropped)[:3])}"] * any(
        dropped
    )


def _same_tokens(a: Trace, b: Trace) -> None:
    if a.tokens == b.tokens:
        return
    unequal = (i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
    at = next(unequal, min(len(a.tokens), len(b.tokens)))
    raise MismatchError(
        f"{a.path} was fed {len(a.tokens)} tokens and {b.path} {len(b.tokens)}; from index {at} on they differ. One "
        "engine can be held against itself on the same tokens alone: feed both runs the ids of one."
    )


def _gather(trace: Trace, name: str, step: Step, places: _Places, n_keys: int, writer: TraceWriter) -> bool:
    """Write the op's rows at these places; False where they cannot be told apart."""
    records = {number: trace.ops.get((number, name)) for number, _ in places}
    pieces = list(_pieces(trace, records, places, n_keys))
    if not pieces:
        return all(record is None for record in records.values())  # of this step nothing was recorded
    rows = [row for row, _ in pieces]
    record = next(record for record in records.values() if record)
    values = np.stack([values for _, values in pieces], record.token_axis)
    assert record.dtype
    writer.op(step.step, name, values, record.dtype, None if len(rows) == len(places) else tuple(rows))
    return True


def _pieces(
    trace: Trace, records: dict[int, OpRecord | None], places: _Places, n_keys: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Each row that was recorded: its index among the places, and its values without the token's axis."""
    stored: dict[int, np.ndarray] = {}
    for index, (number, row) in enumerate(places):
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
        yield index, _keys(values, n_keys) if record.token_axis else values


def _keys(values: np.ndarray, n: int) -> np.ndarray:
    """Scores of one query, [heads, keys], for `n` keys."""
    lacking = n - values.shape[1]
    return values[:, :n] if lacking <= 0 else np.pad(values, ((0, 0), (0, lacking)))
