"""The gate: ten versions of an engine, five harmless and five that worsen one op each; and the lock file itself."""

import json
import shutil
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from conftest import TOKENS, Models, some_of

from tracediff.ci.lock import Accepted, Locked, Sort, read, write
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.errors import TracediffError

Cli = Callable[..., tuple[int, str, str]]
# Threads, kernels and the order of sums differ; and one op is wrong.
HARMLESS = {
    "first": {},
    "two threads": {"threads": 2},
    "llama.cpp": {"threads": 1},
    "llama.cpp in small batches": {"threads": 1, "n_ubatch": 4},
    "llama.cpp of two threads": {"threads": 2},
}
WORSE = {
    "rope_theta@blk.1.attn_k_rope": ("rope_theta", ["blk.1.attn_k_rope"]),
    "act_gelu@blk.0.ffn_act": ("act_gelu", ["blk.0.ffn_act"]),
    "eps@output_norm": ("eps", ["output_norm"]),
    "bias_missing@blk.1.attn_v": ("bias_missing", ["blk.1.attn_v"]),
    "attention_scale@0": ("attention_scale", ["blk.0.attn_probs"]),
}


@pytest.fixture
def project(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, and one case in tracediff.toml."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(models("tiny"), "model.gguf")
    Path("tracediff.toml").write_text('[[case]]\nname = "prefill"\ntrace = "engine.trace"\nmodel = "model.gguf"\n')
    return tmp_path


def trace(fault: str | None = None, **options: object) -> None:
    torch_options = TorchOptions(faults=(fault,) if fault else (), **options)
    trace_torch(Path("model.gguf"), Path("engine.trace"), torch_options, TOKENS[:9], n_decode=1)


def make(name: str, llama_cpp_trace: Callable[..., Path]) -> None:
    import torch

    options = dict(HARMLESS[name])
    threads = options.pop("threads", 1)
    if name.startswith("llama.cpp"):
        made = llama_cpp_trace(Path("model.gguf"), TOKENS[:9], n_decode=1, threads=threads, **options)
        text = made.read_text().replace(made.with_suffix(".bin").name, "engine.bin")
        Path("engine.trace").write_text(text)
        shutil.copy(made.with_suffix(".bin"), "engine.bin")
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    trace(**options)
    torch.set_num_threads(before)


def test_ten_versions_of_an_engine(project: Path, cli: Cli, llama_cpp_trace: Callable[..., Path]) -> None:
    """Of llama.cpp the model is float32, so that nothing but the order of sums is another."""
    assert cli("ci")[0] == 2  # no lock yet, and no trace
    make("first", llama_cpp_trace)
    code, said, _ = cli("ci", "--update")
    assert code == 0, said
    lock = Path("tracediff.lock").read_text()
    for name in [*HARMLESS][1:]:
        make(name, llama_cpp_trace)
        code, said, _ = cli("ci", "--update")
        assert (code, Path("tracediff.lock").read_text()) == (0, lock), (name, said)
    for fault, (mistake, ops) in WORSE.items():
        trace(fault)
        code, text, _ = cli("ci", "--json", "-")
        (case,) = json.loads(text)["cases"].values()
        assert code == 1
        assert [(one["mistake"], one["ops"]) for one in case["findings"]] == [(mistake, ops)], fault


def test_what_is_accepted_passes_until_it_spreads_or_expires(project: Path, cli: Cli) -> None:
    trace()
    assert cli("ci", "--update")[0] == 0
    trace("act_gelu@blk.0.ffn_act")
    assert cli("ci", "--update")[0] == 1  # --update never accepts
    assert cli("ci", "--accept", "GELU until #12 is in", "--until", "2999-01-31")[0] == 0
    (accepted,) = read(Path("tracediff.lock"))["prefill"].accepted.items()
    assert accepted == ("act_gelu", Accepted(("blk.0.ffn_act",), "GELU until #12 is in", date(2999, 1, 31)))
    code, said, _ = cli("ci")
    assert code == 0
    assert "1 known cause is accepted" in said
    assert "act_gelu, until 2999-01-31: GELU until #12 is in (in blk.0.ffn_act)" in " ".join(said.split())
    trace("act_gelu")
    code, said, _ = cli("ci")
    assert (code, said.startswith("DIVERGED: act_gelu has spread to blk.1.ffn_act: ffn_act in both layers")) == (
        1,
        True,
    )
    trace("act_gelu@blk.0.ffn_act")
    lock = Path("tracediff.lock")
    lock.write_text(lock.read_text().replace("2999-01-31", "2001-01-31"))
    code, said, _ = cli("ci")
    assert (code, said.startswith("DIVERGED: act_gelu was accepted until 2001-01-31 (GELU until #12 is in): ")) == (
        1,
        True,
    )
    trace()
    assert cli("ci", "--update")[0] == 0
    assert read(lock)["prefill"].accepted == {}


def test_an_op_that_is_recorded_no_more_and_another_arithmetic_are_worse(project: Path, cli: Cli) -> None:
    trace()
    cli("ci", "--update")
    some_of(Path("engine.trace"), Path("some.trace"), lambda op: op != "blk.1.attn_v")
    code, said, _ = cli("ci", "some.trace", "--model", "model.gguf")
    assert code == 2  # a case of its own: it has no lock
    shutil.move("some.trace", "engine.trace")
    code, said, _ = cli("ci")
    said = " ".join(said.split())
    assert code == 1
    assert "attn_v: 2 of 4 are not judged any more: recorded no more, or blind." in said
    trace(arithmetic="activations in bfloat16")
    code, said, _ = cli("ci")
    assert code == 1
    assert "the arithmetic was exact, and is now " in " ".join(said.split())
    assert "\nNext\n  tracediff ci --accept REASON\n  if that is meant; " in said
    assert cli("ci", "--accept", "float16 weights")[0] == 0
    assert cli("ci")[0] == 0


def test_tolerances_without_a_model(project: Path, cli: Cli) -> None:
    trace()
    for end in ("trace", "bin"):
        shutil.copy(f"engine.{end}", f"right.{end}")
    text = Path("right.trace").read_text().replace("engine.bin", "right.bin")
    Path("right.trace").write_text(text)
    Path("tracediff.toml").write_text(
        '[[case]]\nname = "drift"\ntrace = "engine.trace"\nreference = "right.trace"\n'
        'tolerance = { "blk.*.ffn_residual" = 1e-12 }\n'
    )
    assert cli("ci", "--update")[0] == 0
    trace("eps@0")
    code, said, _ = cli("ci")
    assert code == 1
    assert said.startswith("DIVERGED: blk.0.attn_norm is the first op over its tolerance, in step 0")
    trace()
    with Path("tracediff.toml").open("a") as file:  # a lock of drift alone knows no arithmetic
        file.write('model = "model.gguf"\n')
    assert cli("ci")[0] == 0
    assert "arithmetic = []" in Path("tracediff.lock").read_text()
    assert cli("ci", "--update")[0] == 0
    assert "arithmetic = []" not in Path("tracediff.lock").read_text()
    Path("tracediff.toml").write_text(Path("tracediff.toml").read_text().replace('model = "model.gguf"\n', ""))
    trace("eps@0")
    assert cli("ci", "--tolerance", "1")[0] == 1  # the pattern of the configuration stands first, 1 for the others


def test_a_command_makes_the_trace(project: Path, cli: Cli) -> None:
    Path("tracediff.toml").write_text(
        '[[case]]\nname = "a"\ntrace = "engine.trace"\nmodel = "model.gguf"\ncommand = "false --trace"\n'
    )
    code, _, error = cli("ci", "--update")
    assert (code, "case a: its command ended with 1: it said nothing. Run it by hand: false --trace" in error) == (
        2,
        True,
    )
    Path("tracediff.toml").write_text(Path("tracediff.toml").read_text().replace("false --trace", "no-such-engine"))
    assert "case a: cannot run 'no-such-engine': No such file" in cli("ci", "--update")[2]


def test_branches_that_tighten_different_ops_merge(tmp_path: Path) -> None:
    """With git itself."""

    def git(*arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        return subprocess.run(
            ["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    def commit(sorts: dict[str, Sort], message: str) -> None:
        write(tmp_path / "tracediff.lock", {"a": Locked(sorts)})
        git("add", "-A")
        git("commit", "-qm", message)

    sorts = {name: Sort(4, ("exact", "operands f16"), 1e-8) for name in ("attn_k", "attn_q", "attn_v")}
    git("init", "-q")
    commit(sorts, "first")
    git("checkout", "-qb", "other")
    commit(sorts | {"attn_q": Sort(4, ("exact",), 1e-11)}, "attn_q")
    git("checkout", "-q", "main")
    commit(sorts | {"attn_k": Sort(6, ("exact",), 1e-12)}, "attn_k")
    git("merge", "-q", "other", "-m", "both")
    assert read(tmp_path / "tracediff.lock")["a"].sorts == {
        "attn_k": Sort(6, ("exact",), 1e-12), "attn_q": Sort(4, ("exact",), 1e-11), "attn_v": sorts["attn_v"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["x", "[a.op.b]\nops = 1", "[a.accepted.b]\nplaces = []\nreason = ''\nuntil = 1", "a = 1", "[a]\nop = 1", b"\xff"],
)
def test_what_is_no_lock_is_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "tracediff.lock"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(TracediffError, match="this is no lock file of tracediff"):
        read(path)


def test_any_name_and_reason_is_kept(tmp_path: Path) -> None:
    odd = 'a "b"\n\\ \x7f é\x01'
    cases = {odd: Locked({odd: Sort(1, (odd,), 1e-30)}, {odd: Accepted((odd,), odd, date(2030, 1, 2))})}
    write(tmp_path / "tracediff.lock", cases)
    assert read(tmp_path / "tracediff.lock") == cases


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[case]]\nname = "a"\ntrace = "b"\n', "case 'a' has neither model nor reference"),
        ('[[case]]\nname = "a"\ntrace = "b"\nmodle = "c"\n', "a case has the unknown key 'modle'; known are allow,"),
        ('[[case]]\ntrace = "b"\nmodel = "c"\n', "'name'. A case has a name, a trace and a model"),
        ('[[case]]\nname = "a"\ntrace = "b"\nmodel = "c"\n' * 2, "two cases have the name 'a'"),
        ("[[case]", "this is no TOML"),
        ("lock = 3\n", "unsupported operand type"),
        ('[sourcess]\n"*" = "a.c"\n', "'sourcess' is unknown; known are case, lock, sources."),
        ('[[case]]\nname = "a"\ntrace = "b"\nmodel = "c"\nresolve = -1\n', "resolve is -1: give an NMSE above 0"),
    ],
)
def test_a_configuration_that_is_wrong_is_refused(
    project: Path, refused: Callable[..., str], text: str, said: str
) -> None:
    Path("tracediff.toml").write_text(text)
    assert said in refused("ci", "--update")
