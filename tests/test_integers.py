"""Engines that multiply integers: how those of activations are made, by what they are scaled, and what minima take.

The kernel is written out here, after ggml's (ggml-cpu/quants.c, ggml_vec_dot_q4_K_q8_K): none of it is the product's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHAPES, Models, trace_graph
from torch import Tensor

from tracediff.model.block_fields import Fields
from tracediff.model.graph import Graph, Op
from tracediff.model.model import Model
from tracediff.model.weights import raw_rows
from tracediff.pipeline import Effort, check_trace

PROMPT, GROUP = [(37 * i + 11) % 300 for i in range(13)], 32
Sums = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of integers and scales, [T, groups, 32] and [T, groups, 1]


def own_sums(q: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return q.sum(2) * scales[..., 0]


def usual(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scales = np.maximum(np.abs(x).max(2, keepdims=True), 1e-30).astype(np.float32) / np.float32(127)
    return np.rint(x / scales), scales, scales


def by_128(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scales = np.abs(x).max(2, keepdims=True) / np.float32(127)
    return np.rint(x / scales * np.float32(128 / 127)).astype(np.int64).astype(np.int8), scales, scales


def without_abs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scales = x.max(2, keepdims=True) / np.float32(127)
    return np.rint(x / scales).astype(np.int64).astype(np.int8), scales, scales


def by_the_first_scale(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, scales, _ = usual(x)
    first = np.broadcast_to(scales[:, :1], scales.shape)
    return q, first, first


def by_the_first_tokens_scale(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One scale of a row, and that of the first row for all."""
    first = np.abs(x[:1]).max((1, 2), keepdims=True).astype(np.float32) / np.float32(127)
    scales = np.broadcast_to(first, (*x.shape[:2], 1))
    return np.clip(np.rint(x / scales), -127, 127), scales, scales


def of_overlapping_sixteenths(q: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Of blocks of 256: i and i + 1, where 2 i and 2 i + 1 belong."""
    each = q.reshape(len(q), -1, 16, 16).sum(3) * scales.reshape(len(q), -1, 8).repeat(2, axis=2)
    return (each[..., :8] + each[..., 1:9]).reshape(len(q), -1)


@dataclass(frozen=True)
class Kernel:
    """Of one Q4_K matrix: sums of integers, and of minima times sums of activations. Of any other without `fields`."""

    fields: Fields | None
    quantised: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]] = usual
    sums: Sums = own_sums

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        groups = x.float().numpy().reshape(len(x), -1, GROUP)
        q, scales, of_sums = self.quantised(groups)
        parts = q.astype(np.float64) * scales
        if self.fields is None:
            y = torch.from_numpy(parts.reshape(len(x), -1)).to(x.dtype) @ weight.T
            return y if bias is None else y + bias
        steps = np.broadcast_to(self.fields.steps, self.fields.integers.shape)
        integers = (steps * self.fields.integers).reshape(len(weight), -1).astype(np.float64)
        minima = self.fields.added.reshape(len(weight), -1).astype(np.float64)
        y = parts.reshape(len(x), -1) @ integers.T + self.sums(q.astype(np.float64), of_sums) @ minima.T
        return torch.from_numpy(y).to(x.dtype) + (0 if bias is None else bias)


def engine(model: Model, wrong: Callable[[Fields], Kernel]) -> tuple[Graph, set[str]]:
    """The graph with a mistaken kernel for its matrices in Q4_K, whose ops these are; others have a right one."""
    changed, mistaken = dict[str, Op](), set[str]()
    for op in model.graph:
        info = model.file.tensors[op.weights[0].name] if op.kind == "linear" else None
        if info and info.type.name == "Q4_K":
            mistaken.add(op.name)
            changed[op.name] = replace(op, function=wrong(Fields.of_rows("Q4_K", raw_rows(model.file, info))))
        elif info:
            changed[op.name] = replace(op, function=Kernel(None))
    return model.graph.changed(*changed.values()), mistaken


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda fields: Kernel(fields, by_128),
            ": the largest becomes 128, which is no 8-bit integer, where 127 belongs",
        ),
        (lambda fields: Kernel(fields, without_abs), " are scaled by their largest value, where the largest magnitude"),
        (
            lambda fields: Kernel(fields, by_the_first_scale),
            ": their integers are multiplied by the scale of the first block of the row",
        ),
        pytest.param(
            lambda fields: Kernel(fields, sums=lambda q, d: q[..., :16].sum(2) * d[..., 0]),
            "the minimum of each part of a row is multiplied by the sum of the first half of its activations alone",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda fields: Kernel(fields, sums=lambda q, d: q.sum(2)),
            "is multiplied by the sum of the activations' integers, without their scale",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda fields: Kernel(fields, sums=lambda q, d: q[:1].sum(2) * d[..., 0]),
            "is multiplied by the sum of the integers of token 0, with its own scale",
            marks=pytest.mark.slow,
        ),
        (
            lambda fields: Kernel(fields, by_the_first_tokens_scale),
            " are divided and multiplied by the scale of the step's first token",
        ),
        pytest.param(
            lambda fields: Kernel(fields, sums=of_overlapping_sixteenths),
            "is multiplied by the sum of sixteenths i and i + 1 of its block's activations, where 2 i and 2 i + 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_wrong_with_integers_is_said(
    wrong: Callable[[Fields], Kernel], said: str, models: Models, tmp_path: Path
) -> None:
    model = Model(models(replace(SHAPES["k-quants"], n_layer=1), "Q4_K_M"))
    graph, ops = engine(model, wrong)
    trace = trace_graph(graph, model.file, tmp_path / "t.trace", PROMPT, [5])
    result = check_trace(trace, model, effort=Effort(seconds=60))
    assert {op.op for op in result.faulty} == ops
    assert [said in finding.text for finding in result.findings] == [True], [f.text for f in result.findings]


def test_the_kernel_is_right(models: Models, tmp_path: Path) -> None:
    model = Model(models(replace(SHAPES["k-quants"], n_layer=1), "Q4_K_M"))
    graph, ops = engine(model, Kernel)
    assert ops
    assert check_trace(trace_graph(graph, model.file, tmp_path / "t.trace", PROMPT, [5]), model).verdict == "match"
