"""A .safetensors file of tensors named by op, `stepN/` in front where there are several steps."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tracediff.interchange.entry import Array, Entry, Say, reading
from tracediff.interchange.naming import split_step
from tracediff.interchange.tensors import from_torch

_WHAT = "a .safetensors file"


def entries(path: Path, say: Say) -> Iterator[Entry]:
    """One entry per tensor, read when it is loaded from the file, which stays open."""
    with reading(path, _WHAT):
        file: Any = safe_open(path, framework="pt")
        keys = list(file.keys())
    for key in keys:
        step, name = split_step(key)
        yield Entry(step, name, partial(_load, path, file, key))


def _load(path: Path, file: Any, key: str) -> Array:
    with reading(path, _WHAT):
        return from_torch(file.get_tensor(key))
