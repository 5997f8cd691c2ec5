"""What the graphs lifted from llama.cpp's own are worth: every architecture that it knows, traced and judged.

    python benchmarks/architectures.py [--only gemma3,phi3] [--jobs 1] [--seconds 300]

Of each architecture a tiny model, made from metadata alone (tiny_models.py), in float32 and as llama.cpp quantises it;
each with and without flash attention: a prompt and two decode steps, of which replay must call no op faulty. The torch
engine runs the same tokens in llama.cpp's arithmetic: its logits against llama.cpp's. An architecture is a row, made in
a process of its own and kept in docs/architectures.json as soon as it is there: what is kept is not made again, unless
--only names it.
"""

import argparse
import json
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tiny_checkpoints
import tiny_models
import torch
from msgspec import Struct, field
from tiny_metadata import ARCHITECTURES, TRANSFORMERS

from tracediff.engine.llama_cpp import LlamaCpp, Prompt
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.engine.transformers_run import trace_model, trace_transformers
from tracediff.errors import TracediffError
from tracediff.model.families import has_family
from tracediff.model.model import Model
from tracediff.model.synthetic import quantize
from tracediff.numerics.evaluate import is_covered
from tracediff.replay.judging import judge_all
from tracediff.replay.misshapen import misshapen
from tracediff.replay.replay import Replay
from tracediff.trace.reader import Trace
from tracediff_reference.protocol import Options

DOCS = Path(__file__).parents[1] / "docs"
KEPT, PAGE = DOCS / "architectures.json", DOCS / "architectures.md"
TOKENS, N_DECODE = (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12), 2
WEIGHTS = ("F32", "F16", "Q8_0", "Q4_K_M")
BUGS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)  # that show in one architecture alone
# NMSE of the logits of two engines in float32: of a state space model 2e-10. Where GELU is looked up by
# float16 (ggml-cpu/vec.h), a value on a boundary goes one way in the one and the other way in the other.
SAME_LOGITS, SAME_BUT_FOR_TABLES = 1e-9, 1e-7
INFINITE = 1e38  # -FLT_MAX is what some set logits to that are never to be chosen
TABLES = ("gelu", "geglu", "gelu_quick", "geglu_quick")


class Cell(Struct, omit_defaults=True):
    """One trace of llama.cpp, judged: how many records, and of what kinds of op those are that are not sound."""

    records: int = 0
    faulty: dict[str, int] = field(default_factory=dict)  # by kind of op, and prefill or decode
    undecided: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_clean(self) -> bool:
        """Whether all was traced, and all of it is sound."""
        return not self.error and not self.faulty and not self.undecided


class Row(Struct, omit_defaults=True):
    """What was found of one architecture."""

    ops: int = 0
    by_hand: bool = False  # a hand-written family
    uncovered: tuple[str, ...] = ()  # kinds of op that have no definition
    cells: dict[str, Cell] = field(default_factory=dict)
    logits: float | None = None  # of the torch engine against llama.cpp: NMSE, the worst step's
    has_tables: bool = False
    torch_error: str | None = None
    transformers: Cell | None = None  # its trace, judged; of a model as its GGUF loader takes it
    transformers_logits: float | None = None
    error: str | None = None  # why there is no more

    @property
    def is_clean(self) -> bool:
        """Whether every trace is."""
        return bool(self.cells) and all(cell.is_clean for cell in self.cells.values())

    @property
    def has_same_logits(self) -> bool:
        """Whether the torch engine's are llama.cpp's."""
        return self.logits is not None and self.logits <= (SAME_BUT_FOR_TABLES if self.has_tables else SAME_LOGITS)


def make_row(arch: str, folder: Path) -> Row:
    """Make the models of an architecture, trace and judge them."""
    row = Row()
    try:
        base = tiny_models.write(arch, folder / "F32.gguf")
        model = Model(base)
        graph = model.graph
    except (RuntimeError, TracediffError) as error:
        return Row(error=first_reason(str(error)))
    row.ops, row.by_hand = len(graph.ops), has_family(model.file)
    row.has_tables = any(op.kind in TABLES for op in graph)
    row.uncovered = tuple(sorted({op.kind for op in graph if not is_covered(op)}))
    for weights in WEIGHTS:
        try:
            path = base if weights == "F32" else quantised(arch, base, weights)
        except (RuntimeError, TracediffError) as error:
            row.cells[weights] = Cell(error=first_reason(str(error)))
            continue
        for flash in (False, True):
            out = folder / f"{weights}{flash}.trace"
            row.cells[f"{weights}, flash" if flash else weights] = cell_of(path, out, flash)
    with_torch(row, model, folder)
    with_transformers(row, arch, folder)
    return row


def with_transformers(row: Row, arch: str, folder: Path) -> None:
    """Run the architecture in transformers, judge that by llama.cpp's graph, and compare the logits with its own."""
    known = tiny_checkpoints.CLASSES.get(arch)
    if not known and arch not in TRANSFORMERS:
        return
    try:
        path = folder / "transformers.gguf"
        if known:
            known.write(arch, path)
        else:
            others, without = TRANSFORMERS[arch]
            tiny_models.write(arch, path, others=others, without=without)
        model, reference, out = Model(path), folder / "reference.trace", folder / "transformers.trace"
        LlamaCpp(model, Prompt(tokens=TOKENS), reference, n_decode=N_DECODE, options=Options(threads=1)).wait()
        r = Trace(reference)
        if known:
            trace_model(tiny_checkpoints.load(arch, path), model, out, TorchOptions(), (), steps=[*r.steps.values()])
        else:
            trace_transformers(model, out, TorchOptions(), (), steps=[*r.steps.values()])
        c = Trace(out)
        row.transformers, row.transformers_logits = judged(c, model), logits_nmse(model, r, c)
    except (RuntimeError, TracediffError) as error:
        row.transformers = Cell(error=first_reason(str(error).replace(f"{folder}/", "")))
    except BUGS as error:
        row.transformers = Cell(error=f"{type(error).__name__}: {first_reason(str(error))}")


def quantised(arch: str, base: Path, weights: str) -> Path:
    """The model in another type; of K-quants one of wider rows."""
    out = base.with_stem(weights)
    if "_K" in weights:
        base = tiny_models.write(arch, base.with_stem("wide"), wide=True)
    return quantize(base, out, weights)


def cell_of(path: Path, out: Path, flash: bool) -> Cell:
    """Trace a model in llama.cpp, and judge it."""
    try:
        model, options = Model(path), Options(threads=1, flash_attn=flash)
        LlamaCpp(model, Prompt(tokens=TOKENS), out, n_decode=N_DECODE, options=options).wait()
        return judged(Trace(out), model)
    except TracediffError as error:
        return Cell(error=first_reason(str(error)))
    except BUGS as error:
        return Cell(error=f"{type(error).__name__}: {first_reason(str(error))}")


def judged(trace: Trace, model: Model) -> Cell:
    """What replay says of every record."""
    faulty: Counter[str] = Counter()
    undecided: Counter[str] = Counter()
    graph, n = model.graph, 0
    wrong = misshapen(trace, graph)
    for step, name in wrong:
        faulty[f"{graph[name].kind} in {phase(step)}"] += 1
    replay = Replay(trace.without(wrong) if wrong else trace, graph, model.weights())
    for _, record, local in judge_all([replay]):
        n += 1
        where = f"{graph[record.op].kind} in {phase(record.step)}"
        if local.judgement != "sound":
            (faulty if local.faulty else undecided)[where] += 1
    return Cell(n + len(wrong), dict(faulty), dict(undecided))


def phase(step: int) -> str:
    """What sort of step it is."""
    return "decode" if step else "prefill"


def with_torch(row: Row, model: Model, folder: Path) -> None:
    """Run the torch engine on what llama.cpp was fed, and compare the logits."""
    reference = folder / "F32False.trace"
    if row.cells["F32"].error:
        row.torch_error = "there is no trace of llama.cpp to compare with"
        return
    r, options = Trace(reference), TorchOptions(arithmetic="llama.cpp")
    try:
        c = Trace(trace_torch(model, folder / "torch.trace", options, steps=[*r.steps.values()]))
    except TracediffError as error:
        row.torch_error = first_reason(str(error))
        return
    except BUGS as error:
        row.torch_error = f"{type(error).__name__}: {first_reason(str(error))}"
        return
    row.logits = logits_nmse(model, r, c)


def logits_nmse(model: Model, reference: Trace, candidate: Trace) -> float:
    """NMSE of the logits of two engines, the worst step's."""
    last = [*model.graph.ops][-1]
    return max(nmse(*(t.values(t.ops[step, last]) for t in (reference, candidate))) for step in reference.steps)


def nmse(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Squared error over squared signal of what is not the same on both sides and infinite, or as good as."""
    x, y = (values.astype(np.float64).ravel() for values in (reference, candidate))
    finite = (np.abs(x) < INFINITE) | (np.abs(y) < INFINITE) | (x != y)
    x, y = x[finite], y[finite]
    return float(np.square(y - x).sum() / np.square(x).sum()) if np.isfinite(x - y).all() else 1e99


def first_reason(message: str) -> str:
    """The line of a message that says why."""
    lines = [line.strip(" |") for line in message.strip().splitlines()] or ["no reason given"]
    why = next((line for line in lines if "GGML_ASSERT" in line or "error loading" in line), lines[0])
    return why.rpartition("vendor/llama.cpp/")[2].rpartition("error loading model: ")[2].strip()[:200]


# --- rows, one process each --------------------------------------------------------------------------------------


def in_a_process(arch: str, seconds: float) -> Row:
    """The row of an architecture, or why there is none: its process died, or took more CPU time than that, which others
    on the machine do not change. It inherits the imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        process = multiprocessing.get_context("fork").Process(target=_work, args=(arch, Path(folder), out, seconds))
        process.start()
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            return Row(error=f"not done in {seconds:.0f} s")
        if not out.exists():
            return Row(error=f"its process ended with code {process.exitcode}")
        return msgspec.json.decode(out.read_bytes(), type=Row)


def _work(arch: str, folder: Path, out: Path, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    torch.set_num_threads(1)
    out.write_bytes(msgspec.json.encode(make_row(arch, folder)))


def with_column(arch: str, row: Row) -> Row:
    """The row with its column of transformers made again."""
    with tempfile.TemporaryDirectory() as folder:
        row.transformers, row.transformers_logits = None, None
        with_transformers(row, arch, Path(folder))
    return row


def kept() -> dict[str, Row]:
    """The rows that are there."""
    return msgspec.json.decode(KEPT.read_bytes(), type=dict[str, Row]) if KEPT.exists() else {}


def keep(rows: Mapping[str, Row]) -> None:
    """A row a line, so that a row that is made again is one line of a change."""
    encoded = {arch: msgspec.json.encode(rows[arch]).decode() for arch in ARCHITECTURES if arch in rows}
    lines = (f"{json.dumps(arch)}: {row}" for arch, row in encoded.items())
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    PAGE.write_text(page(rows))


# --- the page ----------------------------------------------------------------------------------------------------


def page(rows: Mapping[str, Row]) -> str:
    """The document."""
    there = {arch: rows[arch] for arch in ARCHITECTURES if arch in rows}
    with_graph = {arch: row for arch, row in there.items() if not row.error}
    clean = [arch for arch, row in with_graph.items() if row.is_clean]
    same = [arch for arch, row in with_graph.items() if row.has_same_logits]
    records = sum(cell.records for row in with_graph.values() for cell in row.cells.values())
    judged_there = [row.transformers for row in with_graph.values() if row.transformers]
    in_transformers = [cell for cell in judged_there if cell.is_clean]
    head = ("architecture", "ops", "not judged", "records", *WEIGHTS, "with flash attention", "torch", "transformers")
    parts = [
        "# Architectures",
        "Every architecture that llama.cpp knows by name: a tiny model of it, whose graph is lifted from llama.cpp's "
        f"own, traced in llama.cpp with a prompt of {len(TOKENS)} tokens and {N_DECODE} decode steps, and every record "
        f"judged by replay. Written by\n\n    python benchmarks/architectures.py\n\n"
        f"{len(there)} of {len(ARCHITECTURES)} architectures, {len(with_graph)} of which were traced, "
        "their graph built by llama.cpp from metadata alone; "
        f"**{len(clean)} are clean** in all of {', '.join(WEIGHTS)}, with and without flash attention, in prefill and "
        f"decode: {records:,} records. The torch engine has llama.cpp's logits in {len(same)} (NMSE of "
        f"{SAME_LOGITS:.0e} or less in float32 at every step; {SAME_BUT_FOR_TABLES:.0e} where GELU is looked up by "
        "float16, for a value on a boundary goes either way).",
        "*clean*: every record is sound. Otherwise the kinds of op of which some are not. *not judged*: kinds of op "
        "that have no definition here. *torch*: NMSE of its logits in float32, the worst step's. *by hand*: one of "
        "the hand-written families. *transformers*: its class, with the GGUF file as its loader reads it, judged by "
        "llama.cpp's graph, and the NMSE of its logits in float32; where it knows the architecture. Of what its loader "
        "does not read the file's tensors are put into the class (tiny_checkpoints.py). Sizes that its "
        f"loader takes for granted are those that it takes, and {len(in_transformers)} of these {len(judged_there)} "
        "are clean.",
        table(head, (line(arch, row) for arch, row in with_graph.items())),
    ]
    without = [(arch, row.error or "") for arch, row in there.items() if row.error]
    if without:
        parts += ["## Not traced", table(("architecture", "why"), without)]
    why = [
        (arch, name, said)
        for arch, row in with_graph.items()
        for name, said in (
            *((name, reason(cell)) for name, cell in row.cells.items()),
            ("torch", reason_of_torch(row)),
            ("transformers", reason(row.transformers) if row.transformers else ""),
        )
        if said
    ]
    if why:
        parts += ["## What is not clean", table(("architecture", "in", "what"), why)]
    return "\n\n".join(parts) + "\n"


def line(arch: str, row: Row) -> list[object]:
    """A row of the table."""
    plain = [short(row.cells.get(weights)) for weights in WEIGHTS]
    with_flash = {short(row.cells.get(f"{weights}, flash")) for weights in WEIGHTS}
    flash = "clean" if with_flash == {"clean"} else "no"
    torch_ = "no" if row.logits is None else f"{row.logits:.0e}"
    records = sum(cell.records for cell in row.cells.values())
    name = f"{arch} (by hand)" if row.by_hand else arch
    cell = row.transformers
    of_transformers = (
        "" if cell is None else f"{short(cell)}, {row.transformers_logits:.0e}" if not cell.error else "no"
    )
    return [name, row.ops, ", ".join(row.uncovered), f"{records:,}", *plain, flash, torch_, of_transformers]


def short(cell: Cell | None) -> str:
    """A cell in a word."""
    return "clean" if cell and cell.is_clean else "no"


def reason(cell: Cell) -> str:
    """Why a cell is not clean; empty where it is."""
    if cell.error:
        return cell.error
    found = [("faulty", cell.faulty), ("undecided", cell.undecided)]
    parts = [f"{n} {what}: {where}" for what, places in found for where, n in places.items()]
    return "; ".join(parts) + (f" (of {cell.records} records)" if parts else "")


def reason_of_torch(row: Row) -> str:
    """Why the torch engine has other logits; empty where it has llama.cpp's."""
    if row.torch_error:
        return row.torch_error
    return "" if row.has_same_logits else f"logits differ by {row.logits:.1e}"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [[*head], *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> int:
    """Make the rows that are lacking; 1 where one that has a graph is not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="make these rows again, with commas between")
    parser.add_argument("--transformers", action="store_true", help="of the rows that are kept, make that column alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="of CPU time, for one architecture")
    args = parser.parse_args()
    rows, began = kept(), time.monotonic()
    in_transformers = {*TRANSFORMERS, *tiny_checkpoints.CLASSES} & rows.keys()
    for arch in in_transformers if args.transformers else ():
        keep({**rows, arch: with_column(arch, rows[arch])})
    todo = args.only.split(",") if args.only else [arch for arch in ARCHITECTURES if arch not in rows]
    with ThreadPoolExecutor(args.jobs) as pool:
        for arch, row in zip(todo, pool.map(lambda arch: in_a_process(arch, args.seconds), todo), strict=True):
            rows[arch] = row
            keep(rows)
            said = row.error or ("clean" if row.is_clean else "not clean")
            print(f"{time.monotonic() - began:5.0f} s {arch}: {said}, torch {row.logits}", file=sys.stderr)
    keep(rows)
    return int(any(not row.is_clean for row in rows.values() if not row.error))


if __name__ == "__main__":
    sys.exit(main())
