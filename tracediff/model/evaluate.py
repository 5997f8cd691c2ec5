"""One op of a graph, computed: the only place where mathematics, weights and arithmetic meet."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tracediff.model.arithmetic import EXACT, ROUNDINGS, Arithmetic
from tracediff.model.graph import Op
from tracediff.model.ops import FUNCTIONS
from tracediff.model.weights import Weights

_MATMULS = ("linear", "scores", "weighted_values")


def evaluate(op: Op, inputs: Sequence[Tensor], weights: Weights, arithmetic: Arithmetic = EXACT) -> Tensor:
    """The op's output, in the dtype and on the device of `weights`; the shape is `op.shape(...)`.

    `inputs` are shaped as the graph says (an input that the op reads over all steps has S rows); integer
    inputs (tokens, positions) stay integers.
    """
    function = op.function or FUNCTIONS[op.kind]
    if op.kind == "embedding":
        return function(weights.gather(op.weights[0], inputs[0]), **op.attrs)
    if op.kind in _MATMULS:
        inputs = [ROUNDINGS[arithmetic.operands](x) for x in inputs]
    if op.kind == "linear":
        return _linear(op, inputs[0].flatten(1), weights, arithmetic)
    return function(*inputs, *(weights.load(w) for w in op.weights), **op.attrs)


def _linear(op: Op, x: Tensor, weights: Weights, arithmetic: Arithmetic) -> Tensor:
    """A matmul block of rows by block of rows, so that a matrix is never whole in memory."""
    function = op.function or FUNCTIONS[op.kind]
    hold = ROUNDINGS[arithmetic.weights]
    n_out = op.weights[0].shape[0]
    bias = hold(weights.load(op.weights[1])) if len(op.weights) > 1 else None
    y = torch.empty(len(x), n_out, dtype=weights.dtype, device=x.device)
    at = 0
    for rows in weights.slices(op.weights[0]):
        cut = slice(at, at + len(rows))
        y[:, cut] = function(x, hold(rows), None if bias is None else bias[cut], **op.attrs)
        at = cut.stop
    return y.unflatten(1, op.axes[1:])  # type: ignore[arg-type]
