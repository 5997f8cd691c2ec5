"""What is normal: the questions that engine writers ask first, answered with the reference's figures beside."""

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from tracediff.report.parts import ALARM, count, hanging, heading, number
from tracediff.result import Lean, Logits, OpResult, Result, StepEnds, Token

_WIDE = 14  # of the questions
_SAME = 0.02  # figures so near are the same to a reader
# |mean| / RMS of hidden states of healthy real models, and what chance makes of few channels: three deviations.
_HEALTHY, _CHANCE = 0.035, 3.0
_OFFSET = 0.5  # a mean of the size of the RMS
_ALIKE, _FURTHER = 0.01, 30.0  # an NMSE of nearly the same states, and how much further those of the reference are
_FAR_OFF = 0.02  # of the largest logit: beyond what rounding of operands does to one


def normal(result: Result) -> Iterator[RenderableType]:
    """Each question with its answer; nothing where the traces answer none."""
    answers = {
        "growth": _growth(result),
        "means": _means(result),
        "norm weights": _norm_weights(result),
        "logits": _logits(result),
        "decode steps": _ends(result),
    }
    said = [(what, answer) for what, answer in answers.items() if answer]
    if said:
        yield heading("What is normal")
        yield from (hanging(f"  {what}", answer, "dim", _WIDE) for what, answer in said)


def _whose(tokens: str) -> str:
    return {"first": " in the first token", "others": " in the others", "all": ""}[tokens]


def _growth(result: Result) -> Text | None:
    """Whether the growth of the hidden state is the model's own."""
    parts = result.normal.growth
    if not parts:
        return None
    ours = ", ".join(f"{_times(part.candidate)}{_whose(part.tokens)}" for part in parts)
    said = f"From embedding to last layer the hidden state grows {ours}"
    beside = [part.reference for part in parts if part.reference is not None]
    if len(beside) < len(parts):
        return Text(f"{said}.")
    if all(_alike(part.candidate, part.reference) for part in parts):
        return Text(f"{said}, as in the reference: that is this model, not a fault.")
    theirs = ", ".join(f"{_times(part.reference)}{_whose(part.tokens)}" for part in parts if part.reference is not None)
    return Text(f"{said}; in the reference {theirs}.")


def _times(growth: float) -> str:
    return f"{growth:,.0f} times" if growth >= 100 else f"{growth:.3g} times"


def _alike(ours: float, theirs: float | None) -> bool:
    return theirs is not None and abs(ours - theirs) <= _SAME * abs(theirs)


def _means(result: Result) -> Text | None:
    """Whether hidden states lean to one side."""
    leans = result.normal.means
    if not leans:
        return None
    said = "; ".join(_lean(lean) for lean in leans)
    said = f"The largest |mean|/rms of a hidden state is {said}"
    if all(lean.candidate <= _HEALTHY for lean in leans):
        return Text(f"{said}: nothing unusual (healthy models stay under {_HEALTHY}).")
    high = [lean for lean in leans if lean.candidate > max(_HEALTHY, _CHANCE / math.sqrt(lean.channels))]
    if not high:
        return Text(f"{said}: no more than chance makes of {leans[0].channels} channels.")
    if all(_alike(lean.candidate, lean.reference) for lean in high):
        return Text(f"{said}. Healthy models stay under {_HEALTHY}, but the reference has the same: no fault.")
    if any(lean.candidate > _OFFSET for lean in high):
        return Text.assemble(f"{said}. ", ("A mean of the size of the rms: something adds an offset.", ALARM))
    return Text(f"{said}: more than the {_HEALTHY} that healthy models stay under.")


def _lean(lean: Lean) -> str:
    theirs = f"reference {number(lean.reference)}" if lean.reference is not None else ""
    largest = lean.reference_largest
    if largest is not None and not _alike(largest, lean.reference):
        theirs += f"{', ' if theirs else 'reference '}{number(largest)} at most"
    return f"{number(lean.candidate)}{_whose(lean.tokens)} ({lean.op}{f'; {theirs}' if theirs else ''})"


def _norm_weights(result: Result) -> Text | None:
    """Whether the norm weights in memory are those of the file."""
    norms = [weight for weight in result.weights if "norm" in weight.weight]
    if not norms:
        return Text("The candidate recorded none of its norm weights: record them to rule out a loader's mistake.")
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
    return Text(said)


# --- logits --------------------------------------------------------------------------------------------------------


def _logits(result: Result) -> Text | None:
    """Whether the best logits are what the final hidden state and the output matrix give."""
    if not result.logits:
        return None
    logits = result.logits[-1]
    c, r = logits.candidate[0], logits.reference[0]
    said = f"At most {number(c.logit)} ({_token(c)}), in the reference {number(r.logit)} ({_token(r)})."
    op = next((op for op in result.ops if (op.op, op.step) == ("output", logits.step)), None)
    return Text.assemble(said, *_recomputed(logits, op))


def _token(token: Token) -> str:
    return f"{token.id} {token.text or ''}".strip()


def _recomputed(logits: Logits, op: OpResult | None) -> Iterator[str | tuple[str, str]]:
    """What is left of the recorded logits when those by hand are taken away, and whether that is arithmetic."""
    sides = {
        "candidate": (logits.candidate, op.local if op else None),
        "reference": (logits.reference, op.reference_local if op else None),
    }
    said = []
    for name, (tokens, local) in sides.items():
        off = max((abs(t.logit - t.recomputed) for t in tokens if t.recomputed is not None), default=None)
        if off is None or local is None:
            continue
        if local.faulty and off > _FAR_OFF * max(abs(token.logit) for token in tokens):
            wrong = f" The {name}'s are up to {number(off)} off what its own output_norm gives with {logits.head}"
            yield f"{wrong}: more than its arithmetic explains. The head is wrong, whatever came before.", ALARM
        else:
            said.append(f"{number(off)} ({name}{'' if local.faulty else f', {local.arithmetic}'})")
    if said:
        yield f" Recomputed in float64 from its own output_norm and {logits.head}: off by {' and '.join(said)}."


# --- decode steps --------------------------------------------------------------------------------------------------


def _ends(result: Result) -> Text | None:
    """Whether one step after another ends in the same state: a token, a position or a cache that does not arrive."""
    pairs = result.normal.ends
    if not pairs:
        return None
    stuck = [pair for pair in pairs if _stuck(pair)]
    pair = min(stuck or pairs, key=lambda pair: pair.candidate.nmse)
    a, b = pair.steps
    theirs = f" (reference {number(pair.reference.nmse)})" if pair.reference else ""
    differ = f"end in states that differ by NMSE {number(pair.candidate.nmse)}{theirs}"
    said = f"Steps {a} and {b} {differ}" + (f", the least of {count(len(pairs), 'pair')}" if len(pairs) > 1 else "")
    if stuck:
        return Text(f"{said}: what a new token changes does not reach the end.", style=ALARM)
    if pair.candidate.nmse < _ALIKE:
        known = "so it is in the reference" if pair.reference else "no reference says whether they should"
        return Text(f"{said}: nearly the same; {known}.")
    return Text(f"{said}.")


def _stuck(pair: StepEnds) -> bool:
    """Whether the candidate's are nearly the same and the reference's are not."""
    theirs = pair.reference
    return theirs is not None and pair.candidate.nmse < _ALIKE and theirs.nmse > _FURTHER * pair.candidate.nmse
