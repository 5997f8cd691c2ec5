"""Tokens that are fed and not chosen: the same in every engine, alone and in a batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Models

from tracediff.trace.reader import Trace

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("engine", ["torch", "llama.cpp", "transformers"])
def test_every_engine_takes_them(engine: str, models: Models, tmp_path: Path, cli: Cli) -> None:
    """Then it goes on by its own choice."""
    model, out = models("qwen2", "F16"), tmp_path / "out.trace"
    given = ("--engine", engine, "--tokens", "5,6,7", "--decode-tokens", "8,9", "--decode", 1, "-o", out)
    code, _, error = cli("trace", model, *given)
    assert code == 0, error
    steps = [(step.tokens, step.positions) for step in Trace(out).steps.values()]
    assert steps[:3] == [((5, 6, 7), (0, 1, 2)), ((8,), (3,)), ((9,), (4,))]
    assert [positions for _, positions in steps[3:]] == [(5,)]
    assert cli("check", out, "--model", model)[0] == 0


def test_transformers_pads_a_batch(models: Models, tmp_path: Path, cli: Cli) -> None:
    """One sequence ends before the other. Each computes what it does in the torch engine's batch."""
    model, ours, theirs = models("qwen2", "F16"), tmp_path / "ours.trace", tmp_path / "theirs.trace"
    fed = ("--tokens", "5,6,7", "--tokens", "9,8", "--decode-tokens", "1,2", "--decode-tokens", "3")
    assert cli("trace", model, *fed, "-o", ours)[0] == 0
    code, _, error = cli("trace", model, *fed, "--engine", "transformers", "-o", theirs)
    assert code == 0, error
    assert Trace(theirs).steps == Trace(ours).steps
    assert cli("compare", ours, theirs, "--model", model)[0] == 0


def test_a_batch_and_those_of_another_trace(models: Models, tmp_path: Path, cli: Cli) -> None:
    model, out, again = models("qwen2", "F16"), tmp_path / "a.trace", tmp_path / "b.trace"
    assert cli("trace", model, "--tokens", "5,6,7", "--tokens", "9,8", "--decode", 2, "-o", out)[0] == 0
    chosen = [[step.tokens[0] for step in Trace(out).steps.values() if step.sequence == k][1:] for k in (0, 1)]
    prompts = ("--tokens", "9,8", "--tokens", "5,6,7")
    assert cli("trace", model, *prompts, "--decode-tokens", out, "-o", again)[0] == 0
    forced = [[step.tokens[0] for step in Trace(again).steps.values() if step.sequence == k][1:] for k in (0, 1)]
    assert forced == chosen
    code, _, error = cli("trace", model, *prompts, "--decode-tokens", "1,2", "-o", again)
    assert (code, "for 1 prompts, where there are 2" in error) == (2, True)


def test_how_two_sides_part_over_many_steps(models: Models, tmp_path: Path, cli: Cli) -> None:
    """Both are fed the same tokens; one has its cache wrong from the first decode step on."""
    model, a, b = models("qwen2", "F32"), tmp_path / "a.trace", tmp_path / "b.trace"
    fed = ("--tokens", "5,6,7", "--decode-tokens", ",".join(map(str, range(20, 32))))
    assert cli("trace", model, *fed, "-o", a)[0] == 0
    assert cli("trace", model, *fed, "--fault", "cache_ignored@1", "-o", b)[0] == 0
    report = " ".join(cli("compare", a, b)[1].split())
    assert "Over 13 steps the logits' NMSE goes from 0 to " in report
    assert "The first other token is chosen after step" in report
    assert "Every step chooses the same token." in " ".join(cli("compare", a, a)[1].split())
