"""What a torch model computes between its modules, as `record` takes it: residual sums, and keys before the cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from conftest import Models
from test_record import Engine, Layer, passes, rotated
from torch import Tensor, nn

import tracediff
from tracediff.engine.residual import Residual
from tracediff.engine.torch_run import TorchOptions
from tracediff.engine.transformers_run import trace_model
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.pipeline import check_trace
from tracediff.result import Result
from tracediff.trace.reader import Trace

pytestmark = pytest.mark.filterwarnings("ignore:left out", "ignore:modules that ran more than once")
ROOM = 16  # of the cache, more than there are tokens


class Plain(Layer):
    """A layer that adds up its residual itself, whose cache is a buffer with room for more, in a type of its own."""

    wrong = ""
    dtype, in_place, whole, wide, norm = torch.float32, False, False, False, True

    def forward(self, x: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        h, t, last = self.hparams, len(positions), int(positions[-1])
        q, k, v = self.qkv_proj(self.input_layernorm(x)).split(
            [h.n_head * h.head_dim, *[h.n_head_kv * h.head_dim] * 2], -1
        )
        q, k = (rotated(part.view(t, -1, h.head_dim), positions, h.rope.theta) for part in (q, k))
        q, k = q.to(x), k if self.wide else k.to(x)
        v = v.view(t, -1, h.head_dim)
        if not positions[0]:
            self.keys, self.values = (torch.zeros(ROOM, *x.shape[1:], dtype=self.dtype) for x in (k, v))
        slots = positions - (1 if self.wrong == "slot" and positions[0] else 0)
        self.keys[slots] = k.to(self.dtype)
        self.values[slots] = v.to(self.dtype)
        n = ROOM if self.whole else last + 1
        keys, values = (
            x[:n].to(q.dtype).repeat_interleave(h.n_head // h.n_head_kv, 1).transpose(0, 1)
            for x in (self.keys, self.values)
        )
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * h.head_dim**-0.5
        seen = torch.arange(n) <= positions[:, None]
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
        attended = self.o_proj(out.transpose(0, 1).flatten(1))
        if self.in_place:
            before, both = x, x.add_(attended)
        else:
            before, both = x, x + attended
        norm = self.post_attention_layernorm
        read = before if self.wrong == "input" else both
        normed = norm(read) if self.norm else nn.functional.rms_norm(read, read.shape[-1:], norm.weight, norm.eps)
        gate, up = self.mlp.gate_up_proj(normed).chunk(2, -1)
        down = self.down_proj(nn.functional.silu(gate) * up)
        if not self.norm:
            return both.add_(down, alpha=1.0), None
        return (before if self.wrong == "dropped" else both) + down, None


class Stream(Engine):
    """Of such layers, which may do something to the embedding before the first."""

    def __init__(self, model: Path, embedded: Callable[[Tensor], Tensor] = lambda x: x, **options: Any) -> None:
        super().__init__(model)
        self.embedded, self.more = embedded, nn.ModuleList()
        for layer in self.layers:
            layer.__class__ = Plain
            layer.__dict__.update(options)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.more.append(nn.Linear(2, 2))  # whose weights are initialised by functions that have keywords alone
        x = self.embedded(self.embed_tokens(input_ids))
        for layer in self.layers:
            x, _ = layer(x, None, positions)
        return self.lm_head(self.norm(x))


def recorded(engine: Engine, model: Path, out: Path, first: int = 4) -> Result:
    with tracediff.record(engine, out, gguf=model):
        passes(engine, first, 1, 1, 1)
    return check_trace(out, model)


SHAPE = Shape("qwen2", n_layer=2, bias=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"in_place": True},
        {"dtype": torch.float8_e4m3fn},
        {"dtype": torch.float8_e5m2},
        {"dtype": torch.bfloat16},
        {"whole": True, "dtype": torch.float8_e4m3fn},
        {"norm": False},  # by a function, and what is added in place is nothing that is followed
    ],
    ids=str,
)
def test_right_engines_match(options: dict[str, Any], models: Models, tmp_path: Path) -> None:
    """K is recorded as rope makes it, in whatever the cache holds it, and where attention reads all of a buffer."""
    model, out = models(SHAPE), tmp_path / "mine.trace"
    result = recorded(Stream(model, **options), model, out)
    assert [finding.text for finding in result.findings] == []
    assert result.verdict == "match"
    assert (3, "blk.1.attn_k_rope") in Trace(out).ops


def test_a_half_precision_model_with_a_cache_of_the_other_type_matches(models: Models, tmp_path: Path) -> None:
    """Which of two casts is the cache's, the type of what keys are made of tells."""
    model = models(SHAPE)
    result = recorded(Stream(model, dtype=torch.bfloat16).half(), model, tmp_path / "mine.trace")
    assert ([finding.text for finding in result.findings], result.verdict) == ([], "match")


def test_a_first_step_of_one_token_has_the_keys_that_rope_makes(models: Models, tmp_path: Path) -> None:
    """At position 0 these are what it makes them of."""
    model = models(SHAPE)
    result = recorded(Stream(model, dtype=torch.float8_e4m3fn), model, tmp_path / "mine.trace", 1)
    assert ([finding.text for finding in result.findings], result.verdict) == ([], "match")


def test_keys_in_float32_go_into_a_float8_cache_of_a_bfloat16_model(models: Models, tmp_path: Path) -> None:
    """Neither type is that of what keys are made of: the one that a trace can hold is recorded."""
    model, out = models(SHAPE), tmp_path / "mine.trace"
    engine = Stream(model, dtype=torch.float8_e4m3fn, wide=True).bfloat16()
    assert recorded(engine, model, out).verdict == "match"
    assert Trace(out).ops[0, "blk.1.attn_k_rope"].dtype == "f32"


@pytest.mark.parametrize(
    ("options", "findings"),
    [
        (
            {"wrong": "slot"},
            [
                "attn_scores in both layers, in steps 1 to 3: from key 3 on each has the values of the next, the last "
                "is 0: stored a slot early.",
                "attn_kqv in both layers, in steps 1 to 3: as it reads attn_v, from position 3 on each has the values "
                "of the next, the last is 0: stored a slot early.",
            ],
        ),
        ({"wrong": "input"}, ["ffn_norm in both layers: reads the layer's input where attn_residual belongs."]),
        (
            {"wrong": "dropped"},
            ["ffn_residual in both layers: adds the layer's input where attn_residual belongs."],
        ),
        (
            {"embedded": lambda x: x * 4.0},
            ["token_embd: every value is 4 times what it should be."],
        ),
        (
            {"embedded": lambda x: x.mul_(4.0)},
            ["token_embd: every value is 4 times what it should be."],
        ),
    ],
    ids=["a slot early", "reads the input", "drops attention", "embedding scaled", "embedding scaled in place"],
)
def test_mistakes_between_modules_are_said_of_the_op_that_has_them(
    options: dict[str, Any], findings: list[str], models: Models, tmp_path: Path
) -> None:
    """A slot of the cache was said of K's rope, an input that skips the sum of the sum, a factor to be an epsilon."""
    model = models(SHAPE)
    result = recorded(Stream(model, **options), model, tmp_path / "mine.trace")
    assert [finding.text for finding in result.findings] == findings


def exchanged(layer: nn.Module) -> None:
    """Each of its norms is called where the other belongs."""
    after, before = layer.post_feedforward_layernorm, layer.post_attention_layernorm
    layer.__dict__ |= {"post_attention_layernorm": after, "post_feedforward_layernorm": before}


def before_each_part(layer: nn.Module) -> None:
    """The norms come before attention and feed-forward, as most models have them."""

    def forward(hidden_states: Tensor, **others: Any) -> Tensor:
        x = hidden_states
        x = x + layer.self_attn(hidden_states=layer.post_attention_layernorm(x), **others)[0]
        return x + layer.mlp(layer.post_feedforward_layernorm(x))

    layer.forward = forward  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "findings"),
    [
        (
            exchanged,
            {
                "post_ffw_norm": "reads attn_output where ffn_down belongs.",
                "attn_residual": "adds post_ffw_norm where post_attention_norm belongs.",
                "post_attention_norm": "reads ffn_down where attn_output belongs.",
                "ffn_residual": "adds post_attention_norm where post_ffw_norm belongs.",
            },
        ),
        (
            before_each_part,
            {
                "post_attention_norm": "reads the layer's input where attn_output belongs.",
                "attn_q, attn_k and attn_v": "what it reads is normed first, with post_attention_norm.weight.",
                "post_ffw_norm": "reads attn_residual where ffn_down belongs.",
                "ffn_gate and ffn_up": "what it reads is normed first, with post_ffw_norm.weight.",
                "attn_residual": "adds attn_output where post_attention_norm belongs.",
                "ffn_residual": "adds ffn_down where post_ffw_norm belongs.",
            },
        ),
    ],
)
def test_norms_behind_each_part_that_are_called_elsewhere(
    change: Callable[[nn.Module], None], findings: dict[str, str], tmp_path: Path
) -> None:
    """Which norm reads what, and which value is added: the sums are no longer taken for what the next module reads."""
    path = tiny_checkpoints.CLASSES["olmo2"].write("olmo2", tmp_path / "tiny.gguf")
    loaded, model, out = tiny_checkpoints.load("olmo2", path), Model(path), tmp_path / "tiny.trace"
    for layer in loaded.model.layers:
        change(layer)
    trace_model(loaded, model, out, TorchOptions(), (256, 84, 104, 101, 32, 113, 117), 2)
    texts = [finding.text for finding in check_trace(out, model).findings]
    assert {text.partition(" in ")[0]: text.partition("layers: ")[2] for text in texts} == findings


def test_a_value_that_something_unknown_was_added_to_in_place_is_no_longer_known(models: Models) -> None:
    """What a norm then reads is the sum, be it of a term that no module puts out."""
    seen = dict[str, Tensor]()
    residual = Residual(Model(models(SHAPE)).graph, lambda name, values: seen.setdefault(name, values.clone()))
    x = torch.zeros(3, 96)
    residual.wait("token_embd", x)
    residual.read("token_embd", x)
    residual.next_layer(x)
    x += 1
    residual.added(x, torch.ones(3, 96), x)
    assert residual.read("blk.0.attn_residual", x)
    attended, down = torch.full((3, 96), 2.0), torch.full((3, 96), 3.0)
    residual.put_out("blk.0.attn_output", attended)
    residual.put_out("blk.0.ffn_down", down)
    residual.added(x, down, total := x + down)
    residual.next_layer()
    assert {name: float(values[0, 0]) for name, values in seen.items()} == {
        "token_embd": 0.0, "blk.0.ffn_residual": float(total[0, 0]),
    }  # fmt: skip
