"""What an engine holds in memory against what the file, or the other side, says it should hold."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from tracediff.audit.causes import (
    CLOSE,
    CUT_SHORT,
    IN_MEMORY,
    ROUNDINGS,
    Reading,
    Readings,
    explain,
    residual,
    rounded_to,
)
from tracediff.audit.requantised import requantised_as
from tracediff.compare.metrics import compare_values
from tracediff.errors import MismatchError
from tracediff.names import local_name
from tracediff.result import WeightResult
from tracediff.trace.reader import Trace

if TYPE_CHECKING:
    from tracediff.model.gguf_file import GGUFFile
    from tracediff.model.model import Model
    from tracediff.model.tensors import Tensors

Held = Literal["identical", "rounded", "wrong"]
# A dequantised value is a product and a sum of float32 numbers, which engines round in their own order.
_DEQUANTISED = 1e-6


def compare_weights(reference: Trace | None, candidate: Trace, model: "Model | None") -> Iterator[WeightResult]:
    """Every weight record of the candidate against the file where there is one, else against the reference's."""
    file = model.tensors if model else None
    for name in candidate.weights:
        if file and name in file:
            found = compare_weight(name, file.get(name), candidate, readings(file, name, file.file))
            yield replace(found, type=file.storage(name))
        else:
            other = reference.weights.get(name) if reference else None
            expected = reference.values(other) if reference and other and other.has_data else None
            yield compare_weight(name, expected, candidate)


def rounded_weights(weights: Iterable[WeightResult], trace: Trace, model: "Model") -> dict[str, np.ndarray]:
    """What a trace holds of the file in a shorter type: its ops were computed with that, not with the file's values.
    `weights` is what was found of those that it recorded.
    """
    names = [w.weight for w in weights if w.status == "rounded" and w.weight in model.tensors]
    return {name: trace.values(trace.weights[name]) for name in names}


def wrong_weights(weights: Iterable[WeightResult], trace: Trace, model: "Model") -> dict[str, np.ndarray]:
    """Those that are not the file's, of as many values and all finite: ops may have been computed with them."""
    names = [w.weight for w in weights if w.status == "wrong" and w.candidate and w.weight in model.tensors]
    held = {name: trace.values(trace.weights[name]) for name in names}
    return {name: values for name, values in held.items() if np.isfinite(values).all()}


def refuse_another_model(weights: Iterable[WeightResult], trace: Trace, model: "Model") -> None:
    """Raises MismatchError when none of several norm weights is the file's and no known mistake explains one: no op
    would tell anything. `weights` is what was found of those that the trace recorded.
    """
    norms = [w for w in weights if w.weight.endswith("norm.weight") and w.weight in model.tensors]
    if len(norms) < 2 or any(w.status != "wrong" or w.cause for w in norms):
        return
    raise MismatchError(
        f"{trace.path}: none of its {len(norms)} norm weights is that of {model.path}: it is a trace of another "
        f"model (its first line says {trace.header.model!r}), or its engine loads them all wrongly. Give the GGUF "
        "file that it was made with; if this is it, compare the sizes and offsets with which tensors are read."
    )


def compare_weight(
    name: str, expected: np.ndarray | None, candidate: Trace, others: Readings = lambda held: iter(())
) -> WeightResult:
    """One weight record of a trace; "unmatched" where there is nothing that it could be compared with."""
    record = candidate.weights[name]
    if expected is None:
        return WeightResult(name, "unmatched", None, None, None, "no such weight to compare with")
    if record.size != expected.size:
        note, cause = f"it holds {record.size:,} values, where {expected.size:,} belong", None
        held = candidate.values(record).reshape(-1) if record.has_data and record.size < expected.size else None
        if held is not None and (not held.size or residual(expected.reshape(-1)[: held.size], held) < CLOSE):
            note, cause = f"{note}: only the first are read", CUT_SHORT
        return WeightResult(name, "wrong", None, None, None, note, cause, look_at(cause))
    if not record.has_data:
        return WeightResult(name, "unmatched", None, None, None, "recorded without data")
    held = candidate.values(record)
    r, c, drift = compare_values(expected.reshape(-1), held.reshape(-1))
    status, cause, why = judge_values(name, expected, held, others)
    return WeightResult(name, status, r, c, drift.max_abs, why, cause, look_at(cause), nmse=drift.nmse)


def look_at(cause: str | None) -> str | None:
    """Where to look in one's code for a mistake; None for an unknown one. The bank needs torch."""
    if cause is None or cause in IN_MEMORY:
        return IN_MEMORY[cause][1] if cause else None
    from tracediff.diagnose.mistakes import BANK

    return BANK[cause].look


@np.errstate(over="ignore", invalid="ignore")  # too large for float16; a signalling NaN that is cast
def judge_values(
    name: str, expected: np.ndarray, held: np.ndarray, others: Readings
) -> tuple[Held, str | None, str | None]:
    """Whether `held` are the expected values, or these rounded to a storage type; the cause's name and words else."""
    flat, held = expected.reshape(-1), held.reshape(-1)
    if np.array_equal(flat, held):
        return "identical", None, None
    rounding = rounded_to(flat, held) or (_rounded_less_1(flat, held) if name.endswith("norm.weight") else None)
    if rounding:
        return "rounded", None, f"the right values in {rounding}"
    if requantised := requantised_as(expected, held):
        return "rounded", None, requantised
    if residual(flat, held) < _DEQUANTISED and np.allclose(flat, held, rtol=1e-5, atol=0):
        return "rounded", None, "the right values to the accuracy of float32"
    return "wrong", *explain(name, expected, held, others)


def _rounded_less_1(flat: np.ndarray, held: np.ndarray) -> str | None:
    """The same for a norm that holds its weight less 1, and adds that in float32 (Gemma). The file's value is such a
    sum: what was rounded is known to half a unit of that.
    """
    less_1, half = flat.astype(np.float64) - 1, np.spacing(np.abs(flat).astype(np.float32)).astype(np.float64) / 2
    for name in ("bfloat16", "float16"):
        least, most = ((ROUNDINGS[name](less_1 + by) + 1).astype(np.float32) for by in (-half, half))
        if bool(((least <= held) & (held <= most)).all()):
            return f"{name}, to which 1 is added"
    return None


# --- what a file tells of other ways to read a tensor --------------------------------------------------------------


def readings(source: "Tensors", name: str, file: "GGUFFile", in_memory: bool = True) -> Readings:
    """Other tensors that may have been taken for `name`, its rows permuted, its blocks misread by who holds it."""

    def all_of(held: np.ndarray) -> Iterator[Reading]:
        yield from _other_tensors(source, name, held)
        yield from _permutations(source.get(name), name, file)
        if in_memory and name in file.tensors:
            yield from _misread_blocks(name, file)

    return all_of


def _other_tensors(source: "Tensors", name: str, held: np.ndarray) -> Iterator[Reading]:
    """Those of the same shape whose beginning is not another one's."""
    shape, local = source.shape(name), local_name(name)
    for other in source.names():
        if other == name or source.shape(other) != shape or residual(source.head(other), held) > 0.5:
            continue
        same = local_name(other) == local
        tied = (name, other) == ("output.weight", "token_embd.weight")
        cause = "wrong_layer" if same else "head_is_embedding" if tied else "wrong_tensor"
        yield Reading(cause, f"it holds {other}", source.get(other))


def _permutations(values: np.ndarray, name: str, file: "GGUFFile") -> Iterator[Reading]:
    from tracediff.model.conversion import head_counts
    from tracediff.model.pairing import neighbours

    heads = head_counts(file).get(name)
    if heads and values.shape[0] % (2 * heads) == 0:
        what, head_dim = "Q/K rows are permuted", values.shape[0] // heads
        there, back = neighbours(values, head_dim, 0), neighbours(values, head_dim, 0, inverse=True)
        yield Reading("rope_permuted", f"{what} from halves to neighbours", there)
        yield Reading("rope_permuted", f"{what} from neighbours to halves", back)


def _misread_blocks(name: str, file: "GGUFFile") -> Iterator[Reading]:
    """The mistakes of dequantisation that the bank of faults knows for this type."""
    from tracediff.diagnose.mistakes.blocks import misread
    from tracediff.model.block_fields import EditedBlocks

    info = file.tensors[name]
    for mistake in misread(info.type.name):
        made = EditedBlocks(mistake.types, mistake.edit)(file, info).numpy()
        yield Reading(mistake.name, mistake.text.format(info.type.name), made)


def written_otherwise(expected: np.ndarray, held: np.ndarray, name: str, file: "GGUFFile") -> Iterator[Reading]:
    """Blocks of a file that are the expected values to who makes a mistake in reading them: so they were written."""
    for mistake in _misread_blocks(name, file):
        text = f"written for who reads them mistakenly: {mistake.text}"
        yield Reading(
            mistake.cause, text, held.reshape(-1) + (expected - mistake.values.reshape(expected.shape)).reshape(-1)
        )
