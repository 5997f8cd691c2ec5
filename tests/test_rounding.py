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


# What MLX 0.32.4 keeps of two groups of 32: mx.dequantize(*mx.quantize(x.astype(T), group_size=32, bits=4), ...).
MLX = {
    "affine4/32": """
        -1.312499762 1.837500095 1.3125 1.575000048 2.625 0 2.099999905 0.787500143 0.262500048 0.262500048 0.787500143
        2.099999905 0 2.625 1.575000048 1.3125 1.837500095 -1.312499762 0.262500048 2.625 1.575000048 1.050000072
        1.050000072 1.837500095 -0.787499905 1.3125 0 -0.787499905 -1.049999714 -0.524999857 0.525000095 2.362499952
        0 -4.190476418 -2.285714388 -0.761904716 -4.952381134 -3.047619104 -1.523809433 -5.714285851 -3.809524059
        -2.285714388 -0.380952358 -4.571428776 -2.666666746 -1.142857075 -5.333333492 -3.428571463 -1.90476203 0
        -4.190476418 -2.666666746 -0.761904716 -4.952381134 -3.428571463 -1.523809433 -5.714285851 -3.809524059
        -2.285714388 -0.380952358 -4.571428776 -3.047619104 -1.142857075 -5.333333492""",
    "bf16 affine4/32": """
        -1.296875 1.84375 1.3125 1.578125 2.625 0 2.09375 0.796875 0.265625 0.265625 0.796875 2.09375 0 2.625 1.578125
        1.3125 1.84375 -1.296875 0.265625 2.625 1.578125 1.0546875 1.0546875 1.84375 -0.78125 1.3125 0 -0.78125 -1.03125
        -0.515625 0.53125 2.359375
        0 -4.1875 -2.296875 -0.78125 -4.96875 -3.046875 -1.53125 -5.71875 -3.8125 -2.296875 -0.375 -4.5625 -2.671875
        -1.15625 -5.34375 -3.4375 -1.90625 0 -4.1875 -2.671875 -0.78125 -4.96875 -3.4375 -1.53125 -5.71875 -3.8125
        -2.296875 -0.375 -4.5625 -3.046875 -1.15625 -5.34375""",
}


@pytest.mark.parametrize("name", MLX)
def test_groups_with_an_offset_round_as_mlx_does(name: str) -> None:
    """The edge that is farther from 0 is the offset, in one group the largest and in one the least."""
    x = [((37 * i * i + 11 * i) % 64 - 20) / 16 for i in range(32)] + [-abs((29 * i) % 41) / 7 for i in range(32)]
    kept = rounding_named(name)(torch.tensor(np.array([x], np.float32).astype(np.float64)))
    assert [float(f"{value:.9f}") for value in kept.flatten().tolist()] == [*map(float, MLX[name].split())]
    assert torch.equal(rounding_named(name)(torch.zeros(1, 64)), torch.zeros(1, 64))
