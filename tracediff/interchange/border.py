"""Layouts of others made ours where they come in: batch axes, heads, and the channel order of Q and K."""

import math

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import Array
from tracediff.model.conversion import PERMUTED_OPS
from tracediff.model.pairing import neighbours
from tracediff.names import kind_of, local_name, token_axis
from tracediff.trace.format import STORAGE, possible

_HUGGING_FACE = ("transformers", "transformer_lens", "sglang")


def shape_of(op: str, shape: tuple[int, ...], n_tokens: int) -> tuple[int, ...]:
    """The shape without a batch axis of 1, and with heads side by side where our op has them so.

    Raises InterchangeError for a shape that no trace can hold.
    """
    if not possible(shape):
        raise InterchangeError(f"{op}: no tensor has the shape {list(shape)}. Correct it.")
    if token_axis(op):  # n_head, T, S
        while len(shape) > 3 and shape[0] == 1:
            shape = shape[1:]
        return shape
    while len(shape) > 2 and shape[0] == 1 and shape[1] == n_tokens:
        shape = shape[1:]
    if len(shape) == 1 and n_tokens == 1:
        shape = (1, *shape)
    return (shape[0], math.prod(shape[1:])) if kind_of(op) == "weighted_values" and len(shape) == 3 else shape


def rows(op: str, shape: tuple[int, ...]) -> int:
    """How many tokens a value of this shape has rows for."""
    axis = token_axis(op)
    return shape[axis] if len(shape) > axis else 0


def checked(name: str, array: Array) -> np.ndarray:
    """The values; raises InterchangeError for a type that no trace can hold."""
    if array.dtype not in STORAGE:
        raise InterchangeError(
            f"{name} holds {array.dtype}: a trace holds float64, float32, float16 and bfloat16. Save it as float32."
        )
    return array.values


def is_rotated_by(op: str, whose: str | None) -> bool:
    """Whether the op's channels stand in another's order in models of which GGUF files pair neighbours in rope.

    convert_hf_to_gguf.py permutes the rows of Q and K for the architecture llama: Hugging Face pairs channel i of a
    head with i + n/2, those GGUF files 2i with 2i + 1.
    """
    return whose in _HUGGING_FACE and local_name(op) in PERMUTED_OPS


def pair_neighbours(op: str, values: np.ndarray, head_dim: int) -> np.ndarray:
    """Halves of each head interleaved: channel (half, i) becomes (i, half). Shape unchanged.

    Raises InterchangeError for rows that are no multiple of heads.
    """
    if not len(values) or values.size % (len(values) * head_dim):
        raise InterchangeError(
            f"{op}: rows of the shape {list(values.shape[1:])} are no heads of {head_dim}, as this model has them. "
            "Give the file that the engine ran."
        )
    return neighbours(values.reshape(len(values), -1), head_dim).reshape(values.shape)
