"""Sequences whose trace begins when something is cached already: from a prefix cache, or before the recording began."""

from collections.abc import Iterable, Mapping

from tracediff.model.graph import Graph
from tracediff.result import Local
from tracediff.trace.reader import Trace


def reads_cache(names: Iterable[str], graph: Graph) -> bool:
    """Whether what an earlier step cached has a part in any of these ops."""
    return any(op.kind == "state" or any(op.past) or "S" in op.axes for op in map(graph.__getitem__, names))


def begun_late(trace: Trace, graph: Graph, locals_: Mapping[tuple[int, str], Local]) -> dict[int, int]:
    """The first position of each sequence that begins later than at 0, but where something is sound that reads a cache:
    then the trace holds all that was cached.
    """
    first: dict[int, int] = {}
    for step in trace.steps.values():
        first.setdefault(step.sequence, step.positions[0])
    late = {sequence: position for sequence, position in first.items() if position}
    if late:
        for (number, _), local in locals_.items():
            sequence = trace.steps[number].sequence
            if sequence in late and not local.faulty and reads_cache(local.segment, graph):
                late.pop(sequence)
    return late
