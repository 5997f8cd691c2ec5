"""Weights in a quantisation that no list has, told by what any quantisation does to the right values.

It has few levels; or the levels of a short float, whatever the scale is; or its error is noise: no part of the matrix
is larger or smaller by it, or shifted, and no value is beyond a step of its own.
"""

from collections.abc import Iterator

import numpy as np

from tracediff.audit.causes import chunks, residual, rounded_to
from tracediff.numerics.sizes import group_sizes

ROWS = 128  # looked at before the whole matrix: as many as share a scale, at most
# A group has one level for so many different values at most, or it says nothing that there are levels.
_LEVELS = 0.75
# A value may lie beyond the middle of two levels by so large a part of what reaches from one end of the group to the
# other: float32 errs by that, and four roundings to bfloat16, where levels are in half precision.
_BEYOND, _BEYOND_IN_HALF = 2.0**-16, 2.0**-7
_MOST = 0.25  # of the squares: three levels leave a fifth
_LEFT = 0.1  # of the error of few levels, by a factor or an offset of all
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # https://arxiv.org/abs/2310.10537
_NEAR = 16  # values that surely share a scale
# Of the errors of 16 values with one scale the fourth moment over the square of the second: 1.8 where they are even, as
# rounding leaves them, 2.65 where they are normal, as training on would; and the largest square over the mean.
_EVEN, _OUTSTANDING = 2.2, 12.0
_CHANCE = 1e-6  # that noise looks like a factor or an offset of some part of the matrix
_OF_ALL = 60.0  # over the number of values, of all of it: each error may be there twice and more, as the value is


def unlisted(expected: np.ndarray, held: np.ndarray) -> str | None:
    """In words the quantisation of `expected` that `held` is, both [n_out, n_in]; None for none."""
    if residual(expected.reshape(-1), held.reshape(-1)) ** 2 > _MOST:
        return None
    return _to_levels(expected, held) or _to_short_floats(expected, held) or _to_steps(expected, held)


def in_groups(size: int, n_in: int) -> str:
    """Groups of so many in words."""
    return f"groups of {size}" if size < n_in else "whole rows"


def _to_levels(expected: np.ndarray, held: np.ndarray) -> str | None:
    """To few levels, wherever they are: each value is the nearest of its group's to the right one; and a factor or an
    offset explains little of the error, as of a wrong scale.
    """
    if not _is_even(expected, held):
        return None
    beyond = _beyond(held)
    for size in group_sizes(expected.shape[1]):
        few = _n_levels(expected[:ROWS], held[:ROWS], size, beyond)
        if few and (n_levels := _n_levels(expected, held, size, beyond)):
            return f"a requantisation to {n_levels} levels at most in {in_groups(size, expected.shape[1])}"
    return None


def _beyond(held: np.ndarray) -> float:
    flat = held.reshape(-1)
    return _BEYOND_IN_HALF if rounded_to(flat, flat) in ("float16", "bfloat16") else _BEYOND


def _n_levels(expected: np.ndarray, held: np.ndarray, size: int, beyond: float) -> int:
    """The most levels of a group; 0 where some value is not the nearest one of its group, but for so large a part of
    what they span, or where some group has too many levels, or one alone, as what was never loaded has.
    """
    most = 0
    for right, ours in _in_groups(expected, held, size):
        order = right.argsort(-1)
        right, ours = (np.take_along_axis(x, order, -1) for x in (right, ours))
        steps, middles, differ = np.diff(ours), (ours[:, 1:] + ours[:, :-1]) / 2, np.diff(right) > 0
        slack = beyond * (ours[:, -1:] - ours[:, :1])
        nearest = (right[:, :-1] <= middles + slack) & (right[:, 1:] >= middles - slack) & (steps > 0) & differ
        levels, values = (1 + np.count_nonzero(x, axis=-1) for x in (steps, differ))
        few = (levels > 1) & (levels <= values * _LEVELS) | (values == 1)
        if not few.all() or not (nearest | (steps == 0)).all():
            return 0
        most = max(most, int(levels.max()))
    return most


def _is_even(expected: np.ndarray, held: np.ndarray) -> bool:
    """Whether most of the error is left by an offset, and by a factor: of the right values, or, where levels are means
    of what they stand for, of the levels.
    """
    along_right, along_held, offset = _shares(expected, held)
    return max(min(along_right, along_held), offset) <= _LEFT


def _shares(expected: np.ndarray, held: np.ndarray) -> tuple[float, float, float]:
    """How much of the error's square a factor of the right values is, one of those held, and an offset."""
    n, sums = expected.size, np.zeros(6)
    for cut in chunks(n):
        right, ours = (x.reshape(-1)[cut].astype(np.float64) for x in (expected, held))
        error = ours - right
        sums += right @ right, error @ right, ours @ ours, error @ ours, error.sum(), error @ error
    right_2, by_right, ours_2, by_ours, total, squares = sums.tolist()
    if not squares:
        return 1.0, 1.0, 1.0
    of_right, of_held = (
        along**2 / (of * squares) if of else 1.0 for of, along in ((right_2, by_right), (ours_2, by_ours))
    )
    return of_right, of_held, total**2 / (n * squares)


def _to_short_floats(expected: np.ndarray, held: np.ndarray) -> str | None:
    """To E2M1 with any scale of 16 or 32 values (NVFP4, MXFP4): each value is the nearest of these levels."""
    beyond = _beyond(held)
    for size in (32, 16):
        if expected.shape[1] % size == 0 and all(_are_e2m1(*of, beyond) for of in _in_groups(expected, held, size)):
            return f"a requantisation to E2M1 in {in_groups(size, expected.shape[1])}"
    return None


def _are_e2m1(right: np.ndarray, ours: np.ndarray, beyond: float) -> bool:
    """Whether each group is, the largest being any of the upper levels: a scale may be rounded up."""
    largest = np.abs(ours).max(-1, keepdims=True)
    fits = (largest == 0) & (right == 0).all(-1, keepdims=True)
    middles = (_E2M1[1:] + _E2M1[:-1]) / 2
    for level in _E2M1[-3:]:
        scale = np.where(largest > 0, largest / level, 1.0)
        places = np.searchsorted(middles, np.abs(ours) / scale)
        slack = beyond * largest
        on = np.abs(np.abs(ours) - _E2M1[places] * scale) <= slack
        low, high = (np.concatenate(x)[places] for x in (([-np.inf], middles), (middles, [np.inf])))
        size = np.abs(right)
        near = (size >= low * scale - slack) & (size <= high * scale + slack) & (ours * right >= 0)
        fits |= (on & near).all(-1, keepdims=True)
    return bool(fits.all())


def _to_steps(expected: np.ndarray, held: np.ndarray) -> str | None:
    """To steps of which nearly each value has one for itself: then the error is noise, even, and in no row, no column
    and no group a factor or an offset. Of a file whose own values are few errors have a pattern, and nothing is told.
    """
    n_out, n_in = expected.shape
    if n_in % _NEAR or not _are_even(expected, held):
        return None
    right, ours = (_without_ends(expected, x) for x in (expected, held))
    along, _, offset = _shares(right, ours)
    parts = [(right, ours, size) for size in (16, 32, 64, 128, n_in) if n_in % size == 0]
    parts.append((right.T, ours.T, n_out))
    if max(along, offset) > _OF_ALL / right.size or not all(_is_noise(*part) for part in parts):
        return None
    return "a requantisation in unknown steps"


def _without_ends(expected: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values, but 0 for the least and the largest of those that share a scale: at these a scale begins, and one with
    room beyond rounds all of them alike.
    """
    groups = expected.reshape(-1, _NEAR)
    ends = (groups == groups.min(-1, keepdims=True)) | (groups == groups.max(-1, keepdims=True))
    return np.where(ends, 0, values.reshape(-1, _NEAR)).reshape(expected.shape)


def _are_even(expected: np.ndarray, held: np.ndarray) -> bool:
    """Whether errors are even wherever one looks, and none of them outstanding."""
    moments, n = 0.0, 0
    for right, ours in _in_groups(expected, held, _NEAR):
        squares = (ours - right) ** 2
        mean = squares.mean(-1)
        is_off = mean > 0
        if (squares.max(-1) > _OUTSTANDING * mean)[is_off].any():
            return False
        moments += float(((squares**2).mean(-1)[is_off] / mean[is_off] ** 2).sum())
        n += int(np.count_nonzero(is_off))
    return 2 * n * _NEAR > expected.size and moments / n <= _EVEN


def _is_noise(expected: np.ndarray, held: np.ndarray, size: int) -> bool:
    """Whether the errors of each `size` values look like a factor or an offset by no more than chance."""
    n_groups = expected.size // size
    for right, ours in _in_groups(expected, held, size):
        error = ours - right
        squares, signal = (error**2).sum(-1), (right**2).sum(-1)
        for along, of in (((error * right).sum(-1), signal), (error.sum(-1), np.float64(size))):
            part = np.divide(along**2, squares * of, out=np.zeros_like(squares), where=squares * of > 0)
            if ((1 - part.clip(max=1)) ** (size / 2 - 1) * n_groups < _CHANCE).any():
                return False
    return True


def _in_groups(expected: np.ndarray, held: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both in float64, [groups, size], some groups at a time."""
    for cut in chunks(expected.size, size):
        yield (
            expected.reshape(-1)[cut].reshape(-1, size).astype(np.float64),
            (held.reshape(-1)[cut].reshape(-1, size).astype(np.float64)),
        )
