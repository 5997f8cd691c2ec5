"""Work grows with the number of records and no faster: counted in lines of Python executed, which no clock disturbs."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from conftest import Models, some_of

import tracediff
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.inspect.validate import validate
from tracediff.interchange.export import export_trace
from tracediff.interchange.importer import Options, import_trace
from tracediff.model.synthetic import Shape
from tracediff.names import wanted
from tracediff.pipeline import check_trace, compare_traces
from tracediff.report import json_report, terminal
from tracediff.trace.reader import Trace

SHALLOW = Shape(n_layer=1, n_embd=48, n_ff=64, n_ctx=64)
PROMPT = (256, 84)
HOME = str(Path(tracediff.__file__).parent)


def lines_executed(function: Callable[[], object]) -> int:
    """Lines of tracediff that a call executes, each turn of a loop or comprehension anew."""
    count = 0
    ours: dict[CodeType, bool] = {}

    def watch(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code not in ours:
            ours[frame.f_code] = frame.f_code.co_filename.startswith(HOME)
        count += event == "line"
        return watch if ours[frame.f_code] else None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def assert_linear(function: Callable[[int], Callable[[], object]], n: int = 8) -> None:
    """Of n, 2n and 4n steps: the second increase is twice the first (1.994 to 2.005 times), four times if quadratic."""
    function(n)()  # what is done once is done before
    a, b, c = (lines_executed(function(m)) for m in (n, 2 * n, 4 * n))
    assert c - b < 2.02 * (b - a), (a, b, c)


@pytest.fixture
def decoded(models: Models, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """The tiny model, and a trace of so many decode steps of the ops that are kept."""

    def trace(n_decode: int, kept: Callable[[str], bool] = lambda op: True, **options: Any) -> tuple[Path, Path]:
        model, path = models(SHALLOW), tmp_path / f"{n_decode}.trace"
        trace_torch(model, path, TorchOptions(**options), PROMPT, n_decode)
        return model, some_of(path, tmp_path / f"{n_decode}-kept.trace", kept)

    return trace


CAPTURES = {
    "every op": lambda op: True,
    "hidden states": lambda op: wanted(op, "layers"),
    "logits": lambda op: op == "output",
}


@pytest.mark.parametrize("capture", CAPTURES)
def test_checking(capture: str, decoded: Callable[..., tuple[Path, Path]]) -> None:
    def check(n: int) -> Callable[[], object]:
        model, trace = decoded(n, CAPTURES[capture])
        return lambda: check_trace(trace, model)

    assert_linear(check)


def silent(text: str) -> None:
    """What is said on the way."""


def new(beside: Path) -> Path:
    """A file that is not there: what is, would be looked at before it is replaced."""
    return beside.with_name(f"new{len([*beside.parent.iterdir()])}.trace")


STAGES: dict[str, Callable[[Path, Path], Callable[[], object]]] = {
    "read": lambda model, trace: lambda: Trace(trace),
    "torch": lambda model, trace: (
        lambda: trace_torch(model, new(trace), TorchOptions(), steps=[*Trace(trace).steps.values()])
    ),
    "validate": lambda model, trace: lambda: validate(trace, model),
    "compare": lambda model, trace: lambda: compare_traces(trace, trace),
    "report": lambda model, trace: (
        lambda: (
            terminal.render(compare_traces(trace, trace)),
            json_report.render(compare_traces(trace, trace)),
        )
    ),
    "export and import": lambda model, trace: (
        lambda: (
            export_trace(trace, trace.with_suffix(".npz"), silent),
            import_trace("npz", trace.with_suffix(".npz"), new(trace), Options(), say=silent),
        )
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_stages(stage: str, decoded: Callable[..., tuple[Path, Path]]) -> None:
    assert_linear(lambda n: STAGES[stage](*decoded(n)))


def test_validating_a_trace_full_of_faults(decoded: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """Each record stands twice: a finding each."""

    def doubled(n: int) -> Callable[[], object]:
        model, trace = decoded(n)
        lines = trace.read_bytes().splitlines(keepends=True)
        path = tmp_path / f"{n}-twice.trace"
        path.write_bytes(lines[0].replace(b'"data"', b'"nodata"') + b"".join(line * 2 for line in lines[1:]))
        return lambda: validate(path, model)

    assert_linear(doubled)
