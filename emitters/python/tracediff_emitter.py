"""Writes a tracediff trace (version 1). One file, numpy only: copy it.

with Trace("mine.trace", "my-engine 0.3", "llama", "model.gguf") as trace:
    trace.step(0, tokens, positions)
    trace.op(0, "blk.0.attn_norm", x)

From torch: `x.detach().float().cpu().numpy()`, or, to keep bfloat16, its bits:
`trace.op(0, name, x.detach().cpu().view(torch.uint16).numpy(), "bf16")`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

DTYPES = {"f64": np.dtype("<f8"), "f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


class Trace:
    """A trace being written; leaving the `with` block without an exception completes it.

    `record` says what records hold of values, and may change at any time. After an OSError every call raises.
    `weights` is the ggml type of the matmul weights, the coarsest of a mix: "Q4_K". `context`: for how many positions
    the engine was set up, where that is more than it is fed. `rounding`: the coarsest type that values are rounded to
    inside ops: "f16", "bf16", "q8_0". With `rollback` a step at an earlier position drops what was fed from there on:
    rejected drafts.
    """

    def __init__(
        self,
        path: str | Path,
        engine: str,
        arch: str | None = None,
        model: str | None = None,
        weights: str | None = None,
        context: int | None = None,
        rounding: str | None = None,
        rollback: bool = False,
    ) -> None:
        path = Path(path)
        if path.suffix != ".trace":
            raise ValueError(f"{path}: name it NAME.trace; its data becomes NAME.bin")
        self.record: Literal["data", "statistics", "both"] = "data"
        self._lines = self._offset = 0
        self._step = -1
        self._failed = False
        # Unbuffered: what was written before a crash can be read.
        self._text = path.open("wb", buffering=0)
        self._data = path.with_suffix(".bin").open("wb", buffering=0)
        names = {"arch": arch, "model": model, "weights": weights, "context": context, "rounding": rounding}
        known: dict[str, Any] = {key: value for key, value in names.items() if value is not None}
        known |= {"rollback": True} if rollback else {}
        self._line(type="trace", version=1, engine=engine, **known, data=path.with_suffix(".bin").name)

    def __enter__(self) -> "Trace":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._line(type="end", records=self._lines)
        finally:
            self._data.close()
            self._text.close()

    def weight(self, name: str, values: np.ndarray, dtype: str | None = None) -> None:
        """A weight as the engine holds it in memory, by its name in the GGUF file: "output_norm.weight"."""
        self._values({"type": "weight", "weight": name}, name, values, dtype)

    def step(
        self, step: int, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int] | None = None
    ) -> None:
        """Begin a forward pass: 0 is the prefill, then one step for each token decoded.

        Of a batch `sequences` says whose each token is.
        """
        if step <= self._step or len(tokens) == 0 or len(tokens) != len(positions):
            raise ValueError(f"step {step}: steps ascend, and each token has a position")
        self._step = step
        of = {} if sequences is None else {"sequences": list(map(int, sequences))}
        self._line(type="step", step=step, tokens=list(map(int, tokens)), positions=list(map(int, positions)), **of)

    def op(
        self,
        step: int,
        name: str,
        values: np.ndarray,
        dtype: str | None = None,
        rows: Sequence[int] | None = None,
        sequence: int | None = None,
    ) -> None:
        """The output of one op of the step, for all of its tokens or for those at the indices `rows`.

        With `sequence` it is as if the step had that one's tokens alone: scores and probabilities of a batch are
        written so. `dtype` is "bf16" for the bits of bfloat16, a uint16 array. Arrays of any strides are written in C
        order.
        """
        if step != self._step:
            raise ValueError(f"{name} of step {step}, but the step begun last is {self._step}")
        some: dict[str, Any] = {} if rows is None else {"rows": list(map(int, rows))}
        some |= {} if sequence is None else {"sequence": sequence}
        self._values({"type": "op", "step": step, "op": name, **some}, name, values, dtype)

    def _values(self, record: dict[str, Any], name: str, values: np.ndarray, dtype: str | None) -> None:
        dtype = dtype or f"f{8 * values.itemsize}"
        if values.dtype.newbyteorder("<") != DTYPES.get(dtype):
            raise ValueError(f"{name}: cannot record {values.dtype} as {dtype}; known: {', '.join(DTYPES)}")
        values = np.asarray(values, DTYPES[dtype], order="C")
        record["shape"] = values.shape
        # Of no values there are no statistics: such a record holds data, of no bytes.
        if self.record != "statistics" or not values.size:
            record |= {"dtype": dtype, "offset": self._offset}
            self._write(self._data, values.tobytes())
            self._offset += values.nbytes
        if self.record != "data":
            record |= statistics(values, dtype)
        self._line(**record)

    def _line(self, **record: Any) -> None:
        line = json.dumps(record, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        # A file name that is not UTF-8 has surrogates, which JSON cannot hold.
        self._write(self._text, line.encode(errors="replace") + b"\n")
        self._lines += 1

    def _write(self, file: Any, content: bytes) -> None:
        """All of it: an unbuffered write may do less."""
        if self._failed:
            raise OSError("the trace could not be written further, see the first error")
        self._failed = True
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
        self._failed = False


def statistics(values: np.ndarray, dtype: str) -> dict[str, float]:
    """Over the finite values in float64, with counts of the others."""
    if dtype == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    x = values.astype(np.float64).reshape(-1)
    found: dict[str, float] = {}
    finite = x[np.isfinite(x)]
    if finite.size:
        # Large float64 values are scaled, or their squares would overflow.
        scale = 1.0 if np.abs(finite).max() < 1e150 else 2.0**600
        found["min"], found["max"] = float(finite.min()), float(finite.max())
        found["mean"] = float((finite / scale).mean()) * scale
        found["rms"] = float(np.sqrt(np.square(finite / scale).mean())) * scale
    counts = {"nan": int(np.isnan(x).sum()), "inf": int(np.isinf(x).sum())}
    return found | {key: count for key, count in counts.items() if count}
