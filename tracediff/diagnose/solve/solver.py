"""From a faulty record to what the solver makes of it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, takewhile

import numpy as np

from tracediff.diagnose.solve.by_value import blocks
from tracediff.diagnose.solve.by_value.blocks import TOKENS
from tracediff.diagnose.solve.edit import Read, Solved
from tracediff.diagnose.solve.edits import copies
from tracediff.diagnose.solve.loops.bound import flat
from tracediff.diagnose.solve.problem import Problem, posed
from tracediff.diagnose.solve.search import solve
from tracediff.numerics.arithmetic import Scheme
from tracediff.replay.replay import Replay
from tracediff.trace.format import OpRecord

How = Callable[[Problem, Callable[[], None]], Iterator[Solved]]


def problem_of(replay: Replay, record: OpRecord, scheme: Scheme | None) -> Problem | None:
    """The problem that a record poses under an arithmetic; None where some tokens were not recorded."""
    if record.rows is not None:
        return None
    op, known = replay.graph[record.op], replay.known(record, scheme)
    recorded = dict.fromkeys(name for step, name in replay.trace.ops if step == record.step)  # as they were written
    made = replay.makeable(record)
    names = [other.name for other in replay.graph if other.name in recorded or other.name in made]
    used = replay.scheme(record, scheme)

    def held(read: Read) -> np.ndarray | None:
        if read.name in made and read.when == "now":
            return flat(replay.read(record, read.name, read.past, used))
        values = replay.held(record.step, read.name, read.past)
        return None if values is None else flat(values)

    before = [*takewhile(lambda name: name != record.op, recorded)] if record.op in recorded else []
    return posed(op, replay.graph, replay.weights, known, held, names, before)


def explanations(
    replay: Replay, record: OpRecord, check: Callable[[], None], how: How = solve
) -> Iterator[tuple[Solved, Scheme | None]]:
    """What gives a faulty record, the cheapest first, and the arithmetic under which it was found, where none is
    settled; `how` it is sought: one edit, or two (`pairs`). `check` raises where the time is over.
    """
    for scheme in replay.plain_ones(record):
        problem = problem_of(replay, record, scheme)
        if problem:
            yield from ((copies.left_out(problem, solved), scheme) for solved in how(problem, check))


def block_rules(
    replay: Replay, records: Sequence[OpRecord], check: Callable[[], None]
) -> Iterator[tuple[Solved, Scheme | None]]:
    """By which rule the blocks of a quantised weight are read, as `explanations`, by a few of its rows: of the first of
    an op's records, with as many of the others as tell enough.
    """
    if not blocks.is_of_blocks(replay.graph[records[0].op], replay.weights):
        return
    n_tokens = accumulate(len(replay.trace.steps[record.step].tokens) for record in records)
    some = records[: next((i for i, n in enumerate(n_tokens, 1) if n >= TOKENS), len(records))]
    for scheme in replay.plain_ones(records[0]):
        check()
        problems = [problem for record in some if (problem := problem_of(replay, record, scheme))]
        yield from ((solved, scheme) for solved in blocks.variants(problems))
