"""What is known of a whole trace beside its ops: next tokens, what is normal, what it holds, how far replay reached."""

from dataclasses import dataclass
from typing import Literal

Tokens = Literal["first", "others", "all"]  # which of a step


@dataclass(frozen=True, slots=True)
class Token:
    """A candidate for the next token."""

    id: int
    text: str | None
    logit: float
    probability: float
    other_rank: int  # its rank on the other side, 1 is first
    recomputed: float | None = None  # in float64 from this side's own final hidden state and the file's head

    @property
    def words(self) -> str:
        """Its id, and its text where that is known."""
        return f"{self.id} {self.text or ''}".strip()


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
    some_steps: tuple[str, ...]  # those of them that others have
    unknown: tuple[str, ...]  # records that are no op of the model
    statistics_only: tuple[str, ...]
    some_tokens: tuple[str, ...]

    @property
    def full(self) -> bool:
        """Whether every op was judged by itself, for all tokens."""
        open_ends = (self.segments, self.unknown, self.statistics_only, self.some_tokens)
        return self.alone == self.n_ops and not any(open_ends)
