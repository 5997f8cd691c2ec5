"""A command opens its model once, whatever it asks of it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Models

# An audit hook stays for the life of a process, so each command has one of its own.
COUNT = """
import sys
from tracediff.cli import main
model, opened = sys.argv[1], []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" and str(args[0]) == model else None)
sys.argv[1:] = [model if argument == "MODEL" else argument for argument in sys.argv[2:]]
try:
    main()
finally:
    print(len(opened), file=sys.stderr)
"""
COMMANDS = (
    ("compare", "A", "B", "--model", "MODEL", "--require", "attn_q"),
    ("compare", "A", "B", "C", "--model", "MODEL"),
    ("run", "MODEL", "--tokens", "1,2,3", "--arithmetic", "llama.cpp", "--fault", "eps@0"),
    ("trace", "MODEL", "--tokens", "1,2,3", "--engine", "llama.cpp", "-o", "T.trace"),
    ("weights", "MODEL", "--trace", "A"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, models: Models, llama_cpp_trace: Callable[..., Path]) -> Path:
    """A folder with three traces of one model."""
    folder = tmp_path_factory.mktemp("opened")
    trace = llama_cpp_trace(models("tiny"), tokens=(1, 2, 3), n_decode=1)
    for name in "ABC":
        (folder / name).write_text(trace.read_text())
    (folder / trace.with_suffix(".bin").name).write_bytes(trace.with_suffix(".bin").read_bytes())
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_opens_its_model_once(command: tuple[str, ...], place: Path, models: Models) -> None:
    call = [sys.executable, "-c", COUNT, str(models("tiny")), *command]
    ended = subprocess.run(call, cwd=place, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    assert ended.stderr.splitlines()[-1] == "1"
