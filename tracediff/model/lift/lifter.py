"""Ops lifted from llama.cpp's graph so far, and what those after them read: by name, step and view.

What llama.cpp does to keep its cache, and views of any sort, are no ops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Axis, Op, View
from tracediff.model.lift import layout, naming, patterns
from tracediff.model.lift.inputs import made_of_positions
from tracediff.model.lift.nodes import Nodes, operands
from tracediff.names import layer_of
from tracediff_reference.description import POSITIONS, TOKENS, Description, Node, Read

_SOURCES = MappingProxyType({"inp_tokens": "tokens", "inp_pos": "positions"})
_GATED = ("SWIGLU", "GEGLU", "REGLU", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_OAI", "SWIGLU_CLAMP")
_SEQUENCES = "rs_s_copy"  # which sequence a state is of: there is one
# Kinds that make values and a state, one after the other, of many inputs: their name says most.
_FLAT = ("ssm_scan", "gated_delta_net", "gated_linear_attn", "rwkv_wkv6", "rwkv_wkv7")
# What a cache of states holds (llama-memory-recurrent.cpp): the last inputs of a convolution, or the state proper.
_STATES = MappingProxyType({"r": "conv_state", "s": "ssm_state"})


@dataclass(frozen=True, slots=True)
class Shown:
    """Where llama.cpp's graph shows an op's value: in this node, and in which part of it.

    There it is of places among blocks of so many tokens, where `block` is not 0.
    """

    node: int
    view: View | None = None
    block: int = 0


@dataclass(frozen=True, slots=True)
class Input:
    """What an op reads: a value or a source by name, over all steps so far or not, and through a view or not."""

    name: str
    past: bool = False
    view: View | None = None


class Lifter:
    """Collects ops by name in `ops`, as rules find them; `shown` is where llama.cpp shows each."""

    def __init__(self, description: Description, file: GGUFFile) -> None:
        self.ops: dict[str, Op] = {}
        self.shown: dict[str, Shown] = {}
        self.nodes = Nodes(description, file)
        self._window, self._is_causal = description.window, description.is_causal
        self._file = file
        self.value: dict[int, str] = {}  # of a node the op whose output its memory holds
        self.cached: dict[int, str] = {}  # of a cache the op that it keeps
        self.casts: dict[int, Read] = {}  # of a copy for attention what is copied, and how that is read
        self._states: dict[int, str] = {}  # of a cache the state that the step before left there
        self.seen: dict[int, View | None] = {}  # of a node that is shaped otherwise than its op: how readers see that
        self.absorbed: set[int] = set()

    def input(self, read: Read) -> Input:
        """A reading of llama.cpp's as one of ours."""
        node = self.nodes[read.of]
        if self.nodes.is_input(read):
            return Input(self._source(read.of, node))
        if self.nodes.is_cache(read):
            return self._from_cache(read)
        if read.of not in self.value:  # a copy for attention, which others read too
            self.plain(read.of, node)
        name = self.value[read.of]
        if read.of in self.seen:
            return Input(name, view=self.seen[read.of])
        as_it_is = layout.is_whole(read, node) and layout.axes(read.shape) == self.ops[name].axes
        return Input(name, view=None if as_it_is else layout.view(read))

    def _source(self, i: int, node: Node) -> str:
        """What llama.cpp sets at each step: a source of ours, or a value that it makes of the step by itself."""
        if node.name in _SOURCES:
            return _SOURCES[node.name]
        made = made_of_positions(node, self._file.metadata)
        if made is None and node.type == "i32" and node.shape == (TOKENS,):  # the tokens again, without a name
            return "tokens"
        if i not in self.value:
            if made is None:
                self.add(i, naming.of_value(node.name) or "input", "input", ())
            else:
                keys = [Input("positions", node.shape[-1] == POSITIONS)] * made.of_keys
                attrs = made.attrs or (self.visible(node) if made.kind == "mask" else {})
                self.add(i, made.name, made.kind, [Input("positions"), *keys], attrs=attrs)
        return self.value[i]

    def _from_cache(self, read: Read) -> Input:
        """What a cache keeps, of all steps so far; a state as the step before left it."""
        name = self.cached.get(read.of)
        seen = layout.axes(read.shape)
        if name is None:
            state = self.state(read.of)
            return Input(state, view=None if seen == self.ops[state].axes else layout.view(read))
        rows = ("S", *self.ops[name].axes[1:])
        return Input(name, True, None if seen == rows else layout.view(read))

    def state(self, cache: int) -> str:
        """What the step before left in a cache of states."""
        if cache not in self._states:
            letter, number = naming.cache(self.nodes[cache].name)
            name = f"blk.{number}.{_STATES.get(letter, letter)}"
            self._states[cache] = self.add(cache, name, "state", ())
            del self.shown[name]
        return self._states[cache]

    def visible(self, mask: Node) -> dict[str, object]:
        """How far a mask lets a token see: a window, a chunk, or both ways."""
        attrs: dict[str, object] = {}
        # Without a cache there is no width to tell a window by, but llama.cpp does not name its mask.
        cached = mask.shape[-1] == POSITIONS
        if mask.is_windowed or not (cached or naming.of_value(mask.name)):
            chunked = self._file.metadata.get("general.architecture") in patterns.CHUNKED
            attrs["chunk" if chunked else "window"] = self._window
        return attrs if self._is_causal else {**attrs, "causal": False}

    def add(
        self,
        end: int,
        name: str,
        kind: str,
        inputs: Sequence[Input],
        weights: Sequence[Read] = (),
        axes: tuple[Axis, ...] | None = None,
        attrs: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Append an op whose value node `end` holds."""
        name = naming.unique(name, self.ops)
        past = tuple(one.past for one in inputs)
        views = tuple(one.view for one in inputs)
        self.ops[name] = Op(
            name,
            kind,
            tuple(one.name for one in inputs),
            axes or layout.axes(self.nodes[end].shape),
            tuple(self.nodes.weight(read, kind == "linear" and not n) for n, read in enumerate(weights)),
            dict(attrs),
            past if any(past) else (),
            views=views if any(views) else (),
        )
        self.value[end] = name
        self.shown[name] = Shown(end)
        return name

    def plain(self, i: int, node: Node, kind: str = "") -> None:
        """An op of the kind that the node's own op says, where no other is given."""
        reads = [read for read in operands(node) if self.nodes[read.of].name != _SEQUENCES]
        inputs = [self.input(read) for read in reads if not self.nodes.is_weight(read)]
        weights = [read for read in reads if self.nodes.is_weight(read)]
        if node.op in _GATED:
            inputs = self._halves(node, inputs)
        if node.op == "REPEAT" and "times" not in patterns.attrs(node):
            inputs = [Input(one.name, one.past, layout.stretched(reads[0], node)) for one in inputs]
        usual = f"{patterns.kind(node)} by step" if patterns.follows_step(node) else patterns.kind(node)
        name, axes = self.name(node, usual, inputs, weights), self._own_axes(node, usual)
        self.add(i, name, kind or usual, inputs, weights, axes, patterns.attrs(node))

    def _own_axes(self, node: Node, kind: str) -> tuple[Axis, ...]:
        """The shape of what the kind makes, where ggml gives the same memory another."""
        if kind == "copy":
            return layout.axes(operands(node)[0].shape)
        return (layout.total(node.shape),) if kind in _FLAT else layout.axes(node.shape)

    def _halves(self, node: Node, inputs: list[Input]) -> list[Input]:
        """Gate and up: two inputs, or the halves of one."""
        if len(inputs) == 1:
            (read,) = operands(node)
            half = node.shape[-1]
            assert isinstance(half, int)
            whole = layout.view(read)
            shape = (*whole.shape[:-1], half)
            inputs = [
                Input(inputs[0].name, inputs[0].past, View(shape, whole.strides, layout.plus(whole.offset, first)))
                for first in (0, half)
            ]
        return inputs[::-1] if patterns.integer(node, 1) else inputs

    def name(self, node: Node, kind: str, inputs: Sequence[Input], weights: Sequence[Read] = ()) -> str:
        """As llama.cpp calls the value, else by a weight, else by what it is made of; the last value are the logits."""
        if node is self.nodes.all[-1]:
            return "output"
        found = naming.of_value(node.name)
        if found and found not in self.ops and f"{found}.weight" not in self._file.tensors:
            return found
        made_of = [one.name for one in inputs if one.name in self.ops]
        made_of.sort(key=_layer, reverse=True)  # what is added to the layer before is this one's
        if kind in _FLAT and made_of:
            return naming.in_layer(layer_of(made_of[0]), kind)
        if weights and not inputs:
            return f"{self.stem(weights[0])}.{kind}"
        if weights and (stem := self.stem(weights[0])) not in self.ops:
            return stem
        return naming.of_parts(kind, made_of[0] if made_of else None)

    def stem(self, weight: Read) -> str:
        """The op that a weight's name tells."""
        return naming.of_weight(self.nodes[weight.of].name)

    def absorb(self, i: int) -> int:
        """The node as a part of an op that begins before it: it makes none by itself."""
        self.absorbed.add(i)
        return i


def _layer(name: str) -> int:
    number = layer_of(name)
    return -1 if number is None else number
