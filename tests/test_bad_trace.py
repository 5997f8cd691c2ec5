"""Traces that break the format, were cut off, or do not belong together."""

import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHAPES, Models, Pair, the_message

from tracediff.model.synthetic import write_model

FORMAT = "The format is described in docs/trace-format.md."
COPY = "It must lie beside the trace: copy it there too."
# Lines of the candidate.
HEADER, WEIGHT, STEP, EMBEDDING, NORM = 0, 1, 6, 7, 8


@pytest.fixture
def model(models: Models) -> Path:
    return models("tiny")


# ---- Files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "c.trace:1: not a trace: its first line is empty, where a trace begins with {\"type\":\"trace\""),
        (b"\n\n", "c.trace:1: not a trace: its first line is empty"),
        (b"GGUF\3\0\0\0", "c.trace:1: not a trace: it is a GGUF model"),
        (gzip.compress(b'{"type":"trace"}\n', mtime=0), "not a trace: it is compressed by gzip. Unpack it, and its"),
        (b'\xef\xbb\xbf{"type":"trace"}\n', "not a trace: it begins with a byte order mark. Write"),
        ('{"type":"trace"}\n'.encode("utf-16"), "c.trace:1: not a trace: it is UTF-16. Write UTF-8"),
        (b'{"type":"tra', "c.trace:1: not a JSON object on one line: Input data was truncated"),
        (b'{"type":"end","records":0}\n', "c.trace:1: not a trace: it begins with"),
        (b'{"type":"trace","version":2,"engine":"e"}\n', "c.trace:1: trace version 2 is not supported; this is vers"),
        (b'{"type":"trace","engine":"e"}\n', "c.trace:1: Object missing required field `version`"),
    ],
)  # fmt: skip
def test_first_line(content: bytes, expected: str, pair: Pair, refused: Callable[..., str]) -> None:
    pair.path.write_bytes(content)
    message = refused("compare", pair.reference, pair.path)
    assert expected in message
    assert message.endswith(FORMAT)


def test_no_such_trace(pair: Pair, refused: Callable[..., str]) -> None:
    pair.path.unlink()
    for arguments in (("compare", pair.reference, pair.path), ("inspect", pair.path)):
        assert refused(*arguments).endswith("No such file or directory. Check the path.")


def test_a_trace_of_no_ops(pair: Pair, refused: Callable[..., str]) -> None:
    pair.write(pair.lines[: STEP + 1])
    message = refused("compare", pair.reference, pair.path)
    assert message.startswith(f"{pair.path}: the trace holds no op records: there is nothing to compare. Trace again")


# ---- The data file


@pytest.mark.parametrize("name", ["../r.bin", "/etc/passwd", "traces/c.bin", "..", ".", "", "c.bin/", "c\0bin"])
def test_data_outside_the_folder(name: str, pair: Pair, refused: Callable[..., str]) -> None:
    pair.change(HEADER, data=name)
    message = refused("compare", pair.reference, pair.path)
    assert message.endswith(f"c.trace:1: the data file {name!r} is not a bare file name. {COPY}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no.bin", "No such file or directory"),
        ("folder", "it is a folder"),
        ("x" * 300, "File name too long"),
    ],
)
def test_data_missing(name: str, why: str, pair: Pair, refused: Callable[..., str]) -> None:
    (pair.path.parent / "folder").mkdir()
    pair.change(HEADER, data=name)
    message = refused("compare", pair.reference, pair.path)
    assert message.endswith(f"c.trace:1: cannot open the data file {name!r}: {why}. {COPY}")


def test_data_short(pair: Pair, refused: Callable[..., str]) -> None:
    """With an `end` record the trace was whole once: its data file is another, or was copied in part."""
    pair.data.write_bytes(pair.data.read_bytes()[:5000])
    message = refused("compare", pair.reference, pair.path)
    assert "c.trace:15: the data file 'c.bin' is too short: the record needs 384 bytes at 4,800, the file" in message
    assert message.endswith("Copy the whole of it, or trace again.")


@pytest.mark.parametrize("n", [1 << 10, 1 << 17])
def test_a_first_line_as_deep_as_no_parser_goes(n: int, pair: Pair, refused: Callable[..., str]) -> None:
    """Which run a trace is of is asked before it is opened."""
    pair.path.write_bytes(b'{"type":"trace","version":1,"engine":"e","x":' + b"[" * n + b"]" * n + b"}\n")
    assert "c.trace:1: " in refused("compare", pair.reference, pair.path)


def test_data_of_a_trace_that_names_none(pair: Pair, refused: Callable[..., str]) -> None:
    pair.change(HEADER, data=None)
    message = refused("compare", pair.reference, pair.path)
    assert "c.trace:2: data is announced, but the first line names no data file" in message


# ---- Records


@pytest.mark.parametrize(
    ("line", "text", "expected"),
    [
        (9, EMBEDDING, "c.trace:10: op 'token_embd' is recorded twice in step 0"),
        (3, WEIGHT, "c.trace:4: weight 'blk.0.attn_norm.weight' is recorded twice"),
        (9, HEADER, "c.trace:10: a second 'trace' record"),
        (9, STEP, "c.trace:10: step 0 after step 0: steps must ascend"),
        (7, b'{"type":"op","step":1,"op":"x","shape":[1],"nan":1}', "op 'x' of step 1, which no 'step' record began"),
        (-1, b'{"type":"op","step":0,"op":"x","shape":[1],"nan":1}', "'x' of step 0 after step 1 began: out of order"),
        (9, b'{"type":"step","step":1,"tokens":[1,2],"positions":[4]}', "step 1 has 2 tokens and 1 positions"),
        (9, b'{"type":"step","step":1,"tokens":[],"positions":[]}', "step 1 has 0 tokens"),
        (9, b'{"type":"step","step":1,"tokens":[1],"positions":[4],"sequence":-1}', "Expected `int` >= 0"),
        (9, b'{"type":"step","step":1,"tokens":[1,2],"positions":[4,5],"sequences":[0]}', "says the sequences of 1"),
        (9, b'{"type":5}', "Expected `str` - at `$.type`"),
        (9, b'{"typ":"op"}', "Object missing required field `type`"),
        (9, b"[1,2]", "c.trace:10: Expected `object`, got `array`"),
        (9, b'"op"', "c.trace:10: Expected `object`, got `str`"),
        (9, b"", "c.trace:10: not a JSON object on one line: the line is empty"),
        (9, b"hello", "c.trace:10: not a JSON object on one line: JSON is malformed"),
        (9, b'{"type":"op","step":0,"op":"\xff","shape":[1],"nan":1}', "not a JSON object on one line: 'utf-8' codec"),
        (9, b'{"type":"op","step":0,"op":"\\ud800","shape":[1],"nan":1}', "not a JSON object on one line: JSON is"),
        (9, b'{"type":"op","step":0,"op":"x","shape":[1],"min":NaN}', "; JSON has no NaN or Inf: count them"),
        (9, b'{"type":"op","step":0,"op":"x","shape":[1],"min":1e999}', "Number out of range - at `$.min`"),
        (9, b'{"type":"op","step":0,"op":"x","shape":[1],"min":1,"max":1,"mean":1,"rms":-1}', "Expected `float` >="),
        (9, b'{"type":"op","step":0,"op":"x","shape":[0],"min":1,"max":1,"mean":1,"rms":1}', "holds no values"),
        (9, b'{"type":"op","step":0,"op":"x","shape":[1]}', "neither data (dtype, offset) nor statistics"),
        (9, b'{"type":"op","step":0,"op":"x","shape":[1],"dtype":"f32"}', "'dtype' and 'offset' come together"),
        (9, b'{"type":"op","step":0,"op":"x","shape":[1],"dtype":"i8","offset":0}', "which is f64, f32, f16 or bf16."),
        (9, b'{"type":"op","step":0,"op":"x","shape":[1],"nan":1,"sketch":"YWJj"}', "a sketch of 3 bytes: it is float"),
    ],
)  # fmt: skip
def test_records(line: int, text: bytes | int, expected: str, pair: Pair, refused: Callable[..., str]) -> None:
    pair.insert(line, pair.lines[text] if isinstance(text, int) else text)
    message = refused("compare", pair.reference, pair.path)
    assert expected in message
    assert message.endswith(FORMAT)


@pytest.mark.parametrize(
    ("line", "values", "expected"),
    [
        (EMBEDDING, {"shape": [10**12, 10**12]}, "no tensor has the shape [1000000000000, 1000000000000]"),
        (EMBEDDING, {"shape": [0, 2**62, 2**62]}, "no tensor has the shape [0, "),
        (EMBEDDING, {"shape": [1] * 100}, "no tensor has the shape [1, "),
        (EMBEDDING, {"shape": [10**400]}, "Expected `int` <= 9223372036854775807 - at `$.shape[0]`"),
        (EMBEDDING, {"shape": [-4, -48]}, "Expected `int` >= 0 - at `$.shape[0]`"),
        (EMBEDDING, {"shape": [4, 48.5]}, "Expected `int`, got `float` - at `$.shape[1]`"),
        (EMBEDDING, {"shape": 4}, "Expected `array`, got `int` - at `$.shape`"),
        (EMBEDDING, {"offset": -1}, "Expected `int` >= 0 - at `$.offset`"),
        (EMBEDDING, {"offset": 10**40}, "Expected `int` <= 9223372036854775807 - at `$.offset`"),
        (EMBEDDING, {"offset": 10**12}, "the data file 'c.bin' is too short: the record needs 768 bytes at 1,00"),
        (EMBEDDING, {"step": -1}, "Expected `int` >= 0 - at `$.step`"),
        (EMBEDDING, {"op": 5}, "Expected `str`, got `int` - at `$.op`"),
        (STEP, {"tokens": [1, 2, 3, -1]}, "Expected `int` >= 0 - at `$.tokens[3]`"),
        (STEP, {"tokens": [1, 2, 3, 10**30]}, "Expected `int` <= 9223372036854775807 - at `$.tokens[3]`"),
        (STEP, {"positions": [-1, 0, 1, 2]}, "Expected `int` >= 0 - at `$.positions[0]`"),
        (-1, {"records": 3}, "'end' counts 3 lines, but 82 precede it"),
    ],
)  # fmt: skip
def test_values(line: int, values: dict[str, Any], expected: str, pair: Pair, refused: Callable[..., str]) -> None:
    pair.change(line, **values)
    assert f"c.trace:{line % len(pair.lines) + 1}: {expected}" in refused("compare", pair.reference, pair.path)


def test_out_of_order(pair: Pair, refused: Callable[..., str]) -> None:
    pair.lines[STEP], pair.lines[EMBEDDING] = pair.lines[EMBEDDING], pair.lines[STEP]
    pair.write()
    assert "c.trace:7: op 'token_embd' of step 0, which no 'step' record began" in refused("inspect", pair.path)


def test_after_the_end(pair: Pair, refused: Callable[..., str]) -> None:
    pair.write([*pair.lines, pair.lines[EMBEDDING]])
    assert "c.trace:84: a record after the 'end' record" in refused("inspect", pair.path)


def test_unknown_types_and_keys_are_ignored(pair: Pair, cli: Callable[..., tuple[int, str, str]]) -> None:
    pair.insert(9, b'{"type":"remark","shape":"not one","text":%s}' % (b"[" * 10_000 + b"]" * 10_000))
    pair.change(HEADER, colour="green")
    pair.change(EMBEDDING, colour={"red": [1, None]})
    code, output, error = cli("compare", pair.reference, pair.path)
    assert (code, error) == (0, "")
    assert "MATCH: nothing diverges in 74 ops" in output


def test_huge_statistics(pair: Pair, cli: Callable[..., tuple[int, str, str]]) -> None:
    huge = {"min": -1e308, "max": 1e308, "mean": 1e308, "rms": 1e308}
    record = {"type": "op", "step": 0, "op": "token_embd", "shape": [4, 48], **huge}
    pair.lines[EMBEDDING] = json.dumps(record).encode()
    pair.write()
    code, output, error = cli("compare", pair.reference, pair.path)
    assert (code, error) == (1, "")
    assert "token_embd is the first op over its tolerance" in output


@pytest.mark.parametrize(
    "name", ["[/x]", "blk.0", f"blk.{'9' * 5000}.attn_q", "blk.", "blk.x.y", "\x1b[31m", "é" * 300]
)
def test_odd_names(name: str, pair: Pair, cli: Callable[..., tuple[int, str, str]]) -> None:
    """An op that the model lacks is compared like any other; what it is called breaks no report."""
    pair.change(HEADER, engine=name)
    for path in (pair.path, pair.reference):
        lines = path.read_bytes().replace(b'"op":"blk.0.attn_norm"', b'"op":%s' % json.dumps(name).encode())
        path.write_bytes(lines)
    compare = ("compare", pair.reference, pair.path)
    for arguments in (compare, (*compare, "--json", "-"), ("inspect", pair.path)):
        code, _, error = cli(*arguments)
        assert (code, error) == (0, "")


@pytest.mark.parametrize("op", ["output", "token_embd", "blk.1.ffn_residual"])
@pytest.mark.parametrize("shape", [[], [0, 320], [1280], [1280, 1], [4, 4, 80], [4, 0], [2, 2, 2, 160]])
def test_odd_shapes(shape: list[int], op: str, pair: Pair, cli: Callable[..., tuple[int, str, str]]) -> None:
    """Values of whatever shape, the same on both sides, are compared; a next token is only read from [T, n_vocab]."""
    at = next(i for i, line in enumerate(pair.lines) if f'"op":"{op}"'.encode() in line)
    pair.change(at, shape=shape, offset=0)
    code, report, error = cli("compare", pair.path, pair.path)
    assert (code, error) == (0, "")
    assert report.startswith("MATCH: nothing diverges in 74 ops")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38, 1e-45, 0.0])
def test_values_at_the_edges(value: float, pair: Pair, model: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    """An op and a norm weight of nothing else: the candidate diverges, and numpy has nothing to say to that."""
    data = np.fromfile(pair.data, np.float32)
    for line in (WEIGHT, NORM):
        record = json.loads(pair.lines[line])
        at = record["offset"] // 4
        data[at : at + math.prod(record["shape"])] = value
    data.tofile(pair.data)
    for arguments in (("compare", pair.reference, pair.path), ("check", pair.path, "--model", model)):
        code, report, error = cli(*arguments)
        assert (code, error) == (1, "")
        assert report.startswith("DIVERGED: ")
        assert "attn_norm" in report.splitlines()[0]
    assert cli("compare", pair.path, pair.reference)[::2] == (1, "")
    code, report, error = cli("compare", pair.path, pair.path)  # the same on both sides says little of it
    if np.isinf(value) or value == 0:
        assert the_message(code, error).startswith("blk.0.attn_norm: ")
        assert report.startswith("UNDECIDED: blk.0.attn_norm: ")
    else:
        assert (code, error) == (int(np.isnan(value)), "")


# ---- Cut off: readable up to there, and the report says so


def test_cut_in_the_middle_of_a_line(pair: Pair, cli: Callable[..., tuple[int, str, str]]) -> None:
    pair.path.write_bytes(b"\n".join(pair.lines[:20])[:-5])
    code, output, error = cli("compare", pair.reference, pair.path)
    assert the_message(code, error).startswith(f"{pair.path} breaks off in its first step: it ends in the middle of")
    assert "".join(output.split()).startswith(f"UNDECIDED:{pair.path}breaksoff")  # a long path is broken
    assert "Otherwise nothing diverges in the 12 ops that both hold" in " ".join(output.split())
    assert "12 ops" in output
    assert "it ends in the middle of line 20 without an 'end' record" in " ".join(output.split())


def test_cut_after_a_line(pair: Pair, cli: Callable[..., tuple[int, str, str]]) -> None:
    pair.write(pair.lines[:-1])
    code, output, error = cli("compare", pair.reference, pair.path)
    assert (code, error) == (0, "")
    assert "it ends after line 82 without an 'end' record" in " ".join(output.split())
    code, output, error = cli("inspect", pair.path)
    assert (code, error) == (0, "")
    assert "cut off: it ends after line 82" in " ".join(output.split())


def test_cut_in_the_middle_of_a_tensor(pair: Pair, model: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    pair.data.write_bytes(pair.data.read_bytes()[:5000])
    pair.write(pair.lines[:-1])
    for arguments in (("compare", pair.reference, pair.path), ("check", pair.path, "--model", model)):
        code, output, error = cli(*arguments)
        assert the_message(code, error).endswith("Trace again, to the end.")
        assert "7 ops" in output
        assert "line 15: the data file 'c.bin' is too short" in " ".join(output.split())


# ---- Two sides that do not belong together


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([256, 84, 105, 101], "the token ids differ in step 0, first at index 2"),
        ([84, 104, 101], "The candidate lacks the reference's first token 256: a BOS that was not added?"),
        ([256, 256, 84, 104, 101], "The candidate has one more token in front, 256: a BOS added where none belongs"),
    ],
)
def test_other_tokens(tokens: list[int], expected: str, pair: Pair, refused: Callable[..., str]) -> None:
    pair.change(STEP, tokens=tokens, positions=list(range(len(tokens))))
    message = refused("compare", pair.reference, pair.path)
    assert expected in message
    assert f"{pair.path}: {len(tokens)} tokens" in message
    assert message.endswith("Feed the candidate the reference's ids.")


def test_an_engine_that_chose_another_token_is_sent_to_check(pair: Pair, refused: Callable[..., str]) -> None:
    """One that decodes freely and is wrong cannot have the reference's ids: its trace is of use all the same."""
    step = next(i for i, line in enumerate(pair.lines) if line.startswith(b'{"type":"step","step":1'))
    pair.change(step, tokens=[7])
    message = refused("compare", pair.reference, pair.path)
    assert message.startswith("the token ids differ in step 1, first at index 0")
    assert message.endswith(
        "Did it choose them itself after step 0? Then something is wrong before: "
        f"`tracediff check {pair.path} --model MODEL` judges all its steps without the reference."
    )


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("model", "other.gguf", "model 'tiny-F32.gguf'"), ("arch", "llama", "architecture 'qwen2'")],
)
def test_other_model(key: str, value: str, text: str, pair: Pair, refused: Callable[..., str]) -> None:
    pair.change(HEADER, **{key: value})
    message = refused("compare", pair.reference, pair.path)
    assert f"the traces are of different models: {text} in {pair.reference}, '{value}' in {pair.path}. " in message
    assert message.endswith("Trace both engines on the same GGUF file.")


@pytest.mark.parametrize("path", ["/models/tiny-F32.gguf", r"C:\\models\\tiny-F32.gguf"])
def test_the_same_model_in_another_folder(path: str, pair: Pair, cli: Callable[..., tuple[int, str, str]]) -> None:
    pair.change(HEADER, model=path)
    assert cli("compare", pair.reference, pair.path)[0] == 0


@pytest.mark.parametrize("command", ["check", "compare"])
def test_another_model_of_the_same_shape(command: str, pair: Pair, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Every tensor has another seed: the norm weights tell, whatever the file is called."""
    other = write_model(tmp_path / "tiny-F32.gguf", SHAPES["tiny"], "F32", seed=1)
    traces = [pair.path] if command == "check" else [pair.reference, pair.path]
    assert refused(command, *traces, "--model", other) == (
        f"{pair.path}: none of its 5 norm weights is that of {other}: it is a trace of another model "
        "(its first line says 'tiny-F32.gguf'), or its engine loads them all wrongly. Give the GGUF file that it was "
        "made with; if this is it, compare the sizes and offsets with which tensors are read."
    )


def test_no_step_in_common(pair: Pair, refused: Callable[..., str]) -> None:
    text = pair.path.read_bytes().replace(b'"step":1', b'"step":7').replace(b'"step":0', b'"step":5')
    pair.path.write_bytes(text)
    message = refused("compare", pair.reference, pair.path)
    assert f"no step is in both traces: [0, 1] in {pair.reference}, [5, 7] in {pair.path}. The prefill" in message


def test_no_op_in_common(pair: Pair, refused: Callable[..., str]) -> None:
    pair.path.write_bytes(pair.path.read_bytes().replace(b'"op":"', b'"op":"my.'))
    message = refused("compare", pair.reference, pair.path)
    assert "no op is in both traces" in message
    assert "`tracediff inspect MODEL` lists the names" in message


# ---- A trace and a model that do not belong together


@pytest.fixture(params=["check", "compare"])
def judge(request: pytest.FixtureRequest, pair: Pair, model: Path) -> tuple[object, ...]:
    """The two commands that replay the candidate."""
    if request.param == "check":
        return "check", pair.path, "--model", model
    return "compare", pair.reference, pair.path, "--model", model


def test_other_shapes(judge: tuple[object, ...], pair: Pair, refused: Callable[..., str]) -> None:
    """One is a finding; of most ops they are another model's."""
    narrow = [line.replace(b"48]", b"24]").replace(b"64]", b"32]") for line in pair.lines[STEP:]]
    pair.write([*pair.lines[:STEP], *narrow])
    message = refused(*judge)
    assert (
        "c.trace: 44 of 74 records have other shapes than this model's ops, first 'token_embd' in step 0: " in message
    )
    assert "shape [4, 24]; this model's is [4, 48]. Is it a trace of another model?" in message
    assert message.endswith("`tracediff validate TRACE --model MODEL` says what else it may be.")


def test_most_names_unknown(judge: tuple[object, ...], pair: Pair, refused: Callable[..., str]) -> None:
    """A verdict on the few that are known would be a green light for all."""
    for path in (pair.path, pair.reference):
        path.write_bytes(path.read_bytes().replace(b'"op":"blk.', b'"op":"layers.'))
    message = refused(*judge)
    assert "have names that this model has not: layers.0.attn_norm, layers.0.attn_q, " in message


def test_a_side_that_does_not_say_its_weights_has_the_others_tolerance(
    pair: Pair, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    tolerances = []
    for weights in ("F32", None):
        header = json.loads(pair.lines[HEADER]) | {"weights": weights}
        pair.lines[HEADER] = json.dumps(header).encode()
        pair.write()
        cli("compare", pair.reference, pair.path, "--json", tmp_path / "r.json")
        ops = json.loads((tmp_path / "r.json").read_text())["ops"]
        tolerances.append([op["tolerance"] for op in ops])
    assert tolerances[0] == tolerances[1]


def test_gap_in_the_positions(judge: tuple[object, ...], pair: Pair, refused: Callable[..., str]) -> None:
    keys = (b".attn_scores", b".attn_probs")  # that step 1 has five keys tells that it follows step 0
    pair.write([line for line in pair.lines if not any(name in line for name in keys)][:-1])
    pair.lines = pair.path.read_bytes().splitlines()
    pair.insert(len(pair.lines), b"{}")
    second = next(i for i, line in enumerate(pair.lines) if b'"type":"step","step":1' in line)
    pair.change(second, positions=[9])
    message = refused(*judge)
    assert "c.trace: step 1 begins at position 9, but the steps before end at 3: the keys and values" in message
    assert message.endswith("if each is there, give them the positions that they should have.")


def test_a_gap_that_the_keys_deny(
    judge: tuple[object, ...], pair: Pair, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """No step is missing: it says another position than it has."""
    second = next(i for i, line in enumerate(pair.lines) if b'"type":"step","step":1' in line)
    pair.change(second, positions=[9])
    code, report, _ = cli(*judge)
    assert code == 2
    assert report.startswith("UNDECIDED: ")
    assert "step 1 says that it has the positions [9], where [4] follow" in " ".join(report.split())


@pytest.mark.parametrize("width", [0, 24])
def test_norm_weights_that_are_cut_short(
    width: int, judge: tuple[object, ...], pair: Pair, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """An engine that takes the model for one of other sizes: it is no other model, for what it read is right."""
    for i, line in enumerate(pair.lines):
        if b'"type":"weight"' in line:
            pair.change(i, shape=[width])
    code, report, _ = cli(*judge)
    assert code == 1
    said = f"it holds {width} values, where 48 belong: only the first are read; yet"
    assert f"DIVERGED: every F32 tensor that was recorded (5): wrong in memory: {said}" in " ".join(report.split())
    assert "look at the sizes of the model as they are read from the file" in " ".join(report.split())


def test_tokens_outside_the_vocabulary(pair: Pair, model: Path, refused: Callable[..., str]) -> None:
    pair.change(STEP, tokens=[256, 84, 104, 99_999])
    message = refused("check", pair.path, "--model", model)
    assert "token id 99999 is outside the vocabulary of 320 (0 to 319). Were the ids made by another" in message


def test_statistics_alone_cannot_be_replayed(
    pair: Pair, model: Path, cli: Callable[..., tuple[int, str, str]], refused: Callable[..., str]
) -> None:
    for end in ("trace", "bin"):
        shutil.copy(pair.path.parent / f"s.{end}", pair.path.parent / f"c.{end}")
    pair.lines = pair.path.read_bytes().splitlines()
    pair.change(HEADER, data="c.bin")
    message = refused("check", pair.path, "--model", model)
    assert message.startswith(f"{pair.path}: nothing in it can be replayed: it holds statistics only")
    assert message.endswith("`tracediff compare` without --model compares statistics by tolerance.")
    code, report, error = cli("compare", pair.reference, pair.path, "--model", model)
    assert (code, error) == (0, "")
    assert report.startswith("MATCH: nothing diverges in 74 ops, compared by drift")
    assert "Of the ops only statistics were compared: a permutation changes none of them." in report


def test_statistics_of_the_reference_suffice(pair: Pair, model: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    code, output, error = cli("compare", pair.path.parent / "s.trace", pair.path, "--model", model)
    assert (code, error) == (0, "")
    assert "replayed and compared" in output
