"""Where along its axes an output is off: the largest error for its bound of each token, head, channel."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tracediff.result import Strip

_BINS = 64  # of a strip: more are not told apart in a picture
Along = tuple[Tensor, ...]  # of each axis the largest of each of its places


def along(excess: Tensor) -> Along:
    """Of errors in units of their bounds."""
    if excess.ndim < 2:
        return (excess,)
    axes = range(excess.ndim)
    return tuple(excess.amax([other for other in axes if other != axis]) for axis in axes)


def nothing(shape: Sequence[int]) -> Along:
    """Of an output that is nowhere off."""
    return tuple(torch.zeros(n, dtype=torch.float64) for n in shape)


def joined(a: Along, b: Along) -> Along:
    """Of two parts of an output, the second of which has the channels that follow."""
    return a and (*(torch.maximum(x, y) for x, y in zip(a[:-1], b[:-1], strict=True)), torch.cat((a[-1], b[-1])))


def strips(found: Along, names: Sequence[str], heads: int | None) -> tuple[Strip, ...]:
    """Of each axis that has more than one place; channels side by side of so many `heads` also by head."""
    named = list(zip(names, found, strict=True))
    if heads and len(found) == 2 and len(found[1]) % heads == 0:
        named.insert(1, ("head", found[1].reshape(heads, -1).amax(1)))
    return tuple(_strip(name, values) for name, values in named if len(values) > 1)


def _strip(name: str, values: Tensor) -> Strip:
    width = math.ceil(len(values) / _BINS)
    largest = np.maximum.reduceat(values.cpu().numpy(), np.arange(0, len(values), width))
    return Strip(name, width, tuple(math.inf if math.isnan(x) else float(f"{x:.3g}") for x in largest.tolist()))
