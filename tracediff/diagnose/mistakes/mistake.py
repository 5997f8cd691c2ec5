"""What a known mistake is: a small change to an op, and the kinds of ops and the parts they play where it is made."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from tracediff.diagnose.mistakes.fit import fitted
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op
from tracediff.model.weights import values_of
from tracediff.names import NORMS, layer_of
from tracediff.numerics.evaluate import is_covered
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.elementwise import repeated

_WRONG = 1e-3  # of a token's values


@dataclass(frozen=True, slots=True)
class Seen:
    """What an engine made of an op: its inputs as recorded and its output, all float64, and its exponentials."""

    inputs: tuple[Tensor, ...]
    output: Tensor
    exponential: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """What a mistake may look at besides the op: of a record what was seen of it, or, where its op is one of several,
    the position `wrong_from` which it is wrong, of so many positions so far; and of one that has some tokens of its
    step alone, the position of the `first` in it.
    """

    graph: Graph
    file: GGUFFile
    seen: Seen | None = None
    wrong_from: Callable[[], int] | None = None
    n_positions: int = 0
    first: int | None = None


class Variant(NamedTuple):
    """The op as a mistaken engine has it, and what is wrong in words. `fitted`: a number in it was fitted. `before` are
    ops that the model has not, which it reads.

    Variants of one `name`, which says it of all of them, are made in several ops at once; without one their words tell,
    the op's own name apart.
    """

    op: Op
    text: str
    fitted: bool = False
    name: str = ""
    before: tuple[Op, ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        """All that the engine has otherwise, the op itself last."""
        return (*self.before, self.op)

    def beside(self, graph: Graph) -> "Variant":
        """With other names for ops that it adds, where another mistake in the op has added some of these names."""
        if not any(one.name in graph for one in self.before):
            return self
        named, before = dict[str, str](), list[Op]()
        for one in self.before:  # what an op reads by a name of its own, or of one to come, is the other mistake's
            inputs = tuple(named.get(name, name) for name in one.inputs)
            named[one.name] = next(name for n in count() if (name := one.name + ".too" * n) not in graph)
            before.append(replace(one, name=named[one.name], inputs=inputs))
        op = replace(self.op, inputs=tuple(named.get(name, name) for name in self.op.inputs))
        return self._replace(op=op, before=tuple(before))

    def same_as(self, right: Op) -> str:
        """What the variant has in common with those of other ops; `right` is the op without the mistake.

        A tied head has its weight from the embedding, by whose name it goes.
        """
        text = self.text
        for own in (right.name, *(weight.name.rpartition(".")[0] for weight in right.weights)):
            text = text.replace(own, "it") if own else text
        return self.name or re.sub(r"\bblk\.\d+\.", "", text)


Variants = Iterator[tuple[Op, str] | Variant]
Change = Callable[[Op, Context], Variants]


@dataclass(frozen=True, slots=True)
class Where:
    """Ops that a mistake is made in: those of `kinds`, if given, and of these, if given, those whose value plays one of
    `parts`.

    `in_layer` leaves out what stands before and after the layers.
    """

    kinds: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    in_layer: bool = False

    def holds(self, op: Op, graph: Graph) -> bool:
        """Whether the op is one of them."""
        return (
            (not self.kinds or op.kind in self.kinds)
            and (not self.parts or not parts_of(op, graph).isdisjoint(self.parts))
            and not (self.in_layer and layer_of(op.name) is None)
        )

    def __str__(self) -> str:
        kinds = " and ".join(self.kinds) or "any op"
        return f"{kinds} that makes {' or '.join(self.parts)}" if self.parts else kinds


def parts_of(op: Op, graph: Graph) -> set[str]:
    """The parts that the op's value plays in what reads it, as in q, gate or x; what nobody reads is the logits.

    Where it is normed or rotated first, the parts that the result plays too.
    """
    parts: set[str] = set()
    readers = graph.readers(op.name)
    for reader, position in readers:
        if not is_covered(reader):
            continue
        kind = KINDS[reader.kind]
        parts.add(kind.inputs[min(position, len(kind.inputs) - 1)])
        if kind.keeps_part and position == 0:
            parts |= parts_of(reader, graph)
    return parts if readers else {"logits"}


LINEAR = Where(("linear",))
MATMUL = Where(("linear", "linear_id"))
NORM = Where(NORMS)


@dataclass(frozen=True, slots=True)
class Number:
    """A positive number of an op that a mistake is about: what it is, and the op with another in its place.

    A number that no list holds is looked for from `starts`, times the right one: where the nearest of these takes
    nothing away, nothing does.
    """

    of: Callable[[Op], float]
    replaced: Callable[[Op, float], Variant]
    starts: tuple[float, ...] = (1.1, 1 / 1.1)


@dataclass(frozen=True, slots=True)
class Mistake:
    """One known mistake. `where` says in which ops it is made; `look` where to look in one's code; `everywhere` that it
    is in a routine that all these ops share, so that behind hidden states it is not tried in one of several;
    `in_short` that of a segment through several layers its variants are too many.
    """

    name: str
    text: str
    look: str
    where: Where
    change: Change
    link: str = ""
    number: Number | None = None
    everywhere: bool = False
    in_short: bool = False

    def variants(self, op: Op, context: Context) -> Iterator[Variant]:
        """The op with the mistake, in each of its variants."""
        return (Variant(*one).beside(context.graph) for one in self.change(op, context))


class Area(list[Mistake]):
    """Mistakes in one part of an engine, in the order in which they are tried."""

    def mistake(
        self,
        name: str,
        text: str,
        look: str,
        where: Where,
        link: str = "",
        number: Number | None = None,
        everywhere: bool = False,
        in_short: bool = False,
    ) -> Callable[[Change], Change]:
        """Adds the decorated change under this name."""

        def add(change: Change) -> Change:
            self.append(Mistake(name, text, look, where, change, link, number, everywhere, in_short))
            return change

        return add


def weights_of(op: Op, context: Context) -> list[Tensor]:
    """An op's weights, dequantised to float64, each of its shape."""
    found = (values_of(context.file, context.file.tensors[weight.name]).double() for weight in op.weights)
    return [values.reshape(weight.shape) for values, weight in zip(found, op.weights, strict=True)]


def fitted_attr(op: Op, context: Context, name: str, starts: Iterable[float]) -> float | None:
    """The number that this attribute of the op must be for what was recorded; None where none is near at all."""
    assert context.seen
    function, inputs = op.function or KINDS[op.kind].function, (*context.seen.inputs, *weights_of(op, context))
    return fitted(lambda number: function(*inputs, **{**op.attrs, name: number}), context.seen.output, starts)


def is_gated(op: Op) -> bool:
    """Whether it multiplies what an activation makes of a gate with another value."""
    return is_covered(op) and KINDS[op.kind].inputs == ("gate", "up")


def computing(op: Op, function: Callable[..., Tensor]) -> Op:
    """The op with other mathematics."""
    return replace(op, function=function)


def first_wrong(off: Tensor, size: Tensor) -> int | None:
    """The first token that is off by more than rounding, and far less than a value that is left out; [T, n] both."""
    wrong = torch.nonzero(off.norm(dim=1) > _WRONG * size.norm(dim=1)).flatten()
    return int(wrong[0]) if len(wrong) else None


def first_alone(a: Tensor, b: Tensor) -> Tensor:
    """The first of two operands as if the other were not there: over and over where it is the smaller."""
    return repeated(a, b) if a.numel() < b.numel() else a


def second_alone(a: Tensor, b: Tensor) -> Tensor:
    """The second operand, as if the first were not there."""
    return first_alone(b, a)
