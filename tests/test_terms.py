"""Sums that leave out some of their terms: a lane of an unrolled loop, the end of every block, a remainder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Models, trace_graph
from test_solve import DECODED, PROMPT, explained
from torch import Tensor

from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph, Op
from tracediff.model.synthetic import Shape
from tracediff.numerics.kinds.linear import linear
from tracediff.pipeline import check_trace

TWO = Shape("llama", n_layer=2, n_embd=64, n_head=4, n_head_kv=2, n_ff=67, n_vocab=300, bias=False)
Kept = Callable[[Tensor], Tensor]  # of the numbers of the terms, which are added up


def product(kept: Kept) -> Callable[..., Tensor]:
    """A matmul whose sums lack terms."""
    return lambda x, w, b=None: linear(x * kept(torch.arange(x.shape[-1])), w, b)


def norm(kept: Kept) -> Callable[..., Tensor]:
    """An RMS norm whose sum of squares lacks terms."""

    def function(x: Tensor, w: Tensor, eps: float) -> Tensor:
        squares = (x.square() * kept(torch.arange(x.shape[-1]))).sum(-1, keepdim=True)
        return x * torch.rsqrt(squares / x.shape[-1] + eps) * w

    return function


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (lambda i: i % 4 != 3, "the sum leaves out every 4th input channel, from 3 on"),
        (lambda i: i % 3 == 1, "the sum takes only every 3rd input channel, from 1 on"),
        (lambda i: i % 32 < 28, "of every 32 input channels the sum leaves out the last 4"),
        (lambda i: i % 8 > 1, "of every 8 input channels the sum leaves out the first 2"),
        (lambda i: i < 64, "the sum takes only input channels 0 to 63: the last 3 are left out"),
    ],
)
def test_a_sum_without_some_terms_is_said(models: Models, tmp_path: Path, kept: Kept, said: str) -> None:
    def changed(graph: Graph) -> Op:
        return replace(graph["blk.1.ffn_down"], function=product(kept))

    faulty = explained(models(TWO), tmp_path, changed)
    assert [(op.step, op.op, op.cause and op.cause.text) for op in faulty] == [
        (step, "blk.1.ffn_down", said) for step in (0, 1)
    ]


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (lambda i: i % 4 != 3, "all 5 norms: the sum of squares leaves out every 4th channel, from 3 on."),
        (lambda i: i % 32 < 28, "all 5 norms: of every 32 channels the sum of squares leaves out the last 4."),
        (lambda i: i < 59, "all 5 norms: the sum of squares takes only channels 0 to 58: the last 5 are left out."),
        (  # the mean over n + 1
            lambda i: torch.full(i.shape, 64 / 65),
            "all 5 norms: the scale is computed with squares / 65, where squares / 64 belongs.",
        ),
    ],
)
def test_a_factor_of_one_token_does_not_win(models: Models, tmp_path: Path, kept: Kept, said: str) -> None:
    """In steps of one token what a sum of squares lacks is a factor in each: no factor is said in any of them."""
    path = models(TWO, "Q8_0")
    file = GGUFFile(path)
    graph = build_graph(file)
    wrong = [replace(op, function=norm(kept)) for op in graph if op.kind == "rms_norm"]
    tokens = ((token,) for token in (*PROMPT[:4], DECODED))
    result = check_trace(trace_graph(graph.changed(*wrong), file, tmp_path / "t.trace", *tokens), path)
    assert [one.text for one in result.findings] == [said]
