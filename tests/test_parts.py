"""Mistakes in ops that read parts of values, in experts' matmuls, in choices, and behind states that steps hand on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tiny_models
import torch
from conftest import trace_graph

from tracediff.diagnose.rearranged import Reread
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.graph import Graph, Op
from tracediff.model.model import Model
from tracediff.numerics.evaluate import computed
from tracediff.numerics.kinds.attention import scores
from tracediff.numerics.kinds.kind import Call
from tracediff.pipeline import check_trace

TOKENS = (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12)

# Heads of Q, K and V alike, and a head that is rotated in part.
OTHERS = {"gptneox": {"attention.head_count_kv": 6}, "glm4": {"rope.dimension_count": 8}}

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
    """Every column that a step leaves is the one before its last."""

    def read(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0][..., :1].expand_as(inputs[0])]


@dataclass(frozen=True, slots=True)
class Activated:
    """An activation that the model has not, after an op for which no loops are written."""

    def compute(self, call: Call) -> torch.Tensor:
        return torch.nn.functional.silu(computed(replace(call.op, rework=None), call))


@dataclass(frozen=True, slots=True)
class ByHead(Reread):
    """Takes what has thirds of heads for heads of three parts: the part of the first `third`."""

    third: int

    def read(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        whole, *others = inputs
        parts = whole.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2)  # as if it had been written head by head
        n = parts.shape[1] // 3
        return [parts[:, self.third * n : (self.third + 1) * n], *others]


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


def activated(graph: Graph) -> list[Op]:
    return [replace(op, rework=Activated()) for op in named(graph, "shortconv.conv")]


def by_head(graph: Graph) -> list[Op]:
    found = list[Op]()
    for third, name in enumerate(("attn_q_rope", "attn_k_rope", "attn_v")):
        for op in named(graph, name):
            view = op.views[0]
            assert view
            whole = replace(view, shape=("T", 3 * view.shape[1], view.shape[2]), offset=0)  # type: ignore[operator]
            found.append(replace(op.seeing({0: whole}), rework=ByHead(third)))
    return found


def by_turns(graph: Graph) -> list[Op]:
    silu = torch.nn.functional.silu

    def function(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        both = torch.cat((gate, up), -1)
        return silu(both[..., ::2]) * both[..., 1::2]

    return [replace(op, function=function) for op in named(graph, "ffn_act")]


def queries_reshaped(graph: Graph) -> list[Op]:
    def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        n_tokens, n_heads, width = q.shape
        return scores(q.reshape(n_heads, n_tokens, width).swapaxes(0, 1), k)

    return [replace(op, function=function) for op in named(graph, "attn_scores")]


def last_channels(graph: Graph) -> list[Op]:
    ops = [*named(graph, "attn_q_rope"), *named(graph, "attn_k_rope")]
    of = ops[0].attrs["rope"]
    return [op.with_attrs(rope=replace(of, first=op.axes[-1] - of.n_rot)) for op in ops]


def findings(model: Model, out: Path, edit: Edit, capture: str) -> list[str]:
    graph = model.graph.changed(*edit(model.graph))
    path = trace_graph(graph, model.file, out, TOKENS, (97,), (110,), capture=capture)  # type: ignore[arg-type]
    return [finding.text for finding in check_trace(path, model.path).findings]


@pytest.mark.parametrize(
    ("arch", "edit", "capture", "text"),
    [
        ("lfm2", gated, "layers", "layer 1 (seen in ffn_residual): shortconv.in_proj.mul#2: every value of channels 96 "
         "to 191 of shortconv.in_proj is silu of what it should be."),
        pytest.param("qwen3moe", squared, "layers", "both layers (seen in ffn_residual): ffn_moe_weights_norm: every "
                     "value is the square of what it should be.", marks=pytest.mark.slow),
        pytest.param("deepseek2", shared_reads_routed, "layers", "layer 1 (seen in ffn_residual): ffn_gate_shexp, "
                     "ffn_up_shexp: reads ffn_moe_out where ffn_norm belongs.", marks=pytest.mark.slow),
        ("lfm2", activated, "all", "shortconv.conv in layer 1: every value is silu of what it should be."),
        ("gptneox", by_head, "layers", "both layers (seen in ffn_residual): attn_q_rope, attn_k_rope, attn_v: attn_qkv "
         "is split in another order, as if each part had its heads side by side."),
        ("glm4", by_turns, "all", "ffn_act in both layers: gate and up are halves of one row, whose values are taken "
         "for theirs by turns."),
        ("glm4", last_channels, "all", "attn_q_rope and attn_k_rope in both layers: channels 8 to 15 of each head are "
         "rotated, where 0 to 7 are to be."),
        ("gpt2", queries_reshaped, "all", "attn_scores in both layers, in step 0: a part of attn_qkv lies as [tokens, "
         "heads, channels] and is read as [heads, tokens, channels]: a view as heads, without its transpose."),
        ("qwen3moe", first_expert, "all", "ffn_down_exps in both layers: slot s reads slot 0 of ffn_moe_topk, where s "
         "belongs."),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_what_nobody_listed_is_solved_for(
    arch: str, edit: Edit, capture: str, text: str, tiny: Tiny, tmp_path: Path
) -> None:
    others = OTHERS.get(arch)
    path = tiny_models.write(arch, tmp_path / "model.gguf", others=others) if others else tiny(arch)
    assert findings(Model(path), tmp_path / "mine.trace", edit, capture) == [text]


@pytest.mark.slow
def test_no_step_alone_has_what_it_is_handed_by_others(tiny: Tiny, tmp_path: Path) -> None:
    """With a state of one column alone, one step looked as if its projections read the row before, which the step
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


def test_three_parts_may_be_in_another_order_that_a_part_of_them_tells(tiny: Tiny, tmp_path: Path) -> None:
    """Of dt, B and C the first came last, which dt alone does not tell from the reverse order: it was called that, and
    what reads the two others as well, and then exchanged.
    """
    model = Model(tiny("mamba"))
    dt, scan = model.graph["blk.1.ssm_x.copy"], model.graph["blk.1.ssm_scan"]
    n_dt, n_state = dt.axes[1], scan.seen[3].shape[-1]
    starts = {0: 2 * n_state, n_dt: 0, n_dt + n_state: n_state}
    moved = []
    for op in (dt, scan):
        parts = [(at, view) for at, view in enumerate(op.seen) if view and op.inputs[at] == "blk.1.ssm_x"]
        moved.append(op.seeing({at: replace(view, offset=starts[int(view.offset)]) for at, view in parts}))
    path = trace_graph(model.graph.changed(*moved), model.file, tmp_path / "mine.trace", TOKENS, (97,))
    first, second = (finding.text for finding in check_trace(path, model).findings)
    assert (
        first
        == "ssm_x.copy in layer 1: ssm_x is split in another order: channels 80 to 87 are read where 0 to 7 belong."
    )
    assert "ssm_scan: ssm_x is split in another order, the first part last: channels 0 to 39 are read where" in second


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


def test_no_cause_rests_on_nan_being_nan(tiny: Tiny, tmp_path: Path) -> None:
    """Of sums over memory that was never written all are NaN: whatever reads past what it should makes as many."""

    model = Model(tiny("gemma3"))
    op = model.graph["blk.0.attn_kqv"]
    wrong = replace(op, function=lambda p, v: v.new_full((p.shape[1], op.axes[-1]), torch.nan))
    path = trace_graph(model.graph.changed(wrong), model.file, tmp_path / "mine.trace", TOKENS, (97,))
    result = check_trace(path, model)
    first = result.findings[0]
    assert first.mistake is None
    assert "values are NaN or Inf; all that it reads is finite" in first.text
    assert not any(finding.mistake for finding in result.findings)


def test_an_edit_of_a_region_reads_through_the_ops_views(tiny: Tiny, tmp_path: Path) -> None:
    """In a lifted graph the search ended in a bug."""
    options = TorchOptions(faults=("no_mask",), dtype="bf16")
    path = trace_torch(tiny("qwen3next"), tmp_path / "mine.trace", options, (177, 115, 100), 2)
    result = check_trace(path, tiny("qwen3next"))
    assert not [note for note in result.notes if "bug" in note]
    assert [finding.mistake for finding in result.findings] == ["no_mask"]
