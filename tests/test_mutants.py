"""Mutants of the example engine, a few: benchmarks/mutants.py runs hundreds."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from mutants import MODELS, Bench, Mutant

from tracediff.pipeline import check_trace


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("mutants"))


def mutated(bench: Bench, old: str, new: str) -> Mutant:
    """One mutation, where the source has this text."""
    start = bench.source.index(old)
    return Mutant("by hand", "", 0, start, start + len(old), old, new)


@pytest.mark.parametrize("model", MODELS, ids=["-".join(model) for model in MODELS])
def test_the_unmutated_engine_has_no_fault(bench: Bench, model: tuple[str, str]) -> None:
    """It adds up in sequence: the error of a decoded token's norm is one factor on its whole row."""
    result = check_trace(bench.clean(model).path, bench.folder / "-".join(model) / "model.gguf")
    assert result.verdict == "match"


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("-2.0 * pair / D", "-2.0 * pair / pair", "blk.0.attn_q_rope"),  # NaN
        ("add(s->attn_residual, s->attn_output, s->x, T * n.n_embd);", ";", "blk.0.attn_residual"),  # zeros
        ("linear(s->gate, s->ffn_norm, m->ffn_gate,", "linear(s->gate, m->ffn_gate, s->ffn_norm,", "blk.0.ffn_gate"),
    ],
)
def test_what_follows_a_mistake_does_not_choose_the_arithmetic(bench: Bench, old: str, new: str, place: str) -> None:
    """Of records that are NaN or zero any arithmetic leaves nothing: the first of the list was chosen for matmuls."""
    (outcome,) = bench.run(mutated(bench, old, new), ("qwen3", "Q4_K_M"), ("all",))
    assert outcome.place == f"0 {place}"
    assert outcome.what in ("located", "explained")


@pytest.mark.parametrize(
    ("old", "new", "model", "said"),
    [
        pytest.param(
            '"attn_v.weight", kv * embd', '"attn_v.weight", D * embd', ("llama", "F32"),
            "channels 35 to 63 are computed with weights from value 244 of attn_k.weight of the layer after on",
            marks=pytest.mark.slow,
        ),
        (
            '"attn_v.bias", kv', '"attn_v.bias", D', ("qwen2", "F32"),
            "channels 36 to 63 use elements 0 to 27 of ffn_norm.weight where those of attn_v.bias belong",
        ),
        (
            ".gate = allocate(ff)", ".gate = allocate(kv)", ("llama", "F32"),
            "values 4100 to 4607 of ffn_gate are those of ffn_up from 0 on: their buffers overlap",
        ),
        (
            "for (int i = 0; i < n; i++) sum += y[i]", "for (int i = 0; i < n - 1; i++) sum += y[i]", ("llama", "F32"),
            "all keys but the last of the exponential are computed; the sum takes all keys but the last",
        ),
        pytest.param(  # in steps of one token what the values before left is most of it, and tells nothing of the rest
            "for (int d = 0; d < D; d++) {", "for (int d = 0; d < S; d++) {", ("qwen3", "F32"),
            "the output's number of channels of a head is taken for the number of keys; it is 48; elsewhere the",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "q_size = n.n_head * D", "q_size = n.n_head * S", ("llama", "F32"),
            "the number of channels is taken for 72; it is 256", marks=pytest.mark.slow,
        ),
        (
            "*const keys = s->k_rope + il * MAX_TOKENS", "*const keys = s->k_rope + il + MAX_TOKENS", ("qwen3", "F32"),
            "each layer's cached attn_k_rope begins 1 value after that of the layer before: they overlap",
        ),
        (
            "*const values = s->v + il * MAX_TOKENS * kv", "*const values = s->v + il * 3 * kv", ("llama", "F32"),
            "each layer's cached attn_v begins 192 values after that of the layer before: they overlap",
        ),
        pytest.param(  # so far that only what the layer before has cached in the last step lies there
            "*const values = s->v + il * MAX_TOKENS * kv", "*const values = s->v + il * 10 * kv", ("llama", "F32"),
            "each layer's cached attn_v begins 640 values after that of the layer before: they overlap",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_mistakes_of_loading_of_buffers_and_of_loops_are_explained(
    bench: Bench, old: str, new: str, model: tuple[str, str], said: str
) -> None:
    (outcome,) = bench.run(mutated(bench, old, new), model, ("all",))
    assert outcome.what == "explained"
    assert said in outcome.said
    assert outcome.tested
    assert not outcome.false
