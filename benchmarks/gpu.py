"""The torch engine, recording and transformers on a GPU in every dtype, judged by replay on the host.

    python benchmarks/gpu.py [--device cuda] [--out docs/cuda.md]

Generates its models, of types that gguf-py writes, and needs neither llama.cpp nor a network; under ten minutes on one
GPU. No run has a mistake but those of the third table, so whatever else diverges is a false alarm. Ends with 1 where
there is one, a rounding differs between host and device, or a planted mistake is not located. With `--device cpu` the
same runs on the host, which shows that the program works, and nothing of a GPU. (No script here may be named cuda.py:
torch looks for a package `cuda`, and would find it instead.)
"""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tracediff.diagnose.mistakes import BANK
from tracediff.diagnose.planting import plant
from tracediff.engine.recorder import DTYPES
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.engine.transformers_run import load, trace_model
from tracediff.errors import TracediffError
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.synthetic import Shape, write_model
from tracediff.numerics.roundings import rounding_named
from tracediff.pipeline import Effort, check_trace
from tracediff.result import Result

TOKENS = [256, *((37 * i + 11) % 250 for i in range(63))]
SIZES: dict[str, Any] = {"n_layer": 3, "n_embd": 512, "n_head": 8, "n_head_kv": 2, "n_ff": 1152, "n_vocab": 1024}
SHAPES = {
    "llama": Shape("llama", **SIZES, theta=500_000.0, eps=1e-5),
    "qwen3": Shape("qwen3", **{**SIZES, "n_head": 4}, head_dim=128),
}
WEIGHTS = ("F16", "Q8_0", "Q4_0")
ROUNDINGS = ("tf32", "f16", "bf16", "q8_0", "q8_1", "q8_K", "int8/32", "int8/row", "uint8/64")
# Where nothing overflows, float16 is coarse arithmetic; and bfloat16 hides what an eps does.
COARSE = {"scores_f16@1", "ffn_act_f16@1", "norm_f16_overflow@1", "eps@1", "eps_outside_root@1"}
_NONE = """# On a GPU: none was at hand, and nothing below ran on one

Instead: roundings are checked against ggml's own bits and arithmetics against simulations on the host, tensor cores'
truncated sums among them (`tests/test_tensor_cores.py`: sound, and a mistake of 1% is seen; only where all terms of a
sum have one sign must `--arithmetic "... on tensor cores"` be given). `tests/test_device.py` has what a device must
show, marked `cuda` and skipped without one: the same bits of every rounding, the same findings by replay there."""
Models = dict[tuple[str, str], Path]  # by architecture and type of weights
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


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Matmuls of float32 in TF32, and as they were."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def runs(
    device: str, models: dict[tuple[str, str], Path], out: Path
) -> Iterator[tuple[str, Path, Callable[[], object]]]:
    """What is run: words, the model, and what writes the trace."""
    for (arch, weights), model in models.items():
        for dtype in DTYPES:
            options = TorchOptions(dtype=dtype, device=device)
            yield (
                f"torch, {dtype}, {arch} {weights}",
                model,
                lambda m=model, o=options: trace_torch(m, out, o, TOKENS, 2),  # type: ignore[misc]
            )
    for arch in SHAPES:
        model = models[arch, "F16"]
        for dtype, wide, attention in (
            ("f32", False, "eager"), ("f32", True, "eager"), ("f32", False, "sdpa"), ("bf16", False, "eager"),
            ("bf16", False, "sdpa"), ("f16", False, "eager"), ("f16", False, "sdpa"),
        ):  # fmt: skip
            words = f"transformers, {attention}, {'tf32' if wide else dtype}, {arch} F16"
            yield words, model, lambda m=model, d=dtype, w=wide, a=attention: transformers(m, out, device, d, w, a)  # type: ignore[misc]


def transformers(model: Path, out: Path, device: str, dtype: str, wide: bool, attention: str) -> None:
    """A trace by transformers, whose loader dequantises the file."""
    loaded, _ = load(model, None, DTYPES[dtype], device)
    with tf32(wide):
        trace_model(loaded, model, out, TorchOptions(dtype=dtype, device=device), TOKENS, 2, attention=attention)


def judged(device: str, models: Models, folder: Path) -> Iterator[tuple[str, ...]]:
    """A row for each run without a mistake."""
    out = folder / "run.trace"
    for words, model, trace in runs(device, models, out):
        print(words, file=sys.stderr)
        began = time.perf_counter()
        try:
            trace()
        except Exception as error:  # one engine that does not run says nothing of the others
            yield words, f"NOT RUN: {type(error).__name__}: {str(error)[:120]}", "", "", ""
            continue
        traced = time.perf_counter() - began
        result = check_trace(out, model, effort=Effort(device=device))
        yield (
            words,
            verdict(result),
            arithmetic(result),
            f"{traced:.1f} s",
            f"{time.perf_counter() - began - traced:.1f} s",
        )


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


def planted(device: str, model: Path, folder: Path) -> Iterator[tuple[str, ...]]:
    """A row for each known mistake that this model can have, planted in layer 1 of the engine on the device."""
    out, file = folder / "fault.trace", GGUFFile(model)
    graph = build_graph(file)
    for name in BANK:
        fault = f"{name}@1"
        try:
            plant(graph, file, fault)
        except TracediffError:
            continue  # of another architecture, or another type of weights
        for dtype in ("f32", "bf16"):
            trace_torch(model, out, TorchOptions(dtype=dtype, device=device, faults=(fault,)), TOKENS[:24], 1)
            result = check_trace(out, model, effort=Effort(device=device))
            first = result.first_divergence.op if result.first_divergence else "NOT LOCATED"
            causes = dict.fromkeys(op.cause.name for op in result.faulty if op.cause)
            yield fault, dtype, first, ", ".join(causes)


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


def seconds(device: str, function: Callable[[], object]) -> float:
    """The least of three runs after one that warms up."""
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        function()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def page(device: str, folder: Path) -> tuple[str, bool]:
    """The page, and whether all of it is as it should be."""
    models = {
        (arch, weights): write_model(folder / f"{arch}-{weights}.gguf", shape, weights)
        for arch, shape in SHAPES.items()
        for weights in WEIGHTS
    }
    gpu = device.startswith("cuda")
    on = torch.cuda.get_device_name() if gpu else f"the host ({platform.machine()})"
    title = "# On a GPU" if gpu else _NONE
    same = list(roundings(device))
    rows = list(judged(device, models, folder))
    faults = list(planted(device, models["llama", "F16"], folder))
    fast = list(speed(device, folder))
    well = (
        all(row[1] == "identical" for row in same)
        and all(row[1] == "match" for row in rows)
        and not any("NOT" in row[2] and row[0] not in COARSE for row in faults)
    )
    text = "\n\n".join(
        (
            title,
            f"Made by `python benchmarks/gpu.py --device {device}` on {on}, torch {torch.__version__}. "
            "Traces are made and judged on the device.",
            "## Roundings, host against device",
            table(("rounding", "bits"), same),
            "## Runs without a mistake",
            table(("engine", "verdict", "arithmetic found", "trace", "check"), rows),
            "## Mistakes planted in the torch engine",
            table(("planted", "dtype", "first faulty op", "named"), faults),
            "## Speed",
            table(("", "ratio"), fast),
        )
    )
    return text + "\n", well


def main() -> int:
    """Run it all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"no CUDA device is seen by torch {torch.__version__}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        text, well = page(options.device, Path(folder))
    if options.out:
        options.out.write_text(text)
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
