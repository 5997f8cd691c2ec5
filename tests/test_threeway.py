"""Three engines in one table: who is the outlier, from where on, and why."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Models

from tracediff.threeway import compare_three
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

Tracer = Callable[..., Path]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def three(models: Models, llama_cpp_trace: Tracer, torch_trace: Tracer, tmp_path: Path) -> Callable[..., list[Path]]:
    """llama.cpp's trace and two of torch, with these faults, named a, b and c."""

    def traces(shape: str = "tiny", b: tuple[str, ...] = (), c: tuple[str, ...] = (), **options: object) -> list[Path]:
        reference = llama_cpp_trace(models(shape), threads=1)
        made = [torch_trace(models(shape), reference, faults=faults, **options) for faults in (b, c)]
        return [reference, *(renamed(path, tmp_path / f"{name}.trace") for path, name in zip(made, "bc", strict=True))]

    return traces


def renamed(path: Path, to: Path) -> Path:
    """The trace with its data under another name, its engine's name in the header being that name."""
    header, rest = path.read_text().split("\n", 1)
    fields = json.loads(header) | {"data": f"{to.stem}.bin", "engine": f"engine {to.stem} 1.0"}
    to.write_text(json.dumps(fields) + "\n" + rest)
    path.with_suffix(".bin").rename(to.with_suffix(".bin"))
    return to


def said(cli: Cli, *arguments: object) -> tuple[int, str]:
    code, report, _ = cli("compare", *arguments)
    return code, " ".join(re.split(r"\n  (?! )", report)[0].split())


def test_all_agree(three: Callable[..., list[Path]], models: Models, cli: Cli) -> None:
    traces = three()
    n = len(Trace(traces[0]).ops)
    assert said(cli, *traces) == (0, f"MATCH: all three agree in {n} ops.")
    assert said(cli, *traces, "--model", models("tiny")) == (0, f"MATCH: all three agree in {n} ops.")


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("with_model", [False, True])
def test_one_outlier_wherever_it_stands(
    with_model: bool, position: int, three: Callable[..., list[Path]], models: Models, cli: Cli
) -> None:
    right, also_right, wrong = three(c=("rope_pairing@1",))
    order = [right, also_right]
    order.insert(position, wrong)
    model = ("--model", models("tiny")) if with_model else ()
    names = " and ".join("engine b" if path is also_right else "llama.cpp" for path in order if path is not wrong)
    assert said(cli, *order, *model) == (
        1, f"DIVERGED: {names} agree; engine c is the outlier from blk.1.attn_q_rope in step 0 on."
    )  # fmt: skip


def test_two_outliers_with_a_mistake_each(three: Callable[..., list[Path]], models: Models) -> None:
    traces = three(b=("act_gelu@blk.0.ffn_act",), c=("bias_missing@1",))
    result = compare_three(traces, model=models("tiny"))
    found = {(op.op, n, op.cause[n].name) for op in result.ops for n in op.outliers}
    assert found == {
        ("blk.0.ffn_act", 1, "act_gelu"),
        *((f"blk.1.attn_{x}", 2, "bias_missing") for x in "qkv"),
    }
    assert {op.status for op in result.ops} == {"ok", "outlier", "inherited"}


def test_a_mistake_that_two_share_needs_the_model(three: Callable[..., list[Path]], models: Models, cli: Cli) -> None:
    fault = ("attention_scale@0",)
    traces = three(b=fault, c=fault)
    where = "blk.0.attn_probs in step 0"
    assert said(cli, *traces) == (
        1, f"DIVERGED: engine b and engine c agree; llama.cpp is the outlier from {where} on."
    )  # fmt: skip
    code, line = said(cli, *traces, "--model", models("tiny"))
    assert (code, line) == (
        1,
        f"DIVERGED: engine b (from {where} on) and engine c (from {where} on) are outliers; llama.cpp is not.",
    )


def test_no_two_agree(three: Callable[..., list[Path]], cli: Cli) -> None:
    traces = three(b=("act_gelu@blk.0.ffn_act",), c=("act_swapped@blk.0.ffn_act",))
    assert said(cli, *traces) == (1, "DIVERGED: no two engines agree from blk.0.ffn_act in step 0 on.")


def test_what_comes_first_is_said_first(three: Callable[..., list[Path]], cli: Cli) -> None:
    """Each is wrong in its own way before two of them agree again."""
    traces = three(
        b=("act_gelu@blk.0.ffn_act", "attention_scale@1"), c=("act_swapped@blk.0.ffn_act", "attention_scale@1")
    )
    code, line = said(cli, *traces)
    assert code == 1
    assert line.startswith("DIVERGED: no two engines agree from blk.0.ffn_act in step 0 on")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_cut(width: int, three: Callable[..., list[Path]], models: Models, cli: Cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _, report, _ = cli("compare", *three(c=("act_gelu@blk.1.ffn_act",)), "--model", models("tiny"))
    lines = report.split("\n")
    assert max(map(len, lines)) <= width
    assert "…" not in report
    assert lines == [line.rstrip() for line in lines]


REPORT = """\
DIVERGED: llama.cpp and engine b agree; engine c is the outlier from blk.1.ffn_act in step 0 on.

What is wrong by itself, whatever came before
  - engine c: ffn_act in layer 1: GELU (erf) is used for SiLU. (NMSE up to ~)
    look at which activation the model has there

Hidden states, NMSE of each pair (1 llama.cpp, 2 engine b, 3 engine c)
  op                  outlier    1 - 2    1 - 3    2 - 3  local 1  local 2  local 3
  token_embd          ok         ~
  blk.0.ffn_residual  ok         ~
  blk.1.ffn_residual  inherited  ~
  output_norm         inherited  ~
  output              inherited  ~

Around the first outlier (step 0)
  op                  outlier    1 - 2    1 - 3    2 - 3  local 1  local 2  local 3
  blk.1.attn_kqv      ok         ~
  blk.1.attn_output   ok         ~
  blk.1.attn_residual ok         ~
  blk.1.ffn_norm      ok         ~
  blk.1.ffn_gate      ok         ~
  blk.1.ffn_up        ok         ~
  blk.1.ffn_act       engine c   ~
  blk.1.ffn_down      inherited  ~
  blk.1.ffn_residual  inherited  ~
  output_norm         inherited  ~
  output              inherited  ~
"""


def test_the_report(three: Callable[..., list[Path]], models: Models, cli: Cli) -> None:
    traces = three(c=("act_gelu@blk.1.ffn_act",))
    _, report, _ = cli("compare", *traces, "--model", models("tiny"))
    sides, report = report.split("\n\n", 1)
    assert "engine b: engine b 1.0, 111 ops" in sides
    lines = [re.sub(r"(?<!local)( (0|[\d.]+(e-\d+)?))+$", " ~", " ".join(line.split())) for line in report.split("\n")]
    lines = [re.sub(r"up to [\d.]+", "up to ~", line) for line in lines]
    assert lines == [" ".join(line.split()) for line in REPORT.split("\n\n", 1)[1].split("\n")]


def test_json(three: Callable[..., list[Path]], models: Models, cli: Cli) -> None:
    traces = three(c=("act_gelu@blk.1.ffn_act",))
    code, text, _ = cli("compare", *traces, "--model", models("tiny"), "--json", "-")
    document = json.loads(text)
    assert code == 1
    assert {key: document[key] for key in ("schema", "verdict", "summary", "names")} == {
        "schema": "tracediff/three/1",
        "verdict": "diverged",
        "summary": "llama.cpp and engine b agree; engine c is the outlier from blk.1.ffn_act in step 0 on.",
        "names": ["llama.cpp", "engine b", "engine c"],
    }
    assert len(document["ops"]) == len(Trace(traces[0]).ops)
    (first, *_) = [op for op in document["ops"] if op["status"] == "outlier"]
    assert (first["op"], first["outliers"], first["cause"][2]["name"]) == ("blk.1.ffn_act", [2], "act_gelu")
    assert first["nmse"][0] < 1e-10 < first["nmse"][1]


def test_an_op_that_one_side_lacks(three: Callable[..., list[Path]], tmp_path: Path, cli: Cli) -> None:
    traces = three()
    lines = traces[2].read_text().split("\n")
    kept = [line for line in lines if '"blk.0.attn_k"' not in line and '"end"' not in line]
    traces[2].write_text("\n".join([*kept[:-1], json.dumps({"type": "end", "records": len(kept) - 1}), ""]))
    code, report, _ = cli("compare", *traces)
    n = len(Trace(traces[0]).ops)
    assert code == 0
    assert f"MATCH: all three agree in {n - 3} ops; 3 others are not on all three sides.\n" in report
    assert "  blk.0.attn_k in step 0: c.trace has no such record\n" in report
    code, report, _ = cli("compare", *traces, "--require", "attn_k")
    assert code == 1
    assert "DIVERGED: all agree where they can be compared, but not every op is on all three sides.\n" in report
    assert cli("compare", *traces, "--require", "attn_k", "--allow", "blk.0.*")[0] == 0


def test_a_nan_on_one_side_alone(three: Callable[..., list[Path]], cli: Cli) -> None:
    import numpy as np

    traces = three()
    record = Trace(traces[1]).ops[0, "blk.1.ffn_up"]
    with traces[1].with_suffix(".bin").open("r+b") as data:
        data.seek(record.offset or 0)
        data.write(np.float32(np.nan).tobytes())
    assert said(cli, *traces) == (
        1, "DIVERGED: llama.cpp and engine c agree; engine b is the outlier from blk.1.ffn_up in step 0 on."
    )  # fmt: skip


def test_weights_alone_diverge(three: Callable[..., list[Path]], models: Models, cli: Cli, tmp_path: Path) -> None:
    traces = three()
    before = Trace(traces[2])
    record = before.weights["blk.0.ffn_norm.weight"]
    with traces[2].with_suffix(".bin").open("r+b") as data:
        data.seek(record.offset or 0)
        data.write((before.values(record) + 1).astype("f4").tobytes())
    code, report, _ = cli("compare", *traces, "--model", models("tiny"))
    assert (code, report.split("\n")[0]) == (1, "DIVERGED: all ops agree, but weights are wrong in memory.")
    assert (
        "engine c: blk.0.ffn_norm.weight: wrong in memory: 1 was added to every value; in a GGUF file it is in "
        "already; yet ffn_norm in layer 0 is computed as it should be: is the weight recorded in another form"
    ) in " ".join(report.split())


def test_refusals(three: Callable[..., list[Path]], refused: Callable[..., str], tmp_path: Path) -> None:
    traces = three()
    assert refused("compare", *traces, "--arithmetic", "exact") == (
        "--arithmetic pins that of one candidate: compare two traces, or let it be fitted."
    )
    with TraceWriter(tmp_path / "other.trace", "x") as writer:
        writer.step(0, (1,), (0,))
    assert refused("compare", *traces[:2], tmp_path / "other.trace").startswith(f"{tmp_path / 'other.trace'}: ")
