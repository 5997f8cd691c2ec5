"""Shell completion: it says what may follow, at once, without what judging needs."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from tracediff.__main__ import main
sys.argv = ["tracediff"]
try:
    main()
finally:
    print([name for name in ("torch", "llama_cpp", "gguf", "transformers") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", {"check", "compare", "ci", "bundle", "self", "import"}),
        ("che", {"check"}),
        ("check --wor", {"--workers"}),
        ("trace --engine ll", {"llama.cpp"}),
    ],
)
def test_it_completes_without_torch(typed: str, expected: set[str]) -> None:
    words = f"tracediff {typed}"
    asked = {"_TRACEDIFF_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env={**os.environ, **asked}
    )
    assert {*done.stdout.split()} >= expected
    assert bool(typed) <= (len(done.stdout.split()) < 4)
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_the_shell_is_told_how() -> None:
    told = {"_TRACEDIFF_COMPLETE": "source_bash"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env={**os.environ, **told}
    )
    assert "complete -o default -F _tracediff_completion tracediff" in done.stdout
