"""Another number: eps, theta, a scale, fitted to what was recorded."""

import ast
import math
from collections.abc import Callable, Iterator

import numpy as np

from tracediff.diagnose.solve.edit import Edit, Priced
from tracediff.diagnose.solve.loops.bound import Bound
from tracediff.diagnose.solve.loops.nodes import nodes, type_of, with_node
from tracediff.diagnose.solve.loops.program import parse
from tracediff.diagnose.solve.problem import Problem
from tracediff.english import told_apart

CONSTANT = "constant"  # stands in the place of one
_DECADES = 8  # on either side of the right number in which the fit may begin
_LOOK_AT_TABLES = "for how many positions cosines and sines are made, and whether positions advance in decoding"
_LOOK = "the positions of each step: how many are cached before it"
_POSITIONS = 64  # by which they may be off
_SIZES = tuple(1 << i for i in range(6, 16))  # after which they may begin again
_ROUNDS = 40
_SHORT = 1e-5  # to which a fit is one of few digits: float32's noise takes it so far
_SAME = 1e-6  # to which a fitted number is the right one
_BITS = 24  # of a fitted number; a usual one takes few
_USUAL = (0.0, 1.0, *(m * 10.0**e for e in range(-12, 8) for m in (1, 2, 5)), 2.0, 0.5, 0.25, 0.125)


Left = Callable[[Bound], np.ndarray]  # what an op computed so leaves of what was recorded


def variants(problem: Problem, left: Left) -> Iterator[Priced]:
    """Each real number of the loops, as it fits best."""
    for name, right in problem.loops.numbers.items():
        if isinstance(right, float) and name in problem.loops.source:
            fitted = _of_name(problem.loops, name, right, left)
            if fitted is None:
                continue
            called = {"theta": "rope's base", "scale": "the scale", "freq_scale": "the frequency scale"}.get(name, name)
            for value, bits in (*simpler(fitted, 6.0), (fitted, _BITS)):
                words = "{} is {}; it should be {}".format(called, *told_apart(value, right))
                yield Priced(
                    Edit(words, problem.loops.source, numbers=((name, value),)),
                    bits,
                    f"where {called} is read from the file, or computed",
                    fitted=True,
                )


def constants(problem: Problem, left: Left) -> Iterator[Priced]:
    """Each number in a formula, as it fits best."""
    for right, source in each_constant(problem.loops.source):
        fitted = _of_name(problem.loops.with_(source, {}, {}), CONSTANT, right, left)
        if fitted is not None and abs(fitted / right - 1) > _SAME:
            for value, bits in (*simpler(fitted, 8.0), (fitted, _BITS)):
                edited = source.replace(CONSTANT, f"{value:.6g}")
                yield Priced(Edit("", edited), bits, fitted=True)


def each_constant(source: str) -> Iterator[tuple[float, str]]:
    """Each number that stands in a formula of values, and the loops with CONSTANT in its place."""
    tree = parse(source).tree
    for place in nodes(tree):
        match place.node, place.parent:
            case ast.Constant(value=int() | float() as c), ast.BinOp() as outer if (
                c and type_of(outer, place.names) == "f"
            ):
                yield float(c), ast.unparse(with_node(tree, place.path, ast.Name(CONSTANT, ast.Load())))


def positions(problem: Problem) -> Iterator[Priced]:
    """Of what is rotated, positions that are too high or too low by one number, one position for all, or the last that
    is right for all that follow, or the first again: of a table that is too short, or a type.
    """
    source = problem.loops.source
    if "positions[t]" not in source:
        return
    n = int(problem.loops.numbers["T"])
    wrong = problem.array("positions")[problem.wrong.reshape(n, -1).any(1)]
    far = (k - int(first) for first in wrong[:1] for k in range(_POSITIONS))  # as where decode steps count from 0
    for by in dict.fromkeys((*(k for k in range(-_POSITIONS, _POSITIONS + 1) if k), *(k for k in far if k < 0))):
        words = f"positions are {abs(by)} too {'high' if by > 0 else 'low'}"
        yield Priced(Edit(words, source.replace("positions[t]", f"(positions[t] + {by})")), 8.0, _LOOK)
    for one in range(_POSITIONS):
        words = f"every token is rotated as position {one}"
        yield Priced(Edit(words, source.replace("positions[t]", str(one))), 8.0, _LOOK)
    for last in dict.fromkeys((*(wrong[:1] - 1).astype(int).tolist(), *range(1, _POSITIONS))):
        clipped = f"(positions[t] if positions[t] < {last} else {last})"
        words = f"positions beyond {last} are taken for {last}"
        yield Priced(Edit(words, source.replace("positions[t]", clipped)), 8.0, _LOOK_AT_TABLES)
    for size in dict.fromkeys((*wrong[:1].astype(int).tolist(), *range(2, _POSITIONS), *_SIZES)):
        if size > 1:
            words = f"position p is taken for p % {size}"
            # Of single positions many numbers are a remainder too: 15 to 17 are 0 to 2 by 3, as if counted from there.
            bits = 8.0 if n > 1 or size in _SIZES else 9.0
            yield Priced(Edit(words, source.replace("positions[t]", f"(positions[t] % {size})")), bits, _LOOK_AT_TABLES)


def simpler(fitted: float, bits: float = 0.0) -> Iterator[tuple[float, float]]:
    """Usual numbers that the fit may mean, of so many bits, and such of few digits, of more for each digit: any factor
    is one of five digits, and "0.99478 / sqrt(squares / 96)" came before squares / 95.
    """
    for one in _USUAL:
        if abs(one - fitted) <= 1e-3 * abs(fitted) or (not one and abs(fitted) < 1e-9):
            yield one, bits
    for digits in (2, 3, 4, 5):
        one = float(f"{fitted:.{digits}g}")
        if abs(one - fitted) <= _SHORT * abs(fitted):
            yield one, bits + (digits - 2) * math.log2(10)


def _of_name(loops: Bound, name: str, right: float, left: Left) -> float | None:
    return best(lambda value: left(loops.with_(loops.source, {}, {name: value})), right)


@np.errstate(over="ignore", invalid="ignore")  # of values that are Inf, or all but
def best(left: Callable[[float], np.ndarray], right: float) -> float | None:
    """The number that leaves least: by Gauss-Newton in the logarithm, from the best decade around the right one. None
    where it makes no difference.
    """
    decades = [right * 10.0**e for e in range(-_DECADES, _DECADES + 1)]
    sizes = [float(np.square(left(value)).sum()) for value in decades]
    value, least = decades[int(np.argmin(sizes))], min(sizes)
    for _ in range(_ROUNDS):
        now = left(value)
        slope = (left(value * 1.0001) - now) / 1e-4
        if not np.square(slope).sum():
            return None
        step = max(-1.0, min(1.0, -float(slope @ now / (slope @ slope))))
        other = value * np.exp(step)
        if not np.isfinite(other) or not (size := float(np.square(left(other)).sum())) < least:
            break
        value, least = other, size
    return float(value) if np.isfinite(value) else None
