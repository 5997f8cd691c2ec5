"""Another function of the right value or of an operand: clamped, capped, scaled with an offset, a power, positive."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.edit import Solved, input_words
from tracediff.diagnose.solve.edits.numbers import best, simpler
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.english import told_apart
from tracediff.model.graph import Op
from tracediff.numerics.evaluate import computed, evaluate, noise_of
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.activation import gelu, gelu_erf, gelu_quick, silu
from tracediff.numerics.kinds.kind import Call, Made

_SAME = 4  # values that are equal where a clamp is thought of
_DIGITS = 3e-6  # within which they are, when they were divided by another value
_SMALL = 1e-3  # of the largest factor: what is divided by a smaller one says little
_GATED = ("swiglu", "geglu", "reglu")
_ALONE = ("silu", "gelu", "gelu_erf", "gelu_quick")
_LINEAR_IN = {**dict.fromkeys(_GATED, (1,)), "add": (0, 1), "mul": (0, 1)}  # inputs that the output is linear in
_ACTIVATED = -1  # in the place of an input's number: the activated gate
_LOOK = "what is done to its result: a scale, a clamp, a cap"
_LOOK_PRODUCT = "the scale of the weight's blocks, and what the sum is multiplied by before the bias is added"
_LOOK_BEFORE = "what is done to that value before it is used: a scale, a clamp, a cap"
_NUMBER = 12.0  # bits of a fitted number
_DIGIT = 0.1  # and of each digit: of a clamp before an activation and of one behind it the rounder is meant
_FITTED = 1 << 16  # values that a function is fitted to
_HALVINGS = 60  # of the interval that a cap is sought in
_SOUGHT = 5, 1e-5  # digits of what was sought so, and how near it is known

Function = Callable[..., Tensor]
_ACTIVATIONS: Mapping[str, Function] = {
    "silu": silu, "gelu (tanh)": gelu, "gelu (erf)": gelu_erf, "gelu (quick)": gelu_quick, "relu": torch.relu,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "softplus": torch.nn.functional.softplus, "exp": torch.exp,
}  # fmt: skip
FUNCTIONS: Mapping[str, Function] = {
    "above": lambda x, c: x.clamp(max=c),
    "below": lambda x, c: x.clamp(min=c),
    "within": lambda x, low, high: x.clamp(low, high),
    "cap": lambda x, c: c * torch.tanh(x / c),
    "linear": lambda x, a, b: a * x + b,
    "power": lambda x, p: x.sign() * x.abs() ** p,
    "absolute": lambda x: x.abs(),
    "square": lambda x: x * x,
    **_ACTIVATIONS,
}
_WITHOUT_NUMBERS = ("absolute", "square", *_ACTIVATIONS)
NUMBERS = {
    name: 0 if name in _WITHOUT_NUMBERS else len(signature(function).parameters) - 1
    for name, function in FUNCTIONS.items()
}
_WORDS = {
    "above": "every value above {0:.6g} is {0:.6g}",
    "below": "every value below {0:.6g} is {0:.6g}",
    "within": "every value is clamped to the range from {0:.6g} to {1:.6g}",
    "cap": "every value v is capped, to {0:.6g} * tanh(v / {0:.6g})",
    "power": "every value is the power {0:.6g} of what it should be, with its sign",
    "absolute": "every value is without its sign",
    "square": "every value is the square of what it should be",
    **{name: f"every value is {name} of what it should be" for name in _ACTIVATIONS},
}


@dataclass(frozen=True, slots=True)
class Mapped:
    """Computes an op and then a function of each of its values, or of those of an input before, or of an activated
    gate: `Op.rework`.
    """

    name: str
    numbers: tuple[float, ...]
    operand: int | None = None

    def compute(self, call: Call) -> Tensor:
        """The output."""
        right = replace(call.op, rework=None)
        if self.operand == _ACTIVATED:
            gate, up = call.inputs
            return FUNCTIONS[self.name](computed(right, call, [gate, torch.ones_like(up)]), *self.numbers) * up
        y = computed(right, call, self._inputs(call.inputs))
        return y if self.operand is not None else FUNCTIONS[self.name](y, *self.numbers)

    def _inputs(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [FUNCTIONS[self.name](x, *self.numbers) if i == self.operand else x for i, x in enumerate(inputs)]

    def noise(self, made: Made) -> Noise:
        """That of the right op times the slope of the function there, and one rounding more."""
        right = replace(made.op, rework=None)
        if self.operand is not None:
            return self._noise_of_operand(right, made)
        x = evaluate(right, made.inputs, made.weights, made.arithmetic)
        own = noise_of(right, made, y=x)
        step = 1e-6 * (x.abs() + 1e-30)
        slope = (FUNCTIONS[self.name](x + step, *self.numbers) - made.y).abs() / step
        slope = slope.nan_to_num(0.0, 0.0, 0.0)
        hard = own.hard * slope + 4 * made.unit * made.size + made.stored
        return Noise(own.sigma * slope, hard, alike=own.alike)

    def _noise_of_operand(self, right: Op, made: Made) -> Noise:
        """That of the right op, and a rounding of the operand: of a sum that is near 0 it is what is left."""
        own = noise_of(right, made, self._inputs(made.inputs))
        if self.operand == _ACTIVATED:
            return own
        without = [torch.zeros_like(x) if i == self.operand else x for i, x in enumerate(made.inputs)]
        part = made.y - evaluate(right, without, made.weights, made.arithmetic)
        return replace(own, hard=own.hard + 4 * made.unit * part.abs())


def variants(problem: Problem) -> Iterator[Solved]:
    """Each function, fitted, that gives all values: of the output, or of an operand."""
    x, y, near = problem.exact, problem.recorded, problem.near
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or not x.any() or not y.any():
        return
    for name, numbers in _fits(x, y):
        if all(_gives(name, numbers, x[part], y[part], near[part]) for part in (_thin(x), slice(None))):
            yield _solved(mapped(problem.op, name, numbers), words(name, numbers), numbers)
    for operand in _linear_in(problem):
        yield from _of_operand(problem, operand)
    if problem.op.kind in ("linear", "linear_id") and len(problem.op.weights) > 1:
        yield from _of_product(problem)
    if problem.op.kind in _GATED:
        yield from _of_activated(problem)
    if problem.op.kind in (*_GATED, *_ALONE):
        yield from _before_activation(problem)


def fitted(problem: Problem, left: Callable[[Op], np.ndarray]) -> Iterator[Solved]:
    """Functions of at most one number, fitted to what comes out at the end of the segment."""
    largest = float(np.abs(problem.exact).max(initial=0.0))
    starts = [(name, sign * largest) for name in ("above", "below") for sign in (1, -1)]
    starts += [("within", largest), ("cap", largest), ("power", 1.0), ("linear", 1.0)]
    found = list[tuple[str, tuple[float, ...]]]()
    for name, start in starts:

        def of(number: float, name: str = name) -> np.ndarray:
            return left(mapped(problem.op, name, _of_one(name, number)))

        number = best(of, start)
        numbers = [] if number is None else [*(one for one, _ in simpler(number)), number]
        found += ((name, _of_one(name, one)) for one in numbers)
    for name, known in found:
        yield _solved(mapped(problem.op, name, known), words(name, known), known)


def usual(problem: Problem) -> Iterator[Solved]:
    """Functions without a number, and another sign, of the output or of an operand."""
    known: list[tuple[str, tuple[float, ...]]] = [*((name, ()) for name in _WITHOUT_NUMBERS), ("linear", (-1.0, 0.0))]
    for name, numbers in known:
        yield _solved(mapped(problem.op, name, numbers), words(name, numbers), numbers)
        yield from (_of_input(problem.op, operand, name, numbers) for operand in _linear_in(problem))


def _of_one(name: str, number: float) -> tuple[float, ...]:
    """The numbers of a function of which one is fitted: a factor alone, a range about 0."""
    return {"linear": (number, 0.0), "within": (-abs(number), abs(number))}.get(name, (number,))


def _solved(op: Op, said: str, numbers: Sequence[float]) -> Solved:
    operand = op.rework.operand if isinstance(op.rework, Mapped) else None
    bits, look = (4.0, _LOOK) if operand is None else (6.0, _LOOK_BEFORE)
    told = {*map(abs, numbers)}  # of a range about 0 one
    digits = sum(len(f"{number:.6g}") for number in told)
    return Solved((op,), said, bits + _NUMBER * len(told) + _DIGIT * digits, look, fitted=bool(numbers))


def _gives(name: str, numbers: tuple[float, ...], x: np.ndarray, y: np.ndarray, near: np.ndarray) -> bool:
    """Whether the function makes y of x."""
    return bool(agree(y, FUNCTIONS[name](torch.from_numpy(x), *numbers).numpy(), near).all())


def _thin(x: np.ndarray) -> slice:
    """Some of many values, evenly: enough to fit two numbers, and to refuse what does not fit."""
    return slice(None, None, max(1, x.size // _FITTED))


def _linear_in(problem: Problem) -> Iterator[int]:
    """Inputs that have a value for each of the output, which is linear in it."""
    arrays = (problem.loops.arrays[name] for name in problem.loops.own.inputs)
    whole = [array.size == problem.exact.size for array in arrays]
    return (i for i in _LINEAR_IN.get(problem.op.kind, ()) if i < len(whole) and whole[i])


def _of_operand(problem: Problem, operand: int) -> Iterator[Solved]:
    """The same of an input of which the output is a multiple, or a sum with."""
    op, given = problem.op, problem.operand(operand)
    if not given.any():
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = problem.exact / given if op.kind != "add" else np.ones_like(given)
    for name, numbers in _before(problem, given, slope):
        yield _of_input(op, operand, name, numbers)


def _of_product(problem: Problem) -> Iterator[Solved]:
    """A multiple of a product that a bias is added to, as of a block's scale that is mistaken alike in all."""
    bias = problem.weights.load(problem.op.weights[1], torch.float64).cpu().numpy()
    if problem.op.kind == "linear_id":  # of the experts that were chosen
        bias = bias[problem.operand(1).astype(int)].ravel()
    added = np.tile(bias, problem.exact.size // bias.size)
    product, made = problem.exact - added, problem.recorded - added
    if bias.any() and product.any():
        factor = _rounder(float(product @ made / (product @ product)))
        if agree(problem.recorded, factor * product + added, problem.near).all():
            said = f"the product is {told_apart(factor, 1.0)[0]} times what it should be before the bias is added"
            yield replace(_solved(mapped(problem.op, "linear", (factor, 0.0), 0), said, (factor,)), look=_LOOK_PRODUCT)


def _of_input(op: Op, operand: int, name: str, numbers: tuple[float, ...]) -> Solved:
    of = f"activated value of {input_words(op, 0)}" if operand == _ACTIVATED else f"value of {input_words(op, operand)}"
    said = words(name, numbers).replace("every value", f"every {of}")
    return _solved(mapped(op, name, numbers, operand), said, numbers)


def _of_activated(problem: Problem) -> Iterator[Solved]:
    """The same of the activated gate, which `up` is multiplied with."""
    slope = problem.operand(1)
    if not slope.any():
        return
    given = np.divide(problem.exact, slope, out=np.zeros_like(slope), where=slope != 0)
    for name, numbers in _before(problem, given, slope):
        yield _of_input(problem.op, _ACTIVATED, name, numbers)


def _before_activation(problem: Problem) -> Iterator[Solved]:
    """What is activated was clamped before, or scaled: where it ends is where what is activated does."""
    x = problem.operand(0)
    up = problem.operand(1) if problem.op.kind in _GATED else np.ones_like(x)

    def activated(values: np.ndarray) -> np.ndarray:
        one = torch.from_numpy(values)
        return np.asarray(KINDS[problem.op.kind].function(*(one, torch.ones_like(one))[: len(problem.op.inputs)]))

    told = np.abs(up) > _SMALL * np.abs(up).max()
    if not told.any():
        return
    order = np.argsort(x[told])
    given, made = x[told][order], (problem.recorded[told] / up[told])[order]
    most, least = _clamped(given, made, activated), _clamped(given[::-1], made[::-1], activated)
    tries: list[tuple[str, tuple[float, ...]]] = [("above", (most,))] if most is not None else []
    tries += [("below", (least,))] if least is not None else []
    tries += [("within", (least, most))] if most is not None and least is not None else []
    if given[-1] > 0:
        factor = _inverse(activated, made[-1], 0.0, 1e3 * given[-1]) / given[-1]
        tries += [("linear", (_rounder(factor, *_SOUGHT), 0.0))]
    for name, numbers in tries:
        y = activated(FUNCTIONS[name](torch.from_numpy(x), *numbers).numpy()) * up
        if agree(problem.recorded, y, problem.near).all():
            yield _of_input(problem.op, 0, name, numbers)


def _clamped(given: np.ndarray, made: np.ndarray, activated: Callable[[np.ndarray], np.ndarray]) -> float | None:
    """Beyond which value, of those that are `given` in order, all are made into the same."""
    same = np.abs(made - made[-1]) <= _DIGITS * abs(made[-1])
    n = int(np.argmin(same[::-1])) if not same.all() else len(same)
    if not _SAME <= n < len(same):
        return None
    return _rounder(_inverse(activated, made[-1], given[-n - 1], given[-n]), *_SOUGHT)


def _inverse(function: Callable[[np.ndarray], np.ndarray], value: float, low: float, high: float) -> float:
    """Where between two others a function, which is monotone there, has the value."""
    rises = function(np.array([high]))[0] >= function(np.array([low]))[0]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if (function(np.array([middle]))[0] < value) == rises else (low, middle)
    return (low + high) / 2


def _before(problem: Problem, given: np.ndarray, slope: np.ndarray) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Functions of what is `given`, which the output has a `slope` in: what it must have been follows by division."""
    with np.errstate(divide="ignore", invalid="ignore"):
        z = given + (problem.recorded - problem.exact) / slope
    told = np.isfinite(z) & (np.abs(slope) > _SMALL * np.abs(slope[np.isfinite(slope)]).max())
    for name, numbers in _fits(given[told], z[told]):
        moved = FUNCTIONS[name](torch.from_numpy(given), *numbers).numpy() - given
        if agree(problem.recorded, problem.exact + np.where(moved, moved * slope, 0), problem.near).all():
            yield name, numbers


def mapped(op: Op, name: str, numbers: tuple[float, ...], operand: int | None = None) -> Op:
    """The op with a function of each of its values, or of those of an input."""
    return replace(op, rework=Mapped(name, numbers, operand))


def words(name: str, numbers: tuple[float, ...]) -> str:
    """As a sentence."""
    if name != "linear":
        return _WORDS[name].format(*numbers)
    a, b = numbers
    if not b:
        factor, _ = told_apart(a, 1.0)
        return "every value has the wrong sign" if a == -1 else f"every value is {factor} times what it should be"
    if not a:
        return f"every value is {b:.6g}"
    times = "" if a == 1 else f"{a:.6g} times what it should be, "
    return f"every value is {times}{'more' if b > 0 else 'less'} by {abs(b):.6g}"


def _fits(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[str, tuple[float, ...]]]:
    edges = [_edge(y, edge) for edge in (y.max(), y.min())]
    yield from ((name, (edge,)) for name, edge in zip(("above", "below"), edges, strict=True) if edge is not None)
    high, low = edges
    if high is not None and low is not None:
        yield "within", (low, high)
    if cap := _cap(x, y):
        yield "cap", (cap,)
    x, y = x[_thin(x)], y[_thin(x)]
    if not x.any():
        return
    yield "linear", (_rounder(float(x @ y / (x @ x))), 0.0)
    slope, offset = np.polyfit(x, y, 1) if x.std() else (1.0, 0.0)
    slope = slope if abs(slope) * np.abs(x).max() > _DIGITS * np.abs(y).max() else 0.0
    if abs(offset) > _DIGITS * np.abs(y).max():
        yield "linear", (_rounder(float(slope)), _rounder(float(offset)))
    yield from ((name, ()) for name in _WITHOUT_NUMBERS)
    large = (np.abs(x) > 1e-3 * np.abs(x).max()) & (np.abs(y) > 0)
    logs = np.log(np.abs(x[large])), np.log(np.abs(y[large]))
    if large.sum() > _SAME and (logs[0] @ logs[0]) > 0:
        yield "power", (float(logs[0] @ logs[1] / (logs[0] @ logs[0])),)


def _edge(y: np.ndarray, edge: float) -> float | None:
    """Where several values end."""
    there = y[np.abs(y - edge) <= _DIGITS * abs(edge)]
    return _rounder(float(np.median(there))) if len(there) >= _SAME else None


def _rounder(number: float, n_digits: int = 6, within: float = 1e-7) -> float:
    """The number of fewest digits that float32 cannot tell from it, or what it is known `within`."""
    short = (float(f"{number:.{digits}g}") for digits in range(1, n_digits + 1))
    return next((near for near in short if abs(near - number) <= within * abs(number)), number)


def _cap(x: np.ndarray, y: np.ndarray) -> float | None:
    """The c of c * tanh(x / c): from the value that is cut most, by bisection; the roundest number near it."""
    at = int(np.argmax(np.abs(x) - np.abs(y)))
    largest, cut = abs(float(x[at])), abs(float(y[at]))
    if not 0 < cut < largest:
        return None
    low, high = cut, 1e6 * largest
    for _ in range(_HALVINGS):
        middle = low**0.5 * high**0.5  # of the least numbers the product is 0
        low, high = (middle, high) if middle * np.tanh(largest / middle) < cut else (low, middle)
    return _rounder(low**0.5 * high**0.5, *_SOUGHT)
