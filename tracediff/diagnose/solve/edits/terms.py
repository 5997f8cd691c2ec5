"""A sum over fewer terms: of the first so many, or from one on, whatever their number; or without every nth.

The sums up to each term tell which, and those of the terms of each remainder.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracediff.diagnose.solve.edit import Edit, Priced
from tracediff.diagnose.solve.look import Look
from tracediff.diagnose.solve.loops.arrays import CannotRunError, Stride, strides
from tracediff.diagnose.solve.loops.nodes import Node, Path, nodes, with_node
from tracediff.diagnose.solve.loops.program import parse
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.diagnose.solve.words.nouns import COUNTED, EACH, NAMED
from tracediff.english import nth, plural

_MOST = 3  # counts that give the values that are looked at
_FINE = 9  # places looked at in each step to the best
_BLOCKS = (128, 64, 32, 16, 8, 4, 2)  # terms that a vector unit, or a loop that is unrolled, takes at a time
_LOOK = "what is done with the terms that are left after whole vectors, or turns of a loop that is unrolled"
_TERMS = "term"  # the loop variable of a sum of which all parts are kept


@dataclass(frozen=True, slots=True)
class Reduction:
    """A sum of some loops, over a loop that counts from 0 to before `end`; `whole` is what the loops call it."""

    tree: ast.Module
    path: Path
    generator: ast.GeneratorExp
    end: ast.expr
    whole: str

    @property
    def name(self) -> str:
        """The loop's variable."""
        return ast.unparse(self.generator.generators[0].target)

    def n_terms(self, numbers: Mapping[str, float]) -> int:
        """How many terms it has, of loops with these numbers; 0 where no number says so."""
        return int(numbers.get(ast.unparse(self.end), 0))

    def with_terms(self, count: int, n: int, how: str) -> Iterator[str]:
        """The loops with the sum over the first `count` of `n` terms, or from there on: by what is left out, and by
        what is taken.
        """
        left_out, given = ast.BinOp(self.end, ast.Sub(), ast.Constant(n - count)), ast.Constant(count)
        for bound in (left_out, given) if how == "upto" else (given,):
            yield self._over([bound] if how == "upto" else [bound, self.end])

    def in_blocks(self, count: int, n: int) -> Iterator[tuple[int, str]]:
        """The loops with the sum over whole blocks alone, of so many terms each, where these are `count` of `n`."""
        for size in (size for size in _BLOCKS if n // size * size == count):
            k = ast.Constant(size)
            yield size, self._over([ast.BinOp(ast.BinOp(self.end, ast.FloorDiv(), k), ast.Mult(), k)])

    def _over(self, bounds: Sequence[ast.expr]) -> str:
        """The loops with the sum over the terms of a range."""
        counted = ast.Call(ast.Name("range"), [*bounds], [])
        target = self.generator.generators[0].target
        inner = ast.GeneratorExp(self.generator.elt, [ast.comprehension(target, counted, [], 0)])
        return self._replaced(ast.Call(ast.Name("sum"), [inner], []))

    def with_stride(self, stride: Stride, how: str) -> str:
        """The loops with the sum without these terms, or of these alone."""
        one = stride.stop == stride.first + 1
        kept = {("without", True): "!=", ("alone", True): "==", ("without", False): "<", ("alone", False): ">="}
        taken = ast.parse(f"({self.name} % {stride.period} {kept[how, one]} {stride.first})", mode="eval").body
        match self.generator.elt:
            case ast.BinOp(left=a, op=ast.Mult(), right=b):  # no array of all terms is made of x * taken * w
                term = ast.BinOp(ast.BinOp(a, ast.Mult(), taken), ast.Mult(), b)
            case term:
                term = ast.BinOp(term, ast.Mult(), taken)
        return self._replaced(ast.Call(ast.Name("sum"), [ast.GeneratorExp(term, self.generator.generators)], []))

    def stride_words(self, noun: str, stride: Stride, how: str) -> str:
        """That in words, of terms called so."""
        if stride.stop == stride.first + 1:
            verb = "leaves out" if how == "without" else "takes only"
            return f"{self.whole} {verb} every {nth(stride.period)} {noun}, from {stride.first} on"
        n, which = (stride.period - stride.first, "last") if how == "without" else (stride.first, "first")
        left = f"the {which}{f' {n}' if n > 1 else ''}"
        return f"of every {stride.period} {plural(noun)} {self.whole} leaves out {left}"

    def of_all_parts(self, how: str) -> str:
        """The loops with all parts of the sum, along an axis of their own."""
        renamed = re.sub(rf"\b{self.name}\b", _TERMS, ast.unparse(self.generator))
        return self._replaced(ast.parse(f"{how}({renamed})", mode="eval").body)

    def _replaced(self, new: ast.expr) -> str:
        return ast.unparse(with_node(self.tree, self.path, new))


def reductions(source: str) -> Iterator[Reduction]:
    """The sums of some loops, of all of which the terms are counted from 0."""
    tree = parse(source).tree
    for place in nodes(tree):
        match place.node:
            case ast.Call(
                func=ast.Name(id="sum"),
                args=[ast.GeneratorExp(generators=[ast.comprehension(iter=ast.Call(args=[end]))]) as generator],
            ):
                yield Reduction(tree, place.path, generator, end, _called(place))


def _called(place: Node) -> str:
    """What a sum is assigned to."""
    for outer in place.around:
        match outer.node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                return NAMED.get(name, name)
    return "the sum"


def variants(problem: Problem, look: Look) -> Iterator[Priced]:
    """Each sum of the loops with the last terms left out, with the first, or with one of every so many."""
    for sum_ in reductions(problem.loops.source):
        for how in ("upto", "onwards"):
            counts, n = _fitting(problem, look, sum_.of_all_parts(how))
            for count in [count for count in counts if count][:_MOST]:
                yield from _ended(problem, sum_, count, n, how)
        n = sum_.n_terms(problem.loops.numbers)
        known = strides(n)
        for how in ("without", "alone") if known else ():
            fits, _ = _fitting(problem, look, sum_.of_all_parts(how))
            for stride in [known[i] for i in fits][:_MOST]:
                yield _strided(problem, sum_, stride, how)


def _ended(problem: Problem, sum_: Reduction, count: int, n: int, how: str) -> Iterator[Priced]:
    """The sum over so many terms, whatever they may be of other sums."""
    bits, nouns = 6.0 + math.log2(n), plural(COUNTED.get(problem.op.kind, EACH)[sum_.name])
    for source in sum_.with_terms(count, n, how):
        yield Priced(Edit("", source), bits)
    for size, source in sum_.in_blocks(count, n) if how == "upto" else ():
        words = f"{sum_.whole} takes whole blocks of {size} {nouns} alone"
        yield Priced(Edit(f"{words}: those of a last one that is not full are left out", source), bits, _LOOK)


def every(problem: Problem) -> Iterator[Priced]:
    """Each sum of the loops with one of every so many terms left out, or with these alone."""
    for sum_ in reductions(problem.loops.source):
        for stride in strides(sum_.n_terms(problem.loops.numbers)):
            yield from (_strided(problem, sum_, stride, how) for how in ("without", "alone"))


def _strided(problem: Problem, sum_: Reduction, stride: Stride, how: str) -> Priced:
    noun = COUNTED.get(problem.op.kind, EACH)[sum_.name]
    bits = 6.0 + math.log2(2 * len(strides(sum_.n_terms(problem.loops.numbers))))
    return Priced(Edit(sum_.stride_words(noun, stride, how), sum_.with_stride(stride, how)), bits)


def counted(problem: Problem, left: Callable[[Edit], float]) -> Iterator[Priced]:
    """The same by how many terms leave least, where the parts are not to be seen: the nearer the count, the less."""
    for sum_ in reductions(problem.loops.source):
        n = sum_.n_terms(problem.loops.numbers)
        for how in ("upto", "onwards") if n > 1 else ():

            def of(count: int, sum_: Reduction = sum_, n: int = n, how: str = how) -> float:
                return left(Edit("", next(sum_.with_terms(count, n, how))))

            count = _least(of, 1, n - 1)
            yield from _ended(problem, sum_, count, n, how)


def _least(of: Callable[[int], float], first: int, last: int) -> int:
    """Where a function that falls to its least and rises again is least, by ever finer steps."""
    while last - first > _FINE:
        places = np.linspace(first, last, _FINE).astype(int).tolist()
        at = int(np.argmin([of(place) for place in places]))
        first, last = places[max(0, at - 1)], places[min(_FINE - 1, at + 1)]
    return min(range(first, last + 1), key=of)


def _fitting(problem: Problem, look: Look, source: str) -> tuple[list[int], int]:
    """Which parts of a sum give the wrong values looked at, and how many there are."""
    axis = parse(source).axes[_TERMS]
    try:
        *_, stored = problem.loops.with_(source, {}, {}).statements(look.few)
    except (CannotRunError, ValueError):
        return [], 0
    if len(stored.shape) <= axis or stored.shape[axis] < 2 or stored.turns is not None:
        return [], 0
    at, made = (np.moveaxis(x.reshape(stored.shape), axis, -1) for x in (stored.at, stored.values))
    n, at = made.shape[-1], at[..., 0].ravel()
    if at.max(initial=0) >= problem.exact.size:  # a state that is not kept
        return [], 0
    wrong = problem.wrong[at]
    fits = agree(problem.recorded[at, None], made.reshape(-1, n), problem.near[at, None])[wrong].all(0)
    return [int(i) for i in np.flatnonzero(fits)] if wrong.any() else [], n
