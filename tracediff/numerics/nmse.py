"""How far two tensors are apart."""

import math

from torch import Tensor


def nmse(a: Tensor, b: Tensor) -> float:
    """Of `a` against `b`; infinite where that is zero, NaN where they are not finite alike."""
    signal = float(b.square().sum())
    return float((a - b).square().sum()) / signal if signal else math.inf
