"""Roundings by their names; a new one is one entry of `_KNOWN`, or one more class of blocks in `_GROUPS`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracediff.errors import EngineError
from tracediff.numerics.blocks import FP8, GF4, Q8K, Q80, WHOLE, AcrossHeads, Blocks, StoredQ80
from tracediff.numerics.floats import (
    HALVES,
    TF32,
    Calibrated,
    Cut,
    Float,
    HalfAway,
    Normal,
    OfScaled,
    Rounding,
    TF32Away,
    Whole,
)
from tracediff.numerics.groups import (
    MX,
    NF4,
    Affine,
    Away,
    Centred,
    Divided,
    EvenUnsigned,
    Flipped,
    Full,
    Held,
    HeldDivided,
    HeldFP8,
    HeldInverse,
    HeldNarrow,
    HeldWide,
    KeptInverse,
    Narrow,
    Scaled,
    Shifted,
    Signed,
    Truncated,
    TruncatedQ80,
    TypedFP8,
    Unsigned,
    Wide,
)

half = Float("f16", "float16", dtype=torch.float16, mantissa=10)
bfloat = Float("bf16", "bfloat16", dtype=torch.bfloat16, mantissa=7)
single = Float("f32", "float32", dtype=torch.float32, mantissa=23)
tf32 = TF32("tf32", "TF32", dtype=torch.float32, mantissa=10)
q8_0 = Q80("q8_0", "q8_0 blocks", 32, torch.float16)
_KNOWN = {
    rounding.name: rounding
    for rounding in (
        Rounding("f64", "float64"),
        single,
        tf32,
        TF32Away("tf32 away", "TF32 with ties away from 0", dtype=torch.float32, mantissa=10),
        # Queries and keys each by D^-1/4: PyTorch's `scaled_dot_product_attention` where none of its kernels suits (its
        # math backend: float32 with fewer heads of keys than of queries). Queries alone by D^-1/2: crabml beside a
        # cache in float16.
        OfScaled("scaled tf32", "TF32 of scaled values", of=tf32, power=-0.25),
        *(OfScaled(f"scaled {of.name}", f"{of.words} of scaled values", of=of, power=-0.5) for of in (half, bfloat)),
        half,
        bfloat,
        Normal("normal f16", "float16 without subnormal numbers", dtype=torch.float16, mantissa=10),
        HalfAway("away f16", "float16 with ties away from 0", dtype=torch.float16, mantissa=10),
        Cut("cut f16", "float16, cut off", dtype=torch.float16, mantissa=10),
        Cut("cut bf16", "bfloat16, cut off", dtype=torch.bfloat16, mantissa=7),
        Float("e5m2", "float8 (e5m2)", dtype=torch.float8_e5m2, mantissa=2),
        Float("e4m3", "float8 (e4m3)", dtype=torch.float8_e4m3fn, mantissa=3),
        q8_0,
        Q80("q8_1", "q8_1 blocks", 32, torch.float16),
        AcrossHeads("q8_0 across heads", "q8_0 blocks across heads"),
        Q80("q8_0/row", "int8 rows with float16 scales", 0, torch.float16),
        StoredQ80("stored q8_0", "q8_0 blocks by stored scales", 32, torch.float16),
        StoredQ80("stored q8_0/row", "int8 rows by stored float16 scales", 0, torch.float16),
        TruncatedQ80("truncated q8_0", "q8_0 blocks", 32, torch.float16),
        Truncated("truncated divided q8_0", "q8_0 blocks", 32, torch.float16),
        Q8K("q8_K", "q8_K blocks", 256),
        Q8K("older q8_K", "older q8_K blocks", 256, least=-128.0),
        GF4("gf4", "gf4", 8),
    )
}
_BITS, _SCALES = range(2, 17), "{groups} with float32 scales"
_GROUPS: dict[str, tuple[type[Blocks], Sequence[int], str]] = {
    "int": (Signed, _BITS, f"int{{bits}} {_SCALES}"),
    "truncated int": (Truncated, _BITS, f"truncated int{{bits}} {_SCALES}"),
    "narrow int": (Narrow, _BITS, f"narrow int{{bits}} {_SCALES}"),
    "flipped int": (Flipped, _BITS, f"flipped int{{bits}} {_SCALES}"),
    "full int": (Full, _BITS, f"full int{{bits}} {_SCALES}"),
    "held int": (Held, _BITS, "int{bits} {groups} with {held} scales"),
    "narrow held int": (HeldNarrow, _BITS, "narrow int{bits} {groups} with {held} scales"),
    "away int": (Away, _BITS, f"int{{bits}} {_SCALES} and ties away from 0"),
    "wide int": (Wide, _BITS, "wide int{bits} {groups} with {held} scales"),
    "held wide int": (HeldWide, _BITS, "wide int{bits} {groups} with {held} scales and quotients"),
    "divided int": (Divided, _BITS, f"divided int{{bits}} {_SCALES}"),
    "held divided int": (HeldDivided, _BITS, "divided int{bits} {groups} with {held} scales"),
    "inverse int": (KeptInverse, _BITS, "int{bits} {groups} with {held} inverse scales"),
    "held inverse int": (HeldInverse, _BITS, "int{bits} {groups} with {held} inverse scales and products with them"),
    "uint": (Unsigned, _BITS, f"uint{{bits}} {_SCALES} and zeros"),
    "even uint": (EvenUnsigned, _BITS, f"even uint{{bits}} {_SCALES} and zeros"),
    "mxfp": (MX, [4, 8], "MXFP{bits} {groups}"),
    "fp": (FP8, [8], f"fp8 {_SCALES}"),
    "held fp": (HeldFP8, [8], "fp8 {groups} with {held} scales"),
    "typed fp": (TypedFP8, [8], "fp8 {groups} with {held} scales alone"),
    "nf": (NF4, [4], "NF4 {groups} with {held} values"),
    "affine": (Affine, _BITS, "{bits}-bit {groups} with {held} scales and offsets"),
    "centred": (Centred, _BITS, "{bits}-bit {groups} with {held} scales and middles"),
    "shifted": (Shifted, _BITS, "{bits}-bit {groups} with {held} scales and minima"),
}


# What quotients by a scale that was measured beforehand are rounded to, each with its least and its largest value.
CALIBRATED: Mapping[str, tuple[Rounding, float, float]] = MappingProxyType({
    "e4m3": (_KNOWN["e4m3"], -448.0, 448.0), "e5m2": (_KNOWN["e5m2"], -57344.0, 57344.0),
    "int8": (Whole("int8", "int8"), -128.0, 127.0), "narrow int8": (Whole("int8", "narrow int8"), -127.0, 127.0),
})  # fmt: skip
BY = " by "  # the scale
_RULE = r" to (?P<last>\d+(?:\.\d+)?)(?: (?P<how>in|by) (?P<kept>f16|bf16|2\^n))?"  # of scales
RULE = re.sub(r"\?P<\w+>", "?:", _RULE)  # the same without names of groups
_SIZES = {"row": 0, "token": 0, "tensor": WHOLE}
_ALL_HEADS = 1 << 16  # rows that share a scale at most: those of a token's heads, in a cache of one for them all
THEN = " then "


@dataclass(frozen=True, slots=True)
class Read(Rounding):
    """Values that are `held` in one rounding and `read` as another: a cache in float8, in matmuls of bfloat16."""

    held: Rounding = half
    read: Rounding = half

    @property
    def in_blocks(self) -> bool:
        """No: what is multiplied are floats."""
        return False

    def width(self, n: int) -> int:
        """As many as where they are held."""
        return self.held.width(n)

    @property
    def is_whole(self) -> bool:
        """Whether all of a tensor shares one scale."""
        return self.held.is_whole

    @property
    def n_rows(self) -> int:
        """How many rows share a scale."""
        return self.held.n_rows

    def within(self, least: float, most: float) -> "Read":
        """That of a part of a tensor."""
        return replace(self, held=self.held.within(least, most))

    def __call__(self, x: Tensor) -> Tensor:
        """One after the other."""
        return self.read(self.held(x))

    def step(self, x: Tensor) -> Tensor:
        """The coarser of both."""
        return torch.maximum(self.held.step(x), self.read.step(x))

    def flips(self, x: Tensor) -> Tensor:
        """Those of what they are held in; reading rounds what lies on a grid, not values from a computation."""
        return self.held.flips(x)


def read_as(held: str, read: str) -> str:
    """The name of the rounding that both make."""
    if read in ("f64", held, as_read(held)):
        return held
    return read if held == "f64" else f"{held}{THEN}{read}"


def as_held(name: str) -> str:
    """What values of this rounding are held in, whatever they are read as."""
    return name.partition(THEN)[0]


def as_read(name: str) -> str:
    """What they are read as, where that is another thing."""
    return name.partition(THEN)[2] or "f64"


def held_before(name: str) -> str:
    """The half precision in which values were held before they were rounded so, or are held: "f64" for none."""
    before = name.partition(" ")[0]
    return before if before in HALVES else "f64"


def in_rows_of(width: int, name: str) -> str:
    """The rounding of whole rows that this one is where they have so many values; its own name where it is none.

    The integers of q8_K have another sign in half of the blocks, and other ties.
    """
    kind, _, size = "int8/256".partition("/") if name == "q8_K" else name.partition("/")
    return f"{kind}/row" if size == str(width) else name


def calibrated(name: str, scale: float) -> str:
    """The name of one of `CALIBRATED` by a scale, which is a float32."""
    return f"{name}{BY}{float(np.float32(scale))!r}"


def is_calibrated(name: str) -> bool:
    """Whether it is one of those."""
    return name.partition(BY)[0] in CALIBRATED and BY in name


@cache
def rounding_named(name: str) -> Rounding:
    """A rounding by its name: one of `_KNOWN`, or in groups of N values, rows, all heads of a token or whole tensors,
    intB/N or uintB/N of B bits, fp8/N, nf4/N, affineB/N with offsets; with RxN in blocks of R rows. intB may be
    truncated, full or wide, and of a rule of its own (`by_rule`), or int8 by a scale (`calibrated`).

    With `f16 ` or `bf16 ` before it values were held in that before; scales of nf4 and affineB are then kept in it too,
    others in float32. Two with ` then ` between: held in one, and read as the other. Raises EngineError for any other
    name.
    """
    if name in _KNOWN:
        return _KNOWN[name]
    if THEN in name:
        held, read = rounding_named(as_held(name)), rounding_named(as_read(name))
        return Read(name, f"{held.words} read as {read.words}", held.block, held, read)
    if by := re.fullmatch(rf"({'|'.join(CALIBRATED)}){BY}(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", name):
        of, least, most = CALIBRATED[by[1]]
        return Calibrated(name, f"{of.words} by a scale of its own", of=of, scale=float(by[2]), least=least, most=most)
    of_rule, rule, kept = _rule_of(name)
    found = re.fullmatch(
        r"(?:(f16|bf16) )?([a-z ]+)(\d\d?)/(row|token|tensor|(?:([1-9]\d{0,5})x)?([1-9]\d{0,5}))", of_rule
    )
    blocks, bits, words = _GROUPS.get(found[2], (Blocks, (), "")) if found else (Blocks, (), "")
    if rule and blocks not in _RULED:
        bits = ()
    if not found or int(found[3]) not in bits:
        raise EngineError(
            f"unknown rounding {name!r}. Known: {', '.join(_KNOWN)}, intB/N and uintB/N (B bits, N values, RxN of R "
            "rows, row, token or tensor; `truncated `, `full `, `wide `, `divided `, `away `, `inverse `, `narrow ` or "
            "`flipped ` before intB, `even ` before uintB), intB/N to L (the largest becomes L; then ` in ` or ` by ` "
            "f16, bf16 or 2^n: scales kept so, quotients by what they were or by them), int8 by S (a scale S), fp8/N, "
            "mxfpB/N, affineB/N, nf4/N (`f16 ` or `bf16 ` before it: of values that were held in these)."
        )
    held, size = _KNOWN[found[1] or "f32"], _SIZES.get(found[4]) or int(found[6] or 0)
    n_rows = _ALL_HEADS if found[4] == "token" else int(found[5] or 1)
    assert isinstance(held, Float)
    sized = f"blocks of {n_rows} x {size}" if found[5] else f"groups of {size}"
    sizes = {0: _GROUPED["token" if n_rows > 1 else "row"], WHOLE: _GROUPED["tensor"]}
    said = words.format(bits=found[3], groups=sizes.get(size, sized), held=held.words)
    common: dict[str, Any] = {"before": held.dtype, "bits": int(found[3]), "n_rows": n_rows}
    if not rule:
        rule = {"last": 2.0 ** (int(found[3]) - 1) - 1} if issubclass(blocks, Scaled) else {}
        return blocks(name, said, size, **common, **rule)
    said = f"{found[2]}{found[3]} {sizes.get(size, sized)} with {kept}"
    return _RULED[blocks](name, said, size, **common, **rule)


_RULED: Mapping[type[Blocks], type[Scaled]] = MappingProxyType({Signed: Scaled, Narrow: Narrow, Flipped: Flipped})


_KEPT = {"f16": "float16 scales", "bf16": "bfloat16 scales", "2^n": "scales that are powers of two"}
_GROUPED = {"row": "rows", "token": "whole tokens", "tensor": "whole tensors"}
_OF_RULE = re.compile(
    rf"(?P<integers>(?:narrow |flipped )?int\d+) (?P<groups>{'|'.join(_GROUPED.values())}|groups of (?P<size>\d+)) "
    rf"with (?:(?P<kept>float32 scales|{'|'.join(_KEPT.values())}) "
    r"\(largest / (?P<last>[\d.]+)(?P<by>; quotients by them)?\)|(?P<plain>float32 scales)(?= read as|,| and |$))"
)


def _rule_of(name: str) -> tuple[str, dict[str, Any], str]:
    """The name without the rule of its scales, that rule, and what it is in words."""
    if not (found := re.fullmatch(rf"(.+\d/\w+){_RULE}", name)):
        return name, {}, ""
    last, kept, by_kept = float(found["last"]), found["kept"] or "f32", found["how"] == "by"
    words = f"{_KEPT.get(kept, 'float32 scales')} (largest / {last:.7g}{'; quotients by them' * by_kept})"
    return found[1], {"last": last, "kept": kept, "by_kept": by_kept}, words


def integers_named(text: str) -> str:
    """The text with names of symmetric integers where their words stand, and of what is read as another.

    >>> integers_named("weights in int8 rows with bfloat16 scales (largest / 127; quotients by them) read as bfloat16")
    'weights in int8/row to 127 by bf16 then bf16'
    """

    def named(found: re.Match[str]) -> str:
        size = found["size"] or next(size for size, words in _GROUPED.items() if words == found["groups"])
        name = f"{found['integers']}/{size}"
        if found["plain"]:
            return name
        kept = next((kept for kept, words in _KEPT.items() if words == found["kept"]), "")
        return by_rule(name, float(found["last"]), kept, bool(found["by"]))

    text = _OF_RULE.sub(named, text)
    return re.sub(rf"(/\w+(?:{RULE})?) read as (float16|bfloat16)\b", _then, text)


def _then(found: re.Match[str]) -> str:
    return f"{found[1]}{THEN}{next(of.name for of in (half, bfloat) if of.words == found[2])}"


def by_rule(name: str, last: float, kept: str = "", by_kept: bool = False) -> str:
    """The name of integers whose scale has a rule of its own (`Scaled`)."""
    return f"{name} to {last:.7g}" + f" {'by' if by_kept else 'in'} {kept}" * bool(kept)
