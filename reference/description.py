"""What llama.cpp's graph of a model is made of: ggml's nodes, each size a formula in the tokens and the cells visible.

This is what crosses from the child to the parent and what is kept on disk: no pointers, no values.
"""

import msgspec
from msgspec import Struct

VERSION = 5  # of this description: one of another version is made again

# A whole number, or [a, b, c, d, e] for a + b T + c S + d T S + e T T: T tokens of the step, S positions visible.
# None where neither fits: the size follows something else.
Size = int | tuple[int, int, int, int, int] | None
TOKENS, POSITIONS = (0, 1, 0, 0, 0), (0, 0, 1, 0, 0)


class Read(Struct, frozen=True, array_like=True):
    """How a node reads a source: elements of tensor `of`, from `offset` on, at these strides, outermost axis first."""

    of: int
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0


class Node(Struct, frozen=True, array_like=True):
    """A tensor of the graph that is no view: a leaf (op NONE), or what an op computes.

    `reads` has None for a source that is absent. `into` says where a node writes into another's memory, a cache's.
    """

    op: str  # as ggml_op_desc says: MUL_MAT, SWIGLU, GELU
    name: str
    type: str
    shape: tuple[Size, ...]  # outermost first
    reads: tuple[Read | None, ...] = ()
    # op_params up to the last that is not 0; those that follow the step: so much for each token, else None
    params: tuple[int | float | None, ...] = ()
    is_input: bool = False  # set by llama.cpp at each step: tokens, positions, masks
    is_windowed: bool = False  # as wide as the cache of the layers with a sliding window
    into: Read | None = None


class Description(Struct, frozen=True, tag=True):
    """The nodes in the order of execution, leaves before their first use."""

    nodes: tuple[Node, ...]
    window: int = 0  # of the layers with a sliding window, in tokens
    is_causal: bool = True  # whether tokens see those before them alone
    engine: str = ""  # what made it
    version: int = VERSION


def encode(description: Description) -> bytes:
    """As MessagePack."""
    return msgspec.msgpack.encode(description)


def decode(data: bytes) -> Description | None:
    """None where it is damaged, or of another version."""
    try:
        found = msgspec.msgpack.decode(data, type=Description)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return found if found.version == VERSION else None
