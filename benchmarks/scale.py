"""What real models cost: figures per value, multiplication and weight, measured here, and what follows from them.

    python benchmarks/scale.py --out docs/scale.md

CPU time of one thread, so that other processes do not disturb it. What a multiplication costs is measured by matmuls as
replay makes them; of what is left of judging traces so much for each recorded value and each weight is fitted, over
prompts of several lengths, and the page says how far the fit is off.
"""

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import numpy as np
import torch
from pages import write_page
from speed import TOKENS, peak

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.model import Model
from tracediff.model.synthetic import QWEN25_05B, Shape, write_model
from tracediff.names import Capture
from tracediff.pipeline import Effort, check_trace
from tracediff.replay import workers
from tracediff.replay.cluster import Cluster
from tracediff.replay.judging import Subject, judge_all, replays_of
from tracediff.replay.look import PART
from tracediff.replay.memory import memory_of, needed
from tracediff.replay.tasks import tasks
from tracediff.trace.reader import Trace

LENGTHS, LONG, SHAPED, WALL = (8, 32, 64, 128, 256), (512, 1024), (128, 512), (128, 512, 768)
LONGEST = 4096  # tokens of which hidden states alone are recorded
SHAPE = Shape("llama", n_layer=2, n_embd=512, n_head=8, n_head_kv=2, n_ff=1792, n_vocab=4096, n_ctx=LONGEST)
PROMPTS = (128, 4096)
LAYERS = (20, 80)
WITHIN = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a llama; the published ones of the three."""

    layers: int
    embd: int
    heads: int
    kv: int
    width: int  # of a head
    ff: int
    vocab: int

    def records(self, n: int) -> dict[str, list[int]]:
        """Values of each record of a prompt of so many tokens: those of attention's scores apart."""
        e, q, k, f = self.embd * n, self.heads * self.width * n, self.kv * self.width * n, self.ff * n
        layer = [e, q, k, k, q, k, q, e, e, e, f, f, f, e, e]
        return {"rows": [e, *layer * self.layers, e, self.vocab * n], "scores": [self.heads * n * n] * 2 * self.layers}

    @property
    def weights(self) -> int:
        """Values of all matrices that are multiplied with."""
        q, k = self.heads * self.width, self.kv * self.width
        return self.layers * self.embd * (2 * q + 2 * k + 3 * self.ff) + self.vocab * self.embd

    def products(self, n: int) -> int:
        """Multiplications of a pass: with weights, of queries with keys, and of probabilities with values."""
        return n * self.weights + 2 * self.layers * self.heads * self.width * n * n


MODELS = {
    "8B": Decoder(32, 4096, 32, 8, 128, 14336, 128256),
    "70B": Decoder(80, 8192, 64, 8, 128, 28672, 128256),
    "405B": Decoder(126, 16384, 128, 8, 128, 53248, 128256),
}


def decoder(shape: Shape) -> Decoder:
    """The sizes of the model that is measured."""
    return Decoder(shape.n_layer, shape.n_embd, shape.n_head, shape.n_head_kv, shape.n_embd // shape.n_head, shape.n_ff,
                   shape.n_vocab)  # fmt: skip


def traced(model: Path, folder: Path, n: int, capture: Capture = "all") -> Path:
    """A trace of a prompt of so many tokens."""
    return trace_torch(model, folder / "run.trace", TorchOptions(capture=capture), [(7 * i) % 4000 for i in range(n)])


def seconds(model: Path, trace: Path) -> float:
    """CPU time of judging a trace by a plan that is made, as a worker does."""
    opened, subject = Model(model), Subject(Trace(trace), {}, None)
    plan = replays_of(opened, [subject])[0].plan
    replays = replays_of(opened, [subject], [plan])
    began = time.process_time()
    for _ in judge_all(replays):
        pass
    return time.process_time() - began


def fitted(model: Path, folder: Path) -> tuple[np.ndarray, float]:
    """Seconds for a multiplication, a value and a weight, none negative; and the largest relative error of the fit."""
    sizes, rows, took = decoder(SHAPE), [], []
    for n in LENGTHS:
        out = traced(model, folder, n)
        values = sum(map(sum, sizes.records(n).values()))
        assert values == sum(record.size for record in Trace(out).ops.values()), "the page's formula is the trace's"
        rows.append((sizes.products(n), values, sizes.weights))
        took.append(min(seconds(model, out) for _ in range(2)))
    a, b, first = np.array(rows, float), np.array(took), multiplication()
    others = np.linalg.lstsq(a[:, 1:] / b[:, None], 1 - a[:, 0] * first / b, rcond=None)[0]
    cost = np.array([first, *others.clip(min=0)])
    return cost, float(np.abs(a @ cost / b - 1).max())


def multiplication() -> float:
    """Seconds for one of a matmul in float64, and of that of squares in float32 beside it."""
    n, width = 256, 2048
    total = 0.0
    for dtype in (torch.float64, torch.float32):
        x, w = torch.randn(n, width, dtype=dtype), torch.randn(width, width, dtype=dtype)
        x @ w.T
        began = time.process_time()
        for _ in range(3):
            x @ w.T
        total += (time.process_time() - began) / (3 * n * width * width)
    return total


def memory(name: str, trace: Path, model: Path) -> str:
    """A line: what a process that judges a trace was said to take, and what it took."""
    (replay,) = replays_of(Model(model), [Subject(Trace(trace), {})])
    said, (_, took) = needed([replay]), peak("replay", model, trace)
    return f"| {name} | {said.op} | {size(said.n_bytes)} | {size(took)} |"


def memories(folder: Path, small: Path, real: Path) -> Iterator[str]:
    """A line for each of some traces: long prompts, hidden states alone, few layers and many."""
    for n in LONG:
        yield memory(f"2 layers, {n} tokens", traced(small, folder, n), small)
    longest = traced(small, folder, LONGEST, "layers")
    yield memory(f"2 layers, {LONGEST} tokens, hidden states alone", longest, small)
    for n in LAYERS:
        deep = write_model(folder / "deep.gguf", replace(SHAPE, n_layer=n, loud=True), "F16")
        yield memory(f"{n} layers, 64 tokens", traced(deep, folder, 64), deep)
    for capture in ("all", "layers"):
        for n in SHAPED:
            name = f"0.5B, {n} tokens" + (", hidden states alone" if capture == "layers" else "")
            yield memory(name, traced(real, folder, n, capture), real)


def on_the_wall(model: Path, trace: Path) -> tuple[float, float]:
    """Seconds of the wall that `check` takes by itself and with two workers, one thread each, the least of several."""
    command = [sys.executable, "-m", "tracediff", "check", str(trace), "--model", str(model)]
    took: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(3):
        for n, seconds in took.items():
            began = time.perf_counter()
            subprocess.run(
                [*command, "--workers", str(n)],
                check=True,
                capture_output=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            seconds.append(time.perf_counter() - began)
    return min(took[1]), min(took[2])


def timed(job: workers._Job, ops: tuple[str, ...]) -> tuple[int, float, float]:
    """Which process did a task, and the CPU time of opening the files, where it did not have them, and of judging."""
    began = time.process_time()
    if job.key not in workers._replays:
        workers._open(job)
    opened = time.process_time()
    workers._do(job.key, job.do, ops)
    return os.getpid(), opened - began, time.process_time() - opened


def two_workers(path: Path, folder: Path) -> tuple[int, float, float, float]:
    """Tasks for two workers of a local Ray cluster; the share of the largest; how many times less the busier one and
    the first process take than one would for all of it, in judging and in all of a check.

    All in one run, for where others share the machine the same work takes now more CPU time and now less.
    """
    trace = trace_torch(path, folder / "shape.trace", TorchOptions(), TOKENS)
    model, subjects = Model(path), [Subject(Trace(trace), {})]
    replays = replays_of(model, subjects)
    job = workers._Job("two", workers._judged, model, subjects, [replays[0].plan], 1)
    with Cluster("local", 2) as cluster:
        began = time.process_time()
        given = tasks(replays, cluster.n_cores)
        done = [*cluster.done(timed, job, given)]
        handing_out = time.process_time() - began
        began = time.process_time()
        check_trace(trace, path, effort=Effort(2, ray="local"))
        first = time.process_time() - began  # opening, the plan, handing out, statistics
    spent: dict[int, float] = defaultdict(float)
    for process, opening, judging in done:
        spent[process] += opening + judging
    each = [judging for _, _, judging in done]
    busier, judging = max(spent.values()), sum(each)
    return len(given), max(each) / judging, judging / (busier + handing_out), (judging + first) / (busier + first)


def size(n_bytes: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} PB"


def rows(cost: Sequence[float]) -> list[str]:
    """A line for each model and prompt."""
    lines = []
    for name, of in MODELS.items():
        for n in PROMPTS:
            records = of.records(n)
            flash, whole = sum(records["rows"]), sum(map(sum, records.values()))
            n_records = sum(map(len, records.values()))
            took = cost[0] * of.products(n) + cost[1] * flash + cost[2] * of.weights
            largest = max(n * max(of.embd, of.ff, of.heads * of.width), PART)
            cells = (
                name, f"{n:,}", f"{n_records:,}", size(4 * whole), size(2 * flash), size(2000 * n_records),
                f"{took / 3600:.2g} h", f"{ceil(took / WITHIN):,}", size(memory_of(largest)),
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(folder: Path) -> str:
    """The page."""
    torch.set_num_threads(1)
    model, real = write_model(folder / "model.gguf", SHAPE, "F16"), write_model(folder / "real.gguf", QWEN25_05B, "F16")
    cost, off = fitted(model, folder)
    n_tasks, largest, judging, check = two_workers(real, folder)
    walls = "\n".join(
        f"| {n} | {one:.1f} s | {two:.1f} s | {one / two:.2f} |"
        for n, (one, two) in ((n, on_the_wall(real, traced(real, folder, n))) for n in WALL)
    )
    takes = "\n".join(memories(folder, model, real))
    lines = "\n".join(rows(cost.tolist()))
    return f"""# Scale

Made by `python benchmarks/scale.py --out docs/scale.md`: measured on this machine, on one core where nothing else is
said, with a llama of two layers of F16 weights and prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens, and computed for the sizes of
Llama 3. No model of these sizes was run.

Judging takes {cost[0]:.1e} s a multiplication (measured by itself), {cost[1]:.1e} s a recorded value and {cost[2]:.1e} s
a weight, which fits what was measured within {100 * off:.0f}%.

## Two workers

Of one thread each, on the trace of every op of a model of the shape of Qwen2.5-0.5B in F16; whole commands, in seconds of
the wall on two idle cores, the least of three:

| prompt | `check` | `check --workers 2` | times faster |
|---|---|---|---|
{walls}

What they do not share is one process's: Python and torch being imported (1.4 s), the plan, statistics and the report.
On a local Ray cluster judging, cut into {n_tasks} tasks of which the head is {100 * largest:.0f}%, takes {judging:.2f} times less than in one
process, all of a check {check:.2f} times less: CPU time, of the first process and the busier worker, over that of all, without
starting Ray, Python and torch.

## Memory

What a process takes is said before it judges (`check --plan`), and follows the largest record: of matmuls with weights, which
are judged by parts of 2 million values, one part. Of hidden states alone it is all values of a layer, which are recomputed,
but of a long prompt's scores and probabilities those of some tokens. What is read no more is dropped, so more layers take
no more.

| trace | most of it for | said: at most | taken |
|---|---|---|---|
{takes}

## What real models cost

| model | prompt | records | trace, all in f32 | without scores, bf16 | sketches | judging, one core | cores for 10 min | a worker's memory |
|---|---|---|---|---|---|---|---|---|
{lines}

- *without scores*: flash attention has neither scores nor probabilities in memory; judging is of such a trace.
- *cores*: with `--workers` or `--ray`, by layers, and where there are more cores by ops: an op is never cut, so the head
  bounds what many can do. Causes are sought by kinds of op, one each, as many at once.
- *memory* is what would be said; `"rows"` of some tokens lessen it, and the time, as they lessen the values.
- Dequantised weights are read by slices of 4 MB and a worker holds 128 MB of them; a worker of a layer reads that
  layer's weights and records, from a shared folder or a URL, and no others.
"""  # noqa: E501


if __name__ == "__main__":
    sys.exit(write_page(__doc__, page))
