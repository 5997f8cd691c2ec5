"""docs/result.schema.json: what every command writes with --json is as it says, and holds no key that it lacks."""

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from json_schema import valid

from tracediff.cli import app
from tracediff.pipeline import check_trace
from tracediff.report.json_report import document
from tracediff.result import Storage

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "docs/result.schema.json").read_text())
COMMANDS = {
    "check": (1, "check rope-pairing/candidate.trace --model rope-pairing/model.gguf"),
    "compare": (1, "compare three-faults/reference.trace three-faults/candidate.trace --model three-faults/model.gguf"),
    "match": (0, "compare clean/reference.trace clean/candidate.trace --model clean/model.gguf"),
    "drift": (1, "compare statistics/reference.trace statistics/candidate.trace"),
    "segments": (1, "check layers-only/candidate.trace --model layers-only/model.gguf"),
    "undecided": (2, "check statistics/reference.trace --model statistics/model.gguf"),
    "self": (0, "self clean/candidate.trace clean/candidate.trace --model clean/model.gguf"),
    "mismatch": (1, "mismatch clean/reference.trace rope-pairing/candidate.trace --model clean/model.gguf"),
    "three": (1, "compare clean/reference.trace clean/candidate.trace rope-pairing/candidate.trace"),
    "weights": (1, "weights statistics/model.gguf --trace statistics/candidate.trace"),
    "validate": (0, "validate clean/candidate.trace --model clean/model.gguf"),
    "run": (1, "run clean/model.gguf --tokens 1,2,3 --decode 1 --fault rope_pairing"),
    "ci": (0, "ci clean/candidate.trace --model clean/model.gguf --update --lock LOCK"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command(
    name: str, cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT / "traces")
    expected, command = COMMANDS[name]
    code, text, error = cli(*command.replace("LOCK", str(tmp_path / "a.lock")).split(), "--json", "-")
    assert code == expected, error
    written = json.loads(text)
    assert valid(SCHEMA, written)
    assert valid(SCHEMA, written, closed=True)
    for key in written:  # a schema that lets everything pass is none
        assert not valid(SCHEMA, written | {key: 1.5})


def test_no_command_is_left_out() -> None:
    """Each that takes --json; the demo's is that of `run`."""
    takes = {
        str(command.name)
        for command in app.registered_commands
        if command.callback and "json" in inspect.signature(command.callback).parameters
    }
    assert takes - {"demo"} == {command.split()[0] for _, command in COMMANDS.values()}


def test_what_the_commands_above_did_not_show() -> None:
    case = ROOT / "traces" / "clean"
    result = check_trace(case / "candidate.trace", case / "model.gguf")
    held = Storage("candidate", "bf16", ("ffn_residual",), ("add",), 2, 74, True, "f32", 1e-6)
    whole = json.loads(json.dumps(document(replace(result, storage=(held,))), default=plain))
    assert valid(SCHEMA["$defs"]["result"], whole, SCHEMA, closed=True)
    del whole["storage"][0]["told"]
    assert not valid(SCHEMA["$defs"]["result"], whole, SCHEMA)


@pytest.mark.parametrize("page", ["agents.md", "result.md"])
def test_what_documents_tell_to_run_runs(
    page: str, cli: Callable[..., tuple], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.S)
    case = ROOT / "traces" / "clean"
    monkeypatch.chdir(tmp_path)
    assert cli("check", case / "candidate.trace", "--model", case / "model.gguf", "--json", "result.json")[0] == 0
    exec(code, {})


def plain(value: object) -> object:
    import msgspec

    return msgspec.to_builtins(value)
