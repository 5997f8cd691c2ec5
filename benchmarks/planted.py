"""The solver's own grammar planted at random: is what was planted named, or something that comes to the same?

    python benchmarks/planted.py [--n 1000] [--pairs 100] [--twice 100] [--seed 0] [--seconds 3600] [--out OUT]

An op of a small model, an edit of it and the edit's parameters are drawn; the engine in torch runs the edited model in
float32 on a prompt and two decode steps, and its trace is checked without a reference, every op recorded or hidden
states alone. An explanation counts where what it says recomputes all that was recorded to the floor: that is what the
report holds its causes to, so another edit that is named comes to the same values. Each claim is tested by the second
implementation as well.
"""

import argparse
import ast
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from clean_runs import table
from mutants import PROMPT, SHAPES, first_difference, witnessed
from second_opinion import Opinion

from tracediff.diagnose.hypothesis import Hypothesis
from tracediff.diagnose.solve.by_value import functions, maps, operands, outputs, readings
from tracediff.diagnose.solve.edit import AND, Edit, Priced
from tracediff.diagnose.solve.edits import copies, formulas, inputs, numbers, tensors, terms
from tracediff.diagnose.solve.grammar import blank
from tracediff.diagnose.solve.loops.arrays import CannotRunError
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.search import bound_of, words_of
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.errors import TracediffError
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op
from tracediff.model.synthetic import write_model
from tracediff.model.weights import Weights, reading
from tracediff.pipeline import check_trace
from tracediff.result import OpResult
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

WEIGHTS = ("F32", "Q8_0", "Q4_K_M")
DECODED = (17, 301)
_DRAWS = 20  # of parameters, until an edit shows

EditedOp = tuple[Op, str]  # the op as it is planted, and the planted words


# --- drawing ---------------------------------------------------------------------------------------------------------


def drawn(rng: random.Random, problem: Problem, sort: str) -> EditedOp | None:
    """An edit of this sort of the problem's op; None where it has none."""
    op, loops = problem.op, problem.loops
    if sort in OF_LOOPS:
        edit = _edit(rng, problem, sort)
        words = words_of(problem, edit) if edit else None
        return (problem.edited(edit), words) if edit and words is not None else None
    match sort:
        case "another function":
            name = rng.choice(list(functions.NUMBERS))
            numbers = tuple(float(f"{rng.uniform(0.2, 2):.3g}") for _ in range(functions.NUMBERS[name]))
            return functions.mapped(op, name, numbers), functions.words(name, numbers)
        case "an index map":
            shape, axes, follows = rng.choice(list(outputs.views(problem)))
            axis = rng.randrange(1 if len(shape) > 1 and op.kind not in ("scores", "softmax") else 0, len(shape))
            n = shape[axis]
            how = maps.Map("reversed") if n < 3 else _map(rng, n)
            return outputs.moved_output(op, how, axis, shape, follows), how.words(axes[axis], n)
        case "an index map of an input":
            choices = [(operand, axis) for operand in operands.operands(problem) for axis in operand.along]
            if choices:
                operand, axis = rng.choice(choices)
                n = operand.shape[axis]
                if n > 1:
                    solved = operand.solved(problem, maps.Map("reversed") if n < 3 else _map(rng, n), axis)
                    return solved.ops[0], solved.words
        case "another reading of a weight" if op.kind == "linear":
            other = _reading(rng, op, problem.weights.file)
            return reading(op, other), readings.words_of_rows(other.rows, op) or _of_elements(other)
    assert loops
    return None


SORTS = (
    "another formula", "another input", "another weight", "another reading of a weight", "an index map",
    "an index map of an input", "another function", "another number", "fewer terms", "nothing computed",
)  # fmt: skip


# What is edited in an op's loops: two such edits may be made one after the other.
OF_LOOPS = ("another formula", "another input", "another weight", "another number", "fewer terms", "nothing computed")


def twice(rng: random.Random, problem: Problem) -> tuple[EditedOp, tuple[str, ...]] | None:
    """Two edits of the problem's op, and their sorts; None where one of them has none."""
    sorts = rng.choice(OF_LOOPS[:-1]), rng.choice(OF_LOOPS[:-1])  # of what is not computed nothing else is seen
    first = _edit(rng, problem, sorts[0])
    bound = bound_of(problem, first) if first else None
    if first is None or bound is None:
        return None
    rest = problem.given(bound)
    second = _edit(rng, rest, sorts[1])
    if second is None:
        return None
    of_first, of_second = words_of(problem, first), words_of(rest, second)
    if of_first is None or of_second is None:
        return None
    words = of_first + AND + of_second
    return (problem.edited(Priced(second, 0.0).on(Priced(first, 0.0), words).edit), words), sorts


def _edit(rng: random.Random, problem: Problem, sort: str) -> Edit | None:
    """An edit of the loops that can be run."""
    variants = {
        "another formula": lambda: [p.edit for p in formulas.variants(problem)],
        "another input": lambda: [p.edit for p in inputs.variants(problem)],
        "another weight": lambda: [p.edit for p in tensors.variants(problem)],
        "nothing computed": lambda: [p.edit for p in copies.variants(problem)],
        "fewer terms": lambda: list(_fewer(rng, problem)),
        "another number": lambda: list(_numbers(rng, problem)),
    }[sort]()
    while variants:
        edit = variants.pop(rng.randrange(len(variants)))
        bound = bound_of(problem, edit)
        try:
            if bound and bound.output() is not None:
                return edit
        except CannotRunError:  # it divides integers by 0: an engine would crash
            continue
    return None


def _fewer(rng: random.Random, problem: Problem) -> Iterator[Edit]:
    width = int(problem.loops.numbers.get("n_in", problem.loops.numbers.get("n", problem.loops.numbers.get("D", 4))))
    for sum_ in terms.reductions(problem.loops.source):
        n = 8 if "range(S)" in ast.unparse(sum_.generator) else width
        if n > 2:
            yield Edit("", next(sum_.with_terms(rng.randrange(1, n), n, "upto")))


def _numbers(rng: random.Random, problem: Problem) -> Iterator[Edit]:
    source = problem.loops.source
    for name, right in problem.loops.numbers.items():
        if isinstance(right, float) and name in source:
            value = float(f"{right * 10 ** rng.uniform(-2, 2):.4g}")
            yield Edit(f"{name} is {value:.6g}", source, numbers=((name, value),))
    for right, edited in numbers.each_constant(source):
        yield Edit("", edited.replace(numbers.CONSTANT, f"{right * rng.uniform(0.3, 3):.4g}"))


def _map(rng: random.Random, n: int) -> maps.Map:
    kind = rng.choice(("reversed", "shifted", "rotated", "modulo", "repeated", "all", "listed"))
    k = rng.randrange(1, n)
    a, b = rng.sample(range(n), 2)
    numbers = {
        "reversed": (),
        "shifted": (rng.choice((k, -k)),),
        "listed": (min(a, b), max(a, b), max(a, b), min(a, b)),
    }
    return maps.Map(kind, numbers.get(kind, (k,)))


def _reading(rng: random.Random, op: Op, file: GGUFFile) -> readings.Reading:
    rows, n = op.weights[0].shape
    if rng.random() < 1 / 3:
        return readings.Reading(elements=((rng.randrange(rows), rng.randrange(n), round(rng.uniform(-1, 1), 3)),))
    first = rng.choice((0, rng.randrange(rows - 1)))
    if rng.random() < 1 / 2:
        start = first * n + rng.randrange(1, n)
        return readings.Reading((readings.RowRun(first, rows - 1, op.weights[0].name, start, n),))
    others = [info.name for info in file.tensors.values() if len(info.shape) == 2 and info.shape[0] * info.shape[1] > n]
    name = rng.choice(others)
    last = min(rows, first + file.tensors[name].shape[0] * file.tensors[name].shape[1] // n) - 1
    return readings.Reading((readings.RowRun(first, last, name, 0, n),))


def _of_elements(reading: readings.Reading) -> str:
    return "; ".join(f"row {row} differs in column {column} alone: {value}" for row, column, value in reading.elements)


# --- planting and finding --------------------------------------------------------------------------------------------


@dataclass
class Planted:
    """One plant and what came of it: `what` is one word, `said` what the report says of the first planted op."""

    model: str
    capture: str
    sorts: tuple[str, ...]
    words: tuple[str, ...]
    what: str = ""
    said: str = ""
    seconds: float = 0.0
    tested: int = 0
    false: list[str] = field(default_factory=list)


class Bed:
    """A model in which edits are planted."""

    def __init__(self, folder: Path, family: str, weights: str) -> None:
        self.name, self.folder = f"{family}-{weights}", folder
        self.path = write_model(folder / f"{self.name}.gguf", SHAPES[family], weights)
        self.file = GGUFFile(self.path)
        self.graph = build_graph(self.file)
        self.weights = Weights(self.file, torch.float32)
        self.clean = Trace(self.traced(self.graph, "clean", "all"))

    def traced(self, graph: Graph, name: str, capture: str) -> Path:
        """The trace of the engine in torch, of a prompt and two decode steps."""
        path = self.folder / f"{self.name}-{name}.trace"
        with TraceWriter(path, "planted", graph.hparams.arch) as writer:
            engine, recorder, past = TorchEngine(graph, self.weights), TensorWriter(writer, capture), 0  # type: ignore[arg-type]
            for step, tokens in enumerate((PROMPT, *((token,) for token in DECODED))):
                engine.run(step, StepInput(tokens, tuple(range(past, past + len(tokens)))), recorder)
                past += len(tokens)
        return path

    def shows(self, graph: Graph) -> bool:
        """Whether anything is recorded otherwise."""
        return first_difference(self.clean, Trace(self.traced(graph, "whole", "all"))) is not None

    def plant(self, rng: random.Random, n: int, capture: str, of: Sequence[str]) -> Planted | None:
        """So many edits in as many ops, drawn, of these sorts; None where they do not show."""
        graph, sorts, words = self.graph, [], []
        names = rng.sample([op.name for op in graph if blank(op, graph, self.weights)], n)
        for name in sorted(names, key=list(graph.ops).index):
            sort = rng.choice(of)
            problem = blank(self.graph[name], self.graph, self.weights)
            assert problem
            edit = drawn(rng, problem, sort)
            if edit is None or not self.shows(self.graph.changed(edit[0])):
                return None
            graph = graph.changed(edit[0])
            sorts.append(sort)
            words.append(f"{name}: {edit[1]}")
        return self._found(graph, Planted(self.name, capture, tuple(sorts), tuple(words)))

    def plant_twice(self, rng: random.Random) -> Planted | None:
        """Two edits in one op; None where they do not show."""
        name = rng.choice([op.name for op in self.graph if blank(op, self.graph, self.weights)])
        problem = blank(self.graph[name], self.graph, self.weights)
        found = twice(rng, problem) if problem else None
        if found is None or not self.shows(graph := self.graph.changed(found[0][0])):
            return None
        return self._found(graph, Planted(self.name, "all", found[1], (f"{name}: {found[0][1]}",)))

    def _found(self, graph: Graph, planted: Planted) -> Planted:
        path = self.traced(graph, "planted", planted.capture)
        names, claims = [words.partition(":")[0] for words in planted.words], dict[tuple[int, str], Hypothesis]()
        began = time.process_time()
        try:
            with witnessed(claims):
                result = check_trace(path, self.path)
        except TracediffError as error:
            return replace(planted, what="undecided", said=str(error))
        planted.seconds = time.process_time() - began
        self._test(planted, path, claims)
        faulty = sorted(result.faulty, key=lambda op: op.step)
        planted.said = "; ".join(dict.fromkeys(_said(op) for op in faulty if op.step == faulty[0].step))
        in_segments = {name for op in faulty for name in (op.local.segment if op.local else (op.op,))}
        if not faulty:
            planted.what = "missed"
        elif any(op.op not in names and len(_segment(op)) == 1 for op in faulty) or not in_segments & {*names}:
            planted.what = "misplaced"
        else:
            planted.what = "named" if all(op.cause for op in faulty) else "located"
        return planted

    def _test(self, planted: Planted, path: Path, claims: dict[tuple[int, str], Hypothesis]) -> None:
        trace = Trace(path)
        opinion = Opinion(trace, self.graph, Weights(self.file), self.folder / "claims")
        for key, claim in claims.items():
            try:
                true = opinion.of(claim, trace.ops[key])
            except NotImplementedError as error:
                planted.false.append(f"could not be tested: {error}")
                continue
            planted.tested += true is not None
            if true is False:
                planted.false.append(f"{key[0]} {key[1]}: {claim.parts[-1].text}")


def _segment(op: OpResult) -> tuple[str, ...]:
    return op.local.segment if op.local else (op.op,)


def _said(op: OpResult) -> str:
    return f"{op.op}: {op.cause.text if op.cause else op.shape}"


# --- the page --------------------------------------------------------------------------------------------------------

_HEAD = """# Planted edits

The solver's own grammar, planted at random: an op, an edit of it, the edit's parameters, in models of three families
and three types of weights, run by the engine in torch on a prompt and two decode steps. Written in {minutes} minutes by

    {command}

*Named*: what the report says recomputes all faulty records to the floor, so it is the planted edit or one that comes to
the same values. *Located*: the right record, with facts in place of a cause. Edits that do not show in any record were
drawn again. {tested} claims were tested by a second implementation: {false} are false. A check took
{median:.1f} s of one core at the median, {most:.0f} s at most."""
_COUNTS = {(1, 1): "one", (2, 2): "two at once", (2, 1): "two in one op"}  # by sorts and by ops
_WHATS = ("named", "located", "misplaced", "missed", "undecided")


def page(done: list[Planted], command: str, seconds: float) -> str:
    """The document."""
    times = sorted(one.seconds for one in done) or [0.0]
    claims = {"tested": sum(one.tested for one in done), "false": sum(len(one.false) for one in done)}
    head = _HEAD.format(
        command=command, minutes=f"{seconds / 60:.0f}", median=times[len(times) // 2], most=times[-1], **claims
    )
    text = [head]
    groups: tuple[tuple[str, Callable[[Planted], str]], ...] = (
        ("What is planted and recorded", lambda one: f"{_COUNTS[len(one.sorts), len(one.words)]}, {one.capture}"),
        ("By sort, one planted, every op recorded", lambda one: one.sorts[0] if _plain(one) else ""),
        ("By model, one planted, every op recorded", lambda one: one.model if _plain(one) else ""),
    )
    for title, key in groups:
        counts: dict[str, Counter[str]] = {}
        for one in done:
            counts.setdefault(key(one), Counter())[one.what] += 1
        rows = (
            (name, count.total(), *(count[what] for what in _WHATS), f"{count['named'] / count.total():.1%}")
            for name, count in sorted(counts.items())
            if name
        )
        text.append(f"## {title}\n\n" + table(("", "plants", *_WHATS, "named, share"), rows))
    false = [f"- {'; '.join(one.words)}, {one.model}: {said}" for one in done for said in one.false]
    text += ["## False claims\n\n" + "\n".join(false)] if false else []
    rest = ((one.model, one.capture, "; ".join(one.words), one.what, one.said) for one in done if one.what != "named")
    text.append(
        "## All that were not named\n\n" + table(("model", "recorded", "planted", "came to", "what is said"), rest)
    )
    return "\n\n".join(text) + "\n"


def _plain(one: Planted) -> bool:
    return one.capture == "all" and len(one.sorts) == 1


def main() -> None:
    """Plant, check and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000, help="plants of one edit")
    parser.add_argument("--pairs", type=int, default=100, help="plants of two edits")
    parser.add_argument("--twice", type=int, default=100, help="plants of two edits in one op")
    parser.add_argument("--hidden", type=int, default=100, help="plants of one edit, hidden states alone recorded")
    parser.add_argument("--sort", choices=SORTS, action="append", help="draw edits of this sort alone; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no more are planted")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    rng, began, done = random.Random(args.seed), time.monotonic(), list[Planted]()
    command = " ".join(["python", "benchmarks/planted.py", *sys.argv[1:]])
    wanted = [(1, "all")] * args.n + [(2, "all")] * args.pairs + [(1, "layers")] * args.hidden
    wanted += [(0, "all")] * args.twice
    rng.shuffle(wanted)
    with tempfile.TemporaryDirectory() as folder:
        beds = [Bed(Path(folder), family, weights) for family in SHAPES for weights in WEIGHTS]
        for n, capture in wanted:
            drawn_beds = (rng.choice(beds) for _ in range(_DRAWS))
            drawn_ones = (
                bed.plant(rng, n, capture, args.sort or SORTS) if n else bed.plant_twice(rng) for bed in drawn_beds
            )
            one = next((planted for planted in drawn_ones if planted), None)
            if one:
                done.append(one)
                print(f"{one.what}: {one.model} {capture} {one.words}: {one.said}"[:400], file=sys.stderr, flush=True)
            if args.out:
                args.out.write_text(page(done, command, time.monotonic() - began))
            if time.monotonic() - began > args.seconds:
                break
    if not args.out:
        print(page(done, command, time.monotonic() - began))


if __name__ == "__main__":
    main()
