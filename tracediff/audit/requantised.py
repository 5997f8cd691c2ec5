"""Weights that an engine quantised by itself from what the file holds: the type, and the groups that share a scale."""

from collections.abc import Iterator

import numpy as np

from tracediff.audit.causes import residual
from tracediff.audit.unlisted import ROWS, in_groups, unlisted
from tracediff.numerics.sizes import group_sizes

# Of the error that the requantisation makes so much may be left: formulas differ in the last bit of a scale, and a
# value on a boundary goes the other way.
_LEFT = 0.1
_AT_MOST = 1.25  # and so much of any value, in steps: one that turned is off by one
_WORDS = {  # of roundings, by their names
    "int8": "an 8-bit requantisation", "uint8": "an asymmetric 8-bit requantisation",
    "full int8": "a full-range 8-bit requantisation", "wide int8": "a wide 8-bit requantisation",
    "int4": "a 4-bit requantisation", "uint4": "an asymmetric 4-bit requantisation",
    "full int4": "a full-range 4-bit requantisation", "wide int4": "a wide 4-bit requantisation",
    "affine4": "a 4-bit requantisation with offsets", "affine8": "an 8-bit requantisation with offsets",
    "nf4": "an NF4 requantisation", "fp8": "a float8 requantisation",
}  # fmt: skip


def requantised_as(expected: np.ndarray, held: np.ndarray) -> str | None:
    """In words what requantisation of `expected`, one matrix [n_out, n_in] or several, `held` is, and its error; None
    for none.

    Each group of a row's values has a scale of its own, or of a column's, where an engine holds matrices transposed.
    Groups may have any size that divides the row.
    """
    if expected.ndim < 2:
        return None
    expected = expected.reshape(-1, expected.shape[-1])
    rows = held.reshape(expected.shape)
    words = _known(expected, rows)
    if not words and (down := _known(expected.T, rows.T)):
        words = down.replace("rows", "columns") if "rows" in down else f"{down} along columns"
    if not (words := words or unlisted(expected, rows)):
        return None
    error = residual(expected.reshape(-1), held.reshape(-1)) ** 2
    return f"as {words} of the right values would be (NMSE {error:.1e})"


def _known(expected: np.ndarray, held: np.ndarray) -> str | None:
    few = slice(ROWS)
    known = (
        words
        for words, rounding in _requantisations(expected.shape[1])
        if _is(rounding, expected[few], held[few]) and _is(rounding, expected, held)
    )
    return next(known, None)


def _is(rounding: str, expected: np.ndarray, held: np.ndarray) -> bool:
    import torch  # most traces hold the file's weights, and a command that compares them needs no torch

    from tracediff.numerics.roundings import rounding_named

    right, of = torch.from_numpy(np.ascontiguousarray(expected, np.float32)), rounding_named(rounding)
    kept, step = of(right).numpy(), of.step(right).numpy()
    left = residual(kept.reshape(-1), held.reshape(-1))
    most = _LEFT * residual(expected.reshape(-1), held.reshape(-1))
    return left <= most < _LEFT and bool((np.abs(held - kept) <= _AT_MOST * step).all())  # beyond it nothing is alike


def _requantisations(n_in: int) -> Iterator[tuple[str, str]]:
    yield from (("an E5M2 requantisation", "e5m2"), ("an E4M3 requantisation", "e4m3"))
    if n_in % 8 == 0:
        yield "a gf4 requantisation", "gf4"
    for kind, words in _WORDS.items():
        for size in group_sizes(n_in):
            yield f"{words} in {in_groups(size, n_in)}", f"{kind}/{size}"
    if n_in % 128 == 0:
        yield f"{_WORDS['fp8']} in blocks of 128 x 128", "fp8/128x128"
