"""Mistakes of scans that are computed many tokens at once: in what a chunk of tokens leaves for the next.

Kernels compute what tokens of a chunk make of one another as a matmul, and what came before it from the state that the
chunk began with (https://arxiv.org/abs/2405.21060, 6; https://arxiv.org/abs/2412.06464, 3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Context, Seen, Variant, Variants, Where, computing
from tracediff.model.graph import Op
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.elementwise import softplus
from tracediff.numerics.kinds.recurrent import gated_delta_net, in_chunks, ssm_scan

AREA = Area()
_PLANTED = 4  # tokens of a chunk
_WRONG = 1e-3  # of a token's values: far more than rounding
_SCANS = ("ssm_scan", "gated_delta_net")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A scan over the tokens of a chunk: its values [T, H, D], the state that it begins with and that which it leaves,
    [H, D, N], and the logarithms of how much each token leaves of a state, [T, H, 1, N or 1].
    """

    values: Tensor
    begun: Tensor
    left: Tensor
    logs: Tensor

    @property
    def share(self) -> Tensor:
        """How much of what it begins with is in what it leaves, but for what a delta rule takes away."""
        return torch.exp(self.logs.sum(0))


# Of a chunk what the next begins with, and what is handed on to the next step.
_Border = Callable[[_Chunk], tuple[Tensor, Tensor]]


def _same(state: Tensor) -> tuple[Tensor, Tensor]:
    return state, state


_BORDERS: dict[str, _Border] = {
    "the state is not decayed from a chunk of {} tokens to the next": lambda c: _same(c.left + (1 - c.share) * c.begun),
    "each chunk of {} tokens begins with what the one before it added to the state, without what was there": lambda c: (
        _same(c.left - c.share * c.begun)
    ),
    "each chunk of {} tokens begins with an empty state": lambda c: (torch.zeros_like(c.left), c.left),
}


@AREA.mistake(
    "chunk_state", "what a chunk of tokens leaves for the next is wrong",
    "the recurrence over chunks: state = state * the chunk's whole decay + what the chunk added", Where(_SCANS),
)  # fmt: skip
def _state(op: Op, context: Context) -> Variants:
    for size in _sizes(op, context):
        for words, border in _BORDERS.items():
            changed = computing(op, partial(_in_chunks, op.kind, size, border))
            yield Variant(changed, words.format(size), fitted=context.seen is not None)


@AREA.mistake(
    "chunk_decay", "decays within a chunk of tokens count one token too few, or too many",
    "whether a sum of logarithms of decays holds the token's own: where the state is read, not where it is added to",
    Where(("ssm_scan",)),
)  # fmt: skip
def _decay(op: Op, context: Context) -> Variants:
    for size in _sizes(op, context):
        early = "what came before a chunk of {} tokens is decayed by one token too few in each token's value"
        changed = computing(op, partial(_in_chunks, op.kind, size, lambda c: _same(c.left), early=True))
        yield Variant(changed, early.format(size), fitted=context.seen is not None)
        words = f"what a token adds to the state that its chunk of {size} leaves is decayed by that token, too"
        changed = computing(op, partial(_in_chunks, op.kind, size, lambda c: _same(c.left), late=True))
        yield Variant(changed, words, fitted=context.seen is not None)


def _sizes(op: Op, context: Context) -> Sequence[int]:
    """Tokens of a chunk, by the first that is wrong: the second chunk's, or the third's, where the first begins with
    nothing.
    """
    if op.attrs.get("snapshots", 1) != 1:
        return ()
    if context.seen:
        first = _first_wrong(op, context.seen)
    else:
        first = context.wrong_from() if context.wrong_from else 2 * _PLANTED
    return [first // n for n in (2, 1) if first % n == 0 and first // n > 1]


def _first_wrong(op: Op, seen: Seen) -> int:
    kind = KINDS[op.kind]
    shape = seen.inputs[kind.inputs.index(kind.shaped_as)].shape
    made = kind.function(*seen.inputs, **op.attrs)
    right, y = (whole.flatten()[: shape.numel()].reshape(shape[0], -1) for whole in (made, seen.output))
    wrong = torch.nonzero((right - y).norm(dim=1) > _WRONG * right.norm(dim=1)).flatten()
    return int(wrong[0]) if len(wrong) else 0


def _in_chunks(
    kind: str, size: int, border: _Border, *inputs: Tensor, early: bool = False, late: bool = False, snapshots: int = 1
) -> Tensor:
    """A scan that is computed so many tokens at once; of one token there is another kernel."""
    scan, values, at = partial(_SCAN[kind], late=late), list[Tensor](), 0
    state, of_tokens, weights = _parted(kind, inputs)
    if len(of_tokens[0]) == 1:
        return KINDS[kind].function(*inputs)
    handed = state
    while at < len(of_tokens[0]):
        tokens = [x[at : at + size] for x in of_tokens]
        chunk = scan(state, tokens, weights)
        if early:
            c, sums = tokens[3], chunk.logs.cumsum(0)
            lacks = torch.exp(sums - chunk.logs) - torch.exp(sums)
            heads = chunk.begun.shape[0] // c.shape[1]
            lacking = (lacks * chunk.begun * c.repeat_interleave(heads, 1)[:, :, None]).sum(-1)
            values.append((chunk.values + lacking).flatten())
        else:
            values.append(chunk.values.flatten())
        state, handed = border(chunk)
        at += size
    return torch.cat((*values, handed.flatten()))


def _parted(kind: str, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The state [H, D, N], what there is of each token, and weights."""
    if kind == "ssm_scan":
        state, *of_tokens, a = inputs
        return state.reshape(*of_tokens[0].shape[1:], -1), of_tokens, [a]
    *of_tokens, state = inputs
    return state.reshape(*of_tokens[2].shape[1:], -1), of_tokens, []


def _ssm(state: Tensor, tokens: Sequence[Tensor], weights: Sequence[Tensor], late: bool) -> _Chunk:
    x, dt, b, c = tokens
    (a,) = weights
    logs = (softplus(dt)[..., None] * a.reshape(x.shape[1], -1))[:, :, None]
    made = ssm_scan(state, x, dt, b, c, a, logs=in_chunks)
    values, left = made[: x.numel()].reshape(x.shape), made[x.numel() :]
    if late:
        left = ssm_scan(state, x * torch.exp(logs[..., 0]), dt, b, c, a, logs=in_chunks)[x.numel() :]
    return _Chunk(values, state, left.reshape(state.shape), logs)


def _delta(state: Tensor, tokens: Sequence[Tensor], weights: Sequence[Tensor], late: bool) -> _Chunk:
    q, k, v, gate, beta = tokens
    made = gated_delta_net(q, k, v, gate, beta, state, logs=in_chunks)
    values, left = made[: v.numel()].reshape(v.shape), made[v.numel() :].reshape(state.shape)
    return _Chunk(values, state, left, gate.reshape(*v.shape[:2], 1, -1))


_SCAN = {"ssm_scan": _ssm, "gated_delta_net": _delta}
