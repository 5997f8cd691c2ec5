"""One result of a run whose ranks hold different copies: of each op, and of each weight, what says most."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tracediff.result import OpResult, Side, Status, TensorResult, WeightResult
from tracediff.trace.ranks import Ranks, on_ranks
from tracediff.trace.reader import Trace

_TELLING: tuple[Status, ...] = ("faulty", "drift", "undecided", "inherited", "ok", "unmatched")
_WEIGHTS = ("wrong", "rounded", "unmatched", "identical")
Found = TypeVar("Found", OpResult, WeightResult, TensorResult)


def side_of(trace: Trace) -> Side:
    """A trace in a result."""
    return Side(str(trace.path), trace.header.engine, trace.header.model, len(trace.ops), trace.cut)


def gathered(sides: Sequence[Trace], by_side: Sequence[Sequence[OpResult]]) -> list[tuple[int, OpResult]]:
    """Of each op the result that says most, with which side it is of."""
    return [
        picked(sides, of, lambda op: (_TELLING.index(op.status), op.local is None), ("faulty", "drift"))
        for of in zip(*by_side, strict=True)
    ]


def weights_of(sides: Sequence[Trace], by_side: Sequence[Sequence[WeightResult]]) -> list[WeightResult]:
    """Of each weight the result that says most."""
    each = zip(*by_side, strict=True)
    return [picked(sides, of, lambda weight: (_WEIGHTS.index(weight.status),), ("wrong",))[1] for of in each]


def picked(
    sides: Sequence[Trace], of: Sequence[Found], key: Callable[[Found], tuple[int, ...]], named: Sequence[str]
) -> tuple[int, Found]:
    """The first of the most telling; where it is not so on all ranks, with the ranks in its note."""
    at = min(range(len(of)), key=lambda i: key(of[i]))
    alike = [side for side, one in zip(sides, of, strict=True) if one.status == of[at].status]
    if of[at].status not in named or len(alike) == len(of):
        return at, of[at]
    where = on_ranks(sorted(rank for side in alike if isinstance(side, Ranks) for rank in side.members))
    return at, replace(of[at], note=f"{of[at].note} ({where})" if of[at].note else where)
