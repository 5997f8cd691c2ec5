"""An engine without modules, recorded by its own calls."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Models

import tracediff
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import TraceError
from tracediff.names import StepOf
from tracediff.pipeline import check_trace
from tracediff.trace.format import Step
from tracediff.trace.reader import Trace

Traced = Callable[..., Path]

AS_HELD: dict[str, Callable[[np.ndarray], object]] = {
    "rows apart": lambda x: np.repeat(x, 2, axis=0)[::2],
    "backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "transposed": lambda x: np.asfortranarray(x),
    "float64": lambda x: x.astype(np.float64),
    "torch": lambda x: torch.from_numpy(x.copy()).requires_grad_(),
    "torch, transposed": lambda x: torch.from_numpy(x.T.copy()).permute(*reversed(range(x.ndim))),
}


@pytest.mark.parametrize("held", AS_HELD)
def test_values_come_out_as_they_went_in(
    held: str, models: Models, torch_trace: Traced, tmp_path: Path
) -> None:  # fmt: skip
    """Of any layout, over a prefill and decode steps whose positions nobody gave."""
    model = models("qwen3", "F16")
    given = Trace(torch_trace(model))
    with tracediff.Recorder(tmp_path / "mine.trace", gguf=model) as r:
        for name, weight in given.weights.items():
            r.weight(name, given.values(weight))
        for number, step in given.steps.items():
            r.step(np.array(step.tokens))
            for record in given.step_ops(number):
                r(record.op, AS_HELD[held](given.values(record)))
    again = Trace(tmp_path / "mine.trace")
    assert again.steps == given.steps
    assert again.ops.keys() == given.ops.keys()
    for key, record in given.ops.items():
        np.testing.assert_array_equal(again.values(again.ops[key]), given.values(record))
    assert check_trace(again.path, model).verdict == "match"


def test_a_batch(models: Models, tmp_path: Path) -> None:
    """Rows of all sequences at once, scores of each; a torch engine's own values."""
    model = models("qwen3", "F16")
    steps = [Step(0, (5, 6, 7, 8), (0, 1, 0, 1), sequences=(0, 0, 3, 3)), Step(1, (9, 4), (2, 2), sequences=(0, 3))]
    given = Trace(trace_torch(model, tmp_path / "given.trace", TorchOptions(), steps=steps))
    with tracediff.Recorder(tmp_path / "mine.trace", gguf=model) as r:
        for step in steps:
            r.step(step.tokens, sequences=step.sequences)
            for record in given.step_ops(StepOf(step.step, 0)):
                parts = {k: given.ops[StepOf(step.step, k), record.op] for k in (0, 3)}
                values = {k: given.values(part) for k, part in parts.items()}
                if "attn_scores" in record.op or "attn_probs" in record.op:
                    for k in (3, 0):
                        r(record.op, values[k], sequence=k)
                else:
                    r(record.op, np.concatenate([*values.values()]))
        with pytest.raises(TraceError, match="step 1 has no token of sequence 2"):
            r("output", np.zeros((1, 2), "f4"), sequence=2)
    assert Trace(tmp_path / "mine.trace").steps == given.steps
    assert check_trace(tmp_path / "mine.trace", model).verdict == "match"


def test_types_that_a_trace_has_are_kept_and_others_widened(tmp_path: Path) -> None:
    values = torch.tensor([[1.5, -2.0]])
    with tracediff.Recorder(tmp_path / "mine.trace") as r:
        r.step([1], [7])
        r("f16", values.half().numpy())
        r("bf16", values.bfloat16())
        r("fp8", values.to(torch.float8_e4m3fn))
        r("last", values, rows=[0])
    trace = Trace(tmp_path / "mine.trace")
    assert {op: (record.dtype, trace.values(record).tolist()) for (_, op), record in trace.ops.items()} == {
        "f16": ("f16", [[1.5, -2.0]]), "bf16": ("bf16", [[1.5, -2.0]]), "fp8": ("f32", [[1.5, -2.0]]),
        "last": ("f32", [[1.5, -2.0]]),
    }  # fmt: skip
    assert trace.steps[0].positions == (7,)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda r: r("blk.0.attn_qq", np.zeros((2, 96), "f4")), r"no op of this qwen2 model\. Near it: blk"),
        (lambda r: r("token_embd", np.zeros((3, 96), "f4")), r"shape \[3, 96\] in step 0; this model's is \[2, 96\]"),
        (lambda r: r("token_embd", np.zeros((2, 96), int)), "values of type int64. A trace holds float64"),
        (lambda r: [r("token_embd", np.zeros((2, 96), "f4")) for _ in range(2)], "recorded in step 0 already"),
        (lambda r: r("token_embd", np.zeros((2, 96), "f4"), rows=[1, 0]), r"rows \[1, 0\] of a step of 2 tokens"),
        (lambda r: r.step([1, 2], [0]), r"tokens \[1, 2\] at \[0\]: give as many positions as tokens"),
        (lambda r: r.step([]), "give as many positions as tokens"),
    ],
)  # fmt: skip
def test_what_no_trace_can_hold_is_refused_as_it_comes(
    call: Callable[[tracediff.Recorder], object], said: str, models: Models, tmp_path: Path
) -> None:
    with tracediff.Recorder(tmp_path / "mine.trace", gguf=models("qwen2", "F32")) as r:
        r.step([1, 2])
        with pytest.raises(TraceError, match=said):
            call(r)


@pytest.mark.filterwarnings("error")
def test_an_array_that_nobody_may_write_to_is_read_in_silence(tmp_path: Path) -> None:
    """As those of gguf-py are: torch warned of it."""
    values = np.arange(6.0, dtype=np.float32)
    values.flags.writeable = False
    with tracediff.Recorder(tmp_path / "t.trace") as record:
        record.weight("output_norm.weight", values)
        record.step([1])
    trace = Trace(tmp_path / "t.trace")
    assert np.array_equal(trace.values(trace.weights["output_norm.weight"]), values)


def test_another_number_of_keys_is_recorded(models: Models, tmp_path: Path) -> None:
    """It is what the engine did: the trace shows it."""
    model = models("qwen2", "F32")
    given = Trace(trace_torch(model, tmp_path / "given.trace", TorchOptions(), (5, 6, 7), 1))
    with tracediff.Recorder(tmp_path / "mine.trace", gguf=model) as r:
        for number, step in given.steps.items():
            r.step(step.tokens)
            for record in given.step_ops(number):
                values = given.values(record)
                r(record.op, values[..., 1:] if number and record.op.endswith("attn_scores") else values)
    (finding,) = check_trace(tmp_path / "mine.trace", model).findings
    assert finding.text.endswith("in step 1: 1 key fewer than positions so far: some are forgotten.")


def test_an_op_before_its_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no step has begun"), tracediff.Recorder(tmp_path / "mine.trace") as r:
        r("output", np.zeros((1, 2), "f4"))


def test_what_cannot_begin_holds_no_trace(tmp_path: Path) -> None:
    out, wrong = tmp_path / "mine.trace", "everything"
    with pytest.raises(Exception, match=wrong) as refused, tracediff.Recorder(out, capture=wrong):  # type: ignore[arg-type]
        pass
    with tracediff.Recorder(out) as r:  # with the exception, and what it refers to, still there
        r.step([1])
    assert refused.value is not None
    assert out.exists()
