"""Blocks of quantised weights read by rules that nobody listed, drawn at random: is the rule told, in its own words?

    python benchmarks/block_rules.py [--seed N] [--runs N] [--only N] [--processes N] [--out docs/block-rules.md]

An engine reads all weights of a type, in matmuls and in the embedding, by a rule that is wrong: scales or minima that
are made of other bits, integers in another order, scales of other blocks, some values of each block that are scaled or
off by a number, or one edit, of a number or an operator, in the statements of a kernel that reads a block.
"""

import argparse
import ast
import random
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from architectures import table
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from msgspec import Struct

from tracediff.diagnose.solve.by_value.block_kernels import KERNELS, Kernel
from tracediff.diagnose.solve.by_value.block_layout import Layout, Part, Sums, layout_of
from tracediff.diagnose.solve.by_value.blocks import WHATS, WHOSE, OfBits, Order, Rule, Scaled, Shared
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.model.block_fields import FIELDS, EditedBlocks, Fields
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.synthetic import Shape, write_model
from tracediff.model.weights import Weights, reading, values_of
from tracediff.pipeline import Effort, check_trace
from tracediff.trace.writer import TraceWriter

SHAPE = Shape("llama", n_layer=2, n_embd=256, n_head=8, n_head_kv=2, n_ff=768, n_vocab=352, theta=10_000.0)
FILES = {
    "Q2_K": "Q2_K",
    "Q3_K": "Q3_K_M",
    "Q4_K": "Q4_K_M",
    "Q5_K": "Q5_K_M",
    "Q6_K": "Q6_K",
}  # that hold blocks of a type
TYPES = tuple(name for name in FIELDS if name != "MXFP4")  # which llama.cpp writes for experts alone
OUTCOMES = ("in its own words", "otherwise", "in part", "not", "missed", "invisible")
N_PROMPT, SECONDS = 23, 60
_FACTORS, _OFFSETS = (-1.0, 2.0, 0.5, 16.0, 1 / 16), (-8.0, 8.0, 16.0, 1.0, -1.0)
_MOVED = (8, 16, -8, 1, -1, 4, 24)  # bits


class Run(Struct):
    """What came of one run: what was planted and what was said, in words."""

    type: str
    sort: str
    planted: str
    outcome: str = ""
    said: tuple[str, ...] = ()


def of_bits(rng: random.Random, layout: Layout) -> Rule:
    """Other sums of bits in some parts, of scales, of minima or of both."""
    both = [("scales", layout.scales), *([("minima", layout.minima)] if layout.minima else [])]
    chosen = rng.sample(both, rng.randint(1, len(both)))
    return replace(OfBits(layout.scales, layout.minima), **{name: _mutated(rng, sums, layout) for name, sums in chosen})


def _mutated(rng: random.Random, sums: Sums, layout: Layout) -> Sums:
    begin = rng.randrange(len(sums))
    parts, by, k = range(begin, rng.randint(begin, len(sums) - 1) + 1), rng.choice(_MOVED), rng.randrange(6)
    header = {*layout.header}
    ways: Sequence[Callable[[Part], Part]] = (
        lambda part: (),
        lambda part: part[:k] + part[k + 1 :],
        lambda part: tuple((bit + by if bit + by in header else bit, of) for bit, of in part),
        lambda part: tuple((bit, 2 * of) for bit, of in part),
        lambda part: part[:k],
    )
    way = rng.choice(ways)
    constants = {p: tuple(one for one in sums[p] if one[0] < 0) for p in parts}
    changed = {p: constants[p] + tuple(sorted(way(sums[p][len(constants[p]) :]))) for p in parts}
    return tuple(changed.get(p, part) for p, part in enumerate(sums))


def order(rng: random.Random, layout: Layout) -> Rule:
    """The bits of a value's number permuted, of the low bits, the high ones or both; one of them fixed or turned."""
    low, high = (_permuted(rng, len(layout.low)) for _ in range(2))
    which = rng.choice(((low, None), (None, high), (low, high))) if layout.high else (low, None)
    return Order(*which)


def _permuted(rng: random.Random, n: int) -> tuple[int, ...]:
    bits = [*range(n.bit_length() - 1)]
    if rng.random() < 0.5:
        rng.shuffle(bits)
        return tuple(sum((j >> m & 1) << k for k, m in enumerate(bits)) for j in range(n))
    a, b, k = rng.choice(bits), rng.choice(bits), rng.choice(bits)
    bits[a], bits[b] = bits[b], bits[a]
    own = [sum((j >> m & 1) << i for i, m in enumerate(bits)) for j in range(n)]
    fixed: Sequence[Callable[[int], int]] = (
        lambda place: place & ~(1 << k),
        lambda place: place | 1 << k,
        lambda place: place ^ 1 << k,
    )
    return tuple(map(rng.choice(fixed), own))


def shared(rng: random.Random, layout: Layout) -> Rule:
    """Scales or minima of other blocks."""
    return Shared(rng.choice(WHATS) if layout.m.stop else "scale", rng.choice([*WHOSE]))


def scaled(rng: random.Random, layout: Layout) -> Rule:
    """Some values of each block, side by side or at even distances, are 0, so many times or so much more."""
    n = len(layout.low)
    width = 1 << rng.randrange(n.bit_length() - 1)
    begin = rng.randrange(n // width) * width
    places = range(begin, n, width) if rng.random() < 0.25 else range(begin, begin + width)
    times, more = [1.0] * n, [0.0] * n
    changed, value = rng.choice(((times, 0.0), (times, rng.choice(_FACTORS)), (more, rng.choice(_OFFSETS))))
    for j in places:
        changed[j] = value
    return Scaled(tuple(times), tuple(more))


_OTHERS: dict[type[ast.operator], type[ast.operator]] = {
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip


def code(rng: random.Random, layout: Layout) -> Rule:
    """One number, or one operator, of a statement of the kernel is another, or one index is."""
    source = KERNELS[layout.type]
    while True:
        tree = ast.parse(source)
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        statement = rng.choice(statements)
        right = ast.unparse(statement)
        parts = [node for node in ast.walk(statement) if isinstance(node, ast.Constant | ast.BinOp)]
        node = rng.choice(parts)
        if isinstance(node, ast.Constant):
            c = node.value
            assert isinstance(c, int)
            node.value = rng.choice([other for other in {c + 1, c - 1, 2 * c, c // 2, 0, c ^ 1} - {c} if other >= 0])
        elif isinstance(node, ast.BinOp) and type(node.op) in _OTHERS:
            node.op = _OTHERS[type(node.op)]()
        rule = Kernel(ast.unparse(tree), ((ast.unparse(statement), right),))
        with suppress(ValueError, ZeroDivisionError), np.errstate(all="raise"):
            some = Fields.of_rows(
                layout.type, np.random.default_rng(0).integers(0, 60, (4, _n_bytes(layout)), np.uint8)
            )
            if not np.array_equal(rule(some).values(), some.values()):
                return rule


def _n_bytes(layout: Layout) -> int:
    return GGML_QUANT_SIZES[GGMLQuantizationType[layout.type]][1]


SORTS: dict[str, Callable[[random.Random, Layout], Rule]] = {
    "bits of scales and minima": of_bits,
    "the order of integers": order,
    "scales of other blocks": shared,
    "some values of each block": scaled,
    "one edit of a kernel's code": code,
}


def drawn(number: int, seed: int, only: str | None = None) -> tuple[str, str, Rule]:
    """The type, the sort and the rule of this number: types take turns."""
    rng = random.Random(f"{seed} {number}")
    type_ = TYPES[number % len(TYPES)]
    layout = layout_of(type_)
    lacking = [*([] if layout.scales else [of_bits]), *([] if type_ in KERNELS else [code])]
    sorts = [name for name, make in SORTS.items() if make not in lacking]
    sorts = [only] if only in sorts else sorts
    while True:
        sort = rng.choice(sorts)
        rule = SORTS[sort](rng, layout)
        if rule != OfBits(layout.scales, layout.minima):
            return type_, sort, rule


def done(number: int, seed: int, folder: Path, only: str | None = None) -> Run:
    """Plant it, and look at what is said of it."""
    type_, sort, rule = drawn(number, seed, only)
    path = write_model(folder / f"{number}.gguf", SHAPE, FILES.get(type_, type_))
    file, words = GGUFFile(path), rule.words(layout_of(type_))
    graph = build_graph(file)
    of_type = [op for op in graph if op.weights and file.tensors[op.weights[0].name].type.name == type_]
    tensors = [file.tensors[op.weights[0].name] for op in of_type]
    wrong = [reading(op, EditedBlocks((type_,), rule)) for op in of_type]
    tokens = tuple(random.Random(number).sample(range(SHAPE.n_vocab), N_PROMPT + 1))
    trace = folder / f"{number}.trace"
    with TraceWriter(trace, "torch", graph.hparams.arch) as writer:
        engine, recorder = TorchEngine(graph.changed(*wrong), Weights(file)), TensorWriter(writer)
        engine.run(0, StepInput(tokens[:-1], tuple(range(N_PROMPT))), recorder)
        engine.run(1, StepInput(tokens[-1:], (N_PROMPT,)), recorder)
    findings = check_trace(trace, path, effort=Effort(seconds=SECONDS)).findings
    run = Run(type_, sort, words, said=tuple(finding.text for finding in findings))
    named = [finding.mistake for finding in findings]
    if not findings:
        same = (torch.equal(EditedBlocks((type_,), rule)(file, info), values_of(file, info)) for info in tensors)
        run.outcome = "invisible" if all(same) else "missed"
    elif not all(named):
        run.outcome = "in part" if any(named) else "not"
    else:
        run.outcome = "in its own words" if all(words in text for text in run.said) else "otherwise"
    for left in (path, trace, trace.with_suffix(".bin")):
        left.unlink()
    return run


_HEAD = """# Blocks read by rules that nobody listed

{about} Written by

    python benchmarks/block_rules.py --seed {seed} --runs {n} --out docs/block-rules.md

{n} rules for {n_types} types, planted in a model of {n_layer} layers and {n_embd} channels, whose trace holds every op
of a prompt of {n_prompt} random tokens and one decode step; {seconds} seconds each for causes. Every cause that is
given leaves no more than its floor of each record. *Otherwise*: all is named, by a known mistake or by a rule that
comes to the same in this trace. *In part*: some ops have no cause. *Invisible*: these blocks are read as they are."""


def page(runs: Sequence[Run], seed: int) -> str:
    """The document."""
    about = " ".join((__doc__ or "").split("\n\n")[2].split())
    counts = Counter((run.sort, run.outcome) for run in runs)
    rows = [(sort, *(counts[sort, outcome] for outcome in OUTCOMES)) for sort in SORTS]
    rest = [
        (run.type, run.planted, run.outcome, "; ".join(run.said)) for run in runs if run.outcome != "in its own words"
    ]
    head = _HEAD.format(
        about=textwrap.fill(about, 118),
        seed=seed,
        n=len(runs),
        n_types=len(TYPES),
        n_layer=SHAPE.n_layer,
        n_embd=SHAPE.n_embd,
        n_prompt=N_PROMPT,
        seconds=SECONDS,
    )
    listed = table(("type", "planted", "named", "said"), rest) if rest else "None."
    parts = head, table(("what is read otherwise", *OUTCOMES), rows), f"## All that have other words\n\n{listed}"
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Run them, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--only", type=int, help="the run of this number")
    parser.add_argument("--sort", choices=[*SORTS], help="of one sort alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    numbers = range(arguments.runs) if arguments.only is None else [arguments.only]
    runs = []
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool,
    ):
        work = partial(done, seed=arguments.seed, folder=Path(name), only=arguments.sort)
        for number, run in zip(numbers, pool.map(work, numbers), strict=True):
            runs.append(run)
            print(f"{number}: {run.type}: {run.outcome}: {run.planted}", flush=True)
    if arguments.out:
        arguments.out.write_text(page(runs, arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
