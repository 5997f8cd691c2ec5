"""What others dump or print becomes a trace, and a trace becomes their file; nothing is lost or made up on the way."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Models, the_message
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

from tracediff.interchange.border import pair_neighbours
from tracediff.interchange.naming import meaning
from tracediff.model.synthetic import Shape, write_model
from tracediff.names import NAMES, split
from tracediff.trace.format import STORAGE, Statistics
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

Cli = Callable[..., tuple[int, str, str]]
GOLDEN = Path(__file__).parent.parent / "traces" / "clean"
SAMPLES = Path(__file__).parent / "samples"
RNG = np.random.default_rng(0)


def contents(path: Path) -> dict[str, object]:
    """All that a trace holds but who wrote it and where in the data file: bits, dtypes, shapes, tokens, statistics."""
    trace = Trace(path)
    assert trace.cut is None
    found: dict[str, object] = {f"step {n}": (step.tokens, step.positions) for n, step in trace.steps.items()}
    for key, record in [*trace.weights.items(), *trace.ops.items()]:
        held = trace.stored(record).tobytes() if record.has_data else None
        statistics = (record.min, record.max, record.mean, record.rms, record.nan, record.inf)
        found[str(key)] = (record.dtype, record.shape, held, statistics)
    return found


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A trace of two steps with weights, which tests may change."""
    for name in ("candidate.trace", "candidate.bin"):
        shutil.copy(GOLDEN / name, tmp_path / name)
    return tmp_path / "candidate.trace"


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Four tokens through a layer of 2 heads of 3 channels, named as Hugging Face modules, batch axis included."""
    return {
        "model.embed_tokens": RNG.standard_normal((1, 4, 6)).astype(np.float32),
        "model.layers.0.self_attn.q_proj": RNG.standard_normal((1, 4, 6)).astype(np.float16),
        "model.layers.0.self_attn.v_proj.output": RNG.standard_normal((1, 4, 2, 3)),
        "model.layers.0.mlp": RNG.standard_normal((1, 4, 6)).astype(np.float32),
        "model.layers.0.output.0": RNG.standard_normal((1, 4, 6)).astype(np.float32),
        "lm_head": RNG.standard_normal((4, 9)).astype(np.float32),
    }


def imported(cli: Cli, form: str, path: Path, out: Path, *options: object) -> str:
    code, output, said = cli("import", form, path, "-o", out, *options)
    assert (code, output) == (0, ""), said
    return said


# ---- Round trips


def test_round_trip_by_safetensors_is_bit_identical(golden: Path, tmp_path: Path, cli: Cli) -> None:
    file, back = tmp_path / "a.safetensors", tmp_path / "back.trace"
    assert cli("export", golden, "-o", file) == (
        0, "", f"exported 79 records and the tokens of 2 steps\nwrote {file}\n",
    )  # fmt: skip
    said = imported(cli, "safetensors", file, back)
    assert said == f"imported 79 records in 2 steps\nwrote {back}\n"
    assert contents(back) == contents(golden)


def test_round_trip_by_npz_is_bit_identical(golden: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("export", golden, "-o", tmp_path / "a.npz")[0] == 0
    imported(cli, "npz", tmp_path / "a.npz", tmp_path / "back.trace")
    assert contents(tmp_path / "back.trace") == contents(golden)
    with np.load(tmp_path / "a.npz") as archive:
        assert archive["step0/tokens"].tolist() == [256, 72, 101, 108, 108, 111]


def every_dtype(path: Path) -> Path:
    """All float16 and bfloat16 there are, NaN payloads included, and no values at all."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(4, -1)
    with TraceWriter(path, "e") as writer:
        writer.step(0, [1, 2, 3, 4], [7, 8, 9, 10])
        writer.op(0, "token_embd", bits, "bf16")
        writer.op(0, "blk.0.attn_norm", bits.view(np.float16), "f16")
        writer.op(0, "blk.0.attn_q", np.array([[[0.1]], [[-0.0]], [[np.nan]], [[-np.inf]]]), "f64")
        writer.op(0, "blk.0.attn_k", np.zeros((4, 0), np.float32), "f32")
        writer.op(0, "blk.0.attn_scores", RNG.standard_normal((1, 4, 4)).astype(np.float32), "f32")
        writer.op_statistics(0, "output", (4, 3), Statistics(0, 1, 0.5, 0.6))
    return path


def test_round_trip_of_every_dtype(tmp_path: Path, cli: Cli) -> None:
    trace, file, back = every_dtype(tmp_path / "a.trace"), tmp_path / "a.safetensors", tmp_path / "back.trace"
    code, _, said = cli("export", trace, "-o", file)
    assert (code, said.splitlines()[0]) == (0, "left out 1 records of statistics only")
    imported(cli, "safetensors", file, back)
    expected = contents(trace)
    del expected["(0, 'output')"]
    assert contents(back) == expected


@pytest.mark.parametrize("form", ["npz", "safetensors"])
def test_round_trip_of_some_tokens_and_of_data_in_another_order(form: str, tmp_path: Path, cli: Cli) -> None:
    """The last token alone; a matrix that lies transposed, whose padding stays behind."""
    trace, file, back = tmp_path / "a.trace", tmp_path / f"a.{form}", tmp_path / "back.trace"
    with TraceWriter(trace, "e") as writer:
        writer.step(0, [1, 2, 3], [0, 1, 2])
        writer.op(0, "token_embd", np.arange(12, dtype=np.float32).reshape(3, 4), "f32")
        writer.op(0, "blk.0.ffn_residual", np.full((1, 4), 7, np.float32), "f32", rows=(2,))
        offset = writer.reserve(4 * 20)
        writer.write_at(offset, np.arange(20, dtype=np.float32))
        writer.op_at(0, "output", (3, 4), "f32", offset, strides=(1, 5))
    assert cli("export", trace, "-o", file)[0] == 0
    imported(cli, form, file, back)
    a, b = Trace(trace), Trace(back)
    assert [(r.op, r.shape, r.rows) for r in b.ops.values()] == [(r.op, r.shape, r.rows) for r in a.ops.values()]
    for key, record in a.ops.items():
        np.testing.assert_array_equal(b.values(b.ops[key]), a.values(record))
    assert b.values(b.ops[0, "output"])[1].tolist() == [1, 6, 11, 16]


def test_round_trip_of_several_sequences(models: Models, tmp_path: Path, cli: Cli) -> None:
    trace, file, back = tmp_path / "a.trace", tmp_path / "a.npz", tmp_path / "back.trace"
    given = ("--tokens", "1,2,3", "--tokens", "4,5,6,7", "--decode", 1, "-o", trace)
    assert cli("trace", models("tiny"), *given)[0] == 0
    assert cli("export", trace, "-o", file)[0] == 0
    imported(cli, "npz", file, back)
    a, b = Trace(trace), Trace(back)
    assert b.steps == a.steps
    assert b.sequences == [0, 1]
    assert {*b.ops} == {*a.ops}
    for key, record in a.ops.items():
        np.testing.assert_array_equal(b.values(b.ops[key]), a.values(record))


def test_bfloat16_in_npz_becomes_float32_and_that_is_said(tmp_path: Path, cli: Cli) -> None:
    trace, file, back = every_dtype(tmp_path / "a.trace"), tmp_path / "a.npz", tmp_path / "back.trace"
    _, _, said = cli("export", trace, "-o", file)
    assert "1 bfloat16 records were written as float32, which numpy knows: the same values" in said
    imported(cli, "npz", file, back)
    a, b = Trace(trace), Trace(back)
    assert b.ops[0, "token_embd"].dtype == "f32"
    np.testing.assert_array_equal(a.values(a.ops[0, "token_embd"]), b.values(b.ops[0, "token_embd"]))


def test_an_imported_trace_is_compared_like_any_other(golden: Path, tmp_path: Path, cli: Cli) -> None:
    file, back = tmp_path / "a.npz", tmp_path / "back.trace"
    cli("export", golden, "-o", file)
    with np.load(file) as archive:
        held = dict(archive)
    imported(cli, "npz", file, back, "--model", GOLDEN / "model.gguf")
    code, output, _ = cli("compare", golden, back)
    assert (code, output.splitlines()[0]) == (0, "MATCH: nothing diverges in 74 ops, compared by drift.")
    held["step0/blk.1.ffn_up"] = held["step0/blk.1.ffn_up"] * np.float32(1.001)
    np.savez(file, **held)
    imported(cli, "npz", file, back, "--model", GOLDEN / "model.gguf")
    code, output, _ = cli("compare", golden, back)
    assert code == 1
    assert output.startswith("DIVERGED: blk.1.ffn_up is the first op over its tolerance in step 0")


# ---- Names


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("blk.12.attn_q", "blk.12.attn_q"),
        ("output_norm", "output_norm"),
        ("model.embed_tokens", "token_embd"),
        ("model.layers.3.self_attn.q_proj", "blk.3.attn_q"),
        ("model.layers.3.self_attn.k_proj.output", "blk.3.attn_k"),
        ("model.layers.3.self_attn.output.0", "blk.3.attn_output"),
        ("language_model.model.layers.10.mlp.down_proj", "blk.10.ffn_down"),
        ("layers.3", "blk.3.ffn_residual"),
        ("model.layers.3.output", "blk.3.ffn_residual"),
        ("model.norm", "output_norm"),
        ("lm_head.output", "output"),
        ("hook_embed", "token_embd"),
        ("blocks.3.attn.hook_q", "blk.3.attn_q"),
        ("blocks.3.attn.hook_rot_k", "blk.3.attn_k_rope"),
        ("blocks.3.hook_resid_post", "blk.3.ffn_residual"),
        ("blocks.3.hook_resid_pre", "blk.2.ffn_residual"),
        ("blocks.0.hook_resid_pre", "token_embd"),
        ("l_out-3", "blk.3.ffn_residual"),
        ("attn_norm-0", "blk.0.attn_norm"),
        ("Vcur-7", "blk.7.attn_v"),
        ("result_output", "output"),
        ("embd", "token_embd"),
        ("attn_q", None),  # of which layer?
        ("blk.0.output_norm", None),
        ("model.layers.3.self_attn.q_projx", None),
        ("", None),
    ],
)  # fmt: skip
def test_names_of_others(name: str, op: str | None) -> None:
    assert meaning(name).op == op


def test_names_that_are_known_to_be_no_op() -> None:
    assert (
        meaning("Qcur-0").no_op == "one name for several tensors (before and after bias and rope): say which with --map"
    )
    assert meaning("ln_final.hook_normalized").no_op == "an RMS norm before its weight"
    assert meaning("model.layers.0.mlp.act_fn").no_op == "silu(gate), not yet multiplied with up"


def test_names_of_sglang() -> None:
    names = {
        "model.embed_tokens.output": "token_embd",
        "model.layers.0.input_layernorm.output": "blk.0.attn_norm",
        "model.layers.4.input_layernorm.output.0": "blk.4.attn_norm",
        "model.layers.4.input_layernorm.output.1": "blk.3.ffn_residual",
        "model.layers.4.self_attn.rotary_emb.output.1": "blk.4.attn_k_rope",
        "model.layers.4.self_attn.attn.output": "blk.4.attn_kqv",
        "model.layers.4.post_attention_layernorm.output.1": "blk.4.attn_residual",
        "model.layers.4.mlp.act_fn.output": "blk.4.ffn_act",
        "model.norm.output.0": "output_norm",
        "model.layers.4.output.0": None,
        "model.layers.4.self_attn.qkv_proj.output": None,
        "model.layers.4.mlp.inputs.0": None,
        "inputs.0": None,
        "model.norm.output.1": None,
    }
    assert {name: meaning(name, ("sglang",)).op for name in names} == names
    assert all(meaning(name, ("sglang",)).no_op for name, op in names.items() if op is None)


@pytest.mark.parametrize("column", ["llama_cpp", "transformers", "transformer_lens", "sglang"])
def test_each_column_names_each_op_once(column: str) -> None:
    names = [getattr(name, column) for name in NAMES.values() if getattr(name, column)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("column", ["transformers", "transformer_lens", "sglang"])
def test_each_name_of_a_column_is_understood(column: str) -> None:
    names = {getattr(name, column): op for op, name in NAMES.items() if getattr(name, column)}
    assert names
    for name, op in names.items():
        assert split(meaning(name.replace("N", "5"), (column,)).op or "")[1] == op


def test_npy_folder_of_hugging_face_modules(arrays: dict[str, np.ndarray], tmp_path: Path, cli: Cli) -> None:
    for name, values in arrays.items():
        np.save(tmp_path / f"{name}.npy", values)
    np.save(tmp_path / "input_ids.npy", np.array([[5, 6, 7, 8]]))
    said = imported(cli, "npy", tmp_path, tmp_path / "out.trace")
    assert said.splitlines() == [
        "Q and K stand in Hugging Face's channel order. GGUF files of the architecture llama have another: "
        "give --model FILE.gguf, and they are put in it",
        "imported 6 records in 1 step",
        f"wrote {tmp_path / 'out.trace'}",
    ]
    trace = Trace(tmp_path / "out.trace")
    assert (trace.header.engine, trace.tokens) == (f"imported from npy {tmp_path.name}", [5, 6, 7, 8])
    assert [(op, record.dtype, record.shape) for (_, op), record in trace.ops.items()] == [
        ("token_embd", "f32", (4, 6)),
        ("blk.0.attn_q", "f16", (4, 6)),
        ("blk.0.attn_v", "f64", (4, 2, 3)),
        ("blk.0.ffn_down", "f32", (4, 6)),
        ("blk.0.ffn_residual", "f32", (4, 6)),
        ("output", "f32", (4, 9)),
    ]
    for (_, record), values in zip(trace.ops.items(), arrays.values(), strict=True):
        np.testing.assert_array_equal(trace.values(record), values.reshape(record.shape), strict=True)


def test_steps_by_folder_and_by_prefix(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "d" / "step0").mkdir(parents=True)
    prefill, decode = RNG.standard_normal((2, 5, 3)).astype(np.float32)
    np.save(tmp_path / "d" / "step0" / "token_embd.npy", prefill)
    np.save(tmp_path / "d" / "step1.token_embd.npy", decode[:1])
    np.save(tmp_path / "d" / "step2_token_embd.npy", np.asfortranarray(decode[1:3]))
    imported(cli, "npy", tmp_path / "d", tmp_path / "out.trace", "--tokens", "1,2,3,4,5,6,7,8")
    trace = Trace(tmp_path / "out.trace")
    assert [(step.tokens, step.positions) for step in trace.steps.values()] == [
        ((1, 2, 3, 4, 5), (0, 1, 2, 3, 4)), ((6,), (5,)), ((7, 8), (6, 7)),
    ]  # fmt: skip
    for step, values in enumerate((prefill, decode[:1], decode[1:3])):
        np.testing.assert_array_equal(trace.values(trace.ops[step, "token_embd"]), values)


def test_big_endian_arrays_are_read(tmp_path: Path, cli: Cli) -> None:
    np.savez(tmp_path / "a.npz", tokens=[1], token_embd=np.array([[1.5, -2]], ">f4"))
    imported(cli, "npz", tmp_path / "a.npz", tmp_path / "out.trace")
    trace = Trace(tmp_path / "out.trace")
    assert trace.values(trace.ops[0, "token_embd"]).tolist() == [[1.5, -2]]


def test_transformer_lens_cache(tmp_path: Path, cli: Cli) -> None:
    """What cache.items() saves of one layer, decoding one token: heads are no batch, scores keep their axes."""
    states = {
        name: torch.randn(1, 1, 6) for name in ("hook_embed", "blocks.0.hook_resid_post", "blocks.0.hook_mlp_out")
    }
    cache = {
        **states,
        "blocks.0.hook_resid_pre": states["hook_embed"].clone(),
        "blocks.0.ln1.hook_scale": torch.ones(1, 1, 1),
        "blocks.0.ln1.hook_normalized": torch.randn(1, 1, 6),
        "blocks.0.attn.hook_q": torch.randn(1, 1, 2, 3).bfloat16(),
        "blocks.0.attn.hook_z": torch.randn(1, 1, 2, 3),
        "blocks.0.attn.hook_pattern": torch.rand(1, 2, 1, 4),
    }
    save_file(cache, tmp_path / "a.safetensors")
    said = imported(cli, "safetensors", tmp_path / "a.safetensors", tmp_path / "out.trace", "--tokens", "9")
    assert said.splitlines()[:2] == [
        "left out 1, an RMS norm before its weight: blocks.N.lnN.hook_normalized",
        "left out 1, the divisor of an RMS norm: blocks.N.lnN.hook_scale",
    ]
    assert "written once, 1 with equal bits under two names: hook_embed is blocks.N.hook_resid_pre\n" in said
    trace = Trace(tmp_path / "out.trace")
    assert {op: (record.dtype, record.shape) for (_, op), record in trace.ops.items()} == {
        "token_embd": ("f32", (1, 6)),
        "blk.0.attn_q": ("bf16", (1, 2, 3)),
        "blk.0.attn_probs": ("f32", (2, 1, 4)),
        "blk.0.attn_kqv": ("f32", (1, 6)),
        "blk.0.ffn_down": ("f32", (1, 6)),
        "blk.0.ffn_residual": ("f32", (1, 6)),
    }
    q = cache["blocks.0.attn.hook_q"].view(torch.uint16).numpy().reshape(1, 2, 3)
    np.testing.assert_array_equal(trace.stored(trace.ops[0, "blk.0.attn_q"]), q)


def test_q_and_k_of_llama_are_put_in_the_order_of_the_file(models: Models, tmp_path: Path, cli: Cli) -> None:
    """As convert_hf_to_gguf.py permutes the rows of the weights, so its outputs."""
    heads, head_dim, n_embd, model = 6, 16, 96, models("llama")
    weight, x = RNG.standard_normal((heads * head_dim, n_embd)), RNG.standard_normal((4, n_embd))
    permuted = weight.reshape(heads, 2, head_dim // 2, n_embd).swapaxes(1, 2).reshape(weight.shape)
    np.testing.assert_array_equal(pair_neighbours("attn_q", x @ weight.T, head_dim), x @ permuted.T)
    np.savez(tmp_path / "a.npz", **{"model.layers.0.self_attn.q_proj": x @ weight.T, "blk.1.attn_q": x @ permuted.T})
    options = ("--tokens", "1,2,3,4", "--model", model)
    said = imported(cli, "npz", tmp_path / "a.npz", tmp_path / "out.trace", *options)
    assert said.startswith("Q and K were put in the channel order of the GGUF file, which pairs neighbours in rope\n")
    trace = Trace(tmp_path / "out.trace")
    assert (trace.header.arch, trace.header.model, trace.header.weights) == ("llama", model.name, "F32")
    for op in ("blk.0.attn_q", "blk.1.attn_q"):
        np.testing.assert_array_equal(trace.values(trace.ops[0, op]), x @ permuted.T)
    np.savez(tmp_path / "a.npz", **{"model.layers.0.self_attn.q_proj": np.ones((4, 90))})
    code, _, said = cli("import", "npz", tmp_path / "a.npz", "-o", tmp_path / "b.trace", *options)
    assert code == 2
    assert "blk.0.attn_q: rows of the shape [90] are no heads of 16, as this model has them" in said


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_module_of_a_hugging_face_model_passes_the_replay(family: str, tmp_path: Path, cli: Cli) -> None:
    """Real hooks on every module, saved as they come; and with one module's output changed, that op is named."""
    hugging_face = pytest.importorskip("test_transformers")  # it makes the models, and skips without transformers
    model = hugging_face.build(hugging_face.FAMILIES[family]).float()  # in float64 its norms would still be float32
    gguf = hugging_face.export(model, hugging_face.FAMILIES[family], tmp_path / "model.gguf")
    seen: dict[str, torch.Tensor] = {"input_ids": torch.tensor([[3, 141, 59, 26, 53]])}
    for name, module in model.named_modules():
        if name not in ("", "model"):
            module.register_forward_hook(
                lambda module, inputs, output, name=name: seen.update(
                    {name: (output[0] if isinstance(output, tuple) else output).clone()}
                )
            )
    with torch.no_grad():
        model(seen["input_ids"])
    save_file(seen, tmp_path / "a.safetensors")
    said = imported(cli, "safetensors", tmp_path / "a.safetensors", tmp_path / "a.trace", "--model", gguf)
    assert "unknown" not in said
    assert "written once, 6 with equal bits under two names: " in said
    assert "model.layers.N.mlp.down_proj is model.layers.N.mlp\n" in said
    code, output, _ = cli("check", tmp_path / "a.trace", "--model", gguf)
    assert (code, output[:5]) == (0, "MATCH"), output
    seen["model.layers.1.self_attn.k_proj"] *= 1.01
    save_file(seen, tmp_path / "a.safetensors")
    imported(cli, "safetensors", tmp_path / "a.safetensors", tmp_path / "b.trace", "--model", gguf)
    code, output, _ = cli("compare", tmp_path / "a.trace", tmp_path / "b.trace", "--model", gguf, "--time", 0)
    assert code == 1
    assert "first at blk.1.attn_k: local error" in output


@pytest.mark.parametrize("text", ["# mine\nenc{N}.q = blk.{N}.attn_q\nh.1=blk.0.ffn_residual\n",
                                  '{"enc{N}.q": "blk.{N}.attn_q", "h.1": "blk.0.ffn_residual"}'])  # fmt: skip
def test_map(text: str, tmp_path: Path, cli: Cli) -> None:
    x = np.ones((1, 2), np.float32)
    save_numpy({"enc.0.q": x, "enc.1.q": x, "h.1": x, "odd": x}, tmp_path / "a.safetensors")
    (tmp_path / "map").write_text(text.replace("enc{N}", "enc.{N}"))
    options = ("--map", tmp_path / "map", "--tokens", "1", "--skip-unknown")
    said = imported(cli, "safetensors", tmp_path / "a.safetensors", tmp_path / "out.trace", *options)
    assert said.splitlines()[0] == "left out 1 of unknown name: odd"
    assert [op for _, op in Trace(tmp_path / "out.trace").ops] == ["blk.0.attn_q", "blk.0.ffn_residual", "blk.1.attn_q"]


# ---- The text of llama.cpp. The samples are what common/debug.cpp of the llama.cpp in llama-cpp-python 0.3.36 printed
# for the model below, called as llama-eval-callback and llama-debug (with --tensor-filter) call it.

SAMPLE = Shape("qwen2", n_layer=2, n_embd=32, n_head=4, n_head_kv=2, n_ff=48, n_ctx=64, tied=True)


def test_text_of_llama_eval_callback_has_the_means_of_llama_cpp(
    tmp_path: Path, cli: Cli, llama_cpp_trace: Callable[..., Path]
) -> None:
    said = imported(cli, "llama-text", SAMPLES / "llama-eval-callback.txt", tmp_path / "out.trace")
    assert "left out 6, before a bias: Qcur-N, Vcur-N, Kcur-N\n" in said
    assert "left out 4, sums over unused cells of the cache too: kq-N, kq_soft_max-N\n" in said
    assert "step 0 has 3 tokens, but not so many rows in 9 records: blk.1.attn_residual [1, 32], " in said
    assert "unknown" not in said
    model = write_model(tmp_path / "model.gguf", SAMPLE, "F32")
    reference = llama_cpp_trace(model, (84, 104, 101), 0, kv_type="f16")
    r, c = Trace(reference), Trace(tmp_path / "out.trace")
    assert c.tokens == [84, 104, 101]
    absent = {f"blk.{n}.{op}" for n in (0, 1) for op in ("attn_scores", "attn_probs")}
    assert {op for _, op in c.ops} == {op for _, op in r.ops if op not in absent}
    for key, record in c.ops.items():
        assert (record.min, record.max, record.rms, record.dtype) == (None, None, None, None)
        values = r.values(r.ops[key])
        last = values[-record.shape[0] :].reshape(record.shape)  # llama.cpp narrows its last layer
        assert record.mean == pytest.approx(float(last.mean()), abs=1e-6 * float(np.abs(values).max()))
    code, output, _ = cli("compare", reference, tmp_path / "out.trace")
    assert code == 0
    said = " ".join(output.split())
    assert said.startswith("MATCH: nothing diverges in the 24 ops that both hold, compared by drift (at most NMSE ")
    assert f"4 others are in {reference} alone. 9 others cannot be compared: see below." in said
    assert "blk.1.attn_residual, " in said
    assert " in step 0: shapes differ: [3, 32] and [1, 32] (2 tokens fewer)" in said
    assert cli("compare", reference, tmp_path / "out.trace", "--require", "attn_scores")[0] == 1
    assert "33 records lack statistics (max, min, rms): only those that both sides hold are" in " ".join(output.split())


def test_text_of_llama_debug(tmp_path: Path, cli: Cli) -> None:
    said = imported(cli, "llama-text", SAMPLES / "llama-debug.txt", tmp_path / "out.trace")
    assert said.splitlines()[-2] == "imported 3 records in 1 step"
    trace = Trace(tmp_path / "out.trace")
    assert trace.tokens == [84, 104, 101]
    assert [(op, record.shape, record.mean) for (_, op), record in trace.ops.items()] == [
        ("token_embd", (3, 32), -0.148620 / 96),
        ("blk.0.ffn_residual", (3, 32), -1.856491 / 96),
        ("blk.1.ffn_residual", (1, 32), -0.753074 / 32),
    ]


def test_text_with_another_sum_diverges_there(tmp_path: Path, cli: Cli) -> None:
    text = (SAMPLES / "llama-eval-callback.txt").read_text()
    head = text.index("ffn_out-0 = ")
    at = text.index("sum = ", head)
    (tmp_path / "b.txt").write_text(text[:at] + "sum = 9" + text[text.index("\n", at) :])
    for name, path in (("a", SAMPLES / "llama-eval-callback.txt"), ("b", tmp_path / "b.txt")):
        imported(cli, "llama-text", path, tmp_path / f"{name}.trace")
    assert cli("compare", tmp_path / "a.trace", tmp_path / "a.trace")[0] == 0
    code, output, _ = cli("compare", tmp_path / "a.trace", tmp_path / "b.trace")
    assert code == 1
    assert output.startswith("DIVERGED: blk.0.ffn_down is the first op over its tolerance")


@pytest.mark.parametrize(("printed", "nan", "inf"), [("-nan", 1, 0), ("nan", 1, 0), ("-inf", 0, 1)])
def test_a_sum_that_is_not_finite_is_counted(printed: str, nan: int, inf: int, tmp_path: Path, cli: Cli) -> None:
    text = (SAMPLES / "llama-debug.txt").read_text().replace("-1.856491", printed)
    (tmp_path / "a.txt").write_text(text)
    imported(cli, "llama-text", tmp_path / "a.txt", tmp_path / "a.trace")
    record = Trace(tmp_path / "a.trace").ops[0, "blk.0.ffn_residual"]
    assert (record.mean, record.nan, record.inf) == (None, nan, inf)
    imported(cli, "llama-text", SAMPLES / "llama-debug.txt", tmp_path / "b.trace")
    code, output, _ = cli("compare", tmp_path / "b.trace", tmp_path / "a.trace")
    assert code == 1
    assert output.startswith("DIVERGED: blk.0.ffn_residual")


def test_each_micro_batch_is_a_step(tmp_path: Path, cli: Cli) -> None:
    text = (SAMPLES / "llama-debug.txt").read_text()
    graph = text[: text.index("Model add_bos")]
    (tmp_path / "a.txt").write_text(graph + graph)
    imported(cli, "llama-text", tmp_path / "a.txt", tmp_path / "a.trace", "--tokens", "1,2,3,4,5,6")
    steps = Trace(tmp_path / "a.trace").steps.values()
    assert [(step.tokens, step.positions) for step in steps] == [((1, 2, 3), (0, 1, 2)), ((4, 5, 6), (3, 4, 5))]


# ---- Tables

TABLES = {
    "csv": "Layer, Op, MIN, Max, Avg, std, shape\n"
    '0,attn_norm,-1,2,0.3,0.4,2x48\n0,,-3,4,0,2,"(1, 2, 48)"\n,lm_head,-1e2,nan,1.5,2,2x320\n',
    "tsv": "layer\top\tmin\tmax\tmean\tstd\tshape\n"
    "L0\tinput_layernorm\t-1\t2\t0.3\t0.4\t2x48\n0\t\t-3\t4\t0\t2\t2,48\n\tlm_head\t-1e2\tnan\t1.5\t2\t2x320\n",
    "md": "# Mine\n\n| layer | name | min | max | mean | RMS | shape |\n|---|:--|--:|---|---|---|---|\n"
    "| 0 | `attn_norm` | -1 | 2 | 0.3 | 0.5 | [2, 48] |\n| layer 0 | | -3 | 4 | 0.0 | **2** | [2, 48] |\n"
    "| | output | -100 | NaN | 1.5 | 2.5 | [2, 320] |\n",
}
TABLES["json"] = json.dumps(
    [
        {"layer": 0, "op": "attn_norm", "min": -1, "max": 2, "mean": 0.3, "rms": 0.5, "shape": [2, 48]},
        {"layer": 0, "min": -3, "max": 4, "mean": 0, "rms": 2, "shape": [2, 48]},
        {"op": "output", "min": -100, "max": float("nan"), "mean": 1.5, "rms": 2.5, "shape": [1, 2, 320]},
    ]
)
TABLES["objects"] = json.dumps(
    {
        "blk.0.attn_norm": {"min": -1, "max": 2, "mean": 0.3, "rms": 0.5, "shape": [2, 48]},
        "model.layers.0": {"min": -3, "max": 4, "mean": 0, "rms": 2, "shape": "torch.Size([2, 48])"},
        "result_output": {"min": -100, "max": None, "nan": 1, "mean": 1.5, "rms": 2.5, "shape": [2, 320]},
    }
)


@pytest.mark.parametrize("kind", TABLES)
def test_tables(kind: str, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "table").write_text(TABLES[kind])
    imported(cli, "table", tmp_path / "table", tmp_path / "out.trace", "--tokens", "5,6")
    found = {
        op: (r.shape, r.min, r.max, r.mean, round(r.rms or 0, 12), r.nan)
        for (_, op), r in Trace(tmp_path / "out.trace").ops.items()
    }
    assert found == {
        "blk.0.attn_norm": ((2, 48), -1, 2, 0.3, 0.5, 0),
        "blk.0.ffn_residual": ((2, 48), -3, 4, 0, 2, 0),
        "output": ((2, 320), -100, None, 1.5, 2.5, 1),
    }


def test_shapes_of_a_table_come_from_the_model(models: Models, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "t.csv").write_text("layer,mean,L2\nembed_tokens,0,1\n0,0.5,2\n1,0.25,4\noutput_norm,1,2\n")
    options = ("--tokens", "5,6,7", "--model", models("tiny"))
    said = imported(cli, "table", tmp_path / "t.csv", tmp_path / "out.trace", *options)
    assert said.splitlines()[0] == "columns that no trace holds, left out: l2"
    ops = Trace(tmp_path / "out.trace").ops
    assert {op: (record.shape, record.mean) for (_, op), record in ops.items()} == {
        "token_embd": ((3, 48), 0),
        "blk.0.ffn_residual": ((3, 48), 0.5),
        "blk.1.ffn_residual": ((3, 48), 0.25),
        "output_norm": ((3, 48), 1),
    }


# ---- sglang's dumper


def dump(folder: Path, step: int, index: int, name: str, value: object, bare: bool = False, **tags: object) -> None:
    """As sglang/srt/debug_utils/dumper.py saves it."""
    full = {"step": step, "rank": 0, "dump_index": index, "name": name, "recompute_status": "disabled", **tags}
    path = folder / ("___".join(f"{key}={value}" for key, value in full.items()) + ".pt")
    folder.mkdir(exist_ok=True)
    torch.save(value if bare else {"value": value, "meta": {**full, "world_size": 1}}, path)


def test_sglang_dump(tmp_path: Path, cli: Cli) -> None:
    folder, x = tmp_path / "dump", torch.randn(7, 3, 8)
    for step, (ids, positions) in enumerate(
        ((torch.tensor([4, 5, 6]), torch.arange(3)), (torch.tensor([7]), torch.tensor([3])))
    ):
        n = len(ids)
        dump(folder, step, 20 * step + 1, "input_ids", ids)
        dump(folder, step, 20 * step + 2, "positions", positions)
        dump(folder, step, 20 * step + 3, "seq_lens", torch.tensor([3 + step]))
        hidden = {
            "model.embed_tokens.output": x[0, :n],
            "model.layers.0.input_layernorm.output": x[1, :n].bfloat16(),
            "model.layers.0.self_attn.qkv_proj.output": torch.zeros(n, 16),
            "model.layers.0.post_attention_layernorm.output.1": x[2, :n],
            "model.layers.1.input_layernorm.output.1": x[3, :n],
        }
        for index, (name, value) in enumerate(hidden.items()):
            dump(folder, step, 20 * step + 4 + index, f"non_intrusive__{name}", value, layer_id=0)
        dump(folder, step, 20 * step + 18, "attn_out", x[4, :n], layer_id=1, bare=True)
    (tmp_path / "map").write_text("layers.{N}.attn_out=blk.{N}.attn_output")
    said = imported(cli, "sglang", folder, tmp_path / "out.trace", "--map", tmp_path / "map")
    assert said.splitlines() == [
        "left out 2, the scheduler's bookkeeping: seq_lens",
        "left out 2, several ops' outputs side by side: model.layers.N.self_attn.qkv_proj.output",
        "imported 10 records in 2 steps",
        f"wrote {tmp_path / 'out.trace'}",
    ]
    trace = Trace(tmp_path / "out.trace")
    assert [(step.tokens, step.positions) for step in trace.steps.values()] == [((4, 5, 6), (0, 1, 2)), ((7,), (3,))]
    expected = {
        "token_embd": 0,
        "blk.0.attn_norm": 1,
        "blk.0.attn_residual": 2,
        "blk.0.ffn_residual": 3,
        "blk.1.attn_output": 4,
    }
    assert [record.op for record in trace.step_ops(1)] == list(expected)
    for op, i in expected.items():
        right = x[i, :1].bfloat16().float() if op == "blk.0.attn_norm" else x[i, :1]
        np.testing.assert_array_equal(trace.values(trace.ops[1, op]), right.numpy())


def sglang_values(x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """What two ranks hold of a layer: whole values, heads, and terms of a sum."""
    return {
        "model.layers.0.input_layernorm.output.0": [x[0], x[0]],
        "model.layers.0.self_attn.q_proj": [x[1, :, :4], x[1, :, 4:]],
        "model.layers.0.self_attn.o_proj": [x[2], x[3]],
        "model.norm.output.0": [x[4], x[4]],
    }


def right_of(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"blk.0.attn_norm": x[0], "blk.0.attn_q": x[1], "output_norm": x[4]}


def test_sglang_ranks(tmp_path: Path, cli: Cli, refused: Callable[..., str]) -> None:
    """Put together where it is known how; a sum's terms are left out, and said. One rank of several is refused."""
    folder, x = tmp_path / "dump", torch.randn(5, 3, 8)
    values = {"input_ids": [torch.tensor([4, 5, 6])] * 2, **sglang_values(x)}
    for index, (name, parts) in enumerate(values.items()):
        for rank, value in enumerate(parts):
            dump(folder, 0, index, name, value, rank=rank)
    said = imported(cli, "sglang", folder, tmp_path / "out.trace")
    assert "left out 1, unequal on the ranks" in said
    assert "self_attn.o_proj" in said
    trace = Trace(tmp_path / "out.trace")
    assert [op for _, op in trace.ops] == [*right_of(x)]
    for op, right in right_of(x).items():
        np.testing.assert_array_equal(trace.values(trace.ops[0, op]), right.numpy())
    one, path = tmp_path / "one", next(folder.glob("*rank=0*lm_head*"), None) or next(folder.glob("*rank=1*"))
    one.mkdir()
    content = torch.load(path, weights_only=True)
    torch.save({**content, "meta": {"world_size": 2}}, one / path.name)
    assert "dumps of 1 of 2 ranks" in refused("import", "sglang", one, "-o", tmp_path / "x.trace")


def test_sglang_passes(tmp_path: Path, cli: Cli) -> None:
    """What --debug-tensor-dump-output-folder writes: one file a pass and rank, logits of the last token."""
    x, logits = torch.randn(5, 3, 8), torch.randn(1, 9)
    for rank in (0, 1):
        content = {name: parts[rank] for name, parts in sglang_values(x).items() if "output" not in name}
        content |= {"model.layers.1.input_layernorm": [x[0], x[2]], "logits_processor": logits}
        content |= {"model.forward_batch_info.input_ids": torch.tensor([4, 5, 6])}
        content |= {"model.forward_batch_info.positions": torch.arange(3)}
        content |= {"model.forward_batch_info.seq_lens": torch.tensor([3])}
        folder = tmp_path / "dump" / f"TP{rank}_PP0_Rank{rank}_pid77"
        folder.mkdir(parents=True)
        torch.save(content, folder / "Pass00003.pt")
    said = imported(cli, "sglang", tmp_path / "dump", tmp_path / "out.trace")
    assert "sglang's steps 3 are numbered from 0 here" in said
    trace = Trace(tmp_path / "out.trace")
    assert [(step.tokens, step.positions) for step in trace.steps.values()] == [((4, 5, 6), (0, 1, 2))]
    assert {op for _, op in trace.ops} >= {"blk.1.attn_norm", "blk.0.attn_q", "blk.0.ffn_residual", "output"}
    np.testing.assert_array_equal(trace.values(trace.ops[0, "blk.0.attn_q"]), x[1].numpy())
    np.testing.assert_array_equal(trace.last_row(0, "output"), logits[0].numpy())
    assert trace.ops[0, "output"].rows == (2,)


# ---- Some of the statistics


@pytest.mark.parametrize(
    ("ours", "code", "said"),
    [
        ({"mean": 0.5}, 0, "1 records lack statistics (max, min, rms)"),
        ({"mean": 0.9}, 1, "output is the first op over its tolerance"),
        ({"max": 2.0, "rms": 1.0}, 0, "1 records lack statistics (mean, min)"),
        ({"rms": 1.5}, 1, "output is the first op over its tolerance"),
        ({"mean": 0.5, "rms": 1.5}, 1, "output is the first op over its tolerance"),
        ({"nan": 3}, 1, "NaN or Inf on one side"),
    ],
)  # fmt: skip
def test_statistics_that_are_absent_are_said(
    ours: dict[str, float], code: int, said: str, tmp_path: Path, cli: Cli
) -> None:
    for name, held in (("r", {"min": -2.0, "max": 2.0, "mean": 0.5, "rms": 1.0}), ("c", ours)):
        statistics = Statistics(
            **{key: held.get(key) for key in ("min", "max", "mean", "rms")}, nan=int(held.get("nan", 0))
        )
        with TraceWriter(tmp_path / f"{name}.trace", name) as writer:
            writer.step(0, [1], [0])
            writer.op_statistics(0, "output", (1, 100), statistics)
    found, output, _ = cli("compare", tmp_path / "r.trace", tmp_path / "c.trace")
    assert found == code
    assert said in " ".join(output.split())


def test_statistics_with_nothing_in_common_are_unmatched(tmp_path: Path, cli: Cli) -> None:
    for name, statistics in (("r", Statistics(-1, 1, None, None)), ("c", Statistics(None, None, 0, 1))):
        with TraceWriter(tmp_path / f"{name}.trace", name) as writer:
            writer.step(0, [1], [0])
            writer.op_statistics(0, "output", (1, 3), statistics)
    code, output, error = cli("compare", tmp_path / "r.trace", tmp_path / "c.trace")
    assert the_message(code, error).startswith("nothing that both traces hold can be compared")
    assert "output in step 0: no statistic is on both sides" in output


def test_storage_of_every_dtype_is_exported() -> None:
    from tracediff.interchange.export import _SAFETENSORS

    assert set(_SAFETENSORS) == {*STORAGE, "int64"}
