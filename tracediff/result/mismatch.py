"""How far apart two engines' log-probabilities of the same tokens are, and what makes them so."""

from dataclasses import dataclass, field
from typing import Literal

from tracediff.result.op import WeightResult
from tracediff.result.run import Side, Verdict
from tracediff.result.said import Finding


@dataclass(frozen=True, slots=True)
class TokenGap:
    """One token that was given other log-probabilities, in nats; `index` counts all tokens of the sequence from 0."""

    index: int
    token: int
    text: str | None
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Of the log-probabilities of `n` tokens, A's less B's, in nats.

    `k3` estimates KL(B, A) from tokens that B sampled: the mean of exp(gap) - 1 - gap (Schulman, "Approximating KL
    Divergence", http://joschu.net/blog/kl-approx.html). `kl` is the mean of KL(B, A) itself, where both sides have
    logits. `impossible` tokens, which one side gives no chance at all, are left out of all of these.
    """

    n: int
    mean: float
    mean_abs: float
    k3: float
    kl: float | None
    largest: float
    impossible: int = 0


@dataclass(frozen=True, slots=True)
class Processed:
    """One side's log-probabilities are those of the other after sampling's own steps, which leave `left` of the gap.

    `first` says what was applied first, where it makes a difference.
    """

    side: Literal["A", "B"]
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    first: Literal["temperature", "truncation"]
    left: float


@dataclass(frozen=True, slots=True)
class Share:
    """What one kind of op, or one op with a weight of its own, makes of the gap: 1 is all of it.

    `alone`: B's in A, all else A's. `last`: what is gone from the gap when A's is put into B. `added`: what it adds
    after those listed before it. Where the first two differ contributions interact, or routes flip. `a` and `b` say
    how each side computes it.
    """

    what: str
    name: str | None  # of what differs, for machines: rope_tables_bf16
    ops: tuple[str, ...]
    alone: float
    last: float
    added: float
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two traces of the same tokens: a trainer's, say, and a rollout's.

    `floor` is the mean |gap| that both sides' roundings explain, and `beyond` the one from which on it is a mismatch:
    between the two it is undecided. `noise` tells where they are from.
    """

    verdict: Verdict
    a: Side
    b: Side
    gap: Gap
    floor: float
    beyond: float
    noise: str
    worst: tuple[TokenGap, ...]
    processed: Processed | None = None
    shares: tuple[Share, ...] = ()
    rest: float | None = None  # of the gap that no share explains
    weights: dict[str, tuple[WeightResult, ...]] = field(default_factory=dict)  # wrong ones, by side
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    summary: str = ""
