"""Ten architectures without a family of their own, from their lifted graph to the report, through the commands.

All of them, in four weight types: benchmarks/architectures.py, docs/architectures.md.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tracediff.trace.reader import Trace

Tiny = Callable[[str], Path]
Cli = Callable[..., tuple[int, str, str]]
TOKENS = ("--tokens", "256,84,104,101,32,113,117,105,99")
# Of each a mistake to plant, and where it shows.
ARCHITECTURES = {
    "gemma3": ("window@blk.5.attn_probs", "blk.5.attn_probs"),  # the layer without a window; scaled embeddings, GeGLU
    "qwen3moe": ("weights_not_normalised@1", "blk.1.ffn_moe_weights_norm"),
    "gpt-oss": ("sinks_ignored@1", "blk.1.attn_probs"),
    "deepseek2": ("scale_dropped@1", "blk.1.ffn_moe_weights_scaled"),  # latent attention, a shared expert
    "qwen3next": ("gate_ignored@1", "blk.1.attn_gated"),  # a delta net
    "mamba2": ("decay_as_logarithm@1", "blk.1.ssm_scan"),
    "phi3": ("rope_pairing@1", "blk.1.attn_q_rope"),  # fused projections
    "gemma2": ("act_silu@1", "blk.1.ffn_act"),  # capped scores and logits
    "lfm2": ("conv_reversed@1", "blk.1.shortconv.conv"),
    "neo-bert": ("gate_up_swapped@1", "blk.1.ffn_up"),  # no cache, and tokens see all others
}


def test_rope_of_a_long_context(tiny: Tiny, cli: Cli, tmp_path: Path) -> None:
    """llama.cpp takes the factors of long contexts where the context is long, however short the prompt is."""
    trace, page = tmp_path / "a.trace", tmp_path / "result.json"
    assert cli("trace", tiny("phi3"), "--engine", "llama.cpp", *TOKENS, "--ctx", 2048, "-o", trace)[0] == 0
    assert Trace(trace).header.context == 2048
    code, output, error = cli("check", trace, "--model", tiny("phi3"))
    assert code == 0, output + error

    trace.write_text(trace.read_text().replace(',"context":2048', ""))
    code, output, _ = cli("check", trace, "--model", tiny("phi3"), "--time", 5, "--json", page)
    assert code == 1, output
    found = {faulty["op"]: faulty["cause"]["name"] for faulty in json.loads(page.read_text())["faulty"]}
    assert found == {f"blk.{n}.attn_{x}_rope": "rope_factors_of_another_length" for n in range(2) for x in "qk"}


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_record_of_a_single_value(dtype: str, tiny: Tiny, cli: Cli, tmp_path: Path) -> None:
    """One number is a multiple of any other, which says nothing: the sum of a decoded token's expert weights."""
    model, trace = tiny("qwen3moe"), tmp_path / "a.trace"
    assert cli("trace", model, *TOKENS, "--decode", 2, "--dtype", dtype, "-o", trace)[0] == 0
    code, output, error = cli("check", trace, "--model", model)
    assert code == 0, output + error


@pytest.mark.parametrize("arch", ["t5encoder", "minimax-01", "chameleon"])
def test_what_llama_cpp_makes_of_the_step_by_itself(arch: str, tiny: Tiny, cli: Cli, tmp_path: Path) -> None:
    """Buckets of distances, decays and a parameter by tokens, a part set: in both engines, and every op is judged."""
    page = tmp_path / "result.json"
    code, output, error = cli("run", tiny(arch), *TOKENS, "--decode", 1, "--json", page)
    assert code == 0, output + error
    others = [op for op in json.loads(page.read_text())["ops"] if op["status"] != "ok"]
    assert all(op["status"] == "unmatched" and op["reference"] is None for op in others)  # it computes none of them
    assert {op["op"] for op in others} <= {"pos_bucket_enc", "slopes", "q_decay_exp", "k_decay_exp", "diag_decay_exp"}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_from_model_to_report(arch: str, tiny: Tiny, cli: Cli, tmp_path: Path) -> None:
    model, folder, page = tiny(arch), tmp_path / "traces", tmp_path / "result.json"
    fault, place = ARCHITECTURES[arch]
    code, output, error = cli("run", model, *TOKENS, "--decode", 1, "--save", folder, "--json", page)
    assert code == 0, output + error
    judged = json.loads(page.read_text())
    assert {op["status"] for op in judged["ops"]} == {"ok"}
    assert {op["step"] for op in judged["ops"]} == {0, 1}
    reference, candidate = folder / "reference.trace", folder / "candidate.trace"

    code, output, _ = cli("inspect", model)
    assert code == 0
    assert place in output.split()
    code, output, _ = cli("inspect", model, "--skeleton")
    assert code == 0
    assert {place, "blk.N." + place.partition("blk.")[2].partition(".")[2]} & {*output.split()}
    code, output, error = cli("validate", candidate, "--model", model)
    assert (code, error) == (0, "")
    assert "0 violations, 0 warnings" in output
    code, output, _ = cli("weights", model, "--trace", candidate)
    assert code == 0
    assert "wrong" not in output

    flash = tmp_path / "flash.trace"
    assert cli("trace", model, "--engine", "llama.cpp", "--flash-attn", *TOKENS, "-o", flash)[0] == 0
    code, output, error = cli("check", flash, "--model", model)
    assert code == 0, output + error

    faulty = tmp_path / "faulty.trace"
    assert cli("trace", model, *TOKENS, "--fault", fault, "-o", faulty)[0] == 0
    assert cli("compare", reference, faulty, "--model", model, "--json", page)[0] == 1
    found = json.loads(page.read_text())
    assert found["first_divergence"]["op"] == place
    assert found["faulty"][0]["cause"]["name"] == fault.partition("@")[0]
