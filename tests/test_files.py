"""What is written, and what is not: no command replaces a file that it reads, or one that tracediff has not written."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, without_privileges

from tracediff.errors import TraceError
from tracediff.files import replacing, write_text
from tracediff.trace.reader import Trace
from tracediff.trace.staging import staged
from tracediff.trace.writer import TraceWriter

CLEAN = Path(__file__).parent.parent / "traces/clean"
Refused = Callable[..., str]
Cli = Callable[..., tuple[int, str, str]]


def write(path: Path, value: float, n: int = 1) -> Path:
    """A trace of `n` ops that all hold `value`, and whose header says so."""
    with TraceWriter(path, f"of {value}") as writer:
        writer.step(0, [1], [0])
        for i in range(n):
            writer.op(0, f"op {i}", np.full(4, value, np.float32), "f32")
    return path


def value(path: Path) -> float:
    """What all ops of such a trace hold; its header says the same, or the text has another trace's data."""
    trace = Trace(path)
    held = {float(x) for record in trace.ops.values() for x in trace.values(record)}
    assert [trace.header.engine] == [f"of {x}" for x in held]
    return held.pop()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a whole trace, arrays to import, and other files under tempting names."""
    monkeypatch.chdir(tmp_path)
    for name, source in (("model.gguf", "model.gguf"), ("a.trace", "candidate.trace"), ("candidate.bin",) * 2):
        shutil.copy(CLEAN / source, name)
    np.savez("mine.npz", output=np.ones((1, 3), np.float32), tokens=np.array([1]))
    Path("map.txt").write_text("output=output\n")
    Path("notes.json").write_text('{"mine": 1}')
    shutil.copy("model.gguf", "weights.bin")
    for name in ("linked.trace", "short.trace"):  # older traces whose data has become another file
        write(Path(name), 1.0).with_suffix(".bin").unlink()
    os.link("model.gguf", "linked.bin")
    shutil.copy("model.gguf", "short.bin")
    write(Path("x.trace"), 1.0)
    return tmp_path


@pytest.fixture
def harmless(here: Path, refused: Refused) -> Refused:
    """The one message of a command that changes no file and leaves none."""

    def run(*arguments: object) -> str:
        before = contents(here)
        message = refused(*arguments)
        assert contents(here) == before
        return message

    return run


# ---- What is not replaced


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-o", "mine.npz"), "mine.npz: a trace is two files, NAME.trace and NAME.bin."),
        (("-o", "model.gguf", "--model", "model.gguf"), "model.gguf: a trace is two files"),
        (("-o", "weights.trace"), "weights.bin exists and is no trace's. Move it away"),
        (("-o", "a.trace", "--tokens", "1,2,3"), "step 0 has 3 tokens, and nothing in it has so many rows"),
        (("-o", "new.trace", "--tokens", "1,2,3"), "step 0 has 3 tokens, and nothing in it has so many rows"),
    ],
)
def test_import_that_refuses(arguments: tuple[str, ...], expected: str, harmless: Refused) -> None:
    """None of these files was made by the import that ends here, so none of them is its to remove."""
    assert expected in harmless("import", "npz", "mine.npz", *arguments)


def test_import_over_its_input(here: Path, harmless: Refused) -> None:
    Path("x.bin").unlink()
    os.link("map.txt", "x.bin")
    message = harmless("import", "npz", "mine.npz", "--map", "map.txt", "-o", "x.trace")
    assert message == "x.bin is read by this run, and would be replaced. Give another name."


@pytest.mark.parametrize("engine", ["torch", "llama.cpp"])
@pytest.mark.parametrize(
    ("model", "out", "expected"),
    [
        ("linked.bin", "linked.trace", "linked.bin is read by this run, and would be replaced. Give another name."),
        ("model.gguf", "linked.trace", "linked.bin is read by this run, and would be replaced. Give another name."),
        ("model.gguf", "other.trace", "other.bin exists and is no trace's. Move it away"),
        ("model.gguf", "short.trace", "short.bin exists and is no trace's. Move it away"),
        ("model.gguf", "text.trace", "text.trace exists and is no trace. Move it away"),
        ("model.gguf", "link.trace", "link.trace exists and is a link or no file. Move it away"),
    ],
)
def test_trace_over_what_is_no_trace(
    engine: str, model: str, out: str, expected: str, here: Path, harmless: Refused
) -> None:
    """An older trace may name other data than NAME.bin, or lie beside a NAME.bin that has become another's."""
    shutil.copy("a.trace", "other.trace")  # its data is candidate.bin
    shutil.copy("model.gguf", "other.bin")
    Path("text.trace").write_text("a diary\n")
    Path("link.trace").symlink_to("a.trace")
    assert expected in harmless("trace", model, "--engine", engine, "--tokens", "1", "-o", out)


@pytest.mark.parametrize("how", [os.link, os.symlink])
def test_export_over_what_it_reads(how: Callable[..., None], here: Path, harmless: Refused) -> None:
    shutil.copy("candidate.bin", "data.npz")
    Path("b.trace").write_bytes(Path("a.trace").read_bytes().replace(b"candidate.bin", b"data.npz"))
    how("a.trace", "a.safetensors")
    for arguments in (("b.trace", "-o", "data.npz"), ("a.trace", "-o", "a.safetensors")):
        assert harmless("export", *arguments) == (
            f"{arguments[-1]} is read by this run, and would be replaced. Give another name."
        )


def test_export_over_other_files(here: Path, harmless: Refused, cli: Cli) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones(3, np.float32)}, "checkpoint.safetensors")
    for out in ("checkpoint.safetensors", "mine.npz"):
        assert f"{out} exists, and is not what tracediff writes there." in harmless("export", "a.trace", "-o", out)
    for out in ("b.npz", "b.safetensors"):
        for _ in range(2):  # but its own it does replace
            assert cli("export", "a.trace", "-o", out)[0] == 0


COMMANDS = {
    "compare": ("compare", "a.trace", "a.trace", "--model", "model.gguf"),
    "three": ("compare", "a.trace", "a.trace", "a.trace"),
    "check": ("check", "a.trace", "--model", "model.gguf"),
    "validate": ("validate", "a.trace", "--model", "model.gguf"),
    "weights": ("weights", "model.gguf", "--trace", "a.trace"),
    "run": ("run", "model.gguf", "--tokens", "1"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_json_over_an_input(command: str, here: Path, harmless: Refused) -> None:
    """By its own name, a link or a hard link, and the data that a trace names as well."""
    inputs = ["model.gguf", "weights.json"] if command != "three" else []
    os.link("model.gguf", "weights.json")
    if command != "run":
        Path("link.json").symlink_to("a.trace")
        inputs += ["a.trace", "candidate.bin", "link.json"]
    for path in inputs:
        message = harmless(*COMMANDS[command], "--json", path)
        assert message == f"{path} is read by this run, and would be replaced. Give another name."


def test_json_over_other_files(here: Path, harmless: Refused, cli: Cli) -> None:
    arguments = ("compare", "a.trace", "a.trace", "--json")
    for name in ("notes.json", "model.gguf", "linked.bin"):
        assert f"{name} exists, and is not what tracediff writes there." in harmless(*arguments, name)
    assert "is a folder. Name a file in it." in harmless(*arguments, ".")
    assert "there is no folder" in harmless(*arguments, "no/a.json")
    Path("empty.json").touch()
    for command in COMMANDS.values():  # whatever tracediff wrote, every command may replace
        assert cli(*command, "--json", "empty.json")[0] in (0, 1)
        assert json.loads(Path("empty.json").read_text())["schema"].startswith("tracediff/")


def test_demo_keeps_other_models(here: Path, harmless: Refused) -> None:
    shutil.copy("model.gguf", "demo.gguf")
    Path("demo.gguf").write_bytes(Path("model.gguf").read_bytes().replace(b"random qwen2", b"treasured one"))
    assert "demo.gguf exists, and is not what tracediff writes there." in harmless("demo", "--save", ".")


def test_run_looks_at_both_places_first(here: Path, harmless: Refused) -> None:
    (here / "candidate.bin").write_bytes(b"mine")
    message = harmless("run", "model.gguf", "--tokens", "1", "--save", ".")
    assert message == "candidate.bin exists and is no trace's. Move it away, or name the trace otherwise."


# ---- One file


def ours(head: bytes) -> bool:
    return head.startswith(b"ours")


def test_a_file_is_replaced_at_once_and_whole(tmp_path: Path) -> None:
    out = tmp_path / "a.txt"
    write_text(out, "ours 1", ours)
    out.chmod(0o640)
    with replacing(out, ours) as part:
        part.write_text("ours 2")
        assert out.read_text() == "ours 1"
    assert out.read_text() == "ours 2"
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_file_as_it_was(error: type[BaseException], tmp_path: Path) -> None:
    out = tmp_path / "a.txt"
    write_text(out, "ours 1", ours)

    def fail() -> None:
        with replacing(out, ours) as part:
            part.write_text("ours 2")
            raise error

    with pytest.raises(error):
        fail()
    assert contents(tmp_path) == {"a.txt": b"ours 1"}


def test_two_writers_of_a_file_both_write_all_of_it(tmp_path: Path) -> None:
    out = tmp_path / "a.txt"
    with replacing(out, ours) as one, replacing(out, ours) as other:
        other.write_text("ours, the other's")
        one.write_text("ours")
    assert contents(tmp_path) == {"a.txt": b"ours"}  # the outer one ended last


def test_links_pipes_and_long_names(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to("there/a.txt")
    write_text(link, "ours", ours)
    assert link.is_symlink()
    assert (tmp_path / "there/a.txt").read_text() == "ours"
    write_text(tmp_path / ("x" * 255), "ours", ours)
    write_text(Path("/dev/null"), "x", ours)
    reading, writing = os.pipe()
    write_text(Path(f"/dev/fd/{writing}"), "through a pipe", ours)
    assert os.read(reading, 99) == b"through a pipe"
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_protected_file_is_left_alone(tmp_path: Path) -> None:
    out = write(tmp_path / "a.trace", 1.0)
    (tmp_path / "a.txt").write_text("ours")
    code = (
        "from pathlib import Path; from tracediff.files import write_text; from tracediff.trace.staging import check\n"
        "for write in (lambda: write_text(Path('a.txt'), '', lambda head: True), lambda: check(Path('a.trace'))):\n"
        "    try: write()\n"
        "    except Exception as error: print(error)"
    )
    for path in (out, tmp_path / "a.txt"):
        path.chmod(0o444)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, preexec_fn=without_privileges
    )
    assert done.stdout == (
        "a.txt is write-protected. Give another name, or move it away.\n"
        "a.trace is write-protected. Move it away, or name the trace otherwise.\n"
    )


# ---- A trace, which is two files


def interrupted(out: Path, value: float, **options: bool) -> BaseException:
    """What comes out of a run that writes one op of two and gets Ctrl-C."""

    def run() -> None:
        with staged(out, **options) as part, TraceWriter(part, f"of {value}") as writer:
            writer.step(0, [1], [0])
            writer.op(0, "op 0", np.full(4, value, np.float32), "f32")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    return caught.value


def test_a_trace_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "a.trace"
    for old, new in ((None, 1.0), (1.0, 2.0)):
        with staged(out) as part:
            write(part, new)
            assert value(part) == new  # readable while it is written, and where
            assert (value(out) if out.exists() else None) == old
        assert value(out) == new
        assert sorted(contents(tmp_path)) == ["a.bin", "a.trace"]
    assert not (tmp_path / "a.partial").exists()


def test_a_cut_trace_takes_no_place_but_a_free_one(tmp_path: Path) -> None:
    out, part = tmp_path / "a.trace", tmp_path / "a.partial/a.trace"
    error = interrupted(out, 1.0)
    assert error.__notes__ == [f"What was traced so far can be read: {out}."]
    assert (value(out), bool(Trace(out).cut)) == (1.0, True)
    with staged(out) as path:  # over a cut one as over any
        write(path, 2.0)
    for new in (3.0, 4.0):
        error = interrupted(out, new)
        assert error.__notes__ == [f"What was traced so far can be read: {part}. {out} is as it was."]
        assert (value(out), value(part), bool(Trace(part).cut)) == (2.0, new, True)
    interrupted(tmp_path / "b.trace", 1.0, keep_cut=False)
    with staged(out) as path:
        write(path, 5.0)
    assert sorted(contents(tmp_path)) == ["a.bin", "a.trace"]
    assert value(out) == 5.0


HELD = """
import sys
from test_files import *
with staged(Path(sys.argv[1])) as part:
    print(write(part, 2.0), flush=True)
    sys.stdin.read()
"""


def test_of_two_writers_the_second_is_refused(tmp_path: Path) -> None:
    """The first is a process of its own; when it dies, nothing keeps others out."""
    out = tmp_path / "a.trace"
    write(out, 1.0)
    command = [sys.executable, "-c", HELD, str(out)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    for killed in (True, False):
        first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert first.stdin
        assert first.stdout
        first.stdout.readline()
        before = contents(tmp_path)
        with pytest.raises(TraceError, match=r"a\.partial: another run is writing this trace\. Wait until it ends, or"):
            interrupted(out, 3.0)
        assert contents(tmp_path) == before
        if killed:
            first.kill()
        first.communicate()
        assert value(out) == (1.0 if killed else 2.0)
    with staged(out) as part:
        write(part, 4.0)
    assert value(out) == 4.0


def test_the_folder_may_be_somebodys(tmp_path: Path) -> None:
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial/thesis.txt").write_text("mine")
    (tmp_path / "b.partial").write_text("mine")
    (tmp_path / "c.partial").symlink_to("nowhere")
    taken = "where the trace is written first, is a link or holds other files"
    for name, why in (("a", taken), ("b", "Not a directory"), ("c", taken)):
        before = contents(tmp_path)
        with pytest.raises(TraceError, match=why):
            interrupted(tmp_path / f"{name}.trace", 1.0)
        assert contents(tmp_path) == before


def test_a_file_that_came_meanwhile_stays(tmp_path: Path) -> None:
    """The hours of work stay as well."""
    out = tmp_path / "a.trace"
    part = tmp_path / "a.partial/a.trace"

    def run() -> None:
        with staged(out) as path:
            write(path, 1.0)
            (tmp_path / "a.bin").write_text("mine")

    with pytest.raises(TraceError, match=r"a\.bin exists and is no trace's") as caught:
        run()
    assert (tmp_path / "a.bin").read_text() == "mine"
    assert caught.value.__notes__ == [f"What was traced so far can be read: {part}. {out} is as it was."]
    assert value(part) == 1.0


def test_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    out = write(tmp_path / "a.trace", 1.0)
    trace = Trace(out)
    with staged(out) as part:
        write(part, 2.0, n=0)
    assert trace.values(trace.ops[0, "op 0"]).tolist() == [1.0] * 4


CRASH = """
import os, signal, sys
from test_files import *
left = int(sys.argv[2])
def audit(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir"):
        left -= 1
        if left < 0 and sys.argv[3] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if left == -1:
            raise KeyboardInterrupt
with staged(Path(sys.argv[1])) as part:
    write(part, 2.0, n=2)
    sys.addaudithook(audit)
"""


@pytest.mark.parametrize("old", [False, True])
def test_a_crash_between_leaves_no_mixture(old: bool, tmp_path: Path) -> None:
    """Killed before each change of a name: a trace is the old one, the new one, or said to lack its data."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    found = []
    for n in range(9):
        folder = tmp_path / str(n)
        folder.mkdir()
        out = folder / "a.trace"
        if old:
            write(out, 1.0)
        done = subprocess.run([sys.executable, "-c", CRASH, str(out), str(n), "killed"], env=environment)
        found.append(state(out))
        with staged(out) as part:  # the next run goes on from there
            write(part, 3.0)
        assert (value(out), sorted(contents(folder))) == (3.0, ["a.bin", "a.trace"])
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    old_, lacking, new = "of 1.0" if old else "nothing", "data missing", "of 2.0"
    assert found == ([old_, lacking, lacking] if old else [old_, lacking]) + [new, new]


def test_ctrl_c_between_finishes_first(tmp_path: Path) -> None:
    """Before each change of a name: two renames are no time to wait for, and half a trace is none."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    for n in range(3):
        out = write(tmp_path / "a.trace", 1.0)
        command = [sys.executable, "-c", CRASH, str(out), str(n), "interrupted"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert "KeyboardInterrupt" in done.stderr
        assert (value(out), sorted(contents(tmp_path))) == (2.0, ["a.bin", "a.trace"])
        assert not (tmp_path / "a.partial").exists()


def state(out: Path) -> str:
    if not out.exists():
        return "nothing"
    try:
        return f"of {value(out)}"
    except TraceError as error:
        return "data missing" if "cannot open the data file 'a.bin': No such file" in str(error) else str(error)
