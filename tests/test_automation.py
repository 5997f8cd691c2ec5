"""What others' machinery runs: the action's steps in a shell, the hooks, and the fixture that pytest finds."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from tracediff.model.model import Model
from tracediff.pytest_plugin import Record
from tracediff.pytest_plugin import record as record_fixture
from tracediff.testing import assert_trace
from tracediff.trace.reader import Trace

record = record_fixture

ROOT = Path(__file__).parent.parent
CASE = ROOT / "traces" / "rope-pairing"
HERE = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def step(folder: Path, arguments: str) -> tuple[int, str]:
    """The last step of action.yml as a runner does it, in the folder."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    *_, ci = action["runs"]["steps"]
    asked = {"ARGUMENTS": arguments, "RUNNER_TEMP": str(folder)}
    files = {name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", ci["run"]],
        cwd=folder, env={**HERE, **asked, **files}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    outputs = dict(line.split("=", 1) for line in (folder / "GITHUB_OUTPUT").read_text().splitlines())
    assert {*outputs} == {*action["outputs"]}
    return done.returncode, done.stdout


def test_the_action_fails_with_what_is_wrong(tmp_path: Path) -> None:
    for name in ("reference", "candidate"):  # of one case: its name is that of the trace
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(CASE / f"{name}.trace", folder / "prefill.trace")
        shutil.copy(CASE / f"{name}.bin", folder / f"{name}.bin")
    model = ["--model", str(CASE / "model.gguf")]
    command = [sys.executable, "-m", "tracediff", "ci", "reference/prefill.trace", *model, "--update"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    code, said = step(tmp_path, shlex.join(["candidate/prefill.trace", *model]))
    assert code == 1
    assert "::error " in said
    assert "rope pairs neighbouring channels" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    outputs = dict(line.split("=", 1) for line in (tmp_path / "GITHUB_OUTPUT").read_text().splitlines())
    assert json.loads(Path(outputs["json"]).read_text())["verdict"] == "diverged"
    assert json.loads(Path(outputs["sarif"]).read_text())["version"] == "2.1.0"


def test_hooks_run_commands_that_are_there() -> None:
    (ours,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [*ours["hooks"], *yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "mypy", "tracediff-ci"]
    for hook in hooks:
        command = shlex.split(hook["entry"])
        assert shutil.which(command[0], path=HERE["PATH"]), command
        shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True, env=HERE).stdout
        assert all(option in shown for option in command if option.startswith("--"))


def test_the_fixture_records_each_block_in_a_trace_of_its_own(record: Record) -> None:
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert import_module(plugins["tracediff"]).record is record_fixture
    path = CASE / "model.gguf"
    model = nn.Sequential(nn.Embedding.from_pretrained(torch.tensor(Model(path).tensors.get("token_embd.weight"))))
    traces = []
    for tokens in ([1, 2, 3], [4, 5]):
        with pytest.warns(UserWarning, match="left out"), record(model, gguf=path) as trace:
            model(torch.tensor(tokens))
        traces.append(trace)
    assert [Trace(trace).tokens for trace in traces] == [[1, 2, 3], [4, 5]]
    assert_trace(traces[0], path, require=["token_embd"])
    with pytest.raises(AssertionError, match="required"):
        assert_trace(traces[1], path, require=["attn_q"])
