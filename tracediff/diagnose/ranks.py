"""Explains what is wrong in a run of several ranks: what they do wrong together, or one of them by itself.

What no mistake between ranks explains is one rank's own, or all ranks', and is explained as in any other trace, from
the parts of those that err.
"""

from collections.abc import Sequence
from dataclasses import replace

from tracediff.diagnose.between import Between
from tracediff.diagnose.budget import Budget, Progress, within
from tracediff.diagnose.judged import Judged
from tracediff.result import Cause, OpResult
from tracediff.trace.ranks import Ranks, on_ranks


def explain_ranks(
    judged: Sequence[Judged],
    by_side: Sequence[Sequence[OpResult]],
    found: list[tuple[int, OpResult]],
    progress: Progress,
    seconds: float,
) -> list[OpResult]:
    """What `Judged.explain` does, of a run of several ranks: each op that was `found` with the side it is of.

    `by_side` are the results of all sides.
    """
    whole = judged[0].replay.trace
    assert isinstance(whole, Ranks)
    everyone, budget = tuple(sorted(whole.everyone)), Budget(seconds)
    # What all ranks do is asked whether or not something is faulty: as of one trace.
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {(0, everyone): []}
    for at, (side, op) in enumerate(found):
        if op.status != "faulty" or not op.local:
            continue
        faulty = [
            Between(one.replay, ops[at], local)
            for one, ops in zip(judged, by_side, strict=True)
            if ops[at].status == "faulty" and (local := ops[at].local)
        ]
        causes = [cause for between in faulty if (cause := between.cause())]
        if len(causes) == len(faulty):
            found[at] = side, replace(op, cause=_all_of(causes))
        else:
            ranks = tuple(sorted({rank for between in faulty for rank in between.ranks()}))
            groups.setdefault((side, ranks), []).append(at)
    for done, ((side, ranks), places) in enumerate(groups.items()):
        told = within(progress, done, len(groups))
        asked = [
            op if of == side and (op.status != "faulty" or at in places) else replace(op, local=None)
            for at, (of, op) in enumerate(found)
        ]
        if ranks == everyone:
            explained = judged[side].explain(asked, told, budget.left)
        else:
            explained = _explained(judged[side], ranks, asked, places, told, budget)
        for at, (before, op) in enumerate(zip(asked, explained, strict=True)):
            if op is not before:
                found[at] = side, op
    return [op for _, op in found]


def _all_of(causes: Sequence[Cause]) -> Cause:
    """What the sides of a run have done wrong, as one."""
    text = "; ".join(dict.fromkeys(cause.text for cause in causes))
    return replace(causes[0], text=text, each={causes[0].name: text})


def _explained(
    judged: Judged, ranks: tuple[int, ...], ops: list[OpResult], places: list[int], progress: Progress, budget: Budget
) -> list[OpResult]:
    """Those at these places with their cause, of the parts of these ranks alone."""
    assert isinstance(judged.replay.trace, Ranks)
    of = judged.replay.of(judged.replay.trace.of(ranks))
    asked = [*ops]
    for at in places:
        asked[at] = replace(asked[at], local=of.judge(of.trace.ops[asked[at].step, asked[at].op]))
    explained = judged.explain_as(of.trace, asked, progress, budget.left)
    return [_named(op, ranks) if at in places else ops[at] for at, op in enumerate(explained)]


def _named(op: OpResult, ranks: Sequence[int]) -> OpResult:
    """With the ranks of which what explains it is true."""
    if op.cause and op.cause.name != "shape":
        on = f" ({on_ranks(ranks)})"
        each, common = ({of: text + on for of, text in texts.items() if text} for texts in (op.cause.each, op.common))
        return replace(op, cause=replace(op.cause, text=op.cause.text + on, each=each), common=common)
    return replace(op, shape=f"{on_ranks(ranks)}: {op.shape}") if op.shape else op
