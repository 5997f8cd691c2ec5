"""Reproducers: each exits 1 as it is written, and 0 once the marked function is right."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reproducers
from conftest import TOKENS, Models
from test_real_arithmetic import traced

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.graph import Op
from tracediff.model.model import Model
from tracediff.model.synthetic import Shape
from tracediff.numerics.kinds.norm import rms_norm
from tracediff.reproduce import reproduce

CASE = Path(__file__).parent.parent / "traces" / "three-faults"
RIGHT = {
    "blk.0.attn_v": "return input0.astype(float) @ weight0.astype(float).T",
    "blk.1.ffn_act": "x = input0.astype(float); return x / (1 + np.exp(-x)) * input1",
}


def run(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-I", folder / "reproduce.py"], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("op", RIGHT)
def test_it_fails_until_it_is_repaired(op: str, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    command = ("reproduce", CASE / "candidate.trace", "--model", CASE / "model.gguf", "--op", op, "-o", tmp_path)
    assert cli(*command)[0] == 0
    code, said = run(tmp_path)
    assert code == 1
    assert " values are wrong, NMSE " in said
    script = (tmp_path / "reproduce.py").read_text()
    (tmp_path / "reproduce.py").write_text(script.replace('return data["recorded"]', RIGHT[op]))
    assert run(tmp_path) == (0, f"0 of {said.split()[2]} values are wrong, NMSE {run(tmp_path)[1].split()[-1]}\n")
    assert cli(*command)[0] == 0  # over its own


@pytest.mark.parametrize(
    "case", ["norm, another epsilon", "rope of a decode step", "values, groups of heads", "router"]
)
def test_mistakes_of_many_kinds(case: str, tmp_path: Path, models_folder: Path) -> None:
    """All of them: `python benchmarks/reproducers.py`."""
    size, before, after, said = reproducers.reproduced(reproducers.CASES[case], tmp_path, models_folder)
    assert size <= 1_000_000
    assert (before, after) == (1, 0), said


def test_it_is_made_with_the_weights_that_the_engine_holds(tmp_path: Path, models: Models) -> None:
    """Norm weights in float16, recorded so, and a norm that is 1% too large."""

    def scaled(op: Op) -> Op:
        wrong = replace(op, function=lambda x, w, *, eps: 1.01 * rms_norm(x, w, eps=eps))
        return wrong if "ffn_norm" in op.name else op

    model = models("llama", "F32")
    path = traced(model, tmp_path / "a.trace", change=scaled, held=in_float16)
    reproduce(path, Model(model), "blk.1.ffn_norm", 0, tmp_path / "out")
    with np.load(tmp_path / "out" / "data.npz") as data:
        x, weight, right, bound = (data[key] for key in ("input0", "weight0", "right", "bound"))
        assert (np.abs(data["recorded"] - right) > bound).all()
    normed = x / np.sqrt(np.square(x.astype(float)).mean(-1, keepdims=True) + 1e-5)
    assert (weight == weight.astype(np.float16)).all()
    assert (np.abs(normed * weight - right) <= bound).all()


def in_float16(name: str, values: np.ndarray) -> np.ndarray | None:
    return values.astype(np.float16).astype(np.float32) if "norm" in name else None


LONG = Shape("qwen2", n_layer=1, n_embd=128, n_head=8, n_head_kv=2, n_ff=128, n_ctx=512)


@pytest.mark.parametrize("case", ["scores, groups of heads", "softmax, no scale", "values, groups of heads"])
def test_of_attention_one_head_and_some_queries_are_kept(case: str, tmp_path: Path, models_folder: Path) -> None:
    one = reproducers.CASES[case]
    local = one.op.partition(".attn_")[2]
    long = replace(one, model=LONG, fault=f"{one.fault.partition('@')[0]}@blk.0.attn_{local}")
    tokens = tuple((37 * i + 11) % 250 for i in range(300))
    size, before, after, said = reproducers.reproduced(long, tmp_path, models_folder, tokens)
    assert 100_000 < size <= 1_000_000
    assert (before, after) == (1, 0), said
    assert "# cut to what is off most: [" in (tmp_path / "reproducer/reproduce.py").read_text()


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_a_large_one_is_cut(
    models: Models, torch_trace: Callable[..., Path], tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    trace = torch_trace(models("demo"), tokens=TOKENS, n_decode=0, faults=("weight_transposed@blk.2.ffn_up",))
    out = tmp_path / "out"
    assert cli("reproduce", trace, "--model", models("demo"), "--op", "blk.2.ffn_up", "-o", out)[0] == 0
    assert (out / "data.npz").stat().st_size <= 1_000_000
    assert run(out)[0] == 1
    script = (
        (out / "reproduce.py").read_text().replace('return data["recorded"]', "return input0.astype(float) @ weight0.T")
    )
    (out / "reproduce.py").write_text(script)
    assert run(out)[0] == 0


def test_files_of_others_stay(refused: Callable[..., str], tmp_path: Path) -> None:
    command = ("reproduce", CASE / "candidate.trace", "--model", CASE / "model.gguf", "--op", "blk.0.attn_v", "-o")
    data = tmp_path / "data.npz"
    data.write_bytes(b"mine")
    assert f"{data} exists, and is not what tracediff writes there" in refused(*command, tmp_path)
    assert data.read_bytes() == b"mine"
    assert [*tmp_path.iterdir()] == [data]
    assert f"{data} is a file. Name a folder" in refused(*command, data)


def test_what_is_right_or_not_there_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    command = ("reproduce", CASE / "candidate.trace", "--model", CASE / "model.gguf", "-o", tmp_path / "x", "--op")
    assert "is as it should be: there is nothing to reproduce" in refused(*command, "blk.0.attn_q")
    assert "it has no record blk.9.attn_q in step 0" in refused(*command, "blk.9.attn_q")
    shutil.copy(CASE / "candidate.bin", tmp_path)
    named = (CASE / "candidate.trace").read_text().replace('"blk.0.attn_v"', '"my_value"')
    (tmp_path / "candidate.trace").write_text(named)
    given = ("reproduce", tmp_path / "candidate.trace", "--model", CASE / "model.gguf", "-o", tmp_path / "x")
    assert "my_value is no op of this model" in refused(*given, "--op", "my_value")
    assert not (tmp_path / "x").exists()


def test_rope_has_the_factors_of_the_length_that_was_fed(
    tiny: Callable[[str], Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    """Of phi3 others beyond 1,024 positions."""
    trace = trace_torch(tiny("phi3"), tmp_path / "a.trace", TorchOptions(), [5 + 7 * i % 240 for i in range(1030)])
    command = ("reproduce", trace, "--model", tiny("phi3"), "--op", "blk.1.attn_q_rope", "-o", tmp_path / "x")
    assert "is as it should be" in refused(*command)


def test_a_step_of_one_of_several_sequences(
    models: Models, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    model, trace = models("tiny"), tmp_path / "batch.trace"
    given = ("--tokens", "1,2,3", "--tokens", "4,5,6,7", "--decode", 1, "--fault", "rope_pairing@1", "-o", trace)
    assert cli("trace", model, *given)[0] == 0
    command = ("reproduce", trace, "--model", model, "--op", "blk.1.attn_q_rope", "-o", tmp_path / "op")
    code, _, said = cli(*command, "--sequence", 1)
    assert (code, "recorded [4, " in said) == (0, True), said
    assert " in step 0 of sequence 1 of " in (tmp_path / "op/reproduce.py").read_text()
    assert run(tmp_path / "op")[0] == 1
    assert "in step 1 of sequence 2." in cli(*command, "--sequence", 2, "--step", 1)[2]
