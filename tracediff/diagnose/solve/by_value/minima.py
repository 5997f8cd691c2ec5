"""What the minima of a matrix' blocks are multiplied by, where it is not the sum of the same weights' activations.

Kernels that multiply integers add up each part's activations apart (the `bsums` of ggml's q8_K), and look the sums up.
What a token's values are off by tells all of them: there are many more rows than parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.edit import Solved
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.model.block_fields import FIELDS, Fields
from tracediff.model.graph import Op
from tracediff.model.weights import Weights, raw_rows
from tracediff.numerics.blocks import Blocks
from tracediff.numerics.evaluate import computed, noise_of
from tracediff.numerics.floors import UNIT, Noise
from tracediff.numerics.kinds.kind import Call, Made
from tracediff.numerics.roundings import rounding_named

_LOOK = "the sums of activations that minima are multiplied by: how they are made, where they are kept and looked up"
_BITS = 12.0
_TOKENS = 8  # by which sums are told
_ROWS = 1 << 11  # of the matrix, the same
_SAME = 1e-3  # of the root mean square of the sums: a look, no verdict
_HALVES = ("first", "second")
_PARTS = 8  # of a block of Q4_K and Q5_K, whose activations q8_K adds up by sixteenths (ggml-common.h)


@dataclass(frozen=True, slots=True)
class OtherSums:
    """Computes a linear op whose minima are multiplied by other sums: `Op.rework`. Those `of` a "half" of each part's
    activations, of two "sixteenths" of a block of which the next ones take one again, of another "token" or of that
    one's "integers", or of the integers alone ("unscaled"). Those of other parts are minima of other parts, which
    `blocks` finds.
    """

    of: str
    n: int = 0
    blocks: str = ""  # of the activations, whose scales are taken

    def compute(self, call: Call) -> Tensor:
        """The output."""
        x = call.rounded(call.inputs[0].flatten(1), call.arithmetic.operands)
        more = self._more(call.op, x, call.weights)
        right = computed(replace(call.op, rework=None), call)
        return right + more.reshape(right.shape).to(right.dtype)

    def noise(self, made: Made) -> Noise:
        """That of the right op, and of what its sums make besides."""
        own = noise_of(replace(made.op, rework=None), made)
        x = rounding_named(made.arithmetic.operands)(made.inputs[0].flatten(1))
        more = self._more(made.op, x, made.weights).reshape(made.y.shape)
        terms = made.op.weights[0].shape[-1]
        return replace(own, hard=own.hard + UNIT["f32"] * terms**0.5 * more.abs().amax(-1, keepdim=True))

    def _more(self, op: Op, x: Tensor, weights: Weights) -> Tensor:
        minima = torch.from_numpy(_minima(op, weights)).to(x)
        return (self.taken(x, minima.shape[1]) - _sums(x, minima.shape[1])) @ minima.T

    def taken(self, x: Tensor, parts: int) -> Tensor:
        """[T, n_in], rounded as the operands are -> [T, parts]: what stands for the sums."""
        own = _sums(x, parts)
        match self.of:
            case "half":
                return x.unflatten(-1, (parts, 2, -1)).sum(-1)[..., self.n]
            case "sixteenths":
                each = x.unflatten(-1, (-1, 2 * _PARTS, x.shape[-1] // parts // 2)).sum(-1)
                return (each[..., :_PARTS] + each[..., 1 : _PARTS + 1]).flatten(1)
            case "token":
                return own[self.n : self.n + 1].expand(own.shape)
            case "unscaled" | "integers":
                rounding = rounding_named(self.blocks)
                assert isinstance(rounding, Blocks)
                scales = rounding.grid(x)[1].squeeze(-1).to(rounding.scales).to(x)
                scales = scales.repeat_interleave(parts // scales.shape[1], 1)
                integers = own / scales
                return integers if self.of == "unscaled" else integers[self.n] * scales
        raise ValueError(self.of)

    @property
    def words(self) -> str:
        """For a reader."""
        match self.of:
            case "half":
                sums = f"the sum of the {_HALVES[self.n]} half of its activations alone"
            case "sixteenths":
                sums = "the sum of sixteenths i and i + 1 of its block's activations, where 2 i and 2 i + 1 belong"
            case "token":
                sums = f"the sum of the activations of token {self.n}"
            case "integers":
                sums = f"the sum of the integers of token {self.n}, with its own scale"
            case _:
                sums = "the sum of the activations' integers, without their scale"
        return f"the minimum of each part of a row is multiplied by {sums}"


def variants(problem: Problem) -> Iterator[Solved]:
    """Sums that give all that was recorded."""
    op = problem.op
    if op.kind != "linear" or not (there := _taken(problem)):
        return
    x, taken = there
    near = _SAME * float(taken.square().mean().sqrt())
    for sums in _tried(len(x), x.shape[1], taken.shape[1], problem.arithmetic.operands):
        made = sums.taken(x, taken.shape[1])[: len(taken)]
        if bool(((made - taken).abs() <= near).all()):
            yield Solved((replace(op, rework=sums),), sums.words, _BITS, _LOOK)


def _tried(n_tokens: int, n_in: int, parts: int, operands: str) -> Iterator[OtherSums]:
    tokens = range(min(n_tokens, _TOKENS))
    yield from (OtherSums("half", n) for n in range(2))
    if n_in == parts * 256 // _PARTS:
        yield OtherSums("sixteenths")
    yield from (OtherSums("token", n) for n in tokens)
    if isinstance(rounding_named(operands), Blocks):
        yield OtherSums("unscaled", blocks=operands)
        yield from (OtherSums("integers", n, blocks=operands) for n in tokens)


def _taken(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """The activations [T, n_in], and of some tokens what minima were multiplied by [t, parts]; None where not all that
    is wrong follows from that.
    """
    x = torch.from_numpy(problem.array("x"))
    recorded, exact, near = (v.reshape(len(x), -1) for v in (problem.recorded, problem.exact, problem.near))
    if problem.weights.type_of(problem.op.weights[0]) not in FIELDS:
        return None
    minima = _minima(problem.op, problem.weights, _ROWS)
    if not minima.any() or len(minima) <= minima.shape[1] or not np.isfinite(recorded[:, : len(minima)]).all():
        return None
    off = (recorded - exact)[:_TOKENS, : len(minima)]
    more, *_ = np.linalg.lstsq(minima, off.T, rcond=None)
    made = exact[:_TOKENS, : len(minima)] + (minima @ more).T
    if not agree(made, recorded[:_TOKENS, : len(minima)], near[:_TOKENS, : len(minima)]).all():
        return None
    return x, _sums(x, minima.shape[1])[:_TOKENS] + torch.from_numpy(more.T)


def _minima(op: Op, weights: Weights, most: int | None = None) -> np.ndarray:
    """What is added to the weights of each part of a row, float64 [n_out, parts]; of other types 0."""
    weight = op.weights[0]
    info = weights.file.tensors[weight.name]
    raw = raw_rows(weights.file, info)[weight.first : weight.first + min(weight.shape[0], most or weight.shape[0])]
    fields = Fields.of_rows(info.type.name, raw)
    return fields.added.reshape(len(raw), -1).astype(np.float64)


def _sums(x: Tensor, parts: int) -> Tensor:
    return x.unflatten(-1, (parts, -1)).sum(-1)
