"""In what an engine stored values, and what was rounded on the way to the file instead."""

from collections.abc import Iterator
from functools import reduce
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracediff.model.graph import Graph, Op
from tracediff.numerics.floors import UNIT
from tracediff.numerics.roundings import rounding_named
from tracediff.trace.format import OpRecord

if TYPE_CHECKING:
    from tracediff.replay.recorded import Recorded

_LOOK = 1 << 14  # values looked at before the others: most that are longer than float16 show at once
# So many values that all fit a shorter type do not by chance: 2^-13 to the power of it for float16; 2^-29 for float32.
_MANY, _MANY_LONG = 64, 8

_SUMS = 12  # that are asked what their terms were
# A sum, rounded once, is what was recorded, or its terms were others. Of the squared error that roundings of the terms
# make, values rounded on the way to the file show about all, and an engine that holds them so next to nothing.
_SHOWN = 0.05
_WITHIN = 0.99  # of the elements lie as near as roundings of all three take them: else the sum is mistaken


def stored_as(values: Tensor, dtype: str) -> str:
    """What an engine stored values in before it wrote them as a longer type: all of many fit a shorter one."""
    parts = values.flatten().split(_LOOK)
    for name in {"f64": ("bf16", "f16", "f32"), "f32": ("bf16", "f16")}.get(dtype, ()):
        if all(torch.equal(rounding_named(name)(part), part) for part in parts):
            ids = all(torch.equal(part, part.round()) for part in parts)  # of experts: they fit by their nature
            many = int((values != 0).sum()) >= (_MANY_LONG if dtype == "f64" else _MANY)
            return name if many and not ids else dtype
    return dtype


def rounded_on_the_way(recorded: "Recorded", graph: Graph) -> dict[str, bool | None]:
    """Of float16 and bfloat16: whether values that stand in the trace so were rounded by who wrote it.

    What an engine holds is what its next op reads; what was rounded on the way to the file is not. A sum of two values
    tells: rounded once, it is the number that was recorded, or its terms were others. None where no sum is recorded
    with its terms.
    """
    shown: dict[str, list[float]] = {"f16": [], "bf16": []}
    for record, op in _sums(recorded, graph):
        places = [(record.step, name, record.rows) for name in op.inputs]
        terms = [recorded.value(place) for place in places]
        types = [stored_as(x, recorded.dtype(place)) for x, place in zip(terms, places, strict=True)]
        y = recorded.values(record)
        storage = stored_as(y, record.dtype or "f32")
        sizes = [UNIT[name] * x.abs() for x, name in zip((y, *terms), (storage, *types), strict=True)]
        exact = terms[0] + terms[1]
        if float(((y - exact).abs() <= 2 * reduce(torch.add, sizes)).double().mean()) < _WITHIN:
            continue
        error = (y - rounding_named(storage)(exact)).square().sum()
        for name in shown.keys() & types:
            steps = [rounding_named(name).step(x) for x, of in zip(terms, types, strict=True) if of == name]
            shown[name].append(float(12 * error / sum(step.square().sum() for step in steps)))
    return {name: median(of) > _SHOWN if of else None for name, of in shown.items()}


def _sums(recorded: "Recorded", graph: Graph) -> Iterator[tuple[OpRecord, Op]]:
    """Records of sums with both of their terms, from all over the trace."""
    found = [
        (record, op)
        for record in recorded.trace.ops.values()
        if record.has_data and record.op in graph and (op := graph[record.op]).kind == "add"
        if len(op.inputs) == 2 and not op.views
        if all(recorded.holds_inputs(op, record))
    ]
    yield from found[:: max(1, len(found) // _SUMS)]
