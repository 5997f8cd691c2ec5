"""What is wrong with a command line, with the machine, or with an engine's health: exit code 2 and one message."""

import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Models, the_message

from tracediff.diagnose.mistakes import BANK
from tracediff.engine import torch_engine
from tracediff.engine.llama_cpp import LlamaCpp, Prompt
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import EngineError, TracediffError
from tracediff.judge import Policy
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

ENGINES = ("torch", "llama.cpp")


@pytest.fixture
def model(models: Models) -> Path:
    """Two layers, 320 tokens, a context of 64."""
    return models("tiny")


@pytest.fixture(scope="module")
def trace(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "a.trace"
    return trace_torch(models("tiny"), path, TorchOptions(), (1, 2, 3))


def process(*arguments: object, stdout: Any = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m tracediff` in a process of its own, its output buffered as it is for everybody."""
    command = [sys.executable, "-m", "tracediff", *map(str, arguments)]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | environment
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)


# ---- The command line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "Usage: "),
        (("zebra",), "No such command 'zebra'."),
        (("compare", "a.trace"), "Missing argument"),
        (("compare", "a.trace", "b.trace", "--zebra"), "No such option: --zebra"),
        (("run", "a.gguf", "--decode", "-1"), "Invalid value for '--decode'"),
        (("run", "a.gguf", "--dtype", "f8"), "'f8' is not one of 'f64', 'f32', 'bf16', 'f16'"),
        (("check", "a.trace"), "Missing option '--model'"),
    ],
)
def test_usage(arguments: tuple[str, ...], expected: str, cli: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = cli(*arguments)
    assert code == 2
    assert expected in error
    assert "Traceback" not in error


def test_as_a_module() -> None:
    done = process("zebra")
    assert done.returncode == 2
    assert "No such command 'zebra'." in done.stderr
    versions = process("--version").stdout.splitlines()
    assert versions[0] == "tracediff 0.1.0"
    assert [line.split()[0] for line in versions[2:5]] == ["torch", "numpy", "llama-cpp-python"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give the prompt either as text with -p or as ids with --tokens 1,2,3."),
        (("-p", "x", "--tokens", "1"), "give the prompt either as text with -p or as ids with --tokens 1,2,3."),
        (("-p", ""), "the prompt is empty. Give some text with -p, or ids with --tokens 1,2,3."),
        (("--tokens", ""), "the prompt is empty: --tokens names no ids. Give some, as in 1,2,3."),
        (("--tokens", " , "), "the prompt is empty: --tokens names no ids. Give some, as in 1,2,3."),
        (("--tokens", "1,x"), "--tokens '1,x': ids are whole numbers with commas between, as in 1,2,3."),
        (("--tokens", "1.5"), "--tokens '1.5': ids are whole numbers with commas between, as in 1,2,3."),
        (("--tokens", "1,320"), "token id 320 is outside the vocabulary of 320 (0 to 319). Were the ids made by"),
        (("--tokens", "-1"), "token id -1 is outside the vocabulary of 320"),
        (("--tokens", f"{2**70}"), f"token id {2**70} is outside the vocabulary of 320"),
        (("--tokens", ",".join("1" * 65)), "the prompt of 65 tokens and 0 decode"),
        (("-p", "hello " * 40), "the prompt of 161 tokens and 0 decode"),
        (("--tokens", "1", "--decode", "64"), "the prompt of 1 tokens and 64 decode"),
        (("-p", "a\udcff"), "surrogates not allowed. Paths and prompts must be UTF-8."),
    ],
)
def test_prompt(
    arguments: tuple[str, ...], expected: str, engine: str, model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    message = refused("trace", model, "--engine", engine, "-o", tmp_path / "a.trace", *arguments)
    assert expected in message
    if "decode" in expected:
        assert "decode steps do not fit the context of 64. Shorten the prompt" in message
    assert not (tmp_path / "a.trace").exists()


def test_context_option(model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    arguments = ("--engine", "llama.cpp", "--ctx", "2", "-o", tmp_path / "a.trace")
    message = refused("trace", model, "--tokens", "1,2,3", *arguments)
    assert "prompt of 3 tokens and 0 decode steps do not fit the context of 2. Shorten" in message
    assert "raise --ctx" in message


def test_tokens_outside_the_vocabulary_by_the_library(model: Path, tmp_path: Path) -> None:
    """Without the command line each engine looks for itself."""
    with pytest.raises(EngineError, match=r"token id 320 is outside the vocabulary of 320 \(0 to 319\)"):
        trace_torch(model, tmp_path / "a.trace", TorchOptions(), (1, 320))
    with pytest.raises(EngineError, match=r"token id 320 is outside the vocabulary of 320 \(0 to 319\)"):
        LlamaCpp(model, Prompt(tokens=(1, 320)), tmp_path / "b.trace").wait()


@pytest.mark.parametrize("command", ["run", "trace"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--fault", "zebra"), "unknown fault 'zebra'. Known: "),
        (("--fault", "rope_pairing@77"), "the fault 'rope_pairing@77' applies to nothing in this qwen2 model of 2"),
        (
            ("--arithmetic", "zebra"),
            "unknown arithmetic 'zebra'. First, llama.cpp, exact, or one of activations, ",
        ),
        (
            ("--arithmetic", "activations in q8_K blocks"),
            "--arithmetic 'activations in q8_K blocks': the rows that blk.0.attn_q multiplies are no multiples of its",
        ),
        (("--device", "zebra"), "--device zebra: not a device "),
        (("--device", "meta"), "--device meta: not a device "),
        (("--device", "cuda:99"), "--device cuda:99: CUDA devices that this torch sees: "),
    ],
)
def test_options_of_torch(
    command: str,
    arguments: tuple[str, ...],
    expected: str,
    model: Path,
    tmp_path: Path,
    refused: Callable[..., str],
) -> None:
    where = ("--save", tmp_path) if command == "run" else ("-o", tmp_path / "a.trace")
    assert refused(command, model, "--tokens", "1", *where, *arguments).startswith(expected)
    assert not (tmp_path / "candidate.trace").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.parametrize("command", ["run", "trace"])
def test_cuda_absent(command: str, model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    where = ("--save", tmp_path) if command == "run" else ("-o", tmp_path / "a.trace")
    message = refused(command, model, "--tokens", "1", "--device", "cuda", *where)
    assert message.startswith("--device cuda: CUDA devices that this torch sees: 0. Use --device cpu, or check nvidia-")
    assert torch.__version__ in message


def test_device_out_of_memory(
    model: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    monkeypatch.setattr(torch_engine, "evaluate", evaluate)
    message = refused("trace", model, "--tokens", "1", "-o", tmp_path / "a.trace")
    assert message == (
        "--device cpu: out of memory in step 0: CUDA out of memory. Shorten the prompt, or use --device cpu."
    )
    assert not [*tmp_path.iterdir()]  # nothing was traced


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("--tolerance", "attn_qq=1e-6"), "--tolerance 'attn_qq' matches no op of the traces. Near it: attn_q, "),
        (
            ("--allow", "blk.9.ffn_up"),
            "--allow 'blk.9.ffn_up' matches no op of the traces. Near it: blk.1.ffn_up",
        ),
        (
            ("--tolerance", "attn_q=1", "--allow", "-"),
            "--allow '-' matches no op of the traces. Near it: attn_k, ",
        ),
    ],
)
@pytest.mark.parametrize("n_traces", [2, 3])
def test_a_pattern_that_matches_nothing(
    arguments: tuple[str, ...], near: str, n_traces: int, trace: Path, refused: Callable[..., str]
) -> None:
    message = refused("compare", *[trace] * n_traces, *arguments)
    assert message.startswith(near)
    assert message.endswith("`tracediff inspect TRACE` lists all; * and ? stand for any characters.")


def test_patterns_that_match_something(trace: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    for pattern in ("*", "attn_q", "blk.1.*", "blk.?.ffn_up", "output"):
        assert cli("compare", trace, trace, "--allow", pattern, "--tolerance", f"{pattern}=1e-3")[0] == 0


@pytest.mark.parametrize("tolerance", ["x", "=", "attn_q=", "attn_q=x", "nan", "-1e-6", "*=-inf"])
def test_tolerance(tolerance: str, trace: Path, refused: Callable[..., str]) -> None:
    message = refused("compare", trace, trace, "--tolerance", tolerance)
    assert message == f"--tolerance {tolerance!r}: give an NMSE such as 1e-6, or PATTERN=1e-6."


def test_arithmetic(trace: Path, model: Path, refused: Callable[..., str]) -> None:
    for arguments in (("check", trace), ("compare", trace, trace)):
        message = refused(*arguments, "--model", model, "--arithmetic", "zebra")
        assert message.startswith("unknown arithmetic 'zebra'. First, llama.cpp, exact, or one of activations, ")
    assert "give --model as well" in refused("compare", trace, trace, "--arithmetic", "exact")
    message = refused("check", trace, "--model", model, "--arithmetic", "activations in q8_K blocks")
    assert message == (
        "blk.0.attn_q cannot be recomputed in the arithmetic 'activations in q8_K blocks': this model has rows that "
        "are no multiples of its blocks. Leave --arithmetic out, or name another."
    )


@pytest.mark.parametrize(
    ("engine", "option", "of"),
    [
        ("llama.cpp", ("--fault", "eps"), "torch"),
        ("llama.cpp", ("--arithmetic", "exact"), "torch"),
        ("llama.cpp", ("--dtype", "f32"), "torch or transformers"),
        ("llama.cpp", ("--device", "cuda"), "torch or transformers"),
        ("torch", ("--flash-attn",), "llama.cpp"),
        ("torch", ("--hf", "folder"), "transformers"),
        ("transformers", ("--fault", "eps"), "torch"),
    ],
)
def test_options_of_another_engine(
    engine: str, option: tuple[str, ...], of: str, model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    out = tmp_path / "x.trace"
    assert refused("trace", model, "--tokens", "1", "--engine", engine, *option, "-o", out) == (
        f"{option[0]} is for --engine {of}; this is {engine}, which would not heed it. Leave it out."
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare T T --model M --plan --json out.json", "--json is of the verdict, and --plan prints what would be"),
        ("check T --model M --plan --resolve 1e-6", "--resolve is of the verdict, and --plan prints what would be"),
        ("check T --model M --plan --workers 2", "--workers is of the verdict, and --plan prints what would be"),
        ("compare T T T --explain output", "--explain shows an op of one candidate. Compare two traces."),
        ("self T T --fault eps", "--fault says how --engine is run. Give that as well, and a GGUF file."),
        ("self T T --tokens 1,2", "--tokens says how --engine is run. Give that as well, and a GGUF file."),
        ("self M --engine torch --model M", "--model is for two traces; with --engine the GGUF file comes first"),
        ("self M T --engine torch", "--engine makes the traces itself. Give the GGUF file alone."),
        ("inspect M M", "besides a model nothing is listed. Inspect one at a time."),
        ("inspect M --graph --skeleton", "--graph and --skeleton are two listings of a model. Give one of them."),
        ("ci T --model M --until 2030-12-31", "--until is until when --accept lets pass what is found."),
        ("ci T --model M --update --accept why", "--update tightens the lock and --accept loosens it. Give one"),
        ("ci --model M", "--model is that of a trace. Give TRACE, or leave it to the configuration."),
    ],
)
def test_an_option_that_would_not_be_heeded(
    command: str,
    message: str,
    trace: Path,
    model: Path,
    tmp_path: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = {"T": trace, "M": model}
    assert message in refused(*(words.get(word, word) for word in command.split()))
    assert not [*tmp_path.iterdir()]


def test_the_last_tolerance_of_an_op_counts(
    trace: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """Also where the same pattern stood before another."""
    for suffix in (".trace", ".bin"):
        shutil.copy(trace.with_suffix(suffix), tmp_path / f"a{suffix}")
    data = np.fromfile(tmp_path / "a.bin", np.float32)
    data[-1] += 1e-3 * abs(data).max()
    data.tofile(tmp_path / "a.bin")
    strict, loose = ("--tolerance", "1e-30"), ("--tolerance", "output=1")
    assert cli("compare", trace, tmp_path / "a.trace", *strict, *loose)[0] == 0
    assert cli("compare", trace, tmp_path / "a.trace", *strict, *loose, *strict)[0] == 1


# ---- Bugs of our own: never the exit code of a verdict


@pytest.mark.parametrize("error", [KeyError("zebra"), AssertionError(), RuntimeError("two\nlines"), EOFError()])
@pytest.mark.parametrize("debug", ["", "before", "after"])
def test_an_error_that_nobody_foresaw(
    error: Exception,
    debug: str,
    trace: Path,
    cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compare_traces(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tracediff.pipeline.compare_traces", compare_traces)
    command = ["--debug"] * (debug == "before") + ["compare", trace, trace] + ["--debug"] * (debug == "after")
    code, output, message = cli(*command)
    *before, last = message.splitlines()
    assert (code, output) == (2, "")
    assert last.startswith("tracediff: this is a bug of tracediff 0.1.0, and no verdict: ")
    assert " ".join(f"{type(error).__name__}: {error} (in compare_traces, line ".split()) in last
    assert last.endswith("Please report it with the command and what it prints with --debug added.")
    assert bool(before) == bool(debug)
    assert not before or before[0] == "Traceback (most recent call last):"


def test_where_it_diverges_is_said_though_a_bug_ends_the_search_for_causes(
    model: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trace_torch(model, tmp_path / "a.trace", TorchOptions(faults=("act_gelu@1",)), (1, 2, 3))

    def explain(*_: object) -> None:
        raise ValueError("of a bug")

    monkeypatch.setattr("tracediff.diagnose.explain.Explainer.explain", explain)
    code, report, _ = cli("check", path, "--model", model)
    said = " ".join(report.split())
    assert code == 1
    assert said.startswith(
        "DIVERGED: ffn_act in layer 1: wrong; not all was tried that may explain it. first at blk.1.ffn_act"
    )
    assert "A search for causes ended in a bug of tracediff, please report it: ValueError: of a bug (in ex" in said


def test_a_bug_in_the_search_for_one_cause_leaves_the_others(
    model: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = ("act_gelu@1", "rope_pairing@1")
    path = trace_torch(model, tmp_path / "a.trace", TorchOptions(faults=faults), (1, 2, 3))

    def rope(*_: object) -> None:
        raise ZeroDivisionError("of a bug")

    mistakes = {name: replace(mistake, change=rope) if "rope" in name else mistake for name, mistake in BANK.items()}
    monkeypatch.setattr("tracediff.diagnose.trials.BANK", mistakes)
    code, report, _ = cli("check", path, "--model", model)
    said = " ".join(report.split())
    assert code == 1
    assert "- ffn_act in layer 1: GELU (erf) is used for SiLU." in said
    assert "- attn_q_rope in layer 1: wrong; not all was tried that may explain it." in said
    assert "A search for causes ended in a bug of tracediff, please report it: ZeroDivisionError: of a bug (in" in said
    assert "--time" not in said.split("Not judged, or not by itself")[0]


# ---- Where it writes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("no/a.trace", "/no. Make it, or give another place."),
        (".", "a trace is two files, NAME.trace and NAME.bin. Name it "),
        ("a.bin", "a trace is two files, NAME.trace and NAME.bin. Name it a.bin.trace."),
        ("model.gguf", "a trace is two files, NAME.trace and NAME.bin. Name it model.gguf.trace."),
        ("weights.trace", "weights.bin exists and is no trace's. Move it away, or name the trace otherwise."),
    ],
)
def test_out(engine: str, out: str, expected: str, model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """Nothing that was there before is overwritten, except a trace."""
    for name in ("model.gguf", "weights.bin"):
        (tmp_path / name).write_bytes(model.read_bytes())
    message = refused("trace", tmp_path / "model.gguf", "--engine", engine, "--tokens", "1", "-o", tmp_path / out)
    assert expected in message
    for name in ("model.gguf", "weights.bin"):
        assert (tmp_path / name).read_bytes() == model.read_bytes()


def test_save_is_a_file(model: Path, refused: Callable[..., str]) -> None:
    message = refused("run", model, "--tokens", "1", "--save", model)
    assert message == f"--save {model} is a file. Give a folder, which is made where it is not there."


@pytest.mark.parametrize(
    ("name", "why"), [("no/a.json", "there is no folder"), (".", "is a folder. Name a file in it.")]
)
def test_json_that_cannot_be_written(
    name: str, why: str, trace: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Said before hours of work, not after."""
    assert why in refused("compare", trace, trace, "--json", tmp_path / name)


def test_json_on_a_full_disk(trace: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    """The report was worth the wait all the same, and of the JSON nothing is left half written."""
    for before in (None, b'{"schema": "tracediff/1"}'):
        if before:
            (tmp_path / "a.json").write_bytes(before)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        code, output, error = cli("compare", trace, trace, "--json", tmp_path / "a.json")
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert the_message(code, error) == (
            f"{tmp_path / 'a.json'}: cannot write it: File too large. Choose another place, or free some space."
        )
        assert output.startswith("MATCH: ")
        assert [path.read_bytes() for path in tmp_path.iterdir()] == ([before] if before else [])


@pytest.fixture
def small_disk(model: Path) -> Iterator[None]:
    """No file of this process and its children can grow beyond 100 kB, now that the model is there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize("engine", ENGINES)
def test_full_disk(engine: str, model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    out = tmp_path / "a.trace"
    message = refused("trace", model, "--engine", engine, "--tokens", ",".join("5" * 60), "-o", out)
    part = tmp_path / "a.partial/a.trace"
    assert message.startswith(
        f"{part}: cannot write the trace: File too large. Free some space or choose another place"
    )
    assert "--capture layers or --capture stats write far less" in message
    assert message.endswith(f"\nWhat was traced so far can be read: {out}.")
    trace = Trace(out)
    assert trace.cut
    assert 0 < len(trace.ops) < 37
    for record in trace.ops.values():
        assert trace.values(record).shape == record.shape


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A trace so short that what is said of it fits the buffer of standard output."""
    with TraceWriter(tmp_path / "a.trace", "my engine \u2588") as writer:
        writer.step(0, [1], [0])
        writer.op(0, "output", np.ones((1, 2), np.float32), "f32")
    return tmp_path / "a.trace"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--json", "-", "--explain", "output"), "--json - and --explain both print to standard output."),
        (("--json", "-", "--annotations"), "--json - and --annotations both print to standard output."),
        (("--html", "page", "--junit", "./page"), "page is named for two outputs. Give each a file of its own."),
    ],
)
def test_two_outputs_in_one_place(
    options: tuple[str, ...], message: str, trace: Path, refused: Callable[..., str]
) -> None:
    assert message in refused("compare", trace, trace, *options)


@pytest.mark.parametrize("policy", [{"tolerances": {"*": math.nan}}, {"tolerances": {"*": -1.0}}, {"resolve": 0.0}])
def test_a_policy_holds_squared_errors(policy: dict[str, Any]) -> None:
    """Wherever it comes from: nothing exceeds NaN, so it would let everything pass."""
    with pytest.raises(TracediffError, match="give an NMSE"):
        Policy(**policy)


@pytest.mark.parametrize("arguments", [(), ("--json", "-")])
def test_full_standard_output(arguments: tuple[str, ...], trace: Path, short: Path) -> None:
    for path in (trace, short):
        with Path("/dev/full").open("w") as full:
            done = process("compare", path, path, *arguments, stdout=full)
        message = the_message(done.returncode, done.stderr)
        assert message == (
            "OSError: [Errno 28] No space left on device. Check the path, the permissions and the space left."
        )


@pytest.mark.parametrize("arguments", [(), ("--json", "-")])
def test_closed_pipe(arguments: tuple[str, ...], trace: Path, short: Path) -> None:
    """As in `tracediff ... | head -1`: no message, and not the exit code of a divergence."""
    for path in (trace, short):
        reading, writing = os.pipe()
        os.close(reading)
        done = process("compare", path, path, *arguments, stdout=writing)
        os.close(writing)
        assert (done.returncode, done.stderr) == (2, "")


def test_terminal_that_lacks_a_character(short: Path) -> None:
    done = process("inspect", short, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("my engine ?, model not named, 1 tokens, whole")


# ---- llama.cpp's process


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Run a shell script in place of llama.cpp."""

    def replace(script: str) -> None:
        path = tmp_path / "child"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("cat > /dev/null; echo first >&2; echo 'GGML_ASSERT(a == b) failed' >&2; kill -ABRT $$", "by SIGABRT."),
        ("cat > /dev/null; echo first >&2; echo 'GGML_ASSERT(a == b) failed' >&2; kill -SEGV $$", "by SIGSEGV."),
        ("cat > /dev/null; echo first >&2; echo 'GGML_ASSERT(a == b) failed' >&2; kill -KILL $$", "by SIGKILL (out of"),
        ("exec 0<&-; seq 20 >&2; echo first >&2; echo 'GGML_ASSERT(a == b) failed' >&2; exit 3", "with exit code 3."),
    ],
)
def test_dead_child(
    script: str, how: str, model: Path, tmp_path: Path, child: Callable[[str], None], refused: Callable[..., str]
) -> None:
    """In the last case before it has read its request, which is longer than a pipe holds."""
    child(script)
    prompt = "x" * 100_000
    message = refused("trace", model, "--engine", "llama.cpp", "-p", prompt, "-o", tmp_path / "a.trace")
    first, *lines = message.splitlines()
    assert first.startswith(f"llama.cpp's process ended {how}")
    assert first.endswith(" Its last lines:")
    assert lines[-2:] == ["  | first", "  | GGML_ASSERT(a == b) failed"]
    assert len(lines) <= 8


def test_ggml_assertion(model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    """A real one: what is left of this context size in 32 bits is less than the prompt."""
    arguments = ("--engine", "llama.cpp", "--ctx", 2**32 + 1, "-o", tmp_path / "a.trace")
    first, *_, last = refused("trace", model, "--tokens", "1,2,3", *arguments).splitlines()
    assert first.startswith("llama.cpp's process ended by SIGABRT.")
    assert "GGML_ASSERT(" in last
