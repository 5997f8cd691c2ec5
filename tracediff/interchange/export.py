"""A trace as one .safetensors or .npz file: `step0/blk.0.attn_q`, `step0/tokens`, `weights/output_norm.weight`."""

import json
import math
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tracediff.english import count
from tracediff.errors import InterchangeError
from tracediff.files import check, replacing
from tracediff.interchange.entry import ROWS, Say
from tracediff.trace.format import Values, to_float
from tracediff.trace.reader import Trace
from tracediff.trace.staging import files_of

_BY = "written by"  # in the metadata of a .safetensors file
_SIZES = {"f64": 8, "int64": 8, "f32": 4, "f16": 2, "bf16": 2}  # in bytes
_SAFETENSORS = {"f64": "F64", "int64": "I64", "f32": "F32", "f16": "F16", "bf16": "BF16"}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """`load` reads the values, as `trace.format.STORAGE` holds them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]


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
    tensors = [*_tensors(trace)]
    twice = [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]
    if twice:
        raise InterchangeError(f"{path}: an op bears the name of {twice[0]!r}, which is exported too. Rename the op.")
    with replacing(out, _is_export) as part:
        write(tensors, trace.header.engine, part, say)
    say(f"exported {n} records and the tokens of {count(len(trace.steps), 'step')}")


def _is_export(head: bytes) -> bool:
    """Whether a file begins as ours do: the metadata of safetensors, the first array's name in an .npz."""
    return f'"{_BY}":"tracediff"'.encode() in head or head[30:].startswith((b"weights/", b"step"))


def _tensors(trace: Trace) -> Iterator[_Tensor]:
    """All that is exported."""
    for name, weight in trace.weights.items():
        if weight.dtype:
            yield _Tensor(f"weights/{name}", weight.dtype, weight.shape, partial(trace.stored, weight))
    for number, step in trace.steps.items():
        yield _integers(f"step{number}/tokens", step.tokens)
        yield _integers(f"step{number}/positions", step.positions)
    for (number, op), record in trace.ops.items():
        if record.dtype:
            yield _Tensor(f"step{number}/{op}", record.dtype, record.shape, partial(trace.stored, record))
            if record.rows is not None:
                yield _integers(f"step{number}/{op}{ROWS}", record.rows)


def _integers(name: str, values: Sequence[int]) -> _Tensor:
    return _Tensor(name, "int64", (len(values),), partial(np.array, values, np.int64))


def _safetensors(tensors: Iterable[_Tensor], engine: str, out: Path, say: Say) -> None:
    """A tensor at a time: the library wants all of them in memory. Format: its README, "Format".

    The widest types come first, so that each value is aligned.
    """
    tensors = sorted(tensors, key=lambda tensor: -_SIZES[tensor.dtype])
    header: dict[str, object] = {"__metadata__": {_BY: "tracediff", "engine": engine}}
    at = 0
    for tensor in tensors:
        place = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": _SAFETENSORS[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
        at = place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with out.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.load()).data)


def _npz(tensors: Iterable[_Tensor], engine: str, out: Path, say: Say) -> None:
    """As numpy.savez writes it, an array at a time. numpy has no bfloat16: float32 holds it exactly."""
    widened = 0
    with zipfile.ZipFile(out, "w", allowZip64=True) as archive:
        for tensor in tensors:
            widened += tensor.dtype == "bf16"
            values = to_float(np.ascontiguousarray(tensor.load()), tensor.dtype)
            with archive.open(f"{tensor.name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, values, allow_pickle=False)
    if widened:
        say(f"{widened} bfloat16 records were written as float32, which numpy knows: the same values")
