"""Experts whose scores lie closer to one another than an engine's noise: it may take either."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from conftest import trace_graph

from tracediff.engine.recorder import TensorWriter
from tracediff.english import count
from tracediff.findings.arithmetic import arithmetic
from tracediff.model.model import Model
from tracediff.numerics.kinds.reduction import top_k
from tracediff.pipeline import Effort, check_trace
from tracediff.replay.ties import exchanges
from tracediff.result import OpResult

TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12)

Tiny = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class OtherWay:
    """The last that is taken and the first that is not change places where their scores are as near as this."""

    gap: float

    def __call__(self, scores: torch.Tensor, *, k: int) -> torch.Tensor:
        taken, more = top_k(scores, k=k), top_k(scores, k=k + 1)
        ranked = scores.gather(-1, more.long())
        near = ranked[..., k - 1] - ranked[..., k] < self.gap
        taken[..., -1] = torch.where(near, more[..., k], taken[..., -1])
        return taken


class AsFloat32(TensorWriter):
    """Writes what an engine in half precision made as who calls `.float()` first."""

    def op(self, step: int, name: str, values: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        super().op(step, name, values.float(), hidden)


def checked(path: Path, out: Path, gap: float, dtype: torch.dtype) -> tuple[str, list[OpResult], list[str]]:
    """The verdict of the hidden states of an engine whose ties go the other way, what ends a layer, and what is said of
    its arithmetic.
    """
    model = Model(path)
    wrong = [replace(op, function=OtherWay(gap)) for op in model.graph if op.name.endswith("ffn_moe_topk")]
    trace = trace_graph(
        model.graph.changed(*wrong), model.file, out, TOKENS, (5,), capture="layers", dtype=dtype, writer_of=AsFloat32
    )
    result = check_trace(trace, path, effort=Effort(seconds=0))
    layers = [op for op in result.ops if op.op.endswith("ffn_residual")]
    return result.verdict, layers, [said.text for said in arithmetic(result)]


@pytest.mark.parametrize(("arch", "gap"), [("qwen3moe", 0.01), pytest.param("deepseek2", 0.02, marks=pytest.mark.slow)])
def test_a_tie_may_go_either_way(tiny: Tiny, tmp_path: Path, arch: str, gap: float) -> None:
    verdict, layers, said = checked(tiny(arch), tmp_path / "x.trace", gap, torch.bfloat16)
    n_ties = sum(op.local.ties for op in layers if op.local)
    assert verdict == "match"
    assert n_ties > 0
    assert any(f"{count(n_ties, 'token')} took another expert than exact scores say" in text for text in said)


@pytest.mark.slow
def test_what_noise_does_not_explain_is_no_tie(tiny: Tiny, tmp_path: Path) -> None:
    verdict, layers, _ = checked(tiny("qwen3moe"), tmp_path / "x.trace", 0.01, torch.float32)
    assert verdict == "diverged"
    assert any(op.status == "faulty" for op in layers)


def test_one_pair_of_a_token_changes_places_the_closest_first() -> None:
    scores = torch.tensor([[[5.0, 4.0, 1.0], [3.0, 9.0, 2.5]], [[1.0, 2.0, 3.0], [4.0, 4.5, 6.0]]])  # two groups each
    taken = torch.tensor([[[0], [1]], [[2], [2]]])
    found: Sequence[tuple[torch.Tensor, torch.Tensor]] = [*exchanges(scores, taken)]
    assert [gap.tolist() for _, gap in found] == [[1.0, 1.0], [4.0, 1.5], [6.0, 2.0], [6.5, 2.0]]
    assert [other.flatten(1).tolist() for other, _ in found] == [
        [[1, 1], [1, 2]],
        [[2, 1], [2, 1]],
        [[0, 0], [0, 2]],
        [[0, 2], [2, 0]],
    ]


@pytest.mark.slow
def test_what_is_held_in_half_precision_is_so_in_any_type_that_it_is_written_as(tiny: Tiny, tmp_path: Path) -> None:
    model = Model(tiny("olmo2"))
    floors = []
    for name, writer in (("half", TensorWriter), ("float", AsFloat32)):
        trace = trace_graph(
            model.graph, model.file, tmp_path / f"{name}.trace", TOKENS, (5,),
            capture="layers", dtype=torch.bfloat16, writer_of=writer,
        )  # fmt: skip
        result = check_trace(trace, model.path)
        floors.append([op.local.floor for op in result.ops if op.local and len(op.local.segment) > 1])
    assert floors[0] == floors[1] != []
