"""Runs loops of Python over flat arrays all at once: each loop variable is an axis.

What runs: `for v in range(...)`, assignments to names and to array elements, arithmetic, comparisons, `a if c else b`,
elementary functions, and sum, max, min, first and last of a generator, or all parts of a sum: its upto and onwards, of
the terms before each and from each on, its without and alone, of all but every nth and of these. A sum may be carried
through turns of loops around it: each goes on from the one before. Reads beyond an array give 0, or what is asked for.
Where several iterations store to one element the last one stays, in the order of the loops; where they go on with what
those before left in an array they are run in turn.
"""

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real

import numpy as np

from tracediff.diagnose.solve.loops.arrays import (
    Array,
    CannotRunError,
    Flat,
    Prepared,
    Stored,
    Value,
    check_size,
    contracted,
    interleaved,
    over,
)
from tracediff.diagnose.solve.loops.elementary import COMPARISONS, ELEMENTARY, binary, function, kind
from tracediff.diagnose.solve.loops.lines import Line, line_of, line_through
from tracediff.diagnose.solve.loops.nodes import INTEGER_ARRAYS
from tracediff.diagnose.solve.loops.program import Program
from tracediff.diagnose.solve.loops.turns import OutOfTurnError, Touched

_BEYOND = 4  # times the largest array: so often may be stored, and so far; an engine that goes on crashes
_SHORT = 1 << 16  # turns of loops that take no time
_IN_TURN = 512  # turns that are taken one by one: each takes as long as all at once of few values
_BY_TERMS = 1 << 22  # terms of all sums together that are added up one after the other
_PREPARED = 8  # results of loops that are kept for other runs


@dataclass
class Run:
    """One run of a program, and the last of this object. `dtype` is what its arithmetic is done in; `only` are the
    values that some loop variables are to take, for a look at a part of the output.
    """

    program: Program
    numbers: Mapping[str, float]
    arrays: Mapping[str, Array]
    n_output: int
    dtype: type = np.float64
    only: Mapping[str, np.ndarray] = field(default_factory=dict)
    places_only: bool = False  # whether values do not matter
    before: np.ndarray | None = None  # what the output's buffer held, where it is computed in place
    beyond: float = 0.0  # what is read where an array does not reach: unknown, so results that follow it are
    prepared: dict[object, Prepared] = field(default_factory=dict)  # by earlier runs on the same arrays
    exp: Callable[[Value], Value] = np.exp  # as the engine has it

    def __post_init__(self) -> None:
        self._begin(in_turn=False)

    def _begin(self, in_turn: bool) -> None:
        """Forget what has run; turns that touch what others stored are taken one by one, or all at once."""
        self._names: dict[str, Value] = {"inf": math.inf, **self.numbers}
        self._lines: dict[str, tuple[Value, Line | None]] = {}  # of the values that names have, where it was asked
        self._in_place = self.program.reads_output and not self.places_only
        held = np.zeros(self.n_output if self.program.reads_output else 0) if self.before is None else self.before
        self._output: np.ndarray = held.astype(self.dtype)
        self.went_beyond = False  # whether something was read where an array does not reach
        self._local: dict[str, np.ndarray] = {}
        self._begun: set[ast.stmt] = set()
        self._mask: Value = True
        self._turns = 1
        self._most_turns = _BEYOND * max(self.n_output, _SHORT, *(array.size for array in self.arrays.values()))
        self._stored: list[Stored] = []
        self._in_turn, self._taken = in_turn, 0
        self._touched = Touched(self.n_output) if self._in_place and not in_turn else None

    def stores(self) -> list[Stored]:
        """All stores to the output `y`, those that stay last; raises CannotRunError."""
        stored = self.statements()
        if not self._in_place:
            return stored if self.places_only else interleaved(stored)
        if stored:
            places = np.unique(np.concatenate([one.at for one in stored]))
            places = places[(places >= 0) & (places < self.n_output)]
            return [Stored(places, self._output[places])]
        return []

    def statements(self) -> list[Stored]:
        """What each statement stores to the output; raises CannotRunError."""
        with np.errstate(all="ignore"):
            try:
                self._block(self.program.tree.body)
            except OutOfTurnError:
                self._begin(in_turn=True)
                self._block(self.program.tree.body)
        return self._stored

    # --- statements

    def _block(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.For() if self.places_only and not self.program.stores_output(node):
                    pass
                case ast.For() if node in self.program.preparing and node not in self._begun:
                    self._prepare(node)
                case ast.For(target=ast.Name(id=name), iter=counted, body=inner):
                    with self._loop(name, counted) as (any_left, _):
                        if any_left and self._is_in_turns(name, node):
                            self._one_by_one(name, inner)
                        elif any_left:
                            self._block(inner)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if not self.places_only or name in self.program.placing:
                        line = line_of(value, self._line)  # before the name, which may be in it, has another value
                        self._names[name] = self.value(value)
                        if line:
                            self._lines[name] = self._names[name], line
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=at)], value=value):
                    if not self.places_only:
                        self._store(name, self.value(at), self.value(value))
                    elif name == "y":
                        self._store(name, self.value(at), 0.0)
                case ast.Pass():
                    pass
                case _:
                    raise CannotRunError(ast.unparse(node))

    def _is_in_turns(self, name: str, node: ast.For) -> bool:
        """Whether the turns of a loop read what others stored."""
        in_turn = self._in_turn and node in self.program.around_output
        reads_output = self._in_place and (in_turn or node in self.program.in_sequence)
        return reads_output or (not self.places_only and name in self.program.recurring)

    def _prepare(self, node: ast.For) -> None:
        """Runs a loop that stores to arrays of its own, or takes these from another run of it."""
        self._begun.add(node)
        text, names = self.program.preparing[node]
        read = [self.arrays.get(name) for name in sorted(names)]
        values = tuple(self._names.get(name) for name in sorted(names))
        key = text, values, tuple(map(id, read)), self.dtype, self.beyond
        is_told = all(isinstance(value, Real | None) for value in values)  # in loops of several turns it is not
        known = self.prepared.get(key) if is_told else None
        if known is None:
            went_before, self.went_beyond = self.went_beyond, False
            self._block([node])
            known = Prepared(dict(self._local), self.went_beyond, read)
            self.went_beyond = went_before
            if is_told and len(self.prepared) < _PREPARED:
                self.prepared[key] = known
        self._local = dict(known.local)
        self.went_beyond |= known.beyond

    def _one_by_one(self, name: str, inner: list[ast.stmt]) -> None:
        """A loop whose turns read what others stored."""
        values = self._names[name]
        for value in values.ravel():
            self._taken += self._in_turn
            if self._taken > _IN_TURN:
                raise CannotRunError("too many turns")
            self._names[name] = np.full((1,) * self._rank, value)
            self._block(inner)
        self._names[name] = values

    @contextmanager
    def _loop(self, name: str, counted: ast.expr, whole: bool = False) -> Iterator[tuple[bool, Value]]:
        values, inside = self._range(name, counted, whole)
        before = self._names.get(name), self._mask, self._turns
        self._turns *= 1 if whole else max(1, values.size)
        self._names[name] = values
        self._mask = inside if self._mask is True else self._mask & inside if inside is not True else self._mask
        try:
            yield values.size > 0, inside
        finally:
            if before[0] is None:
                del self._names[name]
            else:
                self._names[name] = before[0]
            self._mask, self._turns = before[1:]

    def _range(self, name: str, counted: ast.expr, whole: bool) -> tuple[np.ndarray, Value]:
        """The values that a loop variable takes, along its axis, and for which of the outer ones it takes them."""
        if not (isinstance(counted, ast.Call) and isinstance(counted.func, ast.Name) and counted.func.id == "range"):
            raise CannotRunError(ast.unparse(counted))
        bounds = [self.value(argument) for argument in counted.args]
        start, end, step = [0, *bounds, 1] if len(bounds) == 1 else [*bounds, 1][:3]
        if not isinstance(step, int) or step < 1 or any(kind(bound) == "f" for bound in (start, end)):
            raise CannotRunError("steps")
        low = start if isinstance(start, int) else int(np.min(start))
        high = end if isinstance(end, int) else int(np.max(end))
        outer = 1 if whole or name in self.only else self._turns
        if (high - low) * outer > self._most_turns * step:
            raise CannotRunError("too long")
        values = np.arange(low, high, step)
        if name in self.only and not whole:
            wanted = self.only[name]  # in order, each once; np.intersect1d takes milliseconds
            if name in self.program.recurring:
                wanted = np.arange(low, wanted.max(initial=low - 1) + 1)
            values = wanted[(wanted >= low) & (wanted < high) & ((wanted - low) % step == 0)]
        values = values.reshape([-1 if axis == self.program.axes[name] else 1 for axis in range(self._rank)])
        if not isinstance(start, np.ndarray) and not isinstance(end, np.ndarray):
            return values, True
        return values, (values >= start) & (values < end)

    @property
    def _rank(self) -> int:
        return len(self.program.axes)

    def _store(self, name: str, at: Value, value: Value) -> None:
        if kind(at) == "f":
            raise CannotRunError("an index is no integer")
        loops = {v: self._names[v] for v in self.program.axes if isinstance(self._names.get(v), np.ndarray)}
        shape = np.broadcast_shapes(*(np.shape(x) for x in (at, value, self._mask, *loops.values())))
        kept = None if self._mask is True else np.flatnonzero(np.broadcast_to(self._mask, shape))

        def spread(x: Value) -> np.ndarray:
            flat = np.broadcast_to(x, shape).ravel()
            return flat if kept is None else flat[kept]

        places = spread(at)
        values = places if self.places_only else spread(np.asarray(value, self.dtype))
        if name != "y":
            self._keep(name, places, values)
            return
        self._stored.append(Stored(places, values, loops, shape, kept))
        if self._in_place:
            inside = (places >= 0) & (places < self.n_output)
            if self._touched:
                self._touched.store(places, spread(self._turn()))
            self._output[places[inside]] = values[inside]

    def _keep(self, name: str, places: np.ndarray, values: np.ndarray) -> None:
        """In an array of the loops' own, as long as it is stored to."""
        inside = places >= 0
        places, values = places[inside], values[inside]
        needed = int(places.max(initial=-1)) + 1
        if needed > self._most_turns:
            raise CannotRunError("too long")
        array = self._local.get(name)
        if array is None:  # of a state the loops go on with what is handed to them
            given = self.arrays.get(name)
            array = np.zeros(0) if given is None else given.between(0, given.size)
            array = array.astype(self.dtype)
        array = np.concatenate((array, np.zeros(max(0, needed - array.size), self.dtype)))
        array[places] = values
        self._local[name] = array

    def _turn(self) -> np.ndarray:
        """A number for each turn of the loops around all that touches the output."""
        turn: np.ndarray = np.zeros((1,) * self._rank, int)
        for loop in self.program.around_output:
            assert isinstance(loop.target, ast.Name)
            values = self._names[loop.target.id]
            turn = turn * (int(values.max(initial=0)) + 1) + values
        return turn

    # --- expressions

    def value(self, node: ast.expr) -> Value:
        """What an expression gives."""
        match node:
            case ast.Constant(value=number):
                return number
            case ast.Name(id=name):
                if name not in self._names:
                    raise CannotRunError(name)
                return self._names[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return binary(op, self.value(left), self.value(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return COMPARISONS[type(op)](self.value(left), self.value(right))
            case ast.IfExp(test=test, body=a, orelse=b):
                test, a, b = self.value(test), self.value(a), self.value(b)
                return np.where(test, *(np.asarray(x, self.dtype) for x in (a, b)))
            case ast.Subscript(value=ast.Name(id=name), slice=at):
                return self._read(name, at)
            case ast.Call(func=ast.Name(id=name), args=[ast.GeneratorExp() as generator]):
                return self._reduced(name, generator)
            case ast.Call(func=ast.Name(id="carried"), args=[ast.Call() as each, *loops]):
                return self._carried(each, [loop.id for loop in loops if isinstance(loop, ast.Name)])
            case ast.Call(func=ast.Name(id=name), args=[argument]) if name in ELEMENTARY:
                return function(self.exp if name == "exp" else ELEMENTARY[name], self.value(argument), self.dtype)
        raise CannotRunError(ast.unparse(node))

    def _line(self, name: str) -> Line | None:
        """Of a name that is linear in the loop variables."""
        value = self._names.get(name)
        known, line = self._lines.get(name, (None, None))
        if known is not value:
            line = line_through(value)
            self._lines[name] = value, line
        return line

    def _read(self, name: str, node: ast.expr) -> Value:
        own = self._output if name == "y" else self._local.get(name)
        array = self.arrays.get(name) if own is None else Flat(own)
        if array is None:
            raise CannotRunError(name)
        if own is None and (line := line_of(node, self._line)) and (values := line.of(array)) is not None:
            return self._typed(values)
        at: np.ndarray = np.asarray(self.value(node))
        if kind(at) == "f":
            raise CannotRunError("an index is no integer")
        if name == "y" and self._touched:
            self._touched.read(at, self._turn())
        if not at.size or not array.size:
            self.went_beyond |= bool(at.size)
            return self._beyond(at).astype(self.dtype)
        if at.min() >= 0 and at.max() < array.size:
            values = array.take(at)
        else:
            self.went_beyond = True
            inside = (at >= 0) & (at < array.size)
            values = np.where(inside, array.take(np.where(inside, at, 0)), self._beyond(at))
            values = values if name not in INTEGER_ARRAYS else values.astype(int)
        return self._typed(values)

    def _beyond(self, at: np.ndarray) -> np.ndarray:
        """Other numbers at other places: of like ones a softmax makes what it makes of zeros."""
        return self.beyond * (1.0 + at % 7)

    def _typed(self, values: np.ndarray) -> np.ndarray:
        return values if kind(values) == "i" else values.astype(self.dtype, copy=False)

    def _reduced(self, how: str, generator: ast.GeneratorExp) -> Value:
        loop = generator.generators[0]
        assert isinstance(loop.target, ast.Name)
        name, axis = loop.target.id, self.program.axes[loop.target.id]
        with self._loop(name, loop.iter, whole=True) as (any_left, inside):
            if not any_left:
                return {"max": -math.inf, "min": math.inf}.get(how, 0.0)
            inside = None if inside is True else inside
            if how == "sum" and inside is None:
                return self._sum(generator.elt, axis)
            terms: np.ndarray = np.asarray(self.value(generator.elt), self.dtype)
            shapes = (terms.shape, self._names[name].shape, np.shape(inside) if inside is not None else ())
            return over(how, np.broadcast_to(terms, np.broadcast_shapes(*shapes)), axis, inside)

    def _sum(self, node: ast.expr, axis: int) -> Value:
        """A sum of products factor by factor, without the array of all terms; of sums and differences term by term."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            return binary(node.op, self._sum(node.left, axis), self._sum(node.right, axis))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            a: np.ndarray = np.asarray(self.value(node.left), self.dtype)
            b: np.ndarray = np.asarray(self.value(node.right), self.dtype)
            b = 1 / b if isinstance(node.op, ast.Div) else b
            return contracted(a, b, axis, self._length(axis))
        terms: np.ndarray = np.asarray(self.value(node), self.dtype)
        return over("sum", np.broadcast_to(terms, self._along(terms, axis)), axis, None)

    def _carried(self, node: ast.Call, loops: Sequence[str]) -> Value:
        """A sum that goes on in every turn of these loops, the outermost first, and is never set to 0 in between."""
        if self._in_turn or self._mask is not True or not self.only.keys().isdisjoint(loops):
            raise CannotRunError("turns that are not all taken at once")
        generator = node.args[0]
        # Another edit of these loops may have changed the sum, or the names of the loops.
        if not isinstance(generator, ast.GeneratorExp) or not self.program.axes.keys() >= set(loops):
            raise CannotRunError("turns of what is no loop")
        loop = generator.generators[0]
        assert isinstance(loop.target, ast.Name)
        with self._loop(loop.target.id, loop.iter, whole=True) as (any_left, inside):
            if not any_left or inside is not True:
                raise CannotRunError("a sum of other terms in each turn")
            axes = [self.program.axes[name] for name in (*loops, loop.target.id)]
            # In float32 each term is rounded to the sum so far, however small the sum of its own turn.
            one_by_one = self.dtype == np.float32 and self._turns * self._length(axes[-1]) <= _BY_TERMS
            each: np.ndarray = np.asarray(self.value(generator.elt if one_by_one else node), self.dtype)
            shape = list(each.shape or (1,) * self._rank)
            for axis in axes if one_by_one else axes[:-1]:
                shape[axis] = self._length(axis)
        check_size(tuple(shape))
        last = range(self._rank - len(axes), self._rank)
        turns = np.moveaxis(np.broadcast_to(each, shape), axes, last)
        sums = turns.reshape(*turns.shape[: last.start], -1).cumsum(-1).reshape(turns.shape)[..., -1:]
        return np.moveaxis(sums, last, axes)

    def _length(self, axis: int) -> int:
        name = next(v for v, a in self.program.axes.items() if a == axis)
        return int(self._names[name].size)

    def _along(self, terms: np.ndarray, axis: int) -> list[int]:
        shape = list(terms.shape or (1,) * self._rank)
        shape[axis] = self._length(axis)
        return shape
