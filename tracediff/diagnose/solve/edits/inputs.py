"""Another input: any other value of the trace, of this step or of earlier ones, where one of the op's own belongs."""

import ast
import math
from collections.abc import Iterator

import numpy as np

from tracediff.diagnose.solve.edit import Edit, Priced, Read, input_words
from tracediff.diagnose.solve.problem import Problem
from tracediff.names import local_name

_LOOK = "which buffer is passed to it"
_SUM = "the order of norm and residual, and which buffer is passed to it"
_CACHE = "where each layer's K and V begin in the cache, and what else is written there"
_TRANSPOSED = "the layout of the cache: how the prompt writes it, and how decode steps read it"
_CACHED = ("attn_k", "attn_k_norm", "attn_k_rope", "attn_v")  # what engines cache, or may by mistake


def variants(problem: Problem) -> Iterator[Priced]:
    """One input of the op is another value of the trace, read as flat numbers with the op's own strides."""
    loops, op = problem.loops.own, problem.op
    others = problem.others
    bits = math.log2(max(2, len(others) * len(loops.inputs)))
    verb = "adds" if op.kind == "add" else "reads"
    for position, (name, (belongs, past)) in enumerate(zip(loops.inputs, op.reads, strict=False)):
        if belongs in ("tokens", "positions"):
            continue
        for other in (*_so_far(problem), *others) if past is True else others:
            if other.name != belongs or other.when == "before":
                words = f"{verb} {other.words(op)} where {input_words(op, position)} belongs"
                yield Priced(Edit(words, problem.loops.source, arrays=((name, other),)), bits, _LOOK)
        yield from _sums(problem, name, belongs, bits + 1)


def _so_far(problem: Problem) -> Iterator[Read]:
    """Values over all steps, as a cache may hold them: a row of each token."""
    for name in problem.earlier:
        axes = problem.graph[name].axes if name in problem.graph else ()
        if axes[:1] == ("T",) and all(isinstance(axis, int) for axis in axes[1:]):
            yield Read(name, "all")


def _sums(problem: Problem, name: str, belongs: str, bits: float) -> Iterator[Priced]:
    """Another value as large is added to what the op reads, as where a norm comes after the residual is added."""
    op, own = problem.op, problem.held(Read(belongs))
    if own is None or op.kind == "add" or op.views:  # of what is read in part values lie elsewhere
        return
    both = ast.unparse(_Added(name).visit(ast.parse(problem.loops.source)))
    for other in (read for read in problem.others if read.when == "now" and read.name != belongs):
        values = problem.held(other)
        if values is not None and values.size == own.size:
            words = f"reads {Read(belongs).words(op)} + {other.words(op)} where {Read(belongs).words(op)} belongs"
            yield Priced(Edit(words, both, arrays=(("other", other),)), bits, _SUM)


def _transposed(problem: Problem, right: str, name: str) -> Iterator[Priced]:
    """What the first step cached lies with its heads first and is read with its tokens first, or the reverse."""
    loops, value = problem.loops, Read(problem.op.inputs[1]).words(problem.op)
    first = int((problem.array("starts") == 0).sum())
    orders = "[heads, tokens, channels]", "[tokens, heads, channels]"
    at = "(c * width + i)"
    places = f"{at} // D % {first} * width + {at} // ({first} * D) * D + i % D", f"(i // D * {first} + c) * D + i % D"
    for place, lies, read in zip(places, orders, reversed(orders), strict=True):
        words = f"cached {value}, of the first step, lies as {lies} and is read as {read}"
        source = loops.source.replace(right, f"{right} if starts[c] > 0 else {name}[{place}]")
        yield Priced(Edit(words, source), 4.0, _TRANSPOSED)


class _Added(ast.NodeTransformer):
    """`other` is added to an array wherever it is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """The sum of two where it is one of the array's."""
        self.generic_visit(node)
        if not (isinstance(node.value, ast.Name) and node.value.id == self._name and isinstance(node.ctx, ast.Load)):
            return node
        return ast.BinOp(node, ast.Add(), ast.Subscript(ast.Name("other", ast.Load()), node.slice, ast.Load()))


def cached(problem: Problem) -> Iterator[Priced]:
    """What an op reads from the cache of earlier steps is another value: of another layer, or of another buffer that
    these steps wrote; or 0. Or what steps after the first wrote to it is: a prompt has other kernels. Or that is lost
    when these are over.
    """
    op, loops = problem.op, problem.loops
    name = {"scores": "k", "weighted_values": "v"}.get(op.kind, "")
    if not name or "past" not in loops.arrays or not loops.arrays["past"].take(np.array([0]))[0]:
        return
    own = op.inputs[1]
    right, place = f"= {name}[c * width + i]", "c * width + i"
    earlier = f"cached {Read(own).words(op)}, of steps before this,"
    decoded = f"cached {Read(own).words(op)}, of steps after the first,"
    lost = f"cached {Read(own).words(op)}, of steps after the first and before this,", "starts[c] * (c < past[0]) == 0"
    for what, kept in ((earlier, "c >= past[0]"), (decoded, "starts[c] == 0"), lost):
        source = loops.source.replace(right, f"{right} if {kept} else 0")
        yield Priced(Edit(f"{what} counts as 0", source), 4.0, _CACHE)
    yield from _transposed(problem, right, name)
    cached_ = [Read(reader.name, "all") for reader in problem.graph if local_name(reader.name) in _CACHED]
    # Buffers end before this step: of its own positions they say nothing.
    buffers = [Read(name, "before") for name in problem.names]
    for what, kept, others in ((earlier, "c >= past[0]", cached_ + buffers), (decoded, "starts[c] == 0", cached_)):
        for other in (read for read in others if read.name != own):
            source = loops.source.replace(right, f"{right} if {kept} else other[{place}]")
            words = f"{what} is {Read(other.name).words(op)}"
            yield Priced(Edit(words, source, arrays=(("other", other),)), 2.0 + math.log2(len(others)), _CACHE)
