"""What the ranks of a tensor-parallel engine dumped, put together: a value that all hold is whole, channels or heads of
a column-parallel matmul lie one rank after another (https://arxiv.org/abs/1909.08053).

Of any other value that ranks hold unequal nobody says how its parts fit: it is left out, and said.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tracediff.interchange.entry import Array
from tracediff.names import local_name

# Ops whose output channels or heads ranks share out; q, k and v by heads.
_COLUMNS = {
    "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm", "attn_q_rope", "attn_k_rope", "attn_kqv", "ffn_gate",
    "ffn_up", "ffn_act", "output",
}  # fmt: skip
UNEQUAL = "unequal on the ranks, and no outputs of a column-parallel matmul: parts that nobody says how to fit together"

Load = Callable[[], Array]


def together(op: str | None, parts: Sequence[Load]) -> Load | None:
    """How to load the whole of what each rank holds, in the order of ranks; None where that is not known."""
    first, *others = (load() for load in parts)
    if all(_same(first, other) for other in others):
        return parts[0]
    alike = {(array.dtype, array.values.shape[:1], array.values.shape[2:]) for array in (first, *others)}
    columns = op is not None and local_name(op) in _COLUMNS and first.values.ndim > 1
    return (lambda: _joined([load() for load in parts])) if columns and len(alike) == 1 else None


def _same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and np.array_equal(a.values, b.values, equal_nan=a.values.dtype.kind == "f")


def _joined(arrays: Sequence[Array]) -> Array:
    return Array(np.concatenate([array.values for array in arrays], 1), arrays[0].dtype)
