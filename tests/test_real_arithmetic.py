"""What engines really do: weights requantised, values held in shorter types, rounding on the way to the file.

Each engine here is the torch one with something of its own; what quantises is written again in numpy, as others do it.
"""

import io
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from conftest import TOKENS, Models, some_of, trace_graph
from rich.console import Console
from torch import Tensor

import tracediff
from tracediff.audit.requantised import requantised_as
from tracediff.diagnose.budget import ENDLESS
from tracediff.diagnose.hypothesis import SOLVED, Assumed, Hypothesis
from tracediff.diagnose.kin import Faulty, Kin
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.engine.transformers_run import load
from tracediff.errors import EngineError
from tracediff.judge import Policy
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Op
from tracediff.model.hparams import Rope
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape, quantize
from tracediff.model.tensors import FileTensors
from tracediff.model.weights import Weights
from tracediff.names import split
from tracediff.numerics.arithmetic import Arithmetic, Scheme, in_words
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.activation import swiglu
from tracediff.numerics.kinds.attention import scores, softmax, weighted_values
from tracediff.numerics.kinds.kind import Call
from tracediff.numerics.kinds.linear import columns, linear, mul_mat
from tracediff.numerics.kinds.norm import rms_norm
from tracediff.numerics.kinds.rope import rope_angles
from tracediff.numerics.roundings import read_as, rounding_named
from tracediff.numerics.schemes import SCHEMES, WAYS, scheme_named
from tracediff.pipeline import Effort, check_trace, compare_traces
from tracediff.replay import planning
from tracediff.replay.fitting import Fitting
from tracediff.replay.judging import judge_all
from tracediff.replay.making import Recomputed
from tracediff.replay.plan import Choice
from tracediff.replay.replay import Replay
from tracediff.replay.residual import is_cut_off, turned
from tracediff.replay.score import BLIND
from tracediff.replay.storage import stored_as, stored_in_all
from tracediff.report.terminal import render
from tracediff.result import Result
from tracediff.trace.format import OpRecord
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

SHAPE = Shape("qwen3", n_layer=3, n_embd=128, n_head=4, n_head_kv=2, n_ff=192, n_vocab=320, head_dim=32)
LLAMA = Shape("llama", n_layer=2, n_embd=128, n_head=4, n_head_kv=2, n_ff=256, n_vocab=320, theta=10_000.0, eps=1e-5)


class Writes(TensorWriter):
    """Writes every value in a type that the engine does not compute in."""

    dtype = torch.float32

    def op(self, step: int, name: str, values: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        super().op(step, name, values.to(self.dtype), hidden)


def traced(
    model: Path,
    out: Path,
    *,
    change: Callable[[Op], Op] = lambda op: op,
    held: Callable[[str, np.ndarray], np.ndarray | None] = lambda name, values: None,
    arithmetic: str | None = None,
    computed: torch.dtype = torch.float32,
    written: torch.dtype = torch.float32,
    capture: str = "all",
    says_its_weights: bool = True,
    n_decode: int = 2,
) -> Path:
    """An engine that `change`s ops, holds other weights, and writes its trace in another type."""
    file = GGUFFile(model)
    graph = build_graph(file)
    weights = Weights(file, computed)
    tensors = FileTensors(file)
    mine = {weight.name: held(weight.name, tensors.get(weight.name)) for op in graph for weight in op.weights}
    weights = weights.holding({name: values for name, values in mine.items() if values is not None})
    graph = graph.changed(*(change(op) for op in graph))
    engine = TorchEngine(graph, weights, scheme_named(arithmetic) if arithmetic else None)
    with TraceWriter(out, "mine", graph.hparams.arch, model.name, graph.matmul_type) as writer:
        recorder = Writes(writer, capture)
        recorder.dtype = written
        if says_its_weights:
            engine.record_weights(recorder)
        for step, tokens in enumerate((TOKENS, *((84,), (104,))[:n_decode])):
            first = len(TOKENS) + step - 1 if step else 0
            engine.run(step, StepInput(tokens, tuple(range(first, first + len(tokens)))), recorder)
    return out


def faulty(result: Result) -> list[tuple[int, str]]:
    return [(op.step, op.op) for op in result.ops if op.status == "faulty"]


def said(result: Result, kind: str) -> set[str | None]:
    return {op.arithmetic for op in result.ops if op.kind == kind}


# ---- activations and weights in int8 groups with float32 scales


def quantised(x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers [..., groups, size] and scales [..., groups, 1]: round to nearest, ties away from zero, as in C."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, size)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    quotients = groups / scale
    return np.trunc(quotients + np.copysign(np.float32(0.5), quotients)), scale


def in_groups(
    x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None = None, *, size: int, weights: bool
) -> torch.Tensor:
    """A matmul of integers, group by group; of the weights too, or of these as they are."""
    q, d = quantised(x.numpy(), size)
    if weights:
        w, s = quantised(rows.numpy(), size)
    else:
        w, s = rows.numpy().reshape(len(rows), -1, size), np.ones((len(rows), q.shape[1], 1), np.float32)
    y = np.zeros((len(x), len(rows)), np.float32)
    for group in range(q.shape[1]):
        y += (q[:, group] @ w[:, group].T) * d[:, group] * s[:, group].T
    return torch.from_numpy(y)


@pytest.mark.parametrize(
    ("weights", "size", "requantised"), [("F32", 64, True), ("Q8_0", 32, False), ("F16", 32, True), ("Q8_0", 64, True)]
)
def test_int8_groups_with_float32_scales_are_an_arithmetic(
    weights: str, size: int, requantised: bool, models: Models, tmp_path: Path
) -> None:
    """llama2.c's runq.c quantises the file's weights by itself; others keep them. Every matmul was called faulty."""
    matmul = partial(in_groups, size=size, weights=requantised)
    model = models(LLAMA, weights)
    trace = traced(
        model, tmp_path / "int8.trace", change=lambda op: replace(op, function=matmul) if op.kind == "linear" else op
    )
    result = check_trace(trace, model)
    assert faulty(result) == []
    of = f"int8 groups of {size} with float32 scales"
    expected = f"activations and weights in {of}" if requantised else f"activations in {of}"
    if weights == "Q8_0" and size == 32:  # requantised, these weights are what they were
        expected = f"activations in {of}"
    assert said(result, "linear") == {expected}


def normed_to_a_boundary(x: torch.Tensor, w: torch.Tensor, *, eps: float, token: int = 3) -> torch.Tensor:
    """A norm that has one value of a token halfway between two integers of its block; of token 0 in steps of one."""
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], w, eps)
    if token < len(y) and (token or len(y) == 1):
        y[token, :32] = y[token, :32].clamp(-1.5, 1.5)
        y[token, 0], y[token, 5] = 127 / 64, 54.5 / 64
    return y


def test_an_activation_on_a_boundary_may_go_either_way_beside_requantised_weights(
    models: Models, tmp_path: Path
) -> None:
    """54.5 units are 55 in C and 54 in torch: what that makes was looked for with the file's weights."""

    def change(op: Op) -> Op:
        if op.kind == "linear":
            return replace(op, function=partial(in_groups, size=32, weights=True))
        return replace(op, function=normed_to_a_boundary) if op.name == "blk.1.attn_norm" else op

    result = check_trace(traced(models(LLAMA, "F16"), tmp_path / "t.trace", change=change), models(LLAMA, "F16"))
    assert faulty(result) == [(0, "blk.1.attn_norm")]
    flips = {op.op: op.local.flips for op in result.ops if op.local and op.local.flips}
    assert flips == dict.fromkeys(("blk.1.attn_q", "blk.1.attn_k", "blk.1.attn_v"), 1)


def rounded_as_in_c(x: torch.Tensor) -> torch.Tensor:
    """In blocks of 32 with scales in float16, halves away from 0: ggml's reference, which engines copy."""
    blocks = x.float().unflatten(-1, (-1, 32))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    quotients = blocks / scales.clamp(min=1e-30)
    return (torch.sign(quotients) * torch.floor(quotients.abs() + 0.5) * scales.half().float()).flatten(-2).to(x)


class InIntegers:
    """A matmul, be it of chosen experts, of inputs that are rounded so: sums of integers are exact."""

    def compute(self, call: Call) -> torch.Tensor:
        x, *ids = call.inputs
        rounded, w = rounded_as_in_c(x).double(), call.weights.load(call.op.weights[0]).double()
        if not ids:
            biases = [call.weights.load(bias).double() for bias in call.op.weights[1:]]
            return sum(biases, rounded @ w.T).to(x)
        of_slots = rounded.reshape(len(x), -1, x.shape[-1])
        return (w[ids[0].long()] @ of_slots[..., None]).squeeze(-1).to(x)


@pytest.mark.parametrize(("token", "steps"), [(3, [0]), (0, [1, 2])])
def test_an_activation_of_an_expert_on_a_boundary_may_go_either_way(
    token: int, steps: list[int], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """54.5 units again: of experts it was "all that expert 1 makes is wrong". All experts of a token read it."""

    def change(op: Op) -> Op:
        if op.kind in ("linear", "linear_id"):
            return replace(op, rework=InIntegers())  # type: ignore[arg-type]
        return replace(op, function=partial(normed_to_a_boundary, token=token)) if op.name == "blk.1.ffn_norm" else op

    model = tiny("qwen3moe")
    trace = traced(model, tmp_path / "t.trace", change=change)
    result = check_trace(trace, model, effort=Effort(seconds=0))  # nothing that is known explains the norm
    assert faulty(result) == [(step, "blk.1.ffn_norm") for step in steps]
    flips = {(op.step, op.op): op.local.flips for op in result.ops if op.local and op.local.flips}
    n_used = build_graph(GGUFFile(model))["blk.1.ffn_moe_topk"].axes[-1]
    counts = {"blk.1.ffn_gate_inp": 1, "blk.1.ffn_gate_exps": n_used, "blk.1.ffn_up_exps": n_used}
    assert flips == {(step, name): n for step in steps for name, n in counts.items()}


@pytest.mark.parametrize("rounding", ["q8_0 blocks", "int8 rows with float32 scales"])
def test_activations_in_integers_beside_a_cache_in_float16_are_an_arithmetic(
    rounding: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of an engine of somebody's own, which has no table of GELU as ggml has: behind hidden states it diverged."""
    file = GGUFFile(tiny("gemma2"))
    scheme = scheme_named(f"activations in {rounding}, KV cache in float16")
    path = trace_graph(
        build_graph(file), file, tmp_path / "own.trace", range(40, 57), (7,), (9,), capture="layers", scheme=scheme
    )
    result = check_trace(path, tiny("gemma2"))
    assert (result.verdict, faulty(result)) == ("match", [])


def test_an_arithmetic_that_nobody_knows_is_no_edit_of_an_activation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ggml's table of GELU all is explained, whatever the edit: "values 0 to 2720 are computed, 1 beyond"."""
    sizes = {"embedding_length": 128, "feed_forward_length": 160}
    path = quantize(tiny_models.write("gemma2", tmp_path / "f32.gguf", others=sizes), tmp_path / "q8_0.gguf", "Q8_0")
    model, scheme = Model(path), scheme_named("activations in q8_0 blocks, KV cache in float16")
    steps = range(40, 57), (7,)
    out = trace_graph(model.graph, model.file, tmp_path / "own.trace", *steps, capture="layers", scheme=scheme)
    known = [one for one in SCHEMES if not one.name.startswith("activations in q8_0 blocks, ")]
    known = [one for one in known if not one.values.undivided]  # whose bound has room for it
    monkeypatch.setattr("tracediff.replay.replay.SCHEMES", known)
    monkeypatch.setattr("tracediff.replay.plan.WAYS", ())
    replay = Replay(Trace(out), model.graph, model.weights())
    record = replay.trace.ops[0, "blk.0.ffn_residual"]
    error, act = replay.judge(record), model.graph["blk.0.ffn_act"]
    edited = replace(act, function=lambda gate, up: KINDS[act.kind].function(gate, up) * 1.0)
    said = Assumed(SOLVED, "edited", "edited", False)
    tried = Hypothesis((said,), (edited,), replay.under(record, [edited], error.nmse))
    assert (error.faulty, tried.local.faulty, tried.pays(error)) == (True, False, True)
    one = Faulty(0, record, error)
    assert not Kin(replay, ENDLESS, {(record.step, record.op): error}, [one]).explains(tried, one)


@pytest.mark.parametrize("size", [32, 48, 192])
def test_int8_groups_round_as_engines_do(size: int) -> None:
    x = np.random.default_rng(0).standard_normal((64, 192)).astype(np.float32)
    x[3] = 0
    q, d = quantised(np.where(x == 0, np.float32(1e-30), x), size)
    ours = rounding_named(f"int8/{size if size < 192 else 'row'}")(torch.from_numpy(x.astype(np.float64)))
    np.testing.assert_allclose(ours.numpy(), (q * d.astype(np.float64)).reshape(x.shape), rtol=1e-6, atol=1e-29)


def test_a_cast_to_int8_truncates_as_c_does() -> None:
    x = np.random.default_rng(0).standard_normal((64, 192)).astype(np.float32)
    groups = x.reshape(-1, 32)
    scale = np.abs(groups).max(1, keepdims=True) / np.float32(127)
    expected = (groups / scale).astype(np.int8) * scale.astype(np.float64)
    kept = rounding_named("truncated int8/32")(torch.from_numpy(x).double())
    np.testing.assert_array_equal(kept.numpy(), expected.reshape(x.shape))


# ---- weights that an engine quantises by itself


def in_levels(x: np.ndarray) -> np.ndarray:
    """Of every group of 64 the nearest of 16 levels times the largest magnitude, as bitsandbytes has NF4."""
    groups = x.reshape(-1, 64).astype(np.float32)
    largest = np.abs(groups).max(1, keepdims=True)
    levels = np.array(NF4, np.float32)
    return (levels[np.abs((groups / largest)[..., None] - levels).argmin(-1)] * largest).reshape(x.shape)


def in_four_bits(x: np.ndarray) -> np.ndarray:
    """Integers from -7 to 7, 32 of which share a scale: what many write first."""
    groups = x.reshape(-1, 32).astype(np.float32)
    scale = np.abs(groups).max(1, keepdims=True) / np.float32(7)
    return (np.rint(groups / scale) * scale).reshape(x.shape)


NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
FOUR_BITS = "int4 groups of 32 with float32 scales"
OWN = {"NF4 groups of 64 with float32 values": in_levels, FOUR_BITS: in_four_bits}


@pytest.mark.parametrize("words", OWN)
def test_weights_that_an_engine_quantised_are_an_arithmetic(words: str, models: Models, tmp_path: Path) -> None:
    """All but the head, as libraries do: every matmul was called faulty."""

    def held(name: str, values: np.ndarray) -> np.ndarray | None:
        return OWN[words](values) if name.startswith("blk") and values.ndim == 2 else None

    model = models(LLAMA, "Q8_0" if words == FOUR_BITS else "F16")
    for capture in ("all",) if words == FOUR_BITS else ("all", "layers"):
        trace = traced(model, tmp_path / f"{capture}.trace", held=held, capture=capture, says_its_weights=False)
        result = check_trace(trace, model)
        assert faulty(result) == []
        assert result.verdict == "match"
        of = {op.arithmetic for op in result.ops if op.kind == "linear" and op.op != "output"}
        assert of == ({f"weights in {words}"} if capture == "all" else set())
        assert {op.arithmetic for op in result.ops if op.op == "output"} == {"exact"}


@pytest.mark.slow
def test_what_ggml_adds_up_as_integers_others_multiply_as_floats(models: Models, tmp_path: Path) -> None:
    """Both round the same; the noise of integers is that of blocks, which is too little for an engine's float32."""
    rounded = rounding_named("q8_0")

    def matmul(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.zeros(len(x), len(w))
        held = torch.from_numpy(in_four_bits(w.numpy()))
        for at in range(w.shape[1]):  # one after the other
            y += rounded(x)[:, at : at + 1] * held[:, at]
        return y if bias is None else y + bias

    model = models(Shape("llama", n_layer=1, n_embd=512, n_head=8, n_head_kv=2, n_ff=640, n_vocab=320), "Q8_0")
    path = traced(
        model, tmp_path / "t.trace", change=lambda op: replace(op, function=matmul) if op.kind == "linear" else op
    )
    result = check_trace(path, model)
    assert faulty(result) == []
    assert said(result, "linear") == {f"activations in q8_0 blocks, weights in {FOUR_BITS}"}


def by_division(x: np.ndarray) -> np.ndarray:
    """q8_0 of quotients that are divided, where ggml multiplies by an inverse."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(groups / scale) * scale.astype(np.float16).astype(np.float32)).reshape(x.shape)


@pytest.mark.slow
def test_weights_that_lie_halfway_are_requantised_as_the_others(models: Models, tmp_path: Path) -> None:
    """Of Q6_K many are: 16 of a block whose largest is -32 is 63.5 of 127. How they turn tells another rounding better,
    which explains none of them; what the matrices in Q4_K tell fits.
    """

    def held(name: str, values: np.ndarray) -> np.ndarray | None:
        return by_division(values) if values.ndim == 2 and name != "token_embd.weight" else None

    def rounded(op: Op) -> Op:
        return replace(op, function=partial(in_groups, size=64, weights=False)) if op.kind == "linear" else op

    model = models(Shape("qwen3", n_layer=3, n_embd=256, n_head=4, n_head_kv=2, head_dim=64, n_ff=512), "Q4_K_M")
    trace = traced(model, tmp_path / "t.trace", held=held, change=rounded, says_its_weights=False)
    result = check_trace(trace, model)
    assert {op.local.weight_type for op in result.ops if op.kind == "linear" and op.local} == {"Q4_K", "Q6_K"}
    assert faulty(result) == []
    words = "activations in int8 groups of 64 with float32 scales, weights in q8_0 blocks"
    assert said(result, "linear") == {words}


def test_a_mistake_is_found_behind_weights_that_an_engine_quantised(models: Models, tmp_path: Path) -> None:
    def held(name: str, values: np.ndarray) -> np.ndarray | None:
        return in_four_bits(values) if name.startswith("blk") and values.ndim == 2 else None

    def without_the_last(op: Op) -> Op:
        def matmul(x: torch.Tensor, w: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
            return x[:, :-1] @ w[:, :-1].T

        return replace(op, function=matmul) if op.name == "blk.1.ffn_up" else op

    trace = traced(models(LLAMA, "F16"), tmp_path / "t.trace", held=held, change=without_the_last)
    result = check_trace(trace, models(LLAMA, "F16"))
    assert [finding.text for finding in result.findings] == [
        "ffn_up in layer 1: the sum takes only input channels 0 to 126: the last is left out."
    ]


def in_one_scale(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max().astype(np.float32) / np.float32(127)
    return np.rint(x.astype(np.float32) / scale) * scale


def by_tensor(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A matmul of integers: all activations of a step share a scale, and all weights of a matrix."""
    y = torch.from_numpy(in_one_scale(x.numpy()) @ in_one_scale(rows.numpy()).T)
    return y if bias is None else y + bias


@pytest.mark.slow
def test_one_scale_for_all_of_a_tensor_is_an_arithmetic(models: Models, tmp_path: Path) -> None:
    """Of a large matrix a part is dequantised at a time; and a token's activations depend on the others'."""
    model, words = models(LLAMA, "F16"), "int8 whole tensors with float32 scales"

    def scaled(*given: torch.Tensor) -> torch.Tensor:
        return by_tensor(*given) * 1.05

    for faults, wrong in (([], None), (["blk.1.ffn_up"], "blk.1.ffn_up")):

        def change(op: Op, wrong: str | None = wrong) -> Op:
            if op.kind != "linear":
                return op
            return replace(op, function=scaled if op.name == wrong else by_tensor)

        result = check_trace(traced(model, tmp_path / "t.trace", change=change), model)
        assert sorted({op.op for op in result.faulty}) == faults
        assert f"activations and weights in {words}" in said(result, "linear")
        assert scheme_named(f"activations and weights in {words}").linear.operands == "int8/tensor"
    assert "1.05" in result.findings[0].text


def test_a_part_of_a_matrix_is_held_as_all_of_it_is(models: Models) -> None:
    model = Model(models(LLAMA, "F16"))
    op, arithmetic = model.graph["blk.1.ffn_up"], Arithmetic(stored="int8/tensor")
    weights, at = model.weights(torch.float64), torch.arange(5, 40, 3)
    whole = rounding_named("int8/tensor")(weights.load(op.weights[0]))
    for cut in (slice(0, 30), slice(30, 100)):
        torch.testing.assert_close(
            columns(op.channels(cut), at, weights, arithmetic), whole[cut, at], rtol=1e-6, atol=0
        )


def test_one_scale_for_all_of_a_tensor_is_of_tokens_that_were_not_recorded(models: Models, tmp_path: Path) -> None:
    """Only the last token's logits, as many record them, of activations that were rounded by all tokens'."""
    model = models(LLAMA, "F16")
    path = traced(model, tmp_path / "all.trace", arithmetic="activations and weights in int8/tensor")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("op") == "output" and line["step"] == 0:
            n, width = line["shape"]
            line |= {"rows": [n - 1], "shape": [1, width], "offset": line["offset"] + 4 * (n - 1) * width}
    last = path.with_name("last.trace")
    last.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = check_trace(last, model)
    assert result.verdict == "match"
    assert next(op for op in result.ops if op.op == "output" and op.step == 0).local.nmse < 1e-10


def test_a_cache_of_blocks_beside_queries_in_float32_is_told_by_logits_alone(models: Models, tmp_path: Path) -> None:
    """ggml rounds queries to the blocks that it caches keys in; who reads these as float32 does not."""
    model = models(LLAMA, "F32")
    whole = traced(model, tmp_path / "all.trace", arithmetic="exact, KV cache alone in q8_0 blocks")
    result = check_trace(some_of(whole, tmp_path / "logits.trace", lambda op: op == "output"), model)
    assert result.verdict == "match"
    assert said(result, "linear") == {"KV cache in q8_0 blocks"}


def bits_cut_off(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) >> 16 << 16).view(torch.float32)


def bits_rounded(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16 << 16).view(torch.float32)


@pytest.mark.parametrize(
    ("stored", "kinds", "capture", "said_of"),
    [
        (bits_cut_off, {"add"}, "all", "attn_residual and ffn_residual in both layers"),
        (bits_cut_off, {"linear"}, "all", "all 15 matmuls"),
        pytest.param(bits_cut_off, {"linear"}, "layers", "output", marks=pytest.mark.slow),
        (bits_rounded, {"add", "linear"}, "all", None),
        (bits_rounded, {"add", "linear"}, "layers", None),
    ],
)
def test_values_that_are_cut_off_when_they_are_stored_are_said_to_be(
    stored: Callable[[torch.Tensor], torch.Tensor],
    kinds: set[str],
    capture: str,
    said_of: str | None,
    models: Models,
    tmp_path: Path,
) -> None:
    """By `bits >> 16`, as llama-nuts-and-bolts does: within the floor of bfloat16, but always towards 0."""

    def change(op: Op) -> Op:
        function = KINDS[op.kind].function
        return replace(op, function=lambda *x, **of: stored(function(*x, **of))) if op.kind in kinds else op

    model = models(LLAMA, "F32")
    result = check_trace(traced(model, tmp_path / "t.trace", change=change, capture=capture), model)
    words = f"{said_of}: each value is cut off to bfloat16, towards 0, where rounding belongs."
    assert [one.text for one in result.findings] == ([words] if said_of else [])
    assert result.verdict == ("diverged" if said_of else "match")


def test_what_is_rounded_is_not_taken_for_cut_off_whatever_factor_it_has() -> None:
    """As a row of a norm has whose 1 / rms was rounded as well (mamba2-minimal in bfloat16)."""
    y = torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert is_cut_off(bits_cut_off(y.float()), y, "bf16")
    for off in np.linspace(-1, 1, 81) * 2.0**-7:  # a unit
        assert not is_cut_off(bits_rounded((y * (1 + off)).float()), y, "bf16")


def test_a_match_says_with_which_weights_it_was_judged(models: Models, tmp_path: Path) -> None:
    """A mistake in them, of the size of their rounding, would not show."""
    name, model = "blk.1.ffn_norm.weight", models(LLAMA, "F32")

    def shorter(weight: str, values: np.ndarray) -> np.ndarray | None:
        return torch.from_numpy(values.copy()).bfloat16().float().numpy() if weight == name else None

    trace = traced(model, tmp_path / "t.trace", held=shorter)
    result = check_trace(trace, model)
    assert result.verdict == "match"
    (said_of_weights,) = [line for line in result.details if "weights that it recorded" in line]
    nmse = next(weight.nmse for weight in result.weights if weight.weight == name)
    assert 1e-7 < nmse < 1e-5
    assert said_of_weights == (
        "It was judged with the weights that it recorded: 1 of them is not as in the file, but rounded (up to NMSE "
        f"{nmse:.2e}: {name})."
    )
    assert check_trace(trace, model, policy=Policy(resolve=1e-4)).verdict == "match"
    asked = check_trace(trace, model, policy=Policy(resolve=1e-8))
    assert asked.verdict == "undecided"
    assert any(name in doubt for doubt in asked.undecided)


def with_a_scale_for_all_heads(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax((1, 2), keepdim=True) / 127
    return torch.round(x / scale) * scale


def with_a_least_value(x: torch.Tensor) -> torch.Tensor:
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (most - least) / 255
    return torch.round((x - least) / step) * step + least


def with_a_scale_in_float16(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale.half().float()


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (with_a_scale_for_all_heads, "cache in int8 whole tokens with float32 scales"),
        (with_a_least_value, "cache in 8-bit rows with float32 scales and minima"),
        (with_a_scale_in_float16, "cache in int8 rows with float16 scales"),
    ],
)
def test_a_cache_of_eight_bits_is_an_arithmetic(
    kept: Callable[[torch.Tensor], torch.Tensor], words: str, capture: str, models: Models, tmp_path: Path
) -> None:
    def cached(op: Op) -> Op:
        function = KINDS[op.kind].function
        both = op.kind in ("scores", "weighted_values")
        return replace(op, function=lambda left, held: function(left, kept(held))) if both else op

    model = models(replace(LLAMA, n_embd=192), "F32")  # 48 channels a head
    result = check_trace(traced(model, tmp_path / "t.trace", change=cached, capture=capture), model)
    assert result.verdict == "match"
    of, both = ("weighted_values", "V") if capture == "all" else ("add", "KV")
    assert said(result, of) == {f"{both} {words}"}


class RoundedBefore:
    """A matmul by experts of activations that are rounded before they are sorted by expert."""

    def compute(self, call: Call) -> torch.Tensor:
        q = rounding_named("int8/tensor")
        arithmetic = replace(call.arithmetic, stored="int8/tensor")
        inputs = q(call.inputs[0]), *call.inputs[1:]
        return KINDS["linear_id"].compute(
            replace(call, inputs=inputs, arithmetic=arithmetic, op=replace(call.op, rework=None))
        )


@pytest.mark.slow
def test_experts_share_the_scale_of_all_activations(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny("qwen3moe")

    def change(op: Op) -> Op:
        if op.kind == "linear_id":
            return replace(op, rework=RoundedBefore())
        return replace(op, function=by_tensor) if op.kind == "linear" else op

    result = check_trace(traced(model, tmp_path / "t.trace", change=change), model)
    assert faulty(result) == []
    assert "activations and weights in int8 whole tensors with float32 scales" in said(result, "linear_id")


@pytest.mark.parametrize("capture", ["all", "layers"])
def test_routers_in_floats_are_multiplied_as_they_are_beside_integers(
    capture: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Who rounds activations to integers has another kernel for matrices of floats: of a mixture the routers."""
    model = quantize(tiny("gpt-oss"), tmp_path / "q8_0.gguf", "Q8_0")
    assert {info.type.name for info in GGUFFile(model).tensors.values() if "_inp.weight" in info.name} == {"F32"}
    path = traced(model, tmp_path / "t.trace", capture=capture, arithmetic="activations in int8/32, floats as they are")
    result = check_trace(path, model)
    assert (result.verdict, faulty(result)) == ("match", [])


@pytest.mark.slow
def test_another_tensor_has_a_scale_of_its_own(models: Models, tmp_path: Path) -> None:
    model = models("k-quants", "F16")

    def change(op: Op) -> Op:
        other = (replace(op.weights[0], name="blk.2.attn_k.weight"), *op.weights[1:]) if op.weights else ()
        return replace(op, weights=other) if op.name == "blk.1.attn_v" else op

    path = traced(model, tmp_path / "t.trace", change=change, arithmetic="activations and weights in int8/tensor")
    assert [finding.text for finding in check_trace(path, model).findings] == [
        "attn_v in layer 1: uses attn_k.weight of the layer after where attn_v.weight belongs."
    ]


@pytest.mark.parametrize("name", ["int8/tensor", "fp8/tensor", "uint8/tensor", "affine4/tensor", "full int4/tensor"])
def test_a_whole_tensor_rounds_as_one_row_does(name: str) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    kept = rounding_named(name)(x)
    assert torch.equal(kept, rounding_named(name.replace("tensor", "row"))(x.reshape(1, -1)).reshape(x.shape))
    parts = [rounding_named(name).within(float(x.min()), float(x.max()))(part) for part in x.split(2)]
    assert torch.equal(kept, torch.cat(parts))
    assert rounding_named(name)(x[:0]).shape == (0, 64)


def test_what_torch_quantises_dynamically_is_an_arithmetic(models: Models, tmp_path: Path) -> None:
    """Activations of a step in seven unsigned bits, for int16 sums to hold them; weights of a matrix in eight."""
    model, out = models("k-quants", "F16"), tmp_path / "t.trace"
    loaded, _ = load(model, None, torch.float32, "cpu")
    with warnings.catch_warnings(action="ignore"):
        quantised = torch.ao.quantization.quantize_dynamic(loaded, {torch.nn.Linear}, dtype=torch.qint8)
        with torch.inference_mode(), tracediff.record(quantised, out, gguf=model):
            quantised(torch.tensor([TOKENS]))
    result = check_trace(out, model)
    assert result.verdict == "match"
    activations = "activations in uint7 whole tensors with float32 scales and zeros"
    assert said(result, "linear") == {f"{activations}, weights in wide int8 whole tensors with float32 scales"}


LIBRARIES = {  # torchao's 8da4w and its int8 of both, MNN's blocks, and compressed-tensors' MXFP8 and int8 by channels
    "activations in uint8/row and matrices in wide int4/32":
        "activations in uint8 rows with float32 scales and zeros, "
        "weights in wide int4 groups of 32 with float32 scales",
    "activations and matrices in wide int8/row": "activations and weights in wide int8 rows with float32 scales",
    "matrices in away int4/32": "weights in int4 groups of 32 with float32 scales and ties away from 0",
    "activations and matrices in mxfp8/32": "activations and weights in MXFP8 groups of 32, sums on fp8 tensor cores",
    "matrices in divided int8/row": "weights in divided int8 rows with float32 scales",
}  # fmt: skip


@pytest.mark.parametrize(("arithmetic", "words"), LIBRARIES.items())
def test_what_libraries_multiply_is_found_unasked(arithmetic: str, words: str, models: Models, tmp_path: Path) -> None:
    def up_scaled(op: Op) -> Op:
        if op.name != "blk.1.ffn_up":
            return op
        return replace(op, function=lambda x, weight, bias: 1.03 * (x @ weight.T))

    model = models(LLAMA, "F16")
    right = traced(model, tmp_path / "t.trace", arithmetic=arithmetic, n_decode=0)
    result = check_trace(right, model)
    assert (result.verdict, said(result, "linear")) == ("match", {words})
    wrong = traced(model, tmp_path / "m.trace", arithmetic=arithmetic, n_decode=0, change=up_scaled)
    assert faulty(check_trace(wrong, model, effort=Effort(seconds=0))) == [(0, "blk.1.ffn_up")]


@pytest.mark.parametrize("capture", ["all", "layers"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("weighted_values", "probabilities in float16"),  # all else in float32
        ("linear", "activations in q8_0 blocks by stored scales"),
    ],
)
def test_what_is_rounded_in_one_place_alone_is_found_unasked(
    kind: str, words: str, capture: str, models: Models, tmp_path: Path
) -> None:
    model = models(LLAMA, "F16")
    result = check_trace(
        traced(model, tmp_path / "t.trace", arithmetic=f"exact, {words}", capture=capture, n_decode=0), model
    )
    assert (result.verdict, said(result, kind if capture == "all" else "add")) == ("match", {words})


# ---- exponentials by a polynomial, eight at a time


def test_what_is_hidden_may_be_an_exponential_of_next_to_nothing(models: Models, tmp_path: Path) -> None:
    """MNN takes exp of -87 for all that is less: 1.65e-38, where 0 belongs."""

    def clamped(op: Op) -> Op:
        def function(scores: Tensor, queries: Tensor, keys: Tensor, *, scale: float, **hides: Any) -> Tensor:
            unseen = keys > queries.unsqueeze(-1)
            scaled = (scores * scale).masked_fill(unseen, -math.inf)
            powers = torch.exp((scaled - scaled.amax(-1, keepdim=True)).clamp(min=-87.0))
            return powers / powers.sum(-1, keepdim=True)

        return replace(op, function=function) if op.name.endswith("attn_probs") else op

    model = models(LLAMA, "F16")
    path = traced(model, tmp_path / "t.trace", change=clamped, n_decode=0)
    probabilities = Trace(path)
    record = probabilities.ops[0, "blk.0.attn_probs"]
    assert 0 < probabilities.values(record)[0, 0, 1] < 2e-38
    assert check_trace(path, model).verdict == "match"


def exponentials(x: np.ndarray) -> np.ndarray:
    """Of one row: 2^n times Horner's form of 2^f in float32 for whole vectors of eight, the library's for the rest."""
    x, e = x.astype(np.float32), np.exp(x.astype(np.float32))
    whole = len(x) // 8 * 8
    y = x[:whole] * np.float32(math.log2(math.e))
    f = y - np.rint(y)
    p = np.zeros_like(f)
    for k in range(4, -1, -1):
        p = p * f + np.float32(math.log(2) ** k / math.factorial(k))
    e[:whole] = np.ldexp(p, np.rint(y).astype(int))
    return e


Exponentials = Callable[[np.ndarray], np.ndarray]  # of one row


def softmax_with(
    of: Exponentials, scores: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, *, scale: float
) -> torch.Tensor:
    y = np.zeros(scores.shape, np.float32)
    for head, token in np.ndindex(*scores.shape[:2]):
        n = int(queries[token]) + 1
        row = scores[head, token, :n].numpy().astype(np.float32) * np.float32(scale)
        e = of(row - row.max())
        y[head, token, :n] = e / e.sum(dtype=np.float32)
    return torch.from_numpy(y)


def swiglu_with(of: Exponentials, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    e = np.stack([of(-row) for row in gate.numpy()])
    return gate / torch.from_numpy(1 + e) * up


def with_exponentials(of: Exponentials, op: Op) -> Op:
    kinds = {"softmax": softmax_with, "swiglu": swiglu_with}
    return replace(op, function=partial(kinds[op.kind], of)) if op.kind in kinds else op


def by_vectors(op: Op) -> Op:
    """distributed-llama's nn-cpu-ops.cpp, `expf_avx2`, is up to 4.2e-5 off: each of both kinds was called faulty."""
    return with_exponentials(exponentials, op)


def from_table(x: np.ndarray) -> np.ndarray:
    """ggml's table of 2023: float16 to float16."""
    return np.exp(x.astype(np.float16).astype(np.float32)).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("capture", ["all", "layers"])
def test_exponentials_from_a_table_of_float16_are_an_arithmetic(capture: str, models: Models, tmp_path: Path) -> None:
    """crabml has it still: "right up to 8e-05 of it" was said of both in every layer."""
    by_table = partial(with_exponentials, from_table)
    trace = traced(models(LLAMA), tmp_path / "t.trace", change=by_table, capture=capture)
    result = check_trace(trace, models(LLAMA))
    assert result.verdict == "match"
    kinds = ("softmax", "swiglu") if capture == "all" else ("add",)
    assert {words for kind in kinds for words in said(result, kind)} == {"exponentials looked up in float16"}


def in_older_q8_k(x: np.ndarray) -> np.ndarray:
    """quantize_row_q8_K_reference of 2023: the value of largest magnitude becomes -128."""
    blocks = x.astype(np.float32).reshape(-1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    inverse = np.float32(-128) / largest
    return (np.minimum(127, np.rint(inverse * blocks)) / inverse).reshape(x.shape)


def test_the_q8_k_of_older_engines_is_an_arithmetic(models: Models, tmp_path: Path) -> None:
    """Of -128: every matmul of crabml was wrong."""

    def quantised(op: Op) -> Op:
        def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            return linear(torch.from_numpy(in_older_q8_k(x.numpy())), *weights)

        return replace(op, function=function) if op.kind == "linear" else op

    model = models(replace(LLAMA, n_embd=256))
    result = check_trace(traced(model, tmp_path / "t.trace", change=quantised), model)
    assert result.verdict == "match"
    assert said(result, "linear") == {"activations in older q8_K blocks"}


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_queries_that_are_scaled_before_they_are_rounded_are_an_arithmetic(
    capture: str, models: Models, tmp_path: Path
) -> None:
    """Of 32 channels a head 32^-0.5 is no power of two, so other digits are lost."""

    def scaled(op: Op) -> Op:
        def of_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return scores((q * 32**-0.5).half().float(), k.half().float()) * 32**0.5

        def of_values(probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return weighted_values(probs.half().float(), v.half().float())

        of = {"scores": of_scores, "weighted_values": of_values}
        return replace(op, function=of[op.kind]) if op.kind in of else op

    result = check_trace(traced(models(SHAPE), tmp_path / "t.trace", change=scaled, capture=capture), models(SHAPE))
    assert result.verdict == "match"
    both = "Q in float16 of scaled values, KV cache in float16, probabilities in float16"
    of = {"scores": {"Q in float16 of scaled values, K cache in float16"}} if capture == "all" else {"add": {both}}
    assert {kind: said(result, kind) for kind in of} == of


def test_exponentials_by_polynomials_are_an_arithmetic(models: Models, tmp_path: Path) -> None:
    model = models(LLAMA)
    result = check_trace(traced(model, tmp_path / "all.trace", change=by_vectors), model)
    assert faulty(result) == []
    assert said(result, "softmax") == {"exponentials by polynomials of degree 4, 8 at a time"} == said(result, "swiglu")
    assert all(op.local and op.local.nmse < 1e-13 for op in result.ops if op.kind in ("softmax", "swiglu"))
    states = check_trace(traced(model, tmp_path / "states.trace", change=by_vectors, capture="layers"), model)
    assert faulty(states) == []
    assert said(states, "add") == {"exponentials by polynomials of degree 4, 8 at a time"}  # "exact" was near enough


def without_subnormal_numbers(name: str, values: np.ndarray) -> np.ndarray | None:
    """As llama3.java reads matrices in float16."""
    return None if values.ndim == 1 or "embd" in name else np.where(np.abs(values) < 2.0**-14, 0, values)


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_weights_whose_subnormal_numbers_are_read_as_0_are_an_arithmetic(
    capture: str, models: Models, tmp_path: Path
) -> None:
    """They leave 1e-10 of a matmul: no rival was asked for, and every matmul diverged."""
    model = models(LLAMA, "F16")
    trace = traced(model, tmp_path / "t.trace", held=without_subnormal_numbers, capture=capture, says_its_weights=False)
    result = check_trace(trace, model)
    assert result.verdict == "match"
    assert said(result, "linear") == {"weights in float16 without subnormal numbers"}


def test_what_reads_rows_of_a_table_in_half_precision_is_held_to_float32(models: Models, tmp_path: Path) -> None:
    """They fit bfloat16, as if who wrote the trace had rounded them, but what is computed fits it not: the first layer
    was allowed a squared error of 1e-4.
    """

    def table(name: str, values: np.ndarray) -> np.ndarray | None:
        return torch.from_numpy(values).bfloat16().float().numpy() if name == "token_embd.weight" else None

    trace = traced(models(LLAMA), tmp_path / "t.trace", held=table, capture="layers")
    result = check_trace(trace, models(LLAMA))
    assert result.verdict == "match"
    assert said(result, "embedding") == {"table in bfloat16"}
    assert max(op.local.floor for op in result.ops if op.local and op.op == "blk.0.ffn_residual") < 1e-9


def test_ops_that_alone_are_rounded_are_named(models: Models, tmp_path: Path) -> None:
    """What one kind of op does otherwise may be meant or not: "activations in bfloat16 (2)" did not say which."""

    def rounded(op: Op) -> Op:
        def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            return linear(x.bfloat16().to(x), *weights)

        return replace(op, function=function) if op.name.endswith("attn_output") else op

    trace = traced(models(LLAMA), tmp_path / "t.trace", change=rounded, n_decode=0)
    result = check_trace(trace, models(LLAMA))
    assert result.verdict == "match"
    said = next(one.text for one in result.said if one.about == "arithmetic")
    assert said.startswith("linear exact (13) / activations in bfloat16 (2: attn_output); scores exact (2)")


def in_float64_behind_rope(op: Op) -> Op:
    """As numpy makes it where the table of angles is float64: projections of the first layer alone are in float32."""
    if op.name in ("blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"):
        return replace(op, function=lambda x, weight, bias=None: (x.float() @ weight.float().T).double())
    return op


def test_what_numpy_promotes_to_float64_is_no_mistake(models: Models, tmp_path: Path) -> None:
    """Of hidden states in float64 all that lies between was held to float64's noise: llama3.np diverged in layer 0."""
    options: dict[str, Any] = {"computed": torch.float64, "written": torch.float64, "capture": "layers"}
    trace = traced(models(LLAMA), tmp_path / "t.trace", change=in_float64_behind_rope, **options)
    assert check_trace(trace, models(LLAMA)).verdict == "match"


def test_an_engine_in_float64_may_have_the_numbers_that_were_written(models: Models, tmp_path: Path) -> None:
    """The file holds an eps of 1e-5 in float32, 3e-8 less than that: "eps is 1e-05 instead of 1e-05" was said."""

    def as_written(op: Op) -> Op:
        return op.with_attrs(eps=1e-5) if "eps" in op.attrs else op

    assert build_graph(GGUFFile(models(LLAMA)))["output_norm"].attrs["eps"] != 1e-5
    options: dict[str, Any] = {"computed": torch.float64, "written": torch.float64}
    trace = traced(models(LLAMA), tmp_path / "t.trace", change=as_written, **options)
    assert check_trace(trace, models(LLAMA)).verdict == "match"

    def another(op: Op) -> Op:
        return op.with_attrs(eps=1.1e-5) if "eps" in op.attrs else op

    result = check_trace(traced(models(LLAMA), tmp_path / "w.trace", change=another, **options), models(LLAMA))
    assert {op for _, op in faulty(result)} == {op.op for op in result.ops if op.kind == "rms_norm"}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_engine_in_float64_may_write_float32(family: str, models: Models, tmp_path: Path) -> None:
    """As numpy's do. Where what a layer adds and the stream nearly cancel, the sum of what was written is off by up to
    200 roundings: residuals of all layers diverged.
    """
    options: dict[str, Any] = {"computed": torch.float64, "written": torch.float32}
    result = check_trace(traced(models(family), tmp_path / "t.trace", **options), models(family))
    assert result.verdict == "match"
    words = "sums are not those of their terms: the engine has more than float32, or fuses operations. The floors of"
    assert [note for note in result.notes if words in note and "write float64" in note]


def test_ids_of_experts_are_rounded_by_nobody(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """With what rounding may have taken from them they were others: matmuls of experts were undecided, or blind."""
    model = Model(tiny("qwen3moe"))
    path = tmp_path / "t.trace"
    with TraceWriter(path, "float64", model.graph.hparams.arch) as writer:
        recorder = Writes(writer, "all")
        recorder.dtype = torch.float32
        engine = TorchEngine(model.graph, model.weights(torch.float64))
        engine.run(0, StepInput(TOKENS, tuple(range(len(TOKENS)))), recorder)
    result = check_trace(path, model.path)
    assert result.verdict == "match"
    assert any("sums are not those of their terms" in note for note in result.notes)
    floors = [op.local.floor for op in result.ops if op.local and op.op.endswith("_exps")]
    assert floors
    assert max(floors) < 1e-10


def test_a_residual_may_be_added_before_the_sum_is_rounded(models: Models, tmp_path: Path) -> None:
    """As BLAS does with beta = 1: to a sum in more digits than the product, which is recorded, is rounded to."""
    sums: dict[str, Tensor] = {}

    def change(op: Op) -> Op:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            sums[op.name] = x.double() @ weight.double().T
            return sums[op.name].float()

        if op.kind == "linear" and op.name.endswith(("attn_output", "ffn_down")):
            return replace(op, function=product)
        if op.kind == "add" and op.name.endswith("_residual"):
            first = next(name for name in op.inputs if name.endswith(("attn_output", "ffn_down")))
            other = 1 - op.inputs.index(first)
            return replace(op, function=lambda *xs: (sums[first] + xs[other].double()).float())
        return op

    trace = traced(models(LLAMA), tmp_path / "t.trace", change=change)
    assert check_trace(trace, models(LLAMA)).verdict == "match"


@pytest.mark.parametrize("capture", ["all", "layers"])
def test_norms_and_rope_of_an_engine_in_float64_may_be_in_float32(capture: str, models: Models, tmp_path: Path) -> None:
    """transformers' models ask for float32 in norms, rope and softmax, whatever the model is in."""

    def in_single(op: Op) -> Op:
        of = KINDS[op.kind].function
        if op.kind == "rope":
            return replace(op, function=partial(of, tables=lambda x: x.float().double()))
        if op.kind == "rms_norm":
            return replace(op, function=lambda x, w, eps: of(x.float(), eps=eps).double() * w)
        if op.kind == "softmax":
            return replace(op, function=lambda x, *others, **attrs: of(x.float(), *others, **attrs).double())
        return op

    options: dict[str, Any] = {"computed": torch.float64, "written": torch.float64, "capture": capture}
    trace = traced(models(LLAMA), tmp_path / "t.trace", change=in_single, **options)
    result = check_trace(trace, models(LLAMA))
    assert result.verdict == "match"
    if capture == "all":
        assert said(result, "rope") == said(result, "rms_norm") == {"computed in float32"}
        assert said(result, "linear") == {"exact"}


def test_values_halfway_between_two_of_float16_may_go_away_from_0(models: Models, tmp_path: Path) -> None:
    """As of engines in C that add half a unit by hand: one value in 8,192, so most records tell nothing of it."""
    away, shape = rounding_named("away f16"), replace(LLAMA, n_head_kv=4, n_layer=8)
    x = torch.tensor([1 + 2**-11, -1 - 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, 65504.0, 1e-7])
    assert away(x).tolist() == [1 + 2**-10, -1 - 2**-10, 1 + 2**-9, 1 + 2**-10, 65504.0, float(x[-1].half())]

    def cached(op: Op) -> Op:
        if op.kind not in ("scores", "weighted_values"):
            return op
        return replace(op, function=lambda left, held: KINDS[op.kind].function(left, away(held)))

    trace = traced(models(shape), tmp_path / "t.trace", change=cached)
    held = [r for r in Trace(trace).ops.values() if r.op.endswith(("attn_k_rope", "attn_v"))]
    values = torch.cat([torch.from_numpy(Trace(trace).values(r)).flatten() for r in held])
    assert 0 < int((away(values) != values.half().float()).sum()) < 12
    result = check_trace(trace, models(shape))
    assert result.verdict == "match"
    words = said(result, "scores") | said(result, "weighted_values")  # which of K and V has one the CPU's sums decide
    assert words >= {"K cache in float16", "V cache in float16"}
    assert any(of.endswith("cache in float16 with ties away from 0") for of in words if of)


def test_a_mistake_is_found_behind_exponentials_by_polynomials(models: Models, tmp_path: Path) -> None:
    def unscaled(op: Op) -> Op:
        return by_vectors(op if op.kind != "softmax" else op.with_attrs(scale=op.attrs["scale"] * 1.01))

    result = check_trace(traced(models(LLAMA), tmp_path / "t.trace", change=unscaled), models(LLAMA))
    assert {op for _, op in faulty(result)} == {"blk.0.attn_probs", "blk.1.attn_probs"}
    assert [finding.text for finding in result.findings] == [
        "attn_probs in both layers: the attention scale is 0.178544 instead of 0.176777."
    ]


def test_a_wrong_line_is_found_behind_exponentials_by_polynomials(models: Models, tmp_path: Path) -> None:
    def signless(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        e = np.stack([exponentials(row) for row in gate.numpy()])
        return gate / torch.from_numpy(1 + e) * up

    def change(op: Op) -> Op:
        return replace(op, function=signless) if op.kind == "swiglu" else by_vectors(op)

    result = check_trace(traced(models(LLAMA), tmp_path / "t.trace", change=change), models(LLAMA))
    assert [finding.text for finding in result.findings] == [
        "ffn_act in both layers: silu is computed with ffn_gate, where -ffn_gate belongs."
    ]


def by_tanh(op: Op) -> Op:
    """ONNX Runtime's sigmoid is 1/2 and an odd function, as far off where it is small: SwiGLU was called faulty."""

    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate * (0.5 + 0.5 * torch.tanh(0.5 * gate)) * up

    return replace(op, function=swiglu) if op.kind == "swiglu" else op


def test_a_sigmoid_may_be_a_half_and_an_odd_function(models: Models, tmp_path: Path) -> None:
    result = check_trace(traced(models(LLAMA), tmp_path / "t.trace", change=by_tanh), models(LLAMA))
    assert faulty(result) == []
    assert said(result, "swiglu") == {"exact"}


# ---- what is added to the residual in 8-bit blocks


def sent(x: torch.Tensor) -> torch.Tensor:
    """What is left of float32 values that are sent as blocks of 32 integers with a scale in float16."""
    blocks = x.numpy().astype(np.float32).reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    integers = np.rint(blocks * (np.float32(1) / scale))
    return torch.from_numpy((integers * scale.astype(np.float16).astype(np.float32)).reshape(x.shape))


def sends(op: Op) -> Op:
    """distributed-llama rounds so what a layer adds, be it one node: each residual was called wrong."""
    residual = op.kind == "add" and not op.weights
    return replace(op, function=lambda branch, stream: sent(branch) + stream) if residual else by_vectors(op)


def test_what_is_added_to_the_residual_may_be_rounded(models: Models, tmp_path: Path) -> None:
    model = models(LLAMA)
    result = check_trace(traced(model, tmp_path / "all.trace", change=sends), model)
    assert faulty(result) == []
    assert said(result, "add") == {"what is added to the residual in q8_0 blocks"}
    states = check_trace(traced(model, tmp_path / "states.trace", change=sends, capture="layers"), model)
    assert faulty(states) == []
    assert all("what is added to the residual in q8_0 blocks" in str(words) for words in said(states, "add"))


def test_gf4_is_decoded_to_what_it_rounds_to() -> None:
    """By calm's words of 32 bits: `gf4_ff` in src/infer.c, of what `gf4` in tools/convert.py packs."""
    rows = np.random.default_rng(5).standard_normal((6, 40)).astype(np.float32)
    rows[1, 8:16] = 0.0
    eights = torch.from_numpy(rows).unflatten(-1, (-1, 8))
    largest = eights.gather(-1, eights.abs().argmax(-1, keepdim=True)).to(torch.float8_e5m2)
    quotients = torch.nan_to_num(eights / largest.float(), 0.0, 0.0, 0.0).half()
    codes = (quotients * -4 + 4).clamp(0, 7).round().int().numpy()
    words = (codes.astype(np.uint32) << (8 + 3 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    words += largest.view(torch.uint8).squeeze(-1).numpy()
    scale = ((words & 0xFF) << 8).astype(np.uint16).view(np.float16).astype(np.float32) / -4
    decoded = [(((words >> (8 + 3 * k)) & 7).astype(np.int64) - 4) * scale for k in range(8)]
    rounded = rounding_named("gf4")(torch.from_numpy(rows)).numpy()
    assert np.array_equal(rounded, np.stack(decoded, -1).reshape(rows.shape).astype(np.float32))
    assert 0.005 < np.square(rounded - rows).sum() / np.square(rows).sum() < 0.05


def test_asymmetric_groups_hold_zero_and_the_ends() -> None:
    x = torch.tensor([[-1.0, 0.0, 0.5, 3.0], [2.0, 2.5, 2.75, 4.0]], dtype=torch.float64)
    kept = rounding_named("uint8/row")(x)
    scale = torch.tensor([[4 / 255], [4 / 255]])
    assert float((kept - x).abs().max()) <= float(scale.max()) / 2 * (1 + 1e-6)
    assert float(kept[0, 1]) == 0.0
    assert len({round(float(v)) for v in (kept / scale)[1]}) == 4


# ---- weights in another type than the file's


def in_half(name: str, values: np.ndarray) -> np.ndarray | None:
    return values.astype(np.float16) if "norm" in name else None


def test_recorded_norm_weights_are_what_norms_are_replayed_with(models: Models, tmp_path: Path) -> None:
    """Held in float16, written as they are held: three norms diverged, though the trace says what they used."""
    model = models(SHAPE, "Q8_0")
    result = check_trace(traced(model, tmp_path / "norms.trace", held=in_half), model)
    assert faulty(result) == []
    assert {weight.status for weight in result.weights} == {"rounded"}
    assert said(result, "rms_norm") == {"exact"}


def test_norm_weights_that_were_not_recorded_are_found_to_be_half_precision(models: Models, tmp_path: Path) -> None:
    model = models(SHAPE, "Q8_0")
    result = check_trace(traced(model, tmp_path / "norms.trace", held=in_half, says_its_weights=False), model)
    assert faulty(result) == []
    assert said(result, "rms_norm") == {"norm weights in float16"}


@pytest.mark.parametrize(
    ("size", "words", "columns"),
    [(64, "groups of 64", False), (16, "groups of 16", False), (128, "whole rows", False),
     (32, "groups of 32 along columns", True)],
)  # fmt: skip
def test_a_recorded_weight_is_recognised_as_requantised(
    size: int, words: str, columns: bool, models: Models, tmp_path: Path
) -> None:
    """And the op is judged with it: no arithmetic needs to be found for it. Who holds a matrix transposed has groups of
    columns.
    """

    def requantised(name: str, values: np.ndarray) -> np.ndarray | None:
        if name != "blk.1.attn_q.weight":
            return None
        held = np.ascontiguousarray(values.T) if columns else values
        q, d = quantised(held, size)
        held = (q * d).reshape(held.shape).astype(np.float32)
        return np.ascontiguousarray(held.T) if columns else held

    model, trace = models(SHAPE, "F32"), tmp_path / "weights.trace"
    traced(model, trace, held=requantised)
    ours = FileTensors(GGUFFile(model)).get("blk.1.attn_q.weight")
    append_weight(trace, "blk.1.attn_q.weight", requantised("blk.1.attn_q.weight", ours))
    result = check_trace(trace, model)
    (weight,) = (weight for weight in result.weights if weight.weight == "blk.1.attn_q.weight")
    error = float(np.square(requantised("blk.1.attn_q.weight", ours) - ours).sum() / np.square(ours).sum())
    assert weight.status == "rounded"
    assert weight.note == f"as an 8-bit requantisation in {words} of the right values would be (NMSE {error:.1e})"
    assert faulty(result) == []
    assert {op.arithmetic for op in result.ops if op.op == "blk.1.attn_q"} == {"exact"}
    assert f"1 weight that it recorded is as an 8-bit requantisation in {words} of the right values" in words_of(result)


@pytest.mark.parametrize(("words", "quantise"), OWN.items())
def test_four_bits_of_a_recorded_weight_are_recognised(
    words: str, quantise: Callable[[np.ndarray], np.ndarray]
) -> None:
    of = "a 4-bit requantisation in groups of 32" if words == FOUR_BITS else "an NF4 requantisation in groups of 64"
    right = np.random.default_rng(3).standard_normal((96, 192)).astype(np.float32)
    held = quantise(right)
    said = requantised_as(right, held)
    assert said
    assert said.startswith(f"as {of} of the right values would be (NMSE ")
    assert requantised_as(right, np.roll(held, 1)) is None


def by_zero_points(values: np.ndarray) -> np.ndarray:
    """Three bits in groups of 64, of which 0 is one, computed in float16."""
    x = values.reshape(-1, 64).astype(np.float16)
    least, most = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = (most - least + np.float16(1e-4)) / np.float16(7)
    zero = np.round(-least / scale)
    integers = np.clip(np.round(x / scale) + zero, 0, 7)
    return ((integers - zero) * scale).astype(np.float32).reshape(values.shape)


def by_means(values: np.ndarray) -> np.ndarray:
    """The nearest of eight values that each row has for itself: means of what is nearest to them, all but."""
    levels = np.quantile(values, (np.arange(8) + 0.5) / 8, axis=-1).T
    for _ in range(20):
        nearest = np.abs(values[..., None] - levels[:, None]).argmin(-1)
        of = nearest[..., None] == np.arange(8)
        levels = (values[..., None] * of).sum(1) / of.sum(1).clip(1)
    nearest = np.abs(values[..., None] - levels[:, None]).argmin(-1)
    return np.take_along_axis(levels, nearest, -1).astype(np.float32)


@pytest.mark.parametrize(
    ("quantise", "groups"),
    [(by_zero_points, "groups of 64"), pytest.param(by_means, "whole rows", marks=pytest.mark.slow)],
)
def test_an_engine_whose_weights_nobody_knows_is_judged_by_those_that_it_recorded(
    quantise: Callable[[np.ndarray], np.ndarray], groups: str, models: Models, tmp_path: Path
) -> None:
    """Unrecorded, every matmul is called wrong, and the report asks for them. A mistake of 1 in 1,000 is still seen."""

    def held(name: str, values: np.ndarray) -> np.ndarray | None:
        return quantise(values) if values.ndim == 2 else None

    def scaled(op: Op) -> Op:
        if op.name != "blk.1.ffn_up":
            return op
        return replace(op, function=lambda x, weight, bias=None: 1.001 * (x @ weight.T))

    def trace(change: Callable[[Op], Op], name: str) -> Path:
        out = traced(model, tmp_path / f"{name}.trace", change=change, held=held, n_decode=0)
        for weight in matrices:
            append_weight(out, weight, quantise(tensors.get(weight)))
        return out

    model = models(LLAMA, "F16")
    tensors = FileTensors(GGUFFile(model))
    matrices = {weight.name for op in build_graph(tensors.file) for weight in op.weights if len(weight.shape) == 2}
    result = check_trace(trace(lambda op: op, "t"), model)
    assert result.verdict == "match"
    notes = {weight.note.partition(" (")[0] for weight in result.weights if weight.note}
    assert notes == {f"as a requantisation to 8 levels at most in {groups} of the right values would be"}
    assert said(result, "linear") == {"exact"}
    assert faulty(check_trace(trace(scaled, "m"), model, effort=Effort(seconds=0))) == [(0, "blk.1.ffn_up")]
    unsaid = traced(model, tmp_path / "u.trace", held=held, capture="layers", says_its_weights=False, n_decode=0)
    result = check_trace(unsaid, model, effort=Effort(seconds=0))
    assert result.verdict == "diverged"
    assert result.next.why.startswith("after the engine has recorded token_embd.weight as it holds them")


def scaled_in_half_precision(values: np.ndarray) -> np.ndarray:
    """Integers of six bits of which each is 1.2% too large."""
    return rounding_named("bf16")(1.012 * rounding_named("int6/row")(torch.from_numpy(values))).numpy()


def unloaded(values: np.ndarray, where: Any) -> np.ndarray:
    """The same with zeros there."""
    values = values.copy()
    values[where] = 0
    return values


WRONGLY = {
    "multiplied": lambda x: 1.04 * x,
    "offset": lambda x: x + 0.1,
    "cut": lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32),
    "of another row": lambda x: np.roll(by_means(x), 1, axis=0),
    "one value": lambda x: by_means(x) + 0.5 * (np.arange(x.size).reshape(x.shape) == 9000),
    "all the same": np.ones_like,
    "never loaded": np.zeros_like,
    "signs": np.sign,
    "levels multiplied": lambda x: 1.03 * by_means(x),
    "levels multiplied in half precision": scaled_in_half_precision,
    "noise": lambda x: x + 3e-7 * np.random.default_rng(4).standard_normal(x.shape),
    "the largest alone": lambda x: np.where(x == x.max(-1, keepdims=True), 1.7 * by_means(x), by_means(x)),
    "half of the rows": lambda x: unloaded(x, slice(48)),
    "half of the columns": lambda x: unloaded(x, (slice(None), slice(96))),
    "one row of levels": lambda x: unloaded(by_means(x), 7),
    "rounded down, or up": lambda x: np.where(np.arange(96)[:, None] % 2, np.floor(4 * x), np.ceil(4 * x)) / 4,
}


@pytest.mark.parametrize("wrongly", WRONGLY)
@pytest.mark.parametrize("of_four_bits", [False, True])
def test_what_is_wrong_is_no_requantisation(wrongly: str, of_four_bits: bool) -> None:
    right = np.random.default_rng(3).standard_normal((96, 192)).astype(np.float32)
    right = in_four_bits(right) if of_four_bits else right
    held = np.asarray(WRONGLY[wrongly](right)).astype(np.float32)
    assert not np.array_equal(held, right)
    assert requantised_as(right, held) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp8/row", "a float8 requantisation in whole rows"),
        ("fp8/128x128", "a float8 requantisation in blocks of 128 x 128"),
        ("e5m2", "an E5M2 requantisation"),
        ("e4m3", "an E4M3 requantisation"),
        ("gf4", "a gf4 requantisation"),  # calm's, whose records of it were wrong
    ],
)
def test_short_floats_of_a_recorded_weight_are_recognised(name: str, words: str) -> None:
    right = np.random.default_rng(3).standard_normal((200, 256)).astype(np.float32)
    said = requantised_as(right, rounding_named(name)(torch.from_numpy(right)).numpy())
    assert said is not None
    assert said.startswith(f"as {words} of the right values would be (NMSE ")


def test_one_value_beyond_its_step_is_no_requantisation() -> None:
    right = np.random.default_rng(3).standard_normal((96, 192)).astype(np.float32)
    held = in_four_bits(right)
    assert requantised_as(right, held)
    held[50, 7] += 1
    assert requantised_as(right, held) is None


def test_another_tensor_is_no_requantisation(models: Models, tmp_path: Path) -> None:
    model, trace = models(SHAPE, "F32"), tmp_path / "weights.trace"
    traced(model, trace)
    append_weight(trace, "blk.1.attn_q.weight", FileTensors(GGUFFile(model)).get("blk.0.attn_q.weight"))
    result = check_trace(trace, model)
    assert {w.status for w in result.weights if w.weight == "blk.1.attn_q.weight"} == {"wrong"}


def append_weight(trace: Path, name: str, values: np.ndarray) -> None:
    """Record one more weight in a trace that was written."""
    *lines, _ = trace.read_text().splitlines()
    data = trace.with_suffix(".bin")
    offset = data.stat().st_size
    with data.open("ab") as file:
        file.write(values.astype(np.float32).tobytes())
    record = {"type": "weight", "weight": name, "dtype": "f32", "shape": list(values.shape), "offset": offset}
    lines.append(json.dumps(record))
    trace.write_text("\n".join([*lines, json.dumps({"type": "end", "records": len(lines)})]) + "\n")


# ---- values held in a shorter type


def in_bfloat16(kind: str) -> Callable[[Op], Op]:
    return lambda op: replace(op, stored="bf16") if op.kind == kind else op


def test_a_residual_stream_in_bfloat16_is_said_and_warned_of(
    models: Models, tmp_path: Path, torch_trace: Callable[..., Path]
) -> None:
    """It was a match without a word: values that all fit bfloat16 widened their floors."""
    model = models(SHAPE, "F32")
    candidate = traced(model, tmp_path / "residual.trace", change=in_bfloat16("add"))
    result = compare_traces(torch_trace(model, like=candidate), candidate, model=model)
    assert faulty(result) == []
    assert result.verdict == "match"
    (held,) = result.storage
    assert (held.side, held.type, held.kinds, held.other) == ("candidate", "bf16", ("add",), "f32")
    assert held.records == 2 * SHAPE.n_layer * 3
    assert words_of(result).count(
        "the residual stream (attn_residual and ffn_residual: 18 records) is held in bfloat16, in the reference in "
        "float32: no fault, but the two drift apart by it (NMSE "
    )


@pytest.mark.parametrize("stored", [pytest.param("bf16", marks=pytest.mark.slow), "f16"])
def test_a_residual_stream_may_be_in_float32_where_all_else_is_in_half_precision(
    stored: str, models: Models, tmp_path: Path
) -> None:
    """Fused kernels that add and norm keep it so (vLLM, SGLang): what lies between was held to float32's floor."""
    rounded = rounding_named(stored)

    def by_steps(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return rounded(torch.nn.functional.silu(gate)) * up

    def stores(op: Op) -> Op:
        own = replace(op, function=by_steps) if op.kind == "swiglu" else op
        return op if op.kind == "add" else replace(own, stored=stored)

    def held(name: str, values: np.ndarray) -> np.ndarray:
        return rounded(torch.from_numpy(values)).numpy()

    model = models(Shape("qwen2", n_layer=3, n_embd=96, n_head=8, n_head_kv=2, n_ff=160, n_vocab=320), "F32")
    result = check_trace(traced(model, tmp_path / "m.trace", change=stores, held=held, capture="layers"), model)
    assert (result.verdict, faulty(result)) == ("match", [])


def test_norms_in_half_precision_may_cast_what_they_are_given(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """What a scan leaves in float32, as transformers' Qwen3-Next in float16: of small values much is lost."""
    model, rounded = Model(tiny("qwen3next")), rounding_named("f16")

    def cast(x: Tensor, *weight: Tensor, eps: float) -> Tensor:
        return rms_norm(rounded(x), *weight, eps=eps)

    norms = [op for op in model.graph if split(op.name)[1] == "ssm_norm"]
    changed = model.graph.changed(*(replace(op, function=cast, stored="f16") for op in norms))
    trace = trace_graph(changed, model.file, tmp_path / "t.trace", range(1, 9), [11], [12])
    result = check_trace(trace, model)
    assert (result.verdict, faulty(result)) == ("match", [])
    said = {op.arithmetic for op in result.ops if split(op.op)[1] == "ssm_norm"}
    assert "inputs in float16" in said


@pytest.mark.parametrize(
    ("arch", "held", "stored", "words"),
    [
        ("granitehybrid", "conv", "bf16", "columns of convolutions in bfloat16"),
        ("granitehybrid", "ssm", "bf16", "states in bfloat16"),
        ("granitehybrid", "ssm", "f16", "states in float16"),  # 7e-10, where the floor is 1e-11
        ("lfm2", "conv", "bf16", "columns of convolutions in bfloat16"),
        ("rwkv7", "ssm", "f16", "states in float16"),  # within the floor of one of the steps that were asked
        pytest.param(
            *("granitehybrid", "", "bf16", "columns of convolutions in bfloat16, states in bfloat16"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_handed_from_step_to_step_may_be_in_half_precision(
    arch: str, held: str, stored: str, words: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of hidden states alone, in a model that has layers without states: these fit without."""
    model = Model(tiny(arch))
    states = [op for op in model.graph if op.kind == "state" and split(op.name)[1].startswith(held)]
    graph = model.graph.changed(*(replace(op, stored=stored) for op in states))
    steps = (*TOKENS, 7), (84,), (104,), (9,)
    path = trace_graph(graph, model.file, tmp_path / "held.trace", *steps, capture="layers")
    result = check_trace(path, model)
    assert (result.verdict, faulty(result)) == ("match", [])
    assert words in said(result, "add")


def test_layers_of_a_hybrid_model_have_arithmetics_of_their_own(tmp_path: Path) -> None:
    """Of four layers one attends: most had no cache, so that a cache in float16 was none to be tried."""
    few = {"block_count": 4, "attention.head_count": 6, "attention.head_count_kv": [0, 2, 0, 0]}
    model = Model(tiny_models.write("lfm2", tmp_path / "lfm2.gguf", others=few, without="bias|cls|dense_2"))
    steps = (*TOKENS, 7), (84,), (104,)
    halves = {
        "scores": lambda q, k: scores(q, k.half().to(k)),
        "weighted_values": lambda p, v: weighted_values(p, v.half().to(v)),
    }
    graph = model.graph.changed(*(replace(op, function=halves[op.kind]) for op in model.graph if op.kind in halves))
    path = trace_graph(graph, model.file, tmp_path / "held.trace", *steps, capture="layers")
    result = check_trace(path, model)
    assert (result.verdict, faulty(result)) == ("match", [])
    of_layers = {op.op: op.local.arithmetic for op in result.ops if op.local and op.op.endswith("ffn_residual")}
    assert {op for op, words in of_layers.items() if words == "KV cache in float16"} == {"blk.1.ffn_residual"}


def test_a_state_may_be_recorded_as_it_is_handed_on(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """In half precision, in one row with values in float32."""
    model = Model(tiny("rwkv7"))

    def handed_on(*given: Tensor) -> Tensor:
        made, n = KINDS["rwkv_wkv7"].function(*given), given[3].numel()
        return torch.cat((made[:n], made[n:].half().to(made)))

    states = (replace(op, function=handed_on) for op in model.graph if op.kind == "rwkv_wkv7")
    path = trace_graph(model.graph.changed(*states), model.file, tmp_path / "t.trace", TOKENS, (7,))
    result = check_trace(path, model)
    assert (result.verdict, faulty(result)) == ("match", [])


@pytest.mark.parametrize("capture", ["all", "layers"])
def test_a_step_may_read_its_own_keys_and_values_before_they_are_cached(
    capture: str, models: Models, tmp_path: Path
) -> None:
    """Prompts read them as they are, decode steps what was cached of the others."""

    def fresh(left: Tensor, held: Tensor) -> Tensor:
        of = scores if left.shape[-1] == held.shape[-1] else weighted_values
        n = len(held) - left.shape[0 if of is scores else 1]
        return of(left, torch.cat((held[:n].half().to(held), held[n:])))

    def change(op: Op) -> Op:
        return replace(op, function=fresh) if op.kind in ("scores", "weighted_values") else op

    model = models(Shape("qwen2", n_layer=3, n_embd=96, n_head=8, n_head_kv=2, n_ff=160, n_vocab=320), "F32")
    result = check_trace(traced(model, tmp_path / "m.trace", change=change, capture=capture), model)
    assert (result.verdict, faulty(result)) == ("match", [])
    if capture == "all":
        assert said(result, "scores") == {"exact", "K cache in float16 but for the step's own"}
        assert said(result, "weighted_values") == {"exact", "V cache in float16 but for the step's own"}
    else:
        assert said(result, "add") == {"exact", "KV cache in float16 but for the step's own"}


@pytest.mark.parametrize(
    ("name", "most"), [pytest.param("float8 (e4m3)", 448.0, marks=pytest.mark.slow), ("int8", 127.0)]
)
def test_a_cache_may_have_scales_that_were_measured_beforehand(
    name: str, most: float, models: Models, tmp_path: Path
) -> None:
    """One for each layer's keys and values, no powers of two (vLLM's k_scale, v_scale): all layers diverged."""
    dtype = torch.float8_e4m3fn if name.startswith("float8") else None

    def change(op: Op) -> Op:
        if op.kind not in ("scores", "weighted_values"):
            return op
        largest = (8.1 if op.kind == "scores" else 9.3) + (split(op.name)[0] or 0)

        def computed(left: Tensor, held: Tensor) -> Tensor:
            quotients = (held / (largest / most)).clamp(-most, most)
            kept = (quotients.to(dtype) if dtype else quotients.round()).to(held) * (largest / most)
            return (scores if op.kind == "scores" else weighted_values)(left, kept)

        return replace(op, function=computed)

    model = models(Shape("qwen2", n_layer=3, n_embd=96, n_head=8, n_head_kv=2, n_ff=160, n_vocab=320), "F32")
    result = check_trace(traced(model, tmp_path / "m.trace", change=change), model)
    assert (result.verdict, faulty(result)) == ("match", [])
    assert said(result, "scores") == {f"K cache in {name} by a scale of its own"}
    assert said(result, "weighted_values") == {f"V cache in {name} by a scale of its own"}


def test_sinks_may_be_held_in_half_precision(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    model = Model(tiny("gpt-oss"))

    def rounded(scores: Tensor, queries: Tensor, keys: Tensor, sinks: Tensor, **attrs: Any) -> Tensor:
        return softmax(scores, queries, keys, sinks.bfloat16().to(sinks), **attrs)

    wrong = (replace(op, function=rounded) for op in model.graph if op.kind == "softmax")
    path = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "t.trace", TOKENS, (7,))
    result = check_trace(path, model)
    assert (result.verdict, said(result, "softmax")) == ("match", {"sinks in bfloat16"})


@pytest.mark.slow
def test_records_that_show_float32_leave_no_room_for_half_precision_elsewhere(models: Models, tmp_path: Path) -> None:
    """Of hidden states alone: what bfloat16 might make of a layer excused rope's other frequencies in most of them,
    while the head was right in float32.
    """

    def change(op: Op) -> Op:
        slower = replace(op.attrs["rope"], theta=op.attrs["rope"].theta * 1.02) if op.kind == "rope" else None
        return op.with_attrs(rope=slower) if slower else op

    model = models(Shape("qwen2", n_layer=3, n_embd=96, n_head=8, n_head_kv=2, n_ff=160, n_vocab=320), "F32")
    path = traced(model, tmp_path / "m.trace", change=change, capture="layers")
    path = some_of(path, path, lambda op: op != "output_norm")
    result = check_trace(path, model, effort=Effort(seconds=1))
    assert {(op.step, op.op) for op in result.faulty} == {
        (s, f"blk.{n}.ffn_residual") for s in range(3) for n in range(3)
    }


def test_what_norms_give_is_said_to_be_held_in_bfloat16(models: Models, tmp_path: Path) -> None:
    model = models(SHAPE, "F32")
    result = check_trace(traced(model, tmp_path / "norms.trace", change=in_bfloat16("rms_norm")), model)
    assert faulty(result) == []
    assert "what norms give (attn_norm, attn_q_norm, attn_k_norm, ffn_norm and output_norm: 39 records) is held in" in (
        words_of(result)
    )


@pytest.mark.parametrize("weights", ["F16", "BF16"])
def test_weights_that_fit_a_shorter_type_are_nothing_held_in_it(
    weights: str, models: Models, torch_trace: Callable[..., Path]
) -> None:
    model = models(SHAPE, weights)
    assert check_trace(torch_trace(model), model).storage == ()


def test_an_engine_in_half_precision_holds_every_value_in_it(models: Models, torch_trace: Callable[..., Path]) -> None:
    model = models(SHAPE, "Q8_0")
    words = words_of(check_trace(torch_trace(model, dtype="bf16"), model))
    assert "candidate: every value is held in bfloat16" in words
    assert "would tell" not in words


def test_of_few_values_other_records_tell_what_they_are_held_in(models: Models, tmp_path: Path) -> None:
    """K and V of one token are 16 values here: bfloat16 was not recognised in less than 64, and they were faulty."""
    model = models(Shape("llama", n_layer=2, n_embd=128, n_head=8, n_head_kv=1, n_ff=256, n_vocab=320))
    result = check_trace(traced(model, tmp_path / "mine.trace", computed=torch.bfloat16), model)
    assert (result.verdict, faulty(result)) == ("match", [])


def test_values_tell_by_their_bits_what_they_are_held_in() -> None:
    """Six of more than four bits are no accident; ones, halves and whole numbers fit anything."""
    six = torch.tensor([1.0078125, 3.140625, 0.10009765625, 7.96875, 2.546875, 0.33203125], dtype=torch.float64)
    assert stored_as(six, "f32") == "bf16"
    assert stored_as(six[:5], "f32") == "f32"
    assert stored_as(torch.cat((six[:5], six[:5])), "f32") == "f32"  # the same again says nothing
    assert stored_as(torch.tensor([0.0, 0.5, 1.0, 1.5, 3.0, -0.25, 0.75] * 20, dtype=torch.float64), "f32") == "f32"
    assert stored_in_all([(six[:3], "f32"), (six[3:], "f32")]) == "bf16"
    assert stored_in_all([(six[:3], "f32"), (six[3:] / 3, "f32")]) is None


@pytest.mark.slow
def test_without_a_sum_nothing_tells_who_rounded(models: Models, torch_trace: Callable[..., Path]) -> None:
    model = models(SHAPE, "F32")
    words = words_of(check_trace(torch_trace(model, dtype="bf16", capture="layers"), model))
    assert "every value is held in bfloat16, by the engine or by who wrote the trace (a sum that is" in words


def words_of(result: Result) -> str:
    """The report as one line."""
    console = Console(width=100, file=io.StringIO(), highlight=False)
    console.print(render(result, 100))
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rope_tables_in_half_precision_are_an_arithmetic(dtype: torch.dtype, models: Models, tmp_path: Path) -> None:
    def rotated(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
        angles = rope_angles(positions, None, rope)[:, None]
        cos, sin = (f(torch.cat((angles, angles), -1)).to(dtype).float() for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    model = models(SHAPE, "F32")
    trace = traced(
        model, tmp_path / "rope.trace", change=lambda op: replace(op, function=rotated) if op.kind == "rope" else op
    )
    result = check_trace(trace, model)
    assert faulty(result) == []
    assert said(result, "rope") == {f"rope tables in {str(dtype).removeprefix('torch.')}"}


@pytest.mark.parametrize(
    ("factor", "wrong"), [(1.0, []), pytest.param(1.001, ["blk.1.attn_k_rope"], marks=pytest.mark.slow)]
)
def test_values_of_rope_tables_turn_by_the_error_of_an_angle(
    factor: float, wrong: list[str], models: Models, tmp_path: Path
) -> None:
    """Angles are float32 products: at position 57 one of 64 cosines and sines is rounded to float16 the other way."""
    model = Model(models(SHAPE, "F32"))

    def rotated(by: float) -> Callable[..., torch.Tensor]:
        def function(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
            rates = 1 / rope.theta ** (torch.arange(0, rope.n_rot, 2).float() / rope.n_rot)
            angles = (positions.float()[:, None] * rates)[:, None]
            cos, sin = (f(torch.cat((angles, angles), -1)).half().float() for f in (torch.cos, torch.sin))
            a, b = x.chunk(2, -1)
            return by * (x * cos + torch.cat((-b, a), -1) * sin)

        return function

    ropes = (op for op in model.graph if op.kind == "rope")
    graph = model.graph.changed(*(replace(op, function=rotated(factor if op.name in wrong else 1.0)) for op in ropes))
    prompt = [(37 * i + 11) % 250 for i in range(90)]
    result = check_trace(trace_graph(graph, model.file, tmp_path / "t.trace", prompt), model)
    assert [op.op for op in result.faulty] == wrong
    assert not wrong or "1.001" in result.findings[0].text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_matrices_in_a_shorter_type_beside_norms_in_float32_are_an_arithmetic(
    dtype: torch.dtype, models: Models, tmp_path: Path
) -> None:
    """As engines in C hold them, with a cache in half precision: the logits alone were called wrong."""

    def shorter(name: str, values: np.ndarray) -> np.ndarray | None:
        return None if "norm" in name else torch.from_numpy(values.copy()).to(dtype).float().numpy()

    cache = "bfloat16" if dtype == torch.bfloat16 else "float16"
    model, trace, arithmetic = models(LLAMA, "Q8_0"), tmp_path / "short.trace", f"exact, KV cache in {cache}"
    traced(model, trace, arithmetic=arithmetic, held=shorter, capture="layers", says_its_weights=False)
    result = check_trace(trace, model)
    assert result.verdict == "match"
    assert "norm weights in" not in words_of(result)
    assert any(f"KV cache in {cache}" in phrase for phrase in said(result, "add") if phrase)


@pytest.mark.parametrize("rounding", ["f16", "e5m2", "gf4"])
@pytest.mark.parametrize("capture", ["all", "layers"])
def test_biases_in_float32_beside_shorter_matrices_are_an_arithmetic(
    rounding: str, capture: str, models: Models, tmp_path: Path
) -> None:
    """calm holds Qwen2's so: its biases were rounded with the matrices, and each of Q, K and V was faulty."""

    def shorter(name: str, values: np.ndarray) -> np.ndarray | None:
        return None if values.ndim == 1 else rounding_named(rounding)(torch.from_numpy(values.copy())).numpy()

    model, trace = models(replace(LLAMA, arch="qwen2"), "F32"), tmp_path / "biases.trace"
    traced(model, trace, held=shorter, arithmetic="exact, KV cache in float16", capture=capture, says_its_weights=False)
    assert check_trace(trace, model).verdict == "match"


def test_where_nothing_explains_any_matmul_they_are_one_finding(models: Models, tmp_path: Path) -> None:
    """A kernel that unpacks weights wrongly was eight mistakes, one for each name."""
    rng = np.random.default_rng(1)

    def noisy(name: str, values: np.ndarray) -> np.ndarray | None:
        wrong = values.ndim == 2 and "embd" not in name
        return values * (1 + 0.2 * rng.standard_normal(values.shape)).astype(np.float32) if wrong else None

    model = models(LLAMA, "F32")
    trace = traced(model, tmp_path / "noisy.trace", held=noisy, says_its_weights=False)
    (finding,) = check_trace(trace, model, effort=Effort(seconds=0)).findings
    assert finding.text.startswith("all 15 matmuls: wrong")
    assert finding.look == "what they share: their kernel, and how it reads what their weights are held in"
    of_up = lambda name, values: noisy(name, values) if "ffn_up" in name else None  # noqa: E731
    one = traced(model, tmp_path / "one.trace", held=of_up, says_its_weights=False)
    (finding,) = check_trace(one, model, effort=Effort(seconds=0)).findings
    assert finding.text.startswith("ffn_up in both layers: wrong")
    assert finding.look is None


# ---- the cache


@pytest.mark.parametrize(
    ("arithmetic", "said_of"),
    [
        ("KV cache in float16", "KV cache in float16"),
        ("attention in float16", "Q and probabilities in float16, KV cache in float16"),
        ("exact", "exact"),
    ],
)
@pytest.mark.parametrize("capture", ["all", "layers"])
def test_a_cache_is_called_what_it_is(
    arithmetic: str, said_of: str, capture: str, models: Models, torch_trace: Callable[..., Path]
) -> None:
    """A float16 cache was "tiled flash attention", and plain float32 "softmax llama.cpp"."""
    model = models(SHAPE, "F32")
    result = check_trace(torch_trace(model, arithmetic=arithmetic, capture=capture), model)
    assert faulty(result) == []
    kinds = ("scores", "weighted_values") if capture == "all" else ("add",)
    assert {phrase for kind in kinds for phrase in said(result, kind)} - {"exact"} == (
        {said_of} - {"exact"}
        if capture == "layers" or said_of == "exact"
        else {
            said_of.replace("KV", "K").replace(" and probabilities", ""),
            said_of.replace("KV", "V").replace("Q and p", "p"),
        }
    )


def in_blocks_of_32(x: np.ndarray, stored: bool) -> np.ndarray:
    """A row of 8-bit integers with a float16 scale for each 32, or for what is left: quotients by that, or before."""
    y = np.zeros(x.shape, np.float32)
    for at in range(0, len(x), 32):
        block = x[at : at + 32]
        scale = np.abs(block).max() / np.float32(127)
        kept = np.float32(np.float16(scale))
        y[at : at + 32] = np.round(block / (kept if stored else scale)) * kept
    return y


def of_heads(cached: torch.Tensor) -> torch.Tensor:
    """Each head by itself, in one block by the scale that is kept."""
    rows = [in_blocks_of_32(row, stored=True) for row in cached.flatten(0, -2).numpy()]
    return torch.from_numpy(np.stack(rows)).reshape(cached.shape)


def of_tokens(cached: torch.Tensor) -> torch.Tensor:
    """All of a token's, whatever their heads."""
    rows = [in_blocks_of_32(row, stored=False) for row in cached.flatten(1).numpy()]
    return torch.from_numpy(np.stack(rows)).reshape(cached.shape)


def by_bfloat(cached: torch.Tensor) -> torch.Tensor:
    """Each head by a scale in bfloat16, as JAX engines have it on TPUs (jax-llm-examples)."""
    scale = (cached.float().abs().amax(-1, keepdim=True) / 127 + torch.finfo(torch.bfloat16).tiny).bfloat16().float()
    return ((cached.float() / scale).round() * scale).to(cached.dtype)


@pytest.mark.parametrize(
    ("cache", "head_dim", "words"),
    [
        (by_bfloat, 24, "KV cache in int8 rows with bfloat16 scales (largest / 127; quotients by them)"),
        (of_tokens, 24, "KV cache in q8_0 blocks across heads"),  # two heads of 24 are a block and a half
        (of_heads, 24, "KV cache in int8 rows by stored float16 scales"),
        (of_heads, 32, "KV cache in int8 rows by stored float16 scales"),
    ],
)
@pytest.mark.parametrize("capture", ["all", "layers"])
def test_a_cache_of_integers_may_be_cut_as_its_author_likes(
    cache: Callable[[Tensor], Tensor], head_dim: int, words: str, capture: str, models: Models, tmp_path: Path
) -> None:
    """Every layer diverged: llama.cpp's blocks are of a head, and divide it."""

    def change(op: Op) -> Op:
        if op.kind == "scores":
            return replace(op, function=lambda q, k: scores(q, cache(k)))
        if op.kind == "weighted_values":
            return replace(op, function=lambda probs, v: weighted_values(probs, cache(v)))
        return op

    model = models(replace(SHAPE, head_dim=head_dim), "F32")
    result = check_trace(traced(model, tmp_path / "a.trace", change=change, capture=capture), model)
    assert result.verdict == "match"
    kinds = ("scores", "weighted_values") if capture == "all" else ("add",)
    expected = {words} if capture == "layers" else {words.replace("KV", "K"), words.replace("KV", "V")}
    assert set().union(*(said(result, kind) for kind in kinds)) - {"exact"} == expected


def in_tiles(probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Values as flash attention on GPUs weighs them: exp(score - largest so far) in float16, by tiles of 5 keys."""
    largest = torch.cat([tile.amax(-1, keepdim=True).expand_as(tile) for tile in probs.split(5, -1)], -1).cummax(-1)[0]
    return weighted_values((probs / largest).half().float() * largest, v.half().float())


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_probabilities_may_be_rounded_before_they_are_divided(capture: str, models: Models, tmp_path: Path) -> None:
    """Relative to the largest score of the keys so far, which depends on the size of tiles."""

    def change(op: Op) -> Op:
        if op.kind == "scores":
            return replace(op, function=lambda q, k: scores(q, k.half().float()))
        return replace(op, function=in_tiles) if op.kind == "weighted_values" else op

    model = models(SHAPE, "F32")
    result = check_trace(traced(model, tmp_path / "a.trace", change=change, capture=capture), model)
    assert result.verdict == "match"
    if capture == "all":
        words = "probabilities in float16 before they are divided, V cache in float16"
        assert said(result, "weighted_values") == {words}


# ---- rounding on the way to the file


@pytest.mark.parametrize("written", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", ["F32", "Q8_0"])
def test_a_trace_that_was_written_in_half_precision_is_no_fault(
    weights: str, written: torch.dtype, models: Models, tmp_path: Path
) -> None:
    """The engine computes in float32; its ops read other values than the trace holds."""
    model = models(SHAPE, weights)
    result = check_trace(traced(model, tmp_path / "short.trace", written=written), model)
    assert faulty(result) == []
    assert said(result, "embedding") == {"exact"}
    assert any(
        f"rounded to {str(written).removeprefix('torch.')} on the way to the file" in note for note in result.notes
    )


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_an_engine_in_half_precision_reads_what_it_recorded(dtype: str, models: Models, torch_trace) -> None:
    model = models(SHAPE, "Q8_0")
    result = check_trace(torch_trace(model, dtype=dtype), model)
    assert faulty(result) == []
    assert result.notes == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu_may_be_computed_in_half_precision_step_by_step(
    dtype: torch.dtype, models: Models, tmp_path: Path
) -> None:
    """As MLX has it, x * sigmoid(x), where torch rounds once: every ffn_act was faulty."""

    def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.to(dtype), up.to(dtype)
        low = 1 / (1 + gate.abs().exp())
        return gate * torch.where(gate < 0, low, 1 - low) * up

    model = models(SHAPE, "F16")
    trace = traced(
        model, tmp_path / "silu.trace", computed=dtype, written=dtype,
        change=lambda op: replace(op, function=silu) if op.kind == "swiglu" else op,
    )  # fmt: skip
    assert faulty(check_trace(trace, model)) == []


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
def test_a_mistake_in_a_trace_written_in_half_precision_is_found(capture: str, models: Models, tmp_path: Path) -> None:
    """What was lost on the way to the file hides errors of 1e-6, not of 1e-3."""

    def mistaken(op: Op) -> Op:
        return replace(op, function=lambda a, b: a + 1.03 * b) if op.name == "blk.1.ffn_residual" else op

    model = models(SHAPE, "F32")
    trace = traced(model, tmp_path / "short.trace", change=mistaken, written=torch.float16, capture=capture)
    file = GGUFFile(model)
    judged = judge_all([Replay(Trace(trace), build_graph(file), Weights(file))])
    assert [(r.step, r.op) for _, r, local in judged if local.faulty] == [(n, "blk.1.ffn_residual") for n in range(3)]


# ---- parts that are done each in its way, as no engine that is listed does

COMBINED = {  # and what is said of a kind of op
    "activations in int8 groups of 64 with float32 scales, matrices in bfloat16, norm weights in bfloat16":
        ("linear", "activations in int8 groups of 64 with float32 scales, weights in bfloat16"),
    "KV cache in int8 rows with float32 scales, rope tables in bfloat16, what is added to the residual in bfloat16":
        ("add", "what is added to the residual in bfloat16"),
    "activations in q8_0 blocks, KV cache in float8 (e4m3), attention in bfloat16":
        ("scores", "Q in bfloat16, K cache in float8 (e4m3) read as bfloat16"),
    # Of hidden states no step from what is listed leaves much less: whether one from what the head tells does is luck.
    "activations in int8/64, norm weights in float16, rope tables in bfloat16, attention in float16, "
    "KV cache in int8 rows with float32 scales, what is added to the residual in q8_0 blocks":
        ("weighted_values", "probabilities in float16, V cache in int8 rows with float32 scales read as float16"),
}  # fmt: skip


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_ways_to_hold_matrices_that_a_part_refutes_leave_more(
    computed: torch.dtype, models: Models, tmp_path: Path
) -> None:
    """Behind hidden states most are, of an engine that has one of them, and not that one."""
    model = models(replace(SHAPE, n_ff=192), "F16")
    arithmetic = "exact, matrices in wide int8/row"
    trace = Trace(traced(model, tmp_path / "t.trace", arithmetic=arithmetic, capture="layers", computed=computed))
    file = GGUFFile(model)
    replay, record = Replay(trace, build_graph(file), Weights(file)), trace.ops[0, "blk.1.ffn_residual"]
    fitting, start = replay._fitting, scheme_named("exact")
    held = [way.of(start) for way in WAYS if way.part == "matrices" and not way.is_of(start)]
    ways = replay._planner.suiting(held, record)
    refuted = [scheme for scheme in ways if fitting.refutes(record, start, scheme)]
    assert len(refuted) > len(ways) / 2
    assert scheme_named(arithmetic).linear not in {scheme.linear for scheme in refuted}
    assert all(fitting.left(record, scheme) > 0.99 * fitting.left(record, start) for scheme in refuted)


@pytest.mark.parametrize(
    ("reported", "asked"),
    [
        ("weights in uint8 groups of 32 with float32 scales and zeros", "weights in uint8/32"),
        ("activations and weights in int8 rows with float32 scales", "activations and weights in int8/row"),
        (
            "activations in int8 groups of 64 with float32 scales, matrices in NF4 groups of 64 with float16 values",
            "activations in int8/64, matrices in f16 nf4/64",
        ),
        ("exact, activations in wide int8 rows with float32 scales", "exact, activations in wide int8/row"),
    ],
)
def test_what_a_report_says_of_integers_may_be_asked_for(reported: str, asked: str) -> None:
    assert scheme_named(reported) == scheme_named(asked)


def steeper_gate(op: Op) -> Op:
    return replace(op, function=lambda gate, up: swiglu(1.2 * gate, up)) if op.name == "blk.1.ffn_act" else op


@pytest.mark.parametrize(
    ("arithmetic", "capture"),
    [
        *((arithmetic, "all") for arithmetic in COMBINED),
        *(pytest.param(arithmetic, "layers", marks=pytest.mark.slow) for arithmetic in [*COMBINED][:3]),
    ],
)
def test_an_arithmetic_that_is_not_listed_is_composed_of_its_parts(
    models: Models, tmp_path: Path, arithmetic: str, capture: str
) -> None:
    assert scheme_named(arithmetic) not in SCHEMES
    model = models(SHAPE, "Q8_0")
    n_decode = 0 if capture == "layers" else 2  # behind hidden states tests/test_single_tokens.py has single tokens
    trace = traced(model, tmp_path / "own.trace", arithmetic=arithmetic, capture=capture, n_decode=n_decode)
    result = check_trace(trace, model)
    assert (result.verdict, faulty(result)) == ("match", [])
    if capture == "all":
        kind, words = COMBINED[arithmetic]
        assert said(result, kind) == {words}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ("bf16 held int8/row", "weights in int8 rows with bfloat16 scales read as bfloat16"),
        ("bf16 held fp8/row then bf16", "weights in fp8 rows with bfloat16 scales read as bfloat16"),
        ("bf16 shifted4/128", "weights in 4-bit groups of 128 with bfloat16 scales and minima"),
    ],
)
def test_an_arithmetic_is_said_without_what_makes_no_difference(
    stored: str, words: str, models: Models, tmp_path: Path
) -> None:
    """In bfloat16, whose values float16 holds."""
    model = models(replace(SHAPE, n_layer=2, n_ff=256), "F16")
    arithmetic = f"exact, matrices in {stored}"
    trace = traced(
        model, tmp_path / "own.trace", arithmetic=arithmetic, computed=torch.bfloat16, written=torch.bfloat16
    )
    result = check_trace(trace, model, effort=Effort(seconds=0))
    assert result.verdict == "match"
    assert said(result, "linear") == {words}


def test_rows_of_another_width_tell_their_groups(models: Models, tmp_path: Path) -> None:
    """Rows of 256 are one group of 256; those of 512 are two."""
    model = models(replace(SHAPE, n_embd=256, n_head=8, n_ff=512), "F16")
    trace = traced(model, tmp_path / "rows.trace", arithmetic="activations in int8 rows with float32 scales")
    choices = Replay(Trace(trace), build_graph(file := GGUFFile(model)), Weights(file)).plan.choices
    linear = [choice for sort, choice in choices.items() if sort.name == "linear"]
    assert [[scheme.linear.operands for scheme in choice.schemes] for choice in linear] == [["int8/row"]] * 2
    assert [choice.by_op for choice in linear] == [{}, {}]  # not groups of 256 in some and rows in others


def test_rows_that_no_group_of_others_divides(models: Models, tmp_path: Path) -> None:
    """Rows of 256 are one group of 256, which is not asked of those of 128: they are one group of that."""
    model = models(replace(SHAPE, n_embd=128, n_head=8, n_ff=256), "F16")
    trace = traced(model, tmp_path / "rows.trace", arithmetic="activations in int8 rows with float32 scales")
    assert check_trace(trace, model, effort=Effort(seconds=0)).verdict == "match"


@pytest.mark.slow
def test_a_part_of_a_long_prompt_tells_the_arithmetic(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of hundreds of arithmetics took a pass of all tokens of a layer."""
    path = models(replace(SHAPE, n_layer=2), "Q8_0")
    model, tokens, scheme = Model(path), [7 * i % 320 for i in range(144)], scheme_named([*COMBINED][2])
    trace = trace_graph(model.graph, model.file, tmp_path / "a.trace", tokens, capture="layers", scheme=scheme)
    asked, settle, judged = set[OpRecord](), Fitting.settle, []

    def settled(self: Fitting, schemes: Sequence[Scheme], records: Sequence[OpRecord], *a: Any, **b: Any) -> Choice:
        asked.update(records)
        return settle(self, schemes, records, *a, **b)

    monkeypatch.setattr(Fitting, "settle", settled)
    for size, rows in ((1 << 13, tuple(9 * i // 4 - 1 for i in range(1, 65))), (1 << 30, None)):
        monkeypatch.setattr(planning, "_PART", size)
        asked.clear()
        judged.append(check_trace(trace, path))
        assert {one.rows for one in asked if one.op == "blk.1.ffn_residual"} == {rows}
    assert judged[0].verdict == "match"
    assert judged[0].ops == judged[1].ops


@pytest.mark.parametrize("capture", ["all", pytest.param("layers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("arithmetic", COMBINED)
def test_a_composed_arithmetic_excuses_no_mistake(
    models: Models, tmp_path: Path, arithmetic: str, capture: str
) -> None:
    model = models(SHAPE, "Q8_0")
    n_decode, where = (0, "blk.1.ffn_residual") if capture == "layers" else (2, "blk.1.ffn_act")
    out = tmp_path / "own.trace"
    trace = traced(model, out, change=steeper_gate, arithmetic=arithmetic, capture=capture, n_decode=n_decode)
    result = check_trace(trace, model, effort=Effort(seconds=0.01))
    assert faulty(result) == [(step, where) for step in range(n_decode + 1)]


@pytest.mark.slow
def test_weights_in_four_bits_are_known_beside_a_mistaken_layer(models: Models, tmp_path: Path) -> None:
    """They leave more of a layer than any other rounding; and of two layers the one that is right tells."""
    shape = Shape("qwen3", n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=320, head_dim=128)
    model, arithmetic = models(shape, "F16"), "weights in bf16 shifted4/128"
    trace = traced(model, tmp_path / "own.trace", change=steeper_gate, arithmetic=arithmetic, capture="layers")
    plain = check_trace(trace, model, effort=Effort(seconds=0), arithmetic="exact")
    assert min(op.local.nmse for op in plain.ops if op.local and op.op == "blk.0.ffn_residual") > BLIND
    result = check_trace(trace, model, effort=Effort(seconds=0.01))
    assert faulty(result) == [(step, "blk.1.ffn_residual") for step in range(3)]
    words = "weights in 4-bit groups of 128 with bfloat16 scales and minima"
    assert {op.local.arithmetic for op in result.ops if op.local and op.op.endswith("ffn_residual")} == {words}


@pytest.mark.slow
def test_a_number_is_one_mistake_in_every_step_of_an_engine_in_half_precision(models: Models, tmp_path: Path) -> None:
    """Its roundings leave more of the prompt's error than what tells a number in float32."""
    shape = Shape("qwen3", n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=320, head_dim=128)
    model, half = models(shape, "F16"), torch.bfloat16

    def larger_eps(op: Op) -> Op:
        return op.with_attrs(eps=1e-2) if op.name == "blk.1.attn_norm" else op

    trace = traced(
        model, tmp_path / "own.trace", change=larger_eps, computed=half, written=half, capture="layers", n_decode=1
    )
    found = [finding.text for finding in check_trace(trace, model).findings]
    assert found == ["layer 1 (seen in ffn_residual): attn_norm: eps is 0.01 instead of 1e-06."]


def test_a_value_is_held_in_one_rounding_and_read_as_another() -> None:
    x = torch.linspace(-3, 5, 64, dtype=torch.float64)
    held, read = rounding_named("q8_0"), rounding_named("bf16")
    both = rounding_named("q8_0 then bf16")
    assert both.words == "q8_0 blocks read as bfloat16"
    assert torch.equal(both(x), read(held(x)))
    assert torch.equal(both.step(x), torch.maximum(held.step(x), read.step(x)))
    assert (both.block, both.in_blocks, read_as("q8_0", "f64"), read_as("f64", "bf16")) == (32, False, "q8_0", "bf16")


# ---- names


def test_every_scheme_can_be_asked_for_by_its_name() -> None:
    assert [scheme_named(scheme.name) for scheme in SCHEMES] == list(SCHEMES)
    assert scheme_named("llama.cpp") == SCHEMES[0]
    assert scheme_named("llama.cpp, KV cache in float16").values == Arithmetic(stored="f16")


def test_every_way_to_do_a_part_can_be_asked_for() -> None:
    for way in WAYS:
        of = way.of(scheme_named("exact"))
        assert scheme_named(f"exact, {way.name}") == replace(of, name=f"exact, {way.name}")


def test_parts_are_done_each_in_its_way() -> None:
    scheme = scheme_named(
        "activations in q8_0 blocks, KV cache in float8 (e4m3), attention in bfloat16, matrices in int4/32"
    )
    assert scheme.of("linear") == Arithmetic("q8_0", "int4/32")
    assert scheme.of("scores") == Arithmetic("bf16", "e4m3 then bf16")
    assert in_words([("scores", scheme.of("scores"))]) == "Q in bfloat16, K cache in float8 (e4m3) read as bfloat16"
    assert scheme_named("exact, attention in bfloat16, KV cache in float8 (e4m3)").of("scores") == scheme.of("scores")


def test_biases_that_are_rounded_otherwise_than_weights_are_said() -> None:
    rounded = scheme_named("exact, biases in bfloat16").of("linear")
    assert in_words([("linear", rounded)]) == "biases in bfloat16"
    assert in_words([("linear", scheme_named("weights in bfloat16").of("linear"))]) == "weights in bfloat16"


def test_groups_of_any_size_can_be_asked_for() -> None:
    scheme = scheme_named("activations and weights in int8/48, KV cache in bfloat16")
    assert scheme.of("linear") == Arithmetic("int8/48", "int8/48")
    assert scheme.of("scores") == Arithmetic(stored="bf16")
    assert (
        in_words([("linear", scheme.of("linear"))])
        == "activations and weights in int8 groups of 48 with float32 scales"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zebra", "unknown arithmetic 'zebra'. First, llama.cpp, exact, or one of activations, "),
        ("exact, KV cache in bf16", "unknown arithmetic 'KV cache in bf16'. Near: KV cache in bfloat16; V cache in "),
        ("exact, exact", "unknown arithmetic 'exact'. First, llama.cpp, "),
        ("weights in int8/", "unknown arithmetic 'weights in int8/'. Near: weights in float16; "),
        ("", "unknown arithmetic ''. First, llama.cpp, "),
    ],
)
def test_an_arithmetic_that_is_none_is_refused_with_what_is_near(name: str, words: str) -> None:
    with pytest.raises(EngineError, match=f"^{re.escape(words)}"):
        scheme_named(name)


def test_of_many_activations_that_may_turn_those_are_found_that_did(models: Models) -> None:
    """Where the scale is a power of two values in bfloat16 lie halfway by dozens. Some turned, and each hides others
    that are small beside it.
    """
    torch.manual_seed(0)
    model = Model(models("k-quants"))
    op, rounding = model.graph["blk.1.ffn_up"], rounding_named("int8/row")
    x = torch.randn(3, 256).clamp(-1.9, 1.9).bfloat16().double()
    x[1, 77] = 127 / 64
    change = rounding.flips(x) * (torch.rand(x.shape) < 0.6)
    weights = model.weights(torch.float64)
    weight = weights.load(op.weights[0]) * torch.logspace(-3, 0, 256, dtype=torch.float64)[torch.randperm(256)]
    held = weights.holding({op.weights[0].name: weight.numpy()})
    sums = (rounding(x) @ weight.T, (rounding(x) + change) @ weight.T)
    noise = Noise(torch.full_like(sums[0], 1e-7), torch.zeros_like(sums[0]))
    arithmetic, made = Arithmetic("int8/row"), Recomputed(sums[0], noise, noise)
    found = turned(op, [x], sums[1], made, arithmetic, held, torch.ones_like(sums[0], dtype=torch.bool))
    assert found is not None
    torch.testing.assert_close(found[0], sums[1], rtol=0, atol=1e-6)
    assert found[1] == int((change != 0).sum()) > 20


@pytest.mark.slow
def test_half_precision_that_is_stored_wider_is_sound_behind_hidden_states(models: Models, tmp_path: Path) -> None:
    """Autocast to float16, a long prompt: one rounding that turns takes all after it along, so any arithmetic of as
    many digits leaves as much, and by those that round less it diverged. A mistake that is larger is seen.
    """
    model = Model(models(replace(LLAMA, n_layer=3, n_ff=192), "F16"))
    prompt = tuple((37 * i + 11) % 250 for i in range(64))

    def in_half(function: Callable[..., torch.Tensor], factor: float) -> Callable[..., torch.Tensor]:
        return lambda *given: factor * function(*(x.half().float() for x in given if x is not None)).half().float()

    for factor in (1.0, 1.02):
        matmuls = [op for op in model.graph if op.kind in ("linear", "scores", "weighted_values")]
        factors = {"blk.1.ffn_down": factor}
        changes = (replace(op, function=in_half(KINDS[op.kind].function, factors.get(op.name, 1.0))) for op in matmuls)
        graph = model.graph.changed(*changes)
        out = trace_graph(graph, model.file, tmp_path / "t.trace", prompt, (84,), capture="layers")
        result = check_trace(out, model, effort=Effort(seconds=0))
        assert {op.op for op in result.faulty} == ({"blk.1.ffn_residual"} if factor != 1 else set())
        assert result.verdict == ("match" if factor == 1 else "diverged")


@pytest.mark.slow
@pytest.mark.parametrize("off", [0.0, 1e-4])
def test_products_that_are_made_once_more_for_their_reader_are_sound(
    off: float, models: Models, tmp_path: Path
) -> None:
    """XLA fuses a matmul with its rotation and keeps another's product: keys at position 0 were not those recorded. A
    single value that is further off is a mistake.
    """
    model = Model(models(LLAMA, "F32"))

    def fused(op: Op) -> Op:
        product = model.graph[op.inputs[0]]

        def function(x: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, **attrs: Any) -> torch.Tensor:
            halves = (a @ b.T for a, b in zip(x.chunk(2, 1), weight.to(x).chunk(2, 1), strict=True))
            y = KINDS["rope"].function(sum(halves).unflatten(1, op.axes[1:]), positions, **attrs)
            y[0, 0, 0] += off * y.square().mean().sqrt()
            return y

        inputs = product.inputs[0], op.inputs[1]
        return replace(op, inputs=inputs, views=(), weights=product.weights, function=function)

    graph = model.graph.changed(*(fused(op) for op in model.graph if op.name.endswith("k_rope")))
    result = check_trace(trace_graph(graph, model.file, tmp_path / "t.trace", TOKENS), model)
    assert {op.op for op in result.faulty} == ({"blk.0.attn_k_rope", "blk.1.attn_k_rope"} if off else set())
    assert any(op.local.made_anew for op in result.ops if op.local) == (not off)


@pytest.mark.parametrize("mistaken", ["output_norm", "attn_norm"])
def test_only_norms_of_half_precision_may_be_cast_back_to_it(mistaken: str, models: Models, tmp_path: Path) -> None:
    """Under autocast queries and keys are in bfloat16, and what other norms read is in float32: the arithmetic of the
    one excuses no mistake in the other, and a mistake there makes none here.
    """
    model = Model(models(SHAPE, "F16"))

    def in_half(x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
        return (x.bfloat16().float() @ weight.to(x).bfloat16().float().T).bfloat16().float()

    def cast_back(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).bfloat16().to(x) * weight.to(x)

    norms = [op for op in model.graph if op.name.endswith(("q_norm", "k_norm", mistaken))]
    changes = [replace(op, function=cast_back) for op in norms]
    changes += [replace(op, function=in_half) for op in model.graph if op.kind == "linear"]
    result = check_trace(trace_graph(model.graph.changed(*changes), model.file, tmp_path / "t.trace", TOKENS), model)
    assert {op.op for op in result.faulty} == {op.name for op in norms if op.name.endswith(mistaken)}
    assert {op.cause and op.cause.name for op in result.faulty} == {"norm_rounded_before_weight"}


def test_both_operands_of_a_matmul_of_values_may_be_rounded(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """As torch.autocast does with Gemma 3n's streams and their coefficients: neither is a cache."""
    model = Model(tiny("gemma3n"))

    def rounded(a: Tensor, b: Tensor) -> Tensor:
        return mul_mat(a.bfloat16().to(a), b.bfloat16().to(b))

    products = [op for op in model.graph if op.kind == "mul_mat" and not op.weights and not any(op.past)]
    assert products
    wrong = [replace(op, function=rounded) for op in products]
    trace = trace_graph(model.graph.changed(*wrong), model.file, tmp_path / "t.trace", range(1, 6))
    result = check_trace(trace, model)
    assert result.verdict == "match"
    found = {op.op: op.arithmetic for op in result.ops}
    assert {found[op.name] for op in products} == {"operands in bfloat16"}


def test_axes_that_come_before_the_tokens_are_no_heads(tiny: Callable[[str], Path]) -> None:
    """Of attention they are; Gemma 3n has streams, and a row of each layer."""
    graph = Model(tiny("gemma3n")).graph
    names = {
        name: KINDS[graph[name].kind].axis_names(graph[name], 3) for name in ("blk.0.corrected", "blk.0.attn_probs")
    }
    assert names == {"blk.0.corrected": ("slice", "token", "channel"), "blk.0.attn_probs": ("head", "token", "key")}


def test_autocast_casts_kernels_and_what_gates_give_but_no_norms(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """mamba-minimal's convolution and gate, beside norms and a scan in float32: both were called mistaken."""
    model, half = Model(tiny("mamba")), rounding_named("bf16")

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.linear(x, weight, bias)

    def in_half(op: Op) -> Op | None:
        of: dict[str, Callable[..., Tensor]] = {
            "linear": matmul,
            "ssm_conv": lambda x, kernel: KINDS["ssm_conv"].function(x, half(kernel)),
            "silu": lambda x: torch.nn.functional.silu(x.bfloat16()),
            "swiglu": lambda gate, up: torch.nn.functional.silu(gate.bfloat16()) * up,
        }
        if op.kind == "add" and op.weights:
            return replace(op, function=lambda x, bias: (x + half(bias)).bfloat16())
        return replace(op, function=of[op.kind]) if op.kind in of else None

    graph = model.graph.changed(*filter(None, map(in_half, model.graph)))
    whole = trace_graph(graph, model.file, tmp_path / "whole.trace", (*TOKENS, 7), (84,))
    path = some_of(whole, tmp_path / "t.trace", lambda name: not name.endswith("ssm_conv1d"))
    result = check_trace(path, model)
    assert (result.verdict, faulty(result)) == ("match", [])
    assert "activated values in bfloat16" in said(result, "swiglu")


def test_what_changes_no_value_is_no_arithmetic(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Values of bfloat16 fit float16, so activations in it fitted behind a matmul that was not recorded, as well."""
    model = Model(tiny("rwkv7"))
    whole = trace_torch(model.path, tmp_path / "whole.trace", TorchOptions(dtype="bf16"), (*TOKENS, 7), 1)
    unseen = (
        *("token_embd", "time_mix_lerp_fused", "time_mix_w1", "time_mix_a0", "time_mix_a2", "time_mix_g1"),
        *("time_mix_ln", "channel_mix_lerp_k"),
    )
    path = some_of(whole, tmp_path / "t.trace", lambda name: split(name)[1] not in unseen)
    result = check_trace(path, model)
    assert (result.verdict, faulty(result)) == ("match", [])
    assert not [op.op for op in result.ops if op.local and "float16" in op.local.arithmetic.replace("bfloat16", "")]
