"""Golden traces: the whole report of each case, as it was when it was read and found right."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

TRACES = Path(__file__).parent.parent / "traces"
sys.path.insert(0, str(TRACES))

import make  # noqa: E402

from tracediff.judge import Policy  # noqa: E402
from tracediff.pipeline import compare_traces  # noqa: E402
from tracediff.report.json_report import render as render_json  # noqa: E402
from tracediff.result import Divergence  # noqa: E402

FIGURE = re.compile(r"(?<![\d.])(-?\d+(?:\.\d+(?:e[-+]\d+)?|e[-+]\d+))(?!\d)")  # with a point or an exponent
NOISE = 1e-10  # below it stands what rounding leaves


def same(report: str, expected: str) -> bool:
    """Whether two reports say the same: words and counts exactly, figures as far as machines agree on them.

    What is recomputed in float64 differs in the last printed digit at most; what rounding leaves may differ by a
    tenth. (With torch's AVX-512 kernels and its plain ones, on one thread and two, not a digit differs.) Line breaks
    and padding go with the length of paths and figures.
    """
    parts, others = (FIGURE.split(re.sub(r"\s+", " ", text)) for text in (report, expected))
    return (
        len(parts) == len(others)
        and parts[::2] == others[::2]
        and all(near(a, b) for a, b in zip(parts[1::2], others[1::2], strict=True))
    )


def near(a: str, b: str) -> bool:
    x, y = float(a), float(b)
    if 0 < abs(y) < NOISE:
        return abs(x - y) <= 0.1 * abs(y)
    digits, _, exponent = b.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(x - y) <= 1.01 * unit


@pytest.mark.parametrize(
    ("a", "b", "alike"),
    [
        ("local 1.54e-15, floor", "local  1.60e-15,\nfloor", True),
        ("local 1.54e-15", "local 2.54e-15", False),
        ("local 1.54e-15", "local 1.54e-14", False),
        ("local 0.8674.", "local 0.8675.", True),
        ("local 0.8674", "local 0.8684", False),
        ("x2.73 4.79e-03", "x2.74 4.78e-03", True),
        ("x2.73 4.79e-03", "x2.73 4.79e-04", False),
        ("in 3 layers", "in 4 layers", False),
        ("blk.0.attn_q", "blk.1.attn_q", False),
        ("0.5 0.5", "0.5", False),
    ],
)
def test_reports_that_differ_are_told_apart(a: str, b: str, alike: bool) -> None:
    assert same(a, b) is same(b, a) is alike


@pytest.mark.parametrize("case", make.CASES)
def test_report_is_as_expected(case: str) -> None:
    report, expected = make.report(make.compare(case)), (TRACES / case / "expected.txt").read_text()
    assert same(report, expected), report


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("case", ["clean", "three-faults", "statistics"])
def test_no_line_is_wider_than_the_terminal(case: str, width: int) -> None:
    lines = make.report(make.compare(case), width).splitlines()
    assert max(map(len, lines)) <= width


def test_what_the_reference_lacks_is_judged_by_replay(tmp_path: Path) -> None:
    """What may be unmatched is not excused: flash attention hides scores, and the candidate's may be wrong."""
    case = TRACES / "rope-pairing"
    kept = [line for line in (case / "reference.trace").read_text().splitlines()[:-1] if "_rope" not in line]
    (tmp_path / "reference.trace").write_text("\n".join([*kept, f'{{"type":"end","records":{len(kept)}}}', ""]))
    shutil.copy(case / "reference.bin", tmp_path)
    result = compare_traces(
        tmp_path / "reference.trace",
        case / "candidate.trace",
        model=case / "model.gguf",
        policy=Policy(allowed=("*_rope",)),
    )
    assert {op.op for op in result.faulty} == {op.op for op in make.compare("rope-pairing").faulty}
    assert result.verdict == "diverged"


def test_a_faulty_reference_is_said_to_be(tmp_path: Path) -> None:
    case = TRACES / "rope-pairing"
    swapped = compare_traces(case / "candidate.trace", case / "reference.trace", model=case / "model.gguf")
    assert swapped.verdict == "diverged"
    assert swapped.first_divergence == Divergence("blk.0.attn_q_rope", 0, 0, "drift")
    assert {op.op for op in swapped.ops if op.status == "drift"} == {
        op.op for op in make.compare("rope-pairing").faulty
    }
    assert make.report(swapped).splitlines()[:2] == [
        "DIVERGED: blk.0.attn_q_rope in step 0: the reference is faulty by itself, the candidate is not (of",
        "          two traces the reference is the first).",
    ]


def test_json_says_the_same() -> None:
    document = json.loads(render_json(make.compare("three-faults")))
    assert document["schema"] == "tracediff/1"
    assert document["verdict"] == "diverged"
    assert document["first_divergence"] == {"op": "blk.0.attn_v", "step": 0, "layer": 0, "reason": "local"}
    assert {(op["op"], op["cause"]["name"]) for op in document["faulty"]} == {
        ("blk.0.attn_v", "weight_transposed"),
        ("blk.0.ffn_act", "act_gelu"),
        ("blk.1.ffn_act", "act_gelu"),
        ("blk.1.attn_probs", "attention_scale"),
    }
    assert {op["status"] for op in document["ops"]} == {"ok", "faulty", "inherited"}
    assert set(document["ops"][0]) >= {
        "op", "step", "status", "reference", "candidate", "nmse", "cosine", "max_abs", "local_nmse",
        "reference_local_nmse", "floor", "arithmetic",
    }  # fmt: skip
