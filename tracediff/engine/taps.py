"""Which module of a torch model computes which op: told by the names of its weights, and by the weights themselves.

gguf-py's table knows what checkpoints call their tensors. Where it does not know a name, or a module holds several
tensors of the file side by side (`qkv_proj`, `gate_up_proj`), or its rows in another order, the rows themselves say it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tracediff.engine.matrices import evenly, looked_at, to_be_found, weight_of
from tracediff.errors import EngineError
from tracediff.model.conversion import tensor_names
from tracediff.model.graph import Graph, Op
from tracediff.model.weights import Weights
from tracediff.names import NORMS, layer_of, local_name

_KINDS = ("linear", *NORMS, "embedding")  # of ops that are a module in every torch model
NORMED = (*NORMS, "scale", "clamp")  # between a projection and rope
_SAMPLES = 64  # rows that are compared to see whether all are in the file's order
_ALIKE = 0.9  # cosine: two bits a weight leave 0.95 of a row, and two rows of a model have less than 0.5 in common
_LAYER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)")


Heads = tuple[int, ...]  # of each head of the file's the one of the model's that it is


@dataclass(frozen=True, slots=True)
class Tap:
    """The op's output is the channels `rows` of what the module at `path` puts out; None: all, as they are."""

    path: str
    op: Op
    rows: Tensor | None = None

    def of(self, output: Tensor) -> Tensor:
        """The op's values, [..., n] in the file's order."""
        return output if self.rows is None else output.index_select(-1, self.rows.to(output.device))


@dataclass(frozen=True, slots=True)
class Taps:
    """Each op that a module computes; in which order a layer's heads lie where that is not the file's, and what a
    reader must know: modules that hold other weights than the file.
    """

    taps: list[Tap]
    heads: Mapping[int, Heads]
    notes: list[str]


def find_taps(model: nn.Module, graph: Graph, weights: Weights) -> Taps:
    """What the modules of `model` compute of the graph.

    Raises EngineError for a module whose weight has another shape than the tensor of its name.
    """
    by_weight = {op.name: op for op in graph if op.kind in _KINDS and op.weights}
    taps, notes, unlike = [], [], []
    modules = dict(model.named_modules())
    named = _named(modules, graph, by_weight, weights)
    wider: dict[str, EngineError] = {}  # what is wrong, if the rows tell no op
    for path, op in named.items():
        if (held := to_be_found(modules[path])) is None:
            continue
        if not _fits(held, op):
            misfit = EngineError(
                f"{path} is {list(held.shape)} in this model, {list(op.weights[0].shape)} in the GGUF file "
                f"({op.weights[0].name}): it is another model, or a part of one. Check both."
            )
            if not _may_hold_several(held, op):
                raise misfit
            wider[path] = misfit
            continue
        found, rows = _order(held, op, weights)
        taps.append(Tap(path, op, rows))
        unlike += [taps[-1]] * (not found)
        by_weight.pop(op.name)
    unnamed = [(path, module) for path, module in modules.items() if path not in named or path in wider]
    for path, module in unnamed:
        if (weight := to_be_found(module)) is None:
            continue
        embeds = isinstance(module, nn.Embedding)  # a head may hold the same
        ops = [
            op for op in by_weight.values() if _layer(op.name) == _layer(path) and (op.kind == "embedding") == embeds
        ]
        lying = list(_held(weight, ops, weights))
        taps += [Tap(path, op, rows) for op, rows in lying]
        for op, _ in lying:
            by_weight.pop(op.name)
    known = {tap.path for tap in taps}
    if misfits := [misfit for path, misfit in wider.items() if path not in known]:
        raise misfits[0]
    elsewhere = list(_as_elsewhere(taps, [path for path, _ in unnamed], by_weight))
    heads = _heads(taps)
    for tap in (*unlike, *elsewhere):
        if not _holds_columns(modules[tap.path], tap.op, weights, heads.get(_layer(tap.path) or 0)):
            notes.append(f"{tap.path} holds other weights than {tap.op.weights[0].name}")
    taps, others = _in_order([*taps, *elsewhere], graph, heads)
    order = graph.places()
    return Taps(sorted(taps, key=lambda tap: order[tap.op.name]), heads, [*notes, *others])


def _may_hold_several(held: Tensor, op: Op) -> bool:
    """Whether a module that does not fit the op of its name may hold others side by side, as what vLLM's engines call
    `gate_up_proj`: gguf-py's table knows one of both.
    """
    return held.ndim == 2 and held.shape[1:] == op.weights[0].shape[1:]


def _names(graph: Graph) -> Any:
    """The op that the module at a path computes by gguf-py's table, whatever the model is wrapped in."""
    table = tensor_names(graph.hparams.arch, graph.hparams.n_layer)

    def name(path: str) -> str | None:
        while path and table:
            if found := table.get_name(f"{path}.weight", try_suffixes=(".weight",)):
                return found.removesuffix(".weight")
            path = path.partition(".")[2]
        return None

    return name


def _named(modules: Mapping[str, nn.Module], graph: Graph, by_weight: dict[str, Op], weights: Weights) -> dict[str, Op]:
    """By path the modules whose names say which op they compute. Of several of one name, as of those that each layer
    calls `norm`, the one that holds the op's weight; in a layer what belongs to none must hold it anyway.
    """
    names, found = _names(graph), dict[str, list[str]]()
    head = next((name for name in reversed(by_weight) if by_weight[name].kind == "linear"), "")
    for path, module in modules.items():
        name = names(path) or ""
        name = head if name == "output" and name not in by_weight else name
        if name in by_weight and (weight_of(module) is not None or hasattr(module, "out_features")):
            found.setdefault(name, []).append(path)
    named = dict[str, Op]()
    for name, paths in found.items():
        op = by_weight[name]
        sure = [path for path in paths if _layer(path) is None or layer_of(name) is not None]
        if len(paths) > 1 or not sure:
            hold = [path for path in (*sure, *paths) if _holds(modules[path], op, weights)]
            sure = hold or sure
        named |= dict.fromkeys(sure[:1], op)
    return named


def _holds(module: nn.Module, op: Op, weights: Weights) -> bool:
    """Whether the module holds the op's weight."""
    weight = to_be_found(module)
    if weight is None or not _fits(weight, op):
        return False
    return _is_vector(weight, op, weights) if weight.ndim == 1 else _order(weight, op, weights)[0]


def _is_vector(weight: Tensor, op: Op, weights: Weights) -> bool:
    """Whether it is the op's, be it less 1."""
    file = weights.load(op.weights[0]).reshape(weight.shape).to(weight)
    return bool(min((weight - file).norm(), (weight + 1 - file).norm()) < 0.1 * file.norm())


def _layer(path: str) -> int | None:
    """The first number in a path."""
    found = _LAYER.search(path)
    return int(found[0]) if found else None


def _fits(weight: Tensor, op: Op) -> bool:
    """As many columns, and rows enough: some engines pad the vocabulary. Norms of groups may have all in a row."""
    shape = op.weights[0].shape
    if op.kind in NORMS and weight.ndim == 1:
        return weight.numel() == math.prod(shape)
    return weight.shape == shape or (_is_vocabulary(op) and weight.shape[1:] == shape[1:] and len(weight) >= shape[0])


def _is_vocabulary(op: Op) -> bool:
    return op.kind == "embedding" or (layer_of(op.name) is None and op.kind == "linear")


def _order(weight: Tensor, op: Op, weights: Weights) -> tuple[bool, Tensor | None]:
    """Whether the module holds the op's weight, and in which of its rows each of the file's lies; None: as they lie."""
    n = op.weights[0].shape[0]
    cut = torch.arange(n) if _is_vocabulary(op) and op.kind != "embedding" and len(weight) > n else None
    if weight.ndim == 1:
        return True, None
    sample = evenly(n, _SAMPLES)
    file = weights.gather(op.weights[0], sample)
    if bool((_cosines(weight[sample.to(weight.device)], file).diagonal() > _ALIKE).all()):
        return True, cut
    if _is_vocabulary(op):  # whose rows are tokens, in no other order
        return False, cut
    rows = _places(weight, op, weights)
    return rows is not None, rows


def _held(weight: Tensor, ops: list[Op], weights: Weights) -> Iterator[tuple[Op, Tensor | None]]:
    """The ops whose weights a module without a known name holds, each with the rows where they lie."""
    for op in ops:
        shape = op.weights[0].shape
        if weight.ndim == 1 and weight.shape == shape:
            if _is_vector(weight, op, weights):
                yield op, None
                return
        elif weight.ndim == 2 and len(shape) == 2 and weight.shape[1] == shape[1] and len(weight) >= shape[0]:
            if _is_vocabulary(op):
                found, rows = _order(weight, op, weights)
            else:
                rows = _places(weight, op, weights)
                found = rows is not None
            if found:
                yield op, None if rows is not None and torch.equal(rows, torch.arange(len(weight))) else rows


def _as_elsewhere(taps: list[Tap], paths: list[str], left: dict[str, Op]) -> Iterator[Tap]:
    """Modules that hold nothing of the file, taken for what the module of the same name is in another layer."""
    known = {(_LAYER.sub("N", tap.path, 1), local_name(tap.op.name)): tap for tap in taps}
    for path in paths:
        for (pattern, local), tap in known.items():
            op = left.get(f"blk.{_layer(path)}.{local}")
            if op and _LAYER.sub("N", path, 1) == pattern:
                yield Tap(path, op, tap.rows)


def _heads(taps: Sequence[Tap]) -> dict[int, Heads]:
    """In which order the heads of a layer lie, where two matrices and more share one that is not the file's: conversion
    has reordered them (Qwen3.5's value heads). A single matrix in another order is a mistake.
    """
    orders = Counter(
        (layer, heads)
        for tap in taps
        if (layer := layer_of(tap.op.name)) is not None and (heads := _of_heads(tap)) is not None
    )
    return {layer: heads for (layer, heads), n in orders.items() if n > 1}


def _of_heads(tap: Tap) -> Heads | None:
    """The order of the largest runs of rows that a matrix is made of; None where they lie in the file's."""
    if tap.rows is None or tap.op.kind != "linear" or _within_heads(tap) is None:
        return None
    n = len(tap.rows)
    for width in (n // heads for heads in range(2, n + 1) if n % heads == 0):
        runs = tap.rows.reshape(-1, width)
        first = runs[:, 0] // width
        if bool((runs == first[:, None] * width + torch.arange(width)).all()):
            return tuple(first.tolist())
    return None


def _holds_columns(module: nn.Module, op: Op, weights: Weights, heads: Heads | None) -> bool:
    """Whether it holds the op's matrix with its columns in the order of these heads."""
    held = to_be_found(module)
    n = op.weights[0].shape[-1]
    if heads is None or held is None or held.ndim != 2 or held.shape != op.weights[0].shape or n % len(heads):
        return False
    columns = (torch.tensor(heads)[:, None] * (n // len(heads)) + torch.arange(n // len(heads))).flatten()
    file = weights.load(op.weights[0]).to(held)
    return bool((nn.functional.cosine_similarity(held[:, columns.to(held.device)], file, dim=1) > _ALIKE).all())


def _in_order(taps: Sequence[Tap], graph: Graph, heads: Mapping[int, Heads]) -> tuple[list[Tap], list[str]]:
    """Those whose rows lie as they may: in the file's order, be it with others between them, in that of the layer's
    heads, or within heads in another that most Q and K share, as conversion reorders them for rope, also in layers
    without; of what is read in parts in any. What else lies otherwise is taken as it lies, and said: if it were undone,
    what reads it would look wrong.
    """
    orders = {tap.op.name: _within_heads(tap) for tap in taps}
    turned = [tap.op.name for tap in taps if _is_q_or_k(tap.op, graph)]
    counts = Counter(orders[name] for name in turned)
    usual = max(counts, key=lambda order: (counts[order], order is None), default=None)
    kept, notes = [], []
    for tap in taps:
        order = orders[tap.op.name]
        in_parts = any(reader.seen[at] is not None for reader, at in graph.readers(tap.op.name))
        layer = layer_of(tap.op.name)
        as_heads = layer is not None and layer in heads and _of_heads(tap) == heads[layer]
        if order is None or in_parts or as_heads or (order == usual and tap.op.name in turned):
            kept.append(tap)
            continue
        kept.append(replace(tap, rows=cast(Tensor, tap.rows).sort().values))
        notes.append(f"{tap.path} has the rows of {tap.op.weights[0].name} in another order than the file")
    return kept, notes


def _within_heads(tap: Tap) -> tuple[int, ...] | None:
    """The order in which the rows of each head lie, one after the other; that of all where heads differ. None: in the
    file's.
    """
    if tap.rows is None or tap.op.kind != "linear":
        return None
    width, n = tap.op.axes[-1], len(tap.rows)
    known = len(tap.op.axes) == 3 and isinstance(width, int)
    order = tap.rows.argsort()
    for each in [int(width)] if known else [each for each in range(2, n) if n % each == 0]:  # type: ignore[arg-type]
        heads = tap.rows.reshape(-1, each)
        orders, first = heads.argsort(1), heads.amin(1)
        in_turn = bool((first.diff() > 0).all()) and (known or bool((heads.amax(1) < first + each).all()))
        if in_turn and bool((orders == orders[0]).all()):
            order = orders[0]
            break
    return None if bool((order.diff() == 1).all()) else tuple(order.tolist())


def _is_q_or_k(op: Op, graph: Graph) -> bool:
    """Whether what it makes is rotated or multiplied as it is, be it behind a norm."""
    readers = [reader for reader, _ in graph.readers(op.name)]
    normed = NORMED if op.kind == "linear" else ()
    return any(one.kind in ("rope", "scores") or (one.kind in normed and _is_q_or_k(one, graph)) for one in readers)


def _places(weight: Tensor, op: Op, weights: Weights) -> Tensor | None:
    """For each row of the file's matrix the one of `weight` that holds it, [n]; None where any is missing."""
    places = []
    for file in weights.slices(op.weights[0]):
        best = _cosines(file, weight).max(1)
        if not bool((best.values > _ALIKE).all()):
            return None
        places.append(best.indices)
    rows = torch.cat(places)
    return rows if len(rows.unique()) == len(rows) else None


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """Of each row of one with each of the other, [len(a), len(b)], by some of their columns."""
    columns = looked_at(a.shape[1])
    x, y = (nn.functional.normalize(rows[:, columns.to(rows.device)].float().cpu(), dim=1) for rows in (a, b))
    return x @ y.T
