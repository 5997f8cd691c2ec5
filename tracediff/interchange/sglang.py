"""A folder that sglang's dumper wrote (sglang/srt/debug_utils/dumper.py): a .pt file per tensor.

File names are tags, `step=0___rank=0___dump_index=7___name=..._.pt`, the content `{"value": tensor, "meta": {...}}`;
older versions wrote `forward_pass_id` for `step` and the tensor alone. Modules that it hooks by itself are called
`non_intrusive__model.layers.0.mlp.down_proj.output`. Or the folder of --debug-tensor-dump-output-folder, which has for
each rank TP0_PP0_Rank0_pidN/ with a file PassNNNNN.pt for each pass (debug_utils/tensor_dump_forward_hook.py).
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile, is_zipfile

import numpy as np

from tracediff.errors import InterchangeError
from tracediff.interchange.entry import ROWS, Array, Entry, Say, check_unpacked, files, reading
from tracediff.interchange.naming import meaning, split_layer
from tracediff.interchange.tensors import from_torch, unusual
from tracediff.interchange.together import UNEQUAL, Load, together

_STEPS = ("step", "forward_pass_id", "curr_step")  # newest first
_LOGITS, _IDS = "logits_processor", ".input_ids"
_PASS, _RANK = re.compile(r"Pass\d{1,9}\.pt"), re.compile(r"TP(\d{1,6})_")
_COUNTERS = ("seq_lens", "req_pool_indices", "rids", "cu_seqlens_q")  # the scheduler's, dumped with the tokens


def entries(folder: Path, say: Say) -> Iterator[Entry]:
    """One entry per value, in the order of dumping; steps are numbered from 0, ranks put together.

    Raises InterchangeError where a rank lacks what another has.
    """
    found = files(folder, "*.pt", "sglang's .pt files")
    passes = [path for path in found if _PASS.fullmatch(path.name)]
    dumped = _of_passes(folder, passes) if passes else _of_dumper(found)
    numbers = {step: i for i, step in enumerate(sorted({key.step for key, _, _ in dumped}))}
    if any(step != i for step, i in numbers.items()):
        say(f"sglang's steps {', '.join(map(str, numbers))} are numbered from 0 here")
    ranks = sorted({rank for _, rank, _ in dumped})
    for (rank, key), n in Counter((rank, key) for key, rank, _ in dumped).items():
        if n > 1:
            raise InterchangeError(
                f"{folder}: {key.name!r} of pass {key.step} was dumped {n} times by rank {rank}: by {n} runs. Give the "
                "folder of one."
            )
    of_rank = {rank: {key: load for key, of, load in dumped if of == rank} for rank in ranks}
    for key, load in of_rank[ranks[0]].items():
        lacking = [rank for rank in ranks if key not in of_rank[rank]]
        if lacking:
            raise InterchangeError(f"{folder}: rank {lacking[0]} has no {key.name!r}. Give the files of all ranks.")
        known = meaning(key.name, ("sglang",))
        no_op = "the scheduler's bookkeeping" if key.name.rpartition(".")[2] in _COUNTERS else known.no_op
        if len(ranks) > 1 and not no_op:
            whole = together(known.op, [of_rank[rank][key] for rank in ranks])
            load, no_op = whole or load, None if whole else UNEQUAL
        if key.name == _LOGITS:
            yield from _of_last_token(numbers[key.step], key, load, of_rank[ranks[0]])
        else:
            yield Entry(numbers[key.step], key.name, load, None if no_op else known.op, no_op, known.whose)


def _of_last_token(step: int, key: "_Key", load: Load, loads: "dict[_Key, Load]") -> Iterator[Entry]:
    """Logits are made of the last token of a pass alone."""
    yield Entry(step, key.name, load, "output")
    ids = next((one for other, one in loads.items() if other.step == key.step and other.name.endswith(_IDS)), None)
    n = ids().values.size if ids else 1
    if n > 1:
        yield Entry(step, key.name + ROWS, partial(Array, np.array([n - 1]), "int64"))


class _Key(NamedTuple):
    """A value that was dumped; `again` counts those of one name in a step."""

    step: int
    name: str
    again: int


_Dumped = list[tuple[_Key, int, Load]]  # values with the ranks that hold them


def _of_dumper(paths: Sequence[Path]) -> _Dumped:
    dumps = [(path, _tags(path)) for path in paths]
    found: _Dumped = []
    seen: Counter[tuple[int, int, str]] = Counter()
    for path, tags in sorted(dumps, key=lambda dump: int(dump[1].get("dump_index", 0))):
        rank, step, name = int(tags.get("rank", 0)), _step(path, tags), _name(path, tags)
        found.append((_Key(step, name, seen[rank, step, name]), rank, partial(_load, path)))
        seen[rank, step, name] += 1
    world = _world_size(paths[0])
    ranks = {rank for _, rank, _ in found}
    if len(ranks) < world:
        raise InterchangeError(
            f"{paths[0].parent}: dumps of {len(ranks)} of {world} ranks: each holds a part. Give the files of all "
            "ranks, or dump with --tp-size 1."
        )
    return found


def _of_passes(folder: Path, paths: Sequence[Path]) -> _Dumped:
    """What --debug-tensor-dump-output-folder wrote: a dictionary of tensors a pass, in a folder a rank."""
    found: _Dumped = []
    for path in paths:
        rank = _RANK.match(path.parent.name)
        content = _loaded(path)
        if not isinstance(content, dict):
            raise InterchangeError(f"{path}: it holds no tensors by name. Give the folder that sglang wrote.")
        for name, value in content.items():
            several = value if isinstance(value, list | tuple) else None
            for i, one in enumerate(several or [value]):
                key = _Key(int(path.stem[4:]), f"{name}.output.{i}" if several else str(name), 0)
                found.append((key, int(rank[1]) if rank else 0, partial(_tensor, path, one)))
    return found


def _tags(path: Path) -> dict[str, str]:
    tags = dict(part.partition("=")[::2] for part in path.name.removesuffix(".pt").split("___"))
    if not tags.get("name") or not all(tags.get(key, "0").isdecimal() for key in ("dump_index", "rank")):
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


def _world_size(path: Path) -> int:
    content = _loaded(path)
    meta = content.get("meta") if isinstance(content, dict) else None
    size = meta.get("world_size") if isinstance(meta, dict) else None
    return size if isinstance(size, int) else 1


def _load(path: Path) -> Array:
    content = _loaded(path)
    return _tensor(path, content.get("value") if isinstance(content, dict) else content)


def _loaded(path: Path) -> Any:
    import torch

    with reading(path, "a tensor saved by torch.save"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse, nested and quantised tensors may change one day
        if is_zipfile(path):
            with ZipFile(path) as archive:
                check_unpacked(path, sum(member.file_size for member in archive.infolist()))
        return torch.load(path, map_location="cpu", weights_only=True)


def _tensor(path: Path, value: Any) -> Array:
    import torch

    if not isinstance(value, torch.Tensor):
        raise InterchangeError(f"{path}: it holds no tensor but {type(value).__name__}. Leave the file out.")
    if kind := unusual(value):
        raise InterchangeError(f"{path}: it holds a {kind} tensor. Save it as a plain one, with to_dense() say.")
    check_unpacked(path, value.nbytes)  # a view of a few values may stand for any number
    return from_torch(value)
