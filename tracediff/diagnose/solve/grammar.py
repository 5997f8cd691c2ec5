"""The solver's edits by their words: what a report says of an op can be planted in it, and found again."""

import re
from collections.abc import Iterator

import torch

from tracediff.diagnose.solve.by_value import functions, maps, operands, outputs, readings, rotations
from tracediff.diagnose.solve.edit import AND, BROUGHT, Priced
from tracediff.diagnose.solve.edits import copies, formulas, inputs, lanes, numbers, tensors, terms
from tracediff.diagnose.solve.loops.arrays import Flat
from tracediff.diagnose.solve.loops.bound import bind, flat
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.search import bound_of, words_of
from tracediff.model.graph import Axis, Graph, Op
from tracediff.model.weights import Weights, reading
from tracediff.numerics.arithmetic import EXACT

_TOKENS = 8  # of the step that words are about which name a number of tokens
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_EXCHANGED = re.compile(r"(?P<noun>[\w ]+?)s (?P<a>\d+) and (?P<b>\d+) are exchanged")
_ELEMENT = re.compile(r"row (\d+) of \S+ differs in column (\d+) alone: (\S+)(?: where .*)?")
_ROWS = re.compile(r"channels (\d+) to (\d+) are computed with rows (\d+) to \d+ of (\S+)")
_LATE = re.compile(r"channels (\d+) to (\d+) are computed with rows that start (\d+) values (late|early) in \S+")

# What can be planted, an example of each: (sort, words).
EXAMPLES = (
    ("another input", "reads attn_k where attn_norm belongs"),
    ("another weight", "uses attn_k.weight where attn_v.weight belongs"),
    ("another reading of a weight", "channels 256 to 511 are computed with rows 0 to 255 of ffn_gate.weight"),
    ("an index map", "heads reversed"),
    ("an index map of an input", "as it reads attn_v, value heads reversed"),
    ("a part only", "the sum takes only input channels 0 to 254: the last is left out"),
    ("a part of every block", "of every 32 input channels the sum leaves out the last 4"),
    (
        "a load beside another",
        "as the sum reads ffn_norm, of every 16 input channels the last 8 have the values of those before",
    ),
    ("another function", "every value above 0.5 is 0.5"),
    ("another formula", "silu is computed with 2 + exp(-ffn_gate), where 1 + exp(-ffn_gate) belongs"),
    ("another number", "positions are 1 too high"),
    ("other rates of rope", "pairs 2 to 5 turn 0.8 times as fast as they should"),
    ("few wrong weights", "row 3 of ffn_down.weight differs in column 5 alone: 0.125"),
    (
        "two edits",
        "reads attn_norm where ffn_norm belongs; and the sum takes only input channels 0 to 254: the last is left out",
    ),
    ("nothing computed", "all values are 0, as if nothing was stored"),
)


def edited(op: Op, graph: Graph, weights: Weights, words: str) -> Op | None:
    """The op with the edit of which a report would say `words`; None where no edit of it has these."""
    problem = blank(op, graph, weights)
    if problem is None:
        return None
    found = [*_maps(problem, words), *_functions(problem, words), *_readings(problem, words)]
    found += rotations.planted(problem, words)
    if found:
        return found[0]
    if priced := _priced(problem, words):
        return problem.edited(priced.edit)
    first, _, second = words.partition(AND)
    before = _priced(problem, first) if second else None
    bound = bound_of(problem, before.edit) if before else None
    after = _priced(problem.given(bound), second) if bound else None
    return problem.edited(after.on(before, words).edit) if before and after else None


def _priced(problem: Problem, words: str) -> Priced | None:
    """The edit of the loops that has these words."""
    for priced in every(problem):
        said = priced.edit.words or words  # those of formulas are made one by one
        if said == words and words_of(problem, priced.edit) == words:
            return priced
    return None


def every(problem: Problem) -> Iterator[Priced]:
    """All edits by loops that need no fit."""
    for variants in (
        copies.variants, inputs.variants, inputs.cached, tensors.variants, numbers.positions, formulas.variants,
        terms.every, lanes.variants,
    ):  # fmt: skip
        yield from variants(problem)


def blank(op: Op, graph: Graph, weights: Weights) -> Problem | None:
    """The op in a first step of some tokens, whatever their values."""

    def zeros(axes: tuple[Axis, ...]) -> torch.Tensor:
        return torch.zeros(Op("", "", (), axes).shape(_TOKENS), dtype=torch.float64)

    step = torch.arange(_TOKENS)
    given = [zeros(graph[name].axes) if name in graph else step for name in op.inputs]
    brought = {name: Flat(step.numpy() * 0) for name in BROUGHT}
    loops = bind(op, given, weights, EXACT, brought)
    if loops is None:
        return None
    y = flat(torch.zeros(loops.own.shape, dtype=torch.float64))
    names = [other.name for other in graph]

    return Problem(
        op, graph, weights, EXACT, loops, y, y, y,
        lambda read: flat(zeros(graph[read.name].axes)) if read.name in graph else None,
        names, names[: names.index(op.name)],
    )  # fmt: skip


def _maps(problem: Problem, words: str) -> Iterator[Op]:
    for operand in operands.operands(problem):
        for axis in operand.along:
            for how in _every_map(operand.shape[axis], words):
                solved = operand.solved(problem, how, axis)
                if solved.words == words:
                    yield solved.ops[0]
    for shape, axes, follows in outputs.views(problem):
        for axis, noun in enumerate(axes):
            for how in _every_map(shape[axis], words):
                if how.words(noun, shape[axis]) == words:
                    yield outputs.moved_output(problem.op, how, axis, shape, follows)


def _every_map(n: int, words: str) -> Iterator[maps.Map]:
    """Those whose numbers stand in the words."""
    yield maps.Map("reversed")
    given = sorted({int(x) for x in re.findall(r"\d+", words)} | {0, 1})
    for kind in ("shifted", "rotated", "modulo", "repeated", "strided", "transposed", "all", "within", "last"):
        for k in given:
            if 0 < k < n or (kind == "all" and k == 0 < n):
                yield maps.Map(kind, (k,))
            if kind == "rotated" and 0 < k < n:
                yield maps.Map("rotated", (-k,))
            if kind == "shifted" and 0 < k < n:
                yield from (maps.Map("shifted", (-k,)), maps.Map("held", (k,)), maps.Map("held", (-k,)))
    if found := _EXCHANGED.fullmatch(words):
        a, b = int(found["a"]), int(found["b"])
        yield maps.Map("listed", (a, b, b, a))


def _functions(problem: Problem, words: str) -> Iterator[Op]:
    given = [float(x) for x in _NUMBER.findall(words)]
    for name, needed in functions.NUMBERS.items():
        for candidates in (tuple(given[:needed]), (1.0, *given[:1]), (*given[:1], 0.0), (-1.0, 0.0)):
            signs = (candidates, (*candidates[:-1], -candidates[-1])) if candidates else (candidates,)
            for some in signs:
                if len(some) == needed and functions.words(name, some) == words:
                    yield functions.mapped(problem.op, name, some)
                    return


def _readings(problem: Problem, words: str) -> Iterator[Op]:
    op = problem.op
    if op.kind != "linear":
        return
    n, own = op.weights[0].shape[-1], op.weights[0].name
    if found := _ELEMENT.fullmatch(words):
        row, column, value = int(found[1]), int(found[2]), float(found[3])
        yield reading(op, readings.Reading(elements=((row, column, value),)))
    elif found := _LATE.fullmatch(words):
        first, last, by = int(found[1]), int(found[2]), int(found[3]) * (1 if found[4] == "late" else -1)
        yield reading(op, readings.Reading((readings.RowRun(first, last, own, first * n + by, n),)))
    elif found := _ROWS.fullmatch(words):
        tensors_ = problem.weights.file.tensors
        layer = op.name.rpartition(".")[0]
        name = found[4] if found[4] in tensors_ else f"{layer}.{found[4]}"
        if name in tensors_:
            run = readings.RowRun(int(found[1]), int(found[2]), name, int(found[3]) * n, n)
            yield reading(op, readings.Reading((run,)))
