"""Recorded weights in a quantisation that no list has: recognised, and what is wrong beside it is not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tracediff.audit.unlisted import unlisted

RIGHT = np.random.default_rng(3).standard_normal((96, 192)).astype(np.float32)
RIGHT[:, 40] *= 5  # as channels are that are louder than others


def quantised(x: np.ndarray, bits: int, size: int, margin: float = 0.0) -> np.ndarray:
    """In `size` values from the least to the largest, and `margin` of that beyond, with a zero that is no integer."""
    groups = x.reshape(-1, size)
    least, most = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = (most - least) * (1 + margin) / (2**bits - 1)
    zero = -least / scale
    return ((np.round(groups / scale + zero) - zero) * scale).reshape(x.shape).astype(np.float32)


def in_nvfp4(x: np.ndarray) -> np.ndarray:
    """E2M1 in groups of 16 whose scales are E4M3 times one of the whole matrix, as compressed-tensors has it."""
    of_all = 448 * 6 / np.abs(x).max()
    groups = torch.from_numpy(x.reshape(-1, 16))
    scale = groups.abs().amax(-1, keepdim=True) / 6 * of_all
    scale = scale.to(torch.float8_e4m3fn).float() / of_all
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = ((groups / scale).abs()[..., None] - levels).abs().argmin(-1)
    return (torch.sign(groups) * levels[nearest] * scale).reshape(x.shape).numpy()


def in_bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().float().numpy()


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (quantised(RIGHT, 8, 64), "a requantisation in unknown steps"),
        (quantised(RIGHT, 8, 32, margin=0.01), "a requantisation in unknown steps"),
        (quantised(RIGHT, 6, 32), "a requantisation in unknown steps"),
        (quantised(RIGHT, 4, 16), "a requantisation in unknown steps"),
        (in_bfloat16(quantised(RIGHT, 6, 64)), "a requantisation to 45 levels at most in groups of 64"),
        (quantised(RIGHT, 4, 32), "a requantisation to 16 levels at most in groups of 32"),
        (in_bfloat16(quantised(RIGHT, 4, 32)), "a requantisation to 16 levels at most in groups of 32"),
        (in_nvfp4(RIGHT), "a requantisation to E2M1 in groups of 16"),
        (in_bfloat16(in_nvfp4(RIGHT)), "a requantisation to E2M1 in groups of 16"),
    ],
)
def test_quantisations_of_no_list_are_recognised(held: np.ndarray, words: str) -> None:
    assert unlisted(RIGHT, held) == words


def times(x: np.ndarray, factor: float, *where: slice | int) -> np.ndarray:
    x = x.copy()
    x[where] *= factor
    return x


EIGHT = quantised(RIGHT, 8, 64)
NOISE = np.random.default_rng(4).standard_normal(RIGHT.shape).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 6])
@pytest.mark.parametrize(
    "wrongly",
    [
        lambda x, step: times(x, 1 + 0.05 * step),
        lambda x, step: x + 0.05 * step,
        lambda x, step: times(x, 1 + 0.4 * step, slice(7, 8)),
        lambda x, step: x + 0.5 * step * (np.arange(96) == 7)[:, None],
        lambda x, step: times(x, 1 + 0.5 * step, slice(None), 100),
        lambda x, step: times(x, 1 + 3 * step, 7, slice(32, 64)),
        lambda x, step: times(x, 1 + 8 * step, slice(None), slice(176, 192)),
        lambda x, step: x + 6 * step * (np.arange(x.size).reshape(x.shape) == 9000),
        lambda x, step: np.roll(x, 1, 1),
        lambda x, step: RIGHT + step / 4 * NOISE,
        lambda x, step: np.floor(x / step) * step,
    ],
    ids=["all larger", "all shifted", "a row", "a row shifted", "a column", "a group", "the last groups", "a value",
         "moved", "trained on", "rounded down"],
)  # fmt: skip
def test_what_is_wrong_beside_fine_steps_is_seen(wrongly: Callable[..., np.ndarray], bits: int) -> None:
    held = wrongly(quantised(RIGHT, bits, 64), 5 / 2**bits)  # a step is about so large
    assert unlisted(RIGHT, held.astype(np.float32)) is None


@pytest.mark.parametrize(
    "wrongly",
    [
        lambda x: times(x, 1.25, 7, slice(32, 48)),
        lambda x: times(x, -1, 7, slice(32, 48)),
        lambda x: np.roll(x, 16, 1),
        lambda x: times(x, 0.5),
        lambda x: times(x, 0, slice(3)),
    ],
)
def test_what_is_wrong_beside_e2m1_is_seen(wrongly: Callable[[np.ndarray], np.ndarray]) -> None:
    assert unlisted(RIGHT, wrongly(in_nvfp4(RIGHT))) is None
