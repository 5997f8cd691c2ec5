"""The op graph: the one description of a model. It is run, listed, replayed, changed and streamed.

A family builds it (`builder.py`), or it is lifted from llama.cpp's own (`lift/`). Nothing here needs torch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from gguf.constants import GGML_QUANT_SIZES

from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.hparams import HParams
from tracediff.names import NORMS, axes_of, layer_of, token_axis


@dataclass(frozen=True, slots=True)
class Extent:
    """A size that follows the step in another way than "T" or "S" do: constant + t T + s S + ts T S + tt T^2."""

    constant: int = 0
    t: int = 0
    s: int = 0
    ts: int = 0
    tt: int = 0

    def at(self, n_tokens: int, n_positions: int) -> int:
        """The size for T and S."""
        return self.constant + n_tokens * (self.t + self.ts * n_positions + self.tt * n_tokens) + self.s * n_positions

    def __str__(self) -> str:
        terms = ((self.constant, ""), (self.t, "T"), (self.s, "S"), (self.ts, "TS"), (self.tt, "TT"))
        return "+".join(f"{n if n != 1 or not of else ''}{of}" for n, of in terms if n) or "0"


Axis = str | int | Extent  # "T" tokens of the step, "S" positions visible so far, or a fixed size
# Of steps that an input is read over: this one, all so far, those before it, or what these leave in a buffer.
Span = Literal[False, True, "earlier", "before"]
Tokens = Literal["one", "several"]  # of a step: engines compute prompts and decoded tokens by different code
# What a step brings, int64 of shape [T]: its tokens, their positions, and how many positions were cached before it.
SOURCES = ("tokens", "positions", "past")


def sizes(axes: Iterable[Axis], n_tokens: int, n_positions: int) -> tuple[int, ...]:
    """What axes, strides and offsets are for T and S."""
    named = {"T": n_tokens, "S": n_positions}
    return tuple(
        axis.at(n_tokens, n_positions) if isinstance(axis, Extent) else named[axis] if isinstance(axis, str) else axis
        for axis in axes
    )


@dataclass(frozen=True, slots=True)
class Weight:
    """A GGUF tensor as an op reads it.

    `read(file, info)` returns it as a faulty engine would hold it; None reads it as it is. A weight may be some
    rows of the tensor, from `first` on: rows of its own shape, so one matrix of several is one whose first is so many
    rows down.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[GGUFFile, TensorInfo], Any] | None = None
    first: int = 0

    def rows(self, cut: slice) -> "Weight":
        """Rows of it, as a weight of its own."""
        return replace(self, shape=(cut.stop - cut.start, *self.shape[1:]), first=self.first + cut.start)


@dataclass(frozen=True, slots=True)
class View:
    """Another reading of a value, without an op: of its elements in C order those at these strides, from `offset` on.

    Views, permutations, reshapes and slices of llama.cpp's graphs are all such readings.
    """

    shape: tuple[Axis, ...]
    strides: tuple[Axis, ...]
    offset: Axis = 0

    def run(self) -> tuple[int, int, bool] | None:
        """The first channel that it reads of a token and how many from there on, and whether these are of each head, at
        some distance; None where it does not begin at a fixed place.
        """
        if not isinstance(self.offset, int):
            return None
        pairs = zip(self.shape, self.strides, strict=True)
        match fixed := [(n, by) for n, by in pairs if isinstance(n, int) and n != 1]:
            case [(_, int(each)), (int(width), 1)] if each != width:
                return self.offset % each, width, True
        return self.offset, math.prod(n for n, _ in fixed), False


class Rework(Protocol):
    """Another way to compute an op than its kind's: `call` and `made` are those of numerics/kinds/kind.py."""

    def compute(self, call: Any) -> Any:
        """The output."""

    def noise(self, made: Any) -> Any:
        """How far an honest engine may be off, were it to compute so."""


@dataclass(frozen=True, slots=True)
class Op:
    """One step of the forward pass.

    `inputs` are names of ops or SOURCES; those also in `past` are read over all steps so far (the KV cache), over those
    before this one ("earlier"), or as what a buffer holds from these ("before"). An input that has one of `views` is
    seen through it. A state has what its inputs were in the step before, zeros in the first.
    `function` replaces the mathematics of `kind`, `rework` all that is done with inputs and weights, and `stored` is a
    type that the output is rounded to: that is how a graph expresses somebody's mistake. One that is made in steps of
    one token alone, or of several, has these `tokens`: in others the op is the model's. One that `mixes_tokens` makes
    each of what is read of others as well, whatever its axes say.
    """

    name: str
    kind: str  # one of tracediff.numerics.kinds
    inputs: tuple[str, ...]
    axes: tuple[Axis, ...]
    weights: tuple[Weight, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    past: tuple[Span, ...] = ()
    views: tuple[View | None, ...] = ()
    function: Callable[..., Any] | None = None
    rework: Rework | None = None
    stored: str = "f64"  # as it is
    tokens: Tokens | None = None
    mixes_tokens: bool = False

    @property
    def seen(self) -> tuple[View | None, ...]:
        """The view of each input."""
        return self.views or (None,) * len(self.inputs)

    @property
    def reads(self) -> tuple[tuple[str, Span], ...]:
        """Each input, and whether it is read over all steps so far, or earlier ones."""
        return tuple(zip(self.inputs, self.past or (False,) * len(self.inputs), strict=True))

    @property
    def reads_earlier(self) -> bool:
        """Whether it reads what earlier steps left, in a cache, a buffer or a state."""
        return self.kind == "state" or any(self.past)

    def shape(self, n_tokens: int, n_past: int = 0) -> tuple[int, ...]:
        """The output's shape for a step of `n_tokens` after `n_past` cached positions."""
        return sizes(self.axes, n_tokens, n_tokens + n_past)

    def with_attrs(self, **attrs: Any) -> "Op":
        """The same op with other attributes."""
        return replace(self, attrs={**self.attrs, **attrs})

    def also_reading(self, *reads: tuple[str, Span]) -> "Op":
        """The op with more inputs, after its own."""
        return replace(
            self,
            inputs=(*self.inputs, *(name for name, _ in reads)),
            past=(*(past for _, past in self.reads), *(past for _, past in reads)),
            views=(*self.views, *(None for _ in reads)) if self.views else (),
        )

    def reading_only(self, n: int) -> "Op":
        """The op with its first `n` inputs alone: as it was before it was `also_reading`."""
        return replace(self, inputs=self.inputs[:n], past=self.past[:n], views=self.views[:n])

    def part_read(self, position: int) -> str:
        """Which part of an input is read, as in "slot 2 of " and "channels 24 to 39 of each head of "; empty for all of
        it, and where that is no run of channels.
        """
        view = self.seen[position]
        run, row = (view.run(), view.strides[0]) if view and view.shape[:1] == ("T",) else (None, 0)
        if view is None or run is None or not isinstance(row, int):
            return ""
        read = [(n, by) for n, by in zip(view.shape[1:], view.strides[1:], strict=True) if n != 1]
        first, n, is_of_each = run
        in_a_run = 0 < len(read) < 3 and read[-1][1] == 1 and all(isinstance(x, int) for axis in read for x in axis)
        if not in_a_run or n == row:
            return ""
        first, part = first if is_of_each else first % row, axes_of(self.inputs[position], 3)[1]
        if part == "slot" and not is_of_each and first % n == 0:
            return f"slot {first // n} of "
        return f"channels {first} to {first + n - 1} of {f'each {part} of ' * is_of_each}"

    def seeing(self, views: Mapping[int, View]) -> "Op":
        """The op with other views of some inputs."""
        return replace(self, views=tuple(views.get(i, own) for i, own in enumerate(self.seen)))

    def channels(self, cut: slice) -> "Op":
        """The part of a linear op that makes these channels of its output, [T, n]."""
        return replace(self, axes=("T", cut.stop - cut.start), weights=tuple(w.rows(cut) for w in self.weights))


_SHORT, _LONG = "rope_factors_short", "rope_factors_long"


@dataclass(frozen=True, slots=True)
class Graph:
    """The ops of a model by name, in execution order."""

    hparams: HParams
    ops: Mapping[str, Op]
    matmul_type: str  # ggml type of the matrices; where they are mixed, the one of fewest bits
    _readers: dict[str, list[tuple[Op, int]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops.values())

    def __getitem__(self, name: str) -> Op:
        return self.ops[name]

    def __contains__(self, name: object) -> bool:
        return name in self.ops

    def changed(self, *ops: Op) -> "Graph":
        """The graph with these ops in place of those of the same names; any other, and what that reads, before the
        first op that reads it.
        """
        changed = {**self.ops, **{op.name: op for op in ops}}
        if changed.keys() == self.ops.keys():
            return replace(self, ops=changed)
        found: dict[str, Op] = {}
        for name in self.ops:
            stack = [name]
            while stack:
                new = changed[stack[-1]]
                is_early = len(stack) > 1 or not all(read in self.ops for read in new.inputs)
                missing = [read for read in new.inputs if read in changed and read not in (*found, *stack)]
                if is_early and missing:
                    stack.append(missing[0])
                else:
                    found[stack.pop()] = new
        return replace(self, ops=found)

    def tokens_read(self, op: Op, rows: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Of which tokens of the step an op reads its inputs to make these `rows` of its output; None: of all.

        Of the same, where what it makes of a token follows from what is read of that one, as the axes of its output and
        of its inputs tell. A convolution over tokens and what runs through a state need all of them.
        """
        return rows if rows is None or self._is_by_token(op) else None

    def axes_read(self, op: Op, position: int) -> tuple[Axis, ...]:
        """The axes of an input as the op sees it."""
        view, name = op.seen[position], op.inputs[position]
        return view.shape if view else ("T",) if name in SOURCES else self[name].axes

    def is_by_rows(self, op: Op) -> bool:
        """Whether a row of its value is a token, and follows from the same row of all that it reads."""
        axes = (op.axes, *(self.axes_read(op, i) for i in range(len(op.inputs))))
        first = all(one[:1] == ("T",) for one in axes)
        return first and not any(op.past) and self.tokens_read(op, (0,)) is not None

    def _is_by_token(self, op: Op) -> bool:
        reads = zip(op.reads, op.seen, strict=True)
        of_token = (past or self._is_of_token(name, view) for (name, past), view in reads)
        return not op.mixes_tokens and _counts_tokens(op.name, op.axes) and all(of_token)

    def _is_of_token(self, name: str, view: View | None) -> bool:
        """Whether an input has what is read of a token at that token's own place."""
        axes = ("T",) if name in SOURCES else self[name].axes
        if view is None:
            return _counts_tokens(name, axes)
        each = math.prod(n for n in axes[1:] if isinstance(n, int))
        fixed = (*axes[1:], *view.strides, view.offset)
        if axes[0] != "T" or view.shape.count("T") != 1 or not all(isinstance(n, int) for n in fixed):
            return False
        return view.strides[view.shape.index("T")] == each

    def with_scores(self, names: Iterable[str]) -> "Graph":
        """The graph of an engine that shows these scores: where here they are not scaled until softmax does it, those
        that are, `NAME_scaled`; where the queries are scaled, q.k before it is, or, if these are shown and the scores
        under one name, that of the scaled ones.
        """
        names = {*names}
        ops: dict[str, Op] = {}
        called: dict[str, str] = {}
        for op in self:
            if called.keys() & {*op.inputs}:
                op = replace(op, inputs=tuple(called.get(name, name) for name in op.inputs))
            plain = op.name.removesuffix("_scaled")
            if op.kind == "scores" and plain != op.name and plain in names and plain not in ops:
                queries, own = ops[op.inputs[0]], replace(op, name=plain)
                if queries.name in names and op.name not in names:
                    ops[plain], called[op.name] = own, plain
                    continue
                if queries.name not in names and len(self.readers(queries.name)) == 1:
                    del ops[queries.name]
                ops[plain] = replace(own, inputs=(queries.inputs[0], *op.inputs[1:]))
                op = Op(op.name, "scale", (plain,), op.axes, attrs=queries.attrs)
            if op.kind == "softmax" and (scaled := f"{op.inputs[0]}_scaled") in names and scaled not in ops:
                scores = ops[op.inputs[0]]
                attrs = {"scale": op.attrs["scale"]}
                ops[scaled] = Op(scaled, "scale", (scores.name,), scores.axes, attrs=attrs)
                op = replace(op, inputs=(scaled, *op.inputs[1:])).with_attrs(scale=1.0)
            ops[op.name] = op
        return replace(self, ops=ops)

    def at_length(self, n: int) -> "Graph":
        """The graph of a context of so many positions: beyond those of the training, rope has other factors (LongRoPE,
        https://arxiv.org/abs/2402.13753; src/llama-model.cpp, get_rope_factors).
        """
        return self.changed(*(
            replace(op, weights=tuple(replace(w, name=w.name.replace(_SHORT, _LONG)) for w in op.weights))
            for op in self
            if op.kind == "rope" and op.weights and op.attrs["rope"].n_ctx_orig < n
        ))  # fmt: skip

    def written(self) -> list[Op]:
        """What an engine writes of a step: all but states, which the step before wrote as what it hands on."""
        return [op for op in self if op.kind != "state"]

    def norm_weights(self) -> list[Weight]:
        """The norm weights, which every engine is expected to record."""
        return [weight for op in self if op.kind in NORMS for weight in op.weights]

    def cached(self) -> set[str]:
        """Names of the values that later steps read."""
        return {name for op in self for name, past in op.reads if past in (True, "earlier") or op.kind == "state"}

    def states(self) -> set[str]:
        """Names of the values that the next step alone reads."""
        return {name for op in self if op.kind == "state" for name in op.inputs}

    def readers(self, name: str) -> list[tuple[Op, int]]:
        """The ops that read this value, each with the number of the input that it is."""
        if not self._readers:
            for op in self:
                for position, read in enumerate(op.inputs):
                    self._readers.setdefault(read, []).append((op, position))
        return self._readers.get(name, [])

    def places(self) -> dict[str, int]:
        """Of each op its place in execution order."""
        return {name: place for place, name in enumerate(self.ops)}

    def last_read(self) -> dict[str, int]:
        """Of each value the place in the graph of the last op that reads it; its own where none after it does, and of
        sources the last, for hypotheses read others.
        """
        places = self.places()
        last = places | dict.fromkeys(SOURCES, len(places) - 1)
        for op in self:
            last |= {read: max(last.get(read, 0), places[op.name]) for read in op.inputs}
        return last

    def done_after(self) -> dict[str, list[str]]:
        """Of each op the values that it is the last to read."""
        last = {name: op.name for op in self for name in op.inputs}
        found: dict[str, list[str]] = {}
        for name, reader in last.items():
            found.setdefault(reader, []).append(name)
        return found

    def after(self, names: Iterable[str]) -> set[str]:
        """These ops and what is computed from them, in later steps too: a state stands before what it is handed."""
        found, before = {*names}, 0
        while len(found) > before:
            before = len(found)
            found.update(op.name for op in self if not found.isdisjoint(op.inputs))
        return found

    def weight_values(self, names: Iterable[str]) -> int:
        """How many values of weights a forward pass of these ops reads."""
        return sum(math.prod(weight.shape) for name in names for weight in self[name].weights)

    def layer(self, n: int) -> list[Op]:
        """The ops of block `n`."""
        return [op for op in self if layer_of(op.name) == n]


def _counts_tokens(name: str, axes: Sequence[Axis]) -> bool:
    """Whether a value has a row for each token where a record of that name has it."""
    return axes[token_axis(name) : token_axis(name) + 1] == ("T",)


def matmul_type(ops: Iterable[Op], file: GGUFFile) -> str:
    """The ggml type of the matrices that ops multiply with; where they are mixed, the one of fewest bits."""
    names = {op.weights[0].name for op in ops if op.weights and len(op.weights[0].shape) > 1 and op.kind != "get_rows"}
    types = {file.tensors[name].type for name in names}
    return min(types, key=lambda t: GGML_QUANT_SIZES[t][1] / GGML_QUANT_SIZES[t][0]).name if types else "F32"
