"""Mistakes that engines often make, each written here by other means than the bank of known mistakes has, and named."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_rules import FILES
from conftest import Models, some_of, trace_graph
from gguf import GGMLQuantizationType, GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES
from test_mistakes import traced
from torch import Tensor

from tracediff.diagnose.mistakes.blocks import BlockMistake, misread
from tracediff.diagnose.planting import plant
from tracediff.model.block_fields import FIELDS, EditedBlocks
from tracediff.model.families import build_graph, load_graph
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape, quantize, write_model
from tracediff.model.weights import reading, values_of
from tracediff.names import split
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.attention import scores, weighted_values
from tracediff.numerics.kinds.linear import mul_mat
from tracediff.numerics.kinds.norm import rms_norm
from tracediff.numerics.kinds.rope import Rope
from tracediff.numerics.kinds.rope import rope as turned
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import check_trace

TOKENS = (256, 84, 104, 101, 32, 300, 117, 105, 99, 107, 311, 98, 114, 111, 119, 110, 260, 102)
COARSE = {"token_embd", "ffn_residual", "output"}
Function = Callable[..., Tensor]


def attention(scale: float, visible: Callable[[Tensor, Tensor], Tensor], hide: Callable[[Tensor], Any]) -> Function:
    """A softmax in which what is not visible is what `hide` makes of it."""

    def function(scores: Tensor, queries: Tensor, keys: Tensor, **_: Any) -> Tensor:
        scaled, sees = scores * scale, visible(queries[:, None], keys[None, :])
        e = torch.exp(torch.where(sees, scaled, hide(scaled)))
        return e / e.sum(-1, keepdim=True)

    return function


def by_all_heads(x: Tensor, positions: Tensor, *, rope: Rope, **attrs: Any) -> Tensor:
    n = x.shape[1]
    return turned(x, positions, rope=replace(rope, theta=rope.theta ** (1 / n)), **attrs)


def causal(q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def over_a_padded_cache(slots: int) -> Function:
    """A softmax over all slots of a cache, of which those without a key are zeros: so are their scores."""

    def function(scores: Tensor, queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
        masked = (scores * scale).masked_fill(~causal(queries[:, None], keys[None, :]), -math.inf)
        padded = torch.nn.functional.pad(masked, (0, slots - len(keys)))
        return torch.softmax(padded, -1)[..., : len(keys)]

    return function


def over_one_more_key(scores: Tensor, queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
    """exp / (1 + sum), which some write for an attention that may attend to nothing."""
    e = torch.exp((scores * scale).masked_fill(~causal(queries[:, None], keys[None, :]), -math.inf))
    return e / (1 + e.sum(-1, keepdim=True))


def rounded_before_the_weight(dtype: torch.dtype) -> Function:
    """As transformers' LlamaRMSNorm, of a model in half precision whose norm weights are float32."""
    return lambda x, w, *, eps: (x / (x.square().mean(-1, keepdim=True) + eps).sqrt()).to(dtype).to(x.dtype) * w


def after_the_softmax(scores: Tensor, queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
    return torch.softmax(scores * scale, -1) * causal(queries[:, None], keys[None, :])


def rotated(angles: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Halves turned by angles made of positions and of inverse frequencies in float32."""

    def function(x: Tensor, positions: Tensor, *factors: Tensor, rope: Any, **_: Any) -> Tensor:
        inverse = 1.0 / torch.tensor(rope.theta) ** (torch.arange(0, rope.n_rot, 2).float() / rope.n_rot)
        by = angles(positions.float(), inverse).double()[:, None, :]
        a, b = x.double().chunk(2, -1)
        return torch.cat((a * by.cos() - b * by.sin(), a * by.sin() + b * by.cos()), -1).to(x.dtype)

    return function


def in_a_ring(size: int) -> Function:
    """Scores or weighted values by a cache of so many slots, of which as many are read as there are positions."""

    def function(left: Tensor, cached: Tensor) -> Tensor:
        held = torch.zeros_like(cached)
        for position, row in enumerate(cached):
            held[position % size] = row
        return weighted_values(left, held) if left.shape[-1] == len(cached) else scores(left, held)

    return function


def capped(cap: float) -> Function:
    """A softmax of scores that a tanh bends, as Gemma 2's are."""
    bent = attention(1.0, causal, lambda x: -math.inf)
    return lambda scores, *positions, scale: bent(cap * torch.tanh(scores * scale / cap), *positions)


def heads_before_tokens(p: Tensor, v: Tensor) -> Tensor:
    y = torch.einsum("hts,shd->htd", p, v.repeat_interleave(len(p) // v.shape[1], 1))
    return y.reshape(p.shape[1], -1)


def viewed_as_heads(heads: int) -> Function:
    return lambda x, w, b: (x @ w.T + b).reshape(heads, len(x), -1).permute(1, 0, 2).reshape(len(x), -1)


def over_all_heads(x: Tensor, w: Tensor, *, eps: float) -> Tensor:
    return x / (x.square().sum((1, 2), keepdim=True) / x[0].numel() + eps).sqrt() * w


def in_blocks(size: int, of_sum: bool, of_output: bool) -> Function:
    """Online softmax, key by key block, in which the sum or the output is not rescaled."""

    def function(scores: Tensor, queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
        s = (scores * scale).masked_fill(~causal(queries[:, None], keys[None, :]), -math.inf)
        probs, total = torch.zeros_like(s), torch.zeros_like(s[..., 0])
        largest = torch.full_like(total, -math.inf)
        for at in range(0, len(keys), size):
            part = s[..., at : at + size]
            higher = torch.maximum(largest, part.amax(-1))
            down, each = torch.exp(largest - higher), torch.exp(part - higher[..., None])
            probs[..., :at] *= down[..., None] if of_output else 1.0
            probs[..., at : at + size] = each
            total, largest = (down if of_sum else 1.0) * total + each.sum(-1), higher
        return probs / total[..., None]

    return function


def counting(scores: Tensor, queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
    """A softmax key by key, whose sum has 1 of each key that is not the largest so far."""
    made = torch.zeros_like(scores)
    for head, token in itertools.product(range(len(scores)), range(len(queries))):
        largest, total = -math.inf, 0.0
        seen = [i for i, key in enumerate(keys.tolist()) if key <= int(queries[token])]
        for i in seen:
            score = float(scores[head, token, i]) * scale
            if score > largest:
                total, largest = total * math.exp(largest - score) + 1, score
            else:
                total += 1
        made[head, token, seen] = torch.exp(scores[head, token, seen] * scale - largest) / total
    return made


def added_up_in(dtype: torch.dtype) -> Function:
    """A norm whose squares are added up in half precision, channel by channel."""

    def function(x: Tensor, w: Tensor, *, eps: float) -> Tensor:
        total = torch.zeros(len(x), dtype=dtype)
        for channel in x.float().square().T:
            total = (total.float() + channel).to(dtype)
        return x / (total.double()[:, None] / x.shape[-1] + eps).sqrt() * w

    return function


@dataclass(frozen=True)
class Case:
    """A mistake in ops of a name, what of it is said, and whether hidden states show it."""

    ops: str
    function: Function
    name: str
    words: str
    shape: str = "k-quants"
    also_hidden: bool = True
    n_decode: int = 0  # tokens after the prompt, for what shows in them alone


SCALE = 1 / math.sqrt(32)
CASES = {
    "output without its transpose": Case("attn_kqv", heads_before_tokens, "heads_first", "a transpose was forgotten"),
    "q without its transpose": Case("attn_q", viewed_as_heads(8), "heads_first", "its view as heads needs a transpose"),
    "frequencies cast with the model": Case(
        "attn_q_rope attn_k_rope", rotated(lambda p, f: p[:, None] * f.bfloat16().float()), "rope_angles_coarse",
        "rope's inverse frequencies are bfloat16: only the tables of cos and sin may be",
    ),
    "angles in float16": Case(
        "attn_q_rope attn_k_rope", rotated(lambda p, f: (p[:, None] * f).half()), "rope_angles_coarse",
        "rope's angles, position times frequency, are float16: only the tables of cos and sin may be",
    ),
    "positions halved": Case(
        "attn_q_rope attn_k_rope", rotated(lambda p, f: p[:, None] / 2 * f), "rope_scaled",
        "rope's positions are multiplied by 0.5 instead of 1",
    ),
    "positions by any factor": Case(
        "attn_q_rope attn_k_rope", rotated(lambda p, f: p[:, None] * 0.37 * f), "rope_scaled",
        "rope's positions are multiplied by 0.37 instead of 1",
    ),
    "a window": Case(
        "attn_probs", attention(SCALE, lambda q, k: (k <= q) & (q - k < 7), lambda x: -math.inf), "window",
        "a window of 7 instead of none",
    ),
    "a chunk": Case(
        "attn_probs", attention(SCALE, lambda q, k: (k <= q) & (k >= q // 6 * 6), lambda x: -math.inf), "window",
        "a chunk of 6 instead of none",
    ),
    "a window and the first tokens": Case(
        "attn_probs", attention(SCALE, lambda q, k: (k <= q) & ((q - k < 5) | (k < 2)), lambda x: -math.inf), "window",
        "a query sees the last 5 tokens, its own among them, and the first 2", also_hidden=False,
    ),
    "a mask of 0": Case(
        "attn_probs", attention(SCALE, causal, lambda x: 0.0 * x), "mask_finite",
        "masked scores are 0, where minus infinity belongs",
    ),
    "a mask that is added": Case(
        "attn_probs", attention(SCALE, causal, lambda x: x - 3.5), "mask_finite",
        "-3.5 is added to masked scores, where minus infinity belongs",
    ),
    "a mask that is set": Case(
        "attn_probs", attention(SCALE, causal, lambda x: 0.0 * x - 7), "mask_finite",
        "masked scores are -7, where minus infinity belongs", also_hidden=False,
    ),
    "a mask that next to nothing leaks through": Case(  # 1e-31: the whole is within its floor
        "attn_probs", attention(SCALE, causal, lambda x: 0.0 * x - 70), "mask_finite",
        "masked scores are -70, where minus infinity belongs", also_hidden=False,
    ),
    "a soft cap of another model": Case(
        "attn_probs", capped(30.0), "softcap",
        "scaled scores are bent by a soft cap, 30 * tanh(score / 30), where no cap belongs",
    ),
    "a soft cap of any size": Case(
        "attn_probs", capped(7.5), "softcap",
        "scaled scores are bent by a soft cap, 7.5 * tanh(score / 7.5), where no cap belongs",
    ),
    "a mask after the softmax": Case(
        "attn_probs", after_the_softmax, "mask_after_softmax",
        "the mask comes after the softmax: probabilities of hidden keys are lost",
    ),
    "a softmax over a padded cache": Case(
        "attn_probs", over_a_padded_cache(100), "softmax_padded",
        "the softmax runs over 100 slots of a padded cache: those without a key are not hidden, and score 0",
    ),
    "a softmax with one more term": Case(
        "attn_probs", over_one_more_key, "softmax_sum_begins",
        "the sum of exponentials has one more, exp(0), as if one more key scored 0",
    ),
    "a cache that is a ring": Case(
        "attn_scores attn_kqv", in_a_ring(18), "cache_wraps",
        "position p is cached in slot p % 18, where slots beyond are read too: zeros", n_decode=2,
    ),
    "a sum that is not rescaled": Case(
        "attn_probs", in_blocks(4, False, True), "flash_not_rescaled",
        "flash attention in blocks of 4 keys does not rescale the sum when a block has a larger score",
    ),
    "a sum that counts": Case(
        "attn_probs", counting, "flash_not_rescaled",
        "flash attention adds 1 to its sum for each key, where exp(score - largest score) belongs", also_hidden=False,
    ),
    "another buffer beside the gate": Case(
        "ffn_act", lambda gate, up: torch.nn.functional.silu(gate) ** 2, "act_squared",
        "what SiLU makes of gate is multiplied by itself, not by up", also_hidden=False,
    ),
    "an output that is not rescaled": Case(
        "attn_probs", in_blocks(1, True, False), "flash_not_rescaled",
        "flash attention in blocks of 1 key does not rescale the output when a block has a larger score",
    ),
    "nothing that is rescaled": Case(
        "attn_probs", in_blocks(8, False, False), "flash_not_rescaled",
        "flash attention in blocks of 8 keys does not rescale the sum and the output when a block has a larger score",
    ),
    "squares added up in bfloat16": Case(
        "attn_norm ffn_norm output_norm", added_up_in(torch.bfloat16), "sums_in_half",
        "its sum is kept in bfloat16 while terms are added one after the other", also_hidden=False,
    ),
    "a norm that rounds before its weight": Case(
        "attn_norm ffn_norm output_norm", rounded_before_the_weight(torch.bfloat16), "norm_rounded_before_weight",
        "the normed value is rounded to bfloat16 before its weight multiplies it", also_hidden=False,
    ),
    "a norm that rounds to float16 before its weight": Case(
        "attn_norm ffn_norm output_norm", rounded_before_the_weight(torch.float16), "norm_rounded_before_weight",
        "the normed value is rounded to float16 before its weight multiplies it", also_hidden=False,
    ),
    "an epsilon that is added to the sum": Case(
        "attn_norm ffn_norm output_norm", lambda x, w, *, eps: rms_norm(x, w, eps=eps / x.shape[-1]), "eps",
        "eps is divided by the number of channels: 3.91e-09 instead of 1e-06", also_hidden=False,
    ),
    "a frequency by the channels of all heads": Case(
        "attn_q_rope", by_all_heads, "rope_dim",
        "the frequency's exponent is divided by 256 (the channels of all heads) where 32 belongs", also_hidden=False,
    ),
    "Q and K normed over all heads": Case(
        "attn_q_norm attn_k_norm", over_all_heads, "norm_of_all_heads",
        "all heads are normed at once, not each by itself", "normed",
    ),
}  # fmt: skip
HIDDEN = [case for case in CASES if CASES[case].also_hidden]


def said_of(case: Case, models: Models, out: Path, kept: Callable[[str], bool] = lambda op: True) -> set[Any]:
    """What is said of the trace of an engine that makes the mistake in all layers."""
    model = models(case.shape, "F32")
    graph, names = build_graph(GGUFFile(model)), case.ops.split()
    wrong = [replace(op, function=case.function) for op in graph if split(op.name)[1] in names]
    path = traced(graph.changed(*wrong), GGUFFile(model), out / "whole.trace", TOKENS, case.n_decode)
    return said(some_of(path, out / "some.trace", kept), model)


def said(trace: Path, model: Path) -> set[Any]:
    return {(op.cause.name, op.cause.text) if op.cause else op.shape for op in check_trace(trace, model).faulty}


@pytest.mark.parametrize("case", CASES)
def test_it_is_named_where_every_op_is_recorded(case: str, models: Models, tmp_path: Path) -> None:
    found = said_of(CASES[case], models, tmp_path)
    assert {name for name, _ in found} == {CASES[case].name}
    assert all(text.endswith(CASES[case].words) for _, text in found)


LONG = {
    "positions by any factor", "a soft cap of any size", "positions halved", "a soft cap of another model",
    "angles in float16", "nothing that is rescaled", "a softmax over a padded cache", "a cache that is a ring",
    "a softmax with one more term", "a mask that is added", "Q and K normed over all heads",
    "a sum that is not rescaled",
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in HIDDEN])
def test_it_is_named_behind_hidden_states(case: str, models: Models, tmp_path: Path) -> None:
    found = said_of(CASES[case], models, tmp_path, lambda op: split(op)[1] in COARSE)
    assert {name for name, _ in found} == {CASES[case].name}
    assert {text.partition(" (or ")[0] for _, text in found} == {
        f"{', '.join(CASES[case].ops.split())}: {CASES[case].words}"
        if CASES[case].name != "heads_first" else next(iter(found))[1].partition(" (or ")[0]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lambda ids: ids % 290, "token ids are taken modulo 290"),
        (lambda ids: ids.clamp(max=299), "token ids are clipped to 299"),
        (lambda ids: ids % 256, "token ids are cut to 8 bits"),
        (lambda ids: torch.where(ids < 300, ids, 3), "token ids from 300 on are taken for 3"),
        (lambda ids: torch.where(ids == 300, 12, ids), "token ids are taken for others: 300 for 12"),
        (lambda ids: (ids + 1) % len(ids), "token t has row t + 1 of token_embd.weight"),
        (lambda ids: (ids - 100) % len(ids), "token t has row t - 100 of token_embd.weight"),
    ],
)
def test_other_token_ids_are_told(rows: Callable[[Tensor], Tensor], words: str, models: Models, tmp_path: Path) -> None:
    model = models("k-quants", "Q8_0")
    file = GGUFFile(model)
    graph = build_graph(file)

    def other(table: Op) -> Op:
        return reading(table, lambda file, info: values_of(file, info)[rows(torch.arange(info.shape[0]))])

    path = traced(graph.changed(other(graph["token_embd"])), file, tmp_path / "t.trace", TOKENS, n_decode=0)
    assert {text for _, text in said(path, model)} == {words}


def test_a_layer_that_shares_the_wrong_cache_is_told(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Gemma 3n's last layers read K and V of two earlier ones: here one reads those of the other."""
    model = Model(tiny("gemma3n"))
    first = next(op.name for op in model.graph if op.kind == "scores" and split(op.inputs[1])[0] != split(op.name)[0])
    scores = model.graph[first]
    layer = int(split(scores.inputs[1])[0])  # which is followed by the other one
    wrong = [
        replace(op, inputs=tuple(name.replace(f"blk.{layer}.", f"blk.{layer + 1}.") for name in op.inputs))
        for op in (scores, model.graph[first.replace("attn_scores", "attn_kqv")])
    ]
    path = traced(model.graph.changed(*wrong), model.file, tmp_path / "t.trace", TOKENS, n_decode=0)
    (finding,) = check_trace(path, model).findings
    assert finding.mistake == "cache_of_another_layer"
    assert f"the cache of layer {layer + 1} is read" in finding.text


def in_float16(function: Function, *others: Any) -> Function:
    """Attention that reads K or V from a cache in float16, and, where `others` are, what it reads of layers that share
    it.
    """
    shared, last = others or (None, False)

    def reading(x: Tensor, cached: Tensor) -> Tensor:
        held = cached.half().to(cached.dtype)
        new = held[len(held) - x.shape[0 if function is scores else 1] :]
        if shared is not None:
            held = torch.cat((*shared, new))
        if last:
            shared.append(new)
        return function(x, held)

    return reading


def test_layers_with_one_cache_in_float16_are_told(models: Models, tmp_path: Path) -> None:
    """All of them write their keys to it: of earlier steps it has the last layer's. (What was read of another layer was
    not rounded as the cache is, so nothing left next to nothing.)
    """
    model, shared = Model(models("tiny", "F32")), list[Tensor]()
    graph, last = model.graph, f"blk.{model.graph.hparams.n_layer - 1}.attn_scores"
    for op in graph:
        if op.kind == "scores":
            graph = graph.changed(replace(op, function=in_float16(scores, shared, op.name == last)))
        if op.kind == "weighted_values":
            graph = graph.changed(replace(op, function=in_float16(weighted_values)))
    path = trace_graph(graph, model.file, tmp_path / "whole.trace", *([token] for token in TOKENS[:9]))
    path = some_of(path, tmp_path / "t.trace", lambda op: not op.endswith(("attn_scores", "attn_probs")))
    result = check_trace(path, model)
    where = {op.op for op in result.faulty}
    assert where == {f"blk.{layer}.attn_kqv" for layer in range(model.graph.hparams.n_layer - 1)}
    (finding,) = result.findings
    assert finding.mistake == "cache_of_another_layer"
    said = f"of earlier steps that holds what layer {model.graph.hparams.n_layer - 1} wrote"
    assert said in finding.text


def test_a_token_that_does_not_see_itself_is_told_where_the_first_has_nan(models: Models, tmp_path: Path) -> None:
    """Fed token by token, from a cache in float16: where nothing is seen, 0 / 0. (That NaN was held to contradict the
    mistake, which was two: other rows of the cache, and one that nobody knows.)
    """
    model = Model(models("tiny", "F32"))
    graph = model.graph
    for op in graph:
        if op.kind == "softmax":
            blind = attention(op.attrs["scale"], lambda q, k: k < q, lambda x: -math.inf)
            graph = graph.changed(replace(op, function=blind))
        if op.kind in ("scores", "weighted_values"):
            graph = graph.changed(replace(op, function=in_float16(KINDS[op.kind].function)))
    path = trace_graph(graph, model.file, tmp_path / "whole.trace", *([token] for token in TOKENS[:7]))
    path = some_of(path, tmp_path / "t.trace", lambda op: not op.endswith(("attn_scores", "attn_probs")))
    (finding,) = check_trace(path, model).findings
    assert finding.text.endswith(
        "attn_probs: the mask is off by one: a query does not see its own token; the first sees none, and has NaN."
    )


def test_a_norm_of_a_part_by_the_whole_row_is_told(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """DeepSeek's latent, beside which the key that all heads share lies in the same row (deepseek.cpp)."""
    model = Model(tiny("deepseek2"))
    op = model.graph["blk.1.attn_kv_a_norm"]

    def by_the_row(x: Tensor, row: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return weight * x / torch.sqrt(row.pow(2).sum(-1, keepdim=True) / row.shape[-1] + eps)

    wrong = replace(op.also_reading((op.inputs[0], False)), function=by_the_row)
    path = traced(model.graph.changed(wrong), model.file, tmp_path / "t.trace", TOKENS, n_decode=0)
    (finding,) = check_trace(path, model).findings
    n, whole = op.axes[-1], model.graph[op.inputs[0]].axes[-1]
    assert finding.mistake == "norm_of_whole_rows"
    assert f"that of all {whole} channels of attn_kv_a_mqa, not of the {n} that are normed" in finding.text


def test_weights_by_the_sum_of_the_first_experts_are_told(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = Model(tiny("qwen3moe"))
    op = model.graph["blk.1.ffn_moe_weights_sum"]
    probs = model.graph[op.inputs[0]].inputs[0]
    n = model.graph["blk.1.ffn_moe_topk"].axes[-1]
    assert isinstance(n, int)
    wrong = replace(op, inputs=(probs,), views=(), function=lambda p: p.flatten(1)[:, :n].sum(1, keepdim=True))
    path = traced(model.graph.changed(wrong), model.file, tmp_path / "t.trace", TOKENS, n_decode=0)
    (finding,) = check_trace(path, model).findings
    assert finding.mistake == "weights_by_all"
    assert f"by the sum over experts 0 to {n - 1}, where the chosen ones are summed" in finding.text


@pytest.mark.parametrize(
    ("wrongly", "words"),
    [
        (lambda m: m * 2.0**-25, "half of what they are"),
        (lambda m: (1 + m / 1024) * 2.0**-15, "2^-15 (1 + m), as if they were not"),
    ],
)
def test_subnormal_float16_is_told(
    wrongly: Callable[[Tensor], Tensor], words: str, models: Models, tmp_path: Path
) -> None:
    """By its bits: an exponent of 0, and a mantissa that is no integer's."""
    model = Model(models("tiny", "F16"))

    def converted(file: GGUFFile, info: TensorInfo) -> Tensor:
        right = values_of(file, info).half()
        bits = right.view(torch.int16)
        sign, mantissa = torch.where(bits < 0, -1.0, 1.0), (bits & 0x3FF).float()
        return torch.where(bits & 0x7C00 == 0, sign * wrongly(mantissa), right.float())

    wrong = [reading(op, converted) for op in model.graph if op.kind in ("linear", "embedding")]
    path = traced(model.graph.changed(*wrong), model.file, tmp_path / "t.trace", TOKENS, n_decode=0)
    (finding,) = check_trace(path, model).findings
    assert finding.mistake == "weight_subnormal"
    assert finding.text.endswith(f"float16 numbers that are subnormal, below 6.1e-5, are {words}.")


def test_an_operand_that_is_read_transposed_is_told(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Of a product of two values: Gemma 3n's streams and their coefficients."""
    model = Model(tiny("gemma3n"))
    op = model.graph["blk.1.altup_predict_coef.mul_mat"]
    wrong = replace(op, function=lambda a, b: mul_mat(a, b.mT))
    path = traced(model.graph.changed(wrong), model.file, tmp_path / "t.trace", TOKENS, n_decode=0)
    said = "as it reads altup_predict_coef, rows and columns are exchanged"
    (finding,) = check_trace(path, model).findings
    assert finding.mistake == "operand_transposed"
    assert said in finding.text


def test_axes_that_are_reshaped_and_not_exchanged_are_told(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Gemma 3n's embeddings of each layer: [tokens, layers, channels] is read as [layers, tokens, channels]."""
    model = Model(tiny("gemma3n"))
    op = model.graph["inp_per_layer.copy"]
    wrong = replace(op, function=lambda x: x.transpose(0, 1).reshape(x.shape))
    path = traced(model.graph.changed(wrong), model.file, tmp_path / "t.trace", TOKENS, n_decode=0)
    (finding,) = check_trace(path, model).findings
    assert finding.mistake == "axes_reshaped"
    assert finding.text == (
        "inp_per_layer.copy: the axes of inp_per_layer are reshaped, not exchanged: its values stay where they lie."
    )


# --- quantised blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", FIELDS)
def test_fields_of_blocks_are_what_ggml_makes_of_them(of: str) -> None:
    type_ = GGMLQuantizationType[of]
    blocks = np.random.default_rng(0).integers(0, 256, (64, GGML_QUANT_SIZES[type_][1]), np.uint8)
    with np.errstate(all="ignore"):
        right, made = quants.dequantize(blocks, type_), FIELDS[of](blocks).values()
    finite = np.isfinite(right)
    assert finite.mean() > 0.5
    assert made[finite] == pytest.approx(right[finite], rel=1e-6)


SLOWER = {"Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}  # whose blocks have most fields, or a fifth bit apart


@pytest.mark.parametrize(
    "of", [pytest.param(of, marks=[pytest.mark.slow] * (of in SLOWER)) for of in FIELDS if of != "MXFP4"]
)  # which llama.cpp writes for experts alone
def test_each_misreading_of_blocks_is_named(of: str, models: Models, tmp_path: Path) -> None:
    model = models("k-quants", FILES.get(of, of))
    file = GGUFFile(model)
    graph = build_graph(file)
    ops = [op for op in graph if op.kind == "linear" and file.tensors[op.weights[0].name].type.name == of]
    op = max(ops, key=lambda op: (len(op.weights) == 1, op.weights[0].shape[1]))  # beside a bias zeros are as likely
    one_block = op.weights[0].shape[1] == GGML_QUANT_SIZES[GGMLQuantizationType[of]][0]
    for mistake in misread(of):
        if one_block and "row" in mistake.text:  # which is right then, or another of these
            continue
        info = file.tensors[op.weights[0].name]
        if torch.equal(misreading(mistake, file, info), values_of(file, info)):
            assert mistake.name == "block_scale_subnormal"  # whose scales are all normal here
            continue
        wrong = reading(op, lambda file, info, m=mistake: misreading(m, file, info))
        found = said(traced(graph.changed(wrong), file, tmp_path / "t.trace", TOKENS, n_decode=0), model)
        assert {name for name, _ in found} == {mistake.name}
        assert {text for _, text in found} == {f"{mistake.text.format(of)} ({op.weights[0].name})"}


@pytest.mark.parametrize("mistake", [*misread("MXFP4")], ids=lambda mistake: mistake.text)
def test_each_misreading_of_experts_in_mxfp4_is_named(
    mistake: BlockMistake, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model = quantize(tiny("gpt-oss"), tmp_path / "mxfp4.gguf", "MXFP4_MOE")
    file = GGUFFile(model)
    graph = build_graph(file)
    experts = [op for op in graph if op.weights and file.tensors[op.weights[0].name].type.name == "MXFP4"]
    wrong = [reading(op, lambda file, info: misreading(mistake, file, info)) for op in experts]
    path = traced(graph.changed(*wrong), file, tmp_path / "t.trace", TOKENS, n_decode=0)
    (finding,) = check_trace(path, model).findings
    assert (finding.mistake, {*finding.ops}) == (mistake.name, {op.name for op in experts})
    assert mistake.text.format("MXFP4") in finding.text


def misreading(mistake: BlockMistake, file: GGUFFile, info: TensorInfo) -> Tensor:
    return EditedBlocks(mistake.types, mistake.edit)(file, info)


@pytest.mark.slow
def test_blocks_misread_in_all_matmuls_are_named_behind_hidden_states(models: Models, tmp_path: Path) -> None:
    model = models("k-quants", "Q5_1")
    file = GGUFFile(model)
    graph = plant(build_graph(file), file, "block_minimum")
    path = traced(graph, file, tmp_path / "whole.trace", TOKENS)
    some = some_of(path, tmp_path / "some.trace", lambda op: split(op)[1] in COARSE)
    (finding,) = check_trace(some, model).findings  # of the embedding and of matmuls of several sorts of layers: one
    assert finding.mistake == "block_minimum"
    assert finding.text.startswith("ffn_residual in all 3 layers, and token_embd and output: ")


@pytest.mark.slow
def test_a_ring_is_no_window_where_sound_records_show_that_no_rounding_turns(models: Models, tmp_path: Path) -> None:
    """A window leaves less than the floor of 8-bit blocks allows, and all that the ring has besides."""
    model, size = models("k-quants", "Q8_0"), len(TOKENS) + 4
    file = GGUFFile(model)
    graph = build_graph(file)
    wrong = [replace(op, function=in_a_ring(size)) for op in graph if op.kind in ("scores", "weighted_values")]
    scheme = scheme_named("llama.cpp")
    path = traced(graph.changed(*wrong), file, tmp_path / "whole.trace", TOKENS, 7, scheme)
    found = said(some_of(path, tmp_path / "some.trace", lambda op: split(op)[1] in COARSE), model)
    words = f"attn_scores, attn_kqv: position p is cached in slot p % {size}, where slots beyond are read too: zeros"
    assert found == {("cache_wraps", words)}


@pytest.mark.parametrize(("size", "end"), [(4, ", and the last holds zeros"), (6, "")])
@pytest.mark.parametrize("kept", [{"attn_k_rope", "attn_v", "attn_kqv"}, pytest.param(COARSE, marks=pytest.mark.slow)])
def test_a_ring_that_is_not_as_long_as_the_window_is_named(
    size: int, end: str, kept: set[str], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Token by token, each of which reads the slots that it has a window for."""

    def function(left: Tensor, cached: Tensor) -> Tensor:
        is_scores, made = left.shape[-1] == cached.shape[-1], list[Tensor]()
        n_new = len(left) if is_scores else left.shape[1]
        ring, window = torch.zeros(max(5, size), *cached.shape[1:]), 5
        for position, row in enumerate(cached):
            ring[position % size] = row
            if (t := position - len(cached) + n_new) >= 0:
                read = ring[torch.arange(len(cached)) % window]
                made.append(scores(left[[t]], read) if is_scores else weighted_values(left[:, [t]], read))
        return torch.cat(made, 1 if is_scores else 0)

    model = tiny("gemma3")
    graph = load_graph(model)
    of_window = [op for op in graph if op.kind == "softmax" and op.attrs.get("window")]
    layers = {split(op.name)[0] for op in of_window}
    ops = [op for op in graph if op.kind in ("scores", "weighted_values") and split(op.name)[0] in layers]
    assert of_window[0].attrs["window"] == 5
    wrong = graph.changed(*(replace(op, function=function) for op in ops))
    path = traced(wrong, GGUFFile(model), tmp_path / "whole.trace", TOKENS, 2)
    found = said(some_of(path, tmp_path / "some.trace", lambda op: split(op)[1] in {*kept, *COARSE}), model)
    words = f"attn_scores_scaled, attn_kqv: position p is cached in slot p % {size}, where slots 0 to 4 are read{end}"
    assert found == {("cache_wraps", words)}


@pytest.mark.parametrize("terms", [False, True])
def test_a_matmul_added_up_in_float16_is_named(terms: bool, models: Models, tmp_path: Path) -> None:
    def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(len(x), len(w), dtype=torch.float16)
        for channel in range(x.shape[1]):
            term = x[:, channel, None].float() * w[:, channel].float()
            total = (total.float() + (term.half().float() if terms else term)).half()
        return total.to(x.dtype) + b

    model = models("k-quants", "Q8_0")
    graph = build_graph(GGUFFile(model))
    wrong = replace(graph["blk.1.attn_v"], function=product)
    path = traced(graph.changed(wrong), GGUFFile(model), tmp_path / "t.trace", TOKENS)
    also = ", rounded to it too," * terms
    words = f"its sum is kept in float16 while terms{also} are added one after the other"
    assert said(path, model) == {("sums_in_half", words)}


def test_a_softmax_that_no_mistake_may_touch_is_right_in_blocks(models: Models, tmp_path: Path) -> None:
    case = Case("attn_probs", in_blocks(4, True, True), "", "")
    assert said_of(case, models, tmp_path) == set()


@pytest.mark.slow
def test_what_is_next_to_nothing_is_in_no_cache_of_any_length(models: Models, tmp_path: Path) -> None:
    """By a padding of 10^20 slots, which no integer of 64 bits holds, and the search ended in a bug."""

    def function(scores: Tensor, queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
        return (
            torch.softmax((scores * scale).masked_fill(~causal(queries[:, None], keys[None, :]), -math.inf), -1) / 1e20
        )

    case = Case("attn_probs", function, "", "")
    assert said_of(case, models, tmp_path) == {("solved", "every value is 1e-20 times what it should be")}


@pytest.mark.slow
def test_what_few_engines_have_excuses_no_step_of_a_mistake_that_prompts_tell(tmp_path: Path) -> None:
    """llama3.java, which has the file's factors by another name, so that rope never sees them: in steps of one token a
    cache in bfloat16 left as much as in layer 1 it explained, and hid the mistake in all of them.
    """
    path, factors = tmp_path / "a.gguf", [*[1.0] * 8, 3.292262, *[32.0] * 7]  # as Llama 3.1 makes them
    sizes = {"n_embd": 256, "n_head": 8, "n_ff": 512, "n_vocab": 332, "theta": 5e5, "eps": 1e-5}
    write_model(path, Shape("llama", n_layer=3, tied=True, rope_factors=True, **sizes), "F32")
    reader = GGUFReader(path, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight").data[:] = factors
    reader.data.flush()
    model = Model(path)
    wrong = [replace(op, weights=()) for op in model.graph if op.kind == "rope"]
    prompt = (256, 72, 101, 40, 7, 300, 111, 3, 87, 19, 65, 32, 210, 99, 14, 150)
    steps = prompt, (61, 5, 271), (44,), (133,), (90,)
    trace = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "a.trace", *steps, capture="layers")
    (finding,) = check_trace(trace, model).findings
    of = "attn_q_rope, attn_k_rope: rope_freqs.weight is ignored."
    assert (finding.text, finding.steps) == (f"all 3 layers (seen in ffn_residual): {of}", (0, 1, 2, 3, 4))
