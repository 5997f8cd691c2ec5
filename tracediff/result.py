"""What crosses the stages and feeds the reports: frozen, printable, no arrays."""

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "faulty", "inherited", "drift", "unmatched"]
Verdict = Literal["match", "diverged"]
Reason = Literal["local", "drift", "weights", "unmatched"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Over the finite values of one side."""

    min: float | None
    max: float | None
    mean: float | None
    rms: float | None
    nan: int = 0
    inf: int = 0


@dataclass(frozen=True, slots=True)
class Worst:
    """The element that differs most, and both values there."""

    at: tuple[int, ...]
    reference: float
    candidate: float


@dataclass(frozen=True, slots=True)
class Drift:
    """Candidate against reference. `nmse` is sum((c - r)^2) / sum(r^2); the first token apart from the rest."""

    nmse: float
    cosine: float
    max_abs: float
    worst: Worst
    first_token_nmse: float | None = None
    other_tokens_nmse: float | None = None


@dataclass(frozen=True, slots=True)
class Local:
    """An op's own error: what was recorded against its replay from the same trace's inputs.

    `floor` is the NMSE that honest arithmetic can make; `excess` the largest error of one element over its
    bound (above 1 is a fault); `segment` the ops that were recomputed, those without recorded inputs included.
    """

    nmse: float
    floor: float
    excess: float
    worst: Worst
    arithmetic: str
    segment: tuple[str, ...]
    flips: int = 0
    sharpness: float = 0.0  # the smallest relative scale error that would exceed the floor

    @property
    def faulty(self) -> bool:
        """Whether the error is more than arithmetic explains."""
        return not (self.excess <= 1.0 and self.nmse <= self.floor)


@dataclass(frozen=True, slots=True)
class Cause:
    """A known mistake that brings the error down to the floor."""

    name: str
    nmse: float
    text: str


@dataclass(frozen=True, slots=True)
class OpResult:
    """Everything known of one op in one step."""

    op: str
    step: int
    layer: int | None
    kind: str
    status: Status
    reference: Statistics | None = None
    candidate: Statistics | None = None
    drift: Drift | None = None
    tolerance: float | None = None
    local: Local | None = None
    reference_local: Local | None = None
    cause: Cause | None = None
    shape: str | None = None  # the error's shape in words, where no cause fits
    note: str | None = None


@dataclass(frozen=True, slots=True)
class WeightResult:
    """A weight as the candidate holds it, beside the reference's or the file's."""

    weight: str
    status: Literal["identical", "rounded", "wrong", "unmatched"]
    reference: Statistics | None
    candidate: Statistics | None
    max_abs: float | None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A candidate for the next token."""

    id: int
    text: str | None
    logit: float
    probability: float
    other_rank: int  # its rank on the other side, 1 is first


@dataclass(frozen=True, slots=True)
class Logits:
    """Next-token distributions of one step, at its last position."""

    step: int
    reference: tuple[Token, ...]
    candidate: tuple[Token, ...]
    kl: float  # of the candidate's distribution from the reference's, in nats
    same_argmax: bool
    margin: float  # between the reference's two best logits
    max_diff: float  # the largest difference of a logit between the two sides
    nmse: float

    @property
    def explained(self) -> bool:
        """Whether another argmax is a near tie: logits all but agree, and differ by as much as the best two do."""
        return self.same_argmax or (self.nmse < 0.01 and self.margin <= 2 * self.max_diff)


@dataclass(frozen=True, slots=True)
class Listing:
    """A titled table of words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first op that diverges."""

    op: str
    step: int
    layer: int | None
    reason: Reason


@dataclass(frozen=True, slots=True)
class Side:
    """One trace, as the report names it."""

    path: str
    engine: str
    model: str | None
    n_ops: int
    cut: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one comparison or check."""

    verdict: Verdict
    first_divergence: Divergence | None
    ops: tuple[OpResult, ...]
    weights: tuple[WeightResult, ...]
    logits: tuple[Logits, ...]
    reference: Side | None
    candidate: Side
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    arithmetic: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def faulty(self) -> list[OpResult]:
        """The ops that are wrong by themselves."""
        return [op for op in self.ops if op.status == "faulty"]
