"""The weights that a torch module multiplies by, in whatever form it keeps them."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from tracediff.model.graph import Op
from tracediff.model.weights import Weights

_COLUMNS = 256  # of a row that are compared to find it
_UNITS = 1024  # unit vectors that are put through a module at a time
# A row of sums by a module against those with its matrix, by norm: rounding to bfloat16 leaves 0.1% to 0.2%, rounding
# what is read to integers of 8 bits 0.6% and more.
_ITS_SUMS = 2.0**-8


def weight_of(module: nn.Module) -> Any:
    """A module's weight, or its only parameter where it calls that something else (a norm its "scale")."""
    own = [*module.parameters(recurse=False)]
    return getattr(module, "weight", own[0] if len(own) == 1 else None)


def norm_as_held(module: nn.Module, op: Op, weights: Weights) -> Tensor:
    """A norm's weight as the file has it: what it multiplies with, where a module holds that less 1. Gemma, Qwen3-Next
    and their like add 1 in float32, whatever it is held in; layer norms (Nemotron) as it is held.
    """
    weight = cast(Tensor, weight_of(module)).detach()
    file = weights.load(op.weights[0]).reshape(weight.shape).to(weight)
    wide = torch.promote_types(weight.dtype, torch.float32) if op.kind == "rms_norm" else weight.dtype
    added = weight.to(wide) + 1
    return added if (added - file).norm() < (weight - file).norm() / 2 else weight


def looked_at(n: int) -> Tensor:
    """Which of a row's n columns are compared to find it."""
    return evenly(n, _COLUMNS)


def evenly(n: int, most: int) -> Tensor:
    """Some of n places from the first to the last, whatever the model's author has as the default type."""
    return torch.linspace(0, n - 1, min(n, most), dtype=torch.float64).long()


def to_be_found(module: nn.Module) -> Tensor | None:
    """A module's weight, rows being what comes out; of a packed one the columns looked at, and zeros."""
    weight = _of_floats(module)
    if weight is not None:
        return weight
    n_in = getattr(module, "in_features", None)
    made = next(_by_units(module, n_in, looked_at(n_in)), None) if isinstance(n_in, int) else None
    if n_in is None or made is None:
        return None
    matrix = torch.zeros(len(made), n_in, dtype=torch.float32)
    matrix[:, looked_at(n_in)] = made.float().cpu()
    return matrix


def multiplied_by(module: nn.Module) -> Tensor | None:
    """The matrix of a linear module, [out, in], in the type that it is kept or comes out in: by it the module's sums
    are explained. None where they are by none, as where the module rounds what it reads to integers.
    """
    held = _of_floats(module)
    kept, n_in = [] if held is None else [held], getattr(module, "in_features", None)
    made = _by_units(module, n_in, torch.arange(n_in)) if isinstance(n_in, int) else ()
    return next((matrix for matrix in chain(kept, made) if _explains(matrix, module)), None)


def _of_floats(module: nn.Module) -> Tensor | None:
    """A weight as it is, rows being what comes out; transformers' Conv1D holds it the other way round."""
    weight = weight_of(module)
    if not isinstance(weight, Tensor) or weight.ndim not in (1, 2) or not weight.is_floating_point():
        return None
    if type(weight) not in (Tensor, nn.Parameter):  # torchao's: integers, that are indexed in few ways or none
        weight = weight.dequantize()
    return weight.detach().T if type(module).__name__ == "Conv1D" else weight.detach()


@torch.no_grad()
def _by_units(module: nn.Module, n_in: int, columns: Tensor) -> Iterator[Tensor]:
    """Columns of a matrix in some format of its own, as bitsandbytes has them: what comes out of unit vectors of each
    type that the module takes.
    """
    for dtype, device in _taken(module):
        made = []
        try:
            none = module(torch.zeros(1, n_in, dtype=dtype, device=device))
            for at in columns.split(_UNITS):
                units = torch.zeros(len(at), n_in, dtype=dtype, device=device)
                units[torch.arange(len(at)), at] = 1
                made.append((module(units) - none).T)
        except (RuntimeError, TypeError, ValueError):
            continue
        yield torch.cat(made, 1)


@torch.no_grad()
def _explains(matrix: Tensor, module: nn.Module) -> bool:
    """Whether the module multiplies a row by this matrix."""
    row = torch.randn(2, matrix.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    row[1] = 0
    for dtype, device in _taken(module):
        given = row.to(device, dtype)
        try:
            made, none = module(given)
        except (RuntimeError, TypeError, ValueError):
            continue
        sums, right = (made - none).double(), matrix.to(device).double() @ given[0].double()
        return bool((sums - right).norm() <= _ITS_SUMS * right.norm())
    return False


def _taken(module: nn.Module) -> Iterator[tuple[torch.dtype, torch.device | None]]:
    """What a module may take, first what it holds."""
    held = [*module.parameters(), *module.buffers()]
    dtypes = [x.dtype for x in held if x.is_floating_point() and x.itemsize > 1]
    for dtype in dict.fromkeys((*dtypes, torch.float32, torch.bfloat16, torch.float16)):
        yield dtype, held[0].device if held else None
