"""Values recorded under each other's names: gate as up and up as gate. The engine is right, its trace is not.

Each is then wrong, and so is what reads them, by three causes that undo one another.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from tracediff.diagnose.budget import Budget, OutOfTime
from tracediff.diagnose.evidence import shown
from tracediff.diagnose.hypothesis import to_beat
from tracediff.model.graph import Graph, Op
from tracediff.names import layer_of, local_name
from tracediff.replay.replay import Replay
from tracediff.result import Cause, Local, OpResult

NAMES_EXCHANGED = "names_exchanged"
_LOOK = "the names that these two are recorded under: what reads them has them right"


def exchanged(replay: Replay, ops: Sequence[OpResult], budget: Budget) -> list[OpResult]:
    """The ops, with this as the cause of those that it explains. Where the time is over no further pair is tried."""
    found = list(ops)
    with suppress(OutOfTime):
        for other in _pairs(replay.graph, ops):
            budget.check()
            a, b = dict.fromkeys(local_name(name) for name in other)
            text = f"{a} and {b} are recorded under each other's names"
            changed = _changed(replay.graph, other)
            for at, local in _explained(replay, ops, changed, {*other}).items():
                record = replay.trace.ops[ops[at].step, ops[at].op]
                each, look = {NAMES_EXCHANGED: text}, {NAMES_EXCHANGED: _LOOK}
                places = shown(replay, record, local, [*changed.values()])
                cause = Cause(NAMES_EXCHANGED, local.nmse, text, local.floor, local.arithmetic, each, look, places)
                found[at] = replace(found[at], cause=cause, undone=None)
    return found


def _pairs(graph: Graph, ops: Sequence[OpResult]) -> Iterator[dict[str, str]]:
    """Ops that may be each other, of all layers in which both are wrong: of one kind, as large, and neither made of
    the other.
    """
    wrong = [op.op for op in ops if op.status == "faulty" and op.local and len(op.local.segment) == 1]
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in dict.fromkeys(wrong):
        alike.setdefault((layer_of(name), graph[name].kind, graph[name].axes), []).append(name)
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for several in alike.values():
        for a, b in combinations(several, 2):
            if b not in graph.after([a]):
                found.setdefault(tuple(local_name(name) for name in (a, b)), {}).update({a: b, b: a})
    yield from found.values()


def _changed(graph: Graph, other: Mapping[str, str]) -> dict[str, Op]:
    """The ops as their names say them: each makes what the other should, and what reads one reads the other."""
    changed = {name: replace(graph[twin], name=name) for name, twin in other.items()}
    for reader, _ in (one for name in other for one in graph.readers(name)):
        inputs = tuple(other.get(name, name) for name in reader.inputs)
        changed[reader.name] = replace(reader, inputs=inputs)
    return changed


def _explained(replay: Replay, ops: Sequence[OpResult], changed: Mapping[str, Op], pair: set[str]) -> dict[int, Local]:
    """What is left of each faulty op that is one of these, by its place; empty where one is still wrong, or nothing
    that reads the pair tells.
    """
    left, told = dict[int, Local](), False
    for at, op in enumerate(ops):
        if op.local and not changed.keys().isdisjoint(op.local.segment):
            before = to_beat(op.local) if op.local.faulty else math.inf
            local = replay.under(replay.trace.ops[op.step, op.op], [*changed.values()], before)
            if local.faulty:
                return {}
            told |= not (changed.keys() - pair).isdisjoint(op.local.segment)
            if op.status == "faulty":
                left[at] = local
    return left if told else {}
