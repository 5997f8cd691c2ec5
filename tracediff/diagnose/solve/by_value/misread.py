"""How a weight was read, found by value: each output channel of a linear op is its input times some numbers of the
file. Which?

One correlation of the input with all of a tensor's numbers gives the result of every place that a row could begin at;
looking a wrong channel up among these tells where its row was read. And what is wrong in a few columns of few rows is
told by the input channels that the residual follows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tracediff.diagnose.solve.by_value.maps import ZERO, Map, by_any_number
from tracediff.diagnose.solve.by_value.parts import excepting
from tracediff.diagnose.solve.by_value.readings import Moved, Reading, RowRun, words_of_rows
from tracediff.diagnose.solve.edit import Read, Solved
from tracediff.diagnose.solve.loops.bound import flat
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.english import count, ranges
from tracediff.model.gguf_file import TensorInfo
from tracediff.model.weights import reading, values_of
from tracediff.names import layer_of

_TOKENS = 3  # with fewer, a number among some hundred thousand is found by chance
_MIXES = 3  # sums of tokens by which places are looked up
_SAMPLE = 8  # wrong rows that are looked for in a tensor first
_NUMBERS = 1 << 25  # of all tensors that are looked through
_ZERO = 1e-7  # of the largest: less is left where a bias is taken away
_CLOSE = 1e-5  # of the largest, to which two results are the same
_RUNS = 6  # of rows that are read one after the other
_UNTOLD = 0.25  # of the wrong channels: so many may be made of what the file does not hold in one piece
_TOLD = 4  # numbers one after the other that are not found by chance
_CHANCES = 64  # places of a number that are looked at
_LOOK = "how the loader finds and copies this tensor: offsets, sizes, counts of rows"
_LOOK_AT_INDEX = "by which index the kernel reads it"
_LOOK_AT_ZEROS = "whether the matmul's loop reaches these channels; then how many rows the loader copies"
_CHUNK = 1 << 18
_NEAR = 1 << 12  # places by chance that are looked at
_PAGE = 2048  # numbers before a tensor: buffers begin at pages
_RUN, _ELEMENT = 30.0, 40.0  # bits of a run of rows, and of one element


def variants(problem: Problem) -> Iterator[Solved]:
    """Readings of a weight that give all wrong channels, or all but some that nothing in the file does."""
    for weight, values, near in _vectors(problem):
        yield from _of_vector(problem, weight, values, near)
    if problem.op.kind != "linear" or problem.loops.numbers["T"] < _TOKENS:
        return
    known = _Known.of(problem)
    if known is None:
        return
    yield from _elements(problem, known)
    rows = _placed(problem, known)
    yield from _read(problem, 0, _joined(rows, known.x.shape[1]), known.wrong)
    if "b" in problem.loops.arrays and len(known.x) > _TOKENS and any(int(row) not in rows for row in known.wrong):
        yield from _with_biases(problem, known)


def _read(problem: Problem, weight: int, runs: list[RowRun], wrong: np.ndarray) -> Iterator[Solved]:
    """The op that reads these rows, where they are most of those that are wrong."""
    told = sorted(sorted(runs, key=lambda run: run.first - run.last)[:_RUNS], key=lambda run: run.first)
    rows = [np.arange(run.first, run.last + 1) for run in told]
    untold = np.setdiff1d(wrong, np.concatenate(rows)) if rows else wrong
    if len(untold) > _UNTOLD * len(wrong):
        return
    op, words = reading(problem.op, Reading(rows=tuple(told)), weight), words_of_rows(told, problem.op, weight)
    bits = _RUN * len(told)
    if len(untold):
        op, bits = excepting(op, untold), bits + _RUN * np.log2(2 + len(untold))
        channels = f"{count(len(untold), 'channel')} ({ranges(untold.tolist())})"
        words += f"; what {channels} {'is' if len(untold) == 1 else 'are'} made of cannot be told"
    yield Solved((op,), words, bits, _LOOK if any(run.tensor for run in told) else _LOOK_AT_ZEROS)


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
        n_out, t = (int(bound.numbers[name]) for name in ("n_out", "T"))
        x = problem.array("x")
        y, exact = (values.reshape(t, n_out) for values in (problem.recorded, problem.exact))
        if not (np.isfinite(x).all() and np.isfinite(y).all()) or not y.any():
            return None
        if "b" in bound.arrays:
            y, exact = (values - problem.array("b") for values in (y, exact))
        return cls(x, y, exact, np.flatnonzero(problem.wrong.reshape(t, n_out).any(0)))


def _with_biases(problem: Problem, known: _Known) -> Iterator[Solved]:
    """Rows that are read with the biases that they have there, as parts of one product that begin elsewhere are: less
    its mean over the tokens an output has no bias.
    """
    centred = replace(known, x=known.x - known.x.mean(0), y=known.y - known.y.mean(0))
    n, tensors = known.x.shape[1], problem.weights.file.tensors
    runs = _joined(_placed(problem, centred), n)
    biases = [
        RowRun(run.first, run.last, run.tensor.removesuffix("weight") + "bias", run.start // n, 1)
        for run in runs
        if run.start % n == 0 and run.step == n
    ]
    if len(biases) < len(runs) or any(run.tensor not in tensors for run in biases):
        return
    for solved in _read(problem, 0, runs, known.wrong):
        ops = tuple(reading(op, Reading(rows=tuple(biases)), 1) for op in solved.ops)
        yield replace(solved, ops=ops, words=f"{solved.words}, and with their biases", bits=solved.bits + 1)


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
        yield tensors[name]


def _numbers(problem: Problem, info: TensorInfo) -> np.ndarray:
    return flat(values_of(problem.weights.file, info))


Places = dict[int, tuple[str, int]]  # of rows: the tensor, and the number in it that each begins at


def _placed(problem: Problem, known: _Known) -> Places:
    """Where the wrong rows are read, as far as that is found; those that are 0 have no tensor."""
    mix = np.random.default_rng(0).standard_normal((_MIXES, len(known.x)))
    inputs, sought = mix @ known.x, mix @ known.y
    close = _CLOSE * np.abs(sought).max(1)
    zero = np.abs(known.y).max(0) <= _ZERO * np.abs(known.y).max()
    found: Places = {int(row): ("", 0) for row in known.wrong[zero[known.wrong]]}
    for info in _tensors(problem):
        left = [int(row) for row in known.wrong if int(row) not in found]
        if not left:
            break
        for row, start in _rows_in(problem, info, inputs, sought, left, close):
            found[row] = info.name, start
    return found


def _rows_in(
    problem: Problem, info: TensorInfo, inputs: np.ndarray, sought: np.ndarray, rows: list[int], close: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Those of the rows that are read in this tensor, and where each begins."""
    numbers, n = _numbers(problem, info), inputs.shape[1]
    before = n + _PAGE
    padded = np.concatenate((np.zeros(before), numbers, np.zeros(n)))
    first = _correlated(padded, inputs[0])
    some = {rows[i] for i in np.linspace(0, len(rows) - 1, _SAMPLE).astype(int)}
    if not any(_is_in(padded, first, inputs, sought[:, row], close) for row in some):
        return
    made = np.stack([first, *(_correlated(padded, one) for one in inputs[1:])])
    order = np.argsort(made[0], kind="stable")
    starts: list[int] = []
    for row in rows:
        expected = starts[-1] + (starts[-1] - starts[-2]) if len(starts) > 1 else -1
        place = _place(made, order, sought[:, row], close, expected)
        if place is not None:
            starts.append(place)
            yield row, place - before


def _is_in(numbers: np.ndarray, first: np.ndarray, inputs: np.ndarray, sought: np.ndarray, close: np.ndarray) -> bool:
    """Whether some place gives what is sought: among millions one sum is near it by chance, all of them are not."""
    near = np.flatnonzero(np.abs(first - sought[0]) <= close[0])
    if len(near) > _NEAR:
        return True
    made = numbers[near[:, None] + np.arange(inputs.shape[1])] @ inputs.T
    return bool((np.abs(made - sought) <= close).all(1).any())


def _correlated(numbers: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Of each place the sum of the input times the numbers from there on."""
    n = len(x)
    size = 1 << max(4 * n, min(_CHUNK, len(numbers))).bit_length()
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


def _joined(rows: Places, n: int) -> list[RowRun]:
    """Runs of rows that are read at even distances."""
    found: list[RowRun] = []
    for row, (tensor, start) in sorted(rows.items()):
        last = found[-1] if found else None
        if last and row == last.last + 1 and tensor == last.tensor:
            if tensor and last.first == last.last:
                found[-1] = replace(last, last=row, step=start - last.start)
                continue
            if start == last.start + last.step * (row - last.first):
                found[-1] = replace(last, last=row)
                continue
        found.append(RowRun(row, row, tensor, start, n if tensor else 0))
    return found


# --- vectors: their numbers follow from the output


def _vectors(problem: Problem) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Weights of which each channel has one number: which of the op's, the numbers that give what was recorded, NaN
    where none does, and how near they are.
    """
    bound, kind = problem.loops, problem.op.kind
    if kind not in ("linear", "rms_norm"):
        return
    y, exact, near = (v.reshape(int(bound.numbers["T"]), -1) for v in (problem.recorded, problem.exact, problem.near))
    if not np.isfinite(y).all() or not np.isfinite(exact).all():
        return
    if kind == "linear" and "b" in bound.arrays:
        own, more = problem.array("b"), (y - exact).mean(0)
        yield 1, np.where(_agree(y, exact + more, near), own + more, np.nan), near.max(0)
    if kind == "rms_norm" and "w" in bound.arrays:
        own, size = problem.array("w"), np.square(exact).sum(0)
        with np.errstate(all="ignore"):
            times = (y * exact).sum(0) / size
            values = np.where(_agree(y, exact * times, near), own * times, np.nan)
            yield 0, values, np.abs(own) * np.sqrt(np.square(near).sum(0) / size)


def _agree(y: np.ndarray, made: np.ndarray, near: np.ndarray) -> np.ndarray:
    """The channels of which all values are made."""
    return np.asarray(agree(y, made, near).all(0))


def _of_vector(problem: Problem, weight: int, values: np.ndarray, near: np.ndarray) -> Iterator[Solved]:
    """Runs of the numbers as they stand in some tensor."""
    own = problem.array(problem.loops.own.weights[weight])
    wrong = np.flatnonzero(~(np.abs(values - own) <= near))
    if not len(wrong):
        return
    yield from _elsewhere(problem, weight, own, values, near)
    tensors = [(info.name, _numbers(problem, info)) for info in _tensors(problem)]
    runs, at, untold = list[RowRun](), 0, 0
    for i in map(int, wrong):
        if i < at:
            continue
        if untold > _UNTOLD * len(wrong):
            return
        if math.isnan(values[i]):
            untold += 1
            continue
        zeros = int(np.argmax(np.append(np.abs(values[i:]) > near[i:], True)))
        found = [RowRun(i, i + zeros - 1, "", 0, 0)] if zeros else []
        found = found or [run for name, numbers in tensors if (run := _run_in(numbers, name, values, near, i))]
        if found:
            runs.append(max(found, key=lambda run: run.last))
            at = runs[-1].last + 1
        untold += not found
    yield from _read(problem, weight, runs, wrong)


def _elsewhere(
    problem: Problem, weight: int, own: np.ndarray, values: np.ndarray, near: np.ndarray
) -> Iterator[Solved]:
    """The vector with its own numbers in other places, where a formula says which: as of an index modulo a head's."""
    for one in (Map("reversed"), *by_any_number(len(own))):
        source = one.of(len(own))
        if (np.abs(values - np.where(source == ZERO, 0.0, own[source])) <= near).all():
            name = Read(problem.op.weights[weight].name).words(problem.op)
            words = f"as it reads {name}, {one.words('element', len(own))}"
            yield Solved((reading(problem.op, Moved(one), weight),), words, _RUN + one.bits, _LOOK_AT_INDEX)
            return


def _run_in(numbers: np.ndarray, name: str, values: np.ndarray, near: np.ndarray, i: int) -> RowRun | None:
    """The longest run of values from one on that this tensor has, one after the other."""
    best = None
    for start in np.flatnonzero(np.abs(numbers - values[i]) <= near[i])[:_CHANCES]:
        n = min(len(numbers) - start, len(values) - i)
        same = np.abs(numbers[start : start + n] - values[i : i + n]) <= near[i : i + n]
        count = int(np.argmin(np.append(same, False)))
        if count >= _TOLD and (best is None or count > best.last - i + 1):
            best = RowRun(i, i + count - 1, name, int(start), 1)
    return best


# --- few wrong elements


def _elements(problem: Problem, known: _Known) -> Iterator[Solved]:
    """Rows whose residual follows one input channel each: one element of each is another."""
    if len(known.wrong) > _RUNS:
        return
    residual = (known.y - known.exact)[:, known.wrong]
    size = np.square(known.x).sum(0)
    along = known.x.T @ residual
    explained = np.square(along) / np.maximum(size[:, None], 1e-300) / np.square(residual).sum(0)
    best = explained.argmax(0)
    by = along[best, np.arange(len(best))] / size[best]
    near = problem.near.reshape(known.y.shape)[:, known.wrong]
    if (np.abs(residual - known.x[:, best] * by) > near).any():
        return
    n, elements, said = known.x.shape[1], [], []
    weight = problem.loops.arrays["w"]
    for row, column, more in zip(known.wrong, best, by, strict=True):
        right = float(weight.take(np.array([row * n + column]))[0])
        value = 0.0 if abs(right + more) < 1e-6 * abs(right) else right + float(more)
        elements.append((int(row), int(column), value))
        name = Read(problem.op.weights[0].name).words(problem.op)
        said.append(f"row {row} of {name} differs in column {column} alone: {value:.6g} where the file has {right:.6g}")
    op = reading(problem.op, Reading(elements=tuple(elements)))
    yield Solved((op,), "; ".join(said), _ELEMENT * len(elements), _LOOK)
