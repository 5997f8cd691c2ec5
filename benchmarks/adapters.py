"""Engines that others wrote, with taps where they hand values on: what `benchmarks/real_engines.py` runs.

Nothing is computed here. Each function loads a GGUF file into an engine as its users would, and runs a prompt and two
decode steps with its own cache. Where an engine reads no GGUF it is given the file's values, dequantised.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import tracediff
from tracediff.engine.recorder import DTYPES, TensorWriter
from tracediff.engine.torch_engine import StepInput
from tracediff.engine.torch_run import TorchOptions
from tracediff.engine.transformers_run import load, trace_model
from tracediff.model.conversion import PERMUTED_ARCHITECTURES, PERMUTED_OPS
from tracediff.model.families import load_graph
from tracediff.model.graph import Graph
from tracediff.model.model import Model
from tracediff.model.pairing import neighbours
from tracediff.names import split
from tracediff.trace.writer import TraceWriter

PROMPT = (256, 84, 104, 101, 32, 113, 117, 105, 99, 107, 32, 98, 114, 111, 119, 110, 260)
STEPS = tuple(
    StepInput(tokens, tuple(range(first, first + len(tokens))))
    for tokens, first in ((PROMPT, 0), ((84,), len(PROMPT)), ((104,), len(PROMPT) + 1))
)
Trace = Callable[[Path, Path], None]  # of a GGUF file, to a trace


class NotForThisModelError(Exception):
    """The engine knows other architectures."""


class Taps:
    """Records values of an engine that pairs halves in rope, under the GGUF's names and in its order of channels."""

    def __init__(self, graph: Graph, recorder: TensorWriter) -> None:
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
        yield Taps(graph, TensorWriter(writer, "all"))


# ---- transformers


def transformers(
    dtype: str,
    attention: str,
    quantised: Callable[[torch.nn.Linear], torch.nn.Module] | None = None,
    autocast: str | None = None,
    weights: bool = False,
) -> Trace:
    """Its own GGUF loader dequantises; scores and probabilities are shown by eager attention alone. Matrices but the
    head may be `quantised` by another library, as with its quantisation_config, and recorded with their `weights`, or
    all matmuls run under `autocast`.
    """

    def trace(model: Path, out: Path) -> None:
        loaded, _ = load(model, None, DTYPES[dtype], "cpu")
        for name, module in [*loaded.named_modules()] if quantised else ():
            if isinstance(module, torch.nn.Linear) and quantised and name != "lm_head":
                loaded.set_submodule(name, quantised(module))
        with torch.autocast("cpu", DTYPES[autocast]) if autocast else nullcontext():
            options = TorchOptions(dtype=dtype)
            trace_model(loaded, model, out, options, PROMPT, 2, attention=attention, weights=weights)

    return trace


def hqq(bits: int) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    """Integers of so many bits in groups of 64, whose zeros are sought for the weights' own errors."""

    def quantised(linear: torch.nn.Linear) -> torch.nn.Module:
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

        config = BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
        made: torch.nn.Module = HQQLinear(linear, config, compute_dtype=linear.weight.dtype, device="cpu")
        return made

    return quantised


def bitsandbytes(linear: torch.nn.Linear) -> torch.nn.Module:
    """Its NF4, as with load_in_4bit."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    made = Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=linear.weight.dtype,
        compress_statistics=False, quant_type="nf4",
    )  # fmt: skip
    made.weight = Params4bit(linear.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4")
    made.bias = linear.bias
    return made.to("cpu")


def torchao(kind: str) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    """What the configuration of its quantization of this name, less Config, makes of a layer."""

    def quantised(linear: torch.nn.Linear) -> torch.nn.Module:
        from torchao import quantization

        groups = {"weight_granularity" if "Activation" in kind else "granularity": quantization.PerGroup(32)}
        of_four = {"weight_dtype": vars(torch)["int4"], **groups} if "Intx" in kind else {}
        quantization.quantize_(linear, getattr(quantization, f"{kind}Config")(**of_four))
        return linear

    return quantised


def compressed_tensors(preset: str) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    """One of its presets, as in W8A8, with scales from the least and the largest weights, as its users' observers have
    them; activations are quantised as they come.
    """

    def quantised(linear: torch.nn.Linear) -> torch.nn.Module:
        from compressed_tensors.quantization import QuantizationStatus, preset_name_to_scheme
        from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
        from compressed_tensors.quantization.utils import calculate_qparams

        scheme = preset_name_to_scheme(preset, ["Linear"])
        initialize_module_for_quantization(linear, scheme)
        size = scheme.weights.group_size or linear.in_features
        least, largest = torch.aminmax(linear.weight.data.unflatten(-1, (-1, size)), dim=-1)
        made: Any = linear
        for kept, value in zip(
            ("weight_scale", "weight_zero_point"), calculate_qparams(least, largest, scheme.weights), strict=True
        ):
            if (parameter := getattr(made, kept, None)) is not None:
                parameter.data = value.to(parameter.dtype).reshape(parameter.shape)
        made.quantization_status = QuantizationStatus.FROZEN
        return linear

    return quantised


def quanto(kind: str) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    """Its weights of a kind, as in int8, with scales in the type that the values have."""

    def quantised(linear: torch.nn.Linear) -> torch.nn.Module:
        from optimum import quanto as theirs

        made = theirs.QLinear.from_module(linear, weights=getattr(theirs, f"q{kind}"))
        made.freeze()
        return made

    return quantised


# ---- litgpt


def litgpt(dtype: str) -> Trace:
    """It is given the file's values: its checkpoints are Hugging Face's, with Q, K and V in one matrix."""

    def trace(model: Path, out: Path) -> None:
        from litgpt.config import Config
        from litgpt.model import GPT

        opened = Model(model)
        h = opened.graph.hparams
        config = Config(
            name="generated", n_layer=h.n_layer, n_embd=h.n_embd, n_head=h.n_head, n_query_groups=h.n_head_kv,
            head_size=h.head_dim, intermediate_size=h.n_ff, vocab_size=h.n_vocab, padded_vocab_size=h.n_vocab,
            block_size=64, rotary_percentage=1.0, parallel_residual=False, bias=False, attn_bias=h.arch == "qwen2",
            norm_class_name="RMSNorm", norm_eps=h.eps, mlp_class_name="LLaMAMLP", rope_base=int(h.rope.theta),
            norm_qk=h.arch == "qwen3",
        )  # fmt: skip
        gpt = GPT(config)
        names = {
            "norm_1.weight": ("attn_norm.weight",), "norm_2.weight": ("ffn_norm.weight",),
            "attn.qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
            "attn.qkv.bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
            "attn.norm_q.weight": ("attn_q_norm.weight",), "attn.norm_k.weight": ("attn_k_norm.weight",),
            "attn.proj.weight": ("attn_output.weight",), "mlp.fc_1.weight": ("ffn_gate.weight",),
            "mlp.fc_2.weight": ("ffn_up.weight",), "mlp.proj.weight": ("ffn_down.weight",),
        }  # fmt: skip
        whole = {"transformer.wte.weight": "token_embd", "transformer.ln_f.weight": "output_norm"}
        gpt.load_state_dict(_state(opened, whole | {"lm_head.weight": "output"}, "transformer.h", names, halves=True))
        gpt = gpt.to(DTYPES[dtype]).eval()
        gpt.set_kv_cache(1, 64, dtype=DTYPES[dtype])
        with tracediff.record(gpt, out, gguf=model), torch.inference_mode():
            for given in STEPS:
                gpt(torch.tensor([given.tokens]), torch.tensor(given.positions))

    return trace


# ---- engines that are a file to read


def gpt_fast(dtype: str) -> Trace:
    """`gpt-fast/model.py` in the folder of packages: Llama with one matrix for Q, K and V, in the GGUF's own order."""

    def trace(model: Path, out: Path) -> None:
        theirs = _source("gpt-fast/model.py")
        opened = Model(model)
        h = opened.graph.hparams
        if h.arch != "llama":
            raise NotForThisModelError
        config = theirs.ModelArgs(
            block_size=64, vocab_size=h.n_vocab, n_layer=h.n_layer, n_head=h.n_head, dim=h.n_embd,
            intermediate_size=h.n_ff, n_local_heads=h.n_head_kv, rope_base=int(h.rope.theta), norm_eps=h.eps,
        )  # fmt: skip
        names = {
            "attention.wqkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
            "attention.wo.weight": ("attn_output.weight",),
            "attention_norm.weight": ("attn_norm.weight",), "ffn_norm.weight": ("ffn_norm.weight",),
            "feed_forward.w1.weight": ("ffn_gate.weight",), "feed_forward.w2.weight": ("ffn_down.weight",),
            "feed_forward.w3.weight": ("ffn_up.weight",),
        }  # fmt: skip
        net = theirs.Transformer(config)
        whole = {"tok_embeddings.weight": "token_embd", "norm.weight": "output_norm", "output.weight": "output"}
        net.load_state_dict(_state(opened, whole, "layers", names))
        net = net.to(DTYPES[dtype]).eval()
        net.setup_caches(1, 64)
        with tracediff.record(net, out, gguf=model), torch.inference_mode():
            for given in STEPS:
                net(torch.tensor([given.tokens]), torch.tensor(given.positions))

    return trace


def llms_from_scratch(dtype: str) -> Trace:
    """Qwen3 of a textbook, with names of its own and without a cache: the prompt alone."""

    def trace(model: Path, out: Path) -> None:
        from llms_from_scratch.qwen3 import Qwen3Model

        opened = Model(model)
        h = opened.graph.hparams
        if h.arch != "qwen3":
            raise NotForThisModelError
        net = Qwen3Model(
            {
                "vocab_size": h.n_vocab, "context_length": 64, "emb_dim": h.n_embd, "n_heads": h.n_head,
                "n_layers": h.n_layer, "hidden_dim": h.n_ff, "head_dim": h.head_dim, "qk_norm": True,
                "n_kv_groups": h.n_head_kv, "rope_base": h.rope.theta, "dtype": DTYPES[dtype],
            }
        )  # fmt: skip
        names: dict[str, tuple[str, ...]] = {
            "att.W_query.weight": ("attn_q.weight",), "att.W_key.weight": ("attn_k.weight",),
            "att.W_value.weight": ("attn_v.weight",),
            "att.out_proj.weight": ("attn_output.weight",), "att.q_norm.scale": ("attn_q_norm.weight",),
            "att.k_norm.scale": ("attn_k_norm.weight",), "norm1.scale": ("attn_norm.weight",),
            "norm2.scale": ("ffn_norm.weight",),
            "ff.fc1.weight": ("ffn_gate.weight",), "ff.fc2.weight": ("ffn_up.weight",),
            "ff.fc3.weight": ("ffn_down.weight",),
        }  # fmt: skip
        whole = {"tok_emb.weight": "token_embd", "final_norm.scale": "output_norm", "out_head.weight": "output"}
        net.load_state_dict(_state(opened, whole, "trf_blocks", names))
        with tracediff.record(net.eval(), out, gguf=model), torch.inference_mode():
            net(torch.tensor([PROMPT]))

    return trace


def _state(
    model: Model, whole: dict[str, str], layers: str, names: dict[str, tuple[str, ...]], *, halves: bool = False
) -> dict[str, torch.Tensor]:
    """The file's values under an engine's names, those of a layer side by side where there are several; what the file
    lacks is left out. Of an engine that pairs halves Q and K lie in the order of checkpoints.
    """
    get, tensors = partial(values_of, model, halves=halves), model.tensors
    tied = "output.weight" not in tensors
    state = {
        theirs: get(f"{'token_embd' if tied and ours == 'output' else ours}.weight") for theirs, ours in whole.items()
    }
    for n in range(model.graph.hparams.n_layer):
        for theirs, ours in names.items():
            if f"blk.{n}.{ours[0]}" in tensors:
                state[f"{layers}.{n}.{theirs}"] = np.concatenate([get(f"blk.{n}.{name}") for name in ours])
    return {name: torch.from_numpy(values.copy()) for name, values in state.items()}


def values_of(model: Model, name: str, *, halves: bool) -> np.ndarray:
    """A tensor's values, float32; Q and K as checkpoints have them for an engine that pairs `halves`."""
    h, values = model.graph.hparams, model.tensors.get(name).astype(np.float32)
    permuted = h.arch in PERMUTED_ARCHITECTURES and split(name)[1].partition(".")[0] in PERMUTED_OPS
    return neighbours(values, h.head_dim, 0, inverse=True) if halves and permuted else values


def _source(path: str) -> Any:
    """A module that is a file in one of the folders of packages."""
    found = next((folder for folder in map(Path, sys.path) if (folder / path).exists()), None)
    if found is None:
        raise FileNotFoundError(f"{path} is in no folder of packages")
    spec = importlib.util.spec_from_file_location("engine", found / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine"] = module
    spec.loader.exec_module(module)
    return module


# ---- modules that no hooks of torch reach


class _Tapped:
    """A module whose output, and input where it has a name, are recorded."""

    def __init__(self, module: Any, output: Callable[[Any], Any], given: Callable[[Any], Any] = lambda x: x) -> None:
        self._module, self._output, self._given = module, output, given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self._output(self._module(self._given(x), *args, **kwargs))


# ---- mlx-lm

# Of each module in a block of mlx-lm: the op that it is, and where it is the only one to be handed it, the op before.
_MLX = {
    "input_layernorm": ("attn_norm", ""), "self_attn.q_proj": ("attn_q", ""), "self_attn.k_proj": ("attn_k", ""),
    "self_attn.v_proj": ("attn_v", ""), "self_attn.q_norm": ("attn_q_norm", ""),
    "self_attn.k_norm": ("attn_k_norm", ""), "self_attn.o_proj": ("attn_output", "attn_kqv"),
    "post_attention_layernorm": ("ffn_norm", "attn_residual"), "mlp.gate_proj": ("ffn_gate", ""),
    "mlp.up_proj": ("ffn_up", ""), "mlp.down_proj": ("ffn_down", "ffn_act"),
}  # fmt: skip


def mlx(dtype: str, bits: int = 0) -> Trace:
    """Its own classes, given the file's values; where `bits` are given its own quantisation of these."""

    def trace(model: Path, out: Path) -> None:
        import mlx.core as mx
        from mlx import nn
        from mlx_lm.models.cache import KVCache

        lm = _mlx_model(model, getattr(mx, {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[dtype]))
        if bits:
            nn.quantize(lm, bits=bits)
        cache = [KVCache() for _ in lm.layers]
        with taps(model, out, "mlx") as tap:
            record = _recording(tap, lambda x: torch.from_numpy(np.array(x.astype(mx.float32))).to(DTYPES[dtype]))
            _tap_mlx(lm, record)
            for step, given in enumerate(STEPS):
                tap.begin(step, given)
                logits = lm(mx.array([list(given.tokens)]), cache=cache)
                record("output")(logits)

    return trace


def _mlx_model(model: Path, dtype: Any) -> Any:
    import importlib

    import mlx.core as mx

    opened = Model(model)
    h = opened.graph.hparams
    theirs = importlib.import_module(f"mlx_lm.models.{h.arch}")
    tied = "output.weight" not in opened.tensors
    lm = theirs.Model(
        theirs.ModelArgs.from_dict(
            {
                "model_type": h.arch, "hidden_size": h.n_embd, "num_hidden_layers": h.n_layer,
                "intermediate_size": h.n_ff, "num_attention_heads": h.n_head, "rms_norm_eps": h.eps,
                "vocab_size": h.n_vocab, "num_key_value_heads": h.n_head_kv, "max_position_embeddings": 64,
                "head_dim": h.head_dim, "tie_word_embeddings": tied, "rope_theta": h.rope.theta,
            }
        )
    )  # fmt: skip
    names: dict[str, tuple[str, ...]] = {
        f"{at}.{part}": (f"{ours}.{part}",)
        for at, (ours, _) in _MLX.items() for part in ("weight", "bias")
    }  # fmt: skip
    whole = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
    whole |= {} if tied else {"lm_head.weight": "output"}
    state = _state(opened, whole, "model.layers", names, halves=True)
    lm.load_weights([(name, mx.array(values.numpy()).astype(dtype)) for name, values in state.items()])
    return lm


def _tap_mlx(lm: Any, record: Callable[..., Callable[[Any], Any]]) -> None:
    for n, block in enumerate(lm.layers):
        for at, (ours, before) in _MLX.items():
            *parents, name = at.split(".")
            parent = getattr(block, parents[0]) if parents else block
            if hasattr(parent, name):
                before = before or (f"ffn_residual@{n - 1}" if n and ours == "attn_norm" else "")
                earlier, _, layer = before.partition("@")
                given = record(f"blk.{layer or n}.{earlier}") if before else lambda x: x
                setattr(parent, name, _Tapped(getattr(parent, name), record(f"blk.{n}.{ours}"), given))
        attention = block.self_attn
        attention.rope = _Turns(attention.rope, [record(f"blk.{n}.attn_{x}_rope", heads=True) for x in "qk"])
    last = record(f"blk.{len(lm.layers) - 1}.ffn_residual")
    lm.model.norm = _Tapped(lm.model.norm, record("output_norm"), last)
    lm.model.embed_tokens = _Tapped(lm.model.embed_tokens, record("token_embd"))


class _Turns:
    """Rope, called for Q and K by turns."""

    def __init__(self, rope: Any, outputs: list[Callable[[Any], Any]]) -> None:
        self._rope, self._outputs = rope, outputs

    def __call__(self, x: Any, **given: Any) -> Any:
        self._outputs.reverse()
        return self._outputs[1](self._rope(x, **given))


# ---- CTranslate2


def ctranslate2(dtype: str) -> Trace:
    """Its own converter, given transformers' model of the file. It hands out logits alone, of a prompt."""

    def trace(model: Path, out: Path) -> None:
        import ctranslate2 as theirs
        from ctranslate2.converters import transformers as conversion

        loaded, _ = load(model, None, torch.float32, "cpu")
        loaded.config.quantization_config = None  # that of the file, which was dequantised
        loader = conversion._MODEL_LOADERS[type(loaded.config).__name__]
        vocabulary = [f"<{i}>" for i in range(loaded.config.vocab_size)]
        spec = loader.get_model_spec(loaded)
        loader.set_vocabulary(spec, vocabulary)
        loader.set_config(spec.config, loaded, SimpleNamespace(bos_token="<0>", eos_token="<1>", unk_token="<2>"))
        spec.validate()
        spec.optimize(quantization=None if dtype == "float32" else dtype)
        with TemporaryDirectory() as folder:
            spec.save(folder)
            generator = theirs.Generator(folder, compute_type=dtype, intra_threads=1)
            (logits,) = np.array(generator.forward_batch([[vocabulary[token] for token in PROMPT]]))
        with tracediff.Recorder(out, engine="CTranslate2", gguf=model) as record:
            record.step([*PROMPT])
            record("output", logits)

    return trace


# ---- tinygrad


def tinygrad(model: Path, out: Path) -> None:
    """Its own GGUF loader and model (tinygrad.llm), each block's ops one by one instead of one graph."""
    from tinygrad import Tensor
    from tinygrad.llm import model as llm

    transformer, _ = llm.Transformer.from_gguf(model, max_context=64)
    rotate = llm.apply_rope
    with taps(model, out, "tinygrad") as tap, ExitStack() as patched:
        patched.callback(setattr, llm, "apply_rope", rotate)
        record = _recording(tap, lambda x: torch.from_numpy(x.realize().numpy()))
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


def _recording(tap: Taps, read: Callable[[Any], torch.Tensor]) -> Callable[..., Callable[[Any], Any]]:
    def record(name: str, heads: bool = False) -> Callable[[Any], Any]:
        def recorded(x: Any) -> Any:
            values = read(x)
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
