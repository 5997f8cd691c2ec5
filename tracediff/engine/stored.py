"""K of a layer as it goes into the cache: what attention reads has come out of it again, rounded or misplaced."""

from collections.abc import Callable

import torch
from torch import Tensor

from tracediff.engine.recorder import DTYPES

_TYPES = frozenset(DTYPES.values())  # of values in a trace
# Rotated keys keep their lengths, but for what half precision rounds: 2^-8 at most, where cosines and sines are
# bfloat16. Those of V differ from K's by a tenth: heads are at least 16 channels wide.
_LENGTHS = 0.01


class StoredKeys:
    """What a layer stores that may be its keys: as many values, of `n_values` tokens, padding included, in heads."""

    def __init__(self, n_values: int = 0, heads: int = 0, dim: int = 0) -> None:
        self._n_values, self._heads, self._dim = n_values, heads, dim
        self._stored: list[Tensor] = []
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}  # by what came out, which is kept: an id is of what lives

    def cast(self, source: Tensor, result: Tensor) -> None:
        """A value in another type: the cache's, or that which keys are made of."""
        if self._fits(source):
            self._casts[id(result)] = result, source

    def store(self, values: Tensor) -> None:
        """A value is written into another, or joined to one."""
        if self._fits(values):
            self._stored.append(values)

    def _fits(self, x: Tensor) -> bool:
        return x.is_floating_point() and x.numel() == self._n_values * self._heads * self._dim > 0

    def rotated(
        self, source: Tensor, magnitude: float, in_order: Callable[[Tensor], Tensor], at_start: bool
    ) -> Tensor | None:
        """Of what was stored the keys that rope makes of `source` [.., heads, D], [n_values, heads, D]; `in_order` puts
        channels in the file's order. None where nothing is: keys are not stored by a torch function, or not rotated,
        as they need not be `at_start`, where all positions are 0.
        """
        if not self._fits(source):
            return None
        dtype, source = source.dtype, source.detach().reshape(-1, self._heads, self._dim)
        lengths, best, nearest = _lengths(source) * magnitude, None, _LENGTHS
        for stored in self._stored:
            before = self._casts.get(id(stored), (stored, stored))[1]
            stored = before if before.dtype == dtype or stored.dtype not in _TYPES else stored
            if stored.dtype not in _TYPES:
                continue
            keys = in_order(self._tokens_first(stored))
            apart = float((_lengths(keys) - lengths).norm() / lengths.norm())
            if apart < nearest and (at_start or not torch.equal(keys.to(source), source)):
                best, nearest = keys, apart
        return best

    def _tokens_first(self, stored: Tensor) -> Tensor:
        """[.., heads, T, D] or [.., T, heads, D] as the latter; where they are as many the strides tell."""
        x = stored.detach()
        heads_first = x.ndim > 2 and x.shape[-3] == self._heads and x.shape[-1] == self._dim
        if heads_first and (x.shape[-2] != self._heads or x.stride(-3) < x.stride(-2)):
            x = x.transpose(-3, -2)
        return x.reshape(-1, self._heads, self._dim)


def _lengths(x: Tensor) -> Tensor:
    """Of each head of each token."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
