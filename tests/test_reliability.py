"""What ends a run against its will: exit code, words, and that nothing is lost. Holds each row of docs/reliability.md.

Everything here runs in processes of its own, as users run it.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Models, contents, the_message, without_privileges

from tracediff.trace.reader import Trace

CLEAN = Path(__file__).parent.parent / "traces/clean"
FAULTY = Path(__file__).parent.parent / "traces/rope-pairing"
Start = Callable[..., subprocess.Popen[str]]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tracediff", *map(str, arguments)]


def run(*arguments: object, limit: Callable[[], None] | None = None, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, env=os.environ | environment, preexec_fn=limit
    )
    return done.returncode, done.stdout, done.stderr


def limited(kind: int, size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (size, resource.getrlimit(kind)[1]))


def children(running: subprocess.Popen[str]) -> list[Path]:
    listed = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    return [Path("/proc", pid) for pid in listed.read_text().split()] if listed.exists() else []


def until(running: subprocess.Popen[str], happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not happens():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(processes: list[Path]) -> bool:
    """Whether they end. One that was just being started does so by itself, when it hears nothing: a moment after its
    parent.
    """
    deadline = time.monotonic() + 10
    while not all(map(_ended, processes)):
        if time.monotonic() > deadline:
            return False
    return True


def _ended(process: Path) -> bool:
    """One that only waits to be counted by its parent has."""
    try:
        return "\nState:\tZ" in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def _heeding() -> None:
    """Background jobs of a shell ignore SIGINT, and what nohup starts SIGHUP: so would what they start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A command in a session of its own, with a folder of its own for temporary files, that Ctrl-C reaches."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "tmp").mkdir()

    def run(*arguments: object) -> subprocess.Popen[str]:
        running = subprocess.Popen(
            command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
            preexec_fn=_heeding,
        )
        started.append(running)
        return running

    yield run
    for running in started:
        running.kill()
        running.communicate()


@pytest.fixture
def long_run(start: Start, models: Models, tmp_path: Path) -> Callable[[str], subprocess.Popen[str]]:
    """Thousands of decode steps, handed over when some are written."""

    def run(engine: str) -> subprocess.Popen[str]:
        arguments = ("--engine", engine, "-o", tmp_path / "a.trace", "--tokens", "1,2,3", "--decode", "4000")
        running = start("trace", models("demo"), *arguments)
        part = tmp_path / "a.partial/a.trace"
        until(running, lambda: part.exists() and part.stat().st_size > 20_000)
        return running

    return run


def read_cut(path: Path) -> None:
    """What was recorded before the end can be read, every value of it."""
    trace = Trace(path)
    assert trace.cut
    assert len(trace.ops) > 100
    assert all(trace.values(record).shape == record.shape for record in trace.ops.values())


def test_the_tables_name_tests() -> None:
    """Every row of docs/reliability.md names what holds it, and that is there."""
    tests = Path(__file__).parent
    what_happens, _, _ = (tests.parent / "docs/reliability.md").read_text().partition("## Fuzzing")
    rows = [
        line
        for line in what_happens.splitlines()
        if line.startswith("| ") and " exit | " not in line and line.count(" | ") > 2
    ]
    assert len(rows) > 25
    for row in rows:
        *_, holds = row.split(" | ")
        files = re.findall(r"`(test_\w+\.py)`", holds)
        source = "".join((tests / name).read_text() for name in (*files, "test_reliability.py"))
        names = re.findall(r"`(test_\w+)`", holds)
        assert names, row
        for name in names:
            assert f"def {name}(" in source, name


# ---- Signals


@pytest.mark.parametrize(
    ("engine", "signals", "code", "said"),
    [
        ("torch", [signal.SIGINT, signal.SIGINT], 130, "interrupted."),
        ("llama.cpp", [signal.SIGINT], 130, "interrupted."),
        ("llama.cpp", [signal.SIGTERM, signal.SIGINT], 143, "ended by SIGTERM."),
    ],
)
def test_a_signal_cuts_the_trace(
    engine: str, signals: list[int], code: int, said: str, long_run: Start, tmp_path: Path
) -> None:
    """As a terminal sends it: every process of the session gets it. A second one changes nothing."""
    running = long_run(engine)
    child = children(running)
    assert len(child) == (engine == "llama.cpp")
    for number in signals:
        os.killpg(running.pid, number)
        time.sleep(0.05)
    _, error = running.communicate(timeout=20)
    out = tmp_path / "a.trace"
    assert (running.returncode, error) == (code, f"tracediff: {said}\nWhat was traced so far can be read: {out}.\n")
    assert gone(child)
    assert not (tmp_path / "a.partial").exists()
    read_cut(out)


def test_a_signal_leaves_the_trace_that_was_there(long_run: Start, tmp_path: Path) -> None:
    for name in ("candidate.trace", "candidate.bin"):
        shutil.copy(CLEAN / name, tmp_path / name.replace("candidate", "a"))
    (tmp_path / "a.trace").write_bytes((tmp_path / "a.trace").read_bytes().replace(b"candidate.bin", b"a.bin"))
    before = {name: (tmp_path / name).read_bytes() for name in ("a.trace", "a.bin")}
    running = long_run("llama.cpp")
    running.send_signal(signal.SIGTERM)
    _, error = running.communicate(timeout=20)
    part = tmp_path / "a.partial/a.trace"
    assert error.endswith(f"What was traced so far can be read: {part}. {tmp_path / 'a.trace'} is as it was.\n")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    read_cut(part)


MOMENTS = {
    "llama.cpp starts": (signal.SIGHUP, lambda running, folder: children(running)),
    "llama.cpp writes": (signal.SIGINT, lambda running, folder: [*folder.glob("*/reference.bin")]),
    "torch writes": (signal.SIGTERM, lambda running, folder: [*folder.glob("*/candidate.bin")]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_leaves_no_temporary_file(moment: str, start: Start, models: Models, tmp_path: Path) -> None:
    """Sent to the one process alone, as `kill` and schedulers do."""
    number, happens = MOMENTS[moment]
    running = start("run", models("demo"), "--tokens", "1,2,3", "--decode", "100", "--threads", "1")
    until(running, lambda: happens(running, tmp_path / "tmp"))
    child = children(running)
    running.send_signal(number)
    said = "interrupted." if number == signal.SIGINT else f"ended by {number.name}."
    assert running.communicate(timeout=20) == ("", f"tracediff: {said}\n")
    assert running.returncode == 128 + number
    assert gone(child)
    assert not [*(tmp_path / "tmp").iterdir()]


IMPORTING = """
import os, signal, sys, time
from tracediff.process import Interrupted, prepare
class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":  # torch is half there
            os.kill(os.getpid(), signal.SIGINT)
prepare()
sys.meta_path.insert(0, Sends())
try:
    import torch
    print("imported")
    time.sleep(5)
except Interrupted:
    print("interrupted")
"""


def test_a_signal_waits_for_torch_to_be_imported() -> None:
    """An exception on its way through pybind11 there ends the process by std::terminate, which now and then it did."""
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, preexec_fn=_heeding)
    assert (done.stdout, done.stderr) == ("imported\ninterrupted\n", "")


def test_nohup(models: Models, tmp_path: Path) -> None:
    """What was started to outlive its terminal does."""
    arguments = ("--engine", "llama.cpp", "--tokens", "1", "-o", tmp_path / "a.trace")
    trace = command("trace", models("demo"), *arguments)
    running = subprocess.Popen(["sh", "-c", f"trap '' HUP; exec {' '.join(trace)}"], stderr=subprocess.PIPE, text=True)
    until(running, lambda: (tmp_path / "a.partial").exists())
    running.send_signal(signal.SIGHUP)
    running.communicate()
    assert running.returncode == 0


# ---- Processes that die


def test_the_child_is_killed(long_run: Start, tmp_path: Path) -> None:
    running = long_run("llama.cpp")
    (child,) = children(running)
    os.kill(int(child.name), signal.SIGKILL)
    _, error = running.communicate(timeout=20)
    message = the_message(running.returncode, error)
    assert message.startswith("llama.cpp's process ended by SIGKILL (out of memory?). Its last lines:")
    assert message.endswith(f"What was traced so far can be read: {tmp_path / 'a.trace'}.")
    read_cut(tmp_path / "a.trace")


def test_all_is_killed(long_run: Start, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    """Nobody is left to tidy up: the child ends, what was written lies where it was written, the next run goes on."""
    running = long_run("llama.cpp")
    child = children(running)
    running.kill()
    running.communicate()
    assert gone(child)
    read_cut(tmp_path / "a.partial/a.trace")
    arrays = tmp_path / "b.npz"
    assert cli("export", CLEAN / "candidate.trace", "-o", arrays)[0] == 0
    assert cli("import", "npz", arrays, "-o", tmp_path / "a.trace")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.trace", "b.npz", "tmp"]


# ---- Memory and threads


@pytest.mark.parametrize("megabytes", [40, 90, 300])
def test_low_memory(megabytes: int) -> None:
    """The traces diverge: 1 would be right if it were the verdict, but none was reached."""
    arguments = ("check", FAULTY / "candidate.trace", "--model", FAULTY / "model.gguf")
    code, output, error = run(*arguments, limit=limited(resource.RLIMIT_AS, megabytes << 20), OMP_NUM_THREADS="2")
    assert (code, output) == (2, "")
    assert re.search("^tracediff: (it could not start|out of memory|a library ended the process)", error, re.MULTILINE)
    assert "Traceback" not in error


def test_no_threads(tmp_path: Path, models: Models) -> None:
    """libgomp ends the process with exit code 1, where the temporary folder is still there."""
    (tmp_path / "tmp").mkdir()
    code, output, error = run(
        "run", models("demo"), "--tokens", "1,2,3", "--threads", "1",
        limit=limited(resource.RLIMIT_AS, 32 << 30),
        OMP_NUM_THREADS="2", OMP_STACKSIZE="64G", TMPDIR=str(tmp_path / "tmp"),
    )  # fmt: skip
    assert (code, output) == (2, "")
    first, second = (line for line in error.splitlines() if line)
    assert first.startswith("libgomp: Thread creation failed")
    assert second.startswith("tracediff: a library ended the process, for want of memory or threads as a rule")
    assert not [*(tmp_path / "tmp").iterdir()]


# ---- Standard streams


def in_shell(redirections: str, *arguments: object) -> tuple[int, str, str]:
    line = " ".join(command(*arguments)) + f" {redirections}"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as users have it
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=buffered)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("redirections", "said"),
    [
        ("1>&-", "tracediff: OSError: [Errno 9] standard output is closed."),
        ("1>/dev/full", "tracediff: OSError: [Errno 28] No space left on device."),
        ("0<&- 1>&- 2>&-", ""),
        ("1>/dev/full 2>/dev/full", ""),
    ],
)
def test_standard_output_that_takes_nothing(redirections: str, said: str) -> None:
    """Nobody read the report that they diverge, so there is no verdict: never the 1 of a divergence."""
    code, _, error = in_shell(redirections, "compare", FAULTY / "reference.trace", FAULTY / "candidate.trace")
    assert code == 2
    assert error.startswith(said)
    assert "Traceback" not in error


@pytest.mark.parametrize("folder", [CLEAN, FAULTY])
def test_standard_error_that_takes_nothing(folder: Path) -> None:
    """The report was read: its verdict stands, and what is said beside it is lost."""
    arguments = ("compare", folder / "reference.trace", folder / "candidate.trace")
    code, output, _ = in_shell("", *arguments)
    for redirections in ("2>&-", "2>/dev/full"):
        assert in_shell(redirections, *arguments) == (code, output, "")


@pytest.mark.parametrize("redirections", ["2>&-", "2>/dev/full"])
def test_an_error_that_nobody_can_read(redirections: str) -> None:
    assert in_shell(redirections, "compare", "no.trace", "no.trace") == (2, "", "")


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("compare", "--help")])
def test_help_that_nobody_can_read(arguments: tuple[str, ...]) -> None:
    for redirections in ("1>&-", "1>/dev/full"):
        code, _, error = in_shell(redirections, *arguments)
        assert (code, "Traceback" in error) == (2, False)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command(*arguments), stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 2


def test_a_closed_stream_is_no_place_for_what_libraries_print(tmp_path: Path, models: Models) -> None:
    """The next file that is opened would be standard error, and llama.cpp's log would go into the trace."""
    arguments = ("trace", models("demo"), "--tokens", "1", "--engine", "llama.cpp", "-o", tmp_path / "a.trace")
    assert in_shell("0<&- 1>&- 2>&-", *arguments)[0] == 0
    assert not Trace(tmp_path / "a.trace").cut


# ---- Disks


def test_a_full_disk_leaves_no_import_or_export(tmp_path: Path) -> None:
    arrays = tmp_path / "a.npz"
    assert run("export", CLEAN / "candidate.trace", "-o", arrays)[0] == 0
    before = contents(tmp_path)
    limit = limited(resource.RLIMIT_FSIZE, 10_000)
    for arguments in (
        ("export", CLEAN / "candidate.trace", "-o", tmp_path / "b.npz"),
        ("export", CLEAN / "candidate.trace", "-o", tmp_path / "b.safetensors"),
        ("export", FAULTY / "candidate.trace", "-o", arrays),
        ("import", "npz", arrays, "-o", tmp_path / "b.trace"),
    ):
        code, _, error = run(*arguments, limit=limit)
        assert re.search(r": cannot write (it|the trace): (.*)File too large", the_message(code, error))
        assert contents(tmp_path) == before
        assert not (tmp_path / "b.partial").exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, models: Models) -> None:
    folder = tmp_path / "protected"
    folder.mkdir()
    folder.chmod(0o555)
    trace = CLEAN / "candidate.trace"
    for arguments, said in (
        (
            ("trace", models("demo"), "--engine", "llama.cpp", "--tokens", "1", "-o", folder / "a.trace"),
            "cannot be written to. Give another place.",
        ),
        (("export", trace, "-o", folder / "a.npz"), "cannot be written to. Give another place."),
        (("compare", trace, trace, "--json", folder / "a.json"), "cannot be written to. Give another place."),
    ):
        code, output, error = run(*arguments, limit=without_privileges)
        assert said in the_message(code, error)
        assert output == ""
    assert not [*folder.iterdir()]


# ---- Others at work in the same place


def test_two_runs_of_one_trace(long_run: Start, start: Start, models: Models, tmp_path: Path) -> None:
    first = long_run("llama.cpp")
    second = start("trace", models("demo"), "--engine", "llama.cpp", "--tokens", "1", "-o", tmp_path / "a.trace")
    _, error = second.communicate()
    assert the_message(second.returncode, error) == (
        f"{tmp_path / 'a.partial'}: another run is writing this trace. Wait until it ends, or name yours otherwise."
    )
    first.send_signal(signal.SIGINT)
    first.communicate()
    read_cut(tmp_path / "a.trace")


def test_the_folder_is_removed_underneath(long_run: Start, tmp_path: Path) -> None:
    """The words name what happened; nothing that was there is touched."""
    running = long_run("torch")
    (tmp_path / "other.txt").write_text("mine")
    shutil.rmtree(tmp_path / "a.partial")
    running.send_signal(signal.SIGINT)
    _, error = running.communicate()
    assert (running.returncode, error) == (130, "tracediff: interrupted.\n")
    assert contents(tmp_path) == {"other.txt": b"mine"}


# ---- The same command twice

TWICE = """
import sys
from tracediff.cli import main
for line in sys.argv[1:]:
    sys.argv = ["tracediff", *line.split()]
    try:
        main()
    except SystemExit as ended:
        print(ended.code)
"""


def test_the_same_commands_twice(tmp_path: Path) -> None:
    """Byte by byte: traces, JSON, exports, and all that is printed; though sets are in another order each time."""
    lines = [
        "run model.gguf -p Hello --decode 1 --fault rope_pairing --save . --json run.json",
        "check candidate.trace --model model.gguf --json check.json",
        "compare reference.trace candidate.trace candidate.trace --json three.json",
        "weights model.gguf --trace candidate.trace --json weights.json",
        "validate candidate.trace --model model.gguf --json validate.json",
        "export candidate.trace -o a.npz",
        "export candidate.trace -o a.safetensors",
        "import npz a.npz -o imported.trace --model model.gguf",
        "inspect imported.trace",
    ]
    runs = []
    for seed in "12":
        folder = tmp_path / seed
        shutil.copytree(FAULTY, folder)
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", TWICE, *lines], cwd=folder, env=environment, capture_output=True, text=True
        )
        runs.append((done.stdout, done.stderr, contents(folder)))
    first, second = runs
    assert [line for line in first[0].splitlines() if len(line) == 1] == ["1", "1", "1", "0", "0", "0", "0", "0", "0"]
    assert {"run.json", "imported.bin", "a.npz", "a.safetensors"} < first[2].keys()
    assert first[:2] == second[:2]
    for name, content in first[2].items():
        assert content == second[2][name], name
