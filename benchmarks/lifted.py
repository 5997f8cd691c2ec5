"""Mistakes planted in lifted graphs, ties of experts, and what lifting and watching cost.

    python benchmarks/lifted.py [--only kinds,experts,ties,cost] [--out docs/lifted.md]

For each kind of op that tiny models of a dozen architectures have (tiny_models.py): every known mistake that applies to
one op of the kind, and some that nobody knows, each planted in that op of the torch engine, whose trace is then judged
by itself. Located: that op is faulty, and no other. A mistake that leaves the op's values as they are in these models
is not counted.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
from architectures import DOCS, table

from tracediff.diagnose.mistakes import BANK
from tracediff.diagnose.planting import plant
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.errors import TracediffError
from tracediff.model.graph import Graph, Op
from tracediff.model.model import Model
from tracediff.names import layer_of
from tracediff.numerics.evaluate import is_covered
from tracediff.numerics.kinds import KINDS
from tracediff.pipeline import check_trace
from tracediff.replay.judging import judge_all
from tracediff.replay.replay import Replay
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

# Few, small, and together they have every kind that a tiny model of any architecture has.
ARCHITECTURES = (
    "nemotron_h_moe", "deepseek2", "arwkv7", "mpt", "qwen35", "modern-bert", "apertus", "mistral3", "gpt-oss",
    "smallthinker", "maple", "rwkv6", "gemma2", "qwen3moe",
)  # fmt: skip
TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12, 13)
# Nobody's mistakes, of any op: its values, changed.
UNKNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "off by 0.1%": lambda y: y * 1.001,
    "rolled by one": lambda y: y.roll(1, -1),
    "last token's values are zero": lambda y: torch.cat((y[:-1], torch.zeros_like(y[-1:]))),
}
# What is known to go wrong in a router, and the fault that stands for it here.
ROUTER = (
    ("a softmax for a sigmoid", "deepseek2", "router_softmax@1"),
    ("a sigmoid for a softmax", "qwen3moe", "router_sigmoid@1"),
    ("the selection's bias in the weights", "deepseek2", "selection_bias_in_weights@1"),
    ("weights not divided by their sum", "qwen3moe", "weights_not_normalised@1"),
    ("weights divided by their sum, which they should not be", "deepseek2", "weights_normalised@1"),
    ("the weights' scale dropped", "deepseek2", "scale_dropped@1"),
    ("experts in another order", "qwen3moe", "expert_order@1"),
    ("the shared expert left out", "deepseek2", "term_dropped@1"),
    ("the shared expert without its gate", "qwen3next", "gate_ignored@1"),
    ("an expert's weights under another's number", "qwen3moe", "expert_off_by_one@1"),
    ("the best expert passed over", "qwen3moe", "top_k_off_by_one@1"),
)


@dataclass(frozen=True, slots=True)
class Bench:
    """A tiny model, and a folder for its traces."""

    model: Model
    folder: Path

    @classmethod
    def of(cls, arch: str, folder: Path) -> "Bench":
        """That of an architecture, made on first use."""
        path = folder / f"{arch}.gguf"
        return cls(Model(path if path.exists() else tiny_models.write(arch, path)), folder)

    def trace(self, graph: Graph, tokens: tuple[int, ...] = TOKENS, name: str = "a") -> Path:
        """What the torch engine makes of the graph in float32, and one decode step."""
        with TraceWriter(self.folder / f"{name}.trace", "torch", graph.hparams.arch) as writer:
            engine, recorder = TorchEngine(graph, self.model.weights(torch.float32)), TensorWriter(writer)
            engine.run(0, StepInput(tokens, tuple(range(len(tokens)))), recorder)
            engine.run(1, StepInput((int(engine.logits[-1].argmax()),), (len(tokens),)), recorder)
        return self.folder / f"{name}.trace"

    def faulty(self, trace: Trace) -> set[str]:
        """The ops of a trace that replay calls faulty."""
        replay = Replay(trace, self.model.graph, self.model.weights(keep_bytes=1 << 24))
        return {record.op for _, record, local in judge_all([replay]) if local.faulty}


# --- kinds -------------------------------------------------------------------------------------------------------


def of_kinds(folder: Path) -> str:
    """The table of all kinds."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    missed: list[str] = []
    for arch in ARCHITECTURES:
        bench = Bench.of(arch, folder)
        graph = bench.model.graph
        clean = Trace(bench.trace(graph, name="clean"))
        for op in one_of_each(graph, found):
            for name, changed in planted_in(op, bench.model):
                wrong = Trace(bench.trace(graph.changed(changed)))
                shows = shown_by(op, graph)
                if not any(differs(key, clean, wrong) for key in clean.ops if key[1] in shows):
                    continue
                located = bench.faulty(wrong) == shows
                found[op.kind]["located" if located else "missed"] += 1
                if not located:
                    missed.append(f"{name} in {op.name} of {arch}")
        print(f"{arch}: {sum(c.total() for c in found.values())} mistakes, missed {missed}", file=sys.stderr)
    rows = [(kind, count["located"] + count["missed"], count["located"]) for kind, count in sorted(found.items())]
    n, n_located = (sum(row[i] for row in rows) for i in (1, 2))  # type: ignore[misc]
    others = ", ".join(sorted({*KINDS} - {*found}))
    said = [
        f"## Kinds of op\n\n{n} mistakes in {len(rows)} kinds of op, each planted in one op: **{n_located} located**. "
        f"These models have no op of the other kinds ({others}).",
        table(("kind", "mistakes", "located"), rows),
    ]
    return "\n\n".join([*said, *([f"Missed: {'; '.join(missed)}."] if missed else [])])


def one_of_each(graph: Graph, found: dict[str, Counter[str]]) -> Iterator[Op]:
    """An op of each kind that was not met yet: of layer 1, where there is one there."""
    by_kind: dict[str, Op] = {}
    for op in sorted(graph, key=lambda op: layer_of(op.name) != 1):
        by_kind.setdefault(op.kind, op)
    yield from [op for kind, op in by_kind.items() if kind not in found and is_covered(op)]


def planted_in(op: Op, model: Model) -> Iterator[tuple[str, Op]]:
    """The op with each mistake that applies to it."""
    for name in BANK:
        if name.endswith("_f16"):  # of one record that is an arithmetic, and said as one
            continue
        try:
            yield name, plant(model.graph, model.file, f"{name}@{op.name}")[op.name]
        except TracediffError:
            continue
    for name, change in UNKNOWN.items():
        if KINDS[op.kind].picks and name == "rolled by one":  # the best of some, in another order
            continue
        yield name, replace(op, rework=Changed(change))


class Changed:
    """An op whose values are something else's."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._change = change

    def compute(self, call: Any) -> torch.Tensor:
        """What the kind computes, changed."""
        return self._change(KINDS[call.op.kind].compute(call))

    def noise(self, made: Any) -> Any:
        """Nobody asks for it."""
        raise NotImplementedError


def differs(key: tuple[int, str], clean: Trace, wrong: Trace) -> bool:
    """Whether other values were written."""
    a, b = (trace.values(trace.ops[key]) for trace in (clean, wrong))
    return not np.array_equal(a, b, equal_nan=True)


def shown_by(op: Op, graph: Graph) -> set[str]:
    """Where a mistake in an op shows: a state is written by nobody, but read."""
    return {reader.name for reader, _ in graph.readers(op.name)} if op.kind == "state" else {op.name}


# --- mixtures of experts -----------------------------------------------------------------------------------------


def of_experts(folder: Path) -> str:
    """The table of a router's mistakes."""
    rows, n_located, n_named = [], 0, 0
    for words, arch, fault in ROUTER:
        bench = Bench.of(arch, folder)
        graph = plant(bench.model.graph, bench.model.file, fault)
        planted = {op.name for op in graph if bench.model.graph.ops.get(op.name, op) is not op}
        result = check_trace(bench.trace(graph), bench.model)
        located = {op.op for op in result.faulty} == planted
        causes = {op.cause.name if op.cause else str(op.shape) for op in result.faulty}
        named = causes == {fault.partition("@")[0]}
        n_located, n_named = n_located + located, n_named + named
        rows.append((words, arch, "yes" if located else "no", "yes" if named else "; ".join(causes)))
        print(rows[-1], file=sys.stderr)
    return "\n\n".join([
        f"## Routers\n\n{len(ROUTER)} mistakes of mixtures of experts, each in one layer: **{n_located} located, "
        f"{n_named} named**.",
        table(("mistake", "architecture", "located", "named"), rows),
    ])  # fmt: skip


def of_ties(folder: Path) -> str:
    """Routers to which pairs of experts are equal, and an engine that takes the other one of each pair."""
    original = tiny_models.values

    def values(name: str, *rest: Any) -> np.ndarray:
        made = original(name, *rest)
        if name.endswith("ffn_gate_inp.weight"):
            made[1:6:2] = made[0:6:2]
        return made

    tiny_models.values = values  # type: ignore[assignment]
    try:
        bench = Bench(Model(tiny_models.write("qwen3moe", folder / "twins.gguf")), folder)
    finally:
        tiny_models.values = original
    graph = bench.model.graph
    choices = [replace(op, function=last_of_equals) for op in graph if op.kind == "top_k"]
    result = check_trace(bench.trace(graph.changed(*choices), TOKENS * 30), bench.model)
    note = next(note for note in result.notes if "another choice" in note)
    told = re.search(r"in (\d+) of (\d+) tokens .* (\d+) of these are ties", note)
    assert told
    otherwise, n, n_ties = map(int, told.groups())
    return (
        f"## Ties\n\nExperts in pairs that the router cannot tell apart, and an engine that takes the other one of a "
        f"pair: {otherwise} of {n} choices are not those of replay. **{n_ties} are said to be ties, "
        f"and {len(result.faulty)} ops are called faulty.**"
    )


def last_of_equals(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest, of equal ones those at the end."""
    n = scores.shape[-1]
    return n - 1 - torch.argsort(scores.flip(-1), stable=True, dim=-1, descending=True)[..., :k]


# --- cost --------------------------------------------------------------------------------------------------------


def of_cost(folder: Path) -> str:
    """Lifting a file of half a billion weights, and watching a model through its lifted graph."""
    from tracediff.model.synthetic import QWEN25_05B, write_model

    path = write_model(folder / "big.gguf", QWEN25_05B, "Q8_0")
    seconds, megabytes = lifting(path)
    ratio = watching(path)
    return (
        "## Cost\n\nA generated Q8_0 file with the shape of Qwen2.5-0.5B, whose graph is lifted though its family is "
        f"written by hand. Lifting takes **{seconds:.2f} s** of processor time, this process and the child together, "
        f"and the child {megabytes:.0f} MB at most. To decode with statistics of every op takes **{ratio:.2f} "
        "times** the processor time of decoding alone."
    )


_LIFTING = """
import resource, sys, time
from pathlib import Path
from tracediff.model.lift.described import describe
from tracediff.model.lift.lift import lift
from tracediff.model.model import Model
model, before = Model(Path(sys.argv[1])), time.process_time()
lift(describe(model.file), model.file)
child = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.process_time() - before + child.ru_utime + child.ru_stime, child.ru_maxrss / 1024)
"""


def lifting(path: Path) -> tuple[float, float]:
    """Processor seconds and the child's peak in MB, of a small process: a fork has its parent's peak."""
    command = [sys.executable, "-c", _LIFTING, str(path)]
    out = subprocess.run(command, env={**os.environ, "TRACEDIFF_CACHE": ""}, capture_output=True, check=True).stdout
    seconds, megabytes = map(float, out.split())
    return seconds, megabytes


def watching(path: Path) -> float:
    """Processor time of a prompt of 128 tokens with statistics of every op over that of the same without."""
    from tracediff.engine.llama_cpp import shown
    from tracediff.model.lift.described import describe
    from tracediff.model.lift.lift import lift
    from tracediff_reference import engine
    from tracediff_reference.observer import Observer
    from tracediff_reference.protocol import First, Options, Request

    model = Model(path)
    description = describe(model.file)
    h, tokens = model.graph.hparams, [256, *((37 * i + 11) % 250 for i in range(127))]
    first = next(node for node in description.nodes if node.op != "NONE")
    asked = Request(
        model=str(path), arch=h.arch, out="", capture="stats", norm_weights=(), n_vocab=h.n_vocab, n_ctx_train=h.n_ctx,
        tokens=tuple(tokens), shown=tuple(shown(lift(description, model.file), description)),
        first=First(first.op, first.name, first.shape[::-1].index((0, 1, 0, 0, 0))),
    )  # fmt: skip
    engine.start_library()
    loaded, options = engine._load(asked), Options(threads=1)

    def decoded(watched: bool) -> float:
        with TraceWriter(path.with_suffix(".trace"), "cost") as writer:
            writer.step(0, tokens, range(len(tokens)))
            observer: Any = Observer(asked, writer, lambda fraction: None)
            context, _callback = engine._context(options, loaded, len(tokens), len(tokens), observer, 1)
            if not watched:
                observer._recogniser.look = lambda address: ()
                observer.axes = {}
            began = time.process_time()
            observer.begin(0, range(len(tokens)))
            engine._decode(context, observer, tokens, range(len(tokens)), [0] * len(tokens), asked)
            return time.process_time() - began

    decoded(True)
    pairs = [(decoded(True), decoded(False)) for _ in range(5)]
    return statistics.median(watched / plain for watched, plain in pairs)


PARTS: dict[str, Callable[[Path], str]] = {"kinds": of_kinds, "experts": of_experts, "ties": of_ties, "cost": of_cost}


def sections(page: Path) -> dict[str, str]:
    """Those of the page that is there, by name: so that one can be made again by itself."""
    text = page.read_text() if page.exists() else ""
    found = re.findall(r"<!-- (\w+) -->\n(.*?)\n(?=<!--|\Z)", text, re.S)
    return {name: section.strip() for name, section in found}


def page(parts: dict[str, str], names: Iterable[str]) -> str:
    """The document."""
    head = (
        "# Lifted graphs\n\nWhat replay of graphs lifted from llama.cpp's own finds, and what it costs. Written by\n\n"
        "    python benchmarks/lifted.py\n"
    )
    return "\n".join([head, *(f"<!-- {name} -->\n{parts[name]}\n" for name in names if name in parts)])


def main() -> None:
    """Make the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=DOCS / "lifted.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = sections(args.out)
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            parts[name] = PARTS[name](Path(folder))
        args.out.write_text(page(parts, PARTS))


if __name__ == "__main__":
    main()
