"""Input that was made to harm, or changes while it is read: refused or survived, in words, within bounds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Models
from hypothesis import given
from hypothesis import strategies as st

from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.printable import escape_json, printable
from tracediff.result import Finding
from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

Refused = Callable[..., str]
Cli = Callable[..., tuple[int, str, str]]


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
    assert printable((Finding(1, "violation", text, ""), [text, {text: 2.5}, None])) == (
        Finding(1, "violation", printable(text), ""), [printable(text), {printable(text): 2.5}, None],
    )  # fmt: skip
    assert json.loads(escape_json(json.dumps({text: text}, ensure_ascii=False, indent=1))) == {text: text}


@given(st.text(st.characters(codec="ascii", exclude_categories=["C"], exclude_characters='\\"')))
def test_what_is_printable_stays(text: str) -> None:
    unchanged = (Finding(1, "violation", text, "数 é 🙂"),)
    assert printable(unchanged) is unchanged


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x", "2000000000"])
def test_any_width(columns: str, trace: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for command in (("compare", trace, trace), ("inspect", trace)):
        code, output, _ = cli(*command)
        assert code == 0
        assert "token_embd" in output
