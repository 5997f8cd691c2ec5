"""What is measured of each pair of records: the statistics of both sides, and their drift. One pair at a time."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from tracediff.compare.align import Pair
from tracediff.compare.metrics import compare_values, drift_of_statistics, statistics_of
from tracediff.names import is_choice, kind_of, layer_of
from tracediff.result import Drift, OpResult, Statistics, Worst
from tracediff.trace.format import OpRecord, Rows
from tracediff.trace.reader import Trace
from tracediff.trace.sketch import apart, sketch


def measure_pairs(pairs: Iterable[Pair], r: Trace, c: Trace, tolerance: Callable[[str], float]) -> Iterator[OpResult]:
    """Drift of every pair. One at a time: threads would fight over the interpreter more than they compute."""
    return (_measure_pair(pair, r, c, tolerance(pair.op)) for pair in pairs)


def _measure_pair(pair: Pair, r: Trace, c: Trace, tolerance: float) -> OpResult:
    where = (pair.op, pair.step, layer_of(pair.op), kind_of(pair.op))
    if pair.problem or not pair.reference or not pair.candidate:
        reference = record_statistics(pair.reference, r) if pair.reference else None
        candidate = record_statistics(pair.candidate, c) if pair.candidate else None
        return OpResult(*where, "drift" if pair.misshapen else "unmatched", reference, candidate, note=pair.problem)
    if is_choice(pair.op):
        return OpResult(*where, "ok", record_statistics(pair.reference, r), record_statistics(pair.candidate, c))
    reference, candidate, drift = _drift(pair.reference, pair.candidate, r, c, pair.rows)
    if drift is None and pair.reference.has_statistics and pair.candidate.has_statistics:
        return OpResult(*where, "unmatched", reference, candidate, note="no statistic is on both sides")
    return OpResult(*where, "ok", reference, candidate, drift, tolerance)


def _drift(a: OpRecord, b: OpRecord, r: Trace, c: Trace, rows: Rows) -> tuple[Statistics, Statistics, Drift | None]:
    if a.has_data and b.has_data:
        has_first = a.token_axis == 0 and (rows is None or rows[0] == 0)
        x, y = r.by_slice(a, rows), c.by_slice(b, rows)
        reference, candidate, drift = compare_values(x, y, _hidden(a, r, rows), has_first)
        worst = replace(drift.worst, at=a.place(drift.worst.at, rows))
        return reference, candidate, replace(drift, worst=worst)
    reference, candidate = record_statistics(a, r, rows), record_statistics(b, c, rows)
    size = (a if a.rows == rows else b).size
    sketched = _drift_of_sketches(a, b, r, c, rows)
    return reference, candidate, sketched or drift_of_statistics(reference, candidate, size)


def _drift_of_sketches(a: OpRecord, b: OpRecord, r: Trace, c: Trace, rows: Rows) -> Drift | None:
    """What two sketches tell, one of them made of values where it is not recorded; None where there are none."""
    if not (a.sketch or b.sketch) or not all(x.size and (x.has_data or x.sketch) for x in (a, b)):
        return None
    axis, hidden = a.token_axis, _hidden(a, r, rows)
    x, y = (record.sketch or sketch(trace.values(record, rows), axis, hidden) for record, trace in ((a, r), (b, c)))
    n_rows = a.shape[axis] if rows is None else len(rows)
    found = apart(x, y, n_rows)
    if found is None:
        return None
    nmse, cosine, first, others = found
    has_first = axis == 0 and n_rows > 1 and (rows is None or rows[0] == 0)
    of = (record_statistics(a, r, rows), record_statistics(b, c, rows))
    lost = len({(one.nan, one.inf) for one in of}) > 1
    apart_by = Drift(math.inf if lost else nmse, cosine, math.nan, Worst((), math.nan, math.nan), of_sketch=True)
    return replace(apart_by, first_token_nmse=first, other_tokens_nmse=others) if has_first else apart_by


def record_statistics(record: OpRecord, trace: Trace, rows: Rows = None) -> Statistics:
    """As recorded, or computed from the data: of all that the record holds, or of these tokens alone."""
    rows = rows or record.rows
    if not record.has_data or (not record.lacking and rows == record.rows):
        return Statistics(record.min, record.max, record.mean, record.rms, record.nan, record.inf)
    return statistics_of(trace.by_slice(record, rows), _hidden(record, trace, rows))


def _hidden(record: OpRecord, trace: Trace, rows: Rows) -> np.ndarray | None:
    """Which scores the causal mask will hide, [T, S]; None for other ops."""
    if kind_of(record.op) != "scores" or len(record.shape) != 3:
        return None
    queries = np.array(trace.steps[record.step].positions)
    keys = trace.positions_until(record.step)
    if record.whole_shape(len(queries))[1:] != (len(queries), len(keys)):
        return None
    return keys[None, :] > queries[slice(None) if rows is None else [*rows], None]
