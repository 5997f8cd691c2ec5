"""One engine in two ways: honest ones agree in each mode, ten mistakes of cache and batching are found in theirs."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import Models
from torch import Tensor

from tracediff.engine import torch_run
from tracediff.engine.torch_engine import TorchEngine
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import MismatchError
from tracediff.itself.two_ways import compare_with_itself
from tracediff.model.graph import Op
from tracediff.trace.format import Step
from tracediff.trace.reader import Trace
from tracediff.trace.ways import mode

TOKENS, OTHER = (256, 84, 104, 101, 32, 113, 117, 105, 99), (7, 9, 11, 13, 15)
N = len(TOKENS)


def in_passes(*sizes: int) -> list[Step]:
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [
        Step(n, TOKENS[e - s : e], tuple(range(e - s, e))) for n, (s, e) in enumerate(zip(sizes, ends, strict=True))
    ]


def in_a_batch(row: int) -> list[Step]:
    """Beside a shorter prompt, before it or behind it; then both decode."""
    prompts = [OTHER[:4], TOKENS[:7]] if row else [TOKENS[:7], OTHER[:4]]
    sequences = [n for n, prompt in enumerate(prompts) for _ in prompt]
    first = Step(0, sum(prompts, ()), tuple(p for x in prompts for p in range(len(x))), sequences=tuple(sequences))
    fed = [(TOKENS[7], 7), (OTHER[4], 4)][:: -1 if row else 1]
    second = Step(1, tuple(t for t, _ in fed), tuple(p for _, p in fed), sequences=(0, 1))
    return [first, second, Step(2, TOKENS[8:], (8,), sequence=row)]


WAYS = {
    "prefill": in_passes(N),
    "decode": in_passes(*(1,) * N),
    "chunks": in_passes(4, 3, 2),
    "row 0": in_a_batch(0),
    "row 1": in_a_batch(1),
    "changed": [Step(0, (*TOKENS[:6], 90, *TOKENS[7:]), tuple(range(N)))],
}
MODES = {
    ("prefill", "decode"): "prefill against decode",
    ("chunks", "prefill"): "whole against chunks",
    ("chunks", "decode"): "other passes",
    ("prefill", "row 0"): "alone against sequence 0 of a batch, prefill against decode",
    ("decode", "row 1"): "alone against sequence 1 of a batch, other passes",
    ("row 0", "row 1"): "two batches",
    ("prefill", "changed"): "causality: other tokens from position 6 on, which change nothing before it",
    ("chunks", "chunks"): "the same way, run twice",
}
Plant = Callable[["Mistaken", Op, Mapping[int, Tensor] | None], Mapping[int, Tensor] | None]


class Mistaken(TorchEngine):
    """Calls what is planted before each op, with no result, and after it."""

    def __init__(self, plant: Plant, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._plant = plant

    def _evaluated(self, op: Op, values: object, parts: object) -> dict[int, Tensor]:
        self._plant(self, op, None)
        result = super()._evaluated(op, values, parts)  # type: ignore[arg-type]
        self._plant(self, op, result)
        return result

    def cached(self, sequence: int, op: str = "blk.1.attn_k_rope") -> Tensor:
        return self.caches[sequence].past[op].rows


Fed = Callable[..., Path]


@pytest.fixture
def fed(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fed:
    def trace(way: str, name: str, plant: Plant | None = None, model: Path | None = None, **options: object) -> Path:
        model, out = model or models("qwen2", "F32"), tmp_path / f"{name}.trace"
        with monkeypatch.context() as patch:
            if plant:
                patch.setattr(torch_run, "TorchEngine", partial(Mistaken, plant))
            return trace_torch(model, out, TorchOptions(**options), steps=WAYS[way])  # type: ignore[arg-type]

    return trace


def test_steps_after_the_last_of_both_are_no_gap(fed: Fed, models: Models) -> None:
    """Sequence 1 of the batch goes on when the other trace has ended."""
    alone = trace_torch(models("qwen2", "F32"), fed("row 1", "b").with_name("a.trace"), TorchOptions(), OTHER[:4])
    result = compare_with_itself(alone, alone.with_name("b.trace"))
    assert result.verdict == "match"
    assert result.steps == (0,)
    assert {op.status for op in result.ops} == {"ok"}


@pytest.mark.parametrize("ways", MODES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_honest_ways_agree(ways: tuple[str, str], dtype: str, fed: Fed) -> None:
    a, b = (fed(way, name, dtype=dtype) for way, name in zip(ways, "ab", strict=True))
    result = compare_with_itself(a, b)
    assert result.verdict == "match"
    assert result.notes[0].startswith(f"{MODES[ways]}. ")
    assert {op.status for op in result.ops} == {"ok"}


def at(name: str, change: Callable[[Mistaken, Mapping[int, Tensor]], None], after: bool = False) -> Plant:
    """A change made before or after the op is computed, in a pass that is not the first."""

    def plant(engine: Mistaken, op: Op, result: Mapping[int, Tensor] | None) -> None:
        if op.name == name and after == (result is not None):
            change(engine, result or {})

    return plant


def decoding(engine: Mistaken, sequence: int) -> bool:
    return engine.caches[sequence].n_positions > N - 3


def stale_row(engine: Mistaken, _: object) -> None:
    if decoding(engine, 0):
        engine.cached(0)[-1] = engine.cached(0)[-2]


def wrong_slot(engine: Mistaken, _: object) -> None:
    if len(engine.caches) > 1:
        engine.cached(1)[0] = engine.cached(0)[0]


def row_1_corrupted(_: object, result: Mapping[int, Tensor]) -> None:
    if len(result) > 1:
        result[1][0, 3] += 1


def window_off_by_one(engine: Mistaken, result: Mapping[int, Tensor]) -> None:
    if decoding(engine, 0):
        result[0][..., 0] = 0
        result[0][:] /= result[0].sum(-1, keepdim=True)


def noise(_: object, result: Mapping[int, Tensor]) -> None:
    result[0][:] *= 1 + 1e-6 * torch.rand(result[0].shape)


def kv_type(engine: Mistaken, _: object) -> None:
    engine.cached(0)[:] = engine.cached(0).half()


PLANTED: dict[str, tuple[tuple[str, str], Plant | str, str]] = {
    "stale row": (("prefill", "decode"), at("blk.1.attn_scores", stale_row), "blk.1.attn_scores"),
    "position reset at the second chunk": (("prefill", "chunks"), "rope_chunk_restarts@1", "blk.1.attn_q_rope"),
    "past ignored": (("prefill", "decode"), "cache_ignored@1", "blk.1.attn_probs"),
    "row 1 corrupted": (("prefill", "row 1"), at("blk.1.ffn_up", row_1_corrupted, True), "blk.1.ffn_up"),
    "mask not causal": (("prefill", "changed"), "no_mask@1", "blk.1.attn_probs"),
    "wrong slot": (("decode", "row 1"), at("blk.1.attn_scores", wrong_slot), "blk.1.attn_scores"),
    "window off by one": (("prefill", "decode"), at("blk.1.attn_probs", window_off_by_one, True), "blk.1.attn_probs"),
    "noise in one run": (("prefill", "prefill"), at("blk.1.ffn_down", noise, True), "blk.1.ffn_down"),
    "another KV type": (("chunks", "chunks"), at("blk.1.attn_scores", kv_type), "blk.1.attn_scores"),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_is_found_by_op_and_mode(mistake: str, fed: Fed) -> None:
    """Without the model; the mistake is in the engine, so in the second way it may show, and in the first."""
    ways, planted, op = PLANTED[mistake]
    given = {"faults": (planted,)} if isinstance(planted, str) else {}
    plant = None if isinstance(planted, str) else planted
    a = fed(ways[0], "a", **(given if "causal" in mistake else {}))
    b = fed(ways[1], "b", plant, **given)
    result = compare_with_itself(a, b)
    assert result.verdict == "diverged"
    assert result.first_divergence
    assert result.first_divergence.op == op
    assert result.notes[0].startswith(mode(Trace(b), Trace(a)))


def test_a_state_that_is_taken_twice(fed: Fed, tiny: Callable[[str], Path]) -> None:
    def twice(_: object, op: Op, result: Mapping[int, Tensor] | None) -> None:
        if op.kind == "state" and result:
            result[0][:] *= 2

    model = tiny("mamba")
    a, b, wrong = (
        fed(way, name, plant, model, dtype="f64")
        for way, name, plant in (("prefill", "a", None), ("decode", "b", None), ("decode", "c", twice))
    )
    assert compare_with_itself(a, b).verdict == "match"
    result = compare_with_itself(a, wrong)
    assert (result.verdict, result.notes[0][:22]) == ("diverged", "prefill against decode")
    assert result.first_divergence


def test_shifted_embeddings_are_refused(fed: Fed) -> None:
    """The tokens agree, the rows do not: nothing below would mean anything."""
    a, b = fed("prefill", "a"), fed("prefill", "b")
    trace = Trace(b)
    record = trace.ops[0, "token_embd"]
    data = bytearray(b.with_suffix(".bin").read_bytes())
    shifted = trace.values(record)[[*range(1, N), 0]].tobytes()
    data[record.offset : record.offset + len(shifted)] = shifted  # type: ignore[operator]
    b.with_suffix(".bin").write_bytes(data)
    with pytest.raises(MismatchError, match=r"at position 0 .* the same token, and their token_embd differs"):
        compare_with_itself(a, b)


def test_what_attention_had_of_a_cache(fed: Fed, models: Models, tmp_path: Path) -> None:
    """The first 4 positions are in no step of the second trace; its attention read them all the same."""
    model = models("qwen2", "F32")
    whole, chunks = fed("prefill", "a"), fed("chunks", "b")
    cached = without_first(chunks, tmp_path / "cached.trace")
    result = compare_with_itself(whole, cached, model=model)
    assert (result.verdict, result.faulty) == ("match", [])
    assert result.notes[0].startswith("prefix cache: positions below 4 from a cache against computed")
    assert {op.step for op in result.ops} == {1, 2}
    assert {op.status for op in result.ops} == {"ok"}
    stale = without_first(fed("chunks", "c", at("blk.1.attn_scores", stale_row)), tmp_path / "stale.trace")
    found = compare_with_itself(whole, stale, model=model)
    assert found.first_divergence
    assert found.first_divergence.op == "blk.1.attn_scores"


def without_first(trace: Path, out: Path) -> Path:
    """The trace without its first step, as an engine records it that has that in a cache."""
    lines = [line for line in trace.read_text().splitlines() if '"step":0' not in line]
    lines[-1] = f'{{"type":"end","records":{len(lines) - 1}}}'
    out.write_text("\n".join(lines) + "\n")
    return out
