"""Ops whose weights are wrong in memory, as the trace recorded them: judged with these.

Against the file's weights such an op is wrong whatever else it does, and a mistake of its own would be hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tracediff.diagnose.budget import Budget
from tracediff.diagnose.explain import Explainer
from tracediff.model.model import Model
from tracediff.replay.judging import Subject, replays_of
from tracediff.replay.replay import Replay
from tracediff.result import Cause, Local, OpResult

WEIGHT_IN_MEMORY = "weight_in_memory"
# Of what the file's weights leave, in energy: where an op reads something else, any weights leave as much of it, some a
# little less, so that what they leave tells nothing of it.
_CLEARLY = 0.5


def by_what_was_held(
    model: Model, subject: Subject, replay: Replay, ops: Sequence[OpResult], budget: Budget
) -> list[OpResult]:
    """The ops, those that wrong weights explain with these as their cause; those that are wrong beside them with the
    cause, or the error's shape, of the rest. Weights that leave no more of an op than the file's are none that it was
    computed with.
    """
    found = list(ops)
    reading = {at: names for at, op in enumerate(ops) if (names := _read(op, replay, subject.wrong))}
    if not reading:
        return found
    there, errors = _judged_with(model, subject, replay, ops, reading)
    asked = [
        replace(op, local=errors[at]) if at in errors and errors[at].faulty else replace(op, local=None)
        for at, op in enumerate(ops)
    ]
    explained = Explainer(there).explain(asked, budget=Budget(budget.left / 2)) if errors else asked
    for at, error in errors.items():
        held, op = tuple(sorted(reading[at])), explained[at]
        text = f"computed with {' and '.join(held)} as recorded, which {'is' if len(held) == 1 else 'are'} wrong"
        name = " + ".join(dict.fromkeys(subject.mistakes.get(weight, WEIGHT_IN_MEMORY) for weight in held))
        known = {mistake: text for weight in held if (mistake := subject.mistakes.get(weight))}
        if not error.faulty:
            cause = Cause(name, error.nmse, text, error.floor, error.arithmetic, known)
            found[at] = replace(ops[at], cause=cause, held=held)
        elif of := op.cause:
            both = replace(of, name=f"{name} + {of.name}", text=f"{text}, and {of.text}", each={**known, **of.each})
            found[at] = replace(op, local=ops[at].local, cause=both, held=held)
        elif _leaves_less(error, ops[at], _CLEARLY):
            found[at] = replace(op, local=ops[at].local, held=held)
    return found


def _read(op: OpResult, replay: Replay, wrong: Mapping[str, np.ndarray]) -> set[str]:
    """Of the wrong weights those that a faulty record is made with."""
    if op.status != "faulty" or not op.local or op.cause:
        return set()
    return {weight.name for name in op.local.segment for weight in replay.graph[name].weights} & wrong.keys()


def _judged_with(
    model: Model, subject: Subject, replay: Replay, ops: Sequence[OpResult], reading: Mapping[int, set[str]]
) -> tuple[Replay, dict[int, Local]]:
    """The trace replayed with the weights that leave less of some record than the file's do, and what is left of the
    records that read any.
    """
    believed = set().union(*reading.values())
    while True:
        held = {**subject.held, **{name: subject.wrong[name] for name in believed}}
        (there,) = replays_of(model, [replace(subject, held=held)], device=replay.weights.device)
        records = {at: there.trace.ops[ops[at].step, ops[at].op] for at, names in reading.items() if names & believed}
        errors = {at: there.judge(record) for at, record in records.items()}
        nearer = {at for at, error in errors.items() if _leaves_less(error, ops[at])}
        names = believed & set().union(*(reading[at] for at in nearer))
        if names == believed:
            return there, {at: error for at, error in errors.items() if at in nearer}
        believed = names


def _leaves_less(error: Local, op: OpResult, part: float = 1.0) -> bool:
    """Whether the held weights leave so much less of it than the file's."""
    return op.local is not None and error.left < part * op.local.left
