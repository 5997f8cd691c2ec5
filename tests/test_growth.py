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
from tracediff.model.synthetic import Shape
from tracediff.names import wanted
from tracediff.pipeline import check_trace

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
    """Of n, 2n and 4n steps: the second increase is twice the first, and would be four times it if quadratic."""
    function(n)()  # what is done once is done before
    a, b, c = (lines_executed(function(m)) for m in (n, 2 * n, 4 * n))
    assert c - b < 2.2 * (b - a), (a, b, c)


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
