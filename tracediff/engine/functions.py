"""The torch functions that a model calls between its modules, as a Watch is shown them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tracediff.engine.watching import Watch

_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
_SUMS = (torch.add, Tensor.add, Tensor.add_)
_CASTS = (Tensor.to, Tensor.type, Tensor.type_as, Tensor.half, Tensor.bfloat16, Tensor.float)
_JOINS = (torch.cat, torch.concat, torch.concatenate)
# The last tensor that each is given is written into the first; of those that are joined the last is new.
_STORES = (
    *(Tensor.__setitem__, Tensor.copy_, Tensor.index_copy_, Tensor.index_put_, Tensor.scatter_, Tensor.masked_scatter_),
    *(Tensor.slice_scatter, torch.slice_scatter, Tensor.index_copy, torch.index_copy, torch.scatter, Tensor.scatter),
)


class Functions(TorchFunctionMode):
    """Shows a Watch matmuls and what fused attention is given, sums, casts, and what is stored in a cache."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._watch.running:
            return func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        if func is nn.functional.scaled_dot_product_attention:
            q, k = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key")))
            self._watch.product(q, k.transpose(-1, -2), None)
        elif given and (func in _JOINS or func in _STORES):
            for x in [x for x in (given[0] if func in _JOINS else given) if isinstance(x, Tensor)][-1:]:
                self._watch.keys.store(x)
        result = func(*args, **kwargs)
        if func in _PRODUCTS and len(args) == 2:
            self._watch.product(args[0], args[1], result)
        elif func in _SUMS and len(given) == 2 and all(isinstance(x, Tensor) for x in given):
            self._watch.residual.added(given[0], given[1], result)
        elif given and _is_in_place(func) and isinstance(given[0], Tensor):
            self._watch.residual.changed(given[0])
        elif func in _CASTS and result is not args[0]:
            self._watch.keys.cast(args[0], result)
        return result


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
