"""Nothing was computed: the output's buffer holds what it held before, zeros, or a value that belongs elsewhere."""

import math
from collections.abc import Iterator

from tracediff.diagnose.solve.edit import Edit, Priced, Read
from tracediff.diagnose.solve.problem import Problem

_LOOK_AT_LOOPS = "whether its kernel runs, and over which heads and channels"
_LOOK = "whether its kernel runs, and which buffer it writes to"
UNTOUCHED = "pass"  # loops that store nothing


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
