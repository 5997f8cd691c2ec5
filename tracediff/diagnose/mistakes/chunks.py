"""Mistakes of scans that are computed many tokens at once: in what a chunk of tokens leaves for the next.

Kernels compute what tokens of a chunk make of one another as a matmul, and what came before it from the state that the
chunk began with (https://arxiv.org/abs/2405.21060, 6; https://arxiv.org/abs/2412.06464, 3).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Context, Variant, Variants, Where, computing, first_wrong
from tracediff.model.graph import Op
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.elementwise import softplus, softplus_as_computed
from tracediff.numerics.kinds.recurrent import gated_delta_net, in_chunks, ssm_scan

AREA = Area()
_PLANTED = 4  # tokens of a chunk


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A scan over the tokens of a chunk: what there is of each token and weights, its values [T, H, D], the state that
    it begins with and that which it leaves, [H, D, N], and the logarithms of how much each token leaves of a state,
    [T, H, 1, N or 1].
    """

    tokens: Sequence[Tensor]
    weights: Sequence[Tensor]
    values: Tensor
    begun: Tensor
    left: Tensor
    logs: Tensor

    @property
    def kept(self) -> Tensor:
        """What it leaves of the state that it begins with, but for what a delta rule takes away."""
        return torch.exp(self.logs.sum(0)) * self.begun


# Of a chunk its values, the state that the next begins with, and the one that is handed on to the next step.
_Wrong = Callable[[_Chunk], tuple[Tensor, Tensor, Tensor]]


def _leaving(state: Callable[[_Chunk], Tensor]) -> _Wrong:
    """Another state, be it to the next chunk or the next step."""

    def wrong(chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
        left = state(chunk)
        return chunk.values, left, left

    return wrong


def _early(chunk: _Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """Values in which the state of before lacks each token's own decay."""
    c, sums = chunk.tokens[3], chunk.logs.cumsum(0)
    lacks = (torch.exp(sums - chunk.logs) - torch.exp(sums)) * chunk.begun
    read = c.repeat_interleave(chunk.begun.shape[0] // c.shape[1], 1)[:, :, None]
    return chunk.values + (lacks * read).sum(-1), chunk.left, chunk.left


def _late(chunk: _Chunk) -> Tensor:
    """The state, to which each token adds as much as its own decay leaves of that."""
    x, *others = chunk.tokens
    return _ssm(chunk.begun, (x * torch.exp(chunk.logs[..., 0]), *others), chunk.weights).left


_OF_STATES: Mapping[str, _Wrong] = MappingProxyType({
    "the state is not decayed from a chunk of {} tokens to the next": _leaving(lambda c: c.left + c.begun - c.kept),
    "each chunk of {} tokens begins with what the one before it added to the state, without what was there": _leaving(
        lambda c: c.left - c.kept
    ),
    "each chunk of {} tokens begins with an empty state": lambda c: (c.values, torch.zeros_like(c.left), c.left),
})  # fmt: skip
_OF_DECAYS: Mapping[str, _Wrong] = MappingProxyType({
    "what came before a chunk of {} tokens is decayed by one token too few in each token's value": _early,
    "what a token adds to the state that its chunk of {} leaves is decayed by that token, too": _leaving(_late),
})  # fmt: skip


def _variants(op: Op, context: Context, ways: Mapping[str, _Wrong]) -> Variants:
    for size in _sizes(op, context):
        for words, wrong in ways.items():
            changed = computing(op, partial(_in_chunks, op.kind, size, wrong))
            yield Variant(changed, words.format(size), fitted=context.seen is not None)


AREA.mistake(
    "chunk_state", "what a chunk of tokens leaves for the next is wrong",
    "the recurrence over chunks: state = state * the chunk's whole decay + what the chunk added",
    Where(("ssm_scan", "gated_delta_net")),
)(partial(_variants, ways=_OF_STATES))  # fmt: skip
AREA.mistake(
    "chunk_decay", "decays within a chunk of tokens count one token too few, or too many",
    "whether a sum of logarithms of decays holds the token's own: where the state is read, not where it is added to",
    Where(("ssm_scan",)),
)(partial(_variants, ways=_OF_DECAYS))  # fmt: skip


def _sizes(op: Op, context: Context) -> Sequence[int]:
    """Tokens of a chunk, by the first that is wrong: the second chunk's, or the third's, where the first begins with
    nothing.
    """
    if op.attrs.get("snapshots", 1) != 1:
        return ()
    first = _first(op, context)
    return [first // n for n in (2, 1) if first % n == 0 and first // n > 1]


def _first(op: Op, context: Context) -> int:
    kind, seen = KINDS[op.kind], context.seen
    if seen is None:
        return context.wrong_from() if context.wrong_from else 2 * _PLANTED
    shape = torch.Size(kind.of_tokens(seen.inputs) or ())
    whole = kind.function(*seen.inputs, **op.attrs), seen.output
    right, y = (of.flatten()[: shape.numel()].reshape(shape[0], -1) for of in whole)
    return first_wrong(right - y, right) or 0


def _in_chunks(kind: str, size: int, wrong: _Wrong, *inputs: Tensor, snapshots: int = 1) -> Tensor:
    """A scan that is computed so many tokens at once; of one token there is another kernel."""
    state, of_tokens, weights = _parted(kind, inputs)
    if len(of_tokens[0]) == 1:
        return KINDS[kind].function(*inputs)
    values, handed = list[Tensor](), state
    for at in range(0, len(of_tokens[0]), size):
        chunk = _SCAN[kind](state, [x[at : at + size] for x in of_tokens], weights)
        made, state, handed = wrong(chunk)
        values.append(made.flatten())
    return torch.cat((*values, handed.flatten()))


def _parted(kind: str, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The state [H, D, N], what there is of each token, and weights."""
    if kind == "ssm_scan":
        state, *of_tokens, a = inputs
        return state.reshape(*of_tokens[0].shape[1:], -1), of_tokens, [a]
    *of_tokens, state = inputs
    return state.reshape(*of_tokens[2].shape[1:], -1), of_tokens, []


def _ssm(state: Tensor, tokens: Sequence[Tensor], weights: Sequence[Tensor]) -> _Chunk:
    x, dt, b, c = tokens
    (a,) = weights
    logs = (softplus(dt)[..., None] * a.reshape(x.shape[1], -1))[:, :, None]
    made = ssm_scan(state, x, dt, b, c, a, softplus=softplus_as_computed, logs=in_chunks)
    values, left = made[: x.numel()].reshape(x.shape), made[x.numel() :].reshape(state.shape)
    return _Chunk(tokens, weights, values, state, left, logs)


def _delta(state: Tensor, tokens: Sequence[Tensor], weights: Sequence[Tensor]) -> _Chunk:
    q, k, v, gate, beta = tokens
    made = gated_delta_net(q, k, v, gate, beta, state, logs=in_chunks)
    values, left = made[: v.numel()].reshape(v.shape), made[v.numel() :].reshape(state.shape)
    return _Chunk(tokens, weights, values, state, left, gate.reshape(*v.shape[:2], 1, -1))


_SCAN = {"ssm_scan": _ssm, "gated_delta_net": _delta}
