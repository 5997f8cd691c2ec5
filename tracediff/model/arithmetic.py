"""Rounding as engines do it: what a number loses when it is stored or made an operand of a matmul.

Block roundings work on the last axis and return the values that the integers stand for, in the dtype of
the input. They reproduce ggml bit for bit from float32 (ggml/src/ggml-quants.c; the CPU's own are the same).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


def half(x: Tensor) -> Tensor:
    """To float16 and back."""
    return x.half().to(x.dtype)


def bfloat(x: Tensor) -> Tensor:
    """To bfloat16 and back."""
    return x.bfloat16().to(x.dtype)


def single(x: Tensor) -> Tensor:
    """To float32 and back."""
    return x.float().to(x.dtype)


def tf32(x: Tensor) -> Tensor:
    """To the 10-bit mantissa of NVIDIA's TF32 and back, to nearest, ties away from zero (cvt.rna.tf32.f32)."""
    bits = x.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)


def _round_half_away(x: Tensor) -> Tensor:
    """C's roundf; torch.round goes to even."""
    return torch.trunc(x + torch.copysign(torch.tensor(0.5, dtype=x.dtype), x))


def q8_0(x: Tensor) -> Tensor:
    """Blocks of 32, scale amax / 127 kept in float16 (quantize_row_q8_0_ref). q8_1 has the same values."""
    blocks = x.float().unflatten(-1, (-1, 32))
    d = blocks.abs().amax(-1, keepdim=True) / 127.0
    inverse = torch.where(d > 0, 1.0 / d, 0.0)
    return (_round_half_away(blocks * inverse).to(x.dtype) * d.half().to(x.dtype)).flatten(-2)


def q8_k(x: Tensor) -> Tensor:
    """Blocks of 256, scale -max / 127 for the element of largest magnitude, in float32 (quantize_row_q8_K_ref)."""
    blocks = x.float().unflatten(-1, (-1, 256))
    at = blocks.abs().argmax(-1, keepdim=True)
    largest = blocks.gather(-1, at)
    inverse = torch.where(largest != 0, -127.0 / largest, 0.0)
    d = torch.where(inverse != 0, 1.0 / inverse, 0.0)
    integers = torch.round(blocks * inverse).clamp(max=127)  # nearest_int: ties to even
    return (integers.to(x.dtype) * d.to(x.dtype)).flatten(-2)


ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"f64": lambda x: x, "f32": single, "tf32": tf32, "f16": half, "bf16": bfloat, "q8_0": q8_0, "q8_K": q8_k}
)
BLOCK = {"q8_0": 32, "q8_K": 256}  # rows must be multiples of it


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How an engine computes one op, beyond the op's mathematics.

    `operands`: what a matmul rounds its activations to (of attention: Q, K, V and the probabilities).
    `weights`: what it holds dequantised weights in.
    """

    operands: str = "f64"
    weights: str = "f64"


EXACT = Arithmetic()

# The dot-product type of each weight type on ggml's CPU backend (ggml-cpu/ggml-cpu.c, type_traits_cpu).
_Q8_0 = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q1_0 IQ4_NL MXFP4".split()
_Q8_K = "Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_XS TQ1_0 TQ2_0".split()
LLAMA_CPP_OPERANDS: Mapping[str, str] = MappingProxyType(
    {"F32": "f32", "F16": "f16", "BF16": "bf16", **dict.fromkeys(_Q8_0, "q8_0"), **dict.fromkeys(_Q8_K, "q8_K")}
)
