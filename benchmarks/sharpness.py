"""How small a mistake replay sees: the smallest perturbation of one op's output that is called faulty.

    python benchmarks/sharpness.py [--weights F32,Q4_K_M] [--out docs/sharpness.md]

A small loud model is traced in llama.cpp in each weight type. In the trace of a middle layer each kind of op is then
perturbed in its recorded values, all else left alone, by ever larger steps until replay calls it faulty. A second
table has what replay leaves of llama.cpp's own values, perturbed by nothing.
"""

import argparse
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from clean_runs import model_of, table, tokens_of

from tracediff.engine.llama_cpp import LlamaCpp, Prompt
from tracediff.model.families import build_graph
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.weights import Weights
from tracediff.replay.judging import judge_all
from tracediff.replay.replay import Replay
from tracediff.trace.data import Stored
from tracediff.trace.format import OpRecord, Rows, Values
from tracediff.trace.reader import Trace

WEIGHTS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q4_K_M", "Q6_K", "IQ4_XS")
OPS = (
    "token_embd", "blk.1.attn_norm", "blk.1.attn_q", "blk.1.attn_output", "blk.1.ffn_down", "output",
    "blk.1.attn_q_rope", "blk.1.attn_scores", "blk.1.attn_probs", "blk.1.attn_kqv", "blk.1.ffn_act",
    "blk.1.ffn_residual",
)  # fmt: skip
LENGTH = 37
STEPS = [m * 10.0**e for e in range(-8, 1) for m in (1, 2, 5)]


Change = Callable[[np.ndarray, float, int], None]  # values, size of the mistake, the axis of tokens


def scaled(x: np.ndarray, size: float, tokens: int) -> None:
    """Everything is 1 + size times what it was."""
    x *= np.float32(1 + size)


def one_token(x: np.ndarray, size: float, tokens: int) -> None:
    """One token's values."""
    x[(slice(None),) * tokens + (20,)] *= np.float32(1 + size)


def one_head(x: np.ndarray, size: float, tokens: int) -> None:
    """One head, or a 64th of the channels where there are no heads."""
    part = x[1] if tokens else x[:, 1] if x.ndim == 3 else x[:, : max(1, x.shape[1] // 64)]
    part *= np.float32(1 + size)


def one_value(x: np.ndarray, size: float, tokens: int) -> None:
    """One value of typical size, of the last token's, is off by size times the RMS of all."""
    flat = x.reshape(-1)
    of_last = np.arange(x.size).reshape(x.shape)[(slice(None),) * tokens + (-1,)].reshape(-1)
    at = of_last[np.argsort(np.abs(flat[of_last]))[of_last.size * 3 // 5]]
    flat[at] += np.float32(size * np.sqrt((flat.astype(np.float64) ** 2).mean()))


PERTURBATIONS: dict[str, Change] = {
    "all scaled": scaled, "one token scaled": one_token, "one head scaled": one_head,
    "one value, of the RMS": one_value,
}  # fmt: skip


class Perturbed(Trace):
    """A trace in which one op's values were tampered with."""

    tampered: tuple[str, np.ndarray] | None = None

    def values(self, record: Values, rows: Rows = None, channels: slice | None = None) -> np.ndarray:
        """Those of the file, or the tampered ones."""
        if self._is_tampered(record):
            assert self.tampered
            return self.tampered[1] if channels is None else self.tampered[1][:, channels]
        return super().values(record, rows, channels)

    def by_slice(self, record: Values, rows: Rows = None) -> np.ndarray | Stored:
        """The same."""
        return self.values(record, rows) if self._is_tampered(record) else super().by_slice(record, rows)

    def _is_tampered(self, record: Values) -> bool:
        return self.tampered is not None and isinstance(record, OpRecord) and record.op == self.tampered[0]


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one op in one weight type: the local error without and the smallest step that was caught of each kind."""

    weights: str
    op: str
    nmse: float
    floor: float
    arithmetic: str
    caught: dict[str, float | None]


def findings(weights: str, folder: Path) -> Iterator[Finding]:
    """Trace the model in llama.cpp and tamper with each op in turn."""
    model = model_of(folder, "demo", weights)
    file = GGUFFile(model)
    graph = build_graph(file)
    out = folder / f"{weights}.trace"
    LlamaCpp(model, Prompt(tokens=tokens_of(LENGTH, graph.hparams.n_vocab)), out).wait()
    trace, kept = Perturbed(out), Weights(file, keep_bytes=1 << 30)
    clean = {record.op: local for _, record, local in judge_all([Replay(trace, graph, kept)])}
    for op in OPS:
        record, local = trace.ops[0, op], clean[op]
        if local.faulty:
            raise AssertionError(f"{op} of a clean {weights} trace is called faulty")
        right = trace.values(record)
        caught = {
            name: smallest(lambda: Replay(trace, graph, kept), trace, record, right, change)
            for name, change in PERTURBATIONS.items()
        }
        trace.tampered = None
        yield Finding(weights, op, local.nmse, local.floor, local.arithmetic, caught)


def smallest(
    replay: Callable[[], Replay], trace: Perturbed, record: OpRecord, right: np.ndarray, change: Change
) -> float | None:
    """The first step that is caught, each by a replay that has not seen the others: all larger ones are."""

    def caught(size: float) -> bool:
        values = right.copy()
        change(values, size, record.token_axis)
        trace.tampered = record.op, values
        return replay().judge(record).faulty

    at = bisect_left(STEPS, True, key=caught)
    return STEPS[at] if at < len(STEPS) else None


def report(found: list[Finding], command: str) -> str:
    """The document."""
    weights = list(dict.fromkeys(f.weights for f in found))
    by = {(f.weights, f.op): f for f in found}

    def cell(weight: str, op: str, change: str) -> str:
        size = by[weight, op].caught[change]
        return "not seen" if size is None else f"{size:.0e}"

    parts = [
        "# Sharpness\n\nThe smallest mistake that replay sees in a trace of llama.cpp (a generated qwen2 model as "
        f"loud as a real one, {LENGTH} tokens), by weight type. Steps are 1, 2 and 5 times a power of ten. "
        f"Written by\n\n    {command}\n\nA report says the figure for its own trace: "
        '"a scale error of ... in a matmul would have been seen".'
    ]
    titles = {
        "all scaled": "The whole output scaled by 1 + e",
        "one token scaled": "One token's row scaled by 1 + e",
        "one head scaled": "One head scaled by 1 + e\n\nOne head of scores and probabilities, a 64th of the channels "
        "of the others.",
        "one value, of the RMS": "One value off by e times the RMS\n\nA value of typical size, the only wrong one.",
    }
    for change, title in titles.items():
        rows = ((op.removeprefix("blk.1."), *(cell(w, op, change) for w in weights)) for op in OPS)
        parts.append(f"## {title}\n\n" + table(("op", *weights), rows))
    parts.append(
        "## What replay leaves of llama.cpp's own values\n\nNMSE against its replay in float64 under the fitted "
        "arithmetic, and in brackets how many times that its floor is.\n\n"
        + table(
            ("op", *weights),
            ((op.removeprefix("blk.1."), *(_left(by[w, op]) for w in weights)) for op in OPS),
        )
    )
    fitted = ", ".join(f"{w}: {by[w, 'blk.1.ffn_down'].arithmetic}" for w in weights)
    parts.append(f"Fitted to `ffn_down`: {fitted}.")
    return "\n\n".join(parts) + "\n"


def _left(f: Finding) -> str:
    return f"{f.nmse:.0e} ({f.floor / f.nmse:.0f})" if f.nmse else "0"


def main() -> None:
    """Measure, print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default=",".join(WEIGHTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder:
        for weights in args.weights.split(","):
            found += findings(weights, Path(folder))
            print(f"{weights} done", file=sys.stderr)
    text = report(found, " ".join(["python", "benchmarks/sharpness.py", *sys.argv[1:]]))
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
