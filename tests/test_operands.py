"""An input whose channels are read elsewhere, by a map of any number: each kind tells of it in its own way."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Models, trace_graph
from test_solve import PROMPT, explained, in_cache
from torch import Tensor

from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op
from tracediff.model.synthetic import Shape
from tracediff.numerics.kinds import KINDS
from tracediff.pipeline import check_trace

# Heads of 48 channels, fewer K and V channels (96) than the norm has (144), and more of the feed-forward (200).
SHAPE = Shape("llama", n_layer=2, n_embd=144, n_head=6, n_head_kv=2, head_dim=48, n_ff=200, n_vocab=300, bias=False)
Read = Callable[[Tensor], Tensor]


def shifted(x: Tensor) -> Tensor:
    """The last seven are 0."""
    return torch.nn.functional.pad(x[..., 7:], (0, 7))


def exchanged(x: Tensor) -> Tensor:
    """Two of them."""
    other = x.clone()
    other[..., [9, 40]] = x[..., [40, 9]]
    return other


@pytest.mark.parametrize(
    ("name", "position", "read", "said"),
    [
        ("attn_norm", 0, lambda x: x[..., torch.arange(144) % 68], "channels from 68 on repeat the first 68"),
        ("attn_norm", 0, lambda x: x[..., torch.arange(144) % 143], "channel 143 has the values of channel 0"),
        ("attn_norm", 0, shifted, "each channel has the values of the 7th after it, the last 7 are 0"),
        ("attn_q", 0, lambda x: x.roll(-67, -1), "channels rotated: channel 0 has the values of channel 67"),
        ("attn_v", 0, lambda x: x[..., 93:94].expand(x.shape), "every channel has the values of channel 93"),
        ("attn_k", 0, shifted, "each channel has the values of the 7th after it, the last 7 are 0"),
        ("attn_k", 0, exchanged, "channels 9 and 40 are exchanged"),
        ("attn_q_rope", 0, exchanged, "channels 9 and 40 are exchanged"),
        ("attn_scores", 1, exchanged, "channels 9 and 40 are exchanged"),
        ("ffn_down", 0, lambda x: x[..., torch.arange(200) // 11], "channel i has the values of channel i // 11"),
        ("attn_q_rope", 0, lambda x: x.roll(-19, -1), "channels rotated: channel 0 has the values of channel 19"),
        ("attn_scores", 1, shifted, "each channel has the values of the 7th after it, the last 7 are 0"),
    ],
)
def test_channels_that_are_read_elsewhere_are_found(
    models: Models, tmp_path: Path, name: str, position: int, read: Read, said: str
) -> None:
    def changed(graph: Graph) -> Op:
        op = graph[f"blk.1.{name}"]
        right = KINDS[op.kind].function

        def function(*inputs: Tensor, **attrs: object) -> Tensor:
            return right(*(read(x) if i == position else x for i, x in enumerate(inputs)), **attrs)

        return replace(op, function=function)

    faulty = explained(models(SHAPE), tmp_path, changed)
    assert [(op.step, op.op) for op in faulty] == [(0, f"blk.1.{name}"), (1, f"blk.1.{name}")]
    for op in faulty:
        assert op.cause, op.shape
        assert op.cause.text.startswith("as it reads ")
        assert said in op.cause.text


P = len(PROMPT)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            lambda v: torch.cat((v[: P - 1], v[P:], 0 * v[:1])),
            f"from position {P - 1} on each has the values of the next, the last is 0: stored a slot early",
        ),
        (
            lambda v: torch.cat((v[:P], 0 * v[:1], v[P:-1])),
            f"position {P} is 0, each after it has the values of the one before: stored a slot late",
        ),
    ],
)
def test_slots_that_decode_steps_write_elsewhere_are_found(
    models: Models, tmp_path: Path, held: Read, said: str
) -> None:
    faulty = explained(models("llama"), tmp_path, in_cache("blk.0.attn_kqv", held, True), n_decode=3)
    assert [(op.step, op.cause and op.cause.text) for op in faulty] == [
        (step, f"as it reads attn_v, {said}") for step in (1, 2, 3)
    ]


@pytest.mark.parametrize("name", ["attn_scores", "attn_kqv"])
def test_a_slot_that_is_written_late_is_one_mistake_in_all_steps(models: Models, tmp_path: Path, name: str) -> None:
    """The first decoded token alone says that its own key is zero, which later ones do not have."""
    n = 8  # of so many tokens on, steps tell as much

    def late(cached: Tensor) -> Tensor:
        return torch.cat((cached[:n], 0 * cached[:1], cached[n:-1]))

    path = models("llama")
    file = GGUFFile(path)
    graph = build_graph(file)
    wrong = graph.changed(in_cache(f"blk.0.{name}", late, True)(graph))
    trace = trace_graph(wrong, file, tmp_path / "t.trace", range(5, 5 + n), (40 + n,), (41 + n,))
    (finding,) = check_trace(trace, model=path).findings
    assert "stored a slot late" in finding.text
    assert finding.steps == (1, 2)


def test_an_activated_gate_that_is_clamped_is_found(models: Models, tmp_path: Path) -> None:
    def changed(graph: Graph) -> Op:
        return replace(
            graph["blk.1.ffn_act"], function=lambda gate, up: torch.nn.functional.silu(gate).clamp(max=0.7) * up
        )

    faulty = explained(models("llama"), tmp_path, changed)
    assert {op.cause and op.cause.text for op in faulty} == {"every activated value of ffn_gate above 0.7 is 0.7"}
