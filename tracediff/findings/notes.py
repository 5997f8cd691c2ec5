"""What a reader must know besides what was found: of a trace, how it was written; of a run, what time left undone."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tracediff.english import count
from tracediff.names import local_name, plain_step
from tracediff.result import OpResult
from tracediff.trace.reader import Trace

# What ranks add up, of which each has a part of the inputs (Megatron-LM, https://arxiv.org/abs/1909.08053, figure 3).
_ADDED_UP = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
_LISTED = 3  # sequences that are fed anew, or dropped


def trace_notes(trace: Trace) -> list[str]:
    """What a reader must know of the trace itself, whatever it holds."""
    notes = [f"{trace.path}: cut off: {trace.cut}."] if trace.cut else []
    anew = "feeds sequence {} anew from its first token on, as after a preemption or without a cache"
    notes += _called_otherwise(trace, trace.begun_again, anew)
    dropped = "drops what sequence {} was fed from its first position on, as rejected drafts"
    notes += _called_otherwise(trace, trace.rolled_back, dropped, ", and what it keeps is recomputed")
    if not trace.header.rollback and (back := _first_that_goes_back(trace)):
        notes.append(
            f"{trace.path}: step {plain_step(back[0])} begins at position {back[1]}, which was fed before, and is "
            "judged as one whose positions are wrong. If drafts were rejected there, say "
            '"rollback":true in the first line.'
        )
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


def of_another_file(trace: Trace, name: str, arch: str, matmul_type: str, ops: Iterable[OpResult]) -> list[str]:
    """That the trace says that its model is of another architecture, or, where something is wrong, that its weights are
    of another type than the file's; or that they are another file's, where nothing explains what is wrong in a matmul.
    """
    header, faulty = trace.header, [op for op in ops if op.status == "faulty"]
    if not faulty and (not header.arch or header.arch == arch):
        return []
    matmuls = {op.op for op in faulty if op.kind == "linear" and not op.cause}
    other = header.model if header.model and Path(header.model).name != name else None
    of, says = f" of {other}" if other else "", f"{trace.path}: its first line says"
    if header.arch and header.arch != arch:
        told, has = f"that the model{of} is of the architecture {header.arch}", f"is of {arch}"
    elif header.weights and header.weights.upper() != matmul_type.upper():
        told, has = f"that the engine multiplied with {header.weights} weights{of}", f"has {matmul_type}"
    elif other and matmuls:
        told, has = f"that the model is {other}", f"does not explain {count(len(matmuls), 'matmul')}"
    else:
        return []
    return [f"{says} {told}; {name} {has}. If it read another file, judge it with that one: --model."]


def as_of_ranks(trace: Trace, ops: Iterable[OpResult]) -> list[str]:
    """That what is wrong may be ranks' terms, each rounded before they are added up, where nothing else is wrong."""
    faulty = [op for op in ops if op.status == "faulty"]
    if not faulty or trace.header.ranks or len(trace.written) > 1:
        return []
    names = {local_name(op.op) for op in faulty}
    records = (trace.ops.get((op.step, op.op)) for op in faulty)
    in_half = all(record is not None and record.dtype in ("f16", "bf16") for record in records)
    # As a whole they are off by no more than the rounding of their values.
    by_roundings = all(op.cause is None and op.local and op.local.nmse <= op.local.floor for op in faulty)
    if not (in_half and by_roundings and names <= {*_ADDED_UP}):
        return []
    return [
        f"{trace.path}: single values of {' and '.join(sorted(names))} alone are wrong, by roundings. If it is of "
        "several ranks, each of which rounds its term before they are added up, say how many there are in the first "
        'line: "ranks":4.'
    ]


def unsought(ops: Iterable[OpResult], seconds: float) -> list[str]:
    """That so many causes were given up when the time was over, or what rare roundings may hide was; and which bugs of
    tracediff ended a search.
    """
    ops = list(ops)
    given_up = [op for op in ops if not op.sought and not op.bug]
    faulty = sum(op.status == "faulty" for op in given_up)
    rounded = len(given_up) - faulty
    causes = "1 cause was not sought" if faulty == 1 else f"{faulty} causes were not sought"
    records = "1 record" if rounded == 1 else f"{rounded} records"
    known = f"Whether {records} that roundings of few engines explain may have a known mistake was not sought"
    said = [*([causes] if faulty else []), *([known] if rounded else [])]
    bugs = dict.fromkeys(op.bug for op in ops if op.bug)
    return [
        *(f"A search for causes ended in a bug of tracediff, please report it: {bug}." for bug in bugs),
        *(
            f"{words} to the end: --time {seconds:g} is too short for what is left to try. Give it more seconds."
            for words in said
        ),
    ]


def _called_otherwise(trace: Trace, begun: Sequence[tuple[int, int, int]], does: str, besides: str = "") -> list[str]:
    """In which steps a sequence gets another number, of the first few: what the step `does` to it, and what follows."""
    notes = [
        f"{trace.path}: step {plain_step(step)} {does.format(sequence)}: from there on it is called sequence "
        f"{again}{besides}."
        for sequence, step, again in begun[:_LISTED]
    ]
    if (more := len(begun) - _LISTED) > 0:
        notes.append(f"{trace.path}: so {'does' if more == 1 else 'do'} {count(more, 'more step')}.")
    return notes


def _first_that_goes_back(trace: Trace) -> tuple[int, int] | None:
    """The first step of several tokens that begins in the midst of what its sequence was fed, and where it does."""
    fed: Counter[int] = Counter()
    for number, step in trace.steps.items():
        if len(step.tokens) > 1 and 0 < step.positions[0] < fed[step.sequence]:
            return number, step.positions[0]
        fed[step.sequence] += len(step.tokens)
    return None
