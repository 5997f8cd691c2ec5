"""Models and traces that many tests share, made once per session in a temporary folder."""

import ctypes
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core: threads of several would fight over them
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, which reads it then and never again
    os.environ.pop("COLUMNS", None)  # the width of the terminal that the tests were begun in

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import numpy as np
import pytest
import tiny_models
import torch

from tracediff import pipeline
from tracediff.cli import main
from tracediff.diagnose import explain
from tracediff.engine.llama_cpp import LlamaCpp, Prompt
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph
from tracediff.model.synthetic import DEMO, Shape, write_model
from tracediff.model.weights import Weights
from tracediff.names import Capture
from tracediff.numerics.arithmetic import Scheme
from tracediff.trace.format import STORAGE
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter
from tracediff_reference.protocol import Options

TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 107, 32, 98, 114, 111, 119, 110, 260)
SHAPES = {
    "llama": Shape("llama", theta=10_000.0, eps=1e-5),
    "llama3": Shape("llama", rope_factors=True, theta=500_000.0),
    "qwen2": Shape("qwen2", tied=True),
    "qwen3": Shape("qwen3", head_dim=24, n_head=5, n_head_kv=1, n_embd=80),
    "k-quants": Shape("qwen2", n_embd=256, n_head=8, n_head_kv=2, n_ff=512, n_layer=3),
    "normed": Shape("qwen3", n_embd=256, n_head=6, n_head_kv=2, head_dim=32, n_ff=512, n_layer=2),
    "loud": Shape("qwen2", n_embd=256, n_head=8, n_head_kv=2, n_ff=512, n_layer=3, loud=True),
    "demo": DEMO,
    "tiny": Shape(n_layer=2, n_embd=48, n_ff=64, n_ctx=64),
}


def from_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """The stored bits of an array: bfloat16 from float32 that already holds bfloat16 values."""
    if dtype == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(STORAGE[dtype], copy=False)


def trace_graph(
    graph: Graph,
    file: GGUFFile,
    out: Path,
    *steps: Sequence[int],
    capture: Capture = "all",
    scheme: Scheme | None = None,
    dtype: torch.dtype = torch.float32,
    writer_of: Callable[[TraceWriter, Capture], TensorWriter] = TensorWriter,
) -> Path:
    """The trace of an engine that computes this graph, be it mistaken, fed these tokens in each step."""
    engine, at = TorchEngine(graph, Weights(file, dtype), scheme), 0
    with TraceWriter(out, "torch", graph.hparams.arch) as writer:
        for step, tokens in enumerate(steps):
            positions = tuple(range(at, at + len(tokens)))
            engine.run(step, StepInput(tuple(tokens), positions), writer_of(writer, capture))
            at += len(tokens)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_privileges() -> None:
    """Root may write anywhere; from the next exec on this process may not."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: linux/capability.h
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: linux/prctl.h


def some_of(trace: Path, out: Path, kept: Callable[[str], bool]) -> Path:
    """The trace with those ops alone that are to be kept: what a coarser engine would have recorded."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    lines = [line for line in lines if "op" not in line or kept(line["op"])]
    lines[-1]["records"] = len(lines) - 1
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def logits_of(trace: Path) -> Path:
    """A trace of the logits alone beside the whole one, and of the same data."""
    return some_of(trace, trace.with_name(f"{trace.stem}-logits.trace"), lambda op: op == "output")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a device is skipped where torch sees none."""
    if any(item.get_closest_marker("cuda") for item in items):
        none = pytest.mark.skip(reason=f"torch {torch.__version__} sees no CUDA device here")
        for item in items if not torch.cuda.is_available() else ():
            if item.get_closest_marker("cuda"):
                item.add_marker(none)


class Models:
    """Makes a model of a shape and weight type on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, shape: str | Shape, weights: str = "F32") -> Path:
        name = shape if isinstance(shape, str) else hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
        path = self._folder / f"{name}-{weights}.gguf"
        return path if path.exists() else write_model(path, SHAPES[shape] if isinstance(shape, str) else shape, weights)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", autouse=True)
def cache_of_graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEDIFF_CACHE", str(tmp_path_factory.mktemp("graphs")))
        yield


@pytest.fixture(scope="session", autouse=True)
def bugs_are_raised() -> Iterator[None]:
    """One ends the search for a cause, which is then none: a test would see an op that nothing explains. Those that are
    planted say so.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (explain, pipeline):
            patch.setattr(module, "is_bug", lambda error: "of a bug" in str(error))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of an architecture, made on first use."""
    folder = tmp_path_factory.mktemp("architectures")

    def make(arch: str) -> Path:
        path = folder / f"{arch}.gguf"
        return path if path.exists() else tiny_models.write(arch, path)

    return make


@pytest.fixture(scope="session")
def llama_cpp_trace(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trace a model in llama.cpp; the same arguments give the same trace."""
    folder, made = tmp_path_factory.mktemp("llama.cpp"), {}

    def trace(
        model: Path, tokens: tuple[int, ...] = TOKENS, n_decode: int = 2, capture: str = "all", **options: object
    ) -> Path:
        key = (model, tokens, n_decode, capture, *sorted(options.items()))
        if key not in made:
            made[key] = folder / f"{len(made)}.trace"
            LlamaCpp(
                model,
                Prompt(tokens=tokens),
                made[key],
                capture=capture,
                n_decode=n_decode,
                options=Options(**options),
            ).wait()
        return made[key]

    return trace


@pytest.fixture
def torch_trace(tmp_path: Path) -> Callable[..., Path]:
    """Trace a model in torch, fed what another trace was fed or its own greedy tokens."""

    def trace(
        model: Path, like: Path | None = None, tokens: tuple[int, ...] = TOKENS, n_decode: int = 2, **options: object
    ) -> Path:
        steps = [*Trace(like).steps.values()] if like else []
        out = tmp_path / f"torch{len(list(tmp_path.iterdir()))}.trace"
        return trace_torch(model, out, TorchOptions(**options), tokens, 0 if like else n_decode, steps)

    return trace


class Pair:
    """A reference and a candidate that match, in a folder of their own; the candidate is there to be damaged."""

    def __init__(self, folder: Path) -> None:
        self.reference, self.path, self.data = (folder / name for name in ("r.trace", "c.trace", "c.bin"))
        self.lines = self.path.read_bytes().splitlines()

    def write(self, lines: list[bytes] | None = None) -> None:
        self.path.write_bytes(b"".join(line + b"\n" for line in lines or self.lines))

    def change(self, line: int, **values: Any) -> None:
        """Other values of a line; None for a key that goes."""
        record = json.loads(self.lines[line]) | values
        kept = {key: value for key, value in record.items() if value is not None}
        self.lines[line] = json.dumps(kept, separators=(",", ":")).encode()
        self.write()

    def insert(self, line: int, text: bytes) -> None:
        """One more line, counted at the end."""
        self.lines.insert(line, text)
        self.lines[-1] = b'{"type":"end","records":%d}' % (len(self.lines) - 1)
        self.write()


@pytest.fixture(scope="module")
def traces(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole traces, r and c, and one of statistics, s, of the same model and tokens."""
    folder = tmp_path_factory.mktemp("traces")
    for name in "rc":
        trace_torch(models("tiny"), folder / f"{name}.trace", TorchOptions(), TOKENS[:4], n_decode=1)
    trace_torch(models("tiny"), folder / "s.trace", TorchOptions(capture="stats"), TOKENS[:4], n_decode=1)
    return folder


@pytest.fixture
def pair(traces: Path, tmp_path: Path) -> Pair:
    return Pair(shutil.copytree(traces, tmp_path / "traces"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: its exit code, standard output and standard error. It never raises."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tracediff", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()  # type: ignore[return-value]

    return run


@pytest.fixture
def refused(cli: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """The one message of a command line that ends undecided."""

    def run(*arguments: object) -> str:
        code, _, error = cli(*arguments)
        return the_message(code, error)

    return run


def the_message(code: int, error: str) -> str:
    assert code == 2, error
    assert "Traceback" not in error
    before, *messages = error.split("tracediff: ")
    assert before == ""
    assert len(messages) == 1, error
    assert messages[0].endswith("\n")
    return messages[0].rstrip()
