"""Several mistakes at once, planted in one model, then looked for in the candidate's trace alone.

    python benchmarks/several.py [--families qwen2] [--weights F32] [--captures layers] [--only N] [--processes N]
                                 [--minutes N] [--jsonl FILE] [--out docs/several.md]

With every op recorded three to five, each in an op of its own. With hidden states alone two to four, each in one layer
or in all, so that some layers have several. The models, their engines' arithmetic and the words are detection.py's.
Sets come in a random order, the same in each run: when the minutes are over, those that were run are a sample of all.
What came of each is appended to the file, and those in it are not run again.
"""

import argparse
import itertools
import math
import random
import sys
import time
from pathlib import Path

import torch
from clean_runs import table
from detection import COARSE_TYPES, N_LAYER, SHAPES, WEIGHTS, WORDS, Bench, Case, Outcome, kept_bench, remembered, row

from tracediff.diagnose.mistakes import ALIKE, BANK
from tracediff.diagnose.planting import plant
from tracediff.errors import TracediffError
from tracediff.model.graph import Graph

N_SETS = {"all": 18, "layers": 9}  # of each model
SIZES = {"all": (3, 5), "layers": (2, 4)}
MISTAKES = [name for name in BANK if name not in COARSE_TYPES]


class Set:
    """Mistakes planted together, no two in one op: the graph, and whose each changed op is."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.faults: list[str] = []
        self.owner: dict[str, str] = {}

    def plant(self, bench: Bench, fault: str) -> None:
        """Plant one more where it applies and none is yet."""
        try:
            graph = plant(self.graph, bench.file, fault)
        except TracediffError:
            return
        changed = {op.name: fault.partition("@")[0] for op in graph if self.graph.ops.get(op.name, op) is not op}
        if not changed.keys() & self.owner.keys():
            self.graph = graph
            self.faults.append(fault)
            self.owner |= changed


def set_of(bench: Bench, capture: str, seed: str) -> Set:
    """A random set, the same one in each run."""
    rng = random.Random(seed)
    chosen, size = Set(bench.graph), rng.randint(*SIZES[capture])
    while len(chosen.faults) < size:
        name = rng.choice(MISTAKES)
        if capture == "all":
            ops = [op.name for op in bench.graph if BANK[name].where.holds(op, bench.graph)]
            place = f"@{rng.choice(ops)}" if ops else ""
        else:
            place = rng.choice(["", f"@{rng.randrange(N_LAYER)}"])
        chosen.plant(bench, name + place)
    return chosen


def run_one(bench: Bench, chosen: Set, capture: str) -> str:
    """Trace and judge: one word for what came of it, and where after a colon."""
    trace = bench.trace(chosen.graph, capture)
    faulty = [op for op in bench.judged(trace) if op.status == "faulty"]
    clean = [op.op for op in faulty if op.local and not chosen.owner.keys() & set(op.local.segment)]
    if clean:
        return "false alarm: " + ", ".join(clean)
    missed = bench.missed(chosen.graph, faulty, capture)
    if missed:
        return "missed: " + ", ".join(missed)
    if not faulty:
        return "not visible"
    wrong: dict[str, str] = {}
    for op in faulty:
        assert op.local
        planted = {chosen.owner[name] for name in op.local.segment if name in chosen.owner}
        planted |= {other for name in planted if capture != "all" for other in ALIKE.get(name, ())}
        if not op.cause:
            wrong[op.op] = "unnamed"
        elif not planted.issuperset(op.cause.name.split(" + ")):
            wrong[op.op] = op.cause.name
    if not wrong:
        return "named"
    kind = "unnamed" if set(wrong.values()) == {"unnamed"} else "misnamed"
    return f"{kind}: " + ", ".join(f"{name} as {cause}" for name, cause in wrong.items())


def work(case: Case) -> list[Outcome]:
    """One set: the number of it stands for the fault."""
    torch.set_num_threads(1)
    bench, _ = kept_bench(case.family, case.weights)
    chosen = set_of(bench, case.capture, " ".join(case))
    began = time.process_time()
    result = run_one(bench, chosen, case.capture)
    return [Outcome(case, f"{time.process_time() - began:.1f}", " + ".join(chosen.faults), result)]


_HEAD = """# Several mistakes at once

Planted together in a small model and looked for in its trace alone, without a reference, in {minutes} minutes of CPU
time, by

    python benchmarks/several.py --minutes N --jsonl several.jsonl --out docs/several.md

in as many runs as there was time for: {done} of {of} sets, in a random order.

With every op recorded three to five, each in an op of its own; with hidden states alone two to four, each in one layer
or in all, so that a layer has up to four. *Located*: the faulty records are those that hold planted ops which show, and
no other. *Named*: each has a cause made of mistakes that are planted in it, and the residual under that cause is at the
floor; *unnamed*: some have no cause; *misnamed*: some have another's."""


def report(outcomes: list[Outcome], of: int) -> str:
    """The document. The kind of an outcome is how many seconds it took."""
    seconds = sum(float(o.kind) for o in outcomes)
    captures = [capture for capture in SIZES if any(o.case.capture == capture for o in outcomes)]
    rows = ((capture, *row([o for o in outcomes if o.case.capture == capture])) for capture in captures)
    rest = [o for o in outcomes if o.result not in ("named", "not visible")]
    listed = table(
        ("family", "weights", "recorded", "planted", "outcome"), ((*o.case[:3], o.what, o.result) for o in rest)
    )
    parts = (
        _HEAD.format(minutes=f"{seconds / 60:.0f}", done=len(outcomes), of=of),
        table(("recorded", "sets", *WORDS, "located", "named, share"), rows),
        "## All that were not named\n\n" + (listed if rest else "None."),
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the benchmark and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(SHAPES))
    parser.add_argument("--weights", default=",".join(WEIGHTS))
    parser.add_argument("--captures", default=",".join(SIZES))
    parser.add_argument("--only", type=int, help="the set of this number, of each model")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--jsonl", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    models = list(itertools.product(args.weights.split(","), args.families.split(",")))
    cases = [
        Case(family, weights, capture, str(n))
        for (weights, family), capture in itertools.product(models, args.captures.split(","))
        for n in (range(N_SETS[capture]) if args.only is None else [args.only])
    ]
    random.Random(0).shuffle(cases)
    outcomes: list[Outcome] = []
    for outcome in remembered(args.jsonl, work, cases, args.processes, args.minutes):
        outcomes.append(outcome)
        where = f"{', '.join(outcome.case)} ({outcome.kind} s), {outcome.what}"
        print(f"{time.monotonic() - began:4.0f} s {where}: {outcome.result}", file=sys.stderr)
    text = report(outcomes, len(cases))
    if args.out:
        args.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
