"""Engines that others wrote, with taps where they hand values on: what `benchmarks/real_engines.py` runs.

Nothing is computed here. Each function loads a GGUF file into an engine as its users would, and runs a prompt and two
decode steps with its own cache. Where an engine reads no GGUF it is given the file's values, dequantised.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracediff.engine.recorder import DTYPES, Recorder
from tracediff.engine.torch_engine import StepInput
from tracediff.engine.torch_run import TorchOptions
from tracediff.engine.transformers_run import load, trace_model
from tracediff.model.checkpoint import PERMUTED_ARCHITECTURES, PERMUTED_OPS
from tracediff.model.families import load_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.graph import Graph
from tracediff.model.pairing import neighbours
from tracediff.model.tensors import FileTensors
from tracediff.names import split
from tracediff.trace.writer import TraceWriter

PROMPT = (256, 84, 104, 101, 32, 113, 117, 105, 99, 107, 32, 98, 114, 111, 119, 110, 260)
STEPS = tuple(
    StepInput(tokens, tuple(range(first, first + len(tokens))))
    for tokens, first in ((PROMPT, 0), ((84,), len(PROMPT)), ((104,), len(PROMPT) + 1))
)
Trace = Callable[[Path, Path], None]  # of a GGUF file, to a trace


class Taps:
    """Records values of an engine that pairs halves in rope, under the GGUF's names and in its order of channels."""

    def __init__(self, graph: Graph, recorder: Recorder) -> None:
        self.graph = graph
        self.recorder = recorder
        self.permuted = graph.hparams.arch in PERMUTED_ARCHITECTURES
        self.step, self.past = 0, 0

    def begin(self, step: int, given: StepInput) -> None:
        """A step, of `given` tokens."""
        self.step, self.past = step, given.positions[0]
        self.n_tokens = len(given.tokens)
        self.recorder.step(step, given.tokens, given.positions)

    def op(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Record a value of as many elements as the op has; gives it back."""
        if name in self.graph:
            shaped = values.detach().reshape(self.graph[name].shape(self.n_tokens, self.past))
            if self.permuted and split(name)[1] in PERMUTED_OPS:
                shaped = neighbours(shaped, shaped.shape[-1])
            self.recorder.op(self.step, name, shaped)
        return values

    def of_heads(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The same for a value [1, heads, T, head_dim]."""
        self.op(name, values[0].transpose(0, 1))
        return values


@contextmanager
def taps(model: Path, out: Path, engine: str) -> Iterator[Taps]:
    """The taps of a trace that is being written."""
    graph = load_graph(model)
    with TraceWriter(out, engine, graph.hparams.arch, model.name, graph.matmul_type) as writer:
        yield Taps(graph, Recorder(writer, "all"))


# ---- transformers


def transformers(dtype: str, attention: str) -> Trace:
    """Its own GGUF loader dequantises; scores and probabilities are shown by eager attention alone."""

    def trace(model: Path, out: Path) -> None:
        loaded, _ = load(model, None, DTYPES[dtype], "cpu")
        trace_model(loaded, model, out, TorchOptions(dtype=dtype), PROMPT, 2, attention=attention)

    return trace


# ---- litgpt


def litgpt(dtype: str) -> Trace:
    """It is given the file's values: its checkpoints are Hugging Face's, with Q, K and V in one matrix."""

    def trace(model: Path, out: Path) -> None:
        from litgpt.config import Config
        from litgpt.model import GPT

        file = GGUFFile(model)
        h = load_graph(model).hparams
        config = Config(
            name="generated", n_layer=h.n_layer, n_embd=h.n_embd, n_head=h.n_head, n_query_groups=h.n_head_kv,
            head_size=h.head_dim, intermediate_size=h.n_ff, vocab_size=h.n_vocab, padded_vocab_size=h.n_vocab,
            block_size=64, rotary_percentage=1.0, parallel_residual=False, bias=False, attn_bias=h.arch == "qwen2",
            norm_class_name="RMSNorm", norm_eps=h.eps, mlp_class_name="LLaMAMLP", rope_base=int(h.rope.theta),
            norm_qk=h.arch == "qwen3",
        )  # fmt: skip
        gpt = GPT(config)
        gpt.load_state_dict(_litgpt_weights(FileTensors(file), h.n_layer, h.arch, h.head_dim))
        gpt = gpt.to(DTYPES[dtype]).eval()
        gpt.set_kv_cache(1, 64, dtype=DTYPES[dtype])
        with taps(model, out, f"litgpt ({dtype})") as tap, torch.inference_mode():
            _tap_litgpt(gpt, tap)
            for step, given in enumerate(STEPS):
                tap.begin(step, given)
                gpt(torch.tensor([given.tokens]), torch.tensor(given.positions))

    return trace


def _litgpt_weights(tensors: FileTensors, n_layer: int, arch: str, head_dim: int) -> dict[str, torch.Tensor]:
    def get(name: str) -> np.ndarray:
        values = tensors.get(name).astype(np.float32)
        if arch in PERMUTED_ARCHITECTURES and split(name)[1].partition(".")[0] in PERMUTED_OPS:
            values = neighbours(values, head_dim, 0, inverse=True)
        return values

    names = {
        "norm_1.weight": ("attn_norm.weight",), "norm_2.weight": ("ffn_norm.weight",),
        "attn.qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
        "attn.qkv.bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        "attn.norm_q.weight": ("attn_q_norm.weight",), "attn.norm_k.weight": ("attn_k_norm.weight",),
        "attn.proj.weight": ("attn_output.weight",), "mlp.fc_1.weight": ("ffn_gate.weight",),
        "mlp.fc_2.weight": ("ffn_up.weight",), "mlp.proj.weight": ("ffn_down.weight",),
    }  # fmt: skip
    weights = {"transformer.wte.weight": get("token_embd.weight"), "transformer.ln_f.weight": get("output_norm.weight")}
    weights["lm_head.weight"] = get("output.weight" if "output.weight" in tensors else "token_embd.weight")
    for n in range(n_layer):
        for theirs, ours in names.items():
            if f"blk.{n}.{ours[0]}" in tensors:
                weights[f"transformer.h.{n}.{theirs}"] = np.concatenate([get(f"blk.{n}.{name}") for name in ours])
    return {name: torch.from_numpy(values.copy()) for name, values in weights.items()}


def _tap_litgpt(gpt: Any, tap: Taps) -> None:
    def after(module: Any, name: str, heads: bool = False) -> None:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
            (tap.of_heads if heads else tap.op)(name, output)

        module.register_forward_hook(hook)

    def before(module: Any, name: str) -> None:
        def hook(module: Any, inputs: Any) -> None:
            tap.op(name, inputs[0])

        module.register_forward_pre_hook(hook)

    after(gpt.transformer.wte, "token_embd")
    for n, block in enumerate(gpt.transformer.h):
        blk, attn, mlp = f"blk.{n}", block.attn, block.mlp
        after(block.norm_1, f"{blk}.attn_norm")
        attn.qkv.register_forward_hook(_split_qkv(tap, blk, attn.config))
        if attn.norm_q is not None:
            after(attn.norm_q, f"{blk}.attn_q_norm", heads=True)
            after(attn.norm_k, f"{blk}.attn_k_norm", heads=True)
        attn.scaled_dot_product_attention = _watched(tap, blk, attn.scaled_dot_product_attention)
        before(attn.proj, f"{blk}.attn_kqv")
        after(attn.proj, f"{blk}.attn_output")
        before(block.norm_2, f"{blk}.attn_residual")
        after(block.norm_2, f"{blk}.ffn_norm")
        after(mlp.fc_1, f"{blk}.ffn_gate")
        after(mlp.fc_2, f"{blk}.ffn_up")
        before(mlp.proj, f"{blk}.ffn_act")
        after(mlp.proj, f"{blk}.ffn_down")
        after(block, f"{blk}.ffn_residual")
    after(gpt.transformer.ln_f, "output_norm")
    after(gpt.lm_head, "output")


def _split_qkv(tap: Taps, blk: str, config: Any) -> Callable[..., None]:
    q, kv = config.n_head * config.head_size, config.n_query_groups * config.head_size

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
        for name, part in zip(("attn_q", "attn_k", "attn_v"), output.split((q, kv, kv), -1), strict=True):
            tap.op(f"{blk}.{name}", part)

    return hook


def _watched(tap: Taps, blk: str, attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Its attention with K of the whole cache, repeated for each query head."""

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = tap.graph.hparams
        tap.of_heads(f"{blk}.attn_q_rope", q)
        own = slice(tap.past, tap.past + tap.n_tokens)
        tap.of_heads(f"{blk}.attn_k_rope", k[:, :: h.n_head // h.n_head_kv, own])
        return attention(q, k, v, mask)

    return watched


# ---- tinygrad


class _Tapped:
    """A module of tinygrad whose output, and input where it has a name, are recorded."""

    def __init__(self, module: Any, output: Callable[[Any], Any], given: Callable[[Any], Any] = lambda x: x) -> None:
        self._module, self._output, self._given = module, output, given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: Any) -> Any:
        return self._output(self._module(self._given(x)))


def tinygrad(model: Path, out: Path) -> None:
    """Its own GGUF loader and model (tinygrad.llm), each block's ops one by one instead of one graph."""
    from tinygrad import Tensor
    from tinygrad.llm import model as llm

    transformer, _ = llm.Transformer.from_gguf(model, max_context=64)
    rotate = llm.apply_rope
    with taps(model, out, "tinygrad") as tap, ExitStack() as patched:
        patched.callback(setattr, llm, "apply_rope", rotate)
        record = _recording(tap)
        for n, block in enumerate(transformer.blk):
            _tap_block(block, f"blk.{n}", record)
        for step, given in enumerate(STEPS):
            tap.begin(step, given)
            x = record("token_embd")(transformer.token_embd(Tensor([list(given.tokens)])).float())
            for n, block in enumerate(transformer.blk):
                names = iter((f"blk.{n}.attn_q_rope", f"blk.{n}.attn_k_rope"))
                llm.apply_rope = lambda x, freqs, names=names: record(next(names), heads=True)(rotate(x, freqs))
                block._init_state(x)
                x = _block(block, f"blk.{n}", record, x, given.positions[0])
            record("output")(transformer.output(record("output_norm")(transformer.output_norm(x))))


def _recording(tap: Taps) -> Callable[..., Callable[[Any], Any]]:
    def record(name: str, heads: bool = False) -> Callable[[Any], Any]:
        def recorded(x: Any) -> Any:
            values = torch.from_numpy(x.realize().numpy())
            (tap.of_heads if heads else tap.op)(name, values)
            return x

        return recorded

    return record


def _tap_block(block: Any, blk: str, record: Callable[..., Callable[[Any], Any]]) -> None:
    inputs = {"attn_output": "attn_kqv", "ffn_down": "ffn_act"}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        given = record(f"{blk}.{inputs[name]}") if name in inputs else lambda x: x
        setattr(block, name, _Tapped(getattr(block, name), record(f"{blk}.{name}"), given))
    for name in ("attn_norm", "ffn_norm"):
        setattr(block, name, _Tapped(getattr(block, name), record(f"{blk}.{name}")))
    for name in ("attn_q_norm", "attn_k_norm"):
        if hasattr(block, name):
            setattr(block, name, _Tapped(getattr(block, name), record(f"{blk}.{name}", heads=True)))


def _block(block: Any, blk: str, record: Callable[..., Callable[[Any], Any]], x: Any, start: int) -> Any:
    """FFNBlock.__call__, op by op."""
    x = record(f"{blk}.attn_residual")(x + block._attention(block.attn_norm(x), start))
    return record(f"{blk}.ffn_residual")(x + block._feed_forward(block.ffn_norm(x)))


if __name__ == "__main__":
    sys.exit("Run benchmarks/real_engines.py.")
