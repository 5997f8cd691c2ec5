"""Graphs lifted from llama.cpp's own: the same as the hand-written ones where there are those, and sound everywhere."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Models
from gguf import GGUFWriter
from test_engines import SHAPES

from tracediff.model.families import build_graph, load_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import SOURCES, Axis, Op, View, sizes
from tracediff.model.hparams import Rope
from tracediff.model.lift import described
from tracediff.model.lift.lift import lift
from tracediff.model.synthetic import QWEN25_05B, Shape, add_metadata, add_tokenizer
from tracediff.names import layer_of, layers_of, wanted
from tracediff_reference.description import decode
from tracediff_reference.protocol import Options

Tiny = Callable[[str], Path]
STEPS = ((3, 3), (1, 9), (11, 300))  # tokens, positions


# --- the hand-written families -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize(
    "name", ["llama, odd head counts", "llama3", "qwen2, tied", "qwen3", "rope yarn, attn_factor", "rope linear"]
)
def test_a_family_lifted_is_the_hand_written_one(name: str, flash_attn: bool, models: Models) -> None:
    file = GGUFFile(models(SHAPES[name]))
    by_hand = build_graph(file)
    lifted = lift(described.describe(file, Options(flash_attn=flash_attn)), file).graph
    assert {*lifted.ops} == {*by_hand.ops}
    assert [different(op, lifted[op.name]) for op in by_hand if different(op, lifted[op.name])] == []
    assert (lifted.matmul_type, lifted.cached()) == (by_hand.matmul_type, by_hand.cached())
    assert [*lifted.ops][:2] == ["token_embd", "blk.0.attn_norm"]
    assert [*lifted.ops][-1] == "output"


def different(a: Op, b: Op) -> dict[str, tuple[Any, Any]]:
    """The fields that differ, but for what llama.cpp holds in float32."""
    found = {field.name: (getattr(a, field.name), getattr(b, field.name)) for field in fields(Op)}
    return {name: pair for name, pair in found.items() if not alike(*pair)}


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=1e-7)
    if isinstance(a, Rope):
        return all(alike(getattr(a, field.name), getattr(b, field.name)) for field in fields(Rope))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    return bool(a == b)


def test_a_family_that_differs_is_told() -> None:
    op = Op("a", "rope", ("b",), ("T", 4), attrs={"rope": Rope("halves", 4, 10_000.0)})
    assert different(op, op.with_attrs(rope=Rope("halves", 4, 10_000.001))) == {}
    assert set(different(op, op.with_attrs(rope=Rope("neighbours", 4, 10_000.0)))) == {"attrs"}
    assert set(different(op, replace(op, inputs=("c",), views=(View(("T",), (1,)),)))) == {"inputs", "views"}


# --- any architecture --------------------------------------------------------------------------------------------

EXPERTS = """
blk.0.ffn_norm                     T 96
blk.0.ffn_gate_inp                 T 7
blk.0.ffn_moe_probs                T 7
blk.0.ffn_moe_topk                 T 3
blk.0.ffn_moe_weights              T 3 1
blk.0.ffn_moe_weights_sum          T 1
blk.0.ffn_moe_weights_sum_clamped  T 1
blk.0.ffn_moe_weights_norm         T 3
blk.0.ffn_gate_exps                T 3 64
blk.0.ffn_up_exps                  T 3 64
blk.0.ffn_moe_swiglu               T 3 64
blk.0.ffn_down_exps                T 3 96
blk.0.ffn_moe_weighted             T 3 96
blk.0.ffn_moe_weighted.add         T 96
blk.0.ffn_moe_out                  T 96
blk.0.ffn_residual                 T 96
"""


def test_names_of_a_mixture_of_experts(tiny: Tiny) -> None:
    table = [line.split() for line in EXPERTS.strip().split("\n")]
    names = [name for name, *_ in table]
    ops = {op.name: op for op in load_graph(tiny("qwen3moe"))}
    assert [name for name in ops if name in names] == names
    assert [[name, *map(str, ops[name].axes)] for name in names] == table
    assert ops["blk.0.ffn_gate_exps"].weights[0].name == "blk.0.ffn_gate_exps.weight"
    assert ops["blk.0.ffn_down_exps"].inputs == ("blk.0.ffn_moe_swiglu", "blk.0.ffn_moe_topk")


@pytest.mark.parametrize("arch", ["bert", "eurobert", "nemotron_h", "deepseek4"])
def test_hidden_states_are_those_that_layers_end_in(arch: str, tiny: Tiny) -> None:
    """In a norm, in a sum without a name, in what llama.cpp calls otherwise: `--capture layers` recorded none."""
    graph = load_graph(tiny(arch))
    ends = [[op for op in graph.layer(n) if wanted(op.name, "layers")] for n in layers_of(graph.ops)]
    assert [len(of_layer) for of_layer in ends] == [1] * len(ends)
    for (end,), after in pairwise(ends):
        assert any(layer_of(reader.name) == layer_of(after[0].name) for reader, _ in graph.readers(end.name))


def test_windows_are_on_their_layers(tiny: Tiny) -> None:
    """Gemma 3 has five layers with a window and one without, which the metadata does not say."""
    softmax = [op for op in load_graph(tiny("gemma3")) if op.kind == "softmax"]
    assert [op.attrs.get("window") for op in softmax] == [5, 5, 5, 5, 5, None, 5]


def test_a_state_is_what_the_step_before_left(tiny: Tiny) -> None:
    graph = load_graph(tiny("mamba2"))
    state, handed = graph["blk.1.conv_state"], graph["blk.1.conv_state_next"]
    assert (state.kind, state.inputs, state.axes) == ("state", (handed.name,), (1056,))
    assert handed.axes == (352, 3)
    order = [*graph.ops]
    assert order.index(state.name) < order.index("blk.1.conv_input") < order.index(handed.name)
    scan = graph["blk.0.ssm_scan"]
    assert scan.inputs[0] == "blk.0.ssm_state"
    assert [str(axis) for axis in scan.axes] == ["7680+192T"]


def test_sinks_and_latent_attention(tiny: Tiny) -> None:
    probs = load_graph(tiny("gpt-oss"))["blk.0.attn_probs"]
    assert [weight.name for weight in probs.weights] == ["blk.0.attn_sinks.weight"]
    latent = load_graph(tiny("deepseek2"))
    assert latent["blk.0.attn_scores"].inputs == ("blk.0.attn_q_rope", "blk.0.attn_k_rope")
    weighted = latent["blk.0.attn_kqv"]  # V is the first 64 channels of K's 80
    assert (weighted.inputs, weighted.past) == (("blk.0.attn_probs", "blk.0.attn_k_rope"), (False, True))
    assert weighted.views[1] == View(("S", 1, 64), (80, 64, 1))


@pytest.mark.parametrize("arch", ["bert", "neo-bert", "deepseek2", "qwen3next", "gpt-oss"])
def test_flash_attention_has_the_same_ops(arch: str, tiny: Tiny) -> None:
    """Without a cache, of a fused projection, latent, gated, with sinks."""
    file = GGUFFile(tiny(arch))
    plain, flash = (lift(described.describe(file, Options(flash_attn=flash)), file) for flash in (False, True))
    assert {op.name: op for op in plain.graph} == {op.name: op for op in flash.graph}
    hidden = {name for name in plain.shown if name not in flash.shown}
    assert {name.rpartition(".")[2] for name in hidden} == {"attn_scores", "attn_probs"}


SOME = ("gemma2", "gemma3n", "phi3", "qwen3moe", "qwen3next", "gpt-oss", "deepseek2", "mamba2", "falcon", "plamo2")


@pytest.mark.parametrize("arch", SOME)
def test_what_is_read_is_there(arch: str, tiny: Tiny) -> None:
    """Every input is an op before it, a source, or a state; every view lies within the value that it is of."""
    graph = load_graph(tiny(arch))
    made = {*SOURCES}
    for op in graph:
        assert made.issuperset(op.inputs) or op.kind == "state", op
        for name, view, past in zip(op.inputs, op.views, op.past or (False,) * len(op.inputs), strict=False):
            if view is not None:
                assert_within(view, ("S", *graph[name].axes[1:]) if past else graph[name].axes)
        made.add(op.name)
    assert [*graph.ops][-1] == "output"
    assert graph["output"].axes == ("T", 320)
    used = {weight.name for op in graph for weight in op.weights}
    assert {name for name in GGUFFile(tiny(arch)).tensors if name.startswith("blk.0.")} <= used


def assert_within(view: View, axes: Iterable[Axis]) -> None:
    for step in STEPS:
        shape, strides = sizes(view.shape, *step), sizes(view.strides, *step)
        (offset,) = sizes((view.offset,), *step)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        assert last < math.prod(sizes(axes, *step)), (view, step)


DRY = """
import sys
from pathlib import Path
from tracediff_reference import capture
from tracediff_reference.protocol import DescribeRequest
capture._RESERVE = ()
capture.write_description(DescribeRequest(model=sys.argv[1], out=sys.argv[2]))
"""


@pytest.mark.parametrize("arch", ["gemma3", "mamba", "neo-bert"])  # windows, states, no cache
def test_without_the_function_that_reserves_a_graph(arch: str, tiny: Tiny, tmp_path: Path) -> None:
    """Tokens are fed and nothing is computed: the same graph."""
    model, out = tiny(arch), tmp_path / "graph"
    subprocess.run([sys.executable, "-c", DRY, model, out], check=True, capture_output=True, timeout=100)
    description, file = decode(out.read_bytes()), GGUFFile(model)
    assert description
    found, right = lift(description, file), lift(described.describe(file), file)
    assert found == right


def test_an_architecture_that_nobody_knows(tmp_path: Path, refused: Callable[..., str]) -> None:
    out = GGUFWriter(tmp_path / "new.gguf", "brand-new")
    out.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    message = refused("inspect", tmp_path / "new.gguf")
    assert message.startswith(f"llama.cpp cannot load {tmp_path / 'new.gguf'}, for the reason below.")
    assert "unknown model architecture: 'brand-new'" in message


# --- the child and the cache -------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRACEDIFF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_kept_description_is_used(cache: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GGUFFile(models("tiny"))
    first = described.describe(file)
    (entry,) = cache.iterdir()
    monkeypatch.setattr(described, "Child", None)  # nobody to ask
    assert described.describe(file) == first
    good = entry.read_bytes()
    for damage in (b"", good[:-1], good.replace(b"attn_norm", b"attn_nerm")):
        entry.write_bytes(damage)
        with pytest.raises(TypeError, match="not callable"):
            described.describe(file)


def test_a_damaged_description_is_made_again(cache: Path, models: Models) -> None:
    file = GGUFFile(models("tiny"))
    first = described.describe(file)
    (entry,) = cache.iterdir()
    good = entry.read_bytes()
    entry.write_bytes(good[:1000])
    assert described.describe(file) == first
    assert entry.read_bytes() == good


def test_what_changes_a_graph_is_in_the_key(cache: Path, models: Models) -> None:
    file = GGUFFile(models("tiny"))
    plain, flash = (described.describe(file, Options(flash_attn=flash)) for flash in (False, True))
    assert {node.op for node in flash.nodes} - {node.op for node in plain.nodes} == {"FLASH_ATTN_EXT", "CPY"}
    described.describe(file, Options(threads=1, n_ctx=512))
    described.describe(GGUFFile(models("qwen2")))
    assert len([*cache.iterdir()]) == 3


@pytest.mark.parametrize("folder", ["", "/dev/null/nowhere"])
def test_without_a_cache(folder: str, models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACEDIFF_CACHE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert described.describe(GGUFFile(models("tiny"))).nodes
    assert not [*tmp_path.iterdir()]


def test_the_oldest_go_first(cache: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours: the folder that TRACEDIFF_CACHE names may hold graphs of somebody else."""
    monkeypatch.setattr(described, "_MOST", 2)
    cache.mkdir()
    (cache / "mine.graph").touch()
    os.utime(cache / "mine.graph", (0, 0))
    for age, name in enumerate(("a" * 64, "b" * 64, "c" * 64)):
        (cache / f"{name}.graph").touch()
        os.utime(cache / f"{name}.graph", (0, 10**9 - age))
    described.describe(GGUFFile(models("tiny")))
    kept = {entry.stem for entry in cache.iterdir()}
    assert {"mine", "a" * 64} < kept
    assert len(kept) == 3


MEASURE = """
import resource, sys
from pathlib import Path
from tracediff.model.families import describe, lift
from tracediff.model.gguf_file import GGUFFile
file = GGUFFile(Path(sys.argv[1]))
print(len(lift(describe(file), file).graph.ops))
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss >> 10)
"""


def test_a_file_of_half_a_billion_weights(tmp_path: Path, cache: Path) -> None:
    """At most 2 s and 200 MB, of which 0.6 s and 80 MB were used: mostly llama.cpp reading the vocabulary."""
    path = header_alone(tmp_path / "big.gguf", QWEN25_05B)
    out = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True).stdout
    n_ops, seconds, megabytes = map(float, out.split())
    assert n_ops == 3 + 24 * 17
    assert seconds < 2
    assert megabytes < 200


def header_alone(path: Path, shape: Shape) -> Path:
    """A model whose tensors are a hole in the file: nothing reads them."""
    out = GGUFWriter(path, shape.arch)
    add_metadata(out, shape)
    add_tokenizer(out, shape.n_vocab)
    sizes = {"token_embd.weight": (shape.n_vocab, shape.n_embd), "output_norm.weight": (shape.n_embd,)}
    for n in range(shape.n_layer):
        of_layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (shape.n_embd,), "ffn_norm.weight": (shape.n_embd,)}
        for x, heads in (("q", shape.n_head), ("k", shape.n_head_kv), ("v", shape.n_head_kv)):
            of_layer |= {f"attn_{x}.weight": (heads * shape.d, shape.n_embd), f"attn_{x}.bias": (heads * shape.d,)}
        of_layer["attn_output.weight"] = (shape.n_embd, shape.n_head * shape.d)
        of_layer |= {f"ffn_{x}.weight": (shape.n_ff, shape.n_embd) for x in ("gate", "up")}
        of_layer["ffn_down.weight"] = (shape.n_embd, shape.n_ff)
        sizes |= {f"blk.{n}.{name}": size for name, size in of_layer.items()}
    nbytes = 0
    for name, size in sizes.items():
        dtype = np.dtype(np.float16 if len(size) > 1 else np.float32)
        out.add_tensor_info(name, size, dtype, math.prod(size) * dtype.itemsize)
        nbytes += -(-math.prod(size) * dtype.itemsize // 32) * 32
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    out.close()
    os.truncate(path, path.stat().st_size + nbytes + 32)
    return path
