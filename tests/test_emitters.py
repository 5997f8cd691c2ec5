"""The emitters that engine authors copy: each one's example, compiled, run, and read back whole.

Every example writes the same trace: two steps of a small computation, then values that are hard on statistics.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from json_schema import valid
from mutants import write_raw

from tracediff.errors import TraceError
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.synthetic import Shape
from tracediff.model.weights import Weights
from tracediff.names import NAMES, StepOf
from tracediff.pipeline import check_trace
from tracediff.replay.judging import judge_all
from tracediff.replay.replay import Replay
from tracediff.trace.format import STORAGE, End, Header, OpRecord, Step, Values, Weight, decode, to_float
from tracediff.trace.reader import Trace
from tracediff.trace.runs import open_trace

ROOT = Path(__file__).parent.parent
EMITTERS = ROOT / "emitters"
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
ENGINE = 'q"b\\s/\t\n\x01é🙂'  # what JSON must escape, and what it must not


def run(*command: str | Path, **options: Any) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def tool(*names: str) -> str:
    """The first of these compilers on PATH; C's is required."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None and "cc" in names:
        pytest.fail("a C compiler is required: install gcc")
    if found is None:
        pytest.skip(f"{' or '.join(names)} is not on PATH; this emitter can only be tested with it")
    return found


def build_c(out: Path) -> list[str]:
    run(tool("cc", "gcc"), "-std=c99", "-O2", *STRICT, EMITTERS / "c/example.c", "-o", out, "-lm")
    return [str(out)]


def build_cpp(out: Path) -> list[str]:
    run(tool("g++"), "-std=c++11", "-O2", *STRICT, "-x", "c++", EMITTERS / "c/example.c", "-o", out)
    return [str(out)]


def build_fast_math(out: Path) -> list[str]:
    """Engines are compiled so, and then isnan() is always false."""
    run(tool("cc", "gcc"), "-std=c99", "-O3", "-ffast-math", EMITTERS / "c/example.c", "-o", out, "-lm")
    return [str(out)]


def build_rust(out: Path) -> list[str]:
    run(tool("rustc"), "--edition", "2021", "-D", "warnings", EMITTERS / "rust/example.rs", "-o", out)
    return [str(out)]


def build_go(out: Path) -> list[str]:
    cache = os.environ.get("GOCACHE", str(out.parent / "cache"))
    run(tool("go"), "build", "-o", out, "./example", cwd=EMITTERS / "go", env={**os.environ, "GOCACHE": cache})
    return [str(out)]


def build_python(out: Path) -> list[str]:
    return [sys.executable, str(EMITTERS / "python/example.py")]


BUILDS: dict[str, Callable[[Path], list[str]]] = {
    "c": build_c, "c++": build_cpp, "fast-math": build_fast_math, "rust": build_rust, "go": build_go,
    "python": build_python,
}  # fmt: skip


@pytest.fixture(scope="module", params=BUILDS)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of one language's example."""
    return BUILDS[request.param](tmp_path_factory.mktemp("example") / "example")


def statistics(bits: np.ndarray, dtype: str) -> dict[str, Any]:
    """By numpy in float64; extended precision where the squares overflow even that."""
    x = to_float(bits, dtype).astype(np.longdouble)
    finite = x[np.isfinite(x)]
    counts = {"nan": int(np.isnan(x).sum()), "inf": int(np.isinf(x).sum())}
    if not finite.size:
        return counts
    return counts | {
        "min": float(finite.min()),
        "max": float(finite.max()),
        "mean": float(finite.mean()),
        "rms": float(np.sqrt(np.square(finite).mean())),
    }


def step_values(tokens: list[int]) -> list[tuple[str, str, np.ndarray]]:
    """What a step of the examples computes: op, dtype and stored values."""
    table = ((np.arange(5)[:, None] * 7 + np.arange(4) * 3) % 11 - 5).astype(np.float64) / 8
    x = table[tokens]
    normed = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + np.arange(4) / 4)
    normed = normed.astype(np.float32)
    rows = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    # Sums of a few products of float32 and eighths are exact in float64, in whatever order.
    return [
        ("token_embd", "bf16", rows),
        ("output_norm", "f32", normed),
        ("output", "f64", normed.astype(np.float64) @ table.T),
    ]


def extremes() -> list[tuple[str, str, np.ndarray]]:
    nan, inf = np.nan, np.inf
    halves = np.array([[0x3C00, 0xC100, 0x7C00], [0x7E00, 0x0001, 0x7BFF]], np.uint16).view(np.float16)
    bits = np.array([[0x3F80, 0xC020, 0x7F80], [0x7FC0, 0x0001, 0x7F7F]], np.uint16)
    return [
        ("extremes.f16", "f16", halves),
        ("extremes.bf16", "bf16", bits),
        ("extremes.f32", "f32", np.array([[1, -2.5, nan], [inf, -inf, 0.1]], np.float32)),
        ("extremes.f64", "f64", np.array([[1e300, -1e300, nan], [inf, 0.1, 1.7e308]])),
    ]


def layouts() -> list[tuple[str, str, np.ndarray]]:
    """The second lies in columns with a gap between them; Python writes it in C order."""
    nan = np.nan
    return [
        ("layouts.rows", "f32", np.array([[1, -2, 3], [nan, nan, 0.5]], np.float32)),
        ("layouts.strides", "f32", np.array([[1, 0.5], [-2, 0.25], [3, -0.125]], np.float32)),
    ]


def check_record(trace: Trace, record: Values, dtype: str, bits: np.ndarray, data: bool, stats: bool) -> None:
    assert record.shape == bits.shape
    assert record.has_data is data
    assert record.dtype == (dtype if data else None)
    if data:
        expected = to_float(bits.astype(STORAGE[dtype]), dtype)
        values = trace.values(record)
        assert values.dtype == expected.dtype
        np.testing.assert_array_equal(values, expected)
        assert np.array_equal(np.signbit(values), np.signbit(expected))
    assert record.has_statistics is (stats and bool(np.isfinite(to_float(bits, dtype)).any()))
    expected_statistics = statistics(bits, dtype) if stats else {"nan": 0, "inf": 0}
    for key in ("min", "max", "mean", "rms", "nan", "inf"):
        exact = key not in ("mean", "rms")
        expected = expected_statistics.get(key)
        found = getattr(record, key)
        assert found == (expected if exact or expected is None else pytest.approx(expected, rel=1e-13)), key


def test_example_is_read_back_whole(example: list[str], tmp_path: Path) -> None:
    run(*example, "out.trace", ENGINE, cwd=tmp_path)
    trace = Trace(tmp_path / "out.trace")
    assert trace.cut is None
    assert trace.header == Header(
        1, ENGINE, "llama", None, "out.bin", "F32", context=64, rounding="bf16", rollback=True
    )
    second = StepOf(2, 1)
    assert trace.steps == {
        0: Step(0, (3, 1, 4), (0, 1, 2)),
        1: Step(1, (1,), (3,)),
        2: Step(2, (3,), (4,)),
        second: Step(second, (1,), (0,), 1),
    }
    assert list(trace.weights) == ["output_norm.weight"]
    norm = (1 + np.arange(4) / 4).astype(np.float32)
    check_record(trace, trace.weights["output_norm.weight"], "f32", norm, data=True, stats=False)

    expected = [(0, *values, True, False) for values in step_values([3, 1, 4])]
    expected += [(0, *values, True, True) for values in layouts()]
    expected += [(1, *values, False, True) for values in step_values([1])]
    expected += [(1, *values, True, True) for values in extremes()]
    expected += [(1, "extremes.nan", "f32", np.full(2, np.nan, np.float32), False, True)]
    expected += [(1, "extremes.empty", "f32", np.empty((0, 3), np.float32), True, True)]
    expected += [(2, "batch.rows", "f32", np.array([[1]], np.float32), True, False)]
    expected += [(second, "batch.rows", "f32", np.array([[-2]], np.float32), True, False)]
    expected += [(second, "batch.scores", "f32", np.array([[[1]]], np.float32), True, False)]
    assert list(trace.ops) == [(step, op) for step, op, *_ in expected]  # execution order
    for step, op, dtype, bits, data, stats in expected:
        check_record(trace, trace.ops[step, op], dtype, bits, data, stats)
    assert [record.rows for record in trace.ops.values()].count(None) == len(expected) - 1
    assert trace.ops[0, "layouts.rows"].rows == (0, 2)
    assert trace.ops[0, "layouts.strides"].strides == (None if "example.py" in example[-1] else (1, 5))
    held = [*trace.weights.values(), *trace.ops.values()]
    assert (tmp_path / "out.bin").stat().st_size == sum(record.nbytes for record in held)


@pytest.mark.parametrize("full", ["out.trace", "out.bin"])
def test_full_disk_is_reported(example: list[str], tmp_path: Path, full: str) -> None:
    (tmp_path / full).symlink_to("/dev/full")
    done = subprocess.run([*example, tmp_path / "out.trace"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no space left on device" in done.stderr.lower()
    assert "panicked" not in done.stderr
    assert "Traceback" not in done.stderr
    if full == "out.bin":  # what was written before the error can be read
        (tmp_path / full).unlink()  # a link out of the folder is not followed
        (tmp_path / full).touch()
        trace = Trace(tmp_path / "out.trace")
        assert trace.header.engine == "example"
        assert trace.cut
        assert (tmp_path / "out.trace").read_bytes().count(b"\n") == 1  # no promise without its bytes


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing/out.trace", "no such file or directory"), ("out.json", "name it NAME.trace")],
)
def test_bad_path_is_reported(example: list[str], tmp_path: Path, path: str, message: str) -> None:
    done = subprocess.run([*example, path], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert path in done.stderr
    assert message.lower() in done.stderr.lower()
    assert not list(tmp_path.iterdir())


# ---- C alone

C_PROGRAM = """
%s
#define TRACEDIFF_IMPLEMENTATION
#include "tracediff.h"
int main(int argc, char **argv)
{
    const int32_t tokens[] = {7};
    const int64_t shape[] = {1}, negative[] = {-1};
    const float x[] = {0.25f};
    tracediff t;
    tracediff_open(&t, argv[1], argv[argc - 1], NULL, NULL);
    tracediff_step(&t, 0, tokens, tokens, 1);
    %s
    if (tracediff_close(&t) != 0) return fprintf(stderr, "%%s", tracediff_error(&t)), 1;
    return (int)(shape[0] + negative[0]) + (x[0] > 1);
}
"""
_OF_PART = 'tracediff_shard s = {%d, %d, 2}; t.shard = &s; tracediff_op(&t, 0, "a", TRACEDIFF_F32, shape, 1, x);'
MISUSES = {
    'tracediff_op(&t, 1, "a", TRACEDIFF_F32, shape, 1, x);': "a of step 1, but the step begun last is 0",
    "tracediff_step(&t, 0, tokens, tokens, 1);": "step 0 after step 0",
    "tracediff_step(&t, 1, tokens, tokens, 0);": "step 1 has no tokens",
    't.record = 0; tracediff_op(&t, 0, "a", TRACEDIFF_F32, shape, 1, x);': "a: record neither data nor statistics",
    'tracediff_op(&t, 0, "a", TRACEDIFF_F32, negative, 1, x);': "a: negative size -1",
    'tracediff_op(&t, 0, "a", (tracediff_dtype)9, shape, 1, x);': "a: unknown dtype 9",
    f"{_OF_PART % (0, 0)}": "a: a part of it, in a trace that tracediff_open_rank did not open",
    f"t.ranks = 2; {_OF_PART % (0, 2)}": "a: no part 2 of 2",
    f"t.ranks = 2; {_OF_PART % (1, 0)}": "a: no axis 1 of 1",
}
# What printf does in a German locale, without needing one.
COMMA_LOCALE = """
#include <stdio.h>
#include <string.h>
static int comma(char *s, size_t size, const char *format, double value)
{
    int length = snprintf(s, size, format, value);
    if (strchr(s, '.')) *strchr(s, '.') = ',';
    return length;
}
#define snprintf comma
"""


def build_c_program(folder: Path, statement: str, before: str = "") -> Path:
    source = folder / "program.c"
    source.write_text(C_PROGRAM % (before, statement))
    run(tool("cc", "gcc"), "-std=c99", *STRICT, f"-I{EMITTERS / 'c'}", source, "-o", folder / "program", "-lm")
    return folder / "program"


@pytest.mark.parametrize("statement", MISUSES)
def test_c_misuse_is_reported_and_stays(tmp_path: Path, statement: str) -> None:
    later = f'{statement} tracediff_op(&t, 0, "later", TRACEDIFF_F32, shape, 1, x);'
    program = build_c_program(tmp_path, later)
    done = subprocess.run([program, tmp_path / "out.trace", "engine"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, MISUSES[statement])
    trace = Trace(tmp_path / "out.trace")
    assert trace.cut
    assert not trace.ops


def test_c_ranks_are_opened_as_one(tmp_path: Path) -> None:
    """A part along an axis, a term of a sum, and a copy: what is said of one record holds for no other."""
    statement = """
    tracediff_close(&t);
    for (int rank = 0; rank < 2; rank++) {
        const tracediff_shard part = {0, rank, 2}, term = {TRACEDIFF_SUM, rank, 2};
        const float own[] = {1.5f + (float)rank};
        tracediff_open_rank(&t, rank ? "rank1.trace" : "rank0.trace", "engine", NULL, NULL, "F32", rank, 2);
        tracediff_step(&t, 0, tokens, tokens, 1);
        t.shard = &part;
        tracediff_op(&t, 0, "part", TRACEDIFF_F32, shape, 1, own);
        t.shard = &term;
        tracediff_op(&t, 0, "term", TRACEDIFF_F32, shape, 1, own);
        tracediff_op(&t, 0, "copy", TRACEDIFF_F32, shape, 1, x);
        if (rank == 0) tracediff_close(&t);
    }
    """
    run(build_c_program(tmp_path, statement), tmp_path / "out.trace", "engine", cwd=tmp_path)
    trace = open_trace([tmp_path / "rank0.trace", tmp_path / "rank1.trace"])
    values = {op: trace.values(record).tolist() for (_, op), record in trace.ops.items()}
    assert values == {"part": [1.5, 2.5], "term": [4.0], "copy": [0.25]}


def test_c_crash_leaves_what_was_recorded(tmp_path: Path) -> None:
    program = build_c_program(tmp_path, 'tracediff_op(&t, 0, "a", TRACEDIFF_F32, shape, 1, x); abort();')
    assert subprocess.run([program, tmp_path / "out.trace", "engine"], cwd=tmp_path).returncode < 0
    trace = Trace(tmp_path / "out.trace")
    assert trace.cut
    assert trace.values(trace.ops[0, "a"]).tolist() == [0.25]


def test_c_numbers_do_not_depend_on_the_locale(tmp_path: Path) -> None:
    statement = 't.record = TRACEDIFF_STATISTICS; tracediff_op(&t, 0, "a", TRACEDIFF_F32, shape, 1, x);'
    run(build_c_program(tmp_path, statement, COMMA_LOCALE), tmp_path / "out.trace", "engine")
    assert Trace(tmp_path / "out.trace").ops[0, "a"].min == 0.25


@pytest.mark.parametrize(
    "raw", [b"\xff", b"a\xc3", b"\xc0\xaf", b"\xed\xa0\x80", b"\xe0\x80\xaf", b"\xf4\x90\x80\x80", "é€🙂".encode()]
)
def test_c_strings_that_are_not_utf8(tmp_path: Path, raw: bytes) -> None:
    program = build_c_program(tmp_path, "")
    subprocess.run([program, tmp_path / "out.trace", raw], check=True)
    assert Trace(tmp_path / "out.trace").header.engine == raw.decode(errors="replace")


# ---- The decoder

STEPS = (0, 1, 2)
FAULTS = {
    None: set(),
    "ROPE_HALVES": {(step, f"attn_{x}_rope") for step in STEPS for x in "qk"},
    "NO_SCALE": {(step, "attn_probs") for step in STEPS},
    "SWAP_GATE_UP_ACT": {(step, "ffn_act") for step in STEPS},
    "NO_MASK": {(0, "attn_probs")},  # a decode step of one token has nothing to hide
}
PROMPT = (256, 72, 101, 108, 108, 111, 3, 17, 250)
_SIZES = {"n_layer": 2, "n_embd": 96, "n_head": 6, "n_head_kv": 2, "n_ff": 160, "n_vocab": 320}
FAMILIES = {
    "llama": Shape("llama", **_SIZES),
    "qwen2": Shape("qwen2", **_SIZES, tied=True),
    "qwen3": Shape("qwen3", **_SIZES, head_dim=24),
}


@pytest.fixture(scope="module")
def raw_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models as GGUF and as the raw files that the decoder reads."""
    folder = tmp_path_factory.mktemp("raw")
    return cache(lambda family: write_raw(folder / family, FAMILIES[family], "F32"))


@pytest.mark.parametrize(
    ("family", "fault"), [("llama", None), ("qwen2", None), ("qwen3", None), *(("llama", f) for f in FAULTS if f)]
)
def test_decoder_is_faulty_exactly_where_its_fault_is(
    raw_model: Callable[[str], Path], tmp_path: Path, family: str, fault: str | None
) -> None:
    define = [f"-DFAULT_{fault}"] if fault else []
    decoder, model = tmp_path / "decoder", raw_model(family)
    source = EMITTERS / "c/example_decoder.c"
    run(tool("cc", "gcc"), "-std=c99", "-O2", *STRICT, *define, source, "-o", decoder, "-lm")
    run(decoder, model, tmp_path / "out.trace", *map(str, PROMPT))

    file = GGUFFile(model / "model.gguf")
    graph = build_graph(file)
    trace = Trace(tmp_path / "out.trace")
    judged = list(judge_all([Replay(trace, graph, Weights(file))]))
    faulty = {(record.step, record.op) for _, record, local in judged if local.faulty}
    assert faulty == {(step, f"blk.{n}.{op}") for step, op in FAULTS[fault] for n in range(2)}
    assert len(judged) == 3 * len(graph.ops)
    assert list(trace.ops) == [(step, op.name) for step in STEPS for op in graph]
    n = len(PROMPT)
    assert all(trace.ops[0, op.name].shape == op.shape(n) for op in graph)
    assert all(trace.ops[2, op.name].shape == op.shape(1, n + 1) for op in graph)
    assert trace.steps[0] == Step(0, PROMPT, tuple(range(n)))
    for step in (1, 2):
        logits = trace.values(trace.ops[step - 1, "output"])
        assert trace.steps[step] == Step(step, (int(logits[-1].argmax()),), (n + step - 1,))
    norms = [weight.name for weight in graph.norm_weights()]
    assert list(trace.weights) == norms
    for name in norms:
        assert trace.values(trace.weights[name]).tobytes() == bytes(file.raw(file.tensors[name]))


# ---- The specification

SCHEMA = json.loads((ROOT / "docs/trace.schema.json").read_text())
SPECIFICATION = (ROOT / "docs/trace-format.md").read_text()
RECORDS = {"trace": Header, "weight": Weight, "step": Step, "op": OpRecord, "end": End}


@pytest.mark.slow
def test_several_mistakes_that_no_list_has_are_each_put_into_words(
    raw_model: Callable[[str], Path], tmp_path: Path
) -> None:  # fmt: skip
    """Five at once, each an edit of one line of an engine; the README shows what is said of them."""
    source, edits = (EMITTERS / "c/example_decoder.c").read_text(), (
        ("for (int i = 0; i < n; i++) squares += x[i] * x[i];", "for (int i = 1; i < n; i++) squares += x[i] * x[i];"),
        ("-2.0 * pair / D", "-2.0 * (pair + 1) / D"),
        ("* v[(s * n.n_head_kv + h / group) * D + d]", "* v[(s * n.n_head_kv + h / group) * D + (d < 12 ? d : d - 4)]"),
        ("silu(gate[i]) * up[i];", "silu(gate[i]) * fminf(up[i], 0.5f);"),
        ("add(s->attn_residual, s->attn_output, s->x,", "add(s->attn_residual, s->attn_output, s->attn_norm,"),
    )  # fmt: skip
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (tmp_path / "engine.c").write_text(source)
    run(tool("cc"), "-std=c99", "-O2", "-I", EMITTERS / "c", tmp_path / "engine.c", "-lm", "-o", tmp_path / "engine")
    raw = raw_model("qwen2")
    run(tmp_path / "engine", raw, tmp_path / "out.trace", *map(str, PROMPT))
    result = check_trace(tmp_path / "out.trace", raw / "model.gguf")
    assert [finding.text for finding in result.findings] == [
        "all 5 norms: the sum of squares takes only channels 1 to 95: the first is left out.",
        "attn_q_rope and attn_k_rope in both layers: the angle is computed with -2 * (i + 1), where -2 * i belongs "
        "(i: pair).",
        "attn_kqv in both layers: head channels 12 to 15 have the values of head channels 8 to 11.",
        "attn_residual in both layers: attn_norm is added where the layer's input belongs.",
        "ffn_act in both layers: every value of ffn_up above 0.5 is 0.5.",
    ]


def merged(name: str) -> tuple[dict[str, Any], set[str]]:
    """Properties and required keys of a record, those that it takes from `values` included."""
    record = SCHEMA["$defs"][name]
    parts = [record, *(SCHEMA["$defs"][part["$ref"].removeprefix("#/$defs/")] for part in record.get("allOf", ()))]
    properties = {key: value for part in parts for key, value in part["properties"].items()}
    return properties, {key for part in parts for key in part["required"]}


@pytest.mark.parametrize("name", RECORDS)
def test_schema_has_the_fields_of_the_format(name: str) -> None:
    properties, required = merged(name)
    fields = msgspec.structs.fields(RECORDS[name])
    assert set(properties) == {field.encode_name for field in fields}
    assert required == {field.encode_name for field in fields if field.required}
    if "dtype" in properties:
        assert set(properties["dtype"]["enum"]) == {*STORAGE, None}


def test_schema_holds_for_every_line_of_a_trace(example: list[str], tmp_path: Path) -> None:
    run(*example, tmp_path / "out.trace", ENGINE)
    lines = (tmp_path / "out.trace").read_bytes().splitlines()
    assert len(lines) == 22
    for line in lines:
        assert valid(SCHEMA, json.loads(line)), line


HEAD = '{"type":"trace","version":1,"engine":"e","data":"t.bin"}'
STEP = '{"type":"step","step":0,"tokens":[1],"positions":[0]}'
OP = '{"type":"op","step":0,"op":"a","shape":[1],'
LINES = {
    True: [
        '{"type":"remark","text":"of a type that nobody knows"}',
        '{"type":"weight","weight":"w","shape":[],"dtype":"f16","offset":0,"mine":1}',
        OP + '"min":1,"max":1.5,"mean":1e0,"rms":1}',
        OP + '"min":1,"max":1,"mean":1}',
        OP + '"mean":1}',
        OP + '"nan":1}',
        OP + '"inf":1,"dtype":null,"offset":null}',
        OP + '"rows":[0],"strides":[7],"dtype":"f32","offset":0}',
        OP + '"rows":null,"nan":1}',
    ],
    False: [
        '{"kind":"op"}',
        "[1]",
        '{"type":"weight","weight":"w","shape":[-1],"dtype":"f32","offset":0}',
        '{"type":"weight","weight":"w","shape":[1],"dtype":"f32"}',
        '{"type":"weight","weight":"w","shape":[1],"offset":0}',
        '{"type":"weight","shape":[1],"dtype":"f32","offset":0}',
        '{"type":"step","step":1,"tokens":[],"positions":[]}',
        '{"type":"step","step":1,"tokens":[1],"positions":[1],"sequence":-1}',
        '{"type":"step","step":-1,"tokens":[1],"positions":[1]}',
        '{"type":"step","step":1,"tokens":["a"],"positions":[1]}',
        OP + '"dtype":"i8","offset":0}',
        OP + '"dtype":"f32","nan":1}',
        OP + '"offset":0,"nan":1}',
        OP + '"dtype":"f32","offset":-4}',
        OP + '"min":"1","max":1,"mean":1,"rms":1}',
        OP + '"nan":1,"rows":[]}',
        OP + '"nan":1,"rows":[-1]}',
        OP + '"nan":1,"rows":0}',
        OP + '"nan":1,"strides":[1]}',
        OP + '"dtype":"f32","offset":0,"strides":[-1]}',
        '{"type":"end"}',
    ],
}


@pytest.mark.parametrize(("accepted", "line"), [(verdict, line) for verdict in LINES for line in LINES[verdict]])
def test_schema_and_reader_agree(tmp_path: Path, accepted: bool, line: str) -> None:
    assert valid(SCHEMA, json.loads(line)) is accepted
    (tmp_path / "t.bin").write_bytes(bytes(64))
    (tmp_path / "t.trace").write_text(f"{HEAD}\n{STEP}\n{line}\n")
    if accepted:
        Trace(tmp_path / "t.trace")
    else:
        with pytest.raises(TraceError, match=":3: "):
            Trace(tmp_path / "t.trace")


def test_specification_example_is_a_trace(tmp_path: Path) -> None:
    found = re.search(r"```json\n(.*?)```", SPECIFICATION, re.DOTALL)
    assert found
    (tmp_path / "mine.trace").write_text(found[1])
    (tmp_path / "mine.bin").write_bytes(bytes(range(32)))
    trace = Trace(tmp_path / "mine.trace")
    assert trace.cut is None
    assert sum(record.nbytes for record in [*trace.weights.values(), *trace.ops.values()]) == 32
    assert [line for line in found[1].splitlines() if not valid(SCHEMA, json.loads(line))] == []
    assert type(decode(found[1].splitlines()[-1].encode())) is End


def test_specification_names_the_ops_of_the_table() -> None:
    documented = set(re.findall(r"`(?:blk\.N\.)?(\w+)`", SPECIFICATION.split("## Names")[1].split("## Advice")[0]))
    assert documented - {"T", "S"} == set(NAMES)
