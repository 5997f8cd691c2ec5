"""A sum over fewer terms: of the first so many, or from one on, whatever their number.

The sums up to each term tell which.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from tracediff.diagnose.solve.arrays import CannotRunError
from tracediff.diagnose.solve.bound import parsed
from tracediff.diagnose.solve.formulas import Reduction, reductions
from tracediff.diagnose.solve.look import Look
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.diagnose.solve.variant import Priced, Variant

_MOST = 3  # counts that give the values that are looked at
_FINE = 9  # places looked at in each step to the best
_TERMS = "term"  # the loop variable of a sum of which all parts are kept


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
    axis = parsed(source).axes[_TERMS]
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
