"""Three engines at once: which of them is the outlier, op by op.

Two engines that differ leave open which is wrong. A third decides it: two that agree are right, or share a mistake,
which replay against the model tells.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tracediff.judge import USEFUL, USUAL, Policy
from tracediff.names import layer_of
from tracediff.pipeline import NO_LIMIT, Effort, Progress, check_trace, compare_traces, opened
from tracediff.result import Finding, OpResult, Result, Side, ThreeOp, ThreeWay
from tracediff.trace.runs import Paths, open_trace

if TYPE_CHECKING:
    from tracediff.model.model import Model

PAIRS = ((0, 1), (0, 2), (1, 2))
_Key = tuple[int, str]  # step and op
_Ops = dict[_Key, OpResult]


def compare_three(
    traces: Sequence[Paths],
    *,
    model: "Path | Model | None" = None,
    policy: Policy = USUAL,
    effort: Effort = NO_LIMIT,
    progress: Progress = lambda stage, fraction: None,
) -> ThreeWay:
    """Three traces pairwise by drift; with the model each is replayed too, and judged by its own errors.

    Raises MismatchError where two traces cannot be compared, TracediffError for a pattern that matches nothing.
    """
    read = [open_trace(trace) for trace in traces]
    model = opened(model, *read) if model else None
    names = [{op for _, op in trace.ops} for trace in read]
    policy.check(set().union(*names))
    by_drift = replace(policy, resolve=None) if model else policy
    pairs = [
        compare_traces(traces[a], traces[b], policy=by_drift.within(names[a] | names[b]), progress=progress)
        for a, b in PAIRS
    ]
    checks = [
        check_trace(trace, model, policy=policy.within(ops), effort=effort, progress=progress)
        for trace, ops in zip(traces, names, strict=True)
        if model
    ]
    ops = tuple(_ops(pairs, checks))
    wrong = tuple(tuple(w for w in check.weights if w.status == "wrong") for check in checks)
    sides = _sides(pairs)
    failing = any(op.status in ("outlier", "scattered") or _fails(op, policy) for op in ops) or any(wrong)
    undecided = tuple(dict.fromkeys(_undecided(pairs, checks, ops)))
    notes = [note for result in (*pairs, *checks) for note in result.notes]
    if not model:
        notes.append("Weights are compared, and mistakes told from what they lead to, with --model only.")
    result = ThreeWay(
        verdict="diverged" if failing else "undecided" if undecided else "match",
        names=_names(sides),
        sides=sides,
        ops=ops,
        weights=wrong,
        tokens=pairs[0].tokens,
        steps=tuple(sorted({step for pair in pairs for step in pair.steps})),
        notes=tuple(dict.fromkeys(notes)),
        undecided=undecided,
        findings=tuple(_named(_names(sides), checks)),
    )
    return replace(result, summary=_summary(result))


def _named(names: Sequence[str], checks: Sequence[Result]) -> Iterator[Finding]:
    """What replay found in each side, under its name."""
    for name, check in zip(names, checks, strict=False):
        yield from (replace(finding, side=name) for finding in check.findings)


def _summary(result: ThreeWay) -> str:
    """The one sentence: which sides agree, which is the outlier, and from where on."""
    firsts = {n: next((op for op in result.ops if n in op.outliers), None) for n in range(3)}
    alone = {n: op for n, op in firsts.items() if op}
    agreeing = [name for n, name in enumerate(result.names) if n not in alone]
    first = next((op for op in result.ops if op.status in ("outlier", "scattered")), None)
    if first and first.status == "scattered":
        later = ", ".join(f"{result.names[n]} is an outlier at {_at(op, result)}" for n, op in alone.items())
        return f"no two engines agree from {_at(first, result)} on{f'; {later}' if later else ''}."
    if len(alone) == 1:
        ((n, op),) = alone.items()
        return f"{' and '.join(agreeing)} agree; {result.names[n]} is the outlier from {_at(op, result)} on."
    if alone:
        parts = [f"{result.names[n]} (from {_at(op, result)} on)" for n, op in alone.items()]
        rest = f"; {agreeing[0]} is not" if agreeing else ""
        return f"{' and '.join(parts)} are outliers{rest}."
    if any(result.weights):
        return "all ops agree, but weights are wrong in memory."
    if result.verdict == "undecided":
        return f"{result.undecided[0]}."
    if result.verdict == "diverged":
        return "all agree where they can be compared, but not every op is on all three sides."
    there = sum(op.status != "unmatched" for op in result.ops)
    other = len(result.ops) - there
    rest = f"; {other} other{' is' if other == 1 else 's are'} not on all three sides" if other else ""
    return f"all three agree in {there} ops{rest}."


def _at(op: ThreeOp, result: ThreeWay) -> str:
    return op.op + (f" in step {op.step}" if len(result.steps) > 1 else "")


def _undecided(pairs: list[Result], checks: list[Result], ops: Sequence[ThreeOp]) -> Iterator[str]:
    """What keeps them from being a match; of replay only where the drift from the others does not tell either."""
    yield from (doubt for pair in pairs for doubt in pair.undecided)
    if checks and not any(any(op.local) for op in ops):
        yield "nothing in the three traces can be replayed. Record data, or compare without --model"
    elif any(op.status == "undecided" for op in ops):
        yield from (doubt for check in checks for doubt in check.undecided)


def _fails(op: ThreeOp, policy: Policy) -> bool:
    return op.status == "unmatched" and policy.requires(op.op)


def _sides(pairs: list[Result]) -> tuple[Side, ...]:
    sides = (pairs[0].reference, pairs[0].candidate, pairs[1].candidate)
    return tuple(side for side in sides if side)


def _names(sides: Sequence[Side]) -> tuple[str, ...]:
    """Each engine's name without its version; the trace's where two are of the same engine."""
    names = [re.split(r" [\d(]", side.engine)[0] for side in sides]
    if len(set(names)) < len(names):
        names = [Path(side.path).stem for side in sides]
    return tuple(names if len(set(names)) == len(names) else [side.path for side in sides])


def _ops(pairs: list[Result], checks: list[Result]) -> Iterator[ThreeOp]:
    """Every op of any side, in the order of the first pair, what only the third has at the end of its step."""
    by_pair: list[_Ops] = [{(op.step, op.op): op for op in pair.ops} for pair in pairs]
    by_side: list[_Ops] = [{(op.step, op.op): op for op in check.ops} for check in checks] or [{}, {}, {}]
    keys = sorted(dict.fromkeys(key for ops in by_pair for key in ops), key=lambda key: key[0])
    found = False
    for key in keys:
        op = _judge(key, [ops.get(key) for ops in by_pair], [ops.get(key) for ops in by_side], found)
        found = found or op.status in ("outlier", "scattered")
        yield op


def _judge(key: _Key, pairs: list[OpResult | None], sides: list[OpResult | None], found: bool) -> ThreeOp:
    """One op: faulty sides by replay; the others by which pairs agree."""
    differ = [pair is not None and pair.status == "drift" for pair in pairs]
    unmatched = [pair for pair in pairs if pair and pair.status == "unmatched"]
    outliers = [n for n, side in enumerate(sides) if side and side.status == "faulty"]
    alone = _alone(pairs) if any(differ) and not unmatched else None
    if alone is not None and not _replayed(sides[alone]):
        outliers.append(alone)
    status: Literal["ok", "outlier", "scattered", "inherited", "unmatched", "undecided"] = "ok"
    if outliers:
        status = "outlier"
    elif unmatched:
        status = "unmatched"
    elif any(differ) and alone is None and not all(_replayed(side) for side in sides):
        status = "scattered"
    elif any(differ) and found:
        status = "inherited"
    elif any(side and side.status == "undecided" for side in (*pairs, *sides)):
        status = "ok" if any(pair and pair.told and pair.resolving <= USEFUL for pair in pairs) else "undecided"
    return ThreeOp(
        key[1], key[0], layer_of(key[1]), status, tuple(sorted(set(outliers))),
        nmse=tuple(pair.drift.nmse if pair and pair.drift else None for pair in pairs),
        statistics=_statistics(pairs),
        local=tuple(side.local if side else None for side in sides),
        cause=tuple(side.cause if side else None for side in sides),
        note="; ".join(dict.fromkeys(pair.note for pair in unmatched if pair.note)) or None,
    )  # fmt: skip


def _replayed(side: OpResult | None) -> bool:
    """Whether replay tells what the side's op is."""
    return side is not None and side.local is not None and not side.local.blind


def _alone(pairs: list[OpResult | None]) -> int | None:
    """The side outside the closest pair, if that pair agrees; None where no two agree."""
    agreeing = [n for n, pair in enumerate(pairs) if pair and pair.drift and pair.status != "drift"]
    if not agreeing:
        return None
    closest = min(agreeing, key=lambda n: pairs[n].drift.nmse)  # type: ignore[union-attr]
    return 3 - sum(PAIRS[closest])


def _statistics(pairs: list[OpResult | None]) -> tuple:  # type: ignore[type-arg]
    """Of each side, from the first pair that has it."""
    seen: list[object] = [None, None, None]
    for (a, b), pair in zip(PAIRS, pairs, strict=True):
        if pair:
            seen[a] = seen[a] or pair.reference
            seen[b] = seen[b] or pair.candidate
    return tuple(seen)
