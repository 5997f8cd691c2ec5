"""The demo: the README's first command, whose exit code says whether it found and named what it planted."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tracediff.demo import not_found
from tracediff.model.model import Model

TRACES = Path(__file__).parent.parent / "traces"
sys.path.insert(0, str(TRACES))

import make  # noqa: E402


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 0, ""),
        # Layer 7's activations are so large that no eps shows there: the demo does not claim that it did.
        (
            ("--fault", "eps@7", "--fault", "no_mask"),
            1,
            "The demo did not find what it planted: eps@7 was planted and is not named.\n",
        ),
    ],
)
def test_it_succeeds_where_it_names_what_it_planted(
    options: tuple[str, ...], code: int, said: str, cli: Callable[..., tuple[int, str, str]]
) -> None:
    ended, report, error = cli("demo", *options)
    assert ended == code
    assert report.startswith("DIVERGED: ")
    assert error.partition("--save FOLDER keeps them.\n")[2] == said


def test_every_mistake_must_be_named_where_it_was_planted_and_no_other() -> None:
    case, faults = "three-faults", make.CASES["three-faults"][1].faults
    result, model = make.compare(case), Model(TRACES / case / "model.gguf")
    assert not_found(result, model, faults) == []
    assert not_found(result, model, (*faults, "eps@0")) == ["eps@0 was planted and is not named"]
    assert not_found(result, model, ("weight_transposed@blk.1.attn_v", *faults[1:])) == [
        "weight_transposed@blk.1.attn_v was planted and is not named",
        "blk.0.attn_v was called faulty (weight_transposed)",
    ]
