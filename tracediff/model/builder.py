"""What a family's graph is built with: a method for each sort of op, called in the order of the forward pass."""

from collections.abc import Iterator

from tracediff.errors import ModelError
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Axis, Graph, Op, Weight, matmul_type
from tracediff.model.hparams import HParams


class Builder:
    """Appends ops to a graph; each method returns the new op's name. Weights are checked against the file."""

    def __init__(self, hparams: HParams, file: GGUFFile) -> None:
        self.hparams = hparams
        self._file = file
        self._ops: dict[str, Op] = {}

    def build(self) -> Graph:
        """The finished graph."""
        return Graph(self.hparams, self._ops, matmul_type(self._ops.values(), self._file))

    def blocks(self) -> Iterator[str]:
        """The prefix of each layer: blk.0, blk.1, ..."""
        return (f"blk.{n}" for n in range(self.hparams.n_layer))

    def has(self, tensor: str) -> bool:
        """Whether the file holds this tensor."""
        return tensor in self._file.tensors

    def embedding(self, name: str) -> str:
        """Rows of the embedding: [T] -> [T, n_embd]."""
        h = self.hparams
        table = self._weight(f"{name}.weight", h.n_vocab, h.n_embd)
        return self._append(Op(name, "embedding", ("tokens",), ("T", h.n_embd), (table,)))

    def rms_norm(self, x: str, name: str) -> str:
        """x / rms(x) * weight over the last axis (https://arxiv.org/abs/1910.07467)."""
        axes = self._ops[x].axes
        weight = self._weight(f"{name}.weight", axes[-1])
        return self._append(Op(name, "rms_norm", (x,), axes, (weight,), {"eps": self.hparams.eps}))

    def linear(self, x: str, name: str, *out: int, tensor: str | None = None) -> str:
        """x @ W.T + b, with the bias if the file has one; `out` are the output axes after T."""
        n_out = 1
        for size in out:
            n_out *= size
        tensor = tensor or name
        weights = [self._weight(f"{tensor}.weight", n_out, self._ops[x].axes[-1])]
        if self.has(f"{name}.bias"):
            weights.append(self._weight(f"{name}.bias", n_out))
        return self._append(Op(name, "linear", (x,), ("T", *out), tuple(weights)))

    def rope(self, x: str, name: str, factors: str | None = None) -> str:
        """Rotary embedding (https://arxiv.org/abs/2104.09864): [T, heads, head_dim] -> the same."""
        rope = self.hparams.rope
        weights = (self._weight(factors, rope.n_rot // 2),) if factors and self.has(factors) else ()
        return self._append(
            Op(name, "rope", (x, "positions"), self._ops[x].axes, weights, {"rope": rope})
        )  # fmt: skip

    def attention(self, q: str, k: str, v: str, block: str) -> str:
        """softmax(q k^T scale, causal) v, query heads sharing K and V in groups: -> [T, n_head * head_dim]."""
        h = self.hparams
        scores = self._append(Op(f"{block}.attn_scores", "scores", (q, k), (h.n_head, "T", "S"), past=(False, True)))
        probs = self._append(
            Op(
                f"{block}.attn_probs", "softmax", (scores, "positions", "positions"), (h.n_head, "T", "S"),
                attrs={"scale": h.attention_scale}, past=(False, False, True),
            )
        )  # fmt: skip
        axes: tuple[Axis, ...] = ("T", h.n_head * h.head_dim)
        return self._append(Op(f"{block}.attn_kqv", "weighted_values", (probs, v), axes, past=(False, True)))

    def add(self, a: str, b: str, name: str) -> str:
        """A + b."""
        return self._append(Op(name, "add", (a, b), self._ops[a].axes))

    def swiglu(self, gate: str, up: str, name: str) -> str:
        """silu(gate) * up (https://arxiv.org/abs/2002.05202)."""
        return self._append(Op(name, "swiglu", (gate, up), self._ops[gate].axes))

    def _append(self, op: Op) -> str:
        self._ops[op.name] = op
        return op.name

    def _weight(self, name: str, *shape: Axis) -> Weight:
        info = self._file.tensors.get(name)
        if info is None:
            raise ModelError(f"{self._file.path}: the required tensor {name!r} is missing. Convert the model again.")
        if info.shape != shape:
            raise ModelError(
                f"{self._file.path}: tensor {name!r} has shape {list(info.shape)}, expected {list(shape)} "
                f"from the metadata of this {self.hparams.arch} model (outermost first)."
            )
        return Weight(name, info.shape)
