"""No false alarms: of runs without a mistake, replay calls no op faulty.

benchmarks/clean_runs.py makes 915; here is one run of each option, weight type and length, the hard ones among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from conftest import SHAPES, TOKENS, Models, logits_of, trace_graph

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.model.weights import Weights
from tracediff.numerics.schemes import PLAIN, scheme_named
from tracediff.pipeline import check_trace
from tracediff.replay.judging import Subject, judge_all, replays_of
from tracediff.replay.replay import Replay
from tracediff.trace.reader import Trace

_SIZES = {"n_layer": 2, "n_embd": 256, "n_ff": 512}
FAMILIES = {
    "llama": Shape("llama", **_SIZES, n_head=8, n_head_kv=2, theta=10_000.0, eps=1e-5),
    "llama3": Shape("llama", **_SIZES, n_head=4, n_head_kv=2, theta=500_000.0, eps=1e-5, rope_factors=True),
    "qwen2": Shape("qwen2", **_SIZES, n_head=8, n_head_kv=2, tied=True),
    "qwen3": Shape("qwen3", **_SIZES, n_head=5, n_head_kv=1, head_dim=64),
    "narrow": Shape("qwen2", n_layer=2, n_embd=96, n_head=3, n_head_kv=1, n_ff=160),  # K-quants do not fit its rows
    "demo": SHAPES["demo"],
}
SMALL_BATCHES = {"n_batch": 9, "n_ubatch": 4}
F16 = {"kv_type": "f16"}
FLASH = {"flash_attn": True}
Q8 = {"flash_attn": True, "kv_type": "q8_0"}


@dataclass(frozen=True)
class Run:
    """One clean run; `options` are llama.cpp's, or torch's where `engine` is torch."""

    family: str
    weights: str
    length: int
    options: dict[str, Any] = field(default_factory=dict)
    engine: str = "llama.cpp"

    def __str__(self) -> str:
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.engine} {self.family} {self.weights} {self.length} {options}".rstrip()


def torch_run(family: str, weights: str, length: int, dtype: str) -> Run:
    return Run(family, weights, length, {"dtype": dtype}, "torch")


RUNS = [
    Run("llama", "F32", 17),
    Run("llama", "Q4_K_M", 1, FLASH),
    Run("llama", "Q5_K_M", 300, SMALL_BATCHES | {"n_batch": 200, "n_ubatch": 70}),
    Run("llama3", "F32", 300),
    Run("llama3", "BF16", 2, F16),
    Run("llama3", "Q4_1", 17, SMALL_BATCHES),
    Run("llama3", "Q6_K", 17, FLASH),
    Run("qwen2", "F16", 300, FLASH | F16),
    Run("llama", "Q8_0", 17, FLASH | F16),
    Run("qwen2", "Q4_0", 17, Q8),
    Run("qwen2", "IQ4_XS", 2),
    Run("qwen2", "Q8_0", 1),
    Run("qwen3", "Q2_K", 17, F16),
    Run("qwen3", "Q4_K_M", 65, FLASH),
    Run("qwen3", "Q8_0", 17, Q8),
    Run("narrow", "Q4_K_M", 17, SMALL_BATCHES | F16),
    Run("narrow", "Q5_0", 300, Q8),
    Run("demo", "Q5_0", 17),  # one value of layer 5 lies on a rounding boundary
    Run("demo", "Q3_K_M", 2, FLASH),
    torch_run("llama", "F32", 300, "f32"),
    torch_run("llama", "Q5_1", 2, "f64"),
    torch_run("llama3", "F16", 17, "bf16"),
    torch_run("llama3", "Q4_K_M", 300, "f16"),
    torch_run("qwen2", "BF16", 17, "bf16"),
    torch_run("qwen2", "F16", 300, "f16"),
    torch_run("qwen3", "Q8_0", 1, "f16"),
    torch_run("narrow", "F32", 2, "bf16"),
    torch_run("demo", "Q4_K_M", 17, "f32"),
]
Tracer = Callable[..., Path]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_nothing_is_faulty(run: Run, models: Models, llama_cpp_trace: Tracer, torch_trace: Tracer) -> None:
    model = models(FAMILIES[run.family], run.weights)
    records = judged(trace_of(run, model, llama_cpp_trace, torch_trace), model)
    assert alarms(records) == []


@pytest.mark.parametrize("engine", ["llama.cpp", "torch"])
def test_hidden_states_of_a_loud_model_are_clean(
    engine: str, models: Models, llama_cpp_trace: Tracer, torch_trace: Tracer
) -> None:
    """A whole layer is recomputed as one op where only hidden states were recorded."""
    run = Run("demo", "Q4_K_M", 17, {"capture": "layers"}, engine)
    model = models(FAMILIES["demo"], "Q4_K_M")
    records = judged(trace_of(run, model, llama_cpp_trace, torch_trace), model)
    assert len(records) == 3 * (1 + 8 + 2)  # embedding, layers, norm and logits of three steps
    assert alarms(records) == []


@pytest.mark.parametrize(
    ("weights", "options", "n_decode"),
    [
        ("F16", {}, 0),
        pytest.param("Q8_0", FLASH | F16, 0, marks=pytest.mark.slow),
        pytest.param("Q4_K_M", {}, 1, marks=pytest.mark.slow),
    ],
)
def test_logits_of_a_loud_model_are_clean(
    weights: str, options: dict[str, Any], n_decode: int, models: Models, llama_cpp_trace: Tracer
) -> None:
    """Eight layers recomputed as one op: most roundings turn, and the right one leaves little less than none."""
    model = models(FAMILIES["demo"], weights)
    records = judged(logits_of(llama_cpp_trace(model, tokens_of(17), n_decode, **options, threads=1)), model)
    assert len(records) == n_decode + 1
    assert alarms(records) == []
    assert all(
        local.blind or "KV cache" in local.arithmetic or "activations" in local.arithmetic for _, local in records
    )


@pytest.mark.parametrize(
    ("length", "threads", "sums"),
    [
        (17, 2, ""),
        (300, 2, " on 2 threads after whole ubatches of 512"),
        (300, 3, " on 3 threads after whole ubatches of 512"),
    ],
)
def test_sums_in_half_precision_are_followed(
    length: int, threads: int, sums: str, models: Models, llama_cpp_trace: Tracer
) -> None:
    """Key by key; of a token decoded after 300, the threads add up their own keys."""
    model = models(FAMILIES["qwen3"], "F32")
    records = judged(llama_cpp_trace(model, tokens_of(length), **FLASH, **F16, threads=threads), model)
    assert alarms(records) == []
    decoded = [local for record, local in records if record.step > 0 and len(local.segment) > 1]
    assert {local.arithmetic.partition("sums in float16")[2] for local in decoded} == {sums}
    assert max(local.nmse for local in decoded) < 1e-8  # 1e-7 to 4e-6 if they are not


def test_a_prompt_of_one_ubatch_and_a_few_tokens_is_followed(models: Models, llama_cpp_trace: Tracer) -> None:
    """llama.cpp computes 512 tokens at once in tiles, and the other 3 key by key."""
    model = models(FAMILIES["qwen3"], "F32")
    records = judged(llama_cpp_trace(model, tokens_of(515), **FLASH, **F16, threads=2), model)
    assert alarms(records) == []
    prompt = [local for record, local in records if record.step == 0 and len(local.segment) > 1]
    after = " after whole ubatches of 512"
    assert {local.arithmetic for local in prompt} == {
        f"Q in float16{after}, KV cache in float16, sums in float16{after}"
    }
    assert max(local.nmse for local in prompt) < 1e-8


def test_hidden_states_after_sums_in_half_precision_are_clean(models: Models, llama_cpp_trace: Tracer) -> None:
    model = models(FAMILIES["qwen3"], "F32")
    trace = llama_cpp_trace(model, tokens_of(300), **FLASH, **F16, threads=3, capture="layers")
    assert alarms(judged(trace, model)) == []


def test_a_first_position_does_not_tell_how_the_cache_is_held(models: Models, llama_cpp_trace: Tracer) -> None:
    """It attends to itself alone: of a prompt of one token any cache left nothing, and of what follows 1e-3."""
    model = models(FAMILIES["qwen3"], "Q8_0")
    records = judged(llama_cpp_trace(model, (256,), **Q8, threads=1, capture="layers"), model)
    layers = [local for _, local in records if len(local.segment) > 1]
    assert {local.arithmetic.rpartition(", ")[2] for local in layers} == {"KV cache in q8_0 blocks"}
    assert max(local.nmse for local in layers) < 1e-8


@pytest.mark.slow
def test_no_arithmetic_excuses_a_small_mistake(models: Models, torch_trace: Tracer) -> None:
    """An eps of 1e-5 for 1e-6 in a trace of hidden states: its error is smaller than the noise of half precision. On
    some processors one step of a layer is undecided until the cause is known.
    """
    model = models(FAMILIES["qwen3"], "F32")
    trace = torch_trace(model, tokens=tokens_of(17), capture="layers", faults=("eps",))
    faulty = {(op.step, op.op) for op in check_trace(trace, model).faulty}
    changed = ("blk.0.ffn_residual", "blk.1.ffn_residual", "output_norm")
    assert faulty == {(step, op) for step in Trace(trace).steps for op in changed}


ROUNDED = {  # and what is said of it
    "activations and weights in bfloat16, attention in bfloat16": (
        "activations and weights in bfloat16, Q and probabilities in bfloat16, KV cache in bfloat16"
    ),
    "weights in float16, KV cache in float16": "norm weights in float16, weights in float16, KV cache in float16",
    "llama.cpp, KV cache in q8_0 blocks": "activations in q8_0 blocks, Q in q8_0 blocks, KV cache in q8_0 blocks",
}


@pytest.mark.parametrize("arithmetic", list(ROUNDED))
def test_one_mistaken_layer_of_those_that_choose_the_arithmetic_is_outvoted(
    arithmetic: str, models: Models, torch_trace: Tracer
) -> None:
    shape = Shape("qwen2", n_layer=6, n_embd=256, n_head=8, n_head_kv=2, n_ff=512)
    model = models(shape, "Q8_0")
    options = {"arithmetic": arithmetic, "capture": "layers", "faults": ("rope_pairing@1",)}
    records = judged(torch_trace(model, tokens=tokens_of(17), n_decode=1, **options), model)
    assert [(r.step, r.op) for r, local in records if local.faulty] == [(s, "blk.1.ffn_residual") for s in (0, 1)]
    assert {local.arithmetic for _, local in records if len(local.segment) > 1 and not local.faulty} == {
        ROUNDED[arithmetic]
    }


def test_nan_in_one_token_hides_no_arithmetic(models: Models, tmp_path: Path) -> None:
    model = GGUFFile(models(FAMILIES["qwen2"], "Q8_0"))
    graph = build_graph(model)
    scheme = scheme_named("activations and weights in bfloat16, attention in bfloat16")

    def spoiled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a + b
        y[5:6, 3] = torch.nan  # of steps with so many tokens
        return y

    wrong = graph.changed(replace(graph["blk.0.ffn_residual"], function=spoiled))
    steps = tokens_of(17), (84,), (104,)
    path = trace_graph(wrong, model, tmp_path / "nan.trace", *steps, capture="layers", scheme=scheme)
    assert [(r.step, r.op) for r, local in judged(path, model.path) if local.faulty] == [(0, "blk.0.ffn_residual")]


def test_block_arithmetic_of_wide_heads_is_clean(models: Models, torch_trace: Tracer) -> None:
    """ggml adds the products of a q8_0 block as integers; in float32 sums of 256 the floor was exceeded."""
    shape = Shape("qwen3", n_layer=2, n_embd=512, n_head=4, n_head_kv=2, n_ff=512, head_dim=256)
    model = models(shape, "Q8_0")
    trace = torch_trace(model, tokens=tokens_of(17), arithmetic="KV cache in q8_0 blocks")
    assert alarms(judged(trace, model)) == []


@pytest.mark.parametrize(
    ("arch", "tokens"),
    [("qwen3next", (58, 114, 133)), ("qwen3next", (152, 150, 105)), ("gpt-oss", (58, 114, 133)), ("gpt-oss", (81,))],
)
def test_what_chose_an_arithmetic_need_not_tell_it_from_others(
    arch: str, tokens: tuple[int, ...], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """Biases in bfloat16, or as the file has them: four values of one token fit both, those of the next one alone."""
    path = trace_torch(tiny(arch), tmp_path / "mine.trace", TorchOptions(dtype="bf16"), tokens, 2)
    assert [op.op for op in check_trace(path, tiny(arch)).ops if op.status == "faulty"] == []


@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_gelu_from_a_table_is_clean_behind_hidden_states(
    arch: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model = Model(tiny(arch))
    table = scheme_named("exact, activations looked up in float16")
    path = trace_graph(
        model.graph, model.file, tmp_path / "mine.trace", range(40, 60), (97,), capture="layers", scheme=table
    )
    assert check_trace(path, model).verdict == "match"


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["all", "layers"])
def test_gelu_in_half_precision_is_not_said_to_be_looked_up(
    capture: Literal["all", "layers"], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """A table of float16 gives nearly always the same, and ggml alone has one."""
    options = TorchOptions(dtype="bf16", capture=capture)
    path = trace_torch(tiny("gemma2"), tmp_path / "mine.trace", options, range(40, 60), 1)
    result = check_trace(path, tiny("gemma2"))
    assert result.verdict == "match"
    assert {op.local.arithmetic for op in result.ops if op.local and "looked up" in op.local.arithmetic} == set()


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param("gemma3n", marks=pytest.mark.slow),
        pytest.param("gemma4", marks=pytest.mark.slow),
        "t5encoder",
        pytest.param("rwkv7", marks=pytest.mark.slow),
    ],
)
def test_sums_of_rows_that_are_no_multiples_of_blocks_are_judged(
    arch: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """What a layer adds may be rounded in blocks: not what is added to 24 channels, or to keys; nor are six values that
    have one in common terms of several ranks. Half precision asks for all.
    """
    options = TorchOptions(dtype="bf16", capture="layers")
    path = trace_torch(tiny(arch), tmp_path / "mine.trace", options, (58, 114, 133), 2)
    assert check_trace(path, tiny(arch)).verdict == "match"


@pytest.mark.slow
def test_what_a_mask_is_filled_with_is_infinite_in_half_precision(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Chameleon's logits of images are float32's least number, which is no number of bfloat16."""
    options = TorchOptions(dtype="bf16", capture="layers")
    path = trace_torch(tiny("chameleon"), tmp_path / "mine.trace", options, (22, 60, 14), 1)
    assert check_trace(path, tiny("chameleon")).verdict == "match"


@pytest.mark.parametrize(
    ("arch", "dtype", "tokens"),
    [
        ("talkie", "bf16", (167, 129, 74)),  # what is normed already is as it was, when it is stored
        ("glm-dsa", "bf16", (121, 74, 195)),  # 17/32, 123/128 and 93/128 times 1.7 err by the same
        ("mimo2", "f16", (24, 130, 17)),
    ],
)
def test_roundings_of_what_has_few_bits_may_be_alike(
    arch: str, dtype: Any, tokens: tuple[int, ...], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    path = trace_torch(tiny(arch), tmp_path / "mine.trace", TorchOptions(dtype=dtype), tokens, 2)
    assert [op.op for op in check_trace(path, tiny(arch)).ops if op.status == "faulty"] == []


def test_a_segment_may_have_what_the_trace_has_elsewhere(models: Models, tmp_path: Path) -> None:
    """One token that was asked of decode fitted without a cache in float16 as well, which prompts were seen to have."""
    model = Model(models("qwen3"))
    scheme = scheme_named("exact, KV cache in float16")
    path = trace_graph(
        model.graph, model.file, tmp_path / "mine.trace", range(40, 60), (97,), (110,), capture="layers", scheme=scheme
    )
    (replay,) = replays_of(model, [Subject(Trace(path), {})])
    record = replay.trace.ops[2, "blk.1.ffn_residual"]
    assert replay.judge(record).judgement == "sound"
    plain = {sort: replace(one, schemes=PLAIN[1:]) for sort, one in replay.plan.choices.items() if sort.n_tokens == 1}
    replay.plan = replace(replay.plan, choices={**replay.plan.choices, **plain})
    assert replay.choice(record).schemes == PLAIN[1:]
    assert replay.judge(record).judgement == "sound"
    alone = {sort: replace(one, schemes=PLAIN[1:]) for sort, one in replay.plan.choices.items()}
    replay.plan = replace(replay.plan, choices=alone)
    assert replay.judge(record).judgement == "faulty"


@pytest.mark.slow
def test_what_may_be_drowned_roundings_or_a_mistake_of_their_size_is_blind(models: Models, torch_trace: Tracer) -> None:
    """A float32 engine whose logits are 4% off: about as far from right as a quantised cache would take them."""
    model = models(Shape("qwen2", n_layer=3, n_embd=256, n_head=8, n_head_kv=2, n_ff=512), "Q8_0")
    path = logits_of(torch_trace(model, tokens=tokens_of(17), n_decode=0))
    values = np.memmap(path.with_name(f"{path.stem.removesuffix('-logits')}.bin"), np.float32, "r+")
    for record in Trace(path).ops.values():
        values[record.offset // 4 : record.offset // 4 + record.size] *= np.float32(1.04)
    values.flush()
    assert all(local.faulty or local.blind for _, local in judged(path, model))


@pytest.mark.parametrize(
    ("weights", "dtype", "fault"),
    [
        ("F32", "f32", "eps@1"),
        ("Q4_K_M", "f32", "rope_decode_shifted@0"),
        ("Q8_0", "bf16", "gqa_heads@1"),
        ("F16", "f16", "attention_scale@0"),
    ],
)
def test_a_fault_is_an_alarm(weights: str, dtype: str, fault: str, models: Models, torch_trace: Tracer) -> None:
    model = models(FAMILIES["qwen2"], weights)
    trace = torch_trace(model, tokens=tokens_of(17), dtype=dtype, faults=(fault,))
    assert alarms(judged(trace, model)) != []


def trace_of(run: Run, model: Path, llama_cpp_trace: Tracer, torch_trace: Tracer) -> Path:
    if run.engine == "torch":
        return torch_trace(model, tokens=tokens_of(run.length), **run.options)
    return llama_cpp_trace(model, tokens_of(run.length), **{"threads": 1} | run.options)


def tokens_of(length: int) -> tuple[int, ...]:
    """A BOS and random tokens, or some text."""
    return (
        TOKENS if length == len(TOKENS) else (256, *np.random.default_rng(length).integers(0, 320, length - 1).tolist())
    )


def judged(path: Path, model: Path) -> list[tuple[Any, Any]]:
    """Every record with its local error; each op of each step must be among them."""
    file, trace = GGUFFile(model), Trace(path)
    replay = Replay(trace, build_graph(file), Weights(file, keep_bytes=1 << 28))
    records = [(record, local) for _, record, local in judge_all([replay])]
    assert len(records) == len(trace.ops)
    return records


def alarms(records: list[tuple[Any, Any]]) -> list[str]:
    """Faulty ops, with the figures that make them so."""
    return [
        f"{record.op} in step {record.step}: NMSE {local.nmse:.1e}, floor {local.floor:.1e}, "
        f"excess {local.excess:.3g}, {local.arithmetic}"
        for record, local in records
        if local.faulty
    ]
