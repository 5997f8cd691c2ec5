"""What a torch model computes, watched from outside: hooks on its modules, and the torch functions between them.

Nothing is computed here. A value without a module of its own is taken where the model hands it on: a residual sum where
it is added up, or what the next norm reads, rotated Q is what attention multiplies, rotated K what goes into the cache.
What is shown nowhere is left out.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tracediff.engine.attention import Attention
from tracediff.engine.lanes import Pass, Passes
from tracediff.engine.matrices import weight_of
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.residual import Residual
from tracediff.engine.stored import StoredKeys
from tracediff.engine.taps import NORMED, Tap, Taps
from tracediff.errors import EngineError
from tracediff.model.graph import Graph, Op
from tracediff.names import NORMS, layer_of

_HEADS = 2  # axes of heads and channels
_NEXT_TO = 0.1  # of a value's size: another epsilon or half precision leaves it so near, a gate does not


class Watch:
    """Records each op of `graph` that forward passes show, of one sequence or of several side by side."""

    def __init__(
        self,
        graph: Graph,
        found: Taps,
        recorder: TensorWriter,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        self.seen: set[str] = set()
        self.again: set[str] = set()  # ops whose module ran more than once in a pass: the first call is recorded
        self._graph = graph
        self._taps = found.taps
        self._tapped = {tap.op.name: tap for tap in found.taps}
        self._heads = {layer: torch.tensor(heads) for layer, heads in found.heads.items()}
        self._recorder = recorder
        self._progress = progress
        # Q and K that are parts of one value (a fused projection, without rope) are no ops that a product could show.
        of_heads = (op for op in graph if op.kind == "scores" and all(len(graph[x].axes) == 3 for x in op.inputs))
        self._attention = {layer_of(op.name): Attention(graph, op) for op in of_heads}
        self._sources = {one.source for one in self._attention.values() if one.turned.kind == "rope"}
        self._step = -1
        self.running = False
        self._passes = Passes()
        self._pass = Pass(0, 0, 0, {})
        self._done: set[str] = set()  # in this step
        self._scored: set[int | None] = set()  # the layers whose Q K^T was seen in it
        self._layer: int | None = None  # in which the pass is
        self._sizes: dict[str, float] = {}  # the norms of what rope makes Q of
        self._key_source: Tensor | None = None  # what rope makes K of in this layer
        self.keys = StoredKeys()
        self.residual = Residual(graph, self._record)
        self._last = list(graph.ops)[-1]
        self._head: tuple[Tap, Tensor] | None = None  # of the last op, what its module puts out in this step
        self.otherwise = ""  # the module of the last op, where the model returned something else

    def begin(self, tokens: Tensor, kept: Tensor, positions: Tensor | None = None) -> None:
        """A forward pass over `tokens` [rows, columns] begins, those `kept` being no padding; without positions, at
        those after the last.
        """
        self._pass = self._passes.next(tokens.shape[1], kept, positions)
        self._step, self._layer = self._step + 1, None
        self._done, self._scored = set(), set()
        self._head = None
        self.running = True
        lanes = self._pass.lanes
        ids = [token for lane in lanes.values() for token in tokens[lane.row, lane.columns].tolist()]
        at = [position for lane in lanes.values() for position in lane.positions.tolist()]
        of = [sequence for sequence, lane in lanes.items() for _ in lane.columns]
        self._recorder.step(self._step, ids, at, of)

    def end(self) -> None:
        """The pass is over: what is computed until the next is none of it."""
        if self.running:
            self.residual.next_layer()
        self.running, self.keys, self._key_source = False, StoredKeys(), None

    @contextmanager
    def hooked(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """With hooks on the modules, which go when the block ends."""
        with ExitStack() as hooks:
            for path in dict.fromkeys(tap.path for tap in self._taps):
                taps = [tap for tap in self._taps if tap.path == path]
                hooks.enter_context(modules[path].register_forward_pre_hook(self._entered(taps[0].op)))
                hooks.enter_context(modules[path].register_forward_hook(self._left(taps)))
            yield

    def _enter(self, layer: int | None, inputs: tuple[Any, ...]) -> None:
        """A layer begins, or what follows the last."""
        self._layer, self._key_source = layer, None
        self.residual.next_layer(*inputs[:1])
        attention = self._attention.get(layer)
        self.keys = StoredKeys(self._pass.n_values, *attention.sizes[1:]) if attention else StoredKeys()

    def _entered(self, op: Op) -> Callable[..., None]:
        """Records what the module reads, where no module of its own puts that out."""
        name = op.inputs[0]
        unseen = name not in self._graph or name in self._tapped or op.seen[0] is not None

        def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not self.running or _looks_up(op, inputs):
                return
            # A norm that adds the residual first, where the graph adds one; another is called with a gate.
            is_sum = name in self._graph and self._graph[name].kind == "add"
            added = is_sum and len(inputs) > 1 and getattr(inputs[1], "shape", None) == inputs[0].shape
            is_it = added or not inputs or op.seen[0] is not None or self.residual.read(name, inputs[0])
            if self._layer != layer_of(op.name):
                self._enter(layer_of(op.name), inputs)
            if unseen or name in self._done or not inputs or not is_it or not inputs[0].is_floating_point():
                return
            values = inputs[0] + inputs[1] if added else inputs[0]
            self._record(name, self._like_rows(name, self._tokens_first(self._graph[name], values, values)))

        return record

    def _left(self, taps: list[Tap]) -> Callable[..., None]:
        """Records what the module puts out."""

        def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if self.running:
                values = _of_several(output, module, inputs[0]) if isinstance(output, tuple) else output
                for tap in taps if values is not None else ():
                    if tap.op.kind == "embedding" or _looks_up(tap.op, inputs):
                        if (embedding := self._embedding_of(tap.op)) is not None:
                            self._embedding(self._embedded(embedding, module, inputs[0], values), values)
                    elif len(inputs) > 1 and values is output and tap.op.kind == "rms_norm":
                        self._record(self._gated(tap.op, module, inputs[0], inputs[1], values), values)
                    elif tap.op.name == self._last:
                        self.again |= {self._last} if self._head else set()
                        self._head = self._head or (tap, values)
                    else:
                        self.again |= {tap.op.name} & self._done
                        self._put_out(tap, self._tokens_first(tap.op, inputs[0], tap.of(values)))

        return record

    def _embedding_of(self, op: Op) -> Op | None:
        """The embedding that has the op's matrix: itself, or that of a tied head."""
        return next((one for one in self._graph if one.kind == "embedding" and one.weights == op.weights), None)

    def _embedding(self, name: str, values: Tensor) -> None:
        """Recorded when a norm reads it, if that is next: an engine may scale it before."""
        if any(reader.kind in NORMS for reader, _ in self._graph.readers(name)):
            self.residual.wait(name, values)
        else:
            self._record(name, values)
            self.residual.put_out(name, values)

    def _put_out(self, tap: Tap, values: Tensor) -> None:
        """What a module computes, which others are made of besides."""
        attention, is_first = self._attention.get(self._layer), tap.op.name not in self._done
        self._record(tap.op.name, values)
        if tap.rows is None:
            self.residual.put_out(tap.op.name, values)
        if attention and is_first and attention.key_source == tap.op.name:
            self._key_source = values

    def result(self, output: Any) -> None:
        """What the model itself returns: the last op, be it that a module puts out something else for it."""
        if not self.running:
            return
        n_vocab, several = self._graph[self._last].axes[-1:], output if isinstance(output, tuple) else ()
        first = next(iter(several), output)
        likely = (x for x in several if isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1:] == n_vocab)
        returned = getattr(output, "logits", next(likely, first))
        if self._head is not None:
            tap, values = self._head
            logits = tap.of(values)
            theirs = tap.of(returned) if isinstance(returned, Tensor) and returned.shape == values.shape else returned
            if isinstance(theirs, Tensor) and not _ends_in(logits, theirs, self._pass.n_rows):
                self.otherwise = tap.path
                logits = theirs
            self._record(self._last, logits)
        elif isinstance(returned, Tensor) and returned.shape[-1:] == n_vocab:
            self._record(self._last, returned)

    def _embedded(self, op: Op, module: nn.Module, ids: Tensor, values: Tensor) -> str:
        """The op that an embedding's output is: its rows, or already what they are scaled to."""
        scaled = next((reader for reader, _ in self._graph.readers(op.name) if reader.kind == "scale"), None)
        rows = float(cast(Tensor, weight_of(module)).detach()[ids].double().norm())
        if scaled is None or not rows:
            return op.name
        ratio = float(values.detach().double().norm()) / rows
        return min((op.name, 1.0), (scaled.name, scaled.attrs["scale"]), key=lambda known: abs(ratio - known[1]))[0]

    def _gated(self, op: Op, module: nn.Module, x: Tensor, gate: Any, values: Tensor) -> str:
        """The op that a norm which is called with a gate puts out: its product with the gate, but where it is next to
        what it normed. (A row times another function of the gate is nearer to that than to the product with the right.)
        """
        product = next((reader for reader, _ in self._graph.readers(op.name) if reader.kind == "mul"), None)
        if product is None or not isinstance(gate, Tensor) or gate.shape != x.shape:
            return op.name
        normed = nn.functional.rms_norm(x, x.shape[-1:], weight_of(module))
        return op.name if _size(values - normed) <= _NEXT_TO * _size(normed) else product.name

    def _tokens_first(self, op: Op, read: Tensor, values: Tensor) -> Tensor:
        """Heads of tokens, [..., H, T, D], in a trace's order; where H is T the strides of what was read tell."""
        if len(op.axes) != 3 or values.ndim < 3 or values.shape[-3:] != (op.axes[1], self._pass.n_columns, op.axes[2]):
            return values
        if op.axes[1] == self._pass.n_columns and read.stride(-3) >= read.stride(-2):
            return values
        return values.transpose(-3, -2)

    def product(self, left: Tensor, right: Tensor, result: Tensor | None) -> None:
        """A matmul that may be attention's; `right` is [..., D, S] of Q K^T, `result` None inside a fused kernel."""
        attention = self._attention.get(self._layer)
        if attention is None:
            return
        n, s = self._pass.n_columns, self._pass.n_keys
        if self._layer not in self._scored and attention.is_qk(left, right, n, self._pass.n_rows):
            self._scored.add(self._layer)
            self._refuse_no_cache(right.shape[-1], s)
            self._queries_and_keys(attention, left, right, result if right.shape[-1] == s else None)
        elif result is not None and attention.probs and attention.is_pv(left, right, n, s, self._pass.n_rows):
            self._record(attention.probs.name, left)

    def _queries_and_keys(self, attention: Attention, left: Tensor, right: Tensor, scores: Tensor | None) -> None:
        heads, groups, dim = attention.sizes
        n_rows = self._pass.n_rows
        q = left.reshape(n_rows, heads, -1, dim).transpose(1, 2).reshape(-1, heads, dim)
        op = attention.op_of(_size(q), self._sizes.get(attention.source))
        q = self._like_rows(attention.source, q)
        if op:
            self._record(op.name, q)
        keys = self._stored_keys(attention)
        if keys is None and right.shape[-1] <= self._pass.n_keys:  # else a buffer with room for more, who knows where
            read = right.transpose(-1, -2).reshape(n_rows, -1, right.shape[-1], dim)
            read = read[:, :: read.shape[1] // groups, -self._pass.n_columns :].transpose(1, 2).reshape(-1, groups, dim)
            keys = self._like_rows(attention.key_source, read)
        if keys is not None:
            self._record(attention.k.name, keys)
        if op is attention.q and scores is not None:
            self._record(attention.scores.name, scores)

    def _stored_keys(self, attention: Attention) -> Tensor | None:
        if self._key_source is None or attention.k.kind != "rope":
            return None
        magnitude = attention.k.attrs["rope"].magnitude
        in_order = partial(self._like_rows, attention.key_source)
        at_start = not any(bool(lane.positions.any()) for lane in self._pass.lanes.values())
        return self.keys.rotated(self._key_source, magnitude, in_order, at_start)

    def _like_rows(self, name: str, values: Tensor) -> Tensor:
        """Values that follow a projection's channels, in the order of the file's."""
        tap = self._tapped.get(self._projection(name))
        if tap is None or tap.rows is None or tap.op.kind != "linear" or values.ndim < _HEADS:
            return values
        if values.shape[-2:].numel() != len(tap.rows):
            return values
        # Inside a module several may lie side by side; behind it each stands alone, in the same order.
        order = tap.rows.argsort().argsort().to(values.device)
        return values.flatten(-2).index_select(-1, order).reshape(values.shape)

    def _projection(self, name: str) -> str:
        """The linear op that a value comes from through norms and rope, or its own name."""
        while name in self._graph and self._graph[name].kind in ("rope", *NORMED):
            name = self._graph[name].inputs[0]
        return name

    def _refuse_no_cache(self, n_keys: int, n_positions: int) -> None:
        if n_keys == self._pass.n_columns < n_positions:
            raise EngineError(
                f"step {self._step}: attention sees the {n_keys} keys of this pass alone, at position "
                f"{n_positions - 1}: without a cache each pass is a sequence of its own. Record one, or use the cache."
            )

    def _record(self, name: str, values: Tensor) -> None:
        if name in self._done or name not in self._graph:
            return
        op, here = self._graph[name], self._pass
        values = self._in_order(op, values)
        by_keys = op.axes[1:] == ("T", "S") and len(op.axes) == 3
        shape = op.shape(here.n_columns, here.n_keys - here.n_columns)
        last = (
            op.axes[0] == "T"
            and here.n_columns > 1
            and values.numel() * here.n_columns == math.prod(shape) * here.n_rows
        )
        of_cached = math.prod(shape) * here.n_rows * here.n_keys
        if op.axes[0] == "T" and here.n_keys > here.n_columns and values.numel() * here.n_columns == of_cached:
            # Of all that is cached, as MiniCPM3 makes K and V of its latents anew in each step: the step's own.
            values = values.reshape(here.n_rows, here.n_keys, -1)[:, -here.n_columns :]
        if not last and values.numel() != math.prod(shape) * here.n_rows:
            raise EngineError(
                f"{name} has the shape {list(values.shape)} in this model, {list(shape)} in the GGUF file: it is "
                "another model, or several sequences at once that nothing tells apart. Check the file; record one "
                "sequence at a time."
            )
        if name in self._sources:
            self._sizes[name] = _size(values)
        if last:  # engines that want one token need the last one's logits alone
            self._record_last(name, values.reshape(here.n_rows, 1, *shape[1:]))
        elif op.axes[0] == "T":
            parts = here.parts(values.reshape(here.n_values, *shape[1:]))
            self._recorder.parts(self._step, name, parts, dict.fromkeys(parts))
        elif by_keys:
            parts = here.blocks(values.reshape(here.n_rows, *shape))
            hidden = {
                k: lane.hidden.to(values.device) if op.kind == "scores" else None for k, lane in here.lanes.items()
            }
            self._recorder.parts(self._step, name, parts, hidden)
        elif len(here.lanes) == 1 and here.n_rows == 1:
            self._recorder.op(self._step, name, values.reshape(shape))
        else:
            return  # of a batch, and nothing says which rows are whose
        self._done.add(name)
        self.seen.add(name)
        self._progress(len(self._done) / len(self._graph.ops))

    def _in_order(self, op: Op, values: Tensor) -> Tensor:
        """What is made of a layer's heads, as of a state, in the file's order: a matrix has it by its rows."""
        layer, of_heads = layer_of(op.name), len(op.axes) == 3 and op.kind != "linear"
        heads = self._heads.get(layer) if of_heads and layer is not None else None
        if heads is None or op.axes[1] != len(heads):
            return values
        lying = values.reshape(-1, len(heads), math.prod(op.shape(1)[2:]))
        return lying.index_select(1, heads.to(values.device)).reshape(values.shape)

    def _record_last(self, name: str, values: Tensor) -> None:
        """The value of the last column, [rows, 1, ...], of the sequences whose last token is there."""
        lanes = self._pass.lanes
        for sequence, lane in lanes.items():
            if int(lane.columns[-1]) == self._pass.n_columns - 1:
                of, rows = sequence if len(lanes) > 1 else None, (len(lane.columns) - 1,)
                self._recorder.op(self._step, name, values[lane.row], None, None if rows == (0,) else rows, of)


def _ends_in(values: Tensor, returned: Tensor, n_rows: int) -> bool:
    """Whether the model returned these values, be it those of the last tokens or in another type; or something of
    another size, as hidden states.
    """
    if returned.shape[-1:] != values.shape[-1:] or returned.numel() % (n_rows * values.shape[-1]):
        return True
    theirs = returned.reshape(n_rows, -1, returned.shape[-1])
    own = values.reshape(n_rows, -1, values.shape[-1])[:, -theirs.shape[1] :].to(theirs)
    return own.shape != theirs.shape or bool(((own == theirs) | (own.isnan() & theirs.isnan())).all())


def _looks_up(op: Op, inputs: tuple[Any, ...]) -> bool:
    """Whether what is tapped as a head is an embedding that shares its matrix: it is called with ids."""
    return op.kind == "linear" and bool(inputs) and isinstance(inputs[0], Tensor) and not inputs[0].is_floating_point()


def _of_several(output: tuple[Any, ...], module: nn.Module, read: Tensor) -> Any:
    """What a module puts out first; of a router, which has the chosen scores or experts beside all logits, these. None
    where it has none: those that it chose alone.
    """
    weight = weight_of(module)
    if weight.ndim != 2 or weight.shape[-1] != read.shape[-1]:
        return output[0]
    shape = (*read.shape[:-1], len(weight))
    alike = [x for x in output if isinstance(x, Tensor) and x.is_floating_point() and x.numel() == math.prod(shape)]
    alike = [x for x in alike if x.shape[-1] == len(weight)]
    if len(alike) < 2:
        return alike[0] if alike else None
    made = nn.functional.linear(read, weight)
    return min(alike, key=lambda x: _size(torch.nan_to_num(x.reshape(shape) - made)))


def _size(values: Tensor) -> float:
    """Its norm, to the few digits that tell a scale."""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(values.detach(), dtype=wide))
