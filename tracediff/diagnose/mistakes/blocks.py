"""Mistaken dequantisations, block by block, in numpy. Layouts: ggml/src/ggml-common.h and ggml-quants.c."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import MATMUL, Area, Change, Context, Variants, Where
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op
from tracediff.model.weights import raw_rows, reading, values_of

Blocks = np.ndarray  # uint8 [blocks, bytes per block]


@dataclass(frozen=True, slots=True)
class BlockMistake:
    """A wrong way to read blocks of one type: -> float32 [blocks, values per block]."""

    name: str
    text: str
    type: str
    dequantise: Callable[[Blocks], np.ndarray]
    link: str


def _half(blocks: Blocks, at: int) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)  # [blocks, 1]


def _q4_k_integers(blocks: Blocks) -> np.ndarray:
    """[blocks, 8, 32]: of each 32 bytes the low nibbles come first, then the high ones."""
    nibbles = blocks[:, 16:144].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (nibbles & 15).reshape(-1, 8, 32).astype(np.float32)


def _q4_k(blocks: Blocks, scales: np.ndarray, minima: np.ndarray, integers: np.ndarray, sign: float) -> np.ndarray:
    d, d_min = _half(blocks, 0), _half(blocks, 2)
    return ((d * scales)[:, :, None] * integers + sign * (d_min * minima)[:, :, None]).reshape(len(blocks), 256)


def _q4_k_scales(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    scales, minima = quants.Q4_K.get_scale_min(blocks[:, 4:16])
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k_adds_minimum(blocks: Blocks) -> np.ndarray:
    return _q4_k(blocks, *_q4_k_scales(blocks), _q4_k_integers(blocks), +1.0)


def _q4_k_no_scales(blocks: Blocks) -> np.ndarray:
    ones = np.ones((len(blocks), 8), np.float32)
    return _q4_k(blocks, ones, ones, _q4_k_integers(blocks), -1.0)


def _q4_k_naive_scales(blocks: Blocks) -> np.ndarray:
    """Sub-blocks 4 to 7 from the low six bits of their bytes, as if packed like the first four."""
    scales, minima = _q4_k_scales(blocks)
    packed = blocks[:, 4:16]
    scales[:, 4:], minima[:, 4:] = packed[:, 8:12] & 15, packed[:, 8:12] >> 4
    return _q4_k(blocks, scales, minima, _q4_k_integers(blocks), -1.0)


def _q4_k_sequential(blocks: Blocks) -> np.ndarray:
    packed = blocks[:, 16:144]
    integers = np.stack((packed & 15, packed >> 4), -1).reshape(-1, 8, 32).astype(np.float32)
    return _q4_k(blocks, *_q4_k_scales(blocks), integers, -1.0)


def _q4_0_sequential(blocks: Blocks) -> np.ndarray:
    packed = blocks[:, 2:18]
    integers = np.stack((packed & 15, packed >> 4), -1).reshape(-1, 32).astype(np.float32)
    return _half(blocks, 0) * (integers - 8)


def _q5_0_high_bits(blocks: Blocks) -> np.ndarray:
    """The fifth bit of value i from bit 2i of the mask, where it is bit i."""
    mask = blocks[:, 2:6].copy().view(np.uint32).astype(np.uint64)
    bits = (mask >> (2 * np.arange(32, dtype=np.uint64) % 64)) & 1
    packed = blocks[:, 6:22]
    low = np.concatenate((packed & 15, packed >> 4), 1)
    return _half(blocks, 0) * ((low | (bits << 4).astype(np.uint8)).astype(np.float32) - 16)


def _q6_k_sequential(blocks: Blocks) -> np.ndarray:
    """Integers in the order of the bytes; ggml interleaves l, l+32, l+64 and l+96 of each half."""
    low, high = blocks[:, :128], blocks[:, 128:192]
    low_nibbles = np.stack((low & 15, low >> 4), -1).reshape(-1, 256)
    high_bits = np.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1).reshape(-1, 256)
    integers = (low_nibbles | (high_bits << 4)).astype(np.float32) - 32
    scales = blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    return (_half(blocks, 208) * scales).repeat(16, 1) * integers


def _bf16_as_f16(blocks: Blocks) -> np.ndarray:
    return np.nan_to_num(blocks.copy().view(np.float16).astype(np.float32), posinf=65504, neginf=-65504)


BLOCK_MISTAKES = (
    BlockMistake(
        "bf16_as_f16", "the BF16 weights are decoded as F16", "BF16", _bf16_as_f16, "aprender#1601"
    ),
    BlockMistake(
        "q4_k_scales", "Q4_K's 6-bit scales of sub-blocks 4 to 7 are unpacked like those of the first four",
        "Q4_K", _q4_k_naive_scales, "aprender#2141",
    ),
    BlockMistake(
        "q4_k_min_added", "Q4_K's minimum is added where it must be subtracted",
        "Q4_K", _q4_k_adds_minimum, "llama-orch fba3827f",
    ),
    BlockMistake(
        "q4_k_scales_dropped", "Q4_K's sub-block scales are dropped", "Q4_K", _q4_k_no_scales, "defenseclaw#679"
    ),
    BlockMistake(
        "q4_k_nibbles", "Q4_K's nibbles are taken in sequence; low and high ones belong 32 values apart",
        "Q4_K", _q4_k_sequential, "imp#567",
    ),
    BlockMistake(
        "q4_0_nibbles", "Q4_0's nibbles are taken in sequence; low and high ones belong 16 values apart",
        "Q4_0", _q4_0_sequential, "imp#567",
    ),
    BlockMistake(
        "q5_0_high_bit", "Q5_0's fifth bit is taken from bit 2i of the mask; it is bit i",
        "Q5_0", _q5_0_high_bits, "aprender#1621",
    ),
    BlockMistake(
        "q6_k_order", "Q6_K's values are taken in the order of their bytes; they interleave l, l+32, l+64, l+96",
        "Q6_K", _q6_k_sequential, "rustorch 5b0d5bb8",
    ),
)  # fmt: skip


def _reading_with(mistake: BlockMistake) -> Callable[[GGUFFile, TensorInfo], Tensor]:
    """Blocks of the mistake's type that way, others as they are.

    A file mixes types (Q4_K_M has Q6_K in some layers), and another mistake may have chosen the tensor.
    """

    def read(file: GGUFFile, info: TensorInfo) -> Tensor:
        if info.type.name != mistake.type:
            return values_of(file, info)
        raw = raw_rows(file, info).reshape(-1, GGML_QUANT_SIZES[info.type][1])
        with np.errstate(invalid="ignore", over="ignore"):  # misread bits may be no number
            return torch.from_numpy(mistake.dequantise(raw).reshape(info.shape).astype(np.float32))

    return read


def _changing(mistake: BlockMistake) -> Change:
    def change(op: Op, context: Context) -> Variants:
        if context.file.tensors[op.weights[0].name].type.name == mistake.type:
            yield reading(op, _reading_with(mistake)), f"{mistake.text} ({op.weights[0].name})"

    return change


AREA = Area()
for _block in BLOCK_MISTAKES:
    _look = f"the dequantisation of {_block.type} blocks"
    AREA.mistake(_block.name, _block.text, _look, Where((*MATMUL.kinds, "embedding")), _block.link)(_changing(_block))
