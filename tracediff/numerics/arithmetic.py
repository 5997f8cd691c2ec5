"""Rounding as engines do it: what a number loses when it is stored or made an operand of a matmul.

Block roundings work on the last axis and return the values that the integers stand for, in the dtype of
the input. They reproduce ggml bit for bit from float32 (ggml/src/ggml-quants.c; the CPU's own are the same).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tracediff.errors import EngineError


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


def q8_0_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quotients [..., blocks, 32] and float32 scales [..., blocks, 1] of q8_0 and q8_1, before rounding.

    Scale amax / 127, quotient x * (127 / amax), ties to even: ggml-cpu/arch/x86/quants.c, bit for bit. (The
    reference in ggml-quants.c multiplies by 1 / scale and uses roundf.)
    """
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    return blocks * _over(127.0, largest), largest / 127.0


def q8_k_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Exact quotients [..., blocks, 256] and scales [..., blocks, 1] of q8_K, before rounding to integers."""
    blocks = x.float().unflatten(-1, (-1, 256))
    inverse = _over(-127.0, blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)))
    return blocks * inverse, _over(1.0, inverse)


def _over(number: float, x: Tensor) -> Tensor:
    """The quotient number / x, 0 where x is: torch takes number / x as number * (1 / x), one unit off in 25%.

    The largest number where it overflows: blocks below 1e-36 round to 0, and not to NaN.
    """
    largest = torch.finfo(x.dtype).max
    return torch.where(x != 0, torch.full_like(x, number) / x, 0.0).clamp(-largest, largest)


def q8_0(x: Tensor) -> Tensor:
    """Blocks of 32 integers with a scale kept in float16. q8_1 has the same values (and their sum besides)."""
    quotients, d = q8_0_blocks(x)
    return (torch.round(quotients).to(x.dtype) * d.half().to(x.dtype)).flatten(-2)


def q8_k(x: Tensor) -> Tensor:
    """Blocks of 256, scale -max / 127 for the element of largest magnitude, in float32 (quantize_row_q8_K_ref)."""
    quotients, d = q8_k_blocks(x)
    integers = torch.round(quotients).clamp(max=127)  # nearest_int: ties to even
    return (integers.to(x.dtype) * d.to(x.dtype)).flatten(-2)


BLOCK = {"q8_0": 32, "q8_1": 32, "q8_K": 256}  # rows must be multiples of it


def flips(x: Tensor, rounding: str) -> Tensor:
    """What each value of x would change by if it were rounded to the other side of a boundary that it lies on.

    Zero for values that lie on none. A quotient is a float32 product of at most 127, good to a few times 2^-18;
    implementations multiply in another order, so within that it may go either way.
    """
    if rounding not in BLOCK:
        return torch.zeros_like(x)
    quotients, d = q8_k_blocks(x) if rounding == "q8_K" else q8_0_blocks(x)
    scale = d if rounding == "q8_K" else d.half()
    rounded = torch.round(quotients)
    past = quotients - rounded  # from -0.5 to 0.5
    on_boundary = past.abs() > 0.5 - 2.0**-15
    other = torch.where(past >= 0, 1.0, -1.0).to(x.dtype)
    return torch.where(on_boundary, other * scale.to(x.dtype), 0.0).flatten(-2)


_MANTISSA = {"f16": 10, "tf32": 10, "bf16": 7}  # bits


def step_of(x: Tensor, rounding: str) -> Tensor:
    """How far apart the values that `rounding` keeps lie, at each value of x; 0 at 0 and where it rounds nothing."""
    if rounding in BLOCK:
        _, d = q8_k_blocks(x) if rounding == "q8_K" else q8_0_blocks(x)
        return d.abs().to(x.dtype).expand(*d.shape[:-1], BLOCK[rounding]).flatten(-2)
    if rounding not in _MANTISSA:
        return torch.zeros_like(x)
    return torch.where(x != 0, torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1 - _MANTISSA[rounding]), 0.0)


ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "f64": lambda x: x,
        "f32": single,
        "tf32": tf32,
        "f16": half,
        "bf16": bfloat,
        "q8_0": q8_0,
        "q8_1": q8_0,
        "q8_K": q8_k,
    }
)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How an engine computes a matmul, beyond its mathematics. "f64" stands for "as it is, not rounded".

    `operands`: what activations are rounded to (of attention: Q and the probabilities).
    `stored`: what the other operand is held in: dequantised weights, or K and V in the cache.
    `accumulate`: the type that sums run in.
    `parts`: of attention's sums in f16, which can be followed term by term: how many threads share the keys of a
    decoded token, each adding up its own (see `split_keys`). 0: in an order that is not known.
    `ubatch`: tokens that come in so many at a time have neither `operands` nor `accumulate`: only the last ones of a
    prompt, too few for it, do. 0: all do.
    """

    operands: str = "f64"
    stored: str = "f64"
    accumulate: str = "f32"
    parts: int = 1
    ubatch: int = 0

    def whole_ubatches(self, n_tokens: int) -> int:
        """How many of the first tokens are in ubatches that are full."""
        return n_tokens // self.ubatch * self.ubatch if self.ubatch else 0

    def __str__(self) -> str:
        parts = [f"operands {self.operands}" if self.operands != "f64" else ""]
        parts += [f"stored {self.stored}" if self.stored != "f64" else ""]
        parts += [f"sums {self.accumulate}" if self.accumulate != "f32" else ""]
        parts += [f"in {self.parts or 'unknown'} parts" if self.parts != 1 else ""]
        parts += [f"of the tokens after ubatches of {self.ubatch}" if self.ubatch else ""]
        return ", ".join(filter(None, parts)) or "exact"


EXACT = Arithmetic()

# ggml-cpu/ops.cpp, ggml_compute_forward_flash_attn_ext_f16: from so many cells of the cache on the threads share the
# keys of a decoded token. llama.cpp shows it the cells in use, rounded up to 256 (llama-kv-cache.cpp, get_n_kv).
_SPLIT_FROM, _CELLS = 512, 256
UBATCH = 512  # tokens that llama.cpp computes at once, unless told otherwise (llama_context_default_params)
TILED_FROM = 64  # tokens of a ubatch (GGML_FA_TILE_Q)
SHARED_BEYOND = _SPLIT_FROM - _CELLS  # keys


def split_keys(n_tokens: int, n_keys: int, parts: int) -> list[slice]:
    """The keys of each thread; all in one where they are not shared."""
    if n_tokens > 1 or n_keys <= SHARED_BEYOND:
        return [slice(n_keys)]
    cells = math.ceil(n_keys / _CELLS) * _CELLS
    width = math.ceil(cells / parts)
    return [slice(at, at + width) for at in range(0, n_keys, width)]


# The dot-product type of each weight type on ggml's CPU backend (ggml-cpu/ggml-cpu.c, type_traits_cpu).
_Q8_0 = ["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"]
_Q8_K = [
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_XS",
    "TQ1_0",
    "TQ2_0",
]
_LLAMA_CPP_OPERANDS: Mapping[str, str] = MappingProxyType(
    {"F16": "f16", "BF16": "bf16", "Q4_1": "q8_1", "Q5_1": "q8_1"}
    | dict.fromkeys(_Q8_0, "q8_0")
    | dict.fromkeys(_Q8_K, "q8_K")
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """The arithmetic of a whole engine. `linear` is None where it follows the weight's type as in ggml."""

    name: str
    linear: Arithmetic | None = EXACT
    scores: Arithmetic = EXACT
    values: Arithmetic = EXACT

    def of(self, kind: str, weight_type: str = "F32") -> Arithmetic:
        """The arithmetic of an op of this kind; `weight_type` is its matrix's ggml type."""
        match kind:
            case "linear":
                return self.linear or Arithmetic(_LLAMA_CPP_OPERANDS.get(weight_type, "f64"))
            case "scores":
                return self.scores
            case "weighted_values":
                return self.values
        return EXACT


def _everywhere(name: str, arithmetic: Arithmetic) -> Scheme:
    return Scheme(name, arithmetic, arithmetic, arithmetic)


# Real engines' arithmetic, most usual first. Each entry is what some engine does: a fit can excuse no mistake.
SCHEMES = (
    Scheme("llama.cpp", None),
    Scheme("exact"),
    Scheme("llama.cpp, f16 cache", None, Arithmetic("f16", "f16"), Arithmetic("f16", "f16")),
    # ggml_compute_forward_flash_attn_ext_f16_one_chunk: Q to f16, values summed in f16 key by key
    Scheme("llama.cpp, flash attention", None, Arithmetic("f16", "f16"), Arithmetic("f64", "f16", "f16")),
    # ggml_compute_forward_flash_attn_ext_tiled, from 64 tokens on: the cache alone is rounded
    Scheme("llama.cpp, tiled flash attention", None, Arithmetic("f64", "f16"), Arithmetic("f64", "f16")),
    Scheme(  # a prompt of more than one ubatch, whose last has fewer than 64 tokens
        "llama.cpp, flash attention tiled in whole ubatches",
        None,
        Arithmetic("f16", "f16", ubatch=UBATCH),
        Arithmetic("f64", "f16", "f16", ubatch=UBATCH),
    ),
    *(
        Scheme(
            f"llama.cpp, flash attention on {threads} threads",
            None,
            Arithmetic("f16", "f16", ubatch=UBATCH),
            Arithmetic("f64", "f16", "f16", parts=threads, ubatch=UBATCH),
        )
        for threads in (2, 3, 4, 6, 8, 12, 16)
    ),
    Scheme("llama.cpp, q8_0 cache", None, Arithmetic("q8_0", "q8_0"), Arithmetic("f64", "q8_0")),
    _everywhere("f16 weights and cache", Arithmetic("f64", "f16")),
    _everywhere("bf16 weights and cache", Arithmetic("f64", "bf16")),
    _everywhere("f16 matmuls", Arithmetic("f16", "f16")),
    _everywhere("bf16 matmuls", Arithmetic("bf16", "bf16")),
    _everywhere("tf32 matmuls", Arithmetic("tf32", "tf32")),
    Scheme("f16 activations", Arithmetic("f16")),
    Scheme("bf16 activations", Arithmetic("bf16")),
    Scheme("q8_0 activations", Arithmetic("q8_0")),
    Scheme("q8_K activations", Arithmetic("q8_K")),
)

PLAIN = SCHEMES[:2]  # what most engines do: round activations as the weights' type wants it, or not at all

# What only a user can know: sums in half precision in an order that cannot be followed, as in GPUs' kernels
# (ggml-cuda/fattn*.cuh). The floor is so wide that small mistakes hide below it: never tried unasked.
PINNED_ONLY = (
    Scheme("flash attention with f16 sums", None, Arithmetic("f16", "f16"), Arithmetic("f64", "f16", "f16", parts=0)),
)


def scheme_named(name: str) -> Scheme:
    """One of all schemes by its name; raises EngineError with all names."""
    known = {scheme.name: scheme for scheme in (*SCHEMES, *PINNED_ONLY)}
    if name not in known:
        raise EngineError(f"unknown arithmetic {name!r}. Known: {'; '.join(known)}.")
    return known[name]
