"""Why an engine holds other numbers than it should: each known mistake of a loader, tried on the whole tensor.

Pure functions of two arrays, and of others that the held one may have been mistaken for. Nothing here needs torch.
Mistakes have the names that they have in the bank (`tracediff faults`), whose ops show them too;
those of IN_MEMORY show in the tensor alone.
"""

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from tracediff.english import ranges
from tracediff.trace.format import to_float

# What the bank does not know, for it needs the tensor itself: name -> the mistake, and where to look in one's code.
_TYPE = "the type that the loader takes the tensor for"
CUT_SHORT = "cut_short"
IN_MEMORY = {
    CUT_SHORT: ("fewer values are read than a tensor has", "the sizes of the model as they are read from the file"),
    "offset": ("a tensor is read from another place", "the tensor's offset, and the alignment of the data section"),
    "wrong_tensor": ("another tensor of the same shape is read", "the loader's table of tensor names"),
    "weight_scaled": ("a weight is multiplied by a factor", "scales that are applied twice, or not at all"),
    "f16_as_bf16": ("F16 bits are read as BF16", _TYPE),
    "f16_as_f32": ("the bytes of F16 are read as F32", _TYPE),
    "bf16_as_f32": ("the bytes of BF16 are read as F32", _TYPE),
    "f32_as_f16": ("the bytes of F32 are read as F16", _TYPE),
}
Array = np.ndarray
CLOSE = 2e-3  # relative RMS error that a cause may leave: what float16 makes of a value and bfloat16 of most
_LESS = 0.5  # of what the right values leave
_FOLLOWS = 0.5  # a correlation: that of another tensor is next to 0, for it has thousands of values
_CHUNK = 1 << 20
_WINDOW, _REACH = 1 << 12, 1 << 17  # elements in which an offset is looked for, and how far


class Reading(NamedTuple):
    """A mistaken way to get at a tensor, under the name that the mistake has in reports, and what comes out."""

    cause: str
    text: str
    values: Array


Readings = Callable[[Array], Iterator[Reading]]  # given the held values, flat


def explain(name: str, expected: Array, held: Array, others: Readings, close: float = CLOSE) -> tuple[str | None, str]:
    """The name of the mistake that leaves the least of the difference, None for an unknown one; and it in words.

    `expected` has the shape of the tensor `name`, `held` as many values; `others` are readings that only a file can
    tell of. What leaves an RMS of `close` or more, relative, explains nothing.
    """
    expected, held = _single(expected), _single(held.reshape(-1))
    if not np.count_nonzero(held):
        return "bias_missing" if name.endswith(".bias") else "weight_zero", "all zeros: never loaded?"
    if np.all(held == 1):
        return "norm_without_weight", "all ones: as a norm is initialised, never loaded?"
    # One reading at a time: each is as large as the tensor. Near values are near by themselves: "multiplied by 1".
    best, least = None, min(close, _LESS * residual(expected.reshape(-1), held))
    for reading in chain(_relations(name, expected, held), others(held)):
        left = residual(reading.values.reshape(-1), held)
        if left < least:
            best, least = (reading.cause, reading.text), left
    return best or (None, _describe(expected, held, close))


def _single(x: Array) -> Array:
    """Half precision as float32, to compute with."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32) if x.itemsize < 4 else x


def chunks(size: int, whole: int = 1) -> Iterator[slice]:
    """Parts of a large array, so that no copy of all of it is made in float64; none cuts `whole` values apart."""
    n = max(1, _CHUNK // whole) * whole
    return (slice(at, at + n) for at in range(0, size, n))


def residual(right: Array, held: Array) -> float:
    """Relative RMS error over the finite values; infinite where other values are finite."""
    error = signal = 0.0
    for cut in chunks(min(right.size, held.size)):
        with np.errstate(invalid="ignore"):  # bits that are no number
            a, b = right[cut].astype(np.float64), held[: right.size][cut].astype(np.float64)
        finite = np.isfinite(b)
        if not np.array_equal(np.isfinite(a), finite):
            return math.inf
        error += float(np.square(a[finite] - b[finite]).sum())
        signal += float(np.square(b[finite]).sum())
    return math.sqrt(error / signal) if signal else math.inf


def _relations(name: str, expected: Array, held: Array) -> Iterator[Reading]:
    """What arithmetic, strides and bit patterns can make of the right values."""
    flat, norm = expected.reshape(-1), "norm" in name
    if norm:
        yield Reading("norm_weight_plus_one", "1 was added to every value; in a GGUF file it is in already", flat + 1)
        yield Reading("norm_weight_minus_one", "1 was taken from every value", flat - 1)
    energy = float(flat @ flat)
    ratio = float(np.nan_to_num(held) @ flat) / energy if energy else math.nan
    if not math.isclose(ratio, 1, rel_tol=1e-4):
        scaled = "norm_scaled" if norm else "weight_scaled"
        yield Reading(scaled, f"every value was multiplied by {ratio:.4g}", flat * ratio)
    if expected.ndim == 2:
        n_out, n_in = expected.shape
        transposed = "embedding_transposed" if name == "token_embd.weight" else "weight_transposed"
        yield Reading(transposed, "stored transposed", expected.T)
        read = flat.reshape(n_in, n_out).T
        yield Reading(transposed, "read transposed: rows and columns of the wrong length", read)
    yield from _shifted(flat, held)
    yield from _reinterpreted(flat)


def _shifted(flat: Array, held: Array) -> Iterator[Reading]:
    """Read from another offset, the likeliest of all: where a piece of the held values correlates best."""
    n = min(flat.size, _REACH)
    window = min(_WINDOW, n // 2)
    at = (n - window) // 2
    piece = np.nan_to_num(held[at : at + window])
    spectrum = np.fft.rfft(flat[:n] - flat[:n].mean(), 2 * n) * np.conj(np.fft.rfft(piece - piece.mean(), 2 * n))
    shift = int(np.fft.irfft(spectrum, 2 * n)[: n - window + 1].argmax()) - at
    if shift:
        # What was read beyond the tensor's end is another tensor's: taken as held.
        values = held.copy()
        read, kept = slice(max(0, shift), flat.size + min(0, shift)), slice(max(0, -shift), flat.size - max(0, shift))
        values[kept] = flat[read]
        if kept.stop - kept.start >= flat.size // 2:
            where = "after" if shift > 0 else "before"
            yield Reading("offset", f"read {abs(shift)} elements {where} where it begins", values)


def _reinterpreted(flat: Array) -> Iterator[Reading]:
    """The bits of one type taken for another's."""
    with np.errstate(over="ignore", invalid="ignore"):
        single, half, brain = flat.astype(np.float32), flat.astype(np.float16), bfloat16_bits(flat)
        upper = (single.view(np.uint32) & 0xFFFF0000).view(np.float32)
        yield Reading("weight_cut", "cut off to bfloat16, towards 0, where rounding belongs", upper)
        yield Reading("bf16_as_f16", "BF16 bits are read as F16", brain.view(np.float16))
        yield Reading("f16_as_bf16", "F16 bits are read as BF16", to_float(half.view(np.uint16), "bf16"))
        even = flat.size // 2 * 2
        for bits, name in ((half.view(np.uint16), "F16"), (brain, "BF16")):
            yield Reading(
                f"{name.lower()}_as_f32", f"the bytes of {name} are read as F32", bits[:even].view(np.float32)
            )
        yield Reading("f32_as_f16", "the bytes of F32 are read as F16", single.view(np.float16)[: flat.size])


def bfloat16_bits(x: Array) -> Array:
    """The nearest bfloat16, ties to even, as uint16."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bfloat16(x: Array) -> Array:
    """Rounded to bfloat16, as float64."""
    return to_float(bfloat16_bits(x), "bf16").astype(np.float64)


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "float16": lambda x: x.astype(np.float16).astype(np.float64),
    "bfloat16": bfloat16,
    "float32": lambda x: x.astype(np.float32).astype(np.float64),
}


def rounded_to(flat: Array, held: Array) -> str | None:
    """The storage type that makes `held` of `flat`, if any does."""
    left = dict(ROUNDINGS)
    for cut in chunks(flat.size):
        with np.errstate(over="ignore", invalid="ignore"):
            left = {name: f for name, f in left.items() if np.array_equal(f(flat[cut]), held[cut].astype(np.float64))}
        if not left:
            return None
    return next(iter(left))


def _describe(expected: Array, held: Array, close: float) -> str:
    """Facts, where no mistake is known, of values that are right to a relative RMS error of `close`."""
    flat, lost = expected.reshape(-1), ~np.isfinite(held)
    if lost.any() and np.isfinite(flat).all():
        return f"{int(lost.sum())} of {held.size} values are NaN or Inf"
    rows = flat.reshape(expected.shape[0], -1), held.reshape(expected.shape[0], -1)
    what = ("values", "rows", "experts")[min(expected.ndim, 3) - 1]
    if close > CLOSE:  # quantised: a row tells, a value does not
        each = np.sqrt([float(np.square(b - a, dtype=np.float64).mean()) for a, b in zip(*rows, strict=True)])
        offs = [(each > 2 * close * float(np.sqrt(np.square(flat, dtype=np.float64).mean())), what)]
    else:
        off = ~np.isclose(*rows, rtol=1e-2, atol=1e-6)
        offs = [(off.any(1), what), (off.any(0), "values of each row")]
    for wrong, of in offs:
        if 0 < wrong.sum() <= len(wrong) // 2:
            return f"{int(wrong.sum())} of {len(wrong)} {of} are wrong: {ranges(np.flatnonzero(wrong).tolist())}"
    if close <= CLOSE and np.allclose(np.sort(held), np.sort(flat), rtol=CLOSE, atol=1e-6):
        return "the same values in another order"
    correlation = _correlation(flat, held)
    if correlation > _FOLLOWS:
        return (
            f"other values, which follow the right ones (correlation {correlation:.4g}): in a quantisation that is not "
            "known, or another version's of this model"
        )
    return "other values: another tensor's, or another model's"


def _correlation(a: Array, b: Array) -> float:
    """Pearson's, over the values that are finite in both; NaN where either is constant."""
    n, sums, products = 0, np.zeros(2), np.zeros((2, 2))
    for cut in chunks(a.size):
        both = np.stack([a[cut], b[cut]]).astype(np.float64)
        both = both[:, np.isfinite(both).all(0)]
        n, sums, products = n + both.shape[1], sums + both.sum(1), products + both @ both.T
    covariance = products - np.outer(sums, sums) / max(1, n)
    energy = covariance[0, 0] * covariance[1, 1]
    return float(covariance[0, 1] / math.sqrt(energy)) if energy > 0 else math.nan
