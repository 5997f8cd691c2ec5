"""One op's output made from its inputs: exact, and in samples of what the noise of honest arithmetic makes of it."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tracediff.model.graph import Axis, Op
from tracediff.model.weights import Weights
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.evaluate import call_of, noise
from tracediff.numerics.floats import HALVES
from tracediff.numerics.floors import TINY, UNIT, Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.kind import Call, Energy
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.views import seen
from tracediff.replay.past import Value
from tracediff.replay.recorded import Recorded
from tracediff.replay.turning import Turning
from tracediff.trace.format import Rows

# Noise through a segment is known from a few samples of it, not from a formula: its spread is that uncertain.
SEGMENT_MARGIN = 16.0
# What half precision rounds is bounded as two roundings of the largest significand each (`kind.Made.stored`). Their
# errors are independent, which leaves 1 / sqrt(2) of the bound, and significands spread evenly on a logarithmic scale
# leave sqrt(3 / (8 ln 2)) of that.
_OF_HALVES = 0.52


@dataclass(frozen=True, slots=True)
class Recomputed:
    """An op's output as it should be: exact, the noise of an honest engine, and the ops recomputed for it."""

    exact: Tensor
    own: Noise  # of the op itself
    noise: Noise  # with that of the segment before it
    segment: tuple[str, ...] = ()
    samples: tuple[Tensor, ...] = ()
    inputs: tuple[Tensor, ...] = ()  # of the op where they are recorded
    weights_nmse: float | None = None  # of weights that the engine requantised, against the file's

    @property
    def not_finite(self) -> bool:
        """Whether NaN or Inf was recorded of an input."""
        return any(not bool(x.isfinite().all()) for x in self.inputs)

    @property
    def margin(self) -> float:
        """How many times its expectation the squared error may be."""
        return max(SEGMENT_MARGIN, self.noise.margin) if self.samples else self.noise.margin

    def at(self, axis: int, rows: Sequence[int]) -> "Recomputed":
        """Some rows of it along an axis."""

        def picked(x: Tensor) -> Tensor:
            return x.index_select(axis, torch.tensor(rows, device=x.device))

        return replace(
            self,
            exact=picked(self.exact),
            own=self.own.mapped(picked),
            noise=self.noise.mapped(picked),
            samples=tuple(map(picked, self.samples)),
        )

    @classmethod
    def joined(cls, parts: "Sequence[Recomputed]", axes: Sequence[Axis]) -> "Recomputed":
        """Of parts of the tokens the whole."""
        if len(parts) == 1:
            return parts[0]

        def cat(each: Sequence[Tensor]) -> Tensor:
            return torch.cat([*each], axes.index("T"))

        return replace(
            parts[0],
            exact=cat([part.exact for part in parts]),
            own=Noise.joined([part.own for part in parts], cat),
            noise=Noise.joined([part.noise for part in parts], cat),
            samples=tuple(map(cat, zip(*(part.samples for part in parts), strict=True))),
            inputs=(),
        )

    def bound(self, cut: slice | None = None) -> Tensor:
        """Of each element, or of some, flat. A sampled spread is that of its row: two samples say little of one
        element.
        """
        noise = self.noise if cut is None else self.noise.part(cut)
        bound = noise.bound(self.noise.sigma.numel())
        return bound.mul_(math.sqrt(SEGMENT_MARGIN)) if self.samples else bound


@dataclass(frozen=True, slots=True)
class Making:
    """What makes an op's output. The first call is of the inputs as they are, the others of samples."""

    recorded: Recorded
    step: int
    rows: Rows
    storage: str
    calls: Sequence[Call]
    of: Rows = None  # the tokens that are wanted of an op that needs others as well; None: those it is made of

    def made(self, ys: Sequence[Tensor]) -> Recomputed:
        """Of what the calls came to."""
        whole = self._whole(ys)
        return whole if self.of is None else whole.at(self.calls[0].op.axes.index("T"), self.of)

    def _whole(self, ys: Sequence[Tensor]) -> Recomputed:
        exact, (y, *samples) = self.calls[0], [y.double() for y in ys]  # be they multiplied in float32
        if exact.energy is None:
            none = torch.zeros((), dtype=y.dtype, device=y.device).expand_as(y)
            return Recomputed(y, Noise(none, none), Noise(none, none), inputs=tuple(exact.inputs))
        terms = self._terms_of_ranks(exact, y)  # before its energy is used up
        own = noise(exact.op, exact.inputs, y, exact.weights, exact.energy, exact.arithmetic, self.storage)
        if terms is not None:
            own = replace(own, sigma=torch.sqrt(own.sigma.square() + terms.reshape(own.sigma.shape)))
        if KINDS[exact.op.kind].shaped_as and (state := self.recorded.state(self.step, exact.op)):
            n, held = state
            rounded = torch.cat((torch.zeros_like(y[:n]), y[n:].abs() * UNIT[held] + TINY[held]))
            own = replace(own, hard=own.hard + rounded)
        error, signal = exact.energy.requantised
        sampled = _sampled(own, y, samples) if samples else own
        requantised = error / signal if signal else None
        return Recomputed(y, own, sampled, (), tuple(samples), tuple(exact.inputs), requantised)

    def value(self, ys: Sequence[Tensor], n_samples: int) -> Value:
        """The same as what other ops read, with the op's own noise in each sample, which is the same whatever is made
        beside it.
        """
        if not n_samples and self.of is None:
            return Value(ys[0].double())
        made = self.made(ys)
        before = made.samples or (made.exact,) * n_samples
        if KINDS[self.calls[0].op.kind].picks:  # what is chosen has no noise: its scores have it
            return Value(made.exact, before)
        part, random = _OF_HALVES if self.storage in HALVES else 1.0, self._numbers()
        return Value(made.exact, tuple(_perturbed(x, made.own, random, part) for x in before))

    def _numbers(self) -> torch.Generator:
        """Random numbers, of each part of the tokens others."""
        return numbers_of(self.step, self.calls[0].op.name, self.rows[0] if self.rows else 0)

    def _terms_of_ranks(self, call: Call, y: Tensor) -> Tensor | None:
        """The variance of what ranks round besides where they add up to y: each its term, and every sum on the way.

        With Q the sum of squares of all terms, u^2 / 3 n Q for n ranks, as of any sum (`numerics.floors`); what is
        added besides may come first, and be in every sum. Terms of a matmul are not recorded; their squares add up to
        its energy, but for chance.
        """
        op, (n, dtype) = call.op, self.recorded.summed(self.step, call.op)
        if not n:
            return None
        if op.kind in ("linear", "linear_id"):
            energy = call.energy.value if call.energy else None
            return energy * (UNIT[dtype] ** 2 * n / 3) if dtype in HALVES and energy is not None else None
        sizes, unit = self.recorded.sizes(self.step, self.rows), UNIT[dtype]
        own = self.recorded.terms(self.step, op.name, self.rows) if op.kind != "add" else None
        if op.kind == "embedding":  # one rank has the row, the others zeros
            own = y[None]
        if own is not None:  # what each makes of its term it rounds
            return own.square().sum(0) * (unit**2 * n / 3)
        squares = [x.square() for x in call.inputs]
        if self.recorded.trace.header.ranks:  # of terms that nobody recorded: those of a row are as large on average
            squares = [x.mean(-1, keepdim=True).expand_as(x) for x in squares]
        for i, (view, name) in enumerate(zip(op.seen, op.inputs, strict=True)):
            terms = self.recorded.terms(self.step, name, self.rows)
            if terms is not None:
                of_terms = terms.square().sum(0)
                squares[i] = seen(view, *sizes, of_terms) if view else of_terms
        return torch.stack(torch.broadcast_tensors(*squares)).sum(0) * (unit**2 * n / 3)


def calls_of(op: Op, inputs: Sequence[Value], weights: Weights, arithmetic: Arithmetic, n_samples: int) -> list[Call]:
    """The op of its inputs as they are, and where they carry noise of so many samples. Without samples it has none."""
    exact = [value.exact for value in inputs]
    if not n_samples:  # as the weights are: of many hypotheses a look in float32 is enough
        same = [x.to(weights.dtype) if x.is_floating_point() else x for x in exact]
        return [call_of(op, same, weights, arithmetic)]
    turning = Turning()
    calls = [call_of(op, exact, weights, arithmetic, Energy(), turning.exact)]
    for i in range(n_samples if any(value.samples for value in inputs) else 0):
        sampled = [value.sample(i) for value in inputs]
        calls.append(call_of(op, sampled, weights, arithmetic, rounded=turning.sample()))
    return calls


def picked(made: Recomputed, of: Value, pick: Callable[[Tensor, Tensor], Tensor]) -> Recomputed:
    """What is found at the places that were made, with the noise of what they are in."""
    exact = pick(of.exact, made.exact)
    if not of.samples:
        return replace(made, exact=exact)
    return replace(made, exact=exact, noise=_sampled(made.own, exact, [pick(x, made.exact) for x in of.samples]))


def unrounded(value: Tensor, lost: str, random: torch.Generator, n_samples: int) -> Value:
    """A value that was rounded to the type `lost`, with samples of what it may have been before."""
    half = rounding_named(lost).step(value) / 2
    return Value(value, tuple(value + half * _flat(value, random) for _ in range(n_samples)))


def anew(value: Tensor, noise: Noise, random: torch.Generator, n_samples: int) -> Value:
    """A recorded value with samples of what it may be where it is computed once more, each with the noise of both."""
    both = noise.mapped(lambda each: each * math.sqrt(2))
    return Value(value, tuple(_perturbed(value, both, random, 1.0) for _ in range(n_samples)))


def applied(function: Callable[..., Tensor], values: Sequence[Value]) -> Value:
    """A function of values, exact and of each sample."""
    n_samples = max((len(value.samples) for value in values), default=0)
    samples = tuple(function(*(value.sample(i) for value in values)) for i in range(n_samples))
    return Value(function(*(value.exact for value in values)), samples)


def _sampled(own: Noise, y: Tensor, samples: Sequence[Tensor]) -> Noise:
    """The noise of an op and of what is before it: the spread of a row, for two samples say little of one element."""
    spread = torch.stack([_apart(sample, y).square_() for sample in samples]).mean(0)
    larger = torch.maximum(spread.mean(-1, keepdim=True), spread)
    return replace(own, sigma=larger.add_(own.sigma.square()).sqrt_())


def _apart(sample: Tensor, y: Tensor) -> Tensor:
    """How far a sample is off. Where a mask makes both infinite it is not, nor is what is no number: others of its row
    have noise. A sample that is none, as where it chose masked keys alone, tells no bound.
    """
    apart = sample - y
    if _is_finite(apart):
        return apart
    return torch.where((sample == y) | y.isnan(), 0.0, apart.masked_fill(sample.isnan(), math.inf))


def _perturbed(x: Tensor, noise: Noise, random: torch.Generator, part: float) -> Tensor:
    """With noise: of what is bounded so large a part."""
    moved = torch.addcmul(x, _gauss(x, random), noise.sigma).addcmul_(_flat(x, random), noise.hard, value=part)
    return moved if _is_finite(moved) else torch.where(x.isinf(), x, moved)  # what a mask hides stays hidden


def _is_finite(x: Tensor) -> bool:
    """Whether all values are, in a tenth of the time that asking each of them takes."""
    return math.isfinite(float(x.sum()))


def numbers_of(step: int, name: str, first: int = 0) -> torch.Generator:
    """The random numbers of a value, or of a part of it from the `first` token on: always the same."""
    return torch.Generator().manual_seed(zlib.crc32(f"{step} {name}{f' {first}' if first else ''}".encode()))


# Drawn in float32, which takes a sixth of the time: noise needs no more digits.
def _flat(like: Tensor, random: torch.Generator) -> Tensor:
    """From -1 to 1."""
    return torch.rand(like.shape, generator=random).mul_(2).sub_(1).to(like)  # exact: 24 bits


def _gauss(like: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=random).to(like)
