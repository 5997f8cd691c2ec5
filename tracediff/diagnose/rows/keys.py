"""Which cached key each score was made with, and which value each probability multiplies, where these were recorded
and other sequences', or none that was cached, are among them.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from tracediff.diagnose.rows.cached import cached_by_all
from tracediff.diagnose.rows.told import OF_ERROR, Row, Told
from tracediff.english import ranges
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.kinds.attention import scores, weighted_values
from tracediff.numerics.nmse import nmse
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_LOOK = "block tables and slots: where a step writes its keys and values, and which of them are read"
_READ = "{} are those of other positions or sequences"
_NOBODYS = "none that a step has cached whole in this layer"
_NUMBERS = 4  # scores that a key must have, or any key would do
_ROWS = 1 << 13  # of all sequences, with which each key is compared
_NONE = -1  # of a key that nobody cached


@dataclass(frozen=True, slots=True)
class _Read:
    """Which of `rows` was read at each position, `_NONE` where it is none of them; what they make."""

    rows: list[Row]
    which: list[int]
    made: Tensor


def told(replay: Replay, record: OpRecord, scheme: Scheme) -> Told | None:
    """Whose keys or values were read for a record of scores, or of what probabilities weigh; None where that cannot be
    told.
    """
    op = replay.graph[record.op]
    if len(replay.segment(record)) > 1 or record.rows is not None or op.function or op.rework:
        return None
    sought = {"scores": (_keys, "key"), "weighted_values": (_values, "value")}.get(op.kind)
    if sought is None:
        return None
    find, what = sought
    read = find(replay, record, scheme)
    return _said(read, replay, record, scheme, what) if read else None


def _keys(replay: Replay, record: OpRecord, scheme: Scheme) -> _Read | None:
    """Each key by its scores, where any is another."""
    known, op = replay.known(record, scheme), replay.graph[record.op]
    q, k = known.inputs[:2]
    n_values = known.recorded.shape[0] * known.recorded.shape[1]
    if n_values < _NUMBERS or not all(bool(x.isfinite().all()) for x in (known.recorded, q, k)):
        return None
    rows, (keys,) = cached_by_all(replay, record, [(op, 1)], (k,), _ROWS)
    every, made, wrong, which = scores(q, keys), known.exact.clone(), known.wrong, [*range(len(k))]
    first = len(k) - len(q)
    for key in range(len(k)):
        sees = slice(max(0, key - first), None)  # the queries that do
        y, right = (x[:, sees, key] for x in (known.recorded, known.exact))
        if y.numel() >= _NUMBERS and bool(wrong[:, sees, key].any()):
            left = (every[:, sees] - y[..., None]).square().sum((0, 1))
            which[key] = int(left.argmin())
            if not float(left[which[key]]) <= OF_ERROR * float((y - right).square().sum()):
                which[key] = _NONE
            else:
                made[:, sees, key] = every[:, sees, which[key]]
    return _Read(rows, which, made) if which != [*range(len(k))] else None


def _values(replay: Replay, record: OpRecord, scheme: Scheme) -> _Read | None:
    """The values in the slots whose keys the step's scores are made with."""
    known, op = replay.known(record, scheme), replay.graph[record.op]
    softmax = replay.graph.ops.get(op.inputs[0])
    of_scores = replay.trace.ops.get((record.step, softmax.inputs[0])) if softmax else None
    if of_scores is None or not of_scores.has_data or replay.graph[of_scores.op].kind != "scores":
        return None
    if len(replay.segment(of_scores)) > 1 or of_scores.rows is not None:
        return None
    plain = replay.scheme(of_scores, replay.plain_ones(of_scores)[0])
    read = _keys(replay, of_scores, plain)
    if read is None or _NONE in read.which:
        return None
    probs, v = known.inputs[:2]
    _, (values,) = cached_by_all(replay, record, [(op, 1)], (v,), _ROWS)
    made = weighted_values(probs, values[read.which])
    leaves_little = nmse(made, known.recorded) <= OF_ERROR * nmse(known.exact, known.recorded)
    return _Read(read.rows, read.which, made) if leaves_little else None


def _said(read: _Read, replay: Replay, record: OpRecord, scheme: Scheme, what: str) -> Told | None:
    own = replay.trace.steps[record.step].sequence
    moved: dict[int | None, tuple[list[int], list[int]]] = {}  # by the sequence, positions and what they have
    for (_, position), row in zip(read.rows, read.which, strict=False):
        sequence, of = (None, 0) if row == _NONE else read.rows[row]
        if row == _NONE or (own, position) != (sequence, of):
            here, there = moved.setdefault(sequence, ([], []))
            here.append(position)
            there.append(of)
    if moved.keys() <= {own}:  # in one sequence the solver finds the map, and says it in fewer words
        return None
    parts = []
    for sequence, (here, there) in moved.items():
        s = "s" * (len(here) > 1)
        whose = _NOBODYS if sequence is None else f"of position{s} {_listed(there)}"
        parts.append(
            f"the {what}{s} at position{s} {ranges(here)} {'are' if s else 'is'} {whose}"
            f"{f' of sequence {sequence}' * (sequence not in (None, own))}"
        )
    left = math.inf if _NONE in read.which else nmse(read.made, replay.known(record, scheme).recorded)
    return Told(", and ".join(parts), left, _READ.format(f"{what}s"), _LOOK)


def _listed(positions: list[int]) -> str:
    ascend = positions == sorted(positions) and len({*positions}) == len(positions)
    return ranges(positions) if ascend else ", ".join(map(str, positions))
