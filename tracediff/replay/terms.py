"""The matmuls whose outputs are added up to the end of a segment: a part of each refutes most ways to hold matrices.

To round the 15 million weights of a layer takes a fifth of a second, and there are hundreds of ways.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Arithmetic, Scheme
from tracediff.numerics.evaluate import arithmetic_of, evaluate
from tracediff.replay.recompute import Recomputation
from tracediff.trace.format import OpRecord
from tracediff.trace.statistics import ratio

_PASSING = ("rms_norm", "layer_norm", "scale")  # what leaves of an error the same share
_CHANNELS, _VALUES = 128, 4096  # of each matmul: rows that may be rounded together, and how many values tell
# Times what is left: what leaves less is four times as far at most (triangle inequality of the RMS), which is estimated
# by some channels of some matmuls.
_TOO_FAR = 8.0
# Standard deviations of what a matmul held otherwise has in common with the error: chance makes no more of any of some
# hundred, and what would be in it is told by so many.
_CHANCE, _TELLING = 4.0, 10.0


@dataclass(frozen=True, slots=True)
class Term:
    """A matmul under a scheme, from which a term of a sum follows."""

    op: Op  # of some channels, from the first on
    weights: Weights
    arithmetic: Arithmetic
    x: Tensor  # what it reads, [T, n_in]
    y: Tensor  # what it makes, [T, n]
    factor: float  # what the sum errs by where the matmul's output errs by 1; 0 where a norm lies between
    share: float  # of the sum's squared values

    def way(self, arithmetic: Arithmetic) -> Tensor:
        """How far its output is from where it is in another arithmetic, [T, n]."""
        return evaluate(self.op, [self.x], self.weights, arithmetic) - self.y


class Terms:
    """Of a record's op under a scheme: none of experts, and none of what is no sum."""

    def __init__(self, by: Recomputation, record: OpRecord, scheme: Scheme) -> None:
        def read(op: Op) -> list[Tensor]:
            return [value.exact for value in by.inputs(record.step, op, scheme, record.rows)]

        end = by.op_of(record)
        made = by.op(record, end, scheme, "f64").exact
        self._error = by.values(record).reshape(made.shape) - made
        signal = float(made.square().sum())
        self._left = ratio(float(self._error.square().sum()), signal)
        self._refuted: dict[tuple[Arithmetic, ...], bool] = {}
        self._terms = list[Term]()
        for total, place, op, factor in _terms(by, {*by.segment(record)}, end):
            share, (x, *_) = ratio(float(read(total)[place].square().sum()), signal), read(op)
            n = min(max(_CHANNELS, _VALUES // len(x) // _CHANNELS * _CHANNELS), op.weights[0].shape[0])
            part, arithmetic = op.channels(slice(0, n)), arithmetic_of(op, scheme, by.weights)
            y = evaluate(part, [x], by.weights, arithmetic)
            self._terms.append(Term(part, by.weights, arithmetic, x, y, factor, share))

    def refute(self, scheme: Scheme) -> bool:
        """Whether another scheme takes the end too far to leave less, or holds matrices in a way that the error has
        nothing of.
        """
        key = tuple(arithmetic_of(term.op, scheme, term.weights) for term in self._terms)
        if key not in self._refuted:
            self._refuted[key] = self._refute(key)
        return self._refuted[key]

    def _refute(self, arithmetics: Sequence[Arithmetic]) -> bool:
        far = 0.0
        for term, arithmetic in zip(self._terms, arithmetics, strict=True):
            if arithmetic == term.arithmetic:
                continue
            way = term.way(arithmetic)
            far += term.share * ratio(float(way.square().sum()), float(term.y.square().sum()))
            is_held = replace(arithmetic, stored=term.arithmetic.stored) == term.arithmetic
            if is_held and term.factor and self._lacks(term.factor * way):
                return True
        return far > _TOO_FAR * self._left

    def _lacks(self, way: Tensor) -> bool:
        """Whether the error has nothing of a way of its first channels, though it would be seen."""
        products = self._error[:, : way.shape[-1]] * way
        chance = float(products.square().sum()) ** 0.5
        return float(products.sum()) < _CHANCE * chance and float(way.square().sum()) > _TELLING * chance


def _terms(by: Recomputation, segment: set[str], total: Op) -> Iterator[tuple[Op, int, Op, float]]:
    """The terms of a sum, and of a sum that is one of them, which follow from a matmul: the sum, the place of its term,
    the matmul, and its factor.
    """
    if total.kind != "add" or not _is_plain(total):
        return
    for i, name in enumerate(total.inputs):
        factor = 1.0
        while name in segment and _is_plain(op := by.graph[name]) and op.kind in _PASSING:
            factor *= op.attrs["scale"] if op.kind == "scale" else 0.0
            name = op.inputs[0]
        if name in segment and (op := by.graph[name]).kind == "linear" and _is_plain(op):
            yield total, i, op, factor
        elif name in segment:
            yield from _terms(by, segment, by.graph[name])


def _is_plain(op: Op) -> bool:
    return op.function is None and op.rework is None and not any(op.views)
