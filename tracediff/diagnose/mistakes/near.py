"""A first look at how a weight may have been read: of many ways, which is near to what was seen of an op."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Context
from tracediff.model.gguf_file import TensorInfo
from tracediff.model.graph import Op
from tracediff.model.weights import dequantize, raw_rows
from tracediff.numerics.kinds.linear import linear

_ROWS = 64  # of the weight, by which ways to read it are told from one another
_PART = 0.5  # of the error there: what leaves more is not tried


def is_near(
    op: Op,
    context: Context,
    of_input: Callable[[Tensor], Tensor] = lambda x: x,
    read: Callable[[TensorInfo, np.ndarray], Tensor] = dequantize,
    product: Callable[[Tensor, Tensor], Tensor] = linear,
) -> bool:
    """Whether these leave less of some channels, `read` of the weight's raw rows; also where a bias hides it, which is
    taken away with the mean.

    Of what was not seen, and of other ops than matmuls, that is not known.
    """
    if op.kind != "linear" or context.seen is None:
        return True
    info = context.file.tensors[op.weights[0].name]
    raw = raw_rows(context.file, info)[:_ROWS]
    x, y = context.seen.inputs[0].flatten(1), context.seen.output.flatten(1)[:, :_ROWS]
    right, rows = dequantize(info, raw).to(y), read(info, raw).to(y)
    left = (y - linear(x, right), y - product(of_input(x), rows))
    # Of tokens that are all alike, as where one vector outweighs all else, nothing is left without the mean.
    return any(after <= _PART * before for before, after in (map(_size, left), map(_size_without_mean, left)))


def _size(error: Tensor) -> float:
    return float(error.square().sum())


def _size_without_mean(error: Tensor) -> float:
    return _size(error - error.mean(0))
