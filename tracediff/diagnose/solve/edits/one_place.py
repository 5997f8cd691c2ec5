"""An edit at one place of some loops: what could stand there by mistake."""

import ast
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import combinations, pairwise

from tracediff.diagnose.solve.loops.elementary import COMPARISONS, ELEMENTARY
from tracediff.diagnose.solve.loops.nodes import INTEGER_ARRAYS, Node, type_of

_INTEGER = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_REAL = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_RESIZED = ((ast.Add, 1), (ast.Sub, 1), (ast.FloorDiv, 2))
_FAR = 24  # by which a count, or the place of a pair, may be off
_REDUCTIONS = ("sum", "max", "min", "first", "last")


def instead_of(place: Node, arrays: Sequence[str]) -> Iterator[ast.AST | None]:
    """What could stand there by mistake. None: nothing, the statement is left out."""
    node, parent, names = place.node, place.parent, place.names
    match node:
        case ast.BinOp():
            yield from _other_operations(node, names)
        case ast.Compare(left=a, ops=[op], comparators=[b]):
            yield from (ast.Compare(a, [other()], [b]) for other in COMPARISONS if not isinstance(op, other))
        case ast.IfExp(test=test, body=a, orelse=b):
            yield from (a, b, ast.IfExp(test, b, a), ast.IfExp(test, a, ast.Constant(0)))
        case ast.UnaryOp(operand=a):
            yield a
        case ast.Constant(value=int(c)):
            counted = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add) and type_of(parent, names) == "i"
            further = range(c - _FAR, c + _FAR + 1) if counted and not place.is_in("slice", ast.Subscript) else ()
            others = dict.fromkeys((c + 1, c - 1, 0, 2 * c, *further))
            yield from (ast.Constant(other) for other in others if other != c)
        case ast.Name(ctx=ast.Load()) if node.id in names and not _is_called(node, parent):
            yield from _other_numbers(node, place)
        case ast.Name(id=name) if isinstance(parent, ast.Subscript) and node is parent.value and name in arrays:
            alike = (other for other in arrays if (other in INTEGER_ARRAYS) == (name in INTEGER_ARRAYS))
            if isinstance(parent.ctx, ast.Load):
                yield from (ast.Name(other, ast.Load()) for other in alike if other not in (name, "y"))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            kin = next((names for names in (_REDUCTIONS, ELEMENTARY) if name in names), ())
            yield from (ast.Call(ast.Name(other, ast.Load()), arguments, []) for other in kin if other != name)
            if name in ELEMENTARY:
                yield arguments[0]
            if name == "range":
                yield from _other_ranges(arguments)
            if name == "sum":
                yield from _carried(node, place)
    if isinstance(node, ast.expr) and _is_real(node, parent, names):
        yield ast.UnaryOp(ast.USub(), node)
    if isinstance(parent, ast.Subscript) and node is parent.slice:
        yield from _neighbours(node)
    if isinstance(node, ast.Assign):
        yield from _other_stores(node, names)


def _other_operations(node: ast.BinOp, names: Mapping[str, str]) -> Iterator[ast.expr]:
    """Another operator, one operand alone, another order."""
    a, op, b = node.left, node.op, node.right
    alike = _INTEGER if type_of(node, names) == "i" else _REAL
    yield from (ast.BinOp(a, other(), b) for other in alike if not isinstance(op, other))
    yield a
    yield b
    if isinstance(op, ast.Add | ast.Sub) and isinstance(a, ast.BinOp) and isinstance(a.op, ast.Add | ast.Sub):
        # a + b * c where a + b + c belongs: the other operator binds first
        first = (other for other in alike if other not in (ast.Add, ast.Sub))
        yield from (ast.BinOp(a.left, a.op, ast.BinOp(a.right, other(), b)) for other in first)
    if isinstance(op, ast.Mult | ast.Div) and isinstance(a, ast.BinOp) and isinstance(a.op, ast.Mult | ast.Div):
        # a - b * c where a * b * c belongs: the other operator binds last
        last = (ast.Add(), ast.Sub())
        yield from (ast.BinOp(a.left, other, ast.BinOp(a.right, op, b)) for other in last)
    if isinstance(op, ast.Mult | ast.Div) and isinstance(a, ast.BinOp) and isinstance(a.op, ast.Add | ast.Sub):
        yield ast.BinOp(a.left, a.op, ast.BinOp(a.right, op, b))  # a - b * c where (a - b) * c belongs
    if isinstance(op, ast.Mult | ast.Div) and isinstance(b, ast.BinOp) and isinstance(b.op, ast.Add | ast.Sub):
        yield ast.BinOp(ast.BinOp(a, op, b.left), b.op, b.right)
    if isinstance(op, ast.Sub | ast.Div | ast.Pow | ast.FloorDiv):
        yield ast.BinOp(b, op, a)


def _other_numbers(node: ast.Name, place: Node) -> Iterator[ast.expr]:
    """Another number that the place knows, none, or one more or less."""
    name, names = node.id, place.names
    alike = [other for other, kind in names.items() if kind == names[name] and other != name]
    yield from (ast.Name(other, ast.Load()) for other in alike)
    yield ast.Constant(0)
    if names[name] == "i" and not place.is_in("slice", ast.Subscript):
        yield from _neighbours(node)
        yield from _running_on(place, name)


def of_another_turn(place: Node, recurring: Container[str]) -> Iterator[ast.expr]:
    """What the turn before or after reads, of loops with a state: of all others the values tell which rows are read."""
    match place.node:
        case ast.Name(id=name, ctx=ast.Load()) if name in recurring and place.is_in("slice", ast.Subscript):
            yield from _neighbours(place.node)


def _neighbours(node: ast.expr) -> Iterator[ast.expr]:
    """One more, and one less."""
    yield from (ast.BinOp(node, op(), ast.Constant(1)) for op in (ast.Add, ast.Sub))


def _running_on(place: Node, name: str) -> Iterator[ast.expr]:
    """A loop's variable that does not begin anew in each pass of the loop around it."""
    for outer, inner in pairwise(p.node for p in place.around if isinstance(p.node, ast.For)):
        match outer, inner:
            case ast.For(target=ast.Name(id=row)), ast.For(target=ast.Name(id=own), iter=ast.Call(args=[n])):
                if own == name:
                    yield ast.BinOp(
                        ast.BinOp(ast.Name(row, ast.Load()), ast.Mult(), n), ast.Add(), ast.Name(name, ast.Load())
                    )


def _carried(node: ast.Call, place: Node) -> Iterator[ast.expr]:
    """A sum that is not set to 0 again in each turn of some loops around it."""
    loops = [p.node.target for p in place.around if isinstance(p.node, ast.For)]
    for n in range(1, len(loops) + 1):
        for some in combinations(loops, n):
            names = [ast.Name(loop.id, ast.Load()) for loop in some if isinstance(loop, ast.Name)]
            yield ast.Call(ast.Name("carried", ast.Load()), [node, *names], [])


def _is_called(node: ast.AST, parent: ast.AST | None) -> bool:
    return isinstance(parent, ast.Call) and node is parent.func


def _is_real(node: ast.expr, parent: ast.AST | None, names: Mapping[str, str]) -> bool:
    """Whether a sign could stand before it."""
    if isinstance(getattr(node, "ctx", None), ast.Store):
        return False
    if isinstance(node, ast.Subscript | ast.Call) and type_of(node, names) == "f":
        return not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range")
    return isinstance(node, ast.Name) and names.get(node.id) == "f" and not _is_called(node, parent)


def _other_ranges(arguments: list[ast.expr]) -> Iterator[ast.expr]:
    start, end = [ast.Constant(0), *arguments][-2:]
    one, two, name = ast.Constant(1), ast.Constant(2), ast.Name("range", ast.Load())
    later, sooner = ast.BinOp(end, ast.Add(), one), ast.BinOp(end, ast.Sub(), one)
    yield ast.Call(name, [ast.BinOp(start, ast.Add(), one) if len(arguments) > 1 else one, end], [])
    yield from (ast.Call(name, [*arguments[:-1], other], []) for other in (later, sooner))
    yield ast.Call(name, [*arguments[:-1], ast.BinOp(end, ast.FloorDiv(), two)], [])
    yield ast.Call(name, [start, end, two], [])


def _other_stores(node: ast.Assign, names: Mapping[str, str]) -> Iterator[ast.AST | None]:
    target = node.targets[0]
    if isinstance(target, ast.Name):
        yield ast.Assign([target], ast.Constant(0), lineno=0)
        if isinstance(node.value, ast.Name):  # a size of its own
            more = (ast.BinOp(node.value, op(), ast.Constant(c)) for op, c in _RESIZED)
            yield from (ast.Assign([target], value, lineno=0) for value in more)
        for read in _reads(node.value) if type_of(node.value, names) == "f" else ():
            functions = (ast.Call(ast.Name(name, ast.Load()), [read], []) for name in ELEMENTARY)
            yield from (ast.Assign([target], value, lineno=0) for value in (read, *functions))
        return
    yield None
    assert isinstance(target, ast.Subscript)
    if isinstance(target.value, ast.Name) and target.value.id == "y":
        in_place = any(isinstance(read.value, ast.Name) and read.value.id == "y" for read in _reads(node.value))
        held = ast.Subscript(ast.Name("y" if in_place else "before", ast.Load()), target.slice, ast.Load())
        yield from (
            ast.Assign([target], ast.BinOp(held, op(), node.value), lineno=0) for op in (ast.Add, ast.Sub, ast.Mult)
        )


def _reads(node: ast.AST) -> list[ast.Subscript]:
    """The different array elements that an expression reads."""
    found = (n for n in ast.walk(node) if isinstance(n, ast.Subscript))
    return [*{ast.unparse(n): n for n in found}.values()]
