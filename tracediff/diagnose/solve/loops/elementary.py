"""Operators and elementary functions on the values of loops."""

import ast
from collections.abc import Callable, Mapping

import numpy as np

from tracediff.diagnose.solve.loops.arrays import CannotRunError, Value, check_size

_LARGEST = 1 << 63  # an integer of an array is less
ELEMENTARY: Mapping[str, Callable[[Value], Value]] = {
    "sqrt": np.sqrt, "exp": np.exp, "cos": np.cos, "sin": np.sin, "abs": np.abs, "log": np.log, "tanh": np.tanh,
}  # fmt: skip
COMPARISONS: Mapping[type, Callable[[Value, Value], Value]] = {
    ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal, ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}  # fmt: skip


def kind(x: Value) -> str:
    """Integers, booleans or numbers."""
    if isinstance(x, int | float):
        return "i" if isinstance(x, int) and abs(x) < _LARGEST else "f"
    return "i" if np.asarray(x).dtype.kind in "iub" else "f"


def function(of: Callable[[Value], Value], x: Value, dtype: type) -> Value:
    """An elementary function, of an array in this arithmetic."""
    y = of(x)
    # Angles are computed in double precision, their cosines are kept in the arithmetic's.
    if not isinstance(y, np.ndarray):
        return float(y)
    return y.astype(dtype, copy=False) if kind(y) == "f" else y


def binary(op: ast.operator, a: Value, b: Value) -> Value:
    """What an operator makes of two values; raises CannotRunError where that is not defined, or too large."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        check_size(a.shape, b.shape)
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            if np.ndim(a) == np.ndim(b) == 0:
                return float(np.divide(float(a), float(b)))
            return np.divide(a, b)
        case ast.FloorDiv() | ast.Mod():
            if kind(a) == "f" or kind(b) == "f" or np.any(np.equal(b, 0)):
                raise CannotRunError("a division of integers")
            return a // b if isinstance(op, ast.FloorDiv) else a % b
        case ast.Pow():
            return np.power(float(a) if np.ndim(a) == 0 else a.astype(float), b)
    raise CannotRunError(type(op).__name__)
