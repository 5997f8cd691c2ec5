"""The check that ggml's tensor struct is the one that we read."""

import ctypes

import pytest

from tracediff.errors import EngineError
from tracediff_reference import ggml
from tracediff_reference.protocol import Sought
from tracediff_reference.recognise import BySources

FIELDS = [name for name, _ in ggml.Tensor._fields_]
CHECKED = ["type", "ne", "nb", "op", "op_params", "src", "view_src", "data", "name"]


def layout(fields: list[tuple[str, type]]) -> type[ctypes.Structure]:
    return type("Other", (ctypes.Structure,), {"_fields_": fields})


def test_this_llama_cpp_is_laid_out_as_we_read_it() -> None:
    ggml.check_layout()


def test_a_copy_of_the_definition_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "at", layout([*ggml.Tensor._fields_]).from_address)
    ggml.check_layout()


@pytest.mark.parametrize("field", CHECKED)
def test_a_new_field_is_noticed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more field before this one shifts it and all that follow."""
    fields: list[tuple[str, type]] = [*ggml.Tensor._fields_]
    fields.insert(FIELDS.index(field), ("new", ctypes.c_int64))
    monkeypatch.setattr(ggml, "at", layout(fields).from_address)
    with pytest.raises(EngineError, match="lays out ggml_tensor differently") as raised:
        ggml.check_layout()
    named = str(raised.value).partition("(field ")[2].partition(")")[0].split(", ")
    assert named == CHECKED[CHECKED.index(field) :]
    assert "llama-cpp-python" in str(raised.value)


@pytest.mark.parametrize("field", ["ne", "op_params", "src", "name"])
def test_another_length_is_noticed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GGML_MAX_DIMS, GGML_MAX_OP_PARAMS, GGML_MAX_SRC and GGML_MAX_NAME have all been other numbers."""
    longer = {"ne": 5, "op_params": 18, "src": 12, "name": 8}
    fields = [(n, t._type_ * longer[n] if n == field else t) for n, t in ggml.Tensor._fields_]
    monkeypatch.setattr(ggml, "at", layout(fields).from_address)
    with pytest.raises(EngineError, match="lays out ggml_tensor differently"):
        ggml.check_layout()


def test_copies_for_another_back_end_are_what_they_are_copies_of() -> None:
    """Where a model lies on two, the scheduler gives a node of the one a leaf of another name for its source."""
    lib = ggml.library()
    context = lib.ggml_init(ggml._InitParams(1 << 16, None, False))
    looked = BySources([Sought("RMS_NORM", ("w",), "one", ("T", 3)), Sought("RMS_NORM", ("one",), "two", ("T", 3))])

    def leaf(name: bytes) -> int:
        tensor = lib.ggml_new_tensor_3d(context, ggml.F32, 3, 5, 7)
        lib.ggml_set_name(tensor, name)
        return int(tensor)

    one = lib.ggml_rms_norm(context, leaf(b"CUDA0#w#0"), 0.5)
    lib.ggml_set_name(one, b"l_out-0")
    assert looked.look(one) == ("one",)
    assert looked.look(lib.ggml_rms_norm(context, leaf(b"CPU#l_out-0#1"), 0.5)) == ("two",)
    assert looked.look(lib.ggml_rms_norm(context, leaf(b"CPU#l_out-1#1"), 0.5)) == ()
    lib.ggml_free(context)
