"""Another input: any other value of the trace, of this step or of earlier ones, where one of the op's own belongs."""

import math
from collections.abc import Iterator

from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.variant import Priced, Read, Variant


def variants(problem: Problem) -> Iterator[Priced]:
    """One input of the op is another value of the trace, read as flat numbers with the op's own strides."""
    loops, op = problem.loops.loops, problem.op
    others = problem.others
    bits = math.log2(max(2, len(others) * len(loops.inputs)))
    verb = "adds" if op.kind == "add" else "reads"
    for name, belongs in zip(loops.inputs, op.inputs, strict=False):
        if belongs in ("tokens", "positions"):
            continue
        for other in others:
            if other != Read(belongs):
                words = f"{verb} {other.words(op)} where {Read(belongs).words(op)} belongs"
                yield Priced(Variant(words, problem.loops.source, arrays=((name, other),)), bits)
