"""A Hugging Face checkpoint beside a GGUF file: its safetensors read tensor by tensor, named and laid out as GGUF's."""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tracediff.errors import ModelError
from tracediff.inputs import require_file
from tracediff.model.conversion import PACKED, sources_of
from tracediff.model.gguf_file import GGUFFile

# Buffers that old checkpoints hold and every engine computes: rope's angles, causal masks.
_COMPUTED = re.compile(r"rotary_(pos_)?emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$")


class Checkpoint:
    """The tensors of a folder of safetensors files, memory-mapped, by the names that `file` gives them.

    `unnamed` are those that the architecture has no GGUF name for, `beyond` those of a layer more than the file has,
    and `unknown` names of tensors of which it is not known how they are made. Raises ModelError for a folder without
    any, and where two files hold other values of one tensor: which of them the GGUF file was made from nobody can tell.
    """

    def __init__(self, folder: Path, file: GGUFFile) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self._file = file
        self._shards: dict[str, tuple[Any, Path]] = {}  # where the tensor of each key is
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise ModelError(f"{folder}: no *.safetensors file in this folder. Give the folder of the checkpoint.")
        for shard in shards:
            try:
                opened: Any = safe_open(require_file(shard), "pt")
            except (SafetensorError, OSError) as error:
                said = error.strerror if isinstance(error, OSError) and error.strerror else error
                raise ModelError(f"{shard}: not a safetensors file: {said}. Download it again.") from None
            for key in opened.keys():  # noqa: SIM118 - not a dict
                self._add(key, opened, shard)
        scales = {scale for key in self._shards if (scale := self._scale(key))}
        packed = {key: None for key in self._shards if self._slice(key).get_dtype() == "U8"}  # two values in a byte
        sources = sources_of(file, [key for key in self._shards if key not in scales and key not in packed])
        self._sources, self.unnamed = sources.known, [*sources.unnamed, *packed]
        self.beyond, self.unknown = sources.beyond, sources.unknown

    def _add(self, key: str, opened: Any, shard: Path) -> None:
        if _COMPUTED.search(key):
            return
        if key in self._shards:
            before, at = self._shards[key]
            x, y = (of.get_tensor(key) for of in (before, opened))
            if x.shape != y.shape or not (x == y).all():
                raise ModelError(
                    f"{self.folder}: {at.name} and {shard.name} hold other values of {key}. Move the one away that the "
                    "GGUF file was not made from."
                )
        self._shards[key] = opened, shard

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def names(self) -> list[str]:
        """GGUF names of the tensors."""
        return list(self._sources)

    def storage(self, name: str) -> str:
        """The type that it is stored in, as in BF16."""
        return str(self._slice(self._sources[name].keys[0]).get_dtype())

    def get(self, name: str) -> np.ndarray:
        """The values in GGUF's layout, float32 or what they are stored in."""
        source = self._sources[name]
        return source.of([self._values(key) for key in source.keys])

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor in GGUF's layout, outermost first: as the file has it, where it does."""
        if name in self._file.tensors:
            return tuple(self._file.tensors[name].shape)
        return tuple(self._slice(self._sources[name].keys[0]).get_shape())

    def head(self, name: str) -> np.ndarray:
        """Its first row; of a vector its first value."""
        source = self._sources[name]
        if source.keeps_first and not self._scale(source.keys[0]):
            return self._slice(source.keys[0])[:1].double().numpy().reshape(-1)
        return self.get(name)[:1].astype(np.float64).reshape(-1)

    def is_packed(self, key: str) -> bool:
        """Whether it is a part of values that are packed."""
        return self._slice(key).get_dtype() in ("U8", "I32") or bool(PACKED.search(key))

    def n_values(self, key: str) -> int:
        """How many the tensor of a key has."""
        return int(np.prod(self._slice(key).get_shape()))

    def _slice(self, key: str) -> Any:
        return self._shards[key][0].get_slice(key)

    def _scale(self, key: str) -> str | None:
        """The key of what values in eight bits are multiplied by: one number, of each row, or of each block."""
        if not self._slice(key).get_dtype().startswith(("F8", "I8")):
            return None
        return next((name for name in (f"{key}_scale_inv", f"{key}_scale") if name in self._shards), None)

    def _values(self, key: str) -> np.ndarray:
        tensor = self._shards[key][0].get_tensor(key)
        values = (tensor.float() if tensor.dtype.itemsize < 4 else tensor).numpy()
        return values * self._over(values.shape, self._values(scale)) if (scale := self._scale(key)) else values

    @cached_property
    def _block(self) -> Sequence[int]:
        """Of how many values along each axis a scale is, as config.json says; nothing where it does not."""
        try:
            config = json.loads((self.folder / "config.json").read_text())
            return [int(size) for size in config["quantization_config"]["weight_block_size"]]
        except (OSError, ValueError, KeyError, TypeError):
            return ()

    def _over(self, shape: tuple[int, ...], scale: np.ndarray) -> np.ndarray:
        """The scale of each value: of all, of each row, or of blocks, the last along an axis cut short."""
        if scale.ndim == 1 < len(shape):
            scale = scale[:, None]
        for axis, (size, n) in enumerate(zip(shape, scale.shape, strict=False)):
            if 1 < n < size:
                block = self._block[axis] if axis < len(self._block) else 1 << (-(-size // n) - 1).bit_length()
                scale = np.repeat(scale, block, axis)[(slice(None),) * axis + (slice(size),)]
        return scale
