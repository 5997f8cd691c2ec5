"""Sums and activations, element by element."""

import torch
from torch import Tensor

from tracediff.numerics.floors import TINY, Noise
from tracediff.numerics.kinds.kind import Kind, Made, wide


def add(a: Tensor, b: Tensor) -> Tensor:
    """A + b."""
    return a + b


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (https://arxiv.org/abs/2002.05202)."""
    return (torch.nn.functional.silu(wide(gate)) * wide(up)).to(gate.dtype)


def _gated(made: Made) -> Noise:
    """Of exp(-gate) the share sigmoid(-gate) reaches gate / (1 + exp(-gate)) * up."""
    gate, up = (wide(x) for x in made.inputs)
    unit, share = made.unit, torch.sigmoid(-gate)
    # Three operations; exp is good to 2 units, and to |gate| more where its argument is scaled first (ex2).
    sigma = unit * made.size * torch.sqrt((3 + (4 + gate.square()) * share.square()) / 3)
    # Another activation may subtract: 1 + erf(x) has the error of 1 (of a few units) where it is all but 0.
    cancelled = 8 * unit if made.op.function else 0.0
    # 1 / (1 + exp(88.8)) is 0 where exp overflows, though it should be a denormal.
    lost = gate.abs() * up.abs() * (cancelled + TINY["f64" if made.storage == "f64" else "f32"])
    return Noise(sigma, made.stored + lost)


KINDS = (
    Kind("add", add, ("a", "b")),
    Kind("swiglu", swiglu, ("gate", "up"), noise=_gated),
)
