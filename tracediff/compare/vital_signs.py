"""What looks alarming and may be normal, measured on both sides: growth, means, and steps that end alike.

The first token is kept apart: its massive activations (https://arxiv.org/abs/2402.17762) hide the others.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from tracediff.compare.metrics import compare_values
from tracediff.names import local_name
from tracediff.result import Growth, Lean, Likeness, Normal, StepEnds, Tokens
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace
from tracediff.trace.statistics import Moments

_STATES = ("token_embd", "attn_residual", "ffn_residual", "output_norm")
_Part = tuple[float, float, int]  # mean and RMS of some values, and the channels that they are of
_Parts = dict[Tokens, _Part]


def measure_normal(reference: Trace | None, candidate: Trace) -> Normal:
    """Of what the candidate's trace holds; the reference's figures wherever it holds the same."""
    ours = _states(candidate)
    theirs = _states(reference) if reference else {}
    theirs = {key: parts for key, parts in theirs.items() if reference and _same_rows(key, reference, candidate)}
    return Normal(tuple(_growth(ours, theirs)), tuple(_leans(ours, theirs)), tuple(_ends(reference, candidate)))


def _same_rows(key: tuple[int, str], reference: Trace, candidate: Trace) -> bool:
    return key in candidate.ops and reference.ops[key].rows == candidate.ops[key].rows


def _states(trace: Trace) -> dict[tuple[int, str], _Parts]:
    return {key: _parts(trace, record) for key, record in trace.ops.items() if local_name(record.op) in _STATES}


@np.errstate(over="ignore", invalid="ignore")  # NaN and Inf are counted elsewhere
def _parts(trace: Trace, record: OpRecord) -> _Parts:
    """Mean and RMS of all values, and where they are there of the first token's and of the others'."""
    if not record.shape:
        return {}
    if not record.has_data:
        known = record.mean is not None and record.rms is not None
        return {"all": (record.mean or 0.0, record.rms or 0.0, record.shape[-1])} if known else {}
    rows = trace.values(record)
    begins = trace.n_before(record.step) == 0 and (record.rows is None or record.rows[:1] == (0,))
    cuts: dict[Tokens, np.ndarray] = {"first": rows[:begins], "others": rows[begins:], "all": rows}
    return {tokens: _part(values) for tokens, values in cuts.items() if values.size}


def _part(values: np.ndarray) -> _Part:
    seen = Moments()
    seen.add(values.astype(np.float64 if values.dtype == np.float64 else np.float32, copy=False))
    found = seen.statistics()
    return found.mean or 0.0, found.rms or 0.0, values.shape[-1]


def _apart(*parts: _Parts) -> tuple[Tokens, ...]:
    """The groups of tokens that all these tell apart."""
    apart: tuple[Tokens, ...] = ("first", "others")
    known = tuple(tokens for tokens in apart if all(tokens in part for part in parts))
    return known or (("all",) if all("all" in part for part in parts) else ())


def _growth(ours: dict[tuple[int, str], _Parts], theirs: dict[tuple[int, str], _Parts]) -> Iterator[Growth]:
    """From the embedding to the last layer, in the first step."""
    first = min((step for step, _ in ours), default=0)
    layers = [key for key in ours if key[0] == first and local_name(key[1]) == "ffn_residual"]
    start = (first, "token_embd")
    if start not in ours or not layers:
        return
    end = layers[-1]
    there = [theirs[key] for key in (start, end) if key in theirs]
    for tokens in _apart(ours[start], ours[end], *there):
        grown = _ratio(ours[end][tokens][1], ours[start][tokens][1])
        if grown:
            beside = _ratio(there[1][tokens][1], there[0][tokens][1]) if len(there) == 2 else None
            yield Growth(tokens, end[1], beside, grown)


def _leans(ours: dict[tuple[int, str], _Parts], theirs: dict[tuple[int, str], _Parts]) -> Iterator[Lean]:
    """The hidden state of the largest |mean| / RMS, for each group of tokens."""
    apart = all("first" in parts or "others" in parts for side in (ours, theirs) for parts in side.values())
    groups: tuple[Tokens, ...] = ("first", "others") if apart else ("all",)
    for tokens in groups:
        leans = {key: _lean(parts[tokens]) for key, parts in ours.items() if tokens in parts}
        beside = {key: _lean(parts[tokens]) for key, parts in theirs.items() if tokens in parts}
        if leans:
            at = max(leans, key=lambda key: leans[key])
            yield Lean(
                tokens, at[1], at[0], ours[at][tokens][2], beside.get(at), leans[at], max(beside.values(), default=None)
            )


def _lean(part: _Part) -> float:
    return abs(part[0]) / part[1] if part[1] else 0.0


def _ends(reference: Trace | None, candidate: Trace) -> Iterator[StepEnds]:
    """The final hidden states, of the last token, of each step and the next."""
    of = candidate.steps
    for steps in (pair for pair in pairwise(sorted(of)) if of[pair[0]].sequence == of[pair[1]].sequence):
        op = _final(candidate, *steps)
        if op:
            theirs = _likeness(reference, op, steps) if reference else None
            ours = _likeness(candidate, op, steps)
            if ours:
                yield StepEnds(op, steps, theirs, ours)


def _final(trace: Trace, *steps: int) -> str | None:
    """The last hidden state whose values both steps hold for their last token."""
    names = [record.op for record in trace.step_ops(steps[0]) if local_name(record.op) in _STATES]
    return next((op for op in reversed(names) if all(trace.last_row(step, op) is not None for step in steps)), None)


def _likeness(trace: Trace, op: str, steps: tuple[int, int]) -> Likeness | None:
    a, b = (trace.last_row(step, op) for step in steps)
    if a is None or b is None or a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None  # of NaN nothing is compared, and nothing would differ
    drift = compare_values(a, b, first_token=False)[2]
    return Likeness(drift.nmse, drift.cosine)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b and math.isfinite(a) else None
