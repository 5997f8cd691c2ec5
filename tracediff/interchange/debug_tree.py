"""The tree that transformers' model debugger writes: NAME_debug_tree_FULL_TENSORS.json (or _SUMMARY.json).

`model_addition_debugger_context(model, debug_path, do_prune_layers=False, use_repr=False)` puts the tensors in
safetensors files beside it, which are read; with use_repr=True it prints them shortened, and what is left is their
statistics. Leaves have outputs; what a norm is given is the residual stream (transformers/model_debugging_utils.py).
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tracediff.errors import InterchangeError
from tracediff.interchange import safetensors_file
from tracediff.interchange.entry import Array, Entry, Say, Summary, from_json, in_form, reading, summary
from tracediff.interchange.naming import meaning, split_layer

_NUMBER = re.compile(r"tensor\(\s*([-+.\w]+)")
_SHAPE = re.compile(r"torch\.Size\(\[([\d, ]*)\]\)")
_GIVEN = {"input_layernorm": "ffn_residual", "post_attention_layernorm": "attn_residual"}  # what each norm reads
_IDS = "input_ids"


def entries(path: Path, say: Say) -> Iterator[Entry]:
    """Outputs of leaves, what norms were given, and the input ids. Raises InterchangeError for what is no tree."""
    with reading(path, "JSON"):
        root = from_json(path.read_text(encoding="utf-8"))
    if not isinstance(root, dict) or "module_path" not in root:
        raise InterchangeError(f"{path}: no debug tree: it begins with no module_path. Give NAME_debug_tree_*.json.")
    with in_form(path, "what the model debugger writes"):
        yield from [*_of_tree(path, root, say)]


def _of_tree(path: Path, root: Mapping[str, Any], say: Say) -> Iterator[Entry]:
    nodes = [*_nodes(root)]
    _say_pruned(nodes, say)
    if ids := _tensor((root.get("inputs") or {}).get("kwargs", {}).get(_IDS)):
        yield from _entry(path, _IDS, ids) if _file(ids) else ()
    for node in nodes:
        name = str(node["module_path"]).partition(".")[2]
        if out := _tensor(node.get("outputs")):
            yield from _entry(path, name, out)
        op, given = _given(name), _tensor((node.get("inputs") or {}).get("args"))
        if op and given:
            yield from _entry(path, f"{name}.input", given, op)


def _nodes(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for child in node.get("children", ()):
        yield child
        yield from _nodes(child)


def _say_pruned(nodes: list[Mapping[str, Any]], say: Say) -> None:
    layers = sorted({n for node in nodes if (n := split_layer(str(node["module_path"]))[1]) is not None})
    if layers and len(layers) <= layers[-1]:
        say(f"the tree holds layers {', '.join(map(str, layers))} alone: do_prune_layers=False keeps all")


def _given(name: str) -> str | None:
    """The op whose output a norm is given: the residual stream before it."""
    pattern, layer = split_layer(name)
    if layer is None:
        return None
    local = _GIVEN.get(pattern.rpartition(".")[2])
    before = layer - 1 if local == "ffn_residual" else layer
    return f"blk.{before}.{local}" if local and before >= 0 else None


def _tensor(value: Any) -> Mapping[str, Any] | None:
    """The first tensor of what a module was given or returned."""
    if isinstance(value, dict):
        return value if "shape" in value and "dtype" in value else None
    return next((found for part in value if (found := _tensor(part))), None) if isinstance(value, list) else None


def _file(tensor: Mapping[str, Any]) -> str | None:
    value = tensor.get("value")
    return value if isinstance(value, str) and value.endswith(".safetensors") else None


def _entry(path: Path, name: str, tensor: Mapping[str, Any], op: str | None = None) -> Iterator[Entry]:
    known = meaning(name)
    whose = "transformers" if op is None and known.op else None
    op = op or known.op
    file = _file(tensor)
    if file:
        yield Entry(0, name, partial(_saved, path.parent / Path(file).name), op, known.no_op, whose)
    elif "mean" in tensor:
        yield Entry(0, name, partial(_printed, path, name, tensor), op, known.no_op, whose)


def _saved(path: Path) -> Array | Summary:
    found = [*safetensors_file.entries(path, lambda line: None)]
    if len(found) != 1:
        raise InterchangeError(f"{path}: {len(found)} tensors, where the debugger writes one. Give its own files.")
    return found[0].load()


def _printed(path: Path, name: str, tensor: Mapping[str, Any]) -> Summary:
    """Of what it prints; torch's deviation divides by n - 1."""
    shape = _SHAPE.search(str(tensor["shape"]))
    numbers = {key: _NUMBER.match(str(tensor.get(key))) for key in ("mean", "std", "min", "max")}
    if not shape or not all(numbers.values()):
        raise InterchangeError(f"{path}: {name} is no tensor as the debugger prints it. Give the file as it is.")
    with in_form(path, "numbers as the debugger prints them"):
        sizes = tuple(int(n) for n in shape[1].split(",") if n.strip())
        told = {key: float(found[1]) for key, found in numbers.items() if found}
    n = math.prod(sizes)
    std = told.pop("std") * math.sqrt((n - 1) / n) if n > 1 else 0.0
    return summary(sizes, {**told, "rms": math.hypot(told["mean"], std)})
