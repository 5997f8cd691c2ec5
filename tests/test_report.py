"""The terminal report: what it says of results made by hand, and how its lines look."""

import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Models, some_of
from gguf import GGUFReader
from gguf.quants import dequantize
from rich.console import Console

from tracediff.findings.tell import told
from tracediff.model.families import load_graph
from tracediff.model.synthetic import Shape
from tracediff.numerics.arithmetic import EXACT
from tracediff.numerics.evaluate import arithmetic_of
from tracediff.pipeline import Effort, check_trace, compare_traces
from tracediff.report.json_report import render as render_json
from tracediff.report.parts import Command
from tracediff.report.terminal import render
from tracediff.result import Result, Storage
from tracediff.trace.reader import Trace

TRACES = Path(__file__).parent.parent / "traces"
sys.path.insert(0, str(TRACES))

import make  # noqa: E402


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("case", make.CASES)
def test_no_trailing_spaces_and_no_cut_figures(case: str, width: int) -> None:
    lines = make.report(make.compare(case), width).split("\n")
    assert [line for line in lines if line != line.rstrip() or "…" in line] == []


def test_a_clean_run_fits_a_screen() -> None:
    assert len(make.report(make.compare("clean")).splitlines()) <= 40


def test_a_short_parenthesis_is_never_broken() -> None:
    result = make.compare("rope-pairing")
    for width in range(60, 100):
        assert "(2i, 2i + 1)" in make.report(result, width)


def test_a_trace_of_one_op_has_one_op() -> None:
    result = make.compare("clean")
    assert ", 1 op (" in make.report(replace(result, candidate=replace(result.candidate, n_ops=1)))


def test_a_match_by_drift_says_how_far_it_reaches() -> None:
    """Of quantised weights a tenth may drift: that hides mistakes, and is said."""
    case = TRACES / "clean"
    result = compare_traces(case / "reference.trace", case / "candidate.trace")
    assert words(result).startswith("MATCH: nothing diverges in 74 ops, compared by drift (at most NMSE ")
    assert " may be). A mistake may be smaller: --model judges each op by itself. " in words(result)
    assert "A mistake of NMSE above 1.00e-09 in any op by drift alone would have been seen (widest: " in words(result)


def keys(value: object, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where every value of a JSON result is; statistics are one value."""
    yield at
    if isinstance(value, list):
        for inner in value:
            yield from keys(inner, at)
    elif isinstance(value, dict) and "rms" not in value:
        for key, inner in value.items():
            named = {"logits": "STEP", "each": "MISTAKE", "look": "MISTAKE"}.get(at[-1] if at else "", key)
            yield from keys(inner, (*at, named))


def documented_keys() -> Iterator[tuple[str, ...]]:
    """Those of docs/result.md, with what they are in: a row begins with a path; ".key" stands beside it."""
    for row in (TRACES.parent / "docs" / "result.md").read_text().partition("## A validation")[0].splitlines():
        spans = re.findall(r"`([^`]+)`", row.split("|")[1]) if row.startswith("| `") else []
        for span in spans:
            path = span if span[0] != "." else spans[0].rpartition(".")[0] + span
            for side in ("reference", "candidate") if "SIDE" in path else ("",):
                key = tuple(path.replace("SIDE", side).replace("[]", "").split("."))
                yield from (key[:n] for n in range(1, len(key) + 1))


def test_every_key_of_the_result_is_documented() -> None:
    results = [make.compare(case) for case in make.CASES]
    held = Storage("candidate", "bf16", ("ffn_residual",), ("add",), 2, 74, True, "f32", 1e-6)
    results.append(replace(results[0], storage=(held,)))
    produced = {key for result in results for key in keys(json.loads(render_json(result))) if key}
    assert {*documented_keys()} == produced


def test_weights_that_are_wrong_come_before_what_drifts() -> None:
    assert words(make.compare("statistics")).startswith(
        "DIVERGED: output_norm.weight: wrong in memory: every value was multiplied by 0.1401. And output_norm is the "
        "first op over its tolerance"
    )


@pytest.mark.slow
def test_each_of_several_mistakes_is_said_once(models: Models, torch_trace: Callable[..., Path]) -> None:
    """Three of them behind one hidden state, for what explains one of several is known from another layer; what is in
    all layers is said of all, and a mask only of the step in which it shows.
    """
    model = models("qwen2", "F16")
    faults = ("act_relu", "no_mask", "norm_weight_minus_one@0", "bias_missing@2")
    result = check_trace(torch_trace(model, capture="layers", faults=faults, n_decode=1), model)
    assert {op.op: op.cause and {*op.cause.each} for op in result.faulty if op.step == 0} == {
        "blk.0.ffn_residual": {"act_relu", "no_mask", "norm_weight_minus_one"},
        "blk.1.ffn_residual": {"act_relu", "no_mask"},
        "blk.2.ffn_residual": {"act_relu", "no_mask", "bias_missing"},
    }
    inside = "the trace holds no values between"
    assert words(result).startswith(
        "DIVERGED: all 3 layers (seen in ffn_residual): ffn_act: ReLU is used for SiLU. "
        "3 other mistakes are listed below. first at blk.0.ffn_residual in step 0: "
    )
    said = words(result).partition("whatever came before ")[2].partition(" Hidden states")[0]
    assert re.sub(r" \(NMSE up to [\d.]+\)| look at .*?(?= - |$)", "", said) == (
        "- all 3 layers (seen in ffn_residual): ffn_act: ReLU is used for SiLU. "
        f"covers 17 ops, blk.0.attn_norm to blk.0.ffn_residual: {inside} "
        "- all 3 layers (seen in ffn_residual), in step 0: attn_probs: no causal mask: every query sees every key. "
        f"covers 17 ops, blk.0.attn_norm to blk.0.ffn_residual: {inside} "
        "- attn_norm.weight and ffn_norm.weight in layer 0: wrong in memory: 1 was taken from every value (seen in "
        "blk.0.ffn_residual). "
        f"covers 17 ops, blk.0.attn_norm to blk.0.ffn_residual: {inside} "
        "- layer 2 (seen in ffn_residual): attn_q, attn_k, attn_v: their bias is not added. "
        f"covers 17 ops, blk.2.attn_norm to blk.2.ffn_residual: {inside}"
    )


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_listing_cuts_no_name(width: int, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, listed, _ = cli("inspect", TRACES / "clean" / "candidate.trace")
    assert code == 0
    assert "…" not in listed
    assert all(op in listed.split() for _, op in Trace(TRACES / "clean" / "candidate.trace").ops)
    assert max(map(len, listed.splitlines())) <= width


# ---- What is normal


def words(result: Result, width: int = 400) -> str:
    """The report as one line of words."""
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    console.print(render(result, width))
    return " ".join(console.export_text().split())


def edit(trace: Path, step: int, op: str, values: np.ndarray) -> None:
    """Write other values over those of a record."""
    record = Trace(trace).ops[step, op]
    data = bytearray(trace.with_suffix(".bin").read_bytes())
    np.frombuffer(data, np.float32, record.size, record.offset)[:] = values.reshape(-1)
    trace.with_suffix(".bin").write_bytes(data)


@pytest.fixture
def pair(
    models: Models, llama_cpp_trace: Callable[..., Path], torch_trace: Callable[..., Path]
) -> Callable[..., tuple]:
    """A model, its reference trace and the candidate's."""

    def make_pair(shape: str = "qwen2", weights: str = "F32", **options: object) -> tuple[Path, Path, Path]:
        model = models(shape, weights)
        reference = llama_cpp_trace(model)
        return model, reference, torch_trace(model, like=reference, **options)

    return make_pair


def test_growth_keeps_the_first_token_apart(pair: Callable[..., tuple]) -> None:
    model, reference, candidate = pair("demo", "F16")
    result = compare_traces(reference, candidate, model=model)
    trace = Trace(candidate)
    first, last = (trace.values(trace.ops[0, op]).astype(float) for op in ("token_embd", "blk.7.ffn_residual"))
    expected = [np.sqrt((last[rows] ** 2).mean() / (first[rows] ** 2).mean()) for rows in (slice(1), slice(1, None))]
    assert [part.tokens for part in result.normal.growth] == ["first", "others"]
    assert [part.candidate for part in result.normal.growth] == pytest.approx(expected, rel=1e-6)
    assert [part.reference for part in result.normal.growth] == pytest.approx(expected, rel=1e-3)
    assert "in the others, as in the reference: that is this model, not a fault." in words(result)


def test_a_mean_of_the_size_of_the_rms_is_an_alarm(pair: Callable[..., tuple]) -> None:
    _, reference, candidate = pair("demo", "F16")
    trace = Trace(candidate)
    values = trace.values(trace.ops[0, "blk.4.ffn_residual"]).copy()
    edit(candidate, 0, "blk.4.ffn_residual", values + 3 * np.sqrt((values**2).mean(-1, keepdims=True)))
    result = compare_traces(reference, candidate)
    assert [(lean.tokens, lean.op, lean.step, lean.channels) for lean in result.normal.means] == [
        ("first", "blk.4.ffn_residual", 0, 256),
        ("others", "blk.4.ffn_residual", 0, 256),
    ]
    assert all(lean.candidate > 0.7 > 0.2 > lean.reference for lean in result.normal.means)
    assert "A mean of the size of the rms: something adds an offset." in words(result)
    same = compare_traces(candidate, candidate)
    assert "Healthy models stay under 0.035, but the reference has the same: no fault." in words(same)


def test_steps_that_end_alike_are_loud_unless_the_reference_does_the_same(pair: Callable[..., tuple]) -> None:
    _, reference, candidate = pair()
    trace = Trace(candidate)
    clean = compare_traces(reference, candidate).normal.ends
    assert [(end.op, end.steps) for end in clean] == [("output_norm", (0, 1)), ("output_norm", (1, 2))]
    a, b = (trace.values(trace.ops[step, "output_norm"])[-1].astype(float) for step in (1, 2))
    assert clean[1].candidate.nmse == pytest.approx(((b - a) ** 2).sum() / (a**2).sum(), rel=1e-5)
    assert clean[1].candidate.cosine == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), rel=1e-5)
    assert clean[1].reference.nmse == pytest.approx(clean[1].candidate.nmse, rel=1e-4)
    edit(candidate, 2, "output_norm", a * 1.001)
    said = words(compare_traces(reference, candidate))
    assert "Steps 1 and 2 end in states that differ by NMSE 1.00e-06 (reference " in said
    assert "what a new token changes does not reach the end." in said
    same = words(compare_traces(candidate, candidate))
    assert "(reference 1.00e-06), the least of 2 pairs: nearly the same; so it is in the reference." in same
    for step in (1, 2):  # of NaN nothing differs
        edit(candidate, step, "output_norm", a * np.nan)
    assert compare_traces(reference, candidate).normal.ends == ()


@pytest.mark.parametrize(("shape", "weights"), [("qwen2", "F32"), ("llama", "Q8_0"), ("k-quants", "Q4_K_M")])
def test_logits_by_hand(shape: str, weights: str, pair: Callable[..., tuple]) -> None:
    model, reference, candidate = pair(shape, weights)
    result = compare_traces(reference, candidate, model=model)
    reader = GGUFReader(model)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    matrix = dequantize(tensors[head].data, tensors[head].tensor_type).astype(float)
    for logits in result.logits:
        assert logits.head == head
        for side, trace in ((logits.reference, Trace(reference)), (logits.candidate, Trace(candidate))):
            state = trace.values(trace.ops[logits.step, "output_norm"])[-1].astype(float)
            assert [t.recomputed for t in side] == pytest.approx([matrix[t.id] @ state for t in side], rel=1e-12)
            assert [t.recomputed for t in side] == pytest.approx([t.logit for t in side], rel=0.05)
    assert f"Recomputed in float64 from its own output_norm and {head}: off by " in words(result)


def test_a_wrong_head_is_told_from_a_wrong_hidden_state(pair: Callable[..., tuple]) -> None:
    model, reference, candidate = pair(faults=("weight_transposed@output",))
    said = words(compare_traces(reference, candidate, model=model))
    assert "more than its arithmetic explains. The head is wrong, whatever came before." in said
    model, reference, candidate = pair(faults=("weight_transposed@ffn_down",))
    assert "The head is wrong" not in words(compare_traces(reference, candidate, model=model))


# ---- Not judged, or not by itself

LOCATED = Effort(seconds=0)  # where, and not why


def without(trace: Path, out: Path, *names: str) -> Path:
    """The trace without the data of some ops."""
    return some_of(trace, out, lambda op: op.split(".")[-1] not in names)


def gaps(result: Result) -> str:
    return words(result).partition("Not judged, or not by itself, and what to record next ")[2]


def test_a_full_trace_has_no_gaps(pair: Callable[..., tuple]) -> None:
    model, _, candidate = pair()
    result = check_trace(candidate, model)
    assert (result.coverage.alone, result.coverage.together, result.coverage.full) == (result.coverage.n_ops, 0, True)
    assert gaps(result) == ""


def test_a_coarse_trace_says_what_to_record(pair: Callable[..., tuple]) -> None:
    model, _, candidate = pair(capture="layers", faults=("act_gelu@1",))
    result = check_trace(candidate, model)
    assert gaps(result).startswith(
        "- 153 of 162 ops were judged only as part of a segment (9 segments, the longest of 17 ops). "
        "- Record blk.1.attn_v, blk.1.attn_k_rope and blk.1.attn_output to split the segment of 17 ops that ends in "
        "blk.1.ffn_residual (faulty, step 0) into parts of at most 7."
    )
    assert {*result.coverage.segments[1].ops} == {op.name for op in load_graph(model).layer(1)}


def test_the_hint_is_followed_and_splits(pair: Callable[..., tuple], tmp_path: Path) -> None:
    model, _, candidate = pair(faults=("act_gelu@1",))
    names = {op.name.split(".")[-1] for op in load_graph(model)}
    kept = {"token_embd", "ffn_residual", "output_norm", "output"}
    most = 18
    while most > 1:
        coarse = without(candidate, candidate.with_name("coarse.trace"), *names - kept)
        result = check_trace(coarse, model, effort=LOCATED)
        faulty = [segment for segment in result.coverage.segments if segment.faulty]
        assert {op.op.split(".")[1] for op in result.faulty} == {"1"}
        longest = max((len(segment.ops) for segment in faulty), default=1)
        assert longest < most
        most = longest
        kept |= {op.split(".")[-1] for segment in faulty[:1] for op in segment.record}
    assert [op.op for op in result.faulty if op.step == 0] == ["blk.1.ffn_act"]


def test_segments_of_several_layers_are_halved(models: Models, torch_trace: Callable[..., Path]) -> None:
    model = models(Shape(n_layer=8, n_embd=32, n_head=4, n_ff=48))
    candidate = torch_trace(model, capture="layers", faults=("act_gelu@5",), n_decode=0)
    coarse = without(candidate, candidate.with_name("coarse.trace"), "ffn_residual")
    (segment, *_) = check_trace(coarse, model, effort=LOCATED).coverage.segments
    assert (segment.op, len(segment.ops), segment.record, segment.largest) == (
        "output_norm", 137, ("blk.3.ffn_residual",), 69,
    )  # fmt: skip


def test_an_op_of_some_steps_is_not_called_unjudged(models: Models, torch_trace: Callable[..., Path]) -> None:
    """Engines compute the logits of a prompt's last token alone, and of no step before it."""
    model = models(Shape(n_layer=1, n_embd=32, n_head=4, n_ff=48))
    whole = torch_trace(model)
    kept = [*map(json.loads, whole.read_text().splitlines())]
    kept = [line for line in kept if line["type"] != "op" or line["step"] or not line["op"].startswith("output")]
    kept[-1]["records"] = len(kept) - 1
    some = whole.with_name("some.trace")
    some.write_text("".join(json.dumps(line) + "\n" for line in kept))
    result = check_trace(some, model)
    assert gaps(result).endswith("- judged in some steps alone: output_norm and output.")
    assert "ops, output_norm and output in some steps alone. " in words(result)


def test_other_gaps_are_named(pair: Callable[..., tuple], tmp_path: Path) -> None:
    model, reference, _ = pair()
    lines = [json.loads(line) for line in reference.read_text().splitlines()]
    data = Trace(reference)
    for line in lines:
        if line.get("op", "").endswith("ffn_up"):
            values = data.values(data.ops[line["step"], line["op"]])
            del line["dtype"], line["offset"]
            line |= {"min": float(values.min()), "max": float(values.max()), "mean": 0.0, "rms": 1.0}
        if line.get("op") == "output":
            line["op"] = "lm_head"
    lines[0]["data"] = reference.with_suffix(".bin").name
    trace = reference.with_name("gaps.trace")
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gaps(check_trace(trace, model)).startswith(
        "- 18 of 162 ops were judged only as part of a segment (9 segments, the longest of 2 ops). "
        "- not judged at all: output. - no op of this model, and not judged: lm_head. "
        "- recorded as statistics only: ffn_up in 3 layers."
    )


def test_a_blind_segment_is_no_silent_match(pair: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, candidate = pair(capture="layers")
    for limit, value in (("BLIND", 1e-16), ("NOTHING", -1.0), ("FAR_BELOW", -1.0)):
        monkeypatch.setattr(f"tracediff.replay.look.{limit}", value)
    result = check_trace(candidate, model)
    said = words(result)
    assert result.verdict == "undecided"
    assert said.startswith(
        "UNDECIDED: token_embd, ffn_residual in 3 layers, output_norm and output: replay is blind here: roundings may "
        "hide any mistake. Record blk.0.attn_v and blk.0.attn_k_rope and blk.0.attn_output as well: of 17 ops that are "
        "judged as one 7 at most are left. "
    )
    assert "nothing diverges" not in said  # for nothing at all could be told
    assert "- blind, a mistake below a floor of up to" in said
    assert "(blind, step 0) into parts of at most 7." in said


# ---- Arithmetic


def test_an_arithmetic_that_changes_between_layers_is_pointed_out(
    pair: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tracediff.engine.torch_engine.arithmetic_of",
        lambda op, scheme, weights: EXACT if op.name.startswith("blk.1.") else arithmetic_of(op, scheme, weights),
    )
    model, reference, candidate = pair("k-quants", "Q4_K_M", arithmetic="llama.cpp")
    result = compare_traces(reference, candidate, model=model)
    assert result.verdict == "match"
    said = words(result)
    assert (
        "candidate: it changes: linear (Q4_K): activations in q8_K blocks in 2 layers, exact in layer 1 (attn_q, "
        "attn_v, attn_k, ...)"
    ) in said
    assert "reference: it changes" not in said


def test_flipped_roundings_are_counted(pair: Callable[..., tuple]) -> None:
    model, _, candidate = pair()
    result = check_trace(candidate, model)
    first = next(op for op in result.ops if op.op == "blk.0.attn_q")
    flipped = replace(first, local=replace(first.local, flips=2))
    said = words(told(replace(result, ops=(flipped, *result.ops))))
    assert "2 activations on a rounding boundary went the other way, in 1 op: a countable event, no fault" in said
    assert "rounding boundary" not in words(result)


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_a_command_can_be_copied_from_any_terminal(width: int) -> None:
    words = [
        "tracediff",
        "check",
        "my traces/candidate.trace",
        "--model",
        "it's my model.gguf",
        "--explain",
        "blk.0.attn_q",
    ]
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(Command(shlex.join(words)))
    said = console.file.getvalue()
    assert all(len(row) <= width for row in said.splitlines())
    assert shlex.split(said.replace("\\\n", " ")) == words
    assert (" \\\n" in said) == (width < 200)
