"""A Hugging Face checkpoint beside a GGUF file: its safetensors read tensor by tensor, named and laid out as GGUF's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from tracediff.errors import ModelError
from tracediff.inputs import require_file
from tracediff.model.gguf_file import GGUFFile
from tracediff.model.pairing import neighbours

# convert_hf_to_gguf.py (LlamaModel.permute, which the others inherit or call) lays out each head of Q and K for rope on
# neighbours; checkpoints pair halves. The whole head is permuted, whatever part of it is rotated.
PERMUTED_ARCHITECTURES = (
    "llama", "arcee", "arctic", "cogvlm", "deci", "deepseek", "granite", "granite_swa", "granitemoe", "llada",
    "llama-embed", "minicpm", "mistral3", "nanbeige", "olmo", "smollm3", "xverse",
)  # fmt: skip
PERMUTED_OPS = ("attn_q", "attn_k", "attn_q_rope", "attn_k_rope")
_COMPUTED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints hold and every engine computes


class Checkpoint:
    """The tensors of a folder of safetensors files, memory-mapped, by the names that `file` gives them.

    `unnamed` are those that the architecture has no GGUF name for. Raises ModelError for a folder without any, and
    where two files hold other values of one tensor: which of them the GGUF file was made from nobody can tell.
    """

    def __init__(self, folder: Path, file: GGUFFile) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.unnamed: list[str] = []
        self._places: dict[str, tuple[Any, str]] = {}
        self._shards: dict[str, Path] = {}
        names = _name_map(file)
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
                self._add(key, names.get_name(key, try_suffixes=(".weight", ".bias")), opened, shard)
        self._permuted = head_counts(file) if _arch(file) in PERMUTED_ARCHITECTURES else {}

    def _add(self, key: str, name: str | None, opened: Any, shard: Path) -> None:
        if key.endswith(_COMPUTED):
            return
        if name is None:
            self.unnamed.append(key)
            return
        if name in self._places and not _same(self._places[name], (opened, key)):
            raise ModelError(
                f"{self.folder}: {self._shards[name].name} and {shard.name} hold other values of {key}. Move the one "
                "away that the GGUF file was not made from."
            )
        self._places[name], self._shards[name] = (opened, key), shard

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """GGUF names of the tensors."""
        return list(self._places)

    def storage(self, name: str) -> str:
        """The type that it is stored in, as in BF16."""
        opened, key = self._places[name]
        return str(opened.get_slice(key).get_dtype())

    def get(self, name: str) -> np.ndarray:
        """The values in GGUF's layout, float32 or what they are stored in."""
        opened, key = self._places[name]
        tensor = opened.get_tensor(key)
        values = (tensor.float() if tensor.dtype.itemsize < 4 else tensor).numpy()
        if name not in self._permuted:
            return values
        return neighbours(values, values.shape[0] // self._permuted[name], 0)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor, outermost first."""
        opened, key = self._places[name]
        return tuple(opened.get_slice(key).get_shape())

    def head(self, name: str) -> np.ndarray:
        """Its first row, which no permutation moves; of a vector its first value."""
        opened, key = self._places[name]
        return opened.get_slice(key)[:1].double().numpy().reshape(-1)


def _same(a: tuple[Any, str], b: tuple[Any, str]) -> bool:
    """Whether two places, each an opened file and a key, hold the same values."""
    x, y = (opened.get_tensor(key) for opened, key in (a, b))
    return bool(x.shape == y.shape and (x == y).all())


def head_counts(file: GGUFFile) -> Mapping[str, int]:
    """Heads of each Q and K tensor; none where the metadata does not say."""
    arch, n_layer = _arch(file), _n_layer(file)
    q = file.metadata.get(f"{arch}.attention.head_count")
    kv = file.metadata.get(f"{arch}.attention.head_count_kv", q)
    return {
        f"blk.{layer}.attn_{x}.{kind}": heads
        for layer in range(n_layer)
        for x, heads in (("q", q), ("k", kv))
        for kind in ("weight", "bias")
        if isinstance(heads, int)
    }


def _arch(file: GGUFFile) -> str:
    return str(file.metadata.get("general.architecture"))


def _n_layer(file: GGUFFile) -> int:
    return int(file.metadata.get(f"{_arch(file)}.block_count", 0))


def _name_map(file: GGUFFile) -> Any:
    names = tensor_names(_arch(file), _n_layer(file))
    if names is None:
        raise ModelError(f"{file.path}: gguf-py knows no tensor names of the architecture {_arch(file)!r}.")
    return names


def tensor_names(arch: str, n_layer: int) -> Any:
    """gguf-py's table of what checkpoints call the tensors of an architecture; None of one that it does not know."""
    known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(known[arch], n_layer) if arch in known else None
