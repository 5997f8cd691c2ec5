"""Mistakes in how activations become integers."""

from dataclasses import dataclass, replace

from torch import Tensor

from tracediff.diagnose.mistakes.mistake import MATMUL, Area, Context, Seen, Variants
from tracediff.model.graph import Op
from tracediff.model.weights import dequantize, raw_rows
from tracediff.numerics.arithmetic import GROUPS, Arithmetic
from tracediff.numerics.evaluate import noise
from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds import KINDS
from tracediff.numerics.kinds.kind import Call, Made
from tracediff.numerics.roundings import Int8, rounding_named

AREA = Area()
_ROWS = 64  # of the weight, by which groups are told from one another
_PART = 0.5  # of the error there: what leaves more is not tried


@dataclass(frozen=True, slots=True)
class _Rounding:
    """Computes an op as its kind does, with activations rounded in another way: `Op.rework`."""

    operands: str

    def compute(self, call: Call) -> Tensor:
        """The output."""
        return KINDS[call.op.kind].compute(replace(call, arithmetic=self._arithmetic(call.arithmetic)))

    def noise(self, made: Made) -> Noise:
        """That of the op with activations rounded so."""
        right, arithmetic = replace(made.op, rework=None), self._arithmetic(made.arithmetic)
        return noise(right, made.inputs, made.y, made.weights, made.energy, arithmetic, made.storage)

    def _arithmetic(self, other: Arithmetic) -> Arithmetic:
        return replace(other, operands=self.operands)


@AREA.mistake(
    "activations_truncated", "8-bit activations are truncated towards 0, where rounding belongs",
    "the cast to int8 in the quantisation of activations: round before it", MATMUL,
)  # fmt: skip
def _truncated(op: Op, context: Context) -> Variants:
    columns = op.weights[0].shape[-1]
    for group in map(rounding_named, GROUPS):
        name = f"truncated {group.name}"
        if not isinstance(group, Int8) or columns % (group.block or columns):
            continue
        if context.seen is None or _is_near(op, context, context.seen, name):
            words = f"activations in {group.words} are truncated towards 0, where rounding belongs"
            yield replace(op, rework=_Rounding(name)), words


def _is_near(op: Op, context: Context, seen: Seen, name: str) -> bool:
    """Whether activations rounded so leave less of some channels than unrounded ones: of several groups, that tells
    which. A bias is taken away with the mean.
    """
    if op.kind != "linear":
        return True
    info = context.file.tensors[op.weights[0].name]
    rows = dequantize(info, raw_rows(context.file, info)[:_ROWS]).to(seen.output)
    x, y = seen.inputs[0].flatten(1), seen.output.flatten(1)[:, : len(rows)]
    left = (y - x @ rows.T, y - rounding_named(name)(x) @ rows.T)
    before, after = (float((error - error.mean(0)).square().sum()) for error in left)
    return after <= _PART * before
