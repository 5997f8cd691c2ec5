"""What goes wrong between ranks: sums over them, the order of parts, what each computes of its own part alone.

Judging knows what an op should have come out as; here are the ways in which ranks that each compute a part of it come
to something else, each tried on the recorded values themselves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from tracediff.english import few, ranges
from tracediff.model.graph import SOURCES, Op
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.evaluate import evaluate
from tracediff.numerics.roundings import rounding_named
from tracediff.replay.look import Known
from tracediff.replay.replay import Replay
from tracediff.result import Cause, Local, OpResult
from tracediff.trace.format import OpRecord
from tracediff.trace.ranks import Ranks, on_ranks
from tracediff.trace.shards import Part
from tracediff.trace.statistics import ratio

_LITTLE = 1e-6  # of the error: what a mistake may leave of it where that is more than the floor
_SHIFTS = 8  # rows of a vocabulary
_LOOK = {
    "all_reduce": "where the ranks' terms are added up after the row-parallel matmul",
    "every_rank": "what is added before the all-reduce: one rank alone may add it",
    "order": "how the weight is cut, and by which rank: the process's own number, or its place in the group",
    "local": "a sum over the axis that is sharded must be added up over the ranks before it is used",
    "vocabulary": "the first and the last id of the rank's part of the vocabulary",
    "experts": "which experts a rank computes: each must be on one of those that are added up",
}

Tries = Iterator[tuple[str, str, str, Tensor]]  # name, where to look, in words, and what comes of it


@dataclass(frozen=True)
class Between:
    """A faulty record of several ranks: what they may have done wrong together."""

    replay: Replay
    result: OpResult
    error: Local
    scheme: Scheme | None = None  # under which it is looked at; None: the plan's

    @cached_property
    def record(self) -> OpRecord:
        """As the side sees it."""
        return self.replay.trace.ops[self.result.step, self.result.op]

    @cached_property
    def parts(self) -> Sequence[Part]:
        """What each rank holds."""
        assert isinstance(self.trace, Ranks)
        return self.trace.parts(self.record)

    @property
    def trace(self) -> Ranks:
        """All ranks' traces."""
        assert isinstance(self.replay.trace, Ranks)
        return self.replay.trace

    @cached_property
    def op(self) -> Op:
        """As it should be."""
        return self.replay.graph[self.result.op]

    @cached_property
    def known(self) -> Known:
        """What it should have come out as."""
        return self.replay.known(self.record, self.scheme)

    @torch.inference_mode()
    def cause(self) -> Cause | None:
        """What explains the error; None where it is no mistake between ranks."""
        if len(self.error.segment) > 1:
            return None
        under = (replace(self, scheme=scheme) for scheme in self.replay.arithmetics(self.record))
        return next(filter(None, (one._cause() for one in under)), None)

    def _cause(self) -> Cause | None:
        shard = self.parts[0].shard
        tries = self._of_copies() if shard is None else self._of_terms() if shard.sum else self._of_parts()
        for name, look, text, everywhere in tries:
            for made, where in self._everywhere_or_in_some_tokens(everywhere):
                left = self._left(made)
                if left <= max(self.error.floor, _LITTLE * self.error.nmse) and left < 0.1 * self.error.nmse:
                    said = text + where
                    return Cause(
                        name, left, said, self.error.floor, self.error.arithmetic, {name: said}, {name: _LOOK[look]}
                    )
        return None

    @torch.inference_mode()
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose part is wrong: all of them where it is not in parts."""
        shard = self.parts[0].shard
        if shard is None or shard.axis is None or len(self.error.segment) > 1:
            faulty = self.trace.members
        else:
            wrong = self.known.wrong.reshape(self.record.shape)
            faulty = tuple(p.rank for p in self.parts if p.rank in self.trace.members and bool(wrong[p.at].any()))
        return faulty or self.trace.members

    def _everywhere_or_in_some_tokens(self, made: Tensor) -> Iterator[tuple[Tensor, str]]:
        """What a mistake makes, of all tokens, and of those alone of which something is wrong; and which these are."""
        yield made, ""
        known, rows = self.known, self.record.rows or range(len(self.trace.steps[self.record.step].tokens))
        if self.op.axes[0] != "T" or len(rows) == 1 or made.shape != known.exact.shape:
            return
        wrong = known.wrong.flatten(1).any(1)
        at, tokens = wrong.reshape(-1, *(1,) * (made.ndim - 1)), [rows[i] for i in wrong.nonzero().flatten().tolist()]
        if 0 < len(tokens) < len(rows):
            named = f"token{'s' * (len(tokens) > 1)} {ranges(tokens)} of {len(rows)}"
            yield torch.where(at, made, known.exact), f", of {named}"

    def _left(self, made: Tensor) -> float:
        """The NMSE that the recorded values have against what a mistake makes; of those that this side answers for."""
        known = self.known
        error = torch.where(known.recorded == known.exact, 0.0, known.recorded - made.reshape(known.exact.shape))
        return ratio(float(error.square().sum()), float(known.exact.square().sum()))

    def _values(self, part: Part) -> Tensor:
        values = torch.from_numpy(part.trace.values(part.record)).to(self.known.exact)
        whole = part.shard is None or part.shard.axis is None
        return values.reshape(self.known.exact.shape) if whole else values

    # --- copies of the whole: what was, or should have been, summed over the ranks ------------------------------------

    def _of_copies(self) -> Tries:
        y, n = self.known.exact, len(self.trace.everyone)
        left_out = "the all-reduce is left out: every rank holds its own term of the sum"
        if len(self.parts) == n:
            copies = [self._values(part) for part in self.parts]
            if any(not torch.equal(copy, copies[0]) for copy in copies) and self._adds_up(copies):
                mine = copies[[part.rank for part in self.parts].index(self.trace.members[0])]
                yield "all_reduce_left_out", "all_reduce", left_out, mine
        yield "all_reduce_twice", "all_reduce", f"it is all-reduced twice: {n} times what it should be", n * y
        besides, terms = self._terms()
        on = "" if n == len(self.trace.members) else f" ({on_ranks(self.trace.members)})"
        for rank, term in terms.items():
            if self.trace.members == (rank,):
                text = f"rank {rank} holds its own term of the sum: it has no part in the all-reduce"
                yield "all_reduce_left_out", "all_reduce", text, term + besides
            text = f"the term of rank {rank} is {{}} in the all-reduce{on}"
            yield "term_missing", "all_reduce", text.format("missing"), y - term
            yield "term_twice", "all_reduce", text.format("added twice"), y + term
            yield "term_of_one", "all_reduce", text.format("taken for that of every rank"), besides + n * term
        if self.op.kind == "linear" and bool(besides.any()):
            text = "the bias is added on every rank before the all-reduce"
            yield "bias_on_every_rank", "every_rank", text, y + (n - 1) * besides
        for name, x in zip(self.op.inputs, self.known.inputs, strict=True) if self.op.kind == "add" else ():
            text = f"{name} is added on every rank before the all-reduce, {n} times in all"
            yield "residual_on_every_rank", "every_rank", text, y + (n - 1) * x.reshape(y.shape)

    def _adds_up(self, copies: Sequence[Tensor]) -> bool:
        """Whether the copies are the terms of what is right."""
        y = self.known.exact
        left = ratio(float((sum(copies) - y).square().sum()), float(y.square().sum()))
        return left <= max(100 * self.error.floor, _LITTLE * self.error.nmse)

    def _terms(self) -> tuple[Tensor, dict[int, Tensor]]:
        """What is added besides, and each rank's term: of a sum that was recorded in terms, as when ranks' terms are
        added to the residual; of a row-parallel matmul what its part of the input makes, and the bias.
        """
        zero = torch.zeros_like(self.known.exact)
        for name, x in zip(self.op.inputs, self.known.inputs, strict=True) if self.op.kind == "add" else ():
            summed = self.trace.ops.get((self.record.step, name))
            parts = self.trace.parts(summed) if summed else ()
            if parts and parts[0].shard and parts[0].shard.sum and x.shape == zero.shape:
                rounding = rounding_named(self.known.arithmetic.operands)
                terms = {part.rank: rounding(self._values(part)) for part in parts}
                return self.known.exact - sum(terms.values()), terms
        if self.op.kind != "linear" or self.op.inputs[0] in SOURCES:
            return zero, {}
        record = self.trace.ops.get((self.record.step, self.op.inputs[0]))
        parts = self.trace.parts(record) if record else ()
        shard = parts[0].shard if parts else None
        if record is None or shard is None or not shard.axis:  # tokens are no terms of a sum
            return zero, {}
        x, weights = self.known.inputs[0], self.replay.weights
        bias = evaluate(self.op, [torch.zeros_like(x)], weights)
        found = {}
        for part in parts:
            mine = torch.zeros(record.shape, dtype=x.dtype, device=x.device)
            mine[part.at] = 1.0
            found[part.rank] = evaluate(self.op, [x * mine.reshape(x.shape)], weights) - bias
        return bias, found

    # --- parts along an axis ------------------------------------------------------------------------------------------

    def _of_parts(self) -> Tries:
        yield from self._of_part_alone()
        made, said = self.known.exact.clone().reshape(self.record.shape), []
        for part in self.parts:
            if part.rank in self.trace.members and (shift := self._shift(part)):
                axis, size = len(part.at) - 1, part.record.shape[len(part.at) - 1]
                said.append(f"rank {part.rank} {self._shifted(part, shift)}")
                made[part.at] = self._at(part.start + shift, size, axis, made[part.at])
        if said:
            yield "part_elsewhere", "order", "; ".join(said), made

    def _of_part_alone(self) -> Tries:
        """A norm or a softmax over the rank's own part of the axis."""
        axis, y = len(self.parts[0].at) - 1, self.known.exact
        if axis != y.ndim - 1 or y.shape != self.record.shape:
            return
        made = y.clone()
        if self.op.kind == "rms_norm":
            eps, x = self.op.attrs["eps"], self.known.inputs[0].reshape(y.shape)
            for part in self.parts:
                of_all, of_part = (v.square().mean(-1, keepdim=True) + eps for v in (x, x[part.at]))
                made[part.at] *= (of_all / of_part).sqrt()
            yield "norm_of_part", "local", "every rank norms its part by that part's own mean of squares", made
        elif self.op.kind == "softmax":
            for part in self.parts:
                made[part.at] /= y[part.at].sum(-1, keepdim=True).clamp(min=1e-300)
            yield "softmax_of_part", "local", "every rank's probabilities add up to 1 over its own part", made

    def _shift(self, part: Part) -> int | None:
        """By how much further along the axis the right values lie that a part holds; None where it is right or has
        others.
        """
        axis, y = len(part.at) - 1, self.known.exact.reshape(self.record.shape)
        held = self._values(part)
        middle = held.shape[axis] // 2
        of = held.select(axis, middle).flatten()
        apart = (y.movedim(axis, 0).flatten(1) - of).square().sum(1)
        return int(apart.argmin()) - middle - part.start or None

    def _at(self, start: int, size: int, axis: int, otherwise: Tensor) -> Tensor:
        """The right values from `start` on; beyond the ends what was recorded, which nothing can be said of."""
        y, made = self.known.exact.reshape(self.record.shape), otherwise.clone()
        recorded = self.known.recorded.reshape(self.record.shape)
        first, last = max(start, 0), min(start + size, y.shape[axis])
        if last > first:
            made.narrow(axis, first - start, last - first).copy_(y.narrow(axis, first, last - first))
        for at in (*range(first - start), *range(last - start, size)):
            there = start + at
            if 0 <= there < recorded.shape[axis]:
                made.select(axis, at).copy_(recorded.select(axis, there))
        return made

    def _shifted(self, part: Part, shift: int) -> str:
        axis = len(part.at) - 1
        other = next((p for p in self.parts if p.start == part.start + shift), None)
        if other and other.shard and part.shard and other.record.shape == part.record.shape:
            return f"holds part {other.shard.rank} where part {part.shard.rank} of {part.shard.of} belongs"
        late = f"{abs(shift)} {'late' if shift > 0 else 'early'}"
        return f"has its part begin {late}: at {part.start + shift} of axis {axis}, where {part.start} belongs"

    # --- terms of a sum -----------------------------------------------------------------------------------------------

    def _of_terms(self) -> Tries:
        known, terms = self.known, {part.rank: self._values(part) for part in self.parts}
        if all(torch.equal(term, terms[self.parts[0].rank]) for term in terms.values()):
            text = f"every rank holds all of it: no term of a sum, which is {len(terms)} times what it should be"
            yield "term_is_whole", "all_reduce", text, len(terms) * known.exact
        if self.op.kind == "embedding":
            yield from self._of_vocabulary(terms)
        if not any(bool(term.any()) for term in terms.values()):
            yield "term_is_zero", "all_reduce", "every rank's term of the sum is 0", torch.zeros_like(known.exact)
        for a, b in combinations(terms, 2):
            # Whole rows: in half precision single values of different ones are equal by chance.
            both = (terms[a] == terms[b]).all(-1, keepdim=True) & terms[a].any(-1, keepdim=True)
            if bool(both.any()):
                rows = both.expand(known.exact.shape)
                text = f"ranks {a} and {b} both compute {self._experts(rows)}, so that it counts twice"
                yield "expert_twice", "experts", text, torch.where(rows, known.recorded, known.exact)
        none = ~torch.stack([*terms.values()]).any(0).any(-1, keepdim=True).expand(known.exact.shape)
        if self.op.kind != "linear" and bool(none.any()):
            text = f"no rank computes {self._left_out(none)}"
            yield "expert_nowhere", "experts", text, known.exact.masked_fill(none, 0.0)

    def _experts(self, where: Tensor) -> str:
        """Which experts' rows these are."""
        if not self._is_by_expert(where):
            return "the same rows"
        ids = sorted(self._chosen(where))
        return f"expert{'s' * (len(ids) > 1)} {few(ids)}"

    def _left_out(self, where: Tensor) -> str:
        """The experts whose rows these are, where they are all that these make: a capacity that is too small drops
        tokens.
        """
        if not self._is_by_expert(where):
            return "some rows"
        if self._chosen(where).isdisjoint(self._chosen(~where)):
            return self._experts(where)
        tokens = torch.nonzero(where.any(-1).any(-1)).flatten().tolist()
        return f"some of the experts that token{'s' * (len(tokens) > 1)} {few(tokens)} chose"

    def _is_by_expert(self, where: Tensor) -> bool:
        return self.op.kind == "linear_id" and where.ndim == 3

    def _chosen(self, where: Tensor) -> set[int]:
        """The experts of rows [token, slot] that any of these values are in."""
        return {int(i) for i in self.known.inputs[-1].reshape(where.shape[:2])[where.any(-1)]}

    def _of_vocabulary(self, terms: dict[int, Tensor]) -> Tries:
        tokens, y = self.known.inputs[0], self.known.exact
        for rank, term in terms.items():
            mine = term.any(-1, keepdim=True)
            for shift in sorted(range(-_SHIFTS, _SHIFTS + 1), key=abs)[1:]:
                there = (tokens + shift).clamp(0, self.op.weights[0].shape[0] - 1)
                text = f"the vocabulary of rank {rank} begins {abs(shift)} rows {'late' if shift > 0 else 'early'}"
                made = torch.where(mine, evaluate(self.op, [there], self.replay.weights), y)
                yield "vocabulary_shifted", "vocabulary", text, made
