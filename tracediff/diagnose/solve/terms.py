"""A sum over fewer terms: of the first so many, or from one on, whatever their number.

The sums up to each term tell which.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tracediff.diagnose.solve.arrays import CannotRunError
from tracediff.diagnose.solve.look import Look
from tracediff.diagnose.solve.nodes import Path, nodes, with_node
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.diagnose.solve.program import parse
from tracediff.diagnose.solve.variant import Priced, Variant

_MOST = 3  # counts that give the values that are looked at
_FINE = 9  # places looked at in each step to the best
_TERMS = "term"  # the loop variable of a sum of which all parts are kept


@dataclass(frozen=True, slots=True)
class Reduction:
    """A sum of some loops."""

    tree: ast.Module
    path: Path
    node: ast.Call

    def replaced(self, new: ast.expr) -> str:
        """The loops with something else in its place."""
        return ast.unparse(with_node(self.tree, self.path, new))

    def n_terms(self, numbers: Mapping[str, float]) -> int:
        """How many terms it has, of loops with these numbers; 0 where no number says so."""
        assert isinstance(self.node.args[0], ast.GeneratorExp)
        loop = self.node.args[0].generators[0].iter
        assert isinstance(loop, ast.Call)
        return int(numbers.get(ast.unparse(loop.args[-1]), 0))

    def with_terms(self, count: int, n: int, how: str) -> Iterator[str]:
        """The loops with the sum over the first `count` of `n` terms, or from there on: by what is left out, and by
        what is taken.
        """
        assert isinstance(self.node.args[0], ast.GeneratorExp)
        term, loop = self.node.args[0].elt, self.node.args[0].generators[0]
        assert isinstance(loop.iter, ast.Call)
        *_, end = loop.iter.args
        left_out = ast.BinOp(end, ast.Sub(), ast.Constant(n - count))
        for bound in (left_out, ast.Constant(count)):
            if how == "upto" or bound is not left_out:
                new = ast.Call(loop.iter.func, [bound] if how == "upto" else [bound, end], [])
                inner = ast.GeneratorExp(term, [ast.comprehension(loop.target, new, [], 0)])
                yield self.replaced(ast.Call(self.node.func, [inner], []))


def reductions(source: str) -> Iterator[Reduction]:
    """The sums of some loops, of all of which the terms are counted from 0."""
    tree = parse(source).tree
    for place in nodes(tree):
        match place.node:
            case ast.Call(func=ast.Name(id="sum"), args=[ast.GeneratorExp(generators=[loop])]) as node:
                if isinstance(loop.iter, ast.Call) and len(loop.iter.args) == 1:
                    yield Reduction(tree, place.path, node)


def variants(problem: Problem, look: Look) -> Iterator[Priced]:
    """Each sum of the loops with the last terms left out, and with the first."""
    for sum_ in reductions(problem.loops.source):
        for how in ("upto", "onwards"):
            counts, n = _counts(problem, look, sum_.replaced(_all_parts(sum_.node, how)))
            for count in counts[:_MOST]:
                bits = 6.0 + math.log2(n)
                for source in sum_.with_terms(count, n, how):
                    yield Priced(Variant("", source), bits)


def counted(problem: Problem, left: Callable[[Variant], float]) -> Iterator[Priced]:
    """The same by how many terms leave least, where the parts are not to be seen: the nearer the count, the less."""
    for sum_ in reductions(problem.loops.source):
        n = sum_.n_terms(problem.loops.numbers)
        for how in ("upto", "onwards") if n > 1 else ():

            def of(count: int, sum_: Reduction = sum_, n: int = n, how: str = how) -> float:
                return left(Variant("", next(sum_.with_terms(count, n, how))))

            count = _least(of, 1, n - 1)
            for source in sum_.with_terms(count, n, how):
                yield Priced(Variant("", source), 6.0 + math.log2(n))


def _least(of: Callable[[int], float], first: int, last: int) -> int:
    """Where a function that falls to its least and rises again is least, by ever finer steps."""
    while last - first > _FINE:
        places = np.linspace(first, last, _FINE).astype(int).tolist()
        at = int(np.argmin([of(place) for place in places]))
        first, last = places[max(0, at - 1)], places[min(_FINE - 1, at + 1)]
    return min(range(first, last + 1), key=of)


def _all_parts(node: ast.Call, how: str) -> ast.expr:
    """The sum as all of its parts, along an axis of their own."""
    assert isinstance(node.args[0], ast.GeneratorExp)
    target = node.args[0].generators[0].target
    assert isinstance(target, ast.Name)
    renamed = re.sub(rf"\b{target.id}\b", _TERMS, ast.unparse(node.args[0]))
    return ast.parse(f"{how}({renamed})", mode="eval").body


def _counts(problem: Problem, look: Look, source: str) -> tuple[list[int], int]:
    """How many terms are left out in the parts that give the wrong values looked at, and how many there are."""
    axis = parse(source).axes[_TERMS]
    try:
        *_, stored = problem.loops.with_(source, {}, {}).statements(look.few)
    except (CannotRunError, ValueError):
        return [], 0
    if len(stored.shape) <= axis or stored.shape[axis] < 2 or stored.turns is not None:
        return [], 0
    at, made = (np.moveaxis(x.reshape(stored.shape), axis, -1) for x in (stored.at, stored.values))
    n, at = made.shape[-1], at[..., 0].ravel()
    wrong = problem.wrong[at]
    fits = agree(problem.recorded[at, None], made.reshape(-1, n), problem.near[at, None])[wrong].all(0)
    return [int(i) for i in np.flatnonzero(fits) if 0 < i < n] if wrong.any() else [], n
