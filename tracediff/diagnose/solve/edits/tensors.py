"""Another weight: any other tensor of the file where the op's own belongs."""

import math
from collections.abc import Iterator

from tracediff.diagnose.solve.edit import Edit, Priced, Read
from tracediff.diagnose.solve.problem import Problem
from tracediff.model.graph import Weight
from tracediff.names import split

_LOOK = "the loader's table of tensor names, and which weight is passed to it"


def variants(problem: Problem) -> Iterator[Priced]:
    """One weight is another tensor, read as flat numbers with the op's own strides."""
    yield from related(problem)
    yield from unrelated(problem)


def related(problem: Problem) -> Iterator[Priced]:
    """Another tensor of the layer, or the one of the same name in another: those that are passed by mistake."""
    yield from _others(problem, of_kin=True)


def unrelated(problem: Problem) -> Iterator[Priced]:
    """Any other: far more, and of a wide matrix each takes as long as the matrix."""
    yield from _others(problem, of_kin=False)


def _others(problem: Problem, of_kin: bool) -> Iterator[Priced]:
    tensors = problem.weights.file.tensors
    bits = math.log2(max(2, len(tensors)))
    for name, weight in zip(problem.loops.own.weights, problem.op.weights, strict=False):
        layer, own = split(weight.name)
        for info in tensors.values():
            its_layer, its_own = split(info.name)
            alike = (len(info.shape) == 2) == (len(weight.shape) == 2) or its_layer == layer
            if info.name != weight.name and alike and of_kin == (its_layer == layer or its_own == own):
                names = [Read(one).words(problem.op) for one in (info.name, weight.name)]
                words = f"uses {names[0]} where {names[1]} belongs"
                other = Weight(info.name, info.shape)
                yield Priced(Edit(words, problem.loops.source, weights=((name, other),)), bits, _LOOK)
