"""torch tensors as a trace stores them."""

from typing import TYPE_CHECKING

import numpy as np

from tracediff.interchange.entry import Array, array

if TYPE_CHECKING:
    from torch import Tensor


def from_torch(x: "Tensor") -> Array:
    """A CPU tensor's values; bfloat16 as its bits. Of types that numpy lacks (float8) only the name is kept."""
    import torch

    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return Array(x.view(torch.uint16).numpy(), "bf16")
    try:
        return array(x.numpy())
    except TypeError:
        return Array(np.empty(0), str(x.dtype))
