"""An op's mathematics as loops over flat arrays, which are text."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loops:
    """The source, the names in it of the op's inputs and weights in their order, its numbers, and the output's shape.
    `block` is a loop variable of which so many values are computed at a time.
    """

    source: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    numbers: Mapping[str, float]
    shape: tuple[int, ...]
    block: tuple[str, int] | None = None
