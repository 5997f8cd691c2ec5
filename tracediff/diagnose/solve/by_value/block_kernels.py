"""Kernels that read quantised blocks, statement by statement, and every single edit of them.

What a rule makes wrong is solved for where enough was recorded to tell it (`blocks`). An edit of one number or operator
of the code is one of a thousand or two: of these a few rows tell which it is.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tracediff.diagnose.solve.by_value.block_layout import Layout
from tracediff.diagnose.solve.loops.nodes import Path, with_node
from tracediff.diagnose.solve.loops.nodes import nodes as nodes_of
from tracediff.model.block_fields import Fields

# As ggml's read them (ggml-quants.c, dequantize_row_*): b are the bytes of a block, d and m its scale and minimum, y
# its values. Lanes are taken all at once; a statement is a line.
_SIX_BITS = """
for j in range(8):
    if j < 4:
        scale = b[4 + j] & 63
        minimum = b[4 + j + 4] & 63
    else:
        scale = b[4 + j + 4] & 15 | b[4 + j - 4] >> 6 << 4
        minimum = b[4 + j + 4] >> 4 | b[4 + j - 0] >> 6 << 4
"""
KERNELS = {
    "Q4_0": """
for l in lanes(16):
    y[l] = d * ((b[2 + l] & 15) - 8)
    y[l + 16] = d * ((b[2 + l] >> 4) - 8)
""",
    "Q4_1": """
for l in lanes(16):
    y[l] = d * (b[4 + l] & 15) + m
    y[l + 16] = d * (b[4 + l] >> 4) + m
""",
    "Q5_0": """
for l in lanes(16):
    low = b[2 + l // 8] >> l % 8 & 1
    high = b[4 + l // 8] >> l % 8 & 1
    y[l] = d * ((b[6 + l] & 15 | low << 4) - 16)
    y[l + 16] = d * ((b[6 + l] >> 4 | high << 4) - 16)
""",
    "Q5_1": """
for l in lanes(16):
    low = b[4 + l // 8] >> l % 8 & 1
    high = b[6 + l // 8] >> l % 8 & 1
    y[l] = d * (b[8 + l] & 15 | low << 4) + m
    y[l + 16] = d * (b[8 + l] >> 4 | high << 4) + m
""",
    "Q8_0": """
for l in lanes(32):
    y[l] = d * int8(b[2 + l])
""",
    "Q2_K": """
for j in range(16):
    for l in lanes(16):
        q = b[16 + j // 8 * 32 + j % 2 * 16 + l] >> j // 2 % 4 * 2 & 3
        y[16 * j + l] = d * (b[j] & 15) * q - m * (b[j] >> 4)
""",
    "Q3_K": """
for j in range(16):
    low = b[96 + j % 8] >> j // 8 * 4 & 15
    high = b[104 + j % 4] >> j // 4 * 2 & 3
    scale = (low | high << 4) - 32
    for l in lanes(16):
        q = b[32 + j // 8 * 32 + j % 2 * 16 + l] >> j // 2 % 4 * 2 & 3
        top = b[j % 2 * 16 + l] >> j // 2 & 1
        y[16 * j + l] = d * scale * ((q | top << 2) - 4)
""",
    "Q4_K": _SIX_BITS
    + """    for l in lanes(32):
        q = b[16 + j // 2 * 32 + l] >> j % 2 * 4 & 15
        y[32 * j + l] = d * scale * q - m * minimum
""",
    "Q5_K": _SIX_BITS
    + """    for l in lanes(32):
        q = b[48 + j // 2 * 32 + l] >> j % 2 * 4 & 15
        top = b[16 + l] >> j & 1
        y[32 * j + l] = d * scale * (q | top << 4) - m * minimum
""",
    "Q6_K": """
for h in range(2):
    for l in lanes(32):
        s = l // 16
        q1 = b[64 * h + l] & 15 | (b[128 + 32 * h + l] >> 0 & 3) << 4
        q2 = b[64 * h + l + 32] & 15 | (b[128 + 32 * h + l] >> 2 & 3) << 4
        q3 = b[64 * h + l] >> 4 | (b[128 + 32 * h + l] >> 4 & 3) << 4
        q4 = b[64 * h + l + 32] >> 4 | (b[128 + 32 * h + l] >> 6 & 3) << 4
        y[128 * h + l] = d * int8(b[192 + 8 * h + s]) * (q1 - 32)
        y[128 * h + l + 32] = d * int8(b[192 + 8 * h + s + 2]) * (q2 - 32)
        y[128 * h + l + 64] = d * int8(b[192 + 8 * h + s + 4]) * (q3 - 32)
        y[128 * h + l + 96] = d * int8(b[192 + 8 * h + s + 6]) * (q4 - 32)
""",
}
_SAID = 2  # statements that are told: others that are wrong alike are counted
_STEPS = (1, 2, 4, 8, 16, 32)
_MASKS = (1, 3, 7, 15, 31, 63, 127, 255)
_OPS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.BitAnd: (ast.BitOr, ast.BitXor),
    ast.BitOr: (ast.BitAnd, ast.BitXor),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.FloorDiv: (ast.Mod,),
    ast.Mod: (ast.FloorDiv,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """Blocks as an edited kernel reads them: `Rule`. `said` are its statements that are others, and the right ones."""

    source: str
    said: tuple[tuple[str, str], ...]

    def __call__(self, fields: Fields) -> "Values":
        """What it makes of all blocks of a tensor."""
        return self.made(fields, fields.raw, np.arange(len(fields.raw)))

    def made(self, fields: Fields, tensor: np.ndarray, blocks: np.ndarray) -> "Values":
        """What it makes of these `blocks` of a tensor, beyond which lie its other bytes.

        What is stored beyond the values of a block is lost.
        """
        y = _Stored(np.zeros((len(fields.raw), fields.low[0].size), np.float32))
        d, m = (None if of is None else fields.read(of).astype(np.float64)[:, None] for of in (fields.d, fields.m))
        names = {
            "b": _Bytes(tensor, blocks * fields.raw.shape[1]),
            "d": d,
            "m": m,
            "y": y,
            "int8": _as_int8,
            "range": range,
            "lanes": _lanes,
        }
        try:
            exec(_compiled(self.source), {"__builtins__": {}}, names)
        except (ArithmeticError, NameError, ValueError):  # no engine divides by 0, or reads what is not there yet
            y.values[:] = np.nan
        return Values(y.values)

    def words(self, layout: Layout) -> str:
        """Its statements, and those that belong there."""
        said = [f"{made} where {right} belongs" for made, right in self.said[:_SAID]]
        more = len(self.said) - _SAID
        said += [f"and so on, in {more} more"] * (more > 0)
        return f"in a block of {layout.type}, whose bytes are b, {'; '.join(said)}"


@dataclass(frozen=True, slots=True)
class Values:
    """What a kernel made of blocks, float32 [n, values of one]."""

    made: np.ndarray

    def values(self) -> np.ndarray:
        """The same."""
        return self.made


class _Bytes:
    """Those of blocks that begin at these bytes of a tensor, by their numbers in a block: int64 [n, lanes]."""

    def __init__(self, tensor: np.ndarray, begin: np.ndarray) -> None:
        self._all, self._begin = tensor.reshape(-1), begin[:, None]

    def __getitem__(self, at: int | np.ndarray) -> np.ndarray:
        return self._all[(self._begin + at) % self._all.size].astype(np.int64)


class _Stored:
    """Where values of blocks are stored, by their numbers in a block."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __setitem__(self, at: int | np.ndarray, values: np.ndarray) -> None:
        places = np.atleast_1d(at)
        inside = (places >= 0) & (places < self.values.shape[1])
        self.values[:, places[inside]] = np.broadcast_to(values, (len(self.values), len(places)))[:, inside]


def _lanes(n: int) -> tuple[np.ndarray, ...]:
    return (np.arange(n),)


def _as_int8(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int8).astype(np.int64)


@lru_cache(4096)
def _compiled(source: str) -> Any:
    return compile(source, "kernel", "exec")


@lru_cache(maxsize=16)
def edited(type_: str) -> tuple[Kernel, ...]:
    """The kernels of a type in which one number, operator or name is another, or an operand is left out, and those with
    another number in all places of a loop or branch that have it beside the same operator. None of a type that has no
    kernel here.
    """
    source = KERNELS.get(type_)
    return tuple(dict.fromkeys(_edited(source))) if source else ()


def _edited(source: str) -> Iterator[Kernel]:
    lines = source.splitlines()
    statements = {at: ast.parse(line.strip()) for at, line in enumerate(lines) if " = " in line}
    nodes = [(at, *found) for at, statement in statements.items() for found in _nodes(statement)]
    targets = [lines[at].partition(" = ")[0].strip() for at in statements]
    names = [
        {"d", "m"} if " m " in source else set(),
        {*re.findall(r"for (\w+)", source)},
        {name for name in targets if name.isidentifier()},
    ]
    heads = [at for at in range(len(lines)) if at not in statements]
    blocks = {at: max(head for head in heads if head < at) for at in statements}  # those of a loop or a branch
    alike: dict[object, list[int]] = {}
    for place, (at, node, _, beside) in enumerate(nodes):
        if isinstance(node, ast.Constant):
            alike.setdefault((blocks[at], beside, node.value), []).append(place)
    singly = [[place] for place in range(len(nodes))]
    for places in (*singly, *(places for places in alike.values() if len(places) > 1)):
        for others in zip(*(_others(nodes[place][1], names) for place in places), strict=True):
            made: dict[int, ast.AST] = {}
            for place, other in zip(places, others, strict=True):
                at, _, path, _ = nodes[place]
                made[at] = with_node(made.get(at, statements[at]), path, other)
            changed = lines.copy()
            for at, tree in made.items():
                changed[at] = lines[at].replace(lines[at].strip(), ast.unparse(tree))
            said = tuple((ast.unparse(tree), ast.unparse(statements[at])) for at, tree in made.items())
            yield Kernel("\n".join(changed), said)


def _nodes(statement: ast.Module) -> list[tuple[ast.expr, Path, object]]:
    """What may be edited in a statement, where it is, and beside which operator it stands, on which side."""
    paths = {id(place.node): place.path for place in nodes_of(statement)}
    inside = [node for node in ast.walk(statement) if isinstance(node, ast.Constant | ast.BinOp | ast.Name)]
    operands = ((node, side) for node in inside if isinstance(node, ast.BinOp) for side in ("left", "right"))
    beside = {id(getattr(node, side)): (type(node.op), side) for node, side in operands}
    return [(node, paths[id(node)], beside.get(id(node))) for node in inside]


def _others(node: ast.expr, names: Sequence[set[str]]) -> list[ast.expr]:
    """What may stand in its place; `names` are those that may for one another."""
    match node:
        case ast.Constant(value=int(c)):
            near = (c + by * sign for by in _STEPS for sign in (1, -1))
            return [ast.Constant(n) for n in dict.fromkeys((*near, 2 * c, c // 2, 0, *_MASKS)) if n != c and n >= 0]
        case ast.BinOp():
            made = (ast.BinOp(node.left, op(), node.right) for op in _OPS.get(type(node.op), ()))
            return [*made, node.left, node.right]
        case ast.Name(ctx=ast.Load()):
            return [ast.Name(other) for of in names if node.id in of for other in sorted(of - {node.id})]
    return []
