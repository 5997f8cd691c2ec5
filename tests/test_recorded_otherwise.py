"""Right engines that record something else than they say: other ids, values before a layer, a batch axis."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Models, trace_graph

from tracediff.model.model import Model
from tracediff.pipeline import Effort, check_trace
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

Tracer = Callable[..., Path]


def rewritten(
    source: Path, out: Path, ids: Callable[[int], int], value: Callable[[Trace, int, str], np.ndarray]
) -> Path:
    """The trace with other ids, and with other values."""
    trace = Trace(source)
    with TraceWriter.like(out, trace.header) as writer:
        for step in trace.steps.values():
            writer.step(step.step, [ids(token) for token in step.tokens], step.positions)
            for record in trace.step_ops(step.step):
                writer.op(step.step, record.op, value(trace, step.step, record.op).astype(np.float32), "f32")
    return out


def as_it_is(trace: Trace, step: int, op: str) -> np.ndarray:
    return trace.values(trace.ops[step, op])


def test_the_ids_that_were_fed_are_read_off(models: Models, torch_trace: Tracer, tmp_path: Path) -> None:
    model = models("qwen2", "Q8_0")
    source = torch_trace(model)
    trace = rewritten(source, tmp_path / "ids.trace", lambda token: (token * 7 + 3) % 300, as_it_is)
    (finding,) = check_trace(trace, model).findings
    assert {*finding.ops} == {"token_embd"}
    assert "its rows are those of the ids 256, 84, 104, 101, " in finding.text
    assert ", where the trace says 295, 291, 131, 110, " in finding.text
    assert finding.look
    assert "which ids the engine feeds" in finding.look


def test_one_wrong_row_is_no_other_id(models: Models, torch_trace: Tracer, tmp_path: Path) -> None:
    """Half of a row is another one's: no id has it."""
    model = models("qwen2", "Q8_0")

    def value(trace: Trace, step: int, op: str) -> np.ndarray:
        values = as_it_is(trace, step, op).copy()
        if op == "token_embd" and step == 0:
            values[3, :24] = values[5, :24]
        return values

    trace = rewritten(torch_trace(model), tmp_path / "half.trace", lambda token: token, value)
    assert "rows are those of" not in check_trace(trace, model, effort=Effort(seconds=5)).findings[0].text


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_is_recorded_before_it_runs(
    layer: int, models: Models, torch_trace: Tracer, tmp_path: Path
) -> None:
    """As transformers' hidden states are counted, or a loop that begins one layer late."""
    model = models("qwen2", "Q8_0")
    before = "token_embd" if layer == 0 else "blk.0.ffn_residual"

    def value(trace: Trace, step: int, op: str) -> np.ndarray:
        return as_it_is(trace, step, before if op == f"blk.{layer}.ffn_residual" else op)

    trace = rewritten(torch_trace(model, capture="layers"), tmp_path / "late.trace", lambda token: token, value)
    first = check_trace(trace, model, effort=Effort(seconds=3)).findings[0]
    name = "token_embd" if layer == 0 else "the layer's input"
    assert f"it holds {name}, number for number: nothing of these 17 ops was added to it" in first.text
    assert f"layer {layer} (seen in ffn_residual)" in first.text


def of_stream(source: Path, out: Path, taken: Callable[[int], str]) -> Path:
    """Hidden states alone, of which each layer's is another value."""
    trace = Trace(source)
    layers = sorted(int(op.split(".")[1]) for step, op in trace.ops if step == 0 and op.endswith("ffn_residual"))
    with TraceWriter.like(out, trace.header) as writer:
        for step in trace.steps.values():
            writer.step(step.step, step.tokens, step.positions)
            writer.op(step.step, "token_embd", as_it_is(trace, step.step, "token_embd"), "f32")
            for layer in layers:
                writer.op(step.step, f"blk.{layer}.ffn_residual", as_it_is(trace, step.step, taken(layer)), "f32")
    return out


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        (
            lambda layer: f"blk.{layer - 1}.ffn_residual" if layer else "token_embd",
            "it holds what the layer before makes of ffn_residual of the layer before: each layer's output is recorded "
            "one layer late",
        ),
        (
            lambda layer: f"blk.{layer}.attn_residual",
            "it holds the stream before the feed-forward is added: each layer's output is recorded too early",
        ),
    ],
)
def test_another_value_of_the_stream_is_told(
    taken: Callable[[int], str], words: str, models: Models, torch_trace: Tracer, tmp_path: Path
) -> None:
    """The first layer was told, and all that follows searched for a minute in vain."""
    model = models("qwen3", "F16")
    trace = of_stream(torch_trace(model), tmp_path / "stream.trace", taken)
    findings = check_trace(trace, model).findings
    assert findings[0].text.startswith("layer 0")
    assert all(words in finding.text for finding in findings[1:])
    assert {op for finding in findings[1:] for op in finding.ops if op.endswith("residual")} > {"blk.1.ffn_residual"}


def test_an_axis_of_a_batch_is_to_be_left_out(models: Models, torch_trace: Tracer, tmp_path: Path) -> None:
    model = models("qwen2", "Q8_0")

    def value(trace: Trace, step: int, op: str) -> np.ndarray:
        values = as_it_is(trace, step, op)
        return values[None] if op.endswith("ffn_norm") else values

    trace = rewritten(torch_trace(model), tmp_path / "batch.trace", lambda token: token, value)
    found = check_trace(trace, model).findings
    assert any("an axis of 1 in front, as of a batch: leave it out of the shape" in one.text for one in found)


@pytest.mark.slow
def test_another_architecture_is_said_before_what_follows(models: Models, torch_trace: Tracer) -> None:
    trace, model = torch_trace(models("qwen2", "Q8_0")), models("qwen2", "F16")
    lines = trace.read_text().split("\n", 1)
    trace.write_text(json.dumps({**json.loads(lines[0]), "arch": "llama"}) + "\n" + lines[1])
    words = "its first line says that the model"
    assert words in check_trace(trace, model, effort=Effort(seconds=1)).details[-1]
    assert any(words in note for note in check_trace(trace, models("qwen2", "Q8_0")).notes)  # all is right, but that


def test_the_op_that_a_name_is_near_to_is_asked_for(models: Models, torch_trace: Tracer) -> None:
    trace, model = torch_trace(models("qwen2", "Q8_0")), models("qwen2", "Q8_0")
    trace.write_text(trace.read_text().replace("attn_kqv", "attn_qkv"))
    said = [one.text for one in check_trace(trace, model).said if one.about == "gaps"]
    assert any("attn_qkv in 3 layers. Is attn_qkv attn_kqv, which was not recorded?" in text for text in said), said


def test_ids_that_were_fed_are_no_others(models: Models, tmp_path: Path) -> None:
    """Of a table that is as the file has it, held to an arithmetic in which it is not."""
    model = Model(models("qwen3", "F16"))
    path = trace_graph(model.graph, model.file, tmp_path / "t.trace", (256, 84, 104, 101))
    asked = "weights in int8 rows with bfloat16 scales (largest / 127)"
    result = check_trace(path, model, arithmetic=asked, effort=Effort(seconds=1))
    assert "token_embd" in {op.op for op in result.faulty}
    assert not any("ids" in finding.text for finding in result.findings)
