"""Broken traces, a few: benchmarks/fuzz.py runs 20,000 of the same mutants."""

import json
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import fuzz
import fuzz_imports

from tracediff.errors import InterchangeError, TraceError
from tracediff.trace.reader import Trace


@pytest.fixture(scope="module")
def every_sort(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fuzz.Seed]:
    path = fuzz.every_sort(tmp_path_factory.mktemp("every") / "every.trace")
    tracemalloc.start()
    yield fuzz.Seed(path, path)
    tracemalloc.stop()


def test_no_mutant_ends_as_none_may() -> None:
    ended, wrong = fuzz.fuzz(range(60), seed=1)
    assert wrong == []
    assert ended.total() == 60
    assert {"refused", "read, undecided", "read, diverged"} <= set(ended)


def test_the_limits_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that hangs, one that takes memory, one that fails otherwise: each is noticed."""
    monkeypatch.setattr(fuzz, "SECONDS", 0.3)

    def hang(*_: object, **__: object) -> str:
        while True:
            pass

    def take(*_: object, **__: object) -> str:
        return str(len(bytearray(64 << 20)))

    def fail(*_: object, **__: object) -> str:
        raise KeyError("op")

    for broken, expected in (
        (hang, "mutant 7: Hang: more than 0.3 s"),
        (take, "mutant 7: MemoryError: "),
        (fail, "mutant 7: KeyError: 'op'"),
    ):
        calls = iter([lambda *_, **__: "warmed up"] * 7)
        monkeypatch.setattr(fuzz, "exercise", lambda *a, calls=calls, broken=broken, **k: next(calls, broken)(*a, **k))
        ended, (wrong, _) = fuzz.fuzz(range(7, 9), seed=0)
        assert wrong.startswith(expected)
        assert not ended


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.sampled_from([2**31, 2**63 - 1, 2**63, 10**30]),
    st.floats(allow_nan=False), st.text(max_size=3), st.lists(st.integers(-1, 2**40), max_size=9),
)  # fmt: skip
KEYS = ["shape", "rows", "strides", "dtype", "offset", "nan", "inf", "min", "max", "mean", "rms", "step", "op", "type"]
RIGHT = {"shape": [2, 4], "rows": [0, 2], "strides": [5, 1], "dtype": "f32", "offset": 8, "type": "op", "step": 0}


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(record=st.dictionaries(st.sampled_from(KEYS), st.one_of(VALUES, st.sampled_from([*RIGHT.values()])), max_size=6))
def test_any_record_is_read_or_refused(record: dict[str, object], every_sort: fuzz.Seed) -> None:
    """An op record with some keys replaced by anything: what is accepted has values of its shape, in the file."""
    path = every_sort.trace.with_name("any.trace")
    path.with_suffix(".bin").write_bytes(bytes(64))
    line = json.dumps({"op": "a"} | RIGHT | record).encode()
    path.write_bytes(
        b'{"type":"trace","version":1,"engine":"e","data":"any.bin"}\n'
        b'{"type":"step","step":0,"tokens":[1,2,3],"positions":[0,1,2]}\n' + line + b"\n"
    )
    with fuzz.limits(1 << 10):
        try:
            trace = Trace(path)
        except TraceError as error:
            assert str(error).startswith(f"{path}:3: ")  # noqa: PT017 - some are refused, some are not
            return
        for op in trace.ops.values():
            if op.has_data:
                assert trace.values(op).shape == op.shape
                assert op.size <= op.extent <= 64
                assert op.rows is None or len(op.rows) == op.shape[op.token_axis]


@pytest.mark.parametrize("name", fuzz_imports.TARGETS)
def test_examples_of_every_sort_of_file_end_as_they_may(name: str) -> None:
    """benchmarks/fuzz_imports.py changes these for an hour."""
    target = fuzz_imports.TARGETS[name]
    with fuzz_imports.prepared(target.prepare) as folder:
        for seed in target.seeds():
            for data in (seed, seed[: len(seed) // 2], b""):
                assert fuzz_imports.ends(target, data, folder) is None


def test_what_ends_as_none_may_is_noticed(tmp_path: Path) -> None:
    def fail(data: bytes, folder: Path) -> None:
        raise [KeyError("a"), InterchangeError(""), SystemExit(0)][data[0]]

    ends = [fuzz_imports.ends(fuzz_imports.Target(list, fail), bytes([i]), tmp_path) for i in range(3)]
    assert ends[0].startswith("KeyError in ")
    assert ends[1] == "InterchangeError of no line, or several: ''"
    assert ends[2].startswith("SystemExit in ")
