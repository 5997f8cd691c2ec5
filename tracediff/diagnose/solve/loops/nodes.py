"""The nodes of some loops' tree, each where it stands: what is around it, and which names it knows."""

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

INTEGER_ARRAYS = ("tokens", "positions", "past", "starts")
REAL_NUMBERS = ("eps", "theta", "scale", "freq_scale")
Path = tuple[tuple[str, int | None], ...]  # from the root: fields, and places in those that are lists


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree with its path, those that it is in, outermost first, and the names known there."""

    node: ast.AST
    path: Path
    around: tuple["Node", ...]
    names: Mapping[str, str]  # "i" for integers, "f" for real numbers

    @property
    def parent(self) -> ast.AST | None:
        """The node that it is directly in."""
        return self.around[-1].node if self.around else None

    def is_in(self, field: str, sort: type) -> bool:
        """Whether it is, or is in, this field of a node of this sort."""
        chain = (*self.around, self)
        return any(
            isinstance(outer.node, sort) and inner.path[len(outer.path)][0] == field for outer, inner in pairwise(chain)
        )


def nodes(tree: ast.Module) -> Iterator[Node]:
    """Each node that can be edited."""
    known = sorted(free(tree), reverse=True)  # of what a prompt has as many: tokens, before keys, before positions
    names = {name: "f" if name in REAL_NUMBERS else "i" for name in known}
    yield from _inside(Node(tree, (), (), names), names)


def free(tree: ast.Module) -> set[str]:
    """Names that the loops read and do not define."""
    nodes = list(ast.walk(tree))
    loads = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    arrays = {n.value.id for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)}
    return loads - bound - called - arrays - {"inf"}


def _inside(place: Node, names: dict[str, str]) -> Iterator[Node]:
    """The place and all in it; statements in `names` what they define."""
    yield place

    def at(node: ast.AST, *steps: tuple[str, int | None]) -> Node:
        return Node(node, (*place.path, *steps), (*place.around, place), dict(names))

    match place.node:
        case ast.For(target=ast.Name(id=name), iter=counted, body=body):
            yield from _inside(at(counted, ("iter", None)), names)
            names = names | {name: "i"}
            for i, statement in enumerate(body):
                yield from _inside(at(statement, ("body", i)), names)
                _define(statement, names)
        case ast.GeneratorExp(elt=term, generators=[ast.comprehension(target=ast.Name(id=name), iter=counted)]):
            yield from _inside(at(counted, ("generators", 0), ("iter", None)), names)
            names = names | {name: "i"}
            yield from _inside(at(term, ("elt", None)), names)
        case node:
            for field, value in ast.iter_fields(node):
                for i, child in enumerate(value if isinstance(value, list) else [value]):
                    if isinstance(child, ast.expr | ast.stmt):
                        yield from _inside(at(child, (field, i if isinstance(value, list) else None)), names)
                        if isinstance(child, ast.stmt):
                            _define(child, names)


def _define(statement: ast.stmt, names: dict[str, str]) -> None:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        names[statement.targets[0].id] = type_of(statement.value, names)


def type_of(node: ast.AST, names: Mapping[str, str]) -> str:
    """Integer or real."""
    match node:
        case ast.Constant(value=int()):
            return "i"
        case ast.Name(id=name):
            return names.get(name, "f")
        case ast.Subscript(value=ast.Name(id=name)):
            return "i" if name in INTEGER_ARRAYS else "f"
        case ast.BinOp(left=a, op=op, right=b):
            both = type_of(a, names) == type_of(b, names) == "i"
            return "i" if both and not isinstance(op, ast.Div | ast.Pow) else "f"
        case ast.UnaryOp(operand=a):
            return type_of(a, names)
    return "f"


def with_node(node: ast.AST, path: Path, new: ast.AST) -> ast.AST:
    """The tree with another node at the end of the path; it shares all else."""
    if not path:
        return new
    (field, i), *rest = path
    edited, child = copy.copy(node), getattr(node, field)
    if i is None:
        setattr(edited, field, with_node(child, tuple(rest), new))
    else:
        setattr(edited, field, [*child[:i], with_node(child[i], tuple(rest), new), *child[i + 1 :]])
    return edited
