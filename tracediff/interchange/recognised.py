"""Entries of unknown names made ops: what `matching` and `following` find in the first step holds for all."""

from collections.abc import Iterator
from pathlib import Path

from tracediff.errors import InterchangeError
from tracediff.interchange.border import is_rotated_by
from tracediff.interchange.entry import Entry, Say
from tracediff.interchange.layouts import Layout, arranged
from tracediff.interchange.matching import (
    Found,
    Match,
    between,
    by_reference,
    candidates,
    in_order,
    neighbours_of,
)
from tracediff.interchange.steps import Named
from tracediff.model.model import Model
from tracediff.trace.reader import Trace

_SHOWN = 6  # ops that a value may be


def recognise(
    named: list[Named], unknown: list[Entry], reference: Trace, model: Path | None, say: Say
) -> tuple[list[Named], list[Entry]]:
    """The entries that are proved to be an op's output, in our layout; and those that stay unknown.

    `say` is told of each what it is and how that is known, and of the others what they lie between. Raises
    InterchangeError where the reference holds nothing of the step.
    """
    if not unknown:
        return [], []
    step = min(entry.step for entry in unknown)
    if not any(record.has_data for record in reference.step_ops(step)):
        raise InterchangeError(
            f"{reference.path}: it holds no values of step {step}, so nothing can be found by them. Trace the "
            "reference with --capture all, on the same tokens."
        )
    found = _found(named, unknown, step, model)
    by_reference(found, reference, step)
    if model:
        from tracediff.interchange.following import Following

        opened = Model(model)
        Following(found, opened.graph, opened.weights(), reference.steps[step]).run()
    matches = {match.name: match for match in found.matches.values() if match.how != "named"}
    for line in _lines(found, matches, reference, step, model):
        say(line)
    ops = [_named(entry, matches[entry.name], reference) for entry in unknown if entry.name in matches]
    return ops, [entry for entry in unknown if entry.name not in matches]


def _found(named: list[Named], unknown: list[Entry], step: int, model: Path | None) -> Found:
    """The values of the step in the order of the file, those whose names say what they are with their names."""
    hparams = Model(model).graph.hparams if model else None
    paired = hparams.head_dim if hparams and hparams.rope.pairing == "neighbours" else None
    known = {n.entry.name: n for n in named if n.entry.step == step and n.rows is None}
    of_step = [entry for entry in unknown if entry.step == step]
    found = Found(candidates([*of_step, *(n.entry for n in known.values())]), {n.op for n in known.values()})
    for name, n in known.items():
        if name in found.candidates:
            axes = tuple(range(found.candidates[name].values.ndim))
            head_dim = paired if is_rotated_by(n.op, n.whose) else None
            found.matches.setdefault(n.op, Match(name, n.op, "named", 0.0, Layout(axes, head_dim)))
    return found


def _named(entry: Entry, match: Match, reference: Trace) -> Named:
    record = reference.ops.get((entry.step, match.op))
    return Named(match.op, arranged(entry, match.layout, record.shape if record else None), None)


def _lines(found: Found, matches: dict[str, Match], reference: Trace, step: int, model: Path | None) -> Iterator[str]:
    """What each value is, and how sure that is."""
    records = reference.step_ops(step)
    order = {record.op: number for number, record in enumerate(records)}
    for match in sorted(matches.values(), key=lambda match: order.get(match.op, len(order))):
        yield f"{match.name} = {match.op}: {_how(match, reference)}"
    again = [f"{name} ({op})" for name, op in found.again.items()]
    if again:
        yield f"left out {len(again)}, the same values again: {', '.join(again)}"
    is_ordered = in_order(found, order)
    for candidate in found.unnamed():
        shape = list(candidate.values.shape)
        if not is_ordered:
            yield f"{candidate.name} {shape} has no name: it equals nothing"
            continue
        before, after = (op or "the end" for op in neighbours_of(found, candidate.name))
        may_be = between(found, candidate.name, records)
        of = (
            f"; by its size {' or '.join(may_be)}"
            if 0 < len(may_be) <= _SHOWN
            else ""
            if may_be
            else "; no op there has its size"
        )
        yield f"{candidate.name} {shape} has no name: between {before} and {after}{of}"
    if not is_ordered:
        yield (
            "The values do not stand in the order in which they were computed, so none is known by its neighbours. "
            "An .npz keeps the order in which arrays are given to it."
        )
    elif not model and found.unnamed():
        yield "With --model FILE.gguf what differs from the reference is found too, by what is computed from it."


def _how(match: Match, reference: Trace) -> str:
    said = {
        "equal": f"equals {reference.path.name}'s",
        "follows": "equals what the model makes of those before it",
        "continues": "differs, but what comes after follows from it alone",
    }[match.how]
    further = f"; the next is at {match.next:.1e}" if match.next is not None else ""
    changed = f"; {match.layout.words}" if match.layout.words else ""
    return f"{said} (NMSE {match.error:.1e}{further}){changed}"
