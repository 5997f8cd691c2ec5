"""Quantised blocks that are read by a rule that nobody listed: it is told by value, as an expression of its code."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_rules import FILES
from conftest import SHAPES, Models, trace_graph
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from test_mistakes import traced

from tracediff.diagnose.solve.by_value.block_kernels import KERNELS, Kernel, edited
from tracediff.diagnose.solve.by_value.block_layout import Part, layout_of
from tracediff.diagnose.solve.by_value.block_words import expression
from tracediff.diagnose.solve.by_value.blocks import OfBits, Order, Rule, Scaled, Shared
from tracediff.model.block_fields import FIELDS, EditedBlocks, Fields
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.model.synthetic import quantize
from tracediff.model.weights import reading
from tracediff.numerics.kinds.linear import linear
from tracediff.pipeline import check_trace

TOKENS = tuple(range(7, 7 + 3 * 19, 3))
PLAIN = (1.0,) * 32
J256, J32 = np.arange(256), np.arange(32)


def of_parts(type_: str, what: str, parts: dict[int, Part]) -> OfBits:
    """The right sums of bits but for some parts of scales or minima."""
    layout = layout_of(type_)
    made = tuple(parts.get(p, right) for p, right in enumerate(getattr(layout, what)))
    right = OfBits(layout.scales, layout.minima)
    return replace(right, scales=made) if what == "scales" else replace(right, minima=made)


def low_four(type_: str, what: str, *parts: int) -> OfBits:
    """Of some parts the lowest four bits alone."""
    right = getattr(layout_of(type_), what)
    return of_parts(type_, what, {p: tuple((bit, by) for bit, by in right[p] if by < 16) for p in parts})


def of(order: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, order))


def kernel(type_: str, *statements: str) -> Kernel:
    """That in which these statements are edited."""
    return next(one for one in edited(type_) if tuple(made for made, _ in one.said) == statements)


RULES = [
    (
        "Q4_K",
        low_four("Q4_K", "scales", 4, 5, 6, 7),
        "in a block of Q4_K, the scale of sub-blocks p = 4 to 7 is scales[p + 4] & 15 where "
        "(scales[p + 4] & 15) | ((scales[p - 4] >> 6) << 4) belongs",
    ),
    (
        "Q5_K",
        of_parts("Q5_K", "minima", {7: ()}),
        "in a block of Q5_K, the minimum of sub-block 7 is 0 where (scales[11] >> 4) | ((scales[7] >> 6) << 4) belongs",
    ),
    (
        "Q6_K",
        of_parts("Q6_K", "scales", {p: layout_of("Q6_K").scales[p - 8] for p in range(8, 16)}),
        "the scale of sub-blocks p = 8 to 15 is (int8) scales[p - 8] where (int8) scales[p] belongs",
    ),
    ("Q8_0", Shared("scale", "block i ^ 1"), "block i of a row of Q8_0 has the scale of block i ^ 1"),
    ("Q4_1", Shared("minimum", "block i - 2"), "block i of a row of Q4_1 has the minimum of block i - 2"),
    (
        "Q4_K",
        Order(of(J256 & ~96 | (J256 & 32) << 1 | (J256 & 64) >> 1)),
        "in a block of Q4_K, value j is made of nibble j / 64 % 2 of qs[j / 128 * 64 + j % 64] where nibble "
        "j / 32 % 2 of qs[j / 64 * 32 + j % 32] belongs (nibble 0 is the low one)",
    ),
    (
        "Q5_0",
        Order(None, of((J32 % 4) * 8 + J32 // 4)),
        "in a block of Q5_0, value j is made of bit j / 4 of qh[j % 4] where bit j % 8 of qh[j / 8] belongs",
    ),
    (
        "IQ4_NL",
        Scaled(PLAIN, (0.0,) * 16 + (128.0,) * 4 + (0.0,) * 12),
        "in each block of IQ4_NL, kvalues[q] of values 16 to 19 is larger by 128",
    ),
    (  # as picolm reads them
        "Q2_K",
        Order(of(J256 // 128 * 128 + J256 % 4 * 32 + J256 // 4 % 32)),
        "in a block of Q2_K, value j is made of pair of bits j % 4 of qs[j / 4] where pair of bits j / 32 % 4 of "
        "qs[j / 128 * 32 + j % 32] belongs (pair 0 is the lowest)",
    ),
    (
        "Q3_K",
        Order(None, of(J256 & ~224 | (J256 & 96) << 1 | (J256 & 128) >> 2)),
        "of hmask[",
    ),
    (
        "Q6_K",
        kernel("Q6_K", "q3 = b[64 * h + l] >> 4 | (b[128 + 32 * h + l] >> 2 & 3) << 4"),
        "in a block of Q6_K, whose bytes are b, q3 = b[64 * h + l] >> 4 | (b[128 + 32 * h + l] >> 2 & 3) << 4 where "
        "q3 = b[64 * h + l] >> 4 | (b[128 + 32 * h + l] >> 4 & 3) << 4 belongs",
    ),
    (  # in two statements
        "Q5_K",
        kernel(
            "Q5_K",
            "scale = b[4 + j + 4] & 15 | b[4 + j - 4] >> 6 << 2",
            "minimum = b[4 + j + 4] >> 4 | b[4 + j - 0] >> 6 << 2",
        ),
        "scale = b[4 + j + 4] & 15 | b[4 + j - 4] >> 6 << 2 where scale = b[4 + j + 4] & 15 | b[4 + j - 4] >> 6 << 4 "
        "belongs; minimum = b[4 + j + 4] >> 4 | b[4 + j - 0] >> 6 << 2 where",
    ),
    (  # bits of the low nibble with those of the high one
        "Q4_1",
        kernel("Q4_1", "y[l + 16] = d * (b[4 + l] >> 3) + m"),
        "y[l + 16] = d * (b[4 + l] >> 3) + m where y[l + 16] = d * (b[4 + l] >> 4) + m belongs",
    ),
    (
        "Q8_0",
        Scaled(of(J32 < 24), (0.0,) * 32),
        "in each block of Q8_0, q of values 24 to 31 is 0",
    ),
]


@pytest.mark.parametrize("type_", KERNELS)
def test_kernels_read_blocks_as_they_are_read(type_: str) -> None:
    """And each of their edits is another kernel, that ends."""
    raw = np.random.default_rng(1).integers(0, 60, (6, GGML_QUANT_SIZES[GGMLQuantizationType[type_]][1]), np.uint8)
    fields = Fields.of_rows(type_, raw)
    assert np.array_equal(Kernel(KERNELS[type_], ())(fields).values(), fields.values())
    kernels = edited(type_)
    assert len({one.source for one in kernels}) == len(kernels) > 10
    for one in kernels[::7]:
        with np.errstate(all="ignore"):
            assert one(fields).values().shape == fields.values().shape


LONG = {  # of each way to be wrong one type is enough
    ("Q4_1", "Shared"), ("Q4_1", "Kernel"), ("Q4_K", "OfBits"), ("Q5_0", "Order"), ("Q6_K", "OfBits"),
    ("Q8_0", "Scaled"), ("Q5_K", "Kernel"), ("Q2_K", "Order"), ("Q3_K", "Order"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("type_", "rule", "said"),
    [pytest.param(*one, marks=[pytest.mark.slow] * ((one[0], type(one[1]).__name__) in LONG)) for one in RULES],
    ids=[f"{t}-{type(r).__name__}" for t, r, _ in RULES],
)
def test_a_rule_that_nobody_listed_is_told(type_: str, rule: Rule, said: str, models: Models, tmp_path: Path) -> None:
    """In matmuls and in the embedding alike, which are one finding."""
    path = models("k-quants", FILES.get(type_, type_))
    file = GGUFFile(path)
    graph = build_graph(file)

    def is_so(op: Op) -> bool:
        return op.kind in ("linear", "embedding") and file.tensors[op.weights[0].name].type.name == type_

    wrong = [reading(op, EditedBlocks((type_,), rule)) for op in graph if is_so(op)]
    trace = traced(graph.changed(*wrong), file, tmp_path / "t.trace", TOKENS, n_decode=1)
    (finding,) = check_trace(trace, path).findings
    assert said in finding.text
    assert {"token_embd", "blk.1.ffn_up", "blk.2.ffn_gate"} <= {*finding.ops} <= {op.name for op in wrong}


def test_a_rule_of_a_few_rows_of_the_embedding_explains_layers_behind_hidden_states(
    models: Models, tmp_path: Path
) -> None:
    """Five tokens, of one block each, are too few to solve for the bits; one index alone is another."""
    path = models("k-quants", "Q4_K_M")
    file = GGUFFile(path)
    graph = build_graph(file)
    rule = kernel("Q4_K", "scale = b[4 + j + 4] & 15 | b[4 + j - 0] >> 6 << 4")
    wrong = [reading(op, EditedBlocks(("Q4_K",), rule)) for op in graph if op.kind in ("linear", "embedding")]
    trace = trace_graph(graph.changed(*wrong), file, tmp_path / "t.trace", TOKENS[:5], capture="layers")
    (finding,) = check_trace(trace, path).findings
    assert "scale = b[4 + j + 4] & 15 | b[4 + j] >> 6 << 4 where scale = b[4 + j + 4]" in finding.text
    assert {*finding.ops} >= {"token_embd", *(f"blk.{n}.ffn_residual" for n in range(3))}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Shared("scale", "block i ^ 1"), "block i of a row of MXFP4 has the scale of block i ^ 1"),
        (
            Order(of((J32 % 2) * 16 + J32 // 16 + J32 // 2 % 8 * 2)),
            "in a block of MXFP4, value j is made of nibble j % 2 of qs[j / 2 % 8 * 2 + j / 16] where nibble j / 16 of "
            "qs[j % 16] belongs",
        ),
        (Scaled(of(J32 != 31), (0.0,) * 32), "in each block of MXFP4, kvalues[q] of value 31 is 0"),
    ],
)
def test_a_rule_of_experts_is_told(rule: Rule, said: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    path = quantize(tiny("gpt-oss"), tmp_path / "mxfp4.gguf", "MXFP4_MOE")
    file = GGUFFile(path)
    graph = build_graph(file)
    experts = [op for op in graph if op.weights and file.tensors[op.weights[0].name].type.name == "MXFP4"]
    wrong = [reading(op, EditedBlocks(("MXFP4",), rule)) for op in experts]
    trace = traced(graph.changed(*wrong), file, tmp_path / "t.trace", TOKENS, n_decode=0)
    (finding,) = check_trace(trace, path).findings
    assert said in finding.text
    assert {*finding.ops} == {op.name for op in experts}


@pytest.mark.parametrize("type_", FIELDS)
def test_numbers_of_a_block_are_where_its_layout_says(type_: str) -> None:
    layout, n_bytes = layout_of(type_), GGML_QUANT_SIZES[GGMLQuantizationType[type_]][1]
    raw = np.random.default_rng(0).integers(0, 256, (64, n_bytes), np.uint8)
    fields, bits = FIELDS[type_](raw), np.unpackbits(raw, axis=1, bitorder="little").astype(int)
    for sums, right in ((layout.scales, fields.scales), (layout.minima, fields.minima)):
        assert bool(sums) == (right is not None)
        made = [sum(bits[:, bit] * by if bit >= 0 else by for bit, by in part) for part in sums]
        assert right is None or np.array_equal(np.stack(made, 1), right)
    for first, n, right in (
        (layout.low, layout.low_bits, fields.low),
        (layout.high, layout.high_bits, fields.high),
    ):
        made = [sum(bits[:, bit + k] << k for k in range(n)) for bit in first]
        assert right is None or np.array_equal(np.stack(made, 1), right.reshape(len(raw), -1) & (1 << n) - 1)


@pytest.mark.parametrize("said", ["j", "j / 2", "j / 64 * 32 + j % 32", "j / 4 % 2 * 8 + j % 4", "j / 8 * 8 + 3", "0"])
def test_places_are_said_as_they_are_computed(said: str) -> None:
    numbers = np.array([eval(said.replace("/", "//"), {"j": j}) for j in range(256)])
    assert expression(numbers) == said


def test_what_multiplies_all_is_no_rule_of_blocks(models: Models, tmp_path: Path) -> None:
    """A temperature in steps of one token was said to be 1.25 times the integers of Q8_0."""
    model = Model(models("llama", "Q8_0"))

    def hotter(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, weight, bias) * (1.25 if len(x) == 1 else 1)

    wrong = replace(model.graph["output"], function=hotter)
    path = trace_graph(model.graph.changed(wrong), model.file, tmp_path / "a.trace", TOKENS, (7,), (9,))
    (finding,) = check_trace(path, model.path).findings
    assert finding.text == (
        "output, in steps 1, 2: every value is 1.25 times what it should be, in steps of one token alone."
    )


@pytest.mark.slow
def test_a_rule_is_told_by_an_engine_that_is_fed_token_by_token(models: Models, tmp_path: Path) -> None:
    """As most engines in C are: a token's outputs are fewer than the numbers of a rule, those of all steps are not."""
    path = models(replace(SHAPES["k-quants"], n_layer=1), "Q4_K_M")
    file = GGUFFile(path)
    graph = build_graph(file)
    rule = EditedBlocks(("Q4_K",), low_four("Q4_K", "minima", 5, 7))
    wrong = [reading(op, rule) for op in graph if op.weights and op.kind in ("linear", "embedding")]
    trace = trace_graph(graph.changed(*wrong), file, tmp_path / "t.trace", *((token,) for token in TOKENS[:9]))
    (finding,) = check_trace(trace, path).findings
    assert finding.text.startswith("every Q4_K tensor (")
    assert "the minimum of sub-blocks p = 5, 7 is scales[p + 4] >> 4 where" in finding.text
