"""Which cached keys and values a token attended to, where these are not its own: told by what came of it.

Attention is a mean of values, weighted by e_j = exp(scale q.k_j). Of every row j that any sequence has cached so far
key and value are known, so what was made of a token, y, tells which of them were read: sum_j x_j e_j (v_j - y) = 0 in
each channel of each head, where x_j is how often j was read. That is linear in x, with as many equations as y has
values. A head's sink is one more row, whose value is 0. Of a row that no sequence cached, as in a slot that nobody
wrote to, neither is known: then y = a + w (u - a) with one value u for all heads of a group and all tokens, a share w
of each, and the mean a over the rest; u and 1 / w are linear in what is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tracediff.diagnose.rows.told import OF_ERROR, Row, Told
from tracediff.english import listed, ranges
from tracediff.model.graph import Op
from tracediff.names import plain_step
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.kinds.attention import VISIBLE
from tracediff.numerics.nmse import nmse
from tracediff.numerics.views import seen
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

_LITTLE = 1e-5  # NMSE: a cache in half precision leaves less, any other set of rows far more
_MOST = 1 << 21  # values of one system of equations: it takes a second
_ALL = 1 << 23  # of those of all tokens: beyond it three are asked
_PRODUCTS = 1 << 33  # of all queries with all keys
_SURE = 0.25  # so near to a whole number is how often a row was read
_ALIKE = 1e-3  # of shares: queries that differ give a key others
_PLACES = 64  # of a row that may be another: of more the first and the last are asked
_EQUATIONS = 2  # outputs, of a token's head each, that tell a value that is unknown

_READ = "attention reads other rows of the cache than the token's own"
_LOOK = "block tables, slots and lengths: which rows of the cache a query reads, and where a step writes its own"
_NOWHERE = "a key and value that no step has cached"


@dataclass(frozen=True, slots=True)
class _Attention:
    """What was made of queries [T, H, D], `y` [T, H, D], and what they could read: keys and values [N, G, D], each of
    one of `rows`, or of several that are alike. Which of them each query should see, bool [T, N].

    `sinks` [H, 1] are scores of a row that is none: after the others its values are 0, and each query sees it once.
    """

    q: Tensor
    y: Tensor
    keys: Tensor
    values: Tensor
    rows: Sequence[Sequence[Row]]
    sees: Tensor
    sinks: Tensor | None = None

    def weights(self, t: int) -> Tensor:
        """Of each row for a token, [H, N], the largest 1."""
        q = self.q[t].unflatten(0, (self.keys.shape[1], -1))  # G, H/G, D
        logits = (q @ self.keys.permute(1, 2, 0)).flatten(0, 1)
        if self.sinks is not None:
            logits = torch.cat((logits, self.sinks), 1)
        return (logits - logits.amax(1, keepdim=True)).exp()

    def rows_of(self, times: Tensor) -> Tensor:
        """Without the sink."""
        return times[..., : len(self.rows)]

    def mean(self, t: int, times: Tensor) -> Tensor:
        """What comes of a token that reads each row so many times, [H, D]; NaN where it reads none."""
        shares = self.weights(t) * times
        shares = (shares / shares.sum(1, keepdim=True)).unflatten(0, (self.keys.shape[1], -1))
        return (shares @ self.values.permute(1, 0, 2)).flatten(0, 1)

    def error(self, t: int) -> float:
        """NMSE of what a token should read."""
        return nmse(self.mean(t, self.sees[t].double()), self.y[t])


def told(replay: Replay, record: OpRecord, scheme: Scheme) -> Told | None:
    """What tokens attended to that they should not have; None where that cannot be told. Of a record of attention's
    output whose scores were not recorded.
    """
    attention = _attention(replay, record, scheme)
    if attention is None:
        return None
    positions, own = replay.trace.steps[record.step].positions, replay.trace.steps[record.step].sequence
    made = torch.stack([attention.mean(t, of.double()) for t, of in enumerate(attention.sees)])
    wrong = [t for t, (right, y) in enumerate(zip(made, attention.y, strict=True)) if not nmse(right, y) <= _LITTLE]
    if len(wrong) * attention.y[0].numel() * len(attention.rows) > _ALL:
        asked = [*dict.fromkeys((wrong[0], wrong[len(wrong) // 2], wrong[-1]))]
    else:
        asked = wrong
    texts: dict[int, str] = {}
    for t in asked:
        times = _read(attention, t)
        if times is not None:
            made[t] = attention.mean(t, times)
            read, right = (_words(attention.rows, attention.rows_of(n), own) for n in (times, attention.sees[t]))
            texts[t] = f"the token at position {positions[t]} attends to {read}, not to {right}"
    rest = [t for t in asked if t not in texts]
    for some in [rest, *([t] for t in rest)] if rest else ():
        unknown = None if some[0] in texts else _unknown(attention, some)
        if unknown:
            where, made[some] = unknown
            at, s = ranges([positions[t] for t in some]), "s" * (len(some) > 1)
            who = f"the token{s} at position{s} {at} attend{'s' * (not s)} to {_NOWHERE}"
            texts |= dict.fromkeys(some, f"{who}, {where}: as in a slot that was never written to")
    left = nmse(made, attention.y) if len(texts) == len(wrong) else math.inf
    return Told(texts[min(texts)], left, _READ, _LOOK, is_sure=not rest) if texts else None


def _attention(replay: Replay, record: OpRecord, scheme: Scheme) -> _Attention | None:
    """The attention that ends in the record; None where it is of another sort, or a part of it was recorded."""
    graph = replay.graph
    out = graph[record.op]
    softmax = graph.ops.get(out.inputs[0]) if out.kind == "weighted_values" else None
    scores = graph.ops.get(softmax.inputs[0]) if softmax and softmax.kind == "softmax" else None
    if softmax is None or scores is None or scores.kind != "scores" or record.rows is not None:
        return None
    is_plain = len(softmax.inputs) == 3 and softmax.attrs.keys() <= {"scale", *VISIBLE}
    if not is_plain or not {softmax.name, scores.name} <= {*replay.segment(record)}:
        return None
    if math.prod(record.shape) * len(replay.trace.positions_until(record.step)) > _PRODUCTS:
        return None
    q, k = replay.supposed(record, scores.name, scheme).inputs[:2]
    probs, v = replay.supposed(record, out.name, scheme).inputs[:2]
    y = replay.known(record, scheme).recorded.unflatten(-1, (q.shape[1], -1))
    if not all(bool(x.isfinite().all()) for x in (q, k, v, y)) or not bool((probs > 0).any(0).any(-1).all()):
        return None
    most = min(y[0].numel() - 1, _MOST // y[0].numel())  # more rows than equations tell nothing
    rows, (keys, values) = cached_by_all(replay, record, ((scores, 1), (out, 1)), (k, v), most)
    alike = _alike(torch.cat((keys.flatten(1), values.flatten(1)), 1), len(k))
    sees = torch.zeros(len(y), len(alike), dtype=torch.bool, device=y.device)
    sees[:, : len(k)] = (probs > 0).any(0)
    q, new = q * float(softmax.attrs["scale"]), [*alike]
    keys, values, sinks = keys[new], values[new], None
    if softmax.weights:
        sinks = replay.weights.load(softmax.weights[0], q.dtype)[:, None]
        values = torch.cat((values, torch.zeros_like(values[:1])))
        sees = torch.cat((sees, torch.ones_like(sees[:, :1])), 1)
    return _Attention(q, y, keys, values, [[rows[i] for i in of] for of in alike.values()], sees, sinks)


def cached_by_all(
    replay: Replay, record: OpRecord, read: Sequence[tuple[Op, int]], own: Sequence[Tensor], most: int
) -> tuple[list[Row], list[Tensor]]:
    """What was cached until the record's step of these inputs of ops, as these see it, [N, G, D] each, and whose each
    row is: its own sequence's, and the others' as long as there are no more than so many.
    """
    trace = replay.trace
    sequence = trace.steps[record.step].sequence
    rows, cached = [(sequence, position) for position in range(len(own[0]))], [[values] for values in own]
    if len(at := trace.positions_until(record.step)) == len(rows):
        rows = [(sequence, int(position)) for position in at]
    for other, step in _others(replay, record).items():
        sizes = len(trace.steps[step].tokens), len(trace.positions_until(step))
        theirs = [_held(replay, step, op, i, sizes) for op, i in read]
        more = [(other, int(position)) for position in trace.positions_until(step)]
        are_told = all(values is not None and bool(values.isfinite().all()) for values in theirs)
        if are_told and len(rows) + len(more) <= most:
            rows += more
            for values, of, like in zip(theirs, cached, own, strict=True):
                assert values is not None
                of.append(values.reshape(-1, *like.shape[1:]))
    return rows, [torch.cat(of) for of in cached]


def _held(replay: Replay, step: int, op: Op, i: int, sizes: tuple[int, int]) -> Tensor | None:
    """What a step's cache holds of the op's input; None where it was not recorded."""
    values, view = replay.held(step, op.inputs[i], True), op.seen[i]
    return seen(view, *sizes, values) if view and values is not None else values


def _others(replay: Replay, record: OpRecord) -> Mapping[int, int]:
    """Of each other sequence its last step until the record's, itself included."""
    if len(replay.trace.sequences) == 1:  # of which a trace may have thousands of steps, and as many records that ask
        return {}
    steps, here = replay.trace.steps, plain_step(record.step)
    last = {step.sequence: number for number, step in steps.items() if plain_step(number) <= here}
    return {sequence: step for sequence, step in last.items() if sequence != steps[record.step].sequence}


def _alike(rows: Tensor, n_own: int) -> dict[int, list[int]]:
    """The first `n_own`, and of the others those that are unlike all before, each with those that are like it:
    sequences may begin alike.
    """
    sizes, found = rows.square().sum(1), {i: [i] for i in range(n_own)}
    for i in range(n_own, len(rows)):
        first = [*found]
        near = (rows[first] - rows[i]).square().sum(1) <= _LITTLE * sizes[i]
        found.setdefault(first[int(near.nonzero()[0])] if bool(near.any()) else i, []).append(i)
    return found


def _read(attention: _Attention, t: int) -> Tensor | None:
    """How often a token read each row, [N]; None where no numbers of times give what was made of it."""
    y, weights = attention.y[t], attention.weights(t)
    n_heads, n_rows = weights.shape
    if y.numel() <= n_rows or y.numel() * n_rows > _MOST:
        return None
    values = attention.values.repeat_interleave(n_heads // attention.values.shape[1], 1).permute(1, 2, 0)  # H, D, N
    equations = (weights[:, None] * (values - y[..., None])).flatten(0, 1)
    sizes = equations.square().sum(0).sqrt().clamp(min=1e-300)
    vector = torch.linalg.svd(equations / sizes, full_matrices=False).Vh[-1]
    found, sees, enough = vector / sizes, attention.sees[t].double(), min(_LITTLE, OF_ERROR * attention.error(t))
    for most in (1, 2):  # times that the row which tells most was read
        times = most * found / found[vector.abs().argmax()]
        whole = times.round()
        whole = torch.where(((times - whole).abs() <= _SURE) & (whole >= 0), whole, sees)
        if bool(attention.rows_of(whole).any()) and nmse(attention.mean(t, whole), y) <= enough:
            return whole
    return None


def _unknown(attention: _Attention, tokens: Sequence[int]) -> tuple[str, Tensor] | None:
    """Where these tokens read one row that nobody cached, in words, and what comes of that, [T, H, D]; None where that
    is not so.
    """
    sees = attention.sees[[*tokens]]
    if (made := _with_one_more(attention, tokens, sees)) is not None:
        return "beside those that it should read", made
    instead = attention.rows_of(sees).any(0).nonzero().flatten().tolist()
    for row in instead if len(instead) <= _PLACES else (instead[0], instead[-1]):
        others = sees.clone()
        others[:, row] = False
        if (made := _with_one_more(attention, tokens, others)) is not None:
            return f"in the place of position {attention.rows[row][0][1]}", made
    own = torch.zeros_like(sees)
    own[range(len(tokens)), [int(of.nonzero()[-1]) for of in attention.rows_of(sees)]] = True
    made = _with_one_more(attention, tokens, sees & ~own)
    return None if made is None else ("in the place of the last that each should read", made)


def _with_one_more(attention: _Attention, tokens: Sequence[int], sees: Tensor) -> Tensor | None:
    """What is made of tokens that read one unknown row beside those that each `sees`, [T, H, D]; None where no such row
    gives what was made.
    """
    groups, n_heads = attention.values.shape[1], attention.y.shape[1]
    means = torch.stack([attention.mean(t, of.double()) for t, of in zip(tokens, sees, strict=True)])
    ys = attention.y[[*tokens]]  # T, H, D; of means NaN where nothing is seen
    means, ys = (x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(1, 2) for x in (means, ys))  # G, n, D
    enough = min(_LITTLE, OF_ERROR * min(map(attention.error, tokens)))
    if ys.shape[1] < _EQUATIONS:
        return None
    made = list[Tensor]()
    for mean, y, cached in zip(means, ys, attention.values.transpose(0, 1), strict=True):
        alone = mean.isnan()
        at, along = torch.where(alone, y, mean), torch.where(alone, 0.0, y - mean)
        along = along / along.square().sum(1, keepdim=True).sqrt().clamp(min=1e-300)
        if bool(((along @ along[0]).abs() > 1 - _LITTLE).all()):  # as a row that is counted otherwise: they never meet
            return None
        across = len(y) * torch.eye(y.shape[1], dtype=y.dtype, device=y.device) - along.T @ along
        unknown = torch.linalg.lstsq(across, (at - along * (along * at).sum(1, keepdim=True)).sum(0)).solution
        away = unknown - at
        share = ((y - at) * away).sum(1, keepdim=True) / away.square().sum(1, keepdim=True).clamp(min=1e-300)
        made.append(torch.where(alone, unknown, at + share * away))
        is_cached = (cached - unknown).square().sum(1) <= _LITTLE * unknown.square().sum()
        if not nmse(made[-1], y) <= enough or bool(((share < 0) | (share > 1)).any()) or bool(is_cached.any()):
            return None
        if _is_a_function(unknown, share, y):
            return None
    return torch.stack(made).unflatten(1, (len(tokens), -1)).transpose(0, 1).reshape(len(tokens), n_heads, -1)


def _is_a_function(unknown: Tensor, share: Tensor, y: Tensor) -> bool:
    """Whether it may be a factor and an offset of what is right, which leave lines through one point as well: nothing
    tells a row from them that is zero, or has the same share of all that reads it.
    """
    is_zero = unknown.square().mean() <= _LITTLE * y.square().mean()
    return bool(is_zero) or bool(share.amax() - share.amin() <= _ALIKE * share.amax())


def _words(rows: Sequence[Sequence[Row]], times: Tensor, own: int) -> str:
    """Which rows these are: of one sequence where they may be, the token's own first."""
    read = [(of, int(n)) for of, n in zip(rows, times.tolist(), strict=True) if n]
    every = [{sequence for sequence, _ in of} for of, _ in read]
    one = min(set.intersection(*every), key=lambda sequence: sequence != own, default=None)
    found: dict[tuple[bool, int, int], list[int]] = {}
    for of, n in read:
        each = sorted(of, key=lambda row: row[0] != one)[:n]  # of rows that are alike nobody knows which was read
        for sequence, position in each:
            found.setdefault((sequence != own, sequence, n if len(each) < n else 1), []).append(position)
    parts = []
    for (other, sequence, n), at in sorted(found.items()):
        whose, often = f" of sequence {sequence}" * other, f"{n} times " * (n > 1)
        parts.append(f"{often}position{'s' * (len(at) > 1)} {ranges(sorted(at))}{whose}")
    return listed(parts, len(parts))
