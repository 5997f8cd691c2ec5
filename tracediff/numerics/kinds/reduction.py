"""Sums over rows, and what is picked from them."""

import math

import torch
from torch import Tensor

from tracediff.numerics.floors import TINY, Noise
from tracediff.numerics.kinds.attention import softmax_beside
from tracediff.numerics.kinds.elementwise import repeated
from tracediff.numerics.kinds.kind import Kind, Made, exponential, none
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


def soft_max(x: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """[..., n] -> [..., n]: softmax of x * scale + mask, which repeats over the axes before its own.

    Of each head [H] of x [H, T, n] a sink is one more value, which is left out of the result.
    """
    return softmax_beside(x * scale if mask is None else x * scale + repeated(mask, x), sinks)


def argsort(x: Tensor, *, descending: bool = False) -> Tensor:
    """[..., n] -> the places of its values in order."""
    return torch.argsort(x, stable=True, dim=-1, descending=descending)


def top_k(x: Tensor, *, k: int) -> Tensor:
    """[..., n] -> [..., k]: the places of the largest, these first; where there are too few, places beyond them."""
    places = argsort(x, descending=True)[..., :k]
    beyond = torch.arange(x.shape[-1], max(k, x.shape[-1]), device=x.device).expand(*x.shape[:-1], -1)
    return torch.cat((places, beyond), -1)


def argmax(x: Tensor) -> Tensor:
    """[..., n] -> [...]: the place of the largest."""
    return x.argmax(-1)


def at_places(x: Tensor, places: Tensor) -> Tensor:
    """The values of x [..., n] at these places: of those beyond it minus infinity, NaN of what is no place at all."""
    at, is_place = as_places(places, x.shape[-1])
    beyond = (places >= x.shape[-1]) & (places == places.floor())
    return x.gather(-1, at).masked_fill(~is_place, math.nan).masked_fill(beyond, -math.inf)


def in_order(x: Tensor, places: Tensor) -> Tensor:
    """The same, largest first: who takes the largest takes them in any order."""
    return torch.sort(at_places(x, places), -1, descending=True).values


def _of_picks(made: Made) -> Noise:
    """An engine may pick before it stores what it picked from: what both are rounded by."""
    size = at_places(made.inputs[0], made.y).abs()
    return Noise(torch.zeros_like(size), 2 * made.kept * size + TINY[made.storage])


KINDS = (
    Kind("sum_rows", sum_rows, ("x",)),
    Kind("sum", total, ("x",), ("sum",)),
    Kind("mean", mean, ("x",)),
    Kind("cumsum", cumsum, ("x",)),
    exponential(Kind("soft_max", soft_max, ("x", "mask"))),
    Kind("argsort", argsort, ("ranked",), ("token", "rank"), noise=_of_picks, picks=at_places),
    Kind("top_k", top_k, ("ranked",), ("token", "rank"), noise=_of_picks, picks=in_order),
    Kind("argmax", argmax, ("x",), ("token",), noise=none),
)
