"""Values that are recorded under each other's names are one finding; weights that are exchanged are another."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Models, some_of

from tracediff.names import split
from tracediff.pipeline import Effort, check_trace


def renamed(trace: Path, out: Path, names: dict[str, str]) -> Path:
    """The trace with other names for some ops, in every layer."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in lines:
        if "op" in line and (other := names.get(split(line["op"])[1])):
            line["op"] = f"{line['op'].rpartition('.')[0]}.{other}"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copy(trace.with_suffix(".bin"), out.with_suffix(".bin"))
    return out


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (
            "ffn_gate",
            "ffn_up",
            "ffn_up, ffn_gate and ffn_act in all 3 layers: ffn_up and ffn_gate are recorded under each other's names.",
        ),
        (
            "attn_k",
            "attn_v",
            "attn_v, attn_k, attn_k_rope and attn_kqv in all 3 layers: attn_v and attn_k are recorded under each "
            "other's names.",
        ),
    ],
)
def test_names_that_are_exchanged_are_one_finding(
    a: str, b: str, said: str, models: Models, torch_trace: Callable[..., Path], tmp_path: Path
) -> None:
    model = models("k-quants", "Q8_0")
    trace = renamed(torch_trace(model, arithmetic="llama.cpp"), tmp_path / "other.trace", {a: b, b: a})
    result = check_trace(trace, model)
    assert [(one.mistake, one.text) for one in result.findings] == [("names_exchanged", said)]
    for op in result.faulty:  # by numbers as well
        assert op.cause
        assert all(place.mistaken == pytest.approx(place.recorded, rel=1e-5) for place in op.cause.places)
        assert len(op.cause.places) > 1


def test_names_are_sought_within_the_time(models: Models, torch_trace: Callable[..., Path], tmp_path: Path) -> None:
    model = models("k-quants", "Q8_0")
    trace = renamed(
        torch_trace(model, arithmetic="llama.cpp"), tmp_path / "a.trace", {"attn_k": "attn_v", "attn_v": "attn_k"}
    )
    result = check_trace(trace, model, effort=Effort(seconds=0.0))
    assert result.faulty
    assert not any(op.cause for op in result.faulty)


def test_weights_that_are_exchanged_are_not_said_to_be_names(models: Models, torch_trace: Callable[..., Path]) -> None:
    model = models("k-quants", "Q8_0")
    result = check_trace(torch_trace(model, faults=("gate_up_swapped",)), model)
    assert [one.text for one in result.findings] == [
        "ffn_gate and ffn_up in all 3 layers: each multiplies with the other's weight."
    ]


@pytest.mark.parametrize(
    ("recorded", "mistake"),
    [
        pytest.param("ffn_norm ffn_gate ffn_up output", "names_exchanged", marks=pytest.mark.slow),
        ("ffn_norm ffn_gate ffn_up", "gate_up_swapped"),
    ],
)
def test_names_are_exchanged_where_what_reads_them_says_so(
    recorded: str, mistake: str, models: Models, torch_trace: Callable[..., Path], tmp_path: Path
) -> None:
    """Be it at the end of a segment; nothing reads what stands in the last layer alone."""
    model = models("k-quants", "Q8_0")
    trace = renamed(torch_trace(model), tmp_path / "o.trace", {"ffn_gate": "ffn_up", "ffn_up": "ffn_gate"})
    layers = range(3) if "output" in recorded else (2,)
    names = {f"blk.{layer}.{name}" for layer in layers for name in recorded.split()} | {*recorded.split()}
    few = some_of(trace, tmp_path / "few.trace", lambda op: op in names)
    shutil.copy(trace.with_suffix(".bin"), few.with_suffix(".bin"))
    assert {one.mistake for one in check_trace(few, model).findings} == {mistake}
