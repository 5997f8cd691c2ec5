"""Engines that others wrote, on generated models: no op of theirs may be called faulty, or the reason is printed.

    python benchmarks/real_engines.py [--packages FOLDER] [--engine NAME=COMMAND] [--only NAME] [--out PAGE]

transformers, litgpt, LLMs-from-scratch, mlx-lm, ONNX Runtime, OpenVINO, bitsandbytes, torchao, compressed-tensors, HQQ,
optimum-quanto, CTranslate2 and tinygrad come from PyPI: what is not installed beside tracediff may lie in FOLDER, as
may a clone of gpt-fast (`pip install --target FOLDER --no-deps litgpt lightning lightning-utilities torchmetrics
llms-from-scratch requests mlx mlx-cpu mlx-lm onnx onnx-ir onnxruntime openvino bitsandbytes torchao compressed-tensors
hqq termcolor loguru frozendict optimum-quanto ninja ctranslate2 pyyaml ml_dtypes flatbuffers protobuf
tinygrad==0.13.0`; tinygrad calls clang).
Any other engine takes part by a command that writes a trace itself, as with emitters/c: {model}, {tokens}
and {out} in it become the GGUF file, the prompt's ids with commas between, and the trace (`c_engines.py` runs C engines
from their source so). A model that it cannot run it refuses with exit code 77. Each engine has a process of its own.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import adapters
import onnx_engines
from rich.console import Console

from tracediff.model.synthetic import Shape, write_model
from tracediff.pipeline import check_trace
from tracediff.report.sections.said import arithmetic
from tracediff.result import Result
from tracediff.trace.reader import Trace

SIZES: dict[str, Any] = {"n_layer": 2, "n_embd": 256, "n_head_kv": 2, "n_ff": 512, "n_vocab": 320, "n_ctx": 64}
# With the constants that small engines have in their sources: Llama 2's, and Qwen's; heads of Qwen3's 128 channels.
SHAPES = {
    "llama": Shape("llama", **SIZES, n_head=8, theta=10_000.0, eps=1e-5),
    "qwen2": Shape("qwen2", **SIZES, n_head=8, theta=1_000_000.0, eps=1e-6),
    "qwen3": Shape("qwen3", **SIZES, n_head=4, head_dim=128, theta=1_000_000.0, eps=1e-6, tied=True),
}
WEIGHTS = ("F32", "F16", "Q8_0", "Q4_K_M")
CAPTURES: dict[str, Callable[[str], bool]] = {
    "every op": lambda op: True,
    "hidden states": lambda op: op in ("token_embd", "output_norm", "output") or op.endswith("ffn_residual"),
}
TIMEOUT = 300  # seconds of a run
NOT_FOR_THIS_MODEL, REFUSED = 77, "refused"
ENGINES: dict[str, adapters.Trace] = {
    **{
        f"transformers, {attention}, {dtype}": adapters.transformers(dtype, attention)
        for attention in ("eager", "sdpa", "flex_attention")
        for dtype in ("f32", "bf16", "f16")
    },
    **{
        f"transformers, {attention}, autocast {dtype}": adapters.transformers("f32", attention, autocast=dtype)
        for attention in ("eager", "sdpa")
        for dtype in ("bf16", "f16")
    },
    **{
        f"transformers, {dtype}, {name}": adapters.transformers(dtype, "eager", of)
        for name, of in (
            ("bitsandbytes NF4", adapters.bitsandbytes),
            ("torchao int8", adapters.torchao("Int8WeightOnly")),
            ("torchao int4", adapters.torchao("IntxWeightOnly")),
            ("torchao float8", adapters.torchao("Float8WeightOnly")),
        )
        for dtype in ("f32", "bf16")
    },
    **{
        f"transformers, {dtype}, torchao {name}, int8 activations": adapters.transformers(dtype, "eager", of)
        for dtype, name, of in (
            ("f32", "int8", adapters.torchao("Int8DynamicActivationInt8Weight")),
            ("bf16", "int8", adapters.torchao("Int8DynamicActivationInt8Weight")),
            ("f32", "int4", adapters.torchao("Int8DynamicActivationIntxWeight")),
        )
    },
    **{
        f"transformers, {dtype}, HQQ {bits} bits, weights recorded": adapters.transformers(
            dtype, "eager", adapters.hqq(bits), weights=True
        )
        for bits in (4, 3)
        for dtype in ("f32", "bf16")
    },
    **{
        f"transformers, {dtype}, compressed-tensors {preset}": adapters.transformers(
            dtype, "eager", adapters.compressed_tensors(preset)
        )
        for preset in ("W8A8", "W8A16", "W4A16", "FP8_DYNAMIC", "MXFP4A16")
        for dtype in ("f32", "bf16")
    },
    **{
        f"transformers, {dtype}, optimum-quanto {kind}": adapters.transformers(dtype, "eager", adapters.quanto(kind))
        for dtype, kinds in (("f32", ("int8", "float8")), ("bf16", ("int8", "float8", "int4")))
        for kind in kinds
    },
    **{f"CTranslate2, {dtype}": adapters.ctranslate2(dtype) for dtype in ("float32", "int8")},
    **{f"litgpt, {dtype}": adapters.litgpt(dtype) for dtype in ("f32", "bf16", "f16")},
    **{f"gpt-fast, {dtype}": adapters.gpt_fast(dtype) for dtype in ("f32", "bf16", "f16")},
    **{f"LLMs-from-scratch, {dtype}": adapters.llms_from_scratch(dtype) for dtype in ("f32", "bf16")},
    **{f"mlx, {dtype}": adapters.mlx(dtype) for dtype in ("f32", "bf16", "f16")},
    **{f"mlx, f32, {bits} bits": adapters.mlx("f32", bits) for bits in (4, 8)},
    "tinygrad": adapters.tinygrad,
    "ONNX Runtime, f32": onnx_engines.onnx_runtime(),
    **{
        f"ONNX Runtime, {bits} bits, {'symmetric' if symmetric else 'asymmetric'}{of}": onnx_engines.onnx_runtime(
            bits, level, block_size=32, is_symmetric=symmetric
        )
        for bits in (4, 8)
        for symmetric in (True, False)
        for level, of in ((0, ""), (4, ", int8 activations"))
    },
    **{f"OpenVINO, {dtype}": onnx_engines.openvino(dtype) for dtype in ("f32", "bf16", "f16")},
    "OpenVINO, f32, 4 bits": onnx_engines.openvino("f32", 4, block_size=32, is_symmetric=False),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a run: `verdict` is a word of the result's, or why there is none."""

    engine: str
    model: str
    capture: str
    verdict: str
    reason: str
    said: str

    @property
    def passes(self) -> bool:
        """No alarm, for no run has a mistake."""
        return self.verdict == "match"


def commanded(command: str) -> adapters.Trace:
    """An engine of the user's that writes its own trace."""

    def trace(model: Path, out: Path) -> None:
        given = {"model": str(model), "out": str(out), "tokens": ",".join(map(str, adapters.PROMPT))}
        subprocess.run([part.format(**given) for part in shlex.split(command)], check=True, stdout=subprocess.DEVNULL)

    return trace


def model_of(folder: Path, arch: str, weights: str) -> Path:
    """A generated model, made on first use."""
    path = folder / f"{arch}-{weights}.gguf"
    return path if path.exists() else write_model(path, SHAPES[arch], weights)


def rows_of(name: str, arch: str, weights: str, model: Path, trace: Path) -> Iterator[Row]:
    """The trace judged with all that it holds, and with its hidden states alone; logits where it has no more."""
    logits_alone = all(op == "output" for _, op in Trace(trace).ops)
    for capture, kept in {"logits": CAPTURES["every op"]}.items() if logits_alone else CAPTURES.items():
        result = check_trace(some_of(trace, kept), model)
        row = partial(Row, name, f"{arch} {weights}", capture)
        yield row(result.verdict, reason(result), said(result))


def some_of(trace: Path, kept: Callable[[str], bool]) -> Path:
    """A trace of the same data that lists those ops alone."""
    import json

    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    lines = [line for line in lines if "op" not in line or kept(line["op"])]
    lines[-1]["records"] = len(lines) - 1
    out = trace.with_name("some.trace")
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def reason(result: Result) -> str:
    """Why it is no match: the faulty ops, with what they are taken for."""
    causes = [(op.op, op.step, op.cause.text if op.cause else op.shape or "") for op in result.faulty]
    wrong = [f"{w.weight}: {w.note}" for w in result.weights if w.status == "wrong"]
    first = [f"{op} in step {step}: {text}" for op, step, text in causes[:1]]
    more = [f"{len(causes) - 1} more ops"] * (len(causes) > 1)
    return "; ".join((*first, *more, *wrong, *result.notes))


def said(result: Result) -> str:
    """What the report says of its arithmetic, on one line."""
    console = Console(width=2000, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    console.print(*arithmetic(result))
    lines = [line.strip().removeprefix("candidate: ") for line in console.export_text().splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(("Arithmetic", "the nearest")))


def run(name: str, models: dict[tuple[str, str], Path], folder: Path, command: str | None) -> Iterator[Row]:
    """One engine on all models, in a process of its own."""
    given = [sys.executable, __file__, "--child", name, str(folder), command or "", *map(str, models.values())]
    died = "it died"
    try:
        finished = subprocess.run(given, timeout=TIMEOUT * len(models), capture_output=True, text=True, check=False)
        died = finished.stderr.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        died = f"it took longer than {TIMEOUT * len(models)} s"
    for (arch, weights), model in models.items():
        trace = folder / f"{model.stem}.trace"
        error = trace.with_suffix(".error")
        why = error.read_text() if error.exists() else "" if trace.exists() else died
        if not why:
            yield from rows_of(name, arch, weights, model, trace)
        elif why != REFUSED:
            yield Row(name, f"{arch} {weights}", "", "not run", why[:200], "")


def child(name: str, folder: Path, command: str, models: list[Path]) -> int:
    """The process of one engine: a trace of each model, or beside it the error that there was instead."""
    trace = commanded(command) if command else ENGINES[name]
    for model in models:
        out = folder / f"{model.stem}.trace"
        for old in (out, out.with_suffix(".bin"), out.with_suffix(".error")):
            old.unlink(missing_ok=True)
        try:
            trace(model, out)
        except subprocess.CalledProcessError as error:
            why = REFUSED if error.returncode == NOT_FOR_THIS_MODEL else str(error)
            out.with_suffix(".error").write_text(why)
        except adapters.NotForThisModelError:
            out.with_suffix(".error").write_text(REFUSED)
        except Exception as error:  # of somebody else's code
            out.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
    return 0


def report(rows: list[Row], command: str, seconds: float) -> str:
    """The document."""
    judged = [row for row in rows if row.verdict != "not run"]
    alarms = [row for row in judged if not row.passes]
    versions = []
    for package in (
        "transformers",
        "torch",
        "litgpt",
        "mlx",
        "onnxruntime",
        "openvino",
        "bitsandbytes",
        "torchao",
        "compressed-tensors",
        "hqq",
        "optimum-quanto",
        "ctranslate2",
        "tinygrad",
    ):
        engines = (row.engine.lower().replace("onnx runtime", "onnxruntime") for row in judged)
        if package != "torch" and not any(package in engine for engine in engines):
            continue
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    lines = [
        "# Engines that others wrote\n",
        "Each runs generated models (two layers of 256 channels), a prompt of 17 tokens and two decode steps with its",
        "own cache. Nothing is wrong in any of them, so every verdict should be *match*. Written in "
        f"{seconds / 60:.0f} minutes by\n",
        f"    {command}\n",
        f"with {', '.join(versions)}. {len(judged)} traces judged by replay, **{len(alarms)} not a match**.\n",
        "| engine | model | recorded | verdict | its arithmetic |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {r.engine} | {r.model} | {r.capture} | {r.verdict} | {'; '.join(filter(None, (r.reason, r.said)))} |"
            for r in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the matrix; 1 when there was an alarm."""
    if sys.argv[1:2] == ["--child"]:
        _, _, name, out, command, *paths = sys.argv
        return child(name, Path(out), command, [Path(path) for path in paths])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--only", default="")
    parser.add_argument("--archs", default=",".join(SHAPES))
    parser.add_argument("--weights", default=",".join(WEIGHTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.packages:
        import os

        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(args.packages))))
        sys.path.append(str(args.packages))
    began, rows = time.monotonic(), []
    commands = dict(given.split("=", 1) for given in args.engine)
    command = " ".join(["python", "benchmarks/real_engines.py", *map(shlex.quote, sys.argv[1:])])
    engines = [name for name in (*ENGINES, *commands) if args.only in name]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        models = {(a, w): model_of(folder, a, w) for w in args.weights.split(",") for a in args.archs.split(",")}
        for name in engines:
            for row in run(name, models, folder, commands.get(name)):
                rows.append(row)
                figures = f"{time.monotonic() - began:5.0f} s  {row.verdict:9}"
                print(figures, f"{row.engine}; {row.model}; {row.capture}: {row.reason or row.said}", flush=True)
            if args.out:  # after every engine: what is done is not lost with the last one
                args.out.write_text(report(rows, command, time.monotonic() - began))
    return 0 if all(row.passes for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
