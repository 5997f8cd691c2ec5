"""In what an engine stored values, and what was rounded on the way to the file instead."""

from collections.abc import Iterable, Iterator
from functools import reduce
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tracediff.model.graph import Graph, Op
from tracediff.numerics.floats import HALVES
from tracediff.numerics.floors import UNIT
from tracediff.numerics.roundings import rounding_named
from tracediff.trace.format import OpRecord

if TYPE_CHECKING:
    from tracediff.replay.recorded import Recorded

_LOOK, _PARTS = 1 << 14, 4  # values looked at before the others: most that are longer than float16 show at once
# So many different values that all fit a shorter type do not by chance: 2^-13 to the power of it for float16, 2^-16 for
# bfloat16, 2^-29 for float32. Those of a few bits, as 1 or 0.5, fit any by their nature.
_MANY, _FEW_BITS = 6, 4

_SUMS = 12  # that are asked what their terms were
# A sum, rounded once, is what was recorded, or its terms were others. Of the squared error that roundings of the terms
# make, values rounded on the way to the file show about all, and an engine that holds them so next to nothing.
_SHOWN = 0.05
_WITHIN = 0.99  # of the elements lie as near as roundings of all three take them: else the sum is mistaken


def stored_as(values: Tensor, dtype: str) -> str:
    """What an engine stored values in before it wrote them as a longer type: all of many fit a shorter one."""
    name, n_telling = fitting(values, dtype)
    return name if n_telling >= _MANY else dtype


def stored_in_all(records: Iterable[tuple[Tensor, str]]) -> str | None:
    """What an engine stored the values of several records in that tell it together; None where none does. The type
    that each stands in the trace as is given.
    """
    types, n_telling = set[str](), 0
    for values, dtype in records:
        name, n = fitting(values, dtype)
        types.add(name)
        n_telling += n
        if len(types) > 1 or name == dtype:
            return None
        if n_telling >= _MANY:
            return name
    return None


def fitting(values: Tensor, dtype: str) -> tuple[str, int]:
    """The shortest type that all values fit, and how many different ones tell that they were stored so."""
    parts = values.flatten().split(_LOOK)
    for name in {"f64": ("bf16", "f16", "f32"), "f32": ("bf16", "f16")}.get(dtype, ()):
        if all(torch.equal(rounding_named(name)(part), part) for part in parts):
            ids = all(torch.equal(part, part.round()) for part in parts)  # of experts: they fit by their nature
            return name, 0 if ids else max((_n_telling(part) for part in parts[:_PARTS]), default=0)
    return dtype, 0


def _n_telling(values: Tensor) -> int:
    mantissas = torch.frexp(values[values.isfinite()].abs().unique()).mantissa * 2**_FEW_BITS
    return int((mantissas != mantissas.round()).sum())


def rounded_on_the_way(recorded: "Recorded", graph: Graph) -> dict[str, bool | None]:
    """Of float32, float16 and bfloat16: whether values that stand in the trace so were rounded by who wrote it.

    What an engine holds is what its next op reads; what was rounded on the way to the file is not. A sum of two values
    tells: rounded or cut off once, it is the number that was recorded, or its terms were others. None where no sum is
    recorded with its terms, but of float32, which most engines compute in.
    """
    shown: dict[str, list[float]] = {"f32": [], "f16": [], "bf16": []}
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
        ways = (storage, f"cut {storage}") if storage in HALVES else (storage,)
        error = min(float((y - rounding_named(way)(exact)).square().sum()) for way in ways)
        for name in shown.keys() & types:
            steps = [rounding_named(name).step(x) for x, of in zip(terms, types, strict=True) if of == name]
            if size := float(sum(step.square().sum() for step in steps)):  # zeros are held in any type
                shown[name].append(12 * error / size)
    told = {name: median(of) > _SHOWN if of else None for name, of in shown.items()}
    return told | {"f32": bool(told["f32"])}  # so little is not allowed for where nothing tells


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
