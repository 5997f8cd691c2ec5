"""The detection benchmark: every plantable mistake, planted, then looked for in the candidate's trace alone.

    python benchmarks/detection.py [--quick] [--out docs/detection.md]

Columns: `planted` runs; `not visible` those whose mistake changes no recorded value beyond its floor (shown by
replaying the clean trace under the mistake); of the others `located` where the faulty ops are exactly the planted
ones (layers, logits: exactly the records that cover them first), `named` with the planted mistake's name,
`misnamed` with another.
"""

import argparse
import itertools
import math
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from tracediff.diagnose.bank import BANK, plant
from tracediff.diagnose.explain import Explainer
from tracediff.engine.recorder import Recorder
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.errors import TracediffError
from tracediff.judge import Policy, judge
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph
from tracediff.model.synthetic import Shape, quantize, write_model
from tracediff.model.weights import Weights
from tracediff.names import kind_of, layer_of
from tracediff.replay import Replay
from tracediff.result import Local, OpResult, Worst
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

N_LAYER = 3
TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 107, 260, 98)
CHUNK = (97, 110, 32)
_COMMON = {"n_layer": N_LAYER, "n_embd": 256, "n_head": 8, "n_head_kv": 2, "n_ff": 512, "n_vocab": 512}
SHAPES = {
    "llama": Shape("llama", **_COMMON, theta=500_000.0, eps=1e-5, rope_factors=True),
    "qwen2": Shape("qwen2", **_COMMON, loud=True),
    "qwen3": Shape("qwen3", **{**_COMMON, "n_head": 6}, head_dim=64),
}
WEIGHTS = ("F32", "F16", "Q8_0", "Q4_K_M")
# silu(up) * gate is what comes of swapped weights too; from the outside of a segment they are one mistake.
SAME_IN_A_SEGMENT = {"act_swapped": ("gate_up_swapped",), "gate_up_swapped": ("act_swapped",)}
# Where nothing overflows, float16 is coarse arithmetic and no mistake.
COARSE_TYPES = ("scores_f16", "ffn_act_f16")
_ANY = Local(math.inf, 0.0, math.inf, Worst((), 0.0, 0.0), "", ())  # an error that any change takes away


def positions(step: int) -> tuple[int, ...]:
    """Of the prompt, the chunk and the decoded token."""
    cuts = (0, len(TOKENS), len(TOKENS) + len(CHUNK), len(TOKENS) + len(CHUNK) + 1)
    return tuple(range(cuts[step], cuts[step + 1]))


class LogitsOnly(Recorder):
    """Records the last op alone."""

    def op(self, step, op, values, hidden=None):  # noqa: D102
        if op == "output":
            super().op(step, op, values, hidden)


def make_model(folder: Path, family: str, weights: str) -> Path:
    """A generated model of this family and weight type."""
    path = folder / f"{family}-{weights}.gguf"
    if not path.exists():
        if weights == "Q4_K_M":
            quantize(make_model(folder, family, "F32"), path, weights)
        else:
            write_model(path, SHAPES[family], weights)
    return path


@dataclass
class Bench:
    """One model, with its clean graph and weights."""

    file: GGUFFile
    graph: Graph
    folder: Path

    def __post_init__(self) -> None:
        self.weights = Weights(self.file, keep_bytes=1 << 30)
        self.weights32 = Weights(self.file, torch.float32, keep_bytes=1 << 30)

    def trace(self, graph: Graph, capture: str) -> Trace:
        """A trace of the torch engine running `graph`: a prompt, a second chunk of tokens, a decoded one."""
        path = self.folder / "t.trace"
        with TraceWriter(path, "detection", graph.hparams.arch) as writer:
            recorder = LogitsOnly(writer) if capture == "logits" else Recorder(writer, capture)
            engine = TorchEngine(graph, self.weights32)
            engine.run(0, StepInput(TOKENS, positions(0)), recorder)
            engine.run(1, StepInput(CHUNK, positions(1)), recorder)
            token = int(engine.logits[-1].nan_to_num().argmax())
            engine.run(2, StepInput((token,), positions(2)), recorder)
        return Trace(path)

    def judged(self, trace: Trace) -> list[OpResult]:
        """The trace's ops, judged and explained."""
        replay = Replay(trace, self.graph, self.weights)
        ops = [OpResult(r.op, r.step, layer_of(r.op), kind_of(r.op), "ok", local=local) for r, local in replay.run()]
        return Explainer(replay).explain(judge(ops, Policy()))

    def visible(self, clean: Trace, faulty_graph: Graph) -> bool:
        """Whether any record of the clean trace would differ beyond its floor under the mistake."""
        changed = [op for op in faulty_graph if op is not self.graph[op.name]]
        replay = Replay(clean, self.graph, self.weights)
        touched = {op.name for op in changed}
        for record, local in replay.run():
            if touched & set(local.segment) and replay.under(record, changed, _ANY).faulty:
                return True
        return False


def run_one(bench: Bench, fault: str, capture: str) -> str:
    """Plant, trace, judge: one word for what came of it."""
    graph = plant(bench.graph, bench.file, fault)
    planted = {op.name for op in graph if op is not bench.graph[op.name]}
    ops = bench.judged(bench.trace(graph, capture))
    faulty = [op for op in ops if op.status == "faulty"]
    found = {name for op in faulty for name in op.local.segment} if faulty else set()
    if not faulty:
        if fault.partition("@")[0] in COARSE_TYPES and not any(op.candidate and op.candidate.inf for op in ops):
            return "innocent"
        return "missed" if bench.visible(bench.trace(bench.graph, capture), graph) else "not visible"
    if capture == "all":
        located = {op.op for op in faulty} <= planted
    else:
        located = all(set(op.local.segment) & planted for op in faulty) and bool(found & planted)
    if not located:
        return "false alarm"
    name = fault.partition("@")[0]
    names = {op.cause.name if op.cause else None for op in faulty}
    if names <= {name, *(SAME_IN_A_SEGMENT.get(name, ()) if capture != "all" else ())}:
        return "named"
    return "unnamed" if None in names else "misnamed: " + ", ".join(sorted(filter(None, names)))


def main() -> None:
    """Run the benchmark and write its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one family and two weight types")
    parser.add_argument("--captures", default="all,layers,logits")
    parser.add_argument("--only", help="one fault")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.time()
    table: dict[tuple[str, str, str], Counter[str]] = {}
    details: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        families = ("qwen2",) if args.quick else tuple(SHAPES)
        weights = ("F32", "Q4_K_M") if args.quick else WEIGHTS
        for family, weight, capture in itertools.product(families, weights, args.captures.split(",")):
            file = GGUFFile(make_model(folder, family, weight))
            bench = Bench(file, build_graph(file), folder)
            count = table.setdefault((family, weight, capture), Counter())
            for fault in [args.only] if args.only else BANK:
                for place in ("@0", f"@{N_LAYER // 2}", f"@{N_LAYER - 1}", ""):
                    try:
                        plant(bench.graph, file, fault + place)
                    except TracediffError:
                        continue
                    outcome = run_one(bench, fault + place, capture)
                    count[outcome.partition(":")[0]] += 1
                    if outcome not in ("named", "not visible"):
                        details.append(f"{family} {weight} {capture} {fault}{place}: {outcome}")
                        print(details[-1], flush=True)
            print(family, weight, capture, dict(count), f"{time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    random.seed(0)
    main()
