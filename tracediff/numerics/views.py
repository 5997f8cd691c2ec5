"""Values as ops see them: through views, and states as the step before left them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tracediff.model.graph import Op, View, sizes


def seen(view: View, n_tokens: int, n_positions: int, value: Tensor) -> Tensor:
    """The value through a view, for T and S."""
    (offset,) = sizes((view.offset,), n_tokens, n_positions)
    shape, strides = (sizes(axes, n_tokens, n_positions) for axes in (view.shape, view.strides))
    whole = value.contiguous()  # which of one token may be a part of what it was seen in
    return whole.as_strided(shape, strides, whole.storage_offset() + offset)


def state(op: Op, parts: Sequence[Tensor], device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """What a state's inputs were in the step before, one after the other; zeros where there was none."""
    shape = op.shape(0)
    if not parts:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.cat([part.flatten() for part in parts]).reshape(shape)
