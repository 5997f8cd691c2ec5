"""What needs a device: the same bits, the same findings as on the host."""

from pathlib import Path

import pytest
import torch
from conftest import TOKENS, Models

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.numerics.roundings import rounding_named
from tracediff.pipeline import Effort, check_trace

cuda = pytest.mark.cuda
ROUNDINGS = (
    "tf32",
    "f16",
    "bf16",
    "q8_0",
    "q8_1",
    "q8_K",
    "int8/32",
    "int8/row",
    "truncated int8/64",
    "uint8/64",
    "fp8/128",
    "fp8/128x128",
    "fp8/tensor",
    "uint7/tensor",
)


@cuda
@pytest.mark.parametrize("name", ROUNDINGS)
def test_roundings_are_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1024) * 10 ** torch.empty(64, 1).uniform_(-15, 15)
    rounding = rounding_named(name)
    for of in (rounding, rounding.step, rounding.flips):
        torch.testing.assert_close(of(x), of(x.cuda()).cpu(), rtol=0, atol=0, equal_nan=True)


@cuda
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_replay_there_finds_what_it_finds_here(dtype: str, models: Models, tmp_path: Path) -> None:
    options = TorchOptions(dtype=dtype, device="cuda", faults=("rope_pairing@1",))
    out = trace_torch(models("llama"), tmp_path / "out.trace", options, TOKENS, 1)
    here, there = (check_trace(out, models("llama"), effort=Effort(device=device)) for device in ("cpu", "cuda"))
    assert [f.text for f in here.findings] == [f.text for f in there.findings] != []


@cuda
def test_workers_share_a_device(models: Models, tmp_path: Path) -> None:
    out = trace_torch(models("llama"), tmp_path / "out.trace", TorchOptions(device="cuda"), TOKENS)
    assert check_trace(out, models("llama"), effort=Effort(2, device="cuda")).verdict == "match"


@pytest.mark.parametrize("plan", [[], ["--plan"]])
def test_a_device_that_is_not_there_is_refused_in_words(
    plan: list[str],
    tiny_trace: Path,
    refused,  # type: ignore[no-untyped-def]
    models: Models,
) -> None:
    said = refused("check", tiny_trace, "--model", models("tiny"), "--device", "cuda:99", *plan)
    assert "--device cuda:99: CUDA devices that this torch sees" in said


@pytest.fixture
def tiny_trace(models: Models, tmp_path: Path) -> Path:
    return trace_torch(models("tiny"), tmp_path / "tiny.trace", TorchOptions(), TOKENS[:3])
