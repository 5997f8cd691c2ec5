"""Rounding of activations against ggml's own functions, called through ctypes: bit for bit."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from tracediff.numerics.roundings import rounding_named

# name in libggml-cpu, values per block, bytes of a block: its scale, what lies between, its integers
Q8_0 = ("quantize_row_q8_0", 32, 34, np.float16, 2)
Q8_1 = ("quantize_row_q8_1", 32, 36, np.float16, 4)
Q8_K = ("quantize_row_q8_K", 256, 292, np.float32, 4)


@pytest.mark.parametrize(("rounding", "ggml"), [("q8_0", Q8_0), ("q8_1", Q8_1), ("q8_K", Q8_K)])
def test_blocks_round_as_ggml_does(rounding: str, ggml: tuple[str, int, int, type, int]) -> None:
    """Four million values of many sizes: enough for a wrong last bit of the scale's inverse to turn some."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(1 << 22) * np.repeat(rng.uniform(0.01, 30, 1 << 12), 1 << 10)).astype(np.float32)
    x[512:768] = 0
    x[1024:2048] = rng.integers(-254, 255, 1024) / 2  # ties
    values = torch.from_numpy(x.astype(np.float64))
    ours = rounding_named(rounding)(values).numpy()
    theirs = _quantize_row(x, *ggml)
    assert int((ours != theirs).sum()) == 0


def _quantize_row(x: np.ndarray, function: str, size: int, nbytes: int, scale: type, offset: int) -> np.ndarray:
    """The values that ggml's integers stand for."""
    import llama_cpp.llama_cpp as llama

    library = ctypes.CDLL(str(next((Path(llama.__file__).parent / "lib").glob("*ggml-cpu*"))))
    quantize = getattr(library, function)
    quantize.restype, quantize.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    out = np.zeros((x.size // size, nbytes), np.uint8)
    quantize(x.ctypes.data, out.ctypes.data, x.size)
    d = out[:, : np.dtype(scale).itemsize].copy().view(scale).astype(np.float64)
    return (d * out[:, offset : offset + size].view(np.int8)).reshape(-1)


@pytest.mark.parametrize("name", ["q8_0", "q8_1", "q8_K"])
def test_blocks_of_next_to_nothing_are_zero(name: str) -> None:
    """127 / x overflows; the noise of a row of zeros is that small. They were NaN."""
    assert rounding_named(name)(torch.full((1, 256), 1e-38)).abs().max() < 2e-38
