"""What a mismatch says in words: each cause once, and the verdict in a sentence or two."""

from collections.abc import Iterator
from dataclasses import replace

from tracediff.english import count, listed
from tracediff.findings.words import by_name, number
from tracediff.result import Finding, Mismatch, Processed, Share

UNKNOWN = "in no arithmetic known here"
_NAMED = 0.02  # of the gap: a smaller share is in the table alone


def with_words(result: Mismatch) -> Mismatch:
    """The result with its findings and its summary."""
    findings = (*_weights(result), *_processed(result), *_shares(result))
    return replace(result, findings=findings, summary=_summary(result, findings))


def _weights(result: Mismatch) -> Iterator[Finding]:
    for side, wrong in result.weights.items():
        names = tuple(w.weight for w in wrong)
        whose = "A's" if len(result.weights) == 1 and side == "B" and result.noise else "the file's"
        first = wrong[0]
        note = f" ({first.weight}: {first.note})" if first.note else ""
        text = (
            f"{side} holds other weights: {listed(names)} {'is' if len(names) == 1 else 'are'} not {whose}{note}. "
            "Stale, of another step of training, or loaded wrongly."
        )
        yield Finding(text, first.cause or "stale_weights", weights=names, side=side, look=first.look)


def _processed(result: Mismatch) -> Iterator[Finding]:
    if result.processed:
        p, raw = result.processed, "A" if result.processed.side == "B" else "B"
        text = (
            f"{p.side}'s log-probabilities are processed, {raw}'s are raw: {sampling_in_words(p)} of {raw}'s logits "
            f"gives {p.side}'s, to {number(p.left)} nats. Return them before sampling's steps (vLLM: logprobs_mode "
            "raw_logprobs), or apply the same to the other side."
        )
        yield Finding(text, "processed_logprobs", ops=("output",), side=p.side)


def sampling_in_words(p: Processed) -> str:
    """Temperature 0.7, then top-p 0.9 renormalised."""
    cuts = [
        f"{name} {value:g}"
        for name, value in (("top-k", p.top_k), ("top-p", p.top_p), ("min-p", p.min_p))
        if value is not None
    ]
    truncation = f"{' and '.join(cuts)} renormalised" if cuts else ""
    heat = f"temperature {p.temperature:.4g}" if p.temperature != 1 else ""
    order = (heat, truncation) if p.first == "temperature" else (truncation, heat)
    return ", then ".join(part for part in order if part)


def _shares(result: Mismatch) -> Iterator[Finding]:
    for share in result.shares:
        if max(abs(share.alone), abs(share.last)) >= _NAMED:
            text = f"{share.what}: {part_of_gap(share)}, {_how(share)}.{_unknown(result, share)}"
            yield Finding(text, share.name, ops=share.ops)


def _unknown(result: Mismatch, share: Share) -> str:
    """Where to ask what nobody has a name for."""
    paths = [side.path for side, how in ((result.a, share.a), (result.b, share.b)) if how == UNKNOWN]
    return "".join(f" What it is: `tracediff check {path} --model MODEL`." for path in paths)


def part_of_gap(share: Share) -> str:
    """70% of the gap, or 60% to 80%."""
    low, high = sorted((share.alone, share.last))
    percent = f"{low:.0%} to {high:.0%}" if high - low > 0.05 else f"{share.alone:.0%}"
    return f"{percent} of the gap"


def _how(share: Share) -> str:
    ops = listed(by_name(share.ops), 3)
    if share.name == "routes_flipped":
        return f"{share.a} ({ops}); replay the rollout's routes in the trainer, and it is gone"
    if share.a == share.b:
        return f"{ops}, {share.a} on both sides" if share.a else ops
    return f"in A {share.a}, in B {share.b}" + (f" ({ops})" if ops else "")


def _summary(result: Mismatch, findings: tuple[Finding, ...]) -> str:
    gap = result.gap
    figures = f"mean |gap| {number(gap.mean_abs)} nats over {count(gap.n, 'token')}, k3 KL {number(gap.k3)}"
    if gap.impossible:
        figures += f"; {count(gap.impossible, 'token')} more that one side gives no chance at all"
    if result.verdict == "match":
        return f"{figures}: no more than {number(result.floor)}, which roundings explain ({result.noise})."
    if result.verdict == "undecided":
        return (
            f"{figures}: between what roundings must make and what they can ({result.noise}) it cannot be told from "
            "types alone. Give --model, or --tolerance NATS."
        )
    beyond = f", beyond the {number(result.beyond)} that roundings explain" if gap.mean_abs > result.beyond else ""
    why = f" {findings[0].text}" if findings else " Which op makes it: record all ops on both sides, and give --model."
    return f"{figures}{beyond}.{why}"
