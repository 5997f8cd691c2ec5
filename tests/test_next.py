"""What to run next: one command that exists, and is the right one for what is open."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TOKENS, Models, some_of, trace_graph
from test_real_arithmetic import LLAMA, traced

from tracediff.findings.gaps import to_split
from tracediff.findings.next import next_step
from tracediff.findings.summary import details
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.numerics.kinds import KINDS
from tracediff.pipeline import Effort, check_trace, compare_traces

TRACES = Path(__file__).parent.parent / "traces"


def case(name: str, model: bool = True):
    folder = TRACES / name
    return compare_traces(
        folder / "reference.trace", folder / "candidate.trace", model=folder / "model.gguf" if model else None
    )


def test_a_known_mistake_is_explained() -> None:
    result = case("rope-pairing")
    assert result.next == next_step(result)
    words = shlex.split(result.next.command)
    assert words[:2] + words[4:] == [
        "tracediff", "compare", "--model", str(TRACES / "rope-pairing/model.gguf"), "--explain", "blk.0.attn_q_rope",
    ]  # fmt: skip
    assert "look at the rope kernel's pairing, and the family's rope type" in result.next.why


def test_an_unknown_one_in_a_segment_is_split_and_alone_its_weight_is_audited_or_a_case_is_made_of_it(
    cli: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = case("layers-only")
    unknown = replace(result, findings=(replace(result.findings[0], mistake=None),))
    assert next_step(unknown).why.startswith(
        "record blk.1.attn_v, blk.1.attn_k_rope and blk.1.attn_kqv as well, or every op: 19 ops"
    )
    result = case("three-faults")
    first = replace(result.findings[0], mistake=None)
    audit = next_step(replace(result, findings=(first,)))
    assert shlex.split(audit.command)[:4] == [
        "tracediff",
        "weights",
        str(TRACES / "three-faults/model.gguf"),
        "--trace",
    ]
    assert audit.why.startswith("after the engine has recorded blk.0.attn_v.weight as it holds them")
    act = replace(result.findings[1], mistake=None)
    case_of_it = next_step(replace(result, findings=(act,)))
    assert case_of_it.why.startswith("look at the code of blk.0.ffn_act and blk.1.ffn_act")
    monkeypatch.chdir(tmp_path)
    code, _, said = cli(*shlex.split(case_of_it.command)[1:])
    assert code == 0
    assert said.startswith("wrote blk.0.ffn_act.case: ")
    script = [sys.executable, tmp_path / "blk.0.ffn_act.case" / "reproduce.py"]
    assert subprocess.run(script, capture_output=True, check=False).returncode == 1


@pytest.mark.slow
def test_what_nothing_explains_is_split_before_what_is_known(models: Models, tmp_path: Path) -> None:
    """Advice went to the first segment that is faulty, though its cause was named: the others got none."""

    def change(op: Op) -> Op:
        unlike = {
            "blk.0.ffn_act": lambda gate, up: torch.nn.functional.relu(gate) * up,
            "blk.1.ffn_act": lambda gate, up: torch.cos(3 * gate) * up.roll(1, -1) * up,
        }
        return replace(op, function=unlike[op.name]) if op.name in unlike else op

    model = models(LLAMA, "F16")
    path = traced(model, tmp_path / "t.trace", change=change, capture="layers", n_decode=0)
    result = check_trace(path, model, effort=Effort(seconds=8))
    assert [(op.op, op.cause is None) for op in result.faulty] == [
        ("blk.0.ffn_residual", False), ("blk.1.ffn_residual", True)
    ]  # fmt: skip
    assert result.coverage
    segment = to_split(result, result.coverage)
    assert segment
    assert segment.op == "blk.1.ffn_residual"


def test_what_splits_one_layer_is_to_be_recorded_in_all_that_are_as_wrong(models: Models, tmp_path: Path) -> None:
    """Layer by layer it took five rounds, and a tap is one line for all."""

    def change(op: Op) -> Op:
        unlike = op.kind == "swiglu"
        return replace(op, function=lambda gate, up: torch.cos(3 * gate) * up.roll(1, -1) * up) if unlike else op

    model = models(LLAMA, "F16")
    path = traced(model, tmp_path / "t.trace", change=change, capture="layers", n_decode=0)
    step = check_trace(path, model, effort=Effort(seconds=0)).next
    assert step.why.startswith(
        "record attn_v, attn_k_rope and attn_output in both layers as well, or every op: 17 ops up to"
    )


def test_what_a_step_finds_is_not_to_be_recorded(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A state is written as what the step before leaves: "Record blk.0.ssm_state" named what no page knows."""
    model = Model(tiny("rwkv6"))
    right = KINDS["rwkv_wkv6"].function
    wrong = [replace(op, function=lambda *x: -right(*x)) for op in model.graph if op.kind == "rwkv_wkv6"]
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "t.trace", (58,), (114,))
    path = some_of(path, path, lambda op: "state" not in op and not op.endswith(("time_mix_key", "time_mix_value")))
    coverage = check_trace(path, model.path, effort=Effort(seconds=0)).coverage
    assert coverage
    named = {op for segment in coverage.segments for op in segment.record}
    assert named
    assert {model.graph[op].kind for op in named} & {"state"} == set()


def test_what_comes_first_may_be_listed_below_the_headline(models: Models, tmp_path: Path) -> None:
    """The headline is of what is explained, wherever that is; the line below it is of what is first."""

    def change(op: Op) -> Op:
        unlike = {
            "blk.0.ffn_norm": lambda x, weight, eps: torch.cos(3 * x) * x.roll(1, -1) * x * weight,
            "blk.1.ffn_act": lambda gate, up: torch.nn.functional.relu(gate) * up,
        }
        return replace(op, function=unlike[op.name]) if op.name in unlike else op

    model = models(LLAMA, "F16")
    path = traced(model, tmp_path / "t.trace", change=change, n_decode=0)
    result = check_trace(path, model, effort=Effort(seconds=8))
    assert result.summary.startswith("ffn_act in layer 1: ReLU is used for SiLU.")
    assert next(details(result)).startswith("first at blk.0.ffn_norm, listed below: local error (NMSE) ")


def test_why_a_record_below_its_floor_is_faulty_is_said(models: Models, tmp_path: Path) -> None:
    """One value of an op in a thousand is off, far beyond what arithmetic does to it alone."""

    def off(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        y = KINDS["rms_norm"].function(x, weight, eps=eps)
        y[3, 5] *= 1 + 2e-6
        return y

    def change(op: Op) -> Op:
        return replace(op, function=off) if op.name == "blk.0.ffn_norm" else op

    model = models(LLAMA, "F16")
    result = check_trace(traced(model, tmp_path / "t.trace", change=change, n_decode=0), model)
    (op,) = result.faulty
    assert op.local
    assert op.local.nmse < op.local.floor
    assert next(details(result)).endswith(f"; single values are off by up to {op.local.excess:.3f} times their bounds")


def test_what_a_tied_head_multiplies_with_is_called_by_its_name(models: Models, tmp_path: Path) -> None:
    """The file has no output.weight, and `validate` said so of a trace that had one, as was asked for."""

    def change(op: Op) -> Op:
        return replace(op, function=lambda x, w, bias=None: torch.sin(9 * x @ w.T) * 3) if op.name == "output" else op

    model = models("qwen2", "F32")
    path = traced(model, tmp_path / "t.trace", change=change, n_decode=0)
    result = check_trace(path, model, effort=Effort(seconds=0))
    assert result.next.why.startswith("after the engine has recorded token_embd.weight as it holds them")


def test_drift_asks_for_the_model_and_a_match_for_a_lock() -> None:
    assert shlex.split(case("rope-pairing", model=False).next.command)[-2:] == ["--model", "model.gguf"]
    assert case("clean", model=False).next.why.startswith("drift hides what is smaller than its tolerance")
    assert shlex.split(case("clean").next.command)[-1] == "--update"


def test_what_is_undecided_says_so_in_json(
    models: Models, torch_trace: Callable[..., Path], cli: Callable[..., tuple], tmp_path: Path
) -> None:
    trace = torch_trace(models("tiny"), tokens=TOKENS[:5], capture="stats")
    code, text, _ = cli("check", trace, "--model", models("tiny"), "--json", "-")
    assert code == 2
    assert json.loads(text)["next"]["command"].startswith(f"tracediff validate {trace} --model ")


@pytest.mark.parametrize("name", ["clean", "rope-pairing", "three-faults", "layers-only"])
def test_the_command_can_be_run(name: str, cli: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """From where the files were named, be they in another folder."""
    monkeypatch.chdir(TRACES)
    here = Path(name)
    result = compare_traces(here / "reference.trace", here / "candidate.trace", model=here / "model.gguf")
    words = shlex.split(result.next.command)[1:]
    if "--update" in words:
        words[words.index("--update")] = "--help"  # which leaves nothing in the folder
    code, _, error = cli(*words)
    assert code in (0, 1), error


@pytest.mark.parametrize("option", ["model", "without", pytest.param("engine", marks=pytest.mark.slow)])
def test_what_self_says_next_can_be_run(
    option: str,
    models: Models,
    cli: Callable[..., tuple],
    torch_trace: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trace in other steps, and those that an engine was run for, are deleted."""
    model = models("qwen2", "F32")
    monkeypatch.chdir(model.parent)
    right, wrong = torch_trace(model, tokens=TOKENS), torch_trace(model, tokens=TOKENS, faults=("rope_pairing@1",))
    fed = (model, "--engine", "torch", "--fault", "cache_zeros") if option == "engine" else (right, wrong)
    with_model = ("--model", model) if option == "model" else ()
    code, text, _ = cli("self", *fed, *with_model, "--json", "-")
    assert code == 1
    result = json.loads(text)
    cases = [one for one in result.get("ways", {"": result}).values() if one["verdict"] == "diverged"]
    (command,) = {one["next"]["command"] for one in cases}
    code, report, error = cli(*shlex.split(command)[1:])
    assert code == 1, error
    assert ("by the mistake" in report) == (option == "model")
    assert ("They name two engines" in text) == (option != "engine")


def test_what_run_says_next_can_be_run_though_its_traces_are_gone(
    cli: Callable[..., tuple], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = TRACES / "clean" / "model.gguf"
    code, text, _ = cli("run", model, "--tokens", "1,2,3", "--fault", "rope_pairing", "--json", "-")
    assert code == 1
    said = json.loads(text)["next"]
    again = shlex.split(said["command"])
    assert again[-2:] == ["--save", "traces"]
    assert cli(*again[1:])[0] == 1
    (then,) = re.findall("`(.*)`", said["why"])
    code, report, _ = cli(*shlex.split(then)[1:])
    assert code == 1
    assert "by the mistake" in report
