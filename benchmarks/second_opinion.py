"""A second implementation of what the solver claims: its edited loops in C, run on the trace's own values.

The solver runs loops of Python all at once over numpy arrays, and looks at samples first. Here the same loops are
written as C, one iteration after the other in double precision, and compiled; what they store must be what the engine
recorded. Maps, functions and readings of weights are done over by a line of numpy each.
"""

import ast
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from tracediff.diagnose.hypothesis import SOLVED, Hypothesis
from tracediff.diagnose.solve.by_value.caches import Overlapping
from tracediff.diagnose.solve.by_value.functions import Mapped
from tracediff.diagnose.solve.by_value.maps import Map
from tracediff.diagnose.solve.by_value.operands import MovedInput
from tracediff.diagnose.solve.by_value.outputs import MovedOutput
from tracediff.diagnose.solve.by_value.parts import Excepting, InRegion
from tracediff.diagnose.solve.by_value.readings import Reading
from tracediff.diagnose.solve.by_value.rotations import Rates
from tracediff.diagnose.solve.edit import OtherTensor, Reworked
from tracediff.diagnose.solve.loops.kernels import loops_of
from tracediff.model.graph import Graph, Op, Weight
from tracediff.model.weights import Weights
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace

_NEAR = 1e-9  # NMSE: sums in float32 leave less, a claim that is wrong leaves more
_TOLD = 0.25  # of all values: where fewer can be told, nothing was tested
_CACHE = 1 << 22  # values that a cache may have
_BEYOND = 0.417  # what is read beyond an array: values that follow it are nobody's to tell

_HEAD = """
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
typedef struct { double *p; long n; } array;
static double beyond;
static double rd(array a, long i) { return i >= 0 && i < a.n ? a.p[i] : beyond; }
static long rdi(array a, long i) { return i >= 0 && i < a.n ? (long)a.p[i] : (long)beyond; }
static void st(array a, long i, double v) { if (i >= 0 && i < a.n) a.p[i] = v; }
static long fdiv(long a, long b) { if (!b) exit(3); long q = a / b; return a % b && (a < 0) != (b < 0) ? q - 1 : q; }
static long fmod_(long a, long b) { return a - fdiv(a, b) * b; }
static array load(const char *path) {
    FILE *f = fopen(path, "rb"); array a; fseek(f, 0, SEEK_END); a.n = ftell(f) / 8; rewind(f);
    a.p = malloc(a.n * 8 + 8); if (fread(a.p, 8, a.n, f) != (size_t)a.n) exit(4); fclose(f); return a;
}
"""
Function = Callable[[np.ndarray], np.ndarray]
_INTEGERS = ("tokens", "positions", "past", "starts")


class _C(ast.NodeVisitor):
    """Writes loops as C. Names are integers or doubles by what is assigned to them."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        self.integers = {name for name, value in numbers.items() if isinstance(value, int)}
        self.lines: list[str] = []
        self.arrays: set[str] = set()
        self.own: set[str] = set()  # that the loops store to, besides the output

    def integer(self, node: ast.expr) -> bool:
        match node:
            case ast.Constant(value=value):
                return isinstance(value, int)
            case ast.Name(id=name):
                return name in self.integers
            case ast.Subscript(value=ast.Name(id=name)):
                return name in _INTEGERS
            case ast.BinOp(left=a, op=op, right=b):
                return not isinstance(op, ast.Div | ast.Pow) and self.integer(a) and self.integer(b)
            case ast.UnaryOp(operand=a):
                return self.integer(a)
        return False

    def expression(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=value):
                return f"{value}" if isinstance(value, int) else repr(float(value))  # type: ignore[arg-type]
            case ast.Name(id="inf"):
                return "INFINITY"
            case ast.Name(id=name):
                return name
            case ast.UnaryOp(operand=a):
                return f"(-{self.expression(a)})"
            case ast.BinOp(left=a, op=op, right=b):
                return self.operation(op, a, b)
            case ast.Compare(left=a, ops=[op], comparators=[b]):
                sign = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}[type(op)]
                return f"({self.expression(a)} {sign} {self.expression(b)})"
            case ast.IfExp(test=t, body=a, orelse=b):
                return f"({self.expression(t)} ? {self.expression(a)} : {self.expression(b)})"
            case ast.Subscript(value=ast.Name(id=name), slice=at):
                self.arrays.add(name)
                return f"{'rdi' if name in _INTEGERS else 'rd'}({name}_, {self.expression(at)})"
            case ast.Call(func=ast.Name(id=how), args=[ast.GeneratorExp(elt=term, generators=[loop])]):
                return self.reduction(how, term, loop)
            case ast.Call(func=ast.Name(id=name), args=[a]):
                return f"{'fabs' if name == 'abs' else name}({self.expression(a)})"
        raise NotImplementedError(ast.unparse(node))

    def operation(self, op: ast.operator, a: ast.expr, b: ast.expr) -> str:
        x, y = self.expression(a), self.expression(b)
        match op:
            case ast.FloorDiv():
                return f"fdiv({x}, {y})"
            case ast.Mod():
                return f"fmod_({x}, {y})"
            case ast.Pow():
                return f"pow({x}, {y})"
            case ast.Div():
                return f"((double)({x}) / ({y}))"
        sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(op)]
        return f"({x} {sign} {y})"

    def reduction(self, how: str, term: ast.expr, loop: ast.comprehension) -> str:
        assert isinstance(loop.target, ast.Name)
        self.integers.add(loop.target.id)
        start = {"max": "-INFINITY", "min": "INFINITY"}.get(how, "0")
        head, inner = self.loop(loop.target.id, loop.iter), self.expression(term)
        then = {"sum": "RR += VV", "max": "RR = fmax(RR, VV)", "min": "RR = fmin(RR, VV)", "last": "RR = VV",
                "first": "if (!KK++) RR = VV"}[how]  # fmt: skip
        return f"({{ double RR = {start}; long KK = 0; (void)KK; {head} {{ double VV = {inner}; {then}; }} RR; }})"

    def loop(self, name: str, counted: ast.expr) -> str:
        assert isinstance(counted, ast.Call)
        bounds = [self.expression(a) for a in counted.args]
        start, end, step = ["0", *bounds, "1"] if len(bounds) == 1 else [*bounds, "1"][:3]
        return f"for (long {name} = {start}, e_{name} = {end}; {name} < e_{name}; {name} += {step})"

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.For(target=ast.Name(id=name), iter=counted, body=body):
                self.integers.add(name)
                self.lines.append(self.loop(name, counted) + " {")
                for inner in body:
                    self.statement(inner)
                self.lines.append("}")
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                kind = "long" if self.integer(value) else "double"
                self.integers = self.integers | {name} if kind == "long" else self.integers - {name}
                self.lines.append(f"{kind} {name} = {self.expression(value)};")
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=at)], value=value):
                self.own |= {name} - {"y"}
                self.lines.append(f"st({name}_, {self.expression(at)}, {self.expression(value)});")


def run(
    source: str, numbers: Mapping[str, float], arrays: Mapping[str, np.ndarray], n: int, folder: Path
) -> np.ndarray:
    """What the loops store to an output of `n` values, twice: where nothing is beyond the arrays, and something."""
    writer = _C(numbers)
    for node in ast.parse(source).body:
        writer.statement(node)
    body = [f"beyond = c > 1 ? {_BEYOND} : 0; array y_ = {{calloc({n}, 8), {n}}};"]
    body += [f"array {name}_ = {{calloc({_CACHE}, 8), {_CACHE}}};" for name in sorted(writer.own)]
    for name in sorted((writer.arrays | ({"before"} & arrays.keys())) - {"y"} - writer.own):
        path = folder / f"{name}.f64"
        path.write_bytes(arrays.get(name, np.zeros(0)).astype(np.float64).tobytes())
        body.append(f'array {name}_ = load("{path}");')
    if "before" in arrays:
        body.append(f"for (long i = 0; i < {n} && i < before_.n; i++) y_.p[i] = before_.p[i];")
    for name, value in numbers.items():
        body.append(f"{'long' if isinstance(value, int) else 'double'} {name} = {value!r}; (void){name};")
    main = ["int main(int c, char **v) {", *body, *writer.lines, f"fwrite(y_.p, 8, {n}, stdout); return 0; }}"]
    (folder / "claim.c").write_text("\n".join([_HEAD, *main]))
    program = str(folder / "claim")
    subprocess.run(["gcc", "-O2", "-w", f"{program}.c", "-o", program, "-lm"], check=True)
    made = [subprocess.run([program, *more], capture_output=True, check=True).stdout for more in ([], ["beyond"])]
    return np.stack([np.frombuffer(one, np.float64) for one in made])


class Opinion:
    """Tests claims about the records of one trace."""

    def __init__(self, trace: Trace, graph: Graph, weights: Weights, folder: Path) -> None:
        self._trace, self._graph, self._weights, self._folder = trace, graph, weights, folder
        folder.mkdir(exist_ok=True)

    def of(self, claim: Hypothesis, record: OpRecord) -> bool | None:
        """Whether the claim gives what was recorded; None of one that is not tested here: a known mistake, or one of
        which too little can be told.
        """
        if claim.parts[-1].mistake != SOLVED or len(claim.local.segment) > 1:
            return None
        made = self._made(claim.ops[0], record)
        if made is None:
            return None
        y = self._trace.values(record).astype(np.float64).ravel()
        same = (made[0] == made[1]) | (np.isnan(made[0]) & np.isnan(made[1]))
        if same.mean() < _TOLD:
            return None
        a, b = y[same], made[0][same].astype(np.float32).astype(np.float64)
        if (np.isnan(a) != np.isnan(b)).any() or (np.isinf(a) != np.isinf(b)).any():
            return False
        finite = np.isfinite(a)
        return bool(np.square(a[finite] - b[finite]).sum() <= _NEAR * max(np.square(a[finite]).sum(), 1e-30))

    def _made(self, op: Op, record: OpRecord) -> np.ndarray | None:
        right = self._graph[op.name]
        match op.rework:
            case InRegion(region=region, outside=outside, inside=inside):
                out, within = self._made(outside, record), self._made(inside, record)
                shape = self._trace.values(record).shape
                return None if out is None or within is None else np.where(region.mask(shape).ravel(), within, out)
            case Excepting(channels=channels):
                made = self._made(replace(op.reading_only(len(op.inputs) - 1), rework=None), record)
                if made is not None:
                    made[1].reshape(self._trace.values(record).shape[0], -1)[:, list(channels)] += (
                        1  # of nobody knows what
                    )
                return made
            case MovedOutput(map=how, axis=axis, shape=shape):
                plain, own = self._made(right, record), self._trace.values(record).shape
                if plain is None:
                    return None
                return np.stack([_moved(y.reshape(own), how, axis, shape).ravel() for y in plain])
            case MovedInput(position=position, map=how, axis=axis, shape=shape):
                return self._by_loops(right, right, record, {position: lambda x: _moved(x, how, axis, shape)})
            case Overlapping(layer=layer, layers=layers, apart=apart):
                names = {**dict(zip(layers, op.inputs[2:], strict=False)), layer: op.inputs[1]}
                return self._by_loops(right, right, record, {1: lambda _: self._written(names, apart, layer, record)})
            case Mapped(name=name, numbers=numbers, operand=int(operand)):
                return self._by_loops(right, right, record, {operand: lambda x: _function(name, x, numbers)})
            case Mapped(name=name, numbers=numbers):
                plain = self._made(right, record)
                return None if plain is None else _function(name, plain, numbers)
        if isinstance(op.function, partial) and isinstance(rates := op.function.keywords.get("angles"), Rates):
            return self._turning(right, rates.times, record)
        return self._by_loops(op, right, record)

    def _turning(self, right: Op, times: Sequence[float], record: OpRecord) -> np.ndarray:
        """Rope whose pairs turn so many times as fast as they should."""
        x, positions = (self._value(name, False, record.step) for name in right.inputs)
        n_heads, width = right.axes[1:]
        assert isinstance(n_heads, int)
        assert isinstance(width, int)
        y = x.reshape(len(positions), n_heads, width).copy()
        rope, x = right.attrs["rope"], y.copy()
        factors = self._weight(right.weights[0]) if right.weights else np.ones(len(times))
        for i, (rate, factor) in enumerate(zip(times, factors, strict=True)):
            a, b = (2 * i, 2 * i + 1) if rope.pairing == "neighbours" else (i, i + rope.n_rot // 2)
            angle = rate * rope.freq_scale * positions * rope.theta ** (-2 * i / rope.n_rot) / factor
            cos, sin, a, b = np.cos(angle)[:, None], np.sin(angle)[:, None], a + rope.first, b + rope.first
            y[..., a], y[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
        return np.stack([y.ravel(), y.ravel()])

    def _by_loops(
        self, op: Op, right: Op, record: OpRecord, mapped: Mapping[int, Function] = MappingProxyType({})
    ) -> np.ndarray | None:
        names, past = right.inputs, right.past or (False,) * len(right.inputs)
        inputs = [self._value(name, when, record.step) for name, when in zip(names, past, strict=True)]
        for i, function in mapped.items():
            inputs[i] = function(inputs[i])
        loops = loops_of(right, [x.shape for x in inputs])
        if loops is None or any(x is None for x in inputs):
            return None
        rework = op.rework if isinstance(op.rework, Reworked) else Reworked(loops.source, len(names))
        arrays = dict(zip(loops.inputs, (x.ravel() for x in inputs), strict=False))
        for name, weight in zip(loops.weights, op.weights, strict=False):
            arrays[name] = self._weight(weight)
        steps = [number for number in self._trace.steps if number <= record.step]
        sizes = [len(self._trace.steps[number].tokens) for number in steps]
        arrays["past"] = np.repeat(sum(sizes[:-1]), sizes[-1])
        arrays["starts"] = np.concatenate([np.repeat(sum(sizes[:i]), n) for i, n in enumerate(sizes)])
        for name, read, when in zip(rework.extra, op.inputs[len(names) :], op.past[len(names) :], strict=False):
            if name not in ("past", "starts", "recorded"):
                arrays[name] = self._value(read, when, record.step).ravel()
        n = int(np.prod(loops.shape))
        return run(rework.source, {**loops.numbers, **dict(rework.numbers)}, arrays, n, self._folder)

    def _written(self, names: Mapping[int, str], apart: int, layer: int, record: OpRecord) -> np.ndarray:
        """What a layer reads of one memory into which layers write in turn, each `apart` values after the last."""
        memory, n = np.zeros(0), 0
        for number in (number for number in self._trace.steps if number <= record.step):
            for each in sorted(names):
                rows = self._trace.values(self._trace.ops[number, names[each]])
                at = each * apart + n * rows[0].size
                memory = np.concatenate((memory, np.zeros(max(0, at + rows.size - memory.size))))
                memory[at : at + rows.size] = rows.ravel()
                if (number, each) == (record.step, layer):
                    n += len(rows)
                    return memory[layer * apart :][: n * rows[0].size].reshape(n, *rows.shape[1:])
            n += len(rows)
        raise AssertionError(record)

    def _weight(self, weight: Weight) -> np.ndarray:
        values = self._weights.load(replace(weight, read=None)).double().numpy().ravel()
        if isinstance(weight.read, OtherTensor):
            return self._flat(weight.read.name)
        if isinstance(weight.read, Reading):
            table = values.reshape(-1, weight.shape[1] if len(weight.shape) > 1 else 1).copy()
            for run_ in weight.read.rows:
                other = self._flat(run_.tensor) if run_.tensor else np.zeros(0)
                for k, row in enumerate(range(run_.first, run_.last + 1)):
                    for i in range(table.shape[1]):
                        at = run_.start + run_.step * k + i
                        table[row, i] = other[at] if 0 <= at < len(other) else 0
            for row, column, value in weight.read.elements:
                table[row, column] = value
            return table.ravel()
        return values

    def _flat(self, name: str) -> np.ndarray:
        return self._weights.load(Weight(name, self._weights.file.tensors[name].shape)).double().numpy().ravel()

    def _value(self, name: str, when: object, step: int) -> np.ndarray:
        if name == "tokens":
            return np.array(self._trace.steps[step].tokens)
        if name == "positions":  # those that follow: what the engine says of them may be its mistake
            first = next(iter(self._trace.steps.values())).positions[0] + self._trace.n_before(step)
            return first + np.arange(len(self._trace.steps[step].tokens))
        steps = [number for number in self._trace.steps if number <= step]
        if when is False:
            return self._trace.values(self._trace.ops[step, name])
        if when is True:
            return np.concatenate([self._trace.values(self._trace.ops[number, name]) for number in steps])
        held = np.zeros(0)
        for number in steps[:-1]:
            value = self._trace.values(self._trace.ops[number, name]).ravel()
            held = np.concatenate((value, held[value.size :]))
        return held


def _moved(x: np.ndarray, how: Map, axis: int, shape: tuple[int, ...]) -> np.ndarray:
    seen = x.reshape(shape) if shape else x
    source = how.of(seen.shape[axis])
    none = np.expand_dims(source, [a for a in range(seen.ndim) if a != axis]) < 0
    return np.where(none, 0.0, np.take(seen, source, axis)).reshape(x.shape)


def _function(name: str, x: np.ndarray, numbers: tuple[float, ...]) -> np.ndarray:
    match name, numbers:
        case "above", (c,):
            return np.minimum(x, c)
        case "below", (c,):
            return np.maximum(x, c)
        case "within", (low, high):
            return np.minimum(np.maximum(x, low), high)
        case "cap", (c,):
            return c * np.tanh(x / c)
        case "linear", (a, b):
            return a * x + b
        case "power", (p,):
            return np.sign(x) * np.abs(x) ** p
    return np.abs(x) if name == "absolute" else x * x


torch.set_grad_enabled(False)
