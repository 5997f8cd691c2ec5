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

BEAM = 4  # edits on top of which another one is sought
_PART = 0.5  # of the squared error: of two independent mistakes the larger makes as much


def pairs(problem: Problem, check: Callable[[], None]) -> Iterator[Solved]:
    """What gives all that was recorded, two edits at a time. Nothing here was verified to the floor.

    `check` raises where the time is over.
    """
    for first in _largest(problem, check):
        bound = bound_of(problem, first.edit)
        assert bound
        try:
            rest = problem.given(bound)
            at = [stored.at for stored in bound.places()]
            if not at or any(one.min() < 0 or one.max() >= problem.exact.size for one in at if one.size):
                continue  # nothing shows beside what is not stored, or beyond the output
        except CannotRunError:
            continue
        both = (
            second.on(first, words_of(problem, first.edit) + AND + words_of(rest, second.edit))
            for second in passing(rest, Look(rest), check)
        )
        solved = (verified(problem, one) for one in sorted(both, key=lambda one: one.bits))
        yield from (replace(one, n_edits=2) for one in solved if one)


def _largest(problem: Problem, check: Callable[[], None]) -> list[Priced]:
    """Edits that take a part of the error away, those that take most first; of some that come to the same one."""
    look, left = Look(problem), dict[float, Priced]()

    def share(edit: Edit) -> float:
        check()
        bound = bound_of(problem, edit)
        return look.share(bound, edit.touches) if bound else math.inf

    for priced in chain(hypotheses(problem, look), terms.counted(problem, share)):
        part = math.inf if priced.fitted else share(priced.edit)  # a number is fitted to what another edit leaves
        if part <= _PART and (part not in left or priced.bits < left[part].bits):
            left[part] = priced
    return [left[part] for part in sorted(left)[:BEAM]]
