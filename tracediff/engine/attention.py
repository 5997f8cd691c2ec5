"""Which matmuls of a torch model are a layer's attention, by their shapes and by the size of what they multiply."""

import math

from torch import Tensor

from tracediff.model.graph import Graph, Op
from tracediff.names import layer_of


class Attention:
    """The ops of a layer's attention, by the one that multiplies Q and K."""

    def __init__(self, graph: Graph, scores: Op) -> None:
        self.scores = scores
        self.q, self.k = (graph[name] for name in scores.inputs)
        self.turned = graph[self.q.inputs[0]] if self.q.kind == "scale" else self.q
        self.source, self.key_source = self.turned.inputs[0], self.k.inputs[0]
        after = graph.layer(layer_of(scores.name) or 0)
        self.probs = next((op for op in after[after.index(scores) :] if op.kind == "softmax"), None)
        self._scale = graph.hparams.attention_scale

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads of Q, heads of K, channels."""
        return self.q.axes[1], self.k.axes[1], self.q.axes[2]  # type: ignore[return-value]

    def is_qk(self, left: Tensor, right: Tensor, n: int, n_rows: int) -> bool:
        """Whether this is Q K^T; `right` is [..., D, S], its heads repeated or not. Of so many rows of `n` tokens."""
        heads, groups, dim = self.sizes
        if left.ndim < 3 or right.ndim < 3 or left.shape[-2:] != (n, dim) or left.numel() != n_rows * heads * n * dim:
            return False
        return right.shape[-2] == dim and right.numel() // (dim * right.shape[-1]) in (n_rows * heads, n_rows * groups)

    def is_pv(self, left: Tensor, right: Tensor, n: int, n_keys: int, n_rows: int) -> bool:
        """Whether this is the product of the probabilities with V."""
        return left.shape[-2:] == (n, n_keys) and left.numel() == n_rows * self.sizes[0] * n * n_keys and right.ndim > 2

    def op_of(self, size: float, before: float | None) -> Op | None:
        """The op that Q is: rope keeps its norm, so one that is smaller by the scale was multiplied with it."""
        if not before or not size:
            return self.q
        ratio = size / before
        known = {1.0: self.turned, self._scale: self.q if self.q is not self.turned else None}
        return known[min(known, key=lambda factor: abs(math.log(ratio / factor)))]
