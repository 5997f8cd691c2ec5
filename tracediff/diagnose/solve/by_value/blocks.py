"""Quantised blocks that an engine reads by another rule, found by value: whose scale a block has, which integer it
takes for which value, of which bits it makes scales and minima, and what it makes of some values of all blocks.

One rule reads all rows of a tensor. So what it makes wrong is a sum over all blocks, in which each bit of a scale and
each value of a block has one unknown number, and an error that follows each integer where it is taken: the outputs of a
matmul are many more than these, and of an embedding the values themselves are known.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, permutations, product, starmap
from types import MappingProxyType
from typing import Literal, Protocol, Self

import numpy as np
import torch

from tracediff.diagnose.solve.by_value import block_words
from tracediff.diagnose.solve.by_value.block_kernels import Kernel, edited
from tracediff.diagnose.solve.by_value.block_layout import Layout, Part, Sums, layout_of
from tracediff.diagnose.solve.edit import Read, Solved
from tracediff.diagnose.solve.problem import Problem, agree
from tracediff.model.block_fields import FIELDS, EditedBlocks, Fields, Valued
from tracediff.model.graph import Op
from tracediff.model.weights import Weights, raw_rows, reading

_LOOK = "the dequantisation of {} blocks: in the matmul's kernel, and where rows of the embedding are read"
_ROWS, TOKENS = 256, 32  # of a matmul that are looked at
_MANY = 0.5  # of the rows of a matmul that are wrong
_SPARE, _MOST = 1.25, 3  # outputs for each unknown number: with fewer there are some that suit anything
_INTEGER = 0.25  # how far what is solved for may be from a number that an engine has
_PARTS = 16  # numbers by which values are off are so many parts of one
_LIKELY, _TRIED = 0.5, 6  # of the best order's gain, and of orders that have as much: what others have is not tried
_AT_ONCE = 1 << 9  # outputs, of which bits times what these are worth are in memory
_BLOCKS = 16  # different ones: bits of fewer are alike by chance
_BYTE = 8  # bits of a scale
_FIRST = 16  # rows at which a rule is tried first
_RIDGE = 1e-12  # of the squares: what nothing tells is as it should be
_BITS, _ORDER, _SHARED, _VALUES = 24.0, 20.0, 14.0, 24.0


class Rule(Protocol):
    """What an engine makes of the fields of blocks of a type."""

    def __call__(self, fields: Fields) -> Valued:
        """The fields, or the values, as it reads them."""

    def words(self, layout: Layout) -> str:
        """How it does."""


def is_of_blocks(op: Op, weights: Weights) -> bool:
    """Whether the op reads quantised blocks, as the file has them, of a type whose fields are known."""
    if op.kind not in ("linear", "linear_id", "embedding") or not op.weights:
        return False
    return op.weights[0].read is None and weights.file.tensors[op.weights[0].name].type.name in FIELDS


def variants(problems: Sequence[Problem]) -> Iterator[Solved]:
    """Rules by which blocks may have been read, that give what was recorded: of an op in one step, or in several, for a
    token alone has fewer outputs than a rule has numbers.
    """
    seen = _Seen.of(problems)
    for rule, bits in _rules(seen) if seen else ():
        if seen and seen.few.suits(rule) and seen.suits(rule):
            type_ = seen.layout.type
            op = reading(problems[0].op, EditedBlocks((type_,), rule))
            yield Solved((op,), rule.words(seen.layout), bits, _LOOK.format(type_))
            return


def _rules(seen: "_Seen") -> Iterator[tuple[Rule, float]]:
    """What may be, and what it takes to say it, in bits."""
    whats = WHATS if seen.fields.m is not None else WHATS[:1]
    whose = sorted(WHOSE, key=lambda one: "row" not in one) if seen.fields.row == 1 else WHOSE
    yield from ((shared, _SHARED) for shared in starmap(Shared, product(whats, whose)))
    yield from ((order, _ORDER) for order in _orders(seen))
    if sums := _sums(seen):
        yield sums, _BITS
    yield from ((kernel, _BITS) for kernel in edited(seen.layout.type))
    yield from ((values, _VALUES) for values in _values(seen))


@dataclass(frozen=True)
class _Seen:
    """Rows of a quantised matrix, and what an engine made of them: the outputs `y` [T, R] of the inputs `x` [T, K]
    where `exact` ones belong, or, without inputs, the rows themselves, [R, K]. `near` is how near a look must come.
    """

    layout: Layout
    tensor: np.ndarray  # its bytes, [rows, bytes of one]
    rows: np.ndarray  # those that are seen
    x: np.ndarray | None
    y: np.ndarray
    exact: np.ndarray
    near: np.ndarray

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Self | None:
        """What a step tells, and with it what others do of the same rows. None where none tells anything."""
        steps = [seen for seen in map(cls._of_step, problems) if seen]
        if not steps:
            return None
        first = steps[0]
        some: np.ndarray | slice = slice(None)
        if first.x is None:
            rows, some = np.unique(np.concatenate([seen.rows for seen in steps]), return_index=True)
            first = replace(first, rows=rows)
        else:
            steps = [seen for seen in steps if np.array_equal(seen.rows, first.rows)]
            first = replace(first, x=np.concatenate([seen.x for seen in steps if seen.x is not None]))
        y, exact, near = (np.concatenate([getattr(seen, name) for seen in steps]) for name in ("y", "exact", "near"))
        return replace(first, y=y[some], exact=exact[some], near=near[some])

    @classmethod
    def _of_step(cls, problem: Problem) -> Self | None:
        """None of an op of another kind, or whose weight is not quantised, or where not all is finite, or most rows are
        right: who reads blocks wrongly does so in all.
        """
        op, file = problem.op, problem.weights.file
        if not is_of_blocks(op, problem.weights) or not np.isfinite(problem.recorded).all():
            return None
        weight = op.weights[0]
        info = file.tensors[weight.name]
        layout, tensor, reads = layout_of(info.type.name), raw_rows(file, info), _read(problem)
        if len(reads) < len(op.inputs):
            return None
        width = weight.shape[-1 if op.kind == "embedding" else -2]
        y, exact, near, wrong = (
            v.reshape(-1, width) for v in (problem.recorded, problem.exact, problem.near, problem.wrong)
        )
        if op.kind == "embedding":
            tokens, some = np.unique(reads[0].astype(int), return_index=True)
            return cls(layout, tensor, tokens, None, y[some], exact[some], near[some]) if wrong[some].any() else None
        inputs, first, expert, some = reads[0].reshape(-1, weight.shape[-1]), weight.first, 0, np.arange(len(y))
        if op.kind == "linear_id":
            experts = reads[1].astype(int)
            expert = int(np.bincount(experts[experts >= 0]).argmax())  # the one that most tokens chose
            first, some = expert * width, np.flatnonzero(experts == expert)
        some = some[-TOKENS:]
        x = inputs[some * len(inputs) // len(y)]
        rows = np.flatnonzero(wrong[some].any(0))
        if len(rows) < _MANY * width or not np.isfinite(x).all():
            return None
        rows = np.arange(rows[0] // _ROWS * _ROWS, width)[:_ROWS]
        at, bias = np.ix_(some, rows), np.zeros(width)
        if len(op.weights) > 1:
            bias = problem.weights.load(op.weights[1], torch.float64).cpu().numpy().reshape(-1, width)[expert]
        seen = cls(layout, tensor, first + rows, x, y[at] - bias[rows], exact[at] - bias[rows], near[at])
        return None if seen.is_one_factor else seen

    def suits(self, rule: Rule) -> bool:
        """Whether rows that are read so give what was recorded."""
        with np.errstate(all="ignore"):
            rows = self._read_by(rule).values().reshape(self.n_rows, -1)
        made = rows if self.x is None else self.x @ rows.T.astype(np.float64)
        return bool(agree(self.y, made, self.near).all())

    def _read_by(self, rule: Rule) -> Valued:
        """The rows as the rule reads them, which may be by what lies elsewhere in the tensor."""
        match rule:
            case Shared():
                return rule.of(self)
            case Kernel():
                at = self.rows[:, None] * self.fields.row + np.arange(self.fields.row)
                return rule.made(self.fields, self.tensor, at.ravel())
        return rule(self.fields)

    @cached_property
    def few(self) -> Self:
        """A first look, at some of the rows."""
        some = (slice(_FIRST),) if self.x is None else (slice(None), slice(_FIRST))
        return replace(self, rows=self.rows[:_FIRST], y=self.y[some], exact=self.exact[some], near=self.near[some])

    @property
    def is_one_factor(self) -> bool:
        """Whether all is a multiple of what it should be, or 0: that is the op's factor, or any of its inputs'."""
        factor = (self.y * self.exact).sum() / max(np.square(self.exact).sum(), 1e-300)
        return bool(agree(self.y, factor * self.exact, self.near).all())

    @cached_property
    def fields(self) -> Fields:
        """Those of the rows."""
        return Fields.of_rows(self.layout.type, self.tensor[self.rows])

    @cached_property
    def of_tensor(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The bits of scales and minima of all its blocks."""
        blocks = self.tensor.reshape(-1, len(self.fields.raw[0]))
        d, m = (blocks[:, of].copy() for of in (self.layout.d, self.layout.m))
        return d.view(self.fields.d.dtype)[:, 0], None if self.fields.m is None else m.view(self.fields.m.dtype)[:, 0]

    @cached_property
    def steps(self) -> np.ndarray:
        """What an integer of one is worth in each value, float64 [blocks, values of one]."""
        shape = self.fields.low.shape
        return np.broadcast_to(self.fields.steps, shape).reshape(len(self.fields.d), -1).astype(np.float64)

    @property
    def n_rows(self) -> int:
        """Rows that are seen."""
        return len(self.rows)

    @cached_property
    def inputs(self) -> np.ndarray:
        """What the values of a row's blocks are multiplied with, [T, blocks, parts, values of one]."""
        assert self.x is not None
        return self.x.reshape(len(self.x), self.fields.row, *self.fields.low.shape[1:])

    @cached_property
    def off(self) -> np.ndarray:
        """By how much the outputs are off."""
        return self.y - self.exact

    @cached_property
    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and rows of outputs in a random order."""
        assert self.x is not None
        order = np.random.default_rng(0).permutation(self.off.size)
        return order // self.n_rows, order % self.n_rows

    @cached_property
    def along(self) -> np.ndarray:
        """How the errors follow each value of each block, [R * blocks, values]: of an embedding its own error."""
        followed = self.off if self.x is None else self.off.T @ self.x
        return followed.reshape(len(self.fields.d), -1)


def _read(problem: Problem) -> list[np.ndarray]:
    """The op's inputs, flat, as it rounds them; of one without loops as they were recorded."""
    if problem.has_loops:
        return [problem.operand(i) for i in range(len(problem.loops.own.inputs))]
    held = (problem.held(Read.of(name, past)) for name, past in problem.op.reads)
    return [values for values in held if values is not None]


# --- whose scale a block has ------------------------------------------------------------------------------------------

_What = Literal["scale", "minimum", "scale and minimum"]
WHATS: tuple[_What, ...] = ("scale", "minimum", "scale and minimum")
_Place = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # of row r and block i, where a row has n, as r * n + i


@dataclass(frozen=True, slots=True)
class Shared:
    """A block has the scale, the minimum or both of another of its row, or of another row: `Rule`."""

    what: _What
    whose: str

    def __call__(self, fields: Fields) -> Fields:
        """With those of others. What lies beyond the tensor is read at its other end."""
        return self._taken(fields, fields.d, fields.m, np.arange(len(fields.d)))

    def of(self, seen: _Seen) -> Fields:
        """The fields of the rows that are seen, with those of others, which lie anywhere in the tensor."""
        at = seen.rows[:, None] * seen.fields.row + np.arange(seen.fields.row)
        return self._taken(seen.fields, *seen.of_tensor, at.ravel())

    def _taken(self, fields: Fields, d: np.ndarray, m: np.ndarray | None, at: np.ndarray) -> Fields:
        source = WHOSE[self.whose](at // fields.row, at % fields.row, fields.row) % len(d)
        return replace(
            fields,
            d=fields.d if self.what == "minimum" else d[source],
            m=fields.m if self.what == "scale" or m is None else m[source],
        )

    def words(self, layout: Layout) -> str:
        """As in "block i of a row has the scale of block i ^ 1"."""
        row = "row r" if " r " in self.whose else "a row"
        return f"block i of {row} of {layout.type} has the {self.what} of {self.whose}"


def _of_block(block: Callable[[np.ndarray, int], np.ndarray], by: int = 0) -> _Place:
    """One of the same row, which follows from a number; beyond it lies the next row."""
    return lambda r, i, n: r * n + block(i, by)


WHOSE: Mapping[str, _Place] = MappingProxyType({
    **{f"block i ^ {k}": _of_block(operator.xor, k) for k in (1, 2, 3, 4, 7)},
    **{f"block i / {k} * {k}": _of_block(lambda i, k: i // k * k, k) for k in (2, 4, 8)},
    **{f"block i / {k}": _of_block(operator.floordiv, k) for k in (2, 4, 8)},
    **{f"block i % {k}": _of_block(operator.mod, k) for k in (2, 4, 8)},
    **{f"block i + {k}": _of_block(operator.add, k) for k in (1, 2, 3, 4, 8)},
    **{f"block i - {k}": _of_block(operator.sub, k) for k in (1, 2, 3, 4, 8)},
    "block 0": lambda r, i, n: r * n,
    "block n - 1 - i, of n": lambda r, i, n: r * n + n - 1 - i,
    "block i of row r + 1": lambda r, i, n: (r + 1) * n + i,
    "block i of row r - 1": lambda r, i, n: (r - 1) * n + i,
    "block i of row r ^ 1": lambda r, i, n: (r ^ 1) * n + i,
    "block i of row 0": lambda r, i, n: i,
})  # fmt: skip


# --- which integer is taken for which value ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """Value j of a block has the low bits of value `low[j]`, and the high bits of `high[j]`: `Rule`."""

    low: tuple[int, ...] | None
    high: tuple[int, ...] | None = None

    def __call__(self, fields: Fields) -> Fields:
        """With integers in another order."""
        low, high = fields.low, fields.high
        if self.low:
            low = low.reshape(len(low), -1)[:, list(self.low)].reshape(low.shape)
        if self.high and high is not None:
            high = high.reshape(len(high), -1)[:, list(self.high)].reshape(high.shape)
        return replace(fields, low=low, high=high)

    def words(self, layout: Layout) -> str:
        """Where what is taken for value j lies."""
        low = "ql" if layout.type == "Q6_K" else "qs"  # ggml-common.h
        parts = (
            (self.low, layout.low, layout.low_bits, low),
            (self.high, layout.high, layout.high_bits, "hmask" if layout.type == "Q3_K" else "qh"),
        )
        said = [block_words.of_order(taken, first, n, name) for taken, first, n, name in parts if taken and first]
        return f"in a block of {layout.type}, {'; '.join(said)}"


def _orders(seen: _Seen) -> Iterator[Order]:
    """Those under which what was recorded is larger where it should be, the likeliest first."""
    fields, followed = seen.fields, seen.along * seen.steps
    low = _likely(followed, fields.codes.reshape(followed.shape))
    high = [] if fields.high is None else _likely(followed, fields.high.reshape(followed.shape))
    for taken, taken_high in product([None, *low], [None, *high]):
        if taken or taken_high:
            yield Order(taken, taken_high)


def _likely(followed: np.ndarray, codes: np.ndarray) -> list[tuple[int, ...]]:
    """Orders of the codes [blocks, values] that the error follows best; it follows a code where that is taken, and the
    right one, with the other sign, where it is not.
    """
    n = codes.shape[1]
    each = (followed.T @ (codes - codes.mean(0))).astype(np.float32)
    sources = _sources(n.bit_length() - 1)
    gains = np.zeros(len(sources), np.float32)
    for j in range(n):
        gains += each[j][sources[:, j]] - each[j, j]
    best = np.argsort(-gains, kind="stable")[:_TRIED]
    return [tuple(map(int, sources[i])) for i in best if gains[i] > 0 and gains[i] >= _LIKELY * gains[best[0]]]


@lru_cache(maxsize=4)
def _sources(n_bits: int) -> np.ndarray:
    """Orders of 2^n places, [orders, places], which permute the bits of a place's number, as loops over bytes and their
    halves do that are nested otherwise; of those that exchange two bits at most also with a bit that is 0, 1 or not
    what it was.
    """
    places = np.arange(1 << n_bits, dtype=np.int16)
    bits = places >> np.arange(n_bits, dtype=np.int16)[:, None] & 1
    exchanged = [list(range(n_bits))]
    for a, b in combinations(range(n_bits), 2):
        exchanged.append([{a: b, b: a}.get(k, k) for k in range(n_bits)])
    made = [sum(bits[m] << k for k, m in enumerate(order)) for order in permutations(range(n_bits))]
    for order, k in product(exchanged, range(n_bits)):
        own = sum(bits[m] << k for k, m in enumerate(order))
        made += [own & ~(1 << k), own | 1 << k, own ^ 1 << k]
    return np.stack(made).astype(np.int16)


# --- of which bits scales and minima are made -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfBits:
    """Scales and minima of parts are other sums of the bits of a block: `Rule`."""

    scales: Sums
    minima: Sums

    def __call__(self, fields: Fields) -> Fields:
        """With those so made."""
        bits = fields.bits
        minima = _made(bits, self.minima) if self.minima else fields.minima
        return replace(fields, scales=_made(bits, self.scales), minima=minima)

    def words(self, layout: Layout) -> str:
        """What they are computed with."""
        each = (("scale", self.scales, layout.scales), ("minimum", self.minima, layout.minima))
        said = [text for what, made, right in each for text in block_words.of_sums(what, made, right, layout)]
        return f"in a block of {layout.type}, {'; '.join(said)}"


def _made(bits: np.ndarray, sums: Sums) -> np.ndarray:
    """What they come to, of the bits [blocks, bits of one]: [blocks, parts]. Bit -1 is 1."""
    one = np.ones((len(bits), 1), np.int64)
    extended = np.concatenate((bits.astype(np.int64), one), 1)
    return np.stack([sum((extended[:, bit] * by for bit, by in part), np.zeros_like(one[:, 0])) for part in sums], 1)


def _sums(seen: _Seen) -> OfBits | None:
    """Sums that give what was recorded, as far as that is told."""
    layout = seen.layout
    if not layout.scales:
        return None
    found = _looked_up(seen, layout) if seen.x is None else _solved(seen, layout)
    return found if found and (found.scales, found.minima) != (layout.scales, layout.minima) else None


def _solved(seen: _Seen, layout: Layout) -> OfBits | None:
    """From outputs of a matmul: how much more of each bit is in each scale and minimum than should be."""
    fields, tokens, rows = seen.fields, *seen.sample
    bits = fields.bits[:, layout.header]
    taken = bits.min(0) != bits.max(0)  # the others are as good as a constant
    columns = [*np.array(layout.header)[taken], -1]
    own = np.concatenate((bits[:, taken], np.ones((len(bits), 1), np.uint8)), 1).reshape(seen.n_rows, fields.row, -1)
    each = [_worth(seen, fields.d, fields.integers)]
    if fields.m is not None:
        each.append(fields.sign * _worth(seen, fields.m, np.ones_like(fields.integers)))
    n_unknown = len(columns) * len(layout.scales) * len(each)
    n = min(len(rows), _MOST * n_unknown)
    if n < _SPARE * n_unknown:
        return None
    tokens, rows = tokens[:n], rows[:n]
    matrix = np.zeros((n, n_unknown))
    for some in (slice(at, at + _AT_ONCE) for at in range(0, n, _AT_ONCE)):
        worth = np.concatenate([of[tokens[some], rows[some]] for of in each], 2)  # [outputs, blocks, parts]
        matrix[some] = (worth.swapaxes(1, 2) @ own[rows[some]]).reshape(-1, n_unknown)
    more = _integers(_least_squares(matrix, seen.off[tokens, rows]))
    if more is None:
        return None
    by_part = more.reshape(len(each), len(layout.scales), -1)
    found = [
        tuple(_added(part, columns, by) for part, by in zip(right, of, strict=True))
        for right, of in zip((layout.scales, layout.minima), by_part, strict=False)
    ]
    return OfBits(found[0], found[1] if len(found) > 1 else ())


def _worth(seen: _Seen, bits: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """What one more in the scale of a part adds to each output, [T, R, blocks, parts]."""
    by_row = integers.reshape(seen.n_rows, seen.fields.row, *integers.shape[1:])
    products = np.einsum("ripl,tipl->trip", by_row, seen.inputs, optimize=True)
    return products * seen.fields.read(bits).astype(np.float64).reshape(1, seen.n_rows, -1, 1)


def _least_squares(matrix: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The numbers that the columns of [outputs, unknown] have in the outputs: 0 where nothing tells them."""
    sizes = np.sqrt(np.square(matrix).sum(0))
    scaled = matrix / np.where(sizes > 0, sizes, 1)
    squares = scaled.T @ scaled
    squares[np.diag_indices_from(squares)] += _RIDGE
    return np.asarray(np.linalg.solve(squares, scaled.T @ y) / np.where(sizes > 0, sizes, 1))


def _integers(numbers: np.ndarray, parts: int = 1) -> np.ndarray | None:
    """The nearest that are whole, or so many parts of one; None where there is none near."""
    whole = np.round(numbers * parts)
    return whole / parts + 0.0 if np.abs(numbers * parts - whole).max(initial=0) < _INTEGER else None


def _added(part: Part, columns: Sequence[int], more: np.ndarray) -> Part:
    """A sum with so much more of some bits."""
    total = dict(part)
    for bit, by in zip(columns, more, strict=True):
        total[int(bit)] = total.get(int(bit), 0) + int(by)
    return tuple(sorted((bit, by) for bit, by in total.items() if by))


def _looked_up(seen: _Seen, layout: Layout) -> OfBits | None:
    """From the values of an embedding's rows, which tell each scale and minimum: their bits are some of the block's."""
    fields = seen.fields
    known, told = _scales_of(seen)
    bits = fields.bits[told]
    if len(np.unique(bits[:, layout.header], axis=0)) < _BLOCKS:
        return None
    found = []
    for values, right in zip(known, (layout.scales, layout.minima), strict=False):
        whole = _integers(values[told])
        if whole is None:
            return None
        each = (_of_bits(of, bits, layout.header, part) for of, part in zip(whole.T, right, strict=True))
        parts = tuple(part for part in each if part is not None)
        if len(parts) < len(right):
            return None
        found.append(parts)
    return OfBits(found[0], found[1] if len(found) > 1 else ())


def _scales_of(seen: _Seen) -> tuple[list[np.ndarray], np.ndarray]:
    """The scale of each part, and its minimum, [blocks, parts]; and which blocks tell all of theirs."""
    fields, integers = seen.fields, seen.fields.integers.astype(np.float64)
    values = seen.y.reshape(integers.shape)
    mean = integers.mean(-1, keepdims=True) if fields.m is not None else 0.0
    spread = np.square(integers - mean).sum(-1)
    with np.errstate(all="ignore"):
        slope = ((integers - mean) * values).sum(-1) / spread
        found = [slope / fields.read(fields.d).astype(np.float64)[:, None]]
        if fields.m is not None:
            rest = (values - slope[..., None] * integers).mean(-1)
            found.append(fields.sign * rest / fields.read(fields.m).astype(np.float64)[:, None])
    return found, np.logical_and.reduce([np.isfinite(of).all(1) for of in found])


def _of_bits(numbers: np.ndarray, bits: np.ndarray, header: Sequence[int], right: Part) -> Part | None:
    """Numbers [blocks] as a sum of bits of their blocks, the right ones where these do; None where none does."""
    constant, by_weight = dict(right).get(-1, 0), {abs(by): bit for bit, by in right if bit >= 0}
    left, found = numbers.astype(np.int64) - constant, [(-1, constant)] * bool(constant)
    signs = {abs(by): by for _, by in right}  # of int8 the highest bit is negative
    for k in range(_BYTE):
        sought, own = left >> k & 1, by_weight.get(1 << k, -1)
        nearest = (own, found[-1][0] + 1 if found else own)  # of few blocks several bits are the same
        fitting = [b for b in (*nearest, *header) if b in header and (bits[:, b] == sought).all()]
        if fitting and (sought.any() or fitting[0] == own):
            found.append((fitting[0], signs.get(1 << k, 1 << k)))
        elif sought.any():
            return None
    return tuple(sorted(found))


# --- what is made of some values of all blocks ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scaled:
    """The integer of value j of each block is `times[j]` times what it should be, and `more[j]` more: `Rule`."""

    times: tuple[float, ...]
    more: tuple[float, ...]

    def __call__(self, fields: Fields) -> Fields:
        """With other integers."""
        shape = fields.low.shape[1:]
        times, more = (np.array(of, np.float32).reshape(shape) for of in (self.times, self.more))
        return replace(fields, low=fields.integers * times + more, high=None, table=(), offset=0)

    def words(self, layout: Layout) -> str:
        """Which values, and how they are off."""
        return f"in each block of {layout.type}, {block_words.of_values(layout.integer, self.times, self.more)}"


def _values(seen: _Seen) -> Iterator[Scaled]:
    """Factors that give what was recorded, as far as that is told; offsets that do; and both."""
    each = {"times": seen.steps * seen.fields.integers.reshape(seen.steps.shape), "more": seen.steps}
    for names in (("times",), ("more",), ("times", "more")):
        found = _parts_of_values(seen, [each[name] for name in names])
        if found is not None and found.any():
            none = np.zeros(found.shape[1])
            of = {"times": none, "more": none, **dict(zip(names, found, strict=True))}
            yield Scaled(tuple(map(float, 1 + of["times"])), tuple(map(float, of["more"])))


def _parts_of_values(seen: _Seen, each: list[np.ndarray]) -> np.ndarray | None:
    """How many times each of these, [blocks, values of one], is in the error, [of these, values]."""
    n_blocks, n = each[0].shape
    if seen.x is None:
        if n_blocks < len(each) * _SPARE:
            return None
        off = seen.off.reshape(n_blocks, n)
        columns = [_least_squares(np.stack([of[:, j] for of in each], 1), off[:, j]) for j in range(n)]
        return _integers(np.stack(columns, 1), _PARTS)
    tokens, rows = seen.sample
    n_outputs = min(len(rows), _MOST * len(each) * n)
    if n_outputs < _SPARE * len(each) * n:
        return None
    tokens, rows = tokens[:n_outputs], rows[:n_outputs]
    x = seen.inputs.reshape(len(seen.inputs), -1, n)
    worth = [np.einsum("sin,sin->sn", of.reshape(seen.n_rows, -1, n)[rows], x[tokens], optimize=True) for of in each]
    return _integers(_least_squares(np.concatenate(worth, 1), seen.off[tokens, rows]).reshape(len(each), n), _PARTS)
