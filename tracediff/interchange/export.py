"""A trace as one .safetensors or .npz file: `step0/blk.0.attn_q`, `step0/tokens`, `weights/output_norm.weight`."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from tracediff.errors import InterchangeError
from tracediff.files import check, replacing
from tracediff.interchange.entry import ROWS, Say
from tracediff.trace.format import Values, to_float
from tracediff.trace.reader import Trace
from tracediff.trace.staging import files_of

Tensor = tuple[str, np.ndarray, str]  # name, values as `trace.format.STORAGE` holds them, dtype
_BY = "written by"  # in the metadata of a .safetensors file
_TORCH = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "int64": "int64"}


def export_trace(path: Path, out: Path, say: Say) -> None:
    """Write every record with data, and tokens and positions; raises InterchangeError, OutputError or TraceError."""
    write = {".safetensors": _safetensors, ".npz": _npz}.get(out.suffix)
    if write is None:
        raise InterchangeError(f"{out}: the name says no known format. Call it NAME.safetensors or NAME.npz.")
    check(out, files_of(path), _is_export)
    trace = Trace(path)
    records: list[Values] = [*trace.weights.values(), *trace.ops.values()]
    n = sum(record.has_data for record in records)
    if not n:
        raise InterchangeError(f"{path}: no record holds data, statistics alone cannot be exported. Trace with data.")
    if trace.cut:
        say(f"{path} is cut off: {trace.cut}. What comes before is exported")
    if n < len(records):
        say(f"left out {len(records) - n} records of statistics only")
    with replacing(out, _is_export) as part:
        write(trace, part, say)
    say(f"exported {n} records and the tokens of {len(trace.steps)} step{'s' * (len(trace.steps) > 1)}")


def _is_export(head: bytes) -> bool:
    """Whether a file begins as ours do: the metadata of safetensors, the first array's name in an .npz."""
    return f'"{_BY}":"tracediff"'.encode() in head or head[30:].startswith((b"weights/", b"step"))


def _tensors(trace: Trace) -> Iterator[Tensor]:
    """All that is exported; the data is mapped, where it lies in C order."""
    for name, weight in trace.weights.items():
        if weight.dtype:
            yield f"weights/{name}", np.ascontiguousarray(trace.stored(weight)), weight.dtype
    for number, step in trace.steps.items():
        yield f"step{number}/tokens", np.array(step.tokens, np.int64), "int64"
        yield f"step{number}/positions", np.array(step.positions, np.int64), "int64"
    for (number, op), record in trace.ops.items():
        if record.dtype:
            yield f"step{number}/{op}", np.ascontiguousarray(trace.stored(record)), record.dtype
            if record.rows is not None:
                yield f"step{number}/{op}{ROWS}", np.array(record.rows, np.int64), "int64"


def _safetensors(trace: Trace, out: Path, say: Say) -> None:
    """Copied from the mapped data by the library, never loaded as a whole."""
    tensors = list(_tensors(trace))  # alive while their addresses are used
    specs = {
        name: TensorSpec(dtype=_TORCH[dtype], shape=list(x.shape), data_ptr=x.ctypes.data, data_len=x.nbytes)
        for name, x, dtype in tensors
    }
    try:
        serialize_file(specs, str(out), {_BY: "tracediff", "engine": trace.header.engine})
    except SafetensorError as error:
        raise OSError(str(error)) from None


def _npz(trace: Trace, out: Path, say: Say) -> None:
    """As numpy.savez writes it, an array at a time. numpy has no bfloat16: float32 holds it exactly."""
    widened = 0
    with zipfile.ZipFile(out, "w", allowZip64=True) as archive:
        for name, stored, dtype in _tensors(trace):
            if dtype == "bf16":
                widened += 1
                stored = to_float(stored, dtype)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, stored, allow_pickle=False)
    if widened:
        say(f"{widened} bfloat16 records were written as float32, which numpy knows: the same values")
