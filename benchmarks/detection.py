"""The detection benchmark: every plantable mistake, planted, then looked for in the candidate's trace alone.

    python benchmarks/detection.py [--families qwen2] [--weights F32] [--captures all] [--only FAULT]
                                   [--processes N] [--minutes N] [--jsonl FILE] [--out docs/detection.md]

Each mistake is planted in the first, the middle, the last and all layers of a small torch model that runs a prompt,
a second chunk of tokens and a decoded one; the trace holds every op, the hidden states, or the logits. Some models run
in plain float32 arithmetic, some round as llama.cpp does. In the middle layer its other variants are planted too, and
numbers that no list holds. Then runs that are as they should be though they look odd. Mistakes and models take turns,
in a random order that is the same in each run: when the minutes are over, each mistake, model and way to record was run
as often as any other, or once less. What came of each is appended to the file, and cases in it are not run again.
Several mistakes at once are for several.py.
"""

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from clean_runs import sampled, table

from tracediff.diagnose.explain import Explainer
from tracediff.diagnose.mistakes import ALIKE, BANK
from tracediff.diagnose.mistakes.mistake import Context, Variant
from tracediff.diagnose.planting import plant
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.errors import TracediffError
from tracediff.judge import Policy, judge
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op
from tracediff.model.synthetic import Shape, write_model
from tracediff.model.weights import Weights
from tracediff.names import kind_of, layer_of
from tracediff.numerics.arithmetic import Scheme
from tracediff.numerics.schemes import scheme_named
from tracediff.replay.judging import judge_all
from tracediff.replay.replay import Replay
from tracediff.result import OpResult
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

N_LAYER = 3
TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 107, 260, 98)
CHUNK = (97, 110, 32)
_COMMON: dict[str, Any] = {"n_layer": N_LAYER, "n_embd": 256, "n_head": 8, "n_head_kv": 2, "n_ff": 512, "n_vocab": 512}
SHAPES = {
    "llama": Shape("llama", **_COMMON, theta=500_000.0, eps=1e-5, rope_factors=True),
    "qwen2": Shape("qwen2", **_COMMON, loud=True),
    "qwen3": Shape("qwen3", **{**_COMMON, "n_head": 6}, head_dim=64),
}
WEIGHTS = ("F32", "F16", "Q8_0", "Q4_K_M")
# Where nothing overflows, float16 is coarse arithmetic and no mistake.
COARSE_TYPES = ("scores_f16", "ffn_act_f16")
# Where logits alone are recorded every hypothesis takes a forward pass or part of it, in all layers and in each: one
# model of each weight type.
LOGITS_OF = (("qwen2", "F32"), ("llama", "F16"), ("qwen3", "Q8_0"), ("llama", "Q4_K_M"))


INNOCENT = "innocent"  # in the place of a mistake

A = TypeVar("A")
B = TypeVar("B")


def engine_arithmetic(family: str, weights: str) -> str:
    """Of the engine that makes the mistake: plain float32 sums and llama.cpp's roundings of activations take turns."""
    turn = list(SHAPES).index(family) + WEIGHTS.index(weights)
    return "exact" if weights == "F32" or turn % 2 else "llama.cpp"


def positions(step: int, shift: int = 0) -> tuple[int, ...]:
    """Of the prompt, the chunk and the decoded token."""
    cuts = [shift + n for n in (0, len(TOKENS), len(TOKENS) + len(CHUNK), len(TOKENS) + len(CHUNK) + 1)]
    return tuple(range(cuts[step], cuts[step + 1]))


class LogitsOnly(TensorWriter):
    """Records the last op alone."""

    def op(self, step: int, op: str, *rest: Any, **named: Any) -> None:
        """The last op's output."""
        if op == "output":
            super().op(step, op, *rest, **named)


def make_model(folder: Path, family: str, weights: str) -> Path:
    """A generated model of this family and weight type."""
    path = folder / f"{family}-{weights}.gguf"
    return path if path.exists() else write_model(path, SHAPES[family], weights)


def bench_of(family: str, weights: str, folder: Path) -> "Bench":
    """A new model in the folder, and the arithmetic that the engine has for it."""
    file = GGUFFile(make_model(folder, family, weights))
    return Bench(file, build_graph(file), scheme_named(engine_arithmetic(family, weights)), folder)


@dataclass
class Bench:
    """One model, with its clean graph and weights."""

    file: GGUFFile
    graph: Graph
    scheme: Scheme
    folder: Path

    def __post_init__(self) -> None:
        self.weights = Weights(self.file, keep_bytes=1 << 30)
        self.weights32 = Weights(self.file, torch.float32, keep_bytes=1 << 30)

    def trace(self, graph: Graph, capture: str, weights: Weights | None = None, shift: int = 0) -> Trace:
        """A trace of the torch engine running `graph`: a prompt, a second chunk of tokens, a decoded one.

        In the model's own arithmetic, and with other `weights` in theirs.
        """
        path = self.folder / "detection.trace"
        with TraceWriter(path, "detection", graph.hparams.arch) as writer:
            recorder = LogitsOnly(writer) if capture == "logits" else TensorWriter(writer, capture)  # type: ignore[arg-type]
            engine = TorchEngine(graph, weights or self.weights32, None if weights else self.scheme)
            engine.run(0, StepInput(TOKENS, positions(0, shift)), recorder)
            engine.run(1, StepInput(CHUNK, positions(1, shift)), recorder)
            token = int(engine.logits[-1].nan_to_num().argmax())
            engine.run(2, StepInput((token,), positions(2, shift)), recorder)
        return Trace(path)

    def judged(self, trace: Trace) -> list[OpResult]:
        """The trace's ops, judged and explained."""
        replay = Replay(trace, self.graph, self.weights)
        ops = [
            OpResult(r.op, r.step, layer_of(r.op), kind_of(r.op), "ok", local=local)
            for _, r, local in judge_all([replay])
        ]
        explained = Explainer(replay).explain(judge(ops, Policy()))
        if bugs := {op.bug for op in explained if op.bug}:
            raise AssertionError(f"the search ended with {'; '.join(bugs)}")
        return explained

    def missed(self, wrong: Graph, faulty: list[OpResult], capture: str) -> list[str]:
        """Which ops of the mistaken engine should have been found: those that are neither found nor masked by the
        others (a matmul with zeros after one that is zero already), and that would show in a clean trace.
        """
        changed, added = self.changed(wrong), [op for op in wrong if op.name not in self.graph.ops]
        unseen = {name: op for name, op in changed.items() if name not in covered(faulty)}
        if unseen and len(unseen) < len(changed):
            alone = self.judged(self.trace(self.graph.changed(*unseen.values(), *added), capture))
            found = covered([op for op in alone if op.status == "faulty"])
            unseen = {name: op for name, op in unseen.items() if name not in found}
        visible = unseen and self.visible(self.trace(self.graph, capture), [*unseen.values(), *added])
        return [*unseen] if visible else []

    def changed(self, wrong: Graph) -> dict[str, Op]:
        """The model's ops that a mistaken engine computes otherwise."""
        return {op.name: op for op in wrong if self.graph.ops.get(op.name, op) is not op}

    def visible(self, clean: Trace, changed: list[Op]) -> bool:
        """Whether any record of the clean trace would differ beyond its floor if the engine computed these ops so."""
        replay = Replay(clean, self.graph, self.weights)
        touched = {op.name for op in changed}
        for _, record, local in judge_all([replay]):
            if touched & set(local.segment) and replay.under(record, changed).faulty:
                return True
        return False


def covered(faulty: list[OpResult]) -> set[str]:
    """The ops that these faulty records are computed from."""
    return {op for result in faulty if result.local for op in result.local.segment}


def run_one(bench: Bench, name: str, graph: Graph, capture: str, says: str = "") -> str:
    """Trace the graph with the mistake, judge: one word for what came of it, and names or ops after a colon.

    Where it is named its words must hold what it `says`: the number.
    """
    changed = bench.changed(graph)
    trace = bench.trace(graph, capture)
    finite = all(np.isfinite(trace.values(record)).all() for record in trace.ops.values())
    judged = bench.judged(trace)
    faulty = [op for op in judged if op.status == "faulty"]
    strangers = [op.op for op in faulty if op.local and not set(op.local.segment) & changed.keys()]
    if not faulty and name in COARSE_TYPES and finite:
        return "innocent"
    if strangers:
        return "false alarm: " + ", ".join(strangers)
    missed = bench.missed(graph, faulty, capture)
    if missed:
        blind = covered([op for op in judged if op.local and op.local.blind])
        return ("blind: " if blind.issuperset(missed) else "missed: ") + ", ".join(missed)
    if not faulty:
        return "not visible"
    names = {op.cause.name if op.cause else None for op in faulty}
    if says and names == {"solved"}:  # the solver, too, tells a number
        names = {name}
    if names <= {name, *(ALIKE.get(name, ()) if capture != "all" else ())}:
        other = next((op.cause.text for op in faulty if op.cause and says not in op.cause.text), None)
        return "named" if other is None else f"misnamed: {other}"
    return "unnamed" if names <= {None, name} else "misnamed: " + ", ".join(sorted(filter(None, names - {name})))


def off_lists(name: str, op: Op) -> Iterator[tuple[Op, str]]:
    """The op with a number that no list of the mistake's holds, and the words that tell it."""
    if name == "eps":
        for eps in (0.00373, 0.0217):
            yield op.with_attrs(eps=eps), f"eps is {eps:g} "
    if name == "rope_theta":
        for theta in (12_345, 150_000):
            yield op.with_attrs(rope=replace(op.attrs["rope"], theta=float(theta))), f"base is {theta} "
    if name == "attention_scale":
        for factor in (1.37, 0.61):
            scale = op.attrs["scale"] * factor
            yield op.with_attrs(scale=scale), f"{scale:.4g}"[:-1]
    if name == "rope_scaled":
        for factor in (0.37, 1.9):
            yield op.with_attrs(rope=replace(op.attrs["rope"], freq_scale=factor)), f"multiplied by {factor:g} "
    if name == "window":
        for size in (3, 7):
            yield op.with_attrs(window=size), f"a window of {size} "


def others(bench: Bench, name: str) -> Iterator[tuple[str, Graph, str]]:
    """All but the first variant, and numbers off the lists, in the ops of the middle layer: which, the graph, and what
    the report must say of it.
    """
    where, context = BANK[name].where, Context(bench.graph, bench.file)
    ops = [op for op in bench.graph if where.holds(op, bench.graph) and layer_of(op.name) == N_LAYER // 2]
    for sort, of in (
        ("variant", [[*itertools.islice(BANK[name].change(op, context), 1, None)] for op in ops]),
        ("off the list", [[*off_lists(name, op)] for op in ops]),
    ):
        for n in range(max(map(len, of), default=0)):
            there = [Variant(*variants[n]) for variants in of if n < len(variants)]
            text, changed = there[0].text, (op for variant in there for op in variant.ops)
            yield f"{sort}, {text}", bench.graph.changed(*changed), text * (sort != "variant")


def innocents(bench: Bench) -> Iterator[tuple[str, str]]:
    """Runs without a mistake that look odd beside others: what they are and the outcome."""
    for name, weights, shift in (
        ("float64", Weights(bench.file), 0),
        ("float16", Weights(bench.file, torch.float16), 0),
        ("bfloat16", Weights(bench.file, torch.bfloat16), 0),
        ("all positions shifted by 5", None, 5),
    ):
        faulty = [
            op.op for op in bench.judged(bench.trace(bench.graph, "all", weights, shift)) if op.status == "faulty"
        ]
        yield name, "false alarm: " + ", ".join(faulty) if faulty else "passes"


def plantable(bench: Bench, fault: str) -> bool:
    """Whether the fault applies to something in this model."""
    try:
        plant(bench.graph, bench.file, fault)
    except TracediffError:
        return False
    return True


class Case(NamedTuple):
    """One model, what is recorded, and a mistake of the bank or INNOCENT."""

    family: str
    weights: str
    capture: str
    fault: str


class Outcome(NamedTuple):
    """What came of one run: `kind` is single, other or innocent."""

    case: Case
    kind: str
    what: str
    result: str


@cache
def kept_bench(family: str, weights: str) -> tuple[Bench, tempfile.TemporaryDirectory[str]]:
    """The bench of a model, for all cases that a process has of it, and its folder."""
    folder = tempfile.TemporaryDirectory()
    return bench_of(family, weights, Path(folder.name)), folder


def in_turn(a: Sequence[A], b: Sequence[B]) -> Iterator[tuple[A, B]]:
    """All pairs, in a random order that is the same in each run: among the first n each of `a` and of `b` is as often
    as any other, or once less.
    """
    a, b = random.Random(0).sample(a, len(a)), random.Random(0).sample(b, len(b))
    for i in range(len(a) * len(b)):
        yield a[i % len(a)], b[(i + i // math.lcm(len(a), len(b))) % len(b)]


def remembered(
    path: Path | None, work: Callable[[Case], list[Outcome]], cases: Sequence[Case], processes: int, minutes: float
) -> Iterator[Outcome]:
    """What came of the cases: as the file has it, then of those that it lacks, which is appended to it."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    known = [Outcome(Case(*case), *rest) for case, *rest in map(json.loads, lines)]
    yield from known
    done = {outcome.case for outcome in known}
    missing = [case for case in cases if case not in done]
    for outcome in sampled(work, missing, processes, 60 * minutes):
        if path:
            with path.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
        yield outcome


def work(case: Case) -> list[Outcome]:
    """All runs of one case."""
    torch.set_num_threads(1)
    bench, _ = kept_bench(case.family, case.weights)
    if case.fault == INNOCENT:
        return [Outcome(case, INNOCENT, *innocent) for innocent in innocents(bench)]
    outcomes = []
    for fault in (case.fault + place for place in ("@0", f"@{N_LAYER // 2}", f"@{N_LAYER - 1}", "")):
        if plantable(bench, fault):
            graph = plant(bench.graph, bench.file, fault)
            outcomes.append(Outcome(case, "single", fault, run_one(bench, case.fault, graph, case.capture)))
    if case.capture != "logits":
        for text, graph, says in others(bench, case.fault):
            result = run_one(bench, case.fault, graph, case.capture, says)
            outcomes.append(Outcome(case, "other", f"{case.fault}: {text}", result))
    return outcomes


WORDS = ("named", "unnamed", "misnamed", "missed", "blind", "false alarm", "not visible", "innocent")


def row(outcomes: list[Outcome]) -> list[object]:
    """Of these runs: how many, of each outcome, and the share named of the visible ones."""
    count = Counter(outcome.result.partition(":")[0] for outcome in outcomes)
    visible = len(outcomes) - count["not visible"] - count["innocent"]
    located = visible - count["missed"] - count["blind"] - count["false alarm"]
    share = (f"{n / visible:.1%}" if visible else "" for n in (located, count["named"]))
    return [len(outcomes), *(count[word] for word in WORDS), *share]


_HEAD = """# Detection

Every known mistake that can be planted, planted in a small model and looked for in its trace alone, without a
reference, by

    python benchmarks/detection.py --minutes N --jsonl detection.jsonl --out docs/detection.md

in as many runs as there was time for: {done:,} of {of:,} cases, a mistake in a model each. Mistakes, models and what is
recorded take turns.

*Located*: the faulty ops are the planted ones that show, and nothing else (where only hidden states or logits are
recorded: the segments that hold them). *Named*: every faulty op has the planted mistake's name; *unnamed*: some have
none; *misnamed*: some have another's. *Missed*: it passes; *blind*: it passes in a record of which the report says that
its roundings cannot be told from a mistake of their size. *Not visible*: the clean trace replayed under the mistake
differs from itself by no more than the floor, as with eps where activations are large, or where the roundings of a
segment are coarser. *Innocent*: a coarse float type where nothing overflows, which is arithmetic. Shares are of the
visible ones, missed and blind ones among them."""


def report(outcomes: list[Outcome], n_cases: int) -> str:
    """The document."""
    head = ("planted", *WORDS, "located", "named, share")
    order = {capture: i for i, capture in enumerate(("all", "layers", "logits"))}
    single = sorted((o for o in outcomes if o.kind == "single"), key=lambda o: order[o.case.capture])
    done = len({o.case for o in outcomes})
    parts = [_HEAD.format(done=done, of=n_cases)]
    for title, key in (
        ("By what is recorded", lambda o: o.case.capture),
        ("By weight type", lambda o: (o.case.capture, o.case.weights)),
        ("By arithmetic", lambda o: (o.case.capture, engine_arithmetic(o.case.family, o.case.weights))),
        ("By family", lambda o: (o.case.capture, o.case.family)),
    ):
        groups: dict[object, list[Outcome]] = {}
        for outcome in single:
            groups.setdefault(key(outcome), []).append(outcome)
        rows = ((", ".join(k) if isinstance(k, tuple) else k, *row(v)) for k, v in groups.items())
        parts.append(f"## {title}\n\n" + table(("recorded", *head), rows))
    other = [o for o in outcomes if o.kind == "other"]
    if other:
        groups = {}
        for o in sorted(other, key=lambda o: order[o.case.capture]):
            groups.setdefault((o.what.partition(": ")[2].partition(",")[0], o.case.capture), []).append(o)
        parts.append(
            "## Other variants, and numbers off the lists\n\nIn the middle layer: all variants of a mistake but the "
            "first, which the tables above have, and numbers that no list holds: they must be told to three digits.\n\n"
            + table(("what", "recorded", *head), ((*key, *row(found)) for key, found in groups.items()))  # type: ignore[misc]
        )
    innocent = [o for o in outcomes if o.kind == INNOCENT]
    if innocent:
        by_name: dict[str, Counter[str]] = {}
        for o in innocent:
            by_name.setdefault(o.what, Counter())[o.result.partition(":")[0]] += 1
        parts.append(
            "## Innocent runs\n\n"
            + table(
                ("run", "models", "pass", "false alarms"),
                ((name, c.total(), c["passes"], c["false alarm"]) for name, c in by_name.items()),
            )
        )
    rest = [o for o in outcomes if o.result.partition(":")[0] not in ("named", "not visible", "innocent", "passes")]
    parts.append(
        "## All that were not named\n\n"
        + (
            table(
                ("family", "weights", "recorded", "planted", "outcome"), ((*o.case[:3], o.what, o.result) for o in rest)
            )
            if rest
            else "None."
        )
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the benchmark and write its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(SHAPES))
    parser.add_argument("--weights", default=",".join(WEIGHTS))
    parser.add_argument("--captures", default="all,layers,logits")
    parser.add_argument("--only", default="", help="one fault")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    options = (args.families, args.weights, args.captures)
    models = [
        (family, weights, capture)
        for family, weights, capture in itertools.product(*(option.split(",") for option in options))
        if capture != "logits" or (family, weights) in LOGITS_OF
    ]
    faults = [args.only] if args.only else [*BANK, INNOCENT]
    cases = [Case(*model, fault) for model, fault in in_turn(models, faults) if fault != INNOCENT or model[2] == "all"]
    outcomes: list[Outcome] = []
    for outcome in remembered(args.jsonl, work, cases, args.processes, args.minutes):
        outcomes.append(outcome)
        seconds = time.monotonic() - began
        print(f"{seconds:4.0f} s {', '.join(outcome.case[:3])}, {outcome.what}: {outcome.result}", file=sys.stderr)
    text = report(outcomes, len(cases))
    if args.out:
        args.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
