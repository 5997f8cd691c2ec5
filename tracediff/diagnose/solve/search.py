"""The search: hypotheses of every sort, looked at and priced."""

from collections.abc import Callable, Iterator

import numpy as np

from tracediff.diagnose.solve.by_value import (
    caches,
    functions,
    groups,
    minima,
    misread,
    operands,
    outputs,
    rotations,
    squares,
)
from tracediff.diagnose.solve.by_value.parts import in_region
from tracediff.diagnose.solve.by_value.regions import around, widest
from tracediff.diagnose.solve.edit import Edit, Priced, Read, Solved
from tracediff.diagnose.solve.edits import copies, formulas, inputs, lanes, numbers, overlaps, tensors, terms
from tracediff.diagnose.solve.look import NEARLY_ALL, Look
from tracediff.diagnose.solve.loops.arrays import Array, CannotRunError, Flat
from tracediff.diagnose.solve.loops.bound import Bound, FlatWeight, held_as
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.diagnose.solve.words.speaker import Speaker
from tracediff.numerics.kinds import KINDS

_LARGE = 1 << 22  # values: such outputs are not computed twice more
_PARTS = 24  # hypotheses that are computed in whole for that


def solve(problem: Problem, check: Callable[[], None]) -> Iterator[Solved]:
    """What gives all that was recorded, the cheapest first. Nothing here was verified to the floor.

    `check` raises where the time is over.
    """
    if not problem.has_loops:
        if KINDS[problem.op.kind].picks:  # numbers of experts are no values
            return
        found = _checked(check, outputs.variants(problem), functions.variants(problem))
        yield from sorted(found, key=lambda one: one.bits)
        return
    look, partial = Look(problem), list[Priced]()
    whole = [*passing(problem, look, check, partial)]
    # Of edits that come to the same the shorter: w[o + i] before w[o % n + i].
    alike = sorted(whole, key=lambda one: (one.bits, len(one.edit.source)))
    untold = list[Solved]()  # which of the numbers beyond an array an engine has the others may tell
    for one in alike:
        solved = verified(problem, one)
        if solved and solved.untold:
            untold.append(solved)
        elif solved:
            yield solved
    others = _checked(
        check,
        *(one.variants(problem) for one in (outputs, functions, minima, misread, squares, rotations)),
        operands.variants(problem, look),
        *(one.variants(problem) for one in (groups, caches)),
    )
    yield from sorted(others, key=lambda one: one.bits)
    yield from untold
    partial.sort(key=lambda one: one.bits)
    yield from sorted(_checked(check, _in_parts(problem, partial[:_PARTS])), key=lambda one: one.bits)


def _checked(check: Callable[[], None], *found: Iterator[Solved]) -> Iterator[Solved]:
    """What each finds, as long as there is time."""
    for one in found:
        check()
        yield from one


def passing(problem: Problem, look: Look, check: Callable[[], None], partial: list[Priced]) -> Iterator[Priced]:
    """Edits that nothing speaks against at a look; those that give what is wrong alone are added to `partial`."""
    for priced in hypotheses(problem, look):
        check()
        bound = bound_of(problem, priced.edit)
        seen = look.at(bound, priced.edit.touches) if bound else None
        if seen and seen.passes:
            yield priced
        elif seen and seen.wrong >= NEARLY_ALL:  # to be tried in a region
            partial.append(priced)


def verified(problem: Problem, priced: Priced) -> Solved | None:
    """The op so changed; None where most of what is wrong, zeros apart, would follow from what nobody knows."""
    if _is_as_true_of_the_right(problem, priced.edit):
        return None
    words, unknown, untold = words_of(problem, priced.edit), *np.zeros((2, 0), int)
    if words is None:
        return None
    if problem.exact.size <= _LARGE:
        bound = bound_of(problem, priced.edit)
        assert bound
        try:
            made, beyond = bound.computed()
            unknown = bound.unknown(made) if beyond else unknown
            untold = unknown[~agree(made.flat[unknown], problem.recorded[unknown], problem.near[unknown])]
        except CannotRunError:
            return None
        something = np.count_nonzero(problem.recorded[problem.wrong])  # zeros are left by many an edit
        if len(untold) > something / 2 or (len(unknown) and problem.is_told):
            return None
        if len(untold):
            words += " (some values are made of what lies beyond an array and cannot be told: it is not in the trace)"
    wrong = problem.recorded[problem.wrong]
    if not np.isfinite(wrong).any():  # many formulas make these: this one does, and needs fewest words
        words = f"{'all' if problem.wrong.all() else len(wrong)} values are NaN or Inf, as if {words}"
    op = problem.edited(priced.edit, beyond=len(unknown) > 0)
    return Solved((op,), words, priced.bits, priced.look, priced.fitted, untold=bool(len(untold)))


def words_of(problem: Problem, edit: Edit, within: np.ndarray | None = None) -> str | None:
    """The edit in the reader's words, be it but of what is `within`; None where its loops cannot run here, though of
    fewer tokens they may.
    """
    bound = bound_of(problem, edit)
    try:
        return Speaker(problem.op, problem.loops).said(edit, bound, within) if bound else None
    except CannotRunError:
        return None


def hypotheses(problem: Problem, look: Look) -> Iterator[Priced]:
    """Every edit of the op's loops, of what they read and of their numbers; nothing of them was computed."""
    yield from copies.variants(problem)
    yield from numbers.variants(problem, look.left)
    yield from numbers.constants(problem, look.left)
    yield from numbers.positions(problem)
    yield from inputs.variants(problem)
    yield from inputs.cached(problem)
    yield from tensors.variants(problem)
    yield from terms.variants(problem, look)
    yield from formulas.variants(problem)
    yield from overlaps.variants(problem)
    yield from lanes.variants(problem)


def _is_as_true_of_the_right(problem: Problem, edit: Edit) -> bool:
    """Whether an edit that reads the op's own output gives the right output of that, too: it says nothing of this one.

    Attention over one key copies V: any output follows from V whose buffer is the output's.
    """
    own = {name: Flat(problem.exact) for name, read in edit.arrays if read == Read(problem.op.name)}
    bound = bound_of(problem, edit) if own else None
    if bound is None:
        return False
    try:
        made = bound.with_(edit.source, own, dict(edit.numbers)).output().ravel()
    except CannotRunError:
        return False
    return bool(agree(made, problem.exact, problem.near)[problem.wrong].all())


def bound_of(problem: Problem, edit: Edit) -> Bound | None:
    """The edited loops on the problem's values; None where one of them was not recorded, or tells nothing."""
    arrays: dict[str, Array] = {}
    for name, read in edit.arrays:
        values = problem.held(read)
        if values is None or (problem.is_lost and not np.isfinite(values).all()):
            return None
        arrays[name] = Flat(values)
    for name, weight in edit.weights:
        hold = held_as(problem.op, name, problem.arithmetic, weight, problem.weights)
        arrays[name] = FlatWeight(weight, problem.weights, hold)
    return problem.loops.with_(edit.source, arrays, dict(edit.numbers))


def _in_parts(problem: Problem, partial: list[Priced]) -> Iterator[Solved]:
    """What gives all that is wrong, in the smallest region that holds it: not where all of that is NaN, which many an
    edit makes of some tokens.
    """
    if problem.is_lost:
        return
    shape = problem.loops.own.shape
    axes = KINDS[problem.op.kind].axis_names(problem.op, len(shape))
    regions = around(problem.wrong.reshape(shape))
    for priced in partial:
        bound = bound_of(problem, priced.edit)
        assert bound
        if _is_as_true_of_the_right(problem, priced.edit):
            continue
        try:
            made, beyond = bound.computed()
            fits = agree(problem.recorded, made.ravel(), problem.near)
            if beyond:  # in a region any number may be there: of scores that are 0 weights are alike
                fits[bound.from_beyond(made)] = False
        except CannotRunError:
            continue
        for region in regions:
            if np.all(fits[region.mask(shape).ravel()]):
                inside = problem.edited(priced.edit)
                region = widest(region, fits.reshape(shape))
                changed = in_region(problem.op, inside, region)
                words = words_of(problem, priced.edit, region.mask(shape))
                if words is not None:
                    said = f"{region.words(axes)}: {words}"
                    yield Solved((changed,), said, priced.bits + region.bits, priced.look, priced.fitted)
                break
