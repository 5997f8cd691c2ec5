"""Metrics and local errors to verdicts. Thresholds live here; arrays do not.

With replay an op is judged by its own error against its own floor (`floors.py`). Without, only the drift from
the reference can be judged, and that carries everything that went before it: the tolerances below allow for it.
"""

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from tracediff.names import kind_of, layer_of, split
from tracediff.result import Divergence, Drift, OpResult, Statistics, Verdict, WeightResult, Worst

# NMSE that one rounding of all operands makes, rounded up: llama.cpp's matmuls replayed without it are off by 4e-8
# in float16, 2e-6 in bfloat16 and 2e-5 to 4e-5 in q8 blocks; float32 sums by 1e-14 to 2e-13.
_ONE_ROUNDING = MappingProxyType({"f64": 1e-28, "f32": 1e-13, "f16": 1e-7, "bf16": 4e-6, "q8": 1e-4})
# What decoders make of it on the way to the logits: in the demo model of 8 layers 4e-14 became 2e-11.
_GROWTH = 1000.0
_WORST = 0.3  # beyond it two signals have little in common, whatever made them differ
# Softmax turns an absolute difference of scores into a relative one of probabilities.
_SENSITIVE = MappingProxyType({"softmax": 10.0, "weighted_values": 3.0})


@dataclass(frozen=True, slots=True)
class Policy:
    """What passes. `tolerances` maps patterns of op names to NMSE, the last match wins; `allowed` may be unmatched."""

    tolerances: Mapping[str, float] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()

    def allows(self, op: str) -> bool:
        """Whether the op may be missing on one side."""
        return any(_matches(op, pattern) for pattern in self.allowed)

    def tolerance(self, op: str, coarsest: str) -> float:
        """The NMSE that the op may drift: as set, else from the coarsest rounding of the two sides."""
        set_by_user = [value for pattern, value in self.tolerances.items() if _matches(op, pattern)]
        if set_by_user:
            return set_by_user[-1]
        return min(_WORST, _ONE_ROUNDING[coarsest] * _GROWTH * _SENSITIVE.get(kind_of(op), 1.0))


def _matches(op: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(op, pattern) or fnmatch.fnmatchcase(split(op)[1], pattern)


def coarsest(storages: Iterable[str | None], weight_types: Iterable[str | None]) -> str:
    """The coarsest rounding that two traces can have gone through, by what they store and by weight types."""
    order = list(_ONE_ROUNDING)
    found = [storage or "f32" for storage in storages]
    for kind in weight_types:
        found.append({None: "q8", "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16"}.get(kind, "q8"))
    return max(found, key=order.index)


def drift_of_statistics(reference: Statistics, candidate: Statistics, size: int) -> Drift | None:
    """The least drift that two sets of statistics prove: sqrt(NMSE) is at least the difference of RMS or mean
    over the RMS (triangle inequality), and of an extreme over the RMS times sqrt(size).
    """
    r, c = (_known(side) for side in (reference, candidate))
    if r is None or c is None:
        return None
    root = math.sqrt(size)
    gaps = (c.rms - r.rms, c.mean - r.mean, (c.max - r.max) / root, (c.min - r.min) / root)
    largest = max(abs(c.max - r.max), abs(c.min - r.min))
    ratio = max(abs(gap) / r.rms for gap in gaps) if r.rms else (math.inf if c.rms else 0.0)
    nmse = ratio * ratio  # ** raises OverflowError where * gives Inf
    return Drift(nmse, math.nan, largest, Worst((), r.max, c.max))


class _Known(NamedTuple):
    min: float
    max: float
    mean: float
    rms: float


def _known(s: Statistics) -> _Known | None:
    values = (s.min, s.max, s.mean, s.rms)
    return None if None in values else _Known(*values)  # type: ignore[arg-type]


def judge(ops: Iterable[OpResult], policy: Policy) -> list[OpResult]:
    """Give each op, in execution order, its status from what was measured of it."""
    judged: list[OpResult] = []
    faulty = False
    for op in ops:
        status = _status(op, policy, faulty)
        faulty = faulty or status.status == "faulty"
        judged.append(status)
    return judged


def _status(op: OpResult, policy: Policy, faulty_before: bool) -> OpResult:
    if op.status == "unmatched":
        return op
    if op.local:
        if op.local.faulty:
            return replace(op, status="faulty")
        differs = op.drift is not None and not op.drift.nmse <= (op.tolerance or 0.0)
        return replace(op, status="inherited" if differs and faulty_before else "ok")
    if _other_non_finite(op):
        return replace(op, status="drift", note="NaN or Inf on one side that the other does not have")
    if op.drift and op.tolerance is not None and not op.drift.nmse <= op.tolerance:
        return replace(op, status="drift")
    return replace(op, status="ok")


def _other_non_finite(op: OpResult) -> bool:
    """Metrics are over the values that are finite on both sides: others would go unseen."""
    if not op.candidate or not op.reference:
        return bool(op.candidate and (op.candidate.nan or op.candidate.inf))
    return (op.candidate.nan, op.candidate.inf) != (op.reference.nan, op.reference.inf)


def verdict(
    ops: Iterable[OpResult], weights: Iterable[WeightResult], policy: Policy
) -> tuple[Verdict, Divergence | None]:
    """Whether anything diverges, and the first op that does: a faulty one, else one that drifts, else an unmatched."""
    ops = list(ops)
    failing = [op for op in ops if op.status in ("faulty", "drift") or _fails_unmatched(op, policy)]
    wrong_weight = any(weight.status == "wrong" for weight in weights)
    for status in ("faulty", "drift", "unmatched"):
        first = next((op for op in failing if op.status == status), None)
        if first:
            reason = {"faulty": "local", "drift": "drift", "unmatched": "unmatched"}[status]
            return "diverged", Divergence(first.op, first.step, layer_of(first.op), reason)  # type: ignore[arg-type]
    return ("diverged" if wrong_weight else "match"), None


def _fails_unmatched(op: OpResult, policy: Policy) -> bool:
    return op.status == "unmatched" and not policy.allows(op.op)
