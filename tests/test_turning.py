"""Roundings that noise may turn: all of those, and hardly any other; and what a floor is where none may."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Models, some_of
from test_mistakes import traced

from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.names import split
from tracediff.numerics.kinds.linear import linear
from tracediff.numerics.roundings import rounding_named
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import check_trace
from tracediff.replay.turning import Turning, turns

PART = 0.125**0.5  # of a turn: in a sample an eighth of its energy
COARSE = {"token_embd", "ffn_residual", "output"}
# Where numbers are cut instead of rounded the largest of each block lies on a boundary: that shows in few samples.
ROUNDINGS = (
    "q8_0",
    "q8_1",
    "q8_K",
    "f16",
    "bf16",
    "int8/32",
    "uint8/row",
    "fp8/32",
    "int4/32",
    "int8/tensor",
    "uint8/tensor",
)


def values(seed: int) -> torch.Tensor:
    """Rows as an engine has them: one channel is far larger than the others."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[:, 7] *= 30
    return x


def noise(x: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_what_noise_turns_is_known_before(name: str) -> None:
    """Of 400 engines with other noise: each value that rounds otherwise in one of them may turn, and few others may."""
    x, rounding = values(1), rounding_named(name)
    sigma = 1e-3 * rounding.step(x).median()
    here, change = turns(x, x + sigma * noise(x, 0), name)
    assert torch.equal(here, rounding(x.float()))
    may_turn, seen = change != 0, torch.zeros(x.shape, dtype=torch.bool)
    for seed in range(1, 401):
        apart = (rounding(x + sigma * noise(x, seed)) - here).abs()
        seen |= apart > 0.05 * rounding.step(x)  # a scale that follows the largest value moves all by less
    assert seen.any(1).sum() > 4
    assert (seen & ~may_turn).sum() <= 0.02 * seen.sum()  # where noise is as large as a step samples show it
    assert (change.abs() > 0.05 * PART * rounding.step(x)).sum() < 12 * seen.sum()


def test_a_value_next_to_a_boundary_turns_and_no_other() -> None:
    x = torch.arange(32.0, dtype=torch.float64)[None] + 0.2
    x[0, 31], x[0, 5] = 127.0, 5.5 - 1e-6  # a scale of 1
    here, change = turns(x, x + 1e-6, "q8_0")
    assert here[0, :6].tolist() == [0, 1, 2, 3, 4, 5]
    assert change.nonzero().tolist() == [[0, 5]]
    assert float(change[0, 5]) == pytest.approx(PART)


def test_a_scale_next_to_a_boundary_moves_its_block() -> None:
    """Half way between two float16: every value of the block follows, and none of the next."""
    scale = 1 + 2.0**-11
    x = torch.cat((torch.arange(32.0) * 4, torch.arange(32.0)))[None].double() * scale
    x[0, 31], x[0, 63] = 127 * scale * (1 - 1e-9), 127.0
    _, change = turns(x, x + 1e-6, "q8_0")
    moved = change[0].nonzero().flatten().tolist()
    assert moved
    assert max(moved) < 32
    torch.testing.assert_close(change[0, 31].abs(), torch.tensor(127 * 2.0**-10 * PART))


def test_without_noise_nothing_turns() -> None:
    x = values(2).round()
    for name in ROUNDINGS:
        assert not turns(x, x, name)[1].any()


def test_of_many_each_turns_by_a_part() -> None:
    """As much as an eighth of eight do, be it noise as large as a step."""
    x = values(3)
    _, change = turns(x, x + 0.3, "int8/row")
    step = rounding_named("int8/row").step(x)
    assert ((change / step).square().sum(1) < 1.1).all()


def test_samples_are_turned_where_the_inputs_lie_on_a_boundary() -> None:
    x = torch.full((1, 32), 3.2, dtype=torch.float64)
    x[0, 0], x[0, 1] = 127.0, 3.5 - 1e-6
    turning = Turning()
    assert turning.exact(x, "q8_0")[0, 1] == 3
    for _ in range(2):
        rounded = turning.sample()
        assert torch.equal(rounded(x, "f64"), x)
        assert rounded(x + 2e-6, "q8_0")[0, :3].tolist() == [127, 4, 3]


def test_hidden_states_of_8_bit_blocks_see_what_no_rounding_makes(models: Models, tmp_path: Path) -> None:
    """A factor of 1 + 1e-4 in one matmul of 21: that is NMSE 1e-9 and less, and a turned rounding 1e-6."""
    model = models("k-quants", "Q4_K_M")
    file = GGUFFile(model)
    graph = build_graph(file)
    wrong = replace(graph["blk.1.ffn_down"], function=lambda *of: linear(*of) * (1 + 1e-4))
    for name, changed, verdict in (("right", [], "match"), ("wrong", [wrong], "diverged")):
        scheme = scheme_named("llama.cpp")
        path = traced(graph.changed(*changed), file, tmp_path / f"{name}.trace", scheme=scheme)
        hidden = some_of(path, tmp_path / f"{name}-hidden.trace", lambda op: split(op)[1] in COARSE)
        result = check_trace(hidden, model)
        assert result.verdict == verdict
        assert {op.op for op in result.faulty} <= {"blk.1.ffn_residual"}
