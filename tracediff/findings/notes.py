"""What a reader must know besides what was found: of a trace, how it was written; of a run, what time left undone."""

from collections.abc import Iterable

from tracediff.result import OpResult
from tracediff.trace.reader import Trace


def trace_notes(trace: Trace) -> list[str]:
    """What a reader must know of the trace itself, whatever it holds."""
    notes = [f"{trace.path}: cut off: {trace.cut}."] if trace.cut else []
    if any(record.sketch for record in trace.ops.values()):
        notes.append(
            f"{trace.path} holds sketches: how far two values are apart is estimated from at most 336 numbers of each, "
            "within a tenth as a rule. A hundred times what passes would be seen, but in one of a million records."
        )
    elif not any(record.has_data for record in trace.ops.values()):
        notes.append(
            f"{trace.path} holds statistics only: a permutation, a swapped head or a wrong rope pairing changes none "
            "of them. Record data to see those, and to judge each op by replay."
        )
    partial = [record for record in trace.ops.values() if record.has_statistics and record.lacking]
    if partial and not all(record.has_data for record in partial):
        lacking = sorted({name for record in partial for name in record.lacking})
        notes.append(
            f"{trace.path}: {len(partial)} records lack statistics ({', '.join(lacking)}): only those that both sides "
            "hold are compared. Where neither has the RMS, NMSE is relative to the mean or the extremes, and says less."
        )
    return notes


def unsought(ops: Iterable[OpResult], seconds: float) -> list[str]:
    """That so many causes were given up when the time was over."""
    n = sum(not op.sought for op in ops)
    causes = "1 cause was" if n == 1 else f"{n} causes were"
    return [f"{causes} not sought to the end: --time {seconds:g} was too short. Give it more seconds."] if n else []
