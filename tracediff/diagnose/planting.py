"""Known mistakes planted in a graph, and edits that a report's words tell."""

from difflib import get_close_matches

from tracediff.diagnose.mistakes import BANK
from tracediff.diagnose.mistakes.mistake import Context
from tracediff.diagnose.solve.grammar import edited
from tracediff.errors import TracediffError
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op
from tracediff.model.weights import Weights
from tracediff.names import layer_of, local_name


def undoes(changed: Op, op: Op) -> bool:
    """Whether a mistake in an op that has one already puts itself in its place."""
    replaced: list[tuple[object, object]] = [(op.function, changed.function), (op.rework, changed.rework)]
    replaced += [(weight.read, other.read) for weight, other in zip(op.weights, changed.weights, strict=False)]
    return any(before is not None and before is not after for before, after in replaced)


def plant(graph: Graph, file: GGUFFile, fault: str) -> Graph:
    """The graph with a fault planted, as in "rope_pairing" (every layer), "rope_pairing@3" or "eps@output_norm".

    It is the first variant of the fault; where that is not the same for all ops, the one that most of them have.

    Or an edit of an op in the words of a report, as in "blk.2.attn_q: heads reversed", or of one name in every layer.

    Raises TracediffError when there is no such fault, nothing in this model that it applies to, or another fault that
    it would undo.
    """
    if ":" in fault:
        return _edited(graph, file, fault)
    name, _, place = fault.partition("@")
    if name not in BANK:
        near = get_close_matches(name, BANK)
        known = f"Near: {', '.join(near)}. `tracediff faults` lists all" if near else f"Known: {', '.join(BANK)}"
        raise TracediffError(f"unknown fault {name!r}. {known}.")
    mistake = BANK[name]
    changed: dict[str, list[Op]] = {}  # by variant: an engine has one of them
    for op in graph:
        local = local_name(op.name)
        if mistake.where.holds(op, graph) and (not place or place in (local, op.name, str(layer_of(op.name)))):
            variant = next(mistake.variants(op, Context(graph, file)), None)
            if variant and undoes(variant.op, op):
                raise TracediffError(
                    f"the fault {fault!r} would undo the one that is in {op.name} already: plant them in different ops."
                )
            if variant:
                changed.setdefault(variant.same_as(op), []).extend(variant.ops)
    if not changed:
        raise TracediffError(
            f"the fault {fault!r} applies to nothing in this {graph.hparams.arch} model of "
            f"{graph.hparams.n_layer} layers. It is made for: {mistake.where}."
        )
    return graph.changed(*max(changed.values(), key=len))


def _edited(graph: Graph, file: GGUFFile, fault: str) -> Graph:
    """The graph with an edit that a report's words tell."""
    place, _, words = (part.strip() for part in fault.partition(":"))
    ops = [op for op in graph if place in (op.name, local_name(op.name))]
    if not ops:
        raise TracediffError(
            f"the fault {fault!r}: this model has no op {place!r}. `tracediff inspect MODEL` lists them."
        )
    weights = Weights(file)
    changed = [edited(op, graph, weights, words.rstrip(".")) for op in ops]
    if not all(changed):
        raise TracediffError(
            f"the fault {fault!r}: {place} has no such edit. `tracediff faults` shows what can be said; a number of "
            "tokens in it is that of a step of 8."
        )
    return graph.changed(*(op for op in changed if op))
