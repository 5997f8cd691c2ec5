"""Another weight: any other tensor of the file where the op's own belongs."""

import math
from collections.abc import Iterator

from tracediff.diagnose.solve.edit import Edit, Priced, Read
from tracediff.diagnose.solve.problem import Problem
from tracediff.model.graph import Weight
from tracediff.names import layer_of

_LOOK = "the loader's table of tensor names, and which weight is passed to it"


def variants(problem: Problem) -> Iterator[Priced]:
    """One weight is another tensor, read as flat numbers with the op's own strides."""
    tensors = problem.weights.file.tensors
    layer = layer_of(problem.op.name)
    bits = math.log2(max(2, len(tensors)))
    for name, weight in zip(problem.loops.own.weights, problem.op.weights, strict=False):
        for info in tensors.values():
            alike = (len(info.shape) == 2) == (len(weight.shape) == 2) or layer_of(info.name) == layer
            if info.name != weight.name and alike:
                names = [Read(one).words(problem.op) for one in (info.name, weight.name)]
                words = f"uses {names[0]} where {names[1]} belongs"
                other = Weight(info.name, info.shape)
                yield Priced(Edit(words, problem.loops.source, weights=((name, other),)), bits, _LOOK)
