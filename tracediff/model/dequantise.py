"""Blocks of quantised weights to float32, by ggml's own C code where it is installed, else by gguf-py.

They give the same values (`tests/test_dequantise.py`); ggml's is up to hundreds of times as fast.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tracediff.errors import ModelError

_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _Traits(ctypes.Structure):
    """The beginning of ggml_type_traits (ggml/include/ggml.h)."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
    )


def dequantise(raw: np.ndarray, kind: GGMLQuantizationType, tensor: str, into: np.ndarray | None = None) -> np.ndarray:
    """Rows of blocks, uint8 [rows, bytes per row], as float32 [rows, columns], be it `into` memory that is there.

    Raises ModelError, which names the `tensor`, for a type that neither ggml nor gguf-py knows.
    """
    convert = _to_float(kind)
    block, size = GGML_QUANT_SIZES[kind]
    out = np.empty((*raw.shape[:-1], raw.shape[-1] // size * block), np.float32) if into is None else into
    if convert is None:
        out[...] = _by_gguf(raw, kind, tensor)
        return out
    raw = np.ascontiguousarray(raw)
    convert(raw.ctypes.data, out.ctypes.data, out.size)  # the interpreter's lock is let go of meanwhile
    return out


def _by_gguf(raw: np.ndarray, kind: GGMLQuantizationType, tensor: str) -> np.ndarray:
    try:
        return quants.dequantize(raw, kind)
    except NotImplementedError:
        known = ", ".join(GGMLQuantizationType(t).name for t in GGML_QUANT_SIZES if t in quants._type_traits)
        raise ModelError(
            f"tensor {tensor!r} is {kind.name}, which gguf-py cannot dequantise. It can: {known}."
        ) from None


@cache
def _to_float(kind: GGMLQuantizationType) -> Callable[[int, int, int], None] | None:
    """ggml's conversion of a type; None where the library is missing, or is of another layout than is known here."""
    library = _library()
    if library is None:
        return None
    library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    traits = library.ggml_get_type_traits(ctypes.c_int(kind.value)).contents
    block, size = GGML_QUANT_SIZES[kind]
    if (traits.block_size, traits.type_size) != (block, size) or not traits.to_float:
        return None
    return _ToFloat(traits.to_float)


@cache
def _library() -> ctypes.CDLL | None:
    """libggml-base of llama-cpp-python, which need not be imported for it."""
    package = find_spec("llama_cpp")
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "lib"
    path = next((found for name in ("libggml-base.*", "ggml-base.*") for found in sorted(folder.glob(name))), None)
    try:
        return ctypes.CDLL(str(path)) if path else None
    except OSError:
        return None
