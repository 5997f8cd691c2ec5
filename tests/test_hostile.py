"""Input that was made to harm, or changes while it is read: refused or survived, in words, within bounds."""

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Models
from hypothesis import given
from hypothesis import strategies as st

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.printable import escape_json, printable
from tracediff.result import Remark
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

Refused = Callable[..., str]
Cli = Callable[..., tuple[int, str, str]]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails where it takes longer: what hangs would hang the suite."""

    def ring(*_: object) -> None:
        pytest.fail(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Of one op, 1 MB."""
    path = tmp_path / "a.trace"
    with TraceWriter(path, "e") as writer:
        writer.step(0, range(256), range(256))
        writer.op(0, "token_embd", np.ones((256, 1024), np.float32), "f32")
    return path


# ---- Files that change


CHANGES = {
    "cut": ("os.truncate(data, 0)", "changed while it was read"),
    "cut in half": ("os.truncate(data, 1 << 19)", "changed while it was read"),
    "written again": ("data.write_bytes(bytes(1 << 20))", "changed while it was read"),
    "longer": ("data.write_bytes(bytes(1 << 21))", "changed while it was read"),
    "replaced": ("os.replace(path, data)", "1.0"),  # what was opened is still there
}
READ = """
import os, sys
from pathlib import Path
from tracediff.errors import TraceError
from tracediff.compare.measure import record_statistics
from tracediff.trace.reader import Trace
path = Path(sys.argv[1])
data = path.with_suffix(".bin")
trace = Trace(path)
record = trace.ops[0, "token_embd"]
{change}
for read in (lambda record: trace.values(record).mean(), lambda record: record_statistics(record, trace).mean):
    try:
        print(read(record))
    except TraceError as error:
        print(error)
"""


@pytest.mark.parametrize("change", CHANGES)
def test_data_that_changes_after_it_was_opened(change: str, trace: Path) -> None:
    """A process that had mapped it would be killed by SIGBUS."""
    done, expected = CHANGES[change]
    code = READ.format(change=done)
    ended = subprocess.run([sys.executable, "-c", code, str(trace)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count(expected) >= 2


@pytest.mark.parametrize("change", ["os.truncate(path, 9000)", "path.write_bytes(path.read_bytes())"])
def test_a_model_that_changes_after_it_was_opened(change: str, models: Models, tmp_path: Path) -> None:
    """It is mapped: what is cut off would end the process, and what is written again may be another model."""
    path = tmp_path / "m.gguf"
    path.write_bytes(models("qwen2").read_bytes())
    code = f"""
import os, sys
from pathlib import Path
from tracediff.errors import ModelError
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.weights import Weights
path = Path(sys.argv[1])
file = GGUFFile(path)
weights = [weight for op in build_graph(file) for weight in op.weights]
Weights(file).load(weights[-1]).sum()
{change}
first = file.places("tokenizer.ggml.tokens")[0]
for read in (lambda: Weights(file).load(weights[-1]).sum(), lambda: file.string(first)):
    try:
        print(read())
    except ModelError as error:
        print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("the model changed while it was read") == 2


def test_data_is_a_link_out_of_the_folder(
    trace: Path, tmp_path_factory: pytest.TempPathFactory, refused: Refused
) -> None:
    """Of a trace from elsewhere, judged, exported or sent back, it would show what is in any file."""
    data = trace.with_suffix(".bin")
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    data.rename(secret)
    data.symlink_to(secret)
    assert "cannot open the data file 'a.bin': it is a link out of the trace's folder. It must" in refused(
        "inspect", trace
    )


def test_links_that_stay_together(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Within the folder, and both files linked into one place, as the cache of huggingface_hub has them."""
    data = trace.with_suffix(".bin")
    data.rename(data.with_name("b.bin"))
    data.symlink_to("b.bin")
    assert Trace(trace).ops
    snapshot = tmp_path_factory.mktemp("snapshot")
    for path in (trace, data):
        (snapshot / path.name).symlink_to(path)
    assert Trace(snapshot / "a.trace").ops


def test_an_op_that_bears_the_name_of_what_is_exported_beside_it(tmp_path: Path, refused: Refused) -> None:
    """The later of two would have been lost, and a .safetensors file could not be read."""
    with TraceWriter(tmp_path / "b.trace", "e") as writer:
        writer.step(0, [1], [0])
        writer.op(0, "tokens", np.ones((1, 4), np.float32), "f32")
    for name in ("b.npz", "b.safetensors"):
        message = refused("export", tmp_path / "b.trace", "-o", tmp_path / name)
        assert "an op bears the name of 'step0/tokens', which is exported too. Rename the op." in message


# ---- What is no file


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


COMMANDS = {
    "trace": ("inspect", "{}"),
    "validate": ("validate", "{}"),
    "model": ("check", "a.trace", "--model", "{}"),
    "weights": ("weights", "{}", "--trace", "a.trace"),
    "npz": ("import", "npz", "{}", "-o", "x.trace"),
    "safetensors": ("import", "safetensors", "{}", "-o", "x.trace"),
    "text": ("import", "llama-text", "{}", "-o", "x.trace"),
    "table": ("import", "table", "{}", "-o", "x.trace"),
    "map": ("import", "table", "{table}", "-o", "x.trace", "--map", "{}"),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_pipes_devices_and_folders(
    what: str, trace: Path, fifo: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a pipe waits for a writer; a device may never end."""
    monkeypatch.chdir(trace.parent)
    table = trace.parent / "t.csv"
    table.write_text("op,mean\noutput,1\n")
    for path, expected in (
        (fifo, "it is a pipe"),
        (Path("/dev/zero"), "it is a device"),
        (trace.parent, "it is a folder"),
    ):
        with within(5):
            message = refused(*(part.format(path, table=table) for part in COMMANDS[what]))
        assert f"{path}: " in message
        assert expected in message


@pytest.mark.parametrize("form", ["npy", "sglang", "weights"])
def test_pipes_in_folders(form: str, trace: Path, fifo: Path, models: Models, refused: Refused) -> None:
    folder = trace.parent / "folder"
    folder.mkdir()
    name = {"npy": "output.npy", "sglang": "name=lm_head.pt", "weights": "model.safetensors"}[form]
    fifo.rename(folder / name)
    with within(5):
        if form == "weights":
            message = refused("weights", models("tiny"), "--hf", folder)
        else:
            message = refused("import", form, folder, "-o", trace.parent / "x.trace", "--tokens", "1")
    assert f"{folder / name}: " in message
    assert "it is a pipe" in message


def test_data_is_a_pipe(trace: Path, fifo: Path, refused: Refused) -> None:
    fifo.replace(trace.with_suffix(".bin"))
    with within(5):
        assert "cannot open the data file 'a.bin': it is a pipe, not a file." in refused("inspect", trace)


# ---- Names that are no names

EVIL = "\x1b[2J\x1b]0;t\x07\r\nMATCH: nothing diverges\x9b\u202e\u2066\x7f\u200b\ue000"


def shown(output: str) -> None:
    """Fails where something would do what a terminal does with it, or stand on a line of its own."""
    raw = {c for c in output if not c.isprintable() and c != "\n"}
    assert not raw
    assert "\nMATCH: nothing diverges\\x9b" not in output


@pytest.fixture
def evil(models: Models, tmp_path: Path) -> Path:
    """A trace of the tiny model with evil names, and the model with evil texts, in a folder of an evil name."""
    folder = tmp_path / EVIL
    folder.mkdir()
    model = models("tiny").read_bytes()
    head = model[:20_000].replace(b"<|bos|>", b"\x1b[2J\x07ab").replace("Ġ".encode(), b"\xc2\x9b")
    (folder / "m.gguf").write_bytes(head + model[20_000:])
    path = trace_torch(models("tiny"), folder / "a.trace", TorchOptions(), (256, 1, 2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] |= {"engine": EVIL, "model": "m.gguf" + EVIL}
    for line in lines:
        if line.get("op", "").endswith("blk.0.attn_norm"):
            line["op"] = EVIL
        if line.get("weight") == "output_norm.weight":
            line["weight"] = EVIL
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = [line | ({"tokens": [1, 2, 3]} if "tokens" in line else {}) for line in lines]
    path.with_name("o.trace").write_text("".join(json.dumps(line) + "\n" for line in other))
    np.savez(folder / "a.npz", **{EVIL: np.ones((1, 4), np.float32), "token_embd": np.ones((1, 4), np.float32)})
    np.savez(folder / "b.npz", **{EVIL: np.ones((1, 4), np.float32)})
    (folder / "t.csv").write_text(f'op,mean\n"{EVIL}",1\n')
    (folder / "map").write_text("{" + json.dumps(EVIL) + ": 1}")
    (folder / "broken.trace").write_text(json.dumps({"type": EVIL}))
    return folder


EVIL_COMMANDS = {
    "compare": "compare a.trace a.trace",
    "compare three": "compare a.trace a.trace a.trace",
    "compare with the model": "compare a.trace a.trace --model m.gguf --allow *",
    "other tokens": "compare a.trace o.trace --model m.gguf",
    "check": "check a.trace --model m.gguf",
    "validate": "validate a.trace",
    "validate with the model": "validate a.trace --model m.gguf",
    "inspect": "inspect a.trace",
    "inspect the model": "inspect m.gguf --skeleton --tokens 3",
    "weights": "weights m.gguf --trace a.trace",
    "export": "export a.trace -o x.npz",
    "import": "import npz a.npz -o x.trace --tokens 1 --skip-unknown",
    "import, refused": "import npz b.npz -o x.trace --tokens 1",
    "table": "import table t.csv -o x.trace --tokens 1",
    "map": "import npz a.npz -o x.trace --map map",
    "broken": "inspect broken.trace",
    "missing": f"inspect {EVIL.replace(' ', '')}",
    "options": f"compare a.trace a.trace --allow {EVIL.replace(' ', '')}",
    "a value": f"compare a.trace a.trace --tolerance {EVIL.replace(' ', '')}",
    "usage": f"compare a.trace a.trace --{EVIL.replace(' ', '')}",
    "too many": f"validate a.trace {EVIL.replace(' ', '')}",
}


@pytest.mark.parametrize("what", EVIL_COMMANDS)
def test_no_name_reaches_the_terminal_raw(what: str, evil: Path, cli: Cli) -> None:
    folder = {name: evil / name for name in os.listdir(evil)} | {name: evil / name for name in ("x.npz", "x.trace")}
    code, output, error = cli(*(folder.get(part, part) for part in EVIL_COMMANDS[what].split(" ")))
    assert code in (0, 1, 2)
    assert "this is a bug" not in error
    assert "\\x1b[2J" in output + error or what == "inspect the model"
    shown(output + error)


@pytest.mark.parametrize("command", ["compare a.trace a.trace", "check a.trace --model m.gguf", "validate a.trace"])
def test_json_has_every_name_as_it_is(command: str, evil: Path, cli: Cli) -> None:
    arguments = [evil / part if "." in part else part for part in command.split()]
    for out in ("-", evil / "x.json"):
        _, output, _ = cli(*arguments, "--json", out)
        text = output if out == "-" else out.read_bytes().decode()
        shown(text)
        assert json.loads(text)
        assert json.dumps(EVIL)[1:-1] in text


@given(st.text())
def test_printable(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable((Remark(1, "violation", text, ""), [text, {text: 2.5}, None])) == (
        Remark(1, "violation", printable(text), ""), [printable(text), {printable(text): 2.5}, None],
    )  # fmt: skip
    assert json.loads(escape_json(json.dumps({text: text}, ensure_ascii=False, indent=1))) == {text: text}


@given(st.text(st.characters(codec="ascii", exclude_categories=["C"], exclude_characters='\\"')))
def test_what_is_printable_stays(text: str) -> None:
    unchanged = (Remark(1, "violation", text, "数 é 🙂"),)
    assert printable(unchanged) is unchanged


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x", "2000000000"])
def test_any_width(columns: str, trace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for command in (("compare", trace, trace), ("inspect", trace)):
        code, output, _ = cli(*command)
        assert code == 0
        assert "token_embd" in output


# ---- Files that are larger inside, or hold what no tensor is


def member(path: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, content)


def strange_torch() -> dict[str, tuple[object, str]]:
    x = torch.ones(2, 3)
    return {
        "sparse": (x.to_sparse(), "a sparse_coo tensor"),
        "compressed": (x.to_sparse_csr(), "a sparse_csr tensor"),
        "nested": (torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged), "a nested tensor"),
        "without values": (x.to("meta"), "a meta tensor"),
        "quantised": (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "a torch.qint8 tensor"),
        "zero strides": (torch.ones(1).expand(1 << 20, 1 << 12), "17,179,869,184 bytes"),
        "a class": (Path("a"), "Python objects"),
        "a list": ([x, x], "no tensor but list"),
        "deep": (deep(), "no tensor but list"),
    }


def deep() -> object:
    value: object = 1
    for _ in range(300):
        value = [value]
    return value


@pytest.mark.parametrize("what", strange_torch())
@pytest.mark.filterwarnings("ignore:.*(beta|prototype|quantized|deprecat).*")
def test_tensors_that_are_none(what: str, tmp_path: Path, refused: Refused) -> None:
    value, expected = strange_torch()[what]
    torch.save({"value": value}, tmp_path / "name=lm_head.pt")
    with within(20):
        message = refused("import", "sglang", tmp_path, "-o", tmp_path / "x.trace", "--tokens", "1,2")
    assert expected in message
    assert "name=lm_head.pt" in message
    harmless(message)


def harmless(message: str) -> None:
    """Fails where it passes on what numpy, torch or Python advise: to load what may run code, to lift a limit."""
    assert not re.search("pickle|weights_only|unsafe|set_int_max|trust|max_header", message)


def test_a_tensor_that_is_expanded_a_little(tmp_path: Path, cli: Cli) -> None:
    """Positions and masks are often views of one row."""
    torch.save({"value": torch.ones(3).expand(2, 3)}, tmp_path / "name=lm_head.pt")
    code, _, said = cli("import", "sglang", tmp_path, "-o", tmp_path / "x.trace", "--tokens", "1,2")
    assert (code, said.splitlines()[0]) == (0, "imported 1 records in 1 step")
    assert Trace(tmp_path / "x.trace").ops[0, "output"].shape == (2, 3)


def objects(path: Path) -> None:
    np.savez(path, lm_head=np.array([None]))


def a_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps([1]))


def zeros(path: Path) -> None:
    """4 GB of zeros as the directory has it, in 40 kB."""
    np.savez_compressed(path, lm_head=np.zeros(10 << 20, np.float32))
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\1\2") + 24
    content[at : at + 4] = (4_000_000_000).to_bytes(4, "little")
    path.write_bytes(content)


def huge_shape(path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    member(path, "lm_head.npy", header.getvalue())


def long_header(path: Path) -> None:
    np.savez(path, lm_head=np.zeros(1, [(f"{i:0>50}", "f4") for i in range(400)]))


def broken_extra(path: Path) -> None:
    """A field of the directory that ends before it should."""
    member(path, "lm_head.npy", b"")
    content = path.read_bytes()
    at = content.index(b"PK\1\2")
    patched = bytearray(content[: at + 46 + 11] + b"\1\0\x10\0\0\0" + content[at + 46 + 11 :])
    patched[at + 30] = 6
    patched[at + 20 : at + 28] = b"\xff" * 8
    end = patched.index(b"PK\5\6")
    patched[end + 12] += 6
    path.write_bytes(patched)


NPZ = {
    "objects": (objects, "Python objects"),
    "a pickle": (a_pickle, "cannot read it as an .npz archive"),
    "zeros": (zeros, "4,000,000,000 bytes"),
    "a huge shape": (huge_shape, "cannot read it as"),
    "a long header": (long_header, "cannot read it as"),
    "broken extra": (broken_extra, "cannot read it as an .npz archive"),
    "encrypted": (lambda path: encrypted(path), "cannot read it as"),
    "no array in it": (lambda path: member(path, "lm_head.npy", b"not one"), "cannot read it as"),
}


def encrypted(path: Path) -> None:
    member(path, "lm_head.npy", b"secret")
    content = bytearray(path.read_bytes())
    for mark, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(mark) + at] |= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", NPZ)
def test_archives_that_are_none(what: str, tmp_path: Path, refused: Refused) -> None:
    make, expected = NPZ[what]
    make(tmp_path / "a.npz")
    with within(20):
        message = refused("import", "npz", tmp_path / "a.npz", "-o", tmp_path / "x.trace", "--tokens", "1")
    assert expected in message
    assert "a.npz" in message
    harmless(message)


def test_members_that_are_no_arrays_are_left_out_and_said(tmp_path: Path, cli: Cli) -> None:
    np.savez(tmp_path / "a.npz", lm_head=np.ones((1, 3), np.float32))
    member(tmp_path / "a.npz", "README.txt", b"made by hand")
    code, _, said = cli("import", "npz", tmp_path / "a.npz", "-o", tmp_path / "x.trace", "--tokens", "1")
    assert (code, said.splitlines()[0]) == (0, "left out 1, no .npy array: README.txt")


def test_zeros_of_an_engine_that_writes_nothing_else(tmp_path: Path, cli: Cli) -> None:
    """40 MB of zeros, compressed a thousand times: that may well be what an engine made."""
    np.savez_compressed(tmp_path / "a.npz", lm_head=np.zeros((1, 10 << 20), np.float32))
    assert cli("import", "npz", tmp_path / "a.npz", "-o", tmp_path / "x.trace", "--tokens", "1")[0] == 0


# ---- Numbers and texts that take long


DIGITS = "1" * 5000
NUMBERS = {
    "table, layer": ("table", f"layer,mean\n{DIGITS},1\n"),
    "table, shape": ("table", f"op,mean,shape\noutput,1,{DIGITS}\n"),
    "table, step": ("table", f"op,mean,step\noutput,1,{DIGITS}\n"),
    "table, nan": ("table", f"op,mean,nan\noutput,1,{DIGITS}\n"),
    "table, JSON": ("table", f'[{{"op": "output", "mean": 1, "nan": {DIGITS}}}]'),
    "table, name": ("table", f"op,mean\nblk.{DIGITS}.attn_q,1\n"),
    "text, sizes": ("llama-text", f"debug: x = (f32) MUL(a{{{DIGITS}, 1}}, }}) = {{{DIGITS}, 1}}\n sum = 1\n"),
    "text, sum": ("llama-text", f"debug: x = (f32) MUL(a{{1}}, }}) = {{1}}\n sum = {DIGITS}x\n"),
    "text, tokens": ("llama-text", f"number of input tokens = {DIGITS}\n"),
    "text, layer": ("llama-text", f"debug: l_out-{DIGITS} = (f32) ADD(a{{1}}, b{{1}}}}) = {{1}}\n sum = 1\n"),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_of_thousands_of_digits(what: str, tmp_path: Path, refused: Refused) -> None:
    form, text = NUMBERS[what]
    (tmp_path / "a").write_text(text)
    message = refused("import", form, tmp_path / "a", "-o", tmp_path / "x.trace", "--tokens", "1")
    harmless(message)


def test_a_token_of_thousands_of_digits(tmp_path: Path, refused: Refused) -> None:
    text = "debug: l_out-0 = (f32) ADD(a{4, 1}, b{4, 1}}) = {4, 1}\n sum = 1\n"
    (tmp_path / "a").write_text(f"number of input tokens = 1\n{DIGITS}\n{text}")
    message = refused("import", "llama-text", tmp_path / "a", "-o", tmp_path / "x.trace")
    assert "which tokens was it fed?" in message


def test_tokens_of_thousands_of_digits(trace: Path, models: Models, refused: Refused) -> None:
    message = refused("trace", models("tiny"), "--tokens", DIGITS, "-o", trace.with_name("x.trace"))
    assert "ids are whole numbers" in message
    harmless(message)


def test_a_map_with_a_number_of_thousands_of_digits(tmp_path: Path, refused: Refused) -> None:
    np.savez(tmp_path / "a.npz", lm_head=np.ones((1, 3), np.float32))
    (tmp_path / "map").write_text(f'{{"lm_head": {DIGITS}}}')
    message = refused(
        "import", "npz", tmp_path / "a.npz", "-o", tmp_path / "x.trace", "--tokens", "1", "--map", tmp_path / "map"
    )
    assert "the map" in message
    harmless(message)


SLOW = {
    "text": ("llama-text", "debug: " + " = (f32) x(" * 1100 + "\n"),
    "text, braces": ("llama-text", "debug: a = (f32) x(" + "{1, 1}, " * 1500 + "\n"),
    "text, spaces": ("llama-text", "debug:" + " " * 12_000 + "x\n"),
    "text, sum": ("llama-text", " " * 200_000 + "sum\n"),
    "table, lines": ("table", "\n" * 1_000_000 + "x"),
    "table, spaces": ("table", " " * 1_000_000 + "x"),
    "table, bars": ("table", "|" * 300_000),
    "table, quotes": ("table", "op,mean\n" + '"' * 300_000),
}


@pytest.mark.parametrize("what", SLOW)
def test_texts_are_read_in_linear_time(what: str, tmp_path: Path, refused: Refused) -> None:
    form, text = SLOW[what]
    (tmp_path / "a").write_text(text)
    with within(5):
        refused("import", form, tmp_path / "a", "-o", tmp_path / "x.trace", "--tokens", "1")


FLOODS = {
    "empty lines": b"\n" * 20_000,
    "no JSON": b"x\n" * 20_000,
    "other sorts": b"".join(b'{"type":"op","step":%d}\n' % i for i in range(20_000)),
    "one word": b'{"type":"op","step":0,"op":"%s","shape":[1],"mean":1}\n' % (b"x" * 1_000_000),
}


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_of_findings_is_counted(what: str, trace: Path, cli: Cli) -> None:
    cli("validate", trace, "--json", trace.with_suffix(".json"))  # what is imported is not of the flood
    path = trace.with_name("b.trace")
    path.write_bytes(b'{"type":"trace","version":1,"engine":"e"}\n' + FLOODS[what])
    tracemalloc.start()
    with within(30):
        code, output, _ = cli("validate", path, "--json", path.with_suffix(".json"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == 1
    assert peak < 25 * path.stat().st_size + (1 << 20)
    n = FLOODS[what].count(b"\n") + 1  # no end
    assert f"{n:,} violations" in output
    found = json.loads(path.with_suffix(".json").read_bytes())["trace"]
    assert found["n_violations"] == n
    assert len(found["findings"]) == (n if n < 100 else 101)
