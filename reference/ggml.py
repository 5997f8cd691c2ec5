"""ggml's tensors through ctypes: the struct as the eval callback sees it, and a check that it is that struct.

Layout: ggml/include/ggml.h, `struct ggml_tensor`, as of llama.cpp commit 0c1e5709.
"""

import ctypes
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

from tracediff.errors import EngineError

MAX_DIMS, MAX_SRC, MAX_NAME, OP_PARAMS = 4, 10, 64, 16


class Tensor(ctypes.Structure):
    """struct ggml_tensor."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * MAX_DIMS),
    ("nb", ctypes.c_size_t * MAX_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * OP_PARAMS),
    ("flags", ctypes.c_int32),
    ("src", ctypes.c_void_p * MAX_SRC),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * MAX_NAME),
    ("extra", ctypes.c_void_p),
]

F32, F16, I32 = 0, 1, 26
_DTYPES: dict[int, np.dtype[Any]] = {F32: np.dtype("<f4"), F16: np.dtype("<f2"), I32: np.dtype("<i4")}


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


@cache
def library() -> ctypes.CDLL:
    """libggml-base, which libllama has loaded already."""
    folder = Path(llama._base_path)  # LLAMA_CPP_LIB_PATH, or its own
    path = folder / f"libggml-base.{'dylib' if sys.platform == 'darwin' else 'so'}"
    if not path.exists():
        raise EngineError(f"libggml-base is not in {folder}. Reinstall llama-cpp-python.")
    lib = ctypes.CDLL(str(path))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, arguments in (
        ("ggml_op_desc", ctypes.c_char_p, [pointer]),
        ("ggml_nbytes", size, [pointer]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
        ("ggml_backend_buffer_is_host", ctypes.c_bool, [pointer]),
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_3d", pointer, [pointer, ctypes.c_int, *[ctypes.c_int64] * 3]),
        ("ggml_set_name", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_rms_norm", pointer, [pointer, pointer, ctypes.c_float]),
        ("ggml_transpose", pointer, [pointer, pointer]),
        ("ggml_get_data", pointer, [pointer]),
        ("ggml_graph_n_nodes", ctypes.c_int, [pointer]),
        ("ggml_graph_node", pointer, [pointer, ctypes.c_int]),
        ("ggml_type_name", ctypes.c_char_p, [ctypes.c_int]),
        ("ggml_type_size", size, [ctypes.c_int]),
        ("ggml_blck_size", ctypes.c_int64, [ctypes.c_int]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def at(address: int) -> Tensor:
    """The tensor at an address."""
    return Tensor.from_address(address)


# What the scheduler calls the copy of a tensor for another back end (ggml_backend_sched_split_graph): CUDA0#NAME#0.
_COPY = re.compile(r"[^#]+#(.+)#\d+")


def name_of(tensor: Tensor) -> str:
    """What a tensor is called, or what it is a copy of for another back end."""
    name = tensor.name.decode(errors="replace")
    copy = _COPY.fullmatch(name) if tensor.op == 0 else None
    return copy[1] if copy else name


def check_layout() -> None:
    """Build tensors through ggml's own functions and read them back; raises EngineError when they disagree."""
    lib = library()
    context = lib.ggml_init(_InitParams(1 << 16, None, False))
    try:
        leaf = lib.ggml_new_tensor_3d(context, F32, 3, 5, 7)
        half = lib.ggml_new_tensor_3d(context, F16, 3, 5, 7)  # F32 is 0, as most of a tensor is
        lib.ggml_set_name(leaf, b"tracediff self-check")
        norm = lib.ggml_rms_norm(context, leaf, 0.5)
        view = lib.ggml_transpose(context, norm)
        t, n, v = at(leaf), at(norm), at(view)
        found = {
            "type": t.type == F32 and at(half).type == F16,
            "ne": list(t.ne) == [3, 5, 7, 1] and list(v.ne) == [5, 3, 7, 1],
            "nb": list(t.nb) == [4, 12, 60, 420] and list(v.nb) == [12, 4, 60, 420],
            "op": n.op != t.op and lib.ggml_op_desc(norm) == b"RMS_NORM",
            "op_params": n.op_params[0] == int(np.float32(0.5).view(np.int32)),
            "src": n.src[0] == leaf and v.src[0] == norm and not n.src[1],
            "view_src": v.view_src == norm and not n.view_src,
            "data": t.data == lib.ggml_get_data(leaf),
            "name": t.name == b"tracediff self-check",
        }
    finally:
        lib.ggml_free(context)
    wrong = [name for name, right in found.items() if not right]
    if wrong:
        raise EngineError(
            f"this llama.cpp lays out ggml_tensor differently (field {', '.join(wrong)}), so reading it would give "
            f"garbage. llama-cpp-python {llama_version()} is installed; tracediff knows 0.3.36."
        )


def llama_version() -> str:
    """The version of llama-cpp-python, and whose libraries it has loaded where they are not its own."""
    from importlib.metadata import version

    other = os.environ.get("LLAMA_CPP_LIB_PATH")
    return version("llama-cpp-python") + (f", with the libraries in {other}" if other else "")


def values(tensor: Tensor) -> np.ndarray:
    """A tensor's values, C order (reversed ne), valid until the callback returns. Raises EngineError by type."""
    dtype = _DTYPES.get(tensor.type)
    if dtype is None:
        raise EngineError(f"node {tensor.name.decode()!r} has ggml type {tensor.type}, which is not recorded.")
    size = library().ggml_nbytes(ctypes.byref(tensor))
    if library().ggml_backend_buffer_is_host(tensor.buffer):
        memory = (ctypes.c_char * size).from_address(tensor.data)
    else:
        memory = ctypes.create_string_buffer(size)
        library().ggml_backend_tensor_get(ctypes.byref(tensor), memory, 0, size)
    return np.ndarray(tuple(tensor.ne)[::-1], dtype, memory, strides=tuple(tensor.nb)[::-1])


@cache
def type_name(number: int) -> str:
    """As in f32, q4_K."""
    return str(library().ggml_type_name(number).decode())


def blocks(types: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each type how many elements share a block, and the block's bytes."""
    lib = library()
    known, at = np.unique(types, return_inverse=True)
    block = np.array([lib.ggml_blck_size(int(number)) for number in known])
    size = np.array([lib.ggml_type_size(int(number)) for number in known])
    return block[at], size[at]
