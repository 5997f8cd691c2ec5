"""tracediff self --engine: an engine is run in each way that must make no difference, and held against itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Models

from tracediff.engine.torch_run import TorchOptions
from tracediff.itself.every_way import engine_of, hold, ways
from tracediff.model.model import Model

Cli = Callable[..., tuple[int, str, str]]
ALONE = ["run twice", "prefill against decode", "whole against chunks", "causality"]
BATCHED = [f"alone against row {row} of a batch" for row in (0, 1)]


def verdicts(cli: Cli, *given: object) -> tuple[int, dict[str, tuple[str, str | None]]]:
    code, text, error = cli("self", *given, "--json", "-")
    assert text, error
    ways = json.loads(text)["ways"]
    return code, {
        name: (one["verdict"], (one["first_divergence"] or {}).get("op")) for name, one in ways.items()
    }  # fmt: skip


@pytest.mark.parametrize("engine", ["torch", "transformers", "llama.cpp"])
def test_honest_engines(engine: str, models: Models, cli: Cli) -> None:
    code, found = verdicts(cli, models("llama", "F16"), "--engine", engine, "--tokens", "5,6,7,8,9,10")
    assert code == 0
    assert found == dict.fromkeys([*ALONE, *BATCHED], ("match", None))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_forty_eight_clean_pairs_raise_no_alarm(dtype: Any, models: Models, tmp_path: Path) -> None:
    """By drift alone, which is what roundings make of other passes: in bfloat16 some 1e-4."""
    for arch, weights in (("llama", "F16"), ("qwen2", "F32"), ("qwen3", "Q8_0"), ("qwen2", "Q4_0")):
        model = Model(models(arch, weights))
        run, _ = engine_of("torch", model, TorchOptions(dtype=dtype))
        tokens = (5, 6, 7, 8, 9, 10, 11)
        found = {name: one.verdict for name, one in hold(run, ways(tokens), tokens, tmp_path, model=None)}
        assert found == dict.fromkeys((*ALONE, *BATCHED), "match"), (arch, weights)


def test_a_mistake_shows_in_its_ways_alone(models: Models, cli: Cli) -> None:
    """Keys of passes before are not looked at: where all tokens come at once nothing is wrong."""
    given = (models("qwen2", "F32"), "--engine", "torch", "--tokens", "5,6,7,8,9,10", "--fault", "cache_ignored@1")
    code, found = verdicts(cli, *given)
    assert code == 1
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        name: "match" if name in ("run twice", "causality") else "diverged" for name in (*ALONE, *BATCHED)
    }
    assert {op for _, op in found.values()} == {None, "blk.1.attn_probs"}
    code, report, _ = cli("self", *given)
    assert code == 1
    assert "prefill against decode" in report
    assert "cached positions are not attended to" in " ".join(report.split())


def test_what_is_asked_of_it(models: Models, tmp_path: Path, cli: Cli) -> None:
    model = models("qwen2", "F32")
    assert "give 4 or more" in cli("self", model, "--engine", "torch", "--tokens", "1,2,3")[2]
    assert (
        "Give a trace of each, or of several ranks those of all; or a GGUF file with --engine" in cli("self", model)[2]
    )
