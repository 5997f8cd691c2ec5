"""The llama.cpp engine, from outside: what to look for in ggml's graph, and the child process that looks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

from tracediff.errors import EngineError
from tracediff.model.families import has_family
from tracediff.model.graph import Extent, Graph, Op
from tracediff.model.hparams import check_tokens
from tracediff.model.lift.described import describe
from tracediff.model.lift.layout import read, size
from tracediff.model.lift.lift import Lifted, lift
from tracediff.model.model import Model
from tracediff.names import TABLED, Capture
from tracediff.trace.format import Step
from tracediff_reference.child import Child
from tracediff_reference.description import TOKENS, Description
from tracediff_reference.protocol import First, Options, Request, Shown, Sought


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to feed: text, which llama.cpp tokenises, or token ids."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None


def nodes(graph: Graph) -> list[Sought]:
    """How ggml computes each op of a family's graph: the node that holds its value, and those that lead to it."""
    return [node for op in graph for node in _nodes_of(op, graph)]


def _nodes_of(op: Op, graph: Graph) -> Iterator[Sought]:
    names = tuple(weight.name for weight in op.weights)
    axes = tuple(axis for axis in op.axes if not isinstance(axis, Extent))  # no family has any
    match op.kind:
        case "embedding":
            yield Sought("GET_ROWS", names, op.name, axes)
        case "linear" if len(names) == 2:
            yield Sought("MUL_MAT", (names[0], *op.inputs), f"{op.name} matmul")
            yield Sought("ADD", (f"{op.name} matmul", names[1]), op.name, axes)
        case "linear":
            yield Sought("MUL_MAT", (*names, *op.inputs), op.name, axes)
        case "rms_norm":
            yield Sought("RMS_NORM", op.inputs, f"{op.inputs[0]} normed")
            yield Sought("MUL", (f"{op.inputs[0]} normed", *names), op.name, axes)
        case "rope":
            yield Sought("ROPE", (op.inputs[0], *names), op.name, axes)
        case "scores":  # K comes from the cache, which is a leaf
            yield Sought("MUL_MAT", op.inputs[:1], op.name, axes)
        case "softmax":
            yield Sought("SOFT_MAX", op.inputs[:1], op.name, axes)
        case "weighted_values":
            yield Sought("MUL_MAT", op.inputs[:1], f"{op.name} per head")
            yield Sought("CONT", (f"{op.name} per head",), op.name, axes)
            query = graph[graph[op.inputs[0]].inputs[0]].inputs[0]
            yield Sought("FLASH_ATTN_EXT", (query,), op.name, axes)
        case "add":
            yield Sought("ADD", op.inputs, op.name, axes)
        case "swiglu":
            yield Sought("SWIGLU", op.inputs, op.name, axes)


def shown(lifted: Lifted, description: Description) -> list[Shown]:
    """The nodes that hold the values of a lifted graph's ops, counted among those of the same op and name."""
    nth: list[int] = []
    count: Counter[tuple[str, str]] = Counter()
    for node in description.nodes:
        nth.append(count[node.op, node.name])
        count[node.op, node.name] += 1
    found = []
    for name, place in lifted.shown.items():
        node = description.nodes[place.node]
        if node.op != "NONE":
            axes = tuple(size(axis) for axis in lifted.graph[name].axes)
            part = read(place.node, place.view) if place.view else None
            found.append(Shown(node.op, node.name, nth[place.node], name, axes, part, place.block))
    return found


def _to_recognise(model: Model, options: Options) -> dict[str, Any]:
    """What the child is to look for: what leads to a family's ops, or a lifted graph's nodes by name."""
    file = model.file
    if has_family(file):
        return {"nodes": tuple(nodes(model.graph))}
    description = describe(file, options)
    first = next(node for node in description.nodes if node.op != "NONE")
    axis = first.shape[::-1].index(TOKENS)
    return {
        "shown": tuple(shown(lift(description, file), description)), "first": First(first.op, first.name, axis)
    }  # fmt: skip


def _rounding(graph: Graph, options: Options) -> str | None:
    """The coarsest type that values are rounded to inside ops: the cache's, or that of ggml's table of GELU."""
    if options.kv_type != "f32":
        return options.kv_type
    return "f16" if any(op.kind in TABLED for op in graph) else None


class LlamaCpp(Child):
    """A running child that writes one trace: of the prompt, of `passes` after it, then of so many tokens of its choice.

    `sequences` say whose each token of prompt and passes is, where there are several. Raises EngineError at once for a
    token id outside the vocabulary.
    """

    def __init__(
        self,
        model: Path | Model,
        prompt: Prompt,
        out: Path | None,
        *,
        capture: Capture = "all",
        passes: Sequence[tuple[int, ...]] = (),
        sequences: Sequence[tuple[int, ...]] = (),
        n_decode: int = 0,
        options: Options | None = None,
    ) -> None:
        model = Model.opened(model)
        graph, h = model.graph, model.graph.hparams
        check_tokens([*(prompt.tokens or ()), *chain(*passes)], h.n_vocab)
        if capture == "sketch":
            raise EngineError(
                "--capture sketch is of torch and transformers. Capture all of llama.cpp: a trace with values is "
                "compared with one of sketches as it is."
            )
        if sequences and (capture != "all" or n_decode or not has_family(model.file)):
            raise EngineError(
                "several sequences at once are traced in llama.cpp with --capture all and --decode-tokens, of llama, "
                "qwen2 and qwen3. Trace one after the other."
            )
        options = options or Options()
        recognised = _to_recognise(model, options) if out else {}
        request = Request(
            model=str(model.path), arch=h.arch, out=str(out) if out else None, capture=capture,
            norm_weights=tuple(weight.name for weight in graph.norm_weights()),
            n_vocab=h.n_vocab, n_ctx_train=h.n_ctx, prompt=prompt.text, tokens=prompt.tokens,
            passes=tuple(passes), sequences=tuple(sequences), n_decode=n_decode, options=options,
            weights=graph.matmul_type, rounding=_rounding(graph, options), **recognised,
        )  # fmt: skip
        super().__init__(request)

    @classmethod
    def fed(cls, model: Model, steps: Sequence[Step], out: Path, **others: Any) -> Self:
        """One that is fed these steps, of one sequence or several; `others` as of the class."""
        first, *passes = (step.tokens for step in steps)
        whose = [step.sequences or (step.sequence,) * len(step.tokens) for step in steps]
        sequences = whose if any(map(any, whose)) else ()
        return cls(model, Prompt(tokens=first), out, passes=passes, sequences=sequences, **others)


def tokenize(model: Path | Model, text: str) -> tuple[int, ...]:
    """The token ids of a prompt, by llama.cpp's tokeniser."""
    return LlamaCpp(model, Prompt(text=text), None).wait()
