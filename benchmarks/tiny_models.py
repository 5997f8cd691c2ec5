"""A tiny model of any architecture that llama.cpp knows, from its metadata alone.

    python benchmarks/tiny_models.py gemma3 OUT.gguf

llama.cpp builds the model from the metadata (`llama_model_init_from_user`) and asks for each tensor by name and shape;
the values are random and as loud as real ones. Sizes all differ from one another, or an axis would pass for another.
What metadata an architecture wants is what its loader reads (src/models/*.cpp; tests/test-llama-archs.cpp lists it).
"""

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from tiny_metadata import N_EXPERT, WIDE, Metadata, metadata

from tracediff.model.synthetic import add_tokenizer

# Tensors that llama.cpp would read if a file had them, and none has: the scales of NVFP4, what older files had.
_NEVER = {"": r"\.(scale|input_scale)$", "qwen3next": r"ssm_in\.weight$"}


def write(
    arch: str,
    out: Path,
    seed: int = 0,
    wide: bool = False,
    others: Metadata = MappingProxyType({}),
    without: str = "",
) -> Path:
    """Write a model of the architecture in float32, `wide` as K-quants need, with `others` of its metadata, and
    `without` the tensors of this expression.

    Raises RuntimeError with what llama.cpp says where it refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "header.gguf"
        _finish(_begin(arch, header, wide, others))
        shapes = tensors(header)
    unwanted = re.compile("|".join(filter(None, (_NEVER[""], _NEVER.get(arch), without))))
    writer = _begin(arch, out, wide, others)
    for name, shape in shapes.items():
        if not unwanted.search(name):
            writer.add_tensor(name, values(name, shape, seed))
    _finish(writer)
    return out


def tensors(header: Path) -> dict[str, tuple[int, ...]]:
    """The tensors that llama.cpp would read for this metadata, outermost axis first. In a child: it may abort."""
    child = subprocess.run(
        [sys.executable, __file__, "--tensors", header], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )  # fmt: skip
    if child.returncode:
        raise RuntimeError(child.stderr.strip()[-2000:] or f"exit code {child.returncode}")
    found = (line.split() for line in child.stdout.splitlines())
    return {name: tuple(map(int, shape)) for name, *shape in found}


def values(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random values for a tensor, by what its name says that it is."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    normal = rng.standard_normal(shape, np.float32)
    spread = rng.uniform(0.4, 1.6, shape).astype(np.float32)
    layer = int(found[1]) if (found := re.match(r"blk\.(\d+)\.", name)) else 0
    if re.search(r"rope_freqs|rope_factors", name):
        return np.geomspace(1.0, 2.0 if "short" in name else 8.0, shape[-1]).astype(np.float32)
    if "tid2eid" in name:  # the experts of each token
        return np.argsort(rng.random((shape[0], N_EXPERT)), 1)[:, : shape[1]].astype(np.int32)
    if re.search(r"ssm_a(\.|$)", name):  # the decay of a state is negative
        return -spread
    if name.endswith(".bias") and "norm" not in name:
        return normal * np.float32(0.3)
    if "norm" in name and len(shape) == 1:
        return (
            normal * np.float32(0.1)
            if name.endswith(".bias")
            else spread * np.float32(3.0 if "output" in name else 1.0)
        )
    if len(shape) == 1:
        return normal * np.float32(0.5)
    rows = rng.uniform(0.6, 1.5, (*shape[:-1], 1)).astype(np.float32)
    columns = rng.uniform(0.6, 1.5, shape[-1]).astype(np.float32)
    gain = 0.2 * shape[-1] ** 0.5 if "embd" in name else 1.3 ** min(layer, 4)
    matrix = normal * rows * columns * np.float32(gain / np.sqrt(shape[-1]))
    if name == "token_embd.weight":
        matrix[:, 1] *= 0.01
        matrix[256, 1] = 25.0  # a massive activation of the first token, in a channel that is quiet otherwise
    return matrix


def _begin(arch: str, path: Path, wide: bool, others: Metadata) -> GGUFWriter:
    writer = GGUFWriter(path, arch)
    keys = metadata(arch, wide, others)
    add_tokenizer(writer, keys[f"{arch}.vocab_size"])
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _ if key.endswith(WIDE):
                writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64)
            case _:
                writer.add_array(key, value)
    return writer


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _list_tensors(header: Path) -> None:
    """In the child: each tensor's name and shape on a line."""
    import llama_cpp.llama_cpp as llama

    from tracediff_reference import ggml

    class Init(ctypes.Structure):
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    lib = ggml.library()
    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, Init]
    context = lib.gguf_init_from_file(str(header).encode(), Init(True, None))

    @llama.llama_model_set_tensor_data_t  # type: ignore[untyped-decorator]
    def show(address: int, _: Any) -> None:
        tensor = ggml.at(address)
        shape = [*tensor.ne][::-1]
        while len(shape) > 1 and shape[0] == 1:
            shape.pop(0)
        print(tensor.name.decode(), *shape)

    params = llama.llama_model_default_params()
    params.use_extra_bufts = False
    params.n_gpu_layers = 0
    if not llama.llama_model_init_from_user(context, show, None, params):
        sys.exit(1)


def main() -> None:
    """Write one model, or list the tensors of a header."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", action="store_true", help="list the tensors of the header ARCH")
    parser.add_argument("arch")
    parser.add_argument("out", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.tensors:
        _list_tensors(Path(arguments.arch))
    else:
        write(arguments.arch, arguments.out)


if __name__ == "__main__":
    main()
