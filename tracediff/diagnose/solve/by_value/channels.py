"""Channels of an input that are read elsewhere, where the output does not tell each of them: by a map of any number, or
two that are exchanged. A few values that are wrong tell which.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tracediff.diagnose.solve.by_value.maps import Map, by_any_number
from tracediff.diagnose.solve.look import spread
from tracediff.diagnose.solve.problem import Problem

_PLACES = 1e7  # channels squared: of more there is none that is tried
_FEW = 2, 12  # tokens, and values of each, that tell
_GLANCE = 3  # sums of products
_AT_ONCE = 64  # maps that are tried together


def maps_of(problem: Problem, values: np.ndarray) -> Iterator[Map]:
    """Maps of the channels of an input, [T, n] or of keys [S, G, D], that give a few of the values that are wrong."""
    if values.shape[-1] ** 2 > _PLACES:
        return
    with np.errstate(invalid="ignore"):
        match problem.op.kind:
            case "linear":
                yield from _of_matmul(problem, values).maps()
            case "scores":
                yield from _of_scores(problem, values).maps()
            case "rms_norm":
                yield from _fitting(values.shape[-1], _of_norm(problem, values))


@dataclass(frozen=True, slots=True)
class _Products:
    """Some sums of products: what is read elsewhere and what it is multiplied with, [sums, n]; what is left of each
    sum, and how near that must come to 0.
    """

    read: np.ndarray
    by: np.ndarray
    left: np.ndarray
    near: np.ndarray

    def maps(self) -> Iterator[Map]:
        """Those that leave nothing."""
        yield from _fitting(self.read.shape[1], self._fits)
        yield from self._exchanges()

    def _fits(self, sources: np.ndarray) -> np.ndarray:
        """A few of the sums are asked first: most maps give none of them."""
        fits = np.ones(len(sources), bool)
        read = np.concatenate([self.read, np.zeros((len(self.read), 1))], 1)  # what is from nowhere is 0
        for some in (slice(_GLANCE), slice(_GLANCE, None)):
            moved = read[some][:, sources[fits]] - self.read[some, None]
            left = np.einsum("smn,sn->sm", moved, self.by[some]) - self.left[some, None]
            fits[fits] = (np.abs(left) <= self.near[some, None]).all(0)
        return fits

    def _exchanges(self) -> Iterator[Map]:
        """Of two channels: it moves a sum by the product of what the two differ by in both factors."""
        one, other = np.triu_indices(self.read.shape[1], 1)
        for read, by, left, near in zip(self.read, self.by, self.left, self.near, strict=True):
            moved = (read[other] - read[one]) * (by[one] - by[other])
            fits = np.abs(moved - left) <= near
            one, other = one[fits], other[fits]
        if len(one) == 1:
            yield Map("listed", (int(one[0]), int(other[0]), int(other[0]), int(one[0])))


def _fitting(n: int, fits: Callable[[np.ndarray], np.ndarray]) -> Iterator[Map]:
    """Maps of `n` channels by any number of which it is said, by their sources [maps, n], that they fit."""
    maps = by_any_number(n)
    while tried := [*islice(maps, _AT_ONCE)]:
        fit = fits(np.stack([how.of(n) for how in tried]))
        yield from (how for how, is_it in zip(tried, fit, strict=True) if is_it)


def _of_matmul(problem: Problem, values: np.ndarray) -> _Products:
    """Some outputs of some tokens, [T, n_out]."""
    n, (tokens, at) = values.shape[1], _wrong(problem, len(values))
    w = problem.loops.arrays["w"].take((at[:, None] * n + np.arange(n)).ravel()).reshape(len(at), n)
    places = tokens[:, None] * (problem.wrong.size // len(values)) + at
    return _products(problem, values[tokens].repeat(len(at), 0), np.tile(w, (len(tokens), 1)), places.ravel())


def _of_scores(problem: Problem, keys: np.ndarray) -> _Products:
    """Some scores [H, T, S] of queries [T, H, D] and keys [S, G, D]."""
    q = problem.array("q")
    n_queries, n_heads, _ = q.shape
    places = spread(np.flatnonzero(problem.wrong), _FEW[0] * _FEW[1])
    head, query, key = np.unravel_index(places, (n_heads, n_queries, problem.wrong.size // (n_heads * n_queries)))
    return _products(problem, keys[key, head * keys.shape[1] // n_heads], q[query, head], places)


def _products(problem: Problem, read: np.ndarray, by: np.ndarray, places: np.ndarray) -> _Products:
    return _Products(read, by, (problem.recorded - problem.exact)[places], problem.near[places])


def _of_norm(problem: Problem, values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Whether maps give some channels of some rows [T, n], each divided by its own root of the mean square."""
    tokens, at = _wrong(problem, len(values))
    few = np.ix_(tokens, at)
    recorded, exact, near = (x.reshape(len(values), -1)[few] for x in (problem.recorded, problem.exact, problem.near))
    eps, x = problem.op.attrs["eps"], np.concatenate([values[tokens], np.zeros((len(tokens), 1))], 1)
    with np.errstate(all="ignore"):
        scaled = exact / values[few] * np.sqrt(np.square(values[tokens]).mean(1) + eps)[:, None]

    def fits(sources: np.ndarray) -> np.ndarray:
        moved = x[:, sources]  # rows, maps, n
        with np.errstate(all="ignore"):
            made = moved[..., at] * scaled[:, None] / np.sqrt(np.square(moved).mean(2) + eps)[..., None]
            fit: np.ndarray = (np.abs(made - recorded[:, None]) <= near[:, None]).all((0, 2))
        return fit

    return fits


def _wrong(problem: Problem, n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Some tokens of which values are wrong, the last, and some channels that are wrong in these."""
    wrong = problem.wrong.reshape(n_tokens, -1)
    tokens = np.flatnonzero(wrong.any(1))[-_FEW[0] :]
    return tokens, spread(np.flatnonzero(wrong[tokens].any(0)), _FEW[1])
