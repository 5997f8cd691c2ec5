"""Whether logits are what the head makes of the final hidden state, and whether another next token means anything."""

from collections.abc import Iterator
from statistics import median

from tracediff.findings.words import number
from tracediff.names import StepOf
from tracediff.result import Logits, OpResult, Result, Said

_DEEP = 4  # steps: of fewer the table of each says it all
_FAR_OFF = 0.02  # of the largest logit: beyond what rounding of operands does to one


def logits(result: Result) -> Iterator[Said]:
    """Of the last step the best logits by hand, of every step whether both sides choose the same token."""
    if result.logits:
        last = result.logits[-1]
        c, r = last.candidate[0], last.reference[0]
        after = f"After step {last.step} at most" if len(result.logits) > 1 else "At most"
        said = f"{after} {number(c.logit)} ({c.words}), in the reference {number(r.logit)} ({r.words})."
        op = next((op for op in result.ops if (op.op, op.step) == ("output", last.step)), None)
        wrong, right = _recomputed(last, op)
        yield Said("logits", said + right)
        yield from (Said("logits", text, "alarm") for text in wrong)
    yield from (Said("next token", _choice(one), of=f"step {one.step}") for one in result.logits)
    by_sequence: dict[int, list[Logits]] = {}
    for one in result.logits:
        by_sequence.setdefault(one.step.sequence if isinstance(one.step, StepOf) else 0, []).append(one)
    yield from (Said("decode depth", _depth(steps)) for steps in by_sequence.values() if len(steps) >= _DEEP)


def _depth(steps: list[Logits]) -> str:
    """How the two sides drift apart from step to step, and where they first choose another token."""
    tenth = max(1, len(steps) // 10)
    early, late = (median(one.nmse for one in part) for part in (steps[:tenth], steps[-tenth:]))
    most = max(steps, key=lambda one: one.nmse)
    said = (
        f"Over {len(steps)} steps the logits' NMSE goes from {number(early)} to {number(late)}, and is largest after "
        f"step {most.step} ({number(most.nmse)})."
    )
    other = next((one for one in steps if not one.same_argmax), None)
    if other is None:
        return f"{said} Every step chooses the same token."
    why = "a near tie" if other.explained else "no near tie"
    return (
        f"{said} The first other token is chosen after step {other.step}, where it is {why}: the reference's best two "
        f"are {number(other.margin)} apart, logits differ by up to {number(other.max_diff)}."
    )


def _recomputed(last: Logits, op: OpResult | None) -> tuple[list[str], str]:
    """What is left of the recorded logits without those by hand: more than arithmetic makes, and no more."""
    sides = {
        "candidate": (last.candidate, op.local if op else None),
        "reference": (last.reference, op.reference_local if op else None),
    }
    wrong, said = [], []
    for name, (tokens, local) in sides.items():
        off = max((abs(t.logit - t.recomputed) for t in tokens if t.recomputed is not None), default=None)
        if off is None or local is None:
            continue
        if local.faulty and off > _FAR_OFF * max(abs(token.logit) for token in tokens):
            wrong.append(
                f"The {name}'s are up to {number(off)} off what its own output_norm gives with {last.head}: more "
                "than its arithmetic explains. The head is wrong, whatever came before."
            )
        else:
            said.append(f"{number(off)} ({name}{'' if local.faulty else f', {local.arithmetic}'})")
    by_hand = f" Recomputed in float64 from its own output_norm and {last.head}: off by {' and '.join(said)}."
    return wrong, by_hand if said else ""


def _choice(logits: Logits) -> str:
    kl = f"KL divergence {number(logits.kl)} nats. "
    if logits.same_argmax:
        return kl + "Both choose the same token."
    apart, differ = number(logits.margin), number(logits.max_diff)
    gap = f"the reference's best two are {apart} apart, logits differ by up to {differ}"
    if logits.explained:
        return kl + f"Another token is chosen, but it is a near tie ({gap}): that alone is no fault."
    return kl + f"Another token is chosen, and it is no near tie: {gap}."
