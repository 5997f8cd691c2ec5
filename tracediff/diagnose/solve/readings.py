"""Another reading of a weight: each output channel of a linear op is its input times some numbers of the file. Which?

One correlation of the input with all of a tensor's numbers gives the result of every place that a row could begin at;
looking a wrong channel up among these tells where its row was read. And what is wrong in a few columns of few rows is
told by the input channels that the residual follows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.solve.maps import Found
from tracediff.diagnose.solve.places import plural
from tracediff.diagnose.solve.problem import Problem
from tracediff.diagnose.solve.variant import Read
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op
from tracediff.model.weights import dequantize, raw_rows
from tracediff.names import layer_of

_TOKENS = 3  # with fewer, a number among some hundred thousand is found by chance
_MIXES = 3  # sums of tokens by which places are looked up
_NUMBERS = 1 << 25  # of all tensors that are looked through
_CLOSE = 1e-5  # of the largest, to which two results are the same
_RUNS = 6  # of rows that are read one after the other
_LOOK = "how the loader finds and copies this tensor: offsets, sizes, counts of rows"
_CHUNK = 1 << 18
_PAGE = 2048  # numbers before a tensor: buffers begin at pages
_RUN, _ELEMENT = 30.0, 40.0  # bits of a run of rows, and of one element


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `first` to `last` of a weight are read in `tensor` from number `start` on, `step` further on each; without a
    tensor they are 0.
    """

    first: int
    last: int
    tensor: str
    start: int
    step: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads a matrix with some rows from elsewhere, or some elements that are others: `Weight.read`."""

    rows: tuple[Rows, ...] = ()
    elements: tuple[tuple[int, int, float], ...] = ()  # row, column, value

    def __call__(self, file: GGUFFile, info: TensorInfo) -> Tensor:
        """The matrix as it is held."""
        values = dequantize(info, raw_rows(file, info)).reshape(info.shape).clone()
        n = info.shape[-1]
        for run in self.rows:
            if not run.tensor:
                values[run.first : run.last + 1] = 0
                continue
            other = file.tensors[run.tensor]
            numbers = dequantize(other, raw_rows(file, other)).flatten()
            starts = run.start + run.step * torch.arange(run.last - run.first + 1)
            at = starts[:, None] + torch.arange(n)
            inside = (at >= 0) & (at < len(numbers))
            values[run.first : run.last + 1] = torch.where(inside, numbers[at.clamp(0, len(numbers) - 1)], 0.0)
        for row, column, value in self.elements:
            values[row, column] = value
        return values


def variants(problem: Problem) -> Iterator[Found]:
    """Readings of the weight that give all wrong channels."""
    if problem.op.kind != "linear" or problem.loops.numbers["T"] < _TOKENS:
        return
    known = _Known.of(problem)
    if known is None:
        return
    yield from _elements(problem, known)
    for info in _tensors(problem):
        runs = _runs(known, info, problem)
        if runs:
            bits = _RUN * len(runs)
            yield Found(reading(problem.op, Reading(rows=runs)), _words_of_rows(runs, problem.op), bits, _LOOK)
            return


@dataclass(frozen=True, slots=True)
class _Known:
    """The input, the output without its bias, as recorded and as it should be; and the wrong channels."""

    x: np.ndarray
    y: np.ndarray
    exact: np.ndarray
    wrong: np.ndarray

    @classmethod
    def of(cls, problem: Problem) -> "_Known | None":
        bound = problem.loops
        n_in, n_out, t = (int(bound.numbers[name]) for name in ("n_in", "n_out", "T"))
        x = bound.arrays["x"].take(np.arange(t * n_in)).reshape(t, n_in)
        y, exact = (values.reshape(t, n_out) for values in (problem.recorded, problem.exact))
        if not (np.isfinite(x).all() and np.isfinite(y).all()) or not y.any():
            return None
        if "b" in bound.arrays:
            bias = bound.arrays["b"].take(np.arange(n_out))
            y, exact = y - bias, exact - bias
        return cls(x, y, exact, np.flatnonzero(problem.wrong.reshape(t, n_out).any(0)))


def reading(op: Op, of: Reading) -> Op:
    """The op with its weight read so."""
    return replace(op, weights=(replace(op.weights[0], read=of), *op.weights[1:]))


def _tensors(problem: Problem) -> Iterator[TensorInfo]:
    """The op's own, then those of its layer, then others, as long as there is time."""
    tensors = problem.weights.file.tensors
    own, layer = problem.op.weights[0].name, layer_of(problem.op.name)
    order = sorted(tensors, key=lambda name: (name != own, layer_of(name) != layer))
    total = 0
    for name in order:
        total += math.prod(tensors[name].shape)
        if total > _NUMBERS:
            return
        if len(tensors[name].shape) == 2:
            yield tensors[name]


def _runs(known: _Known, info: TensorInfo, problem: Problem) -> tuple[Rows, ...]:
    """Where the wrong rows are read in this tensor; empty where some are not."""
    numbers = dequantize(info, raw_rows(problem.weights.file, info)).flatten().double().numpy()
    n = known.x.shape[1]
    mix = np.random.default_rng(0).standard_normal((_MIXES, len(known.x)))
    zero = known.wrong[~known.y[:, known.wrong].any(0)]
    wrong = np.setdiff1d(known.wrong, zero)
    if not len(wrong):
        return ()
    inputs, sought = mix @ known.x, (mix @ known.y)[:, wrong]
    before = n + _PAGE
    padded = np.concatenate((np.zeros(before), numbers, np.zeros(n)))
    close = _CLOSE * np.abs(mix @ known.y).max(1)
    first = _correlated(padded, inputs[0])
    some = np.linspace(0, len(wrong) - 1, min(4, len(wrong))).astype(int)
    if any(np.abs(first - sought[0, i]).min() > close[0] for i in some):  # nor would it be by the other sums
        return ()
    made = np.stack([first, *(_correlated(padded, one) for one in inputs[1:])])
    order = np.argsort(made[0], kind="stable")
    starts: list[int] = []
    for i in range(len(wrong)):
        expected = starts[-1] + (starts[-1] - starts[-2]) if len(starts) > 1 else -1
        place = _place(made, order, sought[:, i], close, expected)
        if place is None:
            return ()
        starts.append(place)
    return (*_joined(wrong, np.array(starts) - before, info.name, n), *_zeros(zero))


def _correlated(numbers: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Of each place the sum of the input times the numbers from there on."""
    n, size = len(x), _CHUNK
    while size < 4 * n:
        size *= 2
    transformed, step = np.fft.rfft(x[::-1], size), size - n + 1
    parts = []
    for at in range(0, len(numbers) - n + 1, step):
        block = numbers[at : at + size]
        parts.append(np.fft.irfft(np.fft.rfft(block, size) * transformed, size)[n - 1 : n - 1 + step])
    return np.concatenate(parts)[: len(numbers) - n + 1]


def _place(made: np.ndarray, order: np.ndarray, sought: np.ndarray, close: np.ndarray, expected: int) -> int | None:
    """The place whose results are those sought; of several the one expected."""
    if 0 <= expected < made.shape[1] and (np.abs(made[:, expected] - sought) <= close).all():
        return expected
    first, last = np.searchsorted(made[0], (sought[0] - close[0], sought[0] + close[0]), sorter=order)
    near = order[first:last]
    fits = near[(np.abs(made[:, near] - sought[:, None]) <= close[:, None]).all(0)]
    return int(fits.min()) if len(fits) else None


def _joined(rows: np.ndarray, starts: np.ndarray, tensor: str, n: int) -> tuple[Rows, ...]:
    """Runs of rows that are read at even distances; none where they are many."""
    found: list[Rows] = []
    for row, start in zip(map(int, rows), map(int, starts), strict=True):
        last = found[-1] if found else None
        if last and row == last.last + 1:
            if last.first == last.last:
                found[-1] = replace(last, last=row, step=start - last.start)
                continue
            if start == last.start + last.step * (row - last.first):
                found[-1] = replace(last, last=row)
                continue
        found.append(Rows(row, row, tensor, start, n))
    return tuple(found) if len(found) <= _RUNS else ()


def _zeros(rows: np.ndarray) -> tuple[Rows, ...]:
    """Runs of rows that are 0."""
    ends = np.flatnonzero(np.diff(rows, append=-1) != 1)
    starts = [0, *(ends[:-1] + 1)] if len(rows) else []
    return tuple(Rows(int(rows[a]), int(rows[b]), "", 0, 0) for a, b in zip(starts, ends, strict=True))


def _words_of_rows(runs: tuple[Rows, ...], op: Op) -> str:
    return "; ".join(_of_run(run, op) for run in runs)


def _of_run(run: Rows, op: Op) -> str:
    """As in "channels 256 to 767 are computed with rows 0 to 511 of ffn_gate.weight"."""
    if not run.tensor:
        one = run.first == run.last
        which = f"channel {run.first} has its" if one else f"channels {run.first} to {run.last} have their"
        return f"{which} weights at 0"
    n, count = op.weights[0].shape[-1], run.last - run.first + 1
    tensor = Read(run.tensor).words(op)
    channels = f"channel {run.first} is" if count == 1 else f"{plural('channel')} {run.first} to {run.last} are"
    if run.step == n and run.start % n == 0:
        first = run.start // n
        rows = f"row {first}" if count == 1 else f"rows {first} to {first + count - 1}"
        return f"{channels} computed with {rows} of {tensor}"
    if run.step == n and run.tensor == op.weights[0].name:
        by = run.start - run.first * n
        return f"{channels} computed with rows that start {abs(by)} values {'late' if by > 0 else 'early'} in {tensor}"
    then = "" if count == 1 else f", each further row {run.step} values on"
    before = f"{-run.start} values before" if run.start < 0 else f"value {run.start} of"
    return f"{channels} computed with weights from {before} {tensor} on{then}"


# --- few wrong elements


def _elements(problem: Problem, known: _Known) -> Iterator[Found]:
    """Rows whose residual follows one input channel each: one element of each is another."""
    if len(known.wrong) > _RUNS:
        return
    residual = (known.y - known.exact)[:, known.wrong]
    size = np.square(known.x).sum(0)
    along = known.x.T @ residual
    explained = np.square(along) / np.maximum(size[:, None], 1e-300) / np.square(residual).sum(0)
    best = explained.argmax(0)
    if (explained[best, np.arange(len(best))] < 1 - 1e-9).any():
        return
    n, elements, said = known.x.shape[1], [], []
    weight = problem.loops.arrays["w"]
    for row, column, by in zip(known.wrong, best, along[best, np.arange(len(best))] / size[best], strict=True):
        right = float(weight.take(np.array([row * n + column]))[0])
        value = 0.0 if abs(right + by) < 1e-6 * abs(right) else right + float(by)
        elements.append((int(row), int(column), value))
        name = Read(problem.op.weights[0].name).words(problem.op)
        said.append(f"row {row} of {name} differs in column {column} alone: {value:.6g} where the file has {right:.6g}")
    op = reading(problem.op, Reading(elements=tuple(elements)))
    yield Found(op, "; ".join(said), _ELEMENT * len(elements), _LOOK)
