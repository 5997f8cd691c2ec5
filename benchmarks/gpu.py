"""The torch engine, recording and transformers on a GPU in every dtype, judged by replay on the host.

    python benchmarks/gpu.py [--device cuda] [--processes 8] [--out docs/cuda.md]

Generates its models, and needs no network; under ten minutes on one GPU. No run has a mistake but those of the table of
planted ones, so whatever else diverges is a false alarm. Ends with 1 where there is one, a rounding differs between
host and device, or a planted mistake is not located. With `--device cpu` the same runs on the host, which shows that
the program works, and nothing of a GPU. (No script here may be named cuda.py: torch looks for a package `cuda`, and
would find it instead.)
"""

import argparse
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tiny_checkpoints
import torch
import xla_engine
from tiny_checkpoints import CLASSES
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import ScalingType

from tracediff.diagnose.mistakes import BANK
from tracediff.diagnose.planting import plant
from tracediff.engine.recorder import DTYPES, TensorWriter
from tracediff.engine.torch_run import TorchOptions, greedy, trace_torch
from tracediff.engine.transformers_run import Decoder, load, trace_model
from tracediff.errors import TracediffError
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.synthetic import Shape, write_model
from tracediff.names import Capture
from tracediff.numerics.floors import TOGETHER, UNIT, variance_of_truncated_sums
from tracediff.numerics.roundings import rounding_named
from tracediff.pipeline import Effort, check_trace
from tracediff.result import Result
from tracediff.trace.writer import TraceWriter

TOKENS = xla_engine.PROMPT
SIZES: dict[str, Any] = {"n_layer": 3, "n_embd": 512, "n_head": 8, "n_head_kv": 2, "n_ff": 1152, "n_vocab": 1024}
SHAPES = {
    "llama": Shape("llama", **SIZES, theta=500_000.0, eps=1e-5),
    "qwen3": Shape("qwen3", **{**SIZES, "n_head": 4}, head_dim=128),
    # Rows as long as those of real models: kernels split them, and add the parts up in the dtype of what comes out.
    "qwen2": Shape("qwen2", n_layer=2, n_embd=1536, n_head=12, n_head_kv=2, n_ff=8960, n_vocab=2048),
}
SHAPES["qwen3 of equal heads"] = replace(SHAPES["qwen3"], n_head_kv=4)  # which some kernels of attention ask for
TYPICAL, GENERAL = ("llama", "qwen3"), ("llama", "qwen3", "qwen2")
# Products of linear layers, and the architectures whose layers have them.
EIGHT_BITS = {"fp8": GENERAL, "fp8 fast": TYPICAL, "fp8/tensor": TYPICAL, "int8": GENERAL}
BLOCKS = "fp8/128x128"  # what has scales for 128 activations and 128 x 128 weights, as DeepSeek's: on a GPU alone
SECONDS = 10  # for the causes of each run: a device is dear
ROUNDED, RIGHT, PLANTED = "Roundings, host against device", "Runs without a mistake", "Mistakes planted in the engine"
REPLAYED, SUMS = "Replay on the device", "Sums of products"
WEIGHTS = ("F16", "Q8_0", "Q4_0")
ROUNDINGS = (
    "tf32", "f16", "bf16", "e4m3", "e5m2", "gf4", "q8_0", "truncated q8_0", "q8_1", "q8_K", "int8/32", "int8/row",
    "truncated int8/64", "full int4/32", "wide int8/32", "uint8/64", "fp8/128", "fp8/128x128", "fp8/row", "fp8/tensor",
    "uint7/tensor", "affine4/64", "nf4/64",
)  # fmt: skip
# What the host does not find of this model either: nothing overflows, so float16 is coarse arithmetic and a maximum is
# not missed; and bfloat16 hides what an eps does, a norm's own roundings, or one channel of 512 in its mean, and how
# little a cap bends small scores.
COARSE = {
    *product(("scores_f16@1", "ffn_act_f16@1", "norm_f32_overflow@1", "softmax_without_maximum@1"), ("f32", "bf16")),
    *product(
        (
            "eps@1",
            "eps_outside_root@1",
            "norm_f16_overflow@1",
            "norm_in_half@1",
            "norm_rounded_before_weight@1",
            "variance_unbiased@1",
            "softcap@1",
        ),
        ("bf16",),
    ),
}
_NONE = """# On a GPU: none was at hand, and nothing below ran on one

`tests/test_device.py` has what a device must show, marked `cuda` and skipped without one: the same bits of every
rounding, the same findings by replay there."""
_FOUND = """# On a GPU

What an H200 does (torch 2.11, CUDA 13.0), as its records tell; some of them are in `tests/h200.npz`, and in
`tests/test_tensor_cores.py` and `tests/test_single_tokens.py` is what must come of them:

- In TF32 operands are rounded to nearest, of two the even one. Steps of one token are multiplied in float32. Sums are
  cut off, so they come out smaller: over 1,536 terms by 3e-6 of themselves in some matmuls, by 4e-7 in others, which
  have other kernels. Replay finds that by itself (`sums on tensor cores`).
- Products in float8 are added up 32 at a time in 14 bits, each cut off by itself: with float32 between every 128 of
  them sums of one sign are 6e-4 too small, whatever their length, and without (`use_fast_accum`) 6e-3 over 512 terms
  and 0.13 over 8,192. Both are within the noise that replay expects.
- JAX multiplies prompts of float32 in TF32 as well. Of a single token times a matrix in half precision XLA makes a
  multiplication and a sum: each product is rounded to half precision, and added up in float32, bit for bit. Replay
  finds that by itself (`products in bfloat16`); before it did, every matmul of decoded tokens diverged.
- PyTorch's own attention of float32 in TF32, where keys have fewer heads than queries, scales queries and keys by
  D^-1/4 each before it rounds them (`TF32 of scaled values`). Behind hidden states a layer in TF32 is off by 1e-7
  whatever replay does, for one rounding that turns in a query turns those after it, as one to float16 does.
- In float16 matmuls of long rows may be added up in parts that are float16 themselves. PyTorch allows that unless it
  is told otherwise, as the torch engine tells it now: before it did, a run of it in float16 over rows of 8,960
  diverged. (Its trace was not kept: this is the likeliest reason and no more.) What transformers multiplied of the
  same model matched.
- Where PyTorch divides by a number, `amax / 448`, a GPU multiplies by its inverse: scales of some rows are a unit off,
  and values in bfloat16 that lie halfway between two others, dozens of a row, turn by that. Replay finds which did."""
LARGE = Shape("qwen2", n_layer=24, n_embd=896, n_head=14, n_head_kv=2, n_ff=4864, n_vocab=32_768)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def roundings(device: str) -> Iterator[tuple[str, ...]]:
    """Whether each rounding gives the same bits on host and device, over values of thirty decades."""
    torch.manual_seed(0)
    x = torch.randn(512, 1024) * 10 ** torch.empty(512, 1).uniform_(-15, 15)
    for name in ROUNDINGS:
        rounding = rounding_named(name)
        same = torch.allclose(rounding(x), rounding(x.to(device)).cpu(), rtol=0, atol=0, equal_nan=True)
        yield name, "identical" if same else "DIFFERS"


@dataclass(frozen=True)
class Run:
    """An engine that makes no mistake: torch's own, or transformers with this attention."""

    arch: str
    weights: str
    dtype: str
    attention: str = ""
    backend: str = ""  # of scaled_dot_product_attention, where not torch chooses
    products: str = ""  # "tf32" or of EIGHT_BITS, where matmuls run in these
    is_tiny: bool = False  # a class of transformers that its GGUF loader does not read (tiny_checkpoints.py)
    is_compiled: bool = False  # each layer, of which then only the hidden states are seen
    autocast: str = ""  # PyTorch's, to this type
    by_jax: bool = False
    capture: Capture = "all"

    @property
    def file(self) -> str:
        """The name of its model."""
        return f"{'tiny-' * self.is_tiny}{self.arch}-{self.weights}.gguf"

    @property
    def words(self) -> str:
        """How it is said in the table."""
        engine = "JAX" if self.by_jax else "transformers" if self.attention else "torch"
        autocast = f"autocast to {self.autocast}" * bool(self.autocast)
        of = " ".join(filter(None, (self.attention, self.backend, "compiled" * self.is_compiled, autocast)))
        seen = "hidden states alone" * (self.is_compiled or self.capture == "layers")
        parts = (engine, of, self.products or self.dtype, f"{self.arch} {self.weights}", seen)
        return ", ".join(filter(None, parts))

    def trace(self, model: Path, out: Path, device: str) -> None:
        """Run it, and write its trace: a prompt and two decoded tokens."""
        options = TorchOptions(dtype=self.dtype, device=device, capture=self.capture)
        if self.by_jax:
            xla_engine.trace(model, out, self.dtype, self.capture, TOKENS, 2)
            return
        if not self.attention:
            trace_torch(model, out, options, TOKENS, 2)
            return
        if self.is_tiny:
            loaded = tiny_checkpoints.load(self.arch, model, DTYPES[self.dtype]).to(device)
        else:
            loaded, _ = load(model, None, DTYPES[self.dtype], device)
        if self.is_compiled:
            trace_compiled(loaded, out, self.attention)
            return
        if self.products in EIGHT_BITS or self.products == BLOCKS:
            in_eight_bits(loaded, self.products)
        backends = [getattr(SDPBackend, self.backend)] if self.backend else []
        cast = torch.autocast(device, DTYPES[self.autocast]) if self.autocast else nullcontext()
        with tf32(self.products == "tf32"), cast, sdpa_kernel(backends) if backends else nullcontext():
            trace_model(loaded, model, out, options, TOKENS, 2, attention=self.attention)


def runs(device: str) -> list[Run]:
    """Everything that is run without a mistake."""
    made = [Run(arch, weights, dtype) for arch in TYPICAL for weights in WEIGHTS for dtype in DTYPES]
    made += [Run("qwen2", "F16", dtype) for dtype in DTYPES]
    for arch in GENERAL:
        made += [Run(arch, "F16", dtype, attention) for dtype in DTYPES for attention in ("eager", "sdpa")]
        made += [
            Run(arch, "F16", "f32", attention, products="tf32") for attention in ("eager", "sdpa") if on_gpu(device)
        ]
        made.append(Run(arch, "F16", "f32", "sdpa", autocast="bf16"))
    kernels = ("FLASH_ATTENTION", "MATH", *(("EFFICIENT_ATTENTION", "CUDNN_ATTENTION") if on_gpu(device) else ()))
    made += [Run("qwen3 of equal heads", "F16", dtype, "sdpa", of) for of in kernels for dtype in ("bf16", "f16")]
    made += [Run(arch, "F16", "bf16", "sdpa", products=products) for products, of in EIGHT_BITS.items() for arch in of]
    made += [Run(arch, "F16", "bf16", "sdpa", products=BLOCKS) for arch in TYPICAL if on_gpu(device)]
    made += [
        Run(arch, "F16", dtype, attention, is_compiled=True)
        for arch, attention in zip(TYPICAL, ("sdpa", "eager"), strict=True)
        for dtype in ("f32", "bf16", "f16")
    ]
    made += [Run(arch, "F32", dtype, "eager", is_tiny=True) for arch in CLASSES for dtype in ("f32", "bf16", "f16")]
    if find_spec("jax"):
        made += [
            Run("llama", "F16", dtype, by_jax=True, capture=capture)
            for dtype in ("f32", "bf16", "f16")
            for capture in ("all", "layers")
        ]
    # First what takes longest.
    return sorted(made, key=lambda run: (run.arch != "qwen2", run.products not in EIGHT_BITS, not run.is_compiled))


def on_gpu(device: str) -> bool:
    """Whether it is one."""
    return device.startswith("cuda")


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Matmuls of float32 in TF32, and as they were."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Watched(torch.nn.Module):
    """A layer that is compiled, and what it returned last."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if name.endswith("_type")})
        self._layer = torch.compile(layer, dynamic=False)
        self.result = torch.empty(0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer."""
        result = self._layer(*args, **kwargs)
        self.result = result[0] if isinstance(result, tuple) else result
        return result


def trace_compiled(loaded: Any, out: Path, attention: str) -> None:
    """Write a trace of hidden states by hand: `record` has nothing to see within what is compiled."""
    torch._dynamo.config.recompile_limit = 64  # a cache grows with each step; beyond the limit nothing is compiled
    loaded.set_attn_implementation(attention)
    loaded.model.layers = torch.nn.ModuleList(map(Watched, loaded.model.layers))
    taken: dict[str, Tensor] = {}
    loaded.model.embed_tokens.register_forward_hook(lambda module, args, y: taken.update(embedding=y))
    decoder = Decoder(loaded)
    with TraceWriter(out, "transformers, layers compiled") as writer, torch.inference_mode():
        to = TensorWriter(writer)
        for step, given in greedy(decoder, TOKENS, 2):
            decoder.run(given)
            to.step(step, given.tokens, given.positions)
            taken |= {f"blk.{i}.ffn_residual": layer.result for i, layer in enumerate(loaded.model.layers)}
            for op, values in (taken | {"output": decoder.logits}).items():
                to.op(step, op, values.flatten(0, -2))


def in_eight_bits(loaded: Any, products: str) -> None:
    """Let the linear layers but the head multiply in float8 (e4m3) or int8, with a scale for each row of activations
    and of weights, or one for the whole of them, as engines serve such checkpoints; `fast` is without float32 between.
    """
    held_in = torch.int8 if products == "int8" else torch.float8_e4m3fn
    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and products == BLOCKS:
            held, scale = of_blocks(module.weight.detach(), 128)
            module.forward = partial(linear_in_blocks, held=held, scale=scale, bias=module.bias)  # type: ignore[method-assign]
        elif isinstance(module, torch.nn.Linear) and name != "lm_head":
            held, scale = of_eight_bits(module.weight.detach(), held_in, products.endswith("/tensor"))
            module.forward = partial(  # type: ignore[method-assign]
                linear_in_eight_bits, held=held, scale=scale, bias=module.bias, fast=products.endswith("fast")
            )


def linear_in_eight_bits(x: Tensor, held: Tensor, scale: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    """Of rows x [..., n] and weights [m, n] of eight bits, scales [m or 1, 1]: as torch multiplies them."""
    rows = x.flatten(0, -2)
    given, factor = of_eight_bits(rows, held.dtype, len(scale) < len(held))
    if held.dtype == torch.int8:
        given = torch.nn.functional.pad(given, (0, 0, 0, 32))  # on a GPU more than 16 rows are asked for
        y = torch._int_mm(given, held.t())[: len(rows)]
        y = (y.float() * factor * scale.t()).to(x.dtype)
        y = y if bias is None else y + bias
    else:
        y = torch._scaled_mm(given, held.t(), factor, scale.t(), bias, out_dtype=x.dtype, use_fast_accum=fast)
    return y.unflatten(0, x.shape[:-1])


def linear_in_blocks(x: Tensor, held: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Of rows x [..., n] and what `of_blocks` made of weights [m, n]: as cuBLAS multiplies them."""
    rows = x.flatten(0, -2)
    given, factor = of_blocks(torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 16), value=1.0), 1)
    scale = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))  # four are read at once
    y = torch.nn.functional.scaled_mm(
        given, held.t(), factor.t().contiguous().t(), ScalingType.BlockWise1x128, scale.t(),
        ScalingType.BlockWise128x128, output_dtype=x.dtype,
    )[: len(rows)]  # fmt: skip
    return (y if bias is None else y + bias).unflatten(0, x.shape[:-1])


def of_blocks(x: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """The rows of x [n, m] in float8, and in float32 the scales [n / high, m / 128] of its blocks."""
    blocks = x.float().unflatten(1, (-1, 128)).unflatten(0, (-1, high))
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (blocks / scale).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1), scale[:, 0, :, 0]


def of_eight_bits(x: Tensor, dtype: torch.dtype, whole: bool = False) -> tuple[Tensor, Tensor]:
    """The rows of x [n, m] in eight bits, and in float32 their scales [n, 1], or that of them all [1, 1]."""
    most = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.float().abs().amax((0, 1) if whole else 1, keepdim=True) / most
    quotients = x.float() / scale
    return (quotients.round() if dtype == torch.int8 else quotients).to(dtype), scale


def judged(run: Run, device: str, folder: Path, keep: Path | None) -> tuple[str, ...]:
    """A row of the table of runs without a mistake."""
    out, model, began = folder / f"{os.getpid()}.trace", folder / run.file, time.perf_counter()
    try:
        run.trace(model, out, device)
    except Exception as error:  # one engine that does not run says nothing of the others
        return run.words, f"NOT RUN: {type(error).__name__}: {' '.join(str(error).split())[:160]}", "", "", ""
    traced = time.perf_counter() - began
    result = check_trace(out, model, effort=Effort(seconds=SECONDS))
    judging = time.perf_counter() - began - traced
    if keep and result.verdict != "match":
        folder = keep / re.sub("[^a-z0-9_]+", "-", run.words.lower())
        folder.mkdir(parents=True, exist_ok=True)
        for file in (out, out.with_suffix(".bin")):
            shutil.copy(file, folder)
    return run.words, verdict(result), arithmetic(result), f"{traced:.1f} s", f"{judging:.1f} s"


def verdict(result: Result) -> str:
    """The verdict, with what is called faulty."""
    if result.verdict == "match":
        return "match"
    first = "; ".join(f"{op.op}: {op.cause.text if op.cause else op.shape}" for op in result.faulty[:2])
    return f"**{result.verdict.upper()}**: {len(result.faulty)} ops; {first}"


def arithmetic(result: Result) -> str:
    """What was found that the engine rounds, of all ops."""
    found = {op.local.arithmetic for op in result.ops if op.local and op.local.arithmetic}
    return ", ".join(sorted(map(str, found)))


def plants(model: Path) -> list[tuple[str, str]]:
    """Each known mistake that this model can have, in layer 1, in two dtypes."""
    file = GGUFFile(model)
    graph, found = build_graph(file), []
    for name in BANK:
        try:
            plant(graph, file, f"{name}@1")
        except TracediffError:
            continue  # of another architecture, or another type of weights
        found += [(f"{name}@1", dtype) for dtype in ("f32", "bf16")]
    return found


def planted(fault_and_dtype: tuple[str, str], device: str, folder: Path) -> tuple[str, ...]:
    """A row for a mistake that is planted in the engine on the device."""
    fault, dtype = fault_and_dtype
    out, model = folder / f"{os.getpid()}.trace", folder / "llama-F16.gguf"
    try:
        trace_torch(model, out, TorchOptions(dtype=dtype, device=device, faults=(fault,)), TOKENS[:24], 1)
    except RuntimeError as error:
        return fault, dtype, f"NOT RUN: {' '.join(str(error).split())[:160]}", ""
    result = check_trace(out, model, effort=Effort(seconds=SECONDS))
    first = result.first_divergence.op if result.first_divergence else "NOT LOCATED"
    return fault, dtype, first, ", ".join(dict.fromkeys(op.cause.name for op in result.faulty if op.cause))


def replayed(device: str, folder: Path) -> Iterator[tuple[str, ...]]:
    """Runs that are judged on the device and on the host: a right one, and one that is mistaken."""
    out = folder / "replayed.trace"
    for arch, dtype, fault in (
        ("llama", "f32", ""), ("llama", "bf16", ""), ("qwen2", "f16", ""), ("qwen3", "f32", "rope_theta@1"),
        ("qwen2", "bf16", "norm_scaled@1"),
    ):  # fmt: skip
        model, faults = folder / f"{arch}-F16.gguf", (fault,) if fault else ()
        trace_torch(model, out, TorchOptions(dtype=dtype, device=device, faults=faults), TOKENS, 2)
        here, there = (check_trace(out, model, effort=Effort(device=on)) for on in ("cpu", device))
        floors = [
            abs(math.log(one.local.floor / other.local.floor))
            for one, other in zip(here.ops, there.ops, strict=True)
            if one.local and other.local and one.local.floor and other.local.floor
        ]
        same = (here.verdict, [f.text for f in here.findings]) == (there.verdict, [f.text for f in there.findings])
        yield f"{arch} in {dtype}", fault or "none", there.verdict, "yes" if same else "**NO**", f"{max(floors):.1e}"


def sums(device: str) -> Iterator[tuple[str, ...]]:
    """By how much of themselves sums of products are too large, and how far the worst of them is off."""
    for n, signs in product((512, 2048, 8192), ("both", "one")):
        torch.manual_seed(n)
        x, w = torch.randn(64, n, device=device), torch.randn(2048, n, device=device)
        x, w = (x.abs(), w.abs()) if signs == "one" else (x, w)
        rounded = rounding_named("tf32")
        with tf32(True):
            yield "TF32", str(n), signs, *off(x @ w.T, rounded(x), rounded(w), "tensor cores")
        (a, by_a), (b, by_b) = of_eight_bits(x, torch.float8_e4m3fn), of_eight_bits(w, torch.float8_e4m3fn)
        for fast in (False, True):
            made = torch._scaled_mm(a, b.t(), by_a, by_b.t(), out_dtype=torch.float32, use_fast_accum=fast)
            words = f"float8{', fast' if fast else ''}"
            yield words, str(n), signs, *off(made, a.double() * by_a, b.double() * by_b, "fp8 tensor cores")


def off(made: Tensor, x: Tensor, w: Tensor, accumulate: str) -> tuple[str, str]:
    """The factor less 1 between what was made of x [n, k] and w [m, k] and their product, and the largest error in
    units of the noise that replay expects of such sums.
    """
    x, w = x.double(), w.double()
    y, n = x @ w.T, math.ceil(x.shape[1] / TOGETHER[accumulate])
    noise = variance_of_truncated_sums(n, x.square() @ w.square().T, y).sqrt() * UNIT[accumulate]
    error = made.double() - y
    return f"{float((error * y).sum() / y.square().sum()):.1e}", f"{float((error.abs() / noise).max()):.2f}"


def speed(device: str, folder: Path) -> Iterator[tuple[str, ...]]:
    """Forward passes of transformers, recorded and plain, as ratios within this run."""
    model = write_model(folder / "large.gguf", LARGE, "F16")
    loaded, _ = load(model, None, torch.bfloat16, device)
    ids = torch.tensor([TOKENS], device=device)

    def plain() -> None:
        with torch.inference_mode():
            loaded(ids, use_cache=True)

    base = seconds(device, plain)
    for capture in ("stats", "layers", "all"):
        options: Any = TorchOptions(dtype="bf16", device=device, capture=capture)
        taken = seconds(device, lambda o=options: trace_model(loaded, model, folder / "speed.trace", o, TOKENS))  # type: ignore[misc]
        yield f"transformers, recorded ({capture}) / plain forward", f"{taken / base:.2f}"
    for dtype in ("f32", "bf16"):
        options = TorchOptions(dtype=dtype, device=device, capture="stats")
        taken = seconds(device, lambda o=options: trace_torch(model, folder / "speed.trace", o, TOKENS))  # type: ignore[misc]
        yield f"torch engine ({dtype}, stats, the file read again) / plain forward", f"{taken / base:.2f}"
    model = folder / "qwen2-F16.gguf"
    for dtype in ("f32", "bf16"):
        trace = trace_torch(model, folder / "speed.trace", TorchOptions(dtype=dtype, device=device), TOKENS)
        there, here = (
            seconds(on, partial(check_trace, trace, model, effort=Effort(device=on)), 1, 0) for on in (device, "cpu")
        )
        yield f"check of a trace in {dtype} on the device / on the host", f"{there / here:.2f}"


def seconds(device: str, function: Callable[[], object], runs: int = 3, warm_up: int = 1) -> float:
    """The least of these runs after those that warm up."""
    taken = []
    for _ in range(warm_up + runs):
        began = time.perf_counter()
        function()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[warm_up:])


def parts(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, tuple[str, ...], Iterator[tuple[str, ...]]]]:
    """The tables: titles, headers, and rows as they come."""
    device = options.device
    for arch, shape in SHAPES.items():
        for weights in WEIGHTS if arch in TYPICAL else ("F16",):
            write_model(folder / f"{arch}-{weights}.gguf", shape, weights)
    for arch, known in CLASSES.items():
        known.write(arch, folder / Run(arch, "F32", "f32", is_tiny=True).file)
    yield ROUNDED, ("rounding", "bits"), roundings(device)
    yield SUMS, ("products", "terms", "signs", "too large by", "worst, in units of its noise"), sums(device)
    # Alone: several processes wait for each other's kernels.
    yield "Speed", ("", "ratio"), speed(device, folder)
    header = "engine", "planted", "verdict", "said alike", "floors differ by up to"
    yield REPLAYED, header, replayed(device, folder)
    with ProcessPoolExecutor(
        options.processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        rows = {
            RIGHT: [pool.submit(judged, run, device, folder, options.keep) for run in runs(device)],
            PLANTED: [pool.submit(planted, one, device, folder) for one in plants(folder / "llama-F16.gguf")],
        }
        yield RIGHT, ("engine", "verdict", "arithmetic found", "trace", "check"), finished(rows[RIGHT])
        yield PLANTED, ("planted", "dtype", "first faulty op", "named"), finished(rows[PLANTED])


def finished(rows: list[Future[tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    """Each as soon as it is there: one that takes long hides no other."""
    return (row.result() for row in as_completed(rows))


def page(device: str, made: dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]]) -> str:
    """The page of what was made so far."""
    on = torch.cuda.get_device_name() if on_gpu(device) else f"the host ({platform.machine()})"
    lines = [
        _FOUND if on_gpu(device) else _NONE,
        f"Made by `python benchmarks/gpu.py --device {device}` on {on}, torch {torch.__version__}. "
        "Traces are made on the device and judged on the host.",
    ]
    for title, (header, rows) in made.items():
        lines += [f"## {title}", table(header, sorted(rows) if title in (RIGHT, PLANTED) else rows)]
    return "\n\n".join(lines) + "\n"


def main() -> int:
    """Run it all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="the page, written anew with each row")
    parser.add_argument("--processes", type=int, default=1, help="that share the device")
    parser.add_argument("--keep", type=Path, help="a folder for the traces that do not match")
    options = parser.parse_args()
    if on_gpu(options.device) and not torch.cuda.is_available():
        print(f"no CUDA device is seen by torch {torch.__version__}", file=sys.stderr)
        return 2
    made: dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, header, rows in parts(options, Path(folder)):
            made[title] = header, []
            for row in rows:
                made[title][1].append(row)
                print(" | ".join(row), file=sys.stderr, flush=True)
                if options.out:
                    options.out.write_text(page(options.device, made))
    print(page(options.device, made))
    well = (
        all(row[1] == "identical" for row in made[ROUNDED][1])
        and all(row[1] == "match" for row in made[RIGHT][1])
        and all(row[3] == "yes" for row in made[REPLAYED][1])
        and not any("NOT RUN" in row[2] or ("NOT" in row[2] and row[:2] not in COARSE) for row in made[PLANTED][1])
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
