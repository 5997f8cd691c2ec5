"""One ggml op, computed by ggml itself: the second opinion on what a kind computes."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

_TYPES = {"float32": 0, "float16": 1, "int32": 26, "int64": 27}
_MEMORY = 256 << 20


class _Params(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@dataclass
class Quantised:
    """A float32 matrix, or several, as blocks of a type."""

    values: np.ndarray
    type: str

    @property
    def raw(self) -> np.ndarray:
        return quantize(self.values, GGMLQuantizationType[self.type])


@cache
def _lib() -> ctypes.CDLL:
    folder = Path(llama_cpp.__file__).parent / "lib"
    ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
    lib.ggml_cpu_init()
    return lib


def _pointer(name: str, *arguments: Any) -> ctypes.c_void_p:
    """What a function of pointers and numbers returns: a pointer."""
    function = getattr(_lib(), name)
    function.restype = ctypes.c_void_p
    kinds = {float: ctypes.c_float, bool: ctypes.c_bool, int: ctypes.c_int64, np.ndarray: lambda x: x.ctypes}
    passed = (a if isinstance(a, ctypes.c_void_p) else kinds[type(a)](a) for a in arguments)
    return ctypes.c_void_p(function(*passed))


def compute(name: str, *operands: Any) -> np.ndarray:
    """`ggml_NAME(operands)`: arrays, outermost axis first, become tensors; None a null pointer; numbers stay."""
    lib = _lib()
    lib.ggml_init.restype, lib.ggml_init.argtypes = ctypes.c_void_p, [_Params]
    context = ctypes.c_void_p(lib.ggml_init(_Params(_MEMORY, None, False)))
    try:
        out = _pointer(f"ggml_{name}", context, *(_operand(context, x) for x in operands))
        graph = _pointer("ggml_new_graph", context)
        lib.ggml_build_forward_expand(graph, out)
        assert lib.ggml_graph_compute_with_ctx(context, graph, 1) == 0
        return _values(out)
    finally:
        lib.ggml_free(context)


def _operand(context: ctypes.c_void_p, x: Any) -> Any:
    if not isinstance(x, np.ndarray | Quantised):
        return ctypes.c_void_p(None) if x is None else x
    if isinstance(x, Quantised):
        number, shape, raw = GGMLQuantizationType[x.type].value, x.values.shape, x.raw
    else:
        number, shape, raw = _TYPES[x.dtype.name], x.shape, x
    tensor = _pointer("ggml_new_tensor", context, number, len(shape), np.array(shape[::-1], np.int64))
    ctypes.memmove(_pointer("ggml_get_data", tensor), np.ascontiguousarray(raw).ctypes.data, raw.nbytes)
    return tensor


def _values(tensor: ctypes.c_void_p) -> np.ndarray:
    from tracediff_reference.ggml import Tensor

    of = Tensor.from_address(tensor.value or 0)
    shape = tuple(of.ne)[::-1]
    dtype = {0: np.float32, 1: np.float16, 26: np.int32}[of.type]
    held = (ctypes.c_char * (int(np.prod(shape)) * np.dtype(dtype).itemsize)).from_address(of.data)
    return np.frombuffer(bytes(held), dtype).reshape(shape)
