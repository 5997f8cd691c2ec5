"""What moves values, or makes some of nothing. None of it rounds, but for a copy to another type, or a state that is
held in one.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tracediff.numerics.arithmetic import EXACT
from tracediff.numerics.floors import UNIT, Noise
from tracediff.numerics.kinds.kind import Call, Kind, Made, analysed, applied, kept, none, one_rounding
from tracediff.numerics.kinds.matmul import turns
from tracediff.numerics.roundings import rounding_named


def copy(x: Tensor, *, dtype: str = "f32") -> Tensor:
    """X, in another order of its elements or another type."""
    return x if dtype == "f32" else rounding_named(dtype)(x)


def concat(a: Tensor, b: Tensor, *, axis: int) -> Tensor:
    """Side by side along an axis, counted from the last."""
    n = max(a.ndim, b.ndim, -axis)
    a, b = (x.reshape((1,) * (n - x.ndim) + tuple(x.shape)) for x in (a, b))
    return torch.cat((a, b), axis)


def repeat(x: Tensor, *, times: tuple[int, ...] = ()) -> Tensor:
    """Over and over along each axis; `times` are of the last axes."""
    return x.repeat((1,) * (x.ndim - len(times)) + tuple(times))


def as_places(ids: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Whole numbers from 0 to n - 1, and where they are that: an engine may record anything. Others become 0."""
    at = ids.nan_to_num(-1.0).long()
    is_place = (at == ids) & (at >= 0) & (at < n)
    return torch.where(is_place, at, 0), is_place


def get_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` [..., r] of a table [..., n, m] -> [..., r, m]; of each batch its own rows."""
    at, is_place = as_places(ids, table.shape[-2])
    rows = at[..., None].expand(*at.shape, table.shape[-1])
    found = table.expand(*at.shape[:-1], *table.shape[-2:]).gather(-2, rows)
    return found if bool(is_place.all()) else found.masked_fill(~is_place[..., None], math.nan)


def set_rows(rows: Tensor, ids: Tensor, into: Tensor) -> Tensor:
    """`into` [..., n, m] with its rows `ids` [..., r] replaced by `rows` [..., r, m]; those beyond it by none."""
    n = into.shape[-2]
    at = ids.long().clamp(max=n)[..., None].expand(rows.shape)
    room = torch.cat((into, torch.zeros_like(into[..., :1, :])), -2).expand(*rows.shape[:-2], n + 1, rows.shape[-1])
    return room.scatter(-2, at, rows.to(into.dtype))[..., :n, :]


def _of_rows(made: Made) -> Noise:
    return analysed(made) if made.op.function else none(made)


def set_(x: Tensor, part: Tensor, *, first: int) -> Tensor:
    """X with a part of its elements, in C order from `first` on, replaced."""
    flat = x.flatten()
    return torch.cat((flat[:first], part.flatten().to(x.dtype), flat[first + part.numel() :])).reshape(x.shape)


def fill(x: Tensor, *, value: float) -> Tensor:
    """One value in the shape of x."""
    return torch.full_like(x, value, dtype=x.dtype if x.is_floating_point() else torch.float64)


def pad(x: Tensor, *, before_after: tuple[int, ...]) -> Tensor:
    """Zeros around: so many before and after, of the last axis first."""
    x = x.reshape((1,) * (len(before_after) // 2 - x.ndim) + tuple(x.shape))
    return torch.nn.functional.pad(x, before_after)


def roll(x: Tensor, *, shifts: tuple[int, ...]) -> Tensor:
    """Shifted around along each axis, of the last first."""
    axes = range(-1, -1 - min(len(shifts), x.ndim), -1)
    return torch.roll(x, tuple(shifts[: len(axes)]), tuple(axes))


def tri(x: Tensor, *, part: int) -> Tensor:
    """A triangle of [..., n, n], zeros elsewhere: upper with diagonal, without, lower with, without (ggml_tri_type)."""
    return (torch.triu(x), torch.triu(x, 1), torch.tril(x), torch.tril(x, -1))[part]


def diag(x: Tensor) -> Tensor:
    """[..., 1, n] -> [..., n, n] with x on the diagonal."""
    return torch.diag_embed(x.squeeze(-2) if x.ndim > 1 else x)


def hadamard(positions: Tensor, *, n: int) -> Tensor:
    """[n, n] orthonormal, n a power of two: what llama.cpp multiplies Q and K with before they are quantised.

    (llama-kv-cache.cpp, ggml_gen_hadamard; https://arxiv.org/abs/2404.00456). It follows no position.
    """
    made = torch.full((1, 1), 1 / math.sqrt(n), dtype=torch.float64, device=positions.device)
    while len(made) < n:
        made = torch.cat((torch.cat((made, made), 1), torch.cat((made, -made), 1)))
    return made


def identity(x: Tensor) -> Tensor:
    """What is handed on."""
    return x


def _copy_noise(made: Made) -> Noise:
    """To a shorter type, unless the engine does without it."""
    dtype = made.op.attrs.get("dtype", "f32")
    return Noise(torch.zeros_like(made.y), made.stored + UNIT.get(dtype, 0.0) * made.size)


def _rows(call: Call) -> Tensor:
    """Of a weight the rows alone are read."""
    if not call.op.weights:
        return applied(call)
    at, is_place = as_places(call.inputs[0], call.op.weights[0].shape[0])
    rows = call.weights.gather(call.op.weights[0], at.flatten()).reshape(*at.shape, -1)
    return kept(rows.masked_fill(~is_place[..., None], math.nan), call.weights)


def _held_between(call: Call) -> Tensor:
    """What the step before left, rounded as it is held until this one."""
    (before,), name = call.inputs, call.arithmetic.stored
    if name == EXACT.stored:
        return applied(call)
    if call.energy:
        call.energy.turned = turns(before, name).abs()
    return applied(replace(call, inputs=(call.rounded(before, name),)))


def _held_noise(made: Made) -> Noise:
    noise, turned = none(made), made.energy.turned
    return noise if turned is None else replace(noise, hard=noise.hard + turned)


KINDS = (
    Kind("copy", copy, ("x",), noise=_copy_noise, keeps_part=True),
    Kind("concat", concat, ("a", "b"), noise=none),
    Kind("repeat", repeat, ("x",), noise=none, keeps_part=True),
    Kind("get_rows", get_rows, ("table", "ids"), compute=_rows, noise=_of_rows),
    Kind("set_rows", set_rows, ("rows", "ids", "into"), noise=none),
    Kind("set", set_, ("x", "part"), noise=none),
    Kind("pad", pad, ("x",), noise=none),
    Kind("roll", roll, ("x",), noise=none),
    Kind("tri", tri, ("x",), noise=none),
    Kind("diag", diag, ("x",), noise=none),
    Kind("fill", fill, ("x",), noise=none),
    Kind("hadamard", hadamard, ("positions",), noise=one_rounding),
    Kind("state", identity, ("before",), compute=_held_between, noise=_held_noise, scheme="state"),
)
