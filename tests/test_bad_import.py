"""What `import` and `export` refuse: exit code 2, one message that says what, where and what next; no trace is left."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy

from tracediff.trace.format import Statistics
from tracediff.trace.writer import TraceWriter

GOLDEN = Path(__file__).parent.parent / "traces" / "clean" / "candidate.trace"
SAMPLES = Path(__file__).parent / "samples"
RNG = np.random.default_rng(0)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def no_traceback(refused: Callable[..., str], form: str, path: Path, *options: object) -> str:
    out = path.parent / "refused.trace"
    message = refused("import", form, path, "-o", out, *options)
    assert not out.exists()
    assert not out.with_suffix(".bin").exists()
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("form", ["npy", "npz", "safetensors", "llama-text", "table", "sglang"])
def test_missing_empty_and_foreign_files(form: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    missing = no_traceback(refused, form, tmp_path / "missing")
    assert (
        missing
        == f"tracediff: {tmp_path / 'missing'}: there is no such file or folder. Check the path.".removeprefix(
            "tracediff: "
        )
    )
    (tmp_path / "folder").mkdir()
    assert str(tmp_path / "folder") in no_traceback(refused, form, tmp_path / "folder")
    for name, content in {"empty": b"", "noise": bytes(range(256)) * 9, "zip": b"PK\x03\x04" + bytes(60)}.items():
        path = tmp_path / name
        suffix = {"npy": "a.npy", "sglang": "step=0___name=lm_head.pt"}.get(form)
        if suffix:
            path.mkdir()
            (path / suffix).write_bytes(content)
        else:
            path.write_bytes(content)
        assert str(path) in no_traceback(refused, form, path, "--tokens", "1", "--skip-unknown")


@pytest.mark.parametrize("form", ["npy", "npz", "safetensors", "sglang"])
@pytest.mark.parametrize("keep", [0.05, 0.5, 0.99])
def test_truncated_files(form: str, keep: float, tmp_path: Path, refused: Callable[..., str]) -> None:
    x = RNG.standard_normal((64, 64)).astype(np.float32)
    folder = tmp_path / "in"
    folder.mkdir()
    path = (
        folder
        / {"npy": "lm_head.npy", "npz": "a.npz", "safetensors": "a.safetensors", "sglang": "name=lm_head.pt"}[form]
    )
    save = {
        "npy": lambda: np.save(path, x),
        "npz": lambda: np.savez(path, lm_head=x),
        "safetensors": lambda: save_numpy({"lm_head": x}, path),
        "sglang": lambda: torch.save({"value": torch.tensor(x)}, path),
    }
    save[form]()
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    given = folder if form in ("npy", "sglang") else path
    message = no_traceback(refused, form, given, "--tokens", ",".join(["1"] * 64))
    assert message.startswith(f"{path}: cannot read it as ")


def test_dumps_of_two_runs_of_sglang(tmp_path: Path, refused: Callable[..., str]) -> None:
    for pid in (1, 2):
        folder = tmp_path / f"TP0_PP0_Rank0_pid{pid}"
        folder.mkdir()
        torch.save({"model.norm": torch.full((2, 4), float(pid))}, folder / "Pass00000.pt")
    said = refused("import", "sglang", tmp_path, "-o", tmp_path / "a.trace")
    assert "'model.norm' of pass 0 was dumped 2 times by rank 0: by 2 runs. Give the folder of one." in said


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickles_are_never_loaded(tmp_path: Path, refused: Callable[..., str]) -> None:
    here = tmp_path / "it was loaded"
    evil = np.array([Evil(here)], object)
    for form in ("npy", "npz", "sglang"):
        (tmp_path / form).mkdir()
    np.save(tmp_path / "npy" / "lm_head.npy", evil)
    np.savez(tmp_path / "npz" / "a.npz", lm_head=evil)
    (tmp_path / "sglang" / "name=lm_head.pt").write_bytes(pickle.dumps(Evil(here)))
    for form, path in (("npy", "npy"), ("npz", "npz/a.npz"), ("sglang", "sglang")):
        assert "cannot read it as" in no_traceback(refused, form, tmp_path / path, "--tokens", "1")
    torch.save({"value": Evil(here)}, tmp_path / "sglang" / "name=lm_head.pt")
    assert "cannot read it as" in no_traceback(refused, "sglang", tmp_path / "sglang", "--tokens", "1")
    assert not here.exists()
    np.load(tmp_path / "npz" / "a.npz", allow_pickle=True)["lm_head"]
    assert here.exists()


X = np.ones((2, 3), np.float32)
IDS = ("--tokens", "1,2")
TWO = {"step0/lm_head": X, "step1/lm_head": X}
REFUSED = {
    "integers": ({"lm_head": X.astype("i1")}, IDS, "lm_head holds int8: a trace holds float64, float32, float16"),
    "complex": ({"lm_head": X.astype("c8")}, IDS, "lm_head holds complex64"),
    "unknown": ({"lm_head": X, "h.0": X, "h.1": X}, IDS, "2 unknown names: h.N. Say what they are with --map FILE"),
    "nothing": ({"a": X}, ("--skip-unknown",), "no op's output is in it; left out 1 of unknown name: a."),
    "no tokens": ({"lm_head": X}, (), "which tokens was it fed? Give --tokens 1,2,3"),
    "too few": ({"lm_head": X}, ("--tokens", "1"), "step 0 has 1 tokens, and nothing in it has so many rows: output"),
    "no such ids": ({"lm_head": X}, ("--tokens", "1,99999999999999999999"), "99999999999999999999 is no token id"),
    "nine axes": ({"lm_head": X.reshape(1, 1, 1, 1, 1, 1, 1, 2, 3)}, IDS, "no tensor has the shape [1, 1, 1, 1, 1"),
    "no ids": ({"lm_head": X}, ("--tokens", "a"), "--tokens 'a': ids are whole numbers"),
    "a step without": ({**TWO, "step0/tokens": [1, 2], "step1/tokens": X[:0].astype(int)}, (), "has the shape [0, 3]"),
    "an empty step": (
        {**TWO, "step0/tokens": [1, 2], "step1/tokens": X[0, :0].astype(int)},
        (),
        "tokens holds nothing",
    ),
    "odd steps": (
        {"token_embd": X, "step1/token_embd": X},
        ("--tokens", "1,2,3"),
        "3 token ids for steps of 2, 2 rows",
    ),
    "unknown length": (TWO, ("--tokens", "1,2,3,4"), "how many tokens has each of its steps?"),
    "two sequences": (
        {"lm_head": X, "input_ids": [[1, 2], [3, 4]]},
        (),
        "input_ids has the shape [2, 2]: one sequence",
    ),
    "float ids": ({"lm_head": X, "tokens": np.ones(2)}, (), "tokens holds f64, not whole numbers"),
    "positions": ({"lm_head": X, "tokens": [1, 2], "positions": [0]}, (), "step 0 has 2 tokens and 1 positions"),
    "rows that are none": ({"lm_head": X, "lm_head.rows": [1, 2]}, IDS, "lm_head.rows: [1, 2] are not indices of"),
    "rows of nothing": ({"lm_head": X, "output.rows": [0, 1]}, IDS, "1 unknown names: output.rows"),
    "one op twice": ({"lm_head": X, "output": 2 * X}, IDS, "lm_head and output are both output in step 0, and differ"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arrays(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    held, options, message = REFUSED[case]
    np.savez(tmp_path / "a.npz", **held)
    assert message in no_traceback(refused, "npz", tmp_path / "a.npz", *options)


MAPS = {
    "nothing of that name": ("h.0=output", "map: nothing in "),
    "no line of a map": ("h.0", "map:1: 'h.0' is not a new FOREIGN=CANONICAL"),
    "the same twice": ("a=b\na=c", "map:2: 'a=c' is not a new"),
    "no op": ("lm_head=", "map: the map has '' for 'lm_head'"),
    "a layer from nowhere": ("lm_head=blk.{N}.attn_q", "map: the map has 'blk.{N}.attn_q' for 'lm_head'"),
    "broken JSON": ('{"a": ', "map: the map is no JSON: Expecting value: line 1 column 7"),
    "deep JSON": ('{"a":' * 100_000, "map: the map is no JSON"),
    "numbers": ('{"a": 1}', "map: the map has 1 for 'a'"),
    "empty": ("# nothing\n", "map: the map is empty"),
    "binary": ("\udcff", "map: the map is not UTF-8 text"),
}


@pytest.mark.parametrize("case", MAPS)
def test_refused_maps(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    text, message = MAPS[case]
    (tmp_path / "map").write_bytes(text.encode(errors="surrogateescape"))
    np.savez(tmp_path / "a.npz", lm_head=X)
    assert message in no_traceback(refused, "npz", tmp_path / "a.npz", "--tokens", "1,2", "--map", tmp_path / "map")
    assert "cannot open the map" in no_traceback(refused, "npz", tmp_path / "a.npz", "--map", tmp_path / "nix")


BAD_TABLES = {
    "no shape": ("layer,mean\n0,1\n", "layer 0 (blk.0.ffn_residual): its shape is not known. Add a column `shape`"),
    "no statistic": ("layer,min\n0,\n", "row 1 holds none of min, max, mean, rms and std"),
    "no number": ("layer,min\n0,x\n", "row 1: min is 'x', which is no number"),
    "no name": ("min,max\n0,1\n", "row 1 names no op and no layer"),
    "unknown name": ("layer,op,min\n0,conv,1\n", "1 unknown names: N conv"),
    "odd shape": ("layer,min,shape\n0,1,big\n", "row 1: the shape 'big' is not understood"),
    "huge shape": ("layer,min,shape\n0,1,1x9999999999999999999\n", "no tensor has the shape [1, 9999999999999999999]"),
    "empty shape": ("layer,min,shape\n0,1,1x0\n", "layer 0: a tensor of shape [1, 0] has no statistics"),
    "huge count": ("layer,min,nan\n0,1,1e30\n", "row 1: nan is 1e+30, which is no count"),
    "ragged": ("layer,min\n0,1,2\n", "row 1 has 3 cells, the header 2"),
    "negative rms": ("layer,rms\n0,-1\n", "row 1 has the rms -1.0, which is negative"),
    "half a step": ("layer,rms,step\n0,1,0.5\n", "row 1: step is 0.5, which is no count"),
    "header only": ("layer,rms\n", "no rows in it"),
    "two tables": ("|layer|\n|---|\n|0|\n\n|layer|\n|---|\n|1|\n", "2 Markdown tables in it"),
    "broken JSON": ('[{"layer": 0', "it begins like JSON and is none"),
    "a long number": ('[{"layer": ' + "1" * 5000 + "}]", "it begins like JSON and is none"),
    "an open quote": ('layer,min\n0,"' + "x" * 140_000, "it is no CSV: field larger than field limit"),
    "a JSON string": ('{"a": 1}', "the JSON is no list of objects and no object of objects"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_refused_tables(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    text, message = BAD_TABLES[case]
    (tmp_path / "t").write_text(text)
    assert message in no_traceback(refused, "table", tmp_path / "t", "--tokens", "1")


def test_refused_text_and_shards(tmp_path: Path, refused: Callable[..., str]) -> None:
    text = (SAMPLES / "llama-eval-callback.txt").read_text()
    (tmp_path / "a.txt").write_text(text[: text.index("sum = ")])
    assert "no sum is printed for 'embd': the text is cut off" in no_traceback(
        refused, "llama-text", tmp_path / "a.txt"
    )
    (tmp_path / "a.txt").write_text(text.replace("l_out-0 = (f32)        ADD", "conv-0 = (f32) CONV"))
    assert "1 unknown names: conv-N. Say what" in no_traceback(refused, "llama-text", tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text(text.replace("{32, 3, 1, 1}\n", "{0, 3, 1, 1}\n", 1))
    assert "embd (token_embd) has the sizes (0, 3, 1, 1): nothing" in no_traceback(
        refused, "llama-text", tmp_path / "a.txt"
    )
    nowhere = "x:  y = (f32) FLASH_ATTN_EXT({4, 1, 1, 1}, }) = {4, 1, 1, 1}\n sum = 1.0\n"
    (tmp_path / "a.txt").write_text(nowhere)
    no_traceback(refused, "llama-text", tmp_path / "a.txt", "--tokens", "1")
    for folder in "def":
        (tmp_path / folder).mkdir()
    for rank in (0, 1):
        for name in ("lm_head", "model.norm.output.0")[rank:]:
            torch.save(torch.ones(1, 2), tmp_path / "d" / f"step=0___rank={rank}___dump_index=1___name={name}.pt")
    assert "rank 1 has no 'lm_head'" in no_traceback(refused, "sglang", tmp_path / "d")
    torch.save(torch.ones(1), tmp_path / "e" / "weights.pt")
    assert "the name of a file by sglang's dumper is" in no_traceback(refused, "sglang", tmp_path / "e")
    torch.save({"value": [1, 2]}, tmp_path / "f" / "step=0___rank=0___dump_index=1___name=lm_head.pt")
    assert "it holds no tensor but list" in no_traceback(refused, "sglang", tmp_path / "f", "--tokens", "1")


def test_refused_exports(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "the name says no known format" in refused("export", GOLDEN, "-o", tmp_path / "a.zip")
    assert "cannot open the trace" in refused("export", tmp_path / "nix.trace", "-o", tmp_path / "a.npz")
    for name in ("a.npz", "a.safetensors"):
        assert "there is no folder" in refused("export", GOLDEN, "-o", tmp_path / "nix" / name)
    with TraceWriter(tmp_path / "s.trace", "e") as writer:
        writer.step(0, [1], [0])
        writer.op_statistics(0, "output", (1, 3), Statistics(0, 1, 0.5, 0.6))
    assert "no record holds data" in refused("export", tmp_path / "s.trace", "-o", tmp_path / "a.npz")
