"""`tracediff validate`: every violation of a trace, by line, with what to do; and silence on what is right."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Models, from_float

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.trace.reader import Trace

Cli = Callable[..., tuple[int, str, str]]
TOKENS = (256, 84, 104, 101)
HEADER, STEP, EMBEDDING, NORM, Q = 0, 6, 7, 8, 9  # lines of the trace, from 0
DECODE = -39


class Broken:
    """A trace that is there to be broken."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path.with_suffix(".bin")
        self.lines = path.read_bytes().splitlines()

    def change(self, at: int, **values: Any) -> None:
        """Other values in a line; None for a key that goes."""
        record = json.loads(self.lines[at]) | values
        self.lines[at] = json.dumps({k: v for k, v in record.items() if v is not None}, separators=(",", ":")).encode()

    def write(self) -> Path:
        self.path.write_bytes(b"".join(line + b"\n" for line in self.lines))
        return self.path

    def poke(self, at: int, values: np.ndarray) -> None:
        """Other data of a record, as it is in memory."""
        with self.data.open("r+b") as data:
            data.seek(json.loads(self.lines[at])["offset"])
            data.write(values.tobytes())

    def read(self, at: int) -> np.ndarray:
        record = json.loads(self.lines[at])
        return Trace(self.path).values(Trace(self.path).ops[record["step"], record["op"]]).copy()


@pytest.fixture(scope="module")
def source(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("source") / "a.trace"
    return trace_torch(models("tiny"), out, TorchOptions(), TOKENS, n_decode=1)


@pytest.fixture
def broken(source: Path, tmp_path: Path) -> Broken:
    for suffix in (".trace", ".bin"):
        shutil.copy(source.with_suffix(suffix), tmp_path / f"a{suffix}")
    return Broken(tmp_path / "a.trace")


@pytest.fixture
def found(broken: Broken, models: Models, cli: Cli, tmp_path: Path) -> Callable[..., list[tuple[int, str, str, str]]]:
    """What `validate` finds: line, level, what and what to do."""

    def find(with_model: bool = True) -> list[tuple[int, str, str, str]]:
        model = ("--model", models("tiny")) if with_model else ()
        code, _, error = cli("validate", broken.write(), *model, "--json", tmp_path / "found.json")
        assert error == ""
        result = json.loads((tmp_path / "found.json").read_text())
        findings = [tuple(f.values()) for f in result["trace"]["findings"]]
        assert code == any(level == "violation" for _, level, *_ in findings) == (not result["valid"])
        return findings

    return find


# ---- Nothing is wrong


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("shape", "weights"), [("tiny", "F32"), ("qwen2", "Q8_0"), ("llama3", "F16"), ("demo", "BF16")]
)
def test_clean_torch(
    shape: str, weights: str, dtype: str, models: Models, torch_trace: Callable[..., Path], cli: Cli
) -> None:
    path = torch_trace(models(shape, weights), dtype=dtype)
    trace = Trace(path)
    expected = f"{path}: {len(trace.ops)} ops in 3 steps: 0 violations, 0 warnings\n"
    assert cli("validate", path, "--model", models(shape, weights)) == (0, expected, "")
    assert cli("validate", path) == (0, expected, "")


@pytest.mark.parametrize("weights", ["F32", "F16", "Q8_0", "Q4_0"])
def test_clean_llama_cpp(weights: str, models: Models, llama_cpp_trace: Callable[..., Path], cli: Cli) -> None:
    for shape in ("qwen2", "qwen3"):
        path = llama_cpp_trace(models(shape, weights))
        code, output, error = cli("validate", path, "--model", models(shape, weights))
        assert (code, error) == (0, "")
        assert output.endswith("0 violations, 0 warnings\n")
        assert output.count("\n") == 1


def test_golden_traces_are_valid(cli: Cli) -> None:
    golden = [*(Path(__file__).parent.parent / "traces").rglob("*.trace")]
    assert golden
    for path in golden:
        assert cli("validate", path)[::2] == (0, "")


def test_statistics_only(models: Models, torch_trace: Callable[..., Path], cli: Cli) -> None:
    code, output, _ = cli("validate", torch_trace(models("tiny"), capture="stats"), "--model", models("tiny"))
    assert (code, output.count("\n")) == (0, 1)


def test_some_statistics_beside_data(broken: Broken, found: Callable[..., list[tuple[int, str, str, str]]]) -> None:
    """Those that are there are checked, and counts to the last: values of a million allow no NaN more."""
    mean = float(broken.read(NORM).mean(dtype=np.float64))
    broken.change(NORM, mean=mean)
    assert found() == []
    broken.change(NORM, mean=mean + 1)
    broken.poke(EMBEDDING, np.full(192, 1e6, np.float32))
    broken.change(EMBEDDING, nan=1, max=1e6)
    assert [what for _, _, what, _ in found()] == [
        "token_embd: the statistics are not those of the data: nan 1 (it is 0)",
        f"blk.0.attn_norm: the statistics are not those of the data: mean {mean + 1:.6g} (it is {mean:.6g})",
    ]


def test_signalling_nan_warns_nobody(broken: Broken, found: Callable[..., list[tuple[int, str, str, str]]]) -> None:
    """Memory that nothing was written to may hold any bits; numpy's warning would stand between the findings."""
    broken.poke(Q, np.full(broken.read(Q).size, 0x7F800001, np.uint32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found()


def test_an_op_recorded_after_the_next_one_ran_in_its_buffer(
    broken: Broken, found: Callable[..., list[tuple[int, str, str, str]]]
) -> None:
    rope = next(i for i, line in enumerate(broken.lines) if b'"op":"blk.0.attn_q_rope"' in line)
    broken.poke(Q, broken.read(rope))
    assert [what for _, _, what, _ in found()] == ["blk.0.attn_q: holds the values of blk.0.attn_q_rope, one by one"]


# ---- Everything is wrong


FORMAT = "The format is described in docs/trace-format.md."
ALL_AT_ONCE = f"""\
a.trace:2: warning: blk.0.attn_nrom.weight: no weight that this model reads. Did you mean blk.0.attn_norm.weight?
a.trace:7: violation: all token ids of step 0 are 0. Write the ids that the engine was fed: replay begins with them.
a.trace:8: violation: the data file 'a.bin' is too short: the record needs 768 bytes at 1,000,000,000, the\
 file has 38,176. Copy the whole of it, or trace again.
a.trace:9: violation: blk.0.atn_norm: no op of this model. Did you mean blk.0.attn_norm?
a.trace:10: violation: blk.0.attn_q: shape [6, 4, 8]; this model's is [4, 6, 8] for 4 tokens.\
 Write this shape; for data in another order add "strides" in elements.
a.trace:11: violation: op 'blk.0.attn_q' is recorded twice in step 0. {FORMAT}
a.trace:12: violation: not a JSON object on one line: JSON is malformed: invalid character (byte 4). {FORMAT}
a.trace:13: violation: blk.0.attn_q_rope: all 192 values are 0.\
 Is it recorded before the kernel has run, or from a buffer that nobody fills?
a.trace:15: violation: blk.0.attn_scores: 7 NaN, 0 Inf among 96 values.\
 Is that memory written before it is recorded? If the engine computes it: the first of them is the place.
a.trace:16: violation: neither data (dtype, offset) nor statistics (min, max, mean, rms). {FORMAT}
a.trace:47: violation: op 'blk.0.attn_norm' of step 0 after step 1 began: out of order. {FORMAT}
a.trace:82: violation: it ends after line 82 without an 'end' record.\
 Close the trace after the last step: a trace without 'end' was cut off.
a.trace:82: warning: 1 of the model's 37 ops were never written: blk.0.attn_norm.\
 None is required; each that is there makes the location closer.
a.trace:82: warning: 1 of 5 norm weights were never written: blk.0.attn_norm.weight.\
 Write them as the engine holds them, once: a wrong one explains much.
a.trace: 69 ops in 2 steps: 11 violations, 3 warnings
"""
WARNINGS = [
    (10, "warning", "blk.0.attn_v: begins at byte 1,728, where blk.0.attn_norm begins"),
    (13, "warning", "blk.0.attn_scores: 0 NaN, 1 Inf among 96 values"),
    (43, "warning", "step 1 has positions 9, where 4 follow"),
    (80, "warning", "1 of 5 norm weights were never written: blk.0.ffn_norm.weight"),
]


def test_all_violations_at_once(broken: Broken, models: Models, cli: Cli) -> None:
    """The output as a user sees it: nothing hides behind the first."""
    broken.change(1, weight="blk.0.attn_nrom.weight")
    broken.change(STEP, tokens=[0, 0, 0, 0])
    broken.change(EMBEDDING, offset=10**9)
    broken.change(NORM, op="blk.0.atn_norm")
    broken.change(Q, shape=[6, 4, 8])
    broken.lines[Q + 1] = broken.lines[Q]
    broken.lines[Q + 2] = b"not JSON"
    broken.poke(Q + 3, np.zeros((4, 6, 8), np.float32))
    broken.poke(Q + 5, np.full(7, np.nan, np.float32))
    broken.change(Q + 6, dtype=None, offset=None)
    broken.change(DECODE + 2, step=0)
    broken.lines.pop()
    code, output, error = cli("validate", broken.write(), "--model", models("tiny"))
    assert (code, error) == (1, "")
    assert output.replace(f"{broken.path}", "a.trace") == ALL_AT_ONCE


def test_the_first_line(broken: Broken, found: Callable[..., Any], tmp_path: Path, cli: Cli) -> None:
    broken.change(HEADER, version=2)
    assert [(line, what) for line, _, what, _ in found()] == [
        (1, "trace version 2 is not supported; this is version 1")
    ]
    broken.change(HEADER, version=1, data="no.bin")
    ((line, _, what, then),) = found()
    assert (line, what) == (1, "cannot open the data file 'no.bin': No such file or directory")
    assert then == "It must lie beside the trace: copy it there too."
    code, output, error = cli("validate", tmp_path / "none.trace")
    assert (code, output) == (2, "")
    assert error.endswith("cannot open the trace: No such file or directory. Check the path.\n")


Q_SHAPE = "blk.0.attn_q: shape {}; this model's is [4, 6, 8] for 4 tokens"
INSPECT = "`tracediff inspect MODEL --skeleton` lists names, shapes and order."
STATISTICS = {"min": -1.0, "max": 1.0, "mean": 0.0, "rms": 0.5}
ONE = {
    "last row": (Q, {"shape": [1, 6, 8]}, Q_SHAPE.format([1, 6, 8]),
                 'If it holds 1 of the 4 tokens, say which: "rows":[3] is the last.'),
    "transposed": (Q, {"shape": [8, 6, 4]}, Q_SHAPE.format([8, 6, 4]),
                   'Write this shape; for data in another order add "strides" in elements.'),
    "other op": (Q, {"shape": [4, 64]}, Q_SHAPE.format([4, 64]),
                 f"That is the shape of blk.0.ffn_gate, blk.0.ffn_up, blk.0.ffn_act. {INSPECT}"),
    "no op": (Q, {"shape": [4, 3]}, Q_SHAPE.format([4, 3]), INSPECT),
    "id": (STEP, {"tokens": [1, 2, 3, 999]}, "token id 999 is outside the vocabulary of 320",
           "Were the ids made by another tokeniser?"),
    "arch": (HEADER, {"arch": "llama"}, "the trace is of architecture 'llama', the model of 'qwen2'",
             "Give the GGUF file that the engine ran."),
    "weight": (1, {"shape": [4, 3]}, "blk.0.attn_norm.weight: shape [4, 3]; the file's is [48]",
               "Record the tensor of that name."),
    "nan": (Q, {"nan": 2, "dtype": None, "offset": None}, "blk.0.attn_q: 2 NaN, 0 Inf",
            "Is that memory written before it is recorded? If the engine computes it: the first of them is the place."),
    "zero": (Q, dict.fromkeys(STATISTICS, 0) | {"dtype": None, "offset": None}, "blk.0.attn_q: all values are 0",
             "Is it recorded before the kernel has run, or from a buffer that nobody fills?"),
    "tokens": (STEP, {"positions": [0]}, "step 0 has 4 tokens and 1 positions",
               "The format is described in docs/trace-format.md."),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE)
def test_one_violation(case: str, broken: Broken, found: Callable[..., Any]) -> None:
    """Exactly one is found, however much depends on that line."""
    at, values, what, then = ONE[case]
    broken.change(at, **values)
    assert [f for f in found() if f[1] == "violation"] == [(at + 1, "violation", what, then)]


def test_statistics_that_contradict_the_data(broken: Broken, found: Callable[..., Any]) -> None:
    x = broken.read(Q).astype(np.float64)
    right = {"min": x.min(), "max": x.max(), "mean": x.mean(), "rms": np.sqrt((x**2).mean())}
    broken.change(Q, **{key: float(np.float32(value)) for key, value in right.items()})
    assert not found()
    broken.change(Q, rms=2 * right["rms"], inf=1)
    ((line, level, what, _),) = found()
    assert (line, level) == (Q + 1, "violation")
    said = f"rms {2 * right['rms']:.6g} (it is {right['rms']:.6g}), inf 1 (it is 0)"
    assert what == f"blk.0.attn_q: the statistics are not those of the data: {said}"


def test_warnings_alone_are_valid(broken: Broken, found: Callable[..., Any], cli: Cli) -> None:
    del broken.lines[Q], broken.lines[2]
    broken.change(-1, records=len(broken.lines) - 1)
    broken.change(Q, offset=json.loads(broken.lines[Q - 2])["offset"])
    broken.change(DECODE, positions=[9])
    broken.poke(Q + 3, np.full(1, -np.inf, np.float32))
    assert [(line, level, what) for line, level, what, _ in found()] == WARNINGS


def test_many_alike_are_counted(broken: Broken, cli: Cli) -> None:
    broken.data.write_bytes(b"")
    code, output, _ = cli("validate", broken.write())
    assert code == 1
    *first, more, _ = output.splitlines()
    assert len(first) == 4
    assert (
        more == f"  ... and {len(broken.lines) - 8} more like it, up to line {len(broken.lines) - 1} (--json lists all)"
    )


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("at", [EMBEDDING, NORM, Q, -2])
def test_half_precision_read_as_float32(half: str, at: int, broken: Broken, found: Callable[..., Any]) -> None:
    values = broken.read(at).astype(np.float32)
    bits = from_float(np.tile(values.reshape(-1), 2), half)
    broken.poke(at, bits)
    ((line, level, what, then),) = found(with_model=False)
    assert (line, level, then) == (at % len(broken.lines) + 1, "violation", f'Write "dtype":"{half}".')
    assert what.endswith(f": the bits look like pairs of {half} values, not like f32")


def test_float64_read_as_float32(broken: Broken, found: Callable[..., Any]) -> None:
    values = broken.read(EMBEDDING).astype(np.float64).reshape(-1)
    broken.poke(EMBEDDING, (values[: len(values) // 2] * 1.1).view(np.float32))
    ((line, level, what, then),) = found(with_model=False)
    assert (line, level) == (EMBEDDING + 1, "violation")
    assert what.endswith(": the bits look like halves of f64 values, not like f32")
    assert then == 'Write "dtype":"f64", or convert the values.'


def test_big_endian_values(broken: Broken, found: Callable[..., Any]) -> None:
    values = broken.read(EMBEDDING).astype(np.float32)
    broken.poke(EMBEDDING, (values * np.float32(1.1)).byteswap())
    whats = {what.partition(": ")[2]: then for _, _, what, then in found(with_model=False)}
    words = "the bytes look like those of big-endian values, not like f32"
    assert whats[words] == "Write them in little-endian order."


@pytest.mark.parametrize("rounding", ["f16", "bf16", "f64", "integers", "q8"])
def test_rounded_float32_is_not_half_precision(rounding: str, broken: Broken, found: Callable[..., Any]) -> None:
    for at in (EMBEDDING, NORM, Q, -2):
        x = broken.read(at)
        match rounding:
            case "f16":
                x = x.astype(np.float16).astype(np.float32)
            case "bf16":
                x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
            case "integers":
                x = np.rint(x * 1e4)
            case "q8":
                scale = np.float32(np.float16(np.abs(x).max() / 127))
                x = np.rint(x / scale) * scale
        broken.poke(at, x.astype(np.float32))
    assert not found(with_model=False)
