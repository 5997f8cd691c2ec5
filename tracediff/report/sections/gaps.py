"""What a trace leaves open: ops that one side lacks, and notes on the traces themselves."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from tracediff.report.parts import ALARM, count, hanging, heading, line, listed, local_name, number
from tracediff.result import Coverage, Result

_LISTED = 8


def not_judged(result: Result) -> Iterator[RenderableType]:
    """What replay could not judge op by op, and what to record next; nothing where the trace is full."""
    coverage = result.coverage
    if coverage is None or coverage.full:
        return
    yield heading("Could not be judged, and what to record next")
    yield from (hanging("  -", Text.assemble(said)) for said in _gaps(coverage))


def _gaps(coverage: Coverage) -> Iterator[str | tuple[str, str]]:
    several = [segment for segment in coverage.segments if len(segment.ops) > 1]
    if several:
        longest = max(len(segment.ops) for segment in several)
        yield (
            f"{coverage.together} of {count(coverage.n_ops, 'op')} were judged only as part of a segment "
            f"({count(len(several), 'segment')}, the longest of {longest} ops)."
        )
    for ops, what in (
        (coverage.unjudged, "not judged at all"),
        (coverage.unknown, "no op of this model, and not judged"),
        (coverage.statistics_only, "recorded as statistics only"),
        (coverage.some_tokens, "recorded for some tokens only"),
    ):
        if ops:
            yield f"{what}: {_names(ops)}."
    blind = [segment for segment in coverage.segments if segment.blind]
    if blind:
        widest = max(segment.floor for segment in blind)
        where = _names(tuple(dict.fromkeys(segment.op for segment in blind)))
        yield f"blind, a mistake below a floor of up to {number(widest)} does not show: {where}.", ALARM
    first = next((segment for segment in several if segment.faulty or segment.blind), None)
    if first:
        yield (
            f"Record {listed([*first.record])} to split the segment of {len(first.ops)} ops that ends in {first.op} "
            f"({'faulty' if first.faulty else 'blind'}, step {first.step}) into parts of at most {first.largest}."
        )


def _names(ops: tuple[str, ...]) -> str:
    """Each name once for all its layers."""
    layers: dict[str, int] = {}
    for op in ops:
        layers[local_name(op)] = layers.get(local_name(op), 0) + 1
    names = [
        f"{name} in {n} layers" if n > 1 else next(op for op in ops if local_name(op) == name)
        for name, n in layers.items()
    ]
    return listed(names)


def unmatched(result: Result) -> Iterator[RenderableType]:
    """Ops that are not on both sides."""
    missing = [op for op in result.ops if op.status == "unmatched"]
    if not missing:
        return
    sides = "Not on both sides" if result.reference else "Not judged"
    yield heading(f"{sides}: {len(missing)} of {len(result.ops)} (--require PATTERN makes that a failure)")
    alike: dict[tuple[int, str | None], list[str]] = {}
    for op in missing:
        alike.setdefault((op.step, op.note), []).append(op.op)
    for (step, note), ops in [*alike.items()][:_LISTED]:
        yield line(f"{_names(tuple(ops))} in step {step}: {note}")
    if len(alike) > _LISTED:
        yield line(f"... and {sum(map(len, [*alike.values()][_LISTED:]))} more")


def notes(result: Result) -> Iterator[RenderableType]:
    """What a reader must know of the traces."""
    if result.notes:
        yield heading("Notes")
        yield from (line(note) for note in result.notes)
