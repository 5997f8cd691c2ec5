"""What parent and child say to each other: one request, then messages, each a JSON object on a line."""

from msgspec import Struct

from tracediff.names import Capture


class Node(Struct, frozen=True):
    """A ggml node to recognise: its op and the roles or weight names of its sources.

    `axes` are those of the op to record under the name `role`; None for a node that only leads to others.
    """

    op: str
    sources: tuple[str, ...]
    role: str
    axes: tuple[int | str, ...] | None = None


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


class DescribeRequest(Struct, frozen=True, kw_only=True, tag="describe"):
    """The graph of a model to describe, into the file `out`; `options` are those that change it."""

    model: str
    out: str
    options: Options = Options()


class Request(Struct, frozen=True, kw_only=True, tag="trace"):
    """One trace to make; without `out` the prompt is only tokenised. One of `prompt` and `tokens` is given."""

    model: str
    arch: str
    out: str | None
    capture: Capture
    nodes: tuple[Node, ...]
    norm_weights: tuple[str, ...]
    n_vocab: int
    n_ctx_train: int
    weights: str | None = None
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    n_decode: int = 0
    options: Options = Options()


class Message(Struct, frozen=True, omit_defaults=True):
    """From the child: progress as a fraction of all nodes, the prompt's tokens, or the error that ends it."""

    progress: float | None = None
    error: str | None = None
    tokens: tuple[int, ...] | None = None
