"""Weights that an engine quantised by itself from what the file holds: the type, and the groups that share a scale."""

from collections.abc import Callable, Iterator

import numpy as np

from tracediff.audit.causes import residual

# Of the error that the requantisation makes so much may be left: formulas differ in the last bit of a scale, and a
# value on a boundary goes the other way.
_LEFT = 0.1
_ROWS = 64  # looked at before the whole matrix
_LEAST = 8  # values that share a scale

Quantise = Callable[[np.ndarray], np.ndarray]


def requantised_as(expected: np.ndarray, held: np.ndarray) -> str | None:
    """In words the requantisation of `expected`, a matrix [n_out, n_in], that `held` is, with its error; None for none.

    Each group of a row's values has a scale of its own. Groups may have any size that divides the row.
    """
    if expected.ndim != 2:
        return None
    rows = held.reshape(expected.shape)
    for words, quantise in _requantisations(expected.shape[1]):
        few = slice(_ROWS)
        if _is(quantise, expected[few], rows[few]) and _is(quantise, expected, rows):
            error = residual(expected.reshape(-1), held.reshape(-1)) ** 2
            return f"as {words} of the right values would be (NMSE {error:.1e})"
    return None


def _is(quantise: Quantise, expected: np.ndarray, held: np.ndarray) -> bool:
    left = residual(quantise(expected.astype(np.float32)).reshape(-1), held.reshape(-1))
    return left <= _LEFT * residual(expected.reshape(-1), held.reshape(-1)) < _LEFT  # beyond it nothing is alike


def _requantisations(n_in: int) -> Iterator[tuple[str, Quantise]]:
    for bits, a in ((8, "an 8-bit"), (4, "a 4-bit")):
        for size in (size for size in range(n_in, _LEAST - 1, -1) if n_in % size == 0):
            of = f"groups of {size}" if size < n_in else "whole rows"
            yield f"{a} requantisation in {of}", _symmetric(size, bits)
            yield f"an asymmetric {bits}-bit requantisation in {of}", _asymmetric(size, bits)


def _symmetric(size: int, bits: int) -> Quantise:
    """Scale max / 127 of 8 bits: llama2.c's export.py, `quantize_q80`; max / 7 of 4."""
    most = 2 ** (bits - 1) - 1

    def quantise(x: np.ndarray) -> np.ndarray:
        groups = x.reshape(-1, size)
        scale = np.abs(groups).max(1, keepdims=True) / np.float32(most)
        return np.rint(_over(groups, scale)) * scale

    return quantise


def _asymmetric(size: int, bits: int) -> Quantise:
    """Scale (max - min) / 255 of 8 bits, of a range that holds 0, which an integer stands for."""
    most = 2**bits - 1

    def quantise(x: np.ndarray) -> np.ndarray:
        groups = x.reshape(-1, size)
        least, largest = groups.min(1, keepdims=True).clip(max=0), groups.max(1, keepdims=True).clip(min=0)
        scale = (largest - least) / np.float32(most)
        zero = np.rint(_over(-least, scale))
        return (np.clip(np.rint(_over(groups, scale)) + zero, 0, most) - zero) * scale

    return quantise


def _over(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)
