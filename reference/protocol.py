"""What parent and child say to each other: one request, then messages, each a JSON object on a line."""

from msgspec import Struct

from tracediff.names import Capture
from tracediff_reference.description import Read, Size


class Sought(Struct, frozen=True):
    """A ggml node to recognise: its op and the roles or weight names of its sources.

    `axes` are those of the op to record under the name `role`; None for a node that only leads to others.
    """

    op: str
    sources: tuple[str, ...]
    role: str
    axes: tuple[int | str, ...] | None = None


class Shown(Struct, frozen=True):
    """A node that holds the value of the op `role`: the nth of this op and name in a graph.

    `axes` are the op's, `part` is where its value lies in that of the node, where it is not all of it. Places among
    `block`s of so many tokens are those of the tokens that end them.
    """

    op: str
    name: str
    nth: int
    role: str
    axes: tuple[Size, ...]
    part: Read | None = None
    block: int = 0


class First(Struct, frozen=True):
    """The first node of a graph that computes, and its axis of tokens, counted as ggml does."""

    op: str
    name: str
    axis: int


class Options(Struct, frozen=True, kw_only=True):
    """How llama.cpp is to run. The defaults show every op in full precision."""

    threads: int = 2
    n_ctx: int = 0  # 0: as much as the prompt and the decode steps need
    n_batch: int = 0  # 0: the whole prompt
    n_ubatch: int = 512
    gpu_layers: int = 0
    flash_attn: bool = False
    kv_type: str = "f32"
    extra_bufts: bool = False
    library: str | None = None  # the folder of another build of libllama


class DescribeRequest(Struct, frozen=True, kw_only=True, tag="describe"):
    """The graph of a model to describe, into the file `out`; `options` are those that change it."""

    model: str
    out: str
    options: Options = Options()


class Request(Struct, frozen=True, kw_only=True, tag="trace"):
    """One trace to make; without `out` the prompt is only tokenised. One of `prompt` and `tokens` is given.

    Nodes are recognised by `nodes`, or by `shown` and `first`.
    """

    model: str
    arch: str
    out: str | None
    capture: Capture
    nodes: tuple[Sought, ...] = ()
    shown: tuple[Shown, ...] = ()
    first: First | None = None
    norm_weights: tuple[str, ...]
    n_vocab: int
    n_ctx_train: int
    weights: str | None = None
    rounding: str | None = None
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    passes: tuple[tuple[int, ...], ...] = ()  # tokens to be fed after the prompt, before any that llama.cpp chooses
    sequences: tuple[tuple[int, ...], ...] = ()  # whose each of these tokens is, the prompt's first; none: one's
    n_decode: int = 0
    options: Options = Options()


class Message(Struct, frozen=True, omit_defaults=True):
    """From the child: progress as a fraction of all nodes, the prompt's tokens, or the error that ends it."""

    progress: float | None = None
    error: str | None = None
    tokens: tuple[int, ...] | None = None
