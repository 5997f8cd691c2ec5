"""Traces and models in some storage: read by ranges, no more than is asked for."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from conftest import TOKENS, Models

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import TraceError
from tracediff.inputs import url_of
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.pipeline import check_trace
from tracediff.replay.judging import Subject, judge_ops, replays_of
from tracediff.report.json_report import render
from tracediff.trace.reader import Trace

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
Storage = tuple[Callable[[Path], Path], list[tuple[str, int, int]]]
SHAPE = Shape("llama", n_layer=4, n_embd=64, n_head=4, n_head_kv=2, n_ff=128, eps=1e-5)


@pytest.fixture
def storage() -> Storage:
    """Puts files into a storage in memory, and tells what was asked of it: name, first byte, number of bytes."""
    from fsspec.implementations.memory import MemoryFileSystem

    asked: list[tuple[str, int, int]] = []

    class Counted(MemoryFileSystem):  # type: ignore[misc]
        protocol = "counted"
        store: dict[str, object] = {}  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.rpartition("://")[2].lstrip("/")

        def cat_file(self, path: str, start: int = 0, end: int = 0, **_: object) -> bytes:
            asked.append((path.rpartition("/")[2], start, end - start))
            return super().cat_file(path, start, end)

    fsspec.register_implementation("counted", Counted, clobber=True)

    def put(path: Path) -> Path:
        for file in (path, path.with_suffix(".bin")) if path.suffix == ".trace" else (path,):
            fsspec.filesystem("counted").pipe_file(f"/runs/{file.name}", file.read_bytes())
        return Path(f"counted://runs/{path.name}")

    return put, asked


def test_a_url_is_read_as_a_path_is(storage: Storage, models: Models, tmp_path: Path) -> None:
    put, asked = storage
    model = Path(shutil.copy(models(SHAPE), tmp_path))
    trace = trace_torch(model, tmp_path / "out.trace", TorchOptions(faults=("rope_pairing@1",)), TOKENS, 1)
    here, there = check_trace(trace, model), check_trace(put(trace), put(model))
    assert there.findings == here.findings != ()
    assert render(there).replace("counted:/runs", str(tmp_path)) == render(here)
    assert asked


def test_a_task_of_one_layer_reads_that_layer(storage: Storage, models: Models, tmp_path: Path) -> None:
    """What a worker does, on this machine or another."""
    put, asked = storage
    path = models(SHAPE)
    model, trace = Model(path), Trace(trace_torch(path, tmp_path / "out.trace", TorchOptions(), TOKENS))
    plan = replays_of(model, [Subject(trace, {}, None)])[0].plan
    there = replays_of(Model(put(path)), [Subject(Trace(put(trace.path)), {}, None)], [plan])
    layer = [op.name for op in model.graph.layer(2)]
    asked.clear()
    assert all(local.judgement == "sound" for _, _, local in judge_ops(there, layer))
    weights = {name: (i.offset, i.nbytes) for name, i in model.file.tensors.items() if name.startswith("blk.2.")}
    assert {(at, n) for name, at, n in asked if name == path.name} == {*weights.values()}
    read = [(at, n) for name, at, n in asked if name == "out.bin"]
    records = [record for record in trace.ops.values() if record.op in (*layer, "blk.1.ffn_residual")]
    assert {*read} == {(record.offset, record.nbytes) for record in records}


class Served(SimpleHTTPRequestHandler):
    """Python's own server, which knows no ranges unless it has `ranges`."""

    ranges = True
    asked: list[tuple[str, int]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        """The bytes that are asked for."""
        path = Path(self.translate_path(self.path))
        if not path.exists():
            return self.send_error(404)
        held = path.read_bytes()
        begin, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        held = held[int(begin) : int(end or len(held)) + 1] if self.ranges else held
        self.asked.append((self.path, len(held)))
        self.send_response(206 if self.ranges else 200)
        self.send_header("Content-Length", str(len(held)))
        self.end_headers()
        self.wfile.write(held)
        return None

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, type[Served]]]:
    """The address at which the test's folder is served, and by what."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    handler = type("Handler", (Served,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


def test_over_http_ranges_are_read(
    served: tuple[str, type[Served]], models: Models, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    address, handler = served
    model = Path(shutil.copy(models(SHAPE), tmp_path / "model.gguf"))
    trace = trace_torch(model, tmp_path / "out.trace", TorchOptions(faults=("rope_pairing@1",)), TOKENS, 1)
    command = ("check", f"{address}/out.trace", "--model", f"{address}/model.gguf")
    code, out, _ = cli(*command)
    assert (code, out.splitlines()[:2]) == (1, cli("check", trace, "--model", model)[1].splitlines()[:2])
    assert all(n < model.stat().st_size for name, n in handler.asked if name == "/model.gguf")
    handler.ranges = False
    assert "it has no ranges" in cli(*command)[2]
    code, _, said = cli("check", f"{address}/none.trace", "--model", model)
    assert (code, "404" in said) == (2, True)


def test_what_is_not_there_is_said_in_words(storage: object) -> None:
    with pytest.raises(TraceError, match="cannot open the trace"):
        Trace(Path("counted://runs/none.trace"))
    with pytest.raises(TraceError, match="cannot open the trace: Protocol not known"):
        Trace(Path("nobody://runs/none.trace"))


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://a/b.trace", "s3://a/b.trace"),
        ("http://h:8/x", "http://h:8/x"),
        ("file:///x/y", "file:///x/y"),
        ("a/b.trace", None),
        ("/x:/y", None),
    ],
)
def test_urls_are_told_from_paths(path: str, url: str | None) -> None:
    assert url_of(Path(path)) == url


def test_a_graph_is_lifted_from_a_header_alone(
    storage: Storage, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put, asked = storage
    path = tiny("qwen3moe")
    here = Model(path).graph
    monkeypatch.setenv("TRACEDIFF_CACHE", str(tmp_path))
    assert [*Model(put(path)).graph.ops] == [*here.ops]
    assert sum(n for _, _, n in asked) < path.stat().st_size
