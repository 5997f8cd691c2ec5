"""The fixture `record`, which pytest finds by itself where tracediff is installed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

Record = Callable[..., AbstractContextManager[Path]]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """`tracediff.record` into a trace of the test's own, whose path it gives: to be asserted once the block has ended.

    def test_prefill(record):
        with record(model, gguf="model.gguf", tokens=ids) as trace:
            model(ids)
        assert_trace(trace, "model.gguf")
    """

    @contextmanager
    def recording(model: Any, **options: Any) -> Iterator[Path]:
        from tracediff import record as into  # needs torch, which pytest does without until a test asks for it

        out = tmp_path / f"recorded-{len(list(tmp_path.glob('recorded-*.trace')))}.trace"
        with into(model, out, **options):
            yield out

    return recording
