"""A run's traces opened as one: that of one process, or those of all ranks."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from tracediff.english import few
from tracediff.errors import TraceError
from tracediff.inputs import fitting
from tracediff.trace.format import Step
from tracediff.trace.ranks import Ranks
from tracediff.trace.reader import Trace
from tracediff.trace.reading import header_of

Paths = Path | Sequence[Path]  # of a trace, or of those of all ranks of a run; a path may be a pattern, as rank*.trace


def open_trace(paths: Paths) -> Trace:
    """One trace, or those of all ranks of a run as one. Raises TraceError where ranks lack, or do not fit together."""
    several = [Trace(path) for path in files_of_run(paths)]
    return several[0] if len(several) == 1 and not several[0].is_one_of_several else together(several)


def files_of_run(paths: Paths) -> list[Path]:
    """The files that are meant: a pattern that is no file's name stands for those that fit it."""
    given = [paths] if isinstance(paths, Path) else paths
    return [file for path in given for file in fitting(path) or [path]]


def together(traces: Sequence[Trace]) -> Ranks:
    """The traces of all ranks as one. Raises TraceError, in words, for what is not one run's."""
    by_rank = _by_rank(traces)
    _same_tokens(by_rank)
    return Ranks(by_rank, [*by_rank])


def runs_of(paths: Sequence[Path]) -> list[list[Path]]:
    """The traces run by run: those of ranks that follow one another, until a rank comes again, are one run's."""
    runs: list[list[Path]] = []
    seen: set[int] = set()
    for path in paths:
        rank = _rank_of(path)
        if rank is None or rank in seen or not seen:
            runs.append([])
            seen = set()
        runs[-1].append(path)
        seen |= set() if rank is None else {rank}
    return runs


def _rank_of(path: Path) -> int | None:
    header = header_of(path)
    return header.rank if header else None


def _by_rank(traces: Sequence[Trace]) -> dict[int, Trace]:
    """The traces in the order of their ranks. Raises TraceError where one lacks, or is there twice."""
    found: dict[int, Trace] = {}
    n = traces[0].header.ranks
    for trace in traces:
        rank, ranks = trace.header.rank, trace.header.ranks
        if rank is None or ranks is None:
            raise TraceError(
                f'{trace.path}: its first line has no "rank" and "ranks", so it is no part of a run. Add both, or give '
                "one trace alone."
            )
        if ranks != n or rank >= ranks:
            raise TraceError(
                f"{trace.path} is of rank {rank} of {ranks}, {traces[0].path} of {n} ranks: give the traces of one run."
            )
        if rank in found:
            raise TraceError(f"{found[rank].path} and {trace.path} are both of rank {rank}: give each rank once.")
        found[rank] = trace
    lacking = [str(rank) for rank in range(n or 0) if rank not in found]
    if lacking:
        raise TraceError(
            f"{traces[0].path}: of {n} ranks {few(lacking, 8)} "
            f"{'is' if len(lacking) == 1 else 'are'} missing: give the traces of all, as in rank*.trace."
        )
    return dict(sorted(found.items()))


def _same_tokens(traces: dict[int, Trace]) -> None:
    (_, first), *others = traces.items()
    for rank, trace in others:
        for a, b in zip_longest(first.steps.values(), trace.steps.values()):
            if a is None or b is None:
                if first.cut or trace.cut:
                    break
                what = f"{len(first.steps)} and {len(trace.steps)} steps"
            elif (a.step, a.tokens, a.positions) == (b.step, b.tokens, b.positions):
                continue
            else:
                what = f"step {a.step} differs: {_fed(a)} and {_fed(b)}"
            raise TraceError(
                f"{first.path} and {trace.path}, rank {rank}, were not fed the same: {what}. Every rank writes all "
                "tokens of a step, with their positions."
            )


def _fed(step: Step) -> str:
    return f"tokens {list(step.tokens[:6])} at position {step.positions[0]}"
