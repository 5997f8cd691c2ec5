"""Any torch model in two lines: an engine laid out in another way than the file, recorded and judged by replay."""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import tiny_models
import torch
from conftest import Models
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.granitemoeshared import modeling_granitemoeshared as granite

import tracediff
from tracediff.engine.taps import find_taps
from tracediff.engine.torch_run import TorchOptions
from tracediff.engine.transformers_run import load, trace_model
from tracediff.errors import EngineError
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Weight
from tracediff.model.model import Model
from tracediff.model.pairing import neighbours
from tracediff.model.synthetic import Shape
from tracediff.model.weights import Weights
from tracediff.pipeline import check_trace
from tracediff.trace.reader import Trace

TOKENS = [3, 141, 59, 26, 53, 58, 97]  # as many as no axis of the model has


class Norm(nn.Module):
    """An RMS norm that adds the residual first and hands on both, as serving engines fuse it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = nn.functional.rms_norm(total, total.shape[-1:], self.weight, self.eps)
        return normed if residual is None else (normed, total)


class Layer(nn.Module):
    """A decoder layer with its projections fused, which sees its own keys and values alone where `cached` is not."""

    def __init__(self, load: Callable[[str], Tensor], blk: str, hparams: Any) -> None:
        super().__init__()
        self.hparams, self.cached, self.swapped = hparams, True, False
        names = ("attn_q", "attn_k", "attn_v")
        self.input_layernorm = Norm(load(f"{blk}.attn_norm.weight"), hparams.eps)
        self.qkv_proj = fused([load(f"{blk}.{name}.weight") for name in names])
        if f"{blk}.attn_q.bias" in load.known:  # type: ignore[attr-defined]
            self.qkv_proj.bias = nn.Parameter(torch.cat([load(f"{blk}.{name}.bias") for name in names]))
        self.o_proj = fused([load(f"{blk}.attn_output.weight")])
        self.post_attention_layernorm = Norm(load(f"{blk}.ffn_norm.weight"), hparams.eps)
        self.mlp = nn.Module()  # as vLLM calls it, which gguf-py's table takes for ffn_up
        self.mlp.gate_up_proj = fused([load(f"{blk}.ffn_gate.weight"), load(f"{blk}.ffn_up.weight")])
        self.down_proj = fused([load(f"{blk}.ffn_down.weight")])
        self.keys, self.values = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor, residual: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        h, t = self.hparams, len(positions)
        normed, residual = (self.input_layernorm(x), x) if residual is None else self.input_layernorm(x, residual)
        q, k, v = self.qkv_proj(normed).split([h.n_head * h.head_dim, *[h.n_head_kv * h.head_dim] * 2], -1)
        if self.swapped:
            k, v = v, k
        q, k = (rotated(part.view(t, -1, h.head_dim), positions, h.rope.theta) for part in (q, k))
        v = v.view(t, -1, h.head_dim)
        if positions[0] and self.cached:
            k, v = torch.cat((self.keys, k)), torch.cat((self.values, v))
        self.keys, self.values = k, v
        seen = torch.arange(len(k)) <= positions[:, None]
        heads = [part.transpose(0, 1)[None] for part in (q, k, v)]
        out = nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen[:, -len(k) :], enable_gqa=True)
        attended = self.o_proj(out[0].transpose(0, 1).flatten(1))
        normed, residual = self.post_attention_layernorm(attended, residual)
        gate, up = self.mlp.gate_up_proj(normed).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up), residual


class Engine(nn.Module):
    """A decoder as serving engines lay it out: flat tokens, positions given, (hidden, residual) handed on."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        file = GGUFFile(model)
        self.hparams, load = build_graph(file).hparams, loader(file)
        self.embed_tokens = nn.Embedding.from_pretrained(load("token_embd.weight"))
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(load, f"blk.{n}", self.hparams) for n in range(self.hparams.n_layer))
        self.norm = Norm(load("output_norm.weight"), self.hparams.eps)
        head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        self.lm_head = fused([load(head)])

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, positions)
        x, _ = self.norm(x, residual)
        return self.lm_head(x)


def fused(weights: list[Tensor]) -> nn.Linear:
    weight = torch.cat(weights)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return linear


def loader(file: GGUFFile) -> Callable[[str], Tensor]:
    """The file's tensors in float32; Q and K of llama in the order of checkpoints, whose rope turns halves."""
    weights, hparams = Weights(file, torch.float32), build_graph(file).hparams

    def load(name: str) -> Tensor:
        tensor = weights.load(Weight(name, file.tensors[name].shape))
        if hparams.arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            tensor = neighbours(tensor, hparams.head_dim, 0, inverse=True)
        return tensor

    load.known = file.tensors  # type: ignore[attr-defined]
    return load


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rope on halves, [T, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    c, s = angles.cos().float()[:, None], angles.sin().float()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * c - b * s, a * s + b * c), -1)


def passes(engine: nn.Module, *lengths: int) -> None:
    """The tokens in passes of these lengths."""
    at = 0
    with torch.inference_mode():
        for n in lengths:
            engine(torch.tensor(TOKENS[at : at + n]), torch.arange(at, at + n))
            at += n


# --- engines laid out otherwise --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "weights"), [("llama", "Q8_0"), ("qwen2", "F16")])
def test_an_engine_with_fused_projections(
    arch: str, weights: str, models: Models, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Recorded in two lines: split, summed, in the file's order of channels, its warm-up left out."""
    model, out = models(arch, weights), tmp_path / "mine.trace"
    engine = Engine(model)
    with tracediff.record(engine, out, gguf=model, tokens=TOKENS):
        with torch.inference_mode():
            engine(torch.zeros(9, dtype=torch.int64), torch.arange(9))
        passes(engine, 5, 2)
    assert [str(warning.message) for warning in recwarn] == [
        "passes over other tokens than those given, left out: 1",
        "left out, for the model shows it nowhere: attn_scores, attn_probs",
    ]
    trace = Trace(out)
    assert [(step.tokens, step.positions) for step in trace.steps.values()] == [
        (tuple(TOKENS[:5]), (0, 1, 2, 3, 4)), (tuple(TOKENS[5:]), (5, 6)),
    ]  # fmt: skip
    ops = [op.name for op in build_graph(GGUFFile(model)) if op.kind not in ("scores", "softmax")]
    assert sorted({record.op for record in trace.step_ops(1)}) == sorted(ops)
    result = check_trace(out, model)
    assert (result.verdict, result.faulty) == ("match", [])
    assert {weight.status for weight in result.weights} == {"identical"}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (range(3), "positions begin at 0 again after a pass before. Another sequence: record each by itself"),
        ((4, 2), "position 2 after 4 in one row. Tokens of several sequences: record each by itself"),
    ],
)
def test_a_row_of_several_sequences_behind_another_pass_is_refused(
    second: Sequence[int], said: str, models: Models, tmp_path: Path
) -> None:
    """As nano-vllm batches them: they were recorded as one, which read other rows of the cache than its own."""
    engine, out = Engine(models("llama")), tmp_path / "a.trace"

    def run() -> None:
        with torch.inference_mode(), tracediff.record(engine, out, gguf=models("llama")):
            engine(torch.tensor(TOKENS[:4]), positions=torch.arange(4))
            engine(torch.tensor(TOKENS[: len(second)]), positions=torch.tensor(second))

    with pytest.raises(EngineError, match=said):
        run()


class Twice(Engine):
    """Whose first layer projects once more, as one that takes V for K calls K's norm on both."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        logits = super().forward(input_ids, positions)
        once_more = self.layers[0].o_proj
        once_more(torch.zeros(len(positions), once_more.weight.shape[1]))
        return logits


def test_a_module_that_runs_twice_is_said(models: Models, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The first call is recorded, which is the op's here, and the reader is told: it might be the other."""
    model, out = models("qwen2", "F16"), tmp_path / "mine.trace"
    engine = Twice(model)
    with tracediff.record(engine, out, gguf=model):
        passes(engine, 5, 2)
    assert [str(warning.message) for warning in recwarn] == [
        "modules that ran more than once in a pass, of which the first call is recorded: attn_output",
        "left out, for the model shows it nowhere: attn_scores, attn_probs",
    ]
    assert check_trace(out, model).verdict == "match"


class Scale(nn.Module):
    """A norm that calls its weight something else."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(weight)


def test_modules_of_unknown_names_are_told_by_what_they_hold_and_are(models: Models) -> None:
    """A head may hold what the embedding does, and a norm's weight have another name."""
    file = GGUFFile(models("qwen2", "F32"))
    graph, load = build_graph(file), loader(file)
    engine = nn.ModuleDict(
        {
            "head": fused([load("token_embd.weight")]),
            "last": Scale(load("output_norm.weight")),
            "rows": nn.Embedding.from_pretrained(load("token_embd.weight")),
        }
    )
    found = find_taps(engine, graph, Weights(file, torch.float32))
    taps, notes = found.taps, found.notes
    assert [(tap.path, tap.op.name) for tap in taps] == [
        ("rows", "token_embd"), ("last", "output_norm"), ("head", "output"),
    ]  # fmt: skip
    assert notes == []


@pytest.mark.slow
def test_a_token_that_is_right_in_what_its_sample_does_not_exclude_is_undecided(models: Models, tmp_path: Path) -> None:
    """Of a prompt of seven tokens and one more, bfloat16 leaves as little with scores that are scaled in it as without;
    of the token it leaves a third, and without the token was called wrong.
    """
    path = models(Shape("qwen3", 2, 96, 4, 2, 160, 320, head_dim=128), "F16")
    loaded, _ = load(path, None, torch.float32, "cpu")
    trace = tmp_path / "t.trace"
    with torch.autocast("cpu", torch.bfloat16):
        trace_model(loaded, path, trace, TorchOptions(capture="layers"), TOKENS, 1, attention="eager")
    result = check_trace(trace, path)
    assert {(op.op, op.step) for op in result.ops if op.status == "undecided"} == {("blk.0.ffn_residual", 1)}
    assert result.faulty == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_autocast_is_an_arithmetic(arch: str, models: Models, tmp_path: Path) -> None:
    """Matmuls in bfloat16, their outputs too, scores that are scaled in it and a softmax of these in float32: every
    softmax was called wrong, and from hidden states alone, which are float32, nothing was decided. So were norms of
    queries and keys, which are cast back to the type of these before their weight multiplies them.
    """
    shape = Shape(arch, n_layer=2, n_embd=96, n_head=4, n_head_kv=2, n_ff=160, n_vocab=320)
    path = models(replace(shape, head_dim=128) if arch == "qwen3" else shape, "F16")  # transformers takes no other
    loaded, _ = load(path, None, torch.float32, "cpu")
    for capture in ("all", "layers"):
        trace = tmp_path / f"{capture}.trace"
        with torch.autocast("cpu", torch.bfloat16):
            trace_model(loaded, path, trace, TorchOptions(capture=capture), TOKENS, 2, attention="eager")
        result = check_trace(trace, path)
        assert result.verdict == "match"
        said = {op.kind: op.arithmetic for op in result.ops}
        assert said.get("softmax", "scaled scores in bfloat16") == "scaled scores in bfloat16"
        assert said["linear"] == "activations and weights in bfloat16"
        normed = {op.arithmetic for op in result.ops if op.op.endswith(("q_norm", "k_norm"))}
        assert normed == ({"normed values in bfloat16"} if (arch, capture) == ("qwen3", "all") else set())


def test_single_values_tell_what_fused_attention_rounds(tmp_path: Path) -> None:
    """A layer of Gemma 3 by somebody else, recorded under autocast: all arithmetics leave what the record was rounded
    by, and in all but one some values exceed their bounds. What the other ops tell excludes those that are listed.
    """
    model = tiny_models.write("gemma3", tmp_path / "g3.gguf", seed=3, others={"rope.freq_base": 1_000_000.0})
    assert check_trace(Path(__file__).parent / "samples" / "autocast-sdpa.trace", model).verdict == "match"


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "weights"), [("llama", "F32"), ("qwen2", "F16")])
def test_autocast_through_fused_attention_is_an_arithmetic(
    arch: str, weights: str, models: Models, tmp_path: Path
) -> None:
    """Values that are held in bfloat16 have that rounding in what every arithmetic leaves: what PyTorch's kernel does
    left half of what most engines do, where a quarter was asked of it, and each attn_kqv was called wrong. Of a decoded
    token alone it is not told from others: there what the prompt tells is believed, where it fits.
    """
    path = models(Shape(arch, n_layer=2, n_embd=256, n_head=8, n_head_kv=2, n_ff=512, n_vocab=320, n_ctx=64), weights)
    loaded, _ = load(path, None, torch.float32, "cpu")
    trace = tmp_path / "all.trace"
    tokens = (256, 84, 104, 101, 32, 113, 117, 105, 99, 107, 32, 98, 114, 111, 119, 110, 260)
    with torch.autocast("cpu", torch.bfloat16):
        trace_model(loaded, path, trace, TorchOptions(), tokens, 2, attention="sdpa")
    result = check_trace(trace, path)
    assert ([finding.text for finding in result.findings], result.verdict) == ([], "match")


class Packed(Tensor):
    """Integers that stand for a matrix, as torchao has them: its rows cannot be picked, which IndexError said."""

    def __getitem__(self, index: Any) -> Tensor:
        raise IndexError("index 1 is out of bounds for dimension 0 with size 1")

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor)


def test_modules_whose_weights_are_packed_are_told(models: Models) -> None:
    file = GGUFFile(models("llama"))
    graph, weights = build_graph(file), Weights(file, torch.float32)
    wrapped = nn.ModuleDict()
    wrapped["first"] = module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(weights.load(graph["blk.1.ffn_down"].weights[0]).as_subclass(Packed), False)
    layers = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(), wrapped])})
    found = find_taps(layers, graph, weights)
    taps, notes = found.taps, found.notes
    assert [(tap.path, tap.op.name) for tap in taps] == [("layers.1.first", "blk.1.ffn_down")]
    assert notes == []


class Eight(nn.Module):
    """A linear layer in a format of its own, as bitsandbytes' and GPTQ's are: no matrix of floats is seen."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", torch.round(weight / scales).to(torch.int8).T.contiguous())
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.qweight.float() * self.scales.T


def test_rows_of_a_matrix_that_nobody_sees_are_told_by_what_it_makes(models: Models) -> None:
    """Checkpoints have Q of a llama in another order than the file. Its rope was called wrong."""
    file = GGUFFile(models("llama"))
    graph, weights = build_graph(file), Weights(file, torch.float32)
    right = weights.load(graph["blk.1.attn_q"].weights[0])
    held = torch.from_numpy(neighbours(right.numpy(), graph.hparams.head_dim, 0, inverse=True).copy())
    assert not torch.equal(held, right)
    attention = nn.ModuleDict({"q_proj": Eight(held)})
    layers = nn.ModuleList([nn.ModuleDict(), nn.ModuleDict({"self_attn": attention})])
    found = find_taps(nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})}), graph, weights)
    taps, notes = found.taps, found.notes
    assert [(tap.path, tap.op.name) for tap in taps] == [("model.layers.1.self_attn.q_proj", "blk.1.attn_q")]
    x = torch.randn(3, right.shape[1], generator=torch.Generator().manual_seed(0))
    assert torch.nn.functional.cosine_similarity(taps[0].of(attention["q_proj"](x)), x @ right.T).min() > 0.999
    assert notes == []


class Rounding(Eight):
    """One that rounds what it reads to integers too."""

    def forward(self, x: Tensor) -> Tensor:
        scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return super().forward(torch.round(x / scales) * scales)


def quantised(models: Models, of: Callable[[str], type[Eight] | None]) -> tuple[Path, nn.Module]:
    """An engine of which some modules keep their weights in a format of their own."""
    model = models("llama")
    engine = Engine(model)
    for path, module in [*engine.named_modules()]:
        if isinstance(module, nn.Linear) and (kind := of(path)):
            parent, _, name = path.rpartition(".")
            setattr(engine.get_submodule(parent), name, kind(module.weight.detach()))
    return model, engine


def test_matrices_are_recorded_as_modules_multiply_by_them(models: Models, tmp_path: Path) -> None:
    """Packed ones by unit vectors, parts of a fused one in the file's order."""
    model, engine = quantised(models, lambda path: Eight if path.startswith("model.layers.1.") else None)
    with tracediff.record(engine, tmp_path / "t.trace", gguf=model, weights=True):
        passes(engine, len(TOKENS))
    trace, file = Trace(tmp_path / "t.trace"), GGUFFile(model)
    matrices = {weight.name for op in build_graph(file) if op.kind == "linear" for weight in op.weights}
    assert matrices <= {*trace.weights}
    right = Weights(file, torch.float32).load(build_graph(file)["blk.1.attn_q"].weights[0])
    scales = right.abs().amax(1, keepdim=True) / 127
    held = torch.from_numpy(trace.values(trace.weights["blk.1.attn_q.weight"]).copy())
    assert (held - torch.round(right / scales) * scales).abs().max() < 1e-6
    result = check_trace(tmp_path / "t.trace", model)
    assert result.verdict == "match"
    told = {w.weight: w.status for w in result.weights if "norm" not in w.weight}
    assert {name for name, status in told.items() if status == "identical"} == matrices - {
        f"blk.1.{name}.weight"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    assert set(told.values()) == {"identical", "rounded"}


def test_of_what_rounds_its_input_no_matrix_is_recorded(models: Models, tmp_path: Path) -> None:
    """A unit vector would tell what becomes of 1, and of no other value."""
    model, engine = quantised(models, lambda path: Rounding if path == "model.layers.0.down_proj" else None)
    unseen = "weights left out, for their modules multiply rows by no one matrix: ffn_down.weight"
    with (
        pytest.warns(UserWarning, match=f"^{unseen}$"),
        tracediff.record(engine, tmp_path / "t.trace", gguf=model, weights=True),
    ):
        passes(engine, len(TOKENS))
    recorded = {*Trace(tmp_path / "t.trace").weights}
    assert "blk.0.ffn_down.weight" not in recorded
    assert "blk.1.ffn_down.weight" in recorded


def test_k_and_v_of_a_split_exchanged_is_named(models: Models, tmp_path: Path) -> None:
    """What is wrong is what the engine does with the projections, which themselves are right."""
    model, out = models("qwen2", "F16"), tmp_path / "mine.trace"
    engine = Engine(model)
    engine.layers[1].swapped = True
    with pytest.warns(UserWarning, match="left out"), tracediff.record(engine, out, gguf=model):
        passes(engine, 7)
    result = check_trace(out, model)
    assert result.first_divergence
    assert result.first_divergence.op == "blk.1.attn_k_rope"
    assert result.faulty[0].cause
    assert "attn_v" in result.faulty[0].cause.text


# --- batches ---------------------------------------------------------------------------------------------------------

SHORT = TOKENS[2:5]


def padded(side: str) -> list[dict[str, Tensor]]:
    """Two prompts in a batch, the shorter one padded, and two tokens more of each: what transformers is called with."""
    pad = [0] * (len(TOKENS) - len(SHORT))
    rows = [TOKENS, pad + SHORT if side == "left" else SHORT + pad]
    mask = torch.tensor([[1] * len(TOKENS), [int(row > 0) for row in rows[1]]])
    passes = []
    for ids in (torch.tensor(rows), torch.tensor([[5], [6]]), torch.tensor([[7], [8]])):
        mask = mask if not passes else torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        passes.append({"input_ids": ids, "attention_mask": mask, "position_ids": positions})
    return passes


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch(side: str, attention: str, models: Models, tmp_path: Path) -> None:
    """Each row is a sequence; padding is in none, wherever it is."""
    gguf, out = models("llama", "F16"), tmp_path / "mine.trace"
    model, _ = load(gguf, None, torch.float32, "cpu")
    model.set_attn_implementation(attention)
    cache = DynamicCache()
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        with tracediff.record(model, out, gguf=gguf):
            for given in padded(side):
                model(**given, past_key_values=cache, use_cache=True)
    trace = Trace(out)
    fed = {k: [(step.tokens, step.positions[0]) for step in trace.steps.values() if step.sequence == k] for k in (0, 1)}
    assert fed == {
        0: [(tuple(TOKENS), 0), ((5,), 7), ((7,), 8)], 1: [(tuple(SHORT), 0), ((6,), 3), ((8,), 4)],
    }  # fmt: skip
    shown = {
        op.name for op in build_graph(GGUFFile(gguf)) if attention == "eager" or op.kind not in ("scores", "softmax")
    }
    assert {op for _, op in trace.ops} == shown
    result = check_trace(out, gguf)
    assert (result.verdict, result.faulty) == ("match", [])


def test_sequences_packed_in_one_row(models: Models, tmp_path: Path) -> None:
    """Positions that begin again tell them apart, as the model does."""
    gguf, out = models("llama", "F16"), tmp_path / "mine.trace"
    model, _ = load(gguf, None, torch.float32, "cpu")
    ids, positions = TOKENS + SHORT, [*range(len(TOKENS)), *range(len(SHORT))]
    with torch.inference_mode(), tracediff.record(model, out, gguf=gguf):
        model(torch.tensor([ids]), position_ids=torch.tensor([positions]), use_cache=False)
    trace = Trace(out)
    assert {step.sequence: step.tokens for step in trace.steps.values()} == {0: tuple(TOKENS), 1: tuple(SHORT)}
    result = check_trace(out, gguf)
    assert (result.verdict, result.faulty) == ("match", [])


# --- refusals --------------------------------------------------------------------------------------------------------


def by_forward(engine: Engine) -> None:
    engine.forward(torch.tensor(TOKENS), torch.arange(7))


def no_ids(engine: Engine) -> None:
    engine(torch.rand(7), torch.rand(7))


def no_cache(engine: Engine) -> None:
    for layer in engine.layers:
        layer.cached = False
    passes(engine, 5, 2)


class FromEmbeddings(nn.Module):
    """What is fed values in the place of ids."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.engine = Engine(model)

    def forward(self, x: Tensor) -> Tensor:
        return self.engine.lm_head(self.engine.norm(x))


@pytest.mark.filterwarnings("ignore:left out")
def test_ids_of_all_passes_are_given_where_no_call_shows_any(models: Models, tmp_path: Path) -> None:
    """The first took them all: a prompt and a decode step were "another model"."""
    model = models("qwen2", "F16")
    engine, width = FromEmbeddings(model), build_graph(GGUFFile(model)).hparams.n_embd
    with tracediff.record(engine, tmp_path / "x.trace", gguf=model, tokens=TOKENS[:6]):
        engine(torch.rand(1, 5, width))
        engine(torch.rand(1, width))
    steps = Trace(tmp_path / "x.trace").steps.values()
    assert [step.tokens for step in steps] == [tuple(TOKENS[:5]), tuple(TOKENS[5:6])]
    assert [step.positions for step in steps] == [(0, 1, 2, 3, 4), (5,)]


def all_again(engine: Engine) -> None:
    """As an engine without a cache is called, whatever its attention shows: step 1 was taken to go on."""
    for n in (3, 5):
        engine(torch.tensor(TOKENS[:n]), torch.arange(n))


class Table(nn.Module):
    """An embedding of somebody's own, of which a function makes the logits too."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class Sampling(Engine):
    """One that returns the next token first, as gemma_pytorch does, and whose router puts out its choice alone."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.embedder = Table(self.embed_tokens.weight.detach())
        del self.embed_tokens, self.lm_head

    def forward(self, input_ids: Tensor, positions: Tensor) -> Any:
        x, residual = self.embedder(input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, positions)
        logits = self.norm(x, residual)[0] @ self.embedder.weight.T
        return logits.argmax(-1), logits


def test_an_embedding_that_is_the_head_too(models: Models, tmp_path: Path) -> None:
    """Its rows were taken for logits, and recording ended."""
    model, out = models("qwen2", "F16"), tmp_path / "x.trace"
    engine = Sampling(model)
    with tracediff.record(engine, out, gguf=model):
        passes(engine, 5, 2)
    recorded = {op for _, op in Trace(out).ops}
    assert {"token_embd", "output"} <= recorded
    assert check_trace(out, model).verdict == "match"


class Choosing(nn.Linear):
    """A router that puts out the scores and places of three experts, and no others'."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).topk(3)


def test_a_choice_is_no_product(models: Models, tmp_path: Path) -> None:
    model, out = models("qwen2", "F16"), tmp_path / "x.trace"
    engine = Engine(model)
    head = Choosing(engine.lm_head.in_features, engine.lm_head.out_features, bias=False)
    head.weight = engine.lm_head.weight
    engine.lm_head = head
    with tracediff.record(engine, out, gguf=model):
        passes(engine, 5)
    assert "output" not in {op for _, op in Trace(out).ops}


def test_modules_are_found_whatever_the_default_type_is(models: Models) -> None:
    """In bfloat16 319 is 320: recording ended with a token outside the vocabulary."""
    model = models("llama")
    file = GGUFFile(model)
    engine, weights = Engine(model), Weights(file, torch.float32)
    usual = find_taps(engine, build_graph(file), weights).taps
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = find_taps(engine, build_graph(file), weights)
        taps, notes = found.taps, found.notes
    finally:
        torch.set_default_dtype(torch.float32)
    assert ([tap.path for tap in taps], notes) == ([tap.path for tap in usual], [])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (by_forward, "nothing was recorded: no call of this module was seen. Call it as model(ids), not by .forward()"),
        (no_ids, "the call shows no token ids. Give them: record(..., tokens=ids)."),
        (no_cache, "step 1: attention sees the 2 keys of this pass alone, at position 6: without a cache"),
        (all_again, "a call begins with all 3 tokens of the calls before: without a cache each call is a sequence"),
    ],
)
def test_calls_that_are_refused(
    call: Callable[[Engine], None], said: str, models: Models, tmp_path: Path
) -> None:  # fmt: skip
    model = models("qwen2", "F16")
    engine = Engine(model)
    with pytest.raises(EngineError, match=re.escape(said)), tracediff.record(engine, tmp_path / "x.trace", gguf=model):
        call(engine)


def test_options_that_no_call_suits_are_refused(models: Models, tmp_path: Path) -> None:
    """Any word was taken for all; calls over other tokens were none."""
    model, out = models("qwen2", "F16"), tmp_path / "x.trace"
    engine = Engine(model)
    wrong: Any = "hidden"
    none = re.escape("capture 'hidden' is none of all, layers, stats, sketch")
    with pytest.raises(EngineError, match=none), tracediff.record(engine, out, gguf=model, capture=wrong):
        pass
    others = re.escape("nothing was recorded: calls of this module were over other tokens than those of tokens= (1).")
    with pytest.raises(EngineError, match=others), tracediff.record(engine, out, gguf=model, tokens=(1, 2, 3)):
        passes(engine, 4)


def test_models_that_are_refused(models: Models, tmp_path: Path) -> None:
    model = models("qwen2", "F16")
    compiled = Engine(model)
    compiled.layers[0] = torch.compile(compiled.layers[0])
    for engine, said in ((nn.Linear(3, 5), "no module of it holds a weight of"), (compiled, "layers.0 is compiled")):
        with pytest.raises(EngineError, match=said), tracediff.record(engine, tmp_path / "x.trace", gguf=model):
            pass
    assert not [*tmp_path.iterdir()]


def test_weights_that_are_not_the_file_s_are_said(models: Models, tmp_path: Path) -> None:
    model, out = models("qwen2", "F16"), tmp_path / "mine.trace"
    engine = Engine(model)
    down = engine.layers[0].down_proj
    down.weight = nn.Parameter(torch.randn_like(down.weight))
    said = pytest.warns(UserWarning, match=r"layers\.0\.down_proj holds other weights than blk\.0\.ffn_down")
    with said, tracediff.record(engine, out, gguf=model):
        passes(engine, 7)
    assert [op.op for op in check_trace(out, model).faulty] == ["blk.0.ffn_down"]


@pytest.mark.parametrize(
    "arch",
    [
        "hunyuan-dense",
        "llama4",
        "qwen3next",
        "deepseek2",
        "smollm3",
        "qwen35",
        "kimi-linear",
        "olmo",
        "falcon-h1",
        "minicpm3",
    ],
)
def test_transformers_of_other_architectures_are_sound(arch: str, tmp_path: Path) -> None:
    """Norms behind rope, a router that puts out its scores first, a norm with its gate, latent attention, a layer
    without rope whose Q and K conversion reorders as if it had one; value heads that it reorders, the gate of a norm
    as wide as what is normed, Q and K that are clipped before rope, a norm of groups whose weight is one row.
    """
    path = tiny_checkpoints.CLASSES[arch].write(arch, tmp_path / "tiny.gguf")
    loaded, model, out = tiny_checkpoints.load(arch, path), Model(path), tmp_path / "tiny.trace"
    trace_model(loaded, model, out, TorchOptions(), (256, 84, 104, 101, 32, 113, 117), 2)
    result = check_trace(out, model)
    assert [finding.text for finding in result.findings] == []
    assert result.verdict == "match"


def test_keys_without_rope_are_no_values(tmp_path: Path) -> None:
    """As many positions as a head has channels: Q K^T looked like the probabilities times V, for K, which comes from a
    projection as it is, had been seen already.
    """
    path, out = tiny_checkpoints.CLASSES["cohere2"].write("cohere2", tmp_path / "tiny.gguf"), tmp_path / "t.trace"
    loaded, dim = tiny_checkpoints.load("cohere2", path), Model(path).graph.hparams.head_dim
    with torch.inference_mode(), tracediff.record(loaded, out, gguf=path):
        loaded(torch.arange(dim)[None])
    assert (0, "blk.1.attn_scores") in Trace(out).ops
    assert check_trace(out, path).verdict == "match"


def test_a_router_that_puts_out_the_experts_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.17 has that of Granite."""
    made = granite.GraniteMoeSharedTopKRouter.forward
    monkeypatch.setattr(granite.GraniteMoeSharedTopKRouter, "forward", lambda router, x: made(router, x)[::-1])

    def forward(block: Any, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        experts, shares, _ = block.router(rows)
        return block.experts(rows, experts, shares).view(x.shape)

    monkeypatch.setattr(granite.GraniteMoeSharedMoE, "forward", forward)
    path, out = tiny_checkpoints.CLASSES["granitemoe"].write("granitemoe", tmp_path / "tiny.gguf"), tmp_path / "t.trace"
    trace_model(tiny_checkpoints.load("granitemoe", path), path, out, TorchOptions(), (256, 84, 104, 101, 32), 1)
    result = check_trace(out, path)
    assert result.verdict == "match"
    assert "blk.0.ffn_gate_inp" in {op.op for op in result.ops}


@pytest.mark.slow
def test_norms_that_hold_their_weight_less_1_in_half_precision(tmp_path: Path) -> None:
    """They add 1 in float32: what they multiply with is no bfloat16."""
    path = tiny_checkpoints.CLASSES["qwen3next"].write("qwen3next", tmp_path / "tiny.gguf")
    loaded, model, out = tiny_checkpoints.load("qwen3next", path, torch.bfloat16), Model(path), tmp_path / "tiny.trace"
    trace_model(loaded, model, out, TorchOptions(dtype="bf16"), (256, 84, 104, 101, 32, 113, 117), 2)
    result = check_trace(out, model)
    less_1 = {w.weight: w.note for w in result.weights if w.weight.endswith("norm.weight")}
    assert less_1.pop("blk.0.ssm_norm.weight") == "the right values in bfloat16"
    assert {*less_1.values()} == {"the right values in bfloat16, to which 1 is added"}
    assert result.verdict == "match"


def by_rows(module: nn.Linear, change: Callable[[Tensor], Tensor]) -> None:
    """The rows of its weight, [n_out, n_in], in another order."""
    module.weight = nn.Parameter(change(module.weight.data).clone())


def head_rolled(engine: Engine) -> None:
    by_rows(engine.lm_head, lambda w: w.roll(1, 0))


def q_reordered(engine: Engine) -> None:
    """As conversion reorders Q and K, but not K."""
    h = engine.hparams
    n = h.n_head * h.head_dim
    by_rows(engine.layers[1].qkv_proj, lambda w: torch.cat((neighbours(w[:n], h.head_dim, 0), w[n:])))


def v_rolled(engine: Engine) -> None:
    n = engine.hparams.n_head_kv * engine.hparams.head_dim
    by_rows(engine.layers[1].qkv_proj, lambda w: torch.cat((w[:-n], w[-n:].roll(1, 0))))


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize(
    ("change", "said", "finding"),
    [
        (head_rolled, "lm_head holds other weights than output.weight", "output: channels rotated: channel 1 has"),
        (
            q_reordered,
            "qkv_proj has the rows of blk.1.attn_q.weight in another order",
            "attn_q in layer 1: Q/K rows are",
        ),
        (v_rolled, "qkv_proj has the rows of blk.1.attn_v.weight in another order", "attn_v in layer 1: channels rot"),
    ],
)
def test_rows_in_an_order_that_no_engine_has_are_not_put_back(
    change: Callable[[Engine], None], said: str, finding: str, models: Models, tmp_path: Path
) -> None:
    """A head whose rows were another's was a match; Q's alone blamed what reads K."""
    model, out = models(Shape("qwen2", n_layer=2, bias=False)), tmp_path / "mine.trace"
    engine = Engine(model)
    change(engine)
    with pytest.warns(UserWarning, match=re.escape(said)), tracediff.record(engine, out, gguf=model):
        passes(engine, 7)
    (found,) = check_trace(out, model).findings
    assert found.text.startswith(finding)


class Scaled(Engine):
    """What does more to the logits than its head."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return super().forward(input_ids, positions) * 0.75


class LastAlone(Engine):
    """What returns the last token's logits, in another type."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return super().forward(input_ids, positions)[-1:].to(torch.bfloat16)


@pytest.mark.filterwarnings("ignore:left out")
def test_logits_are_those_that_the_model_returns(models: Models, tmp_path: Path) -> None:
    """What was done to them after the head was in no trace."""
    model, out = models("llama"), tmp_path / "mine.trace"
    engine = Scaled(model)
    said = pytest.warns(UserWarning, match="the model returns other logits than lm_head puts out: those returned are")
    with said, tracediff.record(engine, out, gguf=model):
        passes(engine, 7)
    (found,) = check_trace(out, model).findings
    assert found.text == "output: every value is 0.75 times what it should be."


def test_of_logits_that_are_returned_in_part_the_head_has_all(
    models: Models, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model, out = models("llama"), tmp_path / "mine.trace"
    engine = LastAlone(model)
    with tracediff.record(engine, out, gguf=model):
        passes(engine, 7)
    assert not [w for w in recwarn if "returns other" in str(w.message)]
    (record,) = [record for (_, name), record in Trace(out).ops.items() if name == "output"]
    assert (record.shape[0], record.dtype) == (7, "f32")


class Renamed(Engine):
    """What calls norms of its layers as the last is called as a rule, and that something else."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        for layer in self.layers:
            layer.add_module("norm", layer.input_layernorm)
            del layer._modules["input_layernorm"]
        self.final = self.norm
        del self._modules["norm"]

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.__dict__["norm"] = self.final
        for layer in self.layers:
            layer.__dict__["input_layernorm"] = layer.norm
        return super().forward(input_ids, positions)


@pytest.mark.filterwarnings("ignore:left out")
def test_norms_of_layers_are_not_the_last(models: Models, tmp_path: Path) -> None:
    """A name that gguf-py's table knows for the last norm alone was taken for that in layer 0."""
    model, out = models("llama"), tmp_path / "mine.trace"
    engine = Renamed(model)
    with tracediff.record(engine, out, gguf=model):
        passes(engine, 7)
    result = check_trace(out, model)
    assert (result.verdict, result.findings) == ("match", ())
    assert {(0, "output_norm"), (0, "blk.1.attn_norm")} <= {*Trace(out).ops}


@pytest.mark.filterwarnings("ignore:left out")
def test_a_longer_context_is_said(models: Models, tmp_path: Path) -> None:
    model, out = models("llama"), tmp_path / "mine.trace"
    engine = Engine(model)
    with tracediff.record(engine, out, gguf=model, context=4096):
        passes(engine, 7)
    assert Trace(out).header.context == 4096
    with tracediff.Recorder(tmp_path / "own.trace", gguf=model, context=512) as record:
        record.step(TOKENS)
        record("token_embd", engine.embed_tokens(torch.tensor(TOKENS)))
    assert Trace(tmp_path / "own.trace").header.context == 512
