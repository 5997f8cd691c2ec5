"""The eval callback: recognises each ggml node by its op and sources, and writes the named ones to the trace."""

import math
import time
from collections.abc import Callable

import numpy as np

from tracediff.errors import EngineError
from tracediff.names import wanted
from tracediff.trace.format import DType
from tracediff.trace.statistics import Moments
from tracediff.trace.writer import TraceWriter
from tracediff_reference import ggml
from tracediff_reference.protocol import Node, Request

# Ops that show the same values under another shape.
_VIEWS = {"RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"}


class Observer:
    """Called by the scheduler before (`ask`) and after each node; an error is kept in `error`, never raised.

    A node is identified by its op and what its sources are, for a name does not identify it: `Qcur-0` occurs
    after the matmul, the bias and the rope, and the output projection is only `node_N`.
    """

    def __init__(self, request: Request, writer: TraceWriter, progress: Callable[[float], None]) -> None:
        self.error: BaseException | None = None
        self._writer = writer
        self._capture = request.capture
        self._nodes: dict[tuple[str, frozenset[str]], Node] = {
            (node.op, frozenset(node.sources)): node for node in request.nodes
        }
        self._leaves = {source for node in request.nodes for source in node.sources}
        self._norm_weights = set(request.norm_weights)
        self._roles: dict[int, str] = {}
        self._descriptions: dict[tuple[int, int], str] = {}
        self._progress, self._shown = progress, 0.0
        self._axes = {node.role: node.axes for node in request.nodes if node.axes is not None}

    def begin(self, step: int, positions: range) -> None:
        """A forward pass over these positions begins; it may come as several batches."""
        self._step, self._positions = step, positions
        self._pieces: dict[str, _Pieces] = {}
        self.seen: set[str] = set()

    def __call__(self, address: int, ask: bool, _: object) -> bool:
        """The callback proper: whether the node is wanted, then whether to go on."""
        try:
            return self._ask(address) if ask else self._record(address)
        except BaseException as error:  # nothing may propagate into C
            self.error = self.error or error
            return False

    def _ask(self, address: int) -> bool:
        tensor = ggml.at(address)
        op = self._describe(address, tensor)
        if op in _VIEWS:
            return False
        sources = frozenset(role for source in tensor.src if source and (role := self._role(source)) is not None)
        node = self._nodes.get((op, sources))
        if op == "GET_ROWS" and node:
            self._roles.clear()  # the first node of a graph: addresses mean new nodes from here on
        if node is None:
            self._roles.pop(address, None)
            if op == "GET_ROWS" and len(sources) == 1 and tensor.ne[1] == ggml.at(tensor.src[0]).ne[1]:
                # The last layer is narrowed to the rows whose logits were asked for: here, all of them.
                (self._roles[address],) = sources
            return False
        self._roles[address] = node.role
        if self.error or node.axes is None:
            return False
        self.seen.add(node.role)
        return wanted(node.role, self._capture) or bool(self._norm_weights & sources)

    def _role(self, address: int) -> str | None:
        """What a source is: an earlier node's role, a weight's name, or nothing we know."""
        while True:
            role = self._roles.get(address)
            if role is not None:
                return role
            tensor = ggml.at(address)
            if tensor.op == 0:  # GGML_OP_NONE: a leaf
                name = tensor.name.decode(errors="replace")
                return name if name in self._leaves else None
            if self._describe(address, tensor) not in _VIEWS:
                return None
            address = tensor.src[0]

    def _describe(self, address: int, tensor: ggml.Tensor) -> str:
        key = (tensor.op, tensor.op_params[0])  # unary and gated ops are told apart by their first parameter
        if key not in self._descriptions:
            self._descriptions[key] = ggml.library().ggml_op_desc(address).decode()
        return self._descriptions[key]

    def _record(self, address: int) -> bool:
        if self.error:
            return False
        tensor = ggml.at(address)
        role = self._roles[address]
        for source in tensor.src:
            if source and self._role(source) in self._norm_weights:
                weight = ggml.at(source)
                self._norm_weights.discard(weight.name.decode())
                held = ggml.values(weight).reshape(-1).astype(np.float32)
                self._writer.weight(weight.name.decode(), held)
        if not wanted(role, self._capture):
            return True
        if role not in self._pieces:
            axes = self._axes[role]
            self._pieces[role] = _Pieces(role, axes, self._step, self._positions, self._capture == "stats")
        done = self._pieces[role].add(ggml.values(tensor), self._writer)
        if done and time.monotonic() > self._shown + 0.1:
            self._shown = time.monotonic()
            self._progress(len(self._pieces) / len(self._axes))
        return True


class _Pieces:
    """One op of one step, which llama.cpp computes in as many pieces as there are micro-batches."""

    def __init__(self, op: str, axes: tuple[int | str, ...], step: int, positions: range, statistics: bool) -> None:
        sizes = {"T": len(positions), "S": positions.stop}
        self._op, self._step = op, step
        self._shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in axes)
        self._by_keys = axes[-1] == "S"  # [heads, T, S]
        self._positions = positions
        self._rows = 0  # of T, written so far
        self._moments = Moments() if statistics else None
        self._offset: int | None = None

    def add(self, x: np.ndarray, writer: TraceWriter) -> bool:
        """Write the piece `x`, in ggml's shape (outermost first); true when the op is complete."""
        n_tokens, n_keys = len(self._positions), self._positions.stop
        if self._by_keys:
            # One sequence; heads that share keys may come folded into rows; the cache is padded.
            x = x.reshape(self._shape[0], -1, x.shape[-1])[:, :, :n_keys]
            rows = x.shape[1]
        else:
            width = math.prod(self._shape[1:])
            rows = x.size // width
            x = x.reshape(rows, *self._shape[1:])
        first, self._rows = self._rows, self._rows + rows
        if self._rows > n_tokens:
            raise EngineError(f"{self._op} came with {self._rows} rows for {n_tokens} tokens.")
        dtype: DType = "f16" if x.dtype == np.float16 else "f32"
        if self._moments:
            self._moments.add(self._visible(x, first) if self._op.endswith("attn_scores") else x)
        elif rows == n_tokens:
            writer.op(self._step, self._op, x.reshape(self._shape), dtype)
            return True
        else:
            self._write_piece(x, first, writer)
        if self._rows < n_tokens:
            return False
        if self._moments:
            writer.op_statistics(self._step, self._op, self._shape, self._moments.statistics())
        else:
            writer.op_at(self._step, self._op, self._shape, dtype, self._offset or 0)
        return True

    def _visible(self, x: np.ndarray, first: int) -> np.ndarray:
        """The scores that the causal mask leaves: of the others a late micro-batch's are never computed."""
        queries = np.arange(first, first + x.shape[1]) + self._positions.start
        return x[:, np.arange(x.shape[2])[None, :] <= queries[:, None]]

    def _write_piece(self, x: np.ndarray, first: int, writer: TraceWriter) -> None:
        row = x.dtype.itemsize * (self._shape[-1] if self._by_keys else math.prod(self._shape[1:]))
        if self._offset is None:
            self._offset = writer.reserve(math.prod(self._shape) * x.dtype.itemsize)
        if not self._by_keys:
            writer.write_at(self._offset + first * row, x)
            return
        n_tokens, n_keys = self._shape[1:]
        padded = np.zeros((x.shape[1], n_keys), x.dtype)
        for head, values in enumerate(x):
            padded[:, : values.shape[1]] = values
            writer.write_at(self._offset + (head * n_tokens + first) * row, padded)
