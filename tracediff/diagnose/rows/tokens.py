"""Of which token's row each row was made, where an op makes each of its own token's: found by what other tokens' come
to. A batch has several sequences, and logits are made of the last token of each, so rows are gathered. And a token that
is fed alone may be given what an earlier step left, or one of two that it is made of. (Within one step, all of whose
rows were recorded, the solver finds the map.)
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import msgspec
import torch
from torch import Tensor

from tracediff.diagnose.rows.told import FEW, OF_ERROR, Row, Told
from tracediff.names import StepOf, in_layer_of, layer_of, plain_step
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.evaluate import evaluate
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.nmse import nmse
from tracediff.replay.look import Known
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_MOST = 1 << 26  # values that other tokens come to: half a gigabyte
_LOOK = "which rows of a batch are gathered: where each sequence begins and ends, and which token's logits are made"
_LOOK_BEFORE = "what a step is given: the token that was chosen last, and buffers that are read before they are filled"


@dataclass(frozen=True, slots=True)
class _Way:
    """What may be another token's: all that the op reads, "", or one input alone, in whose place another `value` may be
    read. `made` is what a token's row comes to with each of these rows, [N, ...].
    """

    what: str
    value: str
    rows: Sequence[Row]
    made: Callable[[int], Tensor]

    def words(self, position: int, row: Row, own: int) -> str:
        """Which row was read in the place of a position's."""
        sequence, other = row
        whose = f" of sequence {sequence}" * (sequence != own)
        value = "that" if self.value == self.what else self.value
        return f"{self.what or 'the row'} of position {position} is {value} of position {other}{whose}"

    def common(self, whose: str) -> str:
        """What is true of other records too."""
        if self.what:
            return f"{self.what} is {'that' if self.value == self.what else self.value} of {whose} tokens"
        return f"rows are {'those' if whose == 'earlier' else 'made of those'} of {whose} tokens"


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
    known = replay.known(record, scheme)
    if not bool(known.recorded.isfinite().all()):
        return None
    at = [step.positions[row] for row in record.rows or range(len(step.positions))]
    for way in _ways(replay, record, scheme, known, together):
        made, wrong, texts = known.exact.clone(), known.wrong, list[str]()
        for i, (right, y) in enumerate(zip(known.exact, known.recorded, strict=True)):
            if not bool(wrong[i].any()):
                continue
            rows = way.made(i)
            nearest = int((rows - y).flatten(1).square().sum(1).argmin())
            left = nmse(rows[nearest], y)
            if not math.isfinite(left) or left > OF_ERROR * nmse(right, y):
                break
            made[i] = rows[nearest]
            texts.append(way.words(at[i], way.rows[nearest], step.sequence))
        else:
            common, look = (way.common("earlier"), _LOOK_BEFORE) if alone else (way.common("other"), _LOOK)
            return Told(texts[0], nmse(made, known.recorded), common, look) if texts else None
    return None


def _ways(replay: Replay, record: OpRecord, scheme: Scheme, known: Known, together: Sequence[int]) -> Iterator[_Way]:
    """All that the op reads of tokens of these steps; or one input alone of several, or in the place of that another
    value of the layer, of other steps than the record's.
    """
    segment, graph = replay.segment(record), replay.graph
    read = dict.fromkeys(name for part in segment for name in graph[part].inputs if name not in segment)
    steps, room = list[int](), _MOST // math.prod(record.shape[1:])
    for n in reversed(together):  # of very many those before it
        n_tokens = len(replay.trace.steps[n].tokens)
        if n_tokens <= room and all(name not in graph or _held(replay, n, name) is not None for name in read):
            steps.insert(0, n)
            room -= n_tokens
    if not steps:
        return
    by_all = [replay.supposed(msgspec.structs.replace(record, step=n, rows=None), record.op, scheme) for n in steps]
    made = torch.cat([one.exact for one in by_all])
    if made.shape[1:] != known.recorded.shape[1:]:
        return
    rows = _rows(replay, steps)
    yield _Way("", "", rows, lambda i: made)
    op = graph[record.op]
    inputs = [i for i, name in enumerate(op.inputs) if name in graph]
    if len(segment) > 1 or len(inputs) < 2 or not graph.is_by_rows(op):
        return

    def with_its_own(values: Tensor, at: int, i: int) -> Tensor:
        others = values.reshape(-1, *known.inputs[at].shape[1:])
        own = [x[i : i + 1].expand(len(others), *x.shape[1:]) for x in known.inputs]
        own[at] = others
        return evaluate(op, own, replay.weights, known.arithmetic)

    for at in inputs:
        values, name = torch.cat([one.inputs[at] for one in by_all]), in_layer_of(op.name, op.inputs[at])
        yield _Way(name, name, rows, partial(with_its_own, values, at))
    before = [n for n in steps if n != record.step]
    layer = layer_of(op.name)
    others = [o.name for o in (graph.layer(layer) if layer is not None else ()) if o.axes == op.axes]
    for at, other in product(inputs if before else (), others):
        held = [_held(replay, n, other) for n in before]
        if other not in op.inputs and all(one is not None for one in held):
            values = torch.cat([one for one in held if one is not None])
            yield _Way(
                in_layer_of(op.name, op.inputs[at]),
                in_layer_of(op.name, other),
                _rows(replay, before),
                partial(with_its_own, values, at),
            )


def _held(replay: Replay, step: int, name: str) -> Tensor | None:
    return replay.held(step, name, False)


def _rows(replay: Replay, steps: Sequence[int]) -> list[Row]:
    """Whose the rows of these steps are."""
    return [(step.sequence, at) for step in map(replay.trace.steps.__getitem__, steps) for at in step.positions]
