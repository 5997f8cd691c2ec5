"""The recipe of the golden traces: `python traces/make.py` writes the expected reports afresh; with --traces all of it.

Each folder holds a tiny model, a reference trace by llama.cpp, a candidate trace by torch, and the report that
`tracediff compare reference.trace candidate.trace --model model.gguf` prints. Tests read what lies here; the
traces differ in their last digits from machine to machine, so look at the difference before you commit it.
"""

import sys
from contextlib import chdir
from functools import cache
from pathlib import Path

from rich.console import Console

from tracediff.engine.llama_cpp import LlamaCpp, Prompt
from tracediff.engine.torch_run import TorchOptions, trace_torch
from tracediff.model.synthetic import Shape, write_model
from tracediff.pipeline import compare_traces
from tracediff.report.terminal import render
from tracediff.result import Result
from tracediff.trace.reader import Trace

HERE = Path(__file__).parent
TOKENS = (256, 72, 101, 108, 108, 111)
_TINY = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_head_kv": 2, "n_ff": 48, "n_vocab": 272}
CASES: dict[str, tuple[Shape, TorchOptions]] = {
    "clean": (Shape("qwen2", **_TINY, loud=True), TorchOptions()),
    "rope-pairing": (Shape("qwen2", **_TINY, loud=True), TorchOptions(faults=("rope_pairing",))),
    "three-faults": (
        Shape("llama", **_TINY, tied=True),
        TorchOptions(faults=("weight_transposed@blk.0.attn_v", "attention_scale@1", "act_gelu@ffn_act")),
    ),
    "layers-only": (Shape("qwen3", **_TINY, head_dim=12), TorchOptions(capture="layers", faults=("eps@1",))),
    "statistics": (Shape("llama", **_TINY), TorchOptions(capture="stats", faults=("norm_scaled@output_norm",))),
}


def report(result: Result, width: int = 100) -> str:
    """What the terminal shows, without colours."""
    console = Console(width=width, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    console.print(render(result, width))
    return console.export_text()


@cache
def compare(case: str) -> Result:
    """The comparison of a case's two traces, from inside its folder: no line depends on where the sources lie."""
    model = None if CASES[case][1].capture == "stats" else Path("model.gguf")
    with chdir(HERE / case):
        return compare_traces(Path("reference.trace"), Path("candidate.trace"), model=model)


def trace(case: str) -> None:
    """Write the model and the traces of a case."""
    shape, options = CASES[case]
    folder = HERE / case
    folder.mkdir(exist_ok=True)
    model = write_model(folder / "model.gguf", shape, "F32")
    reference = folder / "reference.trace"
    LlamaCpp(model, Prompt(tokens=TOKENS), reference, capture=options.capture, n_decode=1).wait()
    trace_torch(model, folder / "candidate.trace", options, steps=[*Trace(reference).steps.values()])


def main() -> None:
    """Write every case."""
    for case in CASES:
        if "--traces" in sys.argv[1:]:
            trace(case)
        (HERE / case / "expected.txt").write_text(report(compare(case)))


if __name__ == "__main__":
    main()
