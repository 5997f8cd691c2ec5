"""What a buffer holds that is used again and again."""

from collections.abc import Sequence

import torch
from torch import Tensor


def in_buffer(values: Sequence[Tensor]) -> Tensor:
    """What lies in a buffer after these were written to its beginning, one after the other; flat, empty of none."""
    held = torch.empty(0)
    for value in values:
        held = torch.cat((value.flatten(), held.to(value)[value.numel() :]))
    return held
