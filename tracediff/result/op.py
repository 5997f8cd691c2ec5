"""What is known of an op in one step, and of a weight: frozen, printable, no arrays."""

import math
from dataclasses import dataclass, field
from typing import Literal

from tracediff.trace.format import Statistics

Status = Literal["ok", "faulty", "inherited", "drift", "unmatched", "undecided"]
_UNSEEN = 100.0  # times what a sketch shows may be there, but in one of a million cases (trace/sketch.py)
Judgement = Literal["sound", "faulty", "undecided"]  # of one record by itself


@dataclass(frozen=True, slots=True)
class Worst:
    """The element that differs most, and both values there."""

    at: tuple[int, ...]
    reference: float
    candidate: float


@dataclass(frozen=True, slots=True)
class Strip:
    """Along one axis the largest error for its bound of each place, or of each `width` neighbours."""

    axis: str
    width: int
    excess: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """Candidate against reference. `nmse` is sum((c - r)^2) / sum(r^2); the first token apart from the rest.

    Infinite where elements are infinitely `apart`: one is NaN or Inf and the other is not the same, say.
    `of_statistics` alone it is the least that they prove, and a permutation proves nothing; `of_sketch` an estimate.
    """

    nmse: float
    cosine: float
    max_abs: float
    worst: Worst
    first_token_nmse: float | None = None
    other_tokens_nmse: float | None = None
    apart: int = 0
    of_statistics: bool = False
    of_sketch: bool = False


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
    ties: int = 0  # tokens of which the segment took another expert, of two whose scores are as good as equal
    made_anew: bool = False  # of products that the engine computed once more, not of those that it recorded
    sharpness: float = 0.0  # the smallest relative scale error that would exceed the floor
    limit: float | None = None  # what may be left of a sound record, where that is less than the floor
    weight: str | None = None  # in the file, the first that it is made with: of a tied head the embedding's
    weight_type: str | None = None  # in the file: of a matmul, or of the rows that are looked up
    stored: str | None = None  # a type shorter than float32 that the values were rounded to, as f16 or bf16,
    told: bool = False  # and whether it is sure that the engine holds them so, and not who wrote the trace
    cut_off: bool = False  # whether these were cut off to it, towards 0
    weights_nmse: float | None = None  # of a matmul whose weights the engine requantised: against the file's
    one_token: bool = False  # engines multiply a row by a matrix in another kernel than several
    strips: tuple[Strip, ...] = ()  # where a value exceeds its bound
    axes: tuple[str, ...] = ()  # what the indices of `worst` count, in its model's graph
    lead: float = -math.inf  # nats by which the best explanation that finds a mistake beats the best without one

    @property
    def left(self) -> float:
        """NMSE; infinite where it is NaN."""
        return math.inf if math.isnan(self.nmse) else self.nmse

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
class Place:
    """One value of an explained op: where it is, what it is made of, what it should be, what the mistake makes of it,
    and what was recorded.
    """

    at: str
    inputs: str
    right: float
    mistaken: float
    recorded: float

    @property
    def row(self) -> tuple[str, ...]:
        """The same, to the digits that float32 has."""
        return (self.at, self.inputs, *(f"{v:.7g}" for v in (self.right, self.mistaken, self.recorded)))


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
    look: dict[str, str] = field(default_factory=dict)
    places: tuple[Place, ...] = ()  # of an op by itself


@dataclass(frozen=True, slots=True)
class Undone:
    """Where the mistakes of ops are undone: without the records of these `ops` what `follows` them is right."""

    ops: tuple[str, ...]
    follows: tuple[str, ...]


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
    held: tuple[str, ...] = ()  # weights that are wrong in memory, with which it was computed as they were recorded
    undone: Undone | None = None
    for_some_tokens: bool = False  # recorded for some, it does not say which: nothing can be said of it
    in_some_steps: bool = False  # its cause is not in others, which would show it
    reads: str | None = None  # what the cause's words call its input, where it has one
    common: dict[str, str] = field(default_factory=dict)  # each mistake of it in words that suit others that have it
    shape: str | None = None  # the error's shape in words, where no cause fits
    sought: bool = True  # not where the time was too short to try all that may explain it, or a bug ended it:
    bug: str = ""  # this one
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
        if self.drift is None or self.drift.of_statistics or self.tolerance is None:
            return math.inf
        return self.tolerance * (_UNSEEN if self.drift.of_sketch else 1.0)

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
    cause: str | None = None  # the name of the mistake that `note` puts in words
    look: str | None = None  # where to look in the engine's code
    type: str | None = None  # in the file
    nmse: float | None = None  # against what it should be
