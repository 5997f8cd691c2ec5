"""How time grows: with decode steps, tokens of a prompt, layers and vocabulary, stage by stage, on tiny models.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--quick] [--axis NAME] [--stage NAME] [--limit SECONDS]
                                                  [--out docs/performance.md]

CPU time, that of llama.cpp's process included, for other processes on the machine change it least. What a run costs
whatever its size (a process started, a library loaded on first use) is in the smallest sizes of each row; the exponent
is that of the last three: time ~ size^exponent. What takes more than the limit (two minutes) is ended, and not tried
with larger sizes. Needs 6 GB of disk and of memory; --quick needs neither.
"""

import argparse
import gc
import io
import math
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import linear_regression
from typing import Any

from rich.console import Console

from tracediff.engine.llama_cpp import LlamaCpp, Prompt
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.inspect.validate import validate
from tracediff.interchange.export import export_trace
from tracediff.interchange.importer import Options as ImportOptions
from tracediff.interchange.importer import import_trace
from tracediff.model.synthetic import Shape, write_model
from tracediff.names import wanted
from tracediff.pipeline import check_trace, compare_traces
from tracediff.report import json_report, terminal
from tracediff.result import Result
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter
from tracediff_reference.protocol import Options

_MARK = "<!-- growth -->"  # around the tables in the page
_TINY: dict[str, Any] = {
    "n_layer": 1,
    "n_embd": 32,
    "n_head": 2,
    "n_head_kv": 1,
    "n_ff": 48,
    "n_vocab": 320,
    "n_ctx": 16_384,
    "loud": True,
}
_FITTED = 3  # sizes, the largest


@dataclass(frozen=True)
class Axis:
    """One thing that grows, all else being tiny: its sizes, those of a quick run, and what else it changes."""

    name: str
    title: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    shape: str | None = None  # the field of Shape that it is
    n_prompt: int | None = None  # it is this itself where None


AXES = (
    Axis("steps", "Decode steps, a token each", (100, 300, 1000, 3000, 10_000), (25, 50, 100), None, 2),
    Axis("tokens", "Tokens of the prompt", (128, 256, 512, 1024, 2048, 4096), (32, 64, 128)),
    Axis("layers", "Layers", (8, 20, 50, 100, 200), (4, 8, 16), "n_layer", 4),
    Axis("vocabulary", "Vocabulary", (1024, 4096, 16_384, 65_536, 262_144), (1024, 2048, 4096), "n_vocab", 4),
)


@dataclass
class Case:
    """One size of an axis: its model and traces in a folder of its own. Each is made when it is first asked for."""

    axis: Axis
    size: int
    folder: Path
    console: Console = field(default_factory=lambda: Console(file=io.StringIO(), width=100))

    @cached_property
    def model(self) -> Path:
        """A random model of this size."""
        sizes = _TINY | ({self.axis.shape: self.size} if self.axis.shape else {})
        return write_model(self.folder / "model.gguf", Shape(**sizes), "F32")

    @property
    def prompt(self) -> tuple[int, ...]:
        """Ids below 256: bytes."""
        return tuple((37 * i + 11) % 250 for i in range(self.axis.n_prompt or self.size))

    def trace_llama_cpp(self) -> Path:
        """Every op."""
        out = self.folder / "reference.trace"
        n_decode = self.size if self.axis.name == "steps" else 0
        options = Options(threads=1)
        LlamaCpp(self.model, Prompt(tokens=self.prompt), out, n_decode=n_decode, options=options).wait()
        return out

    def trace_torch(self) -> Path:
        """Every op, of the tokens that llama.cpp was fed."""
        steps = [*Trace(self.reference).steps.values()]
        return trace_torch(self.model, self.folder / "candidate.trace", TorchOptions(), steps=steps)

    def compare(self) -> Result:
        """The two traces, without the model."""
        return compare_traces(self.reference, self.candidate)

    def check(self, trace: Path) -> Result:
        """By replay; raises AssertionError for a false alarm, for the time of that would be another."""
        result = check_trace(trace, self.model)
        assert not result.faulty, result.faulty[0]
        return result

    def some(self, name: str, kept: Callable[[str], bool]) -> Path:
        """The candidate's trace with those ops alone."""
        whole, out = Trace(self.candidate), self.folder / f"{name}.trace"
        with TraceWriter(out, "growth") as writer:
            for number, step in whole.steps.items():
                writer.step(number, step.tokens, step.positions)
                for record in filter(lambda record: kept(record.op), whole.step_ops(number)):
                    writer.op(number, record.op, whole.stored(record), record.dtype or "f32")
        return out

    def import_npz(self) -> None:
        """The candidate's trace, exported before."""
        import_trace("npz", self.npz, self.folder / "imported.trace", ImportOptions(), say=_silent)

    def report(self) -> None:
        """For the terminal, and as JSON."""
        self.console.print(terminal.render(self.result))
        json_report.render(self.result)

    @cached_property
    def reference(self) -> Path:
        """llama.cpp's trace."""
        return self.trace_llama_cpp()

    @cached_property
    def candidate(self) -> Path:
        """torch's."""
        return self.trace_torch()

    @cached_property
    def states(self) -> Path:
        """Hidden states and logits."""
        return self.some("states", lambda op: wanted(op, "layers"))

    @cached_property
    def logits(self) -> Path:
        """The logits."""
        return self.some("logits", lambda op: op == "output")

    @cached_property
    def npz(self) -> Path:
        """The candidate's trace in another format."""
        export_trace(self.candidate, self.folder / "candidate.npz", _silent)
        return self.folder / "candidate.npz"

    @cached_property
    def result(self) -> Result:
        """Of the comparison."""
        return self.compare()


@dataclass(frozen=True)
class Stage:
    """What is timed, what must be there before, and the trace whose records are counted."""

    run: Callable[[Case], object]
    before: tuple[str, ...] = ("candidate",)
    counted: str = "candidate"


STAGES = {
    "trace, llama.cpp": Stage(lambda case: case.reference, (), "reference"),
    "trace, torch": Stage(lambda case: case.candidate, ("reference",)),
    "read": Stage(lambda case: Trace(case.candidate)),
    "compare": Stage(Case.compare),
    "check, every op": Stage(lambda case: case.check(case.candidate)),
    "check, hidden states": Stage(lambda case: case.check(case.states), ("states",), "states"),
    "check, logits alone": Stage(lambda case: case.check(case.logits), ("logits",), "logits"),
    "validate": Stage(lambda case: validate(case.candidate, case.model)),
    "import": Stage(Case.import_npz, ("npz",)),
    "report": Stage(Case.report, ("result",)),
}


class TooLong(BaseException):
    """A cell of the table takes more than the limit: no `except Exception` may swallow it."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises TooLong after so many seconds of CPU time of this process. A timer of CPU time would make it coarse."""
    began = time.process_time()

    def look(*_: object) -> None:
        if time.process_time() - began > seconds:
            raise TooLong

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _silent(text: str) -> None:
    """What an import says is not of interest here."""


def cpu_seconds(function: Callable[[], object]) -> float:
    """Of this process and of the children that ended meanwhile."""

    def now() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    gc.collect()
    began = now()
    function()
    return now() - began


def measured(
    axis: Axis, sizes: tuple[int, ...], stages: list[str], seconds: float
) -> Iterator[tuple[int, str, float, int]]:
    """Size, stage, CPU seconds and number of records; the smallest size twice, for what is done once. Nothing of what
    takes too long, or needs what does.
    """
    too_long: set[str] = set()
    for size in (sizes[0], *sizes):
        with tempfile.TemporaryDirectory() as folder:
            case = Case(axis, size, Path(folder))
            for name, stage in ((name, STAGES[name]) for name in stages):
                if name in too_long:
                    continue
                try:
                    with limit(seconds):
                        _ = [getattr(case, attribute) for attribute in ("model", *stage.before)]
                    with limit(seconds):
                        took = cpu_seconds(lambda stage=stage, case=case: stage.run(case))  # type: ignore[misc]
                except TooLong:
                    too_long.update(stages if name.startswith("trace") else [name])
                    print(f"{axis.name} {size:,} {name}: too long", file=sys.stderr, flush=True)
                    continue
                yield size, name, took, len(Trace(getattr(case, stage.counted)).ops)


def exponent(times: dict[int, float]) -> str:
    """Of time ~ size^exponent, fitted to the largest sizes."""
    points = sorted(times.items())[-_FITTED:]
    if len(points) < _FITTED:
        return ""
    return f"{linear_regression(*zip(*((math.log(size), math.log(t)) for size, t in points), strict=True)).slope:.2f}"


def table(axis: Axis, sizes: tuple[int, ...], stages: list[str], seconds: float) -> Iterator[str]:
    """A table of CPU time per record, and the exponents."""
    times: dict[str, dict[int, float]] = {stage: {} for stage in stages}
    cells: dict[tuple[str, int], str] = {}
    for size, stage, took, count in measured(axis, sizes, stages, seconds):
        times[stage][size], cells[stage, size] = took, f"{1e6 * took / count:,.0f}"
        print(f"{axis.name} {size:,} {stage}: {took:.2f} s, {count:,} records", file=sys.stderr, flush=True)
    yield f"**{axis.title}**: microseconds of CPU time per record"
    yield ""
    yield f"| stage | {' | '.join(f'{size:,}' for size in sizes)} | exponent |"
    yield f"|{'---|' * (len(sizes) + 2)}"
    for stage in stages:
        each = " | ".join(cells.get((stage, size), f"> {seconds:.0f} s") for size in sizes)
        yield f"| {stage} | {each} | {exponent(times[stage])} |"
    yield ""


def main() -> None:
    """Measure, print, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: minutes")
    parser.add_argument("--axis", choices=[axis.name for axis in AXES])
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--limit", type=float, default=120, help="seconds for a cell of the table")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before, _, after = args.out.read_text().split(_MARK) if args.out else ("", "", "")
    lines = []
    for axis in AXES:
        if args.axis in (None, axis.name):
            stages = [args.stage] if args.stage else [*STAGES]
            for line in table(axis, axis.quick if args.quick else axis.sizes, stages, args.limit):
                print(line, flush=True)
                lines.append(line)
    if args.out:
        tables = "\n".join(lines)
        args.out.write_text(f"{before}{_MARK}\n{tables}{_MARK}{after}")


if __name__ == "__main__":
    main()
