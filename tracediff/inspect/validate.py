"""All that is wrong with a trace, line by line: what breaks the format, what is no trace of the model, and what looks
like a mistake of whoever wrote it. Judging the numbers themselves is the work of `check` and `compare`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tracediff.compare.metrics import statistics_of
from tracediff.english import few
from tracediff.errors import TraceError
from tracediff.inspect.against_model import against_model, names
from tracediff.names import kind_of, split
from tracediff.result import Remark, Statistics, Validation
from tracediff.trace.format import Values
from tracediff.trace.misread import misread
from tracediff.trace.reader import Trace
from tracediff.trace.runs import files_of_run, together

if TYPE_CHECKING:
    from tracediff.model.graph import Graph

_NOT_FINITE = "Is that memory written before it is recorded? If the engine computes it: the first of them is the place."
_ZERO = "Is it recorded before the kernel has run, or from a buffer that nobody fills?"
_LISTED, _OF_A_SORT = 1000, 100  # findings
# Relative to the largest value: what sums in float32, or a rounding on the way to the file, may make of a statistic.
_SAME = {"f64": 1e-3, "f32": 1e-3, "f16": 4e-3, "bf16": 1.6e-2}
# Ops that engines compute in the buffer of the op before.
_IN_PLACE = {
    "attn_q": "attn_q_rope", "attn_k": "attn_k_rope", "attn_output": "attn_residual", "ffn_gate": "ffn_act",
    "ffn_down": "ffn_residual",
}  # fmt: skip


def validate(paths: Path | Sequence[Path], model: Path | None = None) -> Validation:
    """Everything found in a trace, or in those of all ranks of a run, by line.

    Raises TraceError if one cannot be opened, ModelError for the model.
    """
    graphs: list[Graph] = []
    if model:
        from tracediff.model.families import load_graph
        from tracediff.model.latent import expanded

        own = load_graph(model)
        graphs = [graph for graph in (own, expanded(own)) if graph]
    found, traces = _Found(), []
    for path in files_of_run(paths):
        trace, problems = Trace.lenient(path)
        remarks = chain((Remark(p.line, "violation", p.what, p.then) for p in problems), _of_file(trace))
        found.add(map(partial(_on_rank, trace), remarks))
        traces.append(trace)
    whole = traces[0] if len(traces) == 1 else _together(traces, found)
    if whole and whole.is_one_of_several:
        what = f"rank {whole.header.rank} of {whole.header.ranks}: parts are held to no model, nor to one another"
        found.add([Remark(1, "warning", what, "Give the traces of all ranks.")])
    elif whole and (whole.ops or whole.weights):
        shown = [graph.with_scores(op for _, op in whole.ops) for graph in graphs]
        found.add(against_model(whole, shown) if shown else names(whole))
    listed = tuple(sorted(found.listed, key=lambda f: f.line))
    counts = found.counts["violation"], found.counts["warning"]
    last = whole or traces[0]
    return Validation(str(last.path), len(last.steps), len(last.ops), *counts, listed)


def _of_file(trace: Trace) -> Iterator[Remark]:
    """What a trace by itself shows, when its records have been read."""
    yield from chain(_steps(trace), _values(trace), _shared_bytes(trace), _recorded_late(trace))


def _on_rank(trace: Trace, remark: Remark) -> Remark:
    """With its rank, where the trace is one of several; its header is there when its lines are read."""
    rank = trace.header.rank
    return remark if rank is None else replace(remark, what=f"rank {rank}: {remark.what}")


def _together(traces: Sequence[Trace], found: "_Found") -> Trace | None:
    """The ranks' traces as one; None where they do not fit together, which is found."""
    try:
        return together(traces)
    except TraceError as error:
        found.add([Remark(1, "violation", str(error), "")])
        return None


class _Found:
    """All findings counted, and so many listed that a person may want to see them: the first of each sort."""

    def __init__(self) -> None:
        self.listed: list[Remark] = []
        self.counts: Counter[str] = Counter()
        self._sorts: Counter[tuple[str, str]] = Counter()

    def add(self, findings: Iterable[Remark]) -> None:
        for finding in findings:
            self.counts[finding.level] += 1
            sort = finding.sort if len(self.listed) < _LISTED else None
            if sort is not None and self._sorts[sort] < _OF_A_SORT:
                self._sorts[sort] += 1
                self.listed.append(finding)


def _steps(trace: Trace) -> Iterator[Remark]:
    following: dict[int, int] = {}  # of each sequence
    for number, step in trace.steps.items():
        if len(step.tokens) > 1 and not any(step.tokens):
            then = "Write the ids that the engine was fed: replay begins with them."
            yield Remark(trace.lines[number], "violation", f"all token ids of step {number} are 0", then)
        first = following.get(step.sequence, next(iter(step.positions), 0))
        expected = range(first, first + len(step.positions))
        if step.positions != tuple(expected):
            what = f"step {number} has positions {few(step.positions)}, where {few(expected)} follow"
            then = (
                "Every step goes on where the last ended, unless that is the engine's mistake. Where drafts were "
                'rejected the first line says "rollback":true.'
            )
            yield Remark(trace.lines[number], "warning", what, then)
        following[step.sequence] = expected.stop


def _records(trace: Trace) -> Iterator[tuple[int, str, Values]]:
    """Line, name and record of every weight and op."""
    yield from ((trace.lines[name], name, weight) for name, weight in trace.weights.items())
    yield from ((trace.lines[key], key[1], op) for key, op in trace.ops.items())


def _values(trace: Trace) -> Iterator[Remark]:
    for line, name, record in _records(trace):
        if record.has_data and record.size:
            yield from _data(line, name, record, trace.values(record))
        elif record.nan or record.inf:
            yield Remark(line, "violation", f"{name}: {record.nan} NaN, {record.inf} Inf", _NOT_FINITE)
        elif record.rms == 0 and not name.endswith(".bias") and not (record.shard and record.shard.sum):
            yield Remark(line, "violation", f"{name}: all values are 0", _ZERO)


def _data(line: int, name: str, record: Values, values: np.ndarray) -> Iterator[Remark]:
    found = statistics_of(values)
    scores = kind_of(name) == "scores"
    if found.nan or found.inf:
        what = f"{name}: {found.nan} NaN, {found.inf} Inf among {record.size:,} values"
        masked = scores and not found.nan
        then = "Scores are recorded before the mask." if masked else _NOT_FINITE
        yield Remark(line, "warning" if masked else "violation", what, then)
    elif found.rms == 0 and not name.endswith(".bias") and not (record.shard and record.shard.sum):
        yield Remark(line, "violation", f"{name}: all {record.size:,} values are 0", _ZERO)
    if record.dtype == "f32" and (looks := misread(values)):
        yield Remark(line, "violation", f"{name}: {looks[0]}, not like f32", looks[1])
    if record.has_statistics and not scores:  # of scores some leave out what the mask will hide
        keys = ("min", "max", "mean", "rms", "nan", "inf")
        wrong = [key for key in keys if not _agree(record, found, key)]
        said = ", ".join(f"{key} {getattr(record, key):.6g} (it is {getattr(found, key):.6g})" for key in wrong)
        if wrong:
            what = f"{name}: the statistics are not those of the data: {said}"
            then = "Take both from the same buffer at the same time, and check offset and dtype."
            yield Remark(line, "violation", what, then)


def _agree(record: Values, found: Statistics, key: str) -> bool:
    said, is_ = getattr(record, key), getattr(found, key)
    if key in ("nan", "inf"):
        return bool(said == is_)
    if said is None or found.min is None or found.max is None:
        return True
    return math.isclose(said, is_, abs_tol=_SAME[record.dtype or "f32"] * max(abs(found.min), abs(found.max)))


def _shared_bytes(trace: Trace) -> Iterator[Remark]:
    first: dict[int, str] = {}
    for (step, op), record in trace.ops.items():
        if record.offset is None or not record.size or record.strides:
            continue
        if record.offset in first:
            what = f"{op}: begins at byte {record.offset:,}, where {first[record.offset]} begins"
            yield Remark(trace.lines[step, op], "warning", what, "Add the size of what was written to the offset.")
        first.setdefault(record.offset, op)


def _recorded_late(trace: Trace) -> Iterator[Remark]:
    """Values that are those of the op after: in both records, what that made of the buffer."""
    for (step, op), record in trace.ops.items():
        layer, local = split(op)
        after = f"blk.{layer}.{_IN_PLACE.get(local)}"
        other = trace.ops.get((step, after))
        if other is None or not record.has_data or not other.has_data or record.size != other.size or not record.size:
            continue
        if after.endswith("_rope") and not any(trace.steps[step].positions):
            continue  # nothing is rotated at position 0
        values = trace.values(record)
        if np.count_nonzero(values) and np.array_equal(values.reshape(-1), trace.values(other).reshape(-1)):
            what = f"{op}: holds the values of {after}, one by one"
            then = "Is one computed in the buffer of the other? Record each before the next kernel runs."
            yield Remark(trace.lines[step, op], "warning", what, then)
