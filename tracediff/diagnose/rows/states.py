"""Whose state a sequence begins with, or goes on with: nothing, its own, or what another sequence left, where nobody
has cleared it or they share it.
"""

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
_SHARED = "a sequence goes on with what another left: they share a state"
_LOOK_AT_SLOTS = "the sequence's slot in the address of its states, where they are read and where they are written"
_MOST = 4  # other sequences' steps that are asked, the latest first


def told(replay: Replay, record: OpRecord, _: Scheme) -> Told | None:
    """Whose state a record was computed with; None where that is as it should be, or of no sequence."""
    states = [op for op in map(replay.graph.__getitem__, replay.segment(record)) if op.kind == "state"]
    names = dict.fromkeys(local_name(op.name) for op in states)
    lots = [states, *([op for op in states if local_name(op.name) == name] for name in names if len(names) > 1)]
    is_first = replay.trace.n_before(record.step) == 0
    for sequence, number in _before(replay, record, is_first) if states else ():
        for lot in lots:  # all of them, or those of convolutions, or of scans, alone
            begun = [op for state in lot if (op := _beginning_with(replay, state, number))]
            local = replay.under(record, begun) if len(begun) == len(lot) else None
            if local and not local.faulty:
                kept = " and ".join(dict.fromkeys(local_name(op.name) for op in lot))
                if is_first:
                    text = f"{kept} is what sequence {sequence} left: it is not cleared for another"
                    return Told(text, local.nmse, _BEGUN, _LOOK)
                text = f"{kept} is what sequence {sequence} left, where its own belongs"
                return Told(text, local.nmse, _SHARED, _LOOK_AT_SLOTS)
    return None


def _before(replay: Replay, record: OpRecord, is_first: bool) -> Iterator[tuple[int, int]]:
    """Of each other sequence the last step before this one; where this is not the first of its own, also that which
    they have in common, the latest first.
    """
    steps, latest, now = replay.trace.steps, dict[int, int](), list[tuple[int, int]]()
    own, here = steps[record.step].sequence, plain_step(record.step)
    for number, step in steps.items():  # sequence by sequence
        if plain_step(number) < here and step.sequence != own:
            latest[step.sequence] = number
        elif plain_step(number) == here and step.sequence != own and not is_first:
            now.append((step.sequence, number))
    before = sorted(latest.items(), key=lambda one: -plain_step(one[1]))
    yield from latest.items() if is_first else (*now, *before)[:_MOST]


def _beginning_with(replay: Replay, op: Op, number: int) -> Op | None:
    """The state as a step left it; None where that is not known."""
    parts = [replay.held(number, name, False) for name in op.inputs]
    left = [part.flatten() for part in parts if part is not None]
    if len(left) < len(parts):
        return None
    return computing(op, lambda zeros: torch.cat(left).reshape(zeros.shape).to(zeros))
