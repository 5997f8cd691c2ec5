"""Records of what was overwritten before it was recorded: what read it cannot be judged by them."""

from collections.abc import Sequence
from dataclasses import replace

from tracediff.diagnose.mistakes.residual import OVERWRITTEN
from tracediff.model.graph import Graph
from tracediff.names import NORMS
from tracediff.result import OpResult


def overwritten(graph: Graph, ops: Sequence[OpResult]) -> list[OpResult]:
    """The ops; of norms that have written over what they read it is not said that they are wrong: by that record their
    input passes through unchanged.
    """
    over = {
        (op.step, reader.name): op.op
        for op in ops
        if op.status == "faulty" and op.cause and OVERWRITTEN in op.cause.each
        for reader, _ in graph.readers(op.op)
        if reader.kind in NORMS
    }
    return [
        replace(
            op, status="inherited", cause=None, note=f"{over[op.step, op.op]} was overwritten before it was recorded"
        )
        if op.status == "faulty" and (op.step, op.op) in over
        else op
        for op in ops
    ]
