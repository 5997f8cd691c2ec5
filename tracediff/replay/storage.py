"""In what an engine stored values before it wrote them as a longer type."""

import torch
from torch import Tensor

from tracediff.numerics.roundings import rounding_named

_LOOK = 1 << 14  # values looked at before the others: most that are longer than float16 show at once
# So many values that all fit a shorter type do not by chance: 2^-13 to the power of it for float16; 2^-29 for float32.
_MANY, _MANY_LONG = 64, 8


def stored_as(values: Tensor, dtype: str) -> str:
    """What an engine stored values in before it wrote them as a longer type: all of many fit a shorter one."""
    values = values.flatten()
    shorter = {"f64": ("bf16", "f16", "f32"), "f32": ("bf16", "f16")}.get(dtype, ())
    if shorter and int((values != 0).sum()) >= (_MANY_LONG if dtype == "f64" else _MANY):
        for name in shorter:
            if all(torch.equal(rounding_named(name)(part), part) for part in values.split(_LOOK)):
                return name
    return dtype
