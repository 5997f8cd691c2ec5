"""The weights audit: real GGUF and safetensors files, with each mistake of a loader or converter planted once."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints
from conftest import Models

from tracediff.audit.causes import explain
from tracediff.audit.held import compare_weights, judge_values
from tracediff.audit.whole_file import audit_checkpoint, audit_trace
from tracediff.errors import ModelError
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.model.tensors import FileTensors
from tracediff.result import TensorResult
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

HF_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
N_HEAD, N_HEAD_KV = 6, 2  # of the shape "llama"
K_QUANTS = Shape("llama", n_embd=256, n_head=6, n_head_kv=2, head_dim=32, n_ff=512, n_layer=2)


def hf_name(name: str) -> str:
    *blk, local, kind = name.split(".")
    return f"model.layers.{blk[1]}.{HF_NAMES[local]}.{kind}" if blk else f"{HF_NAMES[local]}.{kind}"


def as_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The checkpoint's order of Q and K rows from GGUF's: even channels of each head, then odd ones."""
    each = rows.reshape(heads, -1, *rows.shape[1:])
    return np.concatenate((each[:, 0::2], each[:, 1::2]), 1).reshape(rows.shape)


def as_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    out = np.empty_like(rows).reshape(heads, -1, *rows.shape[1:])
    first, second = np.split(rows.reshape(out.shape), 2, axis=1)
    out[:, 0::2], out[:, 1::2] = first, second
    return out.reshape(rows.shape)


def tensors_of(model: Path) -> dict[str, np.ndarray]:
    tensors = FileTensors(GGUFFile(model))
    return {name: tensors.get(name) for name in tensors.names()}


def checkpoint(
    model: Path, folder: Path, dtype: Any = torch.float32, tensors: dict[str, np.ndarray] | None = None
) -> Path:
    """A folder of two safetensors files that convert_hf_to_gguf.py would make `model` of."""
    converted = {}
    for name, values in (tensors or tensors_of(model)).items():
        heads = {"attn_q": N_HEAD, "attn_k": N_HEAD_KV}.get(name.split(".")[-2])
        original = as_halves(values, heads) if heads else values.copy()
        converted[hf_name(name)] = torch.from_numpy(original).to(dtype)
    folder.mkdir()
    for n, part in enumerate((list(converted)[::2], list(converted)[1::2])):
        safetensors.save_file({key: converted[key] for key in part}, folder / f"model-{n}.safetensors")
    return folder


@pytest.fixture
def model(models: Models, tmp_path: Path) -> Path:
    """A copy of a small llama that a test may change."""
    return Path(shutil.copy(models("llama"), tmp_path / "model.gguf"))


def plant(model: Path, name: str, values: np.ndarray) -> None:
    """Other bytes in the place of a tensor."""
    info = GGUFFile(model).tensors[name]
    data = values.tobytes()
    assert len(data) == info.nbytes
    with model.open("r+b") as file:
        file.seek(info.offset)
        file.write(data)


def wrong(tensors: tuple[TensorResult, ...]) -> dict[str, tuple[str | None, str | None]]:
    return {t.tensor: (t.cause, t.note) for t in tensors if t.status in ("wrong", "missing", "extra")}


# --- against a checkpoint ----------------------------------------------------------------------------------------

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("weights", "dtype", "statuses"),
    [
        ("F32", F32, {"identical"}), ("F16", F32, {"identical", "rounded"}), ("BF16", F32, {"identical", "rounded"}),
        ("Q8_0", F32, {"identical", "quantised"}), ("Q4_0", F32, {"identical", "quantised"}),
        ("F32", BF16, {"rounded"}), ("BF16", BF16, {"identical", "rounded"}), ("F16", F16, {"identical", "rounded"}),
        ("Q5_1", BF16, {"rounded", "quantised"}),
    ],
)  # fmt: skip
def test_an_honest_conversion(weights: str, dtype: Any, statuses: set[str], models: Models, tmp_path: Path) -> None:
    """Of a checkpoint in half precision too, whose float32 original the file was made of."""
    folder = checkpoint(models("llama", "F32"), tmp_path / "hf", dtype)
    result = audit_checkpoint(models("llama", weights), folder)
    assert (result.verdict, {t.status for t in result.tensors}) == ("match", statuses)
    assert [t.tensor for t in result.tensors] == list(GGUFFile(models("llama", weights)).tensors)


@pytest.mark.parametrize("arch", ["arcee", "granite", "granitemoe", "minicpm", "smollm3"])
def test_q_and_k_of_other_architectures_are_permuted_as_well(arch: str, models: Models, tmp_path: Path) -> None:
    model = models(replace(K_QUANTS, arch=arch), "F16")
    result = audit_checkpoint(model, checkpoint(model, tmp_path / "hf"))
    # Some have no gate, or experts: what is laid out otherwise is attention's.
    assert {t.status for t in result.tensors if ".attn_" in t.tensor} == {"identical"}


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS"])
def test_k_quants_are_within_what_they_cost(kind: str, models: Models, tmp_path: Path) -> None:
    folder = checkpoint(models(K_QUANTS), tmp_path / "hf")
    result = audit_checkpoint(models(K_QUANTS, kind), folder)
    assert (result.verdict, wrong(result.tensors)) == ("match", {})
    quantised = [t for t in result.tensors if t.status == "quantised"]
    assert len(quantised) == 16
    assert all(t.error and t.bound and 0.3 * t.bound < t.error < t.bound for t in quantised)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x.ravel().copy()).bfloat16().view(torch.uint16).numpy()


def read_at(t: dict[str, np.ndarray], name: str, offset: int) -> np.ndarray:
    """As if the file's tensors lay one after the other and this one were looked for `offset` elements too late."""
    following = list(t)[list(t).index(name) + 1]
    return np.concatenate((t[name].ravel(), t[following].ravel()))[offset:][: t[name].size]


def half_as_single(x: np.ndarray, behind: np.ndarray) -> np.ndarray:
    return np.concatenate((x.astype(np.float16).ravel(), behind.astype(np.float16).ravel())).view(np.float32)[: x.size]


Plant = Callable[[dict[str, np.ndarray], str], np.ndarray]
NORM, Q, UP = "blk.1.ffn_norm.weight", "blk.1.attn_q.weight", "blk.1.ffn_up.weight"
CAUSES: dict[str, tuple[str, Plant, str, str]] = {
    "zero": (UP, lambda t, n: 0 * t[n], "weight_zero", "all zeros: never loaded?"),
    "ones": (NORM, lambda t, n: t[n] ** 0, "norm_without_weight", "all ones: as a norm is initialised, never loaded?"),
    "plus one": (
        NORM, lambda t, n: t[n] + 1, "norm_weight_plus_one",
        "1 was added to every value; in a GGUF file it is in already",
    ),
    "minus one": (NORM, lambda t, n: t[n] - 1, "norm_weight_minus_one", "1 was taken from every value"),
    "scaled": (NORM, lambda t, n: t[n] * np.float32(0.14), "norm_scaled", "every value was multiplied by 0.14"),
    "layer": (UP, lambda t, n: t["blk.2.ffn_up.weight"], "wrong_layer", "it holds blk.2.ffn_up.weight"),
    "tensor": (UP, lambda t, n: t["blk.1.ffn_gate.weight"], "wrong_tensor", "it holds blk.1.ffn_gate.weight"),
    "transposed": (UP, lambda t, n: t[n].T.copy(), "weight_transposed", "stored transposed"),
    "read transposed": (
        UP, lambda t, n: t[n].reshape(t[n].shape[::-1]).T.copy(), "weight_transposed",
        "read transposed: rows and columns of the wrong length",
    ),
    "offset": (UP, lambda t, n: read_at(t, n, 37), "offset", "read 37 elements after where it begins"),
    "offset of a norm": (NORM, lambda t, n: read_at(t, n, 8), "offset", "read 8 elements after where it begins"),
    "neighbours": (
        Q, lambda t, n: as_neighbours(t[n], N_HEAD), "rope_permuted", "Q/K rows are permuted from halves to neighbours"
    ),
    "halves": (
        Q, lambda t, n: as_halves(t[n], N_HEAD), "rope_permuted", "Q/K rows are permuted from neighbours to halves"
    ),
    "f16 as f32": (
        UP, lambda t, n: half_as_single(t[n], t["output_norm.weight"].repeat(200)), "f16_as_f32",
        "the bytes of F16 are read as F32",
    ),
    "bf16 as f32": (
        UP, lambda t, n: np.tile(bfloat16_bits(t[n]), 2).view(np.float32)[: t[n].size],
        "bf16_as_f32", "the bytes of BF16 are read as F32",
    ),
    "before": (
        UP, lambda t, n: np.concatenate((t[NORM], t[n].ravel()))[: t[n].size], "offset",
        "read 96 elements before where it begins",
    ),
    "order": (NORM, lambda t, n: np.sort(t[n]), "None", "the same values in another order"),
    "rows": (
        UP, lambda t, n: np.where(np.arange(160)[:, None] == 5, np.float32(9), t[n]), "None",
        "1 of 160 rows are wrong: 5",
    ),
    "alien": (NORM, lambda t, n: t[n][::-1] ** 2 + 3, "None", "other values: another tensor's, or another model's"),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_each_mistake_of_a_converter(case: str, model: Path, tmp_path: Path) -> None:
    folder = checkpoint(model, tmp_path / "hf")
    name, change, cause, note = CAUSES[case]
    plant(model, name, change(tensors_of(model), name))
    result = audit_checkpoint(model, folder)
    assert result.verdict == "diverged"
    assert wrong(result.tensors) == {name: (None if cause == "None" else cause, note)}


@pytest.mark.parametrize(("stored", "taken", "cause"), [("BF16", "F16", "bf16_as_f16"), ("F16", "BF16", "f16_as_bf16")])
def test_bits_of_another_half_type(stored: str, taken: str, cause: str, models: Models, tmp_path: Path) -> None:
    dtype = {"BF16": BF16, "F16": F16}[stored]
    folder = checkpoint(models("llama", stored), tmp_path / "hf", F32)
    model = Path(shutil.copy(models("llama", taken), tmp_path / "model.gguf"))
    right = torch.from_numpy(tensors_of(models("llama", stored))[UP].copy()).to(dtype)
    plant(model, UP, right.view(torch.int16).numpy())
    found = {t.tensor: t for t in audit_checkpoint(model, folder).tensors}[UP]
    assert (found.status, found.cause, found.note) == ("wrong", cause, f"{stored} bits are read as {taken}")


def test_float32_cut_off_to_bfloat16(models: Models, tmp_path: Path) -> None:
    """The upper half of each number, as loaders in C take it."""
    folder = checkpoint(models("llama"), tmp_path / "hf")
    model = Path(shutil.copy(models("llama"), tmp_path / "model.gguf"))
    plant(model, UP, (tensors_of(models("llama"))[UP].view(np.uint32) & 0xFFFF0000).view(np.float32))
    found = {t.tensor: t for t in audit_checkpoint(model, folder).tensors}[UP]
    words = "cut off to bfloat16, towards 0, where rounding belongs"
    assert (found.status, found.cause, found.note) == ("wrong", "weight_cut", words)


def test_float32_read_as_float16(models: Models, tmp_path: Path) -> None:
    """Half of what is read are the low bits of a mantissa: NaN now and then, and no value is what it should be."""
    folder = checkpoint(models("llama"), tmp_path / "hf")
    model = Path(shutil.copy(models("llama", "F16"), tmp_path / "model.gguf"))
    plant(model, UP, tensors_of(models("llama"))[UP].view(np.float16).ravel()[: 160 * 96])
    found = {t.tensor: t for t in audit_checkpoint(model, folder).tensors}[UP]
    assert (found.status, found.cause, found.note) == ("wrong", "f32_as_f16", "the bytes of F32 are read as F16")


def test_a_quantised_tensor_of_another_layer(models: Models, tmp_path: Path) -> None:
    """4-bit values fit their own tensor to 8% and no other: noise hides no mistake."""
    folder = checkpoint(models("llama"), tmp_path / "hf")
    model = Path(shutil.copy(models("llama", "Q4_0"), tmp_path / "model.gguf"))
    file = GGUFFile(model)
    plant(model, UP, np.frombuffer(file.raw(file.tensors["blk.0.ffn_up.weight"]), np.uint8).copy())
    result = audit_checkpoint(model, folder)
    assert wrong(result.tensors) == {UP: ("wrong_layer", "it holds blk.0.ffn_up.weight")}


def test_one_row_of_a_quantised_tensor(models: Models, tmp_path: Path) -> None:
    """A row of zeros among 160 changes the error of the whole from 0.08 to 0.11: each row is judged as well."""
    folder = checkpoint(models("llama"), tmp_path / "hf")
    model = Path(shutil.copy(models("llama", "Q4_0"), tmp_path / "model.gguf"))
    file = GGUFFile(model)
    raw = np.frombuffer(file.raw(file.tensors[UP]), np.uint8).copy().reshape(160, -1)
    raw[7] = 0
    plant(model, UP, raw)
    assert list(wrong(audit_checkpoint(model, folder).tensors)) == [UP]


def test_missing_and_extra(models: Models, tmp_path: Path) -> None:
    folder = checkpoint(models("llama"), tmp_path / "hf")
    (shard,) = (path for path in folder.iterdir() if hf_name(UP) in safetensors.load_file(path))
    held = safetensors.load_file(shard)
    del held[hf_name(UP)]
    added = {"model.layers.0.mlp.new.weight": torch.ones(3), "model.layers.2.self_attn.q_proj.bias": torch.ones(96)}
    safetensors.save_file(held | added, shard)
    assert wrong(audit_checkpoint(models("llama"), folder).tensors) == {
        UP: (None, "the checkpoint has no such tensor"),
        "blk.2.attn_q.bias": (None, "the file has no such tensor"),
    }
    # Others may hold a vision tower, which is no mistake of the file.
    (unnamed,) = (t for t in audit_checkpoint(models("llama"), folder).tensors if t.status == "not compared")
    assert (unnamed.tensor, unnamed.note) == (
        "model.layers.0.mlp.new.weight", "gguf-py has no name for it in this architecture"
    )  # fmt: skip


@pytest.mark.parametrize("arch", [arch for arch in tiny_checkpoints.CLASSES if arch != "falcon-h1"])
def test_checkpoints_of_all_that_conversion_does(arch: str, tmp_path: Path) -> None:
    """Experts together, fused projections apart, heads in another order, norms less 1, decays: transformers' own class
    computes what llama.cpp does (tests/test_record.py) with the tensors that it saves here.
    """
    model = tiny_checkpoints.CLASSES[arch].write(arch, tmp_path / "model.gguf")
    tiny_checkpoints.load(arch, model).save_pretrained(tmp_path / "hf")
    result = audit_checkpoint(model, tmp_path / "hf")
    assert (result.verdict, len(result.tensors)) == ("match", len(GGUFFile(model).tensors))
    # Decays and weights to which 1 is added are rounded by that.
    assert {t.status for t in result.tensors} <= {"identical", "rounded"}


@pytest.mark.parametrize(
    ("suffix", "shape"),
    [("_scale_inv", (2, 1)), ("_scale", (160, 1)), ("_scale", ())],
    ids=["blocks of 128", "rows", "whole"],
)
def test_a_checkpoint_in_eight_bits(
    suffix: str, shape: tuple[int, ...], model: Path, models: Models, tmp_path: Path
) -> None:
    """Float8 with scales in a tensor of their own: DeepSeek's, of blocks, and those of rows or of all (vLLM)."""
    folder = checkpoint(models("llama"), tmp_path / "hf")
    (shard,) = (path for path in folder.iterdir() if hf_name(UP) in safetensors.load_file(path))
    held = safetensors.load_file(shard)
    eighth = held[hf_name(UP)].to(torch.float8_e4m3fn)
    scale = torch.linspace(1.25, 1.5, max(1, int(np.prod(shape)))).reshape(shape)
    safetensors.save_file(held | {hf_name(UP): eighth, f"{hf_name(UP)}{suffix}": scale}, shard)
    of_each = scale.repeat_interleave(128, 0)[:160] if suffix == "_scale_inv" else scale
    plant(model, UP, (eighth.float() * of_each).numpy())
    result = audit_checkpoint(model, folder)
    assert (result.verdict, {t.status for t in result.tensors}) == ("match", {"identical"})
    plant(model, UP, eighth.float().numpy())
    assert [*wrong(audit_checkpoint(model, folder).tensors)] == [UP]


def test_what_conversion_computes_by_config_json_is_left_open(tmp_path: Path) -> None:
    """Multipliers, which are in the file's weights."""
    model = tiny_checkpoints.CLASSES["falcon-h1"].write("falcon-h1", tmp_path / "model.gguf")
    tiny_checkpoints.load("falcon-h1", model).save_pretrained(tmp_path / "hf")
    result = audit_checkpoint(model, tmp_path / "hf")
    assert (result.verdict, wrong(result.tensors)) == ("undecided", {})
    assert {t.tensor for t in result.tensors if t.status == "not compared"} >= {
        "token_embd.weight",
        "blk.1.ssm_in.weight",
    }


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_factor_in_quantised_weights(kind: str, models: Models, tmp_path: Path) -> None:
    """Which leaves an error no larger than the type may have."""
    model, folder = models("llama", kind), tmp_path / "hf"
    checkpoint(models("llama", "F32"), folder)
    for shard in folder.iterdir():
        held = safetensors.load_file(shard)
        if hf_name(UP) in held:
            safetensors.save_file(held | {hf_name(UP): held[hf_name(UP)] / 1.05}, shard)
    ((name, (cause, note)),) = wrong(audit_checkpoint(model, folder).tensors).items()
    assert (name, cause, note and note[:31]) == (UP, "weight_scaled", "every value was multiplied by 1")


def test_a_layer_that_was_left_out(models: Models, tmp_path: Path) -> None:
    """A checkpoint of a layer more; one that predicts the token after the next is left out by right."""
    folder = checkpoint(models("llama"), tmp_path / "hf")
    n = 1 + max(int(name.split(".")[1]) for name in GGUFFile(models("llama")).tensors if name.startswith("blk."))
    more = {hf_name(f"blk.{n}.ffn_up.weight"): torch.ones(160, 96)}
    safetensors.save_file(more, folder / "more.safetensors")
    (missing,) = wrong(audit_checkpoint(models("llama"), folder).tensors).items()
    assert missing == (hf_name(f"blk.{n}.ffn_up.weight"), (None, "the file has fewer layers"))
    safetensors.save_file(more | {f"model.layers.{n}.eh_proj.weight": torch.ones(96, 192)}, folder / "more.safetensors")
    assert audit_checkpoint(models("llama"), folder).verdict == "match"


def test_an_expert_in_the_place_of_another(tmp_path: Path) -> None:
    model = tiny_checkpoints.CLASSES["mixtral"].write("mixtral", tmp_path / "model.gguf")
    tiny_checkpoints.load("mixtral", model).save_pretrained(tmp_path / "hf")
    name = "blk.1.ffn_up_exps.weight"
    plant(model, name, tensors_of(model)[name][[0, 1, 2, 4, 3, 5, 6]])
    result = audit_checkpoint(model, tmp_path / "hf")
    assert wrong(result.tensors) == {name: (None, "2 of 7 experts are wrong: 3 to 4")}


def test_norms_that_a_checkpoint_holds_less_1(models: Models, tmp_path: Path) -> None:
    """Gemma's: a file that lacks the 1 is wrong, as one of Llama's that has it is."""
    model = Path(shutil.copy(models(replace(K_QUANTS, arch="gemma"), "F32"), tmp_path / "model.gguf"))
    norms = {name: values - 1 for name, values in tensors_of(model).items() if name.endswith("norm.weight")}
    folder = checkpoint(model, tmp_path / "hf", tensors=tensors_of(model) | norms)
    statuses = {t.tensor: t.status for t in audit_checkpoint(model, folder).tensors}
    assert {statuses[name] for name in norms} == {"rounded"}
    plant(model, (norm := "blk.1.attn_norm.weight"), norms[norm])
    assert wrong(audit_checkpoint(model, folder).tensors)[norm][0] == "norm_weight_minus_one"


def test_a_tensor_that_nobody_knows_the_parts_of(models: Models, tmp_path: Path) -> None:
    """It is neither right nor wrong: so is the file."""
    folder = checkpoint(models("llama"), tmp_path / "hf")
    (shard,) = (path for path in folder.iterdir() if hf_name(UP) in safetensors.load_file(path))
    held = safetensors.load_file(shard)
    held["model.layers.1.mlp.packed.weight"] = held.pop(hf_name(UP))
    safetensors.save_file(held, shard)
    result = audit_checkpoint(models("llama"), folder)
    assert (result.verdict, wrong(result.tensors)) == ("undecided", {})
    assert result.summary == (
        f"all {len(result.tensors) - 2} tensors are what the checkpoint's become. 1 of the file's was not compared "
        f"({UP}): what tensors without a name it is made of, and how, is not known. 1 of the checkpoint's was not "
        "compared (model.layers.1.mlp.packed.weight): gguf-py has no name for it in this architecture."
    )


@pytest.mark.parametrize("weights", ["F32", "Q8_0"])
def test_a_checkpoint_of_other_shapes(weights: str, models: Models, tmp_path: Path) -> None:
    """Of another model: 64 rows are no 6 heads, and as many values in other rows are another matrix."""
    q, up = tensors_of(models("llama"))[Q := "blk.0.attn_q.weight"], tensors_of(models("llama"))[UP]
    folder = checkpoint(models("llama"), tmp_path / "hf")
    for shard in folder.iterdir():
        held = safetensors.load_file(shard)
        for name, value in ((Q, np.ones((64, 96), np.float32)), (UP, up.reshape(-1, 32))):
            if hf_name(name) in held:
                held[hf_name(name)] = torch.from_numpy(value.copy())
        safetensors.save_file(held, shard)
    assert wrong(audit_checkpoint(models("llama", weights), folder).tensors) == {
        Q: (None, f"the file holds the shape {list(q.shape)}, the checkpoint [64, 96]"),
        UP: (None, f"the file holds the shape {list(up.shape)}, the checkpoint [480, 32]"),
    }


def test_two_files_that_hold_one_tensor(models: Models, tmp_path: Path) -> None:
    """The same values are the same tensor; others leave open which of them the file was made from."""
    model, folder = models("llama"), tmp_path / "hf"
    checkpoint(model, folder)
    held = safetensors.load_file(folder / "model-0.safetensors")
    name = next(iter(held))
    safetensors.save_file({name: held[name]}, folder / "again.safetensors")
    assert audit_checkpoint(model, folder).verdict == "match"
    for other in (held[name] + 1, held[name].reshape(-1)):
        safetensors.save_file({name: other}, folder / "again.safetensors")
        with pytest.raises(ModelError, match=r"again.safetensors and model-0.safetensors hold other values of " + name):
            audit_checkpoint(model, folder)


def test_factors_of_rope_are_in_no_checkpoint(models: Models, tmp_path: Path) -> None:
    model = models("llama3")
    without = {name: values for name, values in tensors_of(model).items() if name != "rope_freqs.weight"}
    result = audit_checkpoint(model, checkpoint(model, tmp_path / "hf", tensors=without))
    assert result.verdict == "match"
    assert {t.tensor for t in result.tensors if t.status == "computed"} == {"rope_freqs.weight"}


def test_a_tied_head_is_the_embedding(models: Models, tmp_path: Path) -> None:
    """The checkpoint may hold lm_head or not; if it is another matrix, the file lost it."""
    model = models(Shape("llama", tied=True, n_layer=1))
    folder = checkpoint(model, tmp_path / "hf")
    assert audit_checkpoint(model, folder).verdict == "match"
    embedding = torch.from_numpy(tensors_of(model)["token_embd.weight"].copy())
    safetensors.save_file({"lm_head.weight": embedding}, folder / "head.safetensors")
    assert audit_checkpoint(model, folder).verdict == "match"
    safetensors.save_file({"lm_head.weight": embedding + 1}, folder / "head.safetensors")
    assert wrong(audit_checkpoint(model, folder).tensors) == {
        "output.weight": ("head_is_embedding", "it holds token_embd.weight")
    }


# --- against a trace ---------------------------------------------------------------------------------------------


def write_trace(model: Path, path: Path, changed: dict[str, np.ndarray]) -> Path:
    with TraceWriter(path, "loader 1.0", model=model.name) as writer:
        for name, values in {**tensors_of(model), **changed}.items():
            writer.weight(name, values.astype(np.float32))
    return path


def test_what_an_engine_holds(models: Models, tmp_path: Path) -> None:
    model = models("k-quants", "Q4_K_M")
    result = audit_trace(model, write_trace(model, tmp_path / "x.trace", {}))
    assert result.verdict == "match"
    assert {t.status for t in result.tensors} == {"identical"}
    assert [t.tensor for t in result.tensors] == list(GGUFFile(model).tensors)


def test_each_mistake_of_a_loader(models: Models, tmp_path: Path) -> None:
    """The mistakes in one engine all at once, each in a tensor of its own, of a file of K-quants."""
    from tracediff.diagnose.mistakes.blocks import BLOCK_MISTAKES
    from tracediff.model.block_fields import EditedBlocks

    model = models("k-quants", "Q4_K_M")
    t, file = tensors_of(model), GGUFFile(model)
    nibbles = next(m for m in BLOCK_MISTAKES if m.name == "q4_k_nibbles")
    q4_k = next(name for name, info in file.tensors.items() if info.type.name == "Q4_K")
    misread = EditedBlocks(nibbles.types, nibbles.edit)(file, file.tensors[q4_k]).numpy()
    changed = {
        q4_k: misread.reshape(t[q4_k].shape),
        "blk.0.attn_q.bias": 0 * t["blk.0.attn_q.bias"],
        "blk.0.attn_norm.weight": t["blk.0.attn_norm.weight"] + 1,
        "blk.0.ffn_norm.weight": t["blk.1.ffn_norm.weight"],
        "blk.2.ffn_down.weight": t["blk.2.ffn_down.weight"].T,
        "blk.1.attn_k.weight": as_neighbours(t["blk.1.attn_k.weight"], 2),
        "blk.1.attn_k.bias": as_neighbours(t["blk.1.attn_k.bias"], 2),
        "output_norm.weight": t["output_norm.weight"] * 2,
        "blk.9.ffn_up.weight": t["blk.0.ffn_up.weight"],
    }
    result = audit_trace(model, write_trace(model, tmp_path / "x.trace", changed))
    assert {name: cause for name, (cause, _) in wrong(result.tensors).items()} == {
        q4_k: "q4_k_nibbles",
        "blk.0.attn_q.bias": "bias_missing",
        "blk.0.attn_norm.weight": "norm_weight_plus_one",
        "blk.0.ffn_norm.weight": "wrong_layer",
        "blk.2.ffn_down.weight": "weight_transposed",
        "blk.1.attn_k.weight": "rope_permuted",
        "blk.1.attn_k.bias": "rope_permuted",
        "output_norm.weight": "norm_scaled",
        "blk.9.ffn_up.weight": None,
    }


def test_compare_and_check_name_the_cause_too(models: Models, tmp_path: Path) -> None:
    model = models("k-quants", "Q4_K_M")
    t = tensors_of(model)
    changed = {
        "blk.1.attn_k.bias": as_neighbours(t["blk.1.attn_k.bias"], 2),
        "blk.0.ffn_norm.weight": t["blk.1.ffn_norm.weight"],
    }
    candidate = Trace(write_trace(model, tmp_path / "x.trace", changed))
    assert {
        w.weight: (w.cause, w.note) for w in compare_weights(None, candidate, Model(model)) if w.status == "wrong"
    } == {
        "blk.1.attn_k.bias": ("rope_permuted", "Q/K rows are permuted from halves to neighbours"),
        "blk.0.ffn_norm.weight": ("wrong_layer", "it holds blk.1.ffn_norm.weight"),
    }


def test_float32_dequantised_in_another_order_is_no_mistake(models: Models, tmp_path: Path) -> None:
    model = models("k-quants", "Q4_K_M")
    changed = {UP: tensors_of(model)[UP] * np.float32(1 + 2**-23)}
    found = {r.tensor: r for r in audit_trace(model, write_trace(model, tmp_path / "x.trace", changed)).tensors}[UP]
    assert (found.status, found.note) == ("rounded", "the right values to the accuracy of float32")


# --- the command -------------------------------------------------------------------------------------------------

REPORT = """\
DIVERGED: 1 of 30 tensors is not right; blk.1.ffn_norm.weight: wrong: 1 was added to every value; in
          a GGUF file it is in already (F32 in the file, F32 in the checkpoint, error 0.9245).
  MODEL against the checkpoint HF

Not right
  - blk.1.ffn_norm.weight: wrong: 1 was added to every value; in a GGUF file it is in already (F32
    in the file, F32 in the checkpoint, error 0.9245).

Counts
  status     file  checkpoint  tensors  error up to  allowed from
  identical  F32   F32              29            0             -
  wrong      F32   F32               1       0.9245             -
"""


@pytest.mark.parametrize(("dtype", "words"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_norms_less_1_in_half_precision(dtype: Any, words: str) -> None:
    """A checkpoint's float32 weight, 1 + that in the file, and what Gemma makes of the weight in half precision."""
    for seed in range(20):
        torch.manual_seed(seed)
        less_1 = torch.randn(2048) * 0.1
        expected, held = (less_1 + 1).numpy(), (less_1.to(dtype).float() + 1).numpy()
        said = f"the right values in {words}, to which 1 is added"
        assert judge_values("blk.0.attn_norm.weight", expected, held, lambda held: iter(())) == ("rounded", None, said)
        held[7] *= 1.01
        assert judge_values("blk.0.attn_norm.weight", expected, held, lambda held: iter(()))[0] == "wrong"


def test_small_weights_that_were_never_loaded_are_no_rounding() -> None:
    small = np.random.default_rng(0).standard_normal(256).astype(np.float32) * np.float32(5e-4)
    assert judge_values("blk.0.attn_q.bias", small, small * 0, lambda held: iter(()))[0] == "wrong"


def test_values_that_are_near_by_themselves_are_not_multiplied_by_1() -> None:
    """Each block's scale in bfloat16: every value of it is off by as much, which a factor of 1.0002 leaves, too."""
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    scales = 1 + np.random.default_rng(1).uniform(-(2.0**-9), 2.0**-9, (64, 8, 1)).astype(np.float32)
    held = (values.reshape(64, 8, 32) * scales * np.float32(1.0002)).reshape(64, 256)
    cause, words = explain("blk.0.ffn_up.weight", values, held, lambda held: iter(()))
    assert (cause, words.partition(":")[0]) == (None, "other values, which follow the right ones (correlation 1)")


def test_the_report(model: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    folder = checkpoint(model, tmp_path / "hf")
    assert cli("weights", model, "--hf", folder)[0] == 0
    plant(model, NORM, tensors_of(model)[NORM] + 1)
    code, report, error = cli("weights", model, "--hf", folder)
    assert (code, error) == (1, "")
    lines = report.split("\n")
    at = next(n for n, line in enumerate(lines) if " against" in line)
    end = lines.index("", at)
    assert " ".join("".join(lines[at:end]).split()).replace(" ", "") == f"{model}againstthecheckpoint{folder}"
    expected = REPORT.split("\n")
    assert lines[:at] + lines[end:] == expected[:2] + expected[3:]
    code, text, _ = cli("weights", model, "--hf", folder, "--json", "-")
    document = json.loads(text)
    assert (code, document["schema"], document["verdict"]) == (1, "tracediff/weights/1", "diverged")
    assert [t["cause"] for t in document["tensors"] if t["status"] == "wrong"] == ["norm_weight_plus_one"]


def test_norms_alone(
    models: Models, torch_trace: Callable[..., Path], cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, report, _ = cli("weights", models("llama"), "--trace", torch_trace(models("llama")))
    assert code == 0
    assert report.startswith("MATCH: all 7 tensors recorded are as in the file. 23 more were not recorded.\n")


def test_refusals(models: Models, refused: Callable[..., str], tmp_path: Path) -> None:
    model = models("llama")
    assert refused("weights", model) == "give either --trace TRACE or --hf FOLDER to audit the weights against."
    assert refused("weights", model, "--hf", tmp_path) == (
        f"{tmp_path}: no *.safetensors file in this folder. Give the folder of the checkpoint."
    )
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    assert refused("weights", model, "--hf", tmp_path).startswith(
        f"{tmp_path / 'model.safetensors'}: not a safetensors"
    )
    with TraceWriter(tmp_path / "x.trace", "x") as writer:
        writer.step(0, (1,), (0,))
    assert refused("weights", model, "--trace", tmp_path / "x.trace") == (
        f"{tmp_path / 'x.trace'}: no weights are recorded. Write a weight record for each tensor after loading it."
    )
