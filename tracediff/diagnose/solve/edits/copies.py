"""Nothing was computed: the output's buffer holds what it held before, zeros, or a value that belongs elsewhere."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tracediff.diagnose.solve.edit import Edit, Priced, Read, Solved
from tracediff.diagnose.solve.problem import Problem

_LOOK_AT_LOOPS = "whether its kernel runs, and over which heads and channels"
_LOOK = "whether its kernel runs, and which buffer it writes to"
UNTOUCHED = "pass"  # loops that store nothing
_LOOK_AT_REST = (
    "how channels are divided among threads or blocks, and who computes the rest; then how many rows the loader copies"
)
_LEFT_OUT = "the last channels are as if they were not computed: they are 0, or what another op left there"


def variants(problem: Problem) -> Iterator[Priced]:
    """The output is all zeros, or another value of the trace."""
    yield Priced(Edit("all values are 0, as if nothing was stored", UNTOUCHED, "both"), 3.0, _LOOK)
    others, loops = problem.others, problem.loops.own
    own = Read(problem.op.inputs[0]) if loops.inputs[0] == "x" and not problem.op.views else None
    for read in others:
        name = read.words(problem.op)
        words = f"{name} passes through unchanged" if read == own else f"the values are those of {name}"
        bits = 3.0 if read in problem.buffers else math.log2(2 + len(others))
        look = _LOOK_AT_LOOPS if read == own else _LOOK
        yield Priced(Edit(words, UNTOUCHED, "both", arrays=(("before", read),)), bits, look)


def left_out(problem: Problem, solved: Solved) -> Solved:
    """The same with words that suit all ops whose last channels alone hold zeros or another value of the trace, as
    where channels are divided among threads and the rest is left over: what they hold is another in each op.
    """
    if problem.op.axes[:1] != ("T",):
        return solved
    n_tokens = problem.loops.own.shape[0]
    wrong = np.any(problem.wrong.reshape(n_tokens, -1), axis=0)
    first = int(wrong.argmax())
    if first < len(wrong) / 2 or not wrong[first:].all():
        return solved
    places = np.arange(problem.recorded.size).reshape(n_tokens, -1)[:, first:].ravel()
    there = problem.recorded[places]
    more = {read for op in solved.ops for read in op.reads}.difference(problem.op.reads)
    others = [values for read in more if (values := problem.held(Read.of(*read))) is not None]
    left = (values[places] for values in others if len(values) > places[-1])
    if there.any() and not any(np.array_equal(there, values) for values in left):
        return solved
    return replace(solved, common=_LEFT_OUT, look=_LOOK_AT_REST)
