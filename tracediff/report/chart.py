"""Drift and growth by depth as a small picture (SVG), its axes in decades."""

import math
from collections.abc import Callable, Iterator, Sequence

from tracediff.names import HIDDEN_STATES, layer_of, local_name
from tracediff.result import OpResult, Result

_WIDE, _HIGH, _LEFT, _BELOW = 720, 220, 56, 24
_LEAST = 1e-18  # what is drawn of an error of 0


def drift_by_depth(result: Result) -> str:
    """The hidden states of the first step: NMSE from the reference where there is one, and the growth of the RMS."""
    step = min((op.step for op in result.ops), default=0)
    states = [op for op in result.ops if op.step == step and local_name(op.op) in HIDDEN_STATES]
    drift = [max(op.drift.nmse, _LEAST) if op.drift else math.nan for op in states]
    rms = [op.candidate.rms or math.nan if op.candidate else math.nan for op in states]
    pictures = [("NMSE from the reference", drift, "one"), ("RMS of the hidden state", rms, "two")]
    return "".join(_picture(*one, states) for one in pictures if sum(map(math.isfinite, one[1])) > 1)


def _picture(title: str, values: Sequence[float], kind: str, states: Sequence[OpResult]) -> str:
    known = [math.log10(value) for value in values if math.isfinite(value)]
    low, high = math.floor(min(known)), max(math.ceil(max(known)), math.floor(min(known)) + 1)
    right, bottom = _WIDE - 8, _HIGH - _BELOW

    def x(n: int) -> float:
        return _LEFT + (right - _LEFT) * n / max(1, len(values) - 1)

    def y(decade: float) -> float:
        return bottom - (bottom - 12) * (decade - low) / (high - low)

    drawn = ((n, math.log10(value)) for n, value in enumerate(values) if math.isfinite(value))
    line = " ".join(f"{x(n):.1f},{y(decade):.1f}" for n, decade in drawn)
    label = f"{title}: 1e{low} to 1e{high} over {len(values)} hidden states"
    return (
        f'<p class="dim">{title}</p><svg viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" role="img" '
        f'aria-label="{label}">{"".join(_decades(low, high, y, right))}{"".join(_layers(states, x))}'
        f'<polyline class="{kind}" points="{line}"/></svg>'
    )


def _decades(low: int, high: int, y: Callable[[float], float], right: int) -> Iterator[str]:
    every = max(1, (high - low) // 6)
    for decade in range(low, high + 1, every):
        at = y(decade)
        yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">1e{decade}</text>'


def _layers(states: Sequence[OpResult], x: Callable[[int], float]) -> Iterator[str]:
    every = max(1, len(states) // 12)
    for n, op in enumerate(states):
        layer = layer_of(op.op)
        if layer is not None and layer % every == 0:
            yield f'<text x="{x(n):.1f}" y="{_HIGH - 6}" text-anchor="middle">{layer}</text>'
        elif op.op == "output":
            yield f'<text x="{x(n):.1f}" y="{_HIGH - 6}" text-anchor="end">output</text>'
