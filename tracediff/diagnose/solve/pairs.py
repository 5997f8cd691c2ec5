"""Two edits of one op: what takes most of the error away is taken for granted, and what it leaves is solved."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from tracediff.diagnose.solve.edit import AND, Edit, Priced, Solved
from tracediff.diagnose.solve.edits import terms
from tracediff.diagnose.solve.look import Look
from tracediff.diagnose.solve.loops.arrays import CannotRunError
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.search import bound_of, hypotheses, passing, verified, words_of
from tracediff.model.graph import Op

BEAM = 4  # edits on top of which another one is sought
_PART = 0.5  # of the squared error: of two independent mistakes the larger makes as much


def pairs(problem: Problem, check: Callable[[], None]) -> Iterator[Solved]:
    """What gives all that was recorded, two edits at a time. Nothing here was verified to the floor.

    `check` raises where the time is over.
    """
    if not problem.has_loops:
        return
    for first in _largest(problem, check):
        bound = bound_of(problem, first.edit)
        assert bound
        try:
            rest = problem.given(bound)
        except CannotRunError:
            continue
        if (said := words_of(problem, first.edit)) is None:
            continue
        seconds = sorted(passing(rest, Look(rest), check, []), key=lambda one: one.bits)
        told = ((second, words_of(rest, second.edit)) for second in seconds)
        both = (second.on(first, said + AND + words) for second, words in told if words is not None)
        solved = (verified(problem, one) for one in both)
        yield from (replace(one, n_edits=2) for one in solved if one and not _reads_itself(one.ops[0]))


def _reads_itself(op: Op) -> bool:
    """Whether some of its values are made of its own output, or of what lies beyond an array: two edits give any."""
    return (op.name, False) in op.reads


def _largest(problem: Problem, check: Callable[[], None]) -> list[Priced]:
    """Edits that take a part of the error away, those that take most first; of some that come to the same one."""
    look, left = Look(problem), dict[float, Priced]()

    def share(edit: Edit) -> float:
        check()
        bound = bound_of(problem, edit)
        return look.share(bound, edit.touches) if bound else math.inf

    for priced in chain(hypotheses(problem, look), terms.counted(problem, share)):
        # A number is fitted to what another edit leaves; where values lie is said of whole loops, not of edited ones.
        alone = priced.fitted or priced.edit.renamed or priced.edit.touches != "values"
        part = math.inf if alone else share(priced.edit)
        if part <= _PART and (part not in left or priced.bits < left[part].bits):
            left[part] = priced
    return [left[part] for part in sorted(left)[:BEAM]]
