"""Another formula: every single edit of an op's loops.

An operator, an operand, a sign, an index, a bound, a comparison, a function, a number; a step left out; one size where
another belongs, two arrays exchanged. They are generated from the loops, not listed.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np

from tracediff.diagnose.solve.by_value.maps import LOOK_AT_CACHE
from tracediff.diagnose.solve.loops.interpret import COMPARISONS, ELEMENTARY
from tracediff.diagnose.solve.loops.nodes import INTEGER_ARRAYS, REAL_NUMBERS, Node, free, nodes, type_of, with_node
from tracediff.diagnose.solve.loops.program import Program, parse
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.variant import Priced, Read, Touches, Variant
from tracediff.diagnose.solve.words.nouns import COUNTS_TOKENS

_INTEGER = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_REAL = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_RESIZED = ((ast.Add, 1), (ast.Sub, 1), (ast.FloorDiv, 2))
_FAR = 24  # by which a count, or the place of a pair, may be off
_REDUCTIONS = ("sum", "max", "min", "first", "last")
_OF_STEP = ("past[0]",)  # numbers that every step has
_STORED = re.compile(r"y\[(\(\w \* \w+ \+ \w\) \* \w+ \+ \w)\] = ")


@dataclass(frozen=True, slots=True)
class FormulaEdit:
    """One edit of some loops, and what it touches. `renamed` are names that stand for others throughout."""

    source: str
    touches: Touches
    renamed: tuple[tuple[str, str], ...] = ()


def variants(problem: Problem) -> Iterator[Priced]:
    """Every single edit of the op's loops."""
    h = problem.graph.hparams
    sizes = {
        "n_embd": h.n_embd, "n_ff": h.n_ff, "n_vocab": h.n_vocab, "n_head": h.n_head, "n_head_kv": h.n_head_kv,
        "head_dim": h.head_dim, "q_size": h.n_head * h.head_dim, "kv_size": h.n_head_kv * h.head_dim,
    }  # fmt: skip
    found = edits(problem.loops.source, tuple(sizes))
    bits = math.log2(max(2, len(found)))
    found = _distinct(found, {**problem.loops.numbers, **sizes})
    found += _resized(problem)
    *filling, kernel = _filling_and_kernel(problem.loops.source)
    for edit in found:
        memories = _memories(problem, edit)
        around = edit.source.endswith(kernel)  # how values come to its cache, say: of what comes to the same the last
        of_cache = around and not all(edit.source.startswith(loops) for loops in filling)
        for memory in memories:
            named = tuple((name, value) for name, value in sizes.items() if name in dict(edit.renamed).values())
            variant = Variant("", edit.source, edit.touches, memory, named, renamed=edit.renamed)
            price = bits + around + math.log2(len(memories))
            yield Priced(variant, price, LOOK_AT_CACHE) if of_cache else Priced(variant, price)


def _filling_and_kernel(source: str) -> Iterator[str]:
    """The loops up to those that fill a cache, if any do; and the last loops."""
    body = ast.parse(source).body
    for at, statement in enumerate(body[:-1]):
        if isinstance(statement, ast.For):
            yield ast.unparse(ast.Module(body[: at + 1], []))
    yield ast.unparse(body[-1])


def _memories(problem: Problem, edit: FormulaEdit) -> Sequence[tuple[tuple[str, Read], ...]]:
    """What the output's buffer may have held, for an edit that leaves it there, or takes it for an operand."""
    if "before[" in edit.source:
        return [(), *((("before", read),) for read in problem.others)]
    return [(), *((("before", read),) for read in problem.buffers)] if edit.touches != "values" else [()]


def _resized(problem: Problem) -> Iterator[FormulaEdit]:
    """One number of the loops is another wherever it stands: one that a mistaken formula of sizes gives."""
    h, loops = problem.graph.hparams, problem.loops
    tokens = loops.numbers["T"]
    past = int(loops.arrays["past"].take(np.zeros(1, int))[0]) if "past" in loops.arrays else 0
    sizes = sorted({h.n_head, h.n_head_kv, h.head_dim, h.n_layer, tokens, past + tokens})
    formulas = {f for a in sizes for b in sizes for f in (a * b, a + b, a - b, a // b)}
    program = parse(loops.source)
    for name in sorted(free(program.tree) - set(REAL_NUMBERS)):
        for other in sorted(formulas):
            if 0 < other != loops.numbers[name]:
                source = _with_names(loops.source, {name: str(other)})
                yield FormulaEdit(source, _of_names(program, {name}), ((name, str(other)),))


def _distinct(found: Sequence[FormulaEdit], numbers: Mapping[str, float]) -> list[FormulaEdit]:
    """Of edits that are the same for these sizes the first: n_in where n_out belongs is n_embd, too. Counts of tokens
    are the same in some steps only.
    """
    whole = {name: str(value) for name, value in numbers.items() if isinstance(value, int)}
    whole = {name: value for name, value in whole.items() if name not in COUNTS_TOKENS}
    named = re.compile(r"\b[A-Za-z_]\w*\b")
    first: dict[str, FormulaEdit] = {}
    for edit in found:
        first.setdefault(named.sub(lambda m: whole.get(m[0], m[0]), edit.source), edit)
    return [*first.values()]


@lru_cache(64)
def edits(source: str, sizes: tuple[str, ...] = ()) -> list[FormulaEdit]:
    """Every single edit of the loops. `sizes` are names of other numbers that could stand for one of theirs."""
    program = parse(source)
    tree = program.tree
    arrays = sorted(
        {n.value.id for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)}
    )
    found: dict[str, FormulaEdit] = {}
    for place in nodes(tree):
        for new in _instead_of(place, arrays):
            edit = _edited(program, place, new)
            found.setdefault(edit.source, edit)
    several = *_exchanged(tree, arrays), *_in_all_reads(tree), *_in_all_calls(tree), *_in_place(tree), *_packed(tree)
    several += tuple(_in_two_loops(tree)) if program.reads_output else ()
    for edit in (*_renamed(program, sizes), *several):
        found.setdefault(edit.source, edit)
    found.pop(ast.unparse(tree), None)
    return [*found.values()]


# --- what --------------------------------------------------------------------------------------------------------


def _instead_of(place: Node, arrays: Sequence[str]) -> Iterator[ast.AST | None]:
    """What could stand there by mistake. None: nothing, the statement is left out."""
    node, names = place.node, place.names
    parent = place.parent
    match node:
        case ast.BinOp(left=a, op=op, right=b):
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
            if isinstance(op, ast.Sub | ast.Div | ast.Pow | ast.FloorDiv):
                yield ast.BinOp(b, op, a)
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
        case ast.Name(id=name, ctx=ast.Load()) if name in names and not _is_called(node, parent):
            alike_names = [other for other, kind in names.items() if kind == names[name] and other != name]
            yield from (ast.Name(other, ast.Load()) for other in alike_names)
            yield ast.Constant(0)
            if names[name] == "i" and not place.is_in("slice", ast.Subscript):
                yield from (ast.BinOp(node, op(), ast.Constant(1)) for op in (ast.Add, ast.Sub))
                yield from _running_on(place, name)
        case ast.Name(id=name) if isinstance(parent, ast.Subscript) and node is parent.value and name in arrays:
            kind = name in INTEGER_ARRAYS
            if isinstance(parent.ctx, ast.Load):
                alike_names = [
                    other for other in arrays if (other in INTEGER_ARRAYS) == kind and other not in (name, "y")
                ]
                yield from (ast.Name(other, ast.Load()) for other in alike_names)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            kin = next((names for names in (_REDUCTIONS, ELEMENTARY) if name in names), ())
            yield from (ast.Call(ast.Name(other, ast.Load()), arguments, []) for other in kin if other != name)
            if name in ELEMENTARY:
                yield arguments[0]
            if name == "range":
                yield from _other_ranges(arguments)
    if isinstance(node, ast.expr) and _is_real(node, parent, names):
        yield ast.UnaryOp(ast.USub(), node)
    if isinstance(parent, ast.Subscript) and node is parent.slice:
        yield from (ast.BinOp(node, op, ast.Constant(1)) for op in (ast.Add(), ast.Sub()))
    if isinstance(node, ast.Assign):
        yield from _other_stores(node, names)


def _running_on(place: Node, name: str) -> Iterator[ast.expr]:
    """A loop's variable that does not begin anew in each pass of the loop around it."""
    for outer, inner in pairwise(p.node for p in place.around if isinstance(p.node, ast.For)):
        match outer, inner:
            case ast.For(target=ast.Name(id=row)), ast.For(target=ast.Name(id=own), iter=ast.Call(args=[n])):
                if own == name:
                    yield ast.BinOp(
                        ast.BinOp(ast.Name(row, ast.Load()), ast.Mult(), n), ast.Add(), ast.Name(name, ast.Load())
                    )


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


# --- edited ------------------------------------------------------------------------------------------------------


def _edited(program: Program, place: Node, new: ast.AST | None) -> FormulaEdit:
    tree = with_node(program.tree, place.path, new or ast.Pass())
    return FormulaEdit(ast.unparse(tree), "both" if new is None else _touches(program, place))


def _touches(program: Program, place: Node) -> Touches:
    """What an edit there may change."""
    statement = next((p.node for p in (*place.around, place) if isinstance(p.node, ast.Assign)), None)
    loop = next((p.node for p in reversed((*place.around, place)) if isinstance(p.node, ast.For)), None)
    if loop and not program.stores_output(loop):
        return "values"
    if statement and isinstance(name := statement.targets[0], ast.Name):
        return _of_names(program, {name.id})
    if place.is_in("iter", ast.For) or place.is_in("targets", ast.Assign):
        return "both" if program.reads_output else "places"
    return "values"


def _of_names(program: Program, names: set[str]) -> Touches:
    if names.isdisjoint(program.placing):
        return "values"
    return "both" if program.reads_output or not names.isdisjoint(program.valuing) else "places"


def _renamed(program: Program, sizes: Sequence[str]) -> Iterator[FormulaEdit]:
    """One number of the loops wherever it stands is another."""
    own, source = sorted(free(program.tree) - set(REAL_NUMBERS)), ast.unparse(program.tree)
    for name in own:
        for other in (*(o for o in own if o != name), *(s for s in sizes if s not in own), "0", *_OF_STEP):
            yield FormulaEdit(_with_names(source, {name: other}), _of_names(program, {name}), ((name, other),))
    for a, b in combinations(own, 2):
        yield FormulaEdit(_with_names(source, {a: b, b: a}), _of_names(program, {a, b}), ((a, b), (b, a)))


def _exchanged(tree: ast.Module, arrays: Sequence[str]) -> Iterator[FormulaEdit]:
    source = ast.unparse(tree)
    for a, b in combinations([name for name in arrays if name not in (*INTEGER_ARRAYS, "y")], 2):
        yield FormulaEdit(_with_names(source, {a: b, b: a}), "values", ((a, b), (b, a)))


def _in_all_reads(tree: ast.Module) -> Iterator[FormulaEdit]:
    """A value that a statement reads several times, as silu does its own, is read one place off in all of them."""
    lines = ast.unparse(tree).splitlines()
    for at, line in enumerate(lines):
        stored, _, value = line.partition(" = ")
        for read in dict.fromkeys(read for read in re.findall(r"\b\w+\[[^\[\]]+\]", value) if value.count(read) > 1):
            for sign in "+-":
                edited = f"{stored} = {value.replace(read, f'{read[:-1]} {sign} 1]')}"
                yield FormulaEdit("\n".join([*lines[:at], edited, *lines[at + 1 :]]), "values")


def _in_all_calls(tree: ast.Module) -> Iterator[FormulaEdit]:
    """A function that is called several times of the same, as of rope's angle, is another in all of them, or left out:
    engines keep what it gives.
    """
    source = ast.unparse(tree)
    for call in dict.fromkeys(re.findall(rf"\b(?:{'|'.join(ELEMENTARY)})\(\w+\)", source)):
        name, _, argument = call[:-1].partition("(")
        others = (f"{other}({argument})" for other in ELEMENTARY if other != name)
        for other in (argument, *others) if source.count(call) > 1 else ():
            yield FormulaEdit(source.replace(call, other), "values")


def _in_place(tree: ast.Module) -> Iterator[FormulaEdit]:
    """The output lies where the input does, and a statement reads what the one before it stored."""
    lines = ast.unparse(tree).splitlines()
    for at, (before, line) in enumerate(pairwise(lines), 1):
        stored, (to, _, value) = before.strip().partition(" = ")[0], line.partition(" = ")
        read = stored.replace("y[", "x[").replace("there", "here")
        if stored.startswith("y[") and read in value:
            edited = f"{to} = {value.replace(read, stored)}"
            yield FormulaEdit("\n".join([*lines[:at], edited, *lines[at + 1 :]]), "values")


def _in_two_loops(tree: ast.Module) -> Iterator[FormulaEdit]:
    """Of two loops that count alike, one after the other, as one loop of an engine does the work of both."""
    lines = ast.unparse(tree).splitlines()
    for i, line in enumerate(lines):
        for counted in re.findall(r"range\((\w+)\)", line):
            j = next((j for j in (i + 1, i + 2) if f"range({counted})" in "".join(lines[j : j + 1])), None)
            for other in (f"1, {counted}", f"{counted} - 1", f"{counted} + 1", f"{counted} // 2", "0") if j else ():
                edited = [
                    text.replace(f"range({counted})", f"range({other})") if at in (i, j) else text
                    for at, text in enumerate(lines)
                ]
                yield FormulaEdit("\n".join(edited), "both")


def _packed(tree: ast.Module) -> Iterator[FormulaEdit]:
    """Another range of a loop that stores, and what is stored lies one value after the other, as by `*y++`."""
    source = ast.unparse(tree)
    stored = _STORED.search(source)
    if not stored:
        return
    loops = re.findall(r"for (\w) in range\((\w+)\):", source)[-3:]
    for variable, n in loops:
        for counted, count, at in (
            (f"1, {n}", f"({n} - 1)", f"({variable} - 1)"),
            (f"{n} - 1", f"({n} - 1)", variable),
            (f"{n} + 1", f"({n} + 1)", variable),
            (f"{n} // 2", f"({n} // 2)", variable),
            (f"0, {n}, 2", f"(({n} + 1) // 2)", f"({variable} // 2)"),
        ):
            place = _with_names(stored[1], {n: count, variable: at})
            edited = source.replace(stored[0], f"y[{place}] = ")
            edited = edited.replace(f"for {variable} in range({n}):", f"for {variable} in range({counted}):")
            yield FormulaEdit(edited, "both")


def _with_names(source: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: names.get(m[0], m[0]), source)
