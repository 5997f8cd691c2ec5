"""Weights that an engine quantised by itself from what the file holds: the type, and the groups that share a scale."""

from collections.abc import Iterator

import numpy as np

from tracediff.audit.causes import chunks, residual, rounded_to

# Of the error that the requantisation makes so much may be left: formulas differ in the last bit of a scale, and a
# value on a boundary goes the other way.
_LEFT = 0.1
_AT_MOST = 1.25  # and so much of any value, in steps: one that turned is off by one
_ROWS = 128  # looked at before the whole matrix: as many as share a scale, at most
_LEAST = 8  # values that share a scale
# Of a quantisation that is not known: a level stands for so many different values of its group at least, or it says
# nothing that there are levels. A value may lie beyond the middle of two by so large a part of what reaches from one
# end of the group to the other: float32 errs by that, and four roundings to bfloat16, where levels are in half
# precision. Of the squares more than a quarter no engine leaves: three levels leave a fifth.
_MERGED, _BEYOND, _BEYOND_IN_HALF, _MOST = 2, 2.0**-16, 2.0**-7, 0.25
_WORDS = {  # of roundings, by their names
    "int8": "an 8-bit requantisation", "uint8": "an asymmetric 8-bit requantisation",
    "full int8": "a full-range 8-bit requantisation", "wide int8": "a wide 8-bit requantisation",
    "int4": "a 4-bit requantisation", "uint4": "an asymmetric 4-bit requantisation",
    "full int4": "a full-range 4-bit requantisation", "wide int4": "a wide 4-bit requantisation",
    "affine4": "a 4-bit requantisation with offsets", "affine8": "an 8-bit requantisation with offsets",
    "nf4": "an NF4 requantisation", "fp8": "a float8 requantisation",
}  # fmt: skip


def requantised_as(expected: np.ndarray, held: np.ndarray) -> str | None:
    """In words the requantisation of `expected`, a matrix [n_out, n_in], that `held` is, with its error; None for none.

    Each group of a row's values has a scale of its own. Groups may have any size that divides the row.
    """
    if expected.ndim != 2:
        return None
    rows, few = held.reshape(expected.shape), slice(_ROWS)
    known = (
        words
        for words, rounding in _requantisations(expected.shape[1])
        if _is(rounding, expected[few], rows[few]) and _is(rounding, expected, rows)
    )
    if not (words := next(known, None) or _to_levels(expected, rows)):
        return None
    error = residual(expected.reshape(-1), held.reshape(-1)) ** 2
    return f"as {words} of the right values would be (NMSE {error:.1e})"


def _to_levels(expected: np.ndarray, held: np.ndarray) -> str | None:
    """A quantisation that is not known, wherever its levels are, in words: each group has a few, and each value is the
    nearest of these to the right one; and a factor or an offset explains little of the error, as of a wrong scale.
    """
    if residual(expected.reshape(-1), held.reshape(-1)) ** 2 > _MOST or not _is_even(expected, held):
        return None
    flat = held.reshape(-1)
    beyond = _BEYOND_IN_HALF if rounded_to(flat, flat) in ("float16", "bfloat16") else _BEYOND
    for size in _sizes(expected.shape[1]):
        few = _n_levels(expected[:_ROWS], held[:_ROWS], size, beyond)
        if few and (n_levels := _n_levels(expected, held, size, beyond)):
            return f"a requantisation to {n_levels} levels at most in {_groups(size, expected.shape[1])}"
    return None


def _n_levels(expected: np.ndarray, held: np.ndarray, size: int, beyond: float) -> int:
    """The most levels of a group; 0 where some value is not the nearest one of its group, but for so large a part of
    what they span, or where some group has too many levels, or one alone, as what was never loaded has.
    """
    most = 0
    for cut in chunks(expected.size, size):
        right, ours = (x.reshape(-1)[cut].reshape(-1, size).astype(np.float64) for x in (expected, held))
        order = right.argsort(-1)
        right, ours = (np.take_along_axis(x, order, -1) for x in (right, ours))
        steps, middles, differ = np.diff(ours), (ours[:, 1:] + ours[:, :-1]) / 2, np.diff(right) > 0
        slack = beyond * (ours[:, -1:] - ours[:, :1])
        nearest = (right[:, :-1] <= middles + slack) & (right[:, 1:] >= middles - slack) & (steps > 0) & differ
        levels, values = (1 + np.count_nonzero(x, axis=-1) for x in (steps, differ))
        few = (levels > 1) & (levels * _MERGED <= values) | (values == 1)
        if not few.all() or not (nearest | (steps == 0)).all():
            return 0
        most = max(most, int(levels.max()))
    return most


def _is_even(expected: np.ndarray, held: np.ndarray) -> bool:
    """Whether most of the error is left by an offset, and by a factor: of the right values, or, where levels are means
    of what they stand for, of the levels.
    """
    n, sums = expected.size, np.zeros(6)
    for cut in chunks(n):
        right, ours = (x.reshape(-1)[cut].astype(np.float64) for x in (expected, held))
        error = ours - right
        sums += right @ right, error @ right, ours @ ours, error @ ours, error.sum(), error @ error
    *pairs, total, squares = sums.tolist()
    factors = [along**2 / signal if signal else squares for signal, along in (pairs[:2], pairs[2:])]
    return max(min(factors), total**2 / n) <= _LEFT * squares


def _is(rounding: str, expected: np.ndarray, held: np.ndarray) -> bool:
    import torch  # most traces hold the file's weights, and a command that compares them needs no torch

    from tracediff.numerics.roundings import rounding_named

    right, of = torch.from_numpy(expected.astype(np.float32)), rounding_named(rounding)
    kept, step = of(right).numpy(), of.step(right).numpy()
    left = residual(kept.reshape(-1), held.reshape(-1))
    most = _LEFT * residual(expected.reshape(-1), held.reshape(-1))
    return left <= most < _LEFT and bool((np.abs(held - kept) <= _AT_MOST * step).all())  # beyond it nothing is alike


def _requantisations(n_in: int) -> Iterator[tuple[str, str]]:
    for kind, words in _WORDS.items():
        for size in _sizes(n_in):
            yield f"{words} in {_groups(size, n_in)}", f"{kind}/{size}"
    if n_in % 128 == 0:
        yield f"{_WORDS['fp8']} in blocks of 128 x 128", "fp8/128x128"


def _sizes(n_in: int) -> Iterator[int]:
    return (size for size in range(n_in, _LEAST - 1, -1) if n_in % size == 0)


def _groups(size: int, n_in: int) -> str:
    return f"groups of {size}" if size < n_in else "whole rows"
