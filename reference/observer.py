"""The eval callback: writes the values of the nodes that are recognised to the trace."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from tracediff.errors import EngineError
from tracediff.names import wanted
from tracediff.trace.writer import TraceWriter
from tracediff_reference import ggml
from tracediff_reference.description import POSITIONS, TOKENS, Size
from tracediff_reference.pieces import Pieces, WholePieces, part_of
from tracediff_reference.protocol import Request
from tracediff_reference.recognise import ByName, BySources


class Observer:
    """Called by the scheduler before (`ask`) and after each node; an error is kept in `error`, never raised."""

    def __init__(self, request: Request, writer: TraceWriter, progress: Callable[[float], None]) -> None:
        self.error: BaseException | None = None
        self._writer = writer
        self._capture = request.capture
        self._norm_weights = set(request.norm_weights)
        self._recogniser = ByName(request.shown, request.first) if request.first else BySources(request.nodes)
        self._blocks = {one.role: one.block for one in request.shown if one.block}
        self._parts = {one.role: one.part for one in request.shown if one.part}
        self.axes: dict[str, tuple[Size | str, ...]] = {
            **{node.role: node.axes for node in request.nodes if node.axes is not None},
            **{one.role: tuple(_axis(size) for size in one.axes) for one in request.shown},
        }
        self._roles: tuple[str, ...] = ()  # of the node that is being computed
        self._progress, self._showed = progress, 0.0

    def begin(self, step: int, positions: range, sequences: Sequence[int] = ()) -> None:
        """A forward pass over these positions begins; it may come as several batches.

        Of several `sequences` these are whose each cell of the cache is, and `positions` are cells.
        """
        self._step, self._positions, self._sequences = step, positions, sequences
        self._pieces: dict[str, Pieces | WholePieces] = {}
        self.seen: set[str] = set()

    def __call__(self, address: int, ask: bool, _: object) -> bool:
        """The callback proper: whether the node is wanted, then whether to go on."""
        try:
            return self._ask(address) if ask else self._record(address)
        except BaseException as error:  # nothing may propagate into C
            self.error = self.error or error
            return False

    def _ask(self, address: int) -> bool:
        roles = self._recogniser.look(address)
        if not roles or self.error:
            return False
        self._roles = roles
        self.seen.update(roles)
        return any(wanted(role, self._capture) for role in roles) or bool(self._norms_of(ggml.at(address)))

    def _norms_of(self, tensor: ggml.Tensor) -> list[ggml.Tensor]:
        """The norm weights among the sources that are not written yet."""
        sources = [ggml.at(source) for source in tensor.src if source] if self._norm_weights else []
        return [source for source in sources if source.op == 0 and ggml.name_of(source) in self._norm_weights]

    def _record(self, address: int) -> bool:
        if self.error:
            return False
        tensor = ggml.at(address)
        for weight in self._norms_of(tensor):
            self._norm_weights.discard(ggml.name_of(weight))
            held = ggml.values(weight).reshape(-1).astype(np.float32)
            self._writer.weight(ggml.name_of(weight), held)
        for role in self._roles:
            done = wanted(role, self._capture) and self._add(role, ggml.values(tensor))
            if done and time.monotonic() > self._showed + 0.1:
                self._showed = time.monotonic()
                self._progress(len(self._pieces) / len(self.axes))
        return True

    def _add(self, role: str, x: np.ndarray) -> bool:
        """A piece of an op; true when it is the last."""
        n_tokens = self._recogniser.n_tokens
        if role in self._parts:
            x = part_of(x, self._parts[role], n_tokens)
        if role in self._blocks:
            x = (x + 1) * self._blocks[role] - 1
        if x.dtype.kind == "i":
            x = x.astype(np.float32)  # ids of experts and the like
        if role not in self._pieces:
            self._pieces[role] = self._begin(role)
        pieces = self._pieces[role]
        if isinstance(pieces, Pieces):
            return pieces.add(x, self._writer)
        return pieces.add(x, n_tokens, self._writer)

    def _begin(self, role: str) -> Pieces | WholePieces:
        axes, statistics = self.axes[role], self._capture == "stats"
        follow = [axis for axis in axes if not isinstance(axis, int)]
        if (axes[0] == "T" and follow == ["T"]) or (len(axes) == 3 and axes[1:] == ("T", "S") and len(follow) == 2):
            plain = tuple(axis for axis in axes if isinstance(axis, int | str))
            return Pieces(role, plain, self._step, self._positions, statistics, self._sequences)
        if self._sequences:
            raise EngineError(f"{role} has no row for each token: of this model one sequence at a time is traced.")
        described = tuple({"T": TOKENS, "S": POSITIONS}[axis] if isinstance(axis, str) else axis for axis in axes)
        return WholePieces(role, described, self._step, self._positions, statistics)


def _axis(size: Size) -> Size | str:
    return {TOKENS: "T", POSITIONS: "S"}.get(size, size) if isinstance(size, tuple) else size
