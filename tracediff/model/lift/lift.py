"""The graph of a GGUF file of any architecture."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tracediff.errors import ModelError
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op, matmul_type
from tracediff.model.hparams import guess_hparams
from tracediff.model.lift.compressed import by_tokens
from tracediff.model.lift.lifter import Lifter, Shown
from tracediff.model.lift.rules import RULES
from tracediff.names import HIDDEN_STATES, layer_of, layers_of, local_name
from tracediff_reference.description import Description


@dataclass(frozen=True, slots=True)
class Lifted:
    """A graph, and where llama.cpp's own shows the value of each op."""

    graph: Graph
    shown: Mapping[str, Shown]


def lift(description: Description, file: GGUFFile) -> Lifted:
    """The description of `file`'s graph as ops; raises ModelError where there is nothing to lift."""
    described, cells = by_tokens(description)
    lifter = Lifter(described, file)
    for i, node in enumerate(described.nodes):
        if node.op != "NONE" and i not in lifter.absorbed and 0 not in node.shape:
            RULES.get(node.op, Lifter.plain)(lifter, i, node)
    if not lifter.ops:
        raise ModelError(f"{file.path}: llama.cpp's graph of this model computes nothing.")
    ops, shown = lifter.ops, dict[str, Shown]()
    for name, place in lifter.shown.items():
        if place.node not in cells:
            shown[name] = place
        elif described.nodes[place.node].type == "i32":
            shown[name] = replace(place, block=cells[place.node].tokens)
    called = _ends(ops)
    ops = {called.get(name, name): _renamed(op, called) for name, op in ops.items()}
    shown = {called.get(name, name): place for name, place in shown.items()}
    return Lifted(Graph(guess_hparams(file), ops, matmul_type(ops.values(), file)), shown)


def _ends(ops: Mapping[str, Op]) -> dict[str, str]:
    """The sums that layers end in, where llama.cpp has no name for them: what the next layer reads of one, alone."""
    called: dict[str, str] = {}
    for n in layers_of(ops):
        own = {name for name in ops if layer_of(name) == n}
        read = {name for op in ops.values() if op.name not in own for name in op.inputs if name in own}
        named = any(local_name(name) in HIDDEN_STATES for name in own)
        if not named and len(read) == 1 and ops[end := read.pop()].kind == "add":
            called[end] = f"blk.{n}.ffn_residual"
    return called


def _renamed(op: Op, called: Mapping[str, str]) -> Op:
    """The op under another name, or with inputs under others."""
    return replace(op, name=called.get(op.name, op.name), inputs=tuple(called.get(name, name) for name in op.inputs))
