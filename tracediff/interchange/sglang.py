"""A folder that sglang's dumper wrote (sglang/srt/debug_utils/dumper.py): a .pt file per tensor.

File names are tags, `step=0___rank=0___dump_index=7___name=..._.pt`, the content `{"value": tensor, "meta": {...}}`;
older versions wrote `forward_pass_id` for `step` and the tensor alone. Modules that it hooks by itself are called
`non_intrusive__model.layers.0.mlp.down_proj.output`.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from zipfile import ZipFile, is_zipfile

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import Array, Entry, Say, check_unpacked, files, reading
from tracediff.interchange.naming import meaning, split_layer
from tracediff.interchange.tensors import from_torch, unusual

_STEPS = ("step", "forward_pass_id", "curr_step")  # newest first
_COUNTERS = ("seq_lens", "req_pool_indices", "rids", "cu_seqlens_q")  # the scheduler's, dumped with the tokens


def entries(folder: Path, say: Say) -> Iterator[Entry]:
    """One entry per file, in the order of dumping; steps are numbered from 0. Raises InterchangeError for shards."""
    dumps = [(path, _tags(path)) for path in files(folder, "*.pt", "sglang's .pt files")]
    ranks = {tags.get("rank", "0") for _, tags in dumps}
    if len(ranks) > 1:
        raise InterchangeError(
            f"{folder}: dumps of {len(ranks)} ranks: each holds a shard. Dump with --tp-size 1, or give the files of "
            "one rank whose tensors are whole."
        )
    numbers = {step: i for i, step in enumerate(sorted({_step(path, tags) for path, tags in dumps}))}
    if any(step != i for step, i in numbers.items()):
        say(f"sglang's steps {', '.join(map(str, numbers))} are numbered from 0 here")
    for path, tags in sorted(dumps, key=lambda dump: int(dump[1].get("dump_index", 0))):
        name = _name(path, tags)
        known = meaning(name, ("sglang",))
        no_op = "the scheduler's bookkeeping" if name in _COUNTERS else known.no_op
        yield Entry(numbers[_step(path, tags)], name, partial(_load, path), known.op, no_op, known.whose)


def _tags(path: Path) -> dict[str, str]:
    tags = dict(part.partition("=")[::2] for part in path.name.removesuffix(".pt").split("___"))
    if not tags.get("name") or not tags.get("dump_index", "0").isdecimal():
        raise InterchangeError(
            f"{path}: the name of a file by sglang's dumper is step=0___rank=0___dump_index=1___name=NAME.pt. "
            "Give the folder of one dump, without other .pt files."
        )
    return tags


def _step(path: Path, tags: dict[str, str]) -> int:
    number = next((tags[key] for key in _STEPS if key in tags), "0")
    if not number.isdecimal():
        raise InterchangeError(f"{path}: its step is {number!r}. Give the folder of a dump that numbers its steps.")
    return int(number)


def _name(path: Path, tags: dict[str, str]) -> str:
    """The tag `name`; where it says no layer and the tag `layer_id` does, `layers.N.` is put before it."""
    name = tags["name"].removeprefix("non_intrusive__")
    if "layer_id" in tags and split_layer(name)[1] is None:
        return f"layers.{tags['layer_id']}.{name}"
    return name


def _load(path: Path) -> Array:
    import torch

    with reading(path, "a tensor saved by torch.save"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse, nested and quantised tensors may change one day
        if is_zipfile(path):
            with ZipFile(path) as archive:
                check_unpacked(path, sum(member.file_size for member in archive.infolist()))
        content = torch.load(path, map_location="cpu", weights_only=True)
    value = content.get("value") if isinstance(content, dict) else content
    if not isinstance(value, torch.Tensor):
        raise InterchangeError(f"{path}: it holds no tensor but {type(value).__name__}. Leave the file out.")
    if kind := unusual(value):
        raise InterchangeError(f"{path}: it holds a {kind} tensor. Save it as a plain one, with to_dense() say.")
    check_unpacked(path, value.nbytes)  # a view of a few values may stand for any number
    return from_torch(value)
