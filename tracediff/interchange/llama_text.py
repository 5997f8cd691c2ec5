"""The text of llama.cpp's llama-eval-callback and llama-debug (common/debug.cpp): a node's op, sources, shape and sum.

The corner values that it prints are rounded to four digits and are few, so of a tensor's statistics the text truly
says one: the mean, sum over count. A name does not identify a node there (`Qcur-0` occurs after the matmul, the bias
and the rope; the output projection is `node_31`): its op and its sources do.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import Array, Entry, Say, Summary, reading, summary
from tracediff.interchange.naming import is_op, split_layer
from tracediff.names import NAMES, kind_of

_SUM = "sum = "
_SIZES = re.compile(r"\d{1,18}(, \d{1,18}){0,3}")
# The op by which ggml computes each kind. Scores and probabilities are not here: the text sums them over the whole
# cache, cells included that were never written.
_GGML = {
    "embedding": "GET_ROWS", "rms_norm": "MUL", "linear": "MUL_MAT", "rope": "ROPE", "add": "ADD",
    "swiglu": "SWIGLU", "weighted_values": "CONT",
}  # fmt: skip
_BY_NAME = {
    (_GGML[name.kind], name.llama_cpp): name.local
    for name in NAMES.values()
    if name.llama_cpp and name.kind in ("rope", "add", "swiglu", "weighted_values")
}
_NO_OPS = {
    "RESHAPE": "views", "VIEW": "views", "PERMUTE": "views", "TRANSPOSE": "views",
    "SET_ROWS": "writes to the cache", "CPY": "writes to the cache", "RMS_NORM": "RMS norms before their weight",
    "SOFT_MAX": "sums over unused cells of the cache too",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Head:
    """The line of a tensor, before its values."""

    name: str
    type: str
    op: str
    sources: tuple[str, ...]
    ne: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Node:
    graph: int
    name: str
    op: str
    sources: tuple[str, ...]
    ne: tuple[int, ...]
    sum: float


def entries(path: Path, say: Say) -> Iterator[Entry]:
    """One entry per node, and the tokens where the text lists them. Each graph (micro-batch) is a step."""
    nodes = list(_nodes(path))
    if not nodes:
        raise InterchangeError(
            f"{path}: no tensor of llama-eval-callback or llama-debug is in it. Give what they print on standard "
            "output, with `2>&1` to have the token ids too."
        )
    # The last of a name is the op's output: a product comes before the sum with its bias.
    last = {(node.graph, op): node for node in nodes if (op := _op(node))}
    for node in nodes:
        op = _op(node)
        if op and last[node.graph, op] is node:
            yield Entry(node.graph, node.name, partial(_summary, node, op), op)
        else:
            yield Entry(
                node.graph, node.name, partial(_summary, node, ""), None, "before a bias" if op else _no_op(node)
            )
    tokens = _tokens(path)
    if tokens:
        yield Entry(0, "tokens", partial(Array, np.array(tokens), "int64"))


def _nodes(path: Path) -> Iterator[_Node]:
    """The nodes in order; a graph begins where an op comes again."""
    graph = 0
    seen: set[tuple[str, str]] = set()
    for node in _parse(path):
        op = _op(node)
        if op and (op, node.op) in seen:
            graph, seen = graph + 1, set()
        if op:
            seen.add((op, node.op))
        yield replace(node, graph=graph)


def _parse(path: Path) -> Iterator[_Node]:
    head: _Head | None = None
    with reading(path, "text"), path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if found := _head(line.rstrip("\n")):
                _check_complete(path, head)
                head = found
            elif head and line.startswith(" ") and line.lstrip().startswith(_SUM):
                yield _Node(0, head.name, head.op, head.sources, head.ne, float(line.partition(_SUM)[2]))
                head = None
    _check_complete(path, head)


def _head(line: str) -> _Head | None:
    """What `FUNCTION: NAME = (TYPE) OP(SOURCE{SIZES}, SOURCE{SIZES}}) = {SIZES}` says; the second source may be absent.

    Cut in pieces from its ends, for a pattern would try every way to cut it.
    """
    line, _, sizes = line.rpartition("}) = {")
    function, _, line = line.partition(": ")
    name, _, line = line.partition(" = (")
    kind, _, line = line.partition(") ")
    op, opened, line = line.partition("(")
    first, _, line = line.partition("{")
    second = line.partition("}, ")[2].partition("{")[0]
    if "debug" not in function or not opened or not sizes.endswith("}") or not _SIZES.fullmatch(sizes[:-1]):
        return None
    ne = tuple(map(int, sizes[:-1].split(", ")))
    return _Head(name.lstrip(" "), kind, op.strip(" "), tuple(name for name in (first, second) if name), ne)


def _check_complete(path: Path, head: _Head | None) -> None:
    """A quantised tensor has no sum; any other without it was cut off."""
    if head and head.type in ("f32", "f16", "bf16"):
        raise InterchangeError(f"{path}: no sum is printed for {head.name!r}: the text is cut off. Print it again.")


def _op(node: _Node) -> str | None:
    """The op whose output a node is, or leads to."""
    for source in node.sources:
        stem, _, suffix = source.rpartition(".")
        if suffix == "bias" and node.op == "ADD" and is_op(stem):
            return stem
        if suffix == "weight" and node.op == "MUL_MAT" and node.name == "result_output":
            return "output"  # a tied model multiplies with token_embd.weight
        if suffix == "weight" and is_op(stem) and _GGML.get(kind_of(stem)) == node.op:
            return stem
    if node.op == "FLASH_ATTN_EXT":  # one op with no name of its own
        layer = _layer("".join(node.sources[:1]))
        return f"blk.{layer}.attn_kqv" if layer is not None else None
    pattern, layer = split_layer(node.name)
    local = _BY_NAME.get((node.op, pattern.removesuffix("-N")))
    return f"blk.{layer}.{local}" if local and layer is not None else None


def _layer(name: str) -> int | None:
    """The layer of a view's name: "Qcur-0 (view) (permuted)" -> 0."""
    return split_layer(name.partition(" ")[0])[1]


def _no_op(node: _Node) -> str | None:
    if node.op == "GET_ROWS":
        return "rows whose logits were asked for"
    if node.op == "MUL_MAT" and node.name.startswith("kqv-"):
        return "attention head by head"
    if node.op == "MUL_MAT" and node.name.startswith("kq-"):
        return _NO_OPS["SOFT_MAX"]
    return _NO_OPS.get(node.op)


def _summary(node: _Node, op: str) -> Summary:
    """The mean; ggml's sizes are innermost first."""
    headed = op.endswith(("_rope", "attn_q_norm", "attn_k_norm")) or node.op == "FLASH_ATTN_EXT"
    sizes = node.ne[: 3 if headed else 2][::-1]
    if not math.prod(node.ne):
        raise InterchangeError(f"{node.name} ({op}) has the sizes {node.ne}: nothing. Print it again.")
    if math.prod(sizes) != math.prod(node.ne):
        raise InterchangeError(f"{node.name} ({op}) has the sizes {node.ne}: several sequences at once. Run one alone.")
    shape = (sizes[0], math.prod(sizes[1:])) if node.op == "FLASH_ATTN_EXT" else sizes
    return summary(shape, {"mean": node.sum / math.prod(node.ne)})


def _tokens(path: Path) -> list[int]:
    """The ids that llama-eval-callback lists one to a line, or llama-debug in parentheses; none if that is unclear."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if found := re.search(r"number of input tokens = (\d{1,9})\n", text):
        lines = text[found.end() :].splitlines()[: int(found[1])]
        ids = [line.split()[-1] for line in lines if line.split()]
    elif found := re.search(r"Token ids \((\d{1,9})\):\n", text):
        ids = re.findall(r"\((\d+)\) ", text[found.end() :])
    else:
        return []
    whole = all(n.isdecimal() and len(n) < 10 for n in ids)
    return [int(n) for n in ids] if whole and len(ids) == int(found[1]) else []
