"""An importance matrix of llama.cpp against a trace, or another: per channel the mean square of each matmul's input.

`llama-imatrix` sums x^2 of every channel over all tokens, and counts the tokens: NAME.in_sum2 [matrices, channels] and
NAME.counts [matrices, 1] (llama.cpp, tools/imatrix/imatrix.cpp). A statistic of a whole tensor cannot see a permutation
of channels; these see it, and cost an engine one sum for each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from tracediff.english import few
from tracediff.errors import MismatchError, ModelError
from tracediff.trace.reader import Trace
from tracediff.trace.runs import open_trace

if TYPE_CHECKING:
    from tracediff.model.graph import Op
    from tracediff.model.model import Model

_SUMS, _COUNTS = ".in_sum2", ".counts"
_SAME = 1e-6  # relative: a multiple, or another order, leaves no more than float32 makes of such sums
_SHOWN = 4
_EXCHANGED = 0.5  # of the NMSE that channels exchanged at random have


@dataclass(frozen=True, slots=True)
class Profile:
    """Of a matmul's input: the mean square of each channel, [matrices, channels], over so many tokens a matrix."""

    squares: np.ndarray
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """One weight's input on both sides. `nmse` is of the channels' RMS; `why` says how they differ."""

    weight: str
    status: Literal["ok", "permuted", "scaled", "differs", "unmatched"]
    nmse: float | None
    why: str = ""


def profiles(path: Path, model: "Model | None") -> dict[str, Profile]:
    """By weight, of an importance matrix or, with the model, of a trace.

    Raises ModelError for a file that is no importance matrix, or an empty one; MismatchError for a trace without model.
    """
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf:
        return dict(_of_file(path))
    if model is None:
        raise MismatchError(f"{path}: which op reads what tells the model: give --model FILE.gguf beside a trace.")
    found = dict(_of_trace(open_trace(path), model))
    if not found:
        raise MismatchError(f"{path}: no input of a matmul is recorded whole. Record norms, attention and activations.")
    return found


def _of_file(path: Path) -> Iterator[tuple[str, Profile]]:
    from tracediff.model.gguf_file import GGUFFile
    from tracediff.model.tensors import FileTensors

    tensors = FileTensors(GGUFFile(path))
    names = [name.removesuffix(_SUMS) for name in tensors.names() if name.endswith(_SUMS)]
    if not names:
        raise ModelError(f"{path}: it holds no {_SUMS}: no importance matrix. Write one with llama-imatrix, as GGUF.")
    for name in names:
        if name + _COUNTS not in tensors:
            raise ModelError(f"{path}: {name} has no {_COUNTS}. Write it again with llama-imatrix.")
        sums, counts = tensors.get(name + _SUMS).astype(np.float64), tensors.get(name + _COUNTS).reshape(-1)
        sums = sums.reshape(-1, sums.shape[-1])
        if not np.isfinite(sums).all() or not sums.any() or len(counts) != len(sums):
            raise ModelError(
                f"{path}: the sums of {name} are all 0, or not finite: nothing was collected. Run it again."
            )
        yield name, Profile(sums / np.maximum(counts, 1)[:, None], tuple(int(n) for n in counts))


def _of_trace(trace: Trace, model: "Model") -> Iterator[tuple[str, Profile]]:
    """Of matmuls that all tokens go through: which go to an expert the routes tell, and they are left out."""
    for op in model.graph:
        if op.kind == "linear" and op.weights and (squares := _squares(trace, op)) is not None:
            yield op.weights[0].name, Profile(squares[None] / len(trace.tokens), (len(trace.tokens),))


def _squares(trace: Trace, op: "Op") -> np.ndarray | None:
    total = np.zeros(op.weights[0].shape[-1])
    for number, step in trace.steps.items():
        record = trace.ops.get((number, op.inputs[0]))
        if record is None or not record.has_data or record.rows is not None:
            return None
        rows = trace.values(record).reshape(len(step.tokens), -1)
        if rows.shape[1] != total.size:
            return None
        total += np.square(rows, dtype=np.float64).sum(0)
    return total


def compare(a: Mapping[str, Profile], b: Mapping[str, Profile], tolerance: float) -> list[Compared]:
    """Each weight of either side. `tolerance` is the NMSE of the channels' RMS that is no difference.

    Raises MismatchError where no weight is on both sides, or they are of other numbers of tokens.
    """
    common = [name for name in a if name in b]
    if not common:
        raise MismatchError("no weight is on both sides. Give files of the same model, named as its GGUF file has it.")
    odd = [name for name in common if len(a[name].counts) == 1 and a[name].counts != b[name].counts]
    if odd:
        one, other = (side[odd[0]].counts[0] for side in (a, b))
        raise MismatchError(
            f"{odd[0]}: collected over {one} tokens in A, and {other} in B. Feed both the same: llama-imatrix with "
            "a --chunk of that length and --no-ppl, say, or the tokens of the trace."
        )
    names = [*a, *(name for name in b if name not in a)]
    return [_compared(name, a.get(name), b.get(name), tolerance) for name in names]


def _compared(name: str, a: Profile | None, b: Profile | None, tolerance: float) -> Compared:
    if a is None or b is None:
        return Compared(name, "unmatched", None, f"not in {'A' if a is None else 'B'}")
    if a.squares.shape != b.squares.shape:
        return Compared(name, "differs", None, f"{a.squares.shape[1]} channels in A, {b.squares.shape[1]} in B")
    x, y = np.sqrt(a.squares), np.sqrt(b.squares)
    nmse = float(np.square(y - x).sum() / max(np.square(x).sum(), 1e-300))
    if nmse <= tolerance:
        return Compared(name, "ok", nmse)
    factor = float((x * y).sum() / max((x * x).sum(), 1e-300))
    if np.square(y - factor * x).sum() <= max(_SAME, 0.01 * nmse) * np.square(y).sum():
        return Compared(name, "scaled", nmse, f"B's is {factor:.6g} times A's")
    if np.square(np.sort(y) - np.sort(x)).sum() <= max(tolerance, _SAME) * np.square(x).sum():
        order = np.argsort(x[0])[np.argsort(np.argsort(y[0]))]
        moved = [i for i, channel in enumerate(order) if channel != i]
        # Where all channels are a little off, the sorted ones are alike too; exchanged, they are far apart.
        by_chance = 2 * x.var() / np.square(x).mean() * len(moved) / x.shape[1]
        if nmse > _EXCHANGED * by_chance:
            said = few([f"{i} has that of {order[i]}" for i in moved], _SHOWN)
            return Compared(name, "permuted", nmse, f"{len(moved)} channels in another order: B's channel {said}")
    worst = int(np.argmax(np.abs(y - x)[0]))
    return Compared(name, "differs", nmse, f"most in channel {worst}: {x[0, worst]:.4g} in A, {y[0, worst]:.4g} in B")
