"""From llama.cpp's graph to ours: every node that computes becomes an op, or a part of one.

A norm and its weight, a matmul and its bias, attention's scores and values are one op each, as the hand-written
families have them. What llama.cpp does to keep its cache, and views of any sort, are no ops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Axis, Op, View
from tracediff.model.lift import layout, naming, patterns
from tracediff.model.lift.inputs import made_of_positions
from tracediff.model.lift.nodes import KEYS, VALUES, Nodes, operands
from tracediff.names import layer_of
from tracediff_reference.description import Description, Node, Read

_SOURCES = MappingProxyType({"inp_tokens": "tokens", "inp_pos": "positions"})
_GATED = ("SWIGLU", "GEGLU", "REGLU", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_OAI", "SWIGLU_CLAMP")
_SEQUENCES = "rs_s_copy"  # which sequence a state is of: there is one
# Kinds that make values and a state, one after the other, of many inputs: their name says most.
_FLAT = ("ssm_scan", "gated_delta_net", "gated_linear_attn", "rwkv_wkv6", "rwkv_wkv7")
# What a cache of states holds (llama-memory-recurrent.cpp): the last inputs of a convolution, or the state proper.
_STATES = MappingProxyType({"r": "conv_state", "s": "ssm_state"})


@dataclass(frozen=True, slots=True)
class Shown:
    """Where llama.cpp's graph shows an op's value: in this node, and in which part of it."""

    node: int
    view: View | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """What an op reads: a value or a source by name, over all steps so far or not, and through a view or not."""

    name: str
    past: bool = False
    view: View | None = None


class Lifter:
    """Walks the nodes of a description in order and collects ops by name in `ops`; `shown` is the node of each."""

    def __init__(self, description: Description, file: GGUFFile) -> None:
        self.ops: dict[str, Op] = {}
        self.shown: dict[str, Shown] = {}
        self._nodes = Nodes(description, file)
        self._window, self._is_causal = description.window, description.is_causal
        self._file = file
        self._value: dict[int, str] = {}  # of a node the op whose output its memory holds
        self._cached: dict[int, str] = {}  # of a cache the op that it keeps
        self._casts: dict[int, Read] = {}  # of a copy for attention what is copied, and how that is read
        self._states: dict[int, str] = {}  # of a cache the state that the step before left there
        self._parts: dict[int, View] = {}  # of a node the part that all of its readers see
        self._turned: dict[int, View] = {}  # of a node whose op has another order of axes: how it lies in the op's
        self._absorbed: set[int] = set()

    def run(self) -> None:
        """Lift all nodes."""
        for i, node in enumerate(self._nodes.all):
            if node.op == "NONE" or i in self._absorbed or 0 in node.shape:
                continue
            _RULES.get(node.op, Lifter._plain)(self, i, node)

    # --- what a node reads ---------------------------------------------------------------------------------------

    def _input(self, read: Read) -> Input:
        node = self._nodes[read.of]
        if self._nodes.is_input(read):
            return Input(self._source(read.of, node))
        if self._nodes.is_cache(read):
            return self._from_cache(read)
        if read.of not in self._value:  # a copy for attention, which others read too
            self._plain(read.of, node)
        name = self._value[read.of]
        if read.of in self._parts:  # all readers see the same part
            return Input(name)
        if read.of in self._turned:
            return Input(name, view=self._turned[read.of])
        as_it_is = layout.is_whole(read, node) and layout.axes(read.shape) == self.ops[name].axes
        return Input(name, view=None if as_it_is else layout.view(read))

    def _source(self, i: int, node: Node) -> str:
        """What llama.cpp sets at each step: a source of ours, or a value that it makes of the step by itself."""
        if node.name in _SOURCES:
            return _SOURCES[node.name]
        if node.type == "i32" and node.shape == (layout.TOKENS,):  # a second use of the tokens, without a name
            return "tokens"
        if i not in self._value:
            made = made_of_positions(node, self._file.metadata)
            if made is None:
                self._add(i, naming.of_value(node.name) or "input", "input", ())
            else:
                keys = [Input("positions", node.shape[-1] == layout.POSITIONS)] * made.of_keys
                attrs = self._visible(node) if made.kind == "mask" else made.attrs
                self._add(i, made.name, made.kind, [Input("positions"), *keys], attrs=attrs)
        return self._value[i]

    def _from_cache(self, read: Read) -> Input:
        """What a cache keeps, of all steps so far; a state as the step before left it."""
        name = self._cached.get(read.of)
        seen = layout.axes(read.shape)
        if name is None:
            state = self._state(read.of)
            return Input(state, view=None if seen == self.ops[state].axes else layout.view(read))
        rows = ("S", *self.ops[name].axes[1:])
        return Input(name, True, None if seen == rows else layout.view(read))

    # --- ops -----------------------------------------------------------------------------------------------------

    def _add(
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
            axes or layout.axes(self._nodes[end].shape),
            tuple(self._nodes.weight(read, kind == "linear" and not n) for n, read in enumerate(weights)),
            dict(attrs),
            past if any(past) else (),
            views=views if any(views) else (),
        )
        self._value[end] = name
        self.shown[name] = Shown(end)
        return name

    def _plain(self, i: int, node: Node) -> None:
        """An op of the kind that the node's own op says."""
        reads = [read for read in operands(node) if self._nodes[read.of].name != _SEQUENCES]
        inputs = [self._input(read) for read in reads if not self._nodes.is_weight(read)]
        weights = [read for read in reads if self._nodes.is_weight(read)]
        if node.op in _GATED:
            inputs = self._halves(node, inputs)
        if node.op == "REPEAT" and "times" not in patterns.attrs(node):
            inputs = [Input(one.name, one.past, layout.stretched(reads[0], node)) for one in inputs]
        kind = f"{patterns.kind(node)} by step" if patterns.follows_step(node) else patterns.kind(node)
        axes = self._own_axes(node, kind)
        self._add(i, self._name(node, kind, inputs, weights), kind, inputs, weights, axes, patterns.attrs(node))

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

    def _name(self, node: Node, kind: str, inputs: Sequence[Input], weights: Sequence[Read] = ()) -> str:
        """As llama.cpp calls the value, else by a weight, else by what it is made of; the last value are the logits."""
        if node is self._nodes.all[-1]:
            return "output"
        found = naming.of_value(node.name)
        if found and found not in self.ops and f"{found}.weight" not in self._file.tensors:
            return found
        made_of = [one.name for one in inputs if one.name in self.ops]
        made_of.sort(key=lambda name: layer_of(name) is None)
        if kind in _FLAT and made_of:
            return naming.in_layer(layer_of(made_of[0]), kind)
        if weights and not inputs:
            return f"{self._stem(weights[0])}.{kind}"
        if weights and (stem := self._stem(weights[0])) not in self.ops:
            return stem
        return naming.of_parts(kind, made_of[0] if made_of else None)

    def _stem(self, weight: Read) -> str:
        return naming.of_weight(self._nodes[weight.of].name)

    def _absorb(self, i: int) -> int:
        self._absorbed.add(i)
        return i

    # --- rules: what nodes make an op ----------------------------------------------------------------------------

    def _rows(self, i: int, node: Node) -> None:
        """GET_ROWS: the embedding; all rows of a value, those whose logits were asked for; or rows by computed ids."""
        table, ids = operands(node)
        if self._nodes.is_weight(table) and self._nodes.is_input(ids):
            self._add(i, self._stem(table), "embedding", [self._input(ids)], [table])
        elif self._nodes.is_input(ids) and not self._nodes.is_leaf(table.of) and self._nodes[ids.of].name == "out_ids":
            self._value[i] = self._value[table.of]
        elif self._nodes.is_cache(table) and self._nodes.is_input(ids):
            self._value[i] = self._state(table.of)
        else:
            self._plain(i, node)

    def _norm(self, i: int, node: Node) -> None:
        """A norm, its weight and its bias."""
        (read,) = operands(node)
        end = i
        weights: list[Read] = []
        for op in ("MUL", "ADD"):
            found = self._nodes.followed_by(end, op)
            if found is None or (op == "ADD" and not self._is_bias_of(found[1], weights)):
                break
            end = self._absorb(found[0])
            weights.append(found[1])
        inputs, kind = [self._input(read)], patterns.kind(node)
        own = self._name(node, kind, inputs)
        name = self._stem(weights[0]) if weights else own
        self._add(end, name, kind, inputs, weights, attrs=patterns.attrs(node))

    def _is_bias_of(self, bias: Read, weights: Sequence[Read]) -> bool:
        return self._nodes[bias.of].name == f"{self._stem(weights[0])}.bias"

    def _matmul(self, i: int, node: Node) -> None:
        a, b = operands(node)[:2]
        if self._nodes.is_weight(a):
            self._linear(i, node, a, b)
        elif values := self._kept(a, VALUES):
            self._weighted_values(i, node, values, b)
        elif keys := self._kept(a, KEYS):
            self._scores(i, node, keys, b)
        else:
            self._plain(i, node)

    def _linear(self, i: int, node: Node, weight: Read, x: Read) -> None:
        """A matmul with a weight, and its bias: of rows of tokens, or of experts where ids say which."""
        experts = node.op == "MUL_MAT_ID"
        end, weights = i, [weight]
        found = self._nodes.followed_by(i, "ADD_ID" if experts else "ADD")
        if found and self._is_bias_of(found[1], weights):
            end = self._absorb(found[0])
            weights.append(found[1])
        stem = self._stem(weight)
        name = stem
        if stem in ("output", "token_embd"):
            name = "output_unscaled" if self._nodes.users(end) else "output"
        inputs = [self._input(read) for read in node.reads[1:] if read]
        flat = len(x.shape) == 2 and x.shape[0] == layout.TOKENS and len(self._nodes[weight.of].shape) <= 2
        kind = "linear_id" if experts else "linear" if flat else "mul_mat"
        if kind != "mul_mat" and (self._nodes.is_leaf(x.of) or layout.is_whole(x, self._nodes[x.of])):
            inputs[0] = Input(inputs[0].name, inputs[0].past)  # it makes rows of any shape
        self._add(end, name, kind, inputs, weights, self._nodes.heads(end) if kind == "linear" else None)

    def _rotation(self, i: int, node: Node) -> None:
        x, positions, *factors = operands(node)
        source = self._input(x)
        inputs = [source, self._input(positions)]
        name = naming.of_value(node.name)
        name = name if name and name not in self.ops else naming.rotated(source.name)
        rope = patterns.rope(node)
        name = self._add(i, name, "rope", inputs, factors, attrs={"rope": rope})
        # Factors may be those of a wider rotation in other layers.
        weights = tuple(weight.rows(slice(0, rope.n_rot // 2)) for weight in self.ops[name].weights)
        self.ops[name] = replace(self.ops[name], weights=weights)

    def _keep(self, i: int, node: Node) -> None:
        """SET_ROWS into a cache: its rows are kept for later steps."""
        read, into = operands(node)[0], node.into
        if into is None or not self._nodes.is_cache(into):
            self._plain(i, node)
            return
        name = self._value[read.of]
        if not layout.is_whole(read, self._nodes[read.of]):  # a part of a fused projection: an op of its own
            name = self._part(read, into.of)
        self._cached[into.of] = name

    def _part(self, read: Read, cache: int) -> str:
        """Some channels of a value, as an op: what a cache keeps of a fused projection."""
        whole = self._value[read.of]
        letter, number = naming.cache(self._nodes[cache].name)
        part, shape = layout.view(read), self._nodes.row_of_cache(cache)
        if shape and len(part.shape) == 2:
            part = layout.split(part, shape[1:])
        name = self._add(read.of, f"blk.{number}.attn_{letter}", "copy", [Input(whole, view=part)], (), part.shape)
        self._value[read.of] = whole
        self.shown[name] = Shown(read.of, part)
        return name

    def _scores(self, i: int, node: Node, keys: Input, queries: Read) -> None:
        q, user = self._heads_of_step(queries, KEYS), self._nodes.only_user(i)
        masked = user is not None and user[1].op == "SOFT_MAX" and len(operands(user[1])) > 1
        if q is None or not (keys.past or masked):
            self._plain(i, node)
            return
        self._add(i, self._name(node, "scores", [q, keys]), "scores", [q, keys])

    def _weighted_values(self, i: int, node: Node, values: Input, probs: Read) -> None:
        """Of each head its tokens; as a rule turned into tokens with all heads side by side."""
        reads = [read for _, read in self._nodes.users(i)]
        user = self._nodes.only_user(i)
        merged = user is not None and user[1].op == "CONT" and layout.is_permuted(reads[0], node, (1, 0, 2))
        as_it_is = all(read.shape == node.shape and layout.is_whole(read, node) for read in reads)
        if not (merged or as_it_is) or not (values.past or self._is_softmax(probs)):
            self._plain(i, node)
            return
        end = self._absorb(user[0]) if user and merged else i
        inputs = [self._input(probs), values]
        heads, tokens, width = layout.axes(node.shape)
        name = naming.in_layer(layer_of(inputs[0].name), "attn_kqv")  # layers may share their values
        side_by_side = layout.row((tokens, heads, width))
        name = self._add(end, name, "weighted_values", inputs, (), ("T", side_by_side))
        if as_it_is:
            self._turned[i] = View((heads, tokens, width), (layout.row((heads, width)), side_by_side, 1))
            self.shown[name] = Shown(i, layout.view(layout.permuted(i, node, (1, 0, 2))))

    def _kept(self, read: Read, order: tuple[int, int, int]) -> Input | None:
        """Keys or values as [S, heads, head_dim], from the cache, or where there is none as [T, heads, head_dim].

        They are read with their axes in this order. None for anything else.
        """
        read = self._casts.get(read.of, read)
        if read.of not in self._cached:
            return self._heads_of_step(read, order)
        tokens, channels = order.index(0) - 3, order.index(2) - 3
        if read.shape[tokens] != layout.POSITIONS:
            return None
        name = self._cached[read.of]
        shape = (*(1,) * (3 - len(read.shape)), *read.shape)
        seen = ("S", *layout.axes((shape[-3], shape[channels])))
        own = ("S", *self.ops[name].axes[1:])
        return Input(name, True, None if seen == own else View(seen, (layout.row(own), layout.row(seen[1:]), 1), 0))

    def _heads_of_step(self, read: Read, order: tuple[int, int, int]) -> Input | None:
        """[T, heads, head_dim] of this step alone."""
        rows = layout.rows(read, order)
        return self._input(rows) if rows and read.of in self._value else None

    def _is_softmax(self, read: Read) -> bool:
        return self._nodes[read.of].op == "SOFT_MAX" and self.ops[self._value[read.of]].kind == "softmax"

    def _softmax(self, i: int, node: Node) -> None:
        """Of attention's scores, which a mask comes with; or of anything."""
        scores, *more = operands(node)
        if not more or not self._nodes.is_input(more[0]):
            self._plain(i, node)
            return
        mask, *sinks = more
        attrs = {"scale": patterns.number(node, 0), **self._visible(self._nodes[mask.of])}
        if patterns.number(node, 1):
            attrs["max_bias"] = patterns.number(node, 1)
        cached = mask.shape[-1] == layout.POSITIONS
        inputs = [self._input(scores), Input("positions"), Input("positions", cached)]
        name = self._name(node, "softmax", inputs)
        self._add(i, name, "softmax", inputs, sinks, attrs=attrs)

    def _visible(self, mask: Node) -> dict[str, object]:
        """How far a mask lets a token see: a window, a chunk, or both ways."""
        attrs: dict[str, object] = {}
        # Without a cache there is no width to tell a window by, but llama.cpp does not name its mask.
        cached = mask.shape[-1] == layout.POSITIONS
        if mask.is_windowed or not (cached or naming.of_value(mask.name)):
            chunked = self._file.metadata.get("general.architecture") in patterns.CHUNKED
            attrs["chunk" if chunked else "window"] = self._window
        return attrs if self._is_causal else {**attrs, "causal": False}

    def _flash(self, i: int, node: Node) -> None:
        """Scores, probabilities and values in one node, which shows the last alone."""
        queries, keys, values, mask, *sinks = operands(node)
        k, v = self._kept(keys, KEYS), self._kept(values, KEYS)
        q = self._heads_of_step(queries, KEYS)
        if q is None or k is None or v is None:
            self._plain(i, node)
            return
        shape = (layout.axes(queries.shape)[0], "T", "S" if k.past else "T")
        names = [naming.in_layer(layer_of(q.name), f"attn_{part}") for part in ("scores", "probs", "kqv")]
        scores = self._add(i, names[0], "scores", [q, k], (), shape)
        attrs = {"scale": patterns.number(node, 0), **self._visible(self._nodes[mask.of])}
        positions = [Input("positions"), Input("positions", k.past)]
        probs = self._add(i, names[1], "softmax", [Input(scores), *positions], sinks, shape, attrs)
        del self.shown[scores], self.shown[probs]
        rows = ("T", layout.row(("T", *layout.axes(node.shape[1:]))))
        self._add(i, names[2], "weighted_values", [Input(probs), v], (), rows)

    def _sort(self, i: int, node: Node) -> None:
        """ARGSORT of which only the first k are ever read: the choice of experts."""
        seen = {layout.view(read) for _, read in self._nodes.users(i)}
        (chosen,) = seen if len(seen) == 1 else (None,)
        (scores,) = operands(node)
        if chosen is None or chosen.offset or chosen.shape[:-1] != layout.axes(node.shape[:-1]):
            self._plain(i, node)
            return
        inputs = [self._input(scores)]
        name = self._name(node, "top_k", inputs).replace("argsort", "topk")
        name = self._add(i, name, "top_k", inputs, (), chosen.shape, {"k": chosen.shape[-1]})
        self.shown[name] = Shown(i, chosen)
        self._parts[i] = chosen

    def _scale(self, i: int, node: Node) -> None:
        """By 0, of a cache of states that is new: no op. By the number of tokens, one that reads the step."""
        each = node.params[0] if node.params else 0
        if isinstance(each, float) and len(node.params) == 1:
            inputs = [self._input(operands(node)[0]), Input("positions")]
            self._add(i, self._name(node, "scale", inputs), "scale_by_tokens", inputs, attrs={"each": each})
        elif not (node.into and self._nodes.is_cache(node.into)):
            self._plain(i, node)

    def _copy(self, i: int, node: Node) -> None:
        """CONT, CPY: into a cache of states what the next step finds there; else another order, or another type."""
        read = operands(node)[0]
        if node.into and self._nodes.is_cache(node.into):
            self._hand_on(i, read, node.into)
        elif self._is_for_attention(i, read):
            self._casts[i] = read
        elif layout.is_whole(read, self._nodes[read.of]) and node.type == self._nodes[read.of].type:
            self._value[i] = self._input(read).name
        else:
            self._plain(i, node)

    def _is_for_attention(self, i: int, read: Read) -> bool:
        """Whether keys or values are copied for attention alone: to another type, or transposed."""
        if all(self._nodes[user].op == "FLASH_ATTN_EXT" for user, _ in self._nodes.users(i)):
            return True
        user = self._nodes.only_user(i)
        if user is None or user[1].op != "MUL_MAT" or self._kept(read, VALUES) is None:
            return False
        return self._nodes[operands(user[1])[1].of].op == "SOFT_MAX"

    def _silu(self, i: int, node: Node) -> None:
        """SILU; divided by what it is of, it is llama.cpp's way to write a sigmoid (src/models/qwen2moe.cpp)."""
        user = self._nodes.only_user(i)
        (x,) = operands(node)
        if user and user[1].op == "DIV" and [read.of for read in operands(user[1])] == [i, x.of]:
            inputs = [self._input(x)]
            self._add(self._absorb(user[0]), self._name(user[1], "sigmoid", inputs), "sigmoid", inputs)
        else:
            self._plain(i, node)

    def _fill(self, i: int, node: Node) -> None:
        """FILL: of memory that nobody has written the shape alone counts."""
        (read,) = operands(node)
        if not self._nodes.is_cache(read) or layout.TOKENS not in node.shape:
            self._plain(i, node)
            return
        shape = View(layout.axes(node.shape), tuple(int(size == layout.TOKENS) for size in node.shape))
        inputs = [Input("positions", view=shape)]
        self._add(i, self._name(node, "fill", inputs), "fill", inputs, attrs=patterns.attrs(node))

    def _state(self, cache: int) -> str:
        """What the step before left in a cache of states."""
        if cache not in self._states:
            letter, number = naming.cache(self._nodes[cache].name)
            name = f"blk.{number}.{_STATES.get(letter, letter)}"
            self._states[cache] = self._add(cache, name, "state", ())
            del self.shown[name]
        return self._states[cache]

    def _hand_on(self, i: int, read: Read, into: Read) -> None:
        state = self._state(into.of)
        handed = self._add(i, f"{state}_next", "copy", [self._input(read)], (), layout.axes(read.shape))
        self.ops[state] = replace(self.ops[state], inputs=(*self.ops[state].inputs, handed))


_Rule = Callable[[Lifter, int, Node], None]
_RULES: Mapping[str, _Rule] = MappingProxyType({
    "GET_ROWS": Lifter._rows, "RMS_NORM": Lifter._norm, "NORM": Lifter._norm,
    "MUL_MAT": Lifter._matmul, "MUL_MAT_ID": Lifter._matmul, "ROPE": Lifter._rotation, "SET_ROWS": Lifter._keep,
    "SOFT_MAX": Lifter._softmax, "FLASH_ATTN_EXT": Lifter._flash, "ARGSORT": Lifter._sort, "SCALE": Lifter._scale,
    "FILL": Lifter._fill, "SILU": Lifter._silu, "CONT": Lifter._copy, "CPY": Lifter._copy, "DUP": Lifter._copy,
})  # fmt: skip
