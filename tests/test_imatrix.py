"""Importance matrices, laid out as llama-imatrix writes them, against traces and one another."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import TOKENS, Models
from gguf import GGUFWriter

from tracediff.audit.imatrix import Profile, compare, profiles
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.model import Model

Cli = Callable[..., tuple[int, str, str]]


def written(out: Path, found: dict[str, Profile]) -> Path:
    """As save_imatrix does: sums of squares and counts, float32."""
    writer = GGUFWriter(out, "", use_temp_file=False)
    writer.add_string("general.type", "imatrix")
    for name, profile in found.items():
        counts = np.array(profile.counts, np.float32)
        writer.add_tensor(f"{name}.in_sum2", (profile.squares * counts[:, None]).astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module")
def trace(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trace_torch(models("tiny"), tmp_path_factory.mktemp("t") / "a.trace", TorchOptions(), TOKENS, 2)


def test_sums_are_those_of_the_definition(trace: Path, models: Models) -> None:
    from tracediff.trace.reader import Trace

    found, whole = profiles(trace, Model(models("tiny"))), Trace(trace)
    rows = np.concatenate([whole.values(whole.ops[step, "blk.1.attn_norm"]) for step in whole.steps])
    for name in ("attn_q", "attn_k", "attn_v"):
        np.testing.assert_allclose(found[f"blk.1.{name}.weight"].squares[0], np.square(rows).mean(0), rtol=1e-5)
    assert found["blk.1.ffn_down.weight"].counts == (len(TOKENS) + 2,)


def test_what_shows(trace: Path, models: Models, tmp_path: Path, cli: Cli) -> None:
    """The same; one input permuted, one scaled, one in which a channel is lost, one where all are a little off."""
    model = models("tiny")
    right = profiles(trace, Model(model))
    code, out, _ = cli("imatrix", written(tmp_path / "a.gguf", right), trace, "--model", model)
    assert (code, f"{len(right)} inputs compared, 0 differ" in out) == (0, True)
    wrong = dict(right)
    for name, change in {
        "blk.0.attn_q.weight": lambda x: x.reshape(1, 2, -1).swapaxes(1, 2).reshape(1, -1),
        "blk.0.ffn_down.weight": lambda x: x[
            :, np.where(np.arange(64) == 5, 40, np.where(np.arange(64) == 40, 5, np.arange(64)))
        ],
        "blk.1.ffn_up.weight": lambda x: 4 * x,
        "blk.1.attn_output.weight": lambda x: x * (1 + 0.14 * np.cos(np.arange(x.size) ** 2)),
        "blk.1.ffn_down.weight": lambda x: np.where(np.arange(x.size) == x.argmax(), 0, x),
    }.items():
        wrong[name] = Profile(change(right[name].squares), right[name].counts)
    other = written(tmp_path / "b.gguf", wrong)
    code, out, _ = cli("imatrix", tmp_path / "a.gguf", other)
    assert (code, "5 differ" in out) == (1, True)
    found = {one.weight: one for one in compare(right, profiles(other, None), 1e-3) if one.status != "ok"}
    assert {name: one.status for name, one in found.items()} == {
        "blk.0.attn_q.weight": "permuted",
        "blk.0.ffn_down.weight": "permuted",
        "blk.1.ffn_up.weight": "scaled",
        "blk.1.attn_output.weight": "differs",
        "blk.1.ffn_down.weight": "differs",
    }
    assert "channel 1 has that of 24" in found["blk.0.attn_q.weight"].why
    two = "2 channels in another order: B's channel 5 has that of 40, 40 has that of 5"
    assert found["blk.0.ffn_down.weight"].why == two
    assert found["blk.1.ffn_up.weight"].why == "B's is 2 times A's"


def test_what_is_refused(trace: Path, models: Models, tmp_path: Path, refused: Callable[..., str]) -> None:
    model = models("tiny")
    right = profiles(trace, Model(model))
    other = {name: Profile(one.squares, (512,)) for name, one in right.items()}
    path = written(tmp_path / "b.gguf", other)
    assert "collected over 512 tokens in A, and 19 in B" in refused("imatrix", path, trace, "--model", model)
    assert "give --model" in refused("imatrix", path, trace)
    assert "no importance matrix" in refused("imatrix", model, path)
    zeros = {name: Profile(0 * one.squares, one.counts) for name, one in right.items()}
    assert "all 0, or not finite" in refused("imatrix", written(tmp_path / "z.gguf", zeros), path)
    unlike = written(tmp_path / "u.gguf", {f"x.{name}": one for name, one in other.items()})
    assert "no weight is on both sides" in refused("imatrix", unlike, path)
