"""Choices that a trace lacks, told by what follows them: an engine may take either of two experts whose scores lie
closer to one another than its noise, and what follows is right only under the one that it took.

Samples of the noise take one or the other as it happens. So a token whose tie went the other way was faulty in right
engines in half precision, and where a sample's did the floor hid any mistake.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.layout import as_places
from tracediff.replay.past import Value
from tracediff.replay.recompute import Recomputation
from tracediff.replay.recorded import Place
from tracediff.replay.turning import beside
from tracediff.trace.format import OpRecord

_NEAREST = 3  # of those that were taken, and of the others: of so many pairs one is exchanged
_PAIRS = 6  # pairs of a token that are tried, the closest first
_EXCHANGES = 3  # of a token
_TELLS = 0.1  # of a token's squared error: an exchange that leaves more does not tell
_FEW = 4  # tokens of which all may have ties; of more no more than half


@dataclass(frozen=True, slots=True)
class Told:
    """What was chosen for a record, by the places of the choices, and how many tokens took another than their scores
    say.
    """

    choices: Mapping[Place, Value]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class _Taken:
    """A choice by its scores, but for the tokens of which is known what they took."""

    op: Op
    taken: Tensor
    is_known: Tensor

    def __call__(self, scores: Tensor, **attrs: object) -> Tensor:
        own = KINDS[self.op.kind].function(scores, **attrs)
        return torch.where(beside(self.is_known, own), self.taken.to(own.dtype), own)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """For each token of `near` [T] another choice, in which one of a pair that ties stands in the other's place."""

    op: Op
    taken: Tensor
    near: Tensor


def told(by: Recomputation, record: OpRecord, scheme: Scheme, asked: bool = True) -> Told | None:
    """The choices of a record's segment that leave least of it, be they ties under the scheme. None where it lacks
    none, where some tokens are off that have no tie, or where a token reads what another's choice makes; and where it
    is not `asked`, but the noise makes the same choices.
    """
    picks = _lacking(by, record)
    if not picks:
        return None
    step, rows = record.step, record.rows
    taken = {op.name: by.read(step, op.name, False, scheme, rows) for op in picks}
    if not asked and not any(map(_wavers, taken.values())):
        return None
    held = by.holding({(step, name, rows): Value(value.exact) for name, value in taken.items()})
    made = held.op(record, by.graph[record.op], scheme, record.dtype or "f32")
    left = _of_rows((by.values(record).reshape(made.exact.shape) - made.exact).square())
    off = ~(left <= made.margin * _of_rows(made.noise.sigma.square() + made.noise.hard.square() / 3))
    if int(off.sum()) > max(_FEW, len(off) // 2):
        return None
    return _Search(by, record, scheme, picks).told(left, off)


def _lacking(by: Recomputation, record: OpRecord) -> list[Op]:
    """The choices that are recomputed for a record, where each token's matter to its own row of it alone."""
    segment = [by.graph[name] for name in by.segment(record)]
    picks = [op for op in segment[:-1] if KINDS[op.kind].picks and not by.holds((record.step, op.name, record.rows))]
    after = by.graph.after(op.name for op in picks) if picks else set()
    by_token = all(
        op.axes[:1] == ("T",) and not any(past and name in after for name, past in op.reads)
        for op in segment
        if op.name in after
    )
    return picks if by_token else []


def _wavers(taken: Value) -> bool:
    """Whether the noise makes another choice."""
    return any(not torch.equal(sample, taken.exact) for sample in taken.samples)


class _Search:
    """Looks for exchanges that leave less of a record, one pair of a token after the other."""

    def __init__(self, by: Recomputation, record: OpRecord, scheme: Scheme, picks: Sequence[Op]) -> None:
        self._by, self._record, self._scheme, self._picks = by, record, scheme, picks
        self._plain = by.changed((), n_samples=0)

    def told(self, left: Tensor, off: Tensor) -> Told | None:
        """What leaves less of the tokens that are `off`, of which so much is left as it is; both [T]."""
        known: dict[str, _Taken] = {}
        exchanged = torch.zeros_like(off)
        for _ in range(_EXCHANGES if bool(off.any()) else 0):
            tried = [one for one in self._exchanges(known) if bool((one.near & off).any())]
            if not tried:
                break
            after = torch.stack([self.left(_with(known, one.op, one.taken, one.near & off)) for one in tried])
            near = torch.stack([one.near & off for one in tried])
            best, which = after.masked_fill(~near, torch.inf).min(0)
            less = best < _TELLS * left
            if not bool(less.any()):
                break
            for i, one in enumerate(tried):
                if bool((here := less & (which == i)).any()):
                    known = _with(known, one.op, one.taken, here)
            left, exchanged = torch.where(less, best, left), exchanged | less
        if bool((off & ~exchanged).any()):
            return None
        step, rows, of = self._record.step, self._record.rows, self._under(known)
        choices = {op.name: of.read(step, op.name, False, self._scheme, rows).exact for op in self._picks}
        return Told({(step, name, rows): Value(taken) for name, taken in choices.items()}, int(exchanged.sum()))

    def left(self, known: Mapping[str, _Taken]) -> Tensor:
        """[T]: the squared error of each token's row under these choices."""
        of = self._under(known)
        exact = of.op(self._record, of.graph[self._record.op], self._scheme, "f64").exact
        return _of_rows((self._by.values(self._record).reshape(exact.shape) - exact).square())

    def _under(self, known: Mapping[str, _Taken]) -> Recomputation:
        changed = [replace(taken.op, function=taken) for taken in known.values()]
        return self._plain.changed(changed, n_samples=0) if changed else self._plain

    def _exchanges(self, known: Mapping[str, _Taken]) -> Iterator[_Exchange]:
        """Pairs that tie, the closest of each token first."""
        of, step, rows = self._under(known), self._record.step, self._record.rows
        for op in self._picks:
            scores = of.inputs(step, op, self._scheme, rows)[0].exact
            taken = of.read(step, op.name, False, self._scheme, rows).exact
            reach = self._reach(op)
            for other, gap in exchanges(scores, taken):
                yield _Exchange(op, other, gap <= reach)

    def _reach(self, op: Op) -> Tensor:
        """[T]: how far two scores may be apart by the noise of both."""
        name, of = op.inputs[0], self._by
        bound = of.op(self._record, of.graph[name], self._scheme, self._record.dtype or "f32").bound()
        finite = bound.where(bound.isfinite(), 0.0).reshape(len(bound), -1)
        return 2 * finite.amax(1)


def exchanges(scores: Tensor, taken: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores [T, ..., n] and the places taken [T, ..., k] -> other places taken, one exchanged in each token, and how
    far the two scores are apart [T]; the closest of each token first.
    """
    n, k = scores.shape[-1], taken.shape[-1]
    places, is_place = as_places(taken, n)
    rows, at = scores.reshape(-1, n), places.reshape(-1, k)
    among = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, at, True)
    if n <= k or not bool(is_place.all()):
        return
    least = rows.masked_fill(~among, torch.inf).topk(min(_NEAREST, k), largest=False)
    most = rows.masked_fill(among, -torch.inf).topk(min(_NEAREST, n - k))
    gaps = (least.values[:, :, None] - most.values[:, None, :]).nan_to_num(torch.inf, torch.inf, torch.inf)
    pairs = gaps.reshape(len(scores), -1)  # of a token, in all its groups
    order = torch.argsort(pairs, dim=1, stable=True)
    for nth in order[:, :_PAIRS].T:
        row, pair = nth // gaps[0].numel(), nth % gaps[0].numel()
        row = row + torch.arange(len(scores), device=row.device) * (len(rows) // len(scores))
        out = least.indices[row, pair // gaps.shape[2]]
        instead = most.indices[row, pair % gaps.shape[2]]
        other = at.clone()
        other[row] = torch.where(at[row] == out[:, None], instead[:, None], at[row])
        yield other.reshape(taken.shape).to(taken.dtype), pairs.gather(1, nth[:, None])[:, 0]


def _with(known: Mapping[str, _Taken], op: Op, taken: Tensor, here: Tensor) -> dict[str, _Taken]:
    """These choices, and of the tokens that are `here` this one."""
    before = known.get(op.name)
    if before is not None:
        taken, here = torch.where(beside(here, taken), taken, before.taken), here | before.is_known
    return {**known, op.name: _Taken(op, taken, here)}


def _of_rows(x: Tensor) -> Tensor:
    """[T, ...] -> [T]: sums."""
    return x.reshape(len(x), -1).sum(1)
