"""What a trace leaves open: ops that one side lacks, and notes on the traces themselves."""

from collections.abc import Iterator
from difflib import get_close_matches

from tracediff.english import count, listed
from tracediff.findings.places import of_names
from tracediff.findings.words import by_name, number
from tracediff.names import local_name
from tracediff.result import Coverage, Result, Said, Segment

_LISTED = 8


def gaps(result: Result) -> Iterator[Said]:
    """What replay could not judge op by op and what to record next, and what is not on both sides."""
    coverage = result.coverage
    if coverage and not coverage.full:
        yield from _gaps(coverage, to_split(result, coverage))
    yield from _unmatched(result)


def to_split(result: Result, coverage: Coverage) -> Segment | None:
    """The segment of which something can be recorded that tells most: a faulty one that nothing explains, then a blind
    one, then any that is faulty.
    """
    explained = {(op.step, op.op) for op in result.faulty if op.cause}
    several = [one for one in coverage.segments if len(one.ops) > 1 and one.record and (one.faulty or one.blind)]
    return min(several, key=lambda one: (one.faulty and (one.step, one.op) in explained, not one.faulty), default=None)


def to_record(one: Segment, coverage: Coverage) -> str:
    """What splits the segment, and those that end in the same op of other layers: a tap is one line for all."""
    end, wanted = local_name(one.op), {*map(local_name, one.record)}
    alike = [s for s in coverage.segments if (s.step, local_name(s.op)) == (one.step, end) and (s.faulty or s.blind)]
    if len(alike) < 2:
        return listed(one.record, len(one.record))
    names = [op for segment in alike for op in segment.ops[:-1] if local_name(op) in wanted]
    return of_names(names, (op for segment in coverage.segments for op in segment.ops))


def _gaps(coverage: Coverage, first: Segment | None) -> Iterator[Said]:
    several = [segment for segment in coverage.segments if len(segment.ops) > 1]
    if several:
        longest = max(len(segment.ops) for segment in several)
        yield Said(
            "gaps",
            f"{coverage.together} of {count(coverage.n_ops, 'op')} were judged only as part of a segment "
            f"({count(len(several), 'segment')}, the longest of {longest} ops).",
        )
    for ops, what in (
        ([op for op in coverage.unjudged if op not in coverage.some_steps], "not judged at all"),
        (coverage.some_steps, "judged in some steps alone"),
        (coverage.unknown, "no op of this model, and not judged"),
        (coverage.statistics_only, "recorded as statistics only"),
        (coverage.some_tokens, "recorded for some tokens only"),
    ):
        if ops:
            meant = _meant(coverage) if ops is coverage.unknown else ""
            yield Said("gaps", f"{what}: {listed(by_name(ops))}.{meant}")
    blind = [segment for segment in coverage.segments if segment.blind]
    if blind:
        widest = max(segment.floor for segment in blind)
        where = listed(by_name(segment.op for segment in blind))
        said = f"blind, a mistake below a floor of up to {number(widest)} does not show: {where}."
        yield Said("gaps", said, "alarm")
    if first:
        yield Said(
            "gaps",
            f"Record {to_record(first, coverage)} to split the segment of {len(first.ops)} ops that ends in {first.op} "
            f"({'faulty' if first.faulty else 'blind'}, step {first.step}) into parts of at most {first.largest}.",
        )


def _meant(coverage: Coverage) -> str:
    """Which op that was not recorded has nearly the name of one that was, and is none."""
    lacking = {local_name(op) for segment in coverage.segments for op in segment.ops[:-1]}
    lacking |= {*map(local_name, coverage.unjudged)}
    pairs = {(name, *get_close_matches(name, sorted(lacking), 1)) for name in map(local_name, coverage.unknown)}
    meant = [f"{name} {pair[0]}" for name, *pair in sorted(pairs) if pair]
    return f" Is {listed(meant)}, which was not recorded?" if meant else ""


def _unmatched(result: Result) -> Iterator[Said]:
    """Ops that are not on both sides: of each reason one."""
    missing = [op for op in result.ops if op.status == "unmatched"]
    alike: dict[tuple[int, str | None], list[str]] = {}
    for op in missing:
        alike.setdefault((op.step, op.note), []).append(op.op)
    for (step, note), ops in [*alike.items()][:_LISTED]:
        yield Said("unmatched", f"{listed(by_name(ops))} in step {step}: {note}")
    if len(alike) > _LISTED:
        yield Said("unmatched", f"... and {sum(map(len, [*alike.values()][_LISTED:]))} more")
