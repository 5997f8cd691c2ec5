"""Nothing was computed: the output's buffer holds what it held before, zeros, or a value that belongs elsewhere."""

import math
from collections.abc import Iterator

from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.variant import Priced, Variant

_LOOK = "whether its kernel runs, and which buffer it writes to"
UNTOUCHED = "pass"  # loops that store nothing


def variants(problem: Problem) -> Iterator[Priced]:
    """The output is all zeros, or another value of the trace."""
    yield Priced(Variant("all values are 0, as if nothing was stored", UNTOUCHED, "both"), 3.0, _LOOK)
    others = problem.others
    for read in others:
        variant = Variant(
            f"the values are those of {read.words(problem.op)}", UNTOUCHED, "both", arrays=(("before", read),)
        )
        bits = 3.0 if read in problem.buffers else math.log2(2 + len(others))
        yield Priced(variant, bits, _LOOK)
