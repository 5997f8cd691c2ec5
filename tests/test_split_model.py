"""A model of several files, as llama-gguf-split writes them: the same as of one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import TOKENS, Models
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tracediff.errors import ModelError
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.lift import described


def split(model: Path, out: Path, n_tensors: int) -> Path:
    """The model as gguf-py writes it in parts of at most so many tensors; the first."""
    reader = GGUFReader(model)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents(), split_max_tensors=n_tensors)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *of = field.types
        writer.add_key_value(name, field.contents(), kind, sub_type=of[-1] if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(out.parent.glob(f"{out.stem}-*-of-*.gguf"))[0]


@pytest.fixture
def first(models: Models, tmp_path: Path) -> Path:
    path = split(models("qwen2", "Q8_0"), tmp_path / "whole.gguf", 9)
    assert len([*tmp_path.iterdir()]) == 5, [*tmp_path.iterdir()]
    return path


def test_its_tensors_are_those_of_one_file(models: Models, first: Path) -> None:
    whole, parts = GGUFFile(models("qwen2", "Q8_0")), GGUFFile(first)
    assert [*parts.tensors] == [*whole.tensors]
    for name, info in whole.tensors.items():
        assert bytes(parts.raw(parts.tensors[name])) == bytes(whole.raw(info)), name


@pytest.mark.parametrize("engine", ["llama.cpp", "torch"])
def test_it_is_traced_and_judged(
    engine: str, first: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    out, tokens = tmp_path / "out.trace", ",".join(map(str, TOKENS))
    code, _, error = cli("trace", first, "--tokens", tokens, "--engine", engine, "-o", out)
    assert not code, error
    code, report, error = cli("check", out, "--model", first)
    assert (code, report.split(":")[0]) == (0, "MATCH"), error


def test_llama_cpp_describes_it_by_its_headers(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(described, "url_of", lambda path: "memory://" + str(path))  # as if it were in some storage
    monkeypatch.setenv("TRACEDIFF_CACHE", "")
    by_headers = described.describe(GGUFFile(first))
    monkeypatch.undo()
    assert by_headers == described.describe(GGUFFile(first))


def part(first: Path, number: int) -> Path:
    return first.with_name(first.name.replace("00001", f"0000{number}"))


def test_the_first_is_asked_for(first: Path) -> None:
    with pytest.raises(ModelError, match=rf"it is part 3 of 5 of a model\. Give the first: {first}"):
        GGUFFile(part(first, 3))


def test_a_part_that_is_missing_is_named(first: Path) -> None:
    part(first, 4).unlink()
    with pytest.raises(ModelError, match=f"{part(first, 4)}: cannot open the model: No such file or directory"):
        GGUFFile(first)


def test_names_are_those_that_llama_cpp_looks_for(first: Path) -> None:
    renamed = first.rename(first.with_name("model.gguf"))
    with pytest.raises(ModelError, match=r"it is part 1 of 5 of a model, whose name has to end in '-00001-of-0000"):
        GGUFFile(renamed)


def test_parts_that_were_exchanged_are_refused(first: Path) -> None:
    shutil.copy(part(first, 2), part(first, 3))
    with pytest.raises(
        ModelError, match=r"it is part 2 of 5 of a model; it should be part 3 of 5 of a model\. Download"
    ):
        GGUFFile(first)


def test_a_part_of_another_model_is_refused(models: Models, first: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = split(models("llama", "Q8_0"), tmp_path / "other" / "whole.gguf", 7)
    shutil.copy(part(other, 2), first.with_name(part(first, 2).name))
    with pytest.raises(
        ModelError, match=r"is in another part too\. Download all parts again, or join them: llama-gguf-sp"
    ):
        GGUFFile(first)


def test_tensors_that_are_in_no_part_are_missed(first: Path) -> None:
    key = b"split.tensors.count"
    head = bytearray(first.read_bytes())
    at = head.index(key) + len(key) + 4  # after its type
    n = int.from_bytes(head[at : at + 4], "little")
    head[at : at + 4] = (n + 2).to_bytes(4, "little")
    first.write_bytes(head)
    with pytest.raises(ModelError, match=f"it announces {n + 2} tensors; its parts have {n}. Download all parts again"):
        GGUFFile(first)
