"""Values of unknown names are found by what they are, behind a mistake too; and nothing is named that is not proved."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.interchange.importer import Options, import_trace
from tracediff.interchange.layouts import distance, layouts
from tracediff.interchange.naming import meaning
from tracediff.model.families import load_graph
from tracediff.trace.reader import Trace

Cli = Callable[..., tuple[int, str, str]]
IDS = (3, 141, 59, 26, 53, 58, 97)


class Engine:
    """A transformers model of random weights with hooks on all its modules, and its GGUF file."""

    def __init__(self, family: str, folder: Path, broken: str = "") -> None:
        hugging_face = pytest.importorskip("test_transformers")  # it makes the models, and skips without transformers
        made = hugging_face.FAMILIES[family]
        self._model = hugging_face.build(made).float()
        self.gguf = hugging_face.export(self._model, made, folder / "model.gguf")
        self._seen: dict[str, np.ndarray] = {}
        for name, module in self._model.named_modules():
            if name and name == broken:
                module.register_forward_hook(
                    lambda module, inputs, output: output * torch.linspace(0.9, 1.1, output.shape[-1])
                )
            if name not in ("", "model"):
                module.register_forward_hook(lambda module, inputs, output, name=name: self._see(name, output))

    def _see(self, name: str, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        value = output[0] if isinstance(output, tuple) else output
        self._seen[name] = value.numpy().copy()

    def values(self) -> dict[str, np.ndarray]:
        """Of each module, as they are called."""
        with torch.no_grad():
            self._model(torch.tensor([IDS]))
        return self._seen

    def reference(self, out: Path, tokens: tuple[int, ...] = IDS) -> Path:
        """A trace of another engine."""
        return trace_torch(self.gguf, out, TorchOptions(), tokens)


def scrambled(values: dict[str, np.ndarray]) -> dict[str, str]:
    """A name that says nothing for each module."""
    return {name: f"t{n * 37 % 101:03d}" for n, name in enumerate(values)}


def found(said: list[str]) -> dict[str, str]:
    """The ops by the foreign names, as it was said."""
    return {line.split()[0]: line.split()[2].rstrip(":") for line in said if " = " in line}


@pytest.mark.parametrize(
    ("family", "broken", "op"),
    [
        ("llama", "model.layers.1.self_attn.q_proj", "blk.1.attn_q"),  # which stands in another order in the file
        ("qwen3", "model.layers.0.input_layernorm", "blk.0.attn_norm"),  # nothing but the embedding equals
        ("qwen2", "model.layers.2.mlp.up_proj", "blk.2.ffn_up"),
    ],
)
def test_a_real_engines_modules_without_their_names(
    family: str, broken: str, op: str, tmp_path: Path, cli: Cli
) -> None:
    engine = Engine(family, tmp_path, broken)
    values, reference = engine.values(), engine.reference(tmp_path / "r.trace")
    codes = scrambled(values)
    arrays = {codes[name]: value for name, value in values.items()}
    for code in [*arrays][1::3]:
        arrays[code] = np.ascontiguousarray(arrays[code].swapaxes(-1, -2))
    np.savez(tmp_path / "a.npz", **arrays)
    options = ("--match", reference, "--model", engine.gguf)
    code, _, output = cli("import", "npz", tmp_path / "a.npz", "-o", tmp_path / "a.trace", *options)
    assert code == 0, output
    said = output.splitlines()
    truth = {codes[name]: meaning(name).op for name in values}
    got = found(said)
    assert got == {code: truth[code] for code in got}
    assert {*got.values()} == {op for op in truth.values() if op}
    assert sum("what comes after follows from it alone" in line for line in said) == 1
    assert sum("has no name" in line for line in said) == 4  # rotary_emb, and what silu makes of the gates
    trace = Trace(tmp_path / "a.trace")
    assert trace.tokens == [*IDS]
    code, output, _ = cli("check", tmp_path / "a.trace", "--model", engine.gguf, "--time", "1", "--json", "-")
    assert code == 1
    assert [faulty["op"] for faulty in json.loads(output)["faulty"]] == [op]


def test_without_the_model_nothing_behind_the_mistake_is_named(tmp_path: Path, cli: Cli) -> None:
    engine = Engine("qwen2", tmp_path, "model.layers.1.self_attn.k_proj")
    values, reference = engine.values(), engine.reference(tmp_path / "r.trace")
    codes = scrambled(values)
    np.savez(tmp_path / "a.npz", **{codes[name]: value for name, value in values.items()})
    code, _, output = cli("import", "npz", tmp_path / "a.npz", "-o", tmp_path / "a.trace", "--match", reference)
    assert code == 0
    said = output.splitlines()
    got = found(said)
    assert got == {code: meaning(name).op for name, code in codes.items() if code in got}
    assert {"blk.1.attn_q", "blk.1.attn_v"} <= {*got.values()}
    assert "blk.1.attn_k" not in got.values()
    assert not any(op.startswith("blk.2") for op in got.values())
    k = codes["model.layers.1.self_attn.k_proj"]
    assert any(line.startswith(f"{k} [1, 7, 32] has no name: between blk.1.attn_q and blk.1.attn_v") for line in said)
    assert "With --model FILE.gguf" in output


def test_values_in_no_order_are_found_by_value_alone(tmp_path: Path) -> None:
    engine = Engine("qwen2", tmp_path, "model.layers.1.self_attn.q_proj")
    values, reference = engine.values(), engine.reference(tmp_path / "r.trace")
    np.savez(tmp_path / "a.npz", **{f"t{n}": value for n, value in enumerate(reversed([*values.values()]))})
    said: list[str] = []
    options = Options(match=reference)
    import_trace("npz", tmp_path / "a.npz", tmp_path / "a.trace", options,
                 graph=load_graph(engine.gguf), model=engine.gguf, say=said.append)  # fmt: skip
    truth = {f"t{n}": meaning(name).op for n, name in enumerate(reversed([*values]))}
    got = found(said)
    assert got == {name: truth[name] for name in got}
    assert "blk.1.attn_q" not in got.values()
    assert any(line.startswith("The values do not stand in the order in which they were computed") for line in said)


def test_other_tokens_and_noise_get_no_name(tmp_path: Path, cli: Cli) -> None:
    engine = Engine("qwen2", tmp_path)
    reference = engine.reference(tmp_path / "r.trace", tuple(reversed(IDS)))
    rng = np.random.default_rng(0)
    arrays = {f"t{n}": value for n, value in enumerate(engine.values().values())}
    np.savez(tmp_path / "a.npz", noise=rng.standard_normal((1, 7, 96)).astype(np.float32), **arrays)
    options = ("--match", reference, "--model", engine.gguf)
    code, _, error = cli("import", "npz", tmp_path / "a.npz", "-o", tmp_path / "a.trace", *options)
    assert code == 2
    assert "no op's output is in it" in error


def test_a_massive_activation_does_not_make_layers_equal() -> None:
    """One value of 10,000 has all the signal; the others differ."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 9, 64))
    x[0, 3] = y[0, 3] = 1e5
    assert np.square(x - y).sum() / np.square(y).sum() < 1e-6
    assert distance(x, y) > 0.1
    assert distance(y * (1 + 1e-5), y) < 1e-6


def test_layouts_of_heads() -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_normal((5, 3, 8))
    for x in (y, y.reshape(1, 5, 24), y.transpose(1, 0, 2)[None], y.reshape(5, 24).T, y.ravel()):
        assert min(distance(layout.ours(x, y.shape), y) for layout in layouts(x.shape, y.shape)) == 0
    assert not [*layouts((5, 3, 4), y.shape)]
