"""Speed and memory as ratios within one run, on a generated F16 model with the shape of Qwen2.5-0.5B.

    python benchmarks/speed.py [--model MODEL.gguf] [--only NAME] [--out docs/performance.md]

Each ratio is taken from timings that alternate in one process (or of processes that alternate), the least of
several, in seconds of the processor; nothing but what `unlisted` gives is an absolute figure. Needs the test extra
(transformers) and 4 GB of disk.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracediff.names import Capture
from tracediff.process import prepare

TOKENS = [256, *((37 * i + 11) % 250 for i in range(127))]
REPEATS = 3
_HEAD = "| measure | `NAME` | target | measured | met |\n|---|---|---|---|---|"
_MARK = "<!-- table -->"  # around the table in the page


def spent() -> float:
    """Seconds of the processor so far."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(of.ru_utime + of.ru_stime for of in used)


def least(*functions: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """The least seconds of the processor that each function takes, of all threads and of the processes that it waits
    for, whoever shares the machine; their runs alternate.
    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, taken in zip(functions, times, strict=True):
            gc.collect()
            began = spent()
            function()
            taken.append(spent() - began)
    return [min(taken) for taken in times]


def llama_cpp(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """Decoding with every op recorded over plain decoding: statistics, then everything on disk."""
    from tracediff_reference.child import WAITING

    os.environ.update(WAITING)  # as of the process that tracediff starts: before libgomp is loaded
    import llama_cpp.llama_cpp as llama

    from tracediff.engine.llama_cpp import nodes
    from tracediff.model.families import load_graph
    from tracediff.trace.writer import TraceWriter
    from tracediff_reference import engine
    from tracediff_reference.observer import Observer
    from tracediff_reference.protocol import Options, Request

    silent = llama.llama_log_callback(lambda level, text, data: None)  # must outlive every call
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    graph = load_graph(model)
    h = graph.hparams

    def request(capture: Capture) -> Request:
        return Request(
            model=str(model), arch=h.arch, out="", capture=capture, nodes=tuple(nodes(graph)),
            norm_weights=(), n_vocab=h.n_vocab, n_ctx_train=h.n_ctx, tokens=tuple(TOKENS),
        )  # fmt: skip

    loaded = engine._load(request("all"))

    def decode(capture: Capture | None) -> Callable[[], None]:
        asked = request(capture or "all")
        observer: Any = Observer(asked, None, lambda fraction: None) if capture else _Silent()  # type: ignore[arg-type]
        context, callback = engine._context(Options(), loaded, len(TOKENS), len(TOKENS), observer, 1)
        if capture is None:  # plain: no callback at all
            llama.llama_free(context)
            params = llama.llama_context_default_params()
            params.n_ctx = params.n_batch = 256
            params.n_threads = params.n_threads_batch = 2
            params.type_k = params.type_v = llama.GGML_TYPE_F32
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.no_perf = True
            context = llama.llama_init_from_model(loaded, params)

        def run() -> None:
            if capture:  # a new file each time: one that grows would measure the disk's write-back
                observer._writer = TraceWriter(folder / f"{capture}.trace", "speed")
                observer._writer.step(0, TOKENS, range(len(TOKENS)))
            llama.llama_memory_clear(llama.llama_get_memory(context), True)
            observer.seen_all = callback
            observer.begin(0, range(len(TOKENS)))
            engine._decode(context, observer, TOKENS, range(len(TOKENS)), [0] * len(TOKENS), asked)
            if capture:
                observer._writer.__exit__(None, None, None)

        run()  # warm
        return run

    plain, stats, full = least(decode(None), decode("stats"), decode("all"))
    return {
        "llama.cpp, statistics of every op / plain decode": (stats / plain, 1.10),
        "llama.cpp, every tensor on disk / plain decode": (full / plain, 1.3),
    }


class _Silent:
    """Stands where an observer would, for the plain decode."""

    error = None
    axes = ()  # of what it waits for

    def begin(self, step: int, positions: range) -> None:
        """Nothing to begin."""

    def __call__(self, address: int, ask: bool, _: object) -> bool:
        return False


def torch_engine(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """Statistics of every op in float32 over the plain forward of transformers."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tracediff.engine.torch_run import TorchOptions, trace_torch
    from tracediff.model.families import load_graph

    h = load_graph(model).hparams
    config = Qwen2Config(
        vocab_size=h.n_vocab, hidden_size=h.n_embd, intermediate_size=h.n_ff, num_hidden_layers=h.n_layer,
        num_attention_heads=h.n_head, num_key_value_heads=h.n_head_kv, tie_word_embeddings=True,
    )  # fmt: skip
    reference = Qwen2ForCausalLM(config).float().eval()
    ids = torch.tensor([TOKENS])

    @torch.inference_mode()
    def forward() -> None:
        reference(ids, use_cache=False)

    def ours() -> None:
        trace_torch(model, folder / "torch.trace", TorchOptions(capture="stats"), TOKENS)

    forward()
    ours()
    theirs, mine = least(forward, ours)
    return {"torch engine, statistics of every op / transformers forward": (mine / theirs, 1.3)}


def recording(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """A transformers forward with statistics of every op recorded over the plain one: seconds of the processor.

    Its own eager attention; what record() does once, to find which module computes what, is not counted.
    """
    import torch

    import tracediff
    from tracediff.engine.transformers_run import load

    loaded, _ = load(model, None, torch.float32, "cpu")
    ids = torch.tensor([TOKENS])
    times: tuple[list[float], list[float]] = ([], [])

    @torch.inference_mode()
    def forward(taken: list[float]) -> None:
        began = spent()
        loaded(ids)
        taken.append(spent() - began)

    forward([])
    for _ in range(REPEATS):
        forward(times[0])
        with tracediff.record(loaded, folder / "recorded.trace", gguf=model, capture="stats"):
            forward(times[1])
    plain, recorded = map(min, times)
    return {"record() of transformers, statistics of every op / plain forward": (recorded / plain, 1.3)}


def compare(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """Bytes per second of comparing two full traces over those of copying them."""
    import numpy as np

    from tracediff.engine.torch_run import TorchOptions, trace_torch
    from tracediff.pipeline import compare_traces

    a = trace_torch(model, folder / "a.trace", TorchOptions(), TOKENS)
    b = trace_torch(model, folder / "b.trace", TorchOptions(), TOKENS)
    sources = [np.fromfile(path.with_suffix(".bin"), np.uint8) for path in (a, b)]
    target = np.empty_like(sources[0])

    def copy() -> None:
        for source in sources:
            np.copyto(target, source)

    copying, comparing = least(copy, lambda: compare_traces(a, b))
    return {"compare, bytes per second / plain memory copy": (copying / comparing, -0.33)}


def replay(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """Replaying a full trace over a float64 forward of the same model."""
    import torch

    from tracediff.engine.torch_run import TorchOptions, trace_torch
    from tracediff.model.families import build_graph
    from tracediff.model.gguf_file import GGUFFile
    from tracediff.model.weights import Weights
    from tracediff.replay.judging import judge_all
    from tracediff.replay.replay import Replay
    from tracediff.trace.reader import Trace

    path = trace_torch(model, folder / "r.trace", TorchOptions(), TOKENS)
    file = GGUFFile(model)

    def forward() -> None:
        trace_torch(model, folder / "f64.trace", TorchOptions(dtype="f64", capture="stats"), TOKENS)

    def judge() -> None:
        for _ in judge_all([Replay(Trace(path), build_graph(file), Weights(file, torch.float64))]):
            pass

    theirs, ours = least(forward, judge, repeats=5)
    return {"replay of every op / float64 forward": (ours / theirs, 1.5)}


_MEMORY = """
import sys, threading, time
from pathlib import Path
from tracediff.process import tune
tune()
import tracediff.engine.torch_run as run
from tracediff.diagnose.judged import replay_and_explain
from tracediff.model.model import Model
from tracediff.replay.judging import Subject
from tracediff.trace.reader import Trace
def anonymous():
    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon')) * 1024
base = peak = anonymous()
stop = False
def watch():
    global peak
    while not stop:
        peak = max(peak, anonymous()); time.sleep(0.002)
thread = threading.Thread(target=watch); thread.start()
model, trace = Path(sys.argv[1]), Path(sys.argv[2])
if sys.argv[3] == 'trace':
    run.trace_torch(model, trace, run.TorchOptions(capture='stats'), eval(sys.argv[4]))
else:
    replay_and_explain(Model(model), [Subject(Trace(trace), {})])
stop = True; thread.join()
print(base, peak)
"""


def peak(what: str, model: Path, trace: Path) -> tuple[int, int]:
    """Bytes of anonymous memory that imports take, and with them at most tracing `TOKENS`, or the replay of a trace."""
    command = [sys.executable, "-c", _MEMORY, str(model), str(trace), what, repr(TOKENS)]
    imports, most = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(imports), int(most)


def memory(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """Peak anonymous memory above its imports, over twice a layer + logits + 300 MB, in the type that it computes in:
    of the torch engine, and of judging a trace of every op.

    Anonymous, because mapped pages of the model file are the page cache's and go when anybody needs them.
    """
    from tracediff.engine.torch_run import TorchOptions, trace_torch
    from tracediff.model.families import load_graph

    h = load_graph(model).hparams
    layer = 2 * h.n_embd * h.head_dim * (h.n_head + h.n_head_kv) + 3 * h.n_embd * h.n_ff
    values = 2 * layer + len(TOKENS) * h.n_vocab

    full = trace_torch(model, folder / "full.trace", TorchOptions(), TOKENS)
    (engine, tracing), (imports, judging) = peak("trace", model, folder / "m.trace"), peak("replay", model, full)
    return {
        "torch engine, peak memory / (2 layers + logits + 300 MB)": ((tracing - engine) / (4 * values + 300e6), 1.0),
        "replay, peak memory / (2 layers + logits in float64 + 300 MB)": (
            (judging - imports) / (8 * values + 300e6), 1.0
        ),
    }  # fmt: skip


_PLAIN_SCRIPT = """
import sys
from llama_cpp import Llama
tokens = eval(sys.argv[2])
llm = Llama(sys.argv[1], n_ctx=256, n_batch=256, n_threads=2, logits_all=True, verbose=False)
llm.eval(tokens)
import os, torch
from transformers import AutoModelForCausalLM
folder, name = os.path.split(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
with torch.inference_mode():
    model(torch.tensor([tokens]))
"""


def whole_run(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """`tracediff run --capture stats` over a script that does no more than run both engines."""
    tokens = ",".join(map(str, TOKENS))
    tracediff = [sys.executable, "-m", "tracediff", "run", str(model), "--tokens", tokens, "--capture", "stats"]
    plain = [sys.executable, "-c", _PLAIN_SCRIPT, str(model), repr(TOKENS)]

    def call(command: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(
            command, capture_output=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )

    result = subprocess.run(plain, capture_output=True, text=True, check=False)
    if result.returncode:
        print("the plain script fails:", result.stderr.strip().splitlines()[-1])
        return {}
    theirs, ours = least(call(plain), call(tracediff), repeats=2)
    return {"tracediff run, statistics / a plain script of both engines": (ours / theirs, 1.0)}


def processor(*arguments: object) -> float:
    """Seconds of the processor that a tracediff command takes, start and all, whoever shares the machine."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tracediff", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stderr
    said = child.stderr.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode > 1:
        raise RuntimeError(said.decode())
    return used.ru_utime + used.ru_stime


def in_q4_k_m(model: Path, folder: Path) -> Path:
    """The model in Q4_K_M."""
    from tracediff.model.synthetic import quantize

    return quantize(model, folder / "q4.gguf", "Q4_K_M")


def both_sides(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """`compare --model` of two full traces over `check` of one, Q4_K_M: seconds of the processor."""
    q4, tokens = in_q4_k_m(model, folder), ",".join(map(str, TOKENS))
    a, b = folder / "llama.trace", folder / "torch.trace"
    processor("trace", q4, "--tokens", tokens, "--engine", "llama.cpp", "-o", a)
    processor("trace", q4, "--tokens", tokens, "-o", b)
    one = processor("check", b, "--model", q4)
    return {"compare --model of two traces / check of one": (processor("compare", a, b, "--model", q4) / one, 1.4)}


def hidden_states(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """`check` of hidden states alone over `check` of every op, Q4_K_M: seconds of the processor."""
    q4, tokens = in_q4_k_m(model, folder), ",".join(map(str, TOKENS))
    taken = {}
    for capture in ("all", "layers"):
        out = folder / f"{capture}.trace"
        processor("trace", q4, "--tokens", tokens, "--capture", capture, "-o", out)
        taken[capture] = processor("check", out, "--model", q4)
    return {"check of hidden states alone / of every op": (taken["layers"] / taken["all"], 1.5)}


def unknown_mistake(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """The same of 32 tokens, with a mistake in one layer that no known one is, in the time that it is given
    unasked: a search of all edits in so large a layer takes more, and is left out.
    """
    import torch

    from tracediff.engine.recorder import TensorWriter
    from tracediff.engine.torch_engine import StepInput, TorchEngine
    from tracediff.model.model import Model
    from tracediff.trace.writer import TraceWriter

    q4 = Model(in_q4_k_m(model, folder))
    tokens, right = tuple(TOKENS[:32]), q4.graph[f"blk.{q4.graph.hparams.n_layer // 2}.ffn_act"]

    def waves(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up * (1 + 0.3 * torch.sin(7 * gate))

    taken = []
    for name, graph, capture in (
        ("right", q4.graph, "all"), ("wrong", q4.graph.changed(replace(right, function=waves)), "layers")
    ):  # fmt: skip
        out = folder / f"{name}.trace"
        with TraceWriter(out, name, graph.hparams.arch) as writer:
            engine = TorchEngine(graph, q4.weights(torch.float32))
            engine.run(0, StepInput(tokens, tuple(range(len(tokens)))), TensorWriter(writer, capture))  # type: ignore[arg-type]
        taken.append(processor("check", out, "--model", q4.path))
    return {"check of hidden states, one unknown mistake / of every op, sound": (taken[1] / taken[0], 4.0)}


def in_bfloat16(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """`check` of 48 tokens' hidden states of the torch engine in bfloat16, whose roundings nobody can follow, over
    `check` of every op in float32, both of the F16 model.
    """
    tokens, taken = ",".join(map(str, TOKENS[:48])), {}
    for dtype, capture in (("f32", "all"), ("bf16", "layers")):
        out = folder / f"{dtype}.trace"
        processor("trace", model, "--tokens", tokens, "--dtype", dtype, "--capture", capture, "-o", out)
        taken[dtype] = processor("check", out, "--model", model)
    return {"check of hidden states in bfloat16 / of every op in float32": (taken["bf16"] / taken["f32"], 12.0)}


def every_layer(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """The same with a known mistake in all layers, as most that engines have are; it must be named."""
    q4, tokens, trace = in_q4_k_m(model, folder), ",".join(map(str, TOKENS[:32])), folder / "every.trace"
    found = folder / "every.json"
    processor("trace", q4, "--tokens", tokens, "-o", trace)
    sound = processor("check", trace, "--model", q4)
    processor("trace", q4, "--tokens", tokens, "--capture", "layers", "--fault", "rope_theta", "-o", trace)
    taken = processor("check", trace, "--model", q4, "--json", found)
    (finding,) = json.loads(found.read_text())["findings"]
    if "rope's base is" not in finding["text"]:
        raise RuntimeError(f"rope's base was called {finding['text']!r}")
    return {"check of hidden states, a known mistake in all layers / of every op, sound": (taken / sound, 12.0)}


_UNLISTED = (
    "blk.3.attn_v: head channels 11 and 19 are exchanged",
    "blk.3.ffn_norm: every value above 0.5 is 0.5",
    "blk.3.ffn_gate: channels 256 to 511 are computed with rows 0 to 255 of ffn_gate.weight",
    "blk.3.ffn_act: silu is computed with 2 + exp(-ffn_gate), where 1 + exp(-ffn_gate) belongs",
    "blk.3.ffn_down: the sum takes only input channels 0 to 4862: the last is left out",
    "output: the sum takes only input channels 0 to 894: the last is left out",
)


def unlisted(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """Seconds on the wall, of idle cores, that `check` of every op takes longer where one op has a mistake that no
    list has: the most of several, and in the head.
    """
    q4, tokens, trace = in_q4_k_m(model, folder), ",".join(map(str, TOKENS)), folder / "wrong.trace"
    found = folder / "found.json"

    def seconds(*fault: str) -> float:
        processor("trace", q4, "--tokens", tokens, "-o", trace, *fault)
        began = time.perf_counter()
        processor("check", trace, "--model", q4, "--json", found)
        return time.perf_counter() - began

    sound, longer = seconds(), list[float]()
    for fault in _UNLISTED:
        longer.append(seconds("--fault", fault) - sound)
        said = json.loads(found.read_text())["findings"][0]["text"]
        if fault.split(": ", 1)[1] not in said:
            raise RuntimeError(f"{fault!r} was called {said!r}")
    *ops, head = longer
    return {
        "an unlisted mistake in an op, longest of five: seconds on the wall": (max(ops), 5.0),
        "the same in the head, of 151,936 rows": (head, 20.0),
    }


def formats(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """`check --html`, and `ci` of an engine that its lock was made of, over `check`: seconds of the processor.

    The least of several that alternate, of 64 tokens and 8 decode steps, Q4_K_M: the fewer values, the dearer a page.
    """
    q4, trace, lock = in_q4_k_m(model, folder), folder / "decode.trace", folder / "a.lock"
    processor("trace", q4, "--tokens", ",".join(map(str, TOKENS[:64])), "--decode", 8, "-o", trace)
    judged = (trace, "--model", q4)
    processor("ci", *judged, "--lock", lock, "--update")
    commands = (("check", *judged), ("check", *judged, "--html", folder / "page.html"), ("ci", *judged, "--lock", lock))
    plain, page, gate = map(min, zip(*([processor(*one) for one in commands] for _ in range(REPEATS)), strict=True))
    return {"check --html / check": (page / plain, 1.1), "ci / check": (gate / plain, 1.05)}


def engines(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """`trace` by torch over `trace` by llama.cpp, Q4_K_M, on one thread: seconds of the processor."""
    q4, tokens = in_q4_k_m(model, folder), ",".join(map(str, TOKENS))
    theirs = processor(
        "trace", q4, "--tokens", tokens, "--engine", "llama.cpp", "--threads", 1, "-o", folder / "l.trace"
    )
    return {
        "trace by torch / by llama.cpp, Q4_K_M": (
            processor("trace", q4, "--tokens", tokens, "-o", folder / "t.trace") / theirs, 1.8
        )
    }  # fmt: skip


def start_up(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """`tracediff --help` over importing what it is made of."""

    def call(*command: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, *command], capture_output=True, check=True)

    theirs, ours = least(call("-c", "import typer, rich"), call("-m", "tracediff", "--help"), repeats=7)
    return {"tracediff --help / python -c 'import typer, rich'": (ours / theirs, 1.5)}


_ALL = (
    llama_cpp,
    torch_engine,
    recording,
    compare,
    replay,
    memory,
    whole_run,
    both_sides,
    hidden_states,
    unknown_mistake,
    in_bfloat16,
    every_layer,
    unlisted,
    formats,
    engines,
)
MEASURES = {f.__name__: f for f in (*_ALL, start_up)}


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", choices=MEASURES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prepare()  # as the command line does: threads that wait sleep, and are no seconds of the processor
    before, table, after = args.out.read_text().split(_MARK) if args.out else ("", "", "")
    found = rows_of(table)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model
        if model is None:
            from tracediff.model.synthetic import QWEN25_05B, write_model

            model = write_model(folder / "model.gguf", QWEN25_05B, "F16")
        for measure in [args.only] if args.only else MEASURES:
            found[measure] = []
            for what, (ratio, target) in MEASURES[measure](model, folder).items():
                met = ratio >= -target if target < 0 else ratio <= target
                sign = ">=" if target < 0 else "<="
                row = f"| {what} | `{measure}` | {sign} {abs(target)} | {ratio:.2f} | {'yes' if met else 'no'} |"
                found[measure].append(row)
                print(row, flush=True)
    if args.out:
        rows = "\n".join(row for measure in MEASURES for row in found.get(measure, ()))
        args.out.write_text(f"{before}{_MARK}\n{_HEAD}\n{rows}\n{_MARK}{after}")


def rows_of(table: str) -> dict[str, list[str]]:
    """The rows of a page's table by measure: those that are not measured again stay."""
    found: dict[str, list[str]] = {}
    for row in table.strip().splitlines()[2:]:
        found.setdefault(row.split("`")[1], []).append(row)
    return found


if __name__ == "__main__":
    threading.stack_size(1 << 20)
    main()
