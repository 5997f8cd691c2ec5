"""What is a match, what diverges, and what is undecided: exit codes 0, 1 and 2, each with its report and JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Models, Pair, logits_of, some_of, the_message

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.pipeline import Effort, check_trace
from tracediff.trace.reader import Trace

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(models: Models) -> Path:
    return models("tiny")


def words(report: str) -> str:
    return " ".join(report.split())


def line_of(pair: Pair, step: int, op: str) -> int:
    return next(i for i, line in enumerate(pair.lines) if f'"step":{step},"op":"{op}"'.encode() in line)


def values_of(pair: Pair, step: int, op: str) -> np.ndarray:
    """The candidate's values of a record, to be written to."""
    record = Trace(pair.path).ops[step, op]
    return np.memmap(pair.data, np.float32, "r+", record.offset, record.shape)


# ---- Steps and ops that one side lacks


def without_step_1(path: Path, out: Path) -> Path:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in lines if line.get("step") != 1]
    kept[-1]["records"] = len(kept) - 1
    out.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return out


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("shorter", ["reference", "candidate"])
def test_a_step_that_one_side_lacks(shorter: str, with_model: bool, pair: Pair, model: Path, cli: Cli) -> None:
    short = without_step_1(pair.reference, pair.path.parent / "short.trace")
    sides = (short, pair.path) if shorter == "reference" else (pair.path, short)
    options = ["--model", model] * with_model
    code, report, error = cli("compare", *sides, *options)
    assert (code, error) == (0, "")
    assert "in step 1: short.trace has no such step" in words(report)
    if not with_model:
        assert words(report).startswith(
            "MATCH: nothing diverges in the 37 ops that both hold, compared by drift. 37 others are in "
            f"{pair.path} alone."
        )
    elif shorter == "candidate":
        assert "It has no step 1, which the reference has." in words(report)
    assert cli("compare", *sides, *options, "--require", "output")[0] == int(shorter == "candidate")


@pytest.mark.parametrize("with_model", [False, True])
def test_a_step_that_one_of_three_lacks(with_model: bool, pair: Pair, model: Path, cli: Cli) -> None:
    short = without_step_1(pair.reference, pair.path.parent / "short.trace")
    for traces in ((short, pair.path, pair.reference), (pair.path, pair.reference, short)):
        options = ["--model", model] * with_model
        code, report, error = cli("compare", *traces, *options)
        assert (code, error) == (0, "")
        assert "short.trace has no such step" in report
        assert cli("compare", *traces, *options, "--require", "output")[0] == 1


HIDDEN_STATES = ("token_embd", "ffn_residual", "output_norm", "output")


@pytest.mark.parametrize(
    ("kept", "covers"),
    [
        (lambda op: "attn_scores" not in op, "they cover 74 of the model's 74 ops"),
        (lambda op: op.endswith(HIDDEN_STATES), "they cover 74 of the model's 74 ops"),
        (lambda op: op.startswith("blk."), "they cover 70 of the model's 74 ops, not output_norm and output"),
    ],
)
def test_any_subset_will_do(kept: Callable[[str], bool], covers: str, pair: Pair, model: Path, cli: Cli) -> None:
    """What a trace does not hold is said. It fails for those who ask for it, in continuous integration for example."""
    subset = some_of(pair.path, pair.path.with_name("subset.trace"), kept)
    lacking = next(op for _, op in Trace(pair.path).ops if not kept(op))
    n = len(Trace(subset).ops)
    drift = ("compare", pair.reference, subset)
    for command in (("check", subset, "--model", model), (*drift, "--model", model)):
        code, report, error = cli(*command)
        assert (code, error) == (0, "")
        assert words(report).startswith(f"MATCH: nothing diverges in {n} records, replayed")
        assert f"{covers}." in words(report)
        code, report, _ = cli(*command, "--require", lacking)
        assert code == 1
        assert words(report).startswith(f"DIVERGED: {lacking} in step 0: ")
    code, report, _ = cli(*drift)
    assert code == 0
    assert f"the {n} ops that both hold, compared by drift. {74 - n} others are in {pair.reference} alone." in words(
        report
    )
    assert cli(*drift, "--require", lacking)[0] == 1
    assert cli(*drift, "--require", "*", "--allow", "*")[0] == 0


def test_what_neither_side_holds_can_be_required_too(pair: Pair, model: Path, cli: Cli) -> None:
    logits = [some_of(path, path.with_name(f"{path.stem}-logits.trace"), lambda op: op == "output")
              for path in (pair.reference, pair.path)]  # fmt: skip
    code, report, _ = cli("compare", *logits, "--model", model, "--require", "blk.1.attn_q")
    assert code == 1
    assert words(report).startswith("DIVERGED: blk.1.attn_q in step 0: not recorded, and required.")
    code, _, error = cli("compare", *logits, "--require", "blk.1.attn_q")  # which nobody knows to be an op at all
    assert the_message(code, error).startswith("--require 'blk.1.attn_q' matches no op of the traces. Near it: output.")


def test_nan_in_an_op_that_the_reference_lacks(pair: Pair, cli: Cli) -> None:
    reference = some_of(pair.reference, pair.path.with_name("subset.trace"), lambda op: op != "blk.1.ffn_act")
    assert cli("compare", reference, pair.path)[0] == 0
    values_of(pair, 0, "blk.1.ffn_act")[2, 3] = np.nan
    code, report, _ = cli("compare", reference, pair.path)
    assert code == 1
    assert words(report).startswith(
        "DIVERGED: blk.1.ffn_act in step 0: it holds NaN or Inf, and could not be replayed."
    )


# ---- Shapes


def test_a_cache_that_is_full_is_one_mistake(model: Path, torch_trace: Callable[..., Path]) -> None:
    """Of an engine whose scores have as many keys in every later step: it was a mistake in each."""
    path = torch_trace(model, n_decode=4)
    lines = [*map(json.loads, path.read_text().splitlines())]
    n_keys = next(line["shape"][2] for line in lines if line.get("op") == "blk.0.attn_scores" and line["step"] == 1)
    for line in lines:
        if line.get("op", "").endswith(("attn_scores", "attn_probs")) and line["step"] > 1:
            line["shape"] = [*line["shape"][:2], n_keys]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [finding.text for finding in check_trace(path, model).findings]
    said = f"the number of keys stays {n_keys}, as in a window, or in a cache that is full."
    assert [text for text in texts if "keys" in text] == [
        f"attn_scores and attn_probs in both layers, in steps 2 to 4: {said}"
    ]


@pytest.mark.parametrize(
    ("step", "op", "shape", "text"),
    [
        (1, "blk.1.attn_scores", [6, 1, 4], "1 key fewer than positions so far: some are forgotten"),
        (
            1,
            "blk.1.attn_scores",
            [6, 1, 6],
            "1 key more than positions so far: some are no position's (a padded cache, or keys of other sequences?)",
        ),
        (1, "blk.0.attn_probs", [6, 1, 4], "1 key fewer than positions so far: some are forgotten"),
        (
            1,
            "blk.0.attn_probs",
            [6, 1, 8],
            "3 keys more than positions so far: some are no position's (a padded cache, or keys of other sequences?)",
        ),
        (0, "blk.0.attn_q_rope", [4, 5, 8], "1 head fewer than this model's"),
        (0, "blk.0.attn_q", [4, 40], "8 channels fewer than this model's"),
        (0, "blk.0.attn_q", [4, 8, 6], "the axes in another order"),
        (0, "blk.0.ffn_norm", [4, 24], "24 channels fewer than this model's"),
        (0, "blk.0.ffn_norm", [5, 40], "1 token more and 8 channels fewer than this model's"),
        (1, "output", [2, 160], "1 token more and 160 channels fewer than this model's"),
    ],
)
def test_another_shape_is_a_finding(
    step: int, op: str, shape: list[int], text: str, pair: Pair, model: Path, cli: Cli
) -> None:
    """It says which axis; whatever else the trace holds is judged all the same."""
    pair.change(line_of(pair, step, op), shape=shape)
    local = op.split(".")[-1]
    for command in (("check", pair.path), ("compare", pair.reference, pair.path)):
        code, report, error = cli(*command, "--model", model, "--json", pair.path.with_suffix(".json"))
        assert (code, error) == (1, "")
        where = f"{local} in layer {op[4]}, in step {step}" if op.startswith("blk.") else f"{op}, in step {step}"
        assert words(report).startswith(f"DIVERGED: {where}: {text}. first at {op} in step {step}: shape {shape}; this")
        result = json.loads(pair.path.with_suffix(".json").read_text())
        assert [(f["op"], f["cause"]["name"], f["cause"]["nmse"]) for f in result["faulty"]] == [(op, "shape", None)]
        assert sum(o["local_nmse"] is not None for o in result["ops"]) == 73
    code, report, _ = cli("compare", pair.reference, pair.path)
    assert code == 1
    assert words(report).startswith(f"DIVERGED: {op} in step {step}: shapes differ: ")
    assert cli("compare", pair.reference, pair.path, "--model", model, "--allow", op)[0] == 0
    assert cli("compare", pair.reference, pair.path, "--allow", op)[0] == 0
    assert cli("compare", pair.path, pair.reference, "--model", model)[0] == 0  # of two traces the first is not judged


def test_what_is_made_of_a_record_of_another_shape_is_not_judged(pair: Pair, model: Path, cli: Cli) -> None:
    """Wrong as it is, that is no mistake of its own; where it is right, the record alone has another shape."""
    pair.change(line_of(pair, 0, "blk.0.ffn_norm"), shape=[4, 24])
    values_of(pair, 0, "blk.0.ffn_gate")[:] = 0
    code, report, _ = cli("check", pair.path, "--model", model, "--json", pair.path.with_suffix(".json"))
    assert code == 1
    result = json.loads(pair.path.with_suffix(".json").read_text())
    assert [(f["op"], f["step"]) for f in result["faulty"]] == [("blk.0.ffn_norm", 0), ("blk.0.ffn_act", 0)]
    of = {o["op"]: o["status"] for o in result["ops"] if o["step"] == 0}
    assert (of["blk.0.ffn_gate"], of["blk.0.ffn_up"]) == ("unmatched", "ok")
    said = "blk.0.ffn_gate in step 0: made of blk.0.ffn_norm, which has another shape: there is nothing to replay"
    assert said in words(report)


def test_fewer_rows_than_tokens_may_be_some_of_them(pair: Pair, model: Path, cli: Cli) -> None:
    """As where an engine computes the logits of the last token alone, and does not say so: no mistake of the engine."""
    pair.change(line_of(pair, 0, "output"), shape=[1, 320])
    for command in (("check", pair.path), ("compare", pair.reference, pair.path)):
        code, report, error = cli(*command, "--model", model)
        assert (code, error) == (0, "")
        assert "they cover 73 of the model's 74 ops, output in some steps alone." in words(report)
        assert (
            "output in step 0: shape [1, 320]; this model's is [4, 320]: if it holds some tokens, say which in its rows"
            in words(report)
        )
        assert cli(*command, "--model", model, "--require", "output")[0] == 1  # nothing was said of it
        assert cli(*command, "--model", model, "--require", "attn_*")[0] == 0
    assert cli("compare", pair.reference, pair.path)[0] == 0


# ---- Never a match


def test_a_weight_of_another_size(pair: Pair, model: Path, cli: Cli) -> None:
    weight = json.loads(pair.lines[1])
    pair.change(1, shape=[47])
    for command in (("check", pair.path, "--model", model), ("compare", pair.reference, pair.path)):
        code, report, _ = cli(*command)
        assert code == 1
        wrong = f"DIVERGED: {weight['weight']}: wrong in memory: it holds 47 values, where 48 belong"
        assert words(report).startswith(wrong)


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_traces_of_nothing_but_zeros_or_nan(value: float, pair: Pair, model: Path, cli: Cli) -> None:
    for data in (pair.data, pair.reference.with_suffix(".bin")):
        np.full(data.stat().st_size // 4, value, np.float32).tofile(data)
    no_weights = [
        some_of(path, path.with_name(f"{path.stem}-ops.trace"), lambda op: True) for path in (pair.reference, pair.path)
    ]
    for path in no_weights:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [line for line in lines if line["type"] != "weight"]
        kept[-1]["records"] = len(kept) - 1
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    code, report, error = cli("compare", *no_weights)
    assert the_message(code, error).startswith("token_embd, attn_norm in 2 layers, attn_q in 2 layers, ")
    assert report.startswith("UNDECIDED: ")
    assert cli("check", no_weights[1], "--model", model, "--time", 0)[0] == 1
    assert cli("compare", *no_weights, "--model", model, "--time", 0)[0] == 1


def test_a_trace_cut_off_in_its_first_step(pair: Pair, model: Path, cli: Cli) -> None:
    """What follows was never looked at; in a later step, all that went before it was."""
    whole, json_ = pair.lines, pair.path.with_suffix(".json")
    pair.write(whole[: line_of(pair, 0, "blk.1.attn_k")])
    for command in (("check", pair.path, "--model", model), ("compare", pair.reference, pair.path, "--model", model),
                    ("compare", pair.reference, pair.path), ("compare", pair.path, pair.reference)):  # fmt: skip
        code, report, error = cli(*command, "--json", json_)
        assert the_message(code, error).startswith(f"{pair.path} breaks off in its first step: it ends after line ")
        assert "".join(report.split()).startswith(f"UNDECIDED:{pair.path}breaksoff")  # a long path is broken
        result = json.loads(json_.read_text())
        assert (result["verdict"], result["first_divergence"]) == ("undecided", None)
        assert [f"tracediff: {doubt}.\n" for doubt in result["undecided"]] == [error]
    for end in (line_of(pair, 1, "blk.1.attn_k"), line_of(pair, 0, "output") + 1):
        pair.write(whole[:end])
        code, report, _ = cli("check", pair.path, "--model", model)
        assert code == 0
        assert "cut off: it ends after line" in words(report)


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ([0, 0, 0, 0], "step 0 says that it has the positions [0, 0, 0, 0], where [0, 1, 2, 3] follow"),
        ([3, 2, 1, 0], "step 0 says that it has the positions [3, 2, 1, 0], where [3, 4, 5, 6] follow"),
        ([1, 2, 3, 4], "step 1 says that it has the positions [4], where [5] follow"),
    ],
)
def test_positions_that_do_not_follow(positions: list[int], said: str, pair: Pair, model: Path, cli: Cli) -> None:
    """Rope was right for those that do: what the trace says of itself is not what was computed."""
    step = next(i for i, line in enumerate(pair.lines) if b'"type":"step","step":0' in line)
    pair.change(step, positions=positions)
    for command in (("check", pair.path, "--model", model), ("compare", pair.reference, pair.path)):
        code, _, error = cli(*command)
        if positions[0] and "--model" in command:
            assert (code, error) == (1, "")  # nothing was rotated as at the first of these
        else:
            assert f"{said}. Record those that the engine computes with." in the_message(code, error)


def test_positions_that_are_not_the_references(pair: Pair, cli: Cli) -> None:
    """Attention of the first layer is the same wherever the text begins; a trace of norms shows nothing of it."""
    norms = some_of(pair.path, pair.path.with_name("norms.trace"), lambda op: "norm" in op)
    norms.write_bytes(norms.read_bytes().replace(b"[0, 1, 2, 3]", b"[5, 6, 7, 8]").replace(b"[4]", b"[9]"))
    code, _, error = cli("compare", pair.reference, norms)
    assert the_message(code, error) == (
        f"step 0 has the positions [5, 6, 7, 8] in {norms}, [0, 1, 2, 3] in {pair.reference}. Run both at the same "
        "positions."
    )


# ---- Blind, and how much a match says


@pytest.mark.slow
def test_roundings_that_may_hide_a_mistake_are_no_match(models: Models, torch_trace: Any, cli: Cli) -> None:
    """A right engine that sums in another order than llama.cpp: after eight layers most of its roundings have turned,
    and its logits are as far from right as a mistake would take them.
    """
    model = models("demo", "Q4_K_M")
    full = torch_trace(model, arithmetic="llama.cpp", n_decode=0)
    logits, json_ = logits_of(full), full.with_suffix(".json")
    for command in (("check", logits), ("compare", full, logits)):
        code, report, error = cli(*command, "--model", model, "--json", json_)
        assert the_message(code, error).startswith("output: replay is blind here: roundings may hide any mistake. ")
        assert the_message(code, error).endswith(
            "Record blk.3.ffn_residual as well: of 139 ops that are judged as one 70 at most are left."
        )
        assert report.startswith("UNDECIDED: output: replay is blind here")
        result = json.loads(json_.read_text())
        assert (result["verdict"], result["resolving"]) == ("undecided", None)
        assert {op["status"] for op in result["ops"] if op["candidate"]} == {"undecided"}
        assert [(s["blind"], s["resolving"]) for s in result["coverage"]["segments"]] == [(True, None)]
    # What drifts no more than its tolerance is decided by that, where the tolerance says anything.
    assert cli(*command, "--model", model, "--tolerance", "0.05")[0] == 0
    assert cli(*command, "--model", model, "--tolerance", "0.06")[0] == 2
    code, report, error = cli("check", full, "--model", model, "--json", json_)
    assert (code, error) == (0, "")
    result = json.loads(json_.read_text())
    assert result["undecided"] == []
    assert result["resolving"]["nmse"] < 1e-6


@pytest.mark.slow
def test_what_a_match_says_would_have_been_seen_is_seen(pair: Pair, model: Path, cli: Cli) -> None:
    """Noise of the size that each op claims to resolve, in one op after another."""
    clean, rng = check_trace(pair.path, model), np.random.default_rng(0)
    assert clean.verdict == "match"
    for op in (op for op in clean.ops if op.step == 0 and op.layer in (None, 1)):
        values = values_of(pair, op.step, op.op)
        kept, noise = values.copy(), rng.standard_normal(values.shape)
        size = np.sqrt(2 * op.resolving * np.sum(kept.astype(float) ** 2) / np.sum(noise**2))
        values[...] = (kept.astype(float) + size * noise).astype(np.float32)
        located = check_trace(pair.path, model, effort=Effort(seconds=0.0)).faulty  # no cause is sought
        assert op.op in {found.op for found in located}
        values[...] = kept


def test_a_match_must_resolve_what_it_is_asked_for(pair: Pair, model: Path, cli: Cli) -> None:
    for command, enough, too_much in (
        (("check", pair.path, "--model", model), 1e-11, 1e-13),
        (("compare", pair.reference, pair.path, "--model", model), 1e-11, 1e-13),
        (("compare", pair.reference, pair.path), 1e-8, 1e-10),
    ):
        assert cli(*command, "--resolve", enough)[0] == 0
        code, report, error = cli(*command, "--resolve", too_much)
        assert "a mistake of the size that --resolve asks for may not show (only one above" in the_message(code, error)
        assert report.startswith("UNDECIDED: ")
    statistics = pair.path.with_name("s.trace")
    assert cli("compare", statistics, pair.path)[0] == 0
    assert cli("compare", statistics, pair.path, "--resolve", "1")[0] == 2  # whatever size: it may be a permutation
    for number in ("0", "-1", "nan"):
        assert the_message(*cli("check", pair.path, "--model", model, "--resolve", number)[::2]).startswith(
            "--resolve "
        )


def test_a_divergence_is_one_whatever_else_is_open(pair: Pair, model: Path, cli: Cli) -> None:
    values_of(pair, 0, "blk.1.ffn_act")[:] *= 2
    code, report, error = cli("check", pair.path, "--model", model, "--resolve", "1e-30")
    assert (code, error) == (1, "")
    assert report.startswith("DIVERGED: ffn_act in layer 1, in step 0: ")


def test_json_alone_leaves_the_reason_on_standard_error(pair: Pair, model: Path, cli: Cli) -> None:
    code, output, error = cli("check", pair.path, "--model", model, "--resolve", "1e-30", "--json", "-")
    assert json.loads(output)["undecided"][0] + "." == the_message(code, error)


def test_a_trace_of_another_file_of_the_model_says_so(models: Models, torch_trace: Any) -> None:
    """All matmuls are wrong then, and nothing else; what the trace says of itself is the first thing to look at."""
    right, other = models("tiny", "F16"), models("tiny", "Q8_0")
    trace = torch_trace(other)
    result = check_trace(trace, right, effort=Effort(seconds=5))
    assert result.verdict == "diverged"
    assert result.details[-1] == (
        f"{trace}: its first line says that the engine multiplied with Q8_0 weights of {other.name}; {right.name} has "
        "F16. If it read another file, judge it with that one: --model."
    )
    assert not any("its first line says" in note for note in check_trace(trace, other).notes)
    header, _, rest = trace.read_text().partition("\n")  # an engine that tells no type of its weights
    trace.write_text(json.dumps({**json.loads(header), "model": f"../{other.name}", "weights": None}) + "\n" + rest)
    assert check_trace(trace, right, effort=Effort(seconds=5)).details[-1] == (
        f"{trace}: its first line says that the model is ../{other.name}; {right.name} does not explain 2 "
        "matmuls. If it read another file, judge it with that one: --model."
    )
    assert not any("its first line says" in note for note in check_trace(trace, other).notes)


@pytest.mark.parametrize(("far_below", "verdict"), [(4e-3, "match"), (-1.0, "undecided")])
def test_what_leaves_far_less_than_a_blind_floor_is_told(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, far_below: float, verdict: str
) -> None:
    """In bfloat16 scores may be rounded once more before the softmax: of loud ones that hides much, were it done."""
    monkeypatch.setattr("tracediff.replay.look.BLIND", 0.03)
    monkeypatch.setattr("tracediff.replay.look.FAR_BELOW", far_below)
    model, trace = models("loud"), tmp_path / "x.trace"
    trace_torch(model, trace, TorchOptions(dtype="bf16"), (256, 84, 104, 101, 32, 113, 117, 105, 99, 300, 12), 2)
    result = check_trace(trace, model, effort=Effort(seconds=0))
    widest = max((op.local for op in result.ops if op.local), key=lambda local: local.floor)
    assert result.verdict == verdict
    assert widest.floor > 0.03
    if verdict == "match":
        assert widest.resolving == pytest.approx(4 * widest.nmse)  # the triangle inequality of what is left with itself
