"""What an engine holds in memory against what the file, or the other side, says it should hold."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from tracediff.compare import compare_values
from tracediff.result import WeightResult
from tracediff.trace.reader import Trace

_STORAGES = (np.float32, np.float16)


def compare_weights(reference: Trace | None, candidate: Trace, model: Path | None) -> Iterator[WeightResult]:
    """Every weight record of the candidate against the file where there is one, else against the reference's."""
    file = _FileWeights(model)
    for name, record in candidate.weights.items():
        held = candidate.values(record) if record.has_data else None
        expected = file.get(name)
        if expected is None and reference and name in reference.weights and reference.weights[name].has_data:
            expected = reference.values(reference.weights[name])
        if held is None or expected is None or held.size != expected.size:
            note = "no such weight to compare with" if expected is None else "shape or data missing"
            yield WeightResult(name, "unmatched", None, None, None, note)
            continue
        r, c, drift = compare_values(expected.reshape(-1), held.reshape(-1))
        judged, why = _judge(expected.reshape(-1), held.reshape(-1))
        yield WeightResult(name, judged, r, c, drift.max_abs, why)


def _judge(expected: np.ndarray, held: np.ndarray) -> tuple[Literal["identical", "rounded", "wrong"], str | None]:
    if np.array_equal(expected, held):
        return "identical", None
    with np.errstate(over="ignore"):
        half = expected.astype(np.float16).astype(np.float64)
    for name, rounded in (
        ("float16", half),
        ("bfloat16", _bfloat16(expected)),
        ("float32", expected.astype(np.float32).astype(np.float64)),
    ):
        if np.array_equal(rounded, held.astype(np.float64)):
            return "rounded", f"the file's values in {name}"
    return "wrong", _explain(expected.astype(np.float64), held.astype(np.float64))


def _bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to nearest, ties to even
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def _explain(expected: np.ndarray, held: np.ndarray) -> str:
    """The simplest relation that holds for every value, to float16 accuracy."""

    def close(a: np.ndarray, b: np.ndarray) -> bool:
        return np.allclose(a, b, rtol=2e-3, atol=1e-6)

    if not held.any():
        return "all zeros: never loaded?"
    if close(held, expected + 1):
        return "1 was added to every value; in a GGUF file it is in already"
    if close(held, expected - 1):
        return "1 was taken from every value"
    energy = float(expected @ expected)
    ratio = float(held @ expected) / energy if energy else math.nan
    if close(held, ratio * expected):
        return f"every value was multiplied by {ratio:.4g}"
    for shift in (1, -1, 2, -2, 4, -4, 8, -8):
        if close(np.roll(held, -shift)[8:-8], expected[8:-8]):
            return f"read {abs(shift)} elements {'before' if shift > 0 else 'after'} where it begins"
    if close(np.sort(held), np.sort(expected)):
        return "the same values in another order"
    return "other values: another tensor's, or another model's"


class _FileWeights:
    """One-dimensional float weights of a GGUF file, read without torch."""

    def __init__(self, model: Path | None) -> None:
        self._file = None
        if model:
            from tracediff.model.gguf_file import GGUFFile

            self._file = GGUFFile(model)

    def get(self, name: str) -> np.ndarray | None:
        """The values, None where the file has no such tensor or it is no plain float."""
        info = self._file.tensors.get(name) if self._file else None
        dtype = {"F32": np.float32, "F16": np.float16}.get(info.type.name) if info else None
        if not self._file or not info or not dtype:
            return None
        return np.frombuffer(self._file.raw(info), dtype)
