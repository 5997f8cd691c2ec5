"""Right runs in half precision of every architecture: replay may call no op of them faulty.

    python benchmarks/half_precision.py [--only gemma3,phi3] [--seed N] [--processes N] [--out docs/half-precision.md]

Of each architecture that the torch engine runs the tiny model of architectures.py, in float16 and in bfloat16, traced
with every op and with its hidden states alone: a prompt of random tokens, whose number is drawn too, and two decode
steps. Another seed draws others.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import tiny_models
import torch
from architectures import BUGS, N_DECODE, first_reason, kept, table
from msgspec import Struct

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import TracediffError
from tracediff.names import Capture
from tracediff.pipeline import Effort, check_trace

LENGTHS = (1, 3, 9, 14)  # tokens of a prompt
DTYPES = {"bf16": "bfloat16", "f16": "float16"}
CAPTURES: dict[Capture, str] = {"all": "every op", "layers": "hidden states"}
NO_SEARCH = Effort(seconds=0.01)  # for causes
ENDED = "ended in an exception"
VERDICTS = ("match", "undecided", "diverged", ENDED)


class Run(Struct):
    """What came of one run: the verdict, or that it ended in an exception; and which, or the report's first finding."""

    arch: str
    dtype: str
    capture: Capture
    n_tokens: int
    verdict: str
    why: str = ""


def runs_of(arch: str, seed: int) -> list[Run]:
    """All runs of an architecture."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model = tiny_models.write(arch, Path(name) / "model.gguf")
        return [run(arch, seed, dtype, capture, model) for dtype in DTYPES for capture in CAPTURES]


def run(arch: str, seed: int, dtype: str, capture: Capture, model: Path) -> Run:
    """Trace the engine, and judge it."""
    rng = random.Random(f"{seed} {arch} {dtype} {capture}")
    tokens = tuple(rng.randrange(5, 200) for _ in range(rng.choice(LENGTHS)))
    done, trace = Run(arch, dtype, capture, len(tokens), ENDED), model.parent / "run.trace"
    try:
        trace_torch(model, trace, TorchOptions(dtype=dtype, capture=capture), tokens, N_DECODE)
        result = check_trace(trace, model, effort=NO_SEARCH)
    except (*BUGS, TracediffError) as error:
        done.why = f"{type(error).__name__}: {first_reason(str(error))}"
        return done
    done.verdict = result.verdict
    done.why = result.findings[0].text if result.findings else ""
    return done


_HEAD = """# Right runs in half precision

Every architecture that the torch engine runs, in float16 and in bfloat16: a tiny model, a prompt of {lengths} random
tokens and two decode steps, traced with every op and with its hidden states alone, and checked. Written by

    python benchmarks/half_precision.py --seed {seed} --out docs/half-precision.md

{n_runs} runs of {n_archs} architectures. None has a mistake, so none may diverge, but where what float16 cannot hold
overflows, as sums of squares of gemma3n do: that is a mistake. *Undecided*: of some record the roundings that its
arithmetic may have hide a mistake, or no value is finite, which the report says."""


def page(runs: Sequence[Run], seed: int) -> str:
    """The document."""
    counts = Counter((run.dtype, run.capture, run.verdict) for run in runs)
    rows = (
        (DTYPES[dtype], CAPTURES[capture], *(counts[dtype, capture, verdict] for verdict in VERDICTS))
        for dtype in DTYPES
        for capture in CAPTURES
    )
    rest = [
        (run.arch, DTYPES[run.dtype], CAPTURES[run.capture], run.n_tokens, run.verdict, run.why)
        for run in runs
        if run.verdict != "match"
    ]
    lengths = f"{', '.join(map(str, LENGTHS[:-1]))} or {LENGTHS[-1]}"
    listed = table(("architecture", "computed in", "recorded", "tokens", "verdict", "the first finding"), rest)
    parts = (
        _HEAD.format(lengths=lengths, seed=seed, n_runs=len(runs), n_archs=len({run.arch for run in runs})),
        table(("computed in", "recorded", *VERDICTS), rows),
        "## All that do not match\n\n" + (listed if rest else "None."),
    )
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Run all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    archs = args.only or [arch for arch, row in kept().items() if row.logits is not None]
    runs = list[Run]()
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        for done in pool.map(partial(runs_of, seed=args.seed), archs):
            runs += done
            print(*(f"{one.arch} {one.dtype} {one.capture}: {one.verdict} {one.why}" for one in done), sep="\n")
    text = page(runs, args.seed)
    if args.out:
        args.out.write_text(text)
    print(text)
    return int(any(run.verdict in ("diverged", ENDED) for run in runs))


if __name__ == "__main__":
    sys.exit(main())
