"""Values recorded under each other's names: gate as up and up as gate. The engine is right, its trace is not.

Each is then wrong, and so is what reads them, by three causes that undo one another.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from tracediff.diagnose.hypothesis import to_beat
from tracediff.model.graph import Graph
from tracediff.names import layer_of, split
from tracediff.replay.replay import Replay
from tracediff.result import Cause, Local, OpResult

NAMES_EXCHANGED = "names_exchanged"
_LOOK = "the names that these two are recorded under: what reads them has them right"


def exchanged(replay: Replay, ops: Sequence[OpResult]) -> list[OpResult]:
    """The ops, with this as the cause of those that it explains."""
    found = list(ops)
    for other in _pairs(replay.graph, ops):
        a, b = dict.fromkeys(split(name)[1] for name in other)
        text = f"{a} and {b} are recorded under each other's names"
        for at, local in _explained(replay, ops, other).items():
            named = {NAMES_EXCHANGED: text}, {NAMES_EXCHANGED: _LOOK}
            cause = Cause(NAMES_EXCHANGED, local.nmse, text, local.floor, local.arithmetic, *named)
            found[at] = replace(found[at], cause=cause)
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
                found.setdefault(tuple(split(name)[1] for name in (a, b)), {}).update({a: b, b: a})
    yield from found.values()


def _explained(replay: Replay, ops: Sequence[OpResult], other: Mapping[str, str]) -> dict[int, Local]:
    """What is left of each faulty op that is one of these or reads one, by its place; empty where one is still wrong,
    or nothing that reads them tells.
    """
    graph = replay.graph
    readers = {reader.name: reader for name in other for reader, _ in graph.readers(name)}
    changed = [replace(graph[twin], name=name) for name, twin in other.items()]
    for reader in readers.values():
        changed.append(replace(reader, inputs=tuple(other.get(name, name) for name in reader.inputs)))
    left, told = dict[int, Local](), False
    for at, op in enumerate(ops):
        if op.local and not {*other, *readers}.isdisjoint(op.local.segment):
            before = to_beat(op.local) if op.local.faulty else math.inf
            local = replay.under(replay.trace.ops[op.step, op.op], changed, before)
            if local.faulty:
                return {}
            told |= not readers.keys().isdisjoint(op.local.segment)
            if op.status == "faulty":
                left[at] = local
    return left if told else {}
