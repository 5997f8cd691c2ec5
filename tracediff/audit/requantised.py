"""Weights that an engine quantised by itself from what the file holds: the type, and the groups that share a scale."""

from collections.abc import Iterator

import numpy as np

from tracediff.audit.causes import residual

# Of the error that the requantisation makes so much may be left: formulas differ in the last bit of a scale, and a
# value on a boundary goes the other way.
_LEFT = 0.1
_ROWS = 64  # looked at before the whole matrix
_LEAST = 8  # values that share a scale
_WORDS = {  # of roundings, by their names
    "int8": "an 8-bit requantisation", "uint8": "an asymmetric 8-bit requantisation",
    "full int8": "a full-range 8-bit requantisation", "wide int8": "a wide 8-bit requantisation",
    "int4": "a 4-bit requantisation", "uint4": "an asymmetric 4-bit requantisation",
    "full int4": "a full-range 4-bit requantisation", "wide int4": "a wide 4-bit requantisation",
    "affine4": "a 4-bit requantisation with offsets", "affine8": "an 8-bit requantisation with offsets",
    "nf4": "an NF4 requantisation",
}  # fmt: skip


def requantised_as(expected: np.ndarray, held: np.ndarray) -> str | None:
    """In words the requantisation of `expected`, a matrix [n_out, n_in], that `held` is, with its error; None for none.

    Each group of a row's values has a scale of its own. Groups may have any size that divides the row.
    """
    if expected.ndim != 2:
        return None
    rows = held.reshape(expected.shape)
    for words, rounding in _requantisations(expected.shape[1]):
        few = slice(_ROWS)
        if _is(rounding, expected[few], rows[few]) and _is(rounding, expected, rows):
            error = residual(expected.reshape(-1), held.reshape(-1)) ** 2
            return f"as {words} of the right values would be (NMSE {error:.1e})"
    return None


def _is(rounding: str, expected: np.ndarray, held: np.ndarray) -> bool:
    import torch  # most traces hold the file's weights, and a command that compares them needs no torch

    from tracediff.numerics.roundings import rounding_named

    kept = rounding_named(rounding)(torch.from_numpy(expected.astype(np.float32))).numpy()
    left = residual(kept.reshape(-1), held.reshape(-1))
    return left <= _LEFT * residual(expected.reshape(-1), held.reshape(-1)) < _LEFT  # beyond it nothing is alike


def _requantisations(n_in: int) -> Iterator[tuple[str, str]]:
    for kind, words in _WORDS.items():
        for size in (size for size in range(n_in, _LEAST - 1, -1) if n_in % size == 0):
            yield f"{words} in {f'groups of {size}' if size < n_in else 'whole rows'}", f"{kind}/{size}"
