"""The bundle, opened where there is no model: it says what it holds, and holds what it says."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from conftest import TOKENS, Models
from json_schema import valid

from tracediff.trace.reader import Trace

Cli = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent
CASE = ROOT / "traces" / "three-faults"
SCHEMA = json.loads((ROOT / "docs/result.schema.json").read_text())
COMMAND = ("bundle", CASE / "candidate.trace", "--model", CASE / "model.gguf", "-o")


def opened(archive: Path, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)
    return folder / "tracediff"


def test_it_says_what_it_holds_before_it_writes(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "issue.zip"
    code, _, said = cli(*COMMAND, out, "--dry-run")
    assert code == 0
    assert not out.exists()
    assert "  7 tokens: 256, 72, 101, 108, 108, 111, 206\n" in said
    assert "  5 weights by name and statistics, none by value: blk.0.attn_norm.weight, " in said
    assert "  values of blk.0.attn_v in step 0, blk.0.attn_norm in step 0, blk.0.ffn_act in step 0, " in said
    code, _, again = cli(*COMMAND, out)
    assert again == f"{said}wrote {out}\n"
    for line in said.splitlines()[1:]:
        assert line.strip() in (opened(out, tmp_path) / "README.txt").read_text()


def test_it_is_the_same_bytes_twice_and_replaces_its_own_alone(cli: Cli, tmp_path: Path) -> None:
    out, other = tmp_path / "a.zip", tmp_path / "b.zip"
    assert [cli(*COMMAND, path)[0] for path in (out, other, out)] == [0, 0, 0]
    assert out.read_bytes() == other.read_bytes()
    with zipfile.ZipFile(out, "w") as foreign:
        foreign.writestr("theirs.txt", "theirs")
    before = out.read_bytes()
    code, _, said = cli(*COMMAND, out)
    assert (code, out.read_bytes()) == (2, before)
    assert "is not what tracediff writes there" in said


def test_it_opens_without_the_model(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli(*COMMAND, tmp_path / "issue.zip", "--reference", CASE / "reference.trace")[0] == 0
    folder = opened(tmp_path / "issue.zip", tmp_path / "elsewhere")
    monkeypatch.chdir(folder)
    result = json.loads(Path("result.json").read_text())
    assert valid(SCHEMA, result, closed=True)
    assert [one["mistake"] for one in result["findings"]] == ["weight_transposed", "act_gelu", "attention_scale"]
    assert cli("validate", "reduced.trace")[0] == 0
    code, listed, _ = cli("inspect", "reduced.trace")
    assert code == 0
    assert "blk.0.attn_v" in listed
    whole, reduced = Trace(CASE / "candidate.trace"), Trace(Path("reduced.trace"))
    assert [*reduced.ops] == [*whole.ops]
    held = {key for key, record in reduced.ops.items() if record.has_data}
    assert {name for _, name in held} == {
        "blk.0.attn_v", "blk.0.attn_norm", "blk.0.ffn_act", "blk.0.ffn_gate", "blk.0.ffn_up", "blk.1.attn_probs",
        "blk.1.attn_scores",
    }  # fmt: skip
    for key in held:
        assert (reduced.values(reduced.ops[key]) == whole.values(whole.ops[key])).all()
    assert versions_in(folder)["tracediff"] == "0.1.0"
    if CHROMIUM:
        with Browser(tmp_path) as browser:
            browser.open(folder / "page.html")
            assert browser.run("document.querySelector('[data-op=\"blk.0.attn_v\"]').title").startswith(
                "blk.0.attn_v: faulty"
            )


def versions_in(folder: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in (folder / "versions.txt").read_text().splitlines() if ":" not in line)


@pytest.mark.slow
def test_who_has_the_model_finds_the_same_also_in_a_decode_step(
    cli: Cli, models: Models, torch_trace: Callable[..., Path], tmp_path: Path
) -> None:
    """Of a decode step's attention the keys and values of earlier steps are packed as well."""
    trace = torch_trace(
        models("tiny"), tokens=TOKENS[:5], n_decode=2, faults=("cached_k_rotated_again@1", "rope_theta@0")
    )
    whole = result_of(cli, trace, models("tiny"), tmp_path)
    assert cli("bundle", trace, "--model", models("tiny"), "-o", tmp_path / "issue.zip")[0] == 0
    reduced = opened(tmp_path / "issue.zip", tmp_path) / "reduced.trace"
    again = result_of(cli, reduced, models("tiny"), tmp_path)
    assert whole["findings"]
    assert [one["mistake"] for one in again["findings"]] == [one["mistake"] for one in whole["findings"]]
    assert [one["ops"] for one in again["findings"]] == [one["ops"] for one in whole["findings"]]
    held = {key for key, record in Trace(reduced).ops.items() if record.has_data}
    assert held >= {(0, "blk.0.attn_q_rope"), (0, "blk.0.attn_k_rope")}
    assert held >= {(1, "blk.1.attn_scores"), (1, "blk.1.attn_k_rope"), (0, "blk.1.attn_k_rope")}


def result_of(cli: Cli, trace: Path, model: Path, folder: Path) -> dict:
    assert cli("check", trace, "--model", model, "--json", folder / "result.json")[0] == 1
    return json.loads((folder / "result.json").read_text())
