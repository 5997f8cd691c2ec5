"""What each side holds its values in, where that is shorter than float32: an engine that does so drifts."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from tracediff.names import local_name
from tracediff.result import Local, OpResult, Storage


def measure_storage(ops: Iterable[OpResult]) -> tuple[Storage, ...]:
    """By side and type, the ops whose values are held so; and what the other side holds these in, with their drift."""
    ops = list(ops)
    found: list[Storage] = []
    for side in ("candidate", "reference"):
        of_type: defaultdict[str, list[OpResult]] = defaultdict(list)
        for op in ops:
            mine, _ = _sides(op, side)
            if mine is not None and mine.stored is not None:
                of_type[mine.stored].append(op)
        found += [_storage(side, kind, held, ops) for kind, held in of_type.items()]
    return tuple(found)


def _sides(op: OpResult, side: str) -> tuple[Local | None, Local | None]:
    both = (op.local, op.reference_local)
    return both if side == "candidate" else both[::-1]


def _storage(side: str, kind: str, held: list[OpResult], ops: list[OpResult]) -> Storage:
    # Weights fit what they are held in, so their rows tell nothing.
    judged = [op for op in ops if _sides(op, side)[0] is not None and op.kind != "embedding"]
    others = Counter(theirs.stored or "f32" for op in held if (theirs := _sides(op, side)[1]) is not None)
    drifts = [op.drift.nmse for op in ops if op.drift is not None]
    return Storage(
        side="candidate" if side == "candidate" else "reference",
        type=kind,
        ops=tuple(dict.fromkeys(local_name(op.op) for op in held)),
        kinds=tuple(dict.fromkeys(op.kind for op in held)),
        records=len(held),
        of=len(judged),
        told=all(mine.told for op in held if (mine := _sides(op, side)[0]) is not None),
        other=others.most_common(1)[0][0] if others else None,
        nmse=drifts[-1] if others and drifts else None,
    )
