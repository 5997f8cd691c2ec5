"""Metrics and local errors to verdicts. Thresholds live here; arrays do not.

With replay an op is judged by its own error against its own floor (`numerics/floors.py`). Without, only the drift from
the reference can be judged, and that carries everything that went before it: the tolerances below allow for it.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tracediff.errors import TracediffError
from tracediff.names import is_choice, is_mask, kind_of, layer_of, local_name, matches, sequence_of
from tracediff.result import Divergence, Local, OpResult, Statistics, Verdict, WeightResult

# NMSE that one rounding of all operands makes, rounded up: llama.cpp's matmuls replayed without it are off by 4e-8
# in float16, 2e-6 in bfloat16 and 2e-5 to 4e-5 in q8 blocks; float32 sums by 1e-14 to 2e-13.
_ONE_ROUNDING = MappingProxyType({"f64": 1e-28, "f32": 1e-13, "f16": 1e-7, "bf16": 4e-6, "q8": 1e-4})
# What decoders make of it on the way to the logits: in the demo model of 8 layers 4e-14 became 2e-11.
GROWTH = 1000.0
_WORST = 0.3  # beyond it two signals have little in common, whatever made them differ
# A tolerance beyond this hides as much as replay does where it is blind.
USEFUL = 0.05
UNCOVERED = "nothing here computes it, or what it is made of: not judged"
UNRESOLVED = "a mistake of the size that --resolve asks for may not show"
_AS_IT_HAPPENS = "in which order keys are chosen, and which of the hidden ones, means nothing: --model tells"
_NO_VALUE = "no value is finite: there is nothing to compare"
# Softmax turns an absolute difference of scores into a relative one of probabilities.
_SENSITIVE = MappingProxyType({"softmax": 10.0, "weighted_values": 3.0})


@dataclass(frozen=True, slots=True)
class Policy:
    """What passes. `tolerances` maps patterns of op names to NMSE, the last match wins.

    `required` ops must be recorded; `allowed` are those that may be missing all the same, or have another shape.
    `resolve` is the NMSE of a mistake that must show in every op.
    """

    tolerances: Mapping[str, float] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    resolve: float | None = None

    def __post_init__(self) -> None:
        """Raises TracediffError for what is no NMSE: nothing exceeds NaN."""
        for pattern, nmse in self.tolerances.items():
            if not nmse >= 0:
                raise TracediffError(f"a tolerance of {nmse:g} for {pattern!r}: give an NMSE such as 1e-6.")
        if self.resolve is not None and not self.resolve > 0:
            raise TracediffError(f"resolve is {self.resolve:g}: give an NMSE above 0, such as 1e-6.")

    def check(self, ops: Iterable[str]) -> None:
        """Raises TracediffError for a pattern that matches none of these ops: it would change nothing, unseen."""
        names = sorted({name for op in ops for name in (op, local_name(op))})
        options = {"--tolerance": self.tolerances, "--allow": self.allowed, "--require": self.required}
        for option, patterns in options.items():
            for pattern in patterns:
                if not any(matches(name, pattern) for name in names):
                    near = difflib.get_close_matches(pattern, names, 4) or names[:4]
                    raise TracediffError(
                        f"{option} {pattern!r} matches no op of the traces. Near it: {', '.join(near)}. "
                        "`tracediff inspect TRACE` lists all; * and ? stand for any characters."
                    )

    def within(self, ops: Iterable[str]) -> "Policy":
        """Without the patterns that match none of these ops."""
        names = {*ops}
        allowed, required, kept = (
            [p for p in patterns if any(matches(name, p) for name in names)]
            for patterns in (self.allowed, self.required, self.tolerances)
        )
        tolerances = {p: self.tolerances[p] for p in kept}
        return replace(self, tolerances=tolerances, allowed=tuple(allowed), required=tuple(required))

    def allows(self, op: str) -> bool:
        """Whether the op may be missing, or have another shape."""
        return any(matches(op, pattern) for pattern in self.allowed)

    def requires(self, op: str) -> bool:
        """Whether it fails where the op is missing."""
        return any(matches(op, pattern) for pattern in self.required) and not self.allows(op)

    def tolerance(self, op: str, coarsest: str) -> float:
        """The NMSE that the op may drift: as set, else from the coarsest rounding of the two sides."""
        set_by_user = [value for pattern, value in self.tolerances.items() if matches(op, pattern)]
        if set_by_user:
            return set_by_user[-1]
        return min(_WORST, _ONE_ROUNDING[coarsest] * GROWTH * _SENSITIVE.get(kind_of(op), 1.0))


USUAL = Policy()


def coarsest(storages: Iterable[str | None], weight_types: Iterable[str | None], others: Iterable[str] = ()) -> str:
    """The coarsest rounding that two traces can have gone through, by what they store, by weight types, and by what
    their engines say they round to besides.
    """
    order = list(_ONE_ROUNDING)
    found = [storage or "f32" for storage in storages]
    for kind in (*weight_types, *others):
        found.append(kind.lower() if kind and kind.lower() in order else "q8")
    return max(found, key=order.index)


def judge(ops: Iterable[OpResult], policy: Policy) -> list[OpResult]:
    """Give each op, in execution order, its status from what was measured of it.

    One that comes as faulty or drifting has another shape than it should have.
    """
    judged: list[OpResult] = []
    faulty = set[int]()  # sequences, on either side: what follows in them differs because of it
    for op in ops:
        sequence = sequence_of(op.step)
        judged.append(_resolved(_judged(op, sequence in faulty, policy), policy))
        if judged[-1].status == "faulty" or _faulty(op.reference_local):
            faulty.add(sequence)
    return judged


def _judged(op: OpResult, faulty_before: bool, policy: Policy) -> OpResult:
    if _faulty(op.local):  # whether or not the reference has such a record
        return replace(op, status="faulty")
    if op.status in ("faulty", "drift"):
        return replace(op, status="unmatched") if policy.allows(op.op) else op
    if op.local:
        return _replayed(op, op.local, faulty_before)
    if op.note == UNCOVERED:
        return op
    not_finite = _other_non_finite(op)
    if not_finite or _differs(op):
        return replace(op, status="inherited" if faulty_before else "drift", note=not_finite or op.note)
    nothing = None if op.status == "unmatched" else _nothing_to_compare(op)
    return replace(op, status="undecided", note=nothing) if nothing else op


def _replayed(op: OpResult, local: Local, faulty_before: bool) -> OpResult:
    """The status of an op that replay judged, and did not find faulty."""
    differs = _differs(op)
    if differs and _faulty(op.reference_local):
        note = "the reference is faulty by itself, the candidate is not (of two traces the reference is the first)"
        return replace(op, status="drift", note=note)
    lost = op.candidate is not None and bool(op.candidate.nan or op.candidate.inf)
    if (differs or (lost and op.reference is None)) and faulty_before:
        return replace(op, status="inherited")
    if local.blind and differs:
        return replace(op, status="drift", note="replay is blind here: judged by its drift alone")
    if local.blind and op.resolving > USEFUL:
        return replace(op, status="undecided", note="replay is blind here: roundings may hide any mistake")
    # What is filled with -inf, as the scores of groups before some are chosen, or hides all, has no other value.
    empty = lost and op.candidate and _empty(op.candidate) and op.kind not in ("fill", "mask")
    return replace(op, status="undecided", note=_NO_VALUE) if empty else op


def _resolved(op: OpResult, policy: Policy) -> OpResult:
    """Undecided where a mistake of the size that was asked for would not show."""
    if policy.resolve is None or not op.told or op.resolving <= policy.resolve:
        return op
    return replace(op, status="undecided", note=UNRESOLVED)


def _faulty(local: Local | None) -> bool:
    return local is not None and local.faulty


def _differs(op: OpResult) -> bool:
    return op.drift is not None and op.tolerance is not None and not op.drift.nmse <= op.tolerance


def _other_non_finite(op: OpResult) -> str | None:
    """What is said of NaN and Inf that are not the other side's too; with no other side, of any."""
    if op.candidate is None:
        return None
    ours = (op.candidate.nan, op.candidate.inf)
    if op.reference is None:
        hides = not op.candidate.nan and is_mask(op.op)
        return "it holds NaN or Inf, and could not be replayed" if any(ours) and not hides else None
    if ours != (op.reference.nan, op.reference.inf):
        return "NaN or Inf on one side that the other does not have"
    return "NaN or Inf in other places than on the other side" if any(ours) and op.drift and op.drift.apart else None


def _nothing_to_compare(op: OpResult) -> str | None:
    """Why it says nothing that both sides are alike."""
    if op.candidate is None or op.reference is None:
        return None
    if is_choice(op.op):
        return _AS_IT_HAPPENS
    if op.candidate.nan or op.candidate.inf:
        return _NO_VALUE if _empty(op.candidate) else "NaN on both sides" if op.candidate.nan else None
    if op.candidate.min == op.candidate.max == op.candidate.rms == 0 == op.reference.rms:
        return "all values are 0 on both sides, as of a buffer that no kernel has written to"
    return None


def _empty(side: Statistics) -> bool:
    return side.min is side.max is side.mean is side.rms is None


def verdict(
    ops: Iterable[OpResult], weights: Iterable[WeightResult], policy: Policy, doubts: Iterable[str] = ()
) -> tuple[Verdict, Divergence | None]:
    """Whether anything diverges, and the first op that does: a faulty one, else one that drifts, else a missing one.

    Undecided where nothing does, but an op is, or there are doubts.
    """
    ops = list(ops)
    failing = [op for op in ops if op.status in ("faulty", "drift") or _missing(op, policy)]
    for status in ("faulty", "drift", "unmatched"):
        first = next((op for op in failing if op.status == status), None)
        if first:
            reason = {"faulty": "local", "drift": "drift", "unmatched": "unmatched"}[status]
            return "diverged", Divergence(first.op, first.step, layer_of(first.op), reason)  # type: ignore[arg-type]
    if any(weight.status == "wrong" for weight in weights):
        return "diverged", None
    return ("undecided" if any(doubts) or any(op.status == "undecided" for op in ops) else "match"), None


def _missing(op: OpResult, policy: Policy) -> bool:
    return op.status == "unmatched" and (op.candidate is None or op.for_some_tokens) and policy.requires(op.op)
