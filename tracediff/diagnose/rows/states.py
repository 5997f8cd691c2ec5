"""Whose state a sequence begins with: nothing, or what another sequence left where nobody has cleared it."""

from collections.abc import Iterator

import torch

from tracediff.diagnose.mistakes.mistake import computing
from tracediff.diagnose.rows.told import Told
from tracediff.model.graph import Op
from tracediff.names import local_name, plain_step
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
    names = dict.fromkeys(local_name(op.name) for op in states)
    lots = [states, *([op for op in states if local_name(op.name) == name] for name in names if len(names) > 1)]
    for sequence, number in _before(replay, record) if states else ():
        for lot in lots:  # all of them, or those of convolutions, or of scans, alone
            begun = [op for state in lot if (op := _beginning_with(replay, state, number))]
            local = replay.under(record, begun) if len(begun) == len(lot) else None
            if local and not local.faulty:
                kept = " and ".join(dict.fromkeys(local_name(op.name) for op in lot))
                text = f"{kept} is what sequence {sequence} left: it is not cleared for another"
                return Told(text, local.nmse, _BEGUN, _LOOK)
    return None


def _before(replay: Replay, record: OpRecord) -> Iterator[tuple[int, int]]:
    """Of each other sequence the last step before this one, where this is the first of its own."""
    steps, latest = replay.trace.steps, dict[int, int]()
    own = steps[record.step].sequence
    for number, step in steps.items():  # sequence by sequence
        if plain_step(number) < plain_step(record.step):
            latest[step.sequence] = number
    yield from () if own in latest else latest.items()


def _beginning_with(replay: Replay, op: Op, number: int) -> Op | None:
    """The state as a step left it; None where that is not known."""
    parts = [replay.held(number, name, False) for name in op.inputs]
    left = [part.flatten() for part in parts if part is not None]
    if len(left) < len(parts):
        return None
    return computing(op, lambda zeros: torch.cat(left).reshape(zeros.shape).to(zeros))
