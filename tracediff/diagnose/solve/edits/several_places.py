"""Edits at several places of some loops at once: a name throughout, a value wherever it is read, two loops alike, the
order of statements.
"""

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise

from tracediff.diagnose.solve.edit import Edit, Touches
from tracediff.diagnose.solve.loops.elementary import ELEMENTARY
from tracediff.diagnose.solve.loops.nodes import INTEGER_ARRAYS, REAL_NUMBERS, free, nodes, with_node
from tracediff.diagnose.solve.loops.program import Program
from tracediff.diagnose.solve.words.nouns import NAMED, NUMBERS

_OF_STEP = ("past[0]",)  # numbers that every step has
_STORED = re.compile(r"y\[(\(\w \* \w+ \+ \w\) \* \w+ \+ \w)\] = ")


def in_several(program: Program, arrays: Sequence[str], sizes: Sequence[str]) -> Iterator[Edit]:
    """All of them; `arrays` are those that the loops read or store to, `sizes` names of numbers that are not theirs."""
    tree = program.tree
    yield from _renamed(program, sizes)
    yield from _exchanged(tree, arrays)
    yield from _in_all_reads(tree)
    yield from _in_all_calls(tree)
    yield from _in_place(tree)
    yield from _packed(tree)
    yield from _in_another_order(program)
    if program.reads_output:
        yield from _in_two_loops(tree)


def touches_of(program: Program, names: set[str]) -> Touches:
    """What an edit of what these names are may change."""
    if names.isdisjoint(program.placing):
        return "values"
    return "both" if program.reads_output or not names.isdisjoint(program.valuing) else "places"


def with_names(source: str, names: Mapping[str, str]) -> str:
    """The source with other names in the place of some."""
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: names.get(m[0], m[0]), source)


def _renamed(program: Program, sizes: Sequence[str]) -> Iterator[Edit]:
    """One number of the loops wherever it stands is another."""
    own, source = sorted(free(program.tree) - set(REAL_NUMBERS)), ast.unparse(program.tree)
    for name in own:
        for other in (*(o for o in own if o != name), *(s for s in sizes if s not in own), "0", *_OF_STEP):
            yield Edit("", with_names(source, {name: other}), touches_of(program, {name}), renamed=((name, other),))
    for a, b in combinations(own, 2):
        yield Edit("", with_names(source, {a: b, b: a}), touches_of(program, {a, b}), renamed=((a, b), (b, a)))


def _exchanged(tree: ast.Module, arrays: Sequence[str]) -> Iterator[Edit]:
    source = ast.unparse(tree)
    for a, b in combinations([name for name in arrays if name not in (*INTEGER_ARRAYS, "y")], 2):
        yield Edit("", with_names(source, {a: b, b: a}), "values", renamed=((a, b), (b, a)))


def _in_all_reads(tree: ast.Module) -> Iterator[Edit]:
    """A value that a statement reads several times, as silu does its own, is read one place off in all of them."""
    lines = ast.unparse(tree).splitlines()
    for at, line in enumerate(lines):
        stored, _, value = line.partition(" = ")
        for read in dict.fromkeys(read for read in re.findall(r"\b\w+\[[^\[\]]+\]", value) if value.count(read) > 1):
            for sign in "+-":
                edited = f"{stored} = {value.replace(read, f'{read[:-1]} {sign} 1]')}"
                yield Edit("", "\n".join([*lines[:at], edited, *lines[at + 1 :]]), "values")


def _in_all_calls(tree: ast.Module) -> Iterator[Edit]:
    """A function that is called several times of the same, as of rope's angle, is another in all of them, or left out,
    or two of these are exchanged: engines keep what it gives.
    """
    source = ast.unparse(tree)
    calls = [*dict.fromkeys(re.findall(rf"\b(?:{'|'.join(ELEMENTARY)})\(\w+\)", source))]
    for a, b in combinations([call.partition("(")[0] for call in calls if source.count(call) > 1], 2):
        yield Edit("", with_names(source, {a: b, b: a}), "values", renamed=((a, b), (b, a)))
    for call in calls:
        name, _, argument = call[:-1].partition("(")
        others = (f"{other}({argument})" for other in ELEMENTARY if other != name)
        for other in (argument, *others) if source.count(call) > 1 else ():
            yield Edit("", source.replace(call, other), "values")


def _in_place(tree: ast.Module) -> Iterator[Edit]:
    """The output lies where the input does, and a statement reads what the one before it stored."""
    lines = ast.unparse(tree).splitlines()
    for at, (before, line) in enumerate(pairwise(lines), 1):
        stored, (to, _, value) = before.strip().partition(" = ")[0], line.partition(" = ")
        read = stored.replace("y[", "x[").replace("there", "here")
        if stored.startswith("y[") and read in value:
            edited = f"{to} = {value.replace(read, stored)}"
            yield Edit("", "\n".join([*lines[:at], edited, *lines[at + 1 :]]), "values")


def _in_two_loops(tree: ast.Module) -> Iterator[Edit]:
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
                yield Edit("", "\n".join(edited), "both")


def _packed(tree: ast.Module) -> Iterator[Edit]:
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
            place = with_names(stored[1], {n: count, variable: at})
            edited = source.replace(stored[0], f"y[{place}] = ")
            edited = edited.replace(f"for {variable} in range({n}):", f"for {variable} in range({counted}):")
            yield Edit("", edited, "both")


def _in_another_order(program: Program) -> Iterator[Edit]:
    """A statement of a loop is computed before or after others: what it reads is not there yet, or another already."""
    for place in nodes(program.tree):
        if isinstance(loop := place.node, ast.For):
            for i, moved in enumerate(loop.body):
                others = [*loop.body[:i], *loop.body[i + 1 :]]
                for at in (at for at in range(len(loop.body)) if at != i):
                    edited = copy.copy(loop)
                    edited.body = [*others[:at], moved, *others[at:]]
                    when, passed = ("before", others[at]) if at < i else ("after", others[at - 1])
                    source = ast.unparse(with_node(program.tree, place.path, edited))
                    touches: Touches = "both" if program.reads_output else "values"
                    yield Edit(f"{_made(moved)} is computed {when} {_made(passed)}", source, touches)


def _made(statement: ast.stmt) -> str:
    """What a statement, or a loop, computes first."""
    target = next(node.targets[0] for node in ast.walk(statement) if isinstance(node, ast.Assign))
    if isinstance(target, ast.Name):
        return NAMED.get(target.id, NUMBERS.get(target.id, target.id))
    assert isinstance(target, ast.Subscript)
    assert isinstance(target.value, ast.Name)
    return "the output" if target.value.id == "y" else f"the {target.value.id}"
