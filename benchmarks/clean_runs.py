"""The false-alarm benchmark: runs without a mistake, of which replay must call no op faulty.

    python benchmarks/clean_runs.py [--families llama,demo] [--weights F32,Q4_K_M] [--processes N] [--minutes N]
                                    [--out docs/clean-runs.md]

Every family in every weight type. Of each model llama.cpp with half of its options and torch in half of its dtypes,
which take turns, as do the lengths of the prompts: any two of family, weight type, option and length meet. Two decode
steps follow each prompt. They come in a random order, the same in each run: when the minutes are over, those that
were run are a sample of all. Then the margin between sound and faulty is calibrated on half of the runs.
"""

import argparse
import itertools
import math
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch

from tracediff.engine.llama_cpp import LlamaCpp, Prompt
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import TracediffError
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.synthetic import DEMO, Shape, write_model
from tracediff.model.weights import Weights
from tracediff.names import split
from tracediff.replay.judging import judge_all
from tracediff.replay.replay import Replay
from tracediff.replay.score import MARGIN
from tracediff.result import Local
from tracediff.trace.reader import Trace
from tracediff_reference.protocol import Options

_SIZES: dict[str, Any] = {"n_layer": 2, "n_embd": 256, "n_ff": 512}
# Heads are 32 or 64 channels wide: a q8_0 cache needs blocks of 32. "narrow" has rows that K-quants cannot hold.
FAMILIES: Mapping[str, Shape] = MappingProxyType(
    {
        "llama": Shape("llama", **_SIZES, n_head=8, n_head_kv=2, theta=10_000.0, eps=1e-5),
        "llama3": Shape("llama", **_SIZES, n_head=4, n_head_kv=2, theta=500_000.0, eps=1e-5, rope_factors=True),
        "qwen2": Shape("qwen2", **_SIZES, n_head=8, n_head_kv=2, tied=True),
        "qwen3": Shape("qwen3", **_SIZES, n_head=5, n_head_kv=1, head_dim=64),
        "narrow": Shape("qwen2", n_layer=2, n_embd=96, n_head=3, n_head_kv=1, n_ff=160),
        "demo": DEMO,
        "deep": Shape("qwen2", n_layer=16, n_embd=256, n_head=8, n_head_kv=2, n_ff=512, tied=True, loud=True),
    }
)
WEIGHTS = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q4_K_S", "Q5_K_S", "Q6_K",
    "IQ4_XS", "Q4_K_M",
)  # fmt: skip
LLAMA_CPP: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "defaults": {},
        "small batches": {"n_batch": 9, "n_ubatch": 4},
        "f16 cache": {"kv_type": "f16"},
        "flash": {"flash_attn": True},
        "flash, f16 cache": {"flash_attn": True, "kv_type": "f16", "threads": 2},
        "flash, q8_0 cache": {"flash_attn": True, "kv_type": "q8_0"},
        "hidden states": {"capture": "layers"},
        "hidden states, flash, f16 cache": {"capture": "layers", "flash_attn": True, "kv_type": "f16"},
        "hidden states, flash, q8_0 cache": {"capture": "layers", "flash_attn": True, "kv_type": "q8_0"},
        "logits": {"capture": "logits"},
        "logits, flash, f16 cache": {"capture": "logits", "flash_attn": True, "kv_type": "f16"},
    }
)
TORCH: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **{dtype: {"dtype": dtype} for dtype in ("f64", "f32", "bf16", "f16")},
        "hidden states, bf16": {"dtype": "bf16", "capture": "layers"},
        "hidden states, f16": {"dtype": "f16", "capture": "layers"},
        "logits, bf16": {"dtype": "bf16", "capture": "logits"},
        "logits, f16": {"dtype": "f16", "capture": "logits"},
    }
)
LENGTHS = (17, 1, 300, 2)
# Depth makes no difference to an op, but to a segment of all layers: recorded are the logits alone, of short prompts.
DEEP, SHORT = ("deep",), (17, 1, 2)


@dataclass(frozen=True, slots=True)
class Run:
    """One trace to make: `how` is a key of LLAMA_CPP or of TORCH."""

    family: str
    weights: str
    engine: str
    how: str
    length: int

    def __str__(self) -> str:
        return f"{self.family} {self.weights}, {self.engine} ({self.how}), prompt of {self.length}"


@dataclass(slots=True)
class Worst:
    """The largest of each figure over some records."""

    n: int = 0
    nmse: float = 0.0
    to_floor: float = 0.0
    excess: float = 0.0
    alarms: int = 0
    blind: int = 0
    leads: list[float] = field(default_factory=list)
    arithmetic: Counter[str] = field(default_factory=Counter)

    def add(self, local: Local) -> None:
        """Count one record."""
        self.n += 1
        self.nmse = max(self.nmse, local.nmse)
        self.to_floor = max(self.to_floor, local.nmse / local.floor if local.floor else 0.0)
        self.excess = max(self.excess, local.excess)
        self.alarms += local.faulty
        self.blind += local.blind
        self.leads.append(local.lead)
        self.arithmetic[local.arithmetic] += 1

    def __str__(self) -> str:
        return f"{self.nmse:.0e}, {self.to_floor:.2f}, {self.excess:.2f}" if self.n else ""


Key = tuple[Run, str]  # and the kind of op
Case = TypeVar("Case")
Outcome = TypeVar("Outcome")


def runs(family: str, weights: str) -> Iterator[Run]:
    """Those of one model: every other option, the odd ones of one weight type, the even ones of the next.

    Of a deep one all with logits alone.
    """
    i, j = list(FAMILIES).index(family), WEIGHTS.index(weights)
    lengths = SHORT if family in DEEP else LENGTHS
    for engine, ways in (("llama.cpp", LLAMA_CPP), ("torch", TORCH)):
        for k, how in enumerate(ways):
            if "logits" in how if family in DEEP else (i + j + k) % 2 == 0:
                yield Run(family, weights, engine, how, lengths[((i + j + k) // 2 + i) % len(lengths)])


def model_of(folder: Path, family: str, weights: str) -> Path:
    """A generated model, made on first use."""
    path = folder / f"{family}-{weights}.gguf"
    return path if path.exists() else write_model(path, FAMILIES[family], weights)


def tokens_of(length: int, n_vocab: int) -> tuple[int, ...]:
    """A BOS and random tokens."""
    return (256, *np.random.default_rng(length).integers(0, n_vocab, length - 1).tolist())


Judged = tuple[str, str, int, Local]  # kind, op, step and local error of a record


@cache
def kept_folder() -> tempfile.TemporaryDirectory[str]:
    """Where a process keeps its models, for all runs that it has of each."""
    return tempfile.TemporaryDirectory()


def work(run: Run) -> list[tuple[Run, list[Judged] | str]]:
    """What was judged of a run, or why it could not be run."""
    torch.set_num_threads(1)
    try:
        return [(run, list(locals_of(run, Path(kept_folder().name))))]
    except TracediffError as error:
        return [(run, str(error).partition("\n")[0])]


def locals_of(run: Run, folder: Path) -> Iterator[Judged]:
    """Trace a run and replay it."""
    model = model_of(folder, run.family, run.weights)
    file = GGUFFile(model)
    graph = build_graph(file)
    tokens, out = tokens_of(run.length, graph.hparams.n_vocab), folder / "clean.trace"
    options = {"capture": "all"} | (TORCH if run.engine == "torch" else LLAMA_CPP)[run.how]  # type: ignore[operator]
    wanted = options.pop("capture")
    capture = "layers" if wanted == "logits" else wanted
    if run.engine == "torch":
        trace_torch(model, out, TorchOptions(capture=capture, **options), tokens, n_decode=2)  # type: ignore[arg-type]
    else:
        options = {"threads": 1} | options
        LlamaCpp(model, Prompt(tokens=tokens), out, capture=capture, n_decode=2, options=Options(**options)).wait()  # type: ignore[arg-type]
    trace = Trace(out)
    if wanted == "logits":
        trace = trace.without({key for key in trace.ops if key[1] != "output"})
    for _, record, local in judge_all([Replay(trace, graph, Weights(file, keep_bytes=1 << 28))]):
        whole = {"ffn_residual": "whole layer", "output": "whole model"}.get(split(record.op)[1])
        segment = whole if len(local.segment) > 1 else None
        yield segment or graph[record.op].kind, record.op, record.step, local


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [[*head], *([str(cell) for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def merged(found: Mapping[Key, Worst], **wanted: str) -> Worst:
    """The worst over all records whose run, or kind, is as wanted."""
    total = Worst()
    for (run, kind), worst in found.items():
        if all((kind if name == "kind" else getattr(run, name)) == value for name, value in wanted.items()):
            total.n += worst.n
            total.alarms += worst.alarms
            total.blind += worst.blind
            total.nmse = max(total.nmse, worst.nmse)
            total.to_floor = max(total.to_floor, worst.to_floor)
            total.excess = max(total.excess, worst.excess)
            total.arithmetic += worst.arithmetic
    return total


def report(
    found: Mapping[Key, Worst], alarms: list[tuple[object, ...]], command: str, seconds: float, n_runs: int
) -> str:
    """The document."""
    used = {run for run, _ in found}
    kinds = list(dict.fromkeys(kind for _, kind in found))
    families, weights = (list(dict.fromkeys(getattr(run, name) for run, _ in found)) for name in ("family", "weights"))
    figures = ("records", "false alarms", "blind", "worst NMSE", "worst NMSE / floor", "worst excess")

    def row(*first: str, **wanted: str) -> list[object]:
        w = merged(found, **wanted)
        return [*first, f"{w.n:,}", w.alarms, w.blind, f"{w.nmse:.0e}", f"{w.to_floor:.2f}", f"{w.excess:.2f}"]

    parts = [
        "# Clean runs\n\nRuns without a mistake: replay must call no op of them faulty. "
        f"Written in {seconds / 60:.0f} minutes by\n\n    {command}\n\n"
        f"{len(used)} of {n_runs} runs, in a random order ({', '.join(families)} in {len(weights)} weight types; "
        f"llama.cpp with {len(LLAMA_CPP)} sets of options, torch with {len(TORCH)}; prompts of "
        f"{', '.join(map(str, sorted(LENGTHS)))} tokens and two decode steps), {sum(w.n for w in found.values()):,} "
        f"records, **{len(alarms)} false alarms**. Rounding is fitted as `tracediff check` fits it. An op is faulty "
        "when its NMSE exceeds its floor or one element its "
        "bound (excess above 1), so NMSE / floor and excess are the headroom. *Blind*: of a segment so long and so "
        "coarsely rounded that its floor hides any mistake, which the report says.",
        "## By kind of op",
    ]
    for engine in dict.fromkeys(run.engine for run, _ in found):
        parts += [f"### {engine}", table(("kind", *figures), (row(k, engine=engine, kind=k) for k in kinds))]
    parts += [calibration(found), "## By option"]
    ways = dict.fromkeys((run.engine, run.how) for run, _ in found)
    parts.append(table(("engine", "option", *figures), (row(e, how, engine=e, how=how) for e, how in ways)))
    parts.append("## Fitted arithmetic\n\nRecords of matmuls that each arithmetic fitted, by weight type.")
    parts.append(_arithmetic(found, weights))
    parts.append("## By family and weight type\n\nEach cell: worst NMSE, worst NMSE / floor, worst excess.")
    for engine in dict.fromkeys(run.engine for run, _ in found):
        for family in families:
            cells = (
                (w, *(merged(found, engine=engine, family=family, weights=w, kind=kind) for kind in kinds))
                for w in weights
            )
            parts += [f"### {family}, {engine}", table(("weights", *kinds), cells)]
    if alarms:
        parts.append("## False alarms\n\n" + table(("run", "op", "step", "NMSE", "floor", "excess", "fit"), alarms))
    return "\n\n".join(parts) + "\n"


def calibration(found: Mapping[Key, Worst]) -> str:
    """The margin that half of the runs need, and what it makes of the other half."""
    runs = sorted({run for run, _ in found}, key=str)
    random.Random(0).shuffle(runs)
    halves = [{*runs[::2]}, {*runs[1::2]}]
    leads = [[lead for (run, _), worst in found.items() if run in half for lead in worst.leads] for half in halves]
    needed = max(0.0, max(filter(math.isfinite, leads[0]), default=0.0))
    rows = [
        (name, f"{margin:.2f}", *(f"{sum(lead > margin for lead in half):,} of {len(half):,}" for half in leads))
        for name, margin in (("needed by the first half", needed), ("`MARGIN`, in use", MARGIN))
    ]
    return (
        "## The margin\n\nA record is faulty where the best explanation that finds a mistake beats the best that does "
        "not by more than a margin, in nats (`tracediff/replay/score.py`). Calibrated on a random half of these runs, "
        "as the smallest one without a false alarm, and tested on the other. Between 0 and the margin a record is "
        f"undecided: {sum(0 < lead <= MARGIN for half in leads for lead in half):,} are.\n\n"
        + table(("margin", "nats", f"faulty in {len(halves[0])} runs", f"faulty in {len(halves[1])} others"), rows)
    )


def _arithmetic(found: Mapping[Key, Worst], weights: Iterable[str]) -> str:
    def names(engine: str, weight: str, kind: str) -> str:
        count = merged(found, engine=engine, weights=weight, kind=kind).arithmetic
        return "; ".join(f"{name}: {n:,}" for name, n in count.most_common())

    return table(
        ("weights", "llama.cpp: linear", "torch: linear"),
        ((w, names("llama.cpp", w, "linear"), names("torch", w, "linear")) for w in weights),
    )


def sampled(
    work: Callable[[Case], Iterable[Outcome]], cases: Iterable[Case], processes: int, seconds: float
) -> Iterator[Outcome]:
    """What comes of the cases, in so many processes; those that have not begun when the time is over are left out."""
    end = time.monotonic() + seconds
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting, running = iter(cases), set()  # type: ignore[var-annotated]
        while True:
            while len(running) < processes and time.monotonic() < end and (case := next(waiting, None)) is not None:
                running.add(pool.submit(work, case))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield from future.result()


def main() -> int:
    """Run the matrix; 1 when there was a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--weights", default=",".join(WEIGHTS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, done = time.monotonic(), 0
    found: dict[Key, Worst] = defaultdict(Worst)
    alarms: list[tuple[object, ...]] = []
    models = itertools.product(args.families.split(","), args.weights.split(","))
    cases = [run for model in models for run in runs(*model)]
    random.Random(0).shuffle(cases)
    for run, judged in sampled(work, cases, args.processes, 60 * args.minutes):
        done += 1
        if isinstance(judged, str):
            alarms.append((run, judged, "", "", "", "", ""))
            judged = []
        for kind, op, step, local in judged:
            found[run, kind].add(local)
            if local.faulty:
                figures = (f"{local.nmse:.1e}", f"{local.floor:.1e}", f"{local.excess:.3g}", local.arithmetic)
                alarms.append((run, op, step, *figures))
        print(f"{time.monotonic() - began:4.0f} s, {done:4} runs, {len(alarms)} alarms: {run}", file=sys.stderr)
    command = " ".join(["python", "benchmarks/clean_runs.py", *sys.argv[1:]])
    text = report(found, alarms, command, time.monotonic() - began, len(cases))
    print(text if args.out is None else f"{done} runs, {len(alarms)} false alarms: {args.out}")
    if args.out:
        args.out.write_text(text)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
