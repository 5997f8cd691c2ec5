"""Ops that were computed with weights that are wrong in memory, and what is wrong besides."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Models
from test_real_arithmetic import LLAMA, append_weight, faulty, traced

from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.pipeline import check_trace

UP, K = "blk.1.ffn_up.weight", "blk.0.attn_k.weight"


def noisy(values: np.ndarray) -> np.ndarray:
    by = np.random.default_rng(1).standard_normal(values.shape).astype(np.float32)
    return values + 0.1 * values.std() * by


def same(op: Op) -> Op:
    return op


def up_times_1_03(op: Op) -> Op:
    return replace(op, function=lambda x, weight, bias: 1.03 * (x @ weight.T)) if op.name == "blk.1.ffn_up" else op


def gelu(op: Op) -> Op:
    if not op.name.endswith("ffn_act"):
        return op
    return replace(op, function=lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up)


def checked(
    models: Models,
    out: Path,
    wrong: dict[str, Callable[[np.ndarray], np.ndarray]],
    change: Callable[[Op], Op] = same,
    used: bool = True,
    capture: str = "all",
) -> tuple[list[tuple[int, str]], Sequence[str]]:
    """Faulty records and what is said of a run with these weights, or one that merely recorded them so."""
    model = models(LLAMA, "F16")
    right = Model(model).tensors
    held = {name: np.ascontiguousarray(make(right.get(name))) for name, make in wrong.items()}
    path = traced(
        model, out, change=change, held=lambda name, _: held.get(name) if used else None, capture=capture, n_decode=1
    )
    for name, values in held.items():
        append_weight(path, name, values)
    result = check_trace(path, model)
    return faulty(result), [finding.text for finding in result.findings]


WRONGLY = {
    "other values, which follow the right ones (correlation 0.9951): in a quantisation that is not known, or another "
    "version's of this model": noisy,
    "the same values in another order": lambda x: np.roll(x, 5, 1),  # as if its input was rotated
    "30 of 256 rows are wrong: 100 to 129": lambda x: np.concatenate([x[:100], 0 * x[100:130], x[130:]]),
    # As where the scale of a last block is that of the block before it.
    "32 of 128 values of each row are wrong: 96 to 127": lambda x: np.concatenate([x[:, :96], 1.3 * x[:, 96:]], 1),
}


@pytest.mark.parametrize(("words", "make"), WRONGLY.items())
def test_what_a_weight_explains_is_said_once(
    words: str, make: Callable[[np.ndarray], np.ndarray], models: Models, tmp_path: Path
) -> None:
    wrong, texts = checked(models, tmp_path / "x.trace", {UP: make})
    assert wrong == [(0, "blk.1.ffn_up"), (1, "blk.1.ffn_up")]
    assert texts == [f"{UP}: wrong in memory: {words}; so ffn_up in layer 1 is wrong."]


@pytest.mark.parametrize(("words", "make"), WRONGLY.items())
def test_a_mistake_beside_a_wrong_weight_is_named(
    words: str, make: Callable[[np.ndarray], np.ndarray], models: Models, tmp_path: Path
) -> None:
    """It was hidden: the op was wrong because of the weight, and that was all."""
    _, texts = checked(models, tmp_path / "x.trace", {UP: make}, up_times_1_03)
    assert texts == [
        f"{UP}: wrong in memory: {words}; so ffn_up in layer 1 is wrong.",
        "ffn_up in layer 1: every value is 1.03 times what it should be.",
    ]


def test_the_loader_is_to_be_looked_at_where_ops_are_right_for_what_it_holds(models: Models, tmp_path: Path) -> None:
    """A case of the op was to be made, which is right."""
    checked(models, tmp_path / "x.trace", {UP: lambda x: np.concatenate([x[:, :96], 1.3 * x[:, 96:]], 1)})
    step = check_trace(tmp_path / "x.trace", models(LLAMA, "F16")).next
    assert step.command.startswith("tracediff weights ")
    assert step.why == f"look at how the loader reads {UP}: the ops are right for what it holds; then run this"


@pytest.mark.slow
def test_mistakes_behind_hidden_states_are_named_beside_wrong_weights(models: Models, tmp_path: Path) -> None:
    wrong = {UP: lambda x: np.roll(x, 5, 1), K: lambda x: x[::-1]}
    _, texts = checked(models, tmp_path / "x.trace", wrong, gelu, capture="layers")
    assert texts == [
        "every F16 tensor that was recorded (2): wrong in memory: the same values in another order (seen in "
        "ffn_residual in 2 layers).",
        "both layers (seen in ffn_residual): ffn_act: GELU (tanh) is used for SiLU.",
    ]


def test_weights_that_were_not_multiplied_explain_nothing(models: Models, tmp_path: Path) -> None:
    """An engine that dumps its weights in another form than it uses."""
    wrong, texts = checked(models, tmp_path / "x.trace", {UP: lambda x: np.roll(x, 5, 1)}, up_times_1_03, used=False)
    assert wrong == [(0, "blk.1.ffn_up"), (1, "blk.1.ffn_up")]
    assert texts == [
        f"{UP}: wrong in memory: the same values in another order.",
        "ffn_up in layer 1: every value is 1.03 times what it should be.",
    ]
