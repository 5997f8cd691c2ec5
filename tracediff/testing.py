"""Assertions for the tests of an engine: a failure prints the finding, not an array.

from tracediff.testing import assert_trace

def test_prefill(tmp_path):
    my_engine.run(PROMPT, trace=tmp_path / "prefill.trace")
    assert_trace(tmp_path / "prefill.trace", "model.gguf", require=["attn_*"], resolve=1e-6)
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tracediff.judge import Policy
from tracediff.pipeline import check_trace, compare_traces
from tracediff.result import Result

_LISTED = 10  # findings of a failure


def assert_trace(
    trace: Path | str,
    model: Path | str,
    *,
    require: Sequence[str] = (),
    resolve: float | None = None,
    arithmetic: str | None = None,
) -> Result:
    """Assert that every op of a trace is right by replay against the GGUF file `model`; what `tracediff check` does.

    `require` are patterns of ops that must be recorded, `resolve` the NMSE of a mistake that must show in every op.
    Raises AssertionError where something diverges or cannot be decided, TracediffError where a file cannot be read.
    """
    __tracebackhide__ = True
    policy = Policy(required=tuple(require), resolve=resolve)
    return _matching(check_trace(Path(trace), Path(model), policy=policy, arithmetic=arithmetic))


def assert_traces_match(
    reference: Path | str,
    candidate: Path | str,
    model: Path | str | None = None,
    *,
    tolerance: float | Mapping[str, float] | None = None,
    allow: Sequence[str] = (),
    require: Sequence[str] = (),
    resolve: float | None = None,
) -> Result:
    """Assert that the candidate does not diverge from the reference; what `tracediff compare` does.

    `tolerance` is an NMSE for all ops, or one for each pattern; `allow` are patterns of ops that may be missing. Raises
    as `assert_trace`, and MismatchError for traces of other tokens.
    """
    __tracebackhide__ = True
    tolerances = tolerance if isinstance(tolerance, Mapping) else {} if tolerance is None else {"*": tolerance}
    policy = Policy(tolerances, tuple(allow), tuple(require), resolve)
    opened = Path(model) if model else None
    return _matching(compare_traces(Path(reference), Path(candidate), model=opened, policy=policy))


def _matching(result: Result) -> Result:
    __tracebackhide__ = True
    if result.verdict != "match":
        raise AssertionError("\n".join(_said(result)))
    return result


def _said(result: Result) -> Iterator[str]:
    yield f"{result.candidate.path}: {result.verdict}: {result.summary}"
    yield from result.details
    for one in result.findings[:_LISTED]:
        yield f"- {one.text}" + (f" Look at {one.look}." if one.look else "")
    if len(result.findings) > _LISTED:
        yield f"... and {len(result.findings) - _LISTED} more"
