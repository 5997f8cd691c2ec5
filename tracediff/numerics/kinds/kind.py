"""What a kind of op is, and what its functions are given: an op about to be computed, and what was made of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from tracediff.model.graph import Op
from tracediff.model.weights import Weights
from tracediff.names import axes_of, local_name, token_axis
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.exponentials import approximated
from tracediff.numerics.floats import HALVES, Rounding
from tracediff.numerics.floors import TINY, UNIT, Noise
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.running import running

Rounded = Callable[[Tensor, str], Tensor]  # a value as a type, or blocks of one, keep it


@dataclass(slots=True)
class Energy:
    """Asked for beside a matmul: `value` becomes sum((x * w)^2) of each output, to about 1%.

    A quantised weight is a scale times an unsigned integer, less an offset or minimum. Engines add up the two
    parts apart, so both count (ggml-cpu/arch/x86/quants.c: the block sums of q8_K are there for it).
    """

    value: Tensor | None = None
    product: Tensor | None = None  # of a linear op with a bias: before the bias
    # Of a matmul the sum of the squares of what its terms change by if values on a boundary go the other way: each way
    # as often as the other, so they add up as noise does. Of other ops the size of that.
    turned: Tensor | None = None
    requantised: tuple[float, float] = (0.0, 0.0)  # squared error of weights that the engine requantised, and signal
    last_place: Tensor | None = None  # of sums in half precision, followed: the largest unit of a running sum
    measured: Tensor | None = None  # of an op that is computed in another way: how far float32 is from float64
    inside: "Energy | None" = None  # of an op that is another in a region: that of the other
    each: tuple[Tensor, ...] = ()  # and what both make

    def take(self, other: "Energy", shaped: Callable[[Tensor], Tensor]) -> None:
        """What was told of the rows of a matmul, in the shape of the op's value."""
        for name in ("value", "product", "turned"):
            part = getattr(other, name)
            setattr(self, name, None if part is None else shaped(part))

    @classmethod
    def joined(cls, parts: Sequence["Energy"]) -> "Energy":
        """Of several matmuls, their rows one after the other."""

        def rows(found: list[Tensor | None]) -> Tensor | None:
            there = [x for x in found if x is not None]
            return torch.cat(there) if len(there) == len(found) else None

        return cls(rows([p.value for p in parts]), rows([p.product for p in parts]), rows([p.turned for p in parts]))


@dataclass(frozen=True, slots=True)
class Call:
    """An op about to be computed. `function` is its mathematics: the kind's, or a mistaken engine's."""

    op: Op
    function: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    weights: Weights
    arithmetic: Arithmetic
    energy: Energy | None
    rounded: Rounded


@dataclass(frozen=True, slots=True)
class Made:
    """What was made of an op in float64: its inputs, its output `y`, and what its noise follows from."""

    op: Op
    function: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    y: Tensor
    weights: Weights
    energy: Energy
    arithmetic: Arithmetic
    storage: str

    stored: Tensor = field(init=False)  # a bound on what storing the result costs; those who own it may add to it

    def __post_init__(self) -> None:
        # Engines in half precision round between the parts of an op too: the product before the bias, silu before
        # the gate, the normed value before its weight. Two roundings of the result's size allow for that.
        stored = self.size.mul_(self.kept * (2 + self.kept if self.half else 1)).add_(TINY[self.storage])
        object.__setattr__(self, "stored", stored)

    @property
    def size(self) -> Tensor:
        """|y|, made anew: of the values of a matmul nobody keeps it."""
        return self.y.abs()

    @property
    def half(self) -> bool:
        """Whether the engine keeps values in half precision."""
        return self.storage in HALVES

    @property
    def kept(self) -> float:
        """The unit of the type that the output is stored in."""
        return UNIT[self.storage]

    @property
    def between(self) -> float:
        """The unit of what is kept between the parts of the op: 0 but in half precision."""
        return self.kept if self.half else 0.0

    @property
    def unit(self) -> float:
        """The unit of the type that it is computed in. Half precision that was followed is in `energy`."""
        in_float32 = self.energy.last_place is not None or self.arithmetic.accumulate == "i32"  # as blocks are
        if self.storage == "f64" and not self.arithmetic.single:
            return UNIT["f64"]
        return UNIT["f32" if in_float32 else self.arithmetic.accumulate]


def applied(call: Call) -> Tensor:
    """The function of the inputs and the whole weights, as they are held.

    Half precision is computed with in float32 and rounded once, as engines do: a mean of squares overflows float16
    beyond |x| = 256.
    """
    y = call.function(*map(wide, (*call.inputs, *held(call))), **call.op.attrs)
    return kept(y, call.weights)


def kept(y: Tensor, weights: Weights) -> Tensor:
    """An op's value in the type that the engine computes with; whole numbers in one that holds them."""
    return y.to(weights.dtype if y.is_floating_point() else torch.promote_types(weights.dtype, torch.float32))


def held(of: Call | Made) -> list[Tensor]:
    """The whole weights, as the engine holds them."""
    hold = rounding_named(of.arithmetic.stored)
    return [hold(of.weights.load(weight)) for weight in of.op.weights]


def one_rounding(made: Made) -> Noise:
    """Of an op that rounds once before its result is stored."""
    return Noise(torch.zeros_like(made.y), made.stored + made.unit * made.size)


def rounded_between(own: Noise, between: Tensor, rounding: Rounding, factor: Tensor) -> Noise:
    """Of an op that rounds what is between its parts, and multiplies that by a factor: its own noise, and where what is
    rounded lies so near the middle of two numbers that it may be either, what these are apart.
    """
    step, size = rounding.step(between), factor.abs()
    middle = (step / 2 - (between - rounding(between)).abs()) * size
    return replace(own, hard=own.hard + torch.where(middle <= own.bound(), step * size, 0.0))


def none(made: Made) -> Noise:
    """Of an op that computes nothing, but for storing it."""
    return Noise(torch.zeros_like(made.y), made.stored)


def analysed(made: Made) -> Noise:
    """By running error analysis of the op's function, whatever it is."""
    return expressed_as(made.function)(made)


def expressed_as(expression: Callable[..., Tensor]) -> Callable[[Made], Noise]:
    """By analysis of an expression for the function that is less exact, as engines have it."""

    def noise(made: Made) -> Noise:
        function = partial(expression, **made.op.attrs)
        each = max(made.unit, made.between)
        _, found = running(function, [*made.inputs, *held(made)], each=each, sums=made.unit)
        found = found.reshaped(made.y.shape)
        return Noise(found.sigma, found.hard + made.stored)

    return noise


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of op, all that is to be known of it.

    `function` is its mathematics: a pure function of inputs, weights and attributes, in the dtype of its inputs.
    `inputs` names the part that each input plays, in order: mistakes are bound to these. `axes` names those of its
    value, outermost first. `keeps_part`: its value plays the part of its first input, as a normed query is a query.
    `compute` says how inputs and weights are read and rounded, `noise` how far an honest engine may be off, and
    `noise_of_any` the same with another function in the place of its own: where it is not given, by analysis of that,
    or of a kind that is computed in a way of its own by `noise`. `scheme` is the entry of a Scheme that says what an
    engine rounds in it: of weights that are neither matrices nor norms' `vectors`. `together` computes several calls of
    an op that hold its weight alike, and reads that once; those for an energy come first. Where the value is places in
    its first input, `picks` gives what is found there: that is compared, and that has the noise, for of equal values
    any may be taken. Where the value is one row of all tokens' values, which are `shaped_as` the input of that part,
    and of the states that they leave, what is wrong is told of each.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[str, ...]
    axes: tuple[str, ...] = ("token", "head", "channel")
    compute: Callable[[Call], Tensor] = applied
    noise: Callable[[Made], Noise] = analysed
    noise_of_any: Callable[[Made], Noise] | None = None
    scheme: str | None = None
    keeps_part: bool = False
    picks: Callable[[Tensor, Tensor], Tensor] | None = None
    shaped_as: str = ""
    together: Callable[[Sequence[Call]], list[Tensor]] | None = None

    def noise_of(self, made: Made) -> Noise:
        """Its noise, or that of the function in its place: formulas hold for their own."""
        if not made.op.function:
            return self.noise(made)
        return (self.noise_of_any or (analysed if self.compute is applied else self.noise))(made)

    def of_tokens(self, inputs: Sequence[Tensor]) -> tuple[int, ...] | None:
        """The shape [T, ...] of the tokens' values, where these and states lie in one row; None of other kinds."""
        return tuple(inputs[self.inputs.index(self.shaped_as)].shape) if self.shaped_as else None

    def axis_names(self, op: Op, n: int) -> tuple[str, ...]:
        """Names of the `n` axes of a value of this kind; heads may lie side by side, and any kind may be of scores."""
        if n == 3 and op.axes[1:] == ("T", "S"):
            return "head", "token", "key"
        if n == 3 and op.axes[1:2] == ("T",):  # products of each head; Gemma 3n has streams, and layers
            of_heads = token_axis(op.name) == 1 or local_name(op.name).startswith("attn")
            return "head" if of_heads else "slice", "token", "channel"
        if n == 3 and axes_of(op.name, n)[1] == "slot":
            return axes_of(op.name, n)
        if n == len(op.axes) and "T" not in op.axes:  # a state; what a convolution leaves: tokens are columns
            return ("value",) if n == 1 else (*("head",) * (n - 2), "row", "column")
        if n == 2 and op.axes[0] != "T":  # what a convolution reads
            return "row", "column"
        if n == len(self.axes):
            return self.axes
        known = {1: self.axes[:1], 2: (self.axes[0], self.axes[-1])}
        of = op.axes if len(op.axes) == n else (0,) * n
        return known.get(n, tuple({"T": "token", "S": "key"}.get(str(a), f"axis {i} place") for i, a in enumerate(of)))


def exponential(kind: Kind, scheme: str = "exponential") -> Kind:
    """The same kind, whose exponentials are those of the arithmetic."""

    def compute(call: Call) -> Tensor:
        name = call.arithmetic.exponential
        with approximated(name):
            y = kind.compute(call)
        if call.energy and name:
            with approximated(name, other_side=True):
                call.energy.turned = (kind.compute(call) - y).abs()
        return y

    def noise(made: Made) -> Noise:
        return replace(kind.noise_of(made), turned=made.energy.turned)

    return replace(kind, compute=compute, noise=noise, noise_of_any=None, scheme=scheme)


def wide(x: Tensor) -> Tensor:
    """Half precision as float32; others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
