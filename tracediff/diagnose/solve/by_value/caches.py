"""Caches of layers that overlap: each begins so few values after that of the layer before that layers read in part what
others have cached last.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.rearranged import Reread
from tracediff.diagnose.solve.edit import BROUGHT, Read, Solved
from tracediff.diagnose.solve.look import spread
from tracediff.diagnose.solve.loops.arrays import Flat
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.english import count
from tracediff.model.graph import Op
from tracediff.names import split

_LOOK = "where each layer's K and V begin in the cache"
_ONE_BY_ONE = 4096  # values: so far any distance is tried, beyond it multiples of four, as allocators have them
_ALIGNED = 4
_PLACES = 4  # of the output, which a distance must give
_AT_A_TIME = 1 << 22  # values


@dataclass(frozen=True, slots=True)
class Overlapping(Reread):
    """Computes an op whose cache overlaps those of other `layers`: `Op.rework`.

    After the op's own two inputs come theirs, of all positions, and in which position's step each was cached.
    """

    layer: int
    layers: tuple[int, ...]
    apart: int

    def right(self, op: Op) -> Op:
        """Without the caches of other layers."""
        return replace(op.reading_only(2), rework=None)

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The op's own two inputs, the cache as it overlaps others."""
        left, own, *others, starts = inputs
        caches = {layer: x.flatten() for layer, x in zip(self.layers, others, strict=True)}
        at = torch.arange(own.numel(), device=own.device)
        held = _held(at, self.apart, self.layer, {**caches, self.layer: own.flatten()}, starts.long().flatten())
        return [left, held.reshape(own.shape)]


def _held(at: Tensor, apart: Tensor | int, layer: int, caches: Mapping[int, Tensor], starts: Tensor) -> Tensor:
    """What lies at these places of a layer's cache, where each layer's begins `apart` values after that of the layer
    before: what was written last. `starts` is where the step of each position began, long [P].
    """
    own = caches[layer]
    width, n_layers = own.numel() // len(starts), max(caches) + 1
    held, latest = own[at], starts[at // width] * n_layers + layer
    for other in sorted(caches.keys() - {layer}):
        cached = caches[other]
        there = at + (layer - other) * apart
        # A later layer has not cached its values of this step yet.
        inside = (there >= 0) & (there < (len(starts) if other < layer else int(starts[-1])) * width)
        there = there.clamp(0, cached.numel() - 1)
        written = starts[there // width] * n_layers + other
        later = inside & (written > latest)
        held, latest = torch.where(later, cached[there], held), torch.where(later, written, latest)
    return held


def variants(problem: Problem) -> Iterator[Solved]:
    """Distances between the caches of layers that give what was recorded of an op that reads its own."""
    op = problem.op
    layer, local = split(op.inputs[1]) if op.kind in ("scores", "weighted_values") else (None, "")
    starts = problem.held(BROUGHT["starts"])
    if layer is None or starts is None or not starts[-1]:
        return
    reads = {other: Read(f"blk.{other}.{local}", "all") for other in range(problem.graph.hparams.n_layer)}
    caches = {other: values for other, read in reads.items() if (values := problem.held(read)) is not None}
    own = caches.get(layer)
    if own is None or len(caches) < 2 or any(values.size != own.size for values in caches.values()):
        return
    layers = tuple(other for other in caches if other != layer)
    reading = op.also_reading(*((reads[other].name, reads[other].past) for other in layers), ("past", True))
    name = problem.loops.own.inputs[1]
    rounded = {other: problem.loops.rounded(name, Flat(values)) for other, values in caches.items()}
    flats = {other: torch.from_numpy(array.take(np.arange(array.size))) for other, array in rounded.items()}
    for apart in _distances(problem, layer, flats, torch.from_numpy(starts).long()):
        words = (
            f"each layer's cached {local} begins {count(apart, 'value')} after that of the layer before: they overlap"
        )
        changed = replace(reading, rework=Overlapping(layer, layers, apart))
        yield Solved((changed,), words, 2.0 + math.log2(own.size), _LOOK)


def _distances(problem: Problem, layer: int, caches: Mapping[int, Tensor], starts: Tensor) -> list[int]:
    """Those that give what was recorded in a few wrong places."""
    size = caches[layer].numel()  # layers before have cached their values of this step, too
    left = np.r_[1 : min(size, _ONE_BY_ONE), _ONE_BY_ONE : max(size, _ONE_BY_ONE) : _ALIGNED]
    for place in spread(np.flatnonzero(problem.wrong), _PLACES):
        at, factors = _terms(problem, int(place))
        n = max(1, _AT_A_TIME // len(at))
        blocks = [torch.from_numpy(left[i : i + n])[:, None] for i in range(0, len(left), n)]
        made = [(_held(at, apart, layer, caches, starts) @ factors).numpy() for apart in blocks]
        given = np.concatenate(made or [np.zeros(0)])
        left = left[agree(given, problem.recorded[place], problem.near[place])]
    return [int(apart) for apart in left]


def _terms(problem: Problem, place: int) -> tuple[Tensor, Tensor]:
    """Which values of the cache an output is the sum of, long [n], and what each is multiplied with, float64 [n]."""
    h, t, s, g, d = (int(problem.loops.numbers[name]) for name in "HTSGD")
    factors = torch.from_numpy(problem.array(problem.loops.own.inputs[0]))
    if problem.op.kind == "scores":
        head, token, key = map(int, np.unravel_index(place, (h, t, s)))
        return (key * g + head // (h // g)) * d + torch.arange(d), factors[token, head]
    token, head, channel = map(int, np.unravel_index(place, (t, h, d)))
    return (torch.arange(s) * g + head // (h // g)) * d + channel, factors[head, token]
