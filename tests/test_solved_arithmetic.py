"""Activations rounded in ways that no list has: told by what came out of the matmuls, and mistakes beside them stay."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Models, trace_graph
from torch import Tensor

from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.model.weights import reading, values_of
from tracediff.names import Capture
from tracediff.numerics.arithmetic import phrase
from tracediff.numerics.recognise import recognised
from tracediff.numerics.roundings import by_rule, rounding_named
from tracediff.numerics.schemes import scheme_named
from tracediff.pipeline import Effort, check_trace
from tracediff.result import Result

SHAPE = Shape("llama", n_layer=3, n_embd=192, n_head=6, n_head_kv=2, n_ff=448, n_vocab=320, tied=False)
PROMPT = tuple((37 * i + 11) % 250 for i in range(17))
Rounding = Callable[[Tensor], Tensor]


def in_integers(
    size: int,
    scale: Callable[[Tensor], Tensor],
    kept: Callable[[Tensor], Tensor] = lambda scale: scale,
    by_kept: bool = True,
    ends: tuple[int, int] = (-128, 127),
    whole: Callable[[Tensor], Tensor] = torch.round,
) -> Rounding:
    """Groups of `size` values of float32, whose scale is of the largest magnitude."""

    def rounded(x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, size or x.shape[-1]))
        exact = scale(groups.abs().amax(-1, keepdim=True))
        quotients = groups / (kept(exact) if by_kept else exact)
        return (whole(quotients).clamp(*ends) * kept(exact)).flatten(-2)

    return rounded


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


# Engines' own: ik_llama.cpp's block_q8_2, MXINT8 (https://arxiv.org/abs/2310.10537), Atom's clipped ones.
UNLISTED: dict[str, Rounding] = {
    "int8/32 to 128": in_integers(32, lambda largest: largest / 128),
    "int8/32 to 127 by bf16": in_integers(32, lambda largest: largest / 127, to_bfloat16),
    "int8/64 to 127 in bf16": in_integers(64, lambda largest: largest / 127, to_bfloat16, by_kept=False),
    "narrow int8/32 to 128 by 2^n": in_integers(
        32, lambda largest: torch.exp2(torch.floor(torch.log2(largest)) - 6), ends=(-127, 127)
    ),
    "int8/row to 141.1111": in_integers(0, lambda largest: largest * 0.9 / 127),
    "int4/row": in_integers(0, lambda largest: largest / 7, ends=(-8, 7)),
    "int8/16": in_integers(16, lambda largest: largest / 127),
    "int16/row": in_integers(0, lambda largest: largest / 32767, ends=(-32768, 32767)),
    "int8 by 0.05": in_integers(0, lambda largest: torch.full_like(largest, 0.05)),
}


@pytest.mark.parametrize("loud", [1, 30])
@pytest.mark.parametrize("name", UNLISTED)
def test_a_rounding_is_recognised_by_what_it_made(name: str, loud: int) -> None:
    """Seen as well as float32 shows it, and one channel be it that much louder than all others."""
    values = torch.randn(17, 192, generator=torch.Generator().manual_seed(1))
    values[:, 7] *= loud
    rounded = UNLISTED[name](values).double()
    spread = 3e-7 * rounded.square().mean().sqrt()
    seen = rounded + spread * torch.randn(rounded.shape, generator=torch.Generator().manual_seed(2))
    names = recognised(values.double(), seen, spread.expand(192))
    assert name in names or (name == "int8 by 0.05" and names[0].startswith("int8 by 0.0500000"))
    best = rounding_named(names[0])(values.double())
    assert float((best - rounded).abs().gt(1e-3 * rounded.abs()).double().mean()) < 0.005


@pytest.mark.parametrize("name", [name for name in UNLISTED if not name.startswith("int8 by")])
def test_a_report_s_words_may_be_asked_for(name: str) -> None:
    assert scheme_named(phrase("activations", name)).linear.operands == name
    read = scheme_named(phrase("weights", f"{name} then bf16"))
    assert (read.linear.stored, read.held) == (f"{name} then bf16", f"{name} then bf16")
    assert scheme_named(phrase("embedding table", name)).held == name


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_what_is_no_lattice_is_none(share: float) -> None:
    """As it was, or with noise."""
    x = torch.randn(17, 192, generator=torch.Generator().manual_seed(1)).double()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).double()
    assert recognised(x, x + share * 0.01 * noise, torch.full((192,), 1e-7).double()) == []


def traced(model: Model, out: Path, rounded: Rounding, capture: Capture = "all", only: str = "") -> Path:
    """A run whose matmuls, or those with this name alone, multiply rounded activations in float32."""

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = rounded(x.float()) @ weight.float().T
        return y if bias is None else y + bias

    graph = model.graph
    for op in graph:
        if op.kind == "linear" and op.name.endswith(only):
            graph = graph.changed(replace(op, function=matmul))
    return trace_graph(graph, model.file, out, PROMPT, PROMPT[:2], capture=capture)


def said(result: Result) -> set[str]:
    """What matmuls do."""
    return {op.local.arithmetic or "" for op in result.ops if op.local and op.kind == "linear"}


@pytest.mark.parametrize("weights", ["F16", "Q8_0"])
@pytest.mark.parametrize(
    "name", ["int8/32 to 127 by bf16", "narrow int8/32 to 128 by 2^n", pytest.param("int4/row", marks=pytest.mark.slow)]
)
def test_what_no_list_has_matches(name: str, weights: str, models: Models, tmp_path: Path) -> None:
    """All of these diverged: "all 22 matmuls: wrong"."""
    model = Model(models(SHAPE, weights))
    result = check_trace(traced(model, tmp_path / "t.trace", UNLISTED[name]), model)
    assert (result.verdict, said(result)) == ("match", {phrase("activations", name)})


@pytest.mark.parametrize("by_kept", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_matrices_in_integers_with_scales_in_bfloat16_match(
    by_kept: bool, capture: Capture, models: Models, tmp_path: Path
) -> None:
    """An engine in bfloat16 whose int8 rows are multiplied by their scales in it (gemma_pytorch): all matmuls were
    wrong, and the table was said to have scales in float32, or channels exchanged.
    """
    model = Model(models(SHAPE, "F32"))
    held = in_integers(0, lambda largest: largest / 127, to_bfloat16, by_kept)
    held_tensors: dict[str, Tensor] = {}

    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        if info.name not in held_tensors:
            held_tensors[info.name] = to_bfloat16(held(values_of(file, info)))
        return held_tensors[info.name]

    ops = [reading(op, read) for op in model.graph if op.kind in ("linear", "embedding")]
    path, out = (PROMPT, PROMPT[:2], PROMPT[2:3]), tmp_path / "t.trace"
    trace = trace_graph(model.graph.changed(*ops), model.file, out, *path, capture=capture, dtype=torch.bfloat16)
    result = check_trace(trace, model)
    name = by_rule("int8/row", 127, "bf16", by_kept)
    of_table = {op.local.arithmetic for op in result.ops if op.local and op.kind == "embedding"}
    assert (result.verdict, of_table) == ("match", {phrase("embedding table", name).removeprefix("embedding ")})
    assert said(result) == {phrase("weights", f"{name} then bf16")}


@pytest.mark.slow
def test_integers_by_inverse_scales_in_bfloat16_match(models: Models, tmp_path: Path) -> None:
    """Keras' int8 in bfloat16 (quantizers.py, `abs_max_quantize`; dense.py, `_int8_call`): of a token and of a row of
    weights 127 / (amax + 1e-7) is kept, and a token's values are rounded before they become integers. All matmuls were
    wrong.
    """
    model = Model(models(SHAPE, "F32"))

    def by_inverse(x: Tensor) -> tuple[Tensor, Tensor]:
        inverse = torch.full((), 127.0, dtype=x.dtype) / (x.abs().amax(-1, keepdim=True) + 1e-7)
        return (x * inverse).round().clamp(-127, 127).float(), inverse.bfloat16()

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        q, inverse = by_inverse(x.bfloat16())
        weights, of_rows = by_inverse(weight.bfloat16().float())
        y = (q @ weights.T).bfloat16() / (inverse * of_rows.T)
        return y if bias is None else y + bias.bfloat16()

    graph = model.graph.changed(*(replace(op, function=matmul) for op in model.graph if op.kind == "linear"))
    trace = trace_graph(graph, model.file, tmp_path / "t.trace", PROMPT, PROMPT[:2], PROMPT[2:3], dtype=torch.bfloat16)
    result = check_trace(trace, model)
    products = "int8 rows with bfloat16 inverse scales and products with them"
    words = f"activations in {products}, weights in int8 rows with bfloat16 inverse scales"
    assert (result.verdict, said(result)) == ("match", {words})


@pytest.mark.slow
def test_hidden_states_have_what_the_head_tells(models: Models, tmp_path: Path) -> None:
    model = Model(models(SHAPE, "Q8_0"))
    trace = traced(model, tmp_path / "t.trace", UNLISTED["int8/32 to 127 by bf16"], "layers")
    result = check_trace(trace, model, effort=Effort(seconds=0))
    words = {op.local.arithmetic for op in result.ops if op.local and op.op.endswith(("ffn_residual", "output"))}
    assert (result.verdict, words) == ("match", {phrase("activations", "int8/32 to 127 by bf16")})


@pytest.mark.slow
def test_each_matmul_may_have_a_scale_that_was_measured_beforehand(models: Models, tmp_path: Path) -> None:
    """Of the prompt with a margin; matrices of fewer rows than columns do not tell what they multiplied."""
    scales: dict[tuple[int, ...], Tensor] = {}

    def static(x: Tensor) -> Tensor:
        key = (x.shape[-1], int(1000 * x[0, :8].abs().sum())) if len(x) > 1 else (x.shape[-1],)
        scale = scales.setdefault(key, x.abs().max() * 1.3 / 127)
        return (x / scale).round().clamp(-128, 127) * scale

    model = Model(models(SHAPE, "F16"))
    result = check_trace(traced(model, tmp_path / "t.trace", static), model)
    assert result.verdict == "match"
    assert said(result) == {"activations in int8 by a scale of its own"}


@pytest.mark.parametrize(
    ("wrongly", "of"),
    [
        (in_integers(32, lambda largest: largest / 128, whole=torch.trunc), "a cast where a rounding belongs"),
        (in_integers(32, lambda largest: largest / 255), "integers that overflow, and are cut"),
        pytest.param(
            in_integers(32, lambda largest: largest / 127, lambda scale: scale.round(decimals=3)),
            "scales of 3 decimals", marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda x: torch.where(x.abs() < 0.1 * x.abs().amax(-1, keepdim=True), 0.0, x),
            "small values left out", marks=pytest.mark.slow,
        ),
        pytest.param(lambda x: x.clamp(-2, 2), "a clamp", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_nobody_means_is_a_mistake(wrongly: Rounding, of: str, models: Models, tmp_path: Path) -> None:
    model = Model(models(SHAPE, "F16"))
    trace = traced(model, tmp_path / "t.trace", wrongly)
    result = check_trace(trace, model, effort=Effort(seconds=0))
    assert result.verdict == "diverged"
    assert {op.op for op in result.faulty} >= {"blk.0.attn_q", "blk.1.ffn_gate", "output"}


def test_a_mistake_beside_it_is_named(models: Models, tmp_path: Path) -> None:
    model = Model(models(SHAPE, "Q8_0"))
    rounded = UNLISTED["int8/32 to 128"]

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return rounded(x.float()) @ weight.float().T

    def shifted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return matmul(x, weight).roll(1, 1)

    graph = model.graph
    for op in graph:
        if op.kind == "linear":
            graph = graph.changed(replace(op, function=shifted if op.name == "blk.1.attn_v" else matmul))
    trace = trace_graph(graph, model.file, tmp_path / "t.trace", PROMPT, PROMPT[:2])
    result = check_trace(trace, model)
    assert {op.op for op in result.faulty} == {"blk.1.attn_v"}
    assert [finding.text for finding in result.findings] == [
        "attn_v in layer 1: channels rotated: channel 1 has the values of channel 0, and so on around."
    ]
