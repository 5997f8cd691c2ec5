"""Mistakes in ops that read parts of values, in experts' matmuls, in choices, and behind states that steps hand on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tiny_models
import torch
from conftest import trace_graph

from tracediff.diagnose.rearranged import Reread
from tracediff.model.graph import Graph, Op
from tracediff.model.model import Model
from tracediff.pipeline import check_trace

TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12)

Tiny = Callable[[str], Path]
Edit = Callable[[Graph], Sequence[Op]]


@dataclass(frozen=True, slots=True)
class FirstExpert(Reread):
    """The expert of a token's first slot multiplies in all of them."""

    def read(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        x, ids = inputs
        return [x, ids[..., :1].expand_as(ids)]


@dataclass(frozen=True, slots=True)
class Early(Reread):
    """The state that a step leaves ends one token too early."""

    def read(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0].roll(1, -1)]


def named(graph: Graph, name: str) -> list[Op]:
    return [op for op in graph if op.name.split(".", 2)[-1] == name]


def gated(graph: Graph) -> list[Op]:
    of_conv = torch.nn.functional.silu
    return [replace(op, function=lambda c, x: of_conv(c) * x) for op in named(graph, "shortconv.in_proj.mul#2")]


def squared(graph: Graph) -> list[Op]:
    norms = named(graph, "ffn_moe_weights_norm")
    return [replace(op, function=lambda weights, total: (weights / total).square()) for op in norms]


def shared_reads_routed(graph: Graph) -> list[Op]:
    ops = [*named(graph, "ffn_gate_shexp"), *named(graph, "ffn_up_shexp")]
    return [replace(op, inputs=(op.name.rsplit(".", 1)[0] + ".ffn_moe_out",)) for op in ops]


def first_expert(graph: Graph) -> list[Op]:
    return [replace(op, rework=FirstExpert()) for op in named(graph, "ffn_down_exps")]


def findings(model: Model, out: Path, edit: Edit, capture: str) -> list[str]:
    graph = model.graph.changed(*edit(model.graph))
    path = trace_graph(graph, model.file, out, TOKENS, (97,), (110,), capture=capture)  # type: ignore[arg-type]
    return [finding.text for finding in check_trace(path, model.path).findings]


@pytest.mark.parametrize(
    ("arch", "edit", "capture", "text"),
    [
        ("lfm2", gated, "layers", "layer 1 (seen in ffn_residual): shortconv.in_proj.mul#2: every value of channels 96 "
         "to 191 of shortconv.in_proj is silu of what it should be."),
        ("qwen3moe", squared, "layers", "both layers (seen in ffn_residual): ffn_moe_weights_norm: every value is the "
         "square of what it should be."),
        ("deepseek2", shared_reads_routed, "layers", "layer 1 (seen in ffn_residual): ffn_gate_shexp, ffn_up_shexp: "
         "reads ffn_moe_out where ffn_norm belongs."),
        ("qwen3moe", first_expert, "all", "ffn_down_exps in both layers: slot s reads slot 0 of ffn_moe_topk, where s "
         "belongs."),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_what_nobody_listed_is_solved_for(
    arch: str, edit: Edit, capture: str, text: str, tiny: Tiny, tmp_path: Path
) -> None:
    assert findings(Model(tiny(arch)), tmp_path / "mine.trace", edit, capture) == [text]


def test_no_step_alone_has_what_it_is_handed_by_others(tiny: Tiny, tmp_path: Path) -> None:
    """With a state that ends a token early, one step looked as if its projections read the row before, which the step
    before, that is right, had not.
    """

    def early(graph: Graph) -> list[Op]:
        return [replace(op, rework=Early()) for op in named(graph, "conv_state_next")]

    said = findings(Model(tiny("lfm2")), tmp_path / "mine.trace", early, "layers")
    assert said
    assert all("no known mistake explains it" in text for text in said), said


def test_numbers_that_differ_from_step_to_step_are_no_window(tiny: Tiny, tmp_path: Path) -> None:
    """Key 0 is hidden in decode steps: a window of 12 would do so in the first of them, one of 13 in the second."""

    def hidden(x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, *, scale: float, **_: int) -> torch.Tensor:
        visible = keys[None, :] <= positions[:, None]
        if len(positions) == 1:
            visible = visible & (keys[None, :] > 0)
        return torch.softmax((x * scale).masked_fill(~visible, float("-inf")), -1)

    def edit(graph: Graph) -> list[Op]:
        return [replace(op, function=hidden) for op in named(graph, "attn_probs")]

    said = findings(Model(tiny("lfm2")), tmp_path / "mine.trace", edit, "all")
    assert said
    assert not any("a window of" in text for text in said), said


def test_an_infinite_value_that_is_passed_on_counts(tmp_path: Path) -> None:
    """The scores of groups that are not chosen are -inf: an engine that lets them through was undecided."""

    def no_groups(graph: Graph) -> list[Op]:
        ops = [op for op in graph if op.kind == "set_rows" and "probs" in op.name]
        return [replace(op, function=lambda rows, ids, into: torch.zeros_like(into)) for op in ops]

    grouped = {"expert_count": 8, "expert_used_count": 3, "expert_group_count": 4, "expert_group_used_count": 2}
    model = Model(tiny_models.write("deepseek2", tmp_path / "grouped.gguf", others=grouped))
    right = trace_graph(model.graph, model.file, tmp_path / "right.trace", TOKENS, (97,))
    assert (
        check_trace(right, model.path).verdict == "match"
    )  # what is filled with -inf holds nothing else, and is right
    said = findings(model, tmp_path / "mine.trace", no_groups, "all")
    assert len(said) == 1
    assert "set_rows" in said[0]
    assert "values that should be infinite are numbers" in said[0]
