"""Two versions of some loops beside each other: their statements, and where expressions differ."""

import ast
from collections.abc import Iterator

from tracediff.diagnose.solve.loops.bound import Bound

_NOT_QUOTED = ast.Name | ast.Constant | ast.GeneratorExp | ast.comprehension


def inlined(node: ast.AST, bound: Bound) -> ast.AST:
    """The expression with assigned names replaced by what they stand for."""
    statements = [n for n in ast.walk(ast.parse(bound.source)) if isinstance(n, ast.Assign)]
    known = {n.targets[0].id: n.value for n in statements if isinstance(n.targets[0], ast.Name)}

    class Inlined(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.AST:
            return self.visit(ast.parse(ast.unparse(known[name.id]), mode="eval").body) if name.id in known else name

    return Inlined().visit(ast.parse(ast.unparse(node), mode="eval").body)


def statements(tree: ast.Module) -> list[ast.stmt]:
    """All statements, breadth first."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.Assign | ast.Pass)]


def head(node: ast.stmt) -> str:
    """A statement as it is written; of loops only their heads count."""
    return f"{ast.unparse(node.target)} in {ast.unparse(node.iter)}" if isinstance(node, ast.For) else ast.unparse(node)


def _children(node: ast.AST) -> list[ast.AST]:
    return list(ast.iter_child_nodes(node))


def chain(a: ast.AST, b: ast.AST) -> Iterator[tuple[ast.AST, tuple[ast.AST, ast.AST]]]:
    """Down from two trees to where they differ: each parent, and the parts of both that differ in it."""
    while True:
        if type(a) is not type(b):
            return
        ours, theirs = _children(a), _children(b)
        if len(ours) != len(theirs):
            return
        differ = [(x, y) for x, y in zip(ours, theirs, strict=True) if ast.dump(x) != ast.dump(y)]
        if len(differ) != 1:
            return
        yield a, differ[0]
        a, b = differ[0]


def quotable(old: ast.expr, new: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Expressions that show what differs: with an operator, or a function, the smallest last."""
    yield old, new
    for _, (x, y) in chain(old, new):
        if isinstance(x, ast.expr) and isinstance(y, ast.expr) and not isinstance(x, _NOT_QUOTED):
            yield x, y
