"""Whose state a sequence begins with: nothing, or what another sequence left where nobody has cleared it."""

from collections.abc import Iterator

from torch import Tensor

from tracediff.diagnose.mistakes.mistake import computing
from tracediff.diagnose.rows.told import Told
from tracediff.model.graph import Op
from tracediff.names import local_name
from tracediff.numerics.arithmetic import Scheme
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_BEGUN = "the sequence begins with what another left: its state is not cleared"
_LOOK = "where a slot is given to another sequence: its states are to be zeros, of convolutions too"


def told(replay: Replay, record: OpRecord, _: Scheme) -> Told | None:
    """Whose state a record of a sequence's first step was computed with; None where that is as it should be, or of no
    sequence.
    """
    states = [op for op in map(replay.graph.__getitem__, replay.segment(record)) if op.kind == "state"]
    for sequence, number in _before(replay, record) if states else ():
        left = [(op, replay.held(number, op.inputs[0], False)) for op in states]
        begun = [_beginning_with(op, value) for op, value in left if value is not None]
        if len(begun) == len(states):
            local = replay.under(record, begun)
            if not local.faulty:
                names = " and ".join(dict.fromkeys(local_name(op.name) for op in states))
                text = f"{names} is what sequence {sequence} left: it is not cleared for another"
                return Told(text, local.nmse, _BEGUN, _LOOK)
    return None


def _before(replay: Replay, record: OpRecord) -> Iterator[tuple[int, int]]:
    """Of each other sequence the last step before this one, where this is the first of its own."""
    steps, latest = replay.trace.steps, dict[int, int]()
    own = steps[record.step].sequence
    for number, step in steps.items():
        if number == record.step:
            break
        latest[step.sequence] = number
    yield from () if own in latest else latest.items()


def _beginning_with(op: Op, value: Tensor) -> Op:
    return computing(op, lambda zeros: value.reshape(zeros.shape).to(zeros))
