"""Keys that are compressed over blocks of tokens, as DeepSeek V4 has them, described with a row for each token.

llama.cpp keeps a row for each block that is complete, and what the next ones are made of; how many rows there are
follows neither tokens nor positions, and which a step reads is in inputs that it sets by itself
(src/models/deepseek4.cpp, src/llama-kv-cache-dsv4.cpp). The same values are those of a cache like any other, where the
row of the token that ends a block is that of the block, and no query sees the others.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from tracediff.model.lift.layout import BOTH
from tracediff.model.lift.nodes import operands
from tracediff_reference.description import POSITIONS, TOKENS, Description, Node, Read, Size

COMPRESS = "COMPRESS"  # no op of ggml's; its parameters: the tokens of a block, and whether they overlap
BLOCKS = {"csa": 4, "lid": 4, "hca": 128}  # tokens of a block, by what llama.cpp calls its caches
_MADE = re.compile(r"(csa|lid|hca)_state_compress-\d+")
_MASK = re.compile(r"dsv4_(csa|lid|hca)_kq_mask")


@dataclass(frozen=True, slots=True)
class Cells:
    """Those of a cache: how many llama.cpp has of them, and how many tokens each is of."""

    n: int
    tokens: int


def by_tokens(description: Description) -> tuple[Description, Mapping[int, Cells]]:
    """The same graph with compressed rows of each token; and the nodes that have rows of cells in llama.cpp's, or
    places among them.
    """
    nodes = [*description.nodes]
    rotations = [i for i, node in enumerate(nodes) if node.op == "ROPE" and _MADE.fullmatch(node.name)]
    made, caches = dict[int, Cells](), dict[int, Cells]()
    for i in rotations:
        inside, cache = _compressor(nodes, i)
        caches[cache] = _cells(nodes[cache], 0, nodes[i].name.partition("_")[0])
        made |= dict.fromkeys(inside, caches[cache])
    named = ((i, node, _MASK.fullmatch(node.name)) for i, node in enumerate(nodes))
    masks = {i: _cells(node, -1, found[1]) for i, node, found in named if found}
    made |= _see(nodes, caches, masks)
    return replace(description, nodes=tuple(nodes)), made


def _cells(node: Node, axis: int, cache: str) -> Cells:
    size = node.shape[axis]
    assert isinstance(size, int)
    return Cells(size, BLOCKS[cache])


def _compressor(nodes: list[Node], rotation: int) -> tuple[set[int], int]:
    """Rewrites what makes compressed rows, up to where they are kept: those nodes, and the cache."""
    scaled = operands(nodes[rotation])[0].of
    normed = operands(nodes[scaled])[0].of
    summed = operands(nodes[normed])[0].of
    width = nodes[normed].shape[-1]
    assert isinstance(width, int)
    joined, inside = _parts(nodes, summed)
    states = [_kept(nodes, joined[name]) for name in ("kv", "score")]
    for i in inside:
        nodes[i] = _nothing(nodes[i])
    overlaps = states[0].shape[-1] != width
    block = BLOCKS[nodes[rotation].name.partition("_")[0]]
    nodes[summed] = replace(nodes[summed], op=COMPRESS, reads=tuple(states), params=(block, int(overlaps)))
    last, whole = summed, Read(summed, (TOKENS, width), (width, 1))
    nodes[summed] = replace(nodes[summed], shape=whole.shape)
    made = _from(nodes, summed)
    made = made[: next(n for n, i in enumerate(made) if nodes[i].op == "SET_ROWS") + 1]
    for i in made[1:-1]:
        is_rotation, own = i == rotation, [read for read in operands(nodes[i]) if read.of != last]
        shape: tuple[Size, ...] = (TOKENS, 1, width) if is_rotation else (TOKENS, width)
        strides: tuple[Size, ...] = (width, width, 1) if is_rotation else (width, 1)
        reads = [Read(last, shape, strides), *own] if nodes[i].op != "MUL_MAT" else [*own, Read(last, shape, strides)]
        nodes[i] = replace(nodes[i], shape=shape, reads=tuple(reads))
        last = i
    starts = operands(nodes[rotation])[1].of
    nodes[starts] = replace(nodes[starts], shape=(TOKENS,))
    into = nodes[made[-1]].into
    assert into
    nodes[made[-1]] = _keeping(nodes[made[-1]], Read(last, whole.shape, whole.strides), into.of)
    return {*made}, into.of


def _from(nodes: list[Node], first: int) -> list[int]:
    """A node, its only reader, the only one of that, and so on."""
    found = [first]
    while len(of := [i for i, node in enumerate(nodes) if any(read.of == found[-1] for read in operands(node))]) == 1:
        found.append(of[0])
    return found


def _parts(nodes: list[Node], summed: int) -> tuple[dict[str, int], set[int]]:
    """Where what earlier steps left is joined with the step's own, of values and of their scores, and all nodes from
    there to the sum; and those that keep what later steps need.
    """
    joined: dict[str, int] = {}
    inside: set[int] = set()
    stack = [read.of for read in operands(nodes[summed])]
    while stack:
        i = stack.pop()
        node = nodes[i]
        if node.op == "NONE" or i in inside:
            continue
        leaf = nodes[operands(node)[0].of]
        if node.op == "CONCAT" and leaf.op == "NONE":
            joined["score" if "_score" in leaf.name else "kv"] = i
        else:
            inside.add(i)
            stack += [read.of for read in operands(node)]
    states = {operands(nodes[i])[0].of for i in joined.values()}
    writers = [i for i, node in enumerate(nodes) if node.into and node.into.of in states]
    return joined, inside | {*writers} | {operands(nodes[i])[0].of for i in writers}


def _kept(nodes: list[Node], joined: int) -> Read:
    """The step's own rows are kept for all steps after it, and these are read."""
    state, own = operands(nodes[joined])
    width = own.shape[-1]
    assert isinstance(width, int)
    nodes[joined] = _keeping(replace(nodes[joined], op="SET_ROWS"), own, state.of)
    nodes[state.of] = replace(nodes[state.of], shape=(POSITIONS, width))
    return Read(state.of, (POSITIONS, width), (width, 1))


def _keeping(node: Node, rows: Read, cache: int) -> Node:
    into = Read(cache, (POSITIONS, *rows.shape[1:]), rows.strides)
    return replace(node, shape=into.shape, reads=(rows,), into=into)


def _nothing(node: Node) -> Node:
    return Node("NONE", node.name, node.type, node.shape)


def _see(nodes: list[Node], caches: Mapping[int, Cells], masks: Mapping[int, Cells]) -> dict[int, Cells]:
    """Rewrites all that reads these caches and masks, as if each position had a cell: what has rows of cells, or places
    among them.
    """
    cells = {**caches, **masks}
    for i in cells:
        nodes[i] = replace(nodes[i], shape=_rows(nodes[i].shape, cells[i].n))
    for i, node in enumerate(nodes):
        of = [cells[read.of] for read in operands(node) if read.of in cells]
        if not of or (node.into and node.into.of in caches):
            continue
        reads = [read and (_seen(read, of[0].n) if read.of in cells else read) for read in node.reads]
        nodes[i] = replace(node, shape=_rows(node.shape, of[0].n), reads=tuple(reads))
        if nodes[i].shape != node.shape or node.type == "i32":
            cells[i] = of[0]
    return cells


def _seen(read: Read, cells: int) -> Read:
    strides = tuple(_size(size, cells, n == 0 and read.shape[0] == TOKENS) for n, size in enumerate(read.strides))
    return Read(read.of, _rows(read.shape, cells), strides, read.offset)


def _rows(shape: tuple[Size, ...], cells: int) -> tuple[Size, ...]:
    """A shape whose first axis, or that behind the tokens, is of cells."""
    of_tokens = int(shape[0] == TOKENS)
    return tuple(_size(size, cells, n == of_tokens) for n, size in enumerate(shape))


def _size(size: Size, cells: int, is_plain: bool) -> Size:
    """Cells beside positions are as many again; by themselves, where they may be, a position each."""
    both = {(cells, 0, 1, 0, 0): BOTH, (0, cells, 0, 1, 0): (0, 0, 0, 2, 0)}
    if isinstance(size, tuple):
        return both.get(size, size)
    return POSITIONS if is_plain and size == cells else size
