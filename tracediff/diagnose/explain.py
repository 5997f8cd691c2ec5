"""Replay a trace, then explain its faulty ops by trying the bank on them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tracediff.diagnose.bank import BANK, Context, Mistake, Seen
from tracediff.diagnose.shapes import describe
from tracediff.model.arithmetic import scheme_named
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.names import split
from tracediff.replay import Replay
from tracediff.result import Cause, Local, OpResult
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

# A hypothesis that leaves so little of the error needs no rival.
_BEYOND_DOUBT = 1e-4
_KEEP = 256 << 20  # bytes of weights that stay dequantised: all of a small model, some layers of a real one


@dataclass(frozen=True, slots=True)
class Judged:
    """What replay says of one trace, and how to explain what it found."""

    locals: dict[tuple[int, str], Local]
    explain: Callable[[list[OpResult]], list[OpResult]]


def replay_and_explain(trace: Trace, model: Path, arithmetic: str | None, progress: Callable[[float], None]) -> Judged:
    """Judge every record of the trace by replay against the GGUF file `model`."""
    file = GGUFFile(model)
    replay = Replay(
        trace, build_graph(file), Weights(file, keep_bytes=_KEEP), scheme_named(arithmetic) if arithmetic else None
    )
    locals_ = {(record.step, record.op): local for record, local in replay.run(progress)}
    return Judged(locals_, Explainer(replay).explain)


class Explainer:
    """Tries mistakes on faulty ops; what explained one op is tried first on its kin in other layers and steps."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._worked: dict[str, str] = {}

    def explain(self, ops: list[OpResult]) -> list[OpResult]:
        """The ops, those that are faulty with their cause or the shape of their error."""
        return [self._explain(op) if op.status == "faulty" and op.local else op for op in ops]

    def _explain(self, result: OpResult) -> OpResult:
        assert result.local
        record = self._replay.trace.ops[result.step, result.op]
        local_name = split(result.op)[1]
        causes = []
        for mistake in self._ordered(local_name, result.local.segment):
            for ops, text in self._hypotheses(mistake, record, result.local):
                local = self._replay.under(record, ops, result.local)
                if not local.faulty:
                    causes.append(Cause(mistake.name, local.nmse, text))
                    if local.nmse <= _BEYOND_DOUBT * result.local.nmse:
                        break
            if causes and causes[-1].nmse <= _BEYOND_DOUBT * result.local.nmse:
                break
        if causes:
            best = min(causes, key=lambda cause: cause.nmse)
            self._worked[local_name] = best.name
            return replace(result, cause=best)
        recorded, exact, _ = self._replay.made(record)
        return replace(result, shape=describe(recorded, exact))

    def _ordered(self, local_name: str, segment: tuple[str, ...]) -> Iterator[Mistake]:
        """Mistakes that apply to some op of the segment, the one that worked last time first."""
        names = {split(name)[1] for name in segment}
        first = self._worked.get(local_name)
        applicable = [m for m in BANK.values() if names & set(m.ops)]
        yield from sorted(applicable, key=lambda mistake: mistake.name != first)

    def _hypotheses(self, mistake: Mistake, record: OpRecord, local: Local) -> Iterator[tuple[list[Op], str]]:
        """Changed ops and what they mean; in a segment, the same change in every layer of it."""
        graph, file = self._replay.graph, self._replay.weights.file
        targets = [graph[name] for name in local.segment if split(name)[1] in mistake.ops]
        seen = None
        if len(local.segment) == 1:
            recorded, _, inputs = self._replay.made(record)
            seen = Seen(inputs, recorded)
        names = list(dict.fromkeys(split(op.name)[1] for op in targets))
        # A mistake in a kernel shows wherever the kernel is used; one in a call, at that call alone.
        for chosen in [names, *([name] for name in names if len(names) > 1)]:
            alike = [op for op in targets if split(op.name)[1] in chosen]
            variants = [list(mistake.change(op, Context(graph, file, seen))) for op in alike]
            for changed in zip(*filter(None, variants), strict=False):
                ops = [op for op, _ in changed]
                where = ", ".join(dict.fromkeys(split(op.name)[1] for op in ops))
                yield ops, (f"{where}: " if len(local.segment) > 1 else "") + changed[0][1]
