"""The assertions that an engine's own tests use."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TOKENS, Models

from tracediff.errors import TracediffError
from tracediff.testing import assert_trace, assert_traces_match

CASE = Path(__file__).parent.parent / "traces" / "rope-pairing"
REFERENCE, CANDIDATE, MODEL = CASE / "reference.trace", CASE / "candidate.trace", CASE / "model.gguf"
FINDING = (
    "- attn_q_rope and attn_k_rope in both layers: rope pairs neighbouring channels (2i, 2i + 1); this model pairs "
    "halves (i, i + n/2). Look at the rope kernel's pairing, and the family's rope type."
)


def test_what_is_right_passes_and_is_returned() -> None:
    assert assert_trace(REFERENCE, str(MODEL), require=["attn_*"], resolve=1e-9).verdict == "match"
    assert assert_traces_match(REFERENCE, REFERENCE, MODEL).verdict == "match"
    assert assert_traces_match(str(REFERENCE), CANDIDATE, tolerance=2.0).verdict == "match"


def test_a_failure_prints_the_finding() -> None:
    with pytest.raises(AssertionError) as failed:
        assert_trace(CANDIDATE, MODEL)
    lines = str(failed.value).splitlines()
    assert lines[0].startswith(f"{CANDIDATE}: diverged: attn_q_rope and attn_k_rope in both layers: ")
    assert lines[-1] == FINDING
    with pytest.raises(AssertionError, match="attn_q_rope is the first op over its tolerance"):
        assert_traces_match(REFERENCE, CANDIDATE, tolerance={"*_rope": 1e-3})
    with pytest.raises(AssertionError) as failed:
        assert_trace(REFERENCE, MODEL, resolve=1e-15)
    assert "undecided: " in str(failed.value)


def test_what_is_missing_fails_where_it_is_required(models: Models, torch_trace: Callable[..., Path]) -> None:
    trace = torch_trace(models("tiny"), tokens=TOKENS[:5], capture="layers")
    with pytest.raises(AssertionError, match="not recorded, and required"):
        assert_trace(trace, models("tiny"), require=["attn_q"])
    with pytest.raises(TracediffError, match="matches no op"):
        assert_trace(trace, models("tiny"), require=["attn_x"])
