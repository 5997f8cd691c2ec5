"""Broken files of others, found by coverage: each must be refused with a TracediffError, or read; nothing else.

    pip install atheris
    python benchmarks/fuzz_imports.py [--minutes 60] [--jobs 2] [--only npz] [--folder FOLDER]
    python benchmarks/fuzz_imports.py --only npz --input FOLDER/npz/wrong/...

libFuzzer, by way of atheris, changes valid files of every format that is imported, maps of names, GGUF headers,
checkpoints and traces, and keeps what reaches code that nothing reached before. What is imported must be a trace that
can be read and breaks no rule. Every target has its share of the time, `--jobs` of them at once; the CPU time says
how much of it they had on a busy machine. What ended as none may is kept in FOLDER, once
for each place in the code; a hang of 10 s and memory beyond 2 GB count too. `--input` runs one again.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Run = Callable[[bytes, Path], None]  # with a folder of its own, which holds what the target's `prepare` put there
SECONDS, MEGABYTES = 10, 2048
INSTRUMENTED = ["tracediff", "zipfile", "json", "csv", "numpy.lib._format_impl", "torch._weights_only_unpickler"]
TOKENS = (1, 2)
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@dataclass(frozen=True)
class Target:
    """A kind of input: valid examples, what is done with one, and what that needs beside it."""

    seeds: Callable[[], list[bytes]]
    run: Run
    prepare: Callable[[Path], object] = lambda folder: None


def imported(form: str, path: Path, name_map: Path | None = None) -> None:
    """As the command does it; what was written is read again."""
    from tracediff.interchange.importer import Options, import_trace
    from tracediff.trace.reader import Trace

    out = path.parent / "out.trace"
    import_trace(form, path, out, Options(name_map, TOKENS, None, True), say=lambda message: None)  # type: ignore[arg-type]
    Trace(out)


def as_file(form: str, name: str = "in") -> Run:
    """One file, whose bytes are the input."""

    def run(data: bytes, folder: Path) -> None:
        (folder / name).write_bytes(data)
        imported(form, folder / name)

    return run


def in_folder(form: str, name: str) -> Run:
    """A folder with one file in it, whose bytes are the input."""

    def run(data: bytes, folder: Path) -> None:
        (folder / "in").mkdir(exist_ok=True)
        (folder / "in" / name).write_bytes(data)
        imported(form, folder / "in")

    return run


def saved(save: Callable[[io.BytesIO], object]) -> bytes:
    """What a function writes."""
    file = io.BytesIO()
    save(file)
    return file.getvalue()


# ---- npz and torch: zip archives, whose checksums would stop every change: what is in them changes before it is packed


def packed(members: dict[str, bytes]) -> bytes:
    """A zip archive that holds these."""

    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in members.items():
                archive.writestr(zipfile.ZipInfo(name), content)

    return saved(write)


def npz(data: bytes, folder: Path) -> None:
    """By its first byte: an archive, or one of the arrays in one, or a name and an array."""
    how, data = data[:1], data[1:]
    if how == b"a":
        data = packed({"lm_head.npy": data, "tokens.npy": saved(lambda f: np.save(f, np.array(TOKENS)))})
    elif how == b"n":
        name, _, content = data.partition(b"\n")
        data = packed({name.decode("latin-1") or "x": content, "token_embd.npy": saved(lambda f: np.save(f, X))})
    (folder / "in").write_bytes(data)
    imported("npz", folder / "in")


def npz_seeds() -> list[bytes]:
    """Of each sort."""
    types = [X, X.astype(np.float16), X.astype(">f8"), np.asfortranarray(X), X.astype(np.int8), np.array([None])]
    arrays = [saved(lambda f, x=x: np.save(f, x)) for x in types]  # type: ignore[misc]
    whole = saved(lambda f: np.savez_compressed(f, lm_head=X, tokens=np.array(TOKENS), **{"step1/output": X}))  # type: ignore[arg-type]
    return [b"z" + whole, *(b"a" + array for array in arrays), b"nblk.0.attn_q.npy\n" + arrays[0], b"nlm_head.rows\n"]


def sglang(data: bytes, folder: Path) -> None:
    """By its first byte: a file, or the pickle in an archive that torch.save writes, then a file name."""
    how, data = data[:1], data[1:]
    name = "name=lm_head.pt"
    if how == b"p":
        members = {"data.pkl": data, "version": b"3\n", "byteorder": b"little", "data/0": X.tobytes()}
        data = packed({f"archive/{name}": content for name, content in members.items()})
    elif how == b"n":
        name, _, data = (part.decode("latin-1") if i == 0 else part for i, part in enumerate(data.partition(b"\n")))  # type: ignore[assignment]
    (folder / "in").mkdir(exist_ok=True)
    for path in (folder / "in").iterdir():
        path.unlink()
    try:
        (folder / "in" / f"{name.replace('/', '_')[:200]}.pt").write_bytes(data)
    except (OSError, ValueError):  # no file can be called so
        return
    imported("sglang", folder / "in")


def sglang_seeds() -> list[bytes]:
    """Of each sort, sparse, nested and expanded ones too."""
    import torch

    x = torch.from_numpy(X)
    values = [x, x.bfloat16(), x.to_sparse(), x.expand(3, 2, 3), {"value": x, "meta": {"a": [1, (2,)]}}, x.T]
    files = [saved(lambda f, value=value: torch.save(value, f)) for value in values]  # type: ignore[misc]
    old = saved(lambda f: torch.save(x, f, _use_new_zipfile_serialization=False))
    pickles = []
    for file in files:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            pickles += [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    named = b"nstep=0___rank=0___dump_index=7___name=model.layers.0.mlp.down_proj.output\n" + files[0]
    return [*(b"z" + file for file in (*files, old)), *(b"p" + content for content in pickles), named]


# ---- Answers of servers, and trees

ANSWERS = [
    b'{"prompt_token_ids": [1, 2], "prompt_logprobs": [null, {"2": {"logprob": -1.5}, "7": {"logprob": -2}}]}',
    b'{"choices": [{"logprobs": {"content": [{"token": "token_id:1", "logprob": -1}, {"id": 2, "logprob": -9999}]}}]}',
    b'{"choices": [{"token_ids": [2], "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5]}}]}',
    b'{"completion_probabilities": [{"id": 2, "prob": 0.25, "top_probs": []}]}',
]
ROUTES = np.array([[[0, 1]], [[3, 2]]], np.int16)
ROUTED = b'{"choices": [{"prompt_token_ids": [1, 2], "prompt_routed_experts": [[[0, 1]], [[3, 2]]]}]}'
_PRINTED = '{"shape": "torch.Size([1, 2, 3])", "dtype": "torch.float32", "mean": "tensor(1.5)", "std": "tensor(2.)", '
_PRINTED += '"min": "tensor(-1e-3)", "max": "tensor(5.)"}'
TREE = (
    f'{{"module_path": "M", "children": [{{"module_path": "M.model.layers.1.input_layernorm", "inputs": {{"args": '
    f'[{_PRINTED}]}}, "outputs": {_PRINTED}}}, {{"module_path": "M.lm_head", "outputs": [{_PRINTED}]}}]}}'
).encode()


def saved_states() -> bytes:
    """Of two layers."""
    from safetensors.numpy import save

    return save({"hidden_states": np.stack([X, X + 1], 1), "token_ids": np.array(TOKENS)})


def prepare_tokens(folder: Path) -> None:
    """What lies beside the logits."""
    np.array(TOKENS, np.int32).tofile(folder / "in-tokens.bin")


# ---- Texts

TEXTS = {
    "table": [
        b"layer,op,mean,std,nan,shape\n0,attn_q,1,2,0,2x3\n,output,1e-3,,,[2 3]\n",
        b"| name | min | max |\n|---|---|---|\n| blk.0.attn_norm | -1 | `2` |\n",
        b'[{"op": "output", "rms": 1.5, "shape": "torch.Size([2, 3])"}, {"layer": 3, "mean": null, "inf": 2}]',
        b'{"l_out-1": {"min": "-1", "shape": "(2, 3)"}}',
    ],
    "llama-text": [
        b"number of input tokens = 2\n 1\n 2\n"
        b"ggml_debug:  inp_embd = (f32)  GET_ROWS(token_embd.weight{4, 9, 1, 1}, inp{2, 1, 1, 1}}) = {4, 2, 1, 1}\n"
        b"     [ [ 0.1, ...\n     sum = 1.5\n"
        b"ggml_debug:  Qcur-0 = (f32)  MUL_MAT(blk.0.attn_q.weight{4, 4, 1, 1}, a{4, 2, 1, 1}}) = {4, 2, 1, 1}\n"
        b"     sum = -nan\n"
        b"ggml_debug:  l_out-0 = (f32)  ADD(a{4, 2, 1, 1}, b{4, 2, 1, 1}}) = {4, 2, 1, 1}\n     sum = 3\n",
        b"Token ids (2):\n a(1) b(2) \ncommon_debug_cb_eval: x-1 (view) = (q8_0) VIEW(x-1{4, 2, 1, 1}, }) = {2, 4}\n",
    ],
    "map": [b"# mine\na=output\nh.{N}=blk.{N}.attn_q\n", b'{"a": "output", "h.{N}": "blk.{N}.ffn_residual"}'],
}


def map_(data: bytes, folder: Path) -> None:
    """For names that are in the table, and some that are not."""
    (folder / "map").write_bytes(data)
    imported("npz", folder / "named.npz", folder / "map")


def prepare_map(folder: Path) -> None:
    """The arrays that maps name."""
    np.savez(folder / "named.npz", **{"a": X, "h.0": X, "h.1": X + 1, "lm_head": X})  # type: ignore[arg-type]


# ---- Models and traces


def prepare_model(folder: Path) -> None:
    """A model of one layer, a checkpoint and a trace of it, and what changes must not harm."""
    from tracediff.engine.torch_run import TorchOptions, trace_torch
    from tracediff.model.synthetic import Shape, write_model

    shape = Shape("qwen2", n_layer=1, n_embd=8, n_head=2, n_head_kv=1, n_ff=8, n_vocab=257, tied=True)
    write_model(folder / "m.gguf", shape, "F32")
    trace_torch(folder / "m.gguf", folder / "reference.trace", TorchOptions(), TOKENS, 1)
    trace_torch(folder / "m.gguf", folder / "in.trace", TorchOptions(), TOKENS, 1)
    (folder / "hf").mkdir()


def model_seeds() -> list[bytes]:
    """The model as it is, and without its tensors' values."""
    with prepared(prepare_model) as folder:
        whole = (folder / "m.gguf").read_bytes()
    return [whole, whole[:9000]]


def gguf(data: bytes, folder: Path) -> None:
    """What every command reads of a model before it runs it."""
    from tracediff.inspect.listings import of_model
    from tracediff.inspect.skeleton import comments, trace
    from tracediff.model.families import build_graph
    from tracediff.model.gguf_file import GGUFFile
    from tracediff.model.tensors import FileTensors
    from tracediff.model.vocabulary import Vocabulary

    path = folder / "in.gguf"
    path.write_bytes(data)
    file = GGUFFile(path)
    texts = Vocabulary(file)
    texts.decode(range(300))
    [texts.is_special(token) for token in range(300)]
    tensors = FileTensors(file)
    for name in tensors.names()[:4]:
        tensors.head(name)
    graph = build_graph(file)
    if len(graph.ops) < 1000:
        of_model(graph)
        [*comments(graph), *trace(graph, "m", 2)]


def checkpoint(data: bytes, folder: Path) -> None:
    """A shard of what the model was made from."""
    from tracediff.audit.whole_file import audit_checkpoint

    (folder / "hf" / "model.safetensors").write_bytes(data)
    audit_checkpoint(folder / "m.gguf", folder / "hf", lambda fraction: None)


def checkpoint_seeds() -> list[bytes]:
    """Some tensors, named as Hugging Face names them."""
    from safetensors.numpy import save

    x = np.zeros((8, 8), np.float32)
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    shapes = [np.zeros((257, 8), np.float16), x, np.ones(8, np.float32)]
    return [save(dict(zip(names, shapes, strict=True))), save({names[1]: x, "model.layers.0.mlp.up_proj.weight": x})]


def trace_seeds() -> list[bytes]:
    """A whole trace of one layer, and short ones with every key."""
    with prepared(prepare_model) as folder:
        whole = (folder / "in.trace").read_bytes()
    head = b'{"type":"trace","version":1,"engine":"e","arch":"qwen2","data":"in.bin"}\n'
    op = b'{"type":"op","step":0,"op":"blk.0.attn_q","dtype":"f16","shape":[1,2,4],"offset":8,"rows":[1]}\n'
    op = op.replace(b'"rows"', b'"strides":[9,4,1],"rows"')
    step = b'{"type":"step","step":0,"tokens":[1,2],"positions":[0,1]}\n'
    numbers = b'{"type":"op","step":0,"op":"output","shape":[2,257],"min":-1,"max":2,"mean":0.5,"rms":1,"nan":1}\n'
    weight = b'{"type":"weight","weight":"output_norm.weight","dtype":"bf16","shape":[8],"offset":0}\n'
    return [whole, head + weight + step + op + numbers + b'{"type":"end","records":5}\n']


def trace(data: bytes, folder: Path) -> None:
    """Validated, compared and reported, and replayed; the data file stays as it is."""
    from rich.console import Console

    from tracediff.inspect.validate import validate
    from tracediff.pipeline import Effort, check_trace, compare_traces
    from tracediff.report.json_report import render as render_json
    from tracediff.report.terminal import render
    from tracediff.report.validation import render as render_findings

    path, model = folder / "in.trace", folder / "m.gguf"
    path.write_bytes(data)
    render_findings(validate(path, model))
    result = compare_traces(folder / "reference.trace", path)
    render_json(result)
    Console(file=io.StringIO(), width=80).print(render(result, 80))
    check_trace(path, model, effort=Effort(seconds=2))  # causes may take a minute: it is no hang


TARGETS = {
    "npy": Target(
        lambda: [
            saved(lambda f, x=x: np.save(f, x))  # type: ignore[misc]
            for x in (X, np.asfortranarray(X), X.astype(">f2"), np.array([None]))
        ],
        in_folder("npy", "lm_head.npy"),
    ),
    "npz": Target(npz_seeds, npz),
    "safetensors": Target(lambda: [saved_safetensors()], as_file("safetensors")),
    "sglang": Target(sglang_seeds, sglang),
    "logprobs": Target(lambda: ANSWERS, as_file("logprobs")),
    "routed-experts": Target(lambda: [saved(lambda f: np.save(f, ROUTES)), ROUTED], as_file("routed-experts")),
    "vllm-hidden-states": Target(lambda: [saved_states()], as_file("vllm-hidden-states")),
    "debug-tree": Target(lambda: [TREE], as_file("debug-tree")),
    "llama-logits": Target(lambda: [X.tobytes()], as_file("llama-logits", "in.bin"), prepare_tokens),
    "llama-text": Target(lambda: TEXTS["llama-text"], as_file("llama-text")),
    "table": Target(lambda: TEXTS["table"], as_file("table")),
    "map": Target(lambda: TEXTS["map"], map_, prepare_map),
    "gguf": Target(model_seeds, gguf),
    "checkpoint": Target(checkpoint_seeds, checkpoint, prepare_model),
    "trace": Target(trace_seeds, trace, prepare_model),
}


def saved_safetensors() -> bytes:
    """Arrays of some types, and the tokens."""
    from safetensors.numpy import save

    return save({"lm_head": X, "step1/token_embd": X.astype(np.float16), "tokens": np.array(TOKENS), "none": X[:0]})


@contextmanager
def prepared(prepare: Callable[[Path], object]) -> Iterator[Path]:
    """A folder in memory where there is one, with what a target needs."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        prepare(Path(name))
        yield Path(name)


def ends(target: Target, data: bytes, folder: Path) -> str | None:
    """How an input ended where none may end so: the exception and where it came from; None if all is well."""
    from tracediff.errors import MismatchError, TracediffError

    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # a file: atheris asks for its number
            target.run(data, folder)
    except MismatchError:  # other tokens than the reference's: said of both, a line each
        return None
    except TracediffError as error:
        said = str(error)
        is_one = all(line.startswith(("  | ", "Its last lines:")) for line in said.split("\n")[1:])
        return None if said and is_one else f"{type(error).__name__} of no line, or several: {said!r}"
    except BaseException as error:  # a panic in Rust is one
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if "/fuzz_imports.py" not in frame.filename
        ]
        where = next((f for f in reversed(frames) if "/tracediff/" in f.filename), frames[-1])
        return f"{type(error).__name__} in {Path(where.filename).name}, {where.name}: {str(error)[:150]}"
    return None


def fuzz(name: str, seconds: int, folder: Path) -> None:
    """Run one target in this process, which libFuzzer ends. What is wrong is kept in `folder`."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        import tracediff.audit.whole_file
        import tracediff.inspect.listings
        import tracediff.inspect.validate
        import tracediff.interchange.importer
        import tracediff.pipeline
        import tracediff.report.terminal  # noqa: F401
    warnings.simplefilter("ignore")
    target = TARGETS[name]
    corpus, wrong = folder / "corpus", folder / "wrong"
    for place in (corpus, wrong):
        place.mkdir(parents=True, exist_ok=True)
    seeds = target.seeds()
    for i, seed in enumerate(seeds):
        (corpus / f"seed{i}").write_bytes(seed)
    with prepared(target.prepare) as work:
        ends(target, seeds[0], work)  # what is loaded on first use takes its time

        def one(data: bytes) -> None:
            how = ends(target, data, work)
            if how:
                place = wrong / re.sub(r"\W+", "_", how.partition(":")[0])
                if not place.exists():
                    place.write_bytes(data)
                    print(f"WRONG {how} ({place})", file=sys.stderr, flush=True)

        options = {
            "max_total_time": seconds, "timeout": SECONDS, "rss_limit_mb": MEGABYTES, "max_len": 1 << 16,
            "print_final_stats": 1, "artifact_prefix": f"{wrong}/",
        }  # fmt: skip
        atheris.enabled_hooks.add("str")
        atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)], one)
        atheris.Fuzz()


def share(name: str, seconds: int, folder: Path) -> tuple[float, int, int, list[str]]:
    """Run one target in a child: its CPU seconds, how many inputs it ran, how many edges of the code they covered,
    what was wrong.
    """
    command = [sys.executable, __file__, "--target", name, "--seconds", str(seconds), "--folder", str(folder / name)]
    with (folder / f"{name}.log").open("w+") as log:
        child = subprocess.Popen(command, stderr=log, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        _, status, used = os.wait4(child.pid, 0)
        code = child.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        said = log.read()
    ran = re.search(r"number_of_executed_units: (\d+)", said)
    inputs = int(ran[1]) if ran else 0
    edges = max((int(n) for n in re.findall(r" cov: (\d+)", said)), default=0)
    wrong = [line.removeprefix("WRONG ") for line in said.splitlines() if line.startswith("WRONG ")]
    if code:
        wrong += [f"libFuzzer ended with {code}: the end of {folder / name}.log says why"]
    return used.ru_utime + used.ru_stime, inputs, edges, wrong


def main() -> None:
    """Give every target its share of the time, and print what came of it; exit code 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=1, help="targets run at once, for --minutes in all")
    parser.add_argument("--only", choices=TARGETS)
    parser.add_argument("--folder", type=Path, default=Path("fuzz"), help="corpora, logs, and what was wrong")
    parser.add_argument("--input", type=Path, help="run one input of --only again")
    parser.add_argument("--target", choices=TARGETS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        fuzz(arguments.target, arguments.seconds, arguments.folder)
        return
    names = [arguments.only] if arguments.only else [*TARGETS]
    if arguments.input:
        with prepared(TARGETS[names[0]].prepare) as work:
            TARGETS[names[0]].run(arguments.input.read_bytes(), work)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    seconds = max(1, int(60 * arguments.minutes * arguments.jobs / len(names)))
    all_wrong = []
    print("| target | CPU minutes | inputs | edges covered | wrong |\n|---|---|---|---|---|")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        shares = pool.map(lambda name: share(name, seconds, arguments.folder), names)
        for name, (used, inputs, edges, wrong) in zip(names, shares, strict=True):
            print(f"| {name} | {used / 60:.1f} | {inputs:,} | {edges:,} | {len(wrong)} |", flush=True)
            all_wrong += [f"{name}: {how}" for how in wrong]
    print(*all_wrong, sep="\n")
    sys.exit(bool(all_wrong))


if __name__ == "__main__":
    main()
