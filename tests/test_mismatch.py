"""Trainer against rollout: pairs whose gap has a known cause, each named; and what cannot be lined up, in words."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TOKENS, Models, logits_of, some_of

from tracediff.compare.logits import log_softmax
from tracediff.engine.recorder import TensorWriter
from tracediff.engine.torch_engine import StepInput, TorchEngine
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.mismatch.lanes import Side
from tracediff.mismatch.logprobs import Told
from tracediff.mismatch.mismatch import mismatch_traces
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.trace.format import Step
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

Cli = Callable[..., tuple[int, str, str]]
IDS = (*TOKENS, *range(60, 70))  # enough positions that no rule fits them by chance


def traced(model: Path, out: Path, **options: object) -> Path:
    """A trace of all tokens at once by the torch engine."""
    return trace_torch(model, out, TorchOptions(**options), IDS)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trainer(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(models("llama", "F32"), tmp_path_factory.mktemp("trainer") / "a.trace")


def logits(trace: Path) -> np.ndarray:
    told = Trace(trace)
    return told.values(told.ops[0, "output"])


def written(out: Path, values: np.ndarray, op: str = "output", tokens: tuple[int, ...] = IDS, at: int = 0) -> Path:
    """A trace of one op."""
    with TraceWriter(out, "an engine") as writer:
        writer.step(0, tokens, tuple(range(at, at + len(tokens))))
        writer.op(0, op, values.astype(np.float32), "f32")
    return out


def processed(rows: np.ndarray, t: float = 1.0, k: int = 0, p: float = 1.0, first: bool = True) -> np.ndarray:
    """What a sampler makes of logits, row by row, written out plainly: what it drops becomes minus infinity."""
    made = np.full(rows.shape, -np.inf)
    for row, out in zip(rows.astype(np.float64), made, strict=True):
        order = np.argsort(-row)
        if k:
            order = order[:k]
        heat = row[order] / (t if first else 1)
        shares = np.exp(heat - heat.max())
        shares /= shares.sum()
        kept = order[: 1 + int((shares.cumsum() < p).sum())]
        out[kept] = log_softmax(row[kept] / t)
    return made


def test_the_same_engine_twice(trainer: Path, models: Models, tmp_path: Path, cli: Cli) -> None:
    """In other passes: the gap is of the order of float32, which is said to explain it."""
    steps = [Step(0, IDS[:9], tuple(range(9))), *(Step(n - 8, IDS[n : n + 1], (n,)) for n in range(9, len(IDS)))]
    rollout = trace_torch(models("llama", "F32"), tmp_path / "b.trace", TorchOptions(), steps=steps)
    code, out, _ = cli("mismatch", trainer, rollout)
    assert (code, "MATCH" in out) == (0, True)
    result = mismatch_traces(trainer, rollout)
    assert result.gap.n == len(IDS) - 1
    assert result.gap.mean_abs < result.floor


def test_figures_are_those_of_the_definitions(trainer: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(1).standard_normal((len(IDS), logits(trainer).shape[1])) * 0.3
    rollout = written(tmp_path / "b.trace", logits(trainer) + noise)
    p, q = log_softmax(logits(trainer)), log_softmax(logits(rollout))
    gap = np.array([p[i, token] - q[i, token] for i, token in enumerate(IDS[1:])])
    found = mismatch_traces(trainer, rollout).gap
    assert (found.mean, found.mean_abs) == pytest.approx((gap.mean(), np.abs(gap).mean()))
    assert found.k3 == pytest.approx((np.exp(gap) - 1 - gap).mean())
    assert found.kl == pytest.approx((np.exp(q) * (q - p)).sum(1)[:-1].mean())
    later = mismatch_traces(trainer, rollout, prompt=10).gap
    assert (later.n, later.mean) == pytest.approx((len(IDS) - 10, gap[9:].mean()))


SAMPLERS = {
    "temperature 0.7": {"t": 0.7},
    "top-p 0.9 renormalised": {"p": 0.9},
    "temperature 0.6, then top-k 20 and top-p 0.95 renormalised": {"t": 0.6, "k": 20, "p": 0.95},
    "top-p 0.8 renormalised, then temperature 0.6": {"t": 0.6, "p": 0.8, "first": False},
}


@pytest.mark.parametrize("words", SAMPLERS)
@pytest.mark.parametrize("alone", [False, True], ids=["logits", "log-probabilities alone"])
def test_processed_log_probabilities(words: str, alone: bool, trainer: Path, tmp_path: Path) -> None:
    """Named with their numbers on either side; of tokens that the sampler could have chosen."""
    raw = written(tmp_path / "a.trace", 3 * logits(trainer))  # sharper, as a trained model is
    made = processed(logits(raw), **SAMPLERS[words])  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    tokens = (IDS[0], *(int(rng.choice(made.shape[1], p=np.exp(row))) for row in made[:-1]))
    a = written(tmp_path / "a.trace", logits(raw), tokens=tokens)
    if alone:
        said = np.array([0.0, *(made[i, token] for i, token in enumerate(tokens[1:]))])
        b = written(tmp_path / "b.trace", said, "token_logprobs", tokens)
    else:
        b = written(tmp_path / "b.trace", made, tokens=tokens)
    for sides, which in (((a, b), "B"), ((b, a), "A")):
        result = mismatch_traces(*sides)
        assert (result.verdict, result.processed and result.processed.side) == ("diverged", which)
        assert result.findings[0].text.startswith(f"{which}'s log-probabilities are processed")
        assert f"raw: {words} of " in result.findings[0].text
    assert result.processed
    assert result.processed.left < 1e-5


def test_raw_ones_are_not_called_processed(trainer: Path, tmp_path: Path) -> None:
    """Another engine's noise takes no temperature, however large."""
    noise = np.random.default_rng(2).standard_normal((len(IDS), logits(trainer).shape[1])) * 0.2
    result = mismatch_traces(trainer, written(tmp_path / "b.trace", logits(trainer) + noise))
    assert (result.verdict, result.processed, result.findings) == ("diverged", None, ())


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("alone", [False, True], ids=["logits", "log-probabilities alone"])
def test_off_by_one(by: int, alone: bool, trainer: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    if alone:
        said = np.nan_to_num(Told(Trace(trainer)).logprobs)
        b = written(tmp_path / "b.trace", np.roll(said, by), "token_logprobs")
    else:
        b = written(tmp_path / "b.trace", np.roll(logits(trainer), by, 0))
    assert f"off by 1: what {b} says of a token stands one token {'late' if by > 0 else 'early'}" in refused(
        "mismatch", trainer, b
    )
    shifted = written(tmp_path / "c.trace", logits(trainer), at=1)
    assert "the positions are shifted: token 0 is at 0 in" in refused("mismatch", trainer, shifted)


def test_another_tokenisation(trainer: Path, models: Models, tmp_path: Path, refused: Callable[..., str]) -> None:
    """`th` as one token in place of two: the same text, other ids."""
    words = Model(models("llama", "F32")).vocabulary
    pair = next(t for t in range(257, 300) if not words.is_special(t) and len(words.decode([t])) == 2)
    pieces = tuple(words.decode([pair]).encode())
    apart, together = (IDS[0], *pieces, *IDS[1:]), (IDS[0], pair, *IDS[1:])
    a = trace_torch(models("llama", "F32"), tmp_path / "a.trace", TorchOptions(), apart)
    b = trace_torch(models("llama", "F32"), tmp_path / "b.trace", TorchOptions(), together)
    said = refused("mismatch", a, b, "--model", models("llama", "F32"))
    assert "the token ids differ, first at index 1" in said
    assert "Both are the same text: it was tokenised anew." in said
    assert "hand the rollout's ids to the trainer" in refused("mismatch", a, b)


def test_what_tells_nothing(trainer: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    rows = np.zeros((len(IDS), 64))
    assert "it holds no logits" in refused("mismatch", trainer, written(tmp_path / "n.trace", rows, "output_norm"))
    zeros = written(tmp_path / "z.trace", rows[:, 0], "token_logprobs")
    assert "these are no log-probabilities" in refused("mismatch", trainer, zeros)
    assert "the vocabularies differ" in refused("mismatch", trainer, written(tmp_path / "v.trace", rows))


def test_half_precision_is_undecided_from_types_alone(trainer: Path, models: Models, tmp_path: Path, cli: Cli) -> None:
    rollout = traced(models("llama", "F32"), tmp_path / "b.trace", dtype="bf16")
    code, out, error = cli("mismatch", trainer, rollout, "--json", "-")
    assert (code, json.loads(out)["verdict"]) == (2, "undecided")
    assert "Give --model, or --tolerance NATS" in error
    assert cli("mismatch", trainer, rollout, "--tolerance", 1)[0] == 0
    assert cli("mismatch", logits_of(trainer), logits_of(rollout), "--tolerance", 1e-6)[0] == 1


# --- shares of ops ---------------------------------------------------------------------------------------------------


def changed(model: Path, out: Path, change: Callable[[Op], Op]) -> Path:
    """A trace of the model in float32 with ops computed in another way."""
    opened = Model(model)
    graph = opened.graph.changed(*map(change, opened.graph))
    engine = TorchEngine(graph, opened.weights(torch.float32))
    with TraceWriter(out, "another engine", "llama", model.name, "F32") as writer:
        engine.run(0, StepInput(IDS, tuple(range(len(IDS)))), TensorWriter(writer))
    return out


def cast_first(op: Op) -> Op:
    """A norm that rounds its values to bfloat16 before it multiplies with the weight, as transformers does."""

    def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).bfloat16().float() * weight

    return replace(op, function=norm) if op.kind == "rms_norm" else op


def stale(model: Path, out: Path, tensor: str = "blk.1.ffn_down.weight") -> Path:
    """The model a step of training earlier, in one tensor."""
    content = bytearray(model.read_bytes())
    info = Model(model).file.tensors[tensor]
    values = np.frombuffer(Model(model).file.raw(info), np.float32)
    other = values + 2e-3 * np.random.default_rng(5).standard_normal(values.size).astype(np.float32) * values.std()
    at = bytes(content).index(values.tobytes())
    content[at : at + values.nbytes] = other.tobytes()
    out.write_bytes(content)
    return out


PAIRS = {
    "norm cast order": ("norms", "normed_values_in_bfloat16"),
    "bf16 rope": ("rope", "rope_tables_in_bfloat16"),
    "f16 sums": ("attention", "sums_in_float16"),
    "one stale tensor": ("ffn_down alone (blk.1.ffn_down)", "stale_weights"),
}


def rollout_of(pair: str, model: Path, folder: Path) -> Path:
    out = folder / "b.trace"
    if pair == "norm cast order":
        return changed(model, out, cast_first)
    if pair == "one stale tensor":
        return traced(stale(model, folder / model.name), out)
    ways = {"bf16 rope": "rope tables in bfloat16", "f16 sums": "exact, flash attention"}
    return traced(model, out, arithmetic=ways[pair])


@pytest.mark.parametrize(("pair", "swapped"), [*((pair, False) for pair in PAIRS), ("norm cast order", True)])
def test_known_pairs(pair: str, swapped: bool, trainer: Path, models: Models, tmp_path: Path) -> None:
    """One thing differs: it is named, and makes all of the gap but for roundings that it turned elsewhere."""
    model = models("llama", "F32")
    sides = trainer, rollout_of(pair, model, tmp_path)
    result = mismatch_traces(*(reversed(sides) if swapped else sides), model=model)
    what, name = PAIRS[pair]
    share, *others = result.shares
    assert (result.verdict, share.what, share.name, result.findings[0].mistake) == ("diverged", what, name, name)
    assert [other.what for other in others if abs(other.alone) > 0.1] == []
    assert [share.alone, share.last, share.added] == pytest.approx([1, 1, 1], abs=0.1)
    assert result.rest == pytest.approx(0, abs=1e-3)


def test_a_mistake_is_no_arithmetic(trainer: Path, models: Models, tmp_path: Path) -> None:
    """GELU for SiLU: both are computed exactly, and only one is the model's."""
    model = models("llama", "F32")
    share, *_ = mismatch_traces(trainer, traced(model, tmp_path / "b.trace", faults=("act_gelu",)), model=model).shares
    assert (share.what, share.a, share.b) == ("activations", "exact", "in no arithmetic known here")


def test_two_causes_at_once(trainer: Path, models: Models, tmp_path: Path) -> None:
    """Shares are what each makes in an engine that has it alone, measured by running that engine."""
    model = models("llama", "F32")
    other = stale(model, tmp_path / model.name)
    both = traced(other, tmp_path / "both.trace", arithmetic="rope tables in bfloat16")
    result = mismatch_traces(trainer, both, model=model)
    one = {
        "rope": traced(model, tmp_path / "rope.trace", arithmetic="rope tables in bfloat16"),
        "ffn_down alone (blk.1.ffn_down)": traced(other, tmp_path / "stale.trace"),
    }
    said = {name: Told(Trace(path)).logprobs[1:] for name, path in {"": trainer, "both": both, **one}.items()}
    whole = said[""] - said["both"]
    expected = {name: float((said[""] - said[name]) @ whole / (whole @ whole)) for name in one}
    assert min(expected.values()) > 0.1
    found = {share.what: share.alone for share in result.shares}
    assert found == pytest.approx(expected, abs=0.02)
    assert sum(share.added for share in result.shares) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("kept", ["ffn_residual", "output"])
def test_little_recorded(kept: str, trainer: Path, models: Models, tmp_path: Path) -> None:
    """What an engine does in known arithmetic is told from hidden states, or the logits alone."""
    rollout = rollout_of("bf16 rope", models("llama", "F32"), tmp_path)
    few = [
        some_of(trace, trace.with_name(f"{kept}-{trace.name}"), lambda op: op.endswith((kept, "output")))
        for trace in (trainer, rollout)
    ]
    result = mismatch_traces(*few, model=models("llama", "F32"))
    assert [(share.what, share.name) for share in result.shares] == [("rope", "rope_tables_in_bfloat16")]
    assert result.shares[0].alone == pytest.approx(1, abs=0.1)


def test_log_probabilities_alone_have_no_shares(trainer: Path, models: Models, tmp_path: Path, cli: Cli) -> None:
    """And the report says what to record."""
    model = models("llama", "F32")
    rollout = rollout_of("bf16 rope", model, tmp_path)
    said = written(tmp_path / "said.trace", np.nan_to_num(Told(Trace(rollout)).logprobs), "token_logprobs")
    code, out, _ = cli("mismatch", trainer, said, "--model", model, "--json", tmp_path / "r.json")
    assert (code, "record all ops on both sides" in " ".join(out.split())) == (1, True)
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["schema"], result["shares"]) == ("tracediff/mismatch/1", [])
    assert result["gap"]["unexplained"] == pytest.approx(1, abs=0.01)


def test_weights_in_memory_come_first(trainer: Path, models: Models, tmp_path: Path, cli: Cli) -> None:
    """A norm's weight that was recorded and is not the file's."""
    model = models("llama", "F32")
    rollout = traced(stale(model, tmp_path / model.name, "blk.2.attn_norm.weight"), tmp_path / "b.trace")
    for options in (("--model", model), ()):
        code, out, _ = cli("mismatch", trainer, rollout, *options)
        assert code == 1
        assert "B holds other weights: blk.2.attn_norm.weight is not" in " ".join(out.split())


@pytest.mark.parametrize(("op", "axis"), [("blk.0.attn_scores", 1), ("blk.0.attn_norm", 0)])
def test_tokens_that_were_not_recorded_are_replays(op: str, axis: int, tmp_path: Path, models: Models) -> None:
    """Of scores heads come before tokens."""
    n_heads, n_tokens, rows = 4, 6, (1, 4)
    whole = np.random.default_rng(0).normal(size=(n_heads, n_tokens, n_tokens)).astype(np.float32)
    whole = whole if axis else whole.swapaxes(0, 1).reshape(n_tokens, -1)
    out = tmp_path / "some.trace"
    with TraceWriter(out, "an engine") as writer:
        writer.step(0, IDS[:n_tokens], tuple(range(n_tokens)))
        writer.op(0, op, whole.take(rows, axis), "f32", rows)
    side = Side(Trace(out), Model(models("llama", "F32")).weights(), {})
    seen = side.recorded(0, op, torch.zeros(whole.shape))
    assert seen is not None
    expected = np.zeros_like(whole)
    expected[(slice(None),) * axis + (list(rows),)] = whole.take(rows, axis)
    np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_honest_ways_match(dtype: str, models: Models, tmp_path: Path) -> None:
    """Prefill and decode of one engine: noise, of which no shares are told."""
    model = models("qwen3", "F32")
    steps = [Step(0, IDS[:20], tuple(range(20))), *(Step(n - 19, IDS[n : n + 1], (n,)) for n in range(20, len(IDS)))]
    a = traced(model, tmp_path / "a.trace", dtype=dtype)
    b = trace_torch(model, tmp_path / "b.trace", TorchOptions(dtype=dtype), steps=steps)
    result = mismatch_traces(a, b, model=model)
    assert (result.verdict, result.shares, result.findings) == ("match", (), ())
    assert result.gap.mean_abs < result.beyond < {"f32": 1e-4, "bf16": 0.2}[dtype]


def test_another_arithmetic_is_a_mismatch(models: Models, tmp_path: Path, llama_cpp_trace: Callable[..., Path]) -> None:
    """llama.cpp rounds activations to blocks of 8 bits: sound by itself, and no trainer does it."""
    model = models("k-quants", "Q4_K_M")
    rollout = llama_cpp_trace(model, IDS, 0)
    result = mismatch_traces(traced(model, tmp_path / "a.trace"), rollout, model=model)
    assert (result.verdict, result.shares[0].name) == ("diverged", "activations_in_q8_K_blocks")
    assert result.shares[0].alone == pytest.approx(1, abs=0.1)


def test_routes_that_flip(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A mixture of experts in half precision: other experts make more of it than all arithmetic."""
    model, ids = tiny("olmoe"), tuple(range(3, 27))
    a = trace_torch(model, tmp_path / "a.trace", TorchOptions(), ids)
    b = trace_torch(model, tmp_path / "b.trace", TorchOptions(arithmetic="activations and weights in bfloat16"), ids)
    result = mismatch_traces(a, b, model=model)
    assert (result.verdict, result.shares[0].name) == ("diverged", "routes_flipped")
    assert result.shares[0].alone == pytest.approx(1, abs=0.1)
    assert "tokens go to other experts" in result.findings[0].text


def test_several_sequences(models: Models, tmp_path: Path) -> None:
    """Prompts of a batch: the first token of each has no log-probability, and shares are those of all."""
    model, parts = models("llama", "F32"), (IDS[:12], IDS[12:], (9, *IDS[5:14]))
    steps = [Step(n, part, tuple(range(len(part))), n) for n, part in enumerate(parts)]
    a, b = (
        trace_torch(model, tmp_path / f"{name}.trace", TorchOptions(arithmetic=how), steps=steps)
        for name, how in (("a", None), ("b", "rope tables in bfloat16"))
    )
    result = mismatch_traces(a, b, model=model)
    alone = []
    for n, part in enumerate(parts):
        one = [
            trace_torch(model, tmp_path / f"{name}{n}.trace", TorchOptions(arithmetic=how), part)
            for name, how in (("a", None), ("b", "rope tables in bfloat16"))
        ]
        alone.append(mismatch_traces(*one).gap)
    assert result.gap.n == sum(gap.n for gap in alone) == sum(map(len, parts)) - 3
    assert result.gap.mean == pytest.approx(sum(gap.mean * gap.n for gap in alone) / result.gap.n)
    assert [share.what for share in result.shares] == ["rope"]
    assert result.shares[0].alone == pytest.approx(1, abs=0.1)
