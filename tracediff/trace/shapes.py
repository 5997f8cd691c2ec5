"""How the shape of a record differs from the one that it should have, in words."""

import math
from dataclasses import dataclass

from tracediff.names import axes_of
from tracediff.trace.format import same_shape


@dataclass(frozen=True, slots=True)
class Misfit:
    """`text` says by what axes, as in "1 key fewer"; `axes` are these, none where the shapes have nothing in common."""

    text: str
    axes: tuple[str, ...] = ()


def misfit(op: str, found: tuple[int, ...], expected: tuple[int, ...], may_be_flat: bool) -> Misfit | None:
    """None where the shapes agree, heads side by side or apart."""
    if same_shape(found, expected, may_be_flat):
        return None
    if found[:1] == (1,) and same_shape(found[1:], expected, may_be_flat):
        return Misfit("an axis of 1 in front, as of a batch: leave it out of the shape")
    if may_be_flat and {len(found), len(expected)} == {2, 3}:
        found, expected = ((n, math.prod(rest)) for n, *rest in (found, expected))
    axes = axes_of(op, len(expected))
    if len(found) != len(expected) or not axes:
        return Misfit("another number of axes" if len(found) != len(expected) else "another shape")
    if sorted(found) == sorted(expected):
        return Misfit("the axes in another order")
    gaps = {axis: n - there for axis, n, there in zip(axes, found, expected, strict=True) if n != there}
    said = [f"{abs(gap)} {axis}{'s' * (abs(gap) > 1)} {'more' if gap > 0 else 'fewer'}" for axis, gap in gaps.items()]
    return Misfit(" and ".join(said), (*gaps,))
