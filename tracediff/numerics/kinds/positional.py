"""What llama.cpp makes of the step's positions by itself, outside of its graph, in models of one family each."""

import math

import torch
from torch import Tensor

from tracediff.numerics.floors import UNIT, Noise
from tracediff.numerics.kinds.kind import Kind, Made, none

_FURTHEST = 128  # positions: beyond, all are in the last bucket (llama-graph.cpp, llama_relative_position_bucket)


def relative_buckets(queries: Tensor, keys: Tensor, *, n: int, causal: bool) -> Tensor:
    """[T], [S] -> [T, S]: the bucket of each distance, one each up to half of them, then by the logarithm.

    T5's (https://arxiv.org/abs/1910.10683): half of the buckets are for keys after the query, where it sees any.
    """
    away = keys[None, :] - queries[:, None]
    first, n = (0, n) if causal else ((away > 0) * (n // 2), n // 2)
    far, exact = (-away).clamp(min=0) if causal else away.abs(), n // 2
    by_logarithm = (far.clamp(min=1) / exact).float().log() * (n - exact) / math.log(_FURTHEST / exact)
    return first + torch.where(far < exact, far, (exact + by_logarithm).floor().long().clamp(max=n - 1))


def decays(positions: Tensor, *, heads: int, of: str) -> Tensor:
    """How much each head forgets, as exponents: [heads], or by tokens of the step from its first ("q", [T, heads, 1]),
    to its last ("k", the same), or from one another ("diag", [heads, T, T]; none from those after it).

    Lightning attention's (https://arxiv.org/abs/2401.04658; src/models/minimax-01.cpp, llm_graph_input_la).
    """
    start = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
    slopes = torch.tensor([start ** (head + 1) for head in range(heads)], dtype=torch.float64, device=positions.device)
    at = (positions - positions.min()).double()
    if of == "slopes":
        return slopes
    if of == "diag":
        away = at[:, None] - at[None, :]
        return (-slopes[:, None, None] * away).masked_fill(away < 0, -math.inf)
    return (-slopes * (at + 1 if of == "q" else len(at) - 1 - at)[:, None])[..., None]


def scale_by_tokens(x: Tensor, positions: Tensor, *, each: float) -> Tensor:
    """X times a number for each token of the step."""
    return x * (each * len(positions))


def _powers(made: Made) -> Noise:
    """A power of float32 for each head, of a base that is one of float32 itself: its error grows with the exponent."""
    return Noise(torch.zeros_like(made.y), made.stored + (made.op.attrs["heads"] + 4) * UNIT["f32"] * made.size)


KINDS = (
    Kind("relative_buckets", relative_buckets, ("queries", "keys"), ("token", "key"), noise=none),
    Kind("decays", decays, ("positions",), noise=_powers),
    Kind("scale_by_tokens", scale_by_tokens, ("x", "positions")),
)
