"""torch tensors as a trace stores them."""

from typing import TYPE_CHECKING

import numpy as np

from tracediff.interchange.entry import Array, array

if TYPE_CHECKING:
    from torch import Tensor


def unusual(x: "Tensor") -> str | None:
    """What a tensor is whose values are not simply there: sparse, nested, quantised; None for a plain one."""
    import torch

    if x.is_nested:
        return "nested"
    if x.layout != torch.strided:
        return str(x.layout).removeprefix("torch.")
    return "meta" if x.is_meta else str(x.dtype) if x.is_quantized else None


def from_torch(x: "Tensor") -> Array:
    """A CPU tensor's values; bfloat16 as its bits. Of types that numpy lacks (float8) only the name is kept."""
    import torch

    x = x.detach().resolve_conj().resolve_neg().contiguous()
    if x.dtype == torch.bfloat16:
        return Array(x.view(torch.uint16).numpy(), "bf16")
    try:
        return array(x.numpy())
    except TypeError:
        return Array(np.empty(0), str(x.dtype))
