"""The tensors of a GGUF file as numpy arrays, one at a time, dequantised."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from tracediff.model.dequantise import dequantise
from tracediff.model.gguf_file import GGUFFile

_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I32": np.int32}
_SLICE = 1 << 22  # values that are dequantised at a time


class Tensors(Protocol):
    """Named tensors somewhere: in a GGUF file, or in a checkpoint."""

    def __contains__(self, name: object) -> bool: ...

    def names(self) -> list[str]:
        """All of them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Outermost first."""

    def storage(self, name: str) -> str:
        """The type that it is stored in."""

    def get(self, name: str) -> np.ndarray:
        """The values, shaped."""

    def head(self, name: str) -> np.ndarray:
        """The first row, or value, flat."""


class FileTensors:
    """Those of a GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def __contains__(self, name: object) -> bool:
        return name in self.file.tensors

    def names(self) -> list[str]:
        """In the order of the file."""
        return list(self.file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Outermost first."""
        return self.file.tensors[name].shape

    def storage(self, name: str) -> str:
        """The ggml type's name."""
        return self.file.tensors[name].type.name

    def get(self, name: str) -> np.ndarray:
        """The values, shaped: what they are stored in, float32 where that is no plain float.

        Raises ModelError for a type that gguf-py cannot dequantise.
        """
        return self._values(name, None).reshape(self.shape(name))

    def head(self, name: str) -> np.ndarray:
        """The first row, or value, flat."""
        shape = self.shape(name)
        return self._values(name, shape[-1] if len(shape) > 1 else 1)

    def rows(self, name: str, ids: Sequence[int]) -> np.ndarray:
        """Rows of a matrix in float64, [len(ids), columns]; raises as `get` does."""
        info = self.file.tensors[name]
        block, size = GGML_QUANT_SIZES[info.type]
        raw = np.frombuffer(self.file.raw(info), np.uint8).reshape(-1, info.shape[-1] // block * size)[[*ids]]
        return self._dequantised(name, raw.reshape(-1)).reshape(len(ids), -1).astype(np.float64)

    def _values(self, name: str, count: int | None) -> np.ndarray:
        info = self.file.tensors[name]
        raw = np.frombuffer(self.file.raw(info), np.uint8)
        block, size = GGML_QUANT_SIZES[info.type]
        if count is not None:
            raw = raw[: -(-count // block) * size]
        return self._dequantised(name, raw)

    def _dequantised(self, name: str, raw: np.ndarray) -> np.ndarray:
        info = self.file.tensors[name]
        block, size = GGML_QUANT_SIZES[info.type]
        if info.type.name in _PLAIN:
            return raw.view(_PLAIN[info.type.name])
        step = _SLICE // block * size
        cuts = (raw[at : at + step].reshape(-1, size) for at in range(0, raw.size, step))
        parts = [dequantise(cut, info.type, name).reshape(-1) for cut in cuts]
        return np.concatenate(parts)
