"""A trace with the data of a few records: of all others it keeps what can be said in one line."""

from collections.abc import Callable, Container
from pathlib import Path

from tracediff.trace.format import OpRecord, Statistics
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter


def reduce(
    trace: Trace, out: Path, kept: Container[tuple[int, str]], statistics: Callable[[OpRecord, Trace], Statistics]
) -> None:
    """Write to `out` the data of the records that are `kept` (step, name), the statistics of the others, no weights."""
    with TraceWriter.like(out, trace.header) as writer:
        for step in trace.steps.values():
            writer.step(step.step, step.tokens, step.positions, (step.sequence,) * len(step.tokens))
            for record in trace.step_ops(step.step):
                if record.dtype and (record.step, record.op) in kept:
                    values = trace.stored(record)
                    writer.op(record.step, record.op, values, record.dtype, record.rows, shard=record.shard)
                elif record.size:
                    held = statistics(record, trace)
                    writer.op_statistics(
                        record.step, record.op, record.shape, held, record.rows, None, record.sketch, record.shard
                    )
