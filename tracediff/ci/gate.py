"""A result against its lock: what got worse, and the lock that the result would be held to."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import date

from tracediff.ci.lock import Accepted, Locked, Sort
from tracediff.english import listed
from tracediff.findings.places import of_names
from tracediff.findings.words import are, by_name, number
from tracediff.names import local_name
from tracediff.result import Finding, Gate, Next, OpResult, Result, Said, worst_case

_JUDGED = ("faulty", "inherited", "drift")
UNKNOWN = "unknown"  # the name under which a cause is accepted that nobody knows
# Floors follow from arithmetic and values, of which threads, BLAS and the order of sums change the last digits; what
# is left of a sound op they change tenfold. So a resolving power is a decade, and moves by two before it counts.
_MARGIN, _MOVES = 3.0, 100.0
_ACCEPT = "if that is meant; else look for the change that made it so, and undo it"


def measured(result: Result) -> Locked:
    """What the result shows to be so, with nothing accepted."""
    sorts: dict[str, list[OpResult]] = {}
    for op in result.ops:
        if op.told:
            sorts.setdefault(local_name(op.op), []).append(op)
    return Locked({name: _sort(ops) for name, ops in sorts.items()})


def _sort(ops: list[OpResult]) -> Sort:
    arithmetic = {op.arithmetic for op in ops if op.arithmetic}
    return Sort(len(ops), tuple(sorted(arithmetic)), _decade(max(op.resolving for op in ops)))


def _decade(nmse: float) -> float:
    """The power of ten that it will stay below, whatever the order of sums."""
    return float(f"1e{math.ceil(math.log10(_MARGIN * max(nmse, 1e-30)))}") if math.isfinite(nmse) else math.inf


def held(result: Result, locked: Locked, today: date, command: str) -> Result:
    """The result with what got worse as its findings: "match" where nothing did. Undecided stays undecided.

    `command` is the one that asked.
    """
    causes = (*_causes(result, locked, today),)
    worse = (*causes, *_sorts(result, locked), *_drifts(result))
    said = (*result.said, *_accepted(result, locked))
    if worse:
        others = f" {are(len(worse) - 1, 'other')} listed below." if len(worse) > 1 else ""
        summary = f"{worse[0].text}{others}"
        details = result.details if result.verdict == "diverged" else ()
        return replace(
            result, verdict="diverged", findings=worse, said=said, summary=summary, details=details,
            next=result.next if causes else Next(f"{command} --accept REASON", _ACCEPT),
        )  # fmt: skip
    if result.verdict == "undecided":
        return replace(result, said=said)
    known = f"; {are(len(locked.accepted), 'known cause')} accepted" if result.findings else ""
    n = sum(sort.ops for sort in locked.sorts.values())
    return replace(
        result, verdict="match", findings=(), said=said, details=(), first_divergence=None,
        summary=f"nothing is worse than its lock in {n} ops{known}.",
    )  # fmt: skip


def _places(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """The ops of each mistake, the weights where no op shows it."""
    places: dict[str, dict[str, None]] = {}
    for one in findings:
        places.setdefault(one.mistake or UNKNOWN, {}).update(dict.fromkeys(one.ops or one.weights))
    return {name: [*of] for name, of in places.items()}


def _causes(result: Result, locked: Locked, today: date) -> Iterator[Finding]:
    for one in result.findings:
        name = one.mistake or UNKNOWN
        accepted = locked.accepted.get(name)
        if accepted is None:
            yield one
            continue
        spread = [place for place in (one.ops or one.weights) if place not in accepted.places]
        if spread:
            yield replace(one, text=f"{name} has spread to {listed(by_name(spread))}: {one.text}")
        elif today > accepted.until:
            yield replace(one, text=f"{name} was accepted until {accepted.until} ({accepted.reason}): {one.text}")


def _sorts(result: Result, locked: Locked) -> Iterator[Finding]:
    """Ops that are as they should be, and less sure, computed in another way, or fewer than they were."""
    now = measured(result).sorts
    judged = Counter(local_name(op.op) for op in result.ops if op.told or op.status in _JUDGED)
    names = {name: [op.op for op in result.ops if local_name(op.op) == name] for name in locked.sorts}
    for name, was in locked.sorts.items():
        sort = now.get(name, Sort(0, (), 0.0))
        where = of_names([*dict.fromkeys(names[name])], names[name]) or name
        lost = was.ops - judged[name]
        if lost > 0:
            said = f"{lost} of {was.ops} {'is' if lost == 1 else 'are'} not judged any more: recorded no more, or blind"
            yield _finding(name, names, f"{name}: {said}.")
        other = [one for one in sort.arithmetic if one not in was.arithmetic]
        if other and was.arithmetic:  # a lock made without the model knows of none
            before, after = " and ".join(was.arithmetic), " and ".join(other)
            changed = [op.op for op in result.ops if local_name(op.op) == name and op.arithmetic in other]
            where = of_names([*dict.fromkeys(changed)], names[name])
            yield _finding(name, {name: changed}, f"{where}: the arithmetic was {before}, and is now {after}.")
        if sort.resolving >= was.resolving * _MOVES:
            said = f"a mistake of NMSE {was.resolving:.0e} would have been seen, now only one of {sort.resolving:.0e}"
            yield _finding(name, names, f"{where}: {said}.")


def _finding(name: str, names: Mapping[str, list[str]], text: str) -> Finding:
    return Finding(text, None, ops=tuple(dict.fromkeys(names[name])))


def _drifts(result: Result) -> Iterator[Finding]:
    """What is over its tolerance, or required and missing: no lock allows for these."""
    first = result.first_divergence
    if first and first.reason == "unmatched":
        yield Finding(result.summary, None, ops=(first.op,), steps=(first.step,))
    drifting = [op for op in result.ops if op.status == "drift"]
    if drifting:
        op, names = drifting[0], [*dict.fromkeys(op.op for op in drifting)]
        figures = f" (NMSE {number(op.drift.nmse)}, tolerance {number(op.tolerance)})" if op.drift else ""
        rest = f", and {are(len(names) - 1, 'other')} over theirs" if len(names) > 1 else ""
        text = f"{op.op} is the first op over its tolerance, in step {op.step}{figures}{rest}."
        yield Finding(text, None, ops=tuple(names), steps=tuple(sorted({op.step for op in drifting})))


def _accepted(result: Result, locked: Locked) -> Iterator[Said]:
    found = _places(result.findings)
    for name, one in locked.accepted.items():
        state = f"in {listed(by_name(found[name]))}" if name in found else "not found any more: --update drops it"
        yield Said("accepted", f"{name}, until {one.until}: {one.reason} ({state})")


def tightened(locked: Locked, result: Result) -> Locked:
    """The lock where the result is better: more ops, less arithmetic, a sharper eye, fewer accepted causes."""
    now, found = measured(result).sorts, _places(result.findings)
    sorts = {**now, **{name: _tighter(was, now[name]) if name in now else was for name, was in locked.sorts.items()}}
    accepted = {
        name: replace(one, places=tuple(place for place in one.places if place in found[name]))
        for name, one in locked.accepted.items()
        if name in found
    }
    return Locked(sorts, {name: one for name, one in accepted.items() if one.places})


def _tighter(was: Sort, now: Sort) -> Sort:
    is_less = not was.arithmetic or {*now.arithmetic} <= {*was.arithmetic}
    arithmetic = now.arithmetic if is_less else was.arithmetic
    resolving = now.resolving if now.resolving * _MOVES <= was.resolving else was.resolving
    return Sort(max(was.ops, now.ops), arithmetic, resolving)


def loosened(locked: Locked, result: Result, reason: str, until: date) -> Locked:
    """The lock that holds the result as it is; causes that were accepted in the same ops keep their reason and date."""
    accepted = {name: Accepted(tuple(sorted(of)), reason, until) for name, of in _places(result.findings).items()}
    for name, one in accepted.items():
        before = locked.accepted.get(name)
        if before and {*one.places} <= {*before.places} and before.until >= date.today():
            accepted[name] = replace(before, places=one.places)
    return Locked(measured(result).sorts, accepted)


def joined(cases: Mapping[str, Result]) -> Gate:
    """All cases: diverged where any is, else undecided where any is."""
    first, result = worst_case(cases)
    worst, summary = result.verdict, result.summary
    others = [name for name, one in cases.items() if one.verdict == worst and name != first]
    if len(cases) > 1 and worst == "match":
        summary = f"nothing is worse than its lock in {len(cases)} cases."
    elif len(cases) > 1:
        summary = f"{first}: {summary}{f' Others: {listed(others)}.' if others else ''}"
    return Gate(worst, summary, dict(cases))
