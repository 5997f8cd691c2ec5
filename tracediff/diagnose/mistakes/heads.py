"""Mistakes in how the heads of a value lie in memory."""

from dataclasses import dataclass, replace

from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Context, Variant, Variants, Where, axes_of
from tracediff.diagnose.rearranged import Rearranged
from tracediff.model.graph import Op

AREA = Area()


@dataclass(frozen=True, slots=True)
class _HeadsFirst(Rearranged):
    """Values of so many heads written as [heads, tokens, channels] and read as [tokens, heads, channels]; or,
    `backwards`, the other way round.
    """

    heads: int
    backwards: bool

    def moved(self, x: Tensor) -> Tensor:
        """In the order of the other layout."""
        shape = (self.heads, len(x), -1) if self.backwards else (len(x), self.heads, -1)
        return x.reshape(shape).swapaxes(0, 1).reshape(x.shape)


@AREA.mistake(
    "heads_first", "[heads, tokens, channels] is read as [tokens, heads, channels], or the reverse",
    "the transpose between the view as heads and attention, and between attention and its output projection",
    Where(("linear", "weighted_values")),
)  # fmt: skip
def _heads_first(op: Op, context: Context) -> Variants:
    right, wrong = "[tokens, heads, channels]", "[heads, tokens, channels]"
    if op.kind == "weighted_values":
        heads, backwards = axes_of(op, 0, context.graph)[0], False
        words = f"the output lies as {wrong} and is read as {right}: a transpose was forgotten"
    else:
        heads, backwards = op.axes[1] if len(op.axes) == 3 else 1, True
        words = f"the projection lies as {right} and is read as {wrong}: its view as heads needs a transpose"
    if isinstance(heads, int) and heads > 1 and op.axes[0] == "T":
        yield Variant(replace(op, rework=_HeadsFirst(heads, backwards)), words)
