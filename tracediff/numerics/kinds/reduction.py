"""Sums over rows, and what is picked from them."""

import math

import torch
from torch import Tensor

from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.elementwise import repeated
from tracediff.numerics.kinds.kind import Kind, Made, none
from tracediff.numerics.kinds.layout import as_places


def sum_rows(x: Tensor) -> Tensor:
    """[..., n] -> [..., 1]."""
    return x.sum(-1, keepdim=True)


def total(x: Tensor) -> Tensor:
    """-> [1]."""
    return x.flatten().sum(0, keepdim=True)


def mean(x: Tensor) -> Tensor:
    """[..., n] -> [..., 1]."""
    return x.mean(-1, keepdim=True)


def cumsum(x: Tensor) -> Tensor:
    """[..., n] -> the sums of the first 1 to n."""
    return x.cumsum(-1)


def soft_max(x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """[..., n] -> [..., n]: softmax of x * scale + mask, which repeats over the axes before its own."""
    scaled = x * scale
    return torch.softmax(scaled if mask is None else scaled + repeated(mask, x), -1)


def argsort(x: Tensor, *, descending: bool = False) -> Tensor:
    """[..., n] -> the places of its values in order."""
    return torch.argsort(x, stable=True, dim=-1, descending=descending)


def top_k(x: Tensor, *, k: int) -> Tensor:
    """[..., n] -> [..., k]: the places of the largest, these first."""
    return argsort(x, descending=True)[..., :k]


def argmax(x: Tensor) -> Tensor:
    """[..., n] -> [...]: the place of the largest."""
    return x.argmax(-1)


def at_places(x: Tensor, places: Tensor) -> Tensor:
    """The values of x [..., n] at these places; NaN for what is no place in it."""
    at, is_place = as_places(places, x.shape[-1])
    return x.gather(-1, at).masked_fill(~is_place, math.nan)


def in_order(x: Tensor, places: Tensor) -> Tensor:
    """The same, largest first: who takes the largest takes them in any order."""
    return torch.sort(at_places(x, places), -1, descending=True).values


def _of_picks(made: Made) -> Noise:
    """An engine may pick before it stores what it picked from: what both are rounded by."""
    size = at_places(made.inputs[0], made.y).abs()
    return Noise(torch.zeros_like(size), 2 * made.kept * size)


KINDS = (
    Kind("sum_rows", sum_rows, ("x",)),
    Kind("sum", total, ("x",), ("sum",)),
    Kind("mean", mean, ("x",)),
    Kind("cumsum", cumsum, ("x",)),
    Kind("soft_max", soft_max, ("x", "mask")),
    Kind("argsort", argsort, ("ranked",), ("token", "rank"), noise=_of_picks, picks=at_places),
    Kind("top_k", top_k, ("ranked",), ("token", "rank"), noise=_of_picks, picks=in_order),
    Kind("argmax", argmax, ("x",), ("token",), noise=none),
)
