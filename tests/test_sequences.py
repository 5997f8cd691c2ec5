"""Several sequences in one trace: each is read, judged and named as if it had been traced alone."""

import base64
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Models
from json_schema import valid

from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import Cache, StepInput, TorchEngine
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import TraceError
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.names import StepOf
from tracediff.numerics.kinds.linear import linear
from tracediff.pipeline import check_trace, compare_traces
from tracediff.trace.format import Step
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

ROOT = Path(__file__).parent.parent
A, B = (256, 84, 104, 101, 32, 113), (7, 9, 11)
# Sequence 4 joins when sequence 0 decodes, and goes on when that has ended.
BATCHES = [
    Step(0, A, tuple(range(6))),
    Step(1, (5, *B), (6, 0, 1, 2), sequences=(0, 4, 4, 4)),
    Step(2, (6, 5), (7, 3), sequences=(0, 4)),
    Step(3, (8,), (4,), sequence=4),
]
ALONE = {
    0: [Step(0, A, tuple(range(6))), Step(1, (5,), (6,)), Step(2, (6,), (7,))],
    4: [Step(1, B, (0, 1, 2)), Step(2, (5,), (3,)), Step(3, (8,), (4,))],
}
Cli = Callable[..., tuple[int, str, str]]
Traced = Callable[..., Path]


@pytest.fixture
def traced(models: Models, tmp_path: Path) -> Traced:
    def trace(steps: list[Step], name: str = "batch", **options: object) -> Path:
        return trace_torch(models("qwen3", "F16"), tmp_path / f"{name}.trace", TorchOptions(**options), steps=steps)

    return trace


def test_each_sequence_is_read_as_if_traced_alone(traced: Traced) -> None:
    """In float64 nothing but the batch differs."""
    batch = Trace(traced(BATCHES, dtype="f64"))
    assert batch.sequences == [0, 4]
    for sequence, steps in ALONE.items():
        alone = Trace(traced(steps, "alone", dtype="f64"))
        for step in steps:
            at = StepOf(step.step, sequence)
            assert (batch.steps[at].tokens, batch.n_before(at)) == (step.tokens, alone.n_before(step.step))
            np.testing.assert_array_equal(batch.positions_until(at), alone.positions_until(step.step))
            for record in alone.step_ops(step.step):
                expected, got = alone.values(record), batch.values(batch.ops[at, record.op])
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_clean_batch_is_a_match(dtype: str, traced: Traced, models: Models) -> None:
    result = check_trace(traced(BATCHES, dtype=dtype), models("qwen3", "F16"))
    assert result.verdict == "match"
    assert [op.op for op in result.ops if op.status != "ok"] == []


def test_llama_cpp_is_traced_in_a_batch(models: Models, tmp_path: Path, cli: Cli) -> None:
    """Its cache holds the keys of both, one after the other as they were fed: each query has its own."""
    a, b, model = tmp_path / "a.trace", tmp_path / "b.trace", models("qwen2", "Q8_0")
    given = [part for tokens in ("1,2,3", "4,5,6,7") for part in ("--tokens", tokens)]
    forced = [part for tokens in ("8,9", "10,11") for part in ("--decode-tokens", tokens)]
    for engine, out in (("llama.cpp", a), ("torch", b)):
        assert cli("trace", model, "--engine", engine, *given, *forced, "-o", out)[0] == 0
    assert Trace(a).steps == Trace(b).steps
    result = compare_traces(a, b, model=model)
    assert (result.verdict, {op.status for op in result.ops}) == ("match", {"ok"})
    again = ("trace", model, "--engine", "llama.cpp", *given, "-o", a)
    assert "--decode-tokens" in cli(*again, "--decode", 1)[2]
    assert "raise --ubatch" in cli(*again, "--ubatch", 4)[2]


def test_a_mistake_of_one_sequence_is_named_with_it(traced: Traced, models: Models, cli: Cli, tmp_path: Path) -> None:
    """Sequence 4 has sequence 0's keys of layer 1 in the cache, from the first decode step on."""
    right, wrong = Trace(traced(BATCHES)), traced(BATCHES, "wrong")
    gate = "ci", wrong, "--model", models("qwen3", "F16"), "--lock", tmp_path / "lock", "--time", 0
    assert cli(*gate, "--update")[0] == 0
    trace = Trace(wrong)
    data = bytearray(wrong.with_suffix(".bin").read_bytes())
    for name in ("attn_scores", "attn_probs"):
        record = trace.ops[StepOf(2, 4), f"blk.1.{name}"]
        values = right.values(right.ops[StepOf(2, 0), f"blk.1.{name}"])[..., : record.shape[-1]].astype("<f4")
        assert record.offset is not None
        data[record.offset : record.offset + values.nbytes] = values.tobytes()
    wrong.with_suffix(".bin").write_bytes(data)
    page = tmp_path / "page.html"
    check = "check", wrong, "--model", models("qwen3", "F16"), "--time", 0
    code, text, error = cli(*check, "--json", "-", "--html", page)
    assert code == 1, error
    result = json.loads(text)
    assert valid(json.loads((ROOT / "docs/result.schema.json").read_text()), result, closed=True)
    first = result["first_divergence"]
    assert (first["op"], first["step"], first["sequence"]) == ("blk.1.attn_scores", 2, 4)
    assert {(op["step"], op["sequence"]) for op in result["faulty"]} == {(2, 4)}
    packed = re.search(r'id="data">([^<]+)<', page.read_text())
    assert packed
    assert "2 of sequence 4" in json.loads(zlib.decompress(base64.b64decode(packed[1])))["steps"]
    assert "in step 2 of sequence 4" in cli(*check)[1]
    code, text, error = cli(*gate, "--json", "-", "--sarif", tmp_path / "gate.sarif", "--junit", tmp_path / "gate.xml")
    assert code == 1, error
    assert json.loads(text)["cases"]["wrong"]["first_divergence"] == first
    three = cli("compare", right.path, right.path, *check[1:], "--json", "-")
    assert three[0] == 1, three[2]
    outliers = [op for op in json.loads(three[1])["ops"] if op["status"] == "outlier"]
    assert (outliers[0]["op"], outliers[0]["step"], outliers[0]["sequence"]) == ("blk.1.attn_scores", 2, 4)


def rewritten(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Path:
    """The trace with each line changed, or left out."""
    lines = [line for line in map(change, map(json.loads, path.read_text().splitlines())) if line]
    lines[-1]["records"] = len(lines) - 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_sequence_that_is_fed_anew_is_another(traced: Traced, models: Models) -> None:
    """As after a preemption, or by an engine without a cache; under its own number. Twice, and with more tokens."""
    steps = [Step(0, A, tuple(range(6))), Step(1, (5,), (6,))]
    steps += [Step(2, (*A, 5, 9), tuple(range(8)), sequence=1), Step(3, (11,), (8,), sequence=1)]
    steps += [Step(4, (*A, 5), tuple(range(7)), sequence=2), Step(5, (3,), (7,), sequence=2)]
    path = rewritten(traced(steps), lambda line: {key: line[key] for key in line if key != "sequence"})
    result = check_trace(path, models("qwen3", "F16"))
    assert result.verdict == "match"
    assert [*Trace(path).steps] == [0, 1, StepOf(2, 1), StepOf(3, 1), StepOf(4, 2), StepOf(5, 2)]
    assert [note.partition(": ")[2] for note in result.notes if "anew" in note] == [
        f"step {step} feeds sequence 0 anew from its first token on, as after a preemption or without a cache: from "
        f"there on it is called sequence {again}."
        for step, again in ((2, 1), (4, 2))
    ]


@pytest.mark.parametrize("capture", ["all", "layers"])
def test_what_was_cached_before_a_sequence_begins_is_undecided(capture: str, traced: Traced, models: Models) -> None:
    """As from a prefix cache: no engine is called wrong for it."""
    path = traced([Step(0, A, tuple(range(6))), Step(1, (5, 7), (6, 7)), Step(2, (9,), (8,))], capture=capture)
    path = rewritten(path, lambda line: None if line.get("step") == 0 else line)
    result = check_trace(path, models("qwen3", "F16"))
    assert (result.verdict, result.findings) == ("undecided", ())
    end = {"all": "attn_scores", "layers": "ffn_residual"}[capture]
    assert end in result.undecided[0]
    assert (
        "its sequence begins at position 6: what is cached of those before is not in the trace" in result.undecided[0]
    )


def test_positions_that_begin_later_are_judged_where_nothing_was_cached(models: Models, tmp_path: Path) -> None:
    """As OPT's do: the attention of other layers tells that it saw nothing before."""
    model, steps = models("qwen3", "F16"), [Step(0, A, tuple(range(2, 8))), Step(1, (5,), (8,))]
    out = tmp_path / "late.trace"
    trace_torch(model, out, TorchOptions(capture="layers", faults=("heads_first@1",)), steps=steps)
    assert {finding.mistake for finding in check_trace(out, model).findings} == {"heads_first"}


def test_what_a_step_of_one_sequence_is_called(traced: Traced) -> None:
    """By its number alone, whatever the sequence's."""
    trace = Trace(traced(ALONE[4]))
    assert [*trace.steps] == [1, 2, 3]
    assert [type(step) for step in trace.steps] == [int] * 3


HEAD = '{"type":"trace","version":1,"engine":"x","data":"t.bin"}'
STEP = '{"type":"step","step":0,"tokens":[1,2,3,4],"positions":[0,0,1,1],"sequences":[0,1,0,1]}'


def written(folder: Path, *lines: str) -> Path:
    (folder / "t.trace").write_text("\n".join([HEAD, *lines, f'{{"type":"end","records":{len(lines) + 1}}}\n']))
    (folder / "t.bin").write_bytes(np.arange(64, dtype="<f4").tobytes())
    return folder / "t.trace"


@pytest.mark.parametrize(
    ("op", "zero", "one"),
    [
        ('"dtype":"f32","shape":[4,2],"offset":0', [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
        ('"dtype":"f32","shape":[4,2],"offset":0,"strides":[1,4]', [[0, 4], [2, 6]], [[1, 5], [3, 7]]),
        ('"dtype":"f32","shape":[2,2],"offset":0,"rows":[1,2]', [[2, 3]], [[0, 1]]),
        ('"dtype":"f32","shape":[1,2],"offset":8,"rows":[3]', None, [[2, 3]]),
        ('"dtype":"f32","shape":[1,2],"offset":8,"rows":[1],"sequence":0', [[2, 3]], None),
    ],
)
def test_rows_of_a_step_are_told_apart(op: str, zero: object, one: object, tmp_path: Path) -> None:
    trace = Trace(written(tmp_path, STEP, f'{{"type":"op","step":0,"op":"token_embd",{op}}}'))
    for sequence, expected in enumerate((zero, one)):
        record = trace.ops.get((StepOf(0, sequence), "token_embd"))
        assert (trace.values(record).tolist() if record else None) == expected
    held = {key[0].sequence: record.rows for key, record in trace.ops.items()}  # type: ignore[attr-defined]
    if '"rows":[1,2]' in op:
        assert held == {0: (1,), 1: (0,)}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([STEP, '{"type":"op","step":0,"op":"attn_scores","dtype":"f32","shape":[1,4,4],"offset":0}'], "has no row"),
        ([STEP, '{"type":"op","step":0,"op":"x","shape":[4,2],"min":0,"max":1}'], "statistics over the tokens of sev"),
        ([STEP, '{"type":"op","step":0,"op":"x","shape":[4],"nan":1,"sequence":2}'], "of which the step has no token"),
        ([STEP.replace("[0,1,0,1]", "[0,0,1,0]"),
          '{"type":"op","step":0,"op":"x","dtype":"f32","shape":[4],"offset":0}'],
         "neither side by side nor evenly spaced"),
        ([STEP, STEP.replace('"step":0', '"step":1'), STEP], "step 0 after step 1: steps must ascend"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(lines: list[str], said: str, tmp_path: Path, cli: Cli) -> None:
    code, _, error = cli("inspect", written(tmp_path, *lines))
    assert code == 2
    assert said in " ".join(error.split())
    assert '"sequence":K' in error or "ascend" in error or "no token" in error


def test_tokens_that_are_fed_again_from_the_middle_on_are_refused(models: Models, tmp_path: Path) -> None:
    """As nano-vllm resumes a preempted sequence: "positions are 5 too low" was said."""
    path = trace_torch(models("qwen3"), tmp_path / "a.trace", TorchOptions(), steps=BATCHES[:1])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (step,) = (line for line in lines if line["type"] == "step")
    again = {**step, "step": 1, "tokens": step["tokens"][1:], "positions": step["positions"][1:]}
    path.write_text("".join(json.dumps(line) + "\n" for line in (*lines[:-1], again)))
    with pytest.raises(TraceError, match="step 1 feeds the tokens of positions 1 to 5 once more"):
        check_trace(path, models("qwen3"))


@pytest.mark.slow
def test_values_by_head_are_split_by_their_tokens(tiny: Callable[[str], Path], cli: Cli, tmp_path: Path) -> None:
    """Latent attention's keys are [heads, tokens, channels]: they were cut as rows of keys are, or by heads."""
    model, prompts = tiny("deepseek2"), ("--tokens", "256,3,5,7,9,11", "--tokens", "256,4,6,8")  # six heads
    for capture in ("all", "sketch"):
        out = tmp_path / f"{capture}.trace"
        command = ("trace", model, *prompts, "--decode", 2, "--capture", capture, "-o", out)
        assert cli(*command)[0] == 0, cli(*command)[2]
    whole, sketched = (tmp_path / f"{capture}.trace" for capture in ("all", "sketch"))
    assert check_trace(whole, model).verdict == compare_traces(whole, sketched).verdict == "match"
    code, text, error = cli("self", whole, whole, "--model", model)
    assert code == 0, text + error


@pytest.mark.parametrize(("lengths", "n_decode"), [((514, 514), 0), ((1021,), 6)])
def test_factors_of_rope_follow_from_the_longest_sequence(
    lengths: tuple[int, ...], n_decode: int, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Beyond 1,024 positions phi3 has others: of its own, not of all sequences of a batch, and decoded ones too."""
    model, at = tiny("phi3"), [position for n in lengths for position in range(n)]
    sequences = [number for number, n in enumerate(lengths) for _ in range(n)]
    batch = [Step(0, tuple(5 + 7 * p % 240 for p in at), tuple(at), sequences=tuple(sequences))]
    options = TorchOptions(capture="layers")
    path = trace_torch(model, tmp_path / "a.trace", options, (), n_decode, steps=batch)
    assert check_trace(path, model).verdict == "match"


def drafted(model: Model, path: Path, kept: int = 8, wrong: Op | None = None, **header: Any) -> Path:
    """A prompt of 6 tokens, 4 drafts from 6 on, and 2 tokens from 8 on behind `kept` of all."""
    engine = TorchEngine(model.graph.changed(*([wrong] if wrong else [])), model.weights(torch.float32))
    with TraceWriter(path, "drafts", **header) as writer:
        for step, (tokens, first) in enumerate([(A, 0), ((5, 9, 31, 37), 6), ((11, 8), 8), ((7,), 10)]):
            if step == 2:
                old = engine.caches[0]
                new = engine.caches[0] = Cache(model.graph, old.past, torch.float32)
                new.n_positions = kept
                for name, past in old.past.items():
                    new.past[name].append(past.first(kept).clone())
            positions = tuple(range(first, first + len(tokens)))
            engine.run(step, StepInput(tokens, positions), TensorWriter(writer))
    return path


def test_what_follows_rejected_drafts_is_read_without_them(models: Models, cli: Cli, tmp_path: Path) -> None:
    model = Model(models("qwen3", "F32"))
    path = drafted(model, tmp_path / "a.trace", rollback=True)
    trace = Trace(path)
    assert {str(n): (s.tokens, s.positions[-1]) for n, s in trace.steps.items()} == {
        "0 of sequence 0": (A, 5), "1 of sequence 0": ((5, 9, 31, 37), 9),
        "2 of sequence 1": ((*A, 5, 9, 11, 8), 9), "3 of sequence 1": ((7,), 10),
    }  # fmt: skip
    assert trace.ops[StepOf(2, 1), "blk.0.attn_q"].rows == (8, 9)
    assert check_trace(path, model).verdict == "match"
    code, said, _ = cli("check", path, "--model", model.path)
    assert (code, "from there on it is called sequence 1" in " ".join(said.split())) == (0, True)


@pytest.mark.slow
def test_rejected_drafts_that_stay_in_the_cache_are_a_mistake(models: Models, tmp_path: Path) -> None:
    model = Model(models("qwen3", "F32"))
    result = check_trace(drafted(model, tmp_path / "a.trace", kept=10, rollback=True), model)
    assert result.verdict == "diverged"
    (finding,) = result.findings
    assert finding.text.startswith(
        "attn_scores and attn_probs in all 3 layers, in steps 2, 3 of sequence 1: 2 keys more than positions so far"
    )


def test_what_was_kept_is_what_the_engine_had(models: Models, tmp_path: Path) -> None:
    """Of a mistaken prompt the later layers' K and V were recomputed behind the drafts, as they should have been: what
    read them was called mistaken.
    """
    model = Model(models("qwen3", "F32"))
    right = model.graph["blk.0.attn_output"]
    wrong = replace(right, function=lambda x, *weights: linear(x, *weights) * (1.5 if len(x) == len(A) else 1.0))
    result = check_trace(drafted(model, tmp_path / "a.trace", wrong=wrong, rollback=True), model)
    assert [(int(op.step), op.op) for op in result.faulty] == [(0, "blk.0.attn_output")]


def test_what_was_kept_twice_is_what_the_engine_had(models: Models, tmp_path: Path) -> None:
    """Behind a second rejection the tokens that followed the first are another sequence's than those before it."""
    model, path = Model(models("qwen3", "F32")), tmp_path / "a.trace"
    right = model.graph["blk.0.attn_output"]
    wrong = replace(right, function=lambda x, *weights: linear(x, *weights) * (1.5 if len(x) == 3 else 1.0))
    engine = TorchEngine(model.graph.changed(wrong), model.weights(torch.float32))
    with TraceWriter(path, "drafts", rollback=True) as writer:
        for step, (tokens, first) in enumerate([(A, 0), ((5, 9), 6), ((11, 8, 21), 7), ((7, 12), 9), ((13,), 11)]):
            old = engine.caches.get(0)
            if old and first < old.n_positions:
                new = engine.caches[0] = Cache(model.graph, old.past, torch.float32)
                new.n_positions = first
                for name, past in old.past.items():
                    new.past[name].append(past.first(first).clone())
            engine.run(step, StepInput(tokens, tuple(range(first, first + len(tokens)))), TensorWriter(writer))
    result = check_trace(path, model)
    assert [(int(op.step), op.op) for op in result.faulty] == [(StepOf(2, 1), "blk.0.attn_output")]


@pytest.mark.slow
def test_a_step_that_goes_back_unsaid_has_wrong_positions(models: Models, tmp_path: Path) -> None:
    model = Model(models("qwen3", "F32"))
    result = check_trace(drafted(model, tmp_path / "a.trace"), model)
    assert result.verdict == "diverged"
    (note,) = (note for note in result.notes if "drafts" in note)
    assert note.endswith(
        "step 2 begins at position 8, which was fed before, and is judged as one whose positions are wrong. If drafts "
        'were rejected there, say "rollback":true in the first line.'
    )
