"""A changed op as the solver tries it: its loops, edited, and what the names in them stand for."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.loops.arrays import CannotRunError, Flat
from tracediff.diagnose.solve.loops.bound import bind, flat
from tracediff.diagnose.solve.loops.loops import Loops
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op, Span, Weight
from tracediff.model.weights import values_of
from tracediff.names import layer_of, split
from tracediff.numerics.arithmetic import EXPONENTIAL
from tracediff.numerics.evaluate import evaluate, noise_of
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.kind import Call, Made, one_rounding

AND = "; and "  # between the words of two edits of one op
Touches = Literal["values", "places", "both"]  # what is stored, or where and in which order
# In this step, in all so far, in earlier ones, or what a buffer holds from these.
When = Literal["now", "all", "earlier", "before"]
_SPANS: dict[When, Span] = {"now": False, "all": True, "earlier": "earlier", "before": "before"}  # as ops name it
# The op's own record among the arrays: of values that follow from what lies beyond an array nothing else is known.
RECORDED = "recorded"

# numpy and BLAS add up in blocks; engines that add in sequence err more, by the root of the terms in a block.
_IN_SEQUENCE = 16.0


@dataclass(frozen=True, slots=True)
class Read:
    """A value of the trace."""

    name: str
    when: When = "now"

    @classmethod
    def of(cls, name: str, past: Span) -> Self:
        """What an op reads, as one of its inputs."""
        return cls(name, next(when for when, as_read in _SPANS.items() if as_read == past))

    @property
    def past(self) -> Span:
        """As an op reads it."""
        return _SPANS[self.when]

    def words(self, op: Op) -> str:
        """As an op of some layer says it."""
        here, (layer, local) = layer_of(op.name), split(self.name)
        name = self.name
        if here is not None and layer is not None:
            near = {0: "", 1: " of the layer before", -1: " of the layer after"}
            name = local + near.get(here - layer, f" of layer {layer}")
        return name + {"before": " of the step before", "earlier": " of earlier steps"}.get(self.when, "")


def input_words(op: Op, position: int) -> str:
    """What words call an input of the op: of a value that it reads a part of, which part."""
    return op.part_read(position) + Read(op.inputs[position]).words(op)


# What loops may read besides their own arrays, by its name in them.
BROUGHT = {"past": Read("past"), "starts": Read("past", "all")}


@dataclass(frozen=True, slots=True)
class Edit:
    """An op by edited loops; without `words` the loops themselves are put into words.

    `arrays` are names in them that stand for another value of the trace ("before" is what the output's buffer held),
    `weights` those of another tensor, `numbers` are others than the op's; `renamed` are names that stand for others
    throughout.
    """

    words: str
    source: str
    touches: Touches = "values"
    arrays: tuple[tuple[str, Read], ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    weights: tuple[tuple[str, Weight], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def op(self, op: Op, loops: Loops, beyond: bool = False) -> Op:
        """The op so changed; `loops` are its own. `beyond`: some values follow from what lies beyond an array."""
        own = ((RECORDED, Read(op.name)),) if beyond else ()
        other, arrays = dict(self.weights), (*self.arrays, *sources(self.source), *own)
        return replace(
            op.also_reading(*((read.name, read.past) for _, read in arrays)),
            weights=tuple(
                _instead(weight, other[name]) if name in other else weight
                for name, weight in zip(loops.weights, op.weights, strict=False)
            ),
            rework=None
            if self.source == loops.source and not self.arrays and not self.numbers
            else Reworked(self.source, len(op.inputs), tuple(name for name, _ in arrays), self.numbers),
        )


def relayered(changed: Op, right: Op, other: Op) -> Op | None:
    """The change from `right` to `changed` made in the same op of another layer; None in ops of another name."""
    (here, name), (there, same) = split(right.name), split(other.name)
    if name != same or here is None or there is None:
        return None
    if not len(changed.weights) == len(right.weights) == len(other.weights):  # as without a bias
        return None

    by = there - here
    inputs = dict(zip(right.inputs, other.inputs, strict=False))  # of the first layer it has another name

    def moved(text: str, near: int = 0) -> str:
        """The same value there: of the layer, or of one so near."""
        layer, local = split(text)
        if text in inputs or layer is None or abs(layer - here) > near:
            return inputs.get(text, text)
        return f"blk.{layer + by}.{local}"

    def elsewhere(weight: Weight) -> Weight:
        read = getattr(weight.read, "renamed", None)  # of what reads other tensors
        return replace(weight, name=moved(weight.name), read=read(moved) if read else weight.read)

    weights = (
        own if weight == before else elsewhere(weight)
        for weight, before, own in zip(changed.weights, right.weights, other.weights, strict=True)
    )
    carried = getattr(changed.rework, "carried", None)  # of what is done to an op's own value
    return replace(
        changed,
        name=other.name,
        # Of earlier steps what is of another layer is of that very one: layers share buffers.
        inputs=tuple(moved(read, past in (False, True)) for read, past in changed.reads),
        weights=tuple(weights),
        attrs=other.attrs,
        rework=carried(right, other) if carried else changed.rework,
    )


def _instead(weight: Weight, other: Weight) -> Weight:
    """`other` in the place of `weight`: with its shape, its numbers one after the other."""
    if other.shape == weight.shape:
        return other
    return replace(weight, read=OtherTensor(other.name))


@dataclass(frozen=True, slots=True)
class OtherTensor:
    """Reads another tensor's numbers, one after the other, as a weight of another shape: `Weight.read`. What it lacks
    is 0.
    """

    name: str

    def renamed(self, name: Callable[[str], str]) -> Self:
        """The same of a tensor of another name."""
        return replace(self, name=name(self.name))

    def __call__(self, file: GGUFFile, info: TensorInfo) -> Tensor:
        """The other tensor's numbers in the shape of `info`."""
        other = file.tensors[self.name]
        values = values_of(file, other).flatten()
        n = math.prod(info.shape)
        return torch.nn.functional.pad(values[:n], (0, max(0, n - len(values)))).reshape(info.shape)


def sources(source: str) -> list[tuple[str, Read]]:
    """What loops read besides an op's inputs and weights: how many positions were cached before the step."""
    return [(name, read) for name, read in BROUGHT.items() if f"{name}[" in source]


@dataclass(frozen=True, slots=True)
class Priced:
    """A hypothesis and what it takes to say it, in bits."""

    edit: Edit
    bits: float
    look: str = "the loops, indices and arithmetic of its kernel"
    fitted: bool = False  # whether a number in it was fitted

    def on(self, before: Self, words: str) -> Self:
        """Both edits: this one was made in the loops of the other."""
        edit, other = self.edit, before.edit
        both = Edit(
            words,
            edit.source,
            "both",
            (*other.arrays, *edit.arrays),
            (*other.numbers, *edit.numbers),
            (*other.weights, *edit.weights),
        )
        look = "; ".join(dict.fromkeys((before.look, self.look)))
        return replace(self, edit=both, bits=before.bits + self.bits, look=look, fitted=before.fitted or self.fitted)


@dataclass(frozen=True, slots=True)
class Reworked:
    """Computes an op by edited loops: `Op.rework`. Inputs from `n_inputs` on stand for the arrays `extra`."""

    source: str
    n_inputs: int
    extra: tuple[str, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()

    def compute(self, call: Call) -> Tensor:
        """The output. What overflows float32 on the way does so here as well."""
        op, inputs = call.op, call.inputs
        dtype = np.float32 if call.weights.dtype == torch.float32 else np.float64
        plain, read = self._plain(op), inputs[: self.n_inputs]
        bound = bind(plain, read, call.weights, call.arithmetic)
        if bound is None:  # of another layer, with attributes that no loops are written for: there it explains nothing
            nothing = torch.full_like(evaluate(plain, read, call.weights, call.arithmetic), math.nan)
            if call.energy:
                call.energy.measured = torch.zeros_like(nothing)
            return nothing
        extra = {name: Flat(flat(x)) for name, x in zip(self.extra, inputs[self.n_inputs :], strict=True)}
        try:
            edited = bound.with_(self.source, extra, dict(self.numbers))
            y, error = edited.measured() if call.energy else (edited.output(dtype), np.zeros(0))
            if RECORDED in extra:
                unknown = edited.unknown(y)
                y.flat[unknown] = extra[RECORDED].values[unknown]
        except CannotRunError:  # in this step: then it explains nothing here
            y = np.full(bound.own.shape, math.nan)
            error = np.zeros_like(y)
        if call.energy:
            call.energy.measured = torch.from_numpy(error).to(inputs[0].device)
        return torch.from_numpy(y).to(call.weights.dtype).to(inputs[0].device)

    def _plain(self, op: Op) -> Op:
        return replace(op.reading_only(self.n_inputs), rework=None)

    def noise(self, made: Made) -> Noise:
        """That of the kind where it sums up no products, and what float32 was seen to make."""
        measured = made.energy.measured
        assert measured is not None
        if KINDS[made.op.kind].scheme not in (None, *EXPONENTIAL):
            own = one_rounding(made)
        else:
            own = noise_of(self._plain(made.op), made, made.inputs[: self.n_inputs])
        rows = measured.square().mean(-1, keepdim=True).sqrt()
        sigma = (measured + rows).mul_(_IN_SEQUENCE)  # in place: of a head each array is 150 MB
        return replace(own, sigma=sigma.hypot_(own.sigma), hard=own.hard.add(made.size, alpha=4 * made.unit))


@dataclass(frozen=True, slots=True)
class Solved:
    """A changed op, or several changed alike, that give what was recorded, in words, and what these take, in bits."""

    ops: tuple[Op, ...]
    words: str
    bits: float
    look: str  # where in an engine
    fitted: bool = False  # whether a number in it was fitted
    n_edits: int = 1
    untold: bool = False  # whether some values follow from what lies beyond an array, and nothing tells these
    common: str = ""  # what is wrong in words that suit it in other ops, where its own do not
