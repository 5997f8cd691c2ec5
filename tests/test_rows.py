"""Records of some tokens of a step, and records whose data is transposed, head-major or padded."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TOKENS, Models, from_float, trace_graph
from torch import Tensor

from tracediff.diagnose.planting import plant
from tracediff.errors import TraceError
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.model.weights import Weights
from tracediff.names import Capture, wanted
from tracediff.numerics.kinds.linear import linear
from tracediff.pipeline import check_trace
from tracediff.replay.judging import judge_all
from tracediff.replay.replay import Replay
from tracediff.replay.score import BLIND
from tracediff.trace.data import Stored
from tracediff.trace.format import DType, OpRecord, Rows
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

LAST, EVERY_THIRD = (len(TOKENS) - 1,), tuple(range(1, len(TOKENS), 3))
Trim = Callable[[OpRecord], Rows]  # the tokens to keep of a record


def last_token(record: OpRecord) -> Rows:
    """Of every prefill and decode step."""
    return LAST if record.step == 0 else None


def third_tokens(record: OpRecord) -> Rows:
    return EVERY_THIRD if record.step == 0 else None


def of_the_head(record: OpRecord) -> Rows:
    """As an engine does that prunes before its output head."""
    return LAST if record.step == 0 and record.op in ("output_norm", "output") else None


def one_step_of_many(record: OpRecord) -> Rows:
    return (0,) if record.step == 1 else LAST if record.step == 0 and record.op > "blk.1" else None


def trim(source: Path, out: Path, rows_of: Trim, layers: bool = False) -> Path:
    """The trace with each record cut down to the rows that `rows_of` gives, of the hidden states only if `layers`."""
    trace = Trace(source)
    h = trace.header
    with TraceWriter(out, h.engine, h.arch, h.model, h.weights) as writer:
        for step in trace.steps.values():
            writer.step(step.step, step.tokens, step.positions)
            for record in trace.step_ops(step.step):
                if record.dtype and wanted(record.op, "layers" if layers else "all"):
                    rows = rows_of(record)
                    bits = from_float(trace.values(record, rows), record.dtype)
                    writer.op(record.step, record.op, bits, record.dtype, rows)
    return out


CUTS = {
    "last token": (last_token, False),
    "every third": (third_tokens, False),
    "head": (of_the_head, False),
    "mixed": (one_step_of_many, False),
    "layers": (last_token, True),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("shape", "weights"), [("qwen2", "F32"), ("llama3", "Q8_0"), ("qwen3", "F16")])
def test_clean_partial_traces_pass(
    cut: str, shape: str, weights: str, models: Models, llama_cpp_trace: Callable[..., Path],
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path,
) -> None:  # fmt: skip
    model = models(shape, weights)
    reference = llama_cpp_trace(model)
    partial = trim(reference, tmp_path / "partial.trace", *CUTS[cut])
    code, output, error = cli("check", partial, "--model", model)
    assert (code, error) == (0, ""), output
    code, output, error = cli("compare", reference, partial, "--model", model)
    assert (code, error) == (0, ""), output


def test_loud_biases_do_not_pass_for_rounded_activations(
    models: Models, torch_trace: Callable[..., Path], tmp_path: Path
) -> None:
    """Beside them the products of keys that were not recorded are next to nothing, and so is what rounds them."""
    shape = Shape("qwen2", n_layer=4, n_embd=128, n_head=8, n_head_kv=2, n_ff=256, n_vocab=320, tied=True, loud=True)
    model, tokens = models(shape, "F16"), tuple(range(40, 57))
    result = check_trace(trim(torch_trace(model, tokens=tokens), tmp_path / "last.trace", last_token), model)
    assert result.verdict == "match"
    assert {op.local.arithmetic for op in result.ops if op.local and op.op.endswith("attn_scores")} == {"exact"}


@pytest.mark.parametrize("arch", ["mamba", "rwkv7", "lfm2", "qwen3next"])
@pytest.mark.parametrize("rows_of", [last_token, third_tokens])
def test_what_runs_through_a_state_needs_all_tokens(
    rows_of: Trim, arch: str, tiny: Callable[[str], Path], llama_cpp_trace: Callable[..., Path],
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path,
) -> None:  # fmt: skip
    """Of hidden states of some tokens the convolutions and scans before them are computed over all of them."""
    model = tiny(arch)
    partial = trim(llama_cpp_trace(model), tmp_path / "partial.trace", rows_of, layers=True)
    code, output, error = cli("check", partial, "--model", model)
    assert (code, error) == (0, ""), output


def test_rows_are_made_of_whole_values_whose_heads_come_first(
    tiny: Callable[[str], Path], llama_cpp_trace: Callable[..., Path], cli: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Capped scores have no name of their own: a record of them counts no tokens, one of probabilities does."""
    model = tiny("gemma2")
    whole = llama_cpp_trace(model)
    partial = trim(whole, tmp_path / "partial.trace", lambda r: last_token(r) if r.op.endswith("attn_probs") else None)
    code, output, error = cli("check", partial, "--model", model)
    assert (code, error) == (0, ""), output


def test_every_partial_record_is_judged(models: Models, llama_cpp_trace: Callable[..., Path], tmp_path: Path) -> None:
    """By a replay that can see: norms, projections and sums from recorded inputs, attention from all K and V."""
    model = models("k-quants", "Q4_K_M")
    trace = Trace(trim(llama_cpp_trace(model), tmp_path / "partial.trace", last_token))
    file = GGUFFile(model)
    judged = {(r.step, r.op): local for _, r, local in judge_all([Replay(trace, build_graph(file), Weights(file))])}
    assert set(judged) == set(trace.ops)
    assert not [key for key, local in judged.items() if local.faulty]
    for (step, op), local in judged.items():
        reads_earlier_tokens = op.endswith(("attn_scores", "attn_kqv"))
        assert (len(local.segment) == 1) is not reads_earlier_tokens, (step, op)
        assert local.floor < (BLIND if reads_earlier_tokens else 1e-10), (step, op)


@pytest.mark.parametrize("op", ["blk.1.attn_k_rope", "blk.1.attn_probs", "blk.1.ffn_act", "blk.2.attn_kqv", "output"])
def test_a_mistake_in_the_last_row_is_found(
    op: str, models: Models, torch_trace: Callable[..., Path], tmp_path: Path
) -> None:
    """Of one token, in a record of that token and in one of many: at that op, in that row."""
    model = models("qwen3", "F16")
    file = GGUFFile(model)
    full = torch_trace(model)
    for name, rows_of in (("last", last_token), ("many", third_tokens)):
        partial = trim(full, tmp_path / f"{name}.trace", rows_of)
        trace = Trace(partial)
        record = trace.ops[0, op]
        values = trace.values(record).copy()
        values[(slice(None),) * record.token_axis + (-1,)] *= 1.01
        with partial.with_suffix(".bin").open("r+b") as data:
            data.seek(record.offset or 0)
            data.write(values.tobytes())
        judged = judge_all([Replay(Trace(partial), build_graph(file), Weights(file))])
        faulty = {(r.step, r.op): local for _, r, local in judged if local.faulty}
        first = next(iter(faulty))
        assert first == (0, op)
        assert record.rows
        assert faulty[first].worst.at[record.token_axis] == record.rows[-1]


@pytest.mark.slow
def test_a_planted_fault_is_named(models: Models, torch_trace: Callable[..., Path], tmp_path: Path,
                                  cli: Callable[..., tuple[int, str, str]]) -> None:  # fmt: skip
    model = models("qwen2")
    for fault in ("rope_pairing", "act_swapped"):
        partial = trim(torch_trace(model, faults=(fault,)), tmp_path / f"{fault}.trace", last_token)
        code, output, _ = cli("check", partial, "--model", model, "--json", tmp_path / "result.json")
        assert code == 1, output
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["faulty"][0]["cause"]["name"] == fault


def test_a_step_begins_before_the_first_token_that_was_recorded_of_it(models: Models, tmp_path: Path) -> None:
    """Of a prompt, from its second token on, that leaves out key 0 "cached positions are not attended to"."""
    model = Model(models("qwen3"))
    graph = plant(model.graph, model.file, "keys_skipped@1")
    whole = trace_graph(graph, model.file, tmp_path / "whole.trace", TOKENS)
    path = trim(whole, tmp_path / "cut.trace", lambda record: tuple(range(1, len(TOKENS))))
    assert [finding.text for finding in check_trace(path, model.path).findings] == [
        "attn_probs in layer 1: key 0 is left out by every query that sees others."
    ]


# ---- Two sides with other rows


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_rows_that_were_recorded_are_what_others_read(capture: Capture, models: Models, tmp_path: Path) -> None:
    """K and V of a step's recorded tokens were recomputed with those of all its tokens, as they should have been: what
    read them in the next layer, and in the next step, was called mistaken.
    """
    model = Model(models("qwen3"))

    def wrong(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        y = linear(x, weight, *bias)
        return torch.cat((y[:9], 1.5 * y[9:])) if len(x) > 1 else y

    graph = model.graph.changed(replace(model.graph["blk.0.attn_output"], function=wrong))
    whole = trace_graph(graph, model.file, tmp_path / "whole.trace", TOKENS, (7,), (9,))
    few = trim(whole, tmp_path / "few.trace", lambda r: tuple(range(6, len(TOKENS))) if r.step == 0 else None,
               layers=capture == "layers")  # fmt: skip
    at = "blk.0.attn_output" if capture == "all" else "blk.0.ffn_residual"
    assert {(op.step, op.op) for op in check_trace(few, model).faulty} == {(0, at)}


def test_common_rows_are_compared(models: Models, torch_trace: Callable[..., Path], tmp_path: Path,
                                  cli: Callable[..., tuple[int, str, str]]) -> None:  # fmt: skip
    """Drift over the rows in common is that of the same rows of two full traces."""
    model = models("tiny")
    reference, other = torch_trace(model, dtype="f64"), torch_trace(model, dtype="bf16")
    ours = trim(other, tmp_path / "ours.trace", lambda r: (0, 3, 9, 16) if r.step == 0 else None)
    theirs = trim(reference, tmp_path / "theirs.trace", lambda r: (3, 4, 9, 10) if r.step == 0 else None)
    full, cut = Trace(reference), Trace(other)
    for a, b, rows in ((reference, ours, [0, 3, 9, 16]), (theirs, ours, [3, 9]), (theirs, other, [3, 4, 9, 10])):
        code, _, error = cli("compare", a, b, "--json", tmp_path / "result.json", "--tolerance", "1")
        assert (code, error) == (0, "")
        for op in json.loads((tmp_path / "result.json").read_text())["ops"]:
            record = full.ops[op["step"], op["op"]]
            x, y = (trace.values(trace.ops[op["step"], op["op"]]).astype(np.float64) for trace in (full, cut))
            if op["step"] == 0:
                x, y = (np.take(side, rows, record.token_axis) for side in (x, y))
                assert op["worst"]["at"][record.token_axis] in rows
                assert (op["first_token_nmse"] is not None) == (record.token_axis == 0 and rows[0] == 0)
            if op["op"].endswith("attn_scores"):
                continue  # hidden ones do not count
            assert op["nmse"] == pytest.approx(((y - x) ** 2).sum() / (x**2).sum(), rel=1e-9), op["op"]
            assert op["candidate"]["rms"] == pytest.approx(np.sqrt((y**2).mean()), rel=1e-9), op["op"]


def test_logits_of_the_last_token(models: Models, torch_trace: Callable[..., Path], tmp_path: Path,
                                  cli: Callable[..., tuple[int, str, str]]) -> None:  # fmt: skip
    full = torch_trace(models("tiny"), n_decode=0)
    for rows, compared in ((LAST, True), ((0, *LAST), True), ((0, 1), False)):
        partial = trim(full, tmp_path / "partial.trace", lambda record, rows=rows: rows)
        cli("compare", full, partial, "--json", tmp_path / "result.json")
        logits = json.loads((tmp_path / "result.json").read_text())["logits"]
        assert bool(logits) is compared
        assert not compared or (logits["0"]["same_argmax"], logits["0"]["max_diff"]) == (True, 0)


HEAD = """{"type":"trace","version":1,"engine":"e","data":"DATA"}
{"type":"step","step":0,"tokens":[1,2,3],"positions":[0,1,2]}
"""
STATISTICS = '"min":0,"max":1,"mean":0.5,"rms":0.6'


def one_record(path: Path, values: str, op: str = "a") -> Path:
    """A trace of one record, beside a data file of 64 float32: 0, 1, 2, ..."""
    data = path.with_suffix(".bin")
    data.write_bytes(np.arange(64, dtype="<f4").tobytes())
    record = f'{{"type":"op","step":0,"op":"{op}",{values}}}'
    path.write_text(HEAD.replace("DATA", data.name) + record + '\n{"type":"end","records":3}\n')
    return path


@pytest.mark.parametrize(
    ("reference", "candidate", "note"),
    [
        ('"shape":[1,4],"rows":[0],"dtype":"f32","offset":0', '"shape":[2,4],"rows":[1,2],"dtype":"f32","offset":0',
         "no row in common: one side has tokens 0, the other 1, 2"),
        ('"shape":[3,4],"dtype":"f32","offset":0', '"shape":[1,5],"rows":[2],"dtype":"f32","offset":0',
         "shapes differ: [3, 4] and [1, 5] (1 channel more)"),
        ('"shape":[2,4],"dtype":"f32","offset":0', '"shape":[1,4],"rows":[2],"dtype":"f32","offset":0',
         "shapes differ: [2, 4] and [1, 4] (1 token more)"),
        (f'"shape":[3,4],{STATISTICS}', '"shape":[1,4],"rows":[2],"dtype":"f32","offset":0',
         "a.trace has statistics of tokens all, which do not tell those of tokens 2"),
        ('"shape":[1,4],"rows":[2],"dtype":"f32","offset":0', f'"shape":[2,4],"rows":[0,2],{STATISTICS}',
         "b.trace has statistics of tokens 0, 2, which do not tell those of tokens 2"),
        ('"shape":[3,4],"dtype":"f32","offset":0', '"shape":[1,4],"rows":[2],"min":8,"max":11,"mean":9.5,"rms":9.5655',
         None),
        ('"shape":[1,4],"rows":[2],"dtype":"f32","offset":32', '"shape":[3,2,2],"dtype":"f32","offset":0', None),
        ('"shape":[1,0],"rows":[2],"dtype":"f32","offset":32', '"shape":[3,0],"dtype":"f32","offset":0', None),
    ],
)  # fmt: skip
def test_rows_that_do_not_pair(
    reference: str, candidate: str, note: str | None, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    a, b = one_record(tmp_path / "a.trace", reference), one_record(tmp_path / "b.trace", candidate)
    code, _, error = cli("compare", a, b, "--json", tmp_path / "result.json")
    (op,) = json.loads((tmp_path / "result.json").read_text())["ops"]
    status = "ok" if note is None else "drift" if note.startswith("shapes differ: [3, 4]") else "unmatched"
    assert (op["status"], op["note"]) == (status, note)
    said = f"tracediff: nothing that both traces hold can be compared: a in step 0: {note}.\n"
    assert (code, error) == {"ok": (0, ""), "drift": (1, ""), "unmatched": (2, said)}[status]


# ---- Layouts


def layouts(x: np.ndarray) -> dict[str, tuple[np.ndarray, tuple[int, ...]]]:
    """[T, H, D] values in other orders, as flat float32 and strides in elements."""
    t, h, d = x.shape
    padded = np.full((t, h, d + 5), np.nan, np.float32)
    padded[..., :d] = x
    rows = np.full((t, h * d + 7), np.nan, np.float32)
    rows[:, : h * d] = x.reshape(t, -1)
    return {
        "contiguous": (x.reshape(-1), (h * d, d, 1)),
        "head-major": (x.transpose(1, 0, 2).reshape(-1), (d, t * d, 1)),
        "transposed": (x.transpose(2, 1, 0).reshape(-1), (1, t, h * t)),
        "padded heads": (padded.reshape(-1), (h * (d + 5), d + 5, 1)),
        "padded rows": (rows.reshape(-1)[: (t - 1) * (h * d + 7) + h * d], (h * d + 7, d, 1)),
    }


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_layouts_hold_the_same_values(dtype: DType, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((5, 3, 4)).astype(np.float16).astype(np.float32)
    x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # what every dtype can hold
    path = tmp_path / "a.trace"
    with TraceWriter(path, "e") as writer:
        writer.step(0, range(5), range(5))
        for name, (flat, strides) in layouts(x).items():
            bits = from_float(flat, dtype)
            writer.write_at(offset := writer.reserve(bits.nbytes + 1), bits)  # and none is aligned
            writer.op_at(0, name, x.shape, dtype, offset, strides=strides)
            writer.op_at(0, f"{name} of some", (2, *x.shape[1:]), dtype, offset, rows=(1, 2), strides=strides)
        writer.write_at(writer.reserve(1), np.zeros(1, np.uint8))
    trace = Trace(path)
    for name in layouts(x):
        np.testing.assert_array_equal(trace.values(trace.ops[0, name]), x)
        np.testing.assert_array_equal(trace.values(trace.ops[0, name], (0, 4)), x[[0, 4]])
        np.testing.assert_array_equal(trace.values(trace.ops[0, f"{name} of some"], (2,)), x[1:2])
        flat = trace.by_slice(trace.ops[0, name])
        flat = flat.read(slice(0, 60), np.empty(480, np.uint8)) if isinstance(flat, Stored) else flat.reshape(-1)
        np.testing.assert_array_equal(flat, x.reshape(-1))
        some_channels = trace.values(trace.ops[0, f"{name} of some"], (2,), slice(3, 7))
        np.testing.assert_array_equal(some_channels, x[1:2].reshape(1, -1)[:, 3:7])


@pytest.mark.parametrize("layout", ["head-major", "transposed", "padded heads", "padded rows"])
def test_strided_traces_are_judged_as_contiguous_ones(
    layout: str, models: Models, llama_cpp_trace: Callable[..., Path], tmp_path: Path,
    cli: Callable[..., tuple[int, str, str]],
) -> None:  # fmt: skip
    """Every record of a whole trace, byte for byte the same results."""
    model = models("llama3", "Q8_0")
    source = llama_cpp_trace(model)
    trace, out = Trace(source), tmp_path / "strided.trace"
    with TraceWriter(out, trace.header.engine, trace.header.arch, trace.header.model, trace.header.weights) as writer:
        for step in trace.steps.values():
            writer.step(step.step, step.tokens, step.positions)
            for record in trace.step_ops(step.step):
                x = trace.values(record)
                flat, strides = layouts(x if x.ndim == 3 else x[:, None])[layout]
                strides = strides if x.ndim == 3 else (strides[0], strides[2])
                writer.write_at(offset := writer.reserve(flat.nbytes), flat)
                writer.op_at(step.step, record.op, record.shape, "f32", offset, strides=strides)
    results = []
    for path in (source, out):
        assert cli("check", path, "--model", model, "--json", tmp_path / "result.json")[0] == 0
        results.append(json.loads((tmp_path / "result.json").read_text())["ops"])
    assert results[0] == results[1]
    assert cli("compare", source, out, "--tolerance", "0")[0] == 0


# ---- What is refused


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ('"shape":[1,4],"rows":[3],"dtype":"f32","offset":0', "'rows' [3]: indices of tokens of the step ascend"),
        ('"shape":[2,4],"rows":[1,1],"dtype":"f32","offset":0', "'rows' [1, 1]: indices of tokens of the step ascend"),
        ('"shape":[2,4],"rows":[2,1],"dtype":"f32","offset":0', "'rows' [2, 1]: indices of tokens of the step ascend"),
        ('"shape":[0,4],"rows":[],"dtype":"f32","offset":0', "'rows' []: indices of tokens of the step ascend"),
        ('"shape":[3,4],"rows":[2],"dtype":"f32","offset":0', "1 rows, but axis 0 of the shape [3, 4] counts the"),
        ('"shape":[],"rows":[2],"dtype":"f32","offset":0', "1 rows, but axis 0 of the shape [] counts the tokens"),
        ('"shape":[1,4],"rows":[-1],"dtype":"f32","offset":0', "Expected `int` >= 0 - at `$.rows[0]`"),
        ('"shape":[1,4],"rows":2,"dtype":"f32","offset":0', "Expected `array | null`, got `int` - at `$.rows`"),
        ('"shape":[3,4],"strides":[4],"dtype":"f32","offset":0', "1 strides for the shape [3, 4]: one for each axis"),
        ('"shape":[3,4],"strides":[4,1],"nan":3', "'strides' place data, but the record has none"),
        ('"shape":[3,4],"strides":[4,-1],"dtype":"f32","offset":0', "Expected `int` >= 0 - at `$.strides[1]`"),
        ('"shape":[3,4],"strides":[0,1],"dtype":"f32","offset":0', "strides [0, 1] place 12 values in 4: they overlap"),
        ('"shape":[8,8],"strides":[8,1],"dtype":"f32","offset":4', "too short: the record needs 256 bytes at 4,"),
        ('"shape":[3,4],"strides":[1,21],"dtype":"f32","offset":0', "too short: the record needs 264 bytes at 0,"),
        ('"shape":[3,4],"strides":[9223372036854775807,9223372036854775807],"dtype":"f64","offset":0', "is too short"),
        ('"shape":[1048576,1048576],"strides":[1,1],"dtype":"f32","offset":0', "values in 2,097,151: they overlap"),
    ],
)  # fmt: skip
def test_refused(values: str, expected: str, tmp_path: Path) -> None:
    path = one_record(tmp_path / "a.trace", values)
    with pytest.raises(TraceError, match=re.escape(expected)) as error:
        Trace(path)
    assert str(error.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ('"shape":[1,4],"strides":[9223372036854775807,1],"dtype":"f32","offset":0', [[0, 1, 2, 3]]),
        ('"shape":[0,4],"strides":[9223372036854775807,9223372036854775807],"dtype":"f32","offset":256', []),
        ('"shape":[2,2],"strides":[1,62],"dtype":"f32","offset":0', [[0, 62], [1, 63]]),
        ('"shape":[3],"rows":[0,1,2],"dtype":"f32","offset":4', [1, 2, 3]),
    ],
)
def test_accepted(values: str, expected: list[object], tmp_path: Path) -> None:
    trace = Trace(one_record(tmp_path / "a.trace", values))
    (record,) = trace.ops.values()
    assert trace.values(record).tolist() == expected
    assert record.rows is None


@pytest.mark.parametrize("name", ["attn_probs", "kq_scaled_1", "kq_tanh", "attn_k_b"])
def test_rows_of_scores_are_their_second_axis(name: str, tmp_path: Path) -> None:
    """And those of what llama.cpp makes of scores before, and of what latent attention multiplies head by head."""
    values = '"shape":[2,1,3],"rows":[1],"dtype":"f32","offset":0'
    trace = Trace(one_record(tmp_path / "a.trace", values, f"blk.0.{name}"))
    assert trace.ops[0, f"blk.0.{name}"].token_axis == 1
    with pytest.raises(TraceError, match="1 rows, but axis 0"):
        Trace(one_record(tmp_path / "a.trace", values, "blk.0.attn_q"))


def test_a_deep_model_of_which_only_logits_were_recorded(
    models: Models, torch_trace: Callable[..., Path], tmp_path: Path
) -> None:
    """One segment of over 600 ops: more than Python recurses through."""
    model = models(Shape(n_layer=48, n_embd=48, n_ff=64))
    full = Trace(torch_trace(model, n_decode=0))
    with TraceWriter(tmp_path / "logits.trace", "e") as writer:
        writer.step(0, TOKENS, range(len(TOKENS)))
        writer.op(0, "output", full.values(full.ops[0, "output"], LAST), "f32", LAST)
    file = GGUFFile(model)
    ((_, _, local),) = judge_all([Replay(Trace(tmp_path / "logits.trace"), build_graph(file), Weights(file))])
    assert not local.faulty
    assert len(local.segment) > 600
