"""Another formula: every single edit of an op's loops.

An operator, an operand, a sign, an index, a bound, a comparison, a function, a number; a step left out; one size where
another belongs, two arrays exchanged. They are generated from the loops, not listed.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

import numpy as np

from tracediff.diagnose.solve.by_value.maps import LOOK_AT_CACHE
from tracediff.diagnose.solve.edit import Edit, Priced, Read, Touches
from tracediff.diagnose.solve.edits.one_place import instead_of, of_another_turn
from tracediff.diagnose.solve.edits.several_places import in_several, touches_of, with_names
from tracediff.diagnose.solve.loops.nodes import REAL_NUMBERS, Node, free, nodes, with_node
from tracediff.diagnose.solve.loops.program import Program, parse
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.words.nouns import COUNTS_TOKENS


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
            edit = replace(edit, arrays=memory, numbers=named)
            price = bits + around + math.log2(len(memories))
            yield Priced(edit, price, LOOK_AT_CACHE) if of_cache else Priced(edit, price)


def _filling_and_kernel(source: str) -> Iterator[str]:
    """The loops up to those that fill a cache, if any do; and the last loops."""
    body = ast.parse(source).body
    for at, statement in enumerate(body[:-1]):
        if isinstance(statement, ast.For) and "cache[" in ast.unparse(statement):
            yield ast.unparse(ast.Module(body[: at + 1], []))
    yield ast.unparse(body[-1])


def _memories(problem: Problem, edit: Edit) -> Sequence[tuple[tuple[str, Read], ...]]:
    """What the output's buffer may have held, for an edit that leaves it there, or takes it for an operand."""
    if "before[" in edit.source:
        return [(), *((("before", read),) for read in problem.others)]
    return [(), *((("before", read),) for read in problem.buffers)] if edit.touches != "values" else [()]


def _resized(problem: Problem) -> Iterator[Edit]:
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
                source = with_names(loops.source, {name: str(other)})
                yield Edit("", source, touches_of(program, {name}), renamed=((name, str(other)),))


def _distinct(found: Sequence[Edit], numbers: Mapping[str, float]) -> list[Edit]:
    """Of edits that are the same for these sizes the first: n_in where n_out belongs is n_embd, too. Counts of tokens
    are the same in some steps only.
    """
    whole = {name: str(value) for name, value in numbers.items() if isinstance(value, int)}
    whole = {name: value for name, value in whole.items() if name not in COUNTS_TOKENS}
    named = re.compile(r"\b[A-Za-z_]\w*\b")
    first: dict[str, Edit] = {}
    for edit in found:
        first.setdefault(named.sub(lambda m: whole.get(m[0], m[0]), edit.source), edit)
    return [*first.values()]


@lru_cache(64)
def edits(source: str, sizes: tuple[str, ...] = ()) -> list[Edit]:
    """Every single edit of the loops. `sizes` are names of other numbers that could stand for one of theirs."""
    program = parse(source)
    tree = program.tree
    arrays = sorted(
        {n.value.id for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)}
    )
    found: dict[str, Edit] = {}
    for place in nodes(tree):
        for new in chain(instead_of(place, arrays), of_another_turn(place, program.recurring)):
            edit = _edited(program, place, new)
            found.setdefault(edit.source, edit)
    for edit in in_several(program, arrays, sizes):
        found.setdefault(edit.source, edit)
    found.pop(ast.unparse(tree), None)
    return [*found.values()]


def _edited(program: Program, place: Node, new: ast.AST | None) -> Edit:
    tree = with_node(program.tree, place.path, new or ast.Pass())
    return Edit("", ast.unparse(tree), "both" if new is None else _touches(program, place))


def _touches(program: Program, place: Node) -> Touches:
    """What an edit there may change."""
    statement = next((p.node for p in (*place.around, place) if isinstance(p.node, ast.Assign)), None)
    loop = next((p.node for p in reversed((*place.around, place)) if isinstance(p.node, ast.For)), None)
    if loop and not program.stores_output(loop):
        return "values"
    if statement and isinstance(name := statement.targets[0], ast.Name):
        return touches_of(program, {name.id})
    if place.is_in("iter", ast.For) or place.is_in("targets", ast.Assign):
        return "both" if program.reads_output else "places"
    return "values"
