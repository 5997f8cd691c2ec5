"""What explained one record, made in another's ops: in the same op of another layer, or in another of its kind."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tracediff.diagnose.hypothesis import SOLVED, Assumed, Hypothesis
from tracediff.diagnose.solve.by_value.readings import Reading
from tracediff.diagnose.solve.edit import Read, Reworked, relayered
from tracediff.model.block_fields import EditedBlocks
from tracediff.model.graph import Graph, Op, Weight
from tracediff.model.weights import reading
from tracediff.names import local_name

_COUNTS = re.compile(r"(?<![\w.])\d")
# Of a changed op, of it as it should be, and of another op: the other, changed alike.
_Change = Callable[[Op, Op, Op], Op | None]


def carried(found: Hypothesis, graph: Graph, segment: Sequence[str]) -> Hypothesis | None:
    """What was found, in ops of another segment; None where it cannot be made there. What it leaves there is not known
    yet.
    """
    ops = found.ops
    if not any(op.name in segment for op in ops):
        is_known = SOLVED not in found.mistakes and not found.may_turn
        ways: list[_Change] = [] if is_known else [relayered]
        ways += [transferred] if is_known or (len(segment) == 1 and _suits(found, graph, graph[segment[0]])) else []
        ops = next(filter(None, (_each(ops, graph, segment, change) for change in ways)), ())
        ops = ops or _in_all_blocks(found.ops, graph, segment)
    return replace(found, ops=ops, parts=_renamed(found, ops, graph)) if ops else None


def is_rule(ops: Sequence[Op]) -> bool:
    """Whether one op reads quantised blocks by another rule."""
    return len(ops) == 1 and bool(ops[0].weights) and isinstance(ops[0].weights[0].read, EditedBlocks)


def _in_all_blocks(ops: Sequence[Op], graph: Graph, segment: Sequence[str]) -> tuple[Op, ...]:
    """A rule by which blocks are read, in all that reads some: one function does. Empty where it is none."""
    if not is_rule(ops):
        return ()
    rule = ops[0].weights[0].read
    assert rule is not None
    matrices = (graph[name] for name in segment if graph[name].kind in ("linear", "linear_id", "embedding"))
    return tuple(reading(op, rule) for op in matrices)


def _suits(found: Hypothesis, graph: Graph, other: Op) -> bool:
    """Whether an edit's words are true of another op: what they count of a matmul's loops is of the matrix that it was
    found in.
    """
    own = graph[found.ops[0].name]
    counts = own.kind == "linear" and bool(found.ops[0].rework) and bool(_COUNTS.search(found.parts[-1].text))
    return not counts or [w.shape for w in own.weights] == [w.shape for w in other.weights]


def _each(ops: Sequence[Op], graph: Graph, segment: Sequence[str], change: _Change) -> tuple[Op, ...]:
    """The changes made in the ops of those names in the segment, or in the one op of one; empty where one cannot be."""
    there = {local_name(name): graph[name] for name in segment}
    others = [graph[segment[0]]] if len(segment) == len(ops) == 1 else [there.get(local_name(op.name)) for op in ops]
    pairs = zip(ops, others, strict=True)
    made = [changed for op, other in pairs if other and (changed := change(op, graph[op.name], other))]
    known = {*graph.ops, *(op.name for op in made)}  # of the layer beside it there may be none
    read = {name for op in made for name in op.inputs if name.startswith("blk.")}
    return tuple(made) if len(made) == len(ops) and read <= known else ()


def _renamed(found: Hypothesis, ops: Sequence[Op], graph: Graph) -> tuple[Assumed, ...]:
    """The words of a solved edit as they are true of the same op in another layer, or of another op: what it reads may
    have another name, as the first residual adds to the embedding, and the buffer of all layers holds the last one's
    value.
    """
    if SOLVED not in found.mistakes or len(ops) != len(found.ops):
        return found.parts
    text = found.parts[-1].text
    for a, b in zip(found.ops, ops, strict=True):
        here, there = graph[a.name], graph[b.name]
        pairs = zip((*here.reads, *a.reads), (*there.reads, *b.reads), strict=False)
        names = {Read.of(*ours).words(here): Read.of(*theirs).words(there) for ours, theirs in pairs}
        names |= {local_name(w.name): local_name(v.name) for w, v in zip(here.weights, there.weights, strict=False)}
        held = zip(a.weights, b.weights, strict=False)
        names |= {Read(w.name).words(here): Read(v.name).words(there) for w, v in held}
        text = _with_names(text, names)
    return (*found.parts[:-1], replace(found.parts[-1], text=text))


def _with_names(text: str, names: Mapping[str, str]) -> str:
    """The text with other names of values."""
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({known})(?![\w.])(?! of (?:the|layer))", lambda m: names[m[0]], text)


def transferred(changed: Op, right: Op, other: Op) -> Op | None:
    """The change from `right` to `changed` made in another op of the kind; None where it is about its own weights, or
    about what it reads.
    """
    if not isinstance(changed.rework, Reworked | None):  # what is done to values of this op
        return None
    if right.kind != other.kind:  # a rule for quantised blocks is one of all kinds
        rule = changed.weights[0].read if changed.weights and other.weights else None
        return reading(other, rule) if isinstance(rule, EditedBlocks) else None
    if [w.name for w in changed.weights] != [w.name for w in right.weights]:
        return None
    if changed.inputs != right.inputs or len(right.weights) != len(other.weights):
        return None
    attrs = {key: value for key, value in changed.attrs.items() if right.attrs.get(key) != value}
    weights = [_read_alike(w, own) for w, own in zip(changed.weights, other.weights, strict=True)]
    if None in weights:
        return None
    read = tuple(filter(None, weights))
    edited = other.with_attrs(**attrs)
    as_changed = {name: getattr(changed, name) for name in ("function", "rework", "stored", "tokens")}
    return replace(edited, weights=read, **as_changed)


def _read_alike(changed: Weight, other: Weight) -> Weight | None:
    """The other weight read as the changed one is; None where that means its own rows."""
    if not isinstance(changed.read, Reading):
        return replace(other, read=changed.read)
    read = changed.read.of_shape(changed.shape, other.shape)
    return replace(other, read=read) if read else None
