"""The llama.cpp engine, from outside: what to look for in ggml's graph, and the child process that looks.

A child, because ggml aborts the whole process on a failed assertion and brings its own OpenMP. Whatever it
recorded before it died stays readable.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tracediff.errors import EngineError
from tracediff.model.graph import Graph, Op
from tracediff.model.hparams import check_tokens
from tracediff.names import Capture
from tracediff_reference.protocol import Message, Node, Options, Request

_LAST_LINES = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to feed: text, which llama.cpp tokenises, or token ids."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None


def nodes(graph: Graph) -> list[Node]:
    """How ggml computes each op of the graph: the node that holds its value, and those that lead to it."""
    return [node for op in graph for node in _nodes_of(op, graph)]


def _nodes_of(op: Op, graph: Graph) -> Iterator[Node]:
    names = tuple(weight.name for weight in op.weights)
    match op.kind:
        case "embedding":
            yield Node("GET_ROWS", names, op.name, op.axes)
        case "linear" if len(names) == 2:
            yield Node("MUL_MAT", (names[0], *op.inputs), f"{op.name} matmul")
            yield Node("ADD", (f"{op.name} matmul", names[1]), op.name, op.axes)
        case "linear":
            yield Node("MUL_MAT", (*names, *op.inputs), op.name, op.axes)
        case "rms_norm":
            yield Node("RMS_NORM", op.inputs, f"{op.inputs[0]} normed")
            yield Node("MUL", (f"{op.inputs[0]} normed", *names), op.name, op.axes)
        case "rope":
            yield Node("ROPE", (op.inputs[0], *names), op.name, op.axes)
        case "scores":  # K comes from the cache, which is a leaf
            yield Node("MUL_MAT", op.inputs[:1], op.name, op.axes)
        case "softmax":
            yield Node("SOFT_MAX", op.inputs[:1], op.name, op.axes)
        case "weighted_values":
            yield Node("MUL_MAT", op.inputs[:1], f"{op.name} per head")
            yield Node("CONT", (f"{op.name} per head",), op.name, op.axes)
            query = graph[graph[op.inputs[0]].inputs[0]].inputs[0]
            yield Node("FLASH_ATTN_EXT", (query,), op.name, op.axes)
        case "add":
            yield Node("ADD", op.inputs, op.name, op.axes)
        case "swiglu":
            yield Node("SWIGLU", op.inputs, op.name, op.axes)


class LlamaCpp:
    """A running child that writes one trace. `wait` until it is done before reading the trace.

    Raises EngineError at once for a token id outside the vocabulary.
    """

    def __init__(
        self,
        model: Path,
        graph: Graph,
        prompt: Prompt,
        out: Path | None,
        *,
        capture: Capture = "all",
        n_decode: int = 0,
        options: Options | None = None,
    ) -> None:
        self.tokens: tuple[int, ...] = ()
        h = graph.hparams
        check_tokens(prompt.tokens or (), h.n_vocab)
        request = Request(
            model=str(model), arch=h.arch, out=str(out) if out else None, capture=capture, nodes=tuple(nodes(graph)),
            norm_weights=tuple(weight.name for weight in graph.norm_weights()),
            n_vocab=h.n_vocab, n_ctx_train=h.n_ctx, prompt=prompt.text, tokens=prompt.tokens,
            n_decode=n_decode, options=options or Options(), weights=graph.matmul_type,
        )  # fmt: skip
        message = msgspec.json.encode(request)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tracediff_reference"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # it would fill the last lines, and takes seconds
        )
        assert self._child.stdin
        try:
            with suppress(BrokenPipeError), self._child.stdin as stdin:  # broken: it died already, `wait` says how
                stdin.write(message)
        except BaseException:  # Ctrl-C
            self.stop()
            raise

    def wait(self, progress: Callable[[float], None] = lambda fraction: None) -> tuple[int, ...]:
        """The prompt's tokens when the child is done; raises EngineError with its last lines if it died."""
        error = None
        try:
            assert self._child.stdout
            for line in self._child.stdout:
                message = msgspec.json.decode(line, type=Message)
                error = message.error or error
                self.tokens = message.tokens or self.tokens
                if message.progress is not None:
                    progress(message.progress)
            code = self._child.wait()
        except BaseException:  # Ctrl-C as well: never leave a child behind
            self.stop()
            raise
        if code:
            raise EngineError(self._how_it_died(code, error))
        return self.tokens

    def stop(self) -> None:
        """End the child, whatever it does."""
        self._child.kill()
        self._child.wait()

    def _how_it_died(self, code: int, error: str | None) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        said = "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:])
        if error:
            return error + (f"\nIts last lines:\n{said}" if "llama.cpp" in error and said else "")
        how = f"with exit code {code}"
        if code < 0:
            how = f"by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (out of memory?)"
        return f"llama.cpp's process ended {how}. Its last lines:\n{said}"


def tokenize(model: Path, graph: Graph, text: str) -> tuple[int, ...]:
    """The token ids of a prompt, by llama.cpp's tokeniser."""
    return LlamaCpp(model, graph, Prompt(text=text), None).wait()
