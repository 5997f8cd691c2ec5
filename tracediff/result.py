"""What crosses the stages and feeds the reports: frozen, printable, no arrays."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

_OF_ONE = re.compile(r"[\d'._]")  # in names, numbers and quotes
Status = Literal["ok", "faulty", "inherited", "drift", "unmatched", "undecided"]
Verdict = Literal["match", "diverged", "undecided"]
Judgement = Literal["sound", "faulty", "undecided"]  # of one record by itself
Tokens = Literal["first", "others", "all"]  # which of a step
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
    """Candidate against reference. `nmse` is sum((c - r)^2) / sum(r^2); the first token apart from the rest.

    Infinite where elements are infinitely `apart`: one is NaN or Inf and the other is not the same, say.
    `of_statistics` alone it is the least that they prove, and a permutation proves nothing.
    """

    nmse: float
    cosine: float
    max_abs: float
    worst: Worst
    first_token_nmse: float | None = None
    other_tokens_nmse: float | None = None
    apart: int = 0
    of_statistics: bool = False


@dataclass(frozen=True, slots=True)
class Local:
    """An op's own error: what was recorded against its replay from the same trace's inputs.

    `floor` is the NMSE that honest arithmetic can make; `excess` the largest error of one element over its
    bound (above 1 is a fault); `segment` the ops that were recomputed, those without recorded inputs included.
    `undecided`: the floor hides everything, or a mistake would leave as little of it as the arithmetic does.
    """

    nmse: float
    floor: float
    excess: float
    worst: Worst
    arithmetic: str
    segment: tuple[str, ...]
    judgement: Judgement
    flips: int = 0
    sharpness: float = 0.0  # the smallest relative scale error that would exceed the floor
    limit: float | None = None  # what may be left of a sound record, where that is less than the floor
    weight_type: str | None = None  # of a matmul
    stored: str | None = None  # a type shorter than float32 that the values were rounded to, as f16 or bf16,
    told: bool = False  # and whether it is sure that the engine holds them so, and not who wrote the trace
    weights_nmse: float | None = None  # of a matmul whose weights the engine requantised: against the file's
    one_token: bool = False  # engines multiply a row by a matrix in another kernel than several

    @property
    def faulty(self) -> bool:
        """Whether the error is more than arithmetic explains, or a mistake explains it better."""
        return self.judgement == "faulty"

    @property
    def blind(self) -> bool:
        """Whether it cannot be told."""
        return self.judgement == "undecided"

    @property
    def resolving(self) -> float:
        """The NMSE beyond which no mistake is in what was recorded; infinite where replay is blind.

        What is left is a mistake and the noise of arithmetic, which is within the floor: so the mistake's size is at
        most that of the two together (triangle inequality of the RMS).
        """
        limit = self.floor if self.limit is None else self.limit
        return math.inf if self.blind else (math.sqrt(self.nmse) + math.sqrt(limit)) ** 2


@dataclass(frozen=True, slots=True)
class Cause:
    """Known mistakes that bring the error down to the floor: `floor` and `arithmetic` are those they fit under.

    The name "shape" is of a record that has another shape than the model's op: then nothing can be undone, and `nmse`
    and `floor` are NaN. One as a rule. Of several `name` and `text` are the names and texts of `each` together.
    """

    name: str
    nmse: float
    text: str
    floor: float
    arithmetic: str
    each: dict[str, str]


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

    @property
    def floor(self) -> float | None:
        """What honest arithmetic can make of it: under the cause where there is one, for else nothing fitted.

        A segment's floor may be so wide under the cause that it would cover the error as well: then the one without.
        """
        if self.local is None:
            return None
        return self.cause.floor if self.cause and self.cause.floor < self.local.nmse else self.local.floor

    @property
    def resolving(self) -> float:
        """The NMSE of a mistake that would have been seen, by replay, else by drift; infinite where none would."""
        if self.local and not self.local.blind:
            return self.local.resolving
        by_drift = self.drift is not None and not self.drift.of_statistics and self.tolerance is not None
        return self.tolerance if by_drift else math.inf  # type: ignore[return-value]

    @property
    def told(self) -> bool:
        """Whether it was looked at and is as it should be, be it by replay alone where the other side lacks it."""
        return (self.status == "ok" and self.drift is not None) or (
            self.status in ("ok", "unmatched") and self.local is not None
        )

    @property
    def arithmetic(self) -> str | None:
        """How it was computed, as far as replay can tell; under the cause where there is one."""
        return self.cause.arithmetic if self.cause else self.local.arithmetic if self.local else None


@dataclass(frozen=True, slots=True)
class WeightResult:
    """A weight as the candidate holds it, beside the reference's or the file's."""

    weight: str
    status: Literal["identical", "rounded", "wrong", "unmatched"]
    reference: Statistics | None
    candidate: Statistics | None
    max_abs: float | None
    note: str | None = None
    cause: str | None = None  # the name of the loader's mistake that `note` puts in words


@dataclass(frozen=True, slots=True)
class Token:
    """A candidate for the next token."""

    id: int
    text: str | None
    logit: float
    probability: float
    other_rank: int  # its rank on the other side, 1 is first
    recomputed: float | None = None  # in float64 from this side's own final hidden state and the file's head


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
    head: str | None = None  # the file's tensor that logits were recomputed with

    @property
    def explained(self) -> bool:
        """Whether another argmax is a near tie: logits all but agree, and differ by as much as the best two do."""
        return self.same_argmax or (self.nmse < 0.01 and self.margin <= 2 * self.max_diff)


@dataclass(frozen=True, slots=True)
class Growth:
    """How many times larger the hidden state's RMS is at `op`, after the last layer, than at the embedding."""

    tokens: Tokens
    op: str
    reference: float | None
    candidate: float


@dataclass(frozen=True, slots=True)
class Lean:
    """The candidate's largest |mean| / RMS of a hidden state; the reference's there, and its largest.

    Chance alone makes about 1 / sqrt(channels) of it.
    """

    tokens: Tokens
    op: str
    step: int
    channels: int
    reference: float | None
    candidate: float
    reference_largest: float | None


@dataclass(frozen=True, slots=True)
class Likeness:
    """Of two values of the same side."""

    nmse: float
    cosine: float


@dataclass(frozen=True, slots=True)
class StepEnds:
    """How alike the last token's final hidden states of two consecutive steps are, on each side."""

    op: str
    steps: tuple[int, int]
    reference: Likeness | None
    candidate: Likeness


@dataclass(frozen=True, slots=True)
class Normal:
    """What looks alarming and may be normal."""

    growth: tuple[Growth, ...] = ()
    means: tuple[Lean, ...] = ()
    ends: tuple[StepEnds, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops that were judged together, the recorded one last. `record` are those to record next: parts of at most
    `largest` ops are left then.
    """

    op: str
    step: int
    ops: tuple[str, ...]
    floor: float
    resolving: float
    blind: bool
    faulty: bool
    record: tuple[str, ...]
    largest: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the model a trace lets replay judge: of `n_ops` in all steps so many `alone`, and in segments."""

    n_ops: int
    alone: int
    together: int
    segments: tuple[Segment, ...]
    unjudged: tuple[str, ...]  # in no segment in some step
    unknown: tuple[str, ...]  # records that are no op of the model
    statistics_only: tuple[str, ...]
    some_tokens: tuple[str, ...]

    @property
    def full(self) -> bool:
        """Whether every op was judged by itself, for all tokens."""
        open_ends = (self.segments, self.unknown, self.statistics_only, self.some_tokens)
        return self.alone == self.n_ops and not any(open_ends)


@dataclass(frozen=True, slots=True)
class Listing:
    """A titled table of words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a line of a trace, or suspicious, and what to do."""

    line: int
    level: Literal["violation", "warning"]
    what: str
    then: str

    @property
    def sort(self) -> tuple[str, str]:
        """What it has in common with findings that differ from it in names and numbers alone."""
        return self.level, _in_common(self.what)


@lru_cache(1024)
def _in_common(what: str) -> str:
    return " ".join(word for word in what.split() if not _OF_ONE.search(word))


@dataclass(frozen=True, slots=True)
class Validation:
    """All that was found in one trace, by line."""

    path: str
    n_steps: int
    n_ops: int
    n_violations: int  # what makes the trace unfit to be judged
    n_warnings: int
    findings: tuple[Finding, ...]  # of each sort the first, where there are very many


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first op that diverges."""

    op: str
    step: int
    layer: int | None
    reason: Reason


@dataclass(frozen=True, slots=True)
class Storage:
    """What one side holds in a type shorter than float32: so many `records` of those judged, of these ops and kinds.

    Not `told`: by the engine, or by who wrote the trace.
    `other` is what the other side holds most of these in, and `nmse` how far the two differ at the end; None for no
    other side.
    """

    side: Literal["candidate", "reference"]
    type: str
    ops: tuple[str, ...]
    kinds: tuple[str, ...]
    records: int
    of: int
    told: bool
    other: str | None
    nmse: float | None

    @property
    def everything(self) -> bool:
        """Whether the side holds all that it computes so; some values fit any type, as the probability of one key."""
        return self.records >= 0.95 * self.of

    @property
    def warns(self) -> bool:
        """Whether the two sides differ for it."""
        return self.other is not None and self.other != self.type and bool(self.nmse)


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
    """The outcome of one comparison or check.

    `undecided` are the reasons why it is no match though nothing diverges, each with what to record or do.
    """

    verdict: Verdict
    first_divergence: Divergence | None
    ops: tuple[OpResult, ...]
    weights: tuple[WeightResult, ...]
    logits: tuple[Logits, ...]
    reference: Side | None
    candidate: Side
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    normal: Normal = Normal()
    storage: tuple[Storage, ...] = ()
    coverage: Coverage | None = None  # by replay, with the model only
    notes: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @property
    def faulty(self) -> list[OpResult]:
        """The ops that are wrong by themselves."""
        return [op for op in self.ops if op.status == "faulty"]

    @property
    def weakest(self) -> OpResult | None:
        """Of the ops that are as they should be the one in which the largest mistake may hide; None where none is."""
        return max((op for op in self.ops if op.told), key=lambda op: op.resolving, default=None)


@dataclass(frozen=True, slots=True)
class ThreeOp:
    """One op in one step of three engines. Pairs are of sides 0 and 1, 0 and 2, 1 and 2.

    `outliers` are the sides that are wrong by themselves or alone against two that agree; "scattered" is an op of
    which no two sides agree, "inherited" one that differs only because something before it does.
    """

    op: str
    step: int
    layer: int | None
    status: Literal["ok", "outlier", "scattered", "inherited", "unmatched", "undecided"]
    outliers: tuple[int, ...] = ()
    nmse: tuple[float | None, ...] = (None, None, None)  # of each pair
    statistics: tuple[Statistics | None, ...] = (None, None, None)  # of each side, as local and cause
    local: tuple[Local | None, ...] = (None, None, None)
    cause: tuple[Cause | None, ...] = (None, None, None)
    note: str | None = None


@dataclass(frozen=True, slots=True)
class ThreeWay:
    """The outcome of comparing three traces. `weights` are those wrong in memory, of each side."""

    verdict: Verdict
    names: tuple[str, ...]
    sides: tuple[Side, ...]
    ops: tuple[ThreeOp, ...]
    weights: tuple[tuple[WeightResult, ...], ...]
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    notes: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()  # why it is no match though nothing diverges, and what to record


@dataclass(frozen=True, slots=True)
class TensorResult:
    """One tensor of a weights audit. `error` is the RMS of the difference over that of the values.

    "computed" tensors are made by converters and stand in no checkpoint; "not recorded" ones are not in the trace.
    """

    tensor: str
    status: Literal["identical", "rounded", "quantised", "computed", "not recorded", "wrong", "missing", "extra"]
    type: str | None = None  # in the GGUF file
    other: str | None = None  # in the trace or the checkpoint
    error: float | None = None
    bound: float | None = None  # on the error, of a quantised tensor
    cause: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class AuditResult:
    """A GGUF file's tensors against a trace's weight records, or against a checkpoint."""

    verdict: Verdict
    model: str
    against: Literal["trace", "checkpoint"]
    path: str
    tensors: tuple[TensorResult, ...]
