"""Of which token's row each row was made, where an op makes each of its own token's: found by what other tokens' come
to. A batch has several sequences, and logits are made of the last token of each, so rows are gathered. And a token that
is fed alone may be given what an earlier step left. (Within one step, all of whose rows were recorded, the solver finds
the map.)
"""

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from tracediff.diagnose.rows.told import FEW, OF_ERROR, Row, Told
from tracediff.names import StepOf, plain_step
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.nmse import nmse
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_MOST = 1 << 26  # values that other tokens come to: half a gigabyte
_READ = "rows are made of those of other tokens"
_LOOK = "which rows of a batch are gathered: where each sequence begins and ends, and which token's logits are made"
_STALE = "rows are those of earlier tokens"
_LOOK_BEFORE = "what a step is given: the token that was chosen last, and buffers that are read before they are filled"


def told(replay: Replay, record: OpRecord, scheme: Scheme) -> Told | None:
    """Whose rows a record's are made of; None where that cannot be told."""
    graph, segment, step = replay.graph, replay.segment(record), replay.trace.steps[record.step]
    numbers = (StepOf(plain_step(record.step), sequence) for sequence in replay.trace.sequences)
    together: list[int] = [number for number in numbers if number in replay.trace.steps]
    n_values = math.prod(record.shape) // max(1, record.shape[record.token_axis])
    alone = record.rows is None and len(together) < 2
    if alone:  # the steps before
        together = [n for n, one in replay.trace.steps.items() if n <= record.step and one.sequence == step.sequence]
    if (alone and (len(step.tokens) > 1 or len(together) < 2)) or record.token_axis or n_values < FEW:
        return None
    if any(KINDS[graph[name].kind].picks for name in segment):  # rows of few numbers are alike by chance
        return None
    if any(graph.tokens_read(graph[name], (0,)) is None or any(graph[name].past) for name in segment):
        return None
    rows, others = _others(replay, record, scheme, together)
    known = replay.known(record, scheme)
    if others is None or others.shape[1:] != known.recorded.shape[1:] or not bool(known.recorded.isfinite().all()):
        return None
    at = [step.positions[row] for row in record.rows or range(len(step.positions))]
    made, wrong, texts = known.exact.clone(), known.wrong, list[str]()
    for i, (right, y) in enumerate(zip(known.exact, known.recorded, strict=True)):
        if not bool(wrong[i].any()):
            continue
        nearest = int((others - y).flatten(1).square().sum(1).argmin())
        left = nmse(others[nearest], y)
        if not math.isfinite(left) or left > OF_ERROR * nmse(right, y):
            return None
        made[i] = others[nearest]
        sequence, position = rows[nearest]
        whose = f" of sequence {sequence}" * (sequence != step.sequence)
        texts.append(f"the row of position {at[i]} is that of position {position}{whose}")
    common, look = (_STALE, _LOOK_BEFORE) if alone else (_READ, _LOOK)
    return Told(texts[0], nmse(made, known.recorded), common, look) if texts else None


def _others(
    replay: Replay, record: OpRecord, scheme: Scheme, together: Sequence[int]
) -> tuple[list[Row], Tensor | None]:
    """What all tokens of these steps come to in the record's op, and whose each row is."""
    rows, values = list[Row](), list[Tensor]()
    segment = replay.segment(record)
    read = {name for part in segment for name in replay.graph[part].inputs if name not in segment}
    for number in together:
        step = replay.trace.steps[number]
        is_held = all(name not in replay.graph or replay.held(number, name, False) is not None for name in read)
        if is_held and (len(rows) + len(step.tokens)) * math.prod(record.shape[1:]) <= _MOST:
            rows += [(step.sequence, position) for position in step.positions]
            of_all = msgspec.structs.replace(record, step=number, rows=None)
            values.append(replay.supposed(of_all, record.op, scheme).exact)
    return rows, torch.cat(values) if values else None
