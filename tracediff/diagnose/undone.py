"""Mistaken ops whose mistakes undo one another: without their records what follows is right.

So an engine looks that holds something in another form than the file, as heads in the order of checkpoints or a scale
folded into a norm, and one that is right but for what it recorded. Each op is wrong by itself, and nothing is.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from tracediff.diagnose.budget import Budget, OutOfTime
from tracediff.model.graph import Graph
from tracediff.model.model import Model
from tracediff.names import layer_of, local_name
from tracediff.replay.judging import Subject, replays_of
from tracediff.replay.replay import Replay
from tracediff.result import OpResult, Undone

# What follows tells nothing where its floor has room for the mistakes: NMSE.
_SEEN = 100.0
_SHORT = 4  # ops that are judged as one: of more, as a layer is, several mistakes are not told from one


def undone(model: Model, subject: Subject, replay: Replay, ops: Sequence[OpResult], budget: Budget) -> list[OpResult]:
    """The ops, with where their mistakes are undone; what the time does not suffice for is not said.

    Asked of the step of most tokens, for of one key attention is right whatever its score is, and of the last, for of a
    state that is 0 what becomes of it is; of those together that what follows reads together. Not again in other layers
    where nothing undoes them in one.
    """
    found, in_vain = dict[str, Undone](), set[frozenset[str]]()
    faulty = [op for op in ops if op.status == "faulty" and op.local and len(op.local.segment) <= _SHORT]
    if not faulty or subject.trace.is_one_of_several:
        return list(ops)
    step = max({op.step for op in faulty}, key=lambda step: (len(replay.trace.steps[step].tokens), step))
    errors = {op.op: op.local.nmse for op in faulty if op.step == step and op.local}
    readers = _readers_in(step, replay)
    with suppress(OutOfTime), torch.inference_mode():
        for together in _joined(errors, readers):
            # A scan reads the state that it left.
            if not any(readers[name] & {*together} - {name} for name in together):
                continue  # what reads them is right by what was recorded: so that is what was computed
            names = frozenset(map(local_name, together))
            for left_out in _ways(together, readers) if names not in in_vain else ():
                budget.check()
                last = max(op.step for op in faulty if op.op in left_out)
                there = {op.op: op.local.nmse for op in faulty if op.step == last and op.local}
                asked = {step: errors, last: there}
                if _is_handed_on(left_out, replay.graph):
                    asked[last + 1] = there  # which alone reads it
                right: tuple[str, ...] = ()
                for at, of in asked.items():
                    reading = readers if at == step else _readers_in(at, replay)
                    if not (right := _right_without(left_out, at, of, reading, model, subject, replay)):
                        break
                if right:
                    found |= dict.fromkeys(together, Undone(left_out, right))
                    break
            else:
                in_vain.add(names)
    return [replace(op, undone=found[op.op]) if op.status == "faulty" and op.op in found else op for op in ops]


def _is_handed_on(names: Sequence[str], graph: Graph) -> bool:
    """Whether one of them is a state that the next step begins with."""
    return any(reader.kind == "state" for name in names for reader, _ in graph.readers(name))


def _readers_in(step: int, replay: Replay) -> dict[str, set[str]]:
    """Of each op that was recorded in a step the recorded ones that read it."""
    recorded = {record.op for record in replay.trace.step_ops(step) if record.has_data and record.op in replay.graph}
    return {op.name: _readers(op.name, replay.graph, recorded) for op in replay.graph if op.name in recorded}


def _readers(name: str, graph: Graph, recorded: set[str]) -> set[str]:
    """The recorded ops that read it, be it through others that were not."""
    seen, through = set[str](), [name]
    while through:
        reading = {op.name for op, _ in graph.readers(through.pop())} - seen
        seen |= reading
        through += reading - recorded
    return seen & recorded


def _joined(errors: dict[str, float], readers: dict[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """The mistaken ops in lots: those that read one another, be it through a right one, which is then between them, or
    have a reader in common. (Experts' weights may multiply what is projected, or the projection.)
    """
    left = list(errors)
    between = {name for name in readers if name not in errors and not readers[name].isdisjoint(errors)}

    def reaches(name: str) -> set[str]:
        return {name, *readers[name]}.union(*(readers[one] for one in readers[name] & between))

    while left:
        lot = [left.pop(0)]
        reached = reaches(lot[0])
        while more := [name for name in left if name in reached or not reached.isdisjoint(readers[name])]:
            lot += more
            left = [name for name in left if name not in more]
            reached = reached.union(*map(reaches, more))
        inside = {name for name in between & reached if not readers[name].isdisjoint(lot)}
        yield tuple(name for name in readers if name in {*lot, *inside})


def _ways(together: tuple[str, ...], readers: dict[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Which to leave out: all, if others follow; or those that are followed by the last of them."""
    if any(not readers[name] <= {*together} for name in together):
        yield together
    last = [name for name in together if readers[name].isdisjoint(together)]
    if before := tuple(name for name in together if name not in last):
        yield before


def _right_without(
    left_out: tuple[str, ...],
    step: int,
    errors: dict[str, float],
    readers: dict[str, set[str]],
    model: Model,
    subject: Subject,
    replay: Replay,
) -> tuple[str, ...]:
    """What follows these, if all of it is right as if they had not been recorded, and would show their mistakes."""
    following = {reader for name in left_out for reader in readers.get(name, ())} - {*left_out}
    following = {name for name in following if (step, name) in replay.trace.ops}
    if not following:
        return ()
    near = {layer_of(name) for name in (*left_out, *following)}
    near |= {layer - 1 for layer in near if layer}
    near |= {layer_of(read) for name in (*left_out, *following) for read in replay.graph[name].inputs}  # be it a cache
    places = replay.graph.places()
    last = max(places[name] for name in following)
    later = {name for name, place in places.items() if place > last}
    keys = replay.trace.ops.keys()
    others = {(at, name) for at, name in keys if at > step or name in later or layer_of(name) not in {*near, None}}
    others |= {(at, name) for at, name in keys if name in left_out}  # of a cache all rows are as it has them
    view = replace(subject, trace=replay.trace.without(others))
    (there,) = replays_of(model, [view], device=replay.weights.device, only=following)
    for name in following:
        local = there.judge(there.trace.ops[step, name])
        if local.judgement != "sound" or local.floor * _SEEN > min(errors[one] for one in left_out if one in errors):
            return ()
    return tuple(name for name in replay.graph.ops if name in following)
