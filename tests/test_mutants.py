"""Mutants of the example engine, a few: benchmarks/mutants.py runs hundreds."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from mutants import MODELS, Bench

from tracediff.pipeline import check_trace


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("model", MODELS, ids=["-".join(model) for model in MODELS])
def test_the_unmutated_engine_has_no_fault(bench: Bench, model: tuple[str, str]) -> None:
    """It adds up in sequence: the error of a decoded token's norm is one factor on its whole row."""
    result = check_trace(bench.clean(model).path, bench.folder / "-".join(model) / "model.gguf")
    assert result.verdict == "match"
