"""Mixtures of experts: matmuls with the matrices that a router chose."""

import math

import torch
from torch import Tensor

from tracediff.numerics.floors import Noise
from tracediff.numerics.kinds.kind import Call, Energy, Kind, Made, one_rounding
from tracediff.numerics.kinds.layout import as_places
from tracediff.numerics.kinds.linear import linear, matrix, product, rounded_whole
from tracediff.numerics.kinds.matmul import noise_of_sums


def _linear_id(call: Call) -> Tensor:
    """[T, n, n_in], ids [T, used] -> [T, used, n_out]: each chosen expert's matrix by itself; n is 1 or `used`."""
    x, weights, op = call.inputs[0], call.weights, call.op
    ids, is_expert = as_places(call.inputs[1], op.weights[0].shape[0])
    x = x.unflatten(-1, (-1, op.weights[0].shape[-1])) if x.ndim == 2 else x
    call, x = rounded_whole(call, x)
    biases = weights.load(op.weights[1]) if len(op.weights) > 1 else None
    made: list[tuple[Tensor, Energy]] = []
    places: list[Tensor] = []
    for expert in ids.unique().tolist():
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        bias = None if biases is None else biases[expert]
        made.append(product(call, x[token, slot % x.shape[1]], matrix(op.weights[0], expert), bias))
        places.append(token * ids.shape[1] + slot)
    order = torch.cat(places).argsort()

    def in_place(rows: Tensor) -> Tensor:
        return rows[order].unflatten(0, tuple(ids.shape))

    if call.energy:
        call.energy.take(Energy.joined([energy for _, energy in made]), in_place)
    y = in_place(torch.cat([y for y, _ in made]))
    return y if bool(is_expert.all()) else y.masked_fill(~is_expert[..., None], math.nan)


def add_id(x: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    """[T, used, n], ids [T, used], [experts, n] -> x with each expert's own row added."""
    at, is_expert = as_places(ids, len(bias))
    return x + bias[at].masked_fill(~is_expert[..., None], math.nan)


def _noise(made: Made) -> Noise:
    return noise_of_sums(made, made.op.weights[0].shape[-1])


KINDS = (
    Kind("linear_id", linear, ("x", "ids"), ("token", "slot", "channel"), _linear_id, _noise, scheme="linear"),
    Kind("add_id", add_id, ("x", "ids"), ("token", "slot", "channel"), noise=one_rounding, scheme="vectors"),
)
