"""Mistakes in how the heads of a value lie in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tracediff.diagnose.mistakes.mistake import Area, Context, Variant, Variants, Where
from tracediff.diagnose.rearranged import Rearranged, Reread
from tracediff.model.graph import Op
from tracediff.names import local_name

AREA = Area()
_OF_ITS_TOKEN = ("rope", "rms_norm", "layer_norm", "l2_norm")  # kinds that may read heads of their token alone


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
        heads, backwards = context.graph.axes_read(op, 0)[0], False
        words = f"the output lies as {wrong} and is read as {right}: a transpose was forgotten"
    else:
        heads, backwards = op.axes[1] if len(op.axes) == 3 else 1, True
        words = f"the projection lies as {right} and is read as {wrong}: its view as heads needs a transpose"
    if isinstance(heads, int) and heads > 1 and op.axes[0] == "T":
        yield Variant(replace(op, rework=_HeadsFirst(heads, backwards)), words)


@dataclass(frozen=True, slots=True)
class _ChannelsFirst(Rearranged):
    """Values [tokens, heads, channels] of so many heads read as [tokens, channels, heads]."""

    heads: int

    def moved(self, x: Tensor) -> Tensor:
        """In the order of the other layout."""
        return x.reshape(len(x), -1, self.heads).swapaxes(1, 2).reshape(x.shape)


@dataclass(frozen=True, slots=True)
class _CacheViewed(Reread):
    """What is read of a cache, [positions, heads, channels], each head as often as queries read it, seen as
    [heads, positions, channels] of so many heads.
    """

    heads: int

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs, the second so seen."""
        first, cached, *others = inputs
        each = cached.repeat_interleave(self.heads // cached.shape[1], 1)
        return [first, each.reshape(self.heads, len(cached), -1).swapaxes(0, 1), *others]


@AREA.mistake(
    "heads_viewed", "a value that lies as [tokens, heads, channels] is read in another layout",
    "a view or reshape that makes heads of it: the tokens' axis must stay first until it is transposed",
    Where((*_OF_ITS_TOKEN, "scores", "weighted_values")),
)  # fmt: skip
def _heads_viewed(op: Op, context: Context) -> Variants:
    for position in (0,) if op.kind in _OF_ITS_TOKEN else (0, 1) if op.kind == "scores" else (1,):
        yield from _viewed(op, position, context)


def _viewed(op: Op, position: int, context: Context) -> Variants:
    """Of one input: queries, or what is cached."""
    name, cached = op.inputs[position], position == 1
    source, view = context.graph.ops.get(name), op.seen[position]
    if source is None or (cached and view):
        return
    axes = view.shape if view else source.axes  # it may see rows of all heads, or a part of one product's
    if len(axes) != 3 or axes[0] != "T":
        return
    heads, lies, what = axes[1], "[tokens, heads, channels]", local_name(name)
    if not isinstance(heads, int) or heads == 1:
        return
    if source.axes[1:] != axes[1:] and math.prod(source.axes[1:]) != math.prod(axes[1:]):  # type: ignore[arg-type]
        what = f"a part of {what}"
    ways = {"[heads, tokens, channels]": _HeadsFirst(heads, True), "[tokens, channels, heads]": _ChannelsFirst(heads)}
    for layout, way in ways.items():
        before = Op(f"{op.name}.read", "copy", (name,), axes, rework=way, views=(view,) if view else ())
        inputs = tuple(before.name if i == position else other for i, other in enumerate(op.inputs))
        words = f"{what} lies as {lies} and is read as {layout}: a view as heads, without its transpose"
        views = tuple(None if i == position else seen for i, seen in enumerate(op.seen))
        yield Variant(replace(op, inputs=inputs, views=views if any(views) else ()), words, before=(before,))
    n_head = op.axes[0] if op.kind == "scores" else context.graph.axes_read(op, 0)[0]
    for n in dict.fromkeys((heads, n_head)) if cached else ():
        if isinstance(n, int) and n % heads == 0:
            each = ", each head as often as queries read it," if n > heads else ""
            words = (
                f"all of {what}{each} lies as [positions, heads, channels] and is read as [heads, positions, channels]"
            )
            yield Variant(replace(op, rework=_CacheViewed(n)), words)


@dataclass(frozen=True, slots=True)
class _Reshaped(Reread):
    """A value whose axes are seen in another order, in C order in this shape: `Op.rework`. `memory` has the axes as
    they lie.
    """

    memory: tuple[int, ...]

    def read(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The input, its values as they lie."""
        (x,) = inputs
        return [x.permute(self.memory).reshape(x.shape)]


@AREA.mistake(
    "axes_reshaped", "axes are reshaped where they should be exchanged",
    "reshape or view, where transpose or permute belongs", Where(("copy",)),
)  # fmt: skip
def _axes_reshaped(op: Op, _: Context) -> Variants:
    view = op.seen[0] if op.views else None
    strides = [by for by in view.strides if isinstance(by, int)] if view else []
    if not view or len(strides) < len(view.shape) or strides == sorted(strides, reverse=True):
        return
    memory = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    words = f"the axes of {local_name(op.inputs[0])} are reshaped, not exchanged: its values stay where they lie"
    yield Variant(replace(op, rework=_Reshaped(tuple(memory))), words)
