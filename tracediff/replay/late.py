"""Sequences whose trace begins when something is cached already: from a prefix cache, or before the recording began."""

from collections.abc import Iterable, Mapping

from tracediff.model.graph import Graph
from tracediff.result import Local
from tracediff.trace.format import Step
from tracediff.trace.reader import Trace


def reads_cache(names: Iterable[str], graph: Graph) -> bool:
    """Whether what an earlier step cached has a part in any of these ops."""
    return any(op.reads_earlier or "S" in op.axes for op in map(graph.__getitem__, names))


def begun_late(trace: Trace, graph: Graph, locals_: Mapping[tuple[int, str], Local]) -> dict[int, int]:
    """The first position of each sequence that begins later than at 0, but where something is sound that would have
    seen what was cached before: then there was nothing.
    """
    first: dict[int, Step] = {}
    for step in trace.steps.values():
        first.setdefault(step.sequence, step)
    late = {sequence: step.positions[0] for sequence, step in first.items() if step.positions[0]}
    if late:
        for (number, _), local in locals_.items():
            sequence, is_sound = trace.steps[number].sequence, local.judgement == "sound" and not local.blind
            if sequence in late and is_sound and _sees_all(local.segment, graph, number == first[sequence].step):
                late.pop(sequence)
    return late


def _sees_all(names: Iterable[str], graph: Graph, is_first: bool) -> bool:
    """Whether something of these ops sees what was cached before a sequence's first step: in that step whatever reads a
    cache or a state, later attention without a window.
    """
    for op in map(graph.__getitem__, names):
        if is_first and op.reads_earlier:
            return True
        softmax = graph.ops.get(op.inputs[0]) if op.kind == "weighted_values" else None
        if softmax and any(op.past) and not {"window", "chunk"} & softmax.attrs.keys():
            return True
    return False
