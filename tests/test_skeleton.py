"""What `inspect MODEL --skeleton` tells an engine author: enough to write a trace without writing JSON."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import TOKENS, Models

from tracediff.inspect.formulas import formula
from tracediff.model.families import load_graph
from tracediff.trace.reader import Trace

Cli = Callable[..., tuple[int, str, str]]

COMMENTS = """\
// qwen2: once, each norm weight as held in memory; then of each forward pass, in this order
// (T: its tokens, S: positions visible so far):
// token_embd               [T, 48]          embedding rows; token_embd.weight
// for N from 0 to 1:
// blk.N.attn_norm          [T, 48]          RMS norm of the layer's input, times weight; blk.N.attn_norm.weight
// blk.N.attn_q             [T, 6, 8]        Q projection, with its bias; blk.N.attn_q.weight, blk.N.attn_q.bias
// blk.N.attn_k             [T, 2, 8]        K projection, with its bias; blk.N.attn_k.weight, blk.N.attn_k.bias
// blk.N.attn_v             [T, 2, 8]        V projection, with its bias; blk.N.attn_v.weight, blk.N.attn_v.bias
// blk.N.attn_q_rope        [T, 6, 8]        Q after rotary embedding
// blk.N.attn_k_rope        [T, 2, 8]        K after rotary embedding
// blk.N.attn_scores        [6, T, S]        q.k, before scale and mask
// blk.N.attn_probs         [6, T, S]        softmax of scaled, masked scores
// blk.N.attn_kqv           [T, 48]          probs times V, heads side by side
// blk.N.attn_output        [T, 48]          attention's output projection; blk.N.attn_output.weight
// blk.N.attn_residual      [T, 48]          attn_output + the layer's input
// blk.N.ffn_norm           [T, 48]          RMS norm of attn_residual, times weight; blk.N.ffn_norm.weight
// blk.N.ffn_gate           [T, 64]          gate projection; blk.N.ffn_gate.weight
// blk.N.ffn_up             [T, 64]          up projection; blk.N.ffn_up.weight
// blk.N.ffn_act            [T, 64]          silu(ffn_gate) * ffn_up
// blk.N.ffn_down           [T, 48]          down projection; blk.N.ffn_down.weight
// blk.N.ffn_residual       [T, 48]          ffn_down + attn_residual: the layer's output
// output_norm              [T, 48]          RMS norm of ffn_residual, times weight; output_norm.weight
// output                   [T, 320]         logits; output.weight
"""


def test_comments(models: Models, cli: Cli) -> None:
    code, output, error = cli("inspect", models("tiny"), "--skeleton")
    assert (code, error) == (0, "")
    assert output == COMMENTS


@pytest.mark.parametrize(
    ("arch", "op", "said"),
    [
        ("gemma3", "attn_norm", "RMS norm of the layer's input, times weight"),
        ("gemma3", "attn_q_norm", "RMS norm of attn_q, each head by itself, times weight"),
        ("gemma3", "attn_q_rope.scale", "attn_q_rope * 0.25"),
        ("gemma3", "attn_scores_scaled", "q.k times scale, before the mask"),
        ("gemma3", "attn_residual", "post_attention_norm + the layer's input"),
        ("gemma3", "ffn_act", "gelu_tanh(ffn_gate) * ffn_up"),
        ("olmo2", "attn_q_norm", "RMS norm of attn_q, times weight"),  # all heads at once
        ("cohere2", "ffn_down.add", "ffn_down + the layer's input"),  # parallel to attention
        ("phi3", "ffn_up", "gate and up projections, side by side"),
        ("phi3", "ffn_act", "silu(channels 0 to 159 of ffn_up) * channels 160 to 319 of ffn_up"),
        ("deepseek2", "q_pe", "channels 24 to 39 of each head of attn_q_b after rotary embedding"),
        ("deepseek2", "attn_kv_a_norm", "RMS norm of channels 0 to 63 of attn_kv_a_mqa, times weight"),
        ("deepseek2", "attn_k_rope", "attn_kv_a_norm, then k_pe"),
        ("qwen3moe", "ffn_moe_topk", "places of the 3 largest of ffn_moe_probs, largest first"),
        ("qwen3moe", "ffn_moe_out", "ffn_moe_weighted.add + slot 2 of ffn_moe_weighted"),
    ],
)
def test_an_op_is_said_by_what_it_is_made_of(arch: str, op: str, said: str, tiny: Callable[[str], Path]) -> None:
    """Names alone do not say it: ffn_act is a SiLU in one model and a GELU in another."""
    graph = load_graph(tiny(arch))
    assert formula(graph[f"blk.1.{op}"], graph).removesuffix(", with its bias") == said


def test_a_skeleton_with_values_is_a_trace(
    models: Models, torch_trace: Callable[..., Path], cli: Cli, tmp_path: Path
) -> None:
    """An engine that only writes floats, one op after the other, has its trace."""
    model = models("qwen3")
    code, output, error = cli("inspect", model, "--skeleton", "--tokens", len(TOKENS))
    assert (code, error) == (0, "")
    (tmp_path / "mine.trace").write_text(
        output.replace("NAME.bin", "mine.bin").replace(str([0] * len(TOKENS)).replace(" ", ""), str([*TOKENS]))
    )
    source = Trace(torch_trace(model, n_decode=0))
    with (tmp_path / "mine.bin").open("wb") as data:
        for record in (*source.weights.values(), *source.ops.values()):
            data.write(source.values(record).astype("<f4").tobytes())
    trace = Trace(tmp_path / "mine.trace")
    assert trace.cut is None
    assert [op for _, op in trace.ops] == [op.name for op in load_graph(model)]
    for a, b in zip(source.ops.values(), trace.ops.values(), strict=True):
        np.testing.assert_array_equal(source.values(a), trace.values(b), strict=True)
    assert cli("check", tmp_path / "mine.trace", "--model", model)[0] == 0


@pytest.mark.parametrize("arguments", [("--tokens", "3"), ("--skeleton",)])
def test_what_has_no_skeleton(
    arguments: tuple[str, ...], models: Models, torch_trace: Callable[..., Path], refused: Callable[..., str]
) -> None:
    what = models("tiny") if "--tokens" in arguments else torch_trace(models("tiny"))
    message = refused("inspect", what, *arguments)
    assert message.startswith(("--tokens N belongs to --skeleton: give that as well. ", "--skeleton is of a model. "))
    assert message.endswith("tracediff inspect MODEL --skeleton --tokens N")
