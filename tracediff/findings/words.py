"""How a number and a count are written."""

import math
from collections.abc import Iterable

from tracediff.english import count
from tracediff.names import local_name


def number(value: float | None) -> str:
    """Four digits; "-" for what there is none of."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or 0.01 <= abs(value) < 100_000:
        return f"{value:.4g}"
    return f"{value:.2e}"


def are(n: int, noun: str) -> str:
    """The count with its verb: 1 op is, 2 ops are."""
    return f"{count(n, noun)} {'is' if n == 1 else 'are'}"


def by_name(ops: Iterable[str]) -> list[str]:
    """Each op once, those of several layers as their local name "in n layers"."""
    layers: dict[str, dict[str, None]] = {}
    for op in ops:
        layers.setdefault(local_name(op), {})[op] = None
    return [f"{name} in {len(of)} layers" if len(of) > 1 else next(iter(of)) for name, of in layers.items()]
