"""Where a mistake is, in words that are true of every op they name, and leave none out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tracediff.english import few, listed
from tracediff.english import runs as runs_of
from tracediff.names import NORMS, layer_of, local_name, plain_step
from tracediff.result import OpResult

MATMULS = {"linear", "linear_id"}
# What all ops of a kind are called together.
WHOLE = (({*NORMS}, "norms"), (MATMULS, "matmuls"))
_LISTED = 6  # runs of layers that are told, and places of other steps


def of_ops(ops: Sequence[OpResult], among: Iterable[OpResult]) -> str:
    """Names and layers: of all norms, of all matmuls with weights of one type, or one by one. `among` all of them."""
    names = {op.op for op in ops}
    among = list(among)
    types = {op.local.weight_type if op.local else None for op in ops}
    if len({local_name(name) for name in names}) > 1:
        for kinds, what in WHOLE:
            every = [op for op in among if op.kind in kinds]
            if names == {op.op for op in every}:
                return f"all {len(names)} {what}"
        (one, *others) = types
        every = [op for op in among if op.local and op.local.weight_type == one]
        if one and not others and names == {op.op for op in every}:
            return f"every {one} tensor ({len(names)})"
        if one and not others and names == {op.op for op in matmuls_of(one, among)}:
            return f"all {len(names)} matmuls of {one} weights"
    return of_names([*dict.fromkeys(op.op for op in ops)], (op.op for op in among))


def matmuls_of(type_: str, ops: Iterable[OpResult]) -> Iterator[OpResult]:
    """Those that were judged by themselves, whose weights have this type."""
    for op in ops:
        if op.kind in MATMULS and op.local and len(op.local.segment) <= 1 and op.local.weight_type == type_:
            yield op


def of_weights(types: Mapping[str, str | None], among: Mapping[str, str | None], recorded: bool = False) -> str:
    """All tensors of a type, all norm weights, or one by one; both are names with types in the file, `among` those that
    were looked at: all of it, or what was `recorded`.
    """
    names, (kind, *others) = {*types}, {*types.values()}
    if len(names) == 1:
        return names.pop()
    if len({local_name(name) for name in names}) > 1:
        if kind and not others and names == {name for name in among if among[name] == kind}:
            return f"every {kind} tensor{' that was recorded' * recorded} ({len(names)})"
        if names == {name for name in among if "norm" in name}:
            return f"all {len(names)} norm weights{' that were recorded' * recorded}"
    return of_names([*types], among)


def of_names(names: Sequence[str], among: Iterable[str]) -> str:
    """Names of ops or weights, those with the same layers together: "attn_q and attn_k in layers 0 to 3, output"."""
    known: dict[str, set[int]] = {}
    for name in among:
        if (layer := layer_of(name)) is not None:
            known.setdefault(local_name(name), set()).add(layer)
    layers: dict[str, set[int]] = {}
    for name in names:
        if (layer := layer_of(name)) is not None:
            layers.setdefault(local_name(name), set()).add(layer)
    alike: dict[str, list[str]] = {}
    every = set().union(*known.values())
    for local, held in layers.items():
        alike.setdefault(of_layers(held, known.get(local, held), every), []).append(local)
    places = [f"{listed(local, len(local))} in {where}" for where, local in alike.items()]
    outside = [name for name in names if layer_of(name) is None]
    places += [listed(outside, len(outside))] if outside else []
    return ", and ".join(places)


def of_layers(layers: set[int], known: set[int], every: set[int]) -> str:
    """Layers, of those that are `known` to have what is said of them, which may not be `every` one."""
    if len(layers) == 1:
        return f"layer {min(layers)}"
    if layers >= known:
        if not layers >= every:
            return f"layers {runs(layers)}"
        return "both layers" if len(layers) == 2 else f"all {len(layers)} layers"
    return f"{len(layers)} of {len(known)} layers ({runs(layers)})"


def runs(numbers: Iterable[int]) -> str:
    """1, 2, 3, 7 -> "1 to 3, 7"; many are cut."""
    joined = {0: "{a}", 1: "{a}, {b}"}
    said = [
        joined.get(b - a, "{a} to {b}").format(a=plain_step(a) if a != b else a, b=b)
        for a, b in runs_of(sorted(numbers))
    ]
    return cut(said)


def cut(parts: Sequence[str], between: str = ", ") -> str:
    """The first of many."""
    return few(parts, _LISTED, between)
