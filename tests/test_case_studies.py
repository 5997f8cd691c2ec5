"""The case studies of docs/case-studies.md: benchmarks/case_studies.py has the recipes and writes the page."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import case_studies
from case_studies import FROZEN, LOUD, QUIET, SPIKES, Act, Case

from tracediff.model.gguf_file import GGUFFile
from tracediff.model.synthetic import write_model

PAGE = (Path(__file__).parent.parent / "docs" / "case-studies.md").read_text()
MATMULS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class Folder:
    """Where a case is played, act by act."""

    def __init__(self, path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
        self._path, self._cli = path, cli

    def play(self, act: Act) -> tuple[str, dict]:
        """The first sentence of an act's output, which is on the page too, and its JSON."""
        for command in act.setup:
            code, _, error = self._cli(*shlex.split(command))
            assert code == 0, error
        code, out, error = self._cli(*shlex.split(act.command), "--json", "result.json")
        assert code == act.code, error
        lead = " ".join(out.partition("\n  first at")[0].split())
        assert f"$ tracediff {act.command}\n" in PAGE
        assert lead in " ".join(PAGE.split())
        return lead, json.loads((self._path / "result.json").read_text())


@pytest.fixture
def folder(tmp_path: Path, cli, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], Folder]:
    def make(case: Case) -> Folder:
        monkeypatch.chdir(tmp_path)
        write_model(tmp_path / "model.gguf", case.shape, case.file_type)
        return Folder(tmp_path, cli)

    return make


def causes(result: dict) -> dict[str, str]:
    """Every faulty op of step 0 and the cause named."""
    return {op["op"]: op["cause"] and op["cause"]["name"] for op in result["faulty"] if op["step"] == 0}


def in_layers(layers: range, names: tuple[str, ...], cause: str) -> dict[str, str]:
    return {f"blk.{n}.{name}": cause for n in layers for name in names}


@pytest.mark.slow
def test_three_mistakes_at_once_and_a_repair_that_is_a_fourth(folder) -> None:
    here, layers = folder(LOUD), range(24)
    three = {
        **in_layers(layers, MATMULS[:3], "weight_transposed + bias_missing"),
        **in_layers(layers, MATMULS[3:], "weight_transposed"),
        **in_layers(layers, ("attn_q_rope", "attn_k_rope"), "rope_pairing"),
        "output": "weight_transposed",
    }
    lead, engine = here.play(LOUD.acts[0])
    assert lead == (
        "DIVERGED: all 169 matmuls: the weight is read transposed (leading dimension of the wrong side). "
        "2 other mistakes are listed below."
    )
    assert causes(engine) == three
    assert {weight["status"] for weight in engine["weights"]} == {"identical"}
    reference, candidate = ([op[side]["rms"] for op in states(engine)] for side in ("reference", "candidate"))
    assert reference[-1] / reference[0] > 500
    assert 0.5 < candidate[-1] / candidate[0] / (reference[-1] / reference[0]) < 2

    lead, repaired = here.play(LOUD.acts[1])
    assert lead.endswith("3 other mistakes are listed below.")
    assert causes(repaired) == three | {"output_norm": "norm_scaled"}
    (scaled,) = (found for found in repaired["findings"] if found["mistake"] == "norm_scaled")
    assert "output_norm.weight: wrong in memory: every value was multiplied by 0.1401" in scaled["text"]
    before, after = (result["logits"]["0"]["candidate"] for result in (engine, repaired))
    assert [token["id"] for token in after] == [token["id"] for token in before]
    assert [t["logit"] for t in after] == pytest.approx([0.1401 * t["logit"] for t in before], rel=1e-5)


def test_other_tokens_end_the_comparison(folder, tmp_path: Path, cli) -> None:
    folder(QUIET)
    act = QUIET.acts[0]
    for command in act.setup:
        assert cli(*shlex.split(command))[0] == 0
    message = (
        "tracediff: the token ids differ in step 0, first at index 0: all later values differ for that reason.\n"
        "  reference.trace: 17 tokens, 256 <|bos|>, 84 'T', 104 'h', 101 'e'...\n"
        "  engine.trace: 16 tokens, 84 'T', 104 'h', 101 'e', 32 ' '...\n"
        "The candidate lacks the reference's first token 256: a BOS that was not added? "
        "Feed the candidate the reference's ids.\n"
    )
    assert cli(*shlex.split(act.command)) == (2, "", message)
    assert message in PAGE


def test_only_what_is_q6_k_is_misread(folder, tmp_path: Path, cli) -> None:
    here = folder(QUIET)
    assert cli(*shlex.split(case_studies.REFERENCE))[0] == 0
    lead, result = here.play(QUIET.acts[1])
    assert lead == (
        "DIVERGED: every Q6_K tensor (21): Q6_K's values are taken in the order of their bytes; they interleave l, "
        "l+32, l+64, l+96."
    )
    tensors = GGUFFile(tmp_path / "model.gguf").tensors.values()
    assert {info.type.name for info in tensors} == {"F32", "Q4_K", "Q6_K"}
    assert causes(result) == {
        info.name.removesuffix(".weight"): "q6_k_order" for info in tensors if info.type.name == "Q6_K"
    }
    for op in states(result)[1:]:  # RMS sees nothing where everything is wrong
        assert op["candidate"]["rms"] == pytest.approx(op["reference"]["rms"], rel=0.2)
        assert op["nmse"] > 1


def test_only_the_head_is_wrong(folder) -> None:
    lead, result = folder(SPIKES).play(SPIKES.acts[0])
    assert lead == ("DIVERGED: output: token_embd.weight is read transposed (leading dimension of the wrong side).")
    assert [(op["op"], op["step"], op["cause"]["name"]) for op in result["faulty"]] == [
        ("output", step, "weight_transposed") for step in range(3)
    ]
    assert {op["status"] for op in result["ops"] if op["op"] != "output"} == {"ok"}
    assert all(logits["candidate"][0]["other_rank"] > 10_000 for logits in result["logits"].values())


def test_the_last_layer_is_innocent(folder) -> None:
    lead, result = folder(FROZEN).play(FROZEN.acts[0])
    assert lead == (
        "DIVERGED: attn_q, attn_v, attn_k, attn_output, ffn_gate, ffn_up and ffn_down in layer 4: Q4_K's minimum is "
        "added where it must be subtracted."
    )
    assert causes(result) == in_layers(range(4, 5), MATMULS, "q4_k_min_added")
    after = states(result)
    assert [op["status"] for op in after] == ["ok"] * 5 + ["inherited"] * 32
    assert all(op["local_nmse"] < 1e-14 for op in after)
    last = after[-1]
    assert last["candidate"]["rms"] > 100 * last["reference"]["rms"]
    assert abs(last["candidate"]["mean"]) > 0.3 * last["candidate"]["rms"]
    assert len({logits["candidate"][0]["id"] for logits in result["logits"].values()}) == 1  # one token at every step
    assert len({logits["reference"][0]["id"] for logits in result["logits"].values()}) == 3


def states(result: dict) -> list[dict]:
    """The embedding and every layer's output, in step 0."""
    names = ("token_embd", "ffn_residual")
    return [op for op in result["ops"] if op["step"] == 0 and op["op"].endswith(names)]
