"""A sum of which an array is read twice at one place and never at another, over and over: a load of a loop that is
unrolled, or of a vector unit, whose offset is that of the load beside it.
"""

import ast
import math
from collections.abc import Iterator

from tracediff.diagnose.solve.edit import Edit, Priced, input_words
from tracediff.diagnose.solve.edits.terms import Reduction, reductions
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.words.nouns import COUNTED, EACH
from tracediff.english import plural

_LOOK = "the offsets of the loads in its kernel's inner loop"
_PERIODS = (2, 4, 8, 16, 32, 64, 128)  # terms that a turn of the inner loop takes


def variants(problem: Problem) -> Iterator[Priced]:
    """Of every so many terms the last find in one array what those before them do, or the first what those after."""
    for sum_ in reductions(problem.loops.source):
        n = sum_.n_terms(problem.loops.numbers)
        periods = [period for period in _PERIODS if n % period == 0]
        some = [(period, 2**k) for period in periods for k in range(period.bit_length() - 1)]
        noun = COUNTED.get(problem.op.kind, EACH)[sum_.name]
        for array in _arrays(sum_):
            for period, lanes in some:
                bits = 6.0 + math.log2(4 * len(some))
                for which, there, place in _places(sum_.name, period, lanes):
                    have = "one has the values of that" if lanes == 1 else f"{lanes} have the values of those"
                    reads = f"as {sum_.whole} reads {_called(problem, array)}"
                    words = f"{reads}, of every {period} {plural(noun)} the {which} {have} {there}"
                    yield Priced(Edit(words, _read_at(problem, sum_, array, place)), bits, _LOOK)


def _places(i: str, period: int, lanes: int) -> Iterator[tuple[str, str, str]]:
    """Which terms, where they read, and the index that comes to that."""
    rest = period - lanes
    yield "last", "before", f"{i} - {i} % {period} // {rest} * {lanes}"
    yield "first", "after", f"{i} + ({period - 1} - {i} % {period}) // {rest} * {lanes}"


def _arrays(sum_: Reduction) -> list[str]:
    """The arrays that each term is read from."""
    reads = (node for node in ast.walk(sum_.generator.elt) if isinstance(node, ast.Subscript))
    return list(dict.fromkeys(ast.unparse(node.value) for node in reads))


def _called(problem: Problem, array: str) -> str:
    loops = problem.loops.own
    if array in loops.inputs:
        return input_words(problem.op, loops.inputs.index(array))
    return "the weight" if array in loops.weights else array


def _read_at(problem: Problem, sum_: Reduction, array: str, place: str) -> str:
    """The loops with the array read there in each term."""
    right = ast.unparse(sum_.generator.elt)
    edited = ast.unparse(_Elsewhere(array, sum_.name, place).visit(ast.parse(right, mode="eval")))
    source = ast.unparse(ast.parse(problem.loops.source))
    return source.replace(right, edited, 1)


class _Elsewhere(ast.NodeTransformer):
    """Another place for a loop's variable in the index of one array."""

    def __init__(self, array: str, name: str, place: str) -> None:
        self._array, self._name, self._place = array, name, ast.parse(f"({place})", mode="eval").body
        self._inside = False

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Only in the array's index."""
        if ast.unparse(node.value) == self._array:
            self._inside = True
            node.slice = self.visit(node.slice)
            self._inside = False
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """The loop's variable there."""
        return self._place if self._inside and node.id == self._name else node
