"""Values that were written as another type than the trace says, told by their bits."""

import numpy as np

_ENOUGH = 64  # values that look like half precision by chance: not so many
# Standard deviations of the exponents of values that belong together, in octaves; normal ones have 1.6. Random bits
# have 74 as bf16 and 9 as f16, and f16 values taken for bf16, an octave of which is 8 exponents, have 13.
_SPREAD = {"bf16": 6.0, "f16": 5.0}
# Of the exponents of float32: a value's follow a normal distribution within 2 or 3, bits of a mantissa any within 74.
_FLOATS, _NO_FLOATS = 8.0, 40.0


def misread(values: np.ndarray) -> tuple[str, str] | None:
    """What the bits of float32 values look like instead, and what to do: pairs of half precision, halves of float64, or
    numbers whose bytes lie the other way round. None where they are float32.
    """
    bits = np.ascontiguousarray(values.reshape(-1)[: 1 << 20]).view(np.uint32)
    if half := _half_read_as_float(bits):
        return f"the bits look like pairs of {half} values", f'Write "dtype":"{half}".'
    if bits.size < 2 * _ENOUGH:
        return None
    if _spread_of_exponents(bits[1::2]) < _FLOATS and _spread_of_exponents(bits[::2]) > _NO_FLOATS:
        return "the bits look like halves of f64 values", 'Write "dtype":"f64", or convert the values.'
    if _spread_of_exponents(bits) > _NO_FLOATS and _spread_of_exponents(bits.byteswap()) < _FLOATS:
        return "the bytes look like those of big-endian values", "Write them in little-endian order."
    return None


def _spread_of_exponents(bits: np.ndarray) -> float:
    """The standard deviation of the exponents of float32 bits; zeros, which fit anything, apart."""
    exponents = ((bits[bits & 0x7FFFFFFF != 0] & 0x7FFFFFFF) >> 23).astype(np.int32)
    return float(exponents.std()) if exponents.size else 0.0


def _half_read_as_float(bits: np.ndarray) -> str | None:
    """The type of which two values fill each float32: then both halves of its bits have exponents of one kind.

    Of real float32 values the lower half is the end of a mantissa: random, or zero where it was rounded.
    """
    low, high = bits & 0xFFFF, bits >> 16
    both = (low & 0x7FFF != 0) & (high & 0x7FFF != 0)
    low, high = low[both], high[both]
    if low.size < max(_ENOUGH, bits.size // 2):
        return None
    for name, mantissa in (("bf16", 7), ("f16", 10)):
        exponents = [(half & 0x7FFF).astype(np.int32) >> mantissa for half in (low, high)]
        spread = _SPREAD[name]
        if max(e.std() for e in exponents) < spread and abs(exponents[0].mean() - exponents[1].mean()) < spread:
            return name
    return None
