"""Input that was made to harm, or changes while it is read: refused or survived, in words, within bounds."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tracediff.trace.reader import Trace
from tracediff.trace.writer import TraceWriter

Refused = Callable[..., str]


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
