"""GGUF files that are damaged, incomplete or unknown: each ends in one message that says what, where and what next."""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Models
from hypothesis import given, settings
from hypothesis import strategies as st

from tracediff.errors import EngineError, ModelError
from tracediff.model.families import load_graph

Change = Callable[[bytes], bytes]
TENSOR = b"blk.1.ffn_up.weight"
I16 = 25  # a tensor's type; those of metadata:
UINT8, UINT32, INT32, FLOAT32, ARRAY = 0, 4, 5, 6, 9


def renamed(old: bytes, new: bytes) -> Change:
    """Another name of the same length: the old one is missing then."""
    assert len(old) == len(new)
    return lambda model: model.replace(old, new, 1)


def patched(at: bytes, skip: int, form: str, *values: object) -> Change:
    """Numbers written over those that stand `skip` bytes after the name `at`, which its length precedes."""

    def change(model: bytes) -> bytes:
        changed = bytearray(model)
        place = model.index(struct.pack("<Q", len(at)) + at) + 8 + len(at) + skip
        struct.pack_into(form, changed, place, *values)
        return bytes(changed)

    return change


def key(name: bytes, kind: int, form: str, value: object) -> Change:
    """A metadata value of four bytes."""
    return lambda model: patched(name, 4, form, value)(patched(name, 0, "<I", kind)(model))


ARCHITECTURE = b"general.architecture"
LAYERS, EPS, N_ROT = b"qwen2.block_count", b"qwen2.attention.layer_norm_rms_epsilon", b"qwen2.rope.dimension_count"
CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "empty": (lambda model: b"", ("not a GGUF file (it begins with b''", "convert_hf_to_gguf.py")),
    "another format": (lambda model: b"PK\3\4" + model, ("not a GGUF file (it begins with b'PK",)),
    "another version": (lambda model: b"GGUF\1\0\0\0" + model[8:], ("GGUF version 1 is not supported",)),
    "big-endian": (lambda model: b"GGUF\0\0\0\3" + model[8:], ("GGUF version 50331648", "little-endian")),
    "cut in the magic": (lambda model: model[:6], ("truncated: its header needs 4 bytes at 4", "Download or convert")),
    "cut in the header": (lambda model: model[:1000], ("truncated: its header needs", "it has 1,000 bytes")),
    "cut in the data": (lambda model: model[:-1000], ("truncated: tensor 'output.weight' needs 61,440 bytes",)),
    "key missing": (renamed(LAYERS, b"qwen2.block_cXunt"), ("key 'qwen2.block_count' is missing", "Convert the model")),
    "key of another type": (key(LAYERS, FLOAT32, "<f", 2.0), ("'qwen2.block_count' is 2.0, not a whole number",)),
    "key not finite": (key(EPS, FLOAT32, "<f", float("nan")), ("rms_epsilon' is nan, not a finite number",)),
    "no layers": (key(LAYERS, UINT32, "<I", 0), ("impossible hyper-parameters: 0 layers", "Convert the model")),
    "negative layers": (key(LAYERS, INT32, "<i", -3), ("impossible hyper-parameters: -3 layers",)),
    "too many layers": (key(LAYERS, UINT32, "<I", 2**31), ("tensor 'blk.2.attn_norm.weight' is missing",)),
    "negative epsilon": (key(EPS, FLOAT32, "<f", -1e-6), ("impossible hyper-parameters", "epsilon -1e-06")),
    "heads that do not fit": (
        patched(b"qwen2.attention.head_count", 4, "<I", 7),
        ("impossible hyper-parameters", "7/2 heads"),
    ),
    "odd rotary dimension": (key(N_ROT, UINT32, "<I", 7), ("impossible rotary embedding: dimension 7 of heads of 8",)),
    "negative rotary dimension": (key(N_ROT, INT32, "<i", -4), ("impossible rotary embedding: dimension -4",)),
    "no architecture": (renamed(ARCHITECTURE, b"general.architectXre"), ("'general.architecture' is None, not",)),
    "architecture not text": (patched(ARCHITECTURE, 0, "<IIQ", ARRAY, UINT8, 1), ("architecture' is [50], not",)),
    "no alignment": (
        lambda model: renamed(LAYERS, b"general.alignment")(key(LAYERS, UINT32, "<I", 0)(model)),
        ("'general.alignment' is 0: the header is damaged. Download or convert",),
    ),
    "unknown metadata type": (patched(LAYERS, 0, "<I", 77), ("unknown metadata type 77 at byte", "Download or")),
    "tensor missing": (
        renamed(TENSOR, b"blk.1.ffn_pu.weight"),
        ("the required tensor 'blk.1.ffn_up.weight' is missing", "Convert the model"),
    ),
    "embedding missing": (
        renamed(b"token_embd.weight", b"token_embX.weight"),
        ("the required tensor 'token_embd.weight' is missing",),
    ),
    "tensor of a wrong shape": (
        patched(TENSOR, 4, "<QQ", 48, 63),
        ("tensor 'blk.1.ffn_up.weight' has shape [63, 48], expected [64, 48]",),
    ),
    "tensor of an absurd shape": (
        patched(TENSOR, 4, "<QQ", 10**12, 10**12),
        ("truncated: tensor 'blk.1.ffn_up.weight' needs 4,000,000,000,000,000,000,000,000 bytes",),
    ),
    "tensor of 9 dimensions": (patched(TENSOR, 0, "<I", 9), ("has 9 dimensions; ggml has 1 to 4",)),
    "tensor far away": (patched(TENSOR, 24, "<Q", 2**62), ("truncated: tensor 'blk.1.ffn_up.weight' needs 12,288",)),
    "unknown tensor type": (
        patched(TENSOR, 20, "<I", 99),
        ("tensor 'blk.1.ffn_up.weight' has the unknown type 99. Known to gguf-py: F32, F16, Q4_0", "newer gguf"),
    ),
    "rows that are no whole blocks": (
        patched(TENSOR, 20, "<I", 8),
        ("tensor 'blk.1.ffn_up.weight' has rows of 48, not a multiple of Q8_0's 32",),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(models: Models) -> bytes:
    return models("tiny").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, good: bytes, tmp_path: Path, refused: Callable[..., str]) -> None:
    change, expected = CASES[case]
    model = tmp_path / "bad.gguf"
    model.write_bytes(change(good))
    assert model.read_bytes() != good
    message = refused("trace", model, "--tokens", "1", "-o", tmp_path / "out.trace")
    assert message.startswith(f"{model}: ")
    for text in expected:
        assert text in message
    assert not (tmp_path / "out.trace").exists()


def test_no_such_file(tmp_path: Path, refused: Callable[..., str]) -> None:
    model = tmp_path / "no.gguf"
    for arguments in (("run", model, "-p", "x"), ("inspect", model), ("check", model, "--model", model)):
        message = refused(*arguments)
        assert message.startswith(f"{model}: cannot open ")
        assert message.endswith("No such file or directory. Check the path.")


def test_a_folder(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "cannot open the model: it is a folder. Check the path." in refused("run", tmp_path, "-p", "x")


def test_a_type_that_cannot_be_dequantised(good: bytes, tmp_path: Path, refused: Callable[..., str]) -> None:
    model = tmp_path / "bad.gguf"
    model.write_bytes(patched(b"output_norm.weight", 4 + 8, "<I", I16)(good))
    message = refused("trace", model, "--tokens", "1", "-o", tmp_path / "out.trace")
    assert "tensor 'output_norm.weight' is I16, which gguf-py cannot dequantise. It can: " in message


@pytest.mark.parametrize("engine", ["llama.cpp", "torch"])
def test_llama_cpp_refuses(engine: str, good: bytes, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Without a vocabulary: nothing that we would miss, until there is a prompt to tokenise."""
    model = tmp_path / "bad.gguf"
    model.write_bytes(renamed(b"tokenizer.ggml.model", b"tokenizer.ggml.modeX")(good))
    message = refused("trace", model, "--engine", engine, "-p", "x", "-o", tmp_path / "a.trace")
    first, label, *lines = message.splitlines()
    assert first.startswith(f"llama.cpp cannot load {model}, for the reason below. Convert the model again")
    assert label == "Its last lines:"
    assert any("key not found in model: tokenizer.ggml.model" in line for line in lines)
    assert all(line.startswith("  | ") for line in lines)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzzed_header(good: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever stands in the header, it is a graph or an error, llama.cpp's where another architecture is named."""
    header = good.rindex(b"output.weight") + 64
    model = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        model[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(model)
    with suppress(ModelError, EngineError):
        load_graph(path)
