"""Raw log-probabilities told from processed ones: temperature, top-k, top-p and min-p are solved for.

A sampler divides the logits by a temperature and keeps the likeliest tokens, whose probabilities it renormalises. So
what it says of a token exceeds log softmax(logits / T) by minus the logarithm of the mass that it kept. Of a right T
that mass is, at every position, a sum of the largest probabilities; how many tells the rule: always k (top-k), the
first that reach p (top-p, https://arxiv.org/abs/1904.09751), or all that have a share of the largest (min-p).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from tracediff.compare.logits import log_softmax

_TEMPERATURES = np.round(np.arange(0.05, 2.0001, 0.05), 2).tolist()  # that people set
_TOP_KS = (10, 20, 30, 40, 50, 64, 100)
_TRIED = 3  # temperatures that rules of truncation are sought for
_WHOLE, _LEAST = 1e-3, 1e-5  # a kept mass nearer to 1, or a last token of less, does not tell how many were kept
_WITHOUT_CHANCE = np.errstate(divide="ignore", invalid="ignore", over="ignore")  # tokens whose probability is 0
_ALIKE = 1.5  # what leaves so many times the least leaves about as little


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a sampler does to logits; `mean_abs` is what it leaves of the gap.

    vLLM and transformers apply the temperature first, llama.cpp last: then truncation looks at the raw probabilities.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    temperature_first: bool = True
    mean_abs: float = math.inf

    @property
    def n_set(self) -> int:
        """How many of its numbers are not neutral."""
        return (self.temperature != 1) + sum(x is not None for x in (self.top_k, self.top_p, self.min_p))


class Sampled:
    """Raw `logits` [N, n_vocab] beside the log-probabilities [N] that another side gives the `tokens` [N]."""

    def __init__(self, logits: np.ndarray, tokens: np.ndarray, said: np.ndarray) -> None:
        self._said = said
        self._ranks = (logits > np.take_along_axis(logits, tokens[:, None], 1)).sum(1)  # how many are likelier
        self._sorted = -np.sort(-logits.astype(np.float64), 1)

    @_WITHOUT_CHANCE
    def solved(self) -> Sampling:
        """What leaves least of the gap; of what leaves about the same, that of fewest numbers."""
        tried = [*self._candidates()]
        least = min(one.mean_abs for one in tried)
        near = [one for one in tried if one.mean_abs <= _ALIKE * least + 1e-12]
        return min(near, key=lambda one: (one.n_set, not one.temperature_first, one.mean_abs))

    @_WITHOUT_CHANCE
    def under(self, sampling: Sampling) -> Sampling:
        """The same with what it leaves."""
        p = self._log_p(sampling.temperature)
        told = _at(p, self._ranks) - np.log(_at(np.exp(p).cumsum(1), self._n_kept(sampling) - 1))
        left = float(np.abs(self._said - told).mean())
        return replace(sampling, mean_abs=math.inf if math.isnan(left) else left)

    def _candidates(self) -> Iterator[Sampling]:
        alone = [self.under(Sampling(t)) for t in _TEMPERATURES]
        yield from alone
        fitted = self._refined(min(alone, key=lambda one: one.mean_abs).temperature)
        yield self.under(Sampling(fitted))
        yield self.under(Sampling(round(fitted, 2) or fitted))
        for t in sorted(_TEMPERATURES, key=self._off)[:_TRIED]:
            yield from self._truncated(t)

    def _off(self, t: float) -> float:
        """How far the masses that must have been kept at this temperature lie from sums of the largest probabilities.

        Of a temperature at which some tokens would have more than the whole mass, infinitely far.
        """
        kept, mass, n = self._kept(t)
        off = np.abs(np.log(kept / _at(mass, n - 1)))
        return float(np.median(off)) if (kept < 1 + _WHOLE).all() else math.inf  # of NaN too

    def _kept(self, t: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The masses [N] that must have been kept at a temperature, sums of the largest, and how many are nearest."""
        p = np.exp(self._log_p(t))
        mass = p.cumsum(1)
        kept = _at(p, self._ranks) / np.exp(self._said)
        return kept, mass, 1 + np.maximum(np.abs(mass - kept[:, None]).argmin(1), self._ranks)

    def _refined(self, near: float) -> float:
        """The temperature near this one that leaves least without truncation."""
        low, high = (0.02, 0.1) if near == _TEMPERATURES[0] else (near - 0.05, near + 0.05)
        high = 10.0 if near == _TEMPERATURES[-1] else high
        for _ in range(6):
            grid = np.linspace(low, high, 9)
            at = int(np.argmin([self.under(Sampling(float(t))).mean_abs for t in grid]))
            low, high = grid[max(at - 1, 0)], grid[min(at + 1, 8)]
        return float((low + high) / 2)

    def _truncated(self, t: float) -> Iterator[Sampling]:
        """What rules would keep the masses that were kept, were the temperature t."""
        kept, mass, n = self._kept(t)
        p = np.diff(mass, axis=1, prepend=0.0)
        sure = (kept < 1 - _WHOLE) & (_at(p, n - 1) > _LEAST)
        if not sure.any():
            return
        most = int(n[sure].max())
        yield from (self.under(Sampling(t, top_k=k)) for k in {most, int(np.median(n[sure]))})
        for first, top_k in product((True, False), (None, most, *(k for k in _TOP_KS if k > most))):
            looked_at = p if first else np.exp(self._log_p(1.0))
            looked_at = looked_at / looked_at[:, :top_k].sum(1, keepdims=True)
            free = sure & (n < (top_k or math.inf))
            for rule in _rules(looked_at[free], n[free]) if free.any() else ():
                yield self.under(Sampling(t, top_k, temperature_first=first or t == 1, **rule))

    def _n_kept(self, sampling: Sampling) -> np.ndarray:
        """[N]: how many of the likeliest tokens the rules keep."""
        p = np.exp(self._log_p(sampling.temperature if sampling.temperature_first else 1.0))
        n = np.full(len(p), p.shape[1])
        if sampling.top_k:
            n = np.minimum(n, sampling.top_k)
            p = p / p[:, : sampling.top_k].sum(1, keepdims=True)
        if sampling.top_p:
            n = np.minimum(n, 1 + (p.cumsum(1) < sampling.top_p).sum(1))
        if sampling.min_p:
            n = np.minimum(n, (p >= sampling.min_p * p[:, :1]).sum(1))
        return n

    def _log_p(self, t: float) -> np.ndarray:
        """[N, n_vocab] at a temperature, largest first."""
        return log_softmax(self._sorted / t)


def _at(x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, columns[:, None], 1)[:, 0]


def _rules(p: np.ndarray, n: np.ndarray) -> Iterator[dict[str, Any]]:
    """Values of top-p and of min-p that keep n of these probabilities [N, n_vocab], or nearly.

    Everywhere where the numbers are exact. Of noisy ones n is off by some, so what people set near them is tried too.
    """
    mass, most = p.cumsum(1), p.shape[1]
    before = np.where(n > 1, _at(mass, np.maximum(n - 2, 0)), 0.0)
    after = np.where(n < most, _at(p, np.minimum(n, most - 1)), 0.0)
    limits = {
        "top_p": (before, _at(mass, n - 1)),
        "min_p": (after / p[:, 0], _at(p, n - 1) / p[:, 0]),
    }
    for name, (low, high) in limits.items():
        yield from ({name: value} for value in {*_between(low.max(), high.min()), *_near(np.median((low + high) / 2))})


def _between(low: float, high: float) -> Iterator[float]:
    """The number of fewest digits above `low` and not above `high`."""
    for unit in (10, 100, 1000, 10_000):
        value = math.floor(low * unit + 1) / unit
        if low < value <= high:
            yield value
            return


def _near(value: float) -> Iterator[float]:
    yield from (round(float(value), digits) for digits in (1, 2) if 0 < round(value, digits) < 1)
