"""The outcome of a command, with all that reports say of it in words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tracediff.result.op import Cause, Local, OpResult, WeightResult
from tracediff.result.said import Finding, Next, Said
from tracediff.result.whole import Coverage, Logits, Normal, Storage
from tracediff.trace.format import Statistics

Verdict = Literal["match", "diverged", "undecided"]
_WORST_FIRST: tuple[Verdict, ...] = ("diverged", "undecided", "match")
Reason = Literal["local", "drift", "unmatched"]


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
    """The outcome of one comparison or check.

    `undecided` are the reasons why it is no match though nothing diverges, each with what to record or do. `findings`
    begin with the most telling one; `summary` is the verdict in a sentence or two, `details` the figures behind it.
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
    normal: Normal = field(default_factory=Normal)
    storage: tuple[Storage, ...] = ()
    coverage: Coverage | None = None  # by replay, with the model only
    notes: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    summary: str = ""
    details: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    said: tuple[Said, ...] = ()
    next: Next | None = None
    model: str | None = None  # the GGUF file as it was given: a trace knows its name alone

    @property
    def faulty(self) -> list[OpResult]:
        """The ops that are wrong by themselves."""
        return [op for op in self.ops if op.status == "faulty"]

    def explained(self, op: str) -> OpResult | None:
        """The op in the first step in which it is faulty by itself and three places show why."""
        of_it = (one for one in self.ops if one.op == op and one.status == "faulty")
        return next((one for one in of_it if one.cause and one.cause.places), None)

    @property
    def weakest(self) -> OpResult | None:
        """Of the ops that are as they should be the one in which the largest mistake may hide; None where none is."""
        return max((op for op in self.ops if op.told), key=lambda op: op.resolving, default=None)


def worst_case(cases: Mapping[str, Result]) -> tuple[str, Result]:
    """The first of those with the worst verdict, and its name."""
    return min(cases.items(), key=lambda case: _WORST_FIRST.index(case[1].verdict))


@dataclass(frozen=True, slots=True)
class Gate:
    """Cases by name, each held to its lock: `findings` are what got worse."""

    verdict: Verdict
    summary: str
    cases: dict[str, Result]


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
    """The outcome of comparing three traces. `weights` are those wrong in memory, of each side.

    `findings` are what replay names in each side; `summary` says who is the outlier.
    """

    verdict: Verdict
    names: tuple[str, ...]
    sides: tuple[Side, ...]
    ops: tuple[ThreeOp, ...]
    weights: tuple[tuple[WeightResult, ...], ...]
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    notes: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()  # why it is no match though nothing diverges, and what to record
    summary: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorResult:
    """One tensor of a weights audit. `error` is the RMS of the difference over that of the values.

    "computed" tensors are made by converters and stand in no checkpoint; "not recorded" ones are not in the trace;
    of "not compared" ones it is not known which of the checkpoint's become which of the file's.
    """

    tensor: str
    status: Literal[
        "identical", "rounded", "quantised", "computed", "not recorded", "not compared", "wrong", "missing", "extra"
    ]
    type: str | None = None  # in the GGUF file
    other: str | None = None  # in the trace or the checkpoint
    error: float | None = None
    bound: float | None = None  # on the error, of a quantised tensor
    cause: str | None = None
    note: str | None = None

    @property
    def failing(self) -> bool:
        """Whether it is not as it should be."""
        return self.status in ("wrong", "missing", "extra")


@dataclass(frozen=True, slots=True)
class AuditResult:
    """A GGUF file's tensors against a trace's weight records, or against a checkpoint."""

    verdict: Verdict
    model: str
    against: Literal["trace", "checkpoint"]
    path: str
    tensors: tuple[TensorResult, ...]
    summary: str = ""
    findings: tuple[Finding, ...] = ()
