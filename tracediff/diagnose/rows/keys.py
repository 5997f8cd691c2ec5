"""Which cached key each score was made with, and which value each probability multiplies, where these were recorded
and other sequences', or none that was cached, are among them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
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
_READ = "{} are those of other positions, heads or sequences"
_NOBODYS = "none that a step has cached whole in this layer"
_NUMBERS = 4  # scores that a key must have, or any key would do
_NUMBERS_OF_A_HEAD = 3  # the same of a head of it, as far as a hundredth of its error
_ROWS = 1 << 13  # of all sequences, with which each key is compared
_MOST_PARTS = 4  # that are said
_NONE = -1  # of a key that nobody cached


@dataclass(frozen=True, slots=True)
class _Read:
    """Which of `rows` was read at each position, `_NONE` where it is none of them; what they make. Of those that are
    none as a whole the row and the head that each of its heads is, where all are some.
    """

    rows: list[Row]
    which: list[int]
    made: Tensor
    by_heads: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)


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
    first, by_heads, asked = len(k) - len(q), dict[int, list[tuple[int, int]]](), set[int]()
    for key in range(len(k)):
        sees = slice(max(0, key - first), None)  # the queries that do
        y, right = (x[:, sees, key] for x in (known.recorded, known.exact))
        if y.numel() < _NUMBERS:
            continue
        asked.add(key)
        if bool(wrong[:, sees, key].any()):
            left = (every[:, sees] - y[..., None]).square().sum((0, 1))
            which[key] = int(left.argmin())
            if float(left[which[key]]) <= OF_ERROR * float((y - right).square().sum()):
                made[:, sees, key] = every[:, sees, which[key]]
                continue
            which[key] = _NONE
            if heads := _by_heads(q[sees], keys, y, right):
                by_heads[key], made[:, sees, key] = heads
    if 2 * len(by_heads) > len(k):  # as where all lies in another layout: one cause, and no matter of single keys
        by_heads = {}
    if not by_heads and all(which[key] == _NONE for key in asked):
        return None  # the queries may be others as well
    return _Read(rows, which, made, by_heads) if which != [*range(len(k))] else None


def _by_heads(q: Tensor, keys: Tensor, y: Tensor, right: Tensor) -> tuple[list[tuple[int, int]], Tensor] | None:
    """Which head of which cached key each head of a key is, by its scores, and what they make; None where one is none.

    Queries [T, H, D], keys [N, G, D], scores [H, T].
    """
    n_heads = keys.shape[1]
    of_heads = y.unflatten(0, (n_heads, -1))  # G, H/G, T
    if n_heads == 1 or of_heads[0].numel() < _NUMBERS_OF_A_HEAD:
        return None
    enough, found, made = OF_ERROR * float((y - right).square().sum()) / n_heads, list[tuple[int, int]](), []
    for queries, of in zip(q.unflatten(1, (n_heads, -1)).unbind(1), of_heads, strict=True):
        every = (queries.permute(1, 0, 2).flatten(0, 1) @ keys.flatten(0, 1).T).T  # [N G, H/G T]
        left = (every - of.flatten()).square().sum(1)
        nearest = int(left.argmin())
        if not float(left[nearest]) <= enough:
            return None
        found.append(divmod(nearest, n_heads))
        made.append(every[nearest].reshape(of.shape))
    return found, torch.cat(made)


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
    parts = list[str]()
    for i, ((_, position), row) in enumerate(zip(read.rows, read.which, strict=False)):
        if i in read.by_heads:
            parts += _said_of_heads(read, i, what, own)
            continue
        sequence, of = (None, 0) if row == _NONE else read.rows[row]
        if row == _NONE or (own, position) != (sequence, of):
            here, there = moved.setdefault(sequence, ([], []))
            here.append(position)
            there.append(of)
    if moved.keys() <= {own} and not parts:  # in one sequence the solver finds the map, and says it in fewer words
        return None
    for sequence, (here, there) in moved.items():
        s = "s" * (len(here) > 1)
        whose = _NOBODYS if sequence is None else f"of position{s} {_listed(there)}"
        parts.append(
            f"the {what}{s} at position{s} {ranges(here)} {'are' if s else 'is'} {whose}"
            f"{f' of sequence {sequence}' * (sequence not in (None, own))}"
        )
    is_told = all(row != _NONE or i in read.by_heads for i, row in enumerate(read.which))
    left = nmse(read.made, replay.known(record, scheme).recorded) if is_told else math.inf
    text = ", and ".join([*parts[:_MOST_PARTS], *(["..."] if len(parts) > _MOST_PARTS else [])])
    return Told(text, left, _READ.format(f"{what}s"), _LOOK)


def _said_of_heads(read: _Read, key: int, what: str, own: int) -> Iterator[str]:
    """Of a key's heads those that are others."""
    position = read.rows[key][1]
    for head, (row, other) in enumerate(read.by_heads[key]):
        if (row, other) != (key, head):
            sequence, at = read.rows[row]
            whose = f" of sequence {sequence}" * (sequence != own)
            there = f"of position {at}{whose}" if row != key else "of the same position"
            yield f"head {head} of the {what} at position {position} is head {other} {there}"


def _listed(positions: list[int]) -> str:
    ascend = positions == sorted(positions) and len({*positions}) == len(positions)
    return ranges(positions) if ascend else ", ".join(map(str, positions))
