"""Pairs of rope that turn at other rates than they should, as where frequencies are scaled for a longer context, or are
not. What each pair is turned by tells its rate.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, starmap

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.edit import Solved
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.english import ranges
from tracediff.model.graph import Op
from tracediff.model.hparams import Rope
from tracediff.numerics.evaluate import evaluate
from tracediff.numerics.kinds.rope import pairs_of, rope, rope_angles

_LOOK = "how rope's frequencies are made: the scaling that the file's metadata says, and rope_freqs.weight"
_OTHERS = "which pair the exponent of each pair's frequency is made of: 2 i / n_rot of pair i"
_BOUND = "the bound of the loop over pairs, and how many channels of a head are rotated"
_BITS, _NUMBER = 8.0, 12.0
_ANGLE = 1e-7  # of a pair, in radians: what float32 makes of it in a few tokens and heads
_RATE = 1e-6  # of a share: what frequencies in float32 are off by
_MAYBE = 4.0  # times as far from 1 a rate may be the right one
_NEARLY = 0.05  # of a rate: what is off by less is told by how much
_SEVERAL = 3  # pairs
_RUNS = 3  # of pairs that turn alike: more are told by the first and the last
_WORDS = re.compile(
    r"(?:pairs (\d+) to (\d+)|pair (\d+)) (?:turns? ([\d.e+-]+) times as fast as (?:they|it) should|do(?:es)? not turn)"
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Angles of pairs of which each turns so many times as fast as it should: in the place of `rope_angles`."""

    times: tuple[float, ...]

    def __call__(self, positions: Tensor, factors: Tensor | None, right: Rope) -> Tensor:
        """Float64, [T, n_rot / 2]."""
        angles = rope_angles(positions, factors, right)
        return angles * torch.tensor(self.times, dtype=angles.dtype, device=angles.device)


def variants(problem: Problem) -> Iterator[Solved]:
    """The rates that give what was recorded, where tokens that follow one another tell them."""
    op = problem.op
    if op.kind != "rope" or op.function or not np.isfinite(problem.recorded).all():
        return
    shape = problem.loops.own.shape
    x, positions = problem.array("x"), problem.array("positions")
    right = op.attrs["rope"]
    factors = problem.weights.load(op.weights[0], torch.float64) if op.weights else None
    of_one = rope_angles(torch.ones(1), factors, right)[0].numpy()
    turned = _turned(x, problem.recorded.reshape(shape), right)
    rates = _rates(turned, positions)
    if rates is None:
        return
    coarse = np.median(problem.bound / np.maximum(np.abs(problem.recorded), 1e-30)) / np.sqrt(turned.size)
    reach = np.abs(positions).max()
    within = _RATE + max(_ANGLE, coarse) / np.maximum(of_one * reach, 1e-30)
    times = _alike(rates / of_one, within)
    changed = turning(op, times)
    given = [torch.from_numpy(x), torch.from_numpy(positions)]
    y = evaluate(changed, given, problem.weights, problem.arithmetic).double().numpy().ravel()
    n = len(_runs(times))
    if n and agree(problem.recorded, y, problem.near).all():
        others = _as_others(np.array(times), of_one, within)
        look = _OTHERS if others else _LOOK if min(times) else _BOUND
        yield Solved((changed,), others or words(times), _BITS + _NUMBER * n, look, fitted=True)


def _as_others(times: np.ndarray, of_one: np.ndarray, within: np.ndarray) -> str:
    """Which pairs turn as others should, those of several rates where all do and their rates are told from one another;
    empty where that is not so.
    """
    off = np.flatnonzero(times != 1)
    rates = times[off] * of_one[off]
    nearest = np.abs(rates[:, None] - of_one).argmin(1)
    apart = np.abs(1 - of_one[1:] / of_one[:-1]).min(initial=1.0)
    are_told = (within[off] < apart / 4) & (np.abs(rates / of_one[nearest] - 1) <= 2 * within[off])
    if len(off) < _SEVERAL or not are_told.all():
        return ""
    return f"pairs {ranges(off.tolist())} turn as pairs {ranges(nearest.tolist())} should"


def turning(op: Op, times: Sequence[float]) -> Op:
    """The op with these rates, as shares of the right ones."""
    return replace(op, function=partial(rope, angles=Rates(tuple(times))))


def planted(problem: Problem, said: str) -> Iterator[Op]:
    """The op of which these words are said."""
    found = [*_WORDS.finditer(said)]
    if problem.op.kind != "rope" or not found:
        return
    times = [1.0] * (problem.op.attrs["rope"].n_rot // 2)
    for one in found:
        first, last = int(one[1] or one[3]), int(one[2] or one[3])
        times[first : last + 1] = [float(one[4] or 0)] * (last + 1 - first)
    if words(times) == said:
        yield turning(problem.op, times)


def words(times: Sequence[float]) -> str:
    """As a sentence."""
    runs = _runs(times)
    if len(runs) > _RUNS:
        (first, _, a), (_, last, b) = runs[0], runs[-1]
        most = max(abs(rate - 1) for _, _, rate in runs)
        if most < _NEARLY:
            return (
                f"pairs {first} to {last} turn too fast or too slowly by up to {most:.2g} of it, each at its own rate"
            )
        off = [i for i, rate in enumerate(times) if rate != 1]
        about = " to ".join(dict.fromkeys((f"{a:.2g}", f"{b:.2g}")))
        return f"pairs {ranges(off)} turn about {about} times as fast as they should, each at its own rate"
    return ", ".join(starmap(_run_said, runs))


def _run_said(first: int, last: int, rate: float) -> str:
    if first == last:
        return f"pair {first} turns {rate:.6g} times as fast as it should" if rate else f"pair {first} does not turn"
    pairs = f"pairs {first} to {last}"
    return f"{pairs} turn {rate:.6g} times as fast as they should" if rate else f"{pairs} do not turn"


def _runs(times: Sequence[float]) -> list[tuple[int, int, float]]:
    """First and last pair of those that turn alike, and how many times as fast as they should."""
    runs = [(rate, [i for i, _ in alike]) for rate, alike in groupby(enumerate(times), key=lambda one: one[1])]
    return [(places[0], places[-1], rate) for rate, places in runs if rate != 1]


def _turned(x: np.ndarray, y: np.ndarray, right: Rope) -> np.ndarray:
    """What each pair of each token is turned and scaled by, the best for all heads: complex [T, n_rot / 2]."""

    def pairs(values: np.ndarray) -> np.ndarray:
        a, b = pairs_of(torch.from_numpy(values[..., right.first : right.first + right.n_rot]), right)
        return a.numpy() + 1j * b.numpy()

    before, after = pairs(x), pairs(y)
    size = np.square(np.abs(before)).sum(1)
    return np.divide((after * before.conj()).sum(1), size, out=np.ones_like(size, complex), where=size > 0)


def _rates(turned: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
    """The angle of each pair at position 1, [n_rot / 2]; None where no two tokens follow one another.

    From these to farther ones, where a full turn more or less would not be seen: each step tells the next one's turns.
    """
    (follows,) = np.nonzero(np.diff(positions) == 1)
    if not len(follows):
        return None
    rates = np.angle((turned[follows + 1] * turned[follows].conj()).sum(0))
    reach = 2.0
    while True:
        near = np.abs(positions) <= reach
        p = positions[near, None]
        left = np.angle(turned[near] * np.exp(-1j * p * rates))
        rates = rates + (p * left).sum(0) / max(1.0, float(np.square(p).sum()))
        if near.all():
            return rates
        reach *= 2


def _alike(times: np.ndarray, within: np.ndarray) -> list[float]:
    """Neighbours that turn alike as far as can be told have one number, the roundest; 1 where that may be."""
    found, at = list[float](), 0
    is_right = np.abs(times - 1) <= _MAYBE * within
    while at < len(times):
        low, high, end = times[at] - within[at], times[at] + within[at], at + 1
        while end < len(times) and is_right[end] == is_right[at]:
            below, above = max(low, times[end] - within[end]), min(high, times[end] + within[end])
            if below > above and not is_right[at]:
                break
            low, high, end = below, above, end + 1
        short = (float(f"{(low + high) / 2:.{digits}g}") for digits in range(1, 8))
        one = 1.0 if is_right[at] else next((one for one in short if low <= one <= high), float(low + high) / 2)
        found += [one] * (end - at)
        at = end
    return found
