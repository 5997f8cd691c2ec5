"""What replay could not judge of a trace op by op, and which records would change that."""

import operator
from collections.abc import Iterable
from functools import cache, partial, reduce
from typing import TYPE_CHECKING

from tracediff.names import layer_of
from tracediff.result import Coverage, OpResult, Segment
from tracediff.trace.reader import Trace

if TYPE_CHECKING:
    from tracediff.model.graph import Graph


def measure_coverage(trace: Trace, graph: "Graph", ops: Iterable[OpResult]) -> Coverage:
    """Of a replayed trace: its segments in the order of execution, and what is in none."""
    judged = [op for op in ops if op.local]
    alone = {(op.step, op.op) for op in judged if op.local and len(op.local.segment) == 1}
    every = {(step, op.name) for step in trace.steps for op in graph.written()}
    split = cache(partial(_split, graph=graph))  # steps and records share their segments
    segments = [
        Segment(op.op, op.step, x.segment, x.floor, x.resolving, x.blind, x.faulty, *split(x.segment))
        for op in judged
        if (x := op.local) and (len(x.segment) > 1 or x.blind)
    ]
    together = {(segment.step, op) for segment in segments for op in segment.ops} - alone
    unjudged = {op for _, op in every - alone - together}
    records = trace.ops.items()
    return Coverage(
        n_ops=len(every),
        alone=len(every & alone),
        together=len(every & together),
        segments=tuple(segments),
        unjudged=tuple(op.name for op in graph if op.name in unjudged),
        some_steps=tuple(op.name for op in graph if op.name in unjudged & {name for _, name in alone | together}),
        unknown=tuple(dict.fromkeys(op for _, op in trace.ops if op not in graph)),
        statistics_only=tuple(dict.fromkeys(op for (_, op), record in records if not record.has_data)),
        some_tokens=tuple(dict.fromkeys(op for (_, op), record in records if record.rows is not None)),
    )


def _split(segment: tuple[str, ...], graph: "Graph") -> tuple[tuple[str, ...], int]:
    """The ops to record next, and the size of the largest part that is left then.

    Within one layer K and V come first, for all later steps read them; else what halves the segment.
    """
    cached = graph.cached() if len({*map(layer_of, segment)}) == 1 else ()
    chosen = [op for op in segment[:-1] if op in cached]
    before = max(_sizes(segment, chosen, graph))
    least, best = (len(segment) + 1, 0), None
    for op, at_least in _halves(segment, chosen, graph):
        if at_least > least[0]:
            break
        sizes = _sizes(segment, [*chosen, op], graph)
        if (max(sizes), sum(size**2 for size in sizes)) < least:
            least, best = (max(sizes), sum(size**2 for size in sizes)), op
    if best is None or (chosen and least[0] == before):
        return tuple(chosen), before
    return tuple(sorted((*chosen, best), key=segment.index)), least[0]


def _halves(segment: tuple[str, ...], chosen: list[str], graph: "Graph") -> list[tuple[str, int]]:
    """Ops that may be recorded, with how many ops the larger part has at least then; those of the least first.

    One part is the op with what it is made of, and where it is the only one chosen the other has all the rest at least.
    """
    made_of: dict[str, int] = {}  # a bit for each op
    for i, op in enumerate(segment):
        made_of[op] = reduce(operator.or_, (made_of[name] for name in graph[op].inputs if name in made_of), 1 << i)
    written = {op.name for op in graph.written()}  # of a state what a step leaves is, not what it finds
    sizes = {op: made_of[op].bit_count() for op in segment[:-1] if op not in chosen and op in written}
    bounds = [(op, 0 if chosen else max(size, len(segment) - size)) for op, size in sizes.items()]
    return sorted(bounds, key=lambda bound: bound[1])


def _sizes(segment: tuple[str, ...], recorded: list[str], graph: "Graph") -> list[int]:
    """How many ops each part of the segment has, were these recorded."""
    between = {*segment} - {*recorded, segment[-1]}
    return [len(_ancestors(op, between, graph)) for op in (*recorded, segment[-1])]


def _ancestors(op: str, among: set[str], graph: "Graph") -> set[str]:
    """The op and all that it is made of among these."""
    found, stack = {op}, [op]
    while stack:
        new = {name for name in graph[stack.pop()].inputs if name in among and name not in found}
        found |= new
        stack += new
    return found
