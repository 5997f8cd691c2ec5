"""Weights as tensors: memory-mapped, dequantised when an op needs them, a slice of rows at a time."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from tracediff.errors import EngineError
from tracediff.model.dequantise import dequantise
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Op, Weight
from tracediff.model.hparams import check_tokens

# 4 MB of float32: a freshly mapped 17 MB block costs more in page faults (5 ms) than the float16 conversion
# itself (0.3 ms); the allocator keeps blocks of this size. Row blocks also bound memory by the slice, not the matrix.
_SLICE = 1 << 20
_AHEAD = 3  # blocks that are dequantised before they are wanted
_PLAIN = {
    GGMLQuantizationType.F32: (np.float32, torch.float32),
    GGMLQuantizationType.F16: (np.float16, torch.float16),
    GGMLQuantizationType.BF16: (np.int16, torch.bfloat16),
    GGMLQuantizationType.F64: (np.float64, torch.float64),
    GGMLQuantizationType.I32: (np.int32, torch.int32),
}


class Weights:
    """The tensors of a GGUF file in one dtype on one device."""

    def __init__(
        self, file: GGUFFile, dtype: torch.dtype = torch.float64, device: str = "cpu", keep_bytes: int = 0
    ) -> None:
        """`keep_bytes` of matrices stay in memory for the next use: steps and hypotheses read the same ones."""
        self.file = file
        self.dtype = dtype
        self.device = device
        self._recent = _Recent(keep_bytes)
        self._held: Mapping[str, np.ndarray] = {}
        self._spans: dict[tuple[tuple[int, ...], Weight], tuple[float, float]] = {}
        self._pool = ThreadPoolExecutor(2, "dequantise")

    def holding(self, held: Mapping[str, np.ndarray]) -> "Weights":
        """The same with these values, of as many elements, in place of the file's: what an engine has in memory."""
        other = copy(self)
        other._held = {name: values.reshape(self.file.tensors[name].shape) for name, values in held.items()}
        return other

    def in_float32(self) -> "Weights":
        """The same, multiplied in float32: half the time, and nothing is converted before."""
        other = copy(self)
        other.dtype = torch.float32
        return other

    def source(self, weights: Iterable[Weight]) -> tuple[int, ...]:
        """What tells whose values these weights have: the file's, or those that are held in their place."""
        return tuple(id(self._held.get(weight.name, self.file)) for weight in weights)

    def type_of(self, weight: Weight) -> str:
        """The ggml type's name, as in F16 or Q4_K."""
        return self._info(weight).type.name

    def load(self, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
        """The whole weight, in another dtype where it is given."""
        rows = self._whole(weight).reshape(-1, *weight.shape[1:])
        return self._placed(rows[weight.first : weight.first + weight.shape[0]], dtype)

    def _whole(self, weight: Weight) -> Tensor:
        info = self._info(weight)
        if weight.read:
            misread: Tensor = weight.read(self.file, info)
            return misread
        if info.name in self._held:
            return torch.from_numpy(self._held[info.name].copy())
        return self._rows(info, slice(None)).reshape(info.shape)

    def gather(self, weight: Weight, ids: Tensor) -> Tensor:
        """Rows `ids` [T] of a matrix, reading only those; raises EngineError for an id outside it."""
        check_tokens(ids.tolist(), weight.shape[0])
        if self._in_memory(weight):
            return self.load(weight)[ids.to(self.device)]
        return self._placed(self._rows(self._info(weight), ids.cpu().numpy() + weight.first))

    def rows(self, weight: Weight, first: int, end: int) -> Tensor:
        """Rows from `first` to before `end` of a matrix: a view of it where it stays dequantised, as it does if these
        are most of it. Its dtype is that of `slices`, or the weights'.
        """
        if self._in_memory(weight):
            return self.load(weight)[first:end]
        kept = self._recent.get(self._key(weight))
        if kept is None and self._stays(weight) and 2 * (end - first) > weight.shape[0]:
            for _ in self.slices(weight):
                pass
            kept = self._recent.get(self._key(weight))
        if kept is not None:
            return kept[first:end]
        return self._placed(self._rows(self._info(weight), slice(weight.first + first, weight.first + end)))

    def slices(self, weight: Weight, multiple: int = 1) -> Iterator[Tensor]:
        """The matrix as consecutive blocks of rows of about 4 MB, a `multiple` of so many, in float32 where that holds
        them and the weights' dtype is no narrower; quantised ones are dequantised ahead.
        """
        n_rows, n_columns = weight.shape
        step = max(1, _SLICE // n_columns // multiple) * multiple
        kept = self.load(weight) if self._in_memory(weight) else self._recent.get(self._key(weight))
        if kept is not None:
            yield from kept.split(step)
            return
        dtype = self._dtype_of_slices(weight)
        whole = None
        if self._stays(weight):
            self._recent.make_room(n_rows * n_columns * dtype.itemsize)
            whole = torch.empty(n_rows, n_columns, dtype=dtype, device=self.device)
        into = whole if dtype == torch.float32 and self.device == "cpu" else None
        for at, rows in self._in_blocks(weight, step, into):
            if whole is not None and into is None:
                rows = whole[at : at + step].copy_(rows)
            yield self._placed(rows, dtype)
        if whole is not None:
            self._recent.keep(self._key(weight), whole)

    def rounded(self, weight: Weight, rounding: Callable[[Tensor], Tensor], multiple: int = 1) -> Tensor | None:
        """The whole matrix, a `multiple` of so many rows at a time rounded so, which stays for the next use; None where
        there is no room for it, or where it is not the file's.
        """
        if self._in_memory(weight) or math.prod(weight.shape) * self.dtype.itemsize > self._recent.room:
            return None
        key = *_place(weight), self.dtype, rounding
        whole = self._recent.get(key)
        if whole is None:
            whole = torch.cat([rounding(rows.to(self.dtype)) for rows in self.slices(weight, multiple)])
            self._recent.keep(key, whole)
        return whole

    def span(self, weight: Weight) -> tuple[float, float]:
        """The least and the largest value of the matrix that these rows are of."""
        n_rows, n_columns = (1, *self._info(weight).shape)[-2:]
        whole = replace(weight, first=weight.first // n_rows * n_rows, shape=(n_rows, n_columns))
        key = self.source((whole,)), whole
        if key not in self._spans:
            ends = [torch.aminmax(rows) for rows in self.slices(whole)]
            self._spans[key] = min(float(least) for least, _ in ends), max(float(most) for _, most in ends)
        return self._spans[key]

    def _stays(self, weight: Weight) -> bool:
        """Whether it is kept until it is wanted again: there is room for it, and it is not at hand as it lies there."""
        at_hand = self._info(weight).type in _PLAIN and self.device == "cpu"
        return not at_hand and math.prod(weight.shape) * self._dtype_of_slices(weight).itemsize <= self._recent.room

    def _key(self, weight: Weight) -> "_Key":
        return *_place(weight), self._dtype_of_slices(weight)

    def _dtype_of_slices(self, weight: Weight) -> torch.dtype:
        wider = self._info(weight).type == GGMLQuantizationType.F64 or self.dtype.itemsize < torch.float32.itemsize
        return self.dtype if wider else torch.float32

    def _in_blocks(self, weight: Weight, step: int, into: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """So many rows at a time, as wide as they need to be, each with the first one's place; quantised ones `into`
        the whole matrix where it is given.
        """
        info, n_rows = self._info(weight), weight.shape[0]

        def block(at: int) -> Tensor:
            rows = slice(weight.first + at, weight.first + min(at + step, n_rows))
            return self._rows(info, rows, None if into is None else into[at : at + step].numpy())

        if info.type in _PLAIN:
            yield from ((at, block(at)) for at in range(0, n_rows, step))
            return
        ahead = [self._pool.submit(block, at) for at in range(0, min(n_rows, _AHEAD * step), step)]
        for at in range(0, n_rows, step):
            yield at, ahead.pop(0).result()
            if (later := at + _AHEAD * step) < n_rows:
                ahead.append(self._pool.submit(block, later))

    def _in_memory(self, weight: Weight) -> bool:
        """Whether it is not what the file holds."""
        return weight.read is not None or weight.name in self._held

    def minima(self, weight: Weight) -> Tensor:
        """The float16 minimum of each block of a Q4_1 or Q5_1 matrix, [n_out, n_in / 32]."""
        info = self._info(weight)
        if info.type not in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_1):
            raise ValueError(f"{info.type.name} blocks have no minimum")
        rows = raw_rows(self.file, info)[weight.first : weight.first + weight.shape[0]]
        blocks = rows.reshape(weight.shape[0], -1, GGML_QUANT_SIZES[info.type][1])
        return self._placed(torch.from_numpy(blocks[:, :, 2:4].copy().view(np.float16)[..., 0]))

    def _info(self, weight: Weight) -> TensorInfo:
        return self.file.tensors[weight.name]

    def _rows(self, info: TensorInfo, rows: slice | np.ndarray, into: np.ndarray | None = None) -> Tensor:
        return dequantize(info, raw_rows(self.file, info)[rows], into)

    def _placed(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return x.to(device=self.device).to(dtype or self.dtype)


_Key = tuple[Hashable, ...]  # of a matrix: the tensor, the first row and how many; their type, and how it is rounded


def _place(weight: Weight) -> tuple[str, int, int]:
    return weight.name, weight.first, weight.shape[0]


class _Recent:
    """The matrices that were used last, as many as fit in so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._size = 0
        self._kept: dict[_Key, Tensor] = {}

    def get(self, key: _Key) -> Tensor | None:
        """What is kept under the key, the last to be dropped from now on."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
        return found

    def keep(self, key: _Key, matrix: Tensor) -> None:
        """Keep it, and drop what was not used for longest where there is no room."""
        if key in self._kept:
            return
        self.make_room(matrix.nbytes)
        self._kept[key] = matrix
        self._size += matrix.nbytes

    def make_room(self, n_bytes: int) -> None:
        """Drop what was not used for longest, until so many more bytes can be kept."""
        while self._kept and self._size + n_bytes > self.room:
            self._size -= self._kept.pop(next(iter(self._kept))).nbytes


def raw_rows(file: GGUFFile, info: TensorInfo) -> np.ndarray:
    """The tensor's bytes as uint8 [rows, bytes per row], still mapped; rows of all matrices, where it holds several."""
    return np.frombuffer(file.raw(info), np.uint8).reshape(math.prod(info.shape[:-1]), -1)


def dequantize(info: TensorInfo, raw: np.ndarray, into: np.ndarray | None = None) -> Tensor:
    """Rows of bytes, uint8 [rows, bytes per row], as a tensor [rows, columns] of the widest type they need; quantised
    ones `into` float32 memory where it is given.
    """
    if info.type in _PLAIN:
        stored, dtype = _PLAIN[info.type]
        return torch.from_numpy(raw.view(stored)).view(dtype)
    return torch.from_numpy(dequantise(raw, info.type, info.name, into))


def values_of(file: GGUFFile, info: TensorInfo) -> Tensor:
    """The whole tensor, dequantised."""
    return dequantize(info, raw_rows(file, info)).reshape(info.shape)


def reading(op: Op, read: Callable[[GGUFFile, TensorInfo], Any], weight: int = 0) -> Op:
    """The op with one of its weights read in another way."""
    weights = list(op.weights)
    weights[weight] = replace(weights[weight], read=read)
    return replace(op, weights=tuple(weights))


def check_device(device: str) -> None:
    """Raises EngineError for a device that torch cannot use here."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise EngineError(f"--device {device}: not a device of this engine. Use cpu, cuda or cuda:N.")
    if device != "cpu" and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"--device {device}: CUDA devices that this torch sees: {torch.cuda.device_count()}. Use "
            f"--device cpu, or check nvidia-smi and that torch is a CUDA build (this one is {torch.__version__})."
        )
