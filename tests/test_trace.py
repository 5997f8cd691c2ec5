"""The trace format: what is written is what is read, bit by bit, and what is read is a trace or a TraceError."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import from_float
from hypothesis import given, settings
from hypothesis import strategies as st

from tracediff.errors import TraceError
from tracediff.trace.format import STORAGE, DType, Header, OpRecord, Statistics, Step, Weight, to_float
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

DTYPES: list[DType] = ["f64", "f32", "f16", "bf16"]
BITS = {"f64": np.uint64, "f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}


def patterns(dtype: str) -> np.ndarray:
    """Stored values of every sort: all that 16 bits can hold, else the edges of each exponent and random bits."""
    width = STORAGE[dtype].itemsize * 8
    if width == 16:
        return np.arange(1 << 16, dtype=np.uint16).view(STORAGE[dtype])
    mantissa = 52 if width == 64 else 23
    exponents = np.arange(1 << (width - mantissa), dtype=np.uint64) << mantissa  # the sign included
    edges = [exponents | np.uint64(m) for m in (0, 1, (1 << (mantissa - 1)), (1 << mantissa) - 1)]
    noise = np.random.default_rng(0).integers(0, 1 << width, 10_000, np.uint64, endpoint=False)
    return np.concatenate([*edges, noise]).astype(BITS[dtype]).view(STORAGE[dtype])


def statistics(values: np.ndarray, nan: int = 0, inf: int = 0) -> Statistics:
    rms = float(np.sqrt(np.square(values).mean()))
    return Statistics(float(values.min()), float(values.max()), float(values.mean()), rms, nan, inf)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.trace"


# ---- Values


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_read_as_written(dtype: DType, path: Path) -> None:
    values = patterns(dtype)
    values = values[: len(values) // 4 * 4].reshape(2, -1, 2)
    assert np.isnan(to_float(values, dtype)).any()
    assert np.isinf(to_float(values, dtype)).any()
    with TraceWriter(path, "e") as writer:
        writer.weight("w", values[0], dtype)
        writer.step(0, [1], [0])
        writer.op(0, "a", values, dtype)
        writer.op(0, "b", values[:, ::3], dtype)  # not contiguous
    trace = Trace(path)
    for record, written in (
        (trace.weights["w"], values[0]),
        (trace.ops[0, "a"], values),
        (trace.ops[0, "b"], values[:, ::3]),
    ):
        assert record.dtype == dtype
        read = trace.values(record)
        stored = read.view(np.uint32) >> 16 if dtype == "bf16" else read.view(BITS[dtype])
        np.testing.assert_array_equal(stored, written.view(BITS[dtype]))
    assert (path.parent / "a.bin").stat().st_size == values[0].nbytes + values.nbytes + values[:, ::3].nbytes


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(from_float(to_float(bits, "bf16"), "bf16"), bits)
    assert to_float(np.array([0x3F80, 0xC020], np.uint16), "bf16").tolist() == [1.0, -2.5]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 0, 2), (1, 2, 3, 4)])
def test_shapes(shape: tuple[int, ...], path: Path) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with TraceWriter(path, "e") as writer:
        writer.step(0, [1], [0])
        writer.op(0, "a", values, "f32")
        writer.op(0, "b", values, "f32")
    trace = Trace(path)
    for record in trace.ops.values():
        np.testing.assert_array_equal(trace.values(record), values, strict=True)


def test_values_of_another_dtype_are_refused(path: Path) -> None:
    with TraceWriter(path, "e") as writer, pytest.raises(ValueError, match="float64 values given as f32"):
        writer.op(0, "a", np.zeros(3), "f32")


# ---- Records


def test_records_are_read_as_written(path: Path) -> None:
    values = np.array([[1, -2], [3, 4]], np.float32)
    with TraceWriter(path, 'my "engine" \\ é', "qwen2", "model.gguf", "Q4_K") as writer:
        writer.weight("w", values[0])
        writer.step(0, [5, 6], [0, 1])
        writer.op(0, "b", values, "f32")
        writer.op_statistics(0, "a", (2, 2), statistics(values, nan=1, inf=2))
        writer.step(3, [7], [2])
        writer.op_statistics(3, "b", (1, 2), Statistics(None, None, None, None, nan=2))
    trace = Trace(path)
    assert trace.cut is None
    assert trace.header == Header(1, 'my "engine" \\ é', "qwen2", "model.gguf", "a.bin", "Q4_K")
    assert trace.weights == {"w": Weight(weight="w", shape=(2,), dtype="f32", offset=0)}
    assert trace.steps == {0: Step(0, (5, 6), (0, 1)), 3: Step(3, (7,), (2,))}
    assert trace.tokens == [5, 6, 7]
    assert list(trace.ops) == [(0, "b"), (0, "a"), (3, "b")]  # execution order
    assert [record.op for record in trace.step_ops(0)] == ["b", "a"]
    assert trace.ops[0, "b"] == OpRecord(step=0, op="b", shape=(2, 2), dtype="f32", offset=8)
    assert json.loads(path.read_bytes().splitlines()[-1]) == {"type": "end", "records": 7}


def test_statistics_only(path: Path) -> None:
    given = statistics(np.array([0.1, -1e150, 5e-324, 2 / 3]), nan=3)
    with TraceWriter(path, "e") as writer:
        writer.step(0, [1], [0])
        writer.op_statistics(0, "a", (1, 7), given)
        writer.op_statistics(0, "none finite", (2,), Statistics(None, None, None, None, 1, 1))
    trace = Trace(path)
    read = trace.ops[0, "a"]
    assert read.has_statistics
    assert not read.has_data
    assert (read.min, read.max, read.mean, read.rms, read.nan, read.inf) == (
        given.min, given.max, given.mean, given.rms, 3, 0,
    )  # fmt: skip
    assert not trace.ops[0, "none finite"].has_statistics
    assert trace.ops[0, "none finite"].size == 2
    with pytest.raises(TraceError, match="statistics only"):
        trace.values(read)


def test_data_and_statistics(path: Path) -> None:
    """Both on one line, as an engine may write them."""
    (path.parent / "a.bin").write_bytes(np.arange(4, dtype="<f4").tobytes())
    path.write_text(
        '{"type":"trace","version":1,"engine":"e","data":"a.bin"}\n{"type":"step","step":0,"tokens":[1],"positions":[0]}\n'
        '{"type":"op","step":0,"op":"a","shape":[4],"dtype":"f32","offset":0,"min":0,"max":3,"mean":1.5,"rms":1.87}\n'
        '{"type":"end","records":3}\n'
    )
    trace = Trace(path)
    record = trace.ops[0, "a"]
    assert record.has_data
    assert record.has_statistics
    assert trace.values(record).tolist() == [0, 1, 2, 3]


def test_no_data_file(path: Path) -> None:
    path.write_text(
        '{"type":"trace","version":1,"engine":"e"}\n{"type":"step","step":0,"tokens":[1],"positions":[0]}\n'
        '{"type":"op","step":0,"op":"a","shape":[4],"nan":4}\n{"type":"end","records":3}\n'
    )
    assert Trace(path).ops[0, "a"].nan == 4


# ---- Written in pieces


def test_pieces(path: Path) -> None:
    """Two ops whose rows come in turn, the last first, and one in between that comes whole."""
    a, b = np.arange(12, dtype=np.float32).reshape(4, 3), -np.arange(8, dtype=np.float16).reshape(4, 2)
    with TraceWriter(path, "e") as writer:
        writer.step(0, [1, 2, 3, 4], [0, 1, 2, 3])
        at_a, at_b = writer.reserve(a.nbytes), writer.reserve(b.nbytes)
        for rows in (slice(2, 4), slice(0, 2)):
            writer.write_at(at_a + rows.start * a.strides[0], a[rows])
            writer.write_at(at_b + rows.start * b.strides[0], b[rows])
            if rows.start:
                writer.op(0, "whole", a[0], "f32")
        writer.op_at(0, "b", b.shape, "f16", at_b)
        writer.op_at(0, "a", a.shape, "f32", at_a)
    trace = Trace(path)
    assert list(trace.ops) == [(0, "whole"), (0, "b"), (0, "a")]
    for name, values in (("a", a), ("b", b), ("whole", a[0])):
        np.testing.assert_array_equal(trace.values(trace.ops[0, name]), values, strict=True)


# ---- Cut off


def test_every_prefix_is_readable(path: Path) -> None:
    """Cut at any byte after the first line it holds the records of the lines that are whole, and says where it ends."""
    with TraceWriter(path, "e") as writer:
        writer.step(0, [1], [0])
        for name in "abc":
            writer.op(0, name, np.ones(3, np.float32), "f32")
    content = path.read_bytes()
    for size in range(content.index(b"\n") + 1, len(content)):
        path.write_bytes(content[:size])
        trace = Trace(path)
        lines = content[:size].count(b"\n")
        assert len(trace.ops) == max(0, lines - 2)
        where = f"after line {lines}" if content[size - 1 : size] == b"\n" else f"in the middle of line {lines + 1}"
        assert trace.cut == f"it ends {where} without an 'end' record"
    path.write_bytes(content)
    assert Trace(path).cut is None


def test_readable_while_it_is_written(path: Path) -> None:
    """What a crash would leave: each line's data stands before the line does."""
    writer = TraceWriter(path, "e")
    assert Trace(path).cut == "it ends after line 1 without an 'end' record"
    with writer:
        writer.step(0, [1], [0])
        for i in range(3):
            writer.op(0, f"op {i}", np.full(5, i, np.float32), "f32")
            trace = Trace(path)
            assert trace.cut == f"it ends after line {i + 3} without an 'end' record"
            assert [trace.values(record)[4] for record in trace.ops.values()] == list(range(i + 1))


def test_an_exception_leaves_no_end(path: Path) -> None:
    def interrupted() -> None:
        with TraceWriter(path, "e") as writer:
            writer.step(0, [1], [0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert Trace(path).cut == "it ends after line 2 without an 'end' record"


def test_short_data(path: Path) -> None:
    """Without `end` the trace is read up to the first record whose bytes are missing; with it something is wrong."""
    with TraceWriter(path, "e") as writer:
        writer.step(0, [1], [0])
        for name in "abc":
            writer.op(0, name, np.ones(3, np.float32), "f32")
    data = path.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:20])
    needs = "the data file 'a.bin' is too short: the record needs 12 bytes at 12, the file has 20"
    with pytest.raises(TraceError, match=f"a.trace:4: {needs}. Copy the whole of it, or trace again."):
        Trace(path)
    path.write_bytes(path.read_bytes().rpartition(b'{"type":"end"')[0])
    trace = Trace(path)
    assert list(trace.ops) == [(0, "a")]
    assert trace.cut == f"line 4: {needs}"


# ---- Writing


@pytest.mark.parametrize("room", [20, 200])
@pytest.mark.parametrize(
    "write",
    [
        lambda writer: writer.op(0, "a", np.ones(99, np.float32), "f32"),
        lambda writer: writer.write_at(writer.reserve(1 << 20), np.ones(1 << 17)),
    ],
)
def test_full_disk(room: int, write: Callable[[TraceWriter], None], path: Path) -> None:
    """No room for the first line, or for the data."""

    def trace() -> None:
        with TraceWriter(path, "e") as writer:
            write(writer)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(TraceError, match="cannot write the trace: File too large"):
            trace()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_only_a_trace_is_overwritten(path: Path) -> None:
    model = path.with_suffix(".bin")
    model.write_bytes(b"GGUF")
    with pytest.raises(TraceError, match=r"a.bin exists and is no trace's. Move it away, or name the trace otherwise"):
        TraceWriter(path, "e")
    for name in (model, path.parent):
        with pytest.raises(TraceError, match=r"a trace is two files, NAME.trace and NAME.bin. Name it .*\.trace\."):
            TraceWriter(name, "e")
    assert model.read_bytes() == b"GGUF"
    model.unlink()
    for engine in ("one", "two"):
        with TraceWriter(path, engine):
            pass
        assert Trace(path).header.engine == engine


# ---- Anything else is refused


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with a record of every sort."""
    path = tmp_path_factory.mktemp("whole") / "a.trace"
    with TraceWriter(path, "e", "qwen2", "m.gguf", "F16") as writer:
        writer.weight("w", np.ones(4, np.float32))
        for step, tokens in enumerate(((1, 2, 3), (4,), (5,))):
            writer.step(step, tokens, tokens)
            for dtype in DTYPES:
                writer.op(step, dtype, patterns(dtype)[:12].reshape(3, 4), dtype)
            writer.op_statistics(step, "s", (3, 4), Statistics(-1.5, 2.5e-7, 0.0, 1e300, 1, 2))
            writer.op_statistics(step, "n", (3, 4), Statistics(None, None, None, None, 12))
    return path


NUMBERS = [b"0", b"-1", b"7", b"1e308", b"-5e-324", b"9223372036854775807", b"9" * 30, b"1e400", b"null", b"[]", b"{}"]


@st.composite
def mutants(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with bytes changed, lines swapped, doubled or gone, a number replaced, or the end cut off."""
    sort = draw(st.sampled_from(["bytes", "swap", "double", "drop", "number", "cut"]))
    if sort == "bytes":
        changed = bytearray(content)
        for _ in range(draw(st.integers(1, 4))):
            changed[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
        return bytes(changed)
    if sort == "cut":
        return content[: draw(st.integers(0, len(content)))]
    lines = content.split(b"\n")
    i, j = draw(st.integers(0, len(lines) - 1)), draw(st.integers(0, len(lines) - 1))
    if sort == "swap":
        lines[i], lines[j] = lines[j], lines[i]
    elif sort == "double":
        lines.insert(j, lines[i])
    elif sort == "drop":
        del lines[i]
    else:
        tokens = lines[i].replace(b",", b"\n,\n").replace(b":", b"\n:\n").replace(b"]", b"\n]\n").split(b"\n")
        at = draw(st.integers(0, len(tokens) - 1))
        tokens[at] = draw(st.sampled_from(NUMBERS))
        lines[i] = b"".join(tokens)
    return b"\n".join(lines)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzzed(whole: Path, data: st.DataObject) -> None:
    """A mutant is read, with every value that it says it has, or refused with a TraceError that names the line."""
    mutant = whole.with_name("mutant.trace")
    content = data.draw(mutants(whole.read_bytes()))
    if data.draw(st.booleans()):
        content = data.draw(mutants(content)) if content else content
    mutant.write_bytes(content)
    try:
        trace = Trace(mutant)
    except TraceError as error:
        assert str(error).startswith(f"{mutant}:")  # noqa: PT017 - most mutants are refused, some are not
        return
    for record in (*trace.weights.values(), *trace.ops.values()):
        if record.has_data:
            assert trace.values(record).shape == record.shape
    for op in trace.ops.values():
        assert op.step in trace.steps
