"""Judging cut into tasks for several workers: runs of ops of a layer, sized by what they cost."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from math import prod

from tracediff.numerics.evaluate import is_covered
from tracediff.numerics.kinds import KINDS
from tracediff.replay.judging import layers
from tracediff.replay.replay import Replay

# A recorded value and a weight in multiplications, each for each token: what docs/scale.md has of them in seconds.
_VALUE, _WEIGHT = 770, 260
_EACH = 4  # tasks of a worker, at least: what the estimate is off by evens out


def tasks(replays: Sequence[Replay], n: int) -> list[tuple[str, ...]]:
    """The ops that have records, cut for so many workers: what costs most first, so that none waits for it at the end.

    A layer is one task, as long as there are several for each worker. An op is never cut.
    """
    costs = _costs(replays)
    most = sum(costs.values()) / (_EACH * n)
    cut = [part for ops in layers(replays) for part in _cut(ops, costs, most)]
    return sorted(cut, key=lambda ops: -sum(costs[name] for name in ops))


def _cut(ops: Sequence[str], costs: Mapping[str, float], most: float) -> list[tuple[str, ...]]:
    """In runs that end where they would become dearer than the `most` that one may cost."""
    ends = accumulate(costs[name] for name in ops)
    return [
        tuple(name for name, _ in run) for _, run in groupby(zip(ops, ends, strict=True), lambda one: one[1] // most)
    ]


def _costs(replays: Sequence[Replay]) -> dict[str, float]:
    """Of each op that has records: with it everything since the last one, from which it is recomputed."""
    n_tokens = sum(len(step.tokens) for replay in replays for step in replay.trace.steps.values())
    costs, since = {}, 0.0
    for op in replays[0].graph:
        if is_covered(op) and KINDS[op.kind].scheme == "linear":
            since += sum(prod(weight.shape) for weight in op.weights) * (_WEIGHT + n_tokens)
        records = [record for replay in replays for record in replay.records.get(op.name, ())]
        if records:
            costs[op.name] = since + _VALUE * sum(record.size for record in records)
            since = 0.0
    return costs
