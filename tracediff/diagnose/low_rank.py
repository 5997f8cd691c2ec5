"""An error of low rank: all of it follows few terms of a sum of products, input channels or cached positions, or it is
in what some experts make.
"""

import torch
from torch import Tensor

from tracediff.diagnose.solve.edit import Read
from tracediff.english import ranges
from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.replay.look import Known

_MOST = 3  # terms
_EQUATIONS = 8  # sums that must be had of each term: with fewer any would do
_NUMBERS = 1 << 24  # of a matrix that is looked at
_SAME = 1e-3  # to which a term is a multiple of what it should be


def followed(op: Op, known: Known, weights: Weights) -> str:
    """What alone the error follows, in words; empty where that is more, or the op sums up no products."""
    error = known.recorded - known.exact
    if not bool(torch.isfinite(error).all()):
        return ""
    match op.kind:
        case "linear" if error.ndim == 2 or error.shape[0] == known.inputs[0].shape[0]:
            return _of_matmul(op, known, error.flatten(1), weights)
        case "weighted_values":
            return _of_positions(op, known, error)
        case "linear_id":
            return _of_experts(known)
    return ""


def _of_matmul(op: Op, known: Known, error: Tensor, weights: Weights) -> str:
    """[T, n_in] x [n_out, n_in]: an input channel that is another, or its column of the matrix, leaves rank one."""
    matrix = op.weights[0]
    if len(matrix.shape) != 2 or matrix.shape[0] * matrix.shape[1] > _NUMBERS:
        return ""
    x, w, near = known.inputs[0].flatten(1), weights.load(matrix).double(), known.bound.flatten(1)
    name, column = Read(op.inputs[0]).words(op), Read(matrix.name).words(op)
    by_x, by_w = terms(x[None], error[None], near[None]), terms(w[None], error.T[None], near.T[None])
    channels = by_x or by_w
    if not channels:
        return _of_rank(error, near)
    one = len(channels) == 1
    said = f"all that is wrong follows {name}'s {'channel' if one else 'channels'} {ranges(channels)}: "
    if by_x == by_w and one:
        by = float(_solved(x[None], error[None], channels)[0, 0] @ w[:, channels[0]] / w[:, channels[0]].square().sum())
        return said + f"it counts {_times(1 + by)}"
    if by_x:
        return said + f"{'its column' if one else 'their columns'} of {column} {'is another' if one else 'are others'}"
    return said + f"as if {'it was another' if one else 'they were others'} when it was read"


def _of_positions(op: Op, known: Known, error: Tensor) -> str:
    """Probabilities [H, T, S] x values [S, G, D]: a cached position that is another leaves rank one in each head."""
    p, v = known.inputs[:2]
    n_heads, n_tokens, n_keys = p.shape
    groups = v.shape[1]

    def grouped(y: Tensor) -> Tensor:  # [T, H D] -> [G, H / G T, D]
        return y.reshape(n_tokens, n_heads, -1).transpose(0, 1).reshape(groups, -1, y.numel() // n_tokens // n_heads)

    found = terms(p.reshape(groups, -1, n_keys), grouped(error), grouped(known.bound))
    if not found:
        return ""
    one = len(found) == 1
    name = Read(op.inputs[1]).words(op)
    where = f"{name} of {'position' if one else 'positions'} {ranges(found)}"
    return f"all that is wrong follows {where}: as if what is cached there {'was another' if one else 'were others'}"


def _of_experts(known: Known) -> str:
    """Experts' outputs [T, k, n] and which they are [T, k]: the matrices of some are others."""
    chosen = known.inputs[-1].long()
    wrong = known.wrong.any(-1).reshape(chosen.shape)
    ours, others = ({*chosen[rows].tolist()} for rows in (wrong, ~wrong))
    if not ours or not others or ours & others:
        return ""
    one = len(ours) == 1
    return f"all that expert{'' if one else 's'} {ranges(sorted(ours))} make{'s' * one} is wrong, and nothing else"


def _of_rank(error: Tensor, near: Tensor) -> str:
    """Of an error [T, n] that few vectors give, whatever they are: one wrong token is of rank 1 in any case."""
    off = error.abs() > near
    n_wrong = min(int(off.any(axis).sum()) for axis in (0, 1))
    u, s, v = torch.linalg.svd(error, full_matrices=False)
    for rank in range(1, min(_MOST, n_wrong // _EQUATIONS) + 1):
        if bool(((error - u[:, :rank] * s[:rank] @ v[:rank]).abs() <= near).all()):
            offset = ", or an offset of part of each row of weights," if rank == 1 else ""  # a minimum that is left out
            adapter = f"an adapter (LoRA) of that rank{offset}"
            return f"as a matrix the error has rank {rank}: {adapter} would leave such a one"
    return ""


def terms(factors: Tensor, error: Tensor, near: Tensor) -> list[int]:
    """The few columns of factors [G, n, k] that give an error [G, n, m], each times some numbers of its own [G, m], to
    within `near`; none where they are more (orthogonal matching pursuit, https://doi.org/10.1109/ACSSC.1993.342465).
    """
    sizes, left, found = factors.square().sum(1), error, list[int]()
    while len(found) < _MOST and factors.shape[1] >= _EQUATIONS * (len(found) + 1):
        along = (factors.mT @ left).square().sum(2) / sizes.clamp(min=1e-300)
        found.append(int(along.sum(0).argmax()))
        left = error - factors[..., found] @ _solved(factors, error, found)
        if len(set(found)) < len(found):
            break
        if bool((left.abs() <= near).all()):
            return sorted(found)
    return []


def _solved(factors: Tensor, error: Tensor, columns: list[int]) -> Tensor:
    """What each of the columns is multiplied with, [G, columns, m]."""
    return torch.linalg.lstsq(factors[..., columns], error).solution


def _times(by: float) -> str:
    if abs(by) < _SAME:
        return "nothing"
    return f"{by:.6g} times"
