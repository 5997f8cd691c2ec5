"""Weights as tensors: memory-mapped, dequantised when an op needs them, a slice of rows at a time."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from tracediff.errors import EngineError
from tracediff.model.dequantise import dequantise
from tracediff.model.gguf_file import GGUFFile, TensorInfo
from tracediff.model.graph import Weight
from tracediff.model.hparams import check_tokens

# 4 MB of float32: a freshly mapped 17 MB block costs more in page faults (5 ms) than the float16 conversion
# itself (0.3 ms); the allocator keeps blocks of this size. Row blocks also bound memory by the slice, not the matrix.
_SLICE = 1 << 20
_FLOATS = {
    GGMLQuantizationType.F32: (np.float32, torch.float32),
    GGMLQuantizationType.F16: (np.float16, torch.float16),
    GGMLQuantizationType.BF16: (np.int16, torch.bfloat16),
    GGMLQuantizationType.F64: (np.float64, torch.float64),
}


class Weights:
    """The tensors of a GGUF file in one dtype on one device."""

    def __init__(
        self, file: GGUFFile, dtype: torch.dtype = torch.float64, device: str = "cpu", keep_bytes: int = 0
    ) -> None:
        """`keep_bytes` of slices stay in memory for the next use: steps and hypotheses read the same ones."""
        self.file = file
        self.dtype = dtype
        self.device = device
        self._recent = _Recent(keep_bytes)
        self._held: Mapping[str, np.ndarray] = {}
        self._pool = ThreadPoolExecutor(2, "dequantise")

    def holding(self, held: Mapping[str, np.ndarray]) -> "Weights":
        """The same with these values, of as many elements, in place of the file's: what an engine has in memory."""
        other = copy(self)
        other._held = {name: values.reshape(self.file.tensors[name].shape) for name, values in held.items()}
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
        return self._placed(self._rows(self._info(weight), ids.cpu().numpy()))

    def slices(self, weight: Weight) -> Iterator[Tensor]:
        """The matrix as consecutive blocks of rows of about 4 MB; quantised ones are dequantised ahead."""
        n_rows, n_columns = weight.shape
        step = max(1, _SLICE // n_columns)
        if self._in_memory(weight):
            yield from self.load(weight).split(step)
            return
        info, end = self._info(weight), weight.first + n_rows
        cuts = [slice(at, min(at + step, end)) for at in range(weight.first, end, step)]
        keeps = self._recent.fits(n_rows * n_columns * self.dtype.itemsize)
        if info.type in _FLOATS or self._recent.get((info.name, cuts[0].start, cuts[0].stop)) is not None:
            yield from (self._slice(info, cut, keeps) for cut in cuts)
            return
        ahead = [self._pool.submit(self._rows, info, cut) for cut in cuts[:3]]
        for i, cut in enumerate(cuts):
            rows = self._placed(ahead.pop(0).result())
            if i + 3 < len(cuts):
                ahead.append(self._pool.submit(self._rows, info, cuts[i + 3]))
            if keeps:
                self._recent.keep((info.name, cut.start, cut.stop), rows)
            yield rows

    def _in_memory(self, weight: Weight) -> bool:
        """Whether it is not what the file holds."""
        return weight.read is not None or weight.name in self._held

    def _slice(self, info: TensorInfo, cut: slice, keeps: bool) -> Tensor:
        key = info.name, cut.start, cut.stop
        rows = self._recent.get(key)
        if rows is None:
            rows = self._placed(self._rows(info, cut))
            if keeps:
                self._recent.keep(key, rows)
        return rows

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

    def _rows(self, info: TensorInfo, rows: slice | np.ndarray) -> Tensor:
        return dequantize(info, raw_rows(self.file, info)[rows])

    def _placed(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return x.to(device=self.device).to(dtype or self.dtype)


class _Recent:
    """The tensors that were used last, as many as fit in so many bytes."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._size = 0
        self._kept: dict[tuple[str, int, int], Tensor] = {}

    def fits(self, size: int) -> bool:
        """Whether so many bytes are kept until they are wanted again: more would drive out their own beginning."""
        return size <= self._room

    def get(self, key: tuple[str, int, int]) -> Tensor | None:
        """What is kept under the key, the last to be dropped from now on."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
        return found

    def keep(self, key: tuple[str, int, int], rows: Tensor) -> None:
        """Keep it, and drop what was not used for longest where there is no room."""
        if key in self._kept:
            return
        self._kept[key] = rows
        self._size += rows.nbytes
        while self._size > self._room:
            self._size -= self._kept.pop(next(iter(self._kept))).nbytes


def raw_rows(file: GGUFFile, info: TensorInfo) -> np.ndarray:
    """The tensor's bytes as uint8 [rows, bytes per row], still mapped; rows of all matrices, where it holds several."""
    return np.frombuffer(file.raw(info), np.uint8).reshape(math.prod(info.shape[:-1]), -1)


def dequantize(info: TensorInfo, raw: np.ndarray) -> Tensor:
    """Rows of bytes, uint8 [rows, bytes per row], as a tensor [rows, columns] of the widest type they need."""
    if info.type in _FLOATS:
        stored, dtype = _FLOATS[info.type]
        return torch.from_numpy(raw.view(stored)).view(dtype)
    return torch.from_numpy(dequantise(raw, info.type, info.name))


def check_device(device: str) -> None:
    """Raises EngineError for a device that torch cannot use here."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise EngineError(f"--device {device}: not a device of this engine. Use cpu, cuda or cuda:N.")
    if device != "cpu" and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"--device {device}: CUDA devices that this torch sees: {torch.cuda.device_count()}. Use "
            f"--device cpu, or check nvidia-smi and that torch is a CUDA build (this one is {torch.__version__})."
        )
