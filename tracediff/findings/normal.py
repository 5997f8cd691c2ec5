"""What is normal: the questions that engine writers ask first, answered with the reference's figures beside."""

import math
from collections.abc import Iterator

from tracediff.english import count
from tracediff.findings.words import number
from tracediff.result import Lean, Result, Said, StepEnds

_SAME = 0.02  # figures so near are the same to a reader
# |mean| / RMS of hidden states of healthy real models, and what chance makes of few channels: three deviations.
_HEALTHY, _CHANCE = 0.035, 3.0
_OFFSET = 0.5  # a mean of the size of the RMS
_ALIKE, _FURTHER = 0.01, 30.0  # an NMSE of nearly the same states, and how much further those of the reference are


def normal(result: Result) -> Iterator[Said]:
    """Each question with its answer; nothing where the traces answer none."""
    yield from _growth(result)
    yield from _means(result)
    yield from _norm_weights(result)
    yield from _ends(result)


def _whose(tokens: str) -> str:
    return {"first": " in the first token", "others": " in the others", "all": ""}[tokens]


def _growth(result: Result) -> Iterator[Said]:
    """Whether the growth of the hidden state is the model's own."""
    parts = result.normal.growth
    if not parts:
        return
    ours = ", ".join(f"{_times(part.candidate)}{_whose(part.tokens)}" for part in parts)
    said = f"From embedding to last layer the hidden state grows {ours}"
    beside = [part.reference for part in parts if part.reference is not None]
    theirs = ", ".join(f"{_times(part.reference)}{_whose(part.tokens)}" for part in parts if part.reference is not None)
    if len(beside) < len(parts):
        said += "."
    elif all(_alike(part.candidate, part.reference) for part in parts):
        said += ", as in the reference: that is this model, not a fault."
    else:
        said += f"; in the reference {theirs}."
    yield Said("growth", said)


def _times(growth: float) -> str:
    return f"{growth:,.0f} times" if growth >= 100 else f"{growth:.3g} times"


def _alike(ours: float, theirs: float | None) -> bool:
    return theirs is not None and abs(ours - theirs) <= _SAME * abs(theirs)


def _means(result: Result) -> Iterator[Said]:
    """Whether hidden states lean to one side."""
    leans = result.normal.means
    if leans:
        yield Said("means", _leaning(result))
    high = [lean for lean in _high(leans) if not _alike(lean.candidate, lean.reference)]
    if high and any(lean.candidate > _OFFSET for lean in _high(leans)):
        yield Said("means", "A mean of the size of the rms: something adds an offset.", "alarm")


def _leaning(result: Result) -> str:
    leans = result.normal.means
    said = "; ".join(_lean(lean) for lean in leans)
    said = f"The largest |mean|/rms of a hidden state is {said}"
    if all(lean.candidate <= _HEALTHY for lean in leans):
        return f"{said}: nothing unusual (healthy models stay under {_HEALTHY})."
    high = _high(leans)
    if not high:
        return f"{said}: no more than chance makes of {leans[0].channels} channels."
    if all(_alike(lean.candidate, lean.reference) for lean in high):
        return f"{said}. Healthy models stay under {_HEALTHY}, but the reference has the same: no fault."
    own = (
        "; every op is right by replay, so that is this model" if result.coverage and result.verdict == "match" else ""
    )
    return f"{said}: more than the {_HEALTHY} that healthy models stay under{own}."


def _high(leans: tuple[Lean, ...]) -> list[Lean]:
    return [lean for lean in leans if lean.candidate > max(_HEALTHY, _CHANCE / math.sqrt(lean.channels))]


def _lean(lean: Lean) -> str:
    theirs = f"reference {number(lean.reference)}" if lean.reference is not None else ""
    largest = lean.reference_largest
    if largest is not None and not _alike(largest, lean.reference):
        theirs += f"{', ' if theirs else 'reference '}{number(largest)} at most"
    return f"{number(lean.candidate)}{_whose(lean.tokens)} ({lean.op}{f'; {theirs}' if theirs else ''})"


def _norm_weights(result: Result) -> Iterator[Said]:
    """Whether the norm weights in memory are those of the file."""
    norms = [weight for weight in result.weights if "norm" in weight.weight]
    if not norms:
        said = "The candidate recorded none of its norm weights: record them to rule out a loader's mistake."
        yield Said("norm weights", said)
        return
    counts: dict[str, int] = {}
    for weight in norms:
        counts[weight.status] = counts.get(weight.status, 0) + 1
    said = ", ".join(f"{n} {status}" for status, n in counts.items()) + "."
    loud = max(
        (w for w in norms if w.candidate and w.candidate.max is not None),
        key=lambda w: abs(w.candidate.max or 0) if w.candidate else 0,
        default=None,
    )
    if loud and loud.candidate and loud.status in ("identical", "rounded"):
        c = loud.candidate
        said += (
            f" The loudest, {loud.weight}, runs from {number(c.min)} to {number(c.max)} with mean {number(c.mean)}, "
            f"and does so in the {'file' if result.coverage else 'reference'}: weights far from 1 are normal."
        )
    yield Said("norm weights", said)


# --- decode steps --------------------------------------------------------------------------------------------------


def _ends(result: Result) -> Iterator[Said]:
    """Whether one step after another ends in the same state: a token, a position or a cache that does not arrive."""
    pairs = result.normal.ends
    if not pairs:
        return
    stuck = [pair for pair in pairs if _stuck(pair)]
    pair = min(stuck or pairs, key=lambda pair: pair.candidate.nmse)
    a, b = pair.steps
    theirs = f" (reference {number(pair.reference.nmse)})" if pair.reference else ""
    differ = f"end in states that differ by NMSE {number(pair.candidate.nmse)}{theirs}"
    said = f"Steps {a} and {b} {differ}" + (f", the least of {count(len(pairs), 'pair')}" if len(pairs) > 1 else "")
    if stuck:
        said += ": what a new token changes does not reach the end"
    elif pair.candidate.nmse < _ALIKE:
        known = "so it is in the reference" if pair.reference else "no reference says whether they should"
        said += f": nearly the same; {known}"
    yield Said("decode steps", f"{said}.", "alarm" if stuck else "plain")


def _stuck(pair: StepEnds) -> bool:
    """Whether the candidate's are nearly the same and the reference's are not."""
    theirs = pair.reference
    return theirs is not None and pair.candidate.nmse < _ALIKE and theirs.nmse > _FURTHER * pair.candidate.nmse
