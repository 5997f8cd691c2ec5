"""What counts in some loops come to: sizes, and the ranges of loops."""

import ast
from collections.abc import Mapping

from tracediff.diagnose.solve.loops.arrays import CannotRunError
from tracediff.diagnose.solve.loops.bound import Bound
from tracediff.diagnose.solve.loops.interpret import Run
from tracediff.diagnose.solve.loops.program import Program


def range_of(call: ast.Call, bound: Bound) -> range | None:
    """What `range(...)` comes to; None where it depends on other loops."""
    values = [evaluated(argument, bound) for argument in call.args]
    if any(value is None for value in values):
        return None
    try:
        return range(*(int(value) for value in values if value is not None))
    except ValueError:
        return None


def evaluated(node: ast.expr, bound: Bound) -> float | None:
    """A count in numbers; None where it depends on loop variables or on arrays."""
    names = dict(bound.numbers)
    for statement in ast.walk(ast.parse(bound.source)):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value = _of_numbers(statement.value, names)
            if value is not None:
                names[statement.targets[0].id] = value
    return _of_numbers(node, names)


def _of_numbers(node: ast.expr, names: Mapping[str, float]) -> float | None:
    try:
        run = Run(Program(ast.Module([], [])), names, {}, 0)
        return float(run.value(node)) if not any(isinstance(n, ast.Subscript) for n in ast.walk(node)) else None
    except (CannotRunError, OverflowError):
        return None
