"""What nodes make an op, by the ggml op that they begin with: a norm and its weight, a matmul and its bias.

An op that has no rule makes one of the kind that its node says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tracediff.model.graph import View
from tracediff.model.lift import attention, layout, naming, patterns
from tracediff.model.lift.compressed import COMPRESS
from tracediff.model.lift.lifter import Input, Lifter, Shown
from tracediff.model.lift.nodes import KEYS, VALUES, operands
from tracediff_reference.description import TOKENS, Node, Read


def _rows(lifter: Lifter, i: int, node: Node) -> None:
    """GET_ROWS: the embedding; all rows of a value, those whose logits were asked for; or rows by computed ids."""
    table, ids = operands(node)
    if lifter.nodes.is_weight(table) and lifter.nodes.is_input(ids) and node.type != "i32":
        lifter.add(i, lifter.stem(table), "embedding", [lifter.input(ids)], [table])
    elif lifter.nodes.is_input(ids) and not lifter.nodes.is_leaf(table.of) and lifter.nodes[ids.of].name == "out_ids":
        lifter.value[i] = lifter.value[table.of]
    elif lifter.nodes.is_cache(table) and lifter.nodes.is_input(ids):
        lifter.value[i] = lifter.state(table.of)
    else:
        lifter.plain(i, node)


def _norm(lifter: Lifter, i: int, node: Node) -> None:
    """A norm, its weight and its bias."""
    (read,) = operands(node)
    end = i
    weights: list[Read] = []
    for op in ("MUL", "ADD"):
        found = lifter.nodes.followed_by(end, op)
        if found is None or (op == "ADD" and not _is_bias_of(lifter, found[1], weights)):
            break
        end = lifter.absorb(found[0])
        weights.append(found[1])
    inputs, kind = [lifter.input(read)], patterns.kind(node)
    name = lifter.stem(weights[0]) if weights else lifter.name(node, kind, inputs)
    lifter.add(end, name, kind, inputs, weights, attrs=patterns.attrs(node))


def _is_bias_of(lifter: Lifter, bias: Read, weights: Sequence[Read]) -> bool:
    return lifter.nodes[bias.of].name == f"{lifter.stem(weights[0])}.bias"


def _matmul(lifter: Lifter, i: int, node: Node) -> None:
    a, b = operands(node)[:2]
    if lifter.nodes.is_weight(a):
        _linear(lifter, i, node, a, b)
    elif values := attention.kept(lifter, a, VALUES):
        attention.weighted_values(lifter, i, node, values, b)
    elif keys := attention.kept(lifter, a, KEYS):
        attention.scores(lifter, i, node, keys, b)
    else:  # the weight second, as one row of all its taps: after im2col, of a convolution
        lifter.plain(i, node, "mul_mat by taps" if lifter.nodes.is_weight(b) else "")


def _linear(lifter: Lifter, i: int, node: Node, weight: Read, x: Read) -> None:
    """A matmul with a weight, and its bias: of rows of tokens, or of experts where ids say which."""
    experts = node.op == "MUL_MAT_ID"
    end, weights = i, [weight]
    found = lifter.nodes.followed_by(i, "ADD_ID" if experts else "ADD")
    if found and _is_bias_of(lifter, found[1], weights):
        end = lifter.absorb(found[0])
        weights.append(found[1])
    stem = lifter.stem(weight)
    name = stem
    if stem in ("output", "token_embd"):
        name = "output_unscaled" if lifter.nodes.users(end) else "output"
    inputs = [lifter.input(read) for read in node.reads[1:] if read]
    flat = len(x.shape) == 2 and x.shape[0] == TOKENS and len(lifter.nodes[weight.of].shape) <= 2
    kind = "linear_id" if experts else "linear" if flat else "mul_mat"
    if kind != "mul_mat" and (lifter.nodes.is_leaf(x.of) or layout.is_whole(x, lifter.nodes[x.of])):
        inputs[0] = Input(inputs[0].name, inputs[0].past)  # it makes rows of any shape
    lifter.add(end, name, kind, inputs, weights, lifter.nodes.heads(end) if kind == "linear" else None)


def _rotation(lifter: Lifter, i: int, node: Node) -> None:
    x, positions, *factors = operands(node)
    source = lifter.input(x)
    inputs = [source, lifter.input(positions)]
    name = naming.of_value(node.name)
    name = name if name and name not in lifter.ops else naming.rotated(source.name)
    rope = patterns.rope(node)
    name = lifter.add(i, name, "rope", inputs, factors, attrs={"rope": rope})
    # Factors may be those of a wider rotation in other layers.
    weights = tuple(weight.rows(slice(0, rope.n_rot // 2)) for weight in lifter.ops[name].weights)
    lifter.ops[name] = replace(lifter.ops[name], weights=weights)


def _compress(lifter: Lifter, i: int, node: Node) -> None:
    """COMPRESS: of all rows so far, those of the step's tokens."""
    inputs = [*map(lifter.input, operands(node)), Input("positions"), Input("positions", True)]
    lifter.add(i, lifter.name(node, "compress", inputs), "compress", inputs, attrs=patterns.attrs(node))


def _sort(lifter: Lifter, i: int, node: Node) -> None:
    """ARGSORT of which only the first k are ever read: the choice of experts."""
    seen = {layout.view(read) for _, read in lifter.nodes.users(i)}
    (chosen,) = seen if len(seen) == 1 else (None,)
    (scores,) = operands(node)
    if chosen is None or chosen.offset or chosen.shape[:-1] != layout.axes(node.shape[:-1]):
        lifter.plain(i, node)
        return
    inputs = [lifter.input(scores)]
    name = lifter.name(node, "top_k", inputs).replace("argsort", "topk")
    name = lifter.add(i, name, "top_k", inputs, (), chosen.shape, {"k": chosen.shape[-1]})
    lifter.shown[name] = Shown(i, chosen)
    lifter.seen[i] = None


def _scale(lifter: Lifter, i: int, node: Node) -> None:
    """By 0, of a cache of states that is new: no op. By the number of tokens, one that reads the step."""
    each = node.params[0] if node.params else 0
    if isinstance(each, float) and len(node.params) == 1:
        inputs = [lifter.input(operands(node)[0]), Input("positions")]
        lifter.add(i, lifter.name(node, "scale", inputs), "scale_by_tokens", inputs, attrs={"each": each})
    elif not (node.into and lifter.nodes.is_cache(node.into)):
        lifter.plain(i, node)


def _copy(lifter: Lifter, i: int, node: Node) -> None:
    """CONT, CPY: into a cache of states what the next step finds there; else another order, or another type."""
    read = operands(node)[0]
    if node.into and lifter.nodes.is_cache(node.into):
        _hand_on(lifter, i, read, node.into)
    elif attention.is_copied_for(lifter, i, read):
        lifter.casts[i] = read
    elif layout.is_whole(read, lifter.nodes[read.of]) and node.type == lifter.nodes[read.of].type:
        lifter.value[i] = lifter.input(read).name
    else:
        lifter.plain(i, node)


def _silu(lifter: Lifter, i: int, node: Node) -> None:
    """SILU; divided by what it is of, it is llama.cpp's way to write a sigmoid (src/models/qwen2moe.cpp)."""
    user = lifter.nodes.only_user(i)
    (x,) = operands(node)
    if user and user[1].op == "DIV" and [read.of for read in operands(user[1])] == [i, x.of]:
        inputs = [lifter.input(x)]
        lifter.add(lifter.absorb(user[0]), lifter.name(user[1], "sigmoid", inputs), "sigmoid", inputs)
    else:
        lifter.plain(i, node)


def _fill(lifter: Lifter, i: int, node: Node) -> None:
    """FILL: of memory that nobody has written the shape alone counts."""
    (read,) = operands(node)
    if not lifter.nodes.is_cache(read) or TOKENS not in node.shape:
        lifter.plain(i, node)
        return
    shape = View(layout.axes(node.shape), tuple(int(size == TOKENS) for size in node.shape))
    inputs = [Input("positions", view=shape)]
    lifter.add(i, lifter.name(node, "fill", inputs), "fill", inputs, attrs=patterns.attrs(node))


def _hand_on(lifter: Lifter, i: int, read: Read, into: Read) -> None:
    state = lifter.state(into.of)
    handed = lifter.add(i, f"{state}_next", "copy", [lifter.input(read)], (), layout.axes(read.shape))
    lifter.ops[state] = replace(lifter.ops[state], inputs=(*lifter.ops[state].inputs, handed))


RULES: Mapping[str, Callable[[Lifter, int, Node], None]] = MappingProxyType({
    "GET_ROWS": _rows, "RMS_NORM": _norm, "NORM": _norm,
    "MUL_MAT": _matmul, "MUL_MAT_ID": _matmul, "ROPE": _rotation, "ROPE_BACK": _rotation, "SET_ROWS": attention.keep,
    "SOFT_MAX": attention.softmax, "FLASH_ATTN_EXT": attention.flash, "ARGSORT": _sort, "SCALE": _scale,
    "FILL": _fill, COMPRESS: _compress, "SILU": _silu, "CONT": _copy, "CPY": _copy, "DUP": _copy,
})  # fmt: skip
