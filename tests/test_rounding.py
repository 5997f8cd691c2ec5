"""Rounding of activations against ggml's own functions, called through ctypes: bit for bit."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from tracediff.numerics.groups import Centred
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


GROUPS = np.array(
    [[((37 * i * i + 11 * i) % 64 - 20) / 16 for i in range(32)] + [-((29 * i) % 41) / 7 for i in range(32)]],
    np.float32,
)
# What MLX 0.32.4 keeps of these two groups of 32: mx.dequantize(*mx.quantize(x.astype(T), group_size=32, bits=4), ...).
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
    kept = rounding_named(name)(torch.from_numpy(GROUPS.astype(np.float64)))
    assert [float(f"{value:.9f}") for value in kept.flatten().tolist()] == [*map(float, MLX[name].split())]
    assert torch.equal(rounding_named(name)(torch.zeros(1, 64)), torch.zeros(1, 64))


# What others keep of the same in float16: ONNX Runtime 1.32.0 (MatMulNBitsQuantizer, of an identity times it),
# bitsandbytes 0.50.2 (quantize_4bit of bfloat16, dequantised), torchao 0.18.0 (Int8WeightOnlyConfig of bfloat16),
# optimum-quanto 0.2.7 (qint8, qfloat8 and qint4 of bfloat16); torchao's IntxWeightOnlyConfig (symmetric, asymmetric, of
# bfloat16) and Float8WeightOnlyConfig (of bfloat16); compressed-tensors 0.20.0 (calculate_qparams and fake_quantize).
OTHERS = {
    "full int4/32": """
        -1.3125 1.640625 1.3125 1.640625 2.625 0 1.96875 0.984375 0.328125 0.328125 0.984375 1.96875 0 2.625
        1.640625 1.3125 1.640625 -1.3125 0.328125 2.625 1.640625 0.984375 0.984375 1.96875 -0.65625 1.3125 0
        -0.984375 -0.984375 -0.65625 0.65625 2.296875 0 -4.2861328 -2.1430664 -0.71435547 -5.0004883 -2.8574219
        -1.4287109 -5.7148438 -3.5717773 -2.1430664 -0.71435547 -4.2861328 -2.8574219 -1.4287109 -5.0004883
        -3.5717773 -2.1430664 0 -4.2861328 -2.8574219 -0.71435547 -5.0004883 -3.5717773 -1.4287109 -5.7148438
        -4.2861328 -2.1430664 -0.71435547 -5.0004883 -2.8574219 -1.4287109 -5.7148438""",
    "uint4/32": """
        -1.2916666 1.8083333 1.2916666 1.55 2.5833333 0 2.0666666 0.77499998 0.25833333 0.25833333 0.77499998
        2.0666666 0 2.5833333 1.55 1.2916666 1.8083333 -1.2916666 0.25833333 2.5833333 1.55 1.0333333 1.0333333
        1.8083333 -0.77499998 1.2916666 0 -0.77499998 -1.0333333 -0.51666665 0.51666665 2.3249998 0 -4.1908855
        -2.2859375 -0.76197916 -4.9528646 -3.0479167 -1.5239583 -5.7148438 -3.8098958 -2.2859375 -0.38098958
        -4.5718751 -2.6669271 -1.1429688 -5.3338542 -3.4289062 -1.9049479 0 -4.1908855 -2.6669271 -0.76197916
        -4.9528646 -3.4289062 -1.5239583 -5.7148438 -3.8098958 -2.2859375 -0.38098958 -4.5718751 -3.0479167
        -1.1429688 -5.3338542""",
    "bf16 nf4/64": """
        -1.0546875 1.9296875 1.40625 1.40625 2.515625 0 1.9296875 0.921875 0.45507812 0.45507812 0.921875
        1.9296875 0 2.515625 1.40625 1.40625 1.9296875 -1.0546875 0.45507812 2.515625 1.40625 0.921875 0.921875
        1.9296875 -0.51953125 1.40625 0 -1.0546875 -1.0546875 -0.51953125 0.45507812 2.515625 0 -3.984375
        -2.265625 -0.51953125 -3.984375 -3 -1.625 -5.71875 -3.984375 -2.265625 -0.51953125 -3.984375 -3
        -1.0546875 -5.71875 -3.984375 -1.625 0 -3.984375 -2.265625 -1.0546875 -5.71875 -3 -1.625 -5.71875
        -3.984375 -2.265625 -0.51953125 -3.984375 -3 -1.0546875 -5.71875""",
    "bf16 wide int8/row": """
        -1.2578125 1.7519531 1.3925781 1.6171875 2.515625 0 2.1113281 0.85351562 0.26953125 0.26953125
        0.85351562 2.1113281 0 2.515625 1.6171875 1.3925781 1.7519531 -1.2578125 0.359375 2.6054688 1.4824219
        0.98828125 1.1230469 1.8867188 -0.76367188 1.2578125 -0.13476562 -0.85351562 -0.98828125 -0.49414062
        0.62890625 2.3808594 0 -4.1777344 -2.4257812 -0.71875 -4.8515625 -3.1445312 -1.4375 -5.5703125
        -3.8632812 -2.15625 -0.44921875 -4.5820312 -2.875 -1.1230469 -5.3007812 -3.59375 -1.8417969 -0.13476562
        -4.2675781 -2.5605469 -0.85351562 -4.9863281 -3.2792969 -1.5722656 -5.7050781 -3.9980469 -2.2910156
        -0.58398438 -4.7167969 -3.0097656 -1.3027344 -5.4355469""",
    "bf16 held int8/row": """
        -1.2578125 1.7519531 1.3925781 1.6171875 2.515625 0 2.1113281 0.8984375 0.26953125 0.26953125
        0.8984375 2.1113281 0 2.515625 1.6171875 1.3925781 1.7519531 -1.2578125 0.359375 2.6054688 1.5273438
        0.98828125 1.1230469 1.8867188 -0.76367188 1.2578125 -0.13476562 -0.8984375 -0.98828125 -0.49414062
        0.62890625 2.3808594 0 -4.1328125 -2.4257812 -0.71875 -4.8515625 -3.1445312 -1.4375 -5.5703125
        -3.8632812 -2.15625 -0.44921875 -4.5820312 -2.875 -1.1230469 -5.3007812 -3.59375 -1.8867188
        -0.13476562 -4.3125 -2.6054688 -0.85351562 -5.03125 -3.2792969 -1.5722656 -5.75 -3.9980469 -2.2910156
        -0.58398438 -4.7167969 -3.0097656 -1.3027344 -5.4355469""",
    "bf16 held fp8/row then bf16": """
        -1.2265625 1.8359375 1.4296875 1.6328125 2.453125 0 2.046875 0.91796875 0.25585938 0.25585938
        0.91796875 2.046875 0 2.453125 1.6328125 1.4296875 1.8359375 -1.2265625 0.3828125 2.65625 1.53125
        1.0234375 1.125 1.8359375 -0.765625 1.2265625 -0.12792969 -0.91796875 -1.0234375 -0.51171875
        0.61328125 2.453125 0 -4.09375 -2.453125 -0.71484375 -4.90625 -3.0625 -1.4296875 -5.71875 -3.671875
        -2.046875 -0.40820312 -4.5 -2.859375 -1.125 -5.3125 -3.671875 -1.8359375 -0.140625 -4.09375 -2.65625
        -0.81640625 -4.90625 -3.265625 -1.53125 -5.71875 -4.09375 -2.25 -0.5625 -4.90625 -3.0625 -1.328125
        -5.3125""",
    "bf16 shifted4/64": """
        -1.25 1.53125 1.53125 1.53125 2.65625 -0.125 2.09375 0.96875 0.4375 0.4375 0.96875 2.09375 -0.125
        2.65625 1.53125 1.53125 1.53125 -1.25 0.4375 2.65625 1.53125 0.96875 0.96875 2.09375 -0.6875 0.96875
        -0.125 -0.6875 -1.25 -0.6875 0.4375 2.65625 -0.125 -4.0625 -2.375 -0.6875 -4.59375 -2.921875 -1.25
        -5.71875 -4.0625 -2.375 -0.6875 -4.59375 -2.921875 -1.25 -5.15625 -3.484375 -1.8125 -0.125 -4.0625
        -2.375 -0.6875 -5.15625 -3.484375 -1.8125 -5.71875 -4.0625 -2.375 -0.6875 -4.59375 -2.921875 -1.25
        -5.15625""",
    "wide int4/32": """
        -1.4 1.75 1.4 1.75 2.45 0 2.0999999 0.69999999 0.34999999 0.34999999 0.69999999 2.0999999 0 2.45 1.75
        1.4 1.75 -1.4 0.34999999 2.45 1.4 1.05 1.05 1.75 -0.69999999 1.4 0 -0.69999999 -1.05 -0.34999999
        0.69999999 2.45 0 -3.8098958 -2.2859375 -0.76197916 -4.5718751 -3.0479167 -1.5239583 -5.3338542
        -3.8098958 -2.2859375 -0.76197916 -4.5718751 -3.0479167 -0.76197916 -5.3338542 -3.8098958 -1.5239583 0
        -4.5718751 -2.2859375 -0.76197916 -5.3338542 -3.0479167 -1.5239583 -6.0958333 -3.8098958 -2.2859375
        -0.76197916 -4.5718751 -3.0479167 -1.5239583 -5.3338542""",
    "even uint4/32": """
        -1.2916666 1.8083333 1.2916666 1.55 2.5833333 0 2.0666666 0.77499998 0.25833333 0.25833333 0.77499998
        2.0666666 0 2.5833333 1.55 1.2916666 1.8083333 -1.2916666 0.25833333 2.5833333 1.55 1.0333333 1.0333333
        1.8083333 -0.77499998 1.2916666 0 -0.77499998 -1.0333333 -0.51666665 0.51666665 2.3249998 0 -4.1908855
        -2.2859375 -0.76197916 -4.9528646 -3.0479167 -1.5239583 -5.7148438 -3.8098958 -2.2859375 -0.38098958
        -4.5718751 -3.0479167 -1.1429688 -5.3338542 -3.4289062 -1.9049479 0 -4.1908855 -2.6669271 -0.76197916
        -4.9528646 -3.4289062 -1.5239583 -5.7148438 -3.8098958 -2.2859375 -0.38098958 -4.5718751 -3.0479167
        -1.1429688 -5.3338542""",
    "bf16 held wide int4/32 then bf16": """
        -1.3984375 1.75 1.3984375 1.75 2.453125 0 2.09375 0.69921875 0.34960938 0.34960938 0.69921875 2.09375 0
        2.453125 1.75 1.3984375 1.75 -1.3984375 0.34960938 2.453125 1.3984375 1.046875 1.046875 1.75 -0.69921875
        1.3984375 0 -0.69921875 -1.046875 -0.34960938 0.69921875 2.453125 0 -3.8125 -2.28125 -0.76171875 -4.5625
        -3.046875 -1.5234375 -5.34375 -3.8125 -2.28125 -0.76171875 -4.5625 -3.046875 -1.5234375 -5.34375 -3.8125
        -1.5234375 0 -4.5625 -2.28125 -0.76171875 -5.34375 -3.046875 -1.5234375 -6.09375 -3.8125 -2.28125
        -0.76171875 -4.5625 -3.046875 -1.5234375 -5.34375""",
    "bf16 typed fp8/row then bf16": """
        -1.2265625 1.8359375 1.328125 1.6328125 2.453125 0 2.046875 0.91796875 0.25585938 0.25585938 0.91796875
        2.046875 0 2.453125 1.6328125 1.328125 1.8359375 -1.2265625 0.3828125 2.65625 1.53125 1.0234375 1.125
        1.8359375 -0.765625 1.2265625 -0.12792969 -0.91796875 -1.0234375 -0.51171875 0.61328125 2.453125 0
        -4.09375 -2.453125 -0.71484375 -4.90625 -3.0625 -1.4296875 -5.71875 -3.671875 -2.046875 -0.40820312 -4.5
        -2.859375 -1.125 -5.3125 -3.671875 -1.8359375 -0.140625 -4.09375 -2.65625 -0.81640625 -4.90625 -3.265625
        -1.53125 -5.71875 -4.09375 -2.25 -0.5625 -4.90625 -3.0625 -1.328125 -5.3125""",
    "divided int4/32": """
        -1.4 1.75 1.4 1.75 2.45 0 2.0999999 0.69999999 0.34999999 0.34999999 0.69999999 2.0999999 0 2.45 1.75
        1.4 1.75 -1.4 0.34999999 2.45 1.4 1.05 1.05 1.75 -0.69999999 1.4 -0 -0.69999999 -1.05 -0.34999999
        0.69999999 2.45 0 -3.8098958 -2.2859375 -0.76197916 -4.5718751 -3.0479167 -1.5239583 -5.3338542
        -3.8098958 -2.2859375 -0.76197916 -4.5718751 -3.0479167 -0.76197916 -5.3338542 -3.8098958 -1.5239583 -0
        -4.5718751 -2.2859375 -0.76197916 -5.3338542 -3.0479167 -1.5239583 -6.0958333 -3.8098958 -2.2859375
        -0.76197916 -4.5718751 -3.0479167 -1.5239583 -5.3338542""",
    "bf16 held divided int8/row then bf16": """
        -1.2578125 1.75 1.390625 1.6171875 2.515625 0 2.109375 0.8984375 0.26953125 0.26953125 0.8984375
        2.109375 0 2.515625 1.6171875 1.390625 1.75 -1.2578125 0.359375 2.609375 1.53125 0.98828125 1.125
        1.890625 -0.765625 1.2578125 -0.13476562 -0.8984375 -0.98828125 -0.49414062 0.62890625 2.375 0 -4.125
        -2.421875 -0.71875 -4.84375 -3.140625 -1.4375 -5.5625 -3.859375 -2.15625 -0.44921875 -4.59375 -2.875
        -1.125 -5.3125 -3.59375 -1.890625 -0.13476562 -4.3125 -2.609375 -0.8515625 -5.03125 -3.28125 -1.5703125
        -5.75 -4 -2.296875 -0.5859375 -4.71875 -3.015625 -1.3046875 -5.4375""",
    "mxfp4/32": """
        -1 2 1.5 1.5 2 0 2 1 0.25 0.25 1 2 0 2 1.5 1.5 2 -1 0.5 3 1.5 1 1 2 -0.75 1 -0 -1 -1 -0.5 0.5 2 0 -4 -2
        -0.5 -4 -3 -1.5 -6 -4 -2 -0.5 -4 -3 -1 -6 -4 -2 -0 -4 -3 -1 -4 -3 -1.5 -6 -4 -2 -0.5 -4 -3 -1.5 -6""",
    "mxfp8/32": """
        -1.25 1.75 1.375 1.625 2.5 0 2 0.875 0.25 0.25 0.875 2 0 2.5 1.625 1.375 1.75 -1.25 0.375 2.5 1.5 1
        1.125 1.875 -0.75 1.25 -0.125 -0.875 -1 -0.5 0.625 2.5 0 -4 -2.5 -0.6875 -5 -3.25 -1.375 -5.5 -3.75
        -2.25 -0.4375 -4.5 -2.75 -1.125 -5.5 -3.5 -1.875 -0.140625 -4.5 -2.5 -0.875 -5 -3.25 -1.625 -5.5 -4
        -2.25 -0.5625 -4.5 -3 -1.25 -5.5""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_are_quantised_as_others_do(name: str) -> None:
    """A value halfway between two integers, and a block whose ends are as far from 0, are among them."""
    kept = rounding_named(name)(torch.from_numpy(GROUPS.astype(np.float16).astype(np.float64)))
    np.testing.assert_allclose(kept.numpy().flatten(), [*map(float, OTHERS[name].split())], rtol=1e-6)


def test_blocks_may_be_divided_by_the_scale_that_is_stored() -> None:
    """In float16, before x is divided by it: some quotients round to another integer."""
    x = np.random.default_rng(3).standard_normal((400, 32)).astype(np.float32)
    scales = (np.abs(x).max(1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    expected = (np.clip(np.round(x / scales), -128, 127) * scales).astype(np.float64).reshape(100, 128)
    got = rounding_named("stored q8_0")(torch.from_numpy(x.reshape(100, 128)).double()).numpy()
    np.testing.assert_array_equal(got, expected)
    assert (got != rounding_named("q8_0")(torch.from_numpy(x.reshape(100, 128)).double()).numpy()).any()


def test_ties_away_from_0_are_those_of_cs_round() -> None:
    """Written out with integers: every eighth value lies halfway, up to the largest float below one half."""
    x = np.arange(-127 * 8, 127 * 8 + 1, dtype=np.float64)[np.newaxis] / 8
    x = np.concatenate([x, [[0.49999997, -0.49999997, *[0.0] * 5]]], -1)
    expected = [int(np.sign(v)) * ((abs(int(v * 8)) + 4) // 8) for v in x[0].tolist()]
    assert rounding_named("away int8/row")(torch.from_numpy(x))[0].tolist() == expected


def test_levels_about_a_middle_are_those_that_pytorch_multiplies() -> None:
    """Its kernel for four bits, given an identity: of weights in bfloat16, with a scale and a middle for each 128."""
    weight = torch.from_numpy(np.random.default_rng(5).standard_normal((64, 256))).bfloat16()
    rounding = rounding_named("bf16 centred4/128")
    assert isinstance(rounding, Centred)
    quotients, scale, least = rounding.grid(weight.double())
    packed = torch._convert_weight_to_int4pack_for_cpu(quotients.round().int().flatten(-2), 2)
    kept = torch.cat([scale.bfloat16(), least.bfloat16() + 8 * scale.bfloat16()], -1).transpose(0, 1).contiguous()
    theirs = torch._weight_int4pack_mm_for_cpu(torch.eye(256, dtype=torch.bfloat16), packed, 128, kept)
    assert torch.equal(rounding(weight.double()).bfloat16().T, theirs)


def test_a_quotient_that_all_but_lies_between_two_levels_may_be_either() -> None:
    halfway = torch.tensor(
        [[1.0, (0.7229568362236023 + 0.5626170039176941) / 2, 0.3, *[0.0] * 61]], dtype=torch.float64
    )
    flips = rounding_named("nf4/64").flips(halfway)
    assert flips[0, :3].tolist() == pytest.approx([0.0, 0.7229568362236023 - 0.5626170039176941, 0.0])


def test_truncated_blocks_are_what_a_cast_makes_of_ggmls_reference() -> None:
    """quantize_row_q8_0_ref with a cast in the place of roundf, written out in float32: the largest of a block, too,
    which by the inverse of the scale may be a little less than 127.
    """
    x = np.random.default_rng(3).standard_normal((400, 32)).astype(np.float32)
    scales = np.abs(x).max(1, keepdims=True) / np.float32(127)
    integers = np.trunc(x * (np.float32(1) / scales))
    expected = integers * scales.astype(np.float16).astype(np.float32)
    got = rounding_named("truncated q8_0")(torch.from_numpy(x.reshape(100, 128)).double())
    np.testing.assert_array_equal(got.numpy(), expected.astype(np.float64).reshape(100, 128))
    assert 0 < (np.abs(integers).max(1) == 126).mean() < 1


@pytest.mark.parametrize(("name", "least"), [("held int8/row", -128), ("narrow held int8/row", -127)])
def test_integers_in_the_type_of_the_values_end_where_their_author_clamps_them(name: str, least: int) -> None:
    """As PyTorch computes them in bfloat16: a scale that was rounded down makes of the least value -128."""
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = x.abs().amax(-1, keepdim=True) / 127
    quotients = (x / scale).round()
    expected = (quotients.clamp(least, 127) * scale).float()
    assert bool((quotients < -127).any())
    assert torch.equal(rounding_named(f"bf16 {name} then bf16")(x.float()), expected)
