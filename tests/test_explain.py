"""`--explain OP`: the numbers of an explanation at a few places."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Models, trace_graph
from test_solve import explained, rewritten

from tracediff.diagnose.planting import plant
from tracediff.diagnose.solve.edit import AND
from tracediff.diagnose.solve.grammar import EXAMPLES
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.model import Model
from tracediff.pipeline import check_trace
from tracediff.result import OpResult


@pytest.fixture(scope="module")
def gate(models: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OpResult]:
    """The trace of an engine whose sum leaves out an input channel, and what is said of it."""
    folder = tmp_path_factory.mktemp("explain")
    change = rewritten("blk.1.ffn_gate", "for i in range(n_in)", "for i in range(n_in - 1)")
    first, *_ = explained(models("k-quants"), folder, change)
    return folder / "t.trace", first


def test_three_places_are_made_by_the_mistake_as_recorded(gate: tuple[Path, OpResult]) -> None:
    cause = gate[1].cause
    assert cause
    assert len(cause.places) == 3
    for place in cause.places:
        assert place.mistaken == pytest.approx(place.recorded, rel=1e-4, abs=1e-5)
        assert re.fullmatch(r"token \d+, channel \d+", place.at)
        assert place.inputs.startswith("ffn_norm ")
    assert abs(cause.places[0].right - cause.places[0].recorded) > 1e-3


def test_of_what_is_computed_value_by_value_one_value_goes_in(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Of a gate with GELU the whole rows were shown."""
    model = Model(tiny("gemma2"))
    gate = next(op for op in model.graph if op.kind == "geglu")
    wrong = replace(gate, function=lambda gate, up: gate.relu() * up)
    trace = trace_graph(model.graph.changed(wrong), model.file, tmp_path / "t.trace", [5, 9, 2, 7])
    (faulty,) = check_trace(trace, model).faulty
    assert faulty.cause
    for place in faulty.cause.places:
        assert re.fullmatch(r"ffn_gate [^,;]+; ffn_up [^,;]+", place.inputs)


def test_the_command_prints_them(
    gate: tuple[Path, OpResult], models: Models, cli: Callable[..., tuple[int, str, str]]
) -> None:
    args = ["check", gate[0], "--model", models("k-quants"), "--explain"]
    code, out, _ = cli(*args, "blk.1.ffn_gate")
    table = out.split("blk.1.ffn_gate in step 0: ")[-1]
    assert code == 1
    assert "the last is left out" in table
    assert table.count("token ") == 3
    code, out, error = cli(*args, "blk.1.ffn_up")
    assert (code, error) == (1, "")
    assert "--explain blk.1.ffn_up: nothing is wrong with it" in out


# Found by other words that come to the same: a known mistake's, or fewer.
_SAID = {
    "channels 256 to 511 are computed with rows 0 to 255 of ffn_gate.weight": "channels from 256 on repeat the first",
    "positions are 1 too high": "positions are shifted by +1",
}


@pytest.mark.parametrize(("sort", "words"), EXAMPLES)
def test_what_is_listed_can_be_planted_and_is_found(models: Models, tmp_path: Path, sort: str, words: str) -> None:
    path = models("k-quants")
    op = {
        "another input": "attn_v", "another weight": "attn_v", "another reading of a weight": "ffn_gate",
        "another function": "ffn_act", "another formula": "ffn_act", "another number": "attn_q_rope",
        "few wrong weights": "ffn_down", "an index map": "attn_q", "an index map of an input": "attn_kqv",
        "a part only": "ffn_up", "a part of every block": "ffn_down", "a load beside another": "ffn_gate",
        "two edits": "ffn_gate", "other rates of rope": "attn_k_rope",
    }.get(sort, "ffn_norm")  # fmt: skip
    name = f"blk.1.{op}"
    faulty = explained(path, tmp_path, lambda graph: plant(graph, GGUFFile(path), f"{name}: {words}")[name])
    assert {one.op for one in faulty} == {name}
    for one in faulty:
        assert one.cause, one.shape
        said = _SAID.get(words, words)
        assert {*words.split(AND)} == {*one.cause.text.split(AND)} or words in one.cause.text or said in one.cause.text
