"""The two orders of a head's channels: rope turns pairs of neighbours (2i, 2i + 1) or of halves (i, i + n/2)."""

import math
from typing import Any


def neighbours(x: Any, head_dim: int, axis: int = -1, inverse: bool = False) -> Any:
    """A numpy array or tensor whose heads of `head_dim` along `axis` are put from halves to neighbours, or back.

    convert_hf_to_gguf.py (LlamaModel.permute) does so with the rows of Q and K. Raises ValueError where the axis is
    no multiple of heads.
    """
    inner = math.prod(x.shape[axis:][1:])
    halves = (-1, head_dim // 2, 2, inner) if inverse else (-1, 2, head_dim // 2, inner)
    if x.shape[axis] % head_dim or head_dim % 2:
        raise ValueError(f"an axis of {x.shape[axis]} is no heads of {head_dim} channels in pairs")
    return x.reshape(halves).swapaxes(1, 2).reshape(x.shape)
