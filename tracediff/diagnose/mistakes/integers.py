"""Mistakes of engines that quantise by themselves: how values become 8-bit integers, and by what these are scaled."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tracediff.diagnose.mistakes.mistake import MATMUL, Area, Context, Variants
from tracediff.diagnose.mistakes.near import is_near
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op
from tracediff.model.weights import dequantize, reading, values_of
from tracediff.numerics.arithmetic import Arithmetic
from tracediff.numerics.blocks import Blocks
from tracediff.numerics.evaluate import noise_of
from tracediff.numerics.floors import Noise
from tracediff.numerics.groups import Signed
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.kind import Call, Made
from tracediff.numerics.roundings import q8_0, rounding_named
from tracediff.numerics.schemes import GROUPS

AREA = Area()


@dataclass(frozen=True, slots=True)
class _Rounding:
    """Computes an op as its kind does, with activations rounded in another way: `Op.rework`."""

    operands: str

    def compute(self, call: Call) -> Tensor:
        """The output."""
        arithmetic = self._arithmetic(call.arithmetic)
        return KINDS[call.op.kind].compute(replace(call, rounded=partial(self.rounded, call), arithmetic=arithmetic))

    def rounded(self, call: Call, x: Tensor, name: str) -> Tensor:
        """What becomes of an operand that is rounded to what is called so."""
        return call.rounded(x, name)

    def noise(self, made: Made) -> Noise:
        """That of the op with activations rounded so."""
        right, arithmetic = replace(made.op, rework=None), self._arithmetic(made.arithmetic)
        return noise_of(right, replace(made, arithmetic=arithmetic))

    def _arithmetic(self, other: Arithmetic) -> Arithmetic:
        # Sums in float32 err no less than those of integers, whichever the engine has.
        return replace(
            other, operands=self.operands, accumulate="f32" if other.accumulate == "i32" else other.accumulate
        )


@dataclass(frozen=True, slots=True)
class _Integers(_Rounding):
    """The same in blocks of 8-bit integers that are made or scaled otherwise. `of` blocks share what belongs to each;
    0: all of a row; `of_token`: those of all tokens what belongs to the first one's.
    """

    how: str
    of: int = 0
    of_token: bool = False

    def rounded(self, call: Call, x: Tensor, name: str) -> Tensor:
        """The activations by these integers."""
        return self.values(x) if name == self.operands else call.rounded(x, name)

    def values(self, x: Tensor) -> Tensor:
        """What the integers stand for."""
        blocks = rounding_named(self.operands)
        assert isinstance(blocks, Blocks)
        quotients, scales, _ = blocks.grid(x.float())
        scales = scales.to(blocks.scales).float()
        each = x.float().unflatten(-1, (scales.shape[-2], -1))
        first = self._first(scales)
        match self.how:
            case "both":
                values = torch.round(each / first).clamp(-127, 127) * first
            case "scaled":
                values = torch.round(quotients) * first
            case "divided":
                values = _as_bytes(each / first) * scales
            case "by 128":
                values = _as_bytes(quotients * (128 / 127)) * scales
            case _:
                largest = (quotients * scales).amax(-1, keepdim=True) / 127
                values = _as_bytes(quotients * scales / largest) * largest
        return values.flatten(-2).to(x.dtype)

    def _first(self, scales: Tensor) -> Tensor:
        """The scales that stand for all, in the shape of these, [T, blocks, 1]."""
        if self.of_token:
            return scales[:1].expand_as(scales)
        first = scales.unflatten(-2, (-1, self.of or scales.shape[-2]))[..., :1, :]
        return first.expand(*first.shape[:-2], self.of or scales.shape[-2], 1).flatten(-3, -2)

    @property
    def words(self) -> str:
        """For a reader."""
        words = rounding_named(self.operands).words
        whose = "the first block of " + (f"each {self.of}" if self.of else "the row")
        whose = "the step's first token" if self.of_token else whose
        match self.how:
            case "both":
                return f"activations in {words} are divided and multiplied by the scale of {whose}"
            case "scaled":
                return f"activations in {words}: their integers are multiplied by the scale of {whose}"
            case "divided":
                return f"activations in {words} are divided by the scale of {whose}"
            case "by 128":
                return f"activations in {words}: the largest becomes 128, which is no 8-bit integer, where 127 belongs"
        return f"activations in {words} are scaled by their largest value, where the largest magnitude belongs"


def _as_bytes(quotients: Tensor) -> Tensor:
    """Rounded, and what 8 bits leave of it."""
    return (torch.round(quotients) + 128) % 256 - 128


@AREA.mistake(
    "activations_miscounted", "the integers of 8-bit activations are made by another scale than they are multiplied by",
    "the quantisation of activations: the largest magnitude of each block, its scale, and where that is looked up",
    MATMUL, everywhere=True,
)  # fmt: skip
def _miscounted(op: Op, context: Context) -> Variants:
    columns = op.weights[0].shape[-1]
    for name in (*(group.name for group in _groups(op)), "q8_0", "q8_K"):
        blocks = rounding_named(name)
        assert isinstance(blocks, Blocks)
        width = blocks.width(columns)
        if columns % width:
            continue
        in_ggml = [256 // width] if width < 256 < columns and columns % 256 == 0 else []  # of a block of K-quants
        shared = [(how, of, False) for how in ("scaled", "divided") for of in (0, *in_ggml) if columns > width]
        tokens = [(how, 0, True) for how in ("both", "scaled", "divided")]
        ways = [*shared, *tokens, ("by 128", 0, False), ("signed", 0, False)]
        ways = ways if context.seen else ways[:1]  # behind other ops each takes passes of all weights
        for how, of, of_token in ways:
            wrong = _Integers(name, how, of, of_token)
            if is_near(op, context, of_input=wrong.values):
                yield replace(op, rework=wrong), wrong.words


@AREA.mistake(
    "activations_truncated", "8-bit activations are truncated towards 0, where rounding belongs",
    "the cast to int8 in the quantisation of activations: round before it", MATMUL, everywhere=True,
)  # fmt: skip
def _truncated(op: Op, context: Context) -> Variants:
    ways = [(f"truncated {group.name}", group.words) for group in _groups(op)]
    if op.weights[0].shape[-1] % q8_0.block == 0:
        ways += [("truncated q8_0", q8_0.words), ("truncated divided q8_0", f"{q8_0.words} (divided by their scales)")]
    for name, groups in ways:
        if is_near(op, context, of_input=rounding_named(name)):
            words = f"activations in {groups} are truncated towards 0, where rounding belongs"
            yield replace(op, rework=_Rounding(name)), words


@AREA.mistake(
    "scales_of_first_row", "the 8-bit weights of every row are scaled as those of row 0",
    "the index of a weight's scales: it counts groups from the tensor's start, not from the row's", MATMUL,
    everywhere=True,
)  # fmt: skip
def _first_scales(op: Op, context: Context) -> Variants:
    if len(op.weights[0].shape) < 2:
        return  # of a single row
    for group in _groups(op):

        def scaled(rows: Tensor, group: Blocks = group) -> Tensor:
            quotients, scales, _ = group.grid(rows)
            return (torch.round(quotients) * scales[:1]).flatten(-2).to(rows.dtype)

        def read(file: GGUFFile, info: TensorInfo, scaled: Callable[[Tensor], Tensor] = scaled) -> Tensor:
            values = values_of(file, info)
            return scaled(values.reshape(-1, values.shape[-1])).reshape(values.shape)

        def held(info: TensorInfo, raw: np.ndarray, scaled: Callable[[Tensor], Tensor] = scaled) -> Tensor:
            return scaled(dequantize(info, raw))

        if is_near(op, context, read=held):
            yield reading(op, read), f"each row of {op.weights[0].name}, in {group.words}, is scaled as row 0 is"


def _groups(op: Op) -> Iterator[Blocks]:
    """Groups of 8-bit integers that the rows of an op's weight are multiples of."""
    columns = op.weights[0].shape[-1]
    for group in map(rounding_named, GROUPS):
        if isinstance(group, Signed) and group.divides(columns):
            yield group
