"""How each side computes, as far as replay could tell, and how near it came to its floors."""

import math
from collections import Counter
from collections.abc import Iterator

from tracediff.english import count, listed
from tracediff.findings.words import number
from tracediff.names import local_name
from tracediff.result import Local, OpResult, Result, Said, Storage

_Fits = list[tuple[OpResult, Local]]
_FEW = 3  # names that are listed
_MATMULS = ("linear", "linear_id", "mul_mat", "of_latent", "scores", "weighted_values")
_FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_Places = dict[str, list[OpResult]]  # by arithmetic


def arithmetic(result: Result) -> Iterator[Said]:
    """The roundings that fit, by kind of op, and the margins that were left; what is held in a shorter type."""
    sides: dict[str, _Fits] = {
        "candidate": [(op, op.local) for op in result.ops if op.local],
        "reference": [(op, op.reference_local) for op in result.ops if op.reference_local],
    }
    for name, fits in sides.items():
        yield from (Said("arithmetic", text, of=name) for text in _said(fits))
    if any(sides.values()):
        for one in result.storage:
            yield Said("arithmetic", _held(one), "warning" if one.warns else "plain", one.side)
        yield from (Said("arithmetic", text, of="candidate") for text in _weights(result))


def _said(fits: _Fits) -> Iterator[str]:
    passing = [(op, local) for op, local in fits if not local.faulty]
    by_kind: dict[str, _Places] = {}
    for op, local in passing:
        if op.kind in _MATMULS or len(local.segment) > 1 or local.arithmetic != "exact":
            # Of a segment it is what matmuls in it do: "add activations in float16" of its last op was not true.
            what = op.kind if len(local.segment) == 1 else f"segments up to {local_name(op.op)}"
            by_kind.setdefault(what, {}).setdefault(local.arithmetic, []).append(op)
    if by_kind:
        yield "; ".join(f"{kind} {_together(found)}" for kind, found in by_kind.items())
    requantised = [local.weights_nmse for _, local in passing if local.weights_nmse is not None]
    if requantised:
        least, most = number(min(requantised)), number(max(requantised))
        yield f"weights that it requantised differ from the file's by NMSE {least} to {most}"
    yield from _changes(passing)
    turned = [local.flips for _, local in passing if local.flips]
    if turned:
        were = f"{count(sum(turned), 'activation')} on a rounding boundary"
        yield f"{were} went the other way, in {count(len(turned), 'op')}: a countable event, no fault"
    ties = [local.ties for _, local in passing if local.ties]
    if ties:
        yield (
            f"{count(sum(ties), 'token')} took another expert than exact scores say, in {count(len(ties), 'record')}: "
            "ties within the engine's own rounding, told by what follows them, no fault"
        )
    # Beside what is wrong it may be that, too.
    if (anew := sum(local.made_anew for _, local in passing)) and len(passing) == len(fits):
        made = f"{count(anew, 'record')} of products that were made once more, not of those that were recorded"
        yield f"{made}: a fused kernel, no fault"
    if passing:
        linear = [(op, local) for op, local in passing if op.kind == "linear" and len(local.segment) == 1]
        names = [*dict.fromkeys(local_name(op.op) for op, _ in linear)]
        few = len(names) <= _FEW and any(len(local.segment) > 1 for _, local in passing)
        where = listed(names, _FEW) if few else "a matmul"  # of those between hidden states it says nothing
        shows = max((local.sharpness for _, local in linear), default=0.0)
        error = f"a scale error of {number(shows)}" if math.isfinite(shows) else "no scale error"
        seen = f"; {error} in {where} shows" if linear else ""
        nearest = max(local.excess for _, local in passing)
        yield f"sound ops are within {nearest:.2f} of their bounds{seen}"


def _together(found: _Places) -> str:
    """Arithmetics of one kind of op, in the order of the trace; of those that few ops have alone which these are."""
    names = {arithmetic: {local_name(op.op) for op in ops} for arithmetic, ops in found.items()}
    said = []
    for arithmetic, ops in found.items():
        others = set().union(*(of for other, of in names.items() if other != arithmetic))
        own = [*dict.fromkeys(local_name(op.op) for op in ops)]
        is_told = others and others.isdisjoint(own) and len(own) <= len(others)
        said.append(f"{arithmetic} ({len(ops)}{f': {listed(own, _FEW)}' * bool(is_told)})")
    return " / ".join(said)


_PARTS = {  # of the model, by the kind of op that makes them
    "add": "the residual stream",
    "rms_norm": "what norms give",
    "embedding": "the embedding",
    "softmax": "probabilities",
    "rope": "Q and K",
}


def _held(one: Storage) -> str:
    """What a side holds in a shorter type, and how the other side does it."""
    parts = dict.fromkeys(_PARTS.get(kind, "other ops") for kind in one.kinds)
    what = listed(sorted(parts, key=lambda part: part == "other ops"))
    ops = f"{listed([*one.ops])}: {count(one.records, 'record')}"
    verb = "is" if what in ("the residual stream", "the embedding", "what norms give") else "are"
    every = f"{'nearly ' * (one.records < one.of)}every value is"
    said = f"{every if one.everything else f'{what} ({ops}) {verb}'} held in {_FLOATS[one.type]}"
    if not one.told:
        said += ", by the engine or by who wrote the trace (a sum that is recorded with both of its terms would tell)"
    if not one.warns:
        return said
    other = "reference" if one.side == "candidate" else "candidate"
    return (
        f"{said}, in the {other} in {_FLOATS[one.other or 'f32']}: no fault, but the two drift apart by it "
        f"(NMSE {number(one.nmse)} at the end)"
    )


def _weights(result: Result) -> Iterator[str]:
    """Recorded weights that are the file's in a shorter type."""
    notes = Counter(
        weight.note.partition(" (")[0] for weight in result.weights if weight.status == "rounded" and weight.note
    )
    yield from (
        f"{count(n, 'weight')} that it recorded {'is' if n == 1 else 'are'} {note}" for note, n in notes.items()
    )


def _changes(fits: _Fits) -> Iterator[str]:
    """Ops of one kind and weight type, in steps of one sort, that are not all computed alike."""
    sorts: dict[tuple[str, str | None, bool], _Places] = {}
    for op, local in fits:
        if len(local.segment) == 1 and op.kind in _MATMULS:
            places = sorts.setdefault((op.kind, local.weight_type, local.one_token), {})
            places.setdefault(local.arithmetic, []).append(op)
    changes: dict[tuple[str, str], list[str]] = {}  # in which steps each is so
    for (kind, weight_type, one_token), places in sorts.items():
        if len(places) > 1:
            most_first = sorted(places.items(), key=lambda item: -len(item[1]))
            said = ", ".join(f"{name} in {_where(ops)}" for name, ops in most_first)
            what = f"{kind} ({weight_type})" if weight_type else kind
            changes.setdefault((what, said), []).append(
                f", in steps of {'one token' if one_token else 'several tokens'}"
            )
    for (what, said), steps in changes.items():
        yield f"it changes: {what}{steps[0] if len(steps) == 1 else ''}: {said}"


def _where(ops: list[OpResult]) -> str:
    """Layers, or the ops that are in none."""
    layers = sorted({op.layer for op in ops if op.layer is not None})
    names = [*dict.fromkeys(local_name(op.op) for op in ops if op.layer is None)]
    if len(layers) == 1:
        inside = [*dict.fromkeys(local_name(op.op) for op in ops if op.layer is not None)]
        names.insert(0, f"layer {layers[0]} ({listed(inside, 3)})")
    elif layers:
        names.insert(0, f"{len(layers)} layers")
    return listed(names)
