"""One record looked at under one scheme: what replay leaves of it, beside what honest arithmetic may.

A pure function of the record, the scheme and what recomputes it: the model's ops, or those of a hypothesis.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice

import torch
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.numerics.arithmetic import Arithmetic, Scheme
from tracediff.numerics.evaluate import arithmetic_of, in_words_of
from tracediff.numerics.floats import HALVES
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.roundings import rounding_named
from tracediff.replay.making import Recomputed, picked
from tracediff.replay.recompute import Recomputation, made_together
from tracediff.replay.residual import Residual, is_cut_off, measure, turned, turned_in_table
from tracediff.replay.score import BLIND, FAR_BELOW, NOTHING, SHAPE, SINGLE, UNKNOWN, Explanation
from tracediff.replay.strips import strips
from tracediff.result import Judgement, Local, Strip, Worst
from tracediff.trace.format import OpRecord
from tracediff.trace.statistics import ratio

_TYPED = ("linear", "linear_id", "embedding")  # kinds whose first weight has a type worth telling
_OF_SCORES = ("scale", "tanh")  # kinds that scores pass through before they are masked
PART = 1 << 21  # values of an op that are judged at a time: 16 MB in float64, which the allocator reuses
# What tells an arithmetic: values, of which one is rounded by what rounds anything, made of so many weights. Of a
# decoded token so many values are all there are, and each look would round the whole matrix again.
_GLANCE = 1 << 14
_GLANCE_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Asked:
    """A record to be looked at under a scheme, and what recomputes the ops of its trace."""

    by: Recomputation
    record: OpRecord
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Look:
    """A record under one scheme: what is left, what is expected to be, and what a factor or an offset would leave."""

    local: Local
    noise: float  # NMSE, as is the other
    shaped: float

    def explanations(self) -> Iterator[Explanation]:
        """What the record may be by this scheme: sound or mistaken, or off by a factor or an offset."""
        sound = self.local.judgement != "faulty"
        yield (
            Explanation(self.local.nmse, True, noise=self.noise)
            if sound
            else Explanation(self.local.nmse, False, UNKNOWN)
        )
        # Of next to nothing, the error of one row's sum of squares is a factor as well.
        if not (sound and self.local.nmse <= NOTHING):
            yield Explanation(self.shaped, False, SHAPE)


@dataclass(frozen=True, slots=True)
class Known:
    """What was recorded of an op, what it should be and how far an honest engine may be off, the op's inputs, and the
    arithmetic. All float64.
    """

    recorded: Tensor
    exact: Tensor
    bound: Tensor
    inputs: tuple[Tensor, ...]
    arithmetic: Arithmetic

    @property
    def wrong(self) -> Tensor:
        """Which values arithmetic does not explain, bool; one that is no number where one belongs among them."""
        alike = (self.recorded == self.exact) | (self.recorded.isnan() & self.exact.isnan())
        return ~(alike | ((self.recorded - self.exact).abs() <= self.bound))

    def of_tokens(self, op: Op) -> tuple[int, ...] | None:
        """The shape [T, H, D] of the tokens' values, where the op's output is one row of these and of states."""
        return KINDS[op.kind].of_tokens(self.inputs) if self.exact.ndim == 1 else None


def known(by: Recomputation, record: OpRecord, scheme: Scheme) -> Known:
    """All that is known of a record's op by itself, under this arithmetic."""
    op = by.op_of(record)
    read = tuple(value.exact for value in by.inputs(record.step, op, scheme, record.rows))
    values = by.recorded.values(record)
    made = by.op(record, op, scheme, _storage(Asked(by, record, scheme), values))
    recorded, bound = values.reshape(made.exact.shape), made.bound()
    hidden = _hidden(by, record, op)
    if hidden is not None:
        bound = bound.masked_fill(hidden, math.inf)
    if (others := _others(by, record, recorded)) is not None:
        recorded = torch.where(others, made.exact, recorded)
    return Known(recorded, made.exact, bound, read, arithmetic_of(op, scheme, by.weights))


def look(by: Recomputation, record: OpRecord, scheme: Scheme, glance: bool = False) -> Look:
    """The record under a scheme; at a `glance` so much of it as tells an arithmetic."""
    return look_together([Asked(by, record, scheme)], glance)[0]


def look_together(asked: Sequence[Asked], glance: bool = False) -> list[Look]:
    """Records of one op, be they of several steps and traces, each under a scheme: its weight is read once for all."""
    op = asked[0].by.op_of(asked[0].record)
    storages: list[str] = []
    residuals: list[list[Residual]] = [[] for _ in asked]
    made: list[Recomputed] = []
    shapes = [one.by.recorded.shape(one.record, one.record.rows) for one in asked]
    parts = _parts(op, shapes, glance, max(_rows_alike(op, one) for one in asked))
    for channels in islice(parts, 1) if glance else parts:
        part = op.channels(channels) if channels else op
        values = [one.by.values(one.record, channels) for one in asked]
        storages = storages or [_storage(a, x) for x, a in zip(values, asked, strict=True)]
        made = made_together(
            part, [(one.by, one.record, one.scheme, storage) for one, storage in zip(asked, storages, strict=True)]
        )
        for one, x, y, storage, of in zip(asked, values, made, storages, residuals, strict=True):
            as_stored = storage in HALVES and torch.equal(rounding_named(storage)(y.exact), x.reshape(y.exact.shape))
            of.append(replace(_residual(one, part, x, y), as_stored=as_stored, cut_off=_cut_off(x, y, storage)))
    return [
        _look(one, storage, last, reduce(operator.add, of))
        for one, storage, last, of in zip(asked, storages, made, residuals, strict=True)
    ]


def _cut_off(values: Tensor, made: Recomputed, storage: str) -> bool:
    """Whether an op's own values were cut off to half precision."""
    alone = storage in HALVES and len(made.segment) == 1
    return alone and is_cut_off(values.reshape(made.exact.shape), made.exact, storage)


def can_glance(by: Recomputation, record: OpRecord) -> bool:
    """Whether a glance at the record is less than all of it."""
    return glanced(by, record) is not by.op_of(record)


def glanced(by: Recomputation, record: OpRecord) -> Op:
    """So much of the record's op as tells an arithmetic."""
    op = by.op_of(record)
    channels = next(_parts(op, [by.recorded.shape(record, record.rows)], glance=True))
    return op.channels(channels) if channels else op


def _glance(op: Op, shapes: Sequence[tuple[int, ...]]) -> int:
    """How many values of an op tell its arithmetic."""
    n_in = op.weights[0].shape[-1] if op.weights else 1
    return min(_GLANCE, sum(shape[0] for shape in shapes) * max(1, _GLANCE_WEIGHTS // n_in))


def _rows_alike(op: Op, asked: Asked) -> int:
    """How many rows of the op's matrix are rounded together."""
    return rounding_named(arithmetic_of(op, asked.scheme, asked.by.weights).stored).n_rows


def _parts(op: Op, shapes: Sequence[tuple[int, ...]], glance: bool, multiple: int = 1) -> Iterator[slice | None]:
    """The channels of an op's outputs in parts, each enough for a glance or as many as are judged at a time, and a
    `multiple` of so many, where they are larger and made channel by channel; None for all.
    """
    size = _glance(op, shapes) if glance else PART
    whole = op.kind != "linear" or op.function or op.rework or any(w.read for w in op.weights)
    n_tokens, n = sum(shape[0] for shape in shapes), shapes[0][-1]
    if whole or len(shapes[0]) != 2 or n_tokens * n <= size:
        yield None
        return
    step = max(1, size // n_tokens // multiple) * multiple
    yield from (slice(at, min(at + step, n)) for at in range(0, n, step))


def _residual(asked: Asked, op: Op, recorded: Tensor, made: Recomputed) -> Residual:
    """What is left of an op or of a part of it."""
    by, record, scheme = asked.by, asked.record, asked.scheme
    chosen, right = recorded, made.exact
    if pick := KINDS[op.kind].picks:
        scores = by.inputs(record.step, op, scheme, record.rows)[0]
        recorded, made = pick(scores.exact, recorded), picked(made, scores, pick)
    first = op.weights[0].first - by.graph[op.name].weights[0].first if op.kind == "linear" else 0
    others = _others(by, record, recorded, first)
    residual = measure(recorded, made, _hidden(by, record, op), by.is_supposed, others)
    passes = residual.excess <= 1 and residual.error <= made.margin * residual.noise
    is_table = op.kind == "embedding"  # whose bounds have room for what may turn
    if by.has_noise and (is_table or (not passes and op.kind in ("linear", "linear_id"))) and len(made.segment) == 1:
        inputs = [value.exact for value in by.inputs(record.step, op, scheme, record.rows)]
        own = torch.ones_like(recorded, dtype=torch.bool) if others is None else ~others
        of = op, inputs, recorded, made, arithmetic_of(op, scheme, by.weights), by.weights
        other_way = turned_in_table(*of) if is_table else turned(*of, own)
        if other_way is not None:
            residual = measure(recorded, replace(made, exact=other_way[0]), None, by.is_supposed, others)
            residual = replace(residual, flips=other_way[1])
    worst = _choice(residual.worst, chosen, right) if pick else residual.worst
    return replace(residual, worst=_placed(worst, record, op))


def _choice(worst: Worst, chosen: Tensor, right: Tensor) -> Worst:
    """Of a choice the first place of that token which is another: what was compared are the scores there."""
    token = worst.at[:-1]
    others = torch.nonzero(chosen[token] != right[token]).flatten().tolist()
    if not others:
        return worst
    at = (*token, others[0])
    return replace(worst, at=at, reference=float(right[at]), candidate=float(chosen[at]))


def _look(asked: Asked, storage: str, made: Recomputed, whole: Residual) -> Look:
    """What was seen of the record; `made` is the last part of its op."""
    by, record, scheme = asked.by, asked.record, asked.scheme
    op, on_the_way = by.op_of(record), by.recorded.on_the_way.get(storage)
    nmse, noise = ratio(whole.error, whole.signal), ratio(whole.noise, whole.signal)
    floor = made.margin * noise
    # A table's rows that were rounded on the way to the file look as if the table were.
    rounding = [o for o in map(by.graph.__getitem__, made.segment) if not (on_the_way and o.kind == "embedding")]
    local = Local(
        nmse=nmse,
        floor=floor,
        excess=whole.excess,
        worst=whole.worst,
        arithmetic=in_words_of(rounding, scheme, by.weights),
        segment=made.segment,
        judgement="faulty" if scheme.single and nmse < SINGLE else _covered(nmse, floor, whole.excess),
        flips=whole.flips,
        sharpness=min(math.sqrt(floor), whole.sharpness),
        limit=max(NOTHING, nmse) if floor > BLIND else None,
        weight=op.weights[0].name if op.weights else None,
        weight_type=by.weights.type_of(op.weights[0]) if op.kind in _TYPED else None,
        stored=None if on_the_way else _stored(storage, made.exact),
        told=on_the_way is False,
        cut_off=whole.cut_off and not on_the_way,
        weights_nmse=made.weights_nmse,
        one_token=len(by.recorded.trace.steps[record.step].tokens) == 1,
        strips=_strips(by, op, whole),
        axes=KINDS[op.kind].axis_names(op, len(whole.worst.at)),
    )
    # What tensor cores cut off of sums of one sign is a factor as well.
    shaped = whole.error if arithmetic_of(op, scheme, by.weights).truncates else whole.shaped
    return Look(local, noise, ratio(shaped, whole.signal))


def _covered(nmse: float, floor: float, excess: float) -> Judgement:
    """What a floor alone says."""
    if not (excess <= 1.0 and nmse <= floor):
        return "faulty"
    told = FAR_BELOW * floor if math.isfinite(floor) else 0.0  # where there is a floor at all
    return "undecided" if floor > BLIND and nmse > max(NOTHING, told) else "sound"


def _storage(asked: Asked, values: Tensor) -> str:
    """What the engine stored them in. Rows of a table in half precision fit that whatever they are stored in."""
    storage, op = asked.by.recorded.stored(asked.record, values), asked.by.op_of(asked.record)
    is_table = op.kind == "embedding" and asked.by.weights.type_of(op.weights[0]).lower() == storage
    return (asked.record.dtype or "f32") if is_table else storage


def _stored(storage: str, exact: Tensor) -> str | None:
    """The type that these values were rounded to, where that is shorter than float32 and changes them."""
    rounded = storage in HALVES and not torch.equal(rounding_named(storage)(exact), exact)
    return storage if rounded else None


def _strips(by: Recomputation, op: Op, whole: Residual) -> tuple[Strip, ...]:
    """Where it is off; of values that attention weighted, whose heads lie side by side, by head as well."""
    if whole.excess <= 1 or by.is_supposed or not by.has_noise:
        return ()
    names = KINDS[op.kind].axis_names(op, len(whole.along))
    heads = by.graph[op.inputs[0]].axes[0] if op.kind == "weighted_values" else None
    return strips(whole.along, names, heads if isinstance(heads, int) else None)


def _hidden(by: Recomputation, record: OpRecord, op: Op) -> Tensor | None:
    """What the causal mask hides does not count: scores, scaled or capped, bool [T, S]. None of other ops, and without
    a cache.
    """
    while op.kind in _OF_SCORES and op.inputs and op.inputs[0] in by.graph:  # weights alone may be scaled
        op = by.graph[op.inputs[0]]
    masked = op.kind == "scores" and any(op.past)
    return by.recorded.hidden(record.step, record.rows) if masked else None


def _others(by: Recomputation, record: OpRecord, values: Tensor, first: int = 0) -> Tensor | None:
    """Which of a record's values, or of its channels from `first` on, other ranks answer for; None for none."""
    own = by.recorded.trace.own(record)
    if own is None:
        return None
    others = torch.ones(record.shape, dtype=torch.bool, device=values.device)
    for at in own:
        others[at] = False
    if record.rows is not None and len(record.rows) < len(others):  # a few tokens of the record
        others = others[list(record.rows)]
    if others.numel() != values.numel():
        others = others.flatten(1)[:, first : first + values.shape[-1]]
    return others.reshape(values.shape)


def _placed(worst: Worst, record: OpRecord, op: Op) -> Worst:
    """The coordinate in the whole output: of all its channels and of the step's tokens."""
    first = op.weights[0].first if op.kind == "linear" else 0
    return replace(worst, at=record.place((*worst.at[:-1], worst.at[-1] + first), record.rows))
